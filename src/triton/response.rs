//! A response, until it is sent.

use std::ffi::CStr;
use std::ptr::{self, NonNull};

use triton_sys::{TRITONBACKEND_Response, call};

use super::error::{Code, Error, check};
use super::types;
use crate::memory::device::Foreign;
use crate::memory::{ClientBytesMut, reserve};
use crate::tensor::DataType;

/// Where Triton wants an output.
pub enum OutputMemory<'a> {
    /// On the host.
    Host(ClientBytesMut<'a>),
    /// In memory of a GPU, such as a client's shared memory.
    Gpu(Foreign<'a>),
}

/// A response that has not been sent. Dropping it deletes it.
pub struct Response(NonNull<TRITONBACKEND_Response>);

// SAFETY: Triton lets a response be sent or deleted by any thread; its owner does so from one at a time.
unsafe impl Send for Response {}

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
        Self(raw)
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
        let mut output = ptr::null_mut();
        let mut data = ptr::null_mut();
        let (mut memory, mut device) = (triton_sys::TRITONSERVER_MEMORY_CPU, 0);
        // SAFETY: the response is alive; name and dims live during the call, which copies them.
        unsafe {
            let (raw, data_type) = (self.0.as_ptr(), types::raw_data_type(data_type));
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

    /// Sends it as the final response, with the error if there is one.
    fn send(self, error: Option<Error>) -> Result<(), Error> {
        let error = error.map_or(ptr::null_mut(), Error::into_raw);
        let raw = self.0.as_ptr();
        std::mem::forget(self);
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

impl Drop for Response {
    fn drop(&mut self) {
        // SAFETY: alive and not sent, or `send` would have forgotten it.
        let deleted = unsafe { check(call!(TRITONBACKEND_ResponseDelete(self.0.as_ptr()))) };
        if let Err(error) = deleted {
            log::error!("a response could not be deleted: {}", error.message);
        }
    }
}
