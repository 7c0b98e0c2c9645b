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

use std::cell::RefCell;
use std::ffi::CString;
use std::sync::Arc;

pub use growing::Grown;
pub use run::{Lent, Run};

use super::bound_run::BoundRun;
use super::graphs::Graphs;
use super::open::{Session, SessionError};
use super::output::{Output, tensor_error};
use super::spec::{OutputView, RowContent, StateSpec, StepSpec};
use super::tensors::{Tensors, narrowing, put, take_on_host};
use super::value::{MemoryKind, Value};
use crate::memory::device::{Change, Foreign, Queue, RowIn};
use crate::memory::{BytesMut, Elements, MemoryError, PAGES_FROM, Store};
use crate::tensor::{DataType, RowLayout};

struct Input {
    name: CString,
    tensors: Tensors,
    /// Which state of the batch buffers it is.
    state: Option<usize>,
    /// Which of the growing states it is.
    growing: Option<usize>,
    /// It is a state of varying size.
    varies: bool,
    /// The tensor of the next run, for strings.
    strings: Option<Value>,
    /// It has been filled on the host, and the tensor is on a device.
    must_upload: bool,
    /// The next run is without it.
    omitted: bool,
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
    /// Buffers for a model, on the queue's device if there is one.
    pub fn new(session: Arc<Session>, spec: &StepSpec, queue: Option<Queue>) -> Result<Self, SessionError> {
        let device = queue.as_ref().map(|queue| queue.device().clone());
        let has_graphs = device.is_some() && session.has_graphs();
        let inputs = spec.inputs.iter().enumerate().map(|(index, input)| {
            let is_tensor = input.data_type != DataType::Bytes && (has_graphs || !input.is_left_on_host());
            let mut tensors = Tensors::new(input.data_type, input.batch_axis, device.as_ref().filter(|_| is_tensor))?;
            if has_graphs {
                tensors.shape(&input.dims, spec.most_rows)?;
            }
            let state = spec.states.iter().position(|state| state.input == index);
            let growing = spec.growing.iter().position(|&(input, _)| input == index);
            let name = c_name(&input.name)?;
            let varies = input.is_state && state.is_none();
            Ok(Input { name, tensors, state, growing, varies, strings: None, must_upload: false, omitted: false })
        });
        let inputs = inputs.collect::<Result<Vec<_>, SessionError>>()?;
        let outputs = spec.outputs.iter().enumerate().map(|(index, output)| {
            let is_input = spec.inputs.iter().any(|input| input.name == output.name);
            if is_input && device.is_some() {
                let what = "an input and an output at once, on a GPU".to_owned();
                return Err(SessionError::Unsupported { name: output.name.clone(), what });
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
                strings: Elements::default(),
            })
        });
        let outputs = outputs.collect::<Result<Vec<_>, SessionError>>()?;
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
            input_names: Vec::with_capacity(inputs.len()),
            output_names: outputs.iter().map(|output| output.name.as_ptr()).collect(),
            input_values: Vec::with_capacity(inputs.len()),
            output_values: Vec::with_capacity(outputs.len()),
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

    /// Lets a row that lies on the step's device take a place of an input, whose other rows have been filled on the
    /// host.
    pub fn overlay_row(
        &mut self,
        input: usize,
        layout: RowLayout,
        (index, rows): (usize, usize),
        from: Foreign,
    ) -> Result<(), MemoryError> {
        assert_eq!(from.byte_len(), layout.row_bytes(), "row of another size");
        if let Some(queue) = &mut self.queue {
            let Input { tensors, must_upload, .. } = &mut self.inputs[input];
            // Moves may go at any time, so the other rows go first.
            if std::mem::take(must_upload) {
                tensors.upload(queue.get_mut())?;
            }
            let to = tensors.row(index, rows);
            // SAFETY: a request's memory, which lives until it has been answered; the input's buffer is not replaced
            // before the run.
            unsafe { queue.get_mut().move_row(layout, RowIn::alone(from.address()), to, Change::None) };
        }
        Ok(())
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

    /// Frees what the last run made, and what only large growing states need.
    pub fn release(&mut self) {
        for output in &mut self.outputs {
            (output.made, output.strings) = (None, Elements::default());
            if output.is_input && output.tensors.store.byte_len() >= PAGES_FROM {
                output.tensors.release();
            }
        }
        for input in &mut self.inputs {
            input.strings = None;
            if input.varies && input.tensors.store.byte_len() >= PAGES_FROM {
                input.tensors.release();
            }
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
        match &self.outputs[index].made {
            Some(value) => self.take_made(value, self.outputs[index].tensors.bytes, layout, at, to, as_fp16),
            None => {
                take_on_host(layout, self.output(index)?.bytes, at, to.host(), as_fp16);
                Ok(())
            }
        }
    }

    /// Lets a row of an output of the last run, which succeeded, be copied to memory on the step's device; `false` if
    /// it is not one piece there. It is there after [`Step::finish_copies`].
    pub fn copy_output(
        &self,
        index: usize,
        layout: RowLayout,
        (place, rows): (usize, usize),
        to: Foreign,
    ) -> Result<bool, SessionError> {
        let output = &self.outputs[index];
        let Some(mut queue) = self.queue.as_ref().map(RefCell::borrow_mut) else { return Ok(false) };
        let tensors = self.written_tensors(output);
        let address = match &output.made {
            Some(value) if output.stays => value.address().map_err(SessionError::Run)?,
            None if matches!(tensors.store, Store::Device(_)) => tensors.row(0, rows).address,
            _ => return Ok(false),
        };
        let bytes = layout.row_bytes();
        let is_one_piece = layout.outer == 1 || rows == 1;
        if !is_one_piece || to.gpu() != queue.device().number() || to.byte_len() != bytes {
            return Ok(false);
        }
        // SAFETY: a row of a tensor that is there until the next run, and Triton's memory, which lives until the
        // response goes; both wait for `finish_copies`.
        unsafe { queue.copy_out(address + (place * bytes) as u64, to)? };
        Ok(true)
    }

    /// Waits until what [`Step::copy_output`] copies is there.
    pub fn finish_copies(&self) -> Result<(), MemoryError> {
        match &self.queue {
            Some(queue) => Ok(queue.borrow_mut().finish_copies()?),
            None => Ok(()),
        }
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

    /// Sets the elements of an input of strings, for `rows` rows of `dims` (the batch axis's value is ignored).
    pub fn set_strings<S: AsRef<[u8]>>(
        &mut self,
        index: usize,
        dims: &[i64],
        rows: usize,
        strings: &[S],
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

    /// The tensors that the last run wrote an output to.
    fn written_tensors<'a>(&'a self, output: &'a Output) -> &'a Tensors {
        output.state.map_or(&output.tensors, |state| &self.batch_buffers[self.written][state])
    }

    fn take_made(
        &self,
        value: &Value,
        bytes: usize,
        layout: RowLayout,
        (index, rows): (usize, usize),
        to: BytesMut,
        as_fp16: bool,
    ) -> Result<(), SessionError> {
        match (to, &self.queue) {
            (BytesMut::Device(to), Some(queue)) => {
                let address = value.address().map_err(SessionError::Run)?;
                let (from, to) = (RowIn { address, index, rows }, RowIn::alone(to.address()));
                // SAFETY: a row of a tensor of the last run, which is there until the next one, or of a `Grown`, which
                // the caller keeps until the wait. The caller's memory is its sequence's until then.
                unsafe { queue.borrow_mut().move_row(layout, from, to, narrowing(as_fp16)) };
            }
            (to, _) => {
                // SAFETY: the size is that of the dimensions; what a run makes for the host is there, and of what it leaves
                // on a device no bytes are taken: `to` is empty then.
                let batch = unsafe { value.bytes(bytes) }.map_err(SessionError::Run)?;
                take_on_host(layout, batch, (index, rows), to.host(), as_fp16);
            }
        }
        Ok(())
    }
}

fn c_name(name: &str) -> Result<CString, SessionError> {
    CString::new(name)
        .map_err(|_| SessionError::Unsupported { name: name.to_owned(), what: "a name with a NUL".to_owned() })
}
