//! ONNX models: reading and writing, attributes, and small nodes and tensors to add to a graph.
//!
//! The types of [`schema`] are generated from ONNX's own schema and hold every field of it, so that what is not
//! understood survives. Weights in files of their own (`external_data`) are not read here.

/// Made of `proto/onnx.proto` by `build.rs`.
#[allow(clippy::all, rustdoc::all)]
pub mod schema {
    include!(concat!(env!("OUT_DIR"), "/onnx.rs"));
}
pub(crate) mod operators;

use std::fmt;

use bytes::Bytes;
use half::{bf16, f16};
use prost::Message;

use operators::{ShapeRule, StepsRule};
pub use schema::tensor_proto::DataType;
use schema::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, attribute_proto::AttributeType, tensor_shape_proto, type_proto,
};

/// The name of the domain of ONNX's own operators, where it is written out.
const ONNX_DOMAIN: &str = "ai.onnx";
const MICROSOFT_DOMAIN: &str = "com.microsoft";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    Known(i64),
    /// A symbol, such as `batch`.
    Symbol(String),
    Open,
}

impl Dim {
    pub fn known(&self) -> Option<i64> {
        if let Self::Known(length) = self { Some(*length) } else { None }
    }

    /// Whether both may be one length. An exporter may name the same dimension differently, so only numbers count.
    pub fn agrees(&self, other: &Self) -> bool {
        !matches!((self, other), (Self::Known(a), Self::Known(b)) if a != b)
    }

    pub fn symbol(self) -> Option<String> {
        if let Self::Symbol(name) = self { Some(name) } else { None }
    }

    pub fn is_known(&self) -> bool {
        matches!(self, Self::Known(_))
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(length) => write!(f, "{length}"),
            Self::Symbol(name) => f.write_str(name),
            Self::Open => f.write_str("?"),
        }
    }
}

pub fn is_float(elem: i32) -> bool {
    [DataType::Float, DataType::Double, DataType::Float16, DataType::Bfloat16].iter().any(|&float| elem == float as i32)
}

/// Whether elements have one of the types that lengths and tokens have.
pub fn is_integer(elem: i32) -> bool {
    [DataType::Int32, DataType::Int64].iter().any(|&integer| elem == integer as i32)
}

pub fn names<'a>(values: impl IntoIterator<Item = &'a ValueInfoProto>) -> String {
    values.into_iter().map(ValueInfoProto::name).collect::<Vec<_>>().join(", ")
}

pub fn bracketed(dims: &[Dim]) -> String {
    format!("[{}]", dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(", "))
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("it is no ONNX model: {0}")]
    Malformed(#[from] prost::DecodeError),
    #[error("it is no ONNX model: it has no graph")]
    NoGraph,
}

pub fn read(bytes: Bytes) -> Result<ModelProto, ReadError> {
    let model = ModelProto::decode(bytes)?;
    match &model.graph {
        // Protobuf reads almost any bytes as a message of unknown fields.
        Some(graph) if !graph.node.is_empty() || !graph.output.is_empty() => Ok(model),
        _ => Err(ReadError::NoGraph),
    }
}

/// Writes a model without the content of weights that are in files of their own.
pub fn write(model: &ModelProto) -> Vec<u8> {
    if external_files(model).is_empty() {
        return model.encode_to_vec();
    }
    // Only here: a model without such weights is written as it is, without a copy.
    let mut model = model.clone();
    let mut hide = |tensor: &mut TensorProto| -> Result<(), std::convert::Infallible> {
        tensor.raw_data = None;
        Ok(())
    };
    if let Some(graph) = &mut model.graph {
        let Ok(()) = each_external(graph, &mut hide);
    }
    model.encode_to_vec()
}

/// Visits the weights that are in files of their own, also those of graphs inside.
pub fn each_external<E>(
    graph: &mut GraphProto,
    visit: &mut impl FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    // Constants are weights, too: exporters put both into one file.
    let attributes = graph.node.iter_mut().flat_map(|node| &mut node.attribute);
    let constants = attributes.filter_map(|attribute| attribute.t.as_mut());
    let mut weights = graph.initializer.iter_mut().chain(constants).filter(|tensor| is_external(tensor));
    weights.try_for_each(&mut *visit)?;
    graph.node.iter_mut().flat_map(NodeProto::graphs_mut).try_for_each(|graph| each_external(graph, visit))
}

/// The operator's name, if it is ONNX's own or a known one of ONNX Runtime. Else it is empty, because an operator or a
/// function of another domain may do anything, whatever its name is.
fn known_operator<'a>(domain: &str, name: &'a str) -> &'a str {
    match domain {
        "" | ONNX_DOMAIN => name,
        MICROSOFT_DOMAIN if operators::is_of_onnx_runtime(name) => name,
        _ => "",
    }
}

/// A function of the model that can be taken for an operator.
pub fn function_like_operator(model: &ModelProto) -> Option<&str> {
    let mut names = model.functions.iter().map(|function| known_operator(function.domain(), function.name()));
    names.find(|name| !name.is_empty())
}

pub fn opset(model: &ModelProto) -> i64 {
    opset_of(&model.opset_import)
}

pub fn opset_of(sets: &[OperatorSetIdProto]) -> i64 {
    // Without an entry, ONNX means version 1.
    sets.iter().find(|set| is_onnx(set)).map_or(1, OperatorSetIdProto::version)
}

pub fn is_onnx(set: &OperatorSetIdProto) -> bool {
    matches!(set.domain(), "" | ONNX_DOMAIN)
}

impl NodeProto {
    pub fn make(op: &str, name: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Self {
            op_type: Some(op.to_owned()),
            name: Some(name.to_owned()),
            input: owned(inputs),
            output: owned(outputs),
            ..Self::default()
        }
    }

    pub fn with_int(self, name: &str, value: i64) -> Self {
        self.with(name, AttributeType::Int, AttributeProto { i: Some(value), ..AttributeProto::default() })
    }

    pub fn with_tensor(self, name: &str, value: TensorProto) -> Self {
        self.with(name, AttributeType::Tensor, AttributeProto { t: Some(value), ..AttributeProto::default() })
    }

    pub fn with_text(self, name: &str, value: &str) -> Self {
        self.with(name, AttributeType::String, AttributeProto { s: Some(value.into()), ..AttributeProto::default() })
    }

    pub fn with_graph(self, name: &str, value: GraphProto) -> Self {
        self.with(name, AttributeType::Graph, AttributeProto { g: Some(value), ..AttributeProto::default() })
    }

    pub fn with_ints(self, name: &str, values: &[i64]) -> Self {
        self.with(name, AttributeType::Ints, AttributeProto { ints: values.to_vec(), ..AttributeProto::default() })
    }

    fn with(mut self, name: &str, kind: AttributeType, value: AttributeProto) -> Self {
        self.set(AttributeProto { name: Some(name.to_owned()), r#type: Some(kind.into()), ..value });
        self
    }

    pub fn set(&mut self, attribute: AttributeProto) {
        // ONNX allows each attribute once.
        self.remove(attribute.name.clone().as_deref().unwrap_or_default());
        self.attribute.push(attribute);
    }

    pub fn remove(&mut self, name: &str) {
        self.attribute.retain(|known| known.name() != name);
    }

    pub fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|attribute| attribute.name() == name)
    }

    pub fn int(&self, name: &str) -> Option<i64> {
        self.attribute(name).map(AttributeProto::i)
    }

    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attribute(name).map(|attribute| attribute.ints.as_slice())
    }

    pub fn text(&self, name: &str) -> Option<String> {
        self.attribute(name).map(|attribute| String::from_utf8_lossy(attribute.s()).into_owned())
    }

    pub fn graph(&self, name: &str) -> Option<&GraphProto> {
        self.attribute(name).and_then(|attribute| attribute.g.as_ref())
    }

    pub fn graphs(&self) -> impl Iterator<Item = &GraphProto> {
        self.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs))
    }

    pub fn graphs_mut(&mut self) -> impl Iterator<Item = &mut GraphProto> {
        self.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs))
    }

    pub fn input_at(&self, index: usize) -> Option<&str> {
        self.input.get(index).map(String::as_str).filter(|name| !name.is_empty())
    }

    pub fn output_at(&self, index: usize) -> Option<&str> {
        self.output.get(index).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// Sets an input. If the list is too short, the inputs before it are left out.
    pub fn set_input(&mut self, index: usize, name: &str) {
        set(&mut self.input, index, name);
    }

    pub fn set_output(&mut self, index: usize, name: &str) {
        set(&mut self.output, index, name);
    }

    /// The operator's name. It is empty for an operator of an unknown domain.
    pub fn op(&self) -> &str {
        known_operator(self.domain(), self.op_type())
    }

    pub(crate) fn shape_rule(&self) -> ShapeRule {
        operators::find(self.op()).map_or(ShapeRule::Open, |operator| operator.shape)
    }

    pub(crate) fn steps_rule(&self) -> StepsRule {
        operators::find(self.op()).map_or(StepsRule::Unknown, |operator| operator.steps)
    }

    /// Whether it has hidden states, which it passes from step to step.
    pub(crate) fn is_recurrent(&self) -> bool {
        self.steps_rule() == StepsRule::Recurrent
    }

    /// Whether it reads the shape of a tensor alone, and none of its elements.
    pub(crate) fn reads_size(&self) -> bool {
        self.steps_rule() == StepsRule::Size
    }

    /// The operator, with its domain unless that is ONNX's own.
    pub fn operator(&self) -> String {
        match self.domain() {
            "" | ONNX_DOMAIN => self.op_type().to_owned(),
            domain => format!("{domain}.{}", self.op_type()),
        }
    }

    pub fn described(&self) -> String {
        format!("{} '{}'", self.operator(), self.label())
    }

    /// The node's name, or the name of its first output if it has none.
    pub fn label(&self) -> &str {
        // Exporters may leave nodes without names, but an output that something reads has one.
        if self.name().is_empty() { self.output.first().map_or("", String::as_str) } else { self.name() }
    }
}

fn set(names: &mut Vec<String>, index: usize, name: &str) {
    // ONNX leaves out an optional tensor before the last one by an empty name.
    names.resize(names.len().max(index + 1), String::new());
    name.clone_into(&mut names[index]);
}

impl ValueInfoProto {
    pub fn tensor(name: &str, elem: i32, dims: &[Dim]) -> Self {
        let mut made = Self { name: Some(name.to_owned()), ..Self::default() };
        made.set_tensor(elem, dims);
        made
    }

    pub fn set_tensor(&mut self, elem: i32, dims: &[Dim]) {
        use tensor_shape_proto::{Dimension, dimension::Value};
        // An open dimension without a name is one without a value.
        let dim = |dim: &Dim| Dimension {
            value: match dim {
                Dim::Known(length) => Some(Value::DimValue(*length)),
                Dim::Symbol(name) => Some(Value::DimParam(name.clone())),
                Dim::Open => None,
            },
            denotation: None,
        };
        let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
        let tensor = type_proto::Tensor { elem_type: Some(elem), shape: Some(shape) };
        self.r#type = Some(TypeProto { denotation: None, value: Some(type_proto::Value::TensorType(tensor)) });
    }

    pub fn set_dims(&mut self, dims: &[Dim]) {
        self.set_tensor(self.elem(), dims);
    }

    /// The data type of a tensor; 0 for anything else.
    pub fn elem(&self) -> i32 {
        self.as_tensor().map_or(0, type_proto::Tensor::elem_type)
    }

    /// The dimensions of a tensor, if the model states its rank.
    pub fn dims(&self) -> Option<Vec<Dim>> {
        use tensor_shape_proto::{Dimension, dimension::Value};
        let dim = |dim: &Dimension| match &dim.value {
            // Old exporters write -1 for an open dimension.
            Some(Value::DimValue(length)) if *length >= 0 => Dim::Known(*length),
            Some(Value::DimParam(name)) if !name.is_empty() => Dim::Symbol(name.clone()),
            _ => Dim::Open,
        };
        Some(self.as_tensor()?.shape.as_ref()?.dim.iter().map(dim).collect())
    }

    /// Whether its type and dims let it take what `other` gives.
    pub fn accepts(&self, other: &Self) -> bool {
        let dims_agree = match (self.dims(), other.dims()) {
            (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.agrees(b)),
            _ => true,
        };
        self.elem() == other.elem() && dims_agree
    }

    fn as_tensor(&self) -> Option<&type_proto::Tensor> {
        match self.r#type.as_ref()?.value.as_ref()? {
            type_proto::Value::TensorType(tensor) => Some(tensor),
            _ => None,
        }
    }
}

impl ModelProto {
    pub(crate) fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata_props.iter().find(|entry| entry.key() == key).map(StringStringEntryProto::value)
    }

    pub(crate) fn set_metadata(&mut self, key: &str, value: Option<String>) {
        self.metadata_props.retain(|entry| entry.key() != key);
        let entry = |value| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
        self.metadata_props.extend(value.map(entry));
    }
}

pub fn is_external(tensor: &TensorProto) -> bool {
    tensor.data_location() == schema::tensor_proto::DataLocation::External
}

/// A data type as ONNX writes it, such as `FLOAT`.
pub fn type_name(elem: i32) -> &'static str {
    DataType::try_from(elem).unwrap_or(DataType::Undefined).as_str_name()
}

/// Bytes of an element; 0 where elements have no fixed size.
pub fn type_bytes(elem: i32) -> usize {
    match DataType::try_from(elem).unwrap_or(DataType::Undefined) {
        DataType::Double | DataType::Int64 | DataType::Uint64 | DataType::Complex64 => 8,
        DataType::Float | DataType::Int32 | DataType::Uint32 => 4,
        DataType::Float16 | DataType::Bfloat16 | DataType::Int16 | DataType::Uint16 => 2,
        DataType::Int8 | DataType::Uint8 | DataType::Bool => 1,
        _ => 0,
    }
}

/// The files that hold weights of a model, relative to its folder.
pub fn external_files(model: &ModelProto) -> Vec<String> {
    fn collect(graph: &GraphProto, files: &mut Vec<String>) {
        let constants = graph.node.iter().flat_map(|node| &node.attribute).filter_map(|attribute| attribute.t.as_ref());
        for tensor in graph.initializer.iter().chain(constants).filter(|tensor| is_external(tensor)) {
            let location = tensor.external_data.iter().find(|entry| entry.key() == "location");
            // Many weights share one file.
            files.extend(location.map(|entry| entry.value().to_owned()).filter(|file| !files.contains(file)));
        }
        for inner in graph.node.iter().flat_map(NodeProto::graphs) {
            collect(inner, files);
        }
    }
    let mut files = Vec::new();
    if let Some(graph) = &model.graph {
        collect(graph, &mut files);
    }
    files
}

/// How many elements a shape has, up to the largest number.
pub fn element_count(dims: &[i64]) -> i64 {
    dims.iter().fold(1, |count: i64, &dim| count.saturating_mul(dim))
}

pub fn int64s(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(DataType::Int64.into()),
        dims: dims.to_vec(),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

/// The elements of a tensor of numbers or booleans, if the model holds them.
pub fn numbers(tensor: &TensorProto) -> Option<Vec<f64>> {
    if is_external(tensor) && tensor.raw_data.is_none() {
        return None;
    }
    let count = usize::try_from(element_count(&tensor.dims)).ok()?;
    let values = match tensor.raw_data.as_deref().filter(|raw| !raw.is_empty()) {
        Some(raw) => from_raw(tensor.data_type(), raw)?,
        None => from_fields(tensor)?,
    };
    // A shape that the content does not fill says nothing that could be relied on.
    (values.len() == count).then_some(values)
}

fn from_raw(elem: i32, raw: &[u8]) -> Option<Vec<f64>> {
    fn each<const N: usize>(raw: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        raw.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)).collect()
    }
    Some(match DataType::try_from(elem).ok()? {
        DataType::Float => each(raw, |bytes| f32::from_le_bytes(bytes).into()),
        DataType::Double => each(raw, f64::from_le_bytes),
        DataType::Int64 => each(raw, |bytes| i64::from_le_bytes(bytes) as f64),
        DataType::Int32 => each(raw, |bytes| i32::from_le_bytes(bytes).into()),
        DataType::Uint32 => each(raw, |bytes| u32::from_le_bytes(bytes).into()),
        DataType::Int16 => each(raw, |bytes| i16::from_le_bytes(bytes).into()),
        DataType::Uint16 => each(raw, |bytes| u16::from_le_bytes(bytes).into()),
        DataType::Int8 => each(raw, |[byte]| f64::from(byte.cast_signed())),
        DataType::Uint8 | DataType::Bool => each(raw, |[byte]| byte.into()),
        DataType::Float16 => each(raw, |bytes| f16::from_le_bytes(bytes).into()),
        DataType::Bfloat16 => each(raw, |bytes| bf16::from_le_bytes(bytes).into()),
        _ => return None,
    })
}

fn from_fields(tensor: &TensorProto) -> Option<Vec<f64>> {
    let ints = |number: fn(i32) -> f64| tensor.int32_data.iter().map(|&value| number(value)).collect();
    Some(match DataType::try_from(tensor.data_type()).ok()? {
        DataType::Float => tensor.float_data.iter().map(|&value| value.into()).collect(),
        DataType::Double => tensor.double_data.clone(),
        DataType::Int64 => tensor.int64_data.iter().map(|&value| value as f64).collect(),
        DataType::Int32 | DataType::Int16 | DataType::Int8 | DataType::Uint16 | DataType::Uint8 | DataType::Bool => {
            ints(f64::from)
        }
        // ONNX keeps small types in the fields for 32-bit integers.
        DataType::Float16 => ints(|bits| f16::from_bits(bits as u16).into()),
        DataType::Bfloat16 => ints(|bits| bf16::from_bits(bits as u16).into()),
        _ => return None,
    })
}
