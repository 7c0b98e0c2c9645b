//! Which incarnation a request belongs to, and the simple case: a lane of core (`direct`) or of this backend's
//! scheduler identifies it.

use std::time::Instant;

use foldhash::HashMap;

use super::records::{Admission, Phase, Records, Refusal};
use crate::id::{Key, SequenceId};
use crate::pool::SlotId;

/// Decides which incarnation a request belongs to: [`Lanes`] with `direct` and where this backend
/// schedules, [`Chains`](super::chains::Chains) with `oldest`.
pub(super) trait Incarnations<S, C, H>: Send {
    fn find(&mut self, records: &mut Records<S, C, H>, admission: &Admission) -> Result<SlotId, Refusal>;

    fn start(&mut self, records: &mut Records<S, C, H>, admission: &Admission, now: Instant) -> Result<SlotId, Refusal>
    where
        C: Default;

    /// See [`super::Sequences::settle`]. Returns whether the request must be held.
    fn settle(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key, end: bool, now: Instant) -> bool;

    fn in_lane(&self, _instance: u32, _lane: u32) -> Option<SlotId> {
        None
    }

    /// The slot of the incarnation with this id that began last on an instance.
    fn with_id(&self, records: &Records<S, C, H>, instance: u32, id: &SequenceId) -> Option<SlotId>;

    /// Ends an incarnation ([`Records::end`]). `expired`: it has been idle for too long.
    fn end(&mut self, records: &mut Records<S, C, H>, slot: SlotId, expired: bool);

    fn used_capacity(&self) -> usize;

    /// Removes the incarnations of an instance, and returns their slots.
    fn retire_instance(&mut self, instance: u32) -> Vec<SlotId>;

    /// Ends the incarnation that a START certainly replaces.
    fn replace(&mut self, _records: &mut Records<S, C, H>, _key: &Key) {}

    /// Whether a START needs a slot although its sequence uses no more of the capacity.
    fn starts_over(&self, _key: &Key) -> bool {
        false
    }

    /// Ends the incarnations that the watermark of an instance proves to be over.
    fn conclude(&mut self, _records: &mut Records<S, C, H>, _instance: u32) {}

    fn release_unheld(&mut self, _records: &mut Records<S, C, H>, _key: &Key) {}

    fn has_been_released(&mut self, _records: &mut Records<S, C, H>, _key: &Key, _slot: SlotId, _now: Instant) {}

    /// Number of lanes or chains, and number of keys that are queued to be looked at.
    #[cfg(any(test, feature = "fuzzing"))]
    fn known(&self) -> (usize, usize);
}

/// The slot of the sequence in each lane. The key is the instance and the lane.
#[derive(Default)]
pub(super) struct Lanes(HashMap<(u32, u32), SlotId>);

impl Lanes {
    fn at(&self, key: &Key) -> Option<SlotId> {
        self.0.get(&(key.instance, key.lane?)).copied()
    }
}

impl<S, C, H> Incarnations<S, C, H> for Lanes {
    fn find(&mut self, records: &mut Records<S, C, H>, admission: &Admission) -> Result<SlotId, Refusal> {
        let key = &admission.key;
        let slot = self.at(key).filter(|slot| records.pool.record(*slot).is_some_and(|record| record.key == *key));
        records.receive(slot.ok_or(Refusal::Unknown)?)
    }

    fn start(&mut self, records: &mut Records<S, C, H>, admission: &Admission, now: Instant) -> Result<SlotId, Refusal>
    where
        C: Default,
    {
        let key = &admission.key;
        records.check_room(self.0.len())?;
        let slot = records.acquire(key, true, true, now)?;
        self.0.extend(key.lane.map(|lane| ((key.instance, lane), slot)));
        Ok(slot)
    }

    fn settle(&mut self, records: &mut Records<S, C, H>, slot: SlotId, _: &Key, end: bool, now: Instant) -> bool {
        if end || records.pool.record(slot).is_some_and(|record| record.failed) {
            self.end(records, slot, false);
        } else {
            records.wait(slot, now);
        }
        false
    }

    fn in_lane(&self, instance: u32, lane: u32) -> Option<SlotId> {
        self.0.get(&(instance, lane)).copied()
    }

    fn with_id(&self, records: &Records<S, C, H>, instance: u32, id: &SequenceId) -> Option<SlotId> {
        let has_id = |slot: &SlotId| records.pool.record(*slot).is_some_and(|record| record.key.id == *id);
        // Core drops a sequence without a word, so a lane may have an old one with the same id.
        let of = self.0.iter().filter(|((of, _), slot)| *of == instance && has_id(slot)).map(|(_, slot)| *slot);
        of.max_by_key(|slot| records.pool.record(*slot).map(|record| record.life.since))
    }

    fn end(&mut self, records: &mut Records<S, C, H>, slot: SlotId, expired: bool) {
        if let Some(key) = records.pool.record(slot).map(|record| &record.key)
            && let Some(lane) = key.lane
            && self.at(key) == Some(slot)
        {
            self.0.remove(&(key.instance, lane));
        }
        records.end(slot, expired);
    }

    fn used_capacity(&self) -> usize {
        self.0.len()
    }

    /// A START in a lane proves that the sequence before it is over: core has sent its END or has dropped it.
    fn replace(&mut self, records: &mut Records<S, C, H>, key: &Key) {
        let waits = |slot: &SlotId| records.pool.record(*slot).is_some_and(|of| matches!(of.phase, Phase::Waiting));
        if let Some(slot) = self.at(key).filter(waits) {
            self.end(records, slot, false);
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn known(&self) -> (usize, usize) {
        (self.0.len(), 0)
    }

    fn retire_instance(&mut self, instance: u32) -> Vec<SlotId> {
        self.0.extract_if(|(lane_instance, _), _| *lane_instance == instance).map(|(_, slot)| slot).collect()
    }
}
