//! Reads a model and puts it in order: each node follows those that it reads from, and each layer has time in front.

use std::collections::HashSet;

use bytes::Bytes;

use crate::batch::BatchError;
use crate::graph::{Names, in_a_circle, sort};
use crate::onnx::schema::{GraphProto, ModelProto, NodeProto};
use crate::onnx::{self, ReadError, function_like_operator};
use crate::pairs::{BadPairs, StatePair};
use crate::time::{CHECKER, Hint, Refusals, refuse};

#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{0}")]
    Refused(Refusals),
    #[error(
        "the model has a function '{0}' with the name and the domain of an operator, so it isn't known what its nodes do; \
         inline the functions, as onnx.inliner does"
    )]
    Function(String),
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// No recurrence was found. `alike` are pairs that may be states, and `stopped` says for each axis what is in the way.
    /// `like_states` are inputs that may be states of a graph that makes a single step.
    #[error("{}", nothing(alike, like_states, stopped))]
    Nothing { alike: Vec<StatePair>, like_states: Vec<String>, stopped: Vec<String> },
    /// The graph's description names states in another form than the backend reads.
    #[error("the graph's description names states as '{}': '<<<input, output>>>' is expected", .0.text)]
    Description(BadPairs),
    #[error("{0}")]
    Option(String),
}

impl ConvertError {
    pub fn hints(&self) -> Vec<Hint> {
        match self {
            Self::Nothing { .. } => vec![Hint::States, Hint::Time],
            Self::Refused(refusals) => {
                let hinted = |hint: &Hint| refusals.iter().any(|refusal| refusal.hint == Some(*hint));
                [Hint::States, Hint::Time].into_iter().filter(hinted).collect()
            }
            Self::Read(_) | Self::Function(_) | Self::Batch(_) | Self::Description(_) | Self::Option(_) => Vec::new(),
        }
    }
}

fn nothing(alike: &[StatePair], like_states: &[String], stopped: &[String]) -> String {
    let pairs: Vec<String> = alike.iter().map(StatePair::to_string).collect();
    let states = if pairs.is_empty() { format!("the inputs {}", like_states.join(", ")) } else { pairs.join(" ") };
    let mut text = String::new();
    if !like_states.is_empty() {
        text += &format!(
            "by their types and dims, {states} may be states that the model has: then this graph makes one step and needs \
             no conversion; serve it as it is, with its pairs in 'state_pairs'; else, "
        );
    } else if !alike.is_empty() {
        text += &format!("by their types and dims, {states} may be states that the model has; else, ");
    }
    text += "no axis of the inputs leads to a recurrence or a causal convolution";
    // For a single step, it says nothing what stopped each axis: there are no steps to follow.
    for line in stopped.iter().filter(|_| like_states.is_empty()) {
        text += &format!("\n  {line}");
    }
    text
}

/// A model in which each node follows those that it reads from, also in inner graphs.
pub struct Prepared {
    pub model: ModelProto,
    pub graph: GraphProto,
    /// Layers had the batch in front.
    pub had_batch_in_front: bool,
}

pub fn prepared(bytes: Bytes) -> Result<Prepared, ConvertError> {
    in_order(onnx::read(bytes)?)
}

pub fn in_order(mut model: ModelProto) -> Result<Prepared, ConvertError> {
    // Nodes of such a function would be followed by the rules of the operator.
    if let Some(name) = function_like_operator(&model) {
        return Err(ConvertError::Function(name.to_owned()));
    }
    let mut graph = model.graph.take().unwrap_or_default();
    // Names in bodies hide those outside, so new names must differ from both.
    let names = &mut Names::of(&graph);
    let had_batch_in_front = put_time_in_front(&mut graph, names);
    sort_all(&mut graph)?;
    Ok(Prepared { model, graph, had_batch_in_front })
}

/// Sorts a graph and its inner graphs. Refuses nodes that wait for each other, and two nodes that make one tensor.
pub fn sort_all(graph: &mut GraphProto) -> Result<(), ConvertError> {
    let refused = |node: &NodeProto, why: String| {
        let refusal = refuse(node, why, CHECKER);
        Err(ConvertError::Refused(refusal.into()))
    };
    // Two makers of one name would make every look-up by name ambiguous.
    let mut made = HashSet::new();
    for node in &graph.node {
        if let Some(twice) = node.named_outputs().find(|name| !made.insert(*name)) {
            return refused(node, format!("makes '{twice}', which another node makes too"));
        }
    }
    if let Some(node) = in_a_circle(graph) {
        return refused(node, "waits for its own output, or for a node that does".to_owned());
    }
    // All that follows walks the nodes once, from front to back.
    sort(graph);
    graph.node.iter_mut().flat_map(NodeProto::graphs_mut).try_for_each(sort_all)
}

/// Puts transposes around each layer with the batch in front (`layout` 1), which ONNX Runtime doesn't run. Answers whether
/// there was one.
fn put_time_in_front(graph: &mut GraphProto, names: &mut Names) -> bool {
    let mut found = false;
    for index in 0..graph.node.len() {
        for inner in graph.node[index].graphs_mut() {
            found |= put_time_in_front(inner, names);
        }
        let node = &graph.node[index];
        if node.is_recurrent() && node.int("layout") == Some(1) {
            transpose_around(graph, index, names);
            found = true;
        }
    }
    found
}

fn transpose_around(graph: &mut GraphProto, index: usize, names: &mut Names) {
    let mut node = graph.node[index].clone();
    node.remove("layout");
    let mut fresh =
        |tensor: &str| (names.fresh(&format!("{tensor}/by_time")), names.fresh(&format!("{tensor}/Transpose")));
    // The input and the initial states.
    for input in [0, 5, 6] {
        let Some(given) = node.input_at(input).map(str::to_owned) else { continue };
        let (by_time, name) = fresh(&given);
        let transpose = NodeProto::make("Transpose", &name, &[&given], &[&by_time]);
        graph.node.push(transpose.with_ints("perm", &[1, 0, 2]));
        node.set_input(input, &by_time);
    }
    // With layout 1, the batch comes first in each output, and the directions after the steps.
    for (output, order) in [(0, &[2, 0, 1, 3][..]), (1, &[1, 0, 2]), (2, &[1, 0, 2])] {
        let Some(wanted) = node.output_at(output).map(str::to_owned) else { continue };
        let (by_time, name) = fresh(&wanted);
        graph.node.push(NodeProto::make("Transpose", &name, &[&by_time], &[&wanted]).with_ints("perm", order));
        node.set_output(output, &by_time);
    }
    graph.node[index] = node;
}
