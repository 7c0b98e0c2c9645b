//! ONNX Runtime: the library and its environment, sessions, signatures, and the step, which runs a model over a batch.
//!
//! The `ort` crate loads the library, makes the environment and builds sessions; the step itself ([`Step`]) calls
//! `OrtApi::Run` with tensors made once over buffers of ours, because the safe layer would allocate on each call.
//! This is the only module that names `ort`. Not for: states. The caller knows what is in a tensor, and where that is
//! between runs.

mod allocator;
mod calls;
mod copier;
mod library;
mod open;
mod run;
mod tensors;
mod value;

use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

use gpu_rows::{DeviceMemory, Foreign};
use rows::copies;
use rows::strings::Strings;
use rows::tensor::{DataType, Part, StorageType};

use crate::binding::{InputSpec, StepSpec};
use crate::memory::{Bytes, BytesMut, MemoryError, PAGES_FROM, TensorMemory};
use calls::{Arguments, BoundRun, Graphs, TimeLimit};
pub use copier::Copier;
pub use library::{EnvironmentOptions, Library, LibraryError, LogLevel, SearchPath};
use open::RunOptions;
pub use open::{Provider, Session};
use tensors::check_part;
pub use tensors::{BatchTensor, MadeTensor, RowContent};
use value::MemoryKind;
pub use value::{OpenError, SessionError, Value};

/// The buffers of one instance, and the call. Fill the inputs, run, read the outputs.
///
/// Where the model runs on a device, the tensors are there: inputs are gathered in pinned host memory and copied over
/// before the run, and outputs that somebody wants to read are copied back behind it. The caller sees the same bytes
/// and calls either way.
///
/// Rules:
/// - An input or output of which only the batch dimension is open keeps one buffer and one tensor for each batch size.
///   So a step of a known batch size allocates nothing.
/// - Any other input gets a new tensor when its shape changes. Any other output is allocated by ONNX Runtime.
/// - The caller can give a run its own tensor for any input or output.
/// - Inputs and outputs never share memory, so a failed run leaves its inputs as they were.
pub struct Step {
    copier: Copier,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    graphs: Option<Graphs>,
    /// For outputs that ONNX Runtime makes on a device.
    bound_run: Option<BoundRun>,
    arguments: Arguments,
    /// ONNX Runtime may read an input that is on the GPU on the host. It fetches it without regard to our stream.
    waits_for_inputs: bool,
    /// Options of its runs; `None` for those of the session.
    options: Option<Arc<RunOptions>>,
    /// Last: outputs that it made go back to its allocator.
    session: Arc<Session>,
}

#[derive(Default)]
pub struct Run<'a> {
    pub rows: usize,
    /// The caller's tensors, by input; none stands for the step's own.
    pub inputs: Vec<Option<Given<'a>>>,
    /// The caller's tensors, by output. No input is one of them.
    pub outputs: Vec<Option<&'a mut BatchTensor>>,
    /// Rows of inputs that are on the step's device.
    pub overlays: &'a [Overlay<'a>],
    /// It may be captured as a CUDA graph, or be a replay of one.
    pub as_graph: bool,
}

pub enum Given<'a> {
    /// One in a buffer of the caller's.
    Batch(&'a mut BatchTensor),
    /// One that an earlier run made.
    Made(&'a MadeTensor),
    Strings(&'a Value),
    /// Memory that holds a tensor, where the model runs.
    Lent {
        dims: &'a [i64],
        bytes: Bytes<'a>,
    },
}

/// A row of an input that is on the step's device. It is copied to its place of the input after the other rows, which
/// have been filled on the host.
pub struct Overlay<'a> {
    pub input: usize,
    pub part: Part,
    pub from: Foreign<'a>,
}

pub struct OutputView<'a> {
    /// With the number of rows.
    pub dims: &'a [i64],
    /// Row-major; empty if they are not read, and for strings.
    pub bytes: &'a [u8],
    /// Row-major; empty for other types.
    pub strings: &'a Strings,
}

/// A copy of a row of an output of the last run, on the step's device. It borrows the step, so that no run can start
/// before it is used.
pub struct OutputCopy<'a> {
    from: u64,
    to: Foreign<'a>,
}

/// The largest buffer that is kept of an input whose size requests decide.
const KEPT_BYTES: usize = 16 << 20;

struct Input {
    name: CString,
    tensor: BatchTensor,
    /// The tensor of the next run, for strings.
    strings: Option<Value>,
    /// It has been filled on the host, and the tensor is on a device.
    must_upload: bool,
    omitted: bool,
    /// A buffer of more bytes is not kept for the next batch.
    keeps: usize,
}

/// An output of a step: a tensor of ours that a run writes, or one that ONNX Runtime makes.
struct Output {
    name: CString,
    tensor: BatchTensor,
    /// As in [`crate::binding::OutputSpec`].
    dims: Option<Vec<i64>>,
    /// As in [`crate::binding::OutputSpec`].
    is_read: bool,
    /// Whether it is also an input of the graph. ONNX Runtime then returns the tensor that was fed, and writes nothing.
    is_input: bool,
    /// Whether ONNX Runtime leaves it where the model runs.
    stays: bool,
    /// Whether the run has to make a tensor for it.
    is_to_be_made: bool,
    /// The tensor that ONNX Runtime made in the last run, if it decides the shape.
    made: Option<MadeTensor>,
    /// Where the last run wrote the output, if the caller gave a tensor on a device for it.
    given: Option<OutputGiven>,
    strings: Strings,
}

struct OutputGiven {
    address: u64,
    bytes: usize,
    /// Keeps the memory as long as it may be read.
    _memory: Arc<DeviceMemory>,
}

impl Step {
    /// Buffers for a model, where the copier copies.
    pub fn new(session: Arc<Session>, spec: &StepSpec, copier: Copier) -> Result<Self, OpenError> {
        let device = copier.device().cloned();
        let has_graphs = device.is_some() && session.has_graphs();
        let reads_on_host = |index: usize| session.reads_on_host(&spec.inputs[index].name);
        let input = |(index, input): (usize, &InputSpec)| {
            let is_on_device = input.data_type != DataType::Bytes && !input.is_left_on_host(reads_on_host(index));
            let device = device.as_ref().filter(|_| is_on_device);
            let mut tensor = BatchTensor::new(input.data_type, input.batch_axis, device)?;
            // A graph is bound to addresses, so the buffer must never grow.
            if has_graphs && !input.is_given {
                tensor.shape(&input.dims, spec.most_rows)?;
            }
            let keeps = if input.varies() { KEPT_BYTES } else { usize::MAX };
            let name = c_name(&input.name)?;
            Ok(Input { name, tensor, strings: None, must_upload: false, omitted: false, keeps })
        };
        let inputs = spec.inputs.iter().enumerate().map(input).collect::<Result<Vec<_>, OpenError>>()?;
        let may_be_read_on_host = |(index, input): (usize, &Input)| {
            (input.tensor.device.is_some() || spec.inputs[index].is_given) && reads_on_host(index) != Some(false)
        };
        let waits_for_inputs = session.is_on_gpu() && inputs.iter().enumerate().any(may_be_read_on_host);
        let outputs = spec.outputs.iter().map(|output| {
            let is_input = spec.inputs.iter().any(|input| input.name == output.name);
            if is_input && device.is_some() {
                let what = "an input and an output at once, on a GPU".to_owned();
                return Err(OpenError::Unsupported { name: output.name.clone(), what });
            }
            let stays = device.is_some() && output.stays && output.data_type != DataType::Bytes;
            let on_device = device.as_ref().filter(|_| output.dims.is_some() || stays);
            let mut tensor = BatchTensor::new(output.data_type, output.batch_axis, on_device)?;
            if let Some(dims) = output.dims.as_ref().filter(|_| has_graphs) {
                tensor.shape(dims, spec.most_rows)?;
            }
            Ok(Output {
                name: c_name(&output.name)?,
                tensor,
                dims: output.dims.clone().filter(|_| !is_input),
                is_input,
                is_read: output.is_read,
                stays: stays && output.dims.is_none(),
                is_to_be_made: false,
                made: None,
                given: None,
                strings: Strings::default(),
            })
        });
        let outputs = outputs.collect::<Result<Vec<_>, OpenError>>()?;
        let bound_run = match (&device, outputs.iter().any(|output| output.stays)) {
            (Some(device), true) => Some(BoundRun::new(session.clone(), MemoryKind::of(device))?),
            _ => None,
        };
        Ok(Self {
            session,
            copier,
            graphs: has_graphs.then(|| Graphs::new(spec.graph_rows.clone())),
            bound_run,
            arguments: Arguments {
                // The names of the outputs do not change; their strings live as long as the step.
                output_names: outputs.iter().map(|output| output.name.as_ptr()).collect(),
                ..Arguments::default()
            },
            options: None,
            waits_for_inputs,
            inputs,
            outputs,
        })
    }

    /// Whether ONNX Runtime logs nothing of a run that fails. Not for runs that are CUDA graphs.
    pub fn set_quiet(&mut self, is_quiet: bool) -> Result<(), SessionError> {
        self.options = if is_quiet { Some(Arc::new(self.session.quiet_options()?)) } else { None };
        Ok(())
    }

    /// As [`Step::set_quiet`], and ends the runs of this step once `limit` has passed. ONNX Runtime looks at it before
    /// each node. Options that are set later have no limit.
    pub fn limit_time(&mut self, limit: Duration) -> Result<TimeLimit, SessionError> {
        let options = Arc::new(self.session.quiet_options()?);
        self.options = Some(options.clone());
        TimeLimit::new(options, limit).map_err(|error| SessionError::Run(error.to_string()))
    }

    /// The bytes of an input for `rows` rows of `dims` (the batch axis's value is ignored), to fill.
    pub fn input(&mut self, index: usize, dims: &[i64], rows: usize) -> Result<&mut [u8], MemoryError> {
        let Input { tensor, omitted, must_upload, .. } = &mut self.inputs[index];
        (*omitted, *must_upload) = (false, true);
        tensor.shape(dims, rows)?;
        tensor.host_mut()
    }

    /// Takes a part, such as a row, out of an output of the last run, to be stored.
    pub fn take_output(
        &self,
        index: usize,
        part: &Part,
        to: BytesMut,
        storage: StorageType,
    ) -> Result<(), SessionError> {
        match &self.outputs[index].made {
            Some(made) => made.take(&self.copier, part, to, storage)?,
            None => copies::take(part, storage, self.output(index, None)?.bytes, to.host()),
        }
        Ok(())
    }

    pub fn has_made(&self, index: usize) -> bool {
        self.outputs[index].made.is_some()
    }

    pub fn take_made(&mut self, index: usize) -> Option<MadeTensor> {
        self.outputs[index].made.take()
    }

    /// Copies rows of the last run, which succeeded, on the step's device, and waits until they are there.
    pub fn copy_outputs(&self, copies: &[OutputCopy]) -> Result<(), SessionError> {
        let Some(queue) = self.copier.queue().filter(|_| !copies.is_empty()) else { return Ok(()) };
        // The guard waits when it is dropped, so that the copies are done on every path. A queue that has failed says
        // so at its next use.
        let mut queue = scopeguard::guard(queue, |mut queue| _ = queue.synchronise());
        for copy in copies {
            // SAFETY: a row of a tensor that is there until the next run, and memory that is borrowed. The queue is
            // waited for before this returns, whatever happens.
            unsafe { queue.copy_out(copy.from, copy.to)? };
        }
        Ok(queue.synchronise()?)
    }

    /// How a part of an output of the last run is copied on the step's device, if it is one piece there and goes to
    /// memory of that device.
    pub fn output_copy<'a>(&'a self, output: usize, part: &Part, to: Foreign<'a>) -> Option<OutputCopy<'a>> {
        let output = &self.outputs[output];
        let is_there = self.copier.device().is_some_and(|device| device.number() == to.gpu());
        let from = part.contiguous_from().filter(|_| is_there && to.byte_len() == part.bytes())?;
        let batch = match (&output.given, &output.made) {
            (Some(given), _) => {
                check_part(part, given.bytes);
                given.address
            }
            (None, Some(made)) if made.is_on_device => made.address_for(part).ok()?,
            (None, None) if matches!(output.tensor.memory, TensorMemory::Device(_)) => output.tensor.address_for(part),
            _ => return None,
        };
        Some(OutputCopy { from: batch + from as u64, to })
    }

    /// Leaves an input out of the next run: the model has a value of its own.
    pub fn omit(&mut self, index: usize) {
        self.inputs[index].omitted = true;
    }

    /// Dimensions and bytes of an input as it was filled for the last run.
    pub fn filled(&self, index: usize) -> (&[i64], &[u8]) {
        let tensor = &self.inputs[index].tensor;
        (&tensor.dims, tensor.host())
    }

    /// Sets the elements of an input of strings, for `rows` rows of `dims` (the batch axis's value is ignored). Each
    /// comes with its index; the others are empty.
    pub fn set_strings<'a>(
        &mut self,
        index: usize,
        dims: &[i64],
        rows: usize,
        strings: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Result<(), SessionError> {
        let input = &mut self.inputs[index];
        let mut dims = dims.to_vec();
        if let Some(axis) = input.tensor.batch_axis {
            dims[axis] = rows as i64;
        }
        (input.strings, input.omitted) = (Some(Value::of_strings(strings, &dims)?), false);
        Ok(())
    }

    /// An output of the last run, which must have succeeded; `given` is the tensor that it was written to, if it was
    /// the caller's.
    pub fn output<'a>(&'a self, index: usize, given: Option<&'a BatchTensor>) -> Result<OutputView<'a>, SessionError> {
        let output = &self.outputs[index];
        let tensor = given.unwrap_or(&output.tensor);
        let (dims, byte_len) = match &output.made {
            Some(made) => (&made.dims, made.bytes),
            None => (&tensor.dims, tensor.bytes),
        };
        let bytes = match (&output.made, output.tensor.device.is_some()) {
            (_, true) => {
                let fetched = output.tensor.staging.as_ref().filter(|_| output.is_read);
                fetched.map_or(&[][..], |staging| &staging.bytes()[..byte_len])
            }
            (Some(made), false) => made.host()?,
            (None, false) => tensor.host(),
        };
        Ok(OutputView { dims, bytes, strings: &output.strings })
    }

    /// Gives back large buffers and the tensors that ONNX Runtime made. To be called when the rows of the last batch
    /// have been answered: its outputs cannot be read afterwards.
    pub fn give_back(&mut self) {
        for input in &mut self.inputs {
            input.strings = None;
            input.tensor.give_back(input.keeps);
        }
        for output in &mut self.outputs {
            (output.made, output.given) = (None, None);
            output.strings = Strings::default();
            if output.is_input {
                output.tensor.give_back(PAGES_FROM);
            }
        }
    }
}

fn c_name(name: &str) -> Result<CString, OpenError> {
    CString::new(name)
        .map_err(|_| OpenError::Unsupported { name: name.to_owned(), what: "a name with a NUL".to_owned() })
}
