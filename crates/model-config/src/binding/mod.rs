//! How the model's signature fits its configuration: what feeds each input, and what each output is for.
//!
//! Rules: exactly one thing feeds each input of the model; every mismatch is an error at load that names the tensor,
//! what the configuration says and what the model says. The batch axis of each tensor is found here; it may be any
//! dimension. Not for: running anything.

#![expect(missing_docs, reason = "names, types and the texts of errors say most of it")]

mod bound;
mod checks;
mod elements;
mod error;
mod fit;
mod generated;
mod initial;
mod inputs;
mod model;
mod outputs;
mod state_api;
mod states;
mod steps;

pub use bound::{
    BoundContext, BoundControl, BoundInput, BoundOutput, BoundState, BoundWindow, Counter, Gathered, Generated,
    GrowingAxis, Initial, InitialContent, InputAxis, NewLength, RequestInput, Source, StatePlace, StepsMultiple,
    TrimBy,
};
pub use error::BindingError;
pub use fit::ShapeForm;
pub use generated::{RowValues, generated_value, largest_whole};
pub use model::{Binding, InitialModel, InitialOutput, InputSpec, OutputSpec, StepSpec};
pub use state_api::{StateApi, StateTensor};
pub use states::GrowingPadding;
pub use steps::{BoundFeed, BoundRepeat, BoundStop, MostSteps};

pub use crate::config::Flag;

#[cfg(test)]
mod feature_tests;
#[cfg(test)]
mod generated_tests;
#[cfg(test)]
mod inputs_tests;
#[cfg(test)]
mod steps_tests;
#[cfg(test)]
mod tests;
