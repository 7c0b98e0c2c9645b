//! What a loop carries from turn to turn, and what its body computes with the number of the turn.

use std::collections::HashMap;

use super::refusal::{Result, UNKNOWN_SHAPE, WHOLE_INPUT, refuse};
use super::tracker::{FAR_OVER_SHORT, Layout, Place, Tracker};
use crate::infer::tensor::{Tensor, axis_of};
use crate::infer::{Shapes, is_passed_on, scan_counts, scan_list, source, turns};
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{DataType, is_integer};

pub const LOOP_HELP: &str = "a loop over the steps that reads step i in turn i can run in steps; export the model so";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    Invariant,
    /// If `exact`, counts turns from 0 by 1. Otherwise counts in another way, or says whether the loop continues.
    Counter {
        exact: bool,
    },
    Sequence,
    State,
}

impl Carried {
    /// `stride` is that of the steps.
    pub fn place(self, outside: Place, stride: i64) -> Place {
        match self {
            Self::Invariant => outside,
            Self::Counter { exact } => Place::Counter { exact },
            Self::Sequence => Place::Sequence { stride },
            Self::State => Place::Last,
        }
    }
}

pub fn kind<'a>(body: &'a GraphProto, carried: usize, start: &Tensor) -> Carried {
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
    // tf2onnx carries the condition as a value of its own, too.
    if elem == DataType::Bool as i32 && source(body, carried + 1) == source(body, 0) {
        return Carried::Counter { exact: false };
    }
    let makes = |node: &&NodeProto| node.output.first().map(String::as_str) == Some(output.name());
    let adds = |node: &&NodeProto| {
        is_integer(elem) && node.op() == "Add" && node.input.iter().any(|name| name == input.name())
    };
    let other = |node: &'a NodeProto| node.input.iter().find(|name| *name != input.name());
    // A constant of the body is known without the body's inputs.
    let constant = |name: &String| Shapes::infer(body, 1, HashMap::new(), None).get(name).scalar();
    match body.node.iter().find(makes).filter(adds).and_then(other).and_then(constant) {
        Some(step) => Carried::Counter { exact: step == 1.0 && start.scalar() == Some(0.0) },
        None => Carried::State,
    }
}

pub fn layouts(places: &[Place]) -> Vec<Layout> {
    places.iter().filter_map(Place::layout).collect()
}

pub fn without_steps(places: &[Place]) -> Place {
    if places.iter().any(|place| matches!(place, Place::Counter { .. })) {
        Place::Counter { exact: false }
    } else if places.iter().all(|&place| place == Place::Free) {
        Place::Free
    } else {
        Place::Last
    }
}

pub fn loop_output(
    node: &NodeProto,
    body: &GraphProto,
    inner: &Tracker,
    carried: usize,
    (kind, outside, starts_sized): (Carried, Place, bool),
) -> Result<Place> {
    let (input, output) = (body.input[carried + 2].name(), body.output[carried + 1].name());
    match kind {
        Carried::Invariant => return Ok(outside),
        // After the last turn, it only says how many steps the request has.
        Carried::Counter { .. } => return Ok(Place::Certain),
        Carried::Sequence => {
            let collected = inner.place(output);
            check_entry(node, collected, &[inner.place(input)])?;
            return Ok(collected);
        }
        Carried::State => {}
    }
    // The state of a later request would start from the steps of that request.
    if outside != Place::Free || starts_sized {
        let name = &node.input[carried + 2];
        return Err(refuse(node, format!("starts from '{name}', which comes from the steps"), LOOP_HELP));
    }
    check_entry(node, inner.place(output), &[Place::Last, Place::Free])?;
    inner.check_not_sized(node, [output])?;
    match (inner.dims(input), inner.dims(output)) {
        // A state has one shape in all requests.
        (Some(before), Some(after)) if before != after => {
            Err(refuse(node, format!("carries '{input}', which grows from {before:?} to {after:?}"), LOOP_HELP))
        }
        _ => Ok(Place::Last),
    }
}

pub fn check_entry(node: &NodeProto, place: Place, allowed: &[Place]) -> Result<()> {
    match place {
        Place::Counter { .. } => {
            Err(refuse(node, "computes with the number of the step, which starts again in each request", LOOP_HELP))
        }
        place if allowed.contains(&place) => Ok(()),
        _ => Err(refuse(node, "gives the whole input in each step", LOOP_HELP)),
    }
}

impl Tracker<'_> {
    /// Refuses a loop that doesn't turn once for each step. `recurrence` is the loop's index if it has a state: it is
    /// noted as a recurrence unless it is known to turn another number of times.
    pub fn check_turns(&mut self, node: &NodeProto, len: i64, recurrence: Option<usize>) -> Result<()> {
        let of = |shapes: &Shapes| turns(shapes, node, &shapes.inputs(node), self.opset);
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
                // Only now: a loop that turns another number of times runs over something else.
                self.found.recurrences.extend(recurrence);
                let why = "ends on a condition that depends on data, or turns too often to be followed";
                short.and(long).map(|_| ()).ok_or_else(|| refuse(node, why, LOOP_HELP))
            }
        }
    }

    pub fn scan_input(&self, node: &NodeProto, input: usize) -> Result<Place> {
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
}

/// Follows what a loop's body computes with the number of the step.
pub fn counted(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place> {
    let op = node.op();
    match places {
        [Place::At(layout), Place::Counter { exact: true }]
            if op == "Gather" && layout.is_clean() && !layout.is_padded() =>
        {
            let axis = axis_of(node.int("axis").unwrap_or(0), tracker.rank(node, 0)?);
            if axis == Ok(layout.axis) {
                Ok(Place::Last)
            } else {
                Err(refuse(node, "looks up another axis than time by the step's number", WHOLE_INPUT))
            }
        }
        [Place::Counter { exact: true }, others @ ..]
            if others.iter().all(|&place| place == Place::Free)
                && matches!(op, "Cast" | "Identity" | "Unsqueeze" | "Squeeze" | "Reshape") =>
        {
            Ok(Place::Counter { exact: true })
        }
        _ if places.iter().any(|place| matches!(place, Place::At(_))) => {
            Err(refuse(node, "reads the steps by more than the number of the one that runs", WHOLE_INPUT))
        }
        _ => Ok(Place::Counter { exact: false }),
    }
}

pub fn sequence(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place> {
    match (node.op(), places) {
        ("SequenceInsert", [sequence @ Place::Sequence { .. }, Place::Last, ..]) if node.input_at(2).is_none() => {
            Ok(*sequence)
        }
        ("SequenceInsert", [Place::Free, Place::Last, ..]) if node.input_at(2).is_none() => {
            Ok(Place::Sequence { stride: 1 })
        }
        ("Identity", [sequence @ Place::Sequence { .. }]) => Ok(*sequence),
        ("ConcatFromSequence", [Place::Sequence { stride }]) => {
            let dims = tracker.dims(&node.output[0]);
            let element = tracker.tensor(&node.input[0]);
            let (Some(dims), Some(len)) = (dims, element.length) else {
                return Err(refuse(node, "joins tensors of unknown shape", UNKNOWN_SHAPE));
            };
            let axis = axis_of(node.int("axis").unwrap_or(0), dims.len()).unwrap_or_default();
            // Without a new axis each tensor must have one element along the axis.
            if dims.get(axis) != Some(&len) {
                return Err(refuse(node, "joins several entries of each step", WHOLE_INPUT));
            }
            Ok(Place::At(Layout { stride: *stride, ..Layout::clean(axis, len) }))
        }
        _ => Err(refuse(node, "treats the steps as a sequence in a way that isn't known", WHOLE_INPUT)),
    }
}
