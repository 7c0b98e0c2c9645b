//! Whether names, types and dims that are configured fit the model's, and which dimension then is the batch.

use rows::tensor::{DataType, Dims};
use stateful_convert::is_batch_name;

use super::bound::ShapeForm;
use super::error::BindingError;
use crate::config::{Config, TensorConfig};
use crate::onnx::{TensorInfo, all_agree};

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
    // It has one value for all rows of a run. An output needs a value for each row; the caller knows those that don't.
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

/// The shape of an output without elements.
pub(super) fn empty_dims(dims: &[i64], batch_axis: Option<usize>) -> Vec<i64> {
    let is_batch = |axis: usize| Some(axis) == batch_axis;
    let empty = |(axis, &dim): (usize, &i64)| if is_batch(axis) { 0 } else { dim.max(0) };
    let mut dims: Vec<i64> = dims.iter().enumerate().map(empty).collect();
    if dims.is_empty() {
        return vec![0];
    }
    // Without the batch and an open dimension, nothing else would make it empty.
    if !dims.contains(&0) {
        dims[0] = 0;
    }
    dims
}

/// A tensor of the model, with its index.
pub(super) fn find<'a>(
    infos: impl IntoIterator<Item = &'a TensorInfo> + Clone,
    name: &str,
    named_by: &'static str,
    side: &'static str,
) -> Result<(usize, &'a TensorInfo), BindingError> {
    infos.clone().into_iter().enumerate().find(|(_, info)| info.name == name).ok_or_else(|| BindingError::Missing {
        named_by,
        name: name.to_owned(),
        side,
        has: infos.into_iter().map(|info| info.name.clone()).collect(),
    })
}

pub(super) fn describe(data_type: DataType, dims: &[i64]) -> String {
    format!("{data_type} {}", Dims(dims))
}

pub(super) fn check_type(what: String, configured: DataType, model: DataType) -> Result<(), BindingError> {
    if configured == model { Ok(()) } else { Err(BindingError::DataType { what, configured, model }) }
}

/// Whether a batch dimension of this length takes every batch that may come.
pub(super) fn batches(dim: i64, config: &Config) -> bool {
    dim < 0 || (dim == 1 && config.max_batch_size == 1)
}

/// The batch axis of a tensor with one element a row: `[batch]` or `[batch, 1]`. `None` if the tensor has more, or if rows
/// that share a run could not each have one.
pub(super) fn batch_of_elements(config: &Config, info: &TensorInfo) -> Option<Option<usize>> {
    let batch_axis = (config.is_batched() && !info.dims.is_empty()).then_some(0);
    let one_element = info.dims.iter().enumerate().all(|(axis, &dim)| dim <= 1 || Some(axis) == batch_axis);
    let has_room = batch_axis.map_or(config.max_batch_size <= 1, |axis| batches(info.dims[axis], config));
    (one_element && has_room).then_some(batch_axis)
}
