//! Whether a CUDA graph can stand for a model's runs. A replay repeats the kernels and copies that a run enqueued, and
//! nothing that ONNX Runtime did on the host meanwhile. So no node may read on the host what differs from run to run, nor
//! copy from memory of the host that is gone when its run is over.
//!
//! ONNX Runtime refuses subgraphs and copies between its providers, but not what a CUDA kernel does of itself. With 1.31.1
//! on an H200, a Slice kept the bounds of its first run, and the replay of a NonZero, which copies the count to where the
//! stack was, wrote to an illegal address.

#![forbid(unsafe_code)]

use std::collections::HashSet;

use stateful_convert::onnx::schema::{ModelProto, NodeProto};

use super::nodes::{RANDOM, model_of};
use super::source::ModelSource;

/// The inputs that an operator's CUDA kernel reads on the host, in ONNX Runtime's kernel definitions
/// (`InputMemoryType(OrtMemTypeCPUInput, …)`) or by a copy of its own (the operators whose output is as long as what they
/// find).
const READ_ON_HOST: [(&str, &[usize]); 30] = [
    ("Compress", &[1]),
    ("ConstantOfShape", &[0]),
    ("CumSum", &[1]),
    ("Expand", &[1]),
    ("GRU", &[4]),
    ("GroupQueryAttention", &[6]),
    ("LSTM", &[4]),
    ("NonMaxSuppression", &[0, 1, 2, 3, 4]),
    ("NonZero", &[0]),
    ("OneHot", &[1, 2]),
    ("Pad", &[1, 2, 3]),
    ("RNN", &[4]),
    ("Range", &[0, 1, 2]),
    ("ReduceL1", &[1]),
    ("ReduceL2", &[1]),
    ("ReduceLogSum", &[1]),
    ("ReduceLogSumExp", &[1]),
    ("ReduceMax", &[1]),
    ("ReduceMean", &[1]),
    ("ReduceMin", &[1]),
    ("ReduceProd", &[1]),
    ("ReduceSum", &[1]),
    ("ReduceSumSquare", &[1]),
    ("Reshape", &[1]),
    ("Resize", &[1, 2, 3]),
    ("Slice", &[1, 2, 3, 4]),
    ("Split", &[1]),
    ("Tile", &[1]),
    ("TopK", &[1]),
    ("Trilu", &[1]),
];

/// Operators whose CUDA kernel copies to the device from memory that it frees.
const COPIES_FROM_FREED: [&str; 1] = ["GatherND"];

/// Operators whose output depends on the shape of their input alone.
const READS_SHAPE: [&str; 2] = ["Shape", "Size"];

/// Why a graph can't stand for the runs of a model, in words: its first such node.
pub fn unrepeatable(source: &ModelSource) -> Option<String> {
    match model_of(source) {
        Ok(model) => first(&model),
        Err(error) => Some(format!("the nodes of {} cannot be read: {error}", source.file().display())),
    }
}

fn first(model: &ModelProto) -> Option<String> {
    let of_graph = model.graph.iter().find_map(|graph| {
        let weights: HashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
        let inputs = graph.input.iter().map(|input| input.name());
        first_of(&graph.node, inputs.filter(|name| !weights.contains(name)).collect())
    });
    let of_function = || {
        model.functions.iter().find_map(|function| {
            let inputs = function.input.iter().map(String::as_str);
            first_of(&function.node, inputs.collect())
        })
    };
    of_graph.or_else(of_function)
}

/// Nodes stand behind those they read from. `varying`: the tensors that differ from run to run, at first the inputs.
fn first_of<'a>(nodes: &'a [NodeProto], mut varying: HashSet<&'a str>) -> Option<String> {
    for node in nodes {
        let label = || format!("node '{}' ({})", node.label(), node.op_type());
        if RANDOM.contains(&node.op_type()) && node.op_type() != "Dropout" {
            return Some(format!("{} would draw the same numbers each time", label()));
        }
        if COPIES_FROM_FREED.contains(&node.op_type()) {
            return Some(format!("{} copies from memory that ONNX Runtime frees after the first run", label()));
        }
        if read_on_host(node).any(|name| varying.contains(name)) {
            return Some(format!("{} reads on the host what differs from run to run", label()));
        }
        let depends = node.input.iter().any(|name| varying.contains(name.as_str()));
        if depends && !READS_SHAPE.contains(&node.op_type()) {
            varying.extend(node.output.iter().map(String::as_str).filter(|name| !name.is_empty()));
        }
    }
    None
}

fn read_on_host(node: &NodeProto) -> impl Iterator<Item = &str> {
    let found = READ_ON_HOST.iter().find(|(operator, _)| *operator == node.op_type());
    let indices = found.map_or(&[][..], |(_, indices)| indices);
    indices.iter().filter_map(|&index| node.input.get(index)).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use stateful_convert::onnx::Dim;
    use stateful_convert::onnx::schema::{FunctionProto, GraphProto, TensorProto, ValueInfoProto};

    use super::*;

    fn node(op_type: &str, input: &str, output: &str) -> NodeProto {
        let inputs: Vec<&str> = input.split_whitespace().map(|name| if name == "-" { "" } else { name }).collect();
        NodeProto::make(op_type, &format!("the {output}"), &inputs, &[output])
    }

    /// With the inputs x and n, and the weight w.
    fn found(nodes: Vec<NodeProto>) -> Option<String> {
        let weight = TensorProto { name: Some("w".to_owned()), ..TensorProto::default() };
        let inputs = ["x", "n", "w"].map(|name| ValueInfoProto::tensor(name, 1, &[Dim::Open]));
        let graph =
            GraphProto { node: nodes, initializer: vec![weight], input: inputs.to_vec(), ..GraphProto::default() };
        first(&ModelProto { graph: Some(graph), ..ModelProto::default() })
    }

    #[test]
    fn a_node_that_reads_a_run_s_values_on_the_host_is_named() {
        let refused = [
            node("NonZero", "x", "y"),
            node("Slice", "x w n", "y"),
            node("LSTM", "x w w - n", "y"),
            node("Range", "w n w", "y"),
            node("Trilu", "x n", "y"),
        ];
        for node in refused {
            let operator = node.op_type().to_owned();
            let said = format!("node 'the y' ({operator}) reads on the host what differs from run to run");
            assert_eq!(found(vec![node]), Some(said));
        }
        let behind = vec![node("Add", "x w", "sum"), node("Cast", "sum", "count"), node("Reshape", "w count", "y")];
        assert!(found(behind).unwrap().starts_with("node 'the y' (Reshape)"));
    }

    #[test]
    fn shapes_and_weights_are_the_same_in_each_run() {
        let shape = vec![node("Shape", "x", "shape"), node("Gather", "shape w", "length")];
        let kept = [node("Reshape", "x length", "y"), node("Slice", "x w w", "z"), node("LSTM", "x w w", "h")];
        assert_eq!(found([shape, kept.to_vec()].concat()), None);
        assert_eq!(found(vec![node("NonZero", "w", "y")]), None);
    }

    #[test]
    fn random_numbers_freed_memory_and_functions_are_seen() {
        let noise = found(vec![node("RandomNormalLike", "x", "noise")]);
        assert_eq!(noise.unwrap(), "node 'the noise' (RandomNormalLike) would draw the same numbers each time");
        assert_eq!(found(vec![node("Dropout", "x", "y")]), None);
        let copies = found(vec![node("GatherND", "w w", "y")]).unwrap();
        assert_eq!(copies, "node 'the y' (GatherND) copies from memory that ONNX Runtime frees after the first run");
        let function = FunctionProto {
            input: vec!["a".to_owned()],
            node: vec![node("NonZero", "a", "b")],
            ..FunctionProto::default()
        };
        let model = ModelProto { functions: vec![function], ..ModelProto::default() };
        assert!(first(&model).is_some());
    }

    #[test]
    fn each_operator_is_listed_once_and_in_order() {
        assert!(READ_ON_HOST.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
