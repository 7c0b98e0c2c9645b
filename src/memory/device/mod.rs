//! Memory of a GPU, and the copies between it and the host.
//!
//! A [`Device`] is shared by all that use it. Each instance of a model has a [`Queue`] on it, with a stream of its own,
//! which is also ONNX Runtime's: what is enqueued there happens in order, between the runs. A [`DeviceBuffer`] belongs
//! to one owner.
//!
//! Rules: what a queue has enqueued has happened before the leases of its payload are settled (the owner of the queue
//! calls [`Queue::synchronise`]), so memory that changes hands is never in use. A queue keeps memory that it is told of
//! alive until then ([`Queue::keep`]). Nothing waits for the whole device.
//!
//! Not for: deciding what is copied where.

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
pub use moves::{Change, RowIn};
pub use queue::{Queue, Traffic};
#[cfg(any(test, feature = "simulated-device"))]
pub use simulated::Counts;

/// A GPU in use.
pub struct Device {
    number: i32,
    driver: Box<dyn Driver>,
    /// For memory that no queue has asked for.
    stream: Stream,
}

/// Held for writing while a CUDA graph is captured, which nothing may be allocated or freed or run beside; see
/// [`while_nothing_is_captured`].
pub static CAPTURE: RwLock<()> = RwLock::new(());

/// To be held by all that CUDA forbids while a graph is captured: memory, streams and modules that come and go, runs,
/// and sessions that are opened or dropped. May be held more than once.
pub fn while_nothing_is_captured() -> RwLockReadGuard<'static, ()> {
    CAPTURE.read_recursive()
}

/// Devices in use, each made once.
static DEVICES: Mutex<BTreeMap<i32, Weak<Device>>> = Mutex::new(BTreeMap::new());

/// Devices whose memory requests have brought, kept because making one takes long.
static FOREIGN: Mutex<BTreeMap<i32, Arc<Device>>> = Mutex::new(BTreeMap::new());

impl Device {
    /// GPU number `number` of those that CUDA shows this process; in builds for tests it may be simulated.
    pub fn open(number: i32) -> Result<Arc<Self>, DeviceError> {
        let mut devices = DEVICES.lock();
        if let Some(device) = devices.get(&number).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let _no_capture = while_nothing_is_captured();
        let driver: Box<dyn Driver> = match cfg!(test) || simulated_devices() > 0 {
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

    /// Its number.
    pub const fn number(&self) -> i32 {
        self.number
    }

    /// Its name, as its maker gave it.
    pub fn name(&self) -> String {
        self.driver.name()
    }

    /// Whether ONNX Runtime sees its memory as host memory.
    pub fn is_simulated(&self) -> bool {
        self.driver.is_simulated()
    }

    /// Bytes of its memory that are in use, by whomever.
    pub fn used_bytes(&self) -> Result<usize, DeviceError> {
        self.driver.make_current()?;
        let (free, total) = self.driver.memory()?;
        Ok(total - free)
    }

    /// What a simulated device was asked so far.
    #[cfg(any(test, feature = "simulated-device"))]
    pub fn counts(&self) -> Counts {
        self.driver.counts()
    }

    /// Memory of any content, which may be used by any stream.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<DeviceBuffer, DeviceError> {
        let _no_capture = while_nothing_is_captured();
        self.driver.make_current()?;
        let address = self.driver.allocate(self.stream, bytes.max(1))?;
        let buffer = DeviceBuffer { memory: Arc::new(DeviceMemory { device: self.clone(), address }), bytes };
        self.driver.synchronise(self.stream)?;
        Ok(buffer)
    }

    /// Host memory that is quickly copied from and to the device.
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

/// A stream of a device. Whoever has work on it holds it: the queue, and the session whose runs are enqueued there.
pub struct OwnedStream {
    device: Arc<Device>,
    stream: Stream,
}

impl OwnedStream {
    /// A new one.
    pub fn open(device: &Arc<Device>) -> Result<Arc<Self>, DeviceError> {
        let _no_capture = while_nothing_is_captured();
        device.driver.make_current()?;
        Ok(Arc::new(Self { device: device.clone(), stream: device.driver.open_stream()? }))
    }

    /// The device.
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

/// How many devices a build for tests is to simulate; 0 for none.
pub fn simulated_devices() -> usize {
    match std::env::var("TRITON_STATEFUL_SIMULATED_DEVICES") {
        Ok(number) if cfg!(feature = "simulated-device") => number.parse().unwrap_or(0),
        _ => 0,
    }
}

/// Memory of a GPU that is somebody else's, such as what a client shares with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign<'a> {
    gpu: i32,
    address: u64,
    bytes: usize,
    lent: PhantomData<&'a u8>,
}

impl Foreign<'_> {
    /// # Safety
    /// That many bytes of that GPU's, which live during `'a`.
    pub const unsafe fn new(gpu: i32, address: u64, bytes: usize) -> Self {
        Self { gpu, address, bytes, lent: PhantomData }
    }

    /// The GPU's number.
    pub const fn gpu(self) -> i32 {
        self.gpu
    }

    /// Where it begins.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// How many bytes.
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

    /// Appends a copy to memory of the host, and waits for that.
    pub fn append_to(self, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        let device = self.device()?;
        let pinned = device.allocate_pinned(self.bytes)?;
        // SAFETY: `new`'s word for the device's side; `pinned` lives until the wait below. Where that fails the device
        // has failed, and copies nothing more.
        unsafe { device.driver.download(device.stream, self.address, pinned.memory.as_ptr(), self.bytes)? };
        device.driver.synchronise(device.stream)?;
        to.extend_from_slice(pinned.bytes());
        Ok(())
    }

    /// Copies the host's bytes to it, and waits for that.
    pub fn write(self, from: &[u8]) -> Result<(), DeviceError> {
        assert_eq!(from.len(), self.bytes, "another size");
        let device = self.device()?;
        let mut pinned = device.allocate_pinned(self.bytes)?;
        pinned.bytes_mut().copy_from_slice(from);
        // SAFETY: as in `append_to`.
        unsafe { device.driver.upload(device.stream, pinned.memory.as_ptr(), self.address, self.bytes)? };
        device.driver.synchronise(device.stream)
    }
}

/// Memory of a device with one owner. Dropped, it is given back as soon as no queue keeps it ([`Queue::keep`]).
pub struct DeviceBuffer {
    memory: Arc<DeviceMemory>,
    bytes: usize,
}

/// Memory of a device, for its owner and for the queues that use it.
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
}

impl DeviceBuffer {
    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// What a queue keeps that works with it.
    pub const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Bytes that were asked for.
    pub const fn byte_len(&self) -> usize {
        self.bytes
    }

    /// The device that it is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.memory.device
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        // SAFETY: from `allocate`, given back once. Who enqueues its use on a stream keeps it, or waits before its owner
        // drops it; that is what the functions of a queue ask for.
        unsafe { self.device.driver.free(self.device.stream, self.address) }
    }
}

/// Host memory that the device copies from and to by itself. What a copy under way uses may not be touched.
pub struct Pinned {
    device: Arc<Device>,
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: as above; shared, it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The bytes.
    pub const fn bytes(&self) -> &[u8] {
        // SAFETY: that many bytes, initialised by the driver's making, owned.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    /// The bytes, to change.
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }

    /// Some of the bytes, to change, where a copy under way uses others. Panics if there are no such.
    fn part_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "more than there is");
        // SAFETY: within the bytes, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(range.start), range.len()) }
    }

    /// Bytes that were asked for.
    pub const fn byte_len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _no_capture = while_nothing_is_captured();
        // SAFETY: from `allocate_pinned`, given back once; its owner has waited for what used it.
        unsafe { self.device.driver.free_pinned(self.memory, self.bytes.max(1)) }
    }
}
