//! A GPU, used through NVIDIA's driver. The driver is loaded when the first model asks for a GPU.

use std::ffi::{CStr, CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::driver::{DeviceError, Driver, Stream};

/// The kernel of `rows.cu` as PTX, which `scripts/kernels` makes. The driver compiles it for the GPU, from Volta on.
const KERNEL: &str = concat!(include_str!("rows.ptx"), "\0");
const KERNEL_NAME: &CStr = c"move_rows";

/// Threads of a block, as in `rows.cu`.
const THREADS: u32 = 256;

/// Bytes of freed memory that the pool keeps for later allocations.
const KEPT_BY_POOL: u64 = 32 << 20;

pub struct Cuda {
    number: i32,
    device: sys::CUdevice,
    /// The primary context, which ONNX Runtime uses, too.
    context: sys::CUcontext,
    /// `None` if the driver has no stream-ordered allocation.
    pool: Option<sys::CUmemoryPool>,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
    lost: OnceLock<DeviceError>,
}

// SAFETY: the driver's objects may be used from any thread.
unsafe impl Send for Cuda {}
// SAFETY: several threads may use the driver's objects at once.
unsafe impl Sync for Cuda {}

impl Cuda {
    pub fn open(number: i32) -> Result<Self, DeviceError> {
        // cudarc panics if the driver's library is missing, so look for the library first.
        static IS_PRESENT: OnceLock<bool> = OnceLock::new();
        // SAFETY: this only loads the driver's library, which may be loaded into any process.
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
        // SAFETY: the driver gave the device. `made` holds the context and releases it when dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let (module, kernel) = (ptr::null_mut(), ptr::null_mut());
        let mut made = Self { number, device, context, pool: None, module, kernel, lost: OnceLock::new() };
        made.make_current()?;
        made.pool = made.open_pool()?;
        made.load_kernel()?;
        Ok(made)
    }

    fn open_pool(&self) -> Result<Option<sys::CUmemoryPool>, DeviceError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        // SAFETY: the driver gave the device.
        let has_pools = unsafe { result::device::get_attribute(self.device, attribute) };
        if has_pools.map_err(|error| self.error("cuDeviceGetAttribute", error))? == 0 {
            return Ok(None);
        }
        // SAFETY: the fields are numbers and pointers, for which zeros are valid.
        let mut wanted: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        wanted.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        wanted.location.id = self.number;
        let (mut kept, attribute) = (KEPT_BY_POOL, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
        // SAFETY: the properties live during the call, and the attribute is a number of 64 bits.
        unsafe {
            let pool = result::mem_pool::create(&wanted).map_err(|error| self.error("cuMemPoolCreate", error))?;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut kept).cast::<c_void>())
                .map_err(|error| self.error("cuMemPoolSetAttribute", error))?;
            Ok(Some(pool))
        }
    }

    fn load_kernel(&mut self) -> Result<(), DeviceError> {
        // SAFETY: the text ends with a NUL. The module stays loaded, and so the kernel valid, until `self` is dropped.
        unsafe {
            self.module = result::module::load_data(KERNEL.as_ptr().cast::<c_void>())
                .map_err(|error| self.error("cuModuleLoadData", error))?;
            self.kernel = result::module::get_function(self.module, CString::from(KERNEL_NAME))
                .map_err(|error| self.error("cuModuleGetFunction", error))?;
        }
        Ok(())
    }

    fn error(&self, call: &'static str, error: DriverError) -> DeviceError {
        let error = driver_error(self.number, call, error);
        if error.is_lost() {
            self.lost.get_or_init(|| error.clone());
        }
        error
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

    fn is_cuda(&self) -> bool {
        true
    }

    fn open_stream(&self) -> Result<Stream, DeviceError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        stream.map(|stream| Stream(stream as usize)).map_err(|error| self.error("cuStreamCreate", error))
    }

    fn close_stream(&self, stream: Stream) {
        // SAFETY: the stream was made by `open_stream`, and its owner closes it once.
        let closed = self.make_current().and_then(|()| unsafe {
            result::stream::destroy(raw(stream)).map_err(|error| self.error("cuStreamDestroy", error))
        });
        log_error(closed);
    }

    fn allocate(&self, stream: Stream, bytes: usize) -> Result<u64, DeviceError> {
        // SAFETY: the pool and the stream are alive.
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
        // SAFETY: the caller guarantees that the memory is allocated and no longer used.
        let freed = self.make_current().and_then(|()| unsafe {
            match self.pool {
                Some(_) => {
                    result::free_async(address, raw(stream)).map_err(|error| self.error("cuMemFreeAsync", error))
                }
                None => result::free_sync(address).map_err(|error| self.error("cuMemFree", error)),
            }
        });
        log_error(freed);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        // Portable memory is pinned for all devices.
        // SAFETY: the new memory has `bytes` bytes to fill.
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
            why: "it returned a null pointer".to_owned(),
        })
    }

    unsafe fn free_pinned(&self, memory: NonNull<u8>, _: usize) {
        // SAFETY: the caller guarantees that the memory is from `allocate_pinned` and no longer used.
        let freed = self.make_current().and_then(|()| unsafe {
            result::free_host(memory.as_ptr().cast::<c_void>()).map_err(|error| self.error("cuMemFreeHost", error))
        });
        log_error(freed);
    }

    unsafe fn upload(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that both sides stay allocated until the copy is complete.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, raw(stream)).result() };
        copied.map_err(|error| self.error("cuMemcpyHtoDAsync", error))
    }

    unsafe fn download(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `upload`.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, raw(stream)).result() };
        copied.map_err(|error| self.error("cuMemcpyDtoHAsync", error))
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `upload`.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, raw(stream)) };
        copied.map_err(|error| self.error("cuMemcpyDtoDAsync", error))
    }

    unsafe fn move_rows(&self, stream: Stream, table: u64, count: u32, tiles: u32) -> Result<(), DeviceError> {
        let (mut table, mut count) = (table, count);
        let mut parameters = [(&raw mut table).cast::<c_void>(), (&raw mut count).cast::<c_void>()];
        // SAFETY: the kernel takes an address and a number, which the driver copies. The caller guarantees that the
        // table is right and that its memory stays allocated until the moves are complete.
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

    fn end_capture(&self, stream: Stream) -> Result<(), DeviceError> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is alive. The graph is destroyed here only.
        unsafe {
            let asked = sys::cuStreamIsCapturing(raw(stream), &mut status).result();
            asked.map_err(|error| self.error("cuStreamIsCapturing", error))?;
            if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
                return Ok(());
            }
            let ended = sys::cuStreamEndCapture(raw(stream), &mut graph).result();
            if !graph.is_null() {
                log_error(sys::cuGraphDestroy(graph).result().map_err(|error| self.error("cuGraphDestroy", error)));
            }
            match ended {
                // What the end of a capture that is no longer valid returns.
                Err(error) if error.0 != sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => {
                    Err(self.error("cuStreamEndCapture", error))
                }
                _ => Ok(()),
            }
        }
    }

    fn memory(&self) -> Result<(usize, usize), DeviceError> {
        result::mem_get_info().map_err(|error| self.error("cuMemGetInfo", error))
    }

    fn make_current(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| self.error("cuCtxSetCurrent", error))
    }

    fn lost(&self) -> Option<&DeviceError> {
        self.lost.get()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        log_error(self.make_current());
        // SAFETY: `open` made these objects, and each is released once. Nothing uses them any more: buffers and streams
        // hold the device, so all of them have been dropped.
        unsafe {
            if !self.module.is_null() {
                log_error(result::module::unload(self.module).map_err(|error| self.error("cuModuleUnload", error)));
            }
            if let Some(pool) = self.pool {
                log_error(result::mem_pool::destroy(pool).map_err(|error| self.error("cuMemPoolDestroy", error)));
            }
            let released = result::primary_ctx::release(self.device);
            log_error(released.map_err(|error| self.error("cuDevicePrimaryCtxRelease", error)));
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
    let why = in_words(error);
    if is_final(error.0) { DeviceError::Lost { device, call, why } } else { DeviceError::Failed { device, call, why } }
}

fn in_words(error: DriverError) -> String {
    let text = |text: Result<&CStr, DriverError>| text.map(|text| text.to_string_lossy().into_owned()).ok();
    let words: Vec<_> = [text(error.error_name()), text(error.error_string())].into_iter().flatten().collect();
    words.join(": ") + help(error.0)
}

/// What to do after an error of the driver, where its own words don't say it.
const fn help(error: sys::CUresult) -> &'static str {
    match error {
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "; a stub of the CUDA toolkit was loaded in place of the driver: remove its folder (stubs) from LD_LIBRARY_PATH"
        }
        sys::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND => {
            "; the driver's compiler, libnvidia-ptxjitcompiler.so.1, is missing: install it beside libcuda.so.1"
        }
        _ => "",
    }
}

/// Whether the driver refuses everything that this process asks of the device after the error. Of most of these, CUDA's
/// documentation of `CUresult` says that "the process must be terminated and relaunched". After an assertion in a kernel,
/// the context must be destroyed, and ONNX Runtime uses it, too. Memory with uncorrectable errors stays wrong.
const fn is_final(error: sys::CUresult) -> bool {
    use sys::CUresult as Of;
    matches!(
        error,
        Of::CUDA_ERROR_ASSERT
            | Of::CUDA_ERROR_CONTAINED
            | Of::CUDA_ERROR_ECC_UNCORRECTABLE
            | Of::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Of::CUDA_ERROR_ILLEGAL_ADDRESS
            | Of::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Of::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Of::CUDA_ERROR_INVALID_PC
            | Of::CUDA_ERROR_LAUNCH_FAILED
            | Of::CUDA_ERROR_LAUNCH_TIMEOUT
            | Of::CUDA_ERROR_MISALIGNED_ADDRESS
            | Of::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Of::CUDA_ERROR_TENSOR_MEMORY_LEAK
    )
}

fn log_error(done: Result<(), DeviceError>) {
    if let Err(error) = done {
        log::error!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_after_which_only_a_restart_helps_say_so() {
        use sys::CUresult::{CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_STUB_LIBRARY};
        assert!(is_final(CUDA_ERROR_ILLEGAL_ADDRESS) && !is_final(CUDA_ERROR_INVALID_VALUE));
        assert!(help(CUDA_ERROR_STUB_LIBRARY).contains("LD_LIBRARY_PATH"));
        assert_eq!(help(CUDA_ERROR_ILLEGAL_ADDRESS), "");
    }
}
