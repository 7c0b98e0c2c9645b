//! What the backend asks of a graph that it serves: whether it runs along the rows of its batch as if they were steps,
//! combines them with another dimension, or keeps them apart; and whether pairs cross the states of a layer.

use bytes::Bytes;

use crate::analysis::attempt;
use crate::batch::naming::{OTHER, ROWS, shapes};
use crate::graph::{InputAxis, OutputAxis, producers, prune};
use crate::onnx::opset;
use crate::onnx::schema::NodeProto;
use crate::pairs::{StatePair, crossed_ends};
use crate::prepared::{Prepared, prepared};
use crate::time::{Cut, Place, Refusal};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsInGraph {
    Apart,
    /// This node always combines rows, such as a softmax over the batch.
    Mixed(String),
    Unproven(String),
}

/// The first node that passes a state from one row of a batch to the next, such as an LSTM that gets the batch where it
/// takes the steps. `rows` are the axes of the inputs that have the batch. Nodes after a refused one aren't checked. Also
/// `None` if the converter can't read the model.
pub fn passes_on_rows(bytes: Bytes, rows: &[InputAxis]) -> Option<String> {
    let Prepared { model, graph, .. } = prepared(bytes).ok()?;
    let (analysis, _) = attempt(&graph, opset(&model), rows.to_vec(), &[]);
    let found = analysis.found;
    // What was found after a refused node rests on a guess of where the rows are.
    let stopped_at = found.stopped_at.unwrap_or(graph.node.len());
    let cuts = found.cuts.iter().filter(|cut| cut.makes_state(&graph)).map(Cut::node);
    // A refused loop may run over something else.
    let layers = found.recurrences.iter().copied().filter(|&index| graph.node[index].is_recurrent());
    let first = cuts.chain(layers).filter(|&index| index <= stopped_at).min()?;
    Some(described(&graph.node[first]))
}

/// The first node that brings the batch of the inputs together with another open dimension, such as an addition of a
/// state to the sums over what is taken for the steps; or the node of an output whose batch is another dimension. `None`,
/// too, if the shapes of the graph can't be inferred that far.
pub fn rows_meet_others(bytes: Bytes, rows: &[InputAxis], outputs: &[OutputAxis]) -> Option<String> {
    let Prepared { model, graph, .. } = prepared(bytes).ok()?;
    let apart = shapes(&graph, opset(&model), rows, ROWS);
    // A conflict in both has another reason, such as two lengths that must be equal.
    let alike = shapes(&graph, opset(&model), rows, OTHER);
    let differs = |(output, _): &&(String, String)| alike.conflicts.iter().all(|(other, _)| other != output);
    let conflict = apart.conflicts.iter().find(differs).map(|(output, _)| output.as_str());
    let has_other = |of: &&OutputAxis| apart.dims(&of.output).and_then(|dims| dims.get(of.axis)) == Some(&OTHER);
    let made = || outputs.iter().find(has_other).map(|of| of.output.as_str());
    let name = conflict.or_else(made)?;
    producers(&graph).get(name).map(|&index| described(&graph.node[index]))
}

/// Whether each row of a batch is computed from that row alone; if not, the first node in the way. `rows` and `outputs` are
/// the axes that have the batch. Nodes that no tensor of `fetched` needs aren't checked. An unknown operator is in the way as
/// well.
pub fn rows_stay_apart(bytes: Bytes, rows: &[InputAxis], outputs: &[OutputAxis], fetched: &[&str]) -> RowsInGraph {
    let Ok(Prepared { model, mut graph, .. }) = prepared(bytes) else {
        return RowsInGraph::Unproven("the graph can't be read".to_owned());
    };
    // Mixed rows in an output that isn't served harm nobody.
    graph.output.retain(|output| fetched.contains(&output.name()));
    prune(&mut graph);
    let followed = crate::batch::rows(&graph, opset(&model), rows);
    // With a length that the window of a node divides, each window lies in one row; with another length it may not.
    let places = match followed.and_then(|_| crate::batch::rows_of_odd_lengths(&graph, opset(&model), rows)) {
        Ok(places) => places,
        Err(Refusal { node, operator, why, mixes, .. }) => {
            let why = format!("{operator} '{node}' {why}");
            return if mixes { RowsInGraph::Mixed(why) } else { RowsInGraph::Unproven(why) };
        }
    };
    let is_elsewhere = |of: &&OutputAxis| match places.get(&of.output) {
        Some(Place::At(layout)) => layout.axis != of.axis || !layout.is_clean(),
        _ => true,
    };
    outputs.iter().find(is_elsewhere).map_or(RowsInGraph::Apart, |of| {
        RowsInGraph::Unproven(format!("output '{}' doesn't have the rows on axis {}", of.output, of.axis))
    })
}

/// Why a pair can't be a state: it joins the hidden state and the cell state of one layer. `None`, too, if the converter
/// can't read the model.
pub fn crossed_states(model: Bytes, pairs: &[StatePair]) -> Option<String> {
    crossed_ends(&prepared(model).ok()?.graph, pairs)
}

fn described(node: &NodeProto) -> String {
    format!("{} '{}'", node.operator(), node.label())
}
