//! The thread that hears what other servers ask this one for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Builder, JoinHandle};
use std::time::Duration;

use state_store::Keeper;

use crate::error::LoadError;
use crate::panic;

/// Pause until the store is tried again.
const PAUSE: Duration = Duration::from_millis(100);

/// The thread. Dropping this stops it.
pub struct Asks {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Asks {
    /// Starts a thread that calls `release` with each sequence that another server wants ([`super::key_of`]).
    pub fn start(keeper: &Arc<Keeper>, release: impl Fn(&[u8]) + Send + 'static) -> Result<Self, LoadError> {
        let (keeper, stop) = (keeper.clone(), Arc::new(AtomicBool::new(false)));
        let stops = stop.clone();
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
        let thread = Builder::new().name("stateful-asks".to_owned()).spawn(run).map_err(LoadError::Worker)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Asks {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().into_iter().for_each(|thread| panic::join(thread, "the thread that hears other servers"));
    }
}
