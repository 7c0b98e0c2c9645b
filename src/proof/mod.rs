//! Proves at load that the rows of a run don't change each other's results: three sequences together, and each alone.
//!
//! Where a graph mixes the rows of its batch, sequences that share a run get each other's data without an error, and
//! one client alone sees nothing. So the model runs on random data. Each sequence makes three inferences. They begin one
//! after the other, so that the runs have rows of different age. The rows of a run have values of different size: small
//! ones, zeros, large ones. What a row gets in the shared run must be what it gets in a run of its own, within rounding.
//!
//! What the converter says of the graph (`RowsInGraph`) is asked as well. The runs find mixing for which it has no rule. The
//! graph names the node, and covers models that can't run on random data. A node there refuses a batch only if it always
//! combines rows, such as a softmax over the batch: many masks take a maximum over it. Rounding may change with the number of
//! rows; a run of copies of the row tells it from mixing. A large model whose graph is a proof isn't run, because its load
//! would take noticeably longer.
//!
//! Not for: rows whose growing states have different lengths in one run (`batch/padding_check.rs`).

#![forbid(unsafe_code)]

mod data;

use std::sync::Arc;
use std::time::Duration;

use rows::copies;
use rows::tensor::{DataType, Dims, Gap, RowAt, RowLayout, StorageType, element_count};

use crate::binding::{
    Binding, BoundControl, BoundInput, BoundState, Counter, Flag, Generated, InitialContent, InputAxis, RowValues,
    Source, TrimBy,
};
use crate::memory::Bytes;
use crate::session::{Copier, Given, Run, Session, Step};
pub use data::{Answer, Scale, difference, is_float, random};

/// Sequences of the proof.
const SEQUENCES: usize = 3;
/// Inferences of each.
const INFERENCES: usize = 3;
/// Elements along open dimensions of requests: the first number with which the model runs. A convolution or a transform
/// may need many.
const LENGTHS: [i64; 5] = [2, 1, 16, 512, 4096];
/// The values of the rows of a run.
const SCALES: [Scale; SEQUENCES] = [Scale::Small, Scale::Zero, Scale::Large];
/// No input of a row is larger.
const MOST_BYTES: usize = 1 << 24;
/// No run takes longer. A loop may never end on random data.
const MOST_TIME: Duration = Duration::from_secs(10);

/// What is known of the rows of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// They don't change each other's results.
    Apart,
    /// Random data can't show it, for this reason.
    Unknown(String),
    /// A row has other results in a shared run, in this way; or it can't share one, for this reason.
    Mixed(String),
    /// A row has other results in a shared run, in this way, and the same ones in a run of copies of itself: the number of
    /// rows changes them. It is rounding if the graph proves the rows apart.
    Rounded(String),
    /// In a run of one row, an output has another dimension where its row should be.
    Missing(String),
}

/// Runs the model with up to `most_rows` rows, on the host. `session` is one that runs there.
pub fn prove(binding: &Binding, most_rows: usize, session: &Arc<Session>) -> Rows {
    match Proof::new(binding, most_rows, session).and_then(Proof::run) {
        Ok(()) => Rows::Apart,
        Err(found) => found,
    }
}

fn has_strings(input: &BoundInput) -> bool {
    let is_left_out = matches!(&input.source, Source::Request(request) if request.optional);
    input.data_type == DataType::Bytes && !is_left_out
}

fn has_open_length(input: &BoundInput) -> bool {
    let is_of_request = matches!(input.source, Source::Request(_));
    is_of_request && (0..input.dims.len()).any(|axis| input.dims[axis] < 0 && Some(axis) != input.batch_axis)
}

fn is_too_large(dims: &[i64], data_type: DataType) -> bool {
    let bytes = element_count(dims).and_then(|count| count.checked_mul(data_type.byte_size().unwrap_or(1)));
    bytes.is_none_or(|bytes| bytes > MOST_BYTES)
}

fn too_large(input: &BoundInput) -> Rows {
    unknown(format!("'{}' would be too large", input.name))
}

fn unknown(why: impl ToString) -> Rows {
    Rows::Unknown(why.to_string())
}

/// One row of an input: dims with 1 for the batch axis, and row-major elements.
#[derive(Clone, Debug)]
struct Tensor {
    dims: Vec<i64>,
    bytes: Vec<u8>,
}

/// A sequence, as far as it has come.
struct Sequence {
    number: usize,
    inferences: usize,
    states: Vec<Tensor>,
    counts: Vec<u64>,
}

impl Sequence {
    fn new(binding: &Binding, number: usize) -> Self {
        let states = binding.states.iter().enumerate().map(|(index, state)| first_state(state, index, number));
        Self { number, inferences: 0, states: states.collect(), counts: vec![0; binding.counters.len()] }
    }
}

fn first_state(state: &BoundState, index: usize, number: usize) -> Tensor {
    let dims = state.initial.dims.clone();
    let count = element_count(&dims).unwrap_or(0);
    let zeros = || vec![0; count * state.data_type.byte_size().unwrap_or(0)];
    let bytes = match &state.initial.content {
        InitialContent::Bytes(bytes) => bytes.clone(),
        InitialContent::Model if is_float(state.data_type) => {
            random(state.data_type, count, Scale::One, &[0, index, number])
        }
        InitialContent::Zeros | InitialContent::Strings(_) | InitialContent::Model => zeros(),
    };
    Tensor { dims, bytes }
}

/// The scale of an inference, if each sequence begins `delay` rounds after the one before. The rows of a round have different
/// ones. Large values come late, because a state that has become large hides what small values do to it.
const fn scale_of(number: usize, inference: usize, delay: usize) -> Scale {
    SCALES[(inference + number * (1 - delay)) % SCALES.len()]
}

struct Proof<'a> {
    binding: &'a Binding,
    step: Step,
    /// How many there are.
    sequences: usize,
    /// Elements along open dimensions of requests.
    length: i64,
    /// Large values have the other signs, so that a condition on all rows is once true and once false; and small ones are
    /// larger, so that limits for values of usual size are passed once and not passed once.
    is_second: bool,
}

impl<'a> Proof<'a> {
    fn new(binding: &'a Binding, most_rows: usize, session: &Arc<Session>) -> Result<Self, Rows> {
        if let Some(input) = binding.inputs.iter().find(|input| has_strings(input)) {
            return Err(unknown(format!("'{}' takes strings", input.name)));
        }
        if let Some(state) = binding.states.iter().find(|state| is_too_large(&state.initial.dims, state.data_type)) {
            return Err(too_large(&binding.inputs[state.input]));
        }
        let sequences = most_rows.min(SEQUENCES);
        let mut spec = binding.step_spec(sequences, Vec::new());
        // ONNX Runtime makes all outputs, so that each has the shape that the model gives it.
        for output in &mut spec.outputs {
            (output.dims, output.is_read) = (None, true);
        }
        let step = Step::new(session.clone(), &spec, Copier::on_host()).map_err(unknown)?;
        Ok(Self { binding, step, sequences, length: 0, is_second: false })
    }

    /// An error if the rows aren't apart, or if that isn't known.
    fn run(mut self) -> Result<(), Rows> {
        self.choose_length()?;
        self.check_odd_lengths()?;
        [false, true].into_iter().try_for_each(|is_second| {
            self.is_second = is_second;
            self.compare()
        })
    }

    /// Chooses the first of [`LENGTHS`] with which the model runs.
    fn choose_length(&mut self) -> Result<(), Rows> {
        let mut first_error = None;
        for length in LENGTHS {
            self.length = length;
            let tried = self.check_sizes().and_then(|()| self.alone(&Sequence::new(self.binding, 0)));
            let Err(error) = tried else { return Ok(()) };
            first_error.get_or_insert(error);
            if !self.binding.inputs.iter().any(has_open_length) {
                break;
            }
        }
        Err(first_error.unwrap_or_else(|| unknown("")))
    }

    /// Refuses a model that fails for one row and runs for two: it cuts the rows in windows that two of them fill.
    fn check_odd_lengths(&mut self) -> Result<(), Rows> {
        let chosen = self.length;
        let row = Sequence::new(self.binding, 0);
        let has_open_length = self.binding.inputs.iter().any(has_open_length);
        for length in [1, 3].into_iter().filter(|_| has_open_length) {
            self.length = length;
            let Err(Rows::Unknown(why)) = self.alone(&row) else { continue };
            if self.together(&[&row, &row]).is_ok() {
                return Err(Rows::Mixed(format!(
                    "two rows of length {length} share a run that fails for each alone: {why}"
                )));
            }
        }
        self.length = chosen;
        Ok(())
    }

    /// Refuses inputs of requests that would be too large, before their data are made.
    fn check_sizes(&self) -> Result<(), Rows> {
        let last = Sequence::new(self.binding, SEQUENCES - 1);
        let would_be_too_large = |(index, input): &(usize, &BoundInput)| {
            matches!(input.source, Source::Request(_))
                && is_too_large(&self.random_dims(*index, &last), input.data_type)
        };
        let mut inputs = self.binding.inputs.iter().enumerate();
        inputs.find(would_be_too_large).map_or(Ok(()), |(_, input)| Err(too_large(input)))
    }

    /// How many rounds a sequence begins after the one before.
    fn delay(&self) -> usize {
        usize::from(!self.binding.has_varying_states())
    }

    /// Lets the sequences begin one after the other, and refuses the first difference. Sequences with states that vary in size
    /// begin together, because rows share a run only if theirs have the same size.
    fn compare(&mut self) -> Result<(), Rows> {
        let mut sequences: Vec<Sequence> =
            (0..self.sequences).map(|number| Sequence::new(self.binding, number)).collect();
        let delay = self.delay();
        for round in 0..INFERENCES + (self.sequences - 1) * delay {
            let is_live =
                |sequence: &&mut Sequence| sequence.inferences < INFERENCES && sequence.number * delay <= round;
            let mut live: Vec<&mut Sequence> = sequences.iter_mut().filter(is_live).collect();
            self.round(&mut live)?;
        }
        Ok(())
    }

    /// Runs the next inference of these sequences together and alone.
    fn round(&mut self, live: &mut [&mut Sequence]) -> Result<(), Rows> {
        let rows: Vec<&Sequence> = live.iter().map(|sequence| &**sequence).collect();
        let dims = |row: &Sequence| row.states.iter().map(|state| state.dims.clone()).collect::<Vec<_>>();
        if rows.windows(2).any(|two| dims(two[0]) != dims(two[1])) {
            return Err(unknown("the states of the rows have different lengths, so that they share no run"));
        }
        let together = self.together(&rows);
        let mut alone = Vec::new();
        for row in &rows {
            alone.push(self.alone(row)?);
        }
        let count = rows.len();
        let together = together.map_err(|error| match error {
            Rows::Unknown(why) | Rows::Missing(why) => Rows::Mixed(format!("{count} rows cannot share a run: {why}")),
            found => found,
        })?;
        for (position, ((row, alone), shared)) in rows.iter().zip(&alone).zip(&together).enumerate() {
            let largest_input = self.largest_input(row);
            let shared = self.without_filling(alone, shared);
            let Some(found) = difference(alone, &shared, largest_input) else { continue };
            if difference(alone, &self.alone(row)?, largest_input).is_some() {
                return Err(unknown("it gives other results in each run"));
            }
            let found = format!("in a run of {count} rows, {found}");
            let of_copies = self.together(&vec![*row; count])?.swap_remove(position);
            let is_rounded = difference(&shared, &self.without_filling(alone, &of_copies), largest_input).is_none();
            return Err(if is_rounded { Rows::Rounded(found) } else { Rows::Mixed(found) });
        }
        for (sequence, answers) in live.iter_mut().zip(alone) {
            self.advance(sequence, answers)?;
        }
        Ok(())
    }

    /// The largest number of what a row brings, and of its states.
    fn largest_input(&self, row: &Sequence) -> f64 {
        let inputs = self.binding.inputs.iter().enumerate();
        let of = |(index, input): (usize, &BoundInput)| {
            self.input(index, row).map_or(0.0, |tensor| data::largest(input.data_type, &tensor.bytes))
        };
        inputs.map(of).fold(0.0, f64::max)
    }

    /// An output that is sent as wide as the run, as `padded_outputs` may say, has the row's part in front.
    fn without_filling(&self, alone: &[Answer], shared: &[Answer]) -> Vec<Answer> {
        let pads = self.binding.inputs.iter().any(BoundInput::is_padded);
        let mut shared = shared.to_vec();
        for ((bound, alone), shared) in self.binding.outputs.iter().zip(alone).zip(&mut shared) {
            if pads && bound.trim.is_none() && bound.dims.is_none() && alone.dims.len() == shared.dims.len() {
                (0..alone.dims.len()).for_each(|axis| shared.cut(axis, alone.dims[axis]));
            }
        }
        shared
    }

    fn advance(&self, sequence: &mut Sequence, answers: Vec<Answer>) -> Result<(), Rows> {
        for (index, counter) in self.binding.counters.iter().enumerate() {
            sequence.counts[index] += match *counter {
                Counter::Steps => 1,
                Counter::Elements(of) => self.own_length(sequence, of) as u64,
            };
        }
        sequence.inferences += 1;
        for (index, state) in self.binding.states.iter().enumerate() {
            let answer = &answers[state.output];
            let fits = |(&dim, &wanted): (&i64, &i64)| dim == wanted || wanted < 0;
            if answer.dims.len() != state.dims.len() || !answer.dims.iter().zip(&state.dims).all(fits) {
                return Err(unknown(format!("'{}' is no value of its state", answer.name)));
            }
            sequence.states[index] = Tensor { dims: answer.dims.clone(), bytes: answer.bytes.clone() };
        }
        Ok(())
    }

    fn alone(&mut self, row: &Sequence) -> Result<Vec<Answer>, Rows> {
        Ok(self.together(&[row])?.pop().unwrap_or_default())
    }

    /// What each row gets in one run.
    fn together(&mut self, rows: &[&Sequence]) -> Result<Vec<Vec<Answer>>, Rows> {
        let tensors: Vec<Option<Tensor>> =
            (0..self.binding.inputs.len()).map(|index| self.joined(index, rows)).collect::<Result<_, _>>()?;
        for (index, _) in tensors.iter().enumerate().filter(|(_, tensor)| tensor.is_none()) {
            self.step.omit(index);
        }
        let inputs = tensors.iter().map(|tensor| tensor.as_ref().map(Tensor::lent)).collect();
        let limit = self.step.limit_time(MOST_TIME).map_err(unknown)?;
        self.step.run(Run { rows: rows.len(), inputs, ..Run::default() }).map_err(|error| {
            if limit.is_over() {
                return unknown(format!("a run takes longer than {} s", MOST_TIME.as_secs()));
            }
            unknown(error)
        })?;
        drop(limit);
        let answers =
            rows.iter().enumerate().map(|(position, row)| self.answers(row, RowAt { position, rows: rows.len() }));
        let answers = answers.collect();
        self.step.give_back();
        answers
    }

    /// The rows of an input; `None` if it is left out.
    fn joined(&self, index: usize, rows: &[&Sequence]) -> Result<Option<Tensor>, Rows> {
        let input = &self.binding.inputs[index];
        let Some(mut parts) = rows.iter().map(|row| self.input(index, row)).collect::<Option<Vec<Tensor>>>() else {
            return Ok(None);
        };
        let Some(axis) = input.batch_axis else { return Ok(Some(parts.swap_remove(0))) };
        let longest = |axis: usize| parts.iter().map(|part| part.dims[axis]).max().unwrap_or(0);
        let mut dims: Vec<i64> = (0..input.dims.len()).map(longest).collect();
        for part in &mut parts {
            part.fill_up(input.data_type, &dims);
        }
        let too_large = || too_large(input);
        let layout = RowLayout::new(input.data_type, &dims, input.batch_axis).ok_or_else(too_large)?;
        let bytes = layout.row_bytes();
        if bytes > MOST_BYTES {
            return Err(too_large());
        }
        let mut batch = vec![0; bytes * rows.len()];
        for (position, part) in parts.iter().enumerate() {
            let row = layout.row(RowAt { position, rows: rows.len() });
            copies::put(&row, StorageType::Exact, &part.bytes, &mut batch);
        }
        dims[axis] = rows.len() as i64;
        Ok(Some(Tensor { dims, bytes: batch }))
    }

    /// An input of one row; `None` if the model has a value of its own.
    fn input(&self, index: usize, row: &Sequence) -> Option<Tensor> {
        let input = &self.binding.inputs[index];
        let mut dims: Vec<i64> = input.dims.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
        if let Some(axis) = input.batch_axis {
            dims[axis] = 1;
        }
        let repeated = |dims: Vec<i64>, element: &[u8]| {
            let bytes = element.repeat(element_count(&dims).unwrap_or(0));
            Tensor { dims, bytes }
        };
        let size = input.data_type.byte_size().unwrap_or(1);
        Some(match &input.source {
            Source::State(state) => row.states[*state].clone(),
            Source::Request(request) if request.optional => return None,
            Source::Request(_) => self.random(index, row),
            Source::Constant(bytes) => Tensor { dims, bytes: bytes.clone() },
            Source::Lengths { of } => {
                let axis = match &self.binding.inputs[*of].source {
                    Source::Request(request) => request.ragged_axis.unwrap_or(0),
                    _ => 0,
                };
                let length = self.random_dims(*of, row)[axis];
                repeated(dims, &length.to_le_bytes()[..size.min(8)])
            }
            Source::Control(BoundControl::Flag { flag, no, yes }) => {
                let is_set = match flag {
                    Flag::Start => row.inferences == 0,
                    Flag::End => row.inferences == INFERENCES - 1,
                    Flag::Ready => true,
                };
                repeated(dims, if is_set { yes } else { no })
            }
            Source::Control(BoundControl::CorrelationId(_)) => {
                repeated(dims, &(row.number as u64 + 1).to_le_bytes()[..size.min(8)])
            }
            Source::Generated(generated) => self.generated(input, generated, row, dims),
        })
    }

    fn generated(&self, input: &BoundInput, generated: &Generated, row: &Sequence, mut dims: Vec<i64>) -> Tensor {
        let dim = |dims: &[i64], axis: usize| dims.get(axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0));
        let values = RowValues::new(
            generated,
            self.binding,
            |counter| row.counts.get(counter).copied().unwrap_or(0),
            |of| dim(&row.states[of.state].dims, of.axis),
            |of| self.own_length(row, of),
            Gap::NONE,
        );
        if let Some(axis) = generated.axis {
            dims[axis] = values.count() as i64;
        }
        let mut bytes = Vec::new();
        let row_bytes = element_count(&dims).unwrap_or(0) * input.data_type.byte_size().unwrap_or(1);
        values.append_row(generated, input.data_type, values.count(), row_bytes, &mut bytes);
        Tensor { dims, bytes }
    }

    /// Dims of what a row brings, with its context.
    fn random_dims(&self, index: usize, row: &Sequence) -> Vec<i64> {
        let input = &self.binding.inputs[index];
        let Source::Request(request) = &input.source else { return input.dims.clone() };
        let length = |axis: usize| {
            let multiple = request.steps_multiple.filter(|of| of.axis == axis).map_or(1, |of| of.multiple.get() as i64);
            // Rows that may have different lengths have them.
            let more = if request.is_padded && request.ragged_axis == Some(axis) { [7, 0, 38][row.number] } else { 0 };
            let context = request.context.filter(|of| of.axis == axis).map_or(0, |of| of.length as i64);
            context + multiple * (self.length + more)
        };
        let dim = |(axis, &dim): (usize, &i64)| match dim {
            _ if Some(axis) == input.batch_axis => 1,
            dim if dim < 0 => length(axis),
            dim => dim,
        };
        input.dims.iter().enumerate().map(dim).collect()
    }

    fn random(&self, index: usize, row: &Sequence) -> Tensor {
        let input = &self.binding.inputs[index];
        let dims = self.random_dims(index, row);
        // Without a batch axis, the rows share the value.
        let (number, inference) = if input.batch_axis.is_some() { (row.number, row.inferences) } else { (0, 0) };
        let scale = if input.batch_axis.is_some() { scale_of(number, inference, self.delay()) } else { Scale::One };
        let scale = match scale {
            Scale::Large if self.is_second => Scale::Negated,
            Scale::Small if self.is_second => Scale::One,
            scale => scale,
        };
        let count = element_count(&dims).unwrap_or(0);
        let bytes = random(input.data_type, count, scale, &[1, index, number, inference]);
        Tensor { dims, bytes }
    }

    /// What a request brings along an axis of an input.
    fn own_length(&self, row: &Sequence, of: InputAxis) -> usize {
        let dim = self.random_dims(of.input, row).get(of.axis).copied().unwrap_or(0);
        let context = match &self.binding.inputs[of.input].source {
            Source::Request(request) => request.context.filter(|context| context.axis == of.axis),
            _ => None,
        };
        usize::try_from(dim).unwrap_or(0).saturating_sub(context.map_or(0, |context| context.length))
    }

    /// What a row got in the last run.
    fn answers(&self, row: &Sequence, at: RowAt) -> Result<Vec<Answer>, Rows> {
        let mut answers: Vec<Answer> = Vec::new();
        for (index, bound) in self.binding.outputs.iter().enumerate() {
            let view = self.step.output(index, None).map_err(unknown)?;
            let (name, data_type) = (bound.name.clone(), bound.data_type);
            let mut dims = view.dims.to_vec();
            // A scalar for the whole batch is answered in runs of one row only.
            if dims.is_empty() && bound.batch_axis.is_some() {
                answers.push(Answer { name, data_type, dims, bytes: Vec::new() });
                continue;
            }
            if bound.batch_axis.is_some_and(|axis| dims.get(axis) != Some(&(at.rows as i64))) {
                let rows = if at.rows == 1 { "one row".to_owned() } else { format!("{} rows", at.rows) };
                let why = format!("'{name}' is {} in a run of {rows}: it has no row for each request", Dims(&dims));
                return Err(Rows::Missing(why));
            }
            if data_type == DataType::Bytes {
                bound.batch_axis.into_iter().for_each(|axis| dims[axis] = 1);
                answers.push(Answer { name, data_type, dims, bytes: Vec::new() });
                continue;
            }
            let layout = RowLayout::new(data_type, &dims, bound.batch_axis)
                .ok_or_else(|| unknown(format!("'{name}' is too large")))?;
            let mut bytes = vec![0; layout.row_bytes()];
            let at = if bound.batch_axis.is_some() { at } else { RowAt { position: 0, rows: 1 } };
            copies::take(&layout.row(at), StorageType::Exact, view.bytes, &mut bytes);
            if let Some(axis) = bound.batch_axis {
                dims[axis] = 1;
            }
            answers.push(Answer { name, data_type, dims, bytes });
        }
        // A row's part of an output whose rows have different lengths.
        for (index, bound) in self.binding.outputs.iter().enumerate() {
            let Some(trim) = bound.trim else { continue };
            let length = match trim.by {
                TrimBy::Input(of) => match &self.binding.inputs[of].source {
                    Source::Request(request) => self.random_dims(of, row)[request.ragged_axis.unwrap_or(0)],
                    _ => continue,
                },
                TrimBy::Output(of) => answers[of].first_number() as i64,
            };
            answers[index].cut(trim.axis, length);
        }
        Ok(answers)
    }
}

impl Tensor {
    fn lent(&self) -> Given<'_> {
        Given::Lent { dims: &self.dims, bytes: Bytes::Host(&self.bytes) }
    }

    /// Fills a row up with zeros behind its elements.
    fn fill_up(&mut self, data_type: DataType, dims: &[i64]) {
        let size = data_type.byte_size().unwrap_or(1);
        for (axis, &to) in dims.iter().enumerate() {
            let from = self.dims[axis];
            if from == to {
                continue;
            }
            let inner = element_count(&self.dims[axis + 1..]).unwrap_or(0) * size;
            let mut bytes = Vec::new();
            for part in self.bytes.chunks_exact((inner * from as usize).max(1)) {
                bytes.extend_from_slice(part);
                bytes.resize(bytes.len() + inner * (to - from) as usize, 0);
            }
            (self.bytes, self.dims[axis]) = (bytes, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_of_a_run_have_different_scales() {
        for delay in [0, 1] {
            for round in 0..INFERENCES + (SEQUENCES - 1) * delay {
                let live = (0..SEQUENCES).filter_map(|number| Some((number, round.checked_sub(number * delay)?)));
                let live = live.filter(|(_, inference)| *inference < INFERENCES);
                let scales: Vec<Scale> = live.map(|(number, of)| scale_of(number, of, delay)).collect();
                let is_first =
                    |(at, scale): (usize, &Scale)| scales.iter().position(|other| other == scale) == Some(at);
                assert!(scales.iter().enumerate().all(is_first), "round {round}, delay {delay}: {scales:?}");
                assert!(scales.len() < SEQUENCES || scales.contains(&Scale::Large));
            }
        }
    }
}
