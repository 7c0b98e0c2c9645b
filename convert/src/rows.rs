//! Whether a model runs along its batch as if that were the steps.

use bytes::Bytes;

use crate::analysis::{InputAxis, attempt};
use crate::convert::{Prepared, prepared};
use crate::graph::is_recurrent;
use crate::onnx::opset;
use crate::time::Cut;

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
    let layers = found.recurrences.iter().copied().filter(|&index| is_recurrent(graph.node[index].op()));
    let first = cuts.chain(layers).filter(|&index| index <= stopped_at).min()?;
    let node = &graph.node[first];
    Some(format!("{} '{}'", node.operator(), node.label()))
}
