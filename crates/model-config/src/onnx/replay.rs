//! Whether a CUDA graph can stand for a model's runs. A replay repeats the kernels and copies that a run enqueued, and
//! nothing that ONNX Runtime did on the host meanwhile. So no node may read on the host what differs from run to run, nor
//! copy from memory of the host that is gone when its run is over.
//!
//! ONNX Runtime refuses subgraphs and copies between its providers, and it tells which inputs it reads on the host (a Slice
//! kept the bounds of its first run, with 1.31.1 on an H200). What is left is what CUDA kernels do of themselves: the replay
//! of a NonZero copied the count to where the stack had been, and wrote to an illegal address.

use stateful_convert::onnx::schema::{ModelProto, NodeProto};

use super::nodes::{RANDOM, model_of};
use super::source::ModelSource;

/// Operators whose CUDA kernel copies to the host how long their output is.
const COUNTS_ON_HOST: [&str; 3] = ["Compress", "NonMaxSuppression", "NonZero"];

/// Operators whose CUDA kernel copies to the device from memory that it frees.
const COPIES_FROM_FREED: [&str; 1] = ["GatherND"];

/// Why a graph can't stand for the runs of a model, in words: its first such node.
pub fn unrepeatable(source: &ModelSource) -> Option<String> {
    match model_of(source) {
        Ok(model) => first(&model),
        Err(error) => Some(format!("the nodes of {} cannot be read: {error}", source.file().display())),
    }
}

fn first(model: &ModelProto) -> Option<String> {
    let nodes = model.graph.iter().flat_map(|graph| &graph.node);
    nodes.chain(model.functions.iter().flat_map(|function| &function.node)).find_map(what_is_lost)
}

fn what_is_lost(node: &NodeProto) -> Option<String> {
    let operator = node.op_type();
    let what = if COUNTS_ON_HOST.contains(&operator) {
        "counts on the host what it finds"
    } else if COPIES_FROM_FREED.contains(&operator) {
        "copies from memory that ONNX Runtime frees after the first run"
    } else if RANDOM.contains(&operator) && operator != "Dropout" {
        "would draw the same numbers each time"
    } else {
        return None;
    };
    Some(format!("node '{}' ({operator}) {what}", node.label()))
}

#[cfg(test)]
mod tests {
    use stateful_convert::onnx::schema::{FunctionProto, GraphProto};

    use super::*;

    fn node(op_type: &str, input: &str, output: &str) -> NodeProto {
        let inputs: Vec<&str> = input.split_whitespace().collect();
        NodeProto::make(op_type, &format!("the {output}"), &inputs, &[output])
    }

    fn found(nodes: Vec<NodeProto>) -> Option<String> {
        first(&ModelProto { graph: Some(GraphProto { node: nodes, ..GraphProto::default() }), ..ModelProto::default() })
    }

    #[test]
    fn a_node_that_a_graph_would_not_repeat_is_named() {
        for (operator, what) in [
            ("NonZero", "counts on the host what it finds"),
            ("GatherND", "copies from memory that ONNX Runtime frees after the first run"),
            ("RandomNormalLike", "would draw the same numbers each time"),
        ] {
            let nodes = vec![node("Relu", "x", "a"), node(operator, "a", "y")];
            assert_eq!(found(nodes), Some(format!("node 'the y' ({operator}) {what}")));
        }
        assert_eq!(found(vec![node("Dropout", "x", "y"), node("ScatterND", "x n w", "z")]), None);
        let function = FunctionProto { node: vec![node("NonZero", "a", "b")], ..FunctionProto::default() };
        assert!(first(&ModelProto { functions: vec![function], ..ModelProto::default() }).is_some());
    }
}
