//! The operations of a device that this backend uses.
//!
//! [`super::cuda`] does them with CUDA, and `super::simulated`, for tests, in host memory. Work that is enqueued on a
//! stream is executed later, in the order in which it was enqueued. Only [`Driver::synchronise`] waits for it.

use std::ptr::NonNull;

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
    /// A function of the driver failed. From now on, the driver refuses everything that this process asks of the device.
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
    fn counts(&self) -> super::Counts {
        super::Counts::default()
    }
}
