//! Whether a model runs along the rows of its batch as if they were steps.

use bytes::Bytes;

use crate::analysis::{InputAxis, attempt};
use crate::graph::is_recurrent;
use crate::onnx::schema::NodeProto;
use crate::onnx::{self, opset};
use crate::time::Place;

/// The first node that passes something from one row of a batch to the next, such as an LSTM that gets the batch where
/// it takes the steps. `rows` are the axes of the inputs that have the batch. Nodes behind one that the converter doesn't
/// know, or that mixes the rows in another way, aren't looked at. `None` if the model can't be read, too.
pub fn passes_on_rows(bytes: Bytes, rows: &[InputAxis]) -> Option<String> {
    let model = onnx::read(bytes).ok()?;
    let opset = opset(&model);
    let graph = model.graph?;
    let (analysis, followed) = attempt(&graph, opset, rows.to_vec(), &[]);
    let stop = match &followed {
        Ok(()) => graph.node.len(),
        Err(refusals) => graph.node.iter().position(|node| node.label() == refusals.first.node)?,
    };
    let runs_along_rows = |node: &NodeProto| {
        let steps = usize::from(node.int("layout") == Some(1));
        let x = node.input.first().and_then(|name| analysis.found.places.get(name));
        is_recurrent(node.op()) && matches!(x, Some(Place::At(layout)) if layout.axis == steps)
    };
    let is_cut = |index: usize| analysis.found.cuts.iter().any(|cut| cut.node() == index);
    let reached = graph.node.iter().enumerate().take(stop + 1);
    let mut found = reached.filter(|&(index, node)| is_cut(index) || runs_along_rows(node));
    found.next().map(|(_, node)| format!("{} '{}'", node.operator(), node.label()))
}
