//! The conversion: bytes of a model in, bytes of a model with states out.

use std::collections::HashSet;
use std::num::NonZeroUsize;

use bytes::Bytes;

use crate::analysis::{Analysis, InputAxis, Obstacle, Uncut, analyse};
use crate::batch::{self, BatchError, Opened, is_batch_name};
use crate::cut::{CutGraph, Start, cut, starts};
use crate::graph::{Names, is_recurrent, prune, required_inputs, sort};
use crate::layout::put_time_in_front;
use crate::lengths::{keeps_each, passes_lengths_on};
use crate::onnx::schema::{GraphProto, ModelProto, NodeProto, StringStringEntryProto, ValueInfoProto};
use crate::onnx::{self, DataType, Dim, ReadError, external_files, function_like_operator, opset};
use crate::report::{
    Pair, Report, Role, STEPS_MULTIPLE, StartsAt, State, StepInput, StepOutput, StepsMultiple, Warning,
};
use crate::time::{Cut, Hint, Place, Refusal, Refusals};

/// What a conversion may be told.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The axes of the inputs that have the steps. Without them, the axes that lead to a recurrence are taken.
    pub time: Vec<InputAxis>,
    /// Inputs and outputs of the model that are the two ends of a state already.
    pub states: Vec<Pair>,
    /// Give no states to recurrences inside the model.
    pub keep_recurrences: bool,
    /// Open the batch dimension, which the model fixes to 1.
    pub open_batch: bool,
    /// The axes of the inputs that are the batch. Without them, those are taken that can be opened.
    pub batch: Vec<InputAxis>,
}

/// A converted model.
#[derive(Clone, Debug)]
pub struct Converted {
    /// The model with states. Its graph's description names the pairs.
    pub model: Vec<u8>,
    /// The original as ONNX Runtime can run it, if it can't run the original: what the converted model is compared with.
    pub original: Option<Vec<u8>>,
    /// A model that computes where states start, if that isn't zero: what `initial_state_model` takes.
    pub initial_states: Option<Vec<u8>>,
    /// The files that hold weights of the model, relative to its folder.
    pub weights: Vec<String>,
    /// What was done.
    pub report: Report,
}

impl Converted {
    /// The same model, whose states start at zero in place of learned or constant values. Padding of convolutions and
    /// pooling keeps its value. Compare the models before, because this changes their answers.
    pub fn starting_at_zero(mut self) -> Self {
        self.initial_states = None;
        for state in self.report.states.iter_mut().filter(|state| state.starts_at == StartsAt::Model) {
            state.starts_at = StartsAt::Zero;
        }
        self.report.warnings.retain(|warning| !matches!(warning, Warning::StartAtConstants(_)));
        self
    }
}

/// Why a model isn't converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// Not a model.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Nodes need more than the steps so far.
    #[error("{0}")]
    Refused(Refusals),
    /// A function has the name and the domain of an operator.
    #[error(
        "the model has a function '{0}' with the name and the domain of an operator, so it isn't known what its nodes do; \
         inline the functions, as onnx.inliner does"
    )]
    Function(String),
    /// The batch can't be opened.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// No recurrence was found. `alike` are inputs and outputs that may be the two ends of a state, and `stopped` says of
    /// each axis what is in the way.
    #[error("{}", nothing(alike, stopped))]
    #[expect(missing_docs, reason = "the text says it")]
    Nothing { alike: Vec<Pair>, stopped: Vec<String> },
    /// The graph's description names states in another form than the backend reads.
    #[error("{0}")]
    Description(String),
    /// An option names something that isn't there.
    #[error("{0}")]
    Option(String),
}

impl ConvertError {
    /// What the caller could say that would help.
    pub fn hints(&self) -> Vec<Hint> {
        match self {
            Self::Nothing { .. } => vec![Hint::States, Hint::Time],
            Self::Refused(refusals) => {
                let hinted = |hint: &Hint| refusals.iter().any(|refusal| refusal.hint == Some(*hint));
                [Hint::States, Hint::Time].into_iter().filter(hinted).collect()
            }
            Self::Read(_) | Self::Function(_) | Self::Batch(_) | Self::Description(_) | Self::Option(_) => Vec::new(),
        }
    }
}

fn nothing(alike: &[Pair], stopped: &[String]) -> String {
    let mut text = String::new();
    if !alike.is_empty() {
        let pairs: Vec<String> = alike.iter().map(Pair::to_string).collect();
        text += &format!("by their types and dims, {} may be states that the model has; else, ", pairs.join(" "));
    }
    text += "no axis of the inputs leads to a recurrence or a causal convolution";
    for line in stopped {
        text += &format!("\n  {line}");
    }
    text
}

/// Converts a model.
pub fn convert(bytes: Bytes, options: &Options) -> Result<Converted, ConvertError> {
    let Prepared { model, graph, was_laid_out } = prepared(bytes)?;
    let original = was_laid_out.then(|| onnx::write(&with_graph(&model, graph.clone())));
    let opset = opset(&model);
    let described = described_pairs(graph.doc_string())?;
    let pairs = if options.states.is_empty() { described.clone() } else { options.states.clone() };
    check_pairs(&graph, &pairs)?;
    let mut opened = if options.open_batch {
        batch::open(&graph, opset, &pairs, &options.time, &options.batch)?
    } else {
        Opened::unchanged(graph)
    };
    let (mut analysis, uncut) = analysed(&opened.graph, opset, &pairs, options)?;
    check_time(&opened.graph, &analysis, options)?;
    let batch_was = name_batch(&mut opened.graph, &mut analysis);
    let made = cut(&opened.graph, opset, &analysis).map_err(|refusal| ConvertError::Refused(refusal.into()))?;
    let initial = starts(&made).map(|graph| with_graph(&model, graph));
    let CutGraph { graph: mut cut_graph, states, .. } = made;
    let mut report = report(&opened.graph, &analysis, kept_states(&cut_graph, &pairs), &states);
    if report.states.is_empty() && !options.keep_recurrences {
        let along = |axis: &InputAxis| format!("along {axis} nothing needs earlier steps");
        return Err(ConvertError::Nothing { alike: Vec::new(), stopped: analysis.time.iter().map(along).collect() });
    }
    report.batch_was = batch_was;
    report.warnings.extend(fixed_batch(&opened, &analysis));
    report.warnings.extend(opened.others.map(|others| two_batches(&opened.axes, &others)));
    report.warnings.extend(uncut);
    report.opened = opened.axes;
    sort(&mut cut_graph);
    prune(&mut cut_graph);
    relax(&mut cut_graph, &analysis);
    describe(&mut cut_graph, &described, &report);
    let mut converted = with_graph(&model, cut_graph);
    note_multiple(&mut converted, &report);
    Ok(Converted {
        model: onnx::write(&converted),
        original,
        initial_states: initial.map(|model| onnx::write(&model)),
        weights: external_files(&converted),
        report,
    })
}

/// A model whose nodes stand behind those that they read, in the graph and in those inside it.
pub struct Prepared {
    /// Without its graph.
    pub model: ModelProto,
    pub graph: GraphProto,
    /// Layers had the batch in front.
    pub was_laid_out: bool,
}

/// Reads a model.
pub fn prepared(bytes: Bytes) -> Result<Prepared, ConvertError> {
    let mut model = onnx::read(bytes)?;
    if let Some(name) = function_like_operator(&model) {
        return Err(ConvertError::Function(name.to_owned()));
    }
    let mut graph = model.graph.take().unwrap_or_default();
    let was_laid_out = put_time_in_front(&mut graph);
    sort_all(&mut graph)?;
    Ok(Prepared { model, graph, was_laid_out })
}

/// Sorts a graph and those inside it. Refuses nodes that wait for each other, and two that make one tensor.
fn sort_all(graph: &mut GraphProto) -> Result<(), ConvertError> {
    let refused = |node: &NodeProto, why: String| {
        let refusal = crate::time::refuse(node, why, "check the model with ONNX's checker");
        Err(ConvertError::Refused(refusal.into()))
    };
    let mut made = HashSet::new();
    for node in &graph.node {
        if let Some(twice) = node.named_outputs().find(|name| !made.insert(*name)) {
            return refused(node, format!("makes '{twice}', which another node makes too"));
        }
    }
    if let Some(node) = crate::graph::in_a_circle(graph) {
        return refused(node, "waits for its own output, or for a node that does".to_owned());
    }
    sort(graph);
    let attributes = graph.node.iter_mut().flat_map(|node| &mut node.attribute);
    attributes.flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs)).try_for_each(sort_all)
}

/// Follows the steps. Where that isn't possible and isn't needed either, the recurrences inside the model stay as they
/// are, with a warning.
fn analysed(
    graph: &GraphProto,
    opset: i64,
    pairs: &[Pair],
    options: &Options,
) -> Result<(Analysis, Option<Warning>), ConvertError> {
    let without_time = || Analysis::without_time(graph, opset);
    if options.keep_recurrences {
        return Ok((without_time(), None));
    }
    let states: Vec<String> = pairs.iter().map(|pair| pair.input.clone()).collect();
    // What the user asked for may be done although nothing is to be cut. A model without any state can't be served.
    let is_done_without = options.time.is_empty() && !pairs.is_empty();
    match analyse(graph, opset, &options.time, &states) {
        Ok(mut analysis) => {
            let uncut = analysis.uncut.take();
            let time = analysis.time.clone();
            let uncut = uncut.map(|Uncut { nodes, refusals }| Warning::Uncut { nodes, refusals, time });
            Ok((analysis, uncut))
        }
        Err(Obstacle::Nothing(_)) if is_done_without => Ok((without_time(), None)),
        Err(Obstacle::Refused { refusals, without_state: nodes }) if is_done_without => {
            let uncut = (!nodes.is_empty()).then_some(Warning::Uncut { nodes, refusals, time: Vec::new() });
            Ok((without_time(), uncut))
        }
        Err(Obstacle::Refused { refusals, .. }) => Err(ConvertError::Refused(refusals)),
        Err(Obstacle::Nothing(stopped)) => Err(ConvertError::Nothing { alike: alike(graph), stopped }),
        Err(Obstacle::Unknown(why)) => Err(ConvertError::Option(why)),
    }
}

/// Inputs and outputs of one type and shape, where only one of each has it.
fn alike(graph: &GraphProto) -> Vec<Pair> {
    let is_alike =
        |a: &ValueInfoProto, b: &ValueInfoProto| a.elem() == b.elem() && a.dims().is_some() && a.dims() == b.dims();
    let only = |of: &ValueInfoProto, values: &[ValueInfoProto]| {
        let mut found = values.iter().filter(|value| is_alike(value, of)).map(|value| value.name().to_owned());
        found.next().filter(|_| found.next().is_none())
    };
    let pair = |input: &ValueInfoProto| {
        only(input, &graph.input)?;
        Some(Pair { input: input.name().to_owned(), output: only(input, &graph.output)? })
    };
    let found: Vec<Pair> = required_inputs(graph).filter_map(pair).collect();
    // Requests must carry something.
    if found.len() < required_inputs(graph).count() { found } else { Vec::new() }
}

/// The warning where two dimensions of an input could be the batch.
fn two_batches(opened: &[InputAxis], others: &[InputAxis]) -> Warning {
    let listed = |axes: &[InputAxis], beside: &[InputAxis]| {
        let differ = axes.iter().filter(|axis| !beside.contains(axis));
        differ.map(|InputAxis { input, axis }| format!("{input}@{axis}")).collect::<Vec<_>>().join(",")
    };
    Warning::TwoBatches { taken: listed(opened, others), other: listed(others, opened) }
}

fn with_graph(model: &ModelProto, graph: GraphProto) -> ModelProto {
    ModelProto { graph: Some(graph), ..model.clone() }
}

/// The pairs that a graph's description names, in the lines that the backend reads.
fn described_pairs(description: &str) -> Result<Vec<Pair>, ConvertError> {
    let mut described = Vec::new();
    for line in description.lines() {
        for (input, output) in [("InputState", "OutputState"), ("PastValueInput", "PastValueOutput")] {
            let (Some(input), Some(output)) = (line.find(input), line.find(output)) else { continue };
            let Some(groups) = line.find("<<<").and_then(|from| line.get(from..line.rfind(">>>")? + 3)) else {
                continue;
            };
            let form =
                || format!("the graph's description names states as '{groups}': '<<<input, output>>>' is expected");
            let swap = |pair: Pair| if input < output { pair } else { Pair { input: pair.output, output: pair.input } };
            described.extend(pairs(groups).ok_or_else(|| ConvertError::Description(form()))?.into_iter().map(swap));
        }
    }
    Ok(described)
}

/// Reads pairs in the form of the backend's `state_pairs`: `<<<input, output>>>`, separated by spaces, commas or
/// nothing. `None` if the text is anything else, or a name is in two pairs.
pub fn pairs(text: &str) -> Option<Vec<Pair>> {
    let mut found: Vec<Pair> = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (pair, behind) = rest.strip_prefix("<<<")?.split_once(">>>")?;
        let (input, output) = pair.split_once(',')?;
        let (input, output) = (input.trim(), output.trim());
        let is_known = found.iter().any(|known| known.input == input || known.output == output);
        if is_known || input.is_empty() || output.is_empty() || output.contains(',') || pair.contains('<') {
            return None;
        }
        found.push(Pair { input: input.to_owned(), output: output.to_owned() });
        rest = behind.trim_start_matches([' ', ',', '\t', '\n']);
    }
    (!found.is_empty()).then_some(found)
}

fn check_pairs(graph: &GraphProto, pairs: &[Pair]) -> Result<(), ConvertError> {
    let find = |values: &[ValueInfoProto], name: &str, kind: &str| {
        let found = values.iter().find(|value| value.name() == name).cloned();
        found.ok_or_else(|| {
            let names: Vec<&str> = values.iter().map(ValueInfoProto::name).collect();
            ConvertError::Option(format!("the model has no {kind} '{name}' (it has {})", names.join(", ")))
        })
    };
    for pair in pairs {
        let (input, output) = (find(&graph.input, &pair.input, "input")?, find(&graph.output, &pair.output, "output")?);
        let agree = |a: &Dim, b: &Dim| !matches!((a, b), (Dim::Known(a), Dim::Known(b)) if a != b);
        let same_dims = match (input.dims(), output.dims()) {
            (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| agree(a, b)),
            _ => true,
        };
        if input.elem() != output.elem() || !same_dims {
            let shape = |value: &ValueInfoProto| {
                format!("{} {}", onnx::type_name(value.elem()), onnx::bracketed(&value.dims().unwrap_or_default()))
            };
            return Err(ConvertError::Option(format!(
                "'{}' ({}) and '{}' ({}) can't be the two ends of a state: type and dims must agree",
                pair.input,
                shape(&input),
                pair.output,
                shape(&output)
            )));
        }
    }
    Ok(())
}

/// Refuses steps that were found in a dimension which the model names the batch: either the name is wrong, or a layer gets
/// the batch where it takes the steps.
fn check_time(graph: &GraphProto, analysis: &Analysis, options: &Options) -> Result<(), ConvertError> {
    let Some(InputAxis { input, axis }) = analysis.time.first().filter(|_| options.time.is_empty()) else {
        return Ok(());
    };
    if !is_batch_name(&analysis.symbol) {
        return Ok(());
    }
    let reads = |node: &&NodeProto| is_recurrent(node.op()) && node.input.first() == Some(input);
    let node = graph.node.iter().find(reads).cloned().unwrap_or_else(|| NodeProto::make("input", input, &[], &[]));
    let refusal = Refusal {
        node: node.label().to_owned(),
        operator: node.operator(),
        why: format!("runs along axis {axis} of '{input}', which the model names '{}'", analysis.symbol),
        help: format!(
            "if that is the batch, export the model with a transpose in front of the layer (batch_first); if it is \
               the steps, name {input}@{axis}"
        ),
        hint: Some(Hint::Time),
    };
    Err(ConvertError::Refused(refusal.into()))
}

/// Gives the batch its usual name, by which the backend knows it, and answers its name before. An exporter may have numbered
/// it, as in `s77`. Where an output has no such dimension, it may be something else, and keeps its name.
fn name_batch(graph: &mut GraphProto, analysis: &mut Analysis) -> Option<String> {
    if is_batch_name(&analysis.symbol) {
        // The caller says that the model's name is wrong.
        let wrong = Dim::Symbol(std::mem::take(&mut analysis.symbol));
        let values = graph.input.iter().chain(&graph.output).chain(&graph.value_info);
        analysis.symbol = Names::of_dimensions(values).fresh("steps");
        let steps = Dim::Symbol(analysis.symbol.clone());
        for value in graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info) {
            name_dims(value, &steps, |_, dim| *dim == wrong);
        }
    }
    let usual = Dim::Symbol(batch::SYMBOL.to_owned());
    let old = analysis.batch.clone().map(Dim::Symbol).filter(|_| !analysis.time.is_empty())?;
    let dims_of = |value: &ValueInfoProto| value.dims().unwrap_or_default();
    let is_other_batch = |dim: &Dim| *dim != old && matches!(dim, Dim::Symbol(name) if is_batch_name(name));
    let is_taken = old != usual && graph.input.iter().any(|input| dims_of(input).iter().any(is_other_batch));
    let of_outputs: Option<Vec<Vec<Dim>>> = graph.output.iter().map(|output| analysis.dims(output.name())).collect();
    let count = |dims: &Vec<Dim>| dims.iter().filter(|&dim| *dim == old).count();
    let of_outputs = of_outputs.filter(|outputs| !is_taken && outputs.iter().all(|dims| count(dims) == 1))?;
    for input in &mut graph.input {
        let time = analysis.time.iter().find(|seed| seed.input == input.name()).map(|seed| seed.axis);
        // Beside the steps, the batch is the only open dimension.
        let is_unnamed = |axis: usize, dim: &Dim| *dim == Dim::Open && time.is_some_and(|time| time != axis);
        name_dims(input, &usual, |axis, dim| *dim == old || is_unnamed(axis, dim));
    }
    for (output, dims) in graph.output.iter_mut().zip(&of_outputs) {
        name_dims(output, &usual, |axis, _| dims.get(axis) == Some(&old));
    }
    for value in &mut graph.value_info {
        name_dims(value, &usual, |_, dim| *dim == old);
    }
    let was = analysis.batch.replace(batch::SYMBOL.to_owned());
    was.filter(|was| !is_batch_name(was))
}

/// The warning where a layer takes a fixed number of rows, so that sequences don't share runs.
fn fixed_batch(opened: &Opened, analysis: &Analysis) -> Option<Warning> {
    let seed = analysis.time.first().filter(|_| opened.axes.is_empty() && analysis.batch.is_none())?;
    let input = opened.graph.input.iter().find(|input| input.name() == seed.input)?;
    let dims = input.dims().filter(|dims| dims.len() > 2)?;
    let axis = usize::from(seed.axis == 0);
    let Dim::Known(rows) = dims[axis] else { return None };
    if rows > 1 {
        // Other axes may be merged into the rows of a layer.
        let layers = analysis.found.cuts.iter().filter(|cut| matches!(cut, Cut::Recurrent { .. }));
        let mut shapes = layers.filter_map(|cut| analysis.dims(opened.graph.node[cut.node()].input_at(0)?));
        shapes.find(|shape| shape.get(1) == Some(&Dim::Known(rows)))?;
    }
    Some(Warning::FixedBatch { axis: InputAxis { input: seed.input.clone(), axis }, rows })
}

/// Gives some dimensions another name.
fn name_dims(value: &mut ValueInfoProto, name: &Dim, is_named: impl Fn(usize, &Dim) -> bool) {
    let Some(dims) = value.dims() else { return };
    let new = |(axis, dim): (usize, &Dim)| if is_named(axis, dim) { name.clone() } else { dim.clone() };
    let named: Vec<Dim> = dims.iter().enumerate().map(new).collect();
    if named != dims {
        let elem = value.elem();
        value.set_tensor(elem, &named);
    }
}

/// The states that the model had.
fn kept_states(graph: &GraphProto, pairs: &[Pair]) -> Vec<State> {
    let state = |pair: &Pair| {
        let input = graph.input.iter().find(|input| input.name() == pair.input)?;
        let (elem, dims) = (input.elem(), input.dims().unwrap_or_default());
        Some(State::new(pair.clone(), elem, &dims, StartsAt::Unchanged, "", ""))
    };
    pairs.iter().filter_map(state).collect()
}

fn report(graph: &GraphProto, analysis: &Analysis, kept: Vec<State>, made: &[crate::cut::NewState]) -> Report {
    let mut states = kept;
    states.extend(made.iter().map(|state| {
        let starts = match state.start {
            Start::Fill(0.0) => StartsAt::Zero,
            Start::Fill(value) => StartsAt::Value(value),
            Start::Tensor(_) => StartsAt::Model,
        };
        let pair = Pair { input: state.input.clone(), output: state.output.clone() };
        State::new(pair, state.elem, &state.dims, starts, &state.node, &state.operator)
    }));
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
        dims: analysis.dims(output.name()).or_else(|| output.dims()).unwrap_or_default(),
        axis: match analysis.found.places.get(output.name()) {
            Some(Place::At(layout)) => Some(layout.axis),
            _ => None,
        },
    };
    let mut warnings = Vec::new();
    let mut constant: Vec<String> =
        made.iter().filter(|state| state.starts_at_constant).map(|state| state.node.clone()).collect();
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
        quantizes: !analysis.found.quantized.is_empty(),
        warnings,
    }
}

/// Whether an input is the lengths of a recurrent node's rows.
fn is_lengths(graph: &GraphProto, input: &ValueInfoProto) -> bool {
    // A FLOAT input may be a part of the steps, such as 0.5, and no length.
    let is_integer = [DataType::Int32, DataType::Int64].iter().any(|&elem| input.elem() == elem as i32);
    let lens = graph.node.iter().filter(|node| is_recurrent(node.op()));
    let mut names: Vec<String> = lens.filter_map(|node| node.input_at(4).map(str::to_owned)).collect();
    let producers = crate::graph::producers(graph);
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
        if dims[seed.axis] != Dim::Symbol(analysis.symbol.clone()) && !matches!(dims[seed.axis], Dim::Symbol(_)) {
            dims[seed.axis] = Dim::Symbol(analysis.symbol.clone());
            let elem = input.elem();
            input.set_tensor(elem, &dims);
        }
    }
    for output in &mut graph.output {
        let place = analysis.found.places.get(output.name());
        if let (Some(Place::At(_)), Some(dims)) = (place, analysis.dims(output.name())) {
            let elem = output.elem();
            output.set_tensor(elem, &dims);
        }
    }
    graph.value_info.retain(|value| !matches!(analysis.found.places.get(value.name()), None | Some(Place::At(_))));
}

/// Writes the pairs into the graph's description, where the backend finds them.
fn describe(graph: &mut GraphProto, described: &[Pair], report: &Report) {
    let new: Vec<String> = report
        .states
        .iter()
        .filter(|state| !described.contains(&state.pair))
        .map(|state| state.pair.to_string())
        .collect();
    if new.is_empty() {
        return;
    }
    let line = format!("InputState, OutputState: {}", new.join(" "));
    let own = graph.doc_string();
    graph.doc_string = Some(if own.is_empty() { line } else { format!("{own}\n{line}") });
}

/// Writes into the model's metadata which multiple the steps of a request must be, if strides over time want that.
fn note_multiple(model: &mut ModelProto, report: &Report) {
    let multiple = usize::try_from(report.steps_multiple).ok().and_then(NonZeroUsize::new);
    let Some(multiple) = multiple.filter(|multiple| multiple.get() > 1) else { return };
    let of_axis = |axis: &InputAxis| StepsMultiple { input: axis.input.clone(), axis: axis.axis, multiple };
    let all: Vec<StepsMultiple> = report.time.iter().map(of_axis).collect();
    let value = serde_json::json!(all).to_string();
    model.metadata_props.retain(|entry| entry.key() != STEPS_MULTIPLE);
    model.metadata_props.push(StringStringEntryProto { key: Some(STEPS_MULTIPLE.to_owned()), value: Some(value) });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(input: &str, output: &str) -> Pair {
        Pair { input: input.to_owned(), output: output.to_owned() }
    }

    #[test]
    fn pairs_are_read_as_the_backend_reads_them() {
        let two = Some(vec![pair("a", "b"), pair("c d", "e/f:0")]);
        for text in ["<<<a, b>>> <<<c d, e/f:0>>>", "<<<a,b>>>,<<<c d,e/f:0>>>", "  <<< a ,b>>><<<c d,e/f:0 >>>\n"] {
            assert_eq!(pairs(text), two, "{text}");
        }
        let wrong =
            ["", "a, b", "<<<a>>>", "<<<a,b>>", "<<<a,b,c>>>", "<<<,b>>>", "<<<a,b>>> x", "x <<<a,b>>>", "<<<<a,b>>>"];
        for text in wrong.into_iter().chain(["<<<a,b>>> <<<a,c>>>", "<<<a,b>>> <<<c,b>>>"]) {
            assert_eq!(pairs(text), None, "{text}");
        }
    }

    #[test]
    fn a_description_names_pairs_in_the_order_it_states() {
        let description = "for speech\nInputState, OutputState pairs: <<<a, b>>> <<<c, d>>> (two)\n\
                           PastValueOutput/PastValueInput <<<e_out, e_in>>>\nOutputState only <<<x, y>>>";
        let expected = [pair("a", "b"), pair("c", "d"), pair("e_in", "e_out")];
        assert_eq!(described_pairs(description).unwrap(), expected);
        assert_eq!(described_pairs("").unwrap(), []);
        let error = described_pairs("InputState OutputState <<<a>>>").unwrap_err().to_string();
        assert!(error.contains("'<<<a>>>'") && error.contains("<<<input, output>>>"), "{error}");
    }
}
