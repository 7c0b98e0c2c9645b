//! The greedy search of CTC: the best token of each frame, without blanks and without repeats. The last frame's token is a
//! state, so that a repeat across chunks counts once.

use super::nodes::Nodes;
use super::options::{LAST, LAST_NEXT, Search};
use super::pack;
use super::plan::logits;
use crate::join::error::JoinError;
use crate::join::part::Read;
use crate::onnx::schema::GraphProto;
use crate::onnx::{bracketed, int64s};

#[derive(Clone, Debug)]
pub struct CtcPlan {
    /// The output with the logits of all frames, `[rows, frames, tokens]`.
    pub logits: String,
    pub blank: i64,
}

pub fn plan(parts: &[Read], search: &Search) -> Result<CtcPlan, JoinError> {
    let Some(part) = parts.last() else { return Err(JoinError::NoOutputs(Vec::new())) };
    let output = logits(part, parts, search)?;
    if let Some(dims) = output.dims().filter(|dims| dims.len() != 3) {
        return Err(JoinError::Search(format!(
            "the logits '{}' are {}, and [rows, frames, tokens] is expected: export the graph with an axis of frames",
            part.full(output.name()),
            bracketed(&dims)
        )));
    }
    Ok(CtcPlan { logits: part.full(output.name()), blank: search.blank })
}

pub fn add(graph: &mut GraphProto, plan: &CtcPlan) {
    let mut nodes = Nodes::default();
    graph.initializer.push(int64s("search.blank", &[1], &[plan.blank]));
    let best = nodes.with("ArgMax", "best", &[&plan.logits], |node| node.with_int("axis", 2).with_int("keepdims", 0));
    let all = nodes.with("Concat", "with_last", &[LAST, &best], |node| node.with_int("axis", 1));
    let before = nodes.add("Slice", "before", &[&all, "search.0", "search.-1", "search.1"]);
    nodes.push("Slice", LAST_NEXT, &[&all, "search.-1", "search.end", "search.1"], |node| node);
    let is_blank = nodes.add("Equal", "is_blank", &[&best, "search.blank"]);
    let repeats = nodes.add("Equal", "repeats", &[&best, &before]);
    let is_none = nodes.add("Or", "is_none", &[&is_blank, &repeats]);
    let found = nodes.add("Not", "found", &[&is_none]);
    let shape = nodes.add("Shape", "best_shape", &[&best]);
    let count = nodes.add("Gather", "frame_count", &[&shape, "search.1"]);
    let [count, zero, one] = [("frame_end", count.as_str()), ("frame_start", "search.0"), ("frame_step", "search.1")]
        .map(|(own, value)| nodes.add("Reshape", own, &[value, "search.scalar"]));
    let frame = nodes.add("Range", "frame", &[&zero, &count, &one]);
    let frames = nodes.add("Expand", "frames", &[&frame, &shape]);
    pack::add(&mut nodes, [&best, &frames], &found, "search.frame_count");
    graph.node.append(&mut nodes.0);
}
