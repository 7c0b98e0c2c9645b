//! Finds which inputs and outputs are the two ends of a state, by their names, or says why they can't be told.
//!
//! Rules: a pair has equal types and agreeing dims; where two readings are possible, nothing is guessed. The names are
//! those that exporters give; `docs/models.md` lists them. Where names say nothing, as in models from Keras,
//! [`by_shape`] proposes pairs. These become states only if the configuration confirms them with `state_pairs`
//! `auto-by-shape`.

use rows::tensor::{DataType, Dims, element_count};
use stateful_convert::names::{is_never_state, says_state, side_stem, strength_of_names};

use super::error::{CompletionError, Result, joined, state_pairs_line};
use crate::config::{PairPattern, StatePair};
use crate::onnx::{Signature, TensorInfo, all_agree};

/// Inputs that are not looked at, because they are something else than states.
#[derive(Clone, Copy, Default)]
pub struct Taken<'a> {
    /// Listed for requests by the configuration.
    pub by_requests: &'a [&'a str],
    pub otherwise: &'a [&'a str],
}

impl Taken<'_> {
    pub fn contains(self, name: &str) -> bool {
        self.by_requests.contains(&name) || self.otherwise.contains(&name)
    }
}

/// The state pairs of a model, in the order of its inputs.
pub fn state_pairs(signature: &Signature, patterns: &[PairPattern], taken: Taken) -> Result<Vec<StatePair>> {
    // A state may start with an initializer.
    let all_inputs = signature.inputs.iter().chain(&signature.defaults);
    let free: Vec<&TensorInfo> = all_inputs.filter(|info| !taken.contains(&info.name)).collect();
    check_patterns(signature, patterns)?;
    let mut readings: Vec<Reading> = Vec::new();
    for &input in &free {
        for output in signature.outputs.iter().filter(|output| can_follow(input, output)) {
            readings.extend(strength(patterns, input, output).map(|strength| Reading { input, output, strength }));
        }
    }
    // A weaker reading may be a coincidence of names: it counts only where neither of its ends has a stronger one.
    let is_best = |reading: &&Reading| {
        let is_rival =
            |other: &&Reading| other.input.name == reading.input.name || other.output.name == reading.output.name;
        readings.iter().filter(is_rival).all(|other| other.strength <= reading.strength)
    };
    let likely: Vec<&Reading> = readings.iter().filter(is_best).collect();
    let has_rival = |reading: &&&Reading| {
        let is_rival =
            |other: &&Reading| (other.input.name == reading.input.name) != (other.output.name == reading.output.name);
        likely.iter().any(is_rival)
    };
    let ambiguous: Vec<StatePair> = likely.iter().filter(has_rival).map(|reading| reading.pair()).collect();
    if !ambiguous.is_empty() {
        return Err(CompletionError::Ambiguous { readings: joined(&ambiguous, ", ") });
    }
    let mut pairs: Vec<StatePair> = likely.iter().map(|reading| reading.pair()).collect();
    let unsure: Vec<StatePair> = likely.iter().filter(|reading| reading.is_unsure()).map(|r| r.pair()).collect();
    let leaves_input = leaves_input(signature, &pairs, taken);
    let leaves_output = signature.outputs.iter().any(|info| pairs.iter().all(|pair| pair.output != info.name));
    match unsure.as_slice() {
        // Requests must carry something, so this one is no state.
        [only] if !leaves_input => pairs.retain(|pair| pair != only),
        [_, ..] if !leaves_input || !leaves_output => {
            let line = state_pairs_line(&pairs);
            return Err(CompletionError::Unsure { pairs: joined(&unsure, ", "), line });
        }
        _ => {}
    }
    if pairs.is_empty() {
        return Err(no_pairs(signature, taken));
    }
    // If all of these were states, requests would carry nothing.
    let is_state = |info: &TensorInfo| pairs.iter().any(|pair| pair.input == info.name);
    if taken.by_requests.is_empty() && taken.otherwise.is_empty() && signature.inputs.iter().all(is_state) {
        return Err(CompletionError::NothingLeft { pairs: joined(&pairs, ", ") });
    }
    Ok(pairs)
}

/// The states that `state_pairs` `auto-by-shape` asks for: those that are found `by_name`, and the rest by shape.
pub fn confirmed(signature: &Signature, by_name: Result<Vec<StatePair>>, taken: Taken) -> Result<Vec<StatePair>> {
    let mut pairs = match by_name {
        Err(CompletionError::NoPairs { .. }) => Vec::new(),
        found => found?,
    };
    let rest = without(signature, &pairs);
    pairs.extend(by_shape(&rest, taken).map_err(|why| CompletionError::Shapes { why })?);
    if pairs.is_empty() {
        return Err(no_pairs(signature, taken));
    }
    // The pairs come from two searches, and states must be in the order of the model's inputs.
    pairs.sort_by_key(|pair| signature.inputs.iter().position(|info| info.name == pair.input));
    Ok(pairs)
}

/// The inputs and outputs that are in none of the pairs.
pub fn without(signature: &Signature, pairs: &[StatePair]) -> Signature {
    let mut rest = signature.clone();
    rest.inputs.retain(|info| pairs.iter().all(|pair| pair.input != info.name));
    rest.outputs.retain(|info| pairs.iter().all(|pair| pair.output != info.name));
    rest
}

fn no_pairs(signature: &Signature, taken: Taken) -> CompletionError {
    CompletionError::NoPairs {
        inputs: described(&signature.inputs),
        outputs: described(&signature.outputs),
        proposed: by_shape(signature, taken).unwrap_or_default(),
        recurrence: None,
    }
}

/// Refuses a pattern that fits no input and output: it is misspelt.
fn check_patterns(signature: &Signature, patterns: &[PairPattern]) -> Result<()> {
    let is_of_model = |pattern: &PairPattern| {
        let has_output =
            |input: &TensorInfo| signature.outputs.iter().any(|output| pattern.matches(&input.name, &output.name));
        signature.inputs.iter().any(has_output)
    };
    let Some(pattern) = patterns.iter().find(|pattern| !is_of_model(pattern)) else { return Ok(()) };
    let (inputs, outputs) = (described(&signature.inputs), described(&signature.outputs));
    Err(CompletionError::Pattern { pattern: pattern.0.to_string(), inputs, outputs })
}

/// An input and an output that may be the two ends of a state.
struct Reading<'a> {
    input: &'a TensorInfo,
    output: &'a TensorInfo,
    /// As [`strength`] gives it.
    strength: u8,
}

impl Reading<'_> {
    /// Whether the names say only which tensor is the input and which the output.
    fn is_unsure(&self) -> bool {
        self.strength < OF_USER && side_stem(&self.input.name, &self.output.name).is_some_and(|stem| !says_state(&stem))
    }

    fn pair(&self) -> StatePair {
        StatePair { input: self.input.name.clone(), output: self.output.name.clone() }
    }
}

/// The strength of a reading by a pattern that the user gave.
const OF_USER: u8 = 3;

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

fn described(infos: &[TensorInfo]) -> String {
    let infos = infos.iter().map(|info| format!("{} {} {}", info.name, info.data_type, Dims(&info.dims)));
    infos.collect::<Vec<_>>().join(", ")
}

pub fn is_alike(a: &TensorInfo, b: &TensorInfo) -> bool {
    a.data_type == b.data_type && a.dims == b.dims
}

/// Whether an output can be the input of the next request.
pub fn can_follow(input: &TensorInfo, output: &TensorInfo) -> bool {
    // ONNX Runtime shows an output of unknown rank as a scalar.
    let is_unknown = output.dims.is_empty() && output.data_type != DataType::Bytes;
    input.data_type == output.data_type && (is_unknown || all_agree(&input.dims, &output.dims))
}

/// How strongly the names of an input and an output say that they are a state; `None` if they don't.
pub fn strength(patterns: &[PairPattern], input: &TensorInfo, output: &TensorInfo) -> Option<u8> {
    if patterns.iter().any(|pattern| pattern.matches(&input.name, &output.name)) {
        return Some(OF_USER);
    }
    strength_of_names(&input.name, &output.name)
}

/// Pairs each input with the output of the same type and dims. None if no two are alike; an error if more than one
/// assignment fits, as it does if the data of requests is like a state.
fn by_shape(signature: &Signature, taken: Taken) -> Result<Vec<StatePair>, String> {
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
    Err(format!("all inputs would be states ({}), and nothing would be left for requests", joined(&pairs, ", ")))
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

    type Spec<'a> = (&'a str, DataType, &'a [i64]);

    fn info(&(name, data_type, dims): &Spec) -> TensorInfo {
        let symbols = vec![String::new(); dims.len()];
        TensorInfo { name: name.to_owned(), data_type, dims: dims.to_vec(), symbols }
    }

    fn signature(inputs: &[Spec], outputs: &[Spec]) -> Signature {
        let [inputs, outputs] = [inputs, outputs].map(|specs| specs.iter().map(info).collect());
        Signature { inputs, defaults: Vec::new(), outputs }
    }

    /// Names with one type; those with `!` have other dims.
    fn named(names: &[&'static str]) -> Vec<Spec<'static>> {
        let dims = |name: &str| -> &[i64] { if name.ends_with('!') { &[-1, 7, 7] } else { &[-1, 4] } };
        names.iter().map(|name| (name.trim_end_matches('!'), DataType::Fp32, dims(name))).collect()
    }

    fn pattern(input: &str, output: &str) -> PairPattern {
        PairPattern::new(StatePair { input: input.to_owned(), output: output.to_owned() }).unwrap()
    }

    fn paired(inputs: &[&'static str], outputs: &[&'static str]) -> Result<Vec<(String, String)>> {
        let pairs = state_pairs(&signature(&named(inputs), &named(outputs)), &[], Taken::default())?;
        Ok(pairs.into_iter().map(|pair| (pair.input, pair.output)).collect())
    }

    #[test]
    fn the_names_that_exporters_use_are_paired() {
        type Case = (&'static [&'static str], &'static [&'static str], &'static [(&'static str, &'static str)]);
        let cases: [Case; 24] = [
            (&["input!", "h", "c"], &["output!", "hn", "cn"], &[("h", "hn"), ("c", "cn")]),
            (&["input!", "state"], &["output!", "stateN"], &[("state", "stateN")]),
            (&["x!", "h0", "c0"], &["y!", "hn", "cn"], &[("h0", "hn"), ("c0", "cn")]),
            (&["x!", "h_0"], &["y!", "h_n"], &[("h_0", "h_n")]),
            (&["x!", "h_0", "c_0"], &["y!", "h_1", "c_1"], &[("h_0", "h_1"), ("c_0", "c_1")]),
            (
                &["audio_signal!", "length!", "cache_last_channel", "cache_last_time", "cache_last_channel_len"],
                &[
                    "logprobs!",
                    "encoded_lengths!",
                    "cache_last_channel_next",
                    "cache_last_time_next",
                    "cache_last_channel_next_len",
                ],
                &[
                    ("cache_last_channel", "cache_last_channel_next"),
                    ("cache_last_time", "cache_last_time_next"),
                    ("cache_last_channel_len", "cache_last_channel_next_len"),
                ],
            ),
            (
                &["x!", "cached_key_0", "cached_key_1", "cached_key_10", "processed_lens"],
                &["encoder_out!", "new_cached_key_0", "new_cached_key_10", "new_cached_key_1", "new_processed_lens"],
                &[
                    ("cached_key_0", "new_cached_key_0"),
                    ("cached_key_1", "new_cached_key_1"),
                    ("cached_key_10", "new_cached_key_10"),
                    ("processed_lens", "new_processed_lens"),
                ],
            ),
            (
                &["chunk!", "att_cache", "cnn_cache"],
                &["output!", "r_att_cache", "r_cnn_cache"],
                &[("att_cache", "r_att_cache"), ("cnn_cache", "r_cnn_cache")],
            ),
            (
                &["x!", "attn_cache", "conv_cache"],
                &["log_probs!", "next_att_cache", "next_conv_cache"],
                &[("attn_cache", "next_att_cache"), ("conv_cache", "next_conv_cache")],
            ),
            (&["src!", "r1i", "r2i"], &["fgr!", "pha!", "r1o", "r2o"], &[("r1i", "r1o"), ("r2i", "r2o")]),
            (
                &["input_ids!", "past_key_values.0.key", "past_key_values.0.value", "past_key_values.1.key"],
                &["logits!", "present.0.key", "present.0.value", "present.1.key"],
                &[
                    ("past_key_values.0.key", "present.0.key"),
                    ("past_key_values.0.value", "present.0.value"),
                    ("past_key_values.1.key", "present.1.key"),
                ],
            ),
            (&["ids!", "past_0"], &["logits!", "present_0"], &[("past_0", "present_0")]),
            (&["ids!", "past"], &["logits!", "present"], &[("past", "present")]),
            (&["input!", "inp_state_0"], &["output!", "out_state_0"], &[("inp_state_0", "out_state_0")]),
            (&["x!", "state_in"], &["y!", "state_out"], &[("state_in", "state_out")]),
            (&["x!", "in_state"], &["y!", "out_state"], &[("in_state", "out_state")]),
            (&["x!", "state"], &["y!", "state_next"], &[("state", "state_next")]),
            (&["x!", "state"], &["y!", "next_state"], &[("state", "next_state")]),
            (&["x!", "state"], &["y!", "updated_state"], &[("state", "updated_state")]),
            (&["x!", "prev_state"], &["y!", "state"], &[("prev_state", "state")]),
            (&["x!", "prev.state"], &["y!", "new/state"], &[("prev.state", "new/state")]),
            (&["mix!", "conv_cache"], &["enh!", "conv_cache_out"], &[("conv_cache", "conv_cache_out")]),
            // As they sort, they would be crossed.
            (&["x!", "a_in", "z"], &["y!", "new_z", "out_a"], &[("a_in", "out_a"), ("z", "new_z")]),
            // What clients send is no state.
            (&["audio_in", "state_in"], &["audio_out", "state_out"], &[("state_in", "state_out")]),
        ];
        for (inputs, outputs, expected) in cases {
            let expected: Vec<_> = expected.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
            assert_eq!(paired(inputs, outputs).unwrap_or_else(|error| panic!("{inputs:?}: {error}")), expected);
        }
    }

    #[test]
    fn both_ends_named_as_such_come_before_one() {
        let pairs = paired(&["mem", "mem_in", "x!"], &["mem_out", "y!"]).unwrap();
        assert_eq!(pairs, [("mem_in".to_owned(), "mem_out".to_owned())]);
    }

    #[test]
    fn two_readings_are_refused_with_both() {
        for (inputs, outputs, words) in [
            (&["x!", "h"][..], &["y!", "hn", "new_h"][..], ["<<<h, hn>>>", "<<<h, new_h>>>"]),
            (&["x!", "prev_h", "old_h"], &["y!", "new_h"], ["<<<prev_h, new_h>>>", "<<<old_h, new_h>>>"]),
        ] {
            let error = paired(inputs, outputs).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)) && error.contains("state_pairs"), "{error}");
        }
    }

    #[test]
    fn names_that_say_nothing_are_refused_with_the_signature() {
        for (inputs, outputs) in
            [(&["input_1!", "input_2"][..], &["lstm_4", "dense!"][..]), (&["input"], &["output"]), (&["x!"], &["y!"])]
        {
            let error = paired(inputs, outputs).unwrap_err().to_string();
            for word in inputs.iter().chain(outputs).map(|name| name.trim_end_matches('!')).chain(["state_pairs"]) {
                assert!(error.contains(word), "{word}: {error}");
            }
        }
    }

    #[test]
    fn types_and_dims_must_agree() {
        let model = |s_out: Spec<'static>| {
            let x = ("x", DataType::Fp32, &[-1, 7][..]);
            signature(&[x, ("s", DataType::Fp32, &[2, -1, 4])], &[("y", DataType::Fp32, &[-1, 7]), s_out])
        };
        assert!(state_pairs(&model(("new_s", DataType::Fp16, &[2, -1, 4])), &[], Taken::default()).is_err());
        assert!(state_pairs(&model(("new_s", DataType::Fp32, &[3, -1, 4])), &[], Taken::default()).is_err());
        assert!(state_pairs(&model(("new_s", DataType::Fp32, &[2, -1])), &[], Taken::default()).is_err());
        for open in [&[-1, -1, -1][..], &[]] {
            assert_eq!(state_pairs(&model(("new_s", DataType::Fp32, open)), &[], Taken::default()).unwrap().len(), 1);
        }
    }

    #[test]
    fn patterns_come_first_and_inputs_that_are_fed_otherwise_never() {
        let model =
            signature(&named(&["x!", "mem_a", "mem_b", "h"]), &named(&["y!", "upd_a", "upd_b", "mem_a_out", "hn"]));
        let patterns = [pattern("mem_*", "upd_*")];
        let pairs = state_pairs(&model, &patterns, Taken { otherwise: &["h"], ..Taken::default() }).unwrap();
        let names: Vec<_> = pairs.iter().map(|pair| (pair.input.as_str(), pair.output.as_str())).collect();
        assert_eq!(names, [("mem_a", "upd_a"), ("mem_b", "upd_b")]);
    }

    #[test]
    fn a_model_of_which_nothing_would_be_left_to_send_is_refused() {
        let error = paired(&["cell"], &["cell_out", "y!"]).unwrap_err().to_string();
        assert!(error.contains("<<<cell, cell_out>>>") && error.contains("state_pairs"), "{error}");
    }

    type Model<'a> = (&'a [Spec<'a>], &'a [Spec<'a>]);

    const SPEC: (&str, DataType, &[i64]) = ("band_in", DataType::Fp32, &[-1, 257]);
    const SPEC_OUT: (&str, DataType, &[i64]) = ("band_out", DataType::Fp32, &[-1, 257]);
    const STATE: (&str, DataType, &[i64]) = ("state_in", DataType::Fp32, &[-1, 64]);
    const STATE_OUT: (&str, DataType, &[i64]) = ("state_out", DataType::Fp32, &[-1, 64]);
    const RATE: (&str, DataType, &[i64]) = ("sr", DataType::Int64, &[]);
    const VAD: (&str, DataType, &[i64]) = ("vad", DataType::Fp32, &[-1, 1]);

    #[test]
    fn a_signal_that_is_named_like_a_state_and_is_all_that_requests_can_carry_is_no_state() {
        let model = signature(&[SPEC, STATE, RATE], &[SPEC_OUT, STATE_OUT, VAD]);
        let window = ("window", DataType::Fp32, &[512][..]);
        let of_window = signature(&[SPEC, STATE, window], &[SPEC_OUT, STATE_OUT]);
        for (model, constants) in [(&model, &[][..]), (&model, &["sr"]), (&of_window, &["window"])] {
            let taken = Taken { otherwise: constants, ..Taken::default() };
            let pairs = state_pairs(model, &[], taken).unwrap();
            assert_eq!(pairs, [StatePair { input: "state_in".to_owned(), output: "state_out".to_owned() }]);
        }
    }

    #[test]
    fn a_signal_that_is_named_like_a_state_is_asked_for_where_it_may_be_one() {
        let ids = ("ids", DataType::Int64, &[-1, -1][..]);
        let (tone, tone_out) = (("tone_in", DataType::Fp32, &[-1, 9][..]), ("tone_out", DataType::Fp32, &[-1, 9][..]));
        let models: [(Model, &[&str]); 2] = [
            ((&[SPEC, STATE, ids], &[SPEC_OUT, STATE_OUT]), &["<<<band_in, band_out>>>"]),
            (
                (&[SPEC, tone, STATE], &[SPEC_OUT, tone_out, STATE_OUT]),
                &["<<<band_in, band_out>>>", "<<<tone_in, tone_out>>>"],
            ),
        ];
        for ((inputs, outputs), words) in models {
            let error = state_pairs(&signature(inputs, outputs), &[], Taken::default()).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)) && error.contains("state_pairs"), "{error}");
            let asked = error.split(" may be states").next().unwrap_or_default();
            assert!(!asked.contains("state_in"), "that one is clear: {error}");
        }
    }

    #[test]
    fn a_pattern_that_no_names_have_is_refused() {
        let model = signature(&named(&["x!", "mem_a", "h"]), &named(&["y!", "upd_a", "hn"]));
        let misspelt = pattern("mem_a", "updated_a");
        let error = state_pairs(&model, &[misspelt], Taken::default()).unwrap_err().to_string();
        assert!(error.contains("<<<mem_a, updated_a>>>") && error.contains("upd_a"), "{error}");
        let pattern = pattern("mem_a", "upd_a");
        assert_eq!(state_pairs(&model, &[pattern], Taken::default()).unwrap().len(), 2);
    }

    #[test]
    fn a_signal_that_the_configuration_lists_leaves_the_rest_clear() {
        let model = signature(&[SPEC, STATE, RATE], &[SPEC_OUT, STATE_OUT, VAD]);
        let pairs = state_pairs(&model, &[], Taken { by_requests: &["band_in"], otherwise: &["sr"] }).unwrap();
        assert_eq!(pairs, [StatePair { input: "state_in".to_owned(), output: "state_out".to_owned() }]);
        let patterns = [pattern("band_*", "band_*"), pattern("state_*", "state_*")];
        assert!(state_pairs(&model, &patterns, Taken::default()).is_err(), "the parts for * differ");
        let patterns = [pattern("*_in", "*_out")];
        assert_eq!(state_pairs(&model, &patterns, Taken::default()).unwrap().len(), 2, "the user says so");
    }

    #[test]
    fn lengths_and_ids_go_in_and_out_without_being_states() {
        let lengths = |name| (name, DataType::Int64, &[-1][..]);
        let ids = |name| (name, DataType::Int64, &[-1, -1][..]);
        let (x, h, hn) = (
            ("x", DataType::Fp32, &[-1, 80][..]),
            ("h", DataType::Fp32, &[-1, 5][..]),
            ("hn", DataType::Fp32, &[-1, 5][..]),
        );
        for (sent, got) in [
            (lengths("input_lengths"), lengths("output_lengths")),
            (lengths("length_in"), lengths("length_out")),
            (ids("input_ids"), ids("output_ids")),
            (ids("decoder_input"), ids("decoder_output")),
        ] {
            let pairs = state_pairs(&signature(&[x, sent, h], &[got, hn]), &[], Taken::default()).unwrap();
            assert_eq!(pairs.iter().map(|pair| pair.input.as_str()).collect::<Vec<_>>(), ["h"], "{}", sent.0);
        }
    }

    #[test]
    fn numbers_alone_pair_nothing() {
        let error = paired(&["input_1!", "input_2", "input_3"], &["output_1!", "output_2"]).unwrap_err().to_string();
        assert!(error.contains("no input and output") && error.contains("state_pair_patterns"), "{error}");
    }

    #[test]
    fn names_of_states_are_clear_whatever_is_left() {
        for (input, output) in [("cell", "cell_out"), ("h_in", "h_out"), ("tra_cache", "tra_cache_out"), ("r1i", "r1o")]
        {
            let model = signature(
                &[(input, DataType::Fp32, &[1, 4]), ("token", DataType::Int64, &[1, 1])],
                &[(output, DataType::Fp32, &[1, 4]), ("y!", DataType::Fp32, &[1, 9])],
            );
            assert_eq!(state_pairs(&model, &[], Taken::default()).unwrap().len(), 1, "{input}");
        }
    }

    #[test]
    fn pairs_that_names_tell_come_first() {
        let model = signature(
            &[("x", DataType::Fp32, &[1, 4]), ("gist", DataType::Fp32, &[1, 8]), ("memory", DataType::Fp32, &[1, 8])],
            &[
                ("y", DataType::Fp32, &[1, 4]),
                ("remembered", DataType::Fp32, &[1, 8]),
                ("gist_new", DataType::Fp32, &[1, 8]),
            ],
        );
        let gist = StatePair { input: "gist".to_owned(), output: "gist_new".to_owned() };
        let pairs = confirmed(&model, Ok(vec![gist]), Taken::default()).unwrap();
        let listed: Vec<String> = pairs.iter().map(StatePair::to_string).collect();
        assert_eq!(listed, ["<<<gist, gist_new>>>", "<<<memory, remembered>>>"]);
    }

    type Shape<'a> = (&'a str, &'a [i64]);

    fn found(inputs: &[Shape], outputs: &[Shape]) -> Result<String, String> {
        let [inputs, outputs] =
            [inputs, outputs].map(|of| of.iter().map(|&(name, dims)| (name, DataType::Fp32, dims)).collect::<Vec<_>>());
        let pairs = by_shape(&signature(&inputs, &outputs), Taken::default())?;
        Ok(pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(" "))
    }

    const LSTM: &[i64] = &[1, 2, 128, 2];

    #[test]
    fn keras_names_are_paired_by_dims() {
        let cases: [(&[Shape], &[Shape], &str); 4] = [
            // The two graphs of DTLN.
            (
                &[("input_2", &[1, 1, 257]), ("input_3", LSTM)],
                &[("activation_2", &[1, 1, 257]), ("tf_op_layer_stack_2", LSTM)],
                "<<<input_3, tf_op_layer_stack_2>>>",
            ),
            (
                &[("input_4", &[1, 1, 512]), ("input_5", LSTM)],
                &[("conv1d_3", &[1, 1, 512]), ("tf_op_layer_stack_5", LSTM)],
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
