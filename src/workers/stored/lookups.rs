//! The thread that looks for sequences in a store, because a worker that did would make all others wait; and the thread
//! that hears which sequences other servers ask this one for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sequences::scheduler::Lookup;
use state_store::Keeper;

use crate::error::LoadError;
use crate::panic;
use crate::workers::clock::Thread;

/// Sequences that are looked for together.
const MOST_TOGETHER: usize = 64;
/// How long the owner of a sequence may take to release it. After that, this server takes it without a release.
pub const PATIENCE: Duration = Duration::from_millis(250);
/// How long an older instance of the model may take to save its sequences. It also bounds the wait for one that never
/// ends.
pub const OLDER_PATIENCE: Duration = Duration::from_secs(60);
/// Time until a sequence that is being released is looked for again.
const AGAIN_AFTER: Duration = Duration::from_millis(4);
/// Pause until a store that does not tell what other servers ask for is tried again.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Pending {
    pub lookup: Lookup,
    /// When its owner was asked first.
    asked: Option<Instant>,
    at: Instant,
}

impl Pending {
    /// Whether its owner has not been asked yet, or was first asked less than this time ago.
    pub fn is_within(&self, patience: Duration) -> bool {
        self.asked.is_none_or(|since| since.elapsed() < patience)
    }

    /// Looks for it again in a moment, because its owner was asked.
    pub fn again(self) -> Self {
        Self { asked: self.asked.or_else(|| Some(Instant::now())), ..self.later() }
    }

    pub fn later(self) -> Self {
        Self { at: Instant::now() + AGAIN_AFTER, ..self }
    }
}

/// The sequences to look for. Each has a place, so there are never more than `max_sequence_number`.
#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    new: VecDeque<Pending>,
    /// Those whose owners were asked, the first to be looked for first.
    again: VecDeque<Pending>,
    stop: bool,
}

impl Queue {
    pub fn add(&self, lookups: Vec<Lookup>) {
        if lookups.is_empty() {
            return;
        }
        let at = Instant::now();
        self.state.lock().new.extend(lookups.into_iter().map(|lookup| Pending { lookup, asked: None, at }));
        self.changed.notify_one();
    }

    /// Waits for something to look for; `None` at the end.
    fn take(&self) -> Option<Vec<Pending>> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            let mut taken = Vec::new();
            let now = Instant::now();
            // All in `again` wait equally long, so the first is due first. They may be many, and new ones must not wait
            // for all of them.
            let most_again = if state.new.is_empty() { MOST_TOGETHER } else { MOST_TOGETHER / 2 };
            while taken.len() < most_again && state.again.front().is_some_and(|of| of.at <= now) {
                taken.extend(state.again.pop_front());
            }
            let most = state.new.len().min(MOST_TOGETHER - taken.len());
            taken.extend(state.new.drain(..most));
            if !taken.is_empty() {
                return Some(taken);
            }
            match state.again.front().map(|of| of.at) {
                Some(at) => _ = self.changed.wait_until(&mut state, at),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// Starts a thread that calls `find` for what is in the queue. It returns those to look for again.
pub fn start_lookups(
    queue: &Arc<Queue>,
    find: impl Fn(Vec<Pending>) -> Vec<Pending> + Send + 'static,
) -> Result<Thread, LoadError> {
    let (stops, taken) = (queue.clone(), queue.clone());
    let run = move || {
        while let Some(lookups) = taken.take() {
            let again = panic::catch_and_log(|| find(lookups)).unwrap_or_default();
            taken.state.lock().again.extend(again);
        }
    };
    let stop = move || {
        stops.state.lock().stop = true;
        stops.changed.notify_one();
    };
    Thread::start("stateful-lookups", "the thread that looks for sequences", stop, run).map_err(LoadError::Worker)
}

/// Starts a thread that calls `release` with each sequence that another server wants ([`super::key_of`]).
pub fn hear_asks(keeper: &Arc<Keeper>, release: impl Fn(&[u8]) + Send + 'static) -> Result<Thread, LoadError> {
    let (keeper, stops) = (keeper.clone(), Arc::new(AtomicBool::new(false)));
    let stop = stops.clone();
    let run = move || {
        let hear = &mut |asked: Option<&[u8]>| {
            asked.into_iter().for_each(|key| _ = panic::catch_and_log(|| release(key)));
            !stops.load(Ordering::Acquire)
        };
        let mut told = String::new();
        while let Err(error) = keeper.listen(hear) {
            let why = error.to_string();
            // The store is tried ten times a second, so each reason is logged only once.
            if why != told {
                log::warn!("this server does not learn which sequences other servers ask for, because {why}");
                told = why;
            }
            if !hear(None) {
                break;
            }
            thread::sleep(PAUSE);
        }
    };
    let stop = move || stop.store(true, Ordering::Release);
    Thread::start("stateful-asks", "the thread that hears other servers", stop, run).map_err(LoadError::Worker)
}
