//! Convolutions and pooling over time, and the padding in front of them.

use super::place::{Cut, Layout, Place};
use super::refusal::{Refusal, UNKNOWN_SHAPE, refuse};
use super::tracker::{Tracker, first};
use crate::infer::Shapes;
use crate::infer::ops::{Window, pads, window_at};
use crate::onnx::DataType;
use crate::onnx::schema::NodeProto;

pub fn window(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let Place::At(layout) = places[0] else { return Err(refuse(node, "takes its weights from the steps", HELP)) };
    if places[1..].iter().any(|&place| place != Place::Free) {
        return Err(refuse(node, "takes its weights from the steps", HELP));
    }
    // Only convolutions have weights and mix channels.
    let is_conv = node.op().contains("Conv");
    match layout.axis {
        0 => return Ok(layout),
        1 if is_conv => return Err(refuse(node, "mixes the steps as channels", HELP)),
        // Pooling keeps channels apart.
        1 => return Ok(layout),
        _ => {}
    }
    let rank = tracker.rank(node, 0)?;
    let weights = if is_conv { tracker.dims(&node.input[1]) } else { None };
    let window = window_at(node, weights, layout.axis - 2, rank)
        .ok_or_else(|| refuse(node, "has a window of unknown or impossible size", UNKNOWN_SHAPE))?;
    if window.reach() == 0 && window.stride == 1 && window.before == 0 && window.behind == 0 {
        return Ok(layout);
    }
    tracker.found.reached += 1;
    check(node, layout, window)?;
    let lead = layout.lead + window.before;
    let out = tracker.dims(&node.output[0]).and_then(|dims| dims.get(layout.axis).copied());
    // Padding makes no steps of its own.
    let steps = layout.len - layout.lead - layout.trail;
    let expected = steps / window.stride;
    // More outputs than steps come from padding behind the last one, and must be cut off later.
    let trail = out.map_or(-1, |out| out - expected);
    // With a stride, steps and padding would share windows.
    if trail < 0 || trail > 0 && window.stride > 1 || node.int("ceil_mode").unwrap_or(0) != 0 && window.stride > 1 {
        return Err(refuse(node, format!("makes {} steps of {steps}", out.unwrap_or_default()), HELP));
    }
    if window.before > 0 {
        tracker.found.cuts.push(Cut::Frames {
            node: index,
            axis: layout.axis,
            frames: lead,
            cropped: 0,
            fill: fill(tracker, node)?,
        });
    } else if lead == 0 && (window.behind > 0 || trail > 0) {
        return Err(refuse(node, "pads behind the last step", HELP));
    }
    let stride = layout.stride * window.stride;
    tracker.found.add_multiple(stride);
    Ok(Layout { len: expected + trail, lead: 0, trail, stride, ..layout })
}

/// A transposed convolution: each step reaches into later ones.
pub fn transposed(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    const HELP: &str = "cut off the last steps only, by the kernel's reach, and export the model again";
    let layout = first(node, places)?;
    match layout.axis {
        0 => return Ok(layout),
        1 => return Err(refuse(node, "mixes the steps as channels", HELP)),
        _ => {}
    }
    let spatial = layout.axis - 2;
    let rank = tracker.rank(node, 0)?;
    let window = window_at(node, tracker.dims(&node.input[1]), spatial, rank);
    let (Some(window), Some(_)) = (window, tracker.dims(&node.output[0])) else {
        return Err(refuse(node, "has a window or an output of unknown or impossible size", UNKNOWN_SHAPE));
    };
    let added = node.ints("output_padding").and_then(|added| added.get(spatial).copied()).unwrap_or(0);
    let reach = window.reach();
    if (reach, window.before, window.behind, window.stride, added) == (0, 0, 0, 1, 0) {
        return Ok(layout);
    }
    tracker.found.reached += 1;
    if window.stride != 1 || added != 0 {
        let help = "answers must have a step for each step of the request";
        return Err(refuse(node, "makes several steps of one", help));
    }
    if !layout.is_clean() || layout.is_padded() {
        return Err(refuse(node, "has a window over padded steps, or over an axis that steps and others share", HELP));
    }
    if window.before > 0 {
        return Err(refuse(node, format!("looks {} ahead", counted(window.before)), HELP));
    }
    if window.behind > reach {
        return Err(refuse(node, format!("gives {} fewer than it takes", counted(window.behind - reach)), HELP));
    }
    tracker.found.cuts.push(Cut::Frames { node: index, axis: layout.axis, frames: reach, cropped: 0, fill: 0.0 });
    let trail = reach - window.behind;
    Ok(Layout { len: layout.len + trail, trail, ..layout })
}

const HELP: &str = "pad in front of the steps only, by the kernel's reach (causal padding), and export the model again";

fn counted(steps: i64) -> String {
    if steps == 1 { "1 step".to_owned() } else { format!("{steps} steps") }
}

fn check(node: &NodeProto, layout: Layout, window: Window) -> Result<(), Refusal> {
    if !layout.is_clean() {
        return Err(refuse(node, "has a window over an axis that steps and others share", HELP));
    }
    if window.automatic && window.reach() > 0 {
        return Err(refuse(node, "pads both ends of the time axis (auto_pad)", HELP));
    }
    if layout.lead > 0 && window.before > 0 || layout.trail > 0 && window.stride > 1 {
        return Err(refuse(node, "pads what is padded already", HELP));
    }
    let (lead, reach) = (layout.lead + window.before, window.reach());
    if lead > reach {
        return Err(refuse(node, format!("has {lead} steps of padding for a window that reaches {reach} back"), HELP));
    }
    // A request has whole strides, so a window may use the rest of the last one.
    let ahead = reach - lead - (window.stride - 1);
    if ahead > 0 && (window.behind > 0 || layout.trail > 0) {
        return Err(refuse(node, format!("looks {} ahead", counted(ahead)), HELP));
    }
    if ahead > 0 {
        let help = format!(
            "pad {} in front of it (causal padding), and export the model again; a model without a recurrence \
             needs no conversion: 'input_context' can put the last steps of a request in front of the next one",
            counted(ahead)
        );
        return Err(refuse(node, format!("gives {} fewer than it takes", counted(ahead)), &help));
    }
    Ok(())
}

fn fill(tracker: &Tracker, node: &NodeProto) -> Result<f64, Refusal> {
    match node.op() {
        // Padding must not win the maximum.
        "MaxPool" => match DataType::try_from(tracker.tensor(&node.input[0]).elem) {
            Ok(DataType::Int8) => Ok(i8::MIN.into()),
            Ok(DataType::Uint8) => Ok(u8::MIN.into()),
            _ => Ok(f64::NEG_INFINITY),
        },
        "AveragePool" if node.int("count_include_pad").unwrap_or(0) == 0 => {
            Err(refuse(node, "leaves padding out of its averages", "set count_include_pad"))
        }
        "ConvInteger" | "QLinearConv" => match node.input_at(2) {
            Some(zero) => tracker
                .tensor(zero)
                .scalar()
                .ok_or_else(|| refuse(node, "pads with a zero point that isn't known", "pad before the quantization")),
            None => Ok(0.0),
        },
        _ => Ok(0.0),
    }
}

pub fn pad(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout, Refusal> {
    let layout = first(node, places)?;
    let inputs: Vec<_> = node.input.iter().map(|name| tracker.tensor(name)).collect();
    let Some(pads) = pads(node, &inputs, tracker.rank(node, 0)?) else {
        return Err(refuse(node, "has padding that isn't known before it runs", UNKNOWN_SHAPE));
    };
    let of = |shapes: &Shapes| {
        let inputs: Vec<_> = node.input.iter().map(|name| shapes.get(name)).collect();
        self::pads(node, &inputs, tracker.rank(node, 0).ok()?)
    };
    if [tracker.long, tracker.far].into_iter().filter_map(of).any(|other| other != pads) {
        return Err(refuse(node, "has padding that depends on the length of the whole input", HELP));
    }
    tracker.check_not_sized(node, &node.input[1..])?;
    let (before, behind) = pads[layout.axis];
    if (before, behind) == (0, 0) {
        return Ok(layout);
    }
    let mode = node.text("mode").unwrap_or_else(|| "constant".to_owned());
    if mode != "constant" {
        return Err(refuse(
            node,
            format!("pads in mode {mode}"),
            "only constant padding in front of the steps is known",
        ));
    }
    if before <= 0 || before + behind < 0 || !layout.is_clean() || layout.is_padded() {
        return Err(refuse(node, "pads or crops the time axis at its end", HELP));
    }
    let fill = match node.input_at(2) {
        Some(name) => tracker.tensor(name).scalar(),
        None => Some(f64::from(node.attribute("value").map_or(0.0, |value| value.f()))),
    };
    let fill = fill.ok_or_else(|| refuse(node, "pads with a value that isn't known", HELP))?;
    tracker.found.cuts.push(Cut::Frames {
        node: index,
        axis: layout.axis,
        frames: before,
        cropped: -behind.min(0),
        fill,
    });
    if behind < 0 {
        // The last steps are cut off, so this delays the others.
        tracker.found.reached += 1;
    }
    Ok(Layout { len: layout.len + before + behind, lead: before + behind.min(0), trail: behind.max(0), ..layout })
}
