//! Settles the payloads of an instance, sends their answers and releases their requests, on a thread of its own while
//! the next batch runs.
//!
//! Sending an answer and releasing its request call into Triton's front end. With gRPC that often takes longer than a
//! run. The states of a batch are kept before its answers are sent, so only its clients wait for them.
//!
//! Rules: payloads are settled in the order in which they ran, on either thread; dropping the responder settles all of
//! them.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::model::{Answered, LiveSequences};
use crate::panic;

/// A payload that takes less time than this is settled at once, because waking a thread takes time, too.
const HAND_OVER_NS: u64 = 50_000;

pub struct Responder {
    queue: Option<Sender<Vec<Answered>>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

struct Shared {
    sequences: Arc<LiveSequences>,
    instance: u32,
    /// Payloads that the thread has not settled yet.
    waiting: AtomicUsize,
    /// How long it takes to settle a request, as a moving average.
    request_ns: AtomicU64,
}

impl Responder {
    /// `overlaps`: the next payload may run before the last one is settled. Without it there is no thread.
    pub fn new(sequences: Arc<LiveSequences>, instance: u32, overlaps: bool) -> Self {
        let (waiting, request_ns) = (AtomicUsize::new(0), AtomicU64::new(0));
        let shared = Arc::new(Shared { sequences, instance, waiting, request_ns });
        let started = overlaps.then(|| start(shared.clone())).transpose();
        let started =
            started.inspect_err(|error| log::warn!("no thread for answers, the next run waits for them: {error}"));
        let (queue, thread) = started.ok().flatten().unzip();
        Self { queue, thread, shared }
    }

    /// Settles a payload: at once, or on the thread if that takes long and another sequence can run meanwhile.
    pub fn dispatch(&self, answered: Vec<Answered>) {
        let is_idle = self.shared.waiting.load(Ordering::Acquire) == 0;
        let ns = self.shared.request_ns.load(Ordering::Relaxed) * answered.len() as u64;
        let pays = || ns > HAND_OVER_NS && self.shared.sequences.live() > 1;
        let Some(queue) = self.queue.as_ref().filter(|_| !is_idle || pays()) else {
            return self.shared.settle(answered);
        };
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(unsent) = queue.send(answered) {
            self.shared.waiting.fetch_sub(1, Ordering::Release);
            self.shared.settle(unsent.0);
        }
    }
}

fn start(shared: Arc<Shared>) -> io::Result<(Sender<Vec<Answered>>, JoinHandle<()>)> {
    let (queue, payloads) = channel();
    let settle = move || {
        for payload in payloads {
            if let Err(error) = panic::catch(|| shared.settle(payload)) {
                log::error!("{error}");
            }
            shared.waiting.fetch_sub(1, Ordering::Release);
        }
    };
    Ok((queue, thread::Builder::new().name("answers".to_owned()).spawn(settle)?))
}

impl Shared {
    fn settle(&self, answered: Vec<Answered>) {
        let (began, requests) = (Instant::now(), answered.len().max(1) as u64);
        self.sequences.settle(self.instance, answered);
        let ns = began.elapsed().as_nanos() as u64 / requests;
        let average = self.request_ns.load(Ordering::Relaxed);
        self.request_ns.store((7 * average + ns) / 8, Ordering::Relaxed);
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            log::error!("the thread of answers has panicked");
        }
    }
}
