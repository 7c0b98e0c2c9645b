//! Which rows run together after a run has failed.
//!
//! ONNX Runtime says that a batch cannot be run, but not because of which row. The batch is halved until the rows at
//! fault run alone: each costs up to two further runs per halving. A client that sends bad requests without end must
//! not make everyone pay that with each payload, so after a fault the rows run apart by their [`Standing`], and the
//! trusted ones first.
//!
//! The bounds, where a *search* is the most further runs that one row makes necessary, `2 * log2(max_batch_size)`:
//!
//! - A bad request of a trusted sequence costs a search. The sequence has to send as many good requests as a search has
//!   runs before it is trusted again.
//! - Any other bad request makes no trusted row run again. If the last request of its sequence failed as well, it costs
//!   one run, its own. If its sequence is new, it costs a search among the new ones at most: which of several new
//!   sequences is at fault can only be found by running them.
//! - Runs apart that turn out to be unnecessary add up to one search for each fault; then all run together again.
//!
//! Not for: running anything, or what a fault is.

#![forbid(unsafe_code)]

use foldhash::{HashMap, HashMapExt};
use sequences::pool::SlotId;

/// What is known of the sequence of a row, in the order in which rows run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It was there before the fault, or has sent enough good requests since. All rows have this while none fails.
    Trusted,
    /// It starts, or has sent few good requests since it started or failed.
    New,
    /// Its last request failed: its rows run alone.
    Failed,
}

/// A sequence, as a run sees it.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its slot; `None` for a request without a sequence.
    pub slot: Option<SlotId>,
    /// Its state is the initial one.
    pub is_fresh: bool,
    /// The request ends it.
    pub ends: bool,
}

/// What an instance knows of the sequences that had a part in failed runs.
pub struct Isolation {
    /// Runs of a search.
    search: u32,
    /// Runs without a failure for which rows are still kept apart; 0 while all run together.
    allowance: u32,
    /// Good requests of the sequences that are not trusted, since they started or failed. The key is the slab and the
    /// index of the slot, so there are never more entries than slots.
    good: HashMap<(u32, u32), (SlotId, u32)>,
}

impl Isolation {
    /// No fault so far, for batches of up to `max_batch_size` rows.
    pub fn new(max_batch_size: usize) -> Self {
        let halvings = max_batch_size.max(1).next_power_of_two().ilog2();
        Self { search: 2 * halvings, allowance: 0, good: HashMap::new() }
    }

    /// Whether all rows run together.
    pub const fn is_over(&self) -> bool {
        self.allowance == 0
    }

    /// The standing of a row's sequence.
    pub fn standing(&self, member: Member) -> Standing {
        if self.is_over() {
            return Standing::Trusted;
        }
        match member.slot.filter(|_| !member.is_fresh).map(|slot| self.good_requests(slot)) {
            None => Standing::New,
            Some(None) => Standing::Trusted,
            Some(Some(0)) => Standing::Failed,
            Some(Some(_)) => Standing::New,
        }
    }

    /// A row has been found at fault: its run alone has failed.
    pub fn failed(&mut self, member: Member) {
        self.allowance = self.search;
        // A START that fails leaves no sequence.
        match member.slot.filter(|_| !self.is_over() && !member.is_fresh && !member.ends) {
            Some(slot) => drop(self.good.insert(slot.slab_and_index(), (slot, 0))),
            None => self.forget(member),
        }
    }

    /// A batch of rows of one standing has run.
    pub fn ran(&mut self, batch: impl Iterator<Item = Member>) {
        if self.is_over() {
            return;
        }
        let mut is_trusted = true;
        for member in batch {
            is_trusted &= self.standing(member) == Standing::Trusted;
            self.note_good(member);
        }
        if !is_trusted {
            self.allowance -= 1;
        }
        if self.is_over() {
            self.good.clear();
        }
    }

    fn note_good(&mut self, member: Member) {
        let Some(slot) = member.slot.filter(|_| !member.ends) else { return self.forget(member) };
        let before = if member.is_fresh { Some(0) } else { self.good_requests(slot) };
        match before.map(|good| good + 1) {
            Some(good) if good < self.search => drop(self.good.insert(slot.slab_and_index(), (slot, good))),
            _ => self.forget(member),
        }
    }

    fn good_requests(&self, slot: SlotId) -> Option<u32> {
        self.good.get(&slot.slab_and_index()).filter(|(of, _)| *of == slot).map(|(_, good)| *good)
    }

    fn forget(&mut self, member: Member) {
        if let Some(slot) = member.slot {
            self.good.remove(&slot.slab_and_index());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use sequences::pool::{SlotLimits, SlotPool};

    const ROWS: usize = 16;
    const SEARCH: u32 = 8;

    fn slots(count: usize) -> Vec<SlotId> {
        let mut pool: SlotPool<(), ()> = SlotPool::new(SlotLimits::all_at_once(count));
        pool.add_slab((), count, 0);
        (0..count).map(|_| pool.acquire(()).unwrap()).collect()
    }

    const fn step(slot: SlotId) -> Member {
        Member { slot: Some(slot), is_fresh: false, ends: false }
    }

    const fn start(slot: SlotId) -> Member {
        Member { slot: Some(slot), is_fresh: true, ends: false }
    }

    #[test]
    fn all_run_together_until_a_fault_and_again_after_as_many_needless_runs_as_a_search_has() {
        let slots = slots(3);
        let mut isolation = Isolation::new(ROWS);
        assert!(isolation.is_over());
        assert_eq!(isolation.standing(start(slots[0])), Standing::Trusted);
        isolation.failed(step(slots[0]));
        assert_eq!(isolation.standing(step(slots[0])), Standing::Failed);
        assert_eq!(isolation.standing(step(slots[1])), Standing::Trusted);
        assert_eq!(isolation.standing(start(slots[2])), Standing::New);
        for _ in 0..100 {
            isolation.ran([step(slots[1])].into_iter());
        }
        for _ in 0..SEARCH {
            assert!(!isolation.is_over());
            isolation.ran([Member { ends: true, ..start(slots[2]) }].into_iter());
        }
        assert!(isolation.is_over());
        assert_eq!(isolation.standing(step(slots[0])), Standing::Trusted);
    }

    #[test]
    fn a_sequence_is_trusted_again_after_as_many_good_requests_as_a_search_has_runs() {
        let slots = slots(2);
        let mut isolation = Isolation::new(ROWS);
        for (member, first) in [(step(slots[0]), Standing::Failed), (start(slots[1]), Standing::New)] {
            isolation.failed(step(slots[0]));
            assert_eq!(isolation.standing(member), first);
            isolation.ran([member].into_iter());
            for _ in 1..SEARCH {
                isolation.failed(Member { slot: None, is_fresh: true, ends: true });
                assert_eq!(isolation.standing(Member { is_fresh: false, ..member }), Standing::New);
                isolation.ran([Member { is_fresh: false, ..member }].into_iter());
            }
            assert_eq!(isolation.standing(Member { is_fresh: false, ..member }), Standing::Trusted);
        }
    }

    #[test]
    fn without_batches_nothing_is_kept_apart() {
        let slots = slots(1);
        let mut isolation = Isolation::new(0);
        isolation.failed(step(slots[0]));
        assert!(isolation.is_over() && isolation.good.is_empty());
    }

    /// Runs of the rows as an instance makes them; each with whether it is bad. `again` is how often a trusted row ran
    /// after its first run failed.
    fn run(isolation: &mut Isolation, batch: &[(Member, bool)], runs: &mut u32) {
        *runs += 1;
        let is_bad = batch.iter().any(|(_, is_bad)| *is_bad);
        match batch {
            _ if !is_bad => isolation.ran(batch.iter().map(|(member, _)| *member)),
            [(member, _)] => isolation.failed(*member),
            _ => {
                let (first, second) = batch.split_at(batch.len() / 2);
                run(isolation, first, runs);
                run(isolation, second, runs);
            }
        }
    }

    proptest! {
        /// Sequences that do what they like: start, go on, end, be bad, in any order.
        #[test]
        fn each_bad_request_costs_two_searches_at_most_and_trusted_rows_run_again_for_their_own_only(
            payloads in prop::collection::vec(
                prop::collection::vec((any::<bool>(), 0u8..8, 0u8..8, 0u8..6), ROWS), 1..60),
        ) {
            let slots = slots(ROWS);
            let mut live = [false; ROWS];
            let mut isolation = Isolation::new(ROWS);
            let (mut runs, mut bad) = (0, 0);
            for payload in &payloads {
                let mut rows = Vec::new();
                for (index, &(is_there, starts, ends, fails)) in payload.iter().enumerate() {
                    if is_there {
                        let (is_fresh, ends, is_bad) = (!live[index] || starts == 0, ends == 0, fails == 0);
                        rows.push((Member { slot: Some(slots[index]), is_fresh, ends }, is_bad));
                        live[index] = !(ends || is_fresh && is_bad);
                        bad += u32::from(is_bad);
                    }
                }
                while !rows.is_empty() {
                    rows.sort_by_key(|(member, _)| isolation.standing(*member));
                    let standing = isolation.standing(rows[0].0);
                    let like_first = rows.iter().take_while(|(member, _)| isolation.standing(*member) == standing);
                    let count = if standing == Standing::Failed { 1 } else { like_first.count() };
                    let (batch, before): (Vec<_>, _) = (rows.drain(..count).collect(), runs);
                    run(&mut isolation, &batch, &mut runs);
                    if batch.iter().all(|(_, is_bad)| !is_bad) || standing == Standing::Failed {
                        prop_assert_eq!(runs, before + 1, "run once");
                    }
                }
            }
            let needed = payloads.iter().filter(|payload| payload.iter().any(|row| row.0)).count() as u32;
            prop_assert!(runs <= needed + 2 * SEARCH * bad, "{} runs of {} payloads for {} bad requests", runs, needed, bad);
            prop_assert!(isolation.good.len() <= ROWS);
        }
    }
}
