//! ONNX Runtime: the library and its environment, sessions, signatures, and the step.
//!
//! The `ort` crate loads the library, makes the environment and builds sessions. The step itself ([`Step`]) calls
//! `OrtApi::Run` with tensors that are made once over our own buffers, because the safe layer would allocate on each
//! call. This is the only module that names `ort`. [`BatchScale`] reads the model's file itself. Not for: which
//! sequence a state belongs to, or where it is between runs.

mod allocator;
mod batch_scale;
mod bound_run;
mod graphs;
mod library;
mod log_limit;
mod open;
mod output;
mod providers;
mod signature;
mod spec;
mod step;
mod tensors;
mod value;

pub use batch_scale::BatchScale;
pub use library::{EnvironmentOptions, Library, LibraryError, LogLevel, SearchPath};
pub use open::{OpenError, Provider, Session, SessionError};
pub use signature::{Signature, TensorInfo};
pub use spec::{InputSpec, OutputSpec, OutputView, RowAt, RowContent, StateSpec, StepSpec};
pub use step::{Grown, Lent, OutputCopy, Overlay, Run, Step};
