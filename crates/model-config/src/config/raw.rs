//! Triton's model configuration as JSON, field by field, as far as this backend reads it, and what can be wrong with
//! it.
//!
//! Triton prints protobuf field names, enums by name, and 64-bit integers as numbers or as strings depending on the
//! field; [`Int`] reads both. Fields that are not named here are left to Triton.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;

use rows::tensor::DataType;
use serde::de::{self, IgnoredAny};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

pub(super) type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// Why a configuration is refused. The user who loads the model sees the texts.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    // A user can't cause this error, because Triton has already parsed the file. Either there is a bug here, or Triton
    // has changed its format.
    #[error("the model configuration cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("parameter '{name}' is '{value}', but {allowed}")]
    BadParameter { name: &'static str, value: String, allowed: String },
    #[error("parameter '{name}' is not known{}", help.as_ref().map_or(String::new(), |help| format!("; {help}")))]
    UnknownParameter { name: String, help: Option<String> },
    #[error("parameter '{name}' is missing: {why}")]
    MissingParameter { name: &'static str, why: String },
    #[error("{field} is {value}, but {allowed}")]
    BadField { field: String, value: String, allowed: String },
    #[error("the initial state file '{file}' of state '{state}' cannot be read from {}: {why}", dir.display())]
    InitialFile { state: String, file: String, dir: PathBuf, why: String },
    #[error("no ONNX model in {}: {why}", dir.display())]
    NoModelFile { dir: PathBuf, why: String },
}

pub(super) fn field(field: impl Into<String>, value: impl Into<String>, allowed: impl Into<String>) -> ConfigError {
    ConfigError::BadField { field: field.into(), value: value.into(), allowed: allowed.into() }
}

pub(super) fn bad(name: &'static str, value: impl Display, allowed: impl Into<String>) -> ConfigError {
    ConfigError::BadParameter { name, value: value.to_string(), allowed: allowed.into() }
}

/// A 64-bit integer, written as a number or as a string of digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Int(pub i64);

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = Value::deserialize(deserializer)?;
        let text = written.as_str().map_or_else(|| written.to_string(), str::to_owned);
        let number: i128 = text.parse().map_err(de::Error::custom)?;
        // Triton has unsigned fields. No value above i64::MAX makes a difference here.
        Ok(Self(number.clamp(i64::MIN.into(), i64::MAX.into()) as i64))
    }
}

/// Messages of Triton's protobuf schema. A field that is not written has protobuf's default.
macro_rules! messages {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(default)]
        pub struct $name {
            $(pub $field: $type,)*
        }
    )*};
}

// Of a field of type `IgnoredAny`, only the presence or the number matters, so Triton may change what is in it.
messages! {
    ModelConfig {
        name: String,
        max_batch_size: Int,
        default_model_filename: String,
        input: Vec<Tensor>,
        output: Vec<Tensor>,
        instance_group: Vec<InstanceGroup>,
        sequence_batching: Option<SequenceBatching>,
        dynamic_batching: Option<DynamicBatching>,
        response_cache: ResponseCache,
        model_warmup: Vec<IgnoredAny>,
        ensemble_scheduling: Option<IgnoredAny>,
        model_transaction_policy: TransactionPolicy,
        optimization: Optimization,
        parameters: BTreeMap<String, Parameter>,
    }

    DynamicBatching {
        priority_levels: Int,
        preserve_ordering: bool,
    }
    ResponseCache { enable: bool }

    Tensor {
        name: String,
        data_type: String,
        dims: Vec<Int>,
        reshape: Option<Reshape>,
        optional: bool,
    }
    Reshape { shape: Vec<Int> }

    InstanceGroup {
        count: Int,
        kind: String,
        gpus: Vec<Int>,
        rate_limiter: RateLimiter,
    }
    RateLimiter { resources: Vec<IgnoredAny> }

    TransactionPolicy { decoupled: bool }

    Optimization {
        graph: GraphOptimization,
        execution_accelerators: Accelerators,
    }
    GraphOptimization { level: Int }

    Accelerators {
        gpu_execution_accelerator: Vec<Accelerator>,
        cpu_execution_accelerator: Vec<Accelerator>,
    }

    Accelerator {
        name: String,
        parameters: BTreeMap<String, String>,
    }

    SequenceBatching {
        max_sequence_idle_microseconds: Int,
        oldest: Option<Oldest>,
        direct: Direct,
        control_input: Vec<ControlInput>,
        state: Vec<State>,
        iterative_sequence: bool,
    }

    // Triton prints the dims of a state as numbers and those of its initial state as strings, so `Int` reads both.
    State {
        input_name: String,
        output_name: String,
        data_type: String,
        dims: Vec<Int>,
        initial_state: Vec<InitialState>,
    }

    InitialState {
        data_type: String,
        dims: Vec<Int>,
        zero_data: Option<bool>,
        data_file: Option<String>,
    }

    Oldest {
        max_candidate_sequences: Int,
        preferred_batch_size: Vec<Int>,
        max_queue_delay_microseconds: Int,
    }
    Direct { max_queue_delay_microseconds: Int }

    ControlInput {
        name: String,
        control: Vec<Control>,
    }

    Control {
        kind: String,
        int32_false_true: Vec<i32>,
        fp32_false_true: Vec<f32>,
        bool_false_true: Vec<bool>,
        data_type: String,
    }

    Parameter { string_value: String }
}

pub(super) fn unsigned(name: &str, value: Int) -> Result<usize> {
    usize::try_from(value.0).map_err(|_| field(name, value.0.to_string(), "it cannot be negative"))
}

pub(super) fn dims(raw: &[Int]) -> Vec<i64> {
    raw.iter().map(|dim| dim.0).collect()
}

pub(super) fn data_type(path: &str, name: &str) -> Result<DataType> {
    DataType::from_config_name(name).ok_or_else(|| field(path, name, "a data type such as TYPE_FP32 is expected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_is_a_number_or_its_digits() {
        let read = |json: &str| serde_json::from_str::<Int>(json).map(|number| number.0).ok();
        for (json, number) in [("-3", -3), ("\"-1\"", -1), ("0", 0), ("\"64\"", 64)] {
            assert_eq!(read(json), Some(number), "{json}");
        }
        for large in [u64::MAX.to_string(), format!("\"{}\"", u64::MAX)] {
            assert_eq!(read(&large), Some(i64::MAX), "{large}");
        }
        for json in ["1.0", "\"\"", "\"x\"", "\"1.5\"", "true", "null", "[1]", "{}"] {
            assert_eq!(read(json), None, "{json}");
        }
    }
}
