//! Steps in `Loop`, `Scan` and `If`.

use std::collections::{HashMap, HashSet};

use super::rules::{CHECKER, WHOLE_INPUT};
use super::{Cut, Layout, Place, Refusal, Tracker, refuse};
use crate::analysis::{FAR_OVER_SHORT, check_far};
use crate::graph::captured;
use crate::infer::loops::{body_inputs, branch, is_passed_on, scan_body_inputs, scan_counts, scan_list, source, turns};
use crate::infer::shaping::axis_of;
use crate::infer::{Shapes, Tensor};
use crate::onnx::DataType;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};

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
    /// What says whether to go on.
    Condition,
    State,
}

impl<'a> Tracker<'a> {
    /// Follows the steps through a body or a branch. The first node in the way stands for all.
    fn run_inner(&mut self) -> Result<(), Refusal> {
        self.run().map_err(|refused| *refused.first)
    }

    pub(super) fn loop_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let Some(body) = node.graph("body") else { return Err(refuse(node, "has no body", LOOP_HELP)) };
        let captured = captured(body);
        let of_carried: Vec<Place> = node.input.iter().skip(2).map(|name| self.place(name)).collect();
        if body.input.len() != node.input.len() || !(2..=body.output.len() + 1).contains(&node.input.len()) {
            return Err(refuse(node, "has a body with other inputs or outputs", LOOP_HELP));
        }
        let places: Vec<Place> =
            captured.iter().map(|name| self.place(name)).chain(of_carried.iter().copied()).collect();
        let layouts = layouts(&places);
        let Some(&steps) = layouts.first() else {
            // It may still turn as often as a step says.
            let turns = node.input.iter().take(2).map(|name| self.place(name));
            let all: Vec<Place> = places.iter().copied().chain(turns).collect();
            let place = without_steps(&all);
            if place != Place::Free {
                self.check_not_sized(node, captured.iter().chain(&node.input))?;
            }
            return Ok(vec![place; node.output.len()]);
        };
        let mut names = captured.iter().chain(node.input.iter().skip(2));
        if let Some(name) = names.find(|name| self.place(name) == Place::Last) {
            return Err(refuse(node, format!("takes '{name}' of the last step in each step"), LOOP_HELP));
        }
        self.found.reached += 1;
        if layouts.iter().any(|other| (other.len, other.stride) != (steps.len, steps.stride)) {
            return Err(refuse(node, "reads steps of different times", LOOP_HELP));
        }
        let of = |shapes: &Shapes| -> Vec<Tensor> { node.input.iter().skip(2).map(|name| shapes.get(name)).collect() };
        let (short, long, far) = (of(self.short), of(self.long), of(self.far));
        let kinds: Vec<Carried> = (0..short.len()).map(|carried| kind(body, carried, &short[carried])).collect();
        self.check_turns(node, steps.len, kinds.contains(&Carried::State).then_some(index))?;
        let mut inner: HashMap<String, Place> = captured.iter().map(|name| (name.clone(), self.place(name))).collect();
        let name = |input: usize| body.input.get(input).map(|input| input.name().to_owned()).unwrap_or_default();
        inner.insert(name(0), Place::Counter { exact: true });
        inner.insert(name(1), Place::Counter { exact: false });
        for (carried, kind) in kinds.iter().enumerate() {
            inner.insert(name(carried + 2), kind.place(of_carried[carried], steps.stride));
        }
        let inferred = |shapes: &Shapes, carried: &[Tensor]| {
            Shapes::infer(body, self.opset, body_inputs(body, None, carried, false), Some(shapes))
        };
        let (short, long, far) = (inferred(self.short, &short), inferred(self.long, &long), inferred(self.far, &far));
        let mut tracker = Tracker::new(body, self.opset, (&short, &long, &far), inner);
        tracker.in_body = true;
        tracker.sized = self.sized_inside(&captured);
        let invariant = (0..kinds.len()).filter(|&carried| kinds[carried] == Carried::Invariant);
        tracker
            .sized
            .extend(invariant.filter(|carried| self.sized.contains(&node.input[carried + 2])).map(|of| name(of + 2)));
        tracker.run_inner()?;
        self.absorb(node, &tracker)?;
        let mut outputs = Vec::new();
        for (carried, &kind) in kinds.iter().enumerate() {
            let starts_sized = self.sized.contains(&node.input[carried + 2]);
            outputs.push(loop_output(node, body, &tracker, carried, (kind, of_carried[carried], starts_sized))?);
        }
        for output in &body.output[kinds.len() + 1..] {
            check_entry(node, tracker.place(output.name()), &[Place::Last, Place::Free])?;
            tracker.check_not_sized(node, [output.name()])?;
            outputs.push(Place::At(steps.stacked(0)));
        }
        let carried = (0..kinds.len()).filter(|&carried| kinds[carried] == Carried::State).collect();
        self.found.cuts.push(Cut::Loop { node: index, carried });
        Ok(outputs)
    }

    /// Refuses a loop that doesn't turn once for each step. `recurrence` is the loop's index if it has a state: it is noted
    /// as a recurrence unless it is known to turn another number of times.
    fn check_turns(&mut self, node: &NodeProto, len: i64, recurrence: Option<usize>) -> Result<(), Refusal> {
        let of = |shapes: &Shapes| {
            let inputs: Vec<Tensor> = node.input.iter().map(|name| shapes.get(name)).collect();
            turns(shapes, node, &inputs, self.opset)
        };
        let far = of(self.far);
        match (of(self.short), of(self.long)) {
            (Some(short), Some(long)) if short != len || long <= short => {
                Err(refuse(node, format!("turns {short} times for {len} steps"), LOOP_HELP))
            }
            (Some(short), Some(_)) if far.is_some_and(|far| far != short * FAR_OVER_SHORT) => {
                let far = far.unwrap_or_default();
                Err(refuse(node, format!("turns {far} times for {} steps", len * FAR_OVER_SHORT), LOOP_HELP))
            }
            (short, long) => {
                self.found.recurrences.extend(recurrence);
                let why = "ends on a condition that depends on data, or turns too often to be followed";
                short.and(long).map(|_| ()).ok_or_else(|| refuse(node, why, LOOP_HELP))
            }
        }
    }

    /// Of the tensors that a body takes from outside, those that depend on how many steps there are.
    fn sized_inside(&self, captured: &[String]) -> HashSet<String> {
        captured.iter().filter(|name| self.sized.contains(*name)).cloned().collect()
    }

    /// Refuses a node if one of these tensors depends on how many steps there are.
    pub(super) fn check_not_sized(
        &self,
        node: &NodeProto,
        names: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<(), Refusal> {
        match names.into_iter().find(|name| self.sized.contains(name.as_ref())) {
            Some(name) => {
                let why = format!("takes '{}', which depends on the length of the whole input", name.as_ref());
                Err(refuse(node, why, WHOLE_INPUT))
            }
            None => Ok(()),
        }
    }

    /// Takes over what was found in a body. Cuts inside it are none: its nodes run once a step.
    fn absorb(&mut self, node: &NodeProto, inner: &Tracker) -> Result<(), Refusal> {
        if !inner.found.cuts.is_empty() {
            return Err(refuse(node, "has a recurrence over the steps inside its body", LOOP_HELP));
        }
        self.found.quantized.extend(inner.found.quantized.iter().cloned());
        self.found.add_multiple(inner.found.multiple);
        Ok(())
    }

    pub(super) fn scan_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let Some(body) = node.graph("body") else { return Err(refuse(node, "has no body", LOOP_HELP)) };
        let scanned = node.int("num_scan_inputs").unwrap_or(0);
        if body.input.len() != node.input.len() || !(1..=node.input.len() as i64).contains(&scanned) {
            return Err(refuse(node, "has a body with other inputs", LOOP_HELP));
        }
        let places: Vec<Place> = node.input.iter().map(|name| self.place(name)).collect();
        let outside = captured(body);
        if outside.iter().any(|name| matches!(self.place(name), Place::At(_))) {
            return Err(refuse(node, "reads the whole input in each step", LOOP_HELP));
        }
        let Some(&steps) = layouts(&places).first() else {
            let all: Vec<Place> = places.iter().copied().chain(outside.iter().map(|name| self.place(name))).collect();
            return Ok(vec![without_steps(&all); node.output.len()]);
        };
        self.found.reached += 1;
        if let Some(name) = outside.iter().find(|name| self.place(name) == Place::Last) {
            return Err(refuse(node, format!("takes '{name}' of the last step in each step"), LOOP_HELP));
        }
        if self.opset < 9 {
            return Err(refuse(node, "is of an opset before 9", "convert the model to a newer opset"));
        }
        let (states, scanned) = scan_counts(node);
        let mut inner: HashMap<String, Place> = outside.iter().map(|name| (name.clone(), self.place(name))).collect();
        for (input, of_body) in body.input.iter().enumerate() {
            inner.insert(of_body.name().to_owned(), self.scan_input(node, input)?);
        }
        // All its states are states of the model already.
        let goes_on = states > 0 && node.input[..states].iter().all(|name| self.of_states.contains(name));
        if goes_on {
            self.found.goes_on = true;
        } else if states > 0 {
            self.found.recurrences.push(index);
        }
        let directions = scan_list(node, "scan_input_directions", scanned);
        let out_directions = scan_list(node, "scan_output_directions", body.output.len().saturating_sub(states));
        if directions.iter().chain(&out_directions).any(|&direction| direction != 0) {
            return Err(refuse(node, "scans backwards", "the answer to a step depends on later steps"));
        }
        let inferred = |shapes: &Shapes| {
            let (inputs, _) = scan_body_inputs(shapes, node, body);
            Shapes::infer(body, self.opset, inputs, Some(shapes))
        };
        let (short, long, far) = (inferred(self.short), inferred(self.long), inferred(self.far));
        let mut tracker = Tracker::new(body, self.opset, (&short, &long, &far), inner);
        tracker.in_body = true;
        tracker.sized = self.sized_inside(&outside);
        tracker.run_inner()?;
        self.absorb(node, &tracker)?;
        let out_axes = scan_list(node, "scan_output_axes", body.output.len().saturating_sub(states));
        let output = |(output, value): (usize, &ValueInfoProto)| {
            tracker.check_not_sized(node, [value.name()])?;
            if output < states {
                return Ok(Place::Last);
            }
            let rank = short.dims(value.name()).map_or(1, |dims| dims.len() + 1);
            let axis = axis_of(out_axes.get(output - states).copied().unwrap_or_default(), rank);
            axis.map(|axis| Place::At(steps.stacked(axis)))
                .map_err(|why| refuse(node, format!("stacks its output along {why}"), LOOP_HELP))
        };
        let outputs = body.output.iter().enumerate().map(output).collect::<Result<_, _>>()?;
        if !goes_on {
            self.found.cuts.push(Cut::Scan { node: index });
        }
        Ok(outputs)
    }

    /// The place of an input in a `Scan`'s body.
    fn scan_input(&self, node: &NodeProto, input: usize) -> Result<Place, Refusal> {
        let (name, place) = (&node.input[input], self.place(&node.input[input]));
        let (states, scanned) = scan_counts(node);
        if input < states {
            let all = &node.input[..states];
            return match place {
                Place::Free if !self.sized.contains(name) => Ok(Place::Last),
                Place::Last if all.iter().all(|name| self.of_states.contains(name)) => Ok(Place::Last),
                _ => Err(refuse(node, format!("starts from '{name}', which comes from the steps"), LOOP_HELP)),
            };
        }
        let axes = scan_list(node, "scan_input_axes", scanned);
        let axis =
            axis_of(axes.get(input - states).copied().unwrap_or_default(), self.rank(node, input)?).unwrap_or_default();
        match place {
            Place::At(layout) if axis != layout.axis || !layout.is_clean() || layout.is_padded() => {
                Err(refuse(node, format!("scans '{name}' along another axis than time"), LOOP_HELP))
            }
            Place::At(_) => Ok(Place::Last),
            Place::Free if self.is_steady(name, Some(axis)) => Ok(Place::Free),
            _ => Err(refuse(node, format!("scans '{name}', which isn't of the steps"), LOOP_HELP)),
        }
    }

    pub(super) fn if_node(&mut self, index: usize, node: &'a NodeProto) -> Result<Vec<Place>, Refusal> {
        let names: Vec<String> = node.graphs().flat_map(captured).chain(node.input.iter().cloned()).collect();
        let places: Vec<Place> = names.iter().map(|name| self.place(name)).collect();
        if places.iter().all(|&place| place == Place::Free) {
            return Ok(vec![Place::Free; node.output.len()]);
        }
        if !places.iter().any(|place| matches!(place, Place::At(_) | Place::Counter { .. })) {
            self.check_not_sized(node, &names)?;
            return Ok(vec![Place::Last; node.output.len()]);
        }
        if node.input.is_empty() {
            return Err(refuse(node, "has no condition", CHECKER));
        }
        let taken = |shapes: &Shapes| branch(node, &shapes.get(&node.input[0]));
        let (Some(graph), Some(other)) = (taken(self.short), taken(self.long)) else {
            return Err(refuse(node, "takes a branch that depends on data", "export the model without the condition"));
        };
        let is_other_far = match taken(self.far) {
            Some(far) => !std::ptr::eq(graph, far),
            // It isn't followed through all loops.
            None => self.sized.contains(&node.input[0]),
        };
        if !std::ptr::eq(graph, other) || is_other_far {
            return Err(refuse(
                node,
                "takes a branch that depends on the length of the input",
                "export the model without the condition",
            ));
        }
        let inferred = |shapes: &Shapes| Shapes::infer(graph, self.opset, HashMap::new(), Some(shapes));
        let (short, long, far) = (inferred(self.short), inferred(self.long), inferred(self.far));
        let captured = captured(graph);
        let places = captured.iter().map(|name| (name.clone(), self.place(name))).collect();
        let mut tracker = Tracker::new(graph, self.opset, (&short, &long, &far), places);
        tracker.sized = self.sized_inside(&captured);
        tracker.in_body = self.in_body;
        let result = tracker.run_inner().and_then(|()| check_far(graph, &tracker.found, &far));
        if !tracker.found.recurrences.is_empty() {
            self.found.recurrences.push(index);
        }
        result?;
        if !tracker.found.cuts.is_empty() {
            return Err(refuse(node, "has a recurrence in a branch", "export the model without the condition"));
        }
        self.found.quantized.extend(tracker.found.quantized.iter().cloned());
        self.found.add_multiple(tracker.found.multiple);
        let sized = graph.output.iter().zip(&node.output).filter(|(value, _)| tracker.sized.contains(value.name()));
        self.sized.extend(sized.map(|(_, output)| output.clone()));
        Ok(graph.output.iter().map(|value| tracker.place(value.name())).collect())
    }
}

/// The layouts of the places with steps.
fn layouts(places: &[Place]) -> Vec<Layout> {
    places.iter().filter_map(|place| if let Place::At(layout) = place { Some(*layout) } else { None }).collect()
}

/// The place of what a loop gives if no steps go in.
fn without_steps(places: &[Place]) -> Place {
    if places.iter().any(|place| matches!(place, Place::Counter { .. })) {
        Place::Counter { exact: false }
    } else if places.iter().all(|&place| place == Place::Free) {
        Place::Free
    } else {
        Place::Last
    }
}

/// The place of the last value that a `Loop` carries.
fn loop_output(
    node: &NodeProto,
    body: &GraphProto,
    inner: &Tracker,
    carried: usize,
    (kind, outside, starts_sized): (Carried, Place, bool),
) -> Result<Place, Refusal> {
    let (input, output) = (body.input[carried + 2].name(), body.output[carried + 1].name());
    match kind {
        Carried::Invariant => return Ok(outside),
        // How many steps the request has.
        Carried::Counter { .. } | Carried::Condition => return Ok(Place::Certain),
        Carried::Sequence => {
            let collected = inner.place(output);
            check_entry(node, collected, &[inner.place(input)])?;
            return Ok(collected);
        }
        Carried::State => {}
    }
    if outside != Place::Free || starts_sized {
        let name = &node.input[carried + 2];
        return Err(refuse(node, format!("starts from '{name}', which comes from the steps"), LOOP_HELP));
    }
    check_entry(node, inner.place(output), &[Place::Last, Place::Free])?;
    inner.check_not_sized(node, [output])?;
    match (inner.dims(input), inner.dims(output)) {
        (Some(before), Some(after)) if before != after => {
            Err(refuse(node, format!("carries '{input}', which grows from {before:?} to {after:?}"), LOOP_HELP))
        }
        _ => Ok(Place::Last),
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
    /// `stride` is that of the steps.
    fn place(self, outside: Place, stride: i64) -> Place {
        match self {
            Self::Invariant => outside,
            Self::Counter { exact } => Place::Counter { exact },
            Self::Sequence => Place::Sequence { stride },
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
    let is_sequence = |value: &ValueInfoProto| {
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
    if elem == DataType::Bool as i32 && source(body, carried + 1) == source(body, 0) {
        return Carried::Condition;
    }
    let is_integer = elem == DataType::Int32 as i32 || elem == DataType::Int64 as i32;
    let makes = |node: &&NodeProto| node.output.first().map(String::as_str) == Some(output.name());
    match body.node.iter().find(makes) {
        Some(node) if is_integer && node.op() == "Add" && node.input.iter().any(|name| name == input.name()) => {
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

/// A constant scalar of a body.
fn constant(body: &GraphProto, name: &str) -> Option<f64> {
    let shapes = Shapes::infer(body, 1, HashMap::new(), None);
    shapes.get(name).scalar()
}
