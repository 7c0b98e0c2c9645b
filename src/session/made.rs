//! A tensor that ONNX Runtime made in a run.

use std::sync::Arc;

use rows::tensor::{GappedRow, RowAt, RowLayout, StorageType};

use super::batch_tensor::{change_to, keep_span, pieces_to_take, row_alone, row_of, take_gapped_on_host, take_on_host};
use super::copier::Copier;
use super::open::{Session, SessionError};
use super::value::Value;
use crate::memory::device::{Pinned, Queue};
use crate::memory::{BytesMut, MemoryError};

/// A tensor that ONNX Runtime made of an output of open shape. A later run can read it as it is.
pub struct MadeTensor {
    pub(super) value: Arc<Value>,
    pub(super) dims: Vec<i64>,
    /// Of its elements; none for strings.
    pub(super) bytes: usize,
    pub(super) is_on_device: bool,
    /// Last: the tensor goes back to its allocator.
    pub(super) _session: Arc<Session>,
}

impl MadeTensor {
    /// Dimensions, the number of rows among them.
    pub fn dims(&self) -> &[i64] {
        &self.dims
    }

    /// Copies a row out, to be stored; from a device to the host too, after a wait. What is copied on a
    /// device is there after [`Copier::synchronise`]; the queue keeps the tensor until then.
    pub fn take_row(
        &self,
        copier: &Copier,
        layout: RowLayout,
        at: RowAt,
        to: BytesMut,
        storage: StorageType,
    ) -> Result<(), SessionError> {
        match (to, copier.queue()) {
            (BytesMut::Device(span), Some(mut queue)) => {
                let from = row_of(layout, self.address()?, self.bytes, at);
                let to = row_alone(&mut queue, layout, span, storage);
                queue.keep(self.value.clone());
                // SAFETY: a row of a tensor and memory of a state, both of which the queue keeps.
                unsafe { queue.move_row(layout, from, to, change_to(storage)) };
            }
            (to, Some(mut queue)) if self.is_on_device && self.bytes > 0 => {
                let batch = self.download(&mut queue)?;
                take_on_host(layout, &batch.bytes()[..self.bytes], at, to.host(), storage);
            }
            (to, _) => take_on_host(layout, self.host()?, at, to.host(), storage),
        }
        Ok(())
    }

    /// As [`MadeTensor::take_row`], without the gap of the row.
    pub fn take_gapped_row(
        &self,
        copier: &Copier,
        at: &GappedRow,
        to: BytesMut,
        storage: StorageType,
    ) -> Result<(), SessionError> {
        match (to, copier.queue()) {
            (BytesMut::Device(span), Some(mut queue)) => {
                assert_eq!(span.byte_len(), storage.bytes(at.row_bytes()), "row of another size");
                let pieces = pieces_to_take(at, self.address()?, self.bytes, span.address(), storage);
                keep_span(&mut queue, span);
                queue.keep(self.value.clone());
                // SAFETY: the pieces lie within this tensor and within the span, and the queue keeps the memory of both.
                unsafe { queue.move_pieces(&pieces, change_to(storage)) };
            }
            (to, Some(mut queue)) if self.is_on_device && self.bytes > 0 => {
                let batch = self.download(&mut queue)?;
                take_gapped_on_host(at, &batch.bytes()[..self.bytes], to.host(), storage);
            }
            (to, _) => take_gapped_on_host(at, self.host()?, to.host(), storage),
        }
        Ok(())
    }

    /// The elements of a tensor on a device, after a wait.
    fn download(&self, queue: &mut Queue) -> Result<Pinned, SessionError> {
        let mut batch = queue.device().allocate_pinned(self.bytes).map_err(MemoryError::from)?;
        // SAFETY: the tensor has that many bytes; both live until the wait below. Where that fails the device has
        // failed, and copies nothing more.
        unsafe { queue.download(self.address()?, &mut batch, self.bytes) }?;
        queue.synchronise()?;
        Ok(batch)
    }

    /// The elements, which are on the host.
    pub(super) fn host(&self) -> Result<&[u8], SessionError> {
        assert!(!self.is_on_device || self.bytes == 0, "a tensor on a device is read on the host");
        // SAFETY: the size is that of the dimensions, and the tensor is on the host.
        unsafe { self.value.bytes(self.bytes) }.map_err(SessionError::Run)
    }

    pub(super) fn address(&self) -> Result<u64, SessionError> {
        self.value.address().map_err(SessionError::Run)
    }
}
