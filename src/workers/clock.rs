//! Threads that end with their owner. One of them is an instance's clock: it does work that is due at a time, whether
//! core calls Execute or not.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::LoadError;
use crate::panic;

/// Pause after a panic, so that a panic that repeats does not fill the log.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A thread. Dropping this stops it.
pub(super) struct Thread {
    stop: Box<dyn Fn() + Send>,
    thread: Option<JoinHandle<()>>,
    /// Names the thread in the log, such as "the thread that watches the clock".
    what: &'static str,
}

impl Thread {
    /// `run` must return soon after `stop` was called.
    pub fn start(
        name: &str,
        what: &'static str,
        stop: impl Fn() + Send + 'static,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let thread = Some(Builder::new().name(name.to_owned()).spawn(run)?);
        Ok(Self { stop: Box::new(stop), thread, what })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        (self.stop)();
        self.thread.take().into_iter().for_each(|thread| panic::join(thread, self.what));
    }
}

/// Starts a thread that calls `work` each time the alarm goes off.
pub(super) fn start_clock(alarm: &Arc<Alarm>, work: impl Fn() + Send + 'static) -> Result<Thread, LoadError> {
    let (stops, rings) = (alarm.clone(), alarm.clone());
    let run = move || {
        while rings.wait() {
            if let Err(error) = panic::catch(&work) {
                log::error!("the thread that watches the clock failed: {error}");
                rings.by(Instant::now() + AFTER_PANIC);
            }
        }
    };
    let clock = Thread::start("stateful-clock", "the thread that watches the clock", move || stops.stop(), run);
    clock.map_err(LoadError::Clock)
}

/// When the thread has to work. Others ask for a time, and the thread waits for the earliest.
#[derive(Default)]
pub(super) struct Alarm {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// When [`Alarm::wait`] returns; `None` until somebody asks.
    at: Option<Instant>,
    is_stopped: bool,
}

impl Alarm {
    /// Lets [`Alarm::wait`] return at this time, if it doesn't return earlier.
    pub fn by(&self, at: Instant) {
        let mut state = self.state.lock();
        if state.at.is_none_or(|before| at < before) {
            state.at = Some(at);
            // Otherwise the thread would wake only to wait for the lock.
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Waits until the earliest time that was asked for since the last wait. Returns false after [`Alarm::stop`].
    pub fn wait(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            match state.at {
                _ if state.is_stopped => return false,
                Some(at) if at <= Instant::now() => {
                    state.at = None;
                    return true;
                }
                Some(at) => _ = self.changed.wait_until(&mut state, at),
                None => self.changed.wait(&mut state),
            }
        }
    }

    pub fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_earliest_time_counts_and_it_counts_once() {
        let (alarm, now) = (Alarm::default(), Instant::now());
        alarm.by(now + LONG);
        alarm.by(now);
        alarm.by(now + LONG);
        assert!(alarm.wait());
        alarm.stop();
        assert!(!alarm.wait());
    }

    #[test]
    fn a_thread_that_waits_hears_of_an_earlier_time_and_of_the_end() {
        let alarm = Arc::new(Alarm::default());
        alarm.by(Instant::now() + LONG);
        let waits = alarm.clone();
        let thread = thread::spawn(move || (waits.wait(), waits.wait()));
        alarm.by(Instant::now());
        while alarm.state.lock().at.is_some() {
            thread::yield_now();
        }
        alarm.stop();
        assert_eq!(thread.join().unwrap(), (true, false));
    }
}
