//! Requests to rows of a batch, and rows of the outputs to responses.
//!
//! Rules: everything that can be wrong with a request is found in [`decode`], before it meets others; gathering cannot
//! fail for one row. Not for: sequences and slots (a row carries its lease along), or running the model.

#![forbid(unsafe_code)]

pub mod decode;
pub mod fault;
pub mod gather;
pub mod grouping;
pub mod isolation;
pub mod residence;
pub mod respond;
pub mod state_row;
pub mod warm_up;

use self::isolation::Member;
use crate::binding::{Binding, Initial, Source};
use crate::error::RequestError;
use crate::model::Lease;
use crate::sequence::Key;
use crate::state::pool::SlotId;
use crate::triton::{Answer, Request};

/// A request on its way through Execute.
///
/// Dropped early it gives its slot back as it was and answers its request with an error, in this order.
pub struct Row {
    /// The slot of its sequence; `None` for a request without one (warm-up), which starts from the initial state and
    /// leaves none.
    pub lease: Option<Lease>,
    /// The sequence that it belongs to.
    pub key: Option<Key>,
    /// It starts its sequence.
    pub start: bool,
    /// It ends its sequence.
    pub end: bool,
    /// What the model for initial states says of each state; nothing for the others, and where there is no such model.
    pub initial: Vec<Option<Initial>>,
    /// Why it cannot run, if so.
    pub problem: Option<RequestError>,
    /// What its client is to be sent.
    pub answer: Option<Answer>,
    /// The request; unless there is a problem, its inputs are bound in the order of the model's request inputs.
    pub request: Request,
}

impl Row {
    /// Whether its state is the initial one rather than the slot's.
    pub const fn is_fresh(&self) -> bool {
        self.start || self.lease.is_none()
    }

    /// Its sequence, as [`isolation`] sees it.
    pub fn member(&self) -> Member {
        let slot = self.lease.as_ref().map(Lease::slot);
        Member { slot, is_fresh: self.is_fresh(), ends: self.lease.as_ref().is_some_and(Lease::ends) }
    }

    /// Whether nothing of it has been changed or answered, so that it can run again.
    pub fn is_untouched(&self) -> bool {
        !self.request.is_answered() && self.lease.as_ref().is_none_or(Lease::is_untouched)
    }

    /// Whether its request asks for an output.
    pub fn wants(&self, output: &str) -> bool {
        let count = self.request.output_count().unwrap_or(0);
        (0..count).any(|index| self.request.output_name(index).is_ok_and(|name| name == output))
    }

    /// Its state may be moved from now on: it has its answer.
    pub fn leave_state(&mut self) {
        if let Some(lease) = &mut self.lease {
            lease.leave_state();
        }
    }

    /// Nobody knows what its state is now: its sequence ends with it.
    pub fn spoil(&mut self) {
        if let Some(lease) = &mut self.lease {
            lease.spoil();
        }
    }

    /// The slot of its sequence, if the state that it needs is the sequence's.
    fn slot_with_state(&self) -> Option<SlotId> {
        self.lease.as_ref().filter(|_| !self.start).map(Lease::slot)
    }

    /// Steps that the model sees of the row's input number `input` of the binding, along the axis in which rows may
    /// differ; `None` if there is no such axis, or the request leaves the input out.
    fn steps_of(&self, binding: &Binding, input: usize) -> Option<usize> {
        let Source::Request(request) = &binding.inputs[input].source else { return None };
        Some(request.row_length(self.request.input(request.position)?.dims(), request.ragged_axis?))
    }
}
