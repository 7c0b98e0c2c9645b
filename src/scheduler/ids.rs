//! Ids for STARTs without one.

use crate::sequence::SequenceId;

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
    pub const fn new(reuse: IdReuse) -> Self {
        Self { reuse, next: 1 }
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
        let mut ids = Ids::new(IdReuse::Last);
        assert_eq!([(); 3].map(|()| number(ids.next(|_| false))), [1, 2, 3]);
    }

    #[test]
    fn the_id_of_a_sequence_that_is_over_is_given_at_once_if_asked_for() {
        let mut ids = Ids::new(IdReuse::AtOnce);
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
