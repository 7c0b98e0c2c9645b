//! Adds ONNX Runtime's CUDA and TensorRT providers to a session, with our stream and our options.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use ort::AsPointer;
use ort::session::builder::SessionBuilder;
use ort::sys::{OrtCUDAProviderOptionsV2, OrtSessionOptions, OrtStatusPtr, OrtTensorRTProviderOptionsV2};

use super::value::{OpenError, check};
use crate::config::{Options, Providers};
use gpu_rows::OwnedStream;

/// CUDA's options for small steps, where the configuration has none. Convolutions are chosen by rule, because a search
/// at each new batch size would delay requests. Memory is taken as it is needed. Fp32 is not rounded to TF32.
const CUDA_DEFAULTS: [(&str, &str); 3] =
    [("cudnn_conv_algo_search", "HEURISTIC"), ("arena_extend_strategy", "kSameAsRequested"), ("use_tf32", "0")];

/// Lets the session run on the stream's device.
pub fn append(builder: &mut SessionBuilder, stream: &OwnedStream, providers: &Providers) -> Result<(), OpenError> {
    let device = stream.device().number();
    let unusable = |why| OpenError::Provider { device, why };
    let rejected = |why| OpenError::ProviderOptions { device, why };
    if let Some(options) = &providers.tensorrt {
        let tensorrt = ProviderOptions::of(tensorrt_functions(), device).map_err(unusable)?;
        tensorrt.set(&with_device(options, device)).map_err(rejected)?;
        // TensorRT's provider comes before CUDA's, because ONNX Runtime offers each node to the providers in their order.
        tensorrt.append(builder, stream).map_err(unusable)?;
    }
    let mut options = with_device(&providers.cuda, device);
    if providers.cuda_graph {
        options.insert("enable_cuda_graph".to_owned(), "1".to_owned());
    }
    let cuda = ProviderOptions::of(cuda_functions(), device).map_err(unusable)?;
    // The user's options alone first, so that an error is about those.
    cuda.set(&options).map_err(rejected)?;
    for (name, value) in CUDA_DEFAULTS.iter().filter(|(name, _)| !providers.cuda.contains_key(*name)) {
        let mut more = options.clone();
        more.insert((*name).to_owned(), (*value).to_owned());
        match cuda.set(&more) {
            Ok(()) => options = more,
            // An older ONNX Runtime may not know the option.
            Err(why) => log::info!("without {name}={value}: {why}"),
        }
    }
    // The last try may have failed, so those that worked are set again.
    cuda.set(&options).map_err(rejected)?;
    cuda.append(builder, stream).map_err(unusable)
}

fn with_device(options: &Options, device: i32) -> Options {
    let mut options = options.clone();
    options.insert("device_id".to_owned(), device.to_string());
    options
}

struct Functions<T> {
    provider: &'static str,
    create: unsafe extern "system" fn(*mut *mut T) -> OrtStatusPtr,
    update: unsafe extern "system" fn(*mut T, *const *const c_char, *const *const c_char, usize) -> OrtStatusPtr,
    update_with_value: unsafe extern "system" fn(*mut T, *const c_char, *mut c_void) -> OrtStatusPtr,
    append: unsafe extern "system" fn(*mut OrtSessionOptions, *const T) -> OrtStatusPtr,
    release: unsafe extern "system" fn(*mut T),
}

fn cuda_functions() -> Functions<OrtCUDAProviderOptionsV2> {
    let api = ort::api();
    Functions {
        provider: "CUDA",
        create: api.CreateCUDAProviderOptions,
        update: api.UpdateCUDAProviderOptions,
        update_with_value: api.UpdateCUDAProviderOptionsWithValue,
        append: api.SessionOptionsAppendExecutionProvider_CUDA_V2,
        release: api.ReleaseCUDAProviderOptions,
    }
}

fn tensorrt_functions() -> Functions<OrtTensorRTProviderOptionsV2> {
    let api = ort::api();
    Functions {
        provider: "TensorRT",
        create: api.CreateTensorRTProviderOptions,
        update: api.UpdateTensorRTProviderOptions,
        update_with_value: api.UpdateTensorRTProviderOptionsWithValue,
        append: api.SessionOptionsAppendExecutionProvider_TensorRT_V2,
        release: api.ReleaseTensorRTProviderOptions,
    }
}

struct ProviderOptions<T> {
    options: *mut T,
    functions: Functions<T>,
}

impl<T> ProviderOptions<T> {
    /// Those of a provider that is there: that becomes known when options are first set.
    fn of(functions: Functions<T>, device: i32) -> Result<Self, String> {
        let mut options = ptr::null_mut();
        // SAFETY: plain creation; owned from then on.
        unsafe { check((functions.create)(&mut options)) }
            .map_err(|why| format!("this ONNX Runtime has no {} provider: {why}", functions.provider))?;
        let made = Self { options, functions };
        made.set_texts(&with_device(&Options::new(), device)).map_err(|why| made.cannot_be_had(&why))?;
        Ok(made)
    }

    fn cannot_be_had(&self, why: &str) -> String {
        format!("the {} provider cannot be used: {why}", self.functions.provider)
    }

    /// Sets options by text. All others get their defaults by that, the stream too.
    fn set(&self, options: &Options) -> Result<(), String> {
        self.set_texts(options).map_err(|why| {
            let written: Vec<_> = options.iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!("the {} provider with {}: {why}", self.functions.provider, written.join(", "))
        })
    }

    fn set_texts(&self, options: &Options) -> Result<(), String> {
        let texts = |texts: Vec<&String>| {
            texts.into_iter().map(|text| CString::new(text.as_str())).collect::<Result<Vec<_>, _>>()
        };
        let names = texts(options.keys().collect()).map_err(|error| error.to_string())?;
        let values = texts(options.values().collect()).map_err(|error| error.to_string())?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (name_pointers, value_pointers) = (pointers(&names), pointers(&values));
        // SAFETY: alive and of that kind; the texts live during the call.
        unsafe {
            let update = self.functions.update;
            check(update(self.options, name_pointers.as_ptr(), value_pointers.as_ptr(), options.len()))
        }
    }

    /// Appends the provider, which works on the stream.
    fn append(&self, builder: &mut SessionBuilder, stream: &OwnedStream) -> Result<(), String> {
        let handle: *mut c_void = ptr::with_exposed_provenance_mut(stream.handle());
        // SAFETY: alive and of that kind, and the builder borrowed; the call copies the options. The session keeps the
        // stream.
        unsafe {
            // After the texts, which reset it.
            check((self.functions.update_with_value)(self.options, c"user_compute_stream".as_ptr(), handle))
                .and_then(|()| check((self.functions.append)(builder.ptr_mut(), self.options)))
        }
        .map_err(|why| self.cannot_be_had(&why))
    }
}

impl<T> Drop for ProviderOptions<T> {
    fn drop(&mut self) {
        // SAFETY: made in `of`, released once.
        unsafe { (self.functions.release)(self.options) }
    }
}
