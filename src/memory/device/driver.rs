//! What a device does for this backend: the only questions that are put to it.
//!
//! Two answer: CUDA ([`super::cuda`]), and for tests a device that is simulated in host memory
//! (`super::simulated`). All that is enqueued on a stream happens in its order and some time later; only
//! [`Driver::synchronise`] waits.

use std::ptr::NonNull;

/// A stream of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(super) usize);

impl Stream {
    /// The driver's handle, which is CUDA's `cudaStream_t` on CUDA.
    pub const fn handle(self) -> usize {
        self.0
    }
}

/// What a device could not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no driver on this machine.
    #[error("NVIDIA's driver is needed: libcuda.so.1 cannot be loaded on this machine")]
    NoDriver,
    /// There is one, which cannot be used.
    #[error("NVIDIA's driver is needed, and the one on this machine cannot be used: {why}")]
    UselessDriver {
        /// Its error.
        why: String,
    },
    /// There is no such device.
    #[error("there is no GPU {device}: the driver knows {count}")]
    NoDevice {
        /// Its number.
        device: i32,
        /// How many there are.
        count: i32,
    },
    /// The device's memory does not suffice.
    #[error("{bytes} bytes of memory of GPU {device} cannot be had: {free} of {total} bytes are free")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
        /// The device's number.
        device: i32,
        /// Free bytes.
        free: usize,
        /// All bytes.
        total: usize,
    },
    /// The host's memory does not suffice for what the device copies by itself.
    #[error("{bytes} bytes of the host's memory, pinned for GPU {device}, cannot be had")]
    OutOfPinned {
        /// What was asked for.
        bytes: usize,
        /// The device's number.
        device: i32,
    },
    /// Anything else, in the driver's words.
    #[error("GPU {device}: {call} failed: {why}")]
    Failed {
        /// The device's number.
        device: i32,
        /// The driver's function.
        call: &'static str,
        /// The driver's error.
        why: String,
    },
}

impl DeviceError {
    /// Whether it may be another time when others need less.
    pub const fn is_want_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OutOfPinned { .. })
    }
}

/// A device. Addresses are the device's own; the safety of what is enqueued is the caller's: memory has to live until
/// it has happened.
pub trait Driver: Send + Sync {
    /// The device's name.
    fn name(&self) -> String;

    /// Whether ONNX Runtime sees its memory as host memory.
    fn is_simulated(&self) -> bool;

    /// Makes a stream.
    fn open_stream(&self) -> Result<Stream, DeviceError>;

    /// Ends a stream.
    fn close_stream(&self, stream: Stream);

    /// Memory, aligned for any load, of any content, that may be used by what is enqueued on the stream from now on.
    fn allocate(&self, stream: Stream, bytes: usize) -> Result<u64, DeviceError>;

    /// Gives memory back once the stream has come so far.
    ///
    /// # Safety
    /// From [`Driver::allocate`], and not used by what is still to happen on other streams.
    unsafe fn free(&self, stream: Stream, address: u64);

    /// Host memory that can be copied from and to asynchronously.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// Gives it back.
    ///
    /// # Safety
    /// From [`Driver::allocate_pinned`], of as many bytes, and not used any more.
    unsafe fn free_pinned(&self, memory: NonNull<u8>, bytes: usize);

    /// Enqueues a copy of host memory to the device.
    ///
    /// # Safety
    /// `from` is pinned; both sides have the bytes until it has happened.
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

    /// Enqueues the moves of a table that lies on the device (see [`super::moves`]).
    ///
    /// # Safety
    /// The table has `count` moves, of `tiles` tiles together, and each lies in memory that lives until it has
    /// happened.
    unsafe fn move_rows(&self, stream: Stream, table: u64, count: u32, tiles: u32) -> Result<(), DeviceError>;

    /// Waits until all that was enqueued on the stream has happened.
    fn synchronise(&self, stream: Stream) -> Result<(), DeviceError>;

    /// To be called before ONNX Runtime works with the device's memory, with the stream that it enqueues on.
    fn before_run(&self, stream: Stream) -> Result<(), DeviceError>;

    /// Free bytes and all bytes of its memory.
    fn memory(&self) -> Result<(usize, usize), DeviceError>;

    /// Makes the device the calling thread's.
    fn make_current(&self) -> Result<(), DeviceError>;

    /// What it was asked so far, if it counts.
    #[cfg(any(test, feature = "simulated-device"))]
    fn counts(&self) -> super::Counts {
        super::Counts::default()
    }
}
