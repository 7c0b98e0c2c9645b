//! A folder where the converted model is before it is known to be right.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use stateful_convert::{Converted, path_in};

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
        for file in &weights {
            path_in(&source, file).map_err(|why| Problem::Weights { model: original.to_owned(), why })?;
        }
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
            link(&folder.source.join(file), &folder.path.join(file))?;
        }
        let files = [
            (folder.model(), Some(&converted.model)),
            (folder.original(), converted.original.as_ref()),
            (folder.initial_states(), converted.initial_states.as_ref()),
        ];
        for (path, bytes) in files.iter().filter_map(|(path, bytes)| Some((path, (*bytes)?))) {
            // A link to weights of this name would be written through.
            fs::File::create_new(path).and_then(|mut file| file.write_all(bytes)).map_err(at(path))?;
        }
        Ok(folder)
    }

    pub fn model(&self) -> PathBuf {
        self.path.join("converted.onnx")
    }

    /// The original as ONNX Runtime can run it, if it can't run the original.
    pub fn original(&self) -> PathBuf {
        self.path.join("original.onnx")
    }

    pub fn initial_states(&self) -> PathBuf {
        self.path.join("initial_states.onnx")
    }

    /// The files of weights of the original.
    pub fn weights(&self) -> impl Iterator<Item = PathBuf> {
        self.weights.iter().map(|file| self.source.join(file))
    }

    /// The files of weights that another folder needs. The original's folder has them.
    pub fn weights_of(&self, to: &Path) -> Vec<PathBuf> {
        let to = here(Some(to));
        if to.canonicalize().ok() == self.source.canonicalize().ok() {
            return Vec::new();
        }
        self.weights.iter().map(|file| to.join(file)).collect()
    }
}

/// The folder, where an empty path is that of the process.
fn here(folder: Option<&Path>) -> &Path {
    folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the folder of a file.
pub fn make_parent(path: &Path) -> Result<(), Problem> {
    path.parent().map_or(Ok(()), |parent| fs::create_dir_all(parent).map_err(at(parent)))
}

/// The same file in the new folder: a link, or a copy on another file system. ONNX Runtime refuses symbolic links.
fn link(from: &Path, to: &Path) -> Result<(), Problem> {
    make_parent(to)?;
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
