//! Runs without requests, at load: the warm-up, and the check of what `growing_padding` promises.
//!
//! The check: rows with states of different lengths must get the same results from a shared run, with padding, as from
//! runs of their own. The values are random, and the padding isn't zeros, so a model that doesn't ignore it is found. A
//! new state or output may differ by the rounding of its type. Only one instance of a model has to check it.

use rows::copies;
use rows::tensor::{DataType, Gap, RowAt, StorageType, element_count};

use super::gather::{constant, fill_generated, layout, lengths};
use crate::binding::{
    Binding, BoundControl, BoundInput, BoundState, Flag, Generated, GrowingAxis, Initial, InitialContent, InputAxis,
    RowValues, Source,
};
use crate::error::{LoadError, RequestError, RunError};
use crate::memory::BytesMut;
use crate::proof::{Answer, Scale, difference, is_float, random};
use crate::session::{Copier, OpenError, Run, Step};
use crate::store::{HasState, RowState, StateStore};

/// Lengths of the states of two rows. A third row has the length with which sequences start.
const LENGTHS: [i64; 2] = [7, 4];
/// The longest states that are tried, because some models have rules that begin at a larger length: other frequencies
/// of positions, or a window of the past.
const LONGEST: i64 = 5000;
/// Bytes of the longest states of a row.
const MOST_BYTES: usize = 1 << 24;
/// Elements of a row along open dimensions of other inputs.
const OPEN: i64 = 2;
/// The byte that padding consists of. It makes a number of each type, such as 0.75 in fp32.
const PADDING: u8 = 0x3f;

/// The results of one row after a run: the values of each output that can be read.
type Answers = Vec<Answer>;

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

/// Runs the step over `rows` rows of zeros, each the start of a sequence, so that what ONNX Runtime does once for each
/// shape is done before the first client waits for it. Open dimensions are 1, plus the length of a context along its
/// axis.
pub fn warm_up(binding: &Binding, rows: usize, store: &mut StateStore, step: &mut Step) -> Result<(), RequestError> {
    let mut starts: Vec<_> = std::iter::repeat_with(RowState::default).take(rows).collect();
    store.load(&mut starts, rows)?;
    let dims = |input: &BoundInput| -> Vec<i64> {
        let context = if let Source::Request(request) = &input.source { request.context } else { None };
        let open = |axis| 1 + context.filter(|of| of.axis == axis).map_or(0, |of| of.length as i64);
        input.dims.iter().enumerate().map(|(axis, &dim)| if dim < 0 { open(axis) } else { dim }).collect()
    };
    let content = Content {
        dims: &dims,
        flags: &[Flag::Start, Flag::Ready],
        generated: &|_, of| {
            let past =
                |of: GrowingAxis| binding.states[of.state].initial.dims.get(of.axis).map_or(0, |&dim| usize_of(dim));
            let new = |of: InputAxis| usize::try_from(binding.inputs[of.input].dims[of.axis]).unwrap_or(1);
            RowValues::new(of, &binding.states, |_| 0, past, new, Gap::NONE)
        },
        elements: &|_, _, data_type, count| vec![0; count * data_type.byte_size().unwrap_or(1)],
    };
    fill(binding, rows, &content, step)?;
    // A graph is bound to the thread that captures it, and Triton loads a model on another thread.
    Ok(step.run(Run { as_graph: false, ..store.run(&starts, rows, &[]) })?)
}

/// Refuses a model whose rows get other values when they share a run with padding. `most_rows`: the most rows of a run.
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
    let mut runs = Runs { binding, store, step, copier };
    let mut compare = |[first, second]: [i64; 2]| -> Result<Option<String>, RequestError> {
        let lengths: Vec<i64> = [first, second].into_iter().chain(at_start).take(most_rows).collect();
        // Only the first lengths must run, so the errors of longer ones are not logged.
        runs.step.set_quiet(first != LENGTHS[0])?;
        runs.store.set_padding(PADDING);
        let together = runs.run(&lengths, 0);
        runs.store.set_padding(0);
        for ((number, &length), shared) in lengths.iter().enumerate().zip(together?) {
            let alone = runs.run(&[length], number)?.pop().unwrap_or_default();
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
    runs.step.set_quiet(false).map_err(OpenError::from)?;
    found.map_or(Ok(()), |why| Err(refused(why)))
}

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

/// What the runs of the check need.
struct Runs<'a> {
    binding: &'a Binding,
    store: &'a mut StateStore,
    step: &'a mut Step,
    copier: &'a Copier,
}

impl Runs<'_> {
    /// Runs rows with states of these lengths. `first` is the number of the first row.
    fn run(&mut self, lengths: &[i64], first: usize) -> Result<Vec<Answers>, RequestError> {
        let row = |(number, &length): (usize, &i64)| {
            let given =
                self.binding.states.iter().enumerate().map(|(index, state)| given(state, index, number, length));
            let state = RowState { given: given.collect(), ..RowState::default() };
            CheckedRow { state, number, length }
        };
        let mut batch: Vec<_> = (first..).zip(lengths).map(row).collect();
        let done = self.run_batch(&mut batch);
        self.copier.synchronise()?;
        self.store.release();
        self.step.give_back();
        done
    }

    fn run_batch(&mut self, batch: &mut [CheckedRow]) -> Result<Vec<Answers>, RequestError> {
        let Self { binding, store, step, .. } = self;
        let rows = batch.len();
        store.load(batch, rows)?;
        let content = Content {
            dims: &input_dims,
            flags: &[Flag::Ready],
            generated: &|position, of| {
                let past = usize_of(batch[position].length);
                let new = |added: InputAxis| usize_of(input_dims(&binding.inputs[added.input])[added.axis]);
                RowValues::new(of, &binding.states, |_| past as u64, |_| past, new, store.gap(position))
            },
            elements: &|position, index, data_type, count| {
                let shared = binding.inputs[index].batch_axis.is_none();
                let number = if shared { 0 } else { batch[position].number };
                random(data_type, count, Scale::One, &[1, index, number])
            },
        };
        fill(binding, rows, &content, step)?;
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
}

/// The value of a state of a row; `None` for the value with which sequences start.
fn given(state: &BoundState, index: usize, number: usize, length: i64) -> Option<Initial> {
    if state.padded_axis.is_none() && !(is_float(state.data_type) && state.is_in_slot()) {
        return None;
    }
    let dims = dims_of(state, length);
    let bytes = random(state.data_type, element_count(&dims)?, Scale::One, &[0, index, number]);
    Some(Initial { dims, content: InitialContent::Bytes(bytes) })
}

/// The dims of an input of the check. Open dimensions get the length `OPEN`.
fn input_dims(input: &BoundInput) -> Vec<i64> {
    input.dims.iter().map(|&dim| if dim < 0 { OPEN } else { dim }).collect()
}

fn usize_of(dim: i64) -> usize {
    usize::try_from(dim).unwrap_or(0)
}

/// The input values of a run without requests.
struct Content<'a> {
    /// The dims of an input, all fixed.
    dims: &'a dyn Fn(&BoundInput) -> Vec<i64>,
    flags: &'a [Flag],
    generated: &'a dyn Fn(usize, &Generated) -> RowValues,
    /// `elements(position, index, data_type, count)` gives the bytes of `count` elements of input `index` for the row
    /// at `position`.
    elements: &'a dyn Fn(usize, usize, DataType, usize) -> Vec<u8>,
}

/// Fills the inputs of a run over `rows` rows, except those of states.
fn fill(binding: &Binding, rows: usize, content: &Content, step: &mut Step) -> Result<(), RequestError> {
    for (index, input) in binding.inputs.iter().enumerate() {
        let mut dims = (content.dims)(input);
        if let Some(axis) = input.batch_axis {
            dims[axis] = 1;
        }
        let count = element_count(&dims).unwrap_or(0);
        let element = match &input.source {
            Source::State(_) => continue,
            Source::Constant(bytes) => {
                constant(step, index, input, bytes, rows)?;
                continue;
            }
            // The model has a value of its own.
            Source::Request(request) if request.optional => {
                step.omit(index);
                continue;
            }
            Source::Generated(of) => {
                let values: Vec<_> = (0..rows).map(|position| (content.generated)(position, of)).collect();
                fill_generated(step, index, input, of, &values)?;
                continue;
            }
            Source::Lengths { of } => {
                let measured = &binding.inputs[*of];
                let Source::Request(request) = &measured.source else { continue };
                let length = (content.dims)(measured)[request.ragged_axis.unwrap_or(0)];
                lengths(step, index, input, rows, std::iter::repeat_n(usize_of(length), rows))?;
                continue;
            }
            // ONNX Runtime allocates strings itself; those that are not set are empty.
            _ if input.data_type == DataType::Bytes => {
                step.set_strings(index, &dims, rows, std::iter::empty())?;
                continue;
            }
            Source::Control(BoundControl::Flag { flag, no, yes }) => {
                Some(if content.flags.contains(flag) { yes } else { no })
            }
            Source::Request(_) | Source::Control(BoundControl::CorrelationId(_)) => None,
        };
        let layout = layout(input, &dims)?;
        // Without a batch axis, the rows share the value.
        let rows = if input.batch_axis.is_some() { rows } else { 1 };
        let buffer = step.input(index, &dims, rows)?;
        for position in 0..rows {
            let elements = match element {
                Some(element) => element.repeat(count),
                None => (content.elements)(position, index, input.data_type, count),
            };
            copies::put(&layout.row(RowAt { position, rows }), StorageType::Exact, &elements, buffer);
        }
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
