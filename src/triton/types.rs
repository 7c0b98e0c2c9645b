//! How Triton writes data types and names.

use std::ffi::CString;

use rows::tensor::DataType;
use triton_sys::TRITONSERVER_DataType;

const TYPES: [(DataType, TRITONSERVER_DataType); 14] = [
    (DataType::Bool, triton_sys::TRITONSERVER_TYPE_BOOL),
    (DataType::Uint8, triton_sys::TRITONSERVER_TYPE_UINT8),
    (DataType::Uint16, triton_sys::TRITONSERVER_TYPE_UINT16),
    (DataType::Uint32, triton_sys::TRITONSERVER_TYPE_UINT32),
    (DataType::Uint64, triton_sys::TRITONSERVER_TYPE_UINT64),
    (DataType::Int8, triton_sys::TRITONSERVER_TYPE_INT8),
    (DataType::Int16, triton_sys::TRITONSERVER_TYPE_INT16),
    (DataType::Int32, triton_sys::TRITONSERVER_TYPE_INT32),
    (DataType::Int64, triton_sys::TRITONSERVER_TYPE_INT64),
    (DataType::Fp16, triton_sys::TRITONSERVER_TYPE_FP16),
    (DataType::Fp32, triton_sys::TRITONSERVER_TYPE_FP32),
    (DataType::Fp64, triton_sys::TRITONSERVER_TYPE_FP64),
    (DataType::Bytes, triton_sys::TRITONSERVER_TYPE_BYTES),
    (DataType::Bf16, triton_sys::TRITONSERVER_TYPE_BF16),
];

/// The type that has this number; `None` if no type has it.
pub fn data_type(raw: TRITONSERVER_DataType) -> Option<DataType> {
    TYPES.iter().find(|(_, known)| *known == raw).map(|(data_type, _)| *data_type)
}

/// The number that Triton gives the type.
pub fn raw_data_type(data_type: DataType) -> TRITONSERVER_DataType {
    TYPES.iter().find(|(known, _)| *known == data_type).map_or(triton_sys::TRITONSERVER_TYPE_INVALID, |(_, raw)| *raw)
}

/// A name for Triton. No tensor's name has a NUL; one that had would become empty.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}
