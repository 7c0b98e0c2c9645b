//! Raises the version of ONNX's operators that a graph uses, because all graphs of a model have one.
//!
//! [`CHANGES`] lists the operators whose nodes can't stay as they are, from version 7 on. All other changes of ONNX
//! leave the meaning of a node as it was: they add types, attributes with a default, or optional inputs.

use crate::graph::Names;
use crate::onnx::schema::{FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::onnx::{DataType, int64s};

/// The oldest version from which nodes are raised. Before it, operators had attributes for broadcasting.
const OLDEST: i64 = 7;
const NEWEST: i64 = 28;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// These attributes became inputs, in this order from input 1.
    Inputs(&'static [&'static str]),
    /// `min` and `max`, or `pads` and `value`, became inputs; the last two are numbers of the tensor's type.
    Numbers(&'static [&'static str]),
    /// `axis` became input 2, and has another default.
    DftAxis,
    /// It doesn't flatten its input any more.
    Softmax,
    /// Parts of equal size need their number.
    NumOutputs,
    /// The ratio of a training is no attribute any more.
    Ratio,
    /// One mean for each feature can't be turned off any more.
    Spatial,
    /// The outputs of a training have another meaning.
    OneOutput,
    Renamed(&'static str),
    /// The values of `mode` have other names.
    Modes(&'static [(&'static str, &'static str)]),
    /// Without this attribute, it means something else now.
    Default(&'static str, &'static str),
    Gone,
}

const CHANGES: &[(i64, &[&str], Change)] = &[
    (9, &["BatchNormalization"], Change::Spatial),
    (9, &["Scan", "Upsample"], Change::Gone),
    (10, &["Slice"], Change::Inputs(&["starts", "ends", "axes"])),
    (10, &["TopK"], Change::Inputs(&["k"])),
    (10, &["Upsample"], Change::Gone),
    (11, &["Clip"], Change::Numbers(&["min", "max"])),
    (11, &["Pad"], Change::Numbers(&["pads", "value"])),
    (11, &["Resize"], Change::Gone),
    (11, &["Scatter"], Change::Renamed("ScatterElements")),
    (12, &["Dropout"], Change::Ratio),
    (13, &["Softmax", "LogSoftmax", "Hardmax"], Change::Softmax),
    (13, &["Squeeze", "Unsqueeze", "ReduceSum"], Change::Inputs(&["axes"])),
    (13, &["Split"], Change::Inputs(&["split"])),
    (14, &["BatchNormalization"], Change::OneOutput),
    (16, &["RoiAlign"], Change::Default("coordinate_transformation_mode", "output_half_pixel")),
    (18, &["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"], Change::Inputs(&["axes"])),
    (18, &["ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare"], Change::Inputs(&["axes"])),
    (18, &["Split"], Change::NumOutputs),
    (20, &["DFT"], Change::DftAxis),
    (20, &["GridSample"], Change::Modes(&[("bilinear", "linear"), ("bicubic", "cubic")])),
    (21, &["GroupNormalization"], Change::Gone),
    (24, &["Attention"], Change::OneOutput),
];

/// Raises the nodes of a graph and of the graphs inside it. The text of the error follows the graph's name.
pub fn raise(graph: &mut GraphProto, from: i64, to: i64) -> Result<(), String> {
    if from < OLDEST {
        return Err(format!(
            " has opset {from}, and nodes can be raised from opset {OLDEST} on: export it with opset {OLDEST} or a later one"
        ));
    }
    check_newest(to)?;
    let names = &mut Names::of(graph);
    raise_graph(graph, (from, to), names)
}

pub fn raise_function(function: &mut FunctionProto, from: i64, to: i64) -> Result<(), String> {
    let value = |name: &String| ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() };
    let mut graph = GraphProto {
        node: std::mem::take(&mut function.node),
        input: function.input.iter().map(value).collect(),
        ..GraphProto::default()
    };
    let raised = raise(&mut graph, from, to);
    function.node = graph.node;
    raised
}

/// Refuses a version to which nodes of other graphs can't be raised.
pub fn check_newest(version: i64) -> Result<(), String> {
    if version <= NEWEST {
        return Ok(());
    }
    Err(format!(" has opset {version}, and nodes can be raised to opset {NEWEST} at most: export it with an older one"))
}

fn raise_graph(graph: &mut GraphProto, versions: (i64, i64), names: &mut Names) -> Result<(), String> {
    let nodes = std::mem::take(&mut graph.node);
    let mut raised = Raised { nodes: Vec::with_capacity(nodes.len()), names };
    for mut node in nodes {
        for inner in node.graphs_mut() {
            raise_graph(inner, versions, raised.names)?;
        }
        raised.node(node, versions, graph)?;
    }
    graph.node = raised.nodes;
    Ok(())
}

struct Raised<'a> {
    nodes: Vec<NodeProto>,
    names: &'a mut Names,
}

impl Raised<'_> {
    fn node(&mut self, mut node: NodeProto, (from, to): (i64, i64), graph: &GraphProto) -> Result<(), String> {
        let mut behind = Vec::new();
        for &(version, operators, change) in CHANGES {
            // Operators of other domains have versions of their own. A change may have renamed the node.
            let is_changed = matches!(node.domain(), "" | "ai.onnx") && operators.contains(&node.op_type());
            if version <= from || version > to || !is_changed {
                continue;
            }
            let (described, operator) = (node.described(), node.operator());
            let kept = |why: &str| {
                format!(": {described} {why}; opset {version} changed {operator}: export the graph with opset {to}")
            };
            if node.attribute.iter().any(|attribute| !attribute.ref_attr_name().is_empty()) {
                return Err(kept("takes an attribute of its function"));
            }
            match change {
                Change::Inputs(attributes) => self.inputs(&mut node, attributes, 1),
                Change::Numbers(attributes) => {
                    let elem = elem_of(graph, node.input_at(0));
                    self.numbers(&mut node, attributes, elem);
                }
                Change::DftAxis => {
                    let axis = int64s("", &[], &[node.int("axis").unwrap_or(1)]);
                    node.remove("axis");
                    self.constant(&mut node, 2, axis);
                }
                Change::Softmax => behind.extend(self.softmax(&mut node)),
                Change::NumOutputs => {
                    if node.input_at(1).is_none() {
                        let count = node.output.len() as i64;
                        node = node.with_int("num_outputs", count);
                    }
                }
                Change::Ratio => {
                    if node.output_at(1).is_some() {
                        return Err(kept("has its mask as an output"));
                    }
                    node.remove("ratio");
                }
                Change::Spatial => {
                    if node.int("spatial") == Some(0) {
                        return Err(kept("has a mean for each element"));
                    }
                    node.remove("spatial");
                }
                Change::OneOutput => {
                    if node.named_outputs().count() > 1 {
                        return Err(kept("has more outputs than one"));
                    }
                }
                Change::Renamed(name) => node.op_type = Some(name.to_owned()),
                Change::Modes(renamed) => {
                    let mode = node.text("mode").unwrap_or_else(|| renamed[0].0.to_owned());
                    let new = renamed.iter().find(|(old, _)| *old == mode).map_or(mode.as_str(), |(_, new)| new);
                    node = node.with_text("mode", new);
                }
                Change::Default(attribute, value) => {
                    if node.attribute(attribute).is_none() {
                        node = node.with_text(attribute, value);
                    }
                }
                Change::Gone => return Err(kept("has no equal in newer opsets")),
            }
        }
        self.nodes.push(node);
        self.nodes.extend(behind);
        Ok(())
    }

    fn inputs(&mut self, node: &mut NodeProto, attributes: &[&str], first: usize) {
        for (input, attribute) in (first..).zip(attributes) {
            let Some(found) = node.attribute(attribute) else { continue };
            let values = if found.ints.is_empty() { found.i.into_iter().collect() } else { found.ints.clone() };
            node.remove(attribute);
            // Without values, it is as if the list weren't there.
            if !values.is_empty() {
                self.constant(node, input, int64s("", &[values.len() as i64], &values));
            }
        }
    }

    /// Makes inputs of `pads`, which are integers, and of numbers of a type.
    fn numbers(&mut self, node: &mut NodeProto, attributes: &[&str], elem: DataType) {
        for (input, attribute) in (1..).zip(attributes) {
            let Some(found) = node.attribute(attribute) else { continue };
            if *attribute == "pads" {
                self.inputs(node, &["pads"], input);
                continue;
            }
            let number = found.f();
            node.remove(attribute);
            let data = number.to_le_bytes().to_vec().into();
            let number =
                TensorProto { data_type: Some(DataType::Float.into()), raw_data: Some(data), ..TensorProto::default() };
            self.constant(node, input, number);
            if elem != DataType::Float {
                let Some(of_float) = node.input_at(input).map(str::to_owned) else { continue };
                let cast = self.names.fresh(&format!("{of_float}/Cast"));
                let made = NodeProto::make("Cast", &cast, &[&of_float], &[&cast]);
                self.nodes.push(made.with_int("to", elem as i64));
                node.set_input(input, &cast);
            }
        }
    }

    fn constant(&mut self, node: &mut NodeProto, input: usize, value: TensorProto) {
        let name = self.names.fresh(&format!("{}/{input}", node.label()));
        // A node instead of an initializer, because functions have no initializers.
        self.nodes.push(NodeProto::make("Constant", &name, &[], &[&name]).with_tensor("value", value));
        node.set_input(input, &name);
    }

    /// Flattens the input of a softmax to a matrix, as it did itself, and gives the output its shape again.
    fn softmax(&mut self, node: &mut NodeProto) -> Option<NodeProto> {
        let axis = node.int("axis").unwrap_or(1);
        *node = std::mem::take(node).with_int("axis", -1);
        // The last axis alone is the same in both versions.
        let (input, output) = (node.input_at(0)?.to_owned(), node.output_at(0)?.to_owned());
        if axis == -1 {
            return None;
        }
        let [flat, shape, matrix] = ["flat", "shape", "rows"].map(|what| self.names.fresh(&format!("{output}/{what}")));
        self.nodes.push(NodeProto::make("Flatten", &flat, &[&input], &[&flat]).with_int("axis", axis));
        self.nodes.push(NodeProto::make("Shape", &shape, &[&input], &[&shape]));
        node.set_input(0, &flat);
        node.set_output(0, &matrix);
        let name = self.names.fresh(&format!("{output}/Reshape"));
        Some(NodeProto::make("Reshape", &name, &[&matrix, &shape], &[&output]))
    }
}

/// The type of a tensor, if the graph says it; else FLOAT.
fn elem_of(graph: &GraphProto, name: Option<&str>) -> DataType {
    let mut values = graph.input.iter().chain(&graph.value_info).chain(&graph.output);
    let found = values.find(|value| Some(value.name()) == name).map(ValueInfoProto::elem);
    let float = DataType::Float;
    found.map_or(float, |elem| DataType::try_from(elem).unwrap_or(float))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::numbers;

    fn raised(node: NodeProto, from: i64, to: i64) -> Vec<NodeProto> {
        let mut graph = GraphProto { node: vec![node], ..GraphProto::default() };
        raise(&mut graph, from, to).unwrap();
        graph.node
    }

    fn operators(nodes: &[NodeProto]) -> Vec<&str> {
        nodes.iter().map(NodeProto::op_type).collect()
    }

    #[test]
    fn attributes_become_inputs() {
        let node = NodeProto::make("Squeeze", "s", &["x"], &["y"]).with_ints("axes", &[0, 2]);
        let nodes = raised(node, 11, 17);
        assert_eq!(operators(&nodes), ["Constant", "Squeeze"]);
        assert_eq!(numbers(nodes[0].attribute("value").unwrap().t.as_ref().unwrap()).unwrap(), [0.0, 2.0]);
        assert_eq!((nodes[1].input.len(), nodes[1].attribute.len()), (2, 0));
        assert_eq!(nodes[1].input[1], nodes[0].output[0]);
        let mean = NodeProto::make("ReduceMean", "m", &["x"], &["y"]).with_ints("axes", &[1]);
        assert_eq!(operators(&raised(mean.clone(), 11, 17)), ["ReduceMean"]);
        assert_eq!(operators(&raised(mean, 17, 18)), ["Constant", "ReduceMean"]);
        let slice = NodeProto::make("Slice", "s", &["x"], &["y"]).with_ints("starts", &[0]).with_ints("ends", &[1]);
        assert_eq!(operators(&raised(slice, 9, 10)), ["Constant", "Constant", "Slice"]);
    }

    #[test]
    fn a_softmax_flattens_as_before() {
        let node = NodeProto::make("Softmax", "s", &["x"], &["y"]);
        let nodes = raised(node.clone(), 11, 13);
        assert_eq!(operators(&nodes), ["Flatten", "Shape", "Softmax", "Reshape"]);
        assert_eq!(nodes[3].output, ["y"]);
        assert_eq!(operators(&raised(node.with_int("axis", -1), 12, 13)), ["Softmax"]);
    }

    #[test]
    fn nodes_without_an_equal_are_named() {
        let mut graph = GraphProto::default();
        graph.node.push(NodeProto::make("Upsample", "up", &["x"], &["y"]));
        let kept = raise(&mut graph, 9, 17).unwrap_err();
        let why = "has no equal in newer opsets; opset 10 changed Upsample: export the graph with opset 17";
        assert_eq!(kept, format!(": Upsample 'up' {why}"));
        assert!(raise(&mut GraphProto::default(), 6, 17).is_err());
        assert!(raise(&mut GraphProto::default(), 17, 99).is_err());
    }
}
