//! The files of the command: weights in files of their own, and what is left alone.

use std::fs;
use std::path::Path;

use crate::command::{command, gru, path, text};
use crate::common::{Build, export, folder, node};

#[test]
fn weights_in_files_of_their_own_stay_there() {
    let (source, target) = (folder(), folder());
    let mut model = stateful_convert::onnx::read(fs::read(export("torch_lstm2")).unwrap().into()).unwrap();
    let mut weights = Vec::new();
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        let raw = tensor.raw_data.take().unwrap();
        put_outside(tensor, "weights.bin", weights.len(), raw.len());
        weights.extend_from_slice(&raw);
    }
    fs::write(source.join("m.onnx"), stateful_convert::onnx::write(&model)).unwrap();
    let run = || command(&[path(&source.join("m.onnx")), "-o", path(&target.join("model.onnx"))]);
    let missing = run();
    assert!(
        text(&missing.stderr).contains("has weights in the file 'weights.bin', which isn't there"),
        "{}",
        text(&missing.stderr)
    );
    fs::write(source.join("weights.bin"), &weights).unwrap();
    let done = run();
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("all at once"));
    assert_eq!(fs::read(target.join("weights.bin")).unwrap(), weights);
    let written: Vec<String> =
        text(&done.stdout).lines().filter_map(|line| line.strip_prefix("written: ")).map(str::to_owned).collect();
    let expected = ["model.onnx", "weights.bin", "config.pbtxt"].map(|name| path(&target.join(name)).to_owned());
    assert_eq!(written, expected);
    let converted = fs::read(target.join("model.onnx")).unwrap();
    assert!(converted.len() < weights.len(), "the model has the weights, too");
    let json = command(&[path(&source.join("m.onnx")), "-o", path(&target.join("model.onnx")), "--force", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text(&json.stdout)).unwrap();
    assert_eq!(json["written"], serde_json::json!(expected));
    // Beside the original, nothing is copied.
    let done = command(&[path(&source.join("m.onnx")), "-o", path(&source.join("beside.onnx"))]);
    assert!(done.status.success() && !text(&done.stdout).contains("weights.bin"), "{}", text(&done.stdout));
}

#[test]
fn weights_in_a_file_that_a_link_takes_out_of_the_folder_are_refused() {
    let own = folder();
    let model = own.join("in");
    fs::create_dir(&model).unwrap();
    let file = with_weights_in(&model, "w.data");
    fs::rename(model.join("w.data"), own.join("w.data")).unwrap();
    std::os::unix::fs::symlink(own.join("w.data"), model.join("w.data")).unwrap();
    let error = text(&command(&[path(&file), "--dry-run"]).stderr);
    assert!(error.contains("'w.data', which isn't in the model's folder"), "{error}");
}

#[test]
fn weights_beyond_the_end_of_their_file_are_refused() {
    let own = folder();
    let file = with_weights_in(&own, "w.data");
    fs::write(own.join("w.data"), "short").unwrap();
    let error = text(&command(&[path(&file), "--dry-run"]).stderr);
    assert!(error.contains("its weight 'w' can't be in the file 'w.data': it would be 144 bytes at 0"), "{error}");
    assert!(error.contains("and the file has 5"), "{error}");
}

#[test]
fn small_weights_in_a_file_are_looked_at() {
    // A start at zero needs no model of initial states.
    let own = folder();
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(3);
    let gru = node("GRU", "x w r b - start", "y").with_int("hidden_size", 3);
    let mut build = build.floats("start", &[1, 1, 3], &[0.0; 3]).node(gru);
    build.graph.input[0].set_tensor(crate::common::FLOAT, &crate::common::dims("time 1 4"));
    build.graph.output[0].set_tensor(crate::common::FLOAT, &crate::common::dims("time 1 1 3"));
    let inside = stateful_convert::onnx::read(build.bytes().into()).unwrap();
    let run = |model: &[u8], name: &str| {
        let file = own.join(name);
        fs::write(&file, model).unwrap();
        let done = command(&[path(&file), "--dry-run"]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    let mut outside = inside.clone();
    let mut weights = Vec::new();
    for tensor in &mut outside.graph.as_mut().unwrap().initializer {
        let bytes: Vec<u8> = tensor.float_data.drain(..).flat_map(f32::to_le_bytes).collect();
        put_outside(tensor, "model.onnx.data", weights.len(), bytes.len());
        weights.extend_from_slice(&bytes);
    }
    fs::write(own.join("model.onnx.data"), &weights).unwrap();
    let expected = run(&stateful_convert::onnx::write(&inside), "inside.onnx");
    assert!(!expected.contains("values of its own"), "{expected}");
    assert_eq!(run(&stateful_convert::onnx::write(&outside), "model.onnx"), expected);
}

/// Says that the content of a weight is in a file.
fn put_outside(tensor: &mut stateful_convert::onnx::schema::TensorProto, file: &str, offset: usize, length: usize) {
    use stateful_convert::onnx::schema::{StringStringEntryProto, tensor_proto::DataLocation};
    let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
    tensor.external_data = vec![
        entry("location", file.to_owned()),
        entry("offset", offset.to_string()),
        entry("length", length.to_string()),
    ];
    tensor.data_location = Some(DataLocation::External.into());
}

#[test]
fn the_original_and_a_configuration_may_stay() {
    let folder = folder();
    let (model, config) = (folder.join("1/model.onnx"), folder.join("config.pbtxt"));
    fs::create_dir(folder.join("1")).unwrap();
    let original = gru("time batch 4", "time 1 batch 3");
    fs::write(&model, &original).unwrap();
    fs::write(&config, "mine").unwrap();
    let error = text(&command(&[path(&model), "-o", path(&model), "--force"]).stderr);
    assert!(
        error.contains("model.onnx belongs to the model that is converted: write the result to another file"),
        "{error}"
    );
    assert_eq!(fs::read(&model).unwrap(), original);
    let second = folder.join("2/model.onnx");
    let error = text(&command(&[path(&model), "-o", path(&second)]).stderr);
    assert!(error.contains("config.pbtxt exists; --force replaces it, and --no-config leaves it"), "{error}");
    let done = command(&[path(&model), "-o", path(&second), "--no-config"]);
    assert!(done.status.success() && second.exists(), "{}", text(&done.stderr));
    assert_eq!(fs::read(&config).unwrap(), b"mine");
}

/// A model whose weight `w` is in the file `location`, which is written if it is in the folder.
fn with_weights_in(folder: &Path, location: &str) -> std::path::PathBuf {
    use stateful_convert::onnx::schema::{StringStringEntryProto, tensor_proto::DataLocation};
    let mut model = stateful_convert::onnx::read(gru("time batch 4", "time 1 batch 3").into()).unwrap();
    let weight = model.graph.as_mut().unwrap().initializer.iter_mut().find(|weight| weight.name() == "w").unwrap();
    let bytes: Vec<u8> = weight.float_data.drain(..).flat_map(f32::to_le_bytes).collect();
    weight.data_location = Some(DataLocation::External.into());
    weight.external_data =
        vec![StringStringEntryProto { key: Some("location".to_owned()), value: Some(location.to_owned()) }];
    fs::write(folder.join(location), bytes).unwrap();
    let file = folder.join("model.onnx");
    fs::write(&file, stateful_convert::onnx::write(&model)).unwrap();
    file
}

#[test]
fn files_of_the_original_and_of_others_are_left_alone() {
    let own = folder();
    let (model, outside) = (own.join("in"), own.join("outside.data"));
    fs::create_dir(&model).unwrap();
    fs::write(&outside, "mine").unwrap();
    for location in [path(&outside), "../outside.data"] {
        let file = with_weights_in(&model, location);
        let before = fs::read(&outside).unwrap();
        for arguments in [vec!["--dry-run"], vec!["-o", path(&own.join("out/1/model.onnx")), "--force"]] {
            let error = text(&command(&[vec![path(&file)], arguments].concat()).stderr);
            assert!(error.contains("which isn't in the model's folder"), "{error}");
        }
        assert_eq!(fs::read(&outside).unwrap(), before);
    }

    let file = with_weights_in(&model, "./w.data");
    let weights = fs::read(model.join("w.data")).unwrap();
    let run = |output: &Path, options: &[&str]| {
        text(&command(&[&[path(&file), "-o", path(output)], options].concat()).stderr)
    };
    let other = own.join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("w.data"), "of another model").unwrap();
    assert!(run(&other.join("a.onnx"), &[]).contains("w.data exists; --force replaces it"));
    assert_eq!(fs::read(other.join("w.data")).unwrap(), b"of another model");
    assert!(run(&own.join("new/w.data"), &[]).contains("w.data would be written twice"));
    assert!(run(&own.join("new/config.pbtxt"), &[]).contains("config.pbtxt would be written twice"));
    assert!(run(&model.join("w.data"), &["--force"]).contains("w.data belongs to the model that is converted"));
    fs::hard_link(&file, model.join("link.onnx")).unwrap();
    assert!(run(&model.join("link.onnx"), &["--force"]).contains("link.onnx belongs to the model"));
    assert_eq!(fs::read(model.join("w.data")).unwrap(), weights);
    // A copy doesn't change with the original.
    assert_eq!(run(&own.join("new/1/model.onnx"), &[]), "");
    fs::write(model.join("w.data"), "changed").unwrap();
    assert_eq!(fs::read(own.join("new/1/w.data")).unwrap(), weights);
}

#[test]
fn initial_states_that_are_there_are_left_alone() {
    let folder = folder();
    let (input, stale) = (folder.join("a_initial_states.onnx"), folder.join("b_initial_states.onnx"));
    for file in [&input, &stale] {
        fs::write(file, gru("time batch 4", "time 1 batch 3")).unwrap();
    }
    let run = |output: &str, options: &[&str]| {
        let output = folder.join(output);
        text(&command(&[&[path(&input), "-o", path(&output)], options].concat()).stderr)
    };
    let error = run("a.onnx", &["--force"]);
    assert!(error.contains("a_initial_states.onnx belongs to the model that is converted"), "{error}");
    let error = run("b.onnx", &[]);
    assert!(error.contains("b_initial_states.onnx exists; --force replaces it"), "{error}");
    assert!(input.exists() && stale.exists());
}

#[test]
fn all_files_are_written_or_none() {
    let folder = folder();
    // A folder of this name is in the way.
    fs::create_dir_all(folder.join("m/config.pbtxt.part")).unwrap();
    let output = folder.join("m/1/model.onnx");
    let error = text(&command(&[path(&export("torch_lstm_learned")), "-o", path(&output)]).stderr);
    assert!(error.contains("config.pbtxt can't be written: ") && error.ends_with("; nothing was written\n"), "{error}");
    assert_eq!(folder.join("m/1").read_dir().unwrap().count(), 0);
    let error = text(&command(&[path(&folder.join("none.onnx")), "--dry-run"]).stderr);
    assert!(error.contains("none.onnx can't be read: No such file"), "{error}");
}
