//! Convolutions, padding and resizing over two axes, as in U-Nets, and operators that stay within a step.

use stateful_convert::onnx::bracketed;
use stateful_convert::onnx::schema::NodeProto;
use stateful_convert::report::StartsAt;
use stateful_convert::{InputAxis, Options};

use crate::common::{Build, assert_equal, checked, node, refusal, states, with_text};

/// Two channels over time and 8 frequencies.
fn image(out: &str) -> Build {
    Build::new().input("x", "batch 2 time 8").output("y", out).weights("k", &[2, 3, 3, 3]).weights("b", &[3])
}

fn transposed(pads: &[i64], strides: &[i64]) -> NodeProto {
    node("ConvTranspose", "x k b", "made").with_ints("pads", pads).with_ints("strides", strides)
}

/// The output without its last steps.
fn without_last(build: Build, steps: i64) -> Build {
    let build = build.ints("from", &[1], &[0]).ints("to", &[1], &[-steps]).ints("time", &[1], &[2]);
    build.node(node("Slice", "made from to time", "y"))
}

fn assert_has_states(name: &str, bytes: Vec<u8>, expected: &[&str]) {
    let (converted, compared) = checked(bytes, &Options::default()).unwrap();
    assert_eq!(states(&converted), expected, "{name}");
    assert_equal(name, &compared);
}

#[test]
fn transposed_convolutions_keep_the_steps_that_reach_into_later_ones() {
    let cut_behind = without_last(image("batch 3 time 17").node(transposed(&[0, 0, 0, 0], &[1, 2])), 2);
    assert_has_states("a slice", cut_behind.bytes(), &["the.convtranspose.frames_in"]);
    let without_pads = without_last(image("batch 3 time 10").node(node("ConvTranspose", "x k", "made")), 2);
    assert_has_states("no pads", without_pads.bytes(), &["the.convtranspose.frames_in"]);
    let padded = image("batch 3 time 15").node(transposed(&[0, 1, 2, 1], &[1, 2])).node(node("Relu", "made", "y"));
    assert_has_states("pads", padded.bytes(), &["the.convtranspose.frames_in"]);
    let one_of_each = without_last(image("batch 3 time 15").node(transposed(&[0, 1, 1, 1], &[1, 2])), 1);
    assert_has_states("pads and a slice", one_of_each.bytes(), &["the.convtranspose.frames_in"]);
    let dilated = transposed(&[0, 0, 4, 0], &[1, 1]).with_ints("dilations", &[2, 1]);
    let dilated = image("batch 3 time 10").node(dilated).node(node("Relu", "made", "y"));
    assert_has_states("dilated", dilated.bytes(), &["the.convtranspose.frames_in"]);
}

#[test]
fn transposed_convolutions_over_other_axes_need_no_state() {
    let build = Build::new().input("x", "batch 2 time 8").output("y", "batch 3 time 16").weights("k", &[2, 3, 1, 2]);
    let build = build.node(node("ConvTranspose", "before k", "y").with_ints("strides", &[1, 2]));
    let build = build.weights("c", &[2, 2, 3, 1]).node(node("Conv", "x c", "before").with_ints("pads", &[2, 0, 0, 0]));
    assert_has_states("frequencies", build.bytes(), &["the.conv.frames_in"]);
}

#[test]
fn transposed_convolutions_that_look_ahead_or_make_more_steps_are_refused() {
    let said = |build: Build| refusal(build.bytes(), &Options::default());
    let ahead = image("batch 3 time 10").node(transposed(&[1, 0, 1, 0], &[1, 1])).node(node("Relu", "made", "y"));
    assert!(said(ahead).contains("ConvTranspose 'the convtranspose' looks 1 step ahead"));
    let fewer = image("batch 3 out 10").node(transposed(&[0, 0, 3, 0], &[1, 1])).node(node("Relu", "made", "y"));
    assert!(said(fewer).contains("gives 1 step fewer than it takes"));
    let more = image("batch 3 out 10").node(transposed(&[0, 0, 0, 0], &[2, 1])).node(node("Relu", "made", "y"));
    let message = said(more);
    assert!(message.contains("makes several steps of one"), "{message}");
    let uncut = image("batch 3 out 10").node(transposed(&[0, 0, 0, 0], &[1, 1])).node(node("Relu", "made", "y"));
    assert!(said(uncut).contains("output 'y' has padding beside its steps"));
}

#[test]
fn a_pad_may_pad_time_and_other_axes() {
    let conv = |build: Build| build.weights("c", &[3, 2, 3, 3]).node(node("Conv", "padded c", "y"));
    let image = || Build::new().input("x", "batch 2 time 8").output("y", "batch 3 time 8");
    let pads = [0, 0, 2, 1, 0, 0, 0, 1];
    let state = ["the.pad.frames_in"];
    let build = image().ints("pads", &[8], &pads).weights("value", &[]).node(node("Pad", "x pads value", "padded"));
    assert_has_states("all axes", conv(build).bytes(), &state);
    let build = image().ints("pads", &[4], &[2, 1, 0, 1]).ints("axes", &[2], &[2, -1]).weights("value", &[]);
    assert_has_states("axes", conv(build.node(node("Pad", "x pads value axes", "padded"))).bytes_of_opset(18), &state);
    let build = image().node(node("Pad", "x", "padded").with_ints("pads", &pads));
    assert_has_states("an attribute", conv(build).bytes_of_opset(9), &state);
    let delay = image().ints("pads", &[8], &[0, 0, 1, 1, 0, 0, -1, 1]).node(node("Pad", "x pads", "padded"));
    let delay = delay.weights("c", &[3, 2, 1, 3]).node(node("Conv", "padded c", "y"));
    assert_has_states("a delay", delay.bytes(), &state);
}

fn along_time() -> Options {
    Options { time: vec![InputAxis { input: "x".to_owned(), axis: 0 }], ..Options::default() }
}

/// `x` is `[time, batch, 4]`, and a GRU of `inputs` features reads `made`.
fn in_front_of_a_layer(inputs: i64) -> Build {
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3");
    let build = build.weights("w", &[1, 9, inputs]).weights("r", &[1, 9, 3]).weights("b", &[1, 18]);
    build.node(node("GRU", "made w r b", "y").with_int("hidden_size", 3))
}

#[test]
fn other_axes_may_be_resized() {
    let nearest = |inputs: &str| with_text(node("Resize", inputs, "made"), "mode", "nearest");
    let build = in_front_of_a_layer(8).floats("scales", &[3], &[1.0, 1.0, 2.0]).node(nearest("x - scales"));
    assert_has_states("scales", build.bytes(), &["the.gru.h_in"]);
    let build = in_front_of_a_layer(8).floats("scales", &[3], &[1.0, 1.0, 2.0]);
    assert_has_states(
        "Upsample",
        build.node(node("Upsample", "x scales", "made")).bytes_of_opset(9),
        &["the.gru.h_in"],
    );
    let sizes = |ahead: i64| {
        let build = in_front_of_a_layer(8).ints("first", &[1], &[0]).ints("two", &[1], &[2]).ints("eight", &[1], &[8]);
        let build = build.node(node("Shape", "x", "shape")).node(node("Slice", "shape first two", "front"));
        let build = build.ints("more", &[2], &[ahead, 0]).node(node("Add", "front more", "wanted"));
        build.node(node("Concat", "wanted eight", "sizes").with_int("axis", 0)).node(nearest("x - - sizes"))
    };
    assert_has_states("sizes", sizes(0).bytes(), &["the.gru.h_in"]);
    assert!(refusal(sizes(1).bytes(), &along_time()).contains("Resize 'the resize' changes the number of steps"));
    let build = in_front_of_a_layer(4).floats("scales", &[3], &[2.0, 1.0, 1.0]).node(nearest("x - scales"));
    assert!(refusal(build.bytes(), &along_time()).contains("Resize 'the resize' changes the number of steps"));
}

#[test]
fn operators_that_stay_within_a_step_are_followed() {
    let class = |build: Build| {
        let largest = node("ArgMax", "x", "class").with_int("axis", 2).with_int("keepdims", 0);
        build.node(largest).ints("depth", &[], &[4]).floats("values", &[2], &[0.0, 1.0])
    };
    for (axis, order) in [(-1, [0, 1, 2]), (0, [1, 2, 0])] {
        let build = class(in_front_of_a_layer(4));
        let build = build.node(node("OneHot", "class depth values", "hot").with_int("axis", axis));
        let build = build.node(node("Transpose", "hot", "made").with_ints("perm", &order));
        assert_has_states("OneHot", build.bytes(), &["the.gru.h_in"]);
    }
    let order = node("TopK", "x four", "sorted order").with_int("axis", 2);
    let sorted = || in_front_of_a_layer(4).ints("four", &[1], &[4]).node(order.clone());
    let gather = node("GatherElements", "x order", "made").with_int("axis", -1);
    assert_has_states("GatherElements", sorted().node(gather).bytes(), &["the.gru.h_in"]);
    let scatter = node("ScatterElements", "x order sorted", "made").with_int("axis", 2);
    assert_has_states("ScatterElements", sorted().node(scatter).bytes(), &["the.gru.h_in"]);
    let normalized = node("MeanVarianceNormalization", "x", "made");
    assert_has_states(
        "MeanVarianceNormalization",
        in_front_of_a_layer(4).node(normalized.clone().with_ints("axes", &[2])).bytes(),
        &["the.gru.h_in"],
    );
    let build = in_front_of_a_layer(4).floats("scale", &[4], &[1.0, 2.0, 3.0, 4.0]);
    let build = build.node(node("RMSNormalization", "x scale", "made"));
    assert_has_states("RMSNormalization", build.bytes_of_opset(23), &["the.gru.h_in"]);
    for (node, expected) in [
        (normalized.with_ints("axes", &[0, 2]), "normalizes over time"),
        (node("ScatterElements", "x order sorted", "made").with_int("axis", 0), "takes elements out of the steps"),
    ] {
        let message = refusal(sorted().node(node).bytes(), &along_time());
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn pools_over_other_axes_need_no_state() {
    let build = Build::new().input("x", "batch time 8").output("y", "time 1 batch 3").recurrent_weights(3);
    let pool = node("AveragePool", "x", "pooled").with_ints("kernel_shape", &[2]).with_ints("strides", &[2]);
    let swap = node("Transpose", "pooled", "frames").with_ints("perm", &[1, 0, 2]);
    let build = build.node(pool).node(swap).node(node("GRU", "frames w r b", "y").with_int("hidden_size", 3));
    assert_has_states("the steps are channels", build.bytes(), &["the.gru.h_in"]);
}

#[test]
fn pools_over_time_keep_their_last_frames() {
    let build = Build::new().input("x", "batch 4 time").output("y", "batch 4 time");
    let pool = node("LpPool", "x", "y").with_ints("kernel_shape", &[3]).with_ints("pads", &[2, 0]);
    assert_has_states("LpPool", build.node(pool).bytes(), &["the.lppool.frames_in"]);
}

/// A GRU over time at each of 5 frequencies: `x` is `[batch, time, 5, 4]`. `order` puts time in front.
fn at_each_frequency(order: &[i64], back: &[i64], batch: &str) -> Build {
    let build = Build::new().input("x", &format!("{batch} time 5 4")).output("y", &format!("{batch} time 5 3"));
    let build = build.recurrent_weights(3).ints("rows", &[3], &[0, -1, 4]).ints("one", &[1], &[1]);
    let build = build.node(NodeProto::make("Transpose", "front", &["x"], &["time_first"]).with_ints("perm", order));
    let build = build.node(NodeProto::make("Reshape", "merge", &["time_first", "rows"], &["merged"]));
    let build = build.node(node("GRU", "merged w r b", "all").with_int("hidden_size", 3));
    let build = build.node(node("Squeeze", "all one", "flat")).node(node("Shape", "time_first", "shape"));
    let build =
        build.ints("none", &[1], &[0]).ints("three", &[1], &[3]).node(node("Slice", "shape none three", "most"));
    let build = build.node(node("Concat", "most three", "apart").with_int("axis", 0));
    let build = build.node(NodeProto::make("Reshape", "split", &["flat", "apart"], &["in_parts"]));
    build.node(NodeProto::make("Transpose", "back", &["in_parts"], &["y"]).with_ints("perm", back))
}

#[test]
fn rows_of_a_layer_that_are_of_the_batch_and_others_are_taken_apart_in_its_state() {
    let cases = [
        ("batch outside", [1, 0, 2, 3], [1, 0, 2, 3], "[batch, 5, 3]"),
        ("batch inside", [1, 2, 0, 3], [2, 0, 1, 3], "[5, batch, 3]"),
    ];
    for (name, order, back, expected) in cases {
        let (converted, compared) =
            checked(at_each_frequency(&order, &back, "batch").bytes(), &Options::default()).unwrap();
        assert_eq!(bracketed(&converted.report.states[0].dims), expected, "{name}");
        assert_eq!(converted.report.states[0].bytes, Some(60), "{name}");
        assert_equal(name, &compared);
        assert_eq!(compared.last().unwrap().what, "rows together and alone", "{name}");
        let open = Options { open_batch: true, ..Options::default() };
        let (converted, compared) = checked(at_each_frequency(&order, &back, "1").bytes(), &open).unwrap();
        assert_eq!(bracketed(&converted.report.states[0].dims), expected, "{name}");
        assert_equal(name, &compared);
    }
}

/// As in dual-path denoisers: a layer over the frequencies of each step, which starts at zeros that the exporter
/// writes, in front of a layer over the steps of each frequency.
#[test]
fn rows_are_followed_through_a_layer_over_frequencies() {
    let mut build = at_each_frequency(&[1, 0, 2, 3], &[1, 0, 2, 3], "batch");
    build.graph.input[0].name = Some("audio".to_owned());
    let build = build.weights("w2", &[1, 12, 4]).weights("r2", &[1, 12, 4]).ints("by_row", &[3], &[5, -1, 4]);
    let build = build.ints("second", &[1], &[1]).ints("four", &[1], &[4]);
    let nodes = [
        NodeProto::make("Transpose", "bins", &["audio"], &["bins"]).with_ints("perm", &[2, 0, 1, 3]),
        NodeProto::make("Reshape", "bins of rows", &["bins", "by_row"], &["of_rows"]),
        NodeProto::make("Shape", "sizes", &["of_rows"], &["sizes"]),
        NodeProto::make("Gather", "rows", &["sizes", "second"], &["row_count"]),
        NodeProto::make("Concat", "of start", &["one", "row_count", "four"], &["of_start"]).with_int("axis", 0),
        NodeProto::make("ConstantOfShape", "start", &["of_start"], &["start"]),
        NodeProto::make("GRU", "over bins", &["of_rows", "w2", "r2", "", "", "start"], &["over"])
            .with_int("hidden_size", 4),
        NodeProto::make("Squeeze", "one way", &["over", "one"], &["one_way"]),
        NodeProto::make("Shape", "of bins", &["bins"], &["of_bins"]),
        NodeProto::make("Reshape", "rows apart", &["one_way", "of_bins"], &["rows_apart"]),
        NodeProto::make("Transpose", "steps", &["rows_apart"], &["x"]).with_ints("perm", &[1, 2, 0, 3]),
    ];
    let (converted, compared) =
        checked(nodes.into_iter().fold(build, Build::node).bytes(), &Options::default()).unwrap();
    let shapes: Vec<String> = converted.report.states.iter().map(|state| bracketed(&state.dims)).collect();
    assert_eq!(shapes, ["[batch, 5, 3]"]);
    assert_equal("dual path", &compared);
    assert_eq!(compared.last().unwrap().what, "rows together and alone");
}

#[test]
fn states_of_such_rows_start_at_learned_values_and_keep_frames() {
    let mut build = at_each_frequency(&[1, 0, 2, 3], &[1, 0, 2, 3], "batch").weights("start", &[1, 1, 3]);
    let layer = build.graph.node.iter_mut().find(|node| node.op_type() == "GRU").unwrap();
    layer.input.extend([String::new(), "starts".to_owned()]);
    let build = build.node(NodeProto::make("Shape", "sizes", &["merged"], &["merged_shape"]));
    let build = build.ints("second", &[1], &[1]).node(node("Gather", "merged_shape second", "count"));
    let build =
        build.node(NodeProto::make("Concat", "repeat", &["one", "count", "one"], &["repeats"]).with_int("axis", 0));
    let build = build.node(node("Tile", "start repeats", "starts"));
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!(converted.report.states[0].starts_at, StartsAt::Model);
    assert_eq!(bracketed(&converted.report.states[0].dims), "[batch, 5, 3]");
    assert_equal("learned", &compared);

    let build = Build::new().input("x", "batch 5 4 time").output("y", "batch 5 3 time").weights("k", &[3, 4, 3]);
    let build = build.ints("three", &[1], &[3]).ints("all", &[1], &[-1]).ints("four", &[1], &[4]);
    let build = build.node(node("Shape", "x", "shape")).node(node("Gather", "shape three", "steps"));
    let build = build.node(node("Concat", "all four steps", "flat").with_int("axis", 0));
    let build = build.node(NodeProto::make("Reshape", "merge", &["x", "flat"], &["merged"]));
    let build = build.node(node("Conv", "merged k", "made").with_ints("pads", &[2, 0])).ints("five", &[1], &[5]);
    let build = build
        .node(NodeProto::make("Concat", "apart", &["all", "five", "three", "steps"], &["back"]).with_int("axis", 0));
    let build = build.node(NodeProto::make("Reshape", "split", &["made", "back"], &["y"]));
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!(bracketed(&converted.report.states[0].dims), "[batch, 5, 4, 2]");
    assert_equal("frames", &compared);
}

/// A causal convolution over time.
fn causal(name: &str, from: &str, to: &str, kernel: i64, stride: i64) -> [NodeProto; 2] {
    let conv = NodeProto::make("Conv", name, &[from, &format!("k{kernel}")], &[&format!("{to}/made")]);
    let conv = conv.with_ints("strides", &[stride]).with_ints("pads", &[kernel - stride, 0]);
    [conv, NodeProto::make("Tanh", &format!("{name}/Tanh"), &[&format!("{to}/made")], &[to])]
}

#[test]
fn strides_of_an_encoder_of_audio_may_be_large() {
    let build = Build::new().input("x", "batch 4 samples").output("y", "frames 1 batch 3").recurrent_weights(3);
    let build = build.weights("k10", &[4, 4, 10]).weights("k8", &[4, 4, 8]).weights("k5", &[4, 4, 5]);
    let convs = [causal("c1", "x", "x1", 10, 5), causal("c2", "x1", "x2", 8, 4), causal("c3", "x2", "x3", 8, 4)];
    let convs = convs.into_iter().chain([causal("c4", "x3", "x4", 5, 4)]).flatten();
    let build = convs.fold(build, Build::node).node(node("Transpose", "x4", "frames").with_ints("perm", &[2, 0, 1]));
    let layer = node("GRU", "frames w r b", "y").with_int("hidden_size", 3);
    let (converted, compared) = checked(build.node(layer).bytes(), &Options::default()).unwrap();
    let expected = ["c1.frames_in", "c2.frames_in", "c3.frames_in", "c4.frames_in", "the.gru.h_in"];
    assert_eq!((states(&converted), converted.report.steps_multiple), (expected.to_vec(), 320));
    let shapes: Vec<String> = converted.report.states.iter().map(|state| bracketed(&state.dims)).collect();
    assert_eq!(shapes[4], "[1, batch, 3]");
    assert_equal("strides", &compared);
    let chunks: Vec<&str> = compared.iter().map(|compared| compared.what.as_str()).collect();
    assert!(chunks.contains(&"chunks of 320") && chunks.contains(&"chunks of 640"), "{chunks:?}");
}

#[test]
fn strides_of_two_axes_and_of_two_branches_may_differ() {
    let build = Build::new().input("x", "batch 2 time 80").output("y", "batch 2 fives 10").weights("k", &[2, 2, 10, 8]);
    let conv = node("Conv", "x k", "y").with_ints("strides", &[5, 8]).with_ints("pads", &[5, 0, 0, 0]);
    let (converted, compared) = checked(build.node(conv).bytes(), &Options::default()).unwrap();
    assert_eq!(converted.report.steps_multiple, 5);
    assert_equal("two axes", &compared);

    let build = Build::new().input("x", "batch 4 time").output("fives", "batch 4 f").output("sevens", "batch 4 s");
    let build = build.weights("k10", &[4, 4, 10]).weights("k14", &[4, 4, 14]);
    let convs = [causal("a", "x", "fives", 10, 5), causal("b", "x", "sevens", 14, 7)];
    let build = convs.into_iter().flatten().fold(build, Build::node);
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!((states(&converted), converted.report.steps_multiple), (vec!["a.frames_in", "b.frames_in"], 35));
    assert_equal("two branches", &compared);
}

#[test]
fn an_open_dimension_that_is_not_the_batch_keeps_its_name() {
    let build = Build::new().input("x", "N time 4").input("e", "K 3").output("y", "time 1 N 3").output("z", "K 3");
    let build = build.recurrent_weights(3).node(node("Relu", "e", "z"));
    let build = build.node(node("Transpose", "x", "frames").with_ints("perm", &[1, 0, 2]));
    let build = build.node(node("GRU", "frames w r b", "y").with_int("hidden_size", 3));
    let (converted, _) = checked(build.bytes(), &Options::default()).unwrap();
    let shapes: Vec<String> = converted.report.outputs.iter().map(|output| bracketed(&output.dims)).collect();
    assert_eq!(shapes, ["[time, 1, N, 3]", "[K, 3]"]);
}

#[test]
fn a_speaker_may_be_repeated_beside_each_step() {
    // As PyTorch writes `repeat` and `permute`.
    let build = Build::new().input("x", "batch time 2").input("speaker", "batch 1").output("y", "time 1 batch 3");
    let build = build.ints("one", &[1], &[1]).ints("zero", &[], &[0]).ints("first", &[1], &[1]).recurrent_weights(3);
    let nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape first", "steps"),
        node("Concat", "one steps one", "times").with_int("axis", 0),
        node("Unsqueeze", "speaker one", "row"),
        node("Tile", "row times", "repeated"),
        NodeProto::make("Concat", "twice", &["repeated", "repeated"], &["two"]).with_int("axis", -1),
        NodeProto::make("Transpose", "to the front", &["two"], &["in_front"]).with_ints("perm", &[1, 0, 2]),
        NodeProto::make("Transpose", "x to the front", &["x"], &["x_in_front"]).with_ints("perm", &[1, 0, 2]),
        NodeProto::make("Concat", "with the speaker", &["x_in_front", "in_front"], &["both"]).with_int("axis", 2),
        node("GRU", "both w r b", "y").with_int("hidden_size", 3),
    ];
    assert_has_states("Tile", nodes.into_iter().fold(build, Build::node).bytes(), &["the.gru.h_in"]);
}
