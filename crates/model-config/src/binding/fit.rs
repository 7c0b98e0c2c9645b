//! Compares the configured names, types and dims with the model's, and finds the batch dimension.

use rows::tensor::{DataType, Dims};
use stateful_convert::is_batch_name;

use super::error::{BindingError, Result, bad};
use crate::config::{Config, StateDims, TensorConfig};
use crate::onnx::{Signature, TensorInfo, all_agree, open_axes};

/// How a request's shape relates to the shape in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeForm {
    /// As in the model, with 1 for the batch axis, which is the first one. This is Triton's form.
    Plain,
    /// The configuration's dims are the model's, with -1 for the batch axis wherever it is. Requests have Triton's
    /// batch dimension before these dims, and responses do not. This is the form of NVIDIA's stateful_backend.
    BatchInside,
    /// Requests and responses have one more dimension, which is 1. Either the model's tensor has no batch axis and
    /// Triton adds a batch dimension, or the tensor is a scalar, which Triton doesn't have.
    Unbatched,
}

impl ShapeForm {
    /// The model's part of a request's dims.
    pub fn model_dims(self, request: &[i64]) -> &[i64] {
        if self == Self::Plain { request } else { request.get(1..).unwrap_or_default() }
    }
}

/// A tensor under `input` or `output`, and the model's.
#[derive(Clone, Copy)]
pub(super) struct Listed<'a> {
    pub config: &'a Config,
    pub tensor: &'a TensorConfig,
    pub info: &'a TensorInfo,
    /// The name of the batch dimension, where the requests' inputs have one.
    pub batch_symbol: Option<&'a str>,
}

impl Listed<'_> {
    /// Checks the dims against `model`, which are the model's as `list` sees them. Returns the batch axis and the form
    /// of the shape, or what is wrong.
    pub fn match_dims(self, list: &str, model: &[i64]) -> Result<(Option<usize>, ShapeForm)> {
        let Self { config, tensor, info: TensorInfo { symbols, .. }, .. } = self;
        let error = |rule: &str| {
            let (what, configured) = (format!("{list} '{}'", tensor.name), Dims(&tensor.dims).to_string());
            Err(BindingError::Dims { what, configured, model: with_names(model, symbols), rule: rule.to_owned() })
        };
        let is_fixed = model.iter().all(|&dim| dim >= 0);
        if !config.is_batched() {
            return if all_agree(&tensor.dims, model) {
                Ok((None, ShapeForm::Plain))
            } else if model.is_empty() && tensor.dims == [1] {
                Ok((None, ShapeForm::Unbatched))
            } else {
                error("with max_batch_size 0 they must be the same")
            };
        }
        // The input has one value for all rows of a run. An output needs a value for each row; the caller knows the
        // outputs that don't.
        if list == INPUT && tensor.dims == model && is_fixed {
            return Ok((None, ShapeForm::Unbatched));
        }
        if tensor.dims.len() == model.len() && !model.is_empty() {
            if is_fixed {
                return error(
                    "no dimension of the model's is open for the batch: set max_batch_size to 0, or export the model with an \
                     open batch",
                );
            }
            let mut open = open_axes(model, None);
            open.retain(|&axis| tensor.dims[axis] < 0);
            let is_named = |&axis: &usize| is_batch(&symbols[axis], self.batch_symbol);
            let named: Vec<usize> = open.iter().copied().filter(is_named).collect();
            return match (open.as_slice(), named.as_slice(), all_agree(&tensor.dims, model)) {
                (&[axis], _, true) | (_, &[axis], true) => Ok((Some(axis), ShapeForm::BatchInside)),
                _ => error(
                    "either leave the batch dimension out, or mark it, and only it, with -1 where the model has it open; \
                     for a model's [batch], write dims [1] with reshape { shape: [ ] }",
                ),
            };
        }
        let Some((&batch, behind)) = model.split_first() else {
            return error("the model's tensor has no batch dimension; set max_batch_size to 0");
        };
        let size = config.max_batch_size;
        if batches(batch, config) && all_agree(&tensor.dims, behind) {
            Ok((Some(0), ShapeForm::Plain))
        } else if batches(batch, config) {
            error(&format!("without the batch dimension they must be {}", Dims(behind)))
        } else if is_fixed {
            error(&format!("its first dimension is fixed to {batch}, so it is no batch, but max_batch_size is {size}"))
        } else {
            error("its first dimension is not the batch: write the model's dims, with -1 where its batch stands")
        }
    }

    pub fn configured(self, axis: usize) -> Option<i64> {
        configured(&self.tensor.dims, self.info.dims.len(), axis)
    }
}

/// The dimension of configured dims for an axis of the model, which has `rank` dimensions.
pub(super) fn configured(dims: &[i64], rank: usize, axis: usize) -> Option<i64> {
    // As in Triton, dims without the batch leave out the first dimension.
    let left_out = rank.checked_sub(dims.len())?;
    dims.get(axis.checked_sub(left_out)?).copied()
}

fn with_names(dims: &[i64], symbols: &[String]) -> String {
    let names: Vec<&str> = symbols.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    let dims = Dims(dims);
    if names.is_empty() { dims.to_string() } else { format!("{dims} ({})", names.join(", ")) }
}

pub(super) const INPUT: &str = "input";

/// Whether a dimension has the batch's name: the one that inputs of requests have for it, else a usual one.
pub(super) fn is_batch(symbol: &str, batch_symbol: Option<&str>) -> bool {
    batch_symbol.map_or_else(|| is_batch_name(symbol), |of_requests| symbol == of_requests)
}

/// The shape of an output without elements.
pub(super) fn empty_dims(dims: &[i64], batch_axis: Option<usize>) -> Vec<i64> {
    let empty = |(axis, &dim): (usize, &i64)| if Some(axis) == batch_axis { 0 } else { dim.max(0) };
    let mut dims: Vec<i64> = dims.iter().enumerate().map(empty).collect();
    if dims.is_empty() {
        // A tensor without dimensions would have an element.
        return vec![0];
    }
    // Without the batch and an open dimension, nothing else would make it empty.
    if !dims.contains(&0) {
        dims[0] = 0;
    }
    dims
}

pub(super) fn find_output<'a>(signature: &'a Signature, name: &str, named_by: &'static str) -> Result<&'a TensorInfo> {
    signature.output(name).ok_or_else(|| missing(named_by, name, "output", signature.output_names()))
}

pub(super) fn missing(named_by: &'static str, name: &str, side: &'static str, has: Vec<&str>) -> BindingError {
    BindingError::Missing { named_by, name: name.to_owned(), side, has: has.join(", ") }
}

/// An entry of `state_dims` to write for a state.
pub(super) fn state_dims(info: &TensorInfo, dims: &[i64], batch_axis: Option<usize>) -> StateDims {
    StateDims { name: info.name.clone(), dims: dims.to_vec(), batch_axis }
}

pub(super) fn describe(data_type: DataType, dims: &[i64]) -> String {
    format!("{data_type} {}", Dims(dims))
}

pub(super) fn check_type(what: String, configured: DataType, model: DataType) -> Result<()> {
    if configured == model { Ok(()) } else { Err(BindingError::DataType { what, configured, model }) }
}

/// Whether a batch dimension of this length takes every batch that may come.
pub(super) fn batches(dim: i64, config: &Config) -> bool {
    // If a run has one row, a batch that the exporter has fixed to 1 has room for it.
    dim < 0 || (dim == 1 && config.max_batch_size == 1)
}

/// The batch axis of a tensor with one element a row: `[batch]` or `[batch, 1]`. `None` if the tensor has more, or if
/// rows that share a run could not each have one.
pub(super) fn batch_of_elements(config: &Config, info: &TensorInfo) -> Option<Option<usize>> {
    let batch_axis = (config.is_batched() && !info.dims.is_empty()).then_some(0);
    let one_element = info.dims.iter().enumerate().all(|(axis, &dim)| dim <= 1 || Some(axis) == batch_axis);
    let has_room = batch_axis.map_or(config.max_batch_size <= 1, |axis| batches(info.dims[axis], config));
    (one_element && has_room).then_some(batch_axis)
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
