//! The scheduling of a model whose configuration has no `sequence_batching`.

use std::fmt;
use std::time::Duration;

use sequences::scheduler::{IdReuse, IdleRule, OnDuplicateStart, Parking, Rules};

use super::error::{ConfigError, field};
use super::parameters::{Parameters, bad};
use super::raw;
use super::scheduling::YEAR;

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

/// How this backend schedules a model itself.
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
