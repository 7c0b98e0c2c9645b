//! The leases of requests on the sequences of a site, and what a lease gives: the memory of a sequence's state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sequences::pool::SlotId;
use sequences::{Admission, Admitted, Finished, Good, Key, Outcome, Refusal, Shortage};
use serde::{Deserialize, Serialize};

use super::live::{Contents, LiveSequences, Table, Varying, VaryingSize};
use crate::memory::{Charge, MemoryError, NoRoom, Slab, SlotMemory};
use crate::panic;
use crate::triton::{Answer, Request};

/// What identifies a request among those of its sequence, so that it is known when it is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepeatKey {
    /// `sequence_step`: the steps before it.
    pub step: u64,
    /// `sequence_left`, if it has that.
    pub left: Option<u64>,
    pub ends: bool,
    /// A hash of whether it runs, the outputs that it names, and what it reads of the state and changes.
    pub wants: u32,
}

pub struct Answered {
    /// What it has done to its sequence, if that has a lane.
    pub finished: Option<Finished>,
    /// The steps of its sequence after it, if the sequence is kept in a store.
    pub steps: Option<u64>,
    /// Its answer is kept in the store, for this request.
    pub keeps: Option<RepeatKey>,
    /// It is an END that did not end its sequence: the sequence only leaves this server, and stays in the store.
    pub leaves: bool,
    pub lease: Option<Lease>,
    /// What its client is to be sent; `None` if it has been.
    pub answer: Option<Answer>,
    pub request: Request,
}

/// The rest of the work for a payload whose sequences have been settled. The fields are dropped in this order, which
/// sends the answers and releases the requests.
#[derive(Default)]
pub struct Settled {
    pub answers: Vec<Answer>,
    pub requests: Vec<Request>,
    /// What sequences that are over have left, to be dropped.
    pub leavings: Vec<Contents>,
    /// For [`LiveSequences::finish_payload`].
    pub releasing: Vec<(Key, SlotId)>,
}

/// A request's hold on its sequence: a slot and what became of the state in it. It is finished exactly once.
///
/// Dropped unfinished (an END, a panic on the way), it settles itself: an END or a lost state ends the sequence, a
/// START that did not succeed leaves none, else the sequence has the state after the request, or before it if that
/// failed. Its request cannot be held then; where it should have been, all sequences of its id end.
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
    pub slot: SlotMemory,
    /// The states that vary in size; none before the first one is kept.
    pub varying: Vec<Varying>,
}

impl LiveSequences {
    /// Admits the requests of a payload; see [`sequences::Sequences::admit`]. To be followed by
    /// [`LiveSequences::settle`]. `drop_state`: see [`LiveSequences::tick`].
    pub fn admit(
        self: &Arc<Self>,
        instance: u32,
        admissions: &[Admission],
        mut drop_state: impl FnMut(SlotId),
    ) -> Vec<Result<Lease, Refusal<MemoryError>>> {
        let mut missing = None;
        let admitted = loop {
            let admitted = self.work(|table| {
                let shortage = table.prepare(instance, admissions, Instant::now());
                // Sequences that are over drop their states before their slots are given out. A slab that cannot be
                // made is tried once.
                let (over, shortage) = (table.take_over(instance), shortage.filter(|_| missing.is_none()));
                if !over.is_empty() || shortage.is_some() {
                    return Err((over, shortage));
                }
                Ok(table.admit(instance, admissions, Instant::now()))
            });
            match admitted {
                Ok(admitted) => break admitted,
                Err((over, Some(Shortage { slab_slots, wanted }))) if over.is_empty() => {
                    missing = self.add_slab(slab_slots, wanted).err();
                }
                Err((over, _)) => self.end(&over, &mut drop_state),
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
    pub fn settle(&self, instance: u32, answered: Vec<Answered>) -> Option<Instant> {
        let Settled { answers, requests, leavings, releasing } = self.finish(answered);
        // One by one, so that a panic holds back no other answer.
        answers.into_iter().for_each(|answer| _ = panic::catch_and_log(|| drop(answer)));
        requests.into_iter().for_each(|request| _ = panic::catch_and_log(|| drop(request)));
        panic::catch_and_log(|| drop(leavings));
        self.finish_payload(instance, releasing);
        // Asked last: this payload may have released requests, and `next_tick` counts what follows them.
        self.table.lock().next_tick(instance, Instant::now())
    }

    /// Settles the sequences of a payload. Returns what the caller has to send and release. It also has to call
    /// [`LiveSequences::finish_payload`], after the release if there were held requests (`oldest` only).
    pub fn finish(&self, answered: Vec<Answered>) -> Settled {
        let (mut answers, mut requests) = (Vec::with_capacity(answered.len()), Vec::with_capacity(answered.len()));
        let mut table = self.table.lock();
        let now = Instant::now();
        for Answered { lease, answer, request, .. } in answered {
            answers.extend(answer);
            // A panic must not release the request: the table is locked.
            let finish = |mut lease: Lease| panic::catch_and_log(|| lease.finish(&mut table, now)).flatten();
            requests.extend(match lease.and_then(finish) {
                Some(slot) => table.hold(slot, request),
                None => Some(request),
            });
        }
        let (leavings, released) = (table.take_leavings(), table.take_released());
        drop(table);
        let (released, releasing): (Vec<_>, Vec<_>) = released.into_iter().unzip();
        requests.extend(released);
        Settled { answers, requests, leavings, releasing }
    }

    /// What each of these sequences keeps; `None` without a slot, and for a sequence that is over. To be given back
    /// before the sequence's next request is admitted.
    pub fn state_memories(self: &Arc<Self>, slots: impl Iterator<Item = Option<SlotId>>) -> Vec<Option<StateMemory>> {
        // Taken under the lock: once it is given up, the sequence may end and another have the slot.
        // If something panics, these are given back after the lock.
        let mut memories = Vec::with_capacity(slots.size_hint().0);
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
}

/// Waits until the memory of a slot is free: another instance may still be copying the state of the sequence that had
/// the slot before. Returns false if that takes too long.
fn becomes_free(slab: &Arc<Slab>, slot: SlotId) -> bool {
    const PATIENCE: Duration = Duration::from_secs(10);
    let mut since = None;
    while slab.take(slot.index()).is_none() {
        if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

impl Lease {
    pub const fn slot(&self) -> SlotId {
        self.slot
    }

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

    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    pub const fn advance(&mut self) {
        self.outcome = Outcome::Advanced;
    }

    /// Notes that the state from before the request has been restored.
    pub const fn undo(&mut self) {
        self.outcome = Outcome::Failed;
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

    pub const fn end(&mut self) {
        self.end = true;
    }

    /// The state is lost, or is being written over: unless [`Lease::advance`] follows, the sequence ends.
    pub const fn spoil(&mut self) {
        self.outcome = Outcome::Lost;
    }

    /// Gives the slot back. Returns it if the request has to be held.
    fn finish(&mut self, table: &mut Table, now: Instant) -> Option<SlotId> {
        self.is_finished = true;
        table.settle(self.slot, self.outcome, self.end, now).then_some(self.slot)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // Cloned, because the closure borrows the whole lease.
        let sequences = self.sequences.clone();
        // The request is not here, so it cannot be held.
        sequences.work(|table| {
            if let Some(slot) = self.finish(table, Instant::now()) {
                table.release_unheld(slot);
            }
        });
    }
}

impl StateMemory {
    pub const fn id(&self) -> SlotId {
        self.id
    }

    /// Makes room for the states that vary in size, of these sizes; if they are to stay in the tensors of their batch,
    /// only pays for them.
    pub fn reserve(&mut self, sizes: impl Iterator<Item = VaryingSize>, in_batch: bool) -> Result<(), NoRoom> {
        for (number, size) in sizes.enumerate() {
            let varying = self.varying_of(number, size);
            if in_batch {
                varying.reserve_shared(size.bytes())?;
            } else {
                varying.reserve(size.bytes())?;
            }
        }
        Ok(())
    }

    /// Pays for states of these sizes with a charge that covers them, so that [`StateMemory::reserve`] needs nothing of
    /// what all sequences may have.
    pub fn pay(&mut self, sizes: impl Iterator<Item = VaryingSize>, mut charge: Charge) {
        for (number, size) in sizes.enumerate() {
            self.varying_of(number, size).pay(size.bytes(), &mut charge);
        }
    }

    fn varying_of(&mut self, number: usize, size: VaryingSize) -> &mut Varying {
        if self.varying.len() <= number {
            let device = self.sequences.device.as_ref().filter(|_| matches!(size, VaryingSize::Bytes(_)));
            self.varying.push(Varying::new(&self.sequences.budget, device));
        }
        &mut self.varying[number]
    }
}

impl Drop for StateMemory {
    fn drop(&mut self) {
        if self.varying.is_empty() {
            return;
        }
        self.varying.iter_mut().for_each(Varying::release_reserve);
        let varying = std::mem::take(&mut self.varying);
        // Before `slot` is given back: whoever takes it next must find these.
        self.sequences.work(|table| match table.contents_mut(self.id) {
            Some(contents) => contents.varying = varying,
            // The sequence has ended. Its states are handed on, to be freed after the lock is released.
            None => table.leave(Contents { varying, ..Contents::default() }),
        });
    }
}
