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
//! With `oldest`, nothing identifies the incarnation. The incarnations of an id form a *chain* in the order in which
//! their STARTs arrive. Only the one at the front receives requests. A later START is run and answered, but *held*: it
//! is not released, so core cannot send the requests that follow it. It is released when the front incarnation is over.
//! The front incarnation is over in three cases:
//!
//! - Its END has been settled.
//! - Its START has failed, its state is lost, or it has expired.
//! - A START that is certainly newer has arrived, and core has sent every request that it had of the front incarnation.
//!   Then the client has started over without END, or core has dropped the sequence. The [`watermark`] tells when core
//!   has sent everything.
//!
//! A START is certainly newer than the only incarnation of its id if core cannot have delayed it. Core delays a START
//! in two cases. It gives the slot of an END that is in flight to another sequence, and keeps the START of that one
//! behind the END. And it keeps a START without an END before it in the slot of its id, behind the other requests
//! there. In both cases a later START can overtake it in another slot. A client that waits for the answer to an END or
//! a START before the next START of the id never has two STARTs in core.
//!
//! If a START may be the older one, both incarnations can go on: if the END of the front incarnation arrives, the other
//! one comes to the front. But if core has sent everything of the front incarnation and no END has come, then either
//! the client has started over, or it pauses. Both incarnations end, because a later request could belong to either.
//! Until core has sent everything that it has of them, requests and STARTs of the id are refused as ambiguous: such a
//! START may be older than both.
//!
//! An incarnation without state can still have requests in core. It has no state if its START was refused or failed, if
//! its state is lost, or if the backend has dropped the sequence. Until core has sent these requests, the incarnation
//! stays at the front of its chain as `stateless`: its requests are refused, and no later incarnation receives them.
//!
//! Rules:
//! - The caller passes the time. Nothing here reads a clock.
//! - The slot of a sequence that is over stays in use until its instance has dropped the state.
//! - The cost of an operation does not grow with the number of live sequences or of ids with a held request, except
//!   when an instance is removed.
//!
//! Not for: tensors, memory (the table only stores an `S` for each slab), or Triton's objects (a held request is an
//! `H`).

mod id;
pub mod pool;
pub mod scheduler;
mod table;
mod watermark;

pub use id::{Finished, Key, Outcome, SequenceId};
#[cfg(any(test, feature = "fuzzing"))]
pub use table::model_tests;
pub use table::{Admission, Admitted, Counts, Good, IdleLimits, Life, Policy, Refusal, Sequences, Shortage};
