//! An output of a step: a tensor of ours that a run writes, or one that ONNX Runtime makes.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use gpu_rows::{DeviceMemory, Pinned, Queue};
use rows::copies;
use rows::strings::Strings;
use rows::tensor::{DataType, Part, StorageType, element_count};

use super::batch_tensor::{BatchTensor, check};
use super::copier::{Copier, keep_alone};
use super::open::Session;
use super::value::{SessionError, Value};
use crate::memory::{BytesMut, MemoryError, TensorMemory};

pub(super) struct Output {
    pub name: CString,
    pub tensor: BatchTensor,
    /// As in [`crate::binding::OutputSpec`].
    pub dims: Option<Vec<i64>>,
    /// As in [`crate::binding::OutputSpec`].
    pub is_read: bool,
    /// Whether it is an input of the graph, too. ONNX Runtime then returns the tensor that was fed, and writes nothing.
    pub is_input: bool,
    /// Whether ONNX Runtime leaves it where the model runs.
    pub stays: bool,
    /// The run is to make a tensor of it.
    pub is_to_be_made: bool,
    /// What ONNX Runtime made in the last run, where it decides the shape.
    pub made: Option<MadeTensor>,
    /// Where the last run wrote it, if to a tensor of the caller's on a device.
    pub given: Option<OutputGiven>,
    pub strings: Strings,
}

pub(super) struct OutputGiven {
    pub address: u64,
    pub bytes: usize,
    /// Keeps the memory as long as somebody may read it.
    _memory: Arc<DeviceMemory>,
}

impl OutputGiven {
    pub fn new(tensor: &BatchTensor) -> Option<Self> {
        let TensorMemory::Device(buffer) = &tensor.memory else { return None };
        Some(Self { address: buffer.address(), bytes: buffer.byte_len(), _memory: buffer.memory().clone() })
    }
}

impl Output {
    /// The tensor to write to; null to let ONNX Runtime make one.
    pub fn prepare(&mut self, rows: usize) -> Result<*mut ort::sys::OrtValue, SessionError> {
        let Some(dims) = &self.dims else { return Ok(ptr::null_mut()) };
        self.tensor.shape(dims, rows)?;
        self.tensor.value().map_err(|why| tensor_error(&self.name, why))
    }

    pub fn take(&self, value: *mut ort::sys::OrtValue) -> Option<Value> {
        // SAFETY: Run was passed null for this output, so it made the tensor and left it to us.
        if self.is_to_be_made { unsafe { Value::from_run(value) } } else { None }
    }

    /// Keeps a tensor that ONNX Runtime made, and reads its shape and strings.
    pub fn keep_made(&mut self, value: Option<Value>, session: &Arc<Session>) -> Result<(), SessionError> {
        if !self.is_to_be_made {
            return Ok(());
        }
        let failed = |why| tensor_error(&self.name, why);
        let value = value.ok_or_else(|| failed("the run made none".to_owned()))?;
        let dims = value.dims().map_err(failed)?;
        let count = element_count(&dims);
        let bytes = count.and_then(|count| count.checked_mul(self.tensor.data_type.byte_size().unwrap_or(0)));
        let (Some(count), Some(bytes)) = (count, bytes) else { return Err(failed("its size overflows".to_owned())) };
        if self.tensor.data_type == DataType::Bytes {
            self.strings = value.strings(count)?;
        }
        let (value, is_on_device, _session) = (Arc::new(value), self.stays, session.clone());
        self.made = Some(MadeTensor { value, dims, bytes, is_on_device, _session });
        Ok(())
    }

    /// Copies the input that ONNX Runtime returned for this output, as its memory may be written again, to `own`; if
    /// there is none, to a buffer of the output.
    pub fn copy_input(&mut self, own: Option<&mut BatchTensor>) -> Result<(), SessionError> {
        let Some(made) = self.made.take_if(|_| self.tensor.data_type != DataType::Bytes) else { return Ok(()) };
        let own = own.unwrap_or(&mut self.tensor);
        let rows = own.batch_axis.and_then(|axis| made.dims.get(axis)).map_or(1, |&rows| rows as usize);
        own.shape(&made.dims, rows)?;
        own.host_mut()?.copy_from_slice(made.host()?);
        Ok(())
    }
}

pub(super) fn tensor_error(name: &CString, why: String) -> SessionError {
    SessionError::Tensor { name: name.to_string_lossy().into_owned(), why }
}

/// A tensor that ONNX Runtime made of an output of open shape. A later run can read it as it is.
pub struct MadeTensor {
    pub(super) value: Arc<Value>,
    /// With the number of rows.
    pub dims: Vec<i64>,
    /// Of its elements; none for strings.
    pub(super) bytes: usize,
    pub(super) is_on_device: bool,
    /// Last: the tensor goes back to its allocator.
    pub(super) _session: Arc<Session>,
}

impl MadeTensor {
    /// Copies a part out, such as a row, to be stored; from a device to the host too, after a wait. What is copied on a
    /// device is there after [`Copier::synchronise`]; the queue keeps the tensor until then.
    pub fn take(&self, copier: &Copier, part: &Part, to: BytesMut, storage: StorageType) -> Result<(), SessionError> {
        match (to, copier.queue()) {
            (BytesMut::Device(span), Some(mut queue)) => {
                let batch = self.address_for(part)?;
                let alone = keep_alone(&mut queue, part, span, storage);
                queue.keep(self.value.clone());
                // SAFETY: the part is within this tensor, and has the size of the memory of a state; the queue keeps both.
                unsafe { queue.take(part, storage, batch, alone) };
            }
            (to, Some(mut queue)) if self.is_on_device && self.bytes > 0 => {
                let batch = self.download(&mut queue)?;
                copies::take(part, storage, &batch.bytes()[..self.bytes], to.host());
            }
            (to, _) => copies::take(part, storage, self.host()?, to.host()),
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

    /// The address of the elements, to copy a part of them on the device. Panics if they end before the part.
    pub(super) fn address_for(&self, part: &Part) -> Result<u64, SessionError> {
        check(part, self.bytes);
        self.address()
    }

    pub(super) fn address(&self) -> Result<u64, SessionError> {
        self.value.address().map_err(SessionError::Run)
    }
}
