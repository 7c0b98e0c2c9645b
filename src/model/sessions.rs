//! The sessions of a model: one for all instances on the CPU, where its runs may overlap; and one for each instance on
//! a GPU, where a session has a single stream.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::binding::Binding;
use crate::config::{ARENA_EXTEND_STRATEGY, Config, Providers, SessionOptions};
use crate::error::LoadError;
use crate::onnx::ModelSource;
use crate::session::{Library, Provider, Session};
use gpu_rows::{Device, OwnedStream};

/// A session, and the device's stream for its runs.
pub struct Opened {
    pub session: Arc<Session>,
    pub stream: Option<Arc<OwnedStream>>,
}

/// How sessions of a model are opened, and the open ones that have no instance of their own.
pub struct Sessions {
    library: Arc<Library>,
    pub source: ModelSource,
    pub options: SessionOptions,
    pub providers: Providers,
    on_cpu: Mutex<Option<Arc<Session>>>,
    /// The one that was opened to read the model, for the first instance on that device.
    spare: Mutex<Option<(i32, Opened)>>,
}

impl Sessions {
    pub fn new(library: Arc<Library>, source: ModelSource, options: SessionOptions, providers: Providers) -> Self {
        let (on_cpu, spare) = (Mutex::default(), Mutex::default());
        Self { library, source, options, providers, on_cpu, spare }
    }

    /// Sets the options that depend on the model. A model with growing states is opened anew: on the CPU with pages of
    /// their own for large tensors, on a GPU with an arena that grows by doubling. TensorRT gets the shapes for its
    /// engines.
    pub fn complete(&mut self, config: &Config, binding: &Binding) {
        if binding.has_varying_states() && !self.options.mem_arena_is_written {
            self.options.pages = true;
            *self.on_cpu.lock() = None;
        }
        if binding.has_varying_states() && !self.providers.cuda.contains_key(ARENA_EXTEND_STRATEGY) {
            // With the other strategy, each longer state takes new memory of exactly its size, and those before it are
            // kept.
            self.providers.cuda.insert(ARENA_EXTEND_STRATEGY.to_owned(), "kNextPowerOfTwo".to_owned());
            *self.spare.lock() = None;
        }
        let Some(options) = &mut self.providers.tensorrt else { return };
        let (shapes, open) = binding.profile_shapes(config.most_rows());
        if open.is_empty() {
            for (name, shapes) in
                ["trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"].into_iter().zip(shapes)
            {
                options.entry(name.to_owned()).or_insert(shapes);
            }
        } else if !options.contains_key("trt_profile_min_shapes") {
            log::warn!(
                "{}: dimensions of {} are open, so TensorRT builds a new engine when a request has other lengths; \
                 give their range in 'trt_profile_min_shapes', 'trt_profile_opt_shapes' and 'trt_profile_max_shapes'",
                config.model,
                open.join(", ")
            );
        }
    }

    /// A session to read the model's signature from. An instance may take it over.
    pub fn probe(&self, device: Option<&Arc<Device>>) -> Result<Arc<Session>, LoadError> {
        let Some(device) = device else { return self.on_cpu() };
        let mut without_tensorrt = self.providers.clone();
        // TensorRT needs the shapes, which are not known before the model is read.
        let is_final = without_tensorrt.tensorrt.take().is_none();
        // The probe does not try the options of TensorRT, which would fail only with the first instance.
        if !is_final {
            let provider = Provider::of(OwnedStream::open(device)?, self.providers.clone());
            provider.check(&self.library, &self.options)?;
        }
        let opened = self.open_on(device, &without_tensorrt)?;
        let session = opened.session.clone();
        if is_final {
            *self.spare.lock() = Some((device.number(), opened));
        }
        Ok(session)
    }

    pub fn for_instance(&self, device: Option<&Arc<Device>>) -> Result<Opened, LoadError> {
        let Some(device) = device else { return Ok(Opened { session: self.on_cpu()?, stream: None }) };
        let spare = self.spare.lock().take_if(|(number, _)| *number == device.number());
        match spare {
            Some((_, opened)) => Ok(opened),
            None => self.open_on(device, &self.providers),
        }
    }

    /// A session that runs on the host. One that no instance uses is closed when its user drops it.
    pub fn on_host(&self) -> Result<Arc<Session>, LoadError> {
        let on_cpu = self.on_cpu.lock().clone();
        on_cpu.map_or_else(|| self.open(Provider::Cpu), Ok)
    }

    fn on_cpu(&self) -> Result<Arc<Session>, LoadError> {
        // Locked while it is opened, so that two instances do not load the weights twice.
        let mut on_cpu = self.on_cpu.lock();
        if let Some(session) = &*on_cpu {
            return Ok(session.clone());
        }
        Ok(on_cpu.insert(self.open(Provider::Cpu)?).clone())
    }

    fn open(&self, provider: Provider) -> Result<Arc<Session>, LoadError> {
        Ok(Arc::new(Session::open(&self.library, &self.source, &self.options, provider)?))
    }

    fn open_on(&self, device: &Arc<Device>, providers: &Providers) -> Result<Opened, LoadError> {
        let stream = OwnedStream::open(device)?;
        let session = match Provider::of(stream.clone(), providers.clone()) {
            Provider::Cpu => self.on_cpu()?,
            gpu => self.open(gpu)?,
        };
        Ok(Opened { session, stream: Some(stream) })
    }
}
