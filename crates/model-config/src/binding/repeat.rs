//! `repeat`: which outputs of a step become which inputs of the next one, and which end the steps.

use rows::tensor::DataType;

use super::bound::{BoundInput, BoundOutput, BoundState, Flag, ShapeForm, Source, fetched};
use super::elements::element_bytes;
use super::error::{BindingError, bad};
use super::shapes::describe;
use crate::config::{Config, Feed, REPEAT, REPEAT_UNTIL, Stop};
use crate::onnx::{Signature, TensorInfo, agree};

/// What a step of a request gives to the next one, and what ends the steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundRepeat {
    /// Outputs that become inputs.
    pub feeds: Vec<BoundFeed>,
    /// Outputs that end the steps.
    pub until: Vec<BoundStop>,
}

/// An output that becomes an input of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundFeed {
    /// Index in [`Binding::outputs`](super::model::Binding::outputs).
    pub output: usize,
    /// Index in [`Binding::inputs`](super::model::Binding::inputs).
    pub input: usize,
}

/// An output that ends the steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundStop {
    /// Index in [`Binding::outputs`](super::model::Binding::outputs).
    pub output: usize,
    /// The values of an element that end the steps.
    pub values: Vec<Vec<u8>>,
}

impl BoundRepeat {
    /// Whether an output is read after each step.
    pub fn reads(&self, output: usize) -> bool {
        self.feeds.iter().any(|feed| feed.output == output) || self.until.iter().any(|stop| stop.output == output)
    }
}

/// Binds `repeat` and `repeat_until`; `None` without them.
pub(super) fn bind_repeat(
    config: &Config,
    signature: &Signature,
    inputs: &[BoundInput],
    outputs: &mut Vec<BoundOutput>,
    states: &[BoundState],
) -> Result<Option<BoundRepeat>, BindingError> {
    if !config.repeat.is_any() {
        return Ok(None);
    }
    check_together(config, inputs)?;
    let feeds = config.repeat.feeds.iter().map(|feed| bind_feed(config, signature, inputs, outputs, states, feed));
    let feeds = feeds.collect::<Result<Vec<_>, _>>()?;
    let until = config.repeat.until.iter().map(|stop| bind_stop(config, signature, outputs, states, stop));
    Ok(Some(BoundRepeat { feeds, until: until.collect::<Result<Vec<_>, _>>()? }))
}

/// Refuses `repeat` with other parameters or controls that exclude it.
fn check_together(config: &Config, inputs: &[BoundInput]) -> Result<(), BindingError> {
    let written = config.repeat.to_string();
    if config.windows.are_cut() {
        let why = "the model has 'input_windows', with which a request makes a step for each window that it brings: leave out \
                   one of the two";
        return Err(bad(REPEAT, written, why.to_owned()));
    }
    match inputs.iter().find(|input| input.is_flag(Flag::End)) {
        Some(BoundInput { name, .. }) if !config.repeat.until.is_empty() => {
            let why = format!(
                "'{name}' tells the model of END (CONTROL_SEQUENCE_END), but with 'repeat_until' the backend does not \
                 know before a step whether it is the last: give the input a value in 'constant_inputs'"
            );
            Err(bad(REPEAT, written, why))
        }
        _ => Ok(()),
    }
}

fn bind_feed(
    config: &Config,
    signature: &Signature,
    inputs: &[BoundInput],
    outputs: &mut Vec<BoundOutput>,
    states: &[BoundState],
    feed: &Feed,
) -> Result<BoundFeed, BindingError> {
    let wrong = |why: String| bad(REPEAT, feed.to_string(), why);
    let info = find_output(signature, outputs, states, &feed.output).map_err(wrong)?;
    let is_input = |input: &BoundInput| input.name == feed.input;
    let Some(index) = inputs.iter().position(is_input) else {
        let known = inputs.iter().map(|input| input.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(wrong(format!("the model has no input '{}' (it has {known})", feed.input)));
    };
    let input = &inputs[index];
    let Source::Request(request) = &input.source else {
        return Err(wrong(format!("'{}' is no input that requests carry", input.name)));
    };
    if request.is_held {
        return Err(wrong(format!(
            "'{}' is one of 'held_inputs', which a sequence keeps as its client sent it: leave it out of one of the two",
            input.name
        )));
    }
    if request.context.is_some() {
        return Err(wrong(format!(
            "'{}' has an 'input_context', and a step reads only what the one before it gave: leave out one of the two",
            input.name
        )));
    }
    let output = fetched(outputs, info);
    if !outputs[output].is_response {
        if !config.ragged.inputs.is_empty() {
            let why = format!(
                "with 'padded_inputs', list '{}' under 'output', so that its rows have their lengths",
                info.name
            );
            return Err(wrong(why));
        }
        // Only the input reads it, so its rows are where the input has them.
        outputs[output].batch_axis = input.batch_axis;
    }
    let (of_output, of_input) = (describe(info.data_type, &info.dims), describe(input.data_type, &input.dims));
    let is_batch = |axis: usize| input.batch_axis == Some(axis);
    let fits = info.dims.len() == input.dims.len()
        && (0..info.dims.len()).all(|axis| is_batch(axis) || agree(info.dims[axis], input.dims[axis]));
    // ONNX Runtime shows an output of unknown rank like a scalar.
    let is_known = !info.dims.is_empty() || input.dims.is_empty();
    if info.data_type != input.data_type || (is_known && !fits) || outputs[output].batch_axis != input.batch_axis {
        return Err(wrong(format!(
            "output '{}' is {of_output}, and input '{}' is {of_input}: they must have one type and the same dims",
            info.name, input.name
        )));
    }
    Ok(BoundFeed { output, input: index })
}

fn bind_stop(
    config: &Config,
    signature: &Signature,
    outputs: &mut Vec<BoundOutput>,
    states: &[BoundState],
    stop: &Stop,
) -> Result<BoundStop, BindingError> {
    let value = if stop.values.len() == 1 { stop.values[0].clone() } else { format!("[{}]", stop.values.join(", ")) };
    let wrong = |why: String| bad(REPEAT_UNTIL, format!("{}={value}", stop.output), why);
    let info = find_output(signature, outputs, states, &stop.output).map_err(wrong)?;
    let values = stop.values.iter().map(|text| element_bytes(info.data_type, text)).collect::<Result<Vec<_>, _>>();
    let values = values.map_err(|why| match info.data_type {
        DataType::Bytes => wrong(format!("output '{}' has strings, and steps end at numbers or TYPE_BOOL", info.name)),
        _ => wrong(why),
    })?;
    let is_new = !outputs.iter().any(|output| output.name == info.name);
    let output = fetched(outputs, info);
    // It isn't listed under 'output', so nothing but Triton's own form says where its batch is: first.
    if is_new && config.is_batched() {
        outputs[output].batch_axis = Some(0);
    }
    if config.max_rows_per_run > 1
        && (outputs[output].batch_axis.is_none() || outputs[output].form == ShapeForm::Unbatched)
    {
        return Err(wrong(format!(
            "output '{}' has no batch dimension, so it cannot end the steps of one row",
            info.name
        )));
    }
    Ok(BoundStop { output, values })
}

/// An output of the model that a step can read, or why there is none.
fn find_output<'a>(
    signature: &'a Signature,
    outputs: &[BoundOutput],
    states: &[BoundState],
    name: &str,
) -> Result<&'a TensorInfo, String> {
    if states.iter().any(|state| outputs[state.output].name == name) {
        return Err(format!(
            "output '{name}' is a state, which the next step reads anyway; if it is none, list its input under 'input'"
        ));
    }
    signature.output(name).ok_or_else(|| {
        if signature.input(name).is_some() {
            return format!("'{name}' is an input: the output stands first, '<<<output, input>>>'");
        }
        let known: Vec<&str> = signature.outputs.iter().map(|info| info.name.as_str()).collect();
        format!("the model has no output '{name}' (it has {})", known.join(", "))
    })
}
