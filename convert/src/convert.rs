//! The conversion: bytes of a model in, bytes of a model with states out.

use bytes::Bytes;

use crate::analysis::{Analysis, InputAxis, Obstacle, analyse};
use crate::batch;
use crate::cut::{CutGraph, Start, cut, starts};
use crate::graph::{prune, required_inputs, sort};
use crate::onnx::schema::{GraphProto, ModelProto, ValueInfoProto};
use crate::onnx::{self, Dim, ReadError, external_files, opset};
use crate::report::{Pair, Report, Role, StartsAt, State, StepInput, StepOutput};
use crate::time::{Place, Refusal};

const CONSTANT_STARTS: &str = "start at constants that aren't zero";

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
    /// A model that computes where states start, if that isn't zero: what `initial_state_model` takes.
    pub initial_states: Option<Vec<u8>>,
    /// The files that hold weights of the model, relative to its folder.
    pub weights: Vec<String>,
    /// What was done.
    pub report: Report,
}

impl Converted {
    /// The same model, whose states start at zero, whatever the original starts at. Compare the models before, because
    /// this changes their answers.
    pub fn starting_at_zero(mut self) -> Self {
        self.initial_states = None;
        for state in self.report.states.iter_mut().filter(|state| state.starts_at == StartsAt::Model) {
            state.starts_at = StartsAt::Zero;
        }
        self.report.warnings.retain(|warning| !warning.contains(CONSTANT_STARTS));
        self
    }
}

/// Why a model isn't converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// Not a model.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Nodes need more than the steps so far. The first may be what makes others stand in the way.
    #[error("{}", lines(.0))]
    Refused(Vec<Refusal>),
    /// No recurrence was found.
    #[error("{}", nothing(.0))]
    Nothing(Vec<String>),
    /// The graph's description names states in another form than the backend reads.
    #[error("{0}")]
    Description(String),
    /// An option names something that isn't there.
    #[error("{0}")]
    Option(String),
}

/// gRPC doesn't carry an error of many kilobytes to a client that loads a model.
const MOST_LISTED: usize = 8;

fn lines(refused: &[Refusal]) -> String {
    let mut lines: Vec<String> = refused.iter().take(MOST_LISTED).map(Refusal::to_string).collect();
    if refused.len() > MOST_LISTED {
        lines.push(format!("{} more nodes stand in the way", refused.len() - MOST_LISTED));
    }
    lines.join("\n")
}

fn nothing(stopped: &[String]) -> String {
    let mut text = "no axis of the inputs leads to a recurrence or a causal convolution".to_owned();
    for line in stopped {
        text += &format!("\n  {line}");
    }
    text
}

/// Converts a model.
pub fn convert(bytes: Bytes, options: &Options) -> Result<Converted, ConvertError> {
    let mut model = onnx::read(bytes)?;
    let mut graph = model.graph.take().unwrap_or_default();
    let opset = opset(&model);
    let described = described_pairs(graph.doc_string())?;
    let pairs = if options.states.is_empty() { described.clone() } else { options.states.clone() };
    check_pairs(&graph, &pairs)?;
    let (mut opened, mut others) = (Vec::new(), None);
    if options.open_batch {
        let made = batch::open(&graph, opset, &pairs, &options.time, &options.batch)?;
        (graph, opened, others) = (made.graph, made.axes, made.others);
    }
    let states: Vec<String> = pairs.iter().map(|pair| pair.input.clone()).collect();
    // What the user asked for may be done although nothing is to be cut. A model without any state can't be served.
    let is_done_without = options.time.is_empty() && !pairs.is_empty();
    let mut uncut = None;
    let analysed = if options.keep_recurrences {
        Ok(Analysis::without_time(&graph, opset))
    } else {
        analyse(&graph, opset, &options.time, &states)
    };
    let analysis = match analysed {
        Ok(analysis) => analysis,
        Err(Obstacle::Nothing(_)) if is_done_without => Analysis::without_time(&graph, opset),
        Err(Obstacle::Refused(refusal)) if is_done_without => {
            uncut = Some(format!("no recurrence inside the model got a state: {}", lines(&refusal)));
            Analysis::without_time(&graph, opset)
        }
        Err(Obstacle::Refused(refusal)) => return Err(ConvertError::Refused(refusal)),
        Err(Obstacle::Nothing(stopped)) => return Err(ConvertError::Nothing(stopped)),
        Err(Obstacle::Unknown(why)) => return Err(ConvertError::Option(why)),
    };
    check_outputs(&graph, &analysis)?;
    let made = cut(&graph, opset, &analysis).map_err(|refusal| ConvertError::Refused(vec![refusal]))?;
    let initial = starts(&made).map(|graph| with_graph(&model, graph));
    let CutGraph { graph: mut cut_graph, states, .. } = made;
    let kept = kept_states(&cut_graph, &pairs);
    let mut report = report(&graph, &analysis, kept, &states);
    report.warnings.extend(others.map(|others| two_batches(&opened, &others)));
    report.opened = opened;
    report.warnings.extend(uncut);
    sort(&mut cut_graph);
    prune(&mut cut_graph);
    relax(&mut cut_graph, &analysis);
    describe(&mut cut_graph, &described, &report);
    let converted = with_graph(&model, cut_graph);
    Ok(Converted {
        model: onnx::write(&converted),
        initial_states: initial.map(|model| onnx::write(&model)),
        weights: external_files(&converted),
        report,
    })
}

/// The warning where two dimensions of an input could be the batch.
fn two_batches(opened: &[InputAxis], others: &[InputAxis]) -> String {
    let listed = |axes: &[InputAxis], beside: &[InputAxis]| {
        let differ = axes.iter().filter(|axis| !beside.contains(axis));
        differ.map(|InputAxis { input, axis }| format!("{input}@{axis}")).collect::<Vec<_>>().join(",")
    };
    format!(
        "{} was taken for the batch, and {} could be opened, too: --batch-axis (at load: open_batch) says which it is",
        listed(opened, others),
        listed(others, opened)
    )
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

/// Refuses outputs that aren't the steps alone.
fn check_outputs(graph: &GraphProto, analysis: &Analysis) -> Result<(), ConvertError> {
    for output in &graph.output {
        let why = match analysis.found.places.get(output.name()) {
            Some(Place::At(layout)) if layout.is_padded() => "has padding beside its steps",
            Some(Place::Sequence) => "is a sequence of steps",
            _ => continue,
        };
        return Err(ConvertError::Refused(vec![Refusal {
            node: output.name().to_owned(),
            operator: "output".to_owned(),
            why: why.to_owned(),
            help: "give out a tensor that has an entry for each step".to_owned(),
        }]));
    }
    Ok(())
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
            None if is_lengths(graph, input.name()) => Role::Lengths,
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
    let mut constant: Vec<&str> =
        made.iter().filter(|state| state.starts_at_constant).map(|state| state.node.as_str()).collect();
    constant.dedup();
    if !constant.is_empty() {
        warnings.push(format!(
            "{} {CONSTANT_STARTS}: learned values, or what a Keras layer with stateful=True held when it was exported; \
             --zero-initial-states (at load: use_const_initializer) starts them at zero",
            constant.join(", ")
        ));
    }
    if !analysis.found.quantized.is_empty() {
        warnings.push(format!(
            "{} take one quantization scale over a whole request, so answers depend a little on its length",
            analysis.found.quantized.join(", ")
        ));
    }
    if analysis.found.multiple > 1 {
        warnings.push(format!("a request must have a multiple of {} steps", analysis.found.multiple));
    }
    Report {
        time: analysis.time.clone(),
        inputs: inputs.map(input).collect(),
        outputs: graph.output.iter().filter(|output| !ends.contains(&output.name())).map(output).collect(),
        states,
        opened: Vec::new(),
        steps_multiple: analysis.found.multiple,
        quantizes: !analysis.found.quantized.is_empty(),
        warnings,
    }
}

/// Whether an input is the lengths of a recurrent node's rows.
fn is_lengths(graph: &GraphProto, input: &str) -> bool {
    let lens =
        graph.node.iter().filter(|node| matches!(node.op_type(), "LSTM" | "GRU" | "RNN" | "DynamicQuantizeLSTM"));
    let mut names: Vec<String> = lens.filter_map(|node| node.input_at(4).map(str::to_owned)).collect();
    let producers = crate::graph::producers(graph);
    while let Some(name) = names.pop() {
        if name == input {
            return true;
        }
        let node = producers.get(name.as_str()).map(|&index| &graph.node[index]);
        let moves = ["Cast", "Identity", "TopK", "Gather", "Reshape", "Squeeze", "Unsqueeze"];
        names.extend(node.filter(|node| moves.contains(&node.op_type())).and_then(|node| node.input.first().cloned()));
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
