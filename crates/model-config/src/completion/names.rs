//! What the names, types and dims of tensors say of states: whether an input and an output can be the two ends of one,
//! and which tensors clients send and get. The names are those that exporters give; `docs/models.md` lists them.
//!
//! Where names say nothing, as in models from Keras, [`by_shape`] pairs inputs and outputs by their types and dims. Such pairs
//! are only proposed. They become states if the configuration confirms them with `state_pairs` `auto-by-shape`.

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

/// Pairs each input with the output of the same type and dims. None if no two are alike; an error if more than one assignment
/// fits, as it does if the data of requests is like a state.
pub fn by_shape(signature: &Signature, taken: Taken) -> Result<Vec<StatePair>, String> {
    let can_be_sent = |info: &&TensorInfo| !taken.otherwise.contains(&info.name.as_str()) && !is_number(info);
    let sent = signature.inputs.iter().find(can_be_sent);
    // What requests carry and responses give comes first, and may have the same dims.
    let answer = signature.outputs.first().filter(|output| sent.is_some_and(|sent| is_alike(sent, output)));
    let data = |info: &TensorInfo| [sent.filter(|_| answer.is_some()), answer].contains(&Some(info));
    let may_be = |info: &&TensorInfo| !data(info) && !is_never_state(&info.name);
    let inputs: Vec<_> = signature.inputs.iter().filter(may_be).filter(|info| !taken.contains(&info.name)).collect();
    let outputs: Vec<_> = signature.outputs.iter().filter(may_be).collect();
    let mut pairs = Vec::new();
    for input in &inputs {
        let [mut sources, mut targets] = [&inputs, &outputs].map(|infos| alike(infos, input));
        if targets.is_empty() {
            continue;
        }
        // Data that is like a state can be the state, and the state the data.
        let like_data = sent.zip(answer).filter(|(sent, _)| is_alike(sent, input));
        if let Some((sent, answer)) = like_data {
            sources.insert(0, sent);
            targets.insert(0, answer);
        }
        let ([_], [target]) = (sources.as_slice(), targets.as_slice()) else {
            return Err(format!(
                "more than one assignment fits: of {} {}, the model has the inputs {} and the outputs {}",
                input.data_type,
                Dims(&input.dims),
                names(&sources),
                names(&targets)
            ));
        };
        pairs.push(StatePair { input: input.name.clone(), output: target.name.clone() });
    }
    if pairs.is_empty() || leaves_input(signature, &pairs, taken) {
        return Ok(pairs);
    }
    let listed: Vec<String> = pairs.iter().map(StatePair::to_string).collect();
    Err(format!("all inputs would be states ({}), and nothing would be left for requests", listed.join(", ")))
}

fn alike<'a>(infos: &[&'a TensorInfo], to: &TensorInfo) -> Vec<&'a TensorInfo> {
    infos.iter().copied().filter(|info| is_alike(info, to)).collect()
}

fn names(infos: &[&TensorInfo]) -> String {
    infos.iter().map(|info| format!("'{}'", info.name)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spec<'a> = (&'a str, &'a [i64]);

    fn signature(inputs: &[Spec], outputs: &[Spec]) -> Signature {
        let info = |&(name, dims): &Spec| TensorInfo {
            name: name.to_owned(),
            data_type: DataType::Fp32,
            dims: dims.to_vec(),
            symbols: vec![String::new(); dims.len()],
        };
        let [inputs, outputs] = [inputs, outputs].map(|specs| specs.iter().map(info).collect());
        Signature { inputs, defaults: Vec::new(), outputs }
    }

    fn found(inputs: &[Spec], outputs: &[Spec]) -> Result<String, String> {
        let pairs = by_shape(&signature(inputs, outputs), Taken::default())?;
        Ok(pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(" "))
    }

    const STATE: &[i64] = &[1, 2, 128, 2];

    #[test]
    fn keras_names_are_paired_by_dims() {
        let cases: [(&[Spec], &[Spec], &str); 4] = [
            // The two graphs of DTLN.
            (
                &[("input_2", &[1, 1, 257]), ("input_3", STATE)],
                &[("activation_2", &[1, 1, 257]), ("tf_op_layer_stack_2", STATE)],
                "<<<input_3, tf_op_layer_stack_2>>>",
            ),
            (
                &[("input_4", &[1, 1, 512]), ("input_5", STATE)],
                &[("conv1d_3", &[1, 1, 512]), ("tf_op_layer_stack_5", STATE)],
                "<<<input_5, tf_op_layer_stack_5>>>",
            ),
            (
                &[("input_1", &[1, 80]), ("input_2", &[1, 8]), ("input_3", &[1, 9])],
                &[("dense", &[1, 3]), ("lstm", &[1, 9]), ("lstm_1", &[1, 8])],
                "<<<input_2, lstm_1>>> <<<input_3, lstm>>>",
            ),
            (&[("x", &[-1, 4]), ("z", &[-1, 5])], &[("y", &[-1, 7])], ""),
        ];
        for (inputs, outputs, expected) in cases {
            assert_eq!(found(inputs, outputs).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn what_fits_in_more_than_one_way_is_refused_with_the_names() {
        let two: [(&str, &[i64]); 3] = [("x", &[1, 80]), ("a", &[1, 8]), ("b", &[1, 8])];
        let error = found(&two, &[("y", &[1, 3]), ("c", &[1, 8])]).unwrap_err();
        assert!(["'a'", "'b'", "'c'", "[1, 8]"].iter().all(|word| error.contains(word)), "{error}");
        // The order of an LSTM's states need not be the same.
        let error = found(&two, &[("y", &[1, 3]), ("c", &[1, 8]), ("d", &[1, 8])]).unwrap_err();
        assert!(["'a', 'b'", "'c', 'd'"].iter().all(|word| error.contains(word)), "{error}");
        let of_data: [(&str, &[i64]); 2] = [("input_1", &[-1, 8]), ("input_2", &[-1, 8])];
        for outputs in [["dense", "lstm"], ["lstm", "dense"]] {
            let error = found(&of_data, &outputs.map(|name| (name, &[-1, 8][..]))).unwrap_err();
            assert!(["'input_1', 'input_2'", "'dense'", "'lstm'"].iter().all(|word| error.contains(word)), "{error}");
        }
        let error = found(&[("a", &[1, 8])], &[("y", &[1, 3]), ("c", &[1, 8])]).unwrap_err();
        assert!(error.contains("<<<a, c>>>") && error.contains("nothing would be left"), "{error}");
    }
}
