//! Growing states: the tensors that a run made of them, which the next run can read as they are.

use std::sync::Arc;

use super::{Made, Step};
use crate::memory::BytesMut;
use crate::session::open::{Session, SessionError};
use crate::session::output::Output;
use crate::session::tensors::take_on_host;
use crate::session::value::Value;
use crate::tensor::RowLayout;

/// The growing states of a batch, in the tensors that a run made. The sequences of the batch hold it together; it is
/// freed with the last of them.
pub struct Grown {
    tensors: Vec<GrownTensor>,
    rows: usize,
    /// Last: the tensors go back to its allocator.
    _session: Arc<Session>,
}

struct GrownTensor {
    value: Arc<Value>,
    dims: Vec<i64>,
    bytes: usize,
}

impl Grown {
    /// Rows of each tensor.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Dimensions of the tensor of growing state number `state`.
    pub fn dims(&self, state: usize) -> Option<&[i64]> {
        self.tensors.get(state).map(|tensor| tensor.dims.as_slice())
    }

    pub(super) fn value(&self, state: usize) -> Option<&Value> {
        self.tensors.get(state).map(|tensor| tensor.value.as_ref())
    }
}

impl Step {
    /// Whether ONNX Runtime made the tensors of all growing states in the last run.
    pub fn made_growing(&self) -> bool {
        self.growing.iter().all(|&output| self.outputs[output].made.is_some())
    }

    /// Takes the tensors that the last run, over `rows` rows, made of the growing states.
    pub fn take_grown(&mut self, rows: usize) -> Grown {
        let Self { growing, outputs, session, .. } = self;
        let tensors = growing.iter().filter_map(|&output| {
            let Output { made, tensors, .. } = &mut outputs[output];
            Some(GrownTensor { value: made.take()?, dims: tensors.dims.clone(), bytes: tensors.bytes })
        });
        Grown { tensors: tensors.collect(), rows, _session: session.clone() }
    }

    /// Copies the row at `position` out of growing state number `state`; from a device to the host too, after a wait.
    /// What is copied on a device is there after [`Step::synchronise`]; the queue keeps the tensor until then.
    pub fn copy_grown(
        &self,
        grown: &Grown,
        state: usize,
        layout: RowLayout,
        position: usize,
        to: BytesMut,
    ) -> Result<(), SessionError> {
        let Some(GrownTensor { value, bytes, .. }) = grown.tensors.get(state) else { return Ok(()) };
        let at = (position, grown.rows);
        match (to, &self.queue) {
            (BytesMut::Host(to), Some(queue)) if !to.is_empty() => {
                let mut queue = queue.borrow_mut();
                let mut batch = queue.device().allocate_pinned(*bytes)?;
                // SAFETY: the tensor has that many bytes; both live until the wait below. Where that fails the device
                // has failed, and copies nothing more.
                unsafe { queue.download(value.address().map_err(SessionError::Run)?, &mut batch, *bytes) }?;
                queue.synchronise()?;
                take_on_host(layout, batch.bytes(), at, to, false);
                Ok(())
            }
            (to, queue) => {
                let made = Made { value, bytes: *bytes, is_on_device: queue.is_some() };
                self.take_made(made, layout, at, to, false)
            }
        }
    }
}
