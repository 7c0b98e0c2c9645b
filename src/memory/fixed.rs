//! Memory of fixed size, on the host or on a device: bytes of either, tensors, slabs of state slots, and the errors of
//! allocation.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_rows::{Device, DeviceBuffer, DeviceError, Span};
use rows::{Buffer, NoMemory};

/// Why memory could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    #[error(transparent)]
    Host(#[from] NoMemory),
    /// The device has too little memory, or it failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

#[derive(Clone, Copy)]
pub enum Bytes<'a> {
    Host(&'a [u8]),
    Device(Span<'a>),
}

pub enum BytesMut<'a> {
    Host(&'a mut [u8]),
    Device(Span<'a>),
}

impl<'a> Bytes<'a> {
    pub const fn byte_len(self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(span) => span.byte_len(),
        }
    }

    /// Address of the first byte; of a device's bytes, the address on the device.
    pub fn address(self) -> *const u8 {
        match self {
            Self::Host(bytes) => bytes.as_ptr(),
            Self::Device(span) => std::ptr::with_exposed_provenance(span.address() as usize),
        }
    }

    /// The bytes as a slice. Panics if they are on a device.
    pub fn host(self) -> &'a [u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => panic!("bytes on a device cannot be read as a slice"),
        }
    }
}

impl<'a> BytesMut<'a> {
    /// The bytes as a slice. Panics if they are on a device.
    pub fn host(self) -> &'a mut [u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => panic!("bytes on a device cannot be written as a slice"),
        }
    }
}

/// The memory of a tensor: on the device where the model runs, or on the host.
pub enum TensorMemory {
    Host(Buffer),
    Device(DeviceBuffer),
}

impl TensorMemory {
    /// Allocates on the device, or on the host if `device` is `None`. Only host memory is zeroed.
    pub fn new(device: Option<&Arc<Device>>, bytes: usize) -> Result<Self, MemoryError> {
        Ok(match device {
            None => Self::Host(Buffer::new(bytes)?),
            Some(device) => Self::Device(device.allocate(bytes)?),
        })
    }

    pub const fn byte_len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Device(buffer) => buffer.byte_len(),
        }
    }

    /// Address of the first byte; of memory on a device, the address on the device.
    pub fn address(&self) -> *mut u8 {
        match self {
            Self::Host(buffer) => buffer.as_ptr(),
            Self::Device(buffer) => std::ptr::with_exposed_provenance_mut(buffer.address() as usize),
        }
    }
}

/// How large a slot is, and where its bytes are.
#[derive(Clone)]
pub struct SlotSpec {
    /// Bytes of a slot, including those on a device.
    pub slot_bytes: usize,
    /// For a model on a device: the device, and the number of the slot's first bytes that are there. The other bytes
    /// are on the host.
    pub device: Option<(Arc<Device>, usize)>,
}

/// Whether each slot has a buffer of its own.
const SLOTS_APART: bool = cfg!(feature = "exact-buffers");

/// Memory of a number of slots, one after another. Only [`SlotMemory`] gives access to the contents.
pub struct Slab {
    /// One buffer for all slots, or one for each ([`SLOTS_APART`]).
    host: Vec<Buffer>,
    host_bytes: usize,
    device: Option<DeviceBuffer>,
    /// Bytes of each slot that are on the device: its first ones.
    device_bytes: usize,
    /// For each slot, whether its [`SlotMemory`] exists.
    taken: Vec<AtomicBool>,
}

impl Slab {
    pub fn new(slots: usize, spec: &SlotSpec) -> Result<Self, MemoryError> {
        let device_bytes = spec.device.as_ref().map_or(0, |&(_, bytes)| bytes);
        let host_bytes = spec.slot_bytes - device_bytes;
        let all = |bytes: usize| slots.checked_mul(bytes).ok_or(NoMemory { bytes: usize::MAX });
        let mut taken = Vec::new();
        taken.try_reserve_exact(slots).map_err(|_| NoMemory { bytes: slots })?;
        taken.resize_with(slots, AtomicBool::default);
        let device = match &spec.device {
            Some((device, _)) => Some(device.allocate(all(device_bytes)?)?),
            None => None,
        };
        let host = if SLOTS_APART {
            (0..slots).map(|_| Buffer::new(host_bytes)).collect::<Result<_, _>>()?
        } else {
            vec![Buffer::new(all(host_bytes)?)?]
        };
        Ok(Self { host, host_bytes, device, device_bytes, taken })
    }

    /// Access to slot `index`. `None` if the slot's [`SlotMemory`] exists already, or if the slab has no such slot.
    pub fn take(self: &Arc<Self>, index: usize) -> Option<SlotMemory> {
        // Acquire, with the Release of the drop: the next owner sees what the last one wrote.
        let was_taken = self.taken.get(index)?.swap(true, Ordering::Acquire);
        (!was_taken).then(|| SlotMemory { slab: self.clone(), index })
    }

    fn span(&self, offset: usize, bytes: usize) -> Span<'_> {
        match &self.device {
            Some(device) => device.span(offset, bytes),
            None => Span::none(),
        }
    }
}

/// Where a part of a slot is.
enum Part {
    /// Offset in the slab's device buffer, and number of bytes.
    Device(usize, usize),
    /// Range within the bytes that the slot has on the host.
    Host(Range<usize>),
}

/// Exclusive access to the contents of one slot until it is dropped. Keeps the slab alive.
pub struct SlotMemory {
    slab: Arc<Slab>,
    index: usize,
}

impl SlotMemory {
    /// The slot's bytes in `range`. Panics unless all of them are on the host or all are on the device.
    pub fn part(&self, range: Range<usize>) -> Bytes<'_> {
        match self.locate(range) {
            Part::Device(offset, bytes) => Bytes::Device(self.slab.span(offset, bytes)),
            Part::Host(range) => Bytes::Host(&self.host()[range]),
        }
    }

    /// As [`SlotMemory::part`], to write.
    pub fn part_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        match self.locate(range) {
            Part::Device(offset, bytes) => BytesMut::Device(self.slab.span(offset, bytes)),
            Part::Host(range) => BytesMut::Host(&mut self.host_mut()[range]),
        }
    }

    fn locate(&self, range: Range<usize>) -> Part {
        let on_device = self.slab.device_bytes;
        // The states are first in a slot. After them come the contexts, which are put into inputs on the host.
        if range.end <= on_device && self.slab.device.is_some() {
            Part::Device(self.index * on_device + range.start, range.len())
        } else {
            Part::Host(range.start - on_device..range.end - on_device)
        }
    }

    fn host(&self) -> &[u8] {
        // SAFETY: `take` checked the index. This is the slot's only SlotMemory, and it is borrowed, so nothing writes
        // to the slot.
        unsafe { std::slice::from_raw_parts(self.host_start(), self.slab.host_bytes) }
    }

    fn host_mut(&mut self) -> &mut [u8] {
        // SAFETY: `take` checked the index. This is the slot's only SlotMemory, and it is borrowed exclusively. The
        // other slots of the slab have other bytes, and the slab itself never makes a slice over them.
        unsafe { std::slice::from_raw_parts_mut(self.host_start(), self.slab.host_bytes) }
    }

    fn host_start(&self) -> *mut u8 {
        if SLOTS_APART {
            return self.slab.host[self.index].as_ptr();
        }
        // SAFETY: `take` checked that the slot lies within the buffer.
        unsafe { self.slab.host[0].as_ptr().add(self.index * self.slab.host_bytes) }
    }
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        self.slab.taken[self.index].store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_a_slab_do_not_overlap_and_each_is_taken_once() {
        let slab = Arc::new(Slab::new(3, &SlotSpec { slot_bytes: 64, device: None }).unwrap());
        let mut slots: Vec<_> = (0..3).map(|index| slab.take(index).unwrap()).collect();
        for (value, slot) in (1u8..).zip(&mut slots) {
            host_mut(slot).fill(value);
        }
        for (value, slot) in (1u8..).zip(&slots) {
            assert!(host(slot).iter().all(|&byte| byte == value));
        }
        assert!(slab.take(1).is_none() && slab.take(3).is_none());
        slots.remove(1);
        assert!(slab.take(1).is_some_and(|slot| host(&slot)[0] == 2));
    }

    fn host(slot: &SlotMemory) -> &[u8] {
        slot.part(0..64).host()
    }

    fn host_mut(slot: &mut SlotMemory) -> &mut [u8] {
        slot.part_mut(0..64).host()
    }

    #[test]
    fn the_first_bytes_of_a_slot_may_lie_on_a_device() {
        gpu_rows::simulate();
        let device = Device::open(0).unwrap();
        let slab = Arc::new(Slab::new(2, &SlotSpec { slot_bytes: 320, device: Some((device, 256)) }).unwrap());
        let (first, mut second) = (slab.take(0).unwrap(), slab.take(1).unwrap());
        let address = |bytes: Bytes| match bytes {
            Bytes::Device(span) => span.address(),
            Bytes::Host(_) => panic!("the part is on the host"),
        };
        assert_eq!(address(second.part(64..128)) - address(first.part(64..128)), 256);
        second.part_mut(256..320).host().fill(7);
        assert_eq!((first.part(256..320).host()[0], second.part(256..320).host()[63]), (0, 7));
    }
}
