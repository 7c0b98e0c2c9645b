//! Memory that Triton lends for the inputs of a request and the outputs of a response.
//!
//! It may be shared memory: a client can write to it while we read it, and read it while we write to it. Memory for
//! outputs is not initialised. A slice over such memory would be unsound, because a slice promises the compiler that
//! nobody else writes to the bytes and that all of them are initialised. So we copy from [`ClientBytes`] and to
//! [`ClientBytesMut`].
//!
//! Rules:
//! 1. We never make a slice over this memory. We copy bytes out of it or into it.
//! 2. Bytes that we check, or that more than one row uses, are copied once, and we use only the copy. If a client
//!    writes during the copy, the copy mixes old and new bytes. This affects only that client.
//! 3. We write every byte of an output. Otherwise its client could read what the memory held before.
//!
//! Not for: memory of GPUs, which the crate `gpu-rows` has.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;

/// Bytes of an input, which others may write to.
#[derive(Clone, Copy, Debug)]
pub struct ClientBytes<'a> {
    start: *const u8,
    bytes: usize,
    lent: PhantomData<&'a u8>,
}

impl<'a> ClientBytes<'a> {
    /// # Safety
    /// During `'a`, the `bytes` bytes from `start` on must be readable. Others may write to them.
    pub const unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Self { start, bytes, lent: PhantomData }
    }

    pub const fn byte_len(self) -> usize {
        self.bytes
    }

    /// The bytes in `range`. Panics if it goes beyond the end.
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.bytes, "a range beyond the end");
        // SAFETY: the range is within the bytes, as checked above.
        Self { start: unsafe { self.start.add(range.start) }, bytes: range.len(), lent: PhantomData }
    }

    /// Copies all bytes. Panics if `to` has another size.
    pub fn copy_to(self, to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes, "a copy to a slice of another size");
        // SAFETY: the caller of `new` guarantees that the bytes are readable. `to` is borrowed exclusively, so the two
        // do not overlap.
        unsafe { ptr::copy_nonoverlapping(self.start, to.as_mut_ptr(), self.bytes) };
    }

    pub fn append_to(self, to: &mut Vec<u8>) {
        let written = to.len();
        // A slice of memory that is not initialised would be unsound, even to write to.
        to.resize(written + self.bytes, 0);
        self.copy_to(&mut to[written..]);
    }
}

impl<'a> From<&'a [u8]> for ClientBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: the bytes of a slice are readable while it is borrowed.
        unsafe { Self::new(bytes.as_ptr(), bytes.len()) }
    }
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
    /// During `'a`, the `bytes` bytes from `start` on must be writable, and nothing else in this process may use them.
    pub const unsafe fn new(start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes, written: 0, lent: PhantomData }
    }

    /// Appends bytes. Panics if there is no room for them.
    pub fn write(&mut self, piece: &[u8]) {
        assert!(piece.len() <= self.bytes - self.written, "more bytes than the output has room for");
        // SAFETY: there is room, as checked above. The caller of `new` guarantees that the bytes are writable and that
        // nothing else in this process uses them, so `piece` does not overlap with them.
        unsafe { ptr::copy_nonoverlapping(piece.as_ptr(), self.start.add(self.written), piece.len()) };
        self.written += piece.len();
    }

    /// Checks that all bytes have been written. Panics if not.
    pub fn finish(self) {
        assert_eq!(self.written, self.bytes, "an incomplete output");
    }
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    #[test]
    fn a_part_is_copied() {
        let mut copied = [0; 2];
        ClientBytes::from(&[1u8, 2, 3, 4][..]).part(1..3).copy_to(&mut copied);
        assert_eq!(copied, [2, 3]);
    }

    #[test]
    fn uninitialised_memory_is_written_completely() {
        let mut memory = [MaybeUninit::<u8>::uninit(); 3];
        // SAFETY: the array outlives the writer, and is used again only after it.
        let mut writer = unsafe { ClientBytesMut::new(memory.as_mut_ptr().cast(), memory.len()) };
        writer.write(&[7, 8]);
        writer.write(&[]);
        writer.write(&[9]);
        writer.finish();
        // SAFETY: the writer has written all three bytes.
        assert_eq!(memory.map(|byte| unsafe { byte.assume_init() }), [7, 8, 9]);
    }

    #[test]
    #[should_panic(expected = "an incomplete output")]
    fn an_incomplete_output_is_not_finished() {
        let mut memory = [0u8; 3];
        // SAFETY: the array outlives the writer, and is not used while the writer exists.
        let mut writer = unsafe { ClientBytesMut::new(memory.as_mut_ptr(), memory.len()) };
        writer.write(&[7, 8]);
        writer.finish();
    }

    #[test]
    #[should_panic(expected = "more bytes than the output has room for")]
    fn nothing_is_written_beyond_the_end_of_an_output() {
        let mut memory = [0u8; 3];
        // SAFETY: the array outlives the writer, and is not used while the writer exists.
        unsafe { ClientBytesMut::new(memory.as_mut_ptr(), 2) }.write(&[7, 8, 9]);
    }
}
