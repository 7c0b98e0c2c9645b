//! The table of live sequences.

mod chains;
mod incarnations;
mod records;

use std::time::{Duration, Instant};

use super::id::Outcome;
use super::id::{Key, SequenceId};
use crate::pool::{SlotId, SlotLimits, SlotPool};
use chains::Chains;
use incarnations::{Incarnations, Lanes};
pub use records::{Admission, Counts, Good, IdleLimits, Life, Policy, Refusal};
use records::{Phase, Records};

/// The STARTs of a payload need more slots than are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    pub slab_slots: usize,
    /// Slots that must be free.
    pub wanted: usize,
}

/// The sequence of an admitted request. The caller has its slot until [`Sequences::settle`].
#[derive(Debug)]
pub struct Admitted<S> {
    pub slot: SlotId,
    pub memory: S,
    /// Its good requests before this one.
    pub good: Good,
}

/// All live sequences of a site (the host, or a GPU), with their slots.
///
/// `S` is the memory of a slab, `C` the contents of a sequence that are not in its slot, and `H` a held request.
pub struct Sequences<S, C, H> {
    records: Records<S, C, H>,
    incarnations: Box<dyn Incarnations<S, C, H>>,
}

impl<S: Clone + 'static, C: Default + 'static, H: 'static> Sequences<S, C, H> {
    pub fn new(policy: Policy, limits: SlotLimits) -> Self {
        let incarnations: Box<dyn Incarnations<S, C, H>> =
            if policy.by_lane { Box::<Lanes>::default() } else { Box::<Chains>::default() };
        Self { records: Records::new(policy, SlotPool::new(limits)), incarnations }
    }

    pub fn slab_due(&self) -> Option<usize> {
        self.records.pool.slab_due()
    }

    pub fn add_slab(&mut self, memory: S, slots: usize, wanted: usize) -> Option<S> {
        self.records.pool.add_slab(memory, slots, wanted)
    }

    pub fn needs_adjustment(&self) -> bool {
        self.records.pool.needs_adjustment()
    }

    pub fn take_spare_slab(&mut self) -> Option<S> {
        self.records.pool.take_spare_slab()
    }

    /// Core has handed over a payload. To be called before anything else is done with it: from now on, the time in
    /// which the instance sends nothing to the table is no pause of core.
    pub fn begin_payload(&mut self, instance: u32, now: Instant) {
        self.records.instance(instance, now).watermark.begin();
    }

    /// Makes room for the STARTs among these requests: ends those that they replace, and sequences that core has
    /// dropped, if the capacity is used up. The caller drops their states ([`Sequences::take_over`]) and calls again.
    /// Returns what is missing if the STARTs need more slots than are free and another slab may exist. A slab takes
    /// long to make, so the caller does it without holding any lock, adds it, and calls again before
    /// [`Sequences::admit`]. Without it, STARTs that find no slot are refused.
    pub fn prepare(&mut self, instance: u32, admissions: &[Admission], now: Instant) -> Option<Shortage> {
        let Self { records, incarnations, .. } = self;
        let starts = || admissions.iter().filter(|admission| admission.start).map(|admission| &admission.key);
        // First, because the sequences that they replace then no longer count against the capacity.
        starts().for_each(|key| incarnations.replace(records, key));
        let capacity = records.pool.capacity();
        if records.policy.has_place_for_all {
            let new = starts().filter(|key| !incarnations.starts_over(key));
            let most_used = capacity.saturating_sub(new.count());
            records.note_dropped(instance, now);
            while incarnations.used_capacity() > most_used
                && let Some(slot) = records.longest_dropped(instance, Duration::ZERO, now)
            {
                incarnations.end(records, slot, true);
            }
        }
        let has_room = records.check_room(incarnations.used_capacity()).is_ok();
        let wanted = starts().filter(|key| has_room || incarnations.starts_over(key)).count();
        let slab_slots = records.pool.next_slab_slots();
        (wanted > records.pool.free() && slab_slots > 0).then_some(Shortage { slab_slots, wanted })
    }

    /// Admits the requests of a payload: finds the sequence of each, or begins it for a START, and lends its slot to
    /// the caller.
    ///
    /// This and every other call may leave something for [`Sequences::take_released`] and [`Sequences::take_leavings`].
    pub fn admit(
        &mut self,
        instance: u32,
        admissions: &[Admission],
        now: Instant,
    ) -> Vec<Result<Admitted<S>, Refusal>> {
        let Self { records, incarnations, .. } = self;
        let of = records.instance(instance, now);
        of.watermark.arrive(admissions.len());
        if admissions.iter().any(|admission| admission.end) {
            of.last_end = of.watermark.begun;
        }
        // The requests of a payload have no order. A request that is not a START belongs to an incarnation that started
        // before this payload.
        let find = |admission: &Admission| (!admission.start).then(|| incarnations.find(records, admission));
        let found: Vec<_> = admissions.iter().map(find).collect();
        let mut start = |admission: &Admission| {
            let started = incarnations.start(records, admission, now);
            records.counts.started += u64::from(started.is_ok());
            let has_no_slot = matches!(started, Err(Refusal::Full { .. } | Refusal::Memory(())));
            records.counts.rejected += u64::from(has_no_slot);
            started
        };
        let slots =
            found.into_iter().zip(admissions).map(|(found, admission)| found.unwrap_or_else(|| start(admission)));
        let slots: Vec<_> = slots.collect();
        incarnations.conclude(records, instance);
        let pool = &self.records.pool;
        let admitted = |slot| {
            let (memory, record) = pool.memory(slot).zip(pool.record(slot)).ok_or(Refusal::Unknown)?;
            Ok(Admitted { slot, memory, good: record.good })
        };
        slots.into_iter().map(|slot| slot.and_then(admitted)).collect()
    }

    /// Memory of the slab that a slot is in; `None` if its sequence is over.
    pub fn memory(&self, slot: SlotId) -> Option<S> {
        self.records.pool.memory(slot)
    }

    /// The contents of a sequence that are not in its slot. `None` if it is over.
    pub fn contents_mut(&mut self, slot: SlotId) -> Option<&mut C> {
        Some(&mut self.records.pool.record_mut(slot)?.contents)
    }

    /// Leaves contents of a sequence that is over, until [`Sequences::take_leavings`].
    pub fn leave(&mut self, contents: C) {
        self.records.leavings.push(contents);
    }

    pub fn slot_in_lane(&self, instance: u32, lane: u32) -> Option<SlotId> {
        self.incarnations.in_lane(instance, lane)
    }

    /// The slot of the sequence with this id that began last on an instance; `None` if its START has not succeeded yet,
    /// so that the slot has no state of it.
    pub fn slot_of(&self, instance: u32, id: &SequenceId) -> Option<SlotId> {
        let slot = self.incarnations.with_id(&self.records, instance, id)?;
        let record = self.records.pool.record(slot)?;
        (!record.failed && !matches!(record.phase, Phase::InFlight { start: true })).then_some(slot)
    }

    /// Takes the contents of sequences that are over. Drop them without holding any lock, because they may be large.
    pub fn take_leavings(&mut self) -> Vec<C> {
        std::mem::take(&mut self.records.leavings)
    }

    /// Takes back the slot of an admitted request. If the request has END, its instance has dropped the state. Returns
    /// whether the request must be held ([`Sequences::hold`]). Otherwise the caller must release it next, and core can
    /// then send the sequence's next request.
    pub fn settle(&mut self, slot: SlotId, outcome: Outcome, end: bool, now: Instant) -> bool {
        let Self { records, incarnations, .. } = self;
        let Some(record) = records.pool.record_mut(slot) else { return false };
        let started = matches!(record.phase, Phase::InFlight { start: true });
        record.phase = Phase::Waiting;
        match outcome {
            // A START was counted when it got its slot.
            Outcome::Advanced => record.good.requests = record.good.requests.saturating_add(u32::from(!started)),
            Outcome::RunFailed => record.good = Good { requests: 0, since: now },
            Outcome::Failed | Outcome::Lost => {}
        }
        // A sequence is over after an END, even a failed one, after a START that failed, and when its state is lost.
        record.failed |= end || outcome == Outcome::Lost || (started && outcome != Outcome::Advanced);
        let key = record.key.clone();
        let releasing = records.instance(key.instance, now).watermark.releasing();
        if let Some(record) = records.pool.record_mut(slot) {
            record.released_after = releasing;
        }
        incarnations.settle(records, slot, &key, end, now)
    }

    /// Holds a request until its incarnation is at the front of its chain. Returns it if its sequence is over.
    pub fn hold(&mut self, slot: SlotId, request: H) -> Option<H> {
        let Some(record) = self.records.pool.record_mut(slot) else { return Some(request) };
        record.phase = Phase::Held(request);
        None
    }

    /// Tells the table that a request that should have been held has been released. From now on, requests of the id may
    /// belong to any of its incarnations, so all of these end.
    pub fn release_unheld(&mut self, slot: SlotId) {
        if let Some(key) = self.records.pool.record(slot).map(|record| record.key.clone()) {
            self.incarnations.release_unheld(&mut self.records, &key);
        }
    }

    /// Takes the held requests that must be released now, each with its sequence. Drop them without holding any lock,
    /// then call [`Sequences::have_been_released`] with the sequences.
    pub fn take_released(&mut self) -> Vec<(H, (Key, SlotId))> {
        std::mem::take(&mut self.records.released)
    }

    /// Tells the table that the held requests of these sequences have been released. From now on, core can have the
    /// requests that follow them.
    pub fn have_been_released(&mut self, releasing: Vec<(Key, SlotId)>, now: Instant) {
        for (key, slot) in releasing {
            self.incarnations.has_been_released(&mut self.records, &key, slot, now);
        }
    }

    /// Finishes the instance's oldest payload that has not finished: all its requests have been released.
    pub fn finish_payload(&mut self, instance: u32, now: Instant) {
        self.records.instance(instance, now).watermark.finish(now);
        self.incarnations.conclude(&mut self.records, instance);
    }

    /// A look of an instance's clock, the only one that may find that the instance is idle. Ends sequences that have
    /// been idle for too long, and incarnations that an idle instance proves to be over.
    pub fn tick(&mut self, instance: u32, now: Instant) {
        let Self { records, incarnations, .. } = self;
        records.instance(instance, now).watermark.look(now);
        incarnations.conclude(records, instance);
        records.note_dropped(instance, now);
        let Some(IdleLimits { limit, .. }) = records.policy.idle else { return };
        while let Some(slot) = records.longest_dropped(instance, limit, now) {
            incarnations.end(records, slot, true);
        }
    }

    /// When [`Sequences::tick`] or [`Sequences::take_over`] may have something to do for an instance.
    pub fn next_tick(&self, instance: u32, now: Instant) -> Option<Instant> {
        self.records.next_tick(instance, now, !self.records.policy.by_lane)
    }

    /// Ends the sequence in a lane. No request of it may be in flight.
    pub fn end_lane(&mut self, instance: u32, lane: u32, expired: bool) {
        if let Some(slot) = self.incarnations.in_lane(instance, lane) {
            self.incarnations.end(&mut self.records, slot, expired);
        }
    }

    /// Takes the slots of the sequences of an instance that are over, so that the instance drops their states. Nothing
    /// else finds these sequences any more. Their slots are in use until [`Sequences::free`].
    pub fn take_over(&mut self, instance: u32) -> Vec<SlotId> {
        self.records.instances.get_mut(&instance).map(|of| std::mem::take(&mut of.over)).unwrap_or_default()
    }

    /// Frees the slot of a sequence that is over and whose state is dropped.
    pub fn free(&mut self, slot: SlotId) {
        self.records.free(slot);
    }

    pub fn retire_instance(&mut self, instance: u32) {
        for slot in self.incarnations.retire_instance(instance) {
            self.records.end(slot, false);
        }
        self.take_over(instance).into_iter().for_each(|slot| self.records.free(slot));
        self.records.instances.remove(&instance);
    }

    /// Counts STARTs that were refused before they came here.
    pub const fn count_rejected(&mut self, starts: usize) {
        self.records.counts.rejected += starts as u64;
    }

    /// Takes the lives of the sequences that are over since the last call.
    pub fn take_lives(&mut self) -> Vec<Life> {
        std::mem::take(&mut self.records.lives)
    }

    pub const fn counts(&self) -> Counts {
        self.records.counts
    }

    pub fn live(&self) -> usize {
        self.records.pool.live - self.records.instances.values().map(|of| of.over.len()).sum::<usize>()
    }

    pub const fn slots(&self) -> usize {
        self.records.pool.slots
    }

    pub const fn slabs(&self) -> usize {
        self.records.pool.slabs()
    }

    pub const fn capacity(&self) -> usize {
        self.records.pool.capacity()
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub mod model_tests;
#[cfg(test)]
mod tests;
