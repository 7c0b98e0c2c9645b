//! ONNX Runtime: the library and its environment, sessions, signatures, and the step.
//!
//! The `ort` crate loads the library, makes the environment and builds sessions; the step itself ([`Step`]) calls
//! `OrtApi::Run` with tensors made once over buffers of ours, because the safe layer would allocate on each call.
//! This is the only module that names `ort`. Not for: states: what is in a tensor, and where it is between runs, is its
//! caller's business.

mod allocator;
mod batch_tensor;
mod calls;
mod copier;
mod library;
mod open;
mod providers;
mod step;
mod value;

pub use batch_tensor::{BatchTensor, RowContent};
pub use copier::Copier;
pub use library::{EnvironmentOptions, Library, LibraryError, LogLevel, SearchPath};
pub use open::{Provider, Session};
pub use step::run::{Given, Overlay, Run};
pub use step::{MadeTensor, OutputCopy, OutputView, Step};
pub use value::{OpenError, SessionError, Value};
