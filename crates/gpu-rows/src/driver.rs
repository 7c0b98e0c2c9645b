//! [`Driver`]: the device operations that this backend uses. [`Cuda`] implements them with NVIDIA's driver, which is
//! loaded when the first model asks for a GPU.
//!
//! Work that is enqueued on a stream is executed later, in the order in which it was enqueued. Only
//! [`Driver::synchronise`] waits for it.

use std::ffi::{CStr, CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// The kernel of `rows.cu` as PTX, which `scripts/kernels` makes. The driver compiles it for the GPU, from Volta on.
const KERNEL: &str = concat!(include_str!("rows.ptx"), "\0");
const KERNEL_NAME: &CStr = c"move_rows";

/// Threads of a block, as in `rows.cu`.
const THREADS: u32 = 256;

/// Bytes of freed memory that the pool keeps for later allocations.
const KEPT_BY_POOL: u64 = 32 << 20;

/// A stream of a device, by the driver's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(super) usize);

/// Why an operation of a device failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("NVIDIA's driver is needed: libcuda.so.1 cannot be loaded on this machine")]
    NoDriver,
    #[error("NVIDIA's driver is needed, and the one on this machine cannot be used: {why}")]
    UselessDriver { why: String },
    #[error("there is no GPU {device}: the driver knows {count}")]
    NoDevice { device: i32, count: i32 },
    #[error("cannot allocate {bytes} bytes of memory of GPU {device}: {free} of {total} bytes are free")]
    OutOfMemory { bytes: usize, device: i32, free: usize, total: usize },
    #[error("cannot allocate {bytes} bytes of host memory pinned for GPU {device}")]
    OutOfPinned { bytes: usize, device: i32 },
    #[error("GPU {device}: {call} failed: {why}")]
    Failed { device: i32, call: &'static str, why: String },
    /// A function of the driver failed. From now on, the driver refuses everything that this process asks of the
    /// device.
    #[error(
        "GPU {device}: {call} failed: {why}; this process can't use the GPU any more, even for reloaded models: \
         restart the server"
    )]
    Lost { device: i32, call: &'static str, why: String },
}

impl DeviceError {
    /// Whether only a new process can use the device.
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether the operation may succeed when memory has been freed.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OutOfPinned { .. })
    }
}

/// A device. Addresses are addresses on the device. Functions that enqueue work are unsafe, because the caller has to
/// keep the memory allocated until the work is complete.
pub trait Driver: Send + Sync {
    fn name(&self) -> String;

    /// Whether addresses and streams are CUDA's.
    fn is_cuda(&self) -> bool;

    fn open_stream(&self) -> Result<Stream, DeviceError>;

    fn close_stream(&self, stream: Stream);

    /// Allocates uninitialised memory that is aligned for any load. Work that is enqueued on `stream` afterwards may
    /// use it. Other streams may use it after [`Driver::synchronise`] of `stream`.
    fn allocate(&self, stream: Stream, bytes: usize) -> Result<u64, DeviceError>;

    /// Frees memory when the work that is enqueued on `stream` is complete.
    ///
    /// # Safety
    /// `address` must be from [`Driver::allocate`], and unfinished work on other streams must not use the memory.
    unsafe fn free(&self, stream: Stream, address: u64);

    /// Allocates host memory that can be copied from and to asynchronously, filled with zeros.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// # Safety
    /// `memory` must be from [`Driver::allocate_pinned`], with the same `bytes`, and nothing may use it any more.
    unsafe fn free_pinned(&self, memory: NonNull<u8>, bytes: usize);

    /// Enqueues a copy of host memory to the device.
    ///
    /// # Safety
    /// `from` must be pinned. Until the copy is complete, `bytes` bytes must stay allocated on both sides.
    unsafe fn upload(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Enqueues a copy of device memory to the host.
    ///
    /// # Safety
    /// As for [`Driver::upload`].
    unsafe fn download(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError>;

    /// Enqueues a copy on the device.
    ///
    /// # Safety
    /// As for [`Driver::upload`].
    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Enqueues the moves of a table in the device's memory (see [`super::moves`]).
    ///
    /// # Safety
    /// The table must have `count` moves with `tiles` tiles in total. Until the moves are complete, the table and the
    /// memory that they read and write must stay allocated.
    unsafe fn move_rows(&self, stream: Stream, table: u64, count: u32, tiles: u32) -> Result<(), DeviceError>;

    /// Waits until all work that is enqueued on the stream is complete.
    fn synchronise(&self, stream: Stream) -> Result<(), DeviceError>;

    /// To be called before ONNX Runtime enqueues work on the stream. A simulated device then executes the work that is
    /// enqueued, because ONNX Runtime reads its memory at once.
    fn before_run(&self, stream: Stream) -> Result<(), DeviceError>;

    /// Ends the capture of a CUDA graph on the stream, if one is under way, and drops the graph.
    fn end_capture(&self, stream: Stream) -> Result<(), DeviceError>;

    /// Free bytes of the device's memory, and all its bytes.
    fn memory(&self) -> Result<(usize, usize), DeviceError>;

    /// Makes the device the current one of the calling thread.
    fn make_current(&self) -> Result<(), DeviceError>;

    /// The first [`DeviceError::Lost`] of the device, if there was one.
    fn lost(&self) -> Option<&DeviceError>;

    #[cfg(any(test, feature = "simulated-device"))]
    fn counts(&self) -> Counts {
        Counts::default()
    }
}

#[cfg(any(test, feature = "simulated-device"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub allocations: usize,
    pub waits: usize,
    pub launches: usize,
    pub copies: usize,
}

/// A GPU, used through NVIDIA's driver.
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
        if has_pools.map_err(self.failed("cuDeviceGetAttribute"))? == 0 {
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
            let pool = result::mem_pool::create(&wanted).map_err(self.failed("cuMemPoolCreate"))?;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut kept).cast::<c_void>())
                .map_err(self.failed("cuMemPoolSetAttribute"))?;
            Ok(Some(pool))
        }
    }

    fn load_kernel(&mut self) -> Result<(), DeviceError> {
        // SAFETY: the text ends with a NUL. The module stays loaded, and so the kernel valid, until `self` is dropped.
        unsafe {
            self.module =
                result::module::load_data(KERNEL.as_ptr().cast::<c_void>()).map_err(self.failed("cuModuleLoadData"))?;
            self.kernel = result::module::get_function(self.module, CString::from(KERNEL_NAME))
                .map_err(self.failed("cuModuleGetFunction"))?;
        }
        Ok(())
    }

    fn failed(&self, call: &'static str) -> impl FnOnce(DriverError) -> DeviceError {
        move |error| {
            let error = driver_error(self.number, call, error);
            if error.is_lost() {
                self.lost.get_or_init(|| error.clone());
            }
            error
        }
    }

    fn out_of_memory(&self, bytes: usize, call: &'static str, error: DriverError) -> DeviceError {
        if !is_out_of_memory(error) {
            return self.failed(call)(error);
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
        stream.map(|stream| Stream(stream as usize)).map_err(self.failed("cuStreamCreate"))
    }

    fn close_stream(&self, stream: Stream) {
        // SAFETY: the stream was made by `open_stream`, and its owner closes it once.
        let closed = self
            .make_current()
            .and_then(|()| unsafe { result::stream::destroy(raw(stream)).map_err(self.failed("cuStreamDestroy")) });
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
                Some(_) => result::free_async(address, raw(stream)).map_err(self.failed("cuMemFreeAsync")),
                None => result::free_sync(address).map_err(self.failed("cuMemFree")),
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
                    self.failed("cuMemHostAlloc")(error)
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
            result::free_host(memory.as_ptr().cast::<c_void>()).map_err(self.failed("cuMemFreeHost"))
        });
        log_error(freed);
    }

    unsafe fn upload(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that both sides stay allocated until the copy is complete.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, raw(stream)).result() };
        copied.map_err(self.failed("cuMemcpyHtoDAsync"))
    }

    unsafe fn download(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `upload`.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, raw(stream)).result() };
        copied.map_err(self.failed("cuMemcpyDtoHAsync"))
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `upload`.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, raw(stream)) };
        copied.map_err(self.failed("cuMemcpyDtoDAsync"))
    }

    unsafe fn move_rows(&self, stream: Stream, table: u64, count: u32, tiles: u32) -> Result<(), DeviceError> {
        let (mut table, mut count) = (table, count);
        let mut parameters = [(&raw mut table).cast::<c_void>(), (&raw mut count).cast::<c_void>()];
        // SAFETY: the kernel takes an address and a number, which the driver copies. The caller guarantees that the
        // table is right and that its memory stays allocated until the moves are complete.
        let launched = unsafe {
            result::launch_kernel(self.kernel, (tiles, 1, 1), (THREADS, 1, 1), 0, raw(stream), &mut parameters)
        };
        launched.map_err(self.failed("cuLaunchKernel"))
    }

    fn synchronise(&self, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(raw(stream)) }.map_err(self.failed("cuStreamSynchronize"))
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
            asked.map_err(self.failed("cuStreamIsCapturing"))?;
            if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
                return Ok(());
            }
            let ended = sys::cuStreamEndCapture(raw(stream), &mut graph).result();
            if !graph.is_null() {
                log_error(sys::cuGraphDestroy(graph).result().map_err(self.failed("cuGraphDestroy")));
            }
            match ended {
                // What the end of a capture that is no longer valid returns.
                Err(error) if error.0 != sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => {
                    Err(self.failed("cuStreamEndCapture")(error))
                }
                _ => Ok(()),
            }
        }
    }

    fn memory(&self) -> Result<(usize, usize), DeviceError> {
        result::mem_get_info().map_err(self.failed("cuMemGetInfo"))
    }

    fn make_current(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { result::ctx::set_current(self.context) }.map_err(self.failed("cuCtxSetCurrent"))
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
                log_error(result::module::unload(self.module).map_err(self.failed("cuModuleUnload")));
            }
            if let Some(pool) = self.pool {
                log_error(result::mem_pool::destroy(pool).map_err(self.failed("cuMemPoolDestroy")));
            }
            let released = result::primary_ctx::release(self.device);
            log_error(released.map_err(self.failed("cuDevicePrimaryCtxRelease")));
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
/// documentation of `CUresult` says that "the process must be terminated and relaunched". After an assertion in a
/// kernel, the context must be destroyed, and ONNX Runtime uses it, too. Memory with uncorrectable errors stays wrong.
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
