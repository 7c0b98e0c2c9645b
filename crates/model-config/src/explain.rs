//! Explains what the backend makes of a model, in two tables: its inputs and outputs, and its states if it has any,
//! each with the reason. For the log and for `stateful-inspect`.

use comfy_table::{Table, presets};
use rows::tensor::StorageType;

use crate::binding::{
    Binding, BoundControl, BoundState, Gathered, RequestInput, ShapeForm, Source, StatePlace, TrimBy,
};
use crate::completion::Origins;
use crate::config::{Config, FirstRequest, PairsFrom, StatePair};
use crate::onnx::{Signature, TensorInfo};

/// The two tables as text.
pub fn explain(config: &Config, binding: &Binding, signature: &Signature, origins: Origins) -> String {
    let explained = Explained { config, binding, origins };
    let mut tensors = table(["", "name", "type", "dims", "batch axis", "taken for", "why"]);
    for info in &signature.inputs {
        tensors.add_row(explained.input("input", info));
    }
    for info in &signature.defaults {
        tensors.add_row(explained.input("input with a default", info));
    }
    for info in &signature.outputs {
        tensors.add_row(explained.output(info));
    }
    if binding.states.is_empty() {
        return lines(&tensors).join("\n");
    }
    let mut states = table(["state", "type", "dims of a row", "batch axis", "bytes", "at START", "why"]);
    for state in &binding.states {
        states.add_row(explained.state(state));
    }
    let slot = &binding.slot;
    let mut bytes = format!("state: {} bytes a sequence, {} with alignment", slot.state_bytes(), slot.slot_bytes());
    if binding.has_varying_states() {
        bytes += &format!("; and up to {} bytes of states that vary in size", config.states.limits.per_sequence);
    }
    [lines(&tensors), lines(&states), vec![bytes]].concat().join("\n")
}

fn lines(table: &Table) -> Vec<String> {
    // The table fills its last column up with blanks, which only make lines of the log longer.
    table.to_string().lines().map(|line| line.trim_end().to_owned()).collect()
}

/// Explains what quantizing with one scale for the whole batch means for the model's sequences.
pub fn explain_batch_scale(scale: &str, config: &Config) -> String {
    let rows = config.max_rows_per_run;
    if rows == 1 {
        return format!("{scale} quantizes with one scale for the whole batch, so each request has a run of its own");
    }
    format!(
        "{scale} quantizes with one scale for the whole batch, and up to {rows} sequences share a run: they change each \
         other's answers. To prevent that, write 'max_batch_size: 1', or set parameter 'max_rows_per_run' to 1"
    )
}

fn table<const COLUMNS: usize>(header: [&str; COLUMNS]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}

struct Explained<'a> {
    config: &'a Config,
    binding: &'a Binding,
    origins: Origins,
}

impl Explained<'_> {
    fn input(&self, side: &str, info: &TensorInfo) -> [String; 7] {
        let Some(bound) = self.binding.inputs.iter().find(|input| input.name == info.name) else {
            return row(side, info, None, "its default".to_owned(), "nothing feeds it");
        };
        let (taken_for, why) = match &bound.source {
            Source::Request(request) => {
                let why = if self.origins.inputs_completed { COMPLETED } else { "listed under 'input'" };
                (self.requests(request, &bound.dims), why)
            }
            Source::Lengths { of } => (format!("lengths of {}", self.binding.inputs[*of].name), "'padded_inputs'"),
            Source::State(number) => {
                let state = &self.binding.states[*number];
                (format!("state, from {}", self.binding.outputs[state.output].name), self.why(state))
            }
            Source::Control(BoundControl::Flag { flag, .. }) => (format!("control {flag}"), "'control_input'"),
            Source::Control(BoundControl::CorrelationId(_)) => ("control CORRID".to_owned(), "'control_input'"),
            Source::Generated(generated) => (format!("generated: {}", generated.written), "'generated_inputs'"),
            Source::Constant(_) => ("constant".to_owned(), "'constant_inputs'"),
        };
        row(side, info, bound.batch_axis, taken_for, why)
    }

    fn output(&self, info: &TensorInfo) -> [String; 7] {
        let Some(index) = self.binding.outputs.iter().position(|output| output.name == info.name) else {
            return row("output", info, None, "nothing".to_owned(), "it is not listed under 'output'");
        };
        let output = &self.binding.outputs[index];
        let state = self.binding.states.iter().find(|state| state.output == index);
        let mut uses: Vec<(String, &str)> = Vec::new();
        if let Some(state) = state {
            uses.push((format!("state, to {}", self.binding.inputs[state.input].name), self.why(state)));
        }
        if output.is_response {
            // Without a batch dimension, a run has one value for all of its rows.
            let same = output.form == ShapeForm::Unbatched && state.is_none();
            let mut text = if same { "responses, the same for each row" } else { "responses" }.to_owned();
            text += match output.gathered {
                None => "",
                Some(Gathered::Stacked { .. }) => "; a dimension for the steps of a request",
                Some(Gathered::Joined { .. }) => "; the steps of a request one after another",
            };
            uses.push((text, if self.origins.outputs_completed { COMPLETED } else { "listed under 'output'" }));
        }
        if let Some(repeat) = &self.binding.repeat {
            for feed in repeat.feeds.iter().filter(|feed| feed.output == index) {
                uses.push((format!("{} of the next step", self.binding.inputs[feed.input].name), "'repeat'"));
            }
            if repeat.until.iter().any(|stop| stop.output == index) {
                uses.push(("the end of the steps".to_owned(), "'repeat_until'"));
            }
        }
        let by_this = TrimBy::Output(index);
        if self.binding.outputs.iter().any(|other| other.trim.is_some_and(|trim| trim.by == by_this)) {
            uses.push(("lengths".to_owned(), "'padded_outputs'"));
        }
        let (uses, reasons): (Vec<String>, Vec<&str>) = uses.into_iter().unzip();
        row("output", info, output.batch_axis, uses.join("; "), &reasons.join("; "))
    }

    fn state(&self, state: &BoundState) -> [String; 7] {
        let (input, output) = (&self.binding.inputs[state.input], &self.binding.outputs[state.output]);
        let bytes = match state.place {
            StatePlace::Slot(layout) => state.kept_bytes(layout).to_string(),
            StatePlace::Beside(_) => "vary".to_owned(),
        };
        let stored = match state.storage {
            StorageType::Exact => "",
            StorageType::Fp16 => ", kept as TYPE_FP16",
        };
        [
            format!("{} -> {}", output.name, input.name),
            format!("{}{stored}", state.data_type),
            dims(&state.dims, &[]),
            axis(state.batch_axis),
            bytes,
            state.initial.to_string(),
            self.why(state).to_owned(),
        ]
    }

    fn why(&self, state: &BoundState) -> &'static str {
        let (input, output) = (&self.binding.inputs[state.input], &self.binding.outputs[state.output]);
        let pair = StatePair { input: input.name.clone(), output: output.name.clone() };
        match self.origins.pairs {
            // A declared state may also be one that the parameter or the names give.
            _ if self.config.states.declaration(&pair).is_some() => "'sequence_batching.state'",
            PairsFrom::Parameter => "'state_pairs'",
            PairsFrom::Description => "the graph's description",
            PairsFrom::Names => "their names",
            PairsFrom::Shapes => "'state_pairs': by their names or dims",
            PairsFrom::Conversion => "the conversion at load",
        }
    }

    fn requests(&self, request: &RequestInput, dims: &[i64]) -> String {
        let mut text = "requests".to_owned();
        text += match request.form {
            ShapeForm::Plain => "",
            ShapeForm::BatchInside => ", Triton's batch dimension in front of the model's",
            // Triton has no scalars, so each has a dimension more than in the model.
            ShapeForm::Unbatched if !self.config.is_batched() => ", sent as [1]",
            ShapeForm::Unbatched if dims.is_empty() => ", one value for a batch, sent as [1, 1]",
            ShapeForm::Unbatched => ", one value for a batch",
        };
        if request.optional {
            text += ", may be left out";
        }
        if let Some(context) = request.context {
            let (length, axis) = (context.length, context.axis);
            text += &match usize::try_from(dims[axis]) {
                Ok(window) => format!(", {length} of the last in front of {} along axis {axis}", window - length),
                Err(_) => format!(", {length} of the last in front along axis {axis}"),
            };
            text += match context.first {
                FirstRequest::Zeros => "",
                FirstRequest::Repeat => ", at first the first element repeated",
                FirstRequest::Whole => ", at first the whole window from the client",
            };
        }
        if let Some(window) = request.window {
            text += &format!(", cut into windows of {} along axis {}", window.length, window.axis);
        }
        if let Some(axis) = request.ragged_axis.filter(|_| request.is_padded) {
            text += &format!(", filled up along axis {axis}");
        }
        text
    }
}

const COMPLETED: &str = "neither state nor constant";

fn row(side: &str, info: &TensorInfo, batch_axis: Option<usize>, taken_for: String, why: &str) -> [String; 7] {
    let (data_type, dims) = (info.data_type.to_string(), dims(&info.dims, &info.symbols));
    [side.to_owned(), info.name.clone(), data_type, dims, axis(batch_axis), taken_for, why.to_owned()]
}

fn axis(axis: Option<usize>) -> String {
    axis.map_or("none".to_owned(), |axis| axis.to_string())
}

/// Dimensions with the names of the open ones.
fn dims(dims: &[i64], symbols: &[String]) -> String {
    let name = |axis: usize| symbols.get(axis).filter(|symbol| !symbol.is_empty()).map_or("?", String::as_str);
    let dim = |(axis, &dim): (usize, &i64)| if dim < 0 { name(axis).to_owned() } else { dim.to_string() };
    format!("[{}]", dims.iter().enumerate().map(dim).collect::<Vec<_>>().join(", "))
}
