//! Triton's errors, in both directions.

use std::ffi::{CStr, CString};
use std::fmt;

use triton_sys::{MissingSymbol, TRITONSERVER_Error, TRITONSERVER_Error_Code, call};

/// Triton's error codes. What clients see of them: `docs/errors.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Nobody knows.
    Unknown,
    /// A fault of the server; HTTP 500.
    Internal,
    /// What the request names is not there; HTTP 404.
    NotFound,
    /// The request is wrong; HTTP 400.
    InvalidArg,
    /// The server cannot now; HTTP 503.
    Unavailable,
    /// The server cannot at all; HTTP 501.
    Unsupported,
    /// What the request wants to make is there; HTTP 400.
    AlreadyExists,
    /// The client does not want the answer any more; HTTP 400.
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

/// A code and a text: what a client or an operator gets to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What kind.
    pub code: Code,
    /// What happened, and what to do.
    pub message: String,
}

impl Error {
    /// An error of ours.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// As Triton's object, which Triton then owns.
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
/// `returned` must come from a Triton function that hands the error over, and be used only here.
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
