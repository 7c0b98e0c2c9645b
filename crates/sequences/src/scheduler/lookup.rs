//! Sequences that may be in a store ([`Rules::looks_up`](super::Rules::looks_up)), are entered there
//! ([`Rules::enters_starts`](super::Rules::enters_starts)), or leave for another server.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::request::{Lookup, OverBy, Refused};
use super::{Phase, Queued, Scheduler, Sequence};
use crate::SequenceId;

impl<R> Scheduler<R> {
    pub(super) fn no_longer_closing(&mut self, id: &SequenceId, lane: u32) {
        if let Some(lanes) = self.closing.get_mut(id) {
            lanes.remove(&lane);
            if lanes.is_empty() {
                self.closing.remove(id);
            }
        }
    }

    /// Begins to look for the sequence of a request that is no START. Returns its lane.
    pub(super) fn look_up(&mut self, id: SequenceId, wait: Option<Duration>, now: Instant) -> Result<u32, Refused> {
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

    /// The sequences that have to be looked for or entered since the last call. To be called after each change.
    pub fn take_lookups(&mut self) -> Vec<Lookup> {
        let lookups = std::mem::take(&mut self.lookups);
        let lookup = |lane: u32| {
            let id = self.sequences.get(&lane)?.id.clone();
            Some(Lookup { lane, id, starts: !self.elsewhere.contains(&lane) })
        };
        lookups.into_iter().filter_map(lookup).collect()
    }

    /// Whether a sequence is still to be looked for: no START has taken its id.
    pub fn is_looked_for(&self, lane: u32) -> bool {
        self.elsewhere.contains(&lane)
    }

    /// Whether an older sequence with its id has an END that has not run yet.
    pub fn is_behind_an_end(&self, lane: u32) -> bool {
        let closing = self.sequences.get(&lane).and_then(|of| self.closing.get(&of.id));
        closing.and_then(BTreeSet::first).is_some_and(|&first| first < lane)
    }

    /// The first request of a sequence that waits for the store.
    pub fn first_request(&self, lane: u32) -> Option<&R> {
        match self.sequences.get(&lane)?.requests.front()? {
            Queued::Request(request, _) | Queued::Begun(request) => Some(request),
            Queued::CloneTo(_) => None,
        }
    }

    /// A sequence was entered in the store. `wake` gets its worker.
    pub fn entered(&mut self, lane: u32, wake: &mut Vec<usize>) {
        let Some(sequence) = self.sequences.get_mut(&lane).filter(|of| of.phase == Phase::LookedUp) else { return };
        wake.push(sequence.get_ready(lane, &mut self.workers));
    }

    /// A sequence leaves for another server: at once if it is idle, else when its request has run. `wake` gets its
    /// worker, which still has its state. Returns the requests that cannot run here. A sequence that ends, or has not
    /// begun, stays.
    pub fn release(&mut self, lane: u32, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        let Some(sequence) = self.sequences.get_mut(&lane) else { return Vec::new() };
        if sequence.closed || !sequence.has_state || matches!(sequence.phase, Phase::Waiting(_) | Phase::LookedUp) {
            return Vec::new();
        }
        sequence.leaves = true;
        wake.push(sequence.worker);
        let is_begun = matches!(sequence.requests.front(), Some(Queued::Begun(_)));
        // A request that has made a step is finished here, because no other server has the state between its steps.
        let kept = usize::from(is_begun);
        let mut refused = Vec::new();
        let mut clones = Vec::new();
        for queued in sequence.requests.drain(kept..) {
            match queued {
                Queued::Request(request, _) | Queued::Begun(request) => {
                    refused.push((request, Refused::Moved(sequence.id.clone())));
                }
                Queued::CloneTo(clone) => clones.push((clone, sequence.id.clone())),
            }
        }
        self.queued -= sequence.queued;
        sequence.queued = 0;
        if sequence.phase != Phase::Running && !is_begun {
            self.drop_idle(lane, OverBy::Released);
            self.fill_places(now, wake);
        }
        for (clone, source) in clones {
            refused
                .extend(self.remove(clone).into_iter().map(|(request, _)| (request, Refused::Missing(source.clone()))));
        }
        refused
    }

    /// Takes no more sequences from now on. Returns the requests of those that wait for a place.
    pub fn take_no_more(&mut self) -> Vec<(R, Refused)> {
        self.drains = true;
        let waiting = self.waiting.clone().into_iter();
        waiting.flat_map(|lane| self.remove(lane)).map(|(request, _)| (request, Refused::Drains)).collect()
    }

    /// Takes no more sequences, and lets those that are here leave for other servers, each when its queued requests
    /// have run or were refused. Returns the requests that cannot run here. `wake`: see [`Scheduler::release`].
    pub fn drain(&mut self, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        // First, because those that leave free places.
        let mut refused = self.take_no_more();
        for lane in self.sequences.keys().copied().collect::<Vec<_>>() {
            refused.extend(self.release(lane, now, wake));
            // One that has not begun leaves when it has.
            self.sequences.get_mut(&lane).into_iter().for_each(|of| of.leaves = true);
        }
        refused
    }

    /// A sequence was found. `wake` gets its worker, which has to get its state before its requests. If a START has
    /// taken its id meanwhile, what was found may be the new sequence; then returns the requests, which cannot run.
    pub fn found(&mut self, lane: u32, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        let is_looked_for = |sequence: &&mut Sequence<R>| sequence.phase == Phase::LookedUp;
        let Some(sequence) = self.sequences.get_mut(&lane).filter(is_looked_for) else { return Vec::new() };
        if !self.elsewhere.remove(&lane) {
            return self.not_found(lane, now, wake);
        }
        sequence.has_state = true;
        wake.push(sequence.get_ready(lane, &mut self.workers));
        Vec::new()
    }

    /// A sequence was not found. Returns its requests, which cannot run. `wake`: see [`Scheduler::fill_places`].
    pub fn not_found(&mut self, lane: u32, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        let refused = self.remove(lane);
        self.fill_places(now, wake);
        refused
    }
}
