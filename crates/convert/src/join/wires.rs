//! Which output of a graph each input of another takes, and the context of such an input: the end of its previous value
//! is prepended to what the wire brings now. That end is a state of the joined graph.

use super::part::{JoinError, Names, Read, Result};
use crate::batch::is_batch_axis;
use crate::graph::required_inputs;
use crate::names::{StatePair, groups};
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, int64s, names, type_name};

/// An output, or an input that several graphs take, and the input that takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    pub from: String,
    pub to: String,
}

/// Reads `<<<graph.output, graph.input>>>`, several of them separated by spaces, commas or nothing.
pub fn wires(text: &str) -> Option<Vec<Wire>> {
    let wire = |(from, to): (&str, &str)| Wire { from: from.to_owned(), to: to.to_owned() };
    Some(groups(text)?.into_iter().map(wire).collect())
}

// Most elements of a context: the comparison can't hold more, and ONNX Runtime ends the process if a dimension that it
// infers for a Slice has 2^31 or more.
const MOST_ELEMENTS: i64 = 1 << 26;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    pub input: String,
    pub elements: i64,
    /// Their axis. Without it, there must be one that is open or longer than the context.
    pub axis: Option<usize>,
    /// At first, nothing is prepended: the wire brings the whole window. Otherwise, zeros are.
    pub whole: bool,
}

#[derive(Clone, Debug)]
pub struct PlannedContext {
    /// The input of the graph, by its own name.
    pub input: String,
    pub pair: StatePair,
    pub elements: i64,
    pub axis: usize,
    source: String,
    elem: i32,
    dims: Vec<Dim>,
}

/// Reads `graph.input=13@1:whole`, several of them separated by spaces or commas.
pub fn contexts(text: &str) -> Option<Vec<Context>> {
    let context = |word: &str| {
        let (input, value) = word.split_once('=').filter(|(input, _)| !input.is_empty())?;
        let (value, whole) = match value.split_once(':') {
            None | Some((_, "zeros")) => (value.trim_end_matches(":zeros"), false),
            Some((value, "whole")) => (value, true),
            Some(_) => return None,
        };
        let (elements, axis) = match value.split_once('@') {
            None => (value, None),
            Some((elements, axis)) => (elements, Some(axis.parse().ok()?)),
        };
        let elements = elements.parse().ok().filter(|&elements| elements > 0)?;
        Some(Context { input: input.to_owned(), elements, axis, whole })
    };
    let words = text.split([' ', ',', '\t', '\n']).filter(|word| !word.is_empty());
    words.map(context).collect::<Option<Vec<_>>>().filter(|read| !read.is_empty())
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub graph: usize,
    pub tensor: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub from: End,
    pub to: End,
    /// An output of a graph gives it, and not an input of requests.
    pub is_made: bool,
}

pub fn end(parts: &[Read], name: &str) -> Result<End> {
    let found = name.split_once('.').and_then(|(graph, tensor)| {
        let graph = parts.iter().position(|part| part.name == graph)?;
        Some(End { graph, tensor: tensor.to_owned() })
    });
    found.ok_or_else(|| {
        let graphs = parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>().join(", ");
        JoinError::NoGraph { name: name.to_owned(), graphs }
    })
}

pub fn find<'a>(
    part: &Read,
    values: &'a [ValueInfoProto],
    kind: &'static str,
    tensor: &str,
) -> Result<&'a ValueInfoProto> {
    values.iter().find(|value| value.name() == tensor).ok_or_else(|| JoinError::NoTensor {
        graph: part.name.clone(),
        kind,
        tensor: tensor.to_owned(),
        has: names(values),
    })
}

/// The links of these wires and of equal names, and the states between graphs: wires back to an earlier graph. A wire
/// to an input of its own graph becomes a state of the graph.
pub fn resolved(parts: &mut [Read], wires: &[Wire]) -> Result<(Vec<Link>, Vec<StatePair>)> {
    let (mut links, mut states): (Vec<Link>, Vec<StatePair>) = (Vec::new(), Vec::new());
    let mut taken: Vec<End> = Vec::new();
    for wire in wires {
        let (from, to) = (end(parts, &wire.from)?, end(parts, &wire.to)?);
        let (source, target) = (&parts[from.graph], &parts[to.graph]);
        find(target, &target.graph.input, "input", &to.tensor)?;
        if taken.contains(&to) {
            return Err(JoinError::TwoWires(wire.to.clone()));
        }
        taken.push(to.clone());
        let is_output = source.graph.output.iter().any(|output| output.name() == from.tensor);
        let is_input = source.graph.input.iter().any(|input| input.name() == from.tensor);
        if !is_output && !is_input {
            find(source, &source.graph.output, "output", &from.tensor)?;
        }
        let is_own = target.pairs.iter().any(|pair| pair.input == to.tensor && pair.output == from.tensor);
        if to.graph == from.graph && is_output && is_own {
            continue;
        }
        if target.is_state(&to.tensor) {
            return Err(JoinError::IntoState { from: wire.from.clone(), to: wire.to.clone() });
        }
        if from.graph < to.graph {
            links.push(Link { from, to, is_made: is_output });
        } else if is_output && from.graph == to.graph {
            parts[to.graph].pairs.push(StatePair { input: to.tensor, output: from.tensor });
        } else if is_output {
            states.push(StatePair::new(&wire.to, &wire.from));
        } else {
            return Err(JoinError::BackFromInput { from: wire.from.clone(), to: wire.to.clone() });
        }
    }
    for graph in 1..parts.len() {
        links.extend(of_equal_names(parts, graph, &taken)?);
    }
    Ok((links, states))
}

fn of_equal_names(parts: &[Read], graph: usize, taken: &[End]) -> Result<Vec<Link>> {
    let mut links = Vec::new();
    let part = &parts[graph];
    for input in required_inputs(&part.graph).map(ValueInfoProto::name) {
        let to = End { graph, tensor: input.to_owned() };
        if part.is_state(input) || taken.contains(&to) {
            continue;
        }
        let gives = |source: &Read| {
            let has = source.graph.output.iter().any(|output| output.name() == input);
            has && source.pairs.iter().all(|pair| pair.output != input)
        };
        let sources: Vec<usize> = (0..graph).filter(|&index| gives(&parts[index])).collect();
        match sources.as_slice() {
            [] => {}
            &[graph] => links.push(Link { from: End { graph, tensor: input.to_owned() }, to, is_made: true }),
            _ => {
                let sources: Vec<String> = sources.iter().map(|&index| parts[index].full(input)).collect();
                return Err(JoinError::ManySources { input: part.full(input), sources: sources.join(", ") });
            }
        }
    }
    Ok(links)
}

pub fn check_contexts(contexts: &[Context], parts: &[Read]) -> Result<()> {
    for (index, Context { input, elements, .. }) in contexts.iter().enumerate() {
        let to = end(parts, input)?;
        find(&parts[to.graph], &parts[to.graph].graph.input, "input", &to.tensor)?;
        let refused = |why: String| JoinError::Context { input: input.clone(), why };
        if !(1..=MOST_ELEMENTS).contains(elements) {
            return Err(refused(format!("it would have {elements} elements, and 1 to {MOST_ELEMENTS} are expected")));
        }
        if contexts[..index].iter().any(|other| other.input == *input) {
            return Err(refused("it is given twice".to_owned()));
        }
    }
    Ok(())
}

impl Link {
    pub fn source<'a>(&self, parts: &'a [Read]) -> Result<&'a ValueInfoProto> {
        let part = &parts[self.from.graph];
        let values = if self.is_made { &part.graph.output } else { &part.graph.input };
        find(part, values, "output", &self.from.tensor)
    }

    pub fn target<'a>(&self, parts: &'a [Read]) -> Result<&'a ValueInfoProto> {
        let part = &parts[self.to.graph];
        find(part, &part.graph.input, "input", &self.to.tensor)
    }

    pub fn disagree(&self, parts: &[Read], why: &str) -> Result<JoinError> {
        let of = |value: &ValueInfoProto| {
            let dims = value.dims().map_or_else(|| "any dims".to_owned(), |dims| bracketed(&dims));
            format!("{} {dims}", type_name(value.elem()))
        };
        Ok(JoinError::Disagree {
            from: parts[self.from.graph].full(&self.from.tensor),
            of_source: of(self.source(parts)?),
            to: parts[self.to.graph].full(&self.to.tensor),
            of_target: of(self.target(parts)?),
            why: why.to_owned(),
        })
    }

    pub fn context<'a>(&self, contexts: &'a [Context], parts: &[Read]) -> Option<&'a Context> {
        let name = parts[self.to.graph].full(&self.to.tensor);
        contexts.iter().find(|context| context.input == name)
    }

    /// Plans the context of the input that it leads to. Its names are those before the renaming of the graph that gives
    /// it.
    pub fn planned_context(&self, context: &Context, parts: &[Read], names: &[Names]) -> Result<PlannedContext> {
        let (source, target) = (self.source(parts)?, self.target(parts)?);
        let (given, taken) = (source.dims().unwrap_or_default(), target.dims().unwrap_or_default());
        let axis = axis(context, &taken)?;
        if !may_follow(&given, &taken, axis, context) || source.elem() != target.elem() {
            let why = match (given.get(axis), taken.get(axis)) {
                (Some(Dim::Known(new)), Some(Dim::Known(window)))
                    if !context.whole && new + context.elements != *window =>
                {
                    let kept = context.elements;
                    format!(
                        "axis {axis} takes {window} elements, and the {kept} of its context and {new} new ones come"
                    )
                }
                _ => difference(source, target),
            };
            return Err(self.disagree(parts, &why)?);
        }
        let (of_source, of_target) = (&names[self.from.graph], &names[self.to.graph]);
        let mut dims = Vec::new();
        for (at, (given, taken)) in given.iter().zip(&taken).enumerate() {
            dims.push(match (given, taken) {
                _ if at == axis && context.whole => Dim::Symbol(format!("{}.context_length", context.input)),
                _ if at == axis => Dim::Known(context.elements),
                (Dim::Known(length), _) | (_, Dim::Known(length)) => Dim::Known(*length),
                (Dim::Symbol(name), _) => Dim::Symbol(of_source.symbol(name)),
                (_, Dim::Symbol(name)) => Dim::Symbol(of_target.symbol(name)),
                (Dim::Open, Dim::Open) => Dim::Open,
            });
        }
        let is_open = |&at: &usize| at != axis && !dims[at].is_known() && !is_batch_axis(&taken, at);
        if let Some(at) = (0..dims.len()).find(is_open) {
            let why = format!("it would have several open dimensions: give axis {at} a length with dims");
            return Err(JoinError::Context { input: context.input.clone(), why });
        }
        let state = format!("{}.context", context.input);
        Ok(PlannedContext {
            input: self.to.tensor.clone(),
            pair: StatePair { output: format!("{state}_next"), input: state },
            elements: context.elements,
            axis,
            source: of_source.tensor(&self.from.tensor),
            elem: target.elem(),
            dims,
        })
    }
}

fn may_follow(given: &[Dim], taken: &[Dim], axis: usize, context: &Context) -> bool {
    let fits = |(at, (given, taken)): (usize, (&Dim, &Dim))| match (given, taken) {
        (Dim::Known(new), Dim::Known(window)) if at == axis => !context.whole && window - context.elements == *new,
        (Dim::Known(given), Dim::Known(taken)) => given == taken,
        _ => true,
    };
    given.len() == taken.len() && given.iter().zip(taken).enumerate().all(fits)
}

fn axis(context: &Context, taken: &[Dim]) -> Result<usize> {
    let refused = |why: String| Err(JoinError::Context { input: context.input.clone(), why });
    if let Some(axis) = context.axis {
        let is_there = axis < taken.len() && !is_batch_axis(taken, axis);
        let why = || format!("axis {axis} isn't there, or it is the batch: it is {}", bracketed(taken));
        return if is_there { Ok(axis) } else { refused(why()) };
    }
    let is_long = |&axis: &usize| match &taken[axis] {
        Dim::Known(length) => *length > context.elements,
        _ => !is_batch_axis(taken, axis),
    };
    let possible: Vec<usize> = (0..taken.len()).filter(is_long).collect();
    if let [axis] = possible.as_slice() {
        return Ok(*axis);
    }
    let Context { input, elements, .. } = context;
    refused(format!("write its axis, as in {input}={elements}@1: it is {}", bracketed(taken)))
}

pub fn difference(source: &ValueInfoProto, target: &ValueInfoProto) -> String {
    let (given, taken) = (source.dims().unwrap_or_default(), target.dims().unwrap_or_default());
    if source.elem() != target.elem() {
        return "the types differ".to_owned();
    }
    if given.len() != taken.len() {
        return format!("one has {}, and the other {}", dimensions(given.len()), dimensions(taken.len()));
    }
    let mut lengths = given.iter().zip(&taken).enumerate();
    match lengths.find(|(_, (given, taken))| !given.agrees(taken)) {
        Some((axis, (given, taken))) => format!("axis {axis} has {given} elements, and {taken} are expected"),
        None => "type and dims must agree".to_owned(),
    }
}

fn dimensions(count: usize) -> String {
    if count == 1 { "1 dimension".to_owned() } else { format!("{count} dimensions") }
}

impl PlannedContext {
    pub fn add(&self, graph: &mut GraphProto, joined: &str) {
        let StatePair { input, output } = &self.pair;
        let [start, end, axis] = ["start", "end", "axis"].map(|own| format!("{input}/{own}"));
        let values = [(&start, -self.elements), (&end, i64::MAX), (&axis, self.axis as i64)];
        graph.initializer.extend(values.map(|(name, value)| int64s(name, &[1], &[value])));
        // The context comes first, because its elements are older than those that the wire brings.
        let concat = NodeProto::make("Concat", &format!("{joined}/Concat"), &[input, &self.source], &[joined]);
        graph.node.push(concat.with_int("axis", self.axis as i64));
        let kept = [joined, &start, &end, &axis];
        graph.node.push(NodeProto::make("Slice", &format!("{output}/Slice"), &kept, &[output]));
        graph.input.push(ValueInfoProto::tensor(input, self.elem, &self.dims));
        // ONNX Runtime would take the two lengths for equal if they had one symbol.
        let mut dims = self.dims.clone();
        if let Dim::Symbol(length) = &mut dims[self.axis] {
            *length += "_next";
        }
        graph.output.push(ValueInfoProto::tensor(output, self.elem, &dims));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_read_or_refused() {
        let context = |input: &str, elements, axis, whole| Context { input: input.to_owned(), elements, axis, whole };
        let expected = vec![context("a.x", 13, Some(1), true), context("b.y", 4, None, false)];
        assert_eq!(contexts("a.x=13@1:whole, b.y=4:zeros"), Some(expected));
        for text in ["", "a.x", "a.x=0", "a.x=1@b", "a.x=1:repeat", "=1", "a.x=1+2"] {
            assert_eq!(contexts(text), None, "{text}");
        }
    }
}
