//! Errors of a request's sequence: its place, the State API and held inputs, and the store outside the server.

use rows::NoMemory;
use rows::tensor::{DataType, Dims};
use sequences::SequenceId;
use sequences::scheduler::Refused;
use state_store::StoreError;

use super::codes::{Reason, memory_code};
use crate::memory::{MemoryError, NoRoom};
use crate::triton::Code;

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

impl From<NoMemory> for SnapshotError {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

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
