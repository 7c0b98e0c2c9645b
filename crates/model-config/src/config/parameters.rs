//! The `parameters` of config.pbtxt that belong to this backend.

use std::collections::BTreeMap;
use std::ops::RangeBounds;
use std::str::FromStr;

use stateful_convert::{BadPairs, StatePair};

use super::raw::{ConfigError, Parameter, Result, bad};

// A misspelt parameter that is ignored could change answers silently, so a name that is in no list here is refused.
const KNOWN: [&str; 55] = [
    "allow_cpu_fallback",
    "always_pad_to_max_batch",
    "batch_info_logging_level",
    "compute_precision",
    "constant_inputs",
    "detailed_metrics_logging_level",
    "enable_cuda_graph",
    "exit_on_gpu_failure",
    "enable_mem_arena",
    "enable_mem_pattern",
    "enable_trt_caching",
    "error_inject_rate",
    "execution_mode",
    "generated_inputs",
    "growing_padding",
    "held_inputs",
    "infer_end_requests",
    "initial_state_model",
    "initial_states",
    "input_context",
    "input_windows",
    "inter_op_thread_count",
    "intra_op_thread_count",
    "join",
    "logging_level",
    "low_latency_transformation",
    "max_candidate_sequence_use_ratio",
    "max_rows_per_run",
    "max_state_bytes",
    "max_state_bytes_per_sequence",
    "max_steps_per_request",
    "memory.enable_memory_arena_shrinkage",
    "metric_logging_frequency_seconds",
    "onnx_file_name",
    "open_batch",
    "ort_ep",
    "padded_inputs",
    "padded_outputs",
    "repeat",
    "repeat_until",
    "resident_batches",
    "scheduling",
    "search",
    "sequence_idle_margin_microseconds",
    "state_api",
    "state_dims",
    "state_pair_patterns",
    "state_pairs",
    "stateful",
    "store_states_as_fp16",
    "trt_cache_dir",
    "trust_batch",
    "use_const_initializer",
    "warmup_batch_sizes",
    "wires",
];

/// Parameters that a model with `sequence_batching` must not have.
pub(super) const OF_OWN_SCHEDULING: [&str; 12] = [
    "id_reuse",
    "idle_sequence_cleanup",
    "max_parked_sequences",
    "max_queue_size",
    "max_queued_requests_per_sequence",
    "max_sequence_number",
    "on_duplicate_start",
    "park_ms",
    "queue_timeout_ms",
    "sequence_cleaner_poll_wait_minutes",
    "sequence_idle_timeout_ms",
    "worker_count",
];

/// Parameters of sequences that outlive their server, in the order in which an error names them.
pub(super) const OF_STATE_STORE: [&str; 7] = [
    "state_store",
    "durability",
    "save_interval_ms",
    "replicas",
    "max_kept_answer_bytes",
    "require_state_store",
    "state_store_ttl_ms",
];

// NVIDIA's stateful_backend has these parameters, so its configurations work here.
pub(super) const LAZY_SIZES: [&str; 4] =
    ["initial_buffer_size", "subsequent_buffer_size", "buffer_alloc_threshold", "buffer_dealloc_threshold"];

/// Parameters of Triton's core, which any model's configuration may have.
const TRITONS_OWN: [&str; 2] = ["FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"];

/// CUDA options that a model's parameters may have, some of them as in Triton's onnxruntime backend.
pub(super) const CUDA_PARAMETERS: [&str; 9] = [
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "cudnn_conv1d_pad_to_nc1d",
    "do_copy_in_default_stream",
    "gpu_mem_limit",
    "prefer_nhwc",
    "tunable_op_enable",
    "use_tf32",
];

// TensorRT's options go to ONNX Runtime, which knows their names and values.
pub(super) const TENSORRT_PREFIX: &str = "trt_";

// ONNX Runtime takes the entries of a session's configuration as they are, and ignores names that it does not know.
pub(super) const SESSION_PREFIX: &str = "session.";

/// Options of OpenVINO Model Server that are no parameters here, and what to do instead.
const OVMS_OPTIONS: [(&str, &str); 9] = [
    ("base_path", "put the model into a folder of the model repository"),
    ("batch_size", "write the field 'max_batch_size'"),
    ("layout", "there is no such option: give the data as the model takes it"),
    ("model_version_policy", "write the field 'version_policy'"),
    ("nireq", "write 'worker_count', the number of threads that run the model"),
    ("num_streams", "write 'worker_count', the number of threads that run the model"),
    ("plugin_config", "write 'worker_count' for NUM_STREAMS and 'intra_op_thread_count' for INFERENCE_NUM_THREADS"),
    ("shape", "write the 'dims' of the field 'input'"),
    ("target_device", "write KIND_CPU or KIND_GPU in the field 'instance_group'"),
];

/// The parameters as written. Every name is known.
#[derive(Clone, Debug)]
pub struct Parameters(BTreeMap<String, Parameter>);

impl Parameters {
    pub fn new(written: BTreeMap<String, Parameter>) -> Result<Self> {
        match written.keys().find(|name| !is_known(name)) {
            Some(name) => Err(ConfigError::UnknownParameter { name: name.clone(), help: help(name) }),
            None => Ok(Self(written)),
        }
    }

    pub fn set(&mut self, name: &'static str, value: String) {
        debug_assert!(is_known(name));
        self.0.insert(name.to_owned(), Parameter { string_value: value });
    }

    /// The parameters with this prefix that go to ONNX Runtime, as they are written.
    pub fn passed_on(&self, prefix: &str) -> impl Iterator<Item = (&str, &str)> {
        let written = self.0.iter().map(|(name, parameter)| (name.as_str(), parameter.string_value.as_str()));
        // `trt_cache_dir` is ours, though it begins like an option of TensorRT.
        written.filter(move |(name, _)| name.starts_with(prefix) && !KNOWN.contains(name))
    }

    /// The value as written, trimmed; `None` if the parameter is absent.
    pub fn text(&self, name: &'static str) -> Option<&str> {
        debug_assert!(is_known(name));
        self.0.get(name).map(|parameter| parameter.string_value.trim())
    }

    pub fn names(&self, name: &'static str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split([',', ' ']).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }

    /// Refuses a parameter that contradicts another one, or that nothing would read.
    pub fn refuse(&self, name: &'static str, why: &str) -> Result<()> {
        self.text(name).map_or(Ok(()), |text| Err(bad(name, text, why)))
    }

    pub fn number<T: FromStr + PartialOrd>(
        &self,
        name: &'static str,
        range: impl RangeBounds<T>,
        allowed: &str,
    ) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(bad(name, text, format!("{allowed} is expected"))),
        }
    }

    /// A switch, written `0` or `1`.
    pub fn switch(&self, name: &'static str, default: bool) -> Result<bool> {
        self.choice(name, &[("0", false), ("1", true)]).map(|given| given.unwrap_or(default))
    }

    /// A switch of OpenVINO Model Server, which writes `true` or `false`.
    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool> {
        let words = [("true", true), ("false", false), ("1", true), ("0", false)];
        self.choice(name, &words).map(|given| given.unwrap_or(default))
    }

    /// The assignments of a parameter: `name=value` or `name=[value, value]`, separated by spaces or commas. A name
    /// without a value gets `alone`, if that is given. `read` converts each value, or says what is wrong.
    pub fn assigned<T>(
        &self,
        name: &'static str,
        form: &str,
        alone: Option<&str>,
        read: impl Fn(String, Assigned) -> Result<T, String>,
    ) -> Result<Vec<T>> {
        let Some(text) = self.text(name) else { return Ok(Vec::new()) };
        let assigned = assignments(text, form, alone);
        let values = assigned.and_then(|all| all.into_iter().map(|(name, value)| read(name, value)).collect());
        values.map_err(|why| bad(name, text, why))
    }

    pub fn choice<T: Copy>(&self, name: &'static str, words: &[(&str, T)]) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let words: Vec<_> = words.iter().map(|(word, _)| format!("'{word}'")).collect();
                Err(bad(name, text, format!("one of {} is expected", words.join(", "))))
            }
        }
    }
}

/// The parameters that this backend reads itself.
fn ours() -> impl Iterator<Item = &'static str> {
    KNOWN.into_iter().chain(OF_OWN_SCHEDULING).chain(OF_STATE_STORE).chain(LAZY_SIZES)
}

fn is_known(name: &str) -> bool {
    // No list of options would be complete: which there are depends on the ONNX Runtime that is loaded.
    let prefixes = ["TRITON_", SESSION_PREFIX, TENSORRT_PREFIX];
    let of_others = TRITONS_OWN.into_iter().chain(CUDA_PARAMETERS);
    ours().chain(of_others).any(|known| known == name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// The line of config.pbtxt that gives a parameter, for messages that say what to write.
pub fn parameter_line(name: &str, value: &str) -> String {
    // Triton's log escapes double quotes.
    format!("parameters {{ key: '{name}' value {{ string_value: '{value}' }} }}")
}

fn help(name: &str) -> Option<String> {
    let of_ovms =
        OVMS_OPTIONS.into_iter().find(|(known, _)| name.eq_ignore_ascii_case(known)).map(|(_, help)| help.to_owned());
    // An option of OpenVINO Model Server is not a misspelling, whatever it resembles.
    of_ovms.or_else(|| nearest(name).map(|known| format!("did you mean '{known}'?")))
}

fn nearest(name: &str) -> Option<&'static str> {
    let alike = ours().filter_map(|known| Some((similarity(name, known)?, known)));
    alike.max_by(|(a, one), (b, other)| a.total_cmp(b).then(one.cmp(other))).map(|(_, known)| known)
}

/// How similar two names are, from 0.5 to 1; `None` if neither can be a misspelling of the other.
pub fn similarity(one: &str, other: &str) -> Option<f64> {
    let similarity = strsim::normalized_damerau_levenshtein(&one.to_lowercase(), &other.to_lowercase());
    (similarity >= 0.5).then_some(similarity)
}

pub fn state_pairs(text: &str) -> Result<Vec<StatePair>> {
    stateful_convert::state_pairs(text).map_err(bad_pairs)
}

fn bad_pairs(BadPairs { text, twice }: BadPairs) -> ConfigError {
    const FORM: &str = "pairs '<<<input, output>>>' separated by spaces, 'auto' or 'auto-by-shape' are expected";
    let allowed = twice.map_or_else(|| FORM.to_owned(), |name| format!("'{name}' may stand in one pair only"));
    bad("state_pairs", text, allowed)
}

/// The names of a state pair, or of several: a `*` in both names stands for the same text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairPattern(pub(crate) StatePair);

impl PairPattern {
    /// `None` unless each of the two names has one `*`, or neither has any.
    pub fn new(pair: StatePair) -> Option<Self> {
        let stars = |name: &str| name.matches('*').count();
        (stars(&pair.input) <= 1 && stars(&pair.input) == stars(&pair.output)).then_some(Self(pair))
    }

    pub fn matches(&self, input: &str, output: &str) -> bool {
        starred(&self.0.input, input).is_some_and(|found| starred(&self.0.output, output) == Some(found))
    }
}

/// The part of a name that the `*` of a pattern matches. A pattern without a `*` matches only the name that equals it.
fn starred<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    match pattern.split_once('*') {
        None => (name == pattern).then_some(""),
        Some((front, behind)) => name.strip_prefix(front)?.strip_suffix(behind),
    }
}

/// Reads `state_pair_patterns`, in the form of `state_pairs`.
pub fn pair_patterns(text: &str) -> Result<Vec<PairPattern>> {
    const NAME: &str = "state_pair_patterns";
    const FORM: &str = "pairs '<<<input, output>>>' with one '*' in each name, or in neither, are expected";
    let pairs = state_pairs(text).map_err(|_| bad(NAME, text, FORM))?;
    pairs.into_iter().map(|pair| PairPattern::new(pair).ok_or_else(|| bad(NAME, text, FORM))).collect()
}

pub fn described_state_pairs(description: &str) -> Result<Vec<StatePair>> {
    stateful_convert::described_state_pairs(description).map_err(bad_pairs)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assigned {
    One(String),
    /// `name=[value, value]`; may be empty.
    List(Vec<String>),
}

impl Assigned {
    pub fn one(self, form: &str) -> Result<String, String> {
        match self {
            Self::One(value) => Ok(value),
            Self::List(_) => Err(form.to_owned()),
        }
    }

    /// The values. An empty list is an error.
    pub fn values(self, form: &str) -> Result<Vec<String>, String> {
        match self {
            Self::One(value) => Ok(vec![value]),
            Self::List(values) if values.is_empty() => Err(form.to_owned()),
            Self::List(values) => Ok(values),
        }
    }
}

fn assignments(text: &str, form: &str, alone: Option<&str>) -> Result<Vec<(String, Assigned)>, String> {
    const BETWEEN: [char; 4] = [',', ' ', '\t', '\n'];
    let mut assigned: Vec<(String, Assigned)> = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (key, behind) = rest.split_at(rest.find(|c| c == '=' || BETWEEN.contains(&c)).unwrap_or(rest.len()));
        let (value, behind) = match behind.trim_start().strip_prefix('=').map(str::trim_start) {
            None => (Assigned::One(alone.ok_or(form)?.to_owned()), behind),
            Some(list) if list.starts_with('[') => {
                let (list, behind) = list[1..].split_once(']').ok_or(form)?;
                let values = list.split(',').filter(|_| !list.trim().is_empty()).map(|value| value.trim().to_owned());
                (Assigned::List(values.collect()), behind)
            }
            Some(value) => {
                let (value, behind) = value.split_at(value.find(BETWEEN).unwrap_or(value.len()));
                (Assigned::One(value.to_owned()), behind)
            }
        };
        let is_empty = match &value {
            Assigned::One(value) => value.is_empty(),
            Assigned::List(values) => values.iter().any(String::is_empty),
        };
        if key.is_empty() || is_empty {
            return Err(form.to_owned());
        }
        // If one tensor has two values, nothing says which one the user wants.
        if assigned.iter().any(|(known, _)| known == key) {
            return Err(format!("'{key}' may be given once only"));
        }
        assigned.push((key.to_owned(), value));
        rest = behind.trim_start_matches(BETWEEN);
    }
    Ok(assigned)
}

/// Splits `text@axis`. `@axis` may be missing.
pub fn with_axis(text: &str) -> Result<(&str, Option<usize>), String> {
    // The name of a tensor may contain '@', so only the last one counts.
    let Some((text, axis)) = text.rsplit_once('@') else { return Ok((text, None)) };
    let axis = axis.parse().map_err(|_| format!("'{axis}' is no axis: a whole number is expected"))?;
    Ok((text, Some(axis)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(input: &str, output: &str) -> StatePair {
        StatePair { input: input.to_owned(), output: output.to_owned() }
    }

    #[test]
    fn state_pairs_are_read_with_any_spacing() {
        let two = vec![pair("a", "b"), pair("c d", "e/f:0")];
        assert_eq!(state_pairs("<<<a, b>>> <<<c d, e/f:0>>>").unwrap(), two);
        assert_eq!(state_pairs("<<<a,b>>>,<<<c d, e/f:0>>>").unwrap(), two);
        assert_eq!(state_pairs("  <<< a ,b>>><<<c d,e/f:0 >>>\n").unwrap(), two);
    }

    #[test]
    fn pairs_are_read_from_a_graph_description_in_the_order_it_states() {
        let description = "made by hand\nInputState, OutputState pairs: <<<a, b>>> <<<c, d>>>\n\
                           PastValueOutput/PastValueInput <<<e_out, e_in>>>\nOutputState only <<<x, y>>>";
        let expected = vec![pair("a", "b"), pair("c", "d"), pair("e_in", "e_out")];
        assert_eq!(described_state_pairs(description).unwrap(), expected);
        assert_eq!(described_state_pairs("").unwrap(), []);
        assert!(described_state_pairs("InputState OutputState <<<a>>>").is_err());
    }

    #[test]
    fn state_pairs_in_another_form_are_refused() {
        for text in
            ["", "a, b", "<<<a>>>", "<<<a,b>>", "<<<a,b,c>>>", "<<<,b>>>", "<<<a,>>>", "<<<a,b>>> x", "<<<<a,b>>>"]
        {
            let error = state_pairs(text).unwrap_err().to_string();
            assert!(error.contains("state_pairs") && error.contains("<<<input, output>>>"), "{text}: {error}");
        }
    }

    #[test]
    fn a_name_may_stand_in_one_pair_only() {
        for text in ["<<<a,b>>> <<<a,c>>>", "<<<a,b>>> <<<c,b>>>"] {
            assert!(state_pairs(text).unwrap_err().to_string().contains("one pair only"));
        }
    }

    #[test]
    fn patterns_have_one_part_that_both_names_share() {
        let patterns = pair_patterns("<<<mem_*, updated_mem_*>>> <<<*.in, *.out>>>").unwrap();
        assert!(patterns[0].matches("mem_1", "updated_mem_1") && !patterns[0].matches("mem_1", "updated_mem_2"));
        assert!(patterns[1].matches("a.b.in", "a.b.out") && !patterns[1].matches("a.in", "b.out"));
        let exact = &pair_patterns("<<<mem, updated>>>").unwrap()[0];
        assert!(exact.matches("mem", "updated") && !exact.matches("mem_1", "updated_1"));
        for text in ["mem_*", "<<<a*, b>>>", "<<<a, b*>>>", "<<<a**, b*>>>", ""] {
            let error = pair_patterns(text).unwrap_err().to_string();
            assert!(error.contains("'state_pair_patterns'") && error.contains("one '*'"), "{text}: {error}");
        }
    }

    #[test]
    fn an_unknown_name_gets_the_nearest_known_one() {
        assert_eq!(nearest("state_pair"), Some("state_pairs"));
        assert_eq!(nearest("Initial_Buffer_Sise"), Some("initial_buffer_size"));
        assert_eq!(nearest("zzz"), None);
        assert_eq!(help("state_pair").as_deref(), Some("did you mean 'state_pairs'?"));
    }

    #[test]
    fn an_option_of_openvino_model_server_gets_an_error_that_names_its_replacement() {
        assert_eq!(help("nireq").as_deref(), Some("write 'worker_count', the number of threads that run the model"));
        assert_eq!(help("NUM_STREAMS"), help("nireq"));
        assert!(OVMS_OPTIONS.iter().all(|(name, _)| !KNOWN.contains(name)));
    }
}
