//! The run of a step: the call of ONNX Runtime, what is copied to a device before it, and what is kept and copied back
//! after it.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use gpu_rows::for_run;
use rows::tensor::{DataType, StorageType, element_count};
use smallvec::SmallVec;

use super::calls::{Arguments, GraphKey};
use super::open::{RunOptions, Session};
use super::tensors::BatchTensor;
use super::value::{MemoryKind, SessionError, Value, check};
use super::{Given, Input, MadeTensor, Output, OutputGiven, Overlay, Run, Step};
use crate::memory::{Bytes, TensorMemory};

impl Step {
    /// Runs the model over what the inputs and the given tensors hold. When it returns, nothing is under way on a
    /// device that uses what the run was given.
    pub fn run(&mut self, mut run: Run) -> Result<(), SessionError> {
        // The guard waits when it is dropped, so that the work of a run is done on every path. After a successful run,
        // nothing is left to wait for. A queue that has failed says so at its next use.
        let ran = scopeguard::guard(&mut *self, |step| _ = step.copier.synchronise()).enqueue_run(&mut run);
        match self.copier.device().and_then(|device| device.lost()) {
            // ONNX Runtime's own error doesn't say what to do.
            Some(lost) if ran.is_err() => Err(lost.clone().into()),
            _ => ran,
        }
    }

    fn enqueue_run(&mut self, run: &mut Run) -> Result<(), SessionError> {
        self.upload_inputs(run)?;
        let lent = self.list_inputs(run)?;
        self.list_outputs(run)?;
        let key = if run.as_graph && self.graphs.is_some() { GraphKey::of(run) } else { None };
        self.call(key)?;
        // Not earlier, because ONNX Runtime reads the lent tensors during the call.
        drop(lent);
        // All of them, before one is found that cannot be read.
        let made = self.outputs.iter().zip(&self.arguments.output_values).map(|(output, &value)| output.take(value));
        let made: SmallVec<[_; 8]> = made.collect();
        for (output, value) in self.outputs.iter_mut().zip(made) {
            output.keep_made(value, &self.session)?;
        }
        for (index, output) in self.outputs.iter_mut().enumerate().filter(|(_, output)| output.is_input) {
            output.copy_input(run.outputs.get_mut(index).and_then(Option::as_deref_mut))?;
        }
        self.fetch_read(run)
    }

    fn upload_inputs(&mut self, run: &Run) -> Result<(), SessionError> {
        let Some(mut queue) = self.copier.queue() else { return Ok(()) };
        for input in self.inputs.iter_mut().filter(|input| !input.omitted) {
            if std::mem::take(&mut input.must_upload) {
                // SAFETY: `run` waits before it gives the tensors up.
                unsafe { input.tensor.upload(&mut queue)? };
            }
        }
        for Overlay { input, part, from } in run.overlays {
            assert_eq!(from.byte_len(), part.bytes(), "row of another size");
            let batch = self.inputs[*input].tensor.address_for(part);
            // SAFETY: memory that is borrowed and has the size of the part, which is within an input; `run` waits
            // before it gives either up.
            unsafe { queue.put(part, StorageType::Exact, from.address(), batch) };
        }
        if self.waits_for_inputs {
            queue.synchronise()?;
        }
        Ok(queue.before_run()?)
    }

    /// Returns the tensors over lent memory, which the run needs.
    fn list_inputs(&mut self, run: &mut Run) -> Result<SmallVec<[Value; 2]>, SessionError> {
        let mut lent: SmallVec<[Value; 2]> = SmallVec::new();
        self.arguments.input_names.clear();
        self.arguments.input_values.clear();
        for (index, input) in self.inputs.iter_mut().enumerate().filter(|(_, input)| !input.omitted) {
            let value = match run.inputs.get_mut(index).and_then(Option::as_mut) {
                Some(Given::Batch(tensor)) => rows_value(tensor, run.rows, &input.name)?,
                Some(Given::Made(tensor)) => tensor.value.as_ptr(),
                Some(Given::Strings(tensor)) => tensor.as_ptr(),
                Some(Given::Lent { dims, bytes }) => {
                    lent.push(lent_value(input, dims, *bytes)?);
                    lent[lent.len() - 1].as_ptr()
                }
                None => match &input.strings {
                    Some(strings) => strings.as_ptr(),
                    None => input.tensor.value().map_err(|why| tensor_error(&input.name, why))?,
                },
            };
            self.arguments.input_names.push(input.name.as_ptr());
            self.arguments.input_values.push(value);
        }
        Ok(lent)
    }

    /// Null is what ONNX Runtime is to allocate.
    fn list_outputs(&mut self, run: &mut Run) -> Result<(), SessionError> {
        self.arguments.output_values.clear();
        for (index, output) in self.outputs.iter_mut().enumerate() {
            (output.made, output.given) = (None, None);
            let value = match run.outputs.get_mut(index).and_then(Option::as_mut) {
                Some(tensor) if !output.is_input => rows_value(tensor, run.rows, &output.name)?,
                _ => output.prepare(run.rows)?,
            };
            output.is_to_be_made = value.is_null();
            self.arguments.output_values.push(value);
        }
        Ok(())
    }

    /// Through a binding where outputs of open shape are to be made on the device.
    fn call(&mut self, graph: Option<GraphKey>) -> Result<(), SessionError> {
        let Some(bound) = &mut self.bound_run else { return self.call_unbound(graph) };
        let _no_capture = self.session.is_on_gpu().then(for_run);
        // SAFETY: every value is over a buffer of its own and lives during the run.
        unsafe { bound.run(&mut self.arguments, self.outputs.iter().map(|output| output.stays)) }
            .map_err(SessionError::Run)
    }

    fn call_unbound(&mut self, graph: Option<GraphKey>) -> Result<(), SessionError> {
        let Self { session, graphs, arguments, options, .. } = self;
        let Arguments { input_names, input_values, output_names, output_values } = arguments;
        // SAFETY: names and values are arrays of live objects, as many as said; every value is over a buffer of its
        // own, so nothing that is written is read; ONNX Runtime allocates the outputs that are null.
        let mut run = |options| unsafe {
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
            check(status).map_err(SessionError::Run)
        };
        match graphs {
            Some(graphs) => graphs.run(session, graph, run),
            None => {
                let _no_capture = session.is_on_gpu().then(for_run);
                run(options.as_deref().map_or(session.run_options(), RunOptions::as_ptr))
            }
        }
    }

    /// Brings the outputs that are read to the host, and waits until the run is over.
    fn fetch_read(&mut self, run: &Run) -> Result<(), SessionError> {
        let Some(mut queue) = self.copier.queue() else { return Ok(()) };
        for (index, output) in self.outputs.iter_mut().enumerate().filter(|(_, output)| output.is_read) {
            let Output { tensor, made, given, .. } = output;
            let (address, bytes) = match (run.outputs.get(index).and_then(Option::as_ref), made) {
                (Some(of_caller), _) => {
                    *given = OutputGiven::new(of_caller);
                    (of_caller.memory.address() as u64, of_caller.bytes)
                }
                (None, Some(made)) if made.is_on_device => (made.address()?, made.bytes),
                // On the host already.
                (None, Some(_)) => continue,
                (None, None) => (tensor.memory.address() as u64, tensor.bytes),
            };
            tensor.reserve_staging(bytes)?;
            if let Some(staging) = &mut tensor.staging {
                // SAFETY: the tensor has that many bytes; `run` waits before it gives the two up.
                unsafe { queue.download(address, staging, bytes)? };
            }
        }
        Ok(queue.synchronise()?)
    }
}

impl Output {
    /// The tensor to write to; null to let ONNX Runtime make one.
    fn prepare(&mut self, rows: usize) -> Result<*mut ort::sys::OrtValue, SessionError> {
        let Some(dims) = &self.dims else { return Ok(ptr::null_mut()) };
        self.tensor.shape(dims, rows)?;
        self.tensor.value().map_err(|why| tensor_error(&self.name, why))
    }

    fn take(&self, value: *mut ort::sys::OrtValue) -> Option<Value> {
        // SAFETY: Run was passed null for this output, so it made the tensor and left it to us.
        if self.is_to_be_made { unsafe { Value::from_run(value) } } else { None }
    }

    /// Keeps a tensor that ONNX Runtime made, and reads its shape and strings.
    fn keep_made(&mut self, value: Option<Value>, session: &Arc<Session>) -> Result<(), SessionError> {
        if !self.is_to_be_made {
            return Ok(());
        }
        let failed = |why| tensor_error(&self.name, why);
        let value = value.ok_or_else(|| failed("the run made none".to_owned()))?;
        let dims = value.dims().map_err(failed)?;
        let count = element_count(&dims);
        let bytes = count.and_then(|count| count.checked_mul(self.tensor.data_type.byte_size().unwrap_or(0)));
        let (Some(count), Some(bytes)) = (count, bytes) else { return Err(failed("its size overflows".to_owned())) };
        if self.tensor.data_type == DataType::Bytes {
            self.strings = value.strings(count)?;
        }
        let (value, is_on_device, _session) = (Arc::new(value), self.stays, session.clone());
        self.made = Some(MadeTensor { value, dims, bytes, is_on_device, _session });
        Ok(())
    }

    /// Copies the input that ONNX Runtime returned for this output to `own`, or without `own` to a buffer of the
    /// output, because the input's memory may be written again.
    fn copy_input(&mut self, own: Option<&mut BatchTensor>) -> Result<(), SessionError> {
        let Some(made) = self.made.take_if(|_| self.tensor.data_type != DataType::Bytes) else { return Ok(()) };
        let own = own.unwrap_or(&mut self.tensor);
        let rows = own.batch_axis.and_then(|axis| made.dims.get(axis)).map_or(1, |&rows| rows as usize);
        own.shape(&made.dims, rows)?;
        own.host_mut()?.copy_from_slice(made.host()?);
        Ok(())
    }
}

impl OutputGiven {
    fn new(tensor: &BatchTensor) -> Option<Self> {
        let TensorMemory::Device(buffer) = &tensor.memory else { return None };
        Some(Self { address: buffer.address(), bytes: buffer.byte_len(), _memory: buffer.memory().clone() })
    }
}

fn lent_value(input: &Input, dims: &[i64], bytes: Bytes) -> Result<Value, SessionError> {
    let (data_type, byte_len) = (input.tensor.data_type, bytes.byte_len());
    let wanted = element_count(dims).and_then(|count| count.checked_mul(data_type.byte_size()?));
    if wanted != Some(byte_len) {
        return Err(tensor_error(&input.name, format!("{byte_len} bytes do not make {dims:?}")));
    }
    let memory = match (bytes, &input.tensor.device) {
        (Bytes::Device(_), Some(device)) => MemoryKind::of(device),
        _ => MemoryKind::Host,
    };
    // SAFETY: as many bytes as the dimensions say, borrowed for longer than the run that the value is made for. ONNX
    // Runtime does not write to inputs.
    let value = unsafe { Value::over(memory, bytes.address().cast_mut(), byte_len, dims, data_type) };
    value.map_err(|why| tensor_error(&input.name, why))
}

fn rows_value(tensor: &mut BatchTensor, rows: usize, name: &CString) -> Result<*mut ort::sys::OrtValue, SessionError> {
    tensor.set_rows(rows)?;
    tensor.value().map_err(|why| tensor_error(name, why))
}

fn tensor_error(name: &CString, why: String) -> SessionError {
    SessionError::Tensor { name: name.to_string_lossy().into_owned(), why }
}

impl GraphKey {
    /// What a graph of this run would be bound to; `None` if something else than buffers is given.
    fn of(run: &Run) -> Option<Self> {
        let inputs = run.inputs.iter().flatten().map(|given| match given {
            Given::Batch(tensor) => Some(tensor.memory.address() as usize),
            Given::Made(_) | Given::Strings(_) | Given::Lent { .. } => None,
        });
        let outputs = run.outputs.iter().flatten().map(|tensor| Some(tensor.memory.address() as usize));
        Some(Self { rows: run.rows, given: inputs.chain(outputs).collect::<Option<_>>()? })
    }
}
