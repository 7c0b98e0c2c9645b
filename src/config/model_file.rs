//! Which file of a version directory is the model.

use std::path::{Component, Path, PathBuf};

use super::error::ConfigError;

/// The file name that Triton fills in for a model named `….stateful` whose configuration names no file and no
/// backend.
const TRITONS_NAME: &str = "model.stateful";

/// The file named by `onnx_file_name`, else by `default_model_filename`, else `model.onnx`, else the only `.onnx`.
///
/// `other` is a file that is not this model: the model for initial states.
pub fn find(
    named: Option<&(&'static str, String)>,
    other: Option<&str>,
    version_dir: &Path,
) -> Result<PathBuf, ConfigError> {
    let missing = |why: String| ConfigError::NoModelFile { dir: version_dir.to_owned(), why };
    // Triton may have filled that name in.
    let named = named.filter(|(_, name)| name != TRITONS_NAME || version_dir.join(name).is_file());
    if let Some((source, name)) = named {
        return find_named(version_dir, source, name);
    }
    let default = version_dir.join("model.onnx");
    if default.is_file() {
        return Ok(default);
    }
    let mut candidates = onnx_files(version_dir);
    candidates.retain(|name| Some(name.as_str()) != other);
    match candidates.as_slice() {
        [only] => Ok(version_dir.join(only)),
        [] => Err(missing("it has no .onnx file".to_owned())),
        several => Err(missing(format!("it has {}; name one with parameter 'onnx_file_name'", several.join(", ")))),
    }
}

/// The file that `source` names, which must lie in the version directory.
pub fn find_named(version_dir: &Path, source: &str, name: &str) -> Result<PathBuf, ConfigError> {
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    let path = version_dir.join(name);
    if inside && path.is_file() {
        return Ok(path);
    }
    Err(ConfigError::NoModelFile {
        dir: version_dir.to_owned(),
        why: format!("{source} names '{name}', which is no file in it (it has {})", listing(version_dir)),
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty version directory with these files.
    fn version_dir(test: &str, files: &[&str]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("triton-stateful-model-file-{}-{test}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        for file in files {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        dir
    }

    fn named(source: &'static str, name: &str) -> Option<(&'static str, String)> {
        Some((source, name.to_owned()))
    }

    #[test]
    fn a_named_file_comes_before_model_onnx_before_the_only_file() {
        let dir = version_dir("order", &["a.onnx", "b.onnx", "model.onnx", "deep/c.onnx"]);
        for (named, expected) in [
            (named("parameter", "a.onnx"), "a.onnx"),
            (named("parameter", "deep/c.onnx"), "deep/c.onnx"),
            (named("field", "model.stateful"), "model.onnx"),
            (None, "model.onnx"),
        ] {
            assert_eq!(find(named.as_ref(), None, &dir).unwrap(), dir.join(expected));
        }
        let dir = version_dir("only", &["only.onnx", "notes.txt"]);
        assert_eq!(find(None, None, &dir).unwrap(), dir.join("only.onnx"));
        let dir = version_dir("two models", &["steps.onnx", "start.onnx"]);
        assert_eq!(find(None, Some("start.onnx"), &dir).unwrap(), dir.join("steps.onnx"));
        let dir = version_dir("tritons", &["other.onnx", "model.stateful"]);
        assert_eq!(find(named("field", "model.stateful").as_ref(), None, &dir).unwrap(), dir.join("model.stateful"));
    }

    #[test]
    fn a_named_file_that_is_not_there_is_refused_with_those_that_are() {
        let dir = version_dir("named", &["model.onnx", "other.onnx"]);
        for source in ["parameter 'onnx_file_name'", "default_model_filename"] {
            let error = find(named(source, "absent.onnx").as_ref(), None, &dir).unwrap_err().to_string();
            for part in [source, "'absent.onnx'", "model.onnx, other.onnx", dir.to_str().unwrap()] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn a_name_that_leaves_the_version_directory_is_refused_though_the_file_is_there() {
        let dir = version_dir("escape/1", &["model.onnx", "inner/model.onnx"]);
        std::fs::write(dir.parent().unwrap().join("secret.onnx"), "").unwrap();
        let absolute = dir.join("model.onnx");
        let names = ["../secret.onnx", "inner/../../secret.onnx", "..", ".", "", "inner"];
        for name in names.into_iter().chain([absolute.to_str().unwrap()]) {
            let error = find(named("parameter", name).as_ref(), None, &dir).unwrap_err().to_string();
            assert!(error.contains(&format!("names '{name}', which is no file in it")), "{error}");
        }
    }

    #[test]
    fn without_a_name_there_has_to_be_one_file() {
        let error = find(None, None, &version_dir("none", &["a.txt"])).unwrap_err().to_string();
        assert!(error.contains("no .onnx file"), "{error}");
        let error = find(None, None, &version_dir("two", &["b.onnx", "a.onnx"])).unwrap_err().to_string();
        assert!(error.contains("a.onnx, b.onnx") && error.contains("'onnx_file_name'"), "{error}");
        assert!(find(None, None, Path::new("/nowhere")).is_err());
    }
}
