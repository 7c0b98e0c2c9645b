//! Rows of the outputs into responses.

use rows::tensor::{DataType, Part, RowAt, StorageType, WindowLayout};
use rows::{copies, strings, zeros};
use sequences::SequenceId;
use smallvec::SmallVec;

use super::outputs::{OnGpus, deliver};
use super::{Row, fault};
use crate::binding::{Binding, BoundOutput, ShapeForm, TrimBy};
use crate::config::{ID_TENSOR, is_state_tensor};
use crate::error::{RequestError, RunError};
use crate::panic;
use crate::session::Step;
use crate::store::{OutputRows, StateStore};
use crate::triton::{OutputMemory, Response, c_name, echo};

/// The response to a request, or its error.
pub type Filled = Result<Response, RequestError>;

pub struct Answers<'a> {
    pub(super) binding: &'a Binding,
    step: &'a Step,
    /// None for those that stay where they are.
    pub(super) outputs: Vec<Option<OutputRows<'a>>>,
}

impl<'a> Answers<'a> {
    pub fn new(
        binding: &'a Binding,
        store: &'a StateStore,
        step: &'a Step,
        batch: &[Row],
        rows: usize,
    ) -> Result<Self, RunError> {
        let outputs = binding.outputs.iter().enumerate().map(|(index, bound)| {
            if bound.is_only_kept {
                return Ok(None);
            }
            match store.output_rows(step, index, rows) {
                // No request asked for this output, so a wrong shape of it must not fail one.
                Err(_) if !binding.is_needed(index) && !batch.iter().any(|row| row.wants(&bound.name)) => Ok(None),
                output => output.map(Some),
            }
        });
        Ok(Self { binding, step, outputs: outputs.collect::<Result<Vec<_>, RunError>>()? })
    }

    /// Fills the responses of a batch with the outputs that each row's request wants. One that cannot be filled becomes
    /// an error.
    pub fn fill_responses(&self, batch: &[Row], responses: &mut [Filled]) -> Result<(), RequestError> {
        let (mut on_gpus, mut failed) = (OnGpus::default(), Vec::new());
        for (position, (row, response)) in batch.iter().zip(&*responses).enumerate() {
            let Ok(response) = response else { continue };
            let filled = panic::catch_result(|| {
                fault::point("respond", [&row.request]);
                let outputs = || self.outputs.iter().flatten().map(|answer| (answer.bound, answer));
                row.answer_outputs(response, outputs, |answer| self.add(response, answer, position, row, &mut on_gpus))
            });
            if let Err(error) = filled {
                failed.push((position, error));
            }
        }
        self.step.copy_outputs(&on_gpus.copies)?;
        failed.extend(on_gpus.write().into_iter().map(|(position, error)| (position, error.into())));
        // The responses change only now, because the memory of the GPUs is borrowed from them.
        for (position, error) in failed {
            responses[position] = Err(error);
        }
        Ok(())
    }

    /// Adds a row's part of an output to a response.
    pub(super) fn add<'r>(
        &self,
        response: &'r Response,
        answer: &OutputRows,
        position: usize,
        row: &Row,
        on_gpus: &mut OnGpus<'r>,
    ) -> Result<(), RequestError>
    where
        'a: 'r,
    {
        let OutputRows { bound, view, .. } = answer;
        let (dims, part) = match bound.trim {
            Some(trim) => self.trimmed(answer, trim.axis, trim.by, position, row)?,
            None => {
                let has_more = bound.form == ShapeForm::Unbatched || answer.dims.is_empty();
                let in_front = if has_more { &[1][..] } else { &[] };
                (in_front.iter().copied().chain(answer.row_dims(position)).collect(), answer.row(position))
            }
        };
        if bound.data_type == DataType::Bytes {
            let elements = strings::positions(&part).map(|at| view.strings.get(at));
            let mut bytes = zeros(strings::written_bytes(elements.clone()))?;
            strings::write(elements, &mut bytes);
            let memory = response.output(&bound.c_name, DataType::Bytes, &dims, bytes.len())?;
            return Ok(deliver(&bound.name, memory, std::iter::once(bytes.as_slice()))?);
        }
        let memory = response.output(&bound.c_name, bound.data_type, &dims, part.bytes())?;
        if let (OutputMemory::Gpu(to), None) = (&memory, bound.trim)
            && let Some(copy) = self.step.output_copy(answer.index, &part, *to)
        {
            // Enqueued with those of the other rows, so that the device is waited for once.
            on_gpus.copies.push(copy);
            return Ok(());
        }
        Ok(on_gpus.fill(position, &bound.name, memory, copies::pieces(&part, view.bytes))?)
    }

    /// A row's own part of an output, if its run had longer rows.
    fn trimmed(
        &self,
        answer: &OutputRows,
        axis: usize,
        by: TrimBy,
        position: usize,
        row: &Row,
    ) -> Result<(SmallVec<[i64; 6]>, Part), RunError> {
        let (bound, view) = (answer.bound, &answer.view);
        let layout = WindowLayout::new(bound.data_type, view.dims, bound.batch_axis, axis);
        let layout = layout.ok_or_else(|| answer.uneven())?;
        let length = self.length(answer, by, position, row)?.unwrap_or(layout.steps());
        // Another output may have given the length, and a model may be wrong.
        if length > layout.steps() {
            let (name, dims) = (bound.name.clone(), view.dims.to_vec());
            return Err(RunError::OutputLength { name, dims, axis, length });
        }
        let mut dims = SmallVec::from_slice(&answer.dims);
        dims[axis] = length as i64;
        Ok((dims, layout.window(RowAt { position, rows: answer.rows }, 0..length)))
    }

    /// How much of an output belongs to the row at `position`; `None` for all of it: the request has left the input
    /// out.
    fn length(&self, answer: &OutputRows, by: TrimBy, position: usize, row: &Row) -> Result<Option<usize>, RunError> {
        match by {
            TrimBy::Input(input) => Ok(row.steps_of(self.binding, input)),
            TrimBy::Output(output) => {
                let Some(lengths) = &self.outputs[output] else { return Err(answer.uneven()) };
                let mut element = [0; 8];
                let part = lengths.row(position);
                if part.bytes() > element.len() {
                    return Err(lengths.uneven());
                }
                copies::take(&part, StorageType::Exact, lengths.view.bytes, &mut element[..part.bytes()]);
                // A negative length is larger than any tensor, too.
                usize::try_from(u64::from_le_bytes(element)).map(Some).map_err(|_| answer.uneven())
            }
        }
    }
}

impl Row {
    /// Adds the id of the sequence to a response, and each output that the request wants. Adds outputs of the model
    /// with `add`.
    fn answer_outputs<'o, O, I: Iterator<Item = (&'o BoundOutput, O)>>(
        &self,
        response: &Response,
        outputs: impl Fn() -> I,
        mut add: impl FnMut(O) -> Result<(), RequestError>,
    ) -> Result<(), RequestError> {
        self.answer_id(response)?;
        for index in 0..self.request.output_count()? {
            let name = self.request.output_name(index)?;
            if self.answer_id_tensor(response, name)? {
                continue;
            }
            match outputs().find(|(bound, _)| bound.name == name && bound.is_response) {
                Some((_, output)) => add(output)?,
                // A request that names no outputs wants all that are listed. Of these, only those are sent that its
                // parameters ask for.
                None if is_state_tensor(name) => {}
                None => return Err(RunError::UnknownOutput(echo(name)).into()),
            }
        }
        Ok(())
    }

    /// The id of the sequence, if answers carry it.
    pub fn told_id(&self) -> Option<&SequenceId> {
        self.tells_id.and(self.key.as_ref()).map(|key| &key.id)
    }

    /// Adds the id of the sequence to a response as a parameter, if answers carry it.
    pub fn answer_id(&self, response: &Response) -> Result<(), RequestError> {
        Ok(self.told_id().map_or(Ok(()), |id| response.set_sequence_id(id))?)
    }

    /// Writes the id of the sequence, if `output` is the output for it. Returns whether it is. A string id is written
    /// as 0.
    pub fn answer_id_tensor(&self, response: &Response, output: &str) -> Result<bool, RequestError> {
        let dims = self.tells_id.and_then(|tells| tells.output_dims);
        let (Some(key), Some(dims), ID_TENSOR) = (&self.key, dims, output) else { return Ok(false) };
        let id = match key.id {
            SequenceId::Number(number) => number,
            SequenceId::Name(_) => 0,
        };
        let memory = response.output(&c_name(ID_TENSOR), DataType::Uint64, dims, size_of::<u64>())?;
        deliver(ID_TENSOR, memory, std::iter::once(&id.to_ne_bytes()[..]))?;
        Ok(true)
    }
}

/// The answer to a request that makes no step: the outputs that it wants, without elements. For a model that answers
/// each step, the answer has only what the request reads of the state; if it reads nothing, there is no response.
pub fn empty_response(binding: &Binding, row: &Row) -> Result<Response, RequestError> {
    if !binding.answers_each_step {
        let response = row.response()?;
        row.answer_outputs(
            &response,
            || binding.outputs.iter().map(|output| (output, output)),
            |output| Ok(response.output(&output.c_name, output.data_type, &output.empty_dims, 0).map(drop)?),
        )?;
        row.answer_steps(&response)?;
        return Ok(response);
    }
    if !row.asked.as_ref().is_some_and(|asked| asked.reads()) {
        return Ok(row.request.end()?);
    }
    let response = row.request.response()?;
    row.answer_id(&response)?;
    row.answer_steps(&response)?;
    Ok(response)
}
