//! Which output of a graph each input of another takes.

use super::part::{JoinError, Read, Result};
use crate::graph::required_inputs;
use crate::onnx::schema::ValueInfoProto;
use crate::onnx::{bracketed, names, type_name};
use crate::pairs::{StatePair, groups};

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

/// The links of these wires and of equal names, and the states between graphs: wires back to an earlier graph. A wire to an
/// input of its own graph becomes a state of the graph.
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
}
