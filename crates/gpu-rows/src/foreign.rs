//! Memory of GPUs that the backend does not own, such as memory that clients share with the server.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::{Device, DeviceError, Pinned};

/// Memory of a GPU that the backend does not own.
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
}

/// Copies foreign memory to slices of its size, and returns when the copies are complete. A GPU is waited for once for
/// 4 MiB. The result has the GPUs whose copies failed. Panics if a slice has another size.
pub fn fetch(copies: Vec<(Foreign, &mut [u8])>) -> BTreeMap<i32, DeviceError> {
    for_each_gpu(copies, |gpu, copies| {
        let mut staging = gpu.staging()?;
        let parts = copies.into_iter().flat_map(|(from, to)| {
            assert_eq!(from.bytes, to.len(), "a copy to a slice of another size");
            (from.address..).step_by(STAGING).zip(to.chunks_mut(STAGING))
        });
        let mut under_way: Vec<(usize, &mut [u8])> = Vec::new();
        let mut used = 0;
        for (from, to) in parts {
            if used + to.len() > STAGING {
                staging.wait()?;
                under_way.drain(..).for_each(|(at, to)| staging.take(at, to));
                used = 0;
            }
            // SAFETY: the caller of `Foreign::new` guarantees that the source is allocated.
            unsafe { staging.download(from, used, to.len())? };
            used += to.len();
            under_way.push((used - to.len(), to));
        }
        staging.wait()?;
        under_way.into_iter().for_each(|(at, to)| staging.take(at, to));
        Ok(())
    })
}

/// Copies slices to foreign memory of their size. Returns, and panics, as [`fetch`].
pub fn write(copies: Vec<(Foreign, &[u8])>) -> BTreeMap<i32, DeviceError> {
    for_each_gpu(copies, |gpu, copies| {
        let mut staging = gpu.staging()?;
        let mut used = 0;
        for (to, from) in copies {
            assert_eq!(to.bytes, from.len(), "a copy from a slice of another size");
            for (to, from) in (to.address..).step_by(STAGING).zip(from.chunks(STAGING)) {
                if used + from.len() > STAGING {
                    staging.wait()?;
                    used = 0;
                }
                // SAFETY: as in `fetch`, for the target.
                unsafe { staging.upload(used, from, to)? };
                used += from.len();
            }
        }
        staging.wait()
    })
}

fn for_each_gpu<'f, T>(
    copies: Vec<(Foreign<'f>, T)>,
    copy: impl Fn(&Gpu, Vec<(Foreign<'f>, T)>) -> Result<(), DeviceError>,
) -> BTreeMap<i32, DeviceError> {
    let mut by_gpu: BTreeMap<i32, Vec<_>> = BTreeMap::new();
    copies.into_iter().for_each(|copy| by_gpu.entry(copy.0.gpu).or_default().push(copy));
    let copy = |(gpu, copies)| Some((gpu, Gpu::open(gpu).and_then(|of| copy(&of, copies)).err()?));
    by_gpu.into_iter().filter_map(copy).collect()
}

/// A GPU that requests had memory on. It stays open, because opening a GPU takes long.
struct Gpu {
    device: Arc<Device>,
    /// Pinned memory of [`STAGING`] bytes, through which copies go.
    pinned: Mutex<Pinned>,
}

static GPUS: Mutex<BTreeMap<i32, Arc<Gpu>>> = Mutex::new(BTreeMap::new());

const STAGING: usize = 4 << 20;

impl Gpu {
    fn open(number: i32) -> Result<Arc<Self>, DeviceError> {
        let mut gpus = GPUS.lock();
        if let Some(gpu) = gpus.get(&number) {
            return Ok(gpu.clone());
        }
        let device = Device::open(number)?;
        let pinned = Mutex::new(device.allocate_pinned(STAGING)?);
        Ok(gpus.entry(number).or_insert(Arc::new(Self { device, pinned })).clone())
    }

    fn staging(&self) -> Result<Staging<'_>, DeviceError> {
        self.device.make_current()?;
        Ok(Staging { device: &self.device, pinned: self.pinned.lock() })
    }
}

/// Copies that are under way through the pinned memory of a GPU. Dropped, it waits for them.
struct Staging<'a> {
    device: &'a Device,
    pinned: MutexGuard<'a, Pinned>,
}

impl Staging<'_> {
    fn wait(&self) -> Result<(), DeviceError> {
        self.device.driver.synchronise(self.device.stream)
    }

    /// Enqueues a copy to the pinned memory, from its byte `at` on.
    ///
    /// # Safety
    /// `from` must have `bytes` bytes, which stay allocated until the copy is complete.
    unsafe fn download(&mut self, from: u64, at: usize, bytes: usize) -> Result<(), DeviceError> {
        let to = self.pinned.part_mut(at..at + bytes).as_mut_ptr();
        // SAFETY: the pinned memory has these bytes and stays allocated; the caller guarantees the rest.
        unsafe { self.device.driver.download(self.device.stream, from, to, bytes) }
    }

    /// The bytes that a copy has brought, which was waited for.
    fn take(&self, at: usize, to: &mut [u8]) {
        to.copy_from_slice(&self.pinned.bytes()[at..at + to.len()]);
    }

    /// Enqueues a copy of bytes through the pinned memory, from its byte `at` on.
    ///
    /// # Safety
    /// `to` must have as many bytes, which stay allocated until the copy is complete.
    unsafe fn upload(&mut self, at: usize, from: &[u8], to: u64) -> Result<(), DeviceError> {
        let part = self.pinned.part_mut(at..at + from.len());
        part.copy_from_slice(from);
        // SAFETY: as in `download`.
        unsafe { self.device.driver.upload(self.device.stream, part.as_ptr(), to, from.len()) }
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        // After a failure, copies that were enqueued before it may be under way. A device that has failed copies nothing more.
        let _ = self.wait();
    }
}
