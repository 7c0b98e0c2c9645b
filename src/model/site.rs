//! Where the instances of a model run, and the sequences there.

use std::sync::Arc;

use gpu_rows::{Device, DeviceError, QueueReport};
use parking_lot::Mutex;
use sequences::{IdleLimits, Policy};

use super::live::LiveSequences;
use super::metrics::SequenceMetrics;
use super::sessions::Sessions;
use crate::binding::Binding;
use crate::config::{Config, InstanceKind, PartialConfig, Placement, Strategy};
use crate::error::LoadError;
use crate::memory::{Budget, SlotSpec};
use crate::session::Session;

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
        let limits = IdleLimits { limit: config.idle_limit, dropped_after: config.dropped_after };
        let idle = Some(limits).filter(|_| !matches!(config.strategy, Strategy::Own(_)));
        let policy = Policy {
            idle,
            quiet: config.quiet,
            by_lane: config.strategy != Strategy::Oldest,
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
