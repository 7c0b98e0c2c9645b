//! Tensors in the memory of the host, and that memory ([`Buffer`]).
//!
//! | module | what it is |
//! |---|---|
//! | [`tensor`] | data types, shapes, and where a row is in a batch |
//! | [`layout`] | where each state lies within a slot |
//! | [`copies`] | copies of rows between batches and slots, with conversions to half precision and back |
//! | [`client`] | memory that Triton lends, which its client may write to at any time |
//! | [`strings`] | tensors of strings |
//!
//! Not for: memory of a device, or deciding which bytes are copied where.

pub mod client;
pub mod copies;
pub mod layout;
pub mod strings;
pub mod tensor;

use pages::Pages;

/// The host has too little memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate {bytes} bytes of host memory")]
pub struct NoMemory {
    pub bytes: usize,
}

/// An empty vector with room for `count` elements. Use it where a request decides the count: if the memory cannot be
/// allocated, that request fails and the server lives.
pub fn reserve<T>(count: usize) -> Result<Vec<T>, NoMemory> {
    let mut made = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    made.try_reserve_exact(count).map_err(|_| NoMemory { bytes })?;
    Ok(made)
}

/// A vector of `count` zeros. Use it as [`reserve`] where a request decides the count.
pub fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, NoMemory> {
    let mut made = reserve(count)?;
    made.resize(count, T::default());
    Ok(made)
}

/// Zeroed host memory, aligned to a page. The pages come from the system when they are first touched, and go back to it
/// when the buffer is dropped. (An allocator could keep them.) With the feature `exact-buffers`, which is for tests,
/// the memory comes from the allocator and is aligned to a cache line.
pub struct Buffer {
    pages: Pages,
    bytes: usize,
}

impl Buffer {
    /// Allocates `bytes` bytes. An empty buffer has a valid address, too.
    pub fn new(bytes: usize) -> Result<Self, NoMemory> {
        let pages = Pages::new(bytes).ok_or(NoMemory { bytes })?;
        Ok(Self { pages, bytes })
    }

    /// Grows or shrinks the buffer. The bytes that still fit keep their values, and are copied only with
    /// `exact-buffers`.
    pub fn resize(&mut self, bytes: usize) -> Result<(), NoMemory> {
        self.pages.resize(bytes).ok_or(NoMemory { bytes })?;
        self.bytes = bytes;
        Ok(())
    }

    pub const fn len(&self) -> usize {
        self.bytes
    }

    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Address of the first byte, for ONNX Runtime to read from or write to.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pages.as_mut_ptr()
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has at least `bytes` bytes, is initialised with zeros, and is borrowed from `self`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` makes this slice the only access.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.bytes) }
    }
}

#[cfg(not(feature = "exact-buffers"))]
mod pages {
    use memmap2::{Advice, MmapMut, MmapRaw, RemapOptions};

    /// Buffers of this many bytes and more ask for pages of 2 MiB, so that copies of large states have fewer TLB
    /// misses.
    const HUGE_FROM: usize = 4 << 20;

    pub struct Pages(MmapRaw);

    impl Pages {
        pub fn new(bytes: usize) -> Option<Self> {
            // The system makes no mapping of 0 bytes.
            let pages = MmapMut::map_anon(bytes.max(1)).ok()?;
            if bytes >= HUGE_FROM {
                // A system that does not follow this advice gives small pages, which work as well.
                let _ = pages.advise(Advice::HugePage);
            }
            Some(Self(pages.into()))
        }

        pub fn resize(&mut self, bytes: usize) -> Option<()> {
            // SAFETY: the mapping is anonymous and belongs to this; `&mut self` proves that no slice of it exists.
            unsafe { self.0.remap(bytes.max(1), RemapOptions::new().may_move(true)) }.ok()
        }

        pub fn as_mut_ptr(&self) -> *mut u8 {
            self.0.as_mut_ptr()
        }
    }
}

/// Memory of exactly the size that is asked for, from the allocator, so that AddressSanitizer and valgrind see an
/// access past its end. They don't check a mapping, which ends with a whole page. For tests only.
#[cfg(feature = "exact-buffers")]
mod pages {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    /// Bytes of a cache line, as slots have it.
    const ALIGNMENT: usize = 64;

    pub struct Pages {
        start: NonNull<u8>,
        layout: Layout,
    }

    // SAFETY: the memory belongs to this alone.
    unsafe impl Send for Pages {}
    // SAFETY: as above; without `&mut`, this only gives its address.
    unsafe impl Sync for Pages {}

    impl Pages {
        pub fn new(bytes: usize) -> Option<Self> {
            let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()?;
            // SAFETY: the size is not 0.
            let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
            Some(Self { start, layout })
        }

        /// Always moves, so that a sanitizer reports uses of the old address.
        pub fn resize(&mut self, bytes: usize) -> Option<()> {
            let moved = Self::new(bytes)?;
            let kept = self.layout.size().min(moved.layout.size());
            // SAFETY: both have so many bytes, and they are two allocations.
            unsafe { self.start.copy_to_nonoverlapping(moved.start, kept) };
            *self = moved;
            Some(())
        }

        pub const fn as_mut_ptr(&self) -> *mut u8 {
            self.start.as_ptr()
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: allocated with this layout, and freed here only.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::SLOT_ALIGNMENT;

    #[test]
    fn a_count_that_no_memory_can_hold_is_an_error() {
        assert_eq!(reserve::<usize>(usize::MAX), Err(NoMemory { bytes: usize::MAX }));
        assert_eq!(zeros::<u8>(usize::MAX), Err(NoMemory { bytes: usize::MAX }));
        assert_eq!(zeros::<usize>(2), Ok(vec![0, 0]));
    }

    #[test]
    fn a_buffer_is_zeroed_aligned_and_may_be_empty() {
        let mut buffer = Buffer::new(100).unwrap();
        assert_eq!(buffer.as_ptr() as usize % SLOT_ALIGNMENT, 0);
        assert!(buffer.bytes().iter().all(|&byte| byte == 0));
        buffer.bytes_mut()[99] = 7;
        assert_eq!(buffer.bytes()[99], 7);
        assert!(Buffer::new(0).unwrap().is_empty());
        assert_eq!(Buffer::new(usize::MAX).err(), Some(NoMemory { bytes: usize::MAX }));
    }

    #[test]
    fn a_buffer_keeps_its_contents_when_it_grows_and_shrinks() {
        let mut buffer = Buffer::new(10_000).unwrap();
        buffer.bytes_mut().fill(7);
        buffer.resize(1 << 20).unwrap();
        assert!(buffer.bytes()[..10_000].iter().all(|&byte| byte == 7));
        assert!(buffer.bytes()[10_000..].iter().all(|&byte| byte == 0));
        buffer.resize(100).unwrap();
        assert_eq!(buffer.bytes(), [7; 100]);
    }
}
