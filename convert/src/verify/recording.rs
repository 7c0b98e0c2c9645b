//! Recordings that a comparison takes in place of random data.

use super::VerifyError;
use super::host::Host;
use super::rows::row_axis_of;
use crate::onnx::{Dim, bracketed, type_name};
use crate::report::{Report, Role, StepInput};

/// An array for an input, with all steps. Of a model of single steps, which has no axis for them, they are in front.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Recording {
    pub input: String,
    pub elem: i32,
    pub dims: Vec<i64>,
    pub bytes: Vec<u8>,
}

impl Recording {
    /// What one run takes: all, or a step of a model of single steps.
    pub(super) fn host(&self, report: &Report, step: i64) -> Host {
        let all = Host { elem: self.elem, dims: self.dims.clone(), bytes: self.bytes.clone() };
        if !report.time.is_empty() {
            return all;
        }
        let one = all.part(0, step, 1);
        Host { dims: one.dims[1..].to_vec(), ..one }
    }

    fn steps(&self, report: &Report, input: &StepInput) -> Option<i64> {
        match input.role {
            _ if report.time.is_empty() => self.dims.first().copied(),
            Role::Steps { axis } => self.dims.get(axis).copied(),
            Role::Lengths | Role::Other => None,
        }
    }

    /// The open dimension that isn't time.
    fn axis_of_rows(&self, report: &Report, input: &StepInput) -> Option<usize> {
        Some(row_axis_of(report, input)? + usize::from(report.time.is_empty()))
    }

    fn rows(&self, report: &Report, input: &StepInput) -> Option<i64> {
        self.dims.get(self.axis_of_rows(report, input)?).copied()
    }

    fn check(&self, report: &Report, input: &StepInput) -> Result<(), VerifyError> {
        let name = &self.input;
        if self.elem != input.elem {
            let (given, wanted) = (type_name(self.elem), type_name(input.elem));
            return Err(VerifyError::Recording(format!("array '{name}' is {given}, and input '{name}' {wanted}")));
        }
        let in_front = report.time.is_empty().then(|| Dim::Symbol("steps".to_owned()));
        let wanted: Vec<Dim> = in_front.into_iter().chain(input.dims.iter().cloned()).collect();
        let fits = |(&given, wanted): (&i64, &Dim)| given > 0 && !matches!(wanted, Dim::Known(dim) if *dim != given);
        if self.dims.len() != wanted.len() || !self.dims.iter().zip(&wanted).all(fits) {
            let wanted = bracketed(&wanted);
            return Err(VerifyError::Recording(format!("array '{name}' is {:?}, and {wanted} is expected", self.dims)));
        }
        let all = Host { elem: self.elem, dims: self.dims.clone(), bytes: self.bytes.clone() };
        if let Some(number) = all.numbers().into_iter().find(|number| !number.is_finite()) {
            let why = format!("array '{name}' has {number}, and nothing can be compared with that");
            return Err(VerifyError::Recording(why));
        }
        Ok(())
    }
}

/// Recordings of one row as two rows: its first half of the steps, and its second. Answers how many steps that is. `None`
/// if there are too few steps, or no recording has both a row and steps.
pub fn as_two_rows(recordings: &[Recording], report: &Report, steps: i64) -> Option<(Vec<Recording>, i64)> {
    let half = steps / 2 / report.steps_multiple * report.steps_multiple;
    let mut is_split = false;
    let mut split = |recording: &Recording| {
        let input = report.inputs.iter().find(|input| input.name == recording.input)?;
        let axis_of_steps = match input.role {
            _ if report.time.is_empty() => Some(0),
            Role::Steps { axis } => Some(axis),
            Role::Lengths | Role::Other => None,
        };
        let all = Host { elem: recording.elem, dims: recording.dims.clone(), bytes: recording.bytes.clone() };
        let part = |start: i64| axis_of_steps.map_or_else(|| all.clone(), |axis| all.part(axis, start, half));
        let host = match recording.axis_of_rows(report, input) {
            Some(rows) => {
                is_split |= axis_of_steps.is_some();
                Host::joined(&[&part(0), &part(half)], rows)
            }
            None => part(0),
        };
        Some(Recording { input: recording.input.clone(), elem: host.elem, dims: host.dims, bytes: host.bytes })
    };
    let split: Option<Vec<Recording>> = if half > 0 { recordings.iter().map(&mut split).collect() } else { None };
    Some((split.filter(|_| is_split)?, half))
}

/// The numbers of steps and rows of the recordings.
pub fn lengths(recordings: &[Recording], report: &Report) -> Result<(Option<i64>, Option<i64>), VerifyError> {
    let (mut steps, mut rows) = (None, None);
    for recording in recordings {
        let name = &recording.input;
        let Some(input) = report.inputs.iter().find(|input| input.name == *name) else {
            let names: Vec<&str> = report.inputs.iter().map(|input| input.name.as_str()).collect();
            let why = format!("the model has no input '{name}' for requests (it has {})", names.join(", "));
            return Err(VerifyError::Recording(why));
        };
        recording.check(report, input)?;
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
