//! What can be wrong with a model configuration.

use std::fmt::Display;
use std::path::PathBuf;

/// Why a configuration is refused. The texts go to whoever loads the model.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the fields are")]
pub enum ConfigError {
    /// A bug here, or a Triton that changed its format.
    #[error("the model configuration cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("parameter '{name}' is '{value}', but {allowed}")]
    BadParameter { name: &'static str, value: String, allowed: String },
    #[error("parameter '{name}' is not known{}", help.as_ref().map_or(String::new(), |help| format!("; {help}")))]
    UnknownParameter { name: String, help: Option<String> },
    #[error("parameter '{name}' is missing: {why}")]
    MissingParameter { name: &'static str, why: String },
    /// `field` is a field of config.pbtxt, with its path.
    #[error("{field} is {value}, but {allowed}")]
    BadField { field: String, value: String, allowed: String },
    #[error("the initial state file '{file}' of state '{state}' cannot be read from {}: {why}", dir.display())]
    InitialFile { state: String, file: String, dir: PathBuf, why: String },
    /// `dir` is the folder of the model's version.
    #[error("no ONNX model in {}: {why}", dir.display())]
    NoModelFile { dir: PathBuf, why: String },
}

/// An error about a field of config.pbtxt.
pub(super) fn field(field: impl Into<String>, value: impl Into<String>, allowed: impl Into<String>) -> ConfigError {
    ConfigError::BadField { field: field.into(), value: value.into(), allowed: allowed.into() }
}

/// An error about a parameter's value.
pub(super) fn bad(name: &'static str, value: impl Display, allowed: impl Into<String>) -> ConfigError {
    ConfigError::BadParameter { name, value: value.to_string(), allowed: allowed.into() }
}
