//! A stand-in for Triton in the process of a test: the functions that the backend calls, counting and failing on
//! demand, and the calls that Triton makes.
//!
//! Rules: what the backend gets is checked on every use against what lives; nothing here panics while the backend is
//! on the stack, it notes violations for [`Triton::assert_clean`].

pub mod delay;
mod functions;
pub mod ledger;
pub mod objects;
pub mod onnx;
pub mod running_sum;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use triton_stateful::exports;
use triton_sys::{TRITONBACKEND_Model, TRITONBACKEND_ModelInstance, TRITONSERVER_Error, TRITONSERVER_Error_Code};

#[allow(unused_imports, reason = "not every test has a use for all")]
pub use functions::{FALLIBLE, REPORTED, Usage};
use ledger::{Faults, Kind};
#[allow(unused_imports, reason = "not every test has a use for all")]
pub use objects::{Answer, Id, Input, Request, Shared};
use objects::{Backend, Error, Instance, Model, Sent};

pub const START: u32 = triton_sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START;
pub const END: u32 = triton_sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END;

/// How long anything may take that is not waited for by the clock of the backend.
const DEADLINE: Duration = Duration::from_secs(20);

/// The server, for one test at a time: its functions and ONNX Runtime's environment are the process's.
pub struct Triton {
    _alone: MutexGuard<'static, ()>,
    _backend: Box<Backend>,
}

impl Triton {
    /// Starts a server with the backend initialised. `None`, with a line that says why, without ONNX Runtime.
    pub fn start() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        static INSTALL: Once = Once::new();
        let onnxruntime = onnxruntime()?;
        let alone = ALONE.lock();
        // SAFETY: the functions do what their namesakes promise, for the objects of this module.
        INSTALL.call_once(|| assert!(unsafe { triton_sys::install(functions::table()) }));
        ledger::reset();
        functions::SEND_US.store(0, Ordering::Relaxed);
        let backend = Box::new(Backend::new(&onnxruntime));
        objects::BACKEND.store(ptr::from_ref(&*backend).cast_mut(), Ordering::Release);
        // SAFETY: a live backend.
        let done = unsafe { exports::TRITONBACKEND_Initialize(ptr::from_ref(&*backend).cast_mut().cast()) };
        took(done).unwrap();
        Some(Self { _alone: alone, _backend: backend })
    }

    /// Lets sending an answer take so long, as it does over a network.
    pub fn slow_down(&self, send: Duration) {
        functions::SEND_US.store(send.as_micros() as u64, Ordering::Relaxed);
    }

    /// Loads a model with one instance.
    pub fn load(&self, name: &str, config: &serde_json::Value, onnx: &[u8]) -> Result<Loaded, Failure> {
        self.load_on(None, name, config, onnx)
    }

    /// Loads a model with one instance, for a GPU if one is named.
    pub fn load_on(
        &self,
        gpu: Option<i32>,
        name: &str,
        config: &serde_json::Value,
        onnx: &[u8],
    ) -> Result<Loaded, Failure> {
        let model = LoadedModel::new(name, config, onnx);
        model.initialize()?;
        let instance = LoadedInstance::on(&model, gpu);
        instance.initialize().inspect_err(|_| drop(model.finalize()))?;
        Ok(Loaded { model, instance })
    }

    /// Nothing happened that should not, and everything was given back.
    pub fn assert_clean(&self) {
        assert_eq!(ledger::violations(), Vec::<String>::new());
        let kinds = [Kind::Request, Kind::Response, Kind::Factory, Kind::Error];
        assert_eq!(
            kinds.map(|kind| (kind, ledger::live(kind))),
            kinds.map(|kind| (kind, 0)),
            "made and never given back"
        );
        assert_eq!(ledger::live(Kind::Message), 1, "the backend's own configuration is the only message that stays");
    }
}

/// The configuration with these parameters, too.
pub fn with_parameters(mut config: serde_json::Value, parameters: &[(&str, &str)]) -> serde_json::Value {
    for (name, value) in parameters {
        config["parameters"][name] = serde_json::json!({ "string_value": value });
    }
    config
}

/// A code and a text that came back from an entry point.
pub type Failure = (TRITONSERVER_Error_Code, String);

/// Takes over the error that an entry point returned.
fn took(error: *mut TRITONSERVER_Error) -> Result<(), Failure> {
    if error.is_null() {
        return Ok(());
    }
    match objects::take_back::<Error, _>(Kind::Error, error, "an entry point's return") {
        Some(error) => Err((error.code, error.text.to_string_lossy().into_owned())),
        None => panic!("an entry point returned an error that does not live"),
    }
}

/// A model between ModelInitialize and ModelFinalize.
pub struct LoadedModel(Arc<Model>);

impl LoadedModel {
    pub fn new(name: &str, config: &serde_json::Value, onnx: &[u8]) -> Self {
        Self(Arc::new(Model::new(name, config, onnx)))
    }

    fn raw(&self) -> *mut TRITONBACKEND_Model {
        Arc::as_ptr(&self.0).cast_mut().cast()
    }

    pub fn initialize(&self) -> Result<(), Failure> {
        // SAFETY: a live model.
        took(unsafe { exports::TRITONBACKEND_ModelInitialize(self.raw()) })
    }

    pub fn finalize(&self) -> Result<(), Failure> {
        // SAFETY: a live model.
        took(unsafe { exports::TRITONBACKEND_ModelFinalize(self.raw()) })
    }
}

/// An instance between ModelInstanceInitialize and ModelInstanceFinalize.
pub struct LoadedInstance {
    instance: Arc<Instance>,
    /// All requests so far: the backend may hold one for as long as it likes.
    requests: Mutex<Vec<Arc<Request>>>,
    /// How long [`LoadedInstance::run`] waits for the release of a START that has its answer. Then it takes it to be
    /// held.
    pub held_after: Duration,
}

impl LoadedInstance {
    pub fn new(model: &LoadedModel) -> Self {
        Self::on(model, None)
    }

    /// For a GPU, if one is named.
    pub fn on(model: &LoadedModel, gpu: Option<i32>) -> Self {
        let instance = Arc::new(Instance { model: model.0.clone(), gpu, kept: Default::default() });
        Self { instance, requests: Mutex::default(), held_after: Duration::from_millis(50) }
    }

    fn raw(&self) -> *mut TRITONBACKEND_ModelInstance {
        Arc::as_ptr(&self.instance).cast_mut().cast()
    }

    pub fn initialize(&self) -> Result<(), Failure> {
        // SAFETY: a live instance of a live model.
        took(unsafe { exports::TRITONBACKEND_ModelInstanceInitialize(self.raw()) })
    }

    pub fn finalize(&self) -> Result<(), Failure> {
        // SAFETY: a live instance of a live model.
        took(unsafe { exports::TRITONBACKEND_ModelInstanceFinalize(self.raw()) })
    }

    /// Whether it is ready, as a client of Triton 25.12 or newer is told.
    pub fn ready(&self) -> Result<(), Failure> {
        // SAFETY: a live instance of a live model.
        took(unsafe { exports::TRITONBACKEND_ModelInstanceReady(self.raw()) })
    }

    /// Hands a payload over.
    pub fn execute(&self, payload: &[Arc<Request>]) -> Result<(), Failure> {
        self.requests.lock().extend(payload.iter().cloned());
        payload.iter().for_each(|request| ledger::made(Kind::Request, Arc::as_ptr(request).addr()));
        let mut raw: Vec<_> = payload.iter().map(|request| Arc::as_ptr(request).cast_mut().cast()).collect();
        let count = raw.len() as u32;
        // SAFETY: a live instance, and as many requests as said, kept alive with the instance.
        took(unsafe { exports::TRITONBACKEND_ModelInstanceExecute(self.raw(), raw.as_mut_ptr(), count) })
    }

    /// Hands a payload over that need not be answered before the next one.
    pub fn send(&self, payload: &[Arc<Request>]) {
        if self.execute(payload).is_err() {
            payload.iter().for_each(refuse);
        }
    }

    /// Runs a payload and holds the backend to its promise: every request is answered once and, but for those that
    /// may be held, released once.
    pub fn run(&self, payload: Vec<Request>) -> Vec<Arc<Request>> {
        let payload: Vec<_> = payload.into_iter().map(Arc::new).collect();
        match self.execute(&payload) {
            Ok(()) => {
                wait_for_answers(&payload, self.held_after);
                payload.iter().for_each(assert_answered_once);
            }
            Err(_) => payload.iter().for_each(refuse),
        }
        payload
    }
}

/// A model with one instance.
pub struct Loaded {
    pub model: LoadedModel,
    pub instance: LoadedInstance,
}

impl Loaded {
    /// As [`LoadedInstance::run`].
    pub fn run(&self, payload: Vec<Request>) -> Vec<Arc<Request>> {
        self.instance.run(payload)
    }

    /// As [`Loaded::run`], with some calls failing.
    pub fn run_with(&self, faults: Faults, payload: Vec<Request>) -> (Vec<Arc<Request>>, usize) {
        ledger::set_faults(faults);
        let payload = self.run(payload);
        (payload, ledger::set_faults(Faults::None))
    }

    /// Unloads; whatever was held is released.
    pub fn unload(self) {
        self.instance.finalize().unwrap();
        self.model.finalize().unwrap();
    }
}

/// What core does with the requests of an Execute that failed: they are still its own.
fn refuse(request: &Arc<Request>) {
    let mut fate = request.fate.lock();
    assert_eq!((fate.sent.len(), fate.releases), (0, 0), "Execute failed, but has answered or released");
    fate.releases += 1;
    drop(fate);
    ledger::gone(Kind::Request, Arc::as_ptr(request).addr(), "core");
}

/// Answers may leave after Execute. A START whose answer has been attempted and that is not released then is held.
fn wait_for_answers(payload: &[Arc<Request>], held_after: Duration) {
    let (end, held_from) = (Instant::now() + DEADLINE, Instant::now() + held_after);
    let is_attempted = |request: &Arc<Request>| {
        let fate = request.fate.lock();
        request.is_null() || !fate.sent.is_empty() || fate.unmade > 0
    };
    let is_start = |request: &Arc<Request>| request.flags & START != 0;
    while !payload.iter().all(|request| request.is_released()) {
        let may_be_held = |request: &Arc<Request>| is_attempted(request) && is_start(request);
        if Instant::now() > held_from && payload.iter().all(|request| request.is_released() || may_be_held(request)) {
            return;
        }
        assert!(Instant::now() < end, "a request has had no answer or no release for too long");
        // As core's thread does between payloads. A release may wait for that.
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn assert_answered_once(request: &Arc<Request>) {
    let fate = request.fate.lock();
    let attempted = fate.sent.len() == 1 || (fate.sent.is_empty() && fate.unmade > 0);
    let is_error = |sent: &Sent| matches!(sent.answer, Answer::Error(..));
    // A filler wants no answer; one that cannot be read is not known for what it is.
    let unread = fate.sent.iter().all(is_error);
    let answered = if request.is_null() { fate.sent.len() <= 1 && unread } else { attempted };
    assert!(answered, "id {:?} flags {}: sent {:?}, {} not made", request.id, request.flags, fate.sent, fate.unmade);
    let (released, counted) = (fate.releases, fate.statistics.len());
    assert!(released <= 1 && counted <= 1, "released {released} times, counted {counted} times");
    // Only the START of an incarnation that has to wait is held.
    let may_be_held = request.flags & START != 0;
    assert!(fate.releases == 1 || may_be_held, "id {:?} flags {} was not released", request.id, request.flags);
}

/// Waits until the backend's own thread has released all of these.
pub fn wait_for_release(requests: &[Arc<Request>]) {
    let end = Instant::now() + DEADLINE;
    while let Some(held) = requests.iter().find(|request| !request.is_released()) {
        assert!(Instant::now() < end, "the request of {:?} is held for too long", held.id);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether something comes true in time.
pub fn becomes_true(is_true: impl Fn() -> bool) -> bool {
    let end = Instant::now() + DEADLINE;
    while Instant::now() < end {
        if is_true() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    is_true()
}

/// libonnxruntime: `ORT_DYLIB_PATH`, else the one in the virtual environment of scripts/setup.
fn onnxruntime() -> Option<PathBuf> {
    let named = std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from);
    let found = named.or_else(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let pythons = entries(&root.join(".venv/lib"));
        let capi = pythons.map(|python| python.join("site-packages/onnxruntime/capi"));
        let is_runtime = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libonnxruntime.so."))
        };
        capi.flat_map(|folder| entries(&folder)).find(is_runtime)
    });
    if found.is_none() {
        static SAID: Once = Once::new();
        let line = "skipped: ORT_DYLIB_PATH names no ONNX Runtime, and .venv has none (scripts/setup installs it)";
        // Past the harness, which hides what a passing test prints.
        SAID.call_once(|| writeln!(std::io::stderr(), "{line}").expect("stderr is open"));
    }
    found
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}
