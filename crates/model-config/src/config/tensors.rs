//! The tensors that a configuration lists: those of the model, those that this backend adds to them, and controls. And what
//! the inputs of the model get beside what requests carry: constants, contexts, and padding for rows of different lengths.

use std::fmt;

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::parameters::{Parameters, parameter_line, with_axis};
use super::raw::{self, Result, data_type, field};

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

// The values of a boolean control have no type here, because the model may take another one than the configuration names:
// configurations for NVIDIA's stateful_backend write `int32_false_true` for a BOOL input.
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

/// An input that gets the end of the sequence's previous input in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    pub input: String,
    /// Elements of the previous input, along the axis.
    pub length: usize,
    /// Elements behind them that the model's window has, if they are written.
    pub new: Option<usize>,
    /// The axis in the model, if it is written.
    pub axis: Option<usize>,
    pub first: FirstRequest,
}

/// What the first inference of a sequence has in front, where no request has left a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstRequest {
    #[default]
    Zeros,
    /// The first element of the request, as often as the context is long.
    Repeat,
    /// Nothing: the request carries the whole window, and later ones what is new in it.
    Whole,
}

const FIRST: [(&str, FirstRequest); 3] =
    [("zeros", FirstRequest::Zeros), ("repeat", FirstRequest::Repeat), ("whole", FirstRequest::Whole)];

/// An input whose rows are filled up to one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedInput {
    pub input: String,
    /// The input that takes each row's own length.
    pub lengths: String,
    pub axis: Option<usize>,
}

/// An output of a padded run. Each row's response gets the part that belongs to the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedOutput {
    pub output: String,
    /// The output that gives the length of each row's part; `None` if a row has all of it.
    pub lengths: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ragged {
    pub inputs: Vec<PaddedInput>,
    pub outputs: Vec<PaddedOutput>,
}

const CONTEXT: &str = "input_context";

pub(super) fn contexts(parameters: &Parameters) -> Result<Vec<Context>> {
    const FORM: &str = "'input=elements', then '+new_elements', '@axis' and ':zeros', ':repeat' or ':whole' if needed, \
                        separated by spaces or commas, is expected";
    parameters.assigned(CONTEXT, FORM, None, |input, value| {
        let value = value.one(FORM)?;
        let (value, first) = match value.rsplit_once(':') {
            None => (value.as_str(), FirstRequest::default()),
            Some((value, word)) => {
                let first = FIRST.iter().find(|(known, _)| *known == word);
                let none = || format!("'{word}' is none of 'zeros', 'repeat', 'whole'; {FORM}");
                (value, first.ok_or_else(none)?.1)
            }
        };
        let (value, axis) = with_axis(value).map_err(|why| format!("{why}; {FORM}"))?;
        let elements = |number: &str| match number.parse::<u32>() {
            Ok(0) | Err(_) => Err(format!("'{input}' has '{number}' elements: 1 or more are expected; {FORM}")),
            Ok(elements) => Ok(elements as usize),
        };
        let (length, new) = match value.split_once('+') {
            Some((length, new)) => (elements(length)?, Some(elements(new)?)),
            None => (elements(value)?, None),
        };
        Ok(Context { input, length, new, axis, first })
    })
}

/// Reads `constant_inputs`: a value is one number, `true`, `false`, or a list of them.
pub(super) fn constant_inputs(parameters: &Parameters) -> Result<Vec<(String, Vec<String>)>> {
    const FORM: &str = "'name=value' or 'name=[value, value]', separated by spaces or commas, is expected";
    // The values stay text, because only the model says their data type.
    parameters.assigned("constant_inputs", FORM, None, |name, value| Ok((name, value.values(FORM)?)))
}

/// The line of config.pbtxt that gives the context of `input` this axis and leaves the others as they are.
pub fn context_line(contexts: &[Context], input: &str, axis: usize) -> String {
    let written = |context: &Context| {
        let axis = if context.input == input { Some(axis) } else { context.axis };
        Context { axis, ..context.clone() }.to_string()
    };
    parameter_line(CONTEXT, &contexts.iter().map(written).collect::<Vec<_>>().join(" "))
}

impl Context {
    /// The model's window along a dimension of the model: -1 for any length.
    pub fn window(&self, dim: i64) -> i64 {
        self.new.filter(|_| dim < 0).map_or(dim, |new| (self.length + new) as i64)
    }

    /// What clients send along a dimension of the model: -1 for different lengths, `None` if the context cannot stand
    /// along it.
    pub fn sent(&self, dim: i64) -> Option<i64> {
        let window = self.window(dim);
        // The model takes any length, so requests may bring any.
        if window < 0 {
            return Some(-1);
        }
        let new = window - self.length as i64;
        let fits = self.new.map_or(new > 0, |written| written as i64 == new);
        fits.then_some(if self.first == FirstRequest::Whole { -1 } else { new })
    }

    /// Which dimension of the model it can stand along.
    pub fn wanted(&self) -> String {
        match self.new {
            Some(new) => format!("{}, or open", self.length + new),
            None => format!("longer than {}", self.length),
        }
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.input, self.length)?;
        if let Some(new) = self.new {
            write!(f, "+{new}")?;
        }
        if let Some(axis) = self.axis {
            write!(f, "@{axis}")?;
        }
        match FIRST.iter().find(|(_, first)| *first == self.first && *first != FirstRequest::Zeros) {
            Some((word, _)) => write!(f, ":{word}"),
            None => Ok(()),
        }
    }
}

impl Ragged {
    pub(super) fn new(parameters: &Parameters) -> Result<Self> {
        const OUTPUTS: &str = "padded_outputs";
        const INPUT_FORM: &str =
            "'input=lengths_input' or 'input=lengths_input@axis', separated by spaces or commas, is expected";
        const OUTPUT_FORM: &str = "'output=lengths_output' or 'output=all', separated by spaces or commas, is expected";
        let inputs = parameters.assigned("padded_inputs", INPUT_FORM, None, |input, value| {
            let value = value.one(INPUT_FORM)?;
            let (lengths, axis) = with_axis(&value).map_err(|why| format!("{why}; {INPUT_FORM}"))?;
            Ok(PaddedInput { input, lengths: lengths.to_owned(), axis })
        })?;
        let outputs = parameters.assigned(OUTPUTS, OUTPUT_FORM, None, |output, value| {
            Ok(PaddedOutput { output, lengths: Some(value.one(OUTPUT_FORM)?).filter(|name| name != "all") })
        })?;
        if inputs.is_empty() && !outputs.is_empty() {
            parameters.refuse(OUTPUTS, "it needs 'padded_inputs'")?;
        }
        Ok(Self { inputs, outputs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn what_is_written_is_read() {
        let config = Config::with_parameters(&[
            ("input_context", "audio=64 features=7@1 x=13+32@1:whole, z=2:repeat w=2@0:zeros"),
            ("padded_inputs", "audio=len, features=flen@1"),
            ("padded_outputs", "y=ylen z=all"),
            ("warmup_batch_sizes", "1, 4"),
        ]);
        let config = config.unwrap();
        let context =
            |input: &str, length, axis, first| Context { input: input.to_owned(), length, new: None, axis, first };
        let expected = [
            context("audio", 64, None, FirstRequest::Zeros),
            context("features", 7, Some(1), FirstRequest::Zeros),
            Context { new: Some(32), ..context("x", 13, Some(1), FirstRequest::Whole) },
            context("z", 2, None, FirstRequest::Repeat),
            context("w", 2, Some(0), FirstRequest::Zeros),
        ];
        assert_eq!(config.contexts, expected);
        let written: Vec<String> = expected.iter().map(Context::to_string).collect();
        assert_eq!(written.join(" "), "audio=64 features=7@1 x=13+32@1:whole z=2:repeat w=2@0");
        assert_eq!(config.ragged.inputs[1].lengths, "flen");
        assert_eq!((config.ragged.inputs[0].axis, config.ragged.inputs[1].axis), (None, Some(1)));
        assert_eq!(config.ragged.outputs[0].lengths.as_deref(), Some("ylen"));
        assert_eq!(config.ragged.outputs[1].lengths, None);
        assert_eq!(config.warmup_batch_sizes, [1, 4]);
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_parameter_and_the_value() {
        for (name, value, word) in [
            ("input_context", "audio", "input=elements"),
            ("input_context", "audio=0", "1 or more"),
            ("input_context", "audio=-3", "1 or more"),
            ("input_context", "audio=3+", "'audio' has '' elements: 1 or more"),
            ("input_context", "audio=3+0@1", "'audio' has '0' elements: 1 or more"),
            ("input_context", "audio=3@1+2", "'1+2' is no axis"),
            ("input_context", "audio=[1]", "input=elements"),
            ("input_context", "audio=3@x", "'x' is no axis"),
            ("input_context", "audio=3:all", "'all' is none of 'zeros', 'repeat', 'whole'"),
            ("input_context", "audio=3:whole@1", "'whole@1' is none of"),
            ("input_context", "audio=3 audio=4", "once only"),
            ("padded_inputs", "audio", "lengths_input"),
            ("padded_inputs", "audio=len@-1", "'-1' is no axis"),
            ("padded_outputs", "y=all", "'padded_inputs'"),
            ("warmup_batch_sizes", "0", "from 1 to 4"),
            ("warmup_batch_sizes", "1, 5", "'5'"),
            ("warmup_batch_sizes", "x", "'x'"),
        ] {
            let error = Config::with_parameters(&[(name, value)]).unwrap_err().to_string();
            assert!([name, value, word].iter().all(|part| error.contains(part)), "{error}");
        }
    }

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
}
