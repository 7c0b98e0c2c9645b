//! Gives the names of a graph a prefix, so that the names of several graphs differ.

use std::collections::{HashMap, HashSet};

use crate::batch::{is_batch_name, is_made_up};
use crate::onnx::each_external;
use crate::onnx::schema::{
    FunctionProto, GraphProto, NodeProto, StringStringEntryProto, TypeProto, ValueInfoProto,
    tensor_shape_proto::dimension::Value, type_proto,
};

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

/// Lets the weights in files of their own be found from another folder, which is `folder` above.
pub fn move_weights(graph: &mut GraphProto, folder: &str) {
    let moved = |entry: &mut StringStringEntryProto| entry.value = Some(format!("{folder}/{}", entry.value()));
    let Ok(()) = each_external(graph, &mut |tensor| {
        tensor.external_data.iter_mut().filter(|entry| entry.key() == "location").for_each(moved);
        Ok::<(), std::convert::Infallible>(())
    });
}
