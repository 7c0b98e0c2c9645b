//! Errors of sessions and their runs.

use gpu_rows::DeviceError;
use rows::NoMemory;

use crate::memory::MemoryError;

/// Why a model cannot be opened, in ONNX Runtime's own words.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The model could not be loaded.
    #[error("ONNX Runtime cannot load {path}: {why}")]
    Load { path: String, why: String },
    /// The provider for a GPU is missing, or refuses its options.
    #[error(
        "ONNX Runtime cannot use GPU {device}: {why}. Use a GPU build of ONNX Runtime, with its provider libraries in \
         the same folder and CUDA's libraries on the loader's path; or run on the CPU: write 'instance_group [ {{ \
         kind: KIND_CPU }} ]', or set parameter 'allow_cpu_fallback' to 1"
    )]
    Provider { device: i32, why: String },
    /// The provider for a GPU does not take its options.
    #[error(
        "ONNX Runtime rejects the options for GPU {device}: {why}. They are parameters of the model, or of \
         'optimization.execution_accelerators'"
    )]
    ProviderOptions { device: i32, why: String },
    /// The model has an input or output that is no tensor, or of a type that Triton does not have.
    #[error("'{name}' of the model is {what}, which cannot be served")]
    Unsupported { name: String, what: String },
    /// No memory, no tensor, or a refused option.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Why a session cannot be run, in ONNX Runtime's own words.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The tensor of an input or output could not be made.
    #[error("ONNX Runtime cannot make a tensor for '{name}': {why}")]
    Tensor { name: String, why: String },
    /// A call failed.
    #[error("ONNX Runtime: {0}")]
    Run(String),
    /// No memory for a batch buffer, or a device that failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<NoMemory> for SessionError {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

impl From<MemoryError> for OpenError {
    fn from(error: MemoryError) -> Self {
        Self::Session(error.into())
    }
}

impl From<DeviceError> for SessionError {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}
