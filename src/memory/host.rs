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

    /// Makes it larger; the contents stay, and are not copied.
    pub fn grow(&mut self, bytes: usize) -> Result<(), MemoryError> {
        // SAFETY: an anonymous mapping of this buffer's own; `&mut self` says that no slice of it is left.
        unsafe { self.pages.remap(bytes, RemapOptions::new().may_move(true)) }
            .map_err(|_| MemoryError::Host { bytes })?;
        self.bytes = bytes;
        Ok(())
    }

    /// Gives the pages behind the first `kept` bytes back to the system; they read as zeros again.
    pub fn trim(&mut self, kept: usize) {
        let page = page_bytes();
        let from = kept.next_multiple_of(page);
        if from < self.bytes {
            // SAFETY: whole pages of this mapping; private anonymous memory reads as zeros afterwards.
            unsafe { libc::madvise(self.as_ptr().add(from).cast(), self.bytes - from, libc::MADV_DONTNEED) };
        }
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

fn page_bytes() -> usize {
    // SAFETY: a plain question to the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
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
    fn a_buffer_grows_around_its_contents_and_gives_pages_back() {
        let mut buffer = Buffer::new(10_000).unwrap();
        buffer.bytes_mut().fill(7);
        buffer.grow(1 << 20).unwrap();
        assert!(buffer.bytes()[..10_000].iter().all(|&byte| byte == 7));
        buffer.trim(100);
        assert!(buffer.bytes()[..100].iter().all(|&byte| byte == 7));
        assert!(buffer.bytes()[page_bytes()..].iter().all(|&byte| byte == 0));
    }
}
