//! The values that the caller gives to the scheduler and gets from it: rules, requests and refusals.

use std::time::Duration;

use crate::SequenceId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Most sequences that have a place at the same time (`max_sequence_number`).
    pub max_sequences: usize,
    /// Most STARTs that wait for a place (`max_queue_size`).
    pub max_waiting: usize,
    /// The longest wait for a place, if the request names no shorter one.
    pub longest_wait: Duration,
    /// Most requests of a sequence that wait (`max_queued_requests_per_sequence`).
    pub max_queued: usize,
    pub on_duplicate_start: OnDuplicateStart,
    pub id_reuse: IdReuse,
    pub idle: IdleRule,
    /// What becomes of a sequence that was idle for too long; `None`: it is over.
    pub parking: Option<Parking>,
    /// A sequence that is not here may be in a store: its request waits until it has been looked for there.
    pub looks_up: bool,
    /// A START waits until its sequence has been entered in the store.
    pub enters_starts: bool,
    /// The first id that the scheduler gives to a START without one.
    pub first_id: u64,
}

/// How long a sequence that was idle for too long keeps its state (`park_ms`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parking {
    /// A parked sequence is over when it has been parked for this long.
    pub time: Duration,
    /// Most parked sequences. One more ends the one that has been parked for the longest.
    pub most: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDuplicateStart {
    /// The START is refused. The sequence continues.
    Reject,
    /// The START begins a new sequence, or is refused. The old sequence is over when its queued requests have run.
    Restart,
}

/// When a sequence without END is over. Only requests that succeed extend its life. It isn't removed while a request of
/// it is queued or running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleRule {
    Never,
    /// When no request has succeeded for this long.
    After(Duration),
    /// A scan takes place once in this time. A sequence is over when no request of it has succeeded since the scan
    /// before.
    TwoScans(Duration),
}

/// When an id that the scheduler gave may be given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdReuse {
    /// An id is given again only after all other numbers, so that a late request of one client doesn't reach another's
    /// sequence.
    Last,
    /// The next START gets the id again, if it was the last one given and its sequence is over, as in OpenVINO Model
    /// Server.
    AtOnce,
}

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Own,
    /// The state that this sequence has after the requests that have arrived (`clone_of`).
    Clone(SequenceId),
    /// The state of the parked sequence with the same id (`resume`).
    Parked,
}

/// Why a request isn't queued, or was removed from its queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such sequence, or an END of it is queued.
    #[error(
        "SEQUENCE_MISSING: Sequence with provided ID does not exist: {0} was not started, has ended, or was idle for \
         too long; start it again"
    )]
    Missing(SequenceId),
    /// A START of a live id. `idle`: when that sequence is over without END.
    #[error(
        "SEQUENCE_ALREADY_EXISTS: Sequence with provided ID already exists: {id}; it goes on. End it first, or set \
         parameter 'on_duplicate_start' to 'restart'; {}",
        without_end(*idle)
    )]
    Exists { id: SequenceId, idle: IdleRule },
    /// A START, and every place is taken.
    #[error(
        "MAX_SEQUENCE_NUMBER_REACHED: Max sequence number has been reached. Could not create new sequence{}: \
         max_sequence_number is {max}; try again later; {}",
        named(id.as_ref()),
        without_end(*idle)
    )]
    TooMany { id: Option<SequenceId>, max: usize, idle: IdleRule },
    /// A START, every place is taken, and `max` STARTs wait already.
    #[error(
        "SEQUENCE_QUEUE_FULL: {max} STARTs wait for a place already (max_queue_size). Could not create new sequence{}; \
         try again later; {}",
        named(id.as_ref()),
        without_end(*idle)
    )]
    QueueFull { id: Option<SequenceId>, max: usize, idle: IdleRule },
    #[error(
        "MAX_QUEUED_REQUESTS_REACHED: {max} requests of sequence {id} wait already (max_queued_requests_per_sequence); \
         this one has had no effect, and the sequence goes on: wait for an answer, and send it again"
    )]
    TooManyQueued { id: SequenceId, max: usize },
    #[error(
        "SEQUENCE_QUEUE_TIMEOUT: the request of sequence {0} waited longer than its 'timeout', or than \
         queue_timeout_ms for a place; it has not run"
    )]
    Late(SequenceId),
    #[error(
        "SEQUENCE_NOT_PARKED: there is no parked sequence {0} ('resume'): it was not parked (park_ms), was parked for too \
         long, or made room for others (max_parked_sequences); start it without 'resume'"
    )]
    NotParked(SequenceId),
    #[error("SEQUENCE_ALREADY_EXISTS: sequence {0} is live and not parked: go on without sequence_start and 'resume'")]
    NotParkedButLive(SequenceId),
    /// Not a START, and the sequence is parked.
    #[error(
        "SEQUENCE_MISSING: sequence {0} is parked: send START with 'resume' to continue it, or without 'resume' to \
         begin anew"
    )]
    Parked(SequenceId),
    #[error("{}", of_itself(.0))]
    CloneOfItself(SequenceId),
    /// Another server has taken the sequence, or the state here has been lost.
    #[error(
        "SEQUENCE_MOVED: sequence {0} has left this server, or its state here was lost; this request has changed nothing: send \
         it again"
    )]
    Moved(SequenceId),
    /// All sequences leave for other servers, and no more are taken ([`Scheduler::drain`](super::Scheduler::drain)).
    #[error(
        "SEQUENCE_MOVED: this server is draining ('drain') and takes no more sequences; this request has changed \
         nothing: send it again, to another server"
    )]
    Drains,
}

fn named(id: Option<&SequenceId>) -> String {
    id.map_or(String::new(), |id| format!(" {id}"))
}

/// When a sequence ends if its client is gone, and which parameter says so.
fn without_end(idle: IdleRule) -> String {
    match idle {
        IdleRule::Never => {
            "a sequence lives until its END (idle_sequence_cleanup, sequence_cleaner_poll_wait_minutes)".to_owned()
        }
        IdleRule::After(limit) => {
            format!("a sequence ends {limit:?} after its last successful request (sequence_idle_timeout_ms)")
        }
        IdleRule::TwoScans(period) => format!(
            "a sequence ends {period:?} to {:?} after its last successful request \
             (sequence_cleaner_poll_wait_minutes)",
            2 * period
        ),
    }
}

fn of_itself(id: &SequenceId) -> String {
    format!("STATE_CONFLICT: 'clone_of' names sequence {id}, which the request starts")
}

/// A sequence that has to be looked for in a store, or entered there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    pub lane: u32,
    pub id: SequenceId,
    /// Its first request is a START, so it has to be entered.
    pub starts: bool,
}

#[derive(Debug)]
pub struct Ready<R> {
    pub lane: u32,
    pub id: SequenceId,
    pub request: R,
    pub begins: Begins,
}

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

#[derive(Debug)]
pub struct Work<R> {
    /// The requests of the next batch, each of another sequence.
    pub ready: Vec<Ready<R>>,
    /// Sequences of this worker that ended without a request, so that it still has their states.
    pub over: Vec<Over>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    pub lane: u32,
    pub why: OverBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverBy {
    /// Another START replaced it, or its state is lost.
    Replaced,
    Idle,
    Released,
}

#[derive(Clone)]
pub(super) struct Ids {
    reuse: IdReuse,
    next: u64,
}

impl Ids {
    pub const fn new(reuse: IdReuse, first: u64) -> Self {
        Self { reuse, next: first }
    }

    /// The next number that isn't the id of a live sequence; never 0.
    pub fn next(&mut self, is_live: impl Fn(&SequenceId) -> bool) -> SequenceId {
        loop {
            let id = SequenceId::Number(self.next);
            // To Triton, 0 is no id.
            let is_free = self.next != 0 && !is_live(&id);
            if !is_free || self.reuse == IdReuse::Last {
                self.next = self.next.wrapping_add(1);
            }
            if is_free {
                return id;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(id: SequenceId) -> u64 {
        match id {
            SequenceId::Number(number) => number,
            SequenceId::Name(_) => unreachable!("ids are numbers"),
        }
    }

    #[test]
    fn ids_are_not_given_twice() {
        let mut ids = Ids::new(IdReuse::Last, 1);
        assert_eq!([(); 3].map(|()| number(ids.next(|_| false))), [1, 2, 3]);
    }

    #[test]
    fn the_id_of_a_sequence_that_is_over_is_given_at_once_if_asked_for() {
        let mut ids = Ids::new(IdReuse::AtOnce, 1);
        assert_eq!(number(ids.next(|_| false)), 1);
        assert_eq!(number(ids.next(|id| *id == SequenceId::Number(1))), 2);
        assert_eq!(number(ids.next(|_| false)), 2);
    }

    #[test]
    fn ids_of_clients_are_skipped_and_0_is_never_given() {
        for reuse in [IdReuse::Last, IdReuse::AtOnce] {
            let mut ids = Ids { reuse, next: u64::MAX };
            assert_eq!(number(ids.next(|id| *id == SequenceId::Number(u64::MAX))), 1);
        }
    }
}
