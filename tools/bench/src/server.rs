//! tritonserver in this process, through its C API: requests to it, and what it counts of a model's runs.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Instant;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use serde_json::Value;

use crate::model::Spec;

type Object = *mut c_void;
type Release = unsafe extern "C" fn(Object, u32, *mut c_void);
type Complete = unsafe extern "C" fn(Object, u32, *mut c_void);
type Allocate = unsafe extern "C" fn(
    Object,
    *const c_char,
    usize,
    i32,
    i64,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut i32,
    *mut i64,
) -> Object;
type Free = unsafe extern "C" fn(Object, *mut c_void, *mut c_void, usize, i32, i64) -> Object;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case, reason = "the names are Triton's")]
        struct Api { $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Api {
            /// # Safety
            /// The library must be libtritonserver.
            unsafe fn new(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of tritonserver.h.
                unsafe { Ok(Self { $($name: *library.get(concat!("TRITONSERVER_", stringify!($name)))?,)* }) }
            }
        }
    };
}

functions! {
    ErrorMessage: fn(Object) -> *const c_char;
    ServerOptionsNew: fn(*mut Object) -> Object;
    ServerOptionsDelete: fn(Object) -> Object;
    ServerOptionsSetModelRepositoryPath: fn(Object, *const c_char) -> Object;
    ServerOptionsSetBackendDirectory: fn(Object, *const c_char) -> Object;
    ServerOptionsSetModelControlMode: fn(Object, i32) -> Object;
    ServerOptionsSetModelLoadRetryCount: fn(Object, u32) -> Object;
    ServerOptionsSetStrictReadiness: fn(Object, bool) -> Object;
    ServerOptionsSetLogInfo: fn(Object, bool) -> Object;
    ServerOptionsSetLogWarn: fn(Object, bool) -> Object;
    ServerOptionsSetCpuMetrics: fn(Object, bool) -> Object;
    ServerOptionsSetGpuMetrics: fn(Object, bool) -> Object;
    ServerNew: fn(*mut Object, Object) -> Object;
    ServerLoadModel: fn(Object, *const c_char) -> Object;
    ServerModelStatistics: fn(Object, *const c_char, i64, *mut Object) -> Object;
    MessageSerializeToJson: fn(Object, *mut *const c_char, *mut usize) -> Object;
    MessageDelete: fn(Object) -> Object;
    ServerMetrics: fn(Object, *mut Object) -> Object;
    MetricsFormatted: fn(Object, i32, *mut *const c_char, *mut usize) -> Object;
    MetricsDelete: fn(Object) -> Object;
    ResponseAllocatorNew: fn(*mut Object, Allocate, Free, *const c_void) -> Object;
    InferenceRequestNew: fn(*mut Object, Object, *const c_char, i64) -> Object;
    InferenceRequestDelete: fn(Object) -> Object;
    InferenceRequestSetCorrelationId: fn(Object, u64) -> Object;
    InferenceRequestSetFlags: fn(Object, u32) -> Object;
    InferenceRequestAddInput: fn(Object, *const c_char, i32, *const i64, u64) -> Object;
    InferenceRequestAppendInputData: fn(Object, *const c_char, *const c_void, usize, i32, i64) -> Object;
    InferenceRequestSetReleaseCallback: fn(Object, Release, *mut c_void) -> Object;
    InferenceRequestSetResponseCallback: fn(Object, Object, *mut c_void, Complete, *mut c_void) -> Object;
    ServerInferAsync: fn(Object, Object, Object) -> Object;
    InferenceResponseError: fn(Object) -> Object;
    InferenceResponseDelete: fn(Object) -> Object;
}

const EXPLICIT: i32 = 2;
const FP32: i32 = 11;
const CPU: i32 = 0;
pub const START: u32 = 1;
pub const END: u32 = 2;
/// The backend's metric of the bytes that its states were copied.
pub const COPIED: &str = "stateful_state_bytes_copied_total";

pub struct Inbox {
    /// Callbacks to come: an answer and a release for each request.
    expected: AtomicUsize,
    waiting: Thread,
    wants: Wants,
    /// The answers that have come and were not taken yet, if they are wanted.
    answered: std::sync::Mutex<Vec<Answer>>,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Wants {
    /// Only when the last request is released.
    End,
    /// That, and the answers.
    Answers,
    /// Each answer as soon as it has come.
    EachAnswer,
}

pub struct Answer {
    pub sequence: u64,
    /// From the time at which its request was due.
    pub latency_us: f64,
}

struct Ticket {
    server: &'static Server,
    inbox: Arc<Inbox>,
    sequence: u64,
    due: Instant,
}

pub struct Server {
    api: Api,
    raw: Object,
    allocator: Object,
}

// SAFETY: Triton's server takes calls from any thread.
unsafe impl Send for Server {}
// SAFETY: as above.
unsafe impl Sync for Server {}

pub struct Client {
    server: &'static Server,
    model: CString,
    inputs: Vec<Input>,
}

struct Input {
    name: CString,
    dims: Vec<i64>,
    data: Vec<f32>,
}

impl Server {
    /// Starts a server over a model repository; it stays for the life of the process.
    pub fn start(library: &Path, repository: &Path, backends: &Path) -> &'static Self {
        // SAFETY: libtritonserver, with global symbols, as backends look them up there.
        let api = unsafe {
            let library =
                Library::open(Some(library), RTLD_NOW | RTLD_GLOBAL).unwrap_or_else(|error| panic!("{error:?}"));
            let api = Api::new(&library).unwrap_or_else(|error| panic!("{error}"));
            std::mem::forget(library);
            api
        };
        let (mut options, mut raw, mut allocator) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let (repository, backends) = (text(&repository.display().to_string()), text(&backends.display().to_string()));
        // SAFETY: objects made here, in the order that tritonserver.h wants.
        unsafe {
            api.check((api.ServerOptionsNew)(&mut options));
            api.check((api.ServerOptionsSetModelRepositoryPath)(options, repository.as_ptr()));
            api.check((api.ServerOptionsSetBackendDirectory)(options, backends.as_ptr()));
            api.check((api.ServerOptionsSetModelControlMode)(options, EXPLICIT));
            // Core 24.10 leaves this one without a value.
            api.check((api.ServerOptionsSetModelLoadRetryCount)(options, 0));
            api.check((api.ServerOptionsSetStrictReadiness)(options, false));
            api.check((api.ServerOptionsSetLogInfo)(options, false));
            api.check((api.ServerOptionsSetLogWarn)(options, false));
            api.check((api.ServerOptionsSetCpuMetrics)(options, false));
            api.check((api.ServerOptionsSetGpuMetrics)(options, false));
            api.check((api.ServerNew)(&mut raw, options));
            api.check((api.ServerOptionsDelete)(options));
            api.check((api.ResponseAllocatorNew)(&mut allocator, allocate, free, ptr::null()));
        }
        Box::leak(Box::new(Self { api, raw, allocator }))
    }

    /// Loads a model and returns when it is ready.
    ///
    /// Nothing here unloads one. Triton's core 24.10 can crash if a model is unloaded while `Execute` is on its way
    /// back after the last answer, and no call tells when it has returned (docs/sequences.md).
    pub fn load(&self, model: &str) {
        // SAFETY: a live server.
        unsafe { self.api.check((self.api.ServerLoadModel)(self.raw, text(model).as_ptr())) };
    }

    pub fn batches(&self, model: &str) -> Batches {
        let (mut message, mut json, mut bytes) = (ptr::null_mut(), ptr::null(), 0);
        // SAFETY: a live server; the text is read before the message goes.
        let statistics: Value = unsafe {
            self.api.check((self.api.ServerModelStatistics)(self.raw, text(model).as_ptr(), -1, &mut message));
            self.api.check((self.api.MessageSerializeToJson)(message, &mut json, &mut bytes));
            let read = serde_json::from_slice(std::slice::from_raw_parts(json.cast(), bytes)).unwrap_or_default();
            self.api.check((self.api.MessageDelete)(message));
            read
        };
        Batches::new(&statistics)
    }

    /// A metric of a model, as its Prometheus endpoint would show it; `None` if there is none.
    pub fn metric(&self, name: &str, model: &str) -> Option<f64> {
        let (mut metrics, mut base, mut bytes) = (ptr::null_mut(), ptr::null(), 0);
        // SAFETY: a live server; the text is copied before the metrics go.
        let shown = unsafe {
            self.api.check((self.api.ServerMetrics)(self.raw, &mut metrics));
            self.api.check((self.api.MetricsFormatted)(metrics, 0, &mut base, &mut bytes));
            let shown = String::from_utf8_lossy(std::slice::from_raw_parts(base.cast(), bytes)).into_owned();
            self.api.check((self.api.MetricsDelete)(metrics));
            shown
        };
        sample(&shown, name, model)
    }
}

fn sample(shown: &str, name: &str, model: &str) -> Option<f64> {
    let label = format!("model=\"{model}\"");
    let is_of_model = |labels: &str| labels.split(',').any(|given| given.trim() == label);
    let value = |line: &str| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once('}')?;
        is_of_model(labels).then(|| value.trim().parse().ok()).flatten()
    };
    shown.lines().find_map(value)
}

/// What the server counted of a model's runs.
pub struct Batches {
    pub runs: f64,
    pub rows: f64,
    batch_stats: Value,
}

impl Batches {
    fn new(statistics: &Value) -> Self {
        let model = &statistics["model_stats"][0];
        let number = |name: &str| model[name].as_f64().unwrap_or_default();
        let (runs, rows) = (number("execution_count"), number("inference_count"));
        Self { runs, rows, batch_stats: model["batch_stats"].clone() }
    }

    /// Ends the program unless each of `rounds` since then was one batch of `batch` rows: anything else would be timed
    /// as what it is not.
    pub fn must_be_exactly(&self, after: &Self, rounds: f64, batch: usize, model: &str) {
        let (runs, rows) = (after.runs - self.runs, after.rows - self.rows);
        if runs != rounds || rows != rounds * batch as f64 {
            eprintln!("{model}: {rounds} rounds of {batch} rows were {runs} runs of {rows} rows in all");
            std::process::exit(1);
        }
    }

    pub fn stage_ns(&self, stage: &str) -> f64 {
        let sizes = self.batch_stats.as_array().into_iter().flatten();
        sizes.map(|size| size[stage]["ns"].as_f64().unwrap_or_default()).sum()
    }
}

impl Api {
    /// # Safety
    /// `error` must come from the API and be used only here.
    unsafe fn check(&self, error: Object) {
        if !error.is_null() {
            // SAFETY: alive until it is deleted, after which nothing uses it.
            let message = unsafe { CStr::from_ptr((self.ErrorMessage)(error)) };
            // Not a panic: Triton calls the callbacks, and a panic there would bury the reason under a backtrace.
            eprintln!("tritonserver: {}", message.to_string_lossy());
            // SAFETY: ends the process, as it is.
            unsafe { libc::_exit(1) }
        }
    }
}

impl Client {
    pub fn new(server: &'static Server, model: &str, spec: &Spec) -> Self {
        let inputs = spec.inputs.iter().map(|tensor| {
            let dims = [&[1], tensor.dims.as_slice()].concat();
            let count = dims.iter().product::<i64>() as usize;
            Input { name: text(&tensor.name), dims, data: (0..count).map(|i| (i % 7) as f32 / 16.0).collect() }
        });
        Self { server, model: text(model), inputs: inputs.collect() }
    }

    pub fn send(&self, inbox: &Arc<Inbox>, sequence: u64, flags: u32) {
        self.send_due(inbox, sequence, flags, Instant::now());
    }

    /// Sends a request whose latency counts from another time than now.
    pub fn send_due(&self, inbox: &Arc<Inbox>, sequence: u64, flags: u32, due: Instant) {
        let (api, mut request) = (&self.server.api, ptr::null_mut());
        inbox.expected.fetch_add(2, Ordering::Relaxed);
        let ticket = Arc::new(Ticket { server: self.server, inbox: inbox.clone(), sequence, due });
        let [answer, release] =
            [ticket.clone(), ticket].map(|ticket| Arc::into_raw(ticket).cast_mut().cast::<c_void>());
        // SAFETY: a request made here; its data lives as long as the client, which outlives it; each callback gets a
        // reference to the ticket of its own.
        unsafe {
            api.check((api.InferenceRequestNew)(&mut request, self.server.raw, self.model.as_ptr(), -1));
            api.check((api.InferenceRequestSetCorrelationId)(request, sequence));
            api.check((api.InferenceRequestSetFlags)(request, flags));
            for Input { name, dims, data } in &self.inputs {
                let (name, rank, bytes) = (name.as_ptr(), dims.len() as u64, 4 * data.len());
                api.check((api.InferenceRequestAddInput)(request, name, FP32, dims.as_ptr(), rank));
                api.check((api.InferenceRequestAppendInputData)(request, name, data.as_ptr().cast(), bytes, CPU, 0));
            }
            api.check((api.InferenceRequestSetReleaseCallback)(request, released, release));
            let (allocator, none) = (self.server.allocator, ptr::null_mut());
            api.check((api.InferenceRequestSetResponseCallback)(request, allocator, none, answered, answer));
            api.check((api.ServerInferAsync)(self.server.raw, request, ptr::null_mut()));
        }
    }

    /// Sends a request of each sequence and waits until all are answered and released.
    pub fn round(&self, inbox: &Arc<Inbox>, sequences: &[u64], flags: u32) {
        sequences.iter().for_each(|&sequence| self.send(inbox, sequence, flags));
        inbox.wait_for_all();
    }

    /// Sends a request of each sequence and waits for the answers. `inbox` wants each answer. Requests may be released
    /// later: this backend's scheduler keeps the last one until core's thread sleeps.
    pub fn answers(&self, inbox: &Arc<Inbox>, sequences: &[u64], flags: u32) {
        sequences.iter().for_each(|&sequence| self.send(inbox, sequence, flags));
        let (mut came, mut some) = (0, Vec::new());
        while came < sequences.len() {
            inbox.wait_for_some(&mut some);
            came += some.len();
            some.clear();
        }
    }
}

impl Inbox {
    pub fn new(wants: Wants) -> Arc<Self> {
        let (expected, waiting) = (AtomicUsize::new(0), std::thread::current());
        Arc::new(Self { expected, waiting, wants, answered: std::sync::Mutex::default() })
    }

    /// Waits until every request has been answered and released, and discards the answers that were not taken.
    pub fn wait_for_all(&self) -> Vec<Answer> {
        while self.expected.load(Ordering::Acquire) > 0 {
            std::thread::park();
        }
        std::mem::take(&mut *self.take_lock())
    }

    pub fn wait_for_some(&self, into: &mut Vec<Answer>) {
        loop {
            std::mem::swap(into, &mut *self.take_lock());
            if !into.is_empty() {
                return;
            }
            std::thread::park();
        }
    }

    /// Notes a callback, and wakes the thread that waits if there is none to come, or if it is asked to.
    fn came(&self, wake: bool) {
        if self.expected.fetch_sub(1, Ordering::AcqRel) == 1 || wake {
            self.waiting.unpark();
        }
    }

    fn take_lock(&self) -> std::sync::MutexGuard<'_, Vec<Answer>> {
        self.answered.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

unsafe extern "C" fn answered(response: Object, _flags: u32, ticket: *mut c_void) {
    // SAFETY: the reference that this callback owns; the response is ours.
    let of = unsafe {
        let of = Arc::from_raw(ticket.cast::<Ticket>());
        of.server.api.check((of.server.api.InferenceResponseError)(response));
        of.server.api.check((of.server.api.InferenceResponseDelete)(response));
        of
    };
    let mut is_first = false;
    if of.inbox.wants != Wants::End {
        let latency_us = of.due.elapsed().as_secs_f64() * 1e6;
        let mut answered = of.inbox.take_lock();
        answered.push(Answer { sequence: of.sequence, latency_us });
        is_first = answered.len() == 1;
    }
    of.inbox.came(is_first && of.inbox.wants == Wants::EachAnswer);
}

unsafe extern "C" fn released(request: Object, _flags: u32, ticket: *mut c_void) {
    // SAFETY: the reference that this callback owns; the request is ours again.
    let of = unsafe {
        let of = Arc::from_raw(ticket.cast::<Ticket>());
        of.server.api.check((of.server.api.InferenceRequestDelete)(request));
        of
    };
    of.inbox.came(false);
}

unsafe extern "C" fn allocate(
    _allocator: Object,
    _name: *const c_char,
    bytes: usize,
    _memory: i32,
    _device: i64,
    _user: *mut c_void,
    buffer: *mut *mut c_void,
    buffer_user: *mut *mut c_void,
    memory: *mut i32,
    device: *mut i64,
) -> Object {
    // SAFETY: Triton's out parameters.
    unsafe {
        *buffer = if bytes == 0 { ptr::null_mut() } else { libc::malloc(bytes) };
        (*buffer_user, *memory, *device) = (ptr::null_mut(), CPU, 0);
    }
    ptr::null_mut()
}

unsafe extern "C" fn free(
    _allocator: Object,
    buffer: *mut c_void,
    _user: *mut c_void,
    _bytes: usize,
    _memory: i32,
    _device: i64,
) -> Object {
    // SAFETY: from `allocate`.
    unsafe { libc::free(buffer) };
    ptr::null_mut()
}

fn text(text: &str) -> CString {
    CString::new(text).expect("a name or path without NUL")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SHOWN: &str = "# TYPE copied_total counter
copied_total_created{model=\"lstm\",version=\"1\"} 5
copied_total{model=\"lstm_trivial\",version=\"1\"} 7
copied_total{version=\"1\",model=\"lstm\"} 1.5e3
";

    #[test]
    fn a_metric_is_found_by_its_whole_name_and_model() {
        assert_eq!(sample(SHOWN, "copied_total", "lstm"), Some(1500.0));
        assert_eq!(sample(SHOWN, "copied_total", "lstm_trivial"), Some(7.0));
        assert_eq!(sample(SHOWN, "copied_total", "cache"), None);
        assert_eq!(sample(SHOWN, "copied", "lstm"), None);
    }

    #[test]
    fn statistics_are_summed_over_batch_sizes() {
        let size = |rows: u64, ns: u64| json!({ "batch_size": rows, "compute_infer": { "count": 1, "ns": ns } });
        let of_model = json!({ "execution_count": 2, "inference_count": 17, "batch_stats": [size(1, 5), size(16, 7)] });
        let found = Batches::new(&json!({ "model_stats": [of_model] }));
        assert_eq!((found.runs, found.rows), (2.0, 17.0));
        assert_eq!(found.stage_ns("compute_infer"), 12.0);
        assert_eq!(found.stage_ns("compute_output"), 0.0);
    }
}
