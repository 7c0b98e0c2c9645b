//! What a graph does with the rows of its batch: runs along them as if they were steps, combines them with another
//! dimension, or keeps them apart.

use std::collections::HashMap;

use bytes::Bytes;

use crate::analysis::{InputAxis, attempt};
use crate::convert::{Prepared, prepared};
use crate::graph::{producers, prune, required_inputs};
use crate::infer::{Shapes, Tensor};
use crate::onnx::schema::{GraphProto, NodeProto};
use crate::onnx::{Dim, opset};
use crate::time::{Cut, Place, Refusal};

/// Rows and other open dimensions: two lengths with many divisors, neither a multiple of the other.
pub const ROWS: i64 = 120;
const OTHER: i64 = 48;

/// The axis of an output that is the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct OutputAxis {
    pub output: String,
    pub axis: usize,
}

/// What a graph says of the rows of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsInGraph {
    /// Each row is computed from that row alone.
    Apart,
    /// This node always combines rows, such as a softmax over the batch.
    Mixed(String),
    /// This node isn't known to keep rows apart.
    Unproven(String),
}

/// The first node that passes a state from one row of a batch to the next, such as an LSTM that gets the batch where it
/// takes the steps. `rows` are the axes of the inputs that have the batch. Nodes behind one that the converter refuses
/// aren't looked at. `None`, too, if the converter can't read the model.
pub fn passes_on_rows(bytes: Bytes, rows: &[InputAxis]) -> Option<String> {
    let Prepared { model, graph, .. } = prepared(bytes).ok()?;
    let (analysis, _) = attempt(&graph, opset(&model), rows.to_vec(), &[]);
    let found = analysis.found;
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
    // What doesn't fit in both has another reason, such as two lengths that must be equal.
    let alike = shapes(&graph, opset(&model), rows, OTHER);
    let differs = |(output, _): &&(String, String)| alike.conflicts.iter().all(|(other, _)| other != output);
    let conflict = apart.conflicts.iter().find(differs).map(|(output, _)| output.as_str());
    let has_other = |of: &&OutputAxis| apart.dims(&of.output).and_then(|dims| dims.get(of.axis)) == Some(&OTHER);
    let made = || outputs.iter().find(has_other).map(|of| of.output.as_str());
    let name = conflict.or_else(made)?;
    producers(&graph).get(name).map(|&index| described(&graph.node[index]))
}

/// Whether each row of a batch is computed from that row alone; if not, the first node in the way. `rows` and `outputs` are
/// the axes that have the batch. Nodes that no tensor of `fetched` needs aren't looked at. An operator that isn't known is
/// in the way, too.
pub fn rows_stay_apart(bytes: Bytes, rows: &[InputAxis], outputs: &[OutputAxis], fetched: &[&str]) -> RowsInGraph {
    let Ok(Prepared { model, mut graph, .. }) = prepared(bytes) else {
        return RowsInGraph::Unproven("the graph can't be read".to_owned());
    };
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

/// The shapes where the batch has this length, and each other open dimension another.
pub fn shapes(graph: &GraphProto, opset: i64, rows: &[InputAxis], batch: i64) -> Shapes {
    let inputs = required_inputs(graph).filter_map(|input| {
        let length = |(axis, dim): (usize, &Dim)| match dim {
            Dim::Known(length) => *length,
            _ if rows.iter().any(|of| of.input == input.name() && of.axis == axis) => batch,
            _ => OTHER,
        };
        let dims = input.dims()?.iter().enumerate().map(length).collect();
        Some((input.name().to_owned(), Tensor::shaped(input.elem(), dims)))
    });
    Shapes::infer(graph, opset, inputs.collect::<HashMap<_, _>>(), None)
}

fn described(node: &NodeProto) -> String {
    format!("{} '{}'", node.operator(), node.label())
}
