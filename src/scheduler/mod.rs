//! Schedules the sequences of a model whose configuration has no `sequence_batching`.
//!
//! [`Scheduler::arrive`] takes each request in the order in which clients sent them. It decides at once whether the
//! request may run, and puts it behind the other requests of its sequence. [`Scheduler::take`] gives a worker the next
//! batch: the first request of each sequence that has none running, the longest waiting first. The worker reports the
//! outcome to [`Scheduler::finish`]. The errors and the idle rule are those of OpenVINO Model Server (its
//! `sequence_manager.cpp`), except where `docs/ovms.md` says otherwise.
//!
//! A sequence is an incarnation of an id. It has a *lane*, a number that no other live sequence has. A sequence has a
//! *place* if it counts as one of the `max_sequences`; others wait for one. With its place it gets a worker, and stays
//! with it. An END, or a START that replaces it, makes it *closed*: it takes no further request, and its id is free at
//! once. It keeps its place until its last request has run.
//!
//! Rules:
//! - Requests of a sequence run in the order in which they arrived, one at a time.
//! - The caller passes the time. Nothing here reads a clock.
//! - No operation but [`Scheduler::scan`] takes longer with more sequences that have a place. Removing a sequence that
//!   waits for one, and [`Scheduler::next_scan`], take longer with more that wait.
//!
//! Not for: states (the slots are in [`crate::sequence`]), tensors, or Triton's objects: a request is an `R`.

#![forbid(unsafe_code)]

mod ids;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use hashlink::LinkedHashMap;

use crate::sequence::SequenceId;
pub use ids::IdReuse;
use ids::Ids;

/// How a model's sequences are scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Most sequences that have a place at the same time (`max_sequence_number`).
    pub max_sequences: usize,
    /// Most STARTs that wait for a place (`max_queue_size`).
    pub max_waiting: usize,
    /// The longest wait for a place, if the request names no shorter one.
    pub longest_wait: Duration,
    /// What a START of a live id does.
    pub on_duplicate_start: OnDuplicateStart,
    /// Which id a START without one gets.
    pub id_reuse: IdReuse,
    /// When a sequence without END is over.
    pub idle: IdleRule,
}

/// What a START of a live id does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDuplicateStart {
    /// It is refused. The sequence goes on.
    Reject,
    /// It begins a new sequence. The old one is over when its queued requests have run.
    Restart,
}

/// When a sequence without END is over. Only requests that succeed extend its life. It isn't removed while a request of
/// it is queued or running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleRule {
    Never,
    /// When no request has succeeded for this long.
    After(Duration),
    /// A scan takes place once in this time. A sequence is over when it is idle in two scans and no request of it has
    /// succeeded between them.
    TwoScans(Duration),
}

/// What a request says about its sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// `None` only with START: the scheduler chooses an id.
    pub id: Option<SequenceId>,
    pub start: bool,
    pub end: bool,
}

/// Why a request isn't queued, or was removed from its queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such sequence, or an END of it is queued.
    Missing(SequenceId),
    /// A START of a live id.
    Exists(SequenceId),
    /// A START, and every place is taken.
    TooMany { id: Option<SequenceId>, max: usize },
    /// A START, every place is taken, and `max` STARTs wait already.
    QueueFull { id: Option<SequenceId>, max: usize },
    /// A START that has waited for a place for its longest time.
    Late(SequenceId),
}

/// A request of the next batch.
#[derive(Debug)]
pub struct Ready<R> {
    pub lane: u32,
    pub id: SequenceId,
    pub request: R,
}

/// The next work of a worker.
#[derive(Debug)]
pub struct Work<R> {
    /// The requests of the next batch, each of another sequence.
    pub ready: Vec<Ready<R>>,
    /// Sequences of this worker that ended without a request, so that it still has their states.
    pub over: Vec<Over>,
}

/// A sequence that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    pub lane: u32,
    /// It was idle for too long; false if another START replaced it.
    pub expired: bool,
}

/// The effect of a request on its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It goes on with a new state.
    Advanced,
    /// The request failed. The sequence goes on with the state from before the request.
    Unchanged,
    /// It is over.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It waits for a place, until this time at most.
    Waiting(Instant),
    /// No request is queued.
    Idle,
    /// It is in [`Worker::ready`].
    Ready,
    /// A request runs.
    Running,
}

struct Sequence<R> {
    id: SequenceId,
    worker: usize,
    phase: Phase,
    requests: VecDeque<R>,
    /// It takes no further request.
    closed: bool,
    /// The last scan found it idle.
    marked: bool,
    /// No request has succeeded for the time of the idle rule. It is over unless one that is queued or running
    /// succeeds.
    overdue: bool,
}

struct Worker {
    /// Sequences whose next request may run, the longest waiting first.
    ready: VecDeque<u32>,
    over: Vec<Over>,
    /// How many sequences it has.
    sequences: usize,
}

/// The sequences of a model, and their requests that have not begun to run.
pub struct Scheduler<R> {
    rules: Rules,
    ids: Ids,
    by_id: HashMap<SequenceId, u32>,
    sequences: HashMap<u32, Sequence<R>>,
    next_lane: u32,
    workers: Vec<Worker>,
    /// Lanes of the sequences that wait for a place, in the order of their STARTs.
    waiting: VecDeque<u32>,
    /// How many sequences have a place.
    placed: usize,
    /// The lanes that have a place and are not overdue, with the time when a request last succeeded (at first, when the
    /// sequence got its place); the longest ago first.
    last_success: LinkedHashMap<u32, Instant>,
    next_scan: Option<Instant>,
}

impl<R> Scheduler<R> {
    pub fn new(rules: Rules, workers: usize, now: Instant) -> Self {
        let worker = || Worker { ready: VecDeque::new(), over: Vec::new(), sequences: 0 };
        let next_scan = match rules.idle {
            IdleRule::TwoScans(period) => Some(now + period),
            IdleRule::Never | IdleRule::After(_) => None,
        };
        Self {
            rules,
            ids: Ids::new(rules.id_reuse),
            by_id: HashMap::new(),
            sequences: HashMap::new(),
            next_lane: 0,
            workers: std::iter::repeat_with(worker).take(workers).collect(),
            waiting: VecDeque::new(),
            placed: 0,
            last_success: LinkedHashMap::new(),
            next_scan,
        }
    }

    /// Takes a request. Returns the worker to wake, or the request and why it cannot run. Worker 0 makes the scans, so
    /// it is woken for a START that waits. `wait`: how long a START may wait for a place.
    pub fn arrive(
        &mut self,
        control: Control,
        request: R,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<Option<usize>, (R, Refused)> {
        let known = control.id.as_ref().and_then(|id| self.by_id.get(id)).copied();
        let lane = match (control.start, known) {
            (true, _) => match self.begin(control.id, known, wait, now) {
                Ok(lane) => lane,
                Err(refused) => return Err((request, refused)),
            },
            (false, Some(lane)) => lane,
            // The caller has refused a request with neither START nor id, so there is an id.
            (false, None) => {
                return Err((request, Refused::Missing(control.id.unwrap_or(SequenceId::Number(0)))));
            }
        };
        if control.end {
            self.close(lane);
        }
        let Some(sequence) = self.sequences.get_mut(&lane) else { return Ok(None) };
        sequence.requests.push_back(request);
        match sequence.phase {
            Phase::Idle => {
                sequence.phase = Phase::Ready;
                let worker = sequence.worker;
                self.workers[worker].ready.push_back(lane);
                Ok(Some(worker))
            }
            // The next scan may be earlier now.
            Phase::Waiting(_) => Ok(Some(0)),
            Phase::Ready | Phase::Running => Ok(None),
        }
    }

    /// Whether requests with these controls can arrive one after the other. Returns the position of the first that
    /// cannot, and why.
    pub fn check(&self, controls: &[&Control]) -> Result<(), (usize, Refused)> {
        let Rules { max_sequences, max_waiting, on_duplicate_start, .. } = self.rules;
        let mut changed: Vec<(SequenceId, bool)> = Vec::new();
        let (mut ids, mut starts, mut replaced) = (self.ids.clone(), 0, 0);
        for (row, Control { id, start, end }) in controls.iter().enumerate() {
            let by_request = |id: &SequenceId| changed.iter().rev().find(|(of, _)| of == id).map(|(_, lives)| *lives);
            let is_live = |id: &SequenceId| by_request(id).unwrap_or_else(|| self.by_id.contains_key(id));
            let made = if *start && id.is_none() { Some(ids.next(is_live)) } else { None };
            let Some(known) = id.clone().or(made) else { continue };
            match (start, is_live(&known)) {
                (false, false) => return Err((row, Refused::Missing(known))),
                (true, true) if on_duplicate_start == OnDuplicateStart::Reject => {
                    return Err((row, Refused::Exists(known)));
                }
                (true, true) if by_request(&known).is_none() && self.is_idle(&known) => replaced += 1,
                _ => {}
            }
            starts += usize::from(*start);
            let taken = self.placed + self.waiting.len() + starts;
            if *start && taken > max_sequences + max_waiting + replaced {
                return Err((row, self.no_place(id.clone())));
            }
            changed.push((known, !end));
        }
        Ok(())
    }

    /// Whether a live sequence has no request.
    fn is_idle(&self, id: &SequenceId) -> bool {
        let sequence = self.by_id.get(id).and_then(|lane| self.sequences.get(lane));
        sequence.is_some_and(|sequence| sequence.phase == Phase::Idle)
    }

    /// Why a START is refused when every place is taken and no further START may wait.
    const fn no_place(&self, id: Option<SequenceId>) -> Refused {
        match self.rules {
            Rules { max_waiting: 0, max_sequences: max, .. } => Refused::TooMany { id, max },
            Rules { max_waiting: max, .. } => Refused::QueueFull { id, max },
        }
    }

    /// Begins the sequence of a START. `known` is the lane of the live sequence that has its id.
    fn begin(
        &mut self,
        id: Option<SequenceId>,
        known: Option<u32>,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<u32, Refused> {
        if let (Some(id), Some(_), OnDuplicateStart::Reject) = (&id, known, self.rules.on_duplicate_start) {
            return Err(Refused::Exists(id.clone()));
        }
        // The new sequence takes the place of an idle one that it replaces, so that it doesn't have to wait for one.
        if let Some(lane) = known
            && self.sequences.get(&lane).is_some_and(|sequence| sequence.phase == Phase::Idle)
        {
            self.drop_idle(lane, false);
        }
        let Rules { max_sequences, max_waiting, longest_wait, .. } = self.rules;
        let has_place = self.placed < max_sequences;
        if !has_place && self.waiting.len() >= max_waiting {
            return Err(self.no_place(id));
        }
        if let Some(lane) = known {
            self.close(lane);
        }
        let id = id.unwrap_or_else(|| self.ids.next(|id| self.by_id.contains_key(id)));
        while self.sequences.contains_key(&self.next_lane) {
            self.next_lane = self.next_lane.wrapping_add(1);
        }
        let lane = self.next_lane;
        self.next_lane = self.next_lane.wrapping_add(1);
        self.by_id.insert(id.clone(), lane);
        let phase = Phase::Waiting(now + wait.unwrap_or(longest_wait).min(longest_wait));
        let (worker, requests) = (0, VecDeque::new());
        self.sequences
            .insert(lane, Sequence { id, worker, phase, requests, closed: false, marked: false, overdue: false });
        if has_place {
            self.place(lane, now);
        } else {
            self.waiting.push_back(lane);
        }
        Ok(lane)
    }

    /// Gives a sequence a place, with the worker that has the fewest sequences. Returns that worker if the sequence has
    /// a request to run.
    fn place(&mut self, lane: u32, now: Instant) -> Option<usize> {
        let fewest = (0..self.workers.len()).min_by_key(|&worker| self.workers[worker].sequences)?;
        let sequence = self.sequences.get_mut(&lane)?;
        (sequence.worker, sequence.phase) = (fewest, Phase::Idle);
        self.placed += 1;
        self.last_success.insert(lane, now);
        self.workers[fewest].sequences += 1;
        if sequence.requests.is_empty() {
            return None;
        }
        sequence.phase = Phase::Ready;
        self.workers[fewest].ready.push_back(lane);
        Some(fewest)
    }

    /// Frees the id of a sequence, which then takes no further request.
    fn close(&mut self, lane: u32) {
        let Some(sequence) = self.sequences.get_mut(&lane) else { return };
        sequence.closed = true;
        if self.by_id.get(&sequence.id) == Some(&lane) {
            self.by_id.remove(&sequence.id);
        }
    }

    /// Removes a sequence. Returns its queued requests.
    fn remove(&mut self, lane: u32) -> VecDeque<R> {
        self.close(lane);
        let Some(sequence) = self.sequences.remove(&lane) else { return VecDeque::new() };
        if matches!(sequence.phase, Phase::Waiting(_)) {
            self.waiting.retain(|&waiting| waiting != lane);
        } else {
            self.placed -= 1;
            self.last_success.remove(&lane);
            self.workers[sequence.worker].sequences -= 1;
        }
        sequence.requests
    }

    /// Removes a sequence that has no request, and tells its worker, which has its state.
    fn drop_idle(&mut self, lane: u32, expired: bool) {
        if let Some(sequence) = self.sequences.get(&lane) {
            self.workers[sequence.worker].over.push(Over { lane, expired });
        }
        self.remove(lane);
    }

    /// The workers with sequences that are over, whose slots can be freed.
    pub fn with_over(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().enumerate().filter(|(_, worker)| !worker.over.is_empty()).map(|(number, _)| number)
    }

    /// Whether a worker has something to do.
    pub fn has_work(&self, worker: usize) -> bool {
        !self.workers[worker].ready.is_empty() || !self.workers[worker].over.is_empty()
    }

    /// The next batch of a worker, of up to `most` requests.
    pub fn take(&mut self, worker: usize, most: usize) -> Work<R> {
        let of = &mut self.workers[worker];
        let over = std::mem::take(&mut of.over);
        let mut ready = Vec::with_capacity(of.ready.len().min(most));
        while ready.len() < most
            && let Some(lane) = of.ready.pop_front()
        {
            let Some(sequence) = self.sequences.get_mut(&lane) else { continue };
            let Some(request) = sequence.requests.pop_front() else { continue };
            sequence.phase = Phase::Running;
            ready.push(Ready { lane, id: sequence.id.clone(), request });
        }
        Work { ready, over }
    }

    /// Takes the outcome of a batch: the lane of each request, and what became of the sequence. Returns the requests
    /// that cannot run any more. Adds to `wake` the workers of sequences that got a place. The caller's worker has to
    /// look for work of its own.
    pub fn finish(
        &mut self,
        batch: impl Iterator<Item = (u32, After)>,
        now: Instant,
        wake: &mut Vec<usize>,
    ) -> Vec<(R, Refused)> {
        let mut refused = Vec::new();
        for (lane, after) in batch {
            let Some(sequence) = self.sequences.get_mut(&lane) else { continue };
            sequence.phase = Phase::Idle;
            if after == After::Advanced {
                (sequence.marked, sequence.overdue) = (false, false);
                self.last_success.insert(lane, now);
            }
            if after == After::Over {
                let id = sequence.id.clone();
                refused.extend(self.remove(lane).into_iter().map(|request| (request, Refused::Missing(id.clone()))));
            } else if !sequence.requests.is_empty() {
                sequence.phase = Phase::Ready;
                self.workers[sequence.worker].ready.push_back(lane);
            } else if sequence.closed || sequence.overdue {
                let expired = sequence.overdue && !sequence.closed;
                self.drop_idle(lane, expired);
            }
        }
        self.fill_places(now, wake);
        refused
    }

    /// Gives the free places to sequences that wait for one.
    fn fill_places(&mut self, now: Instant, wake: &mut Vec<usize>) {
        while self.placed < self.rules.max_sequences
            && let Some(lane) = self.waiting.pop_front()
        {
            wake.extend(self.place(lane, now));
        }
    }

    /// Ends sequences that were idle for too long, and STARTs that waited for too long. Returns the requests that
    /// cannot run any more. Adds the workers that have something to do now to `wake`.
    pub fn scan(&mut self, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        match self.rules.idle {
            IdleRule::Never => {}
            IdleRule::After(limit) => self.expire(now, limit),
            IdleRule::TwoScans(period) => {
                if self.next_scan.is_some_and(|next| next <= now) {
                    self.next_scan = Some(now + period);
                    self.mark();
                }
            }
        }
        let late = |lane: &u32| {
            let sequence = self.sequences.get(lane)?;
            matches!(sequence.phase, Phase::Waiting(until) if until <= now).then_some(*lane)
        };
        let late: Vec<u32> = self.waiting.iter().filter_map(late).collect();
        let mut refused = Vec::new();
        for lane in late {
            let Some(id) = self.sequences.get(&lane).map(|sequence| sequence.id.clone()) else { continue };
            let mut requests = self.remove(lane).into_iter();
            refused.extend(requests.next().map(|start| (start, Refused::Late(id.clone()))));
            refused.extend(requests.map(|request| (request, Refused::Missing(id.clone()))));
        }
        self.fill_places(now, wake);
        wake.extend(self.with_over());
        refused
    }

    /// When [`Scheduler::scan`] has to be called next; `None` if nothing can expire.
    pub fn next_scan(&self) -> Option<Instant> {
        let idle = match self.rules.idle {
            IdleRule::After(limit) => self.last_success.front().map(|(_, &last)| last + limit),
            IdleRule::Never | IdleRule::TwoScans(_) => self.next_scan,
        };
        let until = |lane: &u32| match self.sequences.get(lane)?.phase {
            Phase::Waiting(until) => Some(until),
            _ => None,
        };
        idle.into_iter().chain(self.waiting.iter().filter_map(until)).min()
    }

    /// How many sequences there are, with those that wait for a place and those that are closed but have requests.
    pub fn live(&self) -> usize {
        self.sequences.len()
    }

    /// Ends the sequences that had no successful request for `limit`. Those that have a request become overdue instead.
    fn expire(&mut self, now: Instant, limit: Duration) {
        while let Some((&lane, &last)) = self.last_success.front()
            && last + limit <= now
        {
            self.last_success.pop_front();
            match self.sequences.get_mut(&lane) {
                Some(sequence) if sequence.phase != Phase::Idle => sequence.overdue = true,
                _ => self.drop_idle(lane, true),
            }
        }
    }

    /// A scan of [`IdleRule::TwoScans`]: ends the idle sequences that the last one marked, and marks the others.
    fn mark(&mut self) {
        let mut over = Vec::new();
        for (&lane, sequence) in self.sequences.iter_mut().filter(|(_, sequence)| sequence.phase == Phase::Idle) {
            if std::mem::replace(&mut sequence.marked, true) {
                over.push(lane);
            }
        }
        over.into_iter().for_each(|lane| self.drop_idle(lane, true));
    }
}

#[cfg(test)]
mod tests;
