//! A model's sequences: who schedules them, core (`sequence_batching`) or this backend, and by which rules; to how many
//! rows their batches are filled up ([`Padding`]); and how many sequences there is room for.

use std::fmt;
use std::time::Duration;

use sequences::pool::SlotLimits;
use sequences::scheduler::{IdReuse, IdleRule, OnDuplicateStart, Parking, Rules};

use super::parameters::{LAZY_SIZES, Parameters};
use super::raw::{ConfigError, Int, ModelConfig, Oldest, Result, SequenceBatching, bad, field, unsigned};

/// Who schedules the sequences: core, with a strategy of `sequence_batching`, or this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    Direct,
    Oldest,
    Own(OwnScheduling),
}

// As in OpenVINO Model Server, whose parameter it is.
const MAX_SEQUENCES: usize = 500;
/// The name of the time between two scans, as a parameter and on the server's command line.
pub const POLL_WAIT: &str = "sequence_cleaner_poll_wait_minutes";
// As in OpenVINO Model Server.
const SCANS_OF_OVMS: IdleRule = IdleRule::TwoScans(Duration::from_secs(300));
// A user who writes an option of OpenVINO Model Server expects its rule for idle sequences.
const OF_OVMS: [&str; 4] = ["stateful", "max_sequence_number", "idle_sequence_cleanup", POLL_WAIT];
// Completion writes the same time into `sequence_batching`, so a model behaves alike with either scheduler.
const IDLE_MS: u64 = 60_000;
const LONGEST_WAIT_MS: u64 = 10_000;
const MAX_QUEUED: usize = 100;
const MOST_WORKERS: usize = 1024;
const MOST_PARKED: usize = 100;

// Longer than any sequence is idle, and short enough to be added to a time without an overflow.
pub(super) const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

const DEFAULT_IDLE_MARGIN: Duration = Duration::from_secs(1);
// How long core may take, beyond the queue delay, to send what it has queued. Its threads wait for a CPU on a busy
// machine, where 20 ms were not enough to keep two sequences apart. The margin only delays the second request of a
// sequence that was started over without END.
pub(super) const QUIET_MARGIN: Duration = Duration::from_millis(250);

/// What `sequence_batching` says about one instance.
pub(super) struct Scheduling {
    pub strategy: Strategy,
    pub candidates: usize,
    /// How long core may wait for a batch to fill.
    pub queue_delay: Duration,
}

impl Scheduling {
    pub(super) fn new(batching: &SequenceBatching, max_batch_size: usize) -> Result<Self> {
        if batching.iterative_sequence {
            return Err(field("sequence_batching.iterative_sequence", "true", "iterative sequences are not supported"));
        }
        let (strategy, name, written, delay) = match &batching.oldest {
            None => (Strategy::Direct, "direct", Int(0), batching.direct.max_queue_delay_microseconds),
            Some(Oldest { max_candidate_sequences, max_queue_delay_microseconds, .. }) => {
                (Strategy::Oldest, "oldest", *max_candidate_sequences, *max_queue_delay_microseconds)
            }
        };
        let written = unsigned("sequence_batching.oldest.max_candidate_sequences", written)?;
        let delay_us = unsigned(&format!("sequence_batching.{name}.max_queue_delay_microseconds"), delay)?;
        // Core gives each instance one slot per row of a batch; with `oldest`, only if `max_candidate_sequences` isn't
        // written.
        let candidates = if written > 0 { written } else { max_batch_size.max(1) };
        Ok(Self { strategy, candidates, queue_delay: Duration::from_micros(delay_us as u64).min(YEAR) })
    }
}

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
    pub(super) fn new(parameters: &Parameters, batching: &SequenceBatching, most: usize) -> Result<Self> {
        if !parameters.switch("always_pad_to_max_batch", false)? || most == 0 {
            return Ok(Self::default());
        }
        let preferred = batching.oldest.iter().flat_map(|oldest| &oldest.preferred_batch_size);
        let preferred = preferred.filter_map(|size| usize::try_from(size.0).ok());
        let mut sizes: Vec<usize> = preferred.filter(|&size| size > 0 && size < most).collect();
        // A batch that is larger than each preferred size is still filled up.
        sizes.push(most);
        sizes.sort_unstable();
        Ok(Self { sizes })
    }

    pub fn rows(&self, rows: usize) -> usize {
        self.sizes.iter().copied().find(|&size| size >= rows).unwrap_or(rows)
    }
}

/// How much longer a sequence may be idle here than in core; at least `quiet`.
pub(super) fn idle_margin(parameters: &Parameters, quiet: Duration) -> Result<Duration> {
    // The last request of a sequence may still wait in core's queue. It would be refused if the sequence ended earlier.
    let margin =
        parameters.number("sequence_idle_margin_microseconds", 0u64.., "a number of microseconds, 0 or more,")?;
    Ok(margin.map_or(DEFAULT_IDLE_MARGIN, Duration::from_micros).max(quiet).min(YEAR))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnScheduling {
    pub rules: Rules,
    /// Number of threads that run batches, each with batch buffers of its own.
    pub workers: usize,
}

impl fmt::Display for OwnScheduling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rules { max_sequences, max_waiting, longest_wait, max_queued, idle, parking, .. } = self.rules;
        let Rules { on_duplicate_start, id_reuse, .. } = self.rules;
        write!(f, "{} worker(s), at most {max_sequences} sequences", self.workers)?;
        write!(f, ", up to {max_queued} requests of each wait")?;
        if max_waiting > 0 {
            write!(f, ", {max_waiting} STARTs wait for up to {longest_wait:?}")?;
        }
        match idle {
            IdleRule::Never => write!(f, ", idle ones stay")?,
            IdleRule::After(limit) => write!(f, ", idle limit {limit:?}")?,
            IdleRule::TwoScans(period) => write!(f, ", idle ones end after two scans, {period:?} apart")?,
        }
        if on_duplicate_start == OnDuplicateStart::Restart {
            write!(f, ", a START of a live id restarts it")?;
        }
        if let Some(Parking { time, most }) = parking {
            write!(f, ", up to {most} idle ones are parked for {time:?}")?;
        }
        if id_reuse == IdReuse::AtOnce { write!(f, ", ids are reused at once") } else { Ok(()) }
    }
}

impl OwnScheduling {
    /// `scans`: the time between two scans from the server's command line.
    pub(super) fn new(parameters: &Parameters, scans: Option<IdleRule>) -> Result<Self> {
        let count = |name, of| parameters.number(name, 1usize.., &format!("a number of {of}, 1 or more,"));
        let waiting = parameters.number("max_queue_size", 0usize.., "a number of requests, 0 or more,")?;
        let wait = parameters.number("queue_timeout_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
        let duplicate = [("reject", OnDuplicateStart::Reject), ("restart", OnDuplicateStart::Restart)];
        let reuse = [("last", IdReuse::Last), ("ovms", IdReuse::AtOnce)];
        let idle = idle_rule(parameters, scans)?;
        let workers = format!("a number of threads from 1 to {MOST_WORKERS}");
        Ok(Self {
            rules: Rules {
                max_sequences: count("max_sequence_number", "sequences")?.unwrap_or(MAX_SEQUENCES),
                max_waiting: waiting.unwrap_or(0),
                longest_wait: Duration::from_millis(wait.unwrap_or(LONGEST_WAIT_MS)).min(YEAR),
                max_queued: count("max_queued_requests_per_sequence", "requests")?.unwrap_or(MAX_QUEUED),
                on_duplicate_start: parameters
                    .choice("on_duplicate_start", &duplicate)?
                    .unwrap_or(OnDuplicateStart::Reject),
                id_reuse: parameters.choice("id_reuse", &reuse)?.unwrap_or(IdReuse::Last),
                idle,
                parking: parking(parameters, idle)?,
                looks_up: false,
                enters_starts: false,
                // With a store, the workers choose another one, because other servers give ids, too.
                first_id: 1,
            },
            workers: parameters.number("worker_count", 1..=MOST_WORKERS, &workers)?.unwrap_or(1),
        })
    }
}

/// The rule for this time between two scans, in minutes. With 0, there are no scans. `None` if no clock can count the
/// time.
pub fn scans(text: &str) -> Option<IdleRule> {
    let minutes: f64 = text.trim().parse().ok()?;
    let period = Duration::try_from_secs_f64(60.0 * minutes).ok()?;
    let rule = IdleRule::TwoScans(period.clamp(Duration::from_millis(1), YEAR));
    Some(if period.is_zero() { IdleRule::Never } else { rule })
}

/// `sequence_idle_timeout_ms` if it is given, the rule of OpenVINO Model Server if one of its options is, else a time.
fn idle_rule(parameters: &Parameters, by_server: Option<IdleRule>) -> Result<IdleRule> {
    let read = |text| scans(text).ok_or_else(|| bad(POLL_WAIT, text, "a number of minutes, 0 or more, is expected"));
    let scans = parameters.text(POLL_WAIT).map(read).transpose()?.or(by_server);
    let cleanup = parameters.flag("idle_sequence_cleanup", true)?;
    let timeout = parameters.number("sequence_idle_timeout_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
    let is_of_ovms = OF_OVMS.iter().any(|name| parameters.text(name).is_some());
    // A time that is written for the model overrides OVMS's rule, which overrides this backend's own default.
    Ok(match (timeout, scans) {
        (Some(timeout), _) => IdleRule::After(Duration::from_millis(timeout).min(YEAR)),
        _ if !cleanup => IdleRule::Never,
        (None, Some(scans)) => scans,
        (None, None) if is_of_ovms => SCANS_OF_OVMS,
        (None, None) => IdleRule::After(Duration::from_millis(IDLE_MS)),
    })
}

fn parking(parameters: &Parameters, idle: IdleRule) -> Result<Option<Parking>> {
    const MOST: &str = "max_parked_sequences";
    let time = parameters.number("park_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
    let most = parameters.number(MOST, 1usize.., "a number of sequences, 1 or more,")?;
    let Some(time) = time else {
        parameters.refuse(MOST, "it has an effect only with 'park_ms'")?;
        return Ok(None);
    };
    if idle == IdleRule::Never {
        return Err(bad("park_ms", time, "it has an effect only if idle sequences are removed"));
    }
    Ok(Some(Parking { time: Duration::from_millis(time).min(YEAR), most: most.unwrap_or(MOST_PARKED) }))
}

/// Refuses what core would do in front of the backend that breaks sequences.
pub(super) fn check_core(raw: &ModelConfig) -> Result<()> {
    if raw.response_cache.enable {
        let why = "core would answer a request of one sequence with the answer of another: leave it out";
        return Err(field("response_cache.enable", "true", why));
    }
    let levels = raw.dynamic_batching.as_ref().map_or(0, |batching| batching.priority_levels.0);
    if levels > 0 {
        let why = "requests of a sequence with different priorities would overtake each other: leave it out";
        return Err(field("dynamic_batching.priority_levels", levels.to_string(), why));
    }
    if !raw.model_warmup.is_empty() {
        let why = "its requests have no sequence: write parameter 'warmup_batch_sizes', or 'sequence_batching'";
        return Err(field("model_warmup", format!("{} sample(s)", raw.model_warmup.len()), why));
    }
    Ok(())
}

/// The fewest slots of a slab of the reserve, if no parameter says how large slabs are.
const SMALLEST_RESERVE_SLAB: usize = 16;
const LAZY_USE_RATIO: f64 = 0.9;

/// The bounds of the pool, with the rules that NVIDIA's stateful_backend has for its lazy buffers.
pub(super) fn slot_limits(
    parameters: &Parameters,
    scheduling: &Scheduling,
    max_batch_size: usize,
    instances: usize,
) -> Result<(SlotLimits, String)> {
    // There, each instance has a pool. Here the instances share one, so only the capacity grows with their number.
    let is_lazy = LAZY_SIZES.iter().any(|name| parameters.text(name).is_some());
    let (capacity, reason) = capacity(parameters, scheduling, instances, is_lazy)?;
    // For sequences that core already sends while an earlier one with their id still has its slot.
    let reserve = scheduling.candidates.saturating_mul(instances);
    if !is_lazy {
        let next_slab = max_batch_size.max(SMALLEST_RESERVE_SLAB);
        return Ok((SlotLimits { reserve, next_slab, ..SlotLimits::all_at_once(capacity) }, reason));
    }
    let size = |name| parameters.number(name, 0usize.., "a number of sequences, 0 or more,");
    let sizes: Vec<Option<usize>> = LAZY_SIZES.into_iter().map(size).collect::<Result<_, _>>()?;
    let [Some(first_slab), Some(next_slab), Some(grow_below), Some(shrink_above)] = sizes[..] else {
        let why = "'initial_buffer_size', 'subsequent_buffer_size', 'buffer_alloc_threshold' and \
                   'buffer_dealloc_threshold' are given all four or not at all";
        let name = LAZY_SIZES[sizes.iter().take_while(|size| size.is_some()).count()];
        return Err(ConfigError::MissingParameter { name, why: why.to_owned() });
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

fn check_slabs(limits: SlotLimits, max_batch_size: usize, capacity_reason: &str) -> Result<()> {
    let SlotLimits { capacity, first_slab, next_slab, grow_below, .. } = limits;
    // The size was cut to the capacity. The error below would show that number, which is not in the configuration.
    if first_slab < max_batch_size && first_slab == capacity {
        let why = format!(
            "capped by the pool's capacity ({capacity_reason}) it is smaller than max_batch_size, {max_batch_size}"
        );
        return Err(bad("initial_buffer_size", first_slab, why));
    }
    for (name, value) in LAZY_SIZES.into_iter().zip([first_slab, next_slab, grow_below]) {
        if value < max_batch_size {
            return Err(bad(name, value, format!("it must not be smaller than max_batch_size, {max_batch_size}")));
        }
    }
    if grow_below > first_slab {
        let why = format!("it must not be larger than initial_buffer_size, {first_slab}");
        return Err(bad("buffer_alloc_threshold", grow_below, why));
    }
    Ok(())
}

/// The number of sequences that a pool has room for, and the reason for that number.
fn capacity(
    parameters: &Parameters,
    scheduling: &Scheduling,
    instances: usize,
    is_lazy: bool,
) -> Result<(usize, String)> {
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
