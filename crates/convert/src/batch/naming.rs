//! The batch beside the steps: its name, and warnings about it.

use super::follow::{SYMBOL, is_batch_name};
use crate::analysis::Analysis;
use crate::graph::{InputAxis, Names};
use crate::infer::Shapes;
use crate::onnx::Dim;
use crate::onnx::schema::{GraphProto, ValueInfoProto};
use crate::pairs::StatePair;
use crate::report::Warning;
use crate::time::Cut;

/// Rows and other open dimensions: two lengths with many divisors, neither a multiple of the other.
pub const ROWS: i64 = 120;

pub const OTHER: i64 = 48;

/// Gives the batch its usual name, by which the backend knows it, and returns its old name. An exporter may have numbered it,
/// as in `s77`. The batch keeps its name if an output doesn't have it exactly once, or another dimension has such a name.
pub fn name_batch(graph: &mut GraphProto, analysis: &mut Analysis) -> Option<String> {
    if is_batch_name(&analysis.symbol) {
        // The caller says that the model's name is wrong.
        let wrong = Dim::Symbol(std::mem::take(&mut analysis.symbol));
        let values = graph.input.iter().chain(&graph.output).chain(&graph.value_info);
        analysis.symbol = Names::of_dimensions(values).fresh("steps");
        let steps = Dim::Symbol(analysis.symbol.clone());
        for value in graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info) {
            name_dims(value, &steps, |_, dim| *dim == wrong);
        }
    }
    let usual = Dim::Symbol(SYMBOL.to_owned());
    let old = analysis.batch.clone().map(Dim::Symbol).filter(|_| !analysis.time.is_empty())?;
    let dims_of = |value: &ValueInfoProto| value.dims().unwrap_or_default();
    let is_other_batch = |dim: &Dim| *dim != old && matches!(dim, Dim::Symbol(name) if is_batch_name(name));
    let is_taken = old != usual && graph.input.iter().any(|input| dims_of(input).iter().any(is_other_batch));
    let of_outputs: Option<Vec<Vec<Dim>>> = graph.output.iter().map(|output| analysis.output_dims(output)).collect();
    // Two dimensions of one name in an output would both become the batch.
    let count = |dims: &Vec<Dim>| dims.iter().filter(|&dim| *dim == old).count();
    let of_outputs = of_outputs.filter(|outputs| !is_taken && outputs.iter().all(|dims| count(dims) == 1))?;
    for input in &mut graph.input {
        let time = analysis.time.iter().find(|seed| seed.input == input.name()).map(|seed| seed.axis);
        // Beside the steps, the batch is the only open dimension.
        let is_unnamed = |axis: usize, dim: &Dim| *dim == Dim::Open && time.is_some_and(|time| time != axis);
        name_dims(input, &usual, |axis, dim| *dim == old || is_unnamed(axis, dim));
    }
    for (output, dims) in graph.output.iter_mut().zip(&of_outputs) {
        name_dims(output, &usual, |axis, _| dims.get(axis) == Some(&old));
    }
    for value in &mut graph.value_info {
        name_dims(value, &usual, |_, dim| *dim == old);
    }
    // The report names the old one, so that its user recognizes it.
    let was = analysis.batch.replace(SYMBOL.to_owned());
    was.filter(|was| !is_batch_name(was))
}

/// Names the batch in states. An open dimension of a state must be the batch if the state's next value has as many rows as
/// requests there, whatever the state's own length is. An exporter may have named it differently in each tensor, and the
/// backend would take it for a length that varies.
pub fn name_batch_of_states(graph: &mut GraphProto, opset: i64, analysis: &Analysis, pairs: &[StatePair]) {
    let Some(batch) = analysis.batch.clone().map(Dim::Symbol) else { return };
    let axes = |input: &ValueInfoProto, is_row: &dyn Fn(&Dim) -> bool| -> Vec<InputAxis> {
        let dims = input.dims().unwrap_or_default();
        let rows = dims.iter().enumerate().filter(|(_, dim)| is_row(dim));
        rows.map(|(axis, _)| InputAxis { input: input.name().to_owned(), axis }).collect()
    };
    let named: Vec<InputAxis> = graph.input.iter().flat_map(|input| axes(input, &|dim| *dim == batch)).collect();
    let is_other = |dim: &Dim| *dim != batch && !matches!(dim, Dim::Known(_));
    let of_states = graph.input.iter().filter(|input| pairs.iter().any(|pair| pair.input == input.name()));
    let other: Vec<InputAxis> = of_states.flat_map(|input| axes(input, &is_other)).collect();
    if named.is_empty() || other.is_empty() {
        return;
    }
    let all: Vec<InputAxis> = named.iter().chain(&other).cloned().collect();
    let (apart, together) = (shapes(graph, opset, &named, ROWS), shapes(graph, opset, &all, ROWS));
    for InputAxis { input, axis } in other {
        let Some(pair) = pairs.iter().find(|pair| pair.input == input) else { continue };
        let next = |shapes: &Shapes| shapes.dims(&pair.output).and_then(|dims| dims.get(axis)).copied();
        // If two lengths don't fit together, the next value has no known shape.
        if next(&together) != Some(ROWS) || !matches!(next(&apart), None | Some(ROWS)) {
            continue;
        }
        let of_pair = |value: &&mut ValueInfoProto| value.name() == input || value.name() == pair.output;
        for value in graph.input.iter_mut().chain(&mut graph.output).filter(of_pair) {
            name_dims(value, &batch, |at, dim| at == axis && !matches!(dim, Dim::Known(_)));
        }
    }
}

/// The warning where a layer takes a fixed number of rows, so that sequences don't share runs.
pub fn fixed_batch(graph: &GraphProto, analysis: &Analysis) -> Option<Warning> {
    let seed = analysis.time.first().filter(|_| analysis.batch.is_none())?;
    let input = graph.input.iter().find(|input| input.name() == seed.input)?;
    let dims = input.dims().filter(|dims| dims.len() > 2)?;
    // The batch is the first axis that has no steps.
    let axis = usize::from(seed.axis == 0);
    let Dim::Known(rows) = dims[axis] else { return None };
    if rows > 1 {
        // Other axes may be merged into the rows of a layer.
        let layers = analysis.found.cuts.iter().filter(|cut| matches!(cut, Cut::Recurrent { .. }));
        let mut shapes = layers.filter_map(|cut| analysis.dims(graph.node[cut.node()].input_at(0)?));
        if !shapes.any(|shape| shape.get(1) == Some(&Dim::Known(rows))) {
            return None;
        }
    }
    Some(Warning::FixedBatch { axis: InputAxis { input: seed.input.clone(), axis }, rows })
}

fn name_dims(value: &mut ValueInfoProto, name: &Dim, is_named: impl Fn(usize, &Dim) -> bool) {
    let Some(dims) = value.dims() else { return };
    let new = |(axis, dim): (usize, &Dim)| if is_named(axis, dim) { name.clone() } else { dim.clone() };
    let named: Vec<Dim> = dims.iter().enumerate().map(new).collect();
    if named != dims {
        let elem = value.elem();
        value.set_tensor(elem, &named);
    }
}

pub fn two_batches(opened: &[InputAxis], others: &[InputAxis]) -> Warning {
    let listed = |axes: &[InputAxis], beside: &[InputAxis]| {
        let differ = axes.iter().filter(|axis| !beside.contains(axis));
        differ.map(|InputAxis { input, axis }| format!("{input}@{axis}")).collect::<Vec<_>>().join(",")
    };
    Warning::TwoBatches { taken: listed(opened, others), other: listed(others, opened) }
}

/// The shapes where the batch has this length, and each other open dimension another.
pub fn shapes(graph: &GraphProto, opset: i64, rows: &[InputAxis], batch: i64) -> Shapes {
    Shapes::of_lengths(graph, opset, |input, axis, dim| match dim {
        Dim::Known(length) => *length,
        _ if rows.iter().any(|of| of.is(input, axis)) => batch,
        _ => OTHER,
    })
}
