//! Operators that move, join or take elements.

use super::refusal::{ATTENTION, ONE_STEP, Refusal, Result, UNKNOWN_SHAPE, WHOLE_INPUT, refuse};
use super::tracker::{Cut, Layout, Place, Tracker, first};
use crate::infer::Shapes;
use crate::infer::shaping::{Taken, permutation, slices};
use crate::infer::tensor::axis_of;
use crate::onnx::schema::NodeProto;

pub fn transpose(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let order = permutation(node, tracker.rank(node, 0)?);
    let axis = order.iter().position(|&axis| axis == layout.axis);
    axis.map(|axis| layout.on(axis)).ok_or_else(|| refuse(node, "has no such axis", UNKNOWN_SHAPE))
}

pub fn reshape(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let (Some(from), Some(to)) = (tracker.dims(&node.input[0]), tracker.dims(&node.output[0])) else {
        return Err(refuse(node, "has a shape that isn't known before it runs", UNKNOWN_SHAPE));
    };
    let why = || format!("cuts the time axis into parts ({from:?} to {to:?})");
    layout.reshaped(from, to).ok_or_else(|| refuse(node, why(), "blocks of steps can't run step by step"))
}

pub fn concat(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let axis = axis_of(node.int("axis").unwrap_or(0), tracker.rank(node, 0)?).unwrap_or_default();
    let layouts: Vec<Layout> = places.iter().filter_map(Place::layout).collect();
    let layout = layouts[0];
    // Along time, only padding may be joined; along other axes, what is the same for each step.
    if axis == layout.axis {
        return prefix(tracker, index, node, places, axis);
    }
    if layouts.iter().any(|&other| other != layout) {
        return Err(refuse(node, "combines steps of different times", WHOLE_INPUT));
    }
    for (name, &place) in node.input.iter().zip(places) {
        if place == Place::Last || place == Place::Free && !tracker.is_steady(name, Some(layout.axis)) {
            let why = format!("joins each step with '{name}', which isn't the same for each");
            return Err(refuse(node, why, WHOLE_INPUT));
        }
    }
    Ok(layout)
}

/// Joins a tensor in front of the steps. It is padding, which a state replaces.
fn prefix(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place], axis: usize) -> Result<Layout> {
    match places {
        [Place::Free, Place::At(layout)]
            if layout.is_clean() && !layout.is_padded() && tracker.is_steady(&node.input[0], None) =>
        {
            let Some(&frames) = tracker.dims(&node.input[0]).and_then(|dims| dims.get(axis)) else {
                return Err(refuse(node, "joins a tensor of unknown shape in front of the steps", UNKNOWN_SHAPE));
            };
            tracker.found.cuts.push(Cut::Prefix { node: index, axis, frames });
            Ok(Layout { len: layout.len + frames, lead: frames, ..*layout })
        }
        _ => Err(refuse(node, "joins tensors along time", "only padding in front of the steps can run in steps")),
    }
}

pub fn along(tracker: &Tracker, node: &NodeProto, places: &[Place], axis: i64, why: &str) -> Result<Layout> {
    let layout = first(node, places)?;
    match axis_of(axis, tracker.rank(node, 0)?) {
        Ok(axis) if axis != layout.axis => Ok(layout),
        _ => Err(refuse(node, why, WHOLE_INPUT)),
    }
}

/// `ReverseSequence`: turns each entry of one axis around along another, by a length of its own.
pub fn reversed(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let rank = tracker.rank(node, 0)?;
    let of = |name: &str, default: i64| axis_of(node.int(name).unwrap_or(default), rank).ok();
    let (entries, turned) = (of("batch_axis", 1), of("time_axis", 0));
    match *places {
        [Place::At(layout), lengths] if turned != Some(layout.axis) => match lengths {
            Place::Free if entries != Some(layout.axis) || tracker.is_steady(&node.input[1], Some(0)) => Ok(layout),
            Place::At(of) if entries == Some(layout.axis) && of == layout.on(0) => Ok(layout),
            _ => Err(refuse(node, "takes its lengths from other steps", WHOLE_INPUT)),
        },
        _ => Err(refuse(node, "turns time around", WHOLE_INPUT)),
    }
}

pub fn slice(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Place> {
    let layout = first(node, places)?;
    let of = |shapes: &Shapes| {
        let inputs = shapes.inputs(node);
        let length = inputs[0].dims.as_ref().and_then(|dims| dims.get(layout.axis).copied());
        Some((length?, slices(node, &inputs).ok()??))
    };
    let (Some((short, taken)), Some((long, longer))) = (of(tracker.short), of(tracker.long)) else {
        return Err(refuse(node, "takes a part that isn't known before it runs", UNKNOWN_SHAPE));
    };
    let others =
        |taken: &[Taken]| -> Vec<Taken> { taken.iter().filter(|part| part.axis != layout.axis).copied().collect() };
    // Two lengths can agree by chance; the third is beyond the limits of models.
    let far = of(tracker.far).map(|(_, taken)| others(&taken));
    if others(&taken) != others(&longer) || far.is_some_and(|far| far != others(&taken)) {
        return Err(refuse(node, "takes a part that depends on the length of the whole input", WHOLE_INPUT));
    }
    let along = |taken: &[Taken]| taken.iter().find(|part| part.axis == layout.axis).copied();
    let (Some(part), Some(longer)) = (along(&taken), along(&longer)) else { return Ok(Place::At(layout)) };
    let both = |check: &dyn Fn(i64, &Taken) -> bool| check(short, &part) && check(long, &longer);
    if both(&|length, part| part.step == 1 && part.start == 0 && part.count == length) {
        return Ok(Place::At(layout));
    }
    if !layout.is_clean() {
        return Err(refuse(node, "takes a part of an axis that steps and others share", WHOLE_INPUT));
    }
    // This cuts off what padding added, so the node goes away with the padding.
    let takes_steps_only = others(&taken).is_empty();
    if layout.trail > 0
        && takes_steps_only
        && both(&|length, part| part.step == 1 && part.start == 0 && part.count == length - layout.trail)
    {
        tracker.found.cuts.push(Cut::Crop { node: index });
        return Ok(Place::At(Layout { len: layout.len - layout.trail, trail: 0, ..layout }));
    }
    // As many steps as there are, out of the steps and the padding in front of them: this delays the steps.
    if layout.trail == 0
        && both(&|length, taken| {
            taken.step == 1
                && taken.count == length - layout.lead
                && taken.start == part.start
                && part.start <= layout.lead
        })
        && of(tracker.far).and_then(|(_, taken)| along(&taken)).is_none_or(|far| far.start == part.start)
    {
        tracker.found.reached += 1;
        return Ok(Place::At(Layout { len: layout.len - layout.lead, lead: 0, ..layout }));
    }
    // The last step of each request is the answer that a client waits for.
    let is_last = |length: i64, part: &Taken| part.start == length - 1 && part.count == 1;
    let is_last_far =
        || of(tracker.far).is_none_or(|(length, taken)| along(&taken).is_some_and(|part| is_last(length, &part)));
    if !layout.is_padded() && !tracker.in_body && both(&is_last) && is_last_far() {
        return Ok(Place::Last);
    }
    // Checked before certain steps are, because their help would not fit.
    if part.step < 0 {
        return Err(refuse(node, "turns time around", WHOLE_INPUT));
    }
    Ok(Place::Certain)
}

pub fn certain(node: &NodeProto) -> Refusal {
    refuse(node, "takes certain steps out of the whole input, which later requests don't have", ONE_STEP)
}

pub fn gather(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Place> {
    let rank = tracker.rank(node, 0)?;
    let axis = axis_of(node.int("axis").unwrap_or(0), rank).unwrap_or_default();
    match places[..2] {
        [Place::Free, Place::At(layout)] if tracker.is_steady(&node.input[0], None) => {
            Ok(Place::At(layout.on(axis + layout.axis)))
        }
        [Place::At(layout), Place::Free] if axis != layout.axis => {
            tracker.check_not_sized(node, &node.input[1..2])?;
            // Gather replaces its axis by those of the indices.
            let shift = tracker.rank(node, 1)?;
            Ok(Place::At(if axis < layout.axis { layout.on(layout.axis + shift - 1) } else { layout }))
        }
        [Place::At(layout), Place::Free] => {
            let last = |shapes: &Shapes| {
                let length = *shapes.dims(&node.input[0])?.get(axis)? as f64;
                let index = shapes.get(&node.input[1]).scalar()?;
                Some(index == -1.0 || index == length - 1.0)
            };
            if layout.is_clean()
                && !tracker.in_body
                && !layout.is_padded()
                && last(tracker.short) == Some(true)
                && last(tracker.long) == Some(true)
                && last(tracker.far) != Some(false)
            {
                return Ok(Place::Last);
            }
            Ok(Place::Certain)
        }
        _ => Err(refuse(node, "looks steps up in steps", ATTENTION)),
    }
}

pub fn expand(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let (Some(from), Some(to)) = (tracker.dims(&node.input[0]), tracker.dims(&node.output[0])) else {
        return Err(refuse(node, "has a shape that isn't known before it runs", UNKNOWN_SHAPE));
    };
    // Expand may add axes in front.
    let moved = layout.on((layout.axis + to.len()).saturating_sub(from.len()));
    if to.get(moved.axis) == from.get(layout.axis) {
        Ok(moved)
    } else {
        Err(refuse(node, "repeats the steps", WHOLE_INPUT))
    }
}

/// Elements of each step, at places along another axis.
pub fn elements(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let axis = axis_of(node.int("axis").unwrap_or(0), tracker.rank(node, 0)?);
    match places {
        [Place::At(layout), others @ ..]
            if others.iter().all(|&place| place == places[0]) && axis.is_ok_and(|axis| axis != layout.axis) =>
        {
            Ok(*layout)
        }
        _ => Err(refuse(node, "takes elements out of the steps, or puts them at places among the steps", WHOLE_INPUT)),
    }
}

pub fn one_hot(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let axis = axis_of(node.int("axis").unwrap_or(-1), tracker.rank(node, 0)? + 1);
    Ok(if axis.is_ok_and(|axis| axis <= layout.axis) { layout.on(layout.axis + 1) } else { layout })
}

/// A `Resize` or `Upsample` of other axes. The axis with the steps keeps its length, whatever it is.
pub fn resize(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let keeps = |shapes: &Shapes| {
        let length = |name: &str| shapes.dims(name).and_then(|dims| dims.get(layout.axis).copied());
        Some(length(&node.output[0])? == length(&node.input[0])?)
    };
    // A crop of the same length may still move the steps.
    let crops = node.text("coordinate_transformation_mode").is_some_and(|mode| mode == "tf_crop_and_resize");
    match (keeps(tracker.short), keeps(tracker.long)) {
        (Some(true), Some(true)) if !crops => Ok(layout),
        (None, _) | (_, None) => Err(refuse(node, "has a shape that isn't known before it runs", UNKNOWN_SHAPE)),
        _ => Err(refuse(node, "changes the number of steps", "resize behind the model")),
    }
}

/// A `ScatterND` whose indices don't reach the axis of the steps.
pub fn scatter(tracker: &Tracker, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let refused = || refuse(node, "puts tensors at certain places among the steps", WHOLE_INPUT);
    let &[Place::At(data), Place::Free, Place::At(updates)] = places else { return Err(refused()) };
    let indices = tracker.dims(&node.input[1]).filter(|_| tracker.is_steady(&node.input[1], None));
    let (Some(&depth), Some(rank)) = (indices.and_then(<[i64]>::last), indices.map(<[i64]>::len)) else {
        return Err(refused());
    };
    let axis =
        usize::try_from(depth).ok().and_then(|depth| data.axis.checked_sub(depth)).map(|behind| behind + rank - 1);
    if axis == Some(updates.axis) && updates.on(data.axis) == data { Ok(data) } else { Err(refused()) }
}
