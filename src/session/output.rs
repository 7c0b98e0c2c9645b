//! An output of a step: a tensor of ours that a run writes, or one that ONNX Runtime makes.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use super::batch_tensor::BatchTensor;
use super::open::SessionError;
use super::value::Value;
use crate::memory::device::DeviceMemory;
use crate::memory::{Store, Strings};
use crate::tensor::{DataType, element_count};

/// An output.
pub(super) struct Output {
    pub name: CString,
    pub tensor: BatchTensor,
    /// As in [`OutputSpec`].
    pub dims: Option<Vec<i64>>,
    /// As in [`OutputSpec`].
    pub is_read: bool,
    /// It is an input of the graph, too. ONNX Runtime then returns the tensor that was fed, and writes nothing to one of
    /// ours.
    pub is_input: bool,
    /// ONNX Runtime is to leave it where the model runs.
    pub stays: bool,
    /// What ONNX Runtime made in the last run, where it decides the shape.
    pub made: Option<Arc<Value>>,
    /// Where the last run wrote it, if to a tensor of the caller's on a device.
    pub given: Option<OutputGiven>,
    pub strings: Strings,
}

/// A tensor of the caller's that an output was written to, on a device.
pub(super) struct OutputGiven {
    pub address: u64,
    pub bytes: usize,
    /// Keeps the memory as long as somebody may read it.
    _memory: Arc<DeviceMemory>,
}

impl OutputGiven {
    pub fn new(tensor: &BatchTensor) -> Option<Self> {
        let Store::Device(buffer) = &tensor.store else { return None };
        Some(Self { address: buffer.address(), bytes: buffer.byte_len(), _memory: buffer.memory().clone() })
    }
}

impl Output {
    /// The tensor to write to, or null for ONNX Runtime to make one.
    pub fn prepare(&mut self, rows: usize) -> Result<*mut ort::sys::OrtValue, SessionError> {
        let Some(dims) = &self.dims else { return Ok(ptr::null_mut()) };
        self.tensor.shape(dims, rows)?;
        self.tensor.value().map_err(|why| tensor_error(&self.name, why))
    }

    /// Takes a tensor over that ONNX Runtime made.
    pub fn take(&mut self, value: *mut ort::sys::OrtValue) {
        if self.dims.is_none() {
            // SAFETY: `prepare` passed null, so Run made this tensor and left it to us.
            self.made = unsafe { Value::from_run(value) }.map(Arc::new);
        }
    }

    /// Copies the input that ONNX Runtime returned for this output, as its memory may be written again, to `own`; if
    /// there is none, to a buffer of the output.
    pub fn copy_input(&mut self, own: Option<&mut BatchTensor>) -> Result<(), SessionError> {
        let Some(made) = self.made.take_if(|_| self.tensor.data_type != DataType::Bytes) else { return Ok(()) };
        let bytes = self.tensor.bytes;
        // SAFETY: `settle` computed the size from the tensor's own dimensions; it is on the host.
        let given = unsafe { made.bytes(bytes) }.map_err(|why| tensor_error(&self.name, why))?;
        let dims = self.tensor.dims.clone();
        let own = own.unwrap_or(&mut self.tensor);
        own.bytes = bytes;
        own.dims.clone_from(&dims);
        own.reserve()?;
        own.host_mut()?.copy_from_slice(given);
        Ok(())
    }

    /// Notes the shape of a tensor that ONNX Runtime made.
    pub fn settle(&mut self) -> Result<(), SessionError> {
        if self.dims.is_some() {
            return Ok(());
        }
        let failed = |why| tensor_error(&self.name, why);
        let made = self.made.as_ref().ok_or_else(|| failed("the run made none".to_owned()))?;
        // Tensors over our buffer have other dimensions.
        self.tensor.by_rows.clear();
        self.tensor.dims = made.dims().map_err(failed)?;
        if self.tensor.data_type == DataType::Bytes {
            let count = element_count(&self.tensor.dims).ok_or_else(|| failed("its size overflows".to_owned()))?;
            self.strings = made.strings(count)?;
            return Ok(());
        }
        let bytes =
            element_count(&self.tensor.dims).and_then(|count| count.checked_mul(self.tensor.data_type.byte_size()?));
        self.tensor.bytes = bytes.ok_or_else(|| failed("its size overflows".to_owned()))?;
        Ok(())
    }
}

/// An error about a tensor.
pub(super) fn tensor_error(name: &CString, why: String) -> SessionError {
    SessionError::Tensor { name: name.to_string_lossy().into_owned(), why }
}
