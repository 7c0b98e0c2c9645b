//! Control inputs.

use std::fmt;

use rows::tensor::DataType;

use super::error::{ConfigError, field};
use super::raw;
use super::resolved::data_type;

/// A `control_input` that the model may take.
#[derive(Clone, Debug, PartialEq)]
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
