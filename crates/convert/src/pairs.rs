//! Pairs of an input and an output that are one state: as options and descriptions write them, and as shapes suggest them.

use std::fmt;

use serde::Serialize;

use crate::graph::{producers, required_inputs};
use crate::onnx;
use crate::onnx::schema::{GraphProto, ValueInfoProto};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StatePair {
    pub input: String,
    pub output: String,
}

impl StatePair {
    pub fn new(input: &str, output: &str) -> Self {
        Self { input: input.to_owned(), output: output.to_owned() }
    }
}

impl fmt::Display for StatePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<<<{}, {}>>>", self.input, self.output)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadPairs {
    pub text: String,
    /// A name that is in two pairs. Without it, the form is wrong.
    pub twice: Option<String>,
}

/// Reads `<<<input, output>>>`, several of them separated by spaces, commas or nothing.
pub fn state_pairs(text: &str) -> Result<Vec<StatePair>, BadPairs> {
    let bad = |twice: Option<&str>| BadPairs { text: text.to_owned(), twice: twice.map(str::to_owned) };
    let mut found: Vec<StatePair> = Vec::new();
    for (input, output) in groups(text).ok_or_else(|| bad(None))? {
        if found.iter().any(|known| known.input == input) {
            return Err(bad(Some(input)));
        }
        if found.iter().any(|known| known.output == output) {
            return Err(bad(Some(output)));
        }
        found.push(StatePair::new(input, output));
    }
    Ok(found)
}

/// The names of `<<<a, b>>> <<<c, d>>>`. `None` if the text has another form.
pub fn groups(text: &str) -> Option<Vec<(&str, &str)>> {
    let mut found = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (pair, behind) = rest.strip_prefix("<<<").and_then(|rest| rest.split_once(">>>"))?;
        let (first, second) = pair.split_once(',')?;
        let (first, second) = (first.trim(), second.trim());
        if first.is_empty() || second.is_empty() || second.contains(',') || pair.contains('<') {
            return None;
        }
        found.push((first, second));
        rest = behind.trim_start_matches([' ', ',', '\t', '\n']);
    }
    Some(found).filter(|found| !found.is_empty())
}

/// Reads the pairs that a graph's description names. They are in lines that have both `InputState` and `OutputState`, or
/// both `PastValueInput` and `PastValueOutput`. The word that comes first says which name of each `<<<a, b>>>` in the line
/// comes first.
pub fn described_state_pairs(description: &str) -> Result<Vec<StatePair>, BadPairs> {
    let mut described = Vec::new();
    for line in description.lines() {
        for (input, output) in [("InputState", "OutputState"), ("PastValueInput", "PastValueOutput")] {
            let (Some(input), Some(output)) = (line.find(input), line.find(output)) else { continue };
            let Some(groups) = line.find("<<<").and_then(|from| line.get(from..line.rfind(">>>")? + 3)) else {
                continue;
            };
            let swap = |pair: StatePair| if input < output { pair } else { StatePair::new(&pair.output, &pair.input) };
            described.extend(state_pairs(groups)?.into_iter().map(swap));
        }
    }
    Ok(described)
}

/// Refuses pairs of names that the model lacks, and of tensors whose types or dims differ.
pub fn check_pairs(graph: &GraphProto, pairs: &[StatePair]) -> Result<(), String> {
    let find = |values: &[ValueInfoProto], name: &str, kind: &str| {
        let found = values.iter().find(|value| value.name() == name).cloned();
        found.ok_or_else(|| format!("the model has no {kind} '{name}' (it has {})", onnx::names(values)))
    };
    for pair in pairs {
        let (input, output) = (find(&graph.input, &pair.input, "input")?, find(&graph.output, &pair.output, "output")?);
        if !input.accepts(&output) {
            let shape = |value: &ValueInfoProto| {
                format!("{} {}", onnx::type_name(value.elem()), onnx::bracketed(&value.dims().unwrap_or_default()))
            };
            return Err(format!(
                "'{}' ({}) and '{}' ({}) can't be the two ends of a state: type and dims must agree",
                pair.input,
                shape(&input),
                pair.output,
                shape(&output)
            ));
        }
    }
    crossed_ends(graph, pairs).map_or(Ok(()), Err)
}

/// Says why, if a pair joins the hidden state and the cell state of one layer.
pub fn crossed_ends(graph: &GraphProto, pairs: &[StatePair]) -> Option<String> {
    // These operators keep elements as they are. PyTorch keeps the states of all layers in one tensor: each layer takes
    // its part, and the ends are joined.
    const MOVE: [&str; 10] =
        ["Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"];
    let producers = producers(graph);
    let source = |name: &str| {
        let before = |name: &String| {
            let node = &graph.node[*producers.get(name.as_str())?];
            node.input_at(0).filter(|_| MOVE.contains(&node.op())).map(str::to_owned)
        };
        // A way through the graph has at most as many nodes as the graph: a malformed one may have a circle.
        std::iter::successors(Some(name.to_owned()), before).take(graph.node.len() + 1).last().unwrap_or_default()
    };
    for node in graph.node.iter().filter(|node| node.is_recurrent()) {
        let starts = [5, 6].map(|input| node.input_at(input).map(source));
        // One tensor may hold both states.
        if starts[0] == starts[1] {
            continue;
        }
        // Each start is looked for at the end of the other state.
        for (start, other_end) in starts.into_iter().zip([2, 1]) {
            let (Some(start), Some(end)) = (start, node.output_at(other_end)) else { continue };
            let crossed = pairs.iter().find(|pair| pair.input == start && source(&pair.output) == end);
            let Some(StatePair { input, output }) = crossed else { continue };
            return Some(format!(
                "'{input}' and '{output}' can't be the two ends of a state: in {}, one is the hidden state (initial_h, Y_h) and the \
                 other the cell state (initial_c, Y_c)",
                node.described()
            ));
        }
    }
    None
}

fn is_alike(a: &ValueInfoProto, b: &ValueInfoProto) -> bool {
    a.elem() == b.elem() && a.dims().is_some() && a.dims() == b.dims()
}

/// Inputs with the type and shape of an output; none if all have them, because requests must carry something.
pub fn like_states(graph: &GraphProto) -> Vec<String> {
    let has_output = |input: &&ValueInfoProto| graph.output.iter().any(|output| is_alike(input, output));
    // An input with a default need not be carried, so it is no state that a client would miss.
    let found: Vec<String> = required_inputs(graph).filter(has_output).map(|input| input.name().to_owned()).collect();
    if found.len() < required_inputs(graph).count() { found } else { Vec::new() }
}

/// Inputs and outputs of one type and shape, where only one of each has it.
pub fn alike(graph: &GraphProto) -> Vec<StatePair> {
    let only = |of: &ValueInfoProto, values: &[ValueInfoProto]| {
        let mut found = values.iter().filter(|value| is_alike(value, of)).map(|value| value.name().to_owned());
        found.next().filter(|_| found.next().is_none())
    };
    let pair = |input: &ValueInfoProto| {
        only(input, &graph.input)?;
        Some(StatePair::new(input.name(), &only(input, &graph.output)?))
    };
    let found: Vec<StatePair> = required_inputs(graph).filter_map(pair).collect();
    // Requests must carry something.
    if found.len() < required_inputs(graph).count() { found } else { Vec::new() }
}

pub fn describe<'a>(graph: &mut GraphProto, described: &[StatePair], pairs: impl Iterator<Item = &'a StatePair>) {
    let new: Vec<String> = pairs.filter(|pair| !described.contains(pair)).map(StatePair::to_string).collect();
    if new.is_empty() {
        return;
    }
    // The new pairs get a line of their own, because the order of the two words counts for all pairs of a line.
    let line = format!("InputState, OutputState: {}", new.join(" "));
    let own = graph.doc_string();
    graph.doc_string = Some(if own.is_empty() { line } else { format!("{own}\n{line}") });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(input: &str, output: &str) -> StatePair {
        StatePair { input: input.to_owned(), output: output.to_owned() }
    }

    #[test]
    fn pairs_are_read_as_the_backend_reads_them() {
        let two = Ok(vec![pair("a", "b"), pair("c d", "e/f:0")]);
        for text in ["<<<a, b>>> <<<c d, e/f:0>>>", "<<<a,b>>>,<<<c d,e/f:0>>>", "  <<< a ,b>>><<<c d,e/f:0 >>>\n"] {
            assert_eq!(state_pairs(text), two, "{text}");
        }
        let wrong =
            ["", "a, b", "<<<a>>>", "<<<a,b>>", "<<<a,b,c>>>", "<<<,b>>>", "<<<a,b>>> x", "x <<<a,b>>>", "<<<<a,b>>>"];
        for (text, twice) in wrong
            .map(|text| (text, None))
            .into_iter()
            .chain([("<<<a,b>>> <<<a,c>>>", Some("a")), ("<<<a,b>>> <<<c,b>>>", Some("b"))])
        {
            let bad = BadPairs { text: text.to_owned(), twice: twice.map(str::to_owned) };
            assert_eq!(state_pairs(text), Err(bad));
        }
    }

    #[test]
    fn a_description_names_pairs_in_the_order_it_states() {
        let description = "for speech\nInputState, OutputState pairs: <<<a, b>>> <<<c, d>>> (two)\n\
                           PastValueOutput/PastValueInput <<<e_out, e_in>>>\nOutputState only <<<x, y>>>";
        let expected = [pair("a", "b"), pair("c", "d"), pair("e_in", "e_out")];
        assert_eq!(described_state_pairs(description).unwrap(), expected);
        assert_eq!(described_state_pairs("").unwrap(), []);
        let bad = BadPairs { text: "<<<a>>>".to_owned(), twice: None };
        assert_eq!(described_state_pairs("InputState OutputState <<<a>>>"), Err(bad));
    }
}
