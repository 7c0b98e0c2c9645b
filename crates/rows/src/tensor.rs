//! Data types and shapes of tensors, in the terms that Triton and ONNX share.
//!
//! Rules: a [`DataType`] is a name and a size; a shape is a list of signed dimensions, where -1 stands for an open one.
//! Nothing here knows Triton, ONNX Runtime or memory.

#![forbid(unsafe_code)]

mod gap;

use std::fmt;

pub use gap::{Gap, GappedRow, PaddingSide};

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

    /// The name in Triton's protocol (`FP32`).
    pub fn protocol_name(self) -> &'static str {
        if self == Self::Bytes { "BYTES" } else { self.name() }
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

/// Bytes that an element of a string tensor takes in ONNX Runtime, even an empty string.
pub const STRING_BYTES: usize = 32;

/// Number of elements in `dims`; `None` if a dimension is open (negative) or the product overflows.
pub fn element_count(dims: &[i64]) -> Option<usize> {
    dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(usize::try_from(dim).ok()?))
}

/// Where a row lies in a batched tensor: in `outer` chunks of `inner_bytes` bytes.
///
/// A tensor `[d0, …, batch, …, dn]` with `rows` rows has chunk `o` of row `r` at byte `(o * rows + r) * inner_bytes`.
/// Alone, a row is its chunks one after another. The batch axis may be any dimension. Without one, `outer` is 1 and the
/// tensor is its only row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Product of the dimensions before the batch axis.
    pub outer: usize,
    /// Bytes of the dimensions after the batch axis.
    pub inner_bytes: usize,
}

impl RowLayout {
    /// The layout of a tensor with `dims`, where the length of the batch axis does not matter. `None` if another
    /// dimension is open or a product overflows. Strings have no fixed size, so for them it counts elements instead of
    /// bytes.
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

/// A row of a batch.
#[derive(Clone, Copy, Debug)]
pub struct RowAt {
    /// Which row.
    pub position: usize,
    /// Rows that its bytes are laid out for.
    pub rows: usize,
}

/// How the elements of a state are stored between runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageType {
    /// In the model's type.
    Exact,
    /// TYPE_FP32 as TYPE_FP16, rounded to nearest even.
    Fp16,
}

impl StorageType {
    /// Bytes of a stored row that has this layout in the model.
    pub const fn row_bytes(self, layout: RowLayout) -> usize {
        self.bytes(layout.row_bytes())
    }

    /// Bytes that are stored of so many in the model.
    pub const fn bytes(self, in_model: usize) -> usize {
        match self {
            Self::Exact => in_model,
            Self::Fp16 => in_model / 2,
        }
    }
}

/// Where some steps of a row, along one axis, lie in a batched tensor, and where they lie alone.
///
/// A *window* is `length` steps from step `from` on. Alone, its elements lie as in a tensor with the row's dims and
/// `length` for the axis. The batch axis may be before or after the axis of the window, or missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLayout {
    /// The product of the dimensions before both axes.
    outer: usize,
    /// The product of the dimensions between them.
    middle: usize,
    /// Bytes of the dimensions after both.
    inner_bytes: usize,
    /// Steps that the tensor has.
    steps: usize,
    batch_is_first: bool,
}

/// A part of a window that is contiguous in both places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First byte in the batched tensor.
    pub in_batch: usize,
    /// First byte in the window alone.
    pub alone: usize,
    /// Bytes.
    pub bytes: usize,
}

impl WindowLayout {
    /// The layout of a tensor with `dims`, where the length of the batch axis does not matter. `None` if the two axes
    /// are the same, a dimension is open, or a product overflows. As in [`RowLayout`], strings count elements.
    pub fn new(data_type: DataType, dims: &[i64], batch_axis: Option<usize>, axis: usize) -> Option<Self> {
        let steps = usize::try_from(*dims.get(axis)?).ok()?;
        let element = data_type.byte_size().unwrap_or(1);
        let (first, second) = match batch_axis {
            None => (None, axis),
            Some(batch) if batch == axis => return None,
            Some(batch) => (Some(batch.min(axis)), batch.max(axis)),
        };
        let outer = element_count(&dims[..first.unwrap_or(0)])?;
        let middle = element_count(&dims[first.map_or(0, |axis| axis + 1)..second])?;
        let inner_bytes = element_count(&dims[second + 1..])?.checked_mul(element)?;
        outer.checked_mul(middle)?.checked_mul(steps)?.checked_mul(inner_bytes)?;
        Some(Self { outer, middle, inner_bytes, steps, batch_is_first: batch_axis.is_none_or(|batch| batch < axis) })
    }

    /// Bytes of a window of `length` steps.
    pub const fn window_bytes(self, length: usize) -> usize {
        self.outer * self.middle * self.inner_bytes * length
    }

    /// Steps that the tensor has.
    pub const fn steps(self) -> usize {
        self.steps
    }

    /// The chunks of the window of `length` steps from `from` on, of row number `row` of `rows`, in the order that they
    /// have alone.
    pub fn chunks(self, row: usize, rows: usize, from: usize, length: usize) -> impl Iterator<Item = Chunk> + Clone {
        self.chunks_of(row, rows, from, length, 0, length)
    }

    /// As [`WindowLayout::chunks`], of a window that alone begins at step `first_alone` of `steps_alone`.
    fn chunks_of(
        self,
        row: usize,
        rows: usize,
        from: usize,
        length: usize,
        first_alone: usize,
        steps_alone: usize,
    ) -> impl Iterator<Item = Chunk> + Clone {
        let Self { outer, middle, inner_bytes, steps, batch_is_first } = self;
        // If the batch axis comes first, the steps are inside the dimensions between the two axes, else around them.
        let runs = if batch_is_first { 1 } else { length };
        let bytes = if batch_is_first { length * inner_bytes } else { inner_bytes };
        let outer = if bytes == 0 { 0 } else { outer };
        (0..outer).flat_map(move |o| {
            (0..runs).flat_map(move |step| {
                (0..middle).map(move |m| {
                    if batch_is_first {
                        Chunk {
                            in_batch: (((o * rows + row) * middle + m) * steps + from) * inner_bytes,
                            alone: ((o * middle + m) * steps_alone + first_alone) * inner_bytes,
                            bytes,
                        }
                    } else {
                        Chunk {
                            in_batch: (((o * steps + from + step) * middle + m) * rows + row) * inner_bytes,
                            alone: ((o * steps_alone + first_alone + step) * middle + m) * inner_bytes,
                            bytes,
                        }
                    }
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Byte of an element of a row-major tensor.
    fn byte(dims: &[i64], index: &[i64], element: usize) -> usize {
        dims.iter().zip(index).fold(0, |at, (dim, index)| at * dim + index) as usize * element
    }

    /// Every index of a tensor with these dims.
    fn indices(dims: &[i64]) -> Vec<Vec<i64>> {
        dims.iter().fold(vec![vec![]], |known, &dim| {
            known.iter().flat_map(|index| (0..dim).map(move |next| [index.as_slice(), &[next]].concat())).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn a_window_has_the_elements_of_its_steps_in_the_order_of_a_tensor_alone(
            dims in prop::collection::vec(1i64..4, 1..5), axis in 0usize..12, batch in prop::option::of(0usize..12),
            place in 0i64..12, from in 0i64..12, length in 0i64..12,
        ) {
            let axis = axis % dims.len();
            let batch = batch.map(|batch| batch % dims.len()).filter(|&batch| batch != axis);
            let rows = batch.map_or(1, |batch| dims[batch]);
            let (place, from) = (place % rows, from % (dims[axis] + 1));
            let length = length % (dims[axis] - from + 1);
            let layout = WindowLayout::new(DataType::Fp16, &dims, batch, axis).unwrap();
            let mut alone = dims.clone();
            alone[axis] = length;
            if let Some(batch) = batch {
                alone[batch] = 1;
            }
            let mut expected = std::collections::BTreeMap::new();
            for index in indices(&alone) {
                let mut whole = index.clone();
                whole[axis] += from;
                if let Some(batch) = batch {
                    whole[batch] = place;
                }
                for half in 0..2 {
                    expected.insert(byte(&alone, &index, 2) + half, byte(&dims, &whole, 2) + half);
                }
            }
            let chunks = layout.chunks(place as usize, rows as usize, from as usize, length as usize);
            let found = chunks.flat_map(|chunk| (0..chunk.bytes).map(move |at| (chunk.alone + at, chunk.in_batch + at)));
            prop_assert_eq!(found.collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(layout.window_bytes(length as usize) as i64, alone.iter().product::<i64>() * 2);
        }
    }

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
