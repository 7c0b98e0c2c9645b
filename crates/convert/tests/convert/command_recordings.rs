//! What the command compares with: values, lengths and recordings.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::Value;
use stateful_convert::onnx::schema::NodeProto;

use crate::command::{command, path, text};
use crate::common::{Build, export, folder, node};

#[test]
fn a_comparison_takes_the_values_and_lengths_that_it_is_given() {
    let run = |given: &str| command(&[path(&export("torch_gru")), "--dry-run", "--json", "--compare-with", given]);
    let said: Value = serde_json::from_slice(&run("x=0,x@0=5").stdout).unwrap();
    assert_eq!(said["compared"][0]["largest"], 0.0);
}

/// A file of NumPy with arrays of 32-bit floats, each full of one value.
fn npz(file: &Path, arrays: &[(&str, &str, &[i64], f32)]) {
    npz_of(file, arrays, |value, _| value);
}

/// As [`npz`], with another value for each element.
fn npz_of(file: &Path, arrays: &[(&str, &str, &[i64], f32)], element: impl Fn(f32, usize) -> f32) {
    let mut archive = zip::ZipWriter::new(fs::File::create(file).unwrap());
    for &(name, descr, dims, value) in arrays {
        let dims_text: Vec<String> = dims.iter().map(|dim| format!("{dim},")).collect();
        let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims_text.concat());
        let header = format!("{text:117}\n");
        let elements = (0..dims.iter().product::<i64>() as usize).map(|index| element(value, index));
        archive.start_file(format!("{name}.npy"), zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(b"\x93NUMPY\x01\x00").unwrap();
        archive.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        archive.write_all(header.as_bytes()).unwrap();
        for element in elements {
            archive.write_all(&element.to_le_bytes()).unwrap();
        }
    }
    archive.finish().unwrap();
}

#[test]
fn a_comparison_takes_recordings() {
    // Of all values but zero, the root is no number.
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(1);
    let roots = [node("Abs", "x", "a"), node("Neg", "a", "n"), node("Sqrt", "n", "z")];
    let build = roots.into_iter().fold(build, Build::node).node(node("RNN", "z w r b", "y").with_int("hidden_size", 3));
    let folder = folder();
    let (model, file) = (folder.join("roots.onnx"), folder.join("speech.npz"));
    fs::write(&model, build.bytes()).unwrap();
    let run = |given: &Path| command(&[path(&model), "--dry-run", "--json", "--compare-with", path(given)]);
    npz(&file, &[("x", "<f4", &[30, 3, 4], 0.0)]);
    let done = run(&file);
    let said: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
    assert_eq!(said["compared"][3]["what"], "all at once");
    assert_eq!(said["compared"][4]["what"], "rows together and alone");
    for (arrays, expected) in [
        (&[("z", "<f4", &[30, 3, 4][..], 0.5)][..], "the model has no input 'z' for requests (it has x)"),
        (&[("x", "<i4", &[30, 3, 4], 0.5)], "array 'x' is INT32, and input 'x' FLOAT"),
        (&[("x", "<f4", &[30, 3, 5], 0.5)], "array 'x' is [30, 3, 5], and [time, batch, 4] is expected"),
        (&[("x", "<f4", &[0, 3, 4], 0.5)], "array 'x' is [0, 3, 4], and [time, batch, 4] is expected"),
        (&[("x", "<c8", &[30, 3, 4], 0.5)], "speech.npz: its array 'x' cannot be read: its type is '<c8'"),
        (&[("x", "<f8", &[30, 3, 4], 0.5)], "its shape [30, 3, 4] needs 2880 bytes, and it has 1440"),
    ] {
        npz(&file, arrays);
        let error = text(&run(&file).stderr);
        assert!(error.contains(expected), "{error}");
    }
    let error = text(&run(&model.with_extension("npz")).stderr);
    assert!(error.contains("roots.npz: No such file"), "{error}");
    let error = text(&command(&[path(&model), "--dry-run"]).stderr);
    assert!(error.contains("says nothing"), "{error}");
}

#[test]
fn recordings_for_a_model_of_single_steps_have_the_steps_in_front() {
    let file = folder().join("talk.npz");
    npz(&file, &[("x", "<f4", &[6, 3, 4], 0.5)]);
    let states = "<<<h, hn>>> <<<c, cn>>>";
    let all = ["--dry-run", "--json", "--states", states, "--compare-with", path(&file)];
    let model = export("torch_lstm_cell");
    let done = command(&[&[path(&model)], &all[..]].concat());
    let said: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
    assert_eq!(said["compared"][0]["what"], "6 steps");
    npz(&file, &[("x", "<f4", &[3, 4], 0.5)]);
    let error = text(&command(&[&[path(&model)], &all[..]].concat()).stderr);
    assert!(error.contains("array 'x' is [3, 4], and [steps, batch, 4] is expected"), "{error}");
}

/// A model whose rows change each other: the mean of the batch is taken off.
#[test]
fn a_recording_of_one_row_shows_rows_that_change_each_other() {
    let folder = folder();
    let (model, file) = (folder.join("mixing.onnx"), folder.join("speech.npz"));
    let weights = Build::new().input("x", "batch time 4").output("y", "batch time 4");
    let build = weights.weights("w", &[1, 12, 4]).weights("r", &[1, 12, 4]);
    let nodes = [
        node("Transpose", "x", "by_time").with_ints("perm", &[1, 0, 2]),
        node("GRU", "by_time w r", "all").with_int("hidden_size", 4),
        node("Transpose", "all", "rows").with_ints("perm", &[2, 1, 0, 3]),
        node("ReduceMean", "rows", "out").with_ints("axes", &[1]).with_int("keepdims", 0),
        node("ReduceMean", "out", "mean").with_ints("axes", &[0]),
        node("Sub", "out mean", "y"),
    ];
    let nodes = nodes.into_iter().map(|node| NodeProto { name: None, ..node });
    fs::write(&model, nodes.fold(build, Build::node).bytes()).unwrap();
    let run = |given: &Path| command(&[path(&model), "--dry-run", "--compare-with", path(given)]);
    npz_of(&file, &[("x", "<f4", &[1, 50, 4], 0.5)], |value, index| value * (index as f32).sin());
    let error = text(&run(&file).stderr);
    assert!(error.contains("rows together and alone") && error.contains("share a run"), "{error}");
    npz(&file, &[("x", "<f4", &[1, 50, 4], f32::NAN)]);
    let error = text(&run(&file).stderr);
    assert!(error.contains("array 'x' has NaN"), "{error}");
    npz(&file, &[]);
    let error = text(&run(&file).stderr);
    assert!(error.contains("speech.npz: it has no arrays"), "{error}");
}
