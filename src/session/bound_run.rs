//! Runs with an IO binding, which is the only way to make ONNX Runtime leave an output of open shape on a device.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;

use ort::sys::{OrtIoBinding, OrtValue};

use super::error::SessionError;
use super::open::Session;
use super::value::{MemoryKind, check};

/// Where an output goes.
pub enum Fetch<'a> {
    /// It is written into this tensor.
    Into(&'a CStr, *mut OrtValue),
    /// ONNX Runtime makes it where the model runs.
    OnDevice(&'a CStr),
    /// ONNX Runtime makes it on the host.
    OnHost(&'a CStr),
}

/// A binding of a session, filled anew for each run.
pub struct BoundRun {
    /// The first field, so that it is released before its session.
    binding: IoBinding,
    device: MemoryKind,
    session: Arc<Session>,
}

struct IoBinding(*mut OrtIoBinding);

// SAFETY: an object without thread affinity, used by its owner only.
unsafe impl Send for IoBinding {}

impl BoundRun {
    /// A binding for a model that runs on that device.
    pub fn new(session: Arc<Session>, device: MemoryKind) -> Result<Self, SessionError> {
        let mut binding = ptr::null_mut();
        // SAFETY: the session is alive; the binding is owned from then on.
        unsafe { check((ort::api().CreateIoBinding)(session.as_ptr(), &mut binding)) }.map_err(SessionError::Run)?;
        Ok(Self { binding: IoBinding(binding), device, session })
    }

    /// Runs. Returns a value for each output, in their order: those that ONNX Runtime made are the caller's to release,
    /// and null stands for the others.
    ///
    /// # Safety
    /// Names and values must live during the run, and no tensor may be both read and written.
    pub unsafe fn run<'a>(
        &mut self,
        inputs: impl Iterator<Item = (*const c_char, *const OrtValue)>,
        outputs: impl Iterator<Item = Fetch<'a>>,
    ) -> Result<Vec<*mut OrtValue>, String> {
        // SAFETY: the caller promises the same.
        let ran = unsafe { self.bind_and_run(inputs, outputs) };
        // Otherwise the binding would keep the tensors until the next run.
        // SAFETY: the binding is alive; `values` has its own references to the outputs.
        unsafe {
            (ort::api().ClearBoundInputs)(self.binding.0);
            (ort::api().ClearBoundOutputs)(self.binding.0);
        }
        let (values, is_made) = ran?;
        let release = |(value, is_made): (*mut OrtValue, bool)| {
            if is_made {
                return value;
            }
            // SAFETY: this reference is ours, and the tensor's owner has another one.
            unsafe { (ort::api().ReleaseValue)(value) };
            ptr::null_mut()
        };
        Ok(values.into_iter().zip(is_made).map(release).collect())
    }

    /// Returns all outputs, and which of them ONNX Runtime made.
    ///
    /// # Safety
    /// As for [`BoundRun::run`].
    unsafe fn bind_and_run<'a>(
        &self,
        inputs: impl Iterator<Item = (*const c_char, *const OrtValue)>,
        outputs: impl Iterator<Item = Fetch<'a>>,
    ) -> Result<(Vec<*mut OrtValue>, Vec<bool>), String> {
        let api = ort::api();
        let mut is_made = Vec::new();
        // SAFETY: the binding is alive, and the caller promises the rest.
        unsafe {
            for (name, value) in inputs {
                check((api.BindInput)(self.binding.0, name, value))?;
            }
            for output in outputs {
                is_made.push(!matches!(output, Fetch::Into(..)));
                check(match output {
                    Fetch::Into(name, value) => (api.BindOutput)(self.binding.0, name.as_ptr(), value),
                    Fetch::OnDevice(name) => {
                        (api.BindOutputToDevice)(self.binding.0, name.as_ptr(), self.device.info()?)
                    }
                    Fetch::OnHost(name) => {
                        (api.BindOutputToDevice)(self.binding.0, name.as_ptr(), MemoryKind::Host.info()?)
                    }
                })?;
            }
            check((api.RunWithBinding)(self.session.as_ptr(), self.session.run_options(), self.binding.0))?;
        }
        Ok((self.values()?, is_made))
    }

    /// The outputs of the last run, each with a reference that we own.
    fn values(&self) -> Result<Vec<*mut OrtValue>, String> {
        let api = ort::api();
        let (mut allocator, mut values, mut count) = (ptr::null_mut(), ptr::null_mut::<*mut OrtValue>(), 0);
        // SAFETY: the binding is alive; the array is copied, and given back to the allocator that it is from.
        unsafe {
            check((api.GetAllocatorWithDefaultOptions)(&mut allocator))?;
            check((api.GetBoundOutputValues)(self.binding.0, allocator, &mut values, &mut count))?;
            if values.is_null() {
                return Ok(Vec::new());
            }
            let copied = std::slice::from_raw_parts(values, count).to_vec();
            check((api.AllocatorFree)(allocator, values.cast()))?;
            Ok(copied)
        }
    }
}

impl Drop for IoBinding {
    fn drop(&mut self) {
        // SAFETY: made in `BoundRun::new`, released once, before its session.
        unsafe { (ort::api().ReleaseIoBinding)(self.0) }
    }
}
