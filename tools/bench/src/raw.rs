//! ONNX Runtime alone: the floor. The batch is assembled already, the tensors are made once, and the two ends of a state
//! change places from step to step.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::ptr;

use ort::AsPointer;
use ort::environment::Environment;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::sys::{ONNXTensorElementDataType, OrtAllocatorType, OrtMemType, OrtMemoryInfo, OrtStatusPtr, OrtValue};

use crate::spec::{Spec, State};

/// A model with prebuilt tensors for one number of rows.
pub struct Raw {
    session: Session,
    input_names: Vec<CString>,
    output_names: Vec<CString>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    /// Each state's tensors: the one that is read and the one that is written.
    states: Vec<[Tensor; 2]>,
    grows: bool,
}

struct Tensor {
    value: *mut OrtValue,
    /// What the value lies over, if it is ours.
    _data: Vec<f32>,
}

impl Tensor {
    fn new(dims: &[i64]) -> Self {
        let count = dims.iter().product::<i64>() as usize;
        let mut data: Vec<f32> = (0..count.max(1)).map(|i| (i % 7) as f32 / 16.0).collect();
        let mut value = ptr::null_mut();
        let element = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        // SAFETY: the data lives as long as the value; dims are read during the call.
        unsafe {
            let create = ort::api().CreateTensorWithDataAsOrtValue;
            let (data, bytes) = (data.as_mut_ptr().cast::<c_void>(), 4 * count);
            check(create(memory(), data, bytes, dims.as_ptr(), dims.len(), element, &mut value));
        }
        Self { value, _data: data }
    }

    fn none() -> Self {
        Self { value: ptr::null_mut(), _data: Vec::new() }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if !self.value.is_null() {
            // SAFETY: ours, and not used again.
            unsafe { (ort::api().ReleaseValue)(self.value) };
        }
    }
}

impl Raw {
    /// Opens the model as the backend does by default, on one thread, for batches of `rows`.
    pub fn new(environment: &Environment, spec: &Spec, rows: usize) -> Self {
        let session = open(environment, &spec.onnx);
        let name = |name: &str| CString::new(name).expect("tensors have no NUL in their names");
        let ends = |state: &State| match spec.grows() {
            true => [Tensor::new(&state.dims_of(rows, 0)), Tensor::none()],
            false => [Tensor::new(&state.dims_of(rows, 0)), Tensor::new(&state.dims_of(rows, 0))],
        };
        let batch = |tensor: &crate::spec::Tensor| Tensor::new(&[&[rows as i64], tensor.dims.as_slice()].concat());
        let inputs = spec.inputs.iter().map(|tensor| &tensor.name).chain(spec.states.iter().map(|state| &state.input));
        let outputs =
            spec.outputs.iter().map(|tensor| &tensor.name).chain(spec.states.iter().map(|state| &state.output));
        Self {
            session,
            input_names: inputs.map(|tensor| name(tensor)).collect(),
            output_names: outputs.map(|tensor| name(tensor)).collect(),
            inputs: spec.inputs.iter().map(batch).collect(),
            outputs: spec.outputs.iter().map(batch).collect(),
            states: spec.states.iter().map(ends).collect(),
            grows: spec.grows(),
        }
    }

    /// Runs a step.
    pub fn step(&mut self) {
        let pointers = |names: &[CString]| names.iter().map(|name| name.as_ptr()).collect::<Vec<*const c_char>>();
        let (input_names, output_names) = (pointers(&self.input_names), pointers(&self.output_names));
        let read = self.inputs.iter().chain(self.states.iter().map(|[read, _]| read));
        let inputs: Vec<*const OrtValue> = read.map(|tensor| tensor.value.cast_const()).collect();
        let written = self.outputs.iter().chain(self.states.iter().map(|[_, written]| written));
        let mut outputs: Vec<*mut OrtValue> = written.map(|tensor| tensor.value).collect();
        // SAFETY: arrays of live objects, as many as said; no value is read and written at once.
        unsafe {
            check((ort::api().Run)(
                self.session.ptr().cast_mut(),
                ptr::null(),
                input_names.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                output_names.as_ptr(),
                outputs.len(),
                outputs.as_mut_ptr(),
            ));
        }
        for (state, value) in self.states.iter_mut().zip(&outputs[self.outputs.len()..]) {
            if self.grows {
                state[0] = Tensor { value: *value, _data: Vec::new() };
            } else {
                state.swap(0, 1);
            }
        }
    }
}

fn open(environment: &Environment, onnx: &Path) -> Session {
    let text = |error: ort::Error<SessionBuilder>| error.message().to_owned();
    let builder = || -> Result<SessionBuilder, String> {
        let builder = Session::builder(environment).map_err(|error| error.message().to_owned())?;
        let builder = builder.with_intra_threads(1).map_err(text)?.with_inter_threads(1).map_err(text)?;
        builder.with_optimization_level(GraphOptimizationLevel::All).map_err(text)
    };
    let opened = builder().and_then(|mut builder| builder.commit_from_file(onnx).map_err(|error| error.to_string()));
    opened.unwrap_or_else(|error| panic!("{}: {error}", onnx.display()))
}

fn memory() -> *const OrtMemoryInfo {
    let mut info = ptr::null_mut();
    // SAFETY: plain creation; it stays for the life of the process.
    unsafe {
        let create = ort::api().CreateCpuMemoryInfo;
        check(create(OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault, &mut info));
    }
    info
}

fn check(status: OrtStatusPtr) {
    // SAFETY: from a function of ONNX Runtime, used once.
    if let Err(error) = unsafe { ort::Error::<()>::result_from_status(status) } {
        panic!("ONNX Runtime: {error}");
    }
}
