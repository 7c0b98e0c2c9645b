//! Errors of the stages that a request passes, each with its reason and code: its sequence's place, the State API, the
//! store outside the server, what it carries, its run, and what becomes of the outputs.

use std::num::NonZeroUsize;

use gpu_rows::DeviceError;
use rows::NoMemory;
use rows::tensor::{DataType, Dims};
use sequences::SequenceId;
use sequences::scheduler::Refused;
use state_store::StoreError;

use super::codes::{Reason, device_code, memory_code, session_code};
use crate::memory::{MemoryError, NoRoom};
use crate::session::SessionError;
use crate::triton::{Code, NotCopied};

#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    #[error(
        "sequence {id} is not live: its START was refused or failed, it was idle for longer than {idle_limit_ms} ms, \
         or it was ended; start it again"
    )]
    Unknown { id: SequenceId, idle_limit_ms: u128 },
    #[error(
        "sequence {id} has ended: another sequence started with its id, and their requests cannot be told apart; \
         start again with another id, or when the model has been idle for {wait_ms} ms; to prevent this, wait for the \
         answer to END or START before the next START of an id"
    )]
    Ambiguous { id: SequenceId, wait_ms: u128 },
    #[error(
        "no free slot for sequence {id}: all {capacity} that the model may have ({reason}) hold a sequence; try again \
         later, or raise max_candidate_sequences or max_candidate_sequence_use_ratio"
    )]
    PoolFull { id: SequenceId, capacity: usize, reason: String },
    #[error("no memory for the state of sequence {id}: {source}; live sequences go on, try again later")]
    PoolMemory { id: SequenceId, source: MemoryError },
    /// Core sent two requests of a sequence at once, which it promises not to; or another instance has used the
    /// sequence's slot for long.
    #[error("another request of sequence {0} is running, or its slot is still being copied; try again later")]
    Busy(SequenceId),
    #[error(
        "sequence id {id} is a string, but the model's control input takes it as {data_type}: use an unsigned number"
    )]
    IdType { id: SequenceId, data_type: DataType },
    #[error(
        "sequence id {id} is too large for the model's control input, which takes it as {data_type}: use at most {most}"
    )]
    IdTooLarge { id: u64, data_type: DataType, most: u64 },
    #[error(
        "SEQUENCE_ID_NOT_PROVIDED: Sequence ID has not been provided in request inputs: give 'sequence_id' as a request \
         parameter or as an input; only a START may leave it out, and tritonclient sends no START with id 0"
    )]
    IdNotProvided,
    #[error(
        "INVALID_SEQUENCE_CONTROL_INPUT: Unexpected value of sequence control input: {0}; 0 (go on), 1 (START) or 2 \
         (END) is expected"
    )]
    Control(u32),
    #[error("SEQUENCE_ID_BAD_TYPE: Required shape for {name} is: (1); it has {}", Dims(came))]
    TensorShape { name: &'static str, came: Vec<i64> },
    #[error(
        "SEQUENCE_ID_CONFLICT: the request parameters say {parameter}, and input '{what}' says {input}: send one of \
         them, or the same value in both"
    )]
    IdConflict { what: &'static str, parameter: String, input: String },
    /// Only if this backend schedules the sequences.
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(
        "SEQUENCE_MISSING: no live sequence {0} to clone ('clone_of'); with 'sequence_batching', another instance may \
         have it: configure one instance"
    )]
    CloneSource(SequenceId),
}

impl AdmissionError {
    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::Unknown { .. } | Self::Ambiguous { .. } | Self::CloneSource(_) => {
                (Reason::SequenceNotFound, Code::NotFound)
            }
            Self::IdType { .. }
            | Self::IdTooLarge { .. }
            | Self::IdNotProvided
            | Self::Control(_)
            | Self::TensorShape { .. }
            | Self::IdConflict { .. } => (Reason::SequenceId, Code::InvalidArg),
            Self::Busy(_) => (Reason::SequenceBusy, Code::Unavailable),
            Self::PoolFull { .. } => (Reason::NoSlot, Code::Unavailable),
            Self::PoolMemory { source, .. } => (Reason::NoMemory, memory_code(source)),
            Self::Refused(refused) => match refused {
                Refused::Missing(_) | Refused::NotParked(_) | Refused::Parked(_) => {
                    (Reason::SequenceNotFound, Code::NotFound)
                }
                Refused::Exists { .. } | Refused::NotParkedButLive(_) => (Reason::SequenceExists, Code::AlreadyExists),
                Refused::TooMany { .. } | Refused::QueueFull { .. } => (Reason::NoSlot, Code::Unavailable),
                Refused::TooManyQueued { .. } => (Reason::QueueFull, Code::Unavailable),
                Refused::Late(_) => (Reason::QueueTimeout, Code::Unavailable),
                Refused::CloneOfItself(_) => (Reason::StateApi, Code::InvalidArg),
                Refused::Moved(_) | Refused::Drains => (Reason::StateStore, Code::Unavailable),
            },
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("is damaged: {0}")]
    Damaged(&'static str),
    #[error("has format {came}, and this server reads format {known}")]
    Version { came: u32, known: u32 },
    #[error("is of another model: {0}")]
    Foreign(String),
    #[error("cannot be read: {0}")]
    Memory(#[from] MemoryError),
}

#[derive(Debug, thiserror::Error)]
pub enum StateApiError {
    #[error(
        "STATE_API_OFF: request parameter '{0}' needs the State API, which the model's configuration does not allow: set \
         parameter 'state_api' to 'true' there"
    )]
    Off(String),
    #[error("STATE_PARAMETER: request parameter '{name}' is {value}: {allowed}")]
    Parameter { name: String, value: String, allowed: &'static str },
    #[error(
        "STATE_UNKNOWN: request parameter '{parameter}' names '{state}', but the model's states are {}",
        known.join(", ")
    )]
    UnknownState { parameter: String, state: String, known: Vec<String> },
    #[error("STATE_CONFLICT: {0}")]
    Conflict(String),
    #[error(
        "STATE_NOT_LISTED: '{name}' is not listed under '{list}' in the model configuration: list it, or start the \
         server without --disable-auto-complete-config"
    )]
    NotListed { name: String, list: &'static str },
    #[error("SNAPSHOT_INVALID: the snapshot {0}; nothing has changed")]
    Snapshot(#[from] SnapshotError),
    #[error(
        "SEQUENCE_STEP_CONFLICT: the request is for step {step} of sequence {id}, which has made {made}; the request \
         has not run"
    )]
    StepConflict { id: SequenceId, step: u64, made: u64 },
    #[error(
        "SEQUENCE_STEP_CONFLICT: the request is for {wanted} left-over elements of sequence {id}, which has made \
         {made} steps and has {left} left over; the request has not run"
    )]
    LeftConflict { id: SequenceId, wanted: u64, left: u64, made: u64 },
    #[error(
        "the sequence's held inputs would have {bytes} bytes, and {limit} are allowed (max_state_bytes_per_sequence)"
    )]
    HeldTooLarge { bytes: usize, limit: usize },
    #[error("no room for the sequence's held inputs: {0}; its state is as it was before the request, try again later")]
    HeldRoom(NoRoom),
}

impl StateApiError {
    /// Whether the sequence is not where the request's client believes it to be.
    pub(super) const fn is_step_conflict(&self) -> bool {
        matches!(self, Self::StepConflict { .. } | Self::LeftConflict { .. })
    }

    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::Off(_) => (Reason::StateApi, Code::Unsupported),
            Self::StepConflict { .. } | Self::LeftConflict { .. } => (Reason::StateApi, Code::AlreadyExists),
            Self::HeldTooLarge { .. } => (Reason::StateTooLarge, Code::InvalidArg),
            Self::HeldRoom(_) => (Reason::NoMemory, Code::Unavailable),
            Self::Snapshot(SnapshotError::Memory(error)) => (Reason::NoMemory, memory_code(error)),
            Self::Parameter { .. }
            | Self::UnknownState { .. }
            | Self::Conflict(_)
            | Self::NotListed { .. }
            | Self::Snapshot(_) => (Reason::StateApi, Code::InvalidArg),
        }
    }
}

from_through!(SnapshotError: NoMemory => Memory);

/// Why a request fails because of the store. The store has the state of the sequence after its last answer.
#[derive(Debug, thiserror::Error)]
pub enum StoredError {
    #[error(
        "SEQUENCE_NOT_SAVED: sequence {0} has begun on another server, which has saved none of its steps; start it again"
    )]
    NotSaved(SequenceId),
    #[error(
        "SEQUENCE_ALREADY_EXISTS: Sequence with provided ID already exists: {0} is in the state store; it goes on. If this \
         START is sent again, send it without START; else end that sequence first, use another id, or set parameter \
         'on_duplicate_start' to 'restart'"
    )]
    Exists(SequenceId),
    #[error(
        "STATE_STORE_FAILED: {source}; the answered steps of sequence {id} are as they were: send this request again when \
         the store can save"
    )]
    Failed { id: SequenceId, source: StoreError },
    #[error(
        "STATE_STORE_DAMAGED: the state of sequence {id} in the store cannot be used: {source}; end it, and start it again"
    )]
    Damaged { id: SequenceId, source: SnapshotError },
}

impl StoredError {
    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::NotSaved(_) => (Reason::SequenceNotFound, Code::NotFound),
            Self::Exists(_) => (Reason::SequenceExists, Code::AlreadyExists),
            Self::Failed { source: StoreError::TooLarge { .. }, .. } => (Reason::StateStore, Code::InvalidArg),
            Self::Failed { .. } => (Reason::StateStore, Code::Unavailable),
            Self::Damaged { .. } => (Reason::StateStore, Code::Internal),
        }
    }
}

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
    /// The rows of one answer can't have different numbers of steps, and a row's number depends on what its sequence
    /// has left over.
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

from_through!(RunError: NoMemory => Memory, DeviceError => Memory);
