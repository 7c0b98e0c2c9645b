//! Any graphs are joined or refused: models of `exports/` and of recognisers, with changes that the input chooses.

use std::sync::OnceLock;

use stateful_convert::join::{Context, JoinOptions, Joined, Part, Search, SearchKind, Wire, join};
use stateful_convert::onnx::schema::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto,
    attribute_proto::AttributeType,
};
use stateful_convert::onnx::{DataType, Dim, read, write};
use stateful_convert::{StatePair, builtin};

use crate::fuzzed::{Choices, change, models};

/// Changes of a graph at most.
const CHANGES_MAX: usize = 3;

/// Joins two or three changed graphs. The joined graph has what its report names.
pub fn joining(bytes: &[u8]) {
    let Some((_, joined)) = joined(bytes) else { return };
    let graph = read(joined.converted.model.into()).unwrap().graph.unwrap();
    let has = |values: &[ValueInfoProto], name: &str| values.iter().any(|value| value.name() == name);
    for pair in joined.converted.report.states.iter().map(|state| &state.pair) {
        assert!(has(&graph.input, &pair.input) && has(&graph.output, &pair.output), "{pair}");
    }
    assert!(joined.converted.report.outputs.iter().all(|output| has(&graph.output, &output.name)));
}

/// The graphs, and what they are joined to, if they aren't refused.
pub fn joined(bytes: &[u8]) -> Option<(Vec<Part>, Joined)> {
    static MODELS: OnceLock<Vec<ModelProto>> = OnceLock::new();
    let models = MODELS.get_or_init(|| recognisers().into_iter().chain(models()).collect());
    let mut choices = Choices(bytes);
    let is_recogniser = choices.below(2) == 0;
    let count = 2 + choices.below(2);
    let mut graphs = Vec::new();
    for index in 0..count {
        // The first ones are an encoder, a predictor, a joiner and a decoder with its joint.
        let which = match index {
            0 if is_recogniser => 0,
            1 if is_recogniser && count == 2 => 3,
            _ if is_recogniser => index,
            _ => choices.below(models.len()),
        };
        let mut model = models[which].clone();
        for _ in 0..choices.below(CHANGES_MAX) {
            change(&mut choices, model.graph.as_mut().unwrap());
        }
        if choices.below(8) == 0 {
            model.opset_import[0].version = Some(choices.pick(&[7, 9, 10, 12, 13, 18, 21, 0, -1, i64::MAX]));
        }
        graphs.push(model);
    }
    let mut options = options(&mut choices, &graphs, is_recogniser);
    let part = |(index, model): (usize, &ModelProto)| Part {
        name: format!("g{index}"),
        model: write(model).into(),
        folder: if index == 0 { "sub".to_owned() } else { String::new() },
    };
    let mut parts: Vec<Part> = graphs.iter().enumerate().map(part).collect();
    if choices.below(4) == 1 {
        let in_front = in_front(&mut choices, &graphs[0], &mut options);
        parts.splice(0..0, in_front);
    }
    let joined = join(&parts, &options);
    if let Err(error) = &joined {
        assert!(!error.to_string().is_empty());
    }
    Some((parts, joined.ok()?))
}

/// Wires, states, outputs, a search and contexts of these graphs, valid or not.
fn options(choices: &mut Choices, graphs: &[ModelProto], is_recogniser: bool) -> JoinOptions {
    let name = |choices: &mut Choices, outputs: bool| {
        let index = choices.below(graphs.len());
        let graph = graphs[index].graph.as_ref().unwrap();
        let values = if outputs { &graph.output } else { &graph.input };
        let value = values.get(choices.below(values.len())).map_or("none", |value| value.name());
        format!("g{index}.{value}")
    };
    let mut options = JoinOptions::default();
    for _ in 0..choices.below(4).saturating_sub(1) {
        let is_input = choices.below(8) == 0;
        options.wires.push(Wire { from: name(choices, !is_input), to: name(choices, false) });
    }
    if choices.below(8) == 0 {
        options.states = vec![StatePair { input: name(choices, false), output: name(choices, true) }];
    }
    if choices.below(4) == 0 {
        options.outputs = vec![name(choices, true)];
    }
    if is_recogniser || choices.below(4) == 0 {
        let max_tokens = choices.pick(&[1, 3]);
        let durations = if choices.below(4) == 0 { vec![0, 1, 2] } else { Vec::new() };
        let kind =
            if choices.below(3) == 0 { SearchKind::Ctc } else { SearchKind::Transducer { max_tokens, durations } };
        let logits = (choices.below(16) == 0).then(|| name(choices, true));
        options.search = Some(Search { kind, blank: choices.pick(&[0, 5, i64::MAX]), logits, tokens: None });
    }
    // An input that has ended gives 0.
    if choices.below(4) == 1 {
        let axis = choices.pick(&[None, Some(0), Some(1), Some(2), Some(usize::MAX)]);
        let elements = choices.pick(&[1, 2, 5, 0, i64::MIN, i64::MAX]);
        let whole = choices.below(2) == 0;
        options.contexts = vec![Context { input: name(choices, false), elements, axis, whole }];
    }
    if choices.below(4) == 1 {
        options.pieces = Some(vec!["▁a".to_owned(); choices.pick(&[12, 8, 0])]);
    }
    options
}

/// Built-in graphs in front of the others, with changes, and the wire from the last of them.
fn in_front(choices: &mut Choices, first: &ModelProto, options: &mut JoinOptions) -> Vec<Part> {
    let listed = choices.pick(&BUILT_IN);
    let mut parts: Vec<Part> = Vec::new();
    for &words in listed {
        let mut words = words.split(' ');
        let name = words.next().unwrap_or_default();
        let mut model = builtin(name, &words.collect::<Vec<_>>()).unwrap();
        for _ in 0..choices.below(CHANGES_MAX) {
            change(choices, model.graph.as_mut().unwrap());
        }
        let outputs = model.graph.iter().flat_map(|graph| &graph.output).map(|output| output.name().to_owned());
        let output = outputs.take(1 + choices.below(2)).last().unwrap_or_default();
        let part = name.replace(':', "_");
        if parts.len() + 1 == listed.len() {
            let input = first.graph.as_ref().and_then(|graph| graph.input.first()).map_or("none", |input| input.name());
            options.wires.push(Wire { from: format!("{part}.{output}"), to: format!("g0.{input}") });
        }
        parts.push(Part { name: part, model: write(&model).into(), folder: String::new() });
    }
    parts
}

/// What may stand in front of an encoder that takes 8 features.
const BUILT_IN: [&[&str]; 5] = [
    &["fbank:kaldi num_mel_bins=8"],
    &["fbank:kaldi num_mel_bins=8 state=false"],
    &["mel:nemo num_mel_bins=8"],
    &["stft frame=16 hop=8", "istft frame=16 hop=8"],
    &["stft frame=14 hop=7 layout=polar window=rectangular"],
];

/// An encoder, a predictor, a joiner, and a predictor with its joint.
fn recognisers() -> Vec<ModelProto> {
    let value = |name: &str, elem: DataType, dims: &str| {
        let dim = |word: &str| word.parse().map_or_else(|_| Dim::Symbol(word.to_owned()), Dim::Known);
        ValueInfoProto::tensor(name, elem.into(), &dims.split_whitespace().map(dim).collect::<Vec<_>>())
    };
    let float = DataType::Float;
    let model =
        |inputs: &[(&str, DataType, &str)], outputs: &[(&str, DataType, &str)], nodes: Vec<NodeProto>| ModelProto {
            ir_version: Some(8),
            opset_import: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
            graph: Some(GraphProto {
                input: inputs.iter().map(|&(name, elem, dims)| value(name, elem, dims)).collect(),
                output: outputs.iter().map(|&(name, elem, dims)| value(name, elem, dims)).collect(),
                node: nodes,
                initializer: vec![TensorProto {
                    name: Some("table".to_owned()),
                    data_type: Some(float.into()),
                    dims: vec![12, 8],
                    float_data: (0..96).map(|at| (at * 37 % 23) as f32 / 23.0 - 0.5).collect(),
                    ..TensorProto::default()
                }],
                ..GraphProto::default()
            }),
            ..ModelProto::default()
        };
    let add = |inputs: &[&str], output: &str| NodeProto::make("Add", output, inputs, &[output]);
    let gather = |tokens: &str, output: &str| NodeProto::make("Gather", output, &["table", tokens], &[output]);
    let mean = NodeProto::make("ReduceMean", "decoder_out", &["e"], &["decoder_out"]);
    let mean = mean.with_ints("axes", &[1]).with_int("keepdims", 0);
    let token = DataType::Int64;
    let length = NodeProto::make("Identity", "l", &["target_length"], &["prednet_lengths"]);
    let mut cast = NodeProto::make("Cast", "c", &["targets"], &["tokens"]);
    cast.set(AttributeProto {
        name: Some("to".to_owned()),
        r#type: Some(AttributeType::Int.into()),
        i: Some(7),
        ..AttributeProto::default()
    });
    vec![
        model(
            &[("x", float, "N T 8"), ("h_in", float, "N 1 8")],
            &[("encoder_out", float, "N T 8"), ("h_out", float, "N 1 8")],
            vec![
                NodeProto::make("ReduceMean", "m", &["x"], &["mean"]).with_ints("axes", &[1]),
                add(&["mean", "h_in"], "h_out"),
                add(&["x", "h_in"], "encoder_out"),
            ],
        ),
        model(&[("y", token, "N 2")], &[("decoder_out", float, "N 8")], vec![gather("y", "e"), mean]),
        model(
            &[("encoder_out", float, "N 8"), ("decoder_out", float, "N 8")],
            &[("logit", float, "N 8")],
            vec![add(&["encoder_out", "decoder_out"], "logit")],
        ),
        model(
            &[
                ("encoder_out", float, "B T 8"),
                ("targets", DataType::Int32, "B U"),
                ("target_length", DataType::Int32, "B"),
                ("input_states_1", float, "B 1 8"),
            ],
            &[
                ("outputs", float, "B T 8"),
                ("prednet_lengths", DataType::Int32, "B"),
                ("output_states_1", float, "B 1 8"),
            ],
            vec![
                cast,
                gather("tokens", "e"),
                length,
                add(&["encoder_out", "e"], "outputs"),
                add(&["input_states_1", "e"], "output_states_1"),
            ],
        ),
    ]
}
