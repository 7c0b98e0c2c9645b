//! The model configuration: read once, checked once, and from then on only in its resolved form.
//!
//! [`raw`] mirrors the JSON that Triton hands over; [`parameters`] reads this backend's own `parameters`; [`Config`]
//! is what the rest of the code sees. Every error names the field or parameter, the value that came and what is
//! allowed. Not for: the ONNX model's signature (see [`crate::binding`]).

#![forbid(unsafe_code)]

mod error;
mod model_file;
mod parameters;
mod raw;
mod resolved;
mod session_options;

pub use error::ConfigError;
pub use model_file::find as find_model_file;
pub use resolved::{Config, Control, ControlKind, FalseTrue, Logging, Padding, StatePair, Strategy, TensorConfig};
pub use session_options::{GraphOptimization, SessionOptions};
