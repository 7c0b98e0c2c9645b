//! Triton's errors, in both directions.

use std::ffi::{CStr, CString};

use triton_sys::{MissingSymbol, TRITONSERVER_Error, TRITONSERVER_Error_Code, call};

/// Triton's error codes. What clients see of them: `docs/errors.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    Unknown = triton_sys::TRITONSERVER_ERROR_UNKNOWN.0,
    /// A fault of the server; HTTP 500.
    Internal = triton_sys::TRITONSERVER_ERROR_INTERNAL.0,
    /// What the request names does not exist; HTTP 404.
    NotFound = triton_sys::TRITONSERVER_ERROR_NOT_FOUND.0,
    /// The request is wrong; HTTP 400.
    InvalidArg = triton_sys::TRITONSERVER_ERROR_INVALID_ARG.0,
    /// The server cannot do it now; HTTP 503.
    Unavailable = triton_sys::TRITONSERVER_ERROR_UNAVAILABLE.0,
    /// The server cannot do it at all; HTTP 501.
    Unsupported = triton_sys::TRITONSERVER_ERROR_UNSUPPORTED.0,
    /// What the request would make exists already; HTTP 400.
    AlreadyExists = triton_sys::TRITONSERVER_ERROR_ALREADY_EXISTS.0,
    /// The client no longer wants the answer; HTTP 400.
    Cancelled = triton_sys::TRITONSERVER_ERROR_CANCELLED.0,
}

impl Code {
    fn of(raw: TRITONSERVER_Error_Code) -> Self {
        use Code::{AlreadyExists, Cancelled, Internal, InvalidArg, NotFound, Unavailable, Unknown, Unsupported};
        let known = [Internal, NotFound, InvalidArg, Unavailable, Unsupported, AlreadyExists, Cancelled];
        // A newer server may have other codes.
        known.into_iter().find(|code| *code as u32 == raw.0).unwrap_or(Unknown)
    }
}

/// A code and a text, as a client or an operator sees them. The text says what happened and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub code: Code,
    pub message: String,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The same for an answer, whose text must not be too long.
    pub fn for_answer(self) -> Self {
        Self { code: self.code, message: cut(self.message.as_bytes(), TEXT_BYTES) }
    }

    pub fn into_raw(self) -> *mut TRITONSERVER_Error {
        let text = CString::new(self.message.replace('\0', "?")).unwrap_or_default();
        // Without the functions of the server there is no log either.
        let Some(error_new) = triton_sys::error_new() else {
            eprintln!("stateful backend: {}", self.message);
            return std::ptr::null_mut();
        };
        // SAFETY: the text lives during the call; Triton copies it.
        unsafe { error_new(TRITONSERVER_Error_Code(self.code as u32), text.as_ptr()) }
    }
}

/// The longest text of an answer. Clients lose a text of more than 8 kB on gRPC, where each byte outside of ASCII takes
/// three.
const TEXT_BYTES: usize = 2000;

/// The longest value of a client in a text.
const VALUE_BYTES: usize = 200;

/// A value that a client sent, as an error repeats it: a long one is cut in the middle.
pub fn echo(value: impl AsRef<[u8]>) -> String {
    cut(value.as_ref(), VALUE_BYTES)
}

fn cut(text: &[u8], most: usize) -> String {
    if text.len() <= most {
        return String::from_utf8_lossy(text).into_owned();
    }
    let (head, behind) = text.split_at(most / 2);
    let (middle, tail) = behind.split_at(behind.len() - most / 2);
    let (head, tail) = (String::from_utf8_lossy(head), String::from_utf8_lossy(tail));
    // What is left of a character that was cut through.
    let (head, tail) = (head.trim_end_matches('\u{fffd}'), tail.trim_start_matches('\u{fffd}'));
    format!("{head} [... {} bytes ...] {tail}", middle.len())
}

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
        Err(Error { code: Code::of(code), message })
    }
}

/// Calls a function of Triton whose last argument is a pointer to the result, and returns the result.
macro_rules! get {
    ($function:ident($($argument:expr),*)) => {{
        // Zeros are valid for what Triton writes: numbers, flags and pointers.
        let mut value = ::std::mem::zeroed();
        $crate::triton::error::check(::triton_sys::call!($function($($argument,)* &mut value))).map(|()| value)
    }};
}
pub(super) use get;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_repeated_whole_up_to_a_length_and_else_with_both_its_ends() {
        assert_eq!(echo(""), "");
        assert_eq!(echo("x".repeat(200)), "x".repeat(200));
        let long = format!("begin{}end", "x".repeat(1_000_000));
        let cut = echo(long);
        assert!(
            cut.starts_with("beginx") && cut.ends_with("xend") && cut.contains(" [... 999808 bytes ...] "),
            "{cut}"
        );
        assert!(cut.len() < 240, "{}", cut.len());
    }

    #[test]
    fn no_character_is_cut_through() {
        for character in ["ü", "漢", "🎤"] {
            for from in 0..4 {
                let cut = echo(format!("{}{}", "x".repeat(from), character.repeat(100_000)));
                assert!(!cut.contains('\u{fffd}') && cut.len() < 240, "{cut}");
            }
        }
        assert_eq!(echo(b"a\xffb"), "a\u{fffd}b");
    }

    #[test]
    fn the_text_of_an_answer_fits_grpc() {
        let error = Error::new(Code::InvalidArg, format!("STATE_UNKNOWN: {}", "ü".repeat(50_000))).for_answer();
        assert!(error.message.starts_with("STATE_UNKNOWN: ü") && 3 * error.message.len() < 8000);
    }
}
