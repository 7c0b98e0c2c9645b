//! What a model's configuration says, completed from the model's signature and checked against it.
//!
//! This is the map of the modules. Each uses only modules below it.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | [`explain`] | shows in tables how a model is served, for the log and for stateful-inspect | binding, completion, config, onnx |
//! | [`binding`] | checks the model's signature against the configuration: what feeds each input, where each state is kept | onnx, config |
//! | [`completion`] | fills in what the configuration doesn't say, from the model's signature | onnx, config |
//! | [`onnx`] | what an ONNX model is: its file, its signature, and what its nodes say of its runs | |
//! | [`config`] | the model configuration, read once and then used in its resolved form | |
//!
//! Not for: running a model, devices, or Triton's objects. The caller gives the signature, because only ONNX Runtime
//! knows it.

pub mod binding;
pub mod completion;
pub mod config;
pub mod explain;
pub mod onnx;
