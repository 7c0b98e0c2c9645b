//! Reads and writes TensorFlow's `TensorProto`.

use bytes::{Bytes, BytesMut};

use super::data_type::{from_tensorflow, tensorflow};
use super::{DataType, Tensor, element_count, put_string};
use crate::failure::Failure;
use crate::proto::tensorflow::{TensorProto, TensorShapeProto, tensor_shape_proto::Dim};

/// A single value in a `*_val` field stands for all elements. Without this limit for all tensors of a request, a few bytes of
/// a client could take any amount of memory.
const EXPANDED_BYTES_MAX: usize = 64 << 20;

/// How many bytes single values may still fill in a request.
#[derive(Debug)]
pub struct Expansion(usize);

impl Default for Expansion {
    fn default() -> Self {
        Self(EXPANDED_BYTES_MAX)
    }
}

/// The dimensions; none if the shape is absent or unknown.
pub fn dimensions(shape: Option<&TensorShapeProto>) -> Vec<i64> {
    match shape {
        Some(shape) if !shape.unknown_rank => shape.dim.iter().map(|dim| dim.size).collect(),
        _ => Vec::new(),
    }
}

/// TensorFlow's message for these dimensions.
pub fn shape_proto(dimensions: &[i64]) -> TensorShapeProto {
    TensorShapeProto {
        dim: dimensions.iter().map(|size| Dim { size: *size, name: String::new() }).collect(),
        unknown_rank: false,
    }
}

impl Tensor {
    /// The tensor that a client sent as input `name`. The values are in `tensor_content` or in the field of the type. A
    /// single value there stands for all elements, within what `expansion` has left.
    pub fn from_proto(name: &str, proto: &TensorProto, expansion: &mut Expansion) -> Result<Self, Failure> {
        let wrong = |text: &str, details: String| Failure::invalid(format!("{text} - {details}; input name: {name}"));
        let data_type = from_tensorflow(proto.dtype)
            .ok_or_else(|| wrong("Invalid input precision", format!("DataType {} is not supported", proto.dtype)))?;
        let shape = dimensions(proto.tensor_shape.as_ref());
        let elements =
            element_count(&shape).ok_or_else(|| wrong("Invalid input shape", format!("Actual: {shape:?}")))?;

        let content = if let Some(size) = data_type.byte_size() {
            if proto.tensor_content.is_empty() {
                numbers(proto, data_type, elements, size, expansion)
                    .map_err(|details| wrong("Invalid number of values in tensor proto container", details))?
            } else if elements.checked_mul(size) == Some(proto.tensor_content.len()) {
                proto.tensor_content.clone()
            } else {
                let details = format!(
                    "Expected: {} bytes; Actual: {} bytes",
                    elements.saturating_mul(size),
                    proto.tensor_content.len()
                );
                return Err(wrong("Invalid content size of tensor proto", details));
            }
        } else {
            if proto.string_val.len() != elements {
                let details = format!("Expected: {elements}; Actual: {}", proto.string_val.len());
                return Err(wrong("Invalid number of values in tensor proto container", details));
            }
            let mut content = BytesMut::new();
            for string in &proto.string_val {
                put_string(&mut content, string)?;
            }
            content.freeze()
        };
        Ok(Self { data_type, shape, content })
    }

    /// The tensor as an output for a client: strings in `string_val`, all else in `tensor_content`.
    pub fn into_proto(self) -> TensorProto {
        let mut proto = TensorProto {
            dtype: tensorflow(self.data_type) as i32,
            tensor_shape: Some(shape_proto(&self.shape)),
            ..TensorProto::default()
        };
        if self.data_type == DataType::Bytes {
            proto.string_val = self.strings().collect();
        } else {
            proto.tensor_content = self.content;
        }
        proto
    }
}

fn numbers(
    proto: &TensorProto,
    data_type: DataType,
    elements: usize,
    size: usize,
    expansion: &mut Expansion,
) -> Result<Bytes, String> {
    let field = Field { elements, size, expansion };
    match data_type {
        DataType::Bool => field.bytes(&proto.bool_val, |value| Some([u8::from(value)])),
        DataType::Uint8 => field.bytes(&proto.int_val, |value| u8::try_from(value).ok().map(u8::to_le_bytes)),
        DataType::Uint16 => field.bytes(&proto.int_val, |value| u16::try_from(value).ok().map(u16::to_le_bytes)),
        DataType::Uint32 => field.bytes(&proto.uint32_val, |value| Some(value.to_le_bytes())),
        DataType::Uint64 => field.bytes(&proto.uint64_val, |value| Some(value.to_le_bytes())),
        DataType::Int8 => field.bytes(&proto.int_val, |value| i8::try_from(value).ok().map(i8::to_le_bytes)),
        DataType::Int16 => field.bytes(&proto.int_val, |value| i16::try_from(value).ok().map(i16::to_le_bytes)),
        DataType::Int32 => field.bytes(&proto.int_val, |value| Some(value.to_le_bytes())),
        DataType::Int64 => field.bytes(&proto.int64_val, |value| Some(value.to_le_bytes())),
        // The field holds the number's bits as an integer.
        DataType::Fp16 | DataType::Bf16 => {
            field.bytes(&proto.half_val, |value| u16::try_from(value).ok().map(u16::to_le_bytes))
        }
        DataType::Fp32 => field.bytes(&proto.float_val, |value| Some(value.to_le_bytes())),
        DataType::Fp64 => field.bytes(&proto.double_val, |value| Some(value.to_le_bytes())),
        DataType::Bytes => Ok(Bytes::new()),
    }
}

/// A `*_val` field and how many elements of how many bytes it must give.
struct Field<'a> {
    elements: usize,
    size: usize,
    expansion: &'a mut Expansion,
}

impl Field<'_> {
    fn bytes<T: Copy, const N: usize>(
        self,
        values: &[T],
        encode: impl Fn(T) -> Option<[u8; N]>,
    ) -> Result<Bytes, String> {
        let encoded: Option<Vec<[u8; N]>> = values.iter().map(|value| encode(*value)).collect();
        let mut encoded = encoded.ok_or("a value is out of range")?;
        if let [value] = encoded[..]
            && self.elements > 1
        {
            let left = self.elements.checked_mul(self.size).and_then(|bytes| self.expansion.0.checked_sub(bytes));
            self.expansion.0 = left.ok_or_else(|| {
                format!(
                    "Expected: {}; Actual: 1; a single value for all elements can't fill more than {} MiB in a request",
                    self.elements,
                    EXPANDED_BYTES_MAX >> 20
                )
            })?;
            encoded.resize(self.elements, value);
        }
        if encoded.len() == self.elements {
            Ok(encoded.into_flattened().into())
        } else {
            Err(format!("Expected: {}; Actual: {}", self.elements, values.len()))
        }
    }
}
