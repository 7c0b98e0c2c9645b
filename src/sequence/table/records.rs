//! The slots of sequences, a record of each, and for each instance how much of its queue core has sent.

use std::time::Instant;

use foldhash::{HashMap, HashMapExt};
use hashlink::{LinkedHashMap, LinkedHashSet};

use super::{Counts, Policy, Refusal};
use crate::sequence::id::Key;
use crate::sequence::watermark::Watermark;
use crate::state::pool::{AcquireError, SlotId, SlotPool};

pub(super) enum Phase<H> {
    /// A request of the incarnation is in flight.
    InFlight { start: bool },
    /// The incarnation waits for its next request.
    Waiting,
    /// A request of the incarnation, usually its START, has been answered and is held.
    Held(H),
    /// The held request is being released.
    Releasing,
}

/// Whether another START of the id has arrived since the START of an incarnation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Superseded {
    No,
    /// Another START arrived so soon that the client may have sent it before this incarnation's.
    Soon,
    /// Another START arrived soon, and core may have requests of both: this incarnation had a request in flight, or has
    /// received one since.
    Contested,
    /// Another START arrived that the client sent after this incarnation's.
    Later,
}

/// What the table knows of one incarnation.
pub(super) struct Record<C, H> {
    pub key: Key,
    /// `None` while a request has them.
    pub contents: Option<C>,
    pub life: Life,
    pub phase: Phase<H>,
    /// The last request of the incarnation is released with this payload at the latest.
    pub released_by: u64,
    /// All payloads before this one had finished when the last request of the incarnation was released.
    pub released_after: u64,
    pub superseded: Superseded,
    /// The payload of the START. The START is released with it at the earliest.
    pub start_payload: u64,
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
    /// Sequences that wait for a request, and since when. The one that has waited the longest is first.
    idle: LinkedHashMap<SlotId, Instant>,
    /// Sequences that have been idle for too long. They stay until it is certain that core has no request of them.
    overdue: LinkedHashSet<SlotId>,
}

/// The records of all incarnations that have a slot.
pub(super) struct Records<S, C, H> {
    pub policy: Policy,
    pub pool: SlotPool<S, Record<C, H>>,
    /// The caller makes another slab for a START that finds no slot.
    pub can_grow: bool,
    pub instances: HashMap<u32, Instance>,
    pub counts: Counts,
    /// The contents of sequences that are over, until the caller takes them.
    pub leavings: Vec<C>,
    /// The lives of sequences that are over, until the caller takes them.
    pub lives: Vec<Life>,
    /// Number of held requests.
    pub held: usize,
    /// Held requests that must be released now, until the caller takes them.
    pub released: Vec<H>,
}

impl<S, C, H> Records<S, C, H> {
    pub fn new(policy: Policy, pool: SlotPool<S, Record<C, H>>) -> Self {
        let (instances, counts) = (HashMap::new(), Counts::default());
        let (leavings, lives, released) = (Vec::new(), Vec::new(), Vec::new());
        Self { policy, pool, can_grow: false, instances, counts, leavings, lives, held: 0, released }
    }

    pub fn instance(&mut self, instance: u32, now: Instant) -> &mut Instance {
        let Policy { queue_requests, quiet, .. } = self.policy;
        self.instances.entry(instance).or_insert_with(|| Instance {
            watermark: Watermark::new(queue_requests, quiet, now),
            idle: LinkedHashMap::new(),
            overdue: LinkedHashSet::new(),
        })
    }

    /// The latest payload that has begun on an instance.
    pub fn payload(&self, instance: u32) -> u64 {
        self.instances.get(&instance).map_or(0, |instance| instance.watermark.begun())
    }

    /// The last payload of an instance that is passed; see [`Watermark::passed`].
    pub fn passed(&self, instance: u32) -> u64 {
        self.instances.get(&instance).map_or(0, |instance| instance.watermark.passed())
    }

    /// Occupies a slot for a START.
    pub fn acquire(&mut self, key: &Key, now: Instant) -> Result<SlotId, Refusal> {
        let payload = self.payload(key.instance);
        let record = Record {
            key: key.clone(),
            contents: None,
            life: Life { since: now, requests: 1 },
            phase: Phase::InFlight { start: true },
            released_by: payload,
            released_after: 0,
            superseded: Superseded::No,
            start_payload: payload,
            failed: false,
        };
        self.pool.acquire(record).map_err(|error| match error {
            AcquireError::Full => Refusal::Full { capacity: self.pool.capacity() },
            AcquireError::NoSlab => Refusal::Memory(()),
        })
    }

    /// Gives a request to the sequence in this slot.
    pub fn receive(&mut self, slot: SlotId) -> Result<SlotId, Refusal> {
        let record = self.pool.record_mut(slot).ok_or(Refusal::Unknown)?;
        let Some(instance) = self.instances.get_mut(&record.key.instance) else { return Err(Refusal::Unknown) };
        if !matches!(record.phase, Phase::Waiting | Phase::Releasing) {
            return Err(Refusal::Busy);
        }
        instance.watermark.follow(record.released_after);
        record.phase = Phase::InFlight { start: false };
        record.life.requests += 1;
        if record.superseded == Superseded::Soon {
            record.superseded = Superseded::Contested;
        }
        record.released_by = instance.watermark.begun();
        instance.idle.remove(&slot);
        instance.overdue.remove(&slot);
        Ok(slot)
    }

    /// Lets the sequence in this slot wait for its next request.
    pub fn wait(&mut self, slot: SlotId, now: Instant) {
        let Some(record) = self.pool.record_mut(slot) else { return };
        record.phase = Phase::Waiting;
        if let Some(instance) = self.instances.get_mut(&record.key.instance) {
            instance.idle.insert(slot, now);
        }
    }

    /// Since when a sequence has waited for its next request; `None` if it does not wait.
    pub fn idle_since(&self, slot: SlotId) -> Option<Instant> {
        let instance = self.instances.get(&self.pool.record(slot)?.key.instance)?;
        instance.idle.get(&slot).copied()
    }

    /// Whether a sequence waits for a request and core has none of it.
    pub fn has_nothing_queued(&self, slot: SlotId) -> bool {
        let Some(record) = self.pool.record(slot) else { return false };
        matches!(record.phase, Phase::Waiting) && record.released_by <= self.passed(record.key.instance)
    }

    /// Frees a slot. Releases the held request of its incarnation, and returns whether there was one.
    pub fn free(&mut self, slot: SlotId) -> bool {
        let Some(record) = self.pool.release(slot) else { return false };
        if let Some(instance) = self.instances.get_mut(&record.key.instance) {
            instance.idle.remove(&slot);
            instance.overdue.remove(&slot);
        }
        self.leavings.extend(record.contents);
        self.lives.push(record.life);
        let Phase::Held(held) = record.phase else { return false };
        self.held -= 1;
        self.released.push(held);
        true
    }

    /// Marks the sequences of an instance that have been idle for too long as overdue. Returns an overdue sequence that
    /// core certainly has no request of, if there is one. Under load, a request may wait in core for longer than the
    /// idle limit, so a sequence stays overdue until everything that core had queued at the limit has arrived.
    pub fn next_expired(&mut self, instance: u32, now: Instant) -> Option<SlotId> {
        let limit = self.policy.idle_limit;
        let of = self.instances.get_mut(&instance)?;
        while let Some((&slot, &since)) = of.idle.front()
            && now >= since + limit
        {
            of.idle.pop_front();
            of.overdue.insert(slot);
            if let Some(record) = self.pool.record_mut(slot) {
                record.released_by = of.watermark.begun();
            }
        }
        let (&slot, passed) = (of.overdue.front()?, of.watermark.passed());
        self.pool.record(slot).is_none_or(|record| record.released_by <= passed).then_some(slot)
    }

    /// The sequences of an instance that core has certainly dropped. The one that has been idle for the longest is
    /// first.
    pub fn droppable(&self, instance: u32, now: Instant) -> impl Iterator<Item = SlotId> {
        let dropped_after = self.policy.dropped_after;
        self.instances.get(&instance).into_iter().flat_map(move |of| {
            let dropped = of.idle.iter().take_while(move |&(_, &since)| now >= since + dropped_after);
            of.overdue.iter().copied().chain(dropped.map(|(slot, _)| *slot))
        })
    }

    /// When a sequence may expire, or when an idle instance may prove that core has sent everything.
    pub fn next_tick(&self, now: Instant) -> Instant {
        let mut next = now + self.policy.idle_limit;
        for instance in self.instances.values() {
            if let Some((_, &since)) = instance.idle.front() {
                next = next.min(since + self.policy.idle_limit);
            }
            if self.held > 0 || !instance.overdue.is_empty() {
                next = next.min(instance.watermark.next_rest().unwrap_or(now + self.policy.quiet));
            }
        }
        next
    }
}
