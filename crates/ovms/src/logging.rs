//! The log: on standard error, and in a file if one is named.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use env_logger::{Builder, Target};
use log::LevelFilter;

const OURS: &str = "stateful_ovms";

/// Starts the log. Without `level`, the environment variable RUST_LOG may set it.
pub fn start(level: Option<LevelFilter>, file: Option<&Path>) -> Result<(), String> {
    let mut builder = Builder::new();
    // Of the libraries, only warnings.
    builder.filter_level(LevelFilter::Warn).filter_module(OURS, level.unwrap_or(LevelFilter::Info));
    match level {
        // TRACE includes the libraries, and ERROR hides their warnings.
        Some(LevelFilter::Trace | LevelFilter::Error) => {
            builder.filter_level(level.unwrap_or(LevelFilter::Warn));
        }
        Some(_) => {}
        None => {
            builder.parse_default_env();
        }
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
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        io::stderr().write_all(bytes)?;
        self.0.write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
