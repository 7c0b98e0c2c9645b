//! The table of live sequences.

mod turns;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hashlink::{LinkedHashMap, LinkedHashSet};
use smallvec::SmallVec;

use super::contest::{Chain, Contest, Evidence, SHORT_PAYLOADS};
use super::id::Key;
use crate::state::pool::{AcquireError, MakeSlab, SlotId, SlotLimits, SlotPool};

/// When a sequence is over without its END. All counts and times are bounds on what core can still have in its queue.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Idle sequences are dropped after this time.
    pub idle_limit: Duration,
    /// An instance that has run nothing for this long has nothing in core's queue (the queue delay and a margin).
    pub quiet: Duration,
    /// One that has run nothing for this long most likely has nothing there: several such pauses prove it.
    pub pause: Duration,
    /// Core queues at most this many requests for one instance: one of each of its slots.
    pub queue_requests: usize,
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
    /// The sequence has a request in the works already; core promises that this does not happen.
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

enum Phase {
    InFlight { start: bool },
    Idle,
}

struct Record<C, H> {
    key: Key,
    /// `None` while they are checked out.
    contents: Option<C>,
    phase: Phase,
    /// What its instance had seen when it started.
    born: Evidence,
    /// What its instance had seen when its last request was settled.
    settled: Evidence,
    held: Option<H>,
    /// Its START failed, but core may have more of it, which must not reach an earlier incarnation.
    failed: bool,
}

#[derive(Clone, Copy)]
struct Activity {
    /// Payloads that have begun and not finished.
    in_works: usize,
    idle_since: Instant,
    /// Of all payloads that have begun.
    payloads: Evidence,
    /// Of these, and of having been quiet.
    total: Evidence,
}

impl Activity {
    /// Whether it has run nothing for so long that core has sent what it had.
    fn is_quiet(&self, now: Instant, quiet: Duration) -> bool {
        self.in_works == 0 && now >= self.idle_since + quiet
    }
}

/// All live sequences of a model, with their slots.
///
/// `S` is the memory of a slab, `C` what a sequence keeps beside its slot, `H` a request that is held, `E` why a slab
/// cannot be made.
pub struct Sequences<S, C, H, E> {
    policy: Policy,
    pool: SlotPool<S, Record<C, H>, E>,
    chains: HashMap<Key, Chain>,
    /// Ids whose chains have a contest.
    contested: LinkedHashSet<Key>,
    /// Who was started last in each lane of each instance.
    lanes: HashMap<(u32, u32), SlotId>,
    /// Incarnations that are over unless a request comes for them: the first to go when slots run out.
    doubtful: LinkedHashSet<SlotId>,
    /// Those of each instance that wait for a request, and since when.
    idle: HashMap<u32, LinkedHashMap<SlotId, Instant>>,
    instances: HashMap<u32, Activity>,
    /// Time of the payload in the works.
    now: Instant,
    counts: Counts,
    /// What sequences that are over kept beside their slots.
    leavings: Vec<C>,
    /// Ids of held requests that have been let go and may not be released yet, with their number: until then core cannot
    /// send what follows them.
    letting_go: HashMap<Key, usize>,
    /// Those since [`Sequences::take_let_go`].
    let_go: Vec<Key>,
}

impl<S: Clone, C: Default, H, E> Sequences<S, C, H, E> {
    /// An empty table; the first slab is made now.
    pub fn new(policy: Policy, limits: SlotLimits, make_slab: MakeSlab<S, E>) -> Result<Self, E> {
        Ok(Self {
            policy,
            pool: SlotPool::new(limits, make_slab)?,
            chains: HashMap::new(),
            contested: LinkedHashSet::new(),
            lanes: HashMap::new(),
            doubtful: LinkedHashSet::new(),
            idle: HashMap::new(),
            instances: HashMap::new(),
            now: Instant::now(),
            counts: Counts::default(),
            leavings: Vec::new(),
            letting_go: HashMap::new(),
            let_go: Vec::new(),
        })
    }

    /// The ids of the held requests that have been let go; to be followed by [`Sequences::have_been_released`].
    pub fn take_let_go(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.let_go)
    }

    /// Held requests of these ids have been released: from now on core can send what follows them.
    pub fn have_been_released(&mut self, keys: Vec<Key>, now: Instant) {
        for key in keys {
            match self.letting_go.get_mut(&key) {
                Some(left) if *left > 1 => *left -= 1,
                _ => drop(self.letting_go.remove(&key)),
            }
            let seen = self.payloads(key.instance);
            let Some(chain) = self.chains.get_mut(&key) else { continue };
            if let Some(contest) = &mut chain.contest {
                contest.note_release(now, seen);
            }
            let front = chain.incarnations[0];
            self.begin_to_wait(&key, front, now);
        }
    }

    /// An incarnation that was held waits for its next request from now on.
    fn begin_to_wait(&mut self, key: &Key, slot: SlotId, now: Instant) {
        let seen = self.total(key.instance);
        if let Some(record) = self.pool.record_mut(slot)
            && matches!(record.phase, Phase::Idle)
            && record.held.is_none()
        {
            record.settled = seen;
            self.idle.entry(key.instance).or_default().insert(slot, now);
        }
    }

    fn release_held(&mut self, key: &Key, held: Option<H>, released: &mut Vec<H>) {
        if let Some(held) = held {
            *self.letting_go.entry(key.clone()).or_default() += 1;
            self.let_go.push(key.clone());
            released.push(held);
        }
    }

    /// The instance begins to work on a payload of so many requests, while others may wait for their requests to be
    /// settled. `short`: core had fewer requests than a batch takes.
    pub fn begin_payload(&mut self, instance: u32, requests: usize, short: bool, now: Instant) {
        self.now = now;
        let Policy { quiet, pause, .. } = self.policy;
        let none = Evidence::default();
        let fresh = Activity { in_works: 0, idle_since: now, payloads: none, total: none };
        let activity = self.instances.entry(instance).or_insert(fresh);
        if activity.is_quiet(now, quiet) {
            activity.total.short_payloads = activity.total.short_payloads.wrapping_add(SHORT_PAYLOADS);
        }
        let short = short || activity.is_quiet(now, pause);
        activity.in_works += 1;
        activity.payloads.add(requests, short);
        activity.total.add(requests, short);
    }

    /// Finds the sequence that a request belongs to, or makes it for a START, and checks its slot out.
    ///
    /// `released` takes the held requests that this lets go of; drop them without holding any lock.
    pub fn admit(
        &mut self,
        key: &Key,
        start: bool,
        end: bool,
        released: &mut Vec<H>,
    ) -> Result<Admitted<S, C>, Refusal<E>> {
        let slot = if start { self.start(key, released)? } else { self.resume(key, end, released)? };
        let memory = self.pool.memory(slot).ok_or(Refusal::Unknown)?;
        let record = self.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        Ok(Admitted { slot, memory, contents: record.contents.take().unwrap_or_default() })
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
        let Some(instance) = self.pool.record(slot).map(|record| record.key.instance) else { return false };
        let seen = self.total(instance);
        let Some(record) = self.pool.record_mut(slot) else { return false };
        let started = matches!(record.phase, Phase::InFlight { start: true });
        record.phase = Phase::Idle;
        record.settled = seen;
        record.failed |= started && outcome == Outcome::Failed;
        let contest = self.chains.get_mut(&record.key).and_then(|chain| chain.contest.as_mut());
        if let Some(contest) = contest {
            contest.is_open = true;
        }
        let only_trace = record.failed && self.chain_length(slot) == 1;
        if end || only_trace {
            self.note_one_shot(slot);
            self.remove(slot, released);
            self.counts.ended += 1;
            return false;
        }
        self.idle.entry(instance).or_default().insert(slot, now);
        !self.is_front(slot)
    }

    /// Of those that do not receive, only a START can end its incarnation.
    fn note_one_shot(&mut self, slot: SlotId) {
        let is_front = self.is_front(slot);
        let chain = self.pool.record(slot).and_then(|record| self.chains.get_mut(&record.key));
        if let Some(contest) = chain.and_then(|chain| chain.contest.as_mut()) {
            contest.one_shot |= !is_front;
        }
    }

    /// Keeps a request unreleased until its sequence is the only one of its id that core can send requests for.
    pub fn hold(&mut self, slot: SlotId, request: H, released: &mut Vec<H>) {
        let Some(record) = self.pool.record_mut(slot) else { return released.push(request) };
        record.held = Some(request);
        // It cannot get a request, so it does not expire for want of one.
        let instance = record.key.instance;
        self.leave_idle(instance, slot);
    }

    /// What was to be held has been released: what core sends from now on may be of any incarnation of the id, so none
    /// is served.
    pub fn release_unheld(&mut self, slot: SlotId) {
        if let Some(key) = self.pool.record(slot).map(|record| record.key.clone()) {
            self.bar(&key);
        }
    }

    /// The instance has settled all requests of the payload that began first of those in the works.
    pub fn finish_payload(&mut self, instance: u32, now: Instant, released: &mut Vec<H>) -> Result<(), E> {
        if let Some(activity) = self.instances.get_mut(&instance) {
            activity.in_works = activity.in_works.saturating_sub(1);
            activity.idle_since = now;
        }
        let payloads = self.payloads(instance);
        let limit = self.policy.queue_requests;
        self.take_turns(Some(instance), released, |contest, _| {
            if std::mem::take(&mut contest.is_open) {
                // The payload's requests have been released by now, not when they were settled.
                contest.note_release(now, payloads);
            }
            payloads.since(contest.from).is_enough(limit) && contest.is_ripe(now)
        });
        self.pool.adjust()
    }

    /// Drops what lay idle for too long and settles what a quiet instance proves.
    pub fn tick(&mut self, now: Instant, released: &mut Vec<H>) -> Result<(), E> {
        self.now = now;
        let quiet = self.policy.quiet;
        let instances = std::mem::take(&mut self.instances);
        self.take_turns(None, released, |contest, key| {
            let is_quiet = instances.get(&key.instance).is_none_or(|seen| seen.is_quiet(now, quiet));
            is_quiet && now >= contest.released + quiet && contest.is_ripe(now)
        });
        self.instances = instances;
        self.expire(now, released);
        self.pool.adjust()
    }

    /// When [`Sequences::tick`] may have something to do again.
    pub fn next_tick(&self, now: Instant) -> Instant {
        let longest = self.idle.values().filter_map(|idle| idle.front()).map(|(_, &since)| since).min();
        let idle = longest.unwrap_or(now) + self.policy.idle_limit;
        // What is due already waits for core's queue.
        let idle = idle.max(now + self.policy.quiet);
        if self.is_contested() { idle.min(now + self.policy.quiet) } else { idle }
    }

    /// Whether [`Sequences::next_tick`] has come nearer.
    pub fn is_contested(&self) -> bool {
        !self.contested.is_empty()
    }

    /// Ends every sequence of an instance that goes away.
    pub fn retire_instance(&mut self, instance: u32, released: &mut Vec<H>) {
        self.instances.remove(&instance);
        self.lanes.retain(|(of, _), _| *of != instance);
        let gone: Vec<SlotId> = self
            .chains
            .iter()
            .filter(|(key, _)| key.instance == instance)
            .flat_map(|(_, chain)| chain.incarnations.iter().copied())
            .collect();
        for slot in gone {
            // One may go with another.
            if self.pool.record(slot).is_some() {
                self.remove(slot, released);
                self.counts.ended += 1;
            }
        }
        self.idle.remove(&instance);
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

    /// Most slots that may exist.
    pub const fn capacity(&self) -> usize {
        self.pool.capacity()
    }

    fn start(&mut self, key: &Key, released: &mut Vec<H>) -> Result<SlotId, Refusal<E>> {
        let lane = key.lane.map(|lane| (key.instance, lane));
        if let Some(&occupant) = lane.and_then(|lane| self.lanes.get(&lane)) {
            // A START in a lane proves that whoever had it is over, by END or because core let it go.
            self.end_if_idle(occupant, released);
        }
        let slot = match self.acquire(key, released) {
            Ok(slot) => slot,
            Err(error) => {
                self.counts.rejected += 1;
                self.bar(key);
                return Err(match error {
                    AcquireError::Full => Refusal::Full { capacity: self.pool.capacity() },
                    AcquireError::Memory(error) => Refusal::Memory(error),
                });
            }
        };
        if let Some(lane) = lane {
            self.lanes.insert(lane, slot);
        }
        let late = self.may_be_late(key);
        let chain = self.chains.entry(key.clone()).or_default();
        chain.incarnations.push(slot);
        if chain.incarnations.len() > 1 && chain.contest.is_none() {
            self.set_contest(key, Some(self.contest(key, late)));
        }
        self.counts.started += 1;
        Ok(slot)
    }

    fn payloads(&self, instance: u32) -> Evidence {
        self.instances.get(&instance).map_or(Evidence::default(), |seen| seen.payloads)
    }

    fn total(&self, instance: u32) -> Evidence {
        self.instances.get(&instance).map_or(Evidence::default(), |seen| seen.total)
    }

    /// A free slot, if need be that of an incarnation that is most likely over. The START of a live id may take one of
    /// the reserve, as core still has to send what belongs to the sequence that it replaces or follows.
    fn acquire(&mut self, key: &Key, released: &mut Vec<H>) -> Result<SlotId, AcquireError<E>> {
        let follows = self.chains.contains_key(key);
        loop {
            let phase = Phase::InFlight { start: true };
            let born = self.total(key.instance);
            let (key, contents) = (key.clone(), None);
            let record = Record { key, contents, phase, born, settled: born, held: None, failed: false };
            match self.pool.acquire(record, follows) {
                Err(AcquireError::Full) if self.drop_doubtful(released) => {}
                acquired => return acquired,
            }
        }
    }

    /// A START of a live id was refused. What follows it cannot be told from what core still has of the sequence before
    /// it, so neither is served.
    fn bar(&mut self, key: &Key) {
        for slot in self.chains.get(key).map(|chain| chain.incarnations.clone()).unwrap_or_default() {
            if let Some(record) = self.pool.record_mut(slot) {
                record.failed = true;
            }
        }
    }

    fn resume(&mut self, key: &Key, end: bool, released: &mut Vec<H>) -> Result<SlotId, Refusal<E>> {
        let chain = self.chains.get_mut(key).ok_or(Refusal::Unknown)?;
        if let Some(contest) = &mut chain.contest {
            (contest.last_request, contest.is_open) = (self.now, true);
        }
        let is_ready = |slot: &&SlotId| {
            self.pool.record(**slot).is_some_and(|record| matches!(record.phase, Phase::Idle) && record.held.is_none())
        };
        let slot = *chain.incarnations.iter().find(is_ready).ok_or(Refusal::Busy)?;
        let record = self.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        if record.failed {
            if end {
                self.end_if_idle(slot, released);
            }
            return Err(Refusal::Unknown);
        }
        record.phase = Phase::InFlight { start: false };
        self.doubtful.remove(&slot);
        self.leave_idle(key.instance, slot);
        Ok(slot)
    }

    /// Ends an incarnation that is over unless a request comes for it, if there is one: something has run out.
    pub fn drop_doubtful(&mut self, released: &mut Vec<H>) -> bool {
        while let Some(slot) = self.doubtful.pop_front() {
            if self.end_if_idle(slot, released) {
                return true;
            }
        }
        false
    }

    fn end_if_idle(&mut self, slot: SlotId, released: &mut Vec<H>) -> bool {
        let idle = self.is_idle(slot);
        if idle {
            self.remove(slot, released);
            self.counts.ended += 1;
        }
        idle
    }

    fn is_idle(&self, slot: SlotId) -> bool {
        self.pool.record(slot).is_some_and(|record| matches!(record.phase, Phase::Idle))
    }

    /// Whether core has sent what it had of a sequence when its last request was settled. Under load a request may wait
    /// in core for longer than a sequence may lie idle.
    fn has_nothing_queued(&self, slot: SlotId, now: Instant) -> bool {
        let Some(record) = self.pool.record(slot) else { return true };
        let Some(seen) = self.instances.get(&record.key.instance) else { return true };
        seen.is_quiet(now, self.policy.quiet) || seen.total.since(record.settled).is_enough(self.policy.queue_requests)
    }

    fn expire(&mut self, now: Instant, released: &mut Vec<H>) {
        let limit = self.policy.idle_limit;
        let due = |(&slot, &since): (&SlotId, &Instant)| (now >= since + limit).then_some(slot);
        let instances: SmallVec<[u32; 4]> = self.idle.keys().copied().collect();
        for instance in instances {
            while let Some(slot) = self.idle.get(&instance).and_then(|idle| idle.front()).and_then(due)
                && self.has_nothing_queued(slot, now)
            {
                self.remove(slot, released);
                self.counts.expired += 1;
            }
        }
    }

    fn leave_idle(&mut self, instance: u32, slot: SlotId) {
        if let Some(idle) = self.idle.get_mut(&instance) {
            idle.remove(&slot);
        }
    }

    /// Frees the slot. If its incarnation was receiving, the next one is.
    fn remove(&mut self, slot: SlotId, released: &mut Vec<H>) {
        self.doubtful.remove(&slot);
        let Some(record) = self.pool.release(slot) else { return };
        let key = record.key;
        self.leave_idle(key.instance, slot);
        self.release_held(&key, record.held, released);
        self.leavings.extend(record.contents);
        let Some(chain) = self.chains.get_mut(&key) else { return };
        let was_front = chain.incarnations.first() == Some(&slot);
        chain.incarnations.retain(|other| *other != slot);
        let Some(&front) = chain.incarnations.first() else {
            self.set_contest(&key, None);
            self.chains.remove(&key);
            return;
        };
        let alone = chain.incarnations.len() == 1;
        let (late, one_shot) =
            chain.contest.as_ref().map_or((false, false), |contest| (contest.late, contest.one_shot));
        let Some(next) = self.pool.record_mut(front) else { return };
        let next_failed = next.failed;
        if was_front {
            let held = next.held.take();
            self.release_held(&key, held, released);
        }
        if alone && next_failed {
            self.remove(front, released);
            self.counts.ended += 1;
        } else if alone && !was_front && one_shot && !late {
            // It started over what is left, which goes when core has sent what it had of it.
        } else if alone {
            self.set_contest(&key, None);
            if !was_front && one_shot {
                self.doubtful.insert(front);
            }
        } else if was_front {
            self.set_contest(&key, Some(Contest { one_shot, ..self.contest(&key, true) }));
        }
    }

    fn is_front(&self, slot: SlotId) -> bool {
        self.chain_of(slot).is_some_and(|chain| chain.incarnations.first() == Some(&slot))
    }

    fn chain_length(&self, slot: SlotId) -> usize {
        self.chain_of(slot).map_or(0, |chain| chain.incarnations.len())
    }

    fn chain_of(&self, slot: SlotId) -> Option<&Chain> {
        self.pool.record(slot).and_then(|record| self.chains.get(&record.key))
    }
}

#[cfg(test)]
mod tests;
