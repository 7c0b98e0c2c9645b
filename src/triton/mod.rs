//! Safe wrappers of Triton's objects. This file has the backend, its models and their instances. Only this module and
//! the exports use `triton-sys`.
//!
//! Rules: what Triton lends is borrowed with a lifetime; what it hands over is owned and given back on drop. A request
//! is answered once and released once on every path ([`Request`]). Its bytes are copied and never borrowed as a slice
//! ([`rows::client`](::rows::client)). Every call that fails is an [`Error`]. Constructors from raw pointers are
//! `unsafe`, and only the exports call them. Not for: what a request means.

mod error;
mod input;
mod metrics;
mod request;
mod response;
mod server;

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::ptr::{self, NonNull};

use scopeguard::guard;
use triton_sys::{TRITONBACKEND_Backend, TRITONBACKEND_Model, TRITONBACKEND_ModelInstance, TRITONSERVER_Message, call};

pub use error::{Code, Error, echo};
use error::{check, get};
pub use input::{HeldElements, HeldInput, Input, NotCopied};
pub use metrics::{Family, Kind, Metric};
pub use request::{ParameterValue, Request};
pub use response::{Answer, OutputMemory, Response, ResponseCopy, RowOutput, c_name};
pub use server::{
    ServerError, exit_process, fills_in_candidates, gives_request_parameters, install_log, load, log_limits,
};

/// Version of the configuration's JSON.
const CONFIG_VERSION: u32 = 1;

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
        // SAFETY: alive by `new`; the message stays the backend's.
        unsafe { json(get!(TRITONBACKEND_BackendConfig(self.0.as_ptr()))?) }
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
        // SAFETY: alive by `new`; the backend outlives its models.
        let backend = unsafe { get!(TRITONBACKEND_ModelBackend(self.0.as_ptr())) }?;
        NonNull::new(backend).map(Backend).ok_or_else(|| Error::new(Code::Internal, "Triton gave no backend"))
    }

    pub fn version(self) -> Result<u64, Error> {
        // SAFETY: alive by `new`.
        unsafe { get!(TRITONBACKEND_ModelVersion(self.0.as_ptr())) }
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
        // SAFETY: alive by `new`; the message is handed over, and deleted once, after its last use.
        unsafe {
            let config = get!(TRITONBACKEND_ModelConfig(self.0.as_ptr(), CONFIG_VERSION))?;
            let text = json(config);
            check(call!(TRITONSERVER_MessageDelete(config)))?;
            text
        }
    }

    /// Whether Triton lets the backend complete the configuration (`--disable-auto-complete-config` says no).
    pub fn wants_completion(self) -> Result<bool, Error> {
        // SAFETY: alive by `new`.
        unsafe { get!(TRITONBACKEND_ModelAutoCompleteConfig(self.0.as_ptr())) }
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
        // SAFETY: alive by `new`.
        unsafe { get!(TRITONBACKEND_ModelState(self.0.as_ptr())) }
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

#[derive(Clone, Copy)]
pub struct Instance(NonNull<TRITONBACKEND_ModelInstance>);

// SAFETY: Triton's instance calls used here have no thread affinity; Triton itself moves instances between threads.
unsafe impl Send for Instance {}
// SAFETY: the calls used here read what never changes, or count under a lock of Triton's.
unsafe impl Sync for Instance {}

impl Instance {
    /// # Safety
    /// `raw` must be a live instance that Triton passed, and outlive this.
    pub const unsafe fn new(raw: NonNull<TRITONBACKEND_ModelInstance>) -> Self {
        Self(raw)
    }

    /// The GPU that it runs on; `None` for the CPU.
    pub fn gpu(self) -> Result<Option<i32>, Error> {
        let raw = self.0.as_ptr();
        // SAFETY: alive by `new`.
        let (kind, device) =
            unsafe { (get!(TRITONBACKEND_ModelInstanceKind(raw))?, get!(TRITONBACKEND_ModelInstanceDeviceId(raw))?) };
        Ok((kind == triton_sys::TRITONSERVER_INSTANCEGROUPKIND_GPU).then_some(device))
    }

    pub fn model(self) -> Result<Model, Error> {
        // SAFETY: alive by `new`; a model outlives its instances.
        let model = unsafe { get!(TRITONBACKEND_ModelInstanceModel(self.0.as_ptr())) }?;
        NonNull::new(model).map(Model).ok_or_else(|| Error::new(Code::Internal, "Triton gave no model"))
    }

    pub fn report_memory(self, gpu: i32, bytes: usize) -> Result<(), Error> {
        // SAFETY: alive by `new`; the attributes are made here, set while they live, stay ours, and are deleted once.
        unsafe {
            let made = get!(TRITONSERVER_BufferAttributesNew())?;
            let mut usage = guard(made, |made| note(check(call!(TRITONSERVER_BufferAttributesDelete(made)))));
            check(call!(TRITONSERVER_BufferAttributesSetMemoryType(*usage, triton_sys::TRITONSERVER_MEMORY_GPU)))?;
            check(call!(TRITONSERVER_BufferAttributesSetMemoryTypeId(*usage, i64::from(gpu))))?;
            check(call!(TRITONSERVER_BufferAttributesSetByteSize(*usage, bytes)))?;
            check(call!(TRITONBACKEND_ModelInstanceReportMemoryUsage(self.0.as_ptr(), &mut *usage, 1)))
        }
    }

    /// The pointer that `set_state` kept; null before.
    pub fn state(self) -> Result<*mut c_void, Error> {
        // SAFETY: alive by `new`.
        unsafe { get!(TRITONBACKEND_ModelInstanceState(self.0.as_ptr())) }
    }

    /// Lets Triton keep a pointer with the instance.
    ///
    /// # Safety
    /// `state` must be null, or a pointer to what the callers of [`Instance::state`] cast it to.
    pub unsafe fn set_state(self, state: *mut c_void) -> Result<(), Error> {
        // SAFETY: alive by `new`; Triton does not touch what the pointer points to.
        unsafe { check(call!(TRITONBACKEND_ModelInstanceSetState(self.0.as_ptr(), state))) }
    }

    /// Counts a request in the model's statistics. Failures are logged: statistics must not fail a request.
    pub fn report_request(self, request: &Request, success: bool, times: Times) {
        if !request.is_counted() {
            return;
        }
        let Times { execute_start, compute_start, compute_end, execute_end } = times;
        let (instance, request) = (self.0.as_ptr(), request.as_ptr());
        // SAFETY: both alive: the instance by `new`, the request until it is released.
        note(unsafe {
            check(call!(TRITONBACKEND_ModelInstanceReportStatistics(
                instance,
                request,
                success,
                execute_start,
                compute_start,
                compute_end,
                execute_end
            )))
        });
    }

    pub fn report_batch(self, rows: usize, times: Times) {
        let Times { execute_start, compute_start, compute_end, execute_end } = times;
        // SAFETY: alive by `new`.
        note(unsafe {
            check(call!(TRITONBACKEND_ModelInstanceReportBatchStatistics(
                self.0.as_ptr(),
                rows as u64,
                execute_start,
                compute_start,
                compute_end,
                execute_end
            )))
        });
    }
}

fn note(reported: Result<(), Error>) {
    if let Err(error) = reported {
        log::debug!("statistics were not taken: {error}");
    }
}

/// Points in time of a run, in nanoseconds of the monotonic clock, for Triton's statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub execute_start: u64,
    /// The inputs are in place.
    pub compute_start: u64,
    /// The model has run.
    pub compute_end: u64,
    /// The responses are sent.
    pub execute_end: u64,
}

impl Times {
    pub const fn starting_at(now: u64) -> Self {
        Self { execute_start: now, compute_start: now, compute_end: now, execute_end: now }
    }

    pub const fn ending_at(self, now: u64) -> Self {
        Self { compute_start: now, compute_end: now, execute_end: now, ..self }
    }
}

/// Now, on the clock that Triton's statistics use.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to a local; the monotonic clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// How often this thread has waited for something (its voluntary context switches). If core's thread has not waited
/// between two calls of Execute, the second payload was in core's queue before the first call returned.
pub fn thread_waits() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: writes to a local, for which zeros are valid, too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nvcsw.cast_unsigned()
}

/// Copies a string that Triton lends.
///
/// # Safety
/// `text` must be a live C string.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Copies the JSON out of a message.
///
/// # Safety
/// `message` must be alive; it stays the caller's.
unsafe fn json(message: *mut TRITONSERVER_Message) -> Result<Vec<u8>, Error> {
    let (mut base, mut size) = (ptr::null(), 0);
    // SAFETY: the caller promises that the message is alive. Its text is copied while it is.
    unsafe {
        check(call!(TRITONSERVER_MessageSerializeToJson(message, &mut base, &mut size)))?;
        Ok(std::slice::from_raw_parts(base.cast::<u8>(), size).to_vec())
    }
}
