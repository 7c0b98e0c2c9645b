//! The live sequences of a model behind their lock, and the leases on their slots.
//!
//! Rules: the lock is held for table work only, never while tensors are copied, a model runs, or a request is released
//! (that calls into core, which takes locks of its own).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::metrics::{SequenceMetrics, Snapshot};
use crate::memory::device::{Device, Traffic};
use crate::memory::{Budget, Bytes, MemoryError, NoRoom, Slab, SlotMemory, SlotSpec, Varying};
use crate::panic;
use crate::sequence::{Admission, Admitted, Outcome, Policy, Refusal, Sequences};
use crate::state::pool::{SlotId, SlotLimits};
use crate::triton::{Answer, Request};

type Table = Sequences<Arc<Slab>, Vec<Varying>, Request>;

/// All live sequences of a model.
pub struct LiveSequences {
    table: Mutex<Table>,
    /// What a slab is made of.
    slot: SlotSpec,
    /// Where the states are, if not on the host.
    device: Option<Arc<Device>>,
    /// What the varying states of all sequences may have.
    budget: Arc<Budget>,
    /// What has gone between host and device.
    traffic: Arc<Traffic>,
    /// Bytes of states that were copied so far.
    copied_bytes: AtomicU64,
    /// The last slab that was due could not be made.
    slab_is_missing: AtomicBool,
    reaper_wanted: Condvar,
    metrics: SequenceMetrics,
}

/// A request whose answer has been made.
pub struct Answered {
    /// Its hold on its sequence.
    pub lease: Option<Lease>,
    /// What its client is to be sent; `None` if it has been.
    pub answer: Option<Answer>,
    /// The request.
    pub request: Request,
}

/// A request's hold on its sequence's slot, from admission to settlement.
///
/// Dropped without settlement (a run that failed, a panic on the way) it leaves the sequence as it was before the
/// request; half-written, it ends the sequence.
pub struct Lease {
    sequences: Arc<LiveSequences>,
    slot: SlotId,
    /// Gone before the slot is given back, as the next one to have the slot makes another.
    memory: Option<SlotMemory>,
    /// The states that vary in size; none before the first one is kept.
    varying: Vec<Varying>,
    end: bool,
    written: Written,
    /// What holds the state has been given back.
    left: bool,
    settled: bool,
}

/// How much of the state after a request is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// None: the sequence has the state before the request.
    Nothing,
    /// Some, so that it has neither.
    Partly,
    Wholly,
}

/// Bytes that a state of varying size needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VaryingSize {
    /// Of a tensor of numbers.
    Bytes(usize),
    /// Of strings, as they are written for Triton.
    Strings(usize),
}

impl VaryingSize {
    /// The number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes(bytes) | Self::Strings(bytes) => bytes,
        }
    }
}

impl LiveSequences {
    /// No sequences yet; the first slab is allocated now.
    pub fn new(
        policy: Policy,
        limits: SlotLimits,
        slot: SlotSpec,
        budget: Arc<Budget>,
        traffic: Arc<Traffic>,
        metrics: SequenceMetrics,
    ) -> Result<Self, MemoryError> {
        let device = slot.device.as_ref().map(|(device, _)| device.clone());
        let table = Mutex::new(Sequences::new(policy, limits));
        let (copied_bytes, slab_is_missing) = (AtomicU64::new(0), AtomicBool::new(false));
        let reaper_wanted = Condvar::new();
        let sequences =
            Self { table, slot, device, budget, traffic, copied_bytes, slab_is_missing, reaper_wanted, metrics };
        sequences.adjust_slabs()?;
        sequences.publish();
        Ok(sequences)
    }

    /// Admits the requests of a payload; see [`Sequences::admit`]. To be followed by [`LiveSequences::settle`].
    pub fn admit(
        self: &Arc<Self>,
        instance: u32,
        requests: usize,
        admissions: &[Admission],
    ) -> Vec<Result<Lease, Refusal<MemoryError>>> {
        let mut missing = None;
        let admitted = loop {
            let admitted = self.work(|table, released| {
                let now = Instant::now();
                match table.slab_needed(admissions, now).filter(|_| missing.is_none()) {
                    Some(slots) => Err(slots),
                    None => Ok(table.admit(instance, requests, admissions, now, released)),
                }
            });
            match admitted {
                Ok(admitted) => break admitted,
                Err(slots) => missing = self.add_slab(slots).err(),
            }
        };
        let lease = |(admitted, request): (Result<Admitted<Arc<Slab>, _>, Refusal>, &Admission)| {
            let admitted = admitted.map_err(|refusal| self.refusal(refusal, missing.as_ref()))?;
            let (sequences, slot, varying) = (self.clone(), admitted.slot, admitted.contents);
            let memory = wait_for(&admitted.memory, slot);
            let is_busy = memory.is_none();
            let (end, written) = (request.end, Written::Nothing);
            let lease = Lease { sequences, slot, memory, varying, end, written, left: false, settled: false };
            if is_busy { Err(Refusal::Busy) } else { Ok(lease) }
        };
        admitted.into_iter().zip(admissions).map(lease).collect()
    }

    /// Sends the answers of a payload, settles its sequences and releases its requests (or keeps one, see
    /// [`crate::sequence`]), row by row. Payloads of an instance are settled in the order in which they were admitted.
    pub fn settle(&self, instance: u32, answered: Vec<Answered>) {
        for row in answered {
            if let Err(error) = panic::catch(|| self.settle_row(row)) {
                log::error!("{error}");
            }
        }
        let (is_holding, needs_slabs) = self.work(|table, released| {
            table.finish_payload(instance, Instant::now(), released);
            (table.is_holding(), table.needs_adjustment())
        });
        if is_holding {
            self.reaper_wanted.notify_one();
        }
        self.note_missing_slab(if needs_slabs { self.adjust_slabs() } else { Ok(()) });
        self.publish();
    }

    fn settle_row(&self, Answered { lease, answer, request }: Answered) {
        drop(answer);
        // A lease takes the lock when it is dropped, so it may not be left when it is held.
        let Some(settlement) = lease.map(Lease::finish) else { return };
        self.work(|table, released| match settlement.settle(table, Instant::now(), released) {
            Some(slot) => table.hold(slot, request, released),
            None => released.push(request),
        });
    }

    /// Works on the table under its lock. What that leaves, requests to be released and what ended sequences had, is
    /// dropped without it.
    fn work<R>(&self, work: impl FnOnce(&mut Table, &mut Vec<Request>) -> R) -> R {
        let mut released = Vec::new();
        let mut table = self.table.lock();
        let done = work(&mut table, &mut released);
        let (leavings, releasing) = (table.take_leavings(), table.take_releasing());
        drop(table);
        drop((leavings, released));
        if !releasing.is_empty() {
            self.table.lock().have_been_released(releasing, Instant::now());
        }
        done
    }

    /// Number of live sequences.
    pub fn live(&self) -> usize {
        self.table.lock().live()
    }

    /// The memory of sequences that wait for their next request, to write their states back; `None` for one that is
    /// over.
    pub fn idle_memories(&self, slots: impl Iterator<Item = SlotId>) -> SmallVec<[Option<SlotMemory>; 4]> {
        // Taken under the lock: once it is given up, the sequence may end and another have the slot.
        let table = self.table.lock();
        let memory = |slot: SlotId| {
            let memory = table.memory(slot)?.take(slot.index());
            // Better no batch than one that forgets a state.
            assert!(memory.is_some(), "the slot of a sequence that waits has a holder");
            memory
        };
        slots.map(memory).collect()
    }

    /// Takes what a sequence that waits for its next request has beside its slot, to bring states home; `None` if it is
    /// over. To be given back.
    pub fn take_contents(&self, slot: SlotId) -> Option<Vec<Varying>> {
        self.table.lock().take_contents(slot)
    }

    /// Gives back what a sequence has beside its slot.
    pub fn give_contents(&self, slot: SlotId, contents: Vec<Varying>) {
        self.work(|table, _| table.keep(slot, contents));
    }

    /// Counts bytes of states that were copied.
    pub fn count_copied(&self, bytes: usize) {
        if bytes > 0 {
            self.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Ends the sequences of an instance that goes away.
    pub fn retire_instance(&self, instance: u32) {
        self.work(|table, released| table.retire_instance(instance, released));
        self.publish();
    }

    /// Expires what is due, then waits until something may be due again or until [`LiveSequences::wake`].
    pub(super) fn tick_and_wait(&self, stop: impl Fn() -> bool) {
        self.work(|table, released| table.tick(Instant::now(), released));
        self.note_missing_slab(self.adjust_slabs());
        self.publish();
        let mut table = self.table.lock();
        if !stop() {
            let next = table.next_tick(Instant::now());
            self.reaper_wanted.wait_until(&mut table, next);
        }
    }

    /// Ends a wait.
    pub(super) fn wake(&self) {
        let _table = self.table.lock();
        self.reaper_wanted.notify_all();
    }

    /// Makes a slab of so many slots without holding the lock, and adds it.
    fn add_slab(&self, slots: usize) -> Result<(), MemoryError> {
        let slab = Arc::new(Slab::new(slots, &self.slot)?);
        let not_due = self.table.lock().add_slab(slab, slots);
        drop(not_due);
        Ok(())
    }

    /// Adds the slabs that are due, and gives back those that are spare.
    fn adjust_slabs(&self) -> Result<(), MemoryError> {
        loop {
            let due = self.table.lock().slab_due();
            match due {
                Some(slots) => self.add_slab(slots)?,
                None => break,
            }
        }
        loop {
            let spare = self.table.lock().take_spare_slab();
            if spare.is_none() {
                return Ok(());
            }
        }
    }

    /// Why a request has no lease, with the reason why a slab is missing.
    fn refusal(&self, refusal: Refusal, missing: Option<&MemoryError>) -> Refusal<MemoryError> {
        match (refusal, missing) {
            (Refusal::Unknown, _) => Refusal::Unknown,
            (Refusal::Busy, _) => Refusal::Busy,
            (Refusal::Full { capacity }, _) => Refusal::Full { capacity },
            (Refusal::Memory(()), Some(error)) => Refusal::Memory(error.clone()),
            (Refusal::Memory(()), None) => Refusal::Full { capacity: self.table.lock().capacity() },
        }
    }

    /// Logs once that a slab could not be made, until one can.
    fn note_missing_slab(&self, adjusted: Result<(), MemoryError>) {
        let was_missing = self.slab_is_missing.swap(adjusted.is_err(), Ordering::Relaxed);
        if let Err(error) = adjusted
            && !was_missing
        {
            log::warn!("another buffer of state slots was due, but {error}; sequences start as long as slots are free");
        }
    }

    fn publish(&self) {
        self.metrics.publish(|| self.snapshot());
    }

    /// The numbers of sequences and slots now.
    pub fn snapshot(&self) -> Snapshot {
        let table = self.table.lock();
        Snapshot {
            live: table.live(),
            capacity: table.capacity(),
            slots: table.slots(),
            slabs: table.slabs(),
            varying_bytes: self.budget.used(),
            copied_bytes: self.copied_bytes.load(Ordering::Relaxed),
            to_device_bytes: self.traffic.to_device.load(Ordering::Relaxed),
            to_host_bytes: self.traffic.to_host.load(Ordering::Relaxed),
            counts: table.counts(),
        }
    }
}

/// The memory of a slot that has been checked out. The state of a sequence that had the slot before may still be
/// written to it for the time of a copy.
fn wait_for(slab: &Arc<Slab>, slot: SlotId) -> Option<SlotMemory> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let since = Instant::now();
    loop {
        match slab.take(slot.index()) {
            None if since.elapsed() < PATIENCE => std::thread::yield_now(),
            memory => return memory,
        }
    }
}

/// What a lease has to say at its end.
struct Settlement {
    slot: SlotId,
    /// `None` if it has been given back.
    varying: Option<Vec<Varying>>,
    outcome: Outcome,
    end: bool,
}

impl Settlement {
    /// Gives the slot back. Returns it if the request has to be held.
    fn settle(self, table: &mut Table, now: Instant, released: &mut Vec<Request>) -> Option<SlotId> {
        if let Some(varying) = self.varying {
            table.keep(self.slot, varying);
        }
        table.settle(self.slot, self.outcome, self.end, now, released).then_some(self.slot)
    }
}

impl Lease {
    /// The slot that it holds.
    pub const fn slot(&self) -> SlotId {
        self.slot
    }

    /// Some of the slot's bytes (see [`SlotMemory::part`]): the states of fixed size before the request, unless they
    /// lie elsewhere (see [`crate::state::residency`]). None once it has been given back.
    pub fn part(&self, range: Range<usize>) -> Bytes<'_> {
        self.memory.as_ref().map_or(Bytes::Host(&[]), |memory| memory.part(range))
    }

    /// The slot, to bring a state there. `None` once it has been given back.
    pub const fn memory_mut(&mut self) -> Option<&mut SlotMemory> {
        self.memory.as_mut()
    }

    /// Gives back what holds the state: the row has its answer, and its state may be moved before it is settled.
    pub fn leave_state(&mut self) {
        self.memory = None;
        if !self.varying.is_empty() && !self.left {
            let varying = self.close_varying();
            self.sequences.give_contents(self.slot, varying);
            self.left = true;
        }
    }

    /// The states that vary in size, to write them.
    pub fn contents_mut(&mut self) -> &mut [Varying] {
        &mut self.varying
    }

    /// State number `number` of those that vary in size, before the request.
    pub fn varying(&self, number: usize) -> Option<&Varying> {
        self.varying.get(number)
    }

    /// Whether the sequence is over after this request, so that its state need not be kept.
    pub const fn ends(&self) -> bool {
        self.end
    }

    /// Whether nothing of the state after the request has been written.
    pub fn is_untouched(&self) -> bool {
        self.written == Written::Nothing
    }

    /// Makes room for the states that vary in size, of these sizes, so that [`Lease::advance`] can write them; if they
    /// are to stay elsewhere, only pays for them.
    pub fn reserve(&mut self, sizes: impl Iterator<Item = VaryingSize>, elsewhere: bool) -> Result<(), NoRoom> {
        for (number, size) in sizes.enumerate() {
            if self.varying.len() <= number {
                let device = self.sequences.device.as_ref().filter(|_| matches!(size, VaryingSize::Bytes(_)));
                self.varying.push(Varying::new(&self.sequences.budget, device));
            }
            if elsewhere {
                self.varying[number].reserve_elsewhere(size.bytes())?;
            } else {
                self.varying[number].reserve(size.bytes())?;
            }
        }
        Ok(())
    }

    /// Writes what lies in the slot and what varies in size, for which room has been made, of the state after the
    /// request. Until [`Lease::complete`] is called, the state counts as half-written.
    pub fn advance(&mut self, write: impl FnOnce(&mut SlotMemory, &mut [Varying])) {
        let Some(memory) = &mut self.memory else { return };
        self.written = Written::Partly;
        write(memory, &mut self.varying);
    }

    /// The sequence has the state after the request.
    pub const fn complete(&mut self) {
        self.written = Written::Wholly;
    }

    /// The state is lost: the sequence ends.
    pub const fn spoil(&mut self) {
        self.written = Written::Partly;
    }

    fn finish(mut self) -> Settlement {
        self.close()
    }

    fn close(&mut self) -> Settlement {
        self.settled = true;
        self.memory = None;
        let end = self.is_last();
        let outcome = if self.written == Written::Wholly { Outcome::Advanced } else { Outcome::Failed };
        let varying = (!self.left).then(|| self.close_varying());
        Settlement { slot: self.slot, varying, outcome, end }
    }

    /// Whether the sequence is over: by END, or because its state is lost.
    fn is_last(&self) -> bool {
        self.end || self.written == Written::Partly
    }

    fn close_varying(&mut self) -> Vec<Varying> {
        let mut varying = std::mem::take(&mut self.varying);
        if self.written != Written::Wholly {
            varying.iter_mut().for_each(Varying::release_reserve);
        }
        if self.is_last() {
            // Here, and not with the sequence: that is under the lock.
            varying.clear();
        }
        varying
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let of = self.close();
        // Nobody hands the request over, so it cannot be held.
        self.sequences.work(|table, released| {
            if let Some(slot) = of.settle(table, Instant::now(), released) {
                table.release_unheld(slot, released);
            }
        });
    }
}
