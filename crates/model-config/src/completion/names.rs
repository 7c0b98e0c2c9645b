//! What the names, types and dims of tensors say of states: whether an input and an output can be the two ends of one,
//! and which tensors clients send and get. The names are those that exporters give; `docs/models.md` lists them.

use rows::tensor::{DataType, Dims, element_count};

use crate::config::{PairPattern, StatePair, parameter_line};
use crate::onnx::{Signature, TensorInfo};

/// Words of a name that mark a state's input.
const INPUT_WORDS: [&str; 8] = ["in", "inp", "input", "prev", "previous", "old", "last", "past"];
/// Words of a name that mark a state's output.
const OUTPUT_WORDS: [&str; 8] = ["out", "output", "new", "next", "cur", "current", "updated", "present"];
/// Words that mark a state's output as the first word only.
const FIRST_OUTPUT_WORDS: [&str; 1] = ["r"];

/// Ends of an input's and an output's name that mark them as the two ends of a state.
const ENDS: [(&str, &str); 6] = [("i", "o"), ("0", "n"), ("_0", "_n"), ("_0", "_1"), ("", "n"), ("", "_n")];

/// What clients send and get. Such tensors can be named like the two ends of a state and are none.
const NEVER_STATES: [&str; 37] = [
    "",
    "audio",
    "data",
    "decoder",
    "encoder",
    "enhanced",
    "feat",
    "feats",
    "feature",
    "features",
    "frame",
    "frames",
    "ids",
    "image",
    "len",
    "length",
    "lengths",
    "lens",
    "logits",
    "mask",
    "mix",
    "model",
    "noisy",
    "pcm",
    "sample",
    "samples",
    "signal",
    "spec",
    "spectrogram",
    "spectrum",
    "speech",
    "text",
    "token",
    "tokens",
    "wav",
    "wave",
    "waveform",
];
/// Words that say only whether a tensor is an input or an output. Tensors that clients send and get have them, too.
const SIDES: [&str; 5] = ["in", "inp", "input", "out", "output"];
/// Parts of names that only states have, as in `lstm_in`.
pub const STATES_PARTS: [&str; 14] =
    ["buf", "cache", "carry", "cell", "conv", "context", "gru", "hid", "hist", "lstm", "mem", "past", "rnn", "state"];

/// The strength of a reading by one name: the other one says nothing of a state.
pub const OF_ONE_NAME: u8 = 1;
/// The strength of a reading by both names.
const OF_BOTH_NAMES: u8 = 2;
/// The strength of a reading by a pattern that the user gave.
pub const OF_USER: u8 = 3;

/// Inputs that are not looked at, because they are something else than states.
#[derive(Clone, Copy, Default)]
pub struct Taken<'a> {
    /// Listed for requests by the configuration.
    pub by_requests: &'a [&'a str],
    /// Fed by something else.
    pub otherwise: &'a [&'a str],
}

impl Taken<'_> {
    pub fn contains(self, name: &str) -> bool {
        self.by_requests.contains(&name) || self.otherwise.contains(&name)
    }
}

/// Whether requests carry something other than these states, and more than a number such as a sample rate.
pub fn leaves_input(signature: &Signature, pairs: &[StatePair], taken: Taken) -> bool {
    let is_left = |info: &&TensorInfo| {
        !taken.otherwise.contains(&info.name.as_str()) && pairs.iter().all(|pair| pair.input != info.name)
    };
    signature.inputs.iter().filter(is_left).any(|info| !is_number(info))
}

/// Whether a tensor has no more than one element.
pub fn is_number(info: &TensorInfo) -> bool {
    element_count(&info.dims).is_some_and(|count| count <= 1)
}

/// Whether a name is among [`NEVER_STATES`], with or without a word of [`SIDES`].
pub fn is_never_state(name: &str) -> bool {
    !is_states(&without_sides(name))
}

/// The line of config.pbtxt that makes these the states.
pub fn state_pairs_line(pairs: &[StatePair]) -> String {
    parameter_line("state_pairs", &pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(" "))
}

pub fn described(infos: &[TensorInfo]) -> Vec<String> {
    infos.iter().map(|info| format!("{} {} {}", info.name, info.data_type, Dims(&info.dims))).collect()
}

/// Whether two tensors have the same type and the same dims.
pub fn is_alike(a: &TensorInfo, b: &TensorInfo) -> bool {
    a.data_type == b.data_type && a.dims == b.dims
}

/// Whether an output can be the input of the next request.
pub fn can_follow(input: &TensorInfo, output: &TensorInfo) -> bool {
    let agree = |(&a, &b): (&i64, &i64)| a == b || a < 0 || b < 0;
    let is_unknown = output.dims.is_empty() && output.data_type != DataType::Bytes;
    input.data_type == output.data_type
        && (is_unknown || (input.dims.len() == output.dims.len() && input.dims.iter().zip(&output.dims).all(agree)))
}

/// How strongly the names of an input and an output say that they are a state; `None` if they don't.
pub fn strength(patterns: &[PairPattern], input: &TensorInfo, output: &TensorInfo) -> Option<u8> {
    if patterns.iter().any(|pattern| pattern.matches(&input.name, &output.name)) {
        return Some(OF_USER);
    }
    // A number tells a tensor from others like it. Equal numbers do not make two tensors the ends of a state.
    if side_stem(&input.name, &output.name).is_some_and(|stem| stem.bytes().all(|c| c.is_ascii_digit() || c == b'_')) {
        return None;
    }
    let (input, output) = (normal(&input.name), normal(&output.name));
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

/// What two names share, if they differ only in words of [`SIDES`].
pub fn side_stem(input: &str, output: &str) -> Option<String> {
    let (of_input, of_output) = (without_sides(input), without_sides(output));
    (of_input == of_output).then_some(of_input)
}

fn without_sides(name: &str) -> String {
    let name = normal(name);
    name.split('_').filter(|part| !SIDES.contains(part)).collect::<Vec<_>>().join("_")
}

fn is_states(stem: &str) -> bool {
    !NEVER_STATES.contains(&stem)
}

/// The name without one of `words`, or without its first word if that is among `first_words`; one text for each word.
fn stems(name: &str, words: &[&str], first_words: &[&str]) -> Vec<String> {
    let parts: Vec<&str> = name.split('_').collect();
    let says = |index: &usize| words.contains(&parts[*index]) || (*index == 0 && first_words.contains(&parts[0]));
    (0..parts.len()).filter(says).map(|index| [&parts[..index], &parts[index + 1..]].concat().join("_")).collect()
}

/// A name in the form in which names are compared.
fn normal(name: &str) -> String {
    let unify = |c: char| if ['.', '/', ':', '-', ' '].contains(&c) { '_' } else { c.to_ascii_lowercase() };
    let name: String = name.chars().map(unify).collect();
    // Hugging Face gives the input more words than the output, and sherpa's WeNet abbreviates one name in two ways.
    let name = name.replace("past_key_values", "past").replace("present_key_values", "present");
    name.split('_').map(|word| if word == "attn" { "att" } else { word }).collect::<Vec<_>>().join("_")
}
