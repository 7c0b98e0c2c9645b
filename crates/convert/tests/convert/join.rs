//! Graphs that are joined to one, compared with the graphs one after the other.

use std::sync::atomic::{AtomicUsize, Ordering};

use stateful_convert::join::{JoinError, JoinOptions, Joined, Part, dims, join, wires};
use stateful_convert::onnx::schema::{FunctionProto, ModelProto, NodeProto, StringStringEntryProto};
use stateful_convert::onnx::{DataType, read, write};
use stateful_convert::verify::{Amount, Compared, Given, JoinedModels, Source, VerifyError, verify_joined};

use crate::common::{Build, node, pair, runtime, with_graph, with_text};

pub fn part(name: &str, model: &[u8]) -> Part {
    Part { name: name.to_owned(), model: model.to_vec().into(), folder: String::new() }
}

pub fn parts(models: &[(&str, &[u8])]) -> Vec<Part> {
    models.iter().map(|(name, model)| part(name, model)).collect()
}

pub fn wired(text: &str) -> JoinOptions {
    JoinOptions { wires: if text.is_empty() { Vec::new() } else { wires(text).unwrap() }, ..JoinOptions::default() }
}

pub fn compare(parts: &[Part], joined: &Joined) -> Result<Vec<Compared>, VerifyError> {
    compare_amount(parts, joined, Amount::default())
}

pub fn compare_amount(parts: &[Part], joined: &Joined, amount: Amount) -> Result<Vec<Compared>, VerifyError> {
    let models = JoinedModels {
        amount,
        parts: parts.iter().map(|part| Source::Bytes(&part.model)).collect(),
        joined: Source::Bytes(&joined.converted.model),
    };
    verify_joined(runtime(), &models, &joined.plan, &joined.converted.report, &Given::default())
}

/// Joins graphs and compares the result with them.
pub fn checked(models: &[(&str, &[u8])], options: &JoinOptions) -> Joined {
    let parts = parts(models);
    let joined = join(&parts, options).unwrap_or_else(|error| panic!("{error}"));
    let compared = compare(&parts, &joined).unwrap_or_else(|error| panic!("{error}"));
    assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{compared:?}");
    joined
}

pub fn refusal(models: &[(&str, &[u8])], options: &JoinOptions) -> String {
    join(&parts(models), options).unwrap_err().to_string()
}

fn model_of(joined: &Joined) -> ModelProto {
    read(joined.converted.model.clone().into()).unwrap()
}

fn names(joined: &Joined) -> (Vec<String>, Vec<String>, Vec<String>) {
    let report = &joined.converted.report;
    (
        report.inputs.iter().map(|input| input.name.clone()).collect(),
        report.outputs.iter().map(|output| output.name.clone()).collect(),
        report.states.iter().map(|state| state.pair.to_string()).collect(),
    )
}

/// `x [batch, 4]` and a state of 3 give `y [batch, 3]`, by a single step of an RNN.
fn cell(input: &str, output: &str, features: i64) -> Build {
    let shape = Build::new().ints("time", &[1], &[0]).ints("direction", &[1], &[1]);
    shape
        .input(input, &format!("batch {features}"))
        .input("h_in", "1 batch 3")
        .output(output, "batch 3")
        .output("h_out", "1 batch 3")
        .weights("w", &[1, 3, features])
        .weights("r", &[1, 3, 3])
        .weights("b", &[1, 6])
        .node(node("Unsqueeze", &format!("{input} time"), "steps"))
        .node(node("RNN", "steps w r b - h_in", "all h_out").with_int("hidden_size", 3))
        .node(node("Squeeze", "all time_and_direction", output))
        .ints("time_and_direction", &[2], &[0, 1])
}

/// `y = 2 z`, where both have 3 features.
fn double(input: &str, output: &str) -> Build {
    Build::new().input(input, "N 3").output(output, "N 3").node(node("Add", &format!("{input} {input}"), output))
}

#[test]
fn equal_names_need_no_wire_and_states_stay_states() {
    let (first, second) = (cell("x", "y", 4).bytes(), cell("y", "z", 3).bytes());
    let joined = checked(&[("first", &first), ("second", &second)], &wired(""));
    let (inputs, outputs, states) = names(&joined);
    assert_eq!(inputs, ["first.x"]);
    assert_eq!(outputs, ["second.z"]);
    assert_eq!(states, ["<<<first.h_in, first.h_out>>>", "<<<second.h_in, second.h_out>>>"]);
    let graph = model_of(&joined).graph.unwrap();
    assert_eq!(
        graph.doc_string(),
        "InputState, OutputState: <<<first.h_in, first.h_out>>> <<<second.h_in, second.h_out>>>"
    );
}

#[test]
fn wires_name_what_goes_where() {
    let (first, second) = (cell("x", "y", 4).bytes(), double("in", "out").bytes());
    let joined = checked(&[("a", &first), ("b", &second)], &wired("<<<a.y, b.in>>>"));
    assert_eq!(names(&joined).1, ["b.out"]);
    // One output may go to several graphs, and stay an output.
    let options = JoinOptions { outputs: vec!["a.y".to_owned()], ..wired("<<<a.y, b.in>>> <<<a.y, c.in>>>") };
    let joined = checked(&[("a", &first), ("b", &second), ("c", &second)], &options);
    assert_eq!(names(&joined).1, ["a.y", "b.out", "c.out"]);
    // An output may be an input that is wired.
    let through =
        Build::new().input("y", "N 3").output("y", "N 3").output("w", "N 3").node(node("Neg", "y", "w")).bytes();
    let joined = checked(&[("a", &first), ("b", &through)], &wired(""));
    assert_eq!(names(&joined).1, ["b.y", "b.w"]);
    // An input may, too.
    let joined = checked(&[("b", &second), ("c", &second)], &wired("<<<b.in, c.in>>>"));
    assert_eq!(names(&joined).0, ["b.in"]);
}

#[test]
fn a_wire_back_is_a_state() {
    let first = Build::new().input("x", "batch 3").input("fed", "batch 3").output("y", "batch 3");
    let first = first.node(node("Add", "x fed", "y")).bytes();
    let second = double("y", "z").bytes();
    let models: [(&str, &[u8]); 2] = [("a", &first), ("b", &second)];
    // Responses don't have the ends of states, so something else must be an output.
    let error = refusal(&models, &wired("<<<b.z, a.fed>>>"));
    assert!(error.contains("no outputs"), "{error}");
    let options = JoinOptions { outputs: vec!["a.y".to_owned()], ..wired("<<<b.z, a.fed>>>") };
    let joined = checked(&models, &options);
    let (_, outputs, states) = names(&joined);
    assert_eq!((outputs, states), (vec!["a.y".to_owned()], vec!["<<<a.fed, b.z>>>".to_owned()]));
}

#[test]
fn states_may_be_named() {
    let build =
        Build::new().input("x", "batch 3").input("one", "batch 3").output("y", "batch 3").output("two", "batch 3");
    let model = build.node(node("Add", "x one", "two")).node(node("Mul", "two two", "y")).bytes();
    let next = double("y", "z").bytes();
    let options = JoinOptions { states: vec![pair("a.one", "a.two")], ..wired("") };
    let joined = checked(&[("a", &model), ("b", &next)], &options);
    assert_eq!(names(&joined).2, ["<<<a.one, a.two>>>"]);
    let options = JoinOptions { states: vec![pair("a.one", "b.z")], ..wired("") };
    let error = refusal(&[("a", &model), ("b", &next)], &options);
    assert!(error.starts_with("the state <<<a.one, b.z>>> has its ends in two graphs"), "{error}");
}

#[test]
fn dims_may_be_named() {
    // Each tensor has a name of its own for the batch, and the length of the cache is open.
    let build = Build::new().input("x", "x_1 4").input("cache", "cache_1 cache_2 4").output("y", "y_1 4");
    let build = build.output("cache_next", "next_1 next_2 4").ints("first", &[1], &[1]).ints("end", &[1], &[i64::MAX]);
    let build = build
        .node(node("Unsqueeze", "x first", "step"))
        .node(node("Concat", "cache step", "longer").with_int("axis", 1));
    let build = build.node(node("Slice", "longer first end first", "cache_next"));
    let model = build.node(node("ReduceSum", "cache_next first", "y").with_int("keepdims", 0)).bytes();
    let next = Build::new().input("y", "N 4").output("z", "N 4").node(node("Neg", "y", "z")).bytes();
    let models: [(&str, &[u8]); 2] = [("a", &model), ("b", &next)];
    let named = |text: &str| JoinOptions { dims: dims(text).unwrap(), ..wired("") };
    let joined = checked(&models, &named("a.cache=[batch, 3, 4]"));
    let state = &joined.converted.report.states[0];
    assert_eq!(stateful_convert::onnx::bracketed(&state.dims), "[batch, 3, 4]");
    for (text, expected) in [
        ("a.cache=[batch, 3, 5]", "'a.cache' is [cache_1, cache_2, 4] in its graph, and can't be [batch, 3, 5]"),
        ("a.cache=[batch, 3]", "can't be [batch, 3]"),
        ("a.q=[1]", "graph 'a' has no input or output 'q' (it has x, cache, y, cache_next)"),
    ] {
        let error = refusal(&models, &named(text));
        assert!(error.contains(expected), "{error}");
    }
    for wrong in ["", "a.x", "a.x=[", "a.x=[1 2]", "=[1]", "a.x=[1,,2]", "a.x=[1] b"] {
        assert_eq!(dims(wrong), None, "{wrong}");
    }
}

#[test]
fn opsets_are_raised_to_one() {
    let old = Build::new()
        .input("x", "batch 2 3")
        .output("y", "batch 3")
        .node(node("Softmax", "x", "soft"))
        .node(node("ReduceSum", "soft", "sum").with_ints("axes", &[1]))
        .node(node("Squeeze", "sum", "s").with_ints("axes", &[1]))
        .node(node("Unsqueeze", "s", "u").with_ints("axes", &[0]))
        .node(NodeProto::make("Squeeze", "", &["u"], &["v"]).with_ints("axes", &[0]))
        .node(node("Clip", "v", "c"))
        .node(node("Pad", "c", "p").with_ints("pads", &[0, 1, 0, 0]))
        .node(node("Slice", "p", "y").with_ints("axes", &[1]).with_ints("starts", &[1]).with_ints("ends", &[4]));
    let mut old = old;
    old.graph.node[5] = with_float(with_float(old.graph.node[5].clone(), "min", 0.0), "max", 0.6);
    let (old, new) = (old.bytes_of_opset(9), double("y", "z").bytes_of_opset(18));
    let joined = checked(&[("old", &old), ("new", &new)], &wired(""));
    assert_eq!(model_of(&joined).opset_import[0].version(), 18);
    let up = Build::new().input("x", "1 3 4 4").output("y", "1 3 4 4").floats("s", &[4], &[1.0; 4]);
    let up = up.node(node("Upsample", "x s", "y")).bytes_of_opset(9);
    let error = refusal(&[("a", &up), ("b", &new)], &wired("<<<a.y, b.y>>>"));
    assert_eq!(
        error,
        "graph 'a': Upsample 'the upsample' has no equal in newer opsets; opset 10 changed Upsample: export the graph with \
         opset 18"
    );
}

#[test]
fn raised_nodes_answer_as_before() {
    let float = |node, name: &str, value| with_float(node, name, value);
    let x = || Build::new().input("x", "batch 4 6").output("y", "");
    let waves = Build::new().input("x", "batch 6 1").output("y", "");
    let twice = |outputs: &str| node("Split", "x", outputs).with_int("axis", 2);
    let index = |build: Build| build.ints("at", &[1, 1, 2], &[3, 0]).floats("new", &[1, 1, 2], &[7.0, 8.0]);
    let grid = Build::new().input("x", "batch 2 3 4").output("y", "").weights("g", &[1, 5, 5, 2]);
    let grid = grid.floats("like", &[1], &[0.0]).ints("rows", &[1], &[0]);
    let shape = grid.node(node("Shape", "x", "s")).node(node("Gather", "s rows", "n")).ints("rest", &[3], &[5, 5, 2]);
    let grid = shape.node(node("Concat", "n rest", "ns").with_int("axis", 0)).node(node("Expand", "g ns", "gs"));
    let moments = ["scale", "b", "mean", "var"];
    let norm = moments.iter().fold(x(), |build, name| build.floats(name, &[4], &[0.5, 1.0, 1.5, 2.0]));
    let cases = [
        (9, 10, x().node(node("TopK", "x", "y i").with_int("k", 2))),
        (9, 12, x().node(float(node("Dropout", "x", "y"), "ratio", 0.3))),
        (7, 9, norm.node(node("BatchNormalization", "x scale b mean var", "y").with_int("spatial", 1))),
        (
            12,
            13,
            x().node(twice("a b").with_ints("split", &[2, 4]))
                .node(node("ReduceMax", "b", "y").with_ints("axes", &[1])),
        ),
        (12, 18, x().node(twice("a b")).node(node("Sub", "a b", "y"))),
        (17, 18, x().node(twice("a b c")).node(node("Sub", "a b", "y"))),
        (11, 13, x().node(node("LogSoftmax", "x", "y").with_int("axis", 2))),
        (11, 13, x().node(node("Softmax", "x", "y").with_int("axis", -2))),
        (11, 18, x().node(node("ReduceSum", "x", "y").with_ints("axes", &[-1]).with_int("keepdims", 0))),
        (17, 18, x().node(node("ReduceMean", "x", "y").with_ints("axes", &[1]).with_int("keepdims", 0))),
        (17, 20, x().node(node("ReduceL2", "x", "y").with_int("keepdims", 0))),
        (10, 11, x().node(float(node("Clip", "x", "y"), "min", 0.25))),
        (10, 13, x().node(float(node("Clip", "x", "y"), "max", 0.25))),
        (10, 11, x().node(float(node("Pad", "x", "y").with_ints("pads", &[0, 1, 0, 0, 0, 2]), "value", 3.0))),
        (9, 10, x().node(node("Slice", "x", "y").with_ints("starts", &[0, 1]).with_ints("ends", &[9, -1]))),
        (9, 11, index(x()).node(node("Scatter", "x at new", "y").with_int("axis", 2))),
        (17, 20, waves.node(node("DFT", "x", "y"))),
        (16, 20, grid.node(with_text(node("GridSample", "x gs", "y"), "mode", "bilinear"))),
    ];
    for (from, to, build) in cases {
        let old = build.bytes_of_opset(from);
        let other = Build::new().input("w", "batch 3").output("z", "batch 3").node(node("Neg", "w", "z"));
        let other = other.bytes_of_opset(to);
        let graph = read(old.clone().into()).unwrap().graph.unwrap();
        let label = graph.node.iter().map(NodeProto::op_type).collect::<Vec<_>>().join(" ");
        let parts = parts(&[("old", &old), ("other", &other)]);
        let joined = join(&parts, &wired("")).unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(model_of(&joined).opset_import[0].version(), to);
        let compared = compare(&parts, &joined).unwrap_or_else(|error| panic!("{label}: {error}"));
        assert!(compared.iter().all(|compared| compared.largest < 1e-6), "{label}: {compared:?}");
    }
}

fn with_float(mut node: NodeProto, name: &str, value: f32) -> NodeProto {
    use stateful_convert::onnx::schema::{AttributeProto, attribute_proto::AttributeType};
    node.set(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Float.into()),
        f: Some(value),
        ..AttributeProto::default()
    });
    node
}

#[test]
fn functions_and_inner_graphs_keep_their_meaning() {
    let with_function = |op: &str, input: &str, output: &str| {
        let call = NodeProto { domain: Some("own".to_owned()), ..NodeProto::make("Twice", "call", &[input], &["t"]) };
        let branch = |name: &str, op: &str| {
            let build = Build::new().output(name, "").node(node(op, "t t", name));
            build.graph
        };
        let test = with_graph(node("If", "is", output), "then_branch", branch("then", "Add"));
        let test = with_graph(test, "else_branch", branch("else", "Mul"));
        let build = Build::new().input(input, "batch 3").output(output, "batch 3").node(call);
        let build = build.node(node("ReduceSum", "t", "sum").with_int("keepdims", 0)).floats("zero", &[], &[0.0]);
        let mut model = read(build.node(node("Greater", "sum zero", "is")).node(test).bytes().into()).unwrap();
        let mut set = model.opset_import[0].clone();
        model.functions.push(FunctionProto {
            name: Some("Twice".to_owned()),
            domain: Some("own".to_owned()),
            input: vec!["a".to_owned()],
            output: vec!["b".to_owned()],
            node: vec![NodeProto::make(op, "", &["a", "a"], &["b"])],
            opset_import: vec![set.clone()],
            ..FunctionProto::default()
        });
        set.domain = Some("own".to_owned());
        set.version = Some(1);
        model.opset_import.push(set);
        write(&model)
    };
    let (first, second) = (with_function("Add", "x", "y"), with_function("Mul", "y", "z"));
    let joined = checked(&[("a", &first), ("b", &second)], &wired(""));
    let model = model_of(&joined);
    let functions: Vec<&str> = model.functions.iter().map(|function| function.name()).collect();
    assert_eq!(functions, ["a.Twice", "b.Twice"]);
}

#[test]
fn metadata_and_symbols_of_different_graphs_stay_apart() {
    let with = |build: Build, entries: &[(&str, &str)]| {
        let mut model = read(build.bytes().into()).unwrap();
        let entry = |&(key, value): &(&str, &str)| StringStringEntryProto {
            key: Some(key.to_owned()),
            value: Some(value.to_owned()),
        };
        model.metadata_props = entries.iter().map(entry).collect();
        write(&model)
    };
    let first = Build::new().input("x", "N T").output("y", "N T").node(node("Neg", "x", "y"));
    let second = Build::new().input("y", "B U").input("w", "T 1").output("z", "B U").node(node("Add", "y y", "z"));
    let second = second.output("v", "T 1").node(node("Neg", "w", "v"));
    let initial = |state: &str| format!("[{{\"state\":\"{state}\",\"value\":\"1\"}}]");
    let first = with(first, &[("T", "16"), ("author", "me")]);
    let second = with(second, &[("T", "8"), ("author", "me")]);
    let joined = checked(&[("a", &first), ("b", &second)], &wired(""));
    let model = model_of(&joined);
    let metadata: Vec<(&str, &str)> = model.metadata_props.iter().map(|entry| (entry.key(), entry.value())).collect();
    assert_eq!(metadata, [("a.T", "16"), ("author", "me"), ("b.T", "8")]);
    let dims = |name: &str| {
        let graph = model.graph.as_ref().unwrap();
        let found = graph.input.iter().chain(&graph.output).find(|value| value.name() == name).unwrap();
        stateful_convert::onnx::bracketed(&found.dims().unwrap())
    };
    assert_eq!([dims("a.x"), dims("b.z"), dims("b.w")], ["[N, a.T]", "[N, a.T]", "[b.T, 1]"]);
    let state = with(cell("x", "y", 4), &[("stateful.initial_states", &initial("h_in"))]);
    let joined = checked(&[("a", &state), ("b", &double("y", "z").bytes())], &wired(""));
    let entry = &model_of(&joined).metadata_props[0];
    assert_eq!((entry.key(), entry.value()), ("stateful.initial_states", initial("a.h_in").as_str()));
}

#[test]
fn what_cannot_be_joined_is_refused_by_name() {
    let (first, second) = (cell("x", "y", 4).bytes(), double("z", "out").bytes());
    let models: [(&str, &[u8]); 2] = [("a", &first), ("b", &second)];
    for (wires, expected) in [
        ("<<<a.q, b.z>>>", "graph 'a' has no output 'q' (it has y, h_out)"),
        ("<<<a.y, b.q>>>", "graph 'b' has no input 'q' (it has z)"),
        ("<<<c.y, b.z>>>", "'c.y' names no graph: 'graph.tensor' is expected, where graph is one of a, b"),
        ("<<<y, b.z>>>", "'y' names no graph"),
        ("<<<a.y, b.z>>> <<<a.h_out, b.z>>>", "input 'b.z' has two wires"),
        (
            "<<<a.h_out, b.z>>>",
            "'a.h_out' (FLOAT [1, batch, 3]) can't be wired to 'b.z' (FLOAT [N, 3]): one has 3 dimensions",
        ),
        ("<<<a.x, b.z>>>", "'a.x' (FLOAT [batch, 4]) can't be wired to 'b.z' (FLOAT [N, 3])"),
        ("<<<b.out, a.h_in>>>", "'a.h_in' is a state of its graph and can't take 'b.out'"),
        ("<<<b.z, a.x>>>", "the wire <<<b.z, a.x>>> leads to the same or to an earlier graph"),
        ("<<<b.out, a.x>>>", "'a.x' (FLOAT [batch, 4]) and 'b.out' (FLOAT [N, 3]) can't be the two ends of a state"),
    ] {
        let error = refusal(&models, &wired(wires));
        assert!(error.contains(expected), "{wires}: {error}");
    }
    let error = refusal(&[("a", &first), ("a", &second)], &wired(""));
    assert!(error.starts_with("two graphs have the name 'a'"), "{error}");
    let error = refusal(&[("a.b", &first), ("c", &second)], &wired(""));
    assert!(error.starts_with("'a.b' can't be the name of a graph"), "{error}");
    let error = refusal(&[("a", b"no model"), ("c", &second)], &wired(""));
    assert!(error.starts_with("graph 'a': it is no ONNX model"), "{error}");
    let y = double("x", "y").bytes();
    let error = refusal(&[("a", &y), ("b", &y), ("c", &double("y", "z").bytes())], &wired(""));
    assert_eq!(error, "several graphs have an output with the name of input 'c.y': write a wire from one of a.y, b.y");
    let options = JoinOptions { outputs: vec!["a.none".to_owned()], ..wired("<<<a.y, b.z>>>") };
    assert_eq!(refusal(&models, &options), "graph 'a' has no output 'none' (it has y, h_out)");
    let ints = Build::new().typed_input("y", DataType::Int64, "N 3").output("z", "N 3").node(node("Neg", "y", "z"));
    let error = refusal(&[("a", &y), ("b", &ints.bytes())], &wired(""));
    assert!(error.contains("'a.y' (FLOAT [N, 3]) can't be wired to 'b.y' (INT64 [N, 3])"), "{error}");
    let circle = Build::new().input("x", "N 3").output("y", "N 3").node(node("Add", "x b", "a"));
    let circle = circle.node(node("Add", "a x", "b")).node(node("Add", "a b", "y"));
    let error = refusal(&[("a", &circle.bytes()), ("b", &double("y", "z").bytes())], &wired(""));
    assert!(error.starts_with("graph 'a': Add 'the add' waits for its own output"), "{error}");
    let twice =
        Build::new().input("x", "N 3").input("a", "N 3").input("b", "N 3").output("p", "N 3").output("q", "N 3");
    let twice = twice.node(node("Sum", "x a b", "p")).node(node("Neg", "p", "q")).bytes();
    let error = refusal(&[("g", &twice), ("h", &second)], &wired("<<<g.p, g.a>>> <<<g.p, g.b>>> <<<g.q, h.z>>>"));
    assert!(error.contains("output 'g.p' would be the next value of two states"), "{error}");
    let rivals = Build::new().input("x", "N 3").input("h_in", "N 3").output("h_out", "N 3").output("h_new", "N 3");
    let rivals = rivals.node(node("Add", "x h_in", "h_out")).node(node("Neg", "h_out", "h_new")).bytes();
    let error = refusal(&[("a", &rivals), ("b", &second)], &wired(""));
    let expected = "graph 'a': the names of its inputs and outputs can be paired in several ways as states \
                    (<<<h_in, h_out>>> <<<h_in, h_new>>>): ";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn a_model_that_differs_from_its_graphs_is_found() {
    let (first, second) = (cell("x", "y", 4).bytes(), double("y", "z").bytes());
    let of = parts(&[("a", &first), ("b", &second)]);
    let mut joined = join(&of, &wired("")).unwrap();
    let mut model = model_of(&joined);
    for node in &mut model.graph.as_mut().unwrap().node {
        if node.op_type() == "Add" {
            node.op_type = Some("Mul".to_owned());
        }
    }
    joined.converted.model = write(&model);
    let error = compare(&of, &joined).unwrap_err();
    assert!(matches!(error, VerifyError::Differs(_)), "{error}");
    assert!(matches!(join(&of, &wired("<<<a.y, b.w>>>")), Err(JoinError::NoTensor { .. })));
}

#[test]
fn any_joined_graphs_answer_as_their_graphs_without_a_panic() {
    let amount = Amount { chunks: 2, rows: vec![1, 2] };
    let (compared, built_in) = (AtomicUsize::new(0), AtomicUsize::new(0));
    crate::inputs::run("joining", 100, |bytes| {
        let Some((parts, joined)) = crate::joined::joined(bytes) else { return };
        match compare_amount(&parts, &joined, amount.clone()) {
            Ok(_) => {
                compared.fetch_add(1, Ordering::Relaxed);
                built_in.fetch_add(usize::from(parts[0].name != "g0"), Ordering::Relaxed);
            }
            // ONNX Runtime refuses or fails at many changed graphs, but what it runs must be what its graphs are.
            Err(VerifyError::Differs(why)) => panic!("{why}"),
            Err(_) => {}
        }
    });
    assert!(compared.into_inner() > 0 && built_in.into_inner() > 0);
}
