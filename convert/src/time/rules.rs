//! What each operator does to steps.

use super::{Cut, Layout, Place, Refusal, Tracker, refuse, windows};
use crate::infer::ops::{BROADCAST, UNARY};
use crate::infer::shaping::{axis_of, list, permutation, slices};
use crate::onnx::schema::NodeProto;

const WHOLE_INPUT: &str = "the answer to a step depends on later steps, so the model can't run in steps";
const ATTENTION: &str = "attention over the whole input can't run in steps: export the model with a cache of keys and \
                         values, or with attention limited to the past";

/// Whether an operator works element by element on inputs that broadcast.
pub fn is_element_wise(op: &str) -> bool {
    UNARY.contains(&op) || BROADCAST.contains(&op) || op == "Where"
}

/// The places of a node's outputs. At least one of its inputs depends on steps.
pub fn apply(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Vec<Place>, Refusal> {
    let op = node.op_type();
    if places.iter().any(|place| matches!(place, Place::Counter { .. })) {
        return counted(tracker, node, places).map(|place| vec![place; node.output.len()]);
    }
    if places.contains(&Place::Sequence) || op == "SequenceInsert" {
        return sequence(tracker, node, places).map(|place| vec![place]);
    }
    if !places.iter().any(|place| matches!(place, Place::At(_))) {
        // All is of the last step.
        if is_element_wise(op) || matches!(op, "MatMul" | "Gemm") {
            check_steady(tracker, node, places)?;
        }
        return Ok(vec![Place::Last; node.output.len()]);
    }
    let one = |place: Result<Layout, Refusal>| place.map(|layout| vec![Place::At(layout); node.output.len()]);
    match op {
        _ if is_element_wise(op) => one(join(tracker, node, places)),
        "Transpose" => one(transpose(tracker, node, places)),
        "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" => one(reshape(tracker, node, places)),
        "Concat" => concat(tracker, index, node, places).map(|layout| vec![Place::At(layout)]),
        "Split" => one(split(tracker, node, places)),
        "Slice" => slice(tracker, index, node, places).map(|place| vec![place]),
        "Gather" => gather(tracker, node, places).map(|place| vec![place]),
        "Expand" | "Tile" => one(expand(tracker, node, places)),
        "MatMul" | "MatMulInteger" | "FusedMatMul" | "DynamicQuantizeMatMul" | "MatMulIntegerToFloat" => {
            if op == "DynamicQuantizeMatMul" {
                tracker.found.quantized.push(node.label().to_owned());
            }
            one(mat_mul(tracker, node, places))
        }
        "Gemm" | "FusedGemm" => one(gemm(tracker, node, places)),
        "BatchNormalization" => one(batch_normalization(node, places)),
        "QuantizeLinear" | "DequantizeLinear" => one(quantize(tracker, node, places)),
        "DynamicQuantizeLinear" => {
            tracker.found.quantized.push(node.label().to_owned());
            Ok(vec![places[0], Place::Free, Place::Free])
        }
        "Softmax" | "LogSoftmax" | "Hardmax" => one(softmax(tracker, node, places)),
        "LayerNormalization" | "SimplifiedLayerNormalization" => layer_normalization(tracker, node, places),
        "LpNormalization" => one(along(tracker, node, places, node.int("axis").unwrap_or(-1), NORMALIZES)),
        "TopK" => one(along(tracker, node, places, node.int("axis").unwrap_or(-1), "picks the largest over time")),
        "CumSum" => one(cumulative(tracker, node, places)),
        "ArgMax" | "ArgMin" => {
            let axes = [node.int("axis").unwrap_or(0)];
            one(reduce(tracker, node, places, Some(&axes)))
        }
        _ if op.starts_with("Reduce") => {
            let inputs: Vec<_> = node.input.iter().map(|name| tracker.tensor(name)).collect();
            let axes = list(node, &inputs, 1, "axes");
            one(reduce(tracker, node, places, axes.as_deref()))
        }
        "GlobalAveragePool" | "GlobalMaxPool" | "GlobalLpPool" => one(global(node, places, "reduces over time")),
        "InstanceNormalization" | "GroupNormalization" => one(global(node, places, NORMALIZES)),
        "Conv" | "FusedConv" | "ConvInteger" | "MaxPool" | "AveragePool" => {
            one(windows::window(tracker, index, node, places))
        }
        "Pad" => one(windows::pad(tracker, index, node, places)),
        "LSTM" | "GRU" | "RNN" | "DynamicQuantizeLSTM" => recurrent(tracker, index, node, places),
        "Einsum" => one(einsum(node, places)),
        "Attention" | "MultiHeadAttention" | "GroupQueryAttention" => {
            Err(refuse(node, "attends over the whole input", ATTENTION))
        }
        "ReverseSequence" => Err(refuse(node, "turns time around", WHOLE_INPUT)),
        _ => Err(refuse(
            node,
            format!("gets the steps, and it isn't known how {} treats them", node.operator()),
            "report the operator, or move it behind the model",
        )),
    }
}

const NORMALIZES: &str = "normalizes over time";

/// The layout of the first input; the others must not depend on steps.
fn first(node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    match places {
        [Place::At(layout), others @ ..] if others.iter().all(|&place| place == Place::Free) => Ok(*layout),
        _ => Err(refuse(node, "takes its parameters from the steps", WHOLE_INPUT)),
    }
}

/// Refuses inputs that depend on the number of steps in a way that no step alone can know.
fn check_steady(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<(), Refusal> {
    for (name, _) in node.input.iter().zip(places).filter(|(name, place)| !name.is_empty() && **place == Place::Free) {
        if !tracker.is_steady(name, None) {
            return Err(refuse(
                node,
                format!("takes '{name}', which depends on the length of the whole input"),
                WHOLE_INPUT,
            ));
        }
    }
    Ok(())
}

/// Inputs that broadcast to one shape.
fn join(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let ranks =
        (0..node.input.len()).map(|index| if node.input[index].is_empty() { Ok(0) } else { tracker.rank(node, index) });
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let rank = ranks.iter().copied().max().unwrap_or_default();
    let mut joined: Option<Layout> = None;
    for (&place, own) in places.iter().zip(&ranks) {
        let Place::At(layout) = place else { continue };
        let layout = layout.on(layout.axis + rank - own);
        match joined {
            Some(other) if other.axis != layout.axis => {
                return Err(refuse(node, "combines each step with every other", ATTENTION));
            }
            Some(other) if other != layout => {
                return Err(refuse(node, "combines steps of different times", "cut or pad both to the same steps"));
            }
            _ => joined = Some(layout),
        }
    }
    let Some(layout) = joined else { return Err(refuse(node, "takes its parameters from the steps", WHOLE_INPUT)) };
    for ((name, &place), own) in node.input.iter().zip(places).zip(&ranks) {
        match place {
            Place::Last => {
                return Err(refuse(
                    node,
                    format!("combines each step with '{name}', which only the last one has"),
                    WHOLE_INPUT,
                ));
            }
            Place::Free if !name.is_empty() => {
                let axis = (layout.axis + own).checked_sub(rank);
                if !tracker.is_steady(name, axis) {
                    let meets_steps =
                        axis.is_some_and(|axis| tracker.dims(name).is_none_or(|dims| dims.get(axis) != Some(&1)));
                    if !meets_steps {
                        return Err(refuse(
                            node,
                            format!("takes '{name}', which depends on the length of the whole input"),
                            WHOLE_INPUT,
                        ));
                    }
                    let help = "positions and masks over the whole input can't run in steps; if it is an input that \
                                has the steps too, name its axis with --time";
                    return Err(refuse(node, format!("takes '{name}', which has its own value for each step"), help));
                }
            }
            _ => {}
        }
    }
    Ok(layout)
}

fn transpose(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let order = permutation(node, tracker.rank(node, 0)?);
    let axis = order.iter().position(|&axis| axis == layout.axis);
    axis.map(|axis| layout.on(axis)).ok_or_else(|| refuse(node, "has no such axis", super::UNKNOWN_SHAPE))
}

fn reshape(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let (Some(from), Some(to)) = (tracker.dims(&node.input[0]), tracker.dims(&node.output[0])) else {
        return Err(refuse(node, "has a shape that isn't known before it runs", super::UNKNOWN_SHAPE));
    };
    layout.reshaped(from, to).ok_or_else(|| {
        refuse(
            node,
            format!("cuts the time axis into parts ({from:?} to {to:?})"),
            "blocks of steps can't run step by step",
        )
    })
}

fn concat(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let axis = axis_of(node.int("axis").unwrap_or(0), tracker.rank(node, 0)?).unwrap_or_default();
    let layouts: Vec<Layout> =
        places.iter().filter_map(|place| if let Place::At(layout) = place { Some(*layout) } else { None }).collect();
    let layout = layouts[0];
    if axis == layout.axis {
        return prefix(tracker, index, node, places, axis);
    }
    if layouts.iter().any(|&other| other != layout) {
        return Err(refuse(node, "combines steps of different times", WHOLE_INPUT));
    }
    for (name, &place) in node.input.iter().zip(places) {
        if place == Place::Last || place == Place::Free && !tracker.is_steady(name, Some(layout.axis)) {
            return Err(refuse(
                node,
                format!("joins each step with '{name}', which isn't the same for each"),
                WHOLE_INPUT,
            ));
        }
    }
    Ok(layout)
}

/// A tensor in front of the steps: padding, which the state takes over.
fn prefix(
    tracker: &mut Tracker,
    index: usize,
    node: &NodeProto,
    places: &[Place],
    axis: usize,
) -> Result<Layout, Refusal> {
    match places {
        [Place::Free, Place::At(layout)]
            if layout.is_clean() && !layout.is_padded() && tracker.is_steady(&node.input[0], None) =>
        {
            let Some(&frames) = tracker.dims(&node.input[0]).and_then(|dims| dims.get(axis)) else {
                return Err(refuse(
                    node,
                    "joins a tensor of unknown shape in front of the steps",
                    super::UNKNOWN_SHAPE,
                ));
            };
            tracker.found.cuts.push(Cut::Prefix { node: index, input: 0, axis, frames });
            Ok(Layout { len: layout.len + frames, lead: frames, ..*layout })
        }
        _ => Err(refuse(node, "joins tensors along time", "only padding in front of the steps can run in steps")),
    }
}

fn split(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let axis = node.int("axis").unwrap_or(0);
    along(tracker, node, places, axis, "takes the time axis apart, as an unrolled loop does")
}

/// An operator that mixes along one axis.
fn along(tracker: &Tracker, node: &NodeProto, places: &[Place], axis: i64, why: &str) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    match axis_of(axis, tracker.rank(node, 0)?) {
        Ok(axis) if axis != layout.axis => Ok(layout),
        _ => Err(refuse(node, why, WHOLE_INPUT)),
    }
}

const ONE_STEP: &str =
    "an unrolled loop can't run in steps: export the recurrence as a layer (LSTM, GRU), a Scan or a Loop";

fn slice(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Place, Refusal> {
    let layout = first(node, places)?;
    let of = |shapes: &crate::infer::Shapes| {
        let inputs: Vec<_> = node.input.iter().map(|name| shapes.get(name)).collect();
        let length = inputs[0].dims.as_ref().and_then(|dims| dims.get(layout.axis).copied());
        Some((length?, slices(node, &inputs).ok()??))
    };
    let (Some((short, taken)), Some((long, longer))) = (of(tracker.short), of(tracker.long)) else {
        return Err(refuse(node, "takes a part that isn't known before it runs", super::UNKNOWN_SHAPE));
    };
    let along = |taken: &[crate::infer::shaping::Taken]| taken.iter().find(|part| part.axis == layout.axis).copied();
    let (Some(part), Some(longer)) = (along(&taken), along(&longer)) else { return Ok(Place::At(layout)) };
    let both = |check: &dyn Fn(i64, &crate::infer::shaping::Taken) -> bool| check(short, &part) && check(long, &longer);
    if both(&|length, part| part.step == 1 && part.start == 0 && part.count == length) {
        return Ok(Place::At(layout));
    }
    if !layout.is_clean() {
        return Err(refuse(node, "takes a part of an axis that steps and others share", WHOLE_INPUT));
    }
    if layout.trail > 0
        && both(&|length, part| part.step == 1 && part.start == 0 && part.count == length - layout.trail)
    {
        tracker.found.cuts.push(Cut::Crop { node: index });
        return Ok(Place::At(Layout { len: layout.len - layout.trail, trail: 0, ..layout }));
    }
    if !layout.is_padded() && both(&|length, part| part.start == length - 1 && part.count == 1) {
        return Ok(Place::Last);
    }
    if part.step < 0 {
        return Err(refuse(node, "turns time around", WHOLE_INPUT));
    }
    Ok(Place::Certain)
}

/// Why what a node takes can't be used.
pub fn certain(node: &NodeProto) -> Refusal {
    refuse(node, "takes certain steps out of the whole input", ONE_STEP)
}

fn gather(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place, Refusal> {
    let rank = tracker.rank(node, 0)?;
    let axis = axis_of(node.int("axis").unwrap_or(0), rank).unwrap_or_default();
    match places[..2] {
        [Place::Free, Place::At(layout)] if tracker.is_steady(&node.input[0], None) => {
            Ok(Place::At(layout.on(axis + layout.axis)))
        }
        [Place::At(layout), Place::Free] if axis != layout.axis => {
            let shift = tracker.rank(node, 1)?;
            Ok(Place::At(if axis < layout.axis { layout.on(layout.axis + shift - 1) } else { layout }))
        }
        [Place::At(layout), Place::Free] => {
            let last = |shapes: &crate::infer::Shapes| {
                let length = *shapes.dims(&node.input[0])?.get(axis)? as f64;
                let index = shapes.get(&node.input[1]).scalar()?;
                Some(index == -1.0 || index == length - 1.0)
            };
            if layout.is_clean()
                && !layout.is_padded()
                && last(tracker.short) == Some(true)
                && last(tracker.long) == Some(true)
            {
                return Ok(Place::Last);
            }
            Ok(Place::Certain)
        }
        _ => Err(refuse(node, "looks steps up in steps", ATTENTION)),
    }
}

fn expand(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let (Some(from), Some(to)) = (tracker.dims(&node.input[0]), tracker.dims(&node.output[0])) else {
        return Err(refuse(node, "has a shape that isn't known before it runs", super::UNKNOWN_SHAPE));
    };
    let moved = layout.on(layout.axis + to.len() - from.len());
    if to[moved.axis] == from[layout.axis] { Ok(moved) } else { Err(refuse(node, "repeats the steps", WHOLE_INPUT)) }
}

fn mat_mul(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let (left, right) = (tracker.rank(node, 0)?, tracker.rank(node, 1)?);
    let sums = || refuse(node, "sums over time", ATTENTION);
    if node.int("transA").or(node.int("transB")).unwrap_or(0) != 0
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

fn gemm(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
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

fn batch_normalization(node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    if layout.axis == 1 || node.int("training_mode").unwrap_or(0) != 0 {
        return Err(refuse(node, "has its own scale for each step", "export the model for inference"));
    }
    Ok(layout)
}

fn quantize(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let is_one = tracker.dims(&node.input[1]).is_some_and(|dims| dims.iter().product::<i64>() == 1);
    let axis = axis_of(node.int("axis").unwrap_or(1), tracker.rank(node, 0)?);
    if is_one || axis.is_ok_and(|axis| axis != layout.axis) {
        Ok(layout)
    } else {
        Err(refuse(node, "has its own scale for each step", WHOLE_INPUT))
    }
}

fn softmax(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let flattens = tracker.opset < 13;
    let axis =
        axis_of(node.int("axis").unwrap_or(if flattens { 1 } else { -1 }), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis == axis || flattens && layout.axis > axis {
        return Err(refuse(node, "takes a softmax over time", ATTENTION));
    }
    Ok(layout)
}

fn layer_normalization(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Vec<Place>, Refusal> {
    let layout = first(node, places)?;
    let axis = axis_of(node.int("axis").unwrap_or(-1), tracker.rank(node, 0)?).unwrap_or_default();
    if layout.axis >= axis {
        return Err(refuse(node, NORMALIZES, "normalize each step by itself"));
    }
    Ok(vec![Place::At(layout); node.output.len()])
}

fn cumulative(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let axis = tracker.tensor(&node.input[1]).scalar().map(|axis| axis as i64);
    let help = "write the running sum as a Scan with a state";
    axis.map_or_else(
        || Err(refuse(node, "sums up along time", help)),
        |axis| along(tracker, node, places, axis, "sums up along time"),
    )
}

fn reduce(tracker: &Tracker, node: &NodeProto, places: &[Place], axes: Option<&[i64]>) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let rank = tracker.rank(node, 0)?;
    if axes.is_none() && node.input_at(1).is_some() {
        return Err(refuse(node, "reduces axes that aren't known before it runs", super::UNKNOWN_SHAPE));
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
    let removed = axes.iter().filter(|&&axis| axis < layout.axis).count();
    Ok(if keeps { layout } else { layout.on(layout.axis - removed) })
}

/// An operator that mixes all axes behind the second.
fn global(node: &NodeProto, places: &[Place], why: &str) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let is_group = node.op_type() == "GroupNormalization";
    if layout.axis >= 2 || layout.axis == 1 && is_group {
        return Err(refuse(node, why, "use a normalization or a reduction of each step by itself"));
    }
    Ok(layout)
}

fn recurrent(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Vec<Place>, Refusal> {
    let Place::At(layout) = places[0] else {
        return Err(refuse(node, "takes its weights or its initial state from the steps", WHOLE_INPUT));
    };
    let (time, batch) = if node.int("layout").unwrap_or(0) == 0 { (0, 1) } else { (1, 0) };
    let y_axis = |axis: usize| {
        if axis == 0 && time == 0 {
            0
        } else if axis == time {
            1
        } else if time == 0 {
            2
        } else {
            0
        }
    };
    if layout.axis == batch {
        // The steps are rows of a batch here: a recurrence along another axis.
        let starts_with_rows =
            |name: &str| tracker.follows_rows && tracker.place(name) == Place::At(layout.on(1 - time));
        if tracker.follows_rows
            && !layout.is_clean()
            && let Some(name) = node.input_at(5).filter(|name| !starts_with_rows(name))
        {
            let others = layout.outer * layout.inner;
            let why = format!("has the batch and {others} others in one axis, and '{name}' hasn't");
            return Err(refuse(node, why, WHOLE_INPUT));
        }
        for name in [5, 6].into_iter().filter_map(|input| node.input_at(input)) {
            if !starts_with_rows(name)
                && (tracker.place(name) != Place::Free || !tracker.is_steady(name, Some(1 - time)))
            {
                return Err(refuse(node, format!("starts each step from its own '{name}'"), WHOLE_INPUT));
            }
        }
        return Ok(vec![
            Place::At(layout.on(y_axis(batch))),
            Place::At(layout.on(1 - time)),
            Place::At(layout.on(1 - time)),
        ]);
    }
    if layout.axis != time || !layout.is_clean() {
        return Err(refuse(node, "sums over time", ATTENTION));
    }
    if layout.is_padded() {
        return Err(refuse(node, "runs over padding beside the steps", "remove the padding before the recurrence"));
    }
    tracker.found.reached += 1;
    match node.text("direction").as_deref() {
        None | Some("forward") => {}
        Some("bidirectional") => {
            let help = "a bidirectional layer needs the whole input: train the model with a forward layer";
            return Err(refuse(node, "is bidirectional", help));
        }
        Some(direction) => {
            return Err(refuse(node, format!("runs in direction {direction}"), "train the model with a forward layer"));
        }
    }
    if node.op_type() == "DynamicQuantizeLSTM" {
        tracker.found.quantized.push(node.label().to_owned());
    }
    let outputs = vec![Place::At(layout.on(y_axis(time))), Place::Last, Place::Last];
    let is_own = |input: usize| node.input_at(input).is_some_and(|name| tracker.of_states.contains(name));
    if is_own(5) || is_own(6) {
        // It starts at a state that the model has already.
        return Ok(outputs);
    }
    for (input, name) in [(4, "sequence_lens"), (5, "initial_h"), (6, "initial_c")] {
        if places.get(input).is_some_and(|&place| place != Place::Free) {
            return Err(refuse(node, format!("takes {name} from the steps"), WHOLE_INPUT));
        }
    }
    tracker.found.cuts.push(Cut::Recurrent { node: index });
    Ok(outputs)
}

fn einsum(node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
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

/// Inside a loop's body: what is computed with the number of the step.
fn counted(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place, Refusal> {
    let op = node.op_type();
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
fn sequence(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place, Refusal> {
    match (node.op_type(), places) {
        ("SequenceInsert", [Place::Sequence | Place::Free, Place::Last, ..]) if node.input_at(2).is_none() => {
            Ok(Place::Sequence)
        }
        ("Identity", [Place::Sequence]) => Ok(Place::Sequence),
        ("ConcatFromSequence", [Place::Sequence]) => {
            let dims = tracker.dims(&node.output[0]);
            let element = tracker.tensor(&node.input[0]);
            let (Some(dims), Some(len)) = (dims, element.length) else {
                return Err(refuse(node, "joins tensors of unknown shape", super::UNKNOWN_SHAPE));
            };
            let axis = axis_of(node.int("axis").unwrap_or(0), dims.len()).unwrap_or_default();
            // Without a new axis each tensor must have one element along the axis.
            if dims.get(axis) != Some(&len) {
                return Err(refuse(node, "joins several entries of each step", WHOLE_INPUT));
            }
            Ok(Place::At(Layout::clean(axis, len)))
        }
        _ => Err(refuse(node, "treats the steps as a sequence in a way that isn't known", WHOLE_INPUT)),
    }
}
