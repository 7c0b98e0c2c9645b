//! Shapes for inputs of given sizes, and the values of small tensors such as those that shapes are computed with.
//!
//! Everything is concrete: the caller infers once for each size that it asks about and compares. That needs no algebra
//! and follows whatever arithmetic an exporter wrote. What isn't known stays open; nothing is guessed.

mod arithmetic;
pub mod loops;
pub mod ops;
pub mod shaping;

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::graph::required_inputs;
use crate::onnx::operators::Shape;
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto};
use crate::onnx::{Dim, element_count, numbers};

/// Contents of larger tensors aren't followed.
pub const MOST_ELEMENTS: i64 = 1 << 14;
/// No tensor has more elements or a longer axis. So sums of lengths, and a length times a window, fit an i64. Products of
/// lengths saturate.
const MOST_LENGTH: i64 = 1 << 40;
/// No tensor has more axes.
const MOST_AXES: usize = 64;
/// Turns of loops are followed until they have taken this many tensors, in all loops together: loops in loops would
/// take hours.
const MOST_FOLLOWED: usize = 1 << 18;

/// What is known about a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensor {
    /// The data type; 0 if unknown.
    pub elem: i32,
    /// The shape; that of an element for a sequence.
    pub dims: Option<Vec<i64>>,
    /// The content of a small tensor.
    pub data: Option<Arc<[f64]>>,
    /// For a sequence, how many tensors it has.
    pub length: Option<i64>,
}

impl Tensor {
    /// A tensor of a known shape.
    pub fn shaped(elem: i32, dims: Vec<i64>) -> Self {
        Self { elem, dims: Some(dims), ..Self::default() }
    }

    /// A tensor with a known type and an unknown shape.
    pub fn open(elem: i32) -> Self {
        Self { elem, ..Self::default() }
    }

    /// A tensor with its content, which is dropped if it is large or doesn't fit.
    pub fn with_data(elem: i32, dims: Vec<i64>, data: Vec<f64>) -> Self {
        let fits = element_count(&dims) <= MOST_ELEMENTS && usize::try_from(element_count(&dims)) == Ok(data.len());
        Self { elem, dims: Some(dims), data: fits.then(|| data.into()), length: None }
    }

    /// The tensor, or one of unknown shape where no tensor can have this one.
    fn possible(self) -> Self {
        let is_possible = |dims: &[i64]| {
            let counts = dims.iter().map(|&dim| dim.max(1)).collect::<Vec<_>>();
            dims.len() <= MOST_AXES && dims.iter().all(|&dim| dim >= 0) && element_count(&counts) <= MOST_LENGTH
        };
        if self.dims.as_deref().is_none_or(is_possible) {
            self
        } else {
            Self { length: self.length, ..Self::open(self.elem) }
        }
    }

    /// The content as integers.
    pub fn ints(&self) -> Option<Vec<i64>> {
        self.data.as_ref().map(|data| data.iter().map(|&value| value as i64).collect())
    }

    /// Whether each element is known to have this value.
    pub fn is_full_of(&self, value: f64) -> bool {
        self.data.as_ref().is_some_and(|data| data.iter().all(|&element| element == value))
    }

    /// The only element.
    pub fn scalar(&self) -> Option<f64> {
        match self.data.as_deref() {
            Some(&[value]) => Some(value),
            _ => None,
        }
    }

    fn of_weight(tensor: &TensorProto) -> Self {
        let small = element_count(&tensor.dims) <= MOST_ELEMENTS;
        let data = if small { numbers(tensor) } else { None };
        Self { elem: tensor.data_type(), dims: Some(tensor.dims.clone()), data: data.map(Into::into), length: None }
    }
}

/// What is known about the tensors of a graph, for one size of its inputs.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    known: HashMap<String, Tensor>,
    /// How many tensors the turns of loops have taken, in this graph and those around it.
    followed: Rc<Cell<usize>>,
    /// Nodes whose inputs don't fit together, by name of their first output, and why.
    pub conflicts: Vec<(String, String)>,
}

impl Shapes {
    /// Follows a graph. `inputs` are its inputs as they are; the names of outer graphs are in `outer`.
    pub fn infer(graph: &GraphProto, opset: i64, inputs: HashMap<String, Tensor>, outer: Option<&Self>) -> Self {
        let mut shapes = Self { conflicts: Vec::new(), ..outer.cloned().unwrap_or_default() };
        let weights = graph.initializer.iter();
        shapes.known.extend(weights.map(|weight| (weight.name().to_owned(), Tensor::of_weight(weight).possible())));
        for input in required_inputs(graph) {
            let dims = input.dims().and_then(|dims| dims.iter().map(known).collect());
            let tensor = Tensor { elem: input.elem(), dims, ..Tensor::default() };
            shapes.known.insert(input.name().to_owned(), tensor.possible());
        }
        shapes.known.extend(inputs.into_iter().map(|(name, tensor)| (name, tensor.possible())));
        let declared: HashMap<&str, i32> =
            graph.value_info.iter().chain(&graph.output).map(|value| (value.name(), value.elem())).collect();
        for node in &graph.node {
            let outputs = match shapes.infer_node(node, opset) {
                Ok(outputs) => outputs,
                Err(why) => {
                    shapes.conflicts.push((node.output.first().cloned().unwrap_or_default(), why));
                    Vec::new()
                }
            };
            let mut outputs = outputs.into_iter();
            for name in &node.output {
                let mut tensor = outputs.next().unwrap_or_default().possible();
                if tensor.elem == 0 {
                    tensor.elem = declared.get(name.as_str()).copied().unwrap_or_default();
                }
                if !name.is_empty() {
                    shapes.known.insert(name.clone(), tensor);
                }
            }
        }
        shapes
    }

    /// What is known about these tensors alone, so that a turn of a loop copies no others.
    fn of(&self, names: Vec<String>) -> Self {
        let known = names.into_iter().filter_map(|name| Some((self.known.get(&name)?.clone(), name)));
        Self {
            known: known.map(|(tensor, name)| (name, tensor)).collect(),
            followed: Rc::clone(&self.followed),
            conflicts: Vec::new(),
        }
    }

    /// Whether a turn of a loop with this body may still be followed.
    fn may_turn(&self, body: &GraphProto) -> bool {
        let followed = self.followed.get() + self.known.len() + body.node.len();
        self.followed.set(followed);
        followed <= MOST_FOLLOWED
    }

    /// What is known about a tensor.
    pub fn get(&self, name: &str) -> Tensor {
        self.known.get(name).cloned().unwrap_or_default()
    }

    /// A tensor's shape.
    pub fn dims(&self, name: &str) -> Option<&[i64]> {
        self.known.get(name)?.dims.as_deref()
    }

    fn infer_node(&self, node: &NodeProto, opset: i64) -> Result<Vec<Tensor>, String> {
        let inputs: Vec<Tensor> = node.input.iter().map(|name| self.get(name)).collect();
        match node.shape_rule() {
            Shape::Loop => Ok(loops::run_loop(self, node, &inputs, opset)),
            Shape::Scan => Ok(loops::run_scan(self, node, opset)),
            Shape::If if !inputs.is_empty() => Ok(loops::run_if(self, node, &inputs, opset)),
            _ => ops::infer(node, &inputs, opset),
        }
    }
}

fn known(dim: &Dim) -> Option<i64> {
    match dim {
        Dim::Known(length) => Some(*length),
        _ => None,
    }
}
