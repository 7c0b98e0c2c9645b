//! The server that this library runs in: its errors, in both directions; whether it is new enough, and what an older
//! one cannot do; its log; and its metrics.

use std::ffi::{CStr, CString};
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;
use scopeguard::guard;
use triton_sys::{
    Api, MissingSymbol, TRITONSERVER_Error, TRITONSERVER_Error_Code, TRITONSERVER_LogLevel, TRITONSERVER_Metric,
    TRITONSERVER_MetricArgs, TRITONSERVER_MetricFamily, TRITONSERVER_Parameter, Version, Versions, call,
};

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
            return ptr::null_mut();
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
        $crate::triton::server::check(::triton_sys::call!($function($($argument,)* &mut value))).map(|()| value)
    }};
}
pub(super) use get;

/// A name for Triton. No tensor's name has a NUL; one that had would become empty.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

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

/// The kind of a metric in Triton's Prometheus endpoint. A server that was built or started without metrics answers
/// UNSUPPORTED. Then this backend has no metrics and works as with them.
#[derive(Clone, Copy)]
pub enum Kind {
    Counter,
    /// Gauges with the same labels are one metric of Triton, so each adds its share.
    Gauge,
    /// Has buckets with these upper bounds, ascending. Triton adds one without a bound. Servers that do not know
    /// histograms make no such family.
    Histogram(&'static [f64]),
}

/// A name with a description. Its metrics differ by their labels.
pub struct Family {
    raw: NonNull<TRITONSERVER_MetricFamily>,
    kind: Kind,
}

// SAFETY: Triton guards metrics with locks of its own.
unsafe impl Send for Family {}
// SAFETY: as above.
unsafe impl Sync for Family {}

impl Family {
    pub fn new(kind: Kind, name: &str, description: &str) -> Result<Arc<Self>, Error> {
        let raw_kind = match kind {
            Kind::Counter => triton_sys::TRITONSERVER_METRIC_KIND_COUNTER,
            Kind::Gauge => triton_sys::TRITONSERVER_METRIC_KIND_GAUGE,
            Kind::Histogram(_) => triton_sys::TRITONSERVER_METRIC_KIND_HISTOGRAM,
        };
        let (name, description) = (c_name(name), c_name(description));
        let mut raw = ptr::null_mut();
        // SAFETY: the texts live during the call and are copied.
        unsafe { check(call!(TRITONSERVER_MetricFamilyNew(&mut raw, raw_kind, name.as_ptr(), description.as_ptr())))? };
        let raw = NonNull::new(raw).ok_or_else(|| Error::new(Code::Internal, "Triton made no metric family"))?;
        Ok(Arc::new(Self { raw, kind }))
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        // SAFETY: alive, its metrics hold an Arc to it and are gone.
        let _ = unsafe { check(call!(TRITONSERVER_MetricFamilyDelete(self.raw.as_ptr()))) };
    }
}

pub struct Metric {
    raw: NonNull<TRITONSERVER_Metric>,
    family: Arc<Family>,
}

/// Held while a metric is made or deleted. Metrics with the same labels share one of Prometheus's. If the last of them
/// is deleted while core makes another, core gives that one a pointer to freed memory. A model that is loaded while its
/// previous load is still being unloaded does this.
static MAKING_OR_DELETING: Mutex<()> = Mutex::new(());

// SAFETY: Triton guards metrics with locks of its own.
unsafe impl Send for Metric {}
// SAFETY: as above.
unsafe impl Sync for Metric {}

/// The arguments of a histogram whose buckets have these upper bounds.
fn buckets(bounds: &[f64]) -> Result<impl Deref<Target = *mut TRITONSERVER_MetricArgs>, Error> {
    // SAFETY: the arguments are made here, and deleted once; the bounds live during the call, which copies them.
    unsafe {
        let made = get!(TRITONSERVER_MetricArgsNew())?;
        let args = guard(made, |made| _ = check(call!(TRITONSERVER_MetricArgsDelete(made))));
        check(call!(TRITONSERVER_MetricArgsSetHistogram(*args, bounds.as_ptr(), bounds.len() as u64)))?;
        Ok(args)
    }
}

impl Metric {
    pub fn new(family: &Arc<Family>, labels: &[(&str, &str)]) -> Result<Self, Error> {
        let args = if let Kind::Histogram(bounds) = family.kind { Some(buckets(bounds)?) } else { None };
        let texts: Vec<(CString, CString)> = labels.iter().map(|(name, value)| (c_name(name), c_name(value))).collect();
        let mut parameters: Vec<*const TRITONSERVER_Parameter> = Vec::new();
        let kind = triton_sys::TRITONSERVER_PARAMETER_STRING;
        let mut metric = ptr::null_mut();
        // SAFETY: texts and parameters live during the calls, which copy what they keep; each parameter is deleted
        // once below.
        let made = unsafe {
            for (name, value) in &texts {
                parameters
                    .push(call!(TRITONSERVER_ParameterNew(name.as_ptr(), kind, value.as_ptr().cast()))?.cast_const());
            }
            let (family, labels, count) = (family.raw.as_ptr(), parameters.as_mut_ptr(), parameters.len() as u64);
            let making = MAKING_OR_DELETING.lock();
            let made = check(match args {
                None => call!(TRITONSERVER_MetricNew(&mut metric, family, labels, count)),
                Some(ref args) => call!(TRITONSERVER_MetricNewWithArgs(&mut metric, family, labels, count, **args)),
            });
            drop(making);
            for parameter in parameters {
                call!(TRITONSERVER_ParameterDelete(parameter.cast_mut()))?;
            }
            made
        };
        made?;
        let raw = NonNull::new(metric).ok_or_else(|| Error::new(Code::Internal, "Triton made no metric"))?;
        Ok(Self { raw, family: family.clone() })
    }

    /// Adds a value, which may be negative for a gauge. A histogram counts it in its bucket.
    pub fn add(&self, value: f64) {
        let raw = self.raw.as_ptr();
        // SAFETY: alive until dropped.
        let _ = unsafe {
            check(match self.family.kind {
                Kind::Counter | Kind::Gauge => call!(TRITONSERVER_MetricIncrement(raw, value)),
                Kind::Histogram(_) => call!(TRITONSERVER_MetricObserve(raw, value)),
            })
        };
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        let _deleting = MAKING_OR_DELETING.lock();
        // SAFETY: alive; its family is still held.
        let _ = unsafe { check(call!(TRITONSERVER_MetricDelete(self.raw.as_ptr()))) };
    }
}

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

    #[test]
    fn a_server_that_is_too_old_is_refused_with_both_versions() {
        assert!(check_version(Version { major: 1, minor: 8 }).is_ok());
        assert!(check_version(Version { major: 1, minor: 19 }).is_ok());
        let error = check_version(Version { major: 1, minor: 7 }).unwrap_err().to_string();
        assert!(error.contains("API 1.7") && error.contains("1.8"), "{error}");
    }
}
