//! Steps in `Loop`, `Scan` and `If`.

use std::collections::HashMap;

use super::{Cut, Layout, Place, Refusal, Tracker, refuse};
use crate::graph::captured;
use crate::infer::loops::{body_inputs, branch, is_passed_on, scan_counts, scan_list, turns};
use crate::infer::{Shapes, Tensor};
use crate::onnx::DataType;
use crate::onnx::schema::{GraphProto, NodeProto};

const LOOP_HELP: &str = "a loop over the steps that reads step i in turn i can run in steps; export the model so";

/// What a loop carries from turn to turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carried {
    /// The same in each turn.
    Invariant,
    /// Counts turns, from 0 by 1 if `exact`.
    Counter {
        exact: bool,
    },
    /// Collects a tensor for each turn.
    Sequence,
    /// Whether to go on.
    Condition,
    State,
}

impl<'a> Tracker<'a> {
    pub(super) fn loop_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let Some(body) = node.graph("body") else { return Err(refuse(node, "has no body", LOOP_HELP)) };
        let captured = captured(body);
        let of_carried: Vec<Place> = node.input.iter().skip(2).map(|name| self.place(name)).collect();
        let places = || captured.iter().map(|name| self.place(name)).chain(of_carried.iter().copied());
        if !places().any(|place| matches!(place, Place::At(_))) {
            let place = if places().all(|place| place == Place::Free) { Place::Free } else { Place::Last };
            return Ok(vec![place; node.output.len()]);
        }
        let mut names = captured.iter().chain(node.input.iter().skip(2));
        if let Some(name) = names.find(|name| self.place(name) == Place::Last) {
            return Err(refuse(node, format!("takes '{name}' of the last step in each step"), LOOP_HELP));
        }
        let lens: Vec<i64> =
            places().filter_map(|place| if let Place::At(layout) = place { Some(layout.len) } else { None }).collect();
        self.found.reached += 1;
        self.check_turns(node, lens[0])?;
        let of = |shapes: &Shapes| -> Vec<Tensor> { node.input.iter().skip(2).map(|name| shapes.get(name)).collect() };
        let (short, long) = (of(self.short), of(self.long));
        let kinds: Vec<Carried> = (0..short.len()).map(|carried| kind(body, carried, &short[carried])).collect();
        let mut inner: HashMap<String, Place> = captured.iter().map(|name| (name.clone(), self.place(name))).collect();
        let name = |input: usize| body.input.get(input).map(|input| input.name().to_owned()).unwrap_or_default();
        inner.insert(name(0), Place::Counter { exact: true });
        inner.insert(name(1), Place::Counter { exact: false });
        for (carried, kind) in kinds.iter().enumerate() {
            inner.insert(name(carried + 2), kind.place(of_carried[carried]));
        }
        let inferred = |shapes: &Shapes, carried: &[Tensor]| {
            Shapes::infer(body, self.opset, body_inputs(body, None, carried, false), Some(shapes))
        };
        let (short, long) = (inferred(self.short, &short), inferred(self.long, &long));
        let mut tracker = Tracker::new(body, self.opset, (&short, &long), inner);
        tracker.run()?;
        self.absorb(node, &tracker)?;
        let out = |output: usize| body.output.get(output).map_or(Place::Free, |value| tracker.place(value.name()));
        let mut outputs = Vec::new();
        for (carried, kind) in kinds.iter().enumerate() {
            outputs.push(match kind {
                Carried::Invariant => of_carried[carried],
                Carried::Counter { .. } | Carried::Condition => Place::Last,
                Carried::Sequence => {
                    check_entry(node, out(carried + 1), &[Place::Sequence])?;
                    Place::Sequence
                }
                Carried::State => {
                    if of_carried[carried] != Place::Free {
                        return Err(refuse(
                            node,
                            format!("starts from '{}', which comes from the steps", node.input[carried + 2]),
                            LOOP_HELP,
                        ));
                    }
                    check_entry(node, out(carried + 1), &[Place::Last, Place::Free])?;
                    self.check_state(node, &short, body.input[carried + 2].name(), body.output[carried + 1].name())?;
                    Place::Last
                }
            });
        }
        for output in kinds.len() + 1..body.output.len() {
            check_entry(node, out(output), &[Place::Last, Place::Free])?;
            outputs.push(Place::At(Layout::clean(0, lens[0])));
        }
        let carried = (0..kinds.len()).filter(|&carried| kinds[carried] == Carried::State).collect();
        self.found.cuts.push(Cut::Loop { node: index, carried });
        Ok(outputs)
    }

    /// Refuses a loop that doesn't turn once for each step.
    fn check_turns(&self, node: &NodeProto, len: i64) -> Result<(), Refusal> {
        let of = |shapes: &Shapes| {
            let inputs: Vec<Tensor> = node.input.iter().map(|name| shapes.get(name)).collect();
            turns(shapes, node, &inputs, self.opset)
        };
        match (of(self.short), of(self.long)) {
            (Some(short), Some(long)) if short == len && long > short => Ok(()),
            (Some(short), Some(_)) => Err(refuse(node, format!("turns {short} times for {len} steps"), LOOP_HELP)),
            _ => Err(refuse(node, "ends on a condition that depends on data", LOOP_HELP)),
        }
    }

    fn check_state(&self, node: &NodeProto, body: &Shapes, input: &str, output: &str) -> Result<(), Refusal> {
        match (body.dims(input), body.dims(output)) {
            (Some(before), Some(after)) if before != after => {
                Err(refuse(node, format!("carries '{input}', which grows from {before:?} to {after:?}"), LOOP_HELP))
            }
            _ => Ok(()),
        }
    }

    /// Takes over what was found in a body. Cuts inside it are none: its nodes run once a step.
    fn absorb(&mut self, node: &NodeProto, inner: &Tracker) -> Result<(), Refusal> {
        if !inner.found.cuts.is_empty() {
            return Err(refuse(node, "has a recurrence over the steps inside its body", LOOP_HELP));
        }
        self.found.quantized.extend(inner.found.quantized.iter().cloned());
        Ok(())
    }

    pub(super) fn scan_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let Some(body) = node.graph("body") else { return Err(refuse(node, "has no body", LOOP_HELP)) };
        let places: Vec<Place> = node.input.iter().map(|name| self.place(name)).collect();
        let outside = captured(body);
        if outside.iter().any(|name| matches!(self.place(name), Place::At(_))) {
            return Err(refuse(node, "reads the whole input in each step", LOOP_HELP));
        }
        if !places.iter().any(|place| matches!(place, Place::At(_))) {
            let is_free = places
                .iter()
                .copied()
                .chain(outside.iter().map(|name| self.place(name)))
                .all(|place| place == Place::Free);
            return Ok(vec![if is_free { Place::Free } else { Place::Last }; node.output.len()]);
        }
        self.found.reached += 1;
        if let Some(name) = outside.iter().find(|name| self.place(name) == Place::Last) {
            return Err(refuse(node, format!("takes '{name}' of the last step in each step"), LOOP_HELP));
        }
        if self.opset < 9 {
            return Err(refuse(node, "is of an opset before 9", "convert the model to a newer opset"));
        }
        let (states, scanned) = scan_counts(node);
        let directions = scan_list(node, "scan_input_directions", scanned);
        let out_directions = scan_list(node, "scan_output_directions", body.output.len().saturating_sub(states));
        if directions.iter().chain(&out_directions).any(|&direction| direction != 0) {
            return Err(refuse(node, "scans backwards", "the answer to a step depends on later steps"));
        }
        let axes = scan_list(node, "scan_input_axes", scanned);
        let mut inner: HashMap<String, Place> = outside.iter().map(|name| (name.clone(), self.place(name))).collect();
        let mut len = None;
        for (input, &place) in places.iter().enumerate() {
            let name = &node.input[input];
            let of_body = match place {
                _ if input < states => {
                    if place != Place::Free {
                        return Err(refuse(
                            node,
                            format!("starts from '{name}', which comes from the steps"),
                            LOOP_HELP,
                        ));
                    }
                    Place::Last
                }
                Place::At(layout) => {
                    let rank = self.rank(node, input)?;
                    let axis =
                        crate::infer::shaping::axis_of(axes.get(input - states).copied().unwrap_or_default(), rank);
                    if axis != Ok(layout.axis) || !layout.is_clean() || layout.is_padded() {
                        return Err(refuse(node, format!("scans '{name}' along another axis than time"), LOOP_HELP));
                    }
                    len = Some(layout.len);
                    Place::Last
                }
                Place::Free => {
                    let axis = axes.get(input - states).copied().unwrap_or_default().max(0) as usize;
                    if !self.is_steady(name, Some(axis)) {
                        return Err(refuse(node, format!("scans '{name}', which isn't of the steps"), LOOP_HELP));
                    }
                    Place::Free
                }
                _ => return Err(refuse(node, format!("scans '{name}' of the last step"), LOOP_HELP)),
            };
            if let Some(input) = body.input.get(input) {
                inner.insert(input.name().to_owned(), of_body);
            }
        }
        let Some(len) = len else { return Err(refuse(node, "doesn't scan the steps", LOOP_HELP)) };
        let inferred = |shapes: &Shapes| {
            let mut inputs = HashMap::new();
            for (position, (input, name)) in body.input.iter().zip(&node.input).enumerate() {
                let mut value = Tensor { data: None, ..shapes.get(name) };
                let axis = position.checked_sub(states).map(|scanned| axes.get(scanned).copied().unwrap_or_default());
                if let (Some(dims), Some(axis)) = (&mut value.dims, axis) {
                    let axis = if axis < 0 { axis + dims.len() as i64 } else { axis } as usize;
                    if axis < dims.len() {
                        dims.remove(axis);
                    }
                }
                inputs.insert(input.name().to_owned(), value);
            }
            Shapes::infer(body, self.opset, inputs, Some(shapes))
        };
        let (short, long) = (inferred(self.short), inferred(self.long));
        let mut tracker = Tracker::new(body, self.opset, (&short, &long), inner);
        tracker.run()?;
        self.absorb(node, &tracker)?;
        let out_axes = scan_list(node, "scan_output_axes", body.output.len().saturating_sub(states));
        let output = |(output, value): (usize, &crate::onnx::schema::ValueInfoProto)| {
            if output < states {
                return Place::Last;
            }
            let rank = short.dims(value.name()).map_or(1, |dims| dims.len() as i64 + 1);
            let axis = out_axes.get(output - states).copied().unwrap_or_default();
            Place::At(Layout::clean((if axis < 0 { axis + rank } else { axis }) as usize, len))
        };
        let outputs = body.output.iter().enumerate().map(output).collect();
        self.found.cuts.push(Cut::Scan { node: index });
        Ok(outputs)
    }

    pub(super) fn if_node(&mut self, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let names: Vec<String> = node.graphs().flat_map(captured).chain(node.input.iter().cloned()).collect();
        let places: Vec<Place> = names.iter().map(|name| self.place(name)).collect();
        if places.iter().all(|&place| place == Place::Free) {
            return Ok(vec![Place::Free; node.output.len()]);
        }
        if !places.iter().any(|place| matches!(place, Place::At(_) | Place::Counter { .. })) {
            return Ok(vec![Place::Last; node.output.len()]);
        }
        let taken = |shapes: &Shapes| branch(node, &shapes.get(&node.input[0]));
        let (Some(graph), Some(other)) = (taken(self.short), taken(self.long)) else {
            return Err(refuse(node, "takes a branch that depends on data", "export the model without the condition"));
        };
        if !std::ptr::eq(graph, other) {
            return Err(refuse(
                node,
                "takes a branch that depends on the length of the input",
                "export the model without the condition",
            ));
        }
        let inferred = |shapes: &Shapes| Shapes::infer(graph, self.opset, HashMap::new(), Some(shapes));
        let (short, long) = (inferred(self.short), inferred(self.long));
        let places = captured(graph).into_iter().map(|name| (name.clone(), self.place(&name))).collect();
        let mut tracker = Tracker::new(graph, self.opset, (&short, &long), places);
        tracker.run()?;
        if !tracker.found.cuts.is_empty() {
            return Err(refuse(node, "has a recurrence in a branch", "export the model without the condition"));
        }
        self.found.quantized.extend(tracker.found.quantized.iter().cloned());
        Ok(graph.output.iter().map(|value| tracker.place(value.name())).collect())
    }
}

fn check_entry(node: &NodeProto, place: Place, allowed: &[Place]) -> Result<(), Refusal> {
    match place {
        Place::Counter { .. } => {
            Err(refuse(node, "computes with the number of the step, which starts again in each request", LOOP_HELP))
        }
        place if allowed.contains(&place) => Ok(()),
        _ => Err(refuse(node, "gives the whole input in each step", LOOP_HELP)),
    }
}

impl Carried {
    fn place(self, outside: Place) -> Place {
        match self {
            Self::Invariant => outside,
            Self::Counter { exact } => Place::Counter { exact },
            Self::Sequence => Place::Sequence,
            Self::Condition => Place::Counter { exact: false },
            Self::State => Place::Last,
        }
    }
}

/// What a carried value is.
fn kind(body: &GraphProto, carried: usize, start: &Tensor) -> Carried {
    let (Some(input), Some(output)) = (body.input.get(carried + 2), body.output.get(carried + 1)) else {
        return Carried::State;
    };
    let is_sequence = |value: &crate::onnx::schema::ValueInfoProto| {
        use crate::onnx::schema::type_proto::Value;
        matches!(value.r#type.as_ref().and_then(|kind| kind.value.as_ref()), Some(Value::SequenceType(_)))
    };
    if start.length.is_some() || is_sequence(input) {
        return Carried::Sequence;
    }
    if is_passed_on(body, carried + 2, carried + 1) {
        return Carried::Invariant;
    }
    let elem = if start.elem == 0 { input.elem() } else { start.elem };
    if elem == DataType::Bool as i32 {
        return Carried::Condition;
    }
    let is_integer = elem == DataType::Int32 as i32 || elem == DataType::Int64 as i32;
    let makes = |node: &&NodeProto| node.output.first().map(String::as_str) == Some(output.name());
    match body.node.iter().find(makes) {
        Some(node) if is_integer && node.op_type() == "Add" && node.input.iter().any(|name| name == input.name()) => {
            let other = node.input.iter().find(|name| *name != input.name());
            let step = other.and_then(|name| constant(body, name));
            match step {
                Some(step) => Carried::Counter { exact: step == 1.0 && start.scalar() == Some(0.0) },
                None => Carried::State,
            }
        }
        _ => Carried::State,
    }
}

/// A constant scalar of a body. One from outside the body counts as a step of 1 only if its name isn't the body's.
fn constant(body: &GraphProto, name: &str) -> Option<f64> {
    let shapes = Shapes::infer(body, 1, HashMap::new(), None);
    shapes.get(name).scalar()
}
