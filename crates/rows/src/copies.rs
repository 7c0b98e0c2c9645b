//! Copies of parts of batches, such as rows, in host memory: into a batch, out of it, and between batches.
//!
//! A [`Part`] says which bytes. *Alone*, they are contiguous, and may be stored in another type ([`StorageType`]); in
//! the batch they are chunks with the bytes of other rows between them. All functions panic if the batch ends before
//! the part, and if the bytes alone are not as many as the part has.

#![forbid(unsafe_code)]

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::client::ClientBytes;
use crate::tensor::{Chunk, Part, StorageType, Strided};

/// Writes a part of a batch from where it is alone, stored so.
pub fn put(part: &Part, storage: StorageType, alone: &[u8], batch: &mut [u8]) {
    assert_eq!(alone.len(), storage.bytes(part.bytes()), "a row of another size than the layout's");
    each(part, |Chunk { in_batch, alone: from, bytes }| {
        let to = &mut batch[in_batch..in_batch + bytes];
        match storage {
            StorageType::Exact => to.copy_from_slice(&alone[from..from + bytes]),
            StorageType::Fp16 => {
                let narrow: &[f16] = bytemuck::cast_slice(&alone[from / 2..(from + bytes) / 2]);
                narrow.convert_to_f32_slice(bytemuck::cast_slice_mut(to));
            }
        }
    });
}

/// As [`put`], from the buffers of an input, which may be cut anywhere. Each byte is read once.
pub fn put_pieces<'a>(part: &Part, mut pieces: impl Iterator<Item = ClientBytes<'a>>, batch: &mut [u8]) {
    let mut piece = ClientBytes::from(&[][..]);
    let write = |Chunk { mut in_batch, mut bytes, .. }| {
        while bytes > 0 {
            if piece.byte_len() == 0 {
                let Some(next) = pieces.next() else { panic!("an incomplete row") };
                piece = next;
            }
            let now = bytes.min(piece.byte_len());
            piece.part(0..now).copy_to(&mut batch[in_batch..in_batch + now]);
            piece = piece.part(now..piece.byte_len());
            (in_batch, bytes) = (in_batch + now, bytes - now);
        }
    };
    match part.only_chunk() {
        Some(chunk) => std::iter::once(chunk).for_each(write),
        None => part.chunks().for_each(write),
    }
    let more = pieces.fold(piece.byte_len(), |more, piece| more + piece.byte_len());
    assert_eq!(more, 0, "more bytes than the row has room for");
}

/// Reads a part of a batch to where it is alone, to be stored so. fp32 is rounded to nearest even; infinities and NaN
/// stay.
pub fn take(part: &Part, storage: StorageType, batch: &[u8], alone: &mut [u8]) {
    assert_eq!(alone.len(), storage.bytes(part.bytes()), "a row of another size than the layout's");
    each(part, |Chunk { in_batch, alone: to, bytes }| {
        let from = &batch[in_batch..in_batch + bytes];
        match storage {
            StorageType::Exact => alone[to..to + bytes].copy_from_slice(from),
            StorageType::Fp16 => {
                let narrow: &mut [f16] = bytemuck::cast_slice_mut(&mut alone[to / 2..(to + bytes) / 2]);
                narrow.convert_from_f32_slice(bytemuck::cast_slice(from));
            }
        }
    });
}

/// The bytes of a part of a batch, in the order that they have alone.
pub fn pieces<'a>(part: &Part, batch: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    part.chunks().map(|Chunk { in_batch, bytes, .. }| &batch[in_batch..in_batch + bytes])
}

/// Copies a part of the batch `source` to a part of the batch `target`. Both are of the same layout.
pub fn transfer(from: &Part, source: &[u8], to: &Part, target: &mut [u8]) {
    pairs(from, to, |from, to| target[to].copy_from_slice(&source[from]));
}

/// As [`transfer`], within one batch. The two must not overlap.
pub fn shift(from: &Part, to: &Part, batch: &mut [u8]) {
    pairs(from, to, |from, to| batch.copy_within(from, to.start));
}

/// The chunks of a part, in any order.
#[inline]
fn each(part: &Part, copy: impl FnMut(Chunk)) {
    match part.only_chunk() {
        Some(chunk) => std::iter::once(chunk).for_each(copy),
        None => part.strided().flat_map(Strided::chunks).for_each(copy),
    }
}

/// Where the chunks of two parts of the same layout are in their batches.
#[inline]
fn pairs(from: &Part, to: &Part, mut copy: impl FnMut(Range<usize>, Range<usize>)) {
    let mut both = |(from, to): (Chunk, Chunk)| {
        copy(from.in_batch..from.in_batch + from.bytes, to.in_batch..to.in_batch + to.bytes);
    };
    match from.only_chunk().zip(to.only_chunk()) {
        Some(chunks) => both(chunks),
        None => {
            from.strided().zip(to.strided()).for_each(|(from, to)| from.chunks().zip(to.chunks()).for_each(&mut both))
        }
    }
}

/// Fills a part of a batch with this byte.
pub fn fill(part: &Part, batch: &mut [u8], byte: u8) {
    each(part, |Chunk { in_batch, bytes, .. }| batch[in_batch..in_batch + bytes].fill(byte));
}

/// Rounds each fp32 value of a part to the nearest value that fp16 can represent. Returns whether no finite value has
/// become infinite.
pub fn round_to_fp16(part: &Part, batch: &mut [u8]) -> bool {
    let mut fits = true;
    each(part, |Chunk { in_batch, bytes, .. }| {
        let values: &mut [f32] = bytemuck::cast_slice_mut(&mut batch[in_batch..in_batch + bytes]);
        // Converted in slices, because that uses the CPU's instructions for fp16.
        let mut narrow = [f16::ZERO; 512];
        for chunk in values.chunks_mut(narrow.len()) {
            let narrow = &mut narrow[..chunk.len()];
            narrow.convert_from_f32_slice(chunk);
            fits &= narrow.iter().zip(&*chunk).all(|(narrow, value)| narrow.is_finite() || !value.is_finite());
            narrow.convert_to_f32_slice(chunk);
        }
    });
    fits
}

/// Whether fp16 can hold each finite fp32 value of a piece of a row.
pub fn fits_fp16(piece: &[u8]) -> bool {
    let values: &[f32] = bytemuck::cast_slice(piece);
    // Numbers below this are rounded to 65504 or less. No early end, so that the compiler can use wide instructions.
    const TOO_LARGE: f32 = 65520.0;
    values.iter().fold(true, |fits, value| fits & (value.abs() < TOO_LARGE || !value.is_finite()))
}

#[cfg(any(test, feature = "fuzzing"))]
pub mod round_trip {
    use super::*;
    use crate::tensor::{RowAt, RowLayout};

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
            let pieces = [first, second].map(ClientBytes::from);
            put_pieces(&layout.row(at(index, rows)), pieces.into_iter(), &mut batch);
        }
        for index in 0..rows {
            let expected = row(index);
            for (i, byte) in expected.iter().enumerate() {
                assert_eq!(batch[place(layout, i, index, rows)], *byte);
            }
            let mut back = vec![0; layout.row_bytes()];
            take(&layout.row(at(index, rows)), StorageType::Exact, &batch, &mut back);
            assert_eq!(back, expected);
        }
        fill(&layout.row(at(0, rows)), &mut batch, 0);
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
    use crate::tensor::RowLayout;

    /// ONNX Runtime gives a tensor without elements an unaligned address.
    #[test]
    fn a_row_without_bytes_may_have_any_address_and_any_number_of_pieces() {
        let row = RowLayout { outer: usize::MAX, inner_bytes: 0 }.row(at(1, 2));
        let bytes = &mut [0u8; 5];
        let (empty, other) = bytes.split_at_mut(3);
        let (empty, other) = (&mut empty[1..1], &mut other[1..1]);
        for storage in [StorageType::Exact, StorageType::Fp16] {
            put(&row, storage, empty, other);
            take(&row, storage, other, empty);
        }
        put_pieces(&row, [ClientBytes::from(&*empty)].into_iter(), other);
        assert!(round_to_fp16(&row, other));
        fill(&row, other, 0);
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
        let [exact, fp16] = [StorageType::Exact, StorageType::Fp16];
        put(&layout.row(at(1, 3)), exact, bytemuck::bytes_of(&values), batch.bytes_mut());
        take(&layout.row(at(1, 3)), fp16, batch.bytes(), slot.bytes_mut());
        put(&layout.row(at(2, 3)), fp16, slot.bytes(), batch.bytes_mut());
        let mut back = [0f32; 8];
        take(&layout.row(at(2, 3)), exact, batch.bytes(), bytemuck::bytes_of_mut(&mut back));
        assert_eq!(back.map(f32::to_bits), expected.map(f32::to_bits));

        let nan = Part::whole(4);
        let mut batch = crate::Buffer::new(4).unwrap();
        batch.bytes_mut().copy_from_slice(&f32::NAN.to_ne_bytes());
        take(&nan, fp16, batch.bytes(), &mut slot.bytes_mut()[..2]);
        put(&nan, fp16, &slot.bytes()[..2], batch.bytes_mut());
        assert!(f32::from_ne_bytes(batch.bytes().try_into().unwrap()).is_nan());
    }

    #[test]
    fn a_row_goes_to_another_batch_and_to_another_place_of_its_batch() {
        let layout = RowLayout { outer: 2, inner_bytes: 2 };
        let source: Vec<u8> = (0..12).collect();
        let mut target = vec![0; 8];
        transfer(&layout.row(at(2, 3)), &source, &layout.row(at(0, 2)), &mut target);
        assert_eq!(target, [4, 5, 0, 0, 10, 11, 0, 0]);
        shift(&layout.row(at(0, 2)), &layout.row(at(1, 2)), &mut target);
        assert_eq!(target, [4, 5, 4, 5, 10, 11, 10, 11]);
    }

    #[test]
    #[should_panic(expected = "an incomplete row")]
    fn an_incomplete_row_is_not_written() {
        put_pieces(&Part::whole(3), [ClientBytes::from(&[1u8, 2][..])].into_iter(), &mut [0; 3]);
    }

    #[test]
    #[should_panic(expected = "more bytes than the row has room for")]
    fn nothing_is_written_after_the_end_of_a_row() {
        put_pieces(&Part::whole(1), [ClientBytes::from(&[1u8, 2][..])].into_iter(), &mut [0; 3]);
    }
}
