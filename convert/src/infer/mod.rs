//! Shapes for inputs of given sizes, and the values of small tensors such as those that shapes are computed with.
//!
//! Everything is concrete: the caller infers once for each size that it asks about and compares. That needs no algebra
//! and follows whatever arithmetic an exporter wrote. What isn't known stays open; nothing is guessed.

mod arithmetic;
pub mod loops;
pub mod ops;
pub mod shaping;

use std::collections::HashMap;
use std::sync::Arc;

use crate::graph::required_inputs;
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto};
use crate::onnx::{Dim, element_count, numbers};

/// Contents of larger tensors aren't followed.
const MOST_ELEMENTS: i64 = 1 << 14;

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

    /// The content as integers.
    pub fn ints(&self) -> Option<Vec<i64>> {
        self.data.as_ref().map(|data| data.iter().map(|&value| value as i64).collect())
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
    /// Nodes whose inputs don't fit together, by name of their first output, and why.
    pub conflicts: Vec<(String, String)>,
}

impl Shapes {
    /// Follows a graph. `inputs` are its inputs as they are; the names of outer graphs are in `outer`.
    pub fn infer(graph: &GraphProto, opset: i64, inputs: HashMap<String, Tensor>, outer: Option<&Self>) -> Self {
        let mut shapes =
            Self { known: outer.map(|outer| outer.known.clone()).unwrap_or_default(), conflicts: Vec::new() };
        shapes
            .known
            .extend(graph.initializer.iter().map(|weight| (weight.name().to_owned(), Tensor::of_weight(weight))));
        for input in required_inputs(graph) {
            let dims = input.dims().and_then(|dims| dims.iter().map(known).collect());
            shapes.known.insert(input.name().to_owned(), Tensor { elem: input.elem(), dims, ..Tensor::default() });
        }
        shapes.known.extend(inputs);
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
                let mut tensor = outputs.next().unwrap_or_default();
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
        match node.op() {
            "Loop" => Ok(loops::run_loop(self, node, &inputs, opset)),
            "Scan" => Ok(loops::run_scan(self, node, opset)),
            "If" if !inputs.is_empty() => Ok(loops::run_if(self, node, &inputs, opset)),
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
