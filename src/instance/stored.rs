//! What an instance does for sequences that are kept in a store: takes them in, and gives their bytes.

use sequences::pool::SlotId;
use sequences::{Admission, Key};

use super::Instance;
use crate::error::{RequestError, StoredError};
use crate::model::{Lease, RepeatKey};
use crate::snapshot::Snapshot;

impl Instance {
    /// Begins a sequence with a state that a store had. Its lane has no other. Returns how many steps it has made.
    pub fn adopt(&mut self, key: &Key, bytes: &[u8]) -> Result<u64, RequestError> {
        let decoded = Snapshot::decode(bytes, &self.model.binding);
        let Snapshot { state, mut extras } =
            decoded.map_err(|source| StoredError::Damaged { id: key.id.clone(), source })?;
        let steps = extras.steps;
        self.charge_held(&mut extras.held)?;
        let admission = Admission { key: key.clone(), start: true, end: false };
        let leases = self.sequences.admit(self.number, &[admission], |slot| self.store.drop(slot));
        for lease in leases {
            let mut lease = lease.map_err(|refusal| self.model.refusal(self.kind, refusal, key.id.clone()))?;
            self.store.write(lease.slot(), &state, None)?;
            let extras = std::mem::take(&mut extras);
            self.sequences.change_extras(lease.slot(), |kept| std::mem::replace(kept, extras));
            // If an error drops the lease before this, it leaves no sequence.
            lease.advance();
        }
        Ok(steps)
    }

    /// The sequence of a lease as bytes, behind `answer`; `None` if it is over.
    pub fn saveable(&mut self, lease: &Lease, answer: &[u8]) -> Result<Option<Vec<u8>>, RequestError> {
        self.bytes_of(lease.slot(), answer)
    }

    /// The same, of the sequence in a lane that has no request running.
    pub fn saveable_in(&mut self, lane: u32) -> Result<Option<Vec<u8>>, RequestError> {
        let Some(slot) = self.sequences.slot_in_lane(self.number, lane) else { return Ok(None) };
        self.bytes_of(slot, b"")
    }

    /// Whether a request comes at the step of its sequence that it says. The sequence in the lane has no request running.
    pub fn is_at(&self, lane: u32, RepeatKey { step, left, .. }: RepeatKey) -> bool {
        let slot = self.sequences.slot_in_lane(self.number, lane);
        let Some(extras) = slot.and_then(|slot| self.sequences.extras(slot)) else { return false };
        step == extras.steps && left.is_none_or(|left| Some(left) == self.left_over(&extras))
    }

    /// Whether it has the sequence in a lane.
    pub fn has(&self, lane: u32) -> bool {
        self.sequences.slot_in_lane(self.number, lane).is_some()
    }

    fn bytes_of(&mut self, slot: SlotId, before: &[u8]) -> Result<Option<Vec<u8>>, RequestError> {
        let Some(state) = self.store.read(slot)? else { return Ok(None) };
        let Some(extras) = self.sequences.extras(slot) else { return Ok(None) };
        Ok(Some(Snapshot { state, extras }.encode_after(before, &self.model.binding)?))
    }
}
