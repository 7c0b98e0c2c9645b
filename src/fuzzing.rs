//! Fuzz targets: functions that take any bytes and panic if a part breaks its promise.
//!
//! `cargo test` runs them on their corpora and random inputs; `fuzz/` runs them under libFuzzer.
//!
//! Rules: the bytes decide everything. The models are those of the property tests. Not for: whole payloads, which
//! `tests/exactly_once/fuzzed.rs` has.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "all of this is a test")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rows::copies::round_trip::rows_come_back;
use rows::strings;
use rows::tensor::{DataType, RowLayout};
use sequences::model_tests::{Clients, Op, play};
use serde_json::{Value, json};

use crate::completion::Settings;
use crate::config::PartialConfig;
use crate::model::{OnnxModel, Prepared};
use crate::onnx::{Signature, TensorInfo};
use crate::snapshot::{Snapshot, samples};
use crate::store::test_binding;

/// Operations that an input makes at most.
const OPS_MAX: usize = 300;

/// String tensors are what they are written as, or refused.
pub fn string_tensors(bytes: &[u8]) {
    match strings::read(bytes).unwrap() {
        None => assert_eq!(strings::count(bytes), None),
        Some(elements) => {
            assert_eq!(strings::count(bytes), Some(elements.len()));
            let mut written = vec![0; strings::written_bytes(elements.iter())];
            strings::write(elements.iter(), &mut written);
            assert_eq!(written, bytes);
        }
    }
}

/// Rows of any layout are copied in and out.
pub fn rows(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let dims: Vec<i64> = (0..choices.below(5)).map(|_| choices.below(5) as i64 - 1).collect();
    let axis = (!dims.is_empty() && choices.below(4) > 0).then(|| choices.below(dims.len()));
    let data_type = choices.pick(&[DataType::Uint8, DataType::Fp16, DataType::Fp32, DataType::Int64, DataType::Bytes]);
    let Some(layout) = RowLayout::new(data_type, &dims, axis) else { return };
    if layout.row_bytes() == 0 {
        return;
    }
    let mut alone = dims.clone();
    axis.into_iter().for_each(|axis| alone[axis] = 1);
    assert_eq!(layout.row_bytes() as i64, alone.iter().product::<i64>() * data_type.byte_size().unwrap_or(1) as i64);
    rows_come_back(layout, 1 + choices.below(6), choices.below(40), choices.below(256) as u8);
}

/// The table of sequences against its model.
pub fn sequences(bytes: &[u8]) {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let (clients, sending) = match first % 3 {
        0 => (Clients::KeepRules, Sending::OneByOne),
        1 => (Clients::BreakRules, Sending::OnSeveralConnections),
        _ => (Clients::BreakRules, Sending::Ahead),
    };
    let starts_fail = first >= 128;
    let mut choices = Choices(bytes);
    let ops = std::iter::from_fn(|| (!choices.0.is_empty()).then(|| op(&mut choices, sending)));
    play(ops.take(OPS_MAX).collect(), 1 + usize::from(first) / 3 % 4, clients, starts_fail);
}

/// How clients send their requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sending {
    OneByOne,
    /// Those with the first two ids may overtake each other.
    OnSeveralConnections,
    Ahead,
}

fn op(choices: &mut Choices, sending: Sending) -> Op {
    let id = 1 + choices.below(4) as u64;
    match (choices.below(38), sending) {
        (0, _) => Op::Pause,
        (1, _) => Op::Quiet,
        (2, _) => Op::Silence,
        (3..=8, _) => Op::Form,
        (9..=14, _) => Op::Execute,
        (15..=20, _) => Op::Settle,
        (36, _) => Op::Look,
        (37, _) => Op::Stop,
        (21..=25, Sending::Ahead) => Op::Plan { id, requests: 1 + choices.below(4), end: choices.below(2) > 0 },
        (_, Sending::Ahead) => Op::SendNext { id, requests: 1 + choices.below(8) },
        (21..=25, Sending::OnSeveralConnections) if id < 3 => {
            Op::SendLate { id, start: choices.below(3) == 0, end: choices.below(3) == 0 }
        }
        _ => Op::Send { id, start: choices.below(3) == 0, end: choices.below(3) == 0 },
    }
}

/// A snapshot is refused, or has the data that it was read with.
pub fn snapshots(bytes: &[u8]) {
    const PREFIX_BYTES: usize = 20;
    let header_bytes = |snapshot: &[u8]| u32::from_le_bytes(snapshot[16..PREFIX_BYTES].try_into().unwrap()) as usize;
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let binding = test_binding(true);
    let snapshot = match first % 3 {
        0 => bytes.to_vec(),
        1 => {
            let (header, data) = bytes.split_at(bytes.len().min(usize::from(first) * 4));
            samples::sealed(header, data)
        }
        _ => {
            let whole = samples::snapshot().encode(&binding).unwrap();
            let (mut header, mut data) = (
                whole[PREFIX_BYTES..][..header_bytes(&whole)].to_vec(),
                whole[PREFIX_BYTES + header_bytes(&whole)..].to_vec(),
            );
            for change in bytes.chunks_exact(4) {
                let part = if change[0] % 4 == 0 { &mut data } else { &mut header };
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % (part.len() + 1);
                match change[0] / 4 % 3 {
                    0 if at < part.len() => part[at] = change[3],
                    1 if at < part.len() => _ = part.remove(at),
                    _ => part.insert(at, change[3]),
                }
            }
            samples::sealed(header, &data)
        }
    };
    let read = match Snapshot::decode(&snapshot, &binding) {
        Ok(read) => read,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let again = read.encode(&binding).unwrap();
    let [data_of_first, data_of_second] = [&snapshot, &again].map(|whole| &whole[PREFIX_BYTES + header_bytes(whole)..]);
    assert_eq!(data_of_first, data_of_second);
    let twice = Snapshot::decode(&again, &binding).unwrap();
    assert_eq!((twice.state, twice.extras.steps), (read.state, read.extras.steps));
    assert_eq!(twice.extras.counts, read.extras.counts);
}

/// Any configuration fits any model or is refused with a text.
pub fn configuration(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let signature = signature(&mut choices);
    let settings =
        Settings { completes: choices.below(2) > 0, default_max_batch_size: choices.below(9), rows_mix: false };
    let document = if choices.below(8) == 0 {
        choices.0.to_vec()
    } else {
        document(&mut choices, &signature).to_string().into_bytes()
    };
    let prepared =
        PartialConfig::from_json(&document).map_err(crate::error::LoadError::from).and_then(|mut partial| {
            let metadata = BTreeMap::from([("k".to_owned(), "1, 2, 3, 4".to_owned())]);
            let description = (choices.below(8) == 0).then_some("<<<s_in, s_out>>>");
            let onnx = OnnxModel { signature: &signature, description, metadata: &metadata };
            Prepared::from_onnx(
                &mut partial,
                onnx,
                &PathBuf::from("/nowhere/model.onnx").into(),
                Path::new("/nowhere"),
                settings,
            )
        });
    match prepared {
        Ok(Prepared { binding, .. }) => {
            assert_eq!(binding.inputs.len(), signature.inputs.len(), "each input is fed once");
            assert!(binding.states.iter().all(|state| state.output < binding.outputs.len()));
            assert!(binding.slot.slot_bytes() >= binding.slot.state_bytes());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

const NAMES: [&str; 12] = ["x", "y", "s_in", "s_out", "past.0", "present.0", "mask", "n", "h_in", "h_out", "len", "z"];
const TYPES: [DataType; 6] =
    [DataType::Fp32, DataType::Fp32, DataType::Int64, DataType::Bytes, DataType::Bool, DataType::Fp16];
const DIMS: [i64; 10] = [-1, -1, 1, 2, 4, 8, 0, 128, -1, i64::MAX];

fn signature(choices: &mut Choices) -> Signature {
    let info = |choices: &mut Choices, name: &str| {
        let dims: Vec<i64> = (0..choices.below(5)).map(|_| choices.pick(&DIMS)).collect();
        let symbol = |choices: &mut Choices, dim: i64| {
            if dim < 0 { choices.pick(&["", "batch", "time", "N"]).to_owned() } else { String::new() }
        };
        let symbols = dims.iter().map(|&dim| symbol(choices, dim)).collect();
        TensorInfo { name: name.to_owned(), data_type: choices.pick(&TYPES), dims, symbols }
    };
    let mut inputs: Vec<TensorInfo> = Vec::new();
    let mut outputs: Vec<TensorInfo> = Vec::new();
    for pair in NAMES.chunks(2) {
        if choices.below(2) == 0 {
            continue;
        }
        let input = info(choices, pair[0]);
        let like_input = TensorInfo { name: pair[1].to_owned(), ..input.clone() };
        outputs.push(if choices.below(4) == 0 { info(choices, pair[1]) } else { like_input });
        inputs.push(input);
    }
    Signature { inputs, defaults: Vec::new(), outputs }
}

fn document(choices: &mut Choices, signature: &Signature) -> Value {
    let listed = |choices: &mut Choices, infos: &[TensorInfo]| {
        let mut list = Vec::new();
        for info in infos {
            if choices.below(3) > 0 {
                let from = choices.below(2).min(info.dims.len());
                let name = info.data_type.to_string();
                list.push(json!({ "name": info.name, "data_type": name, "dims": info.dims[from..] }));
            }
        }
        Value::from(list)
    };
    let mut parameters = serde_json::Map::new();
    for _ in 0..choices.below(5) {
        let (name, values) = choices.pick(&PARAMETERS);
        let value = match choices.below(4) {
            0 => (0..choices.below(10)).map(|_| choices.pick(&TOKENS)).collect(),
            _ => choices.pick(values).to_owned(),
        };
        parameters.insert(name.to_owned(), json!({ "string_value": value }));
    }
    let mut document = json!({
        "name": "m",
        "max_batch_size": choices.below(9),
        "input": listed(choices, &signature.inputs),
        "output": listed(choices, &signature.outputs),
        "parameters": parameters,
    });
    match choices.below(3) {
        0 => {}
        1 => document["sequence_batching"] = json!({ "direct": {} }),
        _ => document["sequence_batching"] = json!({ "oldest": { "max_candidate_sequences": choices.below(20) } }),
    }
    document
}

const PARAMETERS: [(&str, &[&str]); 17] = [
    (
        "state_pairs",
        &["<<<s_in, s_out>>>", "<<<s_in, s_out>>> <<<h_in, h_out>>>", "auto", "auto-by-shape", "<<<x, y>>>"],
    ),
    ("state_dims", &["s_in=[batch, 4]", "s_in=[]", "s_in=[2, batch, -1, 8] h_in=[batch]", "past.0=[batch, 4, -1]"]),
    ("initial_states", &["s_in=1", "s_in=[1, 2, 3, 4]", "s_in=metadata:k", "s_in=file:f", "h_in=nan", "past.0=-1e40"]),
    ("generated_inputs", &["mask=steps", "len=positions(x)", "n=length(x)", "mask=mask(x@1)", "z=steps, len=steps"]),
    ("input_context", &["x=2", "x=2@1", "x=13@1:whole", "x=1@0:repeat", "x=99999999999"]),
    ("growing_padding", &["left", "right", "none"]),
    ("constant_inputs", &["n=1", "n=[1, 2]", "len=4 n=2"]),
    ("held_inputs", &["x", "z", "x z", "s_in"]),
    ("padded_inputs", &["x", "x@1", "x=len", "x@1=len"]),
    ("padded_outputs", &["y", "y@1", "y=n"]),
    ("state_api", &["true", "false"]),
    ("join", &["a.onnx b.onnx", "a=fbank:kaldi state=false b=c.onnx", "=", "a=b=c", "stft istft"]),
    ("wires", &["<<<a.y, b.x>>>", "<<<x>>>", "<<<a.y, b.x>>> <<<b.y, a.x>>>"]),
    ("search", &["ctc blank=0", "transducer blank=9 max_tokens=1 durations=0,1", "ctc", "ctc blank=0 tokens="]),
    ("store_states_as_fp16", &["1", "0"]),
    ("max_rows_per_run", &["1", "4", "0"]),
    ("state_pair_patterns", &["<<<*_in, *_out>>>", "<<<past.*, present.*>>>", "<<<*, *>>>"]),
];
/// A number that no integer holds.
const HUGE: &str = "99999999999999999999";
const TOKENS: [&str; 30] = [
    "s_in", "s_out", "x", "y", "len", "<<<", ">>>", ",", " ", "=", "@", "(", ")", "[", "]", ":", "*", "-1", "0", "1",
    "4", HUGE, "steps", "mask", "zeros", "batch", "auto", "nan", "\u{e9}", "\0",
];

/// The choices that bytes make; zeros behind their end.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn below(&mut self, limit: usize) -> usize {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(first) % limit
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

#[cfg(test)]
#[path = "../fuzz/inputs.rs"]
mod inputs;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_are_a_string_tensor_or_none() {
        super::inputs::run("string_tensors", 2000, string_tensors);
    }

    #[test]
    fn rows_of_any_layout_come_back() {
        super::inputs::run("rows", 2000, rows);
    }

    #[test]
    fn any_operations_leave_the_table_like_its_model() {
        super::inputs::run("sequences", 200, sequences);
    }

    #[test]
    fn any_snapshot_is_refused_or_has_its_data() {
        super::inputs::run("snapshots", 1000, snapshots);
    }

    #[test]
    fn any_configuration_fits_or_is_refused() {
        super::inputs::run("configuration", 1000, configuration);
    }
}
