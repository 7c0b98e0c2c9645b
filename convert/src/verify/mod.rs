//! Compares a converted model with its original in ONNX Runtime: in chunks of several lengths with one run at once, and
//! rows together with rows alone. Where rows have lengths, they are also shorter than their requests and go on in later
//! ones.

mod element;
mod host;
mod recording;
mod rows;
mod run;
mod uneven;

use std::path::Path;

use ort::environment::Environment;
use serde::Serialize;

use crate::InputAxis;
use crate::onnx::{DataType, Dim, element_count, is_float, type_name};
use crate::report::{Report, Role, StartsAt};
use element::is_comparable;
use host::{Difference, Host, Random};
pub use recording::Recording;
use rows::{ROWS_TOGETHER, has_batch, varies};
use run::Graph;

/// Steps of a comparison, before strides. Not fewer than the fewest that shapes are computed for, so that a limit below those
/// shows here. A multiple of 3, 4 and 5, and none of 7, so that remainders differ from those of the chunks.
const STEPS: i64 = 60;
/// Lengths of the chunks, before strides.
const CHUNKS: [i64; 3] = [1, 2, 7];
/// Steps of a comparison of models that take one at a time.
const SINGLE_STEPS: i64 = 5;
/// Elements of an input or a state: memory that can't be had would end the process.
const MOST_ELEMENTS: i64 = 1 << 26;
/// Runs of one chunk length: shorter chunks of very many steps are left out.
const MOST_RUNS: i64 = 10_000;
/// Rows where the batch is open.
const ROWS: i64 = 2;
/// Rows where they have lengths. With two, an ascending or a descending sort would change nothing.
const ROWS_WITH_LENGTHS: i64 = 3;

/// How far answers may be from the original's, as a part of its largest answer.
const TOLERANCE: f64 = 1e-4;
/// The same where a scale of quantization depends on the length of a request.
const QUANTIZED_TOLERANCE: f64 = 0.1;
/// A difference that is no more than rounding, however small the answers are: a sum of numbers around 1 has it in its last
/// four bits.
const ROUNDING: f64 = 16.0 * f32::EPSILON as f64;
/// The same two limits where an output or a state is FLOAT16, which has 11 significant bits.
const HALF_TOLERANCE: f64 = 1e-2;
const HALF_ROUNDING: f64 = 2e-3;
/// How many times as far BFLOAT16 rounds, which has 8 significant bits.
const BRAIN_OVER_HALF: f64 = 8.0;
/// How far large integers may be from the original's: a number between two of them may be rounded to either. Small ones, such
/// as classes, must be equal.
const NEXT_INTEGER: f64 = 1.0;

/// Why two models can't be compared.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum VerifyError {
    #[error("the ONNX Runtime library {library} cannot be used: {why}")]
    Library { library: String, why: String },
    #[error("ONNX Runtime refuses the {model} model: {why}")]
    Load { model: &'static str, why: String },
    #[error("the {model} model fails: {why}")]
    Run { model: &'static str, why: String },
    #[error("the converted model isn't the original: {0}")]
    Differs(String),
    #[error("'{name}' is {elem}, and such tensors can't be compared")]
    Type { name: String, elem: &'static str },
    #[error(
        "'{name}' would have {elements} elements, and a comparison can hold {MOST_ELEMENTS}: give its open or too long \
         dimensions their real length in the model"
    )]
    TooLarge { name: String, elements: i64 },
    /// A value or a length is given for what isn't there.
    #[error("the comparison can't be made with these values: {0}")]
    Given(String),
    #[error("a recording can't be compared with: {0}")]
    Recording(String),
    /// An output that differs from row to row, but hasn't one element for each row along an axis.
    #[error("{0}")]
    NoRows(String),
    #[error("the comparison says nothing: on random data, the original's output '{0}' has no finite number")]
    Nothing(String),
}

/// How one comparison went.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// What was compared, as in `chunks of 2`.
    pub what: String,
    /// The output with the largest difference.
    pub output: String,
    /// The largest difference between two elements; 0 if they are equal bit by bit.
    pub largest: f64,
    /// The step of the largest difference.
    pub step: Option<i64>,
}

/// A model to run. One in memory has no weights in files of their own.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Source<'a> {
    File(&'a Path),
    Bytes(&'a [u8]),
}

/// The three models of a comparison.
#[expect(missing_docs, reason = "the names say it")]
pub struct Models<'a> {
    pub original: Source<'a>,
    pub converted: Source<'a>,
    /// The one that computes where states start.
    pub initial_states: Option<Source<'a>>,
}

/// What a comparison takes for inputs that can't be just anything.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Steps of a chunk beside 1, 2, 7 and all.
    pub chunk: Option<i64>,
    /// The lengths of open axes, by input.
    pub lengths: Vec<(InputAxis, i64)>,
    /// The value of each element of an input.
    pub values: Vec<(String, f64)>,
    /// Whole inputs.
    pub recordings: Vec<Recording>,
}

/// Loads ONNX Runtime.
pub fn environment(library: &Path) -> Result<Environment, VerifyError> {
    let failed = |why: String| VerifyError::Library { library: library.display().to_string(), why };
    let builder = ort::init_from(library).map_err(|error| failed(error.to_string()))?;
    let quiet = builder.with_name("stateful-convert").with_telemetry(false);
    let environment = quiet.build().map_err(|error| failed(error.to_string()))?;
    environment.set_log_level(ort::logging::LogLevel::Fatal);
    Ok(environment)
}

/// Compares the models, in chunks of 1, 2, 7 and all steps. An error says where they differ.
pub fn verify(
    environment: &Environment,
    models: &Models,
    report: &Report,
    given: &Given,
) -> Result<Vec<Compared>, VerifyError> {
    compare(environment, models, report, given).map_err(|error| with_states(error, report))
}

/// A model that fails with states that it had may have other ones.
fn with_states(error: VerifyError, report: &Report) -> VerifyError {
    let had = report.states.iter().filter(|state| state.starts_at == StartsAt::Unchanged);
    let pairs: Vec<String> = had.map(|state| state.pair.to_string()).collect();
    match error {
        VerifyError::Run { model, why } if !pairs.is_empty() => {
            VerifyError::Run { model, why: format!("{why}; are its states these: {}?", pairs.join(" ")) }
        }
        error => error,
    }
}

fn compare(
    environment: &Environment,
    models: &Models,
    report: &Report,
    given: &Given,
) -> Result<Vec<Compared>, VerifyError> {
    check_types(report)?;
    let mut original = Graph::open(environment, models.original, "original")?;
    let mut converted = Graph::open(environment, models.converted, "converted")?;
    let mut starts = models.initial_states.map(|source| Graph::open(environment, source, "initial")).transpose()?;
    check_given(report, given)?;
    let (mut steps, mut rows) = recording::lengths(&given.recordings, report)?;
    // One row can't show whether rows change each other.
    let two_rows =
        steps.filter(|_| rows == Some(1)).and_then(|steps| recording::as_two_rows(&given.recordings, report, steps));
    let of_two_rows = two_rows.map(|(recordings, half)| (Given { recordings, ..given.clone() }, half));
    let mut given = given;
    if let (Some((of_two_rows, half)), true) = (&of_two_rows, report.time.is_empty()) {
        (given, steps, rows) = (of_two_rows, Some(*half), Some(2));
    }
    let mut comparison =
        Comparison { report, original: &mut original, converted: &mut converted, starts: starts.as_mut(), given };
    let total = steps.unwrap_or_else(|| comparison.total(given.chunk));
    let rows = rows.unwrap_or(if comparison.has_lengths() { ROWS_WITH_LENGTHS } else { ROWS });
    comparison.check_sizes((total, rows))?;
    let inputs = comparison.random_inputs(total, rows);
    if report.time.is_empty() {
        let mut compared = vec![comparison.single_steps(steps.unwrap_or(SINGLE_STEPS), rows)?];
        // The backend runs rows that share a scale one by one.
        if !report.opened.is_empty() || has_batch(report) && !report.quantizes {
            compared.extend(comparison.rows(&inputs, 1)?);
        }
        return Ok(compared);
    }
    let whole = comparison.whole(&inputs, total)?;
    let mut compared = Vec::new();
    let mut chunks: Vec<i64> = CHUNKS.iter().map(|chunk| chunk * report.steps_multiple).chain(given.chunk).collect();
    chunks.retain(|&chunk| chunk < total && total / chunk <= MOST_RUNS);
    if chunks.is_empty() && total > report.steps_multiple {
        chunks.push((total / 2 / report.steps_multiple * report.steps_multiple).max(report.steps_multiple));
    }
    chunks.sort_unstable();
    chunks.dedup();
    chunks.push(total);
    for chunk in chunks {
        let what = if chunk == total { "all at once".to_owned() } else { format!("chunks of {chunk}") };
        let stepped = comparison.stepped(&inputs, total, chunk)?;
        compared.push(comparison.compare(what, &whole, &stepped)?);
    }
    let (mut inputs, mut total) = (inputs, total);
    if let Some((of_two_rows, half)) = &of_two_rows {
        comparison.given = of_two_rows;
        (inputs, total) = (comparison.random_inputs(*half, 2), *half);
    }
    compared.extend(comparison.rows(&inputs, total)?);
    compared.extend(comparison.rows_of_different_lengths(&inputs, total)?);
    Ok(compared)
}

/// Refuses tensors that can't be compared.
fn check_types(report: &Report) -> Result<(), VerifyError> {
    let inputs = report.inputs.iter().map(|input| (&input.name, input.elem));
    let outputs = report.outputs.iter().map(|output| (&output.name, output.elem));
    let states = report.states.iter().map(|state| (&state.pair.input, state.elem));
    match inputs.chain(outputs).chain(states).find(|(_, elem)| !is_comparable(*elem)) {
        Some((name, elem)) => Err(VerifyError::Type { name: name.clone(), elem: type_name(elem) }),
        None => Ok(()),
    }
}

/// Refuses values and lengths for what the model doesn't have.
fn check_given(report: &Report, given: &Given) -> Result<(), VerifyError> {
    let names: Vec<&str> = report.inputs.iter().map(|input| input.name.as_str()).collect();
    let input = |name: &str| {
        let found = report.inputs.iter().find(|input| input.name == name);
        let why = || format!("the model has no input '{name}' for requests (it has {})", names.join(", "));
        found.ok_or_else(|| VerifyError::Given(why()))
    };
    if let Some(chunk) = given.chunk.filter(|chunk| chunk % report.steps_multiple != 0) {
        let multiple = report.steps_multiple;
        return Err(VerifyError::Given(format!(
            "the model has a stride over time, so the steps of a request must be a multiple of {multiple}, and not {chunk}"
        )));
    }
    for (name, _) in &given.values {
        input(name)?;
        if given.recordings.iter().any(|recording| recording.input == *name) {
            return Err(VerifyError::Given(format!("input '{name}' has a value and a recording: give one of them")));
        }
    }
    for (InputAxis { input: name, axis }, length) in &given.lengths {
        let dims = &input(name)?.dims;
        if report.time.iter().any(|time| time.input == *name && time.axis == *axis) {
            let why = format!(
                "axis {axis} of input '{name}' has the steps, and these are compared in chunks of several lengths"
            );
            return Err(VerifyError::Given(why));
        }
        match dims.get(*axis) {
            Some(Dim::Known(known)) if known != length => {
                let why = format!("axis {axis} of input '{name}' is {known} in the model, and can't be {length}");
                return Err(VerifyError::Given(why));
            }
            Some(_) => {}
            None => {
                let why = format!("input '{name}' has no axis {axis}: it is {}", crate::onnx::bracketed(dims));
                return Err(VerifyError::Given(why));
            }
        }
    }
    Ok(())
}

struct Comparison<'a> {
    report: &'a Report,
    original: &'a mut Graph,
    converted: &'a mut Graph,
    starts: Option<&'a mut Graph>,
    given: &'a Given,
}

impl Comparison<'_> {
    /// Steps to compare: those that the original is fixed to, or enough for several chunks of each length.
    fn total(&self, chunk: Option<i64>) -> i64 {
        self.fixed_steps().unwrap_or_else(|| {
            STEPS.max(chunk.unwrap_or(0).saturating_mul(2)).saturating_mul(self.report.steps_multiple)
        })
    }

    /// The steps that the original is fixed to.
    fn fixed_steps(&self) -> Option<i64> {
        self.report.time.iter().find_map(|seed| {
            let input = self.report.inputs.iter().find(|input| input.name == seed.input)?;
            match input.dims.get(seed.axis)? {
                Dim::Known(length) => Some(*length),
                _ => None,
            }
        })
    }

    fn has_lengths(&self) -> bool {
        self.report.inputs.iter().any(|input| input.role == Role::Lengths)
    }

    fn output_names(&self) -> Vec<String> {
        self.report.outputs.iter().map(|output| output.name.clone()).collect()
    }

    fn random_inputs(&self, steps: i64, rows: i64) -> Vec<(String, Host)> {
        self.inputs(0, (steps, rows), &mut Random::new(7))
    }

    /// The shape of an input or a state for so many steps and rows.
    fn sizes(&self, name: &str, dims: &[Dim], (steps, rows): (i64, i64)) -> Vec<i64> {
        let size = |(axis, dim): (usize, &Dim)| {
            let is_here = |of: &InputAxis| of.input == name && of.axis == axis;
            let given = self.given.lengths.iter().find(|(of, _)| is_here(of)).map(|(_, length)| *length);
            match dim {
                _ if self.report.time.iter().any(is_here) => steps,
                Dim::Known(length) => *length,
                _ => given.unwrap_or(rows),
            }
        };
        dims.iter().enumerate().map(size).collect()
    }

    /// Refuses inputs and states that no memory holds.
    fn check_sizes(&self, sizes: (i64, i64)) -> Result<(), VerifyError> {
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
    fn inputs(&self, step: i64, (steps, rows): (i64, i64), random: &mut Random) -> Vec<(String, Host)> {
        let mut inputs = Vec::new();
        for input in &self.report.inputs {
            if let Some(recording) = self.given.recordings.iter().find(|recording| recording.input == input.name) {
                inputs.push((input.name.clone(), recording.host(self.report, step)));
                continue;
            }
            let dims = self.sizes(&input.name, &input.dims, (steps, rows));
            if let Some((_, value)) = self.given.values.iter().find(|(name, _)| *name == input.name) {
                inputs.push((input.name.clone(), Host::filled_with(input.elem, dims, *value)));
                continue;
            }
            if input.role == Role::Lengths {
                inputs.push((input.name.clone(), Host::lengths(input.elem, dims, steps, self.report.steps_multiple)));
                continue;
            }
            inputs.push((input.name.clone(), Host::random(input.elem, dims, random)));
        }
        inputs
    }

    /// What the original gives for all steps at once, from the start of the states that it has.
    fn whole(&mut self, inputs: &[(String, Host)], total: i64) -> Result<Vec<Host>, VerifyError> {
        let mut feeds = self.part(inputs, 0, total);
        let states = self.first_states(&feeds)?;
        feeds.extend(self.report.states.iter().map(|state| state.pair.input.clone()).zip(states));
        self.run_original(&feeds, false)
    }

    /// What the original gives: its outputs, and behind them its states if asked. It runs row by row if it has one row.
    fn run_original(&mut self, feeds: &[(String, Host)], with_states: bool) -> Result<Vec<Host>, VerifyError> {
        let mut names = self.output_names();
        let mut axes = self.axes_of_outputs();
        if with_states {
            names.extend(self.report.states.iter().map(|state| state.pair.output.clone()));
            axes.extend(self.axes_of_states());
        }
        if self.report.opened.is_empty() {
            return self.original.run(feeds, &names);
        }
        let mut rows: Vec<Vec<Host>> = vec![Vec::new(); names.len()];
        for row in 0..self.rows_of(feeds) {
            let one = |(name, value): &(String, Host)| {
                let axis = self.report.opened.iter().find(|opened| opened.input == *name).map(|opened| opened.axis);
                (name.clone(), axis.map_or_else(|| value.clone(), |axis| value.part(axis, row, 1)))
            };
            let feeds: Vec<(String, Host)> = feeds.iter().map(one).collect();
            for (output, value) in self.original.run(&feeds, &names)?.into_iter().enumerate() {
                rows[output].push(value);
            }
        }
        let joined = |(rows, axis): (&Vec<Host>, &Option<usize>)| {
            axis.map_or_else(|| rows[0].clone(), |axis| Host::joined(&rows.iter().collect::<Vec<_>>(), axis))
        };
        Ok(rows.iter().zip(&axes).map(joined).collect())
    }

    /// Compares models of single steps, which have their states outside, step by step.
    fn single_steps(&mut self, steps: i64, rows: i64) -> Result<Compared, VerifyError> {
        let mut names = self.output_names();
        names.extend(self.report.states.iter().map(|state| state.pair.output.clone()));
        let mut worst: Option<Compared> = None;
        let mut states: Option<(Vec<Host>, Vec<Host>)> = None;
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
            let ends = || self.report.states.iter().map(|state| state.pair.input.clone());
            let of_original: Vec<_> = inputs.iter().cloned().chain(ends().zip(before)).collect();
            let of_converted: Vec<_> = inputs.iter().cloned().chain(ends().zip(after)).collect();
            let mut expected = self.run_original(&of_original, true)?;
            let mut made = self.converted.run(&of_converted, &names)?;
            let count = self.report.outputs.len();
            states = Some((expected.split_off(count), made.split_off(count)));
            let compared = self.compare(format!("{steps} steps"), &expected, &[made])?;
            if worst.as_ref().is_none_or(|worst| compared.largest > worst.largest) {
                worst = Some(compared);
            }
        }
        Ok(worst.unwrap_or_else(|| Compared {
            what: "no steps".to_owned(),
            output: String::new(),
            largest: 0.0,
            step: None,
        }))
    }

    /// The inputs of some steps.
    fn part(&self, inputs: &[(String, Host)], start: i64, count: i64) -> Vec<(String, Host)> {
        let part = |(name, value): &(String, Host)| {
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

    /// The outputs of the converted model for each chunk.
    fn stepped(&mut self, inputs: &[(String, Host)], total: i64, chunk: i64) -> Result<Vec<Vec<Host>>, VerifyError> {
        let mut names = self.output_names();
        names.extend(self.report.states.iter().map(|state| state.pair.output.clone()));
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
            feeds.extend(self.report.states.iter().map(|state| state.pair.input.clone()).zip(current));
            let mut made = self.converted.run(&feeds, &names)?;
            states = Some(made.split_off(self.report.outputs.len()));
            outputs.push(made);
            start += count;
        }
        Ok(outputs)
    }

    /// Where the states start, for these inputs.
    fn first_states(&mut self, inputs: &[(String, Host)]) -> Result<Vec<Host>, VerifyError> {
        let rows = self.rows_of(inputs);
        let names: Vec<String> = self
            .report
            .states
            .iter()
            .filter(|state| state.starts_at == StartsAt::Model)
            .map(|state| state.pair.input.clone())
            .collect();
        let mut made = match &mut self.starts {
            Some(graph) => graph.run(inputs, &names)?.into_iter(),
            None => Vec::new().into_iter(),
        };
        let mut states = Vec::new();
        for state in &self.report.states {
            let size = |dim: &Dim| match dim {
                Dim::Known(length) => *length,
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
    fn limit(&self, elem: i32, scale: f64) -> f64 {
        let has = |of: DataType| elem == of as i32 || self.report.states.iter().any(|state| state.elem == of as i32);
        let (tolerance, rounding) = if has(DataType::Bfloat16) {
            (BRAIN_OVER_HALF * HALF_TOLERANCE, BRAIN_OVER_HALF * HALF_ROUNDING)
        } else if has(DataType::Float16) {
            (HALF_TOLERANCE, HALF_ROUNDING)
        } else {
            (TOLERANCE, ROUNDING)
        };
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

    fn compare(&self, what: String, whole: &[Host], stepped: &[Vec<Host>]) -> Result<Compared, VerifyError> {
        let mut worst = Compared { what, output: String::new(), largest: 0.0, step: None };
        for (index, output) in self.report.outputs.iter().enumerate() {
            let parts: Vec<&Host> = stepped.iter().map(|outputs| &outputs[index]).collect();
            let joined = match output.axis {
                Some(axis) => Host::joined(&parts, axis),
                None => (*parts[parts.len() - 1]).clone(),
            };
            let expected = &whole[index];
            if joined.dims != expected.dims {
                return Err(VerifyError::Differs(format!(
                    "in {}, output '{}' is {:?} and not {:?}",
                    worst.what, output.name, joined.dims, expected.dims
                )));
            }
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
}
