//! Releases requests so that core does not unload the model while its thread returns from Execute.
//!
//! Core (24.10) takes an instance out of a list while its thread is in Execute. It may unload the model as soon as all
//! requests are released. If the thread has not put the instance back by then, the server dies: `StopBackendThread`
//! takes the last element of an empty list (`backend_model_instance.cc`). Core doesn't unload a model that has a
//! request which has not been released. So the last request is kept here until core's thread sleeps outside Execute.
//! Two looks in a row must find it asleep, because it also sleeps when it waits for a lock, but not for so long.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::triton::Request;

/// Longest time between two looks at core's thread.
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[derive(Default)]
pub(super) struct Releases {
    kept: Mutex<Kept>,
    /// Core's thread is in Execute.
    is_executing: AtomicBool,
    /// The kernel's id of core's thread; 0 before the first Execute.
    thread: AtomicI32,
}

#[derive(Default)]
struct Kept {
    request: Option<Request>,
    /// The last look found core's thread asleep.
    slept: bool,
}

/// Core's thread is in Execute while this lives.
pub(super) struct Executing<'a>(&'a Releases);

impl Drop for Executing<'_> {
    fn drop(&mut self) {
        self.0.is_executing.store(false, Ordering::Release);
    }
}

impl Releases {
    /// Core's thread enters Execute.
    pub fn execute(&self) -> Executing<'_> {
        self.is_executing.store(true, Ordering::Release);
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
        Executing(self)
    }

    /// Releases requests, and the one that is kept, and keeps the last of them instead. Returns whether none was kept
    /// before: then the first worker has to call [`Releases::look`] from now on.
    pub fn release(&self, mut requests: Vec<Request>) -> bool {
        let Some(last) = requests.pop() else { return false };
        let before = {
            let mut kept = self.kept.lock();
            kept.slept = false;
            kept.request.replace(last)
        };
        before.is_none()
    }

    /// When [`Releases::look`] has to be called; `None` while nothing is kept.
    pub fn next_look(&self) -> Option<Instant> {
        self.kept.lock().request.as_ref().map(|_| Instant::now() + LOOK_EVERY)
    }

    /// Releases the request that is kept, if core's thread sleeps in this look and slept in the last one.
    pub fn look(&self) {
        let mut kept = self.kept.lock();
        if kept.request.is_none() {
            return;
        }
        let sleeps = !self.is_executing.load(Ordering::Acquire) && self.is_asleep();
        let released = if sleeps && kept.slept { kept.request.take() } else { None };
        kept.slept = sleeps;
        drop(kept);
        drop(released);
    }

    /// Releases the request that is kept. Only for an instance that core is removing.
    pub fn release_all(&self) {
        let kept = self.kept.lock().request.take();
        drop(kept);
    }

    /// Whether core's thread sleeps or is gone, by its state in /proc.
    fn is_asleep(&self) -> bool {
        let path = format!("/proc/self/task/{}/stat", self.thread.load(Ordering::Acquire));
        let Ok(stat) = fs::read_to_string(path) else { return true };
        // The name of the thread stands in parentheses, and its state behind them.
        stat.rsplit_once(") ").is_none_or(|(_, state)| !state.starts_with('R'))
    }
}
