//! The model configuration, parsed once.
//!
//! [`PartialConfig`] is what the user wrote: it parses the JSON that Triton hands over ([`raw`]) and this backend's own
//! `parameters` ([`parameters`]), and takes what completion adds. Then the [`Config`] contains it, and is all that the
//! rest of the code sees. Every error names the field or parameter, the value that came and what is allowed.
//!
//! To add a parameter: list its name in [`parameters`], read it where [`PartialConfig::resolve`] or
//! [`PartialConfig::new`] reads its neighbours, and describe it in the reference of parameters. Not for: the ONNX
//! model's signature ([`crate::binding`]).

#![allow(missing_docs, reason = "a name that says it all needs no sentence")]

mod durability;
mod generated;
mod model;
mod parameters;
mod partial;
mod placement;
mod providers;
mod raw;
mod scheduling;
mod states;
mod steps;
mod tensors;

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

pub use durability::{Durability, StateStore};
pub use generated::{GENERATED_INPUTS, GeneratedInput, GeneratedKind, NamedAxis, NamedCounter, NewElements};
pub use model::{JOIN, Join, SEARCH, find_model_file, find_named_file};
use parameters::{OF_OWN_SCHEDULING, Parameters};
pub use parameters::{PairPattern, parameter_line, similarity};
pub use partial::{Additions, PartialConfig};
pub use placement::{InstanceKind, Placement, spread_cpu_instances};
pub use providers::{ARENA_EXTEND_STRATEGY, GraphOptimization, Options, Providers, SessionOptions};
pub use raw::ConfigError;
use raw::{Result, bad, field, unsigned};
pub use scheduling::{OwnScheduling, POLL_WAIT, Strategy, scans};
use scheduling::{Padding, QUIET_MARGIN, Scheduling, YEAR, idle_margin, slot_limits};
pub use stateful_convert::StatePair;
pub use states::{
    BY_SHAPE, DeclaredState, GROWING_PADDING, InitialSources, InitialValue, PairsFrom, StateDims, StatePairs, States,
    state_dims_line, state_dims_text,
};
pub use steps::{
    Context, Feed, FirstRequest, INPUT_WINDOWS, MAX_STEPS, PaddedInput, PaddedOutput, REPEAT, REPEAT_UNTIL, Repeat,
    Stop, USUAL_MOST_STEPS, Window, Windows, context_line,
};
pub use tensors::{
    CONTROL_INPUT, Control, ControlKind, FalseTrue, Flag, ID_TENSOR, STATE_INFO, STATE_PREFIX, STATE_SNAPSHOT,
    TakesIds, TensorConfig, is_state_tensor,
};

/// A model's configuration, complete and checked: what is written or completed, and what follows from it.
#[derive(Clone, Debug)]
pub struct Config {
    pub written: PartialConfig,
    /// Most requests of one run. A larger payload takes several runs.
    pub max_rows_per_run: usize,
    /// Rows share runs although they may change each other's results.
    pub trust_batch: bool,
    /// Numbers of rows of the runs at load.
    pub warmup_batch_sizes: Vec<usize>,
    /// How many batches can leave their states where the last run wrote them, besides the one that is being written.
    pub resident_batches: usize,
    pub strategy: Strategy,
    /// Where sequences are kept beside the server; `None` if they end with it.
    pub state_store: Option<StateStore>,
    pub padding: Padding,
    /// Whether an END that is no START runs. If not, it is answered with outputs that have no elements.
    pub infer_end_requests: bool,
    pub logging: Logging,
    pub store_states_as_fp16: bool,
    /// Where the instances run, each once, with the bounds of its state pool.
    pub placements: Vec<Placement>,
    /// Core forgets a sequence that is idle for this long; `None` if this backend schedules the sequences.
    pub core_idle_limit: Option<Duration>,
    pub idle_limit: Duration,
    /// When a sequence is idle for this long, core has dropped it.
    pub dropped_after: Duration,
    /// Core sends what it has queued to an idle instance within this time.
    pub quiet: Duration,
    /// Sequences that core sends to one instance at a time.
    pub candidates: usize,
}

impl Deref for Config {
    type Target = PartialConfig;

    fn deref(&self) -> &PartialConfig {
        &self.written
    }
}

/// What the model's instances log, and at which of Triton's levels: INFO, VERBOSE, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logging {
    pub batch: Option<log::Level>,
    /// The periodic report: batch sizes and slots.
    pub report: Option<log::Level>,
    /// The times of each stage in the periodic report.
    pub detailed_report: Option<log::Level>,
    /// Time between reports; `None` for no reports.
    pub report_every: Option<Duration>,
}

impl PartialConfig {
    pub fn resolve(self) -> Result<Config> {
        let Self { ref parameters, max_batch_size, is_own, .. } = self;
        if !parameters.flag("stateful", true)? {
            return Err(bad("stateful", "false", "this backend serves stateful models: leave it out, or write 'true'"));
        }
        let max_rows_per_run = max_rows_per_run(&self)?;
        let (scheduling, state_store) = scheduling(&self)?;
        let batching = self.sequence_batching.clone().unwrap_or_default();
        let quiet = scheduling.queue_delay + QUIET_MARGIN;
        // The scheduler of this backend ends idle sequences itself.
        let idle_us = batching.max_sequence_idle_microseconds;
        let idle_us = unsigned("sequence_batching.max_sequence_idle_microseconds", idle_us)?;
        let core_idle_limit = (!is_own).then(|| Duration::from_micros(idle_us as u64).min(YEAR));
        let idle_limit = core_idle_limit.unwrap_or(YEAR);
        let placement = |(&kind, &instances): (&InstanceKind, &usize)| {
            let (slots, capacity_reason) = slot_limits(parameters, &scheduling, max_batch_size, instances)?;
            Ok(Placement { kind, instances, slots, capacity_reason })
        };
        Ok(Config {
            max_rows_per_run,
            placements: self.instances.iter().map(placement).collect::<Result<_>>()?,
            // 0 without a batch dimension: such runs can't be padded.
            padding: Padding::new(parameters, &batching, max_rows_per_run.min(max_batch_size))?,
            infer_end_requests: parameters.switch("infer_end_requests", true)?,
            logging: Logging::new(parameters)?,
            store_states_as_fp16: parameters.switch("store_states_as_fp16", false)?,
            trust_batch: parameters.flag("trust_batch", false)?,
            warmup_batch_sizes: warmup_batch_sizes(parameters, max_rows_per_run)?,
            resident_batches: parameters
                .number("resident_batches", 1..=1024, "a whole number from 1 to 1024")?
                .unwrap_or(4),
            strategy: scheduling.strategy,
            state_store,
            core_idle_limit,
            idle_limit: idle_limit + idle_margin(parameters, quiet)?,
            // Core's queue empties within `quiet`, so by then core has seen no request of the sequence for its whole
            // idle limit.
            dropped_after: idle_limit + quiet,
            quiet,
            candidates: scheduling.candidates,
            written: self,
        })
    }
}

impl Config {
    /// Reads a complete configuration, with these parameters on top.
    #[cfg(test)]
    pub(crate) fn for_tests(config: &serde_json::Value, parameters: &[(&str, &str)]) -> Result<Self> {
        let mut config = config.clone();
        for (name, value) in parameters {
            config["parameters"][name] = serde_json::json!({ "string_value": value });
        }
        PartialConfig::from_json(config.to_string().as_bytes())?.resolve()
    }

    /// A configuration for `direct` that has these parameters only.
    #[cfg(test)]
    pub(crate) fn with_parameters(parameters: &[(&str, &str)]) -> Result<Self> {
        let config = serde_json::json!({ "name": "m", "max_batch_size": 4, "sequence_batching": { "direct": {} } });
        Self::for_tests(&config, parameters)
    }

    pub fn most_rows(&self) -> usize {
        self.padding.rows(self.max_rows_per_run)
    }

    /// Whether core gives each instance one sequence at a time, so that the START of another one waits.
    pub fn holds_one_sequence(&self) -> bool {
        self.strategy == Strategy::Direct && self.max_batch_size <= 1
    }

    pub fn is_on_gpu(&self) -> bool {
        self.placements.iter().any(|placement| placement.kind != InstanceKind::Cpu)
    }

    pub fn is_batched(&self) -> bool {
        self.max_batch_size > 0
    }
}

impl Logging {
    fn new(parameters: &Parameters) -> Result<Self> {
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
            // A longer time could overflow the clock.
            report_every: every.filter(|&seconds| seconds > 0).map(|seconds| Duration::from_secs(seconds.min(1 << 32))),
        })
    }
}

/// Who schedules the model, and where its sequences are kept beside the server.
fn scheduling(written: &PartialConfig) -> Result<(Scheduling, Option<StateStore>)> {
    let PartialConfig { parameters, sequence_batching, is_own, .. } = written;
    if let Some(batching) = sequence_batching {
        StateStore::check_core_schedules(parameters)?;
        // Core queues and ends these sequences, so nothing would read the rules.
        for name in OF_OWN_SCHEDULING {
            let why = "it has an effect only where this backend schedules the sequences: leave it out, or \
                       'sequence_batching' and 'scheduling'";
            parameters.refuse(name, why)?;
        }
        if parameters.text("scheduling") == Some("own") {
            return Err(bad("scheduling", "own", "core schedules a model that has 'sequence_batching'"));
        }
        return Ok((Scheduling::new(batching, written.max_batch_size)?, None));
    }
    if !is_own {
        let why = "a stateful model needs it: add 'sequence_batching { max_sequence_idle_microseconds: 60000000 \
                   oldest { max_candidate_sequences: 1024 } }'";
        return Err(field("sequence_batching", "missing", why));
    }
    let instances: usize = written.instances.values().sum();
    if instances > 1 {
        let why = format!(
            "without 'sequence_batching' a model has one instance, because Triton's instances would take the requests of \
             a sequence in any order: write 'count: 1' (on GPUs, with one of 'gpus') and parameter 'worker_count' \
             {instances}, or 'sequence_batching' to let core schedule"
        );
        return Err(field("instance_group", instances.to_string(), why));
    }
    let state_store = StateStore::new(parameters, written.store_of_server.as_ref(), written.is_decoupled)?;
    let mut own = OwnScheduling::new(parameters, written.scans_of_server)?;
    own.rules.looks_up = state_store.is_some();
    // With 'step', the worker makes the record right before the START runs, so no START waits for it.
    own.rules.enters_starts = state_store.as_ref().is_some_and(|store| store.durability != Durability::Step);
    // A parked sequence keeps its slot.
    let parked = own.rules.parking.map_or(0, |parking| parking.most);
    let candidates = own.rules.max_sequences.saturating_add(parked);
    Ok((Scheduling { strategy: Strategy::Own(own), candidates, queue_delay: Duration::ZERO }, state_store))
}

fn max_rows_per_run(written: &PartialConfig) -> Result<usize> {
    let (most, allowed) = match written.states.without_batch() {
        // Its rows can't be told apart in one tensor.
        Some(state) => (1, format!("1, because 'state_dims' gives '{}' no batch dimension,", state.name)),
        None => {
            let most = written.max_batch_size.max(1);
            (most, format!("a number of rows from 1 to max_batch_size, {most},"))
        }
    };
    Ok(written.parameters.number("max_rows_per_run", 1..=most, &allowed)?.unwrap_or(most))
}

/// `warmup_batch_sizes`: numbers of rows of a run, which has `most` at most.
fn warmup_batch_sizes(parameters: &Parameters, most: usize) -> Result<Vec<usize>> {
    const NAME: &str = "warmup_batch_sizes";
    let size = |word: String| match word.parse() {
        Ok(size) if (1..=most).contains(&size) => Ok(size),
        _ => {
            let why = format!(
                "'{word}' is no number of rows from 1 to {most}, the most of a run (max_batch_size or max_rows_per_run)"
            );
            Err(bad(NAME, parameters.text(NAME).unwrap_or_default(), why))
        }
    };
    parameters.names(NAME).into_iter().map(size).collect()
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheduling = match self.strategy {
            Strategy::Own(own) => format!("scheduled by the backend: {own}"),
            Strategy::Direct | Strategy::Oldest => {
                let name = if self.strategy == Strategy::Direct { "direct" } else { "oldest" };
                format!("strategy {name}, queue delay and margin {:?}, idle limit {:?}", self.quiet, self.idle_limit)
            }
        };
        writeln!(f, "max_batch_size {}, {scheduling}", self.max_batch_size)?;
        if let Some(store) = &self.state_store {
            writeln!(f, "{store}")?;
        }
        writeln!(f, "session: {}", self.session)?;
        writeln!(
            f,
            "batches of {}, infer END requests {}, store FP32 states as FP16 {}",
            self.padding, self.infer_end_requests, self.store_states_as_fp16
        )?;
        for control in &self.controls {
            writeln!(f, "control {}: {}", control.name, control.kind)?;
        }
        if let Some(side) = self.states.growing_padding {
            writeln!(f, "rows whose growing states have different lengths share runs, with padding on the {side}")?;
        }
        for (name, values) in &self.constants {
            writeln!(f, "constant {name} = {}", values.join(", "))?;
        }
        for generated in &self.generated {
            writeln!(f, "generated {} = {}", generated.input, generated.written)?;
        }
        for Placement { kind, instances, slots, capacity_reason } in &self.placements {
            writeln!(
                f,
                "pool of the instances on the {kind} ({instances}): capacity {} sequences ({capacity_reason}), {slots}",
                slots.capacity
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
