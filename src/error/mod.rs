//! What can go wrong, and the code that Triton is told.
//!
//! A [`LoadError`] is for the operator who loads a model; a [`RequestError`] is for the client who sent a request, and
//! joins the errors of the stages that it passes. Load and request errors have their own tables of codes, so a request
//! never fails with an error of loading. What both can meet ([`codes`]) has the same code in both.

#![forbid(unsafe_code)]

mod codes;
mod load;
mod run;
mod sequence;

use rows::NoMemory;
use sequences::scheduler::Refused;

use crate::memory::MemoryError;
use crate::panic::Panic;
use crate::session::SessionError;
use crate::triton::{self, Code};
pub use codes::Reason;
use codes::session_code;
pub use load::LoadError;
pub use run::{InputError, RunError};
pub use sequence::{AdmissionError, SnapshotError, StateApiError, StoredError};

/// Why a request fails. Where a text does not say otherwise, the state of its sequence is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    StateApi(#[from] StateApiError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Stored(#[from] StoredError),
    #[error(transparent)]
    Triton(#[from] triton::Error),
    #[error(transparent)]
    Panic(#[from] Panic),
    #[error(
        "REQUEST_TIMEOUT: the request's 'timeout' was over before its last step; the state of its sequence is as it was before"
    )]
    Overdue,
    #[error("the request was cancelled before it had run; the state of its sequence is as it was before")]
    Cancelled,
}

impl RequestError {
    pub fn reason(&self) -> Reason {
        self.class().0
    }

    /// Whether a batch that failed with this may succeed without one of its rows. An output that has no row for each request
    /// may fit a smaller batch by chance, so the model is at fault; a scalar fits one row only.
    pub const fn may_be_one_rows_fault(&self) -> bool {
        match self {
            Self::Run(RunError::Session(_) | RunError::Memory(_) | RunError::PaddedState { .. }) | Self::Panic(_) => {
                true
            }
            Self::Run(RunError::OutputRows { dims, .. }) => dims.is_empty(),
            _ => false,
        }
    }

    /// The error of a request that failed alone while others of the same moment ran. If the model could not run, or a device
    /// had failed, no other would have run. So the client is at fault, unless memory was short.
    pub fn while_others_ran(self) -> Self {
        match self {
            Self::Run(RunError::Session(error)) if session_code(&error) == Code::Internal => {
                Self::Run(RunError::AtFault(error))
            }
            error => error,
        }
    }

    /// Whether the client may repeat this request on another server, so that its END must not end the sequence.
    pub const fn is_sent_again(&self) -> bool {
        match self {
            Self::Cancelled | Self::Overdue | Self::Admission(AdmissionError::Refused(Refused::Late(_))) => true,
            Self::StateApi(error) => error.is_step_conflict(),
            _ => false,
        }
    }

    /// Whether a START is refused because every place is taken.
    pub const fn is_without_place(&self) -> bool {
        matches!(self, Self::Admission(AdmissionError::Refused(Refused::TooMany { .. } | Refused::QueueFull { .. })))
    }

    /// The answer to a request whose sequence starts with `states`, which have no elements. If a run failed, they may be
    /// the reason.
    pub fn with_empty_start(&self, states: &str) -> triton::Error {
        let mut text = self.to_string();
        if matches!(self, Self::Run(RunError::Session(_) | RunError::AtFault(_) | RunError::OutputRows { .. })) {
            text += &format!(
                "; the sequence starts with states that have no elements: {states}; if such a state always has the same \
                 length, write it in parameter 'state_dims'"
            );
        }
        triton::Error::new(self.class().1, text)
    }

    /// The reason under which the metrics count it, and its code. A client acts on the code, so the code says who has to act:
    /// the client (`INVALID_ARG`, `NOT_FOUND`), the client later (`UNAVAILABLE`), or the operator (`INTERNAL`, `UNSUPPORTED`).
    fn class(&self) -> (Reason, Code) {
        match self {
            Self::Admission(error) => error.class(),
            Self::Input(error) => error.class(),
            Self::StateApi(error) => error.class(),
            Self::Run(error) => error.class(),
            Self::Stored(error) => error.class(),
            Self::Triton(error) => (Reason::Internal, error.code),
            Self::Panic(_) => (Reason::Internal, Code::Internal),
            Self::Overdue => (Reason::QueueTimeout, Code::Unavailable),
            Self::Cancelled => (Reason::Cancelled, Code::Cancelled),
        }
    }
}

/// `?` makes only one conversion, so this adds the conversion through the error of a stage.
macro_rules! from_through {
    ($($error:ty => $stage:ident),*) => {
        $(impl From<$error> for RequestError {
            fn from(error: $error) -> Self {
                Self::$stage(error.into())
            }
        })*
    };
}

from_through!(
    Refused => Admission,
    SnapshotError => StateApi,
    SessionError => Run,
    MemoryError => Run,
    NoMemory => Run
);

impl From<RequestError> for triton::Error {
    fn from(error: RequestError) -> Self {
        Self::new(error.class().1, error.to_string())
    }
}
