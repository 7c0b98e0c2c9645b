//! Layers that need earlier steps: convolutions and pooling over time, and the padding before them; `LSTM`, `GRU`,
//! `RNN` and their like.

use super::refusal::{CHECKER, Hint, Result, UNKNOWN_SHAPE, WHOLE_INPUT, refuse};
use super::tracker::{Cut, FAR_OVER_SHORT, LONG_OVER_SHORT, Layout, Place, Tracker, first};
use crate::infer::Shapes;
use crate::infer::ops::{Window, pads, window_at};
use crate::onnx::DataType;
use crate::onnx::schema::NodeProto;

pub fn window(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places).map_err(|_| refuse(node, "takes its weights from the steps", HELP))?;
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
    // A request that ends within a stride would leave steps over, and no state keeps those.
    tracker.found.add_multiple(stride);
    Ok(Layout { len: expected + trail, lead: 0, trail, stride, ..layout })
}

/// A transposed convolution: each step reaches into later ones.
pub fn transposed(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout> {
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

fn check(node: &NodeProto, layout: Layout, window: Window) -> Result<()> {
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

fn fill(tracker: &Tracker, node: &NodeProto) -> Result<f64> {
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
        "ConvInteger" | "QLinearConv" => node.input_at(2).map_or(Ok(0.0), |zero| {
            let unknown = || refuse(node, "pads with a zero point that isn't known", "pad before the quantization");
            tracker.tensor(zero).scalar().ok_or_else(unknown)
        }),
        _ => Ok(0.0),
    }
}

pub fn pad(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Layout> {
    let layout = first(node, places)?;
    let Some(pads) = pads(node, &tracker.short.inputs(node), tracker.rank(node, 0)?) else {
        return Err(refuse(node, "has padding that isn't known before it runs", UNKNOWN_SHAPE));
    };
    let of = |shapes: &Shapes| self::pads(node, &shapes.inputs(node), tracker.rank(node, 0).ok()?);
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
        let why = format!("pads in mode {mode}");
        return Err(refuse(node, why, "only constant padding in front of the steps is known"));
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

pub fn recurrent(tracker: &mut Tracker, index: usize, node: &NodeProto, places: &[Place]) -> Result<Vec<Place>> {
    let Place::At(layout) = places[0] else {
        return Err(refuse(node, "takes its weights or its initial state from the steps", WHOLE_INPUT));
    };
    if layout.axis == 1 {
        check_weights(node, places)?;
        // The recurrence runs along another axis, and the steps are the rows of its batch.
        let weights = node.input.iter().enumerate().filter(|(input, _)| [1, 2, 3, 7].contains(input));
        tracker.check_not_sized(node, weights.map(|(_, name)| name))?;
        if let Some(lens) = node.input_at(4).filter(|&lens| tracker.place(lens) == Place::Free)
            && !tracker.is_steady(lens, Some(0))
        {
            return Err(refuse(node, format!("takes another length for each step from '{lens}'"), WHOLE_INPUT));
        }
        let starts_with_rows = |name: &str| tracker.follows_rows && tracker.place(name) == Place::At(layout);
        let rows_of = |name: &str| tracker.dims(name).and_then(|dims| dims.get(1));
        // If zeros are made for the rows of the input, they have as many rows as the input.
        let has_as_many_rows = |name: &str| rows_of(name).is_some() && rows_of(name) == rows_of(&node.input[0]);
        if tracker.follows_rows
            && !layout.is_clean()
            && let Some(name) = node.input_at(5).filter(|name| !starts_with_rows(name) && !has_as_many_rows(name))
        {
            let why = format!("has the batch and others in one axis, and '{name}' hasn't");
            return Err(refuse(node, why, WHOLE_INPUT));
        }
        for name in [5, 6].into_iter().filter_map(|input| node.input_at(input)) {
            if !starts_with_rows(name) && (tracker.place(name) != Place::Free || !tracker.is_steady(name, Some(1))) {
                return Err(refuse(node, format!("starts each step from its own '{name}'"), WHOLE_INPUT));
            }
        }
        return Ok(vec![Place::At(layout.on(2)), Place::At(layout), Place::At(layout)]);
    }
    if layout.axis != 0 || !layout.is_clean() {
        let help = "export the model so that the steps are where ONNX has them, or name another axis";
        let why = format!("gets the steps where it takes the features of a step{}", tracker.by_reshape(node));
        return Err(refuse(node, why, help).with_hint(Hint::Time));
    }
    if layout.is_padded() {
        return Err(refuse(node, "runs over padding beside the steps", "remove the padding before the recurrence"));
    }
    // Counted before the checks: a refused recurrence still tells that these are the steps.
    tracker.found.reached += 1;
    // It starts at a state that the model has already.
    let has_state =
        [5, 6].into_iter().filter_map(|input| node.input_at(input)).any(|name| tracker.of_states.contains(name));
    if has_state {
        tracker.found.goes_on = true;
    } else {
        tracker.found.recurrences.push(index);
    }
    match node.text("direction").as_deref() {
        None | Some("forward") => {}
        // Half of it reads the steps from the end.
        Some("bidirectional") => {
            let help = "a bidirectional layer needs the whole input: train the model with a forward layer";
            return Err(refuse(node, "is bidirectional", help));
        }
        Some(direction) => {
            return Err(refuse(node, format!("runs in direction {direction}"), "train the model with a forward layer"));
        }
    }
    check_weights(node, places)?;
    if node.op() == "DynamicQuantizeLSTM" {
        tracker.found.quantized.push(node.label().to_owned());
    }
    let outputs = vec![Place::At(layout), Place::Last, Place::Last];
    check_sized(tracker, node, layout.len)?;
    let starts = [(5, "initial_h"), (6, "initial_c")].into_iter().filter(|_| !has_state);
    for (input, name) in starts.chain([(4, "sequence_lens")]) {
        if places.get(input).is_some_and(|&place| place != Place::Free) {
            return Err(refuse(node, format!("takes {name} from the steps"), WHOLE_INPUT));
        }
    }
    let rank = tracker.rank(node, 0)?;
    if rank != 3 {
        let why = format!("takes an input of rank {rank}, and 3 is wanted");
        return Err(refuse(node, why, CHECKER));
    }
    if !has_state {
        tracker.found.cuts.push(Cut::Recurrent { node: index });
    }
    Ok(outputs)
}

impl Tracker<'_> {
    /// Names the `Reshape` before a layer. With a batch of 1, exporters write one where a `Transpose` would bring other
    /// batches into the same order.
    fn by_reshape(&self, node: &NodeProto) -> String {
        let producer = self.producers.get(node.input[0].as_str()).map(|&index| &self.graph.node[index]);
        let reshape = producer.filter(|producer| producer.op() == "Reshape");
        reshape.map_or_else(String::new, |reshape| {
            format!(", because the Reshape '{}' in front of it stands where a Transpose would", reshape.label())
        })
    }
}

fn check_weights(node: &NodeProto, places: &[Place]) -> Result<()> {
    let weights = [(1, "its weights"), (2, "its weights"), (3, "its bias"), (7, "its weights")];
    let is_made_of_steps = |(input, _): &(usize, &str)| places.get(*input).is_some_and(|&place| place != Place::Free);
    let found = weights.into_iter().find(is_made_of_steps);
    found.map_or(Ok(()), |(_, name)| Err(refuse(node, format!("takes {name} from the steps"), WHOLE_INPUT)))
}

/// Refuses inputs that depend on the number of steps. Lengths of rows may be this number.
fn check_sized(tracker: &Tracker, node: &NodeProto, len: i64) -> Result<()> {
    let others = node.input.iter().enumerate().filter(|(input, _)| ![0, 4].contains(input)).map(|(_, name)| name);
    tracker.check_not_sized(node, others)?;
    let Some(lens) = node.input_at(4) else { return Ok(()) };
    if !tracker.sized.contains(lens) {
        if tracker.short.get(lens).data.is_none() {
            return Ok(());
        }
        let why =
            format!("takes constant lengths of rows (sequence_lens from '{lens}'), and requests have other lengths");
        return Err(refuse(node, why, "export the model without lengths"));
    }
    let is = |shapes: &Shapes, len: i64| shapes.get(lens).is_full_of(len as f64);
    // A table of lengths may agree with short inputs alone.
    let far = len * FAR_OVER_SHORT;
    if is(tracker.short, len) && is(tracker.long, len * LONG_OVER_SHORT) && is(tracker.far, far) {
        return Ok(());
    }
    let why = format!("takes sequence_lens from '{lens}', which depends on the length of the whole input");
    Err(refuse(node, why, WHOLE_INPUT))
}
