//! Code that the requests of both protocols share: the models and versions that are served, in TensorFlow Serving's
//! states, and the order in which the requests of one sequence reach Triton.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};
use tokio::time::Instant;
use tonic::Code;

use crate::managed::Managed;
use crate::metrics::Metrics;
use crate::models::{Models, Signature, Version, version_text};
use crate::proto::inference::repository_index_response::ModelIndex;
use crate::proto::tensorflow::serving::model_version_status::State;
use crate::triton::{Failure, Triton};

const LOAD_WAIT: Duration = Duration::from_secs(10);
/// Each request that waits asks for itself.
const LOAD_POLL: Duration = Duration::from_millis(250);
/// Requests of one sequence that may wait while another one runs: as many as the backend lets wait by default.
const WAITING_MAX: usize = 100;

const NAME_MISSING: &str = "Model with requested name is not found";
pub const VERSION_MISSING: &str = "Model with requested version is not found";
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
                // Only if no problem follows the text: otherwise the model has failed to load, and waiting would not
                // help.
                Err(Failure { code: Code::Unavailable, message })
                    if message == NOT_LOADED_YET && Instant::now() < deadline =>
                {
                    tokio::time::sleep(LOAD_POLL).await;
                }
                result => return result,
            }
        }
    }

    /// Asks Triton for the signature, and remembers it. If the model isn't served, the failure has OVMS's code and
    /// text.
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

type Key = (Arc<str>, u64);

/// Requests of one sequence reach Triton one after the other, in the order in which they came.
///
/// Unary calls on one HTTP/2 connection may overtake each other on their way into Triton, so a request is sent when the
/// one before it has been answered. A sequence without a request under way takes no memory here.
#[derive(Debug, Default)]
pub struct Order {
    sequences: Arc<Mutex<HashMap<Key, Queue>>>,
}

#[derive(Debug, Default)]
struct Queue {
    // tokio's mutex is fair: it goes to waiting requests in the order in which they asked.
    lock: Arc<Lock<()>>,
    requests: usize,
}

impl Order {
    /// Waits until the requests of the sequence that came earlier are answered. The next one may go when the turn is
    /// dropped.
    pub async fn turn(&self, model: &str, id: u64) -> Result<Turn, Failure> {
        let key = (Arc::from(model), id);
        let lock = {
            let mut sequences = self.sequences.lock();
            let queue = sequences.entry(Key::clone(&key)).or_default();
            // One of them runs.
            if queue.requests > WAITING_MAX {
                let text = format!("{WAITING_MAX} requests of sequence {id} wait already; wait for their answers");
                return Err(Failure::new(Code::Unavailable, text));
            }
            queue.requests += 1;
            queue.lock.clone()
        };
        // Before the wait, so that a client that gives up leaves the queue when this future is dropped.
        let mut turn = Turn { sequences: self.sequences.clone(), key, guard: None };
        turn.guard = Some(lock.lock_owned().await);
        Ok(turn)
    }
}

/// A place in a queue, and the right to send a request once `turn` has returned it.
#[derive(Debug)]
pub struct Turn {
    sequences: Arc<Mutex<HashMap<Key, Queue>>>,
    key: Key,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.guard = None;
        let mut sequences = self.sequences.lock();
        if let Some(queue) = sequences.get_mut(&self.key) {
            queue.requests -= 1;
            if queue.requests == 0 {
                sequences.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use futures_util::FutureExt;

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

    fn poll<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Poll<T> {
        future.poll_unpin(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn requests_go_in_the_order_of_arrival_and_leave_nothing() {
        let order = Order::default();
        let first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        let (mut second, mut third) = (Box::pin(order.turn("m", 1)), Box::pin(order.turn("m", 1)));
        assert!(poll(&mut second).is_pending());
        assert!(poll(&mut third).is_pending());
        drop(first);
        assert!(poll(&mut third).is_pending(), "the second is before it");
        let Poll::Ready(Ok(turn)) = poll(&mut second) else { panic!("its turn has come") };
        drop(turn);
        assert!(poll(&mut third).is_ready());
        drop((second, third));
        assert!(order.sequences.lock().is_empty());
    }

    #[test]
    fn other_sequences_do_not_wait() {
        let order = Order::default();
        let _first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        assert!(order.turn("m", 2).now_or_never().is_some());
        assert!(order.turn("n", 1).now_or_never().is_some());
    }

    #[test]
    fn a_request_that_gives_up_makes_room_for_the_next() {
        let order = Order::default();
        let first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        let (mut second, mut third) = (Box::pin(order.turn("m", 1)), Box::pin(order.turn("m", 1)));
        assert!(poll(&mut second).is_pending());
        assert!(poll(&mut third).is_pending());
        drop(second);
        drop(first);
        assert!(poll(&mut third).is_ready());
    }

    #[test]
    fn too_many_waiting_requests_are_refused_until_one_is_answered() {
        let order = Order::default();
        let first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| Box::pin(order.turn("m", 1))).collect();
        assert!(waiting.iter_mut().all(|turn| poll(turn).is_pending()));
        let refused = order.turn("m", 1).now_or_never().unwrap().unwrap_err();
        assert_eq!(refused.code, Code::Unavailable);
        drop(first);
        assert!(order.turn("m", 1).now_or_never().is_none(), "it waits");
    }
}
