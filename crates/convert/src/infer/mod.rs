//! Shapes for inputs of given sizes, and the values of small tensors such as those that shapes are computed with.
//!
//! Everything is concrete: the caller infers once for each size that it asks about and compares. That needs no algebra
//! and follows whatever arithmetic an exporter wrote. What isn't known stays open; nothing is guessed.

pub mod ops;
pub mod shaping;
pub mod tensor;

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::graph::{captured, required_inputs};
use crate::onnx::operators::ShapeRule;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{DataType, Dim};
use tensor::{Tensor, axis_of};

// The most tensors that are followed through the turns of all loops together. Without a limit, loops in loops would
// take hours.
const MOST_FOLLOWED: usize = 1 << 18;
// A loop that turns more often is not followed: each turn takes as long as the graph inside it.
const MOST_TURNS: i64 = 1000;

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
        // A body sees all names around it. Conflicts outside are not its own.
        let mut shapes = Self { conflicts: Vec::new(), ..outer.cloned().unwrap_or_default() };
        // A file may state shapes that no tensor can have.
        let weights = graph.initializer.iter();
        shapes.known.extend(weights.map(|weight| (weight.name().to_owned(), Tensor::of_weight(weight).possible())));
        for input in required_inputs(graph) {
            let dims = input.dims().and_then(|dims| dims.iter().map(Dim::known).collect());
            let tensor = Tensor { elem: input.elem(), dims, ..Tensor::default() };
            shapes.known.insert(input.name().to_owned(), tensor.possible());
        }
        shapes.known.extend(inputs.into_iter().map(|(name, tensor)| (name, tensor.possible())));
        let declared: HashMap<&str, i32> =
            graph.value_info.iter().chain(&graph.output).map(|value| (value.name(), value.elem())).collect();
        for node in &graph.node {
            let outputs = shapes.infer_node(node, opset).unwrap_or_else(|why| {
                shapes.conflicts.push((node.output.first().cloned().unwrap_or_default(), why));
                Vec::new()
            });
            let mut outputs = outputs.into_iter();
            for name in &node.output {
                let mut tensor = outputs.next().unwrap_or_default().possible();
                // Rules give shapes first of all; for the type, the model itself may say it.
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

    /// Follows the graph of a model. `length` gives the length of each dimension of its inputs.
    pub fn of_lengths(graph: &GraphProto, opset: i64, length: impl Fn(&str, usize, &Dim) -> i64) -> Self {
        let sized = |input: &ValueInfoProto| {
            let dims = input.dims()?.iter().enumerate().map(|(axis, dim)| length(input.name(), axis, dim)).collect();
            Some((input.name().to_owned(), Tensor::shaped(input.elem(), dims)))
        };
        Self::infer(graph, opset, required_inputs(graph).filter_map(sized).collect(), None)
    }

    /// Keeps only what is known about these tensors, so that a turn of a loop copies no others.
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

    pub fn get(&self, name: &str) -> Tensor {
        self.known.get(name).cloned().unwrap_or_default()
    }

    pub fn dims(&self, name: &str) -> Option<&[i64]> {
        self.known.get(name)?.dims.as_deref()
    }

    pub fn inputs(&self, node: &NodeProto) -> Vec<Tensor> {
        node.input.iter().map(|name| self.get(name)).collect()
    }

    fn infer_node(&self, node: &NodeProto, opset: i64) -> Result<Vec<Tensor>, String> {
        let inputs = self.inputs(node);
        match node.shape_rule() {
            ShapeRule::Loop => Ok(run_loop(self, node, &inputs, opset)),
            ShapeRule::Scan => Ok(run_scan(self, node, opset)),
            ShapeRule::If if !inputs.is_empty() => Ok(run_if(self, node, &inputs, opset)),
            _ => ops::infer(node, &inputs, opset),
        }
    }
}

/// What a `Loop` gives: its carried values, then the values of each turn stacked.
pub fn run_loop(outer: &Shapes, node: &NodeProto, inputs: &[Tensor], opset: i64) -> Vec<Tensor> {
    let Some(body) = node.graph("body") else { return Vec::new() };
    let turns = turns(outer, node, inputs, opset);
    let carried = inputs.get(2..).unwrap_or_default();
    let shapes = Shapes::infer(body, opset, body_inputs(body, None, carried, false), Some(outer));
    let of_body = |output: usize| body.output.get(output).map(|value| shapes.get(value.name())).unwrap_or_default();
    let last = carried.iter().enumerate().map(|(index, before)| after(before, &of_body(index + 1), turns));
    let each = (carried.len() + 1..body.output.len()).map(|index| stacked(&of_body(index), turns, 0));
    last.chain(each).collect()
}

/// The inputs of a `Loop`'s body. With `follows` the small carried values keep their content.
pub fn body_inputs(body: &GraphProto, turn: Option<i64>, carried: &[Tensor], follows: bool) -> HashMap<String, Tensor> {
    let name = |index: usize| body.input.get(index).map(|input| input.name().to_owned()).unwrap_or_default();
    // Without a number, the turn stands for any of them.
    let turn = Tensor { data: turn.map(|turn| [turn as f64].into()), ..Tensor::shaped(DataType::Int64 as i32, vec![]) };
    let go = Tensor { data: follows.then(|| [1.0].into()), ..Tensor::shaped(DataType::Bool as i32, vec![]) };
    let mut inputs = HashMap::from([(name(0), turn), (name(1), go)]);
    for (index, value) in carried.iter().enumerate() {
        let mut value = value.clone();
        // Counters and conditions have one element; larger contents would be copied for each turn.
        if !follows || value.data.as_ref().is_some_and(|data| data.len() > 1) {
            value.data = None;
        }
        if let Some(input) = body.input.get(index + 2).filter(|_| value.elem == 0) {
            value.elem = input.elem();
        }
        inputs.insert(name(index + 2), value);
    }
    inputs
}

/// How often a `Loop` turns, if that depends on sizes only.
pub fn turns(outer: &Shapes, node: &NodeProto, inputs: &[Tensor], opset: i64) -> Option<i64> {
    let body = node.graph("body")?;
    let most = if node.input_at(0).is_some() { Some(inputs[0].scalar()? as i64) } else { None };
    let mut goes = node.input_at(1).is_none() || inputs[1].scalar()? != 0.0;
    let mut carried = inputs.get(2..).unwrap_or_default().to_vec();
    let outer = outer.of(captured(body));
    let mut turn = 0;
    while goes && most.is_none_or(|most| turn < most) {
        if turn > MOST_TURNS || !outer.may_turn(body) {
            return None;
        }
        let shapes = Shapes::infer(body, opset, body_inputs(body, Some(turn), &carried, true), Some(&outer));
        // A condition that stays as it is leaves the count alone to end the loop, so no further turn needs to be
        // followed.
        let keeps = is_passed_on(body, 1, 0) || goes_on_forever(body, &shapes);
        goes = keeps || shapes.get(body.output.first()?.name()).scalar()? != 0.0;
        if keeps && most.is_some() {
            return most;
        }
        for (index, value) in carried.iter_mut().enumerate() {
            let next = shapes.get(body.output.get(index + 1)?.name());
            // A sequence grows with each turn; its number of tensors follows from the turns.
            if value.length.is_none() {
                *value = Tensor { elem: value.elem, ..next };
            }
        }
        turn += 1;
    }
    Some(turn)
}

/// Whether the condition of a `Loop`'s body is a constant that is true. PyTorch writes such loops.
fn goes_on_forever(body: &GraphProto, shapes: &Shapes) -> bool {
    let Some(condition) = source(body, 0) else { return false };
    let is_input = body.input.iter().any(|input| input.name() == condition);
    let mut computed = body.node.iter().filter(|node| node.op() != "Constant").flat_map(NodeProto::named_outputs);
    !is_input && !computed.any(|name| name == condition) && shapes.get(condition).scalar().is_some_and(|go| go != 0.0)
}

/// Whether a body gives an input back as an output, unchanged.
pub fn is_passed_on(body: &GraphProto, input: usize, output: usize) -> bool {
    body.input.get(input).is_some_and(|input| source(body, output) == Some(input.name()))
}

/// The tensor that an output of a body is a copy of.
pub fn source(body: &GraphProto, output: usize) -> Option<&str> {
    let mut name = body.output.get(output)?.name();
    let copies = |name: &str| {
        let mut nodes = body.node.iter();
        let node = nodes.find(|node| node.output.first().is_some_and(|output| output == name))?;
        node.input_at(0).filter(|_| node.op() == "Identity")
    };
    // No path through the body is longer. A circle would be endless.
    for _ in &body.node {
        let Some(from) = copies(name) else { break };
        name = from;
    }
    Some(name)
}

fn after(before: &Tensor, turned: &Tensor, turns: Option<i64>) -> Tensor {
    let elem = if turned.elem == 0 { before.elem } else { turned.elem };
    if before.length.is_some() {
        return Tensor { length: turns, data: None, elem, ..turned.clone() };
    }
    // A shape that changes from turn to turn is not that of the last turn either.
    let same = before.dims == turned.dims;
    Tensor { elem, dims: before.dims.clone().filter(|_| same), ..Tensor::default() }
}

fn stacked(each: &Tensor, turns: Option<i64>, axis: usize) -> Tensor {
    let (Some(own), Some(turns)) = (&each.dims, turns) else { return Tensor::open(each.elem) };
    let mut dims = own.clone();
    dims.insert(axis.min(own.len()), turns);
    Tensor::shaped(each.elem, dims)
}

/// A list of a `Scan`'s axes or directions, an entry for each of `count`.
pub fn scan_list(node: &NodeProto, name: &str, count: usize) -> Vec<i64> {
    node.ints(name).map_or_else(|| vec![0; count], <[i64]>::to_vec)
}

pub fn scan_counts(node: &NodeProto) -> (usize, usize) {
    let scanned = usize::try_from(node.int("num_scan_inputs").unwrap_or(0)).unwrap_or_default();
    // A malformed node may claim more than it has.
    let scanned = scanned.min(node.input.len());
    (node.input.len() - scanned, scanned)
}

pub fn scan_body_inputs(outer: &Shapes, node: &NodeProto, body: &GraphProto) -> (HashMap<String, Tensor>, Option<i64>) {
    let (states, scanned) = scan_counts(node);
    let axes = scan_list(node, "scan_input_axes", scanned);
    let mut inputs = HashMap::new();
    let mut steps = None;
    for (index, (input, name)) in body.input.iter().zip(&node.input).enumerate() {
        let mut value = Tensor { data: None, ..outer.get(name) };
        if let (Some(dims), true) = (&mut value.dims, index >= states) {
            let axis = axes.get(index - states).copied().unwrap_or_default();
            if let Ok(axis) = axis_of(axis, dims.len()) {
                steps = Some(dims.remove(axis));
            }
        }
        inputs.insert(input.name().to_owned(), value);
    }
    (inputs, steps)
}

pub fn run_scan(outer: &Shapes, node: &NodeProto, opset: i64) -> Vec<Tensor> {
    let Some(body) = node.graph("body") else { return Vec::new() };
    let (states, _) = scan_counts(node);
    let (inputs, steps) = scan_body_inputs(outer, node, body);
    let shapes = Shapes::infer(body, opset, inputs, Some(outer));
    let out_axes = scan_list(node, "scan_output_axes", body.output.len().saturating_sub(states));
    let each = |(index, output): (usize, &ValueInfoProto)| {
        let value = shapes.get(output.name());
        if index < states {
            return Tensor { data: None, ..value };
        }
        let rank = value.dims.as_ref().map_or(0, Vec::len) as i64 + 1;
        let axis = out_axes.get(index - states).copied().unwrap_or_default();
        stacked(&value, steps, (if axis < 0 { axis + rank } else { axis }) as usize)
    };
    body.output.iter().enumerate().map(each).collect()
}

pub fn branch<'a>(node: &'a NodeProto, condition: &Tensor) -> Option<&'a GraphProto> {
    node.graph(if condition.scalar()? != 0.0 { "then_branch" } else { "else_branch" })
}

pub fn run_if(outer: &Shapes, node: &NodeProto, inputs: &[Tensor], opset: i64) -> Vec<Tensor> {
    let of = |graph: &GraphProto| -> Vec<Tensor> {
        let shapes = Shapes::infer(graph, opset, HashMap::new(), Some(outer));
        graph.output.iter().map(|output| shapes.get(output.name())).collect()
    };
    if let Some(graph) = branch(node, &inputs[0]) {
        return of(graph);
    }
    let (Some(yes), Some(no)) = (node.graph("then_branch"), node.graph("else_branch")) else { return Vec::new() };
    // Data decides which branch runs, so a result is known only if both branches give it.
    let both = |(yes, no): (Tensor, Tensor)| if yes == no { yes } else { Tensor::open(yes.elem) };
    of(yes).into_iter().zip(of(no)).map(both).collect()
}
