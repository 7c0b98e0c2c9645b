//! A loaded model: its configuration, session and live sequences, shared by its instances.

mod initial;
mod live;
mod metrics;
mod reaper;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use initial::InitialStep;
pub use live::{Admission, Answered, Lease, LiveSequences, Payload, VaryingSize};
pub use metrics::Snapshot;

use crate::binding::{Binding, InitialModel};
use crate::completion::{Origins, Plan, Settings};
use crate::config::{self, Config, Opening};
use crate::error::Error;
use crate::explain::explain;
use crate::memory::{Budget, OutOfMemory};
use crate::sequence::{Policy, Refusal, SequenceId};
use crate::session::{Library, Session};
use crate::triton;
use reaper::Reaper;

/// A loaded model. Dropping it stops its reaper.
pub struct Model {
    /// What config.pbtxt says.
    pub config: Config,
    /// How the ONNX model fits it.
    pub binding: Binding,
    /// The ONNX model; one for all instances, as its runs may overlap.
    pub session: Arc<Session>,
    /// The model for initial states, where they depend on the first request.
    pub initial_model: Option<LoadedInitialModel>,
    /// The sequences of all instances, with their states.
    pub sequences: Arc<LiveSequences>,
    next_instance: AtomicU32,
    _reaper: Reaper,
}

/// A model for initial states.
pub struct LoadedInitialModel {
    /// The ONNX model.
    pub session: Arc<Session>,
    /// How it fits the model that it is for.
    pub binding: InitialModel,
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
    /// Opens the ONNX model, completes the configuration from it, holds one against the other and makes the state pool.
    pub fn load(
        triton: triton::Model,
        location: &Location,
        library: &Library,
        default_max_batch_size: usize,
    ) -> Result<Self, Error> {
        let json = triton.config_json()?;
        let opening = Opening::from_json(&json)?;
        let version_dir = location.repository.join(location.version.to_string());
        let file = config::find_model_file(
            opening.model_file.as_ref(),
            opening.states.initial_model.as_deref(),
            &version_dir,
        )?;
        let session = Arc::new(Session::open(library, &file, &opening.session)?);
        let settings = Settings { completes: triton.wants_completion().unwrap_or(false), default_max_batch_size };
        let plan = Plan::new(&json, &opening, session.signature(), session.graph_description(), settings)?;
        let config = match &plan.completed {
            Some(completed) => {
                triton.set_config_json(completed)?;
                Config::from_json(&triton.config_json()?)?
            }
            None => Config::from_json(&json)?,
        };
        let files = config::read_initial_files(&location.repository, config.states.initial_files())?;
        let mut binding = Binding::new(&config, &plan.pairs, session.signature(), &files)?;
        let initial_model = load_initial_model(&config, &version_dir, library, &mut binding)?;
        let policy =
            Policy { idle_limit: config.idle_limit, quiet: config.quiet, queue_requests: config.queue_requests };
        let metrics = metrics::SequenceMetrics::new(&config.model, location.version);
        let sequences = Arc::new(LiveSequences::new(
            policy,
            config.slots,
            binding.slot.slot_bytes(),
            Budget::new(config.states.limits.total),
            metrics,
        )?);
        let reaper = Reaper::start(sequences.clone());
        let next_instance = AtomicU32::new(0);
        let model = Self { config, binding, session, initial_model, sequences, next_instance, _reaper: reaper };
        model.log(location, &file, library, plan.origins);
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
    fn log(&self, location: &Location, file: &Path, library: &Library, origins: Origins) {
        let name = format!("{} version {}", self.config.model, location.version);
        log::info!(
            "model {name}: {} on ONNX Runtime {} from {}",
            file.display(),
            library.version(),
            library.path().display()
        );
        let explained = explain(&self.config, &self.binding, self.session.signature(), origins);
        for line in self.config.to_string().lines().chain(explained.lines()) {
            log::info!("model {name}: {line}");
        }
        let (capacity, bytes) = (self.config.slots.capacity, self.binding.slot.slot_bytes());
        let (buffers, rows) = (self.config.resident_batches + 1, self.config.most_rows());
        log::info!(
            "model {name}: pool of {capacity} × {bytes} = {} bytes at most; up to {buffers} batch buffers of {rows} × {} \
             bytes for each instance",
            capacity.saturating_mul(bytes),
            self.binding.batch_bytes()
        );
    }
}

/// Loads the model for initial states. One without inputs says the same each time, so it runs now and is done with.
fn load_initial_model(
    config: &Config,
    version_dir: &Path,
    library: &Library,
    binding: &mut Binding,
) -> Result<Option<LoadedInitialModel>, Error> {
    let Some(name) = &config.states.initial_model else { return Ok(None) };
    let file = config::find_named_file(version_dir, "parameter 'initial_state_model'", name)?;
    let session = Arc::new(Session::open(library, &file, &config.session)?);
    let bound = InitialModel::new(binding, session.signature())?;
    if !bound.inputs.is_empty() {
        binding.set_initial_from_model(&bound);
        return Ok(Some(LoadedInitialModel { session, binding: bound }));
    }
    let ran = InitialStep::new(session, &bound)?.run(binding, &bound, None);
    let initial = ran.map_err(|error| Error::InitialModel { file: name.clone(), source: Box::new(error) })?;
    binding.set_initial(initial);
    Ok(None)
}
