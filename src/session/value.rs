//! Owned `OrtValue`s, over our memory or ONNX Runtime's; and the errors of its calls.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use gpu_rows::{Device, DeviceError};
use ort::sys::{OrtMemoryInfo, OrtStatusPtr, OrtValue};
use ort::value::TensorElementType;
use parking_lot::Mutex;
use rows::strings::Strings;
use rows::tensor::{DataType, STRING_BYTES, element_count};
use rows::{NoMemory, zeros};

use crate::memory::MemoryError;

/// Why a model cannot be opened, in ONNX Runtime's own words.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("ONNX Runtime cannot load {path}: {why}")]
    Load { path: String, why: String },
    /// The provider for a GPU is missing, or refuses its options.
    #[error(
        "ONNX Runtime cannot use GPU {device}: {why}. Use a GPU build of ONNX Runtime, with its provider libraries in \
         the same folder and CUDA's libraries on the loader's path; or run on the CPU: write 'instance_group [ {{ \
         kind: KIND_CPU }} ]', or set parameter 'allow_cpu_fallback' to 1"
    )]
    Provider { device: i32, why: String },
    /// The provider for a GPU does not take its options.
    #[error(
        "ONNX Runtime rejects the options for GPU {device}: {why}. They are parameters of the model, or of \
         'optimization.execution_accelerators'"
    )]
    ProviderOptions { device: i32, why: String },
    /// The model has an input or output that is no tensor, or of a type that Triton does not have.
    #[error("'{name}' of the model is {what}, which cannot be served")]
    Unsupported { name: String, what: String },
    /// No memory, no tensor, or a refused option.
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl From<MemoryError> for OpenError {
    fn from(error: MemoryError) -> Self {
        Self::Session(error.into())
    }
}

/// Why a session cannot be run, in ONNX Runtime's own words.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("ONNX Runtime cannot make a tensor for '{name}': {why}")]
    Tensor { name: String, why: String },
    #[error("ONNX Runtime: {0}")]
    Run(String),
    /// No memory for a batch buffer, or a device that failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<NoMemory> for SessionError {
    fn from(error: NoMemory) -> Self {
        Self::Memory(error.into())
    }
}

impl From<DeviceError> for SessionError {
    fn from(error: DeviceError) -> Self {
        Self::Memory(error.into())
    }
}

/// Turns a status into its message.
///
/// # Safety
/// `status` must come from an `OrtApi` function and be used only here: it is released.
pub unsafe fn check(status: OrtStatusPtr) -> Result<(), String> {
    // SAFETY: the caller hands the status over.
    unsafe { ort::Error::<()>::result_from_status(status) }.map_err(|error| error.message().to_owned())
}

/// A tensor of ONNX Runtime. Dropping it releases the tensor, and not memory of ours that it points to.
pub struct Value(NonNull<OrtValue>);

// SAFETY: an OrtValue has no thread affinity.
unsafe impl Send for Value {}
// SAFETY: what is called through a shared reference reads the tensor's description or contents. Its contents are
// written by a run that its owner calls, which has no other use of it meanwhile.
unsafe impl Sync for Value {}

impl Value {
    /// A tensor over memory of that kind.
    ///
    /// # Safety
    /// `data` must stay valid for `bytes` bytes as long as the value lives, and `bytes` must suffice for the shape.
    pub unsafe fn over(
        memory: MemoryKind,
        data: *mut u8,
        bytes: usize,
        dims: &[i64],
        data_type: DataType,
    ) -> Result<Self, String> {
        // ONNX Runtime's strings are objects of its own, which no memory of ours can hold.
        if data_type == DataType::Bytes {
            return Err(format!("{data_type} is not supported"));
        }
        let element = element_type(data_type).into();
        let mut value = ptr::null_mut();
        // SAFETY: `data` is the caller's promise; dims and value are borrowed for the call only.
        unsafe {
            let data = data.cast::<c_void>();
            let create = ort::api().CreateTensorWithDataAsOrtValue;
            check(create(memory.info()?, data, bytes, dims.as_ptr(), dims.len(), element, &mut value))?;
        }
        NonNull::new(value).map(Self).ok_or_else(|| "ONNX Runtime made no tensor".to_owned())
    }

    /// A tensor of strings, in memory of ONNX Runtime's. Each element comes with its index; the others are empty.
    pub fn of_strings<'a>(
        strings: impl Iterator<Item = (usize, &'a [u8])>,
        dims: &[i64],
    ) -> Result<Self, SessionError> {
        let api = ort::api();
        let (mut allocator, mut value) = (ptr::null_mut(), ptr::null_mut());
        let element = TensorElementType::String.into();
        // SAFETY: plain creation; dims are borrowed for the call only; the value is owned from then on.
        let made = unsafe {
            check((api.GetAllocatorWithDefaultOptions)(&mut allocator)).map_err(SessionError::Run)?;
            let create = api.CreateTensorAsOrtValue;
            check(create(allocator, dims.as_ptr(), dims.len(), element, &mut value))
                .ok()
                .and_then(|()| Self::from_run(value))
        };
        // The dims are those of a tensor, so all that can be missing is memory.
        let bytes = element_count(dims).map_or(usize::MAX, |count| count.saturating_mul(STRING_BYTES));
        let value = made.ok_or(NoMemory { bytes })?;
        // New strings are empty, so only the others are set.
        for (index, string) in strings.filter(|(_, string)| !string.is_empty()) {
            let mut buffer = ptr::null_mut();
            // SAFETY: ONNX Runtime checks the index and gives a buffer of the length asked for.
            unsafe {
                let resize = api.GetResizedStringTensorElementBuffer;
                let resized = check(resize(value.as_ptr(), index, string.len(), &mut buffer));
                resized.map_err(|_| NoMemory { bytes: string.len() })?;
                ptr::copy_nonoverlapping(string.as_ptr(), buffer.cast::<u8>(), string.len());
            }
        }
        Ok(value)
    }

    pub fn strings(&self, count: usize) -> Result<Strings, SessionError> {
        let api = ort::api();
        let mut bytes = 0;
        // SAFETY: the value is a live tensor; ONNX Runtime checks its type.
        unsafe { check((api.GetStringTensorDataLength)(self.as_ptr(), &mut bytes)) }.map_err(SessionError::Run)?;
        let (mut content, mut starts) = (zeros::<u8>(bytes)?, zeros::<usize>(count)?);
        // SAFETY: both buffers have the sizes that are passed, which ONNX Runtime checks against the tensor.
        unsafe {
            let read = api.GetStringTensorContent;
            check(read(self.as_ptr(), content.as_mut_ptr().cast(), bytes, starts.as_mut_ptr(), count))
        }
        .map_err(SessionError::Run)?;
        Ok(Strings::from_starts(content, starts))
    }

    /// Takes over a tensor that a run made.
    ///
    /// # Safety
    /// `value` must be a tensor that nobody else releases.
    pub unsafe fn from_run(value: *mut OrtValue) -> Option<Self> {
        NonNull::new(value).map(Self)
    }

    pub const fn as_ptr(&self) -> *mut OrtValue {
        self.0.as_ptr()
    }

    pub fn dims(&self) -> Result<Vec<i64>, String> {
        let api = ort::api();
        let mut info = ptr::null_mut();
        // SAFETY: the value is a live tensor; `info` is released below on every path.
        unsafe { check((api.GetTensorTypeAndShape)(self.as_ptr(), &mut info))? };
        let mut dims = Vec::new();
        // SAFETY: `info` is live; `dims` is sized by the count before it is filled.
        let read = unsafe {
            let mut count = 0;
            check((api.GetDimensionsCount)(info, &mut count)).and_then(|()| {
                dims.resize(count, 0);
                check((api.GetDimensions)(info, dims.as_mut_ptr(), count))
            })
        };
        // SAFETY: made above, released once.
        unsafe { (api.ReleaseTensorTypeAndShapeInfo)(info) };
        read.map(|()| dims)
    }

    fn data(&self) -> Result<*mut c_void, String> {
        let mut data = ptr::null_mut();
        // SAFETY: the value is a live tensor.
        unsafe { check((ort::api().GetTensorMutableData)(self.as_ptr(), &mut data))? };
        Ok(data)
    }

    /// The address of its elements, in host memory or a device's.
    pub fn address(&self) -> Result<u64, String> {
        Ok(self.data()?.expose_provenance() as u64)
    }

    /// The tensor's first `bytes` bytes.
    ///
    /// # Safety
    /// The tensor must have that many bytes, on the host.
    pub unsafe fn bytes(&self, bytes: usize) -> Result<&[u8], String> {
        // No slice may begin at null, which a tensor without elements may have.
        if bytes == 0 {
            return Ok(&[]);
        }
        // SAFETY: the caller knows the tensor's size; the slice borrows from self.
        Ok(unsafe { std::slice::from_raw_parts(self.data()?.cast(), bytes) })
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: owned by this value alone.
        unsafe { (ort::api().ReleaseValue)(self.as_ptr()) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    Host,
    Cuda(i32),
}

impl MemoryKind {
    /// The kind of a device's memory for ONNX Runtime.
    pub fn of(device: &Device) -> Self {
        device.cuda_number().map_or(Self::Host, Self::Cuda)
    }

    /// ONNX Runtime's description, made once and kept for the life of the process.
    pub(super) fn info(self) -> Result<*const OrtMemoryInfo, String> {
        struct Info(*const OrtMemoryInfo);
        // SAFETY: the info is immutable after its making.
        unsafe impl Send for Info {}
        // SAFETY: as above.
        unsafe impl Sync for Info {}
        // Each state that a run reads in place asks for the host's, so it needs no lock.
        static HOST: OnceLock<Info> = OnceLock::new();
        static DEVICES: Mutex<BTreeMap<i32, Info>> = Mutex::new(BTreeMap::new());
        let host = || HOST.get().filter(|_| self == Self::Host);
        if let Some(info) = host() {
            return Ok(info.0);
        }
        // The lock is held until the info is made, for the host's as well, because a second one would never be freed.
        let mut devices = DEVICES.lock();
        let made = if let Self::Cuda(device) = self { devices.get(&device) } else { host() };
        if let Some(info) = made {
            return Ok(info.0);
        }
        let mut info = ptr::null_mut();
        let (allocator, memory) =
            (ort::sys::OrtAllocatorType::OrtDeviceAllocator, ort::sys::OrtMemType::OrtMemTypeDefault);
        // SAFETY: plain creation; the name lives during the call.
        unsafe {
            let api = ort::api();
            check(match self {
                Self::Host => (api.CreateCpuMemoryInfo)(allocator, memory, &mut info),
                Self::Cuda(device) => (api.CreateMemoryInfo)(c"Cuda".as_ptr(), allocator, device, memory, &mut info),
            })?;
        }
        Ok(match self {
            Self::Host => HOST.get_or_init(|| Info(info)).0,
            Self::Cuda(device) => devices.entry(device).or_insert(Info(info)).0,
        })
    }
}

pub(super) const fn element_type(data_type: DataType) -> TensorElementType {
    match data_type {
        DataType::Bool => TensorElementType::Bool,
        DataType::Uint8 => TensorElementType::Uint8,
        DataType::Uint16 => TensorElementType::Uint16,
        DataType::Uint32 => TensorElementType::Uint32,
        DataType::Uint64 => TensorElementType::Uint64,
        DataType::Int8 => TensorElementType::Int8,
        DataType::Int16 => TensorElementType::Int16,
        DataType::Int32 => TensorElementType::Int32,
        DataType::Int64 => TensorElementType::Int64,
        DataType::Fp16 => TensorElementType::Float16,
        DataType::Fp32 => TensorElementType::Float32,
        DataType::Fp64 => TensorElementType::Float64,
        DataType::Bf16 => TensorElementType::Bfloat16,
        DataType::Bytes => TensorElementType::String,
    }
}
