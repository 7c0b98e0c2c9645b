//! `repeat`: which outputs of a step become which inputs of the next one, and which end the steps.

use rows::tensor::DataType;

use super::bound::{BoundInput, BoundOutput, BoundState, fetched};
use super::elements::element_bytes;
use super::error::{Result, bad};
use super::shapes::{ShapeForm, describe};
use crate::config::{Config, Feed, Flag, REPEAT, REPEAT_UNTIL, Stop};
use crate::onnx::{Signature, TensorInfo, agree};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundRepeat {
    pub feeds: Vec<BoundFeed>,
    pub until: Vec<BoundStop>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundFeed {
    /// Index in `Binding::outputs`.
    pub output: usize,
    /// Index in `Binding::inputs`.
    pub input: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundStop {
    /// Index in `Binding::outputs`.
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
) -> Result<Option<BoundRepeat>> {
    if !config.repeat.is_any() {
        return Ok(None);
    }
    check_together(config, inputs)?;
    let mut binder = Binder { config, signature, inputs, outputs, states };
    let feeds = config.repeat.feeds.iter().map(|feed| binder.feed(feed)).collect::<Result<_>>()?;
    let until = config.repeat.until.iter().map(|stop| binder.stop(stop)).collect::<Result<_>>()?;
    Ok(Some(BoundRepeat { feeds, until }))
}

/// Refuses `repeat` with other parameters or controls that exclude it.
fn check_together(config: &Config, inputs: &[BoundInput]) -> Result<()> {
    let written = config.repeat.to_string();
    if config.windows.are_cut() {
        let why = "the model has 'input_windows', with which a request makes a step for each window that it brings: leave out \
                   one of the two";
        return Err(bad(REPEAT, written, why));
    }
    if let Some(BoundInput { name, .. }) = inputs.iter().find(|input| input.is_flag(Flag::End))
        && !config.repeat.until.is_empty()
    {
        let why = format!(
            "'{name}' tells the model of END (CONTROL_SEQUENCE_END), but with 'repeat_until' the backend does not know \
             before a step whether it is the last: give the input a value in 'constant_inputs'"
        );
        return Err(bad(REPEAT, written, why));
    }
    Ok(())
}

struct Binder<'a> {
    config: &'a Config,
    signature: &'a Signature,
    inputs: &'a [BoundInput],
    /// Those that a step reads are fetched, even if no response carries them.
    outputs: &'a mut Vec<BoundOutput>,
    states: &'a [BoundState],
}

impl<'a> Binder<'a> {
    fn feed(&mut self, feed: &Feed) -> Result<BoundFeed> {
        let wrong = |why: String| bad(REPEAT, feed.to_string(), why);
        let info = self.find_output(&feed.output).map_err(wrong)?;
        let name = &feed.input;
        let Some(index) = self.inputs.iter().position(|input| input.name == *name) else {
            let known = self.inputs.iter().map(|input| input.name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(wrong(format!("the model has no input '{name}' (it has {known})")));
        };
        let input = &self.inputs[index];
        let Some(request) = input.request() else {
            return Err(wrong(format!("'{name}' is no input that requests carry")));
        };
        if request.is_held {
            let why = "which a sequence keeps as its client sent it: leave it out of one of the two";
            return Err(wrong(format!("'{name}' is one of 'held_inputs', {why}")));
        }
        if request.context.is_some() {
            let why = "and a step reads only what the one before it gave: leave out one of the two";
            return Err(wrong(format!("'{name}' has an 'input_context', {why}")));
        }
        let index_of_output = fetched(self.outputs, info);
        let output = &mut self.outputs[index_of_output];
        if !output.is_response {
            if !self.config.ragged.inputs.is_empty() {
                let listed = format!("list '{}' under 'output'", info.name);
                return Err(wrong(format!("with 'padded_inputs', {listed}, so that its rows have their lengths")));
            }
            // Only the input reads it, so its rows are where the input has them.
            output.batch_axis = input.batch_axis;
        }
        let (of_output, of_input) = (describe(info.data_type, &info.dims), describe(input.data_type, &input.dims));
        let is_batch = |axis: usize| input.batch_axis == Some(axis);
        let fits = info.dims.len() == input.dims.len()
            && (0..info.dims.len()).all(|axis| is_batch(axis) || agree(info.dims[axis], input.dims[axis]));
        // ONNX Runtime shows an output of unknown rank like a scalar.
        let is_known = !info.dims.is_empty() || input.dims.is_empty();
        if info.data_type != input.data_type || (is_known && !fits) || output.batch_axis != input.batch_axis {
            let why =
                format!("is {of_output}, and input '{name}' is {of_input}: they must have one type and the same dims");
            return Err(wrong(format!("output '{}' {why}", info.name)));
        }
        Ok(BoundFeed { output: index_of_output, input: index })
    }

    fn stop(&mut self, stop: &Stop) -> Result<BoundStop> {
        let value = if let [value] = &*stop.values { value.clone() } else { format!("[{}]", stop.values.join(", ")) };
        let wrong = |why: String| bad(REPEAT_UNTIL, format!("{}={value}", stop.output), why);
        let info = self.find_output(&stop.output).map_err(wrong)?;
        let values = stop.values.iter().map(|text| element_bytes(info.data_type, text)).collect::<Result<Vec<_>, _>>();
        let values = values.map_err(|why| match info.data_type {
            DataType::Bytes => {
                wrong(format!("output '{}' has strings, and steps end at numbers or TYPE_BOOL", info.name))
            }
            _ => wrong(why),
        })?;
        let known = self.outputs.len();
        let index = fetched(self.outputs, info);
        let output = &mut self.outputs[index];
        // It isn't listed under 'output', so its batch is first, as in Triton's own form.
        if index == known && self.config.is_batched() {
            output.batch_axis = Some(0);
        }
        // Each row decides for itself whether it continues.
        if self.config.max_rows_per_run > 1 && (output.batch_axis.is_none() || output.form == ShapeForm::Unbatched) {
            let why = "has no batch dimension, so it cannot end the steps of one row";
            return Err(wrong(format!("output '{}' {why}", info.name)));
        }
        Ok(BoundStop { output: index, values })
    }

    /// An output of the model that a step can read, or why there is none.
    fn find_output(&self, name: &str) -> Result<&'a TensorInfo, String> {
        if self.states.iter().any(|state| self.outputs[state.output].name == name) {
            let help = "if it is none, list its input under 'input'";
            return Err(format!("output '{name}' is a state, which the next step reads anyway; {help}"));
        }
        self.signature.output(name).ok_or_else(|| {
            if self.signature.input(name).is_some() {
                return format!("'{name}' is an input: the output stands first, '<<<output, input>>>'");
            }
            format!("the model has no output '{name}' (it has {})", self.signature.output_names().join(", "))
        })
    }
}
