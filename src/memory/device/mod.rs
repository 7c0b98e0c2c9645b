//! Memory of a GPU, and the copies between it and the host.
//!
//! All users of a GPU share one [`Device`]. Each instance of a model has a [`Queue`] with a stream of its own. ONNX
//! Runtime runs the instance's model on the same stream, so copies and runs are executed in the order in which they are
//! enqueued. A [`DeviceBuffer`] has one owner.
//!
//! Rules:
//! - The owner of a queue calls [`Queue::synchronise`] before it settles the leases of a payload. So no work still uses
//!   a slot that another sequence gets.
//! - A queue keeps memory alive until then if it is asked to ([`Queue::keep`]).
//! - Nothing waits for the whole device.
//!
//! Not for: deciding which bytes are copied where.

mod cuda;
mod driver;
mod moves;
mod queue;
#[cfg(any(test, feature = "simulated-device"))]
mod simulated;

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

pub use driver::DeviceError;
use driver::{Driver, Stream};
pub use moves::{Change, Pieces, RowIn};
pub use queue::{Queue, Traffic};
#[cfg(any(test, feature = "simulated-device"))]
pub use simulated::Counts;

/// A GPU that the process uses.
pub struct Device {
    number: i32,
    driver: Box<dyn Driver>,
    /// Stream of allocations, of frees, and of copies from and to [`Foreign`] memory.
    stream: Stream,
}

/// Write-locked while a CUDA graph is captured. See [`while_nothing_is_captured`] for what must not happen meanwhile.
pub static CAPTURE: RwLock<()> = RwLock::new(());

/// Waits until no CUDA graph is captured, and prevents a capture while the guard lives. Hold it for everything that
/// CUDA forbids during a capture: making and freeing memory, streams and modules, runs, and opening and dropping
/// sessions. A thread may hold several guards.
pub fn while_nothing_is_captured() -> RwLockReadGuard<'static, ()> {
    CAPTURE.read_recursive()
}

/// Devices in use, one for each GPU.
static DEVICES: Mutex<BTreeMap<i32, Weak<Device>>> = Mutex::new(BTreeMap::new());

/// GPUs that requests had memory on ([`Foreign`]). They stay open, because opening a GPU takes long.
static FOREIGN: Mutex<BTreeMap<i32, Arc<Device>>> = Mutex::new(BTreeMap::new());

impl Device {
    /// Opens GPU `number` of those that CUDA shows this process. In builds for tests, the GPU may be simulated.
    pub fn open(number: i32) -> Result<Arc<Self>, DeviceError> {
        let mut devices = DEVICES.lock();
        if let Some(device) = devices.get(&number).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let _no_capture = while_nothing_is_captured();
        let driver: Box<dyn Driver> = match cfg!(test) || devices_for_cpu_instances() > 0 {
            #[cfg(any(test, feature = "simulated-device"))]
            true => Box::new(simulated::Simulated::new(number)),
            _ => Box::new(cuda::Cuda::open(number)?),
        };
        let device = Arc::new(Self::new(number, driver)?);
        devices.insert(number, Arc::downgrade(&device));
        Ok(device)
    }

    fn new(number: i32, driver: Box<dyn Driver>) -> Result<Self, DeviceError> {
        driver.make_current()?;
        let stream = driver.open_stream()?;
        Ok(Self { number, driver, stream })
    }

    /// Makes it the current device of the calling thread.
    pub fn make_current(&self) -> Result<(), DeviceError> {
        self.driver.make_current()
    }

    /// Number of the GPU.
    pub const fn number(&self) -> i32 {
        self.number
    }

    /// Product name of the GPU.
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

    /// Operations that a simulated device has done.
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

impl Drop for Device {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        self.driver.close_stream(self.stream);
    }
}

/// A stream of a device. The queue and the session that enqueue work on it share it.
pub struct OwnedStream {
    device: Arc<Device>,
    stream: Stream,
}

impl OwnedStream {
    /// Makes a new stream.
    pub fn open(device: &Arc<Device>) -> Result<Arc<Self>, DeviceError> {
        let _no_capture = while_nothing_is_captured();
        device.driver.make_current()?;
        Ok(Arc::new(Self { device: device.clone(), stream: device.driver.open_stream()? }))
    }

    /// The stream's device.
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// CUDA's `cudaStream_t`.
    pub const fn handle(&self) -> usize {
        self.stream.handle()
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        self.device.driver.close_stream(self.stream);
    }
}

/// Number of devices that the instances of KIND_CPU run on; 0 if they run on the host. Only builds for tests have such
/// devices: they are simulated, and Triton for machines without GPUs refuses KIND_GPU.
pub fn devices_for_cpu_instances() -> usize {
    match std::env::var("TRITON_STATEFUL_SIMULATED_DEVICES") {
        Ok(number) if cfg!(feature = "simulated-device") => number.parse().unwrap_or(0),
        _ => 0,
    }
}

/// Memory of a GPU that the backend does not own, such as memory that a client shares with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign<'a> {
    gpu: i32,
    address: u64,
    bytes: usize,
    lent: PhantomData<&'a u8>,
}

impl Foreign<'_> {
    /// # Safety
    /// During `'a`, the `bytes` bytes from `address` on must be allocated on GPU `gpu`.
    pub const unsafe fn new(gpu: i32, address: u64, bytes: usize) -> Self {
        Self { gpu, address, bytes, lent: PhantomData }
    }

    /// Number of the GPU.
    pub const fn gpu(self) -> i32 {
        self.gpu
    }

    /// Address of the first byte on the GPU.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub const fn byte_len(self) -> usize {
        self.bytes
    }

    fn device(self) -> Result<Arc<Device>, DeviceError> {
        let mut foreign = FOREIGN.lock();
        if let Some(device) = foreign.get(&self.gpu) {
            return Ok(device.clone());
        }
        Ok(foreign.entry(self.gpu).or_insert(Device::open(self.gpu)?).clone())
    }

    /// Appends a copy of the bytes to a vector. Returns when the copy is complete.
    pub fn append_to(self, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        let device = self.device()?;
        let pinned = device.allocate_pinned(self.bytes)?;
        // SAFETY: the caller of `new` guarantees that the source is allocated. `pinned` lives until the wait below has
        // succeeded. If the wait fails, the device has failed and copies nothing more.
        unsafe { device.driver.download(device.stream, self.address, pinned.memory.as_ptr(), self.bytes)? };
        device.driver.synchronise(device.stream)?;
        to.extend_from_slice(pinned.bytes());
        Ok(())
    }

    /// Copies `from` to the memory. Returns when the copy is complete. Panics if `from` has another size.
    pub fn write(self, from: &[u8]) -> Result<(), DeviceError> {
        assert_eq!(from.len(), self.bytes, "a copy from a slice of another size");
        let device = self.device()?;
        let mut pinned = device.allocate_pinned(self.bytes)?;
        pinned.bytes_mut().copy_from_slice(from);
        // SAFETY: as in `append_to`.
        unsafe { device.driver.upload(device.stream, pinned.memory.as_ptr(), self.address, self.bytes)? };
        device.driver.synchronise(device.stream)
    }
}

/// Memory of a device with one owner. When the owner has dropped it and no queue keeps it ([`Queue::keep`]), it is
/// freed.
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
    /// Address of the first byte on the device.
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// The allocation, for a queue to keep alive.
    pub const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Number of bytes that were requested.
    pub const fn byte_len(&self) -> usize {
        self.bytes
    }

    /// The device that the memory is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.memory.device
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
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory has one owner, and any thread may use and free it.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only allows reading.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The bytes, to read.
    pub const fn bytes(&self) -> &[u8] {
        // SAFETY: `allocate_pinned` allocated and initialised that many bytes, and `self` owns them.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    /// The bytes, to write.
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }

    /// The bytes in `range`, to write while an unfinished copy uses others. Panics if the range goes beyond the end.
    fn part_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "a range beyond the end");
        // SAFETY: the range is within the bytes, as checked above; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(range.start), range.len()) }
    }

    /// Number of bytes that were requested.
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
