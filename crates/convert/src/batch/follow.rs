//! Follows the rows of a batch through a graph, as steps are followed.

use std::collections::HashMap;

use crate::graph::{InputAxis, required_inputs};
use crate::infer::Shapes;
use crate::onnx::Dim;
use crate::onnx::schema::{GraphProto, ValueInfoProto};
use crate::time::{Layout, Place, Refusal, Refusals, Tracker, refuse};

/// Shapes are computed for 1 row and for two larger numbers of rows. This is the smaller one.
pub const FEW: i64 = 48;
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

/// Whether tf2onnx made up this name. It gives each open dimension of each tensor another one, so such a name doesn't tell
/// which dimensions are the same.
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

/// As [`rows`], where each other open dimension has a prime length of its own. Dimensions with one name have one length.
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
    pub has_fixed_lengths: bool,
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
        .replace("step", "row");
    let why = why.replace("is fixed to one length of the input", "has the batch of 1 in its shape");
    Refusal { why, help: HELP.to_owned(), hint: None, ..refusal }
}
