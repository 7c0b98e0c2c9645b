//! The objects that the stand-in hands out, as a test makes and reads them.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

use parking_lot::Mutex;
use triton_sys::{TRITONSERVER_DataType, TRITONSERVER_Error_Code, TRITONSERVER_RESPONSE_COMPLETE_FINAL};

use super::ledger::{self, Kind};

fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

/// The pointer that the backend leaves with an object.
#[derive(Default)]
pub struct Kept(AtomicPtr<c_void>);

impl Kept {
    pub fn set(&self, state: *mut c_void) {
        self.0.store(state, Ordering::SeqCst);
    }

    pub fn state(&self) -> *mut c_void {
        self.0.load(Ordering::SeqCst)
    }
}

/// The backend, with what its server's command line says.
pub struct Backend {
    pub config: Box<Message>,
    pub folder: CString,
}

/// The backend of the server that is running, for its models.
pub static BACKEND: AtomicPtr<Backend> = AtomicPtr::new(ptr::null_mut());

impl Backend {
    pub fn new(onnxruntime: &Path) -> Self {
        let config = serde_json::json!({ "cmdline": { "ort-library-path": onnxruntime.to_str().unwrap() } });
        let config = Box::new(Message(config.to_string().into_bytes()));
        ledger::made(Kind::Message, ptr::from_ref(&*config).addr());
        Self { config, folder: c("/nowhere/stateful") }
    }
}

/// A model in its repository.
pub struct Model {
    pub name: CString,
    pub version: u64,
    pub repository: CString,
    pub config: Vec<u8>,
    pub kept: Kept,
}

impl Model {
    /// A model whose files lie in a folder of cargo's.
    pub fn new(name: &str, config: &serde_json::Value, onnx: &[u8]) -> Self {
        // Cargo names the folder to tests, and not to the fuzz targets.
        let temporary = option_env!("CARGO_TARGET_TMPDIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let folder = temporary.join("repository").join(name);
        std::fs::create_dir_all(folder.join("1")).unwrap();
        // Another process may be reading the same file.
        let file = folder.join("1/model.onnx");
        if std::fs::read(&file).ok().as_deref() != Some(onnx) {
            std::fs::write(&file, onnx).unwrap();
        }
        Self {
            name: c(name),
            version: 1,
            repository: c(folder.to_str().unwrap()),
            config: config.to_string().into_bytes(),
            kept: Kept::default(),
        }
    }
}

/// An instance of a model.
pub struct Instance {
    pub model: Arc<Model>,
    /// The GPU that it is to run on, if any.
    pub gpu: Option<i32>,
    pub kept: Kept,
}

/// A sequence id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Id {
    Number(u64),
    Name(CString),
}

impl Id {
    pub fn name(name: &str) -> Self {
        Self::Name(c(name))
    }
}

/// An input of a request, in as many pieces as a test cuts it.
#[derive(Clone, Debug)]
pub struct Input {
    pub name: CString,
    pub data_type: TRITONSERVER_DataType,
    pub dims: Vec<i64>,
    pub pieces: Vec<Vec<u8>>,
    /// It says that it lies in memory of that GPU.
    pub gpu: Option<i64>,
    /// Memory that its client shares with the server, in the place of the pieces.
    pub shared: Option<Arc<Shared>>,
}

/// Memory that a client can write to while the backend has a pointer to it.
#[derive(Debug)]
pub struct Shared(Box<[AtomicU8]>);

impl Shared {
    pub fn new(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self(bytes.iter().copied().map(AtomicU8::new).collect()))
    }

    pub fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.0.len());
        self.0.iter().zip(bytes).for_each(|(at, &byte)| at.store(byte, Ordering::SeqCst));
    }
}

impl Input {
    pub fn new(name: &str, data_type: TRITONSERVER_DataType, dims: &[i64], bytes: Vec<u8>) -> Self {
        Self { name: c(name), data_type, dims: dims.to_vec(), pieces: vec![bytes], gpu: None, shared: None }
    }

    /// Where its pieces begin, and their bytes.
    pub fn buffers(&self) -> Vec<(*const u8, usize)> {
        match &self.shared {
            Some(shared) => vec![(shared.0.as_ptr().cast(), shared.0.len())],
            None => self.pieces.iter().map(|piece| (piece.as_ptr(), piece.len())).collect(),
        }
    }
}

/// The value of a request parameter.
pub enum Parameter {
    Text(CString),
    Int(i64),
}

/// A request, and what becomes of it.
pub struct Request {
    pub id: Id,
    pub flags: u32,
    pub inputs: Vec<Input>,
    pub outputs: Vec<CString>,
    pub parameters: Vec<(CString, Parameter)>,
    pub cancelled: bool,
    /// After so many questions of the backend, it is cancelled.
    pub cancelled_after: Option<usize>,
    /// How often the backend has asked whether it is cancelled.
    pub asked: AtomicUsize,
    /// What its client does when the backend asks whether it is cancelled, which is between decoding and gathering.
    pub meanwhile: Option<Box<dyn Fn() + Send + Sync>>,
    /// The buffers for its outputs are said to lie in memory of that GPU.
    pub outputs_gpu: Option<i64>,
    pub fate: Mutex<Fate>,
}

/// What the backend did with a request.
#[derive(Default)]
pub struct Fate {
    /// The responses that others follow.
    pub parts: Vec<Sent>,
    /// The final responses; what could not be sent as well.
    pub sent: Vec<Sent>,
    /// Responses that could not be made.
    pub unmade: usize,
    pub releases: usize,
    pub statistics: Vec<bool>,
}

/// A response that was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    /// The server failed to send it.
    pub lost: bool,
    pub answer: Answer,
}

/// What a client gets.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Outputs(BTreeMap<String, (Vec<i64>, Vec<u8>)>),
    /// Only the flag that no response follows.
    End,
    Error(TRITONSERVER_Error_Code, String),
}

impl Request {
    pub fn new(id: Id, flags: u32, inputs: Vec<Input>, outputs: &[&str]) -> Self {
        Self {
            id,
            flags,
            inputs,
            outputs: outputs.iter().map(|name| c(name)).collect(),
            parameters: Vec::new(),
            cancelled: false,
            cancelled_after: None,
            asked: AtomicUsize::new(0),
            meanwhile: None,
            outputs_gpu: None,
            fate: Mutex::default(),
        }
    }

    pub fn with_parameter(mut self, name: &str, value: &str) -> Self {
        self.parameters.push((c(name), Parameter::Text(c(value))));
        self
    }

    pub fn with_number(mut self, name: &str, value: i64) -> Self {
        self.parameters.push((c(name), Parameter::Int(value)));
        self
    }

    /// Notes a response, which may be the last.
    pub fn note_sent(&self, sent: Sent, flags: u32, by: &str) {
        let mut fate = self.fate.lock();
        if !fate.sent.is_empty() {
            ledger::violation(format!("{by} after the final response"));
        }
        match flags {
            TRITONSERVER_RESPONSE_COMPLETE_FINAL => fate.sent.push(sent),
            0 => fate.parts.push(sent),
            flags => ledger::violation(format!("{by} with flags {flags}")),
        }
    }

    /// The responses before the last one that reached the client.
    pub fn parts(&self) -> Vec<Answer> {
        let fate = self.fate.lock();
        fate.parts.iter().filter(|sent| !sent.lost).map(|sent| sent.answer.clone()).collect()
    }

    /// The one answer that reached the client, or the last one.
    pub fn answer(&self) -> Option<Answer> {
        let fate = self.fate.lock();
        fate.sent.first().filter(|sent| !sent.lost).map(|sent| sent.answer.clone())
    }

    /// The error that reached the client, with its code.
    pub fn error(&self) -> Option<(TRITONSERVER_Error_Code, String)> {
        match self.answer() {
            Some(Answer::Error(code, text)) => Some((code, text)),
            _ => None,
        }
    }

    pub fn is_released(&self) -> bool {
        self.fate.lock().releases > 0
    }

    /// Whether it is a filler of the direct strategy, which wants no answer.
    pub fn is_null(&self) -> bool {
        self.id == Id::Number(0) && self.outputs.is_empty()
    }
}

/// A response that is not sent yet.
pub struct Response {
    pub request: *const Request,
    #[allow(clippy::vec_box, reason = "the backend holds pointers to them")]
    pub outputs: Vec<Box<Output>>,
}

/// Makes responses of a request.
pub struct Factory {
    pub request: *const Request,
}

/// An output of a response. Behind its buffer lie bytes that nobody may touch.
pub struct Output {
    pub name: String,
    pub dims: Vec<i64>,
    pub gpu: Option<i64>,
    pub buffer: Vec<u8>,
}

pub const FENCE: [u8; 16] = [0xa5; 16];

impl Output {
    /// The bytes of the buffer, if the fence is whole.
    pub fn bytes(&self) -> Option<&[u8]> {
        // Without a buffer there are no bytes either.
        if self.buffer.is_empty() {
            return Some(&[]);
        }
        self.buffer.strip_suffix(FENCE.as_slice())
    }
}

/// An error object.
pub struct Error {
    pub code: TRITONSERVER_Error_Code,
    pub text: CString,
}

/// A JSON text.
pub struct Message(pub Vec<u8>);

/// Moves an object to where the backend gets a pointer to it.
pub fn hand_out<T, R>(kind: Kind, object: T) -> *mut R {
    let raw = Box::into_raw(Box::new(object));
    ledger::made(kind, raw.addr());
    raw.cast()
}

/// Takes an object back. `None` if it does not live.
pub fn take_back<T, R>(kind: Kind, raw: *mut R, by: &str) -> Option<Box<T>> {
    let lives = !ptr::addr_eq(raw, ptr::null::<R>()) && ledger::gone(kind, raw.addr(), by);
    // SAFETY: it lives, so `hand_out` made it of a Box; every kind is of one type.
    lives.then(|| unsafe { Box::from_raw(raw.cast()) })
}
