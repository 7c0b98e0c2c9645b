//! Models that run in ONNX Runtime, and the tensors that they take and give: random ones, parts of them, and their
//! differences. Also the reasons why a comparison fails or can't be made ([`VerifyError`]).

use std::borrow::Cow;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use ort::environment::Environment;
use ort::session::{RunOptions, Session, SessionInputValue};
use ort::value::{DynValue, IntoTensorElementType, PrimitiveTensorElementType, Tensor, TensorElementType};

use crate::onnx::{DataType, element_count, is_float, type_bytes, type_name};

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

#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    pub elem: i32,
    pub dims: Vec<i64>,
    pub bytes: Vec<u8>,
}

/// A tensor that a model takes, and its name.
pub type Feed = (String, Host);

pub struct Difference {
    pub largest: f64,
    /// Where: the number of the element.
    pub at: Option<usize>,
    /// The largest finite value of the first.
    pub scale: f64,
}

pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

trait Element: PrimitiveTensorElementType + std::fmt::Debug + Clone + 'static {
    fn of_number(number: f64) -> Self;
    fn number(&self) -> f64;
    fn of_bytes(bytes: &[u8]) -> Self;
    fn bytes(&self) -> Vec<u8>;
}

macro_rules! element {
    ($type:ty, $number:ident => $of_number:expr, $element:ident => $number_of:expr) => {
        impl Element for $type {
            fn of_number($number: f64) -> Self {
                $of_number
            }

            fn number(&self) -> f64 {
                let $element = *self;
                $number_of
            }

            fn of_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(std::array::from_fn(|index| bytes.get(index).copied().unwrap_or_default()))
            }

            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        }
    };
}

macro_rules! primitives {
    ($($type:ty),*) => { $(element!($type, number => number as $type, element => element as f64);)* };
}

primitives!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64);
element!(f16, number => Self::from_f64(number), element => element.to_f64());
element!(bf16, number => Self::from_f64(number), element => element.to_f64());

impl Element for bool {
    fn of_number(number: f64) -> Self {
        number != 0.0
    }

    fn number(&self) -> f64 {
        f64::from(*self)
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        bytes.first().is_some_and(|&byte| byte != 0)
    }

    fn bytes(&self) -> Vec<u8> {
        vec![u8::from(*self)]
    }
}

/// Runs an expression with the type of ONNX elements. `None` if such elements can't be compared.
macro_rules! with_type {
    ($elem:expr, $T:ident => $run:expr) => {{
        macro_rules! run {
            ($type:ty) => {{
                type $T = $type;
                Some($run)
            }};
        }
        match DataType::try_from($elem).unwrap_or(DataType::Undefined) {
            DataType::Float => run!(f32),
            DataType::Double => run!(f64),
            DataType::Float16 => run!(f16),
            DataType::Bfloat16 => run!(bf16),
            DataType::Int8 => run!(i8),
            DataType::Int16 => run!(i16),
            DataType::Int32 => run!(i32),
            DataType::Int64 => run!(i64),
            DataType::Uint8 => run!(u8),
            DataType::Uint16 => run!(u16),
            DataType::Uint32 => run!(u32),
            DataType::Uint64 => run!(u64),
            DataType::Bool => run!(bool),
            _ => None,
        }
    }};
}

/// ONNX's number for a type of ONNX Runtime, if such elements can be compared.
fn of_runtime(of_runtime: TensorElementType) -> Option<i32> {
    let is = |elem: &i32| with_type!(*elem, T => T::into_tensor_element_type()) == Some(of_runtime);
    (DataType::Float.into()..=DataType::Bfloat16.into()).find(is)
}

pub fn is_comparable(elem: i32) -> bool {
    with_type!(elem, T => size_of::<T>()).is_some()
}

impl Host {
    pub fn random(elem: i32, dims: Vec<i64>, random: &mut Random) -> Self {
        let is_float = is_float(elem);
        // Integers are 0 and 1, which are within most vocabularies.
        let number = || if is_float { random.next() } else { f64::from(random.next() > 0.0) };
        let count = usize::try_from(element_count(&dims)).unwrap_or_default();
        let numbers: Vec<f64> = std::iter::repeat_with(number).take(count).collect();
        Self::of(elem, dims, &numbers)
    }

    pub fn filled_with(elem: i32, dims: Vec<i64>, value: f64) -> Self {
        let count = usize::try_from(element_count(&dims)).unwrap_or_default();
        Self::of(elem, dims, &vec![value; count])
    }

    /// Lengths of rows: half of the steps, all, a third, and so on. With three rows, neither an ascending nor a
    /// descending sort leaves them as they are. A single row has all steps.
    pub fn lengths(elem: i32, dims: Vec<i64>, steps: i64, multiple: i64) -> Self {
        let rows = element_count(&dims);
        let length = |row: i64| match row % 3 {
            0 if rows > 1 => (steps / multiple + 1) / 2 * multiple,
            2 => (steps / multiple + 2) / 3 * multiple,
            _ => steps,
        };
        let lengths: Vec<f64> = (0..rows).map(|row| length(row) as f64).collect();
        Self::of(elem, dims, &lengths)
    }

    /// How much of each row's length lies in these steps.
    pub fn lengths_within(&self, start: i64, count: i64) -> Self {
        let within = |length: f64| (length - start as f64).clamp(0.0, count as f64);
        let lengths: Vec<f64> = self.numbers().into_iter().map(within).collect();
        Self::of(self.elem, self.dims.clone(), &lengths)
    }

    pub fn of(elem: i32, dims: Vec<i64>, numbers: &[f64]) -> Self {
        let bytes = with_type!(elem, T => numbers.iter().flat_map(|&number| T::of_number(number).bytes()).collect());
        let bytes = bytes.unwrap_or_default();
        Self { elem, dims, bytes }
    }

    fn size(&self) -> usize {
        type_bytes(self.elem).max(1)
    }

    pub fn part(&self, axis: usize, start: i64, count: i64) -> Self {
        let mut dims = self.dims.clone();
        let (length, inner) = (dims[axis] as usize, element_count(&dims[axis + 1..]) as usize * self.size());
        dims[axis] = count;
        let (start, end) = (start as usize * inner, (start + count) as usize * inner);
        // A tensor without elements has no blocks, of any size.
        let bytes = self.bytes.chunks((length * inner).max(1)).flat_map(|block| &block[start..end]).copied().collect();
        Self { elem: self.elem, dims, bytes }
    }

    /// The entry of one row. A tensor without an axis for rows is the same for all.
    pub fn row(&self, axis: Option<usize>, row: i64) -> Self {
        axis.map_or_else(|| self.clone(), |axis| self.part(axis, row, 1))
    }

    pub fn of_rows<'a>(rows: impl IntoIterator<Item = &'a Self>, axis: Option<usize>) -> Self {
        let rows: Vec<&Self> = rows.into_iter().collect();
        axis.map_or_else(|| rows[0].clone(), |axis| Self::joined(&rows, axis))
    }

    pub fn joined(parts: &[&Self], axis: usize) -> Self {
        let mut dims = parts[0].dims.clone();
        // A scalar has no axis to join along.
        if axis >= dims.len() {
            return parts[0].clone();
        }
        let outer = element_count(&dims[..axis]) as usize;
        dims[axis] = parts.iter().map(|part| part.dims[axis]).sum();
        let mut bytes = Vec::new();
        for block in 0..outer {
            for part in parts {
                let size = part.bytes.len() / outer.max(1);
                bytes.extend_from_slice(&part.bytes[block * size..(block + 1) * size]);
            }
        }
        Self { elem: parts[0].elem, dims, bytes }
    }

    pub fn position(&self, element: usize, axis: usize) -> i64 {
        element as i64 / element_count(&self.dims[axis + 1..]) % self.dims[axis]
    }

    pub fn difference(&self, other: &Self) -> Difference {
        let (mine, theirs) = (self.numbers(), other.numbers());
        let mut found = Difference { largest: 0.0, at: None, scale: 0.0 };
        for (at, (a, b)) in mine.iter().zip(&theirs).enumerate() {
            if a.is_finite() {
                found.scale = found.scale.max(a.abs());
            }
            let same = a == b || a.is_nan() && b.is_nan();
            let difference = if same { 0.0 } else { (a - b).abs() };
            // If only one side is a number, they are infinitely far apart.
            if difference > found.largest || difference.is_nan() {
                (found.largest, found.at) = (if difference.is_nan() { f64::INFINITY } else { difference }, Some(at));
            }
        }
        found
    }

    pub fn numbers(&self) -> Vec<f64> {
        let elements = self.bytes.chunks(self.size());
        with_type!(self.elem, T => elements.map(|bytes| T::of_bytes(bytes).number()).collect()).unwrap_or_default()
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

// How often the time of a run is checked. One thread watches all runs of a comparison, because there may be thousands
// of short ones.
const PERIOD: Duration = Duration::from_millis(50);

/// The options of runs, and how long each run may take. A run that takes longer is ended with an error, and so is every
/// later run with these options.
struct RunLimit {
    limit: Duration,
    options: Arc<RunOptions>,
    began: Arc<Mutex<Option<Instant>>>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl RunLimit {
    fn new(limit: Duration) -> Result<Self, String> {
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

    fn begin(&self) -> &RunOptions {
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        &self.options
    }

    fn end(&self) -> bool {
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
