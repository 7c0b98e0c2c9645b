//! Copies of rows into batches, out of them, and between them, in host memory.
//!
//! A row *alone* is contiguous. In a batch, the same row consists of *pieces* with the other rows' pieces between them
//! (see [`RowLayout`]).

#![forbid(unsafe_code)]

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::client::ClientBytes;
use crate::tensor::{Chunk, RowAt, RowLayout};

/// Writes `row` as a row of a batch. Panics if a size does not match the layout.
pub fn put(layout: RowLayout, row: &[u8], batch: &mut [u8], at: RowAt) {
    let mut writer = RowWriter::new(layout, batch, at);
    writer.write(row.into());
    writer.finish();
}

/// Reads a row of a batch into `row`. Panics if a size does not match the layout.
pub fn take(layout: RowLayout, batch: &[u8], at: RowAt, row: &mut [u8]) {
    assert_eq!(row.len(), layout.row_bytes(), "a row of another size than the layout's");
    for (outer, piece) in pieces_of(layout, batch, at).enumerate() {
        let to = outer * layout.inner_bytes;
        row[to..to + layout.inner_bytes].copy_from_slice(piece);
    }
}

/// The pieces of a row of a batch, in order. Panics if the batch is too small.
pub fn pieces_of(layout: RowLayout, batch: &[u8], at: RowAt) -> impl Iterator<Item = &[u8]> {
    pieces(layout, at).map(|piece| &batch[piece])
}

/// Copies a row of the batch `source` to a row of the batch `target`. Panics if a batch is too small.
pub fn transfer(layout: RowLayout, source: &[u8], from: RowAt, target: &mut [u8], to: RowAt) {
    for (from, to) in pieces(layout, from).zip(pieces(layout, to)) {
        target[to].copy_from_slice(&source[from]);
    }
}

/// As [`transfer`], within one buffer. The pieces of the two rows must not overlap.
pub fn shift(layout: RowLayout, batch: &mut [u8], from: RowAt, to: RowAt) {
    for (from, to) in pieces(layout, from).zip(pieces(layout, to)) {
        batch.copy_within(from, to.start);
    }
}

/// Rounds each fp32 value of a row to the nearest value that fp16 can represent. Returns whether no finite value has become
/// infinite.
pub fn round_to_fp16(layout: RowLayout, batch: &mut [u8], at: RowAt) -> bool {
    let mut fits = true;
    for piece in pieces(layout, at) {
        let values: &mut [f32] = bytemuck::cast_slice_mut(&mut batch[piece]);
        let mut narrow = [f16::ZERO; 512];
        for chunk in values.chunks_mut(narrow.len()) {
            let narrow = &mut narrow[..chunk.len()];
            narrow.convert_from_f32_slice(chunk);
            fits &= narrow.iter().zip(&*chunk).all(|(narrow, value)| narrow.is_finite() || !value.is_finite());
            narrow.convert_to_f32_slice(chunk);
        }
    }
    fits
}

/// Whether fp16 can hold each finite fp32 value of a piece of a row.
pub fn fits_fp16(piece: &[u8]) -> bool {
    let values: &[f32] = bytemuck::cast_slice(piece);
    // Numbers below this are rounded to 65504 or less. No early end, so that the compiler can use wide instructions.
    const TOO_LARGE: f32 = 65520.0;
    values.iter().fold(true, |fits, value| fits & (value.abs() < TOO_LARGE || !value.is_finite()))
}

/// As [`put`], from a row of fp16 to a batch of fp32.
pub fn put_widened(layout: RowLayout, row: &[u8], batch: &mut [u8], at: RowAt) {
    let narrow = layout.inner_bytes / 2;
    for (outer, piece) in pieces(layout, at).enumerate() {
        let from: &[f16] = bytemuck::cast_slice(&row[outer * narrow..(outer + 1) * narrow]);
        from.convert_to_f32_slice(bytemuck::cast_slice_mut(&mut batch[piece]));
    }
}

/// As [`take`], from a batch of fp32 to a row of fp16. Rounds to nearest even; infinities and NaN stay.
pub fn take_narrowed(layout: RowLayout, batch: &[u8], at: RowAt, row: &mut [u8]) {
    let narrow = layout.inner_bytes / 2;
    for (outer, piece) in pieces_of(layout, batch, at).enumerate() {
        let to: &mut [f16] = bytemuck::cast_slice_mut(&mut row[outer * narrow..(outer + 1) * narrow]);
        to.convert_from_f32_slice(bytemuck::cast_slice(piece));
    }
}

/// Fills a row of a batch with zeros.
pub fn zero(layout: RowLayout, batch: &mut [u8], at: RowAt) {
    pieces(layout, at).for_each(|piece| batch[piece].fill(0));
}

/// Where the pieces of a row are in its batch. A row without bytes has none: its batch may have an unaligned address,
/// and `outer` may be any number.
fn pieces(layout: RowLayout, at: RowAt) -> impl Iterator<Item = Range<usize>> {
    let RowLayout { outer, inner_bytes } = layout;
    (0..if inner_bytes == 0 { 0 } else { outer }).map(move |outer| {
        let from = (outer * at.rows + at.position) * inner_bytes;
        from..from + inner_bytes
    })
}

/// Copies the elements of a window from `alone` to their chunks in the batch. Panics if a chunk is out of bounds.
pub fn put_window(chunks: impl Iterator<Item = Chunk>, alone: ClientBytes, batch: &mut [u8]) {
    for Chunk { in_batch, alone: from, bytes } in chunks {
        alone.part(from..from + bytes).copy_to(&mut batch[in_batch..in_batch + bytes]);
    }
}

/// The chunks of a window in the batch, in the order that they have alone. Panics if a chunk is out of bounds.
pub fn pieces_of_window(chunks: impl Iterator<Item = Chunk>, batch: &[u8]) -> impl Iterator<Item = &[u8]> {
    chunks.map(|Chunk { in_batch, bytes, .. }| &batch[in_batch..in_batch + bytes])
}

/// Copies the elements of a window from their chunks in the batch to `alone`. Panics if a chunk is out of bounds.
pub fn take_window(chunks: impl Iterator<Item = Chunk>, batch: &[u8], alone: &mut [u8]) {
    for Chunk { in_batch, alone: to, bytes } in chunks {
        alone[to..to + bytes].copy_from_slice(&batch[in_batch..in_batch + bytes]);
    }
}

/// Copies a window of the batch to another one of the same length in it. Panics if a chunk is out of bounds.
pub fn copy_window(from: impl Iterator<Item = Chunk>, to: impl Iterator<Item = Chunk>, batch: &mut [u8]) {
    for (from, to) in from.zip(to) {
        batch.copy_within(from.in_batch..from.in_batch + from.bytes, to.in_batch);
    }
}

/// As [`put_window`], from fp16 to a batch of fp32.
pub fn put_window_widened(chunks: impl Iterator<Item = Chunk>, alone: &[u8], batch: &mut [u8]) {
    for Chunk { in_batch, alone: from, bytes } in chunks {
        let narrow: &[f16] = bytemuck::cast_slice(&alone[from / 2..(from + bytes) / 2]);
        narrow.convert_to_f32_slice(bytemuck::cast_slice_mut(&mut batch[in_batch..in_batch + bytes]));
    }
}

/// As [`take_window`], from a batch of fp32 to fp16. Rounds to nearest even; infinities and NaN stay.
pub fn take_window_narrowed(chunks: impl Iterator<Item = Chunk>, batch: &[u8], alone: &mut [u8]) {
    for Chunk { in_batch, alone: to, bytes } in chunks {
        let narrow: &mut [f16] = bytemuck::cast_slice_mut(&mut alone[to / 2..(to + bytes) / 2]);
        narrow.convert_from_f32_slice(bytemuck::cast_slice(&batch[in_batch..in_batch + bytes]));
    }
}

/// Fills the chunks of a window in the batch with zeros.
pub fn zero_window(chunks: impl Iterator<Item = Chunk>, batch: &mut [u8]) {
    fill_window(chunks, batch, 0);
}

/// Fills the chunks of a window in the batch with this byte.
pub fn fill_window(chunks: impl Iterator<Item = Chunk>, batch: &mut [u8], byte: u8) {
    for Chunk { in_batch, bytes, .. } in chunks {
        batch[in_batch..in_batch + bytes].fill(byte);
    }
}

/// Writes one row of a batch from the buffers of an input, which may be cut anywhere.
pub struct RowWriter<'a> {
    layout: RowLayout,
    batch: &'a mut [u8],
    at: RowAt,
    written: usize,
}

impl<'a> RowWriter<'a> {
    /// A writer for a row. Panics if the batch does not match the layout.
    pub fn new(layout: RowLayout, batch: &'a mut [u8], at: RowAt) -> Self {
        assert_eq!(batch.len(), layout.row_bytes() * at.rows, "a batch of another size than the layout's");
        Self { layout, batch, at, written: 0 }
    }

    /// Appends the bytes of the next buffer. Panics if the row has no room for them.
    pub fn write(&mut self, buffer: ClientBytes) {
        assert!(buffer.byte_len() <= self.layout.row_bytes() - self.written, "more bytes than the row has room for");
        let mut from = 0;
        while from < buffer.byte_len() {
            let (outer, inner) = (self.written / self.layout.inner_bytes, self.written % self.layout.inner_bytes);
            let now = (buffer.byte_len() - from).min(self.layout.inner_bytes - inner);
            let start = (outer * self.at.rows + self.at.position) * self.layout.inner_bytes + inner;
            buffer.part(from..from + now).copy_to(&mut self.batch[start..start + now]);
            self.written += now;
            from += now;
        }
    }

    /// Checks that the row is complete. Panics if not.
    pub fn finish(self) {
        assert_eq!(self.written, self.layout.row_bytes(), "an incomplete row");
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub mod round_trip {
    use super::*;

    pub const fn at(position: usize, rows: usize) -> RowAt {
        RowAt { position, rows }
    }

    /// Position in the batch of byte `i` of a row, from the definition of a row-major tensor `[outer, rows, inner]`.
    fn place(layout: RowLayout, i: usize, index: usize, rows: usize) -> usize {
        let (outer, inner) = (i / layout.inner_bytes, i % layout.inner_bytes);
        outer * rows * layout.inner_bytes + index * layout.inner_bytes + inner
    }

    /// Writes rows, each cut in two pieces, reads them back, and zeroes the first.
    pub fn rows_come_back(layout: RowLayout, rows: usize, cut: usize, seed: u8) {
        let mut batch = vec![0; layout.row_bytes() * rows];
        let row = |index: usize| -> Vec<u8> {
            (0..layout.row_bytes()).map(|i| seed.wrapping_add((index * 50 + i) as u8)).collect()
        };
        for index in 0..rows {
            let bytes = row(index);
            let (first, second) = bytes.split_at(cut.min(bytes.len()));
            let mut writer = RowWriter::new(layout, &mut batch, at(index, rows));
            writer.write(first.into());
            writer.write(second.into());
            writer.finish();
        }
        for index in 0..rows {
            let expected = row(index);
            for (i, byte) in expected.iter().enumerate() {
                assert_eq!(batch[place(layout, i, index, rows)], *byte);
            }
            let mut back = vec![0; layout.row_bytes()];
            take(layout, &batch, at(index, rows), &mut back);
            assert_eq!(back, expected);
        }
        zero(layout, &mut batch, at(0, rows));
        let zeros = batch
            .iter()
            .enumerate()
            .filter(|(byte, _)| (0..layout.row_bytes()).any(|i| place(layout, i, 0, rows) == *byte));
        assert!(zeros.map(|(_, byte)| *byte).all(|byte| byte == 0));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::round_trip::{at, rows_come_back};
    use super::*;

    /// ONNX Runtime gives a tensor without elements an unaligned address.
    #[test]
    fn a_row_without_bytes_may_have_any_address_and_any_number_of_pieces() {
        let layout = RowLayout { outer: usize::MAX, inner_bytes: 0 };
        let bytes = &mut [0u8; 5];
        let (empty, other) = bytes.split_at_mut(3);
        let (empty, other) = (&mut empty[1..1], &mut other[1..1]);
        put(layout, empty, other, at(0, 2));
        take(layout, other, at(1, 2), empty);
        put_widened(layout, empty, other, at(0, 2));
        take_narrowed(layout, other, at(1, 2), empty);
        assert!(round_to_fp16(layout, other, at(1, 2)));
        zero(layout, other, at(0, 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn rows_land_where_a_row_major_tensor_has_them_and_come_back(
            outer in 1usize..5, inner_bytes in 1usize..9, rows in 1usize..6, cut in 0usize..40, seed in any::<u8>(),
        ) {
            rows_come_back(RowLayout { outer, inner_bytes }, rows, cut, seed);
        }
    }

    #[test]
    fn fp16_rows_round_to_nearest_even_and_keep_infinities_and_nan() {
        let layout = RowLayout { outer: 2, inner_bytes: 16 };
        // Halfway cases round to the even neighbour: 2049 to 2048, 2051 to 2052; 65520 is halfway to infinity.
        let values = [2049.0, 2051.0, 65520.0, 65519.0, f32::INFINITY, f32::NEG_INFINITY, -0.0, 5.960_464_5e-8];
        let expected = [2048.0, 2052.0, f32::INFINITY, 65504.0, f32::INFINITY, f32::NEG_INFINITY, -0.0, 5.960_464_5e-8];
        let mut batch = crate::Buffer::new(96).unwrap();
        let mut slot = crate::Buffer::new(16).unwrap();
        put(layout, bytemuck::bytes_of(&values), batch.bytes_mut(), at(1, 3));
        take_narrowed(layout, batch.bytes(), at(1, 3), slot.bytes_mut());
        put_widened(layout, slot.bytes(), batch.bytes_mut(), at(2, 3));
        let mut back = [0f32; 8];
        take(layout, batch.bytes(), at(2, 3), bytemuck::bytes_of_mut(&mut back));
        assert_eq!(back.map(f32::to_bits), expected.map(f32::to_bits));

        let nan = RowLayout { outer: 1, inner_bytes: 4 };
        let mut batch = crate::Buffer::new(4).unwrap();
        batch.bytes_mut().copy_from_slice(&f32::NAN.to_ne_bytes());
        take_narrowed(nan, batch.bytes(), at(0, 1), &mut slot.bytes_mut()[..2]);
        put_widened(nan, &slot.bytes()[..2], batch.bytes_mut(), at(0, 1));
        assert!(f32::from_ne_bytes(batch.bytes().try_into().unwrap()).is_nan());
    }

    #[test]
    fn a_row_without_pieces_copies_nothing() {
        let layout = RowLayout { outer: 0, inner_bytes: 0 };
        put(layout, &[], &mut [], at(0, 3));
        take(layout, &[], at(0, 3), &mut []);
    }
}
