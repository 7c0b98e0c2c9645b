//! A request, from Execute to its release.

use std::ffi::{CStr, CString};
use std::ptr::{self, NonNull};

use smallvec::SmallVec;
use triton_sys::{TRITONBACKEND_Input, TRITONBACKEND_Request, call};

use super::error::{Code, Error, check};
use super::response::{Answer, Response};
use super::types;
use crate::memory::device::{DeviceError, Foreign};
use crate::memory::{MemoryError, Strings, reserve, strings};
use crate::sequence::SequenceId;
use crate::tensor::DataType;

/// A request that this backend owes an answer and a release.
///
/// Dropping releases it, and answers it with an error first if it has had no answer: whatever happens to the code that
/// holds a request, the client hears of it once and Triton gets it back once.
pub struct Request {
    raw: NonNull<TRITONBACKEND_Request>,
    answered: bool,
    inputs: SmallVec<[Option<RawInput>; 4]>,
}

// SAFETY: Triton lets a request be answered and released by any thread; this owner does so from one at a time.
unsafe impl Send for Request {}

/// An input's properties and buffers, as Triton lends them for the life of the request.
struct RawInput {
    data_type: Option<DataType>,
    dims: (*const i64, usize),
    buffers: SmallVec<[Piece; 1]>,
}

/// A buffer of an input.
struct Piece {
    data: *const u8,
    bytes: usize,
    /// The GPU whose memory it is.
    gpu: Option<i32>,
    /// Its bytes, when they have been brought from a GPU.
    fetched: Option<Box<[u8]>>,
}

/// An input of a request.
#[derive(Clone, Copy)]
pub struct Input<'a>(&'a RawInput);

impl Request {
    /// # Safety
    /// `raw` must be a live request that Execute was given, not answered and not released by anybody else.
    pub unsafe fn new(raw: NonNull<TRITONBACKEND_Request>) -> Self {
        Self { raw, answered: false, inputs: SmallVec::new() }
    }

    pub(super) const fn as_ptr(&self) -> *mut TRITONBACKEND_Request {
        self.raw.as_ptr()
    }

    /// The sequence that it belongs to; `None` for warm-up and for the fillers of `direct`.
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

    /// Number of outputs that are wanted.
    pub fn output_count(&self) -> Result<u32, Error> {
        let mut count = 0;
        // SAFETY: the request is alive until it is dropped.
        unsafe { check(call!(TRITONBACKEND_RequestOutputCount(self.as_ptr(), &mut count)))? };
        Ok(count)
    }

    /// Name of the output that is wanted at `index`.
    pub fn output_name(&self, index: u32) -> Result<&str, Error> {
        let mut name = ptr::null();
        // SAFETY: the request is alive until it is dropped, and the name with it.
        let name = unsafe {
            check(call!(TRITONBACKEND_RequestOutputName(self.as_ptr(), index, &mut name)))?;
            CStr::from_ptr(name)
        };
        name.to_str().map_err(|_| Error::new(Code::InvalidArg, "the name of a requested output is not UTF-8"))
    }

    /// Looks up the inputs that the model takes, in this order; [`Request::input`] then finds them by position.
    pub fn bind_inputs(&mut self, names: &[CString]) -> Result<(), Error> {
        self.inputs.clear();
        for name in names {
            let input = self.find_input(name)?;
            self.inputs.push(input);
        }
        Ok(())
    }

    /// Brings to the host what of input number `index` lies in memory of GPUs. An error comes with the GPU's number.
    pub fn fetch_input(&mut self, index: usize) -> Result<(), (i32, DeviceError)> {
        let Some(Some(input)) = self.inputs.get_mut(index) else { return Ok(()) };
        for piece in &mut input.buffers {
            if let Some(on_gpu) = piece.on_gpu() {
                let mut bytes = vec![0; piece.bytes].into_boxed_slice();
                on_gpu.read(&mut bytes).map_err(|error| (on_gpu.gpu(), error))?;
                piece.fetched = Some(bytes);
            }
        }
        Ok(())
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
        Ok(Some(RawInput { data_type: types::data_type(data_type), dims: (dims, rank as usize), buffers }))
    }

    /// A string parameter of the request, such as tests send.
    #[cfg(feature = "fault-injection")]
    pub fn parameter(&self, wanted: &str) -> Option<String> {
        let mut count = 0;
        // SAFETY: the request is alive; names and values live with it and are copied.
        unsafe {
            check(call!(TRITONBACKEND_RequestParameterCount(self.as_ptr(), &mut count))).ok()?;
            for index in 0..count {
                let (mut name, mut value) = (ptr::null(), ptr::null());
                let mut kind = triton_sys::TRITONSERVER_PARAMETER_STRING;
                check(call!(TRITONBACKEND_RequestParameter(self.as_ptr(), index, &mut name, &mut kind, &mut value)))
                    .ok()?;
                if CStr::from_ptr(name).to_bytes() == wanted.as_bytes()
                    && kind == triton_sys::TRITONSERVER_PARAMETER_STRING
                {
                    return Some(CStr::from_ptr(value.cast()).to_string_lossy().into_owned());
                }
            }
        }
        None
    }

    /// An empty response to fill.
    pub fn response(&self) -> Result<Response, Error> {
        let mut response = ptr::null_mut();
        // SAFETY: the request is alive until it is dropped; the response is handed over.
        unsafe {
            check(call!(TRITONBACKEND_ResponseNew(&mut response, self.as_ptr())))?;
            NonNull::new(response)
                .map(|raw| Response::new(raw))
                .ok_or_else(|| Error::new(Code::Internal, "Triton made no response"))
        }
    }

    /// Gives back a request that wants no answer.
    pub fn release_unanswered(mut self) {
        self.answered = true;
    }

    /// Whether its client does not want the answer any more; a server that cannot tell says no.
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

    /// Sends the one answer. A second one is a mistake of ours and goes nowhere.
    pub fn answer(&mut self, answer: Result<Response, Error>) {
        drop(self.make_answer(answer));
    }

    /// The one answer, to be sent. A second one is a mistake of ours; there is none.
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
        // SAFETY: alive until now and never used again.
        let released = unsafe {
            check(call!(TRITONBACKEND_RequestRelease(self.as_ptr(), triton_sys::TRITONSERVER_REQUEST_RELEASE_ALL)))
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
    // SAFETY: alive by the caller's word.
    unsafe { check(call!(TRITONBACKEND_InputBuffer(input, index, &mut data, &mut bytes, &mut memory, &mut device)))? };
    let gpu = (memory == triton_sys::TRITONSERVER_MEMORY_GPU).then_some(device as i32);
    Ok(Piece { data: data.cast(), bytes: bytes as usize, gpu, fetched: None })
}

impl Piece {
    /// Where it is, if it is on a GPU and nowhere else.
    fn on_gpu(&self) -> Option<Foreign> {
        let gpu = self.gpu.filter(|_| self.fetched.is_none() && self.bytes > 0)?;
        // SAFETY: Triton vouches for that many bytes of that GPU, alive as long as the request.
        Some(unsafe { Foreign::new(gpu, self.data.expose_provenance() as u64, self.bytes) })
    }
}

impl<'a> Input<'a> {
    /// Element type; `None` for one that Triton does not name.
    pub const fn data_type(self) -> Option<DataType> {
        self.0.data_type
    }

    /// Dimensions, Triton's batch dimension first if the model has one.
    pub const fn dims(self) -> &'a [i64] {
        let (dims, rank) = self.0.dims;
        // SAFETY: Triton's array of that rank, alive as long as the request, which 'a borrows.
        if rank == 0 { &[] } else { unsafe { std::slice::from_raw_parts(dims, rank) } }
    }

    /// The elements' bytes, in as many pieces as Triton has them. Panics on one that is on a GPU and has not been
    /// brought to the host.
    pub fn pieces(self) -> impl Iterator<Item = &'a [u8]> {
        self.0.buffers.iter().map(|piece| match (&piece.fetched, piece.bytes) {
            (Some(fetched), _) => fetched,
            (None, 0) => &[][..],
            (None, bytes) => {
                assert!(piece.gpu.is_none(), "an input in memory of a GPU is read on the host");
                // SAFETY: Triton vouches for that many bytes of host memory, alive as long as the request.
                unsafe { std::slice::from_raw_parts(piece.data, bytes) }
            }
        })
    }

    /// The elements as strings; `None` if they are not of Triton's form.
    pub fn strings(self) -> Result<Option<Strings>, MemoryError> {
        let mut whole = reserve(self.bytes())?;
        self.pieces().for_each(|piece| whole.extend_from_slice(piece));
        strings::read(&whole)
    }

    /// Where the elements are, if they are together in memory of a GPU and nowhere else.
    pub fn on_gpu(self) -> Option<Foreign> {
        match self.0.buffers.as_slice() {
            [piece] => piece.on_gpu(),
            _ => None,
        }
    }

    /// Whether some of the elements are in memory of a GPU and nowhere else.
    pub fn is_on_gpus(self) -> bool {
        self.0.buffers.iter().any(|piece| piece.on_gpu().is_some())
    }

    /// Bytes of all pieces together.
    pub fn bytes(self) -> usize {
        self.0.buffers.iter().map(|piece| piece.bytes).sum()
    }
}

/// A name as Triton takes it; one with a NUL, which no tensor can have, becomes empty.
pub fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}
