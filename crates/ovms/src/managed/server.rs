//! The process of tritonserver: where it is found, how it starts and how it ends.
//!
//! It listens on loopback ports only. It is started by this program under another name ([`launcher`]), which asks the
//! kernel to end tritonserver if the gateway dies, even by `kill -9`. It has a process group of its own, so that Ctrl-C
//! in a terminal reaches the gateway only, which then ends it in order.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use log::{LevelFilter, info, warn};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::triton::Triton;

pub const EXIT_FAILURE: u8 = 1;
const LAUNCHER: &str = "--launch-tritonserver";
/// Below the range from which Linux takes ports for outgoing connections.
const PORTS: std::ops::Range<u16> = 12_000..32_000;
const ATTEMPTS: usize = 5;
const READY_POLL: Duration = Duration::from_millis(50);
/// A tritonserver that is about to end may accept the connection and never answer.
const READY_CALL: Duration = Duration::from_secs(1);
const READY_NOTE: Duration = Duration::from_secs(30);
/// How long tritonserver may finish requests.
const EXIT_TIMEOUT_S: u64 = 10;
/// With the default of 8, servers up to 24.10 at least crash under dozens of streams.
const GRPC_REQUESTS_KEPT: usize = 1024;

#[derive(Clone, Debug, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct ServerOptions {
    /// The program; else the one in PATH, or /opt/tritonserver/bin/tritonserver.
    #[arg(long, value_name = "FILE")]
    pub tritonserver: Option<PathBuf>,
    /// The folder with stateful/libtriton_stateful.so; else ../backends of this program's folder, or
    /// /opt/tritonserver/backends.
    #[arg(long, value_name = "FOLDER")]
    pub backend_directory: Option<PathBuf>,
    /// Further arguments of tritonserver, after `--`.
    #[arg(last = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<OsString>,
    #[arg(skip = LevelFilter::Info)]
    pub log_level: LevelFilter,
    #[arg(skip)]
    pub log_path: Option<PathBuf>,
}

/// Why the program ends, if not because it was asked to.
pub struct Ended {
    pub code: u8,
    pub text: String,
}

impl From<String> for Ended {
    fn from(text: String) -> Self {
        Self { code: EXIT_FAILURE, text }
    }
}

#[derive(Debug)]
pub struct Server {
    child: Child,
    pub triton: Triton,
}

/// Becomes tritonserver if this process was started for that. Returns none if it wasn't, and an exit code if that
/// failed.
pub fn launcher() -> Option<ExitCode> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != LAUNCHER {
        return None;
    }
    let (parent, program) = (arguments.next()?, arguments.next()?);
    let asked = set_parent_process_death_signal(Some(Signal::KILL));
    // The parent may have died before it was asked for.
    let lost = getppid().map(Pid::as_raw_pid).map(|pid| pid.to_string().into()) != Some(parent);
    if lost {
        return Some(ExitCode::FAILURE);
    }
    if let Err(error) = asked {
        eprintln!("stateful-ovms: tritonserver will outlive a kill -9 of the gateway: {error}");
    }
    let error = std::process::Command::new(&program).args(arguments).exec();
    eprintln!("stateful-ovms: cannot start {}: {error}", program.display());
    Some(ExitCode::FAILURE)
}

impl Server {
    /// Starts tritonserver with an empty repository in `repository`, and waits until it answers. Must be called in the
    /// main thread, because the kernel ends tritonserver with the thread that started it.
    pub async fn start(options: &ServerOptions, repository: &Path) -> Result<Self, String> {
        let program = find_tritonserver(options.tritonserver.as_deref())?;
        let backends = find_backends(options.backend_directory.as_deref())?;
        info!("starting {} with the backends in {}", program.display(), backends.display());
        // Another process may take a free port before tritonserver does.
        for _ in 0..ATTEMPTS {
            let grpc = free_port(None)?;
            let ports = [grpc, free_port(Some(grpc))?];
            let [grpc, http] = ports.map(|port| {
                format!("{}:{port}", Ipv4Addr::LOCALHOST).parse().map_err(|error| format!("port {port}: {error}"))
            });
            let triton = Triton::new(&grpc?, http?).map_err(|error| error.to_string())?;
            let mut server = Self { child: spawn(options, &program, &backends, repository, ports)?, triton };
            let Some(status) = server.ready().await.map_err(|error| format!("waiting for tritonserver: {error}"))?
            else {
                return Ok(server);
            };
            if ports.iter().all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()) {
                return Err(format!("tritonserver ended at its start: {status}"));
            }
            warn!("a port that tritonserver was to use was taken by another process: it is started again");
        }
        Err(format!("tritonserver found its ports taken {ATTEMPTS} times"))
    }

    /// Waits until it answers, or gives its exit status.
    async fn ready(&mut self) -> std::io::Result<Option<ExitStatus>> {
        let begun = Instant::now();
        let mut noted = Duration::ZERO;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if timeout(READY_CALL, self.triton.is_ready()).await.unwrap_or(false) {
                return Ok(None);
            }
            if begun.elapsed() > noted + READY_NOTE {
                noted = begun.elapsed();
                info!("tritonserver isn't ready after {} s", noted.as_secs());
            }
            sleep(READY_POLL).await;
        }
    }

    pub async fn ended(&mut self) -> Ended {
        let status = match self.child.wait().await {
            Ok(status) => status,
            Err(error) => return Ended::from(format!("tritonserver is lost: {error}")),
        };
        // The code that a shell would give. It is never 0, even if tritonserver ended well, because the gateway was not
        // asked to end.
        let code = status.code().or_else(|| Some(128 + status.signal()?)).and_then(|code| u8::try_from(code).ok());
        Ended { code: code.unwrap_or(EXIT_FAILURE).max(EXIT_FAILURE), text: format!("tritonserver ended: {status}") }
    }

    /// Ends it: by SIGTERM, and by SIGKILL if it takes longer than this.
    pub async fn stop(&mut self, within: Duration) {
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if timeout(within, self.child.wait()).await.is_err() {
            warn!("tritonserver didn't end: it is killed");
            self.kill().await;
        }
    }

    pub async fn kill(&mut self) {
        let _ = self.child.kill().await;
    }
}

fn spawn(
    options: &ServerOptions,
    program: &Path,
    backends: &Path,
    repository: &Path,
    [grpc_port, http_port]: [u16; 2],
) -> Result<Child, String> {
    // Not as text: a path need not be Unicode.
    let with = |name: &str, path: &Path| {
        let mut argument = OsString::from(name);
        argument.push(path);
        argument
    };
    let verbose = u8::from(options.log_level >= LevelFilter::Debug);
    // /proc/self/exe is this program even if its file was replaced.
    let mut command = Command::new("/proc/self/exe");
    command
        // Otherwise a list of processes would show the path above.
        .arg0("stateful-ovms")
        .arg(LAUNCHER)
        .arg(std::process::id().to_string())
        .arg(program)
        .arg(with("--model-repository=", repository))
        .arg(with("--backend-directory=", backends))
        // The gateway loads the models itself, and serves the others if one of them fails.
        .args(["--model-control-mode=explicit", "--exit-on-error=false", "--allow-metrics=false"])
        .arg(format!("--exit-timeout-secs={EXIT_TIMEOUT_S}"))
        .arg(format!("--grpc-infer-allocation-pool-size={GRPC_REQUESTS_KEPT}"))
        .arg(format!("--log-verbose={verbose}"))
        .arg(format!("--log-info={}", options.log_level >= LevelFilter::Info))
        .arg(format!("--log-warning={}", options.log_level >= LevelFilter::Warn))
        .args(["--grpc-address=127.0.0.1", "--http-address=127.0.0.1"])
        .arg(format!("--grpc-port={grpc_port}"))
        .arg(format!("--http-port={http_port}"))
        .args(&options.arguments)
        // Newer ONNX Runtimes keep a database for telemetry in the user's home or in TMPDIR without it.
        .env("ORT_DISABLE_TELEMETRY", env::var_os("ORT_DISABLE_TELEMETRY").unwrap_or_else(|| "1".into()))
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    if let Some(path) = &options.log_path {
        let open = || {
            let file = File::options().append(true).create(true).open(path)?;
            Ok::<_, std::io::Error>((file.try_clone()?, file))
        };
        let (stdout, stderr) = open().map_err(|error| format!("{}: {error}", path.display()))?;
        command.stdout(stdout).stderr(stderr);
    }
    command.spawn().map_err(|error| format!("cannot start {}: {error}", program.display()))
}

fn free_port(other_than: Option<u16>) -> Result<u16, String> {
    for _ in 0..100 {
        let port = fastrand::u16(PORTS);
        if Some(port) != other_than && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err("no free port on the loopback address".to_owned())
}

/// The program that was named, else the one in PATH, NVIDIA's image or the checkout that this program was built in.
fn find_tritonserver(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(named) = named {
        if !named.is_file() {
            return Err(format!("--tritonserver {}: there is no such file", named.display()));
        }
        return std::path::absolute(named).map_err(|error| format!("--tritonserver {}: {error}", named.display()));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).map(|folder| folder.join("tritonserver"));
    let image = PathBuf::from("/opt/tritonserver/bin/tritonserver");
    let program = this_program().unwrap_or_default();
    let checkout = program.ancestors().skip(1).filter_map(in_checkout);
    in_path.chain([image]).chain(checkout).find(|program| program.is_file()).ok_or_else(|| {
        "there is no tritonserver in PATH or in /opt/tritonserver/bin. Name it with --tritonserver, or name one that runs \
         with --triton"
            .to_owned()
    })
}

/// The server that scripts/setup installs into a checkout.
fn in_checkout(folder: &Path) -> Option<PathBuf> {
    // The version of Python is part of the path.
    let pythons = folder.join(".venv/lib").read_dir().ok()?.flatten();
    let programs = pythons.map(|python| python.path().join("site-packages/pytriton/tritonserver/bin/tritonserver"));
    programs.into_iter().find(|file| file.is_file())
}

/// The folder that was named, else the one beside this program's folder, or that of NVIDIA's image.
fn find_backends(named: Option<&Path>) -> Result<PathBuf, String> {
    const LIBRARY: &str = "stateful/libtriton_stateful.so";
    if let Some(named) = named {
        if !named.join(LIBRARY).is_file() {
            return Err(format!("--backend_directory {}: there is no {LIBRARY} in it", named.display()));
        }
        return std::path::absolute(named).map_err(|error| format!("--backend_directory {}: {error}", named.display()));
    }
    let beside = this_program().and_then(|program| Some(program.parent()?.parent()?.join("backends")));
    let image = PathBuf::from("/opt/tritonserver/backends");
    beside.into_iter().chain([image]).find(|folder| folder.join(LIBRARY).is_file()).ok_or_else(|| {
        format!(
            "there is no {LIBRARY} in ../backends of this program's folder or in /opt/tritonserver/backends. Name the \
                 folder with --backend_directory"
        )
    })
}

fn this_program() -> Option<PathBuf> {
    env::current_exe().and_then(|program| program.canonicalize()).ok()
}
