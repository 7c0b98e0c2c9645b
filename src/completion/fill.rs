//! Filling what a configuration lacks.

use rows::tensor::Dims;
use stateful_convert::is_batch_name;

use super::CompletionError;
use crate::config::{
    Additions, Context, OldestSequences, PartialConfig, StateDims, StatePair, States, TensorConfig, context_line,
    state_dims_line,
};
use crate::session::{Signature, TensorInfo};

/// Rows of a batch, where nothing says how many.
const MAX_BATCH_SIZE: usize = 64;
/// Triton's own idle limit is a second. A client that records speech and sends nothing in silence needs more.
const SEQUENCES: OldestSequences = OldestSequences { idle_us_max: 60_000_000, candidates_max: 1024 };

/// What is known of a model besides its signature.
pub struct Known<'a> {
    /// Its states.
    pub pairs: &'a [StatePair],
    /// Inputs that requests do not carry although they are no states: controls, constants, lengths.
    pub taken: &'a [&'a str],
    /// Outputs that are the same in every run.
    pub constant_outputs: &'a [String],
    /// Outputs that are scalars.
    pub scalar_outputs: &'a [String],
    /// `--backend-config=default-max-batch-size`.
    pub default_max_batch_size: usize,
    /// Whether a row's result depends on the other rows of its batch.
    pub mixes_rows: bool,
}

/// What a configuration lacks.
pub fn additions(config: &PartialConfig, signature: &Signature, known: &Known) -> Result<Additions, CompletionError> {
    let mut additions = Additions::default();
    let axes = BatchAxes::find(&config.states, signature, known);
    let has_batch = axes.as_ref().is_some_and(|axes| axes.fit_listed(config, signature));
    if config.max_batch_size == 0 && has_batch && !is_unclear_batch(config, signature, known) {
        add_batch(config, signature, known, &mut additions);
    }
    let max_batch_size = additions.max_batch_size.unwrap_or(config.max_batch_size);
    let axes = axes.filter(|_| max_batch_size > 0);
    if config.inputs.is_empty() {
        if max_batch_size > 0 {
            check_shared(config, signature, known, max_batch_size)?;
        }
        additions.inputs = inputs(signature, known, &config.contexts, axes.as_ref())?;
    }
    if config.outputs.is_empty() {
        if max_batch_size > 0 && axes.is_none() {
            check_batch(&config.states, signature, known, max_batch_size)?;
        }
        additions.outputs = outputs(signature, known, axes.as_ref());
    }
    additions.sequences = (!config.has_scheduling()).then_some(SEQUENCES);
    Ok(additions)
}

/// Warns that the batch was not found by a usual name: of each request's own run, or of the position where the batch was
/// found. Writing `max_batch_size`, or where the batch of states is, confirms it. `filled` is the `max_batch_size` that
/// was filled in.
pub fn batch_warning(
    config: &PartialConfig,
    signature: &Signature,
    known: &Known,
    filled: Option<usize>,
) -> Option<String> {
    if config.max_batch_size > 0 {
        return None;
    }
    match filled {
        Some(size) => position_warning(config, signature, known, size),
        // `state_dims` has said that a state has no batch.
        None if config.states.without_batch().is_some() => None,
        None => {
            let axes = BatchAxes::find(&config.states, signature, known)?;
            let is_unclear = axes.fit_listed(config, signature) && is_unclear_batch(config, signature, known);
            is_unclear.then(|| unclear_warning(config, signature, known, &axes))
        }
    }
}

fn position_warning(
    config: &PartialConfig,
    signature: &Signature,
    known: &Known,
    max_batch_size: usize,
) -> Option<String> {
    let symbol = batch_symbol(&config.states, signature, known);
    let is_confirmed = config.states.dims.iter().any(|state| state.batch_axis.is_some()) || lists_tensors(config);
    if is_confirmed || symbol.is_some_and(is_batch_name) {
        return None;
    }
    // Requests with a second open dimension have a length there, so that of a state is rather the batch.
    let have_lengths = signature.inputs.iter().any(|info| known.is_of_requests(info) && open_axes(info).len() > 1);
    let doubtful = |info: &TensorInfo| {
        let axis = batch_axis(info, symbol, true)?;
        let has_one = info.dims.contains(&1);
        let is_doubtful = !info.symbols[axis].is_empty() || has_one || !have_lengths;
        is_doubtful.then(|| (info.name.clone(), axis, info.dims.clone()))
    };
    let mut undecided = signature.inputs.iter().filter(|info| is_undecided(&config.states, known, info));
    let (name, axis, dims) = undecided.find_map(doubtful)?;
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

fn unclear_warning(config: &PartialConfig, signature: &Signature, known: &Known, axes: &BatchAxes) -> String {
    let with_batch = |(info, &batch_axis): (&TensorInfo, &Option<usize>)| {
        let dims = StateDims { name: info.name.clone(), dims: info.dims.clone(), batch_axis };
        (is_undecided(&config.states, known, info) && batch_axis.is_some()).then_some(dims)
    };
    let of_requests = |(info, axis): (&TensorInfo, &Option<usize>)| {
        axis.filter(|_| known.is_of_requests(info)).map(|axis| format!("dimension {axis} of '{}'", info.name))
    };
    let of_inputs = || signature.inputs.iter().zip(&axes.inputs);
    let place = of_inputs().find_map(of_requests).unwrap_or_default();
    let states: Vec<_> = of_inputs().filter_map(with_batch).collect();
    let size = known.usual_batch();
    let lines = if states.is_empty() {
        format!("max_batch_size: {size}")
    } else {
        format!(
            "max_batch_size: {size} and {}, with -1 in the place of each dimension that varies",
            state_dims_line(states)
        )
    };
    let name = batch_symbol(&config.states, signature, known).unwrap_or_default();
    format!(
        "max_batch_size is 0, so each request has a run of its own: {place}, '{name}', may be the batch, but it has no \
         usual name of a batch, and may be a length; if it is the batch, write {lines}"
    )
}

/// Whether a configuration that says nothing of the batch leaves open whether there is one, as its name is no usual one.
/// A name is believed if it is the only one that requests and states share, and stands behind an open dimension with
/// another name in requests, as in `[time, batch, features]`.
fn is_unclear_batch(config: &PartialConfig, signature: &Signature, known: &Known) -> bool {
    if lists_tensors(config) {
        return false;
    }
    let Some(symbol) = batch_symbol(&config.states, signature, known) else { return false };
    let says_so = |state: &StateDims| {
        let info = signature.inputs.iter().find(|info| info.name == state.name);
        info.zip(state.batch_axis).is_some_and(|(info, axis)| info.symbols.get(axis).is_some_and(|name| name == symbol))
    };
    if is_batch_name(symbol) || config.states.dims.iter().any(says_so) {
        return false;
    }
    let is_behind = |info: &TensorInfo| {
        info.symbols.iter().position(|name| name == symbol) == Some(1) && !info.symbol(0).is_empty()
    };
    let is_in_front = |info: &TensorInfo| info.symbols.iter().take(2).any(|name| name == symbol);
    let agrees = |info: &TensorInfo| {
        if known.is_state(info) {
            is_in_front(info)
        } else {
            !known.is_of_requests(info) || is_fixed(info) || is_behind(info)
        }
    };
    shared_symbols(&config.states, signature, known) != [symbol] || !signature.inputs.iter().all(agrees)
}

/// Refuses a batch that may be any of several dimensions.
fn check_shared(
    config: &PartialConfig,
    signature: &Signature,
    known: &Known,
    max_batch_size: usize,
) -> Result<(), CompletionError> {
    let shared = shared_symbols(&config.states, signature, known);
    if shared.len() < 2 {
        return Ok(());
    }
    let undecided = signature.inputs.iter().filter(|info| is_undecided(&config.states, known, info));
    let dims = |info: &TensorInfo| {
        let batch_axis = info.symbols.iter().position(|name| *name == shared[0]);
        StateDims { name: info.name.clone(), dims: info.dims.clone(), batch_axis }
    };
    let line = state_dims_line(undecided.map(dims));
    let names = shared.iter().map(|name| format!("'{name}'")).collect();
    Err(CompletionError::UnclearBatch { max_batch_size, names, line })
}

/// Whether dims of the configuration say where requests or responses have the batch.
fn lists_tensors(config: &PartialConfig) -> bool {
    !config.inputs.is_empty() || !config.outputs.is_empty()
}

/// Whether an input is a state's, and the configuration does not give the dims of that state.
fn is_undecided(states: &States, known: &Known, info: &TensorInfo) -> bool {
    known.is_state(info) && states.written_dims(&info.name).is_none() && !states.is_declared(&info.name)
}

/// Adds `max_batch_size`. A run gets one row where the rows of a run change each other's results, and where a state has
/// no batch dimension, or may have none.
fn add_batch(config: &PartialConfig, signature: &Signature, known: &Known, additions: &mut Additions) {
    let usual = known.usual_batch();
    let has_one_row =
        known.mixes_rows || config.states.without_batch().is_some() || has_nameless_state(config, signature, known);
    if !has_one_row || config.has_rows_per_run() {
        additions.max_batch_size = Some(usual);
    } else if config.is_direct() {
        // With `direct` there are as many sequences as `max_batch_size` says, so it cannot be 1.
        additions.max_batch_size = Some(usual);
        additions.max_rows_per_run = Some(1);
    } else {
        additions.max_batch_size = Some(1);
    }
}

/// Whether requests name the batch, and the open dimension of a state has no name.
fn has_nameless_state(config: &PartialConfig, signature: &Signature, known: &Known) -> bool {
    let symbol = batch_symbol(&config.states, signature, known);
    let is_nameless = |info: &TensorInfo| {
        is_undecided(&config.states, known, info)
            && batch_axis(info, symbol, true).is_some_and(|axis| info.symbol(axis).is_empty())
    };
    symbol.is_some() && signature.inputs.iter().any(is_nameless)
}

/// The list `input`: what is left for requests. `axes` are those of a model with a batch.
fn inputs(
    signature: &Signature,
    known: &Known,
    contexts: &[Context],
    axes: Option<&BatchAxes>,
) -> Result<Vec<TensorConfig>, CompletionError> {
    let infos = signature.inputs.iter().enumerate().filter(|(_, info)| known.is_of_requests(info));
    let tensor = |(index, info): (usize, &TensorInfo)| {
        let axis = axes.map(|axes| axes.inputs[index]);
        Ok(tensor(info, dims_of_requests(contexts, info, axis.flatten())?, axis))
    };
    infos.map(tensor).collect()
}

/// The list `output`: all but the states.
fn outputs(signature: &Signature, known: &Known, axes: Option<&BatchAxes>) -> Vec<TensorConfig> {
    let infos = signature.outputs.iter().enumerate().filter(|(_, info)| known.is_of_responses(info, signature));
    let tensor =
        |(index, info): (usize, &TensorInfo)| tensor(info, info.dims.clone(), axes.map(|axes| axes.outputs[index]));
    infos.map(tensor).collect()
}

/// Refuses a `max_batch_size` where an output of the model has no batch dimension.
fn check_batch(
    states: &States,
    signature: &Signature,
    known: &Known,
    max_batch_size: usize,
) -> Result<(), CompletionError> {
    let symbol = batch_symbol(states, signature, known);
    // A dimension with a name of its own is no batch.
    let can_be_batch = |info: &TensorInfo, axis: usize| {
        info.symbol(axis).is_empty() || Some(info.symbol(axis)) == symbol || is_batch_name(info.symbol(axis))
    };
    let has_none = |info: &&TensorInfo| {
        let is_first_fixed = info.dims.first().is_some_and(|&dim| dim >= 0) && !known.is_constant(info);
        is_first_fixed && !open_axes(info).into_iter().any(|axis| can_be_batch(info, axis))
    };
    let mut answers = signature.outputs.iter().filter(|info| known.is_of_responses(info, signature));
    match answers.find(has_none) {
        None => Ok(()),
        Some(TensorInfo { name, data_type, dims, .. }) => {
            let (output, described) = (name.clone(), format!("{data_type} {}", Dims(dims)));
            Err(CompletionError::NoBatch { max_batch_size, output, described })
        }
    }
}

fn is_fixed(info: &TensorInfo) -> bool {
    info.dims.iter().all(|&dim| dim >= 0)
}

/// The model's dims of an input, without what a context takes of them.
fn dims_of_requests(
    contexts: &[Context],
    info: &TensorInfo,
    batch_axis: Option<usize>,
) -> Result<Vec<i64>, CompletionError> {
    let mut dims = info.dims.clone();
    if let Some(context) = contexts.iter().find(|context| context.input == info.name) {
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
) -> Result<usize, CompletionError> {
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

impl Known<'_> {
    fn usual_batch(&self) -> usize {
        self.default_max_batch_size.max(MAX_BATCH_SIZE)
    }

    fn is_state(&self, info: &TensorInfo) -> bool {
        self.pairs.iter().any(|pair| pair.input == info.name)
    }

    /// Whether responses carry an output: all but the states, or those if there is no other.
    fn is_of_responses(&self, info: &TensorInfo, signature: &Signature) -> bool {
        let is_state = |info: &TensorInfo| self.pairs.iter().any(|pair| pair.output == info.name);
        !is_state(info) || signature.outputs.iter().all(is_state)
    }

    fn is_of_requests(&self, info: &TensorInfo) -> bool {
        !self.is_state(info) && !self.taken.contains(&info.name.as_str())
    }

    fn is_constant(&self, output: &TensorInfo) -> bool {
        self.constant_outputs.contains(&output.name)
    }
}

/// Which dimension of each tensor is the batch, in the model's order; `None` for a tensor without one.
struct BatchAxes {
    inputs: Vec<Option<usize>>,
    outputs: Vec<Option<usize>>,
}

impl BatchAxes {
    /// `None` if the model has no batch dimension.
    fn find<'a>(states: &States, signature: &'a Signature, known: &Known) -> Option<Self> {
        let symbol = batch_symbol(states, signature, known);
        let of_state = |info: &TensorInfo| match states.written_dims(&info.name) {
            Some(written) => Some(written.batch_axis),
            // The model is not bound without an answer to which it is.
            None if is_unclear(info) && !states.is_declared(&info.name) => Some(None),
            None => batch_axis(info, symbol, true).map(Some),
        };
        let of_input = |info: &TensorInfo| {
            // Requests that share a run share what has no open dimension.
            if known.taken.contains(&info.name.as_str()) || (is_fixed(info) && known.is_of_requests(info)) {
                Some(None)
            } else if known.is_state(info) {
                of_state(info)
            } else {
                batch_axis(info, symbol, false).map(Some)
            }
        };
        let inputs = signature.inputs.iter().map(of_input).collect::<Option<Vec<_>>>()?;
        let of_requests = |(info, axis): (&TensorInfo, &Option<usize>)| axis.filter(|_| known.is_of_requests(info));
        let request_axes: Vec<usize> = signature.inputs.iter().zip(&inputs).filter_map(of_requests).collect();
        // Of the requests' other dimensions, such as the steps.
        let others = |(info, &batch): (&'a TensorInfo, &Option<usize>)| {
            let axes =
                open_axes(info).into_iter().filter(move |&axis| known.is_of_requests(info) && Some(axis) != batch);
            axes.map(|axis| info.symbol(axis)).filter(|symbol| !symbol.is_empty())
        };
        let other_symbols: Vec<&str> = signature.inputs.iter().zip(&inputs).flat_map(others).collect();
        let of_output = |info: &TensorInfo| {
            // Every row has the same value.
            if is_fixed(info) && known.is_constant(info) {
                return Some(None);
            }
            if info.dims.is_empty() {
                // Of an output of unknown rank, the batch is the first dimension.
                return (!known.scalar_outputs.contains(&info.name)).then_some(Some(0));
            }
            // The output of a state has its batch where the input has it, whatever the model says.
            let pair = known.pairs.iter().find(|pair| pair.output == info.name);
            let state = pair.and_then(|pair| signature.inputs.iter().find(|info| info.name == pair.input));
            match state {
                Some(state) => of_state(state),
                None => {
                    named_axis(info, symbol).or_else(|| unnamed_axis(info, &request_axes, &other_symbols)).map(Some)
                }
            }
        };
        let outputs = signature.outputs.iter().map(of_output).collect::<Option<Vec<_>>>()?;
        (!request_axes.is_empty()).then_some(Self { inputs, outputs })
    }

    /// Whether the dims in the configuration leave the batch out.
    fn fit_listed(&self, config: &PartialConfig, signature: &Signature) -> bool {
        let leaves_out = |listed: &[TensorConfig], infos: &[TensorInfo], axes: &[Option<usize>]| {
            listed.iter().all(|tensor| {
                let index = infos.iter().position(|info| info.name == tensor.name);
                index
                    .filter(|&index| axes[index] == Some(0))
                    .is_none_or(|index| tensor.dims.len() < infos[index].dims.len() || infos[index].dims.is_empty())
            })
        };
        leaves_out(&config.inputs, &signature.inputs, &self.inputs)
            && leaves_out(&config.outputs, &signature.outputs, &self.outputs)
    }
}

/// The name of the batch dimension: the one that states and requests share, else that of the first dimension of an
/// input of requests.
fn batch_symbol<'a>(states: &States, signature: &'a Signature, known: &Known) -> Option<&'a str> {
    let of_requests = signature.inputs.iter().filter(|info| known.is_of_requests(info));
    let mut first = of_requests.filter(|info| info.dims.first().is_some_and(|&dim| dim < 0));
    match shared_symbols(states, signature, known).first() {
        Some(symbol) => Some(symbol),
        None => first.find_map(|info| Some(info.symbol(0)).filter(|symbol| !symbol.is_empty())),
    }
}

fn shared_symbols<'a>(states: &States, signature: &'a Signature, known: &Known) -> Vec<&'a str> {
    signature.batch_symbols(|info| known.is_state(info).then(|| states.batch_axes(&info.name, info.symbols.len())))
}

/// The batch axis of an input; `None` if it has none that can be told.
fn batch_axis(info: &TensorInfo, symbol: Option<&str>, is_state: bool) -> Option<usize> {
    let is_named = |axis: usize| info.dims[axis] < 0 && symbol == Some(info.symbol(axis));
    if (0..info.dims.len()).any(is_named) {
        return named_axis(info, symbol);
    }
    match *open_axes(info).as_slice() {
        // A state may have its batch anywhere, but not in a dimension with another name, unless both are usual ones.
        [axis] if is_state && (symbol.is_none() || info.symbol(axis).is_empty()) => Some(axis),
        [axis] if is_state && symbol.is_some_and(is_batch_name) && is_batch_name(info.symbol(axis)) => Some(axis),
        [0, ..] if !is_state && info.symbol(0).is_empty() => Some(0),
        _ => None,
    }
}

/// Whether several dimensions of a state can be the batch, and nothing says which.
fn is_unclear(info: &TensorInfo) -> bool {
    let open = open_axes(info);
    open.len() > 1 && open.iter().all(|&axis| info.symbol(axis).is_empty())
}

/// The only open dimension with the name of the batch.
fn named_axis(info: &TensorInfo, symbol: Option<&str>) -> Option<usize> {
    let mut named = open_axes(info).into_iter().filter(|&axis| symbol == Some(info.symbol(axis)));
    named.next().filter(|_| named.next().is_none())
}

fn open_axes(info: &TensorInfo) -> Vec<usize> {
    (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect()
}

/// The batch axis of an output whose dims don't have the batch's name: its only open dimension, or the first one if the
/// batch is first in all inputs of requests. A dimension with the name of another one of requests is no batch.
fn unnamed_axis(info: &TensorInfo, request_axes: &[usize], other_symbols: &[&str]) -> Option<usize> {
    let axis = match *open_axes(info).as_slice() {
        [axis] => axis,
        [0, ..] if request_axes.iter().all(|&axis| axis == 0) => 0,
        _ => return None,
    };
    Some(axis).filter(|&axis| !other_symbols.contains(&info.symbol(axis)))
}

/// An entry of `input` or `output`. `axis` is the batch axis in a model that has one. Without a batch, Triton has no
/// scalars: requests and responses carry one element.
fn tensor(info: &TensorInfo, mut dims: Vec<i64>, axis: Option<Option<usize>>) -> TensorConfig {
    if axis.is_none() && dims.is_empty() {
        dims.push(1);
    } else if axis == Some(Some(0)) {
        if dims.is_empty() {
            dims.push(-1);
        } else {
            dims.remove(0);
        }
    }
    TensorConfig { name: info.name.clone(), data_type: info.data_type, dims, optional: false }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use rows::tensor::DataType;

    fn info((name, dims): (&str, &[&str])) -> TensorInfo {
        let dim = |text: &&str| text.parse().unwrap_or(-1);
        let symbol =
            |text: &&str| if text.parse::<i64>().is_ok() || *text == "?" { String::new() } else { (*text).to_owned() };
        let data_type = DataType::Fp32;
        TensorInfo {
            name: name.to_owned(),
            data_type,
            dims: dims.iter().map(dim).collect(),
            symbols: dims.iter().map(symbol).collect(),
        }
    }

    type Specs<'a> = &'a [(&'a str, &'a [&'a str])];

    fn signature(inputs: Specs, outputs: Specs) -> Signature {
        let [inputs, outputs] = [inputs, outputs].map(|specs| specs.iter().copied().map(info).collect());
        Signature { inputs, defaults: Vec::new(), outputs }
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<StatePair> {
        let pair = |&(input, output): &(&str, &str)| StatePair { input: input.to_owned(), output: output.to_owned() };
        pairs.iter().map(pair).collect()
    }

    /// What is known of a model that has these states and nothing special.
    fn known(pairs: &[StatePair]) -> Known<'_> {
        let (taken, constant_outputs, scalar_outputs) = (&[][..], &[][..], &[][..]);
        Known { pairs, taken, constant_outputs, scalar_outputs, default_max_batch_size: 4, mixes_rows: false }
    }

    /// The document for Triton; the same as before if nothing is added.
    fn filled(config: &Value, signature: &Signature, known: Known) -> Result<Value, CompletionError> {
        let mut config = PartialConfig::from_json(config.to_string().as_bytes())?;
        let additions = additions(&config, signature, &known)?;
        config.add(&additions);
        Ok(config.document().clone())
    }

    fn completed(config: Value, signature: &Signature, pairs: &[(&str, &str)], taken: &[&str]) -> Option<Value> {
        let pairs = self::pairs(pairs);
        let known = Known { taken, ..known(&pairs) };
        Some(filled(&config, signature, known).unwrap()).filter(|filled| *filled != config)
    }

    fn dims(config: &Value, list: &str) -> Vec<(String, Value)> {
        let tensors = config[list].as_array().unwrap().iter();
        tensors.map(|tensor| (tensor["name"].as_str().unwrap().to_owned(), tensor["dims"].clone())).collect()
    }

    const S: [(&str, &str); 1] = [("s", "s2")];

    #[test]
    fn nothing_written_is_filled_from_the_signature() {
        let silero = signature(
            &[("input", &["?", "?"]), ("state", &["2", "?", "128"]), ("sr", &[])],
            &[("output", &["?", "1"]), ("stateN", &["?", "?", "?"])],
        );
        let oldest = json!({ "scheduling": { "string_value": "oldest" } });
        let config = json!({ "name": "m", "instance_group": [{ "count": 2 }], "parameters": oldest });
        let config = completed(config, &silero, &[("state", "stateN")], &["sr"]).unwrap();
        assert_eq!(config["max_batch_size"], 64);
        assert_eq!(dims(&config, "input"), [("input".to_owned(), json!([-1]))]);
        assert_eq!(dims(&config, "output"), [("output".to_owned(), json!([1]))]);
        assert_eq!(config["sequence_batching"]["max_sequence_idle_microseconds"], 60_000_000);
        assert_eq!(config["sequence_batching"]["oldest"]["max_candidate_sequences"], 1024);
        let one = completed(json!({ "name": "m" }), &silero, &[("state", "stateN")], &["sr"]).unwrap();
        assert!(one.get("sequence_batching").is_none(), "this backend schedules it");
    }

    #[test]
    fn a_model_that_mixes_rows_gets_batches_of_one() {
        let model = signature(&[("x", &["N", "T"]), ("s", &["N", "4"])], &[("y", &["N", "T"]), ("s2", &["N", "4"])]);
        let pairs = pairs(&S);
        let filled = |config: Value| filled(&config, &model, Known { mixes_rows: true, ..known(&pairs) }).unwrap();
        let config = filled(json!({}));
        assert_eq!((&config["max_batch_size"], dims(&config, "input")[0].1.clone()), (&json!(1), json!([-1])));
        assert_eq!(filled(json!({ "max_batch_size": 8 }))["max_batch_size"], 8, "as it is written");
        let one = json!({ "string_value": "1" });
        let direct = filled(json!({ "sequence_batching": { "direct": {} } }));
        assert_eq!((&direct["max_batch_size"], &direct["parameters"]["max_rows_per_run"]), (&json!(64), &one));
        let given = filled(json!({ "parameters": { "max_rows_per_run": { "string_value": "8" } } }));
        assert_eq!(
            (&given["max_batch_size"], &given["parameters"]["max_rows_per_run"]["string_value"]),
            (&json!(64), &json!("8"))
        );
    }

    #[test]
    fn a_fixed_input_of_requests_is_one_for_the_batch() {
        let model = signature(
            &[("x", &["N", "T"]), ("sr", &[]), ("gain", &["2"]), ("s", &["N", "4"])],
            &[("y", &["N", "T"]), ("s2", &["N", "4"])],
        );
        let config = completed(json!({}), &model, &S, &[]).unwrap();
        let expected = [("x", json!([-1])), ("sr", json!([1])), ("gain", json!([2]))];
        assert_eq!(dims(&config, "input"), expected.map(|(name, dims)| (name.to_owned(), dims)));
        assert_eq!(config["input"][1]["reshape"], json!({ "shape": [] }));
    }

    #[test]
    fn an_output_that_begins_with_another_dimension_of_requests_has_no_batch() {
        let of = |output: &[&str]| {
            let inputs: Specs = &[("x", &["N", "T", "4"]), ("s", &["1", "N", "8"])];
            let model = signature(inputs, &[("y", output), ("s2", &["1", "N", "8"])]);
            completed(json!({}), &model, &S, &[]).unwrap()
        };
        for output in [&["T", "?"][..], &["T", "4"], &["T", "1", "1", "4"]] {
            let config = of(output);
            assert_eq!(config.get("max_batch_size"), None, "{output:?}");
            assert_eq!(dims(&config, "input")[0].1, json!([-1, -1, 4]), "{output:?}");
        }
        for output in [&["frames", "?"][..], &["?", "T"], &["N", "T"], &["T", "N", "4"]] {
            assert_eq!(of(output)["max_batch_size"], 64, "{output:?}");
        }
    }

    #[test]
    fn the_batch_may_stand_elsewhere() {
        let model = signature(
            &[("x", &["4", "batch", "5"]), ("s", &["2", "batch", "8"])],
            &[("y", &["batch", "3"]), ("z", &["7", "batch"]), ("s2", &["2", "batch", "8"])],
        );
        let config = completed(json!({}), &model, &S, &[]).unwrap();
        assert_eq!(config["max_batch_size"], 64);
        assert_eq!(dims(&config, "input")[0].1, json!([4, -1, 5]));
        assert_eq!(dims(&config, "output")[0].1, json!([3]));
        assert_eq!(dims(&config, "output")[1].1, json!([7, -1]));
    }

    #[test]
    fn the_batch_is_what_the_states_share_with_what_requests_carry() {
        let model = signature(
            &[("x", &["s77", "s27", "80"]), ("h", &["1", "s27", "4"]), ("k", &["s27", "s12", "4"])],
            &[("y", &["s77", "s27", "3"]), ("h2", &["1", "s27", "4"]), ("k2", &["s27", "s13", "4"])],
        );
        let config = completed(json!({}), &model, &[("h", "h2"), ("k", "k2")], &[]).unwrap();
        assert_eq!(
            (config["max_batch_size"].clone(), dims(&config, "input")[0].1.clone()),
            (json!(64), json!([-1, -1, 80]))
        );
    }

    /// `max_batch_size` as it is filled in, and the warning.
    fn batch(config: Value, inputs: Specs) -> (Option<i64>, Option<String>) {
        let model = signature(inputs, &[("y", inputs[0].1), ("s2", inputs[1].1)]);
        let pairs = pairs(&S);
        let known = known(&pairs);
        let partial = PartialConfig::from_json(config.to_string().as_bytes()).unwrap();
        let size = additions(&partial, &model, &known).unwrap().max_batch_size;
        (size.map(|size| size as i64), batch_warning(&partial, &model, &known, size))
    }

    #[test]
    fn a_shared_name_that_may_be_a_length_makes_no_batch() {
        let cases: [(Specs, &str); 8] = [
            (&[("x", &["T", "4"]), ("s", &["T", "4"])], "s=[batch, 4]"),
            (&[("x", &["time", "4"]), ("s", &["time", "4"])], "s=[batch, 4]"),
            (&[("x", &["s77", "4"]), ("s", &["s77", "4"])], "s=[batch, 4]"),
            (&[("x", &["seq", "bsz", "4"]), ("s", &["seq", "bsz", "4"])], "s=[batch, -1, 4]"),
            (&[("x", &["time", "feat"]), ("s", &["time", "64"])], "s=[batch, 64]"),
            (&[("x", &["frames", "1", "80"]), ("s", &["1", "frames", "64"])], "s=[1, batch, 64]"),
            (&[("x", &["utt", "T", "80"]), ("s", &["12", "4", "T", "64"])], "s=[12, 4, batch, 64]"),
            (&[("x", &["T", "80"]), ("s", &["1", "s_dim_1", "64"])], "s=[1, batch, 64]"),
        ];
        for (inputs, line) in cases {
            let (size, warning) = batch(json!({}), inputs);
            let warning = warning.unwrap();
            assert!(size.is_none() && warning.contains("max_batch_size: 64") && warning.contains(line), "{warning}");
            let dims = json!({ "state_dims": { "string_value": line } });
            let written = batch(json!({ "max_batch_size": 64, "parameters": dims }), inputs);
            assert_eq!(written, (None, None), "{inputs:?}: nothing is added");
        }
        let (inputs, _) = cases[0];
        let dims = |text: &str| json!({ "parameters": { "state_dims": { "string_value": text } } });
        assert_eq!(batch(dims("s=[batch, 4]"), inputs), (Some(64), None));
        assert_eq!(batch(dims("s=[-1, 4]"), inputs), (None, None));
    }

    #[test]
    fn a_batch_among_two_shared_names_is_asked_for() {
        let model = signature(
            &[("x", &["seq", "bsz", "4"]), ("s", &["seq", "bsz", "4"])],
            &[("y", &["seq", "bsz", "4"]), ("s2", &["seq", "bsz", "4"])],
        );
        let pairs = pairs(&S);
        let filled = |dims: Option<&str>| {
            let parameters = dims.map_or(json!({}), |text| json!({ "state_dims": { "string_value": text } }));
            let known = known(&pairs);
            filled(&json!({ "max_batch_size": 8, "parameters": parameters }), &model, known)
        };
        let error = filled(None).unwrap_err().to_string();
        assert!(error.contains("'seq', 'bsz'") && error.contains("s=[batch, -1, 4]"), "{error}");
        assert_eq!(dims(&filled(Some("s=[batch, -1, 4]")).unwrap(), "input")[0].1, json!([-1, 4]));
        assert_eq!(dims(&filled(Some("s=[-1, batch, 4]")).unwrap(), "input")[0].1, json!([-1, -1, 4]));
    }

    #[test]
    fn a_state_that_lacks_the_name_of_the_batch_has_runs_of_its_own() {
        for symbol in ["s_dynamic_axes_1", "?"] {
            let inputs: Specs = &[("x", &["batch", "time", "4"]), ("s", &["1", symbol, "4"])];
            assert_eq!(batch(json!({}), inputs), (Some(1), None), "binding warns");
            let dims = json!({ "state_dims": { "string_value": "s=[1, batch, 4]" } });
            assert_eq!(batch(json!({ "parameters": dims }), inputs), (Some(64), None));
        }
    }

    #[test]
    fn what_the_position_tells_is_warned_of_unless_little_else_is_possible() {
        let doubtful: [Specs; 4] = [
            &[("x", &["?", "80"]), ("s", &["1", "?"])],
            &[("x", &["?", "80"]), ("s", &["?", "80"])],
            &[("x", &["?", "?"]), ("s", &["1", "?", "64"])],
            &[("x", &["s77", "s27", "5"]), ("s", &["1", "s27", "6"])],
        ];
        for inputs in doubtful {
            let (size, warning) = batch(json!({}), inputs);
            assert!(size == Some(64) && warning.is_some(), "{inputs:?}");
            assert_eq!(batch(json!({ "max_batch_size": 64 }), inputs), (None, None));
        }
        assert_eq!(batch(json!({}), &[("x", &["?", "?"]), ("s", &["2", "?", "128"])]), (Some(64), None));
    }

    #[test]
    fn a_scalar_that_is_no_constant_makes_no_batch() {
        let model = signature(&[("x", &["N", "4"]), ("s", &["N", "4"])], &[("y", &[]), ("s2", &["N", "4"])]);
        let (pairs, scalars) = (pairs(&S), ["y".to_owned()]);
        let with = |scalar_outputs| {
            let known = Known { scalar_outputs, ..known(&pairs) };
            filled(&json!({}), &model, known).unwrap().get("max_batch_size").cloned()
        };
        assert_eq!(with(&scalars), None);
        assert_eq!(with(&[]), Some(json!(64)), "its rank is not known");
    }

    #[test]
    fn a_growing_state_is_told_by_the_names() {
        let model = signature(
            &[("x", &["batch", "chunk", "8"]), ("s", &["batch", "past", "8"])],
            &[("y", &["batch", "chunk", "8"]), ("s2", &["batch", "past + chunk", "8"])],
        );
        assert_eq!(completed(json!({}), &model, &S, &[]).unwrap()["max_batch_size"], 64);
        // Without a batch, its first dimension is the time.
        let model =
            signature(&[("x", &["chunk", "8"]), ("s", &["past", "8"])], &[("y", &["chunk", "8"]), ("s2", &["?", "8"])]);
        let config = completed(json!({}), &model, &S, &[]).unwrap();
        assert_eq!((config.get("max_batch_size"), dims(&config, "input")[0].1.clone()), (None, json!([-1, 8])));
    }

    #[test]
    fn requests_bring_what_the_context_leaves() {
        let dims = |model: &[&str], context: &str| {
            let config = json!({ "parameters": { "input_context": { "string_value": context } } });
            let model = signature(&[("x", model), ("s", &["N", "4"])], &[("y", &["N", "3"]), ("s2", &["N", "4"])]);
            let known = Known {
                pairs: &pairs(&S),
                taken: &[],
                constant_outputs: &[],
                scalar_outputs: &[],
                default_max_batch_size: 4,
                mixes_rows: false,
            };
            Ok::<_, CompletionError>(super::tests::dims(&filled(&config, &model, known)?, "input").remove(0).1)
        };
        assert_eq!(dims(&["N", "576"], "x=64").unwrap(), json!([512]));
        assert_eq!(dims(&["N", "T"], "x=64").unwrap(), json!([-1]));
        assert_eq!(dims(&["N", "80", "70"], "x=64@2").unwrap(), json!([80, 6]));
        assert_eq!(dims(&["N", "60", "70"], "x=64").unwrap(), json!([60, 6]));
        assert_eq!(dims(&["N", "T"], "x=64+512").unwrap(), json!([512]));
        assert_eq!(dims(&["N", "T"], "x=64+512:whole").unwrap(), json!([-1]));
        assert_eq!(dims(&["N", "80", "70"], "x=64+6").unwrap(), json!([80, 6]));
        for (model, context, words) in [
            (["N", "80", "70"], "x=64", ["'x=64'", "[-1, 80, 70]", "'x=64@1'", "'x=64@2'"]),
            (["N", "T", "80"], "x=64", ["'x=64'", "[-1, -1, 80]", "'x=64@1'", "'x=64@2'"]),
            (["N", "60", "64"], "x=64", ["'x=64'", "[-1, 60, 64]", "no dimension", "longer than 64"]),
            (["N", "80", "70"], "x=64+9", ["'x=64+9'", "[-1, 80, 70]", "no dimension", "is 73, or open"]),
        ] {
            let error = dims(&model, context).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }

    #[test]
    fn without_an_open_dimension_there_is_no_batch() {
        let model = signature(&[("x", &["1", "80"]), ("s", &["1", "4"])], &[("y", &["1", "3"]), ("s2", &["1", "4"])]);
        let config = completed(json!({ "max_batch_size": 0 }), &model, &S, &[]).unwrap();
        assert_eq!(config["max_batch_size"], 0);
        assert_eq!(dims(&config, "input")[0].1, json!([1, 80]));
        let half = signature(&[("x", &["N", "80"]), ("s", &["1", "4"])], &[("y", &["N", "3"]), ("s2", &["1", "4"])]);
        assert_eq!(completed(json!({}), &half, &S, &[]).unwrap().get("max_batch_size"), None, "its state has none");
    }

    #[test]
    fn batches_that_the_model_does_not_have_are_refused_before_an_output_is_listed() {
        let model = signature(&[("x", &["1", "80"]), ("s", &["1", "4"])], &[("y", &["1", "3"]), ("s2", &["1", "4"])]);
        let known = Known {
            pairs: &pairs(&S),
            taken: &[],
            constant_outputs: &[],
            scalar_outputs: &[],
            default_max_batch_size: 4,
            mixes_rows: false,
        };
        let error = filled(&json!({ "max_batch_size": 8 }), &model, known).unwrap_err().to_string();
        for words in ["max_batch_size is 8", "'y'", "[1, 3]", "'max_batch_size: 0'"] {
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn what_is_written_is_kept() {
        let model = signature(&[("x", &["N", "4"]), ("s", &["N", "4"])], &[("y", &["N", "4"]), ("s2", &["N", "4"])]);
        let x = json!([{ "name": "x", "data_type": "TYPE_FP32", "dims": [4] }]);
        let y = json!([{ "name": "y", "data_type": "TYPE_FP32", "dims": [4] }]);
        let whole = json!({ "max_batch_size": 8, "input": x, "output": y, "sequence_batching": { "direct": {} } });
        assert_eq!(completed(whole.clone(), &model, &S, &[]), None);
        let config = completed(json!({ "input": x, "sequence_batching": { "direct": {} } }), &model, &S, &[]).unwrap();
        assert_eq!(
            (&config["max_batch_size"], &config["input"], &config["output"][0]["name"]),
            (&json!(64), &x, &json!("y"))
        );
        assert_eq!(config["sequence_batching"], json!({ "direct": {} }));
        // Dims that list the batch mean that Triton has none.
        let full = json!([{ "name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4] }]);
        let config = completed(json!({ "input": full }), &model, &S, &[]).unwrap();
        assert_eq!(config.get("max_batch_size"), None);
        assert_eq!(dims(&config, "output")[0].1, json!([-1, 4]));
        let config = completed(json!({ "dynamic_batching": {} }), &model, &S, &[]).unwrap();
        assert_eq!(config.get("sequence_batching"), None, "which is refused later");
    }

    #[test]
    fn a_model_that_gives_only_states_answers_with_them() {
        let model = signature(&[("x", &["N", "4"]), ("s", &["N", "4"])], &[("s2", &["N", "4"])]);
        assert_eq!(dims(&completed(json!({}), &model, &S, &[]).unwrap(), "output"), [("s2".to_owned(), json!([4]))]);
    }

    #[test]
    fn names_that_an_exporter_makes_up_for_outputs_do_not_hide_the_batch() {
        let model = |x: &'static [&'static str], y: &'static [&'static str]| {
            signature(&[("x", x), ("s", &["1", "batch", "4"])], &[("y", y), ("s2", &["1", "Adds2_dim_1", "4"])])
        };
        let first = completed(json!({}), &model(&["batch", "time", "80"], &["Addy_dim_0", "Addy_dim_1", "3"]), &S, &[]);
        let first = first.unwrap();
        assert_eq!((&first["max_batch_size"], dims(&first, "output")[0].1.clone()), (&json!(64), json!([-1, 3])));
        let only = completed(json!({}), &model(&["5", "batch", "80"], &["7", "Addy_dim_1", "3"]), &S, &[]).unwrap();
        assert_eq!((&only["max_batch_size"], dims(&only, "output")[0].1.clone()), (&json!(64), json!([7, -1, 3])));
        let unclear = model(&["time", "batch", "80"], &["Addy_dim_0", "Addy_dim_1", "3"]);
        assert_eq!(completed(json!({}), &unclear, &S, &[]).unwrap().get("max_batch_size"), None);
    }

    #[test]
    fn a_scalar_without_a_batch_has_one_element() {
        let inputs: Specs = &[("x", &["1", "80"]), ("sr", &[]), ("s", &["1", "4"])];
        let model = signature(inputs, &[("y", &["1", "3"]), ("loss", &[]), ("s2", &["1", "4"])]);
        let config = completed(json!({}), &model, &S, &[]).unwrap();
        let named = |name: &str, dims: Value| (name.to_owned(), dims);
        assert_eq!(dims(&config, "input"), [named("x", json!([1, 80])), named("sr", json!([1]))]);
        assert_eq!(dims(&config, "output"), [named("y", json!([1, 3])), named("loss", json!([1]))]);
        assert_eq!(config["input"][1].get("reshape"), None, "Triton allows none without a batch");
    }

    #[test]
    fn names_that_an_exporter_makes_of_the_tensors_do_not_hide_the_batch() {
        let model = signature(
            &[
                ("targets", &["targets_dynamic_axes_1", "targets_dynamic_axes_2"]),
                ("length", &["length_dynamic_axes_1"]),
                ("h", &["1", "h_dynamic_axes_1", "640"]),
            ],
            &[("y", &["y_dynamic_axes_1", "y_dynamic_axes_2", "9"]), ("h2", &["1", "h2_dynamic_axes_1", "640"])],
        );
        let h = [("h", "h2")];
        let config = completed(json!({}), &model, &h, &[]).unwrap();
        assert_eq!((&config["max_batch_size"], dims(&config, "input")[0].1.clone()), (&json!(64), json!([-1])));
        assert_eq!(dims(&config, "output")[0].1, json!([-1, 9]));
        let pairs = pairs(&h);
        let warning = |config: Value| {
            let config = PartialConfig::from_json(config.to_string().as_bytes()).unwrap();
            let known = known(&pairs);
            batch_warning(&config, &model, &known, Some(64))
        };
        let text = warning(json!({})).unwrap();
        assert!(text.contains("dimension 1 of 'h'") && text.contains("'h=[1, -1, 640]'"), "{text}");
        let dims = |text: &str| json!({ "parameters": { "state_dims": { "string_value": text } } });
        assert_eq!(warning(dims("h=[1, batch, 640]")), None);
        let varies = completed(dims("h=[1, -1, 640]"), &model, &h, &[]).unwrap();
        assert_eq!(varies["max_batch_size"], 1, "a run has the state of one sequence");
    }

    #[test]
    fn an_output_that_is_the_same_in_every_run_does_not_hide_the_batch() {
        let model = signature(
            &[("x", &["batch", "4"]), ("s", &["batch", "4"])],
            &[("version", &["1"]), ("y", &["batch", "3"]), ("s2", &["batch", "4"])],
        );
        let (pairs, constants) = (pairs(&S), ["version".to_owned()]);
        let with = |constant_outputs| {
            let known = Known {
                pairs: &pairs,
                taken: &[],
                constant_outputs,
                scalar_outputs: &[],
                default_max_batch_size: 4,
                mixes_rows: false,
            };
            filled(&json!({}), &model, known).unwrap()
        };
        let config = with(&constants);
        assert_eq!(config["max_batch_size"], 64);
        assert_eq!(dims(&config, "output"), [("version".to_owned(), json!([1])), ("y".to_owned(), json!([3]))]);
        assert_eq!(with(&[]).get("max_batch_size"), None, "its dims may be those of one row");
    }
}
