//! Which sequence a request belongs to, and how long a sequence lives.
//!
//! A sequence is an *incarnation* of a correlation id on one model instance. START makes one. END ends it, and so does
//! lying idle for too long. Core sends the requests of one incarnation one at a time: the next comes when the last is
//! released. But core gives the backend no name for an incarnation. A client that ends a sequence and starts the next
//! with the same id before the END is answered has two incarnations in core's queue, in two of core's slots, and their
//! requests come in any order. Mixing them would give one stream the other's state.
//!
//! With the `direct` strategy, the place of a request in its payload is core's slot and names the incarnation: a *lane*.
//!
//! With `oldest` there is no name, and the incarnations of an id form a *chain*, in the order of their STARTs. Only the
//! front one receives requests. A later START is run and answered, but *held*: it is not released, so core cannot send
//! what follows it. It is released when the front incarnation is over:
//!
//! - by its END, or
//! - because core has sent everything it had of it and a later START has come: the client has started over without
//!   END, or core has dropped the sequence. The [`watermark`] tells when core has sent everything.
//!
//! The order of STARTs is the client's if the client has each START answered before it sends the next START with the
//! same id. If a client does not, core can hold a START back behind another request and send a later one first. It is
//! sent before the watermark has passed the later START and the last requests of the incarnations before it. So a START
//! that comes *soon* after another of its id may be the older of the two. If each sequence is ended, nothing is wrong: the
//! front one's END comes, and then the other's turn. If the front one rests instead (see [`Policy::rest`]), it counts as
//! started over. If both turn out to have requests in core, both end: their next requests get NOT_FOUND.
//!
//! An incarnation without state (its START was refused or failed, or the sequence was dropped) can still have requests
//! in core. While it may, it stays in front of its chain as `stateless`: its requests are refused, and no later
//! incarnation gets them.
//!
//! Rules: the time is given, never asked for; no operation costs more when more sequences live or more ids wait. Not
//! for: tensors, memory (an `S` is carried along), or Triton's objects (a held request is an `H`).

#![forbid(unsafe_code)]

mod id;
mod table;
mod watermark;

pub use id::{Key, SequenceId};
pub use table::{Admission, Admitted, Counts, Outcome, Policy, Refusal, Sequences};
