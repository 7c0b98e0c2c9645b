//! Memory that Triton lends for the inputs of a request and the outputs of a response.
//!
//! It may be shared memory, which the client can write while we read it and read while we write it, and memory for
//! outputs is not initialised. A slice over it would promise the compiler that no one else writes to it and that every
//! byte has a value. So there are [`ClientBytes`] to copy from and [`ClientBytesMut`] to copy to.
//!
//! Rules:
//! 1. No slice is ever made over such memory: bytes are copied out of it or into it.
//! 2. Bytes that decide anything, or that count for more than one row, are copied once, and only the copy is looked at.
//!    While a client writes, a copy has some mixture of old and new bytes, which concerns that client alone.
//! 3. All bytes of an output are written, because a client must not read what was in its memory before.
//!
//! Not for: memory of GPUs ([`super::device`]).

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;

use super::{MemoryError, reserve};

/// Bytes of an input.
#[derive(Clone, Copy, Debug)]
pub struct ClientBytes<'a> {
    start: *const u8,
    bytes: usize,
    lent: PhantomData<&'a u8>,
}

impl<'a> ClientBytes<'a> {
    /// # Safety
    /// `bytes` bytes from `start` on must be readable during `'a`. Others may write to them.
    pub const unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Self { start, bytes, lent: PhantomData }
    }

    /// How many.
    pub const fn byte_len(self) -> usize {
        self.bytes
    }

    /// Some of the bytes. Panics if there are no such.
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.bytes, "more than there is");
        // SAFETY: within the bytes, as was just seen.
        Self { start: unsafe { self.start.add(range.start) }, bytes: range.len(), lent: PhantomData }
    }

    /// Copies all bytes. Panics if `to` has another size.
    pub fn copy_to(self, to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes, "another size");
        // SAFETY: readable by `new`'s promise; `to` is borrowed exclusively, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(self.start, to.as_mut_ptr(), self.bytes) };
    }

    /// Appends a copy of all bytes.
    pub fn append_to(self, to: &mut Vec<u8>) {
        let written = to.len();
        to.resize(written + self.bytes, 0);
        self.copy_to(&mut to[written..]);
    }
}

impl<'a> From<&'a [u8]> for ClientBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice can be read as long as it is borrowed.
        unsafe { Self::new(bytes.as_ptr(), bytes.len()) }
    }
}

/// Copies pieces, one after another, to memory of ours.
pub fn copy_all<'a>(pieces: impl Iterator<Item = ClientBytes<'a>> + Clone) -> Result<Vec<u8>, MemoryError> {
    let mut copied = reserve(pieces.clone().map(ClientBytes::byte_len).fold(0, usize::saturating_add))?;
    pieces.for_each(|piece| piece.append_to(&mut copied));
    Ok(copied)
}

/// Memory for an output, to be written from its first byte to its last.
#[derive(Debug)]
pub struct ClientBytesMut<'a> {
    start: *mut u8,
    bytes: usize,
    written: usize,
    lent: PhantomData<&'a mut u8>,
}

impl ClientBytesMut<'_> {
    /// # Safety
    /// `bytes` bytes from `start` on must be writable during `'a`, and nobody else in this process uses them meanwhile.
    pub const unsafe fn new(start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes, written: 0, lent: PhantomData }
    }

    /// Appends bytes. Panics if there is no room for them.
    pub fn write(&mut self, piece: &[u8]) {
        assert!(piece.len() <= self.bytes - self.written, "more than there is room for");
        // SAFETY: writable by `new`'s promise, and there is room, as was just seen. By the same promise nothing else in
        // this process uses these bytes, so `piece` does not overlap with them.
        unsafe { ptr::copy_nonoverlapping(piece.as_ptr(), self.start.add(self.written), piece.len()) };
        self.written += piece.len();
    }

    /// Panics if some bytes have not been written.
    pub fn finish(self) {
        assert_eq!(self.written, self.bytes, "an output of another size");
    }
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    #[test]
    fn pieces_are_copied_one_after_another() {
        let pieces = [&[1u8, 2][..], &[], &[3]].map(ClientBytes::from);
        assert_eq!(copy_all(pieces.into_iter()).unwrap(), [1, 2, 3]);
        let mut copied = [0; 2];
        ClientBytes::from(&[1u8, 2, 3, 4][..]).part(1..3).copy_to(&mut copied);
        assert_eq!(copied, [2, 3]);
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        let huge = ClientBytes { start: ptr::null(), bytes: usize::MAX, lent: PhantomData };
        assert_eq!(copy_all([huge].into_iter()).err(), Some(MemoryError::Host { bytes: usize::MAX }));
    }

    #[test]
    fn memory_without_values_is_written_as_a_whole() {
        let mut memory = [MaybeUninit::<u8>::uninit(); 3];
        // SAFETY: the array lives until the end and is used again only behind the writer.
        let mut writer = unsafe { ClientBytesMut::new(memory.as_mut_ptr().cast(), memory.len()) };
        writer.write(&[7, 8]);
        writer.write(&[]);
        writer.write(&[9]);
        writer.finish();
        // SAFETY: all three have been written.
        assert_eq!(memory.map(|byte| unsafe { byte.assume_init() }), [7, 8, 9]);
    }

    #[test]
    #[should_panic(expected = "an output of another size")]
    fn an_output_that_is_not_whole_is_not_finished() {
        let mut memory = [0u8; 3];
        // SAFETY: as above.
        let mut writer = unsafe { ClientBytesMut::new(memory.as_mut_ptr(), memory.len()) };
        writer.write(&[7, 8]);
        writer.finish();
    }

    #[test]
    #[should_panic(expected = "more than there is room for")]
    fn nothing_is_written_behind_an_output() {
        let mut memory = [0u8; 3];
        // SAFETY: as above.
        unsafe { ClientBytesMut::new(memory.as_mut_ptr(), 2) }.write(&[7, 8, 9]);
    }
}
