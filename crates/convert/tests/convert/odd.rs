//! Models that no exporter writes: they are refused with the node, and never end in a panic or in a loop without end.

use stateful_convert::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use stateful_convert::onnx::{DataType, bracketed};
use stateful_convert::{InputAxis, Options, convert};

use crate::common::{Build, FLOAT, checked, compare, dims, node, pair, refusal, with_graph};

/// A convolution over `x [batch, 4, time]`.
fn convolution(edit: impl Fn(NodeProto) -> NodeProto) -> Vec<u8> {
    let conv = node("Conv", "x w", "y").with_ints("pads", &[2, 0]);
    Build::new()
        .input("x", "batch 4 time")
        .output("y", "batch 4 time")
        .weights("w", &[4, 4, 3])
        .node(edit(conv))
        .bytes()
}

#[test]
fn windows_that_cannot_be_are_refused() {
    type Edit = fn(NodeProto) -> NodeProto;
    let edits: [Edit; 10] = [
        |node| node.with_ints("strides", &[0]),
        |node| node.with_ints("strides", &[-1]),
        |node| node.with_ints("strides", &[i64::MAX]),
        |node| node.with_ints("dilations", &[0]),
        |node| node.with_ints("dilations", &[i64::MAX]),
        |node| node.with_ints("kernel_shape", &[0]),
        |node| node.with_ints("kernel_shape", &[i64::MIN]),
        |node| node.with_ints("pads", &[i64::MAX, i64::MAX]),
        |node| node.with_ints("pads", &[-1, 0]),
        |node| node.with_ints("pads", &[2]),
    ];
    let options = Options { time: vec![InputAxis { input: "x".to_owned(), axis: 2 }], ..Options::default() };
    for edit in edits {
        let error = refusal(convolution(edit), &options);
        assert!(error.starts_with("Conv 'the conv' has a window of unknown or impossible size"), "{error}");
    }
}

/// A layer over `x [time, batch, 4]`, behind some nodes that make `s` of it.
pub fn behind(nodes: Vec<NodeProto>) -> Build {
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(4);
    let build = nodes.into_iter().fold(build, Build::node);
    build.node(node("LSTM", "s w r b", "y").with_int("hidden_size", 3))
}

fn any() -> Options {
    Options::default()
}

pub fn along_first() -> Options {
    Options { time: vec![InputAxis { input: "x".to_owned(), axis: 0 }], ..Options::default() }
}

#[test]
fn shapes_and_numbers_beyond_all_bounds_are_refused() {
    let slice = || behind(vec![node("Slice", "x start end axis step", "s")]).ints("axis", &[1], &[0]);
    let (front, all) = (&[0][..], &[i64::MAX][..]);
    let build = slice().ints("start", &[1], front).ints("end", &[1], all).ints("step", &[1], &[0]);
    let error = refusal(build.bytes(), &along_first());
    assert!(error.starts_with("Slice 'the slice'"), "{error}");
    let build = slice().ints("start", &[1], all).ints("end", &[1], &[i64::MIN]).ints("step", &[1], &[i64::MIN]);
    // The last step.
    let error = refusal(build.bytes(), &along_first());
    assert!(error.contains("along x@0 nothing needs earlier steps"), "{error}");

    let many = [i64::MAX, i64::MAX, i64::MIN];
    for (op, inputs) in [("Reshape", "x many"), ("Tile", "x many"), ("Expand", "x many"), ("Split", "x many")] {
        let build = behind(vec![node(op, inputs, "s")]).ints("many", &[3], &many);
        let error = refusal(build.bytes(), &along_first());
        assert!(error.contains(&format!("{op} 'the ")) || error.contains("of unknown shape"), "{error}");
    }
    // What has so many elements is never made.
    for (op, inputs) in
        [("ConstantOfShape", "many"), ("Expand", "one many"), ("Range", "zero huge one"), ("Tile", "one many")]
    {
        let build = behind(vec![node(op, inputs, "added"), node("Add", "x added", "s")]);
        let build = build.ints("many", &[2], &[1 << 20, 1 << 40]).ints("one", &[], &[1]);
        let build = build.ints("zero", &[], &[0]).ints("huge", &[], &[i64::MAX]);
        convert(build.bytes().into(), &along_first()).unwrap_err();
    }
    let build = Build::new().input("x", "time 4611686018427387904 4611686018427387904").output("y", "time 1 1 3");
    let build = build.recurrent_weights(4).node(node("LSTM", "x w r b", "y").with_int("hidden_size", 3));
    let error = refusal(build.bytes(), &along_first());
    assert!(error.contains("of unknown shape"), "{error}");
    // Rows of no elements, in a number that would take forever.
    let joined = Build::new()
        .input("x", "time 4")
        .output("y", "time 4")
        .node(node("Concat", "none none", "both").with_int("axis", 1));
    let joined =
        joined.node(node("Gather", "both at", "s")).node(node("Add", "x s", "y")).ints("none", &[1 << 40, 0], &[]);
    convert(joined.ints("at", &[], &[0]).bytes().into(), &along_first()).unwrap_err();
}

#[test]
fn nodes_that_wait_for_each_other_are_refused() {
    let error = refusal(behind(vec![node("Add", "x t", "s"), node("Identity", "s", "t")]).bytes(), &along_first());
    assert!(error.starts_with("Add 'the add' waits for its own output, or for a node that does; "), "{error}");
    // Lengths of rows that are made of themselves.
    let build = Build::new().input("x", "time batch 4").typed_input("lens", DataType::Int32, "batch");
    let build = build.output("y", "time 1 batch 3").recurrent_weights(4).node(node("Cast", "b", "a").with_int("to", 6));
    let build = build.node(node("Identity", "a", "b")).node(node("LSTM", "x w r b a", "y").with_int("hidden_size", 3));
    let error = refusal(build.bytes(), &along_first());
    assert!(error.starts_with("Cast 'the cast' waits"), "{error}");
    // What one node makes, another makes too: lengths that the LSTM could be followed back from forever.
    let build = Build::new().input("x", "time batch 4").typed_input("lens", DataType::Int32, "batch");
    let build = build.output("y", "time 1 batch 3").recurrent_weights(4).node(node("Cast", "b", "a").with_int("to", 6));
    let build = build.node(node("Identity", "a", "b")).node(NodeProto::make("Identity", "again", &["lens"], &["b"]));
    let build = build.node(node("LSTM", "x w r b a", "y").with_int("hidden_size", 3));
    let error = refusal(build.bytes(), &along_first());
    assert!(error.starts_with("Identity 'again' makes 'b', which another node makes too; "), "{error}");
    // In a body.
    let values = |values: &[(&str, i32, &str)]| -> Vec<ValueInfoProto> {
        values.iter().map(|&(name, elem, shape)| ValueInfoProto::tensor(name, elem, &dims(shape))).collect()
    };
    let body = GraphProto {
        node: vec![node("Identity", "q", "p"), node("Identity", "p", "q"), node("Identity", "go", "goes")],
        input: values(&[("turn", 7, ""), ("go", 9, ""), ("state", FLOAT, "4")]),
        output: values(&[("goes", 9, ""), ("q", FLOAT, "4")]),
        ..GraphProto::default()
    };
    let looping = with_graph(node("Loop", "turns - start", "s"), "body", body);
    let build = Build::new().input("x", "time 4").output("y", "time 4").node(looping).node(node("Add", "x s", "y"));
    let error = refusal(build.ints("turns", &[], &[3]).weights("start", &[4]).bytes(), &along_first());
    assert!(error.starts_with("Identity 'the identity' waits"), "{error}");
}

#[test]
fn nodes_in_another_order_are_sorted() {
    let mut build = behind(vec![node("Relu", "x", "s")]);
    build.graph.node.reverse();
    let sorted = checked(behind(vec![node("Relu", "x", "s")]).bytes(), &along_first()).unwrap().0;
    let converted = convert(build.bytes().into(), &along_first()).unwrap();
    assert_eq!(converted.model, sorted.model);
}

#[test]
fn axes_that_are_named_twice_are_reduced_once() {
    let reduce = node("ReduceMean", "x", "m").with_ints("axes", &[0, 0, 0]).with_int("keepdims", 0);
    let build = Build::new().input("x", "2 time 4").output("y", "time 1 4").recurrent_weights(4).node(reduce);
    let build = build.node(node("Unsqueeze", "m middle", "s")).ints("middle", &[1], &[1]);
    let build = build.node(node("LSTM", "s w r b", "y").with_int("hidden_size", 3));
    let options = Options { time: vec![InputAxis { input: "x".to_owned(), axis: 1 }], ..Options::default() };
    assert_eq!(convert(build.bytes().into(), &options).unwrap().report.states.len(), 2);
}

#[test]
fn dimensions_of_0_leave_the_batch_closed() {
    let options = Options { open_batch: true, keep_recurrences: true, ..Options::default() };
    let build = Build::new().input("x", "1 0 4").output("y", "1 0").node(node("Reshape", "x shape", "y"));
    let error = refusal(build.ints("shape", &[2], &[1, 0]).bytes(), &options);
    assert!(error.starts_with("Reshape 'the reshape'"), "{error}");
}

#[test]
fn inputs_that_no_memory_holds_are_not_compared() {
    // An open dimension of another input than that with the steps has 2 elements.
    for (dims, elements) in [("1099511627776", 1_099_511_627_776_i64), ("time batch 134217728", 1 << 29)] {
        let bytes = behind(vec![node("Relu", "x", "s")]).input("huge", dims).bytes();
        let converted = convert(bytes.clone().into(), &along_first()).unwrap();
        let error = compare(&bytes, &converted).unwrap_err().to_string();
        assert!(error.starts_with(&format!("'huge' would have {elements} elements")), "{error}");
        assert!(error.contains("67108864"), "{error}");
    }
}

#[test]
fn inputs_without_elements_are_compared() {
    let build = behind(vec![node("Concat", "x none", "s").with_int("axis", 2)]).input("none", "time batch 0");
    checked(build.bytes(), &any()).unwrap();
}

/// A model with so many caches that the batch must be opened in several at once. A `Reshape` with the batch of 1 in its
/// shape reads each.
#[test]
fn the_batch_of_many_states_is_opened() {
    let mut build = Build::new().ints("apart", &[3], &[1, 2, 2]).ints("back", &[2], &[1, 4]);
    let mut states = Vec::new();
    for index in 0..300 {
        let [from, to, between] = ["in", "out", "between"].map(|what| format!("{what}{index}"));
        build = build.input(&from, "1 4").output(&to, "1 4");
        build = build.node(NodeProto::make("Reshape", &between, &[&from, "apart"], &[&between]));
        build = build.node(NodeProto::make("Reshape", &to, &[&between, "back"], &[&to]));
        states.push(pair(&from, &to));
    }
    let options = Options { open_batch: true, keep_recurrences: true, states, ..Options::default() };
    let (converted, _) = checked(build.bytes(), &options).unwrap();
    assert_eq!(converted.report.opened.len(), 300);
    assert!(converted.report.states.iter().all(|state| bracketed(&state.dims) == "[batch, 4]"));
}

#[test]
fn indices_of_a_scatter_that_cannot_be_leave_the_batch_closed() {
    let options = Options { open_batch: true, keep_recurrences: true, ..Options::default() };
    let scatter = |shape: &[i64], indices: &[i64]| {
        let build = Build::new().input("x", "1 4").input("u", "1 4").output("y", "1 4");
        let build = build.node(node("Reshape", "u same", "v")).node(node("ScatterND", "x indices v", "y"));
        build.ints("same", &[2], &[1, 4]).ints("indices", shape, indices).bytes()
    };
    for (shape, indices) in [(&[][..], &[0][..]), (&[1, 1, 2], &[0, i64::MAX]), (&[1, 2, 2], &[i64::MIN, 0, 0, 0])] {
        let error = refusal(scatter(shape, indices), &options);
        assert!(error.starts_with("ScatterND 'the scatternd'"), "{error}");
    }
}

/// A layer over `[rows, steps, 4]`, whose `h` is `[steps, 1, rows, 3]`.
fn layer() -> Build {
    let build = Build::new().input("x", "N T 4").recurrent_weights(3);
    let build = build.node(node("Transpose", "x", "xt").with_ints("perm", &[1, 0, 2]));
    build.node(node("GRU", "xt w r", "h").with_int("hidden_size", 3))
}

#[test]
fn an_output_without_an_axis_for_the_rows_is_refused() {
    let help = "make_dynamic_shape_fixed --dim_param N --dim_value 1 model.onnx fixed.onnx";
    for (behind, dims, said) in [
        (node("Flatten", "h", "y").with_int("axis", 2), "T a", "with 2 rows it is [60, 6], with one [60, 3]"),
        (node("Flatten", "h", "y").with_int("axis", 3), "a 3", "with 2 rows it is [120, 3], with one [60, 3]"),
        (node("Reshape", "h shape", "y"), "a 3", "with 2 rows it is [120, 3], with one [60, 3]"),
        (node("ReduceMean", "h", "y").with_ints("axes", &[2]), "T 1 1 3", "with 2 rows it is [60, 1, 1, 3]"),
    ] {
        let build = layer().output("y", dims).ints("shape", &[2], &[-1, 3]).node(behind);
        let bytes = build.bytes();
        let converted = convert(bytes.clone().into(), &any()).unwrap();
        let error = compare(&bytes, &converted).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains(help), "{error}");
        assert!(error.starts_with("output 'y' can't be divided into rows"), "{error}");
    }
}

#[test]
fn an_output_that_all_rows_share_and_an_input_with_an_open_dimension_of_its_own_keep_the_batch() {
    let build = layer().input("m", "M N 4").output("y", "T N 3").output("shared", "4").floats("four", &[4], &[1.; 4]);
    let build = build.node(node("Identity", "four", "shared")).ints("of layers", &[1], &[1]);
    let whole = NodeProto::make("GRU", "of m", &["m", "w", "r"], &["", "of_m"]).with_int("hidden_size", 3);
    let build = build.node(whole);
    let build = build.node(NodeProto::make("Squeeze", "", &["h", "of layers"], &["flat"]));
    let bytes = build.node(node("Add", "flat of_m", "y")).bytes();
    let time = vec![InputAxis { input: "x".to_owned(), axis: 1 }];
    let (converted, compared) = checked(bytes, &Options { time, ..any() }).unwrap();
    assert_eq!(bracketed(&converted.report.outputs[0].dims), "[T, N, 3]");
    assert_eq!(compared.last().unwrap().what, "rows together and alone");
}

#[test]
fn rows_of_a_model_of_single_steps_are_compared_with_rows_alone() {
    let build = Build::new().input("x", "batch 4").input("s", "batch 4").output("y", "batch 4").output("t", "batch 4");
    let build = build.node(node("Add", "x s", "t")).node(node("ReduceMax", "t", "largest").with_int("keepdims", 1));
    let bytes = build.node(node("Div", "t largest", "y")).bytes();
    let converted =
        convert(bytes.clone().into(), &Options { states: vec![pair("s", "t")], ..Options::default() }).unwrap();
    let error = compare(&bytes, &converted).unwrap_err().to_string();
    assert!(error.contains("in rows together and alone, output 'y' differs"), "{error}");

    // The backend runs these rows one by one.
    let build = Build::new().input("x", "batch 4").input("s", "batch 4").output("y", "batch 4").output("t", "batch 4");
    let build = build.node(node("Add", "x s", "t")).node(node("DynamicQuantizeLinear", "t", "q scale zero"));
    let bytes = build.node(node("DequantizeLinear", "q scale zero", "y")).bytes();
    let (_, compared) = checked(bytes, &Options { states: vec![pair("s", "t")], ..Options::default() }).unwrap();
    assert_eq!(compared.len(), 1);
}

/// A GRU that goes on from its state: `x` is `[time, batch, 4]`, and `z` is made of its answers `all`.
fn going_on(then: NodeProto) -> Build {
    let build = Build::new().input("x", "time batch 4").input("h", "1 batch 3").output("z", "time 1 batch 3");
    let build = build.output("hn", "1 batch 3").recurrent_weights(3);
    build.node(node("GRU", "x w r b - h", "all hn").with_int("hidden_size", 3)).node(then)
}

#[test]
fn nodes_that_need_other_steps_are_named_although_the_model_has_its_states() {
    let options = Options { states: vec![pair("h", "hn")], ..Options::default() };
    let said = |build: Build| {
        let (converted, _) = checked(build.bytes(), &options).unwrap();
        converted.report.warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let alone = said(going_on(node("Softmax", "all", "z").with_int("axis", 3)));
    assert_eq!(alone, "");
    let text = said(going_on(node("Softmax", "all", "z").with_int("axis", 0)));
    assert!(text.starts_with("these nodes need other steps, and have only those of the request"), "{text}");
    assert!(text.contains("Softmax 'the softmax' takes a softmax over time"), "{text}");
    // A convolution that would get a state, if nothing were in the way.
    let build = going_on(node("ReduceMax", "frames", "largest").with_int("keepdims", 1).with_ints("axes", &[0]));
    let build = build.node(node("Sub", "frames largest", "z")).weights("k", &[3, 3, 3]).ints("one", &[1], &[1]);
    let build = build.node(node("Squeeze", "all one", "flat"));
    let build = build.node(NodeProto::make("Transpose", "to", &["flat"], &["channels"]).with_ints("perm", &[1, 2, 0]));
    let build = build.node(node("Conv", "channels k", "made").with_ints("pads", &[2, 0]));
    let build =
        build.node(NodeProto::make("Transpose", "back", &["made"], &["in_front"]).with_ints("perm", &[2, 0, 1]));
    let text = said(build.node(node("Unsqueeze", "in_front one", "frames")));
    assert!(
        text.starts_with("these nodes got no state, so they begin anew in each request: Conv 'the conv'"),
        "{text}"
    );
    let sized = going_on(node("Tanh", "all", "z"));
    let mut sized = sized.ints("hundred", &[], &[100]).node(node("Shape", "x", "shape")).ints("none", &[], &[0]);
    sized = sized.node(node("Gather", "shape none", "steps")).node(node("Sub", "steps hundred", "over"));
    sized = sized.node(node("Cast", "over", "more").with_int("to", 1)).node(node("Relu", "more", "some"));
    sized = sized.node(node("Add", "b some", "bias"));
    sized.graph.node[0].input[3] = "bias".to_owned();
    let text = said(sized);
    assert!(text.contains("GRU 'the gru' takes 'bias', which depends on the length"), "{text}");
}

#[test]
fn lengths_inside_a_branch_are_seen_outside() {
    let branch = |name: &str, nodes: Vec<NodeProto>| GraphProto {
        name: Some(name.to_owned()),
        node: nodes,
        output: vec![ValueInfoProto::tensor(name, FLOAT, &[])],
        ..GraphProto::default()
    };
    let steps = |name: &str| {
        let last = node("Cast", "steps", name).with_int("to", 1);
        branch(name, vec![node("Shape", "x", "shape"), node("Gather", "shape none", "steps"), last])
    };
    let choice = |output: &str, then: GraphProto, otherwise: GraphProto| {
        with_graph(with_graph(node("If", "yes", output), "then_branch", then), "else_branch", otherwise)
    };
    let inside = |name: &str| branch(name, vec![choice(name, steps("a"), steps("b"))]);
    for choice in [choice("length", steps("a"), steps("b")), choice("length", inside("c"), inside("d"))] {
        let build = Build::new().input("x", "time batch 4").output("z", "time 1 batch 3").recurrent_weights(3);
        let build = build.ints("none", &[], &[0]).ints("truth", &[], &[1]);
        let build = build.node(node("Cast", "truth", "yes").with_int("to", 9)).node(choice);
        let build = build.node(node("GRU", "x w r b", "all").with_int("hidden_size", 3));
        let message = refusal(build.node(node("Add", "all length", "z")).bytes(), &Options::default());
        assert!(message.contains("Add 'the add' takes 'length', which depends on the length"), "{message}");
    }
}

#[test]
fn parameters_are_not_made_of_the_last_step() {
    let build = |input: usize| {
        let build = Build::new().input("x", "time 1 18").output("z", "time 1 1 3").ints("last", &[], &[-1]);
        let build = build.weights("w", &[1, 9, 18]).weights("r", &[1, 9, 3]).node(node("Gather", "x last", "b"));
        let mut layer = node("GRU", "x w r", "z").with_int("hidden_size", 3);
        layer.set_input(input, "b");
        build.node(layer)
    };
    let message = refusal(build(3).bytes(), &Options::default());
    assert!(message.contains("GRU 'the gru' takes its bias from the steps"), "{message}");
    let build =
        Build::new().input("x", "time 1 4").output("z", "time 1 5").ints("last", &[], &[-1]).ints("none", &[], &[0]);
    let build = build.ints("pads", &[6], &[1, 0, 0, 0, 0, 0]).node(node("Gather", "x last", "row"));
    let build = build.node(node("ReduceMax", "row", "value").with_int("keepdims", 0));
    let message = refusal(build.node(node("Pad", "x pads value", "z")).bytes(), &Options::default());
    assert!(message.contains("Pad 'the pad' takes its parameters from the steps"), "{message}");
}
