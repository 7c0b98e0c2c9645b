//! What can be wrong between a model and its configuration.

use crate::tensor::DataType;

/// Why a model does not fit its configuration.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    /// The configuration names a tensor that the model does not have.
    #[error("{named_by} names '{name}', but the model has no such {side} (it has {})", has.join(", "))]
    Missing {
        /// Which part of the configuration.
        named_by: &'static str,
        /// The tensor.
        name: String,
        /// `input` or `output`.
        side: &'static str,
        /// What there is.
        has: Vec<String>,
    },
    /// A parameter names something that is not there.
    #[error("parameter '{parameter}' names '{name}', which is not {side} (there is {})", if has.is_empty() { "none".to_owned() } else { has.join(", ") })]
    Unlisted {
        /// The parameter.
        parameter: &'static str,
        /// The name.
        name: String,
        /// What it should be.
        side: &'static str,
        /// What there is.
        has: Vec<String>,
    },
    /// A parameter that does not fit the model.
    #[error("parameter '{parameter}' has '{value}', but {why}")]
    Parameter {
        /// The parameter.
        parameter: &'static str,
        /// The part of it that is wrong.
        value: String,
        /// What is wrong.
        why: String,
    },
    /// An initial value that a state cannot have.
    #[error("the initial value of state '{name}' from {from} does not fit: {why}")]
    Initial {
        /// The state's input.
        name: String,
        /// Where the value comes from.
        from: String,
        /// What is wrong.
        why: String,
    },
    /// The model for initial states does not fit.
    #[error("the initial_state_model's '{name}' {why}")]
    InitialModel {
        /// An input or output of it.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// An input that may be left out, and no value in the model.
    #[error(
        "input '{name}' is optional, but the model has no default for it: give one in 'constant_inputs' and take it out of 'input', or let each request carry it"
    )]
    Optional {
        /// The input.
        name: String,
    },
    /// An output of which nobody says what belongs to a row.
    #[error(
        "output '{name}' has {dims} in the model, and with 'padded_inputs' rows of different lengths share a run: say in 'padded_outputs' what of it belongs to a row, '{name}=LENGTHS_OUTPUT' or '{name}=all'"
    )]
    Untrimmed {
        /// The output.
        name: String,
        /// Its dimensions.
        dims: String,
    },
    /// Two data types that should be one.
    #[error("{what} is {configured}, but in the model it is {model}")]
    DataType {
        /// The tensor and who names it.
        what: String,
        /// What the configuration says.
        configured: DataType,
        /// What the model says.
        model: DataType,
    },
    /// Dimensions that do not agree.
    #[error("{what} has dims {configured}, but in the model {model}: {rule}")]
    Dims {
        /// The tensor and who names it.
        what: String,
        /// What the configuration says.
        configured: String,
        /// What the model says.
        model: String,
        /// What would agree.
        rule: String,
    },
    /// An input that nothing feeds.
    #[error(
        "nothing feeds the model's input '{name}' ({data_type} {dims}): list it under 'input', in 'state_pairs' or 'sequence_batching.state', as a 'control_input' or in 'constant_inputs'"
    )]
    Unfed {
        /// The input.
        name: String,
        /// Its type.
        data_type: DataType,
        /// Its dimensions.
        dims: String,
    },
    /// An input that two things feed.
    #[error("the model's input '{name}' is fed by {first} and by {second}; one of them has to go")]
    FedTwice {
        /// The input.
        name: String,
        /// One.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// The two ends of a state pair differ.
    #[error(
        "the state pair <<<{input}, {output}>>> has {input_is} as input and {output_is} as output; they must agree"
    )]
    StateEnds {
        /// Name of the input.
        input: String,
        /// Name of the output.
        output: String,
        /// Type and dimensions of the input.
        input_is: String,
        /// Type and dimensions of the output.
        output_is: String,
    },
    /// A state whose batch axis cannot be told, or that cannot be kept in a slot of fixed size.
    #[error("state '{name}' has {dims} in the model: {why}")]
    State {
        /// Name of the input.
        name: String,
        /// Type and dimensions.
        dims: String,
        /// What is wrong.
        why: String,
    },
    /// A control value that the model's input cannot hold.
    #[error("control_input '{name}' has a value that the model's input cannot hold: {why}")]
    Control {
        /// The input.
        name: String,
        /// The value, and what the model takes.
        why: String,
    },
    /// Control values between which the model cannot tell.
    #[error(
        "control_input '{name}' has the values {no} and {yes}, which are the same for the model's input of {model}"
    )]
    EqualControls {
        /// The input.
        name: String,
        /// The value for "no".
        no: f64,
        /// The value for "yes".
        yes: f64,
        /// What the model takes.
        model: DataType,
    },
    /// The states of a sequence are larger than any memory.
    #[error("the states of a sequence have more bytes than an address can count")]
    StatesOverflow,
    /// A constant that does not fit its input.
    #[error("constant_inputs gives '{name}' the value {value}, but {why}")]
    Constant {
        /// The input.
        name: String,
        /// The value as written.
        value: String,
        /// What the model wants.
        why: String,
    },
}
