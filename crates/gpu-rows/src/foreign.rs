//! Memory of GPUs that the backend does not own, such as memory that clients share with the server.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::device::{Device, Pinned, while_nothing_is_captured};
use super::driver::DeviceError;

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

    pub const fn gpu(self) -> i32 {
        self.gpu
    }

    pub const fn address(self) -> u64 {
        self.address
    }

    pub const fn byte_len(self) -> usize {
        self.bytes
    }
}

/// Copies foreign memory to slices of its size, and returns when the copies are complete, with what became of each.
/// Waits for each GPU once per 4 MiB. If copies fail together, each is tried again alone, so that a copy that cannot be
/// made fails no other. Panics if a slice has another size.
pub fn fetch(mut copies: Vec<(Foreign, &mut [u8])>) -> Vec<Result<(), DeviceError>> {
    for_each_gpu(&mut copies, |staging, copies| {
        let parts = copies.iter_mut().flat_map(|(from, to)| {
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
pub fn write(mut copies: Vec<(Foreign, &[u8])>) -> Vec<Result<(), DeviceError>> {
    for_each_gpu(&mut copies, |staging, copies| {
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

/// Makes the copies of each GPU together, and one by one if that fails.
fn for_each_gpu<T>(
    copies: &mut [(Foreign, T)],
    copy: impl Fn(&mut Staging, &mut [&mut (Foreign, T)]) -> Result<(), DeviceError>,
) -> Vec<Result<(), DeviceError>> {
    let mut results = vec![Ok(()); copies.len()];
    let gpus: BTreeSet<i32> = copies.iter().map(|(of, _)| of.gpu).collect();
    for gpu in gpus {
        let of_gpu = copies.iter_mut().enumerate().filter(|(_, (of, _))| of.gpu == gpu);
        let (places, mut of_gpu): (Vec<usize>, Vec<_>) = of_gpu.unzip();
        let copy = |copies: &mut [_]| copy(&mut Gpu::open(gpu)?.staging()?, copies);
        match copy(&mut of_gpu) {
            Ok(()) => {}
            Err(error) if error.is_lost() => places.iter().for_each(|&place| results[place] = Err(error.clone())),
            Err(_) => {
                for (&place, alone) in places.iter().zip(&mut of_gpu) {
                    results[place] = copy(std::slice::from_mut(alone));
                }
            }
        }
    }
    results
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
        Ok(Staging { device: &self.device, pinned: self.pinned.lock(), is_busy: false })
    }
}

/// Copies that are under way through the pinned memory of a GPU. Dropped, it waits for them.
struct Staging<'a> {
    device: &'a Device,
    pinned: MutexGuard<'a, Pinned>,
    is_busy: bool,
}

impl Staging<'_> {
    fn wait(&mut self) -> Result<(), DeviceError> {
        let _no_capture = while_nothing_is_captured();
        self.device.driver.synchronise(self.device.stream)?;
        self.is_busy = false;
        Ok(())
    }

    /// Enqueues a copy to the pinned memory, from its byte `at` on.
    ///
    /// # Safety
    /// `from` must have `bytes` bytes, which stay allocated until the copy is complete.
    unsafe fn download(&mut self, from: u64, at: usize, bytes: usize) -> Result<(), DeviceError> {
        self.is_busy = true;
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
        self.is_busy = true;
        let part = self.pinned.part_mut(at..at + from.len());
        part.copy_from_slice(from);
        // SAFETY: as in `download`.
        unsafe { self.device.driver.upload(self.device.stream, part.as_ptr(), to, from.len()) }
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        // After a failure, copies that were enqueued before it may be under way. If this fails, too, the device copies
        // nothing more.
        if self.is_busy {
            let _ = self.wait();
        }
    }
}
