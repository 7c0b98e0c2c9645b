//! Windows: along which axis an input is cut, how an output has the steps of a request, and how many a request may have.

use rows::tensor::{DataType, Dims, WindowLayout, element_count};

use super::bound::{BoundInput, BoundOutput, Gathered, row_dims};
use super::context::BoundWindow;
use super::error::{BindingError, Result, bad};
use super::shapes::{INPUT, Listed, ShapeForm, configured, describe};
use crate::config::{Config, Flag, INPUT_WINDOWS, MAX_STEPS, REPEAT, TensorConfig, USUAL_MOST_STEPS, Window};
use crate::onnx::{TensorInfo, open_axes};

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
            return Err(error(config, format!("the model's dims {} have no axis {axis}", Dims(of_model))));
        }
        let axes: Vec<usize> = (0..of_model.len()).filter(|&axis| wanted.is_none_or(|wanted| wanted == axis)).collect();
        match axes.iter().copied().filter(fits).collect::<Vec<_>>().as_slice() {
            &[axis] => {
                let is_padded = config.ragged.inputs.iter().any(|padded| padded.input == tensor.name);
                Ok(Some(Self { written, axis, context: length, is_padded }))
            }
            [] => Err(error(config, does_not_fit(listed, written, length, &axes))),
            axes => {
                let lines = axes.iter().map(|&axis| config.windows.line_with_axis(&tensor.name, axis));
                let (model, lines) = (Dims(of_model), lines.collect::<Vec<_>>().join(" or "));
                Err(error(config, format!("it fits more than one axis of the model's {model}: write {lines}")))
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
        Err(error(config, why))
    }
}

/// Dims that let requests have any length along an axis.
pub(super) fn opened(dims: &[i64], axis: usize) -> Vec<i64> {
    let mut dims = dims.to_vec();
    dims[axis] = -1;
    dims
}

pub fn check_ends(config: &Config) -> Result<()> {
    if config.windows.are_cut() && !config.infer_end_requests {
        let why = "with 'infer_end_requests' 0, an END would drop the windows that it brings: leave that parameter out, \
                   and send END with 0 elements if it brings none";
        return Err(error(config, why.to_owned()));
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

fn error(config: &Config, why: String) -> BindingError {
    if !config.windows.are_cut() {
        return bad(REPEAT, config.repeat.to_string(), why);
    }
    let entries: Vec<String> = config.windows.inputs.iter().map(Window::to_string).collect();
    bad(INPUT_WINDOWS, entries.join(" "), why)
}

/// Finds how an answer has the steps of its request in an output: along its only open dimension, else along one of their
/// own. `matched` matches dims without that one.
pub(super) fn match_steps(
    listed: Listed,
    matched: impl Fn(Listed) -> Result<(Option<usize>, ShapeForm)>,
) -> Result<(Option<usize>, ShapeForm, Option<Gathered>)> {
    let Listed { config, tensor, info, .. } = listed;
    let open = |listed: Listed, batch: Option<usize>| {
        let mut open = open_axes(&info.dims, batch);
        open.retain(|&axis| listed.configured(axis).is_none_or(|dim| dim < 0));
        open
    };
    if let Ok((batch, form)) = matched(listed)
        && let [axis] = *open(listed, batch)
    {
        let in_front = usize::from(form == ShapeForm::Unbatched);
        return Ok((batch, form, Some(Gathered::Joined { axis: axis + in_front })));
    }
    if let Some((-1, behind)) = tensor.dims.split_first() {
        let of_step = TensorConfig { dims: behind.to_vec(), ..tensor.clone() };
        let of_step = Listed { tensor: &of_step, ..listed };
        if let Ok((batch, form)) = matched(of_step)
            && open(of_step, batch).is_empty()
        {
            let at = usize::from(config.is_batched() && form != ShapeForm::BatchInside);
            return Ok((batch, form, Some(Gathered::Stacked { at })));
        }
    }
    let (name, dims) = (&tensor.name, Dims(&tensor.dims));
    if info.dims.is_empty() && config.is_batched() {
        return Err(error(config, format!("the model does not say which dims its output '{name}' has")));
    }
    let behind = &info.dims[usize::from(config.is_batched() && tensor.dims.len() <= info.dims.len())..];
    let joins = "but an answer joins the outputs of all steps of its request";
    let why = match behind.iter().filter(|&&dim| dim < 0).count() {
        0 => {
            let wanted = [&[-1], behind].concat();
            format!("output '{name}' has dims {dims}, {joins}: write dims {}", Dims(&wanted))
        }
        1 => format!("output '{name}' has dims {dims}, {joins} along the open dimension: write dims {}", Dims(behind)),
        _ => format!(
            "output '{name}' is {} in the model, and the steps of a request can stand along one open dimension: write the \
             length of the others in its dims",
            Dims(&info.dims)
        ),
    };
    Err(error(config, why))
}

/// The shape of an output in an answer to a request that made no step.
pub(super) fn without_steps(
    listed: &[i64],
    model: &[i64],
    (batch_axis, form): (Option<usize>, ShapeForm),
    gathered: Gathered,
) -> Vec<i64> {
    let of_step = if matches!(gathered, Gathered::Stacked { .. }) { &listed[1..] } else { listed };
    let dim = |(axis, &dim): (usize, &i64)| {
        let written = configured(of_step, model.len(), axis).unwrap_or(-1);
        if Some(axis) == batch_axis { 1 } else { dim.max(written).max(0) }
    };
    let mut dims: Vec<i64> = model.iter().enumerate().map(dim).collect();
    if form == ShapeForm::Unbatched || dims.is_empty() {
        dims.insert(0, 1);
    }
    match gathered {
        Gathered::Stacked { at } => dims.insert(at, 0),
        Gathered::Joined { axis } => dims[axis] = 0,
    }
    dims
}

/// The most steps and answer bytes of a request. The default number of steps suits an hour of speech, and is lower if their
/// outputs have many bytes.
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
        return Err(error(config, why));
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
