//! Packs the tokens of each row to the left.
//!
//! Rule: how wide the outputs are depends on the number of frames only. Else the width of a row's answer would tell how many
//! tokens its neighbours have.

use super::nodes::Nodes;
use super::options::{FRAMES, LENGTHS, TOKENS};
use crate::onnx::DataType;

/// Adds the outputs of a search: of `tokens` and `frames` `[rows, turns]`, those that `found` marks; and what fills rows up to
/// `width`.
pub fn add(nodes: &mut Nodes, [tokens, frames]: [&str; 2], found: &str, width: &str) {
    let number = DataType::Int64.into();
    let ones = nodes.cast("found_ones", found, number);
    nodes.push("ReduceSum", LENGTHS, &[&ones, "search.1"], |node| node.with_int("keepdims", 0));
    let most = nodes.with("ReduceMax", "most_tokens", &[LENGTHS], |node| node.with_int("keepdims", 0));
    let most = nodes.add("Reshape", "most", &[&most, "search.1"]);
    let filling = nodes.add("Sub", "filling", &[width, &most]);
    let filling = nodes.with("Concat", "filling_of_rows", &["search.0", "search.0", "search.0", &filling], |node| {
        node.with_int("axis", 0)
    });
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
        let packed = nodes.with("GatherElements", &format!("packed_{name}"), &[values, "search.sorted_at"], |node| {
            node.with_int("axis", 1)
        });
        let packed = nodes.add("Where", &format!("own_{name}"), &[&is_token, &packed, "search.-1"]);
        nodes.push("Pad", name, &[&packed, &filling, &no_token], |node| node);
    }
}
