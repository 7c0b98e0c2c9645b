//! Outputs that responses carry: how their shapes relate to the model's, how they have the steps of a request, and with
//! rows of different lengths in one batch, which part of each output is a row's.

use rows::tensor::{DataType, Dims};

use super::bound::{BoundInput, BoundOutput, Gathered, Trim, TrimBy, fetched};
use super::error::{BindingError, Result, bad};
use super::fit::{Listed, ShapeForm, check_type, configured, empty_dims, find_output, lengths_axis};
use super::steps::steps_error;
use crate::config::{Config, PaddedOutput, StatePair, TensorConfig};
use crate::onnx::{Signature, TensorInfo, all_agree, open_axes};

pub(super) fn listed_outputs(
    config: &Config,
    pairs: &[StatePair],
    constant_outputs: &[String],
    signature: &Signature,
    batch_symbol: Option<&str>,
) -> Result<Vec<BoundOutput>> {
    let has_no_batch = |info: &TensorInfo| {
        let pair = pairs.iter().find(|pair| pair.output == info.name);
        let written = pair.and_then(|pair| config.states.written_dims(&pair.input));
        constant_outputs.contains(&info.name) || written.is_some_and(|state| state.batch_axis.is_none())
    };
    let outputs = config.outputs.iter().map(|tensor| {
        let info = find_output(signature, &tensor.name, "'output'")?;
        response_output(Listed { config, tensor, info, batch_symbol }, has_no_batch(info))
    });
    outputs.collect()
}

/// Binds an output of responses; `has_no_batch` says that all rows of a run have the same value of it, or a run has one
/// row.
fn response_output(listed: Listed, has_no_batch: bool) -> Result<BoundOutput> {
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

/// Finds how an answer has the steps of its request in an output: along its only open dimension, else along one of
/// their own. `matched` matches dims without that one.
fn match_steps(
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
        return Err(steps_error(config, format!("the model does not say which dims its output '{name}' has")));
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
    Err(steps_error(config, why))
}

/// The shape of an output in an answer to a request that made no step.
fn without_steps(
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
