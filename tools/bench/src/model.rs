//! The model that is timed: what a JSON file says of it, and ONNX Runtime alone with it, the floor.

use std::ffi::{CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use clap::Args;
use memmap2::{Advice, MmapMut};
use ort::AsPointer;
use ort::environment::Environment;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::sys::{ONNXTensorElementDataType, OrtAllocatorType, OrtMemType, OrtMemoryInfo, OrtStatusPtr, OrtValue};
use serde::Deserialize;

#[derive(Args)]
pub struct Model {
    /// Its name.
    #[arg(long)]
    pub model: String,
    /// What it takes and gives (JSON).
    #[arg(long)]
    spec: PathBuf,
}

impl Model {
    pub fn spec(&self) -> Spec {
        Spec::read(&self.spec)
    }
}

/// A model; all of its tensors are TYPE_FP32.
#[derive(Clone, Debug, Deserialize)]
pub struct Spec {
    pub onnx: PathBuf,
    pub inputs: Vec<Tensor>,
    pub outputs: Vec<Tensor>,
    pub states: Vec<State>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Tensor {
    pub name: String,
    /// Dims of a row, without the batch, which comes first.
    pub dims: Vec<i64>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct State {
    pub input: String,
    pub output: String,
    /// Dims in the model, with -1 for the batch and, where it grows, -2 for the steps.
    pub dims: Vec<i64>,
}

impl Spec {
    pub fn read(path: &Path) -> Self {
        let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Bytes of new states that a sequence's steps must write.
    pub fn state_bytes_written(&self, steps: usize) -> u64 {
        let bytes = |step: usize| self.states.iter().map(move |state| state.bytes(step));
        (1..=steps).flat_map(bytes).sum()
    }

    pub fn grows(&self) -> bool {
        self.states.iter().any(|state| state.dims.contains(&-2))
    }
}

impl State {
    /// Dims for a number of rows, and of steps where it grows.
    pub fn dims_of(&self, rows: usize, steps: usize) -> Vec<i64> {
        let dim = |&dim: &i64| match dim {
            -1 => rows as i64,
            -2 => steps as i64,
            dim => dim,
        };
        self.dims.iter().map(dim).collect()
    }

    /// Bytes of a row after so many steps.
    fn bytes(&self, steps: usize) -> u64 {
        4 * self.dims_of(1, steps).into_iter().product::<i64>() as u64
    }
}

/// ONNX Runtime alone. The batch is assembled already, the tensors are made once, and the two ends of a state change
/// places from step to step. Sets of sequences that take turns have tensors of their own.
pub struct Raw {
    session: Session,
    /// What the pointers below point to.
    _names: Vec<CString>,
    input_names: Vec<*const c_char>,
    output_names: Vec<*const c_char>,
    inputs: Vec<OrtTensor>,
    outputs: Vec<OrtTensor>,
    /// Each state's tensors: one for each set of sequences, and the one that is written.
    states: Vec<Vec<OrtTensor>>,
    /// Sets of sequences that take turns, and whose turn it is.
    sets: usize,
    turn: usize,
    grows: bool,
    /// Arrays of Run, kept so that a step allocates nothing.
    given: Vec<*const OrtValue>,
    taken: Vec<*mut OrtValue>,
}

struct OrtTensor {
    value: *mut OrtValue,
    /// What the value lies over, if it is ours.
    _data: Option<MmapMut>,
}

/// Buffers of this size and more ask for pages of 2 MiB, as the backend's do: a floor with smaller ones would not be
/// one.
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

impl OrtTensor {
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

impl Drop for OrtTensor {
    fn drop(&mut self) {
        if !self.value.is_null() {
            // SAFETY: ours, and not used again.
            unsafe { (ort::api().ReleaseValue)(self.value) };
        }
    }
}

impl Raw {
    /// Opens the model as the backend does by default, on one thread, for batches of `rows`. So many `sets` of
    /// sequences take turns.
    pub fn new(environment: &Environment, spec: &Spec, rows: usize, sets: usize) -> Self {
        let session = open(environment, &spec.onnx);
        let mut names = Vec::new();
        let mut name = |name: &str| {
            names.push(CString::new(name).expect("tensors have no NUL in their names"));
            names[names.len() - 1].as_ptr()
        };
        let filled = |state: &State| OrtTensor::new(&state.dims_of(rows, 0));
        let tensors = |state: &State| -> Vec<OrtTensor> {
            let written = if spec.grows() { OrtTensor::none() } else { filled(state) };
            (0..sets).map(|_| filled(state)).chain([written]).collect()
        };
        let batch = |tensor: &Tensor| OrtTensor::new(&[&[rows as i64], tensor.dims.as_slice()].concat());
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
                state[read_at] = OrtTensor { value: *value, _data: None };
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

#[cfg(test)]
mod tests {
    use super::*;

    const GROWING: &str = r#"{
        "onnx": "growing.onnx",
        "inputs": [ { "name": "X", "dims": [1, 64] } ],
        "outputs": [ { "name": "Y", "dims": [64] } ],
        "states": [ { "input": "IN", "output": "OUT", "dims": [-1, -2, 64] } ]
    }"#;

    fn spec(text: &str) -> Spec {
        serde_json::from_str(text).expect("a spec")
    }

    #[test]
    fn a_state_has_its_rows_and_steps_where_its_dims_say() {
        let spec = spec(GROWING);
        assert!(spec.grows());
        assert_eq!(spec.states[0].dims_of(16, 7), [16, 7, 64]);
    }

    #[test]
    fn a_growing_state_is_written_anew_in_each_step() {
        assert_eq!(spec(GROWING).state_bytes_written(3), (1 + 2 + 3) * 256);
    }

    #[test]
    fn a_state_of_fixed_size_does_not_grow() {
        let spec = spec(&GROWING.replace("[-1, -2, 64]", "[2, -1, 512]"));
        assert!(!spec.grows());
        assert_eq!(spec.states[0].dims_of(16, 7), [2, 16, 512]);
        assert_eq!(spec.state_bytes_written(3), 3 * 4096);
    }
}
