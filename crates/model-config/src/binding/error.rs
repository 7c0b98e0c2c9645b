//! What can be wrong between a model and its configuration.

use std::borrow::Borrow;

use rows::tensor::{DataType, Dims};

pub(super) type Result<T, E = BindingError> = std::result::Result<T, E>;

/// Why a model does not fit its configuration. `name` is the tensor's, and `has` lists what there is.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    /// `named_by` is a part of the configuration, and `side` says whether the tensor would be an input or an output.
    #[error("{named_by} names '{name}', but the model has no such {side} (it has {has})")]
    Missing { named_by: &'static str, name: String, side: &'static str, has: String },
    #[error(
        "{named_by} has <<<{input}, {output}>>>, but '{input}' is an output of the model and '{output}' an input: write \
         <<<{output}, {input}>>>"
    )]
    Swapped { named_by: &'static str, input: String, output: String },
    /// `side` says what the parameter should name.
    #[error("parameter '{parameter}' names '{name}', which is not {side} (there is {has})")]
    Unlisted { parameter: &'static str, name: String, side: &'static str, has: String },
    #[error("'{list}' lists '{name}', which is no state of the model (there is {has})")]
    NoState { list: &'static str, name: String, has: String },
    #[error("parameter '{parameter}' has '{value}', but {why}")]
    Parameter { parameter: &'static str, value: String, why: String },
    #[error("the model's metadata '{key}' is '{value}', but {why}")]
    Metadata { key: &'static str, value: String, why: String },
    #[error("the initial value of state '{name}' from {from} does not fit: {why}")]
    Initial { name: String, from: String, why: String },
    #[error("the initial_state_model's '{name}' {why}")]
    InitialModel { name: String, why: String },
    #[error(
        "input '{name}' is optional, but the model has no default for it: give one in 'constant_inputs' and take it \
         out of 'input', or let each request carry it"
    )]
    Optional { name: String },
    #[error(
        "output '{name}' has {dims} in the model, and with 'padded_inputs' rows of different lengths share a run: \
         write in 'padded_outputs' which part belongs to a row, as '{name}=LENGTHS_OUTPUT' or '{name}=all'"
    )]
    Untrimmed { name: String, dims: String },
    #[error("{what} is {configured}, but in the model it is {model}")]
    DataType { what: String, configured: DataType, model: DataType },
    #[error("{what} has dims {configured}, but in the model {model}: {rule}")]
    Dims { what: String, configured: String, model: String, rule: String },
    #[error(
        "nothing feeds the model's input '{name}' ({data_type} {dims}): list it under 'input', in 'state_pairs' or \
         'sequence_batching.state', as a 'control_input', in 'constant_inputs' or \
         in 'generated_inputs'"
    )]
    Unfed { name: String, data_type: DataType, dims: String },
    #[error("the model's input '{name}' is fed by {first} and by {second}: take it out of one of them")]
    FedTwice { name: String, first: &'static str, second: &'static str },
    #[error(
        "the state pair <<<{input}, {output}>>> has {input_is} as input and {output_is} as output; they must agree"
    )]
    StateEnds { input: String, output: String, input_is: String, output_is: String },
    #[error("state '{name}' has {dims} in the model: {why}")]
    State { name: String, dims: String, why: String },
    #[error("control_input '{name}' has a value that the model's input cannot hold: {why}")]
    Control { name: String, why: String },
    #[error(
        "control_input '{name}' has the values {no} and {yes}, which are the same for the model's input of {model}"
    )]
    EqualControls { name: String, no: f64, yes: f64, model: DataType },
    #[error("the states of a sequence have more bytes than an address can count")]
    StatesOverflow,
    #[error("{}", rows_are_steps_text(node, axes))]
    RowsAreSteps { node: String, axes: String },
    #[error("the batch would be {what}, so sequences that share a run would change each other's answers: {help}")]
    OtherBatch { what: String, help: String },
    #[error("{why}: correct the pairs, in 'state_pairs' or wherever they are written")]
    Crossed { why: String },
    #[error("constant_inputs gives '{name}' the value {value}, but {why}")]
    Constant { name: String, value: String, why: String },
}

pub(super) fn bad(parameter: &'static str, value: impl Into<String>, why: impl Into<String>) -> BindingError {
    BindingError::Parameter { parameter, value: value.into(), why: why.into() }
}

pub(super) fn wrong_dims(what: String, configured: &[i64], model: &[i64], rule: &str) -> BindingError {
    let (configured, model) = (Dims(configured).to_string(), Dims(model).to_string());
    BindingError::Dims { what, configured, model, rule: rule.to_owned() }
}

pub(super) fn names<T: Borrow<str>>(names: &[T]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn rows_are_steps_text(node: &str, axes: &str) -> String {
    format!(
        "{node} takes the batch ({axes}) for its steps, so sequences that share a run would change each other's answers: if \
         that axis is the batch, export the model with a transpose in front of the node (PyTorch: batch_first=True); if it \
         has the steps, export the model with the dimension names 'time' and 'batch', or list all of the model's dims under \
         'input' and 'output' without max_batch_size; with parameter 'max_rows_per_run' of 1, each sequence runs alone"
    )
}
