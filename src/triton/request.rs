//! A request, from Execute to its release.

use std::ffi::{CStr, CString};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use rows::strings::{self, Strings};
use rows::tensor::{DataType, element_count};
use sequences::SequenceId;
use smallvec::SmallVec;
use triton_sys::{TRITONBACKEND_Request, call};

use super::error::{Code, Error, check, get};
use super::input::{
    Elements, HeldElements, HeldInput, Input, NotCopied, Piece, RawDims, RawInput, copy_buffers, copy_each, copy_part,
};
use super::response::{Answer, RawRequest, Response, Whole};

/// A request that this backend must answer and release.
///
/// Dropping it releases it, and first answers it with an error if it has no answer. So whatever happens to the code
/// that holds a request, its client gets one answer and Triton gets it back once.
pub struct Request {
    raw: RawRequest,
    answered: bool,
    /// Room for two, to keep a request small: a batch moves its requests, and with `oldest` each sequence may hold one.
    inputs: SmallVec<[Option<RawInput>; 2]>,
    /// Which row it is, of a request that has several.
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterValue<'a> {
    /// Of any length, and any bytes but NUL.
    Text(&'a [u8]),
    Int(i64),
    Bool(bool),
    Other,
}

/// A row of a request of several.
struct Part {
    whole: Arc<Whole>,
    row: usize,
}

impl Request {
    /// # Safety
    /// `raw` must be a live request that Execute was given and that nothing else answers or releases.
    pub unsafe fn new(raw: NonNull<TRITONBACKEND_Request>) -> Self {
        Self { raw: RawRequest(raw), answered: false, inputs: SmallVec::new(), part: None }
    }

    pub(super) const fn as_ptr(&self) -> *mut TRITONBACKEND_Request {
        self.raw.as_ptr()
    }

    /// The sequence that it belongs to; `None` for warm-up and for the null requests of `direct`.
    pub fn sequence_id(&self) -> Result<Option<SequenceId>, Error> {
        // Core answers only for the kind of id that the request has.
        // SAFETY: the request is alive until it is dropped.
        if let Ok(number) = unsafe { get!(TRITONBACKEND_RequestCorrelationId(self.as_ptr())) } {
            return Ok(Some(number).filter(|&number| number != 0).map(SequenceId::Number));
        }
        // SAFETY: as above; the name stays the request's and is copied.
        unsafe {
            let name = CStr::from_ptr(get!(TRITONBACKEND_RequestCorrelationIdString(self.as_ptr()))?).to_bytes();
            Ok((!name.is_empty()).then(|| SequenceId::Name(name.into())))
        }
    }

    pub fn start_and_end(&self) -> Result<(bool, bool), Error> {
        // SAFETY: the request is alive until it is dropped.
        let flags: u32 = unsafe { get!(TRITONBACKEND_RequestFlags(self.as_ptr())) }?;
        let has = |flag: u32| flags & flag != 0;
        Ok((
            has(triton_sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            has(triton_sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        ))
    }

    pub fn input_count(&self) -> Result<u32, Error> {
        // SAFETY: the request is alive until it is dropped.
        unsafe { get!(TRITONBACKEND_RequestInputCount(self.as_ptr())) }
    }

    pub fn output_count(&self) -> Result<u32, Error> {
        // SAFETY: the request is alive until it is dropped.
        unsafe { get!(TRITONBACKEND_RequestOutputCount(self.as_ptr())) }
    }

    pub fn output_name(&self, index: u32) -> Result<&str, Error> {
        // SAFETY: the request is alive until it is dropped, and the name with it.
        let name = unsafe { CStr::from_ptr(get!(TRITONBACKEND_RequestOutputName(self.as_ptr(), index))?) };
        name.to_str().map_err(|_| Error::new(Code::InvalidArg, "the name of a requested output is not UTF-8"))
    }

    /// Looks up the inputs with these names. Then [`Request::input`] finds them by their index here.
    pub fn bind_inputs(&mut self, names: &[CString]) -> Result<(), Error> {
        self.inputs.clear();
        for name in names {
            let input = self.find_input(name)?;
            self.inputs.push(input);
        }
        Ok(())
    }

    /// Splits a request of several rows into its rows. Each is answered like a request of its own. The client gets one
    /// answer when all rows have theirs: the rows of each output, or the first error.
    pub fn split(mut self, rows: usize) -> Vec<Self> {
        let whole = Whole::new(RawRequest(self.raw.0), rows);
        let part = |row| Some(Part { whole: whole.clone(), row });
        let others = (1..rows).map(|row| Self {
            raw: RawRequest(self.raw.0),
            answered: false,
            inputs: SmallVec::new(),
            part: part(row),
        });
        let others: Vec<_> = others.collect();
        self.part = part(0);
        std::iter::once(self).chain(others).collect()
    }

    /// Whether statistics count it. Of the rows of one request, only the first counts.
    pub(super) fn is_counted(&self) -> bool {
        self.part.as_ref().is_none_or(|part| part.row == 0)
    }

    /// Copies input number `index` to our own memory, so that its client can no longer change it.
    pub fn copy_input(&mut self, index: usize) -> Result<(), NotCopied> {
        let Some(Some(input)) = self.inputs.get_mut(index) else { return Ok(()) };
        if let Elements::Lent(buffers) = &input.elements {
            input.elements = Elements::Held(HeldElements::Bytes(Arc::new(copy_buffers(buffers)?)));
        }
        Ok(())
    }

    /// Copies inputs of several requests as [`Request::copy_input`] does, and waits once for each GPU that they are on.
    /// `inputs` has indices in `requests`, and of the input.
    pub fn copy_inputs(requests: &mut [&mut Self], inputs: &[(usize, usize)]) -> Vec<Result<(), NotCopied>> {
        let lent = |&(request, index): &(usize, usize)| match requests[request].inputs.get(index) {
            Some(Some(RawInput { elements: Elements::Lent(buffers), .. })) => buffers.as_slice(),
            _ => &[],
        };
        let copied = copy_each(inputs.iter().map(lent));
        let set = |(&(request, index), copied): (&(usize, usize), Result<Vec<u8>, NotCopied>)| {
            let copied = copied?;
            if let Some(Some(input)) = requests[request].inputs.get_mut(index)
                && matches!(input.elements, Elements::Lent(_))
            {
                input.elements = Elements::Held(HeldElements::Bytes(Arc::new(copied)));
            }
            Ok(())
        };
        inputs.iter().zip(copied).map(set).collect()
    }

    /// As [`Request::copy_input`], and reads the copy as strings. Returns their number; `None` if the bytes are not
    /// strings in Triton's form.
    pub fn read_strings(&mut self, index: usize) -> Result<Option<usize>, NotCopied> {
        self.copy_input(index)?;
        let Some(Some(RawInput { elements: Elements::Held(held), .. })) = self.inputs.get_mut(index) else {
            return Ok(None);
        };
        let read = match held {
            HeldElements::Strings(read) => return Ok(Some(read.len())),
            HeldElements::Bytes(bytes) => strings::read(bytes).map_err(NotCopied::Memory)?,
        };
        let count = read.as_ref().map(Strings::len);
        read.into_iter().for_each(|read| *held = HeldElements::Strings(Arc::new(read)));
        Ok(count)
    }

    /// Copies input number `index` to our own memory, and shares the copy. `None` if the request does not carry it.
    pub fn hold_input(&mut self, index: usize) -> Result<Option<HeldInput>, NotCopied> {
        self.copy_input(index)?;
        Ok(match self.inputs.get(index) {
            Some(Some(RawInput { data_type: Some(data_type), dims, elements: Elements::Held(elements) })) => {
                let (dims, elements) = (dims.as_slice().into(), elements.clone());
                Some(HeldInput { data_type: *data_type, dims, elements, charge: None })
            }
            _ => None,
        })
    }

    pub fn set_input(&mut self, index: usize, held: &HeldInput) {
        let HeldInput { data_type, dims, elements, .. } = held.clone();
        if let Some(input) = self.inputs.get_mut(index) {
            let (dims, elements) = (RawDims::Owned(dims), Elements::Held(elements));
            *input = Some(RawInput { data_type: Some(data_type), dims, elements });
        }
    }

    /// Input number `index` of those that were bound; `None` if the request does not carry it.
    pub fn input(&self, index: usize) -> Option<Input<'_>> {
        self.inputs.get(index).and_then(Option::as_ref).map(Input)
    }

    fn find_input(&self, name: &CStr) -> Result<Option<RawInput>, Error> {
        // SAFETY: the request is alive until it is dropped; the name lives during the call.
        let found = unsafe { get!(TRITONBACKEND_RequestInput(self.as_ptr(), name.as_ptr())) };
        // Core has an error for an input that the request does not carry.
        let Some(input) = found.ok().filter(|input| !input.is_null()) else { return Ok(None) };
        // SAFETY: the input belongs to this request, which keeps what is made of it.
        let input = unsafe { RawInput::new(input) }?;
        match &self.part {
            None => Ok(Some(input)),
            Some(part) => part.row_of(input).map(Some),
        }
    }

    pub const fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The custom parameters of the request that have these names. Nothing is read of others, which may be long. A
    /// server that has no such parameters gives none.
    pub fn parameters<'a>(&'a self, names: &'a [&'a str]) -> impl Iterator<Item = (&'a str, ParameterValue<'a>)> {
        // SAFETY: the request is alive until it is dropped.
        let count = unsafe { get!(TRITONBACKEND_RequestParameterCount(self.as_ptr())) };
        (0..count.unwrap_or(0)).filter_map(|index| self.parameter_at(index, names))
    }

    fn parameter_at<'a>(&'a self, index: u32, names: &[&'a str]) -> Option<(&'a str, ParameterValue<'a>)> {
        let (mut name, mut value) = (ptr::null(), ptr::null());
        let mut kind = triton_sys::TRITONSERVER_PARAMETER_STRING;
        // SAFETY: the request is alive, and name and value live with it. The value has the type that `kind` says.
        unsafe {
            check(call!(TRITONBACKEND_RequestParameter(self.as_ptr(), index, &mut name, &mut kind, &mut value)))
                .ok()?;
            let name = CStr::from_ptr(name).to_bytes();
            let name = names.iter().find(|known| known.as_bytes() == name)?;
            let value = match kind {
                triton_sys::TRITONSERVER_PARAMETER_STRING => {
                    ParameterValue::Text(CStr::from_ptr(value.cast()).to_bytes())
                }
                triton_sys::TRITONSERVER_PARAMETER_INT => ParameterValue::Int(*value.cast()),
                triton_sys::TRITONSERVER_PARAMETER_BOOL => ParameterValue::Bool(*value.cast()),
                _ => ParameterValue::Other,
            };
            Some((name, value))
        }
    }

    /// A string parameter of the request, which tests send.
    #[cfg(feature = "fault-injection")]
    pub fn parameter(&self, wanted: &str) -> Option<String> {
        let text = |value| if let ParameterValue::Text(text) = value { Some(text) } else { None };
        let wanted = [wanted];
        let found = self.parameters(&wanted).find_map(|(_, value)| text(value));
        found.map(|text| String::from_utf8_lossy(text).into_owned())
    }

    pub fn response(&self) -> Result<Response, Error> {
        match &self.part {
            Some(Part { whole, row }) => Ok(Response::of_row(whole.clone(), *row)),
            None => self.raw.response(),
        }
    }

    /// An answer without a response: only the flag that says that none follows.
    pub fn end(&self) -> Result<Response, Error> {
        match &self.part {
            Some(_) => self.response(),
            None => self.raw.end(),
        }
    }

    /// Releases a request that gets no answer.
    pub fn release_unanswered(mut self) {
        self.answered = true;
    }

    /// Its `timeout`; `None` if the client gave none, or the server cannot tell.
    pub fn timeout(&self) -> Option<Duration> {
        // SAFETY: the request is alive until it is dropped.
        let micros = unsafe { get!(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(self.as_ptr())) };
        micros.ok().filter(|&micros| micros > 0).map(Duration::from_micros)
    }

    /// Whether its client has cancelled it. False on a server that cannot tell.
    pub fn is_cancelled(&self) -> bool {
        // SAFETY: the request is alive until it is dropped.
        unsafe { get!(TRITONBACKEND_RequestIsCancelled(self.as_ptr())) }.unwrap_or(false)
    }

    pub const fn is_answered(&self) -> bool {
        self.answered
    }

    /// Makes an error the answer, in place of one that was made and has not been sent.
    pub fn fail_instead(&mut self, made: &mut Option<Answer>, error: Error) {
        if let Some(mut before) = made.take() {
            // Deletes the response. Otherwise dropping `before` would send it.
            before.0 = None;
            self.answered = false;
            *made = self.make_answer(Err(error));
        }
    }

    /// Makes the answer, which is sent when it is dropped. A second answer would be a bug: it is logged and not sent.
    pub fn make_answer(&mut self, answer: Result<Response, Error>) -> Option<Answer> {
        if std::mem::replace(&mut self.answered, true) {
            log::error!("a request was to be answered twice");
            return None;
        }
        let (response, error) = match answer {
            Ok(response) => (Ok(response), None),
            Err(error) => (self.response(), Some(error)),
        };
        response
            .map(|response| Answer(Some((response, error))))
            .inspect_err(|error| log::error!("a response could not be sent: {error}"))
            .ok()
    }
}

impl Part {
    /// Cuts the row out of an input of the whole request, and copies it. An input that has no such row is returned as
    /// it is: the check of its shape refuses it.
    fn row_of(&self, mut input: RawInput) -> Result<RawInput, Error> {
        let rows = self.whole.rows();
        let mut dims: Box<[i64]> = input.dims.as_slice().into();
        match dims.first_mut() {
            Some(batch) if *batch == rows as i64 => *batch = 1,
            _ => return Ok(input),
        }
        let Elements::Lent(buffers) = &input.elements else { return Ok(input) };
        let not_copied = |error| match error {
            NotCopied::Memory(error) => Error::new(Code::Unavailable, error.to_string()),
            NotCopied::Gpu(gpu, error) => {
                Error::new(Code::Unavailable, format!("an input in memory of GPU {gpu} cannot be read: {error}"))
            }
        };
        let row = if input.data_type == Some(DataType::Bytes) {
            let bytes = copy_buffers(buffers).map_err(not_copied)?;
            let each = element_count(&dims).unwrap_or(usize::MAX);
            // Without strings the row is empty, and the check of their number refuses it.
            let of_row = strings::elements(&bytes).skip(self.row.saturating_mul(each)).take(each);
            let of_row = of_row.collect::<Option<Vec<_>>>().unwrap_or_default();
            let mut row = vec![0; strings::written_bytes(of_row.iter().copied())];
            strings::write(of_row.iter().copied(), &mut row);
            row
        } else {
            let each = buffers.iter().map(Piece::byte_len).sum::<usize>() / rows;
            copy_part(buffers, self.row * each..(self.row + 1) * each).map_err(not_copied)?
        };
        (input.dims, input.elements) = (RawDims::Owned(dims), Elements::Held(HeldElements::Bytes(Arc::new(row))));
        Ok(input)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.answered {
            drop(self.make_answer(Err(Error::new(Code::Internal, "the backend lost this request; please report it"))));
        }
        // A request of several rows is released by its `Whole`.
        if self.part.is_none() {
            self.raw.release();
        }
    }
}
