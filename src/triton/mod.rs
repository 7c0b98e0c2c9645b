//! Triton's objects, safe: the only face of `triton-sys` that the rest of the crate sees.
//!
//! Rules: what Triton lends is borrowed with a lifetime, what it hands over is owned and given back on drop; a request
//! is answered once and released once on every path ([`Request`]); every call that fails is an [`Error`]. Constructors
//! from raw pointers are `unsafe` and called by the exports only. Not for: what a request means.

mod error;
mod instance;
mod log;
mod message;
mod metrics;
mod model;
mod request;
mod response;
mod types;

pub use error::{Code, Error};
pub use instance::{Instance, Times, monotonic_ns};
pub use log::install as install_log;
pub use metrics::{Counter, Family, Gauge};
pub use model::{Backend, Model};
pub use request::{Input, Request, c_name};
pub use response::Response;

/// Finds the running server; once, in `TRITONBACKEND_Initialize`.
pub fn load() -> Result<(), triton_sys::LoadError> {
    triton_sys::load().map(drop)
}
