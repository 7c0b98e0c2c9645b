//! What makes a request take several steps: along which axis windows cut an input, which outputs of a step `repeat`
//! gives to the next one, and how many steps a request may have.

use rows::tensor::{DataType, Dims, WindowLayout, element_count};

use super::bound::{BoundInput, BoundOutput, BoundState, BoundWindow, fetched, row_dims};
use super::elements::element_bytes;
use super::error::{BindingError, Result, bad};
use super::fit::{INPUT, Listed, ShapeForm, describe};
use crate::config::{
    Config, Feed, Flag, INPUT_WINDOWS, MAX_STEPS, REPEAT, REPEAT_UNTIL, Stop, TensorConfig, USUAL_MOST_STEPS, Window,
};
use crate::onnx::{Signature, TensorInfo, agree};

/// Bytes that the outputs of a request may have together, unless `max_steps_per_request` allows more.
const MOST_ANSWER_BYTES: usize = 256 << 20;

/// How many steps a request may make, and how many bytes their outputs may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MostSteps {
    pub steps: usize,
    pub answer_bytes: usize,
}

/// An entry of `input_windows` whose axis is found.
pub(super) struct WrittenWindow<'a> {
    written: &'a Window,
    pub axis: usize,
    /// Elements of a context in front of it.
    context: usize,
    is_padded: bool,
}

impl<'a> WrittenWindow<'a> {
    pub fn find(listed: Listed<'a>) -> Result<Option<Self>> {
        let Listed { config, tensor, info, .. } = listed;
        let Some(written) = config.windows.of(&tensor.name) else { return Ok(None) };
        let context = config.context_of(&tensor.name);
        let (length, context_axis) = context.map_or((0, None), |context| (context.length, context.axis));
        let of_model = &info.dims;
        let fits = |&axis: &usize| {
            let matched = listed.match_dims(INPUT, &opened(of_model, axis));
            written.fits(of_model[axis], length)
                // Triton checks requests against the configuration, and these may have any length.
                && listed.configured(axis) == Some(-1)
                && matched.is_ok_and(|(batch, _)| batch != Some(axis))
        };
        let wanted = written.axis.or(context_axis);
        if let Some(axis) = wanted.filter(|&axis| axis >= of_model.len()) {
            return Err(steps_error(config, format!("the model's dims {} have no axis {axis}", Dims(of_model))));
        }
        let axes: Vec<usize> = (0..of_model.len()).filter(|&axis| wanted.is_none_or(|wanted| wanted == axis)).collect();
        match axes.iter().copied().filter(fits).collect::<Vec<_>>().as_slice() {
            &[axis] => {
                let is_padded = config.ragged.inputs.iter().any(|padded| padded.input == tensor.name);
                Ok(Some(Self { written, axis, context: length, is_padded }))
            }
            [] => Err(steps_error(config, does_not_fit(listed, written, length, &axes))),
            axes => {
                let lines = axes.iter().map(|&axis| config.windows.line_with_axis(&tensor.name, axis));
                let (model, lines) = (Dims(of_model), lines.collect::<Vec<_>>().join(" or "));
                Err(steps_error(config, format!("it fits more than one axis of the model's {model}: write {lines}")))
            }
        }
    }

    /// The configuration and the input as if the model had a fixed length there: that of a window and its context.
    pub fn apply(&self, config: &Config, info: &TensorInfo) -> (Config, TensorInfo) {
        // With these, the context and the dims are found as for any other input.
        let (mut config, mut info) = (config.clone(), info.clone());
        if let Some(context) = config.written.contexts.iter_mut().find(|context| context.input == self.written.input) {
            context.axis = context.axis.or(Some(self.axis));
        }
        if !self.is_padded {
            info.dims[self.axis] = (self.written.length + self.context) as i64;
        }
        (config, info)
    }

    pub fn bind(
        &self,
        Listed { config, tensor, .. }: Listed,
        model: &[i64],
        (batch_axis, form): (Option<usize>, ShapeForm),
        is_held: bool,
    ) -> Result<BoundWindow> {
        let Window { length, pads, input, .. } = self.written;
        let axis = self.axis;
        let context = config.context_of(input);
        let mut row = model.to_vec();
        row[axis] = 1;
        let layout = WindowLayout::new(tensor.data_type, &row, batch_axis, axis);
        let bytes = layout.map(|layout| layout.window_bytes(1)).filter(|bytes| bytes.checked_mul(*length).is_some());
        let why = if let Some(context) = context.filter(|context| context.axis != Some(axis)) {
            let of_context = context.axis.unwrap_or_default();
            format!("'{input}' has windows along axis {axis} and an input_context along axis {of_context}")
        } else if let Some(new) = context.and_then(|context| context.new).filter(|new| new != length) {
            format!("'{input}' has {new} new elements in 'input_context': write the same number in both")
        } else if tensor.optional {
            format!("'{input}' is optional, but windows need an input that each request carries")
        } else if is_held {
            format!("'{input}' is one of 'held_inputs', which requests may leave out")
        } else if tensor.data_type == DataType::Bytes {
            format!("'{input}' is {}, but windows need an input of numbers", describe(tensor.data_type, model))
        } else if form == ShapeForm::Unbatched && config.max_batch_size > 1 {
            format!(
                "'{input}' has no batch dimension, so sequences that share a batch cannot each have windows: set \
                 max_batch_size to 1"
            )
        } else if let Some(element_bytes) = bytes {
            return Ok(BoundWindow { axis, length: *length, element_bytes, pads: *pads });
        } else {
            let why = "and all dimensions but the batch and that of the windows need a length: write it in the dims of the \
                       input";
            format!("'{input}' is {} in the model, {why}", Dims(model))
        };
        Err(steps_error(config, why))
    }
}

/// Dims that let requests have any length along an axis.
pub(super) fn opened(dims: &[i64], axis: usize) -> Vec<i64> {
    let mut dims = dims.to_vec();
    dims[axis] = -1;
    dims
}

pub(super) fn check_ends(config: &Config) -> Result<()> {
    if config.windows.are_cut() && !config.infer_end_requests {
        let why = "with 'infer_end_requests' 0, an END would drop the windows that it brings: leave that parameter out, \
                   and send END with 0 elements if it brings none";
        return Err(steps_error(config, why.to_owned()));
    }
    Ok(())
}

/// Says that windows do not fit, and which dims would.
fn does_not_fit(listed: Listed, written: &Window, context: usize, axes: &[usize]) -> String {
    let Listed {
        config, tensor: TensorConfig { name, data_type, dims, .. }, info: TensorInfo { dims: model, .. }, ..
    } = listed;
    let behind = usize::from(dims.len() < model.len());
    let can_be = axes.iter().copied().filter(|&axis| axis >= behind && written.fits(model[axis], context));
    // If the dims are the model's, -1 in the first place marks the batch.
    let entries = can_be.filter(|&axis| !(config.is_batched() && behind == 0 && axis == 0)).map(|axis| {
        let wanted = opened(model, axis);
        format!("{{ name: '{name}' data_type: {data_type} dims: {} }}", Dims(&wanted[behind..]))
    });
    let entries: Vec<_> = entries.collect();
    let with_context = if context == 0 { String::new() } else { format!(" and {context} of context in front") };
    let (length, model, dims, entries) = (written.length, Dims(model), Dims(dims), entries.join(" or "));
    if entries.is_empty() {
        let wanted = length + context;
        return format!(
            "no dimension of the model's {model} is {wanted}, which windows of {length}{with_context} need, or open"
        );
    }
    format!(
        "dims {dims} of input '{name}' do not allow any number of windows of {length}{with_context} for the model's {model}: \
         write input {entries}"
    )
}

/// The most steps and answer bytes of a request. The default number of steps suits an hour of speech, and is lower if
/// their outputs have many bytes.
pub(super) fn bound_steps(config: &Config, inputs: &[BoundInput], outputs: &[BoundOutput]) -> Result<MostSteps> {
    if !config.windows.are_cut() && !config.repeat.is_any() {
        return Ok(MostSteps { steps: 1, answer_bytes: usize::MAX });
    }
    let start = inputs.iter().find(|input| input.is_flag(Flag::Start));
    // With 'repeat' alone, each request makes a step.
    if let Some(BoundInput { name, .. }) = start.filter(|_| config.windows.are_cut()) {
        let why = format!(
            "'{name}' tells the model of START (CONTROL_SEQUENCE_START), but a START may make no step: give the states' \
             initial values in 'initial_states', and give the input the value for no START in 'constant_inputs'"
        );
        return Err(steps_error(config, why));
    }
    let bytes = |output: &BoundOutput| {
        let row = row_dims(output.dims.as_ref()?, output.batch_axis);
        element_count(&row)?.checked_mul(output.data_type.byte_size()?)
    };
    let of_step = outputs.iter().filter(|output| output.is_response).filter_map(bytes).fold(0, usize::saturating_add);
    // One step always runs, as it does in a model without windows.
    let most = (MOST_ANSWER_BYTES / of_step.max(1)).clamp(1, USUAL_MOST_STEPS);
    let most = config.windows.most_steps.unwrap_or(most);
    let why = "the outputs of so many steps have more bytes than an address can count";
    let bytes = of_step.checked_mul(most).ok_or_else(|| bad(MAX_STEPS, most.to_string(), why))?;
    Ok(MostSteps { steps: most, answer_bytes: bytes.max(MOST_ANSWER_BYTES) })
}

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

pub(super) fn steps_error(config: &Config, why: String) -> BindingError {
    if !config.windows.are_cut() {
        return bad(REPEAT, config.repeat.to_string(), why);
    }
    let entries: Vec<String> = config.windows.inputs.iter().map(Window::to_string).collect();
    bad(INPUT_WINDOWS, entries.join(" "), why)
}
