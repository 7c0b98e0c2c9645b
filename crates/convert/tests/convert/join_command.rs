//! The subcommand `stateful-convert join`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use stateful_convert::onnx::schema::{StringStringEntryProto, tensor_proto::DataLocation};
use stateful_convert::onnx::{read, write};

use crate::command::{command, path, text};
use crate::common::{Build, folder, node};

/// Two graphs in a folder: `encoder.onnx` gives `z [batch, 3]` and has a state, and `head.onnx` takes it.
fn graphs() -> PathBuf {
    let folder = folder();
    let encoder = Build::new().input("x", "batch 4").input("h_in", "batch 3").output("z", "batch 3");
    let encoder = encoder.output("h_out", "batch 3").weights("w", &[4, 3]).node(node("MatMul", "x w", "p"));
    let encoder = encoder.node(node("Add", "p h_in", "z")).node(node("Tanh", "z", "h_out"));
    let head = Build::new().input("z", "N 3").output("y", "N 3").node(node("Softmax", "z", "y"));
    fs::write(folder.join("encoder.onnx"), encoder.bytes()).unwrap();
    fs::write(folder.join("head.onnx"), head.bytes_of_opset(11)).unwrap();
    folder
}

fn join(folder: &Path, arguments: &[&str]) -> Output {
    let (encoder, head) = (folder.join("encoder.onnx"), folder.join("head.onnx"));
    command(&[&["join", path(&encoder), path(&head)], arguments].concat())
}

#[test]
fn a_model_repository_gets_the_joined_model_and_a_configuration() {
    let folder = graphs();
    let output = folder.join("models/asr/1/model.onnx");
    let done = join(&folder, &["-o", path(&output)]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let table = text(&done.stdout);
    for line in ["compared with the graphs", "20 chunks of 1 row", "20 chunks of 3 rows", "encoder.h_in", "head.y"] {
        assert!(table.contains(line), "{line} in {table}");
    }
    let config = fs::read_to_string(folder.join("models/asr/config.pbtxt")).unwrap();
    let states = "parameters { key: \"state_pairs\" value { string_value: \"<<<encoder.h_in, encoder.h_out>>>\" } }";
    assert!(config.contains(states), "{config}");
    let again = join(&folder, &["-o", path(&output)]);
    assert!(text(&again.stderr).contains("model.onnx exists; --force replaces it"), "{}", text(&again.stderr));
    assert!(join(&folder, &["-o", path(&output), "--force"]).status.success());
}

#[test]
fn a_dry_run_of_named_graphs_says_what_it_would_write() {
    let folder = graphs();
    let (first, second) = (folder.join("encoder.onnx"), folder.join("head.onnx"));
    let [first, second] = [format!("a={}", path(&first)), format!("b={}", path(&second))];
    let done = command(&["join", &first, &second, "--dry-run", "--json", "--outputs", "a.z"]);
    let said: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
    assert_eq!(said["report"]["outputs"][0]["name"], "a.z");
    assert_eq!(said["report"]["outputs"][1]["name"], "b.y");
    assert_eq!(said["written"], Value::Null);
}

#[test]
fn what_is_wrong_is_said_before_anything_is_written() {
    let folder = graphs();
    let output = folder.join("out/model.onnx");
    for (arguments, expected) in [
        (&["--wires", "a, b"][..], "--wires: '<<<graph.output, graph.input>>>' is expected, not 'a, b'"),
        (&["--wires", "<<<encoder.q, head.z>>>"], "graph 'encoder' has no output 'q' (it has z, h_out)"),
        (&["--states", "x"], "--states: '<<<input, output>>>' is expected"),
        (&["--compare-with", "x=1"], "the model has no input 'x' for requests (it has encoder.x)"),
        (&["--ort-library", "/none.so"], "/none.so"),
    ] {
        let done = join(&folder, &[&["-o", path(&output)], arguments].concat());
        let error = text(&done.stderr);
        assert!(!done.status.success() && error.contains(expected), "{error}");
        assert!(!output.exists() && !folder.join("out").exists());
    }
    let done = join(&folder, &["-o", path(&folder.join("head.onnx")), "--force"]);
    assert!(text(&done.stderr).contains("head.onnx belongs to the model"), "{}", text(&done.stderr));
    let one = command(&["join", path(&folder.join("head.onnx")), "--dry-run"]);
    assert!(text(&one.stderr).contains("there is one graph, 'head', and no search"), "{}", text(&one.stderr));
}

#[test]
fn a_comparison_of_outputs_without_elements_is_refused() {
    let folder = graphs();
    let empty = Build::new().input("z", "N T").output("y", "N U").ints("none", &[1], &[0]).ints("axis", &[1], &[1]);
    let file = folder.join("empty.onnx");
    fs::write(&file, empty.node(node("Slice", "z none none axis", "y")).bytes()).unwrap();
    let encoder = folder.join("encoder.onnx");
    let done = command(&["join", path(&encoder), path(&file), "--dry-run"]);
    let expected = "the comparison says nothing: output 'empty.y' had no element in any chunk; give inputs longer axes, \
                    as in --compare-with stft.audio@1=512; nothing was written";
    assert!(!done.status.success() && text(&done.stderr).contains(expected), "{}", text(&done.stderr));
}

#[test]
fn samples_are_as_many_as_make_frames() {
    let done = command(&["join", "stft", "istft", "--dry-run", "--compare-with", "stft.audio@1=512"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    // The first length that is tried makes no frame.
    let done =
        command(&["join", "fbank:kaldi", "b=overlap_add", "--wires", "<<<fbank.features, b.frames>>>", "--dry-run"]);
    assert!(text(&done.stderr).contains("can't be wired"), "{}", text(&done.stderr));
}

#[test]
fn weights_in_files_of_their_own_stay_there_if_they_are_below_the_output() {
    let folder = graphs();
    let encoder = folder.join("parts/encoder.onnx");
    fs::create_dir(folder.join("parts")).unwrap();
    let mut model = read(fs::read(folder.join("encoder.onnx")).unwrap().into()).unwrap();
    let weight = &mut model.graph.as_mut().unwrap().initializer[0];
    let floats = std::mem::take(&mut weight.float_data);
    let bytes: Vec<u8> = floats.iter().flat_map(|value| value.to_le_bytes()).collect();
    fs::write(folder.join("parts/weights.bin"), bytes).unwrap();
    weight.data_location = Some(DataLocation::External.into());
    weight.external_data =
        vec![StringStringEntryProto { key: Some("location".to_owned()), value: Some("weights.bin".to_owned()) }];
    fs::write(&encoder, write(&model)).unwrap();
    let head = folder.join("head.onnx");
    let done = command(&["join", path(&encoder), path(&head), "-o", path(&folder.join("model.onnx"))]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let joined = read(fs::read(folder.join("model.onnx")).unwrap().into()).unwrap();
    let location = joined.graph.as_ref().unwrap().initializer[0].external_data[0].value().to_owned();
    assert_eq!(location, "parts/weights.bin");
    let done = command(&["join", path(&encoder), path(&head), "-o", path(&folder.join("other/model.onnx"))]);
    let error = text(&done.stderr);
    assert!(error.contains("weights.bin, which isn't below the folder of the joined model"), "{error}");
    assert!(!folder.join("other").exists());
    // The temporary folder is removed.
    let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{left:?}");
}
