//! How the model's signature fits its configuration: what feeds each input, and what each output is for.
//!
//! Rules: exactly one thing feeds each input of the model; every mismatch is an error at load that names the tensor,
//! what the configuration says and what the model says. The batch axis of each tensor is found here; it may be any
//! dimension. Not for: running anything.

#![expect(missing_docs, reason = "names, types and the texts of errors say most of it")]

mod bound;
mod checks;
mod context;
mod elements;
mod error;
mod feeds;
mod generated;
mod initial;
mod model;
mod repeat;
mod requests;
mod shapes;
mod state_api;
mod states;
mod windows;

pub use bound::{
    BoundControl, BoundInput, BoundOutput, BoundState, Counter, Gathered, Generated, GrowingAxis, Initial,
    InitialContent, InputAxis, NewLength, RequestInput, Source, StatePlace, StepsMultiple, TrimBy,
};
pub use context::{BoundContext, BoundWindow};
pub use error::BindingError;
pub use generated::{RowValues, generated_value, largest_whole};
pub use initial::{InitialModel, InitialOutput};
pub use model::{Binding, InputSpec, OutputSpec, StepSpec};
pub use repeat::{BoundFeed, BoundRepeat, BoundStop};
pub use shapes::ShapeForm;
pub use state_api::{StateApi, StateTensor};
pub use states::GrowingPadding;
pub use windows::MostSteps;

pub use crate::config::Flag;

#[cfg(test)]
mod feature_tests;
#[cfg(test)]
mod feeds_tests;
#[cfg(test)]
mod generated_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod windows_tests;
