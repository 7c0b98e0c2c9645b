//! The thread that looks for sequences in a store, because a worker that did would make all others wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sequences::scheduler::Lookup;

use crate::error::LoadError;
use crate::panic;

/// Sequences that are looked for together.
const MOST_TOGETHER: usize = 64;
/// How long the owner of a sequence may take to release it.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long an older instance of the model may take to save its sequences. It also bounds the wait for one that never ends.
const OLDER_PATIENCE: Duration = Duration::from_secs(60);
/// Time until a sequence that is being released is looked for again.
const AGAIN_AFTER: Duration = Duration::from_millis(4);

/// A sequence to look for.
#[derive(Debug)]
pub struct Pending {
    pub lookup: Lookup,
    /// When its owner was asked first.
    asked: Option<Instant>,
    /// When it is to be looked for.
    at: Instant,
}

impl Pending {
    /// Whether its owner is still asked; else it is taken without.
    pub fn asks(&self) -> bool {
        self.asked.is_none_or(|since| since.elapsed() < PATIENCE)
    }

    /// Whether it still waits for an older instance of its model.
    pub fn waits_for_older_instance(&self) -> bool {
        self.asked.is_none_or(|since| since.elapsed() < OLDER_PATIENCE)
    }

    /// Looks for it again in a moment, because its owner was asked.
    pub fn again(self) -> Self {
        Self { asked: self.asked.or_else(|| Some(Instant::now())), ..self.later() }
    }

    /// Looks for it in a moment.
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
            // All in `again` wait equally long, so the first is due first. They may be many, and new ones must not wait for all of
            // them.
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

/// The thread. Dropping this stops it.
pub struct Lookups {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Lookups {
    /// Starts a thread that calls `find` for what is in the queue. It returns those to look for again.
    pub fn start(
        queue: &Arc<Queue>,
        find: impl Fn(Vec<Pending>) -> Vec<Pending> + Send + 'static,
    ) -> Result<Self, LoadError> {
        let (queue, taken) = (queue.clone(), queue.clone());
        let run = move || {
            while let Some(lookups) = taken.take() {
                let again = panic::catch_and_log(|| find(lookups)).unwrap_or_default();
                taken.state.lock().again.extend(again);
            }
        };
        let thread = Builder::new().name("stateful-lookups".to_owned()).spawn(run).map_err(LoadError::Worker)?;
        Ok(Self { queue, thread: Some(thread) })
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        self.queue.state.lock().stop = true;
        self.queue.changed.notify_one();
        self.thread.take().into_iter().for_each(|thread| panic::join(thread, "the thread that looks for sequences"));
    }
}
