//! Sessions.

use std::ffi::CString;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use ort::AsPointer;
use ort::session::SharedSessionInner;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};

use super::library::Library;
use super::signature::Signature;
use super::value;
use crate::config::{GraphOptimization, SessionOptions};

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
    run_options: RunOptions,
}

impl Session {
    /// Loads the model for the CPU.
    pub fn open(library: &Library, path: &Path, options: &SessionOptions) -> Result<Self, SessionError> {
        let load = |why: String| SessionError::Load { path: path.display().to_string(), why };
        let mut builder = builder(library, options).map_err(load)?;
        let session = builder.commit_from_file(path).map_err(|error| load(error.to_string()))?;
        let signature = Signature::of(&session)?;
        let graph_description = session.metadata().ok().and_then(|metadata| metadata.graph_description());
        let run_options = RunOptions::new(options).map_err(load)?;
        Ok(Self { inner: session.inner(), signature, graph_description, run_options })
    }

    /// What the model takes and gives.
    pub const fn signature(&self) -> &Signature {
        &self.signature
    }

    /// What the graph says about itself, if anything.
    pub fn graph_description(&self) -> Option<&str> {
        self.graph_description.as_deref()
    }

    /// Options of each run; null for the defaults.
    pub(super) const fn run_options(&self) -> *const ort::sys::OrtRunOptions {
        self.run_options.0
    }

    pub(super) fn as_ptr(&self) -> *mut ort::sys::OrtSession {
        self.inner.ptr().cast_mut()
    }
}

fn builder(library: &Library, options: &SessionOptions) -> Result<SessionBuilder, String> {
    let text = |error: ort::Error<SessionBuilder>| error.message().to_owned();
    let level = match options.graph_optimization {
        GraphOptimization::None => GraphOptimizationLevel::Disable,
        GraphOptimization::Basic => GraphOptimizationLevel::Level1,
        GraphOptimization::Extended => GraphOptimizationLevel::Level2,
        // Level3 is refused by 1.22 and older; All is known to every version.
        GraphOptimization::All => GraphOptimizationLevel::All,
    };
    let builder = ort::session::Session::builder(library.environment()).map_err(|error| error.message().to_owned())?;
    let builder = builder.with_intra_threads(options.intra_op_threads).map_err(text)?;
    let builder = builder.with_inter_threads(options.inter_op_threads).map_err(text)?;
    let builder = builder.with_parallel_execution(options.parallel_execution).map_err(text)?;
    let builder = builder.with_memory_pattern(options.mem_pattern).map_err(text)?;
    let mut builder = builder.with_optimization_level(level).map_err(text)?;
    for (key, value) in &options.entries {
        builder = builder.with_config_entry(key, value).map_err(text)?;
    }
    if !options.mem_arena {
        // SAFETY: the builder's options are alive and borrowed exclusively; the status is used once.
        unsafe { value::check((ort::api().DisableCpuMemArena)(builder.ptr_mut())) }?;
    }
    Ok(builder)
}

/// Options of the runs of a session; null for the defaults.
struct RunOptions(*mut ort::sys::OrtRunOptions);

// SAFETY: written in `new` only; ONNX Runtime reads it in any number of runs at once.
unsafe impl Send for RunOptions {}
// SAFETY: as above.
unsafe impl Sync for RunOptions {}

impl RunOptions {
    fn new(options: &SessionOptions) -> Result<Self, String> {
        let Some(arenas) = &options.arena_shrinkage else { return Ok(Self(ptr::null_mut())) };
        let arenas = CString::new(arenas.as_str()).map_err(|error| error.to_string())?;
        let mut made = Self(ptr::null_mut());
        // SAFETY: plain creation of an object that `made` owns; the texts live during the call.
        unsafe {
            value::check((ort::api().CreateRunOptions)(&mut made.0))?;
            let key = c"memory.enable_memory_arena_shrinkage";
            value::check((ort::api().AddRunConfigEntry)(made.0, key.as_ptr(), arenas.as_ptr()))?;
        }
        Ok(made)
    }
}

impl Drop for RunOptions {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made in `new`, released once.
            unsafe { (ort::api().ReleaseRunOptions)(self.0) }
        }
    }
}
