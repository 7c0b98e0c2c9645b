//! The slots of sequences, a record of each, and for each instance how much of its queue core has sent; the rules for
//! them, and why a request gets no slot.

use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use hashlink::LinkedHashMap;

use crate::id::Key;
use crate::pool::{SlotId, SlotPool};
use crate::watermark::Watermark;

/// When a sequence without END is over, and how core queues requests.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// `None` where this backend schedules: its scheduler says when a sequence is over.
    pub idle: Option<IdleLimits>,
    /// Core has sent everything in its queue when an instance has been idle for this long without a break: the queue
    /// delay and a margin.
    pub quiet: Duration,
    /// Whether the lane of a request identifies its incarnation (`direct`, and where this backend schedules).
    pub by_lane: bool,
    /// Most requests that core queues for one instance: one for each of its slots. It is 1 with `direct`, because each
    /// payload takes the next request of every slot.
    pub queue_requests: usize,
    /// Whether the capacity is the number of sequences that core admits. If the table is full, a START then proves that
    /// core has ended or dropped another sequence. It gets the slot of one that core has certainly dropped, or one of
    /// the reserve.
    pub has_place_for_all: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct IdleLimits {
    /// A sequence expires when it has had no request for this long.
    pub limit: Duration,
    /// Core has certainly dropped a sequence that has had no request for this long.
    pub dropped_after: Duration,
}

#[derive(Clone, Debug)]
pub struct Admission {
    pub key: Key,
    pub start: bool,
    pub end: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal<E = ()> {
    /// The request is not a START, and its sequence is not live.
    Unknown,
    /// Two sequences with its id may have requests in core, and nothing tells whose this one is. Both have ended.
    Ambiguous,
    /// The request is a START, and every slot that may exist holds a sequence.
    Full { capacity: usize },
    /// The request is a START, and the slab for its slot could not be made, for this reason.
    Memory(E),
    /// Another request of the sequence is in flight. Core promises that this does not happen.
    Busy,
}

/// Counts of sequences since the model was loaded. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub started: u64,
    /// Sequences that ended with END or a failed START, or that another START replaced.
    pub ended: u64,
    pub expired: u64,
    pub rejected: u64,
}

/// The good requests of a sequence since it started, its START included, or since a run for it alone has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Good {
    pub requests: u32,
    pub since: Instant,
}

pub(super) enum Phase<H> {
    InFlight {
        start: bool,
    },
    Waiting,
    /// A request of the incarnation, usually its START, has been answered and is held.
    Held(H),
    Releasing,
}

pub(super) struct Record<C, H> {
    pub key: Key,
    pub contents: C,
    pub life: Life,
    pub good: Good,
    pub phase: Phase<H>,
    /// The last request of the incarnation is released with this payload at the latest.
    pub released_by: u64,
    /// All payloads before this one had finished when the last request of the incarnation was released.
    pub released_after: u64,
    /// When this payload is passed, every START has arrived that core kept behind an END when it sent this START.
    pub delayed_until: u64,
    /// Whether the START is certainly newer than those of the earlier incarnations in its chain. Otherwise core may
    /// have delayed it, and the client may have sent it before theirs.
    pub is_newer: bool,
    /// Whether core had nothing of another incarnation of the id when it started. Else a client that breaks the rules
    /// can have a request of another incarnation arrive here, and such a request proves nothing.
    pub is_only_one: bool,
    /// Whether the incarnation has no state: its START failed, or its requests cannot be told from those of another
    /// incarnation.
    pub failed: bool,
}

/// How long a sequence has lived so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// When its START was admitted.
    pub since: Instant,
    /// Its requests, START among them.
    pub requests: u64,
}

pub(super) struct Instance {
    pub watermark: Watermark,
    /// The latest payload with an END. Core may give the slot of an END that is in flight to another sequence, and then
    /// keeps the START of that one behind it.
    pub last_end: u64,
    /// Sequences that are over, and whose states the instance has not dropped yet.
    pub over: Vec<SlotId>,
    /// Sequences that wait for a request, and since when. The one that has waited the longest is first.
    idle: LinkedHashMap<SlotId, Instant>,
    /// Sequences that core has dropped, unless it has a request of them in its queue. The longest idle one is first.
    dropped: LinkedHashMap<SlotId, Dropped>,
}

/// A sequence that has been idle for longer than core keeps one.
#[derive(Clone, Copy)]
struct Dropped {
    idle_since: Instant,
    /// The latest payload that had begun when this was noted. When it is passed, core has no request of the sequence.
    noted_in: u64,
}

pub(super) struct Records<S, C, H> {
    pub policy: Policy,
    pub pool: SlotPool<S, Record<C, H>>,
    pub instances: HashMap<u32, Instance>,
    pub counts: Counts,
    /// The contents of sequences that are over, until the caller takes them.
    pub leavings: Vec<C>,
    /// The lives of sequences that are over, until the caller takes them.
    pub lives: Vec<Life>,
    /// Held requests that must be released now, each with its sequence, until the caller takes them.
    pub released: Vec<(H, (Key, SlotId))>,
}

impl<S, C, H> Records<S, C, H> {
    pub fn new(policy: Policy, pool: SlotPool<S, Record<C, H>>) -> Self {
        let (instances, counts) = (HashMap::new(), Counts::default());
        let (leavings, lives, released) = (Vec::new(), Vec::new(), Vec::new());
        Self { policy, pool, instances, counts, leavings, lives, released }
    }

    pub fn instance(&mut self, instance: u32, now: Instant) -> &mut Instance {
        let Policy { queue_requests, quiet, .. } = self.policy;
        self.instances.entry(instance).or_insert_with(|| Instance {
            watermark: Watermark::new(queue_requests, quiet, now),
            last_end: 0,
            over: Vec::new(),
            idle: LinkedHashMap::new(),
            dropped: LinkedHashMap::new(),
        })
    }

    pub fn payload(&self, instance: u32) -> u64 {
        self.instances.get(&instance).map_or(0, |instance| instance.watermark.begun)
    }

    /// The last payload of an instance that is passed; see [`Watermark::passed`].
    pub fn passed(&self, instance: u32) -> u64 {
        self.instances.get(&instance).map_or(0, |instance| instance.watermark.passed)
    }

    /// Refuses a START for which there is no room. `used`: how much of the capacity is used. With
    /// [`Policy::has_place_for_all`] it takes a slot of the reserve instead.
    pub fn check_room(&self, used: usize) -> Result<(), Refusal> {
        let capacity = self.pool.capacity();
        if used < capacity || self.policy.has_place_for_all { Ok(()) } else { Err(Refusal::Full { capacity }) }
    }

    /// Whether a START in the latest payload is certainly newer than that of an incarnation.
    pub fn is_newer_than(&self, slot: SlotId) -> bool {
        let Some(record) = self.pool.record(slot) else { return false };
        let Some(Instance { watermark, .. }) = self.instances.get(&record.key.instance) else { return false };
        // The client of a START in flight has not waited for its answer. The requests of a payload have no order.
        !matches!(record.phase, Phase::InFlight { start: true })
            && record.delayed_until.max(watermark.lost) <= watermark.passed_before
    }

    pub fn acquire(&mut self, key: &Key, is_newer: bool, is_only_one: bool, now: Instant) -> Result<SlotId, Refusal>
    where
        C: Default,
    {
        let instance = self.instance(key.instance, now);
        let (payload, delayed_until) = (instance.watermark.begun, instance.last_end);
        let record = Record {
            key: key.clone(),
            contents: C::default(),
            life: Life { since: now, requests: 1 },
            good: Good { requests: 1, since: now },
            phase: Phase::InFlight { start: true },
            released_by: payload,
            released_after: 0,
            delayed_until,
            is_newer,
            is_only_one,
            failed: false,
        };
        // If no slot is free, either another slab could not be made, or no more slots may exist.
        let may_grow = self.pool.next_slab_slots() > 0;
        let none = if may_grow { Refusal::Memory(()) } else { Refusal::Full { capacity: self.pool.capacity() } };
        self.pool.acquire(record).ok_or(none)
    }

    pub fn receive(&mut self, slot: SlotId) -> Result<SlotId, Refusal> {
        let record = self.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        let Some(instance) = self.instances.get_mut(&record.key.instance) else { return Err(Refusal::Unknown) };
        if !matches!(record.phase, Phase::Waiting | Phase::Releasing) {
            return Err(Refusal::Busy);
        }
        if record.is_only_one {
            instance.watermark.follow(record.released_after);
        }
        record.phase = Phase::InFlight { start: false };
        record.life.requests += 1;
        record.released_by = instance.watermark.begun;
        instance.idle.remove(&slot);
        instance.dropped.remove(&slot);
        Ok(slot)
    }

    pub fn wait(&mut self, slot: SlotId, now: Instant) {
        let Some(record) = self.pool.record_mut(slot) else { return };
        record.phase = Phase::Waiting;
        if self.policy.idle.is_some()
            && let Some(instance) = self.instances.get_mut(&record.key.instance)
        {
            instance.idle.insert(slot, now);
        }
    }

    /// Whether a sequence waits for a request and core has none of it.
    pub fn has_nothing_queued(&self, slot: SlotId) -> bool {
        let Some(record) = self.pool.record(slot) else { return false };
        let Some(Instance { watermark, .. }) = self.instances.get(&record.key.instance) else { return false };
        matches!(record.phase, Phase::Waiting) && record.released_by.max(watermark.lost) <= watermark.passed
    }

    /// Ends the sequence in this slot. Without a state, the slot is free now; otherwise its instance drops the state
    /// first ([`super::Sequences::take_over`]). Releases a held request.
    pub fn end(&mut self, slot: SlotId, expired: bool) {
        let Some(record) = self.pool.record_mut(slot) else { return };
        *(if expired { &mut self.counts.expired } else { &mut self.counts.ended }) += 1;
        let (has_state, phase) = (!record.failed, std::mem::replace(&mut record.phase, Phase::Waiting));
        if let Phase::Held(held) = phase {
            self.released.push((held, (record.key.clone(), slot)));
        }
        if let Some(instance) = self.instances.get_mut(&record.key.instance) {
            instance.idle.remove(&slot);
            instance.dropped.remove(&slot);
            instance.over.extend(has_state.then_some(slot));
        }
        if !has_state {
            self.free(slot);
        }
    }

    pub fn free(&mut self, slot: SlotId) {
        if let Some(record) = self.pool.release(slot) {
            self.leavings.push(record.contents);
            self.lives.push(record.life);
        }
    }

    /// Notes which sequences of an instance core has dropped by now. Under load, a request may wait in core for longer
    /// than the idle limit. So a sequence stays until everything that core had queued when this was noted has arrived.
    pub fn note_dropped(&mut self, instance: u32, now: Instant) {
        let (Some(limits), Some(of)) = (self.policy.idle, self.instances.get_mut(&instance)) else { return };
        while let Some((&slot, &since)) = of.idle.front()
            && now >= since + limits.dropped_after
        {
            of.idle.pop_front();
            of.dropped.insert(slot, Dropped { idle_since: since, noted_in: of.watermark.begun });
        }
    }

    /// The longest idle of the sequences that core has certainly dropped, if it has been idle for `limit`.
    pub fn longest_dropped(&self, instance: u32, limit: Duration, now: Instant) -> Option<SlotId> {
        let of = self.instances.get(&instance)?;
        let (&slot, dropped) = of.dropped.front()?;
        (dropped.noted_in <= of.watermark.passed && now >= dropped.idle_since + limit).then_some(slot)
    }

    /// When an instance may have a sequence that expires, or a state to drop, or when a look at it may prove that core
    /// has sent everything. `needs_proof`: whether anything but a dropped sequence needs this proof.
    pub fn next_tick(&self, instance: u32, now: Instant, needs_proof: bool) -> Option<Instant> {
        let IdleLimits { limit, dropped_after } = self.policy.idle?;
        let Some(Instance { watermark, over, idle, dropped, .. }) = self.instances.get(&instance) else {
            return Some(now + limit);
        };
        let longest = dropped.front().map(|(_, longest)| *longest);
        let is_unproven = longest.is_some_and(|longest| longest.noted_in > watermark.passed);
        let expires = longest.filter(|_| !is_unproven).map(|longest| longest.idle_since + limit);
        let looks_dropped = idle.front().map(|(_, &since)| since + dropped_after);
        let look = watermark.next_look().filter(|_| needs_proof || is_unproven);
        let lets_go = (!over.is_empty()).then_some(now);
        [expires, looks_dropped, look, lets_go, Some(now + limit)].into_iter().flatten().min()
    }
}
