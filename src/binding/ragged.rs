//! Rows of different lengths in one batch: which input takes the lengths, and which part of each output is a row's.

use rows::tensor::{DataType, Dims};

use super::error::BindingError;
use super::shapes::bound;
use super::{BoundInput, BoundOutput, Source, batches, describe, fetched};
use crate::config::{Config, PaddedInput, PaddedOutput};
use crate::session::{Signature, TensorInfo};

/// The part of an output that belongs to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trim {
    /// The axis, in the model.
    pub axis: usize,
    pub by: TrimBy,
}

/// How much of an output belongs to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrimBy {
    /// As much as the row has of this input in [`Binding::inputs`](super::Binding::inputs).
    Input(usize),
    /// As much as this output in [`Binding::outputs`](super::Binding::outputs) says.
    Output(usize),
}

/// Binds an input that takes the lengths of the rows of input number `of`.
pub(super) fn lengths_input(
    config: &Config,
    padded: &PaddedInput,
    info: &TensorInfo,
    of: usize,
) -> Result<BoundInput, BindingError> {
    let batch_axis = lengths_axis(config, info).ok_or_else(|| BindingError::Parameter {
        parameter: "padded_inputs",
        value: padded.lengths.clone(),
        why: format!(
            "that input is {}, and lengths are whole numbers of 32 or 64 bits, one a row: [batch]",
            describe(info.data_type, &info.dims)
        ),
    })?;
    let mut input = bound(info, batch_axis, Source::Lengths { of });
    for (axis, dim) in input.dims.iter_mut().enumerate() {
        if Some(axis) != batch_axis {
            *dim = 1;
        }
    }
    Ok(input)
}

/// The batch axis of a tensor of lengths; `None` if it cannot be one.
fn lengths_axis(config: &Config, info: &TensorInfo) -> Option<Option<usize>> {
    let batch_axis = (config.is_batched() && !info.dims.is_empty()).then_some(0);
    let one_element = info.dims.iter().enumerate().all(|(axis, &dim)| dim <= 1 || Some(axis) == batch_axis);
    let has_batch = batch_axis.map_or(config.max_batch_size <= 1, |axis| batches(info.dims[axis], config));
    let is_integer = matches!(info.data_type, DataType::Int32 | DataType::Int64);
    (one_element && has_batch && is_integer).then_some(batch_axis)
}

/// The axis along which rows may have different lengths: the one that is written, else the only open one.
pub(super) fn ragged_axis(
    padded: &PaddedInput,
    sent: &[i64],
    batch_axis: Option<usize>,
) -> Result<usize, BindingError> {
    let error = |why: String| BindingError::Parameter { parameter: "padded_inputs", value: padded.input.clone(), why };
    let is_open = |&axis: &usize| sent[axis] < 0 && batch_axis != Some(axis);
    let open: Vec<usize> = (0..sent.len()).filter(is_open).collect();
    match (padded.axis, open.as_slice()) {
        (Some(axis), open) if open.contains(&axis) => Ok(axis),
        (Some(axis), _) => Err(error(format!("axis {axis} of {} is not open", Dims(sent)))),
        (None, &[axis]) => Ok(axis),
        (None, []) => Err(error(format!("none of {} is open beside the batch", Dims(sent)))),
        (None, _) => Err(error(format!(
            "more than one dimension of {} is open: write the axis behind it, 'LENGTHS@AXIS'",
            Dims(sent)
        ))),
    }
}

/// Pads no rows, because the new value of a state of varying size would depend on the padding.
pub(super) fn forbid_padding(inputs: &mut [BoundInput]) {
    for input in inputs {
        if let Source::Request(request) = &mut input.source {
            request.is_padded = false;
        }
    }
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
        let Some(info) = signature.outputs.iter().find(|info| info.name == outputs[index].name) else { continue };
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
    let (_, info) = super::find(&signature.outputs, name, "'padded_outputs'", "output")?;
    let batch_axis = lengths_axis(config, info).ok_or_else(|| BindingError::Parameter {
        parameter: "padded_outputs",
        value: name.to_owned(),
        why: format!(
            "that output is {}, and lengths are whole numbers of 32 or 64 bits, one a row: [batch]",
            describe(info.data_type, &info.dims)
        ),
    })?;
    let index = fetched(outputs, info);
    outputs[index].batch_axis = batch_axis;
    Ok(index)
}

fn only_open_axis(output: &BoundOutput, info: &TensorInfo) -> Result<usize, BindingError> {
    let is_open = |&axis: &usize| info.dims[axis] < 0 && output.batch_axis != Some(axis);
    let open: Vec<usize> = (0..info.dims.len()).filter(is_open).collect();
    match open.as_slice() {
        &[axis] => Ok(axis),
        _ => Err(BindingError::Parameter {
            parameter: "padded_outputs",
            value: info.name.clone(),
            why: format!("its dims in the model, {}, have not one open dimension beside the batch", Dims(&info.dims)),
        }),
    }
}

/// The axis of an output that has the name of a padded input's axis.
fn as_long_as_an_input(signature: &Signature, inputs: &[BoundInput], info: &TensorInfo) -> Result<Trim, BindingError> {
    let padded = inputs.iter().enumerate().filter_map(|(index, input)| match &input.source {
        Source::Request(request) => Some((index, &input.name, request.ragged_axis?)),
        _ => None,
    });
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
