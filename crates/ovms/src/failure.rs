//! Why a request failed: a gRPC code and a text, for both protocols.

use std::fmt;

use http::StatusCode;
use tonic::{Code, Status};

/// An error that a client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// gRPC's code; [`Failure::http_status`] has HTTP's.
    pub code: Code,
    pub message: String,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// Refuses a client's load or unload: the configuration decides which models a managed tritonserver has.
    pub fn managed_models() -> Self {
        let text = "the gateway loads and unloads the models itself: change config.json, and POST /v1/config/reload if \
                    you don't want to wait";
        Self::new(Code::PermissionDenied, text)
    }

    /// Refuses an input that the model doesn't have.
    pub fn unexpected_input(name: &str) -> Self {
        Self::invalid(format!("Unexpected input - the model has no input '{name}'"))
    }

    /// HTTP's status for the code, as OVMS answers.
    pub fn http_status(&self) -> StatusCode {
        match self.code {
            Code::Ok => StatusCode::OK,
            Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
            Code::FailedPrecondition => StatusCode::PRECONDITION_FAILED,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::ResourceExhausted => StatusCode::PAYLOAD_TOO_LARGE,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::Cancelled | Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        Status::new(failure.code, failure.message)
    }
}
