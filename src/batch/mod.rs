//! Requests to rows of a batch, and rows of the outputs to responses.
//!
//! Rules: everything that can be wrong with a request is found in [`decode`], before it meets others; gathering cannot
//! fail for one row. Not for: states ([`crate::store`]; a row carries what the store needs along), or running the
//! model.

#![forbid(unsafe_code)]

pub mod at_load;
mod course;
pub mod decode;
pub mod gather;
pub mod grouping;
pub mod kept;
mod outputs;
pub mod respond;
pub mod state_api;
mod stepping;

use std::time::Instant;

use sequences::{Good, Key};

use self::course::Course;
use self::kept::KeptAnswer;
use self::state_api::StateRequest;
use crate::binding::{Binding, RowValues, Source};
use crate::error::{InputError, RequestError};
use crate::model::{Extras, Lease, RepeatKey};
use crate::store::{HasState, RowState};
use crate::triton::{self, Answer, HeldInput, Request, Response};

/// Panics on request, for the tests of what a panic does to a server. Empty in a normal build.
pub mod fault {
    use crate::triton::Request;

    /// Panics if one of the requests has the parameter `inject_panic` with the name of this stage.
    #[cfg(feature = "fault-injection")]
    pub fn point<'a>(stage: &str, requests: impl IntoIterator<Item = &'a Request>) {
        if requests.into_iter().any(|request| request.parameter("inject_panic").as_deref() == Some(stage)) {
            panic!("injected at {stage}");
        }
    }

    #[cfg(not(feature = "fault-injection"))]
    pub fn point<'a>(_stage: &str, _requests: impl IntoIterator<Item = &'a Request>) {}
}

/// How an answer carries the id of its sequence: as a response parameter, and perhaps as output `sequence_id`.
#[derive(Clone, Copy)]
pub struct TellsId {
    /// Dims of the output; `None` if answers don't carry it.
    pub output_dims: Option<&'static [i64]>,
}

/// A request that has been read, until it is admitted. It may be one that cannot run: with core's batcher, its START or
/// END counts all the same.
pub struct Decoded {
    pub key: Option<Key>,
    pub start: bool,
    pub end: bool,
    pub asked: Option<Box<StateRequest>>,
    pub deadline: Option<Instant>,
    pub tells_id: Option<TellsId>,
    /// Its answer is kept in a store, for this request.
    pub keeps: Option<RepeatKey>,
    /// The answer that was kept, if the request has run before and is sent again. It must not run.
    pub again: Option<Box<KeptAnswer>>,
    pub problem: Option<Box<RequestError>>,
    /// Unless there is a problem, its inputs are bound in the order of the model's request inputs.
    pub request: Request,
}

impl Decoded {
    pub const fn new(request: Request) -> Self {
        Self {
            key: None,
            start: false,
            end: false,
            asked: None,
            deadline: None,
            tells_id: None,
            keeps: None,
            again: None,
            problem: None,
            request,
        }
    }

    /// Identifies its request; `None` without `sequence_step`. START is left out, because a client repeats a START
    /// without it.
    pub fn repeat_key(&self) -> Option<RepeatKey> {
        let asked = self.asked.as_deref()?;
        let StateRequest { step, left, delete, get, query, snapshot, discards, reset, .. } = asked;
        let outputs: Vec<_> =
            (0..self.request.output_count().ok()?).map(|at| self.request.output_name(at).ok()).collect();
        // The values are not compared, because the step already tells requests apart.
        let sets = (asked.set.iter().filter(|value| value.is_some()).count(), asked.restore.is_some());
        let wants =
            format!("{} {outputs:?} {get:?} {query} {snapshot} {discards} {reset:?} {sets:?}", asked.progress.runs);
        let wants = crc32fast::hash(wants.as_bytes());
        step.map(|step| RepeatKey { step, left: *left, ends: self.end || *delete, wants })
    }

    /// Whether its request is the one with this answer, sent again.
    pub fn is_answered_by(&self, KeptAnswer { of, .. }: &KeptAnswer) -> bool {
        self.repeat_key() == Some(*of)
    }
}

/// An admitted request: it has its lease, if its sequence is live. `Instance::admit` answers those that cannot run. A
/// request of several steps runs once for each.
///
/// Dropped early it gives its lease back (see [`crate::model::Lease`]) and answers its request with an error, in this
/// order.
pub struct Row {
    /// Its lease, and what else the store needs. First: the request is released after the slot is back.
    pub state: RowState,
    pub key: Option<Key>,
    pub end: bool,
    pub asked: Option<Box<StateRequest>>,
    /// What its sequence keeps besides its states, if the request changes that.
    pub extras: Option<Box<Extras>>,
    /// What generated inputs need of its sequence, if the model has such inputs.
    pub counted: Option<Box<Counted>>,
    /// The steps of its request, if a request to its model may make several.
    pub course: Option<Box<Course>>,
    pub deadline: Option<Instant>,
    pub tells_id: Option<TellsId>,
    pub keeps: Option<RepeatKey>,
    pub answer: Option<Answer>,
    pub request: Request,
}

impl Row {
    pub fn new(of: Decoded, lease: Option<Lease>) -> Self {
        let Decoded { key, start, end, asked, deadline, tells_id, keeps, request, .. } = of;
        Self {
            state: RowState { lease, start, ..RowState::default() },
            key,
            end,
            asked,
            extras: None,
            counted: None,
            course: None,
            deadline,
            tells_id,
            keeps,
            answer: None,
            request,
        }
    }

    /// The good requests of its sequence, for [`grouping::Isolation`].
    pub fn good(&self) -> Option<Good> {
        self.state.lease.as_ref().filter(|_| !self.state.is_fresh()).map(Lease::good)
    }

    /// Whether its step has neither changed nor answered anything, so that it can run again.
    pub fn is_untouched(&self) -> bool {
        let is_unchanged = self.is_under_way() || self.state.lease.as_ref().is_none_or(Lease::is_untouched);
        !self.request.is_answered() && is_unchanged
    }

    /// Checks the lengths of the inputs that have a context, where the first inference of a sequence differs from later
    /// ones.
    pub fn check_lengths(&self, binding: &Binding) -> Result<(), InputError> {
        for (index, request, context) in binding.contexts() {
            let Some(sent) = self.request.input(request.position) else { continue };
            let (input, came) = (&binding.inputs[index], request.own_length(sent.dims(), context.axis));
            let (least, exactly) = context.lengths(input.dims[context.axis], self.state.is_first);
            if exactly.map_or(came >= least, |exactly| came == exactly) {
                continue;
            }
            let which = if self.state.is_first { "the first inference" } else { "an inference after the first" };
            let wanted = exactly.map_or_else(|| format!("at least {least}"), |exactly| exactly.to_string());
            return Err(InputError::Length {
                name: input.name.clone(),
                axis: context.axis,
                came,
                rule: format!("{which} of a sequence must have {wanted}"),
                length: context.length,
            });
        }
        Ok(())
    }

    pub fn response(&self) -> Result<Response, triton::Error> {
        let response = self.request.response()?;
        if self.keeps.is_some() {
            // The store keeps a copy, for a client that loses the answer and sends the request again.
            response.record();
        }
        Ok(response)
    }

    pub fn wants(&self, output: &str) -> bool {
        let count = self.request.output_count().unwrap_or(0);
        (0..count).any(|index| self.request.output_name(index).is_ok_and(|name| name == output))
    }

    /// Whether the model is told that its sequence starts. A request without a sequence runs as the start of one.
    pub fn starts_for_model(&self) -> bool {
        if self.is_under_way() {
            return false;
        }
        let fresh = self.state.is_fresh();
        self.asked.as_ref().map_or(fresh, |asked| {
            asked.progress.restarts || ((fresh || asked.progress.began) && !asked.progress.goes_on)
        })
    }

    /// Copies the inputs that its sequence keeps, by position.
    pub fn hold_inputs(&mut self, binding: &Binding) -> Result<Vec<Option<HeldInput>>, InputError> {
        let held = binding.request_inputs().map(|(input, of)| {
            if !of.is_held {
                return Ok(None);
            }
            self.request.hold_input(of.position).map_err(|error| InputError::not_copied(&input.name, error))
        });
        held.collect()
    }

    /// Steps that the model sees of the row's input number `input` of the binding, along the axis in which rows may
    /// differ; `None` if there is no such axis, or the request leaves the input out.
    fn steps_of(&self, binding: &Binding, input: usize) -> Option<usize> {
        let Source::Request(request) = &binding.inputs[input].source else { return None };
        self.steps(binding, input, request.ragged_axis?)
    }
}

impl HasState for Row {
    fn state(&self) -> &RowState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut RowState {
        &mut self.state
    }

    fn steps(&self, binding: &Binding, input: usize, axis: usize) -> Option<usize> {
        let Source::Request(request) = &binding.inputs[input].source else { return None };
        Some(request.row_length(self.request.input(request.position)?.dims(), axis, self.state.is_first))
    }
}

/// What generated inputs need of the sequence of a row, before the run.
#[derive(Clone, Debug)]
pub struct Counted {
    /// In the order of [`Binding::counters`]; empty for zeros.
    counts: Vec<u64>,
    /// What the row has in the generated inputs that the whole batch shares.
    shared_values: Vec<RowValues>,
}

impl Counted {
    fn count(&self, counter: usize) -> u64 {
        self.counts.get(counter).copied().unwrap_or(0)
    }
}
