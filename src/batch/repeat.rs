//! `repeat`: which values a step of a request gives to the next one, and whether it was the last.

use std::sync::Arc;

use rows::{reserve, strings};

use super::Row;
use super::respond::Answers;
use crate::binding::{Binding, BoundFeed, BoundRepeat, BoundStop, ShapeForm, Source};
use crate::error::{InputError, RequestError, RunError};
use crate::triton::{HeldElements, HeldInput, ParameterValue, Response, RowOutput, echo};

/// The request parameter that bounds the steps.
const MAX_STEPS: &str = "max_steps";

impl Row {
    /// The most steps that its request may make.
    pub(super) fn most_steps(&self, binding: &Binding, repeat: &BoundRepeat) -> Result<usize, InputError> {
        let most = binding.most_steps.steps;
        let Some((_, value)) = self.request.parameters(&[MAX_STEPS]).next() else {
            return if repeat.until.is_empty() { Err(InputError::NoMaxSteps) } else { Ok(most) };
        };
        let (number, value) = match value {
            ParameterValue::Int(number) => (usize::try_from(number).ok(), number.to_string()),
            ParameterValue::Text(text) => {
                let text = echo(text);
                (text.parse().ok(), format!("'{text}'"))
            }
            ParameterValue::Bool(flag) => (None, flag.to_string()),
            ParameterValue::Other => (None, "of another type".to_owned()),
        };
        let is_allowed = |number: &usize| (1..=most).contains(number);
        number.filter(is_allowed).ok_or(InputError::MaxSteps { value, most })
    }
}

impl Answers<'_> {
    /// Ends a row's steps if an output says so. Otherwise reads the outputs that the next step takes as inputs.
    pub fn repeat(&self, position: usize, row: &mut Row) -> Result<(), RequestError> {
        let (Some(repeat), Some(course)) = (&self.binding.repeat, &mut row.course) else { return Ok(()) };
        for stop in &repeat.until {
            if self.is_stopped(stop, position)? {
                course.is_stopped = Some(true);
                row.state.is_partial = false;
            }
        }
        if !row.state.is_partial {
            course.steps = course.made + 1;
            return Ok(());
        }
        course.repeated.clear();
        for &feed in &repeat.feeds {
            let (input, value) = self.fed(feed, position, row)?;
            if let Some(course) = &mut row.course {
                course.repeated.push((input, value));
            }
        }
        Ok(())
    }

    fn is_stopped(&self, stop: &BoundStop, position: usize) -> Result<bool, RunError> {
        let Some(output) = &self.outputs[stop.output] else { return Ok(false) };
        let (part, size) = (output.row(position), output.bound.data_type.byte_size().unwrap_or(1));
        let mut elements = reserve(part.bytes())?;
        rows::copies::pieces(&part, output.view.bytes).for_each(|piece| elements.extend_from_slice(piece));
        Ok(elements.chunks_exact(size).any(|element| stop.values.iter().any(|value| value == element)))
    }

    /// An output of a row in the form of a request's input, with the position of that input.
    fn fed(&self, feed: BoundFeed, position: usize, row: &Row) -> Result<(usize, HeldInput), RequestError> {
        let (input, output) = (&self.binding.inputs[feed.input], &self.binding.outputs[feed.output]);
        let taken = Response::of_step();
        if let Some(answer) = &self.outputs[feed.output] {
            self.output(&taken, answer, position, row)?;
        }
        let (Source::Request(request), Some(RowOutput { data_type, dims, bytes, .. })) =
            (&input.source, taken.take_outputs().pop())
        else {
            return Err(InputError::Missing(input.name.clone()).into());
        };
        let mut dims = dims.to_vec();
        if request.form == ShapeForm::BatchInside {
            dims.insert(0, 1);
        }
        let wanted = request.request_dims(input);
        if dims.len() != wanted.len() || dims.iter().zip(&wanted).any(|(dim, wanted)| dim != wanted && *wanted >= 0) {
            let (output, input) = (output.name.clone(), input.name.clone());
            return Err(RunError::RepeatedShape { output, input, dims, wanted }.into());
        }
        let elements = match strings::read(&bytes).ok().flatten().filter(|_| data_type.byte_size().is_none()) {
            Some(read) => HeldElements::Strings(Arc::new(read)),
            None => HeldElements::Bytes(Arc::new(bytes)),
        };
        Ok((request.position, HeldInput { data_type, dims: dims.into(), elements, charge: None }))
    }
}
