//! Whether a model runs along the rows of its batch as if they were steps.

use bytes::Bytes;

use crate::analysis::{InputAxis, attempt};
use crate::onnx::{self, opset};
use crate::time::Cut;

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
    // What is found behind that node rests on a guess.
    let passes_on = analysis.found.cuts.iter().map(Cut::node).chain(analysis.found.recurrences);
    let first = passes_on.filter(|&index| index <= stop).min()?;
    let node = &graph.node[first];
    Some(format!("{} '{}'", node.operator(), node.label()))
}
