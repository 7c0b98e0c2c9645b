//! The error of a request, whichever stage found it.

use rows::NoMemory;
use sequences::scheduler::Refused;

use super::admission::AdmissionError;
use super::codes::session_code;
use super::input::InputError;
use super::reason::Reason;
use super::run::RunError;
use super::state_api::{SnapshotError, StateApiError};
use super::stored::StoredError;
use crate::memory::MemoryError;
use crate::panic::Panic;
use crate::session::SessionError;
use crate::triton::{self, Code};

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
    /// A call to Triton failed.
    #[error(transparent)]
    Triton(#[from] triton::Error),
    /// The code of this library is wrong; the server lives on.
    #[error(transparent)]
    Panic(#[from] Panic),
    /// The time of a request was over between two of its steps.
    #[error(
        "REQUEST_TIMEOUT: the request's 'timeout' was over before its last step; the state of its sequence is as it was before"
    )]
    Overdue,
    /// The client no longer wants the answer.
    #[error("the request was cancelled before it had run; the state of its sequence is as it was before")]
    Cancelled,
}

impl RequestError {
    /// What the metrics count it as.
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

    /// The error of a request that failed alone while others of the same moment ran. Neither a model that cannot run nor
    /// a device that has failed lets others run, so the client is at fault, unless memory was short.
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
            Self::Cancelled | Self::Overdue | Self::Admission(AdmissionError::Late(_)) => true,
            Self::StateApi(error) => error.is_step_conflict(),
            _ => false,
        }
    }

    /// Whether a START is refused because every place is taken.
    pub const fn is_without_place(&self) -> bool {
        matches!(self, Self::Admission(AdmissionError::TooMany { .. } | AdmissionError::QueueFull { .. }))
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

    /// What the metrics count it as, and its code. A client acts on the code, so it says who has to act: the client
    /// (`INVALID_ARG`, `NOT_FOUND`), the client later (`UNAVAILABLE`), or the operator (`INTERNAL`, `UNSUPPORTED`).
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

/// `?` takes one step, so these go through the error of a stage.
macro_rules! from_through {
    ($($error:ty => $stage:ident),*) => {
        $(impl From<$error> for RequestError {
            fn from(error: $error) -> Self {
                Self::$stage(error.into())
            }
        })*
    };
}

from_through!(SnapshotError => StateApi, SessionError => Run, MemoryError => Run, NoMemory => Run);

impl From<Refused> for RequestError {
    fn from(refused: Refused) -> Self {
        let error = match refused {
            Refused::Missing(id) => AdmissionError::Missing(id),
            Refused::Exists { id, idle } => AdmissionError::Exists { id, idle },
            Refused::TooMany { id, max, idle } => AdmissionError::TooMany { id, max, idle },
            Refused::QueueFull { id, max, idle } => AdmissionError::QueueFull { id, max, idle },
            Refused::TooManyQueued { id, max } => AdmissionError::TooManyQueued { id, max },
            Refused::Late(id) => AdmissionError::Late(id),
            Refused::NotParked(id) => AdmissionError::NotParked(id),
            Refused::NotParkedButLive(id) => AdmissionError::Live(id),
            Refused::Parked(id) => AdmissionError::Parked(id),
            Refused::Moved(id) => return StoredError::Moved(id).into(),
            Refused::Drains => return StoredError::Drains.into(),
            Refused::CloneOfItself(id) => {
                let why = format!("'clone_of' names sequence {id}, which the request starts");
                return StateApiError::Conflict(why).into();
            }
        };
        error.into()
    }
}

impl From<RequestError> for triton::Error {
    fn from(error: RequestError) -> Self {
        Self::new(error.class().1, error.to_string())
    }
}
