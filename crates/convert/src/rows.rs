//! The rows of a batch: the name of their dimension, and warnings about it. Also tells the backend about a graph that
//! it serves: whether the graph runs along the rows of its batch as if they were steps, combines them with another
//! dimension, or keeps them apart, and whether pairs cross the states of a layer.

use bytes::Bytes;

use crate::analysis::{Analysis, attempt};
use crate::batch::{self, SYMBOL, is_batch_name};
use crate::graph::{InputAxis, Names, OutputAxis, producers, prune};
use crate::infer::Shapes;
use crate::names::{StatePair, crossed_ends};
use crate::onnx::schema::{GraphProto, ValueInfoProto};
use crate::onnx::{Dim, opset};
use crate::prepared::{Prepared, prepared};
use crate::report::Warning;
use crate::time::{Cut, Place, Refusal};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsInGraph {
    Apart,
    /// This node always combines rows, such as a softmax over the batch.
    Mixed(String),
    Unproven(String),
}

/// The first node that passes a state from one row of a batch to the next, such as an LSTM that gets the batch where it
/// takes the steps. `rows` are the axes of the inputs that have the batch. Nodes after a refused one aren't checked.
/// Also `None` if the converter can't read the model.
pub fn passes_on_rows(bytes: Bytes, rows: &[InputAxis]) -> Option<String> {
    let Prepared { model, graph, .. } = prepared(bytes).ok()?;
    let (analysis, _) = attempt(&graph, opset(&model), rows.to_vec(), &[]);
    let found = analysis.found;
    // What was found after a refused node rests on a guess of where the rows are.
    let stopped_at = found.stopped_at.unwrap_or(graph.node.len());
    let cuts = found.cuts.iter().filter(|cut| cut.makes_state(&graph)).map(Cut::node);
    // A refused loop may run over something else.
    let layers = found.recurrences.iter().copied().filter(|&index| graph.node[index].is_recurrent());
    let first = cuts.chain(layers).filter(|&index| index <= stopped_at).min()?;
    Some(graph.node[first].described())
}

/// The first node that brings the batch of the inputs together with another open dimension, such as an addition of a
/// state to the sums over what is taken for the steps; or the node of an output whose batch is another dimension.
/// `None`, too, if the shapes of the graph can't be inferred that far.
pub fn rows_meet_others(bytes: Bytes, rows: &[InputAxis], outputs: &[OutputAxis]) -> Option<String> {
    let Prepared { model, graph, .. } = prepared(bytes).ok()?;
    let apart = shapes(&graph, opset(&model), rows, ROWS);
    // A conflict in both has another reason, such as two lengths that must be equal.
    let alike = shapes(&graph, opset(&model), rows, OTHER);
    let differs = |(output, _): &&(String, String)| alike.conflicts.iter().all(|(other, _)| other != output);
    let conflict = apart.conflicts.iter().find(differs).map(|(output, _)| output.as_str());
    let has_other = |of: &&OutputAxis| apart.dims(&of.output).and_then(|dims| dims.get(of.axis)) == Some(&OTHER);
    let made = || outputs.iter().find(has_other).map(|of| of.output.as_str());
    let name = conflict.or_else(made)?;
    producers(&graph).get(name).map(|&index| graph.node[index].described())
}

/// Whether each row of a batch is computed from that row alone; if not, the first node in the way. `rows` and `outputs`
/// are the axes that have the batch. Nodes that no tensor of `fetched` needs aren't checked. An unknown operator is in
/// the way as well.
pub fn rows_stay_apart(bytes: Bytes, rows: &[InputAxis], outputs: &[OutputAxis], fetched: &[&str]) -> RowsInGraph {
    let Ok(Prepared { model, mut graph, .. }) = prepared(bytes) else {
        return RowsInGraph::Unproven("the graph can't be read".to_owned());
    };
    // Mixed rows in an output that isn't served harm nobody.
    graph.output.retain(|output| fetched.contains(&output.name()));
    prune(&mut graph);
    let followed = batch::rows(&graph, opset(&model), rows);
    // With a length that the window of a node divides, each window lies in one row; with another length it may not.
    let places = match followed.and_then(|_| batch::rows_of_odd_lengths(&graph, opset(&model), rows)) {
        Ok(places) => places,
        Err(Refusal { node, operator, why, mixes, .. }) => {
            let why = format!("{operator} '{node}' {why}");
            return if mixes { RowsInGraph::Mixed(why) } else { RowsInGraph::Unproven(why) };
        }
    };
    let layout = |of: &OutputAxis| places.get(&of.output).and_then(Place::layout);
    let is_elsewhere = |of: &&OutputAxis| layout(of).is_none_or(|layout| layout.axis != of.axis || !layout.is_clean());
    outputs.iter().find(is_elsewhere).map_or(RowsInGraph::Apart, |of| {
        RowsInGraph::Unproven(format!("output '{}' doesn't have the rows on axis {}", of.output, of.axis))
    })
}

/// Why a pair can't be a state: it joins the hidden state and the cell state of one layer. `None`, too, if the
/// converter can't read the model.
pub fn crossed_states(model: Bytes, pairs: &[StatePair]) -> Option<String> {
    crossed_ends(&prepared(model).ok()?.graph, pairs)
}

/// Rows and other open dimensions: two lengths with many divisors, neither a multiple of the other.
pub const ROWS: i64 = 120;
pub const OTHER: i64 = 48;

/// Gives the batch its usual name, by which the backend knows it, and returns its old name. An exporter may have
/// numbered it, as in `s77`. The batch keeps its name if an output doesn't have it exactly once, or another dimension
/// has such a name.
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

/// Names the batch in states. An open dimension of a state must be the batch if the state's next value has as many rows
/// as requests there, whatever the state's own length is. An exporter may have named it differently in each tensor, and
/// the backend would take it for a length that varies.
pub fn name_batch_of_states(graph: &mut GraphProto, opset: i64, analysis: &Analysis, pairs: &[StatePair]) {
    let Some(batch) = analysis.batch.clone().map(Dim::Symbol) else { return };
    let axes = |input: &ValueInfoProto, is_row: &dyn Fn(&Dim) -> bool| -> Vec<InputAxis> {
        let dims = input.dims().unwrap_or_default();
        let rows = dims.iter().enumerate().filter(|(_, dim)| is_row(dim));
        rows.map(|(axis, _)| InputAxis { input: input.name().to_owned(), axis }).collect()
    };
    let named: Vec<InputAxis> = graph.input.iter().flat_map(|input| axes(input, &|dim| *dim == batch)).collect();
    let is_other = |dim: &Dim| *dim != batch && !dim.is_known();
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
            name_dims(value, &batch, |at, dim| at == axis && !dim.is_known());
        }
    }
}

/// Warns if a layer takes a fixed number of rows, so that sequences don't share runs.
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
        value.set_dims(&named);
    }
}

pub fn two_batches(opened: &[InputAxis], others: &[InputAxis]) -> Warning {
    let listed = |axes: &[InputAxis], beside: &[InputAxis]| {
        let differ = axes.iter().filter(|axis| !beside.contains(axis));
        differ.map(InputAxis::to_string).collect::<Vec<_>>().join(",")
    };
    Warning::TwoBatches { taken: listed(opened, others), other: listed(others, opened) }
}

/// The shapes with a batch of length `batch`, and with the length `OTHER` for each other open dimension.
pub fn shapes(graph: &GraphProto, opset: i64, rows: &[InputAxis], batch: i64) -> Shapes {
    Shapes::of_lengths(graph, opset, |input, axis, dim| match dim {
        Dim::Known(length) => *length,
        _ if rows.iter().any(|of| of.is(input, axis)) => batch,
        _ => OTHER,
    })
}
