//! `libtriton_stateful.so`: a Triton Inference Server backend that serves stateful ONNX models.
//!
//! It keeps every sequence's state beside the model, batches the sequences that are ready into one run of ONNX
//! Runtime, answers, and keeps the new state. `ARCHITECTURE.md` draws the way of a request; this is the map.
//!
//! | module | what it is | depends on |
//! |---|---|---|
//! | [`exports`] | the symbols that Triton calls, each one guarded line | everything below |
//! | [`backend`] | what the server's command line says; the shared ONNX Runtime | model |
//! | [`instance`] | `execute`: a payload's way from queue to answers | model, batch |
//! | [`model`] | a loaded model: configuration, session, live sequences | binding, sequence, session |
//! | [`batch`] | requests to rows of the inputs, rows of the outputs to responses | binding, session, triton |
//! | [`binding`] | the ONNX signature held against the configuration | config, session |
//! | [`config`] | the model configuration, read once into its resolved form | tensor |
//! | [`session`] | ONNX Runtime; the only module that names `ort` | memory, tensor |
//! | [`sequence`] | which sequence a request belongs to, and how long it lives | state |
//! | [`state`] | the layout of a slot and the table of slots | tensor |
//! | [`memory`] | buffers, slabs, and copies of rows | state (layout), tensor |
//! | [`triton`] | Triton's objects made safe; the only module that names `triton_sys` | triton-sys |
//! | [`error`] | every error, and the one table to Triton's codes | |
//! | [`report`] | what an instance logs of its batches | config, model |
//! | [`panic`] | the guard against panics | error |
//! | [`tensor`] | data types, shapes, and where a row lies in a batch | |

pub mod backend;
pub mod batch;
pub mod binding;
pub mod config;
pub mod error;
pub mod exports;
pub mod instance;
pub mod memory;
pub mod model;
pub mod panic;
pub mod report;
pub mod sequence;
pub mod session;
pub mod state;
pub mod tensor;
pub mod triton;
