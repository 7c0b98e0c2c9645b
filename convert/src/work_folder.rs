//! A folder where the converted model is before it is known to be right.

use std::fs;
use std::path::{Path, PathBuf};

use stateful_convert::Converted;

use crate::{Problem, at};

/// A folder of its own, with the files of weights that are beside the original. It is removed in the end.
pub struct WorkFolder {
    path: PathBuf,
    /// The folder of the original.
    source: PathBuf,
    /// Files of weights, relative to it.
    weights: Vec<String>,
}

impl WorkFolder {
    pub fn new(original: &Path, converted: &Converted, beside: Option<&Path>) -> Result<Self, Problem> {
        let source = here(original.parent()).to_owned();
        let weights = converted.weights.clone();
        // Links to weights need the same file system.
        let near = [beside, Some(source.as_path())].into_iter().flatten().filter(|_| !weights.is_empty());
        let folder = near.map(Path::to_owned).chain([std::env::temp_dir()]);
        let folder = folder.map(|folder| folder.join(format!(".stateful-convert-{}", std::process::id())));
        let mut result = Err(std::io::ErrorKind::NotFound.into());
        let mut path = PathBuf::new();
        for candidate in folder {
            result = fs::create_dir(&candidate);
            path = candidate;
            if result.is_ok() {
                break;
            }
        }
        result.map_err(at(&path))?;
        let folder = Self { path, source, weights };
        for file in &folder.weights {
            if !folder.source.join(file).is_file() {
                return Err(Problem::NoWeights { model: original.to_owned(), file: file.clone() });
            }
            place(&folder.source.join(file), &folder.path.join(file))?;
        }
        fs::write(folder.model(), &converted.model).map_err(at(&folder.model()))?;
        if let Some(bytes) = &converted.initial_states {
            fs::write(folder.initial_states(), bytes).map_err(at(&folder.initial_states()))?;
        }
        Ok(folder)
    }

    pub fn model(&self) -> PathBuf {
        self.path.join("converted.onnx")
    }

    pub fn initial_states(&self) -> PathBuf {
        self.path.join("initial_states.onnx")
    }

    /// Puts the files of weights into another folder, unless it is the original's.
    pub fn copy_weights(&self, to: &Path) -> Result<(), Problem> {
        let to = here(Some(to));
        if to.canonicalize().ok() == self.source.canonicalize().ok() {
            return Ok(());
        }
        self.weights.iter().try_for_each(|file| place(&self.source.join(file), &to.join(file)))
    }
}

/// The folder, where an empty path is that of the process.
fn here(folder: Option<&Path>) -> &Path {
    folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The same file at another place: a link, or a copy on another file system. ONNX Runtime refuses symbolic links.
fn place(from: &Path, to: &Path) -> Result<(), Problem> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(at(parent))?;
    }
    if to.exists() {
        fs::remove_file(to).map_err(at(to))?;
    }
    match fs::hard_link(from, to) {
        Ok(()) => Ok(()),
        Err(_) => fs::copy(from, to).map(|_| ()).map_err(at(to)),
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // What stays is in the system's folder of temporary files.
        let _ = fs::remove_dir_all(&self.path);
    }
}
