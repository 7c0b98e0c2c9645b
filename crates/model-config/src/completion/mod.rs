//! What a configuration lacks, found in the model's signature: state pairs, inputs, outputs, the largest batch and how
//! sequences are scheduled.
//!
//! Rules: written fields are never changed. If the signature can be understood in two ways, that is an error that lists
//! both. `docs/models.md` says what is filled in when. Not for: whether the result fits the model ([`crate::binding`]).

#![allow(missing_docs, reason = "a name that says it all needs no sentence")]

mod batch;
mod doubts;
mod error;
mod families;
mod fill;
mod known_models;
mod names;
mod pairing;
mod plan;

pub use error::CompletionError;
pub use families::Family;
pub use known_models::Advice;
pub use plan::{Origins, Plan, Settings, own_pairs};
