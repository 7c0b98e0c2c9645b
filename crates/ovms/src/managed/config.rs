//! `config.json` and the command line, as the models to serve.
//!
//! The file has OVMS's schema: what OVMS's schema refuses makes the whole file wrong, and everything stays as it is. An
//! entry that is well-formed and can't be served is a problem of its model only.

use std::collections::btree_map::Entry as Place;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

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

/// OVMS's `model_version_policy`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum VersionPolicy {
    Latest {
        num_versions: NonZero<u64>,
    },
    // With braces, because the file has `{"all": {}}`.
    All {},
    /// These, if they exist.
    Specific {
        versions: Vec<NonZero<u64>>,
    },
}

impl Default for VersionPolicy {
    fn default() -> Self {
        Self::Latest { num_versions: NonZero::<u64>::MIN }
    }
}

impl VersionPolicy {
    /// Those of the available versions that are served.
    pub fn select(&self, available: &BTreeSet<i64>) -> BTreeSet<i64> {
        match self {
            Self::Latest { num_versions } => {
                let most = usize::try_from(num_versions.get()).unwrap_or(usize::MAX);
                available.iter().rev().take(most).copied().collect()
            }
            Self::All {} => available.clone(),
            Self::Specific { versions } => {
                let wanted = versions.iter().filter_map(|version| i64::try_from(version.get()).ok());
                wanted.filter(|version| available.contains(version)).collect()
            }
        }
    }
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
mod tests {
    use super::*;

    /// The models of a file with this list.
    fn read(list: &str) -> Result<Configuration, String> {
        parse(&format!(r#"{{"model_config_list": {list}}}"#), Path::new("/etc/ovms"), None)
    }

    /// An entry with these fields beside a name and a path.
    fn entry(fields: &str) -> Result<Entry, String> {
        let list = format!(r#"[{{"config": {{"name": "m", "base_path": "/models/m" {fields}}}}}]"#);
        read(&list).unwrap().models.remove("m").unwrap()
    }

    fn stateful(fields: &str) -> Result<Entry, String> {
        entry(&format!(r#", "stateful": true {fields}"#))
    }

    fn parameters(fields: &str) -> Vec<(&'static str, String)> {
        stateful(fields).unwrap().parameters.into_iter().filter(|(key, _)| *key != "stateful").collect()
    }

    #[test]
    fn options_become_parameters_of_the_backend() {
        for (fields, expected) in [
            ("", vec![]),
            (r#", "max_sequence_number": 7"#, vec![("max_sequence_number", "7")]),
            (r#", "idle_sequence_cleanup": false"#, vec![("idle_sequence_cleanup", "false")]),
            (r#", "low_latency_transformation": true"#, vec![("low_latency_transformation", "true")]),
            (r#", "nireq": 0"#, vec![]),
            (r#", "nireq": 4"#, vec![("worker_count", "4")]),
            (r#", "nireq": 4, "plugin_config": {"NUM_STREAMS": "2"}"#, vec![("worker_count", "2")]),
            (r#", "nireq": 2, "plugin_config": {"NUM_STREAMS": 4}"#, vec![("worker_count", "2")]),
            (r#", "plugin_config": {"CPU_THROUGHPUT_STREAMS": 3}"#, vec![("worker_count", "3")]),
            (r#", "plugin_config": {"INFERENCE_NUM_THREADS": 0}"#, vec![("intra_op_thread_count", "0")]),
            (r#", "plugin_config": {"PERFORMANCE_HINT": "LATENCY"}"#, vec![]),
            (r#", "target_device": "CPU", "batch_size": 1, "allow_cache": false"#, vec![]),
            (r#", "batch_size": "0""#, vec![]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(key, value)| (key, value.to_owned())).collect();
            assert_eq!(parameters(fields), expected, "{fields}");
        }
    }

    #[test]
    fn an_entry_that_can_not_be_served_says_why() {
        for (fields, words) in [
            ("", "\"stateful\" is not true"),
            (r#", "stateful": false"#, "\"stateful\" is not true"),
            (r#", "max_sequence_number": 7"#, "Stateful model config parameter used for non stateful model"),
        ] {
            let error = entry(fields).unwrap_err();
            assert!(error.contains(words), "{fields}: {error}");
        }
        for (fields, words) in [
            (r#", "batch_size": "auto""#, "Dynamic shape and dynamic batch size are not supported for stateful models"),
            (r#", "shape": "auto""#, "Dynamic shape and dynamic batch size are not supported for stateful models"),
            (
                r#", "shape": {"x": "auto"}"#,
                "Dynamic shape and dynamic batch size are not supported for stateful models",
            ),
            (r#", "shape": "(1,4)""#, "shape is the model's"),
            (r#", "batch_size": 8"#, "batch_size has to be 1"),
            (r#", "batch_size": 18446744073709551615"#, "batch_size has to be 1"),
            (r#", "layout": "NHWC:NCHW""#, "layout is refused"),
            (r#", "target_device": "GPU""#, "target_device is 'GPU'"),
            (r#", "allow_cache": true"#, "allow_cache"),
            (r#", "graph_path": "g""#, "MediaPipe"),
            (r#", "custom_loader_options": {"loader_name": "l"}"#, "custom loaders"),
            (r#", "max_sequence_number": 0"#, "max_sequence_number is 0: 1 to 4294967295"),
            (r#", "max_sequence_number": 4294967296"#, "max_sequence_number is 4294967296"),
            (r#", "nireq": 1025"#, "1025 threads: at most 1024"),
            (r#", "plugin_config": {"NUM_STREAMS": "AUTO"}"#, "NUM_STREAMS is \"AUTO\": a number, 1 or more"),
            (r#", "plugin_config": {"NUM_STREAMS": 0}"#, "NUM_STREAMS is 0"),
            (r#", "plugin_config": {"NUM_STREAMS": 1, "CPU_THROUGHPUT_STREAMS": 1}"#, "NUM_STREAMS twice"),
            (r#", "plugin_config": {"PERFORMANCE_HINT": "THROUGHPUT"}"#, "write LATENCY, or NUM_STREAMS"),
            (r#", "plugin_config": {"ENABLE_PROFILING": true}"#, "ENABLE_PROFILING is an option of OpenVINO"),
        ] {
            let error = stateful(fields).unwrap_err();
            assert!(error.contains(words), "{fields}: {error}");
        }
    }

    #[test]
    fn a_file_that_the_schema_refuses_is_wrong_as_a_whole() {
        for text in [
            "",
            "[]",
            "null",
            "5",
            "{}",
            r#"{"model_config_list": 5}"#,
            r#"{"model_config_list": {}}"#,
            r#"{"model_config_list": [{}]}"#,
            r#"{"model_config_list": [{"config": {}}]}"#,
            r#"{"model_config_list": [{"config": {"name": 5}}]}"#,
            r#"{"model_config_list": [{"config": {"name": "m", "unknown": 5}}]}"#,
            r#"{"model_config_list": [{"config": {"name": "m", "name": "n"}}]}"#,
            r#"{"model_config_list": [{"config": {"name": "m", "stateful": "true"}}]}"#,
            r#"{"model_config_list": [{"config": {"name": "m", "nireq": -1}}]}"#,
            r#"{"model_config_list": [{"config": {"name": "m", "model_version_policy": {"newest": {}}}}]}"#,
            r#"{"model_config_list": [{"config": {"name": "m"}, "other": 5}]}"#,
            r#"{"model_config_list": [], "other": []}"#,
            r#"{"model_config_list": []"#,
            r#"{"model_config_list": []}}"#,
        ] {
            let error = parse(text, Path::new(""), None).unwrap_err();
            assert!(error.starts_with("The file is not valid json: "), "{text}: {error}");
        }
    }

    #[test]
    fn a_relative_path_is_relative_to_the_file() {
        let path = |base_path: &str| {
            let list = format!(r#"[{{"config": {{"name": "m", "base_path": "{base_path}", "stateful": true}}}}]"#);
            read(&list).unwrap().models.remove("m").unwrap().map(|entry| entry.base_path)
        };
        assert_eq!(path("/models/m"), Ok(PathBuf::from("/models/m")));
        assert_eq!(path("models/m"), Ok(PathBuf::from("/etc/ovms/models/m")));
        assert!(path("").unwrap_err().contains("base_path is empty"));
        assert!(path("s3://bucket/m").unwrap_err().contains("copy the model to this host"));
    }

    #[test]
    fn names_that_no_folder_can_have_are_refused() {
        let long = "x".repeat(256);
        for name in ["", ".", "..", "a/b", "a\u{1}b", "a\u{85}b", "a\nb", &long] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        for name in ["m", "with space", "Ü", "-dash", "a:b", "quote\"\\", ".hidden", &long[1..]] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
    }

    #[test]
    fn the_first_of_two_entries_of_a_name_counts() {
        let list = r#"[{"config": {"name": "m", "base_path": "/a", "stateful": true}},
                       {"config": {"name": "m", "base_path": "/b", "stateful": true}}]"#;
        let read = read(list).unwrap();
        assert_eq!(read.models["m"].as_ref().unwrap().base_path, Path::new("/a"));
        assert!(read.refused[0].contains("model 'm' is listed twice"), "{:?}", read.refused);
    }

    #[test]
    fn what_else_a_file_may_list_is_named() {
        let text = r#"{"model_config_list": [], "pipeline_config_list": [{"name": "p", "nodes": []}],
            "mediapipe_config_list": [{"name": "g"}], "custom_loader_config_list": [{"config": {"loader_name": "l"}}],
            "monitoring": {"metrics": {"enable": true, "metrics_list": ["ovms_streams"]}}}"#;
        let read = parse(text, Path::new(""), None).unwrap();
        for words in ["pipeline 'p'", "MediaPipe graph 'g'", "custom loader 'l'"] {
            assert!(read.refused.iter().any(|refused| refused.contains(words)), "{words}: {:?}", read.refused);
        }
        assert!(read.warnings[0].contains("metrics_list"), "{:?}", read.warnings);
    }

    #[test]
    fn a_model_of_the_command_line_is_an_entry() {
        let options = ModelOptions {
            model_name: Some("m".to_owned()),
            model_path: Some("/models/m".to_owned()),
            stateful: Some(true),
            model_version_policy: Some(r#"{"all": {}}"#.to_owned()),
            plugin_config: Some(r#"{"NUM_STREAMS": "2"}"#.to_owned()),
            ..ModelOptions::default()
        };
        let models = |options: ModelOptions| Source {
            models: ModelSource::CommandLine(options.into()),
            cleaner_minutes: Some(3),
        };
        let entry = models(options.clone()).read().unwrap().models.remove("m").unwrap().unwrap();
        assert_eq!(entry.policy, VersionPolicy::All {});
        assert_eq!(entry.parameters["worker_count"], "2");
        assert_eq!(entry.parameters["sequence_cleaner_poll_wait_minutes"], "3");
        let wrong = ModelOptions { model_version_policy: Some("newest".to_owned()), ..options.clone() };
        assert!(models(wrong).read().unwrap_err().contains("--model_version_policy"));
        let auto = ModelOptions { shape: Some("auto".to_owned()), ..options };
        assert!(models(auto).read().unwrap().models["m"].as_ref().unwrap_err().contains("Dynamic shape"));
    }

    fn selected(policy: &str, available: &[i64]) -> Vec<i64> {
        let policy: VersionPolicy = serde_json::from_str(policy).unwrap();
        policy.select(&available.iter().copied().collect()).into_iter().collect()
    }

    #[test]
    fn a_policy_selects_versions() {
        assert_eq!(VersionPolicy::default().select(&BTreeSet::from([1, 10, 9])), BTreeSet::from([10]));
        for (policy, expected) in [
            (r#"{"latest": {"num_versions": 2}}"#, vec![9, 10]),
            (r#"{"latest": {"num_versions": 9}}"#, vec![1, 9, 10]),
            (r#"{"all": {}}"#, vec![1, 9, 10]),
            (r#"{"specific": {"versions": [10, 1, 3]}}"#, vec![1, 10]),
            (r#"{"specific": {"versions": []}}"#, vec![]),
        ] {
            assert_eq!(selected(policy, &[1, 10, 9]), expected, "{policy}");
        }
    }

    #[test]
    fn a_wrong_policy_is_refused() {
        for policy in [
            "{}",
            "[]",
            r#""all""#,
            r#"{"all": {}, "latest": {"num_versions": 1}}"#,
            r#"{"all": {"x": 1}}"#,
            r#"{"latest": {"num_versions": 0}}"#,
            r#"{"latest": {}}"#,
            r#"{"specific": {"versions": [0]}}"#,
            r#"{"specific": {"versions": ["1"]}}"#,
            r#"{"newest": {}}"#,
        ] {
            assert!(serde_json::from_str::<VersionPolicy>(policy).is_err(), "{policy}");
        }
    }
}
