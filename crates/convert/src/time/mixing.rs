//! Operators that combine elements, and must not combine those of different steps: matrix products, reductions,
//! normalization and quantization.

use super::moves::along;
use super::place::{Layout, Place};
use super::refusal::{ATTENTION, NORMALIZES, Refusal, Result, UNKNOWN_SHAPE, WHOLE_INPUT, refuse};
use super::tracker::{Tracker, first};
use crate::infer::tensor::axis_of;
use crate::onnx::element_count;
use crate::onnx::schema::NodeProto;

pub fn mat_mul(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let (left, right) = (tracker.rank(node, 0)?, tracker.rank(node, 1)?);
    let sums = || refuse(node, "sums over time", ATTENTION);
    let is_set = |name: &str| node.int(name).unwrap_or(0) != 0;
    // Weights without steps may be transposed.
    if ["transA", "transBatchA", "transBatchB"].iter().any(|name| is_set(name))
        || is_set("transB") && places[1] != Place::Free
        || places[2..].iter().any(|place| matches!(place, Place::At(_)))
    {
        return Err(refuse(node, "multiplies steps in a way that isn't known", ATTENTION));
    }
    let rank = left.max(right);
    match (places[0], places[1]) {
        (Place::At(a), Place::Free) if a.axis + 1 == left || left == 1 => Err(sums()),
        (Place::Free, Place::At(b)) if right == 1 || b.axis + 2 == right => Err(sums()),
        (Place::At(steps), Place::Free) | (Place::Free, Place::At(steps)) => {
            // The axis of the steps is one of the product's own, or one that the other factor may have as well.
            let (own, other, own_axis, factor) = if places[0] == Place::Free {
                (right, left, steps.axis + 1 == right, &node.input[0])
            } else {
                (left, right, steps.axis + 2 == left, &node.input[1])
            };
            let moved = steps.on(steps.axis + rank - own);
            let axis = if own_axis { None } else { (moved.axis + other).checked_sub(rank) };
            if tracker.is_steady(factor, axis) {
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

pub fn gemm(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let row = usize::from(node.int("transA").unwrap_or(0) != 0);
    if layout.axis != row {
        return Err(refuse(node, "sums over time", ATTENTION));
    }
    // A bias with an entry for each row would have one for each step.
    let bias = node.input_at(2).is_none_or(|bias| {
        let axis = tracker.dims(bias).and_then(|dims| dims.len().checked_sub(2));
        tracker.is_steady(bias, axis)
    });
    if !tracker.is_steady(&node.input[1], None) || !bias {
        return Err(refuse(node, "takes weights that depend on the length of the whole input", WHOLE_INPUT));
    }
    Ok(layout.on(0))
}

pub fn einsum(node: &NodeProto, places: &[Place]) -> Result<Layout> {
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

pub fn batch_normalization(node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    if node.int("training_mode").unwrap_or(0) != 0 {
        return Err(refuse(node, NORMALIZES, "export the model for inference").always_mixing());
    }
    // Axis 1 has the channels, each with a scale of its own.
    if layout.axis == 1 {
        return Err(refuse(node, "has its own scale for each step", "export the model for inference"));
    }
    Ok(layout)
}

pub fn quantize(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    // One scale for all steps is the same in each request; a scale along another axis, too.
    let is_one = tracker.dims(&node.input[1]).is_some_and(|dims| element_count(dims) == 1);
    let axis = axis_of(node.int("axis").unwrap_or(1), tracker.rank(node, 0)?);
    if is_one || axis.is_ok_and(|axis| axis != layout.axis) {
        Ok(layout)
    } else {
        Err(refuse(node, "has its own scale for each step", WHOLE_INPUT))
    }
}

pub fn softmax(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    // Before opset 13, Softmax takes all axes from this one on together.
    let flattens = tracker.opset < 13;
    let axis =
        axis_of(node.int("axis").unwrap_or(if flattens { 1 } else { -1 }), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis == axis || flattens && layout.axis > axis {
        return Err(refuse(node, "takes a softmax over time", ATTENTION).always_mixing());
    }
    Ok(layout)
}

pub fn layer_normalization(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let axis = axis_of(node.int("axis").unwrap_or(-1), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis >= axis {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself").always_mixing());
    }
    Ok(layout)
}

pub fn normalize(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: &[i64]) -> Result<Layout> {
    let layout = first(node, places)?;
    let rank = tracker.rank(node, 0)?;
    if axes.iter().any(|&axis| axis_of(axis, rank).is_ok_and(|axis| axis == layout.axis)) {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself").always_mixing());
    }
    Ok(layout)
}

pub fn cumulative(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let (why, help) = ("sums up along time", "write the running sum as a Scan with a state, or take it in the client");
    let axis = tracker.tensor(&node.input[1]).scalar().ok_or_else(|| refuse(node, why, help))?;
    // The general help speaks of later steps, which a running sum does not need.
    along(tracker, node, places, axis as i64, why).map_err(|refusal| Refusal { help: help.to_owned(), ..refusal })
}

pub fn reduce(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: Option<&[i64]>) -> Result<Layout> {
    let layout = first(node, places)?;
    let rank = tracker.rank(node, 0)?;
    if axes.is_none() && node.input_at(1).is_some() {
        return Err(refuse(node, "reduces axes that aren't known before it runs", UNKNOWN_SHAPE));
    }
    let noop = node.int("noop_with_empty_axes").unwrap_or(0) != 0;
    let axes: Vec<usize> = match axes {
        Some(axes) if !axes.is_empty() => axes.iter().filter_map(|&axis| axis_of(axis, rank).ok()).collect(),
        _ if noop => return Ok(layout),
        _ => (0..rank).collect(),
    };
    if axes.contains(&layout.axis) {
        return Err(refuse(node, "reduces over time", "take the last step instead, or reduce behind the model"));
    }
    let keeps = node.int("keepdims").unwrap_or(1) != 0;
    // Without keepdims, the axes in front that are reduced are gone.
    let removed = (0..layout.axis).filter(|axis| axes.contains(axis)).count();
    Ok(if keeps { layout } else { layout.on(layout.axis - removed) })
}

/// An operator that mixes all axes after the second.
pub fn global(node: &NodeProto, places: &[Place], why: &str) -> Result<Layout> {
    let layout = first(node, places)?;
    let is_group = node.op() == "GroupNormalization";
    if layout.axis >= 2 || layout.axis == 1 && is_group {
        let refusal = refuse(node, why, "use a normalization or a reduction of each step by itself");
        return Err(if why == NORMALIZES { refusal.always_mixing() } else { refusal });
    }
    Ok(layout)
}
