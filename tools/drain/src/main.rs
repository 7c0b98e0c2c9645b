//! `stateful-drain`: has a tritonserver save the sequences of its stateful models and let them go, before it is
//! stopped.
//!
//! It sends each model a request with `drain: true` over HTTP (docs/cluster.md), again and again until no sequence is
//! left.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};

/// Cargo.toml's, with the commit in a release.
const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
const PAUSE: Duration = Duration::from_millis(50);
/// How the error of a model without a store begins.
const NO_STORE: &str = "STATE_CONFLICT:";
const LEFT: &str = "stateful_sequences_left";
const NOT_SAVED: &str = "stateful_sequences_not_saved";

/// Has a tritonserver save the sequences of its stateful models in their store and let them go. It takes no more of
/// them until the models are unloaded and loaded again: their requests get SEQUENCE_MOVED. Returns when no sequence is
/// left. Ends with 1 if some are left after the timeout or could not be saved, or if a model can't be drained.
#[derive(Parser)]
#[command(version = VERSION)]
struct Arguments {
    /// The server's address for HTTP, without TLS
    #[arg(long, default_value = "localhost:8000", value_name = "HOST:PORT")]
    url: String,
    /// A model to drain; may be given several times [default: all models that the backend schedules and that have a
    /// store]
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<String>,
    /// How long to wait until no sequence is left
    #[arg(long, default_value = "20", value_name = "SECONDS", value_parser = seconds)]
    timeout: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "a number of seconds is expected".to_owned())
}

#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{url} does not answer: {source}")]
    Unreachable { url: String, source: Box<ureq::Error> },
    /// With the server's words.
    #[error("{url} answers: {text}")]
    Refused { url: String, text: String },
    #[error("{url} does not answer as a Triton server does")]
    NoTriton { url: String },
    #[error("model '{0}' is not ready")]
    NotReady(String),
    #[error("no model is ready that can have a state store")]
    NoModel,
    #[error("{0} sequences could not be saved")]
    NotSaved(u64),
    #[error(
        "its configuration has no parameter 'state_api', which draining needs: its sequences are saved when it is unloaded"
    )]
    NoStateApi,
}

struct Model {
    name: String,
    version: String,
    has_state_api: bool,
    /// Sequences that are left, as the server said last.
    left: Option<u64>,
}

struct Server {
    agent: ureq::Agent,
    url: String,
    /// How long its answers are waited for.
    until: Instant,
}

impl Server {
    fn new(url: &str, until: Instant) -> Self {
        // An error of Triton's has a text, which ureq would not read.
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        let url = url.trim_end_matches('/');
        let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        Self { agent: config.build().into(), url, until }
    }

    fn is_no_triton(&self) -> Problem {
        Problem::NoTriton { url: self.url.clone() }
    }

    /// Posts, or gets without a body.
    fn ask(&self, path: &str, body: Option<Value>) -> Result<Value, Problem> {
        let url = format!("{}/v2/{path}", self.url);
        // A drain waits behind a request that runs on Triton's own thread.
        let wait = Some(self.until.saturating_duration_since(Instant::now()).max(PAUSE));
        let sent = match body {
            Some(body) => self.agent.post(&url).config().timeout_global(wait).build().send_json(body),
            None => self.agent.get(&url).config().timeout_global(wait).build().call(),
        };
        let unreachable = |source| Problem::Unreachable { url: url.clone(), source: Box::new(source) };
        let mut answer = sent.map_err(unreachable)?;
        let read = answer.body_mut().read_json::<Value>().map_err(|_| self.is_no_triton())?;
        if answer.status().is_success() {
            return Ok(read);
        }
        let text = read["error"].as_str().unwrap_or("an error without a text").to_owned();
        Err(Problem::Refused { url, text })
    }

    fn in_state(&self, state: &str, named: &[String]) -> Result<Vec<(String, String)>, Problem> {
        let index = self.ask("repository/index", Some(json!({})))?;
        let text = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
        let models = index.as_array().ok_or_else(|| self.is_no_triton())?;
        let found = models.iter().filter(|of| of["state"] == state).map(|of| (text(of, "name"), text(of, "version")));
        Ok(found.filter(|(name, _)| named.is_empty() || named.contains(name)).collect())
    }

    /// The models that are ready: those that are named, or all that the backend schedules.
    fn models(&self, named: &[String]) -> Result<Vec<Model>, Problem> {
        let mut models = Vec::new();
        for (name, version) in self.in_state("READY", named)? {
            let config = self.ask(&format!("models/{name}/versions/{version}/config"), None)?;
            // Core's sequence batcher refuses the requests of sequences that come from elsewhere, so such a model has
            // no store.
            let can_have_store = config["backend"] == "stateful" && config["sequence_batching"].is_null();
            if can_have_store || !named.is_empty() {
                let has_state_api = !config["parameters"]["state_api"].is_null();
                models.push(Model { name, version, has_state_api, left: None });
            }
        }
        match named.iter().find(|named| models.iter().all(|of| of.name != **named)) {
            Some(missing) => Err(Problem::NotReady(missing.clone())),
            None => Ok(models),
        }
    }

    /// Returns how many sequences are left.
    fn drain(&self, Model { name, version, has_state_api, .. }: &Model) -> Result<u64, Problem> {
        if !has_state_api {
            return Err(Problem::NoStateApi);
        }
        let body = json!({ "inputs": [], "parameters": { "drain": true } });
        let answer = self.ask(&format!("models/{name}/versions/{version}/infer"), Some(body))?;
        let parameter = |name| answer["parameters"][name].as_u64();
        let (Some(left), Some(not_saved)) = (parameter(LEFT), parameter(NOT_SAVED)) else {
            return Err(self.is_no_triton());
        };
        // An error only when none is left: until then, the rest should be saved all the same.
        if left == 0 && not_saved > 0 { Err(Problem::NotSaved(not_saved)) } else { Ok(left) }
    }
}

/// Drains the models. Returns whether all sequences were saved and have left.
fn run(arguments: &Arguments) -> Result<bool, Problem> {
    let until = Instant::now() + arguments.timeout;
    let server = Server::new(&arguments.url, until);
    let unloading = || server.in_state("UNLOADING", &arguments.models);
    let (mut models, mut is_good) = (server.models(&arguments.models)?, true);
    if models.is_empty() && unloading()?.is_empty() {
        return Err(Problem::NoModel);
    }
    loop {
        models.retain_mut(|model| match server.drain(model) {
            Ok(left) => {
                if model.left.replace(left) != Some(left) {
                    println!("model '{}' version {}: {left} sequences are left", model.name, model.version);
                }
                left > 0
            }
            Err(Problem::Unreachable { .. }) if Instant::now() < until => true,
            // It has no store.
            Err(Problem::Refused { text, .. }) if arguments.models.is_empty() && text.starts_with(NO_STORE) => false,
            Err(problem) => {
                eprintln!("stateful-drain: model '{}' version {}: {problem}", model.name, model.version);
                is_good = false;
                false
            }
        });
        // They save their sequences, too.
        let unloading = if models.is_empty() { unloading()? } else { Vec::new() };
        if models.is_empty() && unloading.is_empty() {
            return Ok(is_good);
        }
        if Instant::now() >= until {
            let names = unloading.iter().map(|(name, _)| name).chain(models.iter().map(|model| &model.name));
            let names: Vec<_> = names.map(|name| format!("'{name}'")).collect();
            let seconds = arguments.timeout.as_secs_f64();
            eprintln!("stateful-drain: {seconds} s are over, and sequences are left: models {}", names.join(", "));
            return Ok(false);
        }
        thread::sleep(PAUSE);
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("stateful-drain: {problem}");
            ExitCode::FAILURE
        }
    }
}
