//! The server that this library runs in: whether it is new enough, what an older one cannot do, and its log.

use std::ffi::CString;

use log::{Level, LevelFilter, Log, Metadata, Record};
use triton_sys::{Api, TRITONSERVER_LogLevel, Version, Versions, call};

use super::error::check;

/// The oldest backend API with all that a request needs. 1.8 added the flags START and END (Triton 22.02).
const OLDEST_BACKEND_API: u32 = 8;

/// What older servers cannot do, and what this backend then does. Metrics have log lines of their own.
const LIMITS: [(IsAbsent, &str); 4] = [
    (|api| !has_request_parameters(api), "models with parameter 'state_api' are refused"),
    (|api| api.TRITONBACKEND_RequestIsCancelled.is_none(), "cancelled requests are run"),
    (
        |api| api.TRITONBACKEND_InferenceRequestTimeoutMicroseconds.is_none(),
        "without 'sequence_batching', the timeouts of requests are ignored",
    ),
    (|api| api.TRITONBACKEND_ModelInstanceReportMemoryUsage.is_none(), "memory on GPUs is not reported to the server"),
];

type IsAbsent = fn(&Api) -> bool;

const fn has_request_parameters(api: &Api) -> bool {
    api.TRITONBACKEND_RequestParameterCount.is_some() && api.TRITONBACKEND_RequestParameter.is_some()
}

/// Ends the server's process with exit code 1. It does so at once: no exit handler runs, because those of CUDA's
/// libraries may wait for a GPU that does not answer.
pub fn exit_process() -> ! {
    // SAFETY: it takes a number and does not return.
    unsafe { libc::_exit(1) }
}

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Load(#[from] triton_sys::LoadError),
    #[error(
        "this Triton server has backend API {0}, but 1.{OLDEST_BACKEND_API} or newer is needed (Triton 22.02): use a \
         newer server"
    )]
    TooOld(Version),
}

/// Finds the running server. For `TRITONBACKEND_Initialize`.
pub fn load() -> Result<(), ServerError> {
    triton_sys::load()?;
    triton_sys::versions().map_or(Ok(()), |offered| check_version(offered.backend))
}

/// Whether requests have custom parameters that a backend can read.
pub fn gives_request_parameters() -> bool {
    has_request_parameters(triton_sys::api())
}

/// Whether core has a default for `max_candidate_sequences`. Without it (before Triton 23.09), core takes 0 as no place
/// for any sequence, and its requests wait for ever.
pub fn fills_in_candidates() -> bool {
    const SINCE: Version = Version { major: 1, minor: 16 };
    triton_sys::versions().is_none_or(|offered| offered.backend >= SINCE)
}

/// Logs what this backend does differently because the server is old.
pub fn log_limits() {
    let api = triton_sys::api();
    let without: Vec<_> = LIMITS.iter().filter(|(is_absent, _)| is_absent(api)).map(|(_, effect)| *effect).collect();
    if without.is_empty() {
        return;
    }
    if let Some(Versions { backend, .. }) = triton_sys::versions() {
        log::warn!("this Triton server has backend API {backend}, which is old: {}", without.join("; "));
    }
}

const fn check_version(offered: Version) -> Result<(), ServerError> {
    if offered.major == 1 && offered.minor < OLDEST_BACKEND_API {
        return Err(ServerError::TooOld(offered));
    }
    Ok(())
}

struct TritonLog;

/// Sends all log records of this library to Triton's log, whose own switches decide which levels are logged. Later
/// calls do nothing.
pub fn install_log() {
    if log::set_logger(&TritonLog).is_ok() {
        log::set_max_level(LevelFilter::Debug);
    }
}

impl Log for TritonLog {
    fn enabled(&self, metadata: &Metadata) -> bool {
        // SAFETY: takes a plain number.
        unsafe { call!(TRITONSERVER_LogIsEnabled(level(metadata.level()))) }.unwrap_or(true)
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let file = CString::new(record.file().unwrap_or("stateful")).unwrap_or_default();
        let text = CString::new(record.args().to_string().replace('\0', "?")).unwrap_or_default();
        let line = record.line().unwrap_or(0).cast_signed();
        // SAFETY: both texts live during the call; Triton copies what it keeps.
        let logged =
            unsafe { call!(TRITONSERVER_LogMessage(level(record.level()), file.as_ptr(), line, text.as_ptr())) };
        if let Ok(error) = logged {
            // SAFETY: comes from the call above and is used once. An error of the log cannot be logged.
            let _ = unsafe { check(Ok(error)) };
        }
    }

    fn flush(&self) {}
}

const fn level(level: Level) -> TRITONSERVER_LogLevel {
    match level {
        Level::Error => triton_sys::TRITONSERVER_LOG_ERROR,
        Level::Warn => triton_sys::TRITONSERVER_LOG_WARN,
        Level::Info => triton_sys::TRITONSERVER_LOG_INFO,
        Level::Debug | Level::Trace => triton_sys::TRITONSERVER_LOG_VERBOSE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_is_refused_with_both_versions() {
        assert!(check_version(Version { major: 1, minor: 8 }).is_ok());
        assert!(check_version(Version { major: 1, minor: 19 }).is_ok());
        let error = check_version(Version { major: 1, minor: 7 }).unwrap_err().to_string();
        assert!(error.contains("API 1.7") && error.contains("1.8"), "{error}");
    }
}
