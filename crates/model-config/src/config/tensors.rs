//! The tensors that a configuration lists: those of the model, those that this backend adds to them, and controls. And what
//! the inputs of the model get beside what requests carry: constants, contexts, and padding for rows of different lengths.

use std::fmt;

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::error::{ConfigError, bad, field};
use super::parameters::{self, Assigned, Parameters, parameter_line};
use super::raw::{self, data_type};

/// The input and the output that carry a sequence's id, as OpenVINO Model Server names them.
pub const ID_TENSOR: &str = "sequence_id";
/// The input that starts and ends a sequence, as OpenVINO Model Server names it.
pub const CONTROL_INPUT: &str = "sequence_control_input";
/// In front of the name of a state, the name of its tensor in the State API.
pub const STATE_PREFIX: &str = "state.";
/// The tensor with a snapshot of a sequence.
pub const STATE_SNAPSHOT: &str = "state_snapshot";
/// The output that describes the states of a sequence.
pub const STATE_INFO: &str = "state_info";

/// An entry of `input` or `output`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the other names say it")]
pub struct TensorConfig {
    /// Name in the model and in requests.
    pub name: String,
    pub data_type: DataType,
    /// Dimensions in the model (after `reshape`), without Triton's batch dimension; -1 is open.
    pub dims: Vec<i64>,
    pub optional: bool,
}

/// The tensors for ids and controls beside the model's. Only a model that this backend schedules itself has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakesIds {
    /// Input [`ID_TENSOR`].
    pub id: bool,
    /// Input [`CONTROL_INPUT`].
    pub control: bool,
    /// Output [`ID_TENSOR`].
    pub output: bool,
}

/// The tensors of the State API that a configuration lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateApiTensors {
    pub inputs: Vec<TensorConfig>,
    pub outputs: Vec<TensorConfig>,
}

/// Whether a tensor that is not the model's is one of the State API.
pub fn is_state_tensor(name: &str) -> bool {
    name.starts_with(STATE_PREFIX) || [STATE_SNAPSHOT, STATE_INFO].contains(&name)
}

/// A `control_input` that the model may take.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Control {
    pub name: String,
    pub kind: ControlKind,
}

/// What a control input says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ControlKind {
    /// The request starts a sequence.
    Start(FalseTrue),
    /// The request ends its sequence.
    End(FalseTrue),
    /// The row carries a request and is no padding.
    Ready(FalseTrue),
    /// The sequence id, as this type.
    CorrelationId(DataType),
}

impl fmt::Display for ControlKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(values) => write!(f, "CONTROL_SEQUENCE_START, {values}"),
            Self::End(values) => write!(f, "CONTROL_SEQUENCE_END, {values}"),
            Self::Ready(values) => write!(f, "CONTROL_SEQUENCE_READY, {values}"),
            Self::CorrelationId(data_type) => write!(f, "CONTROL_SEQUENCE_CORRID, {data_type}"),
        }
    }
}

/// The two values of a boolean control. The model may take another type than the configuration names, as in
/// configurations for NVIDIA's stateful_backend, which write `int32_false_true` for a BOOL input.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct FalseTrue {
    pub no: f64,
    pub yes: f64,
}

impl fmt::Display for FalseTrue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for no, {} for yes", self.no, self.yes)
    }
}

pub(super) fn controls(raw: &[raw::ControlInput]) -> Result<Vec<Control>, ConfigError> {
    let mut controls = Vec::new();
    for input in raw {
        for control in &input.control {
            controls.push(Control { name: input.name.clone(), kind: control_kind(&input.name, control)? });
        }
    }
    Ok(controls)
}

fn control_kind(name: &str, control: &raw::Control) -> Result<ControlKind, ConfigError> {
    let path = format!("control_input '{name}'");
    match control.kind.as_str() {
        "CONTROL_SEQUENCE_START" => Ok(ControlKind::Start(false_true(&path, control)?)),
        "CONTROL_SEQUENCE_END" => Ok(ControlKind::End(false_true(&path, control)?)),
        "CONTROL_SEQUENCE_READY" => Ok(ControlKind::Ready(false_true(&path, control)?)),
        "CONTROL_SEQUENCE_CORRID" => Ok(ControlKind::CorrelationId(data_type(&path, &control.data_type)?)),
        other => Err(field(path, other, "CONTROL_SEQUENCE_START, _END, _READY or _CORRID is expected")),
    }
}

fn false_true(path: &str, control: &raw::Control) -> Result<FalseTrue, ConfigError> {
    match (control.int32_false_true.as_slice(), control.fp32_false_true.as_slice(), control.bool_false_true.as_slice())
    {
        ([no, yes], [], []) => Ok(FalseTrue { no: f64::from(*no), yes: f64::from(*yes) }),
        ([], [no, yes], []) => Ok(FalseTrue { no: as_written(*no), yes: as_written(*yes) }),
        ([], [], [no, yes]) => Ok(FalseTrue { no: f64::from(*no), yes: f64::from(*yes) }),
        _ => Err(field(
            path,
            &control.kind,
            "one of int32_false_true, fp32_false_true and bool_false_true with two values is expected",
        )),
    }
}

/// The number as config.pbtxt has it. A cast of 0.2 from f32 to f64 would give 0.20000000298.
fn as_written(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

pub(super) fn tensors(list: &str, raw: Vec<raw::Tensor>) -> Result<Vec<TensorConfig>, ConfigError> {
    let mut tensors: Vec<TensorConfig> = Vec::with_capacity(raw.len());
    for tensor in raw {
        let data_type = data_type(&format!("{list} '{}'.data_type", tensor.name), &tensor.data_type)?;
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
) -> Result<bool, ConfigError> {
    let name = wanted.name.as_str();
    let Some(at) = tensors.iter().position(|tensor| tensor.name == name && !of_model.contains(&name)) else {
        return Ok(false);
    };
    let TensorConfig { data_type, dims, .. } = tensors.remove(at);
    if (data_type, &dims) != (wanted.data_type, &wanted.dims) {
        return Err(field(
            format!("{list} '{name}'"),
            format!("{data_type} {}", Dims(&dims)),
            format!("a sequence's id or control is {} {}", wanted.data_type, Dims(&wanted.dims)),
        ));
    }
    Ok(true)
}

/// Adds tensors to `input` or `output` of the document; those for ids and controls stay behind the others.
pub(super) fn add_tensors(list: &mut Value, tensors: &[TensorConfig]) {
    if let Value::Array(listed) = list {
        listed.extend(tensors.iter().map(TensorConfig::to_json));
        listed.sort_by_key(|tensor| [ID_TENSOR, CONTROL_INPUT].iter().any(|name| tensor["name"] == *name));
    } else {
        *list = tensors.iter().map(TensorConfig::to_json).collect();
    }
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
    /// Name of the input.
    pub input: String,
    /// Elements of the previous input, along the axis.
    pub length: usize,
    /// Elements behind them that the model's window has, if they are written.
    pub new: Option<usize>,
    /// The axis in the model, if it is written.
    pub axis: Option<usize>,
    /// What the first inference has in front.
    pub first: FirstRequest,
}

/// What the first inference of a sequence has in front, where no request has left a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstRequest {
    #[default]
    /// Zeros.
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
    /// Name of the input.
    pub input: String,
    /// Name of the input that takes each row's own length.
    pub lengths: String,
    /// The axis in the model, if it is written.
    pub axis: Option<usize>,
}

/// An output of a padded run. Each row's response gets the part that belongs to the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedOutput {
    /// Name of the output.
    pub output: String,
    /// Name of the output that gives the length of each row's part; `None` if a row has all of it.
    pub lengths: Option<String>,
}

/// `padded_inputs` and `padded_outputs`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ragged {
    /// Inputs whose rows are filled up to one length.
    pub inputs: Vec<PaddedInput>,
    /// Outputs whose part for each row is configured.
    pub outputs: Vec<PaddedOutput>,
}

const ALL: &str = "all";
const CONTEXT: &str = "input_context";

pub(super) fn contexts(parameters: &Parameters) -> Result<Vec<Context>, ConfigError> {
    const FORM: &str = "'input=elements', then '+new_elements', '@axis' and ':zeros', ':repeat' or ':whole' if needed, \
                        separated by spaces or commas, is expected";
    let Some(text) = parameters.text(CONTEXT) else { return Ok(Vec::new()) };
    let context = |(input, value)| {
        let (value, first) = with_first(text, FORM, value)?;
        let (value, axis) = with_axis(CONTEXT, text, FORM, value)?;
        let elements = |number: &str| match number.parse::<u32>() {
            Ok(0) | Err(_) => {
                Err(bad(CONTEXT, text, format!("'{input}' has '{number}' elements: 1 or more are expected; {FORM}")))
            }
            Ok(elements) => Ok(elements as usize),
        };
        let (length, new) = match value.split_once('+') {
            Some((length, new)) => (elements(length)?, Some(elements(new)?)),
            None => (elements(&value)?, None),
        };
        Ok(Context { input, length, new, axis, first })
    };
    parameters::assignments(CONTEXT, text, FORM)?.into_iter().map(context).collect()
}

/// Reads `constant_inputs`: a value is one number, `true`, `false`, or a list of them. They stay text, because only the
/// model says their data type.
pub(super) fn constant_inputs(text: &str) -> Result<Vec<(String, Vec<String>)>, ConfigError> {
    const FORM: &str = "'name=value' or 'name=[value, value]', separated by spaces or commas, is expected";
    let values = |value| match value {
        Assigned::One(value) => vec![value],
        Assigned::List(values) => values,
    };
    let assigned = parameters::assignments("constant_inputs", text, FORM)?;
    let constants: Vec<_> = assigned.into_iter().map(|(name, value)| (name, values(value))).collect();
    let is_empty = constants.iter().any(|(_, values)| values.is_empty());
    if is_empty { Err(bad("constant_inputs", text, FORM)) } else { Ok(constants) }
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
    pub(super) fn new(parameters: &Parameters) -> Result<Self, ConfigError> {
        const INPUTS: &str = "padded_inputs";
        const OUTPUTS: &str = "padded_outputs";
        const INPUT_FORM: &str =
            "'input=lengths_input' or 'input=lengths_input@axis', separated by spaces or commas, is expected";
        const OUTPUT_FORM: &str = "'output=lengths_output' or 'output=all', separated by spaces or commas, is expected";
        let assignments = |name, form| {
            let text = parameters.text(name).unwrap_or_default();
            parameters::assignments(name, text, form).map(|written| (text, written))
        };
        let (text, written) = assignments(INPUTS, INPUT_FORM)?;
        let input = |(input, value)| {
            let (lengths, axis) = with_axis(INPUTS, text, INPUT_FORM, value)?;
            Ok::<_, ConfigError>(PaddedInput { input, lengths, axis })
        };
        let inputs: Vec<_> = written.into_iter().map(input).collect::<Result<_, _>>()?;
        let (text, written) = assignments(OUTPUTS, OUTPUT_FORM)?;
        let output = |(output, value)| match value {
            Assigned::List(_) => Err(bad(OUTPUTS, text, OUTPUT_FORM)),
            Assigned::One(lengths) => Ok(PaddedOutput { output, lengths: Some(lengths).filter(|name| name != ALL) }),
        };
        let outputs: Vec<_> = written.into_iter().map(output).collect::<Result<_, _>>()?;
        if inputs.is_empty() && !outputs.is_empty() {
            return Err(bad(OUTPUTS, text, "it needs 'padded_inputs'"));
        }
        Ok(Self { inputs, outputs })
    }
}

/// Splits `value:first`.
fn with_first(text: &str, form: &str, value: Assigned) -> Result<(Assigned, FirstRequest), ConfigError> {
    let Assigned::One(value) = value else { return Err(bad(CONTEXT, text, form)) };
    let Some((value, word)) = value.rsplit_once(':') else {
        return Ok((Assigned::One(value), FirstRequest::default()));
    };
    match FIRST.iter().find(|(known, _)| *known == word) {
        Some((_, first)) => Ok((Assigned::One(value.to_owned()), *first)),
        None => Err(bad(CONTEXT, text, format!("'{word}' is none of 'zeros', 'repeat', 'whole'; {form}"))),
    }
}

/// Splits `value@axis`.
fn with_axis(
    name: &'static str,
    text: &str,
    form: &str,
    value: Assigned,
) -> Result<(String, Option<usize>), ConfigError> {
    let Assigned::One(value) = value else { return Err(bad(name, text, form)) };
    let (value, axis) = parameters::with_axis(&value).map_err(|why| bad(name, text, format!("{why}; {form}")))?;
    Ok((value.to_owned(), axis))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn config(parameters: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let config = json!({ "name": "m", "max_batch_size": 4, "sequence_batching": { "direct": {} } });
        Config::for_tests(&config, parameters)
    }

    #[test]
    fn what_is_written_is_read() {
        let config = config(&[
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
            let error = config(&[(name, value)]).unwrap_err().to_string();
            assert!([name, value, word].iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn constants_are_numbers_or_lists() {
        let list = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect::<Vec<_>>();
        let expected = vec![("sr".to_owned(), list(&["16000"])), ("l".to_owned(), list(&["1", "2"]))];
        assert_eq!(constant_inputs("sr=16000, l=[1, 2]").unwrap(), expected);
        assert_eq!(constant_inputs(" sr = 16000 l=[1,2] ").unwrap(), expected);
        for text in ["sr", "=1", "sr=", "l=[1", "l=[]", "a=1 a=2", "a b=1"] {
            assert!(constant_inputs(text).is_err(), "{text}");
        }
    }
}
