//! How the model's signature fits its configuration: what feeds each input, and what each output is for.
//!
//! Rules: exactly one thing feeds each input of the model; every mismatch is an error at load that names the tensor,
//! what the configuration says and what the model says. The batch axis of each tensor is found here; it may be any
//! dimension. Not for: running anything.

#![forbid(unsafe_code)]

use std::ffi::CString;

mod bound;
mod context;
mod error;
mod feeds;
mod fixed;
mod for_step;
mod generated;
mod growing_padding;
mod initial;
mod initial_model;
mod npz;
mod one_batch;
mod ragged;
mod row_values;
mod shapes;
mod state_api;
mod states;
mod steps;
mod warnings;

pub use bound::{
    BoundContext, BoundControl, BoundInput, BoundOutput, BoundState, Flag, RequestInput, ShapeForm, Source, StatePlace,
    StepsMultiple,
};
pub use error::BindingError;
use feeds::{Feeds, feed_without_requests, find};
use generated::feed_generated;
pub use generated::{Counter, Generated, GeneratedValue, GrowingAxis, InputAxis, NewLength};
pub use growing_padding::GrowingPadding;
use growing_padding::bind_growing_padding;
pub use initial::{Initial, InitialContent};
pub use initial_model::{InitialModel, InitialOutput};
pub use ragged::{Trim, TrimBy};
use ragged::{bind_trims, forbid_padding};
pub use row_values::{RowValues, generated_value, largest_whole};
use shapes::{request_input, response_output};
pub use state_api::{StateApi, StateTensor};
use states::StateBinder;

use crate::config::{Config, InitialSources, StatePair};
use crate::session::{Signature, TensorInfo};
use rows::layout::SlotLayout;
use rows::tensor::{DataType, Dims, StorageType};

/// What a step of the model feeds and fetches, and how requests and states map to that.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The model's inputs, in its order.
    pub inputs: Vec<BoundInput>,
    /// The outputs that are fetched: those of states and those that responses may carry.
    pub outputs: Vec<BoundOutput>,
    /// The states, in the order of their pairs.
    pub states: Vec<BoundState>,
    /// What is counted for each sequence, for generated inputs.
    pub counters: Vec<Counter>,
    /// How rows whose growing states have different lengths share a run; `None` if they don't.
    pub growing_padding: Option<GrowingPadding>,
    /// Where a slot has the states, and behind them the contexts.
    pub slot: SlotLayout,
    /// A node that must not run over no steps, so that no input may be empty.
    pub needs_steps: Option<String>,
}

impl Binding {
    /// Binds the model, or returns the first thing that does not fit. `constant_outputs` are the same in every run.
    /// `initial_sources` has what the configuration names for initial states.
    pub fn new(
        config: &Config,
        state_pairs: &[StatePair],
        constant_outputs: &[String],
        signature: &Signature,
        initial_sources: &InitialSources,
    ) -> Result<Self, BindingError> {
        check_names(config, state_pairs)?;
        let mut feeds = Feeds::new(signature);
        let state_axes = |info: &TensorInfo| {
            let is_state = state_pairs.iter().any(|pair| pair.input == info.name);
            is_state.then(|| config.states.batch_axes(&info.name, info.symbols.len()))
        };
        let shared = signature.batch_symbols(state_axes);
        let batch_symbol = match *shared.as_slice() {
            [symbol] => Some(symbol),
            _ => None,
        };
        for tensor in &config.inputs {
            let (index, info) = feeds.find(&tensor.name, "'input'")?;
            feeds.add(index, request_input(config, tensor, info, feeds.has_default(index), batch_symbol)?)?;
        }
        let batch_symbol = feeds.batch_symbol(config);
        let mut outputs = Vec::new();
        let has_no_batch = |info: &TensorInfo| {
            let pair = state_pairs.iter().find(|pair| pair.output == info.name);
            let written = pair.and_then(|pair| config.states.written_dims(&pair.input));
            constant_outputs.contains(&info.name) || written.is_some_and(|state| state.batch_axis.is_none())
        };
        for tensor in &config.outputs {
            let (_, info) = find(&signature.outputs, &tensor.name, "'output'", "output")?;
            outputs.push(response_output(config, tensor, info, batch_symbol, has_no_batch(info))?);
        }
        let mut states = Vec::new();
        let batch_is_open = feeds.batch_is_open(config);
        let binder = StateBinder {
            config,
            initial_sources,
            signature,
            pairs: state_pairs,
            batch_symbol,
            batch_is_open,
            shared: &shared,
        };
        for pair in state_pairs {
            states.extend(binder.bind(pair, &mut feeds, &mut outputs, &states)?);
        }
        feed_without_requests(config, &mut feeds)?;
        let mut counters = feed_generated(config, &mut feeds, &states, batch_symbol.filter(|_| config.is_batched()))?;
        let mut inputs = feeds.into_inputs(&mut states, &mut counters)?;
        if states.iter().any(|state| state.dims.contains(&-1)) {
            forbid_padding(&mut inputs);
        }
        bind_trims(config, signature, &inputs, &mut outputs)?;
        mark_only_kept(&mut outputs, &states);
        let slot = lay_out(&mut inputs, &states).ok_or(BindingError::StatesOverflow)?;
        let growing_padding = bind_growing_padding(config, signature, &inputs, &mut states)?;
        Ok(Self { inputs, outputs, states, counters, growing_padding, slot, needs_steps: None })
    }

    /// Makes the model for initial states give the initial value of its states at each START.
    pub fn set_initial_from_model(&mut self, model: &InitialModel) {
        for output in &model.outputs {
            self.states[output.state].initial.content = InitialContent::Model;
        }
    }

    /// Sets the initial values of states; `None` leaves one as it is.
    pub fn set_initial(&mut self, initial: Vec<Option<Initial>>) {
        for (state, initial) in self.states.iter_mut().zip(initial) {
            state.initial = initial.unwrap_or_else(|| state.initial.clone());
        }
    }

    /// The inputs that requests carry, in their order.
    pub fn request_inputs(&self) -> impl Iterator<Item = (&BoundInput, &RequestInput)> + Clone {
        self.inputs.iter().filter_map(|input| match &input.source {
            Source::Request(request) => Some((input, request)),
            _ => None,
        })
    }

    /// The contexts, with the index of their input.
    pub fn contexts(&self) -> impl Iterator<Item = (usize, &RequestInput, BoundContext)> + Clone {
        self.inputs.iter().enumerate().filter_map(|(index, input)| match &input.source {
            Source::Request(request) => Some((index, request, request.context?)),
            _ => None,
        })
    }

    /// Whether anything of a row is copied to its sequence after a run.
    pub fn is_copied_back(&self) -> bool {
        self.has_varying_states() || self.contexts().next().is_some()
    }

    /// Whether an input tells the model that a sequence starts.
    pub fn has_start_control(&self) -> bool {
        let is_start =
            |input: &BoundInput| matches!(input.source, Source::Control(BoundControl::Flag { flag: Flag::Start, .. }));
        self.inputs.iter().any(is_start)
    }

    /// Whether a sequence has states of varying size.
    pub fn has_varying_states(&self) -> bool {
        self.states.iter().any(|state| matches!(state.place, StatePlace::Beside(_)))
    }

    /// Bytes of a row's states in a batch buffer.
    pub fn batch_bytes(&self) -> usize {
        let layouts = self.states.iter().filter_map(|state| match state.place {
            StatePlace::Slot(layout) => Some(layout.row_bytes()),
            StatePlace::Beside(_) => None,
        });
        layouts.sum()
    }

    /// The states of varying size, if their tensors may stay as ONNX Runtime makes them, which strings and states that
    /// are rounded may not: the number of each state, and its number beside the slot.
    pub fn growing_that_may_stay(&self) -> Vec<(usize, usize)> {
        let beside = self.states.iter().enumerate().filter_map(|(number, state)| match state.place {
            StatePlace::Slot(_) => None,
            StatePlace::Beside(beside) => Some((number, beside)),
        });
        let beside: Vec<_> = beside.collect();
        let can_stay = |state: &BoundState| state.data_type != DataType::Bytes && state.storage == StorageType::Exact;
        if beside.iter().all(|(number, _)| can_stay(&self.states[*number])) { beside } else { Vec::new() }
    }

    /// Whether an output is read whatever requests ask for: as a state, or as the lengths of another.
    pub fn is_needed(&self, output: usize) -> bool {
        self.states.iter().any(|state| state.output == output) || trim_lengths(&self.outputs).contains(&output)
    }

    /// Bytes of a slot that are where the model runs: the states. The contexts behind them are on the host, where
    /// inputs are gathered.
    pub fn device_bytes(&self) -> usize {
        self.slot.part_bytes(self.states.len())
    }
}

/// The outputs that have the lengths of others.
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

/// Checks names in parameters that must be listed elsewhere in the configuration.
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
    for state in &config.states.dims {
        unknown("state_dims", &state.name, "a state's input", states())?;
    }
    for context in &config.contexts {
        unknown("input_context", &context.input, "listed under 'input'", inputs())?;
    }
    for name in &config.held_inputs {
        unknown("held_inputs", name, "listed under 'input'", inputs())?;
    }
    for padded in &config.ragged.inputs {
        unknown("padded_inputs", &padded.input, "listed under 'input'", inputs())?;
    }
    for padded in &config.ragged.outputs {
        unknown("padded_outputs", &padded.output, "listed under 'output'", outputs())?;
    }
    Ok(())
}

/// The index of an output, which is fetched from now on.
fn fetched(outputs: &mut Vec<BoundOutput>, info: &TensorInfo) -> usize {
    if let Some(index) = outputs.iter().position(|output| output.name == info.name) {
        return index;
    }
    outputs.push(BoundOutput {
        name: info.name.clone(),
        data_type: info.data_type,
        batch_axis: None,
        form: ShapeForm::Plain,
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

fn check_type(what: String, configured: DataType, model: DataType) -> Result<(), BindingError> {
    if configured == model { Ok(()) } else { Err(BindingError::DataType { what, configured, model }) }
}

/// A tensor's name for Triton. No name has a NUL; one that had would become empty.
fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

/// Whether two dimensions can be the same; an open one can be any.
const fn agree(a: i64, b: i64) -> bool {
    a == b || a < 0 || b < 0
}

/// Whether a batch dimension of this length takes every batch that may come.
const fn batches(dim: i64, config: &Config) -> bool {
    dim < 0 || (dim == 1 && config.max_batch_size == 1)
}

fn all_agree(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| agree(a, b))
}

#[cfg(test)]
mod feature_tests;
#[cfg(test)]
mod generated_tests;
#[cfg(test)]
mod tests;
