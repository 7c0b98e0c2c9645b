//! The backend in its server: what the command line says, and the ONNX Runtime that all models share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Deserialize;

use crate::error::Error;
use crate::model::{Location, Model};
use crate::session::{Library, SearchPath};
use crate::triton;

/// Settings that Triton passes to every backend.
const TRITONS_OWN: [&str; 4] =
    ["auto-complete-config", "backend-directory", "default-max-batch-size", "min-compute-capability"];

const ORT_LIBRARY_PATH: &str = "ort-library-path";

/// Kept beyond Finalize: the library stays loaded, and a second server in the process uses it again.
static LIBRARY: Mutex<Option<Arc<Library>>> = Mutex::new(None);

#[derive(Deserialize)]
struct BackendConfig {
    #[serde(default)]
    cmdline: BTreeMap<String, String>,
}

/// Finds the server and ONNX Runtime. May come again, for another server in the same process.
pub fn initialize(backend: triton::Backend) -> Result<(), Error> {
    triton::load()?;
    triton::install_log();
    let config: BackendConfig =
        serde_json::from_slice(&backend.config_json()?).map_err(crate::config::ConfigError::from)?;
    let library = Library::load(&search_path(&config.cmdline, backend.folder()?)?)?;
    log::info!(
        "stateful backend {}: ONNX Runtime {} from {} ({})",
        env!("CARGO_PKG_VERSION"),
        library.version(),
        library.path().display(),
        library.build_info()
    );
    *LIBRARY.lock() = Some(library);
    Ok(())
}

/// Loads the model that Triton describes.
pub fn load_model(model: triton::Model) -> Result<Model, Error> {
    let library = LIBRARY.lock().clone().ok_or_else(|| Error::Panic("a model came before the backend".to_owned()))?;
    let location = Location { version: model.version()?, repository: model.repository()? };
    Model::load(&model.config_json()?, &location, &library)
}

fn search_path(cmdline: &BTreeMap<String, String>, folder: PathBuf) -> Result<SearchPath, Error> {
    let unknown = |name: &&String| name.as_str() != ORT_LIBRARY_PATH && !TRITONS_OWN.contains(&name.as_str());
    if let Some(name) = cmdline.keys().find(unknown) {
        let (name, value) = (name.clone(), cmdline[name].clone());
        return Err(Error::BackendConfig {
            name,
            value,
            allowed: format!("the known setting is '{ORT_LIBRARY_PATH}'"),
        });
    }
    let backends_dir = cmdline.get("backend-directory").map(PathBuf::from);
    Ok(SearchPath {
        configured: cmdline.get(ORT_LIBRARY_PATH).map(PathBuf::from),
        backends_dir: backends_dir.or_else(|| folder.parent().map(PathBuf::from)),
        backend_dir: Some(folder),
        environment: std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_read_and_unknown_settings_are_refused() {
        let line =
            |settings: &[(&str, &str)]| settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let search =
            search_path(&line(&[("ort-library-path", "/a/b.so"), ("backend-directory", "/x")]), "/y/stateful".into());
        let search = search.unwrap();
        assert_eq!(search.configured, Some("/a/b.so".into()));
        assert_eq!(search.backends_dir, Some("/x".into()));
        assert_eq!(search_path(&line(&[]), "/y/stateful".into()).unwrap().backends_dir, Some("/y".into()));
        let error = search_path(&line(&[("ort-libary-path", "/a")]), "/y".into()).unwrap_err().to_string();
        assert!(error.contains("ort-libary-path=/a") && error.contains("'ort-library-path'"), "{error}");
    }
}
