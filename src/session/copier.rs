//! Copies of rows where a model runs: at once on the host; on a device they are collected and enqueued.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::batch_tensor::row_alone;
use crate::memory::device::{Change, Device, Queue};
use crate::memory::{Bytes, BytesMut, MemoryError};
use crate::tensor::{RowLayout, StorageType};

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

    /// The bytes, on the host; those of a device after a wait.
    pub fn read(&self, bytes: Bytes) -> Result<Vec<u8>, MemoryError> {
        match (bytes, &self.0) {
            (Bytes::Device(span), Some(on)) => {
                let mut pinned = on.device.allocate_pinned(span.byte_len())?;
                let mut queue = on.queue.lock();
                // SAFETY: the span is borrowed memory of the device; both live until the wait below. Where that fails the
                // device has failed, and copies nothing more.
                unsafe { queue.download(span.address(), &mut pinned, span.byte_len()) }?;
                queue.synchronise()?;
                Ok(pinned.bytes()[..span.byte_len()].to_vec())
            }
            (bytes, _) => Ok(bytes.host().to_vec()),
        }
    }

    /// Writes bytes of the host; on a device they are there after [`Copier::synchronise`].
    pub fn write(&self, from: &[u8], to: BytesMut) -> Result<(), MemoryError> {
        match (to, self.queue()) {
            (BytesMut::Device(span), Some(mut queue)) => {
                let layout = RowLayout { outer: 1, inner_bytes: from.len() };
                let to = row_alone(&mut queue, layout, span, StorageType::Exact);
                // SAFETY: memory of a slot or a state, which the queue keeps.
                Ok(unsafe { queue.upload_row(layout, from, to, Change::None) }?)
            }
            (to, _) => {
                to.host().copy_from_slice(from);
                Ok(())
            }
        }
    }

    pub(super) fn queue(&self) -> Option<MutexGuard<'_, Queue>> {
        self.0.as_ref().map(|on| on.queue.lock())
    }
}
