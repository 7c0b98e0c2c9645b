//! What a configuration lacks, found in the model's signature: state pairs, inputs, outputs, the largest batch and how
//! sequences are scheduled.
//!
//! Rules: written fields are never changed. If the signature can be understood in two ways, that is an error that lists
//! both. `docs/models.md` says what is filled in when. Not for: whether the result fits the model ([`crate::binding`]).

#![forbid(unsafe_code)]

mod fill;
mod pairing;
mod plan;
mod unpaired;

use pairing::state_pairs;
pub use plan::{Origins, Plan, Settings};

use crate::config::ConfigError;

/// Why a configuration cannot be completed.
#[derive(Debug, thiserror::Error)]
pub enum CompletionError {
    #[error(
        "the names of the model's inputs and outputs can be paired in more than one way: {}; write those that are \
         states in parameter 'state_pairs'",
        readings.join(", ")
    )]
    Ambiguous { readings: Vec<String> },
    #[error(
        "no input and output of the model are named like the two ends of a state (inputs {}; outputs {}); write them \
         in parameter 'state_pairs', as '<<<input, output>>>', or a pattern of their names in 'state_pair_patterns'; a \
         model without states is served if its configuration has 'sequence_batching'",
        inputs.join(", "),
        outputs.join(", ")
    )]
    NoPairs { inputs: Vec<String>, outputs: Vec<String> },
    #[error(
        "parameter 'state_pair_patterns' has '{pattern}', but no input and output of the model are named so (inputs \
         {}; outputs {})",
        inputs.join(", "),
        outputs.join(", ")
    )]
    Pattern { pattern: String, inputs: Vec<String>, outputs: Vec<String> },
    #[error(
        "by their names all inputs of the model would be states ({}), and nothing would be left for requests; write \
         those that are states in parameter 'state_pairs'",
        pairs.join(", ")
    )]
    NothingLeft { pairs: Vec<String> },
    /// The names say only which tensor is an input and which an output. `line` is the line of config.pbtxt that makes
    /// these pairs states, with the other ones.
    #[error(
        "{} may be states, or what requests carry and responses give: their names do not say, and little else is left \
         for those; write those that are states, as in {line}, or list what requests carry under 'input'",
        pairs.join(", ")
    )]
    Unsure { pairs: Vec<String>, line: String },
    /// The context may be kept along several axes, or along none.
    #[error("parameter 'input_context' has '{context}', but {why}")]
    ContextAxis { context: String, why: String },
    #[error(
        "max_batch_size is {max_batch_size}, but the model has no batch dimension that can be told: its output \
         '{output}' is {described}; write 'max_batch_size: 0', or export the model with a dynamic batch dimension"
    )]
    NoBatch { max_batch_size: usize, output: String, described: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
}
