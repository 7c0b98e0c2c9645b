//! The contents of small tensors.

use super::schema::TensorProto;
use super::{DataType, is_external};

/// How many elements a shape has; the largest number where there are more.
pub fn element_count(dims: &[i64]) -> i64 {
    dims.iter().fold(1, |count: i64, &dim| count.saturating_mul(dim))
}

/// A tensor of integers.
pub fn int64s(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(DataType::Int64.into()),
        dims: dims.to_vec(),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

/// The elements of a tensor of numbers or booleans that the model itself holds, or shows.
pub fn numbers(tensor: &TensorProto) -> Option<Vec<f64>> {
    if is_external(tensor) && tensor.raw_data.is_none() {
        return None;
    }
    let count = usize::try_from(element_count(&tensor.dims)).ok()?;
    let values = match tensor.raw_data.as_deref().filter(|raw| !raw.is_empty()) {
        Some(raw) => from_raw(tensor.data_type(), raw)?,
        None => from_fields(tensor)?,
    };
    (values.len() == count).then_some(values)
}

fn from_raw(elem: i32, raw: &[u8]) -> Option<Vec<f64>> {
    fn each<const N: usize>(raw: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        raw.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)).collect()
    }
    Some(match DataType::try_from(elem).ok()? {
        DataType::Float => each(raw, |bytes| f32::from_le_bytes(bytes).into()),
        DataType::Double => each(raw, f64::from_le_bytes),
        DataType::Int64 => each(raw, |bytes| i64::from_le_bytes(bytes) as f64),
        DataType::Int32 => each(raw, |bytes| i32::from_le_bytes(bytes).into()),
        DataType::Uint32 => each(raw, |bytes| u32::from_le_bytes(bytes).into()),
        DataType::Int16 => each(raw, |bytes| i16::from_le_bytes(bytes).into()),
        DataType::Uint16 => each(raw, |bytes| u16::from_le_bytes(bytes).into()),
        DataType::Int8 => each(raw, |[byte]| f64::from(byte.cast_signed())),
        DataType::Uint8 | DataType::Bool => each(raw, |[byte]| byte.into()),
        DataType::Float16 => each(raw, |bytes| half(u16::from_le_bytes(bytes))),
        DataType::Bfloat16 => each(raw, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16).into()),
        _ => return None,
    })
}

fn from_fields(tensor: &TensorProto) -> Option<Vec<f64>> {
    let ints = |number: fn(i32) -> f64| tensor.int32_data.iter().map(|&value| number(value)).collect();
    Some(match DataType::try_from(tensor.data_type()).ok()? {
        DataType::Float => tensor.float_data.iter().map(|&value| value.into()).collect(),
        DataType::Double => tensor.double_data.clone(),
        DataType::Int64 => tensor.int64_data.iter().map(|&value| value as f64).collect(),
        DataType::Int32 | DataType::Int16 | DataType::Int8 | DataType::Uint16 | DataType::Uint8 | DataType::Bool => {
            ints(f64::from)
        }
        DataType::Float16 => ints(|bits| half(bits as u16)),
        DataType::Bfloat16 => ints(|bits| f32::from_bits((bits as u32) << 16).into()),
        _ => return None,
    })
}

fn half(bits: u16) -> f64 {
    half::f16::from_bits(bits).into()
}
