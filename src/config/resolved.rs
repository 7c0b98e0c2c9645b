//! The configuration as the rest of the code sees it.

use std::fmt;
use std::time::Duration;

use rows::tensor::DataType;

use super::controls::Control;
use super::error::{ConfigError, field};
use super::generated::GeneratedInput;
use super::inputs::{Context, Ragged, warmup_batch_sizes};
use super::logging::Logging;
use super::own::{self, OwnScheduling};
use super::parameters::{Parameters, bad};
use super::partial::{PartialConfig, StateApiTensors, TakesIds};
use super::placement::{InstanceKind, Placement};
use super::raw::{self, Int};
use super::scheduling::{Padding, QUIET_MARGIN, Scheduling, Strategy, YEAR, core_idle_limit, idle_margin, slot_limits};
use super::session_options::SessionOptions;
use super::states::States;

/// A model's configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
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
    /// Inputs whose rows may have different lengths in one batch.
    pub ragged: Ragged,
    /// Numbers of rows of the runs at load.
    pub warmup_batch_sizes: Vec<usize>,
    /// How many batches can leave their states where the last run wrote them, besides the one that is being written.
    pub resident_batches: usize,
    pub strategy: Strategy,
    /// Sizes that batches are filled up to.
    pub padding: Padding,
    /// Whether an END that is no START runs. If not, it is answered with outputs that have no elements.
    pub infer_end_requests: bool,
    /// What the model's instances log.
    pub logging: Logging,
    /// How ONNX Runtime runs the model.
    pub session: SessionOptions,
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

/// An entry of `input` or `output`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorConfig {
    /// Name in the model and in requests.
    pub name: String,
    pub data_type: DataType,
    /// Dimensions in the model (after `reshape`), without Triton's batch dimension; -1 is open.
    pub dims: Vec<i64>,
    pub optional: bool,
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

    pub(super) fn new(partial: PartialConfig) -> Result<Self, ConfigError> {
        let is_own = partial.is_own();
        let PartialConfig { parameters, max_batch_size, .. } = partial;
        if partial.is_decoupled {
            return Err(field(
                "model_transaction_policy.decoupled",
                "true",
                "a stateful model answers each request once",
            ));
        }
        own::check_stateful(&parameters)?;
        let max_rows_per_run = max_rows_per_run(&parameters, max_batch_size, &partial.states)?;
        let (batching, scheduling) = match partial.sequence_batching {
            Some(batching) => {
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
                (batching, scheduling)
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
                (raw::SequenceBatching::default(), OwnScheduling::new(&parameters, partial.poll_wait)?.into())
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
            ragged: partial.ragged,
            warmup_batch_sizes: warmup_batch_sizes(&parameters, max_rows_per_run)?,
            resident_batches: resident_batches(&parameters)?,
            controls: partial.controls,
            constants: partial.constants,
            generated: partial.generated,
            strategy: scheduling.strategy,
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

    pub fn is_on_gpu(&self) -> bool {
        self.placements.iter().any(|placement| placement.kind != InstanceKind::Cpu)
    }

    /// Whether tensors have Triton's batch dimension.
    pub const fn is_batched(&self) -> bool {
        self.max_batch_size > 0
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

fn resident_batches(parameters: &Parameters) -> Result<usize, ConfigError> {
    const DEFAULT: usize = 4;
    let given = parameters.number("resident_batches", 1..=1024, "a whole number from 1 to 1024")?;
    Ok(given.unwrap_or(DEFAULT))
}

/// A count or a time, which cannot be negative.
pub(super) fn unsigned(name: &str, value: Int) -> Result<usize, ConfigError> {
    usize::try_from(value.0).map_err(|_| field(name, value.0.to_string(), "it cannot be negative"))
}

pub(super) fn model_file(parameters: &Parameters, default_model_filename: String) -> Option<(&'static str, String)> {
    let named = parameters.text("onnx_file_name").map(|name| ("parameter 'onnx_file_name'", name.to_owned()));
    let default = Some(("default_model_filename", default_model_filename)).filter(|(_, name)| !name.is_empty());
    named.or(default)
}

pub(super) fn tensors(list: &str, raw: Vec<raw::Tensor>) -> Result<Vec<TensorConfig>, ConfigError> {
    let mut tensors: Vec<TensorConfig> = Vec::with_capacity(raw.len());
    for tensor in raw {
        let data_type = data_type(&format!("{list} '{}'.data_type", tensor.name), &tensor.data_type)?;
        let dims = tensor.reshape.map_or(tensor.dims, |reshape| reshape.shape);
        if tensors.iter().any(|known| known.name == tensor.name) {
            return Err(field(format!("{list} '{}'", tensor.name), "given twice", "a name may stand there once only"));
        }
        let (name, optional) = (tensor.name, tensor.optional);
        tensors.push(TensorConfig { name, data_type, dims: self::dims(&dims), optional });
    }
    Ok(tensors)
}

pub(super) fn dims(raw: &[Int]) -> Vec<i64> {
    raw.iter().map(|dim| dim.0).collect()
}

pub(super) fn data_type(path: &str, name: &str) -> Result<DataType, ConfigError> {
    DataType::from_config_name(name).ok_or_else(|| field(path, name, "a data type such as TYPE_FP32 is expected"))
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
