//! Where the instances of a model run, the sequences there, and the sessions that they share.

use std::sync::Arc;

use gpu_rows::{Device, DeviceError, OwnedStream, QueueReport};
use parking_lot::Mutex;
use sequences::Policy;

use super::live::LiveSequences;
use super::metrics::SequenceMetrics;
use crate::binding::Binding;
use crate::config::{
    ARENA_EXTEND_STRATEGY, Config, InstanceKind, PartialConfig, Placement, Providers, SessionOptions, Strategy,
};
use crate::error::LoadError;
use crate::memory::{Budget, SlotSpec};
use crate::onnx::ModelSource;
use crate::session::{Library, Provider, Session};

/// The host, or a GPU, with the sequences of the instances there. Core sends all requests of a sequence to one
/// instance, so its state never moves to another site.
pub struct Site {
    pub kind: InstanceKind,
    pub placement: Placement,
    pub device: Option<Arc<Device>>,
    pub sequences: Arc<LiveSequences>,
    pub queues: Arc<QueueReport>,
    /// Bytes of the GPU's memory that were in use before the model was loaded; taken by the first instance.
    used_before: Mutex<Option<usize>>,
}

impl Site {
    pub fn new(
        config: &Config,
        binding: &Binding,
        placement: &Placement,
        found: Option<Found>,
        version: u64,
    ) -> Result<Self, LoadError> {
        let (device, used_before) = found.map(|found| (found.device, found.used_before)).unzip();
        let queue_requests = match config.strategy {
            // With `direct`, each payload takes the next request of every slot.
            Strategy::Direct | Strategy::Own(_) => 1,
            Strategy::Oldest => config.candidates,
        };
        let policy = Policy {
            idle_limit: config.idle_limit,
            dropped_after: config.dropped_after,
            quiet: config.quiet,
            by_lane: config.strategy != Strategy::Oldest,
            expires: !matches!(config.strategy, Strategy::Own(_)),
            queue_requests,
            has_place_for_all: placement.slots.capacity >= config.candidates * placement.instances,
        };
        let queues = Arc::<QueueReport>::default();
        let metrics = SequenceMetrics::new(&config.model, version, device.as_ref().map(|device| device.number()));
        let spec = SlotSpec {
            slot_bytes: binding.slot.slot_bytes(),
            device: device.clone().map(|device| (device, binding.device_bytes())),
        };
        let budget = Budget::new(config.states.limits.total);
        let (slots, slot_bytes) = (placement.slots.first_slab, spec.slot_bytes);
        let sequences = LiveSequences::new(policy, placement.slots, spec, budget, queues.clone(), metrics);
        let sequences = Arc::new(sequences.map_err(|source| LoadError::PoolAtLoad { slots, slot_bytes, source })?);
        let (kind, placement, used_before) = (placement.kind, placement.clone(), Mutex::new(used_before));
        Ok(Self { kind, placement, device, sequences, queues, used_before })
    }

    /// Bytes of the GPU's memory that are in use before an instance is made; 0 on the host. What the model itself has
    /// there counts as the first instance's.
    pub fn used_before_instance(&self) -> Result<usize, DeviceError> {
        match self.used_before.lock().take() {
            Some(bytes) => Ok(bytes),
            None => self.used_bytes(),
        }
    }

    /// Bytes of the GPU's memory that are in use; 0 on the host.
    pub fn used_bytes(&self) -> Result<usize, DeviceError> {
        self.device.as_ref().map_or(Ok(0), |device| device.used_bytes())
    }
}

#[cfg(feature = "simulated-device")]
impl Drop for Site {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            log::info!("simulated device {}: {:?}", device.number(), device.counts());
        }
    }
}

#[derive(Clone)]
pub struct Found {
    device: Arc<Device>,
    /// Bytes of its memory that were in use before the model had any.
    used_before: usize,
}

pub struct Devices {
    by_kind: Vec<(InstanceKind, Option<Found>)>,
    /// A session to read the model's signature from.
    pub probe: Arc<Session>,
}

impl Devices {
    /// Opens the devices and the first session. Without a usable GPU it fails, unless instances may run on the CPU
    /// instead.
    pub fn open(partial: &PartialConfig, sessions: &Sessions) -> Result<Self, LoadError> {
        match Self::open_strictly(partial, sessions) {
            Err(error) if partial.providers.allow_cpu_fallback && error.means_no_gpu() => {
                log::warn!("{error}: instances of KIND_GPU run on the CPU, as 'allow_cpu_fallback' says");
                let by_kind = partial.instances.keys().map(|&kind| (kind, None)).collect();
                Ok(Self { by_kind, probe: sessions.probe(None)? })
            }
            opened => opened,
        }
    }

    fn open_strictly(partial: &PartialConfig, sessions: &Sessions) -> Result<Self, LoadError> {
        let by_kind = partial.instances.keys().map(|&kind| Ok((kind, find(kind)?)));
        let by_kind = by_kind.collect::<Result<Vec<_>, LoadError>>()?;
        let first = by_kind.iter().find_map(|(_, found)| found.as_ref());
        let probe = sessions.probe(first.map(|found| &found.device))?;
        Ok(Self { by_kind, probe })
    }

    /// The device of the instances of a kind; `None` for the host.
    pub fn of(&self, kind: InstanceKind) -> Option<Found> {
        self.by_kind.iter().find(|(known, _)| *known == kind).and_then(|(_, found)| found.clone())
    }
}

fn find(kind: InstanceKind) -> Result<Option<Found>, DeviceError> {
    let InstanceKind::Gpu(number) = kind else { return Ok(None) };
    let device = Device::open(number)?;
    let used_before = device.used_bytes()?;
    Ok(Some(Found { device, used_before }))
}

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
