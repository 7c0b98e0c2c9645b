//! The model configuration, parsed once.
//!
//! [`PartialConfig`] is what the user wrote: it parses the JSON that Triton hands over ([`raw`]) and this backend's own
//! `parameters` ([`parameters`]), and takes what completion adds. Then the [`Config`] contains it, and is all that the rest
//! of the code sees. Every error names the field or parameter, the value that came and what is allowed.
//!
//! To add a parameter: list its name in [`parameters`], read it where [`PartialConfig::resolve`] or [`PartialConfig::new`]
//! reads its neighbours, and describe it in the reference of parameters. Not for: the ONNX model's signature
//! ([`crate::binding`]).

#![allow(missing_docs, reason = "a name that says it all needs no sentence")]

mod durability;
mod generated;
mod initial;
mod model;
mod parameters;
mod partial;
mod placement;
mod providers;
mod raw;
mod resolved;
mod scheduling;
mod states;
mod steps;
mod tensors;

pub use durability::{Durability, StateStore};
pub use generated::{GENERATED_INPUTS, GeneratedInput, GeneratedKind, NamedAxis, NamedCounter, NewElements};
pub use initial::{InitialSources, InitialValue};
pub use model::{GraphOptimization, JOIN, Join, SEARCH, SessionOptions, find_model_file, find_named_file};
pub use parameters::{PairPattern, parameter_line, similarity};
pub use partial::{Additions, PartialConfig};
pub use placement::{InstanceKind, Placement, spread_cpu_instances};
pub use providers::{ARENA_EXTEND_STRATEGY, Options, Providers};
pub use raw::ConfigError;
pub use resolved::{Config, Logging};
pub use scheduling::{OwnScheduling, POLL_WAIT, Strategy, scans};
pub use stateful_convert::StatePair;
pub use states::{
    BY_SHAPE, DeclaredState, GROWING_PADDING, PairsFrom, StateDims, StatePairs, States, state_dims_line,
    state_dims_text,
};
pub use steps::{
    Feed, INPUT_WINDOWS, MAX_STEPS, REPEAT, REPEAT_UNTIL, Repeat, Stop, USUAL_MOST_STEPS, Window, Windows,
};
pub use tensors::{
    CONTROL_INPUT, Context, Control, ControlKind, FalseTrue, FirstRequest, Flag, ID_TENSOR, PaddedInput, PaddedOutput,
    STATE_INFO, STATE_PREFIX, STATE_SNAPSHOT, TakesIds, TensorConfig, context_line, is_state_tensor,
};
