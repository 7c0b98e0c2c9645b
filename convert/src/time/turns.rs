//! What is computed with the number of a turn of a loop, and sequences with a tensor for each step.

use super::rules::WHOLE_INPUT;
use super::{Layout, Place, Refusal, Tracker, UNKNOWN_SHAPE, refuse};
use crate::infer::shaping::axis_of;
use crate::onnx::schema::NodeProto;

/// Inside a loop's body: what is computed with the number of the step.
pub fn counted(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place, Refusal> {
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

/// Sequences with a tensor for each step.
pub fn sequence(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place, Refusal> {
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
