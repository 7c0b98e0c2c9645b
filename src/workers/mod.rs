//! The path of a request from Execute to its release; here, of one that this backend schedules itself. [`payloads`] is
//! for what core schedules.
//!
//! Core calls Execute on one thread, one call at a time, in the order of its queue. Execute puts each request into the
//! [`Scheduler`] and returns. Each worker is a thread with an [`Instance`] of its own. While its batch runs, requests
//! collect for the next one, and nothing waits for a fixed time. A request that makes no step (`input_windows`) runs on
//! core's thread, if the worker has nothing to do. The clock's thread ends idle sequences, refuses STARTs that have
//! waited for too long, and releases the last request, whatever the workers do. ARCHITECTURE.md says the rest.
//!
//! Rules:
//! - The scheduler is locked for its own work only, never while a batch runs or an answer is sent.
//! - The scheduler gets the outcome of a batch before its answers are sent, because a client that has the answer to an
//!   END may count on the place.
//! - Requests are released by [`releases`], so that core doesn't unload a model while its thread returns from Execute.

#![forbid(unsafe_code)]

mod arrivals;
mod clock;
mod elsewhere;
mod payloads;
mod releases;
mod stored;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sequences::scheduler::{Begins, Over, OverBy, Ready, Refused, Scheduler, Work};
use sequences::{Finished, Key};

use crate::batch::Row;
use crate::config::{OwnScheduling, Strategy};
use crate::error::LoadError;
use crate::instance::Instance;
use crate::model::{LiveSequences, Model, QueueNumbers, Settled};
use crate::panic;
use crate::responder::Responder;
use crate::triton::{self, Error, Request, Response, Times, monotonic_ns, thread_waits};
use arrivals::{Queued, Read, Reader, Unfit, all_or_none, moved, unfit};
use clock::{Alarm, Thread, start_clock};
use payloads::Payloads;
use releases::{LOOK_EVERY, Releases};
use stored::{Queue, Stored};

/// How long the metrics may show an older number of requests that wait.
const SHOW_EVERY: Duration = Duration::from_millis(100);

/// A Triton instance, by who schedules the sequences of its model.
pub enum Scheduled {
    ByCore(Payloads),
    ByUs(Box<Workers>),
}

impl Scheduled {
    pub fn new(triton: triton::Instance, model: Arc<Model>) -> Result<Self, LoadError> {
        match model.config.strategy {
            Strategy::Own(own) => Workers::new(triton, &model, own).map(Box::new).map(Self::ByUs),
            Strategy::Direct | Strategy::Oldest => Payloads::new(triton, model).map(Self::ByCore),
        }
    }

    /// Takes the requests of a payload. Each is answered and released, at once or later.
    pub fn execute(&mut self, requests: Vec<Request>) {
        match self {
            Self::ByCore(payloads) => payloads.execute(requests),
            Self::ByUs(workers) => workers.execute(requests),
        }
    }
}

/// A Triton instance of a model that this backend schedules itself.
pub struct Workers {
    shared: Arc<Shared>,
    _clock: Thread,
    /// Stopped in this order, which matters: see [`Shared::start_store_threads`].
    _of_store: Vec<Thread>,
    workers: Vec<Arc<Worker>>,
    threads: Vec<JoinHandle<()>>,
    reader: Reader,
    /// [`thread_waits`] of core's thread when it last returned from Execute.
    waits: u64,
}

struct Shared {
    triton: triton::Instance,
    sequences: Arc<LiveSequences>,
    scheduler: Mutex<Scheduler<Queued>>,
    /// By worker: it has something to do.
    wake: Vec<Condvar>,
    stop: AtomicBool,
    /// When the thread that watches the clock has something to do.
    alarm: Arc<Alarm>,
    releases: Releases,
    /// If sequences outlive the server.
    stored: Option<Stored>,
    lookups: Arc<Queue>,
    /// Requests that have run and whose answers are not sent yet.
    answering: AtomicUsize,
    most_rows: usize,
}

struct Worker {
    number: usize,
    instance_number: u32,
    /// Locked by the worker's thread, or by core's thread, for a batch.
    instance: Mutex<Instance>,
    responder: Responder<Settled>,
}

impl Workers {
    pub fn new(triton: triton::Instance, model: &Arc<Model>, own: OwnScheduling) -> Result<Self, LoadError> {
        let mut rules = own.rules;
        if let Some(store) = &model.config.state_store {
            rules.first_id = stored::first_id(&store.location)?;
        }
        let scheduler = Mutex::new(Scheduler::new(rules, own.workers, Instant::now()));
        let site = model.only_site()?;
        let alarm = Arc::<Alarm>::default();
        let stored = Stored::new(model, own, &alarm, &site.sequences);
        let shared = Arc::new(Shared {
            triton,
            sequences: site.sequences.clone(),
            scheduler,
            wake: (0..own.workers).map(|_| Condvar::new()).collect(),
            stop: AtomicBool::new(false),
            alarm,
            releases: Releases::default(),
            stored,
            lookups: Arc::default(),
            answering: AtomicUsize::new(0),
            most_rows: model.config.max_rows_per_run,
        });
        shared.watch_clock_for(&mut shared.scheduler.lock(), Instant::now());
        let watches = shared.clone();
        let clock = start_clock(&shared.alarm, move || watches.do_what_is_due())?;
        let of_store = shared.start_store_threads()?;
        let mut workers = Self {
            shared,
            _clock: clock,
            _of_store: of_store,
            workers: Vec::new(),
            threads: Vec::new(),
            reader: Reader::new(model)?,
            waits: 0,
        };
        for number in 0..own.workers {
            let (instance, shared) = (Instance::new(triton, model.clone())?, workers.shared.clone());
            let (instance_number, instance) = (instance.number, Mutex::new(instance));
            let responder = Responder::new(move |settled| shared.answer(settled), true);
            let worker = Arc::new(Worker { number, instance_number, instance, responder });
            let (shared, works) = (workers.shared.clone(), worker.clone());
            let work = move || {
                while shared.wait(number) {
                    shared.run_next(&works, &mut works.instance.lock(), true);
                }
            };
            let started = thread::Builder::new().name(format!("worker {number}")).spawn(work);
            workers.threads.push(started.map_err(LoadError::Worker)?);
            workers.workers.push(worker);
        }
        Ok(workers)
    }

    pub fn execute(&mut self, requests: Vec<Request>) {
        let _executing = self.shared.releases.execute();
        let queue_was_empty = thread_waits() != self.waits;
        let now = Instant::now();
        let (mut wake, mut refused, mut drains) = (Vec::new(), Vec::new(), Vec::new());
        // Before the scheduler is locked, because this copies inputs and may wait for a GPU.
        let read = self.reader.read_all(requests);
        let mut scheduler = self.shared.scheduler.lock();
        for rows in read {
            let rows = if rows.len() == 1 { rows } else { all_or_none(rows, &scheduler) };
            for Read { mut decoded, starts, control } in rows {
                let control = match control {
                    Ok(control) => control,
                    Err(why) => {
                        starts.iter().for_each(|id| scheduler.refuse_start(id));
                        // A request to drain has no id, so reading it always fails. It is looked for only here, so
                        // that other requests do not pay for it.
                        match self.reader.may_drain(&decoded.request) {
                            Some(may) => drains.push((decoded.request, may)),
                            None => refused.push((decoded.request, why)),
                        }
                        continue;
                    }
                };
                let wait = decoded.request.timeout();
                decoded.deadline = wait.map(|wait| now + wait);
                let queued = Queued::New(Box::new(decoded), now);
                match scheduler.arrive(control, queued, wait, now) {
                    Ok(worker) => wake.extend(worker),
                    Err(refusal) => refused.push(unfit(refusal)),
                }
            }
        }
        scheduler.fill_places(now, &mut wake);
        let is_alone = scheduler.live() == 1;
        let copies_only = wake.first().copied().filter(|&worker| self.makes_no_step(&scheduler, worker));
        // Only after that look at `wake`: a worker that only ends sequences has no request to run here.
        wake.extend(scheduler.with_over());
        self.shared.watch_clock_for(&mut scheduler, now);
        drop(scheduler);
        self.shared.refuse(refused);
        self.shared.drain(drains);
        let runs_here = match self.workers.as_slice() {
            // Core's thread waits for no store.
            _ if self.shared.stored.as_ref().is_some_and(|stored| stored.later.is_none()) => None,
            // The worker has nothing else to run, and core has nothing else to hand over.
            [worker] if is_alone && queue_was_empty && !wake.is_empty() => Some((worker, worker.instance.lock())),
            workers => copies_only.and_then(|worker| Some((&workers[worker], workers[worker].instance.try_lock()?))),
        };
        if let Some((worker, mut instance)) = runs_here {
            self.shared.run_next(worker, &mut instance, false);
            drop(instance);
            // The rest of a payload or of a request of several rows.
            wake.retain(|&worker| self.shared.scheduler.lock().has_work(worker));
        }
        self.shared.wake(&mut wake);
        self.waits = thread_waits();
    }

    /// Whether all that a worker has to do is a request that makes no step.
    fn makes_no_step(&self, scheduler: &Scheduler<Queued>, worker: usize) -> bool {
        let request = if self.reader.expected.make_steps() { scheduler.only_request(worker) } else { None };
        request.and_then(|(lane, queued)| Some((lane, queued.decoded()?))).is_some_and(|(lane, of)| {
            let look = |left: &[Vec<u8>]| self.reader.expected.brings_no_window(of, left);
            self.shared.sequences.look_at_left(self.workers[worker].instance_number, lane, look) == Some(true)
        })
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // Core removes an instance only after all requests have been released, so nothing is queued.
        self.shared.stop.store(true, Ordering::Release);
        // A worker that saw `stop` unset sleeps before it gives up the lock, so the notification reaches it.
        drop(self.shared.scheduler.lock());
        self.shared.wake.iter().for_each(|wake| _ = wake.notify_all());
        for thread in self.threads.drain(..) {
            panic::join(thread, "a thread of a model that this backend schedules");
        }
        if let Some((stored, later)) = self.shared.stored.as_ref().and_then(Stored::with_later) {
            for worker in &self.workers {
                // The thread of the writer lives until `_of_store` is dropped, and writes what is queued here.
                panic::catch_and_log(|| stored.leave_all(later, &mut worker.instance.lock()));
            }
        }
        // Dropping the responders sends the answers that are left.
        self.workers.clear();
        // After the answers, because each of them leaves the last of its requests there.
        self.shared.releases.release_all();
    }
}

impl Shared {
    /// Lets the thread that watches the clock look at the scheduler in time, and hands over the sequences to look for.
    /// Must be called after each change of the scheduler.
    fn watch_clock_for(&self, scheduler: &mut Scheduler<Queued>, now: Instant) {
        self.hand_over_lookups(scheduler);
        let show = now + SHOW_EVERY;
        // Each change of the scheduler may also change the numbers that the metrics show.
        self.alarm.by(scheduler.next_scan().map_or(show, |scan| scan.min(show)));
    }

    fn wake(&self, workers: &mut Vec<usize>) {
        workers.sort_unstable();
        workers.dedup();
        workers.iter().for_each(|&worker| _ = self.wake[worker].notify_one());
    }

    fn refuse(&self, refused: Vec<(Request, Unfit)>) {
        if refused.is_empty() {
            return;
        }
        let errors = || refused.iter().filter_map(|(_, why)| why.as_ref());
        let rejected = errors().filter(|why| why.is_without_place()).count();
        self.sequences.count_refused(errors().map(|why| why.reason()), rejected);
        let answers = refused.into_iter().map(|(request, error)| {
            // Without an error, another row of the same request has it, and its client gets that one.
            let answer = error.map_or_else(|| request.response(), |error| Err((*error).into()));
            (request, answer)
        });
        self.answer_now(answers.collect(), false);
    }

    /// Answers and releases requests that no worker gets.
    fn answer_now(&self, answers: Vec<(Request, Result<Response, Error>)>, succeeded: bool) {
        let times = Times::starting_at(monotonic_ns());
        let mut requests = Vec::with_capacity(answers.len());
        for (mut request, answer) in answers {
            let answer = request.make_answer(answer);
            self.triton.report_request(&request, succeeded, times.ending_at(monotonic_ns()));
            drop(answer);
            requests.push(request);
        }
        self.release(requests);
    }

    /// Waits until a worker has something to do. Returns false if the instance is being removed.
    fn wait(&self, number: usize) -> bool {
        let mut scheduler = self.scheduler.lock();
        loop {
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            if scheduler.has_work(number) || self.has_snapshots(number, Instant::now()) {
                return true;
            }
            self.wake[number].wait(&mut scheduler);
        }
    }

    /// Makes the scheduler's scan and releases the last request, if it is time, and shows how much waits.
    fn do_what_is_due(&self) {
        let (now, mut wake, mut refused) = (Instant::now(), Vec::new(), Vec::new());
        let mut scheduler = self.scheduler.lock();
        if scheduler.next_scan().is_some_and(|scan| scan <= now) {
            refused = scheduler.scan(now, &mut wake);
            self.hand_over_lookups(&mut scheduler);
        }
        wake.extend((0..self.wake.len()).filter(|&worker| self.has_snapshots(worker, now)));
        let (parked, waiting, requests) = (scheduler.parked(), scheduler.waiting(), scheduler.queued());
        scheduler.next_scan().into_iter().for_each(|scan| self.alarm.by(scan));
        drop(scheduler);
        self.wake(&mut wake);
        if self.sequences.metrics.note_queue(|| {
            let oldest_unsaved_ms = self.note_due(now);
            let owned = self.stored.as_ref().map_or(0, Stored::owned);
            QueueNumbers { parked, waiting, requests, owned, oldest_unsaved_ms }
        }) {
            self.sequences.publish();
        }
        self.refuse_queued(refused);
        self.releases.look().into_iter().for_each(|look| self.alarm.by(look));
    }

    fn refuse_queued(&self, refused: Vec<(Queued, Refused)>) {
        self.refuse(refused.into_iter().map(unfit).collect());
    }

    /// Does the next work of a worker, if there is any: ends sequences and runs a batch, settles its sequences,
    /// answers, and releases. `goes_on`: this thread runs the next batch, too.
    fn run_next(&self, worker: &Worker, instance: &mut Instance, goes_on: bool) {
        let Work { ready, over } = self.scheduler.lock().take(worker.number, self.most_rows);
        let lanes: Vec<u32> = ready.iter().map(|ready| ready.lane).collect();
        if !over.is_empty() {
            if let Some(stored) = &self.stored {
                // Before the instance drops the states, because they are saved from there.
                panic::catch_and_log(|| stored.leave(instance, &over));
                // The metrics show that they have left.
                self.alarm.by(Instant::now() + SHOW_EVERY);
            }
            panic::catch_and_log(|| instance.end(&over));
        }
        if !lanes.is_empty() {
            self.run_batch(worker, instance, lanes, ready, goes_on);
        }
        self.stored.iter().for_each(|stored| _ = panic::catch_and_log(|| stored.save_due(worker.number, instance)));
    }

    fn run_batch(
        &self,
        worker: &Worker,
        instance: &mut Instance,
        lanes: Vec<u32>,
        ready: Vec<Ready<Queued>>,
        goes_on: bool,
    ) {
        let Batch { mut finished, left, settled } =
            panic::catch_and_log(|| run(instance, worker.number, ready, self.stored.as_ref())).unwrap_or_default();
        if finished.len() + left.len() < lanes.len() {
            // A panic dropped rows. Their sequences are over.
            let seen: Vec<u32> = finished.iter().map(|of| of.lane).chain(left.iter().map(|of| of.0)).collect();
            let dropped = lanes.iter().filter(|lane| !seen.contains(lane));
            let dropped: Vec<_> = dropped.map(|&lane| Over { lane, why: OverBy::Replaced }).collect();
            panic::catch_and_log(|| instance.end(&dropped));
            self.stored.iter().for_each(|stored| stored.lose(dropped.iter().map(|over| over.lane)));
            finished.extend(dropped.iter().map(|over| Finished::lost(over.lane)));
        }
        // Only with `oldest` are requests held, so this need not wait for their release.
        panic::catch_and_log(|| instance.sequences.finish_payload(instance.number, Vec::new()));
        // Before the scheduler counts the sequences as over: otherwise a drain in between would count neither.
        self.answering.fetch_add(settled.requests.len(), Ordering::AcqRel);
        let (now, mut wake) = (Instant::now(), Vec::new());
        let mut scheduler = self.scheduler.lock();
        let refused = scheduler.finish(finished.into_iter(), now, &mut wake);
        scheduler.put_back(left.into_iter());
        self.watch_clock_for(&mut scheduler, now);
        drop(scheduler);
        self.wake(&mut wake);
        let requests = settled.requests.len();
        worker.responder.dispatch(settled, requests, || if goes_on { instance.next_run_ns() } else { 0 });
        // The store may still have a sequence whose state was lost here.
        if self.stored.is_some() {
            self.refuse(refused.into_iter().map(moved).collect());
        } else {
            self.refuse_queued(refused);
        }
    }

    fn answer(&self, Settled { answers, requests, leavings, .. }: Settled) {
        drop(answers);
        self.answering.fetch_sub(requests.len(), Ordering::AcqRel);
        drop(leavings);
        self.release(requests);
    }

    fn release(&self, requests: Vec<Request>) {
        if self.releases.release(requests) {
            self.alarm.by(Instant::now() + LOOK_EVERY);
        }
    }
}

#[derive(Default)]
struct Batch {
    finished: Vec<Finished>,
    /// Requests that have steps left, each with its lane.
    left: Vec<(u32, Queued)>,
    settled: Settled,
}

fn run(instance: &mut Instance, worker: usize, ready: Vec<Ready<Queued>>, stored: Option<&Stored>) -> Batch {
    let (now, number) = (Instant::now(), instance.number);
    let (mut new, mut under_way) = (Vec::with_capacity(ready.len()), Vec::new());
    for Ready { lane, id, request, begins } in ready {
        let (mut of, since) = match request {
            Queued::New(of, since) => (*of, since),
            Queued::UnderWay(row) => {
                under_way.push(*row);
                continue;
            }
        };
        match (begins, &mut of.asked) {
            (Begins::Clone(source), Some(asked)) => asked.progress.clone_lane = Some(source),
            // Its state was kept while it was parked, so the run must not begin with the initial one.
            (Begins::Resumed, _) => of.start = false,
            _ => {}
        }
        instance.sequences.metrics.waited(now.saturating_duration_since(since));
        if of.deadline.is_some_and(|deadline| deadline <= now) {
            of.problem = Some(Box::new(Refused::Late(id.clone()).into()));
        }
        of.key = Some(Key { instance: number, lane: Some(lane), id });
        new.push(of);
    }
    stored.iter().for_each(|stored| stored.prepare(worker, instance, &mut new));
    let (mut answered, left) = instance.execute_batch(new, under_way);
    stored.iter().for_each(|stored| stored.save(worker, instance, &mut answered, &left));
    let with_lane = |row: Row| Some((row.key.as_ref()?.lane?, Queued::UnderWay(Box::new(row))));
    Batch {
        // After `save`, which notes a state that could not be saved as lost.
        finished: answered.iter().filter_map(|of| of.finished).collect(),
        left: left.into_iter().filter_map(with_lane).collect(),
        settled: instance.sequences.finish(answered),
    }
}
