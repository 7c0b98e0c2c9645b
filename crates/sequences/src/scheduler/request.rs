//! What goes into the scheduler and what comes out.

#![expect(missing_docs, reason = "the types and names say what they are")]

use super::rules::IdleRule;
use crate::SequenceId;

/// What a request says about its sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// `None` only with START: the scheduler chooses an id.
    pub id: Option<SequenceId>,
    pub start: bool,
    pub end: bool,
    /// Where the state comes from. Anything but [`Origin::Own`] only with START.
    pub origin: Origin,
}

impl Control {
    /// Whether it is a START that asks for another state than that of the live sequence with its id.
    pub fn starts_anew(&self) -> bool {
        let continues = match &self.origin {
            Origin::Own => false,
            Origin::Clone(of) => self.id.as_ref() == Some(of),
            Origin::Parked => true,
        };
        self.start && !continues
    }
}

/// What a START begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The initial state.
    Own,
    /// The state that this sequence has after the requests that have arrived (`clone_of`).
    Clone(SequenceId),
    /// The state of the parked sequence with the same id (`resume`).
    Parked,
}

/// Why a request isn't queued, or was removed from its queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such sequence, or an END of it is queued.
    Missing(SequenceId),
    /// A START of a live id. `idle`: when that sequence is over without END.
    Exists { id: SequenceId, idle: IdleRule },
    /// A START, and every place is taken.
    TooMany { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// A START, every place is taken, and `max` STARTs wait already.
    QueueFull { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// `max` requests of the sequence wait already.
    TooManyQueued { id: SequenceId, max: usize },
    /// A START that has waited for a place for its longest time.
    Late(SequenceId),
    /// A START that resumes a parked sequence, and there is none with its id.
    NotParked(SequenceId),
    /// A START that resumes a sequence which is live.
    NotParkedButLive(SequenceId),
    /// Not a START, and the sequence is parked.
    Parked(SequenceId),
    /// A START that clones the sequence whose id it has.
    CloneOfItself(SequenceId),
    /// The sequence leaves for another server.
    Moved(SequenceId),
    /// All sequences leave for other servers, and no more are taken ([`Scheduler::drain`](super::Scheduler::drain)).
    Drains,
}

/// A sequence that has to be looked for in a store, or entered there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    pub lane: u32,
    pub id: SequenceId,
    /// Its first request is a START, so it has to be entered.
    pub starts: bool,
}

/// A request of the next batch.
#[derive(Debug)]
pub struct Ready<R> {
    pub lane: u32,
    pub id: SequenceId,
    pub request: R,
    pub begins: Begins,
}

/// What a request begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// A START: the initial state. Any other request: the state of its sequence.
    Plain,
    /// A START: the state of the sequence in this lane, which has the same worker and has no request before this one.
    Clone(u32),
    /// A START of a sequence that was parked: the state that it has.
    Resumed,
}

impl Begins {
    /// The lane of the sequence whose state it is.
    pub(super) const fn source(self) -> Option<u32> {
        if let Self::Clone(source) = self { Some(source) } else { None }
    }
}

/// The next work of a worker.
#[derive(Debug)]
pub struct Work<R> {
    /// The requests of the next batch, each of another sequence.
    pub ready: Vec<Ready<R>>,
    /// Sequences of this worker that ended without a request, so that it still has their states.
    pub over: Vec<Over>,
}

/// A sequence that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    pub lane: u32,
    pub why: OverBy,
}

/// Why a sequence is over without a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverBy {
    /// Another START replaced it, or its state is lost.
    Replaced,
    /// It was idle for too long.
    Idle,
    /// It leaves for another server.
    Released,
}
