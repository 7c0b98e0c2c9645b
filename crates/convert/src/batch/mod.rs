//! Opens a batch dimension that a model fixes to 1.
//!
//! The rows of the batch are followed through the graph as steps are: an operator that would mix them is refused. On
//! the way, shapes that have the 1 written into them get the batch in its place.

mod follow;

use std::collections::HashSet;

use crate::graph::{InputAxis, Names, required_inputs, sort};
use crate::names::StatePair;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, int64s, names};
use crate::time::{Place, Refusal, Refusals, refuse};
use follow::{Followed, HELP, edit, follow};
pub use follow::{SYMBOL, is_batch_axis, is_batch_name, is_made_up, rows, rows_of_odd_lengths};

const MOST_CHOICES: usize = 512;

#[derive(Default)]
pub struct Opened {
    pub graph: GraphProto,
    pub axes: Vec<InputAxis>,
    pub others: Option<Vec<InputAxis>>,
}

#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    #[error("{0}")]
    Refused(Refusals),
    #[error("{0}")]
    Axis(String),
}

/// Opens the batch along the axes that are `given`, and of other inputs along an axis that can be opened.
pub fn open(
    graph: &GraphProto,
    opset: i64,
    pairs: &[StatePair],
    time: &[InputAxis],
    given: &[InputAxis],
) -> Result<Opened, BatchError> {
    check_given(graph, given)?;
    // Opening a second dimension would give the model two batches.
    check_closed(graph)?;
    let position = |refusals: &Refusals| graph.node.iter().position(|node| node.label() == refusals.first.node);
    let mut refused: Option<Refusals> = None;
    let mut opened: Option<Opened> = None;
    for axes in choices(graph, time, given).into_iter().take(MOST_CHOICES) {
        match (open_axes(graph, opset, &axes, pairs), &mut opened) {
            (Ok(_), Some(opened)) => {
                // One more choice is enough for the warning; the others may be very many.
                opened.others = Some(axes);
                break;
            }
            (Ok(graph), None) => opened = Some(Opened { graph, axes, others: None }),
            // With the axes that fit best, the rows get furthest.
            (Err(found), _) if refused.as_ref().is_none_or(|refused| position(&found) > position(refused)) => {
                refused = Some(found);
            }
            (Err(_), _) => {}
        }
    }
    opened.ok_or_else(|| {
        let input = graph.input.first().map_or("", ValueInfoProto::name);
        let none = || Refusal::of("input", input, "has no dimension of 1 that could be a batch", HELP).into();
        BatchError::Refused(refused.unwrap_or_else(none))
    })
}

/// Refuses an axis for the batch that the model doesn't fix to 1.
fn check_given(graph: &GraphProto, given: &[InputAxis]) -> Result<(), BatchError> {
    for InputAxis { input: name, axis } in given {
        let Some(input) = required_inputs(graph).find(|input| input.name() == name) else {
            let has = names(required_inputs(graph));
            return Err(BatchError::Axis(format!("the model has no input '{name}' (it has {has})")));
        };
        let dims = input.dims().unwrap_or_default();
        if dims.get(*axis) != Some(&Dim::Known(1)) {
            let why = format!("the input is {}, and a 1 is wanted there", bracketed(&dims));
            return Err(BatchError::Axis(format!("axis {axis} of input '{name}' can't be the batch: {why}")));
        }
    }
    Ok(())
}

fn check_closed(graph: &GraphProto) -> Result<(), BatchError> {
    for input in required_inputs(graph) {
        let dims = input.dims().unwrap_or_default();
        if dims.iter().any(|dim| matches!(dim, Dim::Symbol(name) if is_batch_name(name))) {
            let is = format!("input '{}' is {}", input.name(), bracketed(&dims));
            let why = "its batch is open already; convert the model without opening it";
            return Err(BatchError::Axis(format!("{is}: {why}")));
        }
    }
    Ok(())
}

/// Inputs of one shape, and the axes that may be their batch.
struct AlikeInputs {
    dims: Vec<Dim>,
    axes: Vec<usize>,
    names: Vec<String>,
}

/// Which axes may be the batch: an axis for each input with a dimension of 1. Inputs of one shape have it on one axis.
fn choices(graph: &GraphProto, time: &[InputAxis], given: &[InputAxis]) -> Vec<Vec<InputAxis>> {
    let mut shapes: Vec<AlikeInputs> = Vec::new();
    for input in required_inputs(graph) {
        let dims = input.dims().unwrap_or_default();
        // A request may have one step, and then the steps look like a batch of 1.
        let is_time = |axis: usize| time.iter().any(|seed| seed.is(input.name(), axis));
        let is_other = |axis: usize| given.iter().any(|seed| seed.input == input.name() && seed.axis != axis);
        let is_open = |&axis: &usize| dims[axis] == Dim::Known(1) && !is_time(axis) && !is_other(axis);
        let axes: Vec<usize> = (0..dims.len()).filter(is_open).collect();
        if axes.is_empty() {
            continue;
        }
        let name = input.name().to_owned();
        match shapes.iter_mut().find(|known| known.dims == dims && known.axes == axes) {
            Some(known) => known.names.push(name),
            None => shapes.push(AlikeInputs { dims, axes, names: vec![name] }),
        }
    }
    if shapes.is_empty() {
        return Vec::new();
    }
    let mut choices: Vec<Vec<InputAxis>> = vec![Vec::new()];
    for AlikeInputs { axes, names, .. } in &shapes {
        let with = |choice: &Vec<InputAxis>, axis: usize| {
            let more = names.iter().map(|input| InputAxis { input: input.clone(), axis });
            choice.iter().cloned().chain(more).collect::<Vec<_>>()
        };
        choices =
            choices.iter().flat_map(|choice| axes.iter().map(|&axis| with(choice, axis))).take(MOST_CHOICES).collect();
    }
    choices
}

fn open_axes(graph: &GraphProto, opset: i64, axes: &[InputAxis], pairs: &[StatePair]) -> Result<GraphProto, Refusals> {
    let mut graph = graph.clone();
    for axis in axes {
        let Some(input) = graph.input.iter_mut().find(|input| input.name() == axis.input) else { continue };
        let mut dims = input.dims().unwrap_or_default();
        let Some(dim) = dims.get_mut(axis.axis) else { continue };
        *dim = Dim::Symbol(SYMBOL.to_owned());
        input.set_dims(&dims);
    }
    let mut names = Names::of(&graph);
    let mut done = HashSet::new();
    // Each turn edits a node at least, and no node is edited twice.
    for _ in 0..=graph.node.len() {
        let followed = follow(&graph, opset, axes);
        if let Some(edited) = edit(&graph, &followed, &mut names, &mut done) {
            graph = edited;
            sort(&mut graph);
            continue;
        }
        followed.result.clone()?;
        check(&graph, &followed, axes, pairs)?;
        expand_starts(&mut graph, &followed, &mut names);
        sort(&mut graph);
        finish(&mut graph, &followed);
        return Ok(graph);
    }
    Err(Refusal::of("graph", "", "has shapes that can't be opened", HELP).into())
}

/// Refuses outputs that lost the batch, and states whose ends have it on different axes.
fn check(graph: &GraphProto, followed: &Followed, axes: &[InputAxis], pairs: &[StatePair]) -> Result<(), Refusal> {
    let lost = |output: &ValueInfoProto, why: &str| {
        let producer = graph.node.iter().find(|node| node.output.iter().any(|name| name == output.name()));
        let node = producer.cloned().unwrap_or_else(|| NodeProto::make("output", output.name(), &[], &[]));
        refuse(&node, why, HELP)
    };
    for output in &graph.output {
        match followed.places.get(output.name()) {
            // The backend must cut the rows apart again, so they need an axis of their own.
            Some(Place::At(layout)) if layout.is_clean() => {}
            Some(Place::At(_)) => return Err(lost(output, "merges the rows with another axis")),
            None | Some(Place::Free) => {}
            Some(_) => return Err(lost(output, "takes single rows")),
        }
    }
    for pair in pairs {
        let before = axes.iter().find(|axis| axis.input == pair.input).map(|axis| axis.axis);
        let after = followed.places.get(&pair.output).and_then(Place::layout).map(|layout| layout.axis);
        let why = match (before, after) {
            (Some(before), Some(after)) if before == after => continue,
            (None, None) => {
                format!("gives the next value of state '{}', and neither has a dimension for the batch", pair.input)
            }
            _ => format!("has the rows of state '{}' on another axis", pair.input),
        };
        let value = graph.output.iter().find(|output| output.name() == pair.output).cloned().unwrap_or_default();
        return Err(lost(&value, &why));
    }
    Ok(())
}

/// Gives the initial states of recurrent nodes a row for each of the batch.
fn expand_starts(graph: &mut GraphProto, followed: &Followed, names: &mut Names) {
    for index in 0..graph.node.len() {
        let node = graph.node[index].clone();
        let Some(x) = node.input_at(0).filter(|_| node.is_recurrent()) else { continue };
        // A layer whose rows are not the batch starts as before.
        let of_rows = matches!(followed.places.get(x), Some(Place::At(layout)) if layout.axis == 1);
        for input in [5, 6] {
            let Some(start) = node.input_at(input).filter(|_| of_rows) else { continue };
            let one = followed.few.dims(start).is_some_and(|dims| dims.get(1) == Some(&1));
            if !one || matches!(followed.places.get(start), Some(Place::At(_))) {
                continue;
            }
            // Expand needs the number of rows, which only the running model knows.
            let parts = ["x_shape", "batch_axis", "rows", "one", "start_shape", "start"];
            let [shape, place, rows, one, target, spread] =
                parts.map(|part| names.fresh(&format!("{}.{part}", node.label())));
            graph.initializer.extend([int64s(&place, &[1], &[1]), int64s(&one, &[1], &[1])]);
            let made = |op: &str, inputs: &[&str], output: &str| {
                NodeProto::make(op, &format!("{output}/{op}"), inputs, &[output])
            };
            graph.node.extend([
                made("Shape", &[x], &shape),
                made("Gather", &[&shape, &place], &rows).with_int("axis", 0),
                made("Concat", &[&one, &rows, &one], &target).with_int("axis", 0),
                made("Expand", &[start, &target], &spread),
            ]);
            graph.node[index].set_input(input, &spread);
        }
    }
}

fn finish(graph: &mut GraphProto, followed: &Followed) {
    for output in &mut graph.output {
        let Some(Place::At(layout)) = followed.places.get(output.name()) else { continue };
        let (Some(mut dims), elem) = (output.dims(), output.elem()) else { continue };
        if let Some(dim) = dims.get_mut(layout.axis) {
            *dim = Dim::Symbol(SYMBOL.to_owned());
            output.set_tensor(elem, &dims);
        }
    }
    // Shapes that were computed for one row would contradict the opened ones.
    graph.value_info.retain(|value| !matches!(followed.places.get(value.name()), None | Some(Place::At(_))));
}
