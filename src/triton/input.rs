//! An input of a request: its type, where Triton or a client has its elements, and copies of them in our own memory.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use gpu_rows::{DeviceError, Foreign};
use rows::client::ClientBytes;
use rows::strings::{self, Strings};
use rows::tensor::DataType;
use rows::{NoMemory, reserve};
use smallvec::SmallVec;
use triton_sys::{TRITONBACKEND_Input, TRITONSERVER_DataType, call};

use super::error::{Error, check};
use crate::memory::Charge;

const TYPES: [(DataType, TRITONSERVER_DataType); 14] = [
    (DataType::Bool, triton_sys::TRITONSERVER_TYPE_BOOL),
    (DataType::Uint8, triton_sys::TRITONSERVER_TYPE_UINT8),
    (DataType::Uint16, triton_sys::TRITONSERVER_TYPE_UINT16),
    (DataType::Uint32, triton_sys::TRITONSERVER_TYPE_UINT32),
    (DataType::Uint64, triton_sys::TRITONSERVER_TYPE_UINT64),
    (DataType::Int8, triton_sys::TRITONSERVER_TYPE_INT8),
    (DataType::Int16, triton_sys::TRITONSERVER_TYPE_INT16),
    (DataType::Int32, triton_sys::TRITONSERVER_TYPE_INT32),
    (DataType::Int64, triton_sys::TRITONSERVER_TYPE_INT64),
    (DataType::Fp16, triton_sys::TRITONSERVER_TYPE_FP16),
    (DataType::Fp32, triton_sys::TRITONSERVER_TYPE_FP32),
    (DataType::Fp64, triton_sys::TRITONSERVER_TYPE_FP64),
    (DataType::Bytes, triton_sys::TRITONSERVER_TYPE_BYTES),
    (DataType::Bf16, triton_sys::TRITONSERVER_TYPE_BF16),
];

fn data_type(raw: TRITONSERVER_DataType) -> Option<DataType> {
    TYPES.iter().find(|(_, known)| *known == raw).map(|(data_type, _)| *data_type)
}

pub(super) fn raw_data_type(data_type: DataType) -> TRITONSERVER_DataType {
    TYPES.iter().find(|(known, _)| *known == data_type).map_or(triton_sys::TRITONSERVER_TYPE_INVALID, |(_, raw)| *raw)
}

pub(super) struct RawInput {
    pub(super) data_type: Option<DataType>,
    pub(super) dims: RawDims,
    pub(super) elements: Elements,
}

impl RawInput {
    /// # Safety
    /// `input` must be alive, and the request that it belongs to must outlive this.
    pub unsafe fn new(input: *mut TRITONBACKEND_Input) -> Result<Self, Error> {
        let (mut data_type, mut dims, mut rank) = (triton_sys::TRITONSERVER_TYPE_INVALID, ptr::null(), 0);
        let (mut bytes, mut buffers) = (0, 0);
        // SAFETY: the caller promises that the input is alive; a null name is not asked for.
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
        Ok(Self { data_type: self::data_type(data_type), dims, elements: Elements::Lent(buffers) })
    }
}

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

pub(super) enum Elements {
    Lent(SmallVec<[Piece; 1]>),
    /// In our own memory, which the client cannot change.
    Held(HeldElements),
}

/// An input that a sequence keeps for its next requests.
#[derive(Clone, Debug)]
pub struct HeldInput {
    pub data_type: DataType,
    pub dims: Box<[i64]>,
    pub elements: HeldElements,
    /// Its part of what sequences may hold together; `None` until a sequence keeps it. Those that share the elements
    /// share this.
    pub charge: Option<Arc<Charge>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldElements {
    Bytes(Arc<Vec<u8>>),
    Strings(Arc<Strings>),
}

impl HeldElements {
    /// With the lengths of strings.
    pub fn byte_len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Strings(read) => strings::written_bytes(read.iter()),
        }
    }
}

/// An array that Triton lends for the life of the request.
#[derive(Clone, Copy)]
pub(super) struct Lent<T> {
    start: *const T,
    len: usize,
}

// SAFETY: Triton lets any thread read what a request has, and nothing is written through the pointer.
unsafe impl<T> Send for Lent<T> {}

pub(super) struct Piece {
    bytes: Lent<u8>,
    /// The GPU that has the memory; `None` for the host.
    gpu: Option<i32>,
}

/// Why an input cannot be copied to our own memory.
#[derive(Debug)]
pub enum NotCopied {
    Gpu(i32, DeviceError),
    Memory(NoMemory),
}

#[derive(Clone, Copy)]
pub struct Input<'a>(pub(super) &'a RawInput);

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
pub(super) fn copy_each<'p>(lists: impl Iterator<Item = &'p [Piece]> + Clone) -> Vec<Result<Vec<u8>, NotCopied>> {
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
            Elements::Held(HeldElements::Bytes(bytes)) => (&[][..], Some(bytes.as_slice().into())),
            Elements::Held(HeldElements::Strings(_)) => (&[][..], None),
        };
        lent.iter().map(Piece::on_host).chain(owned)
    }

    /// The elements, if they have been read as strings.
    pub fn strings(self) -> Option<&'a Strings> {
        if let Elements::Held(HeldElements::Strings(read)) = &self.0.elements { Some(read) } else { None }
    }

    /// Whether both have been copied and have the same elements. Elements that a client can still change are never the
    /// same.
    pub fn is_same(self, other: Self) -> bool {
        matches!((&self.0.elements, &other.0.elements), (Elements::Held(one), Elements::Held(other)) if one == other)
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

    pub fn bytes(self) -> usize {
        match &self.0.elements {
            Elements::Lent(buffers) => buffers.iter().map(|piece| piece.bytes.len).sum(),
            Elements::Held(held) => held.byte_len(),
        }
    }
}
