//! The rows of a batch in a graph: follows them as steps are followed, and puts the batch into nodes that have the 1
//! written into their shapes.

use std::collections::{HashMap, HashSet};

use crate::graph::{InputAxis, Names, inputs_of, required_inputs};
use crate::infer::Shapes;
use crate::infer::tensor::list;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{Dim, element_count, int64s, numbers};
use crate::time::{Layout, Place, Refusal, Refusals, Tracker, refuse};

/// Shapes are computed for 1 row and for two larger numbers of rows. This is the smaller one.
const FEW: i64 = 48;
const MANY: i64 = 96;
/// The length of other open dimensions.
const OTHER: i64 = 32;
/// Lengths of other open dimensions that no window divides.
const PRIMES: [i64; 6] = [31, 37, 41, 43, 53, 59];

pub const SYMBOL: &str = "batch";
/// The names that exporters give to the batch dimension, in lower case.
const USUAL_SYMBOLS: [&str; 6] = [SYMBOL, "batch_size", "batchsize", "n", "b", "bs"];

pub const HELP: &str =
    "export the model with an open batch, or serve it without batches (max_batch_size: 0, and no open_batch)";

/// Whether exporters give this name to the batch dimension. The backend finds the batch by these names, too.
pub fn is_batch_name(symbol: &str) -> bool {
    USUAL_SYMBOLS.contains(&symbol.to_lowercase().as_str())
}

/// Whether tf2onnx made up this name. It gives each open dimension of each tensor another one, so such a name doesn't
/// tell which dimensions are the same.
pub fn is_made_up(symbol: &str) -> bool {
    let number = symbol.strip_prefix("unk__").unwrap_or_default();
    !number.is_empty() && number.chars().all(|letter| letter.is_ascii_digit())
}

/// Whether an axis is that of the rows: by its name, or because it is the first and open.
pub fn is_batch_axis(dims: &[Dim], axis: usize) -> bool {
    let is_named = |dim: &Dim| matches!(dim, Dim::Symbol(name) if is_batch_name(name) || is_made_up(name));
    is_named(&dims[axis]) || axis == 0 && !dims[0].is_known() && !dims.iter().any(is_named)
}

/// Where tensors have the rows of a batch that is open, or the first node that mixes them.
pub fn rows(graph: &GraphProto, opset: i64, axes: &[InputAxis]) -> Result<HashMap<String, Place>, Refusal> {
    follow(graph, opset, axes).places()
}

/// As [`rows`], where each other open dimension has a prime length of its own. Dimensions with one name have one
/// length.
pub fn rows_of_odd_lengths(
    graph: &GraphProto,
    opset: i64,
    axes: &[InputAxis],
) -> Result<HashMap<String, Place>, Refusal> {
    // A prime length is no multiple of a kernel, so a window that reaches over rows shows.
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

pub struct Followed {
    pub few: Shapes,
    /// All dimensions but the batch have a length.
    has_fixed_lengths: bool,
    pub places: HashMap<String, Place>,
    pub result: Result<(), Refusals>,
}

impl Followed {
    fn places(self) -> Result<HashMap<String, Place>, Refusal> {
        self.result.map(|()| self.places).map_err(|refusals| *refusals.first)
    }
}

pub fn follow(graph: &GraphProto, opset: i64, axes: &[InputAxis]) -> Followed {
    follow_with(graph, opset, axes, &|_, _| OTHER)
}

/// `other` gives the lengths of other open dimensions, by input and axis.
fn follow_with(graph: &GraphProto, opset: i64, axes: &[InputAxis], other: &dyn Fn(&str, usize) -> i64) -> Followed {
    let infer = |rows: i64| {
        Shapes::of_lengths(graph, opset, |input, axis, dim| match dim {
            _ if axes.iter().any(|of| of.is(input, axis)) => rows,
            Dim::Known(length) => *length,
            _ => other(input, axis),
        })
    };
    // A -1 in the target of a Reshape can be given a number only if no length is open.
    let is_fixed = |input: &ValueInfoProto| {
        let opened = axes.iter().filter(|seed| seed.input == input.name()).count();
        input.dims().is_some_and(|dims| dims.iter().filter(|dim| !dim.is_known()).count() == opened)
    };
    let has_fixed_lengths = required_inputs(graph).all(is_fixed);
    // The rows need no far length. A single row shows shapes that depend on their number.
    let (few, many, one) = (infer(FEW), infer(MANY), infer(1));
    let places = axes.iter().map(|seed| (seed.input.clone(), Place::At(Layout::clean(seed.axis, FEW)))).collect();
    let mut tracker = Tracker::new(graph, opset, (&few, &many, &one), places);
    tracker.follows_rows = true;
    let mut refused: Vec<Refusal> = tracker.run().err().iter().flat_map(Refusals::iter).cloned().map(of_rows).collect();
    let found = std::mem::take(&mut tracker.found);
    // For steps, a cut is the way out. For rows, there is none: a row must not get the state of another.
    let cuts = found.cuts.iter().filter(|cut| cut.makes_state(graph)).map(|cut| &graph.node[cut.node()]);
    refused.extend(cuts.map(|node| refuse(node, "passes a state from one row of the batch to the next", HELP)));
    let why = "takes one scale over all rows, so rows would change each other's answers";
    refused.extend(found.quantized.iter().map(|node| Refusal::of("quantization", node, why, HELP)));
    Followed { few, has_fixed_lengths, places: found.places, result: Refusals::new(refused).map_or(Ok(()), Err) }
}

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
        .replace("step", "row")
        .replace("is fixed to one length of the input", "has the batch of 1 in its shape");
    Refusal { why, help: HELP.to_owned(), hint: None, ..refusal }
}

/// Puts the batch into the first node that needs it, and into each later `Reshape` that doesn't depend on an edited
/// one. `done` has the nodes that are right as they are.
pub fn edit(
    graph: &GraphProto,
    followed: &Followed,
    names: &mut Names,
    done: &mut HashSet<String>,
) -> Option<GraphProto> {
    let scatters: Vec<&NodeProto> = graph.node.iter().filter(|node| node.op() == "ScatterND").collect();
    let refusals = followed.result.as_ref().err().into_iter().flat_map(Refusals::iter);
    let refused: HashSet<&str> = refusals.map(|refusal| refusal.node.as_str()).collect();
    let mut edited: Option<GraphProto> = None;
    // Tensors whose shapes an edit may change.
    let mut changed: HashSet<String> = HashSet::new();
    for (index, node) in graph.node.iter().enumerate() {
        // The shapes after an edited node in the graph are still those from before the edit, so such nodes wait for the
        // next turn.
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
            // Only an earlier edit can help it.
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

/// Replaces a `ScatterND` whose indices name the only row. It puts a block between two parts that stay, so a join of
/// the three does the same without indices.
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
    // A reduction combines what was there with the updates, which a join does not.
    if node.text("reduction").is_some_and(|kind| kind != "none")
        || !layout.is_clean()
        || layout.axis as i64 >= depth
        || depth != grid.len() as i64
    {
        return None;
    }
    // The indices were written for one row.
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
    // A join keeps the order of elements, so the indices must count through the block from its start.
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

/// Merges the states of a recurrent node before it, and splits them after it. The rows of the node are the batch times
/// `others`, and its states have the batch first, where the model has a 1.
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

/// The target of a `Reshape` with the batch in place of its 1. `wanted` is the axis on which a later node must have the
/// batch.
fn opened_target(node: &NodeProto, layout: Layout, wanted: Option<usize>, followed: &Followed) -> Option<Vec<i64>> {
    let shapes = &followed.few;
    let from = shapes.dims(&node.input[0])?;
    let mut target = list(node, &shapes.inputs(node), 1, "shape")?;
    // Such a target means another shape, or has the batch already.
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
    // The batch must stay where it is among the elements, so its new axis is followed by as many elements as the old
    // one.
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
