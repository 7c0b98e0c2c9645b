//! Rows of the outputs into responses, and into what their sequences keep.

use super::residence::Residence;
use super::{Row, fault};
use crate::binding::{Binding, BoundContext, BoundOutput, BoundState, RequestInput, StatePlace, TrimBy};
use crate::error::RequestError;
use crate::memory::{SlotMemory, Varying, reserve, rows, strings, zeros};
use crate::model::VaryingSize;
use crate::panic;
use crate::session::{OutputCopy, OutputView, Step};
use crate::tensor::{DataType, RowLayout, WindowLayout};
use crate::triton::{OutputMemory, Request, Response};

/// The outputs of a run, taken apart into rows.
pub struct Answers<'a> {
    binding: &'a Binding,
    step: &'a Step,
    /// None for those that stay where they are.
    outputs: Vec<Option<Answer<'a>>>,
    rows: usize,
}

struct Answer<'a> {
    /// Which output of the step.
    index: usize,
    bound: &'a BoundOutput,
    view: OutputView<'a>,
    layout: RowLayout,
    /// Shape of a row.
    dims: Vec<i64>,
}

impl<'a> Answers<'a> {
    /// Reads the outputs of a run of a batch over `rows` rows.
    pub fn new(binding: &'a Binding, step: &'a Step, batch: &[Row], rows: usize) -> Result<Self, RequestError> {
        let outputs = binding.outputs.iter().enumerate().map(|(index, bound)| {
            if bound.is_only_kept {
                return Ok(None);
            }
            match Answer::new(index, bound, step.output(index)?, rows) {
                Err(_) if !binding.is_needed(index) && !batch.iter().any(|row| row.wants(&bound.name)) => Ok(None),
                answer => answer.map(Some),
            }
        });
        let outputs = outputs.collect::<Result<Vec<_>, RequestError>>()?;
        // Where the model left a state's shape open, this is the first time to see it.
        let states = binding.states.iter().filter_map(|state| Some((state, outputs[state.output].as_ref()?)));
        match states.clone().find(|(state, answer)| !answer.is_row_of(state)) {
            None => Ok(Self { binding, step, outputs, rows }),
            Some((_, answer)) => Err(answer.uneven(rows)),
        }
    }

    /// Fills the responses of a batch with the outputs that each row's request wants. One that cannot be filled becomes
    /// an error.
    pub fn fill_responses(
        &self,
        batch: &[Row],
        responses: &mut [Result<Response, RequestError>],
    ) -> Result<(), RequestError> {
        let (mut copies, mut failed) = (Vec::new(), Vec::new());
        for (place, (row, response)) in batch.iter().zip(&*responses).enumerate() {
            let Ok(response) = response else { continue };
            let filled = panic::catch_result(|| self.fill_response(response, place, row, &mut copies));
            if let Err(error) = filled {
                failed.push((place, error));
            }
        }
        self.step.copy_outputs(&copies)?;
        for (place, error) in failed {
            responses[place] = Err(error);
        }
        Ok(())
    }

    fn fill_response<'r>(
        &self,
        response: &'r Response,
        place: usize,
        row: &Row,
        copies: &mut Vec<OutputCopy<'r>>,
    ) -> Result<(), RequestError> {
        fault::point("respond", [&row.request]);
        for index in 0..row.request.output_count()? {
            let name = row.request.output_name(index)?;
            let mut outputs = self.outputs.iter().flatten();
            let wanted = outputs.find(|answer| answer.bound.name == name && answer.bound.is_response);
            let answer = wanted.ok_or_else(|| RequestError::UnknownOutput(name.to_owned()))?;
            match answer.bound.trim {
                Some(trim) => {
                    let length = self.length(answer, trim.by, place, row)?;
                    self.trimmed(response, answer, trim.axis, length, place)?;
                }
                None => self.whole(response, answer, place, copies)?,
            }
        }
        Ok(())
    }

    /// Makes room for the new states of the row at `place` that vary in size, `limit` bytes at most, so that
    /// [`Answers::keep_state`] cannot fail; if they are to stay in the tensors of the run, they are only paid for.
    pub fn make_room(&self, place: usize, row: &mut Row, limit: usize, stay: bool) -> Result<(), RequestError> {
        let Some(lease) = row.lease.as_mut().filter(|lease| !lease.ends()) else { return Ok(()) };
        let sizes = || self.varying().map(|(state, answer)| self.varying_size(state, answer, place));
        let bytes = sizes().map(VaryingSize::bytes).fold(0usize, usize::saturating_add);
        if bytes > limit {
            return Err(RequestError::StateTooLarge { bytes, limit });
        }
        Ok(lease.reserve(sizes(), stay)?)
    }

    /// Writes what of the new state of the row at `place`, for which room has been made, does not stay where the run
    /// wrote it; [`complete_state`] does the rest. `stay`: what varies in size stays in the tensors of the run. Returns
    /// the bytes of growing states that were copied.
    pub fn keep_state(&self, place: usize, row: &mut Row, stay: bool) -> Result<usize, RequestError> {
        let mut copied = 0;
        if !self.binding.is_copied_back() {
            return Ok(copied);
        }
        let contexts = self.contexts(row);
        let Some(lease) = row.lease.as_mut().filter(|lease| !lease.ends()) else { return Ok(copied) };
        let mut kept = Ok(());
        lease.advance(|slot, varying| {
            for state in &self.binding.states {
                let (StatePlace::Beside(number), Some(answer)) = (state.place, &self.outputs[state.output]) else {
                    continue;
                };
                if stay {
                    continue;
                }
                if let Err(error) = self.keep_varying(state, answer, place, &mut varying[number]) {
                    kept = Err(error);
                }
                copied += varying[number].bytes().byte_len();
            }
            for context in contexts {
                context.keep(self, place, slot);
            }
        });
        kept.map(|()| copied)
    }

    fn varying(&self) -> impl Iterator<Item = (&BoundState, &Answer<'a>)> {
        let beside = |state: &&BoundState| matches!(state.place, StatePlace::Beside(_));
        let states = self.binding.states.iter().filter(beside);
        states.filter_map(|state| Some((state, self.outputs[state.output].as_ref()?)))
    }

    fn varying_size(&self, state: &BoundState, answer: &Answer, place: usize) -> VaryingSize {
        match state.data_type {
            DataType::Bytes => VaryingSize::Strings(strings::written_bytes(answer.strings(place, self.rows))),
            _ => VaryingSize::Bytes(state.kept_bytes(answer.layout)),
        }
    }

    fn keep_varying(
        &self,
        state: &BoundState,
        answer: &Answer,
        place: usize,
        varying: &mut Varying,
    ) -> Result<(), RequestError> {
        if state.data_type == DataType::Bytes {
            let bytes = strings::written_bytes(answer.strings(place, self.rows));
            strings::write(answer.strings(place, self.rows), varying.write(&answer.dims, bytes).host());
            return Ok(());
        }
        let kept = varying.write(&answer.dims, state.kept_bytes(answer.layout));
        Ok(self.step.take_output(state.output, answer.layout, (place, self.rows), kept, state.as_fp16)?)
    }

    /// An output as the model gave it.
    fn whole<'r>(
        &self,
        response: &'r Response,
        answer: &Answer,
        place: usize,
        copies: &mut Vec<OutputCopy<'r>>,
    ) -> Result<(), RequestError> {
        if answer.bound.data_type == DataType::Bytes {
            return answer.send_strings(response, &answer.dims, answer.strings(place, self.rows));
        }
        let bytes = answer.layout.row_bytes();
        let memory = response.output(&answer.bound.c_name, answer.bound.data_type, &answer.dims, bytes)?;
        if let OutputMemory::Gpu(to) = &memory {
            let copy = OutputCopy { output: answer.index, layout: answer.layout, place, rows: self.rows, to: *to };
            if self.step.can_copy_output(&copy) {
                copies.push(copy);
                return Ok(());
            }
        }
        fill(answer.bound, memory, rows::pieces_of(answer.layout, answer.view.bytes, place, self.rows))
    }

    /// The first `length` steps of an output along `axis`, or all of them.
    fn trimmed(
        &self,
        response: &Response,
        answer: &Answer,
        axis: usize,
        length: Option<usize>,
        place: usize,
    ) -> Result<(), RequestError> {
        let (bound, view) = (answer.bound, &answer.view);
        let layout = WindowLayout::new(bound.data_type, view.dims, bound.batch_axis, axis);
        let layout = layout.ok_or_else(|| answer.uneven(self.rows))?;
        let length = length.unwrap_or(layout.steps());
        if length > layout.steps() {
            return Err(RequestError::OutputLength {
                name: bound.name.clone(),
                dims: view.dims.to_vec(),
                axis,
                length,
            });
        }
        let mut dims = answer.dims.clone();
        dims[axis] = length as i64;
        let chunks = layout.chunks(place, self.rows, 0, length);
        if bound.data_type == DataType::Bytes {
            let places = strings::window_places(chunks);
            return answer.send_strings(response, &dims, places.map(|place| view.strings.get(place)));
        }
        let memory = response.output(&answer.bound.c_name, bound.data_type, &dims, layout.window_bytes(length))?;
        fill(bound, memory, rows::pieces_of_window(chunks, view.bytes))
    }

    /// How much of an output belongs to the row at `place`; `None` for all of it: the request has left the input out.
    fn length(&self, answer: &Answer, by: TrimBy, place: usize, row: &Row) -> Result<Option<usize>, RequestError> {
        match by {
            TrimBy::Input(input) => Ok(row.steps_of(self.binding, input)),
            TrimBy::Output(output) => {
                let Some(lengths) = &self.outputs[output] else { return Err(answer.uneven(self.rows)) };
                let mut element = [0; 8];
                let size = lengths.layout.row_bytes();
                if size > element.len() {
                    return Err(lengths.uneven(self.rows));
                }
                rows::take(lengths.layout, lengths.view.bytes, place, self.rows, &mut element[..size]);
                // A negative length is larger than any tensor, too.
                usize::try_from(u64::from_le_bytes(element)).map(Some).map_err(|_| answer.uneven(self.rows))
            }
        }
    }

    fn contexts(&self, row: &Row) -> Vec<EndOfRow> {
        let of_row = |(input, request, context): (usize, &RequestInput, BoundContext)| {
            let sent = row.request.input(request.position)?;
            Some(EndOfRow { input, context, length: request.row_length(sent.dims(), context.axis) })
        };
        self.binding.contexts().filter_map(of_row).collect()
    }
}

/// Writes an output, which is these pieces one after another, to where Triton wants it.
fn fill<'p>(
    bound: &BoundOutput,
    memory: OutputMemory,
    pieces: impl Iterator<Item = &'p [u8]>,
) -> Result<(), RequestError> {
    match memory {
        OutputMemory::Host(mut bytes) => {
            pieces.for_each(|piece| bytes.write(piece));
            bytes.finish();
        }
        OutputMemory::Gpu(on_gpu) => {
            let mut bytes = reserve(on_gpu.byte_len())?;
            pieces.for_each(|piece| bytes.extend_from_slice(piece));
            let (name, gpu) = (bound.name.clone(), on_gpu.gpu());
            on_gpu.write(&bytes).map_err(|source| RequestError::OutputOnGpu { name, gpu, source })?;
        }
    }
    Ok(())
}

/// Finishes what [`Answers::keep_state`] has begun: states of fixed size stay in the batch buffer that the run, over
/// `places` rows, wrote.
pub fn complete_state(step: &mut Step, residence: &mut Residence, place: usize, places: usize, row: &mut Row) {
    residence.keep(place, places, row, step);
    if let Some(lease) = row.lease.as_mut().filter(|lease| !lease.ends()) {
        lease.complete();
    }
}

/// The end of a row of an input, which is the context of the next.
struct EndOfRow {
    input: usize,
    context: BoundContext,
    /// Steps that the model saw.
    length: usize,
}

impl EndOfRow {
    fn keep(&self, answers: &Answers, place: usize, slot: &mut SlotMemory) {
        let Self { input, context, length } = *self;
        let bound = &answers.binding.inputs[input];
        let (dims, bytes) = answers.step.filled(input);
        let Some(layout) = WindowLayout::new(bound.data_type, dims, bound.batch_axis, context.axis) else { return };
        let from = answers.binding.slot.offset(context.slot_entry);
        let chunks = layout.chunks(place, answers.rows, length - context.length, context.length);
        rows::take_window(chunks, bytes, slot.part_mut(from..from + context.bytes).host());
    }
}

/// A response with the outputs that the request wants, none of them with an element.
pub fn empty_response(binding: &Binding, request: &Request) -> Result<Response, RequestError> {
    let response = request.response()?;
    for index in 0..request.output_count()? {
        let name = request.output_name(index)?;
        let wanted = binding.outputs.iter().find(|output| output.name == name && output.is_response);
        let output = wanted.ok_or_else(|| RequestError::UnknownOutput(name.to_owned()))?;
        response.output(&output.c_name, output.data_type, &output.empty_dims, 0)?;
    }
    Ok(response)
}

impl<'a> Answer<'a> {
    fn new(index: usize, bound: &'a BoundOutput, mut view: OutputView<'a>, rows: usize) -> Result<Self, RequestError> {
        // What the model says of a batch as a whole is the row's if there is but one.
        if view.dims.is_empty() && bound.batch_axis.is_some() && rows == 1 {
            view.dims = &[1];
        }
        let uneven = || RequestError::OutputRows { name: bound.name.clone(), dims: view.dims.to_vec(), rows };
        if bound.batch_axis.is_some_and(|axis| view.dims.get(axis) != Some(&(rows as i64))) {
            return Err(uneven());
        }
        let layout = RowLayout::new(bound.data_type, view.dims, bound.batch_axis).ok_or_else(uneven)?;
        let mut dims = view.dims.to_vec();
        if let Some(axis) = bound.batch_axis {
            dims[axis] = 1;
        }
        Ok(Self { index, bound, view, layout, dims })
    }

    /// Whether the rows are what a state can be.
    fn is_row_of(&self, state: &BoundState) -> bool {
        match state.place {
            StatePlace::Slot(layout) => self.layout == layout,
            StatePlace::Beside(_) => {
                let fits = |(&dim, &wanted): (&i64, &i64)| dim == wanted || wanted < 0;
                self.dims.len() == state.dims.len() && self.dims.iter().zip(&state.dims).all(fits)
            }
        }
    }

    fn strings(&self, place: usize, rows: usize) -> impl Iterator<Item = &[u8]> + Clone {
        strings::places(self.layout, place, rows).map(|place| self.view.strings.get(place))
    }

    fn send_strings<'s>(
        &self,
        response: &Response,
        dims: &[i64],
        elements: impl Iterator<Item = &'s [u8]> + Clone,
    ) -> Result<(), RequestError> {
        let count = strings::written_bytes(elements.clone());
        let mut bytes = zeros(count)?;
        strings::write(elements, &mut bytes);
        let memory = response.output(&self.bound.c_name, DataType::Bytes, dims, bytes.len())?;
        fill(self.bound, memory, std::iter::once(bytes.as_slice()))
    }

    fn uneven(&self, rows: usize) -> RequestError {
        RequestError::OutputRows { name: self.bound.name.clone(), dims: self.view.dims.to_vec(), rows }
    }
}
