//! Serves clients of OpenVINO Model Server with the stateful backend of a tritonserver.
//!
//! A Predict goes through `connections`, then `grpc` or `rest`, then `predict`, and then `triton`. Nothing here knows a
//! sequence's state or whether it is live: the backend does.
//!
//! | module | |
//! |---|---|
//! | `options` | the command line |
//! | `connections` | bound ports, and the connections that they accept |
//! | `managed` | the tritonserver that the gateway starts, and its models |
//! | `grpc`, `rest` | the two protocols |
//! | `pass_through` | requests of Triton's own APIs, passed on as they are |
//! | `predict`, `tensor` | a request in TensorFlow Serving's form, as one of Triton |
//! | `gateway` | what requests share, and which models and versions are served |
//! | `models` | signatures of models, as Triton gives them and as clients read them, and the special inputs |
//! | `triton` | the connection to tritonserver, and errors |
//! | `metrics`, `proto` | figures, messages |

mod connections;
mod gateway;
mod grpc;
mod managed;
mod metrics;
mod models;
mod options;
mod pass_through;
mod predict;
mod proto;
mod rest;
mod tensor;
mod triton;

use std::fs::File;
use std::future::{pending, poll_fn};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use env_logger::{Builder, Target};
use log::{LevelFilter, error, info, warn};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::connections::bind;
use crate::gateway::Gateway;
use crate::managed::{EXIT_FAILURE, Ended, Managed, ModelSource, Server, ServerOptions, Source};
use crate::options::{Exit, Mode, Settings};
use crate::triton::Triton;

/// OVMS's exit code for a wrong command line.
const EXIT_USAGE: u8 = 64;
/// How long requests may take to end after the first signal.
const DRAIN: Duration = Duration::from_secs(20);
/// How long the program may take to end after that signal, tritonserver included. Kubernetes waits 30 s.
const END: Duration = Duration::from_secs(25);
/// How long they may take if tritonserver has ended.
const DRAIN_LOST: Duration = Duration::from_secs(2);

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
                Err(text) => fails(&text, EXIT_FAILURE),
            };
        }
        Err(Exit::Usage(text)) => return fails(&text, EXIT_USAGE),
    };
    if let Err(text) = start_log(settings.log_level, settings.log_path.as_deref()) {
        return fails(&text, EXIT_FAILURE);
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

fn fails(text: &str, code: u8) -> ExitCode {
    eprintln!("stateful-ovms: {text}");
    ExitCode::from(code)
}

fn show(text: &str) -> Result<(), String> {
    let mut output = io::stdout().lock();
    // Not `println!`, which panics if the reader closes the pipe early.
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot write the output: {error}")),
        _ => Ok(()),
    }
}

/// Starts the log, on standard error and in a file if one is named. Without `level`, the environment variable RUST_LOG
/// may set it.
fn start_log(level: Option<LevelFilter>, file: Option<&Path>) -> Result<(), String> {
    let mut builder = Builder::new();
    let of_libraries = match level {
        // TRACE includes the libraries, and ERROR hides their warnings.
        Some(level @ (LevelFilter::Trace | LevelFilter::Error)) => level,
        _ => LevelFilter::Warn,
    };
    builder.filter_level(of_libraries).filter_module("stateful_ovms", level.unwrap_or(LevelFilter::Info));
    if level.is_none() {
        // Last, so that it wins over the levels above.
        builder.parse_default_env();
    }
    if let Some(path) = file {
        let file = File::options().append(true).create(true).open(path);
        let file = file.map_err(|error| format!("--log_path {}: {error}", path.display()))?;
        builder.target(Target::Pipe(Box::new(Both(file))));
    }
    builder.try_init().map_err(|error| error.to_string())
}

struct Both(File);

impl Write for Both {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Writes everything, because the count of a part could be true for only one of the two.
        io::stderr().write_all(bytes)?;
        self.0.write_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Signals that ask the gateway to end, with their names.
struct Signals([(Signal, &'static str); 4]);

impl Signals {
    /// From now on, they no longer end the process by themselves.
    fn new() -> io::Result<Self> {
        Ok(Self([
            (signal(SignalKind::terminate())?, "SIGTERM"),
            (signal(SignalKind::interrupt())?, "SIGINT"),
            (signal(SignalKind::hangup())?, "SIGHUP"),
            (signal(SignalKind::quit())?, "SIGQUIT"),
        ]))
    }

    /// Waits for one, and gives its name.
    async fn next(&mut self) -> &'static str {
        poll_fn(|context| {
            let came =
                self.0.iter_mut().find_map(|(signal, name)| signal.poll_recv(context).is_ready().then_some(*name));
            came.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

struct Ports {
    grpc: Vec<TcpListener>,
    rest: Vec<TcpListener>,
}

async fn run(settings: Settings) -> Result<(), Ended> {
    let mut signals = Signals::new().map_err(|error| format!("cannot receive signals: {error}"))?;
    let ports = async || -> Result<Ports, String> {
        Ok(Ports { grpc: bind("port", settings.grpc).await?, rest: bind("rest_port", settings.rest).await? })
    };
    match settings.mode {
        Mode::PrintConfig(source) => {
            let (text, problems) = managed::print_config(&source)?;
            // The text comes before the problems, because the models that can be served are useful without the others.
            show(&text)?;
            if problems.is_empty() { Ok(()) } else { Err(Ended::from(problems.join("\n"))) }
        }
        Mode::InFrontOf { grpc, http } => {
            let ports = ports().await?;
            let triton = Triton::new(&grpc, http).map_err(|error| format!("--triton {grpc}: {error}"))?;
            serve(ports, triton, None, &mut signals, None).await.0
        }
        Mode::Managed { source, poll, server } => {
            // A wrong file or a port in use is found before anything is started.
            source.read()?;
            serve_managed(ports().await?, source, poll, &server, &mut signals).await
        }
    }
}

async fn serve_managed(
    ports: Ports,
    source: Source,
    poll: Option<Duration>,
    options: &ServerOptions,
    signals: &mut Signals,
) -> Result<(), Ended> {
    let single = matches!(source.models, ModelSource::CommandLine(_));
    let repository = managed::repository()?;
    let mut server = tokio::select! {
        started = Server::start(options, repository.path()) => started?,
        name = signals.next() => return stopped_early(name),
    };
    let managed = Managed::new(source, server.triton.clone(), repository.path().to_owned());
    tokio::select! {
        () = managed.load() => {}
        ended = server.ended() => return Err(ended),
        name = signals.next() => {
            server.stop(END).await;
            return stopped_early(name);
        }
    }
    // OVMS also ends if its only model can't be loaded. With a config.json, it serves the other models.
    if single && let Some((name, Some(problem))) = managed.models().pop_first() {
        server.stop(END).await;
        return Err(Ended::from(format!("model '{name}': {problem}")));
    }
    let polling = poll.map(|every| tokio::spawn(managed.clone().poll(every)));
    let triton = server.triton.clone();
    let (ended, left) = serve(ports, triton, Some(managed), signals, Some(&mut server)).await;
    if let Some(polling) = polling {
        // No load may begin in a tritonserver that is about to end.
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

/// Serves until a signal comes or tritonserver ends, and then waits for the requests that run. A second signal ends
/// that wait. The second value is how long tritonserver may take to end: zero after a second signal.
async fn serve(
    ports: Ports,
    triton: Triton,
    managed: Option<Managed>,
    signals: &mut Signals,
    server: Option<&mut Server>,
) -> (Result<(), Ended>, Duration) {
    let gateway = Arc::new(Gateway::new(triton, managed));
    let (stop, stopped) = watch::channel(false);
    let name_of = |listener: &TcpListener| {
        listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string())
    };
    let mut tasks: JoinSet<()> = JoinSet::new();
    for listener in ports.grpc {
        info!("gRPC on {}", name_of(&listener));
        tasks.spawn(grpc::serve(listener, gateway.clone(), stopped.clone()));
    }
    for listener in ports.rest {
        info!("REST on {}", name_of(&listener));
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
        ended = server_ended => (Err(ended), DRAIN_LOST),
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
    // tritonserver gets only the time that requests have left, because Kubernetes counts from the signal.
    (ended, END.saturating_sub(asked.elapsed()))
}
