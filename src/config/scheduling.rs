//! `sequence_batching`: how core schedules sequences, how many there may be, and how long they may be idle.

use std::fmt;
use std::time::Duration;

use sequences::pool::SlotLimits;

use super::error::{ConfigError, field};
use super::own::OwnScheduling;
use super::parameters::{Parameters, bad};
use super::partial::OldestSequences;
use super::raw::{self, Int};
use super::resolved::unsigned;

/// Who schedules the sequences: core, with a strategy of `sequence_batching`, or this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    Direct,
    Oldest,
    Own(OwnScheduling),
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.write_str("direct"),
            Self::Oldest => f.write_str("oldest"),
            Self::Own(_) => f.write_str("own"),
        }
    }
}

/// The fewest slots of a slab of the reserve, if no parameter says how large slabs are.
const SMALLEST_RESERVE_SLAB: usize = 16;
/// The parameters of lazy buffers, which configurations for NVIDIA's stateful_backend have.
const LAZY_SIZES: [&str; 4] =
    ["initial_buffer_size", "subsequent_buffer_size", "buffer_alloc_threshold", "buffer_dealloc_threshold"];
const LAZY_USE_RATIO: f64 = 0.9;
const DEFAULT_IDLE_MARGIN: Duration = Duration::from_secs(1);
/// How long core may take, beyond the queue delay, to send what it has queued. Its threads wait for a CPU on a busy
/// machine, where 20 ms were not enough to keep two sequences apart. The margin only delays the second request of a
/// sequence that was started over without END.
pub(super) const QUIET_MARGIN: Duration = Duration::from_millis(250);

/// What `sequence_batching` says about one instance.
pub(super) struct Scheduling {
    pub strategy: Strategy,
    /// Sequences that core sends to one instance at a time.
    pub candidates: usize,
    /// How long core may wait for a batch to fill.
    pub queue_delay: Duration,
}

impl Scheduling {
    pub(super) fn new(batching: &raw::SequenceBatching, max_batch_size: usize) -> Result<Self, ConfigError> {
        if batching.iterative_sequence {
            return Err(field("sequence_batching.iterative_sequence", "true", "iterative sequences are not supported"));
        }
        let rows = max_batch_size.max(1);
        let delay = |name: &str, value| unsigned(name, value).map(|micros| limit(Duration::from_micros(micros as u64)));
        let Some(oldest) = &batching.oldest else {
            let direct = batching.direct.as_ref().map_or(Int(0), |direct| direct.max_queue_delay_microseconds);
            let queue_delay = delay("sequence_batching.direct.max_queue_delay_microseconds", direct)?;
            return Ok(Self { strategy: Strategy::Direct, candidates: rows, queue_delay });
        };
        let candidates =
            match unsigned("sequence_batching.oldest.max_candidate_sequences", oldest.max_candidate_sequences)? {
                0 => rows,
                candidates => candidates,
            };
        let queue_delay =
            delay("sequence_batching.oldest.max_queue_delay_microseconds", oldest.max_queue_delay_microseconds)?;
        Ok(Self { strategy: Strategy::Oldest, candidates, queue_delay })
    }
}

impl From<OwnScheduling> for Scheduling {
    fn from(own: OwnScheduling) -> Self {
        // A parked sequence keeps its slot.
        let parked = own.rules.parking.map_or(0, |parking| parking.most);
        let candidates = own.rules.max_sequences.saturating_add(parked);
        Self { strategy: Strategy::Own(own), candidates, queue_delay: Duration::ZERO }
    }
}

impl From<OldestSequences> for raw::SequenceBatching {
    fn from(OldestSequences { idle_us_max, candidates_max }: OldestSequences) -> Self {
        let int = |number: u32| Int(i64::from(number));
        let oldest = raw::Oldest { max_candidate_sequences: int(candidates_max), ..raw::Oldest::default() };
        Self { max_sequence_idle_microseconds: int(idle_us_max), oldest: Some(oldest), ..Self::default() }
    }
}

/// Sizes that batches are filled up to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// In ascending order; empty if batches are not padded.
    pub sizes: Vec<usize>,
}

impl fmt::Display for Padding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sizes.as_slice() {
            [] => f.write_str("the actual size"),
            [size] => write!(f, "{size}"),
            sizes => write!(f, "{sizes:?}"),
        }
    }
}

impl Padding {
    /// `always_pad_to_max_batch`: to the next `preferred_batch_size`, else to `most`, the most rows of a run.
    pub(super) fn new(
        parameters: &Parameters,
        batching: &raw::SequenceBatching,
        most: usize,
    ) -> Result<Self, ConfigError> {
        if !parameters.switch("always_pad_to_max_batch", false)? || most == 0 {
            return Ok(Self::default());
        }
        let preferred = batching.oldest.iter().flat_map(|oldest| &oldest.preferred_batch_size);
        let preferred = preferred.filter_map(|size| usize::try_from(size.0).ok());
        let mut sizes: Vec<usize> = preferred.filter(|&size| size > 0 && size < most).collect();
        sizes.push(most);
        sizes.sort_unstable();
        Ok(Self { sizes })
    }

    /// The rows of the run for a batch of `rows`.
    pub fn rows(&self, rows: usize) -> usize {
        self.sizes.iter().copied().find(|&size| size >= rows).unwrap_or(rows)
    }
}

/// How long a sequence may be idle in core.
pub(super) fn core_idle_limit(batching: &raw::SequenceBatching) -> Result<Duration, ConfigError> {
    let idle = unsigned("sequence_batching.max_sequence_idle_microseconds", batching.max_sequence_idle_microseconds)?;
    Ok(limit(Duration::from_micros(idle as u64)))
}

/// How much longer a sequence may be idle here than in core, because its last request may wait in core's queue; at
/// least `quiet`.
pub(super) fn idle_margin(parameters: &Parameters, quiet: Duration) -> Result<Duration, ConfigError> {
    let margin =
        parameters.number("sequence_idle_margin_microseconds", 0u64.., "a number of microseconds, 0 or more,")?;
    let margin = margin.map_or(DEFAULT_IDLE_MARGIN, Duration::from_micros);
    Ok(limit(margin.max(quiet)))
}

/// The bounds of the pool, with the rules that NVIDIA's stateful_backend has for its lazy buffers. There, each instance
/// has a pool; here the instances share one, so only the capacity grows with their number.
pub(super) fn slot_limits(
    parameters: &Parameters,
    scheduling: &Scheduling,
    max_batch_size: usize,
    instances: usize,
) -> Result<(SlotLimits, String), ConfigError> {
    let is_lazy = LAZY_SIZES.iter().any(|name| parameters.text(name).is_some());
    let (capacity, reason) = capacity(parameters, scheduling, instances, is_lazy)?;
    // For sequences that core already sends while an earlier one with their id still has its slot.
    let reserve = scheduling.candidates.saturating_mul(instances);
    let size = |name| parameters.number(name, 0usize.., "a number of sequences, 0 or more,");
    let first_slab = size("initial_buffer_size")?;
    let next_slab = size("subsequent_buffer_size")?;
    let grow_below = size("buffer_alloc_threshold")?;
    let shrink_above = size("buffer_dealloc_threshold")?;
    let (first_slab, next_slab, grow_below, shrink_above) = match (first_slab, next_slab, grow_below, shrink_above) {
        (None, None, None, None) => {
            let next_slab = max_batch_size.max(SMALLEST_RESERVE_SLAB);
            return Ok((SlotLimits { reserve, next_slab, ..SlotLimits::all_at_once(capacity) }, reason));
        }
        (Some(first), Some(next), Some(grow), Some(shrink)) => (first, next, grow, shrink),
        (first, next, grow, _) => {
            let name = match (first, next, grow) {
                (None, ..) => "initial_buffer_size",
                (_, None, _) => "subsequent_buffer_size",
                (.., None) => "buffer_alloc_threshold",
                _ => "buffer_dealloc_threshold",
            };
            return Err(ConfigError::MissingParameter {
                name,
                why: "'initial_buffer_size', 'subsequent_buffer_size', 'buffer_alloc_threshold' and \
                      'buffer_dealloc_threshold' are given all four or not at all"
                    .to_owned(),
            });
        }
    };
    let first_slab = first_slab.min(capacity);
    let limits = SlotLimits { capacity, reserve, first_slab, next_slab, grow_below, shrink_above };
    check_slabs(limits, max_batch_size, &reason)?;
    if shrink_above <= grow_below {
        log::warn!(
            "parameter 'buffer_dealloc_threshold' is {shrink_above}: it should be larger than buffer_alloc_threshold, \
             {grow_below}, or buffers come and go with every few sequences"
        );
    }
    Ok((limits, reason))
}

/// Checks the rules between `initial_buffer_size` (cut to the capacity), `subsequent_buffer_size` and
/// `buffer_alloc_threshold`.
fn check_slabs(limits: SlotLimits, max_batch_size: usize, capacity_reason: &str) -> Result<(), ConfigError> {
    let SlotLimits { capacity, first_slab, next_slab, grow_below, .. } = limits;
    let at_least_a_batch = |name, value: usize| {
        if value >= max_batch_size {
            return Ok(());
        }
        Err(bad(name, value, format!("it must not be smaller than max_batch_size, {max_batch_size}")))
    };
    if first_slab < max_batch_size && first_slab == capacity {
        return Err(bad(
            "initial_buffer_size",
            first_slab,
            format!(
                "capped by the pool's capacity ({capacity_reason}) it is smaller than max_batch_size, {max_batch_size}"
            ),
        ));
    }
    at_least_a_batch("initial_buffer_size", first_slab)?;
    at_least_a_batch("subsequent_buffer_size", next_slab)?;
    at_least_a_batch("buffer_alloc_threshold", grow_below)?;
    if grow_below > first_slab {
        return Err(bad(
            "buffer_alloc_threshold",
            grow_below,
            format!("it must not be larger than initial_buffer_size, {first_slab}"),
        ));
    }
    Ok(())
}

fn capacity(
    parameters: &Parameters,
    scheduling: &Scheduling,
    instances: usize,
    is_lazy: bool,
) -> Result<(usize, String), ConfigError> {
    const NAME: &str = "max_candidate_sequence_use_ratio";
    let candidates = scheduling.candidates;
    let written: Option<f64> = parameters.number(NAME, f64::MIN_POSITIVE..=1.0, "a number above 0 and up to 1")?;
    let (ratio, of) = match scheduling.strategy {
        // The default of stateful_backend, whose configurations have these parameters.
        Strategy::Oldest if is_lazy => (written.unwrap_or(LAZY_USE_RATIO), "max_candidate_sequences"),
        Strategy::Oldest => (written.unwrap_or(1.0), "max_candidate_sequences"),
        Strategy::Direct => (1.0, "sequences per batch"),
        Strategy::Own(_) => (1.0, "max_sequence_number"),
    };
    // The rounding error of `candidates * ratio` must not cost a slot.
    let per_instance = ((candidates as f64 * ratio + 1e-6).floor() as usize).max(1);
    let mut reason = format!("{of} {candidates}");
    if ratio != 1.0 || written.is_some() {
        reason = format!("{reason} × {NAME} {ratio}");
    }
    if instances > 1 {
        reason = format!("{reason} × {instances} instances");
    }
    Ok((per_instance.saturating_mul(instances), reason))
}

/// Longer than any sequence is idle, and short enough to be added to a time.
pub(super) const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// At most a year, because a longer time could overflow the clock.
fn limit(time: Duration) -> Duration {
    time.min(YEAR)
}
