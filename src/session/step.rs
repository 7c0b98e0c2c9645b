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

use std::cell::RefCell;
use std::ffi::CString;
use std::sync::Arc;

use smallvec::SmallVec;

use super::bound_run::{BoundRun, Fetch};
use super::graphs::{GraphKey, Graphs};
use super::open::{Session, SessionError};
use super::output::{Output, tensor_error};
use super::spec::{OutputView, RowAt, RowContent, StateSpec, StepSpec};
use super::tensors::{Tensors, host_bytes, narrowing, put, take_on_host};
use super::value::{self, MemoryKind, Value};
use crate::memory::device::{Change, Foreign, Queue, RowIn, while_nothing_is_captured};
use crate::memory::{Bytes, BytesMut, MemoryError, Store, Varying, rows};
use crate::tensor::{DataType, RowLayout, element_count};

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
    /// It may be captured as a CUDA graph, or be a replay of one.
    pub as_graph: bool,
}

/// A tensor that ONNX Runtime made.
struct Kept {
    value: Value,
    dims: Vec<i64>,
    bytes: usize,
}

/// A tensor that stays where it is for a run.
pub struct Lent<'a> {
    /// Index of the input.
    pub input: usize,
    /// Which state it is, to those who lend it.
    pub state: usize,
    /// Dimensions.
    pub dims: &'a [i64],
    /// Row-major elements, where the model runs.
    pub bytes: Bytes<'a>,
}

impl Lent<'_> {
    fn value(&self, inputs: &[Input]) -> Result<(usize, Value), SessionError> {
        let input = &inputs[self.input];
        let wanted = element_count(self.dims).and_then(|count| count.checked_mul(input.tensors.data_type.byte_size()?));
        if wanted != Some(self.bytes.byte_len()) {
            return Err(tensor_error(
                &input.name,
                format!("{} bytes do not make {:?}", self.bytes.byte_len(), self.dims),
            ));
        }
        let memory = match (self.bytes, &input.tensors.device) {
            (Bytes::Device(_), Some(device)) => MemoryKind::of(device),
            _ => MemoryKind::Host,
        };
        // SAFETY: as many bytes as the dimensions say, borrowed for longer than the run that the value is made for.
        // ONNX Runtime does not write to inputs.
        let value = unsafe {
            let data = self.bytes.address().cast_mut();
            Value::over(memory, data, self.bytes.byte_len(), self.dims, input.tensors.data_type)
        };
        value.map(|value| (self.input, value)).map_err(|why| tensor_error(&input.name, why))
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
    /// What an earlier run made of them.
    kept: Vec<Kept>,
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
            Ok(Input { name, tensors, state, growing, strings: None, must_upload: false, omitted: false })
        });
        let inputs = inputs.collect::<Result<Vec<_>, SessionError>>()?;
        let outputs = spec.outputs.iter().enumerate().map(|(index, output)| {
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
                dims: output.dims.clone(),
                is_read: output.is_read,
                stays: stays && output.dims.is_none(),
                expected: None,
                made: None,
                strings: Vec::new(),
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
            kept: Vec::new(),
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

    /// Lets a row that lies on the step's device take a place of an input that is filled on the host.
    pub fn overlay_row(&mut self, input: usize, layout: RowLayout, (index, rows): (usize, usize), from: Foreign) {
        assert_eq!(from.byte_len(), layout.row_bytes(), "row of another size");
        if let Some(queue) = &mut self.queue {
            let to = self.inputs[input].tensors.row(index, rows);
            // SAFETY: a request's memory, which lives until it has been answered; the input's buffer is not replaced
            // before the run.
            unsafe { queue.get_mut().move_row(layout, RowIn::alone(from.address()), to, Change::None) };
        }
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

    /// Puts a row of state number `state` into a place of a batch buffer.
    pub fn put_state(
        &mut self,
        state: usize,
        layout: RowLayout,
        to: RowAt,
        content: RowContent,
    ) -> Result<(), MemoryError> {
        self.make_batch_buffer(to.buffer)?;
        let tensors = &mut self.batch_buffers[to.buffer][state];
        tensors.set_rows(to.rows)?;
        put(&mut self.queue, tensors, layout, (to.position, to.rows), content)
    }

    /// Copies a row of state number `state` from one place to another.
    pub fn copy_state(&mut self, state: usize, layout: RowLayout, from: RowAt, to: RowAt) -> Result<(), MemoryError> {
        self.make_batch_buffer(from.buffer.max(to.buffer))?;
        if let Some(queue) = &mut self.queue {
            let at = |at: RowAt| self.batch_buffers[at.buffer][state].row(at.position, at.rows);
            let (from, to) = (at(from), at(to));
            // SAFETY: rows of batch buffers, which are never replaced and outlive the queue.
            unsafe { queue.get_mut().move_row(layout, from, to, Change::None) };
        } else if from.buffer == to.buffer {
            let bytes = host_bytes(&mut self.batch_buffers[to.buffer][state]);
            rows::shift(layout, bytes, (from.position, from.rows), (to.position, to.rows));
        } else if let Ok([source, target]) = self.batch_buffers.get_disjoint_mut([from.buffer, to.buffer]) {
            let (source, target) = (host_bytes(&mut source[state]), host_bytes(&mut target[state]));
            rows::transfer(layout, source, (from.position, from.rows), target, (to.position, to.rows));
        }
        Ok(())
    }

    /// Takes a row of state number `state` out of a batch buffer; into fp16 if it is kept so.
    pub fn take_state(&mut self, state: usize, layout: RowLayout, from: RowAt, to: BytesMut, as_fp16: bool) {
        let tensors = &mut self.batch_buffers[from.buffer][state];
        match (to, &mut self.queue) {
            (BytesMut::Device(to), Some(queue)) => {
                let from = tensors.row(from.position, from.rows);
                // SAFETY: a row of a batch buffer, and the caller's memory, which is a slot that is held until the
                // wait.
                unsafe { queue.get_mut().move_row(layout, from, RowIn::alone(to.address()), narrowing(as_fp16)) };
            }
            (to, _) => take_on_host(layout, host_bytes(tensors), (from.position, from.rows), to.host(), as_fp16),
        }
    }

    /// Rounds a row of state number `state`, of fp32, to what fp16 can hold.
    pub fn round_state(&mut self, state: usize, layout: RowLayout, at: RowAt) {
        let tensors = &mut self.batch_buffers[at.buffer][state];
        match &mut self.queue {
            Some(queue) => {
                let row = tensors.row(at.position, at.rows);
                // SAFETY: a row of a batch buffer.
                unsafe { queue.get_mut().move_row(layout, row, row, Change::Round) };
            }
            None => rows::round_to_fp16(layout, host_bytes(tensors), at.position, at.rows),
        }
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

    fn make_batch_buffer(&mut self, buffer: usize) -> Result<(), MemoryError> {
        while self.batch_buffers.len() <= buffer {
            let tensors = self.states.iter().map(|state| {
                let input = &self.inputs[state.input];
                input.tensors.for_rows(&state.dims, self.most_rows)
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

    /// Dimensions of the batch of growing state number `state` as it was kept.
    pub fn kept_dims(&self, state: usize) -> Option<&[i64]> {
        self.kept.get(state).map(|kept| kept.dims.as_slice())
    }

    /// Takes a row out of growing state number `state` as it was kept; from a device to the host too, after a wait.
    pub fn take_kept(
        &self,
        state: usize,
        layout: RowLayout,
        at: (usize, usize),
        to: BytesMut,
    ) -> Result<(), SessionError> {
        let Some(Kept { value, bytes, .. }) = self.kept.get(state) else { return Ok(()) };
        match (to, &self.queue) {
            (BytesMut::Host(to), Some(queue)) if !to.is_empty() => {
                let mut queue = queue.borrow_mut();
                let mut batch = queue.device().allocate_pinned(*bytes)?;
                queue.download(value.address().map_err(SessionError::Run)?, &mut batch, *bytes)?;
                queue.synchronise()?;
                take_on_host(layout, batch.bytes(), at, to, false);
                Ok(())
            }
            (to, _) => self.take_made(value, *bytes, layout, at, to, false),
        }
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
        let tensors = output.state.map_or(&output.tensors, |state| &self.batch_buffers[self.written][state]);
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
                // SAFETY: a row of a tensor that is kept until the wait (`drop_growing` waits), and the caller's
                // memory, which is its sequence's until then.
                unsafe { queue.borrow_mut().move_row(layout, from, to, narrowing(as_fp16)) };
            }
            (to, _) => {
                // SAFETY: the size is that of the dimensions; what a run makes for the host is there.
                let batch = unsafe { value.bytes(bytes) }.map_err(SessionError::Run)?;
                take_on_host(layout, batch, (index, rows), to.host(), as_fp16);
            }
        }
        Ok(())
    }

    /// Gives the tensors back that were kept, when what has been taken out of them is in its place.
    pub fn drop_growing(&mut self) -> Result<(), MemoryError> {
        if !self.kept.is_empty() {
            self.synchronise()?;
        }
        self.kept.clear();
        Ok(())
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
        (&tensors.dims, tensors.host())
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

    /// Lets a state take the buffer that the last run wrote an output to, and have the state's for it, if ONNX Runtime
    /// did not make the output itself.
    pub fn exchange_output(&mut self, index: usize, state: &mut Varying) {
        let Output { tensors, expected, .. } = &mut self.outputs[index];
        let is_ours = expected.take().is_some();
        if let Store::Host(buffer) = &mut tensors.store
            && is_ours
        {
            // Over the buffer that goes.
            tensors.by_rows.clear();
            state.exchange(&tensors.dims, tensors.bytes, buffer);
        }
    }

    /// Whether the last run wrote an output that was expected into a buffer of ours.
    pub fn has_expected(&self, index: usize) -> bool {
        self.outputs[index].expected.is_some()
    }

    /// Runs the model over what the inputs, the batch buffer and the lent tensors hold.
    pub fn run(&mut self, run: Run) -> Result<(), SessionError> {
        assert!(run.from != run.into || self.states.is_empty(), "a run reads what it writes");
        self.make_batch_buffer(run.from.max(run.into))?;
        if let Some(queue) = &mut self.queue {
            let queue = queue.get_mut();
            for input in self.inputs.iter_mut().filter(|input| !input.omitted) {
                if std::mem::take(&mut input.must_upload) {
                    input.tensors.upload(queue)?;
                }
            }
            queue.before_run()?;
        }
        let expects = self.outputs.iter().any(|output| output.expected.is_some());
        let ran = self.run_once(run);
        if ran.is_ok() || !expects {
            return ran;
        }
        self.outputs.iter_mut().for_each(|output| output.expected = None);
        self.run_once(run)
    }

    fn run_once(&mut self, run: Run) -> Result<(), SessionError> {
        let Run { rows, from, into, kept, lent, as_graph } = run;
        let graph = (as_graph && lent.is_empty()).then_some(GraphKey { rows, from, into });
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
        match &mut self.bound_run {
            Some(bound) => {
                let inputs = self.input_names.iter().copied().zip(self.input_values.iter().copied());
                let fetches = self.outputs.iter().zip(&self.output_values).map(|(output, &value)| match output.stays {
                    true => Fetch::OnDevice(&output.name),
                    false if value.is_null() => Fetch::OnHost(&output.name),
                    false => Fetch::Into(&output.name, value),
                });
                let _no_capture = self.session.is_on_gpu().then(while_nothing_is_captured);
                // SAFETY: every value is over a buffer of its own and lives during the run.
                let made = unsafe { bound.run(inputs, fetches) }.map_err(SessionError::Run)?;
                self.output_values.clear();
                self.output_values.extend(made);
            }
            None => {
                let Self { session, graphs, input_names, input_values, output_names, output_values, .. } = self;
                // SAFETY: names and values are arrays of live objects, as many as said; every value is over a buffer of
                // its own, so nothing that is written is read; ONNX Runtime allocates the outputs that are null.
                let run = |options| unsafe {
                    let status = (ort::api().Run)(
                        session.as_ptr(),
                        options,
                        input_names.as_ptr(),
                        input_values.as_ptr(),
                        input_values.len(),
                        output_names.as_ptr(),
                        output_values.len(),
                        output_values.as_mut_ptr(),
                    );
                    value::check(status).map_err(SessionError::Run)
                };
                match graphs {
                    Some(graphs) => graphs.run(session, graph, run)?,
                    None => plain_run(session, run)?,
                }
            }
        }
        for (output, value) in self.outputs.iter_mut().zip(&self.output_values) {
            output.take(*value);
        }
        // Of tensors that may be gone with what they were lent from.
        self.input_values.clear();
        self.outputs.iter_mut().try_for_each(Output::settle)?;
        self.written = into;
        self.fetch_read(rows)
    }

    /// Brings the outputs that are read to the host, and waits until the run is over.
    fn fetch_read(&mut self, rows: usize) -> Result<(), SessionError> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let queue = queue.get_mut();
        for output in self.outputs.iter_mut().filter(|output| output.is_read) {
            let Output { tensors, made, state, stays, .. } = output;
            let address = match (state, made) {
                (Some(state), _) => {
                    let resident = &self.batch_buffers[self.written][*state];
                    tensors.dims.clone_from(&resident.dims);
                    tensors.bytes = resident.bytes;
                    resident.row(0, rows).address
                }
                (_, Some(value)) if *stays => value.address().map_err(SessionError::Run)?,
                // On the host already.
                (_, Some(_)) => continue,
                (_, None) => tensors.row(0, rows).address,
            };
            tensors.reserve_staging(tensors.bytes)?;
            if let Some(staging) = &mut tensors.staging {
                queue.download(address, staging, tensors.bytes)?;
            }
        }
        Ok(queue.synchronise()?)
    }

    /// An output of the last run, which must have succeeded.
    pub fn output(&self, index: usize) -> Result<OutputView<'_>, SessionError> {
        let output = &self.outputs[index];
        let tensors = match output.state {
            Some(state) => &self.batch_buffers[self.written][state],
            None => &output.tensors,
        };
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
}

/// A run while no CUDA graph is captured, if it is on a GPU.
fn plain_run(
    session: &Session,
    mut run: impl FnMut(*const ort::sys::OrtRunOptions) -> Result<(), SessionError>,
) -> Result<(), SessionError> {
    let _no_capture = session.is_on_gpu().then(while_nothing_is_captured);
    run(session.run_options())
}

fn state_value(tensors: &mut Tensors, rows: usize, name: &CString) -> Result<*mut ort::sys::OrtValue, SessionError> {
    tensors.set_rows(rows)?;
    tensors.value().map_err(|why| tensor_error(name, why))
}

fn c_name(name: &str) -> Result<CString, SessionError> {
    CString::new(name)
        .map_err(|_| SessionError::Unsupported { name: name.to_owned(), what: "a name with a NUL".to_owned() })
}
