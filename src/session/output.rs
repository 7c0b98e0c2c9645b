//! An output of a step: a tensor of ours that a run writes, or one that ONNX Runtime makes.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use super::open::SessionError;
use super::tensors::Tensors;
use super::value::Value;
use crate::memory::Strings;
use crate::tensor::{DataType, element_count};

/// An output.
pub(super) struct Output {
    pub name: CString,
    pub tensors: Tensors,
    /// Which state of the batch buffers it is.
    pub state: Option<usize>,
    /// As in [`OutputSpec`].
    pub dims: Option<Vec<i64>>,
    /// As in [`OutputSpec`].
    pub is_read: bool,
    /// Whether it is an input of the graph, too. ONNX Runtime then returns the tensor that was fed, and writes nothing.
    pub is_input: bool,
    /// Whether ONNX Runtime leaves it where the model runs.
    pub stays: bool,
    /// What ONNX Runtime made in the last run, if it decides the shape.
    pub made: Option<Arc<Value>>,
    pub strings: Strings,
}

impl Output {
    /// The tensor to write to; null to let ONNX Runtime make one.
    pub fn prepare(&mut self, rows: usize) -> Result<*mut ort::sys::OrtValue, SessionError> {
        let Some(dims) = &self.dims else { return Ok(ptr::null_mut()) };
        self.tensors.shape(dims, rows)?;
        self.tensors.value().map_err(|why| tensor_error(&self.name, why))
    }

    /// Takes over a tensor that ONNX Runtime made.
    pub fn take(&mut self, value: *mut ort::sys::OrtValue) {
        if self.dims.is_none() {
            // SAFETY: `prepare` passed null, so Run made this tensor and left it to us.
            self.made = unsafe { Value::from_run(value) }.map(Arc::new);
        }
    }

    /// Copies the input that ONNX Runtime returned for this output, because the input's memory may be written again. It
    /// is copied to `own`, or to the output's own buffer.
    pub fn copy_input(&mut self, own: Option<&mut Tensors>) -> Result<(), SessionError> {
        let Some(made) = self.made.take_if(|_| self.tensors.data_type != DataType::Bytes) else { return Ok(()) };
        let bytes = self.tensors.bytes;
        // SAFETY: `settle` computed the size from the tensor's own dimensions; it is on the host.
        let given = unsafe { made.bytes(bytes) }.map_err(|why| tensor_error(&self.name, why))?;
        let dims = self.tensors.dims.clone();
        let own = own.unwrap_or(&mut self.tensors);
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
        self.tensors.by_rows.clear();
        self.tensors.dims = made.dims().map_err(failed)?;
        if self.tensors.data_type == DataType::Bytes {
            let count = element_count(&self.tensors.dims).ok_or_else(|| failed("its size overflows".to_owned()))?;
            self.strings = made.strings(count)?;
            return Ok(());
        }
        let bytes =
            element_count(&self.tensors.dims).and_then(|count| count.checked_mul(self.tensors.data_type.byte_size()?));
        self.tensors.bytes = bytes.ok_or_else(|| failed("its size overflows".to_owned()))?;
        Ok(())
    }
}

/// An error about a tensor.
pub(super) fn tensor_error(name: &CString, why: String) -> SessionError {
    SessionError::Tensor { name: name.to_string_lossy().into_owned(), why }
}
