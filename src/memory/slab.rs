//! Memory of state slots, on the host or on a device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::device::{Device, DeviceBuffer};
use super::{Buffer, Bytes, BytesMut, MemoryError, Span};

/// Sizes of a slot.
#[derive(Clone)]
pub struct SlotSpec {
    /// Bytes from one slot to the next.
    pub slot_bytes: usize,
    /// Where the model runs on a device: the device, and how many of the slot's first bytes lie there. The rest is
    /// the host's.
    pub device: Option<(Arc<Device>, usize)>,
}

/// Memory of a number of slots, one after another. Its contents are reached through [`SlotMemory`] only.
pub struct Slab {
    host: Buffer,
    /// Bytes of a slot on the host.
    host_bytes: usize,
    device: Option<DeviceBuffer>,
    /// Bytes of a slot on the device, the first ones.
    device_bytes: usize,
    /// Of each slot, whether there is a [`SlotMemory`].
    taken: Vec<AtomicBool>,
}

impl Slab {
    /// Memory for `slots` slots.
    pub fn new(slots: usize, spec: &SlotSpec) -> Result<Self, MemoryError> {
        let device_bytes = spec.device.as_ref().map_or(0, |&(_, bytes)| bytes);
        let host_bytes = spec.slot_bytes - device_bytes;
        let all = |bytes: usize| slots.checked_mul(bytes).ok_or(MemoryError::Host { bytes: usize::MAX });
        let mut taken = Vec::new();
        taken.try_reserve_exact(slots).map_err(|_| MemoryError::Host { bytes: slots })?;
        taken.resize_with(slots, AtomicBool::default);
        let device = match &spec.device {
            Some((device, _)) => Some(device.allocate(all(device_bytes)?)?),
            None => None,
        };
        Ok(Self { host: Buffer::new(all(host_bytes)?)?, host_bytes, device, device_bytes, taken })
    }
    /// Access to slot number `index`; `None` while somebody has it, and if there is no such slot.
    pub fn take(self: &Arc<Self>, index: usize) -> Option<SlotMemory> {
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

/// Where some of a slot's bytes are.
enum Part {
    /// Offset in the device's buffer, and how many.
    Device(usize, usize),
    /// Within the host's part of the slot.
    Host(Range<usize>),
}

/// Exclusive access to the contents of one slot, given back when dropped. Keeps the slab alive.
pub struct SlotMemory {
    slab: Arc<Slab>,
    index: usize,
}

impl SlotMemory {
    /// Some of the slot's bytes, which all lie on the same side. Panics if they do not.
    pub fn part(&self, range: Range<usize>) -> Bytes<'_> {
        match self.place(range) {
            Part::Device(offset, bytes) => Bytes::Device(self.slab.span(offset, bytes)),
            Part::Host(range) => Bytes::Host(&self.host()[range]),
        }
    }

    /// As [`SlotMemory::part`], to change.
    pub fn part_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        match self.place(range) {
            Part::Device(offset, bytes) => BytesMut::Device(self.slab.span(offset, bytes)),
            Part::Host(range) => BytesMut::Host(&mut self.host_mut()[range]),
        }
    }

    fn place(&self, range: Range<usize>) -> Part {
        let on_device = self.slab.device_bytes;
        if range.end <= on_device && self.slab.device.is_some() {
            Part::Device(self.index * on_device + range.start, range.len())
        } else {
            Part::Host(range.start - on_device..range.end - on_device)
        }
    }

    fn host(&self) -> &[u8] {
        // SAFETY: `take` checked the bounds; nobody writes to the slot, as this is its only SlotMemory.
        unsafe { std::slice::from_raw_parts(self.host_start(), self.slab.host_bytes) }
    }

    fn host_mut(&mut self) -> &mut [u8] {
        // SAFETY: `take` checked the bounds; this is the slot's only SlotMemory and it is borrowed exclusively. Other
        // slots of the slab are other bytes, and the slab itself never makes a slice over them.
        unsafe { std::slice::from_raw_parts_mut(self.host_start(), self.slab.host_bytes) }
    }

    fn host_start(&self) -> *mut u8 {
        // SAFETY: `take` checked that the slot lies within the buffer.
        unsafe { self.slab.host.as_ptr().add(self.index * self.slab.host_bytes) }
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
    fn slots_of_a_slab_do_not_overlap_and_have_one_holder_each() {
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
        let device = Device::open(0).unwrap();
        let slab = Arc::new(Slab::new(2, &SlotSpec { slot_bytes: 320, device: Some((device, 256)) }).unwrap());
        let (first, mut second) = (slab.take(0).unwrap(), slab.take(1).unwrap());
        let address = |bytes: Bytes| match bytes {
            Bytes::Device(span) => span.address(),
            Bytes::Host(_) => panic!("it is on the host"),
        };
        assert_eq!(address(second.part(64..128)) - address(first.part(64..128)), 256);
        second.part_mut(256..320).host().fill(7);
        assert_eq!((first.part(256..320).host()[0], second.part(256..320).host()[63]), (0, 7));
    }
}
