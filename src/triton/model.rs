//! The backend and its models, as Triton describes them.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::ptr::{self, NonNull};

use triton_sys::{TRITONBACKEND_Backend, TRITONBACKEND_Model, TRITONSERVER_Message, call};

use super::error::{Code, Error, check};

/// Version of the configuration's JSON.
const CONFIG_VERSION: u32 = 1;

/// Copies a string that Triton lends.
///
/// # Safety
/// `text` must be a live C string.
pub(super) unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[derive(Clone, Copy)]
pub struct Backend(NonNull<TRITONBACKEND_Backend>);

impl Backend {
    /// # Safety
    /// `raw` must be the live backend that Triton passed.
    pub const unsafe fn new(raw: NonNull<TRITONBACKEND_Backend>) -> Self {
        Self(raw)
    }

    /// The server's command line for backends: `{"cmdline": {"backend-directory": …, …}}`.
    pub fn config_json(self) -> Result<Vec<u8>, Error> {
        let mut config = ptr::null_mut();
        // SAFETY: alive by `new`; the message stays the backend's.
        unsafe {
            check(call!(TRITONBACKEND_BackendConfig(self.0.as_ptr(), &mut config)))?;
            json(config)
        }
    }

    pub fn folder(self) -> Result<PathBuf, Error> {
        let (mut kind, mut location) = (triton_sys::TRITONBACKEND_ARTIFACT_FILESYSTEM, ptr::null());
        // SAFETY: alive by `new`; the path stays the backend's and is copied.
        unsafe {
            check(call!(TRITONBACKEND_BackendArtifacts(self.0.as_ptr(), &mut kind, &mut location)))?;
            Ok(PathBuf::from(text(location)))
        }
    }
}

#[derive(Clone, Copy)]
pub struct Model(NonNull<TRITONBACKEND_Model>);

impl Model {
    /// # Safety
    /// `raw` must be a live model that Triton passed, and outlive this.
    pub const unsafe fn new(raw: NonNull<TRITONBACKEND_Model>) -> Self {
        Self(raw)
    }

    pub fn backend(self) -> Result<Backend, Error> {
        let mut backend = ptr::null_mut();
        // SAFETY: alive by `new`; the backend outlives its models.
        unsafe { check(call!(TRITONBACKEND_ModelBackend(self.0.as_ptr(), &mut backend)))? };
        NonNull::new(backend).map(Backend).ok_or_else(|| Error::new(Code::Internal, "Triton gave no backend"))
    }

    pub fn version(self) -> Result<u64, Error> {
        let mut version = 0;
        // SAFETY: alive by `new`.
        unsafe { check(call!(TRITONBACKEND_ModelVersion(self.0.as_ptr(), &mut version)))? };
        Ok(version)
    }

    /// The model's folder, which holds a folder for each version.
    pub fn repository(self) -> Result<PathBuf, Error> {
        let (mut kind, mut location) = (triton_sys::TRITONBACKEND_ARTIFACT_FILESYSTEM, ptr::null());
        // SAFETY: alive by `new`; the path stays the model's and is copied.
        unsafe {
            check(call!(TRITONBACKEND_ModelRepository(self.0.as_ptr(), &mut kind, &mut location)))?;
            Ok(PathBuf::from(text(location)))
        }
    }

    /// The configuration as JSON, with Triton's defaults filled in.
    pub fn config_json(self) -> Result<Vec<u8>, Error> {
        let mut config = ptr::null_mut();
        // SAFETY: alive by `new`; the message is handed over, and deleted once, after its last use.
        unsafe {
            check(call!(TRITONBACKEND_ModelConfig(self.0.as_ptr(), CONFIG_VERSION, &mut config)))?;
            let text = json(config);
            check(call!(TRITONSERVER_MessageDelete(config)))?;
            text
        }
    }

    /// Whether Triton lets the backend complete the configuration (`--disable-auto-complete-config` says no).
    pub fn wants_completion(self) -> Result<bool, Error> {
        let mut wants = false;
        // SAFETY: alive by `new`.
        unsafe { check(call!(TRITONBACKEND_ModelAutoCompleteConfig(self.0.as_ptr(), &mut wants)))? };
        Ok(wants)
    }

    /// Replaces the configuration while the model is loaded. Triton takes `max_batch_size`, `input`, `output` and, if
    /// there is none, the scheduling, and ignores the rest.
    pub fn set_config_json(self, json: &[u8]) -> Result<(), Error> {
        let mut config = ptr::null_mut();
        // SAFETY: alive by `new`; the calls copy the text and the message, which is deleted once, after its last use.
        unsafe {
            let made = call!(TRITONSERVER_MessageNewFromSerializedJson(&mut config, json.as_ptr().cast(), json.len()));
            check(made)?;
            let set = check(call!(TRITONBACKEND_ModelSetConfig(self.0.as_ptr(), CONFIG_VERSION, config)));
            check(call!(TRITONSERVER_MessageDelete(config)))?;
            set
        }
    }

    /// The pointer that `set_state` kept; null before.
    pub fn state(self) -> Result<*mut c_void, Error> {
        let mut state = ptr::null_mut();
        // SAFETY: alive by `new`.
        unsafe { check(call!(TRITONBACKEND_ModelState(self.0.as_ptr(), &mut state)))? };
        Ok(state)
    }

    /// Lets Triton keep a pointer with the model.
    ///
    /// # Safety
    /// `state` must be null, or a pointer to what the callers of [`Model::state`] cast it to.
    pub unsafe fn set_state(self, state: *mut c_void) -> Result<(), Error> {
        // SAFETY: alive by `new`; Triton does not touch what the pointer points to.
        unsafe { check(call!(TRITONBACKEND_ModelSetState(self.0.as_ptr(), state))) }
    }
}

/// Copies the JSON out of a message.
///
/// # Safety
/// `message` must be alive; it stays the caller's.
unsafe fn json(message: *mut TRITONSERVER_Message) -> Result<Vec<u8>, Error> {
    let (mut base, mut size) = (std::ptr::null(), 0);
    // SAFETY: the caller promises that the message is alive. Its text is copied while it is.
    unsafe {
        check(call!(TRITONSERVER_MessageSerializeToJson(message, &mut base, &mut size)))?;
        Ok(std::slice::from_raw_parts(base.cast::<u8>(), size).to_vec())
    }
}
