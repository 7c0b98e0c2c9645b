//! A loaded model: its configuration, session and live sequences, shared by its instances.

#![forbid(unsafe_code)]

mod lease;
mod live;
mod metrics;
mod prepared;
mod sessions;
mod site;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

pub use lease::{Answered, Lease, RepeatKey, Settled, StateMemory};
pub use live::{Extras, Grown, LiveSequences, VaryingSize};
pub use metrics::{QueueNumbers, Ran, Saves};
#[cfg(any(test, feature = "fuzzing"))]
pub use prepared::OnnxModel;
pub use prepared::{InitialStep, LoadedInitialModel, Prepared, served};

pub use sessions::Opened;
pub use site::Site;

use crate::binding::{Binding, BoundWindow, MostSteps, RequestInput, StateApi};
use crate::completion::{Plan, Settings};
use crate::config::{self, Config, Durability, InstanceKind, PartialConfig, Placement, Strategy};
use crate::conversion::Served;
use crate::error::{AdmissionError, LoadError};
use crate::explain::{explain, explain_batch_scale};
use crate::memory::MemoryError;
use crate::onnx::{ModelSource, unrepeatable};
use crate::session::{Library, Session};
use crate::triton;
use gpu_rows::{DeviceError, devices_for_cpu_instances};
use parking_lot::Mutex;
use sequences::scheduler::IdleRule;
use sequences::{Refusal, SequenceId};
use sessions::Sessions;
use site::Devices;
use state_store::{Keeper, StoreError, Token};

/// Core's `max_sequence_idle_microseconds` where the configuration has none.
const TRITONS_IDLE_LIMIT: Duration = Duration::from_secs(1);

/// How long a store on the network may take to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The open keepers of this process, each with its location and the prefix of its keys. Triton loads a model again
/// before, or while, it unloads the older instance.
static OPEN: Mutex<Vec<(String, Weak<Keeper>)>> = Mutex::new(Vec::new());

pub struct Model {
    pub config: Config,
    pub binding: Arc<Binding>,
    pub state_api: Option<StateApi>,
    pub sessions: Sessions,
    pub initial_model: Option<LoadedInitialModel>,
    /// Where its sequences are kept beside the server.
    pub keeper: Option<Arc<Keeper>>,
    sites: Vec<Site>,
    next_instance: AtomicU32,
}

#[derive(Clone, Debug, Default)]
pub struct ServerDefaults {
    pub max_batch_size: usize,
    /// `sequence_cleaner_poll_wait_minutes`
    pub poll_wait: Option<IdleRule>,
    pub state_store: Option<state_store::Location>,
}

impl Model {
    /// Opens the ONNX model, completes the configuration from it, binds the one to the other, and makes the state
    /// pools.
    pub fn load(triton: triton::Model, library: &Arc<Library>, defaults: ServerDefaults) -> Result<Self, LoadError> {
        let mut partial = PartialConfig::from_json(&triton.config_json()?)?;
        partial.scans_of_server = defaults.poll_wait;
        partial.store_of_server = defaults.state_store;
        config::spread_cpu_instances(&mut partial.instances, devices_for_cpu_instances());
        // The repository has a folder for each version.
        let (version, repository) = (triton.version()?, triton.repository()?);
        let version_dir = repository.join(version.to_string());
        let completes = triton.wants_completion().unwrap_or(false);
        let settings = Settings { completes, default_max_batch_size: defaults.max_batch_size, rows_mix: false };
        let Served { model, initial_states, notes, warnings } =
            served(&mut partial, &version_dir, library, settings, |partial| {
                let initial_model = partial.states.initial_model.as_deref();
                config::find_model_file(partial.model_file.as_ref(), initial_model, &version_dir)
            })?;
        let mut sessions = Sessions::new(library.clone(), model, partial.session.clone(), partial.providers.clone());
        let devices = Devices::open(&partial, &sessions)?;
        let session = devices.probe.clone();
        let mut prepared =
            Prepared::new(&mut partial, &session, &sessions.source, &repository, settings, || sessions.on_host())?;
        check_server(&partial, &prepared)?;
        if prepared.has_additions {
            // Triton's copy has all but an added parameter, because Triton takes no parameters from a backend.
            triton.set_config_json(partial.document.to_string().as_bytes())?;
        }
        sessions.complete(&prepared.config, &prepared.binding);
        // The log and the model for initial states use the completed options.
        prepared.config.written.session = sessions.options.clone();
        let initial_model = prepared.load_initial_model(initial_states, &version_dir, library)?;
        let Prepared { mut config, binding, state_api, mut plan, .. } = prepared;
        plan.notes.extend(notes);
        plan.warnings.extend(warnings);
        if sessions.providers.cuda_graph && config.warmup_batch_sizes.is_empty() {
            // stateful_backend makes graphs of full batches.
            config.warmup_batch_sizes.push(config.max_rows_per_run);
        }
        if sessions.providers.cuda_graph {
            check_graphs(&session, library, &binding, &sessions.source)?;
        }
        let site = |placement: &Placement| Site::new(&config, &binding, placement, devices.of(placement.kind), version);
        let sites = config.placements.iter().map(site).collect::<Result<_, _>>()?;
        let next_instance = AtomicU32::new(0);
        let binding = Arc::new(binding);
        let keeper = keeper(&config, &binding, version)?;
        let model = Self { config, binding, state_api, sessions, initial_model, keeper, sites, next_instance };
        model.log(version, &session, library, &plan);
        Ok(model)
    }

    pub fn has_held_inputs(&self) -> bool {
        !self.config.held_inputs.is_empty()
    }

    /// The site of a model that has one instance.
    pub fn only_site(&self) -> Result<&Site, LoadError> {
        self.site(self.config.placements.first().map_or(InstanceKind::Cpu, |placement| placement.kind))
    }

    pub fn site(&self, kind: InstanceKind) -> Result<&Site, LoadError> {
        let site = self.sites.iter().find(|site| site.kind == kind);
        site.ok_or_else(|| LoadError::NoSite { model: self.config.model.clone(), kind: kind.to_string() })
    }

    /// Where instance `number` runs, to which Triton gives this GPU. Without one: on the host, or in turn on the
    /// devices for such instances.
    pub fn kind_of(&self, gpu: Option<i32>, number: u32) -> InstanceKind {
        match gpu {
            Some(gpu) => InstanceKind::Gpu(gpu),
            None if !self.config.is_on_gpu() || devices_for_cpu_instances() == 0 => InstanceKind::Cpu,
            None => self.sites[number as usize % self.sites.len()].kind,
        }
    }

    /// Why its instances do not serve any more: a call to a GPU has failed.
    pub fn device_failure(&self) -> Option<&DeviceError> {
        self.sites.iter().find_map(|site| site.sequences.device_failure())
    }

    /// Whether the process is to end when it can't use a GPU any more.
    pub const fn exits_on_gpu_failure(&self) -> bool {
        self.sessions.providers.exit_on_gpu_failure
    }

    /// A number for a new instance, never given twice.
    pub fn next_instance(&self) -> u32 {
        // Relaxed: only the numbers must differ.
        self.next_instance.fetch_add(1, Ordering::Relaxed)
    }

    /// Why a request to an instance of that kind has no sequence, in words for its client.
    pub fn refusal(&self, kind: InstanceKind, refusal: Refusal<MemoryError>, id: SequenceId) -> AdmissionError {
        match refusal {
            Refusal::Unknown => AdmissionError::Unknown { id, idle_limit_ms: self.config.idle_limit.as_millis() },
            Refusal::Ambiguous => AdmissionError::Ambiguous { id, wait_ms: 2 * self.config.quiet.as_millis() },
            Refusal::Full { capacity } => {
                let site = self.sites.iter().find(|site| site.kind == kind);
                let reason = site.map_or(String::new(), |site| site.placement.capacity_reason.clone());
                AdmissionError::PoolFull { id, capacity, reason }
            }
            Refusal::Memory(source) => AdmissionError::PoolMemory { id, source },
            Refusal::Busy => AdmissionError::Busy(id),
        }
    }

    /// Logs the whole resolved configuration, so that an operator can see what the backend understood.
    fn log(&self, version: u64, session: &Session, library: &Library, plan: &Plan) {
        let name = format!("{} version {}", self.config.model, version);
        log::info!(
            "model {name}: {} on ONNX Runtime {} from {}",
            self.sessions.source,
            library.version,
            library.path.display()
        );
        let explained = explain(&self.config, &self.binding, &session.signature, plan.origins);
        let rows = plan.rows.as_deref();
        for line in self.config.to_string().lines().chain(explained.lines()).chain(rows) {
            log::info!("model {name}: {line}");
        }
        if let Some(scale) = plan.nodes.batch_scale.as_ref().filter(|_| self.config.is_batched()) {
            let level = if self.config.max_rows_per_run > 1 { log::Level::Warn } else { log::Level::Info };
            log::log!(level, "model {name}: {}", explain_batch_scale(scale, &self.config));
        }
        self.log_memory(&name);
        self.log_steps(&name);
        if self.config.is_on_gpu() {
            log::info!("model {name}: {}", self.sessions.providers);
        }
        self.log_cores(&name);
        self.warn_of_scheduling(&name);
        for note in &plan.notes {
            log::info!("model {name}: {note}");
        }
        let of_binding = self.binding.warnings(&self.config, &session.signature);
        for warning in plan.warnings.iter().chain(&of_binding) {
            log::warn!("model {name}: {warning}");
        }
        if self.config.states.limits.are_written && !self.binding.has_varying_states() && !self.has_held_inputs() {
            log::warn!(
                "model {name}: 'max_state_bytes' and 'max_state_bytes_per_sequence' bound states that vary in size and held \
                 inputs, and have no effect here; other states are bounded by the pool's capacity"
            );
        }
    }

    fn log_memory(&self, name: &str) {
        let bytes = self.binding.slot.slot_bytes();
        let (buffers, rows) = (self.config.resident_batches + 1, self.config.most_rows());
        for Site { kind, placement, device, .. } in &self.sites {
            let capacity = placement.slots.capacity;
            let memory =
                device.as_ref().map_or("host memory".to_owned(), |device| format!("memory of {}", device.name()));
            log::info!(
                "model {name}: on the {kind}, a pool of {capacity} × {bytes} = {} bytes of {memory} at most; up to \
                 {buffers} batch buffers of {rows} × {} bytes for each instance",
                capacity.saturating_mul(bytes),
                self.binding.batch_bytes()
            );
        }
    }

    /// Logs what a request may make, if it may make several steps.
    fn log_steps(&self, name: &str) {
        if !self.binding.makes_steps() {
            return;
        }
        let MostSteps { steps, answer_bytes } = self.binding.most_steps;
        let left = |(_, request, window): (_, &RequestInput, BoundWindow)| {
            (window.taken(request.context, true) - 1).saturating_mul(window.element_bytes)
        };
        let left: usize = self.binding.windows().map(left).sum();
        log::info!(
            "model {name}: a request makes up to {steps} steps (max_steps_per_request), whose outputs have up to {answer_bytes} \
             bytes; a sequence keeps up to {left} bytes that are left over"
        );
    }

    fn log_cores(&self, name: &str) {
        let Ok(cores) = thread::available_parallelism() else { return };
        if self.config.is_on_gpu() {
            return;
        }
        let (parameter, runs) = match self.config.strategy {
            Strategy::Own(own) => ("worker_count", own.workers),
            Strategy::Oldest | Strategy::Direct => {
                ("instance_group.count", self.config.placements.iter().map(|placement| placement.instances).sum())
            }
        };
        let threads = match self.config.session.intra_op_threads {
            0 => "0 (all cores)".to_owned(),
            threads => threads.to_string(),
        };
        log::info!(
            "model {name}: up to {runs} run(s) at a time ({parameter} {runs}), each with intra_op_thread_count {threads}; \
             this server may use {cores} core(s)"
        );
    }

    fn warn_of_scheduling(&self, name: &str) {
        if self.config.holds_one_sequence() {
            log::warn!(
                "model {name}: with 'direct' and max_batch_size {}, each instance holds one sequence, and the START of \
                 another waits in core until that one has ended; for more, write 'sequence_batching {{ oldest {{ \
                 max_candidate_sequences: 1024 }} }}'",
                self.config.max_batch_size
            );
        }
        if self.config.batches_unordered && matches!(self.config.strategy, Strategy::Own(_)) {
            log::warn!(
                "model {name}: as a step of an ensemble on Triton 25.06 or newer, this model can get a sequence's \
                 requests out of order if its client does not wait for answers: write 'preserve_ordering: true' in \
                 'dynamic_batching', or leave 'dynamic_batching' out"
            );
        }
        if self.config.waits_for_resources && self.config.strategy == Strategy::Oldest {
            log::warn!(
                "model {name}: with --rate-limit=execution_count, requests can wait in core for the resources of \
                 instance_group while the instance is idle, but after a pause of {:?} the backend assumes that core's \
                 queue is empty: give each sequence a new id, or leave out 'sequence_batching'",
                self.config.quiet
            );
        }
        if self.config.core_idle_limit == Some(TRITONS_IDLE_LIMIT) {
            log::warn!(
                "model {name}: core forgets a sequence that sends nothing for one second, which is Triton's default; for \
                 more, write 'sequence_batching {{ max_sequence_idle_microseconds: 60000000 ... }}'"
            );
        }
    }
}

/// Refuses CUDA graphs where they would repeat something else than the run.
fn check_graphs(
    session: &Session,
    library: &Library,
    binding: &Binding,
    source: &ModelSource,
) -> Result<(), LoadError> {
    if !library.tells_read_on_host() {
        return Err(LoadError::NoCudaGraph(library.version.clone()));
    }
    let read_on_host = || {
        let input = binding.inputs.iter().find(|input| session.reads_on_host(&input.name) != Some(false))?;
        Some(format!("ONNX Runtime reads '{}' on the host, or may do so", input.name))
    };
    match binding.unfit_for_graphs().or_else(read_on_host).or_else(|| unrepeatable(source)) {
        Some(why) => Err(LoadError::CudaGraph(why)),
        None => Ok(()),
    }
}

fn check_server(partial: &PartialConfig, prepared: &Prepared) -> Result<(), LoadError> {
    if prepared.state_api.is_some() && !triton::gives_request_parameters() {
        return Err(LoadError::NoRequestParameters);
    }
    if partial.leaves_candidates_out() && !triton::fills_in_candidates() {
        return Err(LoadError::NoDefaultCandidates { wanted: prepared.config.max_batch_size.max(1) });
    }
    Ok(())
}

/// The store; `None` if sequences end with their server. A store that can't be reached now may be there later.
fn keeper(config: &Config, binding: &Binding, version: u64) -> Result<Option<Arc<Keeper>>, LoadError> {
    let Some(of) = &config.state_store else { return Ok(None) };
    let unusable = |source| LoadError::StateStore { location: of.location.to_string(), source };
    let saves_later = of.durability != Durability::Step;
    // Only a server that saves later can have a newer state than the store. Other servers ask it for a sequence by this
    // token.
    let server = saves_later.then(Token::random).transpose().map_err(unusable)?;
    let settings = state_store::Settings { ttl: of.ttl, timeout: TIMEOUT, server, replicas: of.replicas };
    let store = state_store::open(&of.location, settings).map_err(unusable)?;
    // A server with another version of the model, or with other states, has other records.
    let space = format!("stateful:{}:{version}:{:08x}", config.model, states_hash(binding));
    let keeper = Keeper::new(store, &space, settings);
    match keeper.probe() {
        Ok(_) => {}
        Err(why @ (StoreError::Unreachable(_) | StoreError::Refuses(_))) if !of.is_required => log::warn!(
            "{}: parameter 'state_store' ({}): {why}; until it answers, {}",
            config.model,
            of.location,
            if saves_later { "nothing is saved" } else { "requests are refused" }
        ),
        Err(source) => return Err(unusable(source)),
    }
    let location = match &of.location {
        // The folder is there now, and may have several names.
        state_store::Location::File(folder) => {
            folder.canonicalize().unwrap_or_else(|_| folder.clone()).display().to_string()
        }
        state_store::Location::Redis(_) => of.location.to_string(),
    };
    Ok(Some(open(format!("{location} {space}"), keeper)))
}

fn open(name: String, mut keeper: Keeper) -> Arc<Keeper> {
    let mut all = OPEN.lock();
    all.retain(|(_, open)| open.strong_count() > 0);
    keeper.follow(all.iter().filter(|(open, _)| *open == name).map(|(_, open)| open.clone()).collect());
    let keeper = Arc::new(keeper);
    all.push((name, Arc::downgrade(&keeper)));
    keeper
}

/// A hash of everything that a sequence of the model keeps: names, data types and dims.
fn states_hash(binding: &Binding) -> u32 {
    let mut text = String::new();
    for state in &binding.states {
        text += &format!("{} {:?} {:?};", binding.inputs[state.input].name, state.data_type, state.dims);
    }
    for (input, _, of) in binding.contexts() {
        let dims = binding.inputs[input].dims_of_part(of.axis, of.length as i64);
        text += &format!("{} {dims:?};", binding.context_name(input, of));
    }
    for &counter in &binding.counters {
        text += &format!("{};", binding.counter_name(counter));
    }
    for (input, _) in binding.request_inputs().filter(|(_, of)| of.is_held) {
        text += &format!("{} {:?};", input.name, input.data_type);
    }
    for (input, _, window) in binding.windows() {
        text += &format!("{} {:?};", binding.window_name(input, window), input.data_type);
    }
    crc32fast::hash(text.as_bytes())
}
