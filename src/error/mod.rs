//! What can go wrong, and the code that Triton is told.
//!
//! A [`LoadError`] is for the operator who loads a model; a [`RequestError`] is for the client who sent a request, and
//! joins the errors of the stages that it passes. Load and request errors have their own tables of codes, so a request
//! never fails with an error of loading. What both can meet ([`codes`]) has the same code in both.

#![forbid(unsafe_code)]

/// `?` converts only once. This adds `From` for errors that reach the enum through another one.
macro_rules! from_through {
    ($into:ident: $($error:ty => $stage:ident),*) => {
        $(impl From<$error> for $into {
            fn from(error: $error) -> Self {
                Self::$stage(error.into())
            }
        })*
    };
}

mod codes;
mod stages;

use gpu_rows::DeviceError;
use rows::NoMemory;
use rows::tensor::PaddingSide;
use sequences::scheduler::Refused;
use state_store::StoreError;

use crate::binding::BindingError;
use crate::completion::CompletionError;
use crate::config::ConfigError;
use crate::conversion::ConversionError;
use crate::joining::JoiningError;
use crate::memory::MemoryError;
use crate::panic::Panic;
use crate::session::{LibraryError, OpenError, SessionError};
use crate::triton::{self, Code};
pub use codes::Reason;
use codes::{memory_code, session_code};
pub use stages::{AdmissionError, InputError, RunError, SnapshotError, StateApiError, StoredError};

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

/// Why a request fails. Where a text does not say otherwise, the state of its sequence is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    StateApi(#[from] StateApiError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Stored(#[from] StoredError),
    #[error(transparent)]
    Triton(#[from] triton::Error),
    #[error(transparent)]
    Panic(#[from] Panic),
    #[error(
        "REQUEST_TIMEOUT: the request's 'timeout' was over before its last step; the state of its sequence is as it was before"
    )]
    Overdue,
    #[error("the request was cancelled before it had run; the state of its sequence is as it was before")]
    Cancelled,
}

impl RequestError {
    pub fn reason(&self) -> Reason {
        self.class().0
    }

    /// Whether a batch that failed with this may succeed without one of its rows. An output that has no row for each
    /// request may fit a smaller batch by chance, so the model is at fault; a scalar fits one row only.
    pub const fn may_be_one_rows_fault(&self) -> bool {
        match self {
            Self::Run(RunError::Session(_) | RunError::Memory(_) | RunError::PaddedState { .. }) | Self::Panic(_) => {
                true
            }
            Self::Run(RunError::OutputRows { dims, .. }) => dims.is_empty(),
            _ => false,
        }
    }

    /// The error of a request that failed alone while others of the same moment ran. If the model could not run, or a
    /// device had failed, no other would have run. So the client is at fault, unless memory was short.
    pub fn while_others_ran(self) -> Self {
        match self {
            Self::Run(RunError::Session(error)) if session_code(&error) == Code::Internal => {
                Self::Run(RunError::AtFault(error))
            }
            error => error,
        }
    }

    /// Whether the client may repeat this request on another server, so that its END must not end the sequence.
    pub const fn is_sent_again(&self) -> bool {
        match self {
            Self::Cancelled | Self::Overdue | Self::Admission(AdmissionError::Refused(Refused::Late(_))) => true,
            Self::StateApi(error) => error.is_step_conflict(),
            _ => false,
        }
    }

    /// Whether a START is refused because every place is taken.
    pub const fn is_without_place(&self) -> bool {
        matches!(self, Self::Admission(AdmissionError::Refused(Refused::TooMany { .. } | Refused::QueueFull { .. })))
    }

    /// The answer to a request whose sequence starts with `states`, which have no elements. If a run failed, they may
    /// be the reason.
    pub fn with_empty_start(&self, states: &str) -> triton::Error {
        let mut text = self.to_string();
        if matches!(self, Self::Run(RunError::Session(_) | RunError::AtFault(_) | RunError::OutputRows { .. })) {
            text += &format!(
                "; the sequence starts with states that have no elements: {states}; if such a state always has the same \
                 length, write it in parameter 'state_dims'"
            );
        }
        triton::Error::new(self.class().1, text)
    }

    /// The reason under which the metrics count it, and its code. A client acts on the code, so the code says who has
    /// to act: the client (`INVALID_ARG`, `NOT_FOUND`), the client later (`UNAVAILABLE`), or the operator (`INTERNAL`,
    /// `UNSUPPORTED`).
    fn class(&self) -> (Reason, Code) {
        match self {
            Self::Admission(error) => error.class(),
            Self::Input(error) => error.class(),
            Self::StateApi(error) => error.class(),
            Self::Run(error) => error.class(),
            Self::Stored(error) => error.class(),
            Self::Triton(error) => (Reason::Internal, error.code),
            Self::Panic(_) => (Reason::Internal, Code::Internal),
            Self::Overdue => (Reason::QueueTimeout, Code::Unavailable),
            Self::Cancelled => (Reason::Cancelled, Code::Cancelled),
        }
    }
}

from_through!(LoadError: DeviceError => Memory, SessionError => Open);
from_through!(
    RequestError: Refused => Admission,
    SnapshotError => StateApi,
    SessionError => Run,
    MemoryError => Run,
    NoMemory => Run
);

impl From<Panic> for triton::Error {
    fn from(panic: Panic) -> Self {
        Self::new(Code::Internal, panic.to_string())
    }
}

impl From<LoadError> for triton::Error {
    fn from(error: LoadError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

impl From<RequestError> for triton::Error {
    fn from(error: RequestError) -> Self {
        Self::new(error.class().1, error.to_string())
    }
}
