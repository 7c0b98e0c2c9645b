//! What the configuration says about scheduling, and ids for STARTs without one.

#![expect(missing_docs, reason = "the types and names say what they are")]

use std::time::Duration;

use crate::SequenceId;

/// How a model's sequences are scheduled.
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
    /// What a START of a live id does.
    pub on_duplicate_start: OnDuplicateStart,
    /// Which id a START without one gets.
    pub id_reuse: IdReuse,
    /// When a sequence without END is over.
    pub idle: IdleRule,
    /// What becomes of a sequence that was idle for too long; `None`: it is over.
    pub parking: Option<Parking>,
    /// A sequence that is not here may be in a store: its request waits until it has been looked for there.
    pub looks_up: bool,
    /// A START waits until its sequence has been entered in the store.
    pub enters_starts: bool,
    /// The number at which the ids begin that START gets if it has none.
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

/// What a START of a live id does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDuplicateStart {
    /// It is refused. The sequence goes on.
    Reject,
    /// It begins a new sequence, or is refused. The old one is over when its queued requests have run.
    Restart,
}

/// When a sequence without END is over. Only requests that succeed extend its life. It isn't removed while a request of
/// it is queued or running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleRule {
    Never,
    /// When no request has succeeded for this long.
    After(Duration),
    /// A scan takes place once in this time. A sequence is over when no request of it has succeeded since the scan before.
    TwoScans(Duration),
}

/// When an id that the scheduler gave may be given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdReuse {
    /// After all other numbers, so that a late request of one client doesn't reach the sequence of another.
    Last,
    /// With the next START, if it was the last one given and its sequence is over, as OpenVINO Model Server does.
    AtOnce,
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
