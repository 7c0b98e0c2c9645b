//! What a model's nodes say of its runs: whether some quantize with one scale for the whole batch, so that one row's
//! result depends on the others; whether one has a recurrence inside; and which outputs are the same in every run.
//!
//! The nodes are read from the model's file, because ONNX Runtime does not list a model's nodes. Only the fields that are
//! declared here are read; weights are skipped.

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::path::Path;

use prost::Message;
use stateful_convert::SCALES_AT_RUN_TIME;

use super::file_bytes::FileBytes;
use super::source::ModelSource;

/// Operators that pass a state from element to element of their input.
const RECURRENT: [&str; 6] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "Loop", "RNN", "Scan"];

/// Operators that must not run over no steps: ONNX Runtime gives back states of zeros, or ends the process (GRU, 1.31.1).
const NEED_STEPS: [&str; 4] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"];

/// Operators that give other values in each run. `Dropout` does so where it trains.
const RANDOM: [&str; 7] =
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

/// What the nodes of a model say of its runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
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
        let Some(bytes) = source.bytes() else { return Self::read(source.file()) };
        Ok(ModelProto::decode(bytes).map_err(io::Error::other)?.into())
    }

    fn read(file: &Path) -> io::Result<Self> {
        let mut bytes = FileBytes::open(file, usize::MAX)?;
        let decoded = ModelProto::decode(&mut bytes);
        bytes.check()?;
        Ok(decoded.map_err(io::Error::other)?.into())
    }
}

impl From<ModelProto> for Nodes {
    fn from(model: ModelProto) -> Self {
        Self {
            batch_scale: model.batch_scale(),
            recurrence: model.first(&RECURRENT).map(|node| Recurrence { node, ends: model.recurrent_ends() }),
            needs_steps: model.first(&NEED_STEPS),
            constant_outputs: model.constant_outputs(),
            scalar_outputs: model.scalar_outputs(),
        }
    }
}

#[derive(Message)]
struct ModelProto {
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "25")]
    functions: Vec<FunctionProto>,
}

#[derive(Message)]
struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "5")]
    initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    output: Vec<ValueInfoProto>,
}

#[derive(Message)]
struct ValueInfoProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    r#type: Option<TypeProto>,
}

#[derive(Message)]
struct TypeProto {
    #[prost(message, optional, tag = "1")]
    tensor_type: Option<TensorTypeProto>,
}

#[derive(Message)]
struct TensorTypeProto {
    #[prost(message, optional, tag = "2")]
    shape: Option<ShapeProto>,
}

#[derive(Message)]
struct ShapeProto {
    #[prost(message, repeated, tag = "1")]
    dim: Vec<DimensionProto>,
}

#[derive(Message)]
struct DimensionProto {}

#[derive(Message)]
struct FunctionProto {
    #[prost(message, repeated, tag = "7")]
    node: Vec<NodeProto>,
}

#[derive(Message)]
struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    output: Vec<String>,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(string, tag = "4")]
    op_type: String,
    #[prost(message, repeated, tag = "5")]
    attribute: Vec<AttributeProto>,
}

#[derive(Message)]
struct AttributeProto {
    #[prost(message, optional, tag = "6")]
    g: Option<GraphProto>,
    #[prost(message, repeated, tag = "11")]
    graphs: Vec<GraphProto>,
}

#[derive(Message)]
struct TensorProto {
    #[prost(string, tag = "8")]
    name: String,
}

impl ModelProto {
    fn batch_scale(&self) -> Option<BatchScale> {
        let mut found = Vec::new();
        if let Some(graph) = &self.graph {
            graph.search(&HashSet::new(), &mut found);
        }
        for function in &self.functions {
            search(&function.node, HashSet::new(), &mut found);
        }
        let first = found.first()?;
        Some(BatchScale { node: first.known_as(), operator: first.op_type.clone(), nodes: found.len() })
    }

    /// The first node with one of these operators, also in graphs within graphs and in functions.
    fn first(&self, operators: &[&str]) -> Option<String> {
        let nodes = self.graph.iter().flat_map(|graph| &graph.node);
        let of_functions = self.functions.iter().flat_map(|function| &function.node);
        let node = nodes.chain(of_functions).find_map(|node| node.first(operators))?;
        Some(format!("node '{}' ({})", node.known_as(), node.op_type))
    }

    /// The model's inputs that are initial states of layers, with the model's outputs that are their final ones.
    fn recurrent_ends(&self) -> Vec<(String, String)> {
        let Some(graph) = &self.graph else { return Vec::new() };
        let is = |infos: &[ValueInfoProto], name: &str| infos.iter().any(|info| info.name == name);
        let layers = graph.node.iter().filter(|node| ["GRU", "LSTM", "RNN"].contains(&node.op_type.as_str()));
        // initial_h and Y_h, initial_c and Y_c
        let ends = |node: &NodeProto, input: usize, output: usize| {
            let (input, output) = (node.input.get(input)?, node.output.get(output)?);
            (is(&graph.input, input) && is(&graph.output, output)).then(|| (input.clone(), output.clone()))
        };
        layers.flat_map(|node| [ends(node, 5, 1), ends(node, 6, 2)]).flatten().collect()
    }

    fn constant_outputs(&self) -> Vec<String> {
        let Some(graph) = &self.graph else { return Vec::new() };
        // A run may replace an initializer that is an input, too.
        let is_input = |name: &str| graph.input.iter().any(|input| input.name == name);
        let initializers = graph.initializer.iter().map(|tensor| tensor.name.as_str());
        let mut constants: HashSet<&str> = initializers.filter(|name| !is_input(name)).collect();
        for node in graph.node.iter() {
            if node.is_constant(&constants) {
                constants.extend(node.output.iter().map(String::as_str));
            }
        }
        let outputs = graph.output.iter().map(|output| &output.name);
        outputs.filter(|name| constants.contains(name.as_str())).cloned().collect()
    }

    fn scalar_outputs(&self) -> Vec<String> {
        let outputs = self.graph.iter().flat_map(|graph| &graph.output);
        outputs.filter(|output| output.is_scalar()).map(|output| output.name.clone()).collect()
    }
}

impl ValueInfoProto {
    fn is_scalar(&self) -> bool {
        let tensor_type = self.r#type.as_ref().and_then(|value| value.tensor_type.as_ref());
        tensor_type.and_then(|tensor| tensor.shape.as_ref()).is_some_and(|shape| shape.dim.is_empty())
    }
}

impl NodeProto {
    fn graphs(&self) -> impl Iterator<Item = &GraphProto> {
        self.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs))
    }

    /// Its name; its output if it has none.
    fn known_as(&self) -> String {
        let name = if self.name.is_empty() { self.output.first() } else { Some(&self.name) };
        name.cloned().unwrap_or_default()
    }

    /// The node itself if it has one of these operators, or the first such node of its graphs.
    fn first(&self, operators: &[&str]) -> Option<&Self> {
        if operators.contains(&self.op_type.as_str()) {
            return Some(self);
        }
        self.graphs().flat_map(|graph| &graph.node).find_map(|node| node.first(operators))
    }

    /// Whether it gives the same in every run. A subgraph may take what is not listed among the node's inputs.
    fn is_constant(&self, constants: &HashSet<&str>) -> bool {
        self.input.iter().all(|name| is_constant(name, constants))
            && self.graphs().next().is_none()
            && !RANDOM.contains(&self.op_type.as_str())
    }
}

/// Whether an input of a node is the same in every run. One that is left out has no name.
fn is_constant(name: &str, constants: &HashSet<&str>) -> bool {
    name.is_empty() || constants.contains(name)
}

impl GraphProto {
    /// `outside`: constants of the graphs around this one, which its nodes may take.
    fn search<'a>(&'a self, outside: &HashSet<&'a str>, found: &mut Vec<&'a NodeProto>) {
        let own = self.initializer.iter().map(|tensor| tensor.name.as_str());
        search(&self.node, outside.iter().copied().chain(own).collect(), found);
    }
}

/// Adds the nodes whose input is not constant. A graph lists its nodes in the order in which they run.
fn search<'a>(nodes: &'a [NodeProto], mut constants: HashSet<&'a str>, found: &mut Vec<&'a NodeProto>) {
    for node in nodes {
        let quantizes_constant = node.input.first().is_some_and(|name| is_constant(name, &constants));
        if SCALES_AT_RUN_TIME.contains(&node.op_type.as_str()) && !quantizes_constant {
            found.push(node);
        }
        if node.is_constant(&constants) {
            constants.extend(node.output.iter().map(String::as_str));
        }
        node.graphs().for_each(|graph| graph.search(&constants, found));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    fn node(op_type: &str, input: &str, output: &str) -> NodeProto {
        let names = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        let (op_type, attribute) = (op_type.to_owned(), Vec::new());
        NodeProto { input: names(input), output: names(output), name: format!("{output} node"), op_type, attribute }
    }

    /// A node that runs a graph.
    fn around(op_type: &str, input: &str, output: &str, inner: GraphProto) -> NodeProto {
        let attribute = vec![AttributeProto { g: Some(inner), graphs: Vec::new() }];
        NodeProto { attribute, ..node(op_type, input, output) }
    }

    fn graph(initializers: &str, node: Vec<NodeProto>) -> GraphProto {
        let tensor = |name: &str| TensorProto { name: name.to_owned() };
        let initializer = initializers.split_whitespace().map(tensor).collect();
        GraphProto { node, initializer, input: Vec::new(), output: Vec::new() }
    }

    fn of(graph: GraphProto) -> ModelProto {
        ModelProto { graph: Some(graph), functions: Vec::new() }
    }

    /// The outputs of the first node that is found, and how many there are.
    fn found(model: &ModelProto) -> Option<(String, usize)> {
        model.batch_scale().map(|scale| (scale.node, scale.nodes))
    }

    #[test]
    fn each_operator_is_found_with_its_name() {
        for operator in SCALES_AT_RUN_TIME {
            let model =
                of(graph("w", vec![node("Relu", "x", "a"), node(operator, "a w", "b"), node(operator, "b", "c")]));
            let scale = model.batch_scale().unwrap();
            assert_eq!(scale.to_string(), format!("node 'b node' ({operator}), one of 2 such nodes,"));
        }
        let mut nameless = node("DynamicQuantizeLinear", "x", "y scale zero");
        nameless.name.clear();
        assert_eq!(
            of(graph("", vec![nameless])).batch_scale().unwrap().to_string(),
            "node 'y' (DynamicQuantizeLinear)"
        );
        assert_eq!(found(&of(graph("w", vec![node("QuantizeLinear", "x w", "y")]))), None);
        assert_eq!(found(&ModelProto { graph: None, functions: Vec::new() }), None);
    }

    #[test]
    fn the_first_recurrence_is_found_in_any_graph() {
        let inner = || graph("", vec![node("Relu", "x", "a"), node("LSTM", "a w r", "b")]);
        let described = |model: ModelProto| model.first(&RECURRENT);
        assert_eq!(described(of(inner())).unwrap(), "node 'b node' (LSTM)");
        let outer = vec![node("Relu", "x", "c"), around("If", "c", "d", inner()), node("GRU", "d w r", "e")];
        assert_eq!(described(of(graph("", outer))).unwrap(), "node 'b node' (LSTM)");
        assert_eq!(
            described(of(graph("", vec![around("Scan", "s x", "y", inner())]))).unwrap(),
            "node 'y node' (Scan)"
        );
        let function = FunctionProto { node: vec![node("RNN", "x w r", "y")] };
        let of_function = ModelProto { graph: Some(graph("", Vec::new())), functions: vec![function] };
        assert_eq!(described(of_function).unwrap(), "node 'y node' (RNN)");
        assert_eq!(described(of(graph("", vec![node("Relu", "x", "a")]))), None);
    }

    #[test]
    fn an_output_is_constant_if_it_depends_on_no_input() {
        let named = |names: &str| {
            names
                .split_whitespace()
                .map(|name| ValueInfoProto { name: name.to_owned(), r#type: None })
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
        assert_eq!(model.constant_outputs(), ["version_number", "memory_size", "version"]);
    }

    #[test]
    fn a_scalar_is_told_from_an_output_of_unknown_rank() {
        let output = |name: &str, dims: Option<usize>| {
            let shape = dims.map(|dims| ShapeProto { dim: (0..dims).map(|_| DimensionProto {}).collect() });
            let r#type = Some(TypeProto { tensor_type: Some(TensorTypeProto { shape }) });
            ValueInfoProto { name: name.to_owned(), r#type }
        };
        let outputs = vec![output("scalar", Some(0)), output("unknown", None), output("one", Some(1))];
        let model = of(GraphProto { output: outputs, ..graph("", Vec::new()) });
        assert_eq!(model.scalar_outputs(), ["scalar"]);
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
        let function = FunctionProto { node: vec![node("DynamicQuantizeLSTM", "x", "y")] };
        let model = ModelProto { graph: Some(graph("", Vec::new())), functions: vec![function] };
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
        let scale = Nodes::read(&path.0).unwrap().batch_scale.unwrap();
        assert_eq!((scale.node.as_str(), scale.nodes), ("y0 node", sizes.len()));
    }

    #[test]
    fn what_is_no_model_is_an_error() {
        let (path, mut file) = Temporary::new("garbage");
        file.write_all(b"ORTM is another format").unwrap();
        assert!(Nodes::read(&path.0).is_err());
        // A model whose end is missing.
        let whole = of(graph("", vec![node("Relu", "x", &"y".repeat(40_000))])).encode_to_vec();
        std::fs::write(&path.0, &whole[..whole.len() - 1]).unwrap();
        assert!(Nodes::read(&path.0).is_err());
        std::fs::write(&path.0, whole).unwrap();
        assert_eq!(Nodes::read(&path.0).unwrap(), Nodes::default());
    }
}
