//! Builds the nodes of a search: the nodes of CTC, and the nodes that pack the tokens of each row to the left. Each node is
//! named after its output.
//!
//! Rule: the width of the outputs depends on the number of frames only. Otherwise the width of a row's answer would tell how
//! many tokens its neighbours have.

use super::options::{FRAMES, LAST, LAST_NEXT, LENGTHS, SEARCH, TOKENS};
use super::plan::CtcPlan;
use crate::onnx::schema::{GraphProto, NodeProto};
use crate::onnx::{DataType, int64s};

/// Constants of every search: axes, a shape without dimensions, and numbers.
pub const CONSTANTS: [(&str, &[i64], &[i64]); 6] = [
    ("search.0", &[1], &[0]),
    ("search.1", &[1], &[1]),
    ("search.2", &[1], &[2]),
    ("search.-1", &[1], &[-1]),
    ("search.end", &[1], &[i64::MAX]),
    ("search.scalar", &[0], &[]),
];

#[derive(Default)]
pub struct Nodes(pub Vec<NodeProto>);

impl Nodes {
    /// Adds a node, and answers with the name of its output. `own` is that name without the search's.
    pub fn add(&mut self, op: &str, own: &str, inputs: &[&str]) -> String {
        self.with(op, own, inputs, |node| node)
    }

    pub fn with(&mut self, op: &str, own: &str, inputs: &[&str], edit: impl FnOnce(NodeProto) -> NodeProto) -> String {
        let output = format!("{SEARCH}.{own}");
        self.push(op, &output, inputs, edit);
        output
    }

    pub fn along(&mut self, op: &str, axis: i64, own: &str, inputs: &[&str]) -> String {
        self.with(op, own, inputs, |node| node.with_int("axis", axis))
    }

    pub fn push(&mut self, op: &str, output: &str, inputs: &[&str], edit: impl FnOnce(NodeProto) -> NodeProto) {
        self.0.push(edit(NodeProto::make(op, &format!("{output}/{op}"), inputs, &[output])));
    }

    pub fn cast(&mut self, own: &str, input: &str, elem: i32) -> String {
        self.with("Cast", own, &[input], |node| node.with_int("to", elem.into()))
    }
}

/// The greedy search of CTC: the best token of each frame, without blanks and repeats. The last frame's token is a state, so
/// that a repeat across chunks counts once.
pub fn add_ctc(graph: &mut GraphProto, plan: &CtcPlan) {
    let mut nodes = Nodes::default();
    graph.initializer.push(int64s("search.blank", &[1], &[plan.blank]));
    let best = nodes.with("ArgMax", "best", &[&plan.logits], |node| node.with_int("axis", 2).with_int("keepdims", 0));
    let all = nodes.along("Concat", 1, "with_last", &[LAST, &best]);
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
    pack(&mut nodes, [&best, &frames], &found, "search.frame_count");
    graph.node.append(&mut nodes.0);
}

/// Adds the outputs of a search: the entries of `tokens` and `frames` (both `[rows, turns]`) that `found` marks, with rows
/// filled up to `width`.
pub fn pack(nodes: &mut Nodes, [tokens, frames]: [&str; 2], found: &str, width: &str) {
    let number = DataType::Int64.into();
    let ones = nodes.cast("found_ones", found, number);
    nodes.push("ReduceSum", LENGTHS, &[&ones, "search.1"], |node| node.with_int("keepdims", 0));
    // TopK gives no more entries than there are turns, so `Pad` fills the rest of the width.
    let most = nodes.with("ReduceMax", "most_tokens", &[LENGTHS], |node| node.with_int("keepdims", 0));
    let most = nodes.add("Reshape", "most", &[&most, "search.1"]);
    let filling = nodes.add("Sub", "filling", &[width, &most]);
    let filling = nodes.along("Concat", 0, "filling_of_rows", &["search.0", "search.0", "search.0", &filling]);
    let no_token = nodes.add("Reshape", "no_token", &["search.-1", "search.scalar"]);
    // The largest keys are those of the first tokens, and their order is that of the tokens.
    let shape = nodes.add("Shape", "found_shape", &[found]);
    let turns = nodes.add("Gather", "turns", &[&shape, "search.1"]);
    let last = nodes.add("Reshape", "turns_scalar", &[&turns, "search.scalar"]);
    let zero = nodes.add("Reshape", "zero", &["search.0", "search.scalar"]);
    let one = nodes.add("Reshape", "one", &["search.1", "search.scalar"]);
    let turn = nodes.add("Range", "turn", &[&zero, &last, &one]);
    let before = nodes.add("Sub", "turns_left", &[&turns, &turn]);
    let key = nodes.add("Mul", "key", &[&ones, &before]);
    let sorted = nodes.with("TopK", "sorted_keys", &[&key, &most], |mut node| {
        node.output.push("search.sorted_at".to_owned());
        node.with_int("axis", 1)
    });
    let is_token = nodes.add("Greater", "is_token", &[&sorted, "search.0"]);
    for (name, values) in [(TOKENS, tokens), (FRAMES, frames)] {
        let packed = nodes.along("GatherElements", 1, &format!("packed_{name}"), &[values, "search.sorted_at"]);
        let packed = nodes.add("Where", &format!("own_{name}"), &[&is_token, &packed, "search.-1"]);
        nodes.push("Pad", name, &[&packed, &filling, &no_token], |node| node);
    }
}
