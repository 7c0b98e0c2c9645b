//! A loaded model: its configuration, session and live sequences, shared by its instances.

mod live;
mod metrics;
mod reaper;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use live::{Admission, Lease, LiveSequences};
pub use metrics::Snapshot;

use crate::binding::Binding;
use crate::config::{self, Config};
use crate::error::Error;
use crate::memory::OutOfMemory;
use crate::sequence::{Policy, Refusal, SequenceId};
use crate::session::{Library, Session};
use reaper::Reaper;

/// A loaded model. Dropping it stops its reaper.
pub struct Model {
    /// What config.pbtxt says.
    pub config: Config,
    /// How the ONNX model fits it.
    pub binding: Binding,
    /// The ONNX model; one for all instances, as its runs may overlap.
    pub session: Arc<Session>,
    /// The sequences of all instances, with their states.
    pub sequences: Arc<LiveSequences>,
    next_instance: AtomicU32,
    _reaper: Reaper,
}

/// Where a model lies.
#[derive(Clone, Debug)]
pub struct Location {
    /// Version of the model.
    pub version: u64,
    /// The model's folder, with a folder for each version.
    pub repository: PathBuf,
}

impl Model {
    /// Loads the ONNX model, holds it against the configuration and makes the state pool.
    pub fn load(config_json: &[u8], location: &Location, library: &Library) -> Result<Self, Error> {
        let config = Config::from_json(config_json)?;
        let file = config::find_model_file(&config, &location.repository.join(location.version.to_string()))?;
        let session = Arc::new(Session::open(library, &file, &config.session)?);
        let state_pairs = config.state_pairs_or(session.graph_description())?;
        let binding = Binding::new(&config, &state_pairs, session.signature())?;
        let policy =
            Policy { idle_limit: config.idle_limit, quiet: config.quiet, queue_requests: config.queue_requests };
        let metrics = metrics::SequenceMetrics::new(&config.model, location.version);
        let sequences = Arc::new(LiveSequences::new(policy, config.slots, binding.slot_size(), metrics)?);
        let reaper = Reaper::start(sequences.clone());
        let model = Self { config, binding, session, sequences, next_instance: AtomicU32::new(0), _reaper: reaper };
        model.log(location, &file, library);
        Ok(model)
    }

    /// A number for a new instance, never given twice.
    pub fn next_instance(&self) -> u32 {
        self.next_instance.fetch_add(1, Ordering::Relaxed)
    }

    /// Why a request has no sequence, in words for its client.
    pub fn refusal(&self, refusal: Refusal<OutOfMemory>, id: SequenceId) -> Error {
        match refusal {
            Refusal::Unknown => Error::UnknownSequence { id, idle_limit_ms: self.config.idle_limit.as_millis() },
            Refusal::Full { capacity } => Error::PoolFull { id, capacity, reason: self.config.capacity_reason.clone() },
            Refusal::Memory(source) => Error::PoolMemory { id, source },
            Refusal::Busy => Error::SequenceBusy(id),
        }
    }

    /// The whole resolved configuration, a line each, so that an operator can see what the backend understood.
    fn log(&self, location: &Location, file: &std::path::Path, library: &Library) {
        let name = format!("{} version {}", self.config.model, location.version);
        log::info!(
            "model {name}: {} on ONNX Runtime {} from {}",
            file.display(),
            library.version(),
            library.path().display()
        );
        for line in self.config.to_string().lines().chain(self.binding.to_string().lines()) {
            log::info!("model {name}: {line}");
        }
        let (capacity, bytes) = (self.config.slots.capacity, self.binding.slot.slot_bytes());
        log::info!("model {name}: pool of {capacity} × {bytes} = {} bytes at most", capacity.saturating_mul(bytes));
    }
}
