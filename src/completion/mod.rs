//! What a configuration leaves unsaid, found in the model's signature: state pairs, inputs, outputs, the largest batch
//! and how sequences are scheduled.
//!
//! Rules: what is written is kept; what can be read in two ways is an error that lists them. `docs/models.md` says what
//! is filled in when. Not for: whether the result fits the model (that is [`crate::binding`]'s).

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
    /// Names that can be paired in more than one way.
    #[error("the names of the model's inputs and outputs can be paired in more than one way: {}; write those that are states in parameter 'state_pairs'", readings.join(", "))]
    Ambiguous {
        /// All readings.
        readings: Vec<String>,
    },
    /// No names that look like a pair.
    #[error("no input and output of the model are named like the two ends of a state (inputs {}; outputs {}); write them in parameter 'state_pairs', as '<<<input, output>>>', or a pattern of their names in 'state_pair_patterns'; a model without states is served if its configuration has 'sequence_batching'", inputs.join(", "), outputs.join(", "))]
    NoPairs {
        /// The inputs, with type and dims.
        inputs: Vec<String>,
        /// The outputs.
        outputs: Vec<String>,
    },
    /// A pattern of the user's that fits no names.
    #[error("parameter 'state_pair_patterns' has '{pattern}', but no input and output of the model are named so (inputs {}; outputs {})", inputs.join(", "), outputs.join(", "))]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The inputs, with type and dims.
        inputs: Vec<String>,
        /// The outputs.
        outputs: Vec<String>,
    },
    /// Every input would be a state.
    #[error("by their names all inputs of the model would be states ({}), and nothing would be left for requests; write those that are states in parameter 'state_pairs'", pairs.join(", "))]
    NothingLeft {
        /// The pairs.
        pairs: Vec<String>,
    },
    /// Names that say only which is the input and which the output.
    #[error("{} may be states, or what requests carry and responses give: their names do not say, and little else is left for those; write those that are states, as in {line}, or list what requests carry under 'input'", pairs.join(", "))]
    Unsure {
        /// The pairs in question.
        pairs: Vec<String>,
        /// The line of config.pbtxt that takes them for states, with the other pairs.
        line: String,
    },
    /// A scalar without a batch, which Triton cannot carry.
    #[error("'{name}' is a scalar in the model, and with max_batch_size 0 Triton has no scalars: {remedy}")]
    Scalar {
        /// The input or output.
        name: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A context that may be kept along several axes, or along none.
    #[error("parameter 'input_context' has '{context}', but {why}")]
    ContextAxis {
        /// The input and the length, as written.
        context: String,
        /// What is wrong, and the line to write.
        why: String,
    },
    /// Batches of a model that has no batch dimension.
    #[error(
        "max_batch_size is {max_batch_size}, but the model has no batch dimension that can be told: its output '{output}' is {described}; write 'max_batch_size: 0', or export the model with a dynamic batch dimension"
    )]
    NoBatch {
        /// As written.
        max_batch_size: usize,
        /// An output whose dims are all fixed.
        output: String,
        /// Its type and dims.
        described: String,
    },
    /// What is written is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
