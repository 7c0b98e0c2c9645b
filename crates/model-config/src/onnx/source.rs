//! Where a model is read from.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::bytes::Bytes;

/// A model's file, or what a conversion made of it.
#[derive(Clone, Debug)]
pub struct ModelSource {
    file: PathBuf,
    made: Option<Made>,
}

#[derive(Clone, Debug)]
struct Made {
    what: &'static str,
    /// Kept as long as the model, because each instance on a GPU opens a session.
    bytes: Arc<[u8]>,
}

impl ModelSource {
    /// The model that was made of a file.
    pub fn converted(file: PathBuf, bytes: Vec<u8>) -> Self {
        Self { file, made: Some(Made { what: "converted", bytes: bytes.into() }) }
    }

    /// The model of initial states that was made of a file.
    pub fn initial_states(file: PathBuf, bytes: Vec<u8>) -> Self {
        Self { file, made: Some(Made { what: "its initial states", bytes: bytes.into() }) }
    }

    /// The file, also of a converted model.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reads the whole model, weights too.
    pub fn read(&self) -> io::Result<Bytes> {
        match &self.made {
            Some(made) => Ok(Bytes::from_owner(Arc::clone(&made.bytes))),
            None => Ok(std::fs::read(&self.file)?.into()),
        }
    }

    /// Bytes of the model, without weights in files of their own.
    pub fn byte_len(&self) -> u64 {
        match &self.made {
            Some(made) => made.bytes.len() as u64,
            None => std::fs::metadata(&self.file).map_or(0, |file| file.len()),
        }
    }

    /// What is read in place of the file.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.made.as_ref().map(|made| &*made.bytes)
    }
}

impl From<PathBuf> for ModelSource {
    fn from(file: PathBuf) -> Self {
        Self { file, made: None }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        self.made.as_ref().map_or(Ok(()), |made| write!(f, " ({})", made.what))
    }
}
