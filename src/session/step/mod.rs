//! One run of the model over a batch, in buffers of ours.
//!
//! Where the model runs on a device, the tensors are there: inputs are gathered in pinned host memory and copied over
//! before the run, outputs that somebody wants to read are copied back behind it, and rows of states are moved on the
//! device by what is enqueued in between. The caller sees the same bytes and calls either way.
//!
//! Rules: an input or output whose dimensions are known but for the batch keeps one buffer and one tensor per batch
//! size, so a steady step makes nothing; inputs of other shapes get a tensor when the shape changes, outputs of open
//! shape are allocated by ONNX Runtime. States of fixed size lie in batch buffers, any two of which can be the two ends
//! of a run; which state lies where is said elsewhere ([`crate::state::residency`]). Inputs and outputs never share
//! memory, so a failed run leaves its inputs (and with them every state) as they were.

mod growing;
mod run;
mod states;

use std::cell::{RefCell, RefMut};
use std::ffi::CString;
use std::sync::Arc;

pub use growing::Grown;
use run::Arguments;
pub use run::{Lent, Overlay, Run};

use super::bound_run::BoundRun;
use super::graphs::Graphs;
use super::open::{OpenError, Session, SessionError};
use super::output::{Output, tensor_error};
use super::spec::{OutputView, RowContent, StateSpec, StepSpec};
use super::tensors::{Tensors, narrowing, put, row_alone, row_of, take_on_host};
use super::value::{MemoryKind, Value};
use crate::memory::device::{Device, Foreign, Queue};
use crate::memory::{BytesMut, MemoryError, PAGES_FROM, Store, Strings};
use crate::tensor::{DataType, RowLayout};

/// The largest buffer that is kept of an input whose size requests decide.
const KEPT_BYTES: usize = 16 << 20;

struct Input {
    name: CString,
    tensors: Tensors,
    /// Which state of the batch buffers it is.
    state: Option<usize>,
    /// Which of the growing states it is.
    growing: Option<usize>,
    /// The tensor of the next run, for strings.
    strings: Option<Value>,
    /// It has been filled on the host, and the tensor is on a device.
    must_upload: bool,
    /// The next run is without it.
    omitted: bool,
    /// A buffer of more bytes is not kept for the next batch.
    keeps: usize,
}

/// A row of an output of the last run, to be copied on the step's device.
#[derive(Clone, Copy)]
pub struct OutputCopy<'a> {
    /// Index of the output.
    pub output: usize,
    /// Layout of its rows.
    pub layout: RowLayout,
    /// Which row.
    pub place: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Where it goes.
    pub to: Foreign<'a>,
}

/// The buffers of one instance, and the call. Fill the inputs, run, read the outputs.
pub struct Step {
    /// What is enqueued on the device, if the model runs on one. Rows are taken while outputs are borrowed. First: when
    /// it goes, it waits for what uses the rest.
    queue: Option<RefCell<Queue>>,
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
    /// Runs that are CUDA graphs.
    graphs: Option<Graphs>,
    /// For outputs that ONNX Runtime makes on a device.
    bound_run: Option<BoundRun>,
    arguments: Arguments,
    /// Last: outputs that it made go back to its allocator.
    session: Arc<Session>,
}

impl Input {
    fn new(spec: &StepSpec, index: usize, device: Option<&Arc<Device>>, has_graphs: bool) -> Result<Self, OpenError> {
        let input = &spec.inputs[index];
        let is_tensor = input.data_type != DataType::Bytes && (has_graphs || !input.is_left_on_host());
        let mut tensors = Tensors::new(input.data_type, input.batch_axis, device.filter(|_| is_tensor))?;
        if has_graphs {
            tensors.shape(&input.dims, spec.most_rows)?;
        }
        let state = spec.states.iter().position(|state| state.input == index);
        let growing = spec.growing.iter().position(|&(input, _)| input == index);
        let name = c_name(&input.name)?;
        let keeps = if growing.is_some() || (input.is_state && state.is_none()) {
            PAGES_FROM
        } else if input.varies() {
            KEPT_BYTES
        } else {
            usize::MAX
        };
        Ok(Self { name, tensors, state, growing, strings: None, must_upload: false, omitted: false, keeps })
    }
}

impl Step {
    /// Buffers for a model, on the queue's device if there is one.
    pub fn new(session: Arc<Session>, spec: &StepSpec, queue: Option<Queue>) -> Result<Self, OpenError> {
        let device = queue.as_ref().map(|queue| queue.device().clone());
        let has_graphs = device.is_some() && session.has_graphs();
        let inputs = (0..spec.inputs.len()).map(|index| Input::new(spec, index, device.as_ref(), has_graphs));
        let inputs = inputs.collect::<Result<Vec<_>, OpenError>>()?;
        let outputs = spec.outputs.iter().enumerate().map(|(index, output)| {
            let is_input = spec.inputs.iter().any(|input| input.name == output.name);
            if is_input && device.is_some() {
                let what = "an input and an output at once, on a GPU".to_owned();
                return Err(OpenError::Unsupported { name: output.name.clone(), what });
            }
            let stays = device.is_some() && output.is_state && output.data_type != DataType::Bytes;
            let on_device = device.as_ref().filter(|_| output.dims.is_some() || stays);
            let mut tensors = Tensors::new(output.data_type, output.batch_axis, on_device)?;
            if let Some(dims) = output.dims.as_ref().filter(|_| has_graphs) {
                tensors.shape(dims, spec.most_rows)?;
            }
            Ok(Output {
                name: c_name(&output.name)?,
                tensors,
                state: spec.states.iter().position(|state| state.output == index),
                dims: output.dims.clone().filter(|_| !is_input),
                is_input,
                is_read: output.is_read,
                stays: stays && output.dims.is_none(),
                made: None,
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
            states: spec.states.clone(),
            most_rows: spec.most_rows,
            batch_buffers: Vec::new(),
            written: 0,
            growing: spec.growing.iter().map(|&(_, output)| output).collect(),
            queue: queue.map(RefCell::new),
            graphs: has_graphs.then(|| Graphs::new(spec.graph_rows.clone())),
            bound_run,
            arguments: Arguments::new(inputs.len(), &outputs),
            inputs,
            outputs,
        })
    }

    /// The bytes of an input for `rows` rows of `dims` (the batch axis's value is ignored), to fill.
    pub fn input(&mut self, index: usize, dims: &[i64], rows: usize) -> Result<&mut [u8], MemoryError> {
        let Input { tensors, omitted, must_upload, .. } = &mut self.inputs[index];
        (*omitted, *must_upload) = (false, true);
        tensors.shape(dims, rows)?;
        tensors.host_mut()
    }

    /// Puts a row of a state into place `index` of an input for `rows` rows of `dims`.
    pub fn put_row(
        &mut self,
        input: usize,
        dims: &[i64],
        layout: RowLayout,
        (index, rows): (usize, usize),
        content: RowContent,
    ) -> Result<(), MemoryError> {
        let Input { tensors, omitted, must_upload, .. } = &mut self.inputs[input];
        (*omitted, *must_upload) = (false, false);
        tensors.shape(dims, rows)?;
        put(&mut self.queue, tensors, layout, (index, rows), content)
    }

    /// What is moved on a device from now on is moved after what has been so far: rows may be read that were written,
    /// and written that were read.
    pub fn end_phase(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.get_mut().end_phase();
        }
    }

    /// Waits until everything that was moved on a device is in its place.
    pub fn synchronise(&mut self) -> Result<(), MemoryError> {
        match &mut self.queue {
            Some(queue) => Ok(queue.get_mut().synchronise()?),
            None => Ok(()),
        }
    }

    /// Whether the model runs on a device.
    pub const fn is_on_device(&self) -> bool {
        self.queue.is_some()
    }

    /// Takes a row out of an output of the last run, into fp16 if it is kept so.
    pub fn take_output(
        &self,
        index: usize,
        layout: RowLayout,
        at: (usize, usize),
        to: BytesMut,
        as_fp16: bool,
    ) -> Result<(), SessionError> {
        let Output { made, tensors, stays, .. } = &self.outputs[index];
        match made {
            Some(value) => {
                let made = Made { value, bytes: tensors.bytes, is_on_device: *stays };
                self.take_made(made, layout, at, to, as_fp16)
            }
            None => {
                take_on_host(layout, self.output(index)?.bytes, at, to.host(), as_fp16);
                Ok(())
            }
        }
    }

    /// Whether a row of an output of the last run can be copied on the step's device: it is one piece there, and goes to
    /// memory of that device.
    pub fn can_copy_output(&self, copy: &OutputCopy) -> bool {
        let Some(device) = self.queue.as_ref().map(|queue| queue.borrow().device().number()) else { return false };
        matches!(self.one_piece_on(device, copy), Ok(Some(_)))
    }

    /// Copies rows of the last run, which succeeded, on the step's device, and waits until they are there. Each is one
    /// that can be copied ([`Step::can_copy_output`]).
    pub fn copy_outputs(&self, copies: &[OutputCopy]) -> Result<(), SessionError> {
        let Some(queue) = self.queue.as_ref().filter(|_| !copies.is_empty()) else { return Ok(()) };
        let mut queue = CopiesUnderWay(queue.borrow_mut());
        let device = queue.0.device().number();
        for copy in copies {
            let Some(from) = self.one_piece_on(device, copy)? else { continue };
            // SAFETY: a row of a tensor that is there until the next run, and memory that is borrowed. The queue is
            // waited for before this returns, whatever happens.
            unsafe { queue.0.copy_out(from, copy.to)? };
        }
        Ok(queue.0.synchronise()?)
    }

    /// Where a row of an output of the last run is on a device, if it is one piece there and goes to memory of that
    /// device.
    fn one_piece_on(&self, device: i32, copy: &OutputCopy) -> Result<Option<u64>, SessionError> {
        let &OutputCopy { output, layout, place, rows, to } = copy;
        let (output, bytes) = (&self.outputs[output], layout.row_bytes());
        let is_one_piece = layout.outer == 1 || rows == 1;
        if !is_one_piece || to.gpu() != device || to.byte_len() != bytes {
            return Ok(None);
        }
        let tensors = self.written_tensors(output);
        let row = match &output.made {
            Some(value) if output.stays => {
                let address = value.address().map_err(SessionError::Run)?;
                row_of(layout, address, output.tensors.bytes, place, rows)
            }
            None if matches!(tensors.store, Store::Device(_)) => tensors.row(layout, place, rows),
            _ => return Ok(None),
        };
        Ok(Some(row.address + (place * bytes) as u64))
    }

    /// Leaves an input out of the next run: the model has a value of its own.
    pub fn omit(&mut self, index: usize) {
        self.inputs[index].omitted = true;
    }

    /// Dimensions and bytes of an input as it was filled for the last run.
    pub fn filled(&self, index: usize) -> (&[i64], &[u8]) {
        let tensors = &self.inputs[index].tensors;
        (&tensors.dims, tensors.host())
    }

    /// Sets the elements of an input of strings, for `rows` rows of `dims` (the batch axis's value is ignored). Each
    /// comes with its place; the others are empty.
    pub fn set_strings<'a>(
        &mut self,
        index: usize,
        dims: &[i64],
        rows: usize,
        strings: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Result<(), SessionError> {
        let input = &mut self.inputs[index];
        let mut dims = dims.to_vec();
        if let Some(axis) = input.tensors.batch_axis {
            dims[axis] = rows as i64;
        }
        let made = Value::of_strings(strings, &dims)?;
        (input.strings, input.omitted) = (Some(made), false);
        Ok(())
    }

    /// An output of the last run, which must have succeeded.
    pub fn output(&self, index: usize) -> Result<OutputView<'_>, SessionError> {
        let output = &self.outputs[index];
        let tensors = self.written_tensors(output);
        let bytes = match (&output.made, output.tensors.device.is_some()) {
            (_, true) if !output.is_read => &[],
            (_, true) => output.tensors.staging.as_ref().map_or(&[][..], |staging| &staging.bytes()[..tensors.bytes]),
            (None, false) => tensors.host(),
            (Some(value), false) => {
                // SAFETY: `settle` computed the size from the tensor's own dimensions; it is on the host.
                unsafe { value.bytes(tensors.bytes) }.map_err(|why| tensor_error(&output.name, why))?
            }
        };
        Ok(OutputView { dims: &tensors.dims, bytes, strings: &output.strings })
    }

    /// Gives back large buffers and the tensors that ONNX Runtime made. To be called when the rows of the last batch have
    /// been answered: its outputs cannot be read afterwards.
    pub fn give_back(&mut self) {
        for input in &mut self.inputs {
            input.strings = None;
            input.tensors.give_back(input.keeps);
        }
        for output in &mut self.outputs {
            output.made = None;
            output.strings = Strings::default();
            if output.is_input {
                output.tensors.give_back(PAGES_FROM);
            }
        }
    }

    /// The tensors that the last run wrote an output to.
    fn written_tensors<'a>(&'a self, output: &'a Output) -> &'a Tensors {
        output.state.map_or(&output.tensors, |state| &self.batch_buffers[self.written][state])
    }

    fn take_made(
        &self,
        Made { value, bytes, is_on_device }: Made,
        layout: RowLayout,
        (index, rows): (usize, usize),
        to: BytesMut,
        as_fp16: bool,
    ) -> Result<(), SessionError> {
        match (to, &self.queue) {
            (BytesMut::Device(span), Some(queue)) => {
                let address = value.address().map_err(SessionError::Run)?;
                let from = row_of(layout, address, bytes, index, rows);
                let mut queue = queue.borrow_mut();
                let to = row_alone(&mut queue, layout, span, as_fp16);
                queue.keep(value.clone());
                // SAFETY: a row of a tensor and memory of a state, both of which the queue keeps.
                unsafe { queue.move_row(layout, from, to, narrowing(as_fp16)) };
            }
            (to, _) => {
                assert!(!is_on_device || bytes == 0, "a tensor on a device is read on the host");
                // SAFETY: the size is that of the dimensions, and the tensor is on the host.
                let batch = unsafe { value.bytes(bytes) }.map_err(SessionError::Run)?;
                take_on_host(layout, batch, (index, rows), to.host(), as_fp16);
            }
        }
        Ok(())
    }
}

/// A tensor that ONNX Runtime made.
struct Made<'a> {
    value: &'a Arc<Value>,
    bytes: usize,
    is_on_device: bool,
}

/// Dropped, it waits, so that the copies have happened on every path.
struct CopiesUnderWay<'a>(RefMut<'a, Queue>);

impl Drop for CopiesUnderWay<'_> {
    fn drop(&mut self) {
        // A queue that has failed says so at its next use.
        let _ = self.0.synchronise();
    }
}

fn c_name(name: &str) -> Result<CString, OpenError> {
    CString::new(name)
        .map_err(|_| OpenError::Unsupported { name: name.to_owned(), what: "a name with a NUL".to_owned() })
}
