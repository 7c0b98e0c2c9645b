//! Ends runs that take too long: on random data, a loop in a graph may never end.
//!
//! One thread watches all runs of a comparison, because there may be thousands of short ones.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ort::session::RunOptions;

const PERIOD: Duration = Duration::from_millis(50);

/// The options of runs, and how long each run may take. A run that takes longer is ended with an error, and so is every later
/// run with these options.
pub struct RunLimit {
    limit: Duration,
    options: Arc<RunOptions>,
    began: Arc<Mutex<Option<Instant>>>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl RunLimit {
    pub fn new(limit: Duration) -> Result<Self, String> {
        let options = Arc::new(RunOptions::new().map_err(|error| error.to_string())?);
        let began = Arc::new(Mutex::new(None));
        let (stop, stopped) = mpsc::channel();
        let (of_thread, seen) = (options.clone(), began.clone());
        let look = move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                if is_over(&seen, limit) {
                    // It only sets a flag.
                    let _ = of_thread.terminate();
                }
            }
        };
        let thread =
            thread::Builder::new().name("run limit".to_owned()).spawn(look).map_err(|error| error.to_string())?;
        Ok(Self { limit, options, began, stop, thread: Some(thread) })
    }

    pub fn begin(&self) -> &RunOptions {
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        &self.options
    }

    pub fn end(&self) -> bool {
        let is_late = is_over(&self.began, self.limit);
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = None;
        is_late
    }

    pub const fn limit(&self) -> Duration {
        self.limit
    }
}

fn is_over(began: &Mutex<Option<Instant>>, limit: Duration) -> bool {
    began.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|began| began.elapsed() >= limit)
}

impl Drop for RunLimit {
    fn drop(&mut self) {
        // The thread ends at once, and doesn't panic.
        let _ = self.stop.send(());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
