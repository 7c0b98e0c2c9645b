//! The `log` crate's records go to Triton's log.

use std::ffi::CString;

use log::{Level, LevelFilter, Log, Metadata, Record};
use triton_sys::{TRITONSERVER_LogLevel, call};

struct TritonLog;

/// Sends all log records of this library to Triton's log, whose own switches decide which levels are logged. Later
/// calls do nothing.
pub fn install() {
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
            let _ = unsafe { super::error::check(Ok(error)) };
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
