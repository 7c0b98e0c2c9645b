//! Warns of inputs of requests that may be states: an output has their type and dims.
//!
//! Some of a model's states may have names that say so, and others not. Then the model loads, but clients are asked for
//! inputs that they do not have. What is found here is not made a state. The warning has the line to write if it is
//! one.

use rows::tensor::Dims;

use super::names::{
    OF_ONE_NAME, Taken, can_follow, is_alike, is_never_state, is_number, leaves_input, state_pairs_line, strength,
};
use super::pairing::{state_pairs, without};
use crate::config::StatePair;
use crate::onnx::{Signature, TensorInfo};

/// The warning about inputs and outputs that are not in `pairs`, the states of the model; `None` if there is nothing to
/// warn of.
pub fn warning(signature: &Signature, pairs: &[StatePair], taken: Taken) -> Option<String> {
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
        let info = signature.inputs.iter().find(|info| info.name == pair.input);
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
        let input = signature.inputs.iter().find(|info| info.name == pair.input)?;
        let of = |output: &TensorInfo| strength(&[], input, output);
        let written = signature.outputs.iter().find(|info| info.name == pair.output)?;
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
        let input = signature.inputs.iter().find(|info| info.name == pair.input)?;
        let output = signature.outputs.iter().find(|info| info.name == pair.output)?;
        let is_weak = strength(&[], input, output) == Some(OF_ONE_NAME);
        let fits = |info: &&TensorInfo| is_alike(info, input) && pairs.iter().all(|of| of.output != info.name);
        let left = signature.outputs.iter().find(fits).filter(|_| is_weak)?;
        Some(format!("{pair} or <<<{}, {}>>>", pair.input, left.name))
    };
    let found: Vec<String> = pairs.iter().filter_map(other).collect();
    (!found.is_empty()).then(|| {
        format!(
            "outputs with the type and dims of a state are left over: {}; the first of each is served; if it is wrong, \
             write the pairs in 'state_pairs'",
            found.join("; ")
        )
    })
}

/// Pairs of `rest` with equal types and dims, in the order of the inputs. Of several tensors that are alike, the last
/// ones are paired, because models have their states after what requests carry and responses give.
fn alike(rest: &Signature, signature: &Signature, known: &[StatePair], taken: Taken) -> Vec<StatePair> {
    let mut outputs: Vec<&TensorInfo> = rest.outputs.iter().filter(|info| !is_never_state(&info.name)).collect();
    let mut found: Vec<StatePair> = Vec::new();
    for input in rest.inputs.iter().rev().filter(|info| !is_never_state(&info.name) && !taken.contains(&info.name)) {
        if let Some(index) = outputs.iter().rposition(|output| is_alike(output, input)) {
            found.insert(0, StatePair { input: input.name.clone(), output: outputs.remove(index).name.clone() });
        }
    }
    // Requests must carry something, and models have that first.
    if !leaves_input(signature, &[known, &found].concat(), taken) {
        let of = |pair: &StatePair| signature.inputs.iter().find(|info| info.name == pair.input);
        if let Some(first) = found.iter().position(|pair| of(pair).is_some_and(|info| !is_number(info))) {
            found.remove(first);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use rows::tensor::DataType;

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
        warning(&signature, &pairs.iter().map(pair).collect::<Vec<_>>(), Taken::default())
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
        let (inputs, outputs) =
            ([X, length("length"), GIST], [("y", &[-1, 2][..]), length("output_lengths"), GIST_NEW]);
        assert_eq!(warned(&inputs, &outputs, &[("gist", "gist_new")]), None);
    }
}
