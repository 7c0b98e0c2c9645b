//! What can go wrong, and the code that Triton is told.
//!
//! A [`LoadError`] is for the operator who loads a model; a [`RequestError`] is for the client who sent a request, and
//! joins the errors of the stages that it passes. Load and request errors have their own tables of codes, so a request
//! never fails with an error of loading. What both can meet ([`codes`]) has the same code in both.

#![forbid(unsafe_code)]

mod admission;
mod codes;
mod input;
mod load;
mod reason;
mod request;
mod run;
mod state_api;
mod stored;

pub use admission::AdmissionError;
pub use input::InputError;
pub use load::LoadError;
pub use reason::Reason;
pub use request::RequestError;
pub use run::RunError;
pub use state_api::{SnapshotError, StateApiError};
pub use stored::StoredError;
