//! What the names, types and dims of tensors say of states: whether an input and an output can be the two ends of one,
//! and which tensors clients send and get. The names are those that exporters give; `docs/models.md` lists them.
//!
//! Where names say nothing, as in models from Keras, [`by_shape`] pairs inputs and outputs by their types and dims. Such pairs
//! are only proposed. They become states if the configuration confirms them with `state_pairs` `auto-by-shape`.

use rows::tensor::{DataType, Dims, element_count};
use stateful_convert::names::strength_of_names;
pub use stateful_convert::names::{OF_ONE_NAME, is_never_state, says_state, side_stem};

use crate::config::{PairPattern, StatePair, parameter_line};
use crate::onnx::{Signature, TensorInfo, all_agree};

/// The strength of a reading by a pattern that the user gave.
pub const OF_USER: u8 = 3;

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

pub fn state_pairs_line(pairs: &[StatePair]) -> String {
    parameter_line("state_pairs", &joined(pairs, " "))
}

pub fn joined(pairs: &[StatePair], separator: &str) -> String {
    pairs.iter().map(StatePair::to_string).collect::<Vec<_>>().join(separator)
}

pub fn described(infos: &[TensorInfo]) -> String {
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
