//! A response, until it is sent.

use std::ffi::CStr;
use std::sync::Arc;

use parking_lot::Mutex;
use rows::client::ClientBytesMut;
use rows::reserve;
use rows::tensor::DataType;
use sequences::SequenceId;

use super::error::{Code, Error};
use super::raw::{OutputMemory, RawEnd, RawResponse, ResponseCopy, RowOutput, no_memory};
use super::rows::Whole;

/// A response that has not been sent. Dropping it deletes it.
pub struct Response(pub(super) Kind);

pub(super) enum Kind {
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

impl Response {
    /// Takes the outputs of a step of a request of several.
    pub fn of_step() -> Self {
        Self(Kind::Step(Mutex::new(Vec::new())))
    }

    /// The outputs that [`Response::of_step`] has taken; none of another response.
    pub fn take_outputs(&self) -> Vec<RowOutput> {
        match &self.0 {
            Kind::Step(outputs) => std::mem::take(&mut outputs.lock()),
            Kind::Whole(_) | Kind::Row { .. } | Kind::End(_) => Vec::new(),
        }
    }

    /// Triton's response. Only this has parameters, and only this is recorded: a request of several rows has no sequence step,
    /// and several ids, which stand only in output `sequence_id`.
    const fn whole(&self) -> Option<&RawResponse> {
        if let Kind::Whole(raw) = &self.0 { Some(raw) } else { None }
    }

    /// Notes what the response gets from now on, for [`Answer::copy`].
    pub fn record(&self) {
        self.whole().into_iter().for_each(RawResponse::record);
    }

    pub fn byte_len(&self) -> usize {
        match &self.0 {
            Kind::Whole(raw) => raw.byte_len(),
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
                let mut memory = reserve(bytes).map_err(no_memory)?;
                memory.resize(bytes, 0u8);
                let start = memory.as_mut_ptr();
                outputs.lock().push(RowOutput { name: name.to_owned(), data_type, dims: dims.into(), bytes: memory });
                // SAFETY: the vector's memory stays where it is until the response is sent or dropped, which the borrow
                // of the response excludes. Until then nothing else reads or writes it.
                Ok(OutputMemory::Host(unsafe { ClientBytesMut::new(start, bytes) }))
            }
        }
    }

    /// Adds the id of the request's sequence, if the server has parameters of responses.
    pub fn set_sequence_id(&self, id: &SequenceId) -> Result<(), Error> {
        self.whole().map_or(Ok(()), |raw| raw.set_sequence_id(id))
    }

    /// Adds a number as a parameter, if the server has parameters of responses.
    pub fn set_number(&self, name: &CStr, number: usize) -> Result<(), Error> {
        self.whole().map_or(Ok(()), |raw| raw.set_number(name, i64::try_from(number).unwrap_or(i64::MAX)))
    }

    pub fn set_flag(&self, name: &CStr, flag: bool) -> Result<(), Error> {
        self.whole().map_or(Ok(()), |raw| raw.set_flag(name, flag))
    }

    pub(super) fn send_part(self) -> Result<(), Error> {
        match self.0 {
            Kind::Whole(raw) => raw.send(None, false),
            _ => Err(Error::new(Code::Internal, "only a whole response can be followed by others")),
        }
    }

    /// Sends it as the final response, with the error if there is one.
    pub(super) fn send(self, error: Option<Error>) -> Result<(), Error> {
        match self.0 {
            Kind::Whole(raw) => raw.send(error, true),
            Kind::End(raw) => raw.send(),
            Kind::Step(_) => Err(Error::new(Code::Internal, "the outputs of a step were to be sent")),
            Kind::Row { whole, row, outputs } => whole.answer(row, error.map_or_else(|| Ok(outputs.into_inner()), Err)),
        }
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

    /// A copy of its response, if that was recorded. `None` also for an error, if its outputs have more bytes than `most`, and if
    /// one is in memory of a GPU.
    pub fn copy(&self, most: usize) -> Option<ResponseCopy> {
        let (response, error) = self.0.as_ref()?;
        response.whole().filter(|raw| error.is_none() && raw.byte_len() <= most)?.copy()
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
