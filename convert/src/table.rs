//! What a conversion did, for people.

use comfy_table::{Table, presets};
use stateful_convert::onnx::{Dim, bracketed, type_name};
use stateful_convert::report::{Report, Role, StartsAt};
use stateful_convert::verify::Compared;

/// Tables of inputs and outputs, states and comparisons, then warnings.
pub fn table(report: &Report, compared: &[Compared], warnings: &[String]) -> String {
    let mut text = signature(report);
    text += &format!("\n{}", states(report));
    let bytes = report.states.iter().try_fold(0_i64, |sum, state| sum.checked_add(state.bytes?));
    if let Some(bytes) = bytes {
        text += &format!("\nstates: {bytes} bytes a sequence\n");
    }
    text += &format!("\n{}", comparisons(compared));
    for warning in warnings {
        text += &format!("\nwarning: {warning}");
    }
    text
}

fn made(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn signature(report: &Report) -> String {
    let input = |input: &stateful_convert::report::StepInput| {
        let has = match input.role {
            Role::Steps { axis } => {
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
        vec!["input".to_owned(), input.name.clone(), type_name(input.elem).to_owned(), bracketed(&input.dims), has]
    };
    let output = |output: &stateful_convert::report::StepOutput| {
        let last = if report.time.is_empty() { "" } else { "the last step" };
        let has = output.axis.map_or(last.to_owned(), |axis| format!("the steps, on axis {axis}"));
        vec!["output".to_owned(), output.name.clone(), type_name(output.elem).to_owned(), bracketed(&output.dims), has]
    };
    let rows = report.inputs.iter().map(input).chain(report.outputs.iter().map(output)).collect();
    made(&["", "name", "type", "dims", "has"], rows)
}

fn states(report: &Report) -> String {
    let row = |state: &stateful_convert::report::State| {
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

fn comparisons(compared: &[Compared]) -> String {
    let row = |compared: &Compared| {
        let result = if compared.largest == 0.0 {
            "equal bit by bit".to_owned()
        } else {
            let step = compared.step.map(|step| format!(" at step {step}")).unwrap_or_default();
            format!("largest difference {:.1e}, in '{}'{step}", compared.largest, compared.output)
        };
        vec![compared.what.clone(), result]
    };
    made(&["compared with the original", ""], compared.iter().map(row).collect())
}
