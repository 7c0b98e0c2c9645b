//! The values of states: of a row before its run, and of a sequence, away from where the store keeps it.

use rows::strings::Strings;
use rows::tensor::StorageType;

use super::row_state::RowState;
use crate::binding::{Binding, Initial, InitialContent, StatePlace};
use crate::error::{RequestError, RunError, StateApiError};
use crate::memory::{Bytes, Charge};
use crate::model::StateMemory;
use crate::session::RowContent;

/// A state of one row.
#[derive(Clone, Copy)]
pub struct StateRow<'a> {
    /// Dimensions, with 1 for the batch axis.
    pub dims: &'a [i64],
    /// Elements.
    pub content: StateContent<'a>,
}

/// The elements of a state of one row.
#[derive(Clone, Copy)]
pub enum StateContent<'a> {
    /// Zeros, or empty strings.
    Zeros,
    /// Numbers that are stored so.
    Stored(StorageType, Bytes<'a>),
    /// Strings.
    Strings(&'a Strings),
    /// Strings in Triton's form.
    WrittenStrings(&'a [u8]),
}

impl<'a> StateRow<'a> {
    /// State number `number` of a row: what the request gives, what is in `memory`, or what its sequence starts
    /// with.
    pub fn of(binding: &'a Binding, number: usize, row: &'a RowState, memory: Option<&'a StateMemory>) -> Self {
        if let Some(given) = row.given.get(number).and_then(Option::as_ref) {
            return Self::initial(given);
        }
        let kept = memory.filter(|_| !row.is_fresh()).and_then(|memory| Self::kept(binding, number, memory));
        kept.unwrap_or_else(|| Self::initial(&binding.states[number].initial))
    }

    /// State number `number` as a sequence keeps it in its slot or beside it.
    pub fn kept(binding: &'a Binding, number: usize, memory: &'a StateMemory) -> Option<Self> {
        let state = &binding.states[number];
        match state.place {
            StatePlace::Slot(_) => {
                let from = binding.slot.offset(number);
                let bytes = memory.slot.part(from..from + state.slot_bytes());
                Some(Self { dims: &state.dims, content: StateContent::Stored(state.storage, bytes) })
            }
            StatePlace::Beside(number) => memory.varying.get(number).map(|varying| Self {
                dims: varying.dims(),
                content: match state.data_type.byte_size() {
                    Some(_) => StateContent::Stored(state.storage, varying.bytes()),
                    None => StateContent::WrittenStrings(varying.bytes().host()),
                },
            }),
        }
    }

    /// An initial value.
    pub fn initial(initial: &'a Initial) -> Self {
        let content = match &initial.content {
            InitialContent::Zeros | InitialContent::Model => StateContent::Zeros,
            InitialContent::Bytes(bytes) => StateContent::Stored(StorageType::Exact, Bytes::Host(bytes)),
            InitialContent::Strings(strings) => StateContent::Strings(strings),
        };
        Self { dims: &initial.dims, content }
    }
}

impl<'a> StateContent<'a> {
    /// For a row of numbers.
    pub const fn of_row(self) -> RowContent<'a> {
        match self {
            Self::Zeros | Self::Strings(_) | Self::WrittenStrings(_) => RowContent::Zeros,
            Self::Stored(storage, bytes) => RowContent::Stored(storage, bytes),
        }
    }
}

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

/// The state of a sequence before a request of several steps.
pub struct Saved {
    pub(super) state: SequenceState,
    /// What its states of varying size take of the bytes that all sequences may have.
    pub(super) charge: Option<Charge>,
}
