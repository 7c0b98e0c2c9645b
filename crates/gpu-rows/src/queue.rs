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

use super::driver::{DeviceError, Driver};
use super::moves::{Change, Moves, Pieces};
use super::{Device, DeviceBuffer, Foreign, OwnedStream, Pinned, while_nothing_is_captured};

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
    /// The part must be within the memory at `batch`, and its bytes within that at `alone`. The memory must stay allocated
    /// until [`Queue::synchronise`] returns.
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

    /// As [`Queue::put`], from the host. Panics if `alone` has not the bytes of the part. If there is no memory for them on
    /// the way, only this copy fails.
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
mod tests;
