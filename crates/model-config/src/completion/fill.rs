//! Fills what a configuration lacks: the batch, the lists of tensors, and how sequences are scheduled.

use rows::tensor::Dims;
use stateful_convert::is_batch_name;

use super::batch::{BatchAxes, Known, batch_axis};
use super::error::{CompletionError, Result};
use crate::config::{Additions, Context, PartialConfig, StateDims, TensorConfig, context_line, state_dims_line};
use crate::onnx::{TensorInfo, open_axes};

pub fn additions(known: &Known) -> Result<Additions> {
    let config = known.config;
    let mut additions = Additions::default();
    let axes = BatchAxes::find(known);
    let has_batch = axes.as_ref().is_some_and(|axes| axes.fit_listed(known));
    if config.max_batch_size == 0 && has_batch && !known.is_unclear_batch() {
        add_batch(known, &mut additions);
    }
    let max_batch_size = additions.max_batch_size.unwrap_or(config.max_batch_size);
    let axes = axes.filter(|_| max_batch_size > 0);
    if config.inputs.is_empty() {
        if max_batch_size > 0 {
            check_shared(known, max_batch_size)?;
        }
        additions.inputs = inputs(known, axes.as_ref())?;
    }
    if config.outputs.is_empty() {
        if max_batch_size > 0 && axes.is_none() {
            check_batch(known, max_batch_size)?;
        }
        additions.outputs = outputs(known, axes.as_ref());
    }
    // Core takes scheduling from a backend only if the configuration has none.
    additions.oldest = !config.has_scheduling;
    Ok(additions)
}

/// Refuses a batch that may be any of several dimensions.
fn check_shared(known: &Known, max_batch_size: usize) -> Result<()> {
    let shared = known.shared_symbols();
    if shared.len() < 2 {
        return Ok(());
    }
    let undecided = known.signature.inputs.iter().filter(|info| known.is_undecided(info));
    let dims = |info: &TensorInfo| {
        let batch_axis = info.symbols.iter().position(|name| *name == shared[0]);
        StateDims { name: info.name.clone(), dims: info.dims.clone(), batch_axis }
    };
    let line = state_dims_line(undecided.map(dims));
    let names = shared.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    Err(CompletionError::UnclearBatch { max_batch_size, names, line })
}

/// Adds `max_batch_size`. A run gets one row where the rows of a run change each other's results, and where a state has
/// no batch dimension, or may have none.
fn add_batch(known: &Known, additions: &mut Additions) {
    let config = known.config;
    let has_one_row = known.mixes_rows || config.states.without_batch().is_some() || has_nameless_state(known);
    let runs_alone = has_one_row && !config.has_rows_per_run();
    // With `direct` there are as many sequences as `max_batch_size` says, so it cannot be 1.
    additions.max_batch_size = Some(if runs_alone && !config.is_direct() { 1 } else { known.usual_batch() });
    additions.max_rows_per_run = (runs_alone && config.is_direct()).then_some(1);
}

/// Whether requests name the batch, and the open dimension of a state has no name.
fn has_nameless_state(known: &Known) -> bool {
    let symbol = known.batch_symbol();
    let is_nameless = |info: &TensorInfo| {
        known.is_undecided(info) && batch_axis(info, symbol, true).is_some_and(|axis| info.symbol(axis).is_empty())
    };
    symbol.is_some() && known.signature.inputs.iter().any(is_nameless)
}

/// The list `input`: what is left for requests. `axes` are those of a model with a batch.
fn inputs(known: &Known, axes: Option<&BatchAxes>) -> Result<Vec<TensorConfig>> {
    let infos = known.signature.inputs.iter().enumerate().filter(|(_, info)| known.is_of_requests(info));
    let tensor = |(index, info): (usize, &TensorInfo)| {
        let axis = axes.map(|axes| axes.inputs[index]);
        Ok(tensor(info, dims_of_requests(known.config, info, axis.flatten())?, axis))
    };
    infos.map(tensor).collect()
}

/// The list `output`: all but the states.
fn outputs(known: &Known, axes: Option<&BatchAxes>) -> Vec<TensorConfig> {
    let infos = known.signature.outputs.iter().enumerate().filter(|(_, info)| known.is_of_responses(info));
    let tensor = |(index, info): (usize, &TensorInfo)| {
        let axis = axes.map(|axes| axes.outputs[index]);
        let mut tensor = tensor(info, info.dims.clone(), axis);
        let is_open = |axis: usize| tensor.dims[axis] < 0;
        let inside = axis.flatten().filter(|&axis| axis > 0);
        if known.config.gathers_steps() && !(0..tensor.dims.len()).any(|at| Some(at) != inside && is_open(at)) {
            // The steps of a request have a dimension of their own.
            tensor.dims.insert(0, -1);
        }
        tensor
    };
    infos.map(tensor).collect()
}

/// Refuses a `max_batch_size` where an output of the model has no batch dimension.
fn check_batch(known: &Known, max_batch_size: usize) -> Result<()> {
    let symbol = known.batch_symbol();
    // A dimension with a name of its own is no batch.
    let can_be_batch = |info: &TensorInfo, axis: usize| {
        info.symbol(axis).is_empty() || Some(info.symbol(axis)) == symbol || is_batch_name(info.symbol(axis))
    };
    let has_none = |info: &&TensorInfo| {
        let is_first_fixed = info.dims.first().is_some_and(|&dim| dim >= 0) && !known.is_constant(info);
        is_first_fixed && !open_axes(&info.dims, None).into_iter().any(|axis| can_be_batch(info, axis))
    };
    let mut answers = known.signature.outputs.iter().filter(|info| known.is_of_responses(info));
    let Some(TensorInfo { name, data_type, dims, .. }) = answers.find(has_none) else { return Ok(()) };
    let (output, described) = (name.clone(), format!("{data_type} {}", Dims(dims)));
    Err(CompletionError::NoBatch { max_batch_size, output, described })
}

/// The model's dims of an input, without what a context takes of them.
fn dims_of_requests(config: &PartialConfig, info: &TensorInfo, batch_axis: Option<usize>) -> Result<Vec<i64>> {
    let (mut dims, contexts) = (info.dims.clone(), &config.contexts);
    let context = config.context_of(&info.name);
    if let Some(window) = config.windows.of(&info.name) {
        let fits = |axis: usize| window.fits(dims[axis], context.map_or(0, |context| context.length));
        let can_be = |&axis: &usize| batch_axis != Some(axis) && fits(axis);
        let written = window.axis.or(context.and_then(|context| context.axis));
        let found: Vec<usize> = (0..dims.len()).filter(can_be).collect();
        // Where there are none or several, binding the model says what to write.
        for axis in found.into_iter().filter(|&axis| written.is_none_or(|written| written == axis)) {
            dims[axis] = -1;
        }
        return Ok(dims);
    }
    if let Some(context) = context {
        // An axis that the input does not have is refused when the model is bound.
        let axis = context.axis.map_or_else(|| context_axis(contexts, context, info, batch_axis), Ok)?;
        if let Some(dim) = dims.get_mut(axis) {
            *dim = context.sent(*dim).unwrap_or(*dim);
        }
    }
    Ok(dims)
}

/// The only axis that a context can stand along.
fn context_axis(
    contexts: &[Context],
    context: &Context,
    info: &TensorInfo,
    batch_axis: Option<usize>,
) -> Result<usize> {
    let can_be = |&axis: &usize| batch_axis != Some(axis) && context.sent(info.dims[axis]).is_some();
    let axes: Vec<usize> = (0..info.dims.len()).filter(can_be).collect();
    let (length, dims) = (context.length, Dims(&info.dims));
    let why = match axes.as_slice() {
        &[axis] => return Ok(axis),
        [] => format!("no dimension of the model's {dims} is {}", context.wanted()),
        axes => {
            let lines: Vec<_> = axes.iter().map(|&axis| context_line(contexts, &info.name, axis)).collect();
            format!(
                "{length} elements can stand along more than one axis of the model's {dims}: write {}",
                lines.join(", or ")
            )
        }
    };
    Err(CompletionError::ContextAxis { context: context.to_string(), why })
}

/// An entry of `input` or `output`. `axis` is the batch axis in a model that has one. Without a batch, Triton has no
/// scalars: requests and responses carry one element.
fn tensor(info: &TensorInfo, mut dims: Vec<i64>, axis: Option<Option<usize>>) -> TensorConfig {
    match axis {
        None if dims.is_empty() => dims.push(1),
        // The rank is not known, so anything may follow the batch.
        Some(Some(0)) if dims.is_empty() => dims.push(-1),
        Some(Some(0)) => drop(dims.remove(0)),
        _ => {}
    }
    TensorConfig { name: info.name.clone(), data_type: info.data_type, dims, optional: false }
}

#[cfg(test)]
#[path = "fill_tests.rs"]
mod tests;
