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
//! - No operation but [`Scheduler::scan`] takes longer with more sequences that have a place. Two take longer with more
//!   sequences of a kind: [`Scheduler::take`] with those whose last run failed, and removing a sequence that waits for a
//!   place with those that wait.
//!
//! Not for: states (the slots are in [`crate::sequence`]), tensors, or Triton's objects: a request is an `R`.

#![forbid(unsafe_code)]

mod ids;

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use hashlink::LinkedHashMap;

use crate::sequence::{Finished, Outcome, SequenceId};
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
    /// Most requests of a sequence that wait (`max_queued_requests_per_sequence`).
    pub max_queued: usize,
    /// What a START of a live id does.
    pub on_duplicate_start: OnDuplicateStart,
    /// Which id a START without one gets.
    pub id_reuse: IdReuse,
    /// When a sequence without END is over.
    pub idle: IdleRule,
    /// What becomes of a sequence that was idle for too long; `None`: it is over.
    pub parking: Option<Parking>,
}

/// How long a sequence that was idle for too long keeps its state (`park_ms`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parking {
    /// A parked sequence is over when it has been parked for this long.
    pub time: Duration,
    /// Most parked sequences. One more ends the one that has been parked for the longest.
    pub most: usize,
}

/// What a START of a live id does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDuplicateStart {
    /// It is refused. The sequence goes on.
    Reject,
    /// It begins a new sequence, or is refused. The old one is over when its queued requests have run.
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
    /// Where the state comes from. Anything but [`Origin::Own`] only with START.
    pub origin: Origin,
}

impl Control {
    /// Whether it is a START that asks for another state than that of the live sequence with its id.
    pub fn starts_anew(&self) -> bool {
        let continues = match &self.origin {
            Origin::Own => false,
            Origin::Clone(of) => self.id.as_ref() == Some(of),
            Origin::Parked => true,
        };
        self.start && !continues
    }
}

/// What a START begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The initial state.
    Own,
    /// The state that this sequence has after the requests that have arrived (`clone_of`).
    Clone(SequenceId),
    /// The state of the parked sequence with the same id (`resume`).
    Parked,
}

/// Why a request isn't queued, or was removed from its queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such sequence, or an END of it is queued.
    Missing(SequenceId),
    /// A START of a live id. `idle`: when that sequence is over without END.
    Exists { id: SequenceId, idle: IdleRule },
    /// A START, and every place is taken.
    TooMany { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// A START, every place is taken, and `max` STARTs wait already.
    QueueFull { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// `max` requests of the sequence wait already.
    TooManyQueued { id: SequenceId, max: usize },
    /// A START that has waited for a place for its longest time.
    Late(SequenceId),
    /// A START that resumes a parked sequence, and there is none with its id.
    NotParked(SequenceId),
    /// A START that resumes a sequence which is live.
    NotParkedButLive(SequenceId),
    /// Not a START, and the sequence is parked.
    Parked(SequenceId),
    /// A START that clones the sequence whose id it has.
    CloneOfItself(SequenceId),
}

/// A request of the next batch.
#[derive(Debug)]
pub struct Ready<R> {
    pub lane: u32,
    pub id: SequenceId,
    pub request: R,
    pub begins: Begins,
}

/// What a request begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// A START: the initial state. Any other request: the state of its sequence.
    Plain,
    /// A START: the state of the sequence in this lane, which has the same worker and has no request before this one.
    Clone(u32),
    /// A START of a sequence that was parked: the state that it has.
    Resumed,
}

impl Begins {
    /// The lane of the sequence whose state it is.
    const fn source(self) -> Option<u32> {
        if let Self::Clone(source) = self { Some(source) } else { None }
    }
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It waits for a place, until this time at most.
    Waiting(Instant),
    /// No request is queued.
    Idle,
    /// It is in [`Worker::queue`].
    Ready,
    /// A request runs.
    Running,
    /// It begins with the state of another sequence, which has requests to run before.
    Cloning,
}

/// What stands in the queue of a sequence.
enum Queued<R> {
    Request(R, Begins),
    /// The sequence in this lane begins with the state at this point.
    CloneTo(u32),
}

struct Sequence<R> {
    id: SequenceId,
    worker: usize,
    phase: Phase,
    requests: VecDeque<Queued<R>>,
    /// How many of `requests` are requests, and no clones.
    queued: usize,
    /// It takes no further request.
    closed: bool,
    /// The last scan found it idle.
    marked: bool,
    /// No request has succeeded for the time of the idle rule. It is over unless one that is queued or running
    /// succeeds.
    overdue: bool,
    /// Its last run failed.
    failed: bool,
    /// A request of it has succeeded, or it was resumed.
    has_state: bool,
}

struct Worker {
    /// What it has to do, in this order.
    queue: VecDeque<Task>,
    /// How many of these end a sequence.
    ends: usize,
    /// How many sequences it has.
    sequences: usize,
    /// Batches since the last one that had a sequence whose last run failed.
    batches_since_failed: usize,
}

/// A sequence that has failed costs the others a run. With one in ten batches, they keep nine tenths of the runs.
const BATCHES_FOR_ONE_FAILED: usize = 10;

/// What a worker has to do.
enum Task {
    /// Run the next request of the sequence in this lane.
    Run(u32),
    End(Over),
}

impl Worker {
    fn run(&mut self, lane: u32) {
        self.queue.push_back(Task::Run(lane));
    }

    fn end(&mut self, over: Over) {
        self.queue.push_back(Task::End(over));
        self.ends += 1;
    }
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
    /// The same lanes, by the time until which they wait.
    waiting_until: BTreeSet<(Instant, u32)>,
    /// How many requests wait.
    queued: usize,
    /// How many sequences have a place.
    placed: usize,
    /// The lanes that have a place and are not overdue, with the time when a request last succeeded (at first, when the
    /// sequence got its place); the longest ago first.
    last_success: LinkedHashMap<u32, Instant>,
    /// The sequences that are parked, by id, each with its lane and until when; the first to end is first. A parked
    /// sequence has no place. Its worker still has its state.
    parked: LinkedHashMap<SequenceId, (u32, Instant)>,
    next_scan: Option<Instant>,
}

impl<R> Scheduler<R> {
    pub fn new(rules: Rules, workers: usize, now: Instant) -> Self {
        let worker = || Worker { queue: VecDeque::new(), ends: 0, sequences: 0, batches_since_failed: 0 };
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
            waiting_until: BTreeSet::new(),
            queued: 0,
            placed: 0,
            last_success: LinkedHashMap::new(),
            parked: LinkedHashMap::new(),
            next_scan,
        }
    }

    /// Takes a request. Returns the worker to wake, or the request and why it cannot run. Then nothing has changed, except
    /// by [`Scheduler::refuse_start`]. `wait`: how long a START may wait for a place. When all requests that have come are
    /// taken, the caller calls [`Scheduler::fill_places`].
    pub fn arrive(
        &mut self,
        control: Control,
        request: R,
        wait: Option<Duration>,
        now: Instant,
    ) -> Result<Option<usize>, (R, Refused)> {
        let known = control.id.as_ref().and_then(|id| self.by_id.get(id)).copied();
        let mut begins = Begins::Plain;
        let lane = match (control.start, known) {
            (true, _) => match self.begin(control.id.clone(), control.origin.clone(), known, wait, now) {
                Ok(begun) => {
                    begins = begun.1;
                    begun.0
                }
                Err(refused) => {
                    if let Some(id) = control.id.as_ref().filter(|_| control.starts_anew()) {
                        self.refuse_start(id);
                    }
                    return Err((request, refused));
                }
            },
            (false, Some(lane)) => match self.check_queue(self.queued_in(lane), control.id) {
                Ok(()) => lane,
                Err(refused) => return Err((request, refused)),
            },
            // The caller has refused a request with neither START nor id, so there is an id.
            (false, None) => {
                let id = control.id.unwrap_or(SequenceId::Number(0));
                let is_parked = self.parked.contains_key(&id);
                return Err((request, if is_parked { Refused::Parked(id) } else { Refused::Missing(id) }));
            }
        };
        if control.end {
            self.close(lane);
        }
        let Some(sequence) = self.sequences.get_mut(&lane) else { return Ok(None) };
        sequence.requests.push_back(Queued::Request(request, begins));
        sequence.queued += 1;
        self.queued += 1;
        match sequence.phase {
            Phase::Idle => {
                sequence.phase = Phase::Ready;
                let worker = sequence.worker;
                self.workers[worker].run(lane);
                Ok(Some(worker))
            }
            Phase::Waiting(_) | Phase::Ready | Phase::Running | Phase::Cloning => Ok(None),
        }
    }

    /// With [`OnDuplicateStart::Restart`], a START that is refused also ends the live sequence with its id. Otherwise the
    /// requests that the client has sent behind the START would get the state of that sequence. The caller then calls
    /// [`Scheduler::fill_places`].
    pub fn refuse_start(&mut self, id: &SequenceId) {
        if let (Some(&lane), OnDuplicateStart::Restart) = (self.by_id.get(id), self.rules.on_duplicate_start) {
            self.replace(lane);
        }
    }

    /// Ends a sequence as soon as its queued requests have run.
    fn replace(&mut self, lane: u32) {
        if self.has_phase(lane, Phase::Idle) { self.drop_idle(lane, false) } else { self.close(lane) }
    }

    /// How many requests of a sequence wait.
    fn queued_in(&self, lane: u32) -> usize {
        self.sequences.get(&lane).map_or(0, |sequence| sequence.queued)
    }

    /// Refuses one more request of a sequence with this id if too many wait.
    fn check_queue(&self, queued: usize, id: Option<SequenceId>) -> Result<(), Refused> {
        let max = self.rules.max_queued;
        if queued < max { Ok(()) } else { Err(Refused::TooManyQueued { id: id.unwrap_or(SequenceId::Number(0)), max }) }
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
        let Rules { max_sequences, max_waiting, on_duplicate_start, idle, .. } = self.rules;
        let mut changed: Vec<Changed> = Vec::new();
        let (mut ids, mut starts, mut replaced) = (self.ids.clone(), 0, 0);
        for (row, Control { id, start, end, .. }) in controls.iter().enumerate() {
            let by_request = |id: &SequenceId| changed.iter().rev().find(|changed| changed.id == *id);
            let is_live =
                |id: &SequenceId| by_request(id).map_or_else(|| self.by_id.contains_key(id), |changed| changed.lives);
            let is_taken = |id: &SequenceId| is_live(id) || self.parked.contains_key(id);
            let made = if *start && id.is_none() { Some(ids.next(is_taken)) } else { None };
            let Some(known) = id.clone().or(made) else { continue };
            match (start, is_live(&known)) {
                (false, false) => return Err((row, Refused::Missing(known))),
                (true, true) if on_duplicate_start == OnDuplicateStart::Reject => {
                    return Err((row, Refused::Exists { id: known, idle }));
                }
                (true, true) if by_request(&known).is_none() && self.is_idle(&known) => replaced += 1,
                _ => {}
            }
            starts += usize::from(*start);
            let taken = self.placed + self.waiting.len() + starts;
            if *start && taken > max_sequences + max_waiting + replaced {
                return Err((row, self.no_place(id.clone())));
            }
            let queued = match by_request(&known) {
                _ if *start => 0,
                Some(changed) => changed.queued,
                None => self.by_id.get(&known).map_or(0, |&lane| self.queued_in(lane)),
            };
            self.check_queue(queued, Some(known.clone())).map_err(|refused| (row, refused))?;
            changed.push(Changed { id: known, lives: !end, queued: queued + 1 });
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
        let replaces_idle = known.is_some_and(|lane| self.has_phase(lane, Phase::Idle));
        let Rules { max_sequences, max_waiting, longest_wait, idle, .. } = self.rules;
        // A place that has become free is for one that waits.
        let has_place = replaces_idle || self.waiting.is_empty() && self.placed < max_sequences;
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
        self.end_parked(&id);
        while self.sequences.contains_key(&self.next_lane) {
            self.next_lane = self.next_lane.wrapping_add(1);
        }
        let lane = self.next_lane;
        self.next_lane = self.next_lane.wrapping_add(1);
        self.by_id.insert(id.clone(), lane);
        let until = now + wait.unwrap_or(longest_wait).min(longest_wait);
        let phase = Phase::Waiting(until);
        let (worker, requests, queued) = (0, VecDeque::new(), 0);
        self.sequences.insert(
            lane,
            Sequence {
                id,
                worker,
                phase,
                requests,
                queued,
                closed: false,
                marked: false,
                overdue: false,
                failed: false,
                has_state: false,
            },
        );
        let Some(source) = source else {
            if has_place {
                self.place(lane, now);
            } else {
                self.waiting.push_back(lane);
                self.waiting_until.insert((until, lane));
            }
            return Ok((lane, Begins::Plain));
        };
        self.begin_with_state_of(source, lane, now);
        Ok((lane, Begins::Clone(source)))
    }

    /// Gives a clone a place, with the worker of its source. If the source has requests, the clone waits behind them.
    fn begin_with_state_of(&mut self, source: u32, lane: u32, now: Instant) {
        let Some(Sequence { worker, phase, requests, .. }) = self.sequences.get_mut(&source) else { return };
        let (worker, is_idle) = (*worker, *phase == Phase::Idle);
        if !is_idle {
            requests.push_back(Queued::CloneTo(lane));
        }
        self.place_with(lane, worker, now);
        if let Some(clone) = self.sequences.get_mut(&lane).filter(|_| !is_idle) {
            clone.phase = Phase::Cloning;
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
            (sequence.closed, sequence.marked, sequence.overdue) = (false, false, false);
            self.workers[sequence.worker].sequences += 1;
        }
        self.placed += 1;
        self.last_success.insert(lane, now);
        self.by_id.insert(id, lane);
        Ok(lane)
    }

    fn has_phase(&self, lane: u32, phase: Phase) -> bool {
        self.sequences.get(&lane).is_some_and(|sequence| sequence.phase == phase)
    }

    /// Gives a sequence a place, with the worker that has the fewest sequences. Returns that worker if the sequence has
    /// a request to run.
    fn place(&mut self, lane: u32, now: Instant) -> Option<usize> {
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
        if sequence.requests.is_empty() {
            return None;
        }
        sequence.phase = Phase::Ready;
        self.workers[worker].run(lane);
        Some(worker)
    }

    /// Frees the id of a sequence, which then takes no further request.
    fn close(&mut self, lane: u32) {
        let Some(sequence) = self.sequences.get_mut(&lane) else { return };
        sequence.closed = true;
        if self.by_id.get(&sequence.id) == Some(&lane) {
            self.by_id.remove(&sequence.id);
        }
    }

    /// Removes a sequence that has a place or waits for one, and those that were to begin with its state. Returns their
    /// queued requests, and why each cannot run.
    fn remove(&mut self, lane: u32) -> Vec<(R, Refused)> {
        let (mut refused, mut lanes) = (Vec::new(), vec![(lane, None)]);
        // Not by recursion: clones can wait for clones in a chain of any length.
        while let Some((lane, source)) = lanes.pop() {
            self.close(lane);
            let Some(sequence) = self.sequences.remove(&lane) else { continue };
            if let Phase::Waiting(until) = sequence.phase {
                self.waiting.retain(|&waiting| waiting != lane);
                self.waiting_until.remove(&(until, lane));
            } else {
                self.placed -= 1;
                self.last_success.remove(&lane);
                self.workers[sequence.worker].sequences -= 1;
            }
            self.queued -= sequence.queued;
            // The first request of a clone fails because its source is gone.
            let mut missing = source;
            for queued in sequence.requests {
                match queued {
                    Queued::Request(request, _) => {
                        let id = missing.take().unwrap_or_else(|| sequence.id.clone());
                        refused.push((request, Refused::Missing(id)));
                    }
                    Queued::CloneTo(clone) => lanes.push((clone, Some(sequence.id.clone()))),
                }
            }
        }
        refused
    }

    /// Removes a sequence that has no request, and tells its worker, which has its state.
    fn drop_idle(&mut self, lane: u32, expired: bool) {
        if let Some(sequence) = self.sequences.get(&lane) {
            self.workers[sequence.worker].end(Over { lane, expired });
        }
        self.remove(lane);
    }

    /// Ends a sequence that was idle for too long, or parks it.
    fn expire_idle(&mut self, lane: u32, now: Instant) {
        let Some(Parking { time, most }) = self.rules.parking else { return self.drop_idle(lane, true) };
        let Some(sequence) = self.sequences.get(&lane) else { return };
        let (id, worker) = (sequence.id.clone(), sequence.worker);
        if sequence.closed {
            return self.drop_idle(lane, true);
        }
        self.close(lane);
        self.placed -= 1;
        self.last_success.remove(&lane);
        self.workers[worker].sequences -= 1;
        self.end_parked(&id);
        self.parked.insert(id, (lane, now + time));
        while self.parked.len() > most
            && let Some((_, (oldest, _))) = self.parked.pop_front()
        {
            self.forget_parked(oldest);
        }
    }

    /// Ends the parked sequence with an id, if there is one.
    fn end_parked(&mut self, id: &SequenceId) {
        if let Some((lane, _)) = self.parked.remove(id) {
            self.forget_parked(lane);
        }
    }

    /// Removes a sequence that was parked, and tells its worker.
    fn forget_parked(&mut self, lane: u32) {
        if let Some(sequence) = self.sequences.remove(&lane) {
            self.workers[sequence.worker].end(Over { lane, expired: true });
        }
    }

    /// The workers with sequences that are over, whose slots can be freed.
    pub fn with_over(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().enumerate().filter(|(_, worker)| worker.ends > 0).map(|(number, _)| number)
    }

    /// Whether a worker has something to do.
    pub fn has_work(&self, worker: usize) -> bool {
        !self.workers[worker].queue.is_empty()
    }

    /// The next batch of a worker, of up to `most` requests. A sequence whose last run failed runs alone while the
    /// others wait. So a batch has one of them at most, in turn, and while others are ready only one batch of
    /// [`BATCHES_FOR_ONE_FAILED`] has one.
    pub fn take(&mut self, worker: usize, most: usize) -> Work<R> {
        let Self { workers, sequences, queued, .. } = self;
        let of = &mut workers[worker];
        let (mut over, mut cloned) = (Vec::with_capacity(of.ends), Vec::new());
        let mut ready = Vec::with_capacity(of.queue.len().min(most));
        let has_failed = |lane: &u32| sequences.get(lane).is_some_and(|sequence| sequence.failed);
        let are_others_ready = of.queue.iter().any(|task| matches!(task, Task::Run(lane) if !has_failed(lane)));
        of.batches_since_failed += 1;
        let mut takes_failed = !are_others_ready || of.batches_since_failed >= BATCHES_FOR_ONE_FAILED;
        let mut late = Vec::new();
        while let Some(task) = of.queue.front() {
            match *task {
                // The worker ends sequences first, and a clone may need the state of this one.
                Task::End(_) if !cloned.is_empty() => break,
                Task::End(ended) => {
                    over.push(ended);
                    of.ends -= 1;
                }
                Task::Run(_) if ready.len() == most => break,
                // Its END may end it before the clone has begun.
                Task::Run(lane) if cloned.contains(&lane) && ends_next(sequences, lane) => break,
                Task::Run(lane) => {
                    let sequence = sequences.get_mut(&lane);
                    // A clone begins before this sequence gets ready, so the first entry is a request.
                    let failed = sequence.as_ref().is_some_and(|sequence| sequence.failed);
                    if failed && !takes_failed {
                        late.push(Task::Run(lane));
                    } else if let Some(sequence) = sequence
                        && let Some(Queued::Request(request, begins)) = sequence.requests.pop_front()
                    {
                        sequence.phase = Phase::Running;
                        sequence.queued -= 1;
                        *queued -= 1;
                        if failed {
                            (takes_failed, of.batches_since_failed) = (false, 0);
                        }
                        cloned.extend(begins.source());
                        ready.push(Ready { lane, id: sequence.id.clone(), request, begins });
                    }
                }
            }
            of.queue.pop_front();
        }
        // They go to the end of the same queue, so that a clone of such a sequence, which is before it, still runs first.
        of.queue.extend(late);
        Work { ready, over }
    }

    /// Takes what the requests of a batch have done. Returns the requests that cannot run any more. Adds to `wake` the
    /// workers of sequences that got a place. The caller's worker has to look for work of its own.
    pub fn finish(
        &mut self,
        batch: impl Iterator<Item = Finished>,
        now: Instant,
        wake: &mut Vec<usize>,
    ) -> Vec<(R, Refused)> {
        let mut refused = Vec::new();
        for Finished { lane, outcome, ends } in batch {
            let Some(sequence) = self.sequences.get_mut(&lane) else { continue };
            sequence.phase = Phase::Idle;
            sequence.has_state = match outcome {
                Outcome::Advanced => true,
                Outcome::Failed | Outcome::RunFailed => sequence.has_state,
                Outcome::Lost => false,
            };
            if ends || !sequence.has_state {
                refused.extend(self.remove(lane));
                continue;
            }
            sequence.failed = outcome == Outcome::RunFailed || (sequence.failed && outcome == Outcome::Failed);
            if outcome == Outcome::Advanced {
                (sequence.marked, sequence.overdue) = (false, false);
                self.last_success.insert(lane, now);
            }
            self.begin_clones(lane);
            let Some(sequence) = self.sequences.get_mut(&lane) else { continue };
            if !sequence.requests.is_empty() {
                sequence.phase = Phase::Ready;
                self.workers[sequence.worker].run(lane);
            } else if sequence.closed {
                self.drop_idle(lane, false);
            } else if sequence.overdue {
                self.expire_idle(lane, now);
            }
        }
        self.fill_places(now, wake);
        refused
    }

    /// Lets the sequences begin that begin with the state that this one has now.
    fn begin_clones(&mut self, lane: u32) {
        while let Some(sequence) = self.sequences.get_mut(&lane)
            && let Some(&Queued::CloneTo(clone)) = sequence.requests.front()
        {
            sequence.requests.pop_front();
            if let Some(clone_of) = self.sequences.get_mut(&clone).filter(|clone| clone.phase == Phase::Cloning) {
                clone_of.phase = Phase::Ready;
                self.workers[clone_of.worker].run(clone);
            }
        }
    }

    /// Gives the free places to sequences that wait for one. Adds the workers that have something to do now to `wake`.
    pub fn fill_places(&mut self, now: Instant, wake: &mut Vec<usize>) {
        while self.placed < self.rules.max_sequences
            && let Some(lane) = self.waiting.pop_front()
        {
            if let Some(Phase::Waiting(until)) = self.sequences.get(&lane).map(|sequence| sequence.phase) {
                self.waiting_until.remove(&(until, lane));
            }
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
                    self.mark(now);
                }
            }
        }
        let mut refused = Vec::new();
        while let Some(&(until, lane)) = self.waiting_until.first()
            && until <= now
        {
            self.waiting_until.pop_first();
            let Some(id) = self.sequences.get(&lane).map(|sequence| sequence.id.clone()) else { continue };
            let mut requests = self.remove(lane).into_iter();
            refused.extend(requests.next().map(|(start, _)| (start, Refused::Late(id))));
            refused.extend(requests);
        }
        while let Some((_, &(lane, until))) = self.parked.front()
            && until <= now
        {
            self.parked.pop_front();
            self.forget_parked(lane);
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
        let parked = self.parked.front().map(|(_, (_, until))| *until);
        let waiting = self.waiting_until.first().map(|(until, _)| *until);
        [idle, parked, waiting].into_iter().flatten().min()
    }

    /// How many sequences there are, with those that wait for a place and those that are closed but have requests,
    /// without those that are parked.
    pub fn live(&self) -> usize {
        self.sequences.len() - self.parked.len()
    }

    /// How many sequences are parked.
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// How many sequences wait for a place.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many requests wait: for a place, for an earlier request of their sequence, or for a run.
    pub const fn queued(&self) -> usize {
        self.queued
    }

    /// Ends the sequences that had no successful request for `limit`. Those that have a request become overdue instead.
    fn expire(&mut self, now: Instant, limit: Duration) {
        while let Some((&lane, &last)) = self.last_success.front()
            && last + limit <= now
        {
            self.last_success.pop_front();
            match self.sequences.get_mut(&lane) {
                Some(sequence) if sequence.phase != Phase::Idle => sequence.overdue = true,
                _ => self.expire_idle(lane, now),
            }
        }
    }

    /// A scan of [`IdleRule::TwoScans`]: ends the idle sequences that the last one marked, and marks the others.
    fn mark(&mut self, now: Instant) {
        let mut over = Vec::new();
        let is_idle = |(_, sequence): &(&u32, &mut Sequence<R>)| sequence.phase == Phase::Idle && !sequence.closed;
        for (&lane, sequence) in self.sequences.iter_mut().filter(is_idle) {
            if std::mem::replace(&mut sequence.marked, true) {
                over.push(lane);
            }
        }
        over.into_iter().for_each(|lane| self.expire_idle(lane, now));
    }
}

/// Whether the next request of a sequence is its last one.
fn ends_next<R>(sequences: &HashMap<u32, Sequence<R>>, lane: u32) -> bool {
    sequences.get(&lane).is_some_and(|sequence| sequence.closed && sequence.requests.len() == 1)
}

#[cfg(test)]
mod tests;
