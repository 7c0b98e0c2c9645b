//! The GPUs that the process uses: their memory and streams, and what must wait while a CUDA graph is captured.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
#[cfg(any(test, feature = "simulated-device"))]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(any(test, feature = "simulated-device"))]
use super::driver::Counts;
use super::driver::{Cuda, DeviceError, Driver, Stream};
#[cfg(any(test, feature = "simulated-device"))]
use super::simulated::Simulated;

/// A GPU that the process uses.
pub struct Device {
    number: i32,
    pub(super) driver: Box<dyn Driver>,
    /// Stream of allocations, of frees, and of copies from and to [`Foreign`](super::Foreign) memory.
    pub(super) stream: Stream,
}

/// Write-locked while a CUDA graph is captured.
static CAPTURE: RwLock<()> = RwLock::new(());

/// Read-locked while sessions are opened and dropped, which may take minutes. Before [`CAPTURE`], where both are
/// locked.
static SESSIONS: RwLock<()> = RwLock::new(());

/// Waits until no CUDA graph is captured, and prevents a capture while the guard lives. Hold it for short work that
/// CUDA may forbid during a capture: making and freeing memory, streams and modules, and waits. A thread may hold
/// several guards.
pub fn while_nothing_is_captured() -> RwLockReadGuard<'static, ()> {
    CAPTURE.read_recursive()
}

/// As [`while_nothing_is_captured`], for a run. A capture that waits goes first, so busy instances don't keep it
/// waiting for longer than the runs under way take. Not for a thread that holds a guard already: it would wait for
/// itself.
pub fn for_run() -> RwLockReadGuard<'static, ()> {
    CAPTURE.read()
}

/// As [`while_nothing_is_captured`], for opening and dropping a session. A capture does not wait for this.
pub fn for_session() -> RwLockReadGuard<'static, ()> {
    SESSIONS.read_recursive()
}

/// Waits for the runs and the short work under way on all GPUs, and prevents others while the guard lives. `None` while
/// a session is opened or dropped, or another graph is captured.
pub fn for_capture() -> Option<(RwLockWriteGuard<'static, ()>, RwLockWriteGuard<'static, ()>)> {
    let sessions = SESSIONS.try_write()?;
    Some((sessions, CAPTURE.write()))
}

/// Whether devices are simulated; see [`simulate`].
#[cfg(any(test, feature = "simulated-device"))]
static SIMULATE: AtomicBool = AtomicBool::new(false);

/// Makes all devices that this process opens from now on simulated ones, of 64 MiB each. For unit tests; servers do so
/// with `TRITON_STATEFUL_SIMULATED_DEVICES`.
#[cfg(any(test, feature = "simulated-device"))]
pub fn simulate() {
    SIMULATE.store(true, Ordering::Relaxed);
}

/// Devices in use, one for each GPU.
static DEVICES: Mutex<BTreeMap<i32, Weak<Device>>> = Mutex::new(BTreeMap::new());

impl Device {
    /// Opens GPU `number` of those that CUDA shows this process. In builds for tests, the GPU may be simulated.
    pub fn open(number: i32) -> Result<Arc<Self>, DeviceError> {
        let mut devices = DEVICES.lock();
        if let Some(device) = devices.get(&number).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let _no_capture = while_nothing_is_captured();
        let driver = open_driver(number)?;
        driver.make_current()?;
        let stream = driver.open_stream()?;
        let device = Arc::new(Self { number, driver, stream });
        devices.insert(number, Arc::downgrade(&device));
        Ok(device)
    }

    pub fn make_current(&self) -> Result<(), DeviceError> {
        self.driver.make_current()
    }

    pub const fn number(&self) -> i32 {
        self.number
    }

    pub fn name(&self) -> String {
        self.driver.name()
    }

    /// CUDA's number of the device, by which ONNX Runtime and Triton know it. `None` if the device's memory is the
    /// host's: ONNX Runtime then runs models on the CPU.
    pub fn cuda_number(&self) -> Option<i32> {
        self.driver.is_cuda().then_some(self.number)
    }

    /// Bytes of the GPU's memory that are in use by any process.
    pub fn used_bytes(&self) -> Result<usize, DeviceError> {
        self.driver.make_current()?;
        let (free, total) = self.driver.memory()?;
        Ok(total - free)
    }

    /// The error after which the driver refuses everything that this process asks of the device, if there was one.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.driver.lost()
    }

    #[cfg(any(test, feature = "simulated-device"))]
    pub fn counts(&self) -> Counts {
        self.driver.counts()
    }

    /// Allocates uninitialised memory, which any stream may use.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<DeviceBuffer, DeviceError> {
        let _no_capture = while_nothing_is_captured();
        self.driver.make_current()?;
        let address = self.driver.allocate(self.stream, bytes.max(1))?;
        let buffer = DeviceBuffer { memory: Arc::new(DeviceMemory { device: self.clone(), address }), bytes };
        self.driver.synchronise(self.stream)?;
        Ok(buffer)
    }

    /// Allocates pinned host memory, which the device can copy from and to asynchronously.
    pub fn allocate_pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, DeviceError> {
        let _no_capture = while_nothing_is_captured();
        self.driver.make_current()?;
        let memory = self.driver.allocate_pinned(bytes.max(1))?;
        Ok(Pinned { device: self.clone(), memory, bytes })
    }
}

fn open_driver(number: i32) -> Result<Box<dyn Driver>, DeviceError> {
    #[cfg(any(test, feature = "simulated-device"))]
    {
        let is_server = devices_for_cpu_instances() > 0;
        if cfg!(test) || is_server || SIMULATE.load(Ordering::Relaxed) {
            return Ok(Box::new(Simulated::new(number, is_server)));
        }
    }
    Ok(Box::new(Cuda::open(number)?))
}

/// Number of devices that the instances of KIND_CPU run on; 0 if they run on the host. Only builds for tests have such
/// devices: they are simulated, and Triton for machines without GPUs refuses KIND_GPU.
pub fn devices_for_cpu_instances() -> usize {
    match std::env::var("TRITON_STATEFUL_SIMULATED_DEVICES") {
        Ok(number) if cfg!(feature = "simulated-device") => number.parse().unwrap_or(0),
        _ => 0,
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        self.driver.close_stream(self.stream);
    }
}

/// A stream of a device. The queue and the session that enqueue work on it share it.
pub struct OwnedStream {
    pub(super) device: Arc<Device>,
    pub(super) stream: Stream,
}

impl OwnedStream {
    pub fn open(device: &Arc<Device>) -> Result<Arc<Self>, DeviceError> {
        let _no_capture = while_nothing_is_captured();
        device.driver.make_current()?;
        Ok(Arc::new(Self { device: device.clone(), stream: device.driver.open_stream()? }))
    }

    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// CUDA's `cudaStream_t`.
    pub const fn handle(&self) -> usize {
        self.stream.0
    }

    /// Ends a capture on the stream that failed, without which later work would not be executed. To be called on the
    /// thread that began it.
    pub fn end_capture(&self) -> Result<(), DeviceError> {
        self.device.driver.make_current()?;
        self.device.driver.end_capture(self.stream)
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        self.device.driver.close_stream(self.stream);
    }
}

/// Memory of a device with one owner. When the owner has dropped it and no queue keeps it
/// ([`Queue::keep`](super::Queue::keep)), it is freed.
pub struct DeviceBuffer {
    memory: Arc<DeviceMemory>,
    bytes: usize,
}

/// An allocation of a device, shared by its owner and the queues that use it.
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
}

impl DeviceBuffer {
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// The allocation, for a queue to keep alive.
    pub const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    pub const fn byte_len(&self) -> usize {
        self.bytes
    }

    /// The `bytes` bytes from `offset` on. Panics if the buffer ends before them.
    pub fn span(&self, offset: usize, bytes: usize) -> Span<'_> {
        assert!(offset + bytes <= self.byte_len(), "a span beyond the end of its buffer");
        Span { address: self.address() + offset as u64, bytes, memory: Some(self.memory()) }
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.memory.device
    }
}

/// Bytes in a device's memory, borrowed like a slice. Only enqueued work can read or write them.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    address: u64,
    bytes: usize,
    memory: Option<&'a Arc<DeviceMemory>>,
}

impl<'a> Span<'a> {
    pub const fn none() -> Self {
        Self { address: 0, bytes: 0, memory: None }
    }

    /// The allocation that the bytes are in, for a queue to keep alive; `None` for an empty span.
    pub const fn memory(self) -> Option<&'a Arc<DeviceMemory>> {
        self.memory
    }

    pub const fn address(self) -> u64 {
        self.address
    }

    pub const fn byte_len(self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        // SAFETY: the address is from `allocate` and is freed once. No enqueued work still uses it: the functions of a
        // queue require that the queue keeps the memory, or that its owner waits for the work before dropping it.
        unsafe { self.device.driver.free(self.device.stream, self.address) }
    }
}

/// Pinned host memory, which the device copies from and to asynchronously. Bytes that an unfinished copy uses must not
/// be touched.
pub struct Pinned {
    device: Arc<Device>,
    pub(super) memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory has one owner, and any thread may use and free it.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only allows reading.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub const fn bytes(&self) -> &[u8] {
        // SAFETY: `allocate_pinned` allocated and initialised that many bytes, and `self` owns them.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }

    /// The bytes in `range`, to write while an unfinished copy uses others. Panics if the range goes beyond the end.
    pub(super) fn part_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "a range beyond the end");
        // SAFETY: the range is within the bytes, as checked above; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(range.start), range.len()) }
    }

    pub const fn byte_len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        // SAFETY: the memory is from `allocate_pinned` and is freed once. Its owner has waited for the copies that used
        // it.
        unsafe { self.device.driver.free_pinned(self.memory, self.bytes.max(1)) }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_capture_waits_for_runs_and_later_runs_wait_for_it() {
        let run = for_run();
        let capture = thread::spawn(|| for_capture().is_some());
        while let Some(another) = CAPTURE.try_read() {
            drop(another);
            thread::yield_now();
        }
        // What a run under way allocates does not wait.
        drop(while_nothing_is_captured());
        drop(run);
        assert!(capture.join().unwrap());
        drop(for_run());
        let session = for_session();
        assert!(for_capture().is_none(), "a session that is opened may take minutes");
        drop(session);
    }
}
