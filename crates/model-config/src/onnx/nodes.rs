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
use std::io;

use stateful_convert::SCALES_AT_RUN_TIME;
use stateful_convert::onnx::schema::{GraphProto, ModelProto, NodeProto, ValueInfoProto};

use super::source::ModelSource;

/// Operators that pass a state from element to element of their input.
const RECURRENT: [&str; 6] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "Loop", "RNN", "Scan"];

/// Operators that must not run over no steps: ONNX Runtime gives back states of zeros, or ends the process (GRU, 1.31.1).
const NEED_STEPS: [&str; 4] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"];

/// Operators that give other values in each run. `Dropout` does so where it trains.
const RANDOM: [&str; 7] =
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// The first node that quantizes with one scale for the whole batch, and how many others do, in words.
    pub batch_scale: Option<String>,
    pub recurrence: Option<Recurrence>,
    /// The first node that must not run over no steps, in words.
    pub needs_steps: Option<String>,
    /// The model's outputs that depend on none of its inputs.
    pub constant_outputs: Vec<String>,
    /// The model's outputs that are scalars. (ONNX Runtime shows one whose rank is not known in the same way.)
    pub scalar_outputs: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recurrence {
    /// In words.
    pub node: String,
    /// The model's inputs from which it and other such nodes begin, with the outputs that have where they end.
    pub ends: Vec<(String, String)>,
}

impl Nodes {
    pub fn of(source: &ModelSource) -> io::Result<Self> {
        let model = source.without_weights()?;
        let outputs = model.graph.iter().flat_map(|graph| &graph.output);
        let scalars = outputs.filter(|output| output.dims().is_some_and(|dims| dims.is_empty()));
        Ok(Self {
            batch_scale: batch_scale(&model),
            recurrence: first(&model, &RECURRENT).map(|node| Recurrence { node, ends: recurrent_ends(&model) }),
            needs_steps: first(&model, &NEED_STEPS),
            constant_outputs: constant_outputs(&model),
            scalar_outputs: scalars.map(|output| output.name().to_owned()).collect(),
        })
    }
}

/// Why a graph can't stand for the runs of a model, in words: its first such node.
pub fn unrepeatable(source: &ModelSource) -> Option<String> {
    match source.without_weights() {
        // ONNX Runtime refuses graphs with subgraphs itself, so only the outer nodes count.
        Ok(model) => nodes(&model).find_map(what_is_lost),
        Err(error) => Some(format!("the nodes of {} cannot be read: {error}", source.file.display())),
    }
}

fn batch_scale(model: &ModelProto) -> Option<String> {
    let mut found = Vec::new();
    if let Some(graph) = &model.graph {
        search_graph(graph, &HashSet::new(), &mut found);
    }
    for function in &model.functions {
        // The inputs of a function differ from call to call, so none of them counts as constant.
        search(&function.node, HashSet::new(), &mut found);
    }
    let first = described(found.first()?);
    Some(if found.len() > 1 { format!("{first}, one of {} such nodes,", found.len()) } else { first })
}

fn described(node: &NodeProto) -> String {
    format!("node '{}' ({})", node.label(), node.op_type())
}

/// The nodes of a model's graph and of its functions, without those of graphs within them.
fn nodes(model: &ModelProto) -> impl Iterator<Item = &NodeProto> {
    let of_functions = model.functions.iter().flat_map(|function| &function.node);
    model.graph.iter().flat_map(|graph| &graph.node).chain(of_functions)
}

/// The first node with one of these operators, also in graphs within graphs and in functions.
fn first(model: &ModelProto, operators: &[&str]) -> Option<String> {
    nodes(model).find_map(|node| first_in(node, operators)).map(described)
}

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
    let constants = with_constant_nodes(&graph.node, initializers.filter(|name| !is_input(name)).collect());
    let outputs = graph.output.iter().map(ValueInfoProto::name);
    outputs.filter(|name| constants.contains(name)).map(str::to_owned).collect()
}

/// Adds the outputs that are the same in every run to the constants. A graph lists its nodes in the order in which they run.
fn with_constant_nodes<'a>(nodes: &'a [NodeProto], mut constants: HashSet<&'a str>) -> HashSet<&'a str> {
    for node in nodes {
        // A subgraph may take what is not listed among the node's inputs.
        let may_differ = node.graphs().next().is_some() || RANDOM.contains(&node.op_type());
        if !may_differ && node.input.iter().all(|name| is_constant(name, &constants)) {
            constants.extend(node.output.iter().map(String::as_str));
        }
    }
    constants
}

fn is_constant(name: &str, constants: &HashSet<&str>) -> bool {
    // An optional input that is left out has no name.
    name.is_empty() || constants.contains(name)
}

/// `outside`: constants of the graphs around this one, which its nodes may take.
fn search_graph<'a>(graph: &'a GraphProto, outside: &HashSet<&'a str>, found: &mut Vec<&'a NodeProto>) {
    let own = graph.initializer.iter().map(|tensor| tensor.name());
    search(&graph.node, outside.iter().copied().chain(own).collect(), found);
}

/// Adds the nodes whose input is not constant.
fn search<'a>(nodes: &'a [NodeProto], outside: HashSet<&'a str>, found: &mut Vec<&'a NodeProto>) {
    let constants = with_constant_nodes(nodes, outside);
    for node in nodes {
        let quantizes_constant = node.input.first().is_some_and(|name| is_constant(name, &constants));
        if SCALES_AT_RUN_TIME.contains(&node.op_type()) && !quantizes_constant {
            found.push(node);
        }
        node.graphs().for_each(|graph| search_graph(graph, &constants, found));
    }
}

fn what_is_lost(node: &NodeProto) -> Option<String> {
    let operator = node.op_type();
    let what = match operator {
        // Their CUDA kernels copy the length of the output to the host.
        "Compress" | "NonMaxSuppression" | "NonZero" => "counts on the host what it finds",
        // Its CUDA kernel copies to the device from memory that it frees.
        "GatherND" => "copies from memory that ONNX Runtime frees after the first run",
        // Without training, it draws nothing.
        "Dropout" => return None,
        _ if RANDOM.contains(&operator) => "would draw the same numbers each time",
        _ => return None,
    };
    Some(format!("{} {what}", described(node)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};

    use prost::Message;
    use stateful_convert::onnx::Dim;
    use stateful_convert::onnx::schema::{AttributeProto, FunctionProto, TensorProto, type_proto};

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

    fn source(model: &ModelProto) -> ModelSource {
        ModelSource::made("made", "file".into(), model.encode_to_vec())
    }

    #[test]
    fn each_operator_is_found_with_its_name() {
        for operator in SCALES_AT_RUN_TIME {
            let model =
                of(graph("w", vec![node("Relu", "x", "a"), node(operator, "a w", "b"), node(operator, "b", "c")]));
            let expected = format!("node 'b node' ({operator}), one of 2 such nodes,");
            assert_eq!(batch_scale(&model), Some(expected));
        }
        let mut nameless = node("DynamicQuantizeLinear", "x", "y scale zero");
        nameless.name = None;
        assert_eq!(batch_scale(&of(graph("", vec![nameless]))).unwrap(), "node 'y' (DynamicQuantizeLinear)");
        assert_eq!(batch_scale(&of(graph("w", vec![node("QuantizeLinear", "x w", "y")]))), None);
        assert_eq!(batch_scale(&ModelProto::default()), None);
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
        assert_eq!(Nodes::of(&source(&model)).unwrap().scalar_outputs, ["scalar"]);
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
        assert_eq!(batch_scale(&of(graph("w", constants()))), None);
        let mut nodes = constants();
        nodes.push(node("DynamicQuantizeMatMul", "x q", "y"));
        assert_eq!(batch_scale(&of(graph("w", nodes))).unwrap(), "node 'y node' (DynamicQuantizeMatMul)");
    }

    #[test]
    fn graphs_within_graphs_and_functions_are_searched() {
        let inner =
            || graph("v", vec![node("DynamicQuantizeLinear", "x", "y"), node("DynamicQuantizeLinear", "v", "z")]);
        let model = of(graph("", vec![around("If", "c", "o", graph("", vec![around("Loop", "n", "p", inner())]))]));
        let y = Some("node 'y node' (DynamicQuantizeLinear)".to_owned());
        assert_eq!(batch_scale(&model), y);
        // A constant of the graph outside stays one inside, and what a graph makes may hang on anything.
        let takes = |name: &str| graph("", vec![node("DynamicQuantizeLinear", name, "y")]);
        assert_eq!(batch_scale(&of(graph("w", vec![around("If", "w", "o", takes("w"))]))), None);
        let behind = vec![around("If", "w", "o", graph("", Vec::new())), node("DynamicQuantizeLinear", "o", "y")];
        assert_eq!(batch_scale(&of(graph("w", behind))), y);
        let function = FunctionProto { node: vec![node("DynamicQuantizeLSTM", "x", "y")], ..FunctionProto::default() };
        let model = ModelProto { functions: vec![function], ..of(graph("", Vec::new())) };
        assert_eq!(batch_scale(&model).unwrap(), "node 'y node' (DynamicQuantizeLSTM)");
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
        assert_eq!(scale, "node 'y0 node' (DynamicQuantizeLinear), one of 6 such nodes,");
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
        unrepeatable(&source(&of(graph("", nodes))))
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
        let of_function = ModelProto { functions: vec![function], ..ModelProto::default() };
        assert!(unrepeatable(&source(&of_function)).is_some());
    }
}
