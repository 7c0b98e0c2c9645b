//! One of the graphs that are joined.

use bytes::Bytes;

use super::error::JoinError;
use super::opsets::{Kept, check_newest, raise, raise_function};
use crate::names::pairs_by_names;
use crate::onnx::schema::{GraphProto, ModelProto, OperatorSetIdProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, function_like_operator, opset, opset_of};
use crate::pairs::{StatePair, check_pairs, described_state_pairs};
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
    pub fn new(part: &Part, states: Vec<StatePair>) -> Result<Self, JoinError> {
        let name = part.name.clone();
        let is_part_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        if name.is_empty() || !name.chars().all(is_part_of_name) {
            return Err(JoinError::Name(name));
        }
        let mut model = crate::onnx::read(part.model.clone())
            .map_err(|error| JoinError::Read { graph: part.name.clone(), error })?;
        let refused = |error| JoinError::Graph { graph: part.name.clone(), error };
        if let Some(function) = function_like_operator(&model) {
            return Err(refused(ConvertError::Function(function.to_owned())));
        }
        let mut graph = model.graph.take().unwrap_or_default();
        sort_all(&mut graph).map_err(refused)?;
        let described = described_state_pairs(graph.doc_string());
        let described = described.map_err(|bad| refused(ConvertError::Description(bad)))?;
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
    pub fn set_dims(&mut self, tensor: &str, dims: &[Dim]) -> Result<(), JoinError> {
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
            has: self
                .graph
                .input
                .iter()
                .chain(&self.graph.output)
                .map(|value| value.name())
                .collect::<Vec<_>>()
                .join(", "),
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
    pub fn check_newest(&self) -> Result<(), JoinError> {
        check_newest(self.opset()).map_err(|Kept { why, .. }| JoinError::Opset { graph: self.name.clone(), why })
    }

    /// Raises the version of ONNX's operators, also in its functions.
    pub fn raise(&mut self, to: i64) -> Result<(), JoinError> {
        let from = self.opset();
        let refused = |Kept { node, why }: Kept| match node {
            Some(node) => JoinError::OpsetOfNode { graph: self.name.clone(), node, why },
            None => JoinError::Opset { graph: self.name.clone(), why },
        };
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

pub fn is_onnx(set: &OperatorSetIdProto) -> bool {
    matches!(set.domain(), "" | "ai.onnx")
}
