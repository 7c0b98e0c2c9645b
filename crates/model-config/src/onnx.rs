//! What an ONNX model is: its signature, where it is read from, and what its nodes say of its runs: whether some
//! quantize with one scale for the whole batch, whether one has a recurrence inside, which outputs are the same in
//! every run, and whether a CUDA graph can replay the runs.
//!
//! ONNX Runtime tells the signature, but not the nodes: [`Nodes`] reads those from the model's file. No large weight is
//! read or copied, however the file holds it, so a model of many gigabytes takes no longer to read than its nodes do.
//! Not for: what a configuration makes of a model ([`crate::binding`], [`crate::completion`]).

#![expect(missing_docs, reason = "most names say it")]

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use prost::Message;
use prost::bytes::{Buf, Bytes};
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};
use rows::tensor::DataType;
use stateful_convert::onnx::schema::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use stateful_convert::{SCALES_AT_RUN_TIME, SMALL_WEIGHT_BYTES, is_batch_name, is_made_up};

/// Inputs and outputs of a model, in the model's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    pub inputs: Vec<TensorInfo>,
    /// Its overridable initializers: inputs that a run may leave out, because the model has a value for them.
    pub defaults: Vec<TensorInfo>,
    pub outputs: Vec<TensorInfo>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub data_type: DataType,
    /// Dimensions; -1 is open. Empty for a scalar, and where the model says nothing about the rank.
    pub dims: Vec<i64>,
    /// An entry for each of `dims`: the name of an open dimension, or an empty text.
    pub symbols: Vec<String>,
}

impl Signature {
    /// The names that the batch dimension may have: a usual one, else all that every state and another input have.
    /// `state_axes` gives the dimensions of a state that may be the batch, and `None` for what is no state.
    pub fn batch_symbols(&self, state_axes: impl Fn(&TensorInfo) -> Option<Vec<usize>>) -> Vec<&str> {
        let symbols = || self.inputs.iter().flat_map(|info| &info.symbols).filter(|symbol| !symbol.is_empty());
        if let Some(usual) = symbols().find(|symbol| is_batch_name(symbol)) {
            return vec![usual];
        }
        let axes: Vec<_> = self.inputs.iter().map(|info| (info, state_axes(info))).collect();
        let has = |info: &TensorInfo, symbol: &str| info.symbols.iter().any(|other| other == symbol);
        // A state without a batch has no name for it.
        let states =
            || axes.iter().filter_map(|(info, axes)| Some((info, axes.as_ref()?))).filter(|(_, a)| !a.is_empty());
        let is_shared = |symbol: &str| {
            states().all(|(info, axes)| axes.iter().any(|&axis| info.symbols[axis] == symbol))
                && axes.iter().any(|(info, axes)| axes.is_none() && has(info, symbol))
        };
        let mut shared: Vec<&str> = Vec::new();
        for symbol in symbols() {
            if states().next().is_some() && is_shared(symbol) && !shared.contains(&symbol.as_str()) {
                shared.push(symbol);
            }
        }
        shared
    }

    /// The input of this name that has no default.
    pub fn input(&self, name: &str) -> Option<&TensorInfo> {
        self.inputs.iter().find(|info| info.name == name)
    }

    pub fn output(&self, name: &str) -> Option<&TensorInfo> {
        self.outputs.iter().find(|info| info.name == name)
    }

    /// Includes inputs with a default.
    pub fn input_names(&self) -> Vec<&str> {
        self.inputs.iter().chain(&self.defaults).map(|info| info.name.as_str()).collect()
    }

    pub fn output_names(&self) -> Vec<&str> {
        self.outputs.iter().map(|info| info.name.as_str()).collect()
    }
}

impl TensorInfo {
    /// The name of a dimension, if it tells which dimensions of other tensors are the same; else empty. PyTorch's
    /// exporter gives a dimension without a name one that is made of the tensor's name and a number, such as
    /// `audio_signal_dynamic_axes_1`, and tf2onnx one such as `unk__577`. Each tensor then has another name for the
    /// same batch.
    pub fn symbol(&self, axis: usize) -> &str {
        let symbol = self.symbols.get(axis).map_or("", String::as_str);
        let stem = symbol.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let is_numbered = |ending: &str| {
            stem.len() < symbol.len()
                && stem.strip_suffix(ending).is_some_and(|front| front.ends_with(self.name.as_str()))
        };
        if is_made_up(symbol) || ["_dynamic_axes_", "_dim_"].into_iter().any(is_numbered) { "" } else { symbol }
    }
}

/// Whether two dimensions can be the same; an open one can be any.
pub const fn agree(a: i64, b: i64) -> bool {
    a == b || a < 0 || b < 0
}

/// The dimensions that a model leaves open, without the batch.
pub fn open_axes(dims: &[i64], batch_axis: Option<usize>) -> Vec<usize> {
    (0..dims.len()).filter(|&axis| dims[axis] < 0 && Some(axis) != batch_axis).collect()
}

pub fn all_agree(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| agree(a, b))
}

/// A model's file, or what was made of it or of several.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// The model's file, even if the model is converted. For a joined model, the folder of its graphs.
    pub file: PathBuf,
    /// If the model is converted or joined, what was done, and the model that is read instead of the file.
    made: Option<(&'static str, Bytes)>,
}

impl ModelSource {
    pub fn made(what: &'static str, file: PathBuf, model: Vec<u8>) -> Self {
        // Kept as long as the model, because each instance on a GPU opens a session. Clones share the bytes.
        Self { file, made: Some((what, model.into())) }
    }

    /// Reads the whole model, weights too.
    pub fn read(&self) -> io::Result<Bytes> {
        self.bytes().map_or_else(|| Ok(std::fs::read(&self.file)?.into()), |bytes| Ok(bytes.clone()))
    }

    /// Bytes of the model, without weights in files of their own.
    pub fn byte_len(&self) -> u64 {
        let of_file = || std::fs::metadata(&self.file).map_or(0, |file| file.len());
        self.bytes().map_or_else(of_file, |bytes| bytes.len() as u64)
    }

    /// What is read in place of the file.
    pub fn bytes(&self) -> Option<&Bytes> {
        self.made.as_ref().map(|(_, bytes)| bytes)
    }

    /// Reads the model. Large weights of a file come out empty; of a model in memory, they are slices of its bytes.
    pub fn without_weights(&self) -> io::Result<ModelProto> {
        if let Some(bytes) = self.bytes() {
            return ModelProto::decode(bytes.clone()).map_err(io::Error::other);
        }
        let mut file = FileBytes::open(&self.file)?;
        // The decoder keeps what it reads, so the weights are taken out first.
        let mut copied = Vec::new();
        let decoded = match copy(&mut file, Part::Model, 0, MOST_DEPTH, &mut copied) {
            None if file.error.is_none() => {
                // The decoder knows what is wrong with the file.
                file = FileBytes::open(&self.file)?;
                ModelProto::decode(&mut file)
            }
            _ => ModelProto::decode(Bytes::from(copied)),
        };
        file.error.map_or(decoded.map_err(io::Error::other), Err)
    }
}

impl From<PathBuf> for ModelSource {
    fn from(file: PathBuf) -> Self {
        Self { file, made: None }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        self.made.as_ref().map_or(Ok(()), |(what, _)| write!(f, " ({what})"))
    }
}

/// Graphs in graphs, as deep as the decoder goes.
const MOST_DEPTH: usize = 100;

/// Parts of a model that hold weights, or parts with weights.
#[derive(Clone, Copy)]
enum Part {
    Model,
    Graph,
    Node,
    Function,
    Attribute,
    SparseTensor,
    Tensor,
    Training,
}

impl Part {
    /// `field`: its number in ONNX's schema.
    const fn inside(self, field: u32) -> Option<Self> {
        match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) | (Self::Training, 1 | 2) => Some(Self::Graph),
            (Self::Model, 20) => Some(Self::Training),
            (Self::Model, 25) => Some(Self::Function),
            (Self::Graph, 1) | (Self::Function, 7) => Some(Self::Node),
            (Self::Node, 5) => Some(Self::Attribute),
            (Self::Graph, 15) | (Self::Attribute, 22 | 23) => Some(Self::SparseTensor),
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) | (Self::SparseTensor, 1 | 2) => Some(Self::Tensor),
            _ => None,
        }
    }

    const fn is_large_weight(self, field: u32, bytes: u64) -> bool {
        match (self, field) {
            // `raw_data`: the elements as bytes.
            (Self::Tensor, 9) => bytes > SMALL_WEIGHT_BYTES,
            // Numbers of a type. An integer has up to 10 bytes here, and 8 as bytes.
            (Self::Tensor, 4 | 5 | 7 | 10 | 11) => bytes > SMALL_WEIGHT_BYTES / 8 * 10,
            _ => false,
        }
    }
}

/// Copies the fields up to where `end` bytes remain, without large weights. `None` if they are malformed.
fn copy(from: &mut FileBytes, part: Part, end: usize, depth: usize, to: &mut Vec<u8>) -> Option<()> {
    while from.remaining() > end {
        let (field, kind) = decode_key(from).ok()?;
        encode_key(field, kind, to);
        let bytes = match kind {
            WireType::Varint => {
                encode_varint(decode_varint(from).ok()?, to);
                continue;
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => decode_varint(from).ok()?,
            // ONNX has no groups.
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        let size = usize::try_from(bytes).ok()?;
        let rest = from.remaining().checked_sub(size).filter(|&rest| rest >= end)?;
        if let (Some(inside), true) = (part.inside(field), kind == WireType::LengthDelimited) {
            let mut copied = Vec::new();
            copy(from, inside, rest, depth.checked_sub(1)?, &mut copied)?;
            encode_varint(copied.len() as u64, to);
            to.append(&mut copied);
        } else if kind == WireType::LengthDelimited && part.is_large_weight(field, bytes) {
            from.advance(size);
            encode_varint(0, to);
        } else {
            if kind == WireType::LengthDelimited {
                encode_varint(bytes, to);
            }
            let start = to.len();
            to.resize(start + size, 0);
            from.copy_to_slice(&mut to[start..]);
        }
    }
    (from.remaining() == end).then_some(())
}

/// A file that protobuf's decoder reads from. Bytes that it skips are not read from the disk. After an error, the rest
/// of the file is zeros.
struct FileBytes {
    file: BufReader<File>,
    left: usize,
    error: Option<io::Error>,
}

impl FileBytes {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let left = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mut bytes = Self { file: BufReader::with_capacity(16 * 1024, file), left, error: None };
        bytes.advance(0);
        Ok(bytes)
    }
}

impl Buf for FileBytes {
    fn remaining(&self) -> usize {
        self.left
    }

    fn chunk(&self) -> &[u8] {
        let chunk = if self.error.is_some() { &[0; 1024] } else { self.file.buffer() };
        &chunk[..chunk.len().min(self.left)]
    }

    fn advance(&mut self, count: usize) {
        self.left -= count;
        if self.left == 0 || self.error.is_some() {
            return;
        }
        let sought = self.file.seek_relative(count as i64);
        // `Buf` can't return an error, so the owner of the file asks for the error at the end.
        self.error = match sought.and_then(|()| self.file.fill_buf()) {
            Ok([]) => Some(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => None,
            Err(error) => Some(error),
        };
    }
}

/// Operators that pass a state from element to element of their input.
const RECURRENT: [&str; 6] = ["DynamicQuantizeLSTM", "GRU", "LSTM", "Loop", "RNN", "Scan"];

/// Operators that must not run over no steps: ONNX Runtime gives back states of zeros, or ends the process (GRU,
/// 1.31.1).
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

/// Why a CUDA graph can't stand for the runs of a model, in words: its first such node.
///
/// A replay of a CUDA graph repeats the kernels and copies that a run enqueued, and nothing that ONNX Runtime did on
/// the host meanwhile. So no node may read on the host what differs from run to run, nor copy from memory of the host
/// that is gone when its run is over. ONNX Runtime refuses subgraphs and copies between its providers, and it tells
/// which inputs it reads on the host (a Slice kept the bounds of its first run, with 1.31.1 on an H200). What is left
/// is what CUDA kernels do of themselves: the replay of a NonZero copied the count to where the stack had been, and
/// wrote to an illegal address.
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

/// Adds the outputs that are the same in every run to the constants. A graph lists its nodes in the order in which they
/// run.
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
    use std::io::{Seek, SeekFrom, Write};

    use stateful_convert::onnx::Dim;
    use stateful_convert::onnx::schema::{
        AttributeProto, FunctionProto, SparseTensorProto, TensorProto, TrainingInfoProto, type_proto,
    };

    use super::*;

    #[test]
    fn a_name_that_is_made_of_the_tensors_name_and_a_number_says_nothing() {
        let symbol = |name: &str, symbol: &str| {
            let symbols = vec![symbol.to_owned()];
            TensorInfo { name: name.to_owned(), data_type: DataType::Fp32, dims: vec![-1], symbols }
                .symbol(0)
                .to_owned()
        };
        for (name, numbered) in [
            ("cache_last_time", "cache_last_time_dynamic_axes_2"),
            ("states.1", "states.1_dim_1"),
            ("74", "LSTM74_dim_1"),
            ("h", "unk__577"),
        ] {
            assert_eq!(symbol(name, numbered), "");
        }
        for (name, said) in [
            ("cache", "other_dynamic_axes_1"),
            ("past", "past_length"),
            ("past", "past_dim_"),
            ("x", "batch"),
            ("x", "s77"),
            ("x", "unk__"),
            ("x", "unk__rows"),
            ("x", ""),
        ] {
            assert_eq!(symbol(name, said), said);
        }
    }

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

    /// A model with a tensor at each place that may have one.
    fn model(of_weight: impl Fn() -> TensorProto) -> ModelProto {
        let sparse = || SparseTensorProto { values: Some(of_weight()), ..SparseTensorProto::default() };
        let inner =
            GraphProto { initializer: vec![of_weight()], sparse_initializer: vec![sparse()], ..GraphProto::default() };
        let attribute = AttributeProto {
            t: Some(of_weight()),
            tensors: vec![of_weight()],
            sparse_tensor: Some(sparse()),
            sparse_tensors: vec![sparse()],
            g: Some(inner.clone()),
            graphs: vec![inner.clone()],
            ..AttributeProto::default()
        };
        let node = NodeProto { attribute: vec![attribute], ..NodeProto::make("If", "node", &["x"], &["y"]) };
        ModelProto {
            producer_name: Some("p".repeat(20_000)),
            graph: Some(GraphProto { node: vec![node.clone()], ..inner.clone() }),
            functions: vec![FunctionProto { node: vec![node], ..FunctionProto::default() }],
            training_info: vec![TrainingInfoProto { algorithm: Some(inner), ..TrainingInfoProto::default() }],
            ..ModelProto::default()
        }
    }

    #[test]
    fn large_weights_come_out_empty_and_all_else_as_it_is() {
        let (path, _) = Temporary::new("large-weights");
        let raw = |bytes: usize| TensorProto { raw_data: Some(vec![1; bytes].into()), ..TensorProto::default() };
        let typed = |count: usize| TensorProto {
            float_data: vec![0.5; count],
            int32_data: vec![-1; count],
            int64_data: vec![-1; count],
            double_data: vec![0.5; count],
            uint64_data: vec![u64::MAX; count],
            name: Some("w".to_owned()),
            ..TensorProto::default()
        };
        for (weight, expected) in [
            (raw(200_000), raw(0)),
            (raw(1000), raw(1000)),
            (typed(50_000), TensorProto { name: Some("w".to_owned()), ..TensorProto::default() }),
            (typed(1000), typed(1000)),
        ] {
            std::fs::write(&path.0, model(|| weight.clone()).encode_to_vec()).unwrap();
            assert!(ModelSource::from(path.0.clone()).without_weights().unwrap() == model(|| expected.clone()));
        }
    }
}
