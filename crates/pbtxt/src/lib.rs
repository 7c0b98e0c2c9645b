//! Configurations of models (config.pbtxt) in protobuf's text format, as JSON, and back.

use std::path::Path;

use miette::Diagnostic;
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, SerializeOptions};
use protox::Compiler;
use protox::file::{File, FileResolver};
use serde_json::{Map, Value};

const SCHEMA: &str = include_str!("model_config.proto");

/// Reads a configuration. An error says what is wrong and where.
pub fn read(text: &str) -> Result<Map<String, Value>, String> {
    // Protobuf skips a byte order mark, as some editors write it, and the parser doesn't.
    let text = &with_colons(text.strip_prefix('\u{feff}').unwrap_or(text));
    let read = DynamicMessage::parse_text_format(descriptor()?, text).map_err(|error| at_line(text, &error))?;
    let options = SerializeOptions::new().use_proto_field_name(true).stringify_64_bit_integers(false);
    let value = read.serialize_with_options(serde_json::value::Serializer, &options);
    match value.map_err(|error| error.to_string())? {
        Value::Object(mut fields) => {
            // A map has no order, so it is given one, to print the same each time.
            if let Some(Value::Object(parameters)) = fields.get_mut("parameters") {
                parameters.sort_keys();
            }
            Ok(fields)
        }
        value => Err(format!("it is no message but {value}")),
    }
}

/// Writes a field a line.
pub fn write(config: &Map<String, Value>) -> Result<String, String> {
    Ok(fields(&descriptor()?, config))
}

fn descriptor() -> Result<MessageDescriptor, String> {
    const FILE: &str = "model_config.proto";
    struct Embedded;
    impl FileResolver for Embedded {
        fn open_file(&self, name: &str) -> Result<File, protox::Error> {
            File::from_source(name, SCHEMA)
        }
    }
    let mut compiler = Compiler::with_file_resolver(Embedded);
    compiler.open_file(Path::new(FILE)).map_err(|error| error.to_string())?;
    let found = compiler.descriptor_pool().get_message_by_name("ModelConfig");
    found.ok_or_else(|| format!("{FILE} has no ModelConfig"))
}

/// The text with a colon in front of each list. Protobuf lets lists of messages do without, as in `input [ { } ]`, and
/// the parser doesn't.
fn with_colons(text: &str) -> String {
    let mut written = String::with_capacity(text.len());
    // The quote of the string that this is in, or '#' in a comment.
    let mut inside: Option<char> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (inside, letter) {
            (Some('#'), '\n') => inside = None,
            (Some('"' | '\''), '\\') => {
                written.push(letter);
                written.extend(letters.next());
                continue;
            }
            (Some(quote), letter) if quote == letter && quote != '#' => inside = None,
            (None, '"' | '\'' | '#') => inside = Some(letter),
            (None, '[') if follows_name(&written) => written.push(':'),
            _ => {}
        }
        written.push(letter);
    }
    written
}

fn follows_name(text: &str) -> bool {
    text.trim_end().ends_with(|letter: char| letter.is_ascii_alphanumeric() || letter == '_')
}

/// A parse error with the number of its line.
fn at_line(text: &str, error: &(impl Diagnostic + ?Sized)) -> String {
    let label = error.labels().and_then(|mut labels| labels.next());
    let before = label.and_then(|label| text.get(..label.offset()));
    let line = before.map_or(String::new(), |before| format!("line {}: ", before.matches('\n').count() + 1));
    format!("{line}{error}")
}

fn fields(of: &MessageDescriptor, fields: &Map<String, Value>) -> String {
    fields.iter().map(|(name, value)| field(of.get_field_by_name(name).as_ref(), name, value)).collect()
}

fn field(of: Option<&FieldDescriptor>, name: &str, value: &Value) -> String {
    match (value, message(of)) {
        (Value::Object(entries), Some(message)) if !of.is_some_and(FieldDescriptor::is_map) => {
            format!("{name} {{\n{}}}\n", indented(&fields(&message, entries)))
        }
        _ => members(of, name, value).iter().map(|member| format!("{member}\n")).collect(),
    }
}

fn message(of: Option<&FieldDescriptor>) -> Option<MessageDescriptor> {
    match of?.kind() {
        Kind::Message(message) => Some(message),
        _ => None,
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// The texts for a field, without line breaks. Each of several messages, and each entry of a map, is a text with the
/// field's name.
fn members(of: Option<&FieldDescriptor>, name: &str, value: &Value) -> Vec<String> {
    match (value, message(of)) {
        (Value::Object(entries), Some(entry)) if of.is_some_and(FieldDescriptor::is_map) => {
            let of_value = entry.map_entry_value_field();
            let value = |value| members(Some(&of_value), "value", value).join(" ");
            entries.iter().map(|(key, of)| format!("{name} {{ key: {} {} }}", quoted(key), value(of))).collect()
        }
        (Value::Object(entries), message) => {
            let of = |name: &str| message.as_ref()?.get_field_by_name(name);
            let inner: Vec<_> =
                entries.iter().flat_map(|(name, value)| members(of(name).as_ref(), name, value)).collect();
            vec![format!("{name} {{ {} }}", inner.join(" ")).replace("{  }", "{ }")]
        }
        (Value::Array(values), Some(_)) => values.iter().flat_map(|value| members(of, name, value)).collect(),
        (value, _) => vec![format!("{name}: {}", scalar(of, value))],
    }
}

fn scalar(of: Option<&FieldDescriptor>, value: &Value) -> String {
    match value {
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(|value| scalar(of, value)).collect();
            format!("[ {} ]", values.join(", ")).replace("[  ]", "[ ]")
        }
        Value::String(text) if of.is_some_and(|of| matches!(of.kind(), Kind::Enum(_))) => text.clone(),
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

    const TEXT: &str = r#"backend: "stateful"
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
        assert_eq!(write(&config).unwrap(), TEXT);
    }

    #[test]
    fn what_people_write_is_read() {
        let text = r#"
            # a comment, it's [ "unfinished
            name: 'm', max_batch_size: 8;
            input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "z" data_type: TYPE_BOOL dims: 1 dims: 2 } ]
            sequence_batching < direct { } control_input: { name: "S" control [ { kind: CONTROL_SEQUENCE_START
                fp32_false_true: [ 0, 1 ] } ] }
                state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: [ 8 ]
                    initial_state: { data_type: TYPE_FP32 dims: [ 8 ] zero_data: true name: "i" } } >
            parameters: { key: "state_pairs", value: { string_value: "<<<a, b>>> " "x [ \" <<<c, d>>>" } }
            instance_group { kind: KIND_CPU count: 2 }
            model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
        "#;
        let expected = json!({
            "name": "m",
            "max_batch_size": 8,
            "input": [
                { "name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4] },
                { "name": "z", "data_type": "TYPE_BOOL", "dims": [1, 2] },
            ],
            "sequence_batching": {
                "direct": {},
                "control_input": [{
                    "name": "S",
                    "control": [{ "kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0.0, 1.0] }],
                }],
                "state": [{
                    "input_name": "a",
                    "output_name": "b",
                    "data_type": "TYPE_FP32",
                    "dims": [8],
                    "initial_state": [{ "data_type": "TYPE_FP32", "dims": [8], "zero_data": true, "name": "i" }],
                }],
            },
            "parameters": { "state_pairs": { "string_value": "<<<a, b>>> x [ \" <<<c, d>>>" } },
            "instance_group": [{ "kind": "KIND_CPU", "count": 2 }],
            "model_warmup": [{
                "name": "w",
                "inputs": { "x": { "data_type": "TYPE_FP32", "dims": [4], "zero_data": true } },
            }],
        });
        let read = read(text).unwrap();
        assert_eq!(Value::Object(read.clone()), expected);
        let written = write(&read).unwrap();
        assert_eq!(super::read(&written).map(Value::Object), Ok(expected), "{written}");
    }

    #[test]
    fn mistakes_are_refused_with_their_line() {
        for (text, words) in [
            ("name: 'm'\nmax_batchsize: 8", ["line 2", "max_batchsize"]),
            ("input { dims: [ 1 }", ["line 1", "}"]),
            ("max_batch_size: 'x'", ["line 1", "x"]),
        ] {
            let error = read(text).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
