//! `libtriton_stateful.so`: a Triton Inference Server backend that serves stateful ONNX models.
//!
//! It keeps the state of every sequence in the server, runs the sequences that are ready as one batch in ONNX Runtime,
//! keeps their new states, and answers. `ARCHITECTURE.md` follows a request through the modules and gives the reasons.
//!
//! This is the map of the modules. Each uses only modules below it. All may use [`model_config`], which has a map of
//! its own, under the names of its modules: `crate::config` and the others.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | [`exports`] | the symbols that Triton calls, each guarded against panics | backend, workers, model, panic, triton |
//! | [`workers`] | the path of a request from Execute to its release: of one that this backend schedules, and of a payload that core has scheduled; the clock of an instance | instance, responder, batch, model, panic, error, triton |
//! | [`instance`] | the path of a payload from Triton's queue to its answers, and what requests do to their state beside a run | responder, report, batch, snapshot, store, model, panic, error, session, triton |
//! | [`responder`] | the thread that sends answers | panic |
//! | [`report`] | what an instance logs of its batches | batch, model, triton |
//! | [`batch`] | turns requests into rows of the inputs, and rows of the outputs into responses | store, model, panic, proof, error, snapshot, session, triton, memory |
//! | [`snapshot`] | the state of a sequence as bytes | store, model, error, memory, triton |
//! | [`store`] | where every byte of state is: brings states into a run, and keeps what it wrote | model, panic, error, session, memory |
//! | [`backend`] | the server's command line, and the ONNX Runtime that all models share | model, panic, error, session, triton |
//! | [`model`] | a loaded model: its configuration, sessions, live sequences, metrics | panic, proof, error, joining, conversion, session, triton, memory |
//! | [`proof`] | checks at load that the rows of a run don't change each other's results | session, memory |
//! | [`error`] | what can go wrong at load, and what for a request, each with its codes for Triton | panic, joining, conversion, session, triton, memory |
//! | [`joining`] | joins the graphs of a folder to one model in memory at load, if the configuration lists them, and checks the result | conversion, session |
//! | [`conversion`] | converts the model in memory at load, if the configuration asks for it, and checks the result | session |
//! | [`session`] | ONNX Runtime: library, sessions, signatures, and the step; the only module that names `ort` | memory |
//! | [`triton`] | safe types for Triton's objects; with the exports, the only module that names `triton_sys` | memory |
//! | [`memory`] | slabs of state slots and buffers of growing states, on the host or on a GPU | |
//! | [`mod@panic`] | the guard against panics | |

mod backend;
mod batch;
mod conversion;
mod error;
pub mod exports;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod instance;
mod joining;
mod memory;
mod model;
mod panic;
mod proof;
mod report;
mod responder;
mod session;
mod snapshot;
mod store;
mod triton;
mod workers;

use model_config::{binding, completion, config, explain, onnx};

/// The version in the log and in `stateful-inspect --version`. `scripts/release` adds the commit.
pub const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// What `stateful-inspect` uses, so that it shows what the backend makes of a model. The tests use [`exports`].
pub mod inspect {
    pub use crate::completion::{Family, Settings};
    pub use crate::config::{INPUT_WINDOWS, PairsFrom, PartialConfig};
    pub use crate::error::LoadError;
    pub use crate::explain::{explain, explain_batch_scale};
    pub use crate::model::{Prepared, served};
    pub use crate::onnx::Signature;
    pub use crate::session::{EnvironmentOptions, Library, LogLevel, Provider, SearchPath, Session};
}
