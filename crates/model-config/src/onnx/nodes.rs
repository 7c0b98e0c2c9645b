//! What a model's nodes say of its runs: whether some quantize with one scale for the whole batch, so that one row's
//! result depends on the others; whether one has a recurrence inside; which outputs are the same in every run; and whether a
//! CUDA graph can stand for the runs.
//!
//! The nodes are read from the model's file, because ONNX Runtime does not list a model's nodes. Large weights are skipped.
//!
//! A replay of a CUDA graph repeats the kernels and copies that a run enqueued, and nothing that ONNX Runtime did on the
//! host meanwhile. So no node may read on the host what differs from run to run, nor copy from memory of the host that is
//! gone when its run is over. ONNX Runtime refuses subgraphs and copies between its providers, and it tells which inputs it
//! reads on the host (a Slice kept the bounds of its first run, with 1.31.1 on an H200). What is left is what CUDA kernels
//! do of themselves: the replay of a NonZero copied the count to where the stack had been, and wrote to an illegal address.

use std::collections::HashSet;
use std::{fmt, io};

use prost::Message;
use stateful_convert::SCALES_AT_RUN_TIME;
use stateful_convert::onnx::schema::{GraphProto, ModelProto, NodeProto, ValueInfoProto, type_proto};

use super::source::{ModelSource, without_weights};

/// Operators that pass a state from element to element of their input.
const RECURRENT: [&str; 6] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "Loop", "RNN", "Scan"];

/// Operators that must not run over no steps: ONNX Runtime gives back states of zeros, or ends the process (GRU, 1.31.1).
const NEED_STEPS: [&str; 4] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"];

/// Operators that give other values in each run. `Dropout` does so where it trains.
const RANDOM: [&str; 7] =
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

/// Operators whose CUDA kernel copies to the host how long their output is.
const COUNTS_ON_HOST: [&str; 3] = ["Compress", "NonMaxSuppression", "NonZero"];

/// Operators whose CUDA kernel copies to the device from memory that it frees.
const COPIES_FROM_FREED: [&str; 1] = ["GatherND"];

/// What the nodes of a model say of its runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// The nodes that quantize with one scale for the whole batch.
    pub batch_scale: Option<BatchScale>,
    /// The first node with a recurrence inside.
    pub recurrence: Option<Recurrence>,
    /// The first node that must not run over no steps, in words.
    pub needs_steps: Option<String>,
    /// The model's outputs that depend on none of its inputs.
    pub constant_outputs: Vec<String>,
    /// The model's outputs that are scalars. (ONNX Runtime shows one whose rank is not known in the same way.)
    pub scalar_outputs: Vec<String>,
}

/// A node with a recurrence inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recurrence {
    /// In words.
    pub node: String,
    /// The model's inputs from which it and other such nodes begin, with the outputs that have where they end.
    pub ends: Vec<(String, String)>,
}

/// The nodes of a model that quantize with one scale for the whole batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchScale {
    /// Name of the first of them; its output if it has none.
    pub node: String,
    /// Its operator.
    pub operator: String,
    /// How many such nodes there are.
    pub nodes: usize,
}

impl fmt::Display for BatchScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node '{}' ({})", self.node, self.operator)?;
        if self.nodes > 1 { write!(f, ", one of {} such nodes,", self.nodes) } else { Ok(()) }
    }
}

impl Nodes {
    /// Reads the nodes of a model.
    pub fn of(source: &ModelSource) -> io::Result<Self> {
        Ok(Self::new(&model_of(source)?))
    }

    fn new(model: &ModelProto) -> Self {
        Self {
            batch_scale: batch_scale(model),
            recurrence: first(model, &RECURRENT).map(|node| Recurrence { node, ends: recurrent_ends(model) }),
            needs_steps: first(model, &NEED_STEPS),
            constant_outputs: constant_outputs(model),
            scalar_outputs: scalar_outputs(model),
        }
    }
}

/// Why a graph can't stand for the runs of a model, in words: its first such node.
pub fn unrepeatable(source: &ModelSource) -> Option<String> {
    match model_of(source) {
        Ok(model) => first_lost(&model),
        Err(error) => Some(format!("the nodes of {} cannot be read: {error}", source.file().display())),
    }
}

/// A model, without the large weights of its file.
fn model_of(source: &ModelSource) -> io::Result<ModelProto> {
    if source.bytes().is_none() {
        return without_weights(source.file());
    }
    // Weights stay where they are: the decoder takes slices of these bytes.
    ModelProto::decode(source.read()?).map_err(io::Error::other)
}

fn batch_scale(model: &ModelProto) -> Option<BatchScale> {
    let mut found = Vec::new();
    if let Some(graph) = &model.graph {
        search_graph(graph, &HashSet::new(), &mut found);
    }
    for function in &model.functions {
        search(&function.node, HashSet::new(), &mut found);
    }
    let first = found.first()?;
    Some(BatchScale { node: first.label().to_owned(), operator: first.op_type().to_owned(), nodes: found.len() })
}

/// The nodes of a model's graph and of its functions, without those of graphs within them.
fn nodes(model: &ModelProto) -> impl Iterator<Item = &NodeProto> {
    let of_functions = model.functions.iter().flat_map(|function| &function.node);
    model.graph.iter().flat_map(|graph| &graph.node).chain(of_functions)
}

/// The first node with one of these operators, also in graphs within graphs and in functions.
fn first(model: &ModelProto, operators: &[&str]) -> Option<String> {
    let node = nodes(model).find_map(|node| first_in(node, operators))?;
    Some(format!("node '{}' ({})", node.label(), node.op_type()))
}

/// The node itself if it has one of these operators, or the first such node of its graphs.
fn first_in<'a>(node: &'a NodeProto, operators: &[&str]) -> Option<&'a NodeProto> {
    if operators.contains(&node.op_type()) {
        return Some(node);
    }
    node.graphs().flat_map(|graph| &graph.node).find_map(|node| first_in(node, operators))
}

/// The model's inputs that are initial states of layers, with the model's outputs that are their final ones.
fn recurrent_ends(model: &ModelProto) -> Vec<(String, String)> {
    let Some(graph) = &model.graph else { return Vec::new() };
    let is = |infos: &[ValueInfoProto], name: &str| infos.iter().any(|info| info.name() == name);
    let layers = graph.node.iter().filter(|node| ["GRU", "LSTM", "RNN"].contains(&node.op_type()));
    // initial_h and Y_h, initial_c and Y_c
    let ends = |node: &NodeProto, input: usize, output: usize| {
        let (input, output) = (node.input.get(input)?, node.output.get(output)?);
        (is(&graph.input, input) && is(&graph.output, output)).then(|| (input.clone(), output.clone()))
    };
    layers.flat_map(|node| [ends(node, 5, 1), ends(node, 6, 2)]).flatten().collect()
}

fn constant_outputs(model: &ModelProto) -> Vec<String> {
    let Some(graph) = &model.graph else { return Vec::new() };
    // A run may replace an initializer that is an input, too.
    let is_input = |name: &str| graph.input.iter().any(|input| input.name() == name);
    let initializers = graph.initializer.iter().map(|tensor| tensor.name());
    let mut constants: HashSet<&str> = initializers.filter(|name| !is_input(name)).collect();
    for node in graph.node.iter() {
        if always_gives_the_same(node, &constants) {
            constants.extend(node.output.iter().map(String::as_str));
        }
    }
    let outputs = graph.output.iter().map(ValueInfoProto::name);
    outputs.filter(|name| constants.contains(name)).map(str::to_owned).collect()
}

fn scalar_outputs(model: &ModelProto) -> Vec<String> {
    let outputs = model.graph.iter().flat_map(|graph| &graph.output);
    outputs.filter(|output| is_scalar(output)).map(|output| output.name().to_owned()).collect()
}

fn is_scalar(output: &ValueInfoProto) -> bool {
    let Some(type_proto::Value::TensorType(tensor)) = output.r#type.as_ref().and_then(|of| of.value.as_ref()) else {
        return false;
    };
    tensor.shape.as_ref().is_some_and(|shape| shape.dim.is_empty())
}

/// Whether a node gives the same in every run. A subgraph may take what is not listed among the node's inputs.
fn always_gives_the_same(node: &NodeProto, constants: &HashSet<&str>) -> bool {
    node.input.iter().all(|name| is_constant(name, constants))
        && node.graphs().next().is_none()
        && !RANDOM.contains(&node.op_type())
}

/// Whether an input of a node is the same in every run. One that is left out has no name.
fn is_constant(name: &str, constants: &HashSet<&str>) -> bool {
    name.is_empty() || constants.contains(name)
}

/// `outside`: constants of the graphs around this one, which its nodes may take.
fn search_graph<'a>(graph: &'a GraphProto, outside: &HashSet<&'a str>, found: &mut Vec<&'a NodeProto>) {
    let own = graph.initializer.iter().map(|tensor| tensor.name());
    search(&graph.node, outside.iter().copied().chain(own).collect(), found);
}

/// Adds the nodes whose input is not constant. A graph lists its nodes in the order in which they run.
fn search<'a>(nodes: &'a [NodeProto], mut constants: HashSet<&'a str>, found: &mut Vec<&'a NodeProto>) {
    for node in nodes {
        let quantizes_constant = node.input.first().is_some_and(|name| is_constant(name, &constants));
        if SCALES_AT_RUN_TIME.contains(&node.op_type()) && !quantizes_constant {
            found.push(node);
        }
        if always_gives_the_same(node, &constants) {
            constants.extend(node.output.iter().map(String::as_str));
        }
        node.graphs().for_each(|graph| search_graph(graph, &constants, found));
    }
}

/// The first node that a graph would not repeat.
fn first_lost(model: &ModelProto) -> Option<String> {
    nodes(model).find_map(what_is_lost)
}

fn what_is_lost(node: &NodeProto) -> Option<String> {
    let operator = node.op_type();
    let what = if COUNTS_ON_HOST.contains(&operator) {
        "counts on the host what it finds"
    } else if COPIES_FROM_FREED.contains(&operator) {
        "copies from memory that ONNX Runtime frees after the first run"
    } else if RANDOM.contains(&operator) && operator != "Dropout" {
        // Without training, Dropout draws nothing.
        "would draw the same numbers each time"
    } else {
        return None;
    };
    Some(format!("node '{}' ({operator}) {what}", node.label()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};

    use stateful_convert::onnx::Dim;
    use stateful_convert::onnx::schema::{AttributeProto, FunctionProto, TensorProto};

    use super::*;

    fn node(op_type: &str, input: &str, output: &str) -> NodeProto {
        let [input, names] = [input, output].map(|text| text.split_whitespace().collect::<Vec<_>>());
        NodeProto::make(op_type, &format!("{output} node"), &input, &names)
    }

    /// A node that runs a graph.
    fn around(op_type: &str, input: &str, output: &str, inner: GraphProto) -> NodeProto {
        let attribute = vec![AttributeProto { g: Some(inner), ..AttributeProto::default() }];
        NodeProto { attribute, ..node(op_type, input, output) }
    }

    fn graph(initializers: &str, node: Vec<NodeProto>) -> GraphProto {
        let tensor = |name: &str| TensorProto { name: Some(name.to_owned()), ..TensorProto::default() };
        let initializer = initializers.split_whitespace().map(tensor).collect();
        GraphProto { node, initializer, ..GraphProto::default() }
    }

    fn of(graph: GraphProto) -> ModelProto {
        ModelProto { graph: Some(graph), ..ModelProto::default() }
    }

    /// The outputs of the first node that is found, and how many there are.
    fn found(model: &ModelProto) -> Option<(String, usize)> {
        batch_scale(model).map(|scale| (scale.node, scale.nodes))
    }

    #[test]
    fn each_operator_is_found_with_its_name() {
        for operator in SCALES_AT_RUN_TIME {
            let model =
                of(graph("w", vec![node("Relu", "x", "a"), node(operator, "a w", "b"), node(operator, "b", "c")]));
            let scale = batch_scale(&model).unwrap();
            assert_eq!(scale.to_string(), format!("node 'b node' ({operator}), one of 2 such nodes,"));
        }
        let mut nameless = node("DynamicQuantizeLinear", "x", "y scale zero");
        nameless.name = None;
        assert_eq!(
            batch_scale(&of(graph("", vec![nameless]))).unwrap().to_string(),
            "node 'y' (DynamicQuantizeLinear)"
        );
        assert_eq!(found(&of(graph("w", vec![node("QuantizeLinear", "x w", "y")]))), None);
        assert_eq!(found(&ModelProto::default()), None);
    }

    #[test]
    fn the_first_recurrence_is_found_in_any_graph() {
        let inner = || graph("", vec![node("Relu", "x", "a"), node("LSTM", "a w r", "b")]);
        let described = |model: ModelProto| first(&model, &RECURRENT);
        assert_eq!(described(of(inner())).unwrap(), "node 'b node' (LSTM)");
        let outer = vec![node("Relu", "x", "c"), around("If", "c", "d", inner()), node("GRU", "d w r", "e")];
        assert_eq!(described(of(graph("", outer))).unwrap(), "node 'b node' (LSTM)");
        assert_eq!(
            described(of(graph("", vec![around("Scan", "s x", "y", inner())]))).unwrap(),
            "node 'y node' (Scan)"
        );
        let function = FunctionProto { node: vec![node("RNN", "x w r", "y")], ..FunctionProto::default() };
        let of_function = ModelProto { functions: vec![function], ..of(graph("", Vec::new())) };
        assert_eq!(described(of_function).unwrap(), "node 'y node' (RNN)");
        assert_eq!(described(of(graph("", vec![node("Relu", "x", "a")]))), None);
    }

    #[test]
    fn an_output_is_constant_if_it_depends_on_no_input() {
        let named = |names: &str| {
            names
                .split_whitespace()
                .map(|name| ValueInfoProto { name: Some(name.to_owned()), ..ValueInfoProto::default() })
                .collect::<Vec<_>>()
        };
        let nodes = vec![
            node("Identity", "version", "version_number"),
            node("Constant", "", "memory_size"),
            node("Add", "memory_size default", "of_default"),
            node("Mul", "x version", "y"),
            node("RandomUniform", "", "noise"),
            node("RandomNormalLike", "version", "more_noise"),
            node("Add", "version noise", "of_noise"),
            around("If", "version", "chosen", graph("", vec![node("Identity", "x", "inner")])),
        ];
        let outputs = named("version_number memory_size of_default y noise more_noise of_noise chosen version");
        let model = of(GraphProto { input: named("x default"), output: outputs, ..graph("version default", nodes) });
        assert_eq!(constant_outputs(&model), ["version_number", "memory_size", "version"]);
    }

    #[test]
    fn a_scalar_is_told_from_an_output_of_unknown_rank() {
        let of_rank = |name: &str, rank: usize| ValueInfoProto::tensor(name, 1, &vec![Dim::Open; rank]);
        let mut unknown = of_rank("unknown", 0);
        if let Some(type_proto::Value::TensorType(tensor)) = unknown.r#type.as_mut().and_then(|of| of.value.as_mut()) {
            tensor.shape = None;
        }
        let outputs = vec![of_rank("scalar", 0), unknown, of_rank("one", 1)];
        let model = of(GraphProto { output: outputs, ..graph("", Vec::new()) });
        assert_eq!(scalar_outputs(&model), ["scalar"]);
    }

    #[test]
    fn a_constant_has_the_same_scale_in_every_batch() {
        let constants = || {
            vec![
                node("Constant", "", "c"),
                node("Mul", "c w", "product"),
                node("DynamicQuantizeLinear", "product", "q"),
                node("DynamicQuantizeLinear", "w", "r"),
            ]
        };
        assert_eq!(found(&of(graph("w", constants()))), None);
        let mut nodes = constants();
        nodes.push(node("DynamicQuantizeMatMul", "x q", "y"));
        let model = of(graph("w", nodes));
        assert_eq!(found(&model), Some(("y node".to_owned(), 1)));
    }

    #[test]
    fn graphs_within_graphs_and_functions_are_searched() {
        let inner =
            || graph("v", vec![node("DynamicQuantizeLinear", "x", "y"), node("DynamicQuantizeLinear", "v", "z")]);
        let model = of(graph("", vec![around("If", "c", "o", graph("", vec![around("Loop", "n", "p", inner())]))]));
        assert_eq!(found(&model), Some(("y node".to_owned(), 1)));
        // A constant of the graph outside stays one inside, and what a graph makes may hang on anything.
        let takes = |name: &str| graph("", vec![node("DynamicQuantizeLinear", name, "y")]);
        assert_eq!(found(&of(graph("w", vec![around("If", "w", "o", takes("w"))]))), None);
        let behind = vec![around("If", "w", "o", graph("", Vec::new())), node("DynamicQuantizeLinear", "o", "y")];
        assert_eq!(found(&of(graph("w", behind))), Some(("y node".to_owned(), 1)));
        let function = FunctionProto { node: vec![node("DynamicQuantizeLSTM", "x", "y")], ..FunctionProto::default() };
        let model = ModelProto { functions: vec![function], ..of(graph("", Vec::new())) };
        assert_eq!(found(&model), Some(("y node".to_owned(), 1)));
    }

    /// A file that is removed at the end.
    struct Temporary(std::path::PathBuf);

    impl Temporary {
        fn new(name: &str) -> (Self, File) {
            let path = std::env::temp_dir().join(format!("triton-stateful-{name}-{}.onnx", std::process::id()));
            let file = File::create(&path).unwrap();
            (Self(path), file)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn weights_are_skipped_however_large_they_are() {
        let (path, mut file) = Temporary::new("weights");
        let initializer = |raw_bytes: u64| {
            let mut head = vec![9 << 3 | 2];
            prost::encoding::encode_varint(raw_bytes, &mut head);
            let mut content = vec![5 << 3 | 2];
            prost::encoding::encode_varint(head.len() as u64 + raw_bytes, &mut content);
            [content, head].concat()
        };
        // Behind the skipped bytes, on and around the borders of what is read at once.
        let sizes = [1 << 33, 0, 1, 16 * 1024, 16 * 1024 - 20, 3];
        let nodes =
            |from: usize| graph("", vec![node("DynamicQuantizeLinear", "x", &format!("y{from}"))]).encode_to_vec();
        let parts: Vec<_> = sizes.iter().enumerate().map(|(at, &size)| (initializer(size), size, nodes(at))).collect();
        let graph_bytes: u64 = parts.iter().map(|(head, size, nodes)| (head.len() + nodes.len()) as u64 + size).sum();
        let mut head = vec![7 << 3 | 2];
        prost::encoding::encode_varint(graph_bytes, &mut head);
        file.write_all(&head).unwrap();
        for (head, size, nodes) in &parts {
            file.write_all(head).unwrap();
            file.seek(SeekFrom::Current(*size as i64)).unwrap();
            file.write_all(nodes).unwrap();
        }
        let scale = Nodes::of(&path.0.clone().into()).unwrap().batch_scale.unwrap();
        assert_eq!((scale.node.as_str(), scale.nodes), ("y0 node", sizes.len()));
    }

    #[test]
    fn what_is_no_model_is_an_error() {
        let (path, mut file) = Temporary::new("garbage");
        file.write_all(b"ORTM is another format").unwrap();
        assert!(Nodes::of(&path.0.clone().into()).is_err());
        // A model whose end is missing.
        let whole = of(graph("", vec![node("Relu", "x", &"y".repeat(40_000))])).encode_to_vec();
        std::fs::write(&path.0, &whole[..whole.len() - 1]).unwrap();
        assert!(Nodes::of(&path.0.clone().into()).is_err());
        std::fs::write(&path.0, whole).unwrap();
        assert_eq!(Nodes::of(&path.0.clone().into()).unwrap(), Nodes::default());
    }

    /// The first node that a CUDA graph would not repeat, in words.
    fn lost(nodes: Vec<NodeProto>) -> Option<String> {
        first_lost(&of(graph("", nodes)))
    }

    #[test]
    fn a_node_that_a_graph_would_not_repeat_is_named() {
        for (operator, what) in [
            ("NonZero", "counts on the host what it finds"),
            ("GatherND", "copies from memory that ONNX Runtime frees after the first run"),
            ("RandomNormalLike", "would draw the same numbers each time"),
        ] {
            let nodes = vec![node("Relu", "x", "a"), node(operator, "a", "y")];
            assert_eq!(lost(nodes), Some(format!("node 'y node' ({operator}) {what}")));
        }
        assert_eq!(lost(vec![node("Dropout", "x", "y"), node("ScatterND", "x n w", "z")]), None);
        let function = FunctionProto { node: vec![node("NonZero", "a", "b")], ..FunctionProto::default() };
        assert!(first_lost(&ModelProto { functions: vec![function], ..ModelProto::default() }).is_some());
    }
}
