//! Opens a batch dimension that a model fixes to 1.
//!
//! The rows of the batch are followed through the graph as steps are: an operator that would mix them is refused. On
//! the way, shapes that have the 1 written into them get the batch in its place.

use std::collections::{HashMap, HashSet};

use crate::analysis::InputAxis;
use crate::graph::{Names, inputs_of, required_inputs, sort};
use crate::infer::shaping::list;
use crate::infer::{Shapes, Tensor};
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, element_count, int64s, numbers};
use crate::report::Pair;
use crate::time::{Layout, Place, Refusal, Refusals, Tracker, refuse};

/// Rows that shapes are computed for.
const FEW: i64 = 48;
const MANY: i64 = 96;
/// The length of other open dimensions.
const OTHER: i64 = 32;
/// Lengths of other open dimensions that no window divides.
const PRIMES: [i64; 6] = [31, 37, 41, 43, 53, 59];
/// The symbol of the batch.
pub const SYMBOL: &str = "batch";
/// The names that exporters give to the batch dimension, in lower case.
const USUAL_SYMBOLS: [&str; 6] = [SYMBOL, "batch_size", "batchsize", "n", "b", "bs"];
/// Choices of batch axes that are tried.
const MOST_CHOICES: usize = 512;
const HELP: &str =
    "export the model with an open batch, or serve it without batches (max_batch_size: 0, and no open_batch)";

/// A graph whose batch was opened.
pub struct Opened {
    pub graph: GraphProto,
    /// The axes of the inputs that were opened.
    pub axes: Vec<InputAxis>,
    /// Other axes that could have been opened, if there are any.
    pub others: Option<Vec<InputAxis>>,
}

impl Opened {
    /// A graph that keeps its batch as it is.
    pub const fn unchanged(graph: GraphProto) -> Self {
        Self { graph, axes: Vec::new(), others: None }
    }
}

/// Why the batch can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Nodes would mix the rows.
    #[error("{0}")]
    Refused(Refusals),
    /// An axis that is given can't be the batch.
    #[error("{0}")]
    Axis(String),
    /// An input has an open dimension with a name of the batch.
    #[error("input '{input}' is {dims}: its batch is open already; convert the model without opening it")]
    #[expect(missing_docs, reason = "the message says it")]
    Open { input: String, dims: String },
}

/// Whether exporters give this name to the batch dimension. The backend finds the batch by these names, too.
pub fn is_batch_name(symbol: &str) -> bool {
    USUAL_SYMBOLS.contains(&symbol.to_lowercase().as_str())
}

/// Whether tf2onnx made up this name. It gives each open dimension of each tensor another one, so such a name doesn't tell
/// which dimensions are the same.
pub fn is_made_up(symbol: &str) -> bool {
    let number = symbol.strip_prefix("unk__").unwrap_or_default();
    !number.is_empty() && number.chars().all(|letter| letter.is_ascii_digit())
}

/// Opens the batch along the axes that are `given`, and of other inputs along an axis that can be opened.
pub fn open(
    graph: &GraphProto,
    opset: i64,
    pairs: &[Pair],
    time: &[InputAxis],
    given: &[InputAxis],
) -> Result<Opened, BatchError> {
    check_given(graph, given)?;
    check_closed(graph)?;
    let position = |refusals: &Refusals| graph.node.iter().position(|node| node.label() == refusals.first.node);
    let mut refused: Option<Refusals> = None;
    let mut opened: Option<Opened> = None;
    for axes in choices(graph, time, given).into_iter().take(MOST_CHOICES) {
        match (open_axes(graph, opset, &axes, pairs), &mut opened) {
            (Ok(_), Some(opened)) => {
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
    opened.ok_or_else(|| BatchError::Refused(refused.unwrap_or_else(|| no_batch(graph).into())))
}

fn no_batch(graph: &GraphProto) -> Refusal {
    Refusal {
        node: graph.input.first().map_or("", ValueInfoProto::name).to_owned(),
        operator: "input".to_owned(),
        why: "has no dimension of 1 that could be a batch".to_owned(),
        help: HELP.to_owned(),
        hint: None,
        mixes: false,
    }
}

/// Refuses an axis for the batch that the model doesn't fix to 1.
fn check_given(graph: &GraphProto, given: &[InputAxis]) -> Result<(), BatchError> {
    for InputAxis { input: name, axis } in given {
        let Some(input) = required_inputs(graph).find(|input| input.name() == name) else {
            let names: Vec<&str> = required_inputs(graph).map(ValueInfoProto::name).collect();
            return Err(BatchError::Axis(format!("the model has no input '{name}' (it has {})", names.join(", "))));
        };
        let dims = input.dims().unwrap_or_default();
        if dims.get(*axis) != Some(&Dim::Known(1)) {
            let why = format!(
                "axis {axis} of input '{name}' can't be the batch: the input is {}, and a 1 is wanted there",
                bracketed(&dims)
            );
            return Err(BatchError::Axis(why));
        }
    }
    Ok(())
}

/// Refuses a model whose batch is open.
fn check_closed(graph: &GraphProto) -> Result<(), BatchError> {
    for input in required_inputs(graph) {
        let dims = input.dims().unwrap_or_default();
        if dims.iter().any(|dim| matches!(dim, Dim::Symbol(name) if is_batch_name(name))) {
            return Err(BatchError::Open { input: input.name().to_owned(), dims: bracketed(&dims) });
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
        let is_time = |axis: usize| time.iter().any(|seed| seed.input == input.name() && seed.axis == axis);
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

fn open_axes(graph: &GraphProto, opset: i64, axes: &[InputAxis], pairs: &[Pair]) -> Result<GraphProto, Refusals> {
    let mut graph = graph.clone();
    for axis in axes {
        let Some(input) = graph.input.iter_mut().find(|input| input.name() == axis.input) else { continue };
        let mut dims = input.dims().unwrap_or_default();
        let Some(dim) = dims.get_mut(axis.axis) else { continue };
        *dim = Dim::Symbol(SYMBOL.to_owned());
        let elem = input.elem();
        input.set_tensor(elem, &dims);
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
    Err(Refusals::from(Refusal {
        node: String::new(),
        operator: "graph".to_owned(),
        why: "has shapes that can't be opened".to_owned(),
        help: HELP.to_owned(),
        hint: None,
        mixes: false,
    }))
}

/// Where tensors have the rows of a batch that is open, or the first node that mixes them.
pub fn rows(graph: &GraphProto, opset: i64, axes: &[InputAxis]) -> Result<HashMap<String, Place>, Refusal> {
    follow(graph, opset, axes).places()
}

/// As [`rows`], where each other open dimension has a prime length of its own. Dimensions with one name have one length.
pub fn rows_of_odd_lengths(
    graph: &GraphProto,
    opset: i64,
    axes: &[InputAxis],
) -> Result<HashMap<String, Place>, Refusal> {
    let mut primes = PRIMES.iter().copied().cycle();
    let mut by_name: HashMap<String, i64> = HashMap::new();
    let mut lengths: HashMap<(String, usize), i64> = HashMap::new();
    for input in required_inputs(graph) {
        for (axis, dim) in input.dims().unwrap_or_default().into_iter().enumerate() {
            let mut next = || primes.next().unwrap_or(OTHER);
            let length = match dim {
                Dim::Known(_) => continue,
                Dim::Symbol(name) if !name.is_empty() => *by_name.entry(name).or_insert_with(next),
                _ => next(),
            };
            lengths.insert((input.name().to_owned(), axis), length);
        }
    }
    let other = |input: &str, axis: usize| lengths.get(&(input.to_owned(), axis)).copied().unwrap_or(OTHER);
    follow_with(graph, opset, axes, &other).places()
}

/// The rows in a graph.
struct Followed {
    few: Shapes,
    /// All dimensions but the batch have a length.
    has_fixed_lengths: bool,
    places: HashMap<String, Place>,
    result: Result<(), Refusals>,
}

impl Followed {
    fn places(self) -> Result<HashMap<String, Place>, Refusal> {
        self.result.map(|()| self.places).map_err(|refusals| *refusals.first)
    }
}

fn follow(graph: &GraphProto, opset: i64, axes: &[InputAxis]) -> Followed {
    follow_with(graph, opset, axes, &|_, _| OTHER)
}

/// `other` gives the lengths of other open dimensions, by input and axis.
fn follow_with(graph: &GraphProto, opset: i64, axes: &[InputAxis], other: &dyn Fn(&str, usize) -> i64) -> Followed {
    let infer = |rows: i64| {
        let sized = |input: &ValueInfoProto| {
            let size = |(axis, dim): (usize, Dim)| match dim {
                _ if axes.iter().any(|seed| seed.input == input.name() && seed.axis == axis) => rows,
                Dim::Known(length) => length,
                _ => other(input.name(), axis),
            };
            let dims = input.dims()?.into_iter().enumerate().map(size).collect();
            Some((input.name().to_owned(), Tensor::shaped(input.elem(), dims)))
        };
        Shapes::infer(graph, opset, required_inputs(graph).filter_map(sized).collect(), None)
    };
    let is_fixed = |input: &ValueInfoProto| {
        let opened = axes.iter().filter(|seed| seed.input == input.name()).count();
        input.dims().is_some_and(|dims| dims.iter().filter(|dim| !matches!(dim, Dim::Known(_))).count() == opened)
    };
    let has_fixed_lengths = required_inputs(graph).all(is_fixed);
    let (few, many, one) = (infer(FEW), infer(MANY), infer(1));
    let places = axes.iter().map(|seed| (seed.input.clone(), Place::At(Layout::clean(seed.axis, FEW)))).collect();
    let mut tracker = Tracker::new(graph, opset, (&few, &many, &one), places);
    tracker.follows_rows = true;
    let mut refused: Vec<Refusal> = tracker.run().err().iter().flat_map(Refusals::iter).cloned().map(of_rows).collect();
    let found = std::mem::take(&mut tracker.found);
    let cuts = found.cuts.iter().filter(|cut| cut.makes_state(graph)).map(|cut| &graph.node[cut.node()]);
    refused.extend(cuts.map(|node| refuse(node, "passes a state from one row of the batch to the next", HELP)));
    refused.extend(found.quantized.iter().map(|node| Refusal {
        node: node.clone(),
        operator: "quantization".to_owned(),
        why: "takes one scale over all rows, so rows would change each other's answers".to_owned(),
        help: HELP.to_owned(),
        hint: None,
        mixes: false,
    }));
    Followed { few, has_fixed_lengths, places: found.places, result: Refusals::new(refused).map_or(Ok(()), Err) }
}

/// The words for rows in place of those for steps.
fn of_rows(refusal: Refusal) -> Refusal {
    let why = refusal
        .why
        .replace("over time", "over the batch")
        .replace("along time", "along the batch")
        .replace("time around", "the batch around")
        .replace("out of the whole input, which later requests don't have", "out of the batch")
        .replace("the length of the whole input", "the number of rows")
        .replace("time axis", "batch axis")
        .replace("steps", "rows")
        .replace("step", "row");
    let why = why.replace("is fixed to one length of the input", "has the batch of 1 in its shape");
    Refusal { why, help: HELP.to_owned(), hint: None, ..refusal }
}

/// Puts the batch into the first node that needs it, and into each `Reshape` behind that doesn't depend on an edited one.
/// `done` has the nodes that are right as they are.
fn edit(graph: &GraphProto, followed: &Followed, names: &mut Names, done: &mut HashSet<String>) -> Option<GraphProto> {
    let scatters: Vec<&NodeProto> = graph.node.iter().filter(|node| node.op() == "ScatterND").collect();
    let refused: HashSet<&str> = followed
        .result
        .as_ref()
        .err()
        .into_iter()
        .flat_map(Refusals::iter)
        .map(|refusal| refusal.node.as_str())
        .collect();
    let mut edited: Option<GraphProto> = None;
    // Tensors that may be others once an edit is made.
    let mut changed: HashSet<String> = HashSet::new();
    for (index, node) in graph.node.iter().enumerate() {
        let mut waits = inputs_of(node).iter().any(|input| changed.contains(input));
        let place = node.input_at(0).and_then(|input| followed.places.get(input));
        if let (Some(Place::At(layout)), false, false) = (place, waits, done.contains(node.name())) {
            if node.op() == "Reshape" {
                let is_reader =
                    |reader: &&&NodeProto| reader.input_at(2).is_some_and(|of| node.output_at(0) == Some(of));
                let reader = scatters.iter().find(is_reader);
                waits = reader.and_then(|reader| reader.input_at(0)).is_some_and(|data| changed.contains(data));
                let wanted = reader.and_then(|reader| wanted_axis(reader, followed));
                if let Some(target) = opened_target(node, *layout, wanted, followed).filter(|_| !waits) {
                    let edited = edited.get_or_insert_with(|| graph.clone());
                    let name = names.fresh(&format!("{}.shape", node.label()));
                    edited.initializer.push(int64s(&name, &[target.len() as i64], &target));
                    edited.node[index].set_input(1, &name);
                    waits = true;
                }
            } else if edited.is_some() {
                // The other edits add nodes, so each has a turn of its own.
                waits = node.op() == "ScatterND" || node.is_recurrent();
            } else if node.op() == "ScatterND"
                && let Some(joined) = joined_block(graph, index, *layout, followed, names)
            {
                return Some(joined);
            } else if node.is_recurrent()
                && layout.axis == 1
                && layout.outer == 1
                && layout.inner > 1
                && let Some(merged) = merge_starts(graph, index, layout.inner, followed, names, done)
            {
                return Some(merged);
            }
        }
        if refused.contains(node.label()) {
            // Without an edit in front of it, it stays refused.
            edited.as_ref()?;
            waits = true;
        }
        if waits {
            changed.extend(node.named_outputs().map(str::to_owned));
        }
    }
    edited
}

/// The axis on which the updates of a `ScatterND` must have the rows, so that it can put them into a tensor with rows.
fn wanted_axis(reader: &NodeProto, followed: &Followed) -> Option<usize> {
    let Place::At(layout) = followed.places.get(&reader.input[0])? else { return None };
    let indices = followed.few.dims(&reader.input[1])?;
    let depth = usize::try_from(*indices.last()?).ok()?;
    (indices.len() - 1 + layout.axis).checked_sub(depth)
}

/// A `ScatterND` whose indices name the only row, and put a block between what stays in front of it and behind it: the
/// three joined, which needs no indices.
fn joined_block(
    graph: &GraphProto,
    index: usize,
    layout: Layout,
    followed: &Followed,
    names: &mut Names,
) -> Option<GraphProto> {
    let node = &graph.node[index];
    let (data, updates) = (node.input_at(0)?, node.input_at(2)?);
    let indices = graph.initializer.iter().find(|weight| Some(weight.name()) == node.input_at(1))?;
    let (&depth, grid) = indices.dims.split_last()?;
    if node.text("reduction").is_some_and(|kind| kind != "none")
        || !layout.is_clean()
        || layout.axis as i64 >= depth
        || depth != grid.len() as i64
    {
        return None;
    }
    let mut dims = followed.few.dims(data)?.to_vec();
    *dims.get_mut(layout.axis)? = 1;
    let Block { axis, start, end } = block(grid, &dims[..grid.len().min(dims.len())], &numbers(indices)?)?;
    let length = dims[axis];
    let (data, updates, output) = (data.to_owned(), updates.to_owned(), node.output.first()?.clone());
    let mut edited = graph.clone();
    let mut slice = |edited: &mut GraphProto, part: &str, from: i64, to: i64| {
        let name = names.fresh(&format!("{}.{part}", node.label()));
        let mut inputs = vec![data.clone()];
        for (what, value) in [("start", from), ("end", to), ("axis", axis as i64)] {
            let constant = names.fresh(&format!("{name}.{what}"));
            edited.initializer.push(int64s(&constant, &[1], &[value]));
            inputs.push(constant);
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        edited.node.push(NodeProto::make("Slice", &format!("{name}/Slice"), &inputs, &[&name]));
        name
    };
    let front = (start > 0).then(|| slice(&mut edited, "front", 0, start));
    let behind = (end < length).then(|| slice(&mut edited, "behind", end, length));
    let parts: Vec<&str> = [front.as_deref(), Some(&updates), behind.as_deref()].into_iter().flatten().collect();
    edited.node[index] = NodeProto::make("Concat", node.name(), &parts, &[&output]).with_int("axis", axis as i64);
    Some(edited)
}

/// A part of a tensor along an axis.
struct Block {
    axis: usize,
    start: i64,
    end: i64,
}

/// The block that indices name, if they name all positions of one. `grid` is their shape, without the last axis.
fn block(grid: &[i64], dims: &[i64], indices: &[f64]) -> Option<Block> {
    let depth = grid.len();
    let mut differ = (0..depth).filter(|&axis| dims.get(axis) != Some(&grid[axis]));
    let axis = differ.next().filter(|_| differ.next().is_none())?;
    let start = *indices.get(axis)? as i64;
    let end = start.checked_add(grid[axis])?;
    let is_named = |(at, index): (usize, &[f64])| {
        let mut rest = at as i64;
        (0..depth).rev().all(|of| {
            let position = rest % grid[of] + if of == axis { start } else { 0 };
            rest /= grid[of];
            index.get(of) == Some(&(position as f64))
        })
    };
    let is_whole =
        depth == dims.len() && start >= 0 && end <= dims[axis] && indices.chunks(depth).enumerate().all(is_named);
    is_whole.then_some(Block { axis, start, end })
}

/// A recurrent node whose rows are the batch and `others` more, with states that have the batch in front of the
/// others, where the model has a 1. The states are merged in front of the node, and taken apart behind it.
fn merge_starts(
    graph: &GraphProto,
    index: usize,
    others: i64,
    followed: &Followed,
    names: &mut Names,
    done: &mut HashSet<String>,
) -> Option<GraphProto> {
    let node = &graph.node[index];
    let mut edited = graph.clone();
    let mut is_edited = false;
    for (input, output) in [(5, 1), (6, 2)] {
        let Some(start) = node.input_at(input) else { continue };
        let Some(&[FEW, rows, hidden]) = followed.few.dims(start) else { continue };
        let in_front =
            matches!(followed.places.get(start), Some(Place::At(layout)) if layout.axis == 0 && layout.is_clean());
        if !in_front || rows != others {
            continue;
        }
        let mut reshape =
            |edited: &mut GraphProto, names: &mut Names, [what, from, to]: [&str; 3], target: [i64; 3]| {
                let name = names.fresh(&format!("{}.{what}", node.label()));
                let shape = names.fresh(&format!("{name}.shape"));
                edited.initializer.push(int64s(&shape, &[3], &target));
                edited.node.push(NodeProto::make("Reshape", &name, &[from, &shape], &[to]));
                done.insert(name);
            };
        let merged = names.fresh(&format!("{start}/rows"));
        reshape(&mut edited, names, ["merged", start, &merged], [1, -1, hidden]);
        edited.node[index].set_input(input, &merged);
        if let Some(last) = node.output_at(output) {
            let rows_of_last = names.fresh(&format!("{last}/rows"));
            reshape(&mut edited, names, ["apart", &rows_of_last, last], [-1, others, hidden]);
            edited.node[index].set_output(output, &rows_of_last);
        }
        is_edited = true;
    }
    is_edited.then_some(edited)
}

/// The target of a `Reshape` with the batch in it, if it has a 1 in its place.
/// `wanted` is the axis on which a node behind it must have the batch.
fn opened_target(node: &NodeProto, layout: Layout, wanted: Option<usize>, followed: &Followed) -> Option<Vec<i64>> {
    let shapes = &followed.few;
    let from = shapes.dims(&node.input[0])?;
    let inputs: Vec<Tensor> = node.input.iter().map(|name| shapes.get(name)).collect();
    let mut target = list(node, &inputs, 1, "shape")?;
    if node.int("allowzero").unwrap_or(0) != 0 || target.contains(&FEW) {
        return None;
    }
    // The shape as it was for one row.
    let one_row = element_count(from).checked_div(layout.len)?;
    if one_row <= 0 {
        return None;
    }
    let mut old = target.clone();
    for (axis, dim) in old.iter_mut().enumerate().filter(|(_, dim)| **dim == 0) {
        *dim = *from.get(axis)?;
        if axis == layout.axis {
            return None;
        }
    }
    if let Some(open) = old.iter().position(|&dim| dim == -1) {
        let others: Vec<i64> = old.iter().copied().filter(|&dim| dim != -1).collect();
        old[open] = one_row.checked_div(element_count(&others))?;
    }
    if old.iter().any(|&dim| dim < 1) || element_count(&old) != one_row {
        return None;
    }
    let behind = layout.inner.checked_mul(element_count(from.get(layout.axis + 1..)?)).filter(|&behind| behind > 0)?;
    let mut suffix = 1;
    let mut places: Vec<(usize, i64)> = Vec::new();
    for axis in (0..old.len()).rev() {
        if behind >= suffix && behind % suffix == 0 && old[axis] % (behind / suffix) == 0 {
            places.push((axis, behind / suffix));
        }
        suffix *= old[axis];
    }
    // A dimension of 1 is the batch; of several, the one on the same axis, or the first. Without one, the batch merges
    // into the dimension that it lies in.
    let ones = || places.iter().filter(|&&(axis, inner)| inner == 1 && old[axis] == 1);
    let same_axis = ones().find(|(axis, _)| *axis == wanted.unwrap_or(layout.axis));
    let &(axis, _) = same_axis.or_else(|| ones().next_back()).or_else(|| places.last())?;
    if old[axis] == 1 && axis == layout.axis && layout.is_clean() {
        // Copied from the input.
        target[axis] = 0;
    } else {
        // Only one dimension can be open.
        if let Some(open) = target.iter().position(|&dim| dim == -1) {
            if open == axis || !followed.has_fixed_lengths {
                return None;
            }
            target[open] = old[open];
        }
        target[axis] = -1;
    }
    Some(target)
}

/// Refuses outputs that lost the batch, and states whose ends have it on different axes.
fn check(graph: &GraphProto, followed: &Followed, axes: &[InputAxis], pairs: &[Pair]) -> Result<(), Refusal> {
    let lost = |output: &ValueInfoProto, why: &str| {
        let producer = graph.node.iter().find(|node| node.output.iter().any(|name| name == output.name()));
        let node = producer.cloned().unwrap_or_else(|| NodeProto::make("output", output.name(), &[], &[]));
        refuse(&node, why, HELP)
    };
    for output in &graph.output {
        match followed.places.get(output.name()) {
            Some(Place::At(layout)) if layout.is_clean() => {}
            Some(Place::At(_)) => return Err(lost(output, "merges the rows with another axis")),
            None | Some(Place::Free) => {}
            Some(_) => return Err(lost(output, "takes single rows")),
        }
    }
    for pair in pairs {
        let before = axes.iter().find(|axis| axis.input == pair.input).map(|axis| axis.axis);
        let after = match followed.places.get(&pair.output) {
            Some(Place::At(layout)) => Some(layout.axis),
            _ => None,
        };
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
        let of_rows = matches!(followed.places.get(x), Some(Place::At(layout)) if layout.axis == 1);
        for input in [5, 6] {
            let Some(start) = node.input_at(input).filter(|_| of_rows) else { continue };
            let one = followed.few.dims(start).is_some_and(|dims| dims.get(1) == Some(&1));
            if !one || matches!(followed.places.get(start), Some(Place::At(_))) {
                continue;
            }
            let name = |names: &mut Names, part: &str| names.fresh(&format!("{}.{part}", node.label()));
            let (shape, place, rows, one, target, spread) = (
                name(names, "x_shape"),
                name(names, "batch_axis"),
                name(names, "rows"),
                name(names, "one"),
                name(names, "start_shape"),
                name(names, "start"),
            );
            graph.initializer.push(int64s(&place, &[1], &[1]));
            graph.initializer.push(int64s(&one, &[1], &[1]));
            let parts: [&str; 3] = [&one, &rows, &one];
            graph.node.push(NodeProto::make("Shape", &format!("{shape}/Shape"), &[x], &[&shape]));
            graph.node.push(
                NodeProto::make("Gather", &format!("{rows}/Gather"), &[&shape, &place], &[&rows]).with_int("axis", 0),
            );
            graph
                .node
                .push(NodeProto::make("Concat", &format!("{target}/Concat"), &parts, &[&target]).with_int("axis", 0));
            graph.node.push(NodeProto::make("Expand", &format!("{spread}/Expand"), &[start, &target], &[&spread]));
            graph.node[index].set_input(input, &spread);
        }
    }
}

/// Writes the batch into the outputs, and forgets the shapes between.
fn finish(graph: &mut GraphProto, followed: &Followed) {
    for output in &mut graph.output {
        let Some(Place::At(layout)) = followed.places.get(output.name()) else { continue };
        let (Some(mut dims), elem) = (output.dims(), output.elem()) else { continue };
        if let Some(dim) = dims.get_mut(layout.axis) {
            *dim = Dim::Symbol(SYMBOL.to_owned());
            output.set_tensor(elem, &dims);
        }
    }
    graph.value_info.retain(|value| !matches!(followed.places.get(value.name()), None | Some(Place::At(_))));
}
