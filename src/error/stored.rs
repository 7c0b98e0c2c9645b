//! Errors of sequences that are kept in a store outside the server.

use sequences::SequenceId;
use state_store::StoreError;

use super::reason::Reason;
use super::state_api::SnapshotError;
use crate::triton::Code;

/// Why a request fails because of the store. The store has the state of the sequence after its last answer.
#[derive(Debug, thiserror::Error)]
pub enum StoredError {
    /// Another server has taken the sequence, or the state here has been lost.
    #[error(
        "SEQUENCE_MOVED: sequence {0} has left this server, or its state here was lost; this request has changed nothing: send \
         it again"
    )]
    Moved(SequenceId),
    /// The server is being drained.
    #[error(
        "SEQUENCE_MOVED: this server is draining ('drain') and takes no more sequences; this request has changed \
         nothing: send it again, to another server"
    )]
    Drains,
    /// The server that began the sequence saved nothing of it.
    #[error(
        "SEQUENCE_NOT_SAVED: sequence {0} has begun on another server, which has saved none of its steps; start it again"
    )]
    NotSaved(SequenceId),
    /// A START, and the store has a sequence with its id.
    #[error(
        "SEQUENCE_ALREADY_EXISTS: Sequence with provided ID already exists: {0} is in the state store; it goes on. If this \
         START is sent again, send it without START; else end that sequence first, use another id, or set parameter \
         'on_duplicate_start' to 'restart'"
    )]
    Exists(SequenceId),
    /// The store did not do what was asked.
    #[error(
        "STATE_STORE_FAILED: {source}; the answered steps of sequence {id} are as they were: send this request again when \
         the store can save"
    )]
    Failed { id: SequenceId, source: StoreError },
    /// What the store has is no state of this model.
    #[error(
        "STATE_STORE_DAMAGED: the state of sequence {id} in the store cannot be used: {source}; end it, and start it again"
    )]
    Damaged { id: SequenceId, source: SnapshotError },
}

impl StoredError {
    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::Moved(_) | Self::Drains => (Reason::StateStore, Code::Unavailable),
            Self::NotSaved(_) => (Reason::SequenceNotFound, Code::NotFound),
            Self::Exists(_) => (Reason::SequenceExists, Code::AlreadyExists),
            Self::Failed { source: StoreError::TooLarge { .. }, .. } => (Reason::StateStore, Code::InvalidArg),
            Self::Failed { .. } => (Reason::StateStore, Code::Unavailable),
            Self::Damaged { .. } => (Reason::StateStore, Code::Internal),
        }
    }
}
