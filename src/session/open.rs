//! Sessions.

use std::path::Path;
use std::sync::Arc;

use ort::AsPointer;
use ort::session::SharedSessionInner;
use ort::session::builder::GraphOptimizationLevel;

use super::library::Library;
use super::signature::Signature;

/// What ONNX Runtime refused, in its own words.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The model could not be loaded.
    #[error("ONNX Runtime cannot load {path}: {why}")]
    Load {
        /// The model's file.
        path: String,
        /// ONNX Runtime's message.
        why: String,
    },
    /// The model has an input or output that is no tensor, or of a type that Triton does not have.
    #[error("'{name}' of the model is {what}, which cannot be served")]
    Unsupported {
        /// Input or output.
        name: String,
        /// Its type.
        what: String,
    },
    /// A tensor could not be made.
    #[error("ONNX Runtime cannot make a tensor for '{name}': {why}")]
    Tensor {
        /// Input or output.
        name: String,
        /// ONNX Runtime's message.
        why: String,
    },
    /// A run failed.
    #[error("ONNX Runtime: {0}")]
    Run(String),
    /// No memory for a batch buffer.
    #[error(transparent)]
    Memory(#[from] crate::memory::OutOfMemory),
}

/// A loaded model. Its runs may overlap: ONNX Runtime's Run is safe to call from several threads.
pub struct Session {
    inner: Arc<SharedSessionInner>,
    signature: Signature,
    graph_description: Option<String>,
}

impl Session {
    /// Loads the model for the CPU: one thread for a run (parallelism comes from instances and batches), all graph
    /// optimisations.
    pub fn open(library: &Library, path: &Path) -> Result<Self, SessionError> {
        let load = |why: String| SessionError::Load { path: path.display().to_string(), why };
        let builder = ort::session::Session::builder(library.environment()).map_err(|error| load(error.to_string()))?;
        let builder = builder.with_intra_threads(1).map_err(|error| load(error.to_string()))?;
        let builder = builder.with_inter_threads(1).map_err(|error| load(error.to_string()))?;
        // Level3 is refused by 1.22 and older; All is the same and known to every version.
        let builder = builder.with_optimization_level(GraphOptimizationLevel::All);
        let mut builder = builder.map_err(|error| load(error.to_string()))?;
        let session = builder.commit_from_file(path).map_err(|error| load(error.to_string()))?;
        let signature = Signature::of(session.inputs(), session.outputs())?;
        let graph_description = session.metadata().ok().and_then(|metadata| metadata.graph_description());
        Ok(Self { inner: session.inner(), signature, graph_description })
    }

    /// What the model takes and gives.
    pub const fn signature(&self) -> &Signature {
        &self.signature
    }

    /// What the graph says about itself, if anything.
    pub fn graph_description(&self) -> Option<&str> {
        self.graph_description.as_deref()
    }

    pub(super) fn as_ptr(&self) -> *mut ort::sys::OrtSession {
        self.inner.ptr().cast_mut()
    }
}
