//! ONNX Runtime's CUDA and TensorRT providers: what a session is to run on, with our stream and our options.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use ort::AsPointer;
use ort::session::builder::SessionBuilder;
use ort::sys::OrtStatusPtr;

use super::value::check;
use crate::config::{Options, Providers};
use crate::memory::device::OwnedStream;

/// Options of CUDA that suit a stream of small steps, unless told otherwise: convolutions are chosen by rule, as a search
/// at each new batch size would hold up requests; memory is taken as it is needed; fp32 is fp32.
const CUDA_DEFAULTS: [(&str, &str); 3] =
    [("cudnn_conv_algo_search", "HEURISTIC"), ("arena_extend_strategy", "kSameAsRequested"), ("use_tf32", "0")];

/// Lets the session run on the stream's device. An error is ONNX Runtime's reason.
pub fn append(builder: &mut SessionBuilder, stream: &OwnedStream, providers: &Providers) -> Result<(), String> {
    let device = stream.device().number();
    if let Some(options) = &providers.tensorrt {
        let tensorrt = TensorRt::new()?;
        tensorrt.set_stream(stream)?;
        tensorrt
            .set(&with_device(options, device))
            .map_err(|why| format!("the TensorRT provider cannot be had {why}"))?;
        // SAFETY: both alive and borrowed for the call, which copies the options.
        let appended = unsafe {
            check((ort::api().SessionOptionsAppendExecutionProvider_TensorRT_V2)(builder.ptr_mut(), tensorrt.0))
        };
        appended.map_err(|why| format!("the TensorRT provider cannot be had: {why}"))?;
    }
    let mut options = with_device(&providers.cuda, device);
    if providers.cuda_graph && providers.tensorrt.is_none() {
        options.insert("enable_cuda_graph".to_owned(), "1".to_owned());
    }
    let cuda = Cuda::new()?;
    cuda.set_stream(stream)?;
    cuda.set(&options).map_err(|why| format!("the CUDA provider cannot be had {why}"))?;
    for (name, value) in CUDA_DEFAULTS.iter().filter(|(name, _)| !providers.cuda.contains_key(*name)) {
        let mut more = options.clone();
        more.insert((*name).to_owned(), (*value).to_owned());
        match cuda.set(&more) {
            Ok(()) => options = more,
            // An older ONNX Runtime may not know it.
            Err(why) => log::info!("the CUDA provider is without {name}={value}: it cannot be had {why}"),
        }
    }
    cuda.set(&options)?;
    // SAFETY: as above.
    let appended =
        unsafe { check((ort::api().SessionOptionsAppendExecutionProvider_CUDA_V2)(builder.ptr_mut(), cuda.0)) };
    appended.map_err(|why| format!("the CUDA provider cannot be had: {why}"))
}

fn with_device(options: &Options, device: i32) -> Options {
    let mut options = options.clone();
    options.insert("device_id".to_owned(), device.to_string());
    options
}

/// Calls a function of ONNX Runtime's that sets options. All that were set by text before are forgotten by it.
fn update(
    options: &Options,
    call: impl FnOnce(*const *const c_char, *const *const c_char, usize) -> OrtStatusPtr,
) -> Result<(), String> {
    let texts =
        |texts: Vec<&String>| texts.into_iter().map(|text| CString::new(text.as_str())).collect::<Result<Vec<_>, _>>();
    let names = texts(options.keys().collect()).map_err(|error| error.to_string())?;
    let values = texts(options.values().collect()).map_err(|error| error.to_string())?;
    let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let (name_pointers, value_pointers) = (pointers(&names), pointers(&values));
    let status = call(name_pointers.as_ptr(), value_pointers.as_ptr(), options.len());
    let written = || options.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ");
    // SAFETY: the status comes from the call and is used once.
    unsafe { check(status) }.map_err(|why| format!("with {}: {why}", written()))
}

/// Options of the CUDA provider.
struct Cuda(*mut ort::sys::OrtCUDAProviderOptionsV2);

impl Cuda {
    fn new() -> Result<Self, String> {
        let mut options = ptr::null_mut();
        // SAFETY: plain creation; owned from then on.
        unsafe { check((ort::api().CreateCUDAProviderOptions)(&mut options)) }
            .map_err(|why| format!("this ONNX Runtime has no CUDA provider: {why}"))?;
        Ok(Self(options))
    }

    fn set(&self, options: &Options) -> Result<(), String> {
        // SAFETY: alive and of that kind; the texts live during the call.
        update(options, |names, values, count| unsafe {
            (ort::api().UpdateCUDAProviderOptions)(self.0, names, values, count)
        })
    }

    fn set_stream(&self, stream: &OwnedStream) -> Result<(), String> {
        let value: *mut c_void = ptr::with_exposed_provenance_mut(stream.handle());
        // SAFETY: alive and of that kind; the session keeps the stream.
        unsafe {
            check((ort::api().UpdateCUDAProviderOptionsWithValue)(self.0, c"user_compute_stream".as_ptr(), value))
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once.
        unsafe { (ort::api().ReleaseCUDAProviderOptions)(self.0) }
    }
}

/// Options of the TensorRT provider.
struct TensorRt(*mut ort::sys::OrtTensorRTProviderOptionsV2);

impl TensorRt {
    fn new() -> Result<Self, String> {
        let mut options = ptr::null_mut();
        // SAFETY: plain creation; owned from then on.
        unsafe { check((ort::api().CreateTensorRTProviderOptions)(&mut options)) }
            .map_err(|why| format!("this ONNX Runtime has no TensorRT provider: {why}"))?;
        Ok(Self(options))
    }

    fn set(&self, options: &Options) -> Result<(), String> {
        // SAFETY: alive and of that kind; the texts live during the call.
        update(options, |names, values, count| unsafe {
            (ort::api().UpdateTensorRTProviderOptions)(self.0, names, values, count)
        })
    }

    fn set_stream(&self, stream: &OwnedStream) -> Result<(), String> {
        let value: *mut c_void = ptr::with_exposed_provenance_mut(stream.handle());
        // SAFETY: alive and of that kind; the session keeps the stream.
        unsafe {
            check((ort::api().UpdateTensorRTProviderOptionsWithValue)(self.0, c"user_compute_stream".as_ptr(), value))
        }
    }
}

impl Drop for TensorRt {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once.
        unsafe { (ort::api().ReleaseTensorRTProviderOptions)(self.0) }
    }
}
