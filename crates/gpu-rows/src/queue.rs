//! The stream of an instance, and the moves of rows that are collected for it.
//!
//! Enqueued work is executed later, so the memory that it uses must stay allocated until [`Queue::synchronise`]
//! returns. The compiler cannot check this. So the functions that enqueue are `unsafe`, and a caller has three ways to
//! make them sound:
//!
//! - It owns the memory, and waits before it frees it.
//! - It borrows the memory, and waits before it returns.
//! - It lets the queue hold a reference to the memory ([`Queue::keep`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rows::tensor::{Part, StorageType};

use super::device::{Device, DeviceBuffer, OwnedStream, Pinned, while_nothing_is_captured};
use super::driver::{DeviceError, Driver};
use super::foreign::Foreign;
use super::moves::{Change, Moves, Pieces};

/// What the queues of a model on a device have done.
#[derive(Debug, Default)]
pub struct QueueReport {
    /// Bytes of inputs, tables of moves and initial states, copied to the device.
    pub to_device: AtomicU64,
    /// Bytes of outputs, copied to the host.
    pub to_host: AtomicU64,
    /// Why the first queue that has failed refuses all work; empty if none has.
    pub failure: OnceLock<DeviceError>,
}

/// Memory for tables of moves: pinned memory to write them, and memory of the device to copy them to.
struct Arena {
    host: Pinned,
    device: DeviceBuffer,
    /// Bytes, from the first one on, that enqueued work may still use.
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
/// Bytes of the arena that a queue begins with.
const FIRST_ARENA: usize = 64 << 10;

/// Enqueues the copies and moves of one instance on its stream.
///
/// It collects moves of rows. [`Queue::flush`] enqueues them: one copy of their table, and one launch for each phase.
pub struct Queue {
    stream: Arc<OwnedStream>,
    moves: Moves,
    arena: Arena,
    /// Arenas that became too small. They stay until the enqueued work that uses them is complete.
    outgrown: Vec<Arena>,
    report: Arc<QueueReport>,
    /// Whether work has been enqueued since the last wait.
    is_busy: bool,
    /// Memory that collected and enqueued work uses.
    kept: Vec<Arc<dyn Send + Sync>>,
    /// Why work could not be enqueued or executed. From then on the queue enqueues nothing, because later work may need
    /// the results of the work that failed.
    failed: Option<DeviceError>,
}

impl Queue {
    /// A stream must not have two queues.
    pub fn new(stream: Arc<OwnedStream>, report: Arc<QueueReport>) -> Result<Self, DeviceError> {
        let arena = Arena::new(stream.device(), FIRST_ARENA)?;
        let (moves, outgrown, kept) = (Moves::default(), Vec::new(), Vec::new());
        Ok(Self { stream, moves, arena, outgrown, report, is_busy: false, kept, failed: None })
    }

    pub fn device(&self) -> &Arc<Device> {
        self.stream.device()
    }

    fn driver(&self) -> &dyn Driver {
        self.stream.device.driver.as_ref()
    }

    /// Keeps memory alive until [`Queue::synchronise`] has waited for the work that uses it.
    pub fn keep(&mut self, used: Arc<dyn Send + Sync>) {
        // Most moves have the same source and the same target as the move before, so look for only the last two.
        if !self.kept.iter().rev().take(2).any(|kept| std::ptr::addr_eq(Arc::as_ptr(kept), Arc::as_ptr(&used))) {
            self.kept.push(used);
        }
    }

    /// Copies a part of a batch from where it is alone, stored so. All addresses are of the queue's device.
    ///
    /// # Safety
    /// The part must be within the memory at `batch`, and its bytes within that at `alone`. The memory must stay
    /// allocated until [`Queue::synchronise`] returns.
    pub unsafe fn put(&mut self, part: &Part, storage: StorageType, alone: u64, batch: u64) {
        self.push_all(Pieces::to_batch(part, storage, alone, batch), change_from(storage));
    }

    /// Copies a part of a batch to where it is alone, to be stored so.
    ///
    /// # Safety
    /// As for [`Queue::put`].
    pub unsafe fn take(&mut self, part: &Part, storage: StorageType, batch: u64, alone: u64) {
        let change = match storage {
            StorageType::Exact => Change::None,
            StorageType::Fp16 => Change::Narrow,
        };
        self.push_all(Pieces::from_batch(part, storage, batch, alone), change);
    }

    /// As [`Queue::put`], from the host. Panics if `alone` has not the bytes of the part. If there is no memory for
    /// them on the way, only this copy fails.
    ///
    /// # Safety
    /// As for [`Queue::put`], for the memory at `batch`.
    pub unsafe fn put_from_host(
        &mut self,
        part: &Part,
        storage: StorageType,
        alone: &[u8],
        batch: u64,
    ) -> Result<(), DeviceError> {
        assert_eq!(alone.len(), storage.bytes(part.bytes()), "row of another size");
        let pieces = Pieces::to_batch(part, storage, 0, batch);
        self.make_room(Moves::bytes_with_carried(alone.len(), pieces.clone().count()))?;
        self.moves.push_carried(pieces, alone, change_from(storage));
        Ok(())
    }

    /// Copies a part of the batch at `source` to one of the batch at `target`, of the same shape.
    ///
    /// # Safety
    /// As for [`Queue::put`], for both batches.
    pub unsafe fn transfer(&mut self, from: &Part, source: u64, to: &Part, target: u64) {
        self.push_all(Pieces::between(from, source, to, target), Change::None);
    }

    /// Rounds each fp32 value of a part to the nearest value that fp16 can represent.
    ///
    /// # Safety
    /// As for [`Queue::put`], for the memory at `batch`.
    pub unsafe fn round_to_fp16(&mut self, part: &Part, batch: u64) {
        self.push_all(Pieces::between(part, batch, part, batch), Change::Round);
    }

    /// Fills a part of a batch with zeros.
    ///
    /// # Safety
    /// As for [`Queue::put`], for the memory at `batch`.
    pub unsafe fn zero(&mut self, part: &Part, batch: u64) {
        Pieces::between(part, batch, part, batch).for_each(|pieces| {
            self.make_room_for_move();
            self.moves.push_zeros(pieces);
        });
    }

    fn push_all(&mut self, all: impl Iterator<Item = Pieces>, change: Change) {
        all.for_each(|pieces| {
            self.make_room_for_move();
            self.moves.push(pieces, change);
        });
    }

    fn make_room_for_move(&mut self) {
        if let Err(error) = self.make_room(Moves::move_bytes()) {
            // The caller counts on this move, so nothing may be enqueued after it.
            let _ = self.keep_failure(Err(error));
        }
    }

    /// Makes sure that the arena can hold the collected moves and `more` bytes. If there is no memory for a larger
    /// arena, enqueues the collected moves first.
    fn make_room(&mut self, more: usize) -> Result<(), DeviceError> {
        let wanted = self.moves.bytes() + more;
        if wanted <= self.arena.capacity() {
            return Ok(());
        }
        match self.grow(wanted) {
            Err(error) if error.is_out_of_memory() && more <= self.arena.capacity() => self.flush(),
            grown => grown,
        }
    }

    fn grow(&mut self, wanted: usize) -> Result<(), DeviceError> {
        let larger = Arena::new(self.stream.device(), wanted.next_power_of_two())?;
        self.outgrown.push(std::mem::replace(&mut self.arena, larger));
        Ok(())
    }

    /// Ends a phase: later moves are executed after those so far.
    pub fn end_phase(&mut self) {
        self.moves.end_phase();
    }

    /// Enqueues the collected moves. If this or a wait fails, all later calls fail, because rows that should have been
    /// moved are not in their places.
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        self.check()?;
        if self.moves.is_empty() {
            return Ok(());
        }
        let flushed = self.enqueue_moves();
        self.keep_failure(flushed)
    }

    fn enqueue_moves(&mut self) -> Result<(), DeviceError> {
        let bytes = self.moves.bytes();
        self.driver().make_current()?;
        self.make_unused(bytes)?;
        let arena = &mut self.arena;
        let at = arena.used;
        let table = arena.device.address() + at as u64;
        self.moves.write(table, arena.host.part_mut(at..at + bytes));
        arena.used = (at + bytes).next_multiple_of(ARENA_ALIGNMENT);
        self.is_busy = true;
        let phases = self.moves.take_phases();
        let (driver, stream) = (self.stream.device.driver.as_ref(), self.stream.stream);
        // SAFETY: the arena has these bytes on both sides, and reuses them only after a wait. The code that pushed the
        // moves guarantees that the memory of the rows stays allocated until then.
        unsafe {
            driver.upload(stream, arena.host.part_mut(at..at + bytes).as_ptr(), table, bytes)?;
            for phase in phases {
                let first = table + (phase.first * Moves::move_bytes()) as u64;
                driver.move_rows(stream, first, phase.count, phase.tiles)?;
            }
        }
        self.report.to_device.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Enqueues a copy of the first `bytes` bytes of `from` to the beginning of `to`. Panics if one of them is smaller.
    ///
    /// # Safety
    /// Until [`Queue::synchronise`] returns, both must stay allocated, and `from` must not be written.
    pub unsafe fn upload(&mut self, from: &Pinned, to: &DeviceBuffer, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes <= from.byte_len() && bytes <= to.byte_len(), "a copy beyond the end of a buffer");
        if bytes == 0 {
            return Ok(());
        }
        self.is_busy = true;
        self.driver().make_current()?;
        self.report.to_device.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: both have `bytes` bytes, as checked above. The caller guarantees that they stay allocated and that
        // `from` is not written until the copy is complete.
        unsafe { self.driver().upload(self.stream.stream, from.memory.as_ptr(), to.address(), bytes) }
    }

    /// Enqueues a copy of `bytes` bytes from address `from` on the device to the beginning of `to`, after the moves so
    /// far. Panics if `to` is smaller.
    ///
    /// # Safety
    /// `from` must have `bytes` bytes. Until [`Queue::synchronise`] returns, both must stay allocated, and `to` must
    /// not be read or written.
    pub unsafe fn download(&mut self, from: u64, to: &mut Pinned, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes <= to.byte_len(), "a copy beyond the end of a buffer");
        if bytes == 0 {
            return Ok(());
        }
        self.flush()?;
        self.is_busy = true;
        self.driver().make_current()?;
        self.report.to_host.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: `to` has `bytes` bytes, as checked above. The caller guarantees that `from` has them, that both stay
        // allocated, and that `to` is not used until the copy is complete.
        unsafe { self.driver().download(self.stream.stream, from, to.memory.as_ptr(), bytes) }
    }

    /// Enqueues a copy from address `from` to memory that the backend does not own, on the same device.
    ///
    /// # Safety
    /// `from` must have as many bytes as `to`. Until [`Queue::synchronise`] returns, both must stay allocated.
    pub unsafe fn copy_out(&mut self, from: u64, to: Foreign) -> Result<(), DeviceError> {
        self.check()?;
        self.driver().make_current()?;
        self.is_busy = true;
        // SAFETY: the caller guarantees that both have the bytes and stay allocated until the copy is complete.
        unsafe { self.driver().copy(self.stream.stream, from, to.address(), to.byte_len()) }
    }

    /// Enqueues the collected moves, so that the run that ONNX Runtime enqueues next is executed after them.
    pub fn before_run(&mut self) -> Result<(), DeviceError> {
        self.flush()?;
        self.is_busy = true;
        self.driver().make_current()?;
        self.driver().before_run(self.stream.stream)
    }

    /// Enqueues the collected moves, and waits until all enqueued work is complete. It waits after a failure, too,
    /// because work that was enqueued before may still be executed.
    pub fn synchronise(&mut self) -> Result<(), DeviceError> {
        let flushed = self.flush();
        if std::mem::take(&mut self.is_busy) {
            let _no_capture = while_nothing_is_captured();
            let waited = self.driver().make_current().and_then(|()| self.driver().synchronise(self.stream.stream));
            self.keep_failure(waited)?;
            self.arena.used = 0;
            self.outgrown.clear();
        }
        self.kept.clear();
        flushed
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// After an error, refuses all later work.
    fn keep_failure(&mut self, done: Result<(), DeviceError>) -> Result<(), DeviceError> {
        if let Err(error) = &done {
            let lasting =
                if error.is_lost() { "" } else { "; this stream refuses all work until the model is loaded again" };
            log::error!("{error}{lasting}");
            self.report.failure.get_or_init(|| error.clone());
            self.failed = Some(error.clone());
            self.moves = Moves::default();
        }
        done
    }

    /// Makes sure that the arena has `bytes` unused bytes. If there is no memory for a larger arena, waits until the
    /// enqueued work no longer uses this one.
    fn make_unused(&mut self, bytes: usize) -> Result<(), DeviceError> {
        let wanted = self.arena.used + bytes;
        if wanted <= self.arena.capacity() {
            return Ok(());
        }
        match self.grow(wanted) {
            Err(error) if error.is_out_of_memory() && bytes <= self.arena.capacity() => {
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

/// What a move does with the stored values of a part that is put into a batch.
const fn change_from(storage: StorageType) -> Change {
    match storage {
        StorageType::Exact => Change::None,
        StorageType::Fp16 => Change::Widen,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rows::copies;
    use rows::tensor::{RowAt, RowLayout};

    use super::*;

    const EXACT: StorageType = StorageType::Exact;

    fn queue() -> Queue {
        queue_on(0)
    }

    fn queue_on(device: i32) -> Queue {
        let device = Device::open(device).unwrap();
        Queue::new(OwnedStream::open(&device).unwrap(), Arc::default()).unwrap()
    }

    /// A buffer on the device with these bytes.
    fn device_bytes(queue: &mut Queue, bytes: &[u8]) -> DeviceBuffer {
        let device = queue.device().clone();
        let (mut pinned, buffer) =
            (device.allocate_pinned(bytes.len()).unwrap(), device.allocate(bytes.len()).unwrap());
        pinned.bytes_mut().copy_from_slice(bytes);
        // SAFETY: both stay allocated until the wait below.
        unsafe { queue.upload(&pinned, &buffer, bytes.len()) }.unwrap();
        queue.synchronise().unwrap();
        buffer
    }

    fn host_bytes(queue: &mut Queue, buffer: &DeviceBuffer) -> Vec<u8> {
        let mut pinned = queue.device().allocate_pinned(buffer.byte_len()).unwrap();
        // SAFETY: both have the buffer's number of bytes, and stay allocated until the wait below.
        unsafe { queue.download(buffer.address(), &mut pinned, buffer.byte_len()) }.unwrap();
        queue.synchronise().unwrap();
        pinned.bytes().to_vec()
    }

    /// Bytes of fp32 values. fp16 cannot represent most of them.
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
        /// Compares the kernel's source with the copies of `rows`.
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
            let part = layout.row(RowAt { position: index, rows });
            let (in_batch, alone) = (on_device.0.address(), on_device.1.address());
            let storage = if converts { StorageType::Fp16 } else { StorageType::Exact };
            // SAFETY: the buffers live until the end of the test, and have the batch and the row.
            unsafe {
                match way {
                    Way::Put | Way::PutWidened => queue.put(&part, storage, alone, in_batch),
                    Way::Take | Way::TakeNarrowed => queue.take(&part, storage, in_batch, alone),
                    Way::Upload => queue.put_from_host(&part, storage, &row, in_batch).unwrap(),
                    Way::Zero => queue.zero(&part, in_batch),
                    Way::Round => queue.round_to_fp16(&part, in_batch),
                }
            }
            match way {
                Way::Put | Way::PutWidened | Way::Upload => copies::put(&part, storage, &row, &mut batch),
                Way::Take | Way::TakeNarrowed => copies::take(&part, storage, &batch, &mut row),
                Way::Zero => copies::fill(&part, &mut batch, 0),
                Way::Round => _ = copies::round_to_fp16(&part, &mut batch),
            }
            prop_assert_eq!(host_bytes(&mut queue, &on_device.0), batch);
            prop_assert_eq!(host_bytes(&mut queue, &on_device.1), row);
        }
    }

    #[test]
    fn phases_follow_one_another_and_share_one_table() {
        let mut queue = queue();
        let part = Part::whole(100);
        let buffers: Vec<_> = (0..4u8).map(|value| device_bytes(&mut queue, &[value; 100])).collect();
        let at = |number: usize| buffers[number].address();
        // Each phase copies a buffer that the next phase overwrites.
        for number in 0..3 {
            // SAFETY: the buffers have the part, and live until the end of the test.
            unsafe { queue.put(&part, EXACT, at(number + 1), at(number)) };
            queue.end_phase();
        }
        // SAFETY: the buffer has the part, and lives until the end of the test.
        unsafe { queue.put_from_host(&part, EXACT, &[9; 100], at(3)) }.unwrap();
        queue.flush().unwrap();
        // SAFETY: the buffer has the part, and lives until the end of the test.
        unsafe { queue.zero(&part, at(0)) };
        queue.synchronise().unwrap();
        let values: Vec<_> = buffers.iter().map(|buffer| host_bytes(&mut queue, buffer)[99]).collect();
        assert_eq!(values, [0, 2, 3, 9]);
    }

    #[test]
    fn memory_that_is_kept_lives_until_the_moves_that_use_it_have_happened() {
        let mut queue = queue();
        let (from, to) = (device_bytes(&mut queue, &[5; 8]), device_bytes(&mut queue, &[0; 8]));
        queue.keep(from.memory().clone());
        // SAFETY: the queue keeps the source, and the target lives until the end of the test.
        unsafe { queue.put(&Part::whole(8), EXACT, from.address(), to.address()) };
        let memory = Arc::downgrade(from.memory());
        drop(from);
        queue.flush().unwrap();
        assert!(memory.upgrade().is_some());
        queue.synchronise().unwrap();
        assert!(memory.upgrade().is_none(), "the wait releases the memory");
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
                let row = |position| layout.row(RowAt { position, rows });
                let (first, second) = (row((index + round) % rows), row(index));
                // SAFETY: the buffers of these rows live until the end of the test.
                unsafe { queue.transfer(&first, from.address(), &second, to.address()) };
            }
            queue.flush().unwrap();
        }
        let (from, to) = (host_bytes(&mut queue, &from), host_bytes(&mut queue, &to));
        assert_eq!(to[..8 * (rows - 4)], from[8 * 4..]);
    }

    #[test]
    fn after_a_failure_nothing_is_executed_and_earlier_work_is_waited_for() {
        let mut queue = queue();
        let (before, after) = (device_bytes(&mut queue, &[1; 8]), device_bytes(&mut queue, &[1; 8]));
        let zero = |queue: &mut Queue, buffer: &DeviceBuffer| {
            // SAFETY: the buffer has these bytes, and lives until the end of the test.
            unsafe { queue.zero(&Part::whole(8), buffer.address()) };
        };
        zero(&mut queue, &before);
        queue.flush().unwrap();
        zero(&mut queue, &after);
        let failed =
            queue.keep_failure(Err(DeviceError::Failed { device: 0, call: "a test", why: "it says so".to_owned() }));
        assert!(failed.is_err() && queue.flush().is_err() && queue.before_run().is_err());
        assert!(queue.synchronise().is_err());
        let mut another = queue_on(0);
        assert_eq!(host_bytes(&mut another, &before), [0; 8]);
        assert_eq!(host_bytes(&mut another, &after), [1; 8]);
    }

    #[test]
    fn a_table_is_enqueued_in_parts_if_there_is_no_memory_for_all_of_it() {
        // No other test allocates memory of this device.
        let mut queue = queue_on(7);
        let device = queue.device().clone();
        let rows = 3000;
        let layout = RowLayout { outer: 1, inner_bytes: 8 };
        let (from, to) = (device_bytes(&mut queue, &floats(2 * rows)), device_bytes(&mut queue, &vec![0; 8 * rows]));
        let (free, _) = device.driver.memory().unwrap();
        let full = device.allocate(free).unwrap();
        for index in 0..rows {
            let row = layout.row(RowAt { position: index, rows });
            // SAFETY: the buffers of these rows live until the end of the test.
            unsafe { queue.transfer(&row, from.address(), &row, to.address()) };
        }
        let row = vec![1; FIRST_ARENA];
        let large = Part::whole(row.len());
        // SAFETY: the queue refuses the move, so it is never executed.
        let refused = unsafe { queue.put_from_host(&large, EXACT, &row, to.address()) };
        assert!(matches!(refused, Err(DeviceError::OutOfMemory { device: 7, .. })));
        queue.synchronise().unwrap();
        drop(full);
        let (from, to) = (host_bytes(&mut queue, &from), host_bytes(&mut queue, &to));
        assert_eq!(to, from[..8 * rows]);
    }

    #[test]
    fn an_allocation_that_is_too_large_is_refused_with_the_free_bytes() {
        let error = Device::open(0).unwrap().allocate(usize::MAX / 4).err().unwrap();
        assert!(matches!(error, DeviceError::OutOfMemory { device: 0, .. }), "{error}");
        assert!(error.to_string().contains("bytes are free"), "{error}");
    }
}
