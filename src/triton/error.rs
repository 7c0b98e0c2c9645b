//! Triton's errors, in both directions.

use std::ffi::{CStr, CString};
use std::fmt;

use triton_sys::{MissingSymbol, TRITONSERVER_Error, TRITONSERVER_Error_Code, call};

/// Triton's error codes. What clients see of them: `docs/errors.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Unknown,
    /// A fault of the server; HTTP 500.
    Internal,
    /// What the request names does not exist; HTTP 404.
    NotFound,
    /// The request is wrong; HTTP 400.
    InvalidArg,
    /// The server cannot do it now; HTTP 503.
    Unavailable,
    /// The server cannot do it at all; HTTP 501.
    Unsupported,
    /// What the request would make exists already; HTTP 400.
    AlreadyExists,
    /// The client no longer wants the answer; HTTP 400.
    Cancelled,
}

const CODES: [(Code, TRITONSERVER_Error_Code); 8] = [
    (Code::Unknown, triton_sys::TRITONSERVER_ERROR_UNKNOWN),
    (Code::Internal, triton_sys::TRITONSERVER_ERROR_INTERNAL),
    (Code::NotFound, triton_sys::TRITONSERVER_ERROR_NOT_FOUND),
    (Code::InvalidArg, triton_sys::TRITONSERVER_ERROR_INVALID_ARG),
    (Code::Unavailable, triton_sys::TRITONSERVER_ERROR_UNAVAILABLE),
    (Code::Unsupported, triton_sys::TRITONSERVER_ERROR_UNSUPPORTED),
    (Code::AlreadyExists, triton_sys::TRITONSERVER_ERROR_ALREADY_EXISTS),
    (Code::Cancelled, triton_sys::TRITONSERVER_ERROR_CANCELLED),
];

/// A code and a text, as a client or an operator sees them. The text says what happened and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    pub message: String,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Makes Triton's object, which Triton then owns.
    pub fn into_raw(self) -> *mut TRITONSERVER_Error {
        let code = CODES
            .iter()
            .find(|(code, _)| *code == self.code)
            .map_or(triton_sys::TRITONSERVER_ERROR_INTERNAL, |(_, raw)| *raw);
        let text = CString::new(self.message.replace('\0', "?")).unwrap_or_default();
        let Some(error_new) = triton_sys::error_new() else {
            eprintln!("stateful backend: {}", self.message);
            return std::ptr::null_mut();
        };
        // SAFETY: the text lives during the call; Triton copies it.
        unsafe { error_new(code, text.as_ptr()) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<MissingSymbol> for Error {
    fn from(missing: MissingSymbol) -> Self {
        Self::new(Code::Unsupported, missing.to_string())
    }
}

/// Turns what a call returned into a result.
///
/// # Safety
/// `returned` must come from a Triton function that hands its error over, and must not be used again.
pub unsafe fn check(returned: Result<*mut TRITONSERVER_Error, MissingSymbol>) -> Result<(), Error> {
    let raw = returned?;
    if raw.is_null() {
        return Ok(());
    }
    // SAFETY: a live error that is ours; its message lives as long as it does.
    unsafe {
        let code = call!(TRITONSERVER_ErrorCode(raw)).unwrap_or(triton_sys::TRITONSERVER_ERROR_UNKNOWN);
        let message = call!(TRITONSERVER_ErrorMessage(raw)).unwrap_or(c"".as_ptr());
        let message = CStr::from_ptr(message).to_string_lossy().into_owned();
        let _ = call!(TRITONSERVER_ErrorDelete(raw));
        let code = CODES.iter().find(|(_, known)| *known == code).map_or(Code::Unknown, |(code, _)| *code);
        Err(Error { code, message })
    }
}
