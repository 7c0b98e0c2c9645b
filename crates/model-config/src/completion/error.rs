//! Why a configuration cannot be completed, with what to write instead.

use crate::config::{BY_SHAPE, ConfigError, StatePair, parameter_line};
use crate::onnx::Recurrence;

pub(super) type Result<T, E = CompletionError> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum CompletionError {
    #[error(
        "the names of the model's inputs and outputs can be paired in more than one way: {readings}; write those that are \
         states in parameter 'state_pairs'"
    )]
    Ambiguous { readings: String },
    /// `proposed` are pairs by their types and dims, where exactly one assignment fits. `recurrence` is the first
    /// node that goes over a sequence within one run.
    #[error("{}", no_pairs_text(inputs, outputs, proposed, recurrence.as_deref()))]
    NoPairs { inputs: String, outputs: String, proposed: Vec<StatePair>, recurrence: Option<Box<Recurrence>> },
    #[error("parameter 'state_pairs' is '{BY_SHAPE}', but {why}; write the pairs, as '<<<input, output>>>'")]
    Shapes { why: String },
    #[error(
        "parameter 'state_pair_patterns' has '{pattern}', but no input and output of the model match it (inputs {inputs}; \
         outputs {outputs})"
    )]
    Pattern { pattern: String, inputs: String, outputs: String },
    #[error(
        "by their names all inputs of the model would be states ({pairs}), and nothing would be left for requests; write \
         those that are states in parameter 'state_pairs'"
    )]
    NothingLeft { pairs: String },
    /// The names say only which tensor is an input and which an output. `line` is the line of config.pbtxt that makes
    /// these pairs states, with the other ones.
    #[error(
        "{pairs} may be states, or inputs of requests and outputs of responses: their names do not say, and the model has \
         few others; write those that are states, as in {line}, or list the inputs of requests under 'input'"
    )]
    Unsure { pairs: String, line: String },
    #[error("parameter 'input_context' has '{context}', but {why}")]
    ContextAxis { context: String, why: String },
    #[error(
        "max_batch_size is {max_batch_size}, but the model has no recognizable batch dimension: its output '{output}' \
         is {described}; write 'max_batch_size: 0', or export the model with a dynamic batch dimension"
    )]
    NoBatch { max_batch_size: usize, output: String, described: String },
    /// `names` are those that the batch dimension may have. `line` is the line of config.pbtxt that says which it is.
    #[error(
        "max_batch_size is {max_batch_size}, but the names of the model's dimensions do not say which is the batch: \
         requests and states share {names}; write each dimension of the states as 'batch', as -1 if it varies, or as its \
         length: {line}"
    )]
    UnclearBatch { max_batch_size: usize, names: String, line: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl CompletionError {
    pub(super) fn with_recurrence(mut self, node: Option<Recurrence>) -> Self {
        if let Self::NoPairs { recurrence, .. } = &mut self {
            *recurrence = node.map(Box::new);
        }
        self
    }
}

pub(super) fn state_pairs_line(pairs: &[StatePair]) -> String {
    parameter_line("state_pairs", &joined(pairs, " "))
}

pub(super) fn joined(pairs: &[StatePair], separator: &str) -> String {
    pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(separator)
}

/// Says which pairs to write for layers whose states are inputs and outputs of the model; empty if there are none.
pub(super) fn ends_of_layers(ends: &[(String, String)]) -> String {
    if ends.is_empty() {
        return String::new();
    }
    let pair = |(input, output): &(String, String)| StatePair { input: input.clone(), output: output.clone() };
    let line = state_pairs_line(&ends.iter().map(pair).collect::<Vec<_>>());
    let listed: Vec<String> = ends.iter().map(|(input, output)| format!("from '{input}' to '{output}'")).collect();
    format!("its layers carry states {}: if clients don't send those, write {line}", listed.join(", "))
}

/// Says what to write for a model whose names tell no state.
fn no_pairs_text(inputs: &str, outputs: &str, proposed: &[StatePair], recurrence: Option<&Recurrence>) -> String {
    let mut text = format!(
        "no input and output of the model are named like the two ends of a state (inputs {inputs}; outputs {outputs}); "
    );
    // A layer that carries a state from an input to an output is stronger evidence than equal dims.
    let of_layers = recurrence.map(|of| ends_of_layers(&of.ends)).unwrap_or_default();
    if !of_layers.is_empty() {
        text += &format!("{of_layers}; else ");
    } else if !proposed.is_empty() {
        let (listed, line) = (joined(proposed, " "), parameter_line("state_pairs", BY_SHAPE));
        text += &format!("by their types and dims, {listed} may be states: if they are, write {line}; else ");
    }
    if let Some(Recurrence { node, .. }) = recurrence.filter(|_| of_layers.is_empty()) {
        // With states that were not found, it may go on from them.
        let begins =
            if proposed.is_empty() { format!("{node} begins anew in each run: if it") } else { format!("if {node}") };
        text += &format!(
            "{begins} has to go on where the last run ended, write {}, or give the model states with stateful-convert; else ",
            parameter_line("low_latency_transformation", "true")
        );
    }
    text + &format!(
        "list the states: {}, or a pattern of their names in 'state_pair_patterns'; if it has no states, serve it with \
         Triton's onnxruntime backend (backend: 'onnxruntime'), or with this one by adding 'sequence_batching {{ \
         oldest {{ max_candidate_sequences: 1024 }} }}'",
        parameter_line("state_pairs", "<<<input, output>>>")
    )
}
