//! `direct`: the sequence in each of core's slots.

use super::{Refusal, Sequences};
use crate::sequence::id::Key;
use crate::state::pool::SlotId;

impl<S: Clone, C: Default, H, E> Sequences<S, C, H, E> {
    /// The sequence that a request belongs to, unless it is a START.
    pub(super) fn find_in_lane(&mut self, key: &Key) -> Result<SlotId, Refusal<E>> {
        let slot = key.lane.and_then(|lane| self.lanes.get(&(key.instance, lane)).copied());
        let slot = slot.filter(|slot| self.pool.record(*slot).is_some_and(|record| record.key == *key));
        self.receive(slot.ok_or(Refusal::Unknown)?)
    }

    /// A START in a lane proves that the sequence before it is over, by END or because core has dropped it.
    pub(super) fn clear_lane(&mut self, instance: u32, lane: u32) {
        if let Some(&slot) = self.lanes.get(&(instance, lane))
            && self.is_waiting(slot)
        {
            self.counts.ended += 1;
            self.remove_from_lane(slot);
        }
    }

    /// Frees the slot of a sequence that is over.
    pub(super) fn remove_from_lane(&mut self, slot: SlotId) {
        let lane = self.pool.record(slot).and_then(|record| Some((record.key.instance, record.key.lane?)));
        if let Some(lane) = lane.filter(|lane| self.lanes.get(lane) == Some(&slot)) {
            self.lanes.remove(&lane);
        }
        // Nothing is held in a lane.
        self.free(slot);
    }
}
