//! Which sequence a request belongs to, and how long a sequence lives.
//!
//! A sequence is an *incarnation* of a correlation id on one model instance: START makes one, END ends it, and so
//! does lying idle for too long. Triton's core sends the requests of one incarnation one at a time (the next comes
//! when the last is released), but gives the backend no name for it: a client that ends a sequence and starts the
//! next with the same id before the END is answered has two incarnations in core's queue, in two of core's slots,
//! and their requests interleave. Mixing them would give one stream the other's state.
//!
//! With the `direct` strategy, the place of a request in its payload is core's slot, and so the name: a *lane*. With
//! `oldest` there is none, and the incarnations of an id are a queue (a *chain*). Only the front one receives. The
//! START of a later one is served at once, but *held*: it is not released, so core cannot send what follows it, until
//! the front one has ended.
//!
//! A client may also start a live sequence over, without END, and core may deliver STARTs in another order than it got
//! them: one waits behind an END that is in the works while the next overtakes it in a free slot. So when the front
//! incarnation can have nothing left in core's queue, what happens depends on its age. If it is older than anything
//! that can have waited when it started, then it has been started over, and is over. If not, the next one gets its turn
//! and its START is released. If that one belongs to the past, the rest of it, up to its END, is in core's queue and
//! comes now; then the turn goes back. If nothing comes, the earlier one is over. That core's queue is empty is seen by
//! waiting until it must have sent what it had (see [`Policy`]): a few batches, or a quarter of a second on a quiet server: its threads may
//! have to wait for a CPU. What runs before a request has been released proves nothing of what follows it.
//!
//! A START and END in one request may leave the young incarnation that it started over behind as *doubtful*: it goes
//! when slots run out, or by expiry.
//!
//! Rules: the time and the size of each payload are given, never asked for; no operation costs more when more
//! sequences live. Not for: tensors, memory (an `S` is carried along), or Triton's objects (a held request is an `H`).

#![forbid(unsafe_code)]

mod contest;
mod id;
mod table;

pub use id::{Key, SequenceId};
pub use table::{Admitted, Counts, Outcome, Policy, Refusal, Sequences};
