//! Copies of rows where a model runs: at once on the host; on a device they are collected and enqueued.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::memory::MemoryError;
use crate::memory::device::{Device, Queue};

/// What copies rows for an instance, its step and its states.
#[derive(Clone, Default)]
pub struct Copier(Option<OnDevice>);

#[derive(Clone)]
struct OnDevice {
    device: Arc<Device>,
    queue: Arc<Mutex<Queue>>,
}

impl Copier {
    /// One for an instance on the host.
    pub const fn on_host() -> Self {
        Self(None)
    }

    /// One that enqueues on a device.
    pub fn on_device(queue: Queue) -> Self {
        Self(Some(OnDevice { device: queue.device().clone(), queue: Arc::new(Mutex::new(queue)) }))
    }

    /// The device, if there is one.
    pub fn device(&self) -> Option<&Arc<Device>> {
        self.0.as_ref().map(|on| &on.device)
    }

    /// What is copied on a device from now on is copied after what has been so far: rows may be read that were written,
    /// and written that were read.
    pub fn end_phase(&self) {
        if let Some(mut queue) = self.queue() {
            queue.end_phase();
        }
    }

    /// Waits until everything that was copied on a device is there.
    pub fn synchronise(&self) -> Result<(), MemoryError> {
        match self.queue() {
            Some(mut queue) => Ok(queue.synchronise()?),
            None => Ok(()),
        }
    }

    pub(super) fn queue(&self) -> Option<MutexGuard<'_, Queue>> {
        self.0.as_ref().map(|on| on.queue.lock())
    }
}
