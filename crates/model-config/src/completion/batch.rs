//! Which dimension of each tensor is the batch, by the names and positions of open dimensions, and warnings where neither
//! says it clearly.

use stateful_convert::is_batch_name;

use crate::config::{PartialConfig, StateDims, StatePair, TensorConfig, state_dims_line};
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

impl<'a> Known<'a> {
    pub fn usual_batch(&self) -> usize {
        // Triton passes 4 if the command line says nothing, so a small number may not be what anybody has written.
        self.default_max_batch_size.max(MAX_BATCH_SIZE)
    }

    fn is_state(&self, info: &TensorInfo) -> bool {
        self.pairs.iter().any(|pair| pair.input == info.name)
    }

    /// Whether an input is a state's, and the configuration does not give the dims of that state.
    pub fn is_undecided(&self, info: &TensorInfo) -> bool {
        let states = &self.config.states;
        self.is_state(info) && states.written_dims(&info.name).is_none() && !states.is_declared(&info.name)
    }

    /// Whether responses carry an output: all but the states, or those if there is no other.
    pub fn is_of_responses(&self, info: &TensorInfo) -> bool {
        let is_state = |info: &TensorInfo| self.pairs.iter().any(|pair| pair.output == info.name);
        !is_state(info) || self.signature.outputs.iter().all(is_state)
    }

    pub fn is_of_requests(&self, info: &TensorInfo) -> bool {
        !self.is_state(info) && !self.taken.contains(&info.name.as_str())
    }

    pub fn is_constant(&self, output: &TensorInfo) -> bool {
        self.nodes.constant_outputs.contains(&output.name)
    }

    /// The names that the batch dimension may have.
    pub fn shared_symbols(&self) -> Vec<&'a str> {
        let axes = |info: &TensorInfo| self.config.states.batch_axes(&info.name, info.symbols.len());
        self.signature.batch_symbols(|info| self.is_state(info).then(|| axes(info)))
    }

    /// The name of the batch dimension: the one that states and requests share, else that of the first dimension of an
    /// input of requests.
    pub fn batch_symbol(&self) -> Option<&'a str> {
        let of_requests = self.signature.inputs.iter().filter(|info| self.is_of_requests(info));
        let mut first = of_requests.filter(|info| info.dims.first().is_some_and(|&dim| dim < 0));
        let shared = self.shared_symbols().first().copied();
        shared.or_else(|| first.find_map(|info| Some(info.symbol(0)).filter(|symbol| !symbol.is_empty())))
    }

    /// Whether dims of the configuration say where requests or responses have the batch.
    fn lists_tensors(&self) -> bool {
        !self.config.inputs.is_empty() || !self.config.outputs.is_empty()
    }

    /// Warns that the batch was not found by a usual name. The warning is that each request has its own run, or it names the
    /// position where the batch was found. The user confirms it by writing `max_batch_size`, or the position of the batch in
    /// states. `filled` is the `max_batch_size` that was filled in.
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
        // If requests have a second open dimension, that one is the length, so the open dimension of a state is probably the
        // batch.
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

    /// Whether it is unclear that there is a batch, because the configuration doesn't mention it and its name is not a usual
    /// one. A name is accepted if it is the only one that requests and states share, and if it follows an open dimension with
    /// another name in requests, as in `[time, batch, features]`.
    pub fn is_unclear_batch(&self) -> bool {
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
pub struct BatchAxes {
    pub inputs: Vec<Option<usize>>,
    pub outputs: Vec<Option<usize>>,
}

impl BatchAxes {
    /// `None` if the model has no batch dimension.
    pub fn find(known: &Known) -> Option<Self> {
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
    pub fn fit_listed(&self, Known { config, signature, .. }: &Known) -> bool {
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
pub fn batch_axis(info: &TensorInfo, symbol: Option<&str>, is_state: bool) -> Option<usize> {
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
