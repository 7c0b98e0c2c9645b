//! A graph that is being cut, and the edits that all cuts share.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};

use crate::analysis::Analysis;
use crate::batch;
use crate::graph::{Content, InputAxis, Names, required_inputs};
use crate::infer::scan_counts;
use crate::infer::tensor::Tensor;
use crate::names::StatePair;
use crate::onnx::schema::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, int64s, is_float};
use crate::time::{Cut, Hint, Place, Refusal, Result, UNKNOWN_SHAPE, refuse};

#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    Fill(f64),
    Tensor(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct NewState {
    pub input: String,
    pub output: String,
    pub elem: i32,
    pub dims: Vec<Dim>,
    pub start: Start,
    /// The node that it belongs to, and its operator.
    pub node: String,
    pub operator: String,
    pub starts_at_constant: bool,
    /// The target of a `Reshape` to `dims`, if the original has the batch and another axis in one.
    pub split: Option<Vec<i64>>,
}

pub struct Cutter<'a> {
    pub analysis: &'a Analysis,
    pub opset: i64,
    pub used: HashSet<String>,
    pub names: Names,
    pub graph: GraphProto,
    pub original: &'a GraphProto,
    pub states: Vec<NewState>,
    pub content: Content,
    /// Where tensors have the rows of the batch. Followed when it is first asked.
    pub rows: OnceCell<Result<HashMap<String, Place>>>,
}

/// A name for states that clients and configurations can write: the node's, without what would need quotes.
pub fn base_name(label: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '.' };
    let name: String = label.trim_matches('/').chars().map(plain).collect();
    if name.is_empty() { "state".to_owned() } else { name }
}

impl Cutter<'_> {
    /// Adds a state with the rows of the node's first input. Returns the names of its two ends, in the shape of `dims`.
    pub fn state(
        &mut self,
        node: &NodeProto,
        part: &str,
        (elem, dims): (i32, Vec<Dim>),
        start: Option<&str>,
        fill: f64,
    ) -> Result<(String, String)> {
        let base = format!("{}.{part}", base_name(node.label()));
        // A second node with the same label must not get the same states.
        let (input, output) = (self.names.fresh(&format!("{base}_in")), self.names.fresh(&format!("{base}_out")));
        // Nothing of a request reaches it: a learned value, or what a Keras layer held when it was exported.
        let constant = start.is_some_and(|start| self.content.get(start).is_none_or(HashSet::is_empty));
        let start = match start {
            None => Start::Fill(fill),
            Some(name) if self.analysis.is_zero(name) => Start::Fill(0.0),
            Some(name) => {
                if let Some(from) = self.content.get(name).and_then(|inputs| inputs.iter().min()) {
                    let pairs: Vec<String> = self.given_states().iter().map(StatePair::to_string).collect();
                    let help = format!(
                        "if the model has its states as inputs, name all of them and their outputs: '{}'; if requests carry \
                         '{from}', export the model with its states as inputs and outputs",
                        pairs.join(" ")
                    );
                    let why = format!("starts from input '{from}'");
                    return Err(refuse(node, why, &help).with_hint(Hint::States));
                }
                Start::Tensor(name.to_owned())
            }
        };
        // An integer isn't learned: it is a counter that starts at this number.
        let starts_at_constant = constant && matches!(start, Start::Tensor(_)) && is_float(elem);
        let merged = dims;
        let dims = self.split(node, &merged)?;
        let split = (dims != merged).then(|| shape(&dims));
        // The layer keeps its merged rows; only the signature has the batch apart, by which sequences are told.
        let ends = match &split {
            None => (input.clone(), output.clone()),
            Some(split) => {
                let ends =
                    (self.names.fresh(&format!("{input}/merged")), self.names.fresh(&format!("{output}/merged")));
                self.reshape(&input, &shape(&merged), &ends.0);
                self.reshape(&ends.1, split, &output);
                ends
            }
        };
        self.graph.input.push(ValueInfoProto::tensor(&input, elem, &dims));
        self.graph.output.push(ValueInfoProto::tensor(&output, elem, &dims));
        self.states.push(NewState {
            input,
            output,
            elem,
            dims,
            start,
            node: node.label().to_owned(),
            operator: node.operator(),
            starts_at_constant,
            split,
        });
        Ok(ends)
    }

    /// Pairs each input at which a recurrence starts with the output that gives its last state, or with OUTPUT if none
    /// does.
    pub fn given_states(&self) -> Vec<StatePair> {
        let mut given: Vec<StatePair> = Vec::new();
        for cut in &self.analysis.found.cuts {
            let node = &self.original.node[cut.node()];
            let ends: Vec<(usize, usize)> = match cut {
                Cut::Recurrent { .. } => vec![(5, 1), (6, 2)],
                Cut::Scan { .. } => (0..scan_counts(node).0).map(|state| (state, state)).collect(),
                Cut::Loop { carried, .. } => carried.iter().map(|&state| (state + 2, state)).collect(),
                _ => continue,
            };
            for (input, output) in ends {
                let content = node.input_at(input).and_then(|name| self.content.get(name));
                let Some(from) = content.and_then(|inputs| inputs.iter().min()) else { continue };
                if given.iter().all(|pair| pair.input != *from) {
                    let output = node.output_at(output).and_then(|name| self.given_out(name));
                    given.push(StatePair::new(from, output.as_deref().unwrap_or("OUTPUT")));
                }
            }
        }
        given
    }

    /// The output of the graph that a tensor becomes, in another shape or joined with others.
    pub fn given_out(&self, name: &str) -> Option<String> {
        let mut name = name.to_owned();
        // The nodes are in order, so each reader comes later.
        for node in &self.original.node {
            if self.original.output.iter().any(|output| output.name() == name) {
                return Some(name);
            }
            let moves = ["Cast", "Concat", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];
            if moves.contains(&node.op()) && node.input.contains(&name) {
                name = node.output_at(0)?.to_owned();
            }
        }
        self.original.output.iter().any(|output| output.name() == name).then_some(name)
    }

    /// Gives the batch a dimension of its own in the dims of a state. The rows of a layer may be the batch times
    /// another axis, such as frequencies.
    pub fn split(&self, node: &NodeProto, dims: &[Dim]) -> Result<Vec<Dim>> {
        let (Some(batch), Some(axis)) = (&self.analysis.batch, dims.iter().position(|dim| *dim == Dim::Open)) else {
            return Ok(dims.to_vec());
        };
        let refused = |why: String| {
            let help = "export the model with a fixed batch, which its sequences then can't share";
            let why = format!("has a state {}, which has the batch and others in one axis{why}", bracketed(dims));
            Err(refuse(node, why, help))
        };
        let rows = self.rows.get_or_init(|| self.followed_rows(batch));
        let place = match rows {
            Ok(rows) => node.input_at(0).and_then(|input| rows.get(input)),
            Err(refusal) => {
                let Refusal { operator, node, why, .. } = refusal;
                return refused(format!("; they can't be taken apart, because {operator} '{node}' {why}"));
            }
        };
        let is_known = |(index, dim): (usize, &Dim)| index == axis || dim.is_known();
        let layout = match place {
            Some(Place::At(layout)) if layout.axis == axis && dims.iter().enumerate().all(is_known) => layout,
            _ => return refused(String::new()),
        };
        let (outer, inner) = (Dim::Known(layout.outer), Dim::Known(layout.inner));
        let split = [&dims[..axis], &[outer, Dim::Symbol(batch.clone()), inner], &dims[axis + 1..]].concat();
        // A dimension of 1 beside the batch would only lengthen the signature.
        let is_one = |index: usize| index <= axis + 2 && split[index] == Dim::Known(1);
        Ok(split.iter().enumerate().filter(|(index, _)| !is_one(*index)).map(|(_, dim)| dim.clone()).collect())
    }

    /// Follows the rows through the original. States take the place of what layers start at.
    pub fn followed_rows(&self, batch: &str) -> Result<HashMap<String, Place>> {
        let mut graph = self.original.clone();
        for cut in self.analysis.found.cuts.iter().filter(|cut| matches!(cut, Cut::Recurrent { .. })) {
            // States take the place of these inputs, so it does not matter whether they keep rows apart.
            graph.node[cut.node()].input.iter_mut().skip(5).take(2).for_each(String::clear);
        }
        batch::rows(&graph, self.opset, &self.batch_axes(batch))
    }

    pub fn batch_axes(&self, batch: &str) -> Vec<InputAxis> {
        let mut axes = Vec::new();
        for input in required_inputs(self.original) {
            let time = self.analysis.time.iter().find(|seed| seed.input == input.name());
            for (axis, dim) in input.dims().unwrap_or_default().into_iter().enumerate() {
                // An exporter may leave the batch without a name. Beside the steps, it is the only open dimension.
                let is_unnamed = dim == Dim::Open && time.is_some_and(|time| time.axis != axis);
                if is_unnamed || matches!(&dim, Dim::Symbol(name) if name == batch) {
                    axes.push(InputAxis { input: input.name().to_owned(), axis });
                }
            }
        }
        axes
    }

    pub fn reshape(&mut self, from: &str, shape: &[i64], to: &str) {
        let (name, constant) = (self.names.fresh(&format!("{to}/Reshape")), self.names.fresh(&format!("{to}/shape")));
        self.graph.initializer.push(int64s(&constant, &[shape.len() as i64], shape));
        self.graph.node.push(NodeProto::make("Reshape", &name, &[from, &constant], &[to]));
    }

    /// Makes a node's output the state's: under its own name if nothing else uses it.
    pub fn give(&mut self, node: usize, output: usize, name: &str) {
        match self.graph.node[node].output_at(output).map(str::to_owned) {
            Some(used) if self.used.contains(&used) => {
                let label = self.names.fresh(&format!("{name}/Identity"));
                self.graph.node.push(NodeProto::make("Identity", &label, &[&used], &[name]));
            }
            _ => self.graph.node[node].set_output(output, name),
        }
    }

    pub fn tensor(&self, name: &str) -> Tensor {
        self.analysis.probes.short.get(name)
    }

    pub fn dims(&self, node: &NodeProto, name: &str) -> Result<Vec<Dim>> {
        let unknown = || refuse(node, format!("has a state of unknown shape ('{name}')"), UNKNOWN_SHAPE);
        self.analysis.dims(name).ok_or_else(unknown)
    }

    pub fn slice(&mut self, label: &str, of: &str, axis: usize, (start, end): (i64, i64), output: &str) {
        let name = self.names.fresh(&format!("{label}/Slice"));
        // Slice takes its bounds as inputs from opset 10 on.
        if self.opset < 10 {
            let node = NodeProto::make("Slice", &name, &[of], &[output]);
            let node = node.with_ints("starts", &[start]).with_ints("ends", &[end]).with_ints("axes", &[axis as i64]);
            self.graph.node.push(node);
            return;
        }
        let mut constant = |part: &str, value: i64| {
            let name = self.names.fresh(&format!("{label}.{part}"));
            self.graph.initializer.push(TensorProto { name: Some(name.clone()), ..int64s("", &[1], &[value]) });
            name
        };
        let (start, end, axes) = (constant("start", start), constant("end", end), constant("axis", axis as i64));
        self.graph.node.push(NodeProto::make("Slice", &name, &[of, &start, &end, &axes], &[output]));
    }
}

/// The target of a `Reshape`: -1 stands for the one dimension that isn't fixed.
fn shape(dims: &[Dim]) -> Vec<i64> {
    dims.iter().map(|dim| dim.known().unwrap_or(-1)).collect()
}
