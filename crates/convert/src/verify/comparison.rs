//! Runs both models on the same data, and says how far their answers are from each other.

use serde::Serialize;

use super::given::{Given, row_axis, row_axis_of, varies};
use super::models::{Difference, Feed, Graph, Host, MOST_ELEMENTS, Random, Result, Runs, VerifyError};
use crate::onnx::{DataType, Dim, element_count, is_float};
use crate::report::{Report, Role, StartsAt, StepInput};

/// How far answers may be from the original's, as a part of its largest answer.
const TOLERANCE: f64 = 1e-4;
/// The same where a scale of quantization depends on the length of a request.
const QUANTIZED_TOLERANCE: f64 = 0.1;
/// A difference that may be rounding, however small the answers are: a sum of numbers around 1 rounds its last four
/// bits.
const ROUNDING: f64 = 16.0 * f32::EPSILON as f64;
/// The same two limits where an output or a state is FLOAT16, which has 11 significant bits.
const HALF_TOLERANCE: f64 = 1e-2;
const HALF_ROUNDING: f64 = 2e-3;
/// How many times as far BFLOAT16 rounds, which has 8 significant bits.
const BRAIN_OVER_HALF: f64 = 8.0;
/// How far large integers may be from the original's, because a number between two integers may be rounded to either.
/// Small ones, such as classes, must be equal.
const NEXT_INTEGER: f64 = 1.0;
// Steps of a comparison, before strides. At least as many as the fewest that shapes are computed for, so that a limit
// below those shows here. A multiple of 3, 4 and 5 but not of 7, so that some chunks leave a remainder.
const STEPS: i64 = 60;
pub const ROWS_TOGETHER: &str = "rows together and alone";

#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    pub what: String,
    pub output: String,
    /// The largest difference between two elements; 0 if they are equal bit by bit.
    pub largest: f64,
    pub step: Option<i64>,
}

impl Compared {
    /// The one with the larger difference.
    pub fn worse(self, other: Self) -> Self {
        if other.largest > self.largest { other } else { self }
    }
}

pub struct Comparison<'a> {
    pub report: &'a Report,
    pub original: &'a mut dyn Runs,
    pub converted: &'a mut Graph,
    pub starts: Option<&'a mut Graph>,
    pub given: &'a Given,
    /// Integers are decisions, such as tokens, and must be equal.
    pub exact_integers: bool,
}

impl Comparison<'_> {
    /// Steps to compare: those that the original is fixed to, or enough for several chunks of each length.
    pub fn total(&self, chunk: Option<i64>) -> i64 {
        self.fixed_steps().unwrap_or_else(|| {
            STEPS.max(chunk.unwrap_or(0).saturating_mul(2)).saturating_mul(self.report.steps_multiple)
        })
    }

    pub fn fixed_steps(&self) -> Option<i64> {
        self.report.time.iter().find_map(|seed| {
            let input = self.report.inputs.iter().find(|input| input.name == seed.input)?;
            input.dims.get(seed.axis)?.known()
        })
    }

    pub fn has_lengths(&self) -> bool {
        self.report.inputs.iter().any(|input| input.role == Role::Lengths)
    }

    /// The names of the outputs, and then those of the states' next values if asked.
    pub fn output_names(&self, with_states: bool) -> Vec<String> {
        let states = self.report.states.iter().filter(|_| with_states).map(|state| &state.pair.output);
        self.report.outputs.iter().map(|output| &output.name).chain(states).cloned().collect()
    }

    pub fn ends(&self) -> impl Iterator<Item = String> {
        self.report.states.iter().map(|state| state.pair.input.clone())
    }

    /// The shape of an input or a state for so many steps and rows.
    pub fn sizes(&self, name: &str, dims: &[Dim], (steps, rows): (i64, i64)) -> Vec<i64> {
        let size = |(axis, dim): (usize, &Dim)| {
            let given = self.given.lengths.iter().find(|(of, _)| of.is(name, axis)).map(|(_, length)| *length);
            match dim {
                _ if self.report.time.iter().any(|of| of.is(name, axis)) => steps,
                Dim::Known(length) => *length,
                _ => given.unwrap_or(rows),
            }
        };
        dims.iter().enumerate().map(size).collect()
    }

    /// Refuses inputs and states that no memory holds.
    pub fn check_sizes(&self, sizes: (i64, i64)) -> Result<()> {
        let inputs = self.report.inputs.iter().map(|input| (&input.name, &input.dims));
        let states = self.report.states.iter().map(|state| (&state.pair.input, &state.dims));
        for (name, dims) in inputs.chain(states) {
            let elements = element_count(&self.sizes(name, dims, sizes));
            if elements > MOST_ELEMENTS {
                return Err(VerifyError::TooLarge { name: name.clone(), elements });
            }
        }
        Ok(())
    }

    /// `step` is that of recordings for a model of single steps.
    pub fn inputs(&self, step: i64, (steps, rows): (i64, i64), random: &mut Random) -> Vec<Feed> {
        let mut inputs = Vec::new();
        for StepInput { name, elem, dims, role } in &self.report.inputs {
            let dims = self.sizes(name, dims, (steps, rows));
            let recording = self.given.recordings.iter().find(|recording| recording.input == *name);
            let value = self.given.values.iter().find(|(given, _)| given == name).map(|(_, value)| *value);
            let host = match (recording, value) {
                (Some(recording), _) => recording.host(self.report, step),
                (None, Some(value)) => Host::filled_with(*elem, dims, value),
                (None, None) if *role == Role::Lengths => Host::lengths(*elem, dims, steps, self.report.steps_multiple),
                (None, None) => Host::random(*elem, dims, random),
            };
            inputs.push((name.clone(), host));
        }
        inputs
    }

    /// Runs the original over all steps at once, from the start of its own states.
    pub fn whole(&mut self, inputs: &[Feed], total: i64) -> Result<Vec<Host>> {
        let mut feeds = self.part(inputs, 0, total);
        let states = self.first_states(&feeds)?;
        feeds.extend(self.ends().zip(states));
        self.run_original(&feeds, false)
    }

    /// Runs the original. Its outputs come first, then its states if asked. A model of one row runs row by row.
    pub fn run_original(&mut self, feeds: &[Feed], with_states: bool) -> Result<Vec<Host>> {
        let names = self.output_names(with_states);
        let axes = self.axes_of_outputs().into_iter().chain(self.axes_of_states());
        // The original of an opened batch takes one row in a run.
        if self.report.opened.is_empty() {
            return self.original.run(feeds, &names);
        }
        let mut rows: Vec<Vec<Host>> = vec![Vec::new(); names.len()];
        for row in 0..self.rows_of(feeds) {
            let one = |(name, value): &Feed| {
                let axis = self.report.opened.iter().find(|opened| opened.input == *name).map(|opened| opened.axis);
                (name.clone(), value.row(axis, row))
            };
            // Inputs that were not opened are the same for every row.
            let feeds: Vec<Feed> = feeds.iter().map(one).collect();
            for (output, value) in self.original.run(&feeds, &names)?.into_iter().enumerate() {
                rows[output].push(value);
            }
        }
        Ok(rows.iter().zip(axes).map(|(rows, axis)| Host::of_rows(rows, axis)).collect())
    }

    pub fn single_steps(&mut self, what: &str, steps: i64, rows: i64) -> Result<Compared> {
        let names = self.output_names(true);
        let mut worst: Option<Compared> = None;
        let mut states: Option<(Vec<Host>, Vec<Host>)> = None;
        let mut had_elements = vec![false; self.report.outputs.len()];
        let mut random = Random::new(11);
        for step in 0..steps {
            let inputs = self.inputs(step, (1, rows), &mut random);
            let (before, after) = match states.take() {
                Some(states) => states,
                None => {
                    let first = self.first_states(&inputs)?;
                    (first.clone(), first)
                }
            };
            let of_original: Vec<_> = inputs.iter().cloned().chain(self.ends().zip(before)).collect();
            let of_converted: Vec<_> = inputs.iter().cloned().chain(self.ends().zip(after)).collect();
            let mut expected = self.run_original(&of_original, true)?;
            let mut made = self.converted.run(&of_converted, &names)?;
            let count = self.report.outputs.len();
            states = Some((expected.split_off(count), made.split_off(count)));
            for (had, output) in had_elements.iter_mut().zip(&expected) {
                *had |= !output.bytes.is_empty();
            }
            let compared = self.compare(what.to_owned(), &expected, &[made])?;
            worst = worst.into_iter().chain([compared]).reduce(Compared::worse);
        }
        // A state may be empty, such as a cache that the graph doesn't use.
        let is_end = |name: &String| self.report.states.iter().any(|state| state.pair.output == *name);
        let outputs = self.report.outputs.iter().zip(had_elements);
        let mut empty = outputs.filter(|(output, had)| !had && !is_end(&output.name));
        if let (true, Some((output, _))) = (self.exact_integers, empty.next()) {
            return Err(VerifyError::Empty(output.name.clone()));
        }
        let none = || Compared { what: "no steps".to_owned(), output: String::new(), largest: 0.0, step: None };
        Ok(worst.unwrap_or_else(none))
    }

    pub fn part(&self, inputs: &[Feed], start: i64, count: i64) -> Vec<Feed> {
        let part = |(name, value): &Feed| {
            let role = self.report.inputs.iter().find(|input| input.name == *name).map(|input| input.role);
            let value = match role {
                Some(Role::Steps { axis }) => value.part(axis, start, count),
                Some(Role::Lengths) => value.lengths_within(start, count),
                _ => value.clone(),
            };
            (name.clone(), value)
        };
        inputs.iter().map(part).collect()
    }

    pub fn stepped(&mut self, inputs: &[Feed], total: i64, chunk: i64) -> Result<Vec<Vec<Host>>> {
        let names = self.output_names(true);
        let mut outputs = Vec::new();
        let mut states: Option<Vec<Host>> = None;
        let mut start = 0;
        while start < total {
            let count = chunk.min(total - start);
            let mut feeds = self.part(inputs, start, count);
            let current = match states.take() {
                Some(states) => states,
                None => self.first_states(&feeds)?,
            };
            feeds.extend(self.ends().zip(current));
            let mut made = self.converted.run(&feeds, &names)?;
            states = Some(made.split_off(self.report.outputs.len()));
            outputs.push(made);
            start += count;
        }
        Ok(outputs)
    }

    pub fn first_states(&mut self, inputs: &[Feed]) -> Result<Vec<Host>> {
        let rows = self.rows_of(inputs);
        let of_model = self.report.states.iter().filter(|state| state.starts_at == StartsAt::Model);
        let names: Vec<String> = of_model.map(|state| state.pair.input.clone()).collect();
        let made = self.starts.as_mut().map(|graph| graph.run(inputs, &names)).transpose()?;
        let mut made = made.into_iter().flatten();
        let mut states = Vec::new();
        for state in &self.report.states {
            let size = |dim: &Dim| match dim {
                Dim::Known(length) => *length,
                // Such a state starts without elements, as the backend starts it.
                dim if varies(self.report, dim) => 0,
                _ => rows,
            };
            let dims: Vec<i64> = state.dims.iter().map(size).collect();
            states.push(match state.starts_at {
                StartsAt::Zero | StartsAt::Unchanged => Host::filled_with(state.elem, dims, 0.0),
                StartsAt::Value(value) => Host::filled_with(state.elem, dims, value),
                StartsAt::Model => made.next().unwrap_or_else(|| Host::filled_with(state.elem, dims, 0.0)),
            });
        }
        Ok(states)
    }

    /// How far an output of this type may be from the original's, whose largest answer is `scale`. States, too, may be
    /// rounded to few bits.
    pub fn limit(&self, elem: i32, scale: f64) -> f64 {
        let has = |of: DataType| elem == of as i32 || self.report.states.iter().any(|state| state.elem == of as i32);
        let (tolerance, rounding) = if has(DataType::Bfloat16) {
            (BRAIN_OVER_HALF * HALF_TOLERANCE, BRAIN_OVER_HALF * HALF_ROUNDING)
        } else if has(DataType::Float16) {
            (HALF_TOLERANCE, HALF_ROUNDING)
        } else {
            (TOLERANCE, ROUNDING)
        };
        if self.exact_integers && !is_float(elem) {
            return 0.0;
        }
        // A scale over the whole request differs from chunk to chunk, so answers do, too.
        if self.report.quantizes {
            return (QUANTIZED_TOLERANCE * scale).max(rounding);
        }
        if is_float(elem) {
            (tolerance * scale).max(rounding)
        } else if TOLERANCE * scale >= NEXT_INTEGER {
            NEXT_INTEGER
        } else {
            0.0
        }
    }

    pub fn compare(&self, what: String, whole: &[Host], stepped: &[Vec<Host>]) -> Result<Compared> {
        let mut worst = Compared { what, output: String::new(), largest: 0.0, step: None };
        for (index, output) in self.report.outputs.iter().enumerate() {
            let parts: Vec<&Host> = stepped.iter().map(|outputs| &outputs[index]).collect();
            let joined = match output.axis {
                Some(axis) => Host::joined(&parts, axis),
                // Without an axis of steps, only the last chunk has the answer of the last step.
                None => (*parts[parts.len() - 1]).clone(),
            };
            let expected = &whole[index];
            if joined.dims != expected.dims {
                let (dims, name) = (joined.dims, &output.name);
                let why = format!("in {}, output '{name}' is {dims:?} and not {:?}", worst.what, expected.dims);
                return Err(VerifyError::Differs(why));
            }
            // NaN on both sides counts as equal, so two models that fail everywhere would seem to be alike.
            if !expected.bytes.is_empty() && !expected.numbers().iter().any(|number| number.is_finite()) {
                return Err(VerifyError::Nothing(output.name.clone()));
            }
            let Difference { largest, at, scale } = expected.difference(&joined);
            let step = output.axis.zip(at).map(|(axis, at)| expected.position(at, axis));
            if largest > self.limit(output.elem, scale) {
                let help = if worst.what == ROWS_TOGETHER {
                    "; sequences that share a run would change each other's answers: is the right axis the batch, and does \
                     the model treat its rows one by one?"
                } else {
                    ""
                };
                return Err(VerifyError::Differs(format!(
                    "in {}, output '{}' differs by {largest:.1e}{}, and the original's largest value is {scale:.1e}{help}",
                    worst.what,
                    output.name,
                    step.map(|step| format!(" at step {step}")).unwrap_or_default()
                )));
            }
            if worst.output.is_empty() || largest > worst.largest {
                worst = Compared { what: worst.what, output: output.name.clone(), largest, step };
            }
        }
        Ok(worst)
    }

    pub fn rows_of(&self, inputs: &[Feed]) -> i64 {
        let length = |((_, value), axis): (&Feed, Option<usize>)| value.dims.get(axis?).copied();
        inputs.iter().zip(self.axes_of_inputs()).find_map(length).unwrap_or(1)
    }

    pub fn axes_of_inputs(&self) -> Vec<Option<usize>> {
        self.report.inputs.iter().map(|input| row_axis_of(self.report, input)).collect()
    }

    pub fn axes_of_outputs(&self) -> Vec<Option<usize>> {
        self.report.outputs.iter().map(|output| row_axis(self.report, &output.dims, output.axis)).collect()
    }

    pub fn axes_of_states(&self) -> Vec<Option<usize>> {
        self.report.states.iter().map(|state| row_axis(self.report, &state.dims, None)).collect()
    }
}
