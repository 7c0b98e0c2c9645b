//! Lanes, each with at most one sequence: core's slots with `direct`, or those of this backend's scheduler.

use std::time::Instant;

use foldhash::HashMap;

use super::records::{Phase, Records};
use super::{Admission, Incarnations, Refusal};
use crate::sequence::id::{Key, SequenceId};
use crate::state::pool::SlotId;

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

    /// A START in a lane proves that the sequence before it is over: core has sent its END or has dropped it.
    fn start(
        &mut self,
        records: &mut Records<S, C, H>,
        admission: &Admission,
        now: Instant,
    ) -> Result<SlotId, Refusal> {
        let key = &admission.key;
        if let Some(slot) = self.at(key).filter(|_| self.replaces(records, key)) {
            records.counts.ended += 1;
            self.remove(records, slot, key);
        }
        records.check_room(self.0.len())?;
        let slot = records.acquire(key, true, true, now)?;
        self.0.extend(key.lane.map(|lane| ((key.instance, lane), slot)));
        Ok(slot)
    }

    fn settle(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key, end: bool, now: Instant) -> bool {
        if end || records.pool.record(slot).is_some_and(|record| record.failed) {
            records.counts.ended += 1;
            self.remove(records, slot, key);
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

    fn remove(&mut self, records: &mut Records<S, C, H>, slot: SlotId, key: &Key) {
        if let Some(lane) = key.lane
            && self.at(key) == Some(slot)
        {
            self.0.remove(&(key.instance, lane));
        }
        records.free(slot);
    }

    fn used_capacity(&self) -> usize {
        self.0.len()
    }

    fn replaces(&self, records: &Records<S, C, H>, key: &Key) -> bool {
        let record = self.at(key).and_then(|slot| records.pool.record(slot));
        record.is_some_and(|record| matches!(record.phase, Phase::Waiting))
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn known(&self) -> (usize, usize) {
        (self.0.len(), 0)
    }

    fn retire_instance(&mut self, instance: u32) -> Vec<SlotId> {
        self.0.extract_if(|(lane_instance, _), _| *lane_instance == instance).map(|(_, slot)| slot).collect()
    }
}
