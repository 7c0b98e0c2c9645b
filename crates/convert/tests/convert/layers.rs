//! Recurrent layers as exporters seldom write them: batch and time, lengths, types.

use stateful_convert::onnx::schema::{NodeProto, ValueInfoProto};
use stateful_convert::onnx::{DataType, Dim, bracketed, read};
use stateful_convert::report::StartsAt;
use stateful_convert::verify::Compared;
use stateful_convert::{Converted, Hint, InputAxis, Options, convert};

use crate::common::{Build, FLOAT, checked, compare, dims, node, refusal, states, with_text};
use crate::graphs::{along_time, two_inputs};

pub fn any() -> Options {
    Options::default()
}

pub fn assert_equal(compared: &[Compared]) {
    crate::common::assert_equal("the model", compared);
}

/// A recurrent layer over `x [time, batch, 4]`.
pub fn layer(op: &str, gates: i64, edit: impl Fn(NodeProto) -> NodeProto) -> Build {
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
