//! The call of ONNX Runtime, and what is copied to a device before it and from there after it.

use std::ffi::{CString, c_char};

use smallvec::SmallVec;

use super::{Grown, Input, Step};
use crate::memory::Bytes;
use crate::memory::device::{Change, Foreign, RowIn, while_nothing_is_captured};
use crate::session::bound_run::Fetch;
use crate::session::graphs::GraphKey;
use crate::session::open::{Session, SessionError};
use crate::session::output::{Output, tensor_error};
use crate::session::tensors::Tensors;
use crate::session::value::{self, MemoryKind, Value};
use crate::tensor::{RowLayout, element_count};

/// What a run is over.
#[derive(Clone, Copy, Default)]
pub struct Run<'a> {
    /// Number of rows.
    pub rows: usize,
    /// The batch buffer that states are read from.
    pub from: usize,
    /// The batch buffer that states are written to.
    pub into: usize,
    /// What growing states are read from, if not from the inputs.
    pub grown: Option<&'a Grown>,
    /// Tensors in the place of some inputs.
    pub lent: &'a [Lent<'a>],
    /// Rows of inputs that are on the step's device.
    pub overlays: &'a [Overlay<'a>],
    /// It may be captured as a CUDA graph, or be a replay of one.
    pub as_graph: bool,
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

/// A row of an input that lies on the step's device. It is copied to its place of the input after the other rows, which
/// have been filled on the host.
pub struct Overlay<'a> {
    /// Index of the input.
    pub input: usize,
    /// Layout of its rows.
    pub layout: RowLayout,
    /// Which row.
    pub place: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Where it lies.
    pub from: Foreign<'a>,
}

/// What ONNX Runtime is called with: pointers to names and tensors that the step owns, or that are lent to it for a
/// run.
#[derive(Default)]
pub(super) struct Arguments {
    input_names: Vec<*const c_char>,
    output_names: Vec<*const c_char>,
    input_values: Vec<*const ort::sys::OrtValue>,
    output_values: Vec<*mut ort::sys::OrtValue>,
}

// SAFETY: only a run of the step that owns the lists follows the pointers. It has just listed what it owns or is lent,
// and none of that is bound to a thread.
unsafe impl Send for Arguments {}

impl Arguments {
    /// For a model with so many inputs and these outputs, which have to live as long.
    pub fn new(inputs: usize, outputs: &[Output]) -> Self {
        Self {
            input_names: Vec::with_capacity(inputs),
            output_names: outputs.iter().map(|output| output.name.as_ptr()).collect(),
            input_values: Vec::with_capacity(inputs),
            output_values: Vec::with_capacity(outputs.len()),
        }
    }
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

impl Step {
    /// Runs the model over what the inputs, the batch buffer and the lent tensors hold. When it returns, nothing is
    /// under way on a device that uses what the run was lent.
    pub fn run(&mut self, run: Run) -> Result<(), SessionError> {
        RunUnderWay(self).0.enqueue_run(run)
    }

    fn enqueue_run(&mut self, run: Run) -> Result<(), SessionError> {
        assert!(run.from != run.into || self.states.is_empty(), "a run reads what it writes");
        self.make_batch_buffer(run.from.max(run.into))?;
        if let Some(queue) = &mut self.queue {
            let queue = queue.get_mut();
            for input in self.inputs.iter_mut().filter(|input| !input.omitted) {
                if std::mem::take(&mut input.must_upload) {
                    // SAFETY: `run` waits before it gives the tensors up.
                    unsafe { input.tensors.upload(queue)? };
                }
            }
            for &Overlay { input, layout, place, rows, from } in run.overlays {
                assert_eq!(from.byte_len(), layout.row_bytes(), "row of another size");
                let to = self.inputs[input].tensors.row(layout, place, rows);
                // SAFETY: memory that is borrowed, and a row of an input; `run` waits before it gives either up.
                unsafe { queue.move_row(layout, RowIn::alone(from.address()), to, Change::None) };
            }
            queue.before_run()?;
        }
        let Run { rows, from, into, lent, as_graph, .. } = run;
        let graph = (as_graph && lent.is_empty()).then_some(GraphKey { rows, from, into });
        let lent = lent.iter().map(|lent| lent.value(&self.inputs)).collect::<Result<SmallVec<[_; 2]>, _>>()?;
        self.list_inputs(run, &lent)?;
        self.list_outputs(run)?;
        self.call(graph)?;
        for (output, value) in self.outputs.iter_mut().zip(&self.arguments.output_values) {
            output.take(*value);
        }
        self.outputs.iter_mut().try_for_each(Output::settle)?;
        for output in self.outputs.iter_mut().filter(|output| output.is_input) {
            let own = output.state.map(|state| &mut self.batch_buffers[into][state]);
            output.copy_input(own)?;
        }
        self.written = into;
        self.fetch_read()
    }

    fn list_inputs(&mut self, run: Run, lent: &[(usize, Value)]) -> Result<(), SessionError> {
        self.arguments.input_names.clear();
        self.arguments.input_values.clear();
        for (index, input) in self.inputs.iter_mut().enumerate().filter(|(_, input)| !input.omitted) {
            let lent = lent.iter().find(|(of, _)| *of == index);
            let grown = input.growing.zip(run.grown).and_then(|(state, grown)| grown.value(state));
            let value = match (lent, grown, &input.strings, input.state) {
                (Some((_, lent)), ..) => lent.as_ptr(),
                (_, Some(grown), ..) => grown.as_ptr(),
                (.., Some(strings), _) => strings.as_ptr(),
                (.., Some(state)) => state_value(&mut self.batch_buffers[run.from][state], run.rows, &input.name)?,
                _ => input.tensors.value().map_err(|why| tensor_error(&input.name, why))?,
            };
            self.arguments.input_names.push(input.name.as_ptr());
            self.arguments.input_values.push(value);
        }
        Ok(())
    }

    /// Null is what ONNX Runtime is to allocate.
    fn list_outputs(&mut self, run: Run) -> Result<(), SessionError> {
        self.arguments.output_values.clear();
        for output in &mut self.outputs {
            output.made = None;
            self.arguments.output_values.push(match output.state {
                Some(state) if !output.is_input => {
                    state_value(&mut self.batch_buffers[run.into][state], run.rows, &output.name)?
                }
                _ => output.prepare(run.rows)?,
            });
        }
        Ok(())
    }

    /// Through a binding where outputs of open shape are to be made on the device.
    fn call(&mut self, graph: Option<GraphKey>) -> Result<(), SessionError> {
        let Some(bound) = &mut self.bound_run else { return self.call_unbound(graph) };
        let Arguments { input_names, input_values, output_values, .. } = &mut self.arguments;
        let inputs = input_names.iter().copied().zip(input_values.iter().copied());
        let fetches = self.outputs.iter().zip(&*output_values).map(|(output, &value)| match output.stays {
            true => Fetch::OnDevice(&output.name),
            false if value.is_null() => Fetch::OnHost(&output.name),
            false => Fetch::Into(&output.name, value),
        });
        let _no_capture = self.session.is_on_gpu().then(while_nothing_is_captured);
        // SAFETY: every value is over a buffer of its own and lives during the run.
        let made = unsafe { bound.run(inputs, fetches) }.map_err(SessionError::Run)?;
        output_values.clear();
        output_values.extend(made);
        Ok(())
    }

    fn call_unbound(&mut self, graph: Option<GraphKey>) -> Result<(), SessionError> {
        let Self { session, graphs, arguments, .. } = self;
        let Arguments { input_names, input_values, output_names, output_values } = arguments;
        // SAFETY: names and values are arrays of live objects, as many as said; every value is over a buffer of its own,
        // so nothing that is written is read; ONNX Runtime allocates the outputs that are null.
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
            Some(graphs) => graphs.run(session, graph, run),
            None => plain_run(session, run),
        }
    }

    /// Brings the outputs that are read to the host, and waits until the run is over.
    fn fetch_read(&mut self) -> Result<(), SessionError> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let queue = queue.get_mut();
        for output in self.outputs.iter_mut().filter(|output| output.is_read) {
            let Output { tensors, made, state, stays, .. } = output;
            let address = match (state, made) {
                (Some(state), _) => {
                    let resident = &self.batch_buffers[self.written][*state];
                    tensors.dims.clone_from(&resident.dims);
                    tensors.bytes = resident.bytes;
                    resident.store.address() as u64
                }
                (_, Some(value)) if *stays => value.address().map_err(SessionError::Run)?,
                // On the host already.
                (_, Some(_)) => continue,
                (_, None) => tensors.store.address() as u64,
            };
            tensors.reserve_staging(tensors.bytes)?;
            if let Some(staging) = &mut tensors.staging {
                // SAFETY: the tensor has that many bytes; `run` waits before it gives the two up.
                unsafe { queue.download(address, staging, tensors.bytes)? };
            }
        }
        Ok(queue.synchronise()?)
    }
}

/// Dropped, it waits, so that what a run enqueues has happened on every path.
struct RunUnderWay<'a>(&'a mut Step);

impl Drop for RunUnderWay<'_> {
    fn drop(&mut self) {
        // After a run that succeeded nothing is left to wait for; a queue that has failed says so at its next use.
        let _ = self.0.synchronise();
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
