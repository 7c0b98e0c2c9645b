//! Errors of requests.

use super::{device_code, memory_code, session_code};
use crate::memory::device::DeviceError;
use crate::memory::{MemoryError, NoRoom};
use crate::panic::Panic;
use crate::sequence::SequenceId;
use crate::session::SessionError;
use crate::tensor::{DataType, Dims};
use crate::triton::{self, Code};

/// Why a request fails. Where a text does not say otherwise, the state of its sequence is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A call to Triton failed.
    #[error(transparent)]
    Triton(#[from] triton::Error),
    /// A run of ONNX Runtime failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The code of this library is wrong; the server lives on.
    #[error(transparent)]
    Panic(#[from] Panic),
    /// The client no longer wants the answer.
    #[error("the request was cancelled before it ran; the state of its sequence is as it was before")]
    Cancelled,

    /// A request continues a sequence that is not there.
    #[error(
        "sequence {id} is not live: its START was refused or failed, it was idle for longer than {idle_limit_ms} ms, \
         or it was ended; start it again"
    )]
    UnknownSequence { id: SequenceId, idle_limit_ms: u128 },
    /// No slot is free for a new sequence.
    #[error(
        "no free slot for sequence {id}: all {capacity} that the model may have ({reason}) hold a sequence; try again \
         later, or raise max_candidate_sequences or max_candidate_sequence_use_ratio"
    )]
    PoolFull { id: SequenceId, capacity: usize, reason: String },
    /// No memory for another slab of slots.
    #[error("no memory for the state of sequence {id}: {source}; live sequences go on, try again later")]
    PoolMemory { id: SequenceId, source: MemoryError },
    /// Core sent two requests of a sequence at once, which it promises not to; or another instance has used the
    /// sequence's slot for long.
    #[error("another request of sequence {0} is running, or its slot is still being copied; try again later")]
    SequenceBusy(SequenceId),
    /// The model is fed the sequence id as a number, but it is a string.
    #[error(
        "sequence id {id} is a string, but the model's control input takes it as {data_type}: use an unsigned number"
    )]
    SequenceIdType { id: SequenceId, data_type: DataType },

    /// A request lacks an input.
    #[error("input '{0}' is missing")]
    InputMissing(String),
    /// An input has another type than the model takes.
    #[error("input '{name}' is {came}, but {wanted} is expected")]
    InputType { name: String, came: String, wanted: DataType },
    /// An input has a shape that the model does not take; -1 in `wanted` is any length.
    #[error("input '{name}' has shape {}, but {} is expected", Dims(came), Dims(wanted))]
    InputShape { name: String, came: Vec<i64>, wanted: Vec<i64> },
    /// An input has another number of bytes than its shape needs.
    #[error("input '{name}' has {came} bytes, but its shape needs {wanted}")]
    InputBytes { name: String, came: usize, wanted: usize },
    /// An input of strings has another number of elements than its shape needs; `None` if it ends within one.
    #[error("input '{name}' has {} elements, but its shape needs {wanted}", readable(*came))]
    InputStrings { name: String, came: Option<usize>, wanted: usize },
    /// An input lies in memory of a GPU that cannot be read.
    #[error("input '{name}' lies in memory of GPU {gpu}, which cannot be read: {source}")]
    InputOnGpu { name: String, gpu: i32, source: DeviceError },
    /// No memory for a copy of an input.
    #[error(
        "no memory for input '{name}': {source}; the state of its sequence is as it was before the request, try again \
         later"
    )]
    InputMemory { name: String, source: MemoryError },

    /// The states of a sequence that vary in size would become larger than they may.
    #[error(
        "the sequence's growing states would have {bytes} bytes, and {limit} are allowed \
         (max_state_bytes_per_sequence); its state is as it was before the request"
    )]
    StateTooLarge { bytes: usize, limit: usize },
    /// No room for the states of a sequence that vary in size.
    #[error(
        "no room for the sequence's growing states: {0}; its state is as it was before the request, try again later"
    )]
    StateRoom(NoRoom),
    /// The model for initial states gave what its state cannot be; -1 in `wanted` is any length.
    #[error("the initial_state_model gave {} for state '{name}', whose rows are {}", Dims(dims), Dims(wanted))]
    InitialState { name: String, dims: Vec<i64>, wanted: Vec<i64> },

    /// A request wants an output that responses do not carry.
    #[error("output '{0}' is requested, but it is not listed under 'output' in the model configuration")]
    UnknownOutput(String),
    /// The model gave an output of a shape that cannot be taken apart into rows.
    #[error(
        "the model's output '{name}' has shape {} for a batch of {rows}, so it has no row for each request",
        Dims(dims)
    )]
    OutputRows { name: String, dims: Vec<i64>, rows: usize },
    /// An output's length is larger than the output.
    #[error(
        "the model's output '{name}' has shape {}, but the length along axis {axis} is said to be {length}",
        Dims(dims)
    )]
    OutputLength { name: String, dims: Vec<i64>, axis: usize, length: usize },
    /// An output is wanted in memory of a GPU that cannot be written.
    #[error("output '{name}' is wanted in memory of GPU {gpu}, which cannot be written: {source}")]
    OutputOnGpu { name: String, gpu: i32, source: DeviceError },
}

impl RequestError {
    /// Whether a batch that failed with this may succeed without one of its rows.
    pub const fn may_be_one_rows_fault(&self) -> bool {
        matches!(self, Self::Session(_) | Self::Memory(_) | Self::OutputRows { .. } | Self::Panic(_))
    }

    /// A client acts on the code, so it says who has to act: the client (`INVALID_ARG`, `NOT_FOUND`), the client later
    /// (`UNAVAILABLE`), or the operator (`INTERNAL`, `UNSUPPORTED`).
    fn code(&self) -> Code {
        match self {
            Self::Triton(error) => error.code,
            Self::Session(error) => session_code(error),
            Self::Memory(error) | Self::PoolMemory { source: error, .. } | Self::InputMemory { source: error, .. } => {
                memory_code(error)
            }
            Self::InputOnGpu { source, .. } | Self::OutputOnGpu { source, .. } => device_code(source),
            Self::Cancelled => Code::Cancelled,
            Self::UnknownSequence { .. } => Code::NotFound,
            Self::PoolFull { .. } | Self::SequenceBusy(_) | Self::StateTooLarge { .. } | Self::StateRoom(_) => {
                Code::Unavailable
            }
            Self::SequenceIdType { .. }
            | Self::InputMissing(_)
            | Self::InputType { .. }
            | Self::InputShape { .. }
            | Self::InputBytes { .. }
            | Self::InputStrings { .. }
            | Self::UnknownOutput(_) => Code::InvalidArg,
            Self::Panic(_) | Self::InitialState { .. } | Self::OutputRows { .. } | Self::OutputLength { .. } => {
                Code::Internal
            }
        }
    }
}

fn readable(count: Option<usize>) -> String {
    count.map_or("unreadable".to_owned(), |count| count.to_string())
}

impl From<NoRoom> for RequestError {
    fn from(error: NoRoom) -> Self {
        match error {
            NoRoom::Memory(MemoryError::Device(failed)) if !failed.is_out_of_memory() => failed.into(),
            error => Self::StateRoom(error),
        }
    }
}

impl From<DeviceError> for RequestError {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}

impl From<RequestError> for triton::Error {
    fn from(error: RequestError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
