//! Triton's model configuration as JSON, field by field, as far as this backend reads it.
//!
//! Triton prints protobuf field names, enums by name, and 64-bit integers as numbers or as strings depending on the
//! field; [`Int`] reads both. Fields that are not named here are left to Triton.

use std::collections::BTreeMap;

use rows::tensor::DataType;
use serde::de::{self, IgnoredAny};
use serde::{Deserialize, Deserializer};

use super::error::{ConfigError, field};

/// A 64-bit integer, written as a number or as a string of digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Int(pub i64);

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(i64),
            Large(u64),
            Text(String),
        }
        // Triton has unsigned fields. No value above i64::MAX makes a difference here.
        let large = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        match Form::deserialize(deserializer)? {
            Form::Number(number) => Ok(Self(number)),
            Form::Large(number) => Ok(Self(large(number))),
            Form::Text(text) => match (text.parse(), text.parse()) {
                (Ok(number), _) => Ok(Self(number)),
                (_, Ok(number)) => Ok(Self(large(number))),
                (Err(error), _) => Err(de::Error::custom(error)),
            },
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ModelConfig {
    pub name: String,
    pub max_batch_size: Int,
    pub default_model_filename: String,
    pub input: Vec<Tensor>,
    pub output: Vec<Tensor>,
    pub instance_group: Vec<InstanceGroup>,
    pub sequence_batching: Option<SequenceBatching>,
    pub dynamic_batching: Option<DynamicBatching>,
    pub response_cache: ResponseCache,
    pub model_warmup: Vec<IgnoredAny>,
    pub ensemble_scheduling: Option<IgnoredAny>,
    pub model_transaction_policy: TransactionPolicy,
    pub optimization: Optimization,
    pub parameters: BTreeMap<String, Parameter>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct DynamicBatching {
    pub priority_levels: Int,
    pub preserve_ordering: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResponseCache {
    pub enable: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Tensor {
    pub name: String,
    pub data_type: String,
    pub dims: Vec<Int>,
    pub reshape: Option<Reshape>,
    pub optional: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Reshape {
    pub shape: Vec<Int>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct InstanceGroup {
    pub count: Int,
    pub kind: String,
    pub gpus: Vec<Int>,
    pub rate_limiter: RateLimiter,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RateLimiter {
    pub resources: Vec<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct TransactionPolicy {
    pub decoupled: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Optimization {
    pub graph: GraphOptimization,
    pub execution_accelerators: Accelerators,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct GraphOptimization {
    pub level: Int,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Accelerators {
    pub gpu_execution_accelerator: Vec<Accelerator>,
    pub cpu_execution_accelerator: Vec<Accelerator>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Accelerator {
    pub name: String,
    pub parameters: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SequenceBatching {
    pub max_sequence_idle_microseconds: Int,
    pub oldest: Option<Oldest>,
    pub direct: Option<Direct>,
    pub control_input: Vec<ControlInput>,
    pub state: Vec<State>,
    pub iterative_sequence: bool,
}

/// Triton prints the dims of a state as numbers and those of its initial state as strings.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct State {
    pub input_name: String,
    pub output_name: String,
    pub data_type: String,
    pub dims: Vec<Int>,
    pub initial_state: Vec<InitialState>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct InitialState {
    pub data_type: String,
    pub dims: Vec<Int>,
    pub zero_data: Option<bool>,
    pub data_file: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Oldest {
    pub max_candidate_sequences: Int,
    pub preferred_batch_size: Vec<Int>,
    pub max_queue_delay_microseconds: Int,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Direct {
    pub max_queue_delay_microseconds: Int,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ControlInput {
    pub name: String,
    pub control: Vec<Control>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Control {
    pub kind: String,
    pub int32_false_true: Vec<i32>,
    pub fp32_false_true: Vec<f32>,
    pub bool_false_true: Vec<bool>,
    pub data_type: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Parameter {
    pub string_value: String,
}

/// A count or a time, which cannot be negative.
pub(super) fn unsigned(name: &str, value: Int) -> Result<usize, ConfigError> {
    usize::try_from(value.0).map_err(|_| field(name, value.0.to_string(), "it cannot be negative"))
}

pub(super) fn dims(raw: &[Int]) -> Vec<i64> {
    raw.iter().map(|dim| dim.0).collect()
}

pub(super) fn data_type(path: &str, name: &str) -> Result<DataType, ConfigError> {
    DataType::from_config_name(name).ok_or_else(|| field(path, name, "a data type such as TYPE_FP32 is expected"))
}
