//! The backend in its server: the server's command line, and the ONNX Runtime that all models share.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::config::{ConfigError, POLL_WAIT, scans};
use crate::error::LoadError;
use crate::model::{Model, ServerDefaults};
use crate::panic::Panic;
use crate::session::{EnvironmentOptions, Library, LogLevel, SearchPath};
use crate::triton;

/// Settings that Triton passes to every backend.
const TRITONS_OWN: [&str; 4] =
    ["auto-complete-config", "backend-directory", "default-max-batch-size", "min-compute-capability"];

/// Where models that this backend schedules keep their sequences, unless they say it themselves.
const STATE_STORE: &str = "state-store";

/// Triton's `--model-load-gpu-limit`. Triton adds one for each GPU, with the GPU's number behind this name.
const TRITONS_GPU_LIMIT: &str = "model-load-gpu-limit-";

/// This backend's own settings.
const KNOWN: [&str; 7] = [
    "ort-library-path",
    "ort-logging-level",
    "enable-global-threadpool",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "sequence_cleaner_poll_wait_minutes",
    "state-store",
];

/// Finds the server and ONNX Runtime. Called again for another server in the same process.
pub fn initialize(backend: triton::Backend) -> Result<(), LoadError> {
    // First, because errors and the log go through functions of the server.
    triton::load()?;
    triton::install_log();
    let command_line = command_line(backend)?;
    check_names(&command_line)?;
    // Only to check it: a wrong value fails the start, and not only the first load.
    server_defaults(&command_line)?;
    let search = search_path(&command_line, backend.folder()?);
    let library = Library::load(&search, environment_options(&command_line)?)?;
    log::info!(
        "stateful backend {}: ONNX Runtime {} from {} ({})",
        crate::VERSION,
        library.version,
        library.path.display(),
        library.build_info()
    );
    triton::log_limits();
    Ok(())
}

/// Loads the model that Triton describes.
pub fn load_model(backend: triton::Backend, model: triton::Model) -> Result<Model, LoadError> {
    let library = Library::loaded().ok_or_else(|| Panic("a model came before the backend".to_owned()))?;
    Model::load(model, &library, server_defaults(&command_line(backend)?)?)
}

fn server_defaults(cmdline: &CommandLine) -> Result<ServerDefaults, LoadError> {
    let max_batch_size = cmdline.get("default-max-batch-size").and_then(|size| size.parse().ok()).unwrap_or(0);
    let poll_wait = |value: &String| {
        let allowed = "a number of minutes, 0 or more, is expected";
        scans(value).ok_or_else(|| wrong(POLL_WAIT, value, allowed.to_owned()))
    };
    let state_store = |value: &String| {
        // A password may follow the scheme.
        let scheme = value.split(':').next().unwrap_or_default();
        state_store::Location::new(value)
            .map_err(|error| wrong(STATE_STORE, &format!("{scheme}:..."), error.to_string()))
    };
    Ok(ServerDefaults {
        max_batch_size,
        poll_wait: cmdline.get(POLL_WAIT).map(poll_wait).transpose()?,
        state_store: cmdline.get(STATE_STORE).map(state_store).transpose()?,
    })
}

fn wrong(name: &str, value: &str, allowed: String) -> LoadError {
    LoadError::BackendConfig { name: name.to_owned(), value: value.to_owned(), allowed }
}

/// What the server's command line says to backends: names and values.
type CommandLine = BTreeMap<String, String>;

fn command_line(backend: triton::Backend) -> Result<CommandLine, LoadError> {
    #[derive(Deserialize)]
    struct BackendConfig {
        #[serde(default)]
        cmdline: CommandLine,
    }
    let config: BackendConfig = serde_json::from_slice(&backend.config_json()?).map_err(ConfigError::from)?;
    Ok(config.cmdline)
}

fn check_names(cmdline: &CommandLine) -> Result<(), LoadError> {
    let is_tritons = |name: &str| TRITONS_OWN.contains(&name) || name.starts_with(TRITONS_GPU_LIMIT);
    let unknown = |name: &&String| !KNOWN.contains(&name.as_str()) && !is_tritons(name);
    match cmdline.keys().find(unknown) {
        None => Ok(()),
        Some(name) => Err(wrong(name, &cmdline[name], format!("known settings are {}", KNOWN.join(", ")))),
    }
}

fn search_path(cmdline: &CommandLine, folder: PathBuf) -> SearchPath {
    let backends_dir = cmdline.get("backend-directory").map(PathBuf::from);
    SearchPath {
        configured: cmdline.get("ort-library-path").map(PathBuf::from),
        backends_dir: backends_dir.or_else(|| folder.parent().map(PathBuf::from)),
        backend_dir: Some(folder),
        environment: std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from),
    }
}

fn environment_options(cmdline: &CommandLine) -> Result<EnvironmentOptions, LoadError> {
    const LEVELS: [LogLevel; 5] =
        [LogLevel::Verbose, LogLevel::Info, LogLevel::Warning, LogLevel::Error, LogLevel::Fatal];
    let number = |name: &str, default: usize, most: usize| match cmdline.get(name) {
        None => Ok(default),
        Some(value) => {
            let parsed = value.parse().ok().filter(|&number| number <= most);
            parsed.ok_or_else(|| wrong(name, value, format!("a number from 0 to {most} is expected")))
        }
    };
    let log_level = LEVELS[number("ort-logging-level", 2, LEVELS.len() - 1)?];
    let threads = (number("intra_op_thread_count", 0, 1024)?, number("inter_op_thread_count", 0, 1024)?);
    let global_threads = (number("enable-global-threadpool", 0, 1)? == 1).then_some(threads);
    Ok(EnvironmentOptions { log_level, global_threads })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(settings: &[(&str, &str)]) -> CommandLine {
        settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_search_path_comes_from_the_command_line_and_the_folder() {
        let search =
            search_path(&line(&[("ort-library-path", "/a/b.so"), ("backend-directory", "/x")]), "/y/stateful".into());
        assert_eq!(search.configured, Some("/a/b.so".into()));
        assert_eq!(search.backends_dir, Some("/x".into()));
        assert_eq!(search_path(&line(&[]), "/y/stateful".into()).backends_dir, Some("/y".into()));
    }

    #[test]
    fn what_core_adds_to_every_backend_s_settings_is_no_error() {
        let names = ["auto-complete-config", "default-max-batch-size", "model-load-gpu-limit-device-0"];
        check_names(&line(&names.map(|name| (name, "1")))).unwrap();
        let error = check_names(&line(&[("ort-libary-path", "/x")])).unwrap_err().to_string();
        assert!(error.contains("ort-libary-path=/x") && error.contains("ort-library-path"), "{error}");
    }

    #[test]
    fn environment_options_have_defaults_and_bounds() {
        let options = |settings: &[(&str, &str)]| environment_options(&line(settings));
        assert_eq!(options(&[]).unwrap(), EnvironmentOptions { log_level: LogLevel::Warning, global_threads: None });
        let shared =
            options(&[("enable-global-threadpool", "1"), ("intra_op_thread_count", "3"), ("ort-logging-level", "0")]);
        assert_eq!(shared.unwrap(), EnvironmentOptions { log_level: LogLevel::Verbose, global_threads: Some((3, 0)) });
        for (name, value) in [("ort-logging-level", "5"), ("ort-logging-level", "x"), ("enable-global-threadpool", "2")]
        {
            let error = options(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}={value}")) && error.contains("from 0 to"), "{error}");
        }
    }

    #[test]
    fn unknown_settings_are_refused_and_tritons_own_pass() {
        assert!(check_names(&line(&[("backend-directory", "/x"), ("ort-library-path", "/a")])).is_ok());
        let error = check_names(&line(&[("ort-libary-path", "/a")])).unwrap_err().to_string();
        assert!(error.contains("ort-libary-path=/a") && error.contains("ort-library-path"), "{error}");
    }
}
