//! What the names of an input and an output say of states: whether they can be the two ends of one. The names are those that
//! exporters give; `docs/models.md` lists them.

use crate::graph::required_inputs;
use crate::onnx::schema::{GraphProto, ValueInfoProto};
use crate::pairs::StatePair;

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
