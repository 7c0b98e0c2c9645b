//! The path of a request that this backend schedules itself, from Execute to its release.
//!
//! Core calls Execute on one thread, one call at a time, in the order of its queue. Execute reads each request, puts it
//! into the [`Scheduler`] and returns. Each worker is a thread with an [`Instance`] of its own. It takes the next
//! batch, runs it, settles its sequences, sends the answers and releases the requests. While a batch runs, requests
//! collect for the next one, and nothing waits for a fixed time. If no other sequence is live and nothing else is
//! queued, a request runs on core's thread, because waking the worker takes longer.
//!
//! Rules:
//! - The scheduler is locked for its own work only, never while a batch runs or an answer is sent.
//! - The scheduler gets the outcome of a batch before its answers are sent, because a client that has the answer to an
//!   END may count on the place.
//! - Requests are released by [`releases`], so that core doesn't unload a model while its thread returns from Execute.

#![forbid(unsafe_code)]

mod releases;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use smallvec::{SmallVec, smallvec};

use crate::batch::control::ControlReader;
use crate::batch::decode::Expected;
use crate::batch::state_api::{conflict, several_rows};
use crate::batch::{Row, TellsId};
use crate::config::{OwnScheduling, Strategy};
use crate::error::{LoadError, RequestError};
use crate::instance::Instance;
use crate::model::{LiveSequences, Model, QueueNumbers, Settled};
use crate::panic;
use crate::responder::Responder;
use crate::scheduler::{After, Begins, Control, Origin, Over, Ready, Refused, Scheduler, Work};
use crate::sequence::Key;
use crate::triton::{self, Request, Times, monotonic_ns, thread_waits};
use releases::Releases;

/// A Triton instance, by who schedules the sequences of its model.
pub enum Scheduled {
    /// Core's sequence batcher.
    ByCore(Box<Instance>),
    /// This backend.
    ByUs(Box<Workers>),
}

impl Scheduled {
    pub fn new(triton: triton::Instance, model: Arc<Model>) -> Result<Self, LoadError> {
        match model.config.strategy {
            Strategy::Own(own) => Workers::new(triton, &model, own).map(Box::new).map(Self::ByUs),
            Strategy::Direct | Strategy::Oldest => Instance::new(triton, model).map(Box::new).map(Self::ByCore),
        }
    }

    /// Takes the requests of a payload. Each is answered and released, at once or later.
    pub fn execute(&mut self, requests: Vec<Request>) {
        match self {
            Self::ByCore(instance) => instance.execute(requests),
            Self::ByUs(workers) => workers.execute(requests),
        }
    }
}

/// A row of a request, and what it says about its sequence.
struct Read {
    row: Row,
    control: Result<Control, Unfit>,
}

/// Why a row does not run; `None` if the reason is another row of its request.
type Unfit = Option<Box<RequestError>>;

/// Makes all rows of a request unfit if one of them cannot be queued.
fn all_or_none(mut rows: SmallVec<[Read; 1]>, scheduler: &Scheduler<Box<Queued>>) -> SmallVec<[Read; 1]> {
    let controls: Vec<_> = rows.iter().filter_map(|read| read.control.as_ref().ok()).collect();
    let fault = if controls.len() < rows.len() { None } else { Some(scheduler.check(&controls)) };
    let (at, mut why) = match fault {
        Some(Ok(())) => return rows,
        Some(Err((row, why))) => (row, Some(Box::new(why.into()))),
        None => (rows.len(), None),
    };
    for (row, read) in rows.iter_mut().enumerate().filter(|(_, read)| read.control.is_ok()) {
        read.control = Err(if row == at { why.take() } else { None });
    }
    rows
}

/// A request in the scheduler. It is boxed there, because each sequence keeps room for some requests.
struct Queued {
    row: Row,
    /// When it came.
    since: Instant,
    /// It doesn't run after this time, which is that of its `timeout`.
    deadline: Option<Instant>,
}

/// A Triton instance of a model that this backend schedules itself.
pub struct Workers {
    shared: Arc<Shared>,
    workers: Vec<Arc<Worker>>,
    threads: Vec<JoinHandle<()>>,
    expected: Expected,
    control: ControlReader,
    tells_id: TellsId,
    /// [`thread_waits`] of core's thread when it last returned from Execute.
    waits: u64,
}

struct Shared {
    triton: triton::Instance,
    sequences: Arc<LiveSequences>,
    scheduler: Mutex<Scheduler<Box<Queued>>>,
    /// By worker: it has something to do.
    wake: Vec<Condvar>,
    stop: AtomicBool,
    releases: Releases,
    most_rows: usize,
}

struct Worker {
    number: usize,
    /// Locked by the worker's thread, or by core's thread, for a batch.
    instance: Mutex<Instance>,
    responder: Responder<Settled>,
}

impl Workers {
    /// Starts the workers.
    pub fn new(triton: triton::Instance, model: &Arc<Model>, own: OwnScheduling) -> Result<Self, LoadError> {
        let dims: &[i64] = if model.config.is_batched() { &[1, 1] } else { &[1] };
        let scheduler = Mutex::new(Scheduler::new(own.rules, own.workers, Instant::now()));
        let site = model.only_site()?;
        // The model for initial states reads the inputs, too, and it runs on the host.
        let gpu = site.device.as_ref().map(|device| device.number()).filter(|_| model.initial_model.is_none());
        let shared = Arc::new(Shared {
            triton,
            sequences: site.sequences.clone(),
            scheduler,
            wake: (0..own.workers).map(|_| Condvar::new()).collect(),
            stop: AtomicBool::new(false),
            releases: Releases::default(),
            most_rows: model.config.max_rows_per_run,
        });
        let mut workers = Self {
            shared,
            workers: Vec::new(),
            threads: Vec::new(),
            expected: Expected::new(&model.binding, model.state_api.as_ref(), gpu),
            control: ControlReader::new(model.config.takes_ids, required_inputs(model)),
            tells_id: TellsId { output_dims: model.config.takes_ids.output.then_some(dims) },
            waits: 0,
        };
        for number in 0..own.workers {
            let (instance, shared) = (Mutex::new(Instance::new(triton, model.clone())?), workers.shared.clone());
            let responder = Responder::new(move |settled| shared.answer(settled), true);
            let worker = Arc::new(Worker { number, instance, responder });
            let (shared, works) = (workers.shared.clone(), worker.clone());
            let started = thread::Builder::new().name(format!("worker {number}")).spawn(move || shared.work(&works));
            workers.threads.push(started.map_err(LoadError::Worker)?);
            workers.workers.push(worker);
        }
        Ok(workers)
    }

    /// Queues the requests of a payload. Those that cannot run are answered now.
    pub fn execute(&mut self, requests: Vec<Request>) {
        let _executing = self.shared.releases.execute();
        let queue_was_empty = thread_waits() != self.waits;
        let now = Instant::now();
        let (mut wake, mut refused) = (Vec::new(), Vec::new());
        let read: Vec<_> = requests.into_iter().map(|request| self.read(request)).collect();
        let mut scheduler = self.shared.scheduler.lock();
        for rows in read {
            let rows = if rows.len() == 1 { rows } else { all_or_none(rows, &scheduler) };
            for Read { row, control } in rows {
                let control = match control {
                    Ok(control) => control,
                    Err(why) => {
                        refused.push((row.request, why));
                        continue;
                    }
                };
                let wait = row.request.timeout();
                let queued = Box::new(Queued { row, since: now, deadline: wait.map(|wait| now + wait) });
                match scheduler.arrive(control, queued, wait, now) {
                    Ok(worker) => wake.extend(worker),
                    Err((queued, why)) => refused.push((queued.row.request, Some(Box::new(why.into())))),
                }
            }
        }
        let is_alone = scheduler.live() == 1;
        wake.extend(scheduler.with_over());
        let is_noted = self.shared.note_queue(&scheduler);
        drop(scheduler);
        if is_noted {
            self.shared.sequences.publish();
        }
        self.shared.refuse(refused);
        match self.workers.as_slice() {
            // The worker has nothing else to run, and core has nothing else to hand over.
            [worker] if is_alone && queue_was_empty && !wake.is_empty() => {
                self.shared.run_next(worker, &mut worker.instance.lock());
                // The rest of a payload or of a request of several rows.
                wake.retain(|&worker| self.shared.scheduler.lock().has_work(worker));
            }
            _ => {}
        }
        self.shared.wake(&mut wake);
        self.waits = thread_waits();
    }

    /// The rows of a request: one, unless its special inputs have several.
    fn read(&self, mut request: Request) -> SmallVec<[Read; 1]> {
        let read = |request: &mut Request| {
            let asked = self.expected.asked(request)?;
            let mut controls = self.control.read(request)?;
            if let (Some(asked), [control]) = (&asked, controls.as_mut_slice()) {
                if asked.resume && control.id.is_none() {
                    return Err(conflict("'resume' needs the id of the parked sequence"));
                }
                control.end |= asked.delete;
                control.origin = match &asked.clone_of {
                    Some(id) => Origin::Clone(id.clone()),
                    None if asked.resume => Origin::Parked,
                    None => Origin::Own,
                };
            } else if asked.is_some() {
                return Err(several_rows());
            }
            Ok((controls, asked))
        };
        let (controls, mut asked) = match panic::catch_result(|| read(&mut request)) {
            Ok(read) => read,
            Err(error) => {
                let (row, control) = (Row::new(request), Err(Some(Box::new(error))));
                return smallvec![Read { row, control }];
            }
        };
        let rows = if controls.len() == 1 { vec![request] } else { request.split(controls.len()) };
        let read = |(request, control): (Request, Control)| {
            let mut row = self.expected.row(request, control.start, control.end, self.tells_id, asked.take());
            let problem = row.problem.take();
            Read { row, control: problem.map_or(Ok(control), |error| Err(Some(error))) }
        };
        rows.into_iter().zip(controls).map(read).collect()
    }
}

/// Number of inputs that every request must carry.
fn required_inputs(model: &Model) -> usize {
    if model.state_api.is_some() {
        // A call of the State API may carry none.
        return 0;
    }
    model.binding.request_inputs().filter(|(_, of)| !of.optional && !of.is_held).count()
}

impl Drop for Workers {
    fn drop(&mut self) {
        // Core removes an instance only after all requests have been released, so nothing is queued.
        self.shared.stop.store(true, Ordering::Release);
        drop(self.shared.scheduler.lock());
        self.shared.wake.iter().for_each(|wake| _ = wake.notify_all());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a worker has panicked");
            }
        }
        // Dropping the responders sends the answers that are left.
        self.workers.clear();
        self.shared.releases.release_all();
    }
}

impl Shared {
    /// Returns whether the metrics are to show other numbers of queued sequences.
    fn note_queue(&self, scheduler: &Scheduler<Box<Queued>>) -> bool {
        self.sequences.note_queue(QueueNumbers { parked: scheduler.parked(), waiting: scheduler.waiting() })
    }

    fn wake(&self, workers: &mut Vec<usize>) {
        workers.sort_unstable();
        workers.dedup();
        workers.iter().for_each(|&worker| _ = self.wake[worker].notify_one());
    }

    /// Answers and releases requests that do not run.
    fn refuse(&self, refused: Vec<(Request, Unfit)>) {
        if refused.is_empty() {
            return;
        }
        let times = Times::starting_at(monotonic_ns());
        let errors = || refused.iter().filter_map(|(_, why)| why.as_ref());
        let rejected = errors().filter(|why| why.is_without_place()).count();
        self.sequences.count_refused(errors().map(|why| why.reason()), rejected);
        let mut requests = Vec::with_capacity(refused.len());
        for (mut request, error) in refused {
            let answer = error.map_or_else(|| request.response(), |error| Err((*error).into()));
            let answer = request.make_answer(answer);
            self.triton.report_request(&request, false, times.ending_at(monotonic_ns()));
            drop(answer);
            requests.push(request);
        }
        self.release(requests);
    }

    /// Runs batches on a worker's thread until the instance is removed.
    fn work(&self, worker: &Worker) {
        while self.wait(worker.number) {
            self.run_next(worker, &mut worker.instance.lock());
        }
    }

    /// Waits until a worker has something to do. Returns false if the instance is being removed. Meanwhile the first
    /// worker makes the scheduler's scans, and releases the last request.
    fn wait(&self, number: usize) -> bool {
        let mut scheduler = self.scheduler.lock();
        loop {
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            if number == 0 && scheduler.next_scan().is_some_and(|scan| scan <= Instant::now()) {
                self.scan(&mut scheduler);
            }
            if scheduler.has_work(number) {
                return true;
            }
            let until = (number == 0).then(|| self.releases.next_look().into_iter().chain(scheduler.next_scan()).min());
            match until.flatten() {
                None => self.wake[number].wait(&mut scheduler),
                Some(until) => _ = self.wake[number].wait_until(&mut scheduler, until),
            }
            if number == 0 && !scheduler.has_work(0) {
                MutexGuard::unlocked(&mut scheduler, || self.releases.look());
            }
        }
    }

    fn scan(&self, scheduler: &mut MutexGuard<Scheduler<Box<Queued>>>) {
        let mut wake = Vec::new();
        let refused = scheduler.scan(Instant::now(), &mut wake);
        let is_noted = self.note_queue(scheduler);
        MutexGuard::unlocked(scheduler, || {
            self.wake(&mut wake);
            if is_noted {
                self.sequences.publish();
            }
            self.refuse_queued(refused);
        });
    }

    fn refuse_queued(&self, refused: Vec<(Box<Queued>, Refused)>) {
        let unfit = |(queued, why): (Box<Queued>, Refused)| (queued.row.request, Some(Box::new(why.into())));
        self.refuse(refused.into_iter().map(unfit).collect());
    }

    /// Does the next work of a worker, if there is any: ends sequences and runs a batch.
    fn run_next(&self, worker: &Worker, instance: &mut Instance) {
        let work = self.scheduler.lock().take(worker.number, self.most_rows);
        let lanes: Vec<u32> = work.ready.iter().map(|ready| ready.lane).collect();
        if let Err(error) = panic::catch(|| self.run(worker, instance, work, &lanes)) {
            log::error!("{error}");
            // Whatever became of the batch, its sequences are over, and nothing waits for them.
            let over: Vec<_> = lanes.iter().map(|&lane| Over { lane, expired: false }).collect();
            let ended = panic::catch(|| instance.end(&over));
            let after = lanes.into_iter().map(|lane| (lane, After::Over));
            let mut wake = Vec::new();
            let refused = self.scheduler.lock().finish(after, Instant::now(), &mut wake);
            self.wake(&mut wake);
            self.refuse_queued(refused);
            ended.unwrap_or_else(|error| log::error!("{error}"));
        }
    }

    /// Runs a batch of these lanes, settles its sequences, answers, and releases.
    fn run(&self, worker: &Worker, instance: &mut Instance, Work { ready, over }: Work<Box<Queued>>, lanes: &[u32]) {
        if !over.is_empty() {
            instance.end(&over);
        }
        if ready.is_empty() {
            return;
        }
        let now = Instant::now();
        let number = instance.number();
        let row = |Ready { lane, id, request, begins }: Ready<Box<Queued>>| {
            let Queued { mut row, since, deadline } = *request;
            match (begins, &mut row.asked) {
                (Begins::Clone(of), Some(asked)) => asked.clone_lane = Some(of),
                (Begins::Resumed, _) => row.state.start = false,
                _ => {}
            }
            instance.sequences().waited(now.saturating_duration_since(since));
            if deadline.is_some_and(|deadline| deadline <= now) {
                row.problem = Some(Box::new(RequestError::SequenceQueueTimeout(id.clone())));
            }
            row.key = Some(Key { instance: number, lane: Some(lane), id });
            row
        };
        let answered = instance.execute_rows(ready.into_iter().map(row).collect());
        let mut after: Vec<(u32, After)> = answered.iter().filter_map(|of| of.lane).collect();
        if after.len() < lanes.len() {
            // A panic dropped rows. Their sequences are over.
            let is_dropped = |lane: &&u32| answered.iter().all(|of| of.lane.is_none_or(|(known, _)| known != **lane));
            after.extend(lanes.iter().filter(is_dropped).map(|&lane| (lane, After::Over)));
        }
        let settled = instance.sequences().finish(answered);
        instance.sequences().finish_payload(number, Vec::new());
        let mut wake = Vec::new();
        let mut scheduler = self.scheduler.lock();
        let refused = scheduler.finish(after.into_iter(), Instant::now(), &mut wake);
        let is_noted = self.note_queue(&scheduler);
        drop(scheduler);
        self.wake(&mut wake);
        if is_noted {
            self.sequences.publish();
        }
        let requests = settled.requests.len();
        worker.responder.dispatch(settled, requests, || instance.next_run_ns());
        self.refuse_queued(refused);
    }

    /// Sends the answers of a batch, and releases its requests.
    fn answer(&self, Settled { answers, requests, leavings, .. }: Settled) {
        drop(answers);
        drop(leavings);
        self.release(requests);
    }

    fn release(&self, requests: Vec<Request>) {
        if self.releases.release(requests) {
            // The first worker has to look at core's thread from now on. The lock makes sure that it either waits
            // already or sees the request before it waits.
            drop(self.scheduler.lock());
            self.wake[0].notify_one();
        }
    }
}
