//! One run of the model over a batch, in buffers of ours.
//!
//! Rules: an input or output whose dimensions are known but for the batch keeps one buffer and one tensor per batch
//! size, so a steady step makes nothing; inputs of other shapes get a tensor when the shape changes, outputs of open
//! shape are allocated by ONNX Runtime. Inputs and outputs never share memory, so a failed run leaves its inputs (and
//! with them every state) as they were.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use smallvec::SmallVec;

use super::open::{Session, SessionError};
use super::value::{self, Value};
use crate::memory::{Buffer, OutOfMemory, Varying};
use crate::tensor::{DataType, element_count};

/// What a step feeds and fetches.
#[derive(Clone, Debug, Default)]
pub struct StepSpec {
    /// Each input that is fed.
    pub inputs: Vec<InputSpec>,
    /// Each output that is fetched.
    pub outputs: Vec<OutputSpec>,
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

    /// Makes ready for `rows` rows of `dims` (whose batch axis is ignored). Contents are undefined when the shape
    /// differs from the last one.
    fn shape(&mut self, dims: &[i64], rows: usize) -> Result<(), OutOfMemory> {
        let is_batch = |axis: usize| Some(axis) == self.batch_axis;
        let known = self.dims.len() == dims.len()
            && self.dims.iter().zip(dims).enumerate().all(|(axis, (old, new))| old == new || is_batch(axis));
        if !known {
            self.dims = dims.to_vec();
            self.by_rows.clear();
        }
        if let Some(axis) = self.batch_axis {
            self.dims[axis] = rows as i64;
        }
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        self.bytes = bytes.ok_or(OutOfMemory { bytes: usize::MAX })?;
        if self.bytes > self.buffer.len() {
            self.by_rows.clear();
            let bytes = self.bytes.checked_next_power_of_two().ok_or(OutOfMemory { bytes: self.bytes })?;
            self.buffer = Buffer::new(bytes)?;
        }
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
    /// The tensor of the next run, for strings.
    strings: Option<Value>,
    /// The next run is without it.
    omitted: bool,
}

struct Output {
    name: CString,
    tensors: Tensors,
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
        let inputs = spec.inputs.iter().map(|input| {
            let tensors = Tensors::new(input.data_type, input.batch_axis)?;
            Ok(Input { name: c_name(&input.name)?, tensors, strings: None, omitted: false })
        });
        let inputs = inputs.collect::<Result<Vec<_>, SessionError>>()?;
        let outputs = spec.outputs.iter().map(|output| {
            let tensors = Tensors::new(output.data_type, output.batch_axis)?;
            Ok(Output {
                name: c_name(&output.name)?,
                tensors,
                dims: output.dims.clone(),
                expected: None,
                made: None,
                strings: Vec::new(),
            })
        });
        let outputs = outputs.collect::<Result<Vec<_>, SessionError>>()?;
        Ok(Self {
            session,
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

    /// Runs the model over what the inputs hold, and over `lent` tensors in the place of some.
    pub fn run(&mut self, rows: usize, lent: &[Lent]) -> Result<(), SessionError> {
        let expects = self.outputs.iter().any(|output| output.expected.is_some());
        let ran = self.run_once(rows, lent);
        if ran.is_ok() || !expects {
            return ran;
        }
        self.outputs.iter_mut().for_each(|output| output.expected = None);
        self.run_once(rows, lent)
    }

    fn run_once(&mut self, rows: usize, lent: &[Lent]) -> Result<(), SessionError> {
        let lent = lent.iter().map(|lent| lent.value(&self.inputs)).collect::<Result<SmallVec<[_; 2]>, _>>()?;
        self.input_names.clear();
        self.input_values.clear();
        for (index, input) in self.inputs.iter_mut().enumerate().filter(|(_, input)| !input.omitted) {
            let lent = lent.iter().find(|(of, _)| *of == index);
            let value = match (lent, &input.strings) {
                (Some((_, lent)), _) => lent.as_ptr(),
                (_, Some(strings)) => strings.as_ptr(),
                _ => input.tensors.value().map_err(|why| tensor_error(&input.name, why))?,
            };
            self.input_names.push(input.name.as_ptr());
            self.input_values.push(value);
        }
        self.output_values.clear();
        for output in &mut self.outputs {
            output.made = None;
            self.output_values.push(output.prepare(rows)?);
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
        Ok(())
    }

    /// An output of the last run, which must have succeeded.
    pub fn output(&self, index: usize) -> Result<OutputView<'_>, SessionError> {
        let output = &self.outputs[index];
        let (dims, bytes) = (output.tensors.dims.as_slice(), output.tensors.bytes);
        let bytes = match &output.made {
            None => &output.tensors.buffer.bytes()[..bytes],
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

fn tensor_error(name: &CString, why: String) -> SessionError {
    SessionError::Tensor { name: name.to_string_lossy().into_owned(), why }
}

fn c_name(name: &str) -> Result<CString, SessionError> {
    CString::new(name)
        .map_err(|_| SessionError::Unsupported { name: name.to_owned(), what: "a name with a NUL".to_owned() })
}
