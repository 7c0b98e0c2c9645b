//! Why graphs aren't joined.

use crate::onnx::ReadError;
use crate::pairs::StatePair;
use crate::prepared::ConvertError;

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(
        "'{0}' can't be the name of a graph: letters, digits, '_' and '-' are expected, because '.' ends the name in \
         'graph.tensor'; write NAME=FILE"
    )]
    Name(String),
    #[error("'{0}' can't be the name of a graph, because the tensors of the search have it: write NAME=FILE")]
    Reserved(String),
    #[error("two graphs have the name '{0}': write NAME=FILE for one of them")]
    SameName(String),
    #[error("there is one graph, '{0}', and no search: name at least two graphs")]
    One(String),
    #[error("graph '{graph}': {error}")]
    Read { graph: String, error: ReadError },
    #[error("graph '{graph}': {error}")]
    Graph { graph: String, error: ConvertError },
    #[error("graph '{graph}' {why}")]
    Opset { graph: String, why: String },
    #[error("graph '{graph}': {node} {why}")]
    OpsetOfNode { graph: String, node: String, why: String },
    #[error("'{name}' names no graph: 'graph.tensor' is expected, where graph is one of {graphs}")]
    NoGraph { name: String, graphs: String },
    #[error("graph '{graph}' has no {kind} '{tensor}' (it has {has})")]
    NoTensor { graph: String, kind: &'static str, tensor: String, has: String },
    #[error("'{tensor}' is {own} in its graph, and can't be {given}")]
    Dims { tensor: String, own: String, given: String },
    #[error("input '{0}' has two wires: leave one of them out")]
    TwoWires(String),
    #[error("several graphs have an output with the name of input '{input}': write a wire from one of {sources}")]
    ManySources { input: String, sources: String },
    #[error(
        "'{from}' ({of_source}) can't be wired to '{to}' ({of_target}): {why}; write another wire, or list one more \
         graph that converts between them"
    )]
    Disagree { from: String, of_source: String, to: String, of_target: String, why: String },
    #[error(
        "'{to}' is a state of its graph and can't take '{from}': leave the wire out, or, if it is no state, name the states of \
         the graph"
    )]
    IntoState { from: String, to: String },
    #[error(
        "the wire <<<{from}, {to}>>> leads to the same or to an earlier graph, so it is a state, and an input such as '{from}' \
         has no next value: begin the wire at an output, or list the graph of '{to}' later"
    )]
    BackFromInput { from: String, to: String },
    #[error(
        "graph '{graph}': the names of its inputs and outputs can be paired in several ways as states ({}): name the \
         pairs of the graph as {}", listed(.rivals), in_option(graph)
    )]
    Rivals { graph: String, rivals: Vec<StatePair> },
    #[error(
        "a model of initial states gives the start of state '{0}', but joined graphs can't have one: convert its \
         graph so that its states start at zero"
    )]
    StartsAtModel(String),
    #[error(
        "the model would have no outputs, because wires and states take all of them ({}): name those that responses need as \
         outputs", .0.join(", ")
    )]
    NoOutputs(Vec<String>),
    #[error(
        "the state <<<{input}, {output}>>> has its ends in two graphs: write it as a wire back, <<<{output}, {input}>>>"
    )]
    TwoGraphs { input: String, output: String },
    #[error("output '{0}' would be the next value of two states: give each an output of its own, as by an Identity")]
    TwoStates(String),
    #[error("graphs '{0}' and '{1}' have different versions of the operators of '{2}': export them with the same one")]
    Domain(String, String, String),
    #[error("context of '{input}': {why}")]
    Context { input: String, why: String },
    #[error("search: {0}")]
    Search(String),
    #[error(transparent)]
    Joined(#[from] ConvertError),
}

fn listed(pairs: &[StatePair]) -> String {
    pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(" ")
}

fn in_option(graph: &str) -> String {
    format!("<<<{graph}.input, {graph}.output>>> in the states")
}
