//! Graphs that are refused, or that keep a part of their recurrences.

use stateful_convert::onnx::schema::{GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, type_proto};
use stateful_convert::onnx::{DataType, bracketed, read};
use stateful_convert::{Hint, InputAxis, Options, convert};

use crate::common::{Build, FLOAT, checked, dims, node, pair, refusal, states, with_graph, with_text};
use crate::layers::{any, assert_equal, layer};
use crate::loops::looping;

#[test]
fn loops_that_read_the_last_state_of_a_layer_are_refused() {
    let body = vec![
        NodeProto::make("Gather", "g", &["x", "i"], &["now"]).with_int("axis", 0),
        node("Mul", "now last_of_layer", "s_out"),
        node("Tanh", "s_out", "y_out"),
        node("Identity", "on", "go"),
    ];
    let mut build = looping(body).weights("w", &[1, 12, 4]).weights("r", &[1, 12, 4]).ints("axes", &[2], &[0, 1]);
    let layer = [
        node("Unsqueeze", "x batch", "rows"),
        node("GRU", "rows w r", "- last_h").with_int("hidden_size", 4),
        node("Squeeze", "last_h axes", "last_of_layer"),
    ];
    build.graph.node.splice(0..0, layer);
    let message = refusal(build.ints("batch", &[1], &[1]).bytes(), &any());
    assert!(message.contains("Loop 'the loop' takes 'last_of_layer' of the last step in each step"), "{message}");
}

#[test]
fn a_layer_that_starts_at_the_end_of_another_is_refused_although_the_model_has_states() {
    let build = Build::new().input("x", "time 1 4").input("h", "1 1 3").output("y", "time 1 1 3").output("hn", "1 1 3");
    let build = build.recurrent_weights(3).node(node("GRU", "x w r b - h", "- hn").with_int("hidden_size", 3));
    let second =
        NodeProto { name: Some("second".to_owned()), ..node("GRU", "x w r b - hn", "y").with_int("hidden_size", 3) };
    let options = Options { states: vec![crate::common::pair("h", "hn")], ..any() };
    let (converted, _) = checked(build.node(second).bytes(), &options).unwrap();
    assert_eq!(states(&converted), ["h"]);
    assert!(
        converted.report.warnings[0].to_string().contains("GRU 'second' takes initial_h from the steps"),
        "{:?}",
        converted.report.warnings
    );
}

#[test]
fn layers_in_a_branch_are_refused() {
    let branch = |op: &str| GraphProto {
        name: Some("branch".to_owned()),
        node: vec![node(op, if op == "LSTM" { "x w r b" } else { "x" }, "z").with_int("hidden_size", 3)],
        output: vec![ValueInfoProto::tensor("z", FLOAT, &dims("time 1 batch 3"))],
        ..GraphProto::default()
    };
    let choice =
        with_graph(with_graph(node("If", "c", "y"), "then_branch", branch("LSTM")), "else_branch", branch("LSTM"));
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(4);
    let message = refusal(build.typed_input("c", DataType::Bool, "").node(choice).bytes(), &any());
    assert!(message.contains("takes a branch that depends on data"), "{message}");
}

/// A layer behind other nodes, which make `z [time, batch, 4]` of `x`.
pub fn behind(nodes: Vec<NodeProto>) -> Build {
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(4);
    let build = nodes.into_iter().fold(build, Build::node);
    build.node(node("LSTM", "z w r b", "y").with_int("hidden_size", 3))
}

#[test]
fn limits_on_the_length_of_the_input_are_refused() {
    // A slice of the first 100 steps, of the last 100, and a part whose end is computed.
    let slice = |start: &str, end: &str| NodeProto::make("Slice", "s", &["x", start, end, "zero"], &["z"]);
    let shape = || NodeProto::make("Shape", "a", &["x"], &["length"]).with_int("end", 1);
    let to_float = |from: &str, to: &str| NodeProto::make("Cast", to, &[from], &[to]).with_int("to", 1);
    let branch = |op: &str| GraphProto {
        name: Some("branch".to_owned()),
        node: vec![NodeProto::make(op, "in branch", &["x"], &["of_branch"])],
        output: vec![ValueInfoProto::tensor("of_branch", FLOAT, &dims("time batch 4"))],
        ..GraphProto::default()
    };
    let choice = with_graph(
        with_graph(NodeProto::make("If", "s", &["is_long"], &["z"]), "then_branch", branch("Relu")),
        "else_branch",
        branch("Identity"),
    );
    let is_long = || NodeProto::make("Greater", "long", &["length", "hundred"], &["is_long"]);
    let cases = [
        (vec![slice("zero", "hundred")], "Slice 's' limits the length of the input (it makes 100 of 12288)"),
        (vec![slice("minus", "most")], "Slice 's' limits the length of the input (it makes 100 of 12288)"),
        (
            vec![shape(), NodeProto::make("Min", "m", &["length", "hundred"], &["end"]), slice("zero", "end")],
            "Slice 's' limits the length of the input",
        ),
        (vec![shape(), is_long(), choice], "If 's' takes a branch that depends on the length of the input"),
        (
            vec![
                shape(),
                is_long(),
                to_float("is_long", "factor"),
                NodeProto::make("Add", "s", &["x", "factor"], &["z"]),
            ],
            "Add 's' takes 'factor', which depends on the length of the whole input",
        ),
    ];
    for (nodes, expected) in cases {
        let build = behind(nodes).ints("zero", &[1], &[0]).ints("hundred", &[1], &[100]).ints("minus", &[1], &[-100]);
        let message = refusal(build.ints("most", &[1], &[i64::MAX]).bytes(), &any());
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn operators_and_functions_of_other_domains_are_not_those_of_onnx() {
    for op in ["Relu", "LSTM", "Shape", "ReduceMax", "Loop"] {
        let foreign = NodeProto { domain: Some("com.x".to_owned()), ..NodeProto::make(op, "s", &["x"], &["z"]) };
        let message = refusal(behind(vec![foreign]).bytes(), &along_time());
        let expected = format!("com.x.{op} 's' gets the steps, and it isn't known how com.x.{op} treats them");
        assert!(message.contains(&expected), "{message}");
    }
    let relu = || NodeProto::make("Relu", "s", &["x"], &["z"]);
    let named = NodeProto { domain: Some("ai.onnx".to_owned()), ..relu() };
    assert_equal(&checked(behind(vec![named]).bytes(), &along_time()).unwrap().1);
    // A function of the model is used in place of the operator.
    for (domain, name) in [("", "Relu"), ("ai.onnx", "Relu"), ("com.microsoft", "FusedMatMul")] {
        let mut model = read(behind(vec![relu()]).bytes().into()).unwrap();
        model.functions.push(stateful_convert::onnx::schema::FunctionProto {
            name: Some(name.to_owned()),
            domain: Some(domain.to_owned()),
            ..Default::default()
        });
        let message = refusal(stateful_convert::onnx::write(&model), &along_time());
        assert!(message.starts_with(&format!("the model has a function '{name}' with the name")), "{message}");
    }
}

/// Two layers, each over an input of its own.
pub fn two_inputs() -> Build {
    let build = Build::new().input("x", "time batch 4").input("m", "frames batch 4").recurrent_weights(3);
    let build = build.output("y", "time 1 batch 3").output("z", "frames 1 batch 3");
    let gru = |name: &str, from: &str, to: &str| {
        NodeProto::make("GRU", name, &[from, "w", "r", "b"], &[to]).with_int("hidden_size", 3)
    };
    build.node(gru("first", "x", "y")).node(gru("second", "m", "z"))
}

#[test]
fn inputs_whose_steps_have_different_names_must_be_named() {
    let error = convert(two_inputs().bytes().into(), &any()).unwrap_err();
    let expected = "GRU 'second' passes a state along m@0, and x@0 could have the steps as well; name the axes that have \
                    them, which may be all: x@0,m@0";
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.hints(), [Hint::Time]);
    let axis = |input: &str| InputAxis { input: input.to_owned(), axis: 0 };
    let both = Options { time: vec![axis("x"), axis("m")], ..any() };
    let (converted, compared) = checked(two_inputs().bytes(), &both).unwrap();
    assert_eq!(states(&converted), ["first.h_in", "second.h_in"]);
    assert_equal(&compared);
    let one = Options { time: vec![axis("x")], ..any() };
    assert_eq!(states(&convert(two_inputs().bytes().into(), &one).unwrap()), ["first.h_in"]);
}

/// A layer over `x`, beside these nodes, which make `z` of `m [frames, batch, 4]`.
fn beside(nodes: Vec<NodeProto>) -> Build {
    let build = Build::new().input("x", "time batch 4").input("m", "frames batch 4").recurrent_weights(3);
    let build = build.output("y", "time 1 batch 3").output("z", "a b c").weights("s", &[4]);
    let build = build.weights("k", &[4, 4, 3]).weights("w2", &[2, 9, 4]).weights("r2", &[2, 9, 3]);
    let gru = NodeProto::make("GRU", "first", &["x", "w", "r", "b"], &["y"]).with_int("hidden_size", 3);
    nodes.into_iter().fold(build.node(gru), Build::node)
}

#[test]
fn recurrences_on_another_input_that_get_no_state_are_named() {
    let bidirectional =
        with_text(NodeProto::make("GRU", "second", &["m", "w2", "r2"], &["z"]), "direction", "bidirectional");
    let forward = NodeProto::make("GRU", "second", &["m", "w", "r", "b"], &["a"]).with_int("hidden_size", 3);
    let softmax = |from: &str| NodeProto::make("Softmax", "mixes", &[from], &["z"]).with_int("axis", 0);
    let to_back = NodeProto::make("Transpose", "t", &["m"], &["last"]).with_ints("perm", &[1, 2, 0]);
    let to_front = NodeProto::make("Transpose", "u", &["c"], &["d"]).with_ints("perm", &[2, 0, 1]);
    let conv = |pads: &[i64]| NodeProto::make("Conv", "second", &["last", "k"], &["c"]).with_ints("pads", pads);
    let causal = vec![to_back.clone(), conv(&[2, 0]), to_front.clone(), softmax("d")];
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![node("Add", "s_in x_in", "s_out"), node("Tanh", "s_out", "y_out")],
        input: ["s_in", "x_in"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("4"))).to_vec(),
        output: ["s_out", "y_out"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("4"))).to_vec(),
        ..GraphProto::default()
    };
    let scan = NodeProto::make("Scan", "second", &["s", "m"], &["", "a"]).with_int("num_scan_inputs", 1);
    let scan = with_graph(scan, "body", body);
    let backward = scan.clone().with_ints("scan_input_directions", &[1]);
    let in_branch = || GraphProto {
        name: Some("branch".to_owned()),
        node: vec![NodeProto { output: vec!["of_branch".to_owned()], ..forward.clone() }],
        output: vec![ValueInfoProto::tensor("of_branch", FLOAT, &dims("frames 1 batch 3"))],
        ..GraphProto::default()
    };
    let branch = with_graph(NodeProto::make("If", "second", &["yes"], &["z"]), "then_branch", in_branch());
    let branch = with_graph(branch, "else_branch", in_branch());
    for (nodes, second, why) in [
        (vec![forward.clone(), softmax("a")], "GRU 'second'", "Softmax 'mixes' takes a softmax over time; "),
        (vec![bidirectional.with_int("hidden_size", 3)], "GRU 'second'", "GRU 'second' is bidirectional; "),
        (causal, "Conv 'second'", "Softmax 'mixes' takes a softmax over time; "),
        (vec![scan, softmax("a")], "Scan 'second'", "Softmax 'mixes' takes a softmax over time; "),
        (vec![backward, softmax("a")], "Scan 'second'", "Scan 'second' scans backwards; "),
        (vec![branch], "If 'second'", "If 'second' has a recurrence in a branch; "),
    ] {
        let mut build = beside(nodes);
        let yes = TensorProto {
            name: Some("yes".to_owned()),
            data_type: Some(DataType::Bool.into()),
            int32_data: vec![1],
            ..TensorProto::default()
        };
        build.graph.initializer.push(yes);
        let bytes = build.bytes();
        let converted = convert(bytes.clone().into(), &any()).unwrap();
        assert_eq!(states(&converted), ["first.h_in"], "{why}");
        let [warning] = converted.report.warnings.as_slice() else { panic!("{why}: {:?}", converted.report.warnings) };
        let message = warning.to_string();
        let begin = format!(
            "these nodes got no state, so they begin anew in each request: {second} along m@0. In the way:\n{why}"
        );
        let end = "\nif each request has the whole input of these nodes, nothing is wrong; to confirm that, name the axes that have the \
                   steps: x@0";
        assert!(message.starts_with(&begin) && message.ends_with(end), "{message}");
        assert_eq!(warning.hint(), Some(Hint::Time));
        // The caller says that a request has all of m.
        assert_eq!(convert(bytes.into(), &along_time()).unwrap().report.warnings, []);
    }
    // Neither a convolution over a whole input nor rows of the batch pass on a state.
    let same = vec![to_back, conv(&[1, 1]), to_front, softmax("d")];
    let over_rows = vec![NodeProto::make("Softmax", "mixes", &["m"], &["z"]).with_int("axis", 1)];
    let no_batch = vec![NodeProto { output: vec!["z".to_owned()], ..forward }];
    for (nodes, frames) in [(same, "frames batch 4"), (over_rows, "frames batch 4"), (no_batch, "5 rows 4")] {
        let mut build = beside(nodes);
        build.graph.input[1].set_tensor(FLOAT, &dims(frames));
        assert_eq!(convert(build.bytes().into(), &any()).unwrap().report.warnings, []);
    }
}

#[test]
fn strides_of_branches_side_by_side_are_not_multiplied() {
    let build = Build::new().input("x", "batch 4 time").output("y", "batch 3 steps");
    let conv = |name: &str, from: &str, weights: &str, to: &str, stride: i64| {
        let conv = NodeProto::make("Conv", name, &[from, weights], &[to]).with_ints("strides", &[stride]);
        conv.with_ints("pads", &[3 - stride, 0])
    };
    let build = build.weights("k", &[3, 4, 3]).weights("l", &[3, 4, 3]).weights("m", &[3, 3, 3]);
    let build = build.node(conv("a", "x", "k", "of_a", 2)).node(conv("b", "x", "l", "of_b", 2));
    let build = build.node(node("Add", "of_a of_b", "sum")).node(conv("c", "sum", "m", "y", 3));
    let (converted, compared) = checked(build.bytes(), &any()).unwrap();
    assert_eq!(converted.report.steps_multiple, 6);
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
    let metadata = read(converted.model.into()).unwrap().metadata_props;
    let written = metadata.iter().find(|entry| entry.key() == "stateful.steps_multiple").unwrap();
    let written: serde_json::Value = serde_json::from_str(written.value()).unwrap();
    assert_eq!(written, serde_json::json!([{ "input": "x", "axis": 2, "multiple": 6 }]));
}

#[test]
fn sequences_have_the_stride_in_front_of_them() {
    // A loop behind stride 2 that collects its steps, beside a branch of stride 3.
    let sequence = |name: &str| {
        let mut value = ValueInfoProto::tensor(name, FLOAT, &dims("batch 3"));
        let element = value.r#type.take().map(Box::new);
        let of = type_proto::Sequence { elem_type: element };
        value.r#type =
            Some(TypeProto { value: Some(type_proto::Value::SequenceType(Box::new(of))), ..TypeProto::default() });
        value
    };
    let scalar = |name: &str, elem: DataType| ValueInfoProto::tensor(name, elem.into(), &[]);
    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![
            NodeProto::make("Gather", "g", &["two", "i"], &["now"]).with_int("axis", 2),
            node("SequenceInsert", "all now", "more"),
            node("Identity", "on", "go"),
        ],
        input: vec![scalar("i", DataType::Int64), scalar("on", DataType::Bool), sequence("all")],
        output: vec![scalar("go", DataType::Bool), sequence("more")],
        ..GraphProto::default()
    };
    let conv = |name: &str, weights: &str, to: &str, stride: i64| {
        let conv = NodeProto::make("Conv", name, &["x", weights], &[to]).with_ints("strides", &[stride]);
        conv.with_ints("pads", &[3 - stride, 0])
    };
    let build = Build::new().input("x", "batch 4 time").output("y", "twos batch 3").output("three", "batch 3 threes");
    let build = build.weights("k", &[3, 4, 3]).weights("l", &[3, 4, 3]).ints("at", &[], &[2]).ints("one", &[], &[1]);
    let nodes = [
        conv("b", "l", "three", 3),
        conv("a", "k", "two", 2),
        node("Shape", "two", "shape"),
        NodeProto::make("Gather", "turns", &["shape", "at"], &["turns"]).with_int("axis", 0),
        node("SequenceEmpty", "", "none"),
        with_graph(node("Loop", "turns - none", "joined"), "body", body),
        node("ConcatFromSequence", "joined", "y").with_int("axis", 0).with_int("new_axis", 1),
    ];
    let (converted, compared) = checked(nodes.into_iter().fold(build, Build::node).bytes(), &any()).unwrap();
    assert_eq!(converted.report.steps_multiple, 6);
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}

pub fn along_time() -> Options {
    Options { time: vec![InputAxis { input: "x".to_owned(), axis: 0 }], ..Options::default() }
}

#[test]
fn mixing_in_front_of_a_layer_is_refused() {
    let cases = [
        (NodeProto::make("Softmax", "s", &["x"], &["z"]).with_int("axis", 0), "takes a softmax over time"),
        (NodeProto::make("LayerNormalization", "s", &["x", "one"], &["z"]).with_int("axis", 0), "normalizes over time"),
        (NodeProto::make("CumSum", "s", &["x", "zero"], &["z"]), "sums up along time"),
        (
            NodeProto::make("TopK", "s", &["x", "one"], &["z", "places"]).with_int("axis", 0),
            "picks the largest over time",
        ),
        (NodeProto::make("Trilu", "s", &["x"], &["z"]), "it isn't known how Trilu treats them"),
        (
            with_text(NodeProto::make("Einsum", "s", &["x", "x"], &["z"]), "equation", "tbf,sbf->tbs"),
            "combines each step with every other",
        ),
        (NodeProto::make("Concat", "s", &["x", "x"], &["z"]).with_int("axis", 0), "joins tensors along time"),
        (NodeProto::make("com.x.Mystery", "s", &["x"], &["z"]), "it isn't known how"),
    ];
    for (node, expected) in cases {
        let op = node.op_type().to_owned();
        let build = behind(vec![node]).ints("zero", &[], &[0]).ints("one", &[1], &[1]);
        let message = refusal(build.bytes(), &along_time());
        assert!(message.contains(expected) && message.contains("'s'"), "{op}: {message}");
    }
}

#[test]
fn all_nodes_in_the_way_are_listed_and_the_first_comes_first() {
    let both = |node: NodeProto| with_text(node, "direction", "bidirectional").with_int("hidden_size", 3);
    let build = Build::new().input("x", "time batch 4").output("y", "1 2 batch 3").weights("w", &[2, 12, 4]);
    let build = build.weights("r", &[2, 12, 3]).node(both(node("LSTM", "x w r", "a")));
    let mean = node("ReduceMean", "b", "y").with_ints("axes", &[0]).with_int("keepdims", 1);
    let bytes = build.node(node("Softmax", "a", "b").with_int("axis", 0)).node(mean).bytes();
    let message = refusal(bytes, &any());
    let lines: Vec<&str> = message.lines().collect();
    let expected = ["LSTM 'the lstm' is bidirectional", "Softmax 'the softmax'", "ReduceMean 'the reducemean'"];
    assert_eq!(lines.len(), expected.len(), "{message}");
    assert!(lines.iter().zip(expected).all(|(line, node)| line.starts_with(node)), "{message}");
}

#[test]
fn of_many_nodes_in_the_way_the_first_are_listed() {
    let mut build = Build::new().input("x", "time batch 4").output("y10", "time batch 4");
    for number in 0..=10 {
        let (from, to) = (if number == 0 { "x".to_owned() } else { format!("y{}", number - 1) }, format!("y{number}"));
        build = build.node(NodeProto::make("Softmax", &format!("s{number}"), &[&from], &[&to]).with_int("axis", 0));
    }
    let along = Options { time: vec![InputAxis { input: "x".to_owned(), axis: 0 }], ..any() };
    let message = refusal(build.bytes(), &along);
    let lines: Vec<&str> = message.lines().collect();
    assert!(lines.len() == 9 && lines[7].starts_with("Softmax 's7'"), "{message}");
    assert_eq!(lines[8], "3 more nodes stand in the way");
}

#[test]
fn recurrences_stay_if_that_is_wanted() {
    let build = layer("GRU", 3, |node| node).input("h", "1 4").output("hn", "1 4").node(node("Relu", "h", "hn"));
    let stay = Options { keep_recurrences: true, states: vec![pair("h", "hn")], ..any() };
    let converted = convert(build.bytes().into(), &stay).unwrap();
    assert_eq!(states(&converted), ["h"]);
}

#[test]
fn positions_in_the_whole_input_are_refused() {
    let nodes = vec![
        NodeProto::make("Shape", "a", &["x"], &["shape"]).with_int("end", 1),
        node("Squeeze", "shape", "count"),
        node("Range", "zero count one", "numbers"),
        node("Cast", "numbers", "positions").with_int("to", 1),
        node("Reshape", "positions column", "column_of"),
        node("Add", "x column_of", "z"),
    ];
    let build = behind(nodes).ints("zero", &[], &[0]).ints("one", &[], &[1]).ints("column", &[3], &[-1, 1, 1]);
    let error = convert(build.bytes().into(), &along_time()).unwrap_err();
    assert!(error.to_string().contains("takes 'column_of', which has its own value for each step"), "{error}");
    assert_eq!(error.hints(), [Hint::Time]);
}

#[test]
fn the_length_of_the_whole_input_is_no_number_to_compute_with() {
    let nodes = vec![
        NodeProto::make("Shape", "a", &["x"], &["shape"]).with_int("end", 1),
        node("Cast", "shape", "length").with_int("to", 1),
        node("Div", "x length", "z"),
    ];
    let message = refusal(behind(nodes).bytes(), &any());
    assert!(
        message.contains("Div 'the div' takes 'length', which depends on the length of the whole input"),
        "{message}"
    );
}

#[test]
fn a_recurrence_over_another_axis_stays_whole() {
    // Steps are rows for the first layer, which may run backwards, too.
    let inner = with_text(node("LSTM", "x w r b", "inner"), "direction", "reverse").with_int("hidden_size", 3);
    let build = Build::new().input("x", "5 time 4").output("y", "time 1 5 3").recurrent_weights(4);
    let build = build
        .weights("w2", &[1, 12, 3])
        .node(inner)
        .node(
            NodeProto { name: Some("flip".to_owned()), ..node("Transpose", "flat", "by_time") }
                .with_ints("perm", &[1, 0, 2]),
        )
        .ints("axis", &[1], &[1])
        .node(node("Squeeze", "inner axis", "flat"))
        .node(
            NodeProto { name: Some("outer".to_owned()), ..node("LSTM", "by_time w2 r b", "y") }
                .with_int("hidden_size", 3),
        );
    let mut build = build;
    build.graph.node.swap(1, 2);
    let (converted, compared) = checked(build.bytes(), &any()).unwrap();
    assert_eq!(states(&converted), ["outer.h_in", "outer.c_in"]);
    assert_eq!(bracketed(&converted.report.states[0].dims), "[1, 5, 3]");
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}
