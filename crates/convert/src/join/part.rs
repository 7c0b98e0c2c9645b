//! The graphs that are joined: their list, as a command line or the parameter `join` writes it, each graph, its names
//! in the joined graph, and the errors of joining.
//!
//! A word of the list is a file or the name of a built-in graph, `NAME=` may stand before it, and options of a built-in
//! graph follow it: `fbank:kaldi num_mel_bins=80 encoder.onnx`.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;

use super::opsets::{check_newest, raise, raise_function};
use crate::batch::{is_batch_name, is_made_up};
use crate::builtin::builtin_names;
use crate::names::{StatePair, check_pairs, described_state_pairs, pairs_by_names};
use crate::onnx::schema::{
    FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TypeProto,
    ValueInfoProto, tensor_shape_proto::dimension::Value, type_proto,
};
use crate::onnx::{Dim, bracketed, each_external, function_like_operator, is_onnx, names, opset, opset_of};
use crate::prepared::{ConvertError, sort_all};

#[derive(Clone, Debug)]
pub struct Part {
    pub name: String,
    /// The model. Its weights may be in files of their own.
    pub model: Bytes,
    /// The folder of these files, from the folder of the joined model; empty if it is the same.
    pub folder: String,
}

pub struct Read {
    pub name: String,
    pub folder: String,
    pub model: ModelProto,
    pub graph: GraphProto,
    /// Its states, by its own names.
    pub pairs: Vec<StatePair>,
}

impl Read {
    /// Reads a part. `states` are those that the caller names for it, by its own names.
    pub fn new(part: &Part, states: Vec<StatePair>) -> Result<Self> {
        let name = part.name.clone();
        let is_part_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        if name.is_empty() || !name.chars().all(is_part_of_name) {
            return Err(JoinError::Name(name));
        }
        let refused = |error| JoinError::Graph { graph: part.name.clone(), error };
        let mut model = crate::onnx::read(part.model.clone()).map_err(|error| refused(error.into()))?;
        if let Some(function) = function_like_operator(&model) {
            return Err(refused(ConvertError::Function(function.to_owned())));
        }
        let mut graph = model.graph.take().unwrap_or_default();
        sort_all(&mut graph).map_err(refused)?;
        let described = described_state_pairs(graph.doc_string());
        let described = described.map_err(|bad| refused(ConvertError::Description(bad)))?;
        // What the caller says comes first, then what the file says. Names are only a guess.
        let pairs = if !states.is_empty() {
            states
        } else if !described.is_empty() {
            described
        } else {
            pairs_by_names(&graph).map_err(|rivals| JoinError::Rivals { graph: name.clone(), rivals })?
        };
        check_pairs(&graph, &pairs).map_err(|why| refused(ConvertError::Option(why)))?;
        Ok(Self { name, folder: part.folder.clone(), model, graph, pairs })
    }

    /// Gives an input or an output other dims, and the other end of its state the same.
    pub fn set_dims(&mut self, tensor: &str, dims: &[Dim]) -> Result<()> {
        let is_pair = |pair: &&StatePair| pair.input == tensor || pair.output == tensor;
        let pair = self.pairs.iter().find(is_pair).cloned();
        let values = self.graph.input.iter_mut().chain(&mut self.graph.output);
        let is_meant =
            |name: &str| name == tensor || pair.as_ref().is_some_and(|pair| pair.input == name || pair.output == name);
        let mut found = false;
        for value in values.filter(|value| is_meant(value.name())) {
            let (elem, given) = (value.elem(), ValueInfoProto::tensor("", value.elem(), dims));
            if !value.accepts(&given) {
                return Err(JoinError::Dims {
                    tensor: format!("{}.{}", self.name, value.name()),
                    own: bracketed(&value.dims().unwrap_or_default()),
                    given: bracketed(dims),
                });
            }
            value.set_tensor(elem, dims);
            found = true;
        }
        let unknown = || JoinError::NoTensor {
            graph: self.name.clone(),
            kind: "input or output",
            tensor: tensor.to_owned(),
            has: names(self.graph.input.iter().chain(&self.graph.output)),
        };
        if found { Ok(()) } else { Err(unknown()) }
    }

    /// The name of one of its tensors in the joined graph.
    pub fn full(&self, tensor: &str) -> String {
        format!("{}.{tensor}", self.name)
    }

    pub fn is_state(&self, input: &str) -> bool {
        self.pairs.iter().any(|pair| pair.input == input)
    }

    pub fn opset(&self) -> i64 {
        opset(&self.model)
    }

    /// Refuses its version if other graphs can't be raised to it.
    pub fn check_newest(&self) -> Result<()> {
        check_newest(self.opset()).map_err(|why| JoinError::Opset { graph: self.name.clone(), why })
    }

    /// Raises the version of ONNX's operators, also in its functions.
    pub fn raise(&mut self, to: i64) -> Result<()> {
        let from = self.opset();
        let refused = |why| JoinError::Opset { graph: self.name.clone(), why };
        if from != to {
            raise(&mut self.graph, from, to).map_err(refused)?;
        }
        for function in &mut self.model.functions {
            let from = opset_of(&function.opset_import);
            if from != to {
                raise_function(function, from, to).map_err(refused)?;
            }
            set_opset(&mut function.opset_import, to);
        }
        Ok(())
    }
}

pub struct Names {
    /// The graph's name, which all of its names begin with.
    pub graph: String,
    pub index: usize,
    /// Tensors that have another name than with the prefix: inputs that take an output of another graph.
    pub tensors: HashMap<String, String>,
    pub symbols: HashMap<String, String>,
    /// The functions of the model, as domain, name and overload.
    pub functions: HashSet<(String, String, String)>,
}

impl Names {
    pub fn tensor(&self, name: &str) -> String {
        match self.tensors.get(name) {
            _ if name.is_empty() => String::new(),
            Some(other) => other.clone(),
            None => format!("{}.{name}", self.graph),
        }
    }

    pub fn symbol(&self, name: &str) -> String {
        if let Some(other) = self.symbols.get(name) {
            return other.clone();
        }
        // ONNX Runtime plans memory by equal symbols, so only the batch may have one symbol in all graphs.
        if is_batch_name(name) {
            return name.to_owned();
        }
        match name.strip_prefix("unk__").filter(|_| is_made_up(name)) {
            // The backend knows these names.
            Some(number) => format!("unk__{:03}{number}", self.index + 1),
            None => format!("{}.{name}", self.graph),
        }
    }

    pub fn rename(&self, graph: &mut GraphProto) {
        let sparse = graph.sparse_initializer.iter_mut().filter_map(|tensor| tensor.values.as_mut());
        for tensor in graph.initializer.iter_mut().chain(sparse) {
            tensor.name = Some(self.tensor(tensor.name()));
        }
        for value in graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info) {
            value.name = Some(self.tensor(value.name()));
            self.rename_symbols(value);
        }
        for annotation in &mut graph.quantization_annotation {
            annotation.tensor_name = Some(self.tensor(annotation.tensor_name()));
            for entry in &mut annotation.quant_parameter_tensor_names {
                entry.value = Some(self.tensor(entry.value()));
            }
        }
        for node in &mut graph.node {
            for name in node.input.iter_mut().chain(&mut node.output) {
                *name = self.tensor(name);
            }
            if !node.name().is_empty() {
                node.name = Some(format!("{}.{}", self.graph, node.name()));
            }
            self.rename_call(node);
            node.graphs_mut().for_each(|inner| self.rename(inner));
        }
    }

    /// Renames a function and the functions that it calls. The tensors inside are its own.
    pub fn rename_function(&self, function: &mut FunctionProto) {
        function.name = Some(self.function(function.name()));
        function.node.iter_mut().for_each(|node| self.rename_calls(node));
    }

    fn rename_calls(&self, node: &mut NodeProto) {
        self.rename_call(node);
        node.graphs_mut().flat_map(|inner| &mut inner.node).for_each(|inner| self.rename_calls(inner));
    }

    fn rename_call(&self, node: &mut NodeProto) {
        let called = (node.domain().to_owned(), node.op_type().to_owned(), node.overload().to_owned());
        if self.functions.contains(&called) {
            node.op_type = Some(self.function(node.op_type()));
        }
    }

    fn function(&self, name: &str) -> String {
        format!("{}.{name}", self.graph)
    }

    fn rename_symbols(&self, value: &mut ValueInfoProto) {
        let mut kind = value.r#type.as_mut();
        while let Some(TypeProto { value: Some(of), .. }) = kind {
            let (shape, inner) = match of {
                type_proto::Value::TensorType(tensor) => (tensor.shape.as_mut(), None),
                type_proto::Value::SparseTensorType(tensor) => (tensor.shape.as_mut(), None),
                type_proto::Value::SequenceType(sequence) => (None, sequence.elem_type.as_deref_mut()),
                type_proto::Value::OptionalType(optional) => (None, optional.elem_type.as_deref_mut()),
                type_proto::Value::MapType(map) => (None, map.value_type.as_deref_mut()),
                type_proto::Value::OpaqueType(_) => (None, None),
            };
            for dimension in shape.into_iter().flat_map(|shape| &mut shape.dim) {
                if let Some(Value::DimParam(symbol)) = &mut dimension.value
                    && !symbol.is_empty()
                {
                    *symbol = self.symbol(symbol);
                }
            }
            kind = inner;
        }
    }
}

/// Takes the graph of a part, with new names. Inputs that other graphs give are left out.
pub fn take_graph(part: &mut Read, names: &Names) -> GraphProto {
    let mut graph = std::mem::take(&mut part.graph);
    if !part.folder.is_empty() {
        move_weights(&mut graph, &part.folder);
    }
    // A default value has no effect where a wire is.
    graph.input.retain(|input| !names.tensors.contains_key(input.name()));
    graph.initializer.retain(|tensor| !names.tensors.contains_key(tensor.name()));
    names.rename(&mut graph);
    graph
}

/// Lets the weights in files of their own be found from another folder, which is `folder` above.
fn move_weights(graph: &mut GraphProto, folder: &str) {
    let moved = |entry: &mut StringStringEntryProto| entry.value = Some(format!("{folder}/{}", entry.value()));
    let Ok(()) = each_external(graph, &mut |tensor| {
        tensor.external_data.iter_mut().filter(|entry| entry.key() == "location").for_each(moved);
        Ok::<(), std::convert::Infallible>(())
    });
}

/// Reads `graph.tensor=[batch, 80, 121]`, several of them separated by spaces, commas or nothing.
pub fn dims(text: &str) -> Option<Vec<(String, Vec<Dim>)>> {
    let mut found = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, behind) = rest.split_once("=[")?;
        let (inside, behind) = behind.split_once(']')?;
        let words = inside.split(',').map(str::trim);
        let dim = |word: &str| match word.parse::<i64>() {
            Ok(length) if length >= 0 => Some(Dim::Known(length)),
            Ok(_) => Some(Dim::Open),
            Err(_) if word.is_empty() || word.contains([' ', '[', '=']) => None,
            Err(_) => Some(Dim::Symbol(word.to_owned())),
        };
        let dims: Vec<Dim> =
            if inside.trim().is_empty() { Vec::new() } else { words.map(dim).collect::<Option<_>>()? };
        found.push((Some(name).filter(|name| !name.is_empty() && !name.contains(' '))?.to_owned(), dims));
        rest = behind.trim_start_matches([' ', ',', '\t', '\n']);
    }
    Some(found).filter(|found| !found.is_empty())
}

pub fn set_opset(sets: &mut Vec<OperatorSetIdProto>, version: i64) {
    sets.retain(|set| !is_onnx(set));
    sets.insert(0, OperatorSetIdProto { domain: Some(String::new()), version: Some(version) });
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedGraph {
    pub name: String,
    pub from: GraphFrom,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GraphFrom {
    File(String),
    Builtin { graph: String, options: Vec<String> },
}

/// Reads the words of a list. An error says what is expected.
pub fn graphs<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Vec<ListedGraph>, String> {
    let mut listed: Vec<ListedGraph> = Vec::new();
    for word in words {
        // A path may have the sign as well.
        let named = word.split_once('=').filter(|(name, _)| !name.contains(['/', '.']));
        let source = named.map_or(word, |(_, source)| source);
        let is_builtin = builtin_names().any(|known| known == source);
        if let (Some(ListedGraph { from: GraphFrom::Builtin { options, .. }, .. }), Some(_)) =
            (listed.last_mut(), named)
            && !is_builtin
            && !source.ends_with(".onnx")
        {
            options.push(word.to_owned());
            continue;
        }
        let name = match named {
            Some((name, _)) => name,
            None if is_builtin => source.split(':').next().unwrap_or_default(),
            None => stem(source),
        };
        // A file whose name has a colon must end with .onnx.
        if source.contains(':') && !is_builtin && !source.ends_with(".onnx") {
            let known = builtin_names().collect::<Vec<_>>().join(", ");
            return Err(format!("'{source}' is no built-in graph: {known} are; the name of a file ends with .onnx"));
        }
        if source.is_empty() {
            return Err(format!("a file or a built-in graph is expected, as in NAME=FILE, not '{word}'"));
        }
        let from = if is_builtin {
            GraphFrom::Builtin { graph: source.to_owned(), options: Vec::new() }
        } else {
            GraphFrom::File(source.to_owned())
        };
        listed.push(ListedGraph { name: name.to_owned(), from });
    }
    Ok(listed)
}

fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').map_or(name, |(stem, _)| if stem.is_empty() { name } else { stem })
}

pub type Result<T, E = JoinError> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(
        "'{0}' can't be the name of a graph: letters, digits, '_' and '-' are expected, because '.' ends the name in \
         'graph.tensor'; write NAME=FILE"
    )]
    Name(String),
    #[error("'{0}' can't be the name of a graph, because the tensors of the search have it: write NAME=FILE")]
    Reserved(String),
    #[error("two graphs have the name '{0}': write NAME=FILE for one of them")]
    SameName(String),
    #[error("there is one graph, '{0}', and no search: name at least two graphs")]
    One(String),
    #[error("graph '{graph}': {error}")]
    Graph { graph: String, error: ConvertError },
    /// `why` continues the text after the name.
    #[error("graph '{graph}'{why}")]
    Opset { graph: String, why: String },
    #[error("'{name}' names no graph: 'graph.tensor' is expected, where graph is one of {graphs}")]
    NoGraph { name: String, graphs: String },
    #[error("graph '{graph}' has no {kind} '{tensor}' (it has {has})")]
    NoTensor { graph: String, kind: &'static str, tensor: String, has: String },
    #[error("'{tensor}' is {own} in its graph, and can't be {given}")]
    Dims { tensor: String, own: String, given: String },
    #[error("input '{0}' has two wires: leave one of them out")]
    TwoWires(String),
    #[error("several graphs have an output with the name of input '{input}': write a wire from one of {sources}")]
    ManySources { input: String, sources: String },
    #[error(
        "'{from}' ({of_source}) can't be wired to '{to}' ({of_target}): {why}; write another wire, or list one more \
         graph that converts between them"
    )]
    Disagree { from: String, of_source: String, to: String, of_target: String, why: String },
    #[error(
        "'{to}' is a state of its graph and can't take '{from}': leave the wire out, or, if it is no state, name the states of \
         the graph"
    )]
    IntoState { from: String, to: String },
    #[error(
        "the wire <<<{from}, {to}>>> leads to the same or to an earlier graph, so it is a state, and an input such as '{from}' \
         has no next value: begin the wire at an output, or list the graph of '{to}' later"
    )]
    BackFromInput { from: String, to: String },
    #[error(
        "graph '{graph}': the names of its inputs and outputs can be paired in several ways as states ({}): name the \
         pairs of the graph as <<<{graph}.input, {graph}.output>>> in the states", listed(.rivals)
    )]
    Rivals { graph: String, rivals: Vec<StatePair> },
    #[error(
        "a model of initial states gives the start of state '{0}', but joined graphs can't have one: convert its \
         graph so that its states start at zero"
    )]
    StartsAtModel(String),
    #[error(
        "the model would have no outputs, because wires and states take all of them ({}): name those that responses need as \
         outputs", .0.join(", ")
    )]
    NoOutputs(Vec<String>),
    #[error(
        "the state <<<{input}, {output}>>> has its ends in two graphs: write it as a wire back, <<<{output}, {input}>>>"
    )]
    TwoGraphs { input: String, output: String },
    #[error("output '{0}' would be the next value of two states: give each an output of its own, as by an Identity")]
    TwoStates(String),
    #[error("graphs '{0}' and '{1}' have different versions of the operators of '{2}': export them with the same one")]
    Domain(String, String, String),
    #[error("context of '{input}': {why}")]
    Context { input: String, why: String },
    #[error("search: {0}")]
    Search(String),
    #[error(transparent)]
    Joined(#[from] ConvertError),
}

fn listed(pairs: &[StatePair]) -> String {
    pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<ListedGraph> {
        graphs(text.split_whitespace()).unwrap()
    }

    fn file(name: &str, path: &str) -> ListedGraph {
        ListedGraph { name: name.to_owned(), from: GraphFrom::File(path.to_owned()) }
    }

    fn builtin(name: &str, graph: &str, options: &[&str]) -> ListedGraph {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        ListedGraph { name: name.to_owned(), from: GraphFrom::Builtin { graph: graph.to_owned(), options } }
    }

    #[test]
    fn files_have_the_name_that_is_written_or_their_own() {
        let expected = [file("encoder", "a/encoder.onnx"), file("joint", "x.int8.onnx"), file("c=d", "a/c=d.onnx")];
        assert_eq!(read("a/encoder.onnx joint=x.int8.onnx a/c=d.onnx"), expected);
    }

    #[test]
    fn options_belong_to_the_built_in_graph_before_them() {
        let expected = [builtin("fbank", "fbank:kaldi", &["num_mel_bins=40", "high_freq=-400"]), file("e", "x.onnx")];
        assert_eq!(read("fbank:kaldi num_mel_bins=40 high_freq=-400 e=x.onnx"), expected);
        let expected = [builtin("a", "stft", &["hop=128"]), builtin("b", "istft", &[]), builtin("istft", "istft", &[])];
        assert_eq!(read("a=stft hop=128 b=istft istft"), expected);
    }

    #[test]
    fn a_name_without_a_file_is_refused() {
        assert!(graphs(["encoder="]).unwrap_err().contains("not 'encoder='"));
        let error = graphs(["fbank:kaldy"]).unwrap_err();
        assert!(error.starts_with("'fbank:kaldy' is no built-in graph: fbank:kaldi, mel:nemo,"), "{error}");
        assert_eq!(read("a=b:c.onnx"), [file("a", "b:c.onnx")]);
    }
}
