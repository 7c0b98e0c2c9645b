//! The command `stateful-convert`: its arguments, what it writes, and its texts.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::common::{Build, export, folder, library, node};

pub fn command(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stateful-convert"))
        .env("ORT_DYLIB_PATH", library())
        .args(arguments)
        .output()
        .unwrap()
}

pub fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

pub fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_model_repository_gets_the_model_its_initial_states_and_a_configuration() {
    let folder = folder();
    let folder = folder.join("models/lstm");
    let output = folder.join("1/model.onnx");
    let done = command(&[path(&export("torch_lstm_learned")), "-o", path(&output), "--chunk", "5"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let table = text(&done.stdout);
    assert!(table.contains("states: 128 bytes a sequence") && table.contains("all at once"), "{table}");
    assert!(output.exists() && folder.join("1/model_initial_states.onnx").exists());
    let config = fs::read_to_string(folder.join("config.pbtxt")).unwrap();
    for line in [
        "backend: \"stateful\"",
        "max_batch_size: 64",
        "input { name: \"x\" data_type: TYPE_FP32 dims: [ 5, 4 ] }",
        "parameters { key: \"initial_state_model\" value { string_value: \"model_initial_states.onnx\" } }",
    ] {
        assert!(config.lines().any(|other| other == line), "{line} in {config}");
    }
    let again = command(&[path(&export("torch_lstm_learned")), "-o", path(&output)]);
    assert!(text(&again.stderr).contains("model.onnx exists; --force replaces it"), "{}", text(&again.stderr));
}

#[test]
fn help_names_the_option() {
    let learned = command(&[path(&export("torch_lstm_learned")), "--dry-run"]);
    assert!(text(&learned.stdout).contains("--zero-initial-states starts them at zero"), "{}", text(&learned.stdout));
    let json = command(&[path(&export("torch_lstm_learned")), "--dry-run", "--json"]);
    assert!(text(&json.stdout).contains("--zero-initial-states starts them at zero"), "{}", text(&json.stdout));
    let given = command(&[path(&export("torch_lstm_given")), "--dry-run"]);
    assert!(text(&given.stderr).contains("name the pairs with --states"), "{}", text(&given.stderr));
}

#[test]
fn states_may_start_at_zero_although_the_model_starts_elsewhere() {
    let output = folder().join("1/model.onnx");
    let done = command(&[path(&export("torch_lstm_learned")), "-o", path(&output), "--zero-initial-states"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(output.exists() && !output.with_file_name("model_initial_states.onnx").exists());
}

#[test]
fn the_page_shows_what_is_printed() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/convert.md");
    let page = fs::read_to_string(page).unwrap();
    let printed = text(&command(&[path(&export("torch_gru")), "--dry-run"]).stdout);
    // Whether rows are equal bit by bit depends on the processor.
    let (tables, _) = printed.split_once(" compared with the original").unwrap();
    assert!(page.contains(tables), "{printed}");
    let refused = text(&command(&[path(&export("torch_lstm_bidirectional")), "--dry-run"]).stderr);
    assert!(page.replace('\n', " ").contains(refused.trim_end()), "{refused}");
}

#[test]
fn a_dry_run_writes_nothing_and_says_what_it_would() {
    let done = command(&[path(&export("torch_gru")), "--dry-run", "--json"]);
    let said: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(said["report"]["states"][0]["input"], "r.GRU.h_in");
    assert_eq!(said["report"]["states"][0]["dims"][1], "batch");
    assert_eq!(said["compared"][0]["what"], "chunks of 1");
    assert!(said["compared"][0]["largest"].as_f64().unwrap() < 1e-6);
    assert_eq!(said["written"], Value::Null);
}

#[test]
fn a_refusal_names_the_node_and_writes_nothing() {
    let folder = folder();
    let output = folder.join("model.onnx");
    let done = command(&[path(&export("torch_lstm_bidirectional")), "-o", path(&output)]);
    assert!(!done.status.success());
    assert!(
        text(&done.stderr).starts_with("stateful-convert: LSTM '/r/LSTM' is bidirectional"),
        "{}",
        text(&done.stderr)
    );
    assert_eq!(folder.read_dir().unwrap().count(), 0);
}

#[test]
fn a_batch_is_not_opened_without_the_states_that_a_configuration_needs() {
    let folder = folder();
    let model = export("torch_dual_path");
    let output = folder.join("model.onnx");
    let without = command(&[path(&model), "-o", path(&output), "--open-batch"]);
    let error = text(&without.stderr);
    for part in ["name the pairs with --states", "stateful-inspect"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(folder.read_dir().unwrap().count(), 0);
}

#[test]
fn options_that_are_wrong_say_what_is_expected() {
    let model = export("torch_gru");
    for (arguments, expected) in [
        (vec!["--dry-run", "--states", "<<<h, hn>>> junk"], "with each name in one pair, not '<<<h, hn>>> junk'"),
        (
            vec!["--dry-run", "--states", "h"],
            "--states: '<<<input, output>>>' is expected, with each name in one pair, not 'h'",
        ),
        (vec!["--dry-run", "--time", "x"], "INPUT@AXIS is expected, not 'x'"),
        (vec!["--dry-run", "--time", "z@1"], "the model has no input 'z' for requests (it has x)"),
        (vec!["--dry-run", "--time", "x@3"], "input 'x' has no axis 3: it is [batch, time, 4]"),
        (vec!["--dry-run", "--time", "x@1,x@0"], "only one axis of input 'x' can have the steps"),
        (vec!["--dry-run", "--time", "x@2"], "gets the steps where it takes the features of a step"),
        (vec!["--dry-run", "--compare-with", "smaple_rate=16000"], "no input 'smaple_rate' for requests (it has x)"),
        (vec!["--dry-run", "--compare-with", "x@9=5"], "input 'x' has no axis 9: it is [batch, time, 4]"),
        (vec!["--dry-run", "--compare-with", "x@2=5"], "axis 2 of input 'x' is 4 in the model, and can't be 5"),
        (
            vec!["--dry-run", "--compare-with", "x@1=5"],
            "axis 1 of input 'x' has the steps, and these are compared in chunks",
        ),
        (vec!["-o", env!("CARGO_TARGET_TMPDIR")], "is a folder: write the name of a file in it"),
        (vec!["-o", "none/there/"], "none/there is a folder: write the name of a file in it, such as none/there/1/"),
        (vec!["-o", "none/tagger"], "ends with .onnx is expected, such as none/tagger/1/model.onnx, not none/tagger"),
        (vec!["--dry-run", "--compare-with", "sr"], "INPUT=VALUE, INPUT@AXIS=LENGTH or FILE.npz is expected, not 'sr'"),
        (vec!["--dry-run", "--chunk", "100000000"], "'x' would have 1600000000 elements, and a comparison can hold"),
        (vec!["--dry-run", "--chunk", "9223372036854775807"], "'x' would have 9223372036854775807 elements"),
        (vec!["--dry-run", "--batch-axis", "x"], "INPUT@AXIS is expected, not 'x'"),
        (vec!["--dry-run", "--batch-axis", "x@2"], "axis 2 of input 'x' can't be the batch"),
        (vec!["--dry-run", "--open-batch"], "input 'x' is [batch, time, 4]: its batch is open already"),
    ] {
        let all: Vec<&str> = [path(&model)].into_iter().chain(arguments).collect();
        let done = command(&all);
        assert!(!done.status.success() && text(&done.stderr).contains(expected), "{all:?}: {}", text(&done.stderr));
    }
}

/// One GRU that takes the dims of `x`.
pub fn gru(x: &str, y: &str) -> Vec<u8> {
    let build = Build::new().input("x", x).output("y", y).recurrent_weights(3);
    build.node(node("GRU", "x w r b", "y").with_int("hidden_size", 3)).bytes()
}

/// Runs the command on a model.
fn said(model: &[u8], arguments: &[&str]) -> Output {
    let file = folder().join("model.onnx");
    fs::write(&file, model).unwrap();
    command(&[&[path(&file), "--dry-run"], arguments].concat())
}

#[test]
fn a_model_without_states_is_told_what_it_may_mean() {
    let build = Build::new().input("x", "1 batch 4").input("h", "1 batch 3").recurrent_weights(3);
    let build = build.output("y", "1 1 batch 3").output("g", "1 batch 3");
    let odd = build.node(node("GRU", "x w r b - h", "y g").with_int("hidden_size", 3)).bytes();
    let error = text(&said(&odd, &[]).stderr);
    let first = "stateful-convert: by their types and dims, <<<h, g>>> may be states that the model has";
    assert!(error.starts_with(first), "{error}");
    let (states, time) = (error.find("--states").unwrap(), error.find("--time").unwrap());
    assert!(states < time, "{error}");

    let error = text(&said(&gru("batch time 4", "batch 1 time 3"), &[]).stderr);
    assert!(
        error.contains("if it is the steps, name x@0\nname the axis of the steps with --time INPUT@AXIS"),
        "{error}"
    );
    let error = text(&said(b"no model", &[]).stderr);
    assert!(error.contains("model.onnx: it is no ONNX model"), "{error}");
}

#[test]
fn a_fixed_batch_and_an_odd_name_of_it_are_named() {
    let printed = text(&said(&gru("time 1 4", "time 1 1 3"), &[]).stdout);
    let expected = "warning: x@1 has one row, so sequences don't share runs; --open-batch lets them";
    assert!(printed.contains(expected), "{printed}");
    let printed = text(&said(&gru("time 3 4", "time 1 3 3"), &[]).stdout);
    assert!(printed.contains("warning: x@1 has 3 rows: each request must have them"), "{printed}");
    let printed = text(&said(&gru("frames items 4", "frames 1 items 3"), &[]).stdout);
    assert!(printed.contains("[frames, batch, 4]     the steps, on axis 0; 'items' is the batch"), "{printed}");
    let printed = text(&said(&gru("100 batch 4", "100 1 batch 3"), &[]).stdout);
    assert!(printed.contains("the steps, on axis 0 (any number in place of 100)"), "{printed}");
    // Of two usual names of the batch, the other one has the steps.
    for (x, y) in [("time batch 4", "time 1 batch 3"), ("time N 4", "time 1 N 3"), ("n B 4", "n 1 B 3")] {
        let printed = text(&said(&gru(x, y), &[]).stdout);
        assert!(!printed.contains("warning") && !printed.contains("is the batch"), "{printed}");
    }
}

#[test]
fn a_model_that_fails_with_wrong_states_names_them() {
    // ONNX Runtime finds out that `h` has another length.
    let build = Build::new().input("x", "1 batch 4").input("h", "1 batch n").recurrent_weights(3);
    let build = build.output("y", "1 1 batch 3").output("g", "1 batch m").node(node("Identity", "x", "g"));
    let model = build.node(node("GRU", "x w r b - h", "y").with_int("hidden_size", 3)).bytes();
    let error = text(&said(&model, &["--states", "<<<h, g>>>"]).stderr);
    assert!(error.contains("are its states these: <<<h, g>>>?; nothing was written"), "{error}");
}

#[test]
fn a_reader_may_stop_early() {
    let mut reader = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
    let pipe = reader.stdin.take().unwrap();
    reader.wait().unwrap();
    let file = folder().join("model.onnx");
    fs::write(&file, gru("time batch 4", "time 1 batch 3")).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_stateful-convert"))
        .args([path(&file), "--dry-run", "--json", "--ort-library", path(&library())])
        .stdout(pipe)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{}", text(&done.stderr));
}

#[test]
fn an_error_that_nobody_reads_is_no_panic() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let arguments = ["none.onnx", "--dry-run"];
    let status = Command::new(env!("CARGO_BIN_EXE_stateful-convert")).args(arguments).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

/// The configuration that the command writes.
fn config_of(model: &[u8], arguments: &[&str]) -> String {
    let folder = folder();
    let (file, output) = (folder.join("original.onnx"), folder.join("m/1/model.onnx"));
    fs::write(&file, model).unwrap();
    let done = command(&[&[path(&file), "-o", path(&output)], arguments].concat());
    assert!(done.status.success(), "{}", text(&done.stderr));
    fs::read_to_string(folder.join("m/config.pbtxt")).unwrap()
}

/// The layer `h` of `frames`, beside an input without steps.
fn beside(layer: &str, answer: &str, given: &str) -> Build {
    let build = Build::new().input("x", layer).input("gain", given).output("y", answer).recurrent_weights(3);
    build.node(node("GRU", "frames w r b", "h").with_int("hidden_size", 3)).node(node("Mul", "h gain", "y"))
}

#[test]
fn a_chunk_goes_into_signatures_that_load() {
    let swap = |build: Build| build.node(node("Transpose", "x", "frames").with_ints("perm", &[1, 0, 2]));
    let scalar = swap(beside("batch time 4", "time 1 batch 3", "")).bytes();
    let config = config_of(&scalar, &["--chunk", "5"]);
    assert!(!config.contains("input {"), "a scalar has no row: {config}");
    // Triton's dims can't be empty.
    let fixed = beside("time 1 4", "time 1 1 3", "").node(node("Identity", "x", "frames")).bytes();
    let config = config_of(&fixed, &["--chunk", "5"]);
    assert!(config.contains("name: \"x\" data_type: TYPE_FP32 dims: [ 5, 1, 4 ] }"), "{config}");
    assert!(config.contains("name: \"gain\" data_type: TYPE_FP32 dims: [ 1 ] }"), "{config}");
    let column = beside("batch time 4", "time 1 batch 3", "batch");
    let mut column = swap(column).ints("last", &[1], &[1]);
    column.graph.node[1].set_input(1, "column");
    let column = column.node(node("Unsqueeze", "gain last", "column")).bytes();
    let config = config_of(&column, &["--chunk", "5"]);
    assert!(config.contains("name: \"gain\" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }"), "{config}");
}

#[test]
fn states_that_are_left_out_or_too_many_are_named() {
    let build = Build::new().input("x", "batch 4").input("h", "batch 3").input("c", "batch 2");
    let build = build.output("y", "batch 4").output("hn", "batch 3").output("cn", "batch 2");
    let build = build.node(node("Tanh", "x", "y")).node(node("Sin", "h", "hn")).node(node("Cos", "c", "cn"));
    let model = build.bytes();
    let printed = text(&said(&model, &["--states", "<<<h, hn>>>"]).stdout);
    let expected =
        "warning: by their types and dims, <<<c, cn>>> may be states, too: if they are, name them with --states";
    assert!(printed.contains(expected), "{printed}");
    let printed = text(&said(&model, &["--states", "<<<h, hn>>> <<<c, cn>>>"]).stdout);
    assert!(printed.contains("states: 20 bytes a sequence") && !printed.contains("warning"), "{printed}");
    let error = text(&said(&model, &["--states", "<<<h, hn>>> <<<c, cn>>> <<<x, y>>>"]).stderr);
    assert!(
        error.starts_with("stateful-convert: every input of the model is one of the states <<<h, hn>>>"),
        "{error}"
    );
}

#[test]
fn steps_of_other_names_are_asked_for() {
    let build = Build::new().input("x", "batch time 4").input("mask", "batch length").output("y", "time 1 batch 3");
    let build = build.ints("last", &[1], &[2]).recurrent_weights(3).node(node("Unsqueeze", "mask last", "column"));
    let build = build.node(node("Mul", "x column", "masked"));
    let build = build.node(node("Transpose", "masked", "frames").with_ints("perm", &[1, 0, 2]));
    let model = build.node(node("GRU", "frames w r b", "y").with_int("hidden_size", 3)).bytes();
    let error = text(&said(&model, &[]).stderr);
    let expected = "if mask has steps, too, name the axes of all inputs that have them";
    assert!(error.contains(expected) && error.contains("with --time INPUT@AXIS"), "{error}");
    let done = said(&model, &["--time", "x@1,mask@1"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
}

#[test]
fn a_running_sum_and_certain_steps_say_what_helps() {
    let build = || Build::new().input("x", "batch time 4").ints("axis", &[1], &[1]).ints("first", &[], &[0]);
    let sum = build().output("y", "batch time 4").node(node("CumSum", "x axis", "y")).bytes();
    let error = text(&said(&sum, &["--time", "x@1"]).stderr);
    assert!(error.contains("sums up along time; write the running sum as a Scan with a state"), "{error}");
    let step = node("Gather", "x first", "y").with_int("axis", 1);
    let first = build().output("y", "batch 4").node(step).bytes();
    let error = text(&said(&first, &["--time", "x@1"]).stderr);
    assert!(error.contains("takes certain steps out of the whole input, which later requests don't have"), "{error}");
}
