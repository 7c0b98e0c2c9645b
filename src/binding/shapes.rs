//! Inputs of requests and outputs of responses: configured dims against the model's, and the batch axis.

use super::error::BindingError;
use super::{BoundInput, BoundOutput, ShapeForm, Source, all_agree, batches, check_type};
use crate::config::{Config, TensorConfig};
use crate::session::TensorInfo;
use crate::tensor::{DataType, Dims};

/// Holds the dims of an `input` or `output` against the model's. Returns the batch axis and the form of the shape.
fn match_dims(
    config: &Config,
    list: &'static str,
    tensor: &TensorConfig,
    model: &[i64],
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
    if tensor.dims.len() == model.len() && !model.is_empty() {
        let open: Vec<usize> = (0..model.len()).filter(|&axis| tensor.dims[axis] < 0 && model[axis] < 0).collect();
        return match (open.as_slice(), all_agree(&tensor.dims, model)) {
            (&[axis], true) => Ok((Some(axis), ShapeForm::BatchInside)),
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

pub(super) fn request_input(
    config: &Config,
    tensor: &TensorConfig,
    info: &TensorInfo,
) -> Result<BoundInput, BindingError> {
    check_type(format!("input '{}'", tensor.name), tensor.data_type, info.data_type)?;
    let (batch_axis, form) = match_dims(config, "input", tensor, &info.dims)?;
    let mut input = bound(info, batch_axis, Source::Request(form));
    // Where only the configuration fixes a dimension, Triton holds requests to it.
    let behind = input.dims.len() - tensor.dims.len();
    for (dim, &configured) in input.dims[behind..].iter_mut().zip(&tensor.dims) {
        if *dim < 0 {
            *dim = configured;
        }
    }
    Ok(input)
}

pub(super) fn bound(info: &TensorInfo, batch_axis: Option<usize>, source: Source) -> BoundInput {
    BoundInput { name: info.name.clone(), data_type: info.data_type, dims: info.dims.clone(), batch_axis, source }
}

pub(super) fn response_output(
    config: &Config,
    tensor: &TensorConfig,
    info: &TensorInfo,
) -> Result<BoundOutput, BindingError> {
    check_type(format!("output '{}'", tensor.name), tensor.data_type, info.data_type)?;
    // A model may say nothing at all about an output's shape, not even its rank.
    let batch_axis = match info.dims.is_empty() && config.is_batched() {
        true => Some(0),
        false => match_dims(config, "output", tensor, &info.dims)?.0,
    };
    let known = known_dims(&info.dims, batch_axis).filter(|_| !info.dims.is_empty() || !config.is_batched());
    // ONNX Runtime allocates strings itself.
    let dims = known.filter(|_| info.data_type != DataType::Bytes);
    let empty_dims = empty_dims(&info.dims, batch_axis);
    let (name, data_type) = (info.name.clone(), info.data_type);
    Ok(BoundOutput { name, data_type, batch_axis, dims, is_response: true, empty_dims })
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
