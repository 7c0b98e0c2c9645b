//! Joined graphs that the comparison refuses or that need a warning, by the name of their graph.

use std::time::{Duration, Instant};

use stateful_convert::join::{JoinOptions, Search, join};
use stateful_convert::onnx::DataType;
use stateful_convert::onnx::schema::ValueInfoProto;
use stateful_convert::verify::{Amount, Given, JoinedModels, Models, Source, VerifyError, verify, verify_joined};
use stateful_convert::{Options, convert};

use crate::common::{Build, dims, node, pair, runtime, with_graph};
use crate::join::{compare, parts, refusal, wired};

/// `y = x + c`, where `c` counts without an end.
fn endless(build: Build) -> Build {
    let mut body = Build::new().typed_input("i", DataType::Int64, "").typed_input("goes_on", DataType::Bool, "");
    body = body.input("count", "").node(node("Identity", "goes_on", "goes_on_still"));
    let is_on = ValueInfoProto::tensor("goes_on_still", DataType::Bool.into(), &dims(""));
    body.graph.output.push(is_on);
    let body = body.output("counted", "").floats("one", &[], &[1.0]).node(node("Add", "count one", "counted"));
    let is_on = node("Equal", "zero zero", "on");
    let build = build.floats("zero", &[], &[0.0]).node(is_on);
    let counted = with_graph(node("Loop", "- on zero", "c"), "body", body.graph);
    build.node(counted).node(node("Add", "x c", "y"))
}

fn limited() -> Given {
    Given { run_limit: Some(Duration::from_secs(1)), ..Given::default() }
}

#[test]
fn a_loop_without_an_end_is_refused_with_the_name_of_its_graph() {
    let front = Build::new().input("w", "N 3").output("x", "N 3").node(node("Neg", "w", "x")).bytes();
    let endless = endless(Build::new().input("x", "N 3").output("y", "N 3")).bytes();
    let parts = parts(&[("front", &front), ("endless", &endless)]);
    let joined = join(&parts, &wired("")).unwrap();
    let models = JoinedModels {
        amount: Amount::default(),
        parts: parts.iter().map(|part| Source::Bytes(&part.model)).collect(),
        joined: Source::Bytes(&joined.converted.model),
    };
    let begun = Instant::now();
    let compared = verify_joined(runtime(), &models, &joined.plan, &joined.converted.report, &limited());
    let error = compared.unwrap_err();
    assert!(matches!(error, VerifyError::TooLong { .. }));
    let expected =
        "graph 'endless' takes longer than 1 s for a run on random data: if a loop in it ends on other data only";
    assert!(error.to_string().starts_with(expected), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_model_with_a_loop_without_an_end_is_not_converted() {
    let build = Build::new().input("x", "N 3").input("h_in", "N 3").output("y", "N 3").output("h_out", "N 3");
    let endless = endless(build.node(node("Neg", "h_in", "h_out"))).bytes();
    let options = Options { states: vec![pair("h_in", "h_out")], keep_recurrences: true, ..Options::default() };
    let converted = convert(endless.clone().into(), &options).unwrap();
    let models =
        Models { original: Source::Bytes(&endless), converted: Source::Bytes(&converted.model), initial_states: None };
    let error = verify(runtime(), &models, &converted.report, &limited()).unwrap_err().to_string();
    assert!(error.starts_with("the original model takes longer than 1 s for a run on random data"), "{error}");
}

/// A run that is late can still succeed, if its last node takes long.
#[test]
fn a_late_run_that_succeeds_is_refused_by_its_time() {
    let build = Build::new().input("x", "N 3").input("h_in", "N 3").output("y", "N 3").output("h_out", "N 3");
    let model = build.node(node("Neg", "h_in", "h_out")).node(node("Abs", "x", "y")).bytes();
    let options = Options { states: vec![pair("h_in", "h_out")], ..Options::default() };
    let converted = convert(model.clone().into(), &options).unwrap();
    let models =
        Models { original: Source::Bytes(&model), converted: Source::Bytes(&converted.model), initial_states: None };
    let given = Given { run_limit: Some(Duration::ZERO), ..Given::default() };
    let error = verify(runtime(), &models, &converted.report, &given).unwrap_err();
    assert!(matches!(error, VerifyError::TooLong { limit_s: 0, .. }), "{error}");
}

#[test]
fn ends_of_a_wire_that_differ_are_refused_with_the_difference() {
    let from = |dims: &str| Build::new().input("x", dims).output("y", dims).node(node("Neg", "x", "y")).bytes();
    let to = |elem: DataType, dims: &str| {
        Build::new().typed_input("y", elem, dims).output("z", "N").node(node("Flatten", "y", "z")).bytes()
    };
    let advice = "; write another wire, or list one more graph that converts between them";
    for (given, elem, taken, why) in [
        ("N T 8", DataType::Float, "N T 5", "axis 2 has 8 elements, and 5 are expected"),
        ("N 8", DataType::Float, "N T 8", "one has 2 dimensions, and the other 3 dimensions"),
        ("N T 8", DataType::Int64, "N T 8", "the types differ"),
    ] {
        let error = refusal(&[("a", &from(given)), ("b", &to(elem, taken))], &wired(""));
        assert!(error.starts_with("'a.y' (FLOAT [N") && error.ends_with(&format!("): {why}{advice}")), "{error}");
    }
}

#[test]
fn frames_and_logits_without_an_axis_of_time_are_refused() {
    let search = |text: &str| JoinOptions { search: Some(Search::parse(text).unwrap()), ..wired("") };
    let encoder = Build::new().input("x", "N 8").output("encoder_out", "N 8").node(node("Neg", "x", "encoder_out"));
    let encoder = encoder.bytes();
    let (decoder, joiner) = (crate::search::stateless().bytes(), crate::search::joiner().bytes());
    let models: [(&str, &[u8]); 3] = [("encoder", &encoder), ("decoder", &decoder), ("joiner", &joiner)];
    let error = refusal(&models, &search("transducer blank=0 max_tokens=1"));
    assert_eq!(
        error,
        "search: the frames 'encoder.encoder_out' are [N, 8], and [rows, frames, features] or [rows, features, frames] is \
         expected: export the graph with an axis of frames"
    );
    let ctc = Build::new().input("encoder_out", "N 8").output("probs", "N 8").node(node("Neg", "encoder_out", "probs"));
    let error = refusal(&[models[0], ("ctc", &ctc.bytes())], &search("ctc blank=0"));
    assert_eq!(
        error,
        "search: the logits 'ctc.probs' are [N, 8], and [rows, frames, tokens] is expected: export the graph with an axis of \
         frames"
    );
}

#[test]
fn a_blank_behind_tokens_whose_number_only_a_run_shows_is_refused() {
    let encoder = Build::new().input("x", "N T 8").output("hidden", "N T 8").node(node("Neg", "x", "hidden")).bytes();
    let ctc = Build::new().input("hidden", "N T 8").output("probs", "N T tokens").node(node("Neg", "hidden", "probs"));
    let parts = parts(&[("encoder", &encoder), ("ctc", &ctc.bytes())]);
    let options = JoinOptions { search: Some(Search::parse("ctc blank=8").unwrap()), ..wired("") };
    let joined = join(&parts, &options).unwrap();
    let error = compare(&parts, &joined).unwrap_err().to_string();
    assert_eq!(error, "blank is 8, but the logits have 8 tokens, from 0 to 7");
}

#[test]
fn wires_that_lead_back_are_states_and_need_a_next_value() {
    let (first, second) = (
        Build::new().input("x", "N 3").output("y", "N 3").node(node("Neg", "x", "y")).bytes(),
        Build::new().input("z", "N 3").output("w", "N 3").node(node("Neg", "z", "w")).bytes(),
    );
    let models: [(&str, &[u8]); 2] = [("a", &first), ("b", &second)];
    let error = refusal(&models, &wired("<<<b.z, a.x>>>"));
    assert_eq!(
        error,
        "the wire <<<b.z, a.x>>> leads to the same or to an earlier graph, so it is a state, and an input such as 'b.z' has no \
         next value: begin the wire at an output, or list the graph of 'a.x' later"
    );
    let error = refusal(&models, &wired("<<<a.y, b.z>>> <<<b.w, a.x>>>"));
    let expected =
        "the model would have no outputs, because wires and states take all of them (a.y, b.w): name those that";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn a_state_across_graphs_is_refused_with_the_wire_that_it_is() {
    let graph = |input: &str, output: &str| {
        Build::new().input(input, "N 3").output(output, "N 3").node(node("Neg", input, output)).bytes()
    };
    let options = JoinOptions { states: vec![pair("a.x", "b.w")], ..wired("<<<a.y, b.z>>>") };
    let error = refusal(&[("a", &graph("x", "y")), ("b", &graph("z", "w"))], &options);
    assert_eq!(error, "the state <<<a.x, b.w>>> has its ends in two graphs: write it as a wire back, <<<b.w, a.x>>>");
}

#[test]
fn opsets_that_cannot_meet_are_refused_with_the_graph_and_a_way_out() {
    let graph = |input: &str, output: &str| {
        Build::new().input(input, "N 3").output(output, "N 3").node(node("Neg", input, output))
    };
    let (new, usual) = (graph("y", "z").bytes_of_opset(99), graph("x", "y").bytes());
    let error = refusal(&[("a", &usual), ("b", &new)], &wired(""));
    assert_eq!(
        error,
        "graph 'b' has opset 99, and nodes can be raised to opset 28 at most: export it with an older one"
    );
    let old = graph("x", "y").bytes_of_opset(6);
    let error = refusal(&[("a", &old), ("b", &graph("y", "z").bytes())], &wired(""));
    assert_eq!(
        error,
        "graph 'a' has opset 6, and nodes can be raised from opset 7 on: export it with opset 7 or a later one"
    );
}

#[test]
fn graphs_that_no_wire_joins_and_scales_over_rows_are_warned_of() {
    let front = Build::new().input("x", "N 3").output("y", "N 3").node(node("Neg", "x", "y")).bytes();
    let scaled = |input: &str| {
        let build = Build::new().input(input, "N 3").output("z", "N 3");
        let build = build.node(node("DynamicQuantizeLinear", input, "q scale zero"));
        build.node(node("DequantizeLinear", "q scale zero", "z")).bytes()
    };
    let warnings = |input: &str| {
        let parts = parts(&[("a", &front), ("b", &scaled(input))]);
        let joined = join(&parts, &wired("")).unwrap();
        let compared = compare(&parts, &joined).unwrap();
        // The backend runs rows that share a scale one by one.
        assert_eq!(compared.len(), 1, "{compared:?}");
        joined.converted.report.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let scale = "DynamicQuantizeLinear 'b.the dynamicquantizelinear' takes one quantization scale over all rows of a run, so \
                 each sequence has runs of its own, and the comparison has one row";
    assert_eq!(warnings("y"), [scale]);
    let [alone, first, _] = &warnings("w")[..] else { panic!("two graphs are alone, and one has a scale") };
    assert!(alone.starts_with("no wire leads to graph 'a' or from it, so it only shares the requests"), "{alone}");
    assert!(first.starts_with("no wire leads to graph 'b'"), "{first}");
}
