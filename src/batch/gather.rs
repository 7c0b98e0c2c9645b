//! Rows into the inputs of a step, and the values of generated inputs.

use rows::copies;
use rows::strings::{self, Strings};
use rows::tensor::{DataType, Gap, RowAt, RowLayout, StorageType, WindowLayout};
use sequences::SequenceId;

use super::{Counted, Row};
use crate::binding::{
    Binding, BoundControl, BoundInput, Counter, Flag, Generated, GrowingAxis, InputAxis, RequestInput, RowValues,
    Source, generated_value, largest_whole,
};
use crate::config::FirstRequest;
use crate::error::{InputError, RequestError};
use crate::session::{Overlay, SessionError, Step};
use crate::store::StateStore;
use crate::triton::Input;

/// Fills every input of the step, for `run_rows` rows, from the rows of the batch, which can run together (see
/// [`super::grouping`]); states are [`crate::store`]'s. Those beyond the batch repeat its first row, so that padding
/// cannot fail where the rows do not. Returns the rows of inputs that are on the step's device.
pub fn gather<'a>(
    binding: &'a Binding,
    batch: &'a [Row],
    run_rows: usize,
    store: &StateStore,
    step: &mut Step,
) -> Result<Vec<Overlay<'a>>, RequestError> {
    let batch = Padded { batch, run_rows };
    let mut filling = Filling { batch, store, step, overlays: Vec::new() };
    for (index, input) in binding.inputs.iter().enumerate() {
        match &input.source {
            Source::Request(request) => filling.request(index, input, request)?,
            Source::Lengths { of } => {
                let length = |row: &Row| row.steps_of(binding, *of).unwrap_or(0);
                lengths(filling.step, index, input, run_rows, batch.rows().map(length))?;
            }
            Source::State(_) => {}
            Source::Control(control) => filling.control(index, input, control)?,
            Source::Constant(bytes) => constant(filling.step, index, input, bytes, run_rows)?,
            Source::Generated(generated) => {
                let values = batch.rows().enumerate();
                let values = values.map(|(at, row)| row_values(generated, binding, row, store.gap(at)));
                let values: Vec<_> = values.collect();
                fill_generated(filling.step, index, input, generated, &values)?;
            }
        }
    }
    Ok(filling.overlays)
}

#[derive(Clone, Copy)]
struct Padded<'a> {
    batch: &'a [Row],
    run_rows: usize,
}

impl<'a> Padded<'a> {
    fn rows(self) -> impl Iterator<Item = &'a Row> {
        self.batch.iter().chain(std::iter::repeat(&self.batch[0])).take(self.run_rows)
    }

    /// Whether the row at a position repeats the first one. Its bytes come from the first row of the buffer, as memory
    /// that a client shares is read once.
    const fn is_padding(self, position: usize) -> bool {
        position >= self.batch.len()
    }

    /// An input of each row; none where a row leaves it out.
    fn inputs(self, request: &'a RequestInput) -> impl Iterator<Item = (&'a Row, Input<'a>)> {
        self.rows().filter_map(|row| Some((row, row.request.input(request.position)?)))
    }

    fn strings(self, request: &'a RequestInput) -> impl Iterator<Item = &'a Strings> {
        self.inputs(request).filter_map(|(_, sent)| sent.strings())
    }

    /// Dims and layout of a batch whose rows are filled up to the length of the longest.
    fn windows(
        self,
        input: &BoundInput,
        request: &'a RequestInput,
        axis: usize,
    ) -> Result<(Vec<i64>, WindowLayout), InputError> {
        let length = |(row, sent): (&Row, Input)| request.row_length(sent.dims(), axis, row.state.is_first);
        let first = self.inputs(request).next();
        let mut dims = first.map(|(_, sent)| request.form.model_dims(sent.dims()).to_vec()).unwrap_or_default();
        dims[axis] = self.inputs(request).map(length).max().unwrap_or(0) as i64;
        let layout = WindowLayout::new(input.data_type, &dims, input.batch_axis, axis);
        let layout = layout.ok_or_else(|| wrong_shape(input, &dims))?;
        Ok((dims, layout))
    }
}

struct Filling<'a, 's> {
    batch: Padded<'a>,
    store: &'s StateStore,
    step: &'s mut Step,
    overlays: Vec<Overlay<'a>>,
}

impl<'a> Filling<'a, '_> {
    fn request(&mut self, index: usize, input: &BoundInput, request: &'a RequestInput) -> Result<(), RequestError> {
        let batch = self.batch;
        // Grouping lets rows run together only if all of them have the input, or none has it.
        let Some(first) = batch.batch[0].request.input(request.position) else {
            self.step.omit(index);
            return Ok(());
        };
        let dims = request.form.model_dims(first.dims());
        // Without a batch axis, all rows have the same value, so the first one's is taken.
        let rows = if input.batch_axis.is_some() { batch.run_rows } else { 1 };
        if let Some(axis) = request.window_axis() {
            return self.windows(index, input, request, axis);
        }
        let layout = layout(input, dims)?;
        if input.data_type == DataType::Bytes {
            let positions = |position| strings::positions(&layout.row(RowAt { position, rows }));
            let sent = batch.strings(request).take(rows).enumerate();
            let elements = sent.flat_map(|(position, sent)| positions(position).zip(sent.iter()));
            return Ok(self.step.set_strings(index, dims, rows, elements)?);
        }
        let buffer = self.step.input(index, dims, rows)?;
        for (position, (_, sent)) in batch.inputs(request).take(rows).enumerate() {
            let part = layout.row(RowAt { position, rows });
            if let Some(on_gpu) = sent.on_gpu() {
                self.overlays.push(Overlay { input: index, part, from: on_gpu });
            } else if batch.is_padding(position) {
                copies::shift(&layout.row(RowAt { position: 0, rows }), &part, buffer);
            } else {
                copies::put_pieces(&part, sent.pieces(), buffer);
            }
        }
        Ok(())
    }

    /// Rows after their context, filled up to the length of the longest. Strings have no context, and are filled up
    /// with empty ones.
    fn windows(
        &mut self,
        index: usize,
        input: &BoundInput,
        request: &'a RequestInput,
        axis: usize,
    ) -> Result<(), RequestError> {
        let (batch, rows) = (self.batch, self.batch.run_rows);
        let (dims, layout) = batch.windows(input, request, axis)?;
        if input.data_type == DataType::Bytes {
            let lengths = batch.inputs(request).map(|(_, sent)| request.own_length(sent.dims(), axis));
            let elements = batch.strings(request).zip(lengths).enumerate().flat_map(|(position, (sent, length))| {
                strings::positions(&layout.window(RowAt { position, rows }, 0..length)).zip(sent.iter())
            });
            return Ok(self.step.set_strings(index, &dims, rows, elements)?);
        }
        let (longest, row_layout) = (layout.steps(), self::layout(input, &dims)?);
        let whole_row = |position| row_layout.row(RowAt { position, rows });
        let buffer = self.step.input(index, &dims, rows)?;
        for (position, (row, sent)) in batch.inputs(request).enumerate() {
            if batch.is_padding(position) {
                copies::shift(&whole_row(0), &whole_row(position), buffer);
                continue;
            }
            let whole = request.row_length(sent.dims(), axis, row.state.is_first);
            let from = request.context.map_or(0, |context| context.in_front(row.state.is_first));
            let kept = request.context.and_then(|context| self.store.context(position, row, context));
            let window = |steps| layout.window(RowAt { position, rows }, steps);
            match kept.filter(|_| from > 0) {
                Some(kept) => copies::put(&window(0..from), StorageType::Exact, kept, buffer),
                None => copies::fill(&window(0..from), buffer, 0),
            }
            copies::put_pieces(&window(from..whole), sent.pieces(), buffer);
            // After the elements of the request, because it repeats the first of them.
            if kept.is_none() && request.context.is_some_and(|context| context.first == FirstRequest::Repeat) {
                let first = window(from..from + 1);
                (0..from).for_each(|step| copies::shift(&first, &window(step..step + 1), buffer));
            }
            copies::fill(&window(whole..longest), buffer, 0);
        }
        Ok(())
    }

    fn control(&mut self, index: usize, input: &BoundInput, control: &BoundControl) -> Result<(), SessionError> {
        let batch = self.batch;
        if input.data_type == DataType::Bytes {
            let ids = batch.rows().map(|row| row.key.as_ref().map(|key| key.id.to_bytes()).unwrap_or_default());
            let ids: Strings = ids.collect();
            return self.step.set_strings(index, &input.dims, batch.run_rows, ids.iter().enumerate());
        }
        let buffer = self.step.input(index, &input.dims, batch.run_rows)?;
        let element = buffer.len() / batch.run_rows;
        for (value, row) in buffer.chunks_exact_mut(element).zip(batch.rows()) {
            match control {
                BoundControl::Flag { flag, no, yes } => {
                    let says_yes = match flag {
                        Flag::Start => row.starts_for_model(),
                        // Only with the last step of its request, because the next steps would follow the END.
                        Flag::End => row.end && !row.state.is_partial,
                        Flag::Ready => true,
                    };
                    value.copy_from_slice(if says_yes { yes } else { no });
                }
                BoundControl::CorrelationId(_) => {
                    // `decode` has refused strings, and numbers that the type cannot hold.
                    let number = match row.key.as_ref().map(|key| &key.id) {
                        Some(&SequenceId::Number(number)) => number,
                        Some(SequenceId::Name(_)) | None => 0,
                    };
                    // Little-endian, so a 32-bit type takes the first four bytes.
                    value.copy_from_slice(&number.to_le_bytes()[..element]);
                }
            }
        }
        Ok(())
    }
}

/// Fills an input with the length of each row of another one.
pub(super) fn lengths(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    rows: usize,
    lengths: impl Iterator<Item = usize>,
) -> Result<(), SessionError> {
    let buffer = step.input(index, &input.dims, rows)?;
    let element = input.data_type.byte_size().unwrap_or(1);
    for (value, length) in buffer.chunks_exact_mut(element).zip(lengths) {
        value.copy_from_slice(&length.to_le_bytes()[..element]);
    }
    Ok(())
}

pub(super) fn constant(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    bytes: &[u8],
    rows: usize,
) -> Result<(), RequestError> {
    let buffer = step.input(index, &input.dims, rows)?;
    match input.batch_axis {
        None => buffer.copy_from_slice(bytes),
        Some(_) => {
            let layout = layout(input, &input.dims)?;
            for position in 0..rows {
                copies::put(&layout.row(RowAt { position, rows }), StorageType::Exact, bytes, buffer);
            }
        }
    }
    Ok(())
}

/// The values of a row whose counters and lengths are known. `gap` is the padding of its padded states.
fn row_values(generated: &Generated, binding: &Binding, row: &Row, gap: Gap) -> RowValues {
    let count = |counter: usize| row.counted.as_ref().map_or(0, |counted| counted.count(counter));
    let past = |of: GrowingAxis| {
        let dims = row.state.dims.get(of.beside).map_or(&[][..], Vec::as_slice);
        dims.get(of.axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0))
    };
    let new = |of: InputAxis| own_length(binding, row, of);
    RowValues::new(generated, &binding.states, count, past, new, gap)
}

/// Notes what the sequence of a row has counted. Fails if the type of a generated input cannot hold the row's values.
pub fn note_counts(binding: &Binding, row: &mut Row, counts: Vec<u64>) -> Result<(), InputError> {
    row.counted = Some(Box::new(Counted { counts, shared_values: Vec::new() }));
    let shared = binding.generated().filter(|(input, _)| input.batch_axis.is_none());
    let values = shared.map(|(_, generated)| row_values(generated, binding, row, Gap::NONE)).collect();
    if let Some(counted) = &mut row.counted {
        counted.shared_values = values;
    }
    for (input, generated) in binding.generated() {
        let RowValues::Numbers { first, count } = row_values(generated, binding, row, Gap::NONE) else { continue };
        let Some(last) = (count as u64).checked_sub(1).map(|behind| first.saturating_add(behind)) else { continue };
        let (value, most) = (generated_value(generated, last), largest_whole(input.data_type));
        if value > i128::from(most) {
            let (name, written, data_type) = (input.name.clone(), generated.written.clone(), input.data_type);
            return Err(InputError::GeneratedTooLarge { name, written, value, data_type, most });
        }
    }
    Ok(())
}

/// What a row has in the generated inputs that the whole batch shares.
pub fn shared_values(row: &Row) -> &[RowValues] {
    row.counted.as_ref().map_or(&[], |counted| &counted.shared_values)
}

/// What the counters of a row's sequence have if its inference counts.
pub fn counts_after(binding: &Binding, row: &Row) -> Vec<u64> {
    let after = |(number, counter): (usize, &Counter)| {
        let before = row.counted.as_ref().map_or(0, |counted| counted.count(number));
        before.saturating_add(match *counter {
            Counter::Steps => 1,
            Counter::Elements(of) => own_length(binding, row, of) as u64,
        })
    };
    binding.counters.iter().enumerate().map(after).collect()
}

pub(super) fn fill_generated(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    generated: &Generated,
    values: &[RowValues],
) -> Result<(), RequestError> {
    // Without a batch axis, all rows have the same values.
    let values = if input.batch_axis.is_some() { values } else { &values[..values.len().min(1)] };
    let mut dims = input.dims.clone();
    let longest = values.iter().map(|values| values.count()).max().unwrap_or(0);
    if let Some(axis) = generated.axis {
        dims[axis] = longest as i64;
    }
    let layout = layout(input, &dims)?;
    let rows = values.len();
    let buffer = step.input(index, &dims, rows)?;
    let mut row = Vec::with_capacity(layout.row_bytes());
    for (position, values) in values.iter().enumerate() {
        row.clear();
        values.append_row(generated, input.data_type, longest, layout.row_bytes(), &mut row);
        copies::put(&layout.row(RowAt { position, rows }), StorageType::Exact, &row, buffer);
    }
    Ok(())
}

pub(super) fn layout(input: &BoundInput, dims: &[i64]) -> Result<RowLayout, InputError> {
    RowLayout::new(input.data_type, dims, input.batch_axis).ok_or_else(|| wrong_shape(input, dims))
}

fn wrong_shape(input: &BoundInput, dims: &[i64]) -> InputError {
    InputError::Shape { name: input.name.clone(), came: dims.to_vec(), wanted: input.dims.clone() }
}

/// The elements of a request along an axis of an input; 0 if it leaves the input out.
fn own_length(binding: &Binding, row: &Row, of: InputAxis) -> usize {
    let Source::Request(request) = &binding.inputs[of.input].source else { return 0 };
    row.request.input(request.position).map_or(0, |sent| request.own_length(sent.dims(), of.axis))
}
