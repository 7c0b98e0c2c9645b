//! Ends runs that take too long.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::open::RunOptions;

/// Ends the runs of a step once the time has passed, unless it is dropped first.
pub struct TimeLimit {
    ends_at: Instant,
    stop: mpsc::Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl TimeLimit {
    pub(super) fn new(options: Arc<RunOptions>, limit: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let wait = move || {
            if stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                options.terminate();
            }
        };
        let ends_at = Instant::now() + limit;
        let thread = thread::Builder::new().name("time limit".to_owned()).spawn(wait)?;
        Ok(Self { ends_at, stop, thread: Some(thread) })
    }

    /// Whether runs fail because of it.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.ends_at
    }
}

impl Drop for TimeLimit {
    fn drop(&mut self) {
        // It has ended if the time has passed. It doesn't panic.
        let _ = self.stop.send(());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
