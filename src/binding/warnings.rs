//! States about which the model's dims don't say enough, so that the backend may have understood them wrongly.

use rows::tensor::Dims;

use super::shapes::is_batch;
use super::{Binding, BoundState};
use crate::config::{Config, StateDims, state_dims_line};
use crate::session::{Signature, TensorInfo};

/// A state whose dims the configuration doesn't give.
struct Undeclared<'a> {
    info: &'a TensorInfo,
    /// Its next value.
    next: Option<&'a TensorInfo>,
    state: &'a BoundState,
}

impl Undeclared<'_> {
    /// Whether a dimension along which it starts without elements may always have the same length: it has no name, or the
    /// next value has the same one, so that it would stay without elements.
    fn may_keep_its_length(&self) -> bool {
        let keeps = |axis: usize| {
            let name = self.info.symbol(axis);
            name.is_empty() || self.next.and_then(|next| next.symbols.get(axis)).is_some_and(|next| next == name)
        };
        self.state.empty_axes().any(keeps)
    }
}

impl Binding {
    /// Warnings of what may be wrong, each with the line of config.pbtxt that decides it.
    pub fn warnings(&self, config: &Config, signature: &Signature) -> Vec<String> {
        let is_given = |name: &str| config.states.written_dims(name).is_some() || config.states.is_declared(name);
        let infos = || signature.inputs.iter();
        let undeclared = infos().filter(|info| !is_given(&info.name)).filter_map(|info| {
            let state = self.states.iter().find(|state| self.inputs[state.input].name == info.name)?;
            let next = &self.outputs[state.output].name;
            let next = signature.outputs.iter().find(|output| output.name == *next);
            Some(Undeclared { info, next, state })
        });
        let states: Vec<Undeclared> = undeclared.collect();
        let of_requests = |info: &&TensorInfo| self.request_inputs().any(|(input, _)| input.name == info.name);
        let batch_symbol = infos().filter(of_requests).find_map(|info| {
            let axis = self.inputs.iter().find(|input| input.name == info.name)?.batch_axis?;
            Some(info.symbol(axis)).filter(|symbol| !symbol.is_empty())
        });
        empty_starts(&states).into_iter().chain(other_names(&states, batch_symbol)).collect()
    }

    /// The states that the model leaves open and with which a sequence starts without elements, and their dims; `None` if
    /// there are none.
    pub fn empty_starts(&self) -> Option<String> {
        let empty = self.states.iter().filter(|state| state.empty_axes().next().is_some());
        let described =
            |state: &BoundState| format!("'{}' {}", self.inputs[state.input].name, Dims(&state.initial.dims));
        let described: Vec<_> = empty.map(described).collect();
        (!described.is_empty()).then(|| described.join(", "))
    }
}

/// Warns of states that start without elements and may always have the same length. A state that grows starts so.
fn empty_starts(states: &[Undeclared]) -> Option<String> {
    let states: Vec<_> = states.iter().filter(|of| of.may_keep_its_length()).collect();
    let described = |of: &&Undeclared| format!("'{}' {}", of.info.name, Dims(&of.state.initial.dims));
    let dims = |of: &&Undeclared| StateDims {
        name: of.info.name.clone(),
        dims: of.state.dims.clone(),
        batch_axis: of.state.batch_axis,
    };
    let with_batch = |of: &&Undeclared| {
        let mut open = (0..of.state.dims.len()).filter(|&axis| of.state.dims[axis] < 0);
        let batch_axis = open.next().filter(|_| of.state.batch_axis.is_none() && open.next().is_none());
        batch_axis.map(|axis| StateDims { batch_axis: Some(axis), ..dims(of) })
    };
    let batched: Vec<StateDims> = states.iter().filter_map(with_batch).collect();
    let or_batch = if batched.is_empty() {
        String::new()
    } else {
        format!("; if that dimension is the batch, write {}", state_dims_line(batched))
    };
    (!states.is_empty()).then(|| {
        format!(
            "sequences start with states that have no elements: {}; if such a state always has the same length, write it, \
             in the place of -1 in {}{or_batch}",
            states.iter().map(described).collect::<Vec<_>>().join(", "),
            state_dims_line(states.iter().map(dims))
        )
    })
}

/// Warns of states whose batch has another name than that of requests, or none: it may be a dimension that varies.
fn other_names(states: &[Undeclared], batch_symbol: Option<&str>) -> Option<String> {
    let batch_symbol = batch_symbol?;
    let is_doubtful = |of: &&Undeclared| {
        let symbol = of.state.batch_axis.map(|axis| of.info.symbol(axis));
        symbol.is_some_and(|symbol| {
            symbol.is_empty() || (!is_batch(symbol, Some(batch_symbol)) && !is_batch(symbol, None))
        })
    };
    let states: Vec<_> = states.iter().filter(is_doubtful).collect();
    let first = states.first()?;
    let axis = first.state.batch_axis?;
    let line = |with_batch: bool| {
        let dims = |of: &&Undeclared| StateDims {
            name: of.info.name.clone(),
            dims: of.info.dims.clone(),
            batch_axis: of.state.batch_axis.filter(|_| with_batch),
        };
        state_dims_line(states.iter().map(dims))
    };
    let its_name = match first.info.symbol(axis) {
        "" => "it has no name of its own".to_owned(),
        symbol => format!("its name is '{symbol}'"),
    };
    Some(format!(
        "dimension {axis} of '{}' is taken for the batch, though {its_name} and that of the batch of requests is \
         '{batch_symbol}': if that is right, write {}; if such dimensions vary, write {}",
        first.info.name,
        line(true),
        line(false)
    ))
}
