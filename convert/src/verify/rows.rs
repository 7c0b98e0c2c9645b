//! Rows: which axis of a tensor has them, and rows together against rows alone.

use super::host::Host;
use super::{Compared, Comparison, VerifyError};
use crate::batch::{is_batch_name, is_made_up};
use crate::onnx::Dim;
use crate::report::{Report, Role, StepInput};

pub(super) const ROWS_TOGETHER: &str = "rows together and alone";

impl Comparison<'_> {
    /// Compares rows together with rows alone. `None` if the batch isn't open.
    pub(super) fn rows(&mut self, inputs: &[(String, Host)], total: i64) -> Result<Option<Compared>, VerifyError> {
        let axes = self.axes_of_inputs();
        if axes.iter().all(Option::is_none) {
            return Ok(None);
        }
        let rows = self.rows_of(inputs);
        let together = self.stepped(inputs, total, total)?.remove(0);
        let mut alone: Vec<Vec<Host>> = vec![Vec::new(); together.len()];
        for row in 0..rows {
            let one = |((name, value), axis): (&(String, Host), &Option<usize>)| {
                (name.clone(), axis.map_or_else(|| value.clone(), |axis| value.part(axis, row, 1)))
            };
            let inputs: Vec<(String, Host)> = inputs.iter().zip(&axes).map(one).collect();
            for (output, value) in self.stepped(&inputs, total, total)?.remove(0).into_iter().enumerate() {
                alone[output].push(value);
            }
        }
        let mut joined = Vec::new();
        for (output, axis) in self.axes_of_outputs().into_iter().enumerate() {
            let (together, alone) = (&together[output], &alone[output]);
            let has_rows = |&axis: &usize| {
                together.dims.get(axis) == Some(&rows) && alone.iter().all(|row| row.dims.get(axis) == Some(&1))
            };
            joined.push(match axis.filter(has_rows) {
                Some(axis) => Host::joined(&alone.iter().collect::<Vec<_>>(), axis),
                None if alone.iter().all(|row| row == together) => together.clone(),
                None => return Err(no_rows(self.report, output, rows, [together, &alone[0]])),
            });
        }
        // The steps are along one axis here, too: one chunk of all of them.
        self.compare(ROWS_TOGETHER.to_owned(), &joined, &[together]).map(Some)
    }

    /// The number of rows of these inputs.
    pub(super) fn rows_of(&self, inputs: &[(String, Host)]) -> i64 {
        let length = |((_, value), axis): (&(String, Host), Option<usize>)| value.dims.get(axis?).copied();
        inputs.iter().zip(self.axes_of_inputs()).find_map(length).unwrap_or(1)
    }

    pub(super) fn axes_of_inputs(&self) -> Vec<Option<usize>> {
        self.report.inputs.iter().map(|input| row_axis_of(self.report, input)).collect()
    }

    pub(super) fn axes_of_outputs(&self) -> Vec<Option<usize>> {
        self.report.outputs.iter().map(|output| row_axis(self.report, &output.dims, output.axis)).collect()
    }

    pub(super) fn axes_of_states(&self) -> Vec<Option<usize>> {
        self.report.states.iter().map(|state| row_axis(self.report, &state.dims, None)).collect()
    }
}

/// Whether all that a model of single steps leaves open is one dimension, which its states have.
pub(super) fn has_batch(report: &Report) -> bool {
    let tensors = report.inputs.iter().map(|input| &input.dims).chain(report.outputs.iter().map(|output| &output.dims));
    let open = |dims: &Vec<Dim>| dims.iter().filter(|dim| !matches!(dim, Dim::Known(_))).cloned().collect::<Vec<_>>();
    let of_states: Vec<Vec<Dim>> = report.states.iter().map(|state| open(&state.dims)).collect();
    let Some(batch) = of_states.first().filter(|open| open.len() == 1) else { return false };
    of_states.iter().all(|open| open == batch) && tensors.map(open).all(|open| open.is_empty() || open == *batch)
}

/// The axis of an input's rows.
pub(super) fn row_axis_of(report: &Report, input: &StepInput) -> Option<usize> {
    row_axis(report, &input.dims, if let Role::Steps { axis } = input.role { Some(axis) } else { None })
}

/// The axis of the rows: the one that has the batch's name, else the first open one that isn't time.
fn row_axis(report: &Report, dims: &[Dim], time: Option<usize>) -> Option<usize> {
    let is_open = |(axis, dim): &(usize, &Dim)| Some(*axis) != time && !matches!(dim, Dim::Known(_));
    let mut open = dims.iter().enumerate().filter(is_open).map(|(axis, _)| axis);
    let batch = batch_dim(report);
    open.clone().find(|&axis| Some(&dims[axis]) == batch).or_else(|| open.next())
}

/// Whether the backend takes a state's dimension for a length that varies, and starts it without elements: it has a name
/// that no input of requests has.
pub(super) fn varies(report: &Report, dim: &Dim) -> bool {
    let Dim::Symbol(name) = dim else { return false };
    let is_of_requests = || report.inputs.iter().any(|input| input.dims.contains(dim));
    !is_batch_name(name) && !is_made_up(name) && !is_of_requests()
}

/// The name of the batch: that of the open dimension beside the steps.
fn batch_dim(report: &Report) -> Option<&Dim> {
    report.inputs.iter().find_map(|input| {
        let Role::Steps { axis: time } = input.role else { return None };
        let is_batch = |(axis, dim): &(usize, &Dim)| *axis != time && matches!(dim, Dim::Symbol(_));
        input.dims.iter().enumerate().find(is_batch).map(|(_, dim)| dim)
    })
}

/// The error of an output that isn't the same for all rows and has no axis for them. `answers` are those for all rows
/// together and for one of them.
fn no_rows(report: &Report, output: usize, rows: i64, answers: [&Host; 2]) -> VerifyError {
    let help = match batch_dim(report) {
        _ if !report.opened.is_empty() => "leave the batch at 1".to_owned(),
        Some(Dim::Symbol(name)) => format!(
            "set the batch to 1, as \"python -m onnxruntime.tools.make_dynamic_shape_fixed --dim_param {} --dim_value 1 \
             model.onnx fixed.onnx\" does, or export the output with an axis for the batch",
            report.batch_was.as_ref().unwrap_or(name)
        ),
        _ => "export the model with a batch of 1, or the output with an axis for the batch".to_owned(),
    };
    let [together, alone] = answers.map(|answer| &answer.dims);
    VerifyError::NoRows(format!(
        "output '{}' can't be divided into rows: with {rows} rows it is {together:?}, with one {alone:?}; sequences that \
         share a run would get each other's answers: {help}",
        report.outputs[output].name
    ))
}
