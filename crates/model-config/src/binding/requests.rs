//! Inputs that requests carry and outputs that responses carry: how their shapes relate to the model's, and with rows of
//! different lengths in one batch, which input takes the lengths and which part of each output is a row's.

use rows::tensor::{DataType, Dims};

use super::bound::{BoundInput, BoundOutput, RequestInput, Source, Trim, TrimBy, fetched};
use super::context::WrittenContext;
use super::error::{BindingError, Result, bad};
use super::shapes::{INPUT, Listed, ShapeForm, batch_of_elements, check_type, describe, empty_dims, find_output};
use super::windows::{WrittenWindow, match_steps, opened, without_steps};
use crate::config::{Config, PaddedInput, PaddedOutput};
use crate::onnx::{Signature, TensorInfo, all_agree, open_axes};

/// Binds an input of requests; `has_default` says that the model has a value for it.
pub(super) fn request_input(listed: Listed, has_default: bool) -> Result<BoundInput> {
    let Listed { config, tensor, info, .. } = listed;
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let is_held = config.held_inputs.contains(&tensor.name);
    if tensor.optional && !has_default && !is_held && config.state_api.is_none() {
        return Err(BindingError::Optional { name: tensor.name.clone() });
    }
    let window = WrittenWindow::find(listed)?;
    let of_window = window.as_ref().map(|window| window.apply(config, info));
    let listed = of_window.as_ref().map_or(listed, |(config, info)| Listed { config, info, ..listed });
    let Listed { config, info, .. } = listed;
    let context = WrittenContext::find(listed)?;
    if context.is_some() && is_held {
        let why = "the input has an input_context, which would prepend the end of the kept elements to those elements: \
                   take the input out of one of the two parameters";
        return Err(bad("held_inputs", &tensor.name, why));
    }
    // The model's dims without the context, as clients send them.
    let mut dims = info.dims.clone();
    if let Some(context) = &context {
        context.take_off(&mut dims);
    }
    let sent = window.as_ref().map_or_else(|| dims.clone(), |window| opened(&dims, window.axis));
    let (batch_axis, form) = listed.match_dims(INPUT, &sent)?;
    if context.is_some() && form == ShapeForm::Unbatched && config.max_batch_size > 1 {
        let why = "the input has no batch dimension, so sequences that share a batch cannot each have a context: set \
                   max_batch_size to 1";
        return Err(bad("input_context", &tensor.name, why));
    }
    // Triton checks requests against a dimension that only the configuration fixes.
    open_axes(&dims, None).into_iter().for_each(|axis| dims[axis] = listed.configured(axis).unwrap_or(-1));
    let padded = config.ragged.inputs.iter().find(|padded| padded.input == tensor.name);
    let ragged_axis = padded.map(|padded| ragged_axis(padded, &dims, batch_axis)).transpose()?;
    if let Some(context) = &context {
        context.check_padding(ragged_axis)?;
        context.put_back(&mut dims);
    }
    let context = context.map(|context| context.bind(&dims, batch_axis)).transpose()?;
    let window = window.map(|window| window.bind(listed, &dims, (batch_axis, form), is_held)).transpose()?;
    let source = Source::Request(RequestInput {
        // Numbered when the slot is laid out, after all inputs are bound.
        position: 0,
        form,
        // With the State API, Triton lets a request leave every input out, and this backend checks what is missing.
        optional: tensor.optional && has_default,
        is_held,
        context,
        window,
        ragged_axis,
        is_padded: ragged_axis.is_some(),
        steps_multiple: None,
    });
    Ok(BoundInput { dims, ..BoundInput::new(info, batch_axis, source) })
}

/// Binds an output of responses; `has_no_batch` says that all rows of a run have the same value of it, or a run has one
/// row.
pub(super) fn response_output(listed: Listed, has_no_batch: bool) -> Result<BoundOutput> {
    let Listed { config, tensor, info, .. } = listed;
    check_type(format!("output '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let matched = |listed: Listed| {
        if has_no_batch && config.is_batched() && all_agree(&listed.tensor.dims, &info.dims) {
            Ok((None, ShapeForm::Unbatched))
        } else if info.dims.is_empty() && config.is_batched() && !config.gathers_steps() {
            // A model may say nothing at all about an output's shape, not even its rank. Only a run shows it.
            Ok((Some(0), ShapeForm::Plain))
        } else {
            listed.match_dims("output", &info.dims)
        }
    };
    let (batch_axis, form, gathered) = if config.gathers_steps() {
        match_steps(listed, matched)?
    } else {
        let (batch_axis, form) = matched(listed)?;
        (batch_axis, form, None)
    };
    let has_rank = !info.dims.is_empty() || !config.is_batched();
    // ONNX Runtime allocates strings itself.
    let is_known = has_rank && open_axes(&info.dims, batch_axis).is_empty() && info.data_type != DataType::Bytes;
    let dims = is_known.then(|| info.dims.clone());
    let empty_dims = if let Some(gathered) = gathered {
        without_steps(&tensor.dims, &info.dims, (batch_axis, form), gathered)
    } else if form == ShapeForm::Unbatched && config.is_batched() {
        // Triton adds a dimension at the front. Its length of 0 makes the output empty.
        [0].into_iter().chain(info.dims.iter().map(|&dim| dim.max(0))).collect()
    } else {
        empty_dims(&info.dims, batch_axis)
    };
    Ok(BoundOutput {
        batch_axis,
        form,
        dims,
        is_response: true,
        empty_dims,
        gathered,
        ..BoundOutput::new(&info.name, info.data_type)
    })
}

/// The batch axis of a tensor of lengths, an input or an output as `side` says.
pub(super) fn lengths_axis(
    config: &Config,
    info: &TensorInfo,
    parameter: &'static str,
    side: &str,
) -> Result<Option<usize>> {
    // Rows that share a run have lengths of their own, so the tensor needs an element for each.
    let is_integer = matches!(info.data_type, DataType::Int32 | DataType::Int64);
    batch_of_elements(config, info).filter(|_| is_integer).ok_or_else(|| {
        let described = describe(info.data_type, &info.dims);
        let why =
            format!("that {side} is {described}, and lengths are whole numbers of 32 or 64 bits, one a row: [batch]");
        bad(parameter, &info.name, why)
    })
}

/// The axis along which rows may have different lengths: the one that is written, else the only open one.
fn ragged_axis(padded: &PaddedInput, sent: &[i64], batch_axis: Option<usize>) -> Result<usize> {
    let error = |why: String| bad("padded_inputs", &padded.input, why);
    let dims = Dims(sent);
    match (padded.axis, open_axes(sent, batch_axis).as_slice()) {
        (Some(axis), open) if open.contains(&axis) => Ok(axis),
        (Some(axis), _) => Err(error(format!("axis {axis} of {dims} is not open"))),
        (None, &[axis]) => Ok(axis),
        (None, []) => Err(error(format!("none of {dims} is open beside the batch"))),
        (None, _) => {
            Err(error(format!("more than one dimension of {dims} is open: write the axis after it, 'LENGTHS@AXIS'")))
        }
    }
}

/// Finds the part of each output that belongs to a row.
pub(super) fn bind_trims(
    config: &Config,
    signature: &Signature,
    inputs: &[BoundInput],
    outputs: &mut Vec<BoundOutput>,
) -> Result<()> {
    if config.ragged.inputs.is_empty() {
        return Ok(());
    }
    let pads = inputs.iter().any(BoundInput::is_padded);
    let responses: Vec<usize> = (0..outputs.len()).filter(|&index| outputs[index].is_response).collect();
    for index in responses {
        let Some(info) = signature.output(&outputs[index].name) else { continue };
        let listed = config.ragged.outputs.iter().find(|padded| padded.output == info.name);
        outputs[index].trim = match listed {
            Some(PaddedOutput { lengths: None, .. }) => None,
            Some(PaddedOutput { lengths: Some(lengths), .. }) => {
                let lengths = find_output(signature, lengths, "'padded_outputs'")?;
                let batch_axis = lengths_axis(config, lengths, "padded_outputs", "output")?;
                let by = fetched(outputs, lengths);
                outputs[by].batch_axis = batch_axis;
                let [axis] = *open_axes(&info.dims, outputs[index].batch_axis) else {
                    let dims = Dims(&info.dims);
                    let why = format!("the model's dims {dims} must have one open dimension besides the batch");
                    return Err(bad("padded_outputs", &info.name, why));
                };
                Some(Trim { axis, by: TrimBy::Output(by) })
            }
            None if outputs[index].dims.is_some() || !pads => None,
            None => Some(as_long_as_an_input(signature, inputs, info)?),
        };
    }
    Ok(())
}

/// The axis of an output that has the name of a padded input's axis.
fn as_long_as_an_input(signature: &Signature, inputs: &[BoundInput], info: &TensorInfo) -> Result<Trim> {
    let padded = inputs.iter().enumerate();
    let padded = padded.filter_map(|(index, input)| Some((index, &input.name, input.request()?.ragged_axis?)));
    let symbol = |name: &str, axis: usize| {
        let of = signature.inputs.iter().chain(&signature.defaults).find(|info| info.name == name)?;
        Some(of.symbols[axis].as_str()).filter(|symbol| !symbol.is_empty())
    };
    let mut trims = padded.filter_map(|(index, name, axis)| {
        // In ONNX, dimensions with one name have one length.
        let symbol = symbol(name, axis)?;
        let axis = info.symbols.iter().position(|other| other == symbol)?;
        Some(Trim { axis, by: TrimBy::Input(index) })
    });
    trims.next().ok_or_else(|| BindingError::Untrimmed { name: info.name.clone(), dims: Dims(&info.dims).to_string() })
}
