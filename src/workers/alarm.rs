//! When a thread has to look at the clock again. Others ask for a time, and the thread waits for the earliest.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

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
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

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
