//! A config.pbtxt for the converted model.

use stateful_convert::onnx::{Dim, type_name};
use stateful_convert::report::{Report, Role, StartsAt, StepInput};

/// Most rows of a batch.
const MAX_BATCH_SIZE: i64 = 64;

/// The configuration. What it leaves out, the backend fills in.
pub fn config(report: &Report, model: &str, initial_states: Option<&str>, chunk: Option<i64>) -> String {
    let mut text = "backend: \"stateful\"\n".to_owned();
    if model != "model.onnx" {
        text += &format!("default_model_filename: {}\n", quoted(model));
    }
    if let Some(chunk) = chunk {
        text += &signature(report, chunk);
    }
    text += "instance_group [ { kind: KIND_CPU } ]\n";
    let pairs: Vec<String> = report.states.iter().map(|state| state.pair.to_string()).collect();
    text += &parameter("state_pairs", &pairs.join(" "));
    if let Some(file) = initial_states {
        text += &parameter("initial_state_model", file);
    }
    let value = |state: &stateful_convert::report::State| match state.starts_at {
        StartsAt::Value(value) => Some(format!("{}={value}", state.pair.input)),
        _ => None,
    };
    let values: Vec<String> = report.states.iter().filter_map(value).collect();
    if !values.is_empty() {
        text += &parameter("initial_states", &values.join(" "));
    }
    text
}

fn parameter(name: &str, value: &str) -> String {
    format!("parameters {{ key: {} value {{ string_value: {} }} }}\n", quoted(name), quoted(value))
}

/// The text in quotes. JSON and the text format have the same escapes for what names can have.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The inputs with a fixed number of steps, where each has its batch dimension in front and each state has one, or nothing
/// has one.
fn signature(report: &Report, chunk: i64) -> String {
    let is_open = |input: &StepInput, axis: usize| {
        let steps = matches!(input.role, Role::Steps { axis: time } if time == axis);
        !steps && !matches!(input.dims[axis], Dim::Known(_))
    };
    let open: Vec<Vec<usize>> = report
        .inputs
        .iter()
        .map(|input| (0..input.dims.len()).filter(|&axis| is_open(input, axis)).collect())
        .collect();
    let of_states = report.states.iter().map(|state| state.dims.iter().any(|dim| !matches!(dim, Dim::Known(_))));
    let of_states: Vec<bool> = of_states.collect();
    let has_batch = open.iter().all(|axes| *axes == [0]) && of_states.iter().all(|&open| open);
    if !has_batch && (open.iter().any(|axes| !axes.is_empty()) || of_states.contains(&true)) {
        return String::new();
    }
    let mut text = if has_batch { format!("max_batch_size: {MAX_BATCH_SIZE}\n") } else { String::new() };
    for input in &report.inputs {
        let dim = |axis: usize| match &input.dims[axis] {
            _ if matches!(input.role, Role::Steps { axis: time } if time == axis) => chunk.to_string(),
            Dim::Known(length) => length.to_string(),
            _ => "-1".to_owned(),
        };
        let dims: Vec<String> = (usize::from(has_batch)..input.dims.len()).map(dim).collect();
        // Triton takes no empty dims, and a reshape only beside its own batch dimension.
        let dims = match dims.as_slice() {
            [] if has_batch => "1 ] reshape { shape: [ ] }".to_owned(),
            [] => "1 ]".to_owned(),
            dims => format!("{} ]", dims.join(", ")),
        };
        let (name, data_type) = (quoted(&input.name), data_type(input.elem));
        text += &format!("input {{ name: {name} data_type: {data_type} dims: [ {dims} }}\n");
    }
    text
}

/// The data type as Triton writes it.
fn data_type(elem: i32) -> String {
    match type_name(elem) {
        "FLOAT" => "TYPE_FP32".to_owned(),
        "FLOAT16" => "TYPE_FP16".to_owned(),
        "BFLOAT16" => "TYPE_BF16".to_owned(),
        "DOUBLE" => "TYPE_FP64".to_owned(),
        name => format!("TYPE_{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_quotes_are_escaped() {
        let line = r#"parameters { key: "state_pairs" value { string_value: "<<<h\"0\", C:\\h>>>" } }"#;
        assert_eq!(parameter("state_pairs", r#"<<<h"0", C:\h>>>"#), format!("{line}\n"));
    }
}
