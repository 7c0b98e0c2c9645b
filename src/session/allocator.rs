//! The allocator of sessions whose models have growing states. A large tensor gets pages of its own, which go back to
//! the system when it is freed.
//!
//! ONNX Runtime's arena keeps memory that is freed, and the C library's allocator keeps much of it. A server had up to
//! ten times the memory of a state of 64 MiB after that state was dropped.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;

use ort::AsPointer;
use ort::environment::Environment;
use ort::sys::{OrtAllocator, OrtMemoryInfo};
use parking_lot::Mutex;
use rows::Buffer;

use super::value::{MemoryKind, check};
use crate::memory::PAGES_FROM;

/// Tensors with pages of their own.
struct Pages {
    used: BTreeMap<usize, Buffer>,
    /// Freed ones, for the next run. A tensor of up to [`SPARE_TO`] bytes has small pages, and making them takes the
    /// system longer than a run takes to write them. A larger one has large pages, which are made quickly.
    spare: Vec<Buffer>,
}

static PAGES: Mutex<Pages> = Mutex::new(Pages { used: BTreeMap::new(), spare: Vec::new() });

/// The largest tensor whose pages are used again.
const SPARE_TO: usize = 4 << 20;

/// How many of them are kept: 32 MiB at most.
const SPARE_COUNT: usize = 8;

impl Pages {
    fn alloc(&mut self, bytes: usize) -> Option<*mut c_void> {
        // Pages that are never touched cost nothing.
        let bytes =
            if bytes <= SPARE_TO && !cfg!(feature = "exact-buffers") { bytes.next_power_of_two() } else { bytes };
        let spare = self.spare.iter().position(|pages| pages.len() == bytes);
        let pages = spare.map_or_else(|| Buffer::new(bytes).ok(), |at| Some(self.spare.swap_remove(at)))?;
        let address = pages.as_ptr();
        self.used.insert(address.addr(), pages);
        Some(address.cast())
    }

    /// Returns whether the tensor had pages of its own.
    fn free(&mut self, data: *mut c_void) -> bool {
        let Some(pages) = self.used.remove(&data.addr()) else { return false };
        if pages.len() <= SPARE_TO && self.spare.len() < SPARE_COUNT {
            self.spare.push(pages);
        }
        true
    }
}

#[repr(C)]
struct PageAllocator {
    /// The first field, because ONNX Runtime gets a pointer to the allocator as one to this.
    functions: OrtAllocator,
    /// For small tensors.
    default: *mut OrtAllocator,
    memory: *const OrtMemoryInfo,
}

/// The calls of an allocator, which may throw: the default one does when there is no memory.
type Alloc = unsafe extern "C-unwind" fn(*mut OrtAllocator, usize) -> *mut c_void;
type AllocInOrt = unsafe extern "system" fn(*mut OrtAllocator, usize) -> *mut c_void;

/// Registers the allocator with the environment, for sessions with `session.use_env_allocators`.
pub(super) fn register(environment: &Environment) -> Result<(), String> {
    let api = ort::api();
    // SAFETY: the default allocator lives as long as the library, which is never unloaded; so does ours, which is
    // leaked. The environment is alive. A pointer to "C-unwind" differs from one to "system" in that it may throw.
    unsafe {
        let mut default = ptr::null_mut();
        check((api.GetAllocatorWithDefaultOptions)(&mut default))?;
        let mut functions = OrtAllocator::default();
        functions.Alloc = Some(std::mem::transmute::<Alloc, AllocInOrt>(alloc));
        functions.Free = Some(free);
        functions.Info = Some(info);
        let memory = MemoryKind::Host.info()?;
        let allocator = Box::leak(Box::new(PageAllocator { functions, default, memory }));
        check((api.RegisterAllocator)(environment.ptr().cast_mut(), ptr::from_mut(allocator).cast()))
    }
}

/// # Safety
/// `this` is the allocator of [`register`].
unsafe extern "C-unwind" fn alloc(this: *mut OrtAllocator, bytes: usize) -> *mut c_void {
    // A process can have some ten thousand mappings only, so small tensors get no pages.
    if bytes >= PAGES_FROM
        && let Some(data) = PAGES.lock().alloc(bytes)
    {
        return data;
    }
    // SAFETY: the default allocator is never dropped. If there is no memory, it throws through this frame, which has
    // nothing to drop.
    unsafe {
        let default = (*this.cast::<PageAllocator>()).default;
        match (*default).Alloc {
            Some(alloc) => std::mem::transmute::<AllocInOrt, Alloc>(alloc)(default, bytes),
            None => ptr::null_mut(),
        }
    }
}

/// # Safety
/// `this` is the allocator of [`register`], and `data` came from [`alloc`].
unsafe extern "system" fn free(this: *mut OrtAllocator, data: *mut c_void) {
    if !PAGES.lock().free(data) {
        // SAFETY: memory without pages of its own came from the default allocator.
        unsafe {
            let default = (*this.cast::<PageAllocator>()).default;
            if let Some(free) = (*default).Free {
                free(default, data);
            }
        }
    }
}

/// # Safety
/// `this` is the allocator of [`register`].
unsafe extern "system" fn info(this: *const OrtAllocator) -> *const OrtMemoryInfo {
    // SAFETY: the caller promises that it is that allocator.
    unsafe { (*this.cast::<PageAllocator>()).memory }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pages_are_used_again_and_large_ones_go_back() {
        let mut pages = Pages { used: BTreeMap::new(), spare: Vec::new() };
        let first = pages.alloc(700_000).unwrap();
        assert!(pages.free(first));
        assert_eq!(pages.alloc(900_000), Some(first), "the pages of one that was freed");
        let large = pages.alloc(SPARE_TO + 1).unwrap();
        assert!(pages.free(large) && pages.free(first) && !pages.free(first), "what is free is not ours any more");
        assert_eq!((pages.used.len(), pages.spare.len()), (0, 1));
        let many: Vec<_> = (0..2 * SPARE_COUNT).map(|_| pages.alloc(SPARE_TO).unwrap()).collect();
        assert!(many.into_iter().all(|data| pages.free(data)));
        assert_eq!(pages.spare.len(), SPARE_COUNT);
    }
}
