//! What a comparison is given: recordings, values and lengths in place of random data. And which axis of a tensor has
//! rows.

use std::time::Duration;

use super::models::{Host, Result, VerifyError, is_comparable};
use crate::batch::{is_batch_name, is_made_up};
use crate::graph::InputAxis;
use crate::onnx::{Dim, bracketed, type_name};
use crate::report::{Report, Role, StepInput};

// The limit of a run on random data, because a loop may never end on such data. Runs of usual models take milliseconds.
const MOST_TIME: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct Given {
    /// Steps of a chunk beside 1, 2, 7 and all.
    pub chunk: Option<i64>,
    pub lengths: Vec<(InputAxis, i64)>,
    pub values: Vec<(String, f64)>,
    pub recordings: Vec<Recording>,
    /// How long a run may take. With recordings, there is no limit.
    pub run_limit: Option<Duration>,
}

impl Given {
    /// How long a run may take; `None` with recordings, because whoever gives one knows its length.
    pub fn limit(&self) -> Option<Duration> {
        self.run_limit.filter(|_| self.recordings.is_empty())
    }
}

impl Default for Given {
    fn default() -> Self {
        let (lengths, values, recordings) = Default::default();
        Self { chunk: None, lengths, values, recordings, run_limit: Some(MOST_TIME) }
    }
}

/// An array for an input, with all steps. For a model of single steps, which has no axis for them, they come first.
#[derive(Clone, Debug)]
pub struct Recording {
    pub input: String,
    pub values: Host,
}

impl Recording {
    /// What one run takes: all, or a step of a model of single steps.
    pub fn host(&self, report: &Report, step: i64) -> Host {
        if !report.time.is_empty() {
            return self.values.clone();
        }
        let one = self.values.part(0, step, 1);
        Host { dims: one.dims[1..].to_vec(), ..one }
    }

    fn steps(&self, report: &Report, input: &StepInput) -> Option<i64> {
        self.values.dims.get(axis_of_steps(report, input)?).copied()
    }

    fn axis_of_rows(report: &Report, input: &StepInput) -> Option<usize> {
        Some(row_axis_of(report, input)? + usize::from(report.time.is_empty()))
    }

    fn rows(&self, report: &Report, input: &StepInput) -> Option<i64> {
        self.values.dims.get(Self::axis_of_rows(report, input)?).copied()
    }

    fn check(&self, report: &Report, input: &StepInput) -> Result<()> {
        let (name, Host { elem, dims, .. }) = (&self.input, &self.values);
        if *elem != input.elem {
            let (given, wanted) = (type_name(*elem), type_name(input.elem));
            return Err(VerifyError::Recording(format!("array '{name}' is {given}, and input '{name}' {wanted}")));
        }
        let in_front = report.time.is_empty().then(|| Dim::Symbol("steps".to_owned()));
        let wanted: Vec<Dim> = in_front.into_iter().chain(input.dims.iter().cloned()).collect();
        let fits = |(&given, wanted): (&i64, &Dim)| given > 0 && !matches!(wanted, Dim::Known(dim) if *dim != given);
        if dims.len() != wanted.len() || !dims.iter().zip(&wanted).all(fits) {
            let wanted = bracketed(&wanted);
            return Err(VerifyError::Recording(format!("array '{name}' is {dims:?}, and {wanted} is expected")));
        }
        if let Some(number) = self.values.numbers().into_iter().find(|number| !number.is_finite()) {
            let why = format!("array '{name}' has {number}, and nothing can be compared with that");
            return Err(VerifyError::Recording(why));
        }
        Ok(())
    }
}

fn axis_of_steps(report: &Report, input: &StepInput) -> Option<usize> {
    match input.role {
        _ if report.time.is_empty() => Some(0),
        Role::Steps { axis } => Some(axis),
        Role::Lengths | Role::Other => None,
    }
}

/// Splits recordings of one row into two rows, each with half of the steps. Answers with their number of steps. `None`
/// if there are too few steps, or no recording has both a row and steps.
pub fn as_two_rows(recordings: &[Recording], report: &Report, steps: i64) -> Option<(Vec<Recording>, i64)> {
    // Both halves must be whole strides.
    let half = steps / 2 / report.steps_multiple * report.steps_multiple;
    let mut is_split = false;
    let mut split = |recording: &Recording| {
        let input = report.inputs.iter().find(|input| input.name == recording.input)?;
        let (axis, all) = (axis_of_steps(report, input), &recording.values);
        let part = |start: i64| axis.map_or_else(|| all.clone(), |axis| all.part(axis, start, half));
        let values = match Recording::axis_of_rows(report, input) {
            Some(rows) => {
                is_split |= axis.is_some();
                Host::joined(&[&part(0), &part(half)], rows)
            }
            None => part(0),
        };
        Some(Recording { input: recording.input.clone(), values })
    };
    let split: Option<Vec<Recording>> = if half > 0 { recordings.iter().map(&mut split).collect() } else { None };
    Some((split.filter(|_| is_split)?, half))
}

pub fn lengths(recordings: &[Recording], report: &Report) -> Result<(Option<i64>, Option<i64>)> {
    let (mut steps, mut rows) = (None, None);
    for recording in recordings {
        let name = &recording.input;
        let input = input_of(report, name).map_err(VerifyError::Recording)?;
        recording.check(report, input)?;
        // All recordings are cut into the same chunks.
        for (of_all, own, what) in
            [(&mut steps, recording.steps(report, input), "steps"), (&mut rows, recording.rows(report, input), "rows")]
        {
            let Some(own) = own else { continue };
            let others = *of_all.get_or_insert(own);
            if own != others {
                let why = format!("array '{name}' has {own} {what}, and another one {others}");
                return Err(VerifyError::Recording(why));
            }
        }
    }
    let multiple = report.steps_multiple;
    if let Some(steps) = steps.filter(|steps| steps % multiple != 0) {
        return Err(VerifyError::Recording(format!("{steps} steps are no multiple of {multiple}")));
    }
    Ok((steps, rows))
}

pub fn check_types(report: &Report) -> Result<()> {
    let inputs = report.inputs.iter().map(|input| (&input.name, input.elem));
    let outputs = report.outputs.iter().map(|output| (&output.name, output.elem));
    let states = report.states.iter().map(|state| (&state.pair.input, state.elem));
    let found = inputs.chain(outputs).chain(states).find(|(_, elem)| !is_comparable(*elem));
    found.map_or(Ok(()), |(name, elem)| Err(VerifyError::Type { name: name.clone(), elem: type_name(elem) }))
}

fn input_of<'a>(report: &'a Report, name: &str) -> Result<&'a StepInput, String> {
    report.inputs.iter().find(|input| input.name == name).ok_or_else(|| {
        let names: Vec<&str> = report.inputs.iter().map(|input| input.name.as_str()).collect();
        format!("the model has no input '{name}' for requests (it has {})", names.join(", "))
    })
}

pub fn check_given(report: &Report, given: &Given) -> Result<()> {
    let input = |name: &str| input_of(report, name).map_err(VerifyError::Given);
    let multiple = report.steps_multiple;
    if let Some(chunk) = given.chunk.filter(|chunk| chunk % multiple != 0) {
        let why = "the model has a stride over time, so the steps of a request must be a multiple of";
        return Err(VerifyError::Given(format!("{why} {multiple}, and not {chunk}")));
    }
    for (name, _) in &given.values {
        input(name)?;
        if given.recordings.iter().any(|recording| recording.input == *name) {
            return Err(VerifyError::Given(format!("input '{name}' has a value and a recording: give one of them")));
        }
    }
    for (InputAxis { input: name, axis }, length) in &given.lengths {
        let dims = &input(name)?.dims;
        if report.time.iter().any(|time| time.is(name, *axis)) {
            let why = "has the steps, and these are compared in chunks of several lengths";
            return Err(VerifyError::Given(format!("axis {axis} of input '{name}' {why}")));
        }
        match dims.get(*axis) {
            Some(Dim::Known(known)) if known != length => {
                let why = format!("axis {axis} of input '{name}' is {known} in the model, and can't be {length}");
                return Err(VerifyError::Given(why));
            }
            Some(_) => {}
            None => {
                let why = format!("input '{name}' has no axis {axis}: it is {}", bracketed(dims));
                return Err(VerifyError::Given(why));
            }
        }
    }
    Ok(())
}

/// Whether a model of single steps has one open dimension, which its states have as well.
pub fn has_batch(report: &Report) -> bool {
    let tensors = report.inputs.iter().map(|input| &input.dims).chain(report.outputs.iter().map(|output| &output.dims));
    let open = |dims: &Vec<Dim>| dims.iter().filter(|dim| !dim.is_known()).cloned().collect::<Vec<_>>();
    let of_states: Vec<Vec<Dim>> = report.states.iter().map(|state| open(&state.dims)).collect();
    let Some(batch) = of_states.first().filter(|open| open.len() == 1) else { return false };
    of_states.iter().all(|open| open == batch) && tensors.map(open).all(|open| open.is_empty() || open == *batch)
}

pub fn row_axis_of(report: &Report, input: &StepInput) -> Option<usize> {
    row_axis(report, &input.dims, if let Role::Steps { axis } = input.role { Some(axis) } else { None })
}

/// The axis of the rows: the one that has the batch's name, else the first open one that isn't time.
pub fn row_axis(report: &Report, dims: &[Dim], time: Option<usize>) -> Option<usize> {
    let is_open = |(axis, dim): &(usize, &Dim)| Some(*axis) != time && !dim.is_known();
    let mut open = dims.iter().enumerate().filter(is_open).map(|(axis, _)| axis);
    let batch = batch_dim(report);
    open.clone().find(|&axis| Some(&dims[axis]) == batch).or_else(|| open.next())
}

/// Whether the backend lets a state's dimension vary, and starts it without elements, because no input of requests has
/// a dimension of this name.
pub fn varies(report: &Report, dim: &Dim) -> bool {
    let Dim::Symbol(name) = dim else { return false };
    let is_of_requests = || report.inputs.iter().any(|input| input.dims.contains(dim));
    !is_batch_name(name) && !is_made_up(name) && !is_of_requests()
}

/// The name of the batch: that of the open dimension beside the steps.
pub fn batch_dim(report: &Report) -> Option<&Dim> {
    report.inputs.iter().find_map(|input| {
        let Role::Steps { axis: time } = input.role else { return None };
        let is_batch = |(axis, dim): &(usize, &Dim)| *axis != time && matches!(dim, Dim::Symbol(_));
        input.dims.iter().enumerate().find(is_batch).map(|(_, dim)| dim)
    })
}
