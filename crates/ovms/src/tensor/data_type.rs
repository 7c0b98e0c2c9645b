//! The element types that ONNX models, TensorFlow and Triton share.

use crate::proto::tensorflow::DataType as TensorFlow;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DataType {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Bf16,
    Fp32,
    Fp64,
    Bytes,
}

/// With TensorFlow's name, Triton's name, and the bytes of an element; a string has no fixed size.
const TYPES: [(DataType, TensorFlow, &str, Option<usize>); 14] = [
    (DataType::Bool, TensorFlow::DtBool, "BOOL", Some(1)),
    (DataType::Uint8, TensorFlow::DtUint8, "UINT8", Some(1)),
    (DataType::Uint16, TensorFlow::DtUint16, "UINT16", Some(2)),
    (DataType::Uint32, TensorFlow::DtUint32, "UINT32", Some(4)),
    (DataType::Uint64, TensorFlow::DtUint64, "UINT64", Some(8)),
    (DataType::Int8, TensorFlow::DtInt8, "INT8", Some(1)),
    (DataType::Int16, TensorFlow::DtInt16, "INT16", Some(2)),
    (DataType::Int32, TensorFlow::DtInt32, "INT32", Some(4)),
    (DataType::Int64, TensorFlow::DtInt64, "INT64", Some(8)),
    (DataType::Fp16, TensorFlow::DtHalf, "FP16", Some(2)),
    (DataType::Bf16, TensorFlow::DtBfloat16, "BF16", Some(2)),
    (DataType::Fp32, TensorFlow::DtFloat, "FP32", Some(4)),
    (DataType::Fp64, TensorFlow::DtDouble, "FP64", Some(8)),
    (DataType::Bytes, TensorFlow::DtString, "BYTES", None),
];

impl DataType {
    /// Triton's name of the type, as in `InferInputTensor.datatype`.
    pub fn triton(self) -> &'static str {
        self.entry().2
    }

    pub fn from_triton(name: &str) -> Option<Self> {
        TYPES.iter().find(|entry| entry.2 == name).map(|entry| entry.0)
    }

    pub fn tensorflow(self) -> TensorFlow {
        self.entry().1
    }

    /// From the number in `TensorProto.dtype`. References and quantised types aren't in the table.
    pub fn from_tensorflow(number: i32) -> Option<Self> {
        TYPES.iter().find(|entry| entry.1 as i32 == number).map(|entry| entry.0)
    }

    /// Bytes of an element; none for strings.
    pub fn size(self) -> Option<usize> {
        self.entry().3
    }

    fn entry(self) -> &'static (Self, TensorFlow, &'static str, Option<usize>) {
        &TYPES[self as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_stands_at_its_own_place_in_the_table() {
        for (position, (data_type, tensorflow, triton, _)) in TYPES.into_iter().enumerate() {
            assert_eq!(data_type as usize, position);
            assert_eq!(DataType::from_triton(triton), Some(data_type));
            assert_eq!(DataType::from_tensorflow(tensorflow as i32), Some(data_type));
        }
    }

    #[test]
    fn types_that_onnx_models_lack_are_unknown() {
        assert_eq!(DataType::from_triton("FP8"), None);
        assert_eq!(DataType::from_tensorflow(TensorFlow::DtInvalid as i32), None);
        assert_eq!(DataType::from_tensorflow(18), None, "DT_COMPLEX128");
    }
}
