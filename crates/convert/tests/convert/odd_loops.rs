//! Loops and scans inside each other, and steps of layers whose states could be swapped.

use stateful_convert::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use stateful_convert::onnx::{DataType, Dim};
use stateful_convert::{Options, convert};

use crate::common::{Build, FLOAT, checked, dims, node, pair, refusal, with_graph};
use crate::odd::{along_first, behind};

/// A layer whose input is multiplied with zeros of `time`, after as many sums of it with itself.
#[test]
fn sums_of_sums_are_looked_at_once() {
    let behind_sums = |sums: usize| {
        let mut nodes = vec![
            node("Shape", "x", "shape"),
            node("Concat", "shape wide", "target").with_int("axis", 0),
            node("ConstantOfShape", "target", "a0"),
        ];
        let add = |sum: usize| (format!("a{sum} a{sum}"), format!("a{}", sum + 1));
        nodes.extend((0..sums).map(add).map(|(both, made)| NodeProto { name: None, ..node("Add", &both, &made) }));
        nodes.push(node("Unsqueeze", "x last", "wider"));
        nodes.push(node("Add", &format!("wider a{sums}"), "summed"));
        nodes.push(node("ReduceMean", "summed", "s").with_ints("axes", &[3]).with_int("keepdims", 0));
        behind(nodes).ints("wide", &[1], &[4096]).ints("last", &[1], &[3]).bytes()
    };
    for sums in [3, 70, 20_000] {
        convert(behind_sums(sums).into(), &along_first()).unwrap();
    }
    checked(behind_sums(70), &along_first()).unwrap();
}

/// A `Loop` that ends on a condition, with another in its body, `depth` deep.
fn nested(depth: usize) -> NodeProto {
    let value = |name: String, elem: DataType| ValueInfoProto::tensor(&name, elem.into(), &[] as &[Dim]);
    let name = |what: &str| format!("{what}{depth}");
    let mut inner = Vec::new();
    if depth > 0 {
        inner.push(nested(depth - 1));
    }
    let int64 = DataType::Int64;
    inner.extend([
        node("Add", &format!("{} one", name("count")), &name("next")),
        node("Less", &format!("{} limit", name("next")), &name("goes")),
    ]);
    let body = GraphProto {
        name: Some(name("body")),
        node: inner,
        input: vec![value(name("turn"), int64), value(name("go"), DataType::Bool), value(name("count"), int64)],
        output: vec![value(name("goes"), DataType::Bool), value(name("next"), int64)],
        ..GraphProto::default()
    };
    with_graph(node("Loop", "- true zero", &name("turned")), "body", body)
}

#[test]
fn loops_in_loops_are_followed_to_a_limit() {
    let build = behind(vec![
        node("Cast", "one", "true").with_int("to", 9),
        nested(4),
        node("Cast", "turned4", "number").with_int("to", 1),
        node("Add", "x number", "s"),
    ]);
    let build = build.ints("one", &[], &[1]).ints("zero", &[], &[0]).ints("limit", &[], &[900]);
    // It gives the same number for inputs of all lengths.
    convert(build.bytes().into(), &along_first()).unwrap();
}

/// How many turns are followed doesn't depend on the graph around a loop.
#[test]
fn loops_in_large_graphs_are_followed() {
    let name = |what: &str, number: usize| format!("{what}.{number}");
    let mut nodes = vec![node("Cast", "one", "true").with_int("to", 9)];
    let mut last = "x".to_owned();
    for number in 0..2000 {
        let next = name("large", number);
        nodes.push(NodeProto { name: Some(next.clone()), ..node("Identity", &last, &next) });
        last = next;
    }
    for number in 0..3 {
        let mut turning = nested(0);
        turning.attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()).for_each(|body| {
            body.node.push(node("Identity", "count0", "each"));
            body.output.push(ValueInfoProto::tensor("each", DataType::Int64.into(), &[] as &[Dim]));
        });
        let [turned, turns, shape, added, sum] =
            ["turned", "turns", "shape", "added", "sum"].map(|what| name(what, number));
        turning.output.push(turned.clone());
        turning.output[0] = name("count", number);
        // The shape is [1], after so many turns.
        let all = [
            turning,
            node("Shape", &turned, &turns),
            node("Sub", &format!("{turns} before"), &shape),
            node("Expand", &format!("weights {shape}"), &added),
            node("Add", &format!("{last} {added}"), &sum),
        ];
        nodes.extend(all.into_iter().map(|node| NodeProto { name: Some(name(node.op(), number)), ..node }));
        last = sum;
    }
    nodes.push(node("Identity", &last, "s"));
    let build = behind(nodes).ints("one", &[], &[1]).ints("zero", &[], &[0]).ints("limit", &[], &[300]);
    let build = build.ints("before", &[], &[299]).weights("weights", &[4]);
    checked(build.bytes(), &along_first()).unwrap();
}

#[test]
fn scans_of_more_inputs_than_they_have_are_refused() {
    let body = GraphProto {
        node: vec![node("Identity", "each", "made")],
        input: vec![ValueInfoProto::tensor("each", FLOAT, &dims("batch 4"))],
        output: vec![ValueInfoProto::tensor("made", FLOAT, &dims("batch 4"))],
        ..GraphProto::default()
    };
    let scan = |count: i64, axis: i64| {
        let scan = with_graph(node("Scan", "x", "s"), "body", body.clone()).with_int("num_scan_inputs", count);
        behind(vec![scan.with_ints("scan_output_axes", &[axis])]).bytes()
    };
    let error = refusal(scan(i64::MAX, 0), &along_first());
    assert!(error.starts_with("Scan 'the scan' has a body with other inputs"), "{error}");
    for axis in [i64::MAX, i64::MIN, 3] {
        let error = refusal(scan(1, axis), &along_first());
        assert!(error.starts_with("Scan 'the scan' stacks its output along axis "), "{error}");
    }
}

#[test]
fn loops_and_scans_without_what_they_need_are_refused() {
    let body = GraphProto { node: vec![node("Identity", "x", "inner")], ..GraphProto::default() };
    let error = refusal(behind(vec![with_graph(node("Loop", "", "s"), "body", body.clone())]).bytes(), &along_first());
    assert!(error.starts_with("Loop 'the loop' has a body with other inputs or outputs"), "{error}");
    let error = refusal(behind(vec![with_graph(node("If", "", "s"), "then_branch", body)]).bytes(), &along_first());
    assert!(error.starts_with("If 'the if' has no condition"), "{error}");
}

#[test]
fn a_fixed_axis_is_not_taken_for_the_steps_beside_open_ones() {
    let build = |dims: &str| {
        let build = Build::new().input("x", dims).output("y", dims).weights("k", &[2, 2, 1, 3]);
        build.node(node("Conv", "x k", "y").with_ints("pads", &[0, 2, 0, 0]))
    };
    let message = refusal(build("batch 2 time 8").bytes(), &Options::default());
    assert!(message.contains("along x@2 nothing needs earlier steps"), "{message}");
    assert!(!message.contains("x@3"), "{message}");
    let (converted, _) = checked(build("batch 2 3 8").bytes(), &Options::default()).unwrap();
    assert_eq!(converted.report.time[0].to_string(), "x@3");
}

/// A layer of single steps, with its states outside.
fn step_of_lstm() -> Build {
    let build = Build::new().input("x", "1 batch 4").input("h", "1 batch 3").input("c", "1 batch 3");
    let build = build.output("y", "1 1 batch 3").output("hn", "1 batch 3").output("cn", "1 batch 3");
    let build = build.recurrent_weights(4).node(node("Identity", "h", "h0"));
    let layer = node("LSTM", "x w r b - h0 c", "y h_made cn").with_int("hidden_size", 3);
    build.node(layer).node(node("Neg", "h_made", "negative")).node(NodeProto::make(
        "Identity",
        "end",
        &["h_made"],
        &["hn"],
    ))
}

/// Two layers, with one tensor for the hidden states of both and one for the cell states, as in PyTorch.
fn step_of_two_lstms() -> Build {
    let build = Build::new().input("x", "1 batch 3").input("h", "2 batch 3").input("c", "2 batch 3");
    let build = build.output("y", "1 1 batch 3").output("hn", "2 batch 3").output("cn", "2 batch 3");
    let build = build.weights("w", &[1, 12, 3]).weights("r", &[1, 12, 3]).ints("one", &[1], &[1]);
    let build = build.ints("zero", &[1], &[0]).ints("two", &[1], &[2]);
    let named = |op: &str, inputs: &str, outputs: &str| {
        let made = node(op, inputs, outputs);
        NodeProto { name: Some(outputs.replace(' ', "_")), ..made }
    };
    let nodes = [
        named("Slice", "h zero one zero", "h1"),
        named("Slice", "c zero one zero", "c1"),
        named("Slice", "h one two zero", "h2"),
        named("Slice", "c one two zero", "c2"),
        named("LSTM", "x w r - - h1 c1", "y1 hn1 cn1").with_int("hidden_size", 3),
        named("Squeeze", "y1 one", "x2"),
        named("LSTM", "x2 w r - - h2 c2", "y hn2 cn2").with_int("hidden_size", 3),
        named("Concat", "hn1 hn2", "hn").with_int("axis", 0),
        named("Concat", "cn1 cn2", "cn").with_int("axis", 0),
    ];
    nodes.into_iter().fold(build, Build::node)
}

#[test]
fn the_states_of_several_layers_cannot_be_swapped() {
    let states = |h: &str, c: &str| Options { states: vec![pair("h", h), pair("c", c)], ..Options::default() };
    assert!(checked(step_of_two_lstms().bytes(), &states("hn", "cn")).is_ok());
    let message = refusal(step_of_two_lstms().bytes(), &states("cn", "hn"));
    assert!(message.contains("'h' and 'cn' can't be the two ends of a state: in LSTM 'y1_hn1_cn1'"), "{message}");
    // One state for all: whichever of the two is in front.
    for order in ["h_end c_end", "c_end h_end"] {
        let build = Build::new().input("x", "1 batch 4").input("s", "2 batch 3").output("y", "1 1 batch 3");
        let build = build.output("sn", "2 batch 3").recurrent_weights(4).ints("zero", &[1], &[0]);
        let build = build.ints("one", &[1], &[1]).ints("two", &[1], &[2]);
        let slice =
            |name: &str, from: &str, to: &str| NodeProto::make("Slice", name, &["s", from, to, "zero"], &[name]);
        let build = build.node(slice("h0", "zero", "one")).node(slice("c0", "one", "two"));
        let build = build.node(node("LSTM", "x w r b - h0 c0", "y h_end c_end").with_int("hidden_size", 3));
        let build = build.node(node("Concat", order, "sn").with_int("axis", 0));
        assert!(checked(build.bytes(), &Options { states: vec![pair("s", "sn")], ..Options::default() }).is_ok());
    }
}

#[test]
fn the_two_states_of_a_layer_cannot_be_swapped() {
    let states = |h: &str, c: &str| Options { states: vec![pair("h", h), pair("c", c)], ..Options::default() };
    let (_, compared) = checked(step_of_lstm().bytes(), &states("hn", "cn")).unwrap();
    assert_eq!(compared.last().unwrap().what, "rows together and alone");
    let message = refusal(step_of_lstm().bytes(), &states("cn", "hn"));
    let expected = "'h' and 'cn' can't be the two ends of a state: in LSTM 'the lstm', one is the hidden state";
    assert!(message.contains(expected), "{message}");
}
