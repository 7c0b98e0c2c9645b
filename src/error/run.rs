//! Errors of a run, and of what becomes of its outputs: new states and responses.

use gpu_rows::DeviceError;
use rows::NoMemory;
use rows::tensor::Dims;

use super::codes::{device_code, memory_code, session_code};
use super::reason::Reason;
use crate::memory::{MemoryError, NoRoom};
use crate::session::SessionError;
use crate::triton::Code;

/// Why a batch cannot run, or its states or outputs cannot be kept or sent.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A run of ONNX Runtime failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A run of ONNX Runtime failed for this request alone, while others of the same moment ran.
    #[error(
        "{0}; other requests of the same payload ran, so this request is probably at fault: check its values and lengths"
    )]
    AtFault(SessionError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The states of a sequence that vary in size would become larger than they may.
    #[error(
        "the sequence's growing states would have {bytes} bytes, and {limit} are allowed \
         (max_state_bytes_per_sequence); its state is as it was before the request"
    )]
    StateTooLarge { bytes: usize, limit: usize },
    /// A new state has numbers that half precision can't hold.
    #[error(
        "the new value of state '{name}' has numbers above 65504, which TYPE_FP16 can't hold ('store_states_as_fp16'); the state \
         is as it was before the request"
    )]
    StateNotFp16 { name: String },
    /// No room for the states of a sequence that vary in size.
    #[error(
        "no room for the sequence's growing states: {0}; its state is as it was before the request, try again later"
    )]
    StateRoom(NoRoom),
    /// The model for initial states gave what its state cannot be; -1 in `wanted` is any length.
    #[error(
        "the initial_state_model gave shape {} for state '{name}', but a row of that state is {}",
        Dims(dims),
        Dims(wanted)
    )]
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
    /// A state was padded, and the run did not leave its elements where they were.
    #[error(
        "the model's output '{name}' has shape {} after a run with padded states, but {wanted} elements along axis \
         {axis} are expected: with 'growing_padding', each run must append as many elements to a state as its mask \
         counts as new",
        Dims(dims)
    )]
    PaddedState { name: String, dims: Vec<i64>, axis: usize, wanted: usize },
    /// An output's length is larger than the output.
    #[error(
        "the model's output '{name}' has shape {}, but a row of it has length {length} along axis {axis} \
         (padded_outputs)",
        Dims(dims)
    )]
    OutputLength { name: String, dims: Vec<i64>, axis: usize, length: usize },
    /// The outputs of the steps of a request are too large together.
    #[error(
        "the outputs of the request's steps have {bytes} bytes by now, and {limit} are allowed (max_steps_per_request); the \
         state of its sequence is as it was before: send fewer elements in a request, or a smaller max_steps"
    )]
    AnswerTooLarge { bytes: usize, limit: usize },
    /// The outputs of two steps of a request cannot stand together.
    #[error(
        "the model's output '{name}' has shape {first} in the first step of the request and {later} in a later one, \
         so one response cannot hold both; the state of its sequence is as it was before"
    )]
    UnequalSteps { name: String, first: String, later: String },
    /// An output of a step is not what the next one can read.
    #[error(
        "the model's output '{output}' has shape {} for a row, but the next step reads it as input '{input}' with \
         shape {} (repeat); the state of its sequence is as it was before",
        Dims(dims),
        Dims(wanted)
    )]
    RepeatedShape { output: String, input: String, dims: Vec<i64>, wanted: Vec<i64> },
    /// An output is wanted in memory of a GPU that cannot be written.
    #[error("output '{name}' is wanted in memory of GPU {gpu}, which cannot be written: {source}")]
    OutputOnGpu { name: String, gpu: i32, source: DeviceError },
}

impl RunError {
    pub(super) fn class(&self) -> (Reason, Code) {
        match self {
            Self::Session(error) => (Reason::Run, session_code(error)),
            Self::AtFault(_) => (Reason::Input, Code::InvalidArg),
            Self::Memory(error) => (Reason::NoMemory, memory_code(error)),
            Self::StateRoom(_) => (Reason::NoMemory, Code::Unavailable),
            Self::StateTooLarge { .. } => (Reason::StateTooLarge, Code::Unavailable),
            Self::StateNotFp16 { .. } | Self::UnknownOutput(_) | Self::AnswerTooLarge { .. } => {
                (Reason::Output, Code::InvalidArg)
            }
            Self::OutputOnGpu { source, .. } => (Reason::Device, device_code(source)),
            Self::InitialState { .. }
            | Self::OutputRows { .. }
            | Self::PaddedState { .. }
            | Self::UnequalSteps { .. }
            | Self::RepeatedShape { .. }
            | Self::OutputLength { .. } => (Reason::Run, Code::Internal),
        }
    }
}

impl From<NoRoom> for RunError {
    fn from(error: NoRoom) -> Self {
        match error {
            // A device that has failed has no room later either.
            NoRoom::Memory(MemoryError::Device(failed)) if !failed.is_out_of_memory() => failed.into(),
            error => Self::StateRoom(error),
        }
    }
}

impl From<NoMemory> for RunError {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

impl From<DeviceError> for RunError {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}
