//! The tritonserver that the gateway starts itself, and the models it serves there.
//!
//! An update reads the configuration and looks at the models' folders, and lets Triton load and unload where something
//! has changed. Updates come from a timer and from clients, and run one after the other, in a task of their own. As in
//! OVMS, a version that can't be loaded counts as one that isn't there, so the policy may select an older one. What was
//! served stays until something else is.

mod config;
mod repository;
mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use log::{Level, info, log, warn};
use parking_lot::RwLock;
use tempfile::TempDir;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Code;

pub use self::config::{ModelOptions, ModelSource, Source, boolean};
pub use self::server::{EXIT_FAILURE, Ended, Server, ServerOptions, launcher};

use self::config::Entry;
use self::repository::{Found, Version, Wanted};
use crate::triton::{Failure, Triton};

/// The models of `config.json` or the command line, as written into the repository of the tritonserver that the
/// gateway has started.
#[derive(Clone, Debug)]
pub struct Managed(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    source: Source,
    triton: Triton,
    repository: PathBuf,
    models: Mutex<Models>,
    shown: RwLock<Shown>,
}

#[derive(Debug, Default)]
struct Models {
    by_name: BTreeMap<String, Model>,
    /// What the last update logged, so that the next one doesn't repeat it.
    logged: BTreeSet<String>,
}

/// The results of the last update. Requests read them here, because they must not wait for a running update.
#[derive(Debug, Default)]
struct Shown {
    /// All configured models. A model that is not served has the reason, from the configuration or from the last load.
    models: BTreeMap<String, Option<String>>,
    /// The files of the models whose entries are right.
    base_paths: BTreeMap<String, PathBuf>,
}

#[derive(Default)]
struct Update {
    changed: bool,
    /// What is wrong, whether something else is served or not.
    problems: Vec<String>,
}

impl Managed {
    /// Models of a tritonserver whose repository is `repository`; none is loaded before the first update.
    pub fn new(source: Source, triton: Triton, repository: PathBuf) -> Self {
        Self(Arc::new(Inner { source, triton, repository, models: Mutex::default(), shown: RwLock::default() }))
    }

    /// Reads the configuration again, writes the repository and lets Triton load and unload. Returns whether a model
    /// was added, removed or loaded again. The failure names the entries that are wrong.
    pub async fn reload(&self) -> Result<bool, Failure> {
        let update = self.update(true).await.map_err(|error| Failure::new(Code::FailedPrecondition, error))?;
        if update.problems.is_empty() {
            Ok(update.changed)
        } else {
            Err(Failure::new(Code::Internal, update.problems.join("; ")))
        }
    }

    /// All configured models, with the reason for each one that is not served.
    pub fn models(&self) -> BTreeMap<String, Option<String>> {
        self.0.shown.read().models.clone()
    }

    /// A text of Triton about a model, with the user's path in place of the repository's.
    pub fn in_base_path(&self, name: &str, text: &str) -> String {
        match self.0.shown.read().base_paths.get(name) {
            Some(base_path) => in_base_path(text, &self.0.repository.join(name), base_path),
            None => text.to_owned(),
        }
    }

    /// Loads the models for the first time. Problems are logged, and do not keep other models from being served.
    pub async fn load(&self) {
        let _ = self.update(false).await;
    }

    pub async fn poll(self, every: Duration) {
        let mut ticks = interval(every);
        // After loads that took longer than a tick, the missed ones would come all at once.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once, and the models have just been loaded.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let _ = self.update(false).await;
        }
    }

    async fn update(&self, asked: bool) -> Result<Update, String> {
        let inner = self.0.clone();
        // A task, so that a client that gives up its reload leaves no load half done.
        let update = tokio::spawn(async move { inner.update(asked).await }).await;
        update.map_err(|error| error.to_string()).flatten()
    }
}

impl Inner {
    /// `asked`: a client has asked for the update, so loads that failed are tried again. The error says why the
    /// configuration can't be read.
    async fn update(&self, asked: bool) -> Result<Update, String> {
        let mut models = self.models.lock().await;
        let source = self.source.clone();
        let configuration = match blocking(move || source.read()).await {
            Ok(configuration) => configuration,
            Err(error) => {
                models.log(Level::Error, BTreeSet::from([format!("{error}; the models stay as they are")]));
                return Err(error);
            }
        };
        let changed = models.unload_others(&configuration.models).await;
        let mut update = Update { changed, problems: configuration.refused };
        let mut shown = Shown::default();
        for (name, entry) in configuration.models {
            let new = || Model::new(&self.triton, &name, &self.repository);
            let model = models.by_name.entry(name.clone()).or_insert_with(new);
            match entry {
                Ok(entry) => {
                    shown.base_paths.insert(name.clone(), entry.base_path.clone());
                    update.changed |= model.update(entry, asked).await;
                }
                Err(problem) => model.entry_is_wrong(problem),
            }
            let problems: Vec<_> = [&model.problem, &model.failure].into_iter().flatten().collect();
            update.problems.extend(problems.iter().map(|problem| format!("model '{name}': {problem}")));
            let first = problems.first().filter(|_| model.served.is_none());
            shown.models.insert(name, first.map(ToString::to_string));
        }
        models.log(Level::Warn, configuration.warnings.iter().chain(&update.problems).cloned().collect());
        *self.shown.write() = shown;
        Ok(update)
    }
}

impl Models {
    async fn unload_others(&mut self, listed: &BTreeMap<String, Result<Entry, String>>) -> bool {
        let gone: Vec<_> = self.by_name.extract_if(.., |name, _| !listed.contains_key(name)).collect();
        let is_any = !gone.is_empty();
        for (name, mut model) in gone {
            model.unload().await;
            info!("model '{name}' is no longer listed");
        }
        is_any
    }

    /// Logs what wasn't said by the update before.
    fn log(&mut self, level: Level, said: BTreeSet<String>) {
        for text in said.difference(&self.logged) {
            log!(level, "{text}");
        }
        self.logged = said;
    }
}

/// The config.pbtxt files of all models, as text, and what can't be served.
pub fn print_config(source: &Source) -> Result<(String, Vec<String>), String> {
    let configuration = source.read()?;
    let mut text = String::new();
    let mut problems = configuration.refused;
    for (name, entry) in configuration.models {
        let found = entry.and_then(|entry| Ok((repository::find(&name, &entry)?, entry)));
        match found {
            Ok((found, entry)) => {
                if !text.is_empty() {
                    text.push('\n');
                }
                let available = found.all.versions.keys().copied().collect();
                let versions: Vec<_> = entry.policy.select(&available).iter().map(i64::to_string).collect();
                text += &format!("# {name}/config.pbtxt, versions {}\n{}", versions.join(", "), found.all.config);
                problems.extend(found.left_out.into_values().map(|why| format!("model '{name}': {why}")));
            }
            Err(problem) => problems.push(format!("model '{name}': {problem}")),
        }
    }
    Ok((text, problems))
}

/// A folder for a repository, for this user only, that is removed when it is dropped.
pub fn repository() -> Result<TempDir, String> {
    tempfile::Builder::new()
        .prefix("stateful-ovms-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(|error| format!("cannot make a folder in {}: {error}", std::env::temp_dir().display()))
}

/// One model: what is served of it, and what is tried when its entry or its files change.
#[derive(Debug)]
struct Model {
    triton: Triton,
    name: String,
    /// Its folder in Triton's repository.
    folder: PathBuf,
    /// What is wrong with its entry or its files.
    problem: Option<String>,
    /// Why its last load failed.
    failure: Option<String>,
    tried: Option<(Entry, Found)>,
    /// Its folder could not be written. That has another cause than the model, so it is tried again.
    unwritten: bool,
    served: Option<Wanted>,
    /// Versions that can't be loaded, in this state of their files.
    failed: BTreeMap<i64, Version>,
}

impl Model {
    fn new(triton: &Triton, name: &str, repository: &Path) -> Self {
        let (triton, name, folder) = (triton.clone(), name.to_owned(), repository.join(name));
        let (problem, failure, tried, served, failed) = (None, None, None, None, BTreeMap::new());
        Self { triton, name, folder, problem, failure, tried, unwritten: false, served, failed }
    }

    /// Its entry can't be served. What is served stays.
    fn entry_is_wrong(&mut self, problem: String) {
        self.problem = Some(problem);
        self.tried = None;
    }

    /// Serves the entry as its files are now. `asked`: tries again what has failed. Returns whether anything has
    /// changed.
    async fn update(&mut self, entry: Entry, asked: bool) -> bool {
        let (of_entry, name) = (entry.clone(), self.name.clone());
        let found = match blocking(move || repository::find(&name, &of_entry)).await {
            Ok(found) => found,
            Err(problem) => {
                self.entry_is_wrong(problem);
                return false;
            }
        };
        let again = (asked && self.failure.is_some()) || self.unwritten;
        let now = (entry, found);
        if self.tried.as_ref() == Some(&now) && !again {
            return false;
        }
        let (entry, found) = &now;
        // Versions may have failed because of the old config.pbtxt.
        if again || self.tried.as_ref().is_none_or(|(_, before)| before.all.config != found.all.config) {
            self.failed.clear();
        }
        self.problem = None;
        self.failure = None;
        self.unwritten = false;
        let changed = self.serve(entry, found, again).await;
        self.tried = Some(now);
        changed
    }

    async fn serve(&mut self, entry: &Entry, found: &Found, again: bool) -> bool {
        let name = self.name.clone();
        loop {
            let loadable =
                found.all.versions.iter().filter(|(number, version)| self.failed.get(number) != Some(version));
            let available: BTreeSet<i64> = loadable.map(|(number, _)| *number).collect();
            let selected = entry.policy.select(&available);
            if selected.is_empty() {
                return self.serve_none(found).await;
            }
            // In the first turn only: the versions of the next ones are tried because a load has failed.
            if self.failure.is_none() {
                for (number, why) in &found.left_out {
                    warn!("model '{name}': version {number} is left out: {why}");
                }
            }
            let mut wanted = found.all.clone();
            wanted.versions.retain(|number, _| selected.contains(number));
            if self.served.as_ref() == Some(&wanted) {
                return self.restore().await;
            }
            let anew = again || self.served.as_ref().is_none_or(|served| wanted.changes(served));
            if let Err(error) = write(&wanted, &self.folder, anew).await {
                self.failure = Some(error);
                self.unwritten = true;
                return self.restore().await;
            }
            let Err(Failure { message, .. }) = self.triton.load(&name).await else {
                info!("model '{name}': serving {}", versions_of(&wanted));
                self.served = Some(wanted);
                return true;
            };
            // Triton's error is about the model as a whole. The index has the reasons of its versions, including old
            // reasons.
            let mut reasons = failed_versions(&self.triton, &name).await;
            reasons.retain(|number, _| wanted.versions.contains_key(number));
            let said: Vec<_> = reasons.iter().map(|(number, reason)| format!("version {number}: {reason}")).collect();
            let failure = if said.is_empty() { message } else { said.join("; ") };
            let failure = in_base_path(&failure, &self.folder, &entry.base_path);
            self.failure = Some(match self.failure.take() {
                Some(before) => format!("{before}; {failure}"),
                None => failure,
            });
            // If no version is to blame, another turn has none to leave out.
            if reasons.is_empty() {
                return self.restore().await;
            }
            let bad = wanted.versions.into_iter().filter(|(number, _)| reasons.contains_key(number));
            self.failed.extend(bad);
        }
    }

    async fn serve_none(&mut self, found: &Found) -> bool {
        if self.failure.is_some() {
            // All that were selected have failed.
            return self.restore().await;
        }
        let why: Vec<_> = found.left_out.values().cloned().collect();
        self.problem = Some(if why.is_empty() {
            "model_version_policy selects none of its versions".to_owned()
        } else {
            why.join("; ")
        });
        self.unload().await
    }

    /// Unloads it, if it is loaded, and removes its folder.
    async fn unload(&mut self) -> bool {
        let served = self.served.take();
        if served.is_some()
            && let Err(failure) = self.triton.unload(&self.name).await
        {
            warn!("model '{}' can't be unloaded: {failure}", self.name);
        }
        remove(&self.folder).await;
        served.is_some()
    }

    /// Makes the folder match again what Triton still serves.
    async fn restore(&self) -> bool {
        match &self.served {
            None => remove(&self.folder).await,
            Some(served) => write(served, &self.folder, false).await.unwrap_or_else(|error| warn!("{error}")),
        }
        false
    }
}

/// Triton names the files of its repository. The user knows them by their paths in base_path.
fn in_base_path(text: &str, folder: &Path, base_path: &Path) -> String {
    text.replace(&*folder.to_string_lossy(), &base_path.to_string_lossy())
}

/// Runs work that waits for files in another thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, String> {
    spawn_blocking(work).await.map_err(|error| error.to_string()).flatten()
}

async fn write(wanted: &Wanted, folder: &Path, anew: bool) -> Result<(), String> {
    let (wanted, path) = (wanted.clone(), folder.to_owned());
    let written = blocking(move || wanted.write(&path, anew).map_err(|error| error.to_string())).await;
    written.map_err(|error| format!("cannot write {}: {error}", folder.display()))
}

async fn remove(folder: &Path) {
    let path = folder.to_owned();
    if let Ok(Err(error)) = spawn_blocking(move || repository::remove(&path)).await {
        warn!("cannot remove {}: {error}", folder.display());
    }
}

/// Versions that Triton could not load, and why.
async fn failed_versions(triton: &Triton, name: &str) -> BTreeMap<i64, String> {
    let of_model = triton.index().await.unwrap_or_default().into_iter().filter(|entry| entry.name == name);
    let failed = of_model.filter(|entry| entry.state == "UNAVAILABLE" && !["", "unloaded"].contains(&&*entry.reason));
    failed.filter_map(|entry| Some((entry.version.parse().ok()?, entry.reason))).collect()
}

fn versions_of(wanted: &Wanted) -> String {
    let numbers: Vec<_> = wanted.versions.keys().map(i64::to_string).collect();
    if let [number] = &numbers[..] { format!("version {number}") } else { format!("versions {}", numbers.join(", ")) }
}
