//! Errors of the State API, and of held inputs.

use rows::NoMemory;
use sequences::SequenceId;

use super::codes::memory_code;
use super::reason::Reason;
use crate::memory::{MemoryError, NoRoom};
use crate::triton::Code;

/// Why bytes are not a snapshot of a sequence of this model.
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

/// Why a sequence's state or held inputs cannot be changed or read as a request asks.
#[derive(Debug, thiserror::Error)]
pub enum StateApiError {
    /// A parameter of the State API for a model that doesn't allow it.
    #[error(
        "STATE_API_OFF: request parameter '{0}' needs the State API, which the model's configuration does not allow: set \
         parameter 'state_api' to 'true' there"
    )]
    Off(String),
    /// A parameter with a value that it cannot have.
    #[error("STATE_PARAMETER: request parameter '{name}' is {value}: {allowed}")]
    Parameter { name: String, value: String, allowed: &'static str },
    /// A parameter names a state that the model does not have.
    #[error(
        "STATE_UNKNOWN: request parameter '{parameter}' names '{state}', but the model's states are {}",
        known.join(", ")
    )]
    UnknownState { parameter: String, state: String, known: Vec<String> },
    /// Things that cannot be asked for together, or not here.
    #[error("STATE_CONFLICT: {0}")]
    Conflict(String),
    /// A tensor of the State API that the configuration doesn't list.
    #[error(
        "STATE_NOT_LISTED: '{name}' is not listed under '{list}' in the model configuration: list it, or start the \
         server without --disable-auto-complete-config"
    )]
    NotListed { name: String, list: &'static str },
    /// Bytes that are not a snapshot of this model's.
    #[error("SNAPSHOT_INVALID: the snapshot {0}; nothing has changed")]
    Snapshot(#[from] SnapshotError),
    /// The sequence has made another number of steps than the request is for.
    #[error(
        "SEQUENCE_STEP_CONFLICT: the request is for step {step} of sequence {id}, which has made {made}; the request \
         has not run"
    )]
    StepConflict { id: SequenceId, step: u64, made: u64 },
    /// The sequence has another number of left-over elements than the request is for.
    #[error(
        "SEQUENCE_STEP_CONFLICT: the request is for {wanted} left-over elements of sequence {id}, which has made \
         {made} steps and has {left} left over; the request has not run"
    )]
    LeftConflict { id: SequenceId, wanted: u64, left: u64, made: u64 },
    /// The held inputs of a sequence are larger than they may be.
    #[error(
        "the sequence's held inputs would have {bytes} bytes, and {limit} are allowed (max_state_bytes_per_sequence)"
    )]
    HeldTooLarge { bytes: usize, limit: usize },
    /// No room for the held inputs of a sequence.
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
