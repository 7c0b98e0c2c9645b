//! The tensors that a configuration lists: those of the model, those that this backend adds to them, and controls.

use std::fmt;

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::error::{ConfigError, field};
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
