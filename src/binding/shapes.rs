//! Inputs of requests and outputs of responses: configured dims against the model's, and the batch axis.

use super::error::BindingError;
use super::{
    BoundContext, BoundInput, BoundOutput, RequestInput, ShapeForm, Source, all_agree, batches, check_type, describe,
};
use crate::config::{Config, Context, PaddedInput, TensorConfig};
use crate::session::TensorInfo;
use crate::tensor::{DataType, Dims, WindowLayout, is_batch_name};

/// Holds the dims of an `input` or `output` against the model's. Returns the batch axis and the form of the shape.
fn match_dims(
    config: &Config,
    list: &'static str,
    tensor: &TensorConfig,
    model: &[i64],
    symbols: &[String],
    batch_symbol: Option<&str>,
) -> Result<(Option<usize>, ShapeForm), BindingError> {
    let error = |rule: String| BindingError::Dims {
        what: format!("{list} '{}'", tensor.name),
        configured: Dims(&tensor.dims).to_string(),
        model: Dims(model).to_string(),
        rule,
    };
    if !config.is_batched() {
        return match all_agree(&tensor.dims, model) {
            true => Ok((None, ShapeForm::Plain)),
            false => Err(error("with max_batch_size 0 they must be the same".to_owned())),
        };
    }
    if list == INPUT && tensor.dims == model && model.iter().all(|&dim| dim >= 0) {
        return Ok((None, ShapeForm::Unbatched));
    }
    if tensor.dims.len() == model.len() && !model.is_empty() {
        let open: Vec<usize> = (0..model.len()).filter(|&axis| tensor.dims[axis] < 0 && model[axis] < 0).collect();
        let named: Vec<usize> = open.iter().copied().filter(|&axis| is_batch(&symbols[axis], batch_symbol)).collect();
        return match (open.as_slice(), named.as_slice(), all_agree(&tensor.dims, model)) {
            (&[axis], _, true) | (_, &[axis], true) => Ok((Some(axis), ShapeForm::BatchInside)),
            _ => Err(error(
                "either leave the batch dimension out, or mark it, and only it, with -1 where the model has it open; \
                 for a model's [batch], write dims [1] with reshape { shape: [ ] }"
                    .to_owned(),
            )),
        };
    }
    let Some((&batch, behind)) = model.split_first() else {
        return Err(error("the model's tensor has no batch dimension; set max_batch_size to 0".to_owned()));
    };
    if !batches(batch, config) {
        return Err(error(match model.iter().any(|&dim| dim < 0) {
            true => "its first dimension is not the batch: write the model's dims, with -1 where its batch stands"
                .to_owned(),
            false => {
                format!("its batch dimension is fixed to {batch}, but max_batch_size is {}", config.max_batch_size)
            }
        }));
    }
    match all_agree(&tensor.dims, behind) {
        true => Ok((Some(0), ShapeForm::Plain)),
        false => Err(error(format!("without the batch dimension they must be {}", Dims(behind)))),
    }
}

const INPUT: &str = "input";

/// Whether a dimension's name is the batch's: the one that the requests' inputs give it, else a usual one.
pub(super) fn is_batch(symbol: &str, batch_symbol: Option<&str>) -> bool {
    match batch_symbol {
        Some(of_requests) => symbol == of_requests,
        None => is_batch_name(symbol),
    }
}

/// Binds an input of requests; `has_default` says that the model has a value for it.
pub(super) fn request_input(
    config: &Config,
    tensor: &TensorConfig,
    info: &TensorInfo,
    has_default: bool,
) -> Result<BoundInput, BindingError> {
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    if tensor.optional && !has_default {
        return Err(BindingError::Optional { name: tensor.name.clone() });
    }
    let context = config.contexts.iter().find(|context| context.input == tensor.name);
    let axis = context.map(|context| context_axis(config, tensor, info, context)).transpose()?;
    // What clients send of the model's dims.
    let mut sent = info.dims.clone();
    if let (Some(axis), Some(context)) = (axis, context) {
        sent[axis] = without_context(sent[axis], context.length);
    }
    let (batch_axis, form) = match_dims(config, INPUT, tensor, &sent, &info.symbols, None)?;
    // Where only the configuration fixes a dimension, Triton holds requests to it.
    let behind = sent.len() - tensor.dims.len();
    for (dim, &configured) in sent[behind..].iter_mut().zip(&tensor.dims) {
        if *dim < 0 {
            *dim = configured;
        }
    }
    let padded = config.ragged.inputs.iter().find(|padded| padded.input == tensor.name);
    let ragged_axis = padded.map(|padded| ragged_axis(padded, &sent, batch_axis)).transpose()?;
    if let (Some(of_context), Some(padded)) = (axis, ragged_axis)
        && of_context != padded
    {
        return Err(BindingError::Parameter {
            parameter: "padded_inputs",
            value: tensor.name.clone(),
            why: format!(
                "it is axis {padded}, and its input_context is along axis {of_context}: they must be the same"
            ),
        });
    }
    if let (Some(axis), Some(context)) = (axis, context) {
        sent[axis] = if sent[axis] < 0 { -1 } else { sent[axis] + context.length as i64 };
    }
    let bound_context = match (axis, context) {
        (Some(axis), Some(context)) => Some(bind_context(tensor, &sent, batch_axis, axis, context)?),
        _ => None,
    };
    let (name, data_type) = (info.name.clone(), info.data_type);
    let (optional, is_padded) = (tensor.optional, ragged_axis.is_some());
    let request = RequestInput { position: 0, form, optional, context: bound_context, ragged_axis, is_padded };
    Ok(BoundInput { name, data_type, dims: sent, batch_axis, source: Source::Request(request) })
}

/// What remains of a model's dimension for clients to send; 0 or less if the context leaves nothing.
fn without_context(dim: i64, length: usize) -> i64 {
    if dim < 0 { dim } else { (dim - length as i64).max(0) }
}

/// The axis along which a context is kept: as written, else where the configuration's dims differ from the model's by
/// the context's length, else the only open one.
fn context_axis(
    config: &Config,
    tensor: &TensorConfig,
    info: &TensorInfo,
    context: &Context,
) -> Result<usize, BindingError> {
    let error = |why: String| BindingError::Parameter {
        parameter: "input_context",
        value: format!("{}={}", context.input, context.length),
        why,
    };
    let dims = Dims(&info.dims);
    let batch_axis = |axis: usize| {
        let mut sent = info.dims.clone();
        sent[axis] = without_context(sent[axis], context.length);
        let (batch, _) = match_dims(config, INPUT, tensor, &sent, &info.symbols, None).ok()?;
        (sent[axis] != 0).then_some(batch)
    };
    let fits = |axis: usize| batch_axis(axis).is_some_and(|batch| batch != Some(axis));
    if let Some(axis) = context.axis {
        return match axis < info.dims.len() {
            false => Err(error(format!("the model's dims {dims} have no axis {axis}"))),
            true if batch_axis(axis) == Some(Some(axis)) || is_batch(&info.symbols[axis], None) => {
                Err(error(format!("axis {axis} of the model's {dims} is the batch: write another")))
            }
            true if !fits(axis) => Err(error(format!(
                "with a context of {} in front, dims {} of the configuration do not make the model's {dims} along axis {axis}",
                context.length,
                Dims(&tensor.dims)
            ))),
            true => Ok(axis),
        };
    }
    let (fixed, open): (Vec<usize>, Vec<usize>) =
        (0..info.dims.len()).filter(|&axis| fits(axis)).partition(|&axis| info.dims[axis] >= 0);
    match (fixed.as_slice(), open.as_slice()) {
        (&[axis], _) | (&[], &[axis]) => Ok(axis),
        (&[], &[]) => Err(error(format!(
            "dims {} of the configuration, with a context of {} in front, make the model's {dims} along no axis",
            Dims(&tensor.dims),
            context.length
        ))),
        _ => Err(error(format!(
            "it fits more than one axis of the model's {dims}: write the axis, '{}={}@AXIS'",
            context.input, context.length
        ))),
    }
}

fn bind_context(
    tensor: &TensorConfig,
    model: &[i64],
    batch_axis: Option<usize>,
    axis: usize,
    context: &Context,
) -> Result<BoundContext, BindingError> {
    let mut row = model.to_vec();
    row[axis] = context.length as i64;
    let bytes =
        WindowLayout::new(tensor.data_type, &row, batch_axis, axis).map(|layout| layout.window_bytes(context.length));
    match bytes {
        Some(bytes) if !tensor.optional && tensor.data_type != DataType::Bytes => {
            Ok(BoundContext { axis, length: context.length, bytes, slot_entry: 0 })
        }
        _ => Err(BindingError::Parameter {
            parameter: "input_context",
            value: context.input.clone(),
            why: format!(
                "a context is kept of inputs that each request carries, with numbers, and with one open dimension \
                 beside the batch at most, not of {}{}",
                if tensor.optional { "optional " } else { "" },
                describe(tensor.data_type, model)
            ),
        }),
    }
}

/// The axis along which rows may have different lengths: as written, else the only open one.
fn ragged_axis(padded: &PaddedInput, sent: &[i64], batch_axis: Option<usize>) -> Result<usize, BindingError> {
    let error = |why: String| BindingError::Parameter { parameter: "padded_inputs", value: padded.input.clone(), why };
    let is_open = |&axis: &usize| sent[axis] < 0 && batch_axis != Some(axis);
    let open: Vec<usize> = (0..sent.len()).filter(is_open).collect();
    match (padded.axis, open.as_slice()) {
        (Some(axis), open) if open.contains(&axis) => Ok(axis),
        (Some(axis), _) => Err(error(format!("axis {axis} of {} is not open", Dims(sent)))),
        (None, &[axis]) => Ok(axis),
        (None, []) => Err(error(format!("none of {} is open beside the batch", Dims(sent)))),
        (None, _) => Err(error(format!("more than one dimension of {} is open: write the axis", Dims(sent)))),
    }
}

pub(super) fn bound(info: &TensorInfo, batch_axis: Option<usize>, source: Source) -> BoundInput {
    BoundInput { name: info.name.clone(), data_type: info.data_type, dims: info.dims.clone(), batch_axis, source }
}

pub(super) fn response_output(
    config: &Config,
    tensor: &TensorConfig,
    info: &TensorInfo,
    batch_symbol: Option<&str>,
) -> Result<BoundOutput, BindingError> {
    check_type(format!("output '{}'", tensor.name), tensor.data_type, info.data_type)?;
    // A model may say nothing at all about an output's shape, not even its rank.
    let batch_axis = match info.dims.is_empty() && config.is_batched() {
        true => Some(0),
        false => match_dims(config, "output", tensor, &info.dims, &info.symbols, batch_symbol)?.0,
    };
    let known = known_dims(&info.dims, batch_axis).filter(|_| !info.dims.is_empty() || !config.is_batched());
    // ONNX Runtime allocates strings itself.
    let dims = known.filter(|_| info.data_type != DataType::Bytes);
    let empty_dims = empty_dims(&info.dims, batch_axis);
    let (name, data_type) = (info.name.clone(), info.data_type);
    Ok(BoundOutput { name, data_type, batch_axis, dims, is_response: true, empty_dims, trim: None })
}

/// The shape of an output without elements.
pub(super) fn empty_dims(dims: &[i64], batch_axis: Option<usize>) -> Vec<i64> {
    let is_batch = |axis: usize| Some(axis) == batch_axis;
    let empty = |(axis, &dim): (usize, &i64)| if is_batch(axis) { 0 } else { dim.max(0) };
    let mut dims: Vec<i64> = dims.iter().enumerate().map(empty).collect();
    if dims.is_empty() {
        return vec![0];
    }
    if !dims.contains(&0) {
        dims[0] = 0;
    }
    dims
}

/// The dims, if all but the batch axis are known.
fn known_dims(dims: &[i64], batch_axis: Option<usize>) -> Option<Vec<i64>> {
    let known = dims.iter().enumerate().all(|(axis, &dim)| dim >= 0 || Some(axis) == batch_axis);
    known.then(|| dims.to_vec())
}
