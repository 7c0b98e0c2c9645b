//! The state of one sequence, away from where the store keeps it.

use crate::binding::Initial;
use crate::error::{RequestError, RunError, StateApiError};

/// Why a state cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// It is not a state of this model.
    #[error("{0}")]
    Misfit(String),
    /// There is no room for it.
    #[error(transparent)]
    Store(#[from] RunError),
    /// A device has failed, and the state may be half-way: the sequence has to be ended.
    #[error(transparent)]
    Copy(RunError),
}

impl From<WriteError> for RequestError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Misfit(why) => StateApiError::Conflict(why).into(),
            WriteError::Store(error) | WriteError::Copy(error) => error.into(),
        }
    }
}

/// What a sequence has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceState {
    /// The value of each state, in the order of the binding.
    pub states: Vec<Initial>,
    /// The bytes of each context, in the order of [`crate::binding::Binding::contexts`].
    pub contexts: Vec<Vec<u8>>,
}
