//! Which file of a version directory is the model.

use std::path::{Component, Path, PathBuf};

use super::error::ConfigError;
use super::resolved::Config;

/// The file named by `onnx_file_name`, else by `default_model_filename`, else `model.onnx`, else the only `.onnx`.
pub fn find(config: &Config, version_dir: &Path) -> Result<PathBuf, ConfigError> {
    let missing = |why: String| ConfigError::NoModelFile { dir: version_dir.to_owned(), why };
    if let Some((source, name)) = &config.model_file {
        let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        let path = version_dir.join(name);
        return match inside && path.is_file() {
            true => Ok(path),
            false => Err(missing(format!(
                "{source} names '{name}', which is no file in it (it has {})",
                listing(version_dir)
            ))),
        };
    }
    let default = version_dir.join("model.onnx");
    if default.is_file() {
        return Ok(default);
    }
    match onnx_files(version_dir).as_slice() {
        [only] => Ok(version_dir.join(only)),
        [] => Err(missing("it has no .onnx file".to_owned())),
        several => Err(missing(format!("it has {}; name one with parameter 'onnx_file_name'", several.join(", ")))),
    }
}

fn onnx_files(dir: &Path) -> Vec<String> {
    names(dir).into_iter().filter(|name| name.ends_with(".onnx")).collect()
}

fn listing(dir: &Path) -> String {
    match names(dir).as_slice() {
        [] => "nothing".to_owned(),
        names => names.join(", "),
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
