//! Lengths of rows (`sequence_lens`) that requests say. A row may be shorter than its request, and go on in a later one.
//!
//! Rules: each new state leaves out the padding of shorter rows, so each must belong to a layer with the same lengths. The
//! model leaves the rows in their order, because states stay in that of the sequences.

use std::collections::{HashMap, HashSet};

use crate::analysis::Analysis;
use crate::graph::{inputs_of, producers};
use crate::onnx::DataType;
use crate::onnx::schema::{GraphProto, NodeProto};
use crate::time::{Place, Refusal, refuse};

/// The inputs whose content each tensor depends on.
pub type Content = HashMap<String, HashSet<String>>;

/// The lengths of a recurrent node's rows, if requests say them.
pub fn of_requests<'a>(node: &'a NodeProto, content: &Content) -> Option<&'a str> {
    let lens = node.input_at(4).filter(|_| node.is_recurrent());
    lens.filter(|&lens| content.get(lens).is_some_and(|inputs| !inputs.is_empty()))
}

/// Refuses states that would take in the padding of rows that another layer takes as shorter.
pub fn check<'a>(graph: &'a GraphProto, analysis: &Analysis, content: &Content) -> Result<(), Refusal> {
    let producers = producers(graph);
    let source_of = |node: &'a NodeProto| Some(source(graph, &producers, of_requests(node, content)?));
    let mut over_steps = graph.node.iter().filter(|node| runs_over_steps(node, analysis));
    let Some((layer, lens)) = over_steps.find_map(|node| Some((node, source_of(node)?))) else {
        return Ok(());
    };
    let is_cut = |index: usize| analysis.found.cuts.iter().any(|cut| cut.node() == index && cut.makes_state(graph));
    for (index, node) in graph.node.iter().enumerate() {
        let has_own_state = !is_cut(index) && node.is_recurrent() && runs_over_steps(node, analysis);
        if has_own_state && source_of(node).is_some() {
            let why = "takes lengths of rows (sequence_lens) and starts from a state that the model has: a row without steps \
                       would lose it";
            let help = "export the model without lengths, and send rows of equal length in a request";
            return Err(refuse(node, why, help));
        }
        if !is_cut(index) && !has_own_state {
            continue;
        }
        if source_of(node) != Some(lens) {
            let why = format!(
                "doesn't take the lengths of rows that {} '{}' takes (sequence_lens from '{lens}'), so its state would take \
                 in the padding of shorter rows",
                layer.operator(),
                layer.label()
            );
            let help = "export the model without lengths and send rows of equal length in a request, or give this node \
                        the same lengths";
            return Err(refuse(node, why, help));
        }
    }
    Ok(())
}

/// Whether a node passes lengths of rows on: as they are, and in the order of the rows.
pub fn passes_lengths_on(node: &NodeProto) -> bool {
    let merges = ["Expand", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"];
    keeps_each(node) || merges.contains(&node.op())
}

/// Whether the output has the elements of the input, each as a length.
pub fn keeps_each(node: &NodeProto) -> bool {
    match node.op() {
        // Smaller types don't hold every length.
        "Cast" => {
            let holds = [DataType::Int32, DataType::Int64, DataType::Float, DataType::Double];
            holds.iter().any(|&elem| node.int("to") == Some(elem as i64))
        }
        "Max" | "Min" => node.input.windows(2).all(|pair| pair[0] == pair[1]),
        // Sorts negate lengths, and negate them back.
        op => matches!(op, "Flatten" | "Identity" | "Neg" | "Reshape" | "Squeeze" | "Unsqueeze"),
    }
}

/// Whether a node limits lengths to the number of steps, which no length is above.
pub fn limits_to_steps(node: &NodeProto, analysis: &Analysis, content: &Content) -> bool {
    let is_of_requests = |name: &&String| content.get(*name).is_some_and(|inputs| !inputs.is_empty());
    node.op() == "Min" && node.input.iter().filter(|name| !is_of_requests(name)).all(|name| analysis.is_length(name))
}

/// Refuses other readers of lengths of rows than layers: they would get the lengths of a request, and not those of the whole
/// input. `cut` is the graph with states, in which the sorts of rows are gone.
pub fn check_readers(
    graph: &GraphProto,
    cut: &GraphProto,
    analysis: &Analysis,
    content: &Content,
) -> Result<(), Refusal> {
    let layers = graph.node.iter().filter(|node| runs_over_steps(node, analysis));
    let mut lengths: HashSet<String> =
        layers.filter_map(|node| of_requests(node, content)).flat_map(|lens| &content[lens]).cloned().collect();
    let original = producers(graph);
    let is_new = |node: &NodeProto| !node.named_outputs().any(|name| original.contains_key(name));
    for node in cut.node.iter().filter(|node| !is_new(node) && !node.reads_size()) {
        let passes_on = limits_to_steps(node, analysis, content) || passes_lengths_on(node);
        // The second input of others is a shape, or axes.
        let takes_all = matches!(node.op(), "Max" | "Min");
        let takes = |name: &str| {
            if node.is_recurrent() {
                node.input_at(4) == Some(name)
            } else {
                passes_on && (takes_all || node.input_at(0) == Some(name))
            }
        };
        let inputs = inputs_of(node);
        if !node.is_recurrent() && inputs.iter().any(|name| takes(name) && lengths.contains(name)) {
            lengths.extend(node.named_outputs().map(str::to_owned));
        }
        let others = inputs.iter().filter(|name| !takes(name));
        if let Some(name) = others.into_iter().find(|name| lengths.contains(*name)) {
            let why = format!(
                "reads lengths of rows (sequence_lens) from '{name}', and gets those of a request in place of those of the \
                 whole input"
            );
            let help = "only layers can take lengths of rows: export the model without this node, or without lengths";
            return Err(refuse(node, why, help));
        }
    }
    Ok(())
}

/// Whether the rows of a recurrent node are those of the requests, and not the steps.
fn runs_over_steps(node: &NodeProto, analysis: &Analysis) -> bool {
    let place = node.input_at(0).and_then(|x| analysis.found.places.get(x));
    matches!(place, Some(Place::At(layout)) if layout.axis == 0)
}

/// The tensor that lengths come from. Exporters cast them, and sort them together with the rows.
fn source<'a>(graph: &'a GraphProto, producers: &HashMap<&str, usize>, lens: &'a str) -> &'a str {
    let before = |name: &&'a str| {
        let node = &graph.node[*producers.get(name)?];
        let passes_on = keeps_each(node) || node.op() == "TopK";
        node.input_at(0).filter(|_| passes_on && node.output_at(0) == Some(name))
    };
    std::iter::successors(Some(lens), before).take(graph.node.len()).last().unwrap_or(lens)
}
