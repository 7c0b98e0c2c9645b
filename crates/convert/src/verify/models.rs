//! Models that run in ONNX Runtime, and what can go wrong with them.

use std::borrow::Cow;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ort::environment::Environment;
use ort::session::{RunOptions, Session, SessionInputValue};
use ort::value::{DynValue, Tensor};

use super::host::{Element, Feed, Host, of_runtime, with_type};
use crate::onnx::type_name;

// No input or state may have more elements, because running out of memory would end the process.
pub const MOST_ELEMENTS: i64 = 1 << 26;

#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("the ONNX Runtime library {library} cannot be used: {why}")]
    Library { library: String, why: String },
    #[error("ONNX Runtime refuses {model}: {why}")]
    Load { model: String, why: String },
    #[error("{model} fails: {why}")]
    Run { model: String, why: String },
    #[error(
        "{model} takes longer than {limit_s} s for a run on random data: if a loop in it ends on other data only, compare on a \
         recording (--compare-with FILE.npz), which has no limit"
    )]
    TooLong { model: String, limit_s: u64 },
    #[error("the converted model differs from the original: {0}")]
    Differs(String),
    #[error("'{name}' is {elem}, and such tensors can't be compared")]
    Type { name: String, elem: &'static str },
    #[error(
        "'{name}' would have {elements} elements, and a comparison can hold {MOST_ELEMENTS}: give its open or too long \
         dimensions their real length in the model"
    )]
    TooLarge { name: String, elements: i64 },
    #[error("blank is {blank}, but the logits have {tokens} tokens, from 0 to {}", .tokens - 1)]
    Blank { blank: i64, tokens: usize },
    /// A value or a length is given for what isn't there.
    #[error("the comparison can't be made with these values: {0}")]
    Given(String),
    #[error("the recording can't be used for the comparison: {0}")]
    Recording(String),
    /// An output that differs from row to row, but hasn't one element for each row along an axis.
    #[error("{0}")]
    NoRows(String),
    #[error("the comparison says nothing: on random data, the original's output '{0}' has no finite number")]
    Nothing(String),
    #[error(
        "the comparison says nothing: output '{0}' had no element in any chunk; give inputs longer axes, as in \
         --compare-with stft.audio@1=512"
    )]
    Empty(String),
}

pub type Result<T, E = VerifyError> = std::result::Result<T, E>;

/// A model to run. One in memory has no weights in files of their own.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    File(&'a Path),
    Bytes(&'a [u8]),
}

pub struct Models<'a> {
    pub original: Source<'a>,
    pub converted: Source<'a>,
    /// The one that computes where states start.
    pub initial_states: Option<Source<'a>>,
}

pub fn environment(library: &Path) -> Result<Environment> {
    let failed = |why: String| VerifyError::Library { library: library.display().to_string(), why };
    let builder = ort::init_from(library).map_err(|error| failed(error.to_string()))?;
    let quiet = builder.with_name("stateful-convert").with_telemetry(false);
    let environment = quiet.build().map_err(|error| failed(error.to_string()))?;
    // Errors come back as values, and warnings about an original are not of interest here.
    environment.set_log_level(ort::logging::LogLevel::Fatal);
    Ok(environment)
}

/// Anything that takes the inputs of a model, and gives its outputs.
pub trait Runs {
    /// The outputs of these names. Inputs that the model doesn't have are left out.
    fn run(&mut self, inputs: &[Feed], outputs: &[String]) -> Result<Vec<Host>>;
}

pub struct Opener<'a> {
    environment: &'a Environment,
    limit: Option<Arc<RunLimit>>,
}

impl<'a> Opener<'a> {
    pub fn new(environment: &'a Environment, limit: Option<Duration>) -> Result<Self> {
        let failed = |why| VerifyError::Run { model: "the comparison".to_owned(), why };
        let limit = limit.map(RunLimit::new).transpose().map_err(failed)?;
        Ok(Self { environment, limit: limit.map(Arc::new) })
    }

    /// One of the graphs that are joined. Errors have its name.
    pub fn part(&self, source: Source, name: &str) -> Result<Graph> {
        Graph::open(self, source, &format!("graph '{name}'"))
    }
}

pub struct Graph {
    session: Session,
    /// What errors call it, as in `the original model`.
    model: String,
    pub inputs: Vec<String>,
    limit: Option<Arc<RunLimit>>,
}

impl Graph {
    pub fn open(opener: &Opener, source: Source, model: &str) -> Result<Self> {
        let failed = |why: String| VerifyError::Load { model: model.to_owned(), why: why.trim_end().to_owned() };
        let builder = Session::builder(opener.environment).map_err(|error| failed(error.to_string()))?;
        // One thread sums in one order, so equal models give equal bits.
        let mut builder = builder.with_intra_threads(1).map_err(|error| failed(error.to_string()))?;
        let session = match source {
            Source::File(path) => builder.commit_from_file(path),
            Source::Bytes(bytes) => builder.commit_from_memory(bytes),
        };
        let session = session.map_err(|error| failed(error.to_string()))?;
        let mut inputs: Vec<String> = session.inputs().iter().map(|input| input.name().to_owned()).collect();
        // Inputs with a default value, which a wire replaces.
        inputs.extend(session.overridable_initializers().iter().map(|input| input.name().to_owned()));
        Ok(Self { session, model: model.to_owned(), inputs, limit: opener.limit.clone() })
    }

    pub fn outputs(&self) -> Vec<String> {
        self.session.outputs().iter().map(|output| output.name().to_owned()).collect()
    }
}

impl Runs for Graph {
    fn run(&mut self, inputs: &[Feed], outputs: &[String]) -> Result<Vec<Host>> {
        let model = &self.model;
        let failed = |why: String| VerifyError::Run { model: model.clone(), why: why.trim_end().to_owned() };
        let wanted = inputs.iter().filter(|(name, _)| self.inputs.contains(name));
        let values = wanted.map(|(name, host)| Ok((name, value(host).map_err(failed)?)));
        // Kept until the outputs are read: an input may be an output as well.
        let values = values.collect::<Result<Vec<_>>>()?;
        let feeds: Vec<(Cow<str>, SessionInputValue)> =
            values.iter().map(|(name, value)| (name.as_str().into(), value.into())).collect();
        let made = match &self.limit {
            None => self.session.run(feeds),
            Some(limit) => {
                let made = self.session.run_with_options(feeds, limit.begin());
                // Also if it succeeded, because the later runs may now fail.
                if limit.end() {
                    return Err(VerifyError::TooLong { model: model.clone(), limit_s: limit.limit.as_secs() });
                }
                made
            }
        };
        let made = made.map_err(|error| failed(error.to_string()))?;
        let read = |name: &String| match made.get(name) {
            Some(value) => host(value).map_err(failed),
            None => Err(failed(format!("it has no output '{name}'"))),
        };
        outputs.iter().map(read).collect()
    }
}

fn value(host: &Host) -> Result<DynValue, String> {
    fn of<T: Element>(host: &Host) -> Result<DynValue, String> {
        let elements: Vec<T> = host.bytes.chunks_exact(size_of::<T>()).map(T::of_bytes).collect();
        let tensor = Tensor::from_array((host.dims.clone(), elements)).map_err(|error| error.to_string())?;
        Ok(tensor.into_dyn())
    }
    with_type!(host.elem, T => of::<T>(host))
        .unwrap_or_else(|| Err(format!("{} can't be compared", type_name(host.elem))))
}

fn host(value: &DynValue) -> Result<Host, String> {
    fn of<T: Element>(value: &DynValue, elem: i32) -> Result<Host, String> {
        let (shape, elements) = value.try_extract_tensor::<T>().map_err(|error| error.to_string())?;
        Ok(Host { elem, dims: shape.to_vec(), bytes: elements.iter().flat_map(T::bytes).collect() })
    }
    let elem = value.dtype().tensor_type().and_then(of_runtime);
    let read = elem.and_then(|elem| with_type!(elem, T => of::<T>(value, elem)));
    read.unwrap_or_else(|| Err(format!("{} can't be compared", value.dtype())))
}

// How often the time of a run is checked. One thread watches all runs of a comparison, because there may be thousands of short
// ones.
const PERIOD: Duration = Duration::from_millis(50);

/// The options of runs, and how long each run may take. A run that takes longer is ended with an error, and so is every later
/// run with these options.
pub struct RunLimit {
    limit: Duration,
    options: Arc<RunOptions>,
    began: Arc<Mutex<Option<Instant>>>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl RunLimit {
    pub fn new(limit: Duration) -> Result<Self, String> {
        let options = Arc::new(RunOptions::new().map_err(|error| error.to_string())?);
        let began = Arc::new(Mutex::new(None));
        let (stop, stopped) = mpsc::channel();
        let (of_thread, seen) = (options.clone(), began.clone());
        let look = move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                if is_over(&seen, limit) {
                    // It only sets a flag.
                    let _ = of_thread.terminate();
                }
            }
        };
        let thread =
            thread::Builder::new().name("run limit".to_owned()).spawn(look).map_err(|error| error.to_string())?;
        Ok(Self { limit, options, began, stop, thread: Some(thread) })
    }

    pub fn begin(&self) -> &RunOptions {
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        &self.options
    }

    pub fn end(&self) -> bool {
        let is_late = is_over(&self.began, self.limit);
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = None;
        is_late
    }
}

fn is_over(began: &Mutex<Option<Instant>>, limit: Duration) -> bool {
    began.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|began| began.elapsed() >= limit)
}

impl Drop for RunLimit {
    fn drop(&mut self) {
        // The thread ends at once, and doesn't panic.
        let _ = self.stop.send(());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
