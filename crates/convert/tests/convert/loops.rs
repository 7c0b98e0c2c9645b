//! `Scan` and `Loop`: what they carry, along which axis, and which of them are refused.

use stateful_convert::onnx::DataType;
use stateful_convert::onnx::schema::{GraphProto, NodeProto, TensorProto, ValueInfoProto};
use stateful_convert::report::StartsAt;
use stateful_convert::{InputAxis, Options, convert, passes_on_rows};

use crate::common::{Build, FLOAT, checked, dims, node, pair, refusal, states, with_graph};
use crate::layers::{any, assert_equal};

/// A `Scan` that adds up: state `s`, scanned `x` and `factor`.
fn scan(edit: impl Fn(NodeProto) -> NodeProto) -> NodeProto {
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![node("Mul", "x_in f_in", "p"), node("Add", "s_in p", "s_out"), node("Tanh", "s_out", "y_out")],
        input: ["s_in", "x_in", "f_in"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("batch 4"))).to_vec(),
        output: ["s_out", "y_out"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("batch 4"))).to_vec(),
        ..GraphProto::default()
    };
    edit(with_graph(node("Scan", "s x f", "last y"), "body", body).with_int("num_scan_inputs", 2))
}

fn scanning(edit: impl Fn(NodeProto) -> NodeProto) -> Build {
    Build::new()
        .input("x", "2 time 4")
        .input("f", "2 time 4")
        .output("y", "2 time 4")
        .output("last", "2 4")
        .weights("s", &[2, 4])
        .node(scan(edit))
}

#[test]
fn scans_along_any_axis_get_their_states() {
    let edit = |node: NodeProto| node.with_ints("scan_input_axes", &[1, -2]).with_ints("scan_output_axes", &[1]);
    let (converted, compared) = checked(scanning(edit).bytes(), &any()).unwrap();
    assert_eq!(states(&converted), ["the.scan.0_in"]);
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Model);
    assert_equal(&compared);
}

#[test]
fn a_counter_that_starts_at_a_constant_is_not_warned_of() {
    let counter = |name: &str| ValueInfoProto::tensor(name, DataType::Int64.into(), &dims("1"));
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![
            node("Add", "c_in one", "c_out"),
            node("Cast", "c_in", "turn").with_int("to", FLOAT.into()),
            node("Mul", "x_in turn", "y_out"),
        ],
        input: vec![counter("c_in"), ValueInfoProto::tensor("x_in", FLOAT, &dims("batch 4"))],
        output: vec![counter("c_out"), ValueInfoProto::tensor("y_out", FLOAT, &dims("batch 4"))],
        ..GraphProto::default()
    };
    let build =
        Build::new().input("x", "time 1 4").output("y", "time 1 4").ints("c", &[1], &[7]).ints("one", &[1], &[1]);
    let scan = with_graph(node("Scan", "c x", "last y"), "body", body).with_int("num_scan_inputs", 1);
    let (converted, compared) = checked(build.node(scan).bytes(), &any()).unwrap();
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Model);
    let warnings: Vec<String> = converted.report.warnings.iter().map(ToString::to_string).collect();
    assert!(!warnings.iter().any(|warning| warning.contains("start at constants")), "{warnings:?}");
    assert_equal(&compared);
}

#[test]
fn backward_scans_are_refused() {
    let edit = |node: NodeProto| {
        let node = node.with_ints("scan_input_axes", &[1, 1]).with_ints("scan_output_axes", &[1]);
        node.with_ints("scan_input_directions", &[1, 1])
    };
    assert!(refusal(scanning(edit).bytes(), &any()).starts_with("Scan 'the scan' scans backwards"));
}

/// A `Loop` over `x [time, 4]` whose body has these nodes. It carries `s [4]`, and its condition is `go`.
pub fn looping(body: Vec<NodeProto>) -> Build {
    let scalar = |name: &str, elem: DataType| ValueInfoProto::tensor(name, elem.into(), &[]);
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: body,
        input: vec![
            scalar("i", DataType::Int64),
            scalar("on", DataType::Bool),
            ValueInfoProto::tensor("s_in", FLOAT, &dims("4")),
        ],
        output: vec![
            scalar("go", DataType::Bool),
            ValueInfoProto::tensor("s_out", FLOAT, &dims("4")),
            ValueInfoProto::tensor("y_out", FLOAT, &dims("4")),
        ],
        ..GraphProto::default()
    };
    let shape = NodeProto::make("Shape", "a", &["x"], &["shape"]).with_int("end", 1);
    Build::new()
        .input("x", "time 4")
        .output("y", "time 4")
        .weights("s", &[4])
        .ints("none", &[0], &[])
        .node(shape)
        .node(node("Reshape", "shape none", "turns"))
        .node(with_graph(node("Loop", "turns - s", "last y"), "body", body))
}

#[test]
fn loops_read_a_step_a_turn() {
    let gather = || NodeProto::make("Gather", "g", &["x", "i"], &["now"]).with_int("axis", 0);
    let add = || node("Add", "s_in now", "s_out");
    let on = || node("Identity", "on", "go");
    let good = looping(vec![gather(), add(), node("Tanh", "s_out", "y_out"), on()]);
    let (converted, compared) = checked(good.bytes(), &any()).unwrap();
    assert_eq!(states(&converted), ["the.loop.0_in"]);
    assert_equal(&compared);

    let last = NodeProto::make("Gather", "g", &["x", "i"], &["now"]).with_int("axis", 0);
    let counts = looping(vec![
        last,
        add(),
        node("Cast", "i", "number").with_int("to", 1),
        node("Add", "s_out number", "y_out"),
        on(),
    ]);
    let message = refusal(counts.bytes(), &any());
    assert!(message.contains("computes with the number of the step"), "{message}");

    let reduce = NodeProto::make("ReduceSum", "sum", &["s_in"], &["sum"]).with_int("keepdims", 0);
    let ends = looping(vec![
        gather(),
        add(),
        node("Tanh", "s_out", "y_out"),
        reduce,
        node("Cast", "sum", "go").with_int("to", 9),
    ]);
    let ends = ends.bytes();
    let message = refusal(ends.clone(), &any());
    assert!(message.contains("ends on a condition that depends on data"), "{message}");
    // It may run over something else.
    assert_eq!(passes_on_rows(ends.into(), &[InputAxis { input: "x".to_owned(), axis: 0 }]), None);
}

#[test]
fn loops_whose_condition_is_a_constant_turn_as_often_as_there_are_steps() {
    let body = || {
        let gather = NodeProto::make("Gather", "g", &["x", "i"], &["now"]).with_int("axis", 0);
        vec![gather, node("Add", "s_in now", "s_out"), node("Tanh", "s_out", "y_out"), node("Identity", "yes", "go")]
    };
    // The layer behind the loop starts at zeros for the rows of its input.
    let behind = |value: i32| {
        let mut build = looping(body());
        build.graph.output.clear();
        build.graph.initializer.push(TensorProto {
            name: Some("yes".to_owned()),
            data_type: Some(DataType::Bool.into()),
            int32_data: vec![value],
            ..TensorProto::default()
        });
        let build =
            build.output("z", "time 1 1 3").recurrent_weights(3).ints("one", &[1], &[1]).ints("three", &[1], &[3]);
        let nodes = [
            node("Unsqueeze", "y one", "frames"),
            node("Shape", "frames", "sizes"),
            node("Gather", "sizes one", "rows"),
            node("Concat", "one rows three", "of_start").with_int("axis", 0),
            node("ConstantOfShape", "of_start", "start"),
            node("GRU", "frames w r b - start", "z").with_int("hidden_size", 3),
        ];
        nodes.into_iter().fold(build, Build::node).bytes()
    };
    let (converted, compared) = checked(behind(1), &any()).unwrap();
    assert_eq!(states(&converted), ["the.loop.0_in", "the.gru.h_in"]);
    assert_equal(&compared);
    let message = refusal(behind(0), &any());
    assert!(message.contains("turns 1 times for 48 steps"), "{message}");
}

#[test]
fn a_loop_over_the_rows_that_passes_nothing_on_mixes_none() {
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![node("Tanh", "x_in", "y_out")],
        input: vec![ValueInfoProto::tensor("x_in", FLOAT, &dims("4"))],
        output: vec![ValueInfoProto::tensor("y_out", FLOAT, &dims("4"))],
        ..GraphProto::default()
    };
    let rows = [InputAxis { input: "x".to_owned(), axis: 0 }];
    let scan =
        |body, inputs, outputs| with_graph(node("Scan", inputs, outputs), "body", body).with_int("num_scan_inputs", 1);
    let build = || Build::new().input("x", "batch 4").output("y", "batch 4").weights("s", &[4]);
    assert_eq!(passes_on_rows(build().node(scan(body.clone(), "x", "y")).bytes().into(), &rows), None);
    let sums = GraphProto {
        node: vec![node("Add", "s_in x_in", "y_out"), node("Identity", "y_out", "s_out")],
        input: ["s_in", "x_in"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("4"))).to_vec(),
        output: ["s_out", "y_out"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("4"))).to_vec(),
        ..body
    };
    let found = passes_on_rows(build().node(scan(sums, "s x", "last y")).bytes().into(), &rows);
    assert_eq!(found.unwrap(), "Scan 'the scan'");
}

/// A `Scan` over the steps that starts at an input.
fn scan_from_an_input() -> Vec<u8> {
    let of_body = |name: &str| ValueInfoProto::tensor(name, FLOAT, &dims("batch 4"));
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![node("Add", "s_in x_in", "s_out"), node("Identity", "s_out", "y_out")],
        input: ["s_in", "x_in"].map(of_body).to_vec(),
        output: ["s_out", "y_out"].map(of_body).to_vec(),
        ..GraphProto::default()
    };
    let build = Build::new().input("h", "batch 4").input("x", "time batch 4");
    let build = build.output("hn", "batch 4").output("y", "time batch 4");
    build.node(with_graph(node("Scan", "h x", "hn y"), "body", body).with_int("num_scan_inputs", 1)).bytes()
}

#[test]
fn a_scan_that_starts_at_a_state_of_the_model_goes_on_from_it() {
    let message = refusal(scan_from_an_input(), &any());
    assert!(message.contains("name all of them and their outputs: '<<<h, hn>>>'"), "{message}");
    let options = Options { states: vec![pair("h", "hn")], ..any() };
    let converted = convert(scan_from_an_input().into(), &options).unwrap();
    assert_eq!(states(&converted), ["h"]);
    assert_eq!(converted.report.warnings, []);
}

#[test]
fn a_loop_that_starts_at_a_state_of_the_model_goes_on_from_it() {
    let gather = NodeProto::make("Gather", "g", &["x", "i"], &["now"]).with_int("axis", 0);
    let body =
        vec![gather, node("Add", "s_in now", "s_out"), node("Tanh", "s_out", "y_out"), node("Identity", "on", "go")];
    let mut build = looping(body);
    build.graph.initializer.retain(|weight| weight.name() != "s");
    let bytes = build.input("s", "4").output("last", "4").bytes();
    let message = refusal(bytes.clone(), &any());
    assert!(message.contains("name all of them and their outputs: '<<<s, last>>>'"), "{message}");
    let converted = convert(bytes.into(), &Options { states: vec![pair("s", "last")], ..any() }).unwrap();
    assert_eq!(states(&converted), ["s"]);
    assert_eq!(converted.report.warnings, []);
}

#[test]
fn a_bool_that_a_loop_carries_is_a_state_unless_it_is_the_condition() {
    // The steps behind the first with a large element are passed on.
    let gather = || NodeProto::make("Gather", "g", &["x", "i"], &["now"]).with_int("axis", 0);
    let add = || node("Add", "s_in now", "s_out");
    let on = || node("Identity", "on", "go");
    let carrying = |nodes: Vec<NodeProto>, carried: &str| {
        let mut build = looping(nodes).ints("seen", &[], &[0]);
        let seen = build.graph.initializer.iter_mut().find(|tensor| tensor.name() == "seen").unwrap();
        (seen.data_type, seen.int64_data, seen.int32_data) = (Some(DataType::Bool.into()), Vec::new(), vec![0]);
        let half = stateful_convert::onnx::schema::TensorProto {
            name: Some("half".to_owned()),
            data_type: Some(FLOAT),
            float_data: vec![0.5],
            ..Default::default()
        };
        build.graph.initializer.push(half);
        let of_loop = build.graph.node.last_mut().unwrap();
        of_loop.input.push("seen".to_owned());
        of_loop.output = ["last", "at_end", "y"].map(str::to_owned).to_vec();
        let body = of_loop.attribute[0].g.as_mut().unwrap();
        let flag = |name: &str| ValueInfoProto::tensor(name, DataType::Bool.into(), &[]);
        body.input.push(flag("seen_in"));
        body.output.insert(2, flag(carried));
        build.bytes()
    };
    let sees = vec![
        gather(),
        NodeProto::make("ReduceMax", "max", &["now"], &["most"]).with_int("keepdims", 0),
        node("Greater", "most half", "is_large"),
        node("Or", "seen_in is_large", "seen_out"),
        add(),
        node("Where", "seen_out now s", "y_out"),
        on(),
    ];
    let (converted, compared) = checked(carrying(sees, "seen_out"), &any()).unwrap();
    assert_eq!(states(&converted), ["the.loop.0_in", "the.loop.1_in"]);
    assert_eq!(converted.report.states[1].elem, i32::from(DataType::Bool));
    assert_equal(&compared);
    // A copy of the condition says nothing of the steps.
    let copy = NodeProto::make("Identity", "copy", &["go"], &["again"]);
    let copies = vec![gather(), add(), node("Tanh", "s_out", "y_out"), on(), copy];
    let (converted, _) = checked(carrying(copies, "again"), &any()).unwrap();
    assert_eq!(states(&converted), ["the.loop.0_in"]);
}
