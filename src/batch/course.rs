//! The steps of a request of a model with `input_windows` or `repeat`: how many there are, what each reads, and the
//! outputs so far.
//!
//! With windows, a request's elements follow those that the sequence has left over. With `repeat`, a step reads what
//! the one before it gave. [`super::stepping`] moves a row from one step to the next.

use std::ops::Range;
use std::sync::Arc;

use rows::tensor::{DataType, RowAt, StorageType, WindowLayout};
use rows::{copies, zeros};

use super::outputs::Gathering;
use crate::binding::{Binding, BoundInput, BoundWindow, RequestInput, ShapeForm};
use crate::error::{InputError, RequestError};
use crate::store::Saved;
use crate::triton::{HeldElements, HeldInput, Request, Times};

const ALONE: RowAt = RowAt { position: 0, rows: 1 };

#[derive(Default)]
pub struct Course {
    /// All of them; with `repeat`, the most that there may be.
    pub steps: usize,
    pub made: usize,
    /// Whether an output has ended them; `None` without `repeat`.
    pub is_stopped: Option<bool>,
    pub is_over: bool,
    /// Elements of the first input that is cut, which the sequence keeps for its next request, or which END drops.
    pub left: usize,
    /// Elements of the last window that came from the client, if zeros fill it up.
    pub real: Option<usize>,
    /// Empty if the only step reads what the request brings.
    cuts: Vec<Cut>,
    /// Outputs of the last step that the next one reads, each with the position of its input.
    pub(super) repeated: Vec<(usize, HeldInput)>,
    pub(super) outputs: Gathering,
    pub began: Option<Times>,
    /// The state of the sequence before the request; `None` if there was none, or it cannot change before the last
    /// step.
    pub before: Option<Saved>,
}

struct Cut {
    /// Of the input.
    position: usize,
    data_type: DataType,
    /// Of a request.
    dims: Vec<i64>,
    /// The windows' dimension of a request.
    axis: usize,
    layout: WindowLayout,
    bytes: Vec<u8>,
    division: Division,
}

#[derive(Clone, Copy)]
struct Division {
    /// Elements that were left over before the request.
    kept: usize,
    /// Elements that the request brings.
    brought: usize,
    /// Elements of the first window, and of later ones.
    first: usize,
    length: usize,
    steps: usize,
    /// Elements after the whole windows.
    left: usize,
}

impl Division {
    const fn new(kept: usize, brought: usize, first: usize, length: usize) -> Self {
        let all = kept + brought;
        let steps = if all < first { 0 } else { 1 + (all - first) / length };
        let used = if steps == 0 { 0 } else { first + (steps - 1) * length };
        Self { kept, brought, first, length, steps, left: all - used }
    }

    const fn rest(self) -> Range<usize> {
        let all = self.kept + self.brought;
        all - self.left..all
    }

    const fn next(self) -> usize {
        if self.steps == 0 { self.first } else { self.length }
    }
}

impl Course {
    /// Divides the elements that the sequence has left over (`kept`) and then those of the request into windows. Also
    /// returns what is left over then, by input that is cut. `ends`: nothing follows the request. `is_first`: no window
    /// has left a context.
    pub(super) fn new(
        binding: &Binding,
        request: &Request,
        kept: &[Vec<u8>],
        ends: bool,
        is_first: bool,
    ) -> Result<(Self, Vec<Vec<u8>>), RequestError> {
        let divisions = divisions(binding, request, kept, is_first)?;
        let of_first = divisions[0];
        let fills_up = of_first.left > 0 && ends && binding.windows().all(|(_, _, window)| window.pads);
        let steps = of_first.steps + usize::from(fills_up);
        if steps > binding.most_steps.steps {
            let (brought, most) = (of_first.brought, binding.most_steps.steps);
            let name = binding.windows().next().map_or(String::new(), |(input, ..)| input.name.clone());
            return Err(InputError::TooManySteps { name, brought, steps, most }.into());
        }
        let mut course = Self { steps, ..Self::default() };
        // Nothing has to be put together then, so the step reads the buffers of the request.
        let reads_request = steps == 1 && !fills_up && divisions.iter().all(|of| of.kept == 0 && of.left == 0);
        if reads_request {
            return Ok((course, vec![Vec::new(); divisions.len()]));
        }
        let mut left = Vec::new();
        for (number, (input, of)) in binding.windows().zip(&divisions).enumerate() {
            let kept = kept.get(number).map_or(&[][..], Vec::as_slice);
            let cut = Cut::new(request, input, of, kept, fills_up)?;
            left.push(if fills_up { Vec::new() } else { cut.elements(of.rest())? });
            course.cuts.push(cut);
        }
        if fills_up {
            course.real = Some(of_first.left);
        } else {
            course.left = of_first.left;
        }
        Ok((course, left))
    }

    /// Whether the elements that the sequence has left over (`kept`) and those of the request complete no window.
    /// Counts with windows of later steps; the first one is never shorter.
    pub(super) fn has_no_window(binding: &Binding, request: &Request, kept: &[Vec<u8>]) -> bool {
        divisions(binding, request, kept, false).is_ok_and(|divisions| divisions.iter().all(|of| of.steps == 0))
    }

    /// The steps of a request of a model with `repeat`.
    pub(super) fn repeating(steps: usize) -> Self {
        Self { steps, is_stopped: Some(false), ..Self::default() }
    }

    /// What the next step reads instead of the request's own inputs, each with its position.
    pub(super) fn inputs(&mut self) -> impl Iterator<Item = Result<(usize, HeldInput), RequestError>> {
        let Self { cuts, made, repeated, .. } = self;
        let windows = cuts.iter().map(|cut| Ok((cut.position, cut.window(*made)?)));
        repeated.drain(..).map(Ok).chain(windows)
    }
}

impl Cut {
    /// Appends the request's elements to those that were left over. `fills_up`: zeros follow, up to one more window.
    fn new(
        request: &Request,
        (input, bound, window): (&BoundInput, &RequestInput, BoundWindow),
        of: &Division,
        kept: &[u8],
        fills_up: bool,
    ) -> Result<Self, RequestError> {
        let missing = || InputError::MissingWindows(input.name.clone());
        let sent = request.input(bound.position).ok_or_else(missing)?;
        let all = of.kept + of.brought;
        let with_zeros = all + if fills_up { of.next() - of.left } else { 0 };
        let mut in_model = input.dims.clone();
        input.batch_axis.iter().for_each(|&axis| in_model[axis] = 1);
        in_model[window.axis] = with_zeros as i64;
        let layout = WindowLayout::new(input.data_type, &in_model, input.batch_axis, window.axis).ok_or_else(|| {
            InputError::Shape { name: input.name.clone(), came: sent.dims().to_vec(), wanted: in_model.clone() }
        })?;
        // The zeros stay at the end of a window that is filled up.
        let mut bytes = zeros(layout.window_bytes(with_zeros))?;
        copies::put(&layout.window(ALONE, 0..of.kept), StorageType::Exact, kept, &mut bytes);
        copies::put_pieces(&layout.window(ALONE, of.kept..all), sent.pieces(), &mut bytes);
        let axis = window.axis + usize::from(bound.form != ShapeForm::Plain);
        let (dims, position, data_type) = (sent.dims().to_vec(), bound.position, input.data_type);
        Ok(Self { position, data_type, dims, axis, layout, bytes, division: *of })
    }

    fn elements(&self, range: Range<usize>) -> Result<Vec<u8>, RequestError> {
        let part = self.layout.window(ALONE, range);
        let mut elements = zeros(part.bytes())?;
        copies::take(&part, StorageType::Exact, &self.bytes, &mut elements);
        Ok(elements)
    }

    /// What the request would carry for this step.
    fn window(&self, step: usize) -> Result<HeldInput, RequestError> {
        let Division { first, length, .. } = self.division;
        let (from, length) = match step.checked_sub(1) {
            None => (0, first),
            Some(before) => (first + before * length, length),
        };
        let mut dims = self.dims.clone();
        dims[self.axis] = length as i64;
        let elements = HeldElements::Bytes(Arc::new(self.elements(from..from + length)?));
        Ok(HeldInput { data_type: self.data_type, dims: dims.into(), elements, charge: None })
    }
}

/// How the elements of each input that is cut divide. All make the same steps.
fn divisions(
    binding: &Binding,
    request: &Request,
    kept: &[Vec<u8>],
    is_first: bool,
) -> Result<Vec<Division>, InputError> {
    let division = |(number, (input, bound, window)): (usize, (&BoundInput, &RequestInput, BoundWindow))| {
        let sent = request.input(bound.position).ok_or_else(|| InputError::MissingWindows(input.name.clone()))?;
        let kept = kept.get(number).map_or(0, Vec::len) / window.element_bytes.max(1);
        let brought = bound.own_length(sent.dims(), window.axis);
        Ok(Division::new(kept, brought, window.taken(bound.context, is_first), window.length))
    };
    let divisions = binding.windows().enumerate().map(division).collect::<Result<Vec<_>, InputError>>()?;
    let one = divisions[0];
    // In proportion, because the windows of the inputs may have different lengths.
    let is_alike = |of: &Division| of.steps == one.steps && of.left * one.length == one.left * of.length;
    if divisions.iter().all(is_alike) {
        return Ok(divisions);
    }
    let brought = binding.windows().zip(&divisions).map(|((input, _, window), of)| {
        let kept = if of.kept > 0 { format!(" and {} left over", of.kept) } else { String::new() };
        format!("{} for '{}'{kept} (windows of {})", of.brought, input.name, window.length)
    });
    Err(InputError::UnequalWindows { brought: brought.collect::<Vec<_>>().join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_divide_into_windows_behind_what_was_left_over() {
        let division = |kept, brought, first| {
            let of = Division::new(kept, brought, first, 5);
            (of.steps, of.left, of.rest())
        };
        assert_eq!(division(0, 0, 5), (0, 0, 0..0));
        assert_eq!(division(4, 0, 5), (0, 4, 0..4));
        assert_eq!(division(4, 1, 5), (1, 0, 5..5));
        assert_eq!(division(2, 17, 5), (3, 4, 15..19));
        // The first window has three elements more.
        assert_eq!(division(0, 7, 8), (0, 7, 0..7));
        assert_eq!(division(1, 13, 8), (2, 1, 13..14));
    }
}
