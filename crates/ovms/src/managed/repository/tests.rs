use std::collections::BTreeMap;
use std::fs::{create_dir_all, write};

use super::*;
use crate::managed::policy::VersionPolicy;

fn entry(base_path: PathBuf) -> Entry {
    Entry { base_path, policy: VersionPolicy::default(), parameters: BTreeMap::new(), device_given: false }
}

/// A folder with these files.
fn folder(files: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in files {
        let path = folder.path().join(file);
        create_dir_all(path.parent().unwrap()).unwrap();
        write(path, file).unwrap();
    }
    folder
}

fn versions(found: &Found) -> Vec<i64> {
    found.all.versions.keys().copied().collect()
}

fn wanted(found: &Found, versions: &[i64]) -> Wanted {
    let mut wanted = found.all.clone();
    wanted.versions.retain(|version, _| versions.contains(version));
    wanted
}

/// The files that are found in a folder, also behind links.
fn seen(folder: &Path) -> Vec<String> {
    let mut seen = Vec::new();
    for name in names(folder).unwrap() {
        let path = folder.join(&name);
        if path.is_dir() {
            seen.extend(self::seen(&path).into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            seen.push(name);
        }
    }
    seen
}

#[test]
fn versions_are_the_folders_with_an_onnx_file() {
    let folder =
        folder(&["1/model.onnx", "2/vad.onnx", "3/model.xml", "3/model.bin", "4/readme", "01/model.onnx", "x/y"]);
    let found = find("m", &entry(folder.path().to_owned())).unwrap();
    assert_eq!(versions(&found), [1, 2]);
    assert!(found.left_out[&3].contains("OpenVINO IR"), "{:?}", found.left_out);
    assert!(found.left_out[&3].contains("low_latency_transformation"), "{:?}", found.left_out);
    assert!(found.left_out[&4].contains("no .onnx file"), "{:?}", found.left_out);
}

#[test]
fn a_folder_without_versions_says_what_to_do() {
    for (files, words) in
        [(&["model.onnx"][..], "into a folder '1'"), (&["readme"], "No version found for model in path")]
    {
        let folder = folder(files);
        let found = find("m", &entry(folder.path().to_owned())).unwrap();
        assert!(found.left_out[&0].contains(words), "{:?}", found.left_out);
    }
    let error = find("m", &entry(PathBuf::from("/no/such/folder"))).unwrap_err();
    assert!(error.contains("/no/such/folder"), "{error}");
}

#[test]
fn one_file_is_version_1_with_its_external_data() {
    let folder = folder(&["vad.onnx", "vad.onnx.data", "other.onnx", "vad.xml"]);
    let found = find("m", &entry(folder.path().join("vad.onnx"))).unwrap();
    let repository = tempfile::tempdir().unwrap();
    wanted(&found, &[1]).write(repository.path(), true).unwrap();
    assert_eq!(seen(repository.path()), [".written", "1/vad.onnx", "1/vad.onnx.data", "config.pbtxt"]);
    let error = find("m", &entry(folder.path().join("vad.xml"))).unwrap_err();
    assert!(error.contains("OpenVINO IR"), "{error}");
}

#[test]
fn the_folder_of_triton_has_what_is_served_and_nothing_else() {
    let folder =
        folder(&["1/model.onnx", "2/model.onnx", "2/model.onnx.data", "config.pbtxt", "initial/h.npy", "007/x.onnx"]);
    write(folder.path().join("config.pbtxt"), "").unwrap();
    let found = find("m", &entry(folder.path().to_owned())).unwrap();
    let repository = tempfile::tempdir().unwrap();
    let path = repository.path().join("m");
    wanted(&found, &[1, 2]).write(&path, true).unwrap();
    let files = ["1/model.onnx", "2/model.onnx", "2/model.onnx.data", "config.pbtxt", "initial/h.npy"];
    assert_eq!(seen(&path)[1..], files);
    wanted(&found, &[2]).write(&path, false).unwrap();
    assert_eq!(seen(&path)[1..], files[1..]);
    remove(&path).unwrap();
    assert!(folder.path().join("1/model.onnx").exists());
}

#[test]
fn a_changed_file_is_a_change_and_a_version_that_comes_is_not() {
    let folder = folder(&["1/model.onnx", "2/model.onnx"]);
    let entry = entry(folder.path().to_owned());
    let before = wanted(&find("m", &entry).unwrap(), &[1]);
    assert!(!wanted(&find("m", &entry).unwrap(), &[1, 2]).changes(&before));
    write(folder.path().join("2/model.onnx"), "another").unwrap();
    assert!(!wanted(&find("m", &entry).unwrap(), &[1, 2]).changes(&before));
    write(folder.path().join("1/model.onnx"), "another").unwrap();
    assert!(wanted(&find("m", &entry).unwrap(), &[1]).changes(&before));
}

#[test]
fn links_are_followed_and_one_that_leads_nowhere_is_named() {
    let folder = folder(&["blobs/abc", "1/..2026/model.onnx"]);
    symlink("..2026", folder.path().join("1/..data")).unwrap();
    symlink("..data/model.onnx", folder.path().join("1/model.onnx")).unwrap();
    create_dir_all(folder.path().join("2")).unwrap();
    symlink("../blobs/abc", folder.path().join("2/model.onnx")).unwrap();
    let found = find("m", &entry(folder.path().to_owned())).unwrap();
    assert_eq!(versions(&found), [1, 2]);
    // as Kubernetes replaces a ConfigMap
    create_dir_all(folder.path().join("1/..2027")).unwrap();
    fs::copy(folder.path().join("1/..2026/model.onnx"), folder.path().join("1/..2027/model.onnx")).unwrap();
    fs::remove_file(folder.path().join("1/..data")).unwrap();
    symlink("..2027", folder.path().join("1/..data")).unwrap();
    let now = find("m", &entry(folder.path().to_owned())).unwrap();
    assert!(now.all.versions[&1] != found.all.versions[&1] && now.all.versions[&2] == found.all.versions[&2]);
    create_dir_all(folder.path().join("3")).unwrap();
    symlink("nowhere", folder.path().join("3/model.onnx")).unwrap();
    let error = find("m", &entry(folder.path().to_owned())).unwrap_err();
    assert!(error.contains("3/model.onnx") && error.contains("nowhere"), "{error}");
}

fn modified(path: PathBuf) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

#[test]
fn the_times_of_triton_s_folder_grow_also_if_a_file_becomes_older() {
    let folder = folder(&["1/model.onnx", "2/model.onnx"]);
    let set = |time| fs::File::open(folder.path().join("1/model.onnx")).unwrap().set_modified(time).unwrap();
    let found = find("m", &entry(folder.path().to_owned())).unwrap();
    let repository = tempfile::tempdir().unwrap();
    let path = repository.path().join("m");
    let now = SystemTime::now();
    let mut before = SystemTime::UNIX_EPOCH;
    for time in [now, now + 1000 * TICK, now - 1000 * TICK, now - 2000 * TICK] {
        set(time);
        wanted(&found, &[1]).write(&path, true).unwrap();
        let written = modified(path.join(WRITTEN));
        assert!(written > before && written > modified(path.join("1/model.onnx")));
        // A version that comes is no reason to load the others again, and must be seen.
        wanted(&found, &[1, 2]).write(&path, false).unwrap();
        assert_eq!(modified(path.join(WRITTEN)), written);
        before = modified(path.join(CONFIG));
        assert!(before > written);
    }
}

#[test]
fn what_is_no_regular_file_is_refused_by_name() {
    for name in ["1/model.onnx", "1/other", "config.pbtxt"] {
        let folder = folder(&["1/model.onnx"]);
        let path = folder.path().join(name);
        remove(&path).unwrap();
        std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        let error = find("m", &entry(folder.path().to_owned())).unwrap_err();
        assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
        if name.ends_with("onnx") {
            assert!(find("m", &entry(path)).unwrap_err().contains("not a regular file"));
        }
    }
}

#[test]
fn a_file_with_the_size_and_time_of_the_one_before_is_a_change() {
    let folder = folder(&["1/model.onnx"]);
    let (path, entry) = (folder.path().join("1/model.onnx"), entry(folder.path().to_owned()));
    let (before, time) = (find("m", &entry).unwrap(), modified(path.clone()));
    let new = folder.path().join("new");
    write(&new, "1/MODEL.onnx").unwrap();
    fs::File::open(&new).unwrap().set_modified(time).unwrap();
    fs::rename(new, path).unwrap();
    assert_ne!(find("m", &entry).unwrap(), before);
}

/// An entry with these parameters.
fn with(parameters: &[(&'static str, &str)]) -> Entry {
    let parameters = parameters.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
    Entry { parameters, ..entry(PathBuf::from("/models/m")) }
}

#[test]
fn an_entry_needs_no_file() {
    let text = config("m", &with(&[("max_sequence_number", "7"), ("stateful", "true")]), None).unwrap();
    assert_eq!(
        text,
        r#"backend: "stateful"
version_policy {
  all {
  }
}
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "max_sequence_number" value { string_value: "7" } }
parameters { key: "stateful" value { string_value: "true" } }
"#
    );
}

#[test]
fn a_file_adds_what_an_entry_can_not_say() {
    let added = r#"
        name: "m"
        instance_group [ { kind: KIND_GPU } ]
        parameters [ { key: "constant_inputs" value { string_value: "sr=16000" } },
                     { key: "stateful" value { string_value: "true" } } ]
    "#;
    let text = config("m", &with(&[("stateful", "true")]), Some(added)).unwrap();
    let read = stateful_pbtxt::read(&text).unwrap();
    assert_eq!(read["instance_group"], json!([{ "kind": "KIND_GPU" }]));
    let expected = json!({ "constant_inputs": { "string_value": "sr=16000" }, "stateful": { "string_value": "true" } });
    assert_eq!(read["parameters"], expected);
    assert!(!read.contains_key("name"), "{text}");
}

#[test]
fn a_file_that_contradicts_the_entry_is_refused_by_name() {
    let entry = Entry { device_given: true, ..with(&[("max_sequence_number", "7")]) };
    for (added, words) in [
        (r#"name: "n""#, "its name is not 'm'"),
        (r#"backend: "onnxruntime""#, "backend"),
        (r#"platform: "onnxruntime_onnx""#, "platform"),
        ("version_policy { latest { num_versions: 1 } }", "model_version_policy"),
        ("instance_group { kind: KIND_CPU }", "target_device"),
        (r#"parameters { key: "max_sequence_number" value { string_value: "8" } }"#, "max_sequence_number is \"8\""),
        ("max_batchsize: 8", "max_batchsize"),
    ] {
        let error = config("m", &entry, Some(added)).unwrap_err();
        assert!(error.contains(words), "{added}: {error}");
    }
}
