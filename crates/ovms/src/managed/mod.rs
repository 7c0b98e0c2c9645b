//! The tritonserver that the gateway starts itself, and the models it serves there.
//!
//! An update reads the configuration and looks at the models' folders, and lets Triton load and unload where something has
//! changed. Updates come from a timer and from clients, and run one after the other, in a task of their own.

mod config;
mod model;
mod policy;
mod repository;
mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use log::{Level, info, log};
use parking_lot::RwLock;
use tempfile::TempDir;
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Code;

pub use self::config::{ModelOptions, ModelSource, Source, boolean};
pub use self::server::{EXIT_FAILURE, Ended, Server, ServerOptions, launcher};

use self::config::Entry;
use self::model::Model;
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

    /// Reads the configuration again, writes the repository and lets Triton load and unload. Returns whether a model was
    /// added, removed or loaded again. The failure names the entries that are wrong.
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
            Some(base_path) => model::in_base_path(text, &self.0.repository.join(name), base_path),
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
    /// `asked`: a client has asked for the update, so loads that failed are tried again. The error says why the configuration
    /// can't be read.
    async fn update(&self, asked: bool) -> Result<Update, String> {
        let mut models = self.models.lock().await;
        let source = self.source.clone();
        let read = tokio::task::spawn_blocking(move || source.read()).await;
        let configuration = match read.map_err(|error| error.to_string()).flatten() {
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
