//! `Loop`, `Scan` and `If`: what they give, and how often a `Loop` turns.

use std::collections::HashMap;

use super::shaping::axis_of;
use super::{Shapes, Tensor};
use crate::graph::captured;
use crate::onnx::DataType;
use crate::onnx::schema::{GraphProto, NodeProto};

/// A loop that turns more often is not followed: each turn takes as long as the graph inside it.
const MOST_TURNS: i64 = 1000;

/// What a `Loop` gives: its carried values, then the values of each turn stacked.
pub fn run_loop(outer: &Shapes, node: &NodeProto, inputs: &[Tensor], opset: i64) -> Vec<Tensor> {
    let Some(body) = node.graph("body") else { return Vec::new() };
    let turns = turns(outer, node, inputs, opset);
    let carried = inputs.get(2..).unwrap_or_default();
    let shapes = Shapes::infer(body, opset, body_inputs(body, None, carried, false), Some(outer));
    let of_body = |output: usize| body.output.get(output).map(|value| shapes.get(value.name())).unwrap_or_default();
    let mut outputs: Vec<Tensor> =
        (0..carried.len()).map(|index| after(&carried[index], &of_body(index + 1), turns)).collect();
    for index in carried.len() + 1..body.output.len() {
        outputs.push(stacked(&of_body(index), turns, 0));
    }
    outputs
}

/// The inputs of a `Loop`'s body. With `follows` the small carried values keep their content.
pub fn body_inputs(body: &GraphProto, turn: Option<i64>, carried: &[Tensor], follows: bool) -> HashMap<String, Tensor> {
    let name = |index: usize| body.input.get(index).map(|input| input.name().to_owned()).unwrap_or_default();
    let turn = Tensor { data: turn.map(|turn| [turn as f64].into()), ..Tensor::shaped(DataType::Int64 as i32, vec![]) };
    let go = Tensor { data: follows.then(|| [1.0].into()), ..Tensor::shaped(DataType::Bool as i32, vec![]) };
    let mut inputs = HashMap::from([(name(0), turn), (name(1), go)]);
    for (index, value) in carried.iter().enumerate() {
        let mut value = value.clone();
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
    let most = match node.input_at(0) {
        Some(_) => Some(inputs[0].scalar()? as i64),
        None => None,
    };
    let mut goes = match node.input_at(1) {
        Some(_) => inputs[1].scalar()? != 0.0,
        None => true,
    };
    let mut carried = inputs.get(2..).unwrap_or_default().to_vec();
    let outer = outer.of(captured(body));
    let mut turn = 0;
    while goes && most.is_none_or(|most| turn < most) {
        if turn > MOST_TURNS || !outer.may_turn(body) {
            return None;
        }
        let shapes = Shapes::infer(body, opset, body_inputs(body, Some(turn), &carried, true), Some(&outer));
        let keeps = is_passed_on(body, 1, 0) || goes_on_forever(body, &shapes);
        goes = keeps || shapes.get(body.output.first()?.name()).scalar()? != 0.0;
        if keeps && most.is_some() {
            return most;
        }
        for (index, value) in carried.iter_mut().enumerate() {
            let next = shapes.get(body.output.get(index + 1)?.name());
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
    // No way through the body is longer; a circle would be.
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

/// How many of a `Scan`'s inputs are states, and how many it scans.
pub fn scan_counts(node: &NodeProto) -> (usize, usize) {
    let scanned = usize::try_from(node.int("num_scan_inputs").unwrap_or(0)).unwrap_or_default();
    let scanned = scanned.min(node.input.len());
    (node.input.len() - scanned, scanned)
}

/// The inputs of a `Scan`'s body, and the number of its steps.
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

/// What a `Scan` gives: its states, then the values of each step stacked.
pub fn run_scan(outer: &Shapes, node: &NodeProto, opset: i64) -> Vec<Tensor> {
    let Some(body) = node.graph("body") else { return Vec::new() };
    let (states, _) = scan_counts(node);
    let (inputs, steps) = scan_body_inputs(outer, node, body);
    let shapes = Shapes::infer(body, opset, inputs, Some(outer));
    let out_axes = scan_list(node, "scan_output_axes", body.output.len().saturating_sub(states));
    let each = |(index, output): (usize, &crate::onnx::schema::ValueInfoProto)| {
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

/// The branch that an `If` takes, if its condition depends on sizes only.
pub fn branch<'a>(node: &'a NodeProto, condition: &Tensor) -> Option<&'a GraphProto> {
    node.graph(if condition.scalar()? != 0.0 { "then_branch" } else { "else_branch" })
}

/// What an `If` gives.
pub fn run_if(outer: &Shapes, node: &NodeProto, inputs: &[Tensor], opset: i64) -> Vec<Tensor> {
    let of = |graph: &GraphProto| -> Vec<Tensor> {
        let shapes = Shapes::infer(graph, opset, HashMap::new(), Some(outer));
        graph.output.iter().map(|output| shapes.get(output.name())).collect()
    };
    match branch(node, &inputs[0]) {
        Some(graph) => of(graph),
        None => {
            let (Some(yes), Some(no)) = (node.graph("then_branch"), node.graph("else_branch")) else {
                return Vec::new();
            };
            let both = |(yes, no): (Tensor, Tensor)| if yes == no { yes } else { Tensor::open(yes.elem) };
            of(yes).into_iter().zip(of(no)).map(both).collect()
        }
    }
}
