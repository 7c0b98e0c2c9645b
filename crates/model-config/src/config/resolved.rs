//! The configuration as the rest of the code sees it.

use std::fmt;
use std::time::Duration;

use super::durability::{Durability, StateStore};
use super::error::{ConfigError, bad, field};
use super::generated::GeneratedInput;
use super::model::SessionOptions;
use super::parameters::Parameters;
use super::partial::PartialConfig;
use super::placement::{InstanceKind, Placement, slot_limits};
use super::raw;
use super::repeat::Repeat;
use super::scheduling::{
    OwnScheduling, Padding, QUIET_MARGIN, Scheduling, Strategy, YEAR, check_stateful, core_idle_limit, idle_margin,
};
use super::states::States;
use super::tensors::{Context, Control, Ragged, StateApiTensors, TakesIds, TensorConfig};
use super::windows::Windows;

/// A model's configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The model's name.
    pub model: String,
    /// Most requests of a payload; 0 if Triton puts no batch dimension in front of tensors.
    pub max_batch_size: usize,
    /// Most requests of one run. A larger payload takes several runs.
    pub max_rows_per_run: usize,
    /// Rows share runs although they may change each other's results.
    pub trust_batch: bool,
    /// Inputs that requests carry.
    pub inputs: Vec<TensorConfig>,
    /// Outputs that responses may carry.
    pub outputs: Vec<TensorConfig>,
    /// The tensors for ids and controls, which the model doesn't have.
    pub takes_ids: TakesIds,
    /// The tensors of the State API; `None` if the configuration doesn't allow it.
    pub state_api: Option<StateApiTensors>,
    /// Inputs that are given with START and kept for the sequence.
    pub held_inputs: Vec<String>,
    /// Which outputs become which inputs of the sequence's next request, and their initial values.
    pub states: States,
    /// Inputs that are filled from a request's flags and sequence id.
    pub controls: Vec<Control>,
    /// Inputs with a fixed value: their name, and their elements as written.
    pub constants: Vec<(String, Vec<String>)>,
    /// Inputs that are filled with counters, lengths and masks.
    pub generated: Vec<GeneratedInput>,
    /// Inputs that get the end of the previous request's input in front.
    pub contexts: Vec<Context>,
    /// Inputs that are cut into windows.
    pub windows: Windows,
    /// What a step of a request gives to the next one.
    pub repeat: Repeat,
    /// Each step of a request has an answer of its own (`model_transaction_policy { decoupled: true }`).
    pub is_decoupled: bool,
    /// Inputs whose rows may have different lengths in one batch.
    pub ragged: Ragged,
    /// Numbers of rows of the runs at load.
    pub warmup_batch_sizes: Vec<usize>,
    /// How many batches can leave their states where the last run wrote them, besides the one that is being written.
    pub resident_batches: usize,
    /// Who schedules the sequences.
    pub strategy: Strategy,
    /// Where sequences are kept beside the server; `None` if they end with it.
    pub state_store: Option<StateStore>,
    /// Sizes that batches are filled up to.
    pub padding: Padding,
    /// Whether an END that is no START runs. If not, it is answered with outputs that have no elements.
    pub infer_end_requests: bool,
    /// What the model's instances log.
    pub logging: Logging,
    /// How ONNX Runtime runs the model.
    pub session: SessionOptions,
    /// Whether sequences keep FP32 states in half precision.
    pub store_states_as_fp16: bool,
    /// Where the instances run, each once, with the bounds of its state pool.
    pub placements: Vec<Placement>,
    /// Core forgets a sequence that is idle for this long; `None` if this backend schedules the sequences.
    pub core_idle_limit: Option<Duration>,
    /// A sequence that is idle for this long is dropped.
    pub idle_limit: Duration,
    /// When a sequence is idle for this long, core has dropped it.
    pub dropped_after: Duration,
    /// Core sends what it has queued to an idle instance within this time.
    pub quiet: Duration,
    /// Sequences that core sends to one instance at a time.
    pub candidates: usize,
    /// `dynamic_batching` is written without `preserve_ordering`, for a model that this backend schedules.
    pub batches_unordered: bool,
    /// With `oldest`: an `instance_group` has `rate_limiter.resources`, so an idle instance may have requests in core.
    pub waits_for_resources: bool,
}

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

impl PartialConfig {
    /// Makes the resolved configuration, or says what is wrong or still missing.
    pub fn resolve(self) -> Result<Config, ConfigError> {
        Config::new(self)
    }
}

impl Config {
    /// Reads a complete configuration, with these parameters on top.
    #[cfg(test)]
    pub(crate) fn for_tests(config: &serde_json::Value, parameters: &[(&str, &str)]) -> Result<Self, ConfigError> {
        let mut config = config.clone();
        for (name, value) in parameters {
            config["parameters"][name] = serde_json::json!({ "string_value": value });
        }
        PartialConfig::from_json(config.to_string().as_bytes())?.resolve()
    }

    fn new(partial: PartialConfig) -> Result<Self, ConfigError> {
        let is_own = partial.is_own();
        let PartialConfig { parameters, max_batch_size, .. } = partial;
        check_stateful(&parameters)?;
        let max_rows_per_run = max_rows_per_run(&parameters, max_batch_size, &partial.states)?;
        let (batching, scheduling, state_store) = match partial.sequence_batching {
            Some(batching) => {
                StateStore::check_core_schedules(&parameters)?;
                if let Some(name) = OwnScheduling::first_parameter(&parameters) {
                    let value = parameters.text(name).unwrap_or_default();
                    let allowed = "it has an effect only where this backend schedules the sequences: leave it out, or \
                                   'sequence_batching' and 'scheduling'";
                    return Err(bad(name, value, allowed));
                }
                if parameters.text("scheduling") == Some("own") {
                    return Err(bad("scheduling", "own", "core schedules a model that has 'sequence_batching'"));
                }
                let scheduling = Scheduling::new(&batching, max_batch_size)?;
                (batching, scheduling, None)
            }
            None if is_own => {
                let instances: usize = partial.instances.values().sum();
                if instances > 1 {
                    return Err(field(
                        "instance_group",
                        instances.to_string(),
                        format!(
                            "without 'sequence_batching' a model has one instance, because Triton's instances would take \
                             the requests of a sequence in any order: write 'count: 1' (on GPUs, with one of 'gpus') \
                             and parameter 'worker_count' {instances}, or 'sequence_batching' to let core schedule"
                        ),
                    ));
                }
                let state_store = StateStore::new(&parameters, partial.state_store.as_ref(), partial.is_decoupled)?;
                let mut own = OwnScheduling::new(&parameters, partial.poll_wait)?;
                own.rules.looks_up = state_store.is_some();
                // With 'step', the worker makes the record right before the START runs, so no START waits for it.
                let saves_later = |of: &StateStore| of.durability != Durability::Step;
                own.rules.enters_starts = state_store.as_ref().is_some_and(saves_later);
                (raw::SequenceBatching::default(), own.into(), state_store)
            }
            None => {
                return Err(field(
                    "sequence_batching",
                    "missing",
                    "a stateful model needs it: add 'sequence_batching { max_sequence_idle_microseconds: 60000000 \
                     oldest { max_candidate_sequences: 1024 } }'",
                ));
            }
        };
        let quiet = scheduling.queue_delay + QUIET_MARGIN;
        // The scheduler of this backend ends idle sequences itself.
        let core_idle_limit = if is_own { None } else { Some(core_idle_limit(&batching)?) };
        let idle_limit = core_idle_limit.unwrap_or(YEAR);
        let placement = |(kind, instances): (InstanceKind, usize)| {
            let (slots, capacity_reason) = slot_limits(&parameters, &scheduling, max_batch_size, instances)?;
            Ok(Placement { kind, instances, slots, capacity_reason })
        };
        let placements = partial.instances.into_iter().map(placement).collect::<Result<Vec<_>, ConfigError>>()?;
        Ok(Self {
            model: partial.model,
            // 0 without a batch dimension: such runs can't be padded.
            padding: Padding::new(&parameters, &batching, max_rows_per_run.min(max_batch_size))?,
            infer_end_requests: parameters.switch("infer_end_requests", true)?,
            logging: Logging::new(&parameters)?,
            session: partial.session,
            store_states_as_fp16: parameters.switch("store_states_as_fp16", false)?,
            max_batch_size,
            max_rows_per_run,
            trust_batch: parameters.flag("trust_batch", false)?,
            inputs: partial.inputs,
            outputs: partial.outputs,
            takes_ids: partial.takes_ids,
            state_api: partial.state_api,
            held_inputs: partial.held_inputs,
            states: partial.states,
            contexts: partial.contexts,
            windows: partial.windows,
            repeat: partial.repeat,
            is_decoupled: partial.is_decoupled,
            ragged: partial.ragged,
            warmup_batch_sizes: warmup_batch_sizes(&parameters, max_rows_per_run)?,
            resident_batches: resident_batches(&parameters)?,
            controls: partial.controls,
            constants: partial.constants,
            generated: partial.generated,
            strategy: scheduling.strategy,
            state_store,
            placements,
            core_idle_limit,
            idle_limit: idle_limit + idle_margin(&parameters, quiet)?,
            dropped_after: idle_limit + quiet,
            quiet,
            candidates: scheduling.candidates,
            batches_unordered: is_own && partial.batches_unordered,
            waits_for_resources: scheduling.strategy == Strategy::Oldest && partial.waits_for_resources,
        })
    }

    /// Most rows of a run, with padding.
    pub fn most_rows(&self) -> usize {
        self.padding.rows(self.max_rows_per_run)
    }

    /// Whether core gives each instance one sequence at a time, so that the START of another one waits.
    pub fn holds_one_sequence(&self) -> bool {
        self.strategy == Strategy::Direct && self.max_batch_size <= 1
    }

    /// Whether some of the instances run on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.placements.iter().any(|placement| placement.kind != InstanceKind::Cpu)
    }

    /// Whether an answer has the outputs of any number of steps.
    pub fn gathers_steps(&self) -> bool {
        (self.windows.are_cut() || self.repeat.is_any()) && !self.is_decoupled
    }

    /// Whether tensors have Triton's batch dimension.
    pub const fn is_batched(&self) -> bool {
        self.max_batch_size > 0
    }
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
            // A longer time could overflow the clock.
            report_every: every.filter(|&seconds| seconds > 0).map(|seconds| Duration::from_secs(seconds.min(1 << 32))),
        })
    }
}

fn max_rows_per_run(parameters: &Parameters, max_batch_size: usize, states: &States) -> Result<usize, ConfigError> {
    if let Some(state) = states.without_batch() {
        let allowed = format!("1, because 'state_dims' gives '{}' no batch dimension,", state.name);
        return Ok(parameters.number("max_rows_per_run", 1..=1, &allowed)?.unwrap_or(1));
    }
    let most = max_batch_size.max(1);
    let allowed = format!("a number of rows from 1 to max_batch_size, {most},");
    Ok(parameters.number("max_rows_per_run", 1..=most, &allowed)?.unwrap_or(most))
}

/// `warmup_batch_sizes`: numbers of rows of a run, which has `most` at most.
fn warmup_batch_sizes(parameters: &Parameters, most: usize) -> Result<Vec<usize>, ConfigError> {
    const NAME: &str = "warmup_batch_sizes";
    let Some(text) = parameters.text(NAME) else { return Ok(Vec::new()) };
    let size = |word: &str| match word.parse() {
        Ok(size) if (1..=most).contains(&size) => Ok(size),
        _ => Err(bad(
            NAME,
            text,
            format!(
                "'{word}' is no number of rows from 1 to {most}, the most of a run (max_batch_size or max_rows_per_run)"
            ),
        )),
    };
    text.split([',', ' ']).filter(|word| !word.is_empty()).map(size).collect()
}

fn resident_batches(parameters: &Parameters) -> Result<usize, ConfigError> {
    const DEFAULT: usize = 4;
    let given = parameters.number("resident_batches", 1..=1024, "a whole number from 1 to 1024")?;
    Ok(given.unwrap_or(DEFAULT))
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.strategy {
            Strategy::Own(own) => {
                writeln!(f, "max_batch_size {}, scheduled by the backend: {own}", self.max_batch_size)?
            }
            strategy => writeln!(
                f,
                "max_batch_size {}, strategy {strategy}, queue delay and margin {:?}, idle limit {:?}",
                self.max_batch_size, self.quiet, self.idle_limit
            )?,
        }
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
#[path = "resolved_tests.rs"]
mod tests;
