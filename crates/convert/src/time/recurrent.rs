//! `LSTM`, `GRU`, `RNN` and their like.

use super::place::{Cut, Place};
use super::refusal::{CHECKER, Hint, Refusal, WHOLE_INPUT, refuse};
use super::tracker::{FAR_OVER_SHORT, LONG_OVER_SHORT, Tracker};
use crate::infer::Shapes;
use crate::onnx::schema::NodeProto;

pub fn recurrent(
    tracker: &mut Tracker,
    index: usize,
    node: &NodeProto,
    places: &[Place],
) -> Result<Vec<Place>, Refusal> {
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
        // Zeros that are made for the rows of the input have as many.
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
        let refusal = refuse(node, why, help);
        return Err(refusal.with_hint(Hint::Time));
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
    /// Names the `Reshape` in front of a layer. With a batch of 1, exporters write one where a `Transpose` would bring other
    /// batches into the same order.
    fn by_reshape(&self, node: &NodeProto) -> String {
        let producer = self.producers.get(node.input[0].as_str()).map(|&index| &self.graph.node[index]);
        let reshape = producer.filter(|producer| producer.op() == "Reshape");
        reshape.map_or_else(String::new, |reshape| {
            format!(", because the Reshape '{}' in front of it stands where a Transpose would", reshape.label())
        })
    }
}

fn check_weights(node: &NodeProto, places: &[Place]) -> Result<(), Refusal> {
    let weights = [(1, "its weights"), (2, "its weights"), (3, "its bias"), (7, "its weights")];
    let is_made_of_steps = |(input, _): &(usize, &str)| places.get(*input).is_some_and(|&place| place != Place::Free);
    match weights.into_iter().find(is_made_of_steps) {
        Some((_, name)) => Err(refuse(node, format!("takes {name} from the steps"), WHOLE_INPUT)),
        None => Ok(()),
    }
}

/// Refuses inputs that depend on the number of steps. Lengths of rows may be this number.
fn check_sized(tracker: &Tracker, node: &NodeProto, len: i64) -> Result<(), Refusal> {
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
