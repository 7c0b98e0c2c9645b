use super::*;

/// The models of a file with this list.
fn read(list: &str) -> Result<Configuration, String> {
    parse(&format!(r#"{{"model_config_list": {list}}}"#), Path::new("/etc/ovms"), None)
}

/// An entry with these fields beside a name and a path.
fn entry(fields: &str) -> Result<Entry, String> {
    let list = format!(r#"[{{"config": {{"name": "m", "base_path": "/models/m" {fields}}}}}]"#);
    read(&list).unwrap().models.remove("m").unwrap()
}

fn stateful(fields: &str) -> Result<Entry, String> {
    entry(&format!(r#", "stateful": true {fields}"#))
}

fn parameters(fields: &str) -> Vec<(&'static str, String)> {
    stateful(fields).unwrap().parameters.into_iter().filter(|(key, _)| *key != "stateful").collect()
}

#[test]
fn options_become_parameters_of_the_backend() {
    for (fields, expected) in [
        ("", vec![]),
        (r#", "max_sequence_number": 7"#, vec![("max_sequence_number", "7")]),
        (r#", "idle_sequence_cleanup": false"#, vec![("idle_sequence_cleanup", "false")]),
        (r#", "low_latency_transformation": true"#, vec![("low_latency_transformation", "true")]),
        (r#", "nireq": 0"#, vec![]),
        (r#", "nireq": 4"#, vec![("worker_count", "4")]),
        (r#", "nireq": 4, "plugin_config": {"NUM_STREAMS": "2"}"#, vec![("worker_count", "2")]),
        (r#", "nireq": 2, "plugin_config": {"NUM_STREAMS": 4}"#, vec![("worker_count", "2")]),
        (r#", "plugin_config": {"CPU_THROUGHPUT_STREAMS": 3}"#, vec![("worker_count", "3")]),
        (r#", "plugin_config": {"INFERENCE_NUM_THREADS": 0}"#, vec![("intra_op_thread_count", "0")]),
        (r#", "plugin_config": {"PERFORMANCE_HINT": "LATENCY"}"#, vec![]),
        (r#", "target_device": "CPU", "batch_size": 1, "allow_cache": false"#, vec![]),
        (r#", "batch_size": "0""#, vec![]),
    ] {
        let expected: Vec<_> = expected.into_iter().map(|(key, value)| (key, value.to_owned())).collect();
        assert_eq!(parameters(fields), expected, "{fields}");
    }
}

#[test]
fn an_entry_that_can_not_be_served_says_why() {
    for (fields, words) in [
        ("", "\"stateful\" is not true"),
        (r#", "stateful": false"#, "\"stateful\" is not true"),
        (r#", "max_sequence_number": 7"#, "Stateful model config parameter used for non stateful model"),
    ] {
        let error = entry(fields).unwrap_err();
        assert!(error.contains(words), "{fields}: {error}");
    }
    for (fields, words) in [
        (r#", "batch_size": "auto""#, "Dynamic shape and dynamic batch size are not supported for stateful models"),
        (r#", "shape": "auto""#, "Dynamic shape and dynamic batch size are not supported for stateful models"),
        (r#", "shape": {"x": "auto"}"#, "Dynamic shape and dynamic batch size are not supported for stateful models"),
        (r#", "shape": "(1,4)""#, "shape is the model's"),
        (r#", "batch_size": 8"#, "batch_size has to be 1"),
        (r#", "batch_size": 18446744073709551615"#, "batch_size has to be 1"),
        (r#", "layout": "NHWC:NCHW""#, "layout is refused"),
        (r#", "target_device": "GPU""#, "target_device is 'GPU'"),
        (r#", "allow_cache": true"#, "allow_cache"),
        (r#", "graph_path": "g""#, "MediaPipe"),
        (r#", "custom_loader_options": {"loader_name": "l"}"#, "custom loaders"),
        (r#", "max_sequence_number": 0"#, "max_sequence_number is 0: 1 to 4294967295"),
        (r#", "max_sequence_number": 4294967296"#, "max_sequence_number is 4294967296"),
        (r#", "nireq": 1025"#, "1025 threads: at most 1024"),
        (r#", "plugin_config": {"NUM_STREAMS": "AUTO"}"#, "NUM_STREAMS is \"AUTO\": a number, 1 or more"),
        (r#", "plugin_config": {"NUM_STREAMS": 0}"#, "NUM_STREAMS is 0"),
        (r#", "plugin_config": {"NUM_STREAMS": 1, "CPU_THROUGHPUT_STREAMS": 1}"#, "NUM_STREAMS twice"),
        (r#", "plugin_config": {"PERFORMANCE_HINT": "THROUGHPUT"}"#, "write LATENCY, or NUM_STREAMS"),
        (r#", "plugin_config": {"ENABLE_PROFILING": true}"#, "ENABLE_PROFILING is an option of OpenVINO"),
    ] {
        let error = stateful(fields).unwrap_err();
        assert!(error.contains(words), "{fields}: {error}");
    }
}

#[test]
fn a_file_that_the_schema_refuses_is_wrong_as_a_whole() {
    for text in [
        "",
        "[]",
        "null",
        "5",
        "{}",
        r#"{"model_config_list": 5}"#,
        r#"{"model_config_list": {}}"#,
        r#"{"model_config_list": [{}]}"#,
        r#"{"model_config_list": [{"config": {}}]}"#,
        r#"{"model_config_list": [{"config": {"name": 5}}]}"#,
        r#"{"model_config_list": [{"config": {"name": "m", "unknown": 5}}]}"#,
        r#"{"model_config_list": [{"config": {"name": "m", "name": "n"}}]}"#,
        r#"{"model_config_list": [{"config": {"name": "m", "stateful": "true"}}]}"#,
        r#"{"model_config_list": [{"config": {"name": "m", "nireq": -1}}]}"#,
        r#"{"model_config_list": [{"config": {"name": "m", "model_version_policy": {"newest": {}}}}]}"#,
        r#"{"model_config_list": [{"config": {"name": "m"}, "other": 5}]}"#,
        r#"{"model_config_list": [], "other": []}"#,
        r#"{"model_config_list": []"#,
        r#"{"model_config_list": []}}"#,
    ] {
        let error = parse(text, Path::new(""), None).unwrap_err();
        assert!(error.starts_with("The file is not valid json: "), "{text}: {error}");
    }
}

#[test]
fn a_relative_path_is_relative_to_the_file() {
    let path = |base_path: &str| {
        let list = format!(r#"[{{"config": {{"name": "m", "base_path": "{base_path}", "stateful": true}}}}]"#);
        read(&list).unwrap().models.remove("m").unwrap().map(|entry| entry.base_path)
    };
    assert_eq!(path("/models/m"), Ok(PathBuf::from("/models/m")));
    assert_eq!(path("models/m"), Ok(PathBuf::from("/etc/ovms/models/m")));
    assert!(path("").unwrap_err().contains("base_path is empty"));
    assert!(path("s3://bucket/m").unwrap_err().contains("copy the model to this host"));
}

#[test]
fn names_that_no_folder_can_have_are_refused() {
    let long = "x".repeat(256);
    for name in ["", ".", "..", "a/b", "a\u{1}b", "a\u{85}b", "a\nb", &long] {
        assert!(check_name(name).is_err(), "{name:?}");
    }
    for name in ["m", "with space", "Ü", "-dash", "a:b", "quote\"\\", ".hidden", &long[1..]] {
        assert_eq!(check_name(name), Ok(()), "{name:?}");
    }
}

#[test]
fn the_first_of_two_entries_of_a_name_counts() {
    let list = r#"[{"config": {"name": "m", "base_path": "/a", "stateful": true}},
                   {"config": {"name": "m", "base_path": "/b", "stateful": true}}]"#;
    let read = read(list).unwrap();
    assert_eq!(read.models["m"].as_ref().unwrap().base_path, Path::new("/a"));
    assert!(read.refused[0].contains("model 'm' is listed twice"), "{:?}", read.refused);
}

#[test]
fn what_else_a_file_may_list_is_named() {
    let text = r#"{"model_config_list": [], "pipeline_config_list": [{"name": "p", "nodes": []}],
        "mediapipe_config_list": [{"name": "g"}], "custom_loader_config_list": [{"config": {"loader_name": "l"}}],
        "monitoring": {"metrics": {"enable": true, "metrics_list": ["ovms_streams"]}}}"#;
    let read = parse(text, Path::new(""), None).unwrap();
    for words in ["pipeline 'p'", "MediaPipe graph 'g'", "custom loader 'l'"] {
        assert!(read.refused.iter().any(|refused| refused.contains(words)), "{words}: {:?}", read.refused);
    }
    assert!(read.warnings[0].contains("metrics_list"), "{:?}", read.warnings);
}

#[test]
fn a_model_of_the_command_line_is_an_entry() {
    let options = ModelOptions {
        model_name: Some("m".to_owned()),
        model_path: Some("/models/m".to_owned()),
        stateful: Some(true),
        model_version_policy: Some(r#"{"all": {}}"#.to_owned()),
        plugin_config: Some(r#"{"NUM_STREAMS": "2"}"#.to_owned()),
        ..ModelOptions::default()
    };
    let models =
        |options: ModelOptions| Source { models: ModelSource::CommandLine(options.into()), cleaner_minutes: Some(3) };
    let entry = models(options.clone()).read().unwrap().models.remove("m").unwrap().unwrap();
    assert_eq!(entry.policy, VersionPolicy::All {});
    assert_eq!(entry.parameters["worker_count"], "2");
    assert_eq!(entry.parameters["sequence_cleaner_poll_wait_minutes"], "3");
    let wrong = ModelOptions { model_version_policy: Some("newest".to_owned()), ..options.clone() };
    assert!(models(wrong).read().unwrap_err().contains("--model_version_policy"));
    let auto = ModelOptions { shape: Some("auto".to_owned()), ..options };
    assert!(models(auto).read().unwrap().models["m"].as_ref().unwrap_err().contains("Dynamic shape"));
}
