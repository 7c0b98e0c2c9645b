//! Proves at load that the rows of a run don't change each other's results: three sequences together, and each alone.
//!
//! Where a graph mixes the rows of its batch, sequences that share a run get each other's data without an error, and
//! one client alone sees nothing. So the model runs on random data. Each sequence makes three inferences. They begin
//! one after the other, so that the runs have rows of different age. The rows of a run have values of different size:
//! small ones, zeros, large ones. What a row gets in the shared run must be what it gets in a run of its own, within
//! rounding.
//!
//! What the converter says of the graph (`RowsInGraph`) is asked as well. The runs find mixing for which it has no
//! rule. The graph names the node, and covers models that can't run on random data. A node there refuses a batch only
//! if it always combines rows, such as a softmax over the batch: many masks take a maximum over it. Rounding may change
//! with the number of rows; a run of copies of the row tells it from mixing. A large model whose graph is a proof isn't
//! run, because its load would take noticeably longer.
//!
//! Not for: rows whose growing states have different lengths in one run (`batch/at_load.rs`).

#![forbid(unsafe_code)]

mod data;

use std::sync::Arc;
use std::time::Duration;

use rows::copies;
use rows::tensor::{DataType, Dims, RowAt, RowLayout, StorageType, dims_fit, element_count};

use crate::binding::{Binding, BoundInput, Counter, Source, TrimBy};
use crate::session::{Copier, Run, Session, Step};
pub use data::{Answer, Scale, difference, is_float, random};
use data::{INFERENCES, Inputs, SEQUENCES, Sequence, Tensor};

/// Elements along open dimensions of requests: the first number with which the model runs. A convolution or a transform
/// may need many.
const LENGTHS: [i64; 5] = [2, 1, 16, 512, 4096];
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
    /// A row has other results in a shared run, in this way, and the same ones in a run of copies of itself: the number
    /// of rows changes them. It is rounding if the graph proves the rows apart.
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

struct Proof<'a> {
    binding: &'a Binding,
    step: Step,
    sequences: usize,
    inputs: Inputs<'a>,
}

impl<'a> Proof<'a> {
    fn new(binding: &'a Binding, most_rows: usize, session: &Arc<Session>) -> Result<Self, Rows> {
        let is_left_out = |input: &BoundInput| matches!(&input.source, Source::Request(of) if of.optional);
        let takes_strings = |input: &&BoundInput| input.data_type == DataType::Bytes && !is_left_out(input);
        if let Some(input) = binding.inputs.iter().find(takes_strings) {
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
        let step = Step::new(session.clone(), &spec, Copier::default()).map_err(unknown)?;
        Ok(Self { binding, step, sequences, inputs: Inputs::new(binding) })
    }

    /// An error if the rows aren't apart, or if that isn't known.
    fn run(mut self) -> Result<(), Rows> {
        self.choose_length()?;
        self.check_odd_lengths()?;
        [false, true].into_iter().try_for_each(|is_second| {
            self.inputs.is_second = is_second;
            self.compare()
        })
    }

    /// Chooses the first of [`LENGTHS`] with which the model runs.
    fn choose_length(&mut self) -> Result<(), Rows> {
        let mut first_error = None;
        for length in LENGTHS {
            self.inputs.length = length;
            let tried = self.check_sizes().and_then(|()| self.alone(&Sequence::new(self.binding, 0)));
            let Err(error) = tried else { return Ok(()) };
            first_error.get_or_insert(error);
            // Without an open dimension, every further try would be the same run.
            if !self.binding.inputs.iter().any(has_open_length) {
                break;
            }
        }
        Err(first_error.unwrap_or_else(|| unknown("")))
    }

    /// Refuses a model that fails for one row and runs for two: it cuts the rows in windows that two of them fill.
    fn check_odd_lengths(&mut self) -> Result<(), Rows> {
        let chosen = self.inputs.length;
        let row = Sequence::new(self.binding, 0);
        let has_open_length = self.binding.inputs.iter().any(has_open_length);
        for length in [1, 3].into_iter().filter(|_| has_open_length) {
            self.inputs.length = length;
            let Err(Rows::Unknown(why)) = self.alone(&row) else { continue };
            if self.together(&[&row, &row]).is_ok() {
                return Err(Rows::Mixed(format!(
                    "two rows of length {length} can share a run, but each fails alone: {why}"
                )));
            }
        }
        self.inputs.length = chosen;
        Ok(())
    }

    /// Refuses inputs of requests that would be too large, before their data are made.
    fn check_sizes(&self) -> Result<(), Rows> {
        // Its rows are the longest (`random_dims`).
        let last = Sequence::new(self.binding, SEQUENCES - 1);
        let would_be_too_large = |(index, input): &(usize, &BoundInput)| {
            matches!(input.source, Source::Request(_))
                && is_too_large(&self.inputs.random_dims(*index, &last), input.data_type)
        };
        let mut inputs = self.binding.inputs.iter().enumerate();
        inputs.find(would_be_too_large).map_or(Ok(()), |(_, input)| Err(too_large(input)))
    }

    /// Lets the sequences begin one after the other, and refuses the first difference. Sequences with states that vary
    /// in size begin together, because rows share a run only if theirs have the same size.
    fn compare(&mut self) -> Result<(), Rows> {
        let mut sequences: Vec<Sequence> =
            (0..self.sequences).map(|number| Sequence::new(self.binding, number)).collect();
        let delay = self.inputs.delay();
        for round in 0..INFERENCES + (self.sequences - 1) * delay {
            let is_live =
                |sequence: &&mut Sequence| sequence.inferences < INFERENCES && sequence.number * delay <= round;
            let mut live: Vec<&mut Sequence> = sequences.iter_mut().filter(is_live).collect();
            self.round(&mut live)?;
        }
        Ok(())
    }

    fn round(&mut self, live: &mut [&mut Sequence]) -> Result<(), Rows> {
        let rows: Vec<&Sequence> = live.iter().map(|sequence| &**sequence).collect();
        let dims = |row: &Sequence| row.states.iter().map(|state| state.dims.clone()).collect::<Vec<_>>();
        if rows.windows(2).any(|two| dims(two[0]) != dims(two[1])) {
            return Err(unknown("the states of the rows have different lengths, so they share no run"));
        }
        // Not returned yet: its error counts only if each row runs alone.
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
            // A graph may have random nodes.
            if difference(alone, &self.alone(row)?, largest_input).is_some() {
                return Err(unknown("it gives other results in each run"));
            }
            let found = format!("in a run of {count} rows, {found}");
            // In a run of its own copies, a row meets no other data. If its result changes there as well, the number of
            // rows is the cause.
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
            self.inputs.of_row(index, row).map_or(0.0, |tensor| data::largest(input.data_type, &tensor.bytes))
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
                Counter::Elements(of) => self.inputs.own_length(sequence, of) as u64,
            };
        }
        sequence.inferences += 1;
        for (index, state) in self.binding.states.iter().enumerate() {
            let answer = &answers[state.output];
            if !dims_fit(&answer.dims, &state.dims) {
                return Err(unknown(format!("'{}' is no value of its state", answer.name)));
            }
            sequence.states[index] = Tensor { dims: answer.dims.clone(), bytes: answer.bytes.clone() };
        }
        Ok(())
    }

    fn alone(&mut self, row: &Sequence) -> Result<Vec<Answer>, Rows> {
        Ok(self.together(&[row])?.pop().unwrap_or_default())
    }

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
        // Its options also hold for later runs, and the next run gets a limit of its own.
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
        let Some(mut parts) = rows.iter().map(|row| self.inputs.of_row(index, row)).collect::<Option<Vec<Tensor>>>()
        else {
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

    fn answers(&self, row: &Sequence, at: RowAt) -> Result<Vec<Answer>, Rows> {
        let mut answers: Vec<Answer> = Vec::new();
        for (index, bound) in self.binding.outputs.iter().enumerate() {
            let view = self.step.output(index, None).map_err(unknown)?;
            let (name, data_type) = (bound.name.clone(), bound.data_type);
            let (mut dims, mut bytes) = (view.dims.to_vec(), Vec::new());
            // A scalar for the whole batch is answered in runs of one row only.
            if dims.is_empty() && bound.batch_axis.is_some() {
                answers.push(Answer { name, data_type, dims, bytes });
                continue;
            }
            if bound.batch_axis.is_some_and(|axis| dims.get(axis) != Some(&(at.rows as i64))) {
                let rows = if at.rows == 1 { "one row".to_owned() } else { format!("{} rows", at.rows) };
                let why = format!("'{name}' is {} in a run of {rows}: it has no row for each request", Dims(&dims));
                return Err(Rows::Missing(why));
            }
            // Of strings, only the dims are compared.
            if data_type != DataType::Bytes {
                let layout = RowLayout::new(data_type, &dims, bound.batch_axis)
                    .ok_or_else(|| unknown(format!("'{name}' is too large")))?;
                bytes.resize(layout.row_bytes(), 0);
                let at = if bound.batch_axis.is_some() { at } else { RowAt { position: 0, rows: 1 } };
                copies::take(&layout.row(at), StorageType::Exact, view.bytes, &mut bytes);
            }
            if let Some(axis) = bound.batch_axis {
                dims[axis] = 1;
            }
            answers.push(Answer { name, data_type, dims, bytes });
        }
        // A row's part of an output whose rows have different lengths.
        for (index, bound) in self.binding.outputs.iter().enumerate() {
            let Some(trim) = bound.trim else { continue };
            let length = match trim.by {
                TrimBy::Input(of) => match self.inputs.ragged_length(of, row) {
                    Some(length) => length,
                    None => continue,
                },
                TrimBy::Output(of) => answers[of].first_number() as i64,
            };
            answers[index].cut(trim.axis, length);
        }
        Ok(answers)
    }
}
