//! Context of a wired input: the end of its previous value is prepended to what the wire brings now. That end is a state of
//! the joined graph.

use super::part::{JoinError, Read, Result};
use super::rename::Names;
use super::wires::{Link, difference, end, find};
use crate::batch::is_batch_axis;
use crate::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use crate::onnx::{Dim, bracketed, int64s};
use crate::pairs::StatePair;

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

pub fn of<'a>(contexts: &'a [Context], parts: &[Read], link: &Link) -> Option<&'a Context> {
    let name = parts[link.to.graph].full(&link.to.tensor);
    contexts.iter().find(|context| context.input == name)
}

pub fn check(contexts: &[Context], parts: &[Read]) -> Result<()> {
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

/// Plans the context of the input that a link leads to. Its names are those before the renaming of the graph that gives it.
pub fn planned(context: &Context, parts: &[Read], link: &Link, names: &[Names]) -> Result<PlannedContext> {
    let (source, target) = (link.source(parts)?, link.target(parts)?);
    let (given, taken) = (source.dims().unwrap_or_default(), target.dims().unwrap_or_default());
    let axis = axis(context, &taken)?;
    if !may_follow(&given, &taken, axis, context) || source.elem() != target.elem() {
        let why = match (given.get(axis), taken.get(axis)) {
            (Some(Dim::Known(new)), Some(Dim::Known(window)))
                if !context.whole && new + context.elements != *window =>
            {
                let kept = context.elements;
                format!("axis {axis} takes {window} elements, and the {kept} of its context and {new} new ones come")
            }
            _ => difference(source, target),
        };
        return Err(link.disagree(parts, &why)?);
    }
    let (of_source, of_target) = (&names[link.from.graph], &names[link.to.graph]);
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
        input: link.to.tensor.clone(),
        pair: StatePair { output: format!("{state}_next"), input: state },
        elements: context.elements,
        axis,
        source: of_source.tensor(&link.from.tensor),
        elem: target.elem(),
        dims,
    })
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
