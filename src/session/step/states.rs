//! Rows of the states of fixed size, in the batch buffers.

use super::Step;
use crate::memory::device::Change;
use crate::memory::{BytesMut, MemoryError, rows};
use crate::session::spec::{RowAt, RowContent};
use crate::session::tensors::{host_bytes, narrowing, put, row_alone, take_on_host};
use crate::tensor::RowLayout;

impl Step {
    /// Puts a row of state number `state` into a place of a batch buffer.
    pub fn put_state(
        &mut self,
        state: usize,
        layout: RowLayout,
        to: RowAt,
        content: RowContent,
    ) -> Result<(), MemoryError> {
        self.make_batch_buffer(to.buffer)?;
        let tensors = &mut self.batch_buffers[to.buffer][state];
        tensors.set_rows(to.rows)?;
        put(&mut self.queue, tensors, layout, (to.position, to.rows), content)
    }

    /// Copies a row of state number `state` from one place to another.
    pub fn copy_state(&mut self, state: usize, layout: RowLayout, from: RowAt, to: RowAt) -> Result<(), MemoryError> {
        self.make_batch_buffer(from.buffer.max(to.buffer))?;
        if let Some(queue) = &mut self.queue {
            let at = |at: RowAt| self.batch_buffers[at.buffer][state].row(layout, at.position, at.rows);
            let (from, to) = (at(from), at(to));
            // SAFETY: rows of batch buffers, which are never replaced and outlive the queue.
            unsafe { queue.get_mut().move_row(layout, from, to, Change::None) };
        } else if from.buffer == to.buffer {
            let bytes = host_bytes(&mut self.batch_buffers[to.buffer][state]);
            rows::shift(layout, bytes, (from.position, from.rows), (to.position, to.rows));
        } else if let Ok([source, target]) = self.batch_buffers.get_disjoint_mut([from.buffer, to.buffer]) {
            let (source, target) = (host_bytes(&mut source[state]), host_bytes(&mut target[state]));
            rows::transfer(layout, source, (from.position, from.rows), target, (to.position, to.rows));
        }
        Ok(())
    }

    /// Takes a row of state number `state` out of a batch buffer; into fp16 if it is kept so.
    pub fn take_state(&mut self, state: usize, layout: RowLayout, from: RowAt, to: BytesMut, as_fp16: bool) {
        let tensors = &mut self.batch_buffers[from.buffer][state];
        match (to, &mut self.queue) {
            (BytesMut::Device(to), Some(queue)) => {
                let (queue, from) = (queue.get_mut(), tensors.row(layout, from.position, from.rows));
                let to = row_alone(queue, layout, to, as_fp16);
                // SAFETY: a row of a batch buffer, which is never replaced and outlives the queue, and memory of a slot
                // that the queue keeps.
                unsafe { queue.move_row(layout, from, to, narrowing(as_fp16)) };
            }
            (to, _) => take_on_host(layout, host_bytes(tensors), (from.position, from.rows), to.host(), as_fp16),
        }
    }

    /// Rounds a row of state number `state`, of fp32, to what fp16 can hold.
    pub fn round_state(&mut self, state: usize, layout: RowLayout, at: RowAt) {
        let tensors = &mut self.batch_buffers[at.buffer][state];
        match &mut self.queue {
            Some(queue) => {
                let row = tensors.row(layout, at.position, at.rows);
                // SAFETY: a row of a batch buffer, which is never replaced and outlives the queue.
                unsafe { queue.get_mut().move_row(layout, row, row, Change::Round) };
            }
            None => rows::round_to_fp16(layout, host_bytes(tensors), at.position, at.rows),
        }
    }

    pub(super) fn make_batch_buffer(&mut self, buffer: usize) -> Result<(), MemoryError> {
        while self.batch_buffers.len() <= buffer {
            let tensors = self.states.iter().map(|state| {
                let input = &self.inputs[state.input];
                input.tensors.for_rows(&state.dims, self.most_rows)
            });
            let tensors = tensors.collect::<Result<_, _>>()?;
            self.batch_buffers.push(tensors);
        }
        Ok(())
    }
}
