//! A check at load of what `growing_padding` promises: that rows with states of different lengths get the same from a
//! run that they share, with padding, as from a run of their own.
//!
//! The values are random, and the padding isn't zeros, so a model that doesn't ignore it is found. A new state or output
//! may differ by the rounding of its type. Only one instance of a model has to check it.

use rows::copies;
use rows::tensor::{DataType, RowAt, RowLayout, StorageType, element_count};

use super::gather::constant;
use super::generated;
use crate::binding::{
    Binding, BoundControl, BoundInput, BoundState, Flag, Initial, InitialContent, InputAxis, RowValues, Source,
};
use crate::error::{InputError, LoadError, RequestError, RunError};
use crate::memory::BytesMut;
use crate::proof::{Answer, Scale, difference, is_float, random};
use crate::session::{Copier, OpenError, Run, Step};
use crate::store::{HasState, RowState, StateStore};

/// Lengths of the states of two rows. A third row has the length with which sequences start.
const LENGTHS: [i64; 2] = [7, 4];
/// The longest states that are tried, because some models have rules that begin at a larger length: other frequencies of
/// positions, or a window of the past.
const LONGEST: i64 = 5000;
/// Bytes of the longest states of a row.
const MOST_BYTES: usize = 1 << 24;
/// Elements of a row along open dimensions of other inputs.
const OPEN: i64 = 2;
/// The byte that padding consists of. It makes a number of each type, such as 0.75 in fp32.
const PADDING: u8 = 0x3f;

/// What one row has after a run: the values of each output that can be read.
type Answers = Vec<Answer>;

/// A row with random values.
struct CheckedRow {
    state: RowState,
    /// Which row; its values follow from this.
    number: usize,
    length: i64,
}

impl HasState for CheckedRow {
    fn state(&self) -> &RowState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut RowState {
        &mut self.state
    }

    fn steps(&self, binding: &Binding, input: usize, axis: usize) -> Option<usize> {
        usize::try_from(input_dims(&binding.inputs[input])[axis]).ok()
    }
}

/// Refuses a model whose rows get other values when they share a run with padding. `most_rows`: of a run.
pub fn check_padding(
    binding: &Binding,
    most_rows: usize,
    store: &mut StateStore,
    step: &mut Step,
    copier: &Copier,
) -> Result<(), LoadError> {
    let Some(padding) = binding.growing_padding.as_ref().filter(|_| most_rows > 1) else { return Ok(()) };
    let refused = |why| LoadError::GrowingPadding { side: padding.side, why };
    let with_length = |length| beside(binding).map(move |state| dims_of(state, length));
    let at_start: Vec<Vec<i64>> = beside(binding).map(|state| state.initial.dims.clone()).collect();
    let element_bytes = padding.bytes(&with_length(1).collect::<Vec<_>>()).max(1);
    let longest = LONGEST.min(i64::try_from(MOST_BYTES / element_bytes).unwrap_or(LONGEST));
    let at_start = padding.length(&at_start);
    let mut compare = |[first, second]: [i64; 2]| -> Result<Option<String>, RequestError> {
        let lengths: Vec<i64> = [first, second].into_iter().chain(at_start).take(most_rows).collect();
        // Only the first lengths must run, so the errors of longer ones are not logged.
        step.set_quiet(first != LENGTHS[0])?;
        store.set_padding(PADDING);
        let together = run(binding, &lengths, 0, store, step, copier);
        store.set_padding(0);
        for ((number, &length), shared) in lengths.iter().enumerate().zip(together?) {
            let alone = run(binding, &[length], number, store, step, copier)?.pop().unwrap_or_default();
            if let Some(why) = difference(&alone, &shared, 1.0) {
                let gets = "elements gets other values if it shares a run with one of";
                return Ok(Some(format!("a sequence with states of {length} {gets} {first}: {why}")));
            }
        }
        Ok(None)
    };
    let found = compare(LENGTHS)
        .map_err(|error| refused(format!("the check with states of {LENGTHS:?} elements failed: {error}")))?;
    if let Some(why) = found {
        return Err(refused(why));
    }
    if longest <= LENGTHS[0] {
        return Ok(());
    }
    // The model may have a longest length, such as a table of positions.
    let found = compare([longest, longest / 2 + 1]).ok().flatten();
    step.set_quiet(false).map_err(OpenError::from)?;
    found.map_or(Ok(()), |why| Err(refused(why)))
}

/// The dims of a row of a state whose padded axis has this length.
fn dims_of(state: &BoundState, length: i64) -> Vec<i64> {
    let mut dims = state.initial.dims.clone();
    if let Some(axis) = state.padded_axis {
        dims[axis] = length;
    }
    dims
}

fn beside(binding: &Binding) -> impl Iterator<Item = &BoundState> {
    binding.states.iter().filter(|state| !state.is_in_slot())
}

/// Runs rows with states of these lengths. `first` is the number of the first row.
fn run(
    binding: &Binding,
    lengths: &[i64],
    first: usize,
    store: &mut StateStore,
    step: &mut Step,
    copier: &Copier,
) -> Result<Vec<Answers>, RequestError> {
    let row = |(number, &length): (usize, &i64)| {
        let given = binding.states.iter().enumerate().map(|(index, state)| given(state, index, number, length));
        let state = RowState { given: given.collect(), ..RowState::default() };
        CheckedRow { state, number, length }
    };
    let mut batch: Vec<_> = (first..).zip(lengths).map(row).collect();
    let done = run_batch(binding, &mut batch, store, step);
    copier.synchronise()?;
    store.release();
    step.give_back();
    done
}

fn run_batch(
    binding: &Binding,
    batch: &mut [CheckedRow],
    store: &mut StateStore,
    step: &mut Step,
) -> Result<Vec<Answers>, RequestError> {
    let rows = batch.len();
    store.load(batch, rows)?;
    for (index, input) in binding.inputs.iter().enumerate() {
        fill(binding, index, input, batch, store, step)?;
    }
    step.run(Run { as_graph: false, ..store.run(batch, rows, &[]) })?;
    store.check(step, rows)?;
    let mut answers: Vec<(usize, Answers)> = Vec::new();
    for (position, row) in batch.iter().enumerate() {
        answers.push((row.number, read(binding, position, rows, store, step)?));
    }
    // `load` may have put the rows in another order.
    answers.sort_by_key(|(number, _)| *number);
    Ok(answers.into_iter().map(|(_, answers)| answers).collect())
}

/// The value of a state of a row; `None` for that with which sequences start.
fn given(state: &BoundState, index: usize, number: usize, length: i64) -> Option<Initial> {
    if state.padded_axis.is_none() && !(is_float(state.data_type) && state.is_in_slot()) {
        return None;
    }
    let dims = dims_of(state, length);
    let bytes = random(state.data_type, element_count(&dims)?, Scale::One, &[0, index, number]);
    Some(Initial { dims, content: InitialContent::Bytes(bytes) })
}

/// The dims of an input that requests carry: those that are open have a fixed number of elements.
fn input_dims(input: &BoundInput) -> Vec<i64> {
    input.dims.iter().map(|&dim| if dim < 0 { OPEN } else { dim }).collect()
}

fn fill(
    binding: &Binding,
    index: usize,
    input: &BoundInput,
    batch: &[CheckedRow],
    store: &StateStore,
    step: &mut Step,
) -> Result<(), RequestError> {
    let rows = batch.len();
    let mut dims = input_dims(input);
    if let Some(axis) = input.batch_axis {
        dims[axis] = 1;
    }
    let repeated = |bytes: &[u8]| bytes.repeat(element_count(&dims).unwrap_or(0));
    let value = |row: &CheckedRow| match &input.source {
        Source::Control(BoundControl::Flag { flag, no, yes }) => repeated(if *flag == Flag::Ready { yes } else { no }),
        Source::Lengths { of } => {
            let axis = match &binding.inputs[*of].source {
                Source::Request(request) => request.ragged_axis.unwrap_or(0),
                _ => 0,
            };
            let length = input_dims(&binding.inputs[*of])[axis];
            repeated(&length.to_le_bytes()[..input.data_type.byte_size().unwrap_or(1)])
        }
        // Without a batch axis, the rows share the value.
        _ => {
            let number = if input.batch_axis.is_some() { row.number } else { 0 };
            random(input.data_type, element_count(&dims).unwrap_or(0), Scale::One, &[1, index, number])
        }
    };
    match &input.source {
        Source::State(_) => return Ok(()),
        Source::Constant(bytes) => return constant(step, index, input, bytes, rows),
        Source::Request(request) if request.optional => {
            step.omit(index);
            return Ok(());
        }
        Source::Generated(of) => {
            let values = batch.iter().enumerate().map(|(position, row)| {
                let past = usize::try_from(row.length).unwrap_or(0);
                let new = |added: InputAxis| {
                    usize::try_from(input_dims(&binding.inputs[added.input])[added.axis]).unwrap_or(0)
                };
                RowValues::new(of, &binding.states, |_| past as u64, |_| past, new, store.gap(position))
            });
            return generated::fill(step, index, input, of, &values.collect::<Vec<_>>());
        }
        _ if input.data_type == DataType::Bytes => {
            return Ok(step.set_strings(index, &dims, rows, std::iter::empty())?);
        }
        Source::Request(_) | Source::Lengths { .. } | Source::Control(_) => {}
    }
    let shape = || InputError::Shape { name: input.name.clone(), came: dims.clone(), wanted: input.dims.clone() };
    let layout = RowLayout::new(input.data_type, &dims, input.batch_axis).ok_or_else(shape)?;
    let values: Vec<_> = batch.iter().map(value).collect();
    let rows = if input.batch_axis.is_some() { rows } else { 1 };
    let buffer = step.input(index, &dims, rows)?;
    for (position, value) in values.iter().enumerate().take(rows) {
        copies::put(&layout.row(RowAt { position, rows }), StorageType::Exact, value, buffer);
    }
    Ok(())
}

/// The values of a row's outputs. On a device, those that stay there are left out.
fn read(binding: &Binding, position: usize, rows: usize, store: &StateStore, step: &Step) -> Result<Answers, RunError> {
    let mut answers = Vec::new();
    for (index, bound) in binding.outputs.iter().enumerate() {
        if bound.data_type == DataType::Bytes {
            continue;
        }
        let output = store.output_rows(step, index, rows)?;
        let row = output.row(position);
        let mut bytes = vec![0; row.bytes()];
        if step.has_made(index) {
            step.take_output(index, &row, BytesMut::Host(&mut bytes), StorageType::Exact)?;
        } else if output.view.bytes.is_empty() {
            continue;
        } else {
            copies::take(&row, StorageType::Exact, output.view.bytes, &mut bytes);
        }
        let (name, dims) = (bound.name.clone(), output.row_dims(position).collect());
        answers.push(Answer { name, data_type: bound.data_type, dims, bytes });
    }
    Ok(answers)
}
