//! Inputs of requests and outputs of responses: whether their configured dims fit the model's, and their batch axis.

use rows::tensor::{DataType, Dims};
use stateful_convert::is_batch_name;

use super::context::WrittenContext;
use super::error::BindingError;
use super::ragged::ragged_axis;
use super::{BoundInput, BoundOutput, RequestInput, ShapeForm, Source, all_agree, batches, check_type};
use crate::config::{Config, TensorConfig};
use crate::session::TensorInfo;

/// Checks the dims of an `input` or `output` against the model's. Returns the batch axis and the form of the shape.
pub(super) fn match_dims(
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
        model: with_names(model, symbols),
        rule,
    };
    if !config.is_batched() {
        if all_agree(&tensor.dims, model) {
            return Ok((None, ShapeForm::Plain));
        }
        if model.is_empty() && tensor.dims == [1] {
            return Ok((None, ShapeForm::Unbatched));
        }
        return Err(error("with max_batch_size 0 they must be the same".to_owned()));
    }
    if list == INPUT && tensor.dims == model && model.iter().all(|&dim| dim >= 0) {
        return Ok((None, ShapeForm::Unbatched));
    }
    if tensor.dims.len() == model.len() && !model.is_empty() {
        if model.iter().all(|&dim| dim >= 0) {
            return Err(error(
                "no dimension of the model's is open for the batch: set max_batch_size to 0, or export the model with an open \
                 batch"
                    .to_owned(),
            ));
        }
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
        return Err(error(if model.iter().any(|&dim| dim < 0) {
            "its first dimension is not the batch: write the model's dims, with -1 where its batch stands".to_owned()
        } else {
            format!(
                "its first dimension is fixed to {batch}, so it is no batch, but max_batch_size is {}",
                config.max_batch_size
            )
        }));
    }
    if !all_agree(&tensor.dims, behind) {
        return Err(error(format!("without the batch dimension they must be {}", Dims(behind))));
    }
    Ok((Some(0), ShapeForm::Plain))
}

/// Dims of the model, and the names of those that are open.
fn with_names(dims: &[i64], symbols: &[String]) -> String {
    let names: Vec<&str> = symbols.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    let dims = Dims(dims);
    if names.is_empty() { dims.to_string() } else { format!("{dims} ({})", names.join(", ")) }
}

pub(super) const INPUT: &str = "input";

/// Whether a dimension has the batch's name: the one that inputs of requests have for it, else a usual one.
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
    batch_symbol: Option<&str>,
) -> Result<BoundInput, BindingError> {
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let is_held = config.held_inputs.contains(&tensor.name);
    if tensor.optional && !has_default && !is_held && config.state_api.is_none() {
        return Err(BindingError::Optional { name: tensor.name.clone() });
    }
    let context = WrittenContext::find(config, tensor, info, batch_symbol)?;
    if context.is_some() && is_held {
        return Err(BindingError::Parameter {
            parameter: "held_inputs",
            value: tensor.name.clone(),
            why: "the input has an input_context, which would put the end of the kept elements in front of the same \
                  elements: take the input out of one of the two parameters"
                .to_owned(),
        });
    }
    // The model's dims without the context, as clients send them.
    let mut dims = info.dims.clone();
    if let Some(context) = &context {
        context.take_off(&mut dims);
    }
    let (batch_axis, form) = match_dims(config, INPUT, tensor, &dims, &info.symbols, batch_symbol)?;
    if context.is_some() && form == ShapeForm::Unbatched && config.max_batch_size > 1 {
        return Err(BindingError::Parameter {
            parameter: "input_context",
            value: tensor.name.clone(),
            why: "the input has no batch dimension, so sequences that share a batch cannot each have a context: set \
                  max_batch_size to 1"
                .to_owned(),
        });
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
    // With the State API, Triton lets a request leave every input out, and this backend checks what is missing.
    let (optional, is_padded) = (tensor.optional && has_default, ragged_axis.is_some());
    let request =
        RequestInput { position: 0, form, optional, is_held, context, ragged_axis, is_padded, steps_multiple: None };
    let (name, data_type) = (info.name.clone(), info.data_type);
    Ok(BoundInput { name, data_type, dims, batch_axis, source: Source::Request(request) })
}

pub(super) fn bound(info: &TensorInfo, batch_axis: Option<usize>, source: Source) -> BoundInput {
    BoundInput { name: info.name.clone(), data_type: info.data_type, dims: info.dims.clone(), batch_axis, source }
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
    let (batch_axis, form) = if has_no_batch && config.is_batched() && all_agree(&tensor.dims, &info.dims) {
        (None, ShapeForm::Unbatched)
    } else if info.dims.is_empty() && config.is_batched() {
        (Some(0), ShapeForm::Plain)
    } else {
        match_dims(config, "output", tensor, &info.dims, &info.symbols, batch_symbol)?
    };
    let known = known_dims(&info.dims, batch_axis).filter(|_| !info.dims.is_empty() || !config.is_batched());
    // ONNX Runtime allocates strings itself.
    let dims = known.filter(|_| info.data_type != DataType::Bytes);
    let mut empty_dims = empty_dims(&info.dims, batch_axis);
    if form == ShapeForm::Unbatched && config.is_batched() {
        empty_dims = [0].into_iter().chain(info.dims.iter().map(|&dim| dim.max(0))).collect();
    }
    Ok(BoundOutput {
        name: info.name.clone(),
        data_type: info.data_type,
        batch_axis,
        form,
        dims,
        is_response: true,
        empty_dims,
        trim: None,
        c_name: super::c_name(&info.name),
        is_only_kept: false,
    })
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
