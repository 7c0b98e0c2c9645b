//! Decides which sequence a request belongs to, and when a sequence is over.
//!
//! A sequence is an *incarnation* of a correlation id on one model instance. START begins it. END ends it, and so does
//! the idle limit. Core sends the requests of an incarnation one at a time: it sends the next one when the previous one
//! has been released. But core does not tell the backend which incarnation a request belongs to. Suppose a client sends
//! END, and START with the same id before the END is answered. Then core has two incarnations of the id in two of its
//! slots, and their requests arrive in any order. If the backend mixed them up, one sequence would get the state of the
//! other.
//!
//! With the `direct` strategy, the position of a request in its payload is the number of core's slot. This *lane*
//! identifies the incarnation.
//!
//! If this backend schedules the sequences itself ([`crate::scheduler`]), each incarnation has a lane of its own.
//!
//! With `oldest`, nothing identifies the incarnation. The incarnations of an id form a *chain* in the order of their
//! STARTs. Only the one at the front receives requests. A later START is run and answered, but *held*: it is not
//! released, so core cannot send the requests that follow it. It is released when the front incarnation is over. The
//! front incarnation is over in three cases:
//!
//! - Its END has been settled.
//! - Its START has failed, or it has expired.
//! - A later START has arrived, and core has sent every request that it had of the front incarnation. Then the client
//!   has started over without END, or core has dropped the sequence. The [`watermark`] tells when core has sent
//!   everything.
//!
//! The STARTs of an id arrive in the client's order if the client waits for the answer to each START before it sends
//! the next one. If a client does not wait, core can keep a START behind another request in one slot, and send a later
//! START first from another slot. Core sends the delayed START before the watermark has passed the later START and the
//! last requests of the incarnations before it. So a START that arrives *soon* after another one of its id may be the
//! older of the two. This does no harm if the client ends each sequence: the END of the front incarnation arrives, and
//! then the other one is at the front. If the front incarnation rests instead (see [`Policy::rest`]), it counts as
//! started over. But if it has received a request after the other START, or if both turn out to have requests in core,
//! both are over: their next requests get NOT_FOUND.
//!
//! An incarnation without state can still have requests in core. It has no state if its START was refused or failed, or
//! if the backend has dropped the sequence. Until core has sent these requests, the incarnation stays at the front of
//! its chain as `stateless`: its requests are refused, and no later incarnation receives them.
//!
//! Rules:
//! - The caller passes the time. Nothing here reads a clock.
//! - The cost of an operation does not grow with the number of live sequences or of ids with a held request, except when
//!   an instance is removed.
//!
//! Not for: tensors, memory (the table only stores an `S` for each slab), or Triton's objects (a held request is an
//! `H`).

#![forbid(unsafe_code)]

mod id;
mod table;
mod watermark;

pub use id::{Key, SequenceId};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use table::model_tests;
pub use table::{Admission, Admitted, Counts, Life, Outcome, Policy, Refusal, Sequences};
