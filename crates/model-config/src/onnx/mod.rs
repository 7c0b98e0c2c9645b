//! What an ONNX model is: where it is read from, its signature, and what its nodes say of its runs.
//!
//! ONNX Runtime tells the signature, but not the nodes: [`Nodes`] reads those from the file. Not for: what a configuration
//! makes of a model ([`crate::binding`], [`crate::completion`]).

#![expect(missing_docs, reason = "most names say it")]

mod nodes;
mod signature;
mod source;

pub use nodes::{Nodes, Recurrence, unrepeatable};
pub use signature::{Signature, TensorInfo, agree, all_agree, open_axes};
pub use source::ModelSource;
