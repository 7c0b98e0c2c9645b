//! Safe wrappers of Triton's objects. Only this module and the exports use `triton-sys`.
//!
//! Rules: what Triton lends is borrowed with a lifetime; what it hands over is owned and given back on drop. A request
//! is answered once and released once on every path ([`Request`]). Its bytes are copied and never borrowed as a slice
//! ([`rows::client`](::rows::client)). Every call that fails is an [`Error`]. Constructors from raw pointers are
//! `unsafe`, and only the exports call them. Not for: what a request means.

mod error;
mod input;
mod metrics;
mod model;
mod request;
mod response;
mod server;

pub use error::{Code, Error, echo};
pub use input::{HeldElements, HeldInput, Input, NotCopied};
pub use metrics::{Family, Kind, Metric};
pub use model::{Backend, Instance, Model, Times, monotonic_ns, thread_waits};
pub use request::{ParameterValue, Request};
pub use response::{Answer, OutputMemory, Response, ResponseCopy, RowOutput, c_name};
pub use server::{
    ServerError, exit_process, fills_in_candidates, gives_request_parameters, install_log, load, log_limits,
};
