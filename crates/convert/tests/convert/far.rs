//! Models that answer otherwise from some number of steps on, beyond those of the comparison. Each must be refused: it
//! would take the number of steps of a request for that of the whole input.

use stateful_convert::onnx::DataType;
use stateful_convert::onnx::schema::{GraphProto, NodeProto, ValueInfoProto};
use stateful_convert::{Options, convert};

use crate::common::{Build, FLOAT, checked, compare, dims, node, refusal, with_graph, with_text};

/// A node whose name is that of its first output.
fn make(op: &str, inputs: &str, outputs: &str) -> NodeProto {
    let name = outputs.split_whitespace().next().map(str::to_owned);
    NodeProto { name, ..node(op, inputs, outputs) }
}

/// A GRU over `x [time, batch, 4]` whose answers are `h [time, batch, 3]`, and the last one `last [1, batch, 3]`. The
/// number of steps is `steps`. From 100 of them on, `number` is 1 and `factor` is 1.0, before that 0. The nodes make
/// `y`.
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
    let build = build.ints("right", &[6], &[0, 0, 0, 0, 0, 1]);
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
    let body = GraphProto { node: vec![make("Identity", "factor", "sum")], ..adding("factor") };
    let given = with_graph(make("Scan", "h", "y"), "body", body).with_int("num_scan_inputs", 1);
    for (node, nodes) in [
        ("Gather 'y'", vec![make("Gather", "h number", "y").with_int("axis", 2)]),
        ("Slice 'y'", vec![make("Slice", "h number ends two", "y")]),
        ("LayerNormalization 'y'", vec![scaled("scale"), make("LayerNormalization", "h own", "y")]),
        ("Einsum 'y'", vec![scaled("scale"), einsum]),
        ("TopK 'y'", vec![make("Add", "number one", "k"), make("TopK", "h k", "y indices")]),
        ("Pad 'y'", vec![make("Concat", "front number", "pads").with_int("axis", 0), make("Pad", "h pads", "y")]),
        ("GRU 'y'", vec![scaled("b"), make("GRU", "x w r own", "y").with_int("hidden_size", 3)]),
        ("Pad 'y'", vec![make("Pad", "h right factor", "y")]),
        // Stacked by a body.
        ("Scan 'y'", vec![given]),
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

/// A GRU over `x`, whose answers have `added` from the nodes.
fn adding_what(nodes: Vec<NodeProto>, number: i64) -> Vec<u8> {
    let before = [make("Shape", "x", "shape"), make("Gather", "shape none", "steps")];
    let behind = [
        make("GRU", "x w r b", "h last").with_int("hidden_size", 3),
        make("Cast", "is_so", "added").with_int("to", FLOAT.into()),
        make("Add", "h added", "y"),
    ];
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(3);
    let build = build.ints("none", &[1], &[0]).ints("number", &[1], &[number]);
    before.into_iter().chain(nodes).chain(behind).fold(build, Build::node).bytes()
}

#[test]
fn numbers_of_steps_below_those_that_shapes_are_computed_for_are_compared() {
    let less = || vec![make("Less", "steps number", "is_so")];
    let multiple = || vec![make("Mod", "steps number", "rest"), make("Equal", "rest none", "is_so")];
    for (nodes, number) in [(less(), 5), (less(), 20), (less(), 47), (multiple(), 3), (multiple(), 5), (multiple(), 7)]
    {
        let model = adding_what(nodes, number);
        let error = match convert(model.clone().into(), &Options::default()) {
            Ok(converted) => compare(&model, &converted).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        let is_right = error.contains("differs from the original") || error.contains("depends on the length");
        assert!(is_right, "{number}: {error}");
    }
}

#[test]
fn outputs_without_steps_that_depend_on_their_number_are_refused() {
    let mut model =
        stateful_convert::onnx::read(adding_what(vec![make("Less", "steps none", "is_so")], 0).into()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.output.push(ValueInfoProto::tensor("steps", DataType::Int64.into(), &dims("1")));
    let message = refusal(stateful_convert::onnx::write(&model), &Options::default());
    assert!(message.starts_with("Gather 'steps' gives 'steps', which depends on the length"), "{message}");
}

/// A mask of the first 100 steps.
#[test]
fn masks_are_followed_through_operators_that_move_them() {
    let masked = |op: NodeProto| {
        let nodes = [
            make("Shape", "x", "shape"),
            make("Gather", "shape start", "steps"),
            make("Range", "start steps step", "positions"),
            make("Less", "positions hundred", "is_first"),
            make("Cast", "is_first", "first").with_int("to", FLOAT.into()),
            make("Unsqueeze", "first axes", "mask"),
            op,
            make("Mul", "x wide", "masked"),
            make("GRU", "masked w r b", "y last").with_int("hidden_size", 3),
        ];
        let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(3);
        let build = build.ints("start", &[], &[0]).ints("step", &[], &[1]).ints("hundred", &[1], &[100]);
        let build = build.ints("axes", &[2], &[1, 2]).ints("times", &[3], &[1, 1, 4]);
        refusal(nodes.into_iter().fold(build, Build::node).bytes(), &Options::default())
    };
    for op in [
        make("Tile", "mask times", "wide"),
        make("Concat", "mask mask mask mask", "wide").with_int("axis", 2),
        make("Expand", "mask times", "wide"),
    ] {
        let message = masked(op);
        assert!(message.contains("along x@0, Mul 'masked' "), "{message}");
    }
}

#[test]
fn a_condition_on_the_number_of_rows_keeps_the_batch_closed() {
    let nodes = [
        make("Shape", "x", "shape"),
        make("Gather", "shape one", "rows"),
        make("Greater", "rows three", "is_so"),
        make("Cast", "is_so", "added").with_int("to", FLOAT.into()),
        make("GRU", "x w r b", "h last").with_int("hidden_size", 3),
        make("Add", "h added", "y"),
    ];
    let build = Build::new().input("x", "time 1 4").output("y", "time 1 1 3").recurrent_weights(3);
    let build = build.ints("one", &[1], &[1]).ints("three", &[1], &[3]);
    let model = nodes.into_iter().fold(build, Build::node).bytes();
    checked(model.clone(), &Options::default()).unwrap();
    let message = refusal(model, &Options { open_batch: true, ..Options::default() });
    assert!(message.starts_with("Add 'y' "), "{message}");
}
