//! States whose size varies: growing tensors and strings. They belong to their sequence, beside its slot.
//!
//! Rules: what is kept is paid for: a [`Charge`] holds its bytes in a [`Budget`] until it is dropped, and no more is
//! allocated than is paid for, except the rest of a page. Room is made before anything is written, so that writing
//! cannot fail half-way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu_rows::{Device, DeviceBuffer, DeviceError};
use rows::{Buffer, NoMemory};

use super::fixed::{Bytes, BytesMut, MemoryError};

/// From here on a state has pages of its own: it grows without being copied and goes back to the system at once.
/// Smaller ones come from the allocator, as a process can have some ten thousand mappings only.
pub const PAGES_FROM: usize = 256 * 1024;

/// Memory of a device comes in multiples of so many bytes.
const DEVICE_GRAIN: usize = 4096;

/// Bytes that all varying states and held inputs of a site may have together.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
}

/// Why a state cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    #[error("{wanted} bytes more are needed, and {used} of {limit} bytes are in use (max_state_bytes)")]
    Budget { wanted: usize, used: usize, limit: usize },
    /// The system or the device has no more.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<NoMemory> for NoRoom {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

impl Budget {
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, wanted: usize) -> Result<(), NoRoom> {
        let more = |used: usize| used.checked_add(wanted).filter(|&used| used <= self.limit);
        // Relaxed: the number bounds memory, and guards nothing else.
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(drop).map_err(|used| NoRoom::Budget { wanted, used, limit: self.limit })
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Charge {
    pub fn new(budget: &Arc<Budget>, bytes: usize) -> Result<Self, NoRoom> {
        budget.take(bytes)?;
        Ok(Self { budget: budget.clone(), bytes })
    }

    fn set(&mut self, bytes: usize) -> Result<(), NoRoom> {
        if bytes > self.bytes {
            self.budget.take(bytes - self.bytes)?;
        } else {
            self.budget.give_back(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

/// A row of a tensor whose size varies. Strings are kept in Triton's form (see [`rows::strings`]). `T` are tensors that
/// the sequences of a batch can share.
pub struct Varying<T> {
    dims: Vec<i64>,
    /// Where the elements are to be kept, if not on the host. What found no room there when it was copied out of the
    /// tensor of a batch is on the host.
    device: Option<Arc<Device>>,
    bytes: Elements,
    /// Room on the device, which takes the place of `bytes` when it is written.
    next: Option<DeviceBuffer>,
    /// Where the elements are, if not in `bytes`.
    shared: Option<Shared<T>>,
    charge: Charge,
}

/// A row of a tensor that the sequences of a batch share.
pub struct Shared<T> {
    pub tensors: Arc<T>,
    pub position: usize,
    pub bytes: usize,
}

impl<T> Varying<T> {
    /// One without elements, which are to be kept on the device if there is one.
    pub fn new(budget: &Arc<Budget>, device: Option<&Arc<Device>>) -> Self {
        let charge = Charge { budget: budget.clone(), bytes: 0 };
        let (device, bytes) = (device.cloned(), Elements::none());
        Self { dims: Vec::new(), device, bytes, next: None, shared: None, charge }
    }

    /// Dimensions of the row, with 1 for the batch axis.
    pub fn dims(&self) -> &[i64] {
        &self.dims
    }

    /// The elements; none while they are in a shared tensor.
    pub fn bytes(&self) -> Bytes<'_> {
        self.bytes.bytes()
    }

    /// Where the elements are, if they are in a shared tensor.
    pub const fn shared(&self) -> Option<&Shared<T>> {
        self.shared.as_ref()
    }

    /// The new elements are in a shared tensor, and are paid for.
    pub fn share(&mut self, dims: &[i64], shared: Shared<T>) {
        self.set_dims(dims);
        (self.bytes, self.next) = (Elements::none(), None);
        // Less than is reserved is always granted.
        let _ = self.charge.set(shared.bytes);
        self.shared = Some(shared);
    }

    /// Room of its own for elements that are in a shared tensor; `None` if they are not. It is on the host if the
    /// device has no room. To be followed by [`Varying::forget_shared`].
    pub fn room_for_shared(&mut self) -> Result<Option<BytesMut<'_>>, NoRoom> {
        let Some(bytes) = self.shared.as_ref().map(|shared| shared.bytes) else { return Ok(None) };
        match self.make_room(bytes) {
            Err(NoRoom::Memory(MemoryError::Device(DeviceError::OutOfMemory { .. }))) => {
                self.bytes = Elements::none();
                self.bytes.reserve(bytes)?;
            }
            made => made?,
        }
        Ok(Some(self.room(bytes)))
    }

    /// The elements have been copied out of the shared tensor, or will have been before they are read.
    pub fn forget_shared(&mut self) {
        self.shared = None;
    }

    /// Pays for `bytes` bytes that will be in a shared tensor.
    pub fn reserve_shared(&mut self, bytes: usize) -> Result<(), NoRoom> {
        self.charge.set(bytes.max(self.charge.bytes))
    }

    /// Pays for `bytes` bytes with a part of `charge`.
    pub fn pay(&mut self, bytes: usize, charge: &mut Charge) {
        let paid = bytes.min(charge.bytes);
        charge.bytes -= paid;
        self.charge.bytes += paid;
    }

    /// Makes room for `bytes` bytes. What is kept stays as it is, whatever comes of it.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), NoRoom> {
        // Never less than before, because what is kept stays until `write` replaces it.
        self.charge.set(bytes.max(self.charge.bytes))?;
        self.make_room(bytes)
    }

    fn make_room(&mut self, wanted: usize) -> Result<(), NoRoom> {
        let Some(device) = &self.device else { return self.bytes.reserve(wanted) };
        let now = if let Room::Device(buffer) = &self.bytes.room { buffer.byte_len() } else { 0 };
        if wanted > now.max(self.next.as_ref().map_or(0, DeviceBuffer::byte_len)) {
            // Memory of a device is there when it is asked for: a half more is enough to grow by.
            let grown = wanted.max(now + now / 2).next_multiple_of(DEVICE_GRAIN);
            self.next = Some(device.allocate(grown).map_err(MemoryError::from)?);
        }
        Ok(())
    }

    /// `bytes` bytes, for which there is room, to be written.
    fn room(&mut self, bytes: usize) -> BytesMut<'_> {
        if let Some(buffer) = self.next.take() {
            self.bytes = Elements { room: Room::Device(buffer), len: 0 };
        }
        self.bytes.resize(bytes)
    }

    /// Where the elements are to be written, `bytes` bytes for which there is room, that replace those so far.
    pub fn write(&mut self, dims: &[i64], bytes: usize) -> BytesMut<'_> {
        self.set_dims(dims);
        self.shared = None;
        // Less than is reserved is always granted.
        let _ = self.charge.set(bytes);
        self.room(bytes)
    }

    /// Gives up room that was made and not used.
    pub fn release_reserve(&mut self) {
        self.next = None;
        let kept = self.bytes.bytes().byte_len();
        self.bytes.trim();
        let _ = self.charge.set(kept + self.shared.as_ref().map_or(0, |shared| shared.bytes));
    }

    fn set_dims(&mut self, dims: &[i64]) {
        self.dims.clear();
        self.dims.extend_from_slice(dims);
    }
}

/// Bytes that can grow, aligned for any element.
struct Elements {
    room: Room,
    len: usize,
}

enum Room {
    Allocated(Vec<u64>),
    Pages(Buffer),
    Device(DeviceBuffer),
}

impl Elements {
    const fn none() -> Self {
        Self { room: Room::Allocated(Vec::new()), len: 0 }
    }

    fn bytes(&self) -> Bytes<'_> {
        match &self.room {
            Room::Allocated(words) => Bytes::Host(&bytemuck::cast_slice(words)[..self.len]),
            Room::Pages(pages) => Bytes::Host(&pages.bytes()[..self.len]),
            Room::Device(buffer) => Bytes::Device(buffer.span(0, self.len)),
        }
    }

    /// Room for `wanted` bytes on the host; the contents stay.
    fn reserve(&mut self, wanted: usize) -> Result<(), NoRoom> {
        match &mut self.room {
            Room::Allocated(words) if wanted < PAGES_FROM => {
                let more = wanted.div_ceil(size_of::<u64>()).saturating_sub(words.len());
                // Exact, because no more may be allocated than is paid for.
                words.try_reserve_exact(more).map_err(|_| NoMemory { bytes: wanted })?;
                words.resize(words.len() + more, 0);
            }
            Room::Allocated(words) => {
                let mut pages = Buffer::new(wanted)?;
                pages.bytes_mut()[..self.len].copy_from_slice(&bytemuck::cast_slice(words)[..self.len]);
                self.room = Room::Pages(pages);
            }
            Room::Pages(pages) if wanted > pages.len() => pages.resize(wanted)?,
            Room::Pages(_) | Room::Device(_) => {}
        }
        Ok(())
    }

    /// `wanted` bytes, for which there is room, to be written. What is not needed any more goes back to the system.
    fn resize(&mut self, wanted: usize) -> BytesMut<'_> {
        let mut smaller = Self::none();
        if matches!(self.room, Room::Pages(_)) && wanted < PAGES_FROM && smaller.reserve(wanted).is_ok() {
            *self = smaller;
        }
        self.len = wanted;
        self.trim();
        match &mut self.room {
            Room::Allocated(words) => BytesMut::Host(&mut bytemuck::cast_slice_mut(words)[..wanted]),
            Room::Pages(pages) => BytesMut::Host(&mut pages.bytes_mut()[..wanted]),
            Room::Device(buffer) => BytesMut::Device(buffer.span(0, wanted)),
        }
    }

    /// Gives back what is behind the contents, on the host.
    fn trim(&mut self) {
        match &mut self.room {
            Room::Allocated(words) => {
                words.truncate(self.len.div_ceil(size_of::<u64>()));
                words.shrink_to_fit();
            }
            // If the system refuses, the mapping stays as it is.
            Room::Pages(pages) if self.len < pages.len() => drop(pages.resize(self.len)),
            Room::Pages(_) | Room::Device(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_step_by_step_keeps_its_bytes_and_pays_for_them() {
        let budget = Budget::new(2 << 20);
        let mut state = Varying::<()>::new(&budget, None);
        for step in 1..=50i64 {
            let bytes = step as usize * 20_000;
            let before = state.bytes().host().to_vec();
            state.reserve(bytes).unwrap();
            assert_eq!(state.bytes().host(), before, "room is made around what is kept");
            state.write(&[1, step], bytes).host().fill(step as u8);
            assert_eq!((state.dims(), state.bytes().host().len(), budget.used()), (&[1, step][..], bytes, bytes));
        }
        assert!(state.write(&[1, 0], 0).host().is_empty());
        assert_eq!(budget.used(), 0);
        assert!(matches!(state.bytes.room, Room::Allocated(_)), "the pages have gone back");
    }

    #[test]
    fn a_state_in_a_shared_tensor_is_paid_for_and_can_be_copied_back() {
        let budget = Budget::new(1 << 20);
        let mut state = Varying::<()>::new(&budget, None);
        let batch = Arc::new(());
        let shared = |bytes| Shared { tensors: batch.clone(), position: 0, bytes };
        state.reserve_shared(300).unwrap();
        state.share(&[1, 300], shared(300));
        state.release_reserve();
        assert_eq!((state.dims(), state.bytes().host().len(), budget.used()), (&[1, 300][..], 0, 300));
        assert!(state.shared().is_some_and(|at| Arc::ptr_eq(&at.tensors, &batch)));
        state.room_for_shared().unwrap().unwrap().host().fill(5);
        state.forget_shared();
        assert_eq!((state.dims(), state.bytes().host(), budget.used()), (&[1, 300][..], &[5; 300][..], 300));
        state.share(&[1, 9], shared(9));
        state.reserve(20).unwrap();
        state.write(&[1, 20], 20).host().fill(6);
        state.release_reserve();
        assert_eq!((state.bytes().host(), budget.used()), (&[6; 20][..], 20));
        state.share(&[1, 9], shared(9));
        drop(state);
        assert_eq!((Arc::strong_count(&batch), budget.used()), (1, 0));
    }

    #[test]
    fn a_state_is_paid_for_with_another_charge_when_the_budget_is_used_up() {
        let budget = Budget::new(100);
        let mut saved = Charge::new(&budget, 60).unwrap();
        let _others = Charge::new(&budget, 40).unwrap();
        let mut state = Varying::<()>::new(&budget, None);
        assert!(state.reserve(60).is_err());
        state.pay(60, &mut saved);
        state.reserve(60).unwrap();
        drop(saved);
        state.write(&[60], 60);
        assert_eq!(budget.used(), 100);
        drop(state);
        assert_eq!(budget.used(), 40);
    }

    /// Bytes that the host has allocated for a state.
    fn allocated(state: &Varying<()>) -> usize {
        match &state.bytes.room {
            Room::Allocated(words) => size_of::<u64>() * words.capacity(),
            Room::Pages(pages) => pages.len(),
            Room::Device(_) => 0,
        }
    }

    #[test]
    fn no_more_is_allocated_than_is_paid_for() {
        let budget = Budget::new(64 << 20);
        let mut state = Varying::<()>::new(&budget, None);
        for bytes in [8, 100_000, 99_000, 16, 300_000, 5 << 20, 4 << 20, 300_000, 200_000, 8, 1 << 20, 0] {
            state.reserve(bytes).unwrap();
            state.write(&[1], bytes);
            assert_eq!((budget.used(), allocated(&state)), (bytes, bytes), "written");
            state.reserve(8 << 20).unwrap();
            state.release_reserve();
            assert_eq!(budget.used(), bytes, "given back");
            assert!(allocated(&state) <= bytes.max(1), "{} for {bytes}", allocated(&state));
        }
    }

    #[test]
    fn a_state_over_the_budget_is_refused_with_the_numbers_and_stays_as_it_was() {
        let budget = Budget::new(100);
        let (mut first, mut second) = (Varying::<()>::new(&budget, None), Varying::<()>::new(&budget, None));
        first.reserve(60).unwrap();
        first.write(&[60], 60).host().fill(7);
        assert_eq!(second.reserve(41), Err(NoRoom::Budget { wanted: 41, used: 60, limit: 100 }));
        assert_eq!(first.reserve(101), Err(NoRoom::Budget { wanted: 41, used: 60, limit: 100 }));
        assert_eq!(first.bytes().host(), [7; 60]);
        first.reserve(90).unwrap();
        first.release_reserve();
        assert_eq!((first.bytes().host(), budget.used()), (&[7; 60][..], 60));
        drop(first);
        assert_eq!(second.reserve(100), Ok(()));
        drop(second);
        assert_eq!(budget.used(), 0);
    }
}
