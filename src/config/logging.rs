//! What instances log.

use std::time::Duration;

use super::error::ConfigError;
use super::parameters::Parameters;

/// What the model's instances log, and at which of Triton's levels: INFO, VERBOSE, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logging {
    /// A line for each batch.
    pub batch: Option<log::Level>,
    /// The periodic report: batch sizes and slots.
    pub report: Option<log::Level>,
    /// The times of each stage in the periodic report.
    pub detailed_report: Option<log::Level>,
    /// Time between reports; `None` for no reports.
    pub report_every: Option<Duration>,
}

impl Logging {
    pub(super) fn new(parameters: &Parameters) -> Result<Self, ConfigError> {
        const WORDS: [(&str, u8); 3] = [("NONE", 0), ("INFO", 1), ("VERBOSE", 2)];
        let word = |name, default| parameters.choice(name, &WORDS).map(|given| given.unwrap_or(default));
        let own = word("logging_level", 1)?;
        // With 'logging_level' VERBOSE, verbose lines go to Triton's INFO level. Triton's own switch for its VERBOSE
        // level opens it for all models at once.
        let level = |wanted: u8| match (wanted, own) {
            (0, _) | (_, 0) => None,
            (wanted, own) if wanted <= own => Some(log::Level::Info),
            _ => Some(log::Level::Debug),
        };
        let every = parameters.number("metric_logging_frequency_seconds", 0u64.., "a number of seconds, 0 or more,")?;
        Ok(Self {
            batch: level(word("batch_info_logging_level", 2)?),
            report: level(1),
            detailed_report: level(word("detailed_metrics_logging_level", 2)?),
            report_every: every.filter(|&seconds| seconds > 0).map(|seconds| Duration::from_secs(seconds.min(1 << 32))),
        })
    }
}
