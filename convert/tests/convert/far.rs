//! Models that answer otherwise from some number of steps on, beyond those of the comparison. Each must be refused: it
//! would take the number of steps of a request for that of the whole input.

use stateful_convert::Options;
use stateful_convert::onnx::DataType;
use stateful_convert::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};

use crate::common::{Build, FLOAT, dims, node, refusal, with_graph, with_text};

/// A node whose name is that of its first output.
fn make(op: &str, inputs: &str, outputs: &str) -> NodeProto {
    let name = outputs.split_whitespace().next().map(str::to_owned);
    NodeProto { name, ..node(op, inputs, outputs) }
}

/// A GRU over `x [time, batch, 4]` whose answers are `h [time, batch, 3]`, and the last one `last [1, batch, 3]`. The number
/// of steps is `steps`. From 100 of them on, `number` is 1 and `factor` is 1.0, before that 0. The nodes make `y`.
fn refused(nodes: Vec<NodeProto>) -> String {
    let cast = |to: &str, elem: i32| make("Cast", "is_long", to).with_int("to", elem.into());
    let all = [
        make("Shape", "x", "shape"),
        make("Gather", "shape none", "steps"),
        make("Greater", "steps hundred", "is_long"),
        cast("number", DataType::Int64.into()),
        cast("factor", FLOAT),
        make("GRU", "x w r b", "all last").with_int("hidden_size", 3),
        make("Squeeze", "all one", "h"),
    ];
    let build = Build::new().input("x", "time batch 4").output("y", "time batch 3").recurrent_weights(3);
    let build = build.weights("scale", &[3]).weights("ones", &[1, 1, 3]);
    let build = build.ints("none", &[1], &[0]).ints("hundred", &[1], &[100]).ints("one", &[1], &[1]);
    let build = build.ints("two", &[1], &[2]).ints("ends", &[1], &[i64::MAX]).ints("front", &[5], &[0; 5]);
    let build = build.ints("behind", &[2], &[1, 2]).ints("start", &[], &[0]).ints("step", &[], &[1]);
    refusal(all.into_iter().chain(nodes).fold(build, Build::node).bytes(), &Options::default())
}

/// A body of a `Scan` that adds `added` to each step.
fn adding(added: &str) -> GraphProto {
    GraphProto {
        name: Some("body".to_owned()),
        node: vec![make("Add", &format!("h_in {added}"), "sum")],
        input: vec![ValueInfoProto::tensor("h_in", FLOAT, &dims("batch 3"))],
        output: vec![ValueInfoProto::tensor("sum", FLOAT, &dims("batch 3"))],
        ..GraphProto::default()
    }
}

/// A body of a `Loop` that adds 1 to what it carries.
fn counting() -> GraphProto {
    let scalar = |name: &str, elem: DataType| ValueInfoProto::tensor(name, elem.into(), &[]);
    GraphProto {
        name: Some("body".to_owned()),
        node: vec![make("Add", "carried one", "next"), make("Identity", "on", "go")],
        input: vec![
            scalar("turn", DataType::Int64),
            scalar("on", DataType::Bool),
            ValueInfoProto::tensor("carried", DataType::Int64.into(), &dims("1")),
        ],
        output: vec![scalar("go", DataType::Bool), ValueInfoProto::tensor("next", DataType::Int64.into(), &dims("1"))],
        ..GraphProto::default()
    }
}

#[test]
fn parameters_that_depend_on_the_number_of_steps_are_refused() {
    let scaled = |what: &str| make("Mul", &format!("{what} factor"), "own");
    let einsum = with_text(make("Einsum", "h own", "y"), "equation", "abc,c->abc");
    let scan = with_graph(make("Scan", "h", "y"), "body", adding("factor")).with_int("num_scan_inputs", 1);
    for (node, nodes) in [
        ("Gather 'y'", vec![make("Gather", "h number", "y").with_int("axis", 2)]),
        ("Slice 'y'", vec![make("Slice", "h number ends two", "y")]),
        ("LayerNormalization 'y'", vec![scaled("scale"), make("LayerNormalization", "h own", "y")]),
        ("Einsum 'y'", vec![scaled("scale"), einsum]),
        ("TopK 'y'", vec![make("Add", "number one", "k"), make("TopK", "h k", "y indices")]),
        ("Pad 'y'", vec![make("Concat", "front number", "pads").with_int("axis", 0), make("Pad", "h pads", "y")]),
        ("GRU 'y'", vec![scaled("b"), make("GRU", "x w r own", "y").with_int("hidden_size", 3)]),
        // Of the last step.
        ("Gather 'y'", vec![make("Gather", "last number", "y").with_int("axis", 2)]),
        // In a body.
        ("Add 'sum'", vec![scan]),
    ] {
        let message = refused(nodes);
        let is_right = message.starts_with(node) && message.contains("depends on the length of the whole input");
        assert!(is_right, "{node}: {message}");
    }
}

#[test]
fn limits_beyond_the_steps_of_the_comparison_are_refused() {
    let limited = || make("Min", "steps hundred", "limited");
    for (node, nodes) in [
        // Of a mask with more elements than the longest probe follows.
        (
            "Mul 'y'",
            vec![
                make("Squeeze", "steps", "count"),
                make("Range", "start count step", "numbers"),
                make("Less", "numbers hundred", "is_early"),
                make("Cast", "is_early", "early").with_int("to", FLOAT.into()),
                make("Unsqueeze", "early behind", "column"),
                make("Mul", "column ones", "mask"),
                make("Mul", "h mask", "y"),
            ],
        ),
        (
            "Gather 'y'",
            vec![limited(), make("Sub", "limited one", "at"), make("Gather", "h at", "y").with_int("axis", 0)],
        ),
    ] {
        let message = refused(nodes);
        assert!(message.starts_with(node), "{node}: {message}");
    }
}

#[test]
fn loops_whose_turns_depend_on_a_step_are_refused() {
    let loops = |turns: &str| with_graph(make("Loop", &format!("{turns} - none"), "count"), "body", counting());
    let message = refused(vec![
        make("ReduceSum", "last", "sum").with_int("keepdims", 0),
        make("Cast", "sum", "turns").with_int("to", DataType::Int64 as i64),
        loops("turns"),
        make("Cast", "count", "counted").with_int("to", FLOAT.into()),
        make("Add", "h counted", "y"),
    ]);
    assert!(message.starts_with("Add 'y' combines each step with 'counted', which only the last one has"), "{message}");
}
