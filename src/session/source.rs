//! Where a model is read from.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model's file, or what the file was converted to.
#[derive(Clone, Debug)]
pub struct ModelSource {
    file: PathBuf,
    /// Kept as long as the model, because each instance on a GPU opens a session.
    converted: Option<Arc<[u8]>>,
}

impl ModelSource {
    /// The model that was made of a file.
    pub fn converted(file: PathBuf, bytes: Vec<u8>) -> Self {
        Self { file, converted: Some(bytes.into()) }
    }

    /// The file, also of a converted model.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What is read in place of the file.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.converted.as_deref()
    }
}

impl From<PathBuf> for ModelSource {
    fn from(file: PathBuf) -> Self {
        Self { file, converted: None }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let converted = if self.converted.is_some() { " (converted)" } else { "" };
        write!(f, "{}{converted}", self.file.display())
    }
}
