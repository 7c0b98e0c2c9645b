//! Reads and checks a request; the result is a [`Decoded`]. If this backend schedules the sequences, it first reads the
//! id, START and END.

use std::ffi::CString;
use std::sync::Arc;
use std::time::Instant;

use gpu_rows::Foreign;
use rows::tensor::{DataType, dims_fit, element_count};
use sequences::scheduler::{Control, Origin};
use sequences::{Key, SequenceId};
use smallvec::SmallVec;

use super::course::Course;
use super::state_api::{StateReader, StateRequest, check_strings, check_type};
use super::{Decoded, TellsId, fault};
use crate::binding::{Binding, BoundControl, BoundInput, RequestInput, ShapeForm, Source, StateApi, StepsMultiple};
use crate::config::{CONTROL_INPUT, ID_TENSOR, TakesIds};
use crate::error::{AdmissionError, InputError, RequestError};
use crate::panic;
use crate::triton::{Input, Request, c_name};

/// What requests of a model must carry. Made once per instance.
pub struct Expected {
    names: Vec<CString>,
    inputs: Vec<ExpectedInput>,
    /// The model is fed the sequence id as an integer of this type.
    numeric_id: Option<DataType>,
    /// The GPU that the model runs on.
    gpu: Option<i32>,
    pub state: StateReader,
    binding: Arc<Binding>,
}

struct ExpectedInput {
    input: BoundInput,
    request: RequestInput,
    /// Dimensions of a request; -1 is any.
    dims: Vec<i64>,
}

impl Expected {
    pub fn new(binding: &Arc<Binding>, state_api: Option<&StateApi>, gpu: Option<i32>) -> Self {
        let inputs = binding.request_inputs().map(|(input, request)| {
            let dims = request.request_dims(input);
            ExpectedInput { input: input.clone(), request: request.clone(), dims }
        });
        let inputs: Vec<_> = inputs.collect();
        let numeric_id = binding.inputs.iter().find_map(|input| match input.source {
            Source::Control(BoundControl::CorrelationId(data_type)) => {
                Some(data_type).filter(|&of| of != DataType::Bytes)
            }
            _ => None,
        });
        let names = inputs.iter().map(|expected| c_name(&expected.input.name)).collect();
        let state = StateReader::new(state_api.cloned(), binding);
        Self { names, inputs, numeric_id, gpu, state, binding: binding.clone() }
    }

    /// Reads a request of this instance (and lane, where there are lanes) and checks everything that can be wrong with
    /// it alone. The result carries the error if the request is invalid. Returns `None` for a filler of the `direct`
    /// strategy, which is released.
    pub fn decode(&self, mut request: Request, instance: u32, lane: Option<u32>) -> Option<Decoded> {
        let read = |request: &Request| -> Result<_, RequestError> {
            let (start, end) = request.start_and_end()?;
            Ok((request.sequence_id()?, start, end, request.output_count()?))
        };
        let (id, start, end, outputs) = match read(&request) {
            Ok(read) => read,
            Err(error) => return Some(Decoded { problem: Some(Box::new(error)), ..Decoded::new(request) }),
        };
        // The requests of a warm-up have no id either, but they want outputs.
        if id.is_none() && outputs == 0 {
            // With `direct`, core fills holes of a batch with such requests. Their data are garbage, and no client
            // waits for an answer.
            request.release_unanswered();
            return None;
        }
        let mut asked = None;
        let checked = panic::catch_result(|| {
            asked = self.state.parameters(&request)?;
            self.check(&mut request, id.as_ref(), &mut asked, start)
        });
        let key = id.map(|id| Key { instance, lane, id });
        let problem = checked.err().map(Box::new);
        // While a request waits, core looks at its timeout. Here only one between two steps can be late.
        let deadline = if self.make_steps() { request.timeout().map(|timeout| Instant::now() + timeout) } else { None };
        Some(Decoded { key, start, end, asked, deadline, problem, ..Decoded::new(request) })
    }

    pub fn make_steps(&self) -> bool {
        self.binding.makes_steps()
    }

    /// Whether a request and what its sequence has `left` over are too little for a step. False if only the request's
    /// turn shows it.
    pub fn brings_no_window(&self, of: &Decoded, left: &[Vec<u8>]) -> bool {
        let is_plain = of.asked.is_none() && !of.start && !of.end;
        self.binding.is_cut && is_plain && Course::has_no_window(&self.binding, &of.request, left)
    }

    /// The same for a request, or a row of one, of a model that this backend schedules itself.
    pub fn decode_row(
        &self,
        mut request: Request,
        start: bool,
        end: bool,
        tells_id: TellsId,
        mut asked: Option<Box<StateRequest>>,
    ) -> Decoded {
        let checked = panic::catch_result(|| self.check(&mut request, None, &mut asked, start));
        let problem = checked.err().map(Box::new);
        Decoded { start, end, asked, tells_id: Some(tells_id), problem, ..Decoded::new(request) }
    }

    /// Copies inputs on GPUs that this instance cannot reach, and those that a whole batch shares, to the host. Waits
    /// once for each GPU. A row whose input cannot be copied gets a problem.
    pub fn fetch<'r>(&self, rows: impl Iterator<Item = &'r mut Decoded>) {
        let runs = |row: &Decoded| row.problem.is_none() && row.asked.as_ref().is_none_or(|asked| asked.progress.runs);
        let is_far = |row: &Decoded, (index, expected): (usize, &ExpectedInput)| {
            row.request.input(index).is_some_and(|input| expected.is_to_be_fetched(input, self.gpu))
        };
        let is_to_fetch = |row: &Decoded| runs(row) && self.inputs.iter().enumerate().any(|input| is_far(row, input));
        let mut rows: Vec<_> = rows.filter(|row| is_to_fetch(row)).collect();
        if rows.is_empty() {
            return;
        }
        let far = |(number, row): (usize, &&mut Decoded)| {
            let inputs = self.inputs.iter().enumerate().filter(|&input| is_far(row, input));
            inputs.map(move |(index, _)| (number, index)).collect::<Vec<_>>()
        };
        let far: Vec<_> = rows.iter().enumerate().flat_map(far).collect();
        let mut requests: Vec<_> = rows.iter_mut().map(|row| &mut row.request).collect();
        match panic::catch(|| Request::copy_inputs(&mut requests, &far)) {
            Ok(copied) => {
                for (&(row, index), copied) in far.iter().zip(copied) {
                    if let Err(error) = copied {
                        let not_copied = || InputError::not_copied(&self.inputs[index].input.name, error);
                        rows[row].problem.get_or_insert_with(|| Box::new(not_copied().into()));
                    }
                }
            }
            Err(panic) => rows.iter_mut().for_each(|row| row.problem = Some(Box::new(panic.clone().into()))),
        }
    }

    fn check(
        &self,
        request: &mut Request,
        id: Option<&SequenceId>,
        asked: &mut Option<Box<StateRequest>>,
        start: bool,
    ) -> Result<(), RequestError> {
        fault::point("decode", [&*request]);
        if let (Some(data_type), Some(id)) = (self.numeric_id, id) {
            check_id(id, data_type)?;
        }
        request.bind_inputs(&self.names)?;
        self.state.tensors(request, asked, &self.binding, &self.names, start)?;
        if asked.as_ref().is_some_and(|asked| !asked.progress.runs) {
            return Ok(());
        }
        Ok(self
            .inputs
            .iter()
            .enumerate()
            .try_for_each(|(index, expected)| expected.check(request, index, &self.binding))?)
    }
}

impl ExpectedInput {
    /// Checks an input, and copies strings, and what a whole batch shares, because others could change them.
    /// [`Expected::fetch`] does this for inputs on GPUs.
    fn check(&self, request: &mut Request, index: usize, binding: &Binding) -> Result<(), InputError> {
        let BoundInput { data_type, batch_axis, .. } = self.input;
        let name = || self.input.name.clone();
        let Some(input) = request.input(index) else {
            // Whether the sequence holds one is known only after admission.
            if self.request.optional || self.request.is_held {
                return Ok(());
            }
            let error = if self.request.window.is_some() { InputError::MissingWindows } else { InputError::Missing };
            return Err(error(name()));
        };
        check_type(input, data_type, name)?;
        if !dims_fit(input.dims(), &self.dims) {
            let (name, came, wanted) = (name(), input.dims().to_vec(), self.dims.clone());
            let has_rows = self.request.form != ShapeForm::Plain || batch_axis == Some(0);
            let is_row = has_rows && came.len() == wanted.len() && dims_fit(&came[1..], &wanted[1..]);
            return Err(if is_row {
                InputError::Rows { name, came }
            } else {
                InputError::Shape { name, came, wanted }
            });
        }
        if let Some(StepsMultiple { axis, multiple }) = self.request.steps_multiple {
            let came = self.request.own_length(input.dims(), axis);
            if came % multiple != 0 {
                return Err(InputError::StepsMultiple { name: name(), axis, came, multiple });
            }
        }
        // Dims whose product overflows are those of no tensor, so the number of bytes differs below.
        let count = element_count(input.dims()).unwrap_or(usize::MAX);
        // A context, or elements that an earlier request left over, come before the request's elements.
        let may_be_empty = self.request.context.is_some() || self.request.window.is_some();
        if let (0, false, Some(node)) = (count, may_be_empty, &binding.needs_steps) {
            return Err(InputError::NoSteps { name: name(), came: input.dims().to_vec(), node: node.clone() });
        }
        if data_type == DataType::Bytes {
            return check_strings(request, index, count, name);
        }
        let wanted = count.saturating_mul(data_type.byte_size().unwrap_or(1));
        if input.bytes() != wanted {
            return Err(InputError::Bytes { name: name(), came: input.bytes(), wanted });
        }
        if self.is_shared() && !input.is_on_gpus() {
            request.copy_input(index).map_err(|error| InputError::not_copied(&self.input.name, error))?;
        }
        Ok(())
    }

    /// Whether all rows of a batch have the same value of the input. Grouping compares the values.
    fn is_shared(&self) -> bool {
        self.request.form == ShapeForm::Unbatched
    }

    /// Whether the input is on a GPU and an instance on GPU `gpu` cannot copy it from there.
    fn is_to_be_fetched(&self, input: Input, gpu: Option<i32>) -> bool {
        if !input.is_on_gpus() || self.is_shared() {
            return input.is_on_gpus();
        }
        // Windows and strings are put together on the host. What is copied as it is may as well be copied on a GPU.
        let is_copied = self.request.window_axis().is_none()
            && self.request.window.is_none()
            && self.input.batch_axis.is_some()
            && self.input.data_type != DataType::Bytes;
        let is_near = |on_gpu: Foreign| Some(on_gpu.gpu()) == gpu;
        !is_copied || !input.on_gpu().is_some_and(is_near)
    }
}

/// Whether the model can be fed a sequence id as a number of this type.
fn check_id(id: &SequenceId, data_type: DataType) -> Result<(), AdmissionError> {
    let most = match data_type {
        DataType::Int32 => i32::MAX as u64,
        DataType::Uint32 => u64::from(u32::MAX),
        DataType::Int64 => i64::MAX as u64,
        _ => u64::MAX,
    };
    match *id {
        SequenceId::Name(_) => Err(AdmissionError::IdType { id: id.clone(), data_type }),
        SequenceId::Number(id) if id > most => Err(AdmissionError::IdTooLarge { id, data_type, most }),
        SequenceId::Number(_) => Ok(()),
    }
}

/// Reads a request's id, START and END, if this backend schedules the sequences: from Triton's request parameters, or
/// from the special inputs of OpenVINO Model Server (`sequence_id` and `sequence_control_input`).
pub struct ControlReader {
    /// The special inputs that the configuration lists, the id first.
    names: Vec<CString>,
    takes: TakesIds,
    /// Most inputs that a request can have without a special one.
    inputs: usize,
}

/// The ids and the controls in a request's special inputs, by row; `None` if it doesn't have the input.
type Special = (Option<Vec<u64>>, Option<Vec<u32>>);

impl ControlReader {
    /// `inputs`: number of the other inputs that every request must carry.
    pub fn new(takes: TakesIds, inputs: usize) -> Self {
        let names = [(takes.id, ID_TENSOR), (takes.control, CONTROL_INPUT)];
        Self { names: names.into_iter().filter(|(is, _)| *is).map(|(_, name)| c_name(name)).collect(), takes, inputs }
    }

    /// The control of each row of a request. Checks in the order of OpenVINO Model Server: the special inputs, the
    /// control value, the id.
    pub fn read(&self, request: &mut Request) -> Result<SmallVec<[Control; 1]>, RequestError> {
        let (start, end) = request.start_and_end()?;
        let id = request.sequence_id()?;
        // Looking for the special inputs costs an error object of core's for each one that isn't there.
        let is_plain = id.is_some() && request.input_count()? as usize <= self.inputs;
        let (ids, controls) = if is_plain { Special::default() } else { self.special(request)? };
        let rows = ids.as_ref().map(Vec::len).or(controls.as_ref().map(Vec::len)).unwrap_or(1);
        let parameters = Control { id, start, end, origin: Origin::Own };
        let row = |row: usize| {
            let id = ids.as_ref().map(|ids| ids.get(row).copied().unwrap_or(0));
            let control = controls.as_ref().map(|controls| controls.get(row).copied().unwrap_or(0));
            of_row(&parameters, id.filter(|&id| id != 0), control)
        };
        Ok((0..rows).map(row).collect::<Result<_, _>>()?)
    }

    fn special(&self, request: &mut Request) -> Result<Special, RequestError> {
        if self.names.is_empty() {
            return Ok(Special::default());
        }
        request.bind_inputs(&self.names)?;
        let (mut ids, mut controls) = Special::default();
        if self.takes.id {
            ids = elements(request, 0, ID_TENSOR)?.map(|ids| ids.into_iter().map(u64::from_ne_bytes).collect());
        }
        if self.takes.control {
            let read = elements(request, usize::from(self.takes.id), CONTROL_INPUT)?;
            controls = read.map(|read| read.into_iter().map(u32::from_ne_bytes).collect());
        }
        match controls.iter().flatten().find(|&&control| control > 2) {
            Some(&control) => Err(AdmissionError::Control(control).into()),
            None => Ok((ids, controls)),
        }
    }
}

/// Joins the request parameters with the special inputs of a row. Fails if they differ.
fn of_row(parameters: &Control, id: Option<u64>, control: Option<u32>) -> Result<Control, AdmissionError> {
    let id = id.map(SequenceId::Number);
    if let (Some(by_parameter), Some(by_input)) = (&parameters.id, &id)
        && by_parameter != by_input
    {
        let (parameter, input) = (by_parameter.to_string(), by_input.to_string());
        return Err(AdmissionError::IdConflict { what: ID_TENSOR, parameter, input });
    }
    let by_parameters = (parameters.start, parameters.end);
    let (start, end) = control.map_or(by_parameters, |control| (control == 1, control == 2));
    if by_parameters != (false, false) && by_parameters != (start, end) {
        let parameter = match by_parameters {
            (true, true) => "START and END",
            (true, false) => "START",
            _ => "END",
        };
        let (parameter, input) = (parameter.to_owned(), control.unwrap_or(0).to_string());
        return Err(AdmissionError::IdConflict { what: CONTROL_INPUT, parameter, input });
    }
    let id = parameters.id.clone().or(id);
    if id.is_none() && !start {
        return Err(AdmissionError::IdNotProvided);
    }
    Ok(Control { id, start, end, origin: Origin::Own })
}

/// The elements of bound input number `index`, one for each row; `None` if the request doesn't have it. Core has
/// checked its type against the configuration, whose type was checked at load.
fn elements<const N: usize>(
    request: &mut Request,
    index: usize,
    name: &'static str,
) -> Result<Option<Vec<[u8; N]>>, RequestError> {
    let Some(input) = request.input(index) else { return Ok(None) };
    let came = input.dims().to_vec();
    let bytes = input.bytes();
    if bytes == 0 || came.first() != Some(&((bytes / N) as i64)) {
        return Err(AdmissionError::TensorShape { name, came }.into());
    }
    // The client may have it in memory of a GPU.
    request.copy_input(index).map_err(|error| InputError::not_copied(name, error))?;
    let mut copied = Vec::with_capacity(bytes);
    request.input(index).into_iter().flat_map(|input| input.pieces()).for_each(|piece| piece.append_to(&mut copied));
    Ok(Some(copied.chunks_exact(N).map(|chunk| chunk.try_into().unwrap_or([0; N])).collect()))
}
