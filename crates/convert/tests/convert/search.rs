//! Searches in joined graphs, compared with plain loops. The graphs have the signatures of published exports, and
//! random weights.

use stateful_convert::join::{JoinOptions, Joined, Part, Search, join};
use stateful_convert::onnx::schema::{NodeProto, ValueInfoProto};
use stateful_convert::onnx::{DataType, Dim, read, write};
use stateful_convert::verify::{Amount, Compared};

use crate::common::{Build, dims, node};
use crate::join::{compare_amount, parts, refusal, wired};

/// Tokens of the fixtures' logits.
const TOKENS: i64 = 12;

/// Features of the encoder's frames, and of what predictors give.
const WIDE: i64 = 8;

/// The encoder of all fixtures: a chunk of frames and a state give frames. `shape` is that of its output.
pub fn encoder(input: &str, output: &str, shape: &str) -> Build {
    let swaps = shape.split_whitespace().nth(1) == Some("8");
    let build = Build::new()
        .input(input, "N 6 4")
        .input("cache", "N 1 8")
        .output(output, shape)
        .output("new_cache", "N 1 8")
        .weights("w", &[4, WIDE])
        .ints("from", &[1], &[-1])
        .ints("to", &[1], &[i64::MAX])
        .ints("axis", &[1], &[1])
        .node(node("MatMul", &format!("{input} w"), "product"))
        .node(node("Add", "product cache", "sum"))
        .node(node("Tanh", "sum", "all"))
        .node(node("Slice", "all from to axis", "new_cache"));
    if swaps {
        build.node(node("Transpose", "all", output).with_ints("perm", &[0, 2, 1]))
    } else {
        build.node(node("Identity", "all", output))
    }
}

/// Adds logits of `tokens` tokens. `often` is added to the blank's, so that it wins about every second frame.
fn with_logits(build: Build, input: &str, output: &str, blank: i64, tokens: i64, often: f32) -> Build {
    let bias: Vec<f32> = (0..tokens).map(|token| if token == blank { often } else { 0.0 }).collect();
    build
        .weights("out_w", &[WIDE, tokens])
        .floats("bias", &[tokens], &bias)
        .node(node("Tanh", input, "joined"))
        .node(node("MatMul", "joined out_w", "scores"))
        .node(NodeProto::make("Add", "", &["scores", "bias"], &[output]))
}

/// icefall's stateless predictor: the last two tokens.
pub fn stateless() -> Build {
    Build::new()
        .typed_input("y", DataType::Int64, "N 2")
        .output("decoder_out", "N 8")
        .weights("embedding", &[TOKENS, 4])
        .weights("w", &[8, WIDE])
        .ints("flat", &[2], &[0, 8])
        .node(node("Gather", "embedding y", "embedded"))
        .node(node("Reshape", "embedded flat", "both"))
        .node(node("MatMul", "both w", "decoder_out"))
}

/// icefall's joiner: a frame in each row.
pub fn joiner() -> Build {
    let build = Build::new().input("encoder_out", "N 8").input("decoder_out", "N 8").output("logit", "N 12");
    with_logits(build.node(node("Add", "encoder_out decoder_out", "sum")), "sum", "logit", 0, TOKENS, 0.4)
}

/// The predictor of NeMo: an LSTM over the last token, whose output is `g [U, B, 8]`.
fn lstm(build: Build) -> Build {
    let mut build = build
        .typed_input("targets", DataType::Int32, "B U")
        .typed_input("target_length", DataType::Int32, "B")
        .input("input_states_1", "1 B 8")
        .input("input_states_2", "1 B 8")
        .output("output_states_1", "1 B 8")
        .output("output_states_2", "1 B 8")
        .weights("embedding", &[TOKENS + 1, 4])
        .weights("lstm_w", &[1, 32, 4])
        .weights("lstm_r", &[1, 32, WIDE])
        .weights("lstm_b", &[1, 64])
        .ints("direction", &[1], &[1]);
    let lengths = ValueInfoProto::tensor("prednet_lengths", DataType::Int32.into(), &dims("B"));
    build.graph.output.push(lengths);
    let states = "by_time lstm_w lstm_r lstm_b - input_states_1 input_states_2";
    build
        .node(node("Gather", "embedding targets", "embedded"))
        .node(node("Transpose", "embedded", "by_time").with_ints("perm", &[1, 0, 2]))
        .node(node("LSTM", states, "all output_states_1 output_states_2").with_int("hidden_size", WIDE))
        .node(node("Squeeze", "all direction", "g"))
        .node(node("Identity", "target_length", "prednet_lengths"))
}

/// NeMo's joint: frames `[B, 8, T]` and `g [B, U, 8]` give `outputs [B, T, U, 13]`.
fn joint(build: Build, frames: &str, of_tokens: &str) -> Build {
    let build = build.output("outputs", "B T U 13").ints("second", &[1], &[1]).ints("third", &[1], &[2]);
    let by_frame = NodeProto::make("Transpose", "", &[frames], &["f"]).with_ints("perm", &[0, 2, 1]);
    let build = build.node(by_frame).node(node("Unsqueeze", "f third", "f4"));
    let build = build.node(NodeProto::make("Unsqueeze", "", &[of_tokens, "second"], &["g4"]));
    with_logits(build.node(node("Add", "f4 g4", "sum")), "sum", "outputs", TOKENS, TOKENS + 1, 0.7)
}

/// NeMo's decoder_joint.
pub fn decoder_joint() -> Build {
    let build = lstm(Build::new().input("encoder_outputs", "B 8 T"));
    let build = build.node(NodeProto::make("Transpose", "", &["g"], &["by_row"]).with_ints("perm", &[1, 0, 2]));
    joint(build, "encoder_outputs", "by_row")
}

fn search(text: &str, wires: &str) -> JoinOptions {
    JoinOptions { search: Some(Search::parse(text).unwrap()), ..wired(wires) }
}

fn joined(models: &[(&str, &[u8])], options: &JoinOptions) -> (Vec<Part>, Joined) {
    let parts = parts(models);
    let joined = join(&parts, options).unwrap_or_else(|error| panic!("{error}"));
    (parts, joined)
}

/// Joins graphs and compares the tokens of many chunks.
fn checked(models: &[(&str, &[u8])], options: &JoinOptions, chunks: i64) -> Vec<Compared> {
    let (parts, joined) = joined(models, options);
    let amount = Amount { chunks, rows: vec![1, 8] };
    let compared = compare_amount(&parts, &joined, amount).unwrap_or_else(|error| panic!("{error}"));
    for compared in &compared {
        assert!(compared.largest < 1e-5, "{compared:?}");
        let (_, tokens) = compared.what.split_once("rows, ").or_else(|| compared.what.split_once("row, ")).unwrap();
        let tokens: usize = tokens.split_once(" tokens").unwrap().0.parse().unwrap();
        // Without blanks or without tokens, the search would be simple.
        assert!(tokens as i64 > chunks / 2, "{compared:?}");
    }
    compared
}

#[test]
fn tokens_of_a_stateless_predictor_are_those_of_a_plain_loop() {
    let (encoder, decoder, joiner) =
        (encoder("x", "encoder_out", "N T 8").bytes(), stateless().bytes(), joiner().bytes());
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    checked(&models, &search("transducer blank=0 max_tokens=1", ""), 1000);
}

#[test]
fn a_wire_replaces_a_default_value_of_the_joiner() {
    let default = |build: Build, input: &str| build.floats(input, &[1, WIDE], &[0.5; WIDE as usize]);
    let joiner = default(default(joiner(), "encoder_out"), "decoder_out").bytes();
    let (encoder, decoder) = (encoder("x", "encoder_out", "N T 8").bytes(), stateless().bytes());
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    let wires = "<<<encoder.encoder_out, joiner.encoder_out>>> <<<decoder.decoder_out, joiner.decoder_out>>>";
    checked(&models, &search("transducer blank=0 max_tokens=1", wires), 100);
}

#[test]
fn tokens_of_an_lstm_predictor_are_those_of_a_plain_loop() {
    let (encoder, decoder_joint) = (encoder("x", "outputs", "N 8 T").bytes(), decoder_joint().bytes());
    let models: [(&str, &[u8]); 2] = [("encoder", &encoder), ("decoder_joint", &decoder_joint)];
    let wires = "<<<encoder.outputs, decoder_joint.encoder_outputs>>>";
    checked(&models, &search("transducer blank=12 max_tokens=3", wires), 1000);
}

#[test]
fn tokens_with_durations_are_those_of_a_plain_loop() {
    let encoder = encoder("x", "outputs", "N 8 T").bytes();
    // The last four logits are durations, so the tokens are 0 to 8.
    let decoder_joint = decoder_joint().bytes();
    let models: [(&str, &[u8]); 2] = [("encoder", &encoder), ("decoder_joint", &decoder_joint)];
    let wires = "<<<encoder.outputs, decoder_joint.encoder_outputs>>>";
    for (text, chunks) in [
        ("transducer blank=0 max_tokens=3 durations=0,1,2,4", 1000),
        ("transducer blank=8 max_tokens=1 durations=1,0,3,8", 200),
    ] {
        checked(&models, &search(text, wires), chunks);
    }
    let options = search("transducer blank=9 max_tokens=3 durations=0,1,2,4", wires);
    let error = refusal(&models, &options);
    assert!(error.contains("have 9 tokens beside 4 durations, from 0 to 8"), "{error}");
    let (_, joined) = joined(&models, &search("transducer blank=0 max_tokens=3 durations=0,1,2,4", wires));
    let states: Vec<String> = joined.converted.report.states.iter().map(|state| state.pair.to_string()).collect();
    assert!(states.contains(&"<<<search.skip, search.skip_next>>>".to_owned()), "{states:?}");
}

#[test]
fn tokens_of_ctc_are_those_of_a_plain_loop() {
    let encoder = encoder("x", "hidden", "N T 8").bytes();
    let head =
        with_logits(Build::new().input("hidden", "B T 8").output("probs", "B T 12"), "hidden", "probs", 0, TOKENS, 0.4);
    let models: [(&str, &[u8]); 2] = [("encoder", &encoder), ("ctc", &head.bytes())];
    checked(&models, &search("ctc blank=0", ""), 1000);
}

/// The graphs of a recogniser with a stateless predictor.
fn icefall() -> [Vec<u8>; 3] {
    [encoder("x", "encoder_out", "N T 8").bytes(), stateless().bytes(), joiner().bytes()]
}

#[test]
fn an_lstm_and_its_joiner_may_be_two_graphs() {
    // The names of sherpa's export of NeMo.
    let predictor = lstm(Build::new().output("outputs", "B 8 U"));
    let predictor =
        predictor.node(NodeProto::make("Transpose", "", &["g"], &["outputs"]).with_ints("perm", &[1, 2, 0]));
    let joiner = Build::new().input("encoder_outputs", "B 8 T").input("decoder_outputs", "B 8 U");
    let joiner = joiner.node(node("Transpose", "decoder_outputs", "by_row").with_ints("perm", &[0, 2, 1]));
    let joiner = joint(joiner, "encoder_outputs", "by_row");
    let encoder = encoder("x", "outputs", "N 8 T").bytes();
    let (predictor, joiner) = (predictor.bytes(), joiner.bytes());
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &predictor), ("joiner", &joiner)];
    let wires = "<<<encoder.outputs, joiner.encoder_outputs>>> <<<decoder.outputs, joiner.decoder_outputs>>>";
    checked(&models, &search("transducer blank=12 max_tokens=10", wires), 50);
}

#[test]
fn a_joiner_may_take_one_frame_and_a_predictor_one_token_without_an_axis() {
    let encoder = encoder("x", "encoder_out", "N T 8").bytes();
    let predictor = Build::new().typed_input("y", DataType::Int64, "N").output("decoder_out", "N 1 8");
    let predictor = predictor.weights("embedding", &[TOKENS, WIDE]).ints("second", &[1], &[1]);
    let predictor =
        predictor.node(node("Gather", "embedding y", "e")).node(node("Unsqueeze", "e second", "decoder_out"));
    let joiner = Build::new().input("encoder_out", "N 1 8").input("decoder_out", "N 1 8").output("logit", "N 1 12");
    let joiner = joiner.node(node("Add", "encoder_out decoder_out", "sum"));
    let joiner = with_logits(joiner, "sum", "logit", 3, TOKENS, 0.4);
    let (predictor, joiner) = (predictor.bytes(), joiner.bytes());
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &predictor), ("joiner", &joiner)];
    checked(&models, &search("transducer blank=3 max_tokens=2", ""), 50);
}

#[test]
fn a_search_adds_its_outputs_and_its_state() {
    let [encoder, decoder, joiner] = icefall();
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    let options = JoinOptions {
        outputs: vec!["encoder.encoder_out".to_owned()],
        ..search("transducer blank=0 max_tokens=1", "")
    };
    let (parts, joined) = joined(&models, &options);
    let report = &joined.converted.report;
    let outputs: Vec<&str> = report.outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(outputs, ["encoder.encoder_out", "tokens", "tokens_length", "frames"]);
    let states: Vec<String> = report.states.iter().map(|state| state.pair.to_string()).collect();
    assert_eq!(states, ["<<<encoder.cache, encoder.new_cache>>>", "<<<search.last, search.last_next>>>"]);
    let compared = compare_amount(&parts, &joined, Amount::default()).unwrap();
    assert!(compared[0].what.starts_with("20 chunks of 1 row, "), "{compared:?}");
    // The last tokens begin as the blank, which isn't 0 here.
    let (_, joined) = self::joined(&models, &search("transducer blank=5 max_tokens=1", ""));
    let model = read(joined.converted.model.into()).unwrap();
    let entry = model.metadata_props.iter().find(|entry| entry.key() == "stateful.initial_states").unwrap();
    assert_eq!(entry.value(), r#"[{"state":"search.last","value":"5"}]"#);
}

#[test]
fn searches_that_cannot_be_are_refused_by_name() {
    let [encoder, decoder, joiner] = icefall();
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    let greedy = "transducer blank=0 max_tokens=1";
    for (models, text, wires, expected) in [
        (
            &models[..],
            "transducer blank=12 max_tokens=1",
            "",
            "blank is 12, and the logits 'joiner.logit' have 12 tokens",
        ),
        (
            &models[..2],
            greedy,
            "",
            "no wire brings frames to graph 'decoder': write <<<encoder.output, decoder.input>>>",
        ),
        (&models[..1], greedy, "", "a transducer needs an encoder, and a decoder_joint or a decoder and a joiner"),
        (&[models[0], models[2]], greedy, "", "input 'joiner.decoder_out' takes nothing"),
        (&models[..2], "ctc blank=0", "", "the logits 'decoder.decoder_out' are [N, 8], and [rows, frames, tokens]"),
        (
            &models[..],
            "ctc blank=0 logits=encoder.encoder_out",
            "",
            "the logits must be an output of the last graph, 'joiner'",
        ),
        (&models[..], greedy, "<<<joiner.logit, encoder.x>>>", "the wire <<<joiner.logit, encoder.x>>> is back"),
        (
            &models[..],
            greedy,
            "<<<encoder.cache, joiner.encoder_out>>>",
            "the frames come from 'encoder.cache', and an output of a graph before the decoder",
        ),
    ] {
        let error = refusal(models, &search(text, wires));
        assert!(error.contains(expected), "{text}: {error}");
    }
    let options = JoinOptions { outputs: vec!["joiner.logit".to_owned()], ..search(greedy, "") };
    assert!(refusal(&models, &options).contains("'joiner.logit' is inside the search"));
    let named: [(&str, &[u8]); 3] = [("search", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    assert!(refusal(&named, &search(greedy, "")).contains("'search' can't be the name of a graph"));
    let two = self::joiner().output("other", "N 12").node(node("Neg", "logit", "other")).bytes();
    let two: [(&str, &[u8]); 3] = [models[0], models[1], ("joiner", &two)];
    let error = refusal(&two, &search(greedy, ""));
    assert!(
        error.contains("joiner.logit and joiner.other could be the logits: name one, as in logits=joiner.logit"),
        "{error}"
    );
    checked(&two, &search("transducer blank=0 max_tokens=1 logits=joiner.logit", ""), 20);
    let mut fixed = read(decoder.clone().into()).unwrap();
    let tokens = &mut fixed.graph.as_mut().unwrap().input[0];
    tokens.set_tensor(DataType::Int64.into(), &dims("N 2 1"));
    let fixed = write(&fixed);
    let error = refusal(&[models[0], ("decoder", &fixed), models[2]], &search(greedy, ""));
    assert!(error.contains("graph 'decoder' needs one input of tokens"), "{error}");
}

#[test]
fn a_model_of_one_row_has_one_row() {
    let one = |model: &[u8]| {
        let mut model = read(model.to_vec().into()).unwrap();
        let graph = model.graph.as_mut().unwrap();
        for value in graph.input.iter_mut().chain(&mut graph.output) {
            let fixed: Vec<Dim> = value
                .dims()
                .unwrap()
                .into_iter()
                .map(|dim| match dim {
                    Dim::Symbol(name) if name == "N" => Dim::Known(1),
                    dim => dim,
                })
                .collect();
            let elem = value.elem();
            value.set_tensor(elem, &fixed);
        }
        write(&model)
    };
    let [encoder, decoder, joiner] = icefall().map(|model| one(&model));
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    let (parts, joined) = joined(&models, &search("transducer blank=0 max_tokens=1", ""));
    let compared = compare_amount(&parts, &joined, Amount::default()).unwrap();
    assert_eq!(compared.len(), 1);
}
