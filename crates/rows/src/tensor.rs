//! Data types and shapes of tensors, in the terms that Triton and ONNX share, and where the bytes of a row lie in a
//! batch.
//!
//! Rules: a shape is a list of signed dimensions, where -1 stands for an open one. A row of a batch is in as many
//! pieces as the dimensions before the batch axis have elements; what is copied at once is a [`Part`], whose [`Chunk`]s
//! are all that copies need. Nothing here allocates, or knows Triton, ONNX Runtime or memory.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;

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

/// A row of a batch.
#[derive(Clone, Copy, Debug)]
pub struct RowAt {
    pub position: usize,
    /// Rows that its bytes are laid out for.
    pub rows: usize,
}

/// The shape of the rows of a batched tensor: `outer` pieces of `inner_bytes` bytes each.
///
/// A tensor `[d0, …, batch, …, dn]` with `rows` rows has piece `o` of row `r` at byte `(o * rows + r) * inner_bytes`.
/// Alone, a row is its pieces one after another. The batch axis may be any dimension. Without one, `outer` is 1 and the
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
        // So that `row_bytes` cannot overflow.
        outer.checked_mul(inner_bytes)?;
        Some(Self { outer, inner_bytes })
    }

    pub const fn row_bytes(self) -> usize {
        self.outer * self.inner_bytes
    }

    /// A whole row of a batch. If `outer` is 1, it may be after the first `rows` rows.
    #[inline]
    pub const fn row(self, RowAt { position, rows }: RowAt) -> Part {
        let Self { outer, inner_bytes: bytes } = self;
        if self.row_bytes() == 0 {
            return Part::EMPTY;
        }
        let row = Segment { in_batch: position * bytes, count: outer, stride: rows * bytes, bytes };
        Part { outer: Loop::ONCE, inner: Loop::ONCE, segments: [row, Segment::NONE], bytes: self.row_bytes() }
    }
}

/// The shape of the rows of a batched tensor, for copies of some steps of a row along one axis.
///
/// These steps are a *window*. Alone, its elements lie as in a tensor with the row's dims and the number of steps
/// for the axis. The batch axis may be before or after the axis of the window, or missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLayout {
    /// The product of the dimensions before both axes.
    outer: usize,
    /// The product of the dimensions between them.
    middle: usize,
    /// Bytes of the dimensions after both.
    inner_bytes: usize,
    steps: usize,
    batch_is_first: bool,
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
        // So that the size of no window can overflow.
        outer.checked_mul(middle)?.checked_mul(steps)?.checked_mul(inner_bytes)?;
        Some(Self { outer, middle, inner_bytes, steps, batch_is_first: batch_axis.is_none_or(|batch| batch < axis) })
    }

    pub const fn window_bytes(self, length: usize) -> usize {
        self.outer * self.middle * self.inner_bytes * length
    }

    pub const fn steps(self) -> usize {
        self.steps
    }

    pub fn window(self, at: RowAt, steps: Range<usize>) -> Part {
        self.part(at, [steps, 0..0])
    }

    /// A row without the steps of its gap; `None` if the gap is not within the axis.
    pub fn around(self, at: RowAt, gap: Gap) -> Option<Part> {
        let end = gap.from.checked_add(gap.length).filter(|&end| end <= self.steps)?;
        Some(self.part(at, [0..gap.from, end..self.steps]))
    }

    /// Two windows of a row, which are one after the other alone.
    fn part(self, RowAt { position, rows }: RowAt, steps: [Range<usize>; 2]) -> Part {
        let Self { outer, middle, inner_bytes, steps: all, batch_is_first } = self;
        let alone = steps[0].len() + steps[1].len();
        let bytes = self.window_bytes(alone);
        if bytes == 0 {
            return Part::EMPTY;
        }
        let whole = middle * all * inner_bytes;
        let outer = Loop { count: outer, stride: rows * whole };
        if batch_is_first {
            let inner = Loop { count: middle, stride: all * inner_bytes };
            let segments = steps.map(|steps| Segment {
                in_batch: position * whole + steps.start * inner_bytes,
                count: steps.len().min(1),
                stride: 0,
                bytes: steps.len() * inner_bytes,
            });
            // With one round inside, the rounds outside make one group of chunks in `strided` instead of one each.
            let (outer, inner) = if middle == 1 { (inner, outer) } else { (outer, inner) };
            return Part { outer, inner, segments, bytes };
        }
        let segments = steps.map(|steps| Segment {
            in_batch: (steps.start * middle * rows + position) * inner_bytes,
            count: steps.len() * middle,
            stride: rows * inner_bytes,
            bytes: inner_bytes,
        });
        Part { outer, inner: Loop::ONCE, segments, bytes }
    }
}

/// Steps of a row of a batch that are padding. A batch is as long as its longest row. In a shorter row, the missing
/// steps may be before the row's own steps, between them or after them. Alone, the row has no gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    pub from: usize,
    pub length: usize,
}

impl Gap {
    pub const NONE: Self = Self { from: 0, length: 0 };

    pub const fn steps(self) -> Range<usize> {
        self.from..self.from + self.length
    }

    pub const fn is_none(self) -> bool {
        self.length == 0
    }
}

/// The side of the padding in rows that are shorter than their batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingSide {
    Left,
    Right,
}

impl PaddingSide {
    /// The gap of a row with so many steps in a batch of `padded` steps.
    pub const fn gap(self, steps: usize, padded: usize) -> Gap {
        let from = match self {
            Self::Left => 0,
            Self::Right => steps,
        };
        Gap { from, length: padded.saturating_sub(steps) }
    }
}

impl fmt::Display for PaddingSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "left",
            Self::Right => "right",
        })
    }
}

/// A part of a batched tensor that is copied at once: a row ([`RowLayout::row`]), some of its steps
/// ([`WindowLayout::window`]), or a row around its gap ([`WindowLayout::around`]).
#[derive(Clone, Copy, Debug)]
pub struct Part {
    outer: Loop,
    /// Repeats the segments, in each round of `outer`. Only if they have one chunk at most, it has more than one round.
    inner: Loop,
    /// In the order that they have alone.
    segments: [Segment; 2],
    bytes: usize,
}

/// Repeats what is in it.
#[derive(Clone, Copy, Debug)]
struct Loop {
    count: usize,
    /// Bytes from one round to the next in the batch.
    stride: usize,
}

impl Loop {
    const ONCE: Self = Self { count: 1, stride: 0 };
}

/// Chunks of equal size, which have equal distances in the batch. Alone, there is nothing between them.
#[derive(Clone, Copy, Debug)]
struct Segment {
    in_batch: usize,
    count: usize,
    stride: usize,
    bytes: usize,
}

impl Segment {
    const NONE: Self = Self { in_batch: 0, count: 0, stride: 0, bytes: 0 };
}

/// Bytes that are contiguous in both places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First byte in the batched tensor.
    pub in_batch: usize,
    /// First byte in the part alone.
    pub alone: usize,
    pub bytes: usize,
}

/// Chunks of equal size and equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    pub first: Chunk,
    /// Bytes from one chunk to the next in the batch.
    pub in_batch_stride: usize,
    /// Bytes from one chunk to the next alone.
    pub alone_stride: usize,
    pub count: usize,
}

impl Strided {
    #[inline]
    pub fn chunks(self) -> impl Iterator<Item = Chunk> {
        let Self { first: Chunk { in_batch, alone, bytes }, in_batch_stride, alone_stride, count } = self;
        (0..count).map(move |at| Chunk {
            in_batch: in_batch + at * in_batch_stride,
            alone: alone + at * alone_stride,
            bytes,
        })
    }
}

impl Part {
    const EMPTY: Self = Self { outer: Loop::ONCE, inner: Loop::ONCE, segments: [Segment::NONE; 2], bytes: 0 };

    /// Bytes that are contiguous in the batch, too: those of a batch that has no other rows.
    pub const fn whole(bytes: usize) -> Self {
        RowLayout { outer: 1, inner_bytes: bytes }.row(RowAt { position: 0, rows: 1 })
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that a batch must have at least to contain the part. It does not overflow.
    #[inline]
    pub fn end(&self) -> usize {
        let distance = |count: usize, stride: usize| count.saturating_sub(1).saturating_mul(stride);
        let round =
            distance(self.outer.count, self.outer.stride).saturating_add(distance(self.inner.count, self.inner.stride));
        let ends = self.segments.iter().filter(|of| of.count > 0).map(|of| {
            of.in_batch.saturating_add(distance(of.count, of.stride)).saturating_add(of.bytes).saturating_add(round)
        });
        ends.max().unwrap_or(0)
    }

    /// The chunk of a part that has one, which is a row whose batch axis is the first. Most copies are of such a row,
    /// and this is faster than the iterators. Other parts may have one chunk, too.
    #[inline]
    pub const fn only_chunk(&self) -> Option<Chunk> {
        let Segment { in_batch, count, bytes, .. } = self.segments[0];
        if count == 1 && bytes == self.bytes { Some(Chunk { in_batch, alone: 0, bytes }) } else { None }
    }

    /// The first byte in the batch, if the part is in one piece there.
    pub fn contiguous_from(&self) -> Option<usize> {
        let first = self.chunks().next()?.in_batch;
        (self.end() - first == self.bytes).then_some(first)
    }

    /// The chunks, in the order that they have alone.
    #[inline]
    pub fn chunks(&self) -> impl Iterator<Item = Chunk> + Clone + use<> {
        let Self { outer, inner, segments: [mut of, mut other], .. } = *self;
        let (mut o, mut i, mut chunk, mut is_second, mut alone) = (0, 0, 0, false, 0);
        std::iter::from_fn(move || {
            while o < outer.count {
                if chunk < of.count {
                    let in_batch = of.in_batch + o * outer.stride + i * inner.stride + chunk * of.stride;
                    let next = Chunk { in_batch, alone, bytes: of.bytes };
                    (chunk, alone) = (chunk + 1, alone + of.bytes);
                    return Some(next);
                }
                std::mem::swap(&mut of, &mut other);
                chunk = 0;
                if is_second {
                    i += 1;
                    if i == inner.count {
                        (o, i) = (o + 1, 0);
                    }
                }
                is_second = !is_second;
            }
            None
        })
    }

    /// The chunks in few groups, in any order. Copies that need no order are faster with these.
    #[inline]
    pub fn strided(&self) -> impl Iterator<Item = Strided> + Clone + use<> {
        let Self { outer, inner, segments: [first, second], .. } = *self;
        let (before, round) = (first.count * first.bytes, first.count * first.bytes + second.count * second.bytes);
        let group = move |of: Segment, before: usize, o: usize| Strided {
            first: Chunk {
                in_batch: of.in_batch + o * outer.stride,
                alone: before + o * inner.count * round,
                bytes: of.bytes,
            },
            in_batch_stride: if inner.count > 1 { inner.stride } else { of.stride },
            alone_stride: if inner.count > 1 { round } else { of.bytes },
            count: if inner.count > 1 { inner.count } else { of.count },
        };
        let groups = move |of: Segment, before: usize| {
            (0..if of.count == 0 { 0 } else { outer.count }).map(move |o| group(of, before, o))
        };
        groups(first, 0).chain(groups(second, before))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 1024 }, failure_persistence: None, ..Default::default() })]
        /// Compares rows, windows and rows around gaps with the definition of a row-major tensor.
        #[test]
        fn a_part_has_its_elements_in_the_order_of_a_tensor_alone(
            dims in prop::collection::vec(prop::sample::select(vec![1i64, 1, 2, 3]), 1..5), axis in 0usize..12, batch in prop::option::of(0usize..12),
            position in 0i64..12, from in 0i64..12, length in 0i64..12, element in prop::sample::select(vec![DataType::Uint8, DataType::Fp16]),
        ) {
            let axis = axis % dims.len();
            let batch = batch.map(|batch| batch % dims.len());
            let rows = batch.map_or(1, |batch| dims[batch]);
            let (position, from) = (position % rows, from % (dims[axis] + 1));
            let end = from + length % (dims[axis] - from + 1);
            let at = RowAt { position: position as usize, rows: rows as usize };
            // The bytes of the row that `has` wants, in the order of the batch, which is that of a row alone.
            let size = element.byte_size().unwrap() as i64;
            let bytes_with = |has: &dyn Fn(i64) -> bool| -> Vec<usize> {
                let index = |byte: i64, axis: usize| {
                    byte / size / dims[axis + 1..].iter().product::<i64>() % dims[axis]
                };
                let all = 0..dims.iter().product::<i64>() * size;
                let own = all.filter(|&byte| batch.is_none_or(|batch| index(byte, batch) == position));
                own.filter(|&byte| has(index(byte, axis))).map(|byte| byte as usize).collect()
            };
            let mut parts = vec![(RowLayout::new(element, &dims, batch).unwrap().row(at), bytes_with(&|_| true))];
            let layout = WindowLayout::new(element, &dims, batch, axis);
            prop_assert_eq!(layout.is_none(), batch == Some(axis));
            if let Some(layout) = layout {
                let steps = from as usize..end as usize;
                let gap = Gap { from: steps.start, length: steps.len() };
                parts.push((layout.window(at, steps), bytes_with(&|step| (from..end).contains(&step))));
                parts.push((layout.around(at, gap).unwrap(), bytes_with(&|step| !(from..end).contains(&step))));
            }
            for (part, expected) in parts {
                let chunks = part.chunks().flat_map(|of| (0..of.bytes).map(move |byte| (of.alone + byte, of.in_batch + byte)));
                let expected: Vec<_> = expected.into_iter().enumerate().collect();
                prop_assert_eq!(chunks.collect::<Vec<_>>(), expected.clone(), "{:?}", part);
                prop_assert_eq!(part.bytes(), expected.len());
                let first = expected.first().map(|&(_, byte)| byte);
                let is_contiguous = expected.iter().all(|&(alone, in_batch)| Some(in_batch - alone) == first);
                prop_assert_eq!(part.contiguous_from(), first.filter(|_| is_contiguous));
                if let Some(only) = part.only_chunk() {
                    prop_assert_eq!(part.chunks().collect::<Vec<_>>(), [only]);
                }
                prop_assert_eq!(part.end(), expected.last().map_or(0, |&(_, byte)| byte + 1));
                let mut grouped = Vec::new();
                for of in part.strided().flat_map(Strided::chunks) {
                    grouped.extend((0..of.bytes).map(|byte| (of.alone + byte, of.in_batch + byte)));
                }
                grouped.sort_unstable();
                prop_assert_eq!(grouped, expected);
            }
        }
    }

    #[test]
    fn a_gap_beyond_the_axis_is_none() {
        let layout = WindowLayout::new(DataType::Fp32, &[1, 4], Some(0), 1).unwrap();
        let around = |from, length| layout.around(RowAt { position: 0, rows: 1 }, Gap { from, length });
        assert!(around(0, 4).is_some_and(|part| part.bytes() == 0));
        assert!(around(1, 4).is_none() && around(usize::MAX, 2).is_none());
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
