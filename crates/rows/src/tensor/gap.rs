//! Rows with a gap: rows that are shorter than their batch along one axis.
//!
//! A batch is as long as its longest row. In a shorter row, the steps that are missing are a [`Gap`], which may be in
//! front of the row's own steps, between them or behind them. Alone, the row has no gap.

use std::fmt;

use super::{Chunk, DataType, RowAt, WindowLayout};

/// Steps of a row of a batch that are padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    /// The first of them.
    pub from: usize,
    /// How many there are.
    pub length: usize,
}

impl Gap {
    /// No padding.
    pub const NONE: Self = Self { from: 0, length: 0 };

    /// Whether there is no padding.
    pub const fn is_none(self) -> bool {
        self.length == 0
    }
}

/// Where the padding of rows is that are shorter than their batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingSide {
    /// In front of the row.
    Left,
    /// Behind the row.
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

/// Where a row lies in a batch, around its gap.
#[derive(Clone, Copy, Debug)]
pub struct GappedRow {
    layout: WindowLayout,
    gap: Gap,
    at: RowAt,
}

impl GappedRow {
    /// A row of a tensor with `dims` that has a gap along `axis`. `None` as for [`WindowLayout::new`], and if the gap is
    /// not within the axis.
    pub fn new(
        data_type: DataType,
        dims: &[i64],
        batch_axis: Option<usize>,
        axis: usize,
        gap: Gap,
        at: RowAt,
    ) -> Option<Self> {
        let layout = WindowLayout::new(data_type, dims, batch_axis, axis)?;
        (gap.from.checked_add(gap.length)? <= layout.steps()).then_some(Self { layout, gap, at })
    }

    /// Bytes of the row without its gap.
    pub const fn row_bytes(&self) -> usize {
        self.layout.window_bytes(self.steps())
    }

    /// The row without its gap.
    pub fn chunks(&self) -> impl Iterator<Item = Chunk> + Clone {
        let Self { layout, gap, at } = *self;
        let steps = self.steps();
        let part = move |from, length, alone| layout.chunks_of(at.position, at.rows, from, length, alone, steps);
        part(0, gap.from, 0).chain(part(gap.from + gap.length, steps - gap.from, gap.from))
    }

    /// The gap, and where its elements lie alone.
    pub fn gap_chunks(&self) -> impl Iterator<Item = Chunk> + Clone {
        self.layout.chunks(self.at.position, self.at.rows, self.gap.from, self.gap.length)
    }

    /// Bytes of the gap.
    pub const fn gap_bytes(&self) -> usize {
        self.layout.window_bytes(self.gap.length)
    }

    const fn steps(&self) -> usize {
        self.layout.steps() - self.gap.length
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor::element_count;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn a_row_lies_around_its_gap_and_alone_without_it(
            dims in prop::collection::vec(1i64..5, 1..5), axis in 0usize..12, batch in prop::option::of(0usize..12),
            place in 0i64..12, from in 0i64..12, length in 0i64..12,
        ) {
            let axis = axis % dims.len();
            let batch = batch.map(|batch| batch % dims.len()).filter(|&batch| batch != axis);
            let rows = batch.map_or(1, |batch| dims[batch]);
            let (place, from) = (place % rows, from % (dims[axis] + 1));
            let length = length % (dims[axis] - from + 1);
            let gap = Gap { from: from as usize, length: length as usize };
            let at = RowAt { position: place as usize, rows: rows as usize };
            let row = GappedRow::new(DataType::Uint8, &dims, batch, axis, gap, at).unwrap();
            // Each element of the batch in turn: its byte is its number.
            let (mut alone, mut in_gap) = (Vec::new(), Vec::new());
            for byte in 0..element_count(&dims).unwrap() {
                let index = |axis: usize| byte as i64 / dims[axis + 1..].iter().product::<i64>() % dims[axis];
                if batch.is_some_and(|batch| index(batch) != place) {
                    continue;
                }
                let is_padding = (from..from + length).contains(&index(axis));
                if is_padding { in_gap.push(byte) } else { alone.push(byte) }
            }
            let bytes = |chunk: Chunk| (0..chunk.bytes).map(move |byte| (chunk.alone + byte, chunk.in_batch + byte));
            let mut found: Vec<_> = row.chunks().flat_map(bytes).collect();
            found.sort_unstable();
            prop_assert_eq!(found, alone.iter().copied().enumerate().collect::<Vec<_>>());
            prop_assert_eq!(row.row_bytes(), alone.len());
            let mut found: Vec<_> = row.gap_chunks().flat_map(bytes).map(|(_, in_batch)| in_batch).collect();
            found.sort_unstable();
            prop_assert_eq!(found, in_gap);
        }
    }

    #[test]
    fn a_gap_beyond_the_axis_is_none() {
        let row = |from, length| {
            let (gap, at) = (Gap { from, length }, RowAt { position: 0, rows: 1 });
            GappedRow::new(DataType::Fp32, &[1, 4], Some(0), 1, gap, at)
        };
        assert!(row(0, 4).is_some_and(|row| row.row_bytes() == 0));
        assert!(row(1, 4).is_none() && row(usize::MAX, 2).is_none());
    }
}
