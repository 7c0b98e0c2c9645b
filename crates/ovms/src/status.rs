//! Which models and versions are served, in TensorFlow Serving's states.

use std::collections::{BTreeMap, BTreeSet};

use tonic::Code;

use crate::failure::Failure;
use crate::gateway::Gateway;
use crate::models::Version;
use crate::proto::inference::repository_index_response::ModelIndex;
use crate::proto::tensorflow::serving::model_version_status::State;

const NAME_MISSING: &str = "Model with requested name is not found";
const VERSION_MISSING: &str = "Model with requested version is not found";
const RETIRED: &str = "Model with requested version is retired";
const NOT_LOADED_YET: &str = "Model with requested version is not loaded yet";

/// The state of one version of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionStatus {
    /// 0 if the model's versions are not known yet.
    pub version: i64,
    /// A version that failed to load stays in `LOADING`, as in OVMS.
    pub state: State,
    /// Why the version can't be served.
    pub problem: Option<String>,
}

impl VersionStatus {
    fn new(model: &ModelIndex) -> Option<Self> {
        let version = model.version.parse().ok()?;
        let (state, problem) = match (model.state.as_str(), model.reason.as_str()) {
            ("READY", _) => (State::Available, None),
            ("LOADING", _) => (State::Loading, None),
            ("UNLOADING", _) => (State::Unloading, None),
            ("UNAVAILABLE", "unloaded" | "") => (State::End, None),
            ("UNAVAILABLE", reason) => (State::Loading, Some(reason.to_owned())),
            _ => (State::Start, None),
        };
        Some(Self { version, state, problem })
    }

    /// A configured model that has no version in Triton yet.
    fn loading(problem: Option<String>) -> Self {
        Self { version: 0, state: State::Loading, problem }
    }

    /// The code in TensorFlow Serving's `StatusProto`.
    pub fn error_code(&self) -> Code {
        if self.problem.is_some() { Code::Unknown } else { Code::Ok }
    }

    /// The text beside the code.
    pub fn error_message(&self) -> &str {
        self.problem.as_deref().unwrap_or("OK")
    }
}

/// All models that Triton serves, has served or could not load, and all that are configured, with their versions.
pub async fn all(gateway: &Gateway) -> Result<BTreeMap<String, Vec<VersionStatus>>, Failure> {
    let mut models: BTreeMap<String, Vec<VersionStatus>> = BTreeMap::new();
    for entry in gateway.triton.index().await? {
        if let Some(mut status) = VersionStatus::new(&entry) {
            if let (Some(managed), Some(problem)) = (&gateway.managed, &mut status.problem) {
                *problem = managed.in_base_path(&entry.name, problem);
            }
            models.entry(entry.name).or_default().push(status);
        }
    }
    if let Some(managed) = &gateway.managed {
        let mut problems = managed.problems();
        let names = managed.names().into_iter().chain(problems.keys().cloned()).collect::<BTreeSet<_>>();
        for name in names {
            let problem = problems.remove(&name);
            let versions = models.entry(name).or_default();
            if versions.is_empty() {
                versions.push(VersionStatus::loading(problem));
            }
        }
    }
    for versions in models.values_mut() {
        versions.sort_by_key(|status| status.version);
    }
    Ok(models)
}

/// The versions of a model; only `version` if it is given.
pub async fn of_model(gateway: &Gateway, name: &str, version: Version) -> Result<Vec<VersionStatus>, Failure> {
    let mut models = all(gateway).await?;
    let versions = models.remove(name).ok_or_else(|| Failure::new(Code::NotFound, NAME_MISSING))?;
    let Some(version) = version else { return Ok(versions) };
    let found: Vec<_> = versions.into_iter().filter(|status| status.version == version).collect();
    if found.is_empty() { Err(Failure::new(Code::NotFound, VERSION_MISSING)) } else { Ok(found) }
}

/// OVMS's error for a model that Triton doesn't serve, or else `failure`, Triton's own error.
pub async fn why_not_served(gateway: &Gateway, name: &str, version: Version, failure: Failure) -> Failure {
    match all(gateway).await {
        Ok(mut models) => classify(models.remove(name), version).unwrap_or(failure),
        Err(failure) => failure,
    }
}

/// Whether the model may be served soon.
pub fn is_loading(failure: &Failure) -> bool {
    failure.code == Code::Unavailable && failure.message == NOT_LOADED_YET
}

/// None if the version is served after all.
fn classify(versions: Option<Vec<VersionStatus>>, version: Version) -> Option<Failure> {
    let Some(versions) = versions else { return Some(Failure::new(Code::NotFound, NAME_MISSING)) };
    // 0: the versions of the model aren't known yet.
    let asked = |status: &&VersionStatus| version.is_none_or(|version| [version, 0].contains(&status.version));
    // Of several versions, the latest one is the one that was asked for.
    let Some(status) = versions.iter().rev().find(asked) else {
        return Some(Failure::new(Code::NotFound, VERSION_MISSING));
    };
    match (status.state, &status.problem) {
        (State::Available, _) => None,
        (State::Unloading | State::End, _) => Some(Failure::new(Code::NotFound, RETIRED)),
        (_, Some(problem)) => Some(Failure::new(Code::Unavailable, format!("{NOT_LOADED_YET} - {problem}"))),
        (_, None) => Some(Failure::new(Code::Unavailable, NOT_LOADED_YET)),
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
        assert_eq!((status.error_code(), status.error_message()), (Code::Unknown, "Invalid argument: no file"));
        let unloaded = VersionStatus::new(&index("3", "UNAVAILABLE", "unloaded")).unwrap();
        assert_eq!((unloaded.state, unloaded.error_code(), unloaded.error_message()), (State::End, Code::Ok, "OK"));
        assert_eq!(VersionStatus::new(&index("", "", "")), None, "in the repository, but never loaded");
    }

    #[test]
    fn the_error_names_what_is_missing() {
        let message = |versions, version| classify(versions, version).map(|failure| (failure.code, failure.message));
        let ready = [index("1", "READY", "")];
        assert_eq!(message(None, None), Some((Code::NotFound, NAME_MISSING.into())));
        assert_eq!(message(statuses(&ready), Some(2)), Some((Code::NotFound, VERSION_MISSING.into())));
        assert_eq!(message(statuses(&ready), Some(1)), None);
        assert_eq!(message(statuses(&[]), None), Some((Code::NotFound, VERSION_MISSING.into())));
        let unloaded = [index("1", "UNAVAILABLE", "unloaded")];
        assert_eq!(message(statuses(&unloaded), None), Some((Code::NotFound, RETIRED.into())));
        let loading = [index("1", "UNAVAILABLE", "unloaded"), index("2", "LOADING", "")];
        assert_eq!(message(statuses(&loading), None), Some((Code::Unavailable, NOT_LOADED_YET.into())));
        let failed = Some(vec![VersionStatus::loading(Some("no such file".into()))]);
        let text = format!("{NOT_LOADED_YET} - no such file");
        assert_eq!(message(failed, Some(7)), Some((Code::Unavailable, text)));
    }
}
