//! Serves clients of OpenVINO Model Server with the stateful backend of a tritonserver.
//!
//! A Predict goes through `connections`, then `grpc` or `rest`, then `predict`, and then `triton`. Nothing here knows a
//! sequence's state or whether it is live: the backend does.
//!
//! | module | |
//! |---|---|
//! | `options`, `refused` | the command line |
//! | `logging`, `signals` | the log, and when to stop |
//! | `ports`, `connections` | bound ports, and HTTP on the connections that they accept |
//! | `managed` | the tritonserver that the gateway starts, and its models |
//! | `grpc`, `rest` | the two protocols |
//! | `predict`, `tensor` | a request in TensorFlow Serving's form, as one of Triton |
//! | `models`, `metadata`, `status` | signatures of models, as Triton gives them and as clients read them, and which versions are served |
//! | `triton` | the connection to tritonserver |
//! | `gateway`, `failure`, `metrics`, `proto` | what requests share, errors, metrics, messages |

mod connections;
mod failure;
mod gateway;
mod grpc;
mod logging;
mod managed;
mod metadata;
mod metrics;
mod models;
mod options;
mod ports;
mod predict;
mod proto;
mod refused;
mod rest;
mod signals;
mod status;
mod tensor;
mod triton;

use std::future::pending;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{error, info, warn};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::gateway::Gateway;
use crate::managed::{Managed, ModelSource, Server, ServerOptions, Source};
use crate::options::{Exit, Mode, Settings};
use crate::ports::Ports;
use crate::signals::Signals;
use crate::triton::Triton;

/// OVMS's exit code for a wrong command line.
const EXIT_USAGE: u8 = 64;
const EXIT_FAILURE: u8 = 1;
/// How long requests may take to end after the first signal.
const DRAIN: Duration = Duration::from_secs(20);
/// How long the program may take to end after that signal, tritonserver included. Kubernetes waits 30 s.
const END: Duration = Duration::from_secs(25);
/// How long they may take if tritonserver has ended.
const DRAIN_LOST: Duration = Duration::from_secs(2);

/// Why the program ends, if not because it was asked to.
struct Ended {
    code: u8,
    text: String,
}

impl From<String> for Ended {
    fn from(text: String) -> Self {
        Self { code: EXIT_FAILURE, text }
    }
}

fn main() -> ExitCode {
    // First of all, because this process may only have been started to become tritonserver.
    if let Some(code) = managed::launcher() {
        return code;
    }
    let settings = match Settings::parse(std::env::args_os().collect()) {
        Ok(settings) => settings,
        Err(Exit::Shown(text)) => {
            return match show(&format!("{}\n", text.trim_end())) {
                Ok(()) => ExitCode::SUCCESS,
                Err(text) => fails(&text),
            };
        }
        Err(Exit::Usage(text)) => {
            eprintln!("stateful-ovms: {text}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if let Err(text) = logging::start(settings.log_level, settings.log_path.as_deref()) {
        return fails(&text);
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let ended = match runtime.worker_threads(settings.threads).enable_all().build() {
        Ok(runtime) => {
            let ended = runtime.block_on(run(settings));
            // Drops the connections that clients keep open.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(Ended::from(format!("cannot start threads: {error}"))),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(Ended { code, text }) => {
            error!("{text}");
            ExitCode::from(code)
        }
    }
}

/// Says why there is no log.
fn fails(text: &str) -> ExitCode {
    eprintln!("stateful-ovms: {text}");
    ExitCode::from(EXIT_FAILURE)
}

/// Writes to the standard output. Whoever reads it may stop when he has read enough.
fn show(text: &str) -> Result<(), String> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot write the output: {error}")),
        _ => Ok(()),
    }
}

async fn run(settings: Settings) -> Result<(), Ended> {
    let mut signals = Signals::new().map_err(|error| format!("cannot receive signals: {error}"))?;
    match settings.mode {
        Mode::PrintConfig(source) => print_config(&source),
        Mode::InFrontOf { grpc, http } => {
            let ports = Ports::bind(settings.grpc, settings.rest).await?;
            let triton = Triton::new(&grpc, http).map_err(|error| format!("--triton {grpc}: {error}"))?;
            serve(ports, triton, None, &mut signals, None).await.0
        }
        Mode::Managed { source, poll, server } => {
            // A wrong file or a port in use is found before anything is started.
            source.read()?;
            let ports = Ports::bind(settings.grpc, settings.rest).await?;
            serve_managed(ports, source, poll, &server, &mut signals).await
        }
    }
}

fn print_config(source: &Source) -> Result<(), Ended> {
    let (text, problems) = managed::print_config(source)?;
    show(&text)?;
    if problems.is_empty() { Ok(()) } else { Err(Ended::from(problems.join("\n"))) }
}

async fn serve_managed(
    ports: Ports,
    source: Source,
    poll: Option<Duration>,
    options: &ServerOptions,
    signals: &mut Signals,
) -> Result<(), Ended> {
    let single = matches!(source.models, ModelSource::CommandLine { .. });
    let repository = managed::repository()?;
    let mut server = tokio::select! {
        started = Server::start(options, repository.path()) => started?,
        name = signals.next() => return stopped_early(name),
    };
    let managed = Managed::new(source, server.triton.clone(), repository.path().to_owned());
    tokio::select! {
        () = managed.load() => {}
        (code, text) = server.ended() => return Err(Ended { code, text }),
        name = signals.next() => {
            server.stop(END).await;
            return stopped_early(name);
        }
    }
    // OVMS also ends if its only model can't be loaded. With a config.json, it serves the other models.
    if single && let Some((name, problem)) = managed.problems().pop_first() {
        server.stop(END).await;
        return Err(Ended::from(format!("model '{name}': {problem}")));
    }
    let polling = poll.map(|every| tokio::spawn(managed.clone().poll(every)));
    let triton = server.triton.clone();
    let (ended, left) = serve(ports, triton, Some(managed), signals, Some(&mut server)).await;
    if let Some(polling) = polling {
        polling.abort();
    }
    if left.is_zero() {
        server.kill().await;
        return ended;
    }
    tokio::select! {
        () = server.stop(left) => {}
        name = signals.next() => {
            warn!("{name}: tritonserver is killed");
            server.kill().await;
        }
    }
    ended
}

fn stopped_early(signal: &str) -> Result<(), Ended> {
    info!("{signal} before anything was served");
    Ok(())
}

/// Serves until a signal comes or tritonserver ends, and then waits for the requests that run. A second signal ends that
/// wait. The second value is how long tritonserver may take to end: zero after a second signal.
async fn serve(
    ports: Ports,
    triton: Triton,
    managed: Option<Managed>,
    signals: &mut Signals,
    server: Option<&mut Server>,
) -> (Result<(), Ended>, Duration) {
    let gateway = Arc::new(Gateway::new(triton, managed));
    let (stop, stopped) = watch::channel(false);
    let mut tasks: JoinSet<()> = JoinSet::new();
    for listener in ports.grpc {
        info!("gRPC on {}", ports::name_of(&listener));
        tasks.spawn(grpc::serve(listener, gateway.clone(), stopped.clone()));
    }
    for listener in ports.rest {
        info!("REST on {}", ports::name_of(&listener));
        tasks.spawn(rest::serve(listener, gateway.clone(), stopped.clone()));
    }
    let server_ended = async {
        match server {
            Some(server) => server.ended().await,
            None => pending().await,
        }
    };
    let (ended, drain) = tokio::select! {
        name = signals.next() => {
            info!("{name}: no more requests are taken, and those that run are finished");
            (Ok(()), DRAIN)
        }
        (code, text) = server_ended => (Err(Ended { code, text }), DRAIN_LOST),
        Some(done) = tasks.join_next() => (Err(Ended::from(format!("a port is no longer served: {done:?}"))), DRAIN_LOST),
    };
    let asked = Instant::now();
    // It fails only if all tasks have ended.
    let _ = stop.send(true);
    tokio::select! {
        () = async { while tasks.join_next().await.is_some() {} } => {}
        () = sleep(drain) => warn!("requests that have not ended are given up"),
        name = signals.next() => {
            warn!("{name}: requests that have not ended are given up");
            return (ended, Duration::ZERO);
        }
    }
    (ended, END.saturating_sub(asked.elapsed()))
}
