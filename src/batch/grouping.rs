//! Decides which rows can run together, and which rows run together after a run has failed.
//!
//! Rows that differ only in the length of an input or of states that are padded can, but a long one must not make many
//! short ones take its room: see [`Lengths`].
//!
//! If a batch cannot be run, ONNX Runtime does not say which row is at fault. The batch is halved until the rows at
//! fault run alone. Each of them costs up to two further runs per halving. A client that keeps sending bad requests
//! must not cause this cost for all others with each payload, so after a fault the rows run apart by their
//! [`Standing`], and the trusted ones run first.
//!
//! The bounds. A *search* is the largest number of further runs that one row can cause, which is `2 *
//! log2(max_batch_size)`:
//!
//! - A bad request of a trusted sequence costs a search. The sequence has to send as many good requests as a search has
//!   runs before it is trusted again.
//! - Any other bad request makes no trusted row run again. If the last run of its sequence failed as well, it costs one
//!   run, its own. If its sequence is new, it costs a search among the new ones at most: which of several new sequences
//!   is at fault can only be found by running them.
//! - Runs apart that turn out to be unnecessary add up to one search for each fault; then all run together again.
//!
//! Not for: running anything, or deciding what a fault is.

use std::time::Instant;

use rows::tensor::{STRING_BYTES, element_count};
use sequences::Good;
use smallvec::SmallVec;

use super::Row;
use super::gather::shared_values;
use crate::binding::{Binding, GrowingPadding, ShapeForm};
use crate::config::FirstRequest;

/// Bytes to which an input, or the padded states, may be filled up whatever the lengths of the rows are: 64 rows of a
/// second of speech, in fp32 at 16 kHz.
const PADDED_BYTES: usize = 64 * 16_000 * 4;

/// What two rows must have in common. Made once per instance; a model in which nothing varies asks for nothing.
#[derive(Default)]
pub struct Grouping {
    optional: Vec<usize>,
    shapes: Vec<Shape>,
    shared: Vec<usize>,
    has_shared_values: bool,
    pub has_open_states: bool,
    /// How states of different lengths share a run, if they do.
    pub padding: Option<GrowingPadding>,
}

struct Shape {
    position: usize,
    /// The dimension of a request in which rows may differ, as they are padded.
    padded: Option<usize>,
    /// The dimension of a request in which the first one of a sequence is longer than others, and by how much.
    first_is_longer: Option<(usize, usize)>,
    element_bytes: usize,
}

/// How long the rows of a padded input, or of the padded states, are, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    shortest: usize,
    longest: usize,
}

impl Lengths {
    const NONE: Self = Self { shortest: usize::MAX, longest: 0 };

    fn with(self, row: usize) -> Self {
        Self { shortest: self.shortest.min(row), longest: self.longest.max(row) }
    }

    /// Whether as many rows may be filled up to the longest: at most half of the bytes are padding, or they are few.
    const fn may_share(self, rows: usize) -> bool {
        self.longest.div_ceil(2) <= self.shortest || self.longest.saturating_mul(rows) <= PADDED_BYTES
    }
}

pub struct Joining<'a> {
    grouping: &'a Grouping,
    most: usize,
    pub rows: Vec<Row>,
    /// Of the inputs whose shape varies, and last of the padded states.
    lengths: SmallVec<[Lengths; 3]>,
}

impl Joining<'_> {
    /// Takes the row if it can run with those that are there; returns it if it cannot.
    pub fn join(&mut self, row: Row) -> Option<Row> {
        let is_like = |first: &Row| self.grouping.together(&row, first);
        let bytes = self.grouping.shapes.iter().map(|shape| shape.bytes(&row));
        let of_states = self.grouping.padding.as_ref().map_or(0, |padding| padding.bytes(&row.state.dims));
        let bytes = bytes.chain(std::iter::once(of_states));
        let lengths: SmallVec<[_; 3]> = self.lengths.iter().zip(bytes).map(|(of, bytes)| of.with(bytes)).collect();
        let rows = self.rows.len() + 1;
        if rows > self.most
            || !self.rows.first().is_none_or(is_like)
            || !lengths.iter().all(|lengths| lengths.may_share(rows))
        {
            return Some(row);
        }
        self.rows.push(row);
        self.lengths = lengths;
        None
    }
}

impl Grouping {
    pub fn new(binding: &Binding) -> Self {
        let mut grouping = Self {
            has_shared_values: binding.generated().any(|(input, _)| input.batch_axis.is_none()),
            has_open_states: binding.states.iter().any(|state| state.dims.contains(&-1)),
            padding: binding.growing_padding.clone(),
            ..Self::default()
        };
        for (input, request) in binding.request_inputs() {
            if request.optional {
                grouping.optional.push(request.position);
            }
            if request.form == ShapeForm::Unbatched {
                grouping.shared.push(request.position);
            }
            let varies = |(axis, &dim): (usize, &i64)| dim < 0 && input.batch_axis != Some(axis);
            if input.dims.iter().enumerate().any(varies) {
                let in_front = if request.form == ShapeForm::Plain { 0 } else { 1 };
                grouping.shapes.push(Shape {
                    position: request.position,
                    padded: request.ragged_axis.filter(|_| request.is_padded).map(|axis| axis + in_front),
                    first_is_longer: request
                        .context
                        .filter(|context| context.first == FirstRequest::Whole)
                        .map(|context| (context.axis + in_front, context.length)),
                    element_bytes: input.data_type.byte_size().unwrap_or(STRING_BYTES),
                });
            }
        }
        grouping
    }

    /// Whether all rows of the model can run together.
    pub fn is_any(&self) -> bool {
        self.optional.is_empty()
            && self.shapes.is_empty()
            && self.shared.is_empty()
            && !self.has_shared_values
            && !self.has_open_states
    }

    pub fn batch(&self, most: usize) -> Joining<'_> {
        let lengths = (0..=self.shapes.len()).map(|_| Lengths::NONE).collect();
        Joining { grouping: self, most, rows: Vec::new(), lengths }
    }

    /// Whether two rows can run together, if their lengths allow it.
    fn together(&self, a: &Row, b: &Row) -> bool {
        let input = |row: &Row, position: usize| row.request.input(position).is_some();
        self.optional.iter().all(|&position| input(a, position) == input(b, position))
            && self.shapes.iter().all(|shape| shape.is_same(a, b))
            // Decoding has copied both, so that the value that runs is the one that is compared here.
            && self.shared.iter().all(|&position| match (a.request.input(position), b.request.input(position)) {
                (Some(a), Some(b)) => a.is_same(b),
                _ => true,
            })
            && shared_values(a) == shared_values(b)
            && (a.state.dims == b.state.dims
                || self.padding.as_ref().is_some_and(|padding| padding.is_for(&a.state.dims, &b.state.dims)))
    }
}

impl Shape {
    fn is_same(&self, a: &Row, b: &Row) -> bool {
        let (Some(of_a), Some(of_b)) = (a.request.input(self.position), b.request.input(self.position)) else {
            return true;
        };
        let (a, b) = (self.in_model(a, of_a.dims()), self.in_model(b, of_b.dims()));
        // A row without elements has nothing to be filled up from: what a model makes of it is its own affair.
        let differ = |axis: usize| a[axis] != b[axis] && (self.padded != Some(axis) || a[axis] == 0 || b[axis] == 0);
        a.len() == b.len() && !(0..a.len()).any(differ)
    }

    /// The dims of a row's request as if it were the first of its sequence.
    fn in_model(&self, row: &Row, dims: &[i64]) -> SmallVec<[i64; 8]> {
        let mut dims = SmallVec::from_slice(dims);
        if let Some((axis, by)) = self.first_is_longer.filter(|_| !row.state.is_first) {
            dims[axis] += by as i64;
        }
        dims
    }

    /// Bytes of a row; they differ in the length alone where rows can run together.
    fn bytes(&self, row: &Row) -> usize {
        let count = row.request.input(self.position).and_then(|input| element_count(input.dims()));
        count.unwrap_or(0).saturating_mul(self.element_bytes)
    }
}

/// The standing of a row's sequence, in the order in which rows run.
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
    /// When the fault was found that made rows run apart.
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
        // A fault after rows have run together again gets its own time, so that sequences that began before it do not
        // count as new.
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
    use proptest::prelude::*;

    use super::*;

    /// The lengths of the rows that join, in their order.
    fn join(rows: &[usize]) -> Vec<usize> {
        let (mut joined, mut lengths) = (Vec::new(), Lengths::NONE);
        for &row in rows {
            if lengths.with(row).may_share(joined.len() + 1) {
                lengths = lengths.with(row);
                joined.push(row);
            }
        }
        joined
    }

    #[test]
    fn small_inputs_are_filled_up_whatever_the_lengths() {
        assert_eq!(join(&[4, 64_000, 0, 1]), [4, 64_000, 0, 1]);
        assert_eq!(join(&[64_000; 100]).len(), 100);
    }

    #[test]
    fn a_long_row_runs_without_the_short_ones_and_with_those_half_as_long() {
        let long = 20 << 20;
        assert_eq!(join(&[long, 64, 64, long / 2, long / 2 - 1]), [long, long / 2]);
        assert_eq!(join(&[64, long, 64]), [64, 64]);
        assert_eq!(join(&[usize::MAX, 1]), [usize::MAX]);
    }

    proptest! {
        #[test]
        fn at_most_half_of_a_large_input_is_padding(rows in prop::collection::vec(0usize..30_000_000, 1..64)) {
            let joined = join(&rows);
            prop_assert_eq!(joined.first(), rows.first(), "the first row runs, however long it is");
            let filled = joined.len() * joined.iter().max().unwrap();
            prop_assert!(filled <= PADDED_BYTES || filled <= 2 * joined.iter().sum::<usize>() + joined.len());
        }
    }
}

#[cfg(test)]
mod isolation_tests {
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
