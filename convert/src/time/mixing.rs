//! Reductions, normalization and quantization.

use super::moves::along;
use super::rules::{ATTENTION, NORMALIZES, WHOLE_INPUT, first};
use super::{Layout, Place, Refusal, Tracker, UNKNOWN_SHAPE, refuse};
use crate::infer::shaping::axis_of;
use crate::onnx::element_count;
use crate::onnx::schema::NodeProto;

pub fn batch_normalization(node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    if node.int("training_mode").unwrap_or(0) != 0 {
        return Err(refuse(node, NORMALIZES, "export the model for inference").always_mixing());
    }
    if layout.axis == 1 {
        return Err(refuse(node, "has its own scale for each step", "export the model for inference"));
    }
    Ok(layout)
}

pub fn quantize(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let is_one = tracker.dims(&node.input[1]).is_some_and(|dims| element_count(dims) == 1);
    let axis = axis_of(node.int("axis").unwrap_or(1), tracker.rank(node, 0)?);
    if is_one || axis.is_ok_and(|axis| axis != layout.axis) {
        Ok(layout)
    } else {
        Err(refuse(node, "has its own scale for each step", WHOLE_INPUT))
    }
}

pub fn softmax(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let flattens = tracker.opset < 13;
    let axis =
        axis_of(node.int("axis").unwrap_or(if flattens { 1 } else { -1 }), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis == axis || flattens && layout.axis > axis {
        return Err(refuse(node, "takes a softmax over time", ATTENTION).always_mixing());
    }
    Ok(layout)
}

pub fn layer_normalization(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let axis = axis_of(node.int("axis").unwrap_or(-1), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis >= axis {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself").always_mixing());
    }
    Ok(layout)
}

/// A normalization over these axes.
pub fn normalize(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: &[i64]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let rank = tracker.rank(node, 0)?;
    if axes.iter().any(|&axis| axis_of(axis, rank).is_ok_and(|axis| axis == layout.axis)) {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself").always_mixing());
    }
    Ok(layout)
}

pub fn cumulative(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let axis = tracker.tensor(&node.input[1]).scalar().map(|axis| axis as i64);
    let help = "write the running sum as a Scan with a state, or take it in the client";
    let sums = |refusal: Refusal| Refusal { help: help.to_owned(), ..refusal };
    axis.map_or_else(
        || Err(refuse(node, "sums up along time", help)),
        |axis| along(tracker, node, places, axis, "sums up along time").map_err(sums),
    )
}

pub fn reduce(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: Option<&[i64]>) -> Result<Layout, Refusal> {
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
    let removed = (0..layout.axis).filter(|axis| axes.contains(axis)).count();
    Ok(if keeps { layout } else { layout.on(layout.axis - removed) })
}

/// An operator that mixes all axes behind the second.
pub fn global(node: &NodeProto, places: &[Place], why: &str) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let is_group = node.op() == "GroupNormalization";
    if layout.axis >= 2 || layout.axis == 1 && is_group {
        let refusal = refuse(node, why, "use a normalization or a reduction of each step by itself");
        return Err(if why == NORMALIZES { refusal.always_mixing() } else { refusal });
    }
    Ok(layout)
}
