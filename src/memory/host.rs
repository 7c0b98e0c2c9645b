//! Host memory.

use memmap2::{Advice, MmapMut, MmapRaw, RemapOptions};

use super::MemoryError;

/// Buffers of this size and more ask for pages of 2 MiB: copies of large states then miss fewer translations.
const HUGE_FROM: usize = 4 << 20;

/// Zeroed bytes at an address that suits any vector load. They come from the system page by page, cost nothing until
/// touched, and go back to the system when dropped, where an allocator would keep them.
pub struct Buffer {
    pages: MmapRaw,
    bytes: usize,
}

impl Buffer {
    /// Allocates; an empty buffer has a valid address too.
    pub fn new(bytes: usize) -> Result<Self, MemoryError> {
        let pages = MmapMut::map_anon(bytes.max(1)).map_err(|_| MemoryError::Host { bytes })?;
        if bytes >= HUGE_FROM {
            // Advice: where the system does not take it, pages are small.
            let _ = pages.advise(Advice::HugePage);
        }
        Ok(Self { pages: pages.into(), bytes })
    }

    /// Makes it larger or smaller; the contents stay as far as there is room, and are not copied.
    pub fn resize(&mut self, bytes: usize) -> Result<(), MemoryError> {
        // SAFETY: an anonymous mapping of this buffer's own; `&mut self` says that no slice of it is left.
        unsafe { self.pages.remap(bytes.max(1), RemapOptions::new().may_move(true)) }
            .map_err(|_| MemoryError::Host { bytes })?;
        self.bytes = bytes;
        Ok(())
    }

    /// Bytes that were asked for.
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Address of the first byte, for ONNX Runtime to read from or write to.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pages.as_mut_ptr()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has at least `bytes` bytes, zeroed at first, and is borrowed from self.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes) }
    }

    /// The bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes it the only access.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::layout::SLOT_ALIGNMENT;

    #[test]
    fn a_buffer_is_zeroed_aligned_and_may_be_empty() {
        let mut buffer = Buffer::new(100).unwrap();
        assert_eq!(buffer.as_ptr() as usize % SLOT_ALIGNMENT, 0);
        assert!(buffer.bytes().iter().all(|&byte| byte == 0));
        buffer.bytes_mut()[99] = 7;
        assert_eq!(buffer.bytes()[99], 7);
        assert!(Buffer::new(0).unwrap().is_empty());
        assert_eq!(Buffer::new(usize::MAX).err(), Some(MemoryError::Host { bytes: usize::MAX }));
    }

    #[test]
    fn a_buffer_grows_and_shrinks_around_its_contents() {
        let mut buffer = Buffer::new(10_000).unwrap();
        buffer.bytes_mut().fill(7);
        buffer.resize(1 << 20).unwrap();
        assert!(buffer.bytes()[..10_000].iter().all(|&byte| byte == 7));
        assert!(buffer.bytes()[10_000..].iter().all(|&byte| byte == 0));
        buffer.resize(100).unwrap();
        assert_eq!(buffer.bytes(), [7; 100]);
    }
}
