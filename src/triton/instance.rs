//! A model instance: one executor of a model.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use triton_sys::{TRITONBACKEND_ModelInstance, call};

use super::error::{Code, Error, check};
use super::model::Model;
use super::request::Request;

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
        let (mut kind, mut device) = (triton_sys::TRITONSERVER_INSTANCEGROUPKIND_CPU, 0);
        // SAFETY: alive by `new`.
        unsafe {
            check(call!(TRITONBACKEND_ModelInstanceKind(self.0.as_ptr(), &mut kind)))?;
            check(call!(TRITONBACKEND_ModelInstanceDeviceId(self.0.as_ptr(), &mut device)))?;
        }
        Ok((kind == triton_sys::TRITONSERVER_INSTANCEGROUPKIND_GPU).then_some(device))
    }

    pub fn model(self) -> Result<Model, Error> {
        let mut model = ptr::null_mut();
        // SAFETY: alive by `new`; a model outlives its instances.
        unsafe {
            check(call!(TRITONBACKEND_ModelInstanceModel(self.0.as_ptr(), &mut model)))?;
            NonNull::new(model)
                .map(|model| Model::new(model))
                .ok_or_else(|| Error::new(Code::Internal, "Triton gave no model"))
        }
    }

    pub fn report_memory(self, gpu: i32, bytes: usize) -> Result<(), Error> {
        let mut usage = Usage(ptr::null_mut());
        // SAFETY: alive by `new`; the attributes are made here, set while they live, and stay ours.
        unsafe {
            check(call!(TRITONSERVER_BufferAttributesNew(&mut usage.0)))?;
            check(call!(TRITONSERVER_BufferAttributesSetMemoryType(usage.0, triton_sys::TRITONSERVER_MEMORY_GPU)))?;
            check(call!(TRITONSERVER_BufferAttributesSetMemoryTypeId(usage.0, i64::from(gpu))))?;
            check(call!(TRITONSERVER_BufferAttributesSetByteSize(usage.0, bytes)))?;
            check(call!(TRITONBACKEND_ModelInstanceReportMemoryUsage(self.0.as_ptr(), &mut usage.0, 1)))
        }
    }

    /// The pointer that `set_state` kept; null before.
    pub fn state(self) -> Result<*mut c_void, Error> {
        let mut state = ptr::null_mut();
        // SAFETY: alive by `new`.
        unsafe { check(call!(TRITONBACKEND_ModelInstanceState(self.0.as_ptr(), &mut state)))? };
        Ok(state)
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

/// Attributes of memory in use; null before they are made.
struct Usage(*mut triton_sys::TRITONSERVER_BufferAttributes);

impl Drop for Usage {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by `report_memory`, deleted once.
            note(unsafe { check(call!(TRITONSERVER_BufferAttributesDelete(self.0))) });
        }
    }
}

fn note(reported: Result<(), Error>) {
    if let Err(error) = reported {
        log::debug!("statistics were not taken: {error}");
    }
}
