//! A request, from Execute to its release.

use std::ffi::{CStr, CString};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use gpu_rows::{DeviceError, Foreign};
use rows::client::ClientBytes;
use rows::strings::{self, Strings};
use rows::tensor::DataType;
use rows::{NoMemory, reserve};
use sequences::SequenceId;
use smallvec::SmallVec;
use triton_sys::{TRITONBACKEND_Input, TRITONBACKEND_Request, call};

use super::error::{Code, Error, check};
use super::response::{Answer, Response};
use super::rows::{Part, Whole};
use super::types;
use crate::memory::Charge;

/// A request that this backend must answer and release.
///
/// Dropping it releases it, and first answers it with an error if it has no answer. So whatever happens to the code
/// that holds a request, its client gets one answer and Triton gets it back once.
pub struct Request {
    raw: RawRequest,
    answered: bool,
    inputs: SmallVec<[Option<RawInput>; 4]>,
    /// Which row it is, of a request that has several.
    part: Option<Part>,
}

pub(super) struct RawRequest(NonNull<TRITONBACKEND_Request>);

// SAFETY: Triton lets a request be answered and released by any thread; its owner does so from one at a time.
unsafe impl Send for RawRequest {}
// SAFETY: several threads may have rows of one request. They make calls that only read it. The response is made once,
// by the row that is answered last, and the release comes when no row is left.
unsafe impl Sync for RawRequest {}

/// An input's properties and elements.
pub(super) struct RawInput {
    pub(super) data_type: Option<DataType>,
    pub(super) dims: RawDims,
    pub(super) elements: Elements,
}

/// The dimensions of an input.
pub(super) enum RawDims {
    /// In an array that Triton lends.
    Lent(Lent<i64>),
    /// Those of a row.
    Owned(Box<[i64]>),
}

impl RawDims {
    pub(super) const fn as_slice(&self) -> &[i64] {
        match self {
            // SAFETY: Triton's own array, which nothing changes. It lives as long as the request, whose part this is.
            Self::Lent(Lent { start, len }) if *len > 0 => unsafe { std::slice::from_raw_parts(*start, *len) },
            Self::Lent(_) => &[],
            Self::Owned(dims) => dims,
        }
    }
}

/// Where the elements of an input are.
pub(super) enum Elements {
    /// In buffers that Triton lends.
    Lent(SmallVec<[Piece; 1]>),
    /// In our own memory, which the client cannot change.
    Owned(Arc<Vec<u8>>),
    /// In our own memory, as strings.
    Strings(Arc<Strings>),
}

/// An input that a sequence keeps for its next requests.
#[derive(Clone, Debug)]
pub struct HeldInput {
    pub data_type: DataType,
    /// As the client sent them.
    pub dims: Box<[i64]>,
    pub elements: HeldElements,
    /// Its part of what sequences may hold together; `None` until a sequence keeps it. Those that share the elements
    /// share this.
    pub charge: Option<Arc<Charge>>,
}

/// The elements of a [`HeldInput`].
#[derive(Clone, Debug)]
pub enum HeldElements {
    Bytes(Arc<Vec<u8>>),
    Strings(Arc<Strings>),
}

impl HeldInput {
    /// Bytes of its elements, with the lengths of strings.
    pub fn byte_len(&self) -> usize {
        match &self.elements {
            HeldElements::Bytes(bytes) => bytes.len(),
            HeldElements::Strings(read) => strings::written_bytes(read.iter()),
        }
    }
}

/// The value of a request parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterValue<'a> {
    /// Of any length, and any bytes but NUL.
    Text(&'a [u8]),
    Int(i64),
    Bool(bool),
    Other,
}

/// An array that Triton lends for the life of the request.
#[derive(Clone, Copy)]
pub(super) struct Lent<T> {
    start: *const T,
    len: usize,
}

// SAFETY: Triton lets any thread read what a request has, and nothing is written through the pointer.
unsafe impl<T> Send for Lent<T> {}

/// A buffer of an input.
pub(super) struct Piece {
    bytes: Lent<u8>,
    /// The GPU that has the memory; `None` for the host.
    gpu: Option<i32>,
}

/// Why an input cannot be copied to our own memory.
#[derive(Debug)]
pub enum NotCopied {
    /// It is in memory of this GPU, which cannot be read.
    Gpu(i32, DeviceError),
    Memory(NoMemory),
}

/// An input of a request.
#[derive(Clone, Copy)]
pub struct Input<'a>(&'a RawInput);

impl Request {
    /// # Safety
    /// `raw` must be a live request that Execute was given and that nothing else answers or releases.
    pub unsafe fn new(raw: NonNull<TRITONBACKEND_Request>) -> Self {
        Self { raw: RawRequest(raw), answered: false, inputs: SmallVec::new(), part: None }
    }

    pub(super) const fn as_ptr(&self) -> *mut TRITONBACKEND_Request {
        self.raw.0.as_ptr()
    }

    /// The sequence that it belongs to; `None` for warm-up and for the null requests of `direct`.
    pub fn sequence_id(&self) -> Result<Option<SequenceId>, Error> {
        let mut number = 0;
        // SAFETY: the request is alive until it is dropped.
        let by_number = unsafe { check(call!(TRITONBACKEND_RequestCorrelationId(self.as_ptr(), &mut number))) };
        if by_number.is_ok() {
            return Ok(Some(number).filter(|&number| number != 0).map(SequenceId::Number));
        }
        let mut name = ptr::null();
        // SAFETY: as above; the name stays the request's and is copied.
        unsafe {
            check(call!(TRITONBACKEND_RequestCorrelationIdString(self.as_ptr(), &mut name)))?;
            let name = CStr::from_ptr(name).to_bytes();
            Ok((!name.is_empty()).then(|| SequenceId::Name(name.into())))
        }
    }

    /// Whether it starts and whether it ends its sequence.
    pub fn start_and_end(&self) -> Result<(bool, bool), Error> {
        let mut flags = 0;
        // SAFETY: the request is alive until it is dropped.
        unsafe { check(call!(TRITONBACKEND_RequestFlags(self.as_ptr(), &mut flags)))? };
        let has = |flag: u32| flags & flag != 0;
        Ok((
            has(triton_sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            has(triton_sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        ))
    }

    /// The number of inputs that it carries.
    pub fn input_count(&self) -> Result<u32, Error> {
        let mut count = 0;
        // SAFETY: the request is alive until it is dropped.
        unsafe { check(call!(TRITONBACKEND_RequestInputCount(self.as_ptr(), &mut count)))? };
        Ok(count)
    }

    /// The number of outputs that its client wants.
    pub fn output_count(&self) -> Result<u32, Error> {
        let mut count = 0;
        // SAFETY: the request is alive until it is dropped.
        unsafe { check(call!(TRITONBACKEND_RequestOutputCount(self.as_ptr(), &mut count)))? };
        Ok(count)
    }

    /// The name of one of the outputs that its client wants.
    pub fn output_name(&self, index: u32) -> Result<&str, Error> {
        let mut name = ptr::null();
        // SAFETY: the request is alive until it is dropped, and the name with it.
        let name = unsafe {
            check(call!(TRITONBACKEND_RequestOutputName(self.as_ptr(), index, &mut name)))?;
            CStr::from_ptr(name)
        };
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
            input.elements = Elements::Owned(Arc::new(copy_buffers(buffers)?));
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
                input.elements = Elements::Owned(Arc::new(copied));
            }
            Ok(())
        };
        inputs.iter().zip(copied).map(set).collect()
    }

    /// As [`Request::copy_input`], and reads the copy as strings. Returns their number; `None` if the bytes are not
    /// strings in Triton's form.
    pub fn read_strings(&mut self, index: usize) -> Result<Option<usize>, NotCopied> {
        self.copy_input(index)?;
        let Some(Some(RawInput { elements, .. })) = self.inputs.get_mut(index) else { return Ok(None) };
        if let Elements::Owned(bytes) = elements {
            let Some(read) = strings::read(bytes).map_err(NotCopied::Memory)? else { return Ok(None) };
            *elements = Elements::Strings(Arc::new(read));
        }
        match elements {
            Elements::Strings(read) => Ok(Some(read.len())),
            Elements::Lent(_) | Elements::Owned(_) => Ok(None),
        }
    }

    /// Copies input number `index` to our own memory, and shares the copy. `None` if the request does not carry it.
    pub fn hold_input(&mut self, index: usize) -> Result<Option<HeldInput>, NotCopied> {
        self.copy_input(index)?;
        let Some(Some(RawInput { data_type: Some(data_type), dims, elements })) = self.inputs.get(index) else {
            return Ok(None);
        };
        let elements = match elements {
            Elements::Owned(bytes) => HeldElements::Bytes(bytes.clone()),
            Elements::Strings(read) => HeldElements::Strings(read.clone()),
            Elements::Lent(_) => return Ok(None),
        };
        Ok(Some(HeldInput { data_type: *data_type, dims: dims.as_slice().into(), elements, charge: None }))
    }

    /// Gives the request an input that it does not carry.
    pub fn set_input(&mut self, index: usize, held: &HeldInput) {
        let HeldInput { data_type, dims, elements, .. } = held.clone();
        let elements = match elements {
            HeldElements::Bytes(bytes) => Elements::Owned(bytes),
            HeldElements::Strings(read) => Elements::Strings(read),
        };
        if let Some(input) = self.inputs.get_mut(index) {
            *input = Some(RawInput { data_type: Some(data_type), dims: RawDims::Owned(dims), elements });
        }
    }

    /// Input number `index` of those that were bound; `None` if the request does not carry it.
    pub fn input(&self, index: usize) -> Option<Input<'_>> {
        self.inputs.get(index).and_then(Option::as_ref).map(Input)
    }

    fn find_input(&self, name: &CStr) -> Result<Option<RawInput>, Error> {
        let mut input = ptr::null_mut();
        // SAFETY: the request is alive until it is dropped; the name lives during the call.
        let found = unsafe { check(call!(TRITONBACKEND_RequestInput(self.as_ptr(), name.as_ptr(), &mut input))) };
        if found.is_err() || input.is_null() {
            return Ok(None);
        }
        let (mut data_type, mut dims, mut rank) = (triton_sys::TRITONSERVER_TYPE_INVALID, ptr::null(), 0);
        let (mut bytes, mut buffers) = (0, 0);
        // SAFETY: the input belongs to the request; a null name is not asked for.
        unsafe {
            let name = ptr::null_mut();
            check(call!(TRITONBACKEND_InputProperties(
                input,
                name,
                &mut data_type,
                &mut dims,
                &mut rank,
                &mut bytes,
                &mut buffers
            )))?;
        }
        // SAFETY: as above.
        let buffers = (0..buffers).map(|index| unsafe { input_buffer(input, index) }).collect::<Result<_, _>>()?;
        let dims = RawDims::Lent(Lent { start: dims, len: rank as usize });
        let input = RawInput { data_type: types::data_type(data_type), dims, elements: Elements::Lent(buffers) };
        match &self.part {
            None => Ok(Some(input)),
            Some(part) => part.row_of(input).map(Some),
        }
    }

    /// Whether it is one of the rows of a request that has several.
    pub const fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The custom parameters of the request that have these names. Nothing is read of others, which may be long. A server
    /// that has no such parameters gives none.
    pub fn parameters<'a>(&'a self, names: &'a [&'a str]) -> impl Iterator<Item = (&'a str, ParameterValue<'a>)> {
        let mut count = 0;
        // SAFETY: the request is alive until it is dropped.
        let counted = unsafe { check(call!(TRITONBACKEND_RequestParameterCount(self.as_ptr(), &mut count))) };
        (0..if counted.is_ok() { count } else { 0 }).filter_map(|index| self.parameter_at(index, names))
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

    /// An empty response to fill.
    pub fn response(&self) -> Result<Response, Error> {
        match &self.part {
            Some(Part { whole, row }) => Ok(Response::of_row(whole.clone(), *row)),
            None => self.raw.response(),
        }
    }

    /// Releases a request that gets no answer.
    pub fn release_unanswered(mut self) {
        self.answered = true;
    }

    /// Its `timeout`; `None` if the client gave none, or the server cannot tell.
    pub fn timeout(&self) -> Option<Duration> {
        let mut micros = 0;
        // SAFETY: the request is alive until it is dropped.
        let asked =
            unsafe { check(call!(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(self.as_ptr(), &mut micros))) };
        asked.ok().filter(|()| micros > 0).map(|()| Duration::from_micros(micros))
    }

    /// Whether its client has cancelled it. False on a server that cannot tell.
    pub fn is_cancelled(&self) -> bool {
        let mut cancelled = false;
        // SAFETY: the request is alive until it is dropped.
        let asked = unsafe { check(call!(TRITONBACKEND_RequestIsCancelled(self.as_ptr(), &mut cancelled))) };
        asked.is_ok() && cancelled
    }

    /// Whether its answer has been made.
    pub const fn is_answered(&self) -> bool {
        self.answered
    }

    /// Sends the answer.
    pub fn answer(&mut self, answer: Result<Response, Error>) {
        drop(self.make_answer(answer));
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
            .map(|response| Answer::new(response, error))
            .inspect_err(|error| log::error!("a response could not be sent: {error}"))
            .ok()
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Err(Error::new(Code::Internal, "the backend lost this request; please report it")));
        }
        if self.part.is_none() {
            self.raw.release();
        }
    }
}

impl RawRequest {
    pub(super) fn response(&self) -> Result<Response, Error> {
        let mut response = ptr::null_mut();
        // SAFETY: the request is alive until it is released; the response is handed over.
        unsafe {
            check(call!(TRITONBACKEND_ResponseNew(&mut response, self.0.as_ptr())))?;
            NonNull::new(response)
                .map(|raw| Response::new(raw))
                .ok_or_else(|| Error::new(Code::Internal, "Triton made no response"))
        }
    }

    /// To be called once, when nothing uses the request any more.
    pub(super) fn release(&self) {
        // SAFETY: alive until now and never used again.
        let released = unsafe {
            check(call!(TRITONBACKEND_RequestRelease(self.0.as_ptr(), triton_sys::TRITONSERVER_REQUEST_RELEASE_ALL)))
        };
        if let Err(error) = released {
            log::error!("a request could not be released: {error}");
        }
    }
}

/// A buffer of an input.
///
/// # Safety
/// `input` must be alive.
unsafe fn input_buffer(input: *mut TRITONBACKEND_Input, index: u32) -> Result<Piece, Error> {
    let (mut data, mut bytes) = (ptr::null(), 0);
    let (mut memory, mut device) = (triton_sys::TRITONSERVER_MEMORY_CPU, 0);
    // SAFETY: the caller promises that the input is alive.
    unsafe { check(call!(TRITONBACKEND_InputBuffer(input, index, &mut data, &mut bytes, &mut memory, &mut device)))? };
    let gpu = (memory == triton_sys::TRITONSERVER_MEMORY_GPU).then_some(device as i32);
    Ok(Piece { bytes: Lent { start: data.cast(), len: bytes as usize }, gpu })
}

/// Copies buffers, one after another, to our own memory.
pub(super) fn copy_buffers(buffers: &[Piece]) -> Result<Vec<u8>, NotCopied> {
    copy_each([buffers].into_iter()).pop().unwrap_or(Ok(Vec::new()))
}

/// Copies the buffers of each list, one after another, to memory of our own. Those on GPUs are copied together.
fn copy_each<'p>(lists: impl Iterator<Item = &'p [Piece]> + Clone) -> Vec<Result<Vec<u8>, NotCopied>> {
    let is_on_gpu = |list: &[Piece]| list.iter().any(|piece| piece.on_gpu().is_some());
    let copy_or_make_room = |list: &[Piece]| {
        let bytes = list.iter().map(Piece::byte_len).fold(0, usize::saturating_add);
        let mut copied = reserve(bytes).map_err(NotCopied::Memory)?;
        if is_on_gpu(list) {
            copied.resize(bytes, 0);
        } else {
            list.iter().for_each(|piece| piece.on_host().append_to(&mut copied));
        }
        Ok(copied)
    };
    let mut copied: Vec<_> = lists.clone().map(copy_or_make_room).collect();
    let (mut of_lists, mut on_gpus) = (Vec::new(), Vec::new());
    for (index, (list, copied)) in lists.zip(&mut copied).enumerate().filter(|(_, (list, _))| is_on_gpu(list)) {
        let Ok(copied) = copied else { continue };
        let mut rest = copied.as_mut_slice();
        for piece in list {
            let (to, behind) = rest.split_at_mut(piece.byte_len());
            rest = behind;
            match piece.on_gpu() {
                Some(on_gpu) => {
                    of_lists.push((index, on_gpu.gpu()));
                    on_gpus.push((on_gpu, to));
                }
                None => piece.on_host().copy_to(to),
            }
        }
    }
    for ((index, gpu), fetched) in of_lists.into_iter().zip(gpu_rows::fetch(on_gpus)) {
        if let Err(error) = fetched {
            copied[index] = Err(NotCopied::Gpu(gpu, error));
        }
    }
    copied
}

/// Copies a range of the bytes of buffers, one after another.
pub(super) fn copy_part(buffers: &[Piece], range: Range<usize>) -> Result<Vec<u8>, NotCopied> {
    if buffers.iter().any(|piece| piece.on_gpu().is_some()) {
        return copy_buffers(buffers).map(|bytes| bytes.get(range).unwrap_or_default().to_vec());
    }
    let mut copied = reserve(range.len()).map_err(NotCopied::Memory)?;
    let mut before = 0;
    for piece in buffers {
        let end = before + piece.byte_len();
        let part = range.start.clamp(before, end) - before..range.end.clamp(before, end) - before;
        piece.on_host().part(part).append_to(&mut copied);
        before = end;
    }
    Ok(copied)
}

impl Piece {
    pub(super) const fn byte_len(&self) -> usize {
        self.bytes.len
    }

    /// Where it is, if it is on a GPU. The memory lives as long as the request, whose part this is.
    fn on_gpu(&self) -> Option<Foreign<'_>> {
        let (gpu, Lent { start, len }) = (self.gpu?, self.bytes);
        // SAFETY: Triton keeps these bytes on that GPU until the request is released, and the request owns this piece.
        (len > 0).then(|| unsafe { Foreign::new(gpu, start.expose_provenance() as u64, len) })
    }

    /// Its bytes on the host. Panics if they are on a GPU.
    fn on_host(&self) -> ClientBytes<'_> {
        let Lent { start, len } = self.bytes;
        assert!(self.gpu.is_none() || len == 0, "an input in memory of a GPU is read on the host");
        // SAFETY: Triton keeps these bytes on the host until the request is released, and the request owns this piece.
        unsafe { ClientBytes::new(start, len) }
    }
}

impl<'a> Input<'a> {
    /// `None` if Triton names no type.
    pub const fn data_type(self) -> Option<DataType> {
        self.0.data_type
    }

    /// With Triton's batch dimension first, if the model has one.
    pub const fn dims(self) -> &'a [i64] {
        self.0.dims.as_slice()
    }

    /// The bytes of the elements, in as many pieces as Triton has them; none if they have been read as strings. Panics
    /// if a piece is on a GPU and has not been copied to the host.
    pub fn pieces(self) -> impl Iterator<Item = ClientBytes<'a>> + Clone {
        let (lent, owned) = match &self.0.elements {
            Elements::Lent(buffers) => (buffers.as_slice(), None),
            Elements::Owned(bytes) => (&[][..], Some(bytes.as_slice().into())),
            Elements::Strings(_) => (&[][..], None),
        };
        lent.iter().map(Piece::on_host).chain(owned)
    }

    /// The elements, if they have been read as strings.
    pub fn strings(self) -> Option<&'a Strings> {
        match &self.0.elements {
            Elements::Strings(read) => Some(read),
            Elements::Lent(_) | Elements::Owned(_) => None,
        }
    }

    /// Whether both have been copied and have the same elements. Elements that a client can still change are never the
    /// same.
    pub fn is_same(self, other: Self) -> bool {
        match (&self.0.elements, &other.0.elements) {
            (Elements::Owned(one), Elements::Owned(other)) => one == other,
            (Elements::Strings(one), Elements::Strings(other)) => one == other,
            _ => false,
        }
    }

    /// Where the elements are, if they are together in memory of a GPU.
    pub fn on_gpu(self) -> Option<Foreign<'a>> {
        match &self.0.elements {
            Elements::Lent(buffers) if buffers.len() == 1 => buffers[0].on_gpu(),
            _ => None,
        }
    }

    /// Whether any of the elements are in memory of a GPU.
    pub fn is_on_gpus(self) -> bool {
        matches!(&self.0.elements, Elements::Lent(buffers) if buffers.iter().any(|piece| piece.on_gpu().is_some()))
    }

    /// Bytes of all pieces together.
    pub fn bytes(self) -> usize {
        match &self.0.elements {
            Elements::Lent(buffers) => buffers.iter().map(|piece| piece.bytes.len).sum(),
            Elements::Owned(bytes) => bytes.len(),
            Elements::Strings(read) => strings::written_bytes(read.iter()),
        }
    }
}

/// A name for Triton. No tensor's name has a NUL; one that had would become empty.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}
