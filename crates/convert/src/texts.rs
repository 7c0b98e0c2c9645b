//! What a conversion did, in tables for people or as JSON.

use std::path::PathBuf;

use comfy_table::{Table, presets};
use serde_json::json;
use stateful_convert::StatePair;
use stateful_convert::onnx::schema::{ModelProto, ValueInfoProto};
use stateful_convert::onnx::{Dim, bracketed, type_name};
use stateful_convert::report::{Report, Role, StartsAt, State, StepInput, StepOutput, Warning};
use stateful_convert::verify::Compared;

use crate::options::{Shared, option};

/// What was done, as tables or as JSON. `with` is what the model was compared with.
pub fn done(
    report: &Report,
    compared: &[Compared],
    written: Option<&[PathBuf]>,
    options: &Shared,
    with: &str,
) -> String {
    let warnings = warnings(report);
    if options.json {
        let mut report = json!(report);
        report["warnings"] = json!(warnings);
        return format!("{:#}", json!({ "report": report, "compared": compared, "written": written }));
    }
    let mut text = inputs_and_outputs(report);
    text += &format!("\n{}", states(report));
    let bytes = report.states.iter().try_fold(0_i64, |sum, state| sum.checked_add(state.bytes?));
    if let Some(bytes) = bytes {
        text += &format!("\nstates: {bytes} bytes a sequence\n");
    }
    text += &format!("\n{}", comparisons(compared, with));
    for warning in &warnings {
        text += &format!("\nwarning: {warning}");
    }
    for path in written.unwrap_or_default() {
        text += &format!("\nwritten: {}", path.display());
    }
    text
}

pub fn tensors(model: &ModelProto) -> String {
    let of = |kind: &str, values: &[ValueInfoProto]| -> Vec<Vec<String>> {
        let dims = |value: &ValueInfoProto| value.dims().unwrap_or_default();
        values.iter().map(|value| row(kind, value.name(), value.elem(), &dims(value)).to_vec()).collect()
    };
    let rows = model.graph.iter().flat_map(|graph| [of("input", &graph.input), of("output", &graph.output)]);
    made(&["", "name", "type", "dims"], rows.flatten().collect())
}

fn row(kind: &str, name: &str, elem: i32, dims: &[Dim]) -> [String; 4] {
    [kind.to_owned(), name.to_owned(), type_name(elem).to_owned(), bracketed(dims)]
}

fn made(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn inputs_and_outputs(report: &Report) -> String {
    let input = |input: &StepInput| {
        let has = match input.role {
            Role::Steps { axis } => {
                // The converted model takes any number there, although the original did not.
                let fixed = match &input.dims[axis] {
                    Dim::Known(length) => format!(" (any number in place of {length})"),
                    _ => String::new(),
                };
                let batch = report.batch_was.as_ref().map(|name| format!("; '{name}' is the batch"));
                format!("the steps, on axis {axis}{fixed}{}", batch.unwrap_or_default())
            }
            Role::Lengths => "the number of steps of each row".to_owned(),
            Role::Other => String::new(),
        };
        [&row("input", &input.name, input.elem, &input.dims)[..], &[has]].concat()
    };
    let output = |output: &StepOutput| {
        let last = if report.time.is_empty() { "" } else { "the last step" };
        let has = output.axis.map_or(last.to_owned(), |axis| format!("the steps, on axis {axis}"));
        [&row("output", &output.name, output.elem, &output.dims)[..], &[has]].concat()
    };
    let rows = report.inputs.iter().map(input).chain(report.outputs.iter().map(output)).collect();
    made(&["", "name", "type", "dims", "has"], rows)
}

fn states(report: &Report) -> String {
    let row = |state: &State| {
        let starts = match state.starts_at {
            StartsAt::Zero => "zero".to_owned(),
            StartsAt::Value(value) => value.to_string(),
            StartsAt::Model => "values of its own".to_owned(),
            StartsAt::Unchanged => "as before".to_owned(),
        };
        vec![
            state.pair.input.clone(),
            state.pair.output.clone(),
            type_name(state.elem).to_owned(),
            bracketed(&state.dims),
            state.bytes.map_or("?".to_owned(), |bytes| bytes.to_string()),
            starts,
            format!("{} {}", state.operator, state.node).trim().to_owned(),
        ]
    };
    made(&["state", "next", "type", "dims", "bytes", "starts at", "of"], report.states.iter().map(row).collect())
}

fn comparisons(compared: &[Compared], with: &str) -> String {
    let row = |compared: &Compared| {
        let result = if compared.largest == 0.0 {
            "equal bit by bit".to_owned()
        } else {
            let step = compared.step.map(|step| format!(" at step {step}")).unwrap_or_default();
            format!("largest difference {:.1e}, in '{}'{step}", compared.largest, compared.output)
        };
        vec![compared.what.clone(), result]
    };
    made(&[&format!("compared with {with}"), ""], compared.iter().map(row).collect())
}

fn warnings(report: &Report) -> Vec<String> {
    let with_option = |warning: &Warning| {
        warning.hint().map_or_else(|| warning.to_string(), |hint| format!("{warning}; {}", option(hint)))
    };
    report.warnings.iter().map(with_option).chain(unpaired(report)).collect()
}

fn unpaired(report: &Report) -> Option<String> {
    // In models of single steps, requests carry the first input.
    let first = usize::from(report.time.is_empty());
    let inputs: Vec<&StepInput> = report.inputs.iter().skip(first).filter(|input| input.role == Role::Other).collect();
    let pair = |input: &&StepInput| {
        let alike = |elem: i32, dims: &[Dim]| elem == input.elem && dims == input.dims;
        let mut outputs = report.outputs.iter().filter(|output| alike(output.elem, &output.dims));
        let output = outputs.next().filter(|_| outputs.next().is_none())?;
        // With two candidates, a suggestion would be a guess.
        let is_only = inputs.iter().filter(|input| alike(input.elem, &input.dims)).count() == 1;
        is_only.then(|| StatePair::new(&input.name, &output.name).to_string())
    };
    let pairs: Vec<String> = inputs.iter().filter_map(pair).collect();
    let text = format!(
        "by their types and dims, {} may be states, too: if they are, name them with --states; else requests have to carry \
         these inputs",
        pairs.join(" ")
    );
    (!pairs.is_empty()).then_some(text)
}
