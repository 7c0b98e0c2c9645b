//! What a graph's names connect, and the edits that keep it whole: fresh names, order, removal of what nothing uses.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;

use crate::onnx::Dim;
use crate::onnx::schema::{GraphProto, NodeProto, SparseTensorProto, ValueInfoProto};

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct InputAxis {
    pub input: String,
    pub axis: usize,
}

impl InputAxis {
    pub(crate) fn is(&self, input: &str, axis: usize) -> bool {
        self.input == input && self.axis == axis
    }
}

impl fmt::Display for InputAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.input, self.axis)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputAxis {
    pub output: String,
    pub axis: usize,
}

pub fn producers(graph: &GraphProto) -> HashMap<&str, usize> {
    let outputs = |(index, node)| NodeProto::named_outputs(node).map(move |name| (name, index));
    graph.node.iter().enumerate().flat_map(outputs).collect()
}

/// The tensors that are outputs, or that nodes or the graphs inside them read.
pub fn used(graph: &GraphProto) -> HashSet<String> {
    graph.node.iter().flat_map(inputs_of).chain(graph.output.iter().map(|output| output.name().to_owned())).collect()
}

/// What a node reads: its inputs, and what the graphs inside it take from outside.
pub fn inputs_of(node: &NodeProto) -> Vec<String> {
    let own = node.input.iter().filter(|name| !name.is_empty()).cloned();
    own.chain(node.graphs().flat_map(captured)).collect()
}

/// The tensors that a graph inside a node takes from outside, each once.
pub fn captured(graph: &GraphProto) -> Vec<String> {
    let own: HashSet<&str> = names(graph).collect();
    let mut found = Vec::new();
    let outputs = graph.output.iter().map(|output| output.name().to_owned());
    for name in graph.node.iter().flat_map(inputs_of).chain(outputs) {
        // A body may hide a name of the graph around it.
        if !own.contains(name.as_str()) && !found.contains(&name) {
            found.push(name);
        }
    }
    found
}

fn names(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let inputs = graph.input.iter().map(ValueInfoProto::name);
    let weights = graph.initializer.iter().map(|tensor| tensor.name());
    // A sparse weight has its name in its values.
    let sparse = graph.sparse_initializer.iter().filter_map(|tensor| Some(tensor.values.as_ref()?.name()));
    inputs.chain(weights).chain(sparse).chain(graph.node.iter().flat_map(NodeProto::named_outputs))
}

/// The inputs that no initializer gives a default.
pub fn required_inputs(graph: &GraphProto) -> impl Iterator<Item = &ValueInfoProto> {
    let defaults: HashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
    graph.input.iter().filter(move |input| !defaults.contains(input.name()))
}

pub struct Names(HashSet<String>);

impl Names {
    /// All names of a graph and of the graphs inside it are taken.
    pub fn of(graph: &GraphProto) -> Self {
        let mut taken = HashSet::new();
        take(graph, &mut taken);
        Self(taken)
    }

    /// The names of the dimensions of tensors are taken.
    pub fn of_dimensions<'a>(values: impl Iterator<Item = &'a ValueInfoProto>) -> Self {
        Self(values.flat_map(|value| value.dims().unwrap_or_default()).filter_map(Dim::symbol).collect())
    }

    /// `wanted`, or the first of `wanted_2`, `wanted_3` and so on that is free.
    pub fn fresh(&mut self, wanted: &str) -> String {
        let numbered = (2_usize..).map(|number| format!("{wanted}_{number}"));
        let mut candidates = std::iter::once(wanted.to_owned()).chain(numbered);
        let name = candidates.find(|name| !self.0.contains(name)).unwrap_or_default();
        // The next caller must not get the same name: ONNX allows one producer for each tensor.
        self.0.insert(name.clone());
        name
    }
}

fn take(graph: &GraphProto, taken: &mut HashSet<String>) {
    taken.extend(names(graph).map(str::to_owned));
    taken.extend(graph.node.iter().map(|node| node.name().to_owned()));
    for inner in graph.node.iter().flat_map(NodeProto::graphs) {
        take(inner, taken);
    }
}

/// Puts each node after those that it reads from, and changes the order no further.
pub fn sort(graph: &mut GraphProto) {
    let order = order(graph);
    // Nodes in a circle would be dropped, but no edit makes one.
    let mut nodes: Vec<Option<NodeProto>> = std::mem::take(&mut graph.node).into_iter().map(Some).collect();
    graph.node = order.into_iter().filter_map(|index| nodes[index].take()).collect();
}

/// The first node that reads from itself, or from nodes that do.
pub fn in_a_circle(graph: &GraphProto) -> Option<&NodeProto> {
    let ordered: HashSet<usize> = order(graph).into_iter().collect();
    let index = (0..graph.node.len()).find(|index| !ordered.contains(index))?;
    graph.node.get(index)
}

/// Orders the nodes so that each follows those that it reads from. Nodes in a circle are left out.
fn order(graph: &GraphProto) -> Vec<usize> {
    let producers = producers(graph);
    let sources = |node: &NodeProto| -> HashSet<usize> {
        inputs_of(node).iter().filter_map(|name| producers.get(name.as_str()).copied()).collect()
    };
    let mut waits_for: Vec<HashSet<usize>> = graph.node.iter().map(sources).collect();
    // Counting what each node waits for takes time in proportion to the edges; a search for each node would not.
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); graph.node.len()];
    for (index, sources) in waits_for.iter().enumerate() {
        for &source in sources {
            readers[source].push(index);
        }
    }
    // A set in order, so that nodes that could go either way keep the order of the model.
    let mut ready: std::collections::BTreeSet<usize> =
        (0..graph.node.len()).filter(|&index| waits_for[index].is_empty()).collect();
    let mut order = Vec::with_capacity(graph.node.len());
    while let Some(index) = ready.pop_first() {
        order.push(index);
        for &reader in &readers[index] {
            if waits_for[reader].remove(&index) && waits_for[reader].is_empty() {
                ready.insert(reader);
            }
        }
    }
    order
}

/// Removes the nodes and weights that no output needs. Inputs stay, unless they are such weights.
pub fn prune(graph: &mut GraphProto) {
    let needed = ancestors(graph, graph.output.iter().map(|output| output.name().to_owned()));
    // The signature must not change: a client may send an input that no node reads.
    let required: HashSet<String> = required_inputs(graph).map(|input| input.name().to_owned()).collect();
    graph.input.retain(|input| required.contains(input.name()) || needed.contains(input.name()));
    graph.node.retain(|node| NodeProto::named_outputs(node).any(|name| needed.contains(name)));
    graph.initializer.retain(|tensor| needed.contains(tensor.name()));
    let is_needed = |tensor: &SparseTensorProto| tensor.values.as_ref().is_none_or(|of| needed.contains(of.name()));
    graph.sparse_initializer.retain(is_needed);
    graph.value_info.retain(|value| needed.contains(value.name()));
    // An annotation must name a tensor of the graph.
    graph.quantization_annotation.retain(|annotation| needed.contains(annotation.tensor_name()));
}

pub fn ancestors(graph: &GraphProto, of: impl IntoIterator<Item = String>) -> HashSet<String> {
    let producers = producers(graph);
    let mut open: VecDeque<String> = of.into_iter().collect();
    let mut found = HashSet::new();
    while let Some(name) = open.pop_front() {
        if !found.insert(name.clone()) {
            continue;
        }
        if let Some(&index) = producers.get(name.as_str()) {
            open.extend(inputs_of(&graph.node[index]));
        }
    }
    found
}

impl NodeProto {
    pub fn named_outputs(&self) -> impl Iterator<Item = &str> {
        self.output.iter().map(String::as_str).filter(|name| !name.is_empty())
    }
}

pub type Content = HashMap<String, HashSet<String>>;

/// The inputs whose content each tensor depends on. Shapes are no content.
pub fn content_inputs(graph: &GraphProto) -> Content {
    let inputs = required_inputs(graph).map(|input| input.name().to_owned());
    let mut content: Content = inputs.map(|name| (name.clone(), HashSet::from([name]))).collect();
    for node in &graph.node {
        if node.reads_size() {
            continue;
        }
        let found: HashSet<String> =
            inputs_of(node).iter().filter_map(|name| content.get(name)).flatten().cloned().collect();
        for output in node.named_outputs() {
            content.insert(output.to_owned(), found.clone());
        }
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(nodes: &[(&str, &[&str], &[&str])], outputs: &[&str]) -> GraphProto {
        let node = |(name, inputs, outputs): &(&str, &[&str], &[&str])| NodeProto::make("Add", name, inputs, outputs);
        let output = |name: &&str| ValueInfoProto::tensor(name, 1, &[]);
        GraphProto {
            node: nodes.iter().map(node).collect(),
            input: vec![ValueInfoProto::tensor("x", 1, &[])],
            output: outputs.iter().map(output).collect(),
            ..GraphProto::default()
        }
    }

    fn names(graph: &GraphProto) -> Vec<&str> {
        graph.node.iter().map(|node| node.name()).collect()
    }

    #[test]
    fn nodes_stand_behind_those_they_read_from() {
        let mut graph = graph(&[("c", &["b"], &["y"]), ("a", &["x"], &["a"]), ("b", &["a"], &["b"])], &["y"]);
        sort(&mut graph);
        assert_eq!(names(&graph), ["a", "b", "c"]);
    }

    #[test]
    fn what_no_output_needs_is_removed() {
        let mut graph = graph(&[("a", &["x"], &["a"]), ("b", &["x"], &["b"]), ("c", &["a"], &["y"])], &["y"]);
        prune(&mut graph);
        assert_eq!(names(&graph), ["a", "c"]);
        assert_eq!(graph.input.len(), 1);
    }

    #[test]
    fn a_tensor_to_which_many_ways_lead_is_looked_at_once() {
        let names: Vec<String> = (0..=64).map(|number| format!("t{number}")).collect();
        let twice = |(from, to): (&String, &String)| NodeProto::make("Add", to, &[from, from], &[to]);
        let graph = GraphProto { node: names.iter().zip(&names[1..]).map(twice).collect(), ..GraphProto::default() };
        assert_eq!(ancestors(&graph, [names[64].clone()]).len(), 65);
    }

    #[test]
    fn fresh_names_are_used_nowhere() {
        let mut names = Names::of(&graph(&[("a", &["x"], &["a_2"])], &["a_2"]));
        assert_eq!([names.fresh("a"), names.fresh("a"), names.fresh("b")], ["a_3", "a_4", "b"]);
    }
}
