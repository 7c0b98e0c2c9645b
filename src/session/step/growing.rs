//! Growing states: the tensors that a run made of them, and buffers of ours that they change places with.

use std::sync::Arc;

use super::{Made, Step};
use crate::memory::{BytesMut, MemoryError, Store, Varying};
use crate::session::open::SessionError;
use crate::session::output::Output;
use crate::session::tensors::take_on_host;
use crate::session::value::Value;
use crate::tensor::RowLayout;

/// A tensor that ONNX Runtime made.
pub(super) struct Kept {
    pub(super) value: Arc<Value>,
    dims: Vec<i64>,
    bytes: usize,
}

impl Step {
    /// Whether ONNX Runtime made the tensors of all growing states in the last run.
    pub fn made_growing(&self) -> bool {
        self.growing.iter().all(|&output| self.outputs[output].made.is_some())
    }

    /// Keeps the tensors of the growing states that the last run made, in the place of earlier ones.
    pub fn keep_growing(&mut self) {
        let Self { growing, outputs, kept, .. } = self;
        kept.clear();
        kept.extend(growing.iter().filter_map(|&output| {
            let Output { made, tensors, .. } = &mut outputs[output];
            Some(Kept { value: made.take()?, dims: tensors.dims.clone(), bytes: tensors.bytes })
        }));
    }

    /// Dimensions of the batch of growing state number `state` as it was kept.
    pub fn kept_dims(&self, state: usize) -> Option<&[i64]> {
        self.kept.get(state).map(|kept| kept.dims.as_slice())
    }

    /// Takes a row out of growing state number `state` as it was kept; from a device to the host too, after a wait.
    pub fn take_kept(
        &self,
        state: usize,
        layout: RowLayout,
        at: (usize, usize),
        to: BytesMut,
    ) -> Result<(), SessionError> {
        let Some(Kept { value, bytes, .. }) = self.kept.get(state) else { return Ok(()) };
        match (to, &self.queue) {
            (BytesMut::Host(to), Some(queue)) if !to.is_empty() => {
                let mut queue = queue.borrow_mut();
                let mut batch = queue.device().allocate_pinned(*bytes)?;
                // SAFETY: the tensor has that many bytes; both live until the wait below. Where that fails the device has
                // failed, and copies nothing more.
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

    /// Gives the tensors back that were kept, when what has been taken out of them is in its place.
    pub fn drop_growing(&mut self) -> Result<(), MemoryError> {
        if !self.kept.is_empty() {
            self.synchronise()?;
        }
        self.kept.clear();
        Ok(())
    }

    /// Lets the next run write an output of unknown shape, which is expected to be this, into a buffer of ours. If it
    /// turns out otherwise, the run is made again without.
    pub fn expect_output(&mut self, index: usize, dims: Vec<i64>) {
        self.outputs[index].expected = Some(dims);
    }

    /// Lets a state take the buffer that the last run wrote an output to, and have the state's for it, if ONNX Runtime
    /// did not make the output itself.
    pub fn exchange_output(&mut self, index: usize, state: &mut Varying) {
        let Output { tensors, expected, .. } = &mut self.outputs[index];
        let is_ours = expected.take().is_some();
        if let Store::Host(buffer) = &mut tensors.store
            && is_ours
        {
            // Over the buffer that goes.
            tensors.by_rows.clear();
            state.exchange(&tensors.dims, tensors.bytes, buffer);
        }
    }

    /// Whether the last run wrote an output that was expected into a buffer of ours.
    pub fn has_expected(&self, index: usize) -> bool {
        self.outputs[index].expected.is_some()
    }
}
