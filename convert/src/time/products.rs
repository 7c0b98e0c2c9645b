//! Matrix products and `Einsum`.

use super::rules::{ATTENTION, WHOLE_INPUT, first};
use super::{Layout, Place, Refusal, Tracker, refuse};
use crate::onnx::schema::NodeProto;

pub fn mat_mul(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let (left, right) = (tracker.rank(node, 0)?, tracker.rank(node, 1)?);
    let sums = || refuse(node, "sums over time", ATTENTION);
    let is_set = |name: &str| node.int(name).unwrap_or(0) != 0;
    // Free weights may lie the other way around: no step is in them.
    if ["transA", "transBatchA", "transBatchB"].iter().any(|name| is_set(name))
        || is_set("transB") && places[1] != Place::Free
        || places[2..].iter().any(|place| matches!(place, Place::At(_)))
    {
        return Err(refuse(node, "multiplies steps in a way that isn't known", ATTENTION));
    }
    let rank = left.max(right);
    match (places[0], places[1]) {
        (Place::At(a), Place::Free) if a.axis + 1 == left || left == 1 => Err(sums()),
        (Place::At(a), Place::Free) => {
            let moved = a.on(a.axis + rank - left);
            let axis = if a.axis + 2 == left { None } else { (moved.axis + right).checked_sub(rank) };
            if tracker.is_steady(&node.input[1], axis) {
                Ok(moved)
            } else {
                Err(refuse(node, "multiplies each step with its own matrix", ATTENTION))
            }
        }
        (Place::Free, Place::At(b)) if right == 1 || b.axis + 2 == right => Err(sums()),
        (Place::Free, Place::At(b)) => {
            let moved = b.on(b.axis + rank - right);
            let axis = if b.axis + 1 == right { None } else { (moved.axis + left).checked_sub(rank) };
            if tracker.is_steady(&node.input[0], axis) {
                Ok(moved)
            } else {
                Err(refuse(node, "multiplies each step with its own matrix", ATTENTION))
            }
        }
        // A product for each step.
        (Place::At(a), Place::At(b)) if a.axis + 2 < left && b.axis + 2 < right => {
            let (a, b) = (a.on(a.axis + rank - left), b.on(b.axis + rank - right));
            if a == b { Ok(a) } else { Err(refuse(node, "combines each step with every other", ATTENTION)) }
        }
        (Place::At(_), Place::At(_)) => Err(refuse(node, "combines each step with every other", ATTENTION)),
        _ => Err(refuse(node, "combines each step with one that only the last has", WHOLE_INPUT)),
    }
}

pub fn gemm(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let row = usize::from(node.int("transA").unwrap_or(0) != 0);
    if layout.axis != row {
        return Err(refuse(node, "sums over time", ATTENTION));
    }
    let bias = node.input_at(2).is_none_or(|bias| {
        let axis = tracker.dims(bias).and_then(|dims| dims.len().checked_sub(2));
        tracker.is_steady(bias, axis)
    });
    if !tracker.is_steady(&node.input[1], None) || !bias {
        return Err(refuse(node, "takes weights that depend on the length of the whole input", WHOLE_INPUT));
    }
    Ok(layout.on(0))
}

pub fn einsum(node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let equation = node.text("equation").unwrap_or_default().replace(' ', "");
    let (Some((terms, out)), false) = (equation.split_once("->"), equation.contains("...")) else {
        return Err(refuse(node, format!("has an equation that isn't followed ('{equation}')"), ATTENTION));
    };
    let mut found = None;
    for (term, &place) in terms.split(',').zip(places) {
        let Place::At(layout) = place else { continue };
        let label = term.chars().nth(layout.axis);
        let here = label.and_then(|label| Some((label, layout.on(out.chars().position(|other| other == label)?))));
        match (here, found) {
            (None, _) => return Err(refuse(node, "sums over time", ATTENTION)),
            (Some(here), Some(other)) if here != other => {
                return Err(refuse(node, "combines each step with every other", ATTENTION));
            }
            (here, _) => found = here,
        }
    }
    let Some((label, layout)) = found else {
        return Err(refuse(node, "takes its parameters from the steps", WHOLE_INPUT));
    };
    let others = terms.split(',').zip(places).any(|(term, &place)| {
        place != Place::Free && !matches!(place, Place::At(_)) || place == Place::Free && term.contains(label)
    });
    if others { Err(refuse(node, "multiplies each step with its own matrix", ATTENTION)) } else { Ok(layout) }
}
