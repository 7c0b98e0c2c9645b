//! The model's signature held against its configuration: what feeds each input, what each output is for.
//!
//! Rules: every input of the model is fed by exactly one thing; every mismatch is an error at load that names the
//! tensor, what the configuration says and what the model says. The batch axis of each tensor is found here and may
//! stand anywhere. Not for: running anything.

#![forbid(unsafe_code)]

use std::ffi::CString;

mod context;
mod error;
mod fixed;
mod initial;
mod initial_model;
mod ragged;
mod shapes;
mod states;

pub use error::BindingError;
use fixed::{constant_input, control_input};
pub use initial::{Initial, InitialContent};
pub use initial_model::{InitialInput, InitialModel, InitialOutput};
pub use ragged::{Trim, TrimBy};
use ragged::{bind_trims, forbid_padding, lengths_input};
use shapes::{request_input, response_output};
use states::StateBinder;

use crate::config::{Config, InitialFiles, StatePair};
use crate::session::{InputSpec, OutputSpec, Signature, StateSpec, StepSpec, TensorInfo};
use crate::state::layout::SlotLayout;
use crate::tensor::{DataType, Dims, RowLayout};

/// What a step of this model feeds and fetches, and how states and requests map to it.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The model's inputs, in its order.
    pub inputs: Vec<BoundInput>,
    /// The outputs that are fetched: those of states and those that responses may carry.
    pub outputs: Vec<BoundOutput>,
    /// The states, in the order of their pairs.
    pub states: Vec<BoundState>,
    /// Where the states lie in a slot, and behind them the contexts.
    pub slot: SlotLayout,
}

/// An input of the model.
#[derive(Clone, Debug)]
pub struct BoundInput {
    /// Name in the model and in requests.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Dimensions in the model; -1 is open.
    pub dims: Vec<i64>,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// What fills it.
    pub source: Source,
}

/// What fills an input.
#[derive(Clone, Debug)]
pub enum Source {
    /// The requests.
    Request(RequestInput),
    /// The length of each row of this input.
    Lengths {
        /// Index in [`Binding::inputs`].
        of: usize,
    },
    /// The state of this number.
    State(usize),
    /// A control.
    Control(BoundControl),
    /// Always these bytes (of one row, where there is a batch axis).
    Constant(Vec<u8>),
}

/// How requests carry an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInput {
    /// Place among the inputs that requests carry.
    pub position: usize,
    /// How their shape relates to the model's.
    pub form: ShapeForm,
    /// Whether a request may leave it out; the model then has a value of its own.
    pub optional: bool,
    /// What is put in front of each request's elements.
    pub context: Option<BoundContext>,
    /// The axis along which rows may have different lengths.
    pub ragged_axis: Option<usize>,
    /// Whether rows of different lengths share a batch, the shorter ones filled up.
    pub is_padded: bool,
}

impl RequestInput {
    /// Steps that the model sees along `axis` of a request with these dims: the context's and the request's own.
    pub fn row_length(&self, request: &[i64], axis: usize) -> usize {
        let context = self.context.filter(|context| context.axis == axis).map_or(0, |context| context.length);
        let own = self.form.model_dims(request).get(axis).map_or(0, |&dim| usize::try_from(dim).unwrap_or(0));
        context + own
    }

    /// The axis along which a row is not simply the request's elements, if there is one.
    pub fn window_axis(&self) -> Option<usize> {
        self.context.map(|context| context.axis).or(self.ragged_axis.filter(|_| self.is_padded))
    }
}

/// The end of a sequence's last request, kept for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundContext {
    /// The axis, in the model.
    pub axis: usize,
    /// Steps along it.
    pub length: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// Place in the slot, to be asked of [`Binding::slot`].
    pub slot_entry: usize,
}

/// A control, in the type that the model takes.
#[derive(Clone, Debug)]
pub enum BoundControl {
    /// One of these two elements, by a flag of the request.
    Flag {
        /// Which flag.
        flag: Flag,
        /// The element that says no.
        no: Vec<u8>,
        /// The element that says yes.
        yes: Vec<u8>,
    },
    /// The sequence id.
    CorrelationId(DataType),
}

/// What a request can say of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// It starts a sequence.
    Start,
    /// It ends its sequence.
    End,
    /// It is one.
    Ready,
}

/// How a request's shape relates to the shape in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeForm {
    /// As in the model, with 1 for the batch axis, which is the first: what Triton does.
    Plain,
    /// The configuration's dims are the model's, with -1 for the batch axis wherever it stands; requests have Triton's
    /// batch dimension in front of them, responses have not: what NVIDIA's stateful_backend does.
    BatchInside,
    /// The model's tensor has no batch axis, though others have; requests have Triton's batch dimension in front of it.
    Unbatched,
}

impl ShapeForm {
    /// The part of a request's dims that are the model's.
    pub fn model_dims(self, request: &[i64]) -> &[i64] {
        match self {
            Self::Plain => request,
            Self::BatchInside | Self::Unbatched => request.get(1..).unwrap_or_default(),
        }
    }
}

/// An output that is fetched.
#[derive(Clone, Debug)]
pub struct BoundOutput {
    /// Name in the model and in responses.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// Dimensions, where all but the batch axis are known.
    pub dims: Option<Vec<i64>>,
    /// Whether responses may carry it.
    pub is_response: bool,
    /// Its shape in a response without elements: 0 for the batch axis and for open dimensions.
    pub empty_dims: Vec<i64>,
    /// What of it belongs to a row, where rows of different lengths share a batch; `None` if all does.
    pub trim: Option<Trim>,
    /// Its name as Triton takes it.
    pub c_name: CString,
    /// It is a state that stays where the run wrote it, and nothing else: nobody reads it after the run.
    pub is_only_kept: bool,
}

/// A state: which input and output of the binding are its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundState {
    /// Index in [`Binding::inputs`].
    pub input: usize,
    /// Index in [`Binding::outputs`].
    pub output: usize,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// Dimensions of a row: 1 for the batch axis, -1 where the size varies.
    pub dims: Vec<i64>,
    /// Where a sequence keeps it.
    pub place: StatePlace,
    /// TYPE_FP32 is kept as TYPE_FP16, rounded to nearest even.
    pub as_fp16: bool,
    /// What it is when a sequence starts.
    pub initial: Initial,
}

/// Where a sequence keeps a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePlace {
    /// In its slot: every row has this layout.
    Slot(RowLayout),
    /// Beside its slot, as it varies in size: under this number.
    Beside(usize),
}

impl BoundState {
    /// Whether it is kept in the sequence's slot.
    pub const fn is_in_slot(&self) -> bool {
        matches!(self.place, StatePlace::Slot(_))
    }

    /// Bytes of a row of `layout` when it is kept.
    pub const fn kept_bytes(&self, layout: RowLayout) -> usize {
        layout.row_bytes() / if self.as_fp16 { 2 } else { 1 }
    }

    /// Bytes of the state in its slot.
    pub const fn slot_bytes(&self) -> usize {
        match self.place {
            StatePlace::Slot(layout) => self.kept_bytes(layout),
            StatePlace::Beside(_) => 0,
        }
    }

    /// The layout of a batch whose rows have these dims; `None` if a product overflows.
    pub fn layout(&self, dims: &[i64]) -> Option<RowLayout> {
        RowLayout::new(self.data_type, dims, self.batch_axis)
    }
}

impl Binding {
    /// Finds what feeds what, or the first thing that does not fit. `files` are those of
    /// [`States::initial_files`](crate::config::States::initial_files).
    pub fn new(
        config: &Config,
        state_pairs: &[StatePair],
        signature: &Signature,
        files: &InitialFiles,
    ) -> Result<Self, BindingError> {
        check_names(config, state_pairs)?;
        let mut feeds = Feeds::new(signature);
        let batch_symbol = signature.batch_symbol(|info| state_pairs.iter().any(|pair| pair.input == info.name));
        for tensor in &config.inputs {
            let (index, info) = feeds.find(&tensor.name, "'input'")?;
            feeds.place(index, request_input(config, tensor, info, feeds.has_default(index), batch_symbol)?)?;
        }
        let batch_symbol = feeds.batch_symbol(config);
        let mut outputs = Vec::new();
        for tensor in &config.outputs {
            let (_, info) = find(&signature.outputs, &tensor.name, "'output'", "output")?;
            outputs.push(response_output(config, tensor, info, batch_symbol)?);
        }
        let mut states = Vec::new();
        for pair in state_pairs {
            let binder = StateBinder { config, files, batch_symbol };
            states.extend(binder.bind(pair, signature, &mut feeds, &mut outputs, &states)?);
        }
        feed_without_requests(config, &mut feeds)?;
        let mut inputs = feeds.into_inputs(&mut states)?;
        if states.iter().any(|state| state.dims.contains(&-1)) {
            forbid_padding(&mut inputs);
        }
        bind_trims(config, signature, &inputs, &mut outputs)?;
        mark_only_kept(&mut outputs, &states);
        let slot = lay_out(&mut inputs, &states).ok_or(BindingError::StatesOverflow)?;
        Ok(Self { inputs, outputs, states, slot })
    }

    /// Lets states begin with what the model for initial states says.
    pub fn set_initial_from_model(&mut self, model: &InitialModel) {
        for output in &model.outputs {
            self.states[output.state].initial.content = InitialContent::Model;
        }
    }

    /// Lets states begin with these values.
    pub fn set_initial(&mut self, initial: Vec<Option<Initial>>) {
        for (state, initial) in self.states.iter_mut().zip(initial) {
            state.initial = initial.unwrap_or_else(|| state.initial.clone());
        }
    }

    /// The inputs that requests carry, in their order.
    pub fn request_inputs(&self) -> impl Iterator<Item = (&BoundInput, &RequestInput)> {
        self.inputs.iter().filter_map(|input| match &input.source {
            Source::Request(request) => Some((input, request)),
            _ => None,
        })
    }

    /// The contexts, with the index of their input.
    pub fn contexts(&self) -> impl Iterator<Item = (usize, &RequestInput, BoundContext)> {
        self.inputs.iter().enumerate().filter_map(|(index, input)| match &input.source {
            Source::Request(request) => Some((index, request, request.context?)),
            _ => None,
        })
    }

    /// Whether anything of a row is copied to its sequence after a run.
    pub fn is_copied_back(&self) -> bool {
        self.has_varying_states() || self.contexts().next().is_some()
    }

    /// Whether a sequence has states of varying size.
    pub fn has_varying_states(&self) -> bool {
        self.states.iter().any(|state| matches!(state.place, StatePlace::Beside(_)))
    }

    /// How many of the states before `number` are kept in slots: the state's number in the batch buffers.
    pub fn slot_states_before(&self, number: usize) -> usize {
        self.states[..number].iter().filter(|state| state.is_in_slot()).count()
    }

    /// Bytes of a row's states in a batch buffer.
    pub fn batch_bytes(&self) -> usize {
        let layouts = self.states.iter().filter_map(|state| match state.place {
            StatePlace::Slot(layout) => Some(layout.row_bytes()),
            StatePlace::Beside(_) => None,
        });
        layouts.sum()
    }

    /// The states of varying size, with their place beside the slot, if their tensors may stay as ONNX Runtime makes
    /// them: none of them has strings, or is rounded when it is kept.
    pub fn growing(&self) -> Vec<(usize, &BoundState)> {
        let beside = self.states.iter().filter_map(|state| match state.place {
            StatePlace::Slot(_) => None,
            StatePlace::Beside(number) => Some((number, state)),
        });
        let beside: Vec<_> = beside.collect();
        let can_stay = |state: &BoundState| state.data_type != DataType::Bytes && !state.as_fp16;
        if beside.iter().all(|(_, state)| can_stay(state)) { beside } else { Vec::new() }
    }

    /// Bytes of a slot that go where the model runs: the states. What is behind them is for inputs that are gathered on
    /// the host.
    pub fn device_bytes(&self) -> usize {
        self.slot.part_bytes(self.states.len())
    }

    /// The smallest, the usual and the largest shapes of the inputs, as TensorRT takes them, for runs of up to
    /// `most_rows` rows; and the inputs with dimensions that may be any.
    pub fn profile_shapes(&self, most_rows: usize) -> ([String; 3], Vec<String>) {
        let fed = || self.inputs.iter().filter(|input| input.data_type != DataType::Bytes);
        let shapes = |rows: usize| {
            let shape = |input: &BoundInput| {
                let dim = |(axis, &dim): (usize, &i64)| match Some(axis) == input.batch_axis {
                    true => rows.to_string(),
                    false => dim.to_string(),
                };
                let dims: Vec<_> = input.dims.iter().enumerate().map(dim).collect();
                format!("{}:{}", input.name, dims.join("x"))
            };
            fed().filter(|input| !input.dims.is_empty()).map(shape).collect::<Vec<_>>().join(",")
        };
        let is_open = |input: &&BoundInput| {
            input.dims.iter().enumerate().any(|(axis, &dim)| dim < 0 && Some(axis) != input.batch_axis)
        };
        let open = fed().filter(is_open).map(|input| format!("'{}'", input.name)).collect();
        ([shapes(1), shapes(most_rows), shapes(most_rows)], open)
    }

    /// Why runs cannot be CUDA graphs: what of a tensor is not the same each time. `None` if they can.
    pub fn unfit_for_graphs(&self) -> Option<String> {
        let (_, open) = self.profile_shapes(1);
        if let Some(name) = open.first() {
            return Some(format!("dimensions of {name} are open"));
        }
        let strings = self.inputs.iter().find(|input| input.data_type == DataType::Bytes);
        if let Some(input) = strings {
            return Some(format!("'{}' has strings", input.name));
        }
        let is_optional = |input: &&BoundInput| matches!(&input.source, Source::Request(request) if request.optional);
        if let Some(input) = self.inputs.iter().find(is_optional) {
            return Some(format!("'{}' is optional", input.name));
        }
        let open = self.outputs.iter().find(|output| output.dims.is_none());
        open.map(|output| format!("dimensions of '{}' are open", output.name))
    }

    /// What the step needs to know, for runs of up to `most_rows` rows, of which those of `graph_rows` rows can be CUDA
    /// graphs.
    pub fn step_spec(&self, most_rows: usize, graph_rows: Vec<usize>) -> StepSpec {
        let inputs = self.inputs.iter().map(|input| InputSpec {
            name: input.name.clone(),
            data_type: input.data_type,
            batch_axis: input.batch_axis,
            dims: input.dims.clone(),
            is_state: matches!(input.source, Source::State(_)),
        });
        let lengths = trim_lengths(&self.outputs);
        let outputs = self.outputs.iter().enumerate().map(|(index, output)| OutputSpec {
            name: output.name.clone(),
            data_type: output.data_type,
            batch_axis: output.batch_axis,
            dims: output.dims.clone(),
            is_read: output.is_response || lengths.contains(&index),
            is_state: self.states.iter().any(|state| state.output == index),
        });
        let states = self.states.iter().filter(|state| state.is_in_slot());
        let states =
            states.map(|&BoundState { input, output, ref dims, .. }| StateSpec { input, output, dims: dims.clone() });
        let growing = self.growing().iter().map(|(_, state)| (state.input, state.output)).collect();
        StepSpec {
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            states: states.collect(),
            growing,
            most_rows,
            graph_rows,
        }
    }
}

/// Feeds what no request carries and is no state: controls, constants, lengths.
fn feed_without_requests(config: &Config, feeds: &mut Feeds) -> Result<(), BindingError> {
    for control in &config.controls {
        // A control that the model does not take is Triton's business only.
        if let Ok((index, info)) = feeds.find(&control.name, "'control_input'") {
            feeds.place(index, control_input(config, control, info)?)?;
        }
    }
    for (name, values) in &config.constants {
        let (index, info) = feeds.find(name, "'constant_inputs'")?;
        feeds.place(index, constant_input(config, info, values)?)?;
    }
    for padded in &config.ragged.inputs {
        let (of, _) = feeds.find(&padded.input, "'padded_inputs'")?;
        let (index, info) = feeds.find(&padded.lengths, "'padded_inputs'")?;
        feeds.place(index, lengths_input(config, padded, info, of)?)?;
    }
    Ok(())
}

/// The outputs that say how long others are.
fn trim_lengths(outputs: &[BoundOutput]) -> Vec<usize> {
    let lengths = |output: &BoundOutput| match output.trim?.by {
        TrimBy::Output(index) => Some(index),
        TrimBy::Input(_) => None,
    };
    outputs.iter().filter_map(lengths).collect()
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
    let mut sizes: Vec<usize> = states.iter().map(BoundState::slot_bytes).collect();
    let requests = inputs.iter_mut().filter_map(|input| match &mut input.source {
        Source::Request(request) => Some(request),
        _ => None,
    });
    for (position, request) in requests.enumerate() {
        request.position = position;
        if let Some(context) = &mut request.context {
            context.slot_entry = sizes.len();
            sizes.push(context.bytes);
        }
    }
    SlotLayout::new(&sizes)
}

/// The model's inputs, required ones first and then those with a default, and what feeds them so far.
struct Feeds<'a> {
    infos: Vec<&'a TensorInfo>,
    required: usize,
    fed: Vec<Option<BoundInput>>,
}

impl<'a> Feeds<'a> {
    fn new(signature: &'a Signature) -> Self {
        let infos: Vec<_> = signature.inputs.iter().chain(&signature.defaults).collect();
        Self { required: signature.inputs.len(), fed: infos.iter().map(|_| None).collect(), infos }
    }

    fn find(&self, name: &str, named_by: &'static str) -> Result<(usize, &'a TensorInfo), BindingError> {
        let found = self.infos.iter().position(|info| info.name == name);
        found.map(|index| (index, self.infos[index])).ok_or_else(|| BindingError::Missing {
            named_by,
            name: name.to_owned(),
            side: "input",
            has: self.infos.iter().map(|info| info.name.clone()).collect(),
        })
    }

    /// The name that the model gives its batch dimension, where an input that is fed has it. Without Triton's batch it
    /// is taken to be the first.
    fn batch_symbol(&self, config: &Config) -> Option<&'a str> {
        let of_input = |(fed, info): (&Option<BoundInput>, &&'a TensorInfo)| {
            let axis = fed.as_ref()?.batch_axis.or((!config.is_batched()).then_some(0))?;
            Some(info.symbols.get(axis)?.as_str()).filter(|symbol| !symbol.is_empty())
        };
        self.fed.iter().zip(&self.infos).find_map(of_input)
    }

    const fn has_default(&self, index: usize) -> bool {
        index >= self.required
    }

    fn place(&mut self, index: usize, input: BoundInput) -> Result<(), BindingError> {
        match &self.fed[index] {
            Some(known) => Err(BindingError::FedTwice {
                name: input.name,
                first: known.source.noun(),
                second: input.source.noun(),
            }),
            None => {
                self.fed[index] = Some(input);
                Ok(())
            }
        }
    }

    /// The inputs that are fed, all that have no default among them. The indices of those with a default move up.
    fn into_inputs(self, states: &mut [BoundState]) -> Result<Vec<BoundInput>, BindingError> {
        let unfed = |(index, fed): &(usize, &Option<BoundInput>)| *index < self.required && fed.is_none();
        if let Some((index, _)) = self.fed.iter().enumerate().find(unfed) {
            return Err(self::unfed(self.infos[index]));
        }
        let moved = |index: usize| self.fed[..index].iter().flatten().count();
        states.iter_mut().for_each(|state| state.input = moved(state.input));
        let place = |input: &BoundInput| match input.source {
            Source::Lengths { of } => BoundInput { source: Source::Lengths { of: moved(of) }, ..input.clone() },
            _ => input.clone(),
        };
        Ok(self.fed.iter().flatten().map(place).collect())
    }
}

/// Names that parameters give and that only the whole of the configuration can confirm.
fn check_names(config: &Config, state_pairs: &[StatePair]) -> Result<(), BindingError> {
    let unknown = |parameter, name: &str, side, has: Vec<String>| {
        let known = has.iter().any(|other| other == name);
        let missing = BindingError::Unlisted { parameter, name: name.to_owned(), side, has };
        if known { Ok(()) } else { Err(missing) }
    };
    let inputs = || config.inputs.iter().map(|input| input.name.clone()).collect();
    let outputs = || config.outputs.iter().map(|output| output.name.clone()).collect();
    let states = || state_pairs.iter().map(|pair| pair.input.clone()).collect();
    for (name, _) in &config.states.initial {
        unknown("initial_states", name, "a state's input", states())?;
    }
    for context in &config.contexts {
        unknown("input_context", &context.input, "listed under 'input'", inputs())?;
    }
    for padded in &config.ragged.inputs {
        unknown("padded_inputs", &padded.input, "listed under 'input'", inputs())?;
    }
    for padded in &config.ragged.outputs {
        unknown("padded_outputs", &padded.output, "listed under 'output'", outputs())?;
    }
    Ok(())
}

impl Source {
    const fn noun(&self) -> &'static str {
        match self {
            Self::Request(_) => "'input'",
            Self::Lengths { .. } => "'padded_inputs'",
            Self::State(_) => "'state_pairs' or 'sequence_batching.state'",
            Self::Control(_) => "'control_input'",
            Self::Constant(_) => "'constant_inputs'",
        }
    }
}

fn find<'a>(
    infos: &'a [TensorInfo],
    name: &str,
    named_by: &'static str,
    side: &'static str,
) -> Result<(usize, &'a TensorInfo), BindingError> {
    infos.iter().enumerate().find(|(_, info)| info.name == name).ok_or_else(|| BindingError::Missing {
        named_by,
        name: name.to_owned(),
        side,
        has: infos.iter().map(|info| info.name.clone()).collect(),
    })
}

/// Index of an output that is fetched from now on, if it was not before.
fn fetched(outputs: &mut Vec<BoundOutput>, info: &TensorInfo) -> usize {
    if let Some(index) = outputs.iter().position(|output| output.name == info.name) {
        return index;
    }
    outputs.push(BoundOutput {
        name: info.name.clone(),
        data_type: info.data_type,
        batch_axis: None,
        dims: None,
        is_response: false,
        empty_dims: Vec::new(),
        trim: None,
        c_name: c_name(&info.name),
        is_only_kept: false,
    });
    outputs.len() - 1
}

fn describe(data_type: DataType, dims: &[i64]) -> String {
    format!("{data_type} {}", Dims(dims))
}

fn unfed(info: &TensorInfo) -> BindingError {
    BindingError::Unfed { name: info.name.clone(), data_type: info.data_type, dims: Dims(&info.dims).to_string() }
}

fn check_type(what: String, configured: DataType, model: DataType) -> Result<(), BindingError> {
    match configured == model {
        true => Ok(()),
        false => Err(BindingError::DataType { what, configured, model }),
    }
}

/// A tensor's name as Triton takes it; one with a NUL, which none has, becomes empty.
fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// Whether two dimensions can be the same; an open one can be any.
const fn agree(a: i64, b: i64) -> bool {
    a == b || a < 0 || b < 0
}

/// Whether the model's batch dimension takes every batch that may come.
const fn batches(dim: i64, config: &Config) -> bool {
    dim < 0 || (dim == 1 && config.max_batch_size == 1)
}

fn all_agree(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| agree(a, b))
}

#[cfg(test)]
mod feature_tests;
#[cfg(test)]
mod tests;
