//! The config.pbtxt of a model: what its entry says, and what a config.pbtxt in its `base_path` adds.
//!
//! The backend fills in the rest from the model. So an entry needs no file of its own. A file adds what OVMS has no option
//! for, such as `constant_inputs`. What both say must be the same.

use serde_json::{Map, Value, json};

use super::config::Entry;

/// The text for Triton. `name`: of the model. `added`: the text of the config.pbtxt in its `base_path`, if there is one.
pub fn config(name: &str, entry: &Entry, added: Option<&str>) -> Result<String, String> {
    let mut config = match added {
        Some(text) => stateful_pbtxt::read(text)?,
        None => Map::new(),
    };
    if config.remove("name").is_some_and(|written| written != name) {
        return Err(format!("its name is not '{name}', the name in the entry. Remove it"));
    }
    if config.insert("backend".to_owned(), json!("stateful")).is_some_and(|backend| backend != "stateful") {
        return Err("its backend is not \"stateful\"".to_owned());
    }
    for field in ["platform", "ensemble_scheduling"] {
        if config.contains_key(field) {
            return Err(format!("{field} is for another backend"));
        }
    }
    // The gateway links the selected versions only.
    if config.insert("version_policy".to_owned(), json!({ "all": {} })).is_some() {
        return Err("version_policy is model_version_policy in the entry. Write it there".to_owned());
    }
    if config.contains_key("instance_group") {
        if entry.device_given {
            return Err("the entry has target_device, and this file instance_group. Remove one of them".to_owned());
        }
    } else {
        // OVMS runs stateful models on the CPU, and Triton would use a GPU if there is one. Threads are `worker_count`.
        config.insert("instance_group".to_owned(), json!([{ "kind": "KIND_CPU", "count": 1 }]));
    }
    let parameters = config.entry("parameters").or_insert_with(|| Value::Object(Map::new()));
    let Value::Object(parameters) = parameters else {
        return Err("parameters is no map".to_owned());
    };
    for (key, value) in &entry.parameters {
        let value = json!({ "string_value": value });
        let written = parameters.insert((*key).to_owned(), value.clone());
        if let Some(written) = written.filter(|written| *written != value) {
            return Err(format!(
                "{key} is {} in this file, and {} by the entry or the command line. Write it in one place",
                written["string_value"], value["string_value"]
            ));
        }
    }
    stateful_pbtxt::write(&config)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::*;
    use crate::managed::policy::VersionPolicy;

    fn entry(parameters: &[(&'static str, &str)]) -> Entry {
        Entry {
            base_path: PathBuf::from("/models/m"),
            policy: VersionPolicy::default(),
            parameters: parameters.iter().map(|(key, value)| (*key, (*value).to_owned())).collect::<BTreeMap<_, _>>(),
            device_given: false,
        }
    }

    #[test]
    fn an_entry_needs_no_file() {
        let text = config("m", &entry(&[("max_sequence_number", "7"), ("stateful", "true")]), None).unwrap();
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
        let text = config("m", &entry(&[("stateful", "true")]), Some(added)).unwrap();
        let read = stateful_pbtxt::read(&text).unwrap();
        assert_eq!(read["instance_group"], json!([{ "kind": "KIND_GPU" }]));
        let expected =
            json!({ "constant_inputs": { "string_value": "sr=16000" }, "stateful": { "string_value": "true" } });
        assert_eq!(read["parameters"], expected);
        assert!(!read.contains_key("name"), "{text}");
    }

    #[test]
    fn a_file_that_contradicts_the_entry_is_refused_by_name() {
        let entry = Entry { device_given: true, ..entry(&[("max_sequence_number", "7")]) };
        for (added, words) in [
            (r#"name: "n""#, "its name is not 'm'"),
            (r#"backend: "onnxruntime""#, "backend"),
            (r#"platform: "onnxruntime_onnx""#, "platform"),
            ("version_policy { latest { num_versions: 1 } }", "model_version_policy"),
            ("instance_group { kind: KIND_CPU }", "target_device"),
            (
                r#"parameters { key: "max_sequence_number" value { string_value: "8" } }"#,
                "max_sequence_number is \"8\"",
            ),
            ("max_batchsize: 8", "max_batchsize"),
        ] {
            let error = config("m", &entry, Some(added)).unwrap_err();
            assert!(error.contains(words), "{added}: {error}");
        }
    }
}
