//! Binds a model: finds what feeds each of its inputs and what each output is for, or the first thing that doesn't fit.

use rows::layout::SlotLayout;

use super::bound::{BoundInput, BoundOutput, BoundState, Source};
use super::error::BindingError;
use super::feeds::{Feeds, feed_without_requests};
use super::generated::feed_generated;
use super::growing_padding::bind_growing_padding;
use super::model::{Binding, trim_lengths};
use super::requests::{bind_trims, forbid_padding, request_input, response_output};
use super::shapes::find;
use super::states::StateBinder;
use crate::config::{Config, InitialSources, StatePair};
use crate::onnx::{Signature, TensorInfo};

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
