//! Opens sessions: on the CPU, or on a GPU with ONNX Runtime's CUDA and TensorRT providers, which get our stream and
//! our options.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::{Arc, OnceLock};

use gpu_rows::{OwnedStream, for_session};
use ort::AsPointer;
use ort::session::SharedSessionInner;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::sys::{OrtCUDAProviderOptionsV2, OrtSessionOptions, OrtStatusPtr, OrtTensorRTProviderOptionsV2};
use ort::value::{Outlet, ValueType};
use rows::tensor::DataType;

use super::library::Library;
use super::value::{OpenError, SessionError, check, element_type};
use crate::config::{GraphOptimization, Options, Providers, SessionOptions};
use crate::onnx::{ModelSource, Signature, TensorInfo};

/// A loaded model. Its runs may overlap: ONNX Runtime's Run is safe to call from several threads.
pub struct Session {
    inner: ManuallyDrop<Arc<SharedSessionInner>>,
    /// The model's inputs and outputs.
    pub signature: Signature,
    /// The description in the model's graph.
    pub graph_description: Option<String>,
    /// The model's metadata.
    pub metadata: BTreeMap<String, String>,
    run_options: RunOptions,
    /// Options of runs beside graphs, once there is one.
    beside_graphs: OnceLock<RunOptions>,
    /// On a GPU, whether ONNX Runtime reads an input on the host, where it tells.
    read_on_host: HashMap<String, bool>,
    options: SessionOptions,
    /// The last field, because the session uses its stream and must be dropped first.
    provider: Provider,
}

/// What a session runs on.
pub enum Provider {
    /// The CPU.
    Cpu,
    /// A GPU, with a stream that no other session has.
    #[expect(missing_docs, reason = "the types say what they are")]
    Gpu { stream: Arc<OwnedStream>, providers: Providers },
}

/// CUDA's options for small steps, where the configuration has none. Convolutions are chosen by rule, because a search
/// at each new batch size would delay requests. Memory is taken as it is needed. Fp32 is not rounded to TF32.
const CUDA_DEFAULTS: [(&str, &str); 3] =
    [("cudnn_conv_algo_search", "HEURISTIC"), ("arena_extend_strategy", "kSameAsRequested"), ("use_tf32", "0")];

impl Provider {
    /// The provider for the device of a stream.
    pub fn of(stream: Arc<OwnedStream>, providers: Providers) -> Self {
        if stream.device().cuda_number().is_some() { Self::Gpu { stream, providers } } else { Self::Cpu }
    }

    /// Checks whether a session can run on it.
    pub fn check(&self, library: &Library, options: &SessionOptions) -> Result<(), OpenError> {
        let mut builder = builder(library, options).map_err(SessionError::Run)?;
        self.append_to(&mut builder)
    }

    /// Lets the session run on the stream's device.
    fn append_to(&self, builder: &mut SessionBuilder) -> Result<(), OpenError> {
        let Self::Gpu { stream, providers } = self else { return Ok(()) };
        let device = stream.device().number();
        let unusable = |why| OpenError::Provider { device, why };
        let rejected = |why| OpenError::ProviderOptions { device, why };
        if let Some(options) = &providers.tensorrt {
            let tensorrt = ProviderOptions::of(tensorrt_functions(), device).map_err(unusable)?;
            tensorrt.set(&with_device(options, device)).map_err(rejected)?;
            // TensorRT's provider comes before CUDA's, because ONNX Runtime offers each node to the providers in order.
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
}

impl Session {
    /// Loads the model for the provider.
    pub fn open(
        library: &Library,
        source: &ModelSource,
        options: &SessionOptions,
        provider: Provider,
    ) -> Result<Self, OpenError> {
        let load = |why: String| OpenError::Load { path: source.to_string(), why };
        let mut builder = builder(library, options).map_err(load)?;
        // Opening a session allocates on the GPU, which nothing may do while a graph is captured.
        let _no_capture = matches!(provider, Provider::Gpu { .. }).then(for_session);
        provider.append_to(&mut builder)?;
        let session = match source.bytes() {
            Some(bytes) => builder.commit_from_memory(bytes),
            None => builder.commit_from_file(&source.file),
        };
        let session = session.map_err(|error| load(error.to_string()))?;
        let signature = signature_of(&session)?;
        let (graph_description, metadata) = described(&session);
        let run_options = RunOptions::new(options, &provider, GraphUse::NoneYet).map_err(load)?;
        let (inner, options) = (ManuallyDrop::new(session.inner()), options.clone());
        // So that the last reference is that of `Self`, which drops it with its GPU as the current one.
        drop(session);
        let mut session = Self {
            inner,
            signature,
            graph_description,
            metadata,
            run_options,
            beside_graphs: OnceLock::new(),
            read_on_host: HashMap::new(),
            options,
            provider,
        };
        if let Some(places) = library.input_places.filter(|_| session.is_on_gpu()) {
            let inputs = &session.signature.inputs;
            // SAFETY: the signature lists the inputs of this session in its order.
            let read = unsafe { places.read_on_host(session.as_ptr(), inputs.len()) }.map_err(load)?;
            session.read_on_host = inputs.iter().map(|input| input.name.clone()).zip(read).collect();
        }
        Ok(session)
    }

    /// Whether ONNX Runtime reads an input on the host, though the model runs on a GPU. `None` where it does not tell:
    /// of all before 1.23, and of initializers that are inputs, too.
    pub fn reads_on_host(&self, input: &str) -> Option<bool> {
        self.read_on_host.get(input).copied()
    }

    pub(super) fn run_options(&self) -> *const ort::sys::OrtRunOptions {
        self.beside_graphs.get().unwrap_or(&self.run_options).as_ptr()
    }

    /// Whether it runs on a GPU.
    pub(super) const fn is_on_gpu(&self) -> bool {
        matches!(self.provider, Provider::Gpu { .. })
    }

    pub(super) const fn has_graphs(&self) -> bool {
        matches!(&self.provider, Provider::Gpu { providers, .. } if providers.cuda_graph)
    }

    /// Ends a capture that failed, on the thread that began it.
    pub(super) fn end_capture(&self) -> Result<(), SessionError> {
        match &self.provider {
            Provider::Cpu => Ok(()),
            Provider::Gpu { stream, .. } => Ok(stream.end_capture()?),
        }
    }

    /// Options of the runs that are captured as, and replay, the CUDA graph of that number.
    pub(super) fn graph_options(&self, graph: i32) -> Result<RunOptions, SessionError> {
        RunOptions::new(&self.options, &self.provider, GraphUse::Number(graph)).map_err(SessionError::Run)
    }

    /// Keeps the pinned memory that the graph of the last run reads: from now on, runs without a graph free none.
    pub(super) fn has_captured(&self) -> Result<(), SessionError> {
        if self.beside_graphs.get().is_none() {
            let options = RunOptions::new(&self.options, &self.provider, GraphUse::Beside);
            let _ = self.beside_graphs.set(options.map_err(SessionError::Run)?);
        }
        Ok(())
    }

    /// Options of a run that logs no error if it fails.
    pub(super) fn quiet_options(&self) -> Result<RunOptions, SessionError> {
        RunOptions::new(&self.options, &self.provider, GraphUse::BesideQuietly).map_err(SessionError::Run)
    }

    pub(super) fn as_ptr(&self) -> *mut ort::sys::OrtSession {
        self.inner.ptr().cast_mut()
    }
}

/// The description of a model's graph, and its metadata.
fn described(session: &ort::session::Session) -> (Option<String>, BTreeMap<String, String>) {
    let Ok(metadata) = session.metadata() else { return (None, BTreeMap::new()) };
    let keys = metadata.custom_keys().unwrap_or_default();
    let values = keys.into_iter().filter_map(|key| Some((metadata.custom(&key)?, key)));
    (metadata.graph_description(), values.map(|(value, key)| (key, value)).collect())
}

impl Drop for Session {
    fn drop(&mut self) {
        // Dropping the session frees memory on the GPU, which has to be the thread's current one.
        let _no_capture = self.is_on_gpu().then(for_session);
        if let Provider::Gpu { stream, .. } = &self.provider
            && let Err(error) = stream.device().make_current()
        {
            log::error!("{error}");
        }
        // SAFETY: dropped here only.
        unsafe { ManuallyDrop::drop(&mut self.inner) };
    }
}

fn builder(library: &Library, options: &SessionOptions) -> Result<SessionBuilder, String> {
    let text = |error: ort::Error<SessionBuilder>| error.message().to_owned();
    let level = match options.graph_optimization {
        GraphOptimization::None => GraphOptimizationLevel::Disable,
        GraphOptimization::Basic => GraphOptimizationLevel::Level1,
        GraphOptimization::Extended => GraphOptimizationLevel::Level2,
        // Level3 is refused by 1.22 and older; All is known to every version.
        GraphOptimization::All => GraphOptimizationLevel::All,
    };
    let builder = ort::session::Session::builder(library.environment()).map_err(|error| error.message().to_owned())?;
    let builder = builder.with_intra_threads(options.intra_op_threads).map_err(text)?;
    let builder = builder.with_inter_threads(options.inter_op_threads).map_err(text)?;
    let builder = builder.with_parallel_execution(options.parallel_execution).map_err(text)?;
    let builder = builder.with_memory_pattern(options.mem_pattern).map_err(text)?;
    let mut builder = builder.with_optimization_level(level).map_err(text)?;
    for (key, value) in &options.entries {
        builder = builder.with_config_entry(key, value).map_err(text)?;
    }
    if options.pages {
        builder = builder.with_config_entry("session.use_env_allocators", "1").map_err(text)?;
    }
    // The arena would keep the memory that `pages` is to give back.
    if options.pages || !options.mem_arena {
        // SAFETY: the builder's options are alive and borrowed exclusively; the status is used once.
        unsafe { check((ort::api().DisableCpuMemArena)(builder.ptr_mut())) }?;
    }
    Ok(builder)
}

#[derive(Clone, Copy)]
enum GraphUse {
    NoneYet,
    /// The run uses no graph, but its session has some.
    Beside,
    /// As `Beside`, and ONNX Runtime logs only fatal errors of the run.
    BesideQuietly,
    /// The run is captured or replayed under this number.
    Number(i32),
}

/// Options of runs; null for the defaults.
pub(super) struct RunOptions(*mut ort::sys::OrtRunOptions);

// SAFETY: `new` writes the object before it is shared. From then on only the flag that ends runs changes, which ONNX
// Runtime lets any thread set during runs.
unsafe impl Send for RunOptions {}
// SAFETY: as above.
unsafe impl Sync for RunOptions {}

impl RunOptions {
    fn new(options: &SessionOptions, provider: &Provider, graphs: GraphUse) -> Result<Self, String> {
        let mut entries: Vec<(&CStr, String)> = Vec::new();
        if let Some(arenas) = &options.arena_shrinkage {
            entries.push((c"memory.enable_memory_arena_shrinkage", arenas.clone()));
        }
        if let Provider::Gpu { providers, .. } = provider
            && providers.cuda_graph
        {
            const NO_GRAPH: i32 = -1;
            let number = if let GraphUse::Number(number) = graphs { number } else { NO_GRAPH };
            entries.push((c"gpu_graph_id", number.to_string()));
            // At the end of a run that it synchronises, ONNX Runtime frees the pinned memory from which nodes such as
            // ScatterND copied their parameters, also that of runs before. A graph copies from there again.
            if !matches!(graphs, GraphUse::NoneYet) {
                entries.push((c"disable_synchronize_execution_providers", "1".to_owned()));
            }
        }
        let is_quiet = matches!(graphs, GraphUse::BesideQuietly);
        let mut made = Self(ptr::null_mut());
        if entries.is_empty() && !is_quiet {
            return Ok(made);
        }
        // SAFETY: plain creation of an object that `made` owns; the texts live during the calls.
        unsafe {
            check((ort::api().CreateRunOptions)(&mut made.0))?;
            for (name, value) in entries {
                let value = CString::new(value).map_err(|error| error.to_string())?;
                check((ort::api().AddRunConfigEntry)(made.0, name.as_ptr(), value.as_ptr()))?;
            }
            if is_quiet {
                const FATAL: i32 = 4;
                check((ort::api().RunOptionsSetRunLogSeverityLevel)(made.0, FATAL))?;
            }
        }
        Ok(made)
    }

    /// Ends the runs with these options, also later ones, with an error. Without effect on default options.
    pub(super) fn terminate(&self) {
        if !self.0.is_null() {
            // It can't fail. SAFETY: the object lives as long as `self`; any thread may set this flag during runs.
            let _ = unsafe { check((ort::api().RunOptionsSetTerminate)(self.0)) };
        }
    }

    pub(super) const fn as_ptr(&self) -> *const ort::sys::OrtRunOptions {
        self.0
    }
}

impl Drop for RunOptions {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made in `new`, released once.
            unsafe { (ort::api().ReleaseRunOptions)(self.0) }
        }
    }
}

/// What the model of a session takes and gives. A default of a type that this backend doesn't know is left out.
fn signature_of(session: &ort::session::Session) -> Result<Signature, OpenError> {
    let infos = |outlets: &[Outlet]| {
        outlets.iter().map(|outlet| tensor_info(outlet.name(), outlet.dtype())).collect::<Result<_, _>>()
    };
    let defaults = session.overridable_initializers();
    let defaults = defaults.iter().filter_map(|default| tensor_info(default.name(), default.dtype()).ok());
    Ok(Signature { inputs: infos(session.inputs())?, defaults: defaults.collect(), outputs: infos(session.outputs())? })
}

fn tensor_info(name: &str, value: &ValueType) -> Result<TensorInfo, OpenError> {
    let name = name.to_owned();
    let unsupported = |what: String| OpenError::Unsupported { name: name.clone(), what };
    let ValueType::Tensor { ty, shape, dimension_symbols } = value else {
        return Err(unsupported(format!("{value}")));
    };
    let known = DataType::all().find(|&known| element_type(known) == *ty);
    let data_type = known.ok_or_else(|| unsupported(format!("{ty}")))?;
    let symbols = dimension_symbols.iter().map(|symbol| symbol.to_string()).collect();
    Ok(TensorInfo { name, data_type, dims: shape.to_vec(), symbols })
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
