//! Inputs that no request carries: controls and constants.

use rows::tensor::{DataType, Dims, element_count};

use super::error::BindingError;
use super::shapes::bound;
use super::{BoundControl, BoundInput, Flag, Source, batches, check_type};
use crate::config::{Config, Control, ControlKind, FalseTrue};
use crate::session::TensorInfo;

pub(super) fn control_input(config: &Config, control: &Control, info: &TensorInfo) -> Result<BoundInput, BindingError> {
    let what = format!("control_input '{}'", control.name);
    let flag = |flag: Flag, values: FalseTrue| {
        let element = |value: f64| {
            let name = control.name.clone();
            flag_element(info.data_type, value).map_err(|why| BindingError::Control { name, why })
        };
        let (no, yes) = (element(values.no)?, element(values.yes)?);
        if no == yes || values.no == values.yes {
            let (name, model) = (control.name.clone(), info.data_type);
            return Err(BindingError::EqualControls { name, no: values.no, yes: values.yes, model });
        }
        Ok(BoundControl::Flag { flag, no, yes })
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
        bytes.extend(element_bytes(info.data_type, value).map_err(error)?);
    }
    Ok(bound(info, batch_axis, Source::Constant(bytes)))
}

/// A flag's value as an element of the type that the model takes, or why the type does not have that value.
fn flag_element(data_type: DataType, value: f64) -> Result<Vec<u8>, String> {
    match data_type {
        DataType::Bool => Ok(vec![u8::from(value != 0.0)]),
        _ => element_bytes(data_type, &value.to_string()),
    }
}

/// One element, read from text, or why the type does not have that value.
pub(super) fn element_bytes(data_type: DataType, text: &str) -> Result<Vec<u8>, String> {
    let error = |allowed: &str| format!("'{text}' is no {data_type}: {allowed} is expected");
    macro_rules! integer {
        ($type:ty) => {
            match text.parse::<$type>() {
                Ok(number) => Ok(number.to_ne_bytes().to_vec()),
                Err(_) => Err(error(&format!("a whole number from {} to {}", <$type>::MIN, <$type>::MAX))),
            }
        };
    }
    // A number that is too large becomes infinity when it is read. Infinity itself is written without a digit.
    let may_be_infinite = !text.contains(|letter: char| letter.is_ascii_digit());
    macro_rules! float {
        ($read:expr, $largest:literal) => {
            match text.parse().map($read) {
                Ok(number) if number.is_finite() || may_be_infinite => Ok(number.to_ne_bytes().to_vec()),
                _ => Err(error(concat!("a number from -", $largest, " to ", $largest))),
            }
        };
    }
    match data_type {
        DataType::Bool => match text {
            "true" | "1" => Ok(vec![1]),
            "false" | "0" => Ok(vec![0]),
            _ => Err(error("true or false, 1 or 0")),
        },
        DataType::Uint8 => integer!(u8),
        DataType::Uint16 => integer!(u16),
        DataType::Uint32 => integer!(u32),
        DataType::Uint64 => integer!(u64),
        DataType::Int8 => integer!(i8),
        DataType::Int16 => integer!(i16),
        DataType::Int32 => integer!(i32),
        DataType::Int64 => integer!(i64),
        DataType::Fp16 => float!(half::f16::from_f64, "65504"),
        DataType::Bf16 => float!(half::bf16::from_f64, "3.3895e38"),
        DataType::Fp32 => float!(|number: f32| number, "3.4028e38"),
        DataType::Fp64 => float!(|number: f64| number, "1.7976e308"),
        DataType::Bytes => Err(format!("'{text}' is given for a {data_type}, which only a request can carry")),
    }
}
