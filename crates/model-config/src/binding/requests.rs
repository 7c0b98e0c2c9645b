//! Inputs that requests carry and outputs that responses carry: how their shapes relate to the model's, and with rows of
//! different lengths in one batch, which input takes the lengths and which part of each output is a row's.

use rows::tensor::{DataType, Dims};

use super::bound::{BoundInput, BoundOutput, RequestInput, ShapeForm, Source, Trim, TrimBy, fetched};
use super::context::WrittenContext;
use super::error::{BindingError, bad};
use super::shapes::{INPUT, batch_of_elements, check_type, describe, empty_dims, find, match_dims};
use super::windows::{WrittenWindow, match_steps, without_steps};
use crate::config::{Config, PaddedInput, PaddedOutput, TensorConfig};
use crate::onnx::{Signature, TensorInfo, all_agree};

/// Binds an input of requests; `has_default` says that the model has a value for it.
pub(super) fn request_input(
    config: &Config,
    tensor: &TensorConfig,
    info_of_model: &TensorInfo,
    has_default: bool,
    batch_symbol: Option<&str>,
) -> Result<BoundInput, BindingError> {
    let info = info_of_model;
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let is_held = config.held_inputs.contains(&tensor.name);
    if tensor.optional && !has_default && !is_held && config.state_api.is_none() {
        return Err(BindingError::Optional { name: tensor.name.clone() });
    }
    let window = WrittenWindow::find(config, tensor, info, batch_symbol)?;
    let (of_window, info) = window.as_ref().map(|window| window.apply(config, info)).unzip();
    let (config, info) = (of_window.as_ref().unwrap_or(config), info.as_ref().unwrap_or(info_of_model));
    let context = WrittenContext::find(config, tensor, info, batch_symbol)?;
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
    let sent = window.as_ref().map_or_else(|| dims.clone(), |window| window.sent(&dims));
    let (batch_axis, form) = match_dims(config, INPUT, tensor, &sent, &info.symbols, batch_symbol)?;
    if context.is_some() && form == ShapeForm::Unbatched && config.max_batch_size > 1 {
        let why = "the input has no batch dimension, so sequences that share a batch cannot each have a context: set \
                   max_batch_size to 1";
        return Err(bad("input_context", &tensor.name, why));
    }
    // Triton checks requests against a dimension that only the configuration fixes.
    let behind = dims.len().saturating_sub(tensor.dims.len());
    for (dim, &configured) in dims[behind..].iter_mut().zip(&tensor.dims) {
        if *dim < 0 {
            *dim = configured;
        }
    }
    let padded = config.ragged.inputs.iter().find(|padded| padded.input == tensor.name);
    let ragged_axis = padded.map(|padded| ragged_axis(padded, &dims, batch_axis)).transpose()?;
    if let Some(context) = &context {
        context.check_padding(ragged_axis)?;
        context.put_back(&mut dims);
    }
    let context = context.map(|context| context.bind(tensor, &dims, batch_axis)).transpose()?;
    let window = window.map(|window| window.bind(config, tensor, &dims, (batch_axis, form), is_held)).transpose()?;
    // With the State API, Triton lets a request leave every input out, and this backend checks what is missing.
    let (optional, is_padded) = (tensor.optional && has_default, ragged_axis.is_some());
    let request = RequestInput {
        // Numbered when the slot is laid out, after all inputs are bound.
        position: 0,
        form,
        optional,
        is_held,
        context,
        window,
        ragged_axis,
        is_padded,
        steps_multiple: None,
    };
    let (name, data_type) = (info.name.clone(), info.data_type);
    Ok(BoundInput { name, data_type, dims, batch_axis, source: Source::Request(request) })
}

/// Binds an output of responses; `has_no_batch` says that all rows of a run have the same value of it, or a run has one
/// row.
pub(super) fn response_output(
    config: &Config,
    tensor: &TensorConfig,
    info: &TensorInfo,
    batch_symbol: Option<&str>,
    has_no_batch: bool,
) -> Result<BoundOutput, BindingError> {
    check_type(format!("output '{}'", tensor.name), tensor.data_type, info.data_type)?;
    // A model may say nothing at all about an output's shape, not even its rank.
    let matched = |tensor: &TensorConfig| {
        if has_no_batch && config.is_batched() && all_agree(&tensor.dims, &info.dims) {
            Ok((None, ShapeForm::Unbatched))
        } else if info.dims.is_empty() && config.is_batched() && !config.gathers_steps() {
            Ok((Some(0), ShapeForm::Plain))
        } else {
            match_dims(config, "output", tensor, &info.dims, &info.symbols, batch_symbol)
        }
    };
    let (batch_axis, form, gathered) = if config.gathers_steps() {
        match_steps(config, tensor, info, matched)?
    } else {
        let (batch_axis, form) = matched(tensor)?;
        (batch_axis, form, None)
    };
    let known = known_dims(&info.dims, batch_axis).filter(|_| !info.dims.is_empty() || !config.is_batched());
    // ONNX Runtime allocates strings itself.
    let dims = known.filter(|_| info.data_type != DataType::Bytes);
    let mut empty_dims = empty_dims(&info.dims, batch_axis);
    if form == ShapeForm::Unbatched && config.is_batched() {
        empty_dims = [0].into_iter().chain(info.dims.iter().map(|&dim| dim.max(0))).collect();
    }
    if let Some(gathered) = gathered {
        empty_dims = without_steps(&tensor.dims, &info.dims, (batch_axis, form), gathered);
    }
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

/// The dims, if all but the batch axis are known.
fn known_dims(dims: &[i64], batch_axis: Option<usize>) -> Option<Vec<i64>> {
    let known = dims.iter().enumerate().all(|(axis, &dim)| dim >= 0 || Some(axis) == batch_axis);
    known.then(|| dims.to_vec())
}

/// Binds an input that takes the lengths of the rows of input number `of`.
pub(super) fn lengths_input(config: &Config, info: &TensorInfo, of: usize) -> Result<BoundInput, BindingError> {
    let batch_axis = lengths_axis(config, info, "padded_inputs", "input")?;
    Ok(BoundInput::of_elements(info, batch_axis, Source::Lengths { of }))
}

/// The batch axis of a tensor of lengths, an input or an output as `side` says.
fn lengths_axis(
    config: &Config,
    info: &TensorInfo,
    parameter: &'static str,
    side: &str,
) -> Result<Option<usize>, BindingError> {
    let is_integer = matches!(info.data_type, DataType::Int32 | DataType::Int64);
    batch_of_elements(config, info).filter(|_| is_integer).ok_or_else(|| {
        let described = describe(info.data_type, &info.dims);
        let why =
            format!("that {side} is {described}, and lengths are whole numbers of 32 or 64 bits, one a row: [batch]");
        bad(parameter, &info.name, why)
    })
}

/// The axis along which rows may have different lengths: the one that is written, else the only open one.
fn ragged_axis(padded: &PaddedInput, sent: &[i64], batch_axis: Option<usize>) -> Result<usize, BindingError> {
    let error = |why: String| bad("padded_inputs", &padded.input, why);
    let is_open = |&axis: &usize| sent[axis] < 0 && batch_axis != Some(axis);
    let open: Vec<usize> = (0..sent.len()).filter(is_open).collect();
    match (padded.axis, open.as_slice()) {
        (Some(axis), open) if open.contains(&axis) => Ok(axis),
        (Some(axis), _) => Err(error(format!("axis {axis} of {} is not open", Dims(sent)))),
        (None, &[axis]) => Ok(axis),
        (None, []) => Err(error(format!("none of {} is open beside the batch", Dims(sent)))),
        (None, _) => Err(error(format!(
            "more than one dimension of {} is open: write the axis after it, 'LENGTHS@AXIS'",
            Dims(sent)
        ))),
    }
}

/// Pads no rows, because the new value of a state of varying size would depend on the padding.
pub(super) fn forbid_padding(inputs: &mut [BoundInput]) {
    inputs.iter_mut().filter_map(BoundInput::request_mut).for_each(|request| request.is_padded = false);
}

/// Finds the part of each output that belongs to a row.
pub(super) fn bind_trims(
    config: &Config,
    signature: &Signature,
    inputs: &[BoundInput],
    outputs: &mut Vec<BoundOutput>,
) -> Result<(), BindingError> {
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
                let by = TrimBy::Output(lengths_output(config, signature, lengths, outputs)?);
                Some(Trim { axis: only_open_axis(&outputs[index], info)?, by })
            }
            None if outputs[index].dims.is_some() || !pads => None,
            None => Some(as_long_as_an_input(signature, inputs, info)?),
        };
    }
    Ok(())
}

/// The index of the output that gives lengths.
fn lengths_output(
    config: &Config,
    signature: &Signature,
    name: &str,
    outputs: &mut Vec<BoundOutput>,
) -> Result<usize, BindingError> {
    let (_, info) = find(&signature.outputs, name, "'padded_outputs'", "output")?;
    let batch_axis = lengths_axis(config, info, "padded_outputs", "output")?;
    let index = fetched(outputs, info);
    outputs[index].batch_axis = batch_axis;
    Ok(index)
}

fn only_open_axis(output: &BoundOutput, info: &TensorInfo) -> Result<usize, BindingError> {
    let is_open = |&axis: &usize| info.dims[axis] < 0 && output.batch_axis != Some(axis);
    let open: Vec<usize> = (0..info.dims.len()).filter(is_open).collect();
    match open.as_slice() {
        &[axis] => Ok(axis),
        _ => {
            let why = format!("the model's dims {} must have one open dimension besides the batch", Dims(&info.dims));
            Err(bad("padded_outputs", &info.name, why))
        }
    }
}

/// The axis of an output that has the name of a padded input's axis.
fn as_long_as_an_input(signature: &Signature, inputs: &[BoundInput], info: &TensorInfo) -> Result<Trim, BindingError> {
    let padded = inputs.iter().enumerate();
    let padded = padded.filter_map(|(index, input)| Some((index, &input.name, input.request()?.ragged_axis?)));
    let symbol = |name: &str, axis: usize| {
        let of = signature.inputs.iter().chain(&signature.defaults).find(|info| info.name == name)?;
        Some(of.symbols[axis].as_str()).filter(|symbol| !symbol.is_empty())
    };
    let mut trims = padded.filter_map(|(index, name, axis)| {
        let symbol = symbol(name, axis)?;
        let axis = info.symbols.iter().position(|other| other == symbol)?;
        Some(Trim { axis, by: TrimBy::Input(index) })
    });
    trims.next().ok_or_else(|| BindingError::Untrimmed { name: info.name.clone(), dims: Dims(&info.dims).to_string() })
}
