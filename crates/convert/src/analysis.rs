//! Finds the time axis of a model's inputs, and what stands in the way of running in steps.

use std::collections::HashMap;

use crate::graph::{InputAxis, Names, required_inputs};
use crate::infer::Shapes;
use crate::onnx::operators::StepsRule;
use crate::onnx::schema::{GraphProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, names};
use crate::report::Warning;
use crate::time::{
    Cut, FAR_OVER_SHORT, Found, Hint, LONG_OVER_SHORT, Layout, ONE_STEP, Place, Refusal, Refusals, Tracker, check_far,
    common_divisor, refuse,
};

// Shapes are computed for this number of steps. It has many divisors, so that most strides divide it.
const SHORT: i64 = 48;
/// Strides whose product is larger are not tried. Encoders of audio have 320 or 1920.
const MOST_STRIDE: i64 = 1 << 16;
/// Two sizes for the other open dimensions: a dimension that changes with them is open.
const NARROW: i64 = 2;
const WIDE: i64 = 3;

pub struct Probes {
    /// The number of steps of the short ones.
    steps: i64,
    pub short: Shapes,
    pub long: Shapes,
    pub far: Shapes,
    pub wide: Shapes,
}

pub struct Analysis {
    pub time: Vec<InputAxis>,
    /// The symbol that stands for the number of steps in the converted model.
    pub symbol: String,
    /// The symbol of the batch dimension, if the input has one other open dimension.
    pub batch: Option<String>,
    pub found: Found,
    pub probes: Probes,
    /// Recurrences on other inputs, which get no state.
    pub uncut: Option<Warning>,
}

#[derive(Debug)]
pub enum Obstacle {
    /// `without_state`: the recurrences that get no state because of it.
    Refused {
        refusals: Refusals,
        without_state: Vec<String>,
        /// A layer along the axis starts at a state that the model has.
        goes_on: bool,
    },
    /// No axis leads to a recurrence or a window. `stopped` says why, for each. `may_be_one_step`: only lengths stood
    /// in the way.
    Nothing {
        stopped: Vec<String>,
        may_be_one_step: bool,
    },
    Unknown(String),
}

/// Follows the steps from the axes that are given, or from those that lead to a recurrence.
pub fn analyse(graph: &GraphProto, opset: i64, given: &[InputAxis], states: &[String]) -> Result<Analysis, Obstacle> {
    // A state has no axis of steps: it holds the values of the last step only.
    let inputs: Vec<&ValueInfoProto> =
        required_inputs(graph).filter(|input| !states.iter().any(|state| state == input.name())).collect();
    if !given.is_empty() {
        // Axes that the caller names are followed as they are: a refusal about them is what it wants to know.
        check_given(&inputs, given)?;
        let analysis = attempt(graph, opset, given.to_vec(), states);
        let refused = |refusals| Obstacle::Refused { refusals, without_state: Vec::new(), goes_on: false };
        return analysis.1.map(|()| analysis.0).map_err(refused);
    }
    let (mut stopped, mut may_be_one_step) = (Vec::new(), true);
    // An exporter that leaves an axis open does so for the steps or the batch; fixed axes are mostly features.
    for axes in [open_axes(&inputs), fixed_axes(&inputs)] {
        let mut refused: Vec<(Vec<InputAxis>, Found, Refusals)> = Vec::new();
        let mut followed: Vec<Analysis> = Vec::new();
        for axes in axes {
            let name = axes[0].to_string();
            match attempt(graph, opset, axes, states) {
                (analysis, Ok(())) if analysis.found.reached > 0 => followed.push(analysis),
                (_, Ok(())) => stopped.push((false, format!("along {name} nothing needs earlier steps"))),
                (analysis, Err(refusals)) => {
                    may_be_one_step &= refusals.first.is_of_length();
                    stopped.push((refusals.first.help == ONE_STEP, format!("along {name}, {}", refusals.first)));
                    refused.push((analysis.time, analysis.found, refusals));
                }
            }
        }
        // The first of the axes that reach the most recurrences.
        let best = (0..followed.len()).rev().max_by_key(|&index| followed[index].found.reached);
        if let Some(mut best) = best.map(|index| followed.remove(index)) {
            // Such recurrences may be meant: each request then has all that they run over.
            best.uncut = uncut_on_other_inputs(graph, &best, &refused);
            // Cutting along one input only would silently restart the recurrences over the other.
            let beside = followed.iter().find_map(|other| recurrence_on_another_input(graph, &best, other));
            return beside.map_or(Ok(best), |refusal| {
                let node = format!("{} '{}'", refusal.operator, refusal.node);
                Err(Obstacle::Refused { refusals: refusal.into(), without_state: vec![node], goes_on: false })
            });
        }
        // The axis that reaches most recurrences is the one that the user means, so its refusals are the useful ones.
        let furthest = (0..refused.len()).rev().max_by_key(|&index| refused[index].1.reached);
        let furthest = furthest.map(|index| refused.swap_remove(index)).filter(|(_, found, _)| found.reached > 0);
        if let Some((_, found, refusals)) = furthest {
            let without_state = without_state(graph, &found, &refusals);
            return Err(Obstacle::Refused { refusals, without_state, goes_on: found.goes_on });
        }
    }
    // A node that takes certain steps betrays an unrolled loop, so its line comes first.
    stopped.sort_by_key(|(takes_certain_steps, _)| !takes_certain_steps);
    let stopped = stopped.into_iter().map(|(_, line)| line).collect();
    Err(Obstacle::Nothing { stopped, may_be_one_step })
}

fn check_given(inputs: &[&ValueInfoProto], given: &[InputAxis]) -> Result<(), Obstacle> {
    for axis @ InputAxis { input: name, axis: number } in given {
        let input = inputs.iter().find(|input| input.name() == name);
        let dims = input.map(|input| input.dims().unwrap_or_default());
        let why = match dims {
            None => {
                format!("the model has no input '{name}' for requests (it has {})", names(inputs.iter().copied()))
            }
            Some(dims) if dims.get(*number) == Some(&Dim::Known(0)) => {
                format!("axis {number} of input '{name}' has no steps: it is {}", bracketed(&dims))
            }
            Some(dims) if *number >= dims.len() => {
                format!("input '{name}' has no axis {number}: it is {}", bracketed(&dims))
            }
            Some(_) if given.iter().any(|other| other.input == *name && other != axis) => {
                format!("only one axis of input '{name}' can have the steps")
            }
            Some(_) => continue,
        };
        return Err(Obstacle::Unknown(why));
    }
    Ok(())
}

/// Lists the recurrences that were found or refused, and the windows if the model continues from its own states.
fn without_state(graph: &GraphProto, found: &Found, refusals: &Refusals) -> Vec<String> {
    // A loop that is refused early is in no list of recurrences yet.
    let is_loop = |index: usize| matches!(graph.node[index].steps_rule(), StepsRule::Loop | StepsRule::Scan);
    let is_recurrence = |index: usize| is_loop(index) || found.recurrences.contains(&index);
    let is_refused = |index: usize| refusals.iter().any(|refusal| refusal.node == graph.node[index].label());
    let cut = found.cuts.iter().map(Cut::node).filter(|&index| is_recurrence(index));
    let windows = cut_windows(found).filter(|_| found.goes_on);
    let in_the_way = (0..graph.node.len()).filter(|&index| is_recurrence(index) && is_refused(index));
    cut.chain(windows).chain(in_the_way).map(|index| graph.node[index].described()).collect()
}

fn cut_windows(found: &Found) -> impl Iterator<Item = usize> {
    found.cuts.iter().filter(|cut| matches!(cut, Cut::Frames { .. } | Cut::Prefix { .. })).map(Cut::node)
}

/// Lists recurrences and causal windows over inputs that aren't the steps. They get no state, because nodes are in the
/// way.
fn uncut_on_other_inputs(
    graph: &GraphProto,
    best: &Analysis,
    refused: &[(Vec<InputAxis>, Found, Refusals)],
) -> Option<Warning> {
    let (mut uncut, mut in_the_way) = (Vec::new(), Vec::new());
    // Another axis of the same input is the batch or a feature, and no second sequence.
    let is_of_steps = |axis: &InputAxis| best.time.iter().any(|taken| taken.input == axis.input);
    for (axes, found, refusals) in refused.iter().filter(|(axes, ..)| !axes.iter().any(is_of_steps)) {
        let passes_on = found.recurrences.iter().copied().chain(cut_windows(found));
        let has_no_state = |index: &usize| best.found.cuts.iter().all(|cut| cut.node() != *index);
        let labelled = |index: usize| format!("{} along {}", graph.node[index].described(), axes[0]);
        let nodes: Vec<String> = passes_on.filter(has_no_state).map(labelled).collect();
        if !nodes.is_empty() {
            uncut.extend(nodes);
            in_the_way.extend(refusals.iter().cloned());
        }
    }
    Some(Warning::Uncut { nodes: uncut, refusals: Refusals::new(in_the_way)?, time: best.time.clone() })
}

/// Refuses a node that passes a state along an input without the steps. It would begin anew in each request.
fn recurrence_on_another_input(graph: &GraphProto, best: &Analysis, other: &Analysis) -> Option<Refusal> {
    let is_beside = |axis: &&InputAxis| best.time.iter().all(|taken| taken.input != axis.input);
    let axis = other.time.iter().find(is_beside)?;
    let cut = other.found.cuts.iter().find(|cut| best.found.cuts.iter().all(|taken| taken.node() != cut.node()))?;
    let all: Vec<String> = best.time.iter().chain(&other.time).map(InputAxis::to_string).collect();
    let why = format!("passes a state along {axis}, and {} could have the steps as well", best.time[0]);
    let help = format!("name the axes that have them, which may be all: {}", all.join(","));
    Some(refuse(&graph.node[cut.node()], why, &help).with_hint(Hint::Time))
}

/// The open axes of the inputs, those of one symbol together.
fn open_axes(inputs: &[&ValueInfoProto]) -> Vec<Vec<InputAxis>> {
    let mut by_symbol: Vec<(Option<String>, Vec<InputAxis>)> = Vec::new();
    for input in inputs {
        for (axis, dim) in input.dims().unwrap_or_default().into_iter().enumerate() {
            let symbol = match dim {
                Dim::Known(_) => continue,
                Dim::Symbol(name) => Some(name),
                Dim::Open => None,
            };
            let found = InputAxis { input: input.name().to_owned(), axis };
            match by_symbol.iter_mut().find(|(known, _)| symbol.is_some() && *known == symbol) {
                Some((_, axes)) => axes.push(found),
                // Two axes without names are not known to have one length, so each is tried by itself.
                None => by_symbol.push((symbol, vec![found])),
            }
        }
    }
    by_symbol.into_iter().map(|(_, axes)| axes).collect()
}

/// The axes whose length the model fixes, each by itself. Inputs with two open axes are left out: these are the batch
/// and the steps.
fn fixed_axes(inputs: &[&ValueInfoProto]) -> Vec<Vec<InputAxis>> {
    let of_input = |input: &&ValueInfoProto| {
        let name = input.name().to_owned();
        let is_fixed = |(axis, dim): (usize, Dim)| matches!(dim, Dim::Known(length) if length > 1).then_some(axis);
        let dims = input.dims().unwrap_or_default();
        let has_batch_and_steps = dims.iter().filter(|dim| !dim.is_known()).count() > 1;
        let dims = if has_batch_and_steps { Vec::new() } else { dims };
        let axes: Vec<usize> = dims.into_iter().enumerate().filter_map(is_fixed).collect();
        axes.into_iter().map(move |axis| vec![InputAxis { input: name.clone(), axis }])
    };
    inputs.iter().flat_map(of_input).collect()
}

/// Follows the steps from these axes. The analysis is complete up to the first node in the way.
pub fn attempt(
    graph: &GraphProto,
    opset: i64,
    time: Vec<InputAxis>,
    states: &[String],
) -> (Analysis, Result<(), Refusals>) {
    let first = attempt_with(graph, opset, time.clone(), states, SHORT);
    let stride = common_stride(graph);
    // Inference takes time for each step, so longer inputs are tried only where a stride may be the reason.
    if first.1.is_ok() || SHORT % stride == 0 || stride > MOST_STRIDE {
        return first;
    }
    let second = attempt_with(graph, opset, time, states, SHORT * stride);
    // With more steps, some graphs fail earlier, at a limit on the length.
    let gets_further = second.1.is_ok() || second.0.found.stopped_at > first.0.found.stopped_at;
    if gets_further { second } else { first }
}

/// A common multiple of the strides on every path through the graph, along any axis.
fn common_stride(graph: &GraphProto) -> i64 {
    const fn multiple(a: i64, b: i64) -> i64 {
        a.saturating_mul(b / common_divisor(a, b))
    }
    // The nodes are in order, so the strides in front of each are known when it comes.
    let mut strides: HashMap<&str, i64> = HashMap::new();
    for node in &graph.node {
        let before = node.input.iter().filter_map(|name| strides.get(name.as_str())).copied().fold(1, multiple);
        let own = node.ints("strides").unwrap_or_default().iter().map(|stride| (*stride).max(1)).fold(1, multiple);
        strides.extend(node.named_outputs().map(|name| (name, before.saturating_mul(own))));
    }
    strides.into_values().fold(1, multiple)
}

/// Follows the steps through the shapes of inputs with this many steps, and with more.
fn attempt_with(
    graph: &GraphProto,
    opset: i64,
    time: Vec<InputAxis>,
    states: &[String],
    steps: i64,
) -> (Analysis, Result<(), Refusals>) {
    let infer = |steps: i64, other: i64| {
        Shapes::of_lengths(graph, opset, |input, axis, dim| match dim {
            _ if time.iter().any(|of| of.is(input, axis)) => steps,
            Dim::Known(length) => *length,
            _ => other,
        })
    };
    let probes = Probes {
        steps,
        short: infer(steps, NARROW),
        long: infer(steps * LONG_OVER_SHORT, NARROW),
        far: infer(steps * FAR_OVER_SHORT, NARROW),
        wide: infer(steps, WIDE),
    };
    let mut places: HashMap<String, Place> = states.iter().map(|state| (state.clone(), Place::Last)).collect();
    places.extend(time.iter().map(|seed| (seed.input.clone(), Place::At(Layout::clean(seed.axis, steps)))));
    let mut tracker = Tracker::new(graph, opset, (&probes.short, &probes.long, &probes.far), places);
    // A layer that starts at such a state has its memory outside already.
    tracker.of_states = states.iter().cloned().collect();
    let result = tracker.run();
    let result = result.and_then(|()| check_far(graph, &tracker.found, &probes.far).map_err(Refusals::from));
    let result = result.and_then(|()| tracker.check_outputs().map_err(Refusals::from));
    let found = std::mem::take(&mut tracker.found);
    let dims_of = |seed: &InputAxis| graph.input.iter().find(|input| input.name() == seed.input)?.dims();
    let symbol = time.iter().find_map(|seed| dims_of(seed)?.into_iter().nth(seed.axis)?.symbol());
    let symbol = symbol.unwrap_or_else(|| Names::of_dimensions(graph.input.iter()).fresh("time"));
    // A state needs the name of the batch, and an input with steps has it beside them.
    let beside = || {
        let seed = time.first()?;
        let others = dims_of(seed)?.into_iter().enumerate().filter(|(axis, _)| *axis != seed.axis);
        let mut open = others.map(|(_, dim)| dim).filter(|dim| !dim.is_known());
        let batch = open.next().filter(|_| open.next().is_none())?;
        Some(batch.symbol().unwrap_or_else(|| "batch".to_owned()))
    };
    let batch = if time.is_empty() { only_symbol(graph) } else { beside() };
    (Analysis { time, symbol, batch, found, probes, uncut: None }, result)
}

fn only_symbol(graph: &GraphProto) -> Option<String> {
    let dims = required_inputs(graph).flat_map(|input| input.dims().unwrap_or_default());
    let mut symbols: Vec<String> = dims.filter_map(Dim::symbol).collect();
    symbols.sort();
    symbols.dedup();
    if symbols.len() == 1 { symbols.pop() } else { None }
}

impl Analysis {
    /// A tensor's dimensions, with symbols where they follow the number of steps or the batch.
    pub fn dims(&self, name: &str) -> Option<Vec<Dim>> {
        let Probes { short, long, wide, .. } = &self.probes;
        let (short, long, wide) = (short.dims(name)?, long.dims(name)?, wide.dims(name)?);
        // A rank that depends on the length has no dimensions that a signature could show.
        if short.len() != long.len() || short.len() != wide.len() {
            return None;
        }
        let steps = self.probes.steps;
        let dim = |axis: usize| match (short[axis], long[axis], wide[axis]) {
            (short, long, wide) if (short, long, wide) == (steps, steps * LONG_OVER_SHORT, steps) => {
                Dim::Symbol(self.symbol.clone())
            }
            // It follows the other open dimensions, and among them the batch is the one with a name.
            (NARROW, NARROW, WIDE) => self.batch.clone().map_or(Dim::Open, Dim::Symbol),
            (short, long, wide) if short == long && short == wide => Dim::Known(short),
            _ => Dim::Open,
        };
        Some((0..short.len()).map(dim).collect())
    }

    /// The dimensions of an output. One that doesn't depend on the steps may have an open dimension of its own, which
    /// isn't the batch.
    pub fn output_dims(&self, output: &ValueInfoProto) -> Option<Vec<Dim>> {
        let is_free = !matches!(self.found.places.get(output.name()), Some(place) if *place != Place::Free);
        // The probes would take a length of its own for that of the batch.
        let own = output.dims().filter(|_| is_free && !self.time.is_empty());
        own.or_else(|| self.dims(output.name()))
    }

    pub fn is_length(&self, name: &str) -> bool {
        let Probes { steps, short, long, far, .. } = &self.probes;
        let is = |shapes: &Shapes, times: i64| shapes.get(name).is_full_of((steps * times) as f64);
        is(short, 1) && is(long, LONG_OVER_SHORT) && is(far, FAR_OVER_SHORT)
    }

    /// Whether a tensor is zero throughout, whatever the size of the input.
    pub fn is_zero(&self, name: &str) -> bool {
        let zero = |shapes: &Shapes| shapes.get(name).is_full_of(0.0);
        // Of long inputs, large contents are unknown; those of the short ones decide then.
        let is_zero_far = self.probes.far.get(name).data.is_none() || zero(&self.probes.far);
        zero(&self.probes.short) && zero(&self.probes.long) && zero(&self.probes.wide) && is_zero_far
    }
}
