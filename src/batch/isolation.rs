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
//! - Any other bad request makes no trusted row run again. If the last run of its sequence failed as well, it costs one
//!   run, its own. If its sequence is new, it costs a search among the new ones at most: which of several new sequences
//!   is at fault can only be found by running them.
//! - Runs apart that turn out to be unnecessary add up to one search for each fault; then all run together again.
//!
//! Not for: running anything, or what a fault is.

#![forbid(unsafe_code)]

use std::time::Instant;

use sequences::Good;

/// What is known of the sequence of a row, in the order in which rows run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It was there before the fault, or has sent enough good requests since. All rows have this while none fails.
    Trusted,
    /// It starts, or has sent few good requests since it started or failed.
    New,
    /// Its last run failed: its rows run alone.
    Failed,
}

pub struct Isolation {
    search: u32,
    /// Runs without a failure for which rows are still kept apart; 0 while all run together.
    allowance: u32,
    /// When the fault was found since which rows run apart.
    began: Instant,
}

impl Isolation {
    pub fn new(max_batch_size: usize) -> Self {
        let halvings = max_batch_size.max(1).next_power_of_two().ilog2();
        Self { search: 2 * halvings, allowance: 0, began: Instant::now() }
    }

    pub const fn is_over(&self) -> bool {
        self.allowance == 0
    }

    /// The standing of a row; `None` for one that starts its sequence or has none.
    pub fn standing(&self, good: Option<Good>) -> Standing {
        match good {
            _ if self.is_over() => Standing::Trusted,
            Some(good) if good.since < self.began || good.requests >= self.search => Standing::Trusted,
            Some(Good { requests: 0, .. }) => Standing::Failed,
            _ => Standing::New,
        }
    }

    /// A row has been found at fault: its run alone has failed.
    pub const fn failed(&mut self, now: Instant) {
        // A later fault does not make sequences new that were there before it.
        if self.is_over() {
            self.began = now;
        }
        self.allowance = self.search;
    }

    /// These rows have run together.
    pub fn ran(&mut self, mut rows: impl Iterator<Item = Option<Good>>) {
        if rows.any(|good| self.standing(good) != Standing::Trusted) {
            // Rows that are kept apart have run without a failure, so this run apart was needless.
            self.allowance -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const ROWS: usize = 16;
    const SEARCH: u32 = 8;

    #[test]
    fn all_run_together_until_a_fault_and_again_after_as_many_needless_runs_as_a_search_has() {
        let (mut isolation, now) = (Isolation::new(ROWS), Instant::now());
        let since = |since, requests| Some(Good { requests, since });
        let rows = [since(now, SEARCH), since(now, SEARCH - 1), None, since(now, 0)];
        assert_eq!(rows.map(|good| isolation.standing(good)), [Standing::Trusted; 4]);
        isolation.failed(now);
        isolation.failed(now + Duration::from_secs(1));
        use Standing::{Failed, New, Trusted};
        assert_eq!(rows.map(|good| isolation.standing(good)), [Trusted, New, New, Failed]);
        let before = since(now - Duration::from_secs(1), 1);
        (0..100).for_each(|_| isolation.ran([before; 2].into_iter()));
        for _ in 0..SEARCH {
            assert!(!isolation.is_over());
            isolation.ran([before, None].into_iter());
        }
        assert!(isolation.is_over());
    }

    #[test]
    fn without_batches_nothing_is_kept_apart() {
        let mut isolation = Isolation::new(0);
        isolation.failed(Instant::now());
        assert!(isolation.is_over());
    }

    /// The good requests of a row's sequence, and whether it is bad.
    type Sent = (Option<Good>, bool);

    /// Runs rows as an instance does. Counts the runs.
    fn run(isolation: &mut Isolation, batch: &[Sent], now: Instant, runs: &mut u32) {
        *runs += 1;
        match batch.split_at(batch.len() / 2) {
            _ if batch.iter().all(|(_, is_bad)| !is_bad) => isolation.ran(batch.iter().map(|(good, _)| *good)),
            ([], _) => isolation.failed(now),
            (first, second) => {
                run(isolation, first, now, runs);
                run(isolation, second, now, runs);
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
            let mut live: [Option<Good>; ROWS] = [None; ROWS];
            let mut now = Instant::now();
            let mut isolation = Isolation::new(ROWS);
            let (mut runs, mut bad, mut needed) = (0, 0, 0);
            for payload in &payloads {
                let mut rows: Vec<Sent> = Vec::new();
                now += Duration::from_secs(1);
                for (index, &(is_there, starts, ends, fails)) in payload.iter().enumerate() {
                    if is_there {
                        let (good, is_bad) = (live[index].filter(|_| starts > 0), fails == 0);
                        rows.push((good, is_bad));
                        live[index] = match good {
                            _ if ends == 0 => None,
                            Some(_) if is_bad => Some(Good { requests: 0, since: now }),
                            Some(good) => Some(Good { requests: good.requests + 1, ..good }),
                            None => (!is_bad).then_some(Good { requests: 1, since: now }),
                        };
                        bad += u32::from(is_bad);
                    }
                }
                needed += u32::from(!rows.is_empty());
                while !rows.is_empty() {
                    rows.sort_by_key(|(good, _)| isolation.standing(*good));
                    let standing = isolation.standing(rows[0].0);
                    let like_first = rows.iter().take_while(|(good, _)| isolation.standing(*good) == standing);
                    let count = if standing == Standing::Failed { 1 } else { like_first.count() };
                    let (batch, before): (Vec<_>, _) = (rows.drain(..count).collect(), runs);
                    run(&mut isolation, &batch, now, &mut runs);
                    if batch.iter().all(|(_, is_bad)| !is_bad) || standing == Standing::Failed {
                        prop_assert_eq!(runs, before + 1, "run once");
                    }
                }
            }
            prop_assert!(runs <= needed + 2 * SEARCH * bad, "{} runs of {} payloads for {} bad requests", runs, needed, bad);
        }
    }
}
