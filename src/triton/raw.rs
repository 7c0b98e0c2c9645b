//! A request and its response as Triton lends and takes them: the calls, and who gives which object back when.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use gpu_rows::Foreign;
use rows::client::{ClientBytes, ClientBytesMut};
use rows::tensor::DataType;
use rows::{NoMemory, reserve};
use sequences::SequenceId;
use smallvec::SmallVec;
use triton_sys::{TRITONBACKEND_Request, TRITONBACKEND_Response, TRITONBACKEND_ResponseFactory, call};

use super::error::{Code, Error, check};
use super::input::raw_data_type;

/// A request, which its owner answers once and releases once.
pub struct RawRequest(pub(super) NonNull<TRITONBACKEND_Request>);

// SAFETY: Triton lets a request be answered and released by any thread; its owner does so from one at a time.
unsafe impl Send for RawRequest {}
// SAFETY: several threads may have rows of one request. They make calls that only read it. The response is made once,
// by the row that is answered last, and the release comes when no row is left.
unsafe impl Sync for RawRequest {}

/// A response that has not been sent. Dropping it deletes it.
pub struct RawResponse {
    raw: NonNull<TRITONBACKEND_Response>,
    /// Of its outputs.
    bytes: Cell<usize>,
    /// What it has, if [`RawResponse::record`] was called.
    recorded: RefCell<Option<Box<Recorded>>>,
}

#[derive(Default)]
struct Recorded {
    outputs: Vec<RecordedOutput>,
    copy: ResponseCopy,
}

struct RecordedOutput {
    name: CString,
    data_type: DataType,
    dims: SmallVec<[i64; 6]>,
    /// `None` in memory of a GPU.
    start: Option<*const u8>,
    bytes: usize,
}

// SAFETY: Triton lets a response be sent or deleted by any thread; its owner does so from one at a time.
unsafe impl Send for RawResponse {}

/// The end of a request that gets no further response. Dropping it deletes it; only [`RawEnd::send`] tells the client.
pub struct RawEnd(NonNull<TRITONBACKEND_ResponseFactory>);

// SAFETY: Triton lets a factory be used and deleted by any thread; its owner does so from one at a time.
unsafe impl Send for RawEnd {}

pub struct RowOutput {
    pub name: CString,
    pub data_type: DataType,
    pub dims: SmallVec<[i64; 6]>,
    pub bytes: Vec<u8>,
}

/// A copy of a response, without the id of its sequence.
#[derive(Default)]
pub struct ResponseCopy {
    pub outputs: Vec<RowOutput>,
    pub numbers: Vec<(CString, i64)>,
    pub flags: Vec<(CString, bool)>,
}

/// Where Triton wants an output.
pub enum OutputMemory<'a> {
    Host(ClientBytesMut<'a>),
    /// In memory of a GPU, such as a client's shared memory.
    Gpu(Foreign<'a>),
}

impl RawRequest {
    pub const fn as_ptr(&self) -> *mut TRITONBACKEND_Request {
        self.0.as_ptr()
    }

    pub fn response(&self) -> Result<RawResponse, Error> {
        let mut response = ptr::null_mut();
        // SAFETY: the request is alive until it is released; the response is handed over.
        unsafe {
            check(call!(TRITONBACKEND_ResponseNew(&mut response, self.0.as_ptr())))?;
            let raw = NonNull::new(response).ok_or_else(|| Error::new(Code::Internal, "Triton made no response"))?;
            Ok(RawResponse { raw, bytes: Cell::new(0), recorded: RefCell::new(None) })
        }
    }

    /// The end of the request, if it gets no further response.
    pub fn end(&self) -> Result<RawEnd, Error> {
        let mut factory = ptr::null_mut();
        // SAFETY: the request is alive until it is released; the factory is handed over.
        unsafe {
            check(call!(TRITONBACKEND_ResponseFactoryNew(&mut factory, self.0.as_ptr())))?;
            NonNull::new(factory).map(RawEnd).ok_or_else(|| Error::new(Code::Internal, "Triton made no factory"))
        }
    }

    /// To be called once, when nothing uses the request any more.
    pub fn release(&self) {
        // SAFETY: alive until now and never used again.
        let released = unsafe {
            check(call!(TRITONBACKEND_RequestRelease(self.0.as_ptr(), triton_sys::TRITONSERVER_REQUEST_RELEASE_ALL)))
        };
        if let Err(error) = released {
            log::error!("a request could not be released: {error}");
        }
    }
}

impl RawResponse {
    pub const fn byte_len(&self) -> usize {
        self.bytes.get()
    }

    /// See [`super::Response::output`].
    pub fn output(
        &self,
        name: &CStr,
        data_type: DataType,
        dims: &[i64],
        bytes: usize,
    ) -> Result<OutputMemory<'_>, Error> {
        check_memory(bytes)?;
        let mut output = ptr::null_mut();
        let mut data = ptr::null_mut();
        let (mut memory, mut device) = (triton_sys::TRITONSERVER_MEMORY_CPU, 0);
        // SAFETY: the response is alive; name and dims live during the call, which copies them.
        unsafe {
            let data_type = raw_data_type(data_type);
            check(call!(TRITONBACKEND_ResponseOutput(
                self.raw.as_ptr(),
                &mut output,
                name.as_ptr(),
                data_type,
                dims.as_ptr(),
                dims.len() as u32
            )))?;
            check(call!(TRITONBACKEND_OutputBuffer(output, &mut data, bytes as u64, &mut memory, &mut device)))?;
        }
        self.bytes.set(self.bytes.get().saturating_add(bytes));
        let on_host = memory != triton_sys::TRITONSERVER_MEMORY_GPU || bytes == 0;
        if let Some(recorded) = &mut *self.recorded.borrow_mut() {
            let start = on_host.then_some(data.cast_const().cast());
            let (name, dims) = (name.to_owned(), dims.into());
            recorded.outputs.push(RecordedOutput { name, data_type, dims, start, bytes });
        }
        // SAFETY: Triton allocated that many bytes, where it says, for this output alone. They live as long as the
        // response, which is borrowed.
        Ok(unsafe {
            if on_host {
                OutputMemory::Host(ClientBytesMut::new(data.cast(), bytes))
            } else {
                OutputMemory::Gpu(Foreign::new(device as i32, data.expose_provenance() as u64, bytes))
            }
        })
    }

    /// Adds the id of the request's sequence as parameter `stateful_sequence_id`, if the server has parameters of
    /// responses. The parameter isn't called `sequence_id`, because in an ensemble it would then become the id of the
    /// next step's request.
    pub fn set_sequence_id(&self, id: &SequenceId) -> Result<(), Error> {
        let name = c"stateful_sequence_id".as_ptr();
        let raw = self.raw.as_ptr();
        let set = match id {
            // SAFETY: the response is alive; the name lives as long as the program.
            SequenceId::Number(number) => unsafe {
                check(call!(TRITONBACKEND_ResponseSetIntParameter(raw, name, number.cast_signed())))
            },
            SequenceId::Name(_) => {
                let id = CString::new(id.to_bytes()).unwrap_or_default();
                // SAFETY: as above; the call copies the id.
                unsafe { check(call!(TRITONBACKEND_ResponseSetStringParameter(raw, name, id.as_ptr()))) }
            }
        };
        unless_unsupported(set)
    }

    /// Adds a number as a parameter, if the server has parameters of responses.
    pub fn set_number(&self, name: &CStr, number: i64) -> Result<(), Error> {
        if let Some(recorded) = &mut *self.recorded.borrow_mut() {
            recorded.copy.numbers.push((name.to_owned(), number));
        }
        // SAFETY: the response is alive; the call copies the name.
        let set =
            unsafe { check(call!(TRITONBACKEND_ResponseSetIntParameter(self.raw.as_ptr(), name.as_ptr(), number))) };
        unless_unsupported(set)
    }

    pub fn set_flag(&self, name: &CStr, flag: bool) -> Result<(), Error> {
        if let Some(recorded) = &mut *self.recorded.borrow_mut() {
            recorded.copy.flags.push((name.to_owned(), flag));
        }
        // SAFETY: the response is alive; the call copies the name.
        let set =
            unsafe { check(call!(TRITONBACKEND_ResponseSetBoolParameter(self.raw.as_ptr(), name.as_ptr(), flag))) };
        unless_unsupported(set)
    }

    /// Notes what the response gets from now on, for [`RawResponse::copy`].
    pub fn record(&self) {
        *self.recorded.borrow_mut() = Some(Box::default());
    }

    /// A copy of what was noted. `None` if nothing was noted, or if an output is in memory of a GPU.
    pub fn copy(&self) -> Option<ResponseCopy> {
        let Recorded { outputs, copy: of } = *self.recorded.take()?;
        let copy = |output: RecordedOutput| {
            let RecordedOutput { name, data_type, dims, start, bytes } = output;
            let mut copy = reserve(bytes).ok()?;
            if bytes > 0 {
                // SAFETY: Triton allocated that many bytes, which live as long as the response. They have been written: an
                // instance makes an answer after that, and waits for its GPU before it hands the answer on.
                unsafe { ClientBytes::new(start?, bytes) }.append_to(&mut copy);
            }
            Some(RowOutput { name, data_type, dims, bytes: copy })
        };
        Some(ResponseCopy { outputs: outputs.into_iter().map(copy).collect::<Option<_>>()?, ..of })
    }

    /// Sends it, with the error if there is one. Nothing follows a response that is final.
    pub fn send(self, error: Option<Error>, is_final: bool) -> Result<(), Error> {
        let flags = if is_final { triton_sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL } else { 0 };
        let error = error.map_or(ptr::null_mut(), |error| error.for_answer().into_raw());
        let raw = ManuallyDrop::new(self).raw.as_ptr();
        // SAFETY: alive, and handed over; the error stays ours and is deleted after the call.
        unsafe {
            let sent = check(call!(TRITONBACKEND_ResponseSend(raw, flags, error)));
            if !error.is_null() {
                let _ = call!(TRITONSERVER_ErrorDelete(error));
            }
            sent
        }
    }
}

impl RawEnd {
    pub fn send(self) -> Result<(), Error> {
        let flags = triton_sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL;
        // SAFETY: the factory is alive until it is dropped.
        unsafe { check(call!(TRITONBACKEND_ResponseFactorySendFlags(self.0.as_ptr(), flags))) }
    }
}

impl Drop for RawEnd {
    fn drop(&mut self) {
        // SAFETY: alive, and never used again.
        let deleted = unsafe { check(call!(TRITONBACKEND_ResponseFactoryDelete(self.0.as_ptr()))) };
        if let Err(error) = deleted {
            log::error!("a response factory could not be deleted: {error}");
        }
    }
}

impl Drop for RawResponse {
    fn drop(&mut self) {
        // SAFETY: alive and not sent, or `send` would not drop it.
        let deleted = unsafe { check(call!(TRITONBACKEND_ResponseDelete(self.raw.as_ptr()))) };
        if let Err(error) = deleted {
            log::error!("a response could not be deleted: {}", error.message);
        }
    }
}

/// Not an error if the server has no parameters of responses.
fn unless_unsupported(set: Result<(), Error>) -> Result<(), Error> {
    match set {
        Err(error) if error.code == Code::Unsupported => Ok(()),
        set => set,
    }
}

/// Fails if there is not so much memory. Otherwise the front end's allocator would throw an exception, which would end
/// the server.
fn check_memory(bytes: usize) -> Result<(), Error> {
    const LARGE: usize = 1 << 20;
    if bytes < LARGE {
        return Ok(());
    }
    reserve::<u8>(bytes).map(drop).map_err(no_memory)
}

pub(super) fn no_memory(error: NoMemory) -> Error {
    Error::new(Code::Unavailable, format!("no memory for an output: {error}"))
}

/// A name for Triton. No tensor's name has a NUL; one that had would become empty.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}
