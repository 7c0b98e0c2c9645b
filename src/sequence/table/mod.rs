//! The table of live sequences.

mod chains;
mod lanes;
mod records;

use std::time::{Duration, Instant};

use super::id::Key;
use crate::state::pool::{SlotId, SlotLimits, SlotPool};
use chains::Chains;
use lanes::Lanes;
use records::{Phase, Records};

/// When a sequence is over without its END, and how many may live.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// A sequence expires when it has had no request for this long.
    pub idle_limit: Duration,
    /// Core has certainly dropped a sequence that has had no request for this long.
    pub dropped_after: Duration,
    /// Core hands on what it has queued when an instance has had nothing to do for this long (the queue delay and a
    /// margin).
    pub quiet: Duration,
    /// A sequence whose START may have been overtaken counts as started over when it has had no request for this long.
    pub rest: Duration,
    /// A request's lane names its incarnation (`direct`).
    pub by_lane: bool,
    /// Most requests that core queues for one instance: one for each of its slots. With `direct`, each payload takes
    /// the next request of every slot, so 1.
    pub queue_requests: usize,
    /// The capacity is the number of sequences that core admits, so a START proves that there is room for it.
    pub has_place_for_all: bool,
}

/// What a request asks of the table.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Whose request it is.
    pub key: Key,
    /// It starts the sequence.
    pub start: bool,
    /// It ends the sequence.
    pub end: bool,
}

/// A request's sequence, found or made; its slot is the caller's until [`Sequences::settle`].
#[derive(Debug)]
pub struct Admitted<S, C> {
    /// The slot that holds the sequence's state.
    pub slot: SlotId,
    /// Memory of the slab that the slot is in.
    pub memory: S,
    /// What the sequence keeps beside its slot; see [`Sequences::keep`].
    pub contents: C,
}

/// Why a request has no sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal<E = ()> {
    /// Not a START, and no such sequence is live.
    Unknown,
    /// A START, and every slot that may exist holds a sequence.
    Full {
        /// Slots in all.
        capacity: usize,
    },
    /// A START, and there is no slab with a free slot: why the slab could not be made.
    Memory(E),
    /// Another request of the sequence is being worked on; core promises that this does not happen.
    Busy,
}

/// What became of a request's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The slot holds the state after the request.
    Advanced,
    /// The request failed: the slot holds the state before it (none, if the request was the START).
    Failed,
}

/// Monotonic counts of what happened to sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// START requests that got a slot.
    pub started: u64,
    /// Sequences over by END, by a failed START, or replaced by another START.
    pub ended: u64,
    /// Sequences dropped because they lay idle.
    pub expired: u64,
    /// START requests that got no slot.
    pub rejected: u64,
}

/// Which incarnation a request belongs to.
trait Incarnations<S, C, H>: Send {
    /// The incarnation of a request that is not a START.
    fn find(&mut self, records: &mut Records<S, C, H>, admission: &Admission) -> Result<SlotId, Refusal>;

    /// A slot for the incarnation of a START.
    fn start(&mut self, records: &mut Records<S, C, H>, admission: &Admission, now: Instant)
    -> Result<SlotId, Refusal>;

    /// Whether a START of this id follows an incarnation that is live.
    fn is_live(&self, key: &Key) -> bool;

    /// A request has been worked on. Returns whether it must be held.
    fn settle(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key, end: bool, now: Instant) -> bool;

    /// Frees the slot of an incarnation that is over.
    fn remove(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key);

    /// How much of the capacity is used.
    fn places(&self) -> usize;

    /// Forgets the incarnations of an instance, and returns their slots.
    fn retire_instance(&mut self, instance: u32) -> Vec<SlotId>;

    /// Ends what the watermark of an instance proves to be over.
    fn conclude(&mut self, _records: &mut Records<S, C, H>, _instance: u32, _now: Instant) {}

    /// When [`Self::conclude`] may have something to do although nothing is passed.
    fn next_look(&self) -> Option<Instant> {
        None
    }

    /// A request that was to be held has been released.
    fn release_unheld(&mut self, _records: &mut Records<S, C, H>, _key: &Key) {}

    /// See [`Sequences::take_releasing`].
    fn take_releasing(&mut self) -> Vec<Key> {
        Vec::new()
    }

    /// The held request of this id has been released.
    fn has_been_released(&mut self, _records: &mut Records<S, C, H>, _key: &Key, _now: Instant) {}

    /// Ids that are known, and what is to be looked at or released.
    #[cfg(test)]
    fn known(&self) -> (usize, usize);

    /// Makes room for another incarnation where the capacity is used up although core has a place for it.
    fn make_room(&mut self, records: &mut Records<S, C, H>, instance: u32, now: Instant) -> Result<(), Refusal> {
        let capacity = records.pool.capacity();
        if self.places() < capacity {
            return Ok(());
        }
        if !records.policy.has_place_for_all {
            return Err(Refusal::Full { capacity });
        }
        let longest_idle = records.droppable(instance, now).next();
        if let Some(slot) = longest_idle {
            self.expire(records, slot);
        }
        Ok(())
    }

    /// Ends an incarnation that has lain idle.
    fn expire(&mut self, records: &mut Records<S, C, H>, slot: SlotId) {
        records.counts.expired += 1;
        if let Some(key) = records.pool.record(slot).map(|record| record.key.clone()) {
            self.remove(records, slot, &key);
        }
    }
}

/// All live sequences of a model, with their slots.
///
/// `S` is the memory of a slab, `C` what a sequence keeps beside its slot, `H` a request that is held.
pub struct Sequences<S, C, H> {
    records: Records<S, C, H>,
    incarnations: Box<dyn Incarnations<S, C, H>>,
}

impl<S: Clone + 'static, C: Default + 'static, H: 'static> Sequences<S, C, H> {
    /// An empty table, without slabs.
    pub fn new(policy: Policy, limits: SlotLimits) -> Self {
        let incarnations: Box<dyn Incarnations<S, C, H>> =
            if policy.by_lane { Box::<Lanes>::default() } else { Box::<Chains>::default() };
        Self { records: Records::new(policy, SlotPool::new(limits)), incarnations }
    }

    /// How many slots the slab has that these requests need; `None` if they need none, or if no more slots may exist.
    /// Slabs take long to make and to drop, so the caller does both without holding any lock.
    pub fn slab_needed(&self, admissions: &[Admission], now: Instant) -> Option<usize> {
        let Self { records, incarnations } = self;
        let starts = || admissions.iter().filter(|admission| admission.start);
        let following = starts().filter(|start| incarnations.is_live(&start.key)).count();
        let new = starts().count() - following;
        let within = new.min(records.pool.capacity().saturating_sub(incarnations.places()));
        // Beyond the capacity, a START takes the slot of a sequence that core has dropped, or one of the reserve.
        let beyond = match admissions.first() {
            Some(first) if records.policy.has_place_for_all => {
                new - within - records.droppable(first.key.instance, now).take(new - within).count()
            }
            _ => 0,
        };
        records.pool.slab_needed(following + within + beyond)
    }

    /// How many slots the slab has that is to be added by the thresholds of [`SlotLimits`]; `None` if none is.
    pub fn slab_due(&self) -> Option<usize> {
        self.records.pool.slab_due()
    }

    /// Adds a slab of so many slots. One that is not due any more is given back.
    pub fn add_slab(&mut self, memory: S, slots: usize) -> Option<S> {
        self.records.pool.add_slab(memory, slots)
    }

    /// Whether a slab is to be added or given back by the thresholds.
    pub fn needs_adjustment(&self) -> bool {
        self.records.pool.needs_adjustment()
    }

    /// Takes a slab out that is to be given back.
    pub fn take_spare_slab(&mut self) -> Option<S> {
        self.records.pool.take_spare_slab()
    }

    /// Admits the requests of a payload: finds the sequence of each, or makes it for a START, and checks its slot out.
    /// `requests` counts all requests of the payload, also those that ask nothing of the table.
    ///
    /// `released` takes the held requests that are no longer to be held. Drop them without holding any lock, then call
    /// [`Sequences::have_been_released`] with what [`Sequences::take_releasing`] gives.
    pub fn admit(
        &mut self,
        instance: u32,
        requests: usize,
        admissions: &[Admission],
        now: Instant,
        released: &mut Vec<H>,
    ) -> Vec<Result<Admitted<S, C>, Refusal>> {
        let Self { records, incarnations } = self;
        records.instance(instance, now).watermark.begin(requests, now);
        let mut slots: Vec<_> = admissions.iter().map(|_| Err(Refusal::Unknown)).collect();
        // A payload has no order, and a request that is not a START belongs to an incarnation whose START came before.
        for (admission, slot) in admissions.iter().zip(&mut slots).filter(|(admission, _)| !admission.start) {
            *slot = incarnations.find(records, admission);
        }
        for (admission, slot) in admissions.iter().zip(&mut slots).filter(|(admission, _)| admission.start) {
            *slot = incarnations.start(records, admission, now);
            records.counts.started += u64::from(slot.is_ok());
            records.counts.rejected += u64::from(slot.is_err());
        }
        incarnations.conclude(records, instance, now);
        released.append(&mut records.released);
        slots.into_iter().map(|slot| slot.and_then(|slot| self.check_out(slot))).collect()
    }

    /// Memory of the slab that a slot is in; `None` if its sequence is over.
    pub fn memory(&self, slot: SlotId) -> Option<S> {
        self.records.pool.memory(slot)
    }

    /// Keeps what a sequence has beside its slot until its next request is admitted; before [`Sequences::settle`].
    pub fn keep(&mut self, slot: SlotId, contents: C) {
        match self.records.pool.record_mut(slot) {
            Some(record) => record.contents = Some(contents),
            None => self.records.leavings.push(contents),
        }
    }

    /// Takes what [`Sequences::keep`] keeps, to be kept again; `None` if the sequence is over. Panics if a request has
    /// it.
    pub fn take_contents(&mut self, slot: SlotId) -> Option<C> {
        let record = self.records.pool.record_mut(slot)?;
        assert!(record.contents.is_some(), "what a sequence keeps is with its request");
        record.contents.take()
    }

    /// What sequences that are over have left; drop it without holding any lock, it may be large.
    pub fn take_leavings(&mut self) -> Vec<C> {
        std::mem::take(&mut self.records.leavings)
    }

    /// Takes back the slot of an admitted request. Returns whether the request must be kept with [`Sequences::hold`]
    /// instead of being released.
    ///
    /// A sequence is over when its request carried END, whatever became of it, and when its START failed. The request
    /// is to be released next: what core sends from then on is the sequence's next.
    pub fn settle(&mut self, slot: SlotId, outcome: Outcome, end: bool, now: Instant, released: &mut Vec<H>) -> bool {
        let Self { records, incarnations } = self;
        let Some(record) = records.pool.record_mut(slot) else { return false };
        let started = matches!(record.phase, Phase::InFlight { start: true });
        record.phase = Phase::Waiting;
        record.failed |= started && outcome == Outcome::Failed;
        let key = record.key.clone();
        let releasing = records.instance(key.instance, now).watermark.releasing();
        if let Some(record) = records.pool.record_mut(slot) {
            record.released_after = releasing;
        }
        let must_be_held = incarnations.settle(records, slot, &key, end, now);
        released.append(&mut records.released);
        must_be_held
    }

    /// Keeps a request unreleased until its sequence is the only one of its id that core can send requests for.
    pub fn hold(&mut self, slot: SlotId, request: H, released: &mut Vec<H>) {
        match self.records.pool.record_mut(slot) {
            Some(record) => {
                record.phase = Phase::Held(request);
                self.records.held += 1;
            }
            None => released.push(request),
        }
    }

    /// A request that was to be held has been released. From now on core may send requests of any incarnation of the id,
    /// so none is served.
    pub fn release_unheld(&mut self, slot: SlotId, released: &mut Vec<H>) {
        if let Some(key) = self.records.pool.record(slot).map(|record| record.key.clone()) {
            self.incarnations.release_unheld(&mut self.records, &key);
            released.append(&mut self.records.released);
        }
    }

    /// The ids of the held requests that are being released; to be followed by [`Sequences::have_been_released`].
    pub fn take_releasing(&mut self) -> Vec<Key> {
        self.incarnations.take_releasing()
    }

    /// Held requests of these ids have been released: from now on core can have what follows them.
    pub fn have_been_released(&mut self, keys: Vec<Key>, now: Instant) {
        for key in keys {
            self.incarnations.has_been_released(&mut self.records, &key, now);
        }
    }

    /// The instance has released all requests of its oldest payload that has not finished.
    pub fn finish_payload(&mut self, instance: u32, now: Instant, released: &mut Vec<H>) {
        self.records.instance(instance, now).watermark.finish(now);
        self.incarnations.conclude(&mut self.records, instance, now);
        released.append(&mut self.records.released);
    }

    /// Drops what lay idle for too long, and concludes what a quiet instance proves.
    pub fn tick(&mut self, now: Instant, released: &mut Vec<H>) {
        let Self { records, incarnations } = self;
        let instances: Vec<u32> = records.instances.keys().copied().collect();
        for instance in instances {
            records.instance(instance, now).watermark.rest(now);
            incarnations.conclude(records, instance, now);
            while let Some(slot) = records.next_expired(instance, now) {
                incarnations.expire(records, slot);
            }
        }
        released.append(&mut records.released);
    }

    /// When [`Sequences::tick`] may have something to do again.
    pub fn next_tick(&self, now: Instant) -> Instant {
        let next = self.records.next_tick(now);
        self.incarnations.next_look().map_or(next, |look| look.min(next))
    }

    /// Whether a request is held: [`Sequences::next_tick`] may have come nearer.
    pub const fn is_holding(&self) -> bool {
        self.records.held > 0
    }

    /// Ends every sequence of an instance that goes away.
    pub fn retire_instance(&mut self, instance: u32, released: &mut Vec<H>) {
        for slot in self.incarnations.retire_instance(instance) {
            self.records.counts.ended += 1;
            self.records.free(slot);
        }
        self.records.instances.remove(&instance);
        released.append(&mut self.records.released);
    }

    /// What happened so far.
    pub const fn counts(&self) -> Counts {
        self.records.counts
    }

    /// Live sequences.
    pub const fn live(&self) -> usize {
        self.records.pool.live()
    }

    /// Slots that exist.
    pub const fn slots(&self) -> usize {
        self.records.pool.slots()
    }

    /// Slabs that exist.
    pub const fn slabs(&self) -> usize {
        self.records.pool.slabs()
    }

    /// Most slots that may hold sequences of different ids.
    pub const fn capacity(&self) -> usize {
        self.records.pool.capacity()
    }

    fn check_out(&mut self, slot: SlotId) -> Result<Admitted<S, C>, Refusal> {
        let memory = self.records.pool.memory(slot).ok_or(Refusal::Unknown)?;
        let record = self.records.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        Ok(Admitted { slot, memory, contents: record.contents.take().unwrap_or_default() })
    }
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
