//! ONNX Runtime alone: the floor. The batch is assembled already, the tensors are made once, and the two ends of a state
//! change places from step to step. Sets of sequences that take turns have tensors of their own.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::ptr;

use memmap2::{Advice, MmapMut};
use ort::AsPointer;
use ort::environment::Environment;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::sys::{ONNXTensorElementDataType, OrtAllocatorType, OrtMemType, OrtMemoryInfo, OrtStatusPtr, OrtValue};

use crate::model::{Spec, State};

pub struct Raw {
    session: Session,
    /// What the pointers below point to.
    _names: Vec<CString>,
    input_names: Vec<*const c_char>,
    output_names: Vec<*const c_char>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    /// Each state's tensors: one for each set of sequences, and the one that is written.
    states: Vec<Vec<Tensor>>,
    /// Sets of sequences that take turns, and whose turn it is.
    sets: usize,
    turn: usize,
    grows: bool,
    /// Arrays of Run, kept so that a step allocates nothing.
    given: Vec<*const OrtValue>,
    taken: Vec<*mut OrtValue>,
}

struct Tensor {
    value: *mut OrtValue,
    /// What the value lies over, if it is ours.
    _data: Option<MmapMut>,
}

/// Buffers of this size and more ask for pages of 2 MiB, as the backend's do: a floor with smaller ones would not be one.
const HUGE_FROM: usize = 4 << 20;

/// Memory with small numbers in it.
fn filled(count: usize) -> MmapMut {
    let bytes = 4 * count.max(1);
    let mut pages = MmapMut::map_anon(bytes).unwrap_or_else(|error| panic!("{bytes} bytes: {error}"));
    if bytes >= HUGE_FROM {
        // Advice: where the system does not take it, pages are small, and the backend's, too.
        let _ = pages.advise(Advice::HugePage);
    }
    let numbers = (0..count).map(|i| (i % 7) as f32 / 16.0);
    pages.chunks_exact_mut(4).zip(numbers).for_each(|(bytes, number)| bytes.copy_from_slice(&number.to_ne_bytes()));
    pages
}

impl Tensor {
    fn new(dims: &[i64]) -> Self {
        let count = dims.iter().product::<i64>() as usize;
        let mut data = filled(count);
        let mut value = ptr::null_mut();
        let element = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        // SAFETY: the data lives as long as the value; dims are read during the call.
        unsafe {
            let create = ort::api().CreateTensorWithDataAsOrtValue;
            let (data, bytes) = (data.as_mut_ptr().cast::<c_void>(), 4 * count);
            check(create(memory(), data, bytes, dims.as_ptr(), dims.len(), element, &mut value));
        }
        Self { value, _data: Some(data) }
    }

    fn none() -> Self {
        Self { value: ptr::null_mut(), _data: None }
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
    /// Opens the model as the backend does by default, on one thread, for batches of `rows`. So many `sets` of sequences
    /// take turns.
    pub fn new(environment: &Environment, spec: &Spec, rows: usize, sets: usize) -> Self {
        let session = open(environment, &spec.onnx);
        let mut names = Vec::new();
        let mut name = |name: &str| {
            names.push(CString::new(name).expect("tensors have no NUL in their names"));
            names[names.len() - 1].as_ptr()
        };
        let filled = |state: &State| Tensor::new(&state.dims_of(rows, 0));
        let tensors = |state: &State| -> Vec<Tensor> {
            let written = if spec.grows() { Tensor::none() } else { filled(state) };
            (0..sets).map(|_| filled(state)).chain([written]).collect()
        };
        let batch = |tensor: &crate::model::Tensor| Tensor::new(&[&[rows as i64], tensor.dims.as_slice()].concat());
        let inputs = spec.inputs.iter().map(|tensor| &tensor.name).chain(spec.states.iter().map(|state| &state.input));
        let outputs =
            spec.outputs.iter().map(|tensor| &tensor.name).chain(spec.states.iter().map(|state| &state.output));
        let input_names = inputs.map(|tensor| name(tensor)).collect();
        let output_names = outputs.map(|tensor| name(tensor)).collect();
        Self {
            session,
            _names: names,
            input_names,
            output_names,
            inputs: spec.inputs.iter().map(batch).collect(),
            outputs: spec.outputs.iter().map(batch).collect(),
            states: spec.states.iter().map(tensors).collect(),
            sets,
            turn: 0,
            grows: spec.grows(),
            given: Vec::new(),
            taken: Vec::new(),
        }
    }

    pub fn step(&mut self) {
        let (read_at, written_at) = (self.turn, self.sets);
        let read = self.inputs.iter().chain(self.states.iter().map(|state| &state[read_at]));
        self.given.clear();
        self.given.extend(read.map(|tensor| tensor.value.cast_const()));
        let written = self.outputs.iter().chain(self.states.iter().map(|state| &state[written_at]));
        self.taken.clear();
        self.taken.extend(written.map(|tensor| tensor.value));
        // SAFETY: arrays of live objects, as many as said; no value is read and written at once.
        unsafe {
            check((ort::api().Run)(
                self.session.ptr().cast_mut(),
                ptr::null(),
                self.input_names.as_ptr(),
                self.given.as_ptr(),
                self.given.len(),
                self.output_names.as_ptr(),
                self.taken.len(),
                self.taken.as_mut_ptr(),
            ));
        }
        for (state, value) in self.states.iter_mut().zip(&self.taken[self.outputs.len()..]) {
            if self.grows {
                state[read_at] = Tensor { value: *value, _data: None };
            } else {
                state.swap(read_at, written_at);
            }
        }
        self.turn = (self.turn + 1) % self.sets;
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
