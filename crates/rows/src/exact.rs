//! Host memory of exactly the size that is asked for, from the allocator, so that AddressSanitizer and valgrind see an
//! access over its end. A mapping ends with its last page, and they don't look at it. For tests only.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Bytes of a cache line, as slots have it.
const ALIGNMENT: usize = 64;

/// Zeroed memory.
pub struct Exact {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this alone.
unsafe impl Send for Exact {}
// SAFETY: as above; without `&mut`, this only gives its address.
unsafe impl Sync for Exact {}

impl Exact {
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

impl Drop for Exact {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed here only.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
