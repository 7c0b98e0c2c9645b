//! A tensor between the two protocols: its elements are one run of little-endian bytes, as in Triton's
//! `raw_input_contents`. Clients send and read it as TensorFlow's `TensorProto`.

use bytes::{BufMut, Bytes, BytesMut};

use rows::strings;
pub use rows::tensor::DataType;

use crate::proto::tensorflow::{DataType as TensorFlow, TensorProto, TensorShapeProto, tensor_shape_proto::Dim};
use crate::triton::Failure;

/// A single value in a `*_val` field stands for all elements. Without this limit for all tensors of a request, a few
/// bytes of a client could take any amount of memory.
const EXPANDED_BYTES_MAX: usize = 64 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub data_type: DataType,
    /// No dimension is negative, and there are as many elements as the dimensions say.
    pub shape: Vec<i64>,
    /// The elements; each string is preceded by its length in 4 bytes.
    pub content: Bytes,
}

impl Tensor {
    /// A tensor as Triton sent it. Fails if the content doesn't have the size that the shape says.
    pub fn new(data_type: DataType, shape: Vec<i64>, content: Bytes) -> Result<Self, String> {
        let tensor = Self { data_type, shape, content };
        let elements = element_count(&tensor.shape)
            .ok_or_else(|| format!("shape {:?} has a negative dimension or too many elements", tensor.shape))?;
        let fits = match data_type.byte_size() {
            Some(size) => elements.checked_mul(size) == Some(tensor.content.len()),
            None => strings::count(&tensor.content) == Some(elements),
        };
        if fits {
            Ok(tensor)
        } else {
            Err(format!("{} bytes for {:?} of {}", tensor.content.len(), tensor.shape, data_type.protocol_name()))
        }
    }

    /// The tensor that a client sent as input `name`. The values are in `tensor_content` or in the field of the type. A
    /// single value there stands for all elements, as far as `expansion` allows.
    pub fn from_proto(name: &str, proto: &TensorProto, expansion: &mut Expansion) -> Result<Self, Failure> {
        let wrong = |text: &str, details: String| Failure::invalid(format!("{text} - {details}; input name: {name}"));
        let data_type = from_tensorflow(proto.dtype)
            .ok_or_else(|| wrong("Invalid input precision", format!("DataType {} is not supported", proto.dtype)))?;
        let shape = dimensions(proto.tensor_shape.as_ref());
        let elements =
            element_count(&shape).ok_or_else(|| wrong("Invalid input shape", format!("Actual: {shape:?}")))?;

        let content = if let Some(size) = data_type.byte_size() {
            if proto.tensor_content.is_empty() {
                numbers(proto, data_type, elements, expansion)
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
            let strings = strings::elements(&self.content).flatten();
            proto.string_val = strings.map(|string| self.content.slice_ref(string)).collect();
        } else {
            proto.tensor_content = self.content;
        }
        proto
    }
}

fn numbers(proto: &TensorProto, data_type: DataType, elements: usize, left: &mut Expansion) -> Result<Bytes, String> {
    match data_type {
        DataType::Bool => left.fill(elements, &proto.bool_val, |value| Some([u8::from(value)])),
        // The small integers share the field of the 32-bit ones, so a client can send what their type can't hold.
        DataType::Uint8 => left.fill(elements, &proto.int_val, |value| u8::try_from(value).ok().map(u8::to_le_bytes)),
        DataType::Uint16 => {
            left.fill(elements, &proto.int_val, |value| u16::try_from(value).ok().map(u16::to_le_bytes))
        }
        DataType::Uint32 => left.fill(elements, &proto.uint32_val, |value| Some(value.to_le_bytes())),
        DataType::Uint64 => left.fill(elements, &proto.uint64_val, |value| Some(value.to_le_bytes())),
        DataType::Int8 => left.fill(elements, &proto.int_val, |value| i8::try_from(value).ok().map(i8::to_le_bytes)),
        DataType::Int16 => left.fill(elements, &proto.int_val, |value| i16::try_from(value).ok().map(i16::to_le_bytes)),
        DataType::Int32 => left.fill(elements, &proto.int_val, |value| Some(value.to_le_bytes())),
        DataType::Int64 => left.fill(elements, &proto.int64_val, |value| Some(value.to_le_bytes())),
        // The field holds the number's bits as an integer.
        DataType::Fp16 | DataType::Bf16 => {
            left.fill(elements, &proto.half_val, |value| u16::try_from(value).ok().map(u16::to_le_bytes))
        }
        DataType::Fp32 => left.fill(elements, &proto.float_val, |value| Some(value.to_le_bytes())),
        DataType::Fp64 => left.fill(elements, &proto.double_val, |value| Some(value.to_le_bytes())),
        DataType::Bytes => Ok(Bytes::new()),
    }
}

/// How many bytes single values may still fill in a request.
pub struct Expansion(usize);

impl Expansion {
    pub const fn new() -> Self {
        Self(EXPANDED_BYTES_MAX)
    }

    /// The content of so many elements from the values of a `*_val` field.
    fn fill<T: Copy, const N: usize>(
        &mut self,
        elements: usize,
        values: &[T],
        encode: impl Fn(T) -> Option<[u8; N]>,
    ) -> Result<Bytes, String> {
        let encoded: Option<Vec<[u8; N]>> = values.iter().map(|value| encode(*value)).collect();
        let mut encoded = encoded.ok_or("a value is out of range")?;
        if let [value] = encoded[..]
            && elements > 1
        {
            let left = elements.checked_mul(N).and_then(|bytes| self.0.checked_sub(bytes));
            self.0 = left.ok_or_else(|| {
                format!(
                    "Expected: {elements}; Actual: 1; a single value for all elements can't fill more than {} MiB in a request",
                    EXPANDED_BYTES_MAX >> 20
                )
            })?;
            encoded.resize(elements, value);
        }
        if encoded.len() == elements {
            Ok(encoded.into_flattened().into())
        } else {
            Err(format!("Expected: {elements}; Actual: {}", values.len()))
        }
    }
}

/// The dimensions; none if the shape is absent or unknown.
pub fn dimensions(shape: Option<&TensorShapeProto>) -> Vec<i64> {
    match shape {
        Some(shape) if !shape.unknown_rank => shape.dim.iter().map(|dim| dim.size).collect(),
        _ => Vec::new(),
    }
}

pub fn shape_proto(dimensions: &[i64]) -> TensorShapeProto {
    TensorShapeProto {
        dim: dimensions.iter().map(|size| Dim { size: *size, name: String::new() }).collect(),
        unknown_rank: false,
    }
}

pub const fn tensorflow(data_type: DataType) -> TensorFlow {
    match data_type {
        DataType::Bool => TensorFlow::DtBool,
        DataType::Uint8 => TensorFlow::DtUint8,
        DataType::Uint16 => TensorFlow::DtUint16,
        DataType::Uint32 => TensorFlow::DtUint32,
        DataType::Uint64 => TensorFlow::DtUint64,
        DataType::Int8 => TensorFlow::DtInt8,
        DataType::Int16 => TensorFlow::DtInt16,
        DataType::Int32 => TensorFlow::DtInt32,
        DataType::Int64 => TensorFlow::DtInt64,
        DataType::Fp16 => TensorFlow::DtHalf,
        DataType::Bf16 => TensorFlow::DtBfloat16,
        DataType::Fp32 => TensorFlow::DtFloat,
        DataType::Fp64 => TensorFlow::DtDouble,
        DataType::Bytes => TensorFlow::DtString,
    }
}

/// From the number in `TensorProto.dtype`. References and quantised types have no counterpart.
pub fn from_tensorflow(number: i32) -> Option<DataType> {
    DataType::all().find(|data_type| tensorflow(*data_type) as i32 == number)
}

/// The product of the dimensions; none if it is too large, or one of them is negative.
pub fn element_count(shape: &[i64]) -> Option<usize> {
    // Apart, because the product of the other dimensions may overflow.
    if shape.contains(&0) && shape.iter().all(|dimension| *dimension >= 0) {
        return Some(0);
    }
    shape.iter().try_fold(1_usize, |product, dimension| product.checked_mul(usize::try_from(*dimension).ok()?))
}

pub fn put_string(content: &mut BytesMut, string: &[u8]) -> Result<(), Failure> {
    let Ok(length) = u32::try_from(string.len()) else {
        return Err(Failure::invalid("Invalid string input - a string of 4 GiB or more"));
    };
    content.reserve(string.len() + 4);
    content.put_u32_le(length);
    content.put_slice(string);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn proto(data_type: TensorFlow, shape: &[i64]) -> TensorProto {
        TensorProto { dtype: data_type as i32, tensor_shape: Some(shape_proto(shape)), ..TensorProto::default() }
    }

    fn read(proto: &TensorProto) -> Result<Tensor, Failure> {
        Tensor::from_proto("x", proto, &mut Expansion::new())
    }

    fn message(proto: &TensorProto) -> String {
        read(proto).unwrap_err().message
    }

    #[test]
    fn each_type_is_read_from_its_field() {
        let shape = [2];
        let cases = [
            (TensorProto { bool_val: vec![true, false], ..proto(TensorFlow::DtBool, &shape) }, vec![1, 0]),
            (TensorProto { int_val: vec![255, 0], ..proto(TensorFlow::DtUint8, &shape) }, vec![255, 0]),
            (TensorProto { int_val: vec![-1, 1], ..proto(TensorFlow::DtInt8, &shape) }, vec![255, 1]),
            (TensorProto { int_val: vec![-2, 1], ..proto(TensorFlow::DtInt16, &shape) }, vec![254, 255, 1, 0]),
            (TensorProto { int_val: vec![65535, 1], ..proto(TensorFlow::DtUint16, &shape) }, vec![255, 255, 1, 0]),
            (
                TensorProto { half_val: vec![0x3c00, 0xbc00], ..proto(TensorFlow::DtHalf, &shape) },
                vec![0, 0x3c, 0, 0xbc],
            ),
            (
                TensorProto { half_val: vec![0x3f80, 0], ..proto(TensorFlow::DtBfloat16, &shape) },
                vec![0x80, 0x3f, 0, 0],
            ),
            (
                TensorProto { float_val: vec![1.0, -2.0], ..proto(TensorFlow::DtFloat, &shape) },
                [1_f32, -2.0].map(f32::to_le_bytes).concat(),
            ),
            (
                TensorProto { double_val: vec![1.0, -2.0], ..proto(TensorFlow::DtDouble, &shape) },
                [1_f64, -2.0].map(f64::to_le_bytes).concat(),
            ),
            (
                TensorProto { int64_val: vec![i64::MIN, 1], ..proto(TensorFlow::DtInt64, &shape) },
                [i64::MIN, 1].map(i64::to_le_bytes).concat(),
            ),
            (
                TensorProto { uint64_val: vec![u64::MAX, 1], ..proto(TensorFlow::DtUint64, &shape) },
                [u64::MAX, 1].map(u64::to_le_bytes).concat(),
            ),
            (
                TensorProto { string_val: vec!["ab".into(), "".into()], ..proto(TensorFlow::DtString, &shape) },
                b"\x02\0\0\0ab\0\0\0\0".to_vec(),
            ),
        ];
        for (proto, content) in cases {
            let tensor = read(&proto).unwrap();
            assert_eq!(tensor.content, content, "{proto:?}");
            assert_eq!(Tensor::new(tensor.data_type, tensor.shape.clone(), tensor.content.clone()), Ok(tensor));
        }
    }

    #[test]
    fn one_value_stands_for_all_elements() {
        let tensor = read(&TensorProto { int_val: vec![7], ..proto(TensorFlow::DtInt16, &[2, 2]) });
        assert_eq!(tensor.unwrap().content, [7, 0].repeat(4));

        let large = TensorProto { int_val: vec![7], ..proto(TensorFlow::DtInt32, &[1 << 40]) };
        assert!(message(&large).contains("Expected: 1099511627776; Actual: 1"), "{}", message(&large));

        // 64 MiB in all tensors of a request
        let mut expansion = Expansion::new();
        let half = TensorProto { int_val: vec![7], ..proto(TensorFlow::DtUint8, &[32 << 20]) };
        for fits in [true, true, false] {
            let tensor = Tensor::from_proto("x", &half, &mut expansion);
            assert_eq!(tensor.is_ok(), fits);
        }
        let one = TensorProto { int_val: vec![7], ..proto(TensorFlow::DtUint8, &[1]) };
        assert!(Tensor::from_proto("x", &one, &mut expansion).is_ok());
    }

    #[test]
    fn values_of_a_wrong_number_or_size_are_refused_with_the_input_s_name() {
        let few = TensorProto { float_val: vec![1.0; 2], ..proto(TensorFlow::DtFloat, &[3]) };
        assert_eq!(
            message(&few),
            "Invalid number of values in tensor proto container - Expected: 3; Actual: 2; input name: x"
        );
        let many = TensorProto { float_val: vec![1.0; 4], ..proto(TensorFlow::DtFloat, &[3]) };
        assert!(message(&many).contains("Expected: 3; Actual: 4"));
        let none = proto(TensorFlow::DtFloat, &[3]);
        assert!(message(&none).contains("Expected: 3; Actual: 0"));
        let content = TensorProto { tensor_content: vec![0; 11].into(), ..proto(TensorFlow::DtFloat, &[3]) };
        assert_eq!(
            message(&content),
            "Invalid content size of tensor proto - Expected: 12 bytes; Actual: 11 bytes; input name: x"
        );
        let strings = TensorProto { string_val: vec!["a".into()], ..proto(TensorFlow::DtString, &[2]) };
        assert!(message(&strings).contains("Expected: 2; Actual: 1"), "one string doesn't stand for all");
        let range = TensorProto { int_val: vec![256], ..proto(TensorFlow::DtUint8, &[1]) };
        assert!(message(&range).contains("a value is out of range"));
    }

    #[test]
    fn shapes_and_types_that_cannot_be_are_refused() {
        assert!(message(&proto(TensorFlow::DtFloat, &[-1])).starts_with("Invalid input shape"));
        assert!(message(&proto(TensorFlow::DtFloat, &[i64::MAX, i64::MAX])).starts_with("Invalid input shape"));
        assert!(message(&proto(TensorFlow::DtInvalid, &[1])).starts_with("Invalid input precision"));
        let empty = read(&proto(TensorFlow::DtFloat, &[0, i64::MAX, i64::MAX]));
        assert_eq!(empty.unwrap().content.len(), 0);
    }

    #[test]
    fn a_content_of_another_size_than_the_shape_says_is_an_error() {
        assert!(Tensor::new(DataType::Fp32, vec![2], vec![0; 8].into()).is_ok());
        assert!(Tensor::new(DataType::Fp32, vec![2], vec![0; 7].into()).is_err());
        assert!(Tensor::new(DataType::Fp32, vec![-2], vec![0; 8].into()).is_err());
        assert!(Tensor::new(DataType::Bytes, vec![2], b"\0\0\0\0\0\0\0\0"[..].into()).is_ok());
        assert!(Tensor::new(DataType::Bytes, vec![1], b"\x05\0\0\0abc"[..].into()).is_err());
    }

    #[test]
    fn each_type_comes_back() {
        let known: Vec<_> = (0..30).filter_map(|number| Some((number, from_tensorflow(number)?))).collect();
        assert_eq!(known.len(), 14);
        for (number, data_type) in known {
            assert_eq!(tensorflow(data_type) as i32, number);
        }
        assert_eq!(from_tensorflow(18), None, "DT_COMPLEX128");
    }

    proptest! {
        #[test]
        fn numbers_come_back_as_they_were_sent(values in proptest::collection::vec(any::<f32>(), 0..20)) {
            let shape = [values.len() as i64];
            let sent = TensorProto { float_val: values.clone(), ..proto(TensorFlow::DtFloat, &shape) };
            let tensor = read(&sent).unwrap();
            let answer = tensor.clone().into_proto();
            prop_assert_eq!(read(&answer).unwrap(), tensor);
        }

        #[test]
        fn strings_come_back_as_they_were_sent(values in proptest::collection::vec(any::<Vec<u8>>(), 0..20)) {
            let shape = [values.len() as i64];
            let string_val: Vec<Bytes> = values.into_iter().map(Bytes::from).collect();
            let sent = TensorProto { string_val: string_val.clone(), ..proto(TensorFlow::DtString, &shape) };
            let answer = read(&sent).unwrap().into_proto();
            prop_assert_eq!(answer.string_val, string_val);
        }

        #[test]
        fn no_content_of_strings_panics(content: Vec<u8>, elements in 0_i64..4) {
            let _ = Tensor::new(DataType::Bytes, vec![elements], content.into());
        }

        #[test]
        fn no_proto_panics(dtype in 0..30_i32, shape: Vec<i64>, content: Vec<u8>, int_val: Vec<i32>, half_val: Vec<i32>) {
            let proto = TensorProto {
                dtype, tensor_shape: Some(shape_proto(&shape)), tensor_content: content.into(), int_val, half_val,
                ..TensorProto::default()
            };
            let _ = read(&proto);
        }
    }
}
