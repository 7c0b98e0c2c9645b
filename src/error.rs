//! Every error of this crate, and the one table that turns them into Triton's codes.

#![forbid(unsafe_code)]

use crate::binding::BindingError;
use crate::completion::CompletionError;
use crate::config::ConfigError;
use crate::memory::device::DeviceError;
use crate::memory::{MemoryError, NoRoom};
use crate::sequence::SequenceId;
use crate::session::{LibraryError, SessionError};
use crate::tensor::{DataType, Dims};
use crate::triton::{self, Code};

/// What can go wrong, for a model at load or for one request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server is not one that this library can serve in.
    #[error(transparent)]
    Server(#[from] triton::ServerError),
    /// A call to Triton failed.
    #[error(transparent)]
    Triton(#[from] triton::Error),
    /// ONNX Runtime is missing or unusable.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The server's command line for this backend is wrong.
    #[error("--backend-config=stateful,{name}={value}: {allowed}")]
    BackendConfig {
        /// The setting.
        name: String,
        /// Its value.
        value: String,
        /// What would be right.
        allowed: String,
    },
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration cannot be completed.
    #[error(transparent)]
    Completion(#[from] CompletionError),
    /// The model does not fit its configuration.
    #[error(transparent)]
    Binding(#[from] BindingError),
    /// ONNX Runtime refused the model or a run.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No memory for what the pool has from the start.
    #[error(
        "{slots} state slots of {slot_bytes} bytes: {source}; lower max_candidate_sequences, or let memory come as it is \
         needed (initial_buffer_size and the three with it)"
    )]
    PoolAtLoad {
        /// Slots of the first slab.
        slots: usize,
        /// Bytes of each.
        slot_bytes: usize,
        /// Why there is none.
        source: MemoryError,
    },
    /// No thread to expire idle sequences.
    #[error("no thread could be started to expire idle sequences: {0}; raise the limit of threads or processes")]
    Reaper(std::io::Error),
    /// The model's runs cannot be CUDA graphs.
    #[error(
        "parameter 'enable_cuda_graph' is '1', but a graph replays the same tensors each time, and {0}; set it to '0'"
    )]
    CudaGraph(String),
    /// An input in memory of a GPU that cannot be read.
    #[error("input '{name}' lies in memory of GPU {gpu}, which cannot be read: {source}")]
    InputOnGpu {
        /// The input.
        name: String,
        /// The GPU's number.
        gpu: i32,
        /// The driver's reason.
        source: DeviceError,
    },
    /// No memory for a copy of an input.
    #[error(
        "no memory for input '{name}': {source}; the state of its sequence is as it was before the request, try again later"
    )]
    InputMemory {
        /// The input.
        name: String,
        /// What could not be had.
        source: MemoryError,
    },
    /// An output that is wanted in memory of a GPU that cannot be written.
    #[error("output '{name}' is wanted in memory of GPU {gpu}, which cannot be written: {source}")]
    OutputOnGpu {
        /// The output.
        name: String,
        /// The GPU's number.
        gpu: i32,
        /// The driver's reason.
        source: DeviceError,
    },
    /// An instance of a kind that the model's configuration does not have.
    #[error("model '{model}' has no instances on the {place}")]
    NoSite {
        /// The model.
        model: String,
        /// Where the instance is to run.
        place: String,
    },
    /// The code of this library is wrong; the server lives on.
    #[error("the stateful backend panicked: {0}; please report it")]
    Panic(String),

    /// A request continues a sequence that is not there.
    #[error(
        "sequence {id} is not live: its START was refused or failed, it was idle for longer than {idle_limit_ms} ms, or it was ended; start it again"
    )]
    UnknownSequence {
        /// The client's name for it.
        id: SequenceId,
        /// The model's limit.
        idle_limit_ms: u128,
    },
    /// No slot is free for a new sequence.
    #[error(
        "no free slot for sequence {id}: all {capacity} that the model may have ({reason}) hold a sequence; try again later, or raise max_candidate_sequences or max_candidate_sequence_use_ratio"
    )]
    PoolFull {
        /// The client's name for it.
        id: SequenceId,
        /// Slots in all.
        capacity: usize,
        /// How the capacity came about.
        reason: String,
    },
    /// No memory for another slab of slots.
    #[error("no memory for the state of sequence {id}: {source}; live sequences go on, try again later")]
    PoolMemory {
        /// The client's name for it.
        id: SequenceId,
        /// What could not be had.
        source: MemoryError,
    },
    /// Core sent two requests of a sequence at once, which it promises not to.
    #[error("sequence {0} has a request in the works already")]
    SequenceBusy(SequenceId),
    /// A request lacks an input.
    #[error("input '{0}' is missing")]
    InputMissing(String),
    /// The states of a sequence that vary in size would become larger than they may.
    #[error(
        "the sequence's growing states would have {bytes} bytes, and {limit} are allowed (max_state_bytes_per_sequence); its state is as it was before the request"
    )]
    StateTooLarge {
        /// What the states would have.
        bytes: usize,
        /// What they may have.
        limit: usize,
    },
    /// No room for the states of a sequence that vary in size.
    #[error(
        "no room for the sequence's growing states: {0}; its state is as it was before the request, try again later"
    )]
    StateRoom(#[from] NoRoom),
    /// The model for initial states failed when the model was loaded.
    #[error("the initial_state_model '{file}' cannot be run: {source}")]
    InitialModel {
        /// Its file.
        file: String,
        /// Why.
        source: Box<Error>,
    },
    /// The model for initial states gave what its state cannot be.
    #[error("the initial_state_model gave {} for state '{name}', whose rows are {}", Dims(dims), Dims(wanted))]
    InitialState {
        /// The state's input.
        name: String,
        /// What it gave.
        dims: Vec<i64>,
        /// What a row has; -1 is any.
        wanted: Vec<i64>,
    },
    /// An output's length is larger than the output.
    #[error(
        "the model's output '{name}' has shape {}, but the length along axis {axis} is said to be {length}",
        Dims(dims)
    )]
    OutputLength {
        /// The output.
        name: String,
        /// Its dimensions.
        dims: Vec<i64>,
        /// The axis.
        axis: usize,
        /// What its lengths say.
        length: usize,
    },
    /// An input has another type than the model takes.
    #[error("input '{name}' is {came}, but {wanted} is expected")]
    InputType {
        /// The input.
        name: String,
        /// What came.
        came: String,
        /// What the model takes.
        wanted: DataType,
    },
    /// An input has a shape that the model does not take.
    #[error("input '{name}' has shape {}, but {} is expected", Dims(came), Dims(wanted))]
    InputShape {
        /// The input.
        name: String,
        /// What came.
        came: Vec<i64>,
        /// What the model takes; -1 is any.
        wanted: Vec<i64>,
    },
    /// An input of strings has another number of elements than its shape needs, or ends within one.
    #[error("input '{name}' has {} elements, but its shape needs {wanted}", came.map_or("unreadable".to_owned(), |came| came.to_string()))]
    InputStrings {
        /// The input.
        name: String,
        /// What came, if it could be read.
        came: Option<usize>,
        /// What the shape needs.
        wanted: usize,
    },
    /// The model is fed the sequence id as a number, but it is a string.
    #[error(
        "sequence id {id} is a string, but the model's control input takes it as {data_type}: use an unsigned number"
    )]
    SequenceIdType {
        /// The id.
        id: SequenceId,
        /// What the control input is configured as.
        data_type: DataType,
    },
    /// An input has another number of bytes than its shape needs.
    #[error("input '{name}' has {came} bytes, but its shape needs {wanted}")]
    InputBytes {
        /// The input.
        name: String,
        /// What came.
        came: usize,
        /// What the shape needs.
        wanted: usize,
    },
    /// The model gave an output of a shape that cannot be taken apart into rows.
    #[error(
        "the model's output '{name}' has shape {} for a batch of {rows}, so it has no row for each request",
        Dims(dims)
    )]
    OutputRows {
        /// The output.
        name: String,
        /// Its dimensions.
        dims: Vec<i64>,
        /// Rows of the batch.
        rows: usize,
    },
    /// The client did not want the answer any more.
    #[error("the request was cancelled before it ran; the state of its sequence is as it was before")]
    Cancelled,
    /// A request wants an output that responses do not carry.
    #[error("output '{0}' is requested, but it is not listed under 'output' in the model configuration")]
    UnknownOutput(String),
}

impl Error {
    /// Whether a batch that failed with this may succeed without one of its rows.
    pub const fn may_be_one_rows_fault(&self) -> bool {
        matches!(self, Self::Session(_) | Self::Memory(_) | Self::OutputRows { .. } | Self::Panic(_))
    }

    /// Whether there is no GPU that could run the model.
    pub const fn is_want_of_gpu(&self) -> bool {
        use DeviceError::{NoDevice, NoDriver, UselessDriver};
        matches!(
            self,
            Self::Session(SessionError::Provider { .. })
                | Self::Memory(MemoryError::Device(NoDriver | UselessDriver { .. } | NoDevice { .. }))
        )
    }

    /// The table. A client acts on the code, so an error says who has to act: the client (`INVALID_ARG`,
    /// `NOT_FOUND`), the client later (`UNAVAILABLE`), or the operator (the rest).
    fn code(&self) -> Code {
        match self {
            Self::Triton(error) => error.code,
            Self::UnknownSequence { .. } => Code::NotFound,
            Self::Cancelled => Code::Cancelled,
            Self::PoolFull { .. } | Self::Reaper(_) => Code::Unavailable,
            Self::PoolMemory { source: error, .. }
            | Self::InputMemory { source: error, .. }
            | Self::PoolAtLoad { source: error, .. }
            | Self::Memory(error)
            | Self::Session(SessionError::Memory(error)) => memory_code(error),
            Self::InputOnGpu { source, .. } | Self::OutputOnGpu { source, .. } => device_code(source),
            Self::InputType { .. } | Self::InputShape { .. } | Self::InputBytes { .. } | Self::InputStrings { .. } => {
                Code::InvalidArg
            }
            Self::SequenceIdType { .. } | Self::UnknownOutput(_) | Self::InputMissing(_) => Code::InvalidArg,
            Self::StateTooLarge { .. } | Self::StateRoom(_) => Code::Unavailable,
            Self::InitialModel { .. } | Self::InitialState { .. } | Self::OutputLength { .. } => Code::Internal,
            Self::Config(_)
            | Self::Completion(_)
            | Self::Binding(_)
            | Self::BackendConfig { .. }
            | Self::Session(SessionError::ProviderOptions { .. })
            | Self::CudaGraph(_) => Code::InvalidArg,
            Self::Session(SessionError::Run(why)) if is_out_of_memory(why) => Code::Unavailable,
            Self::Server(_) => Code::Unsupported,
            Self::Library(_)
            | Self::Session(_)
            | Self::NoSite { .. }
            | Self::Panic(_)
            | Self::SequenceBusy(_)
            | Self::OutputRows { .. } => Code::Internal,
        }
    }
}

/// Whether a run failed because ONNX Runtime found no memory, which only the text of its error says.
fn is_out_of_memory(why: &str) -> bool {
    ["std::bad_alloc", "Failed to allocate memory"].iter().any(|text| why.contains(text))
}

const fn memory_code(error: &MemoryError) -> Code {
    match error {
        MemoryError::Host { .. } => Code::Unavailable,
        MemoryError::Device(error) => device_code(error),
    }
}

const fn device_code(error: &DeviceError) -> Code {
    match error {
        DeviceError::OutOfMemory { .. } | DeviceError::OutOfPinned { .. } => Code::Unavailable,
        DeviceError::NoDriver | DeviceError::UselessDriver { .. } | DeviceError::NoDevice { .. } => Code::Unsupported,
        DeviceError::Failed { .. } => Code::Internal,
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}

impl From<Error> for triton::Error {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
