//! Follows the steps of an input through a graph: which tensors carry them on which axis, and where a node needs
//! more than the steps so far.
//!
//! Rule: an operator that isn't known to treat steps one by one, or to need earlier ones only in a way that a state can
//! hold, is refused. Nothing is guessed.

mod body;
mod mixing;
mod moves;
mod place;
mod products;
mod recurrent;
mod refusal;
mod rules;
mod turns;
mod windows;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use crate::graph::{captured, inputs_of, producers, required_inputs};
use crate::infer::loops::scan_counts;
use crate::infer::shaping::{axis_of, permutation};
use crate::infer::{Shapes, Tensor};
use crate::onnx::operators::{Shape, Steps};
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{Dim, element_count};

pub use moves::ONE_STEP;
pub use place::{Layout, Place};
use refusal::ONE_LENGTH;
pub use refusal::{Hint, Refusal, Refusals};
pub use rules::CHECKER;

/// A place where a state takes over what one run had to itself.
#[derive(Clone, Debug, PartialEq)]
pub enum Cut {
    /// `LSTM`, `GRU`, `RNN` and their like: node.
    Recurrent { node: usize },
    /// The states of a `Scan`.
    Scan { node: usize },
    /// Carried values of a `Loop`, counted from 0.
    Loop { node: usize, carried: Vec<usize> },
    /// Padding in front of the steps: the `frames` last steps of the node's first input are kept for the next run. A `Pad`
    /// leaves out the `cropped` last steps.
    Frames { node: usize, axis: usize, frames: i64, cropped: i64, fill: f64 },
    /// A tensor joined in front of the steps: input `input` of a `Concat`.
    Prefix { node: usize, input: usize, axis: usize, frames: i64 },
    /// A `Slice` that removes what padding added behind the last step.
    Crop { node: usize },
}

impl Cut {
    /// The node that it changes.
    pub const fn node(&self) -> usize {
        match *self {
            Self::Recurrent { node }
            | Self::Scan { node }
            | Self::Loop { node, .. }
            | Self::Frames { node, .. }
            | Self::Prefix { node, .. }
            | Self::Crop { node } => node,
        }
    }

    /// Whether the node passes something from step to step. A loop without states does the same in each turn.
    pub fn makes_state(&self, graph: &GraphProto) -> bool {
        match self {
            Self::Recurrent { .. } | Self::Frames { .. } | Self::Prefix { .. } => true,
            Self::Scan { node } => scan_counts(&graph.node[*node]).0 > 0,
            Self::Loop { carried, .. } => !carried.is_empty(),
            Self::Crop { .. } => false,
        }
    }
}

/// What was found in a graph.
#[derive(Clone, Debug, Default)]
pub struct Found {
    pub cuts: Vec<Cut>,
    /// Where each tensor carries the steps.
    pub places: HashMap<String, Place>,
    /// The length of a request must be a multiple of this.
    pub multiple: i64,
    /// Nodes that take one quantization scale over all steps.
    pub quantized: Vec<String>,
    /// How many recurrences and windows the steps had reached when the graph ended or a node was in the way.
    pub reached: usize,
    /// Nodes that pass a state from step to step, refused ones too. Not those that start at a state that the model already
    /// has.
    pub recurrences: Vec<usize>,
    /// A layer starts at a state that the model already has.
    pub goes_on: bool,
    /// The first node in the way. What is found behind it rests on guesses.
    pub stopped_at: Option<usize>,
}

impl Found {
    /// The length of a request must be a multiple of this, too.
    fn add_multiple(&mut self, steps: i64) {
        self.multiple = self.multiple.saturating_mul(steps / common_divisor(self.multiple, steps).max(1));
    }
}

/// The largest number that divides both.
pub const fn common_divisor(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Follows the steps through a graph and the graphs inside it.
pub struct Tracker<'a> {
    graph: &'a GraphProto,
    opset: i64,
    /// What is known for an input of some length, for a longer one, and for one that is longer than most limits.
    short: &'a Shapes,
    long: &'a Shapes,
    far: &'a Shapes,
    producers: HashMap<&'a str, usize>,
    /// Tensors without steps that depend on how many there are.
    sized: HashSet<String>,
    /// Whether tensors have the same entries all along an axis.
    uniform: RefCell<HashMap<(String, usize), bool>>,
    /// Why tensors of certain steps can't be used.
    certain: HashMap<String, Refusal>,
    /// Tensors that are made of the states which the model has already, and of nothing else that depends on steps.
    pub of_states: HashSet<String>,
    /// The tracker follows the rows of a batch in place of steps. Then no row may need another one.
    pub follows_rows: bool,
    /// It follows the body of a loop, where the last step means that of the turn.
    in_body: bool,
    pub found: Found,
    /// Nodes in the way, in the order of the graph.
    refused: Vec<Refusal>,
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

    /// Follows the steps to the outputs.
    pub fn run(&mut self) -> Result<(), Refusals> {
        let mut reached = None;
        for (index, node) in self.graph.node.iter().enumerate() {
            let followed = self.node(index, node).and_then(|places| self.check_dims(node, places));
            let places = match followed {
                Ok(places) => places,
                Err(refusal) => {
                    reached.get_or_insert(self.found.reached);
                    self.found.stopped_at.get_or_insert(index);
                    if !self.refused.contains(&refusal) {
                        self.refused.push(refusal);
                    }
                    node.output.iter().map(|name| self.likely_place(name)).collect()
                }
            };
            for (output, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                let place = places.get(output).copied().unwrap_or(Place::Free);
                if place == Place::Free && self.depends_on_length(node, name) {
                    self.sized.insert(name.clone());
                }
                if place == Place::Free {
                    // So that no later question goes back through many nodes.
                    let rank = self.dims(name).map_or(0, <[i64]>::len);
                    (0..rank).for_each(|axis| _ = self.is_steady(name, Some(axis)));
                }
                if place == Place::Last && self.is_of_states(node) {
                    self.of_states.insert(name.clone());
                }
                if place == Place::Certain {
                    let refusal = node.input.iter().find_map(|input| self.certain.get(input)).cloned();
                    self.certain.insert(name.clone(), refusal.unwrap_or_else(|| moves::certain(node)));
                }
                self.found.places.insert(name.clone(), place);
            }
        }
        let of_outputs = self.graph.output.iter().filter_map(|value| self.certain.get(value.name()).cloned());
        for refusal in of_outputs {
            if !self.refused.contains(&refusal) {
                self.refused.push(refusal);
            }
        }
        self.found.reached = reached.unwrap_or(self.found.reached);
        Refusals::new(std::mem::take(&mut self.refused)).map_or(Ok(()), Err)
    }

    /// Refuses an output of the graph that isn't the steps alone, or that has no steps and depends on how many there are.
    pub fn check_outputs(&self) -> Result<(), Refusal> {
        for name in self.graph.output.iter().map(ValueInfoProto::name) {
            let why = match self.place(name) {
                Place::At(layout) if layout.is_padded() => "has padding beside its steps",
                Place::Sequence { .. } => "is a sequence of steps",
                _ => continue,
            };
            let output = NodeProto::make("output", name, &[], &[]);
            return Err(refuse(&output, why, "give out a tensor that has an entry for each step"));
        }
        let Some(value) = self.graph.output.iter().find(|value| self.sized.contains(value.name())) else {
            return Ok(());
        };
        let producer = self.producers.get(value.name()).map(|&index| self.graph.node[index].clone());
        let node = producer.unwrap_or_else(|| NodeProto::make("output", value.name(), &[], &[]));
        Err(refuse(
            &node,
            format!("gives '{}', which depends on the length of the whole input", value.name()),
            rules::WHOLE_INPUT,
        ))
    }

    /// Refuses outputs with an axis beside the steps whose length depends on how many steps there are.
    fn check_dims(&self, node: &NodeProto, places: Vec<Place>) -> Result<Vec<Place>, Refusal> {
        for (name, place) in node.output.iter().zip(&places) {
            let axis_of_steps = match place {
                Place::At(layout) => Some(layout.axis),
                Place::Last => None,
                _ => continue,
            };
            let Some(short) = self.short.dims(name) else { continue };
            for other in [self.long, self.far] {
                let Some(other) = other.dims(name) else { continue };
                let differs = |axis: usize| Some(axis) != axis_of_steps && other.get(axis) != short.get(axis);
                if other.len() != short.len() || (0..short.len()).any(differs) {
                    let why = format!("makes '{name}', whose other axes depend on the length of the whole input");
                    return Err(refuse(node, why, rules::WHOLE_INPUT));
                }
            }
        }
        Ok(places)
    }

    /// Where an output of a node in the way would have the steps, so that the nodes behind it can be looked at: on the
    /// only axis that has their length.
    fn likely_place(&self, name: &str) -> Place {
        let (Some(short), Some(long)) = (self.short.dims(name), self.long.dims(name)) else { return Place::Free };
        let mut axes = (0..short.len()).filter(|&axis| long.get(axis).is_some_and(|&long| long != short[axis]));
        match (axes.next(), axes.next()) {
            (Some(axis), None) => Place::At(Layout::clean(axis, short[axis])),
            _ => Place::Free,
        }
    }

    fn node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let certain = |name: &String| self.certain.get(name).cloned();
        if let Some(refusal) = node.graphs().flat_map(captured).find_map(|name| certain(&name)) {
            return Err(refusal);
        }
        let rule = node.steps_rule();
        let is_loop = matches!(rule, Steps::Loop | Steps::Scan | Steps::If);
        if let Some(refusal) = node.input.iter().find_map(certain)
            && !node.reads_size()
        {
            let others = |name: &String| matches!(self.place(name), Place::Free | Place::Certain);
            let stays = !is_loop && node.input.iter().all(others);
            return if stays { Ok(vec![Place::Certain; node.output.len()]) } else { Err(refusal) };
        }
        let reads = |name: &String| self.place(name) != Place::Free;
        if self.follows_rows
            && is_loop
            && (node.input.iter().any(reads) || node.graphs().flat_map(captured).any(|name| reads(&name)))
        {
            return Err(refuse(
                node,
                "has the rows in its body, where they aren't followed",
                "export the model with an open batch",
            ));
        }
        match rule {
            Steps::Loop => return self.loop_node(index, node),
            Steps::Scan => return self.scan_node(index, node),
            Steps::If => return self.if_node(index, node),
            _ if node.graphs().flat_map(captured).any(|name| reads(&name)) => return Err(rules::unknown(node)),
            _ => {}
        }
        let places: Vec<Place> = node.input.iter().map(|name| self.place(name)).collect();
        if places.iter().all(|&place| place == Place::Free) || node.reads_size() {
            return Ok(vec![Place::Free; node.output.len()]);
        }
        if places.iter().any(|place| matches!(place, Place::At(_))) {
            self.check_shapes(node)?;
        }
        rules::apply(self, index, node, &places)
    }

    fn is_of_states(&self, node: &NodeProto) -> bool {
        inputs_of(node).iter().all(|name| self.place(name) == Place::Free || self.of_states.contains(name))
    }

    /// Refuses a node whose shapes fit together for one length only.
    fn check_shapes(&self, node: &NodeProto) -> Result<(), Refusal> {
        let output = node.output.first().map_or("", String::as_str);
        let of = |shapes: &Shapes| shapes.conflicts.iter().find(|(name, _)| name == output).map(|(_, why)| why.clone());
        match of(self.short).or_else(|| of(self.long)) {
            Some(why) => {
                // Their steps may have another name.
                let is_open = |input: &&ValueInfoProto| {
                    let dims = input.dims().unwrap_or_default();
                    self.place(input.name()) == Place::Free && dims.iter().any(|dim| !matches!(dim, Dim::Known(_)))
                };
                let open: Vec<&str> = required_inputs(self.graph).filter(is_open).map(ValueInfoProto::name).collect();
                let (help, hint) = if open.is_empty() {
                    ("export the model with a dynamic time axis".to_owned(), None)
                } else {
                    let help =
                        format!("if {} has steps, too, name the axes of all inputs that have them", open.join(" or "));
                    (help, Some(Hint::Time))
                };
                let refusal = refuse(node, format!("{ONE_LENGTH} ({why})"), &help);
                Err(Refusal { hint, ..refusal })
            }
            None => Ok(()),
        }
    }

    pub fn place(&self, name: &str) -> Place {
        self.found.places.get(name).copied().unwrap_or(Place::Free)
    }

    fn tensor(&self, name: &str) -> Tensor {
        self.short.get(name)
    }

    fn dims(&self, name: &str) -> Option<&'a [i64]> {
        self.short.dims(name)
    }

    fn rank(&self, node: &NodeProto, index: usize) -> Result<usize, Refusal> {
        let name = node.input_at(index).unwrap_or_default();
        self.dims(name)
            .map(<[i64]>::len)
            .ok_or_else(|| refuse(node, format!("reads '{name}' of unknown shape"), UNKNOWN_SHAPE))
    }

    fn depends_on_length(&self, node: &NodeProto, name: &str) -> bool {
        let (short, long, far) = (self.short.get(name), self.long.get(name), self.far.get(name));
        let differs = |other: &Tensor| short.data.is_some() && other.data.is_some() && short.data != other.data;
        if short.dims != long.dims || differs(&long) || differs(&far) {
            return true;
        }
        if short.data.is_some() && long.data.is_some() && far.data.is_some() {
            return false;
        }
        let reads_length =
            |input: &String| self.sized.contains(input) || (node.reads_size() && self.place(input) != Place::Free);
        node.input.iter().any(reads_length) || node.graphs().flat_map(captured).any(|name| self.sized.contains(&name))
    }

    /// Whether a tensor without steps says the same to each step, whatever their number. `axis` is the axis that
    /// meets the steps, if the tensor has one.
    pub fn is_steady(&self, name: &str, axis: Option<usize>) -> bool {
        let Some(dims) = self.dims(name) else { return !self.sized.contains(name) && axis.is_none() };
        let axis = axis.filter(|&axis| dims.get(axis).is_some_and(|&dim| dim != 1));
        match axis {
            None => !self.sized.contains(name),
            Some(axis) => {
                let key = (name.to_owned(), axis);
                let known = self.uniform.borrow().get(&key).copied();
                known.unwrap_or_else(|| {
                    let is_uniform = self.is_uniform(name, axis);
                    self.uniform.borrow_mut().insert(key, is_uniform);
                    is_uniform
                })
            }
        }
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
            // Of a long input, large tensors aren't followed. What they are computed from is.
            let is_same_far = match far.data {
                Some(_) => entries(&far) == entries(&short),
                None => self.sources_are_steady(name, axis) == Some(true),
            };
            let (short, long) = (entries(&short), entries(&long));
            return short.is_some() && short == long && is_same_far;
        }
        self.sources_are_steady(name, axis).unwrap_or(false)
    }

    /// Whether all is steady that a tensor is made of, if its operator repeats, moves or joins elements, or treats them one
    /// by one. `None` if another operator makes it.
    fn sources_are_steady(&self, name: &str, axis: usize) -> Option<bool> {
        let node = self.producers.get(name).map(|&index| &self.graph.node[index])?;
        let rank = self.dims(name)?.len();
        let source_axis = |source: &str| (self.dims(source)?.len() + axis).checked_sub(rank);
        match node.steps_rule() {
            Steps::Expand => node.input.first().map(|from| self.is_steady(from, source_axis(from))),
            Steps::Transpose => {
                let from = *permutation(node, rank).get(axis)?;
                node.input.first().map(|name| self.is_steady(name, Some(from)))
            }
            Steps::Concat if axis_of(node.int("axis").unwrap_or(0), rank).is_ok_and(|joined| joined != axis) => {
                Some(node.input.iter().all(|source| self.is_steady(source, Some(axis))))
            }
            Steps::ElementWise => Some(node.input.iter().all(|source| self.is_steady(source, source_axis(source)))),
            _ => (node.shape_rule() == Shape::ConstantOfShape).then_some(true),
        }
    }
}

const UNKNOWN_SHAPE: &str = "run ONNX's shape inference on the model, or export it with a newer exporter";

/// A refusal of a node.
pub fn refuse(node: &NodeProto, why: impl Into<String>, help: &str) -> Refusal {
    let (node, operator) = (node.label().to_owned(), node.operator());
    Refusal { node, operator, why: why.into(), help: help.to_owned(), hint: None, mixes: false }
}
