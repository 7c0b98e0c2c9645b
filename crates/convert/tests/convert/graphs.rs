//! Models made here: what exporters seldom write, and what must be refused.

use stateful_convert::onnx::schema::{GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, type_proto};
use stateful_convert::onnx::{DataType, Dim, bracketed, opset, read};
use stateful_convert::report::{StartsAt, Warning};
use stateful_convert::verify::Compared;
use stateful_convert::{Converted, Hint, InputAxis, Options, OutputAxis, convert, passes_on_rows, rows_meet_others};

use crate::common::{Build, FLOAT, checked, compare, dims, node, pair, refusal, states, with_graph, with_text};

fn any() -> Options {
    Options::default()
}

fn assert_equal(compared: &[Compared]) {
    crate::common::assert_equal("the model", compared);
}

/// A recurrent layer over `x [time, batch, 4]`.
fn layer(op: &str, gates: i64, edit: impl Fn(NodeProto) -> NodeProto) -> Build {
    let recurrent = edit(node(op, "x w r b", "y").with_int("hidden_size", 3));
    Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(gates).node(recurrent)
}

#[test]
fn steps_in_a_dimension_that_the_model_names_the_batch_are_confirmed_first() {
    let build = || {
        let build = Build::new().input("x", "batch time 4").output("y", "batch 1 time 3").recurrent_weights(4);
        build.node(node("LSTM", "x w r b", "y").with_int("hidden_size", 3)).bytes()
    };
    let error = convert(build().into(), &any()).unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("LSTM 'the lstm' runs along axis 0 of 'x', which the model names 'batch'"),
        "{message}"
    );
    assert!(message.contains("(batch_first)"), "{message}");
    assert_eq!(error.hints(), [Hint::Time]);
    let (converted, compared) = checked(build(), &along_time()).unwrap();
    assert_equal(&compared);
    assert_eq!(bracketed(&converted.report.states[0].dims), "[1, batch, 3]");
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    assert_eq!(bracketed(&graph.input[0].dims().unwrap()), "[steps, batch, 4]");
    assert_eq!(bracketed(&graph.output[0].dims().unwrap()), "[steps, 1, batch, 3]");
}

#[test]
fn usual_names_of_the_batch_are_known() {
    for name in ["N", "batch_size", "Batch", "b", "bs", "batchsize"] {
        let build = || {
            let build = Build::new().input("x", &format!("{name} rows 4")).output("y", &format!("{name} 1 rows 3"));
            build.recurrent_weights(3).node(node("GRU", "x w r b", "y").with_int("hidden_size", 3)).bytes()
        };
        let message = refusal(build(), &any());
        let expected = format!("GRU 'the gru' runs along axis 0 of 'x', which the model names '{name}'");
        assert!(message.starts_with(&expected), "{message}");
        let (converted, compared) = checked(build(), &along_time()).unwrap();
        assert_equal(&compared);
        let graph = read(converted.model.into()).unwrap().graph.unwrap();
        assert_eq!(bracketed(&graph.input[0].dims().unwrap()), "[steps, batch, 4]");
        assert_eq!(bracketed(&graph.output[0].dims().unwrap()), "[steps, 1, batch, 3]");
    }
}

#[test]
fn no_two_dimensions_get_one_name() {
    // The rows are named 'steps', and an input without steps has a dimension with a usual name of the batch.
    let build = Build::new().input("x", "batch steps 4").input("m", "N 3").output("y", "batch 1 steps 3");
    let build = build.output("z", "N 3").node(node("Relu", "m", "z")).recurrent_weights(3);
    let bytes = build.node(node("GRU", "x w r b", "y").with_int("hidden_size", 3)).bytes();
    let (converted, compared) = checked(bytes, &along_time()).unwrap();
    assert_equal(&compared);
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    assert_eq!(bracketed(&graph.input[0].dims().unwrap()), "[steps_2, steps, 4]");
    assert_eq!(bracketed(&graph.output[0].dims().unwrap()), "[steps_2, 1, steps, 3]");
    assert_eq!(bracketed(&converted.report.states[0].dims), "[1, steps, 3]");
    // The number of steps is fixed, and another dimension is named 'time'.
    let build = Build::new().input("x", "14 batch 4").input("m", "time 3").output("y", "14 1 batch 3");
    let build = build.output("z", "time 3").node(node("Relu", "m", "z")).recurrent_weights(3);
    let bytes = build.node(node("GRU", "x w r b", "y").with_int("hidden_size", 3)).bytes();
    let converted = convert(bytes.into(), &along_time()).unwrap();
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    assert_eq!(bracketed(&graph.input[0].dims().unwrap()), "[time_2, batch, 4]");
    assert_eq!(bracketed(&graph.input[1].dims().unwrap()), "[time, 3]");
    // The axes of two inputs have the steps, and one has a name.
    let mut build = two_inputs();
    build.graph.input[0].set_tensor(FLOAT, &[Dim::Open, Dim::Symbol("batch".to_owned()), Dim::Known(4)]);
    let axis = |input: &str| InputAxis { input: input.to_owned(), axis: 0 };
    let both = Options { time: vec![axis("x"), axis("m")], ..any() };
    let converted = convert(build.bytes().into(), &both).unwrap();
    assert_eq!(
        bracketed(&read(converted.model.into()).unwrap().graph.unwrap().input[0].dims().unwrap()),
        "[frames, batch, 4]"
    );
}

#[test]
fn missing_inputs_and_outputs_are_added() {
    for (op, gates, expected) in [("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)] {
        let (converted, compared) = checked(layer(op, gates, |node| node).bytes(), &any()).unwrap();
        assert_eq!(converted.report.states.len(), expected, "{op}");
        assert_equal(&compared);
    }
}

#[test]
fn attributes_of_the_layer_stay() {
    let reset = layer("GRU", 3, |node| node.with_int("linear_before_reset", 1));
    assert_equal(&checked(reset.bytes(), &any()).unwrap().1);
    let coupled = layer("LSTM", 4, |node| node.with_int("input_forget", 1));
    assert_equal(&checked(coupled.bytes(), &any()).unwrap().1);
    let peepholes = layer("LSTM", 4, |mut node| {
        node.set_input(7, "p");
        node
    });
    let (converted, compared) = checked(peepholes.weights("p", &[1, 9]).bytes(), &any()).unwrap();
    assert_equal(&compared);
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    assert_eq!(graph.node[0].input[7], "p");
}

#[test]
fn weights_that_are_inputs_too_are_constants() {
    // Exporters of ONNX before 1.5 list each weight among the inputs.
    let recurrent = node("LSTM", "z w r b - h c", "y").with_int("hidden_size", 3);
    let mut build = Build::new().input("x", "time 1 4").output("y", "time 1 1 3").recurrent_weights(4);
    build = build.weights("gain", &[4]).weights("h", &[1, 1, 3]).weights("c", &[1, 1, 3]);
    build = build.node(node("Mul", "x gain", "z")).node(recurrent);
    let weights = build.graph.initializer.iter().map(|weight| {
        let dims: Vec<Dim> = weight.dims.iter().map(|&length| Dim::Known(length)).collect();
        ValueInfoProto::tensor(weight.name(), FLOAT, &dims)
    });
    build.graph.input.extend(weights.collect::<Vec<_>>());
    let mut model = read(build.bytes_of_opset(9).into()).unwrap();
    model.ir_version = Some(3);
    let (converted, compared) = checked(stateful_convert::onnx::write(&model), &any()).unwrap();
    assert_eq!(states(&converted), ["the.lstm.h_in", "the.lstm.c_in"]);
    assert!(converted.report.states.iter().all(|state| state.starts_at == StartsAt::Model));
    assert_equal(&compared);
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    let inputs: Vec<&str> = graph.input.iter().map(ValueInfoProto::name).collect();
    assert_eq!(inputs, ["x", "w", "r", "b", "gain", "the.lstm.h_in", "the.lstm.c_in"]);
}

#[test]
fn time_behind_the_batch_is_laid_out_anew() {
    // ONNX Runtime refuses layout=1, so the model with transposes around is the oracle.
    let weights = |build: Build| build.recurrent_weights(4).weights("h", &[1, 1, 3]);
    let build = || weights(Build::new().input("x", "1 time 4").output("y", "1 time 1 3"));
    let recurrent = node("LSTM", "x w r b - h", "y").with_int("hidden_size", 3).with_int("layout", 1);
    let converted = convert(build().node(recurrent).bytes().into(), &any()).unwrap();
    let around = node("LSTM", "xt w r b - h", "yt").with_int("hidden_size", 3);
    let oracle = build()
        .node(NodeProto::make("Transpose", "a", &["x"], &["xt"]).with_ints("perm", &[1, 0, 2]))
        .node(around)
        .node(NodeProto::make("Transpose", "b", &["yt"], &["y"]).with_ints("perm", &[2, 0, 1, 3]));
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Model);
    let converted = Converted { original: None, ..converted };
    assert_equal(&compare(&oracle.bytes(), &converted).unwrap());
}

#[test]
fn layers_with_the_batch_in_front_get_states_that_start_at_zero() {
    for (op, gates, states) in [("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)] {
        let build = Build::new().input("x", "batch time 4").output("y", "batch time 1 3").output("last", "batch 1 3");
        let build = build.recurrent_weights(gates).ints("rows", &[3], &[1, 1, 3]);
        let build = build.node(node("ConstantOfShape", "rows", "zero")).node(node("Shape", "x", "shape"));
        let build = build.ints("none", &[1], &[0]).ints("one", &[1], &[1]).ints("three", &[1], &[3]);
        let build = build
            .node(node("Gather", "shape none", "batch"))
            .node(node("Concat", "batch one three", "all").with_int("axis", 0));
        let build = build.node(node("Expand", "zero all", "h"));
        let recurrent = node(op, "x w r b - h", "y last").with_int("hidden_size", 3).with_int("layout", 1);
        let (converted, compared) = checked(build.node(recurrent).bytes(), &any()).unwrap();
        assert_eq!(converted.report.states.len(), states);
        assert!(converted.report.states.iter().all(|state| state.starts_at == StartsAt::Zero), "{op}");
        assert_equal(&compared);
    }
}

#[test]
fn layers_without_names_get_different_states() {
    let unnamed = |input: &str, output: &str| NodeProto {
        name: None,
        ..node("GRU", &format!("{input} w r b"), output).with_int("hidden_size", 3)
    };
    let second = NodeProto { name: None, ..node("GRU", "x w r b", "z").with_int("hidden_size", 3) };
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").output("z", "time 1 batch 3");
    let (converted, compared) =
        checked(build.recurrent_weights(3).node(unnamed("x", "y")).node(second).bytes(), &any()).unwrap();
    assert_eq!(states(&converted), ["y.h_in", "z.h_in"]);
    assert_equal(&compared);
}

#[test]
fn names_of_states_give_way_to_names_that_are_taken() {
    let build = layer("GRU", 3, |node| node).typed_input("the.gru.h_in", DataType::Float, "batch 1");
    let build = build.output("other", "batch 1").node(node("Relu", "the.gru.h_in", "other"));
    let (converted, _) = checked(build.bytes(), &any()).unwrap();
    assert_eq!(states(&converted), ["the.gru.h_in_2"]);
}

#[test]
fn half_precision_layers_have_half_precision_states() {
    let half: i32 = DataType::Float16.into();
    let mut build = layer("LSTM", 4, |node| node);
    build.graph.input[0].set_tensor(half, &dims("time batch 4"));
    build.graph.output[0].set_tensor(half, &dims("time 1 batch 3"));
    for weight in &mut build.graph.initializer {
        weight.data_type = Some(half);
        weight.float_data.clear();
        weight.int32_data = vec![0x3000; weight.dims.iter().product::<i64>() as usize];
    }
    let converted = convert(build.bytes().into(), &any()).unwrap();
    assert!(converted.report.states.iter().all(|state| state.elem == half && state.bytes == Some(6)));
}

#[test]
fn lengths_of_rows_stay_an_input() {
    let build = layer("LSTM", 4, |mut node| {
        node.set_input(4, "lens");
        node
    });
    let (converted, compared) = checked(build.typed_input("lens", DataType::Int32, "batch").bytes(), &any()).unwrap();
    assert_eq!(converted.report.inputs[1].role, stateful_convert::report::Role::Lengths);
    assert_equal(&compared);
}

/// A layer whose rows have lengths: `x`, `w`, `r`, `b` and `lens`.
fn layer_with_lengths(op: &str, gates: i64) -> Build {
    let recurrent = layer(op, gates, |mut node| {
        node.set_input(4, "lens");
        NodeProto { output: vec!["y".to_owned(), "last".to_owned()], ..node }
    });
    recurrent.typed_input("lens", DataType::Int32, "batch").output("last", "1 batch 3")
}

#[test]
fn rows_without_steps_keep_their_state() {
    for (op, gates) in [("LSTM", 4), ("GRU", 3), ("RNN", 1)] {
        // In chunks of 7, two of the three rows have no steps in the second chunk.
        let (converted, compared) = checked(layer_with_lengths(op, gates).bytes(), &any()).unwrap();
        assert_eq!(states(&converted)[0], format!("the.{}.h_in", op.to_lowercase()));
        assert_equal(&compared);
    }
    // Lengths that no request says are those of the chunk.
    let full = layer("GRU", 3, |mut node| {
        node.set_input(4, "lens");
        node
    });
    let mut full = full.node(NodeProto::make("Shape", "s", &["x"], &["shape"]).with_int("end", 1));
    full = full.ints("row", &[1], &[2]).node(node("Cast", "shape", "steps").with_int("to", 6));
    full = full.node(node("Expand", "steps row", "lens"));
    full.graph.node.rotate_left(1);
    full.graph.input[0].set_tensor(FLOAT, &dims("time 2 4"));
    full.graph.output[0].set_tensor(FLOAT, &dims("time 1 2 3"));
    let (converted, compared) = checked(full.bytes(), &any()).unwrap();
    assert_equal(&compared);
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    assert!(graph.node.iter().all(|node| node.op() != "Where"));
    let old = refusal(layer_with_lengths("LSTM", 4).bytes_of_opset(8), &any());
    assert!(old.starts_with("LSTM 'the lstm' takes sequence_lens, which needs the operator Where"), "{old}");
}

#[test]
fn rows_that_a_model_sorts_by_their_lengths_keep_their_states() {
    // PyTorch sorts the rows of a packed sequence like this. In each request, another row would have the state.
    let top = |from: &str, to: &[&str], largest: i64| {
        NodeProto::make("TopK", to[1], &[from, "rows"], to).with_int("axis", 0).with_int("largest", largest)
    };
    let shape = NodeProto::make("Shape", "a", &["lens"], &["rows"]);
    let gather = |from: &str, by: &str, to: &str, axis: i64| {
        NodeProto::make("Gather", to, &[from, by], &[to]).with_int("axis", axis)
    };
    let mut nodes = vec![
        shape,
        top("lens", &["sorted", "order"], 1),
        gather("x", "order", "xs", 1),
        node("LSTM", "xs w r b sorted", "ys").with_int("hidden_size", 3),
        top("order", &["numbers", "back"], 0),
        gather("ys", "back", "y", 2),
    ];
    let model = |nodes: &[NodeProto]| {
        let build = Build::new().input("x", "time batch 4").typed_input("lens", DataType::Int32, "batch");
        let build = build.output("y", "time 1 batch 3").recurrent_weights(4);
        nodes.iter().cloned().fold(build, Build::node).bytes()
    };
    assert_equal(&checked(model(&nodes), &any()).unwrap().1);
    // A model that gives answers in the order of the lengths can't be served in steps.
    nodes[5] = node("Identity", "ys", "y");
    nodes.remove(4);
    let converted = convert(model(&nodes).into(), &any()).unwrap();
    let error = compare(&model(&nodes), &converted).unwrap_err().to_string();
    assert!(error.contains("output 'y' differs"), "{error}");
}

#[test]
fn rows_that_an_old_model_sorts_keep_their_states() {
    for opset in [10, 17] {
        let nodes = [
            node("Shape", "lens", "rows"),
            node("Cast", "lens", "numbers").with_int("to", FLOAT.into()),
            node("TopK", "numbers rows", "sorted order").with_int("axis", 0),
            NodeProto::make("Cast", "lengths", &["sorted"], &["lengths"]).with_int("to", DataType::Int32 as i64),
            NodeProto::make("Gather", "xs", &["x", "order"], &["xs"]).with_int("axis", 1),
            node("LSTM", "xs w r b lengths", "ys").with_int("hidden_size", 3),
            NodeProto::make("Cast", "places", &["order"], &["places"]).with_int("to", FLOAT.into()),
            node("Neg", "places", "below"),
            NodeProto::make("TopK", "back", &["below", "rows"], &["largest", "back"]).with_int("axis", 0),
            NodeProto::make("Gather", "y", &["ys", "back"], &["y"]).with_int("axis", 2),
        ];
        let build = Build::new().input("x", "time batch 4").typed_input("lens", DataType::Int32, "batch");
        let build = build.output("y", "time 1 batch 3").recurrent_weights(4);
        let model = nodes.into_iter().fold(build, Build::node).bytes_of_opset(opset);
        assert_equal(&checked(model, &any()).unwrap().1);
    }
}

#[test]
fn backward_layers_are_refused() {
    let message = refusal(layer("LSTM", 4, |node| with_text(node, "direction", "reverse")).bytes(), &any());
    assert_eq!(message, "LSTM 'the lstm' runs in direction reverse; train the model with a forward layer");
}

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
fn looping(body: Vec<NodeProto>) -> Build {
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
fn a_batch_of_one_that_cannot_be_opened_is_not_advised_to_be() {
    // As tf2onnx writes Keras' layer with `stateful=True`: its batch is 1, so a Reshape does what a Transpose did.
    let build = |front: NodeProto| {
        let build = Build::new().input("x", "1 time 4").output("y", "time 1 1 3").recurrent_weights(4);
        let build = build.weights("h", &[1, 1, 3]).weights("c", &[1, 1, 3]).ints("to", &[3], &[-1, 1, 4]);
        build.node(front).node(node("LSTM", "steps w r b - h c", "y").with_int("hidden_size", 3)).bytes()
    };
    let warned = |front| {
        let converted = convert(build(front).into(), &any()).unwrap();
        let batch = |warning: &&Warning| warning.to_string().contains("x@0 has one row");
        let warning = converted.report.warnings.iter().find(batch).unwrap().clone();
        (warning.hint(), warning.to_string())
    };
    let (hint, text) = warned(node("Transpose", "x", "steps").with_ints("perm", &[1, 0, 2]));
    assert_eq!((hint, text.as_str()), (Some(Hint::OpenBatch), "x@0 has one row, so sequences don't share runs"));
    let (hint, text) = warned(node("Reshape", "x to", "steps"));
    assert_eq!(hint, None, "{text}");
    assert!(text.contains("the Reshape 'the reshape' in front of it stands where a Transpose would"), "{text}");
    let asked = refusal(build(node("Reshape", "x to", "steps")), &Options { open_batch: true, ..any() });
    assert!(asked.contains("the Reshape 'the reshape'"), "{asked}");
}

/// Keras' LSTM with `return_state` and its states as inputs, as tf2onnx writes it: each tensor has another name for the
/// batch.
fn keras_with_states() -> Build {
    let build = Build::new().input("x", "unk__575 unk__576 4").input("h", "unk__577 3").input("c", "unk__578 3");
    let build = build.output("y", "unk__579 unk__580 3").output("hn", "unk__581 3").output("cn", "unk__582 3");
    let made = |op, from: &[&str], name| NodeProto::make(op, name, from, &[name]);
    let turned = |from, name| made("Transpose", &[from], name).with_ints("perm", &[1, 0, 2]);
    build
        .recurrent_weights(4)
        .ints("front", &[1], &[0])
        .ints("direction", &[1], &[1])
        .node(turned("x", "steps"))
        .node(made("Unsqueeze", &["h", "front"], "first_h"))
        .node(made("Unsqueeze", &["c", "front"], "first_c"))
        .node(node("LSTM", "steps w r b - first_h first_c", "all last_h last_c").with_int("hidden_size", 3))
        .node(made("Squeeze", &["all", "direction"], "flat"))
        .node(turned("flat", "y"))
        .node(made("Squeeze", &["last_h", "front"], "hn"))
        .node(made("Squeeze", &["last_c", "front"], "cn"))
}

#[test]
fn a_state_with_a_name_of_its_own_for_the_batch_gets_that_of_requests() {
    let options = Options { states: vec![pair("h", "hn"), pair("c", "cn")], ..any() };
    let (converted, compared) = checked(keras_with_states().bytes(), &options).unwrap();
    assert_equal(&compared);
    assert_eq!(
        converted.report.states.iter().map(|state| bracketed(&state.dims)).collect::<Vec<_>>(),
        ["[batch, 3]"; 2]
    );
    let graph = read(converted.model.into()).unwrap().graph.unwrap();
    let named = |values: &[ValueInfoProto]| -> Vec<String> {
        values.iter().map(|value| bracketed(&value.dims().unwrap())).collect()
    };
    assert_eq!(named(&graph.input), ["[batch, unk__576, 4]", "[batch, 3]", "[batch, 3]"]);
    assert_eq!(named(&graph.output), ["[batch, unk__576, 3]", "[batch, 3]", "[batch, 3]"]);
}

#[test]
fn a_state_that_keeps_a_length_of_its_own_keeps_its_name() {
    // One that is passed on as it is, and one to which each request adds a step, are no rows of requests.
    for next in [node("Identity", "k", "kn"), node("Concat", "k one", "kn").with_int("axis", 0)] {
        let build =
            keras_with_states().input("k", "length 3").output("kn", "longer 3").floats("one", &[1, 3], &[1.; 3]);
        let states = vec![pair("h", "hn"), pair("c", "cn"), pair("k", "kn")];
        let converted = convert(build.node(next).bytes().into(), &Options { states, ..any() }).unwrap();
        assert_eq!(bracketed(&converted.report.states[2].dims), "[length, 3]");
    }
}

#[test]
fn a_state_of_a_length_of_its_own_starts_without_elements_in_the_comparison_too() {
    let build = |length: &str| {
        let build = Build::new().input("x", "1 4").input("s", &format!("{length} 4")).output("y", "1 4");
        let build = build.output("sn", &format!("{length} 4")).ints("first", &[1], &[0]);
        build
            .node(node("Gather", "s first", "front"))
            .node(node("Add", "x front", "y"))
            .node(node("Identity", "s", "sn"))
    };
    let options = || Options { states: vec![pair("s", "sn")], ..any() };
    let compared = |length| {
        let bytes = build(length).bytes();
        compare(&bytes, &convert(bytes.clone().into(), &options()).unwrap())
    };
    assert!(compared("3").is_ok());
    // The backend starts it so, and the node reads its first element.
    let error = compared("length").unwrap_err().to_string();
    assert!(error.contains("Gather") && error.contains("are its states these: <<<s, sn>>>?"), "{error}");
}

/// The node that brings rows together with another dimension, if the rows of `x` are along `axis` and those of the state
/// `s` and of the output `y` in front.
fn met(build: Build, axis: usize) -> Option<String> {
    let of_input = |input: &str, axis| InputAxis { input: input.to_owned(), axis };
    let output = OutputAxis { output: "y".to_owned(), axis: 0 };
    rows_meet_others(build.bytes().into(), &[of_input("x", axis), of_input("s", 0)], &[output])
}

#[test]
fn rows_that_are_added_to_sums_over_rows_are_found() {
    let build = |axis| {
        let mean = node("ReduceMean", "x", "mean").with_ints("axes", &[axis]).with_int("keepdims", 0);
        let build = Build::new().input("x", "? ? 8").input("s", "? 8").output("y", "? 8").node(mean);
        build.node(node("Add", "s mean", "y"))
    };
    assert_eq!(met(build(1), 1).unwrap(), "Add 'the add'");
    assert_eq!(met(build(0), 0).unwrap(), "Add 'the add'");
    assert_eq!([met(build(1), 0), met(build(0), 1)], [None, None]);
}

#[test]
fn rows_that_are_joined_with_another_dimension_or_answered_as_one_are_found() {
    let joined = || {
        let build = Build::new().input("x", "? 8 ?").input("s", "? 8 2").output("y", "? 8 ?");
        build.node(node("Concat", "s x", "y").with_int("axis", 2))
    };
    assert_eq!((met(joined(), 2).unwrap().as_str(), met(joined(), 0)), ("Concat 'the concat'", None));
    let answered = || {
        let mean = node("ReduceMean", "x", "y").with_ints("axes", &[1]).with_int("keepdims", 0);
        Build::new().input("x", "? ? 8").input("s", "? 8").output("y", "? 8").node(mean)
    };
    assert_eq!((met(answered(), 1).unwrap().as_str(), met(answered(), 0)), ("ReduceMean 'the reducemean'", None));
}

#[test]
fn two_lengths_that_must_be_equal_are_no_rows_that_meet_others() {
    // The mask is as long as the state and the steps together.
    let build = Build::new().input("x", "? ? 8").input("s", "? ? 8").input("m", "1 ? 1").output("y", "? ? 8");
    let build = build.node(node("Concat", "s x", "all").with_int("axis", 1)).node(node("Mul", "all m", "y"));
    assert_eq!(met(build, 0), None);
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
fn behind(nodes: Vec<NodeProto>) -> Build {
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
fn two_inputs() -> Build {
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

fn along_time() -> Options {
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

/// A state that is added up, in a model whose axes 0 and 1 can both be the batch.
fn square() -> Vec<u8> {
    let build = Build::new().input("x", "1 1 4").input("h", "1 1 4").output("y", "1 1 4").output("hn", "1 1 4");
    build.node(node("Add", "x h", "hn")).node(node("Relu", "hn", "y")).bytes()
}

#[test]
fn of_several_axes_that_could_be_the_batch_one_can_be_named() {
    let axis = |input: &str, axis| InputAxis { input: input.to_owned(), axis };
    let open = Options { open_batch: true, states: vec![pair("h", "hn")], ..any() };
    let (converted, _) = checked(square(), &open).unwrap();
    assert_eq!(converted.report.opened, [axis("x", 0), axis("h", 0)]);
    let [warning] = converted.report.warnings.as_slice() else { panic!("{:?}", converted.report.warnings) };
    let (taken, other) = ("x@0,h@0".to_owned(), "x@1,h@1".to_owned());
    assert_eq!(*warning, Warning::TwoBatches { taken, other });
    let named = Options { batch: vec![axis("x", 1)], ..open.clone() };
    let (converted, _) = checked(square(), &named).unwrap();
    assert_eq!(converted.report.opened, [axis("x", 1), axis("h", 1)]);
    assert_eq!(converted.report.warnings, []);
    assert_eq!(bracketed(&converted.report.states[0].dims), "[1, batch, 4]");
    for (wrong, expected) in [
        (axis("z", 0), "the model has no input 'z' (it has x, h)"),
        (axis("x", 2), "axis 2 of input 'x' can't be the batch: the input is [1, 1, 4], and a 1 is wanted there"),
        (axis("x", 3), "axis 3 of input 'x' can't be the batch: the input is [1, 1, 4], and a 1 is wanted there"),
    ] {
        assert_eq!(refusal(square(), &Options { batch: vec![wrong], ..open.clone() }), expected);
    }
}

/// The forms of a published denoiser: caches of one row that a `ScatterND` writes, a transposed convolution, and a layer
/// whose rows are the batch and frequencies.
fn denoiser(tra_axes: &str) -> Build {
    let named = |name: &str, mut node: NodeProto| {
        node.name = Some(name.to_owned());
        node
    };
    let positions = |at: i64| [0, at / 10 % 4, at / 5 % 2, at % 5];
    let indices: Vec<i64> = (0..40).flat_map(positions).collect();
    let build =
        Build::new().input("x", "1 4 1 5").input("conv", "1 4 3 5").input("tra", tra_axes).input("inter", "2 1 5 6");
    let build = build.output("y", "1 1 6").output("z", "1 5 1 6");
    let build = build.output("conv_out", "1 4 3 5").output("tra_out", tra_axes).output("inter_out", "2 1 5 6");
    let build = build.weights("k", &[4, 1, 3, 3]).weights("w", &[1, 18, 4]).weights("r", &[1, 18, 6]);
    let build =
        build.ints("n0", &[1], &[0]).ints("n1", &[1], &[1]).ints("n2", &[1], &[2]).ints("end", &[1], &[i64::MAX]);
    let build = build.ints("i0", &[], &[0]).ints("at0", &[1, 1], &[0]).ints("block", &[1, 4, 2, 5, 4], &indices);
    let build = build.ints("of_tra", &[4], &[1, 1, 1, 6]).ints("of_inter", &[4], &[1, 1, 5, 6]);
    let build = build.ints("merge", &[3], &[5, -1, 4]).ints("apart", &[4], &[1, 5, -1, 6]);
    let nodes = [
        named("kept", node("Slice", "conv n0 n2 n2", "kept")),
        named("joined", node("Concat", "kept x", "joined").with_int("axis", 2)),
        named("last", node("Slice", "joined n1 end n2", "last")),
        node("ConvTranspose", "joined k", "c").with_int("group", 4).with_ints("pads", &[2, 1, 2, 1]),
        named("write conv", node("ScatterND", "conv block last", "conv_out")),
        node("ReduceMean", "c", "mean").with_ints("axes", &[-1]).with_int("keepdims", 0),
        named("by time", node("Transpose", "mean", "m").with_ints("perm", &[2, 0, 1])),
        named("hidden", node("Gather", "tra i0", "hidden").with_int("axis", 0)),
        named("a", node("GRU", "m w r - - hidden", "a a_last").with_int("hidden_size", 6)),
        named("answer", node("Squeeze", "a n1", "y")),
        named("shape tra", node("Reshape", "a_last of_tra", "tra_new")),
        named("write tra", node("ScatterND", "tra at0 tra_new", "tra_out")),
        named("bins", node("Transpose", "c", "bins").with_ints("perm", &[0, 3, 2, 1])),
        named("merge", node("Reshape", "bins merge", "merged")),
        named("rows", node("Transpose", "merged", "rows").with_ints("perm", &[1, 0, 2])),
        named("of rows", node("Gather", "inter i0", "of_rows").with_int("axis", 0)),
        named("b", node("GRU", "rows w r - - of_rows", "b b_last").with_int("hidden_size", 6)),
        named("flat", node("Squeeze", "b n1", "flat")),
        named("back", node("Transpose", "flat", "back").with_ints("perm", &[1, 0, 2])),
        named("apart", node("Reshape", "back apart", "z")),
        named("shape inter", node("Reshape", "b_last of_inter", "inter_new")),
        named("write inter", node("ScatterND", "inter at0 inter_new", "inter_out")),
    ];
    nodes.into_iter().fold(build, Build::node)
}

#[test]
fn caches_that_are_written_at_certain_places_get_a_batch() {
    let states = ["conv", "tra", "inter"].map(|name| pair(name, &format!("{name}_out"))).to_vec();
    let open = Options { open_batch: true, states, ..any() };
    let (converted, compared) = checked(denoiser("2 1 1 6").bytes(), &open).unwrap();
    let dims: Vec<String> = converted.report.states.iter().map(|state| bracketed(&state.dims)).collect();
    assert_eq!(dims, ["[batch, 4, 3, 5]", "[2, 1, batch, 6]", "[2, batch, 5, 6]"]);
    assert_eq!(compared.last().unwrap().what, "rows together and alone");
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}

#[test]
fn two_layers_may_start_at_one_state_whose_batch_is_opened() {
    let mut build = denoiser("2 1 1 6");
    let of_sum = build.graph.node.iter().position(|node| node.name() == "shape inter").unwrap();
    build.graph.node[of_sum].set_input(0, "sum");
    let layer = NodeProto::make("GRU", "second", &["rows", "w", "r", "", "", "of_rows"], &["", "second_last"]);
    let build = build.node(layer.with_int("hidden_size", 6)).node(node("Add", "b_last second_last", "sum"));
    let states = ["conv", "tra", "inter"].map(|name| pair(name, &format!("{name}_out"))).to_vec();
    let (converted, compared) = checked(build.bytes(), &Options { open_batch: true, states, ..any() }).unwrap();
    assert_eq!(bracketed(&converted.report.states[2].dims), "[2, batch, 5, 6]");
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
}

#[test]
fn indices_that_name_other_places_than_a_block_keep_the_batch_closed() {
    let mut build = denoiser("2 1 1 6");
    let indices = build.graph.initializer.iter_mut().find(|weight| weight.name() == "block").unwrap();
    indices.int64_data[2] = 2;
    let states = ["conv", "tra", "inter"].map(|name| pair(name, &format!("{name}_out"))).to_vec();
    let message = refusal(build.bytes(), &Options { open_batch: true, states, ..any() });
    assert!(message.starts_with("ScatterND 'write conv' puts tensors at certain places among the rows"), "{message}");
}

#[test]
fn rows_that_need_other_rows_keep_the_batch_closed() {
    let build = || Build::new().input("x", "1 4").input("h", "1 4").output("y", "1 4").output("hn", "1 4");
    let open = Options { open_batch: true, states: vec![pair("h", "hn")], ..any() };
    let shifted = build().ints("pads", &[4], &[1, 0, -1, 0]).node(node("Pad", "x pads", "y"));
    let message = refusal(shifted.node(node("Add", "y h", "hn")).bytes(), &open);
    assert!(message.contains("Pad 'the pad' passes a state from one row of the batch to the next"), "{message}");

    let mut build = build();
    for value in
        build.graph.input.iter_mut().chain(&mut build.graph.output).filter(|value| value.name().starts_with('h'))
    {
        value.set_tensor(FLOAT, &[]);
    }
    let build = build.node(node("Add", "x h", "y")).node(node("Exp", "h", "hn"));
    let message = refusal(build.bytes(), &open);
    assert!(
        message.contains("Exp 'the exp' gives the next value of state 'h', and neither has a dimension for the batch"),
        "{message}"
    );
}

#[test]
fn a_batch_is_not_opened_where_no_state_is_known() {
    let open = Options { open_batch: true, ..any() };
    assert!(refusal(square(), &open).starts_with("no axis of the inputs leads to a recurrence"));
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

#[test]
fn convolutions_that_drop_steps_are_refused() {
    let build = Build::new().input("x", "batch 4 time").output("y", "batch 3 out").weights("k", &[3, 4, 5]);
    let message = refusal(build.node(node("Conv", "x k", "y")).bytes(), &any());
    assert!(message.contains("Conv 'the conv' gives 4 steps fewer than it takes; pad 4 steps in front"), "{message}");
    assert!(message.contains("'input_context'"), "{message}");
}

/// Quantized weights, and the scales and zero points of all.
fn quantized(build: Build) -> Build {
    let tensor = |name: &str, elem: DataType, dims: &[i64]| TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(elem.into()),
        dims: dims.to_vec(),
        ..TensorProto::default()
    };
    let mut build = build;
    let bytes = (0..48).map(|number| number * 5 % 251).collect();
    build.graph.initializer.push(TensorProto { float_data: vec![0.02], ..tensor("s", DataType::Float, &[]) });
    build.graph.initializer.push(TensorProto { int32_data: vec![120], ..tensor("z", DataType::Uint8, &[]) });
    build.graph.initializer.push(TensorProto { int32_data: bytes, ..tensor("k", DataType::Uint8, &[4, 4, 3]) });
    build.graph.initializer.push(TensorProto { int32_data: vec![90; 16], ..tensor("m", DataType::Uint8, &[4, 4]) });
    build
}

#[test]
fn quantized_operators_are_followed_and_their_padding_is_the_zero_point() {
    let microsoft = |mut node: NodeProto| {
        node.domain = Some("com.microsoft".to_owned());
        node
    };
    let build = Build::new().input("x", "batch 4 time").output("y", "batch time 4");
    let nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("QLinearConv", "q s z k s z s z", "c").with_ints("pads", &[2, 0]),
        microsoft(node("QLinearSigmoid", "c s z s z", "d")),
        microsoft(node("QLinearAdd", "d s z q s z s z", "e")),
        node("Transpose", "e", "f").with_ints("perm", &[0, 2, 1]),
        node("QLinearMatMul", "f s z m s z s z", "g"),
        node("DequantizeLinear", "g s z", "y"),
    ];
    let build = nodes.into_iter().fold(quantized(build), Build::node);
    let (converted, compared) = checked(build.bytes(), &any()).unwrap();
    let [state] = converted.report.states.as_slice() else { panic!("{:?}", converted.report.states) };
    assert_eq!((state.elem, state.starts_at), (DataType::Uint8.into(), StartsAt::Value(120.0)));
    assert_eq!(bracketed(&state.dims), "[batch, 4, 2]");
    assert_equal(&compared);
}

#[test]
fn operators_of_onnx_runtime_are_refused_with_what_helps() {
    for (op, expected) in [
        ("QAttention", "attends over the whole input; attention over the whole input can't run in steps"),
        ("AttnLSTM", "keeps the attention of its last step to itself"),
        ("SkipLayerNormalization", "convert the model as it was before them"),
    ] {
        let other = NodeProto { domain: Some("com.microsoft".to_owned()), ..node(op, "x w", "z") };
        let message = refusal(behind(vec![other]).bytes(), &along_time());
        assert!(message.contains(&format!("com.microsoft.{op}")) && message.contains(expected), "{message}");
    }
}

#[test]
fn pooling_over_time_starts_from_the_lowest_value() {
    let pool = node("MaxPool", "x", "y").with_ints("kernel_shape", &[3]).with_ints("pads", &[2, 0]);
    let build = Build::new().input("x", "batch 4 time").output("y", "batch 4 time").node(pool);
    let (converted, compared) = checked(build.bytes(), &any()).unwrap();
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Value(f64::NEG_INFINITY));
    assert_equal(&compared);
}

#[test]
fn pooling_of_integers_starts_from_the_lowest_integer() {
    for (elem, zero_point, lowest) in
        [(DataType::Int8, -7, StartsAt::Value(-128.0)), (DataType::Uint8, 120, StartsAt::Zero)]
    {
        let pool = node("MaxPool", "q", "p").with_ints("kernel_shape", &[3]).with_ints("pads", &[2, 0]);
        let mut build = quantized(Build::new().input("x", "batch 4 time").output("y", "batch 4 time"));
        build.graph.initializer[1].data_type = Some(elem.into());
        build.graph.initializer[1].int32_data = vec![zero_point];
        let nodes = [node("QuantizeLinear", "x s z", "q"), pool, node("DequantizeLinear", "p s z", "y")];
        let (converted, compared) = checked(nodes.into_iter().fold(build, Build::node).bytes(), &any()).unwrap();
        let [state] = converted.report.states.as_slice() else { panic!("{:?}", converted.report.states) };
        assert_eq!((state.elem, state.starts_at), (elem.into(), lowest));
        assert_equal(&compared);
    }
}

#[test]
fn negative_zero_points_are_where_padding_starts() {
    let tensor = |name: &str, dims: &[i64], values: Vec<i32>| TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(DataType::Int8.into()),
        dims: dims.to_vec(),
        int32_data: values,
        ..TensorProto::default()
    };
    let mut build = quantized(Build::new().input("x", "batch 4 time").output("y", "batch 4 time"));
    build.graph.initializer.push(tensor("below", &[], vec![-100]));
    build.graph.initializer.push(tensor("weights", &[4, 4, 3], (0..48).map(|number| number * 5 % 251 - 125).collect()));
    let nodes = [
        node("QuantizeLinear", "x s below", "q"),
        node("QLinearConv", "q s below weights s below s below", "c").with_ints("pads", &[2, 0]),
        node("DequantizeLinear", "c s below", "y"),
    ];
    let (converted, compared) = checked(nodes.into_iter().fold(build, Build::node).bytes(), &any()).unwrap();
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Value(-100.0));
    assert_equal(&compared);
}

#[test]
fn products_and_activations_of_onnx_runtime_are_followed() {
    let microsoft = |node: NodeProto| NodeProto { domain: Some("com.microsoft".to_owned()), ..node };
    let product = || microsoft(node("FusedMatMul", "x k", "p").with_int("transA", 0).with_int("transB", 1));
    let build =
        |product: NodeProto| behind(vec![product, microsoft(node("QuickGelu", "p", "z"))]).weights("k", &[4, 4]);
    let (_, compared) = checked(build(product()).bytes(), &along_time()).unwrap();
    assert_equal(&compared);
    for attribute in ["transA", "transBatchA", "transBatchB"] {
        let message = refusal(build(product().with_int(attribute, 1)).bytes(), &along_time());
        assert!(message.starts_with("com.microsoft.FusedMatMul 'the fusedmatmul' "), "{message}");
    }
    // Weights that aren't square.
    let narrow =
        behind(vec![microsoft(node("FusedMatMul", "x k", "p").with_int("transB", 1)), node("MatMul", "p l", "z")]);
    let (_, compared) = checked(narrow.weights("k", &[5, 4]).weights("l", &[5, 4]).bytes(), &along_time()).unwrap();
    assert_equal(&compared);
}

/// The weights of half precision are multiplied with `factor` in the converted model.
fn compared_with_other_weights(factor: f32) -> Result<Vec<Compared>, String> {
    let conv = node("Conv", "x k", "y").with_ints("pads", &[2, 0]);
    let half = |build: Build| {
        let mut build = build;
        let elem: i32 = DataType::Float16.into();
        build.graph.input[0].set_tensor(elem, &dims("batch 4 time"));
        build.graph.output[0].set_tensor(elem, &dims("batch 4 time"));
        let weights = &mut build.graph.initializer[0];
        weights.data_type = Some(elem);
        let bits = |value: f32| i32::from(half::f16::from_f32(value).to_bits());
        weights.int32_data = std::mem::take(&mut weights.float_data).into_iter().map(bits).collect();
        build
    };
    let build = || Build::new().input("x", "batch 4 time").output("y", "batch 4 time").weights("k", &[4, 4, 3]);
    let original = half(build().node(conv.clone())).bytes();
    let mut other = build().node(conv);
    other.graph.initializer[0].float_data.iter_mut().for_each(|weight| *weight *= factor);
    let converted = convert(half(other).bytes().into(), &any()).unwrap();
    compare(&original, &converted).map_err(|error| error.to_string())
}

#[test]
fn half_precision_is_compared_within_its_rounding() {
    compared_with_other_weights(1.002).unwrap();
    let error = compared_with_other_weights(1.05).unwrap_err();
    assert!(error.contains("output 'y' differs"), "{error}");
}

#[test]
fn a_comparison_finds_a_state_that_is_lost() {
    let bytes = layer("LSTM", 4, |node| node).bytes();
    let mut converted = convert(bytes.clone().into(), &any()).unwrap();
    let other = converted.report.states[0].pair.output.clone();
    converted.report.states[1].pair.output = other;
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("isn't the original: in chunks of 1, output 'y' differs"), "{error}");
}

#[test]
fn a_comparison_finds_a_lost_state_in_small_answers() {
    let build = Build::new().input("x", "time batch 4").output("small", "time 1 batch 3").recurrent_weights(3);
    let build =
        build.node(node("GRU", "x w r b", "y").with_int("hidden_size", 3)).node(node("Mul", "y factor", "small"));
    let mut build = build.weights("factor", &[1]);
    build.graph.initializer.last_mut().unwrap().float_data = vec![1e-4];
    let bytes = build.bytes();
    let mut converted = convert(bytes.clone().into(), &any()).unwrap();
    assert_equal(&compare(&bytes, &converted).unwrap());
    // The state goes in and never comes out changed.
    let mut model = read(converted.model.clone().into()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.node.iter_mut().find(|node| node.op() == "GRU").unwrap().set_output(1, "lost");
    graph.node.push(node("Identity", "the.gru.h_in", "the.gru.h_out"));
    converted.model = stateful_convert::onnx::write(&model);
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("isn't the original: in chunks of 1, output 'small' differs"), "{error}");
}

#[test]
fn a_comparison_of_nothing_but_nan_says_nothing() {
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(1);
    let nodes = [node("Abs", "x", "a"), node("Neg", "a", "n"), node("Sqrt", "n", "z")];
    let build = nodes.into_iter().fold(build, Build::node);
    let bytes = build.node(node("RNN", "z w r b", "y").with_int("hidden_size", 3)).bytes();
    let converted = convert(bytes.clone().into(), &any()).unwrap();
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("says nothing") && error.contains("output 'y' has no finite number"), "{error}");
}

#[test]
fn what_the_schema_knows_survives() {
    let mut model = read(layer("LSTM", 4, |node| node).bytes().into()).unwrap();
    model.producer_name = Some("somebody".to_owned());
    let entry = |key: &str| stateful_convert::onnx::schema::StringStringEntryProto {
        key: Some(key.to_owned()),
        value: Some("v".to_owned()),
    };
    model.metadata_props.push(entry("of the model"));
    model.graph.as_mut().unwrap().node[0].metadata_props.push(entry("of the node"));
    let bytes = stateful_convert::onnx::write(&model);
    let again = read(convert(bytes.into(), &any()).unwrap().model.into()).unwrap();
    assert_eq!((again.producer_name(), opset(&again)), ("somebody", 17));
    assert_eq!(again.metadata_props[0].key(), "of the model");
    assert_eq!(again.graph.unwrap().node[0].metadata_props[0].key(), "of the node");
}

#[test]
fn other_files_are_refused() {
    assert!(refusal(b"not a model".to_vec(), &any()).starts_with("it is no ONNX model"));
    assert_eq!(refusal(Vec::new(), &any()), "it is no ONNX model: it has no graph");
}

#[test]
fn nodes_that_lack_inputs_are_refused_here_or_by_the_comparison() {
    for op in [
        "Add", "Concat", "Gather", "MatMul", "Where", "Loop", "Scan", "If", "LSTM", "Conv", "Reshape", "Slice", "Pad",
        "TopK",
    ] {
        for inputs in [&["x"][..], &[]] {
            let bytes = behind(vec![NodeProto::make(op, "lacking", inputs, &["z"])]).bytes();
            if let Ok(converted) = convert(bytes.clone().into(), &along_time()) {
                assert!(compare(&bytes, &converted).is_err(), "{op}");
            }
        }
    }
}
