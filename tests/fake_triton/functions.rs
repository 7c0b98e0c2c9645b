//! The functions that the backend calls.
//!
//! Every pointer that arrives is one that the stand-in handed out, or one to a variable of the backend's; requests are
//! kept alive by the test, so that one used after its release is noticed instead of crashing.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use triton_sys::*;

use super::ledger::{self, Kind};
use super::objects::{
    Answer, BACKEND, Backend, Error, FENCE, Factory, Id, Input, Instance, Message, Model, Output, Parameter, Request,
    Response, Sent,
};
use super::objects::{hand_out, take_back};

/// Memory that instances reported.
pub static REPORTED: Mutex<Vec<Usage>> = Mutex::new(Vec::new());

/// Memory that is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub is_gpu: bool,
    pub device: i64,
    pub bytes: usize,
}

type Failure = (TRITONSERVER_Error_Code, String);
type Done = Result<(), Failure>;

/// These do or note something also when they fail: whoever takes an object takes it anyway.
const NEVER_IDLE: [&str; 7] = [
    "TRITONBACKEND_RequestRelease",
    "TRITONBACKEND_ResponseDelete",
    "TRITONBACKEND_ResponseFactoryDelete",
    "TRITONBACKEND_ResponseFactorySendFlags",
    "TRITONBACKEND_ResponseNew",
    "TRITONBACKEND_ResponseSend",
    "TRITONSERVER_MessageDelete",
];

fn call(function: &'static str, work: impl FnOnce(bool) -> Done) -> *mut TRITONSERVER_Error {
    let fails = ledger::fails(function);
    let done = if !fails || NEVER_IDLE.contains(&function) { work(fails) } else { Ok(()) };
    let failure = (TRITONSERVER_ERROR_INTERNAL, format!("{function} was made to fail"));
    match if fails { Err(failure) } else { done } {
        Ok(()) => ptr::null_mut(),
        Err((code, text)) => hand_out(Kind::Error, Error { code, text: CString::new(text).unwrap_or_default() }),
    }
}

/// Defines the functions that may fail. `fails` says, for those that do something anyway, that this call fails.
macro_rules! fallible {
    ($( fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$fails:ident| $body:block )*) => {
        $(
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($argument: $type),*) -> *mut TRITONSERVER_Error {
                const NAME: &str = stringify!($name);
                call(NAME, |$fails| { let _ = ($fails, NAME); $body })
            }
        )*

        /// Every function that may fail.
        pub const FALLIBLE: &[&str] = &[$( stringify!($name) ),*];

        fn with_fallible(api: Api) -> Api {
            Api { $( $name: Some($name), )* ..api }
        }
    };
}

/// What the backend gets to call.
pub fn table() -> Api {
    with_fallible(Api {
        TRITONSERVER_ErrorNew: Some(error_new),
        TRITONSERVER_ErrorDelete: Some(error_delete),
        TRITONSERVER_ErrorCode: Some(error_code),
        TRITONSERVER_ErrorMessage: Some(error_message),
        TRITONSERVER_LogIsEnabled: Some(log_is_enabled),
        ..Api::EMPTY
    })
}

fn borrow<'a, T, R>(raw: *mut R) -> &'a T {
    // SAFETY: see the head of this file.
    unsafe { &*raw.cast::<T>() }
}

fn borrow_mut<'a, T, R>(raw: *mut R) -> &'a mut T {
    // SAFETY: see the head of this file; a response and its outputs are used by one thread.
    unsafe { &mut *raw.cast::<T>() }
}

fn put<T>(to: *mut T, value: T) {
    // SAFETY: see the head of this file.
    unsafe { to.write(value) }
}

fn text(from: *const c_char) -> String {
    // SAFETY: see the head of this file.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// A request that the backend may still use.
fn request<'a>(raw: *mut TRITONBACKEND_Request, by: &str) -> &'a Request {
    ledger::used(Kind::Request, raw.addr(), by);
    borrow(raw)
}

fn response<'a>(raw: *mut TRITONBACKEND_Response, by: &str) -> &'a mut Response {
    ledger::used(Kind::Response, raw.addr(), by);
    borrow_mut(raw)
}

fn memory_type(gpu: Option<i64>) -> TRITONSERVER_MemoryType {
    if gpu.is_some() { TRITONSERVER_MEMORY_GPU } else { TRITONSERVER_MEMORY_CPU }
}

fn not_there(what: &str) -> Failure {
    (TRITONSERVER_ERROR_INVALID_ARG, format!("there is no such {what}"))
}

unsafe extern "C" fn error_new(code: TRITONSERVER_Error_Code, message: *const c_char) -> *mut TRITONSERVER_Error {
    hand_out(Kind::Error, Error { code, text: CString::new(text(message)).unwrap_or_default() })
}

unsafe extern "C" fn error_delete(error: *mut TRITONSERVER_Error) {
    drop(take_back::<Error, _>(Kind::Error, error, "TRITONSERVER_ErrorDelete"));
}

unsafe extern "C" fn error_code(error: *mut TRITONSERVER_Error) -> TRITONSERVER_Error_Code {
    ledger::used(Kind::Error, error.addr(), "TRITONSERVER_ErrorCode");
    borrow::<Error, _>(error).code
}

unsafe extern "C" fn error_message(error: *mut TRITONSERVER_Error) -> *const c_char {
    ledger::used(Kind::Error, error.addr(), "TRITONSERVER_ErrorMessage");
    borrow::<Error, _>(error).text.as_ptr()
}

unsafe extern "C" fn log_is_enabled(_level: TRITONSERVER_LogLevel) -> bool {
    true
}

fallible! {
    fn TRITONSERVER_LogMessage(
        _level: TRITONSERVER_LogLevel, _file: *const c_char, _line: c_int, _message: *const c_char,
    ) |_fails| {
        Ok(())
    }

    fn TRITONSERVER_MessageSerializeToJson(
        message: *mut TRITONSERVER_Message, base: *mut *const c_char, size: *mut usize,
    ) |_fails| {
        ledger::used(Kind::Message, message.addr(), NAME);
        let json = &borrow::<Message, _>(message).0;
        put(base, json.as_ptr().cast());
        put(size, json.len());
        Ok(())
    }
    fn TRITONSERVER_MessageDelete(message: *mut TRITONSERVER_Message) |_fails| {
        drop(take_back::<Message, _>(Kind::Message, message, NAME));
        Ok(())
    }

    fn TRITONSERVER_MetricFamilyNew(
        _family: *mut *mut TRITONSERVER_MetricFamily, _kind: TRITONSERVER_MetricKind, _name: *const c_char,
        _description: *const c_char,
    ) |_fails| {
        Err((TRITONSERVER_ERROR_UNSUPPORTED, "metrics not supported".to_owned()))
    }

    fn TRITONBACKEND_BackendConfig(
        backend: *mut TRITONBACKEND_Backend, config: *mut *mut TRITONSERVER_Message,
    ) |_fails| {
        put(config, ptr::from_ref(&*borrow::<Backend, _>(backend).config).cast_mut().cast());
        Ok(())
    }
    fn TRITONBACKEND_BackendArtifacts(
        backend: *mut TRITONBACKEND_Backend, kind: *mut TRITONBACKEND_ArtifactType, location: *mut *const c_char,
    ) |_fails| {
        put(kind, TRITONBACKEND_ARTIFACT_FILESYSTEM);
        put(location, borrow::<Backend, _>(backend).folder.as_ptr());
        Ok(())
    }

    fn TRITONBACKEND_ModelBackend(
        _model: *mut TRITONBACKEND_Model, backend: *mut *mut TRITONBACKEND_Backend,
    ) |_fails| {
        put(backend, BACKEND.load(Ordering::Acquire).cast());
        Ok(())
    }
    fn TRITONBACKEND_ModelAutoCompleteConfig(_model: *mut TRITONBACKEND_Model, wants: *mut bool) |_fails| {
        put(wants, false);
        Ok(())
    }
    fn TRITONBACKEND_ModelName(model: *mut TRITONBACKEND_Model, name: *mut *const c_char) |_fails| {
        put(name, borrow::<Model, _>(model).name.as_ptr());
        Ok(())
    }
    fn TRITONBACKEND_ModelVersion(model: *mut TRITONBACKEND_Model, version: *mut u64) |_fails| {
        put(version, borrow::<Model, _>(model).version);
        Ok(())
    }
    fn TRITONBACKEND_ModelRepository(
        model: *mut TRITONBACKEND_Model, kind: *mut TRITONBACKEND_ArtifactType, location: *mut *const c_char,
    ) |_fails| {
        put(kind, TRITONBACKEND_ARTIFACT_FILESYSTEM);
        put(location, borrow::<Model, _>(model).repository.as_ptr());
        Ok(())
    }
    fn TRITONBACKEND_ModelConfig(
        model: *mut TRITONBACKEND_Model, _version: u32, config: *mut *mut TRITONSERVER_Message,
    ) |_fails| {
        put(config, hand_out(Kind::Message, Message(borrow::<Model, _>(model).config.clone())));
        Ok(())
    }
    fn TRITONBACKEND_ModelState(model: *mut TRITONBACKEND_Model, state: *mut *mut c_void) |_fails| {
        put(state, borrow::<Model, _>(model).kept.state());
        Ok(())
    }
    fn TRITONBACKEND_ModelSetState(model: *mut TRITONBACKEND_Model, state: *mut c_void) |_fails| {
        borrow::<Model, _>(model).kept.set(state);
        Ok(())
    }

    fn TRITONBACKEND_ModelInstanceModel(
        instance: *mut TRITONBACKEND_ModelInstance, model: *mut *mut TRITONBACKEND_Model,
    ) |_fails| {
        put(model, ptr::from_ref(&*borrow::<Instance, _>(instance).model).cast_mut().cast());
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceKind(
        instance: *mut TRITONBACKEND_ModelInstance, kind: *mut TRITONSERVER_InstanceGroupKind,
    ) |_fails| {
        let on_gpu = borrow::<Instance, _>(instance).gpu.is_some();
        put(kind, if on_gpu { TRITONSERVER_INSTANCEGROUPKIND_GPU } else { TRITONSERVER_INSTANCEGROUPKIND_CPU });
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceDeviceId(instance: *mut TRITONBACKEND_ModelInstance, device: *mut i32) |_fails| {
        put(device, borrow::<Instance, _>(instance).gpu.unwrap_or(0));
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceReportMemoryUsage(
        _instance: *mut TRITONBACKEND_ModelInstance, usage: *mut *mut TRITONSERVER_BufferAttributes, count: u32,
    ) |_fails| {
        // SAFETY: the backend's array of that many.
        for usage in unsafe { std::slice::from_raw_parts(usage, count as usize) } {
            REPORTED.lock().push(borrow::<Usage, _>(*usage).clone());
        }
        Ok(())
    }
    fn TRITONSERVER_BufferAttributesNew(made: *mut *mut TRITONSERVER_BufferAttributes) |_fails| {
        put(made, Box::into_raw(Box::new(Usage::default())).cast());
        Ok(())
    }
    fn TRITONSERVER_BufferAttributesDelete(usage: *mut TRITONSERVER_BufferAttributes) |_fails| {
        // SAFETY: made above, deleted once.
        drop(unsafe { Box::from_raw(usage.cast::<Usage>()) });
        Ok(())
    }
    fn TRITONSERVER_BufferAttributesSetMemoryType(
        usage: *mut TRITONSERVER_BufferAttributes, memory: TRITONSERVER_MemoryType,
    ) |_fails| {
        borrow_mut::<Usage, _>(usage).is_gpu = memory == TRITONSERVER_MEMORY_GPU;
        Ok(())
    }
    fn TRITONSERVER_BufferAttributesSetMemoryTypeId(
        usage: *mut TRITONSERVER_BufferAttributes, device: i64,
    ) |_fails| {
        borrow_mut::<Usage, _>(usage).device = device;
        Ok(())
    }
    fn TRITONSERVER_BufferAttributesSetByteSize(usage: *mut TRITONSERVER_BufferAttributes, bytes: usize) |_fails| {
        borrow_mut::<Usage, _>(usage).bytes = bytes;
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceState(
        instance: *mut TRITONBACKEND_ModelInstance, state: *mut *mut c_void,
    ) |_fails| {
        put(state, borrow::<Instance, _>(instance).kept.state());
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceSetState(
        instance: *mut TRITONBACKEND_ModelInstance, state: *mut c_void,
    ) |_fails| {
        borrow::<Instance, _>(instance).kept.set(state);
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceReportStatistics(
        _instance: *mut TRITONBACKEND_ModelInstance, raw: *mut TRITONBACKEND_Request, success: bool,
        exec_start: u64, compute_start: u64, compute_end: u64, exec_end: u64,
    ) |_fails| {
        request(raw, NAME).fate.lock().statistics.push(success);
        if !(exec_start <= compute_start && compute_start <= compute_end && compute_end <= exec_end) {
            ledger::violation(format!("{NAME}: times run backwards"));
        }
        Ok(())
    }
    fn TRITONBACKEND_ModelInstanceReportBatchStatistics(
        _instance: *mut TRITONBACKEND_ModelInstance, _batch: u64, _exec_start: u64, _compute_start: u64,
        _compute_end: u64, _exec_end: u64,
    ) |_fails| {
        Ok(())
    }

    fn TRITONBACKEND_RequestIsCancelled(raw: *mut TRITONBACKEND_Request, cancelled: *mut bool) |_fails| {
        let request = request(raw, NAME);
        request.meanwhile.iter().for_each(|meanwhile| meanwhile());
        let asked = request.asked.fetch_add(1, Ordering::Relaxed);
        put(cancelled, request.cancelled || request.cancelled_after.is_some_and(|after| asked >= after));
        Ok(())
    }
    fn TRITONBACKEND_RequestCorrelationId(raw: *mut TRITONBACKEND_Request, id: *mut u64) |_fails| {
        let Id::Number(number) = request(raw, NAME).id else { return Err(not_there("number")) };
        put(id, number);
        Ok(())
    }
    fn TRITONBACKEND_RequestCorrelationIdString(
        raw: *mut TRITONBACKEND_Request, id: *mut *const c_char,
    ) |_fails| {
        let Id::Name(name) = &request(raw, NAME).id else { return Err(not_there("string")) };
        put(id, name.as_ptr());
        Ok(())
    }
    fn TRITONBACKEND_RequestFlags(raw: *mut TRITONBACKEND_Request, flags: *mut u32) |_fails| {
        put(flags, request(raw, NAME).flags);
        Ok(())
    }
    fn TRITONBACKEND_RequestParameterCount(raw: *mut TRITONBACKEND_Request, count: *mut u32) |_fails| {
        put(count, request(raw, NAME).parameters.len() as u32);
        Ok(())
    }
    fn TRITONBACKEND_RequestParameter(
        raw: *mut TRITONBACKEND_Request, index: u32, key: *mut *const c_char, kind: *mut TRITONSERVER_ParameterType,
        value: *mut *const c_void,
    ) |_fails| {
        let parameter = request(raw, NAME).parameters.get(index as usize).ok_or_else(|| not_there("parameter"))?;
        put(key, parameter.0.as_ptr());
        match &parameter.1 {
            Parameter::Text(text) => {
                put(kind, TRITONSERVER_PARAMETER_STRING);
                put(value, text.as_ptr().cast());
            }
            Parameter::Int(number) => {
                put(kind, TRITONSERVER_PARAMETER_INT);
                put(value, ptr::from_ref(number).cast());
            }
        }
        Ok(())
    }
    fn TRITONBACKEND_RequestInput(
        raw: *mut TRITONBACKEND_Request, name: *const c_char, input: *mut *mut TRITONBACKEND_Input,
    ) |_fails| {
        let name = text(name);
        let found = request(raw, NAME).inputs.iter().find(|input| input.name.to_bytes() == name.as_bytes());
        put(input, ptr::from_ref(found.ok_or_else(|| not_there("input"))?).cast_mut().cast());
        Ok(())
    }
    fn TRITONBACKEND_RequestInputCount(raw: *mut TRITONBACKEND_Request, count: *mut u32) |_fails| {
        put(count, request(raw, NAME).inputs.len() as u32);
        Ok(())
    }
    fn TRITONBACKEND_InferenceRequestTimeoutMicroseconds(raw: *mut TRITONBACKEND_Request, micros: *mut u64) |_fails| {
        request(raw, NAME);
        put(micros, 0);
        Ok(())
    }
    fn TRITONBACKEND_ResponseSetIntParameter(
        raw: *mut TRITONBACKEND_Response, _name: *const c_char, _value: i64,
    ) |_fails| {
        response(raw, NAME);
        Ok(())
    }
    fn TRITONBACKEND_RequestOutputCount(raw: *mut TRITONBACKEND_Request, count: *mut u32) |_fails| {
        put(count, request(raw, NAME).outputs.len() as u32);
        Ok(())
    }
    fn TRITONBACKEND_RequestOutputName(
        raw: *mut TRITONBACKEND_Request, index: u32, name: *mut *const c_char,
    ) |_fails| {
        let output = request(raw, NAME).outputs.get(index as usize).ok_or_else(|| not_there("output"))?;
        put(name, output.as_ptr());
        Ok(())
    }
    fn TRITONBACKEND_RequestRelease(raw: *mut TRITONBACKEND_Request, flags: u32) |_fails| {
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL {
            ledger::violation(format!("{NAME} with flags {flags}"));
        }
        ledger::gone(Kind::Request, raw.addr(), NAME);
        borrow::<Request, _>(raw).fate.lock().releases += 1;
        Ok(())
    }

    fn TRITONBACKEND_InputProperties(
        input: *mut TRITONBACKEND_Input, name: *mut *const c_char, data_type: *mut TRITONSERVER_DataType,
        shape: *mut *const i64, rank: *mut u32, bytes: *mut u64, buffers: *mut u32,
    ) |_fails| {
        let input = borrow::<Input, _>(input);
        if !name.is_null() {
            put(name, input.name.as_ptr());
        }
        put(data_type, input.data_type);
        put(shape, input.dims.as_ptr());
        put(rank, input.dims.len() as u32);
        put(bytes, input.buffers().iter().map(|(_, bytes)| bytes).sum::<usize>() as u64);
        put(buffers, input.buffers().len() as u32);
        Ok(())
    }
    fn TRITONBACKEND_InputBuffer(
        input: *mut TRITONBACKEND_Input, index: u32, buffer: *mut *const c_void, bytes: *mut u64,
        memory: *mut TRITONSERVER_MemoryType, device: *mut i64,
    ) |_fails| {
        let input = borrow::<Input, _>(input);
        let (start, len) = *input.buffers().get(index as usize).ok_or_else(|| not_there("buffer"))?;
        put(buffer, if len == 0 { ptr::null() } else { start.cast() });
        put(bytes, len as u64);
        put(memory, memory_type(input.gpu));
        put(device, input.gpu.unwrap_or(0));
        Ok(())
    }

    fn TRITONBACKEND_ResponseNew(
        made: *mut *mut TRITONBACKEND_Response, raw: *mut TRITONBACKEND_Request,
    ) |fails| {
        let request = request(raw, NAME);
        if fails {
            request.fate.lock().unmade += 1;
            return Ok(());
        }
        put(made, hand_out(Kind::Response, Response { request, outputs: Vec::new() }));
        Ok(())
    }
    fn TRITONBACKEND_ResponseDelete(raw: *mut TRITONBACKEND_Response) |_fails| {
        drop(take_back::<Response, _>(Kind::Response, raw, NAME));
        Ok(())
    }
    fn TRITONBACKEND_ResponseOutput(
        raw: *mut TRITONBACKEND_Response, output: *mut *mut TRITONBACKEND_Output, name: *const c_char,
        _data_type: TRITONSERVER_DataType, shape: *const i64, rank: u32,
    ) |_fails| {
        let response = response(raw, NAME);
        // SAFETY: the backend's array of that rank, copied during the call.
        let dims = unsafe { std::slice::from_raw_parts(shape, rank as usize) }.to_vec();
        let gpu = borrow::<Request, _>(response.request.cast_mut()).outputs_gpu;
        response.outputs.push(Box::new(Output { name: text(name), dims, gpu, buffer: Vec::new() }));
        put(output, response.outputs.last_mut().map_or(ptr::null_mut(), |made| ptr::from_mut(&mut **made).cast()));
        Ok(())
    }
    fn TRITONBACKEND_OutputBuffer(
        output: *mut TRITONBACKEND_Output, buffer: *mut *mut c_void, bytes: u64,
        memory: *mut TRITONSERVER_MemoryType, device: *mut i64,
    ) |_fails| {
        let output = borrow_mut::<Output, _>(output);
        // Not zeros: memory that has not been written may hold anything.
        output.buffer = vec![0xcd; bytes as usize];
        output.buffer.extend(FENCE);
        put(buffer, output.buffer.as_mut_ptr().cast());
        put(memory, memory_type(output.gpu));
        put(device, output.gpu.unwrap_or(0));
        Ok(())
    }
    fn TRITONBACKEND_ResponseSend(
        raw: *mut TRITONBACKEND_Response, flags: u32, error: *mut TRITONSERVER_Error,
    ) |fails| {
        let Some(response) = take_back::<Response, _>(Kind::Response, raw, NAME) else { return Ok(()) };
        std::thread::sleep(Duration::from_micros(SEND_US.load(Ordering::Relaxed)));
        let request = request(response.request.cast_mut().cast(), NAME);
        let answer = if error.is_null() { outputs(&response) } else { failure(error, NAME) };
        request.note_sent(Sent { lost: fails, answer }, flags, NAME);
        Ok(())
    }

    fn TRITONBACKEND_ResponseFactoryNew(
        made: *mut *mut TRITONBACKEND_ResponseFactory, raw: *mut TRITONBACKEND_Request,
    ) |_fails| {
        let request: *const Request = request(raw, NAME);
        put(made, hand_out(Kind::Factory, Factory { request }));
        Ok(())
    }
    fn TRITONBACKEND_ResponseFactoryDelete(raw: *mut TRITONBACKEND_ResponseFactory) |_fails| {
        drop(take_back::<Factory, _>(Kind::Factory, raw, NAME));
        Ok(())
    }
    fn TRITONBACKEND_ResponseFactorySendFlags(raw: *mut TRITONBACKEND_ResponseFactory, flags: u32) |fails| {
        ledger::used(Kind::Factory, raw.addr(), NAME);
        let request = request(borrow::<Factory, _>(raw).request.cast_mut().cast(), NAME);
        request.note_sent(Sent { lost: fails, answer: Answer::End }, flags, NAME);
        Ok(())
    }
}

/// What sending an answer takes, in µs.
pub static SEND_US: AtomicU64 = AtomicU64::new(0);

fn outputs(response: &Response) -> Answer {
    let read = |output: &Output| {
        let bytes = output.bytes().unwrap_or_else(|| {
            ledger::violation(format!("bytes behind the buffer of output {} were written", output.name));
            &[]
        });
        (output.name.clone(), (output.dims.clone(), bytes.to_vec()))
    };
    Answer::Outputs(response.outputs.iter().map(|output| read(output)).collect())
}

fn failure(error: *mut TRITONSERVER_Error, by: &str) -> Answer {
    ledger::used(Kind::Error, error.addr(), by);
    let error = borrow::<Error, _>(error);
    Answer::Error(error.code, error.text.to_string_lossy().into_owned())
}
