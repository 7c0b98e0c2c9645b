//! Requests to rows of a batch, and rows of the outputs to responses.
//!
//! Rules: everything that can be wrong with a request is found in [`decode`], before it meets others; gathering cannot
//! fail for one row. Not for: sequences and slots (a row carries its lease along), or running the model.

#![forbid(unsafe_code)]

pub mod decode;
pub mod fault;
pub mod gather;
pub mod respond;

use crate::error::Error;
use crate::model::Lease;
use crate::sequence::Key;
use crate::triton::Request;

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
    /// Why it cannot run, if so.
    pub problem: Option<Error>,
    /// The request; unless there is a problem, its inputs are bound in the order of the model's request inputs.
    pub request: Request,
}

impl Row {
    /// Whether its state is the initial one rather than the slot's.
    pub const fn is_fresh(&self) -> bool {
        self.start || self.lease.is_none()
    }
}
