//! Lengths of rows (`sequence_lens`) that requests say: rows that are shorter than their request, and go on in a later one.

use stateful_convert::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use stateful_convert::onnx::{DataType, read, write};
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
    let why = "takes no lengths of rows as GRU 'first' does (sequence_lens), so its state would take in the padding of \
               shorter rows";
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
    for lens in ["lens", "cast"] {
        let mut build = two_layers(lens);
        build.graph.input.retain(|input| input.name() != "others");
        let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
        assert_eq!(states(&converted), ["first.h_in", "second.h_in"]);
        assert_equal(lens, &compared);
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
