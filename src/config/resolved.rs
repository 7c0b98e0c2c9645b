//! The configuration as the rest of the code sees it.

use std::fmt;
use std::time::Duration;

use super::error::ConfigError;
use super::parameters::{self, Parameters, bad};
use super::raw::{self, Int};
use super::session_options::SessionOptions;
use crate::state::pool::SlotLimits;
use crate::tensor::{DataType, Dims};

/// Everything a model's configuration says, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The model's name.
    pub model: String,
    /// Most rows of one run; 0 if tensors have no batch axis of Triton's.
    pub max_batch_size: usize,
    /// File name and the field that gave it; `None` to look for one.
    pub model_file: Option<(&'static str, String)>,
    /// What requests carry.
    pub inputs: Vec<TensorConfig>,
    /// What responses may carry.
    pub outputs: Vec<TensorConfig>,
    /// Which outputs become which inputs of the sequence's next request; `None` if the model itself has to say.
    pub state_pairs: Option<Vec<StatePair>>,
    /// Inputs that are filled from a request's flags and sequence id.
    pub controls: Vec<Control>,
    /// Inputs with a fixed value: name and elements as written.
    pub constants: Vec<(String, Vec<String>)>,
    /// How Triton schedules the sequences.
    pub strategy: Strategy,
    /// To which sizes batches are filled up.
    pub padding: Padding,
    /// Whether an END alone is run; else it is answered with outputs without elements.
    pub infer_end_requests: bool,
    /// What the model's instances log.
    pub logging: Logging,
    /// How ONNX Runtime is to run it.
    pub session: SessionOptions,
    /// Whether states of TYPE_FP32 are kept as TYPE_FP16.
    pub store_states_as_fp16: bool,
    /// Bounds of the state pool, all instances together.
    pub slots: SlotLimits,
    /// How the capacity of the pool came about, for logs and errors.
    pub capacity_reason: String,
    /// Sequences are dropped after lying idle this long.
    pub idle_limit: Duration,
    /// Core sends what it has queued for an idle instance within this time.
    pub quiet: Duration,
    /// Most requests that core queues for one instance.
    pub queue_requests: usize,
}

/// `sequence_batching`'s strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// `direct { }`
    Direct,
    /// `oldest { }`; a payload of fewer rows than this leaves nothing queued.
    Oldest {
        /// The smallest preferred batch size.
        full_batch: usize,
    },
}

/// An entry of `input` or `output`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorConfig {
    /// Name in the model and in requests.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Dimensions as the model has them (after `reshape`), without Triton's batch dimension; -1 is open.
    pub dims: Vec<i64>,
}

/// One state: an output whose value is the input of the next request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePair {
    /// Name of the model's input.
    pub input: String,
    /// Name of the model's output.
    pub output: String,
}

/// A `control_input` that the model may take.
#[derive(Clone, Debug, PartialEq)]
pub struct Control {
    /// Name of the model's input.
    pub name: String,
    /// What it says.
    pub kind: ControlKind,
}

/// What a control input says, with its value for "no" and for "yes".
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ControlKind {
    /// The request starts a sequence.
    Start(FalseTrue),
    /// The request ends its sequence.
    End(FalseTrue),
    /// The row carries a request.
    Ready(FalseTrue),
    /// The sequence id, as this type.
    CorrelationId(DataType),
}

/// The two values of a boolean control. The model may take another type than the configuration names, as in
/// configurations for NVIDIA's stateful_backend, which write `int32_false_true` for a BOOL input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FalseTrue {
    /// The value that says no.
    pub no: f64,
    /// The value that says yes.
    pub yes: f64,
}

const DEFAULT_USE_RATIO: f64 = 0.9;
const DEFAULT_IDLE_MARGIN: Duration = Duration::from_secs(1);
/// How long core may take to hand on what it has queued, beyond the queue delay. Generous: it only delays the second
/// request of a sequence that was started over.
const QUIET_MARGIN: Duration = Duration::from_millis(20);

impl Config {
    /// Reads the JSON that `TRITONBACKEND_ModelConfig` gives (config version 1).
    pub fn from_json(json: &[u8]) -> Result<Self, ConfigError> {
        let raw: raw::ModelConfig = serde_json::from_slice(json)?;
        let parameters = Parameters::new(raw.parameters)?;
        if raw.model_transaction_policy.decoupled {
            return Err(field(
                "model_transaction_policy.decoupled",
                "true",
                "a stateful model answers each request once",
            ));
        }
        let batching = raw.sequence_batching.ok_or_else(|| {
            field(
                "sequence_batching",
                "missing",
                "a stateful model needs it: add 'sequence_batching { oldest { max_candidate_sequences: 1024 } }'",
            )
        })?;
        check_instances(&raw.instance_group)?;
        let max_batch_size = unsigned("max_batch_size", raw.max_batch_size)?;
        let instances = raw.instance_group.iter().map(|group| group.count.0.max(1) as usize).sum::<usize>().max(1);
        let scheduling = Scheduling::new(&batching, max_batch_size)?;
        let (slots, capacity_reason) = slot_limits(&parameters, &scheduling, max_batch_size, instances)?;
        check_providers(&parameters)?;
        Ok(Self {
            model: raw.name,
            padding: Padding::new(&parameters, &batching, max_batch_size)?,
            infer_end_requests: parameters.switch("infer_end_requests", true)?,
            logging: Logging::new(&parameters)?,
            session: SessionOptions::new(&parameters, &raw.optimization)?,
            store_states_as_fp16: parameters.switch("store_states_as_fp16", false)?,
            max_batch_size,
            model_file: model_file(&parameters, raw.default_model_filename),
            inputs: tensors("input", raw.input)?,
            outputs: tensors("output", raw.output)?,
            state_pairs: parameters.text("state_pairs").map(parameters::state_pairs).transpose()?,
            controls: controls(&batching.control_input)?,
            constants: parameters
                .text("constant_inputs")
                .map(parameters::constant_inputs)
                .transpose()?
                .unwrap_or_default(),
            strategy: scheduling.strategy,
            slots,
            capacity_reason,
            idle_limit: idle_limit(&parameters, &batching)?,
            quiet: scheduling.queue_delay + QUIET_MARGIN,
            queue_requests: scheduling.candidates,
        })
    }

    /// Whether tensors have Triton's batch dimension.
    pub const fn is_batched(&self) -> bool {
        self.max_batch_size > 0
    }
}

/// Sizes that batches are filled up to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// In ascending order; empty for no padding.
    sizes: Vec<usize>,
}

impl Padding {
    /// `always_pad_to_max_batch`: to the nearest `preferred_batch_size`, else to `max_batch_size`.
    fn new(
        parameters: &Parameters,
        batching: &raw::SequenceBatching,
        max_batch_size: usize,
    ) -> Result<Self, ConfigError> {
        if !parameters.switch("always_pad_to_max_batch", false)? || max_batch_size == 0 {
            return Ok(Self::default());
        }
        let preferred = batching.oldest.iter().flat_map(|oldest| &oldest.preferred_batch_size);
        let preferred = preferred.filter_map(|size| usize::try_from(size.0).ok());
        let mut sizes: Vec<usize> = preferred.filter(|&size| size > 0 && size < max_batch_size).collect();
        sizes.push(max_batch_size);
        sizes.sort_unstable();
        Ok(Self { sizes })
    }

    /// The rows of the run for a batch of `rows`.
    pub fn rows(&self, rows: usize) -> usize {
        self.sizes.iter().copied().find(|&size| size >= rows).unwrap_or(rows)
    }
}

/// What the model's instances log, and where: at Triton's INFO or VERBOSE level, or not at all.
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
    fn new(parameters: &Parameters) -> Result<Self, ConfigError> {
        const WORDS: [(&str, u8); 3] = [("NONE", 0), ("INFO", 1), ("VERBOSE", 2)];
        let word = |name, default| parameters.choice(name, &WORDS).map(|given| given.unwrap_or(default));
        let own = word("logging_level", 1)?;
        // VERBOSE here opens the verbose stream as INFO does the other, as Triton's own verbose switch is for all models.
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

/// Parameters of execution providers: checked here, and without effect where the model runs on the CPU.
fn check_providers(parameters: &Parameters) -> Result<(), ConfigError> {
    let provider = parameters.choice("ort_ep", &[("cpu", "cpu"), ("cuda", "cuda"), ("trt", "trt")])?;
    let precision = parameters.choice("compute_precision", &[("fp32", "fp32"), ("fp16", "fp16")])?;
    if precision == Some("fp16") {
        return Err(bad(
            "compute_precision",
            "fp16",
            "only TensorRT computes in fp16, and this model runs on the CPU: 'fp32' is expected",
        ));
    }
    let caching = parameters.switch("enable_trt_caching", false)?;
    let graph = parameters.switch("enable_cuda_graph", false)?;
    if let Some(dir) = parameters.text("trt_cache_dir").filter(|dir| caching && !dir.starts_with('/')) {
        return Err(bad("trt_cache_dir", dir, "an absolute path is expected"));
    }
    parameters.number("error_inject_rate", 0u32..=100, "a percentage from 0 to 100")?;
    let gpu_only = [
        ("ort_ep", provider.is_some_and(|name| name != "cpu")),
        ("enable_trt_caching", caching),
        ("enable_cuda_graph", graph),
    ];
    for (name, _) in gpu_only.iter().filter(|(_, given)| *given) {
        log::info!("parameter '{name}' has no effect: instances are of KIND_CPU");
    }
    Ok(())
}

/// What `sequence_batching` says about slots and queues of one instance.
struct Scheduling {
    strategy: Strategy,
    candidates: usize,
    queue_delay: Duration,
}

impl Scheduling {
    fn new(batching: &raw::SequenceBatching, max_batch_size: usize) -> Result<Self, ConfigError> {
        if !batching.state.is_empty() {
            return Err(field(
                "sequence_batching.state",
                "given",
                "this version takes states from parameter 'state_pairs' only",
            ));
        }
        if batching.iterative_sequence {
            return Err(field("sequence_batching.iterative_sequence", "true", "iterative sequences are not supported"));
        }
        let rows = max_batch_size.max(1);
        let delay = |name: &str, value| unsigned(name, value).map(|micros| Duration::from_micros(micros as u64));
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
        let preferred = oldest.preferred_batch_size.iter().map(|size| size.0.max(1) as usize);
        let full_batch = preferred.min().unwrap_or(rows).min(rows);
        let queue_delay =
            delay("sequence_batching.oldest.max_queue_delay_microseconds", oldest.max_queue_delay_microseconds)?;
        Ok(Self { strategy: Strategy::Oldest { full_batch }, candidates, queue_delay })
    }
}

fn field(field: impl Into<String>, value: impl Into<String>, allowed: impl Into<String>) -> ConfigError {
    ConfigError::BadField { field: field.into(), value: value.into(), allowed: allowed.into() }
}

fn unsigned(name: &str, value: Int) -> Result<usize, ConfigError> {
    usize::try_from(value.0).map_err(|_| field(name, value.0.to_string(), "it cannot be negative"))
}

fn check_instances(groups: &[raw::InstanceGroup]) -> Result<(), ConfigError> {
    match groups.iter().find(|group| !matches!(group.kind.as_str(), "" | "KIND_CPU")) {
        None => Ok(()),
        Some(group) => Err(field(
            "instance_group.kind",
            &group.kind,
            "this version runs models on the CPU only: set 'instance_group [ { kind: KIND_CPU } ]'",
        )),
    }
}

fn model_file(parameters: &Parameters, default_model_filename: String) -> Option<(&'static str, String)> {
    let named = parameters.text("onnx_file_name").map(|name| ("parameter 'onnx_file_name'", name.to_owned()));
    let default = Some(("default_model_filename", default_model_filename)).filter(|(_, name)| !name.is_empty());
    named.or(default)
}

fn tensors(list: &str, raw: Vec<raw::Tensor>) -> Result<Vec<TensorConfig>, ConfigError> {
    let mut tensors: Vec<TensorConfig> = Vec::with_capacity(raw.len());
    for tensor in raw {
        let data_type = data_type(&format!("{list} '{}'.data_type", tensor.name), &tensor.data_type)?;
        let dims = tensor.reshape.map_or(tensor.dims, |reshape| reshape.shape);
        if tensors.iter().any(|known| known.name == tensor.name) {
            return Err(field(format!("{list} '{}'", tensor.name), "given twice", "a name may stand there once only"));
        }
        if tensor.optional {
            let path = format!("{list} '{}'.optional", tensor.name);
            return Err(field(
                path,
                "true",
                "each request has to carry every input; give a fixed one in 'constant_inputs'",
            ));
        }
        tensors.push(TensorConfig { name: tensor.name, data_type, dims: dims.into_iter().map(|dim| dim.0).collect() });
    }
    Ok(tensors)
}

fn data_type(path: &str, name: &str) -> Result<DataType, ConfigError> {
    DataType::from_config_name(name).ok_or_else(|| field(path, name, "a data type such as TYPE_FP32 is expected"))
}

impl Config {
    /// The state pairs of the configuration, else those that the model's graph description names, as NVIDIA's
    /// stateful_backend reads them.
    pub fn state_pairs_or(&self, graph_description: Option<&str>) -> Result<Vec<StatePair>, ConfigError> {
        if let Some(pairs) = &self.state_pairs {
            return Ok(pairs.clone());
        }
        let described = parameters::described_state_pairs(graph_description.unwrap_or_default())?;
        match described.is_empty() {
            false => Ok(described),
            true => Err(ConfigError::MissingParameter {
                name: "state_pairs",
                why:
                    "it says which outputs of the model are its next inputs, as '<<<input, output>>>', and the model's \
                      graph description names none either"
                        .to_owned(),
            }),
        }
    }
}

fn controls(raw: &[raw::ControlInput]) -> Result<Vec<Control>, ConfigError> {
    let mut controls = Vec::new();
    for input in raw {
        for control in &input.control {
            controls.push(Control { name: input.name.clone(), kind: control_kind(&input.name, control)? });
        }
    }
    Ok(controls)
}

fn control_kind(name: &str, control: &raw::Control) -> Result<ControlKind, ConfigError> {
    let path = format!("control_input '{name}'");
    match control.kind.as_str() {
        "CONTROL_SEQUENCE_START" => Ok(ControlKind::Start(false_true(&path, control)?)),
        "CONTROL_SEQUENCE_END" => Ok(ControlKind::End(false_true(&path, control)?)),
        "CONTROL_SEQUENCE_READY" => Ok(ControlKind::Ready(false_true(&path, control)?)),
        "CONTROL_SEQUENCE_CORRID" => Ok(ControlKind::CorrelationId(data_type(&path, &control.data_type)?)),
        other => Err(field(path, other, "CONTROL_SEQUENCE_START, _END, _READY or _CORRID is expected")),
    }
}

fn false_true(path: &str, control: &raw::Control) -> Result<FalseTrue, ConfigError> {
    match (control.int32_false_true.as_slice(), control.fp32_false_true.as_slice(), control.bool_false_true.as_slice())
    {
        ([no, yes], [], []) => Ok(FalseTrue { no: f64::from(*no), yes: f64::from(*yes) }),
        ([], [no, yes], []) => Ok(FalseTrue { no: f64::from(*no), yes: f64::from(*yes) }),
        ([], [], [no, yes]) => Ok(FalseTrue { no: f64::from(*no), yes: f64::from(*yes) }),
        _ => Err(field(
            path,
            &control.kind,
            "one of int32_false_true, fp32_false_true and bool_false_true with two values is expected",
        )),
    }
}

fn idle_limit(parameters: &Parameters, batching: &raw::SequenceBatching) -> Result<Duration, ConfigError> {
    let idle = unsigned("sequence_batching.max_sequence_idle_microseconds", batching.max_sequence_idle_microseconds)?;
    let margin =
        parameters.number("sequence_idle_margin_microseconds", 0u64.., "a number of microseconds, 0 or more,")?;
    // A year is as good as never, and cannot overflow the clock.
    let limit = |time: Duration| time.min(Duration::from_secs(365 * 24 * 3600));
    let margin = margin.map_or(DEFAULT_IDLE_MARGIN, Duration::from_micros);
    Ok(limit(Duration::from_micros(idle as u64)) + limit(margin))
}

/// The bounds of the pool: what NVIDIA's stateful_backend calls lazy buffers, with its rules between the sizes. Its
/// pools are one per instance; here the instances share one, so only the capacity grows with them.
fn slot_limits(
    parameters: &Parameters,
    scheduling: &Scheduling,
    max_batch_size: usize,
    instances: usize,
) -> Result<(SlotLimits, String), ConfigError> {
    let (capacity, reason) = capacity(parameters, scheduling, instances)?;
    let size = |name| parameters.number(name, 0usize.., "a number of sequences, 0 or more,");
    let first_slab = size("initial_buffer_size")?;
    let next_slab = size("subsequent_buffer_size")?;
    let grow_below = size("buffer_alloc_threshold")?;
    let shrink_above = size("buffer_dealloc_threshold")?;
    let (first_slab, next_slab, grow_below, shrink_above) = match (first_slab, next_slab, grow_below, shrink_above) {
        (None, None, None, None) => return Ok((SlotLimits::all_at_once(capacity), reason)),
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
    let at_least_a_batch = |name, value: usize| match value >= max_batch_size {
        true => Ok(()),
        false => Err(bad(name, value, format!("it must not be smaller than max_batch_size, {max_batch_size}"))),
    };
    if first_slab < max_batch_size && first_slab == capacity {
        return Err(bad(
            "initial_buffer_size",
            first_slab,
            format!("capped by the pool's capacity ({reason}) it is smaller than max_batch_size, {max_batch_size}"),
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
    if shrink_above <= grow_below {
        log::warn!(
            "parameter 'buffer_dealloc_threshold' is {shrink_above}: it should be larger than buffer_alloc_threshold, {grow_below}, \
             or buffers come and go with every few sequences"
        );
    }
    Ok((SlotLimits { capacity, first_slab, next_slab, grow_below, shrink_above }, reason))
}

fn capacity(
    parameters: &Parameters,
    scheduling: &Scheduling,
    instances: usize,
) -> Result<(usize, String), ConfigError> {
    const NAME: &str = "max_candidate_sequence_use_ratio";
    let candidates = scheduling.candidates;
    let written: Option<f64> = parameters.number(NAME, f64::MIN_POSITIVE..=1.0, "a number above 0 and up to 1")?;
    let (ratio, of) = match scheduling.strategy {
        Strategy::Oldest { .. } => (written.unwrap_or(DEFAULT_USE_RATIO), "max_candidate_sequences"),
        Strategy::Direct => (1.0, "sequences per batch"),
    };
    // The rounding error of `candidates * ratio` must not cost a slot.
    let per_instance = ((candidates as f64 * ratio + 1e-6).floor() as usize).max(1);
    let mut reason = format!("{of} {candidates} × {NAME} {ratio}");
    if instances > 1 {
        reason = format!("{reason} × {instances} instances");
    }
    Ok((per_instance * instances, reason))
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = &self.slots;
        writeln!(
            f,
            "max_batch_size {}, {:?}, queue delay and margin {:?}, idle limit {:?}",
            self.max_batch_size, self.strategy, self.quiet, self.idle_limit
        )?;
        writeln!(f, "{:?}", self.session)?;
        let Padding { sizes } = &self.padding;
        writeln!(
            f,
            "pad to {sizes:?}, infer END requests {}, store FP32 states as FP16 {}",
            self.infer_end_requests, self.store_states_as_fp16
        )?;
        for (what, tensors) in [("input", &self.inputs), ("output", &self.outputs)] {
            for tensor in tensors {
                writeln!(f, "{what} {} {} {}", tensor.name, tensor.data_type, Dims(&tensor.dims))?;
            }
        }
        for pair in self.state_pairs.iter().flatten() {
            writeln!(f, "state {} -> {}", pair.output, pair.input)?;
        }
        for control in &self.controls {
            writeln!(f, "control {} {:?}", control.name, control.kind)?;
        }
        for (name, values) in &self.constants {
            writeln!(f, "constant {name} = {}", values.join(", "))?;
        }
        write!(
            f,
            "pool: capacity {} sequences ({}), first slab {}, next slabs {}, grows below {} free, shrinks above {} free",
            slots.capacity,
            self.capacity_reason,
            slots.first_slab,
            slots.next_slab,
            slots.grow_below,
            slots.shrink_above
        )
    }
}

#[cfg(test)]
#[path = "resolved_tests.rs"]
mod tests;
