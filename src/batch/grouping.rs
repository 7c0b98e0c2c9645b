//! Which rows can run together.

use super::Row;
use super::state_row::StateRow;
use crate::binding::{Binding, ShapeForm, StatePlace};

/// What two rows must have in common. Made once per instance; a model in which nothing varies asks for nothing.
#[derive(Default)]
pub struct Grouping {
    /// Inputs that may be left out.
    optional: Vec<usize>,
    /// Inputs whose shape varies, and the dimension of a request in which rows may differ, as they are padded.
    shapes: Vec<(usize, Option<usize>)>,
    /// Inputs that the whole batch shares.
    shared: Vec<usize>,
    /// States whose size varies.
    states: Vec<usize>,
}

impl Grouping {
    /// What the rows of this model must have in common.
    pub fn new(binding: &Binding) -> Self {
        let mut grouping = Self::default();
        for (input, request) in binding.request_inputs() {
            if request.optional {
                grouping.optional.push(request.position);
            }
            if request.form == ShapeForm::Unbatched {
                grouping.shared.push(request.position);
            }
            let varies = |(axis, &dim): (usize, &i64)| dim < 0 && input.batch_axis != Some(axis);
            if input.dims.iter().enumerate().any(varies) {
                let in_front = if request.form == ShapeForm::Plain { 0 } else { 1 };
                grouping.shapes.push((
                    request.position,
                    request.ragged_axis.filter(|_| request.is_padded).map(|axis| axis + in_front),
                ));
            }
        }
        let beside = |number: &usize| matches!(binding.states[*number].place, StatePlace::Beside(_));
        let varies = |number: &usize| binding.states[*number].dims.contains(&-1);
        grouping.states = (0..binding.states.len()).filter(beside).filter(varies).collect();
        grouping
    }

    /// Whether all rows of the model can run together.
    pub fn is_any(&self) -> bool {
        self.optional.is_empty() && self.shapes.is_empty() && self.shared.is_empty() && self.states.is_empty()
    }

    /// Whether two rows can run together.
    pub fn together(&self, binding: &Binding, a: &Row, b: &Row) -> bool {
        let input = |row: &Row, position: usize| row.request.input(position).is_some();
        self.optional.iter().all(|&position| input(a, position) == input(b, position))
            && self.shapes.iter().all(|&(position, padded)| same_shape(a, b, position, padded))
            && self.shared.iter().all(|&position| same_value(a, b, position))
            && self
                .states
                .iter()
                .all(|&number| StateRow::of(binding, number, a).dims == StateRow::of(binding, number, b).dims)
    }
}

fn same_shape(a: &Row, b: &Row, position: usize, padded: Option<usize>) -> bool {
    let (Some(a), Some(b)) = (a.request.input(position), b.request.input(position)) else { return true };
    let (a, b) = (a.dims(), b.dims());
    // A row without elements has nothing to be filled up from: what a model makes of it is its own affair.
    let differ = |axis: usize| a[axis] != b[axis] && (padded != Some(axis) || a[axis] == 0 || b[axis] == 0);
    a.len() == b.len() && !(0..a.len()).any(differ)
}

fn same_value(a: &Row, b: &Row, position: usize) -> bool {
    let (Some(a), Some(b)) = (a.request.input(position), b.request.input(position)) else { return true };
    // Decoding has copied both, so that the value that runs is the one that is compared here.
    a.is_same(b)
}
