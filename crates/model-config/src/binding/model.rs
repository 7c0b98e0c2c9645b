//! A model whose tensors are bound: what feeds each of its inputs and what each output is for, or the first thing that
//! doesn't fit; what a step feeds and fetches; and questions about that. Beside it, the model for initial states.

use rows::layout::SlotLayout;
use rows::tensor::{DataType, StorageType, element_count};

use super::bound::{
    BoundContext, BoundInput, BoundOutput, BoundState, BoundWindow, Counter, Generated, Initial, InitialContent,
    RequestInput, Source, StatePlace, TrimBy,
};
use super::error::{BindingError, Result, names};
use super::fit::{Listed, check_type, describe};
use super::generated::feed_generated;
use super::inputs::{Feeds, feed_without_requests, request_input};
use super::outputs::{bind_trims, listed_outputs};
use super::states::{GrowingPadding, StateBinder, bind_growing_padding};
use super::steps::{BoundRepeat, MostSteps, bind_repeat, bound_steps, check_ends};
use crate::config::{Config, Context, INPUT_WINDOWS, InitialSources, StatePair, Window};
use crate::onnx::{Signature, TensorInfo, agree, all_agree, open_axes};

/// What a step of the model feeds and fetches, and how requests and states map to that.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The model's inputs, in its order.
    pub inputs: Vec<BoundInput>,
    /// The outputs that are fetched: those of states and those that responses may carry.
    pub outputs: Vec<BoundOutput>,
    /// In the order of their pairs.
    pub states: Vec<BoundState>,
    pub counters: Vec<Counter>,
    /// How rows whose growing states have different lengths share a run; `None` if they don't.
    pub growing_padding: Option<GrowingPadding>,
    /// Where a slot has the states, and behind them the contexts.
    pub slot: SlotLayout,
    pub most_steps: MostSteps,
    pub repeat: Option<BoundRepeat>,
    pub is_cut: bool,
    pub answers_each_step: bool,
    /// A node that must not run over no steps, so that no input may be empty.
    pub needs_steps: Option<String>,
}

impl Binding {
    /// Binds the model, or returns the first thing that does not fit. `constant_outputs` are the same in every run.
    /// `initial_sources` has what the configuration names for initial states.
    pub fn new(
        config: &Config,
        pairs: &[StatePair],
        constant_outputs: &[String],
        signature: &Signature,
        initial_sources: &InitialSources,
    ) -> Result<Self> {
        // An entry for a tensor that is not listed would be ignored, because entries are looked up by the tensors'
        // names.
        check_names(config, pairs)?;
        let mut feeds = Feeds::new(config, pairs, signature);
        let state_axes = |info: &TensorInfo| {
            let is_state = pairs.iter().any(|pair| pair.input == info.name);
            is_state.then(|| config.states.batch_axes(&info.name, info.symbols.len()))
        };
        let shared = signature.batch_symbols(state_axes);
        // Several names may each be the batch's, so none of them decides.
        let batch_symbol = if let [symbol] = *shared { Some(symbol) } else { None };
        for tensor in &config.inputs {
            let (index, info) = feeds.find(&tensor.name, "'input'")?;
            let listed = Listed { config, tensor, info, batch_symbol };
            feeds.add(index, request_input(listed, index >= signature.inputs.len())?)?;
        }
        // From here on, the name is that of the requests' batch, which their dims in the configuration have decided.
        let batch_symbol = feeds.batch_symbol(config);
        let mut outputs = listed_outputs(config, pairs, constant_outputs, signature, batch_symbol)?;
        let mut states = Vec::new();
        let batch_is_open = feeds.batch_is_open(config);
        let shared = &shared;
        let binder = StateBinder { config, initial_sources, signature, pairs, batch_symbol, batch_is_open, shared };
        for pair in pairs {
            states.extend(binder.bind(pair, &mut feeds, &mut outputs, &states)?);
        }
        feed_without_requests(config, &mut feeds)?;
        // After the inputs of requests and the states, because they count the elements of these.
        let counters = feed_generated(config, &mut feeds, &states, batch_symbol.filter(|_| config.is_batched()))?;
        let mut inputs = feeds.into_inputs()?;
        if states.iter().any(|state| state.dims.contains(&-1)) {
            // The new value of a state of varying size would depend on the padding of an input.
            inputs.iter_mut().filter_map(BoundInput::request_mut).for_each(|request| request.is_padded = false);
        }
        check_ends(config)?;
        let repeat = bind_repeat(config, signature, &inputs, &mut outputs, &states)?;
        bind_trims(config, signature, &inputs, &mut outputs)?;
        // After the trims, because the output of a state may give the lengths of another output.
        mark_only_kept(&mut outputs, &states);
        let most_steps = bound_steps(config, &inputs, &outputs)?;
        let slot = lay_out(&mut inputs, &states).ok_or(BindingError::StatesOverflow)?;
        let growing_padding = bind_growing_padding(config, signature, &inputs, &mut states)?;
        Ok(Self {
            inputs,
            outputs,
            states,
            counters,
            growing_padding,
            slot,
            most_steps,
            repeat,
            is_cut: config.windows.are_cut(),
            answers_each_step: config.is_decoupled,
            // The caller knows it from the model's nodes.
            needs_steps: None,
        })
    }

    /// Sets the initial values of states; `None` leaves one as it is.
    pub fn set_initial(&mut self, initial: Vec<Option<Initial>>) {
        for (state, initial) in self.states.iter_mut().zip(initial) {
            state.initial = initial.unwrap_or_else(|| state.initial.clone());
        }
    }

    pub fn set_initial_from_model(&mut self, model: &InitialModel) {
        for output in &model.outputs {
            self.states[output.state].initial.content = InitialContent::Model;
        }
    }

    pub fn request_inputs(&self) -> impl Iterator<Item = (&BoundInput, &RequestInput)> + Clone {
        self.inputs.iter().filter_map(|input| Some((input, input.request()?)))
    }

    pub fn contexts(&self) -> impl Iterator<Item = (usize, &RequestInput, BoundContext)> + Clone {
        let requests = self.inputs.iter().enumerate().filter_map(|(index, input)| Some((index, input.request()?)));
        requests.filter_map(|(index, request)| Some((index, request, request.context?)))
    }

    pub fn windows(&self) -> impl Iterator<Item = (&BoundInput, &RequestInput, BoundWindow)> + Clone {
        self.request_inputs().filter_map(|(input, request)| Some((input, request, request.window?)))
    }

    pub fn makes_steps(&self) -> bool {
        self.is_cut || self.repeat.is_some()
    }

    pub fn has_varying_states(&self) -> bool {
        self.states.iter().any(|state| !state.is_in_slot())
    }

    /// Bytes of a row's states in a batch buffer.
    pub fn batch_bytes(&self) -> usize {
        let bytes =
            |state: &BoundState| if let StatePlace::Slot(layout) = state.place { layout.row_bytes() } else { 0 };
        self.states.iter().map(bytes).sum()
    }

    /// Whether the tensors of the states of varying size may stay as ONNX Runtime makes them.
    pub fn varying_may_stay(&self) -> bool {
        let can_stay = |state: &BoundState| state.data_type != DataType::Bytes && state.storage == StorageType::Exact;
        self.has_varying_states() && self.states.iter().filter(|state| !state.is_in_slot()).all(can_stay)
    }

    /// Whether an output is read whatever requests ask for: as a state, as the lengths of another, or for the next
    /// step.
    pub fn is_needed(&self, output: usize) -> bool {
        let is_repeated = self.repeat.as_ref().is_some_and(|repeat| repeat.reads(output));
        let is_state = self.states.iter().any(|state| state.output == output);
        is_state || is_repeated || trim_lengths(&self.outputs).contains(&output)
    }

    /// Bytes of a slot that are where the model runs.
    pub fn device_bytes(&self) -> usize {
        // Inputs are gathered on the host, so the contexts behind the states are there.
        self.slot.part_bytes(self.states.len())
    }

    /// What a snapshot calls a context of an input.
    pub fn context_name(&self, input: usize, of: BoundContext) -> String {
        let input = self.inputs[input].name.clone();
        // The number of new elements doesn't change what is kept, so a snapshot leaves it out.
        Context { input, length: of.length, new: None, axis: Some(of.axis), first: of.first }.to_string()
    }

    pub fn window_name(&self, input: &BoundInput, of: BoundWindow) -> String {
        // ':pad' changes nothing of what is left over, so models with and without it read each other's snapshots.
        Window { input: input.name.clone(), length: of.length, axis: Some(of.axis), pads: false }.to_string()
    }

    pub fn generated(&self) -> impl Iterator<Item = (&BoundInput, &Generated)> + Clone {
        self.inputs.iter().filter_map(|input| match &input.source {
            Source::Generated(generated) => Some((input, generated)),
            _ => None,
        })
    }

    pub fn counter_name(&self, counter: Counter) -> String {
        match counter {
            Counter::Steps => "steps".to_owned(),
            Counter::Elements(of) => format!("elements({}@{})", self.inputs[of.input].name, of.axis),
        }
    }

    /// The smallest, the usual and the largest shapes of the inputs, as TensorRT takes them, for runs of up to
    /// `most_rows` rows; and the inputs with dimensions that may be any.
    pub fn profile_shapes(&self, most_rows: usize) -> ([String; 3], Vec<String>) {
        let fed = || self.inputs.iter().filter(|input| input.data_type != DataType::Bytes);
        let shapes = |rows: usize| {
            let shape = |input: &BoundInput| {
                let dim = |(axis, &dim): (usize, &i64)| {
                    if Some(axis) == input.batch_axis { rows.to_string() } else { dim.to_string() }
                };
                let dims: Vec<_> = input.dims.iter().enumerate().map(dim).collect();
                format!("{}:{}", input.name, dims.join("x"))
            };
            fed().filter(|input| !input.dims.is_empty()).map(shape).collect::<Vec<_>>().join(",")
        };
        let is_open = |input: &&BoundInput| !open_axes(&input.dims, input.batch_axis).is_empty();
        let open = fed().filter(is_open).map(|input| format!("'{}'", input.name)).collect();
        ([shapes(1), shapes(most_rows), shapes(most_rows)], open)
    }

    /// Why runs cannot be CUDA graphs: a tensor is not the same each time. `None` if they can.
    pub fn unfit_for_graphs(&self) -> Option<String> {
        let (_, open) = self.profile_shapes(1);
        if let Some(name) = open.first() {
            return Some(format!("dimensions of {name} are open"));
        }
        if let Some(input) = self.inputs.iter().find(|input| input.data_type == DataType::Bytes) {
            return Some(format!("'{}' has strings", input.name));
        }
        // A graph repeats a run with all inputs that the first run had.
        let is_optional = |(_, request): &(&BoundInput, &RequestInput)| request.optional;
        if let Some((input, _)) = self.request_inputs().find(is_optional) {
            return Some(format!("'{}' is optional", input.name));
        }
        let open = self.outputs.iter().find(|output| output.dims.is_none());
        open.map(|output| format!("dimensions of '{}' are open", output.name))
    }

    /// For runs of up to `most_rows` rows. Those of `graph_rows` rows can be CUDA graphs.
    pub fn step_spec(&self, most_rows: usize, graph_rows: Vec<usize>) -> StepSpec {
        let inputs = self.inputs.iter().map(input_spec);
        let lengths = trim_lengths(&self.outputs);
        let outputs = self.outputs.iter().enumerate().map(|(index, output)| {
            let is_read = output.is_response || lengths.contains(&index);
            output_spec(output, is_read, self.states.iter().any(|state| state.output == index))
        });
        StepSpec { inputs: inputs.collect(), outputs: outputs.collect(), most_rows, graph_rows }
    }
}

#[derive(Clone, Debug, Default)]
pub struct StepSpec {
    pub inputs: Vec<InputSpec>,
    pub outputs: Vec<OutputSpec>,
    pub most_rows: usize,
    /// Numbers of rows that run as CUDA graphs, if the session has them. Then all dimensions are known.
    pub graph_rows: Vec<usize>,
}

#[derive(Clone, Debug)]
pub struct InputSpec {
    pub name: String,
    pub data_type: DataType,
    /// Which dimension is the number of rows; `None` if the tensor is the same for every batch.
    pub batch_axis: Option<usize>,
    pub dims: Vec<i64>,
    /// The caller gives a tensor for it to each run.
    pub is_given: bool,
}

#[derive(Clone, Debug)]
pub struct OutputSpec {
    pub name: String,
    pub data_type: DataType,
    pub batch_axis: Option<usize>,
    /// `None` if a dimension other than the batch axis is open; then ONNX Runtime decides the shape.
    pub dims: Option<Vec<i64>>,
    /// Its elements are read on the host after a run.
    pub is_read: bool,
    /// If ONNX Runtime makes it, it stays where the model runs.
    pub stays: bool,
}

/// An input of at most this many bytes that is the same for every batch is left on the host, where ONNX Runtime usually
/// reads such inputs, if it does not tell.
const HOST_INPUT: usize = 64;

impl InputSpec {
    /// Whether a dimension other than the batch's is open.
    pub fn varies(&self) -> bool {
        !open_axes(&self.dims, self.batch_axis).is_empty()
    }

    /// Whether it stays on the host, though the model runs on a device. Not an input with a batch: its rows may be in
    /// memory of the GPU that clients share.
    pub fn is_left_on_host(&self, reads_on_host: Option<bool>) -> bool {
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        let is_small = bytes.is_some_and(|bytes| bytes <= HOST_INPUT);
        !self.is_given && self.batch_axis.is_none() && reads_on_host.unwrap_or(is_small)
    }
}

/// The outputs that have the lengths of others.
fn trim_lengths(outputs: &[BoundOutput]) -> Vec<usize> {
    let lengths = |output: &BoundOutput| if let TrimBy::Output(index) = output.trim?.by { Some(index) } else { None };
    outputs.iter().filter_map(lengths).collect()
}

fn input_spec(input: &BoundInput) -> InputSpec {
    let BoundInput { name, data_type, batch_axis, dims, source } = input.clone();
    InputSpec { name, data_type, batch_axis, dims, is_given: matches!(source, Source::State(_)) }
}

fn output_spec(output: &BoundOutput, is_read: bool, stays: bool) -> OutputSpec {
    let BoundOutput { name, data_type, batch_axis, dims, .. } = output.clone();
    OutputSpec { name, data_type, batch_axis, dims, is_read, stays }
}

fn mark_only_kept(outputs: &mut [BoundOutput], states: &[BoundState]) {
    let lengths = trim_lengths(outputs);
    for state in states.iter().filter(|state| state.is_in_slot() && !lengths.contains(&state.output)) {
        let output = &mut outputs[state.output];
        output.is_only_kept = !output.is_response;
    }
}

/// Numbers the inputs of requests, and lays states and contexts out in the slot; `None` if the sizes overflow.
fn lay_out(inputs: &mut [BoundInput], states: &[BoundState]) -> Option<SlotLayout> {
    // The states come first, so that a device needs only the beginning of a slot.
    let mut sizes: Vec<usize> = states.iter().map(BoundState::slot_bytes).collect();
    for (position, request) in inputs.iter_mut().filter_map(BoundInput::request_mut).enumerate() {
        request.position = position;
        if let Some(context) = &mut request.context {
            context.slot_entry = sizes.len();
            sizes.push(context.bytes);
        }
    }
    SlotLayout::new(&sizes)
}

fn check_names(config: &Config, state_pairs: &[StatePair]) -> Result<()> {
    let initial = config.states.initial.iter().map(|(name, _)| ("initial_states", name));
    let dims = config.states.dims.iter().map(|state| ("state_dims", &state.name));
    let contexts = config.contexts.iter().map(|context| ("input_context", &context.input));
    let windows = config.windows.inputs.iter().map(|window| (INPUT_WINDOWS, &window.input));
    let held = config.held_inputs.iter().map(|name| ("held_inputs", name));
    let padded = config.ragged.inputs.iter().map(|padded| ("padded_inputs", &padded.input));
    let trimmed = config.ragged.outputs.iter().map(|padded| ("padded_outputs", &padded.output));
    let states: Vec<&str> = state_pairs.iter().map(|pair| pair.input.as_str()).collect();
    let inputs: Vec<&str> = config.inputs.iter().map(|tensor| tensor.name.as_str()).collect();
    let outputs: Vec<&str> = config.outputs.iter().map(|tensor| tensor.name.as_str()).collect();
    check_listed(initial.chain(dims), "a state's input", &states)?;
    check_listed(contexts.chain(windows).chain(held).chain(padded), "listed under 'input'", &inputs)?;
    check_listed(trimmed, "listed under 'output'", &outputs)
}

fn check_listed<'a>(
    mut named: impl Iterator<Item = (&'static str, &'a String)>,
    side: &'static str,
    has: &[&str],
) -> Result<()> {
    let Some((parameter, name)) = named.find(|(_, name)| !has.contains(&name.as_str())) else { return Ok(()) };
    Err(BindingError::Unlisted { parameter, name: name.clone(), side, has: names(has) })
}

/// How the model for initial states fits the binding. It runs for one row at a time.
#[derive(Clone, Debug)]
pub struct InitialModel {
    /// For each input of this model, in order, the index in the binding of the request input that it takes.
    pub inputs: Vec<usize>,
    pub outputs: Vec<InitialOutput>,
    pub step: StepSpec,
}

#[derive(Clone, Copy, Debug)]
pub struct InitialOutput {
    pub state: usize,
    /// Whether it has the state's batch axis.
    pub has_batch: bool,
}

impl InitialModel {
    pub fn new(binding: &Binding, signature: &Signature) -> Result<Self> {
        let inputs = signature.inputs.iter().map(|info| bind_input(binding, info)).collect::<Result<Vec<_>, _>>()?;
        let outputs = signature.outputs.iter().map(|info| bind_output(binding, info)).collect::<Result<Vec<_>, _>>()?;
        let input_specs = inputs.iter().map(|&input| input_spec(&binding.inputs[input]));
        // Without dims, because a state of varying size has its length only after the run.
        let unknown = |info: &TensorInfo| BoundOutput::new(&info.name, info.data_type);
        let output_specs = signature.outputs.iter().map(|info| output_spec(&unknown(info), true, false));
        let (input_specs, output_specs) = (input_specs.collect(), output_specs.collect());
        let step = StepSpec { inputs: input_specs, outputs: output_specs, most_rows: 1, graph_rows: Vec::new() };
        Ok(Self { inputs, outputs, step })
    }
}

fn model_error(info: &TensorInfo, why: String) -> BindingError {
    BindingError::InitialModel { name: info.name.clone(), why }
}

fn bind_input(binding: &Binding, info: &TensorInfo) -> Result<usize> {
    let found = binding.inputs.iter().enumerate().find(|(_, input)| input.name == info.name);
    let found = found.and_then(|(index, input)| Some((index, input, input.request()?)));
    // A START may leave an optional input out, and this model has to run for it.
    let Some((index, input, request)) = found.filter(|(_, _, request)| !request.optional) else {
        let names: Vec<_> = binding.request_inputs().map(|(input, _)| input.name.as_str()).collect();
        let known = names.join(", ");
        return Err(model_error(info, format!("is no input that each request carries (those are {known})")));
    };
    check_type(format!("the initial_state_model's '{}'", info.name), info.data_type, input.data_type)?;
    let is_context = |axis: usize| request.context.is_some_and(|context| context.axis == axis);
    let fits = |(axis, (&theirs, &ours)): (usize, (&i64, &i64))| match input.batch_axis {
        Some(batch) if batch == axis => theirs < 0 || theirs == 1,
        _ => is_context(axis) || agree(theirs, ours),
    };
    if info.dims.len() == input.dims.len() && info.dims.iter().zip(&input.dims).enumerate().all(fits) {
        return Ok(index);
    }
    let (theirs, ours) = (describe(info.data_type, &info.dims), describe(input.data_type, &input.dims));
    Err(model_error(info, format!("is {theirs}, but requests carry {ours}, one row of it")))
}

fn bind_output(binding: &Binding, info: &TensorInfo) -> Result<InitialOutput> {
    let is_state = |&number: &usize| binding.inputs[binding.states[number].input].name == info.name;
    let Some(number) = (0..binding.states.len()).find(is_state) else {
        let name = |state: &BoundState| binding.inputs[state.input].name.as_str();
        let names: Vec<_> = binding.states.iter().map(name).collect();
        return Err(model_error(info, format!("is no state's input (those are {})", names.join(", "))));
    };
    let state = &binding.states[number];
    check_type(format!("the initial_state_model's '{}'", info.name), info.data_type, state.data_type)?;
    let mut without_batch = state.dims.clone();
    if let Some(axis) = state.batch_axis {
        without_batch.remove(axis);
    }
    // A tensor whose rank the model leaves open is checked when the model has run.
    let has_batch = all_agree(&state.dims, &info.dims)
        || info.dims.is_empty() && !state.dims.is_empty() && !without_batch.is_empty();
    if has_batch || all_agree(&without_batch, &info.dims) {
        return Ok(InitialOutput { state: number, has_batch });
    }
    let (theirs, ours) = (describe(info.data_type, &info.dims), describe(state.data_type, &state.dims));
    Err(model_error(info, format!("is {theirs}, but a row of that state is {ours}")))
}
