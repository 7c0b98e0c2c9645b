//! The tensors that a configuration lists, those that this backend adds to them, and two kinds of inputs that no
//! request carries: controls and constants.

use std::fmt;

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::parameters::Parameters;
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

#[cfg(test)]
mod tests {
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
}
