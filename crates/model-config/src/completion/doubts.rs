//! Warnings and notes about configurations that are probably not what their user wants. Each is served as it is
//! written.
//!
//! - Mistakes: a misspelt control input, one whose name contradicts its kind or its values, and two initial values for
//!   one state.
//! - Inputs of requests that may be states: an output has their type and dims. Some of a model's states may have names
//!   that say so, and others not. Then the model loads, but clients are asked for inputs that they do not have. What is
//!   found here is not made a state. The warning has the line to write if it is one.
//! - Inputs of requests that the backend can make instead, because their names and the names of their dims say exactly
//!   what they are.

use rows::tensor::Dims;
use stateful_convert::names::{OF_ONE_NAME, is_never_state};

use super::error::state_pairs_line;
use super::pairing::{Taken, can_follow, is_alike, is_number, leaves_input, state_pairs, strength, without};
use crate::config::{
    Control, ControlKind, Flag, GENERATED_INPUTS, PartialConfig, StatePair, TensorConfig, parameter_line, similarity,
};
use crate::onnx::{Signature, TensorInfo};

const OF_START: &[&str] = &["start", "starts", "begin", "begins", "first", "init", "initial", "reset", "new", "bos"];
const OF_END: &[&str] = &["end", "ends", "last", "final", "finish", "stop", "eos"];
/// Words of inputs that are 0 where a sequence begins or ends, and 1 elsewhere.
const OF_OTHERS: &[&str] = &["not", "no", "non", "keep", "carry", "continue", "cont", "mask", "inverted", "inv"];

pub fn mistakes(config: &PartialConfig, signature: &Signature, pairs: &[StatePair]) -> Vec<String> {
    let names = signature.input_names();
    let is_input = |control: &&Control| names.contains(&control.name.as_str());
    let doubtful = config.controls.iter().filter(is_input).filter_map(contradiction);
    let taken = config.taken();
    let is_fed = |name: &str| {
        taken.contains(&name)
            || config.inputs.iter().any(|input| input.name == name)
            || pairs.iter().any(|pair| pair.input == name)
    };
    // If a name is misspelt, nothing feeds the intended input.
    let alike = |name: &str| names.iter().find(|input| !is_fed(input) && similarity(input, name).is_some());
    let misspelt = config.controls.iter().filter(|control| !is_input(control)).filter_map(|control| {
        let (name, input) = (&control.name, alike(&control.name)?);
        Some(format!("control_input '{name}' is ignored, because the model has no such input{}", if_meant(input)))
    });
    let states = &config.states;
    let absent = states.declared.iter().filter(|state| !names.contains(&state.pair.input.as_str())).map(|state| {
        let name = &state.pair.input;
        let meant = alike(name).map_or(String::new(), |input| if_meant(input));
        format!("'sequence_batching.state' '{name}' is ignored, because the model has no such input{meant}")
    });
    let has_initial = |name: &str| states.declared.iter().any(|of| of.pair.input == name && of.initial.is_some());
    let twice = states.initial.iter().find(|(name, _)| has_initial(name)).map(|(name, _)| {
        format!(
            "state '{name}' has an initial_state in 'sequence_batching.state', which counts, and a value in parameter \
             'initial_states': remove the one that is wrong"
        )
    });
    doubtful.chain(misspelt).chain(absent).chain(twice).collect()
}

fn if_meant(input: &str) -> String {
    format!("; if '{input}' is meant, correct the name")
}

/// Warns if a control's name contradicts its kind or its values.
fn contradiction(control: &Control) -> Option<String> {
    let ControlKind::Flag(flag, values) = control.kind else { return None };
    let of_kind = match flag {
        Flag::Start => Some(("first", OF_START, OF_END, "CONTROL_SEQUENCE_END")),
        Flag::End => Some(("last", OF_END, OF_START, "CONTROL_SEQUENCE_START")),
        Flag::Ready => None,
    };
    let words = words(&control.name);
    let has = |of: &[&str]| words.iter().any(|word| of.contains(&word.as_str()));
    let name = &control.name;
    if let Some((kind, own, other, meant)) = of_kind
        && has(other)
        && !has(own)
    {
        return Some(format!(
            "control_input '{name}' is true in the {kind} request of a sequence, and by its name {meant} may be meant: \
             correct its kind if it is"
        ));
    }
    // Some models take the inverse, such as a mask that keeps the state, and their names say so.
    if values.yes != 0.0 || values.no == 0.0 || has(OF_OTHERS) {
        return None;
    }
    let (is_true, is_false) = match of_kind {
        Some((kind, ..)) => (format!("the {kind} request of a sequence"), "in the others"),
        None => ("rows with a request".to_owned(), "for padding"),
    };
    Some(format!(
        "control_input '{name}' is 0 for {is_true} and {} {is_false}: the first of the two values is the one for false, so \
         swap them if that is wrong",
        values.no
    ))
}

/// The words of a name, in small letters: `seqStart_1` has `seq` and `start`.
fn words(name: &str) -> Vec<String> {
    let mut spaced = String::new();
    let mut was_lower = false;
    for letter in name.chars() {
        if was_lower && letter.is_uppercase() {
            spaced.push(' ');
        }
        was_lower = letter.is_lowercase();
        spaced.extend(letter.to_lowercase());
    }
    spaced.split(|letter: char| !letter.is_alphabetic()).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The warning about inputs and outputs that are not in `pairs`, the states of the model; `None` if there is nothing to
/// warn of.
pub fn may_be_state(signature: &Signature, pairs: &[StatePair], taken: Taken) -> Option<String> {
    // If only some states have names that say so, the model loads without the others.
    let rest = without(signature, pairs);
    let mut found = state_pairs(&rest, &[], taken).unwrap_or_default();
    if !leaves_input(&rest, &found, taken) {
        found.clear();
    }
    found.extend(alike(&without(&rest, &found), signature, &[pairs, &found].concat(), taken));
    if found.is_empty() {
        return None;
    }
    let described = |pair: &StatePair| {
        let info = signature.input(&pair.input);
        let of = info.map_or(String::new(), |info| format!(" ({} {})", info.data_type, Dims(&info.dims)));
        format!("{pair}{of}")
    };
    let listed: Vec<String> = found.iter().map(described).collect();
    Some(format!(
        "these may be states that were not found, as the type and dims of input and output agree: {}; requests have to \
         carry their inputs; if they are states, write {}; if not, list what requests carry under 'input'",
        listed.join("; "),
        state_pairs_line(&[pairs, &found].concat())
    ))
}

/// Warns of pairs that are written although another output has a name that fits the input better.
pub fn crossed(signature: &Signature, pairs: &[StatePair]) -> Option<String> {
    let better = |pair: &StatePair| {
        let input = signature.input(&pair.input)?;
        let of = |output: &TensorInfo| strength(&[], input, output);
        let written = signature.output(&pair.output)?;
        // An output of other dims can't be meant, whatever its name.
        let others = signature.outputs.iter().filter(|output| can_follow(input, output));
        let best = others.max_by_key(|output| of(output)).filter(|output| of(output) > of(written))?;
        Some(StatePair { input: pair.input.clone(), output: best.name.clone() })
    };
    let found: Vec<(String, String)> =
        pairs.iter().filter_map(|pair| Some((pair.to_string(), better(pair)?.to_string()))).collect();
    if found.is_empty() {
        return None;
    }
    let (written, by_names): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    Some(format!(
        "by the names of the model, 'state_pairs' should have {} instead of {}: correct it if the names are right",
        by_names.join(" "),
        written.join(" ")
    ))
}

/// Notes outputs that could be the next value of a state, where only one name of its pair says that it is one.
pub fn other_values(signature: &Signature, pairs: &[StatePair]) -> Option<String> {
    let other = |pair: &StatePair| {
        let input = signature.input(&pair.input)?;
        let output = signature.output(&pair.output)?;
        let is_weak = strength(&[], input, output) == Some(OF_ONE_NAME);
        let fits = |info: &&TensorInfo| is_alike(info, input) && pairs.iter().all(|of| of.output != info.name);
        let left = signature.outputs.iter().find(fits).filter(|_| is_weak)?;
        Some(format!("{pair} or <<<{}, {}>>>", pair.input, left.name))
    };
    let found: Vec<String> = pairs.iter().filter_map(other).collect();
    (!found.is_empty()).then(|| {
        format!(
            "more than one output has the type and dims of a state: {}; the first pair of each is used; if it is \
             wrong, write the pairs in 'state_pairs'",
            found.join("; ")
        )
    })
}

/// Pairs of `rest` with equal types and dims, in the order of the inputs.
fn alike(rest: &Signature, signature: &Signature, known: &[StatePair], taken: Taken) -> Vec<StatePair> {
    let mut outputs: Vec<&TensorInfo> = rest.outputs.iter().filter(|info| !is_never_state(&info.name)).collect();
    let mut found: Vec<StatePair> = Vec::new();
    // Starts with the last one, because models have their states after the inputs of requests and the outputs of
    // responses.
    for input in rest.inputs.iter().rev().filter(|info| !is_never_state(&info.name) && !taken.contains(&info.name)) {
        if let Some(index) = outputs.iter().rposition(|output| is_alike(output, input)) {
            found.insert(0, StatePair { input: input.name.clone(), output: outputs.remove(index).name.clone() });
        }
    }
    // Requests must carry something, and models have that first.
    if !leaves_input(signature, &[known, &found].concat(), taken) {
        let of = |pair: &StatePair| signature.input(&pair.input);
        if let Some(first) = found.iter().position(|pair| of(pair).is_some_and(|info| !is_number(info))) {
            found.remove(first);
        }
    }
    found
}

const POSITION_IDS: &str = "position_ids";
const ATTENTION_MASK: &str = "attention_mask";

/// Says which of the inputs of `requests` these are, with the line to write; `None` if there are none.
pub fn could_be_generated(signature: &Signature, requests: &[TensorConfig], pairs: &[StatePair]) -> Option<String> {
    let requested = || signature.inputs.iter().filter(|info| requests.iter().any(|tensor| tensor.name == info.name));
    let last_symbol = |name: &str| requested().find(|info| info.name == name)?.symbols.last();
    // The first input that has a dimension of this name.
    let data_with = |symbol: &str| {
        let is_data = |info: &&TensorInfo| ![POSITION_IDS, ATTENTION_MASK].contains(&info.name.as_str());
        requested().filter(is_data).find(|info| has_symbol(info, symbol))
    };
    let position_ids = || {
        let symbol = last_symbol(POSITION_IDS).filter(|symbol| !symbol.is_empty())?;
        Some(format!("{POSITION_IDS}=positions({})", data_with(symbol)?.name))
    };
    let attention_mask = || {
        let symbol = last_symbol(ATTENTION_MASK)?;
        // Optimum names the sum, and onnxruntime-genai's builder the total.
        let (past, new) = if let Some((past, new)) = symbol.split_once(" + ") {
            (past.to_owned(), new)
        } else {
            let new = symbol.strip_prefix("total_")?;
            (format!("past_{new}"), new)
        };
        let is_state = |info: &&TensorInfo| pairs.iter().any(|pair| pair.input == info.name);
        let state = signature.inputs.iter().filter(is_state).find(|info| has_symbol(info, &past))?;
        Some(format!("{ATTENTION_MASK}=mask({}, {})", state.name, data_with(new)?.name))
    };
    let entries: Vec<String> = position_ids().into_iter().chain(attention_mask()).collect();
    let line = parameter_line(GENERATED_INPUTS, &entries.join(" "));
    (!entries.is_empty()).then(|| {
        format!(
            "the backend can make inputs of requests itself, so that clients need not send them: write {line} and take \
             them out of 'input' if they are listed there"
        )
    })
}

fn has_symbol(info: &TensorInfo, symbol: &str) -> bool {
    info.symbols.iter().any(|other| other == symbol)
}

#[cfg(test)]
mod tests {
    use rows::tensor::DataType;

    use super::*;
    use crate::config::FalseTrue;

    #[test]
    fn a_name_is_taken_apart_into_words() {
        assert_eq!(words("seqStart_1"), ["seq", "start"]);
        assert_eq!(words("START"), ["start"]);
    }

    #[test]
    fn names_that_say_nothing_or_the_same_raise_no_doubt() {
        let (usual, inverted) = (FalseTrue { no: 0.0, yes: 1.0 }, FalseTrue { no: 1.0, yes: 0.0 });
        let doubt = |name: &str, kind| contradiction(&Control { name: name.to_owned(), kind });
        for name in ["START", "c", "is_first", "start_end"] {
            assert_eq!(doubt(name, ControlKind::Flag(Flag::Start, usual)), None);
        }
        for name in ["not_start", "keepState", "keep1", "mask"] {
            assert_eq!(doubt(name, ControlKind::Flag(Flag::Start, inverted)), None);
        }
        for (name, kind, said) in [
            ("END", ControlKind::Flag(Flag::Start, usual), "'END' is true in the first request of a sequence"),
            ("reset", ControlKind::Flag(Flag::End, usual), "CONTROL_SEQUENCE_START may be meant"),
            (
                "START",
                ControlKind::Flag(Flag::Start, inverted),
                "is 0 for the first request of a sequence and 1 in the others",
            ),
            ("READY", ControlKind::Flag(Flag::Ready, inverted), "is 0 for rows with a request and 1 for padding"),
        ] {
            assert!(doubt(name, kind).is_some_and(|doubt| doubt.contains(said)), "{name}");
        }
    }

    fn infos(specs: &[(&str, &[i64])]) -> Vec<TensorInfo> {
        let info = |&(name, dims): &(&str, &[i64])| TensorInfo {
            name: name.to_owned(),
            data_type: DataType::Fp32,
            dims: dims.to_vec(),
            symbols: vec![String::new(); dims.len()],
        };
        specs.iter().map(info).collect()
    }

    fn warned(inputs: &[(&str, &[i64])], outputs: &[(&str, &[i64])], pairs: &[(&str, &str)]) -> Option<String> {
        let signature = Signature { inputs: infos(inputs), defaults: Vec::new(), outputs: infos(outputs) };
        let pair = |&(input, output): &(&str, &str)| StatePair { input: input.to_owned(), output: output.to_owned() };
        may_be_state(&signature, &pairs.iter().map(pair).collect::<Vec<_>>(), Taken::default())
    }

    const X: (&str, &[i64]) = ("x", &[-1, 4]);
    const Y: (&str, &[i64]) = ("y", &[-1, 4]);
    const GIST: (&str, &[i64]) = ("gist", &[-1, 8]);
    const GIST_NEW: (&str, &[i64]) = ("gist_new", &[-1, 8]);

    #[test]
    fn a_state_whose_name_does_not_tell_is_named_with_the_line_to_write() {
        let (memory, remembered) = (("memory", &[-1, 6][..]), ("remembered", &[-1, 6][..]));
        for (inputs, outputs) in [
            ([X, memory, GIST], vec![Y, remembered, GIST_NEW]),
            ([memory, X, GIST], vec![("y", &[-1, 2][..]), GIST_NEW, remembered]),
        ] {
            let warning = warned(&inputs, &outputs, &[("gist", "gist_new")]).unwrap();
            let line = "parameters { key: 'state_pairs' value { string_value: '<<<gist, gist_new>>> <<<memory, remembered>>>' } }";
            assert!(warning.contains(line) && warning.contains("TYPE_FP32 [-1, 6]"), "{warning}");
        }
    }

    #[test]
    fn a_state_that_is_told_by_its_names_is_named_where_the_states_are_written() {
        let warning = warned(&[X, ("h", &[-1, 8]), GIST], &[Y, ("hn", &[-1, -1]), GIST_NEW], &[("gist", "gist_new")]);
        assert!(warning.unwrap().contains("<<<gist, gist_new>>> <<<h, hn>>>"));
    }

    #[test]
    fn of_several_that_are_alike_the_last_go_together() {
        let warning = warned(
            &[("a", &[-1, 8]), ("b", &[-1, 8]), ("c", &[-1, 8]), GIST],
            &[("d", &[-1, 8]), ("e", &[-1, 8]), GIST_NEW],
            &[("gist", "gist_new")],
        );
        assert!(warning.unwrap().contains("<<<gist, gist_new>>> <<<b, d>>> <<<c, e>>>"));
    }

    #[test]
    fn what_requests_carry_is_not_asked_about() {
        let length = |name| (name, &[-1][..]);
        for (inputs, outputs) in
            [([X, GIST], [Y, GIST_NEW]), ([("mix", &[1, 9, 1, 2][..]), GIST], [("enh", &[1, 9, 1, 2][..]), GIST_NEW])]
        {
            assert_eq!(warned(&inputs, &outputs, &[("gist", "gist_new")]), None);
        }
        for (input, output) in [("length", "output_lengths"), ("encoder.length", "tokens_length")] {
            let (inputs, outputs) = ([X, length(input), GIST], [("y", &[-1, 2][..]), length(output), GIST_NEW]);
            assert_eq!(warned(&inputs, &outputs, &[("gist", "gist_new")]), None);
        }
    }

    fn info(name: &str, symbols: &[&str]) -> TensorInfo {
        TensorInfo {
            name: name.to_owned(),
            data_type: DataType::Int64,
            dims: vec![-1; symbols.len()],
            symbols: symbols.iter().map(|&symbol| symbol.to_owned()).collect(),
        }
    }

    fn noted(inputs: &[TensorInfo], requests: &[&str]) -> Option<String> {
        let signature = Signature { inputs: inputs.to_vec(), defaults: Vec::new(), outputs: Vec::new() };
        let tensor = |&name: &&str| TensorConfig {
            name: name.to_owned(),
            data_type: DataType::Int64,
            dims: vec![-1],
            optional: false,
        };
        let requests: Vec<TensorConfig> = requests.iter().map(tensor).collect();
        could_be_generated(
            &signature,
            &requests,
            &[StatePair { input: "past.0".to_owned(), output: "present.0".to_owned() }],
        )
    }

    #[test]
    fn what_names_and_dims_say_is_noted_with_the_line_to_write() {
        let decoder = [
            info("input_ids", &["batch", "length"]),
            info("attention_mask", &["batch", "past + length"]),
            info("position_ids", &["batch", "length"]),
            info("past.0", &["batch", "past"]),
        ];
        let (ids, mask) = ("position_ids=positions(input_ids)", "attention_mask=mask(past.0, input_ids)");
        let of = |requests: &[&str]| {
            let note = noted(&decoder, requests).unwrap_or_default();
            [ids, mask].map(|entry| note.contains(entry))
        };
        assert_eq!(of(&["input_ids", "attention_mask", "position_ids"]), [true, true]);
        assert_eq!(of(&["input_ids", "position_ids"]), [true, false]);
        assert_eq!(of(&["input_ids"]), [false, false]);
        assert_eq!(of(&["attention_mask", "position_ids"]), [false, false], "no data has the new elements");
        let of_builder = [
            info("input_ids", &["batch", "length"]),
            info("attention_mask", &["batch", "total_length"]),
            info("past.0", &["batch", "past_length"]),
        ];
        assert!(noted(&of_builder, &["input_ids", "attention_mask"]).unwrap().contains(mask));
    }

    #[test]
    fn other_names_of_dims_say_nothing() {
        let decoder = [
            info("input_ids", &["batch", "length"]),
            info("attention_mask", &["batch", "total"]),
            info("position_ids", &["batch", ""]),
            info("past.0", &["batch", "past"]),
        ];
        assert_eq!(noted(&decoder, &["input_ids", "attention_mask", "position_ids"]), None);
    }
}
