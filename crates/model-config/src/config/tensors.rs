//! The tensors that a configuration lists, those that this backend adds to them, and the inputs of the model that no
//! request carries: controls, constants, and `generated_inputs`, which have counters, lengths and masks.

use std::fmt;
use std::str::FromStr;

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::parameters::{Parameters, with_axis};
use super::raw::{self, Result, bad, data_type, field};

/// The input and the output that carry a sequence's id, as OpenVINO Model Server names them.
pub const ID_TENSOR: &str = "sequence_id";
/// The input that starts and ends a sequence, as OpenVINO Model Server names it.
pub const CONTROL_INPUT: &str = "sequence_control_input";
/// In front of the name of a state, the name of its tensor in the State API.
pub const STATE_PREFIX: &str = "state.";
pub const STATE_SNAPSHOT: &str = "state_snapshot";
pub const STATE_INFO: &str = "state_info";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorConfig {
    pub name: String,
    pub data_type: DataType,
    /// Dimensions in the model (after `reshape`), without Triton's batch dimension; -1 is open.
    pub dims: Vec<i64>,
    pub optional: bool,
}

/// The tensors for ids and controls beside the model's. Only a model that this backend schedules itself has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakesIds {
    pub id: bool,
    pub control: bool,
    pub output: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateApiTensors {
    pub inputs: Vec<TensorConfig>,
    pub outputs: Vec<TensorConfig>,
}

/// Whether a tensor that is not the model's is one of the State API.
pub fn is_state_tensor(name: &str) -> bool {
    name.starts_with(STATE_PREFIX) || [STATE_SNAPSHOT, STATE_INFO].contains(&name)
}

#[derive(Clone, Debug, PartialEq)]
pub struct Control {
    pub name: String,
    pub kind: ControlKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ControlKind {
    Flag(Flag, FalseTrue),
    /// The sequence id, as this type.
    CorrelationId(DataType),
}

/// What a control tells the model of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    Start,
    End,
    /// It is a request and no padding.
    Ready,
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "START",
            Self::End => "END",
            Self::Ready => "READY",
        })
    }
}

impl fmt::Display for ControlKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag, FalseTrue { no, yes }) => {
                write!(f, "CONTROL_SEQUENCE_{flag}, {no} for no, {yes} for yes")
            }
            Self::CorrelationId(data_type) => write!(f, "CONTROL_SEQUENCE_CORRID, {data_type}"),
        }
    }
}

// The values of a boolean control have no type here, because the model may take another one than the configuration
// names: configurations for NVIDIA's stateful_backend write `int32_false_true` for a BOOL input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FalseTrue {
    pub no: f64,
    pub yes: f64,
}

pub(super) fn controls(raw: &[raw::ControlInput]) -> Result<Vec<Control>> {
    let all = raw.iter().flat_map(|input| input.control.iter().map(move |control| (&input.name, control)));
    all.map(|(name, control)| Ok(Control { name: name.clone(), kind: control_kind(name, control)? })).collect()
}

fn control_kind(name: &str, control: &raw::Control) -> Result<ControlKind> {
    let path = format!("control_input '{name}'");
    let flag = match control.kind.as_str() {
        "CONTROL_SEQUENCE_START" => Flag::Start,
        "CONTROL_SEQUENCE_END" => Flag::End,
        "CONTROL_SEQUENCE_READY" => Flag::Ready,
        "CONTROL_SEQUENCE_CORRID" => return Ok(ControlKind::CorrelationId(data_type(&path, &control.data_type)?)),
        other => return Err(field(path, other, "CONTROL_SEQUENCE_START, _END, _READY or _CORRID is expected")),
    };
    let raw::Control { int32_false_true: whole, fp32_false_true: real, bool_false_true: bools, .. } = control;
    let (no, yes) = match (whole.as_slice(), real.as_slice(), bools.as_slice()) {
        (&[no, yes], [], []) => (f64::from(no), f64::from(yes)),
        ([], &[no, yes], []) => (as_written(no), as_written(yes)),
        ([], [], &[no, yes]) => (f64::from(no), f64::from(yes)),
        _ => {
            let allowed = "one of int32_false_true, fp32_false_true and bool_false_true with two values is expected";
            return Err(field(path, &control.kind, allowed));
        }
    };
    Ok(ControlKind::Flag(flag, FalseTrue { no, yes }))
}

// The number as config.pbtxt has it. A cast of 0.2 from f32 to f64 would give 0.20000000298.
fn as_written(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

pub(super) fn tensors(list: &str, raw: Vec<raw::Tensor>) -> Result<Vec<TensorConfig>> {
    let mut tensors: Vec<TensorConfig> = Vec::with_capacity(raw.len());
    for tensor in raw {
        let data_type = data_type(&format!("{list} '{}'.data_type", tensor.name), &tensor.data_type)?;
        // Core reshapes requests and responses, so the backend sees only the shapes of the model.
        let dims = tensor.reshape.map_or(tensor.dims, |reshape| reshape.shape);
        if tensors.iter().any(|known| known.name == tensor.name) {
            return Err(field(format!("{list} '{}'", tensor.name), "given twice", "a name may stand there once only"));
        }
        let (name, optional) = (tensor.name, tensor.optional);
        tensors.push(TensorConfig { name, data_type, dims: raw::dims(&dims), optional });
    }
    Ok(tensors)
}

/// Takes a tensor out of a list, unless it is the model's. Returns whether it was there.
pub(super) fn take_tensor(
    list: &str,
    tensors: &mut Vec<TensorConfig>,
    of_model: &[&str],
    wanted: &TensorConfig,
) -> Result<bool> {
    let name = wanted.name.as_str();
    let Some(at) = tensors.iter().position(|tensor| tensor.name == name && !of_model.contains(&name)) else {
        return Ok(false);
    };
    let TensorConfig { data_type, dims, .. } = tensors.remove(at);
    if (data_type, &dims) != (wanted.data_type, &wanted.dims) {
        let allowed = format!("a sequence's id or control is {} {}", wanted.data_type, Dims(&wanted.dims));
        return Err(field(format!("{list} '{name}'"), format!("{data_type} {}", Dims(&dims)), allowed));
    }
    Ok(true)
}

/// Adds tensors to `input` or `output` of the document; those for ids and controls stay behind the others.
pub(super) fn add_tensors(list: &mut Value, tensors: &[TensorConfig]) {
    if tensors.is_empty() {
        return;
    }
    let mut listed = list.as_array().cloned().unwrap_or_default();
    listed.extend(tensors.iter().map(TensorConfig::to_json));
    listed.sort_by_key(|tensor| [ID_TENSOR, CONTROL_INPUT].iter().any(|name| tensor["name"] == *name));
    *list = Value::Array(listed);
}

impl TensorConfig {
    fn to_json(&self) -> Value {
        let mut json = json!({ "name": self.name, "data_type": self.data_type.to_string(), "dims": self.dims });
        if self.optional {
            json["optional"] = json!(true);
        }
        if self.dims.is_empty() {
            // Triton has no tensors without dims.
            json["dims"] = json!([1]);
            json["reshape"] = json!({ "shape": [] });
        }
        json
    }
}

/// Reads `constant_inputs`: a value is one number, `true`, `false`, or a list of them.
pub(super) fn constant_inputs(parameters: &Parameters) -> Result<Vec<(String, Vec<String>)>> {
    const FORM: &str = "'name=value' or 'name=[value, value]', separated by spaces or commas, is expected";
    // The values stay text, because only the model says their data type.
    parameters.assigned("constant_inputs", FORM, None, |name, value| Ok((name, value.values(FORM)?)))
}

/// An input that no request carries, because its values follow from the sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedInput {
    pub input: String,
    pub kind: GeneratedKind,
    /// Each number is multiplied with this, and `addend` is added; of [`GeneratedKind::Last`], the number of ones. A
    /// mask has neither.
    pub factor: i64,
    pub addend: i64,
    /// The entry's right side, for messages.
    pub written: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GeneratedKind {
    /// One number.
    Count(NamedCounter),
    /// A value for each element of this input: how many elements the sequence has had before it.
    Positions(NamedAxis),
    /// The length of this state before the run.
    Length(NamedAxis),
    /// 1 for each element of the state, then 1 for each new element.
    Mask { state: NamedAxis, new: NewElements },
    /// As many ones as are counted, at the end of `length` elements, and 0 in front of them. Without `length`, there
    /// are as many elements as the model's input has.
    Last { count: NamedCounter, length: Option<u32> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedCounter {
    Steps,
    /// How many elements of this input it has had before the request.
    Elements(NamedAxis),
}

/// The elements that an inference adds to a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewElements {
    Number(u32),
    Of(NamedAxis),
}

/// A tensor of the model, and perhaps an axis of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAxis {
    pub name: String,
    pub axis: Option<usize>,
}

pub const GENERATED_INPUTS: &str = "generated_inputs";
const GENERATED_FORM: &str = "'INPUT=steps', 'INPUT=elements(OTHER)', 'INPUT=positions(OTHER)', 'INPUT=length(STATE)', \
                    'INPUT=mask(STATE, OTHER)' or 'INPUT=last(steps, LENGTH)', separated by spaces or commas, is expected";

pub(super) fn generated_inputs(parameters: &Parameters) -> Result<Vec<GeneratedInput>> {
    let Some(text) = parameters.text(GENERATED_INPUTS) else { return Ok(Vec::new()) };
    let mut generated: Vec<GeneratedInput> = Vec::new();
    for entry in entries(text) {
        let entry = GeneratedInput::parse(entry).map_err(|why| bad(GENERATED_INPUTS, text, why))?;
        if generated.iter().any(|known| known.input == entry.input) {
            return Err(bad(GENERATED_INPUTS, text, format!("'{}' may be given once only", entry.input)));
        }
        generated.push(entry);
    }
    if generated.is_empty() { Err(bad(GENERATED_INPUTS, text, GENERATED_FORM)) } else { Ok(generated) }
}

/// The entries of a list, which spaces and commas separate, except within parentheses.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    // Spaces and commas also separate the arguments of a call.
    let mut depth = 0_usize;
    let separates = move |letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && (letter == ',' || letter.is_whitespace())
    };
    text.split(separates).filter(|entry| !entry.is_empty())
}

impl GeneratedInput {
    fn parse(entry: &str) -> Result<Self, String> {
        let (input, written) = entry.split_once('=').ok_or(GENERATED_FORM)?;
        if input.is_empty() || written.is_empty() {
            return Err(GENERATED_FORM.to_owned());
        }
        let last = written.strip_prefix("last(");
        let (kind, factor, addend) = last.map_or_else(|| numbers(written), last_ones)?;
        Ok(Self { input: input.to_owned(), kind, factor, addend, written: written.to_owned() })
    }
}

fn numbers(written: &str) -> Result<(GeneratedKind, i64, i64), String> {
    // A name within the parentheses may have '*' and '+', so the factor and the addend are looked for behind them.
    let call = written.find(')').map_or_else(|| written.find(['*', '+']), |close| Some(close + 1));
    let (call, behind) = written.split_at(call.unwrap_or(written.len()));
    let kind = GeneratedKind::parse(call)?;
    let (factor, addend) = factor_and_addend(behind)
        .ok_or_else(|| format!("'{behind}' follows '{call}': '*FACTOR', '+ADDEND' or both, is expected"))?;
    if matches!(kind, GeneratedKind::Mask { .. }) && !behind.is_empty() {
        return Err(format!("'{behind}' follows '{call}', but a mask has no factor and no addend"));
    }
    Ok((kind, factor, addend))
}

/// Reads what follows `last(`.
fn last_ones(behind: &str) -> Result<(GeneratedKind, i64, i64), String> {
    let arguments = behind.strip_suffix(')').ok_or_else(|| {
        format!("'last({behind}' does not end with ')': '*FACTOR' and '+ADDEND' stand within the parentheses of 'last'")
    })?;
    let (ones, length) =
        arguments.split_once(',').map_or((arguments, None), |(ones, length)| (ones, Some(length.trim())));
    let number = |text: &str| {
        let most = u32::MAX;
        whole_number(text).ok_or_else(|| format!("'{text}' is no length: a whole number up to {most} is expected"))
    };
    let length = length.map(number).transpose()?;
    match numbers(ones.trim())? {
        (GeneratedKind::Count(count), factor, addend) => Ok((GeneratedKind::Last { count, length }, factor, addend)),
        _ => Err(format!("'{ones}' is no number of 'last': 'steps' or 'elements(OTHER)' is expected")),
    }
}

impl GeneratedKind {
    fn parse(call: &str) -> Result<Self, String> {
        let (kind, arguments) = match call.split_once('(') {
            None => (call, Vec::new()),
            Some((kind, arguments)) => {
                let inner =
                    arguments.strip_suffix(')').ok_or_else(|| format!("'{call}' has no ')': {GENERATED_FORM}"))?;
                (kind, inner.split(',').map(NamedAxis::parse).collect::<Result<_, _>>()?)
            }
        };
        match (kind, arguments.as_slice()) {
            ("steps", []) => Ok(Self::Count(NamedCounter::Steps)),
            ("elements", [of]) => Ok(Self::Count(NamedCounter::Elements(of.clone()))),
            ("positions", [of]) => Ok(Self::Positions(of.clone())),
            ("length", [of]) => Ok(Self::Length(of.clone())),
            ("mask", [state]) => Ok(Self::Mask { state: state.clone(), new: NewElements::Number(0) }),
            ("mask", [state, new]) => {
                // Digits alone are a number. An input that has digits as its name is written with its axis.
                let number = whole_number(&new.name).filter(|_| new.axis.is_none());
                let new = number.map_or_else(|| NewElements::Of(new.clone()), NewElements::Number);
                Ok(Self::Mask { state: state.clone(), new })
            }
            ("steps" | "elements" | "positions" | "length" | "mask" | "last", _) => {
                Err(format!("'{kind}' takes other arguments than '{call}' has: {GENERATED_FORM}"))
            }
            _ => Err(format!("'{kind}' is no kind of value: {GENERATED_FORM}")),
        }
    }
}

impl NamedAxis {
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (name, axis) = with_axis(text)?;
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(format!("'{text}' is no name: {GENERATED_FORM}"));
        }
        Ok(Self { name: name.to_owned(), axis })
    }
}

impl fmt::Display for NamedAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.axis.map_or(Ok(()), |axis| write!(f, "@{axis}"))
    }
}

/// Reads `*FACTOR+ADDEND`. Either part may be missing.
fn factor_and_addend(text: &str) -> Option<(i64, i64)> {
    let (factor, addend) = match text.split_once('+') {
        None => (text, 0),
        Some((factor, addend)) => (factor, whole_number(addend)?),
    };
    let factor = if factor.is_empty() { 1 } else { whole_number(factor.strip_prefix('*')?)? };
    Some((factor, addend))
}

fn whole_number<T: FromStr>(digits: &str) -> Option<T> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn constants_are_numbers_or_lists() {
        let list = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect::<Vec<_>>();
        let expected = vec![("sr".to_owned(), list(&["16000"])), ("l".to_owned(), list(&["1", "2"]))];
        let constants =
            |text| Config::with_parameters(&[("constant_inputs", text)]).map(|config| config.constants.clone());
        assert_eq!(constants("sr=16000, l=[1, 2]").unwrap(), expected);
        assert_eq!(constants(" sr = 16000 l=[1,2] ").unwrap(), expected);
        for text in ["sr", "=1", "sr=", "l=[1", "l=[]", "a=1 a=2", "a b=1"] {
            assert!(constants(text).is_err(), "{text}");
        }
    }

    fn read(text: &str) -> Result<Vec<GeneratedInput>> {
        Config::with_parameters(&[(GENERATED_INPUTS, text)]).map(|config| config.written.generated)
    }

    fn named(name: &str, axis: Option<usize>) -> NamedAxis {
        NamedAxis { name: name.to_owned(), axis }
    }

    #[test]
    fn what_is_written_is_read() {
        let text = "offset=steps*16+64 position_ids=positions(input_ids@1),lens=length(att_cache)+1, \
                    seen=elements( x )*3 n=steps mask=mask(past_key_values.0.key@2, input_ids)\n m2=mask(k) \
                    m3=mask(k,16) m4=mask(k, 16@1) l1=last(steps*16+16) l2=last( elements(x@1)+3, 80 )";
        let read = read(text).unwrap();
        let kinds: Vec<_> = read.iter().map(|of| (of.input.as_str(), of.kind.clone(), of.factor, of.addend)).collect();
        let mask = |state, new| GeneratedKind::Mask { state, new };
        let input_ids = NewElements::Of(named("input_ids", None));
        let count = GeneratedKind::Count;
        let last = |count, length| GeneratedKind::Last { count, length };
        assert_eq!(
            kinds,
            [
                ("offset", count(NamedCounter::Steps), 16, 64),
                ("position_ids", GeneratedKind::Positions(named("input_ids", Some(1))), 1, 0),
                ("lens", GeneratedKind::Length(named("att_cache", None)), 1, 1),
                ("seen", count(NamedCounter::Elements(named("x", None))), 3, 0),
                ("n", count(NamedCounter::Steps), 1, 0),
                ("mask", mask(named("past_key_values.0.key", Some(2)), input_ids), 1, 0),
                ("m2", mask(named("k", None), NewElements::Number(0)), 1, 0),
                ("m3", mask(named("k", None), NewElements::Number(16)), 1, 0),
                ("m4", mask(named("k", None), NewElements::Of(named("16", Some(1)))), 1, 0),
                ("l1", last(NamedCounter::Steps, None), 16, 16),
                ("l2", last(NamedCounter::Elements(named("x", Some(1))), Some(80)), 1, 3),
            ]
        );
        assert_eq!(read[0].written, "steps*16+64");
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_value_and_the_reason() {
        for (text, word) in [
            ("", "INPUT=steps"),
            ("offset", "INPUT=steps"),
            ("=steps", "INPUT=steps"),
            ("offset=", "INPUT=steps"),
            ("offset=counter", "'counter' is no kind"),
            ("offset=counter(x)", "'counter' is no kind"),
            ("offset=steps(x)", "'steps' takes other arguments than 'steps(x)'"),
            ("offset=steps()", "'' is no name"),
            ("offset=elements", "'elements' takes other arguments than 'elements'"),
            ("offset=elements(x, y)", "'elements' takes other arguments than 'elements(x, y)'"),
            ("offset=mask(a, b, c)", "'mask' takes other arguments than 'mask(a, b, c)'"),
            ("offset=elements(x", "no ')'"),
            ("offset=elements()", "'' is no name"),
            ("offset=elements(x y)", "'x y' is no name"),
            ("offset=elements(x@y)", "'y' is no axis"),
            ("offset=elements(x@-1)", "'-1' is no axis"),
            ("offset=steps*", "'*' follows"),
            ("offset=steps*x", "'*x' follows"),
            ("offset=steps*-1", "'*-1' follows"),
            ("offset=steps+1*2", "'+1*2' follows"),
            ("offset=steps*99999999999999999999", "follows"),
            ("offset=elements(x)y", "'y' follows"),
            ("m=mask(k, x)*2", "a mask has no factor"),
            ("m=last", "'last' takes other arguments than 'last'"),
            ("m=last(steps", "'last(steps' does not end with ')'"),
            ("m=last(steps)*16", "'last(steps)*16' does not end with ')': '*FACTOR'"),
            ("m=last(steps*x)", "'*x' follows"),
            ("m=last(counter)", "'counter' is no kind"),
            ("m=last(length(k))", "'length(k)' is no number of 'last'"),
            ("m=last(mask(k, x))", "'x)' is no length"),
            ("m=last()", "'' is no kind"),
            ("m=last(steps, x)", "'x' is no length"),
            ("m=last(steps, )", "'' is no length"),
            ("m=last(steps, 80, 80)", "'80, 80' is no length"),
            ("m=last(steps, 4294967296)", "'4294967296' is no length"),
            ("offset=steps offset=steps", "'offset' may be given once only"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!([GENERATED_INPUTS, text, word].iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }
}
