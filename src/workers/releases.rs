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

/// Time between two looks at core's thread.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(5);

#[derive(Default)]
pub(super) struct Releases {
    kept: Mutex<Kept>,
    is_executing: AtomicBool,
    /// The kernel's id of core's thread; 0 before the first Execute.
    thread: AtomicI32,
}

#[derive(Default)]
struct Kept {
    request: Option<(Request, Instant)>,
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
    pub fn execute(&self) -> Executing<'_> {
        self.is_executing.store(true, Ordering::Release);
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
        Executing(self)
    }

    /// Releases requests, and the one that is kept, and keeps the last of them instead. Returns whether none was kept
    /// before: then [`Releases::look`] has to be called after [`LOOK_EVERY`].
    pub fn release(&self, mut requests: Vec<Request>) -> bool {
        let Some(last) = requests.pop() else { return false };
        // Kept before the one from before is released, so that core always has one that is not. That release calls
        // into core, so it needs no lock held.
        let before = {
            let mut kept = self.kept.lock();
            // Both looks have to come after this request.
            kept.slept = false;
            kept.request.replace((last, Instant::now()))
        };
        before.is_none()
    }

    /// Releases the request that is kept, if core's thread sleeps in this look and slept in the last one. Returns when
    /// to look again; `None` if nothing is kept.
    pub fn look(&self) -> Option<Instant> {
        let mut kept = self.kept.lock();
        let (_, since) = kept.request.as_ref()?;
        let (now, first_look) = (Instant::now(), *since + LOOK_EVERY);
        if now < first_look {
            return Some(first_look);
        }
        let sleeps = !self.is_executing.load(Ordering::Acquire) && self.is_asleep();
        let released = if sleeps && kept.slept { kept.request.take() } else { None };
        let next = if released.is_some() { None } else { Some(now + LOOK_EVERY) };
        kept.slept = sleeps;
        // The release calls into core, so it needs no lock held.
        drop(kept);
        drop(released);
        next
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
