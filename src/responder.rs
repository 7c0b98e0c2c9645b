//! Sends answers and releases requests, on a thread of its own while the next batch runs.
//!
//! Sending an answer and releasing its request call into Triton's front end. With gRPC that often takes longer than a
//! run. The states of a batch are kept before its answers are sent, so only its clients wait for them.
//!
//! Handing over saves at most the shorter of two times: that of the next run, and that of sending the answers. But that
//! run lacks the sequences without an answer, so its batch is smaller. So the thread is used only if both times are
//! longer than waking it.
//!
//! Rules: jobs are done in the order in which they were given, on either thread; dropping the responder does all of
//! them.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::panic;

/// About the time in which a thread wakes. A job is done at once if it takes less time, or if the next run does, unless
/// the thread still has jobs.
const HAND_OVER_NS: u64 = 50_000;

/// Does jobs, which are the answers and requests of one batch each.
pub struct Responder<J> {
    queue: Option<Queue<J>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared<J>>,
}

/// Takes jobs, each with the number of its requests.
type Queue<J> = Sender<(J, usize)>;

struct Shared<J> {
    work: Box<dyn Fn(J) + Send + Sync>,
    /// Jobs that the thread has not done yet.
    waiting: AtomicUsize,
    /// How long a request of a job takes, as a moving average.
    request_ns: AtomicU64,
}

impl<J: Send + 'static> Responder<J> {
    /// `work` does a job. `overlaps`: the next batch may run while a job is done. Without it there is no thread.
    pub fn new(work: impl Fn(J) + Send + Sync + 'static, overlaps: bool) -> Self {
        let (waiting, request_ns) = (AtomicUsize::new(0), AtomicU64::new(0));
        let shared = Arc::new(Shared { work: Box::new(work), waiting, request_ns });
        let started = overlaps.then(|| start(shared.clone())).transpose();
        let started = started.inspect_err(|error| {
            log::warn!("no thread for answers, so each run waits until the last answers are sent: {error}");
        });
        let (queue, thread) = started.ok().flatten().unzip();
        Self { queue, thread, shared }
    }

    /// Does a job of so many requests: at once, or on the thread. `next_run_ns`: how long a batch of other sequences
    /// runs meanwhile, or 0 if there are none.
    pub fn dispatch(&self, job: J, requests: usize, next_run_ns: impl Fn() -> u64) {
        // Acquire, with the Release after a job: if none waits, the last one is done, so this one cannot overtake it.
        let is_idle = self.shared.waiting.load(Ordering::Acquire) == 0;
        let ns = self.shared.request_ns.load(Ordering::Relaxed) * requests as u64;
        let pays = || ns > HAND_OVER_NS && next_run_ns() > HAND_OVER_NS;
        let Some(queue) = self.queue.as_ref().filter(|_| !is_idle || pays()) else {
            return self.shared.work(job, requests);
        };
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(unsent) = queue.send((job, requests)) {
            self.shared.waiting.fetch_sub(1, Ordering::Release);
            self.shared.work(unsent.0.0, requests);
        }
    }
}

impl<J> Responder<J> {
    /// Does the jobs that the thread still has, and ends the thread. Later jobs are done at once.
    pub fn finish(&mut self) {
        self.queue = None;
        self.thread.take().into_iter().for_each(|thread| panic::join(thread, "the thread of answers"));
    }
}

/// A moving average with one more time.
pub fn average(average_ns: u64, ns: u64) -> u64 {
    (7 * average_ns + ns) / 8
}

fn start<J: Send + 'static>(shared: Arc<Shared<J>>) -> io::Result<(Queue<J>, JoinHandle<()>)> {
    let (queue, jobs) = channel();
    let work = move || {
        for (job, requests) in jobs {
            shared.work(job, requests);
            shared.waiting.fetch_sub(1, Ordering::Release);
        }
    };
    Ok((queue, thread::Builder::new().name("answers".to_owned()).spawn(work)?))
}

impl<J> Shared<J> {
    fn work(&self, job: J, requests: usize) {
        let began = Instant::now();
        panic::catch_and_log(|| (self.work)(job));
        let ns = began.elapsed().as_nanos() as u64 / requests.max(1) as u64;
        self.request_ns.store(average(self.request_ns.load(Ordering::Relaxed), ns), Ordering::Relaxed);
    }
}

impl<J> Drop for Responder<J> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Receiver;
    use std::thread::ThreadId;

    const LONG: u64 = 2 * HAND_OVER_NS;

    /// Whether another thread does the job, given how long a request and the next run take.
    fn is_handed_over(request_ns: u64, next_run_ns: u64) -> bool {
        let (did, done_by) = channel();
        let responder = Responder::new(move |did: Sender<ThreadId>| _ = did.send(thread::current().id()), true);
        responder.shared.request_ns.store(request_ns, Ordering::Relaxed);
        responder.dispatch(did, 1, || next_run_ns);
        done_by.recv().expect("the job is done") != thread::current().id()
    }

    #[test]
    fn a_job_is_handed_over_if_it_and_the_next_run_take_longer_than_waking_a_thread() {
        assert!(is_handed_over(LONG, LONG));
        assert!(!is_handed_over(1, LONG), "sending the answers is short");
        assert!(!is_handed_over(LONG, 1), "the run is short");
        assert!(!is_handed_over(LONG, 0), "nothing else runs");
    }

    #[test]
    fn the_jobs_of_the_thread_are_done_when_it_has_finished() {
        let done = Arc::new(AtomicUsize::new(0));
        let counts = done.clone();
        let mut responder = Responder::new(move |()| _ = counts.fetch_add(1, Ordering::Relaxed), true);
        responder.shared.request_ns.store(LONG, Ordering::Relaxed);
        (0..100).for_each(|_| responder.dispatch((), 1, || LONG));
        responder.finish();
        assert_eq!(done.load(Ordering::Relaxed), 100);
        responder.dispatch((), 1, || LONG);
        assert_eq!(done.load(Ordering::Relaxed), 101);
    }

    #[test]
    fn a_short_job_waits_behind_the_jobs_of_the_thread() {
        let (done, done_by) = channel();
        let responder = Responder::new(
            move |(may_end, name): (Receiver<()>, &'static str)| {
                _ = may_end.recv();
                _ = done.send(name);
            },
            true,
        );
        let (end_long, long) = channel();
        let (end_short, short) = channel();
        responder.shared.request_ns.store(LONG, Ordering::Relaxed);
        responder.dispatch((long, "long"), 1, || LONG);
        end_short.send(()).expect("the job waits for it");
        responder.dispatch((short, "short"), 1, || 0);
        end_long.send(()).expect("the thread has the job");
        assert_eq!([done_by.recv(), done_by.recv()], [Ok("long"), Ok("short")]);
    }
}
