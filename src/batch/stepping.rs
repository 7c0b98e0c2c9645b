//! Moves a row from one step of its request to the next and, with `repeat`, gives the values of a step to the next one.
//!
//! A step leaves its state with the sequence, like any request, so the next step finds it in place. Before the first of
//! several steps, the instance saves the sequence's state, and the course keeps it. If the request fails or is
//! cancelled before its last step, the instance restores it, so the request changes nothing.

use std::sync::Arc;
use std::time::Instant;

use rows::tensor::dims_fit;
use rows::{reserve, strings};
use sequences::Outcome;

use super::Row;
use super::course::Course;
use super::gather::counts_after;
use super::outputs::OnGpus;
use super::respond::Answers;
use super::state_api::written;
use crate::binding::{Binding, BoundFeed, BoundRepeat, BoundStop, ShapeForm, Source};
use crate::error::{InputError, RequestError, RunError};
use crate::model::Extras;
use crate::store::{Contexts, Saved};
use crate::triton::{self, HeldElements, HeldInput, ParameterValue, Response, RowOutput, Times, echo};

impl Row {
    /// Decides how many steps the request makes, and prepares the first one. `extras`: what its sequence keeps.
    pub fn open_course(&mut self, binding: &Binding, extras: Extras) -> Result<(), RequestError> {
        let (course, left) = match &binding.repeat {
            Some(repeat) => (Course::repeating(self.most_steps(binding, repeat)?), extras.left),
            None => Course::new(binding, &self.request, &extras.left, self.end, self.state.is_first)?,
        };
        self.extras = Some(Box::new(Extras { left, ..extras }));
        self.course = Some(Box::new(course));
        self.set_inputs()
    }

    fn set_inputs(&mut self) -> Result<(), RequestError> {
        let Some(course) = &mut self.course else { return Ok(()) };
        self.state.is_partial = course.made + 1 < course.steps;
        if course.made < course.steps {
            for input in course.inputs() {
                let (position, input) = input?;
                self.request.set_input(position, &input);
            }
        }
        Ok(())
    }

    /// Whether its sequence may get the state from before the request again: there is one, several steps may change it,
    /// and the sequence is not over whatever comes of the request. An END that leaves the state as it was may read
    /// that. `is_stored`: an END that has not made all of its steps ends no sequence.
    pub fn may_be_undone(&self, is_stored: bool) -> bool {
        self.state.is_partial && !self.state.start && (!self.end || self.state.discards || is_stored)
    }

    /// The state from before the request, if it must be restored: the request has not made all of its steps, or has
    /// `commit: false`.
    pub fn take_before(&mut self) -> Option<Saved> {
        let outcome = self.state.lease.as_ref().filter(|lease| !lease.ends())?.outcome();
        let is_to_be_undone = outcome == Outcome::Lost || (self.state.discards && self.is_under_way());
        self.course.as_mut()?.before.take().filter(|_| is_to_be_undone)
    }

    /// All steps have been made, and the state after them is the sequence's.
    pub fn forget_before(&mut self) {
        if let Some(course) = self.course.as_mut().filter(|_| !self.state.discards) {
            course.before = None;
        }
    }

    /// Whether steps of its request have been made, and more follow.
    pub fn is_under_way(&self) -> bool {
        self.course.as_ref().is_some_and(|course| course.made > 0)
    }

    pub fn has_more_steps(&self) -> bool {
        self.course.as_ref().is_some_and(|course| !course.is_over)
    }

    pub fn is_overdue(&self, now: impl FnOnce() -> Instant) -> bool {
        self.is_under_way() && self.deadline.is_some_and(|deadline| deadline <= now())
    }

    pub fn step_response(&self, binding: &Binding) -> Result<Response, triton::Error> {
        let is_gathered = self.course.is_some() && !binding.answers_each_step;
        if is_gathered { Ok(Response::of_step()) } else { self.response() }
    }

    /// Takes the outputs of a step. After the last step, returns the response to the request, with the outputs of all
    /// steps. For a model that answers each step, returns the response to this step.
    pub fn gather_step(&mut self, binding: &Binding, step: Response) -> Result<Response, RequestError> {
        let Some(course) = &mut self.course else { return Ok(step) };
        let most_bytes = binding.most_steps.answer_bytes;
        if binding.answers_each_step {
            course.outputs.count(step.byte_len(), most_bytes)?;
            step.set_number(c"step", course.made + 1)?;
        } else {
            course.outputs.add(binding, step.take_outputs(), most_bytes)?;
        }
        course.is_over = !self.state.is_partial;
        if self.state.is_partial {
            return Ok(step);
        }
        if binding.answers_each_step {
            self.answer_steps(&step)?;
            return Ok(step);
        }
        let outputs = std::mem::take(&mut course.outputs);
        let response = self.response()?;
        self.answer_id(&response)?;
        outputs.deliver(&response)?;
        self.answer_steps(&response)?;
        Ok(response)
    }

    /// Adds the number of steps; with windows, also the number of elements that are left over; with `repeat`, whether
    /// an output has ended the steps.
    pub fn answer_steps(&self, response: &Response) -> Result<(), RequestError> {
        let Some(course) = &self.course else { return Ok(()) };
        response.set_number(c"steps", course.steps)?;
        if let Some(is_stopped) = course.is_stopped {
            return Ok(response.set_flag(c"stopped", is_stopped)?);
        }
        response.set_number(c"left", course.left)?;
        Ok(course.real.map_or(Ok(()), |real| response.set_number(c"real", real))?)
    }

    /// Prepares the next step, which reads the state that the last one has left with the sequence.
    pub fn go_on(&mut self, binding: &Binding) -> Result<(), RequestError> {
        let counts = counts_after(binding, self);
        if let Some(extras) = &mut self.extras {
            extras.steps = extras.steps.saturating_add(1);
            extras.counts = counts;
        }
        if let Some(asked) = self.asked.as_mut().filter(|_| self.state.start) {
            // From now on the row is no START, but if its answer fails, it must still leave no sequence.
            asked.progress.began = true;
        }
        (self.state.start, self.state.is_first) = (false, false);
        // The given values and contexts were for the first step. The next step reads what this one has left.
        (self.state.given, self.state.contexts) = (Vec::new(), Contexts::Kept);
        if let Some(course) = &mut self.course {
            course.made += 1;
        }
        self.set_inputs()
    }

    /// The times of its request: those of a step, but from the first one on.
    pub fn times(&mut self, of_step: Times) -> Times {
        let Some(course) = &mut self.course else { return of_step };
        // Triton's statistics have one entry for a request, so it begins with the first step and ends with the last.
        let began = *course.began.get_or_insert(of_step);
        Times { execute_start: began.execute_start, compute_start: began.compute_start, ..of_step }
    }

    /// Says in an error at which step of several it happened.
    pub fn at_step(&self, mut error: triton::Error) -> triton::Error {
        if let Some(course) = self.course.as_deref().filter(|course| course.steps > 1) {
            let of = if course.is_stopped.is_some() { String::new() } else { format!(" of {}", course.steps) };
            error.message += &format!(" (step {}{of} of the request)", course.made + 1);
        }
        error
    }

    fn most_steps(&self, binding: &Binding, repeat: &BoundRepeat) -> Result<usize, InputError> {
        let most = binding.most_steps.steps;
        let Some((_, value)) = self.request.parameters(&["max_steps"]).next() else {
            return if repeat.until.is_empty() { Err(InputError::NoMaxSteps) } else { Ok(most) };
        };
        let number = match value {
            ParameterValue::Int(number) => usize::try_from(number).ok(),
            ParameterValue::Text(text) => echo(text).parse().ok(),
            ParameterValue::Bool(_) | ParameterValue::Other => None,
        };
        let is_allowed = |number: &usize| (1..=most).contains(number);
        number.filter(is_allowed).ok_or_else(|| InputError::MaxSteps { value: written(value), most })
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
            // A response of a step is in host memory, so nothing is left over for a GPU.
            self.add(&taken, answer, position, row, &mut OnGpus::default())?;
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
        if !dims_fit(&dims, &wanted) {
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
