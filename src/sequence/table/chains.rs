//! `oldest`: the incarnations of each id form a chain in the order of their STARTs (see [`crate::sequence`]).

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Instant;

use foldhash::HashMap;
use smallvec::SmallVec;

use super::records::{Phase, Records, Superseded};
use super::{Admission, Incarnations, Refusal};
use crate::sequence::id::{Key, SequenceId};
use crate::state::pool::SlotId;

/// The chains of all ids.
#[derive(Default)]
pub(super) struct Chains {
    chains: HashMap<Key, Chain>,
    /// Chains with an incarnation that has a slot.
    with_slots: usize,
    /// For each instance, the chains to look at later.
    looks: HashMap<u32, Looks>,
    /// Keys of held requests that are being released.
    releasing: Vec<Key>,
}

/// Chains of one instance to look at later.
#[derive(Default)]
struct Looks {
    /// Chains to look at when the watermark passes a payload.
    by_payload: BinaryHeap<Look>,
    /// Chains to look at when their front incarnation has rested. The queue is not sorted by time, so a chain may be
    /// looked at later than its time says.
    by_time: VecDeque<(Instant, Key)>,
}

/// The incarnations of one id. A chain is removed when none of them has a slot and core has no request of them.
#[derive(Default)]
struct Chain {
    /// Incarnations with a slot. The first one is at the front and receives requests, unless `stateless` is set.
    incarnations: SmallVec<[SlotId; 1]>,
    /// Incarnations without a slot, at the front of the chain.
    stateless: Option<Stateless>,
    /// The requests of all incarnations before the last one are released with this payload at the latest. If one of
    /// these requests delayed a START in core, the START has arrived when this payload is passed.
    earlier_released_by: u64,
}

/// Incarnations without a slot, of which core may have requests.
#[derive(Clone, Copy)]
struct Stateless {
    /// Their last request is released with this payload at the latest.
    released_by: u64,
    /// Whether there may be more than one of them. Then an END does not end them.
    are_several: bool,
}

/// In place of a payload: a request is being released outside any payload, so no payload is known yet.
const BEING_RELEASED: u64 = u64::MAX;

/// A chain to look at when a payload is passed.
struct Look {
    payload: u64,
    key: Key,
}

impl Chains {
    /// Refuses a request of an incarnation without a slot. Core may have more requests of it.
    fn refuse<S, C, H>(&mut self, records: &mut Records<S, C, H>, admission: &Admission) {
        let Admission { key, end, .. } = admission;
        let payload = records.payload(key.instance);
        let chain = self.chains.entry(key.clone()).or_default();
        let are_several = chain.stateless.is_some_and(|stateless| stateless.are_several);
        chain.stateless = (!end || are_several).then_some(Stateless { released_by: payload, are_several });
        if *end {
            chain.earlier_released_by = payload;
        }
        self.look_later(key, payload);
        self.advance(records, key);
    }

    /// Prepares the chain for a START: ends incarnations that the START proves to be over. If an incarnation is left,
    /// returns how the START supersedes it.
    fn prepare<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key, now: Instant) -> Option<Superseded> {
        self.look(records, key, now);
        let passed_before = records.instances.get(&key.instance).map_or(0, |of| of.watermark.passed_before());
        let chain = self.chains.get(key)?;
        let (&front, &last) = (chain.incarnations.first()?, chain.incarnations.last()?);
        // If every START that core had delayed when the last incarnation started has arrived before this payload, this
        // START is newer than the last one.
        let is_later = records.pool.record(last)?.start_payload.max(chain.earlier_released_by) <= passed_before;
        if is_later && front == last && chain.stateless.is_none() && records.has_nothing_queued(front) {
            // The client has started over, or core has dropped the sequence.
            records.counts.ended += 1;
            self.remove(records, front, key);
            return None;
        }
        Some(if is_later { Superseded::Later } else { Superseded::Soon })
    }

    /// Appends the incarnation of a START, which has a slot. It supersedes the earlier incarnations of its id.
    fn append<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key, slot: SlotId, supersedes: Superseded) {
        let chain = self.chains.entry(key.clone()).or_default();
        self.with_slots += usize::from(chain.incarnations.is_empty());
        let earlier = chain.incarnations.clone();
        chain.incarnations.push(slot);
        for earlier in earlier {
            let Some(record) = records.pool.record_mut(earlier) else { continue };
            if record.superseded != Superseded::No {
                continue;
            }
            // Core sends the requests of a slot one at a time. If it sends this START while the earlier incarnation has a
            // request in flight, the two are in different slots, and either can have more requests in core.
            let is_contested = supersedes == Superseded::Soon && matches!(record.phase, Phase::InFlight { .. });
            record.superseded = if is_contested { Superseded::Contested } else { supersedes };
            if matches!(record.phase, Phase::Waiting) {
                chain.earlier_released_by = chain.earlier_released_by.max(record.released_by);
            }
            self.looks.entry(key.instance).or_default().at(record.released_by, key);
        }
    }

    /// Looks at a chain: ends its front incarnation if another START has superseded it and core has no request of it.
    fn look<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key, now: Instant) {
        let passed = records.passed(key.instance);
        let Some(chain) = self.chains.get_mut(key) else { return };
        if chain.stateless.is_some_and(|stateless| stateless.released_by <= passed) {
            chain.stateless = None;
        }
        let Some(&front) = chain.incarnations.first().filter(|_| chain.stateless.is_none()) else {
            return self.advance(records, key);
        };
        let superseded = records.pool.record(front).map_or(Superseded::No, |record| record.superseded);
        let rested = records.idle_since(front).map(|since| since + records.policy.rest);
        if superseded == Superseded::No || !records.has_nothing_queued(front) {
            self.advance(records, key);
        } else if superseded != Superseded::Later
            && let Some(rested) = rested.filter(|&rested| now < rested)
        {
            // The next incarnation may be older. Give the client time to send the next request of the front one.
            self.looks.entry(key.instance).or_default().by_time.push_back((rested, key.clone()));
        } else if superseded == Superseded::Contested {
            // The client had two STARTs in flight, and either incarnation can have requests in core. They cannot be told
            // apart when the next incarnation is at the front.
            self.drop_states(records, key);
        } else {
            records.counts.ended += 1;
            self.remove(records, front, key);
        }
    }

    /// Releases the held request of the incarnation that is at the front now. Removes the chain if no incarnation has a
    /// slot and core has no request of it.
    fn advance<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        let passed = records.passed(key.instance);
        let Some(chain) = self.chains.get_mut(key).filter(|chain| chain.stateless.is_none()) else { return };
        let Some(&front) = chain.incarnations.first() else {
            if chain.earlier_released_by <= passed {
                self.chains.remove(key);
            }
            return;
        };
        let Some(record) = records.pool.record_mut(front) else { return };
        if !matches!(record.phase, Phase::Held(_)) {
            return;
        }
        if record.failed {
            chain.stateless = Some(Stateless { released_by: BEING_RELEASED, are_several: false });
            records.counts.ended += 1;
            self.remove(records, front, key);
        } else if let Phase::Held(held) = std::mem::replace(&mut record.phase, Phase::Releasing) {
            let instance = records.instances.get(&key.instance);
            record.released_after = instance.map_or(0, |instance| instance.watermark.releasing());
            records.held -= 1;
            records.released.push(held);
            self.releasing.push(key.clone());
        }
    }

    /// Ends all incarnations of an id, because their requests cannot be told apart. An incarnation with a request in
    /// flight ends when the request is settled.
    fn drop_states<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        let Some(chain) = self.chains.get_mut(key) else { return };
        chain.stateless = Some(Stateless { released_by: BEING_RELEASED, are_several: true });
        for slot in chain.incarnations.clone() {
            match records.pool.record_mut(slot) {
                Some(record) if matches!(record.phase, Phase::InFlight { .. }) => record.failed = true,
                _ => {
                    records.counts.ended += 1;
                    self.remove(records, slot, key);
                }
            }
        }
        self.releasing.push(key.clone());
    }

    fn look_later(&mut self, key: &Key, payload: u64) {
        self.looks.entry(key.instance).or_default().at(payload, key);
    }
}

impl<S, C, H> Incarnations<S, C, H> for Chains {
    fn find(&mut self, records: &mut Records<S, C, H>, admission: &Admission) -> Result<SlotId, Refusal> {
        let key = &admission.key;
        let chain = self.chains.get(key).filter(|chain| chain.stateless.is_none());
        let Some(&front) = chain.and_then(|chain| chain.incarnations.first()) else {
            self.refuse(records, admission);
            return Err(Refusal::Unknown);
        };
        let received = records.receive(front);
        if let Err(Refusal::Busy) = received {
            // Core sends the requests of an incarnation one at a time, so two incarnations have requests in core: the
            // client had two STARTs in flight.
            self.drop_states(records, key);
            return Err(Refusal::Unknown);
        }
        received
    }

    fn start(
        &mut self,
        records: &mut Records<S, C, H>,
        admission: &Admission,
        now: Instant,
    ) -> Result<SlotId, Refusal> {
        let key = &admission.key;
        let supersedes = self.prepare(records, key, now);
        let has_room = if supersedes.is_some() { Ok(()) } else { self.make_room(records, key.instance, now) };
        let acquired = has_room.and_then(|()| records.acquire(key, now));
        if let Ok(slot) = acquired {
            self.append(records, key, slot, supersedes.unwrap_or(Superseded::No));
        } else if records.can_grow && acquired == Err(Refusal::Memory(())) {
            // It is admitted again when there is another slab.
        } else if self.chains.get(key).is_some_and(|chain| !chain.incarnations.is_empty()) {
            // The requests that follow this START cannot be told from those of the other incarnations.
            self.drop_states(records, key);
        } else if !admission.end {
            self.refuse(records, admission);
        }
        acquired
    }

    fn settle(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key, end: bool, now: Instant) -> bool {
        let Some(record) = records.pool.record(slot) else { return false };
        let (failed, released_by, superseded) = (record.failed, record.released_by, record.superseded);
        let Some(chain) = self.chains.get_mut(key) else { return false };
        let is_front = chain.stateless.is_none() && chain.incarnations.first() == Some(&slot);
        if end || chain.incarnations.last() != Some(&slot) {
            chain.earlier_released_by = chain.earlier_released_by.max(released_by);
        }
        if end || (failed && is_front) {
            if !end {
                chain.stateless = Some(Stateless { released_by, are_several: false });
            }
            self.look_later(key, released_by);
            records.counts.ended += 1;
            self.remove(records, slot, key);
            return false;
        }
        if is_front {
            records.wait(slot, now);
            if superseded != Superseded::No {
                self.look_later(key, released_by);
            }
        }
        !is_front
    }

    fn with_id(&self, _: &Records<S, C, H>, instance: u32, id: &SequenceId) -> Option<SlotId> {
        let key = Key { instance, lane: None, id: id.clone() };
        self.chains.get(&key)?.incarnations.last().copied()
    }

    /// If the incarnation was at the front, the next one receives requests from now on.
    fn remove(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key) {
        if records.free(slot) {
            self.releasing.push(key.clone());
        }
        if let Some(chain) = self.chains.get_mut(key) {
            chain.incarnations.retain(|other| other != &slot);
            self.with_slots -= usize::from(chain.incarnations.is_empty());
        }
        self.advance(records, key);
    }

    fn used_capacity(&self) -> usize {
        self.with_slots
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn known(&self) -> (usize, usize) {
        let with_slots = self.chains.values().filter(|chain| !chain.incarnations.is_empty()).count();
        assert_eq!(self.with_slots, with_slots);
        let looks: usize = self.looks.values().map(|looks| looks.by_payload.len() + looks.by_time.len()).sum();
        (self.chains.len(), looks + self.releasing.len())
    }

    fn retire_instance(&mut self, instance: u32) -> Vec<SlotId> {
        let gone: Vec<_> = self.chains.extract_if(|key, _| key.instance == instance).map(|(_, chain)| chain).collect();
        self.with_slots -= gone.iter().filter(|chain| !chain.incarnations.is_empty()).count();
        self.looks.remove(&instance);
        gone.into_iter().flat_map(|chain| chain.incarnations).collect()
    }

    /// Looks at the chains whose payload is passed or whose time has come.
    fn conclude(&mut self, records: &mut Records<S, C, H>, instance: u32, now: Instant) {
        while let Some(key) = self.looks.get_mut(&instance).and_then(|looks| looks.next(records.passed(instance), now))
        {
            self.look(records, &key, now);
        }
    }

    fn next_look(&self) -> Option<Instant> {
        self.looks.values().filter_map(|looks| Some(looks.by_time.front()?.0)).min()
    }

    fn release_unheld(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        self.drop_states(records, key);
    }

    fn take_releasing(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.releasing)
    }

    fn has_been_released(&mut self, records: &mut Records<S, C, H>, key: &Key, now: Instant) {
        // The chains of an instance are removed with it.
        let Some(of) = records.instances.get_mut(&key.instance) else { return };
        let payload = of.watermark.release(now);
        let Some(chain) = self.chains.get_mut(key) else { return };
        if let Some(stateless) = &mut chain.stateless {
            stateless.released_by = payload;
            self.look_later(key, payload);
        } else if let Some(&front) = chain.incarnations.first()
            && let Some(record) = records.pool.record_mut(front)
            && matches!(record.phase, Phase::Releasing)
        {
            record.released_by = payload;
            if chain.incarnations.len() > 1 {
                chain.earlier_released_by = payload;
            }
            let superseded = record.superseded;
            records.wait(front, now);
            if superseded != Superseded::No {
                self.look_later(key, payload);
            }
        }
    }
}

impl Looks {
    fn at(&mut self, payload: u64, key: &Key) {
        self.by_payload.push(Look { payload, key: key.clone() });
    }

    /// The next chain to look at when payload `passed` is passed.
    fn next(&mut self, passed: u64, now: Instant) -> Option<Key> {
        if self.by_payload.peek().is_some_and(|look| look.payload <= passed) {
            return self.by_payload.pop().map(|look| look.key);
        }
        self.by_time.front().is_some_and(|(due, _)| *due <= now).then(|| self.by_time.pop_front())?.map(|(_, key)| key)
    }
}

/// The order is reversed: the heap returns the greatest look first, and this must be the one with the smallest payload.
impl Ord for Look {
    fn cmp(&self, other: &Self) -> Ordering {
        other.payload.cmp(&self.payload)
    }
}

impl PartialOrd for Look {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Look {
    fn eq(&self, other: &Self) -> bool {
        self.payload == other.payload
    }
}

impl Eq for Look {}
