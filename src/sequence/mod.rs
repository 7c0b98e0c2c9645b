//! Which sequence a request belongs to, and how long a sequence lives.
//!
//! A sequence is an *incarnation* of a correlation id on one model instance: START makes one, END ends it, and so
//! does lying idle for too long. Triton's core sends the requests of one incarnation one at a time (the next comes
//! when the last is released), but gives the backend no name for it: a client that ends a sequence and starts the
//! next with the same id before the END is answered has two incarnations in core's queue, in two of core's slots,
//! and their requests interleave. Mixing them would give one stream the other's state.
//!
//! The incarnations of an id are therefore a queue (a *chain*). Only the front one receives requests. The START of a
//! later one is served at once, but *held*: it is not released, so core cannot send what follows it, until the front
//! one is over. That is so when its END has been committed, or when it can have no request left in core's queue: a
//! client that simply started a live sequence again. The latter is seen by waiting until core must have sent what it
//! had (see [`Policy`]); that takes a few batches, or milliseconds on a quiet server.
//!
//! Rules: the time and the size of each payload are given, never asked for; no operation costs more when more
//! sequences live. Not for: tensors, memory (an `S` is carried along), or Triton's objects (a held request is an `H`).

mod id;
mod table;

pub use id::{Key, SequenceId};
pub use table::{Admitted, Counts, Outcome, Policy, Refusal, Sequences};
