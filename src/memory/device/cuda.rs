//! The device by NVIDIA's driver, which is loaded when the first model asks for a GPU.

use std::ffi::{CStr, CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::driver::{DeviceError, Driver, Stream};

/// The kernel of `rows.cu`, compiled ahead by `scripts/kernels` for every GPU from Volta on; the driver finishes it.
const KERNEL: &str = concat!(include_str!("rows.ptx"), "\0");
const KERNEL_NAME: &CStr = c"move_rows";

/// Threads of a block. As in `rows.cu`.
const THREADS: u32 = 256;

/// Freed memory that the pool keeps for the next who asks, in bytes.
const KEPT_BY_POOL: u64 = 32 << 20;

/// A GPU.
pub struct Cuda {
    number: i32,
    device: sys::CUdevice,
    /// The context that the runtime, and so ONNX Runtime, uses too.
    context: sys::CUcontext,
    /// `None` where the driver has no stream-ordered memory.
    pool: Option<sys::CUmemoryPool>,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
}

// SAFETY: the driver's objects may be used from any thread.
unsafe impl Send for Cuda {}
// SAFETY: as above, by several at once.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The device of that number.
    pub fn open(number: i32) -> Result<Self, DeviceError> {
        // cudarc panics where the library is missing, so it is asked first.
        static IS_PRESENT: OnceLock<bool> = OnceLock::new();
        // SAFETY: loads the library and looks no further.
        if !IS_PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
            return Err(DeviceError::NoDriver);
        }
        let failed = |call| move |error| driver_error(number, call, error);
        result::init().map_err(|error| DeviceError::UselessDriver { why: in_words(error) })?;
        let count = result::device::get_count().map_err(failed("cuDeviceGetCount"))?;
        if number < 0 || number >= count {
            return Err(DeviceError::NoDevice { device: number, count });
        }
        let device = result::device::get(number).map_err(failed("cuDeviceGet"))?;
        // SAFETY: a device that the driver gave; what is made is kept in `made`, which gives it back.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let mut made = Self { number, device, context, pool: None, module: ptr::null_mut(), kernel: ptr::null_mut() };
        made.make_current()?;
        made.pool = made.open_pool()?;
        made.load_kernel()?;
        Ok(made)
    }

    fn open_pool(&self) -> Result<Option<sys::CUmemoryPool>, DeviceError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        // SAFETY: a device that the driver gave.
        let has_pools = unsafe { result::device::get_attribute(self.device, attribute) };
        if has_pools.map_err(|error| self.error("cuDeviceGetAttribute", error))? == 0 {
            return Ok(None);
        }
        // SAFETY: plain numbers and null pointers, for which zeros are values.
        let mut wanted: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        wanted.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        wanted.location.id = self.number;
        let (mut kept, attribute) = (KEPT_BY_POOL, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
        // SAFETY: the properties live during the call; the attribute is a number of 64 bits.
        unsafe {
            let pool = result::mem_pool::create(&wanted).map_err(|error| self.error("cuMemPoolCreate", error))?;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut kept).cast::<c_void>())
                .map_err(|error| self.error("cuMemPoolSetAttribute", error))?;
            Ok(Some(pool))
        }
    }

    fn load_kernel(&mut self) -> Result<(), DeviceError> {
        // SAFETY: text that ends with a NUL; the module stays until this is dropped.
        unsafe {
            self.module = result::module::load_data(KERNEL.as_ptr().cast::<c_void>())
                .map_err(|error| self.error("cuModuleLoadData", error))?;
            self.kernel = result::module::get_function(self.module, CString::from(KERNEL_NAME))
                .map_err(|error| self.error("cuModuleGetFunction", error))?;
        }
        Ok(())
    }

    fn error(&self, call: &'static str, error: DriverError) -> DeviceError {
        driver_error(self.number, call, error)
    }

    fn out_of_memory(&self, bytes: usize, call: &'static str, error: DriverError) -> DeviceError {
        if !is_out_of_memory(error) {
            return self.error(call, error);
        }
        let (free, total) = result::mem_get_info().unwrap_or_default();
        DeviceError::OutOfMemory { bytes, device: self.number, free, total }
    }
}

impl Driver for Cuda {
    fn name(&self) -> String {
        result::device::get_name(self.device).unwrap_or_else(|_| "unknown".to_owned())
    }

    fn is_simulated(&self) -> bool {
        false
    }

    fn open_stream(&self) -> Result<Stream, DeviceError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        stream.map(|stream| Stream(stream as usize)).map_err(|error| self.error("cuStreamCreate", error))
    }

    fn close_stream(&self, stream: Stream) {
        // SAFETY: made by `open_stream` and closed once, by its owner.
        let closed = self.make_current().and_then(|()| unsafe {
            result::stream::destroy(raw(stream)).map_err(|error| self.error("cuStreamDestroy", error))
        });
        note(closed);
    }

    fn allocate(&self, stream: Stream, bytes: usize) -> Result<u64, DeviceError> {
        // SAFETY: pool and stream are alive; the content is the caller's.
        let allocated = unsafe {
            match self.pool {
                Some(pool) => result::mem_pool::alloc_async(pool, bytes, raw(stream)),
                None => result::malloc_sync(bytes),
            }
        };
        let call = if self.pool.is_some() { "cuMemAllocFromPoolAsync" } else { "cuMemAlloc" };
        allocated.map_err(|error| self.out_of_memory(bytes, call, error))
    }

    unsafe fn free(&self, stream: Stream, address: u64) {
        // SAFETY: the caller's word.
        let freed = self.make_current().and_then(|()| unsafe {
            match self.pool {
                Some(_) => {
                    result::free_async(address, raw(stream)).map_err(|error| self.error("cuMemFreeAsync", error))
                }
                None => result::free_sync(address).map_err(|error| self.error("cuMemFree", error)),
            }
        });
        note(freed);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        // Seen by all contexts, as models on several devices may share nothing else.
        // SAFETY: a plain allocation, which is filled before it is handed out.
        let memory = unsafe {
            let memory = result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE).map_err(|error| {
                if is_out_of_memory(error) {
                    DeviceError::OutOfPinned { bytes, device: self.number }
                } else {
                    self.error("cuMemHostAlloc", error)
                }
            })?;
            ptr::write_bytes(memory.cast::<u8>(), 0, bytes);
            memory
        };
        NonNull::new(memory.cast::<u8>()).ok_or_else(|| DeviceError::Failed {
            device: self.number,
            call: "cuMemHostAlloc",
            why: "it gave nothing".to_owned(),
        })
    }

    unsafe fn free_pinned(&self, memory: NonNull<u8>, _: usize) {
        // SAFETY: the caller's word.
        let freed = self.make_current().and_then(|()| unsafe {
            result::free_host(memory.as_ptr().cast::<c_void>()).map_err(|error| self.error("cuMemFreeHost", error))
        });
        note(freed);
    }

    unsafe fn upload(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's word.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, raw(stream)).result() };
        copied.map_err(|error| self.error("cuMemcpyHtoDAsync", error))
    }

    unsafe fn download(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's word.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, raw(stream)).result() };
        copied.map_err(|error| self.error("cuMemcpyDtoHAsync", error))
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's word.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, raw(stream)) };
        copied.map_err(|error| self.error("cuMemcpyDtoDAsync", error))
    }

    unsafe fn move_rows(&self, stream: Stream, table: u64, count: u32, tiles: u32) -> Result<(), DeviceError> {
        let (mut table, mut count) = (table, count);
        let mut parameters = [(&raw mut table).cast::<c_void>(), (&raw mut count).cast::<c_void>()];
        // SAFETY: the kernel takes an address and a number, which the driver copies; the table is the caller's word.
        let launched = unsafe {
            result::launch_kernel(self.kernel, (tiles, 1, 1), (THREADS, 1, 1), 0, raw(stream), &mut parameters)
        };
        launched.map_err(|error| self.error("cuLaunchKernel", error))
    }

    fn synchronise(&self, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(raw(stream)) }.map_err(|error| self.error("cuStreamSynchronize", error))
    }

    fn before_run(&self, _: Stream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn memory(&self) -> Result<(usize, usize), DeviceError> {
        result::mem_get_info().map_err(|error| self.error("cuMemGetInfo", error))
    }

    fn make_current(&self) -> Result<(), DeviceError> {
        // SAFETY: retained until this is dropped.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| self.error("cuCtxSetCurrent", error))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        note(self.make_current());
        // SAFETY: made in `open`, and given back once. All memory has been given back: buffers hold the device, and so
        // do streams, on which the kernel is launched.
        unsafe {
            if !self.module.is_null() {
                note(result::module::unload(self.module).map_err(|error| self.error("cuModuleUnload", error)));
            }
            if let Some(pool) = self.pool {
                note(result::mem_pool::destroy(pool).map_err(|error| self.error("cuMemPoolDestroy", error)));
            }
            let released = result::primary_ctx::release(self.device);
            note(released.map_err(|error| self.error("cuDevicePrimaryCtxRelease", error)));
        }
    }
}

fn raw(stream: Stream) -> sys::CUstream {
    ptr::with_exposed_provenance_mut(stream.0)
}

fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

fn driver_error(device: i32, call: &'static str, error: DriverError) -> DeviceError {
    DeviceError::Failed { device, call, why: in_words(error) }
}

fn in_words(error: DriverError) -> String {
    let text = |text: Result<&CStr, DriverError>| text.map(|text| text.to_string_lossy().into_owned()).ok();
    [text(error.error_name()), text(error.error_string())].into_iter().flatten().collect::<Vec<_>>().join(": ")
}

fn note(done: Result<(), DeviceError>) {
    if let Err(error) = done {
        log::error!("{error}");
    }
}
