//! The conversion: bytes of a model in, bytes of a model with states out.

use std::collections::HashSet;
use std::num::NonZeroUsize;

use bytes::Bytes;

use crate::analysis::{Analysis, Obstacle, analyse, attempt};
use crate::batch::{self, BatchError, Opened, is_batch_name};
use crate::cut::lengths::{keeps_each, passes_lengths_on};
use crate::cut::{NewState, Start, cut, starts};
use crate::graph::{InputAxis, producers, prune, required_inputs, sort};
use crate::names::{StatePair, alike, check_pairs, describe, described_state_pairs, like_states};
use crate::onnx::operators::SCALES_AT_RUN_TIME;
use crate::onnx::schema::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use crate::onnx::{self, Dim, ReadError, external_files, is_integer, opset};
use crate::prepared::{ConvertError, Prepared, in_order};
use crate::report::{
    INITIAL_STATES, InitialState, Report, Role, STEPS_MULTIPLE, StartsAt, State, StepInput, StepOutput, StepsMultiple,
    Warning,
};
use crate::rows::{fixed_batch, name_batch, name_batch_of_states, two_batches};
use crate::time::{Hint, Place, refuse};

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The axes of the inputs that have the steps. Without them, the axes that lead to a recurrence are taken.
    pub time: Vec<InputAxis>,
    /// States that the model has already.
    pub states: Vec<StatePair>,
    pub keep_recurrences: bool,
    pub open_batch: bool,
    /// The axes of the inputs that are the batch. Without them, those are taken that can be opened.
    pub batch: Vec<InputAxis>,
}

#[derive(Clone, Debug)]
pub struct Converted {
    /// The model with states. Its graph's description names the pairs.
    pub model: Vec<u8>,
    /// What the converted model is compared with, if ONNX Runtime can't run the original: the same model in a form that
    /// it runs.
    pub original: Option<Vec<u8>>,
    /// A model that computes where states start, if that isn't zero: what `initial_state_model` takes.
    pub initial_states: Option<Vec<u8>>,
    pub weights: Vec<String>,
    pub report: Report,
}

impl Converted {
    /// Lets the states start at zero in place of learned or constant values. Padding of convolutions and pooling keeps
    /// its value. Compare the models first, because this changes the answers.
    pub fn starting_at_zero(mut self) -> Result<Self, ReadError> {
        self.initial_states = None;
        for state in self.report.states.iter_mut().filter(|state| state.starts_at == StartsAt::Model) {
            state.starts_at = StartsAt::Zero;
        }
        self.report.warnings.retain(|warning| !matches!(warning, Warning::StartAtConstants(_)));
        let mut model = onnx::read(self.model.into())?;
        note_initial_states(&mut model, &self.report);
        self.model = onnx::write(&model);
        Ok(self)
    }
}

pub fn convert(bytes: Bytes, options: &Options) -> Result<Converted, ConvertError> {
    convert_read(onnx::read(bytes)?, options)
}

/// Converts a model that is already read, so that its weights need not be written and read again.
pub fn convert_read(model: ModelProto, options: &Options) -> Result<Converted, ConvertError> {
    let Prepared { model, graph, had_batch_in_front } = in_order(model)?;
    // ONNX Runtime refuses the original, so the comparison needs a form of it that runs.
    let original = had_batch_in_front.then(|| onnx::write(&with_graph(&model, graph.clone())));
    let opset = opset(&model);
    let described = described_state_pairs(graph.doc_string()).map_err(ConvertError::Description)?;
    // Pairs that the caller names replace those of the description, which an exporter may have got wrong.
    let pairs = if options.states.is_empty() { described.clone() } else { options.states.clone() };
    check_pairs(&graph, &pairs).map_err(ConvertError::Option)?;
    let mut opened = if options.open_batch {
        batch::open(&graph, opset, &pairs, &options.time, &options.batch)?
    } else {
        Opened { graph, ..Opened::default() }
    };
    let (mut analysis, uncut) = analysed(&opened.graph, opset, &pairs, options)?;
    check_time(&opened.graph, &analysis, options)?;
    // After the analysis, which must see the names that the model has.
    let batch_was = name_batch(&mut opened.graph, &mut analysis);
    name_batch_of_states(&mut opened.graph, opset, &analysis, &pairs);
    let made = cut(&opened.graph, opset, &analysis);
    let (mut cut_graph, states) = made.map_err(|refusal| ConvertError::Refused(refusal.into()))?;
    let initial = starts(&opened.graph, &states).map(|graph| with_graph(&model, graph));
    let mut report =
        report(&opened.graph, &analysis, kept_states(&cut_graph, &pairs, &initial_states_of(&model)), &states);
    if report.states.is_empty() && !options.keep_recurrences {
        let along = |axis: &InputAxis| format!("along {axis} nothing needs earlier steps");
        let stopped = analysis.time.iter().map(along).collect();
        return Err(ConvertError::Nothing { alike: Vec::new(), like_states: Vec::new(), stopped });
    }
    report.batch_was = batch_was;
    // A batch that was just opened is fixed no more.
    let fixed = fixed_batch(&opened.graph, &analysis).filter(|_| opened.axes.is_empty());
    report.warnings.extend(fixed.map(|warning| unless_closed(warning, &opened.graph, opset, &pairs, options)));
    report.warnings.extend(opened.others.map(|others| two_batches(&opened.axes, &others)));
    report.warnings.extend(uncut);
    report.opened = opened.axes;
    // The edits append nodes, and ONNX wants each behind those that it reads from.
    sort(&mut cut_graph);
    prune(&mut cut_graph);
    relax(&mut cut_graph, &analysis);
    describe(&mut cut_graph, &described, report.states.iter().map(|state| &state.pair));
    let mut converted = with_graph(&model, cut_graph);
    note_multiple(&mut converted, &report);
    note_initial_states(&mut converted, &report);
    Ok(Converted {
        model: onnx::write(&converted),
        original,
        initial_states: initial.map(|model| onnx::write(&model)),
        weights: external_files(&converted),
        report,
    })
}

/// Adds what is in the way, if the batch of 1 can't be opened. The advice to open it would lead nowhere.
fn unless_closed(warning: Warning, graph: &GraphProto, opset: i64, pairs: &[StatePair], options: &Options) -> Warning {
    let Warning::FixedBatch { axis, rows: 1 } = &warning else { return warning };
    match batch::open(graph, opset, pairs, &options.time, &[]) {
        Err(BatchError::Refused(refusals)) => Warning::ClosedBatch { axis: axis.clone(), refusal: refusals.first },
        _ => warning,
    }
}

/// Follows the steps. If that is neither possible nor needed, the recurrences inside the model stay as they are, with a
/// warning.
fn analysed(
    graph: &GraphProto,
    opset: i64,
    pairs: &[StatePair],
    options: &Options,
) -> Result<(Analysis, Option<Warning>), ConvertError> {
    let without_time = || attempt(graph, opset, Vec::new(), &[]).0;
    if options.keep_recurrences {
        return Ok((without_time(), None));
    }
    let states: Vec<String> = pairs.iter().map(|pair| pair.input.clone()).collect();
    // A model with pairs can be served although nothing is cut. A model without any state can't.
    let is_done_without = options.time.is_empty() && !pairs.is_empty();
    match analyse(graph, opset, &options.time, &states) {
        Ok(mut analysis) => {
            let uncut = analysis.uncut.take();
            Ok((analysis, uncut))
        }
        Err(Obstacle::Nothing { .. }) if is_done_without => Ok((without_time(), None)),
        Err(Obstacle::Refused { refusals, without_state: nodes, goes_on }) if is_done_without => {
            let warning = if nodes.is_empty() {
                goes_on.then_some(Warning::OfRequests(refusals))
            } else {
                Some(Warning::Uncut { nodes, refusals, time: Vec::new() })
            };
            Ok((without_time(), warning))
        }
        Err(Obstacle::Refused { refusals, .. }) => Err(ConvertError::Refused(refusals)),
        Err(Obstacle::Nothing { stopped, may_be_one_step }) => {
            let like_states = if may_be_one_step { like_states(graph) } else { Vec::new() };
            Err(ConvertError::Nothing { alike: alike(graph), like_states, stopped })
        }
        Err(Obstacle::Unknown(why)) => Err(ConvertError::Option(why)),
    }
}

fn with_graph(model: &ModelProto, graph: GraphProto) -> ModelProto {
    ModelProto { graph: Some(graph), ..model.clone() }
}

/// Refuses steps that were found in a dimension which the model names the batch: either the name is wrong, or a layer
/// gets the batch where it takes the steps.
fn check_time(graph: &GraphProto, analysis: &Analysis, options: &Options) -> Result<(), ConvertError> {
    let Some(InputAxis { input, axis }) = analysis.time.first().filter(|_| options.time.is_empty()) else {
        return Ok(());
    };
    // Only axes that were found get here: there is no doubt about one that the caller names.
    let value = required_inputs(graph).find(|value| value.name() == input);
    let dims = value.and_then(ValueInfoProto::dims).unwrap_or_default();
    let is_batch =
        |(other, dim): (usize, &Dim)| other != *axis && matches!(dim, Dim::Symbol(name) if is_batch_name(name));
    // In [B, 1, n], n is the steps, although it is a usual name of the batch.
    if !is_batch_name(&analysis.symbol) || dims.iter().enumerate().any(is_batch) {
        return Ok(());
    }
    let reads = |node: &&NodeProto| node.is_recurrent() && node.input.first() == Some(input);
    let node = graph.node.iter().find(reads).cloned().unwrap_or_else(|| NodeProto::make("input", input, &[], &[]));
    let why = format!("runs along axis {axis} of '{input}', which the model names '{}'", analysis.symbol);
    let help = format!(
        "if that is the batch, export the model with a transpose in front of the layer (batch_first); if it is the steps, \
         name {input}@{axis}"
    );
    Err(ConvertError::Refused(refuse(&node, why, &help).with_hint(Hint::Time).into()))
}

fn kept_states(graph: &GraphProto, pairs: &[StatePair], initial: &[InitialState]) -> Vec<State> {
    let state = |pair: &StatePair| {
        let input = graph.input.iter().find(|input| input.name() == pair.input)?;
        let (elem, dims) = (input.elem(), input.dims().unwrap_or_default());
        let known = initial.iter().find(|known| known.state == pair.input);
        let value = known.and_then(|known| known.value.as_ref()?.parse().ok());
        let starts_at = value.map_or(StartsAt::Unchanged, StartsAt::Value);
        Some(State::new(pair.clone(), elem, &dims, starts_at, "", ""))
    };
    pairs.iter().filter_map(state).collect()
}

fn report(graph: &GraphProto, analysis: &Analysis, kept: Vec<State>, made: &[NewState]) -> Report {
    let made_states = made.iter().map(|state| {
        let starts = match state.start {
            Start::Fill(0.0) => StartsAt::Zero,
            Start::Fill(value) => StartsAt::Value(value),
            Start::Tensor(_) => StartsAt::Model,
        };
        let pair = StatePair::new(&state.input, &state.output);
        State::new(pair, state.elem, &state.dims, starts, &state.node, &state.operator)
    });
    let states: Vec<State> = kept.into_iter().chain(made_states).collect();
    let own: Vec<&str> = states.iter().map(|state| state.pair.input.as_str()).collect();
    let inputs = required_inputs(graph).filter(|input| !own.contains(&input.name()));
    let input = |input: &ValueInfoProto| StepInput {
        name: input.name().to_owned(),
        elem: input.elem(),
        dims: input.dims().unwrap_or_default(),
        role: match analysis.time.iter().find(|seed| seed.input == input.name()) {
            Some(seed) => Role::Steps { axis: seed.axis },
            None if is_lengths(graph, input) => Role::Lengths,
            None => Role::Other,
        },
    };
    let ends: Vec<&str> = states.iter().map(|state| state.pair.output.as_str()).collect();
    let output = |output: &ValueInfoProto| StepOutput {
        name: output.name().to_owned(),
        elem: output.elem(),
        dims: analysis.output_dims(output).or_else(|| output.dims()).unwrap_or_default(),
        axis: analysis.found.places.get(output.name()).and_then(Place::layout).map(|layout| layout.axis),
    };
    let mut warnings = Vec::new();
    let mut constant: Vec<String> =
        made.iter().filter(|state| state.starts_at_constant).map(|state| state.node.clone()).collect();
    // An LSTM has two states and is named once.
    constant.dedup();
    if !constant.is_empty() {
        warnings.push(Warning::StartAtConstants(constant));
    }
    if !analysis.found.quantized.is_empty() {
        warnings.push(Warning::Quantizes(analysis.found.quantized.clone()));
    }
    if analysis.found.multiple > 1 {
        warnings.push(Warning::StepsMultiple(analysis.found.multiple));
    }
    Report {
        time: analysis.time.clone(),
        inputs: inputs.map(input).collect(),
        outputs: graph.output.iter().filter(|output| !ends.contains(&output.name())).map(output).collect(),
        states,
        opened: Vec::new(),
        batch_was: None,
        steps_multiple: analysis.found.multiple,
        // Without steps to follow, no rule has noted the nodes.
        quantizes: !analysis.found.quantized.is_empty() || analysis.time.is_empty() && !scales_of_all(graph).is_empty(),
        warnings,
    }
}

/// The nodes that take one quantization scale over all that they get.
pub fn scales_of_all(graph: &GraphProto) -> Vec<String> {
    let mut found = Vec::new();
    for node in &graph.node {
        if SCALES_AT_RUN_TIME.contains(&node.op()) {
            found.push(node.described());
        }
        found.extend(node.graphs().flat_map(scales_of_all));
    }
    found
}

fn is_lengths(graph: &GraphProto, input: &ValueInfoProto) -> bool {
    // A FLOAT input may be a part of the steps, such as 0.5, and no length.
    let is_integer = is_integer(input.elem());
    let lens = graph.node.iter().filter(|node| node.is_recurrent());
    let mut names: Vec<String> = lens.filter_map(|node| node.input_at(4).map(str::to_owned)).collect();
    // Exporters cast, sort and gather lengths before a layer takes them.
    let producers = producers(graph);
    // Graphs with very many paths to one tensor would be followed again and again.
    let mut seen = HashSet::new();
    while let Some(name) = names.pop() {
        if name == input.name() {
            return true;
        }
        if !seen.insert(name.clone()) {
            continue;
        }
        let node = producers.get(name.as_str()).map(|&index| &graph.node[index]);
        match node {
            Some(node) if keeps_each(node) || matches!(node.op(), "Gather" | "TopK") => {
                names.extend(node.input.first().cloned());
            }
            Some(node) if is_integer && passes_lengths_on(node) => names.extend(node.input.iter().cloned()),
            _ => {}
        }
    }
    false
}

/// Opens the time axis of inputs and outputs, and forgets the shapes of what lies between where they were fixed.
fn relax(graph: &mut GraphProto, analysis: &Analysis) {
    for seed in &analysis.time {
        let Some(input) = graph.input.iter_mut().find(|input| input.name() == seed.input) else { continue };
        let Some(mut dims) = input.dims() else { continue };
        if !matches!(dims[seed.axis], Dim::Symbol(_)) {
            dims[seed.axis] = Dim::Symbol(analysis.symbol.clone());
            input.set_dims(&dims);
        }
    }
    for output in &mut graph.output {
        let place = analysis.found.places.get(output.name());
        // Exporters write a fixed length into outputs even where the input is open.
        if let (Some(Place::At(_)), Some(dims)) = (place, analysis.dims(output.name())) {
            output.set_dims(&dims);
        }
    }
    // The shapes of tensors without steps are still right.
    graph.value_info.retain(|value| !matches!(analysis.found.places.get(value.name()), None | Some(Place::At(_))));
}

/// Notes in the model's metadata which multiple of steps a request must have, if there are strides over time.
fn note_multiple(model: &mut ModelProto, report: &Report) {
    let multiple = usize::try_from(report.steps_multiple).ok().and_then(NonZeroUsize::new);
    let Some(multiple) = multiple.filter(|multiple| multiple.get() > 1) else { return };
    let of_axis = |axis: &InputAxis| StepsMultiple { input: axis.input.clone(), axis: axis.axis, multiple };
    let all: Vec<StepsMultiple> = report.time.iter().map(of_axis).collect();
    model.set_metadata(STEPS_MULTIPLE, Some(serde_json::json!(all).to_string()));
}

pub fn initial_states_of(model: &ModelProto) -> Vec<InitialState> {
    model.metadata(INITIAL_STATES).and_then(|value| serde_json::from_str(value).ok()).unwrap_or_default()
}

pub fn set_initial_states(model: &mut ModelProto, states: &[InitialState]) {
    model.set_metadata(INITIAL_STATES, (!states.is_empty()).then(|| serde_json::json!(states).to_string()));
}

/// Notes in the model's metadata which states don't start at zero. Entries of states that the model had stay.
fn note_initial_states(model: &mut ModelProto, report: &Report) {
    let mut old = initial_states_of(model);
    let initial = |state: &State| {
        let value = match state.starts_at {
            StartsAt::Zero => return None,
            StartsAt::Unchanged => {
                let index = old.iter().position(|old| old.state == state.pair.input)?;
                return Some(old.swap_remove(index));
            }
            StartsAt::Value(value) => Some(value.to_string()),
            StartsAt::Model => None,
        };
        Some(InitialState { state: state.pair.input.clone(), value })
    };
    let made: Vec<InitialState> = report.states.iter().filter_map(initial).collect();
    // An earlier conversion may have noted states that start elsewhere now.
    set_initial_states(model, &made);
}
