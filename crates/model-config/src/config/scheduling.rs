//! Who schedules sequences, and by which rules: core (`sequence_batching`), or this backend if that is not written.

use std::fmt;
use std::time::Duration;

use sequences::scheduler::{IdReuse, IdleRule, OnDuplicateStart, Parking, Rules};
use serde_json::{Value, json};

use super::error::{ConfigError, bad, field};
use super::parameters::Parameters;
use super::raw::{self, Int, unsigned};

/// Who schedules the sequences: core, with a strategy of `sequence_batching`, or this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Core, with `sequence_batching.direct`.
    Direct,
    /// Core, with `sequence_batching.oldest`.
    Oldest,
    /// This backend.
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

/// OpenVINO Model Server's default of `max_sequence_number`.
const MAX_SEQUENCES: usize = 500;
/// The name of the time between two scans, as a parameter and on the server's command line.
pub const POLL_WAIT: &str = "sequence_cleaner_poll_wait_minutes";
/// OpenVINO Model Server's default of it.
const POLL_WAIT_MINUTES: f64 = 5.0;
/// Options of OpenVINO Model Server. Its rule for idle sequences is the default if one of them is written.
const OF_OVMS: [&str; 4] = ["stateful", "max_sequence_number", "idle_sequence_cleanup", POLL_WAIT];
/// The default of `sequence_idle_timeout_ms` without these. A `sequence_batching` that is filled in has the same time.
const IDLE_MS: u64 = 60_000;
const LONGEST_WAIT_MS: u64 = 10_000;
const MAX_QUEUED: usize = 100;
const MOST_WORKERS: usize = 1024;
const MOST_PARKED: usize = 100;

/// Parameters that a model with `sequence_batching` must not have.
const PARAMETERS: [&str; 12] = [
    "id_reuse",
    "idle_sequence_cleanup",
    "max_parked_sequences",
    "max_queue_size",
    "max_queued_requests_per_sequence",
    "max_sequence_number",
    "on_duplicate_start",
    "park_ms",
    "queue_timeout_ms",
    POLL_WAIT,
    "sequence_idle_timeout_ms",
    "worker_count",
];

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
        // Core has so many slots for each instance, with `oldest` if `max_candidate_sequences` isn't written.
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

/// A `sequence_batching` with `oldest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OldestSequences {
    /// `max_sequence_idle_microseconds`.
    pub idle_us_max: u32,
    /// `max_candidate_sequences`.
    pub candidates_max: u32,
}

impl OldestSequences {
    pub(super) fn to_json(self) -> Value {
        json!({
            "max_sequence_idle_microseconds": self.idle_us_max,
            "oldest": { "max_candidate_sequences": self.candidates_max },
        })
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

/// How this backend schedules a model itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnScheduling {
    /// When requests wait and when sequences end.
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
    /// `poll_wait`: what the server's command line says of it.
    pub(super) fn new(parameters: &Parameters, poll_wait: Option<PollWait>) -> Result<Self, ConfigError> {
        let count = |name, of| parameters.number(name, 1usize.., &format!("a number of {of}, 1 or more,"));
        let waiting = parameters.number("max_queue_size", 0usize.., "a number of requests, 0 or more,")?;
        let wait = parameters.number("queue_timeout_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
        let duplicate = [("reject", OnDuplicateStart::Reject), ("restart", OnDuplicateStart::Restart)];
        let reuse = [("last", IdReuse::Last), ("ovms", IdReuse::AtOnce)];
        let idle = idle_rule(parameters, poll_wait)?;
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

    /// The first of [`PARAMETERS`] that is given.
    pub(super) fn first_parameter(parameters: &Parameters) -> Option<&'static str> {
        PARAMETERS.into_iter().find(|name| parameters.text(name).is_some())
    }
}

/// A time between two scans, in minutes; 0: no scans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PollWait(f64);

impl PollWait {
    /// `None` if the text isn't a number of minutes that a clock can count.
    pub fn new(text: &str) -> Option<Self> {
        let minutes: f64 = text.trim().parse().ok()?;
        Duration::try_from_secs_f64(60.0 * minutes).ok().map(|_| Self(minutes))
    }

    fn rule(self) -> IdleRule {
        match Duration::try_from_secs_f64(60.0 * self.0) {
            Ok(period) if !period.is_zero() => IdleRule::TwoScans(period.clamp(Duration::from_millis(1), YEAR)),
            _ => IdleRule::Never,
        }
    }
}

/// `sequence_idle_timeout_ms` if it is given, the rule of OpenVINO Model Server if one of its options is, else a time.
fn idle_rule(parameters: &Parameters, by_server: Option<PollWait>) -> Result<IdleRule, ConfigError> {
    let read =
        |text| PollWait::new(text).ok_or_else(|| bad(POLL_WAIT, text, "a number of minutes, 0 or more, is expected"));
    let scans = parameters.text(POLL_WAIT).map(read).transpose()?.or(by_server);
    let cleanup = parameters.flag("idle_sequence_cleanup", true)?;
    let timeout = parameters.number("sequence_idle_timeout_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
    let is_of_ovms = OF_OVMS.iter().any(|name| parameters.text(name).is_some());
    Ok(match (timeout, scans) {
        (Some(timeout), _) => IdleRule::After(Duration::from_millis(timeout).min(YEAR)),
        _ if !cleanup => IdleRule::Never,
        (None, Some(scans)) => scans.rule(),
        (None, None) if is_of_ovms => PollWait(POLL_WAIT_MINUTES).rule(),
        (None, None) => IdleRule::After(Duration::from_millis(IDLE_MS)),
    })
}

/// `park_ms` and `max_parked_sequences`.
fn parking(parameters: &Parameters, idle: IdleRule) -> Result<Option<Parking>, ConfigError> {
    const MOST: &str = "max_parked_sequences";
    let time = parameters.number("park_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
    let most = parameters.number(MOST, 1usize.., "a number of sequences, 1 or more,")?;
    match (time, most) {
        (Some(time), _) if idle == IdleRule::Never => {
            Err(bad("park_ms", time, "it has an effect only if idle sequences are removed"))
        }
        (Some(time), most) => {
            let time = Duration::from_millis(time).min(YEAR);
            Ok(Some(Parking { time, most: most.unwrap_or(MOST_PARKED) }))
        }
        (None, Some(most)) => Err(bad(MOST, most, "it has an effect only with 'park_ms'")),
        (None, None) => Ok(None),
    }
}

/// Refuses what core would do in front of the backend that breaks sequences.
pub(super) fn check_core(raw: &raw::ModelConfig) -> Result<(), ConfigError> {
    if raw.response_cache.enable {
        return Err(field(
            "response_cache.enable",
            "true",
            "core would answer a request of one sequence with the answer of another: leave it out",
        ));
    }
    let levels = raw.dynamic_batching.as_ref().map_or(0, |batching| batching.priority_levels.0);
    if levels > 0 {
        return Err(field(
            "dynamic_batching.priority_levels",
            levels.to_string(),
            "requests of a sequence with different priorities would overtake each other: leave it out",
        ));
    }
    if !raw.model_warmup.is_empty() {
        return Err(field(
            "model_warmup",
            format!("{} sample(s)", raw.model_warmup.len()),
            "its requests have no sequence: write parameter 'warmup_batch_sizes', or 'sequence_batching'",
        ));
    }
    Ok(())
}

/// Accepts the options that OpenVINO Model Server's configurations have for a stateful model.
pub(super) fn check_stateful(parameters: &Parameters) -> Result<(), ConfigError> {
    if !parameters.flag("stateful", true)? {
        return Err(bad("stateful", "false", "this backend serves stateful models: leave it out, or write 'true'"));
    }
    Ok(())
}

/// Longer than any sequence is idle, and short enough to be added to a time.
pub(super) const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// At most a year, because a longer time could overflow the clock.
fn limit(time: Duration) -> Duration {
    time.min(YEAR)
}
