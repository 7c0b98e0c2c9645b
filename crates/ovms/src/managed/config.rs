//! `config.json` and the command line, as the models to serve.
//!
//! The file has OVMS's schema: what OVMS's schema refuses makes the whole file wrong, and everything stays as it is. An
//! entry that is well-formed and can't be served is a problem of its model only.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Place;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::policy::VersionPolicy;

/// The backend's limit of `worker_count`.
const WORKERS_MAX: u64 = 1024;

#[derive(Clone, Debug)]
pub struct Source {
    pub models: ModelSource,
    /// `--sequence_cleaner_poll_wait_minutes`, if it was written.
    pub cleaner_minutes: Option<u32>,
}

#[derive(Clone, Debug)]
pub enum ModelSource {
    File(PathBuf),
    CommandLine(Box<ModelOptions>),
}

/// The model of the command line. A field is none if its option was not written.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct ModelOptions {
    /// Name of the model.
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Folder with a folder for each version, or one .onnx file.
    #[arg(long, value_name = "PATH")]
    pub model_path: Option<String>,
    /// Keeps a state for each sequence. Required.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    pub stateful: Option<bool>,
    /// Removes idle sequences.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    pub idle_sequence_cleanup: Option<bool>,
    /// Gives states to recurrences inside the model.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    pub low_latency_transformation: Option<bool>,
    /// The most sequences at the same time.
    #[arg(long, value_name = "NUMBER")]
    pub max_sequence_number: Option<u32>,
    /// Which versions are served, as JSON.
    #[arg(long, value_name = "JSON")]
    pub model_version_policy: Option<String>,
    /// Threads that run the model.
    #[arg(long, value_name = "NUMBER")]
    pub nireq: Option<u32>,
    /// NUM_STREAMS and INFERENCE_NUM_THREADS, as JSON.
    #[arg(long, value_name = "JSON")]
    pub plugin_config: Option<String>,
    /// CPU.
    #[arg(long, value_name = "DEVICE")]
    pub target_device: Option<String>,
    /// 1.
    #[arg(long, value_name = "NUMBER")]
    pub batch_size: Option<String>,
    /// Refused; see docs/ovms.md.
    #[arg(long, value_name = "SHAPE", hide = true)]
    pub shape: Option<String>,
    /// Refused; see docs/ovms.md.
    #[arg(long, value_name = "LAYOUT", hide = true)]
    pub layout: Option<String>,
}

/// As OVMS's parser of options takes it.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" | "True" | "t" | "T" | "1" => Ok(true),
        "false" | "False" | "f" | "F" | "0" => Ok(false),
        _ => Err("true or false".to_owned()),
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// Each model by its name: to be served, or why it can't be.
    pub models: BTreeMap<String, Result<Entry, String>>,
    /// What else in the file isn't served, and why.
    pub refused: Vec<String>,
    /// What has no effect.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub base_path: PathBuf,
    pub policy: VersionPolicy,
    pub parameters: BTreeMap<&'static str, String>,
    /// Whether the entry has `target_device`.
    pub device_given: bool,
}

impl Source {
    pub fn read(&self) -> Result<Configuration, String> {
        match &self.models {
            ModelSource::File(path) => {
                let text = read_text(path).map_err(|error| {
                    format!("Configuration file not found or cannot open: {}: {error}", path.display())
                })?;
                let folder = path.parent().unwrap_or(Path::new(""));
                parse(&text, folder, self.cleaner_minutes).map_err(|error| format!("{}: {error}", path.display()))
            }
            ModelSource::CommandLine(options) => {
                let model = options.as_ref().clone().model()?;
                let name = model.name.clone();
                let entry = model.entry(Path::new(""), self.cleaner_minutes);
                Ok(Configuration { models: BTreeMap::from([(name, entry)]), ..Configuration::default() })
            }
        }
    }
}

pub fn read_text(path: &Path) -> io::Result<String> {
    // Reading a pipe may never end.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    fs::read_to_string(path)
}

fn parse(text: &str, folder: &Path, cleaner_minutes: Option<u32>) -> Result<Configuration, String> {
    // First as a map, because serde would take an array for a struct.
    let file = serde_json::from_str::<Map<String, Value>>(text).and_then(|_| serde_json::from_str::<File>(text));
    let file = file.map_err(|error| format!("The file is not valid json: {error}"))?;
    let mut read = Configuration::default();
    for ModelItem { config } in file.model_config_list {
        match read.models.entry(config.name.clone()) {
            Place::Vacant(place) => _ = place.insert(config.entry(folder, cleaner_minutes)),
            Place::Occupied(place) => read.refused.push(format!(
                "model '{}' is listed twice. Only the first entry is served: remove the other, or give it another name",
                place.key()
            )),
        }
    }
    for (list, what, instead) in [
        (file.pipeline_config_list, "pipeline", "use an ensemble of Triton"),
        (file.mediapipe_config_list, "MediaPipe graph", "serve it by OVMS"),
        (file.custom_node_library_config_list, "custom node", "it belongs to pipelines"),
        (file.custom_loader_config_list, "custom loader", "give the .onnx file as base_path"),
    ] {
        for item in list {
            let name = ["name", "loader_name"].iter().find_map(|key| Some(item.get(*key)?.as_str()?.to_owned()));
            let name = name.or_else(|| Some(item.get("config")?.get("loader_name")?.as_str()?.to_owned()));
            read.refused.push(format!("{what} '{}' is not served: {instead}", name.unwrap_or_default()));
        }
    }
    // Only warnings, because the models are served as the file says.
    if let Some(Monitoring { metrics }) = file.monitoring {
        if metrics.metrics_list.is_some() {
            read.warnings.push("monitoring: metrics_list has no effect, GET /metrics has all metrics".to_owned());
        }
        if !metrics.enable {
            read.warnings.push("monitoring: enable: false has no effect, the REST port has GET /metrics".to_owned());
        }
    }
    Ok(read)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model_config_list: Vec<ModelItem>,
    #[serde(default)]
    pipeline_config_list: Vec<Value>,
    #[serde(default)]
    mediapipe_config_list: Vec<Value>,
    #[serde(default)]
    custom_node_library_config_list: Vec<Value>,
    #[serde(default)]
    custom_loader_config_list: Vec<Value>,
    monitoring: Option<Monitoring>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelItem {
    config: Model,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Monitoring {
    metrics: Metrics,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Metrics {
    enable: bool,
    metrics_list: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    name: String,
    base_path: Option<String>,
    batch_size: Option<Number>,
    graph_path: Option<String>,
    subconfig: Option<String>,
    model_version_policy: Option<VersionPolicy>,
    shape: Option<TextOrMap>,
    layout: Option<TextOrMap>,
    nireq: Option<u64>,
    target_device: Option<String>,
    allow_cache: Option<bool>,
    plugin_config: Option<Map<String, Value>>,
    stateful: Option<bool>,
    idle_sequence_cleanup: Option<bool>,
    low_latency_transformation: Option<bool>,
    max_sequence_number: Option<u64>,
    custom_loader_options: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Integer(u64),
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TextOrMap {
    Text(String),
    Map(BTreeMap<String, String>),
}

impl ModelOptions {
    /// The options as an entry of `config.json` would have them.
    fn model(self) -> Result<Model, String> {
        let policy = self.model_version_policy.as_deref().map(serde_json::from_str).transpose();
        let plugin_config = self.plugin_config.as_deref().map(serde_json::from_str).transpose();
        let map = |text: String| serde_json::from_str(&text).map_or(TextOrMap::Text(text), TextOrMap::Map);
        Ok(Model {
            name: self.model_name.unwrap_or_default(),
            base_path: self.model_path,
            batch_size: self.batch_size.map(Number::Text),
            model_version_policy: policy
                .map_err(|error| format!("Model version policy is in wrong format: --model_version_policy: {error}"))?,
            shape: self.shape.map(map),
            layout: self.layout.map(map),
            nireq: self.nireq.map(u64::from),
            target_device: self.target_device,
            plugin_config: plugin_config
                .map_err(|error| format!("Plugin config is in wrong format: --plugin_config: {error}"))?,
            stateful: self.stateful,
            idle_sequence_cleanup: self.idle_sequence_cleanup,
            low_latency_transformation: self.low_latency_transformation,
            max_sequence_number: self.max_sequence_number.map(u64::from),
            ..Model::default()
        })
    }
}

impl Model {
    fn entry(self, folder: &Path, cleaner_minutes: Option<u32>) -> Result<Entry, String> {
        check_name(&self.name)?;
        // This is checked before the others, whose texts are about models with states.
        self.check_stateful()?;
        self.check_shape()?;
        self.check_refused()?;
        let sequences = self.max_sequence_number;
        if let Some(number) = sequences.filter(|number| !(1..=u64::from(u32::MAX)).contains(number)) {
            return Err(format!("max_sequence_number is {number}: 1 to {}", u32::MAX));
        }
        let [streams, threads] = read_plugin_config(self.plugin_config.unwrap_or_default())?;
        // 0 counts as absent, as in OVMS.
        let nireq = self.nireq.filter(|nireq| *nireq > 0);
        let workers = [nireq, streams].into_iter().flatten().min();
        if let Some(workers) = workers.filter(|workers| *workers > WORKERS_MAX) {
            return Err(format!("nireq and NUM_STREAMS ask for {workers} threads: at most {WORKERS_MAX}"));
        }
        let parameters = [
            // Only its presence matters: the backend then has OVMS's rule for idle sequences.
            ("stateful", Some("true".to_owned())),
            ("idle_sequence_cleanup", self.idle_sequence_cleanup.map(|cleanup| cleanup.to_string())),
            ("low_latency_transformation", self.low_latency_transformation.map(|low_latency| low_latency.to_string())),
            ("max_sequence_number", sequences.map(|number| number.to_string())),
            ("sequence_cleaner_poll_wait_minutes", cleaner_minutes.map(|minutes| minutes.to_string())),
            ("worker_count", workers.map(|workers| workers.to_string())),
            ("intra_op_thread_count", threads.map(|threads| threads.to_string())),
        ];
        Ok(Entry {
            base_path: base_path(self.base_path.as_deref().unwrap_or(""), folder)?,
            policy: self.model_version_policy.unwrap_or_default(),
            parameters: parameters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect(),
            device_given: self.target_device.is_some(),
        })
    }

    fn check_stateful(&self) -> Result<(), String> {
        if self.stateful == Some(true) {
            return Ok(());
        }
        if self.low_latency_transformation.is_some()
            || self.max_sequence_number.is_some()
            || self.idle_sequence_cleanup.is_some()
        {
            return Err("Stateful model config parameter used for non stateful model".to_owned());
        }
        Err("\"stateful\" is not true, and the gateway serves models with states only. Write \"stateful\": true if the \
             model has states; else serve it by OVMS, or by the openvino or onnxruntime backend of Triton"
            .to_owned())
    }

    fn check_shape(&self) -> Result<(), String> {
        const DYNAMIC: &str = "Dynamic shape and dynamic batch size are not supported for stateful models";
        match &self.batch_size {
            None | Some(Number::Integer(0 | 1)) => {}
            Some(Number::Text(text)) if ["", "0", "1"].contains(&text.as_str()) => {}
            Some(Number::Text(text)) if text == "auto" => return Err(DYNAMIC.to_owned()),
            Some(Number::Integer(_) | Number::Text(_)) => {
                return Err("batch_size has to be 1 or absent: a request carries one row of each of its sequences. \
                            Start a sequence for each row"
                    .to_owned());
            }
        }
        match &self.shape {
            None => Ok(()),
            Some(TextOrMap::Text(text)) if text == "auto" => Err(DYNAMIC.to_owned()),
            Some(TextOrMap::Map(map)) if map.values().any(|shape| shape == "auto") => Err(DYNAMIC.to_owned()),
            Some(_) => {
                Err("shape is the model's. Remove it; to fix an open dimension, list the inputs with their dims in \
                            a config.pbtxt in base_path"
                    .to_owned())
            }
        }
    }

    fn check_refused(&self) -> Result<(), String> {
        for (is_given, why) in [
            (self.layout.is_some(), "layout is refused: send the data in the model's layout. Remove it"),
            (
                self.graph_path.is_some() || self.subconfig.is_some(),
                "graph_path and subconfig are of MediaPipe graphs, which the gateway doesn't serve",
            ),
            (
                self.custom_loader_options.is_some(),
                "custom_loader_options: there are no custom loaders. Give the .onnx file as base_path",
            ),
            (
                self.allow_cache == Some(true),
                "allow_cache: ONNX Runtime compiles nothing for the CPU that could be kept. Remove it",
            ),
        ] {
            if is_given {
                return Err(why.to_owned());
            }
        }
        match self.target_device.as_deref() {
            None | Some("CPU") => Ok(()),
            Some(device) => Err(format!(
                "target_device is '{device}', and OVMS runs stateful models on the CPU only. Write CPU, or remove it and \
                 write an instance_group into a config.pbtxt in base_path for a GPU"
            )),
        }
    }
}

/// Triton's name of a model is the name of a folder.
fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name == "." || name == ".." {
        return Err(format!("the name '{name}' can't be the name of a folder"));
    }
    // Linux allows 255 bytes for the name of a folder.
    if name.len() > 255 {
        return Err("the name has more than 255 bytes".to_owned());
    }
    match name.chars().find(|letter| *letter == '/' || letter.is_control()) {
        Some(letter) => Err(format!("the name has the character {letter:?}, which the name of a folder can't have")),
        None => Ok(()),
    }
}

fn base_path(path: &str, folder: &Path) -> Result<PathBuf, String> {
    if path.is_empty() {
        return Err("base_path is empty: name the folder with the model's versions".to_owned());
    }
    // OVMS loads models from these. As the name of a folder, each would be a relative path that doesn't exist.
    for scheme in ["s3://", "gs://", "azure://", "azfs://", "az://"] {
        if path.starts_with(scheme) {
            return Err(format!("base_path is '{path}': copy the model to this host, and write its folder here"));
        }
    }
    std::path::absolute(folder.join(path)).map_err(|error| format!("base_path '{path}': {error}"))
}

/// NUM_STREAMS and INFERENCE_NUM_THREADS of `plugin_config`, which have counterparts here.
fn read_plugin_config(options: Map<String, Value>) -> Result<[Option<u64>; 2], String> {
    let (mut streams, mut threads) = (None, None);
    for (name, value) in options {
        match name.as_str() {
            "NUM_STREAMS" | "CPU_THROUGHPUT_STREAMS" => set(&mut streams, "NUM_STREAMS", &value, 1)?,
            "INFERENCE_NUM_THREADS" | "CPU_THREADS_NUM" => set(&mut threads, "INFERENCE_NUM_THREADS", &value, 0)?,
            "PERFORMANCE_HINT" if value == "LATENCY" => {}
            "PERFORMANCE_HINT" => {
                return Err(format!("plugin_config: PERFORMANCE_HINT is {value}: write LATENCY, or NUM_STREAMS"));
            }
            _ => {
                return Err(format!(
                    "plugin_config: {name} is an option of OpenVINO. Remove it: NUM_STREAMS and INFERENCE_NUM_THREADS \
                     are known here, and options of ONNX Runtime go into a config.pbtxt in base_path"
                ));
            }
        }
    }
    Ok([streams, threads])
}

fn set(option: &mut Option<u64>, name: &str, value: &Value, least: u64) -> Result<(), String> {
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let Some(number) = number.filter(|number| *number >= least && *number <= i32::MAX as u64) else {
        return Err(format!("plugin_config: {name} is {value}: a number, {least} or more"));
    };
    if option.replace(number).is_some() {
        return Err(format!("plugin_config has {name} twice"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
