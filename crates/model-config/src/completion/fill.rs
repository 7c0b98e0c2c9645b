//! Fills what a configuration lacks: the batch, the lists of tensors, and how sequences are scheduled. Which dimension
//! of each tensor is the batch follows from the names and positions of open dimensions; where neither says it clearly,
//! there are warnings.

use rows::tensor::Dims;
use stateful_convert::is_batch_name;

use super::error::{CompletionError, Result};
use crate::config::{
    Additions, Context, PartialConfig, StateDims, StatePair, TensorConfig, context_line, state_dims_line,
};
use crate::onnx::{Nodes, Signature, TensorInfo, open_axes};

/// Rows of a batch, where nothing says how many.
const MAX_BATCH_SIZE: usize = 64;

/// A configuration and its model, and what is known of the two.
pub struct Known<'a> {
    pub config: &'a PartialConfig,
    pub signature: &'a Signature,
    pub pairs: &'a [StatePair],
    /// Inputs that requests do not carry although they are no states: controls, constants, lengths.
    pub taken: &'a [&'a str],
    pub nodes: &'a Nodes,
    pub default_max_batch_size: usize,
    /// Whether a row's result depends on the other rows of its batch.
    pub mixes_rows: bool,
}

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

impl<'a> Known<'a> {
    fn usual_batch(&self) -> usize {
        // Triton passes 4 if the command line says nothing, so a small number may not be what anybody has written.
        self.default_max_batch_size.max(MAX_BATCH_SIZE)
    }

    fn is_state(&self, info: &TensorInfo) -> bool {
        self.pairs.iter().any(|pair| pair.input == info.name)
    }

    /// Whether an input is a state's, and the configuration does not give the dims of that state.
    fn is_undecided(&self, info: &TensorInfo) -> bool {
        let states = &self.config.states;
        self.is_state(info) && states.written_dims(&info.name).is_none() && !states.is_declared(&info.name)
    }

    /// Whether responses carry an output: all but the states, or those if there is no other.
    fn is_of_responses(&self, info: &TensorInfo) -> bool {
        let is_state = |info: &TensorInfo| self.pairs.iter().any(|pair| pair.output == info.name);
        !is_state(info) || self.signature.outputs.iter().all(is_state)
    }

    fn is_of_requests(&self, info: &TensorInfo) -> bool {
        !self.is_state(info) && !self.taken.contains(&info.name.as_str())
    }

    fn is_constant(&self, output: &TensorInfo) -> bool {
        self.nodes.constant_outputs.contains(&output.name)
    }

    /// The names that the batch dimension may have.
    fn shared_symbols(&self) -> Vec<&'a str> {
        let axes = |info: &TensorInfo| self.config.states.batch_axes(&info.name, info.symbols.len());
        self.signature.batch_symbols(|info| self.is_state(info).then(|| axes(info)))
    }

    /// The name of the batch dimension: the one that states and requests share, else that of the first dimension of an
    /// input of requests.
    fn batch_symbol(&self) -> Option<&'a str> {
        let of_requests = self.signature.inputs.iter().filter(|info| self.is_of_requests(info));
        let mut first = of_requests.filter(|info| info.dims.first().is_some_and(|&dim| dim < 0));
        let shared = self.shared_symbols().first().copied();
        shared.or_else(|| first.find_map(|info| Some(info.symbol(0)).filter(|symbol| !symbol.is_empty())))
    }

    /// Whether dims of the configuration say where requests or responses have the batch.
    fn lists_tensors(&self) -> bool {
        !self.config.inputs.is_empty() || !self.config.outputs.is_empty()
    }

    /// Warns that the batch was not found by a usual name. The warning is that each request has its own run, or it
    /// names the position where the batch was found. The user confirms it by writing `max_batch_size`, or the position
    /// of the batch in states. `filled` is the `max_batch_size` that was filled in.
    pub fn batch_warning(&self, filled: Option<usize>) -> Option<String> {
        if self.config.max_batch_size > 0 {
            return None;
        }
        match filled {
            Some(size) => self.position_warning(size),
            // `state_dims` already says that a state has no batch.
            None if self.config.states.without_batch().is_some() => None,
            None => {
                let axes = BatchAxes::find(self)?;
                (axes.fit_listed(self) && self.is_unclear_batch()).then(|| self.unclear_warning(&axes))
            }
        }
    }

    fn position_warning(&self, max_batch_size: usize) -> Option<String> {
        let symbol = self.batch_symbol();
        let says_axis = self.config.states.dims.iter().any(|state| state.batch_axis.is_some());
        if says_axis || self.lists_tensors() || symbol.is_some_and(is_batch_name) {
            return None;
        }
        // If requests have a second open dimension, that one is the length, so the open dimension of a state is
        // probably the batch.
        let inputs = &self.signature.inputs;
        let have_lengths = inputs.iter().any(|info| self.is_of_requests(info) && open_axes(&info.dims, None).len() > 1);
        let doubtful = |info: &TensorInfo| {
            let axis = batch_axis(info, symbol, true)?;
            let is_doubtful = !info.symbols[axis].is_empty() || info.dims.contains(&1) || !have_lengths;
            is_doubtful.then(|| (info.name.clone(), axis, info.dims.clone()))
        };
        let (name, axis, dims) = inputs.iter().filter(|info| self.is_undecided(info)).find_map(doubtful)?;
        let varies = state_dims_line([StateDims { name: name.clone(), dims, batch_axis: None }]);
        let place = match symbol {
            Some(symbol) => format!("the one named '{symbol}', which requests and states share"),
            None => "the first dimension of what requests carry, and the only open one of each state".to_owned(),
        };
        Some(format!(
            "the names of the model's dimensions do not say which is the batch, so it is taken to be {place}, such as \
             dimension {axis} of '{name}': if that is right, write max_batch_size: {max_batch_size}; if a state varies along \
             that dimension instead, write {varies}"
        ))
    }

    fn unclear_warning(&self, axes: &BatchAxes) -> String {
        let with_batch = |(info, &batch_axis): (&TensorInfo, &Option<usize>)| {
            let dims = StateDims { name: info.name.clone(), dims: info.dims.clone(), batch_axis };
            (self.is_undecided(info) && batch_axis.is_some()).then_some(dims)
        };
        let of_requests = |(info, axis): (&TensorInfo, &Option<usize>)| {
            axis.filter(|_| self.is_of_requests(info)).map(|axis| format!("dimension {axis} of '{}'", info.name))
        };
        let of_inputs = || self.signature.inputs.iter().zip(&axes.inputs);
        let place = of_inputs().find_map(of_requests).unwrap_or_default();
        let states: Vec<_> = of_inputs().filter_map(with_batch).collect();
        let mut lines = format!("max_batch_size: {}", self.usual_batch());
        if !states.is_empty() {
            let line = state_dims_line(states);
            lines += &format!(" and {line}, with -1 in the place of each dimension that varies");
        }
        let name = self.batch_symbol().unwrap_or_default();
        format!(
            "max_batch_size is 0, so each request has a run of its own: {place}, '{name}', may be the batch, but it has no \
             usual name of a batch, and may be a length; if it is the batch, write {lines}"
        )
    }

    /// Whether it is unclear that there is a batch, because the configuration doesn't mention it and its name is not a
    /// usual one. A name is accepted if it is the only one that requests and states share, and if it follows an open
    /// dimension with another name in requests, as in `[time, batch, features]`.
    fn is_unclear_batch(&self) -> bool {
        let Some(symbol) = self.batch_symbol().filter(|_| !self.lists_tensors()) else { return false };
        let says_so = |state: &StateDims| {
            let info = self.signature.input(&state.name);
            let named = info.zip(state.batch_axis).and_then(|(info, axis)| info.symbols.get(axis));
            named.is_some_and(|name| name == symbol)
        };
        if is_batch_name(symbol) || self.config.states.dims.iter().any(says_so) {
            return false;
        }
        let is_behind = |info: &TensorInfo| {
            info.symbols.iter().position(|name| name == symbol) == Some(1) && !info.symbol(0).is_empty()
        };
        let agrees = |info: &TensorInfo| {
            if self.is_state(info) {
                info.symbols.iter().take(2).any(|name| name == symbol)
            } else {
                !self.is_of_requests(info) || open_axes(&info.dims, None).is_empty() || is_behind(info)
            }
        };
        self.shared_symbols() != [symbol] || !self.signature.inputs.iter().all(agrees)
    }
}

/// Which dimension of each tensor is the batch, in the model's order; `None` for a tensor without one.
struct BatchAxes {
    inputs: Vec<Option<usize>>,
    outputs: Vec<Option<usize>>,
}

impl BatchAxes {
    /// `None` if the model has no batch dimension.
    fn find(known: &Known) -> Option<Self> {
        let (states, signature, symbol) = (&known.config.states, known.signature, known.batch_symbol());
        let of_state = |info: &TensorInfo| match states.written_dims(&info.name) {
            Some(written) => Some(written.batch_axis),
            // The model is not bound without an answer to which it is.
            None if is_unclear(info) && !states.is_declared(&info.name) => Some(None),
            None => batch_axis(info, symbol, true).map(Some),
        };
        let of_input = |info: &TensorInfo| {
            // Requests that share a run share what has no open dimension.
            if known.taken.contains(&info.name.as_str())
                || (open_axes(&info.dims, None).is_empty() && known.is_of_requests(info))
            {
                Some(None)
            } else if known.is_state(info) {
                of_state(info)
            } else {
                batch_axis(info, symbol, false).map(Some)
            }
        };
        let inputs = signature.inputs.iter().map(of_input).collect::<Option<Vec<_>>>()?;
        let of_requests = || signature.inputs.iter().zip(&inputs).filter(|(info, _)| known.is_of_requests(info));
        let request_axes: Vec<usize> = of_requests().filter_map(|(_, &axis)| axis).collect();
        // Of the requests' other dimensions, such as the steps.
        let other_symbols: Vec<&str> = of_requests()
            .flat_map(|(info, &batch)| open_axes(&info.dims, None).into_iter().map(move |axis| (info, batch, axis)))
            .filter(|&(_, batch, axis)| Some(axis) != batch)
            .map(|(info, _, axis)| info.symbol(axis))
            .filter(|symbol| !symbol.is_empty())
            .collect();
        let of_output = |info: &TensorInfo| {
            // Every row has the same value.
            if open_axes(&info.dims, None).is_empty() && known.is_constant(info) {
                return Some(None);
            }
            if info.dims.is_empty() {
                // Of an output of unknown rank, the batch is the first dimension.
                return (!known.nodes.scalar_outputs.contains(&info.name)).then_some(Some(0));
            }
            // The output of a state has its batch where the input has it, whatever the model says.
            let pair = known.pairs.iter().find(|pair| pair.output == info.name);
            match pair.and_then(|pair| signature.input(&pair.input)) {
                Some(state) => of_state(state),
                None => {
                    named_axis(info, symbol).or_else(|| unnamed_axis(info, &request_axes, &other_symbols)).map(Some)
                }
            }
        };
        // An output without a batch may hold one row only, and then the model takes no batch at all.
        let outputs = signature.outputs.iter().map(of_output).collect::<Option<Vec<_>>>()?;
        (!request_axes.is_empty()).then_some(Self { inputs, outputs })
    }

    /// Whether the dims in the configuration leave the batch out.
    fn fit_listed(&self, Known { config, signature, .. }: &Known) -> bool {
        let leaves_out = |listed: &[TensorConfig], infos: &[TensorInfo], axes: &[Option<usize>]| {
            listed.iter().all(|tensor| {
                let Some(at) = infos.iter().position(|info| info.name == tensor.name) else { return true };
                axes[at] != Some(0) || infos[at].dims.is_empty() || tensor.dims.len() < infos[at].dims.len()
            })
        };
        leaves_out(&config.inputs, &signature.inputs, &self.inputs)
            && leaves_out(&config.outputs, &signature.outputs, &self.outputs)
    }
}

/// The batch axis of an input; `None` if it has none that can be told.
fn batch_axis(info: &TensorInfo, symbol: Option<&str>, is_state: bool) -> Option<usize> {
    let is_named = |axis: usize| info.dims[axis] < 0 && symbol == Some(info.symbol(axis));
    if (0..info.dims.len()).any(is_named) {
        return named_axis(info, symbol);
    }
    match *open_axes(&info.dims, None).as_slice() {
        // A state may have its batch anywhere, but not in a dimension with another name, unless both are usual ones.
        [axis] if is_state && (symbol.is_none() || info.symbol(axis).is_empty()) => Some(axis),
        [axis] if is_state && symbol.is_some_and(is_batch_name) && is_batch_name(info.symbol(axis)) => Some(axis),
        [0, ..] if !is_state && info.symbol(0).is_empty() => Some(0),
        _ => None,
    }
}

/// Whether several dimensions of a state can be the batch, and nothing says which.
fn is_unclear(info: &TensorInfo) -> bool {
    let open = open_axes(&info.dims, None);
    open.len() > 1 && open.iter().all(|&axis| info.symbol(axis).is_empty())
}

/// The only open dimension with the name of the batch.
fn named_axis(info: &TensorInfo, symbol: Option<&str>) -> Option<usize> {
    let mut named = open_axes(&info.dims, None).into_iter().filter(|&axis| symbol == Some(info.symbol(axis)));
    named.next().filter(|_| named.next().is_none())
}

/// The batch axis of an output whose dims don't have the batch's name: its only open dimension, or the first one if the
/// batch is first in all inputs of requests. A dimension with the name of another one of requests is no batch.
fn unnamed_axis(info: &TensorInfo, request_axes: &[usize], other_symbols: &[&str]) -> Option<usize> {
    let axis = match *open_axes(&info.dims, None).as_slice() {
        [axis] => axis,
        [0, ..] if request_axes.iter().all(|&axis| axis == 0) => 0,
        _ => return None,
    };
    Some(axis).filter(|&axis| !other_symbols.contains(&info.symbol(axis)))
}

#[cfg(test)]
#[path = "fill_tests.rs"]
mod tests;
