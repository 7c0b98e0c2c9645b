//! `libtriton_stateful.so`: a Triton Inference Server backend that serves stateful ONNX models.
//!
//! It keeps every sequence's state beside the model, batches the sequences that are ready into one run of ONNX
//! Runtime, answers, and keeps the new state. `ARCHITECTURE.md` draws the way of a request; this is the map.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | [`exports`] | the symbols that Triton calls, each one guarded line | backend, instance, model, triton |
//! | [`instance`] | `execute`: a payload's way from queue to answers | responder, report, batch, model, session, triton |
//! | [`responder`] | the thread on which answers leave | model, panic |
//! | [`report`] | what an instance logs of its batches | batch, model, triton |
//! | [`batch`] | requests to rows of the inputs, rows of the outputs to responses | model, binding, session, triton, memory |
//! | [`backend`] | what the server's command line says; the shared ONNX Runtime | model, session, triton |
//! | [`model`] | a loaded model: configuration, session, live sequences | binding, session, triton, sequence, memory |
//! | [`completion`] | what a configuration leaves unsaid, from the ONNX signature | session, config |
//! | [`binding`] | the ONNX signature held against the configuration | session, config, memory, state |
//! | [`explain`] | what was made of a model, as a table | binding, completion, config, session |
//! | [`session`] | ONNX Runtime; the only module that names `ort` | config, memory |
//! | [`triton`] | Triton's objects made safe; the only module that calls `triton_sys` | sequence (ids), memory |
//! | [`config`] | the model configuration, read once into its resolved form | memory (simulated devices), state |
//! | [`sequence`] | which sequence a request belongs to, and how long it lives | state |
//! | [`memory`] | buffers, slabs and copies of rows, on the host and on GPUs; the only module that names `cudarc` | |
//! | [`state`] | the layout of a slot, the table of slots, which states lie in batch buffers | |
//! | [`tensor`] | data types, shapes, and where a row lies in a batch; used by most | |
//! | [`error`] | every error, and the one table to Triton's codes | those whose errors it gathers |
//! | [`panic`] | the guard against panics | error |

pub mod backend;
pub mod batch;
pub mod binding;
pub mod completion;
pub mod config;
pub mod error;
pub mod explain;
pub mod exports;
pub mod instance;
pub mod memory;
pub mod model;
pub mod panic;
pub mod report;
pub mod responder;
pub mod sequence;
pub mod session;
pub mod state;
pub mod tensor;
pub mod triton;
