//! `oldest`: the incarnations of each id, in the order of their STARTs (see [`crate::sequence`]).

use std::cmp::Ordering;
use std::time::Instant;

use smallvec::SmallVec;

use super::{Admission, Phase, Refusal, Sequences, Superseded};
use crate::sequence::id::Key;
use crate::state::pool::SlotId;

/// The incarnations of one id. It stays until core can have nothing left of any of them.
#[derive(Default)]
pub(super) struct Chain {
    /// Those with a slot. The first one receives, unless `stateless` is set.
    pub(super) incarnations: SmallVec<[SlotId; 1]>,
    /// In front: an incarnation without a slot.
    stateless: Option<Stateless>,
    /// The requests of all incarnations before the last one are released when those of this payload are. A START that
    /// waited behind one of them has come when this payload is passed.
    earlier_released_by: u64,
}

/// What core may have of incarnations without a slot.
#[derive(Clone, Copy)]
struct Stateless {
    /// The last request is released when those of this payload are.
    released_by: u64,
    /// There may be more than one, so an END does not end them.
    are_several: bool,
}

/// The request of an incarnation is being released outside a payload.
const BEING_RELEASED: u64 = u64::MAX;

/// A chain to look at when a payload has been passed.
pub(super) struct Look {
    payload: u64,
    key: Key,
}

impl<S: Clone, C: Default, H, E> Sequences<S, C, H, E> {
    /// The incarnation that a request belongs to, unless it is a START.
    pub(super) fn find_in_chain(&mut self, admission: &Admission, released: &mut Vec<H>) -> Result<SlotId, Refusal<E>> {
        let key = &admission.key;
        match self.chains.get(key) {
            Some(Chain { stateless: None, incarnations, .. }) if !incarnations.is_empty() => {
                let received = self.receive(incarnations[0]);
                if let Err(Refusal::Busy) = received {
                    // Two incarnations have requests in core: the client had two STARTs in flight.
                    self.drop_states(key, released);
                    return Err(Refusal::Unknown);
                }
                received
            }
            _ => {
                self.refuse_in_chain(admission, released);
                Err(Refusal::Unknown)
            }
        }
    }

    /// A request has come of an incarnation without a slot. More of it may be in core.
    fn refuse_in_chain(&mut self, admission: &Admission, released: &mut Vec<H>) {
        let Admission { key, end, .. } = admission;
        let payload = self.payload(key.instance);
        let chain = self.chains.entry(key.clone()).or_default();
        let are_several = chain.stateless.is_some_and(|stateless| stateless.are_several);
        chain.stateless = (!end || are_several).then_some(Stateless { released_by: payload, are_several });
        if *end {
            chain.earlier_released_by = payload;
        }
        self.look_later(key, payload);
        self.advance(key, released);
    }

    /// A START comes: ends what it proves to be over. If an incarnation is left, returns how the START supersedes it.
    pub(super) fn prepare_chain(&mut self, key: &Key, now: Instant, released: &mut Vec<H>) -> Option<Superseded> {
        self.look(key, now, released);
        let passed_before = self.instances.get(&key.instance).map_or(0, |of| of.watermark.passed_before());
        let chain = self.chains.get(key)?;
        let (&front, &last) = (chain.incarnations.first()?, chain.incarnations.last()?);
        let record = self.pool.record(last)?;
        let supersedes = if record.born.max(chain.earlier_released_by) <= passed_before {
            // What core had held back when that one started would have come.
            Superseded::Later
        } else {
            Superseded::Soon
        };
        if supersedes == Superseded::Later
            && front == last
            && chain.stateless.is_none()
            && self.has_nothing_queued(front)
        {
            // It has been started over, or core has dropped it.
            self.counts.ended += 1;
            self.remove_from_chain(front, key, released);
            return None;
        }
        Some(supersedes)
    }

    /// The START has a slot.
    pub(super) fn append_to_chain(&mut self, key: &Key, slot: SlotId, supersedes: Option<Superseded>) {
        let chain = self.chains.entry(key.clone()).or_default();
        let earlier = chain.incarnations.clone();
        chain.incarnations.push(slot);
        self.chains_with_slots += usize::from(earlier.is_empty());
        let Some(supersedes) = supersedes else { return };
        let mut earlier_released_by = chain.earlier_released_by;
        for earlier in earlier {
            if let Some(record) = self.pool.record_mut(earlier)
                && record.superseded == Superseded::No
            {
                record.superseded = supersedes;
                if matches!(record.phase, Phase::Waiting) {
                    earlier_released_by = earlier_released_by.max(record.released_by);
                }
                let payload = record.released_by;
                self.look_later(key, payload);
            }
        }
        if let Some(chain) = self.chains.get_mut(key) {
            chain.earlier_released_by = earlier_released_by;
        }
    }

    /// A START has no slot: what follows it is refused.
    pub(super) fn refuse_start_in_chain(&mut self, admission: &Admission, released: &mut Vec<H>) {
        let key = &admission.key;
        if self.chains.get(key).is_some_and(|chain| !chain.incarnations.is_empty()) {
            // Nor can it be told from what core has of the others.
            self.drop_states(key, released);
        } else if !admission.end {
            self.refuse_in_chain(admission, released);
        }
    }

    pub(super) fn settle_in_chain(
        &mut self,
        slot: SlotId,
        key: &Key,
        end: bool,
        now: Instant,
        released: &mut Vec<H>,
    ) -> bool {
        let Some(record) = self.pool.record(slot) else { return false };
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
            self.counts.ended += 1;
            self.remove_from_chain(slot, key, released);
            return false;
        }
        if is_front {
            self.wait(slot, now);
            if superseded != Superseded::No {
                self.look_later(key, released_by);
            }
        }
        !is_front
    }

    /// A request that was to be held has been released. From now on core may send requests of any incarnation of the id,
    /// so none is served.
    pub fn release_unheld(&mut self, slot: SlotId, released: &mut Vec<H>) {
        if let Some(key) = self.pool.record(slot).map(|record| record.key.clone()) {
            self.drop_states(&key, released);
        }
    }

    /// The ids of the held requests that are being released; to be followed by [`Sequences::have_been_released`].
    pub fn take_releasing(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.releasing)
    }

    /// Held requests of these ids have been released: from now on core can have what follows them.
    pub fn have_been_released(&mut self, keys: Vec<Key>, now: Instant) {
        for key in keys {
            // An instance that has gone has taken its chains along.
            let Some(of) = self.instances.get_mut(&key.instance) else { continue };
            let payload = of.watermark.release(now);
            let Some(chain) = self.chains.get_mut(&key) else { continue };
            if let Some(stateless) = &mut chain.stateless {
                stateless.released_by = payload;
                self.look_later(&key, payload);
            } else if let Some(&front) = chain.incarnations.first()
                && let Some(record) = self.pool.record_mut(front)
                && matches!(record.phase, Phase::Releasing)
            {
                record.released_by = payload;
                if chain.incarnations.len() > 1 {
                    chain.earlier_released_by = payload;
                }
                let superseded = record.superseded;
                self.wait(front, now);
                if superseded != Superseded::No {
                    self.look_later(&key, payload);
                }
            }
        }
    }

    /// Looks at the chains that have waited for what has been passed, or for the time.
    pub(super) fn conclude(&mut self, instance: u32, now: Instant, released: &mut Vec<H>) {
        while let Some(of) = self.instances.get_mut(&instance)
            && of.looks.peek().is_some_and(|look| look.payload <= of.watermark.passed())
            && let Some(look) = of.looks.pop()
        {
            self.look(&look.key, now, released);
        }
        while let Some(of) = self.instances.get_mut(&instance)
            && of.late_looks.front().is_some_and(|(due, _)| *due <= now)
            && let Some((_, key)) = of.late_looks.pop_front()
        {
            self.look(&key, now, released);
        }
    }

    /// Ends what core has nothing left of, if something else waits for it.
    fn look(&mut self, key: &Key, now: Instant, released: &mut Vec<H>) {
        let passed = self.passed(key.instance);
        let Some(chain) = self.chains.get_mut(key) else { return };
        if chain.stateless.is_some_and(|stateless| stateless.released_by <= passed) {
            chain.stateless = None;
        }
        let Some(&front) = chain.incarnations.first().filter(|_| chain.stateless.is_none()) else {
            return self.advance(key, released);
        };
        let superseded = self.pool.record(front).map_or(Superseded::No, |record| record.superseded);
        if superseded == Superseded::No || !self.has_nothing_queued(front) {
            self.advance(key, released);
        } else if superseded == Superseded::Soon && self.has_just_answered(front, now) {
            // If the next one is older, a client that still sends goes on with the front one, and all is well.
            let due = now + self.policy.rest;
            if let Some(of) = self.instances.get_mut(&key.instance) {
                of.late_looks.push_back((due, key.clone()));
            }
        } else {
            self.counts.ended += 1;
            self.remove_from_chain(front, key, released);
        }
    }

    /// Whether an incarnation has waited for its next request for less than the time of rest.
    fn has_just_answered(&self, slot: SlotId, now: Instant) -> bool {
        let of = self.pool.record(slot).and_then(|record| self.instances.get(&record.key.instance));
        of.and_then(|of| of.idle.get(&slot)).is_some_and(|&since| now < since + self.policy.rest)
    }

    /// Whether an incarnation waits for a request and core has none.
    fn has_nothing_queued(&self, slot: SlotId) -> bool {
        let Some(record) = self.pool.record(slot) else { return false };
        matches!(record.phase, Phase::Waiting) && record.released_by <= self.passed(record.key.instance)
    }

    /// Frees the slot of an incarnation that is over. If it was in front, the next one receives.
    pub(super) fn remove_from_chain(&mut self, slot: SlotId, key: &Key, released: &mut Vec<H>) {
        let held = self.free(slot);
        if let Some(held) = held {
            self.releasing.push(key.clone());
            released.push(held);
        }
        if let Some(chain) = self.chains.get_mut(key) {
            chain.incarnations.retain(|other| other != &slot);
            self.chains_with_slots -= usize::from(chain.incarnations.is_empty());
        }
        self.advance(key, released);
    }

    /// Releases the START of the incarnation that is in front now. Forgets a chain when core has nothing left of it.
    fn advance(&mut self, key: &Key, released: &mut Vec<H>) {
        let passed = self.passed(key.instance);
        let Some(chain) = self.chains.get_mut(key) else { return };
        if chain.stateless.is_some() {
            return;
        }
        let Some(&front) = chain.incarnations.first() else {
            if chain.earlier_released_by <= passed {
                self.chains.remove(key);
            }
            return;
        };
        let Some(record) = self.pool.record_mut(front).filter(|record| matches!(record.phase, Phase::Held(_))) else {
            return;
        };
        if record.failed {
            chain.stateless = Some(Stateless { released_by: BEING_RELEASED, are_several: false });
            self.counts.ended += 1;
            self.remove_from_chain(front, key, released);
        } else if let Phase::Held(held) = std::mem::replace(&mut record.phase, Phase::Releasing) {
            let instance = self.instances.get(&key.instance);
            record.released_after = instance.map_or(0, |instance| instance.watermark.releasing());
            self.held -= 1;
            self.releasing.push(key.clone());
            released.push(held);
        }
    }

    /// Ends all incarnations of an id, as their requests cannot be told apart. Those that are being worked on end when
    /// they are settled.
    fn drop_states(&mut self, key: &Key, released: &mut Vec<H>) {
        let Some(chain) = self.chains.get_mut(key) else { return };
        chain.stateless = Some(Stateless { released_by: BEING_RELEASED, are_several: true });
        for slot in chain.incarnations.clone() {
            match self.pool.record_mut(slot) {
                Some(record) if matches!(record.phase, Phase::InFlight { .. }) => record.failed = true,
                _ => {
                    self.counts.ended += 1;
                    self.remove_from_chain(slot, key, released);
                }
            }
        }
        self.releasing.push(key.clone());
    }

    fn look_later(&mut self, key: &Key, payload: u64) {
        if let Some(of) = self.instances.get_mut(&key.instance) {
            of.looks.push(Look { payload, key: key.clone() });
        }
    }
}

/// The smallest payload is the greatest look: a heap gives the greatest first.
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
