//! Ends runs that take too long.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::open::RunOptions;

/// Ends the runs of a step from a certain time on. Dropped, it ends none.
pub struct TimeLimit {
    end: Instant,
    /// Dropped, it stops the thread.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TimeLimit {
    pub(super) fn new(options: Arc<RunOptions>, limit: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let wait = move || {
            if stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                options.terminate();
            }
        };
        let end = Instant::now() + limit;
        let thread = thread::Builder::new().name("time limit".to_owned()).spawn(wait)?;
        Ok(Self { end, stop: Some(stop), thread: Some(thread) })
    }

    /// Whether runs fail because of it.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }
}

impl Drop for TimeLimit {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It doesn't panic.
            let _ = thread.join();
        }
    }
}
