//! A configuration in protobuf's text format.

use serde_json::{Map, Value};

/// Fields whose texts are names of enumerations, which stand without quotes.
const ENUMERATIONS: [&str; 2] = ["data_type", "kind"];
/// Fields that are maps, which the text format writes as entries of key and value.
const MAPS: [&str; 1] = ["parameters"];

/// The configuration, a field a line.
pub fn write(config: &Map<String, Value>) -> String {
    config.iter().map(|(name, value)| field(name, value)).collect()
}

fn field(name: &str, value: &Value) -> String {
    match value {
        Value::Object(entries) if MAPS.contains(&name) => {
            let entry = |(key, value): (&String, &Value)| {
                format!("{name} {{ key: {} value {} }}\n", quoted(key), one_line("value", value))
            };
            entries.iter().map(entry).collect()
        }
        Value::Object(fields) => format!("{name} {{\n{}}}\n", indented(&write(fields))),
        Value::Array(messages) if messages.iter().any(Value::is_object) => {
            messages.iter().map(|message| format!("{name} {}\n", one_line(name, message))).collect()
        }
        value => format!("{name}: {}\n", one_line(name, value)),
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

fn one_line(name: &str, value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| match value {
                Value::Object(_) => format!("{name} {}", one_line(name, value)),
                value => format!("{name}: {}", one_line(name, value)),
            };
            format!("{{ {} }}", fields.iter().map(field).collect::<Vec<_>>().join(" "))
        }
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(|value| one_line(name, value)).collect();
            format!("[ {} ]", values.join(", ")).replace("[  ]", "[ ]")
        }
        Value::String(text) if ENUMERATIONS.contains(&name) => text.clone(),
        Value::String(text) => quoted(text),
        value => value.to_string(),
    }
}

fn quoted(text: &str) -> String {
    // The escapes of JSON are escapes of the text format, too, but for those of control characters.
    Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_of_field_has_its_form() {
        let config = json!({
            "backend": "stateful",
            "max_batch_size": 64,
            "input": [
                { "name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4] },
                { "name": "sr", "data_type": "TYPE_INT64", "dims": [1], "reshape": { "shape": [] } },
            ],
            "sequence_batching": { "max_sequence_idle_microseconds": 5, "oldest": { "max_candidate_sequences": 9 } },
            "parameters": { "state_pairs": { "string_value": "<<<a, \"b\">>>" } },
        });
        let Value::Object(config) = config else { panic!("an object") };
        let expected = r#"backend: "stateful"
max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
input { name: "sr" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } }
sequence_batching {
  max_sequence_idle_microseconds: 5
  oldest {
    max_candidate_sequences: 9
  }
}
parameters { key: "state_pairs" value { string_value: "<<<a, \"b\">>>" } }
"#;
        assert_eq!(write(&config), expected);
    }
}
