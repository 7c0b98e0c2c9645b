//! What is known about the steps in a graph: the questions that the rules ask.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use super::found::{Found, Layout, Place, Refusal, Result, UNKNOWN_SHAPE, WHOLE_INPUT, refuse};
use crate::graph::{captured, inputs_of, producers};
use crate::infer::Shapes;
use crate::infer::shaping::permutation;
use crate::infer::tensor::{Tensor, axis_of};
use crate::onnx::element_count;
use crate::onnx::operators::{ShapeRule, StepsRule};
use crate::onnx::schema::{GraphProto, NodeProto};

/// The second length, which tells the steps from fixed axes.
pub const LONG_OVER_SHORT: i64 = 2;
// The third length is beyond the limits that models have, such as a table of 5000 positions. Contents of 256 times 48
// elements are still followed.
pub const FAR_OVER_SHORT: i64 = 256;

pub struct Tracker<'a> {
    pub graph: &'a GraphProto,
    pub opset: i64,
    /// What is known for an input of some length, for a longer one, and for one that is longer than most limits.
    pub short: &'a Shapes,
    pub long: &'a Shapes,
    pub far: &'a Shapes,
    pub producers: HashMap<&'a str, usize>,
    /// Tensors without steps that depend on how many there are.
    pub sized: HashSet<String>,
    /// Whether tensors have the same entries all along an axis.
    uniform: RefCell<HashMap<(String, usize), bool>>,
    /// Why tensors of certain steps can't be used.
    pub certain: HashMap<String, Refusal>,
    /// Tensors that are made of the states which the model has already, and of nothing else that depends on steps.
    pub of_states: HashSet<String>,
    /// The tracker follows the rows of a batch in place of steps. Then no row may need another one.
    pub follows_rows: bool,
    /// It follows the body of a loop, where the last step means that of the turn.
    pub in_body: bool,
    pub found: Found,
    pub refused: Vec<Refusal>,
}

impl<'a> Tracker<'a> {
    /// `places` are the places of the graph's inputs, and of what it takes from outside.
    pub fn new(
        graph: &'a GraphProto,
        opset: i64,
        (short, long, far): (&'a Shapes, &'a Shapes, &'a Shapes),
        places: HashMap<String, Place>,
    ) -> Self {
        let found = Found { places, multiple: 1, ..Found::default() };
        Self {
            graph,
            opset,
            short,
            long,
            far,
            producers: producers(graph),
            sized: HashSet::new(),
            uniform: RefCell::default(),
            certain: HashMap::new(),
            of_states: HashSet::new(),
            follows_rows: false,
            in_body: false,
            found,
            refused: Vec::new(),
        }
    }

    pub fn place(&self, name: &str) -> Place {
        self.found.places.get(name).copied().unwrap_or(Place::Free)
    }

    pub fn tensor(&self, name: &str) -> Tensor {
        self.short.get(name)
    }

    pub fn dims(&self, name: &str) -> Option<&'a [i64]> {
        self.short.dims(name)
    }

    pub fn rank(&self, node: &NodeProto, index: usize) -> Result<usize> {
        let name = node.input_at(index).unwrap_or_default();
        let unknown = || refuse(node, format!("reads '{name}' of unknown shape"), UNKNOWN_SHAPE);
        self.dims(name).map(<[i64]>::len).ok_or_else(unknown)
    }

    /// Whether a tensor without steps has the same entry for each step, however many there are. `axis` is the axis that meets
    /// the steps, if the tensor has one.
    pub fn is_steady(&self, name: &str, axis: Option<usize>) -> bool {
        let Some(dims) = self.dims(name) else { return !self.sized.contains(name) && axis.is_none() };
        // An axis of 1 has one entry for all steps.
        let axis = axis.filter(|&axis| dims.get(axis).is_some_and(|&dim| dim != 1));
        let Some(axis) = axis else { return !self.sized.contains(name) };
        let key = (name.to_owned(), axis);
        // Graphs with very many paths to one tensor would be walked through again for each path.
        let known = self.uniform.borrow().get(&key).copied();
        known.unwrap_or_else(|| {
            let is_uniform = self.is_uniform(name, axis);
            self.uniform.borrow_mut().insert(key, is_uniform);
            is_uniform
        })
    }

    /// Whether a tensor has the same entries all along an axis, whatever its length.
    fn is_uniform(&self, name: &str, axis: usize) -> bool {
        let (short, long, far) = (self.short.get(name), self.long.get(name), self.far.get(name));
        let entries = |tensor: &Tensor| {
            let (dims, data) = (tensor.dims.as_deref()?, tensor.data.as_deref()?);
            let inner = usize::try_from(element_count(dims.get(axis + 1..)?)).ok()?;
            let length = usize::try_from(*dims.get(axis)?).ok()?;
            if inner == 0 || length == 0 {
                return None;
            }
            let mut first = Vec::new();
            for block in data.chunks(inner * length) {
                let mut entries = block.chunks(inner);
                let entry = entries.next()?;
                if entries.any(|other| other != entry) {
                    return None;
                }
                first.extend_from_slice(entry);
            }
            Some(first)
        };
        if short.data.is_some() && long.data.is_some() {
            // The contents of large tensors aren't followed for long inputs, but their sources are.
            let is_same_far = match far.data {
                Some(_) => entries(&far) == entries(&short),
                None => self.sources_are_steady(name, axis) == Some(true),
            };
            let (short, long) = (entries(&short), entries(&long));
            return short.is_some() && short == long && is_same_far;
        }
        self.sources_are_steady(name, axis).unwrap_or(false)
    }

    /// Whether every source of a tensor is steady, if its operator repeats, moves or joins elements, or treats them one by one.
    /// `None` for any other operator.
    fn sources_are_steady(&self, name: &str, axis: usize) -> Option<bool> {
        let node = self.producers.get(name).map(|&index| &self.graph.node[index])?;
        let rank = self.dims(name)?.len();
        let source_axis = |source: &str| (self.dims(source)?.len() + axis).checked_sub(rank);
        match node.steps_rule() {
            StepsRule::Expand => node.input.first().map(|from| self.is_steady(from, source_axis(from))),
            StepsRule::Transpose => {
                let from = *permutation(node, rank).get(axis)?;
                node.input.first().map(|name| self.is_steady(name, Some(from)))
            }
            StepsRule::Concat if axis_of(node.int("axis").unwrap_or(0), rank).is_ok_and(|joined| joined != axis) => {
                Some(node.input.iter().all(|source| self.is_steady(source, Some(axis))))
            }
            StepsRule::ElementWise => Some(node.input.iter().all(|source| self.is_steady(source, source_axis(source)))),
            _ => (node.shape_rule() == ShapeRule::ConstantOfShape).then_some(true),
        }
    }

    pub fn depends_on_length(&self, node: &NodeProto, name: &str) -> bool {
        let (short, long, far) = (self.short.get(name), self.long.get(name), self.far.get(name));
        let differs = |other: &Tensor| short.data.is_some() && other.data.is_some() && short.data != other.data;
        if short.dims != long.dims || differs(&long) || differs(&far) {
            return true;
        }
        // All three are known and equal, so no further look at the sources is needed.
        if short.data.is_some() && long.data.is_some() && far.data.is_some() {
            return false;
        }
        let reads_length =
            |input: &String| self.sized.contains(input) || (node.reads_size() && self.place(input) != Place::Free);
        node.input.iter().any(reads_length) || node.graphs().flat_map(captured).any(|name| self.sized.contains(&name))
    }

    pub fn is_of_states(&self, node: &NodeProto) -> bool {
        inputs_of(node).iter().all(|name| self.place(name) == Place::Free || self.of_states.contains(name))
    }

    /// Refuses a node if one of these tensors depends on how many steps there are.
    pub fn check_not_sized(&self, node: &NodeProto, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<()> {
        let Some(name) = names.into_iter().find(|name| self.sized.contains(name.as_ref())) else { return Ok(()) };
        let why = format!("takes '{}', which depends on the length of the whole input", name.as_ref());
        Err(refuse(node, why, WHOLE_INPUT))
    }
}

/// The layout of the first input; the others must not depend on steps.
pub fn first(node: &NodeProto, places: &[Place]) -> Result<Layout> {
    match places {
        [Place::At(layout), others @ ..] if others.iter().all(|&place| place == Place::Free) => Ok(*layout),
        _ => Err(refuse(node, "takes its parameters from the steps", WHOLE_INPUT)),
    }
}
