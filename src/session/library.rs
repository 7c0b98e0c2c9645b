//! Finds and loads libonnxruntime, and makes its environment, with a limit of what it logs. A process can have only
//! one. Also asks the library where the inputs of a session are read, because the `ort` crate doesn't.

use std::collections::HashMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ort::environment::{Environment, GlobalThreadPoolOptions};
pub use ort::logging::LogLevel;
use ort::sys::{OrtApiBase, OrtMemoryInfo, OrtSession, OrtStatusPtr};
use parking_lot::Mutex;

use super::allocator;
use super::value::check;

/// Where libonnxruntime is looked for, in this order.
#[derive(Clone, Debug, Default)]
pub struct SearchPath {
    /// `--backend-config=stateful,ort-library-path=FILE`
    pub configured: Option<PathBuf>,
    /// The folder that this backend was loaded from.
    pub backend_dir: Option<PathBuf>,
    /// The environment variable `ORT_DYLIB_PATH`.
    pub environment: Option<PathBuf>,
    /// The folder of the server's other backends.
    pub backends_dir: Option<PathBuf>,
}

/// How the environment is made. The first server in a process decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvironmentOptions {
    /// `ort-logging-level`: what ONNX Runtime logs.
    pub log_level: LogLevel,
    /// `enable-global-threadpool`: the numbers of intra-op and inter-op threads (0 for one per core) of a pool that all
    /// models share; `None` for a pool for each model.
    pub global_threads: Option<(usize, usize)>,
}

#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error(
        "no ONNX Runtime library found; looked for {}. Put libonnxruntime.so beside this backend, or name one with \
         --backend-config=stateful,ort-library-path=FILE",
        tried.join(", ")
    )]
    NotFound { tried: Vec<String> },
    #[error("the ONNX Runtime library {} cannot be used: {why}", path.display())]
    Unusable { path: PathBuf, why: String },
    #[error("ONNX Runtime's environment cannot be made: {0}")]
    Environment(String),
}

/// The loaded library with its environment, shared by all models of the process.
pub struct Library {
    environment: Environment,
    /// The file that was loaded.
    pub path: PathBuf,
    /// Such as `1.31.1`.
    pub version: String,
    pub(super) input_places: Option<InputPlaces>,
}

/// Never dropped, because a second server in the same process cannot make another environment.
static LIBRARY: Mutex<Option<Arc<Library>>> = Mutex::new(None);

impl Library {
    /// Loads the library on the first call. Later calls return the same one, whatever their search path says.
    pub fn load(search: &SearchPath, options: EnvironmentOptions) -> Result<Arc<Self>, LibraryError> {
        let mut loaded = LIBRARY.lock();
        if let Some(library) = &*loaded {
            return Ok(library.clone());
        }
        let library = Arc::new(Self::open(search.find()?, options)?);
        *loaded = Some(library.clone());
        Ok(library)
    }

    /// The library that has been loaded, if any.
    pub fn loaded() -> Option<Arc<Self>> {
        LIBRARY.lock().clone()
    }

    /// What the library says about its own build.
    pub fn build_info(&self) -> &'static str {
        ort::info()
    }

    /// Whether it tells which inputs of a session it reads on the host; ONNX Runtime 1.23 brought that.
    pub const fn tells_read_on_host(&self) -> bool {
        self.input_places.is_some()
    }

    pub(crate) fn environment(&self) -> &Environment {
        &self.environment
    }

    fn open(path: PathBuf, options: EnvironmentOptions) -> Result<Self, LibraryError> {
        let builder = ort::init_from(&path)
            .map_err(|error| LibraryError::Unusable { path: path.clone(), why: error.to_string() })?;
        let failed = |error: ort::Error| LibraryError::Environment(error.message().to_owned());
        let builder = match options.global_threads {
            None => builder,
            Some((intra, inter)) => {
                let pool = GlobalThreadPoolOptions::default().with_intra_threads(intra).map_err(failed)?;
                builder.with_global_thread_pool(pool.with_inter_threads(inter).map_err(failed)?)
            }
        };
        let limit = LogLimit::default();
        let environment = builder
            .with_name("triton_stateful")
            // It is on by default.
            .with_telemetry(false)
            .with_logger(Arc::new(move |level, category, _id, location, message| {
                let is_limited = matches!(level, LogLevel::Warning | LogLevel::Error);
                let admitted = if is_limited { limit.admit(location, message, Instant::now()) } else { Some(0) };
                let level = log_level(level);
                match admitted {
                    None => {}
                    Some(0) => log::log!(level, "{category} {location}: {message}"),
                    Some(more) => log::log!(level, "{category} {location}: {message} ({more} like it were not logged)"),
                }
            }))
            .build()
            .map_err(failed)?;
        // With our own logger, ONNX Runtime starts at its most verbose level.
        environment.set_log_level(options.log_level);
        if let Err(why) = allocator::register(&environment) {
            log::warn!("memory of large growing states may stay with the process when they are freed: {why}");
        }
        let (version, input_places) = described(&path).unwrap_or_else(|| ("unknown".to_owned(), None));
        Ok(Self { environment, path, version, input_places })
    }
}

/// Whether a version, such as `1.31.1`, is this one or newer. One that can't be read is older.
fn is_at_least(version: &str, wanted: [u32; 2]) -> bool {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    [parts.next().unwrap_or(0), parts.next().unwrap_or(0)] >= wanted
}

/// The version of the library at `path`, which is loaded, and what it has that the `ort` crate doesn't know.
fn described(path: &Path) -> Option<(String, Option<InputPlaces>)> {
    // SAFETY: OrtGetApiBase and GetVersionString take no arguments; the string is static in the library, which stays
    // loaded for the life of the process.
    unsafe {
        let handle = libloading::Library::new(path).ok()?;
        let base = handle.get::<unsafe extern "C" fn() -> *const OrtApiBase>(b"OrtGetApiBase").ok()?();
        let base = base.as_ref()?;
        let version = CStr::from_ptr((base.GetVersionString)()).to_string_lossy().into_owned();
        // An older one would write to standard error that it has no such API.
        let places = is_at_least(&version, [1, 23]).then(|| InputPlaces::of(base)).flatten();
        Some((version, places))
    }
}

fn log_level(level: LogLevel) -> log::Level {
    match level {
        LogLevel::Verbose => log::Level::Debug,
        LogLevel::Info => log::Level::Info,
        LogLevel::Warning => log::Level::Warn,
        LogLevel::Error | LogLevel::Fatal => log::Level::Error,
    }
}

impl SearchPath {
    /// The first file that exists. A path that the operator named must exist, because another library may be of another
    /// version.
    fn find(&self) -> Result<PathBuf, LibraryError> {
        let mut tried = Vec::new();
        if let Some(path) = &self.configured {
            return named(path, "ort-library-path");
        }
        if let Some(path) = self.backend_dir.as_ref().and_then(|dir| library_in(dir, &mut tried)) {
            return Ok(path);
        }
        if let Some(path) = &self.environment {
            return named(path, "ORT_DYLIB_PATH");
        }
        tried.push("ORT_DYLIB_PATH (not set)".to_owned());
        let onnxruntime = self.backends_dir.as_ref().map(|dir| dir.join("onnxruntime"));
        onnxruntime.and_then(|dir| library_in(&dir, &mut tried)).ok_or(LibraryError::NotFound { tried })
    }
}

fn named(path: &Path, by: &str) -> Result<PathBuf, LibraryError> {
    let unusable = |why| LibraryError::Unusable { path: path.to_owned(), why };
    if !path.is_file() {
        return Err(unusable(format!("{by} names it, but it is no file")));
    }
    std::path::absolute(path).map_err(|error| unusable(error.to_string()))
}

/// `libonnxruntime.so`, or the newest `libonnxruntime.so.<version>`, in `dir`.
fn library_in(dir: &Path, tried: &mut Vec<String>) -> Option<PathBuf> {
    let plain = dir.join("libonnxruntime.so");
    if plain.is_file() {
        return Some(plain);
    }
    let versioned = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let version = |path: &PathBuf| -> Option<Vec<u32>> {
        let version = path.file_name()?.to_str()?.strip_prefix("libonnxruntime.so.")?;
        version.split('.').map(|part| part.parse().ok()).collect()
    };
    let newest = versioned.filter_map(|path| Some((version(&path)?, path))).max();
    if newest.is_none() {
        tried.push(plain.display().to_string());
    }
    newest.map(|(_, path)| path)
}

type MemoryInfoForInputs =
    unsafe extern "system" fn(*const OrtSession, *mut *const OrtMemoryInfo, usize) -> OrtStatusPtr;

/// A function of the loaded library that tells where ONNX Runtime reads the inputs of a session. With a GPU, it still
/// reads some inputs on the host: inputs of nodes that only the CPU can run, and inputs that a kernel reads there, such
/// as the bounds of a Slice.
#[derive(Clone, Copy)]
pub(super) struct InputPlaces(MemoryInfoForInputs);

impl InputPlaces {
    /// `None` if the library is older.
    ///
    /// # Safety
    /// `base` belongs to a library that stays loaded.
    unsafe fn of(base: &OrtApiBase) -> Option<Self> {
        // `SessionGetMemoryInfoForInputs` came with this version of the API (ONNX Runtime 1.23). The `ort` crate asks
        // for version 17, so that older libraries can also be used.
        const API: u32 = 23;
        // Its index among the functions of `OrtApi`. New versions only add functions at the end.
        const INDEX: usize = 380;
        // SAFETY: any number may be asked for.
        let api = unsafe { (base.GetApi)(API) };
        // SAFETY: an OrtApi of that version is a table of functions, and the function at INDEX has that type.
        (!api.is_null()).then(|| Self(unsafe { *api.cast::<MemoryInfoForInputs>().add(INDEX) }))
    }

    /// Returns for each input of a session, in order, whether it is read on the host.
    ///
    /// # Safety
    /// The session is alive, and has that many inputs.
    pub(super) unsafe fn read_on_host(self, session: *const OrtSession, inputs: usize) -> Result<Vec<bool>, String> {
        let mut infos = vec![ptr::null(); inputs];
        // SAFETY: a live session, and room for each input.
        unsafe { check(self.0(session, infos.as_mut_ptr(), inputs))? };
        infos.into_iter().map(is_host).collect()
    }
}

/// An input that no node reads has no place.
fn is_host(info: *const OrtMemoryInfo) -> Result<bool, String> {
    if info.is_null() {
        return Ok(false);
    }
    // OrtMemoryInfoDeviceType_CPU and OrtMemTypeDefault. As numbers, since a new version may have more than the enums.
    const CPU: i32 = 0;
    const DEFAULT: i32 = 0;
    let (mut device, mut kind) = (CPU, DEFAULT);
    // SAFETY: the session's, which is alive; a C enum has the size of an i32.
    unsafe {
        (ort::api().MemoryInfoGetDeviceType)(info, (&raw mut device).cast());
        check((ort::api().MemoryInfoGetMemType)(info, (&raw mut kind).cast()))?;
    }
    // Pinned memory has another type.
    Ok(device == CPU || kind != DEFAULT)
}

/// Lines of one kind that are logged in each period.
const LINES: u64 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// The most kinds that are counted at one time. A client could bring new kinds with each request, if an error quotes a
/// string. Above this number, the lines of a location count as one kind; the number of locations is fixed.
const KINDS: usize = 100;

/// Limits how much ONNX Runtime logs. It logs an error for each run that fails, and a client can make runs fail as
/// often as it likes.
///
/// Lines are of one kind if they come from the same line of ONNX Runtime's source and differ only in numbers. One line
/// of that source reports all nodes that fail, so kinds of the source line alone would let the errors of one model hide
/// the first error of another.
#[derive(Default)]
struct LogLimit {
    counts: Mutex<HashMap<String, Count>>,
}

struct Count {
    since: Instant,
    lines: u64,
}

impl LogLimit {
    /// Whether a line from `location` is logged, and how many of its kind were left out before it; `None` to leave it
    /// out.
    fn admit(&self, location: &str, text: &str, now: Instant) -> Option<u64> {
        let mut kind = location.to_owned();
        kind.extend(text.chars().filter(|letter| !letter.is_ascii_digit()));
        let mut counts = self.counts.lock();
        if counts.len() >= KINDS && !counts.contains_key(&kind) {
            counts.retain(|_, count| now.duration_since(count.since) < PERIOD);
            if counts.len() >= KINDS {
                kind.truncate(location.len());
            }
        }
        let Some(count) = counts.get_mut(&kind) else {
            counts.insert(kind, Count { since: now, lines: 1 });
            return Some(0);
        };
        if now.duration_since(count.since) < PERIOD {
            count.lines += 1;
            return (count.lines <= LINES).then_some(0);
        }
        let left_out = count.lines.saturating_sub(LINES);
        *count = Count { since: now, lines: 1 };
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for (version, is_new) in
            [("1.22.1", false), ("1.23.0", true), ("1.9", false), ("2.0.0", true), ("unknown", false)]
        {
            assert_eq!(is_at_least(version, [1, 23]), is_new, "{version}");
        }
    }

    fn dir(name: &str, files: &[&str]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("triton-stateful-library-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for file in files {
            std::fs::write(dir.join(file), "").unwrap();
        }
        dir
    }

    #[test]
    fn the_places_are_tried_in_their_order() {
        let beside = dir("beside", &["libonnxruntime.so.1.9.0", "libonnxruntime.so.1.20.1"]);
        let backends = dir("backends", &[]);
        let onnxruntime = dir("backends/onnxruntime", &["libonnxruntime.so"]);
        let named = onnxruntime.join("libonnxruntime.so");
        let full = SearchPath {
            configured: Some(named.clone()),
            backend_dir: Some(beside.clone()),
            environment: Some(named.clone()),
            backends_dir: Some(backends.clone()),
        };
        assert_eq!(full.find().unwrap(), named);
        let full = SearchPath { configured: None, ..full };
        assert_eq!(full.find().unwrap(), beside.join("libonnxruntime.so.1.20.1"), "the newest version beside us");
        let full = SearchPath { backend_dir: Some(backends.clone()), ..full };
        assert_eq!(full.find().unwrap(), named, "ORT_DYLIB_PATH");
        let full = SearchPath { environment: None, ..full };
        assert_eq!(full.find().unwrap(), named, "the onnxruntime backend's folder");
        let error = SearchPath { backends_dir: None, ..full }.find().unwrap_err().to_string();
        assert!(error.contains(backends.to_str().unwrap()) && error.contains("ort-library-path"), "{error}");
    }

    #[test]
    fn a_named_file_that_is_not_there_is_an_error_not_a_reason_to_look_on() {
        let beside = dir("named", &["libonnxruntime.so"]);
        let search = SearchPath {
            configured: Some("/nowhere/libonnxruntime.so".into()),
            backend_dir: Some(beside),
            ..SearchPath::default()
        };
        let error = search.find().unwrap_err().to_string();
        assert!(error.contains("/nowhere/libonnxruntime.so") && error.contains("ort-library-path"), "{error}");
    }

    const AT: &str = "executor.cc:1";

    #[test]
    fn each_kind_logs_some_lines_in_a_period_and_says_how_many_were_left_out() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        for index in 0..LINES {
            assert_eq!(limit.admit(AT, &format!("no row {index}"), start), Some(0));
        }
        for index in 0..7 {
            assert_eq!(limit.admit(AT, &format!("no row {index}"), start + PERIOD / 2), None);
        }
        assert_eq!(limit.admit("graph.cc:1", "no row 1", start + PERIOD / 2), Some(0));
        assert_eq!(limit.admit(AT, "no row 1", start + PERIOD), Some(7));
        assert_eq!(limit.admit(AT, "no row 1", start + PERIOD * 2), Some(0));
    }

    #[test]
    fn another_text_from_the_same_line_is_logged() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        while limit.admit(AT, "no row 1", start).is_some() {}
        assert_eq!(limit.admit(AT, "no column 1", start), Some(0));
    }

    #[test]
    fn texts_without_end_take_bounded_memory_and_log_a_bounded_number_of_lines() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let logged = (1..=10 * KINDS).filter(|&index| limit.admit(AT, &"x".repeat(index), start).is_some());
        assert_eq!(logged.count(), KINDS + LINES as usize);
        assert_eq!(limit.counts.lock().len(), KINDS + 1);
        assert_eq!(limit.admit(AT, "a new one, a period later", start + PERIOD), Some(0));
        assert_eq!(limit.counts.lock().len(), 1);
    }
}
