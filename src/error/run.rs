//! Errors of what a request carries, of its run, and of what becomes of the outputs: new states and responses.

use std::num::NonZeroUsize;

use gpu_rows::DeviceError;
use rows::NoMemory;
use rows::tensor::{DataType, Dims};

use super::codes::{Reason, device_code, memory_code, session_code};
use crate::memory::{MemoryError, NoRoom};
use crate::session::SessionError;
use crate::triton::{Code, NotCopied};

#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error("input '{0}' is missing")]
    Missing(String),
    #[error(
        "the request lacks input '{0}', which 'input_windows' cuts: send the input in each request, with 0 elements if \
         there are none"
    )]
    MissingWindows(String),
    #[error("input '{name}' is {came}, but {wanted} is expected")]
    Type { name: String, came: String, wanted: DataType },
    /// An input has a shape that the model does not take; -1 in `wanted` is any length.
    #[error("input '{name}' has shape {}, but {} is expected", Dims(came), Dims(wanted))]
    Shape { name: String, came: Vec<i64>, wanted: Vec<i64> },
    #[error(
        "input '{name}' has shape {}, which is {} rows, but a request has one row, or as many as its input 'sequence_id': \
         send a request for each sequence",
        Dims(came),
        came.first().unwrap_or(&0)
    )]
    Rows { name: String, came: Vec<i64> },
    /// A context makes the first inference of a sequence different from later ones. `rule` says which one this is.
    #[error(
        "input '{name}' has {came} elements along axis {axis} of the model, but {rule}, because \
         'input_context' puts {length} elements in front"
    )]
    Length { name: String, axis: usize, came: usize, rule: String, length: usize },
    #[error("input '{name}' has no elements, with shape {}, but {node} needs at least one step", Dims(came))]
    NoSteps { name: String, came: Vec<i64>, node: String },
    #[error(
        "input '{name}' has {came} steps along axis {axis} of the model, but a multiple of {multiple} is expected, \
         because the model has a stride over time"
    )]
    StepsMultiple { name: String, axis: usize, came: usize, multiple: NonZeroUsize },
    #[error("input '{name}' has {came} bytes, but its shape needs {wanted}")]
    Bytes { name: String, came: usize, wanted: usize },
    /// An input of strings has another number of elements than its shape needs; `None` if it ends within one.
    #[error("input '{name}' has {} elements, but its shape needs {wanted}", readable(*came))]
    Strings { name: String, came: Option<usize>, wanted: usize },
    #[error("input '{name}' lies in memory of GPU {gpu}, which cannot be read: {source}")]
    OnGpu { name: String, gpu: i32, source: DeviceError },
    #[error(
        "no memory for input '{name}': {source}; the state of its sequence is as it was before the request, try again \
         later"
    )]
    Memory { name: String, source: MemoryError },
    #[error(
        "input '{name}' brings {brought} elements, so the request would make {steps} steps, but {most} are allowed \
         (max_steps_per_request); the state of its sequence is as it was before: send fewer elements in a request"
    )]
    TooManySteps { name: String, brought: usize, steps: usize, most: usize },
    /// The rows of one answer can't have different numbers of steps, and a row's number depends on what its sequence has left
    /// over.
    #[error(
        "the request has {0} sequences, but a model with 'input_windows' or 'repeat' takes one per request: send a \
         request for each sequence"
    )]
    SeveralSequences(usize),
    #[error(
        "parameter 'max_steps' of the request is {value}, and a whole number from 1 to {most} is expected \
         (max_steps_per_request)"
    )]
    MaxSteps { value: String, most: usize },
    #[error(
        "nothing ends the steps of the request: send request parameter 'max_steps', or set parameter 'repeat_until' \
         of the model"
    )]
    NoMaxSteps,
    #[error(
        "the inputs of the request do not bring the same number of windows ('input_windows'): {brought}; the state of its \
         sequence is as it was before"
    )]
    UnequalWindows { brought: String },
    #[error(
        "generated input '{name}' ({written}) would be {value}, but {data_type} holds values up to {most}; the \
         request has not run: start the sequence again"
    )]
    GeneratedTooLarge { name: String, written: String, value: i128, data_type: DataType, most: i64 },
}

impl InputError {
    pub fn not_copied(input: &str, error: NotCopied) -> Self {
        match error {
            NotCopied::Gpu(gpu, source) => Self::OnGpu { name: input.to_owned(), gpu, source },
            NotCopied::Memory(source) => Self::Memory { name: input.to_owned(), source: source.into() },
        }
    }

    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::OnGpu { source, .. } => (Reason::Device, device_code(source)),
            Self::Memory { source, .. } => (Reason::NoMemory, memory_code(source)),
            _ => (Reason::Input, Code::InvalidArg),
        }
    }
}

fn readable(count: Option<usize>) -> String {
    count.map_or("unreadable".to_owned(), |count| count.to_string())
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A run of ONNX Runtime failed for this request alone, while others of the same moment ran.
    #[error(
        "{0}; other requests of the same payload ran, so this request is probably at fault: check its values and lengths"
    )]
    AtFault(SessionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(
        "the sequence's growing states would have {bytes} bytes, and {limit} are allowed \
         (max_state_bytes_per_sequence); its state is as it was before the request"
    )]
    StateTooLarge { bytes: usize, limit: usize },
    #[error(
        "the new value of state '{name}' has numbers above 65504, which TYPE_FP16 can't hold ('store_states_as_fp16'); the state \
         is as it was before the request"
    )]
    StateNotFp16 { name: String },
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
    #[error("output '{0}' is requested, but it is not listed under 'output' in the model configuration")]
    UnknownOutput(String),
    #[error(
        "the model's output '{name}' has shape {} for a batch of {rows}, so it has no row for each request",
        Dims(dims)
    )]
    OutputRows { name: String, dims: Vec<i64>, rows: usize },
    #[error(
        "the model's output '{name}' has shape {} after a run with padded states, but {wanted} elements along axis \
         {axis} are expected: with 'growing_padding', each run must append as many elements to a state as its mask \
         counts as new",
        Dims(dims)
    )]
    PaddedState { name: String, dims: Vec<i64>, axis: usize, wanted: usize },
    #[error(
        "the model's output '{name}' has shape {}, but a row of it has length {length} along axis {axis} \
         (padded_outputs)",
        Dims(dims)
    )]
    OutputLength { name: String, dims: Vec<i64>, axis: usize, length: usize },
    #[error(
        "the outputs of the request's steps have {bytes} bytes by now, and {limit} are allowed (max_steps_per_request); the \
         state of its sequence is as it was before: send fewer elements in a request, or a smaller max_steps"
    )]
    AnswerTooLarge { bytes: usize, limit: usize },
    #[error(
        "the model's output '{name}' has shape {first} in the first step of the request and {later} in a later one, \
         so one response cannot hold both; the state of its sequence is as it was before"
    )]
    UnequalSteps { name: String, first: String, later: String },
    #[error(
        "the model's output '{output}' has shape {} for a row, but the next step reads it as input '{input}' with \
         shape {} (repeat); the state of its sequence is as it was before",
        Dims(dims),
        Dims(wanted)
    )]
    RepeatedShape { output: String, input: String, dims: Vec<i64>, wanted: Vec<i64> },
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
            // The model's output is wrong, so only the operator can act.
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
