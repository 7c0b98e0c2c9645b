//! A response, from its making until it is sent: the calls, and who gives which object back when.
//!
//! Each row of a request of several rows is run and answered like a request of its own. The client gets one response,
//! when all rows have their answers.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use gpu_rows::Foreign;
use parking_lot::Mutex;
use rows::client::{ClientBytes, ClientBytesMut};
use rows::tensor::DataType;
use rows::{NoMemory, reserve, zeros};
use sequences::SequenceId;
use smallvec::SmallVec;
use triton_sys::{TRITONBACKEND_Request, TRITONBACKEND_Response, TRITONBACKEND_ResponseFactory, call};

use super::error::{Code, Error, check};
use super::input::raw_data_type;

/// A request, which its owner answers once and releases once.
pub(super) struct RawRequest(pub(super) NonNull<TRITONBACKEND_Request>);

// SAFETY: Triton lets a request be answered and released by any thread; its owner does so from one at a time.
unsafe impl Send for RawRequest {}
// SAFETY: several threads may have rows of one request. They make calls that only read it. The response is made once,
// by the row that is answered last, and the release comes when no row is left.
unsafe impl Sync for RawRequest {}

/// A response that has not been sent. Dropping it deletes it.
pub struct Response(Kind);

enum Kind {
    Whole(RawResponse),
    /// For a row of a request that has several.
    Row {
        whole: Arc<Whole>,
        row: usize,
        outputs: Mutex<Vec<RowOutput>>,
    },
    /// For a step of a request of several: it is never sent.
    Step(Mutex<Vec<RowOutput>>),
    /// No response, only the flag that none follows.
    End(RawEnd),
}

/// Triton's response. Only this has parameters, and only this is recorded: a request of several rows has no sequence
/// step, and several ids, which stand only in output `sequence_id`.
struct RawResponse {
    raw: NonNull<TRITONBACKEND_Response>,
    /// Bytes of its outputs.
    bytes: Cell<usize>,
    /// What it contains, if [`Response::record`] was called.
    recorded: RefCell<Option<Box<Recorded>>>,
}

#[derive(Default)]
struct Recorded {
    /// Its outputs get their bytes in [`RawResponse::copy`].
    copy: ResponseCopy,
    /// The bytes of each output; a start of `None` is in memory of a GPU.
    memory: Vec<(Option<*const u8>, usize)>,
}

// SAFETY: Triton lets a response be sent or deleted by any thread; its owner does so from one at a time.
unsafe impl Send for RawResponse {}

/// The end of a request that gets no further response. Dropping it deletes it; only [`Response::send`] tells the
/// client.
struct RawEnd(NonNull<TRITONBACKEND_ResponseFactory>);

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

/// The request that its rows share. It is answered when the last row is, and released when it is dropped.
pub(super) struct Whole {
    raw: RawRequest,
    /// By row; `None` if the row has no answer yet, or the response has been made.
    answers: Mutex<Vec<Option<RowAnswer>>>,
}

/// The outputs of a row, or the error that it is answered with.
type RowAnswer = Result<Vec<RowOutput>, Error>;

impl RawRequest {
    pub const fn as_ptr(&self) -> *mut TRITONBACKEND_Request {
        self.0.as_ptr()
    }

    pub fn response(&self) -> Result<Response, Error> {
        let mut response = ptr::null_mut();
        // SAFETY: the request is alive until it is released; the response is handed over.
        unsafe { check(call!(TRITONBACKEND_ResponseNew(&mut response, self.0.as_ptr())))? };
        let raw = NonNull::new(response).ok_or_else(|| Error::new(Code::Internal, "Triton made no response"))?;
        Ok(Response(Kind::Whole(RawResponse { raw, bytes: Cell::new(0), recorded: RefCell::new(None) })))
    }

    /// The end of the request, if it gets no further response.
    pub fn end(&self) -> Result<Response, Error> {
        let mut factory = ptr::null_mut();
        // SAFETY: the request is alive until it is released; the factory is handed over.
        unsafe { check(call!(TRITONBACKEND_ResponseFactoryNew(&mut factory, self.0.as_ptr())))? };
        let raw = NonNull::new(factory).ok_or_else(|| Error::new(Code::Internal, "Triton made no factory"))?;
        Ok(Response(Kind::End(RawEnd(raw))))
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

impl Response {
    /// Takes the outputs of a step of a request of several.
    pub fn of_step() -> Self {
        Self(Kind::Step(Mutex::default()))
    }

    pub(super) fn of_row(whole: Arc<Whole>, row: usize) -> Self {
        Self(Kind::Row { whole, row, outputs: Mutex::default() })
    }

    /// The outputs that [`Response::of_step`] has taken; none of another response.
    pub fn take_outputs(&self) -> Vec<RowOutput> {
        if let Kind::Step(outputs) = &self.0 { std::mem::take(&mut outputs.lock()) } else { Vec::new() }
    }

    const fn whole(&self) -> Option<&RawResponse> {
        if let Kind::Whole(raw) = &self.0 { Some(raw) } else { None }
    }

    /// Notes what the response gets from now on, for [`Answer::copy`].
    pub fn record(&self) {
        self.whole().into_iter().for_each(|raw| *raw.recorded.borrow_mut() = Some(Box::default()));
    }

    pub fn byte_len(&self) -> usize {
        match &self.0 {
            Kind::Whole(raw) => raw.bytes.get(),
            Kind::Row { outputs, .. } | Kind::Step(outputs) => {
                outputs.lock().iter().map(|output| output.bytes.len()).sum()
            }
            Kind::End(_) => 0,
        }
    }

    /// Adds an output of `bytes` bytes and returns the memory for them, which lives as long as the response. No two
    /// calls return the same memory.
    pub fn output(
        &self,
        name: &CStr,
        data_type: DataType,
        dims: &[i64],
        bytes: usize,
    ) -> Result<OutputMemory<'_>, Error> {
        match &self.0 {
            Kind::Whole(raw) => raw.output(name, data_type, dims, bytes),
            Kind::End(_) => Err(Error::new(Code::Internal, "an answer without a response has no outputs")),
            Kind::Row { outputs, .. } | Kind::Step(outputs) => {
                let mut memory: Vec<u8> = zeros(bytes).map_err(no_memory)?;
                let start = memory.as_mut_ptr();
                outputs.lock().push(RowOutput { name: name.to_owned(), data_type, dims: dims.into(), bytes: memory });
                // SAFETY: the vector's memory stays where it is until the response is sent or dropped, which the borrow
                // of the response excludes. Until then nothing else reads or writes it.
                Ok(OutputMemory::Host(unsafe { ClientBytesMut::new(start, bytes) }))
            }
        }
    }

    /// Adds the id of the request's sequence as parameter `stateful_sequence_id`, if the server has parameters of
    /// responses. The parameter isn't called `sequence_id`, because in an ensemble it would then become the id of the
    /// next step's request.
    pub fn set_sequence_id(&self, id: &SequenceId) -> Result<(), Error> {
        let Some(RawResponse { raw, .. }) = self.whole() else { return Ok(()) };
        let (raw, name) = (raw.as_ptr(), c"stateful_sequence_id".as_ptr());
        unless_unsupported(match id {
            // SAFETY: the response is alive; the name lives as long as the program.
            SequenceId::Number(number) => unsafe {
                check(call!(TRITONBACKEND_ResponseSetIntParameter(raw, name, number.cast_signed())))
            },
            SequenceId::Name(_) => {
                let id = CString::new(id.to_bytes()).unwrap_or_default();
                // SAFETY: as above; the call copies the id.
                unsafe { check(call!(TRITONBACKEND_ResponseSetStringParameter(raw, name, id.as_ptr()))) }
            }
        })
    }

    /// Adds a number as a parameter, if the server has parameters of responses.
    pub fn set_number(&self, name: &CStr, number: usize) -> Result<(), Error> {
        let Some(response) = self.whole() else { return Ok(()) };
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        response.note(|of| of.copy.numbers.push((name.to_owned(), number)));
        let raw = response.raw.as_ptr();
        // SAFETY: the response is alive; the call copies the name.
        unless_unsupported(unsafe { check(call!(TRITONBACKEND_ResponseSetIntParameter(raw, name.as_ptr(), number))) })
    }

    pub fn set_flag(&self, name: &CStr, flag: bool) -> Result<(), Error> {
        let Some(response) = self.whole() else { return Ok(()) };
        response.note(|of| of.copy.flags.push((name.to_owned(), flag)));
        let raw = response.raw.as_ptr();
        // SAFETY: the response is alive; the call copies the name.
        unless_unsupported(unsafe { check(call!(TRITONBACKEND_ResponseSetBoolParameter(raw, name.as_ptr(), flag))) })
    }

    /// Sends a response that others follow. One that can't be sent is logged: the client misses it.
    pub fn send_part(self) {
        let sent = match self.0 {
            Kind::Whole(raw) => raw.send(None, false),
            _ => Err(Error::new(Code::Internal, "only a whole response can be followed by others")),
        };
        sent.unwrap_or_else(|error| log::error!("a response could not be sent: {error}"));
    }

    /// Sends it as the final response, with the error if there is one.
    pub(super) fn send(self, error: Option<Error>) -> Result<(), Error> {
        match self.0 {
            Kind::Whole(raw) => raw.send(error, true),
            Kind::End(RawEnd(ref raw)) => {
                let flags = triton_sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL;
                // SAFETY: the factory is alive until it is dropped.
                unsafe { check(call!(TRITONBACKEND_ResponseFactorySendFlags(raw.as_ptr(), flags))) }
            }
            Kind::Step(_) => Err(Error::new(Code::Internal, "the outputs of a step were to be sent")),
            Kind::Row { whole, row, outputs } => whole.answer(row, error.map_or_else(|| Ok(outputs.into_inner()), Err)),
        }
    }
}

impl RawResponse {
    fn note(&self, what: impl FnOnce(&mut Recorded)) {
        self.recorded.borrow_mut().as_deref_mut().map(what);
    }

    /// As [`Response::output`].
    fn output(&self, name: &CStr, data_type: DataType, dims: &[i64], bytes: usize) -> Result<OutputMemory<'_>, Error> {
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
        self.note(|of| {
            let (name, dims) = (name.to_owned(), dims.into());
            of.copy.outputs.push(RowOutput { name, data_type, dims, bytes: Vec::new() });
            of.memory.push((on_host.then_some(data.cast_const().cast()), bytes));
        });
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

    /// A copy of what was noted. `None` if nothing was noted, or if an output is in memory of a GPU.
    fn copy(&self) -> Option<ResponseCopy> {
        let Recorded { mut copy, memory } = *self.recorded.take()?;
        for (output, (start, bytes)) in copy.outputs.iter_mut().zip(memory) {
            output.bytes = reserve(bytes).ok()?;
            if bytes > 0 {
                // SAFETY: Triton allocated that many bytes, which live as long as the response. They have been written:
                // an instance makes an answer after that, and waits for its GPU before it hands the answer on.
                unsafe { ClientBytes::new(start?, bytes) }.append_to(&mut output.bytes);
            }
        }
        Some(copy)
    }

    /// Sends it, with the error if there is one. Nothing follows a response that is final.
    fn send(self, error: Option<Error>, is_final: bool) -> Result<(), Error> {
        let flags = if is_final { triton_sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL } else { 0 };
        let error = error.map_or(ptr::null_mut(), |error| error.for_answer().into_raw());
        // `ManuallyDrop` below drops no field, so this is freed here.
        drop(self.recorded.take());
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

impl Whole {
    pub fn new(raw: RawRequest, rows: usize) -> Arc<Self> {
        Arc::new(Self { raw, answers: Mutex::new((0..rows).map(|_| None).collect()) })
    }

    pub fn rows(&self) -> usize {
        self.answers.lock().len()
    }

    /// Takes the answer of a row. The last one sends the response: the outputs of all rows, or the first row's error.
    fn answer(&self, row: usize, answer: RowAnswer) -> Result<(), Error> {
        let mut answers = self.answers.lock();
        answers[row] = Some(answer);
        if answers.iter().any(Option::is_none) {
            return Ok(());
        }
        let named = |(row, answer): (usize, RowAnswer)| {
            answer.map_err(|Error { code, message }| Error::new(code, format!("{message} (row {row} of the request)")))
        };
        let rows: Result<Vec<_>, Error> = answers.iter_mut().flat_map(Option::take).enumerate().map(named).collect();
        // Sending calls into the front end of Triton, so it needs no lock held.
        drop(answers);
        self.send(rows)
    }

    /// Sends the response. Its outputs have the rows one after another, so rows of different shapes are an error.
    fn send(&self, rows: Result<Vec<Vec<RowOutput>>, Error>) -> Result<(), Error> {
        let response = self.raw.response()?;
        let filled = rows.and_then(|rows| {
            let first = rows.first().map_or(&[][..], Vec::as_slice);
            for (index, output) in first.iter().enumerate() {
                let outputs = rows.iter().filter_map(|row| row.get(index));
                let is_like = |of: &RowOutput| of.name == output.name && of.dims.get(1..) == output.dims.get(1..);
                if outputs.clone().filter(|of| is_like(of)).count() < rows.len() {
                    let name = output.name.to_string_lossy();
                    let text = format!(
                        "output '{name}' has rows of different shapes, which one response cannot carry; the rows have \
                         run: send sequences with such outputs in separate requests"
                    );
                    return Err(Error::new(Code::InvalidArg, text));
                }
                let mut dims = output.dims.clone();
                if let Some(batch) = dims.first_mut() {
                    // An END that is not inferred has no row.
                    *batch = outputs.clone().filter_map(|of| of.dims.first()).sum();
                }
                let bytes = outputs.clone().map(|of| of.bytes.len()).sum();
                match response.output(&output.name, output.data_type, &dims, bytes)? {
                    OutputMemory::Host(mut memory) => {
                        outputs.for_each(|of| memory.write(&of.bytes));
                        memory.finish();
                    }
                    OutputMemory::Gpu(memory) => {
                        let all: Vec<u8> = outputs.flat_map(|of| of.bytes.iter().copied()).collect();
                        for written in gpu_rows::write(vec![(memory, all.as_slice())]) {
                            written.map_err(|error| Error::new(Code::Unavailable, error.to_string()))?;
                        }
                    }
                }
            }
            Ok(())
        });
        response.send(filled.err())
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        self.raw.release();
    }
}

/// The answer to a request. Dropping it sends it.
pub struct Answer(pub(super) Option<(Response, Option<Error>)>);

impl Answer {
    /// Adds a number as a parameter; see [`Response::set_number`].
    pub fn set_number(&self, name: &CStr, number: u64) -> Result<(), Error> {
        match &self.0 {
            Some((response, None)) => response.set_number(name, usize::try_from(number).unwrap_or(usize::MAX)),
            _ => Ok(()),
        }
    }

    /// A copy of its response, if that was recorded. `None` also for an error, if the outputs have more bytes than
    /// `most`, and if an output is in memory of a GPU.
    pub fn copy(&self, most: usize) -> Option<ResponseCopy> {
        let (response, error) = self.0.as_ref()?;
        response.whole().filter(|_| error.is_none() && response.byte_len() <= most)?.copy()
    }

    pub fn is_error(&self) -> bool {
        matches!(self.0, Some((_, Some(_))))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(|(response, error)| response.send(error)) {
            log::error!("a response could not be sent: {error}");
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

/// Fails if there is not that much memory. Otherwise the front end's allocator would throw an exception, which would
/// end the server.
fn check_memory(bytes: usize) -> Result<(), Error> {
    const LARGE: usize = 1 << 20;
    if bytes < LARGE {
        return Ok(());
    }
    reserve::<u8>(bytes).map(drop).map_err(no_memory)
}

fn no_memory(error: NoMemory) -> Error {
    Error::new(Code::Unavailable, format!("no memory for an output: {error}"))
}

/// A name for Triton. No tensor's name has a NUL; one that had would become empty.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}
