//! From a request to a row that fits the model.

use std::ffi::CString;
use std::sync::Arc;
use std::time::Instant;

use rows::tensor::{DataType, element_count};
use sequences::{Key, SequenceId};

use super::course::Course;
use super::state_api::{StateReader, StateRequest};
use super::{Row, TellsId, fault};
use crate::binding::{Binding, BoundControl, ShapeForm, Source, StateApi, StepsMultiple};
use crate::error::{AdmissionError, InputError, RequestError, StateApiError};
use crate::panic;
use crate::store::RowState;
use crate::triton::{Input, NotCopied, Request, c_name};

/// What requests of a model must carry. Made once per instance.
pub struct Expected {
    names: Vec<CString>,
    inputs: Vec<ExpectedInput>,
    /// The model is fed the sequence id as an integer of this type.
    numeric_id: Option<DataType>,
    /// The GPU that the model runs on.
    gpu: Option<i32>,
    state: StateReader,
    binding: Arc<Binding>,
}

struct ExpectedInput {
    name: String,
    data_type: DataType,
    /// Dimensions of a request; -1 is any.
    dims: Vec<i64>,
    /// The first dimension counts rows.
    has_rows: bool,
    optional: bool,
    /// It is cut into windows.
    is_cut: bool,
    /// It is copied as it is, so it may as well be copied on a GPU.
    is_copied: bool,
    /// All rows of a batch have the same value of it: grouping compares the values.
    is_shared: bool,
    /// How the dimensions are in the model.
    form: ShapeForm,
    /// What the number of steps must be a multiple of.
    steps_multiple: Option<StepsMultiple>,
    /// A node that must not run over no steps, if nothing stands in front of the request's elements.
    needs_elements: Option<String>,
}

impl Expected {
    /// What the requests of this model must carry, for an instance on that GPU.
    pub fn new(binding: &Arc<Binding>, state_api: Option<&StateApi>, gpu: Option<i32>) -> Self {
        let inputs = binding.request_inputs().map(|(input, request)| {
            let dims = request.request_dims(input);
            let (name, data_type) = (input.name.clone(), input.data_type);
            let is_copied = request.window_axis().is_none()
                && request.window.is_none()
                && input.batch_axis.is_some()
                && data_type != DataType::Bytes;
            let is_shared = request.form == ShapeForm::Unbatched;
            let optional = request.optional || request.is_held;
            let has_rows = request.form != ShapeForm::Plain || input.batch_axis == Some(0);
            let may_be_empty = request.context.is_some() || request.window.is_some();
            let needs_elements = binding.needs_steps.clone().filter(|_| !may_be_empty);
            ExpectedInput {
                name,
                data_type,
                dims,
                has_rows,
                optional,
                is_cut: request.window.is_some(),
                is_copied,
                is_shared,
                form: request.form,
                steps_multiple: request.steps_multiple,
                needs_elements,
            }
        });
        let inputs: Vec<_> = inputs.collect();
        let numeric_id = binding.inputs.iter().find_map(|input| match input.source {
            Source::Control(BoundControl::CorrelationId(data_type)) => {
                Some(data_type).filter(|&of| of != DataType::Bytes)
            }
            _ => None,
        });
        let names = inputs.iter().map(|input| c_name(&input.name)).collect();
        let state = StateReader::new(state_api.cloned(), binding);
        Self { names, inputs, numeric_id, gpu, state, binding: binding.clone() }
    }

    /// Reads a request of this instance (and lane, where there are lanes) and checks everything that can be wrong with
    /// it alone. Returns its row, with a problem if it is wrong; `None` for a filler of the `direct` strategy, which is
    /// released.
    pub fn decode(&self, mut request: Request, instance: u32, lane: Option<u32>) -> Option<Row> {
        let Identity { id, start, end, outputs } = match Identity::of(&request) {
            Ok(identity) => identity,
            Err(error) => return Some(Row { problem: Some(Box::new(error)), ..Row::new(request) }),
        };
        // The requests of a warm-up have no id either, but they want outputs.
        if id.is_none() && outputs == 0 {
            request.release_unanswered();
            return None;
        }
        let mut asked = None;
        let checked = panic::catch_result(|| {
            asked = self.state.parameters(&request)?;
            self.check(&mut request, id.as_ref(), &mut asked, start)
        });
        let key = id.map(|id| Key { instance, lane, id });
        let state = RowState { start, ..RowState::default() };
        let problem = checked.err().map(Box::new);
        // While a request waits, core looks at its timeout. Here only one between two steps can be late.
        let deadline = if self.make_steps() { request.timeout().map(|timeout| Instant::now() + timeout) } else { None };
        Some(Row { state, key, end, asked, deadline, problem, ..Row::new(request) })
    }

    /// Whether requests may make several steps.
    pub fn make_steps(&self) -> bool {
        self.binding.makes_steps()
    }

    /// Whether a request and what its sequence has `left` over are too little for a step. False if only the request's turn
    /// shows it.
    pub fn brings_no_window(&self, row: &Row, left: &[Vec<u8>]) -> bool {
        let is_plain = row.asked.is_none() && !row.state.start && !row.end;
        self.binding.is_cut && is_plain && Course::has_no_window(&self.binding, &row.request, left)
    }

    /// Checks a request of a model that this backend schedules itself, and makes its row.
    pub fn row(
        &self,
        mut request: Request,
        start: bool,
        end: bool,
        tells_id: TellsId,
        mut asked: Option<Box<StateRequest>>,
    ) -> Row {
        let checked = panic::catch_result(|| self.check(&mut request, None, &mut asked, start));
        let state = RowState { start, ..RowState::default() };
        let problem = checked.err().map(Box::new);
        Row { state, end, asked, tells_id: Some(tells_id), problem, ..Row::new(request) }
    }

    /// See [`StateReader::drains`].
    pub fn drains(&self, request: &Request) -> Option<Result<bool, StateApiError>> {
        self.state.drains(request)
    }

    /// The parameters of the State API that a request has.
    pub fn asked(&self, request: &Request) -> Result<Option<Box<StateRequest>>, StateApiError> {
        self.state.parameters(request)
    }

    /// Copies inputs on GPUs that this instance cannot reach, and those that a whole batch shares, to the host. Waits once for
    /// each GPU. A row whose input cannot be copied gets a problem.
    pub fn fetch<'r>(&self, rows: impl Iterator<Item = &'r mut Row>) {
        let runs = |row: &Row| row.problem.is_none() && row.asked.as_ref().is_none_or(|asked| asked.progress.runs);
        let is_far = |row: &Row, (index, expected): (usize, &ExpectedInput)| {
            row.request.input(index).is_some_and(|input| expected.is_to_be_fetched(input, self.gpu))
        };
        let is_to_fetch = |row: &Row| runs(row) && self.inputs.iter().enumerate().any(|input| is_far(row, input));
        let mut rows: Vec<_> = rows.filter(|row| is_to_fetch(row)).collect();
        if rows.is_empty() {
            return;
        }
        let far = |(number, row): (usize, &&mut Row)| {
            let inputs = self.inputs.iter().enumerate().filter(|&input| is_far(row, input));
            inputs.map(move |(index, _)| (number, index)).collect::<Vec<_>>()
        };
        let far: Vec<_> = rows.iter().enumerate().flat_map(far).collect();
        let mut requests: Vec<_> = rows.iter_mut().map(|row| &mut row.request).collect();
        match panic::catch(|| Request::copy_inputs(&mut requests, &far)) {
            Ok(copied) => {
                for (&(row, index), copied) in far.iter().zip(copied) {
                    if let Err(error) = copied {
                        rows[row].problem.get_or_insert_with(|| Box::new(self.inputs[index].not_copied(error).into()));
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
        Ok(self.inputs.iter().enumerate().try_for_each(|(index, expected)| expected.check(request, index))?)
    }
}

/// What a request says of its place in a sequence.
struct Identity {
    id: Option<SequenceId>,
    start: bool,
    end: bool,
    /// Number of outputs that are wanted.
    outputs: u32,
}

impl Identity {
    fn of(request: &Request) -> Result<Self, RequestError> {
        let (start, end) = request.start_and_end()?;
        Ok(Self { id: request.sequence_id()?, start, end, outputs: request.output_count()? })
    }
}

/// Whether dims are those that are wanted, where -1 is any.
fn fit(came: &[i64], wanted: &[i64]) -> bool {
    let fits = |(&came, &wanted): (&i64, &i64)| came == wanted || (wanted < 0 && came >= 0);
    came.len() == wanted.len() && came.iter().zip(wanted).all(fits)
}

impl ExpectedInput {
    /// Checks an input, and copies strings, and what a whole batch shares, because others could change them.
    /// [`Expected::fetch`] does this for inputs on GPUs.
    fn check(&self, request: &mut Request, index: usize) -> Result<(), InputError> {
        let Some(input) = request.input(index) else {
            let error = if self.is_cut { InputError::MissingWindows } else { InputError::Missing };
            return if self.optional { Ok(()) } else { Err(error(self.name.clone())) };
        };
        if input.data_type() != Some(self.data_type) {
            let came = input.data_type().map_or("of an unknown type".to_owned(), |data_type| data_type.to_string());
            return Err(InputError::Type { name: self.name.clone(), came, wanted: self.data_type });
        }
        if !fit(input.dims(), &self.dims) {
            let (name, came, wanted) = (self.name.clone(), input.dims().to_vec(), self.dims.clone());
            let is_row = self.has_rows && came.len() == wanted.len() && fit(&came[1..], &wanted[1..]);
            return Err(if is_row {
                InputError::Rows { name, came }
            } else {
                InputError::Shape { name, came, wanted }
            });
        }
        if let Some(StepsMultiple { axis, multiple }) = self.steps_multiple {
            let came = self.form.model_dims(input.dims()).get(axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0));
            if came % multiple != 0 {
                return Err(InputError::StepsMultiple { name: self.name.clone(), axis, came, multiple });
            }
        }
        let count = element_count(input.dims()).unwrap_or(usize::MAX);
        if let (0, Some(node)) = (count, &self.needs_elements) {
            let (name, came) = (self.name.clone(), input.dims().to_vec());
            return Err(InputError::NoSteps { name, came, node: node.clone() });
        }
        if self.data_type == DataType::Bytes {
            let came = request.read_strings(index).map_err(|error| self.not_copied(error))?;
            if came != Some(count) {
                return Err(InputError::Strings { name: self.name.clone(), came, wanted: count });
            }
            return Ok(());
        }
        let wanted = count.saturating_mul(self.data_type.byte_size().unwrap_or(1));
        if input.bytes() != wanted {
            return Err(InputError::Bytes { name: self.name.clone(), came: input.bytes(), wanted });
        }
        if self.is_shared && !input.is_on_gpus() {
            request.copy_input(index).map_err(|error| self.not_copied(error))?;
        }
        Ok(())
    }

    /// Whether the input is on a GPU, from where an instance on GPU `gpu` cannot copy it.
    fn is_to_be_fetched(&self, input: Input, gpu: Option<i32>) -> bool {
        let is_on = |gpu: i32| self.is_copied && input.on_gpu().is_some_and(|on_gpu| on_gpu.gpu() == gpu);
        input.is_on_gpus() && (self.is_shared || !gpu.is_some_and(is_on))
    }

    fn not_copied(&self, error: NotCopied) -> InputError {
        InputError::not_copied(&self.name, error)
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
