//! TensorFlow's numbers of the element types that ONNX models and Triton have.

use rows::tensor::DataType;

use crate::proto::tensorflow::DataType as TensorFlow;

/// TensorFlow's type of these elements.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_comes_back() {
        let known: Vec<_> = (0..30).filter_map(|number| Some((number, from_tensorflow(number)?))).collect();
        assert_eq!(known.len(), 14);
        for (number, data_type) in known {
            assert_eq!(tensorflow(data_type) as i32, number);
        }
        assert_eq!(from_tensorflow(18), None, "DT_COMPLEX128");
    }
}
