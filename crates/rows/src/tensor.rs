//! Data types and shapes of tensors, in the terms that Triton and ONNX share.
//!
//! Rules: a [`DataType`] is a name and a size; a shape is a list of signed dimensions, where -1 stands for an open one.
//! Nothing here knows Triton, ONNX Runtime or memory.

#![forbid(unsafe_code)]

mod part;

use std::fmt;

pub use part::{Chunk, Gap, PaddingSide, Part, RowAt, RowLayout, Strided, WindowLayout};

/// Element type of a tensor. The names are Triton's (`TYPE_FP32` in config.pbtxt, `FP32` in the protocol).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    Fp32,
    Fp64,
    /// Upper half of an FP32.
    Bf16,
    /// Strings of any length; TYPE_STRING in config.pbtxt.
    Bytes,
}

/// Every data type with the name that Triton's protocol gives it.
const NAMES: [(DataType, &str); 14] = [
    (DataType::Bool, "BOOL"),
    (DataType::Uint8, "UINT8"),
    (DataType::Uint16, "UINT16"),
    (DataType::Uint32, "UINT32"),
    (DataType::Uint64, "UINT64"),
    (DataType::Int8, "INT8"),
    (DataType::Int16, "INT16"),
    (DataType::Int32, "INT32"),
    (DataType::Int64, "INT64"),
    (DataType::Fp16, "FP16"),
    (DataType::Fp32, "FP32"),
    (DataType::Fp64, "FP64"),
    (DataType::Bf16, "BF16"),
    (DataType::Bytes, "STRING"),
];

impl DataType {
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(data_type, _)| data_type)
    }

    /// Bytes of one element; `None` for strings, whose size varies.
    pub const fn byte_size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }

    /// Reads a name as config.pbtxt writes it (`TYPE_FP32`).
    pub fn from_config_name(name: &str) -> Option<Self> {
        let bare = name.strip_prefix("TYPE_")?;
        NAMES.iter().find(|(_, known)| *known == bare).map(|(data_type, _)| *data_type)
    }

    /// The name in Triton's protocol (`FP32`).
    pub fn protocol_name(self) -> &'static str {
        // The only type that has another name in config.pbtxt.
        if self == Self::Bytes { "BYTES" } else { self.name() }
    }

    /// Reads a name as Triton's protocol has it (`FP32`).
    pub fn from_protocol_name(name: &str) -> Option<Self> {
        Self::all().find(|data_type| data_type.protocol_name() == name)
    }

    fn name(self) -> &'static str {
        NAMES.iter().find(|(data_type, _)| *data_type == self).map_or("?", |(_, name)| name)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TYPE_{}", self.name())
    }
}

/// Shows dimensions as `[2, -1, 128]`.
pub struct Dims<'a>(pub &'a [i64]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Bytes that an element of a string tensor takes in ONNX Runtime, even an empty string.
pub const STRING_BYTES: usize = 32;

/// Number of elements in `dims`; `None` if a dimension is open (negative) or the product overflows.
pub fn element_count(dims: &[i64]) -> Option<usize> {
    dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(usize::try_from(dim).ok()?))
}

/// Whether dims are those that are wanted, where -1 is any.
pub fn dims_fit(dims: &[i64], wanted: &[i64]) -> bool {
    let fits = |(&dim, &wanted): (&i64, &i64)| dim >= 0 && (dim == wanted || wanted < 0);
    dims.len() == wanted.len() && dims.iter().zip(wanted).all(fits)
}

/// How the elements of a state are stored between runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageType {
    Exact,
    /// TYPE_FP32 as TYPE_FP16, rounded to nearest even.
    Fp16,
}

impl StorageType {
    /// Bytes that are stored of so many in the model.
    pub const fn bytes(self, in_model: usize) -> usize {
        match self {
            Self::Exact => in_model,
            Self::Fp16 => in_model / 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for (data_type, _) in NAMES {
            assert_eq!(DataType::from_config_name(&data_type.to_string()), Some(data_type));
            assert_eq!(DataType::from_protocol_name(data_type.protocol_name()), Some(data_type));
        }
        assert_eq!(DataType::from_config_name("FP32"), None);
        assert_eq!(DataType::from_protocol_name("STRING"), None);
        assert_eq!(DataType::from_config_name("TYPE_INVALID"), None);
    }
}
