//! Errors of loading: the backend, a model, an instance.

use gpu_rows::DeviceError;
use rows::tensor::PaddingSide;
use state_store::StoreError;

use super::codes::{memory_code, session_code};
use super::run::RunError;
use crate::binding::BindingError;
use crate::completion::CompletionError;
use crate::config::ConfigError;
use crate::conversion::ConversionError;
use crate::joining::JoiningError;
use crate::memory::MemoryError;
use crate::panic::Panic;
use crate::session::{LibraryError, OpenError, SessionError};
use crate::triton::{self, Code};

#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the fields are")]
pub enum LoadError {
    #[error(transparent)]
    Server(#[from] triton::ServerError),
    /// `commit: false` and `sequence_step` would be ignored, so a request could change a state that it must not change.
    #[error(
        "parameter 'state_api' is 'true', but this Triton server gives backends no request parameters (it has no \
         TRITONBACKEND_RequestParameter): leave 'state_api' out, or use Triton 23.03 or newer"
    )]
    NoRequestParameters,
    #[error(
        "'sequence_batching.oldest.max_candidate_sequences' is 0, and this Triton server then accepts no sequence: \
         write a number, such as {wanted}, or use Triton 23.09 or newer"
    )]
    NoDefaultCandidates { wanted: usize },
    #[error(transparent)]
    Triton(#[from] triton::Error),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error("--backend-config=stateful,{name}={value}: {allowed}")]
    BackendConfig { name: String, value: String, allowed: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Completion(#[from] CompletionError),
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    #[error(transparent)]
    Joining(#[from] JoiningError),
    #[error(transparent)]
    Binding(#[from] BindingError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(
        "no memory for {slots} state slots of {slot_bytes} bytes: {source}; lower max_candidate_sequences, or set \
         initial_buffer_size, subsequent_buffer_size, buffer_alloc_threshold and buffer_dealloc_threshold to allocate \
         slots as they are needed"
    )]
    PoolAtLoad { slots: usize, slot_bytes: usize, source: MemoryError },
    #[error(
        "no thread could be started to end idle sequences and late requests: {0}; raise the limit of threads or processes"
    )]
    Clock(std::io::Error),
    #[error("no thread could be started to run batches: {0}; raise the limit of threads or processes")]
    Worker(std::io::Error),
    #[error("parameter 'state_store' ({location}): {source}")]
    StateStore { location: String, source: StoreError },
    #[error(
        "parameter 'enable_cuda_graph' is '1', but a graph replays the same tensors each time, and {0}; set it to '0'"
    )]
    CudaGraph(String),
    #[error(
        "parameter 'enable_cuda_graph' is '1', but ONNX Runtime {0} does not report which inputs it reads on the \
         host, and a graph does not repeat those reads: use ONNX Runtime 1.23 or newer, or set the parameter to '0'"
    )]
    NoCudaGraph(String),
    #[error("parameter 'growing_padding' is '{side}', but {why}; try the other side, or leave the parameter out")]
    GrowingPadding { side: PaddingSide, why: String },
    #[error(
        "the sequences that share a run would change each other's answers: {why}; to run each alone, write \
         'max_batch_size: 1' or set parameter 'max_rows_per_run' to 1; to let them share runs, export the model so \
         that it treats its rows one by one; to serve it as it is, set parameter 'trust_batch' to true"
    )]
    RowsMix { why: String },
    #[error(
        "with random data, the model's output {why}; leave it out of 'output', or write 'max_batch_size: 0' and list \
         all of the model's dims; to serve it as it is, set parameter 'trust_batch' to true"
    )]
    MissingRows { why: String },
    #[error("model '{model}' has no instances on the {kind}")]
    NoSite { model: String, kind: String },
    /// The model for initial states takes no input, so it was run, and failed.
    #[error("the {model} cannot be run: {source}")]
    InitialModel { model: String, source: RunError },
    #[error(transparent)]
    Panic(#[from] Panic),
    /// What the users of a known model have to write, in front of any of the others.
    #[error("{advice}; without it: {error}")]
    Advised { error: Box<LoadError>, advice: String },
}

impl LoadError {
    /// Whether there is no GPU that could run the model.
    pub const fn means_no_gpu(&self) -> bool {
        use DeviceError::{NoDevice, NoDriver, UselessDriver};
        matches!(
            self,
            Self::Open(OpenError::Provider { .. })
                | Self::Memory(MemoryError::Device(NoDriver | UselessDriver { .. } | NoDevice { .. }))
        )
    }

    /// The operator has to change something (`INVALID_ARG`, `UNSUPPORTED`), to make room (`UNAVAILABLE`), or to report
    /// it (`INTERNAL`).
    fn code(&self) -> Code {
        match self {
            Self::Advised { error, .. } => error.code(),
            Self::Triton(error) => error.code,
            Self::Config(_)
            | Self::Completion(_)
            | Self::Binding(_)
            | Self::BackendConfig { .. }
            | Self::Open(OpenError::ProviderOptions { .. })
            | Self::NoDefaultCandidates { .. }
            | Self::StateStore { .. }
            | Self::CudaGraph(_)
            | Self::NoCudaGraph(_)
            | Self::GrowingPadding { .. }
            | Self::RowsMix { .. }
            | Self::MissingRows { .. } => Code::InvalidArg,
            Self::Server(_) | Self::NoRequestParameters => Code::Unsupported,
            Self::Clock(_) | Self::Worker(_) => Code::Unavailable,
            Self::PoolAtLoad { source: error, .. } | Self::Memory(error) => memory_code(error),
            Self::Open(OpenError::Session(error))
            | Self::Conversion(ConversionError::Open(OpenError::Session(error))) => session_code(error),
            Self::Conversion(ConversionError::Open(_) | ConversionError::Read { .. })
            | Self::Joining(JoiningError::Read { .. }) => Code::Internal,
            Self::Conversion(_) | Self::Joining(_) => Code::InvalidArg,
            Self::Library(_) | Self::Open(_) | Self::NoSite { .. } | Self::InitialModel { .. } | Self::Panic(_) => {
                Code::Internal
            }
        }
    }
}

impl From<DeviceError> for LoadError {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}

impl From<SessionError> for LoadError {
    fn from(error: SessionError) -> Self {
        Self::Open(error.into())
    }
}

impl From<LoadError> for triton::Error {
    fn from(error: LoadError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
