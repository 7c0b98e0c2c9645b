//! A graph in the making: nodes and constants with names that a reader of the graph understands.

use crate::onnx::schema::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto};
use crate::onnx::{DataType, Dim, int64s};

/// All operators of these graphs mean the same in later versions.
const OPSET: i64 = 17;
/// The first version of the file format with this opset.
const IR_VERSION: i64 = 8;
const FLOAT: i32 = DataType::Float as i32;
/// The last element, as the end of a `Slice`.
pub const END: i64 = i64::MAX;

pub struct Builder {
    graph: GraphProto,
}

impl Builder {
    pub fn new(name: &str) -> Self {
        Self { graph: GraphProto { name: Some(name.to_owned()), ..GraphProto::default() } }
    }

    /// An input of floats. Dims are separated by spaces, as in `batch samples`.
    pub fn input(&mut self, name: &str, dims: &str) {
        self.graph.input.push(value(name, dims));
    }

    pub fn output(&mut self, name: &str, dims: &str) {
        self.graph.output.push(value(name, dims));
    }

    /// A node that makes `output`, whose name the node gets as well.
    pub fn node(&mut self, op: &str, inputs: &[&str], output: &str) {
        self.add(op, inputs, output, |node| node);
    }

    pub fn along(&mut self, op: &str, axis: i64, inputs: &[&str], output: &str) {
        self.add(op, inputs, output, |node| node.with_int("axis", axis));
    }

    pub fn transpose(&mut self, order: &[i64], input: &str, output: &str) {
        self.add("Transpose", &[input], output, |node| node.with_ints("perm", order));
    }

    /// The length of an axis, as a list of one number.
    pub fn length(&mut self, axis: i64, input: &str, output: &str) {
        self.add("Shape", &[input], output, |node| node.with_int("start", axis).with_int("end", axis + 1));
    }

    /// The part of a tensor between two places of an axis. Both are names of lists of one number.
    pub fn slice(&mut self, axis: i64, input: &str, (start, end): (&str, &str), output: &str) {
        let axis = self.ints(&format!("axis_{axis}"), &[axis]);
        self.node("Slice", &[input, start, end, &axis], output);
    }

    /// A constant list of whole numbers. Its name may be used again for the same list.
    pub fn ints(&mut self, name: &str, values: &[i64]) -> String {
        self.ints_of(name, &[values.len() as i64], values)
    }

    pub fn int(&mut self, name: &str, value: i64) -> String {
        self.ints_of(name, &[], &[value])
    }

    pub fn ints_of(&mut self, name: &str, dims: &[i64], values: &[i64]) -> String {
        self.constant(int64s(name, dims, values))
    }

    /// Constant floats. They are computed in 64 bits.
    pub fn floats(&mut self, name: &str, dims: &[usize], values: &[f64]) -> String {
        let bytes: Vec<u8> = values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect();
        self.constant(TensorProto {
            name: Some(name.to_owned()),
            data_type: Some(FLOAT),
            dims: dims.iter().map(|&dim| dim as i64).collect(),
            raw_data: Some(bytes.into()),
            ..TensorProto::default()
        })
    }

    pub fn float(&mut self, name: &str, value: f64) -> String {
        self.floats(name, &[], &[value])
    }

    pub fn model(self, description: String) -> ModelProto {
        ModelProto {
            ir_version: Some(IR_VERSION),
            producer_name: Some(env!("CARGO_PKG_NAME").to_owned()),
            producer_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            doc_string: Some(description),
            graph: Some(self.graph),
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(OPSET) }],
            ..ModelProto::default()
        }
    }

    fn add(&mut self, op: &str, inputs: &[&str], output: &str, with: impl Fn(NodeProto) -> NodeProto) {
        self.graph.node.push(with(NodeProto::make(op, output, inputs, &[output])));
    }

    fn constant(&mut self, tensor: TensorProto) -> String {
        let name = tensor.name().to_owned();
        if !self.graph.initializer.iter().any(|known| known.name() == name) {
            self.graph.initializer.push(tensor);
        }
        name
    }
}

fn value(name: &str, dims: &str) -> ValueInfoProto {
    let dim = |word: &str| word.parse().map_or_else(|_| Dim::Symbol(word.to_owned()), Dim::Known);
    ValueInfoProto::tensor(name, FLOAT, &dims.split_whitespace().map(dim).collect::<Vec<_>>())
}
