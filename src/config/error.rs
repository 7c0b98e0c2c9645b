//! What can be wrong with a model configuration.

use std::path::PathBuf;

/// Why a configuration is refused. The texts go to whoever loads the model.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Triton's JSON could not be read; a bug here or a Triton that changed its format.
    #[error("the model configuration cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// A parameter has a value outside of what is allowed.
    #[error("parameter '{name}' is '{value}', but {allowed}")]
    BadParameter {
        /// Key in `parameters`.
        name: &'static str,
        /// The value as written.
        value: String,
        /// What would be right.
        allowed: String,
    },
    /// A parameter that this backend does not know.
    #[error("parameter '{name}' is not known{}", nearest.map(|known| format!("; did you mean '{known}'?")).unwrap_or_default())]
    UnknownParameter {
        /// Key in `parameters`.
        name: String,
        /// The known name nearest to it.
        nearest: Option<&'static str>,
    },
    /// A parameter that has to be there.
    #[error("parameter '{name}' is missing: {why}")]
    MissingParameter {
        /// Key in `parameters`.
        name: &'static str,
        /// What it is for, or what asks for it.
        why: String,
    },
    /// A field of config.pbtxt has a value that cannot be served.
    #[error("{field} is {value}, but {allowed}")]
    BadField {
        /// Path of the field, as in config.pbtxt.
        field: String,
        /// The value as written.
        value: String,
        /// What would be right.
        allowed: String,
    },
    /// A file with an initial state cannot be read.
    #[error("the initial state file '{file}' of state '{state}' cannot be read from {}: {why}", dir.display())]
    InitialFile {
        /// The state's input.
        state: String,
        /// The file as written.
        file: String,
        /// The folder that it is looked for in.
        dir: PathBuf,
        /// What the system says.
        why: String,
    },
    /// No ONNX file could be chosen.
    #[error("no ONNX model in {}: {why}", dir.display())]
    NoModelFile {
        /// The version directory.
        dir: PathBuf,
        /// What was looked for and what is there.
        why: String,
    },
}

/// An error about a field of config.pbtxt.
pub(super) fn field(field: impl Into<String>, value: impl Into<String>, allowed: impl Into<String>) -> ConfigError {
    ConfigError::BadField { field: field.into(), value: value.into(), allowed: allowed.into() }
}
