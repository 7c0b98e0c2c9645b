//! Which inputs and outputs are the two ends of a state: as options and descriptions write the pairs, as their names
//! show them, and as shapes suggest them. The names are those that exporters give; `docs/models.md` lists them.

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
pub(crate) fn groups(text: &str) -> Option<Vec<(&str, &str)>> {
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

/// Reads the pairs that a graph's description names. They are in lines that have both `InputState` and `OutputState`,
/// or both `PastValueInput` and `PastValueOutput`. The word that comes first says which name of each `<<<a, b>>>` in
/// the line comes first.
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
pub(crate) fn check_pairs(graph: &GraphProto, pairs: &[StatePair]) -> Result<(), String> {
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
pub(crate) fn crossed_ends(graph: &GraphProto, pairs: &[StatePair]) -> Option<String> {
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
pub(crate) fn like_states(graph: &GraphProto) -> Vec<String> {
    let has_output = |input: &&ValueInfoProto| graph.output.iter().any(|output| is_alike(input, output));
    // An input with a default need not be carried, so it is no state that a client would miss.
    let found: Vec<String> = required_inputs(graph).filter(has_output).map(|input| input.name().to_owned()).collect();
    if found.len() < required_inputs(graph).count() { found } else { Vec::new() }
}

/// Inputs and outputs of one type and shape, where only one of each has it.
pub(crate) fn alike(graph: &GraphProto) -> Vec<StatePair> {
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

pub(crate) fn describe<'a>(
    graph: &mut GraphProto,
    described: &[StatePair],
    pairs: impl Iterator<Item = &'a StatePair>,
) {
    let new: Vec<String> = pairs.filter(|pair| !described.contains(pair)).map(StatePair::to_string).collect();
    if new.is_empty() {
        return;
    }
    // The new pairs get a line of their own, because the order of the two words counts for all pairs of a line.
    let line = format!("InputState, OutputState: {}", new.join(" "));
    let own = graph.doc_string();
    graph.doc_string = Some(if own.is_empty() { line } else { format!("{own}\n{line}") });
}

const INPUT_WORDS: [&str; 8] = ["in", "inp", "input", "prev", "previous", "old", "last", "past"];
const OUTPUT_WORDS: [&str; 8] = ["out", "output", "new", "next", "cur", "current", "updated", "present"];
/// Words that mark a state's output as the first word only.
const FIRST_OUTPUT_WORDS: [&str; 1] = ["r"];

/// Ends of an input's and an output's name that mark them as the two ends of a state.
const ENDS: [(&str, &str); 6] = [("i", "o"), ("0", "n"), ("_0", "_n"), ("_0", "_1"), ("", "n"), ("", "_n")];

/// What clients send and get. Such tensors can be named like the two ends of a state and are none.
const NEVER_STATES: &str = "audio data decoder encoder enhanced feat feats feature features frame frames ids image len length \
    lengths lens logits mask mix model noisy pcm sample samples signal spec spectrogram spectrum speech \
    text token tokens wav wave waveform";
/// Words that say only whether a tensor is an input or an output. Tensors that clients send and get have them, too.
const SIDES: [&str; 5] = ["in", "inp", "input", "out", "output"];
/// Parts of names that only states have, as in `lstm_in`.
const STATES_PARTS: [&str; 14] =
    ["buf", "cache", "carry", "cell", "conv", "context", "gru", "hid", "hist", "lstm", "mem", "past", "rnn", "state"];

/// The strength of a reading by one name: the other one says nothing of a state.
pub const OF_ONE_NAME: u8 = 1;
const OF_BOTH_NAMES: u8 = 2;

/// Whether a name has only words of `NEVER_STATES` and `SIDES`, as `encoder.length` has.
pub fn is_never_state(name: &str) -> bool {
    without_sides(name).split('_').all(|word| !is_states(word))
}

/// How strongly the names of an input and an output say that they are a state; `None` if they don't.
pub fn strength_of_names(input: &str, output: &str) -> Option<u8> {
    // A number tells a tensor from others like it. Equal numbers do not make two tensors the ends of a state.
    if side_stem(input, output).is_some_and(|stem| stem.bytes().all(|c| c.is_ascii_digit() || c == b'_')) {
        return None;
    }
    let (input, output) = (normal(input), normal(output));
    let by_ends = ENDS.iter().filter_map(|&(end, other)| {
        let (stem, of_output) = (input.strip_suffix(end)?, output.strip_suffix(other)?);
        (stem == of_output && is_states(stem)).then_some(if end.is_empty() { OF_ONE_NAME } else { OF_BOTH_NAMES })
    });
    let inputs = || stems(&input, &INPUT_WORDS, &[]);
    let outputs = || stems(&output, &OUTPUT_WORDS, &FIRST_OUTPUT_WORDS);
    let same = |a: &str, b: &str| a == b && is_states(a);
    let by_words = [
        (OF_BOTH_NAMES, input == "past" && output == "present"),
        (OF_ONE_NAME, outputs().iter().any(|stem| same(&input, stem))),
        (OF_ONE_NAME, inputs().iter().any(|stem| same(stem, &output))),
        (OF_BOTH_NAMES, inputs().iter().any(|stem| outputs().iter().any(|other| same(stem, other)))),
    ];
    by_ends.chain(by_words.into_iter().filter_map(|(strength, holds)| holds.then_some(strength))).max()
}

/// What two names share, if they differ only in words of `SIDES`.
pub fn side_stem(input: &str, output: &str) -> Option<String> {
    let (of_input, of_output) = (without_sides(input), without_sides(output));
    (of_input == of_output).then_some(of_input)
}

/// Whether what two names share is a state's name, rather than the name of any tensor that a model changes.
pub fn says_state(stem: &str) -> bool {
    stem.len() <= 2 && stem != "x" || STATES_PARTS.iter().any(|part| stem.contains(part))
}

/// The pairs of a graph that its names show, in the order of its inputs. An error has pairs that exclude each other.
pub fn pairs_by_names(graph: &GraphProto) -> Result<Vec<StatePair>, Vec<StatePair>> {
    let mut readings: Vec<(&ValueInfoProto, &ValueInfoProto, u8)> = Vec::new();
    for input in required_inputs(graph) {
        for output in graph.output.iter().filter(|output| input.accepts(output)) {
            let strength = strength_of_names(input.name(), output.name());
            readings.extend(strength.map(|strength| (input, output, strength)));
        }
    }
    let is_best = |&&(input, output, strength): &&(&ValueInfoProto, &ValueInfoProto, u8)| {
        let shares_end = |other: &ValueInfoProto, another: &ValueInfoProto| other == input || another == output;
        readings.iter().all(|&(other, another, best)| !shares_end(other, another) || best <= strength)
    };
    let likely: Vec<_> = readings.iter().filter(is_best).collect();
    let pair = |input: &ValueInfoProto, output: &ValueInfoProto| StatePair::new(input.name(), output.name());
    let has_rival = |&&&(input, output, _): &&&(&ValueInfoProto, &ValueInfoProto, u8)| {
        likely.iter().any(|&&(other, another, _)| (other == input) != (another == output))
    };
    let rivals: Vec<StatePair> = likely.iter().filter(has_rival).map(|&&(a, b, _)| pair(a, b)).collect();
    if !rivals.is_empty() {
        return Err(rivals);
    }
    let mut pairs: Vec<StatePair> = likely.iter().map(|&&(a, b, _)| pair(a, b)).collect();
    let is_sure = |pair: &StatePair| side_stem(&pair.input, &pair.output).is_none_or(|stem| says_state(&stem));
    // Something must go in and come out beside the states.
    if pairs.len() == required_inputs(graph).count() || pairs.len() == graph.output.len() {
        pairs.retain(is_sure);
    }
    Ok(pairs)
}

fn without_sides(name: &str) -> String {
    let name = normal(name);
    name.split('_').filter(|part| !SIDES.contains(part)).collect::<Vec<_>>().join("_")
}

fn is_states(stem: &str) -> bool {
    // If a name has only words that say its side, its stem is empty.
    !stem.is_empty() && NEVER_STATES.split(' ').all(|word| word != stem)
}

/// The name without one of `words`, or without its first word if that is among `first_words`; one text for each word.
fn stems(name: &str, words: &[&str], first_words: &[&str]) -> Vec<String> {
    let parts: Vec<&str> = name.split('_').collect();
    let says = |index: &usize| words.contains(&parts[*index]) || (*index == 0 && first_words.contains(&parts[0]));
    (0..parts.len()).filter(says).map(|index| [&parts[..index], &parts[index + 1..]].concat().join("_")).collect()
}

fn normal(name: &str) -> String {
    let unify = |c: char| if ['.', '/', ':', '-', ' '].contains(&c) { '_' } else { c.to_ascii_lowercase() };
    let name: String = name.chars().map(unify).collect();
    // Hugging Face gives the input more words than the output, and sherpa's WeNet abbreviates one name in two ways.
    let name = name.replace("past_key_values", "past").replace("present_key_values", "present");
    name.split('_').map(|word| if word == "attn" { "att" } else { word }).collect::<Vec<_>>().join("_")
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
