//! Memory of the sessions whose models have growing states: a large tensor has pages of its own, which go back to the
//! system when it is freed.
//!
//! ONNX Runtime's arena keeps what is freed, and the C library's allocator much of it: after a state of 64 MiB was
//! dropped, a server had up to ten times that.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;

use ort::AsPointer;
use ort::environment::Environment;
use ort::sys::{OrtAllocator, OrtMemoryInfo};
use parking_lot::Mutex;

use super::value::{MemoryKind, check};
use crate::memory::{Buffer, PAGES_FROM};

/// Tensors with pages of their own, by address.
static PAGES: Mutex<BTreeMap<usize, Buffer>> = Mutex::new(BTreeMap::new());

#[repr(C)]
struct PageAllocator {
    /// First: this is what ONNX Runtime knows.
    functions: OrtAllocator,
    /// For what is small.
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
    if bytes >= PAGES_FROM
        && let Ok(pages) = Buffer::new(bytes)
    {
        let address = pages.as_ptr();
        PAGES.lock().insert(address.addr(), pages);
        return address.cast();
    }
    // SAFETY: the default allocator lives for ever. Where there is no memory it throws, through this frame, which has
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
    let pages = PAGES.lock().remove(&data.addr());
    if pages.is_none() {
        // SAFETY: what has no pages came from the default allocator.
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
    // SAFETY: the caller's word.
    unsafe { (*this.cast::<PageAllocator>()).memory }
}
