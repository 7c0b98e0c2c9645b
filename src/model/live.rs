//! The live sequences of a site (see [`super::site`]) behind their lock, and the leases on their slots.
//!
//! Rules: the lock is held for table work only, never while tensors are copied, a model runs, or a request is released
//! (that calls into core, which takes locks of its own).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_rows::{Device, DeviceError, QueueReport};
use parking_lot::Mutex;
use rows::tensor::Gap;
use sequences::pool::{SlotId, SlotLimits};
use sequences::scheduler::Over;
use sequences::{Admission, Admitted, Finished, Good, Key, Outcome, Policy, Refusal, SequenceId, Sequences, Shortage};

use super::metrics::{Ran, SequenceMetrics, Snapshot};
use crate::error::Reason;
use crate::memory::{Budget, Charge, MemoryError, NoRoom, Slab, SlotMemory, SlotSpec};
use crate::panic;
use crate::session::MadeTensor;
use crate::triton::{Answer, HeldInput, Request};

/// The growing states of a batch, in the tensors that a run made. The sequences of the batch share them; they are freed
/// with the last of these.
pub struct Grown {
    /// The tensor of each growing state.
    pub tensors: Vec<MadeTensor>,
    /// Rows of each tensor.
    pub rows: usize,
    /// The padding of each row; empty if no row has any.
    pub gaps: Vec<Gap>,
}

impl Grown {
    /// The padding of a row.
    pub fn gap(&self, position: usize) -> Gap {
        self.gaps.get(position).copied().unwrap_or_default()
    }
}

/// What a sequence keeps besides its states.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// The inputs that its requests may leave out, by the position among the inputs of requests.
    pub held: Vec<Option<HeldInput>>,
    /// How many of its runs have changed the state. Counted for models with `state_api`, `held_inputs` or counters.
    pub steps: u64,
    /// What is counted for generated inputs, in the order of [`Binding::counters`](crate::binding::Binding::counters);
    /// empty for zeros. Unlike `steps`, it begins again when all states are reset.
    pub counts: Vec<u64>,
}

/// What a sequence keeps outside its slot.
#[derive(Default)]
struct Contents {
    varying: Vec<Varying>,
    extras: Extras,
}

/// A state that varies in size, which may be in the tensors that a run made.
pub type Varying = crate::memory::Varying<Grown>;

type Table = Sequences<Arc<Slab>, Contents, Request>;

/// All live sequences of a site.
pub struct LiveSequences {
    table: Mutex<Table>,
    /// What a slab is made of.
    slot: SlotSpec,
    /// Where the states are, if not on the host.
    device: Option<Arc<Device>>,
    /// What the varying states and the held inputs of all sequences may have.
    budget: Arc<Budget>,
    /// What the instances' queues to the device have done.
    queues: Arc<QueueReport>,
    /// Bytes of states that were copied so far.
    copied_bytes: AtomicU64,
    /// Requests that failed so far, in the order of [`Reason::LABELS`].
    failed: [AtomicU64; Reason::LABELS.len()],
    /// What the scheduler of the backend last said of its sequences.
    queued: Mutex<QueueNumbers>,
    /// The last slab that was due could not be made.
    slab_is_missing: AtomicBool,
    metrics: SequenceMetrics,
}

/// Sequences and requests in the queues of the backend's scheduler.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueNumbers {
    /// Sequences that are parked.
    pub parked: usize,
    /// STARTs that wait for a place.
    pub waiting: usize,
    /// Requests that wait, these STARTs among them.
    pub requests: usize,
}

/// Calls `work`, and logs a panic in it.
fn log_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    panic::catch(work).inspect_err(|panic| log::error!("{panic}")).ok()
}

/// A request whose answer has been made.
pub struct Answered {
    /// What it has done to its sequence, if that has a lane.
    pub finished: Option<Finished>,
    /// Its hold on its sequence.
    pub lease: Option<Lease>,
    /// What its client is to be sent; `None` if it has been.
    pub answer: Option<Answer>,
    /// The request.
    pub request: Request,
}

/// The rest of the work for a payload whose sequences have been settled, in this order.
pub struct Settled {
    /// To be sent, by dropping them.
    pub answers: Vec<Answer>,
    /// To be released, by dropping them.
    pub requests: Vec<Request>,
    /// What sequences that are over have left, to be dropped.
    pub leavings: Leavings,
    /// For [`LiveSequences::finish_payload`].
    pub releasing: Vec<(Key, SlotId)>,
}

/// What sequences that are over have left. Dropping it may take long.
#[derive(Default)]
pub struct Leavings(#[expect(dead_code, reason = "it is only dropped")] Vec<Contents>);

/// A request's hold on its sequence: a slot and what became of the state in it. It is finished exactly once.
///
/// Dropped unfinished (an END, a panic on the way), it settles itself: an END or a lost state ends the sequence, a START
/// that did not succeed leaves none, else the sequence has the state after the request, or before it if that failed.
/// Its request cannot be held then; where it should have been, all sequences of its id end.
pub struct Lease {
    sequences: Arc<LiveSequences>,
    slot: SlotId,
    good: Good,
    end: bool,
    outcome: Outcome,
    is_finished: bool,
}

/// Exclusive access to what a sequence keeps: its slot, and its states of varying size beside it. Given back when
/// dropped.
pub struct StateMemory {
    sequences: Arc<LiveSequences>,
    id: SlotId,
    /// The slot's bytes.
    pub slot: SlotMemory,
    /// The states that vary in size; none before the first one is kept.
    pub varying: Vec<Varying>,
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
        queues: Arc<QueueReport>,
        metrics: SequenceMetrics,
    ) -> Result<Self, MemoryError> {
        let device = slot.device.as_ref().map(|(device, _)| device.clone());
        let table = Mutex::new(Sequences::new(policy, limits));
        let (copied_bytes, slab_is_missing) = (AtomicU64::new(0), AtomicBool::new(false));
        let (failed, queued) = (Default::default(), Mutex::default());
        let sequences =
            Self { table, slot, device, budget, queues, copied_bytes, failed, queued, slab_is_missing, metrics };
        sequences.add_due_slabs()?;
        sequences.publish();
        Ok(sequences)
    }

    /// Sequences without a model, for the tests of what is below it.
    #[cfg(test)]
    pub fn for_tests(slot: SlotSpec, capacity: usize, bytes: usize) -> Arc<Self> {
        let forever = Duration::from_secs(3600);
        let policy = Policy {
            idle_limit: forever,
            dropped_after: forever,
            quiet: forever,
            by_lane: false,
            queue_requests: capacity,
            has_place_for_all: true,
        };
        let metrics = SequenceMetrics::new("test", 1, None);
        let limits = SlotLimits::all_at_once(capacity);
        Arc::new(Self::new(policy, limits, slot, Budget::new(bytes), Arc::default(), metrics).unwrap())
    }

    /// Core has handed over a payload; see [`Sequences::begin_payload`].
    pub fn begin_payload(&self, instance: u32) {
        self.table.lock().begin_payload(instance, Instant::now());
    }

    /// Admits the requests of a payload; see [`Sequences::admit`]. To be followed by [`LiveSequences::settle`]. `let_go`:
    /// see [`LiveSequences::tick`].
    pub fn admit(
        self: &Arc<Self>,
        instance: u32,
        admissions: &[Admission],
        mut let_go: impl FnMut(SlotId),
    ) -> Vec<Result<Lease, Refusal<MemoryError>>> {
        let mut missing = None;
        let admitted = loop {
            let admitted = self.work(|table, released| {
                let shortage = table.prepare(instance, admissions, Instant::now(), released);
                let (over, shortage) = (table.take_over(instance), shortage.filter(|_| missing.is_none()));
                if !over.is_empty() || shortage.is_some() {
                    return Err((over, shortage));
                }
                Ok(table.admit(instance, admissions, Instant::now(), released))
            });
            match admitted {
                Ok(admitted) => break admitted,
                Err((over, Some(Shortage { slab_slots, wanted }))) if over.is_empty() => {
                    missing = self.add_slab(slab_slots, wanted).err();
                }
                Err((over, _)) => self.end(&over, &mut let_go),
            }
        };
        let lease = |(admitted, request): (Result<Admitted<Arc<Slab>>, Refusal>, &Admission)| {
            let Admitted { slot, memory: slab, good } =
                admitted.map_err(|refusal| self.refusal(refusal, missing.as_ref()))?;
            let (sequences, end, outcome) = (self.clone(), request.end, Outcome::Failed);
            let lease = Lease { sequences, slot, good, end, outcome, is_finished: false };
            if becomes_free(&slab, slot) { Ok(lease) } else { Err(Refusal::Busy) }
        };
        admitted.into_iter().zip(admissions).map(lease).collect()
    }

    /// Settles the sequences of a payload, then sends its answers, then releases its requests (or keeps one, see
    /// [`sequences`]). Sequences come first because a client that has the answer to an END may count on the slot.
    /// Payloads of an instance are settled in the order in which they were admitted.
    /// Returns when [`LiveSequences::tick`] may have something to do.
    pub fn settle(&self, instance: u32, answered: Vec<Answered>) -> Instant {
        let Settled { answers, requests, leavings, releasing } = self.finish(answered);
        answers.into_iter().for_each(|answer| _ = log_panic(|| drop(answer)));
        requests.into_iter().for_each(|request| _ = log_panic(|| drop(request)));
        log_panic(|| drop(leavings));
        self.finish_payload(instance, releasing)
    }

    /// Settles the sequences of a payload. Returns what the caller has to send and release. It also has to call
    /// [`LiveSequences::finish_payload`], after the release if there were held requests (`oldest` only).
    pub fn finish(&self, answered: Vec<Answered>) -> Settled {
        let (mut rows, mut answers) = (Vec::with_capacity(answered.len()), Vec::with_capacity(answered.len()));
        for Answered { lease, answer, request, .. } in answered {
            rows.push((lease, Some(request)));
            answers.extend(answer);
        }
        let mut released = Vec::new();
        let left = log_panic(|| self.finish_leases(&mut rows, &mut released));
        // After a panic, the table still has them.
        let (leavings, releasing) = left.unwrap_or_else(|| self.take_left(&mut self.table.lock()));
        let requests = rows.into_iter().filter_map(|(_, request)| request).chain(released).collect();
        Settled { answers, requests, leavings, releasing }
    }

    /// Ends a payload of an instance, after the held requests of the sequences `releasing` have been released. Returns when
    /// [`LiveSequences::tick`] may have something to do.
    pub fn finish_payload(&self, instance: u32, releasing: Vec<(Key, SlotId)>) -> Instant {
        let now = Instant::now();
        let (next_tick, needs_slabs) = self.work(|table, released| {
            table.have_been_released(releasing, now);
            table.finish_payload(instance, now, released);
            (table.next_tick(instance, now), table.needs_adjustment())
        });
        if needs_slabs {
            self.adjust_slabs();
        }
        self.publish();
        next_tick
    }

    /// Ends sequences of an instance that have no request. `let_go`: see [`LiveSequences::tick`].
    pub fn end_lanes(&self, instance: u32, over: &[Over], let_go: impl FnMut(SlotId)) {
        let over = self.work(|table, _| {
            over.iter().for_each(|of| table.end_lane(instance, of.lane, of.expired));
            table.take_over(instance)
        });
        self.end(&over, let_go);
        self.publish();
    }

    /// Ends sequences of an instance that are over since its last turn: those that have been idle for too long, and those
    /// that an idle instance proves to be over. `let_go` takes from the instance what it has of the state of one; then its
    /// slot is free. Returns when there may be something to do again.
    pub fn tick(&self, instance: u32, let_go: impl FnMut(SlotId)) -> Instant {
        let over = self.work(|table, released| {
            table.tick(instance, Instant::now(), released);
            table.take_over(instance)
        });
        self.end(&over, let_go);
        self.table.lock().next_tick(instance, Instant::now())
    }

    fn end(&self, over: &[SlotId], mut let_go: impl FnMut(SlotId)) {
        over.iter().for_each(|&slot| _ = log_panic(|| let_go(slot)));
        self.work(|table, _| over.iter().for_each(|&slot| table.free(slot)));
    }

    /// Finishes the leases of a payload, and holds the requests that must be held. Returns what sequences that are over
    /// have left, and whose held requests are in `released`.
    fn finish_leases(
        &self,
        rows: &mut [(Option<Lease>, Option<Request>)],
        released: &mut Vec<Request>,
    ) -> (Leavings, Vec<(Key, SlotId)>) {
        let mut table = self.table.lock();
        for (lease, request) in rows {
            if let Some(slot) = lease.as_mut().and_then(|lease| lease.finish(&mut table, released))
                && let Some(request) = request.take()
            {
                table.hold(slot, request, released);
            }
        }
        self.take_left(&mut table)
    }

    /// Takes what sequences that are over have left, and whose held requests are being released.
    fn take_left(&self, table: &mut Table) -> (Leavings, Vec<(Key, SlotId)>) {
        (Leavings(table.take_leavings()), table.take_releasing())
    }

    /// Works on the table under its lock. What that leaves, requests to be released and what ended sequences had, is
    /// dropped without it.
    fn work<R>(&self, work: impl FnOnce(&mut Table, &mut Vec<Request>) -> R) -> R {
        let mut released = Vec::new();
        let mut table = self.table.lock();
        let done = work(&mut table, &mut released);
        let (leavings, releasing) = self.take_left(&mut table);
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

    /// What each of these sequences keeps; `None` without a slot, and for a sequence that is over. To be given back
    /// before the sequence's next request is admitted.
    pub fn state_memories(self: &Arc<Self>, slots: impl Iterator<Item = Option<SlotId>>) -> Vec<Option<StateMemory>> {
        // Taken under the lock: once it is given up, the sequence may end and another have the slot.
        // If something panics, these are given back after the lock.
        let mut memories = Vec::new();
        let mut table = self.table.lock();
        let mut memory = |id: SlotId| {
            let slot = table.memory(id)?.take(id.index());
            // Better no batch than one that forgets a state.
            let slot = slot.expect("only the store takes the memory of a slot");
            let varying = table.contents_mut(id).map(|contents| std::mem::take(&mut contents.varying));
            let varying = varying.unwrap_or_default();
            Some(StateMemory { sequences: self.clone(), id, slot, varying })
        };
        slots.for_each(|slot| memories.push(slot.and_then(&mut memory)));
        drop(table);
        memories
    }

    /// What a sequence keeps besides its states; `None` if it is over.
    pub fn extras(&self, slot: SlotId) -> Option<Extras> {
        self.table.lock().contents_mut(slot).map(|contents| contents.extras.clone())
    }

    /// What is counted for each of these sequences; empty for zeros, and for a sequence that is over.
    pub fn counts(&self, slots: impl Iterator<Item = Option<SlotId>>) -> Vec<Vec<u64>> {
        let mut table = self.table.lock();
        let mut counts = |slot: SlotId| table.contents_mut(slot).map(|contents| contents.extras.counts.clone());
        slots.map(|slot| slot.and_then(&mut counts).unwrap_or_default()).collect()
    }

    /// Changes what a sequence keeps besides its states, unless it is over. The lock is released before the caller drops what
    /// `change` returns.
    pub fn change_extras<T>(&self, slot: SlotId, change: impl FnOnce(&mut Extras) -> T) -> Option<T> {
        self.table.lock().contents_mut(slot).map(|contents| change(&mut contents.extras))
    }

    /// Takes so many bytes of what states and held inputs may have together.
    pub fn charge(&self, bytes: usize) -> Result<Charge, NoRoom> {
        Charge::new(&self.budget, bytes)
    }

    /// The slot of the live sequence in a lane of an instance.
    pub fn slot_in_lane(&self, instance: u32, lane: u32) -> Option<SlotId> {
        self.table.lock().slot_in_lane(instance, lane)
    }

    /// The slot of the live sequence with this id on an instance.
    pub fn slot_of(&self, instance: u32, id: &SequenceId) -> Option<SlotId> {
        self.table.lock().slot_of(instance, id)
    }

    /// Counts bytes of states that were copied.
    pub fn count_copied(&self, bytes: usize) {
        if bytes > 0 {
            self.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Counts requests that were refused before they came to the table, `rejected` of them because every place is taken.
    pub fn count_refused(&self, reasons: impl Iterator<Item = Reason>, rejected: usize) {
        reasons.for_each(|reason| self.count_failed(reason));
        if rejected > 0 {
            self.table.lock().count_rejected(rejected);
        }
        self.publish();
    }

    /// Counts a request that failed.
    pub fn count_failed(&self, reason: Reason) {
        self.failed[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes what is in the queues of the backend's scheduler. Returns whether it has changed: then
    /// [`LiveSequences::publish`] shows it.
    pub fn note_queue(&self, now: QueueNumbers) -> bool {
        std::mem::replace(&mut *self.queued.lock(), now) != now
    }

    /// Observes a run.
    pub fn ran(&self, ran: Ran) {
        self.metrics.ran(ran);
    }

    /// Observes how long a request has waited in the backend's queue.
    pub fn waited(&self, wait: Duration) {
        self.metrics.waited(wait);
    }

    /// Ends the sequences of an instance that goes away.
    pub fn retire_instance(&self, instance: u32) {
        self.work(|table, released| table.retire_instance(instance, released));
        self.publish();
    }

    /// Makes a slab of so many slots without holding the lock, and adds it.
    fn add_slab(&self, slots: usize, wanted: usize) -> Result<(), MemoryError> {
        let slab = Arc::new(Slab::new(slots, &self.slot)?);
        let not_due = self.table.lock().add_slab(slab, slots, wanted);
        drop(not_due);
        Ok(())
    }

    /// Adds the slabs that are due, and gives back those that are spare. Logs once that a slab could not be made, until one
    /// can.
    pub fn adjust_slabs(&self) {
        let adjusted = self.add_due_slabs();
        loop {
            // Its memory is freed without the lock.
            let spare = self.table.lock().take_spare_slab();
            if spare.is_none() {
                break;
            }
        }
        let was_missing = self.slab_is_missing.swap(adjusted.is_err(), Ordering::Relaxed);
        if let Err(error) = adjusted
            && !was_missing
        {
            log::warn!("another buffer of state slots was due, but {error}; sequences start as long as slots are free");
        }
    }

    fn add_due_slabs(&self) -> Result<(), MemoryError> {
        loop {
            let due = self.table.lock().slab_due();
            let Some(slots) = due else { return Ok(()) };
            self.add_slab(slots, 0)?;
        }
    }

    /// Why a request has no lease, with the reason why a slab is missing.
    fn refusal(&self, refusal: Refusal, missing: Option<&MemoryError>) -> Refusal<MemoryError> {
        match (refusal, missing) {
            (Refusal::Unknown, _) => Refusal::Unknown,
            (Refusal::Ambiguous, _) => Refusal::Ambiguous,
            (Refusal::Busy, _) => Refusal::Busy,
            (Refusal::Full { capacity }, _) => Refusal::Full { capacity },
            (Refusal::Memory(()), Some(error)) => Refusal::Memory(error.clone()),
            (Refusal::Memory(()), None) => Refusal::Full { capacity: self.table.lock().capacity() },
        }
    }

    /// Shows the numbers of now in the metrics.
    pub fn publish(&self) {
        self.metrics.publish(|| {
            let mut table = self.table.lock();
            let lives = table.take_lives();
            (self.snapshot_of(&table), lives)
        });
    }

    /// Why requests are answered with errors until the model is loaded again or the server restarts: a call to the device
    /// has failed.
    pub fn device_failure(&self) -> Option<&DeviceError> {
        self.queues.failure.get().or_else(|| self.lost_device())
    }

    /// Why this process can't use the device any more.
    pub fn lost_device(&self) -> Option<&DeviceError> {
        self.device.as_ref().and_then(|device| device.lost())
    }

    /// The numbers of sequences and slots now.
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot_of(&self.table.lock())
    }

    fn snapshot_of(&self, table: &Table) -> Snapshot {
        let QueueNumbers { parked, waiting, requests } = *self.queued.lock();
        Snapshot {
            live: table.live(),
            capacity: table.capacity(),
            slots: table.slots(),
            slabs: table.slabs(),
            slot_bytes: self.slot.slot_bytes,
            varying_bytes: self.budget.used(),
            copied_bytes: self.copied_bytes.load(Ordering::Relaxed),
            to_device_bytes: self.queues.to_device.load(Ordering::Relaxed),
            to_host_bytes: self.queues.to_host.load(Ordering::Relaxed),
            counts: table.counts(),
            parked,
            waiting,
            queued: requests,
            device_failed: self.device_failure().is_some(),
            failed: self.failed.each_ref().map(|count| count.load(Ordering::Relaxed)),
        }
    }
}

/// Waits until the memory of a slot is free: another instance may still be copying the state of the sequence that had
/// the slot before. Returns false if that takes too long.
fn becomes_free(slab: &Arc<Slab>, slot: SlotId) -> bool {
    const PATIENCE: Duration = Duration::from_secs(10);
    let since = Instant::now();
    while slab.take(slot.index()).is_none() {
        if since.elapsed() > PATIENCE {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

impl Lease {
    /// The slot that it holds.
    pub const fn slot(&self) -> SlotId {
        self.slot
    }

    /// The good requests of the sequence before this one.
    pub const fn good(&self) -> Good {
        self.good
    }

    /// Whether the sequence is over after this request, so that its state need not be kept.
    pub const fn ends(&self) -> bool {
        self.end
    }

    /// Whether nothing of the state after the request has been written.
    pub const fn is_untouched(&self) -> bool {
        matches!(self.outcome, Outcome::Failed | Outcome::RunFailed)
    }

    /// What the request has done to the state of the sequence so far.
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// The sequence has the state after the request.
    pub const fn advance(&mut self) {
        self.outcome = Outcome::Advanced;
    }

    /// The run has failed for this request alone.
    pub fn fail_run(&mut self) {
        if self.is_untouched() {
            self.outcome = Outcome::RunFailed;
        }
    }

    /// Keeps the sequence until [`Lease::end`], although the request ends it. Returns whether the request ends it.
    pub const fn postpone_end(&mut self) -> bool {
        std::mem::replace(&mut self.end, false)
    }

    /// The request ends the sequence.
    pub const fn end(&mut self) {
        self.end = true;
    }

    /// The state is lost, or is being written over: unless [`Lease::advance`] follows, the sequence ends.
    pub const fn spoil(&mut self) {
        self.outcome = Outcome::Lost;
    }

    /// Gives the slot back. Returns it if the request has to be held.
    fn finish(&mut self, table: &mut Table, released: &mut Vec<Request>) -> Option<SlotId> {
        self.is_finished = true;
        table.settle(self.slot, self.outcome, self.end, Instant::now(), released).then_some(self.slot)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let sequences = self.sequences.clone();
        // The request is not here, so it cannot be held.
        sequences.work(|table, released| {
            if let Some(slot) = self.finish(table, released) {
                table.release_unheld(slot, released);
            }
        });
    }
}

impl StateMemory {
    /// Whose it is.
    pub const fn id(&self) -> SlotId {
        self.id
    }

    /// Makes room for the states that vary in size, of these sizes; if they are to stay in the tensors of their batch,
    /// only pays for them.
    pub fn reserve(&mut self, sizes: impl Iterator<Item = VaryingSize>, in_batch: bool) -> Result<(), NoRoom> {
        for (number, size) in sizes.enumerate() {
            if self.varying.len() <= number {
                let device = self.sequences.device.as_ref().filter(|_| matches!(size, VaryingSize::Bytes(_)));
                self.varying.push(Varying::new(&self.sequences.budget, device));
            }
            if in_batch {
                self.varying[number].reserve_shared(size.bytes())?;
            } else {
                self.varying[number].reserve(size.bytes())?;
            }
        }
        Ok(())
    }
}

impl Drop for StateMemory {
    fn drop(&mut self) {
        if self.varying.is_empty() {
            return;
        }
        self.varying.iter_mut().for_each(Varying::release_reserve);
        let varying = std::mem::take(&mut self.varying);
        self.sequences.work(|table, _| match table.contents_mut(self.id) {
            Some(contents) => contents.varying = varying,
            None => table.leave(Contents { varying, extras: Extras::default() }),
        });
    }
}
