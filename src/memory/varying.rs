//! States whose size varies: growing tensors and strings. They belong to their sequence, beside its slot.
//!
//! Rules: what is kept is paid for: a [`Charge`] holds its bytes in a [`Budget`] until it is dropped. Room is made
//! before anything is written, so that writing cannot fail half-way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::device::{Device, DeviceBuffer, DeviceError};
use super::host::Buffer;
use super::strings::{self, Strings};
use super::{Bytes, BytesMut, MemoryError};

/// From here on a state has pages of its own: it grows without being copied and goes back to the system at once.
/// Smaller ones come from the allocator, as a process can have some ten thousand mappings only.
const PAGES_FROM: usize = 256 * 1024;

/// Memory of a device comes in multiples of so many bytes.
const DEVICE_GRAIN: usize = 4096;

/// Bytes that all varying states of a model may have together.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
}

/// Why a state cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// The budget does not allow it.
    #[error("{wanted} bytes more are needed, and {used} of {limit} bytes are in use (max_state_bytes)")]
    Budget {
        /// What was asked for.
        wanted: usize,
        /// What is in use.
        used: usize,
        /// What may be in use.
        limit: usize,
    },
    /// The system or the device has no more.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl Budget {
    /// A budget of which nothing is used.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// Bytes in use.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, wanted: usize) -> Result<(), NoRoom> {
        let more = |used: usize| used.checked_add(wanted).filter(|&used| used <= self.limit);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(drop).map_err(|used| NoRoom::Budget { wanted, used, limit: self.limit })
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A part of a budget.
struct Charge {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Charge {
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

/// A row of a tensor whose size varies.
pub struct Varying {
    dims: Vec<i64>,
    /// Those before the last write.
    earlier_dims: Vec<i64>,
    /// Where the elements are to be kept, if not on the host. What found no room there when it came home is on the
    /// host.
    device: Option<Arc<Device>>,
    bytes: Kept,
    /// Room on the device, which takes the place of `bytes` when it is written.
    next: Option<DeviceBuffer>,
    /// How many bytes it has in a tensor of its batch, and not here.
    elsewhere: usize,
    strings: Strings,
    charge: Charge,
}

impl Varying {
    /// One without elements, which are to be kept on the device if there is one.
    pub fn new(budget: &Arc<Budget>, device: Option<&Arc<Device>>) -> Self {
        let charge = Charge { budget: budget.clone(), bytes: 0 };
        let (device, bytes) = (device.cloned(), Kept::none());
        let (dims, earlier_dims, strings) = (Vec::new(), Vec::new(), Strings::default());
        Self { dims, earlier_dims, device, bytes, next: None, elsewhere: 0, strings, charge }
    }

    /// Dimensions of the row, with 1 for the batch axis.
    pub fn dims(&self) -> &[i64] {
        &self.dims
    }

    /// The elements, if they are not strings; none while they are elsewhere.
    pub fn bytes(&self) -> Bytes<'_> {
        self.bytes.bytes()
    }

    /// The elements, if they are strings.
    pub fn strings(&self) -> &Strings {
        &self.strings
    }

    /// The dims after the next request, if it changes them as the last one did. `None` if there was no last one, and
    /// for what is so small that it may as well be copied.
    pub fn expected_dims(&self) -> Option<Vec<i64>> {
        let is_large = matches!(self.bytes, Kept::Pages { .. }) && self.device.is_none();
        let next = |(now, earlier): (&i64, &i64)| (2 * now - earlier).max(0);
        (is_large && self.dims.len() == self.earlier_dims.len())
            .then(|| self.dims.iter().zip(&self.earlier_dims).map(next).collect())
    }

    /// Takes a buffer that begins with the new elements, for which there is room, and leaves the old one in its place.
    pub fn exchange(&mut self, dims: &[i64], bytes: usize, buffer: &mut Buffer) {
        self.set_dims(dims);
        self.elsewhere = 0;
        self.bytes.exchange(buffer, bytes);
        let _ = self.charge.set(bytes);
    }

    /// The new elements lie in a tensor of their batch, and are paid for.
    pub fn leave(&mut self, dims: &[i64], bytes: usize) {
        self.set_dims(dims);
        (self.bytes, self.next) = (Kept::none(), None);
        self.elsewhere = bytes;
        let _ = self.charge.set(bytes);
    }

    /// Where the elements are to be copied to that lie elsewhere; `None` if none do. On the host, if the device has no
    /// room. To be followed by [`Varying::mark_home`].
    pub fn bring_home(&mut self) -> Result<Option<BytesMut<'_>>, NoRoom> {
        if self.elsewhere == 0 {
            return Ok(None);
        }
        match self.make_room(self.elsewhere) {
            Err(NoRoom::Memory(MemoryError::Device(DeviceError::OutOfMemory { .. }))) => {
                self.bytes = Kept::none();
                self.bytes.reserve(self.elsewhere)?;
            }
            made => made?,
        }
        Ok(Some(self.room(self.elsewhere)))
    }

    /// The elements that were elsewhere have been copied, or will have been before they are read.
    pub const fn mark_home(&mut self) {
        self.elsewhere = 0;
    }

    /// Pays for `bytes` bytes that will lie elsewhere.
    pub fn reserve_elsewhere(&mut self, bytes: usize) -> Result<(), NoRoom> {
        self.charge.set(bytes.max(self.charge.bytes))
    }

    /// Makes room for `bytes` bytes. What is kept stays as it is, whatever comes of it.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), NoRoom> {
        self.make_room(bytes)?;
        self.charge.set(bytes.max(self.charge.bytes))
    }

    fn make_room(&mut self, wanted: usize) -> Result<(), NoRoom> {
        let Some(device) = &self.device else { return self.bytes.reserve(wanted) };
        let now = if let Kept::Device { buffer, .. } = &self.bytes { buffer.byte_len() } else { 0 };
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
            self.bytes = Kept::Device { buffer, len: 0 };
        }
        self.bytes.resize(bytes)
    }

    /// Makes room for strings of `bytes` bytes in all (see [`strings::written_bytes`]).
    pub fn reserve_strings(&mut self, bytes: usize) -> Result<(), NoRoom> {
        self.charge.set(bytes.max(self.charge.bytes))
    }

    /// Where the elements are to be written, `bytes` bytes for which there is room, that replace those so far.
    pub fn write(&mut self, dims: &[i64], bytes: usize) -> BytesMut<'_> {
        self.set_dims(dims);
        self.elsewhere = 0;
        // Less than is reserved is always granted.
        let _ = self.charge.set(bytes);
        self.room(bytes)
    }

    /// Replaces the elements by strings, for which there is room.
    pub fn write_strings(&mut self, dims: &[i64], elements: Strings) {
        self.set_dims(dims);
        self.strings = elements;
        let _ = self.charge.set(strings::written_bytes(self.strings.iter()));
    }

    /// Gives up room that was made and not used.
    pub fn release_reserve(&mut self) {
        self.next = None;
        let kept = self.bytes.bytes().byte_len() + self.elsewhere + strings::written_bytes(self.strings.iter());
        let _ = self.charge.set(kept);
    }

    fn set_dims(&mut self, dims: &[i64]) {
        std::mem::swap(&mut self.dims, &mut self.earlier_dims);
        self.dims.clear();
        self.dims.extend_from_slice(dims);
    }
}

/// Bytes that can grow, aligned for any element.
enum Kept {
    Allocated { words: Vec<u64>, len: usize },
    Pages { pages: Buffer, len: usize },
    Device { buffer: DeviceBuffer, len: usize },
}

impl Kept {
    const fn none() -> Self {
        Self::Allocated { words: Vec::new(), len: 0 }
    }

    fn bytes(&self) -> Bytes<'_> {
        match self {
            Self::Allocated { words, len } => Bytes::Host(&bytemuck::cast_slice(words)[..*len]),
            Self::Pages { pages, len } => Bytes::Host(&pages.bytes()[..*len]),
            Self::Device { buffer, len } => Bytes::Device(buffer.span(0, *len)),
        }
    }

    /// Room for `wanted` bytes on the host; the contents stay.
    fn reserve(&mut self, wanted: usize) -> Result<(), NoRoom> {
        match self {
            Self::Allocated { words, .. } if wanted < PAGES_FROM => {
                let more = wanted.div_ceil(size_of::<u64>()).saturating_sub(words.len());
                words.try_reserve(more).map_err(|_| MemoryError::Host { bytes: wanted })?;
                words.resize(words.len() + more, 0);
            }
            Self::Allocated { words, len } => {
                let mut pages = Buffer::new(doubled(wanted, PAGES_FROM))?;
                pages.bytes_mut()[..*len].copy_from_slice(&bytemuck::cast_slice(words)[..*len]);
                *self = Self::Pages { pages, len: *len };
            }
            Self::Pages { pages, .. } if wanted > pages.len() => pages.grow(doubled(wanted, pages.len()))?,
            Self::Pages { .. } | Self::Device { .. } => {}
        }
        Ok(())
    }

    /// `wanted` bytes, for which there is room, to be written. Much less than before goes back to the system.
    fn resize(&mut self, wanted: usize) -> BytesMut<'_> {
        let shrinks = matches!(self, Self::Pages { pages, .. } if wanted <= pages.len() / 8);
        let mut smaller = Self::none();
        if shrinks && smaller.reserve(wanted).is_ok() {
            *self = smaller;
        }
        match self {
            Self::Allocated { words, len } => {
                *len = wanted;
                BytesMut::Host(&mut bytemuck::cast_slice_mut(words)[..wanted])
            }
            Self::Pages { pages, len } => {
                *len = wanted;
                BytesMut::Host(&mut pages.bytes_mut()[..wanted])
            }
            Self::Device { buffer, len } => {
                *len = wanted;
                BytesMut::Device(buffer.span(0, wanted))
            }
        }
    }

    /// Takes a buffer whose first `wanted` bytes are the contents, and gives the old one for it.
    fn exchange(&mut self, buffer: &mut Buffer, wanted: usize) {
        let Self::Pages { pages, len } = self else {
            self.resize(wanted).host().copy_from_slice(&buffer.bytes()[..wanted]);
            return;
        };
        std::mem::swap(pages, buffer);
        *len = wanted;
        // What a larger state may have left in it is nobody's.
        pages.trim(wanted);
    }
}

/// Room that is at least doubled, so that growing step by step costs no call for each. Pages that are not touched cost
/// nothing.
fn doubled(wanted: usize, now: usize) -> usize {
    wanted.max(now.saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_step_by_step_keeps_its_bytes_and_pays_for_them() {
        let budget = Budget::new(2 << 20);
        let mut state = Varying::new(&budget, None);
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
        assert!(matches!(state.bytes, Kept::Allocated { .. }), "the pages have gone back");
    }

    #[test]
    fn a_large_state_changes_places_with_the_buffer_that_has_the_next() {
        let budget = Budget::new(64 << 20);
        let mut state = Varying::new(&budget, None);
        let step = |state: &mut Varying, rows: i64| {
            let bytes = rows as usize * 1024;
            state.reserve(bytes).unwrap();
            state.write(&[rows, 1024], bytes).host().fill(rows as u8);
        };
        step(&mut state, 1);
        assert_eq!(state.expected_dims(), None, "it is small, and has not grown yet");
        step(&mut state, 1000);
        step(&mut state, 1010);
        assert_eq!(state.expected_dims(), Some(vec![1020, 1024]));
        let mut buffer = Buffer::new(4 << 20).unwrap();
        buffer.bytes_mut().fill(9);
        state.reserve(1020 * 1024).unwrap();
        state.exchange(&[1020, 1024], 1020 * 1024, &mut buffer);
        assert!(state.bytes().host().iter().all(|&byte| byte == 9) && state.bytes().host().len() == 1020 * 1024);
        assert!(buffer.bytes()[..1010 * 1024].iter().all(|&byte| byte == 1010i64 as u8), "the old one");
        assert_eq!((state.expected_dims(), budget.used()), (Some(vec![1030, 1024]), 1020 * 1024));
    }

    #[test]
    fn a_state_that_lies_elsewhere_is_paid_for_and_comes_home() {
        let budget = Budget::new(1 << 20);
        let mut state = Varying::new(&budget, None);
        state.reserve_elsewhere(300).unwrap();
        state.leave(&[1, 300], 300);
        state.release_reserve();
        assert_eq!((state.dims(), state.bytes().host().len(), budget.used()), (&[1, 300][..], 0, 300));
        state.bring_home().unwrap().unwrap().host().fill(5);
        assert_eq!((state.dims(), state.bytes().host(), budget.used()), (&[1, 300][..], &[5; 300][..], 300));
        state.leave(&[1, 9], 9);
        state.reserve(20).unwrap();
        state.write(&[1, 20], 20).host().fill(6);
        state.release_reserve();
        assert_eq!((state.bytes().host(), budget.used()), (&[6; 20][..], 20));
    }

    #[test]
    fn a_state_over_the_budget_is_refused_with_the_numbers_and_stays_as_it_was() {
        let budget = Budget::new(100);
        let (mut first, mut second) = (Varying::new(&budget, None), Varying::new(&budget, None));
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

    #[test]
    fn strings_are_paid_for_as_they_are_written() {
        let budget = Budget::new(20);
        let mut state = Varying::new(&budget, None);
        let elements: Strings = ["abc", ""].into_iter().collect();
        state.reserve_strings(strings::written_bytes(elements.iter())).unwrap();
        state.write_strings(&[2], elements.clone());
        assert_eq!((state.strings(), budget.used()), (&elements, 11));
    }
}
