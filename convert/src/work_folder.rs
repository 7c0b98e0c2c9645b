//! A folder where the converted model is before it is known to be right.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use stateful_convert::Converted;
use stateful_convert::onnx::{self, external_files};

use crate::{Problem, at};

/// A folder of its own, with links to the files of weights beside the original. It is removed in the end.
pub struct WorkFolder {
    path: PathBuf,
    /// The folder of the original.
    source: PathBuf,
    /// Files of weights, relative to it.
    weights: Vec<String>,
}

impl WorkFolder {
    pub fn new(original: &Path, converted: &Converted) -> Result<Self, Problem> {
        let path = std::env::temp_dir().join(format!("stateful-convert-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(at(&path))?;
        let source = original.parent().unwrap_or(Path::new("")).to_owned();
        let model = onnx::read(converted.model.clone().into()).map_err(stateful_convert::ConvertError::from)?;
        let folder = Self { path, source, weights: external_files(&model) };
        for file in &folder.weights {
            let target = folder.source.join(file);
            if !target.is_file() {
                return Err(Problem::NoWeights { model: original.to_owned(), file: file.clone() });
            }
            let link = folder.path.join(file);
            if let Some(parent) = link.parent() {
                fs::create_dir_all(parent).map_err(at(parent))?;
            }
            let target = target.canonicalize().map_err(at(&target))?;
            symlink(&target, &link).map_err(at(&link))?;
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

    /// Copies files of weights to another folder, unless it is the original's.
    pub fn copy_weights(&self, to: &Path) -> Result<(), Problem> {
        let here = |path: &Path| if path.as_os_str().is_empty() { PathBuf::from(".") } else { path.to_owned() };
        if here(to).canonicalize().ok() == here(&self.source).canonicalize().ok() {
            return Ok(());
        }
        for file in &self.weights {
            let target = to.join(file);
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent).map_err(at(parent))?;
            }
            fs::copy(self.source.join(file), &target).map_err(at(&target))?;
        }
        Ok(())
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // What stays is in the system's folder of temporary files.
        let _ = fs::remove_dir_all(&self.path);
    }
}
