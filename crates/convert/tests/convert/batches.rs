//! The batch: its names, rows that meet, and batches of 1 that are opened.

use stateful_convert::onnx::schema::{NodeProto, ValueInfoProto};
use stateful_convert::onnx::{bracketed, read};
use stateful_convert::report::Warning;
use stateful_convert::{Hint, InputAxis, Options, OutputAxis, convert, rows_meet_others};

use crate::common::{Build, FLOAT, checked, compare, node, pair, refusal};
use crate::layers::{any, assert_equal};

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

/// The node that brings rows together with another dimension, if the rows of `x` are along `axis` and those of the
/// state `s` and of the output `y` in front.
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

/// The forms of a published denoiser: caches of one row that a `ScatterND` writes, a transposed convolution, and a
/// layer whose rows are the batch and frequencies.
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
