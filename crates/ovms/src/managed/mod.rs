//! The tritonserver that the gateway starts itself, and the models it serves there.
//!
//! An update reads the configuration and looks at the models' folders, and lets Triton load and unload where something has
//! changed. Updates come from a timer and from clients, and run one after the other, in a task of their own.

mod config;
mod model;
mod pbtxt;
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

pub use self::config::{ModelOptions, ModelSource, Source};
pub use self::server::{Server, ServerOptions, launcher};

use self::config::Configuration;
use self::model::Model;
use crate::failure::Failure;
use crate::triton::Triton;

/// The models of `config.json` or the command line, as written into the repository of the tritonserver that the
/// gateway has started.
#[derive(Clone, Debug)]
pub struct Managed(Arc<Inner>);

/// Whether a reload found something new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reload {
    /// The configuration and the files are as before.
    Unchanged,
    /// A model was added, removed or loaded again.
    Changed,
}

#[derive(Debug)]
struct Inner {
    source: Source,
    triton: Triton,
    repository: PathBuf,
    models: Mutex<Models>,
    shown: RwLock<Shown>,
}

/// The models, as of the last update.
#[derive(Debug, Default)]
struct Models {
    by_name: BTreeMap<String, Model>,
    /// What the last update logged, so that the next one doesn't repeat it.
    logged: BTreeSet<String>,
}

/// The results of the last update. Requests read them here, because they must not wait for a running update.
#[derive(Debug, Default)]
struct Shown {
    names: BTreeSet<String>,
    /// Where the files of those models are that are right.
    base_paths: BTreeMap<String, PathBuf>,
    /// What the configuration and the files say.
    of_configuration: BTreeMap<String, String>,
    /// What Triton said at the last load.
    of_load: BTreeMap<String, String>,
}

/// How an update ended.
#[derive(Debug, Default)]
struct Update {
    changed: bool,
    /// The configuration can't be read.
    unreadable: Option<String>,
    /// What is wrong, whether something else is served or not.
    problems: Vec<String>,
}

impl Managed {
    /// Models of a tritonserver whose repository is `repository`; none is loaded before the first update.
    pub fn new(source: Source, triton: Triton, repository: PathBuf) -> Self {
        Self(Arc::new(Inner { source, triton, repository, models: Mutex::default(), shown: RwLock::default() }))
    }

    /// Reads the configuration again, writes the repository and lets Triton load and unload. The failure names the
    /// entries that are wrong.
    pub async fn reload(&self) -> Result<Reload, Failure> {
        let update = self.update(true).await;
        if let Some(error) = update.unreadable {
            return Err(Failure::new(Code::FailedPrecondition, error));
        }
        if !update.problems.is_empty() {
            return Err(Failure::new(Code::Internal, update.problems.join("; ")));
        }
        Ok(if update.changed { Reload::Changed } else { Reload::Unchanged })
    }

    /// Configured models that are not served, and why: from the configuration, or from their last load.
    pub fn problems(&self) -> BTreeMap<String, String> {
        let shown = self.0.shown.read();
        let mut problems = shown.of_load.clone();
        problems.extend(shown.of_configuration.clone());
        problems
    }

    /// Names of all configured models.
    pub fn names(&self) -> BTreeSet<String> {
        self.0.shown.read().names.clone()
    }

    /// A text of Triton about a model, with the user's path in place of the repository's.
    pub fn in_base_path(&self, name: &str, text: &str) -> String {
        match self.0.shown.read().base_paths.get(name) {
            Some(base_path) => model::in_base_path(text, &self.0.repository.join(name), base_path),
            None => text.to_owned(),
        }
    }

    /// Loads the models for the first time.
    pub async fn load(&self) {
        self.update(false).await;
    }

    /// Updates the models again and again.
    pub async fn poll(self, every: Duration) {
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once, and the models have just been loaded.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            self.update(false).await;
        }
    }

    /// Goes on if this future is dropped.
    async fn update(&self, asked: bool) -> Update {
        let inner = self.0.clone();
        let update = tokio::spawn(async move { inner.update(asked).await }).await;
        update.unwrap_or_else(|error| Update { unreadable: Some(error.to_string()), ..Update::default() })
    }
}

impl Inner {
    /// `asked`: a client has asked for it, so loads that failed are tried again.
    async fn update(&self, asked: bool) -> Update {
        let mut models = self.models.lock().await;
        let source = self.source.clone();
        let read = tokio::task::spawn_blocking(move || source.read()).await;
        let configuration = match read.map_err(|error| error.to_string()).flatten() {
            Ok(configuration) => configuration,
            Err(error) => {
                models.log(Level::Error, BTreeSet::from([format!("{error}; the models stay as they are")]));
                return Update { unreadable: Some(error), ..Update::default() };
            }
        };
        let mut update = Update { problems: configuration.refused.clone(), ..Update::default() };
        update.changed |= self.unload_others(&mut models, &configuration).await;
        let mut shown = Shown { names: configuration.models.keys().cloned().collect(), ..Shown::default() };
        for (name, entry) in configuration.models {
            let model = models.by_name.entry(name.clone()).or_default();
            let folder = self.repository.join(&name);
            match entry {
                Ok(entry) => {
                    shown.base_paths.insert(name.clone(), entry.base_path.clone());
                    let changed = model.update(&self.triton, &name, &folder, entry, asked).await;
                    update.changed |= changed;
                }
                Err(problem) => model.entry_is_wrong(problem),
            }
            let served = model.is_served();
            for (problem, of) in [(&model.problem, &mut shown.of_configuration), (&model.failure, &mut shown.of_load)] {
                if let Some(problem) = problem {
                    update.problems.push(format!("model '{name}': {problem}"));
                    if !served {
                        of.insert(name.clone(), problem.clone());
                    }
                }
            }
        }
        models.log(Level::Warn, configuration.warnings.iter().chain(&update.problems).cloned().collect());
        *self.shown.write() = shown;
        update
    }

    /// Unloads the models that are no longer listed.
    async fn unload_others(&self, models: &mut Models, configuration: &Configuration) -> bool {
        let gone: Vec<_> =
            models.by_name.keys().filter(|name| !configuration.models.contains_key(*name)).cloned().collect();
        for name in &gone {
            if let Some(mut model) = models.by_name.remove(name) {
                model.unload(&self.triton, name, &self.repository.join(name)).await;
                info!("model '{name}' is no longer listed");
            }
        }
        !gone.is_empty()
    }
}

impl Models {
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
                let available = found.versions.keys().copied().collect();
                let versions: Vec<_> = entry.policy.select(&available).iter().map(i64::to_string).collect();
                text += &format!("# {name}/config.pbtxt, versions {}\n{}", versions.join(", "), found.config);
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
