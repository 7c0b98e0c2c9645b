//! The thread that drops idle sequences. The backend needs it, because core does not report that a client has gone
//! away.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::live::LiveSequences;
use crate::panic;

/// Pause after a panic, so that a panic that repeats does not fill the log.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// The thread. It runs until this is dropped.
pub struct Reaper {
    sequences: Arc<LiveSequences>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    /// Starts the thread. On an instance that gets no requests, only this thread drops idle sequences and releases held
    /// requests.
    pub fn start(sequences: Arc<LiveSequences>) -> io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (stop, live) = (stopping.clone(), sequences.clone());
        let run = move || {
            let is_stopping = || stop.load(Ordering::Acquire);
            while !is_stopping() {
                if let Err(error) = panic::catch(|| live.tick_and_wait(is_stopping)) {
                    log::error!("the thread that drops idle sequences failed: {error}");
                    std::thread::sleep(AFTER_PANIC);
                }
            }
        };
        let thread = Some(Builder::new().name("stateful-reaper".to_owned()).spawn(run)?);
        Ok(Self { sequences, stopping, thread })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.sequences.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that drops idle sequences has panicked");
        }
    }
}
