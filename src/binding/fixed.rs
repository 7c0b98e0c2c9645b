//! Inputs that no request carries: controls and constants.

use super::error::BindingError;
use super::shapes::bound;
use super::{BoundControl, BoundInput, Flag, Source, batches, check_type};
use crate::config::{Config, Control, ControlKind, FalseTrue};
use crate::session::TensorInfo;
use crate::tensor::{DataType, Dims, element_count};

pub(super) fn control_input(config: &Config, control: &Control, info: &TensorInfo) -> Result<BoundInput, BindingError> {
    let what = format!("control_input '{}'", control.name);
    let flag = |flag: Flag, values: FalseTrue| {
        let element = |value: f64| {
            flag_element(info.data_type, value).ok_or_else(|| BindingError::Control {
                name: control.name.clone(),
                value,
                model: info.data_type,
            })
        };
        Ok(BoundControl::Flag { flag, no: element(values.no)?, yes: element(values.yes)? })
    };
    let source = match control.kind {
        ControlKind::Start(values) => flag(Flag::Start, values)?,
        ControlKind::End(values) => flag(Flag::End, values)?,
        ControlKind::Ready(values) => flag(Flag::Ready, values)?,
        ControlKind::CorrelationId(data_type) => {
            check_type(what.clone(), data_type, info.data_type)?;
            BoundControl::CorrelationId(data_type)
        }
    };
    let error = |rule: &str| BindingError::Dims {
        what: what.clone(),
        configured: "[1]".to_owned(),
        model: Dims(&info.dims).to_string(),
        rule: rule.to_owned(),
    };
    let batch_axis = (config.is_batched() && !info.dims.is_empty()).then_some(0);
    let one_element = info.dims.iter().enumerate().all(|(axis, &dim)| dim <= 1 || Some(axis) == batch_axis);
    let fits = one_element && batch_axis.is_none_or(|axis| batches(info.dims[axis], config));
    if !fits || (config.max_batch_size > 1 && batch_axis.is_none()) {
        return Err(error("a control has one element a row: [batch] or [batch, 1]"));
    }
    let mut input = bound(info, batch_axis, Source::Control(source));
    for (axis, dim) in input.dims.iter_mut().enumerate() {
        if Some(axis) != batch_axis {
            *dim = 1;
        }
    }
    Ok(input)
}

pub(super) fn constant_input(
    config: &Config,
    info: &TensorInfo,
    values: &[String],
) -> Result<BoundInput, BindingError> {
    let error = |why: String| BindingError::Constant { name: info.name.clone(), value: values.join(", "), why };
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    let batch_axis = match open.as_slice() {
        [] => None,
        &[axis] if config.is_batched() => Some(axis),
        _ => return Err(error(format!("the model's dims {} are open", Dims(&info.dims)))),
    };
    let mut row = info.dims.clone();
    if let Some(axis) = batch_axis {
        row[axis] = 1;
    }
    let wanted = element_count(&row).unwrap_or(usize::MAX);
    if values.len() != wanted {
        return Err(error(format!("the model wants {wanted} elements, {}", Dims(&info.dims))));
    }
    let mut bytes = Vec::new();
    for value in values {
        let element = element_bytes(info.data_type, value);
        bytes.extend(element.ok_or_else(|| error(format!("the model wants {}", info.data_type)))?);
    }
    Ok(bound(info, batch_axis, Source::Constant(bytes)))
}

/// A flag's value as an element of the type that the model takes; `None` where the type cannot say it.
fn flag_element(data_type: DataType, value: f64) -> Option<Vec<u8>> {
    match data_type {
        DataType::Bool => Some(vec![u8::from(value != 0.0)]),
        _ => element_bytes(data_type, &value.to_string()),
    }
}

/// One element, read from text.
pub(super) fn element_bytes(data_type: DataType, text: &str) -> Option<Vec<u8>> {
    macro_rules! number {
        ($type:ty) => {
            text.parse::<$type>().ok().map(|number| number.to_ne_bytes().to_vec())
        };
    }
    match data_type {
        DataType::Bool => match text {
            "true" | "1" => Some(vec![1]),
            "false" | "0" => Some(vec![0]),
            _ => None,
        },
        DataType::Uint8 => number!(u8),
        DataType::Uint16 => number!(u16),
        DataType::Uint32 => number!(u32),
        DataType::Uint64 => number!(u64),
        DataType::Int8 => number!(i8),
        DataType::Int16 => number!(i16),
        DataType::Int32 => number!(i32),
        DataType::Int64 => number!(i64),
        DataType::Fp16 => text.parse().ok().map(|number| half::f16::from_f32(number).to_ne_bytes().to_vec()),
        DataType::Bf16 => text.parse().ok().map(|number| half::bf16::from_f32(number).to_ne_bytes().to_vec()),
        DataType::Fp32 => number!(f32),
        DataType::Fp64 => number!(f64),
        DataType::Bytes => None,
    }
}
