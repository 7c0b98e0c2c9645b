//! Nodes of a search in the making. Each is named after its output.

use super::options::SEARCH;
use crate::onnx::schema::NodeProto;

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

    pub fn push(&mut self, op: &str, output: &str, inputs: &[&str], edit: impl FnOnce(NodeProto) -> NodeProto) {
        self.0.push(edit(NodeProto::make(op, &format!("{output}/{op}"), inputs, &[output])));
    }

    pub fn cast(&mut self, own: &str, input: &str, elem: i32) -> String {
        self.with("Cast", own, &[input], |node| node.with_int("to", elem.into()))
    }
}
