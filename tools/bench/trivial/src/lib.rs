//! The cheapest backend that a sequence client can use: it asks of each request what every backend must, answers all of
//! the configuration's outputs with zeros in the shape of one row, counts, and releases.
//!
//! What a request costs with it is what it costs in Triton. Not for serving.

#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc, reason = "names and rules are tritonbackend.h's")]

use std::ffi::{CString, c_void};
use std::ptr;

use triton_sys::{
    TRITONBACKEND_Backend, TRITONBACKEND_Model, TRITONBACKEND_ModelInstance, TRITONBACKEND_Request,
    TRITONSERVER_DataType, TRITONSERVER_Error, call,
};

type Failure = *mut TRITONSERVER_Error;

struct Output {
    name: CString,
    data_type: TRITONSERVER_DataType,
    dims: Vec<i64>,
    bytes: usize,
}

struct Model {
    inputs: Vec<CString>,
    outputs: Vec<Output>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_Initialize(_backend: *mut TRITONBACKEND_Backend) -> Failure {
    match triton_sys::load() {
        Ok(_) => ptr::null_mut(),
        Err(error) => panic!("{error}"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInitialize(model: *mut TRITONBACKEND_Model) -> Failure {
    let (mut message, mut json, mut bytes) = (ptr::null_mut(), ptr::null(), 0);
    // SAFETY: a live model; the text is read before the message goes.
    let config: serde_json::Value = unsafe {
        let _ = call!(TRITONBACKEND_ModelConfig(model, 1, &mut message));
        let _ = call!(TRITONSERVER_MessageSerializeToJson(message, &mut json, &mut bytes));
        let config = serde_json::from_slice(std::slice::from_raw_parts(json.cast(), bytes)).unwrap_or_default();
        let _ = call!(TRITONSERVER_MessageDelete(message));
        config
    };
    let kept = Box::new(Model {
        inputs: tensors(&config["input"]).map(name).collect(),
        outputs: tensors(&config["output"]).map(output).collect(),
    });
    // SAFETY: a live model, which keeps the pointer until ModelFinalize takes it back.
    let _ = unsafe { call!(TRITONBACKEND_ModelSetState(model, Box::into_raw(kept).cast::<c_void>())) };
    ptr::null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelFinalize(model: *mut TRITONBACKEND_Model) -> Failure {
    // SAFETY: made in ModelInitialize, and nobody uses it any more.
    drop(unsafe { Box::from_raw(kept(model)) });
    ptr::null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceExecute(
    instance: *mut TRITONBACKEND_ModelInstance,
    requests: *mut *mut TRITONBACKEND_Request,
    count: u32,
) -> Failure {
    let mut model = ptr::null_mut();
    // SAFETY: all alive, by Triton's word.
    unsafe {
        let _ = call!(TRITONBACKEND_ModelInstanceModel(instance, &mut model));
        let model = &*kept(model);
        // First, so that who has the last answer finds the batch counted.
        let _ = call!(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, u64::from(count), 0, 0, 0, 0));
        for &request in std::slice::from_raw_parts(requests, count as usize) {
            read(request, model);
            answer(request, model);
            let _ = call!(TRITONBACKEND_ModelInstanceReportStatistics(instance, request, true, 0, 0, 0, 0));
            let release = triton_sys::TRITONSERVER_REQUEST_RELEASE_ALL;
            let _ = call!(TRITONBACKEND_RequestRelease(request, release));
        }
    }
    ptr::null_mut()
}

unsafe fn read(request: *mut TRITONBACKEND_Request, model: &Model) {
    let (mut id, mut flags) = (0, 0);
    // SAFETY: a live request, by the caller's word.
    unsafe {
        let _ = call!(TRITONBACKEND_RequestCorrelationId(request, &mut id));
        let _ = call!(TRITONBACKEND_RequestFlags(request, &mut flags));
        for name in &model.inputs {
            let (mut input, mut dims) = (ptr::null_mut(), ptr::null());
            let mut data_type = triton_sys::TRITONSERVER_TYPE_INVALID;
            let (mut rank, mut bytes, mut buffers) = (0, 0, 0);
            let _ = call!(TRITONBACKEND_RequestInput(request, name.as_ptr(), &mut input));
            let _ = call!(TRITONBACKEND_InputProperties(
                input,
                ptr::null_mut(),
                &mut data_type,
                &mut dims,
                &mut rank,
                &mut bytes,
                &mut buffers
            ));
            let (mut data, mut memory, mut device) = (ptr::null(), triton_sys::TRITONSERVER_MEMORY_CPU, 0);
            let _ = call!(TRITONBACKEND_InputBuffer(input, 0, &mut data, &mut bytes, &mut memory, &mut device));
        }
    }
}

unsafe fn answer(request: *mut TRITONBACKEND_Request, model: &Model) {
    let mut response = ptr::null_mut();
    // SAFETY: a live request, by the caller's word; the buffer has the size that was asked for.
    unsafe {
        let _ = call!(TRITONBACKEND_ResponseNew(&mut response, request));
        for Output { name, data_type, dims, bytes } in &model.outputs {
            let (mut output, mut data) = (ptr::null_mut(), ptr::null_mut());
            let (mut memory, mut device) = (triton_sys::TRITONSERVER_MEMORY_CPU, 0);
            let (rank, dims) = (dims.len() as u32, dims.as_ptr());
            let _ = call!(TRITONBACKEND_ResponseOutput(response, &mut output, name.as_ptr(), *data_type, dims, rank));
            let _ = call!(TRITONBACKEND_OutputBuffer(output, &mut data, *bytes as u64, &mut memory, &mut device));
            ptr::write_bytes(data.cast::<u8>(), 0, *bytes);
        }
        let last = triton_sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL;
        let _ = call!(TRITONBACKEND_ResponseSend(response, last, ptr::null_mut()));
    }
}

unsafe fn kept(model: *mut TRITONBACKEND_Model) -> *mut Model {
    let mut kept = ptr::null_mut();
    // SAFETY: a live model, by the caller's word.
    let _ = unsafe { call!(TRITONBACKEND_ModelState(model, &mut kept)) };
    kept.cast()
}

fn tensors(list: &serde_json::Value) -> impl Iterator<Item = &serde_json::Value> {
    list.as_array().into_iter().flatten()
}

fn name(tensor: &serde_json::Value) -> CString {
    CString::new(tensor["name"].as_str().unwrap_or_default()).unwrap_or_default()
}

/// A row of an output of TYPE_FP32, the only type that the benchmark's models answer.
fn output(tensor: &serde_json::Value) -> Output {
    let number = |dim: &serde_json::Value| dim.as_i64().or_else(|| dim.as_str()?.parse().ok());
    let dims: Vec<i64> = [1].into_iter().chain(tensors(&tensor["dims"]).filter_map(number)).collect();
    let bytes = dims.iter().product::<i64>() as usize * 4;
    Output { name: name(tensor), data_type: triton_sys::TRITONSERVER_TYPE_FP32, dims, bytes }
}
