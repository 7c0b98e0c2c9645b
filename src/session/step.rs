//! One run of the model over a batch, in buffers of ours.
//!
//! Rules: an input or output whose dimensions are known but for the batch keeps one buffer and one tensor per batch
//! size, so a steady step makes nothing; inputs of other shapes get a tensor when the shape changes, outputs of open
//! shape are allocated by ONNX Runtime. States of fixed size lie in batch buffers, any two of which can be the two ends of
//! a run; which state lies where is said elsewhere ([`crate::state::residency`]). Inputs and outputs never share memory, so a failed run leaves its inputs (and
//! with them every state) as they were.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use smallvec::SmallVec;

use super::open::{Session, SessionError};
use super::value::{self, Value};
use crate::memory::{Buffer, OutOfMemory, Varying, rows};
use crate::tensor::{DataType, RowLayout, element_count};

/// What a step feeds and fetches.
#[derive(Clone, Debug, Default)]
pub struct StepSpec {
    /// Each input that is fed.
    pub inputs: Vec<InputSpec>,
    /// Each output that is fetched.
    pub outputs: Vec<OutputSpec>,
    /// The states that batch buffers hold.
    pub states: Vec<StateSpec>,
    /// Input and output of the states whose tensors may stay as ONNX Runtime makes them.
    pub growing: Vec<(usize, usize)>,
    /// Most rows of a run.
    pub most_rows: usize,
}

/// An input of a step.
#[derive(Clone, Debug)]
pub struct InputSpec {
    /// Name in the model.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows; `None` if the tensor is the same for every batch.
    pub batch_axis: Option<usize>,
}

/// An output of a step.
#[derive(Clone, Debug)]
pub struct OutputSpec {
    /// Name in the model.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// Dimensions, where all are known but the batch axis; `None` lets ONNX Runtime say.
    pub dims: Option<Vec<i64>>,
}

/// A state whose rows all have the same dimensions: an output that becomes an input.
#[derive(Clone, Debug)]
pub struct StateSpec {
    /// Index of the input.
    pub input: usize,
    /// Index of the output.
    pub output: usize,
    /// Dimensions of a row, with 1 for the batch axis.
    pub dims: Vec<i64>,
}

/// What a run is over.
#[derive(Clone, Copy, Default)]
pub struct Run<'a> {
    /// Number of rows.
    pub rows: usize,
    /// The batch buffer that states are read from.
    pub from: usize,
    /// The batch buffer that states are written to.
    pub into: usize,
    /// Growing states are read from the tensors that were kept.
    pub kept: bool,
    /// Tensors in the place of some inputs.
    pub lent: &'a [Lent<'a>],
}

/// A tensor that ONNX Runtime made.
struct Kept {
    value: Value,
    dims: Vec<i64>,
    bytes: usize,
}

/// A row in a batch buffer.
#[derive(Clone, Copy, Debug)]
pub struct RowAt {
    /// Which batch buffer.
    pub buffer: usize,
    /// Which row of it.
    pub position: usize,
    /// Rows that its bytes are laid out for.
    pub rows: usize,
}

/// An output after a run.
pub struct OutputView<'a> {
    /// Dimensions, the number of rows among them.
    pub dims: &'a [i64],
    /// Row-major elements; none for strings.
    pub bytes: &'a [u8],
    /// Row-major elements, for strings.
    pub strings: &'a [Vec<u8>],
}

/// A tensor that stays where it is for a run.
pub struct Lent<'a> {
    /// Index of the input.
    pub input: usize,
    /// Which state it is, to those who lend it.
    pub state: usize,
    /// Dimensions.
    pub dims: &'a [i64],
    /// Row-major elements.
    pub bytes: &'a [u8],
}

impl Lent<'_> {
    fn value(&self, inputs: &[Input]) -> Result<(usize, Value), SessionError> {
        let input = &inputs[self.input];
        let wanted = element_count(self.dims).and_then(|count| count.checked_mul(input.tensors.data_type.byte_size()?));
        if wanted != Some(self.bytes.len()) {
            return Err(tensor_error(&input.name, format!("{} bytes do not make {:?}", self.bytes.len(), self.dims)));
        }
        // SAFETY: as many bytes as the dimensions say, borrowed for longer than the run that the value is made for. ONNX
        // Runtime does not write to inputs.
        let value = unsafe {
            let data = self.bytes.as_ptr().cast_mut();
            Value::over(data, self.bytes.len(), self.dims, input.tensors.data_type)
        };
        value.map(|value| (self.input, value)).map_err(|why| tensor_error(&input.name, why))
    }
}

/// Tensors over one buffer, one for each number of rows that was asked for.
struct Tensors {
    data_type: DataType,
    batch_axis: Option<usize>,
    /// Dimensions, with the number of rows of the last use.
    dims: Vec<i64>,
    bytes: usize,
    /// Over the buffer, so they go before it.
    by_rows: Vec<Option<Value>>,
    buffer: Buffer,
}

impl Tensors {
    fn new(data_type: DataType, batch_axis: Option<usize>) -> Result<Self, OutOfMemory> {
        Ok(Self { data_type, batch_axis, dims: Vec::new(), bytes: 0, buffer: Buffer::new(0)?, by_rows: Vec::new() })
    }

    /// With a buffer for up to `rows` rows of `dims`, which is never replaced.
    fn for_rows(
        data_type: DataType,
        batch_axis: Option<usize>,
        dims: &[i64],
        rows: usize,
    ) -> Result<Self, OutOfMemory> {
        let mut tensors = Self::new(data_type, batch_axis)?;
        tensors.set_dims(dims, rows)?;
        tensors.buffer = Buffer::new(tensors.bytes)?;
        Ok(tensors)
    }

    /// Makes ready for `rows` rows of `dims` (whose batch axis is ignored). Contents are undefined when the shape
    /// differs from the last one.
    fn shape(&mut self, dims: &[i64], rows: usize) -> Result<(), OutOfMemory> {
        self.set_dims(dims, rows)?;
        if self.bytes > self.buffer.len() {
            self.by_rows.clear();
            let bytes = self.bytes.checked_next_power_of_two().ok_or(OutOfMemory { bytes: self.bytes })?;
            self.buffer = Buffer::new(bytes)?;
        }
        Ok(())
    }

    fn set_dims(&mut self, dims: &[i64], rows: usize) -> Result<(), OutOfMemory> {
        let is_batch = |axis: usize| Some(axis) == self.batch_axis;
        let known = self.dims.len() == dims.len()
            && self.dims.iter().zip(dims).enumerate().all(|(axis, (old, new))| old == new || is_batch(axis));
        if !known {
            self.dims = dims.to_vec();
            self.by_rows.clear();
        }
        self.set_rows(rows)
    }

    fn set_rows(&mut self, rows: usize) -> Result<(), OutOfMemory> {
        if let Some(axis) = self.batch_axis {
            self.dims[axis] = rows as i64;
        }
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        self.bytes = bytes.ok_or(OutOfMemory { bytes: usize::MAX })?;
        Ok(())
    }

    /// The tensor over the buffer in the current shape.
    fn value(&mut self) -> Result<*mut ort::sys::OrtValue, String> {
        let rows = self.batch_axis.map_or(0, |axis| self.dims[axis] as usize);
        if self.by_rows.len() <= rows {
            self.by_rows.resize_with(rows + 1, || None);
        }
        let slot = &mut self.by_rows[rows];
        if let Some(value) = slot {
            return Ok(value.as_ptr());
        }
        // SAFETY: `shape` made the buffer large enough for these dimensions; the values are dropped before the buffer
        // is replaced, and with it.
        let value = unsafe { Value::over(self.buffer.as_ptr(), self.bytes, &self.dims, self.data_type) }?;
        Ok(slot.insert(value).as_ptr())
    }
}

struct Input {
    name: CString,
    tensors: Tensors,
    /// Which state of the batch buffers it is.
    state: Option<usize>,
    /// Which of the growing states it is.
    growing: Option<usize>,
    /// The tensor of the next run, for strings.
    strings: Option<Value>,
    /// The next run is without it.
    omitted: bool,
}

struct Output {
    name: CString,
    tensors: Tensors,
    /// Which state of the batch buffers it is.
    state: Option<usize>,
    /// As in [`OutputSpec`].
    dims: Option<Vec<i64>>,
    /// What the next run is expected to give, where the model does not say.
    expected: Option<Vec<i64>>,
    /// What ONNX Runtime made in the last run, where it decides the shape.
    made: Option<Value>,
    strings: Vec<Vec<u8>>,
}

/// The buffers of one instance, and the call. Fill the inputs, run, read the outputs.
pub struct Step {
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    states: Vec<StateSpec>,
    most_rows: usize,
    /// Tensors of each state, in each batch buffer.
    batch_buffers: Vec<Vec<Tensors>>,
    /// The batch buffer that the last run wrote.
    written: usize,
    /// Outputs of the growing states.
    growing: Vec<usize>,
    /// What an earlier run made of them.
    kept: Vec<Kept>,
    input_names: Vec<*const std::ffi::c_char>,
    output_names: Vec<*const std::ffi::c_char>,
    input_values: Vec<*const ort::sys::OrtValue>,
    output_values: Vec<*mut ort::sys::OrtValue>,
    /// Last: outputs that it made go back to its allocator.
    session: Arc<Session>,
}

// SAFETY: the raw pointers point into CStrings and Values that the Step owns and moves along with.
unsafe impl Send for Step {}

impl Step {
    /// Buffers for a model.
    pub fn new(session: Arc<Session>, spec: &StepSpec) -> Result<Self, SessionError> {
        let inputs = spec.inputs.iter().enumerate().map(|(index, input)| {
            let tensors = Tensors::new(input.data_type, input.batch_axis)?;
            let state = spec.states.iter().position(|state| state.input == index);
            let growing = spec.growing.iter().position(|&(input, _)| input == index);
            Ok(Input { name: c_name(&input.name)?, tensors, state, growing, strings: None, omitted: false })
        });
        let inputs = inputs.collect::<Result<Vec<_>, SessionError>>()?;
        let outputs = spec.outputs.iter().enumerate().map(|(index, output)| {
            let tensors = Tensors::new(output.data_type, output.batch_axis)?;
            Ok(Output {
                name: c_name(&output.name)?,
                tensors,
                state: spec.states.iter().position(|state| state.output == index),
                dims: output.dims.clone(),
                expected: None,
                made: None,
                strings: Vec::new(),
            })
        });
        let outputs = outputs.collect::<Result<Vec<_>, SessionError>>()?;
        Ok(Self {
            session,
            states: spec.states.clone(),
            most_rows: spec.most_rows,
            batch_buffers: Vec::new(),
            written: 0,
            growing: spec.growing.iter().map(|&(_, output)| output).collect(),
            kept: Vec::new(),
            input_names: Vec::with_capacity(inputs.len()),
            output_names: outputs.iter().map(|output| output.name.as_ptr()).collect(),
            input_values: Vec::with_capacity(inputs.len()),
            output_values: Vec::with_capacity(outputs.len()),
            inputs,
            outputs,
        })
    }

    /// The bytes of an input for `rows` rows of `dims` (the batch axis's value is ignored), to fill.
    pub fn input(&mut self, index: usize, dims: &[i64], rows: usize) -> Result<&mut [u8], OutOfMemory> {
        let Input { tensors, omitted, .. } = &mut self.inputs[index];
        *omitted = false;
        tensors.shape(dims, rows)?;
        let bytes = tensors.bytes;
        Ok(&mut tensors.buffer.bytes_mut()[..bytes])
    }

    /// The bytes of state number `state` in a batch buffer, laid out for `rows` rows.
    pub fn state(&mut self, buffer: usize, state: usize, rows: usize) -> Result<&mut [u8], OutOfMemory> {
        self.make_batch_buffer(buffer)?;
        let tensors = &mut self.batch_buffers[buffer][state];
        tensors.set_rows(rows)?;
        let bytes = tensors.bytes;
        Ok(&mut tensors.buffer.bytes_mut()[..bytes])
    }

    /// Copies a row of state number `state` from one place to another.
    pub fn copy_state(&mut self, state: usize, layout: RowLayout, from: RowAt, to: RowAt) -> Result<(), OutOfMemory> {
        self.make_batch_buffer(from.buffer.max(to.buffer))?;
        if from.buffer == to.buffer {
            let bytes = self.batch_buffers[to.buffer][state].buffer.bytes_mut();
            rows::shift(layout, bytes, (from.position, from.rows), (to.position, to.rows));
        } else if let Ok([source, target]) = self.batch_buffers.get_disjoint_mut([from.buffer, to.buffer]) {
            let (source, target) = (source[state].buffer.bytes(), target[state].buffer.bytes_mut());
            rows::transfer(layout, source, (from.position, from.rows), target, (to.position, to.rows));
        }
        Ok(())
    }

    /// All bytes of state number `state` in a batch buffer.
    pub fn state_bytes(&mut self, buffer: usize, state: usize) -> &mut [u8] {
        self.batch_buffers[buffer][state].buffer.bytes_mut()
    }

    fn make_batch_buffer(&mut self, buffer: usize) -> Result<(), OutOfMemory> {
        while self.batch_buffers.len() <= buffer {
            let tensors = self.states.iter().map(|state| {
                let Tensors { data_type, batch_axis, .. } = self.inputs[state.input].tensors;
                Tensors::for_rows(data_type, batch_axis, &state.dims, self.most_rows)
            });
            let tensors = tensors.collect::<Result<_, _>>()?;
            self.batch_buffers.push(tensors);
        }
        Ok(())
    }

    /// Whether ONNX Runtime made the tensors of all growing states in the last run.
    pub fn made_growing(&self) -> bool {
        self.growing.iter().all(|&output| self.outputs[output].made.is_some())
    }

    /// Keeps the tensors of the growing states that the last run made, in the place of earlier ones.
    pub fn keep_growing(&mut self) {
        let Self { growing, outputs, kept, .. } = self;
        kept.clear();
        kept.extend(growing.iter().filter_map(|&output| {
            let Output { made, tensors, .. } = &mut outputs[output];
            Some(Kept { value: made.take()?, dims: tensors.dims.clone(), bytes: tensors.bytes })
        }));
    }

    /// Growing state number `state` as it was kept: dimensions of the batch, and bytes.
    pub fn kept_growing(&self, state: usize) -> Option<(&[i64], &[u8])> {
        let Kept { value, dims, bytes } = self.kept.get(state)?;
        // SAFETY: the size is that of the dimensions; sessions here run on the CPU.
        Some((dims, unsafe { value.bytes(*bytes) }.ok()?))
    }

    /// Gives the tensors back that were kept.
    pub fn drop_growing(&mut self) {
        self.kept.clear();
    }

    /// Forgets what was said of the last run.
    pub fn begin(&mut self) {
        self.outputs.iter_mut().for_each(|output| output.expected = None);
    }

    /// Leaves an input out of the next run: the model has a value of its own.
    pub fn omit(&mut self, index: usize) {
        self.inputs[index].omitted = true;
    }

    /// Dimensions and bytes of an input as it was filled for the last run.
    pub fn filled(&self, index: usize) -> (&[i64], &[u8]) {
        let tensors = &self.inputs[index].tensors;
        (&tensors.dims, &tensors.buffer.bytes()[..tensors.bytes])
    }

    /// Sets the elements of an input of strings, for `rows` rows of `dims` (the batch axis's value is ignored).
    pub fn set_strings(
        &mut self,
        index: usize,
        dims: &[i64],
        rows: usize,
        strings: &[Vec<u8>],
    ) -> Result<(), SessionError> {
        let input = &mut self.inputs[index];
        let mut dims = dims.to_vec();
        if let Some(axis) = input.tensors.batch_axis {
            dims[axis] = rows as i64;
        }
        let made = Value::of_strings(strings, &dims).map_err(|why| tensor_error(&input.name, why))?;
        (input.strings, input.omitted) = (Some(made), false);
        Ok(())
    }

    /// Lets the next run write an output of unknown shape, which is expected to be this, into a buffer of ours. If it
    /// turns out otherwise, the run is made again without.
    pub fn expect_output(&mut self, index: usize, dims: Vec<i64>) {
        self.outputs[index].expected = Some(dims);
    }

    /// Lets a state take the buffer that the last run wrote an output to, and have the state's for it. Returns whether
    /// there is one: ONNX Runtime may have made the output itself.
    pub fn exchange_output(&mut self, index: usize, state: &mut Varying) -> bool {
        let Output { tensors, expected, .. } = &mut self.outputs[index];
        let is_ours = expected.take().is_some();
        if is_ours {
            // Over the buffer that goes.
            tensors.by_rows.clear();
            state.exchange(&tensors.dims, tensors.bytes, &mut tensors.buffer);
        }
        is_ours
    }

    /// Whether the last run wrote an output that was expected into a buffer of ours.
    pub fn has_expected(&self, index: usize) -> bool {
        self.outputs[index].expected.is_some()
    }

    /// Runs the model over what the inputs, the batch buffer and the lent tensors hold.
    pub fn run(&mut self, run: Run) -> Result<(), SessionError> {
        self.make_batch_buffer(run.from.max(run.into))?;
        let expects = self.outputs.iter().any(|output| output.expected.is_some());
        let ran = self.run_once(run);
        if ran.is_ok() || !expects {
            return ran;
        }
        self.outputs.iter_mut().for_each(|output| output.expected = None);
        self.run_once(run)
    }

    fn run_once(&mut self, run: Run) -> Result<(), SessionError> {
        let Run { rows, from, into, kept, lent } = run;
        let lent = lent.iter().map(|lent| lent.value(&self.inputs)).collect::<Result<SmallVec<[_; 2]>, _>>()?;
        self.input_names.clear();
        self.input_values.clear();
        for (index, input) in self.inputs.iter_mut().enumerate().filter(|(_, input)| !input.omitted) {
            let lent = lent.iter().find(|(of, _)| *of == index);
            let kept = input.growing.filter(|_| kept).and_then(|state| self.kept.get(state));
            let value = match (lent, kept, &input.strings, input.state) {
                (Some((_, lent)), ..) => lent.as_ptr(),
                (_, Some(kept), ..) => kept.value.as_ptr(),
                (.., Some(strings), _) => strings.as_ptr(),
                (.., Some(state)) => state_value(&mut self.batch_buffers[from][state], rows, &input.name)?,
                _ => input.tensors.value().map_err(|why| tensor_error(&input.name, why))?,
            };
            self.input_names.push(input.name.as_ptr());
            self.input_values.push(value);
        }
        self.output_values.clear();
        for output in &mut self.outputs {
            output.made = None;
            self.output_values.push(match output.state {
                Some(state) => state_value(&mut self.batch_buffers[into][state], rows, &output.name)?,
                None => output.prepare(rows)?,
            });
        }
        // SAFETY: names and values are arrays of live objects, as many as said; every value is over a buffer of its
        // own, so nothing that is written is read; ONNX Runtime allocates the outputs that are null.
        let status = unsafe {
            (ort::api().Run)(
                self.session.as_ptr(),
                self.session.run_options(),
                self.input_names.as_ptr(),
                self.input_values.as_ptr(),
                self.input_values.len(),
                self.output_names.as_ptr(),
                self.output_values.len(),
                self.output_values.as_mut_ptr(),
            )
        };
        // SAFETY: the status comes from Run and is used once.
        unsafe { value::check(status) }.map_err(SessionError::Run)?;
        for (output, value) in self.outputs.iter_mut().zip(&self.output_values) {
            output.settle(*value)?;
        }
        self.written = into;
        Ok(())
    }

    /// An output of the last run, which must have succeeded.
    pub fn output(&self, index: usize) -> Result<OutputView<'_>, SessionError> {
        let output = &self.outputs[index];
        let tensors = match output.state {
            Some(state) => &self.batch_buffers[self.written][state],
            None => &output.tensors,
        };
        let (dims, bytes) = (tensors.dims.as_slice(), tensors.bytes);
        let bytes = match &output.made {
            None => &tensors.buffer.bytes()[..bytes],
            // SAFETY: `settle` computed the size from the tensor's own dimensions; sessions here run on the CPU.
            Some(value) => unsafe { value.bytes(bytes) }.map_err(|why| tensor_error(&output.name, why))?,
        };
        Ok(OutputView { dims, bytes, strings: &output.strings })
    }
}

impl Output {
    /// The tensor to write to, or null for ONNX Runtime to make one.
    fn prepare(&mut self, rows: usize) -> Result<*mut ort::sys::OrtValue, SessionError> {
        let Some(dims) = self.dims.as_ref().or(self.expected.as_ref()) else { return Ok(ptr::null_mut()) };
        self.tensors.shape(dims, rows)?;
        self.tensors.value().map_err(|why| tensor_error(&self.name, why))
    }

    /// Notes the shape of a tensor that ONNX Runtime made.
    fn settle(&mut self, value: *mut ort::sys::OrtValue) -> Result<(), SessionError> {
        if self.dims.is_some() || self.expected.is_some() {
            return Ok(());
        }
        // SAFETY: `prepare` passed null, so Run made this tensor and left it to us.
        self.made = unsafe { Value::from_run(value) };
        let failed = |why| tensor_error(&self.name, why);
        let made = self.made.as_ref().ok_or_else(|| failed("the run made none".to_owned()))?;
        // Tensors over our buffer have other dimensions.
        self.tensors.by_rows.clear();
        self.tensors.dims = made.dims().map_err(failed)?;
        if self.tensors.data_type == DataType::Bytes {
            let count = element_count(&self.tensors.dims).ok_or_else(|| failed("its size overflows".to_owned()))?;
            self.strings = made.strings(count).map_err(failed)?;
            return Ok(());
        }
        let bytes =
            element_count(&self.tensors.dims).and_then(|count| count.checked_mul(self.tensors.data_type.byte_size()?));
        self.tensors.bytes = bytes.ok_or_else(|| failed("its size overflows".to_owned()))?;
        Ok(())
    }
}

fn state_value(tensors: &mut Tensors, rows: usize, name: &CString) -> Result<*mut ort::sys::OrtValue, SessionError> {
    tensors.set_rows(rows)?;
    tensors.value().map_err(|why| tensor_error(name, why))
}

fn tensor_error(name: &CString, why: String) -> SessionError {
    SessionError::Tensor { name: name.to_string_lossy().into_owned(), why }
}

fn c_name(name: &str) -> Result<CString, SessionError> {
    CString::new(name)
        .map_err(|_| SessionError::Unsupported { name: name.to_owned(), what: "a name with a NUL".to_owned() })
}
