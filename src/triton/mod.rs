//! Safe wrappers of Triton's objects. Only this module and the exports use `triton-sys`.
//!
//! Rules: what Triton lends is borrowed with a lifetime; what it hands over is owned and given back on drop. A request
//! is answered once and released once on every path ([`Request`]). Its bytes are copied and never borrowed as a slice
//! ([`crate::memory::client`]). Every call that fails is an [`Error`]. Constructors from raw pointers are `unsafe`, and
//! only the exports call them. Not for: what a request means.

mod error;
mod instance;
mod log;
mod message;
mod metrics;
mod model;
mod request;
mod response;
mod rows;
mod types;

pub use error::{Code, Error};
pub use instance::{Instance, Times, monotonic_ns, thread_waits};
pub use log::install as install_log;
pub use metrics::{Counter, Family, Gauge, Histogram};
pub use model::{Backend, Model};
pub use request::{HeldElements, HeldInput, Input, NotCopied, ParameterValue, Request, c_name};
pub use response::{Answer, OutputMemory, Response};

use triton_sys::Version;

/// The oldest backend API with all that a request needs. 1.6 added sequence ids that are strings (Triton 21.10).
const OLDEST_BACKEND_API: u32 = 6;

/// Why the library cannot serve in this process.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No server, or one with another ABI.
    #[error(transparent)]
    Load(#[from] triton_sys::LoadError),
    /// A server that lacks what every request needs.
    #[error(
        "this Triton server has backend API {0}, but 1.{OLDEST_BACKEND_API} or newer is needed (Triton 21.10): use a \
         newer server"
    )]
    TooOld(Version),
}

/// Finds the running server. For `TRITONBACKEND_Initialize`.
pub fn load() -> Result<(), ServerError> {
    triton_sys::load()?;
    triton_sys::versions().map_or(Ok(()), |offered| check_version(offered.backend))
}

const fn check_version(offered: Version) -> Result<(), ServerError> {
    if offered.major == 1 && offered.minor < OLDEST_BACKEND_API {
        return Err(ServerError::TooOld(offered));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_is_refused_with_both_versions() {
        assert!(check_version(Version { major: 1, minor: 6 }).is_ok());
        assert!(check_version(Version { major: 1, minor: 19 }).is_ok());
        let error = check_version(Version { major: 1, minor: 5 }).unwrap_err().to_string();
        assert!(error.contains("API 1.5") && error.contains("1.6"), "{error}");
    }
}
