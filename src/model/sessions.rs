//! The sessions of a model: one for all instances on the CPU, as its runs may overlap; one for each instance on a GPU,
//! as a session has one stream.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::binding::Binding;
use crate::config::{Config, Providers, SessionOptions};
use crate::error::LoadError;
use crate::memory::device::{Device, OwnedStream};
use crate::session::{Library, Provider, Session};

/// A session, and the stream that its runs are enqueued on.
pub struct Opened {
    /// The session.
    pub session: Arc<Session>,
    /// The stream, on a device.
    pub stream: Option<Arc<OwnedStream>>,
}

/// How sessions of the model are opened, and those that are.
pub struct Sessions {
    library: Arc<Library>,
    file: PathBuf,
    options: SessionOptions,
    providers: Providers,
    on_cpu: Mutex<Option<Arc<Session>>>,
    /// Opened to read the model, for the first instance on that device.
    spare: Mutex<Option<(i32, Opened)>>,
}

impl Sessions {
    /// None is open yet.
    pub fn new(library: Arc<Library>, file: PathBuf, options: SessionOptions, providers: Providers) -> Self {
        let (on_cpu, spare) = (Mutex::default(), Mutex::default());
        Self { library, file, options, providers, on_cpu, spare }
    }

    /// The file.
    pub const fn file(&self) -> &PathBuf {
        &self.file
    }

    /// How ONNX Runtime runs it.
    pub const fn options(&self) -> &SessionOptions {
        &self.options
    }

    /// How it runs on a GPU.
    pub const fn providers(&self) -> &Providers {
        &self.providers
    }

    /// Now that the model is known: one with growing states is opened anew on the CPU, where large tensors then have
    /// pages of their own; TensorRT is told for which shapes its engines are to be.
    pub fn complete(&mut self, config: &Config, binding: &Binding) {
        if binding.has_varying_states() && !self.options.mem_arena_is_written {
            self.options.pages = true;
            *self.on_cpu.lock() = None;
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
                "{}: dimensions of {} are open, so TensorRT builds an engine anew when a request brings other ones; say \
                 which there are with 'trt_profile_min_shapes', 'trt_profile_opt_shapes' and 'trt_profile_max_shapes'",
                config.model,
                open.join(", ")
            );
        }
    }

    /// A session to read the model by, which an instance takes over.
    pub fn probe(&self, device: Option<&Arc<Device>>) -> Result<Arc<Session>, LoadError> {
        let Some(device) = device else { return self.on_cpu() };
        let mut without_tensorrt = self.providers.clone();
        // TensorRT wants to know the shapes, which are read from the model.
        let is_final = without_tensorrt.tensorrt.take().is_none();
        if !is_final && !device.is_simulated() {
            let provider = Provider::Gpu { stream: OwnedStream::open(device)?, providers: self.providers.clone() };
            provider.check(&self.library, &self.options)?;
        }
        let opened = self.open_on(device, &without_tensorrt)?;
        let session = opened.session.clone();
        if is_final {
            *self.spare.lock() = Some((device.number(), opened));
        }
        Ok(session)
    }

    /// A session for an instance.
    pub fn for_instance(&self, device: Option<&Arc<Device>>) -> Result<Opened, LoadError> {
        let Some(device) = device else { return Ok(Opened { session: self.on_cpu()?, stream: None }) };
        let spare = self.spare.lock().take_if(|(number, _)| *number == device.number());
        match spare {
            Some((_, opened)) => Ok(opened),
            None => self.open_on(device, &self.providers),
        }
    }

    fn on_cpu(&self) -> Result<Arc<Session>, LoadError> {
        let mut on_cpu = self.on_cpu.lock();
        if let Some(session) = &*on_cpu {
            return Ok(session.clone());
        }
        let session = Session::open(&self.library, &self.file, &self.options, Provider::Cpu)?;
        Ok(on_cpu.insert(Arc::new(session)).clone())
    }

    fn open_on(&self, device: &Arc<Device>, providers: &Providers) -> Result<Opened, LoadError> {
        let stream = OwnedStream::open(device)?;
        if device.is_simulated() {
            return Ok(Opened { session: self.on_cpu()?, stream: Some(stream) });
        }
        let provider = Provider::Gpu { stream: stream.clone(), providers: providers.clone() };
        let session = Session::open(&self.library, &self.file, &self.options, provider)?;
        Ok(Opened { session: Arc::new(session), stream: Some(stream) })
    }
}
