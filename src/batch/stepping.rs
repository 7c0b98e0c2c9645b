//! What a row does between the steps of its request.
//!
//! Until the last step, the row carries the state itself ([`Row::carry`]), and the sequence keeps the one from before the
//! request. So a request that fails or is cancelled between two steps changes nothing.

use std::time::Instant;

use super::Row;
use super::course::Course;
use super::generated::counts_after;
use crate::binding::Binding;
use crate::error::RequestError;
use crate::model::Extras;
use crate::store::{Captured, Contexts};
use crate::triton::{self, Response, Times};

impl Row {
    /// Divides what the request brings into windows, and gives the row the first one. `extras`: what its sequence keeps.
    pub fn open_course(&mut self, binding: &Binding, extras: Extras) -> Result<(), RequestError> {
        let is_first = self.state.is_first;
        let (course, left) = Course::new(binding, &self.request, &extras.left, self.end, is_first)?;
        self.extras = Some(Box::new(Extras { left, ..extras }));
        self.course = Some(Box::new(course));
        self.set_window()
    }

    /// Gives the row the window of its next step.
    fn set_window(&mut self) -> Result<(), RequestError> {
        let Some(course) = &self.course else { return Ok(()) };
        self.state.is_partial = course.made + 1 < course.steps;
        if course.made < course.steps {
            for window in course.windows() {
                let (position, window) = window?;
                self.request.set_input(position, &window);
            }
        }
        Ok(())
    }

    /// Whether steps of its request have been made, and more follow.
    pub fn is_under_way(&self) -> bool {
        self.course.as_ref().is_some_and(|course| course.made > 0)
    }

    /// Whether its request has steps to make.
    pub fn has_more_steps(&self) -> bool {
        self.course.as_ref().is_some_and(|course| !course.is_over)
    }

    /// Whether the request of a model with windows makes no step.
    pub fn makes_no_step(&self) -> bool {
        self.course.as_ref().is_some_and(|course| course.steps == 0)
    }

    /// Whether its time is over, between two steps.
    pub fn is_overdue(&self, now: impl FnOnce() -> Instant) -> bool {
        self.is_under_way() && self.deadline.is_some_and(|deadline| deadline <= now())
    }

    /// A response for the outputs of its next step.
    pub fn step_response(&self, binding: &Binding) -> Result<Response, triton::Error> {
        let is_gathered = self.course.is_some() && !binding.answers_each_step;
        if is_gathered { Ok(Response::of_step()) } else { self.request.response() }
    }

    /// Takes the outputs of a step. If it was the last, returns the response to the request, with the outputs of all steps.
    /// Where each step has an answer of its own, returns that.
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
        let response = self.request.response()?;
        self.answer_id(&response)?;
        outputs.deliver(&response)?;
        self.answer_steps(&response)?;
        Ok(response)
    }

    /// Adds how many steps the request made, and how many elements are left over, if its model cuts windows.
    pub fn answer_steps(&self, response: &Response) -> Result<(), RequestError> {
        let Some(course) = &self.course else { return Ok(()) };
        response.set_number(c"steps", course.steps)?;
        response.set_number(c"left", course.left)?;
        Ok(course.real.map_or(Ok(()), |real| response.set_number(c"real", real))?)
    }

    /// Carries the state after a step to the next one.
    pub fn carry(&mut self, binding: &Binding, captured: Captured) -> Result<(), RequestError> {
        let counts = counts_after(binding, self);
        if let Some(extras) = &mut self.extras {
            extras.steps = extras.steps.saturating_add(1);
            extras.counts = counts;
        }
        self.state.given = captured.state.states.into_iter().map(Some).collect();
        self.state.contexts = Contexts::Given(captured.state.contexts);
        self.state.is_first = false;
        if let Some(course) = &mut self.course {
            course.made += 1;
            course.charge = captured.charge;
        }
        self.set_window()
    }

    /// The times of its request: those of a step, but from the first one on.
    pub fn times(&mut self, of_step: Times) -> Times {
        let Some(course) = &mut self.course else { return of_step };
        let began = *course.began.get_or_insert(of_step);
        Times { execute_start: began.execute_start, compute_start: began.compute_start, ..of_step }
    }

    /// Says in an error at which step of several it happened.
    pub fn at_step(&self, mut error: triton::Error) -> triton::Error {
        if let Some(Course { steps, made, .. }) = self.course.as_deref().filter(|course| course.steps > 1) {
            error.message += &format!(" (step {} of {steps} of the request)", made + 1);
        }
        error
    }
}
