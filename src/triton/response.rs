//! A response, until it is sent.

use std::ffi::{CStr, CString};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use gpu_rows::Foreign;
use parking_lot::Mutex;
use rows::client::ClientBytesMut;
use rows::reserve;
use rows::tensor::DataType;
use sequences::SequenceId;
use triton_sys::{TRITONBACKEND_Response, call};

use super::error::{Code, Error, check};
use super::rows::{RowOutput, Whole};
use super::types;

/// Where Triton wants an output.
pub enum OutputMemory<'a> {
    /// On the host.
    Host(ClientBytesMut<'a>),
    /// In memory of a GPU, such as a client's shared memory.
    Gpu(Foreign<'a>),
}

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
}

struct RawResponse(NonNull<TRITONBACKEND_Response>);

// SAFETY: Triton lets a response be sent or deleted by any thread; its owner does so from one at a time.
unsafe impl Send for RawResponse {}

/// Fails if there is not so much memory. Otherwise the front end's allocator would throw an exception, which would end
/// the server.
fn check_memory(bytes: usize) -> Result<(), Error> {
    const LARGE: usize = 1 << 20;
    if bytes < LARGE {
        return Ok(());
    }
    let had = reserve::<u8>(bytes);
    had.map(drop).map_err(|error| Error::new(Code::Unavailable, format!("no memory for an output: {error}")))
}

impl Response {
    /// # Safety
    /// `raw` must be a live response that nothing else sends or deletes.
    pub(super) const unsafe fn new(raw: NonNull<TRITONBACKEND_Response>) -> Self {
        Self(Kind::Whole(RawResponse(raw)))
    }

    pub(super) const fn of_row(whole: Arc<Whole>, row: usize) -> Self {
        Self(Kind::Row { whole, row, outputs: Mutex::new(Vec::new()) })
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
        check_memory(bytes)?;
        let raw = match &self.0 {
            Kind::Whole(raw) => raw.0.as_ptr(),
            Kind::Row { outputs, .. } => {
                let mut memory = reserve(bytes).map_err(|error| Error::new(Code::Unavailable, error.to_string()))?;
                memory.resize(bytes, 0u8);
                let start = memory.as_mut_ptr();
                outputs.lock().push(RowOutput { name: name.to_owned(), data_type, dims: dims.into(), bytes: memory });
                // SAFETY: the vector's memory stays where it is until the response is sent or dropped, which the borrow
                // of the response excludes. Until then nothing else reads or writes it.
                return Ok(OutputMemory::Host(unsafe { ClientBytesMut::new(start, bytes) }));
            }
        };
        let mut output = ptr::null_mut();
        let mut data = ptr::null_mut();
        let (mut memory, mut device) = (triton_sys::TRITONSERVER_MEMORY_CPU, 0);
        // SAFETY: the response is alive; name and dims live during the call, which copies them.
        unsafe {
            let data_type = types::raw_data_type(data_type);
            check(call!(TRITONBACKEND_ResponseOutput(
                raw,
                &mut output,
                name.as_ptr(),
                data_type,
                dims.as_ptr(),
                dims.len() as u32
            )))?;
            check(call!(TRITONBACKEND_OutputBuffer(output, &mut data, bytes as u64, &mut memory, &mut device)))?;
        }
        let on_host = memory != triton_sys::TRITONSERVER_MEMORY_GPU || bytes == 0;
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
        // A response with several ids has them only in output `sequence_id`.
        let Kind::Whole(RawResponse(raw)) = &self.0 else { return Ok(()) };
        let raw = raw.as_ptr();
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
        match set {
            Err(error) if error.code == Code::Unsupported => Ok(()),
            set => set,
        }
    }

    /// Sends it as the final response, with the error if there is one.
    pub(super) fn send(self, error: Option<Error>) -> Result<(), Error> {
        let raw = match self.0 {
            Kind::Whole(raw) => raw,
            Kind::Row { whole, row, outputs } => {
                return whole.answer(row, error.map_or_else(|| Ok(outputs.into_inner()), Err));
            }
        };
        let error = error.map_or(ptr::null_mut(), |error| error.for_answer().into_raw());
        let raw = ManuallyDrop::new(raw).0.as_ptr();
        // SAFETY: alive, and handed over; the error stays ours and is deleted after the call.
        unsafe {
            let sent =
                check(call!(TRITONBACKEND_ResponseSend(raw, triton_sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL, error)));
            if !error.is_null() {
                let _ = call!(TRITONSERVER_ErrorDelete(error));
            }
            sent
        }
    }
}

/// The answer to a request. Dropping it sends it.
pub struct Answer(Option<(Response, Option<Error>)>);

impl Answer {
    pub(super) const fn new(response: Response, error: Option<Error>) -> Self {
        Self(Some((response, error)))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(|(response, error)| response.send(error)) {
            log::error!("a response could not be sent: {error}");
        }
    }
}

impl Drop for RawResponse {
    fn drop(&mut self) {
        // SAFETY: alive and not sent, or `send` would not drop it.
        let deleted = unsafe { check(call!(TRITONBACKEND_ResponseDelete(self.0.as_ptr()))) };
        if let Err(error) = deleted {
            log::error!("a response could not be deleted: {}", error.message);
        }
    }
}
