//! `oldest`: the incarnations of each id form a chain in the order of their STARTs (see [`crate`]).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use foldhash::HashMap;
use smallvec::SmallVec;

use super::incarnations::Incarnations;
use super::records::{Admission, Phase, Records, Refusal};
use crate::id::{Key, SequenceId};
use crate::pool::SlotId;

#[derive(Default)]
pub(super) struct Chains {
    chains: HashMap<Key, Chain>,
    /// Chains with an incarnation that has a slot.
    with_slots: usize,
    /// For each instance, the chains to look at when the watermark passes a payload; the smallest payload is on top.
    looks: HashMap<u32, BinaryHeap<Reverse<(u64, Key)>>>,
}

/// The incarnations of one id. A chain is removed when none of them has a slot and core has no request of them.
#[derive(Default)]
struct Chain {
    /// Incarnations with a slot. The first one is at the front and receives requests, unless `stateless` is set.
    incarnations: SmallVec<[SlotId; 1]>,
    /// Incarnations without a slot, at the front of the chain.
    stateless: Option<Stateless>,
    /// The latest payload that had begun when the last END was settled. Until it is passed, a request that the client
    /// sent before that END, on another connection, may still arrive.
    ended_in: u64,
}

/// Incarnations without a slot, of which core may have requests.
#[derive(Default)]
struct Stateless {
    /// Their last request is released with this payload at the latest, apart from `releasing`.
    released_by: u64,
    /// The slots that those of them had whose held requests are being released. No payload is known for these yet.
    releasing: SmallVec<[SlotId; 1]>,
    /// They ended because their requests cannot be told apart. A START that comes now may be older than theirs, so it
    /// is refused.
    are_ambiguous: bool,
}

impl Chains {
    /// The incarnation that receives the requests of an id.
    fn front(&self, key: &Key) -> Option<SlotId> {
        self.chains.get(key).filter(|chain| chain.stateless.is_none())?.incarnations.first().copied()
    }

    fn last(&self, key: &Key) -> Option<SlotId> {
        self.chains.get(key)?.incarnations.last().copied()
    }

    fn refusal(&self, key: &Key) -> Refusal {
        let stateless = self.chains.get(key).and_then(|chain| chain.stateless.as_ref());
        if stateless.is_some_and(|stateless| stateless.are_ambiguous) { Refusal::Ambiguous } else { Refusal::Unknown }
    }

    /// Refuses the requests of an id until everything that core has queued by the release of a payload has arrived.
    fn refuse_until(&mut self, key: &Key, payload: u64) {
        let chain = self.chains.entry(key.clone()).or_default();
        let stateless = chain.stateless.get_or_insert_default();
        stateless.released_by = stateless.released_by.max(payload);
        self.look_later(key, payload);
    }

    fn look_later(&mut self, key: &Key, payload: u64) {
        self.looks.entry(key.instance).or_default().push(Reverse((payload, key.clone())));
    }

    /// Brings the front of a chain up to date with the watermark. Releases the held request of an incarnation that has
    /// come to the front. Ends a front incarnation if another START has followed and core has no request of it.
    fn look<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        let passed = records.passed(key.instance);
        let Some(chain) = self.chains.get_mut(key) else { return };
        if let Some(stateless) = &chain.stateless {
            if stateless.released_by > passed || !stateless.releasing.is_empty() {
                return;
            }
            chain.stateless = None;
        }
        let Some(&front) = chain.incarnations.first() else {
            if chain.ended_in <= passed {
                self.chains.remove(key);
            }
            return;
        };
        let Some(record) = records.pool.record(front) else { return };
        let is_over = match record.phase {
            Phase::Held(_) if record.failed => true,
            Phase::Held(_) => return Self::release(records, key, front),
            // The client has started over, or core has dropped the sequence.
            Phase::Waiting => chain.incarnations.len() > 1 && records.has_nothing_queued(front),
            Phase::InFlight { .. } | Phase::Releasing => false,
        };
        if is_over {
            self.end_front(records, key, front);
        }
    }

    /// Ends the front incarnation. If the next one is certainly newer, it comes to the front. Otherwise all end,
    /// because their requests can't be told apart.
    fn end_front<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key, front: SlotId) {
        let next = self.chains.get(key).and_then(|chain| chain.incarnations.get(1));
        if next.and_then(|&next| records.pool.record(next)).is_some_and(|next| !next.is_newer) {
            self.end_all(records, key);
        } else {
            self.end(records, front, false);
        }
    }

    fn release<S, C, H>(records: &mut Records<S, C, H>, key: &Key, front: SlotId) {
        let releasing = records.instances.get(&key.instance).map_or(0, |instance| instance.watermark.releasing());
        let Some(record) = records.pool.record_mut(front) else { return };
        if let Phase::Held(held) = std::mem::replace(&mut record.phase, Phase::Releasing) {
            record.released_after = releasing;
            records.released.push((held, (key.clone(), front)));
        }
    }

    /// Ends all incarnations of an id, because their requests cannot be told apart. An incarnation with a request in
    /// flight ends when the request is settled.
    fn end_all<S, C, H>(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        self.refuse_until(key, records.payload(key.instance));
        if let Some(stateless) = self.chains.get_mut(key).and_then(|chain| chain.stateless.as_mut()) {
            stateless.are_ambiguous = true;
        }
        let slots = self.chains.get(key).map(|chain| chain.incarnations.clone()).unwrap_or_default();
        // From the back, so that none of them comes to the front.
        for slot in slots.into_iter().rev() {
            match records.pool.record_mut(slot) {
                Some(record) if matches!(record.phase, Phase::InFlight { .. }) => record.failed = true,
                _ => {
                    self.end(records, slot, false);
                }
            }
        }
    }
}

impl<S, C, H> Incarnations<S, C, H> for Chains {
    fn find(&mut self, records: &mut Records<S, C, H>, admission: &Admission) -> Result<SlotId, Refusal> {
        let key = &admission.key;
        let received = self.front(key).map(|front| records.receive(front));
        match received {
            Some(Err(Refusal::Busy)) => {
                // Core sends the requests of an incarnation one at a time, so two incarnations have requests in core.
                self.end_all(records, key);
                Err(Refusal::Ambiguous)
            }
            Some(received) => received,
            // Core may have more requests of this sequence. They must not reach a sequence that starts meanwhile.
            None => {
                self.refuse_until(key, records.payload(key.instance));
                Err(self.refusal(key))
            }
        }
    }

    fn start(&mut self, records: &mut Records<S, C, H>, admission: &Admission, now: Instant) -> Result<SlotId, Refusal>
    where
        C: Default,
    {
        let key = &admission.key;
        if self.refusal(key) == Refusal::Ambiguous {
            self.refuse_until(key, records.payload(key.instance));
            return Err(Refusal::Ambiguous);
        }
        let (front, last) = (self.front(key), self.last(key));
        // With several incarnations, core may have delayed this START behind a request of any of them. `conclude` uses
        // what this payload proves only after its STARTs, because the START of another incarnation may be among them.
        let is_newer = match last {
            Some(last) => front == Some(last) && records.is_newer_than(last),
            None => self.chains.get(key).is_none_or(|chain| chain.stateless.is_none()),
        };
        let is_only_one = !self.chains.contains_key(key);
        if let Some(front) = front.filter(|&front| is_newer && records.has_nothing_queued(front)) {
            // The client has started over, or core has dropped the sequence.
            self.end(records, front, false);
        }
        let starts_over = self.last(key).is_some();
        let has_room = if starts_over { Ok(()) } else { records.check_room(self.with_slots) };
        let acquired = has_room.and_then(|()| records.acquire(key, is_newer, is_only_one, now));
        match acquired {
            Ok(slot) => {
                let chain = self.chains.entry(key.clone()).or_default();
                self.with_slots += usize::from(chain.incarnations.is_empty());
                chain.incarnations.push(slot);
                if let Some(front) = self.front(key).filter(|_| starts_over)
                    && let Some(record) = records.pool.record(front)
                {
                    self.look_later(key, record.released_by);
                }
            }
            // The requests that follow this START cannot be told from those of the other incarnations.
            Err(_) if starts_over => self.end_all(records, key),
            // The requests that follow this START have no sequence. None follow it if it is also an END.
            Err(_) if !admission.end => self.refuse_until(key, records.payload(key.instance)),
            Err(_) => {}
        }
        acquired
    }

    fn settle(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key, end: bool, now: Instant) -> bool {
        let Some(record) = records.pool.record(slot) else { return false };
        let (failed, released_by) = (record.failed, record.released_by);
        let Some(chain) = self.chains.get(key) else { return false };
        let is_behind = chain.incarnations.first() != Some(&slot);
        if end {
            let payload = records.payload(key.instance);
            if let Some(chain) = self.chains.get_mut(key) {
                chain.ended_in = payload;
            }
            self.look_later(key, payload);
            self.end(records, slot, false);
            return false;
        }
        if failed && !is_behind {
            self.refuse_until(key, released_by);
            self.end_front(records, key, slot);
            return false;
        }
        if is_behind || chain.stateless.is_some() {
            return true;
        }
        let has_next = chain.incarnations.len() > 1;
        records.wait(slot, now);
        if has_next {
            self.look_later(key, released_by);
        }
        false
    }

    fn with_id(&self, _: &Records<S, C, H>, instance: u32, id: &SequenceId) -> Option<SlotId> {
        self.last(&Key { instance, lane: None, id: id.clone() })
    }

    /// If the incarnation was at the front, the next one receives requests from now on.
    fn end(&mut self, records: &mut Records<S, C, H>, slot: SlotId, expired: bool) {
        let Some(record) = records.pool.record(slot) else { return };
        let (key, is_releasing) = (record.key.clone(), matches!(record.phase, Phase::Held(_) | Phase::Releasing));
        records.end(slot, expired);
        if let Some(chain) = self.chains.get_mut(&key) {
            if is_releasing {
                chain.stateless.get_or_insert_default().releasing.push(slot);
            }
            chain.incarnations.retain(|other| other != &slot);
            self.with_slots -= usize::from(chain.incarnations.is_empty());
        }
        self.look(records, &key);
    }

    fn used_capacity(&self) -> usize {
        self.with_slots
    }

    fn starts_over(&self, key: &Key) -> bool {
        self.last(key).is_some()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn known(&self) -> (usize, usize) {
        let with_slots = self.chains.values().filter(|chain| !chain.incarnations.is_empty()).count();
        assert_eq!(self.with_slots, with_slots);
        let looks: usize = self.looks.values().map(BinaryHeap::len).sum();
        (self.chains.len(), looks)
    }

    fn retire_instance(&mut self, instance: u32) -> Vec<SlotId> {
        let gone: Vec<_> = self.chains.extract_if(|key, _| key.instance == instance).map(|(_, chain)| chain).collect();
        self.with_slots -= gone.iter().filter(|chain| !chain.incarnations.is_empty()).count();
        self.looks.remove(&instance);
        gone.into_iter().flat_map(|chain| chain.incarnations).collect()
    }

    fn conclude(&mut self, records: &mut Records<S, C, H>, instance: u32) {
        let passed = records.passed(instance);
        // One look at a time, because it may add others.
        while let Some(looks) = self.looks.get_mut(&instance)
            && looks.peek().is_some_and(|Reverse((payload, _))| *payload <= passed)
            && let Some(Reverse((_, key))) = looks.pop()
        {
            self.look(records, &key);
        }
    }

    fn release_unheld(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        self.end_all(records, key);
    }

    fn has_been_released(&mut self, records: &mut Records<S, C, H>, key: &Key, slot: SlotId, now: Instant) {
        // The chains of an instance are removed with it.
        let Some(of) = records.instances.get_mut(&key.instance) else { return };
        let payload = of.watermark.release(now);
        let Some(chain) = self.chains.get_mut(key) else { return };
        if let Some(record) = records.pool.record_mut(slot).filter(|_| chain.incarnations.contains(&slot)) {
            // If it is not being released any more, it has received its next request.
            if matches!(record.phase, Phase::Releasing) {
                record.released_by = payload;
                records.wait(slot, now);
                self.look_later(key, payload);
            }
        } else if let Some(stateless) = &mut chain.stateless
            && let Some(at) = stateless.releasing.iter().position(|releasing| *releasing == slot)
        {
            stateless.releasing.swap_remove(at);
            self.refuse_until(key, payload);
        }
    }
}
