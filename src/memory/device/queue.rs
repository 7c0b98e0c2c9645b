//! The stream of an instance, and what is about to be enqueued on it.
//!
//! What is enqueued happens later, so all that it uses has to live until [`Queue::synchronise`]. The compiler sees
//! nothing of that: the functions that enqueue are `unsafe`, and their callers keep to it in one of three ways. They own
//! the memory and wait before they give it up; they borrow it and wait before they return; or they let the queue hold a
//! reference to it ([`Queue::keep`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::driver::{DeviceError, Driver};
use super::moves::{Change, Moves, RowIn};
use super::{Device, DeviceBuffer, Foreign, OwnedStream, Pinned};
use crate::tensor::RowLayout;

/// Bytes that have gone between host and device.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes of inputs, tables of moves and initial states that went to the device.
    pub to_device: AtomicU64,
    /// Bytes of outputs that came back.
    pub to_host: AtomicU64,
}

/// A place for what goes to the device together with a launch.
struct Arena {
    host: Pinned,
    device: DeviceBuffer,
    /// In use by what is under way.
    used: usize,
}

impl Arena {
    fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, DeviceError> {
        Ok(Self { host: device.allocate_pinned(bytes)?, device: device.allocate(bytes)?, used: 0 })
    }

    const fn capacity(&self) -> usize {
        self.host.byte_len()
    }
}

const ARENA_ALIGNMENT: usize = 256;
const FIRST_ARENA: usize = 64 << 10;

/// What one instance enqueues on a device.
///
/// Moves of rows are collected, and enqueued by [`Queue::flush`] with one copy of their table and one launch a phase.
pub struct Queue {
    stream: Arc<OwnedStream>,
    moves: Moves,
    arena: Arena,
    /// Arenas that were too small, until what is under way is over.
    outgrown: Vec<Arena>,
    traffic: Arc<Traffic>,
    /// Something has been enqueued since the last wait.
    is_busy: bool,
    /// What is used by what is under way, or is going to be.
    kept: Vec<Arc<dyn Send + Sync>>,
    /// What could not be enqueued or did not happen. Nothing else does from then on: it may build on that.
    failed: Option<DeviceError>,
}

impl Queue {
    /// A queue on a stream that no other queue has.
    pub fn new(stream: Arc<OwnedStream>, traffic: Arc<Traffic>) -> Result<Self, DeviceError> {
        let arena = Arena::new(stream.device(), FIRST_ARENA)?;
        let (moves, outgrown, kept) = (Moves::default(), Vec::new(), Vec::new());
        Ok(Self { stream, moves, arena, outgrown, traffic, is_busy: false, kept, failed: None })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.stream.device()
    }

    fn driver(&self) -> &dyn Driver {
        self.stream.device.driver.as_ref()
    }

    /// Keeps what is going to be used alive until the queue has been waited for.
    pub fn keep(&mut self, used: Arc<dyn Send + Sync>) {
        // Rows that are moved one after another mostly go from one piece of memory to one other.
        if !self.kept.iter().rev().take(2).any(|kept| std::ptr::addr_eq(Arc::as_ptr(kept), Arc::as_ptr(&used))) {
            self.kept.push(used);
        }
    }

    /// Moves a row on the device.
    ///
    /// # Safety
    /// Both are rows of such a layout in memory of the device that lives until the queue has been waited for.
    pub unsafe fn move_row(&mut self, layout: RowLayout, from: RowIn, to: RowIn, change: Change) {
        self.make_room_for_move();
        self.moves.push(layout, from, to, change);
    }

    /// Moves a row of the host's to the device. Without memory for it nothing is moved, and all else goes on.
    ///
    /// # Safety
    /// As for [`Queue::move_row`], for `to`.
    pub unsafe fn upload_row(
        &mut self,
        layout: RowLayout,
        row: &[u8],
        to: RowIn,
        change: Change,
    ) -> Result<(), DeviceError> {
        self.make_room(Moves::bytes_with_carried(row.len()))?;
        self.moves.push_carried(layout, row, to, change);
        Ok(())
    }

    /// Fills a row with zeros.
    ///
    /// # Safety
    /// As for [`Queue::move_row`].
    pub unsafe fn zero_row(&mut self, layout: RowLayout, to: RowIn) {
        self.make_room_for_move();
        self.moves.push_zeros(layout, to);
    }

    fn make_room_for_move(&mut self) {
        if let Err(error) = self.make_room(Moves::move_bytes()) {
            // The move would be missing.
            let _ = self.note(Err(error));
        }
    }

    /// Room in the arena for so many bytes more. Without memory for a larger one, what has been collected goes first.
    fn make_room(&mut self, more: usize) -> Result<(), DeviceError> {
        let wanted = self.moves.bytes() + more;
        if wanted <= self.arena.capacity() {
            return Ok(());
        }
        match self.grow(wanted) {
            Err(error) if error.is_want_of_memory() && more <= self.arena.capacity() => self.flush(),
            grown => grown,
        }
    }

    fn grow(&mut self, wanted: usize) -> Result<(), DeviceError> {
        let larger = Arena::new(self.stream.device(), wanted.next_power_of_two())?;
        self.outgrown.push(std::mem::replace(&mut self.arena, larger));
        Ok(())
    }

    /// The moves from now on happen after those so far.
    pub fn end_phase(&mut self) {
        self.moves.end_phase();
    }

    /// Enqueues the moves that have been collected. When that fails, or a wait does, everything fails from then on:
    /// what was to be moved is not where it should be.
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        self.check()?;
        if self.moves.is_empty() {
            return Ok(());
        }
        let flushed = self.enqueue_moves();
        self.note(flushed)
    }

    fn enqueue_moves(&mut self) -> Result<(), DeviceError> {
        let bytes = self.moves.bytes();
        self.driver().make_current()?;
        self.free_room(bytes)?;
        let arena = &mut self.arena;
        let at = arena.used;
        let table = arena.device.address() + at as u64;
        self.moves.write(table, arena.host.part_mut(at..at + bytes));
        arena.used = (at + bytes).next_multiple_of(ARENA_ALIGNMENT);
        self.is_busy = true;
        let phases = self.moves.take_phases();
        let (driver, stream) = (self.stream.device.driver.as_ref(), self.stream.stream);
        // SAFETY: the arena has the bytes on both sides, and this part of it is used again only behind a wait. Moves
        // are pushed for memory that lives until then.
        unsafe {
            driver.upload(stream, arena.host.part_mut(at..at + bytes).as_ptr(), table, bytes)?;
            for phase in phases {
                let first = table + (phase.first * Moves::move_bytes()) as u64;
                driver.move_rows(stream, first, phase.count, phase.tiles)?;
            }
        }
        self.traffic.to_device.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Enqueues a copy of the first `bytes` bytes to the device.
    ///
    /// # Safety
    /// Until the queue has been waited for, both live, and nobody writes to `from`.
    pub unsafe fn upload(&mut self, from: &Pinned, to: &DeviceBuffer, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes <= from.byte_len() && bytes <= to.byte_len(), "more than there is");
        if bytes == 0 {
            return Ok(());
        }
        self.is_busy = true;
        self.driver().make_current()?;
        self.traffic.to_device.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: both have the bytes, as was just seen; the rest is the caller's word.
        unsafe { self.driver().upload(self.stream.stream, from.memory.as_ptr(), to.address(), bytes) }
    }

    /// Enqueues a copy of `bytes` bytes from the device's `from` to the host, behind the moves so far.
    ///
    /// # Safety
    /// `from` has that many bytes. Until the queue has been waited for, both live, and nobody reads or writes `to`.
    pub unsafe fn download(&mut self, from: u64, to: &mut Pinned, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes <= to.byte_len(), "more than there is room for");
        if bytes == 0 {
            return Ok(());
        }
        self.flush()?;
        self.is_busy = true;
        self.driver().make_current()?;
        self.traffic.to_host.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: `to` has room, as was just seen; the rest is the caller's word.
        unsafe { self.driver().download(self.stream.stream, from, to.memory.as_ptr(), bytes) }
    }

    /// Enqueues a copy to somebody else's memory on the device.
    ///
    /// # Safety
    /// `from` has the bytes. Both live until the queue has been waited for.
    pub unsafe fn copy_out(&mut self, from: u64, to: Foreign) -> Result<(), DeviceError> {
        self.check()?;
        self.driver().make_current()?;
        self.is_busy = true;
        // SAFETY: the caller's word.
        unsafe { self.driver().copy(self.stream.stream, from, to.address(), to.byte_len()) }
    }

    /// Enqueues a copy of all bytes of a buffer to another: what moves of rows are measured by.
    ///
    /// # Safety
    /// Both live until the queue has been waited for.
    pub unsafe fn copy(&mut self, from: &DeviceBuffer, to: &DeviceBuffer) -> Result<(), DeviceError> {
        assert!(from.byte_len() <= to.byte_len(), "more than there is room for");
        self.is_busy = true;
        self.driver().make_current()?;
        // SAFETY: both have the bytes, as was just seen; the rest is the caller's word.
        unsafe { self.driver().copy(self.stream.stream, from.address(), to.address(), from.byte_len()) }
    }

    /// ONNX Runtime is about to enqueue a run on the stream, behind the moves so far.
    pub fn before_run(&mut self) -> Result<(), DeviceError> {
        self.flush()?;
        self.is_busy = true;
        self.driver().make_current()?;
        self.driver().before_run(self.stream.stream)
    }

    /// Waits until everything that was enqueued has happened; what was collected, too. Also where something has failed:
    /// what was enqueued before may still be under way.
    pub fn synchronise(&mut self) -> Result<(), DeviceError> {
        let flushed = self.flush();
        if std::mem::take(&mut self.is_busy) {
            let waited = self.driver().make_current().and_then(|()| self.driver().synchronise(self.stream.stream));
            self.note(waited)?;
            self.arena.used = 0;
            self.outgrown.clear();
        }
        self.kept.clear();
        flushed
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn note(&mut self, done: Result<(), DeviceError>) -> Result<(), DeviceError> {
        if let Err(error) = &done {
            log::error!("{error}; what runs on this stream is refused from now on: load the model again");
            self.failed = Some(error.clone());
            self.moves = Moves::default();
        }
        done
    }

    /// Room for so many bytes in the arena, behind what is in use.
    fn free_room(&mut self, bytes: usize) -> Result<(), DeviceError> {
        let wanted = self.arena.used + bytes;
        if wanted <= self.arena.capacity() {
            return Ok(());
        }
        match self.grow(wanted) {
            Err(error) if error.is_want_of_memory() && bytes <= self.arena.capacity() => {
                self.driver().synchronise(self.stream.stream)?;
                self.arena.used = 0;
                Ok(())
            }
            grown => grown,
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let waited = self.driver().make_current().and_then(|()| self.driver().synchronise(self.stream.stream));
        if let Err(error) = waited {
            log::error!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::rows;

    fn queue() -> Queue {
        queue_on(0)
    }

    fn queue_on(device: i32) -> Queue {
        let device = Device::open(device).unwrap();
        Queue::new(OwnedStream::open(&device).unwrap(), Arc::default()).unwrap()
    }

    /// Device memory with these bytes.
    fn device_bytes(queue: &mut Queue, bytes: &[u8]) -> DeviceBuffer {
        let device = queue.device().clone();
        let (mut pinned, buffer) =
            (device.allocate_pinned(bytes.len()).unwrap(), device.allocate(bytes.len()).unwrap());
        pinned.bytes_mut().copy_from_slice(bytes);
        // SAFETY: both live until the wait below.
        unsafe { queue.upload(&pinned, &buffer, bytes.len()) }.unwrap();
        queue.synchronise().unwrap();
        buffer
    }

    fn host_bytes(queue: &mut Queue, buffer: &DeviceBuffer) -> Vec<u8> {
        let mut pinned = queue.device().allocate_pinned(buffer.byte_len()).unwrap();
        // SAFETY: all bytes of a buffer; both live until the wait below.
        unsafe { queue.download(buffer.address(), &mut pinned, buffer.byte_len()) }.unwrap();
        queue.synchronise().unwrap();
        pinned.bytes().to_vec()
    }

    /// Numbers that fp16 rounds, as bytes of fp32.
    fn floats(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| (i as f32 * 1.001 - 7.3).to_ne_bytes()).collect()
    }

    #[derive(Clone, Copy, Debug)]
    enum Way {
        Put,
        Take,
        Upload,
        Zero,
        PutWidened,
        TakeNarrowed,
        Round,
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]
        /// The kernel's source against the copies of the host.
        #[test]
        fn rows_move_as_they_do_on_the_host(
            outer in 1usize..5, elements in 1usize..700, rows in 1usize..6, index in 0usize..6,
            element in prop::sample::select(vec![1usize, 2, 3, 4, 8, 16]),
            way in prop::sample::select(vec![
                Way::Put, Way::Take, Way::Upload, Way::Zero, Way::PutWidened, Way::TakeNarrowed, Way::Round,
            ]),
        ) {
            let index = index % rows;
            let converts = matches!(way, Way::PutWidened | Way::TakeNarrowed | Way::Round);
            let element = if converts { 4 } else { element };
            let layout = RowLayout { outer, inner_bytes: elements * element };
            let row_bytes = layout.row_bytes() / if converts && !matches!(way, Way::Round) { 2 } else { 1 };
            let mut batch = floats(layout.row_bytes() * rows / 4 + 1);
            batch.truncate(layout.row_bytes() * rows);
            let mut row: Vec<u8> = (0..row_bytes).map(|i| (i % 120) as u8).collect();

            let mut queue = queue();
            let on_device = (device_bytes(&mut queue, &batch), device_bytes(&mut queue, &row));
            let place = RowIn { address: on_device.0.address(), index, rows };
            let alone = RowIn::alone(on_device.1.address());
            // SAFETY: rows of buffers that live until the end of the test.
            unsafe {
                match way {
                    Way::Put => queue.move_row(layout, alone, place, Change::None),
                    Way::Take => queue.move_row(layout, place, alone, Change::None),
                    Way::Upload => queue.upload_row(layout, &row, place, Change::None).unwrap(),
                    Way::Zero => queue.zero_row(layout, place),
                    Way::PutWidened => queue.move_row(layout, alone, place, Change::Widen),
                    Way::TakeNarrowed => queue.move_row(layout, place, alone, Change::Narrow),
                    Way::Round => queue.move_row(layout, place, place, Change::Round),
                }
            }
            match way {
                Way::Put | Way::Upload => rows::put(layout, &row, &mut batch, index, rows),
                Way::Take => rows::take(layout, &batch, index, rows, &mut row),
                Way::Zero => rows::zero(layout, &mut batch, index, rows),
                Way::PutWidened => rows::put_widened(layout, &row, &mut batch, index, rows),
                Way::TakeNarrowed => rows::take_narrowed(layout, &batch, index, rows, &mut row),
                Way::Round => rows::round_to_fp16(layout, &mut batch, index, rows),
            }
            prop_assert_eq!(host_bytes(&mut queue, &on_device.0), batch);
            prop_assert_eq!(host_bytes(&mut queue, &on_device.1), row);
        }
    }

    #[test]
    fn phases_follow_one_another_and_share_one_table() {
        let mut queue = queue();
        let layout = RowLayout { outer: 1, inner_bytes: 100 };
        let buffers: Vec<_> = (0..4u8).map(|value| device_bytes(&mut queue, &[value; 100])).collect();
        let at = |number: usize| RowIn::alone(buffers[number].address());
        // Each one takes what the next one has, which it gets only afterwards.
        for number in 0..3 {
            // SAFETY: rows of buffers that live until the end of the test.
            unsafe { queue.move_row(layout, at(number + 1), at(number), Change::None) };
            queue.end_phase();
        }
        // SAFETY: as above.
        unsafe { queue.upload_row(layout, &[9; 100], at(3), Change::None) }.unwrap();
        queue.flush().unwrap();
        // SAFETY: as above.
        unsafe { queue.zero_row(layout, at(0)) };
        queue.synchronise().unwrap();
        let values: Vec<_> = buffers.iter().map(|buffer| host_bytes(&mut queue, buffer)[99]).collect();
        assert_eq!(values, [0, 2, 3, 9]);
    }

    #[test]
    fn memory_that_is_kept_lives_until_the_moves_that_use_it_have_happened() {
        let mut queue = queue();
        let layout = RowLayout { outer: 1, inner_bytes: 8 };
        let (from, to) = (device_bytes(&mut queue, &[5; 8]), device_bytes(&mut queue, &[0; 8]));
        queue.keep(from.memory().clone());
        // SAFETY: a row of a buffer that the queue keeps, and one of a buffer that lives until the end of the test.
        unsafe { queue.move_row(layout, RowIn::alone(from.address()), RowIn::alone(to.address()), Change::None) };
        let memory = Arc::downgrade(from.memory());
        drop(from);
        queue.flush().unwrap();
        assert!(memory.upgrade().is_some());
        queue.synchronise().unwrap();
        assert!(memory.upgrade().is_none(), "it is given back with the wait");
        assert_eq!(host_bytes(&mut queue, &to), [5; 8]);
    }

    #[test]
    fn a_table_of_any_length_finds_room() {
        let mut queue = queue();
        let layout = RowLayout { outer: 1, inner_bytes: 8 };
        let rows = 3000;
        let (from, to) = (device_bytes(&mut queue, &floats(2 * rows)), device_bytes(&mut queue, &vec![0; 8 * rows]));
        for round in 0..5 {
            for index in 0..rows {
                let at = |buffer: &DeviceBuffer, index| RowIn { address: buffer.address(), index, rows };
                // SAFETY: rows of buffers that live until the end of the test.
                unsafe { queue.move_row(layout, at(&from, (index + round) % rows), at(&to, index), Change::None) };
            }
            queue.flush().unwrap();
        }
        let (from, to) = (host_bytes(&mut queue, &from), host_bytes(&mut queue, &to));
        assert_eq!(to[..8 * (rows - 4)], from[8 * 4..]);
    }

    #[test]
    fn behind_a_failure_nothing_happens_and_what_was_before_is_waited_for() {
        let mut queue = queue();
        let layout = RowLayout { outer: 1, inner_bytes: 8 };
        let (before, behind) = (device_bytes(&mut queue, &[1; 8]), device_bytes(&mut queue, &[1; 8]));
        let zero = |queue: &mut Queue, buffer: &DeviceBuffer| {
            // SAFETY: a row of a buffer that lives until the end of the test.
            unsafe { queue.zero_row(layout, RowIn::alone(buffer.address())) };
        };
        zero(&mut queue, &before);
        queue.flush().unwrap();
        zero(&mut queue, &behind);
        let failed = queue.note(Err(DeviceError::Failed { device: 0, call: "a test", why: "it says so".to_owned() }));
        assert!(failed.is_err() && queue.flush().is_err() && queue.before_run().is_err());
        assert!(queue.synchronise().is_err());
        let mut another = queue_on(0);
        assert_eq!(host_bytes(&mut another, &before), [0; 8]);
        assert_eq!(host_bytes(&mut another, &behind), [1; 8]);
    }

    #[test]
    fn a_table_goes_in_parts_where_there_is_no_memory_for_it() {
        // A device that no other test takes memory of.
        let mut queue = queue_on(7);
        let device = queue.device().clone();
        let rows = 3000;
        let layout = RowLayout { outer: 1, inner_bytes: 8 };
        let (from, to) = (device_bytes(&mut queue, &floats(2 * rows)), device_bytes(&mut queue, &vec![0; 8 * rows]));
        let (free, _) = device.driver.memory().unwrap();
        let full = device.allocate(free).unwrap();
        for index in 0..rows {
            let at = |buffer: &DeviceBuffer| RowIn { address: buffer.address(), index, rows };
            // SAFETY: rows of buffers that live until the end of the test.
            unsafe { queue.move_row(layout, at(&from), at(&to), Change::None) };
        }
        let row = vec![1; FIRST_ARENA];
        let large = RowLayout { outer: 1, inner_bytes: row.len() };
        // SAFETY: it is refused.
        let refused = unsafe { queue.upload_row(large, &row, RowIn::alone(to.address()), Change::None) };
        assert!(matches!(refused, Err(DeviceError::OutOfMemory { device: 7, .. })));
        queue.synchronise().unwrap();
        drop(full);
        let (from, to) = (host_bytes(&mut queue, &from), host_bytes(&mut queue, &to));
        assert_eq!(to, from[..8 * rows]);
    }

    #[test]
    fn memory_that_the_device_does_not_have_is_refused_with_the_numbers() {
        let error = Device::open(0).unwrap().allocate(usize::MAX / 4).err().unwrap();
        assert!(matches!(error, DeviceError::OutOfMemory { device: 0, .. }), "{error}");
        assert!(error.to_string().contains("bytes are free"), "{error}");
    }
}
