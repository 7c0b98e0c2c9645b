//! Lengths of rows (`sequence_lens`) that requests say: rows that are shorter than their request, and go on in a later
//! one.

use stateful_convert::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use stateful_convert::onnx::{DataType, read, write};
use stateful_convert::report::Role;
use stateful_convert::{Options, convert};

use crate::common::{Build, FLOAT, assert_equal, checked, compare, dims, node, refusal, states, with_graph};

/// `x [time, batch, 4]` and `lens`, with weights of two recurrent layers.
fn inputs(gates: i64) -> Build {
    let build = Build::new().input("x", "time batch 4").typed_input("lens", DataType::Int32, "batch");
    build.recurrent_weights(gates).weights("w2", &[1, 3 * gates, 3]).ints("one", &[1], &[1])
}

fn named(name: &str, node: NodeProto) -> NodeProto {
    NodeProto { name: Some(name.to_owned()), ..node }
}

/// A layer of three units.
fn layer(op: &str, name: &str, inputs: &str, outputs: &str) -> NodeProto {
    named(name, node(op, inputs, outputs).with_int("hidden_size", 3))
}

/// Two GRUs. `lens` are the lengths of the second.
fn two_layers(lens: &str) -> Build {
    let build = inputs(3).output("y", "time 1 batch 3").typed_input("others", DataType::Int32, "batch");
    let build = build.node(node("Cast", "lens", "cast").with_int("to", 6));
    let build = build.node(layer("GRU", "first", "x w r b lens", "all"));
    let build = build.node(node("Squeeze", "all one", "between"));
    build.node(layer("GRU", "second", &format!("between w2 r b {lens}"), "y"))
}

const HELPS: &str = "export the model without lengths and send rows of equal length in a request, or give this node the \
                     same lengths";

#[test]
fn states_that_would_take_in_the_padding_of_shorter_rows_are_refused() {
    let why = "doesn't take the lengths of rows that GRU 'first' takes (sequence_lens from 'lens'), so its state would take \
               in the padding of shorter rows";
    assert_eq!(refusal(two_layers("-").bytes(), &Options::default()), format!("GRU 'second' {why}; {HELPS}"));
    // Lengths of something else.
    assert_eq!(refusal(two_layers("others").bytes(), &Options::default()), format!("GRU 'second' {why}; {HELPS}"));

    let body = GraphProto {
        name: Some("body".to_owned()),
        node: vec![node("Add", "s_in x_in", "s_out"), node("Tanh", "s_out", "y_out")],
        input: ["s_in", "x_in"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("batch 4"))).to_vec(),
        output: ["s_out", "y_out"].map(|name| ValueInfoProto::tensor(name, FLOAT, &dims("batch 4"))).to_vec(),
        ..GraphProto::default()
    };
    let scan = with_graph(node("Scan", "s x", "- z"), "body", body).with_int("num_scan_inputs", 1);
    let build = inputs(3).output("y", "time 1 batch 3").output("z", "time 2 4").weights("s", &[2, 4]);
    let build = build.node(scan).node(layer("GRU", "first", "x w r b lens", "y"));
    assert_eq!(refusal(build.bytes(), &Options::default()), format!("Scan 'the scan' {why}; {HELPS}"));

    let build = inputs(3).output("y", "time 1 batch 3").weights("k", &[4, 4, 3]);
    let build = build.node(node("Transpose", "x", "in_front").with_ints("perm", &[1, 2, 0]));
    let build = build.node(node("Conv", "in_front k", "c").with_ints("pads", &[2, 0]));
    let build = build.node(named("back", node("Transpose", "c", "z").with_ints("perm", &[2, 0, 1])));
    let build = build.node(layer("GRU", "first", "z w r b lens", "y"));
    assert_eq!(refusal(build.bytes(), &Options::default()), format!("Conv 'the conv' {why}; {HELPS}"));
}

#[test]
fn layers_with_the_same_lengths_are_converted() {
    for lens in ["lens", "cast", "flat", "twice_negative", "largest"] {
        let build = two_layers(lens).node(node("Flatten", "lens", "column").with_int("axis", 1));
        let build = build.node(named("flat", node("Squeeze", "column one", "flat")));
        let build = build.node(node("Neg", "lens", "negative"));
        let mut build =
            build.node(named("back", node("Neg", "negative", "twice_negative"))).node(node("Max", "lens", "largest"));
        build.graph.input.retain(|input| input.name() != "others");
        let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
        assert_eq!(states(&converted), ["first.h_in", "second.h_in"]);
        assert_equal(lens, &compared);
        assert_eq!(compared.last().unwrap().what, "rows of different lengths");
    }
}

#[test]
fn one_row_may_be_shorter_than_its_request() {
    for (op, gates) in [("LSTM", 4), ("GRU", 3), ("RNN", 1)] {
        let build = Build::new().input("x", "time 1 4").typed_input("lens", DataType::Int32, "1");
        let build = build.output("last", "1 1 3").recurrent_weights(gates);
        let build = build.node(layer(op, "first", "x w r b lens", "- last"));
        let (_, compared) = checked(build.bytes(), &Options::default()).unwrap();
        assert_equal(op, &compared);
        assert_eq!(compared.last().unwrap().what, "rows of different lengths");
    }
}

#[test]
fn a_comparison_finds_a_state_that_takes_in_the_padding_of_shorter_rows() {
    let mut build = two_layers("lens");
    build.graph.input.retain(|input| input.name() != "others");
    let original = build.bytes();
    let mut converted = convert(original.clone().into(), &Options::default()).unwrap();
    compare(&original, &converted).unwrap();
    // As if the second layer had been converted without its lengths.
    let without_lengths = |bytes: Vec<u8>| {
        let mut model = read(bytes.into()).unwrap();
        for node in &mut model.graph.as_mut().unwrap().node {
            if node.name() == "second" {
                node.input[4].clear();
            } else if node.op() == "Where" && node.input[1] == "second.h_in" {
                *node = NodeProto::make("Identity", node.name(), &[&node.input[2]], &[&node.output[0]]);
            }
        }
        write(&model)
    };
    converted.model = without_lengths(converted.model);
    let error = compare(&without_lengths(original), &converted).unwrap_err().to_string();
    assert!(error.contains("in rows of different lengths, output 'y' differs"), "{error}");
}

/// A model that sorts its rows with a `TopK` over `of`, as PyTorch does, and takes the lengths `lens_of_layer`.
fn sorting(before: Vec<NodeProto>, of: &str, largest: i64, after: Vec<NodeProto>, lens_of_layer: &str) -> Vec<u8> {
    let top = |from: &str, to: &[&str], largest: i64| {
        NodeProto::make("TopK", to[1], &[from, "rows"], to).with_int("axis", 0).with_int("largest", largest)
    };
    let gather = |from: &str, by: &str, to: &str, axis: i64| {
        NodeProto::make("Gather", to, &[from, by], &[to]).with_int("axis", axis)
    };
    let mut nodes = before;
    nodes.extend([NodeProto::make("Shape", "a", &["lens"], &["rows"]), top(of, &["sorted", "order"], largest)]);
    nodes.extend(after);
    nodes.extend([
        gather("x", "order", "xs", 1),
        layer("GRU", "first", &format!("xs w r b {lens_of_layer}"), "ys"),
        top("order", &["numbers", "back"], 0),
        gather("ys", "back", "y", 2),
    ]);
    nodes.into_iter().fold(inputs(3).output("y", "time 1 batch 3"), Build::node).bytes()
}

#[test]
fn sorts_of_the_rows_are_removed_or_refused() {
    let negative = |from: &str, to: &str| vec![NodeProto::make("Neg", to, &[from], &[to])];
    for bytes in [
        sorting(vec![], "lens", 1, vec![], "sorted"),
        sorting(vec![], "lens", 0, vec![], "sorted"),
        sorting(negative("lens", "of"), "of", 0, negative("sorted", "lens_of_layer"), "lens_of_layer"),
    ] {
        assert_equal("a sort", &checked(bytes, &Options::default()).unwrap().1);
    }
    // The lengths are gathered in the order that the sort gives, or reversed.
    let gather = vec![NodeProto::make("Gather", "g", &["lens", "order"], &["lens_of_layer"])];
    let reverse = NodeProto::make("Slice", "s", &["sorted", "from", "to", "axis", "back"], &["lens_of_layer"]);
    for (node, nodes) in [("Gather 'g'", gather), ("Slice 's'", vec![reverse])] {
        let message = refusal(sorting(vec![], "lens", 1, nodes, "lens_of_layer"), &Options::default());
        let expected = format!(
            "{node} makes the lengths of rows of GRU 'first' (sequence_lens), and it isn't known whether it leaves them and"
        );
        assert!(message.starts_with(&expected), "{message}");
    }
    // A part of the rows.
    let mut model = read(sorting(vec![], "lens", 1, vec![], "sorted").into()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.node[0] = node("Identity", "one", "rows");
    let message = refusal(write(&model), &Options::default());
    assert!(message.starts_with("TopK 'order' makes the lengths of rows of GRU 'first'"), "{message}");
}

#[test]
fn lengths_that_are_computed_from_integers_get_lengths_in_the_comparison() {
    // Each node reads the one before twice, so there are 2^40 ways to the input.
    let name = |number: usize| if number == 0 { "lens".to_owned() } else { format!("m{number}") };
    let twice =
        |number| NodeProto::make("Max", &name(number), &[&name(number - 1), &name(number - 1)], &[&name(number)]);
    let build = (1..=40).map(twice).fold(inputs(3).output("y", "time 1 batch 3"), Build::node);
    let build = build.node(layer("GRU", "first", &format!("x w r b {}", name(40)), "y"));
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!(converted.report.inputs[1].role, Role::Lengths);
    assert_equal("computed lengths", &compared);
}

#[test]
fn packed_layers_that_sort_the_rows_each_are_converted() {
    let top = |from: &str, to: &[&str], largest: i64| {
        NodeProto::make("TopK", to[1], &[from, "rows"], to).with_int("axis", 0).with_int("largest", largest)
    };
    let gather = |from: &str, by: &str, to: &str, axis: i64| {
        NodeProto::make("Gather", to, &[from, by], &[to]).with_int("axis", axis)
    };
    let nodes = [
        NodeProto::make("Shape", "a", &["lens"], &["rows"]),
        top("lens", &["sorted", "order"], 1),
        gather("x", "order", "xs", 1),
        layer("GRU", "first", "xs w r b sorted", "all"),
        node("Squeeze", "all one", "between"),
        top("order", &["numbers", "back"], 0),
        gather("between", "back", "in_order", 1),
        node("Cast", "lens", "lens_again").with_int("to", 7),
        top("lens_again", &["sorted_again", "order_again"], 1),
        gather("in_order", "order_again", "zs", 1),
        named("cast again", node("Cast", "sorted_again", "lens_of_second")).with_int("to", 6),
        layer("GRU", "second", "zs w2 r b lens_of_second", "ys"),
        top("order_again", &["numbers_again", "back_again"], 0),
        gather("ys", "back_again", "y", 2),
    ];
    let build = nodes.into_iter().fold(inputs(3).output("y", "time 1 batch 3"), Build::node);
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!(states(&converted), ["first.h_in", "second.h_in"]);
    assert_equal("packed layers", &compared);
}

#[test]
fn a_comparison_finds_states_that_go_to_other_rows() {
    for largest in [0, 1] {
        let original = sorting(vec![], "lens", largest, vec![], "sorted");
        let mut converted = convert(original.clone().into(), &Options::default()).unwrap();
        compare(&original, &converted).unwrap();
        // As if the sort had stayed.
        let mut model = read(converted.model.into()).unwrap();
        let graph = model.graph.as_mut().unwrap();
        graph.node.retain(|node| node.output[0] != "order");
        let sort = graph.node.iter().position(|node| node.output[0] == "sorted").unwrap();
        let top = NodeProto::make("TopK", "order", &["lens", "order.rows"], &["sorted", "order"]);
        let sorted = top.with_int("axis", 0).with_int("largest", largest);
        graph.node.remove(sort);
        let rows = graph.node.iter().position(|node| node.output[0] == "order.rows").unwrap();
        graph.node.insert(rows + 1, sorted);
        converted.model = write(&model);
        let error = compare(&original, &converted).unwrap_err().to_string();
        assert!(error.contains("output 'y' differs"), "{largest}: {error}");
    }
}

#[test]
fn lengths_that_something_else_reads_are_refused() {
    let read = |from: &str, nodes: Vec<NodeProto>| {
        let mut build = two_layers("lens").ints("hundred", &[1], &[100]);
        build.graph.node.extend(nodes);
        let long = node("Cast", from, "wide").with_int("to", 7);
        let build = build.node(named("long", long)).node(node("Greater", "wide hundred", "is_long"));
        let build = build.node(named("number", node("Cast", "is_long", "number").with_int("to", FLOAT.into())));
        let build = build.node(node("Unsqueeze", "number one", "added")).node(node("Add", "y added", "z"));
        build.output("z", "time 1 batch 3").bytes()
    };
    for (from, name, nodes) in [
        ("lens", "wide", vec![]),
        ("most", "wide", vec![node("ReduceMax", "lens", "most")]),
        ("same", "wide", vec![node("Identity", "lens", "same")]),
    ] {
        let message = refusal(read(from, nodes), &Options::default());
        let why = format!(
            "Greater 'the greater' reads lengths of rows (sequence_lens) from '{name}', and gets those of a request in place \
             of those of the whole input"
        );
        assert!(message.starts_with(&why), "{from}: {message}");
    }
    // How many rows there are is the same in each request.
    let rows = vec![
        node("Shape", "lens", "rows"),
        node("ConstantOfShape", "rows", "ones").with_tensor("value", stateful_convert::onnx::int64s("", &[1], &[1])),
    ];
    let (_, compared) = checked(read("ones", rows), &Options::default()).unwrap();
    assert_equal("rows", &compared);
}

#[test]
fn constant_lengths_are_refused() {
    let build = Build::new().input("x", "time 2 4").output("y", "time 1 2 3").recurrent_weights(3);
    let build = build.ints("sixty", &[2], &[60, 60]).node(node("Cast", "sixty", "lens").with_int("to", 6));
    let build = build.node(layer("GRU", "first", "x w r b lens", "y"));
    let expected = "GRU 'first' takes constant lengths of rows (sequence_lens from 'lens'), and requests have other \
                    lengths; export the model without lengths";
    assert_eq!(refusal(build.bytes(), &Options::default()), expected);
}
