//! One of the graphs that are joined.

use bytes::Bytes;

use super::error::JoinError;
use super::opsets::{Kept, raise, raise_function};
use crate::names::pairs_by_names;
use crate::onnx::schema::{GraphProto, ModelProto, OperatorSetIdProto};
use crate::onnx::{function_like_operator, opset, opset_of};
use crate::pairs::{StatePair, check_pairs, described_state_pairs};
use crate::prepared::{ConvertError, sort_all};

/// A model whose graph is joined with others.
#[derive(Clone, Debug)]
pub struct Part {
    /// What its tensors' names begin with.
    pub name: String,
    /// The model. Its weights may be in files of their own.
    pub model: Bytes,
    /// The folder of these files, from the folder of the joined model; empty if it is the same.
    pub folder: String,
}

/// A part that was read.
pub struct Read {
    pub name: String,
    pub folder: String,
    /// Without its graph.
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

/// Sets the version of ONNX's operators.
pub fn set_opset(sets: &mut Vec<OperatorSetIdProto>, version: i64) {
    sets.retain(|set| !is_onnx(set));
    sets.insert(0, OperatorSetIdProto { domain: Some(String::new()), version: Some(version) });
}

pub fn is_onnx(set: &OperatorSetIdProto) -> bool {
    matches!(set.domain(), "" | "ai.onnx")
}
