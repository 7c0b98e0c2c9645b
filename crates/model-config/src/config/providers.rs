//! How ONNX Runtime runs a model: the options of its sessions, and on a GPU those of its CUDA and TensorRT providers.
//!
//! The parameters of [`SessionOptions`] have the names that Triton's onnxruntime backend gives them, so that a
//! configuration works with both.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::parameters::{CUDA_PARAMETERS, Parameters, SESSION_PREFIX, TENSORRT_PREFIX};
use super::raw::{Accelerator, Accelerators, ConfigError, Optimization, Result, bad, field};

const ARENA_SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    pub intra_op_threads: usize,
    /// Threads that run operators side by side, with parallel execution; 0 for one per core.
    pub inter_op_threads: usize,
    /// Whether operators that do not depend on each other run side by side.
    pub parallel_execution: bool,
    pub graph_optimization: GraphOptimization,
    pub mem_arena: bool,
    /// Whether the configuration asks for an arena, or for one that shrinks.
    pub mem_arena_is_written: bool,
    /// Whether large tensors on the CPU have pages of their own and there is no arena. That depends on the model's
    /// states, so it is set when the model is bound.
    pub pages: bool,
    /// Whether ONNX Runtime plans the memory of a run from the last one.
    pub mem_pattern: bool,
    /// Arenas that shrink after each run, such as `cpu:0`.
    pub arena_shrinkage: Option<String>,
    pub entries: Vec<(String, String)>,
}

/// How far ONNX Runtime may rewrite the model's graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphOptimization {
    None,
    Basic,
    Extended,
    All,
}

impl SessionOptions {
    pub(super) fn new(parameters: &Parameters, optimization: &Optimization) -> Result<Self> {
        let threads = |name| parameters.number(name, 0usize..=1024, "a number of threads from 0 to 1024");
        let level = optimization.graph.level.0;
        // The numbers are those of Triton's schema, not ONNX Runtime's.
        let graph_optimization = match level {
            0 => GraphOptimization::All,
            -1 => GraphOptimization::Basic,
            1 => GraphOptimization::Extended,
            2 => GraphOptimization::None,
            _ => {
                let allowed = "0 (all), -1 (basic), 1 (extended) or 2 (none) is expected";
                return Err(field("optimization.graph.level", level.to_string(), allowed));
            }
        };
        if let Some(accelerator) = optimization.execution_accelerators.cpu_execution_accelerator.first() {
            let path = "optimization.execution_accelerators.cpu_execution_accelerator";
            let why = "this backend has no accelerator for the CPU: remove it";
            return Err(field(path, format!("'{}'", accelerator.name), why));
        }
        let arena_shrinkage = parameters.text(ARENA_SHRINKAGE).map(str::to_owned);
        if arena_shrinkage.iter().flat_map(|arenas| arenas.split(';')).any(|arena| !arena.contains(':')) {
            parameters.refuse(ARENA_SHRINKAGE, "arenas such as 'cpu:0', separated by ';', are expected")?;
        }
        let entries = parameters.passed_on(SESSION_PREFIX);
        let mem_arena = parameters.switch("enable_mem_arena", true)?;
        // The onnxruntime backend has a thread per core. Small steps are faster with one, and batches and instances run
        // in parallel anyway.
        Ok(Self {
            intra_op_threads: threads("intra_op_thread_count")?.unwrap_or(1),
            inter_op_threads: threads("inter_op_thread_count")?.unwrap_or(1),
            parallel_execution: parameters.switch("execution_mode", false)?,
            graph_optimization,
            mem_arena,
            mem_arena_is_written: arena_shrinkage.is_some()
                || (mem_arena && parameters.text("enable_mem_arena").is_some()),
            pages: false,
            mem_pattern: parameters.switch("enable_mem_pattern", true)?,
            arena_shrinkage,
            entries: entries.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        })
    }
}

impl fmt::Display for SessionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph_optimization = match self.graph_optimization {
            GraphOptimization::None => "none",
            GraphOptimization::Basic => "basic",
            GraphOptimization::Extended => "extended",
            GraphOptimization::All => "all",
        };
        write!(
            f,
            "intra_op_thread_count {}, inter_op_thread_count {}, execution_mode {}, graph optimization \
             {graph_optimization}, enable_mem_arena {}, enable_mem_pattern {}",
            self.intra_op_threads,
            self.inter_op_threads,
            u8::from(self.parallel_execution),
            u8::from(self.mem_arena && !self.pages),
            u8::from(self.mem_pattern)
        )?;
        if let Some(arenas) = &self.arena_shrinkage {
            write!(f, ", memory.enable_memory_arena_shrinkage {arenas}")?;
        }
        self.entries.iter().try_for_each(|(name, value)| write!(f, ", {name} {value}"))
    }
}

/// The providers of instances on a GPU, with their options by ONNX Runtime's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Providers {
    /// `None` if TensorRT isn't used.
    pub tensorrt: Option<Options>,
    /// CUDA runs what TensorRT does not.
    pub cuda: Options,
    pub allow_cpu_fallback: bool,
    pub cuda_graph: bool,
    pub exit_on_gpu_failure: bool,
}

pub const ARENA_EXTEND_STRATEGY: &str = "arena_extend_strategy";

pub type Options = BTreeMap<String, String>;

/// A CUDA option's value in ONNX Runtime's form, or what is allowed.
fn cuda_value(name: &str, text: &str) -> Result<String, String> {
    let words: &[&str] = match name {
        "cudnn_conv_algo_search" => &["EXHAUSTIVE", "HEURISTIC", "DEFAULT"],
        ARENA_EXTEND_STRATEGY => &["kNextPowerOfTwo", "kSameAsRequested"],
        "gpu_mem_limit" if text.parse().is_ok_and(|bytes: u64| bytes > 0) => return Ok(text.to_owned()),
        "gpu_mem_limit" => return Err("a number of bytes is expected".to_owned()),
        // An accelerator may have any option of ONNX Runtime, which checks those itself.
        other if !CUDA_PARAMETERS.contains(&other) => return Ok(text.to_owned()),
        _ if ["0", "1", "true", "false", "True", "False"].contains(&text) => return Ok(text.to_owned()),
        _ => return Err("'0' or '1' is expected".to_owned()),
    };
    // Triton's onnxruntime backend writes these as numbers.
    let by_number = text.parse().ok().and_then(|number: usize| words.get(number).copied());
    let value = by_number.unwrap_or(text);
    if words.contains(&value) {
        return Ok(value.to_owned());
    }
    let named: Vec<_> = words.iter().enumerate().map(|(number, word)| format!("'{word}' ({number})")).collect();
    Err(format!("one of {} is expected", named.join(", ")))
}

/// Options that the backend sets itself, and from what.
const OURS: [(&str, &str); 5] = [
    ("device_id", "from 'gpus' of 'instance_group'"),
    ("has_user_compute_stream", "always"),
    ("user_compute_stream", "always"),
    ("enable_cuda_graph", "from the parameter 'enable_cuda_graph'"),
    ("trt_cuda_graph_enable", "to 0, because TensorRT replays the first graph in every run"),
];

const ACCELERATORS: &str = "optimization.execution_accelerators.gpu_execution_accelerator";

impl Providers {
    /// Reads and checks the options. `on_gpu`: some instances run on a GPU.
    pub(super) fn new(parameters: &Parameters, accelerators: &Accelerators, on_gpu: bool) -> Result<Self> {
        let given = Given::new(parameters, &accelerators.gpu_execution_accelerator)?;
        if on_gpu { given.on_gpu() } else { given.on_cpu() }
    }
}

impl fmt::Display for Providers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written = |options: &Options| {
            let options: Vec<_> = options.iter().map(|(name, value)| format!("{name}={value}")).collect();
            if options.is_empty() { "its defaults".to_owned() } else { options.join(", ") }
        };
        if let Some(options) = &self.tensorrt {
            write!(f, "TensorRT with {}; ", written(options))?;
        }
        write!(f, "CUDA with {}", written(&self.cuda))?;
        if self.cuda_graph { f.write_str("; CUDA graphs") } else { Ok(()) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Provider {
    Cpu,
    Cuda,
    TensorRt,
}

struct Given<'a> {
    parameters: &'a Parameters,
    accelerators: &'a [Accelerator],
    provider: Option<Provider>,
    is_fp16: bool,
    caching: bool,
    tensorrt: Options,
    made: Providers,
}

impl<'a> Given<'a> {
    fn new(parameters: &'a Parameters, accelerators: &'a [Accelerator]) -> Result<Self> {
        if parameters.text("trt_cache_dir").is_some_and(|dir| !dir.starts_with('/')) {
            parameters.refuse("trt_cache_dir", "an absolute path is expected")?;
        }
        // Configurations of NVIDIA's stateful_backend have it for their debug builds. It has no effect here.
        parameters.number("error_inject_rate", 0u32..=100, "a percentage from 0 to 100")?;
        let tensorrt = parameters.passed_on(TENSORRT_PREFIX);
        let mut given = Self {
            parameters,
            accelerators,
            provider: parameters
                .choice("ort_ep", &[("cpu", Provider::Cpu), ("cuda", Provider::Cuda), ("trt", Provider::TensorRt)])?,
            is_fp16: parameters.choice("compute_precision", &[("fp32", false), ("fp16", true)])?.unwrap_or(false),
            caching: parameters.switch("enable_trt_caching", false)?,
            made: Providers {
                tensorrt: None,
                cuda: Options::new(),
                allow_cpu_fallback: parameters.switch("allow_cpu_fallback", false)?,
                cuda_graph: parameters.switch("enable_cuda_graph", false)?,
                exit_on_gpu_failure: parameters.switch("exit_on_gpu_failure", false)?,
            },
            tensorrt: tensorrt.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect(),
        };
        for name in CUDA_PARAMETERS {
            if let Some(text) = parameters.text(name) {
                let value = cuda_value(name, text).map_err(|allowed| bad(name, text, allowed))?;
                given.made.cuda.insert(name.to_owned(), value);
            }
        }
        given.check_ours()?;
        for accelerator in accelerators {
            given.add(accelerator)?;
        }
        let wants_tensorrt = accelerators.iter().any(|accelerator| accelerator.name == "tensorrt");
        match given.provider {
            Some(Provider::Cuda) if wants_tensorrt => {
                return Err(field(ACCELERATORS, "'tensorrt'", "parameter 'ort_ep' is 'cuda': set it to 'trt'"));
            }
            None if wants_tensorrt => given.provider = Some(Provider::TensorRt),
            None if !accelerators.is_empty() => given.provider = Some(Provider::Cuda),
            _ => {}
        }
        Ok(given)
    }

    /// `optimization.execution_accelerators.gpu_execution_accelerator`, as Triton's onnxruntime backend reads it.
    fn add(&mut self, accelerator: &Accelerator) -> Result<()> {
        for (name, value) in &accelerator.parameters {
            let refused = |allowed: String| field(format!("{ACCELERATORS} '{name}'"), format!("'{value}'"), allowed);
            let (options, name, value) = match accelerator.name.as_str() {
                "tensorrt" => {
                    let (name, value) = tensorrt_option(name, value)?;
                    (&mut self.tensorrt, name, value.to_owned())
                }
                _ => (&mut self.made.cuda, name.as_str(), cuda_value(name, value).map_err(refused)?),
            };
            if let Some(other) = options.insert(name.to_owned(), value.clone()).filter(|other| *other != value) {
                let allowed = format!("it is also given as '{other}': remove one");
                return Err(field(format!("{ACCELERATORS} '{name}'"), format!("'{value}'"), allowed));
            }
        }
        if !["cuda", "tensorrt"].contains(&accelerator.name.as_str()) {
            return Err(field(ACCELERATORS, format!("'{}'", accelerator.name), "'cuda' or 'tensorrt' is expected"));
        }
        self.check_ours()
    }

    fn check_ours(&self) -> Result<()> {
        let given = |(name, _): &&(&str, &str)| self.made.cuda.contains_key(*name) || self.tensorrt.contains_key(*name);
        let Some((name, from)) = OURS.iter().find(given) else { return Ok(()) };
        Err(field(format!("option '{name}'"), "given", format!("the backend sets it, {from}: remove it")))
    }

    fn on_gpu(mut self) -> Result<Providers> {
        let provider = self.provider.unwrap_or(Provider::Cuda);
        if provider == Provider::Cpu {
            let allowed = "instances of KIND_GPU run with 'cuda' or 'trt': set KIND_CPU to run on the CPU";
            return Err(bad("ort_ep", "cpu", allowed));
        }
        if self.is_fp16 && provider == Provider::Cuda {
            let allowed = "only TensorRT computes in fp16: set 'ort_ep' to 'trt', or 'compute_precision' to 'fp32'";
            return Err(bad("compute_precision", "fp16", allowed));
        }
        if self.made.cuda_graph {
            self.check_graphs(provider)?;
        }
        if provider == Provider::Cuda {
            let names = self.caching.then_some("enable_trt_caching").into_iter();
            for name in names.chain(self.tensorrt.keys().map(String::as_str)) {
                log::warn!("'{name}' has no effect: it is TensorRT's, and 'ort_ep' is not 'trt'");
            }
        }
        let mut tensorrt = self.tensorrt;
        // What is written by TensorRT's own names comes before what other parameters imply.
        let mut set = |name: &str, value: &str| {
            tensorrt.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        };
        if self.is_fp16 {
            set("trt_fp16_enable", "1");
        }
        if self.caching && provider == Provider::TensorRt {
            let dir = self.parameters.text("trt_cache_dir").map_or_else(default_cache_dir, |dir| Ok(dir.to_owned()))?;
            set("trt_engine_cache_enable", "1");
            set("trt_engine_cache_path", &dir);
            set("trt_timing_cache_enable", "1");
            set("trt_timing_cache_path", &dir);
        }
        self.made.tensorrt = (provider == Provider::TensorRt).then_some(tensorrt);
        Ok(self.made)
    }

    fn check_graphs(&self, provider: Provider) -> Result<()> {
        // A list that has no number would make no graph at all.
        let has_sizes = |text: &str| text.contains(|letter: char| letter.is_ascii_digit());
        if !self.parameters.text("warmup_batch_sizes").is_none_or(has_sizes) {
            let why = "'enable_cuda_graph' makes a graph for each number of rows that is listed there";
            return Err(ConfigError::MissingParameter { name: "warmup_batch_sizes", why: why.to_owned() });
        }
        if provider == Provider::TensorRt {
            let allowed = "TensorRT replays the first graph in every run, whatever its tensors are: set it to '0', or \
                           'ort_ep' to 'cuda'";
            return Err(bad("enable_cuda_graph", "1", allowed));
        }
        let why = "it frees memory that CUDA graphs use: remove it, or set 'enable_cuda_graph' to '0'";
        self.parameters.refuse(ARENA_SHRINKAGE, why)
    }

    fn on_cpu(self) -> Result<Providers> {
        let gpu_only = [
            // The provider may come from the accelerators, which are named below.
            ("ort_ep", self.provider.is_some_and(|provider| provider != Provider::Cpu) && self.accelerators.is_empty()),
            ("enable_trt_caching", self.caching),
            ("enable_cuda_graph", self.made.cuda_graph),
            ("exit_on_gpu_failure", self.made.exit_on_gpu_failure),
        ];
        for (name, _) in gpu_only.iter().filter(|(_, given)| *given) {
            log::info!("parameter '{name}' has no effect: instances are of KIND_CPU");
        }
        for name in self.made.cuda.keys().chain(self.tensorrt.keys()) {
            log::info!("option '{name}' has no effect: instances are of KIND_CPU");
        }
        for Accelerator { name, .. } in self.accelerators {
            log::info!("GPU accelerator '{name}' has no effect: instances are of KIND_CPU");
        }
        if self.is_fp16 {
            let allowed = "only TensorRT computes in fp16, and this model runs on the CPU: 'fp32' is expected";
            return Err(bad("compute_precision", "fp16", allowed));
        }
        // Devices for tests belong to instances of KIND_CPU.
        Ok(Providers { exit_on_gpu_failure: self.made.exit_on_gpu_failure, ..Providers::default() })
    }
}

const CACHE_FOLDER: &str = "triton-stateful";

fn default_cache_dir() -> Result<String> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let parent = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let parent = parent.ok_or_else(|| "neither XDG_CACHE_HOME nor HOME names a folder".to_owned());
    let folder = parent.and_then(|parent| make_private(&parent)).map_err(|why| ConfigError::MissingParameter {
        name: "trt_cache_dir",
        why: format!("'enable_trt_caching' needs a folder that only the server can write, and {why}"),
    })?;
    Ok(folder.to_string_lossy().into_owned())
}

/// Makes the folder if it is missing, or says why it cannot be used.
fn make_private(parent: &Path) -> Result<PathBuf, String> {
    let folder = parent.join(CACHE_FOLDER);
    let failed = |why: String| format!("{} {why}", folder.display());
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    let metadata = made.and_then(|()| folder.metadata());
    let metadata = metadata.map_err(|error| failed(format!("cannot be made: {error}")))?;
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user {
        return Err(failed(format!("belongs to user {}, and the server runs as user {user}", metadata.uid())));
    }
    // An engine is code that the server runs, so no other user may be able to put one there.
    if metadata.mode() & 0o022 != 0 {
        return Err(failed(format!("can be written by others (mode {:o})", metadata.mode() & 0o777)));
    }
    Ok(folder)
}

/// Turns names that only Triton's onnxruntime backend has into ONNX Runtime's.
fn tensorrt_option<'a>(name: &'a str, value: &'a str) -> Result<(&'a str, &'a str)> {
    let path = "gpu_execution_accelerator 'tensorrt', parameter 'precision_mode'";
    Ok(match (name, value) {
        ("precision_mode", "FP16") => ("trt_fp16_enable", "1"),
        ("precision_mode", "INT8") => ("trt_int8_enable", "1"),
        ("precision_mode", "FP32") => ("trt_fp16_enable", "0"),
        ("precision_mode", other) => return Err(field(path, other, "'FP32', 'FP16' or 'INT8' is expected")),
        ("max_workspace_size_bytes", value) => ("trt_max_workspace_size", value),
        ("int8_calibration_table_name", value) => ("trt_int8_calibration_table_name", value),
        ("int8_use_native_calibration_table", value) => ("trt_int8_use_native_calibration_table", value),
        option => option,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::raw::Parameter;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    fn providers(parameters: &[(&str, &str)], accelerators: &[(&str, &[(&str, &str)])]) -> Result<Providers, String> {
        let parameter = |value: &str| Parameter { string_value: value.to_owned() };
        let parameters = parameters.iter().map(|(name, value)| ((*name).to_owned(), parameter(value))).collect();
        let accelerator = |(name, options): &(&str, &[(&str, &str)])| Accelerator {
            name: (*name).to_owned(),
            parameters: options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        };
        let accelerators = Accelerators {
            gpu_execution_accelerator: accelerators.iter().map(accelerator).collect(),
            cpu_execution_accelerator: Vec::new(),
        };
        let parameters = Parameters::new(parameters).map_err(|error| error.to_string())?;
        Providers::new(&parameters, &accelerators, true).map_err(|error| error.to_string())
    }

    fn options(of: &Options) -> Vec<(&str, &str)> {
        of.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn cuda_is_the_default_and_takes_its_options_by_name() {
        let made = providers(&[("gpu_mem_limit", "4294967296"), ("cudnn_conv_algo_search", "2")], &[]).unwrap();
        assert_eq!(made.tensorrt, None);
        assert_eq!(options(&made.cuda), [("cudnn_conv_algo_search", "DEFAULT"), ("gpu_mem_limit", "4294967296")]);
        let made = providers(&[], &[("cuda", &[("sdpa_kernel", "1")])]).unwrap();
        assert_eq!(options(&made.cuda), [("sdpa_kernel", "1")]);
        let error = providers(&[("cudnn_conv_algo_search", "fast")], &[]).unwrap_err();
        assert!(error.contains("'fast'") && error.contains("HEURISTIC"), "{error}");
    }

    #[test]
    fn tensorrt_has_the_names_of_three_worlds() {
        let ours = [
            ("ort_ep", "trt"),
            ("compute_precision", "fp16"),
            ("enable_trt_caching", "1"),
            ("trt_cache_dir", "/cache"),
            ("trt_builder_optimization_level", "4"),
        ];
        let made = providers(&ours, &[]).unwrap();
        let wanted = [
            ("trt_builder_optimization_level", "4"),
            ("trt_engine_cache_enable", "1"),
            ("trt_engine_cache_path", "/cache"),
            ("trt_fp16_enable", "1"),
            ("trt_timing_cache_enable", "1"),
            ("trt_timing_cache_path", "/cache"),
        ];
        assert_eq!(options(&made.tensorrt.unwrap()), wanted);
        assert!(providers(&[("enable_cuda_graph", "1")], &[]).unwrap().cuda_graph, "for full batches");
        let tritons: &[(&str, &str)] = &[("precision_mode", "FP16"), ("max_workspace_size_bytes", "1073741824")];
        let made = providers(&[], &[("cuda", &[]), ("tensorrt", tritons)]).unwrap();
        let wanted = [("trt_fp16_enable", "1"), ("trt_max_workspace_size", "1073741824")];
        assert_eq!(options(&made.tensorrt.unwrap()), wanted);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_way_out() {
        let refused = |parameters: &[(&str, &str)], accelerators: &[(&str, &[(&str, &str)])], words: &[&str]| {
            let error = providers(parameters, accelerators).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        refused(&[("ort_ep", "cpu")], &[], &["ort_ep", "cpu", "KIND_GPU", "KIND_CPU"]);
        refused(&[("compute_precision", "fp16")], &[], &["compute_precision", "fp16", "trt"]);
        let no_sizes = [("enable_cuda_graph", "1"), ("warmup_batch_sizes", " , ")];
        refused(&no_sizes, &[], &["warmup_batch_sizes", "enable_cuda_graph"]);
        for value in ["lots", "-1", "4G", "0"] {
            refused(&[("gpu_mem_limit", value)], &[], &["gpu_mem_limit", value, "bytes"]);
            refused(&[], &[("cuda", &[("gpu_mem_limit", value)])], &["accelerator 'gpu_mem_limit'", value, "bytes"]);
        }
        for name in ["use_tf32", "prefer_nhwc", "tunable_op_enable", "do_copy_in_default_stream"] {
            refused(&[(name, "yes")], &[], &[name, "yes", "'0' or '1'"]);
        }
        refused(&[("use_tf32", "1")], &[("cuda", &[("use_tf32", "0")])], &["use_tf32", "'0'", "also given as", "'1'"]);
        refused(&[("ort_ep", "cuda")], &[("tensorrt", &[])], &["tensorrt", "ort_ep", "cuda"]);
        refused(&[("trt_cache_dir", "here")], &[], &["trt_cache_dir", "here", "absolute"]);
        refused(&[("trt_cuda_graph_enable", "1")], &[], &["trt_cuda_graph_enable", "TensorRT replays the first graph"]);
        refused(&[("ort_ep", "trt"), ("enable_cuda_graph", "1")], &[], &["'enable_cuda_graph'", "the first graph"]);
        let shrinks = [("enable_cuda_graph", "1"), ("memory.enable_memory_arena_shrinkage", "gpu:0")];
        refused(&shrinks, &[], &["memory.enable_memory_arena_shrinkage", "gpu:0", "CUDA graphs"]);
        refused(
            &[],
            &[("cuda", &[("enable_cuda_graph", "1")])],
            &["enable_cuda_graph", "parameter 'enable_cuda_graph'"],
        );
        refused(&[], &[("cuda", &[("device_id", "1")])], &["device_id", "'gpus'"]);
        refused(&[], &[("openvino", &[])], &["openvino", "cuda", "tensorrt"]);
        refused(&[], &[("cuda", &[("user_compute_stream", "1")])], &["user_compute_stream", "backend sets"]);
        refused(&[], &[("tensorrt", &[("precision_mode", "FP8")])], &["precision_mode", "FP8", "FP16"]);
    }

    #[test]
    fn the_folder_is_the_servers_alone_or_not_used() {
        let users = std::env::temp_dir().join(format!("triton-stateful-cache-folder-{}", std::process::id()));
        let folder = users.join("cache").join(CACHE_FOLDER);
        for _ in 0..2 {
            assert_eq!(make_private(&users.join("cache")).unwrap(), folder);
            assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700);
        }
        for mode in [0o770, 0o707] {
            fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            let error = make_private(&users.join("cache")).unwrap_err();
            assert!(error.contains(folder.to_str().unwrap()) && error.contains(&format!("{mode:o}")), "{error}");
        }
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        // Only root can give a folder away.
        if rustix::process::geteuid().is_root() {
            chown(&folder, Some(12345), None).unwrap();
            let error = make_private(&users.join("cache")).unwrap_err();
            assert!(error.contains("12345"), "{error}");
        }
        fs::write(users.join("file"), "").unwrap();
        let error = make_private(&users.join("file")).unwrap_err();
        assert!(error.contains("cannot be made"), "{error}");
        fs::remove_dir_all(users).unwrap();
    }
}
