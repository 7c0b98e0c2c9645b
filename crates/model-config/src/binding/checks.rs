//! What a bound model may get wrong without an error of ONNX Runtime, as far as the names of dimensions, the graph and
//! the metadata can say: refusals, and warnings where only the user knows.
//!
//! - Tensors with different batches: where one tensor's batch is another's steps, sequences that share a run change
//!   each other's answers.
//! - What a conversion says of the model: which multiple of steps a request must have for a stride over time, and which
//!   states don't start at zero.
//! - States about which the model's dims don't say enough.

use std::collections::BTreeMap;

use prost::bytes::Bytes;
use rows::tensor::{DataType, Dims};
use stateful_convert::report::{INITIAL_STATES, InitialState, STEPS_MULTIPLE, StepsMultiple as OfInput};
use stateful_convert::{
    InputAxis, OutputAxis, RowsInGraph, StatePair, crossed_states, is_batch_name, passes_on_rows, rows_meet_others,
    rows_stay_apart,
};

use super::bound::{BoundInput, BoundOutput, BoundState, RequestInput, Source, StepsMultiple};
use super::error::{BindingError, Result, bad};
use super::fit::{is_batch, state_dims};
use super::model::Binding;
use crate::config::{
    Config, DeclaredState, INPUT_WINDOWS, StateDims, StatePairs, States, TensorConfig, parameter_line, state_dims_line,
};
use crate::onnx::{Signature, TensorInfo, open_axes};

/// An input of fewer elements along its only axis is hardly a chunk of time.
const LEAST_CHUNK: usize = 64;

/// A tensor, and which of its dimensions is the batch. If two disagree, the tensor of the later kind is more likely the
/// wrong one.
#[derive(Clone, Copy)]
struct Batched<'a> {
    kind: Kind,
    info: &'a TensorInfo,
    axis: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    State,
    Input,
    Output,
}

impl Binding {
    /// Refuses a configuration with which the batch of two tensors would be dimensions with different names.
    pub fn check_one_batch(&self, config: &Config, pairs: &[StatePair], signature: &Signature) -> Result<()> {
        // A batch axis in 'state_dims' overrides the name of the dimension.
        let is_written = |name: &str| config.states.written_dims(name).is_some();
        let of_input = |input: &BoundInput| {
            let infos = signature.inputs.iter().chain(&signature.defaults);
            let info = infos.into_iter().find(|info| info.name == input.name)?;
            let kind = if matches!(input.source, Source::State(_)) { Kind::State } else { Kind::Input };
            let batched = Batched { kind, info, axis: input.batch_axis? };
            (kind != Kind::State || !is_written(&info.name)).then_some(batched)
        };
        let of_output = |tensor: &TensorConfig| {
            let output = self.outputs.iter().find(|output| output.name == tensor.name)?;
            let info = signature.output(&tensor.name)?;
            let is_state = pairs.iter().any(|pair| pair.output == tensor.name);
            let axis = output.batch_axis.filter(|_| !is_state && !info.dims.is_empty())?;
            Some(Batched { kind: Kind::Output, info, axis })
        };
        let inputs = self.inputs.iter().filter_map(of_input);
        let mut tensors: Vec<Batched> = inputs.chain(config.outputs.iter().filter_map(of_output)).collect();
        tensors.sort_by_key(|tensor| tensor.kind);
        // The dims of a declared state say which dimension is the batch, whatever its name.
        let is_named = |tensor: &Batched| tensor.kind == Kind::State && !config.states.is_declared(&tensor.info.name);
        let found = tensors.iter().find_map(|tensor| {
            let found = tensor.against(&tensors).or_else(|| tensor.against_usual_names());
            found.or_else(|| is_named(tensor).then(|| tensor.against_requests(&tensors)).flatten())
        });
        found.map_or(Ok(()), Err)
    }

    /// Refuses dims that give a length to a dimension which the model leaves open, and mark another one as the batch,
    /// if the graph then combines rows with that dimension. Such dims can be right, with the steps before the batch, or
    /// they can be a mistake that gives the batch the length one. `model` reads the ONNX file.
    pub fn check_marked_batch<E: From<BindingError>>(
        &self,
        config: &Config,
        signature: &Signature,
        model: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<(), E> {
        let marked = |tensor: &TensorConfig| {
            let info = signature.input(&tensor.name)?;
            let is_fixed = |axis: &usize| tensor.dims[*axis] >= 0 && info.dims[*axis] < 0;
            let has_all = info.dims.len() == tensor.dims.len();
            let fixed = (0..info.dims.len()).find(|axis| has_all && is_fixed(axis))?;
            let axis = self.inputs.iter().find(|input| input.name == info.name)?.batch_axis?;
            Some((Batched { kind: Kind::Input, info, axis }, fixed))
        };
        let Some((tensor, fixed)) = config.inputs.iter().find_map(marked) else { return Ok(()) };
        // Reading the file takes time, and few configurations need it.
        let met = rows_meet_others(model()?, &self.row_axes(), &self.output_axes());
        met.map_or(Ok(()), |node| {
            let what = format!("{}, and {node} brings it together with another dimension", tensor.place());
            Err(refusal(what, &tensor.line(fixed)).into())
        })
    }
}

impl Batched<'_> {
    fn symbol(&self) -> &str {
        self.info.symbol(self.axis)
    }

    /// The dimension with a name that is not the batch of this tensor.
    fn other(&self, name: &str) -> Option<usize> {
        let mut axes = 0..self.info.dims.len();
        axes.find(|&axis| axis != self.axis && self.info.dims[axis] < 0 && self.info.symbol(axis) == name)
    }

    /// One of the tensors has the name of this batch for another dimension, and another batch.
    fn against(&self, all: &[Self]) -> Option<BindingError> {
        let name = self.symbol();
        let differs = |other: &&Self| !name.is_empty() && other.symbol() != name && other.other(name).is_some();
        let other = all.iter().find(differs)?;
        // Trusts the tensor whose batch has a usual name; if that doesn't decide, the one of the earlier kind.
        let doubts = |tensor: &Self| (!is_batch_name(tensor.symbol()), tensor.kind);
        let (right, wrong) = if doubts(self) <= doubts(other) { (self, other) } else { (other, self) };
        let what = format!("{}, and {}", right.place(), wrong.place());
        Some(refusal(what, &wrong.other(right.symbol()).map_or_else(String::new, |axis| wrong.line(axis))))
    }

    /// Another dimension of this tensor has a usual name of the batch.
    fn against_usual_names(&self) -> Option<BindingError> {
        let is_usual = |&axis: &usize| self.info.dims[axis] < 0 && is_batch_name(self.info.symbol(axis));
        let usual = (0..self.info.dims.len()).find(is_usual).filter(|_| !is_batch_name(self.symbol()))?;
        let what = format!("{}, though dimension {usual} is named '{}'", self.place(), self.info.symbol(usual));
        Some(refusal(what, &self.line(usual)))
    }

    /// This state has a name for the batch that neither requests have nor is usual. A name with a number may be one
    /// that an exporter made up for each tensor; `Binding::warnings` says so.
    fn against_requests(&self, all: &[Self]) -> Option<BindingError> {
        let name = self.symbol();
        let is_word = !name.is_empty() && !is_batch_name(name) && !ends_with_digit(name);
        let named = |other: &&Self| other.kind == Kind::Input && !other.symbol().is_empty();
        let of_requests = all.iter().find(named).filter(|other| is_word && other.symbol() != name)?;
        if ends_with_digit(of_requests.symbol()) {
            return None;
        }
        let dims = |batch_axis| state_dims(self.info, &self.info.dims, batch_axis);
        let what = format!("{}, and {}", of_requests.place(), self.place());
        let (batched, varying) = (state_dims_line([dims(Some(self.axis))]), state_dims_line([dims(None)]));
        let line = format!("if both are the batch, write {batched}; if the second one varies, write {varying}");
        Some(refusal(what, &line))
    }

    /// As in `dimension 1 of input 'x', 'time'`.
    fn place(&self) -> String {
        let kind = match self.kind {
            Kind::State => "state",
            Kind::Input => "input",
            Kind::Output => "output",
        };
        let place = format!("dimension {} of {kind} '{}'", self.axis, self.info.name);
        if self.symbol().is_empty() { place } else { format!("{place}, '{}'", self.symbol()) }
    }

    /// What to write so that the batch is another dimension.
    fn line(&self, axis: usize) -> String {
        let mut dims = self.info.dims.clone();
        if self.kind == Kind::State {
            let line = state_dims_line([state_dims(self.info, &dims, Some(axis))]);
            return format!("if dimension {axis} is the batch, write {line}");
        }
        let how = if axis == 0 {
            dims.remove(0);
            "leave it out of the dims"
        } else {
            "write the model's dims"
        };
        let listed = Dims(&dims).to_string();
        let listed = listed.trim_matches(['[', ']']);
        format!("if dimension {axis} of '{}' is the batch, {how}: dims: [ {listed} ]", self.info.name)
    }
}

fn ends_with_digit(name: &str) -> bool {
    name.ends_with(|last: char| last.is_ascii_digit())
}

fn refusal(what: String, line: &str) -> BindingError {
    let line = if line.is_empty() { String::new() } else { format!("{line}; ") };
    let alone = "with parameter 'max_rows_per_run' of 1, each sequence runs alone, and the dims stay as written";
    BindingError::OtherBatch { what, help: format!("{line}{alone}") }
}

impl Binding {
    /// Takes the multiples of steps from the model's metadata, where a conversion has written them.
    pub fn set_steps_multiples(&mut self, metadata: &BTreeMap<String, String>) -> Result<()> {
        let Some(value) = metadata.get(STEPS_MULTIPLE) else { return Ok(()) };
        let error = |why: String| BindingError::Metadata { key: STEPS_MULTIPLE, value: value.clone(), why };
        let of_inputs: Vec<OfInput> = serde_json::from_str(value).map_err(|why| error(why.to_string()))?;
        for OfInput { input: name, axis, multiple } in of_inputs {
            let input = self.inputs.iter_mut().find(|input| input.name == name);
            let Some(input) = input.filter(|input| axis < input.dims.len()) else {
                return Err(error(format!("the model has no input '{name}' with an axis {axis}")));
            };
            let dim = input.dims[axis];
            if usize::try_from(dim).is_ok_and(|steps| steps % multiple != 0) {
                return Err(error(format!("input '{name}' has {dim} along axis {axis}: configure a multiple of it")));
            }
            // Only requests bring steps.
            let Source::Request(request) = &mut input.source else { continue };
            if request.context.is_some() {
                return Err(error(format!("'input_context' would prepend other steps: take '{name}' out of it")));
            }
            if let Some(window) = request.window {
                let length = window.length;
                if length % multiple != 0 {
                    let why = format!("'input_windows' cuts '{name}' into windows of {length}: write a multiple of it");
                    return Err(error(why));
                }
                // Each window has a multiple of the steps, so requests may bring any number.
                continue;
            }
            request.steps_multiple = Some(StepsMultiple { axis, multiple });
        }
        Ok(())
    }

    /// Says which inputs of requests could be cut into windows: those that have one length, and surely or probably
    /// count steps of time. `None` if there are none.
    pub fn could_be_cut(&self) -> Option<String> {
        let chunk = |(input, request): (&BoundInput, &RequestInput)| {
            let can_be =
                !self.makes_steps() && !request.optional && !request.is_held && input.data_type != DataType::Bytes;
            let beside: Vec<usize> = (0..input.dims.len()).filter(|&axis| input.batch_axis != Some(axis)).collect();
            let (axis, in_front) = match (request.context, beside.as_slice()) {
                (Some(context), _) => (context.axis, context.length),
                (None, &[axis]) => (axis, 0),
                (None, _) => return None,
            };
            let length = usize::try_from(input.dims[axis]).ok()?.checked_sub(in_front)?;
            let name = &input.name;
            (can_be && length >= LEAST_CHUNK)
                .then(|| (format!("{length} elements of '{name}'"), format!("{name}={length}@{axis}")))
        };
        let (lengths, entries): (Vec<_>, Vec<_>) = self.request_inputs().filter_map(chunk).unzip();
        let line = parameter_line(INPUT_WINDOWS, &entries.join(" "));
        let lengths = lengths.join(" and ");
        (!entries.is_empty()).then_some(format!(
            "requests carry {lengths}; if these are steps of time, with {line} requests may have any length, and the backend \
             makes a step for each window of that many"
        ))
    }

    /// Refuses windows beside a model for initial states that reads inputs: a START may bring less than a window.
    pub fn check_initial_model(&self, model: &str) -> Result<()> {
        let entries: Vec<String> = self.windows().map(|(input, _, window)| self.window_name(input, window)).collect();
        if entries.is_empty() {
            return Ok(());
        }
        let why = format!(
            "the {model} reads the inputs of a START, and a START may bring less than a window: give the states' initial \
             values in 'initial_states'"
        );
        Err(bad(INPUT_WINDOWS, entries.join(" "), why))
    }

    /// Refuses a configuration without the initial states that the model's metadata names.
    pub fn check_initial_states(states: &States, metadata: &BTreeMap<String, String>) -> Result<()> {
        let Some(value) = metadata.get(INITIAL_STATES) else { return Ok(()) };
        // Without them, the states would start at zero, and nothing would show that the answers are wrong.
        let error = |why: String| BindingError::Metadata { key: INITIAL_STATES, value: value.clone(), why };
        let wanted: Vec<InitialState> = serde_json::from_str(value).map_err(|why| error(why.to_string()))?;
        let is_missing = |wanted: &&InitialState| {
            let has_model = wanted.value.is_none() && states.initial_model.is_some();
            let is_declared = |state: &DeclaredState| state.pair.input == wanted.state && state.initial.is_some();
            let is_given = states.initial.iter().any(|(name, _)| *name == wanted.state);
            !has_model && !is_given && !states.declared.iter().any(is_declared)
        };
        let missing: Vec<&InitialState> = wanted.iter().filter(is_missing).collect();
        // A conversion at load brings the values, or a model that computes them.
        if missing.is_empty() || matches!(states.pairs, StatePairs::Converted(_)) {
            return Ok(());
        }
        let values: Vec<String> =
            missing.iter().filter_map(|wanted| Some(format!("{}={}", wanted.state, wanted.value.as_ref()?))).collect();
        let help = if values.is_empty() {
            let line = parameter_line("initial_state_model", "model_initial_states.onnx");
            format!("{line}, with the file that stateful-convert wrote beside the model")
        } else {
            parameter_line("initial_states", &values.join(" "))
        };
        let names: Vec<&str> = missing.iter().map(|wanted| wanted.state.as_str()).collect();
        Err(error(format!("the configuration doesn't say where these states start: {}; add {help}", names.join(", "))))
    }

    /// Refuses a state of a layer's hidden state and its cell state. `model` is the ONNX file.
    pub fn check_ends(&self, model: Bytes) -> Result<()> {
        let name = |state: &BoundState| StatePair {
            input: self.inputs[state.input].name.clone(),
            output: self.outputs[state.output].name.clone(),
        };
        let pairs: Vec<StatePair> = self.states.iter().map(name).collect();
        crossed_states(model, &pairs).map_or(Ok(()), |why| Err(BindingError::Crossed { why }))
    }

    /// Refuses a model with a recurrence along the batch, such as an LSTM that gets `[batch, time, n]` where it takes
    /// `[time, batch, n]`. `model` is the ONNX file.
    pub fn check_rows(&self, model: Bytes) -> Result<()> {
        let rows = self.row_axes();
        passes_on_rows(model, &rows).map_or(Ok(()), |node| {
            let axes: Vec<String> = rows.iter().map(InputAxis::to_string).collect();
            Err(BindingError::RowsAreSteps { node, axes: axes.join(", ") })
        })
    }

    /// Whether the graph proves that rows don't change each other's results. `model` is the ONNX file.
    pub fn rows_in_graph(&self, model: Bytes) -> RowsInGraph {
        if let Some(input) = self.inputs.iter().find(|input| input.is_padded()) {
            // A row's padding depends on the other rows, and the graph doesn't show whether the model ignores it.
            let why = format!("shorter rows of '{}' are filled up ('padded_inputs')", input.name);
            return RowsInGraph::Unproven(why);
        }
        let fetched: Vec<&str> = self.outputs.iter().map(|output| output.name.as_str()).collect();
        rows_stay_apart(model, &self.row_axes(), &self.output_axes(), &fetched)
    }

    fn row_axes(&self) -> Vec<InputAxis> {
        let axis = |input: &BoundInput| Some(InputAxis { input: input.name.clone(), axis: input.batch_axis? });
        self.inputs.iter().filter_map(axis).collect()
    }

    fn output_axes(&self) -> Vec<OutputAxis> {
        let axis = |output: &BoundOutput| Some(OutputAxis { output: output.name.clone(), axis: output.batch_axis? });
        self.outputs.iter().filter_map(axis).collect()
    }

    /// Warnings of what may be wrong, each with the line of config.pbtxt that decides it.
    pub fn warnings(&self, config: &Config, signature: &Signature) -> Vec<String> {
        let is_given = |name: &str| config.states.written_dims(name).is_some() || config.states.is_declared(name);
        let infos = || signature.inputs.iter();
        let undeclared = infos().filter(|info| !is_given(&info.name)).filter_map(|info| {
            let state = self.states.iter().find(|state| self.inputs[state.input].name == info.name)?;
            Some(Undeclared { info, next: signature.output(&self.outputs[state.output].name), state })
        });
        let states: Vec<Undeclared> = undeclared.collect();
        let batch_symbol = infos().find_map(|info| {
            let (input, _) = self.request_inputs().find(|(input, _)| input.name == info.name)?;
            Some(info.symbol(input.batch_axis?)).filter(|symbol| !symbol.is_empty())
        });
        empty_starts(&states).into_iter().chain(other_names(&states, batch_symbol)).collect()
    }

    /// The states that the model leaves open and with which a sequence starts without elements, and their dims; `None`
    /// if there are none.
    pub fn empty_starts(&self) -> Option<String> {
        let empty = self.states.iter().filter(|state| state.empty_axes().next().is_some());
        let described: Vec<_> = empty.map(|state| at_start(&self.inputs[state.input].name, state)).collect();
        (!described.is_empty()).then(|| described.join(", "))
    }
}

/// A state whose dims the configuration doesn't give.
struct Undeclared<'a> {
    info: &'a TensorInfo,
    next: Option<&'a TensorInfo>,
    state: &'a BoundState,
}

fn at_start(name: &str, state: &BoundState) -> String {
    format!("'{name}' {}", Dims(&state.initial.dims))
}

/// Warns of states that start without elements and may always have the same length. A state that grows starts so.
fn empty_starts(states: &[Undeclared]) -> Option<String> {
    let may_keep_its_length = |of: &&Undeclared| {
        // It has no name, or the next value has the same one, so that it would stay without elements.
        of.state.empty_axes().any(|axis| {
            let name = of.info.symbol(axis);
            name.is_empty() || of.next.and_then(|next| next.symbols.get(axis)).is_some_and(|next| next == name)
        })
    };
    let states: Vec<_> = states.iter().filter(may_keep_its_length).collect();
    if states.is_empty() {
        return None;
    }
    let with_batch = |of: &&Undeclared| match (of.state.batch_axis, &*open_axes(&of.state.dims, None)) {
        (None, &[axis]) => Some(state_dims(of.info, &of.state.dims, Some(axis))),
        _ => None,
    };
    let batched: Vec<StateDims> = states.iter().filter_map(with_batch).collect();
    let or_batch = if batched.is_empty() {
        String::new()
    } else {
        format!("; if that dimension is the batch, write {}", state_dims_line(batched))
    };
    let described: Vec<_> = states.iter().map(|of| at_start(&of.info.name, of.state)).collect();
    let dims = |of: &&Undeclared| state_dims(of.info, &of.state.dims, of.state.batch_axis);
    Some(format!(
        "sequences start with states that have no elements: {}; if such a state always has the same length, write it, in \
         the place of -1 in {}{or_batch}",
        described.join(", "),
        state_dims_line(states.iter().map(dims))
    ))
}

/// Warns of states whose batch has another name than that of requests, or none: it may be a dimension that varies.
fn other_names(states: &[Undeclared], batch_symbol: Option<&str>) -> Option<String> {
    let batch_symbol = batch_symbol?;
    let is_doubtful = |of: &&Undeclared| {
        let symbol = of.state.batch_axis.map(|axis| of.info.symbol(axis));
        symbol.is_some_and(|symbol| {
            symbol.is_empty() || (!is_batch(symbol, Some(batch_symbol)) && !is_batch(symbol, None))
        })
    };
    let states: Vec<_> = states.iter().filter(is_doubtful).collect();
    let first = states.first()?;
    let axis = first.state.batch_axis?;
    let line = |with_batch: bool| {
        let batch_axis = |of: &Undeclared| of.state.batch_axis.filter(|_| with_batch);
        state_dims_line(states.iter().map(|of| state_dims(of.info, &of.info.dims, batch_axis(of))))
    };
    let its_name = match first.info.symbol(axis) {
        "" => "it has no name of its own".to_owned(),
        symbol => format!("its name is '{symbol}'"),
    };
    let (name, batched, varying) = (&first.info.name, line(true), line(false));
    Some(format!(
        "dimension {axis} of '{name}' is taken for the batch, though {its_name} and that of the batch of requests is \
         '{batch_symbol}': if that is right, write {batched}; if such dimensions vary, write {varying}"
    ))
}
