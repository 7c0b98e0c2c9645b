//! Requests that arrive: whether they may run, and which sequence they begin.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::request::{Begins, Control, OnDuplicateStart, Origin, OverBy, Refused, Rules};
use super::{Phase, Queued, Scheduler, Sequence};
use crate::SequenceId;

impl<R> Scheduler<R> {
    /// Takes a request. Returns the worker to wake, or the request and why it cannot run. Then nothing has changed,
    /// except by [`Scheduler::refuse_start`]. `wait`: how long a START may wait for a place. When all requests that
    /// have come are taken, the caller calls [`Scheduler::fill_places`].
    pub fn arrive(
        &mut self,
        control: Control,
        request: R,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<Option<usize>, (R, Refused)> {
        let known = control.id.as_ref().and_then(|id| self.by_id.get(id)).copied();
        if self.drains && (control.start || known.is_none()) {
            return Err((request, Refused::Drains));
        }
        let found = if control.start {
            let begun = self.begin(control.id.clone(), control.origin.clone(), known, wait, now);
            if let (Err(_), Some(id)) = (&begun, control.id.as_ref().filter(|_| control.starts_anew())) {
                self.refuse_start(id);
            }
            begun
        } else {
            // The caller has refused a request with neither START nor id, so there is an id.
            let id = control.id.unwrap_or(SequenceId::Number(0));
            self.find(id, known, wait, now).map(|lane| (lane, Begins::Plain))
        };
        let (lane, begins) = match found {
            Ok(found) => found,
            Err(refused) => return Err((request, refused)),
        };
        if control.end {
            self.close(lane);
        }
        let Some(sequence) = self.sequences.get_mut(&lane) else { return Ok(None) };
        sequence.requests.push_back(Queued::Request(request, begins));
        sequence.queued += 1;
        self.queued += 1;
        let is_idle = sequence.phase == Phase::Idle;
        Ok(is_idle.then(|| sequence.get_ready(lane, &mut self.workers)))
    }

    /// With [`OnDuplicateStart::Restart`], a START that is refused also ends the live sequence with its id. Otherwise
    /// the requests that the client has sent behind the START would get the state of that sequence. The caller then
    /// calls [`Scheduler::fill_places`].
    pub fn refuse_start(&mut self, id: &SequenceId) {
        if let (Some(&lane), OnDuplicateStart::Restart) = (self.by_id.get(id), self.rules.on_duplicate_start) {
            self.replace(lane);
        }
    }

    /// Ends a sequence as soon as its queued requests have run.
    fn replace(&mut self, lane: u32) {
        if self.is_idle(lane) { self.drop_idle(lane, OverBy::Replaced) } else { self.close(lane) }
    }

    /// Finds the lane of a request that is not a START. `known` is the lane of the live sequence with its id.
    fn find(
        &mut self,
        id: SequenceId,
        known: Option<u32>,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<u32, Refused> {
        let Some(lane) = known else {
            if self.rules.looks_up {
                return self.look_up(id, wait, now);
            }
            return Err(if self.parked.contains_key(&id) { Refused::Parked(id) } else { Refused::Missing(id) });
        };
        if self.sequences.get(&lane).is_some_and(|sequence| sequence.leaves) {
            return Err(Refused::Moved(id));
        }
        self.check_queue(self.queued_in(lane), id)?;
        Ok(lane)
    }

    fn queued_in(&self, lane: u32) -> usize {
        self.sequences.get(&lane).map_or(0, |sequence| sequence.queued)
    }

    /// Refuses one more request of a sequence with this id if too many wait.
    fn check_queue(&self, queued: usize, id: SequenceId) -> Result<(), Refused> {
        let max = self.rules.max_queued;
        if queued < max { Ok(()) } else { Err(Refused::TooManyQueued { id, max }) }
    }

    /// Whether requests with these controls can arrive one after the other. Returns the position of the first that
    /// cannot, and why.
    pub fn check(&self, controls: &[&Control]) -> Result<(), (usize, Refused)> {
        /// What the rows before have made of a sequence.
        struct Changed {
            id: SequenceId,
            lives: bool,
            queued: usize,
        }
        let Rules { max_sequences, max_waiting, on_duplicate_start, idle, looks_up, .. } = self.rules;
        let mut changed: Vec<Changed> = Vec::new();
        let (mut ids, mut starts, mut replaced) = (self.ids.clone(), 0, 0);
        for (row, Control { id, start, end, .. }) in controls.iter().enumerate() {
            let by_request = |id: &SequenceId| changed.iter().rev().find(|changed| changed.id == *id);
            let is_live =
                |id: &SequenceId| by_request(id).map_or_else(|| self.by_id.contains_key(id), |changed| changed.lives);
            let is_taken = |id: &SequenceId| is_live(id) || self.parked.contains_key(id);
            let made = if *start && id.is_none() { Some(ids.next(is_taken)) } else { None };
            let Some(known) = id.clone().or(made) else { continue };
            if self.drains && (*start || !is_live(&known)) {
                return Err((row, Refused::Drains));
            }
            let leaves = |lane: &u32| self.sequences.get(lane).is_some_and(|sequence| sequence.leaves);
            if !start && by_request(&known).is_none() && self.by_id.get(&known).is_some_and(leaves) {
                return Err((row, Refused::Moved(known)));
            }
            let mut needs_place = *start;
            match (start, is_live(&known)) {
                (false, false) if looks_up => needs_place = true,
                (false, false) => return Err((row, Refused::Missing(known))),
                (true, true) if on_duplicate_start == OnDuplicateStart::Reject => {
                    return Err((row, Refused::Exists { id: known, idle }));
                }
                (true, true)
                    if by_request(&known).is_none()
                        && self.by_id.get(&known).is_some_and(|&lane| self.is_idle(lane)) =>
                {
                    replaced += 1;
                }
                _ => {}
            }
            starts += usize::from(needs_place);
            let taken = self.placed + self.waiting.len() + starts;
            if needs_place && taken > max_sequences + max_waiting + replaced {
                return Err((row, self.no_place(id.clone())));
            }
            let queued = match by_request(&known) {
                _ if *start => 0,
                Some(changed) => changed.queued,
                None => self.by_id.get(&known).map_or(0, |&lane| self.queued_in(lane)),
            };
            self.check_queue(queued, known.clone()).map_err(|refused| (row, refused))?;
            changed.push(Changed { id: known, lives: !end, queued: queued + 1 });
        }
        Ok(())
    }

    /// Why a START is refused when every place is taken and no further START may wait.
    pub(super) const fn no_place(&self, id: Option<SequenceId>) -> Refused {
        match self.rules {
            Rules { max_waiting: 0, max_sequences: max, idle, .. } => Refused::TooMany { id, max, idle },
            Rules { max_waiting: max, idle, .. } => Refused::QueueFull { id, max, idle },
        }
    }

    /// Begins the sequence of a START. `known` is the lane of the live sequence that has its id. Returns its lane, and
    /// what it begins with.
    fn begin(
        &mut self,
        id: Option<SequenceId>,
        origin: Origin,
        known: Option<u32>,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<(u32, Begins), Refused> {
        if let (Some(id), Some(_), OnDuplicateStart::Reject) = (&id, known, self.rules.on_duplicate_start)
            && origin != Origin::Parked
        {
            return Err(Refused::Exists { id: id.clone(), idle: self.rules.idle });
        }
        let source = match origin {
            Origin::Own => None,
            Origin::Clone(of) => {
                let source = self.by_id.get(&of).copied().ok_or_else(|| Refused::Missing(of.clone()))?;
                if known == Some(source) {
                    return Err(Refused::CloneOfItself(of));
                }
                if !matches!(self.sequences.get(&source).map(|of| of.phase), Some(Phase::Waiting(_)) | None) {
                    Some(source)
                } else {
                    // It has not begun, so it has no state and no worker.
                    return Err(Refused::Missing(of));
                }
            }
            Origin::Parked => return self.resume(id, known, now).map(|lane| (lane, Begins::Resumed)),
        };
        let replaces_idle = known.is_some_and(|lane| self.is_idle(lane));
        let Rules { max_sequences, max_waiting, idle, .. } = self.rules;
        let has_place = replaces_idle || self.has_place();
        // A clone cannot wait: the other sequence would go on meanwhile.
        if !has_place && source.is_some() {
            return Err(Refused::TooMany { id, max: max_sequences, idle });
        }
        if !has_place && self.waiting.len() >= max_waiting {
            return Err(self.no_place(id));
        }
        // The new sequence takes the place of an idle one that it replaces, so that it doesn't have to wait for one.
        if let Some(lane) = known {
            self.replace(lane);
        }
        let is_taken = |id: &SequenceId| self.by_id.contains_key(id) || self.parked.contains_key(id);
        let id = id.unwrap_or_else(|| self.ids.next(is_taken));
        // Without 'resume', a START begins anew.
        self.end_parked(&id);
        // What is found under the id from now on may be the new sequence.
        self.elsewhere.retain(|lane| self.sequences.get(lane).is_some_and(|sequence| sequence.id != id));
        let until = self.until(wait, now);
        // A clone must begin before the next request of its source runs, so it doesn't wait for a store.
        let lane = self.insert(id, until, self.rules.enters_starts && source.is_none());
        let Some(source) = source else {
            self.place_or_wait(lane, has_place, until, now);
            return Ok((lane, Begins::Plain));
        };
        self.begin_with_state_of(source, lane, now);
        Ok((lane, Begins::Clone(source)))
    }

    /// Whether a sequence gets a place at once. A place that has become free is for one that waits.
    pub(super) fn has_place(&self) -> bool {
        self.waiting.is_empty() && self.placed < self.rules.max_sequences
    }

    pub(super) fn until(&self, wait: Option<Duration>, now: Instant) -> Instant {
        let longest_wait = self.rules.longest_wait;
        now + wait.unwrap_or(longest_wait).min(longest_wait)
    }

    /// Adds a sequence without requests. Returns its lane.
    pub(super) fn insert(&mut self, id: SequenceId, until: Instant, awaits_store: bool) -> u32 {
        // The numbers begin again at some time, and a sequence may live for that long.
        while self.sequences.contains_key(&self.next_lane) {
            self.next_lane = self.next_lane.wrapping_add(1);
        }
        let lane = self.next_lane;
        self.next_lane = self.next_lane.wrapping_add(1);
        self.by_id.insert(id.clone(), lane);
        self.sequences.insert(
            lane,
            Sequence {
                id,
                worker: 0,
                phase: Phase::Waiting(until),
                requests: VecDeque::new(),
                queued: 0,
                closed: false,
                overdue: false,
                failed: false,
                has_state: false,
                awaits_store,
                leaves: false,
            },
        );
        lane
    }

    pub(super) fn place_or_wait(&mut self, lane: u32, has_place: bool, until: Instant, now: Instant) {
        if has_place {
            self.place(lane, now);
        } else {
            self.waiting.push_back(lane);
            self.waiting_until.insert((until, lane));
        }
    }

    /// Gives a clone a place, with the worker of its source. If the source has requests, the clone waits behind them.
    fn begin_with_state_of(&mut self, source: u32, lane: u32, now: Instant) {
        let Some(Sequence { worker, phase, requests, .. }) = self.sequences.get_mut(&source) else { return };
        let (worker, is_idle) = (*worker, *phase == Phase::Idle);
        if !is_idle {
            requests.push_back(Queued::CloneTo(lane));
        }
        // The state is in the instance of this worker, and stays there.
        self.place_with(lane, worker, now);
        if let Some(clone) = self.sequences.get_mut(&lane).filter(|_| !is_idle) {
            clone.phase = Phase::Cloning;
        }
    }

    /// Lets the sequences begin that begin with the state that this one has now.
    pub(super) fn begin_clones(&mut self, lane: u32) {
        while let Some(sequence) = self.sequences.get_mut(&lane)
            && let Some(&Queued::CloneTo(clone)) = sequence.requests.front()
        {
            sequence.requests.pop_front();
            if let Some(clone_of) = self.sequences.get_mut(&clone).filter(|clone| clone.phase == Phase::Cloning) {
                clone_of.get_ready(clone, &mut self.workers);
            }
        }
    }

    /// Gives the parked sequence with an id a place again. Returns its lane.
    fn resume(&mut self, id: Option<SequenceId>, known: Option<u32>, now: Instant) -> Result<u32, Refused> {
        let id = id.unwrap_or(SequenceId::Number(0));
        if known.is_some() {
            return Err(Refused::NotParkedButLive(id));
        }
        if !self.parked.contains_key(&id) {
            return Err(Refused::NotParked(id));
        }
        if self.placed >= self.rules.max_sequences {
            return Err(Refused::TooMany { id: Some(id), max: self.rules.max_sequences, idle: self.rules.idle });
        }
        let Some((lane, _)) = self.parked.remove(&id) else { return Err(Refused::NotParked(id)) };
        if let Some(sequence) = self.sequences.get_mut(&lane) {
            (sequence.closed, sequence.overdue) = (false, false);
            self.workers[sequence.worker].sequences += 1;
        }
        self.placed += 1;
        self.last_success.insert(lane, now);
        // The sequence was closed when it was parked.
        self.no_longer_closing(&id, lane);
        self.by_id.insert(id, lane);
        Ok(lane)
    }

    fn is_idle(&self, lane: u32) -> bool {
        self.sequences.get(&lane).is_some_and(|sequence| sequence.phase == Phase::Idle)
    }

    /// Gives a sequence a place, with the worker that has the fewest sequences. Returns that worker if the sequence has
    /// a request to run.
    pub(super) fn place(&mut self, lane: u32, now: Instant) -> Option<usize> {
        let fewest = (0..self.workers.len()).min_by_key(|&worker| self.workers[worker].sequences)?;
        self.place_with(lane, fewest, now)
    }

    /// Gives a sequence a place, with this worker. Returns the worker if the sequence has a request to run.
    fn place_with(&mut self, lane: u32, worker: usize, now: Instant) -> Option<usize> {
        let sequence = self.sequences.get_mut(&lane)?;
        (sequence.worker, sequence.phase) = (worker, Phase::Idle);
        self.placed += 1;
        self.last_success.insert(lane, now);
        self.workers[worker].sequences += 1;
        if sequence.awaits_store {
            sequence.phase = Phase::LookedUp;
            self.lookups.push(lane);
            return None;
        }
        if sequence.requests.is_empty() {
            return None;
        }
        Some(sequence.get_ready(lane, &mut self.workers))
    }
}
