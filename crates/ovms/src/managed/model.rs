//! One model: what is served of it, and what is tried when its entry or its files change.
//!
//! As in OVMS, a version that can't be loaded counts as one that isn't there, so the policy may select an older one. What
//! was served stays until something else is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use log::{info, warn};
use tokio::task::spawn_blocking;

use super::config::Entry;
use super::repository::{self, Found, Version, Wanted};
use crate::triton::{Failure, Triton};

#[derive(Debug)]
pub struct Model {
    triton: Triton,
    name: String,
    /// Its folder in Triton's repository.
    folder: PathBuf,
    /// What is wrong with its entry or its files.
    pub problem: Option<String>,
    /// Why its last load failed.
    pub failure: Option<String>,
    tried: Option<(Entry, Found)>,
    /// Its folder could not be written. That has another cause than the model, so it is tried again.
    unwritten: bool,
    pub served: Option<Wanted>,
    /// Versions that can't be loaded, in this state of their files.
    failed: BTreeMap<i64, Version>,
}

impl Model {
    pub fn new(triton: &Triton, name: &str, repository: &Path) -> Self {
        let (triton, name, folder) = (triton.clone(), name.to_owned(), repository.join(name));
        let (problem, failure, tried, served, failed) = (None, None, None, None, BTreeMap::new());
        Self { triton, name, folder, problem, failure, tried, unwritten: false, served, failed }
    }

    /// Its entry can't be served. What is served stays.
    pub fn entry_is_wrong(&mut self, problem: String) {
        self.problem = Some(problem);
        self.tried = None;
    }

    /// Serves the entry as its files are now. `asked`: tries again what has failed. Returns whether anything has changed.
    pub async fn update(&mut self, entry: Entry, asked: bool) -> bool {
        let (of_entry, name) = (entry.clone(), self.name.clone());
        let found = spawn_blocking(move || repository::find(&name, &of_entry)).await;
        let found = match found.map_err(|error| error.to_string()).flatten() {
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
            // Triton's error is about the model as a whole. The index has the reasons of its versions, including old reasons.
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
    pub async fn unload(&mut self) -> bool {
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
pub fn in_base_path(text: &str, folder: &Path, base_path: &Path) -> String {
    text.replace(&*folder.to_string_lossy(), &base_path.to_string_lossy())
}

async fn write(wanted: &Wanted, folder: &Path, anew: bool) -> Result<(), String> {
    let (wanted, path) = (wanted.clone(), folder.to_owned());
    let written = spawn_blocking(move || wanted.write(&path, anew).map_err(|error| error.to_string())).await;
    let written = written.map_err(|error| error.to_string()).flatten();
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
