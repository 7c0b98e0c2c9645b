//! The table of live sequences.

mod chains;
mod expiry;
mod lanes;

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use hashlink::{LinkedHashMap, LinkedHashSet};

use super::id::Key;
use super::watermark::Watermark;
use crate::state::pool::{AcquireError, MakeSlab, SlotId, SlotLimits, SlotPool};
use chains::{Chain, Look};

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
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal<E> {
    /// Not a START, and no such sequence is live.
    Unknown,
    /// A START, and every slot that may exist holds a sequence.
    Full {
        /// Slots in all.
        capacity: usize,
    },
    /// A START, and the memory for another slab cannot be had.
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

enum Phase<H> {
    /// A request of it is being worked on.
    InFlight { start: bool },
    /// It waits for its next request.
    Waiting,
    /// Its START has been answered and is not released.
    Held(H),
    /// Its START is being released.
    Releasing,
}

/// Whether another START of its id has come since an incarnation's own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Superseded {
    No,
    /// One that came so soon that it may have been sent before its own.
    Soon,
    /// One that was sent after its own.
    Later,
}

struct Record<C, H> {
    key: Key,
    /// `None` while they are checked out.
    contents: Option<C>,
    phase: Phase<H>,
    /// Its last request is released when the requests of this payload are, at the latest.
    released_by: u64,
    /// When its last request was released, those of all payloads before this one had been.
    released_after: u64,
    superseded: Superseded,
    /// Its START was released when the requests of this payload were, at the earliest.
    born: u64,
    /// It has no state: its START failed, or its requests cannot be told from those of another incarnation.
    failed: bool,
}

/// What the table knows of one instance.
struct Instance {
    watermark: Watermark,
    /// Chains to look at when the watermark passes a payload.
    looks: BinaryHeap<Look>,
    /// Chains to look at at a time, because two STARTs may have overtaken each other.
    late_looks: VecDeque<(Instant, Key)>,
    /// Sequences that wait for a request, and since when.
    idle: LinkedHashMap<SlotId, Instant>,
    /// Those whose time is over, until it is certain that core has no request of them.
    overdue: LinkedHashSet<SlotId>,
}

/// All live sequences of a model, with their slots.
///
/// `S` is the memory of a slab, `C` what a sequence keeps beside its slot, `H` a request that is held, `E` why a slab
/// cannot be made.
pub struct Sequences<S, C, H, E> {
    policy: Policy,
    pool: SlotPool<S, Record<C, H>, E>,
    /// The incarnations of each id, with `oldest`.
    chains: HashMap<Key, Chain>,
    /// Chains with an incarnation that has a slot.
    chains_with_slots: usize,
    /// The sequence in each lane of each instance, with `direct`.
    lanes: HashMap<(u32, u32), SlotId>,
    instances: HashMap<u32, Instance>,
    counts: Counts,
    /// What sequences that are over kept beside their slots.
    leavings: Vec<C>,
    /// Number of held requests.
    held: usize,
    /// Ids of held requests that are being released.
    releasing: Vec<Key>,
}

impl<S: Clone, C: Default, H, E> Sequences<S, C, H, E> {
    /// An empty table; the first slab is made now.
    pub fn new(policy: Policy, limits: SlotLimits, make_slab: MakeSlab<S, E>) -> Result<Self, E> {
        Ok(Self {
            policy,
            pool: SlotPool::new(limits, make_slab)?,
            chains: HashMap::new(),
            chains_with_slots: 0,
            lanes: HashMap::new(),
            instances: HashMap::new(),
            counts: Counts::default(),
            leavings: Vec::new(),
            held: 0,
            releasing: Vec::new(),
        })
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
    ) -> Vec<Result<Admitted<S, C>, Refusal<E>>> {
        self.instance(instance, now).watermark.begin(requests, now);
        let mut slots: Vec<_> = admissions.iter().map(|_| Err(Refusal::Unknown)).collect();
        // A payload has no order, and a request that is not a START belongs to an incarnation whose START came before.
        for start in [false, true] {
            for (admission, slot) in admissions.iter().zip(&mut slots).filter(|(admission, _)| admission.start == start)
            {
                *slot = match (start, admission.key.lane) {
                    (true, _) => self.start(admission, now, released),
                    (false, Some(_)) => self.find_in_lane(&admission.key),
                    (false, None) => self.find_in_chain(admission, released),
                };
            }
        }
        self.conclude(instance, now, released);
        slots.into_iter().map(|slot| slot.and_then(|slot| self.check_out(slot))).collect()
    }

    /// Memory of the slab that a slot is in; `None` if its sequence is over.
    pub fn memory(&self, slot: SlotId) -> Option<S> {
        self.pool.memory(slot)
    }

    /// Keeps what a sequence has beside its slot until its next request is admitted; before [`Sequences::settle`].
    pub fn keep(&mut self, slot: SlotId, contents: C) {
        match self.pool.record_mut(slot) {
            Some(record) => record.contents = Some(contents),
            None => self.leavings.push(contents),
        }
    }

    /// Takes what [`Sequences::keep`] keeps, to be kept again; `None` if the sequence is over. Panics if a request has
    /// it.
    pub fn take_contents(&mut self, slot: SlotId) -> Option<C> {
        let record = self.pool.record_mut(slot)?;
        assert!(record.contents.is_some(), "what a sequence keeps is with its request");
        record.contents.take()
    }

    /// What sequences that are over have left; drop it without holding any lock, it may be large.
    pub fn take_leavings(&mut self) -> Vec<C> {
        std::mem::take(&mut self.leavings)
    }

    /// Takes back the slot of an admitted request. Returns whether the request must be kept with [`Sequences::hold`]
    /// instead of being released.
    ///
    /// A sequence is over when its request carried END, whatever became of it, and when its START failed. The request
    /// is to be released next: what core sends from then on is the sequence's next.
    pub fn settle(&mut self, slot: SlotId, outcome: Outcome, end: bool, now: Instant, released: &mut Vec<H>) -> bool {
        let Some(record) = self.pool.record_mut(slot) else { return false };
        let started = matches!(record.phase, Phase::InFlight { start: true });
        record.phase = Phase::Waiting;
        record.failed |= started && outcome == Outcome::Failed;
        let (key, failed) = (record.key.clone(), record.failed);
        let instance = self.instance(key.instance, now);
        let releasing = instance.watermark.releasing();
        let Some(record) = self.pool.record_mut(slot) else { return false };
        record.released_after = releasing;
        if key.lane.is_some() {
            if end || failed {
                self.counts.ended += 1;
                self.remove_from_lane(slot);
            } else {
                self.wait(slot, now);
            }
            return false;
        }
        self.settle_in_chain(slot, &key, end, now, released)
    }

    /// Keeps a request unreleased until its sequence is the only one of its id that core can send requests for.
    pub fn hold(&mut self, slot: SlotId, request: H, released: &mut Vec<H>) {
        match self.pool.record_mut(slot) {
            Some(record) => {
                record.phase = Phase::Held(request);
                self.held += 1;
            }
            None => released.push(request),
        }
    }

    /// The instance has released all requests of its oldest payload that has not finished.
    pub fn finish_payload(&mut self, instance: u32, now: Instant, released: &mut Vec<H>) -> Result<(), E> {
        self.instance(instance, now).watermark.finish(now);
        self.conclude(instance, now, released);
        self.pool.adjust()
    }

    /// Drops what lay idle for too long, and concludes what a quiet instance proves.
    pub fn tick(&mut self, now: Instant, released: &mut Vec<H>) -> Result<(), E> {
        let instances: Vec<u32> = self.instances.keys().copied().collect();
        for instance in instances {
            self.instance(instance, now).watermark.rest(now);
            self.conclude(instance, now, released);
            self.expire(instance, now, released);
        }
        self.pool.adjust()
    }

    /// Whether a request is held: [`Sequences::next_tick`] may have come nearer.
    pub const fn is_holding(&self) -> bool {
        self.held > 0
    }

    /// Ends every sequence of an instance that goes away.
    pub fn retire_instance(&mut self, instance: u32, released: &mut Vec<H>) {
        let in_lanes = self.lanes.iter().filter(|((of, _), _)| *of == instance).map(|(_, slot)| *slot);
        let in_chains = self.chains.iter().filter(|(key, _)| key.instance == instance);
        let in_chains = in_chains.flat_map(|(_, chain)| chain.incarnations.iter().copied());
        let gone: Vec<SlotId> = in_lanes.chain(in_chains).collect();
        for slot in gone {
            self.counts.ended += 1;
            if let Some(held) = self.free(slot) {
                released.push(held);
            }
        }
        self.lanes.retain(|(of, _), _| *of != instance);
        self.chains.retain(|key, chain| {
            let stays = key.instance != instance;
            self.chains_with_slots -= usize::from(!stays && !chain.incarnations.is_empty());
            stays
        });
        self.instances.remove(&instance);
    }

    /// What happened so far.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Live sequences.
    pub const fn live(&self) -> usize {
        self.pool.live()
    }

    /// Slots that exist.
    pub const fn slots(&self) -> usize {
        self.pool.slots()
    }

    /// Slabs that exist.
    pub const fn slabs(&self) -> usize {
        self.pool.slabs()
    }

    /// Most slots that may hold sequences of different ids.
    pub const fn capacity(&self) -> usize {
        self.pool.capacity()
    }

    fn instance(&mut self, instance: u32, now: Instant) -> &mut Instance {
        let Policy { queue_requests, quiet, .. } = self.policy;
        self.instances.entry(instance).or_insert_with(|| Instance {
            watermark: Watermark::new(queue_requests, quiet, now),
            looks: BinaryHeap::new(),
            late_looks: VecDeque::new(),
            idle: LinkedHashMap::new(),
            overdue: LinkedHashSet::new(),
        })
    }

    /// The payload that has begun last on an instance.
    fn payload(&self, instance: u32) -> u64 {
        self.instances.get(&instance).map_or(0, |instance| instance.watermark.begun())
    }

    /// What has been passed on an instance; see [`Watermark::passed`].
    fn passed(&self, instance: u32) -> u64 {
        self.instances.get(&instance).map_or(0, |instance| instance.watermark.passed())
    }

    fn check_out(&mut self, slot: SlotId) -> Result<Admitted<S, C>, Refusal<E>> {
        let memory = self.pool.memory(slot).ok_or(Refusal::Unknown)?;
        let record = self.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        Ok(Admitted { slot, memory, contents: record.contents.take().unwrap_or_default() })
    }

    fn start(&mut self, admission: &Admission, now: Instant, released: &mut Vec<H>) -> Result<SlotId, Refusal<E>> {
        let key = &admission.key;
        let supersedes = match key.lane {
            Some(lane) => {
                self.clear_lane(key.instance, lane);
                None
            }
            None => self.prepare_chain(key, now, released),
        };
        let slot = match self.acquire(key, supersedes.is_some(), now, released) {
            Ok(slot) => slot,
            Err(refusal) => {
                self.counts.rejected += 1;
                if key.lane.is_none() {
                    self.refuse_start_in_chain(admission, released);
                }
                return Err(refusal);
            }
        };
        match key.lane {
            Some(lane) => {
                self.lanes.insert((key.instance, lane), slot);
            }
            None => self.append_to_chain(key, slot, supersedes),
        }
        self.counts.started += 1;
        Ok(slot)
    }

    /// A slot for a START. One that `follows` a live incarnation of its id takes a slot of the reserve. So does one that
    /// finds the capacity used up although core has a place for it.
    fn acquire(&mut self, key: &Key, follows: bool, now: Instant, released: &mut Vec<H>) -> Result<SlotId, Refusal<E>> {
        let capacity = self.pool.capacity();
        if !follows && self.chains_with_slots + self.lanes.len() >= capacity {
            if !self.policy.has_place_for_all {
                return Err(Refusal::Full { capacity });
            }
            self.drop_longest_idle(key.instance, now, released);
        }
        let payload = self.payload(key.instance);
        let record = Record {
            key: key.clone(),
            contents: None,
            phase: Phase::InFlight { start: true },
            released_by: payload,
            released_after: 0,
            superseded: Superseded::No,
            born: payload,
            failed: false,
        };
        self.pool.acquire(record).map_err(|error| match error {
            AcquireError::Full => Refusal::Full { capacity },
            AcquireError::Memory(error) => Refusal::Memory(error),
        })
    }

    /// A request comes for the sequence in this slot.
    fn receive(&mut self, slot: SlotId) -> Result<SlotId, Refusal<E>> {
        let record = self.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        let Some(instance) = self.instances.get_mut(&record.key.instance) else { return Err(Refusal::Unknown) };
        if !matches!(record.phase, Phase::Waiting | Phase::Releasing) {
            return Err(Refusal::Busy);
        }
        instance.watermark.follow(record.released_after);
        record.phase = Phase::InFlight { start: false };
        record.released_by = instance.watermark.begun();
        instance.idle.remove(&slot);
        instance.overdue.remove(&slot);
        Ok(slot)
    }

    /// The sequence in this slot waits for its next request.
    fn wait(&mut self, slot: SlotId, now: Instant) {
        let Some(record) = self.pool.record_mut(slot) else { return };
        record.phase = Phase::Waiting;
        if let Some(instance) = self.instances.get_mut(&record.key.instance) {
            instance.idle.insert(slot, now);
        }
    }

    /// Frees a slot, and returns the request that was held with it. The caller takes it out of its lane or chain.
    fn free(&mut self, slot: SlotId) -> Option<H> {
        let record = self.pool.release(slot)?;
        if let Some(instance) = self.instances.get_mut(&record.key.instance) {
            instance.idle.remove(&slot);
            instance.overdue.remove(&slot);
        }
        self.leavings.extend(record.contents);
        let Phase::Held(held) = record.phase else { return None };
        self.held -= 1;
        Some(held)
    }

    fn is_waiting(&self, slot: SlotId) -> bool {
        self.pool.record(slot).is_some_and(|record| matches!(record.phase, Phase::Waiting))
    }
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
