//! Rows into the inputs of a step.

use rows::copies;
use rows::strings::{self, Strings};
use rows::tensor::{DataType, RowAt, RowLayout, StorageType, WindowLayout};
use sequences::SequenceId;

use super::Row;
use super::generated;
use crate::binding::{Binding, BoundControl, BoundInput, Flag, RequestInput, Source};
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
    let mut overlays = Vec::new();
    for (index, input) in binding.inputs.iter().enumerate() {
        match &input.source {
            Source::Request(request) => requests(step, index, store, input, request, batch, &mut overlays)?,
            Source::Lengths { of } => lengths(step, index, binding, input, *of, batch)?,
            Source::State(_) => {}
            Source::Control(kind) => controls(step, index, input, kind, batch)?,
            Source::Constant(bytes) => constant(step, index, input, bytes, run_rows)?,
            Source::Generated(generated) => {
                let values = batch.rows().enumerate();
                let values = values.map(|(at, row)| generated::row_values(generated, binding, row, store.gap(at)));
                let values: Vec<_> = values.collect();
                generated::fill(step, index, input, generated, &values)?;
            }
        }
    }
    Ok(overlays)
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

    /// As [`Padded::inputs`], for strings.
    fn strings(self, request: &'a RequestInput) -> Vec<&'a Strings> {
        self.inputs(request).filter_map(|(_, sent)| sent.strings()).collect()
    }
}

fn requests<'a>(
    step: &mut Step,
    index: usize,
    store: &StateStore,
    input: &BoundInput,
    request: &'a RequestInput,
    batch: Padded<'a>,
    overlays: &mut Vec<Overlay<'a>>,
) -> Result<(), RequestError> {
    let Some(first) = batch.batch[0].request.input(request.position) else {
        step.omit(index);
        return Ok(());
    };
    let dims = request.form.model_dims(first.dims());
    let rows = if input.batch_axis.is_some() { batch.run_rows } else { 1 };
    if let (DataType::Bytes, Some(axis)) = (input.data_type, request.window_axis()) {
        return string_windows(step, index, input, request, axis, batch);
    }
    if input.data_type == DataType::Bytes {
        let layout = layout(input, dims)?;
        let sent: Vec<&Strings> = batch.strings(request);
        let elements = positions_of(input, sent.iter())
            .flat_map(|(position, sent)| strings::positions(&layout.row(RowAt { position, rows })).zip(sent.iter()));
        return Ok(step.set_strings(index, dims, rows, elements)?);
    }
    if let Some(axis) = request.window_axis() {
        return windows(step, index, store, input, request, axis, batch);
    }
    let layout = layout(input, dims)?;
    let buffer = step.input(index, dims, rows)?;
    for (position, (_, sent)) in positions_of(input, batch.inputs(request)) {
        let part = layout.row(RowAt { position, rows });
        if let Some(on_gpu) = sent.on_gpu() {
            overlays.push(Overlay { input: index, part, from: on_gpu });
        } else if batch.is_padding(position) {
            copies::shift(&layout.row(RowAt { position: 0, rows }), &part, buffer);
        } else {
            copies::put_pieces(&part, sent.pieces(), buffer);
        }
    }
    Ok(())
}

/// The rows that are written: where a tensor has no batch axis, one for all.
fn positions_of<T>(input: &BoundInput, rows: impl Iterator<Item = T>) -> impl Iterator<Item = (usize, T)> {
    rows.enumerate().take(if input.batch_axis.is_some() { usize::MAX } else { 1 })
}

/// Rows with their context in front, filled up behind to the length of the longest.
fn windows(
    step: &mut Step,
    index: usize,
    store: &StateStore,
    input: &BoundInput,
    request: &RequestInput,
    axis: usize,
    batch: Padded,
) -> Result<(), RequestError> {
    let (dims, layout) = windows_layout(input, request, axis, batch)?;
    let (rows, longest, row_layout) = (batch.run_rows, layout.steps(), self::layout(input, &dims)?);
    let whole_row = |position| row_layout.row(RowAt { position, rows });
    let buffer = step.input(index, &dims, rows)?;
    for (position, (row, sent)) in batch.inputs(request).enumerate() {
        if batch.is_padding(position) {
            copies::shift(&whole_row(0), &whole_row(position), buffer);
            continue;
        }
        let whole = request.row_length(sent.dims(), axis, row.state.is_first);
        let from = request.context.map_or(0, |context| context.in_front(row.state.is_first));
        let kept = request.context.and_then(|context| store.context(position, row, context));
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

/// Dims and layout of a batch whose rows are filled up to the length of the longest.
fn windows_layout(
    input: &BoundInput,
    request: &RequestInput,
    axis: usize,
    batch: Padded,
) -> Result<(Vec<i64>, WindowLayout), InputError> {
    let length = |(row, sent): (&Row, Input)| request.row_length(sent.dims(), axis, row.state.is_first);
    let first = batch.inputs(request).next();
    let mut dims = first.map(|(_, sent)| request.form.model_dims(sent.dims()).to_vec()).unwrap_or_default();
    dims[axis] = batch.inputs(request).map(length).max().unwrap_or(0) as i64;
    let layout = WindowLayout::new(input.data_type, &dims, input.batch_axis, axis);
    let layout = layout.ok_or_else(|| wrong_shape(input, &dims))?;
    Ok((dims, layout))
}

/// As [`windows`], for strings, which have no context: rows are filled up with empty ones.
fn string_windows(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    request: &RequestInput,
    axis: usize,
    batch: Padded,
) -> Result<(), RequestError> {
    let (dims, layout) = windows_layout(input, request, axis, batch)?;
    let (rows, sent) = (batch.run_rows, batch.strings(request));
    let lengths = batch.inputs(request).map(|(_, sent)| request.own_length(sent.dims(), axis));
    let elements = sent.iter().zip(lengths).enumerate().flat_map(|(position, (sent, length))| {
        strings::positions(&layout.window(RowAt { position, rows }, 0..length)).zip(sent.iter())
    });
    Ok(step.set_strings(index, &dims, rows, elements)?)
}

fn lengths(
    step: &mut Step,
    index: usize,
    binding: &Binding,
    input: &BoundInput,
    of: usize,
    batch: Padded,
) -> Result<(), SessionError> {
    let buffer = step.input(index, &input.dims, batch.run_rows)?;
    let element = input.data_type.byte_size().unwrap_or(1);
    let lengths = batch.rows().map(|row| row.steps_of(binding, of).unwrap_or(0) as u64);
    for (value, length) in buffer.chunks_exact_mut(element).zip(lengths) {
        value.copy_from_slice(&length.to_le_bytes()[..element]);
    }
    Ok(())
}

fn controls(
    step: &mut Step,
    index: usize,
    input: &BoundInput,
    control: &BoundControl,
    batch: Padded,
) -> Result<(), SessionError> {
    if input.data_type == DataType::Bytes {
        let ids = batch.rows().map(|row| row.key.as_ref().map(|key| key.id.to_bytes()).unwrap_or_default());
        let ids: Strings = ids.collect();
        return step.set_strings(index, &input.dims, batch.run_rows, ids.iter().enumerate());
    }
    let buffer = step.input(index, &input.dims, batch.run_rows)?;
    let element = buffer.len() / batch.run_rows;
    for (value, row) in buffer.chunks_exact_mut(element).zip(batch.rows()) {
        match control {
            BoundControl::Flag { flag, no, yes } => {
                let says_yes = match flag {
                    Flag::Start => row.starts_for_model(),
                    Flag::End => row.end && !row.state.is_partial,
                    Flag::Ready => true,
                };
                value.copy_from_slice(if says_yes { yes } else { no });
            }
            BoundControl::CorrelationId(_) => {
                value.copy_from_slice(&correlation_id(row.key.as_ref().map(|key| &key.id))[..element])
            }
        }
    }
    Ok(())
}

/// The sequence id as little-endian bytes. A 32-bit type takes the first four. `decode` has refused strings and numbers that
/// the type can't hold.
fn correlation_id(id: Option<&SequenceId>) -> [u8; 8] {
    match id {
        Some(SequenceId::Number(number)) => number.to_le_bytes(),
        Some(SequenceId::Name(_)) | None => [0; 8],
    }
}

/// Fills an input that is always the same.
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

fn layout(input: &BoundInput, dims: &[i64]) -> Result<RowLayout, InputError> {
    RowLayout::new(input.data_type, dims, input.batch_axis).ok_or_else(|| wrong_shape(input, dims))
}

fn wrong_shape(input: &BoundInput, dims: &[i64]) -> InputError {
    InputError::Shape { name: input.name.clone(), came: dims.to_vec(), wanted: input.dims.clone() }
}
