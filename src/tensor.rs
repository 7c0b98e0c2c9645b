//! Data types and shapes of tensors, in the terms that Triton and ONNX share.
//!
//! Rules: a [`DataType`] is a name and a size, nothing more; a shape is a list of signed dimensions in which -1 stands
//! for "open". Nothing here knows Triton, ONNX Runtime or memory.

#![forbid(unsafe_code)]

use std::fmt;

/// Element type of a tensor. The names are Triton's (`TYPE_FP32` in config.pbtxt, `FP32` in the protocol).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, 8 bits.
    Uint8,
    /// Unsigned, 16 bits.
    Uint16,
    /// Unsigned, 32 bits.
    Uint32,
    /// Unsigned, 64 bits.
    Uint64,
    /// Signed, 8 bits.
    Int8,
    /// Signed, 16 bits.
    Int16,
    /// Signed, 32 bits.
    Int32,
    /// Signed, 64 bits.
    Int64,
    /// IEEE 754 half precision.
    Fp16,
    /// IEEE 754 single precision.
    Fp32,
    /// IEEE 754 double precision.
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
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

/// Number of elements in `dims`; `None` if a dimension is open (negative) or the product overflows.
pub fn element_count(dims: &[i64]) -> Option<usize> {
    dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(usize::try_from(dim).ok()?))
}

/// Where one row of a batched tensor lies: `outer` chunks of `inner_bytes`, one batch row apart.
///
/// A tensor `[d0, …, batch, …, dn]` with `rows` rows holds chunk `o` of row `r` at byte
/// `(o * rows + r) * inner_bytes`; alone, a row is its chunks one after another. The batch axis may be anywhere, or
/// nowhere (then `outer` is 1 and the tensor is its only row).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Product of the dimensions before the batch axis.
    pub outer: usize,
    /// Bytes of all dimensions behind the batch axis.
    pub inner_bytes: usize,
}

impl RowLayout {
    /// Layout of a tensor with `dims` (the batch axis's own value is ignored). `None` if another dimension is open or a
    /// product overflows. Strings have no fixed size: theirs counts elements instead of bytes.
    pub fn new(data_type: DataType, dims: &[i64], batch_axis: Option<usize>) -> Option<Self> {
        let split = batch_axis.unwrap_or(0);
        let behind = batch_axis.map_or(0, |axis| axis + 1);
        let outer = element_count(&dims[..split])?;
        let inner_bytes = element_count(&dims[behind..])?.checked_mul(data_type.byte_size().unwrap_or(1))?;
        outer.checked_mul(inner_bytes)?;
        Some(Self { outer, inner_bytes })
    }

    /// Bytes of one row.
    pub const fn row_bytes(self) -> usize {
        self.outer * self.inner_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for (data_type, _) in NAMES {
            assert_eq!(DataType::from_config_name(&data_type.to_string()), Some(data_type));
        }
        assert_eq!(DataType::from_config_name("FP32"), None);
        assert_eq!(DataType::from_config_name("TYPE_INVALID"), None);
    }

    #[test]
    fn a_row_has_the_dimensions_before_the_batch_axis_as_chunks() {
        let layout = |dims: &[i64], axis| RowLayout::new(DataType::Fp32, dims, axis);
        assert_eq!(layout(&[2, -1, 128], Some(1)), Some(RowLayout { outer: 2, inner_bytes: 512 }));
        assert_eq!(layout(&[-1, 4, 5], Some(0)), Some(RowLayout { outer: 1, inner_bytes: 80 }));
        assert_eq!(layout(&[3, 7, -1], Some(2)), Some(RowLayout { outer: 21, inner_bytes: 4 }));
        assert_eq!(layout(&[3, 7], None), Some(RowLayout { outer: 1, inner_bytes: 84 }));
        assert_eq!(layout(&[], None), Some(RowLayout { outer: 1, inner_bytes: 4 }));
        assert_eq!(layout(&[-1, -1], Some(0)), None);
        assert_eq!(layout(&[i64::MAX, i64::MAX], None), None);
    }
}
