//! The symbols that Triton looks up. Each is guarded: an error or a panic reaches Triton only as its own error object.
//!
//! Triton keeps a pointer of ours with each of its objects: an `Arc<Model>` with a model, a `Box<Scheduled>` with an
//! instance. Triton may call Finalize after an Initialize that failed. Then the pointer is null.
//!
//! # Safety
//! Only Triton may call these, with objects of its own that are alive. Execute gets an array of `count` live requests.

#![expect(clippy::missing_safety_doc, reason = "the head says it for all")]

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use triton_sys::{
    TRITONBACKEND_Backend, TRITONBACKEND_Model, TRITONBACKEND_ModelInstance, TRITONBACKEND_Request, TRITONSERVER_Error,
    entry_point,
};

use crate::backend;
use crate::model::Model;
use crate::panic::{self, Panic};
use crate::triton::{self, Request};
use crate::workers::Scheduled;

const _: entry_point::TRITONBACKEND_Initialize = TRITONBACKEND_Initialize;
const _: entry_point::TRITONBACKEND_Finalize = TRITONBACKEND_Finalize;
const _: entry_point::TRITONBACKEND_ModelInitialize = TRITONBACKEND_ModelInitialize;
const _: entry_point::TRITONBACKEND_ModelFinalize = TRITONBACKEND_ModelFinalize;
const _: entry_point::TRITONBACKEND_ModelInstanceInitialize = TRITONBACKEND_ModelInstanceInitialize;
const _: entry_point::TRITONBACKEND_ModelInstanceFinalize = TRITONBACKEND_ModelInstanceFinalize;
const _: entry_point::TRITONBACKEND_ModelInstanceReady = TRITONBACKEND_ModelInstanceReady;
const _: entry_point::TRITONBACKEND_ModelInstanceExecute = TRITONBACKEND_ModelInstanceExecute;

/// Triton may call on any thread and passes our objects as `void *`, where the compiler cannot check that they may be
/// shared or sent. So it checks here: several threads use a model at once, and one thread at a time uses an instance or
/// a request.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    const fn is_sent<T: Send>() {}
    is_shared::<Arc<Model>>();
    is_sent::<Box<Scheduled>>();
    is_sent::<Request>();
};

fn guard(work: impl FnOnce() -> Result<(), triton::Error>) -> *mut TRITONSERVER_Error {
    panic::catch_result(work).map_or_else(triton::Error::into_raw, |()| ptr::null_mut())
}

fn non_null<T>(pointer: *mut T) -> Result<NonNull<T>, Panic> {
    NonNull::new(pointer).ok_or_else(|| Panic("Triton passed a null pointer".to_owned()))
}

/// Called once when the backend is loaded, and again by a second server in the same process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_Initialize(backend: *mut TRITONBACKEND_Backend) -> *mut TRITONSERVER_Error {
    // SAFETY: Triton's backend, alive during the call.
    guard(|| Ok(backend::initialize(unsafe { triton::Backend::new(non_null(backend)?) })?))
}

/// Called when the server stops. ONNX Runtime stays, for the next server in the process.
#[unsafe(no_mangle)]
pub const unsafe extern "C" fn TRITONBACKEND_Finalize(_backend: *mut TRITONBACKEND_Backend) -> *mut TRITONSERVER_Error {
    ptr::null_mut()
}

/// Called when a version of a model is loaded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInitialize(model: *mut TRITONBACKEND_Model) -> *mut TRITONSERVER_Error {
    guard(|| {
        // SAFETY: Triton's model, alive until its ModelFinalize.
        let model = unsafe { triton::Model::new(non_null(model)?) };
        let loaded = Arc::into_raw(Arc::new(backend::load_model(model.backend()?, model)?));
        // SAFETY: a model's state is an Arc<Model>, see the module head.
        let kept = unsafe { model.set_state(loaded.cast_mut().cast::<c_void>()) };
        if kept.is_err() {
            // SAFETY: made above, and Triton has not taken it.
            drop(unsafe { Arc::from_raw(loaded) });
        }
        kept
    })
}

/// Called when a model version is unloaded, after its instances are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelFinalize(model: *mut TRITONBACKEND_Model) -> *mut TRITONSERVER_Error {
    guard(|| {
        // SAFETY: Triton's model, alive during the call.
        let model = unsafe { triton::Model::new(non_null(model)?) };
        let state = model.state()?.cast::<Model>().cast_const();
        // SAFETY: Triton only stores the pointer; null means "no state".
        unsafe { model.set_state(ptr::null_mut()) }?;
        if !state.is_null() {
            // SAFETY: made by Arc::into_raw in ModelInitialize and taken back once, as it is null from now on.
            drop(unsafe { Arc::from_raw(state) });
        }
        Ok(())
    })
}

/// Called for each instance of a loaded model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceInitialize(
    instance: *mut TRITONBACKEND_ModelInstance,
) -> *mut TRITONSERVER_Error {
    guard(|| {
        // SAFETY: Triton's instance, alive until its ModelInstanceFinalize.
        let instance = unsafe { triton::Instance::new(non_null(instance)?) };
        let model = non_null(instance.model()?.state()?.cast::<Model>())?;
        // SAFETY: the Arc of ModelInitialize, which lives until ModelFinalize; this makes a second reference to it.
        let model = unsafe {
            Arc::increment_strong_count(model.as_ptr());
            Arc::from_raw(model.as_ptr())
        };
        let made = Box::into_raw(Box::new(Scheduled::new(instance, model)?));
        // SAFETY: an instance's state is a Box<Scheduled>, see the module head.
        let kept = unsafe { instance.set_state(made.cast::<c_void>()) };
        if kept.is_err() {
            // SAFETY: made above, and Triton has not taken it.
            drop(unsafe { Box::from_raw(made) });
        }
        kept
    })
}

/// Called by Triton 25.12 and newer when a client asks whether the model is ready, also during Execute. An error means
/// that it is not. `/v2/health/ready` asks since 26.04.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceReady(
    instance: *mut TRITONBACKEND_ModelInstance,
) -> *mut TRITONSERVER_Error {
    guard(|| {
        // SAFETY: Triton's instance, alive during the call.
        let instance = unsafe { triton::Instance::new(non_null(instance)?) };
        let model = non_null(instance.model()?.state()?.cast::<Model>())?;
        // The instance's own state is not looked at, because Execute may be using it.
        // SAFETY: the Arc of ModelInitialize, which lives until ModelFinalize; a model may be shared by threads.
        match unsafe { model.as_ref() }.device_failure() {
            None => Ok(()),
            Some(failure) => Err(triton::Error::new(triton::Code::Unavailable, failure.to_string())),
        }
    })
}

/// Called when an instance goes away, after its last Execute.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceFinalize(
    instance: *mut TRITONBACKEND_ModelInstance,
) -> *mut TRITONSERVER_Error {
    guard(|| {
        // SAFETY: Triton's instance, alive during the call.
        let instance = unsafe { triton::Instance::new(non_null(instance)?) };
        let state = instance.state()?.cast::<Scheduled>();
        // SAFETY: Triton only stores the pointer; null means "no state".
        unsafe { instance.set_state(ptr::null_mut()) }?;
        if !state.is_null() {
            // SAFETY: made by Box::into_raw in ModelInstanceInitialize and taken back once, as it is null from now on.
            drop(unsafe { Box::from_raw(state) });
        }
        Ok(())
    })
}

/// Called with the requests of a payload, never twice at once for an instance. If this returned an error, core would
/// answer and release the requests. So an error is returned only before the first request is taken. From then on, this
/// backend answers and releases all of them, whatever happens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceExecute(
    instance: *mut TRITONBACKEND_ModelInstance,
    requests: *mut *mut TRITONBACKEND_Request,
    count: u32,
) -> *mut TRITONSERVER_Error {
    guard(|| {
        // SAFETY: Triton's instance, alive during the call.
        let instance = unsafe { triton::Instance::new(non_null(instance)?) };
        let mut instance = non_null(instance.state()?.cast::<Scheduled>())?;
        let mut owned = Vec::with_capacity(count as usize);
        // SAFETY: Triton's array of that many requests, all handed over; each is taken once.
        owned.extend(unsafe {
            (0..count as usize).filter_map(|index| NonNull::new(*requests.add(index)).map(|raw| Request::new(raw)))
        });
        // SAFETY: the Box of ModelInstanceInitialize; Triton runs one Execute of an instance at a time, and none beside
        // its ModelInstanceFinalize.
        let executed = panic::catch(|| unsafe { instance.as_mut() }.execute(owned));
        if let Err(error) = executed {
            log::error!("{error} (the requests of the payload have been answered)");
        }
        Ok(())
    })
}
