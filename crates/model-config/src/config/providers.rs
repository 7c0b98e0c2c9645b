//! How ONNX Runtime runs a model on a GPU: the options of its CUDA and TensorRT providers.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::error::{ConfigError, bad, field};
use super::model::ARENA_SHRINKAGE;
use super::parameters::{CUDA_PARAMETERS, Parameters, TENSORRT_PREFIX};
use super::raw::{Accelerator, Accelerators};

/// The providers of instances on a GPU, with their options by ONNX Runtime's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Providers {
    /// The options of TensorRT, if it is used.
    pub tensorrt: Option<Options>,
    /// The options of CUDA, which runs what TensorRT does not.
    pub cuda: Options,
    /// Whether instances run on the CPU if there is no usable GPU.
    pub allow_cpu_fallback: bool,
    /// Whether runs are replayed as CUDA graphs.
    pub cuda_graph: bool,
    /// Whether the process ends when it can't use a GPU any more.
    pub exit_on_gpu_failure: bool,
}

/// The CUDA option that says by how much the arena grows.
pub const ARENA_EXTEND_STRATEGY: &str = "arena_extend_strategy";

/// Options of an execution provider: names and values.
pub type Options = BTreeMap<String, String>;

fn cuda_options(parameters: &Parameters) -> Result<Options, ConfigError> {
    let given = CUDA_PARAMETERS.iter().filter_map(|&name| Some((name, parameters.text(name)?)));
    given
        .map(|(name, text)| Ok((name.to_owned(), cuda_value(name, text).map_err(|allowed| bad(name, text, allowed))?)))
        .collect()
}

fn tensorrt_options(parameters: &Parameters) -> Options {
    let options = parameters.passed_on(TENSORRT_PREFIX);
    options.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

/// A CUDA option's value in ONNX Runtime's form, or what is allowed. Triton's onnxruntime backend writes some values as
/// numbers. The values of other options are left to ONNX Runtime.
fn cuda_value(name: &str, text: &str) -> Result<String, String> {
    let words: &[&str] = match name {
        "cudnn_conv_algo_search" => &["EXHAUSTIVE", "HEURISTIC", "DEFAULT"],
        "arena_extend_strategy" => &["kNextPowerOfTwo", "kSameAsRequested"],
        "gpu_mem_limit" => {
            return match text.parse::<u64>() {
                Ok(bytes) if bytes > 0 => Ok(text.to_owned()),
                _ => Err("a number of bytes is expected".to_owned()),
            };
        }
        known if CUDA_PARAMETERS.contains(&known) => {
            return match text {
                "0" | "1" | "true" | "false" | "True" | "False" => Ok(text.to_owned()),
                _ => Err("'0' or '1' is expected".to_owned()),
            };
        }
        _ => return Ok(text.to_owned()),
    };
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
    pub(super) fn new(parameters: &Parameters, accelerators: &Accelerators, on_gpu: bool) -> Result<Self, ConfigError> {
        let given = Given::new(parameters, accelerators)?;
        if on_gpu {
            return given.on_gpu(parameters);
        }
        given.on_cpu();
        if given.is_fp16 {
            return Err(bad(
                "compute_precision",
                "fp16",
                "only TensorRT computes in fp16, and this model runs on the CPU: 'fp32' is expected",
            ));
        }
        // Devices for tests belong to instances of KIND_CPU.
        Ok(Self { exit_on_gpu_failure: given.exit_on_gpu_failure, ..Self::default() })
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

/// What the configuration says.
struct Given {
    provider: Option<Provider>,
    is_fp16: bool,
    caching: bool,
    cache_dir: Option<String>,
    cuda_graph: bool,
    allow_cpu_fallback: bool,
    exit_on_gpu_failure: bool,
    cuda: Options,
    tensorrt: Options,
    accelerators: Vec<String>,
}

impl Given {
    fn new(parameters: &Parameters, accelerators: &Accelerators) -> Result<Self, ConfigError> {
        let providers = [("cpu", Provider::Cpu), ("cuda", Provider::Cuda), ("trt", Provider::TensorRt)];
        let caching = parameters.switch("enable_trt_caching", false)?;
        let cache_dir = parameters.text("trt_cache_dir").map(str::to_owned);
        if let Some(dir) = cache_dir.as_ref().filter(|dir| !dir.starts_with('/')) {
            return Err(bad("trt_cache_dir", dir, "an absolute path is expected"));
        }
        // Configurations of NVIDIA's stateful_backend have it for their debug builds. It has no effect here.
        parameters.number("error_inject_rate", 0u32..=100, "a percentage from 0 to 100")?;
        let mut given = Self {
            provider: parameters.choice("ort_ep", &providers)?,
            is_fp16: parameters.choice("compute_precision", &[("fp32", false), ("fp16", true)])?.unwrap_or(false),
            caching,
            cache_dir,
            cuda_graph: parameters.switch("enable_cuda_graph", false)?,
            allow_cpu_fallback: parameters.switch("allow_cpu_fallback", false)?,
            exit_on_gpu_failure: parameters.switch("exit_on_gpu_failure", false)?,
            cuda: cuda_options(parameters)?,
            tensorrt: tensorrt_options(parameters),
            accelerators: Vec::new(),
        };
        given.check_ours()?;
        for accelerator in &accelerators.gpu_execution_accelerator {
            given.add(accelerator)?;
        }
        let wants_tensorrt = given.accelerators.iter().any(|name| name == "tensorrt");
        match given.provider {
            Some(Provider::Cuda) if wants_tensorrt => {
                return Err(field(ACCELERATORS, "'tensorrt'", "parameter 'ort_ep' is 'cuda': set it to 'trt'"));
            }
            None if wants_tensorrt => given.provider = Some(Provider::TensorRt),
            None if !given.accelerators.is_empty() => given.provider = Some(Provider::Cuda),
            _ => {}
        }
        Ok(given)
    }

    /// `optimization.execution_accelerators.gpu_execution_accelerator`, as Triton's onnxruntime backend reads it.
    fn add(&mut self, accelerator: &Accelerator) -> Result<(), ConfigError> {
        self.accelerators.push(accelerator.name.clone());
        for (name, value) in &accelerator.parameters {
            let (options, name, value) = match accelerator.name.as_str() {
                "tensorrt" => {
                    let (name, value) = tensorrt_option(name, value)?;
                    (&mut self.tensorrt, name, value)
                }
                _ => {
                    let refused =
                        |allowed: String| field(format!("{ACCELERATORS} '{name}'"), format!("'{value}'"), allowed);
                    (&mut self.cuda, name.clone(), cuda_value(name, value).map_err(refused)?)
                }
            };
            if let Some(other) = options.insert(name.clone(), value.clone()).filter(|other| *other != value) {
                let allowed = format!("it is also given as '{other}': remove one");
                return Err(field(format!("{ACCELERATORS} '{name}'"), format!("'{value}'"), allowed));
            }
        }
        if !["cuda", "tensorrt"].contains(&accelerator.name.as_str()) {
            return Err(field(ACCELERATORS, format!("'{}'", accelerator.name), "'cuda' or 'tensorrt' is expected"));
        }
        self.check_ours()
    }

    fn check_ours(&self) -> Result<(), ConfigError> {
        let given = |(name, _): &&(&str, &str)| self.cuda.contains_key(*name) || self.tensorrt.contains_key(*name);
        match OURS.iter().find(given) {
            None => Ok(()),
            Some((name, from)) => {
                Err(field(format!("option '{name}'"), "given", format!("the backend sets it, {from}: remove it")))
            }
        }
    }

    fn on_gpu(self, parameters: &Parameters) -> Result<Providers, ConfigError> {
        let provider = self.provider.unwrap_or(Provider::Cuda);
        if provider == Provider::Cpu {
            let allowed = "instances of KIND_GPU run with 'cuda' or 'trt': set KIND_CPU to run on the CPU";
            return Err(bad("ort_ep", "cpu", allowed));
        }
        if self.is_fp16 && provider == Provider::Cuda {
            let allowed = "only TensorRT computes in fp16: set 'ort_ep' to 'trt', or 'compute_precision' to 'fp32'";
            return Err(bad("compute_precision", "fp16", allowed));
        }
        let has_sizes = |text: &str| text.contains(|letter: char| letter.is_ascii_digit());
        if self.cuda_graph && !parameters.text("warmup_batch_sizes").is_none_or(has_sizes) {
            let why = "'enable_cuda_graph' makes a graph for each number of rows that is listed there";
            return Err(ConfigError::MissingParameter { name: "warmup_batch_sizes", why: why.to_owned() });
        }
        if self.cuda_graph && provider == Provider::TensorRt {
            let allowed = "TensorRT replays the first graph in every run, whatever its tensors are: set it to '0', or 'ort_ep' to \
                           'cuda'";
            return Err(bad("enable_cuda_graph", "1", allowed));
        }
        if self.cuda_graph && parameters.text(ARENA_SHRINKAGE).is_some() {
            let allowed = "it frees memory that CUDA graphs use: remove it, or set 'enable_cuda_graph' to '0'";
            return Err(bad(ARENA_SHRINKAGE, parameters.text(ARENA_SHRINKAGE).unwrap_or_default(), allowed));
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
            let dir = self.cache_dir.map_or_else(default_cache_dir, Ok)?;
            set("trt_engine_cache_enable", "1");
            set("trt_engine_cache_path", &dir);
            set("trt_timing_cache_enable", "1");
            set("trt_timing_cache_path", &dir);
        }
        Ok(Providers {
            tensorrt: (provider == Provider::TensorRt).then_some(tensorrt),
            cuda: self.cuda,
            allow_cpu_fallback: self.allow_cpu_fallback,
            cuda_graph: self.cuda_graph,
            exit_on_gpu_failure: self.exit_on_gpu_failure,
        })
    }

    fn on_cpu(&self) {
        let gpu_only = [
            // The provider may come from the accelerators, which are named below.
            ("ort_ep", self.provider.is_some_and(|provider| provider != Provider::Cpu) && self.accelerators.is_empty()),
            ("enable_trt_caching", self.caching),
            ("enable_cuda_graph", self.cuda_graph),
            ("exit_on_gpu_failure", self.exit_on_gpu_failure),
        ];
        for (name, _) in gpu_only.iter().filter(|(_, given)| *given) {
            log::info!("parameter '{name}' has no effect: instances are of KIND_CPU");
        }
        for name in self.cuda.keys().chain(self.tensorrt.keys()) {
            log::info!("option '{name}' has no effect: instances are of KIND_CPU");
        }
        for name in &self.accelerators {
            log::info!("GPU accelerator '{name}' has no effect: instances are of KIND_CPU");
        }
    }
}

fn default_cache_dir() -> Result<String, ConfigError> {
    let folder = private_cache_folder().map_err(|why| ConfigError::MissingParameter {
        name: "trt_cache_dir",
        why: format!("'enable_trt_caching' needs a folder that only the server can write, and {why}"),
    })?;
    Ok(folder.to_string_lossy().into_owned())
}

/// The folder, in the user's cache folder, where TensorRT's engines are kept if the configuration names none.
const CACHE_FOLDER: &str = "triton-stateful";

/// Write permission of the group and of all users.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Returns the folder, which is made if it is missing, or why it cannot be used. An engine is code that the server runs,
/// so only the server's user may write to the folder.
fn private_cache_folder() -> Result<PathBuf, String> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let parent = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    make_private(&parent.ok_or("neither XDG_CACHE_HOME nor HOME names a folder")?)
}

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
    if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(failed(format!("can be written by others (mode {:o})", metadata.mode() & 0o777)));
    }
    Ok(folder)
}

/// Turns names that only Triton's onnxruntime backend has into ONNX Runtime's.
fn tensorrt_option(name: &str, value: &str) -> Result<(String, String), ConfigError> {
    let path = "gpu_execution_accelerator 'tensorrt', parameter 'precision_mode'";
    let (name, value) = match (name, value) {
        ("precision_mode", "FP16") => ("trt_fp16_enable", "1"),
        ("precision_mode", "INT8") => ("trt_int8_enable", "1"),
        ("precision_mode", "FP32") => ("trt_fp16_enable", "0"),
        ("precision_mode", other) => return Err(field(path, other, "'FP32', 'FP16' or 'INT8' is expected")),
        ("max_workspace_size_bytes", value) => ("trt_max_workspace_size", value),
        ("int8_calibration_table_name", value) => ("trt_int8_calibration_table_name", value),
        ("int8_use_native_calibration_table", value) => ("trt_int8_use_native_calibration_table", value),
        (name, value) => (name, value),
    };
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;
    use crate::config::raw::Parameter;

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
