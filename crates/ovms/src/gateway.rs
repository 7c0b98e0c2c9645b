//! Code that the requests of both protocols share, and the models and versions that are served, in TensorFlow Serving's states.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use crate::managed::Managed;
use crate::metrics::Metrics;
use crate::models::{Models, Signature, Version, version_text};
use crate::predict::order::Order;
use crate::proto::inference::repository_index_response::ModelIndex;
use crate::proto::tensorflow::serving::model_version_status::State;
use crate::triton::{Failure, Triton};

const LOAD_WAIT: Duration = Duration::from_secs(10);
/// Each request that waits asks for itself.
const LOAD_POLL: Duration = Duration::from_millis(250);

const NAME_MISSING: &str = "Model with requested name is not found";
const VERSION_MISSING: &str = "Model with requested version is not found";
const RETIRED: &str = "Model with requested version is retired";
const NOT_LOADED_YET: &str = "Model with requested version is not loaded yet";

pub struct Gateway {
    pub triton: Triton,
    pub models: Models,
    pub order: Order,
    pub metrics: Metrics,
    /// The configuration, if the gateway has started Triton itself.
    pub managed: Option<Managed>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionStatus {
    /// 0 if the model's versions are not known yet.
    pub version: i64,
    pub state: State,
    /// TensorFlow Serving's `StatusProto`.
    pub error_code: Code,
    pub error_message: String,
}

impl Gateway {
    pub fn new(triton: Triton, managed: Option<Managed>) -> Self {
        Self { triton, models: Models::default(), order: Order::default(), metrics: Metrics::new(), managed }
    }

    /// Like [`Gateway::ask_signature`], but waits up to `LOAD_WAIT` while the model loads, as OVMS does.
    pub async fn wait_for_signature(&self, name: &str, version: Version) -> Result<Arc<Signature>, Failure> {
        let deadline = Instant::now() + LOAD_WAIT;
        loop {
            match self.ask_signature(name, version).await {
                // Only if no problem follows the text: otherwise the model has failed to load, and waiting would not help.
                Err(Failure { code: Code::Unavailable, message })
                    if message == NOT_LOADED_YET && Instant::now() < deadline =>
                {
                    tokio::time::sleep(LOAD_POLL).await;
                }
                result => return result,
            }
        }
    }

    /// Asks Triton for the signature, and remembers it. If the model isn't served, the failure has OVMS's code and text.
    pub async fn ask_signature(&self, name: &str, version: Version) -> Result<Arc<Signature>, Failure> {
        let failure = match self.triton.metadata(name, &version_text(version)).await {
            Ok(metadata) => {
                let signature = Arc::new(Signature::new(metadata, version));
                self.models.insert(name, version, signature.clone());
                return Ok(signature);
            }
            Err(failure) => failure,
        };
        if failure.code == Code::DeadlineExceeded {
            return Err(failure);
        }
        // This also removes the name from the labels of metrics, where a model that is gone counts as unknown.
        self.models.remove(name);
        Err(match self.statuses().await {
            Ok(mut models) => why_not_served(models.remove(name), version).unwrap_or(failure),
            Err(failure) => failure,
        })
    }

    /// All models that Triton serves, has served or could not load, and all that are configured, with their versions.
    pub async fn statuses(&self) -> Result<BTreeMap<String, Vec<VersionStatus>>, Failure> {
        let mut models: BTreeMap<String, Vec<VersionStatus>> = BTreeMap::new();
        for mut entry in self.triton.index().await? {
            if let Some(managed) = &self.managed {
                entry.reason = managed.in_base_path(&entry.name, &entry.reason);
            }
            if let Some(status) = VersionStatus::new(&entry) {
                models.entry(entry.name).or_default().push(status);
            }
        }
        if let Some(managed) = &self.managed {
            for (name, problem) in managed.models() {
                let versions = models.entry(name).or_default();
                // Triton's index does not list a model whose entry or files are wrong, because it was never loaded.
                if versions.is_empty() {
                    versions.push(VersionStatus::loading(0, problem));
                }
            }
        }
        for versions in models.values_mut() {
            versions.sort_by_key(|status| status.version);
        }
        Ok(models)
    }

    /// The versions of a model; only `version` if it is given.
    pub async fn statuses_of(&self, name: &str, version: Version) -> Result<Vec<VersionStatus>, Failure> {
        let versions = self.statuses().await?.remove(name).ok_or_else(|| Failure::new(Code::NotFound, NAME_MISSING))?;
        let Some(version) = version else { return Ok(versions) };
        let found: Vec<_> = versions.into_iter().filter(|status| status.version == version).collect();
        if found.is_empty() { Err(Failure::new(Code::NotFound, VERSION_MISSING)) } else { Ok(found) }
    }
}

impl VersionStatus {
    fn new(model: &ModelIndex) -> Option<Self> {
        // A model that was never loaded has no version in the index.
        let version = model.version.parse().ok()?;
        let state = match (model.state.as_str(), model.reason.as_str()) {
            ("READY", _) => State::Available,
            ("LOADING", _) => State::Loading,
            ("UNLOADING", _) => State::Unloading,
            ("UNAVAILABLE", "unloaded" | "") => State::End,
            // As in OVMS, a version that failed to load stays in this state.
            ("UNAVAILABLE", reason) => return Some(Self::loading(version, Some(reason.to_owned()))),
            _ => State::Start,
        };
        Some(Self { state, ..Self::loading(version, None) })
    }

    fn loading(version: i64, problem: Option<String>) -> Self {
        let error_code = if problem.is_some() { Code::Unknown } else { Code::Ok };
        Self { version, state: State::Loading, error_code, error_message: problem.unwrap_or_else(|| "OK".to_owned()) }
    }
}

/// OVMS's error for a model that Triton doesn't serve. None if the version is served after all.
fn why_not_served(versions: Option<Vec<VersionStatus>>, version: Version) -> Option<Failure> {
    let Some(versions) = versions else { return Some(Failure::new(Code::NotFound, NAME_MISSING)) };
    // 0: the versions of the model aren't known yet.
    let asked = |status: &&VersionStatus| version.is_none_or(|version| [version, 0].contains(&status.version));
    // Of several versions, the latest one is the one that was asked for.
    let Some(VersionStatus { state, error_code, error_message, .. }) = versions.iter().rev().find(asked) else {
        return Some(Failure::new(Code::NotFound, VERSION_MISSING));
    };
    match state {
        State::Available => None,
        State::Unloading | State::End => Some(Failure::new(Code::NotFound, RETIRED)),
        _ if *error_code == Code::Ok => Some(Failure::new(Code::Unavailable, NOT_LOADED_YET)),
        _ => Some(Failure::new(Code::Unavailable, format!("{NOT_LOADED_YET} - {error_message}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(version: &str, state: &str, reason: &str) -> ModelIndex {
        ModelIndex { name: "m".into(), version: version.into(), state: state.into(), reason: reason.into() }
    }

    fn statuses(entries: &[ModelIndex]) -> Option<Vec<VersionStatus>> {
        Some(entries.iter().filter_map(VersionStatus::new).collect())
    }

    #[test]
    fn a_failed_load_is_a_version_that_still_loads_with_an_error() {
        let status = VersionStatus::new(&index("3", "UNAVAILABLE", "Invalid argument: no file")).unwrap();
        assert_eq!(status.state, State::Loading);
        assert_eq!((status.error_code, &*status.error_message), (Code::Unknown, "Invalid argument: no file"));
        let unloaded = VersionStatus::new(&index("3", "UNAVAILABLE", "unloaded")).unwrap();
        assert_eq!((unloaded.state, unloaded.error_code, &*unloaded.error_message), (State::End, Code::Ok, "OK"));
        assert_eq!(VersionStatus::new(&index("", "", "")), None, "in the repository, but never loaded");
    }

    #[test]
    fn the_error_names_what_is_missing() {
        let message =
            |versions, version| why_not_served(versions, version).map(|failure| (failure.code, failure.message));
        let ready = [index("1", "READY", "")];
        assert_eq!(message(None, None), Some((Code::NotFound, NAME_MISSING.into())));
        assert_eq!(message(statuses(&ready), Some(2)), Some((Code::NotFound, VERSION_MISSING.into())));
        assert_eq!(message(statuses(&ready), Some(1)), None);
        assert_eq!(message(statuses(&[]), None), Some((Code::NotFound, VERSION_MISSING.into())));
        let unloaded = [index("1", "UNAVAILABLE", "unloaded")];
        assert_eq!(message(statuses(&unloaded), None), Some((Code::NotFound, RETIRED.into())));
        let loading = [index("1", "UNAVAILABLE", "unloaded"), index("2", "LOADING", "")];
        assert_eq!(message(statuses(&loading), None), Some((Code::Unavailable, NOT_LOADED_YET.into())));
        let failed = Some(vec![VersionStatus::loading(0, Some("no such file".into()))]);
        let text = format!("{NOT_LOADED_YET} - no such file");
        assert_eq!(message(failed, Some(7)), Some((Code::Unavailable, text)));
    }
}
