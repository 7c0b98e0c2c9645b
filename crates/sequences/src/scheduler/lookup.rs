//! Sequences that are not here, and may be in a store ([`Rules::looks_up`](super::Rules::looks_up)).

use std::time::{Duration, Instant};

use super::request::Refused;
use super::{Phase, Scheduler, Sequence};
use crate::SequenceId;

impl<R> Scheduler<R> {
    /// Begins to look for the sequence of a request that is no START. Returns its lane.
    pub(super) fn look_up(
        &mut self,
        id: Option<SequenceId>,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<u32, Refused> {
        let id = id.unwrap_or(SequenceId::Number(0));
        let has_place = self.has_place();
        if !has_place && self.waiting.len() >= self.rules.max_waiting {
            return Err(self.no_place(Some(id)));
        }
        let until = self.until(wait, now);
        let lane = self.insert(id, until, true);
        self.elsewhere.insert(lane);
        self.place_or_wait(lane, has_place, until, now);
        Ok(lane)
    }

    /// The sequences that have to be looked for since the last call, each with its lane. To be called after each change.
    pub fn take_lookups(&mut self) -> Vec<(u32, SequenceId)> {
        let lookups = std::mem::take(&mut self.lookups);
        let with_id = |lane: u32| Some((lane, self.sequences.get(&lane)?.id.clone()));
        lookups.into_iter().filter_map(with_id).collect()
    }

    /// A sequence was found. `wake` gets its worker, which has to get its state before its requests. If a START has taken its
    /// id meanwhile, what was found may be the new sequence; then returns the requests, which cannot run.
    pub fn found(&mut self, lane: u32, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        let is_looked_for = |sequence: &&mut Sequence<R>| sequence.phase == Phase::LookedUp;
        let Some(sequence) = self.sequences.get_mut(&lane).filter(is_looked_for) else { return Vec::new() };
        if !self.elsewhere.remove(&lane) {
            return self.not_found(lane, now, wake);
        }
        (sequence.phase, sequence.has_state) = (Phase::Ready, true);
        let worker = sequence.worker;
        self.workers[worker].run(lane);
        wake.push(worker);
        Vec::new()
    }

    /// A sequence was not found. Returns its requests, which cannot run. `wake`: see [`Scheduler::fill_places`].
    pub fn not_found(&mut self, lane: u32, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        let refused = self.remove(lane);
        self.fill_places(now, wake);
        refused
    }
}
