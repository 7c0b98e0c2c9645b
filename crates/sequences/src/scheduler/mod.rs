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
//! With [`Rules::looks_up`], a request of a sequence that is not here waits for a place, like a START. Then the caller
//! looks for the sequence in a store ([`Scheduler::take_lookups`]), and its requests wait for the result. With
//! [`Rules::enters_starts`], those of a new sequence wait until it has been entered there.
//!
//! Rules:
//! - Requests of a sequence run in the order in which they arrived, one at a time.
//! - A request of several steps is taken for each of them: [`Scheduler::put_back`] takes it back. Others of its
//!   sequence wait for its last one.
//! - No operation takes longer with more sequences that have a place. Three take longer with more sequences of a kind:
//!   [`Scheduler::take`] with those whose last run failed, a START with those that are looked for, and removing a
//!   sequence that waits for a place with those that wait.
//! - The caller passes the time. Nothing here reads a clock.
//!
//! Not for: states (the slots are in [`crate::pool`]), tensors, or Triton's objects: a request is an `R`.

mod arrive;
mod expire;
mod lookup;
mod request;

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

// foldhash is seeded at random, as std's SipHash is, which took a sixth of the backend's instructions for a request.
use foldhash::{HashMap, HashMapExt};
use hashlink::LinkedHashMap;

use crate::{Finished, Outcome, SequenceId};
use request::Ids;
pub use request::{
    Begins, Control, IdReuse, IdleRule, Lookup, OnDuplicateStart, Origin, Over, OverBy, Parking, Ready, Refused, Rules,
    Work,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It waits for a place, until this time at most.
    Waiting(Instant),
    /// No request is queued.
    Idle,
    Ready,
    Running,
    /// It begins with the state of another sequence, which has requests to run before.
    Cloning,
    /// It has a place, and is being looked up in the store or entered there.
    LookedUp,
}

enum Queued<R> {
    Request(R, Begins),
    /// A request that has made a step. It no longer waits, so limits don't count it.
    Begun(R),
    /// The sequence in this lane begins with the state at this point.
    CloneTo(u32),
}

impl<R> Queued<R> {
    /// The request, what it begins with, and by how much taking it lowers the number of requests that wait.
    fn taken(self) -> Option<(R, Begins, usize)> {
        match self {
            Self::Request(request, begins) => Some((request, begins, 1)),
            Self::Begun(request) => Some((request, Begins::Plain, 0)),
            Self::CloneTo(_) => None,
        }
    }
}

struct Sequence<R> {
    id: SequenceId,
    worker: usize,
    phase: Phase,
    requests: VecDeque<Queued<R>>,
    /// How many of `requests` wait for their first step.
    queued: usize,
    /// It takes no further request.
    closed: bool,
    /// No request has succeeded for the time of the idle rule. It is over unless one that is queued or running
    /// succeeds.
    overdue: bool,
    failed: bool,
    /// A request of it has succeeded, or it was resumed or found.
    has_state: bool,
    /// It has to be looked for in the store, or entered there.
    awaits_store: bool,
    /// It leaves for another server when its request has run.
    leaves: bool,
}

impl<R> Sequence<R> {
    /// Adds it to the queue of its worker, and returns that worker.
    fn get_ready(&mut self, lane: u32, workers: &mut [Worker]) -> usize {
        self.phase = Phase::Ready;
        workers[self.worker].queue.push_back(Task::Run(lane));
        self.worker
    }
}

struct Worker {
    queue: VecDeque<Task>,
    /// How many of these end a sequence.
    ends: usize,
    sequences: usize,
    /// Batches since the last one that had a sequence whose last run failed.
    batches_since_failed: usize,
}

/// A sequence that has failed costs the others a run. With one in ten batches, they keep nine tenths of the runs.
const BATCHES_FOR_ONE_FAILED: usize = 10;

enum Task {
    Run(u32),
    End(Over),
}

impl Worker {
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
    /// The lanes of sequences that take no further request and have not ended yet, by id: the END of each waits or
    /// runs. Only if sequences are looked up.
    closing: HashMap<SequenceId, BTreeSet<u32>>,
    sequences: HashMap<u32, Sequence<R>>,
    next_lane: u32,
    workers: Vec<Worker>,
    /// Lanes of the sequences that wait for a place, in the order of their STARTs.
    waiting: VecDeque<u32>,
    waiting_until: BTreeSet<(Instant, u32)>,
    queued: usize,
    placed: usize,
    /// The lanes that have a place and are not overdue, with the time when a request last succeeded (at first, when the
    /// sequence got its place); the longest ago first.
    last_success: LinkedHashMap<u32, Instant>,
    /// The sequences that are parked, by id, each with its lane and until when; the first to end is first. A parked
    /// sequence has no place. Its worker still has its state.
    parked: LinkedHashMap<SequenceId, (u32, Instant)>,
    /// Lanes that the next [`Scheduler::take_lookups`] returns.
    lookups: Vec<u32>,
    /// Lanes of sequences that wait to be looked for or are looked for. A START with the id of one removes it from
    /// here.
    elsewhere: BTreeSet<u32>,
    drains: bool,
    last_scan: Instant,
}

impl<R> Scheduler<R> {
    pub fn new(rules: Rules, workers: usize, now: Instant) -> Self {
        let worker = || Worker { queue: VecDeque::new(), ends: 0, sequences: 0, batches_since_failed: 0 };
        Self {
            rules,
            ids: Ids::new(rules.id_reuse, rules.first_id),
            by_id: HashMap::new(),
            closing: HashMap::new(),
            sequences: HashMap::new(),
            next_lane: 0,
            workers: std::iter::repeat_with(worker).take(workers).collect(),
            waiting: VecDeque::new(),
            waiting_until: BTreeSet::new(),
            queued: 0,
            placed: 0,
            last_success: LinkedHashMap::new(),
            parked: LinkedHashMap::new(),
            lookups: Vec::new(),
            elsewhere: BTreeSet::new(),
            drains: false,
            last_scan: now,
        }
    }

    /// Frees the id of a sequence, which then takes no further request.
    fn close(&mut self, lane: u32) {
        let Some(sequence) = self.sequences.get_mut(&lane) else { return };
        sequence.closed = true;
        if self.rules.looks_up {
            self.closing.entry(sequence.id.clone()).or_default().insert(lane);
        }
        if self.by_id.get(&sequence.id) == Some(&lane) {
            self.by_id.remove(&sequence.id);
        }
    }

    fn take_out(&mut self, lane: u32) -> Option<Sequence<R>> {
        let sequence = self.sequences.remove(&lane)?;
        self.no_longer_closing(&sequence.id, lane);
        Some(sequence)
    }

    /// Removes a sequence that has a place or waits for one, and those that were to begin with its state. Returns their
    /// queued requests, and why each cannot run.
    fn remove(&mut self, lane: u32) -> Vec<(R, Refused)> {
        let (mut refused, mut lanes) = (Vec::new(), vec![(lane, None)]);
        // Not by recursion: clones can wait for clones in a chain of any length.
        while let Some((lane, source)) = lanes.pop() {
            self.close(lane);
            let Some(sequence) = self.take_out(lane) else { continue };
            self.elsewhere.remove(&lane);
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
                    Queued::Request(request, _) | Queued::Begun(request) => {
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
    fn drop_idle(&mut self, lane: u32, why: OverBy) {
        if let Some(sequence) = self.sequences.get(&lane) {
            self.workers[sequence.worker].end(Over { lane, why });
        }
        self.remove(lane);
    }

    /// The workers with sequences that are over, whose slots can be freed.
    pub fn with_over(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().enumerate().filter(|(_, worker)| worker.ends > 0).map(|(number, _)| number)
    }

    pub fn has_work(&self, worker: usize) -> bool {
        !self.workers[worker].queue.is_empty()
    }

    /// The request that a worker has to run, and its lane, if the worker has nothing else to do.
    pub fn only_request(&self, worker: usize) -> Option<(u32, &R)> {
        let of = &self.workers[worker];
        let Some(&Task::Run(lane)) = of.queue.front().filter(|_| of.queue.len() == 1) else { return None };
        match self.sequences.get(&lane)?.requests.front()? {
            Queued::Request(request, Begins::Plain) => Some((lane, request)),
            Queued::Request(..) | Queued::Begun(_) | Queued::CloneTo(_) => None,
        }
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
                        && let Some((request, begins, waited)) = sequence.requests.pop_front().and_then(Queued::taken)
                    {
                        sequence.phase = Phase::Running;
                        sequence.queued -= waited;
                        *queued -= waited;
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
        // They go to the end of the same queue, so that a clone of such a sequence, which is before it, still runs
        // first.
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
            // A request that failed without a run of its own says nothing of the sequence's next run.
            sequence.failed = outcome == Outcome::RunFailed || (sequence.failed && outcome == Outcome::Failed);
            if outcome == Outcome::Advanced {
                sequence.overdue = false;
                // This also moves it to the end, so that the first one stays the one that is longest ago.
                self.last_success.insert(lane, now);
            }
            self.begin_clones(lane);
            let Some(sequence) = self.sequences.get_mut(&lane) else { continue };
            if !sequence.requests.is_empty() {
                sequence.get_ready(lane, &mut self.workers);
            } else if sequence.closed {
                self.drop_idle(lane, OverBy::Replaced);
            } else if sequence.leaves {
                self.drop_idle(lane, OverBy::Released);
            } else if sequence.overdue {
                self.expire_idle(lane, now);
            }
        }
        self.fill_places(now, wake);
        refused
    }

    /// Takes back requests that have steps left, each with its lane. The sequence goes to the end of the worker's
    /// queue, and its request stays the first of the sequence.
    pub fn put_back(&mut self, batch: impl Iterator<Item = (u32, R)>) {
        for (lane, request) in batch {
            let Some(sequence) = self.sequences.get_mut(&lane) else { continue };
            sequence.requests.push_front(Queued::Begun(request));
            sequence.get_ready(lane, &mut self.workers);
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

    /// How many sequences there are, with those that wait for a place and those that are closed but have requests,
    /// without those that are parked.
    pub fn live(&self) -> usize {
        self.sequences.len() - self.parked.len()
    }

    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many requests wait: for a place, for an earlier request of their sequence, or for a run.
    pub const fn queued(&self) -> usize {
        self.queued
    }
}

fn ends_next<R>(sequences: &HashMap<u32, Sequence<R>>, lane: u32) -> bool {
    sequences.get(&lane).is_some_and(|sequence| sequence.closed && sequence.requests.len() == 1)
}

#[cfg(test)]
mod tests;
