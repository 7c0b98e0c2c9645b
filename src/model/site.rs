//! Where the instances of a model run, and the sequences that live there.

use std::sync::Arc;

use super::Model;
use super::live::LiveSequences;
use super::metrics::SequenceMetrics;
use super::reaper::Reaper;
use super::sessions::Sessions;
use crate::binding::Binding;
use crate::config::{Config, Opening, Place, Placement};
use crate::error::Error;
use crate::memory::device::{Device, DeviceError, Traffic};
use crate::memory::{Budget, SlotSpec};
use crate::sequence::Policy;
use crate::session::Session;

/// The host, or a GPU, with the sequences of the instances there. Core gives a sequence to one instance for its life, so
/// its state never has to go from one place to another.
pub struct Site {
    /// Which.
    pub place: Place,
    /// Bounds of the pool.
    pub placement: Placement,
    /// The GPU.
    pub device: Option<Arc<Device>>,
    /// The sequences, with their states.
    pub sequences: Arc<LiveSequences>,
    /// What has gone between the host and the device.
    pub traffic: Arc<Traffic>,
    _reaper: Reaper,
}

impl Site {
    /// Makes the pool of a place.
    pub fn new(
        config: &Config,
        binding: &Binding,
        placement: &Placement,
        device: Option<Arc<Device>>,
        version: u64,
    ) -> Result<Self, Error> {
        let policy =
            Policy { idle_limit: config.idle_limit, quiet: config.quiet, queue_requests: config.queue_requests };
        let traffic = Arc::<Traffic>::default();
        let metrics = SequenceMetrics::new(&config.model, version, device.as_ref().map(|device| device.number()));
        let spec = SlotSpec {
            slot_bytes: binding.slot.slot_bytes(),
            device: device.clone().map(|device| (device, binding.device_bytes())),
        };
        let budget = Budget::new(config.states.limits.total);
        let sequences = Arc::new(LiveSequences::new(policy, placement.slots, spec, budget, traffic.clone(), metrics)?);
        let reaper = Reaper::start(sequences.clone());
        let place = placement.place;
        Ok(Self { place, placement: placement.clone(), device, sequences, traffic, _reaper: reaper })
    }
}

impl Site {
    /// Bytes of the pool's first slab where the model runs.
    pub fn pool_bytes(&self, model: &Model) -> usize {
        self.placement.slots.first_slab.saturating_mul(model.binding.device_bytes())
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

/// The devices of a model's places.
pub struct Devices {
    by_place: Vec<(Place, Option<Arc<Device>>)>,
    /// A session to read the model by.
    pub probe: Arc<Session>,
}

impl Devices {
    /// Opens them, and the first session. What cannot be had is an error, unless instances may run on the CPU instead.
    pub fn open(opening: &Opening, sessions: &Sessions) -> Result<Self, Error> {
        let opened = Self::open_strictly(opening, sessions);
        match opened {
            Err(error) if opening.providers.allow_cpu_fallback => {
                log::warn!("{error}: instances of KIND_GPU run on the CPU, as 'allow_cpu_fallback' says");
                let by_place = opening.places.iter().map(|&place| (place, None)).collect();
                Ok(Self { by_place, probe: sessions.probe(None)? })
            }
            opened => opened,
        }
    }

    fn open_strictly(opening: &Opening, sessions: &Sessions) -> Result<Self, Error> {
        let by_place = opening.places.iter().map(|&place| Ok((place, device_of(place)?)));
        let by_place = by_place.collect::<Result<Vec<_>, Error>>()?;
        let first = by_place.iter().find_map(|(_, device)| device.as_ref());
        let probe = sessions.probe(first)?;
        Ok(Self { by_place, probe })
    }

    /// The device of a place; none for the host.
    pub fn of(&self, place: Place) -> Option<Arc<Device>> {
        self.by_place.iter().find(|(known, _)| *known == place).and_then(|(_, device)| device.clone())
    }
}

fn device_of(place: Place) -> Result<Option<Arc<Device>>, DeviceError> {
    match place {
        Place::Cpu => Ok(None),
        Place::Gpu(number) => Device::open(number).map(Some),
    }
}
