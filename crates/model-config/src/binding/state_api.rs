//! The tensors of the State API: each state of a sequence as an input and an output, its description and its snapshot.

use std::ffi::CString;

use rows::tensor::DataType;

use super::bound::{BoundState, c_name};
use super::error::{BindingError, Result, names};
use super::fit::describe;
use super::model::Binding;
use crate::config::{Config, STATE_INFO, STATE_PREFIX, STATE_SNAPSHOT, TensorConfig};

#[derive(Clone, Debug)]
pub struct StateApi {
    /// In the order of [`Binding::states`].
    pub states: Vec<StateTensor>,
    /// [`STATE_SNAPSHOT`] and [`STATE_INFO`] for Triton.
    pub snapshot: CString,
    pub info: CString,
    /// The shape of a snapshot and of a description.
    pub one: Vec<i64>,
    /// What responses may carry.
    pub gives_snapshots: bool,
    pub gives_info: bool,
    /// The inputs and outputs that are not listed in the configuration.
    pub missing_inputs: Vec<TensorConfig>,
    pub missing_outputs: Vec<TensorConfig>,
}

#[derive(Clone, Debug)]
pub struct StateTensor {
    /// `state.` and the name of the state's input.
    pub name: String,
    pub c_name: CString,
    /// Dims of a request's and a response's tensor; -1 is open.
    pub dims: Vec<i64>,
    pub is_output: bool,
}

impl StateApi {
    /// `None` if the configuration doesn't allow it. Fails if a listed tensor does not fit the model.
    pub fn new(config: &Config, binding: &Binding) -> Result<Option<Self>> {
        let Some(listed) = &config.state_api else { return Ok(None) };
        let (mut missing_inputs, mut missing_outputs) = (Vec::new(), Vec::new());
        let tensor = |name: String, data_type, dims| TensorConfig { name, data_type, dims, optional: true };
        let mut states = Vec::new();
        for state in &binding.states {
            let name = format!("{STATE_PREFIX}{}", binding.inputs[state.input].name);
            let mut configured = state.dims.clone();
            if let Some(axis) = state.batch_axis.filter(|_| config.is_batched()) {
                configured.remove(axis);
            }
            if configured.is_empty() {
                // A tensor of Triton has at least one dimension.
                configured.push(1);
            }
            // Triton takes no dimension of 0 in a configuration; a tensor is checked with the state's own dims.
            let listable = configured.iter().map(|&dim| if dim == 0 { -1 } else { dim }).collect();
            let wanted = tensor(name.clone(), state.data_type, listable);
            let mut dims = configured;
            if config.is_batched() {
                dims.insert(0, 1);
            }
            is_listed("input", &listed.inputs, &wanted, &mut missing_inputs)?;
            states.push(StateTensor {
                c_name: c_name(&name),
                name,
                dims,
                is_output: is_listed("output", &listed.outputs, &wanted, &mut missing_outputs)?,
            });
        }
        let snapshot = tensor(STATE_SNAPSHOT.to_owned(), DataType::Bytes, vec![1]);
        let info = tensor(STATE_INFO.to_owned(), DataType::Bytes, vec![1]);
        is_listed("input", &listed.inputs, &snapshot, &mut missing_inputs)?;
        let gives_snapshots = is_listed("output", &listed.outputs, &snapshot, &mut missing_outputs)?;
        let gives_info = is_listed("output", &listed.outputs, &info, &mut missing_outputs)?;
        let known: Vec<&str> = states.iter().map(|state| state.name.as_str()).collect();
        for (list, tensors) in [("input", &listed.inputs), ("output", &listed.outputs)] {
            let is_stray = |name: &str| name.starts_with(STATE_PREFIX) && !known.contains(&name);
            if let Some(stray) = tensors.iter().find(|tensor| is_stray(&tensor.name)) {
                return Err(BindingError::NoState { list, name: stray.name.clone(), has: names(&known) });
            }
        }
        let (snapshot, info) = (c_name(STATE_SNAPSHOT), c_name(STATE_INFO));
        let one = if config.is_batched() { vec![1, 1] } else { vec![1] };
        Ok(Some(Self { states, snapshot, info, one, gives_snapshots, gives_info, missing_inputs, missing_outputs }))
    }

    /// Notes that completion has listed the missing tensors.
    pub fn list_missing(&mut self) {
        self.states.iter_mut().for_each(|state| state.is_output = true);
        (self.gives_snapshots, self.gives_info) = (true, true);
    }

    pub fn names(&self) -> Vec<String> {
        self.states.iter().map(|state| state.name[STATE_PREFIX.len()..].to_owned()).collect()
    }
}

/// Whether a tensor is in a list; if not, it is missing there.
fn is_listed(
    list: &'static str,
    tensors: &[TensorConfig],
    wanted: &TensorConfig,
    missing: &mut Vec<TensorConfig>,
) -> Result<bool> {
    let Some(tensor) = tensors.iter().find(|tensor| tensor.name == wanted.name) else {
        // Core refuses a request without an input that is not optional, and few requests carry states.
        missing.push(TensorConfig { optional: list == "input", ..wanted.clone() });
        return Ok(false);
    };
    if (tensor.data_type, &tensor.dims) == (wanted.data_type, &wanted.dims) {
        return Ok(true);
    }
    let side = |tensor: &TensorConfig| describe(tensor.data_type, &tensor.dims);
    Err(BindingError::Dims {
        what: format!("{list} '{}'", tensor.name),
        configured: side(tensor),
        model: side(wanted),
        rule: "a tensor of the State API has the dims of its state, without the batch dimension".to_owned(),
    })
}

impl StateTensor {
    /// The dims of a row of the state, from those of a tensor that has been checked.
    pub fn row_dims(&self, state: &BoundState, tensor: &[i64]) -> Vec<i64> {
        // Open dims stand in the same order in both.
        let mut open = self.dims.iter().zip(tensor).filter(|(dim, _)| **dim < 0).map(|(_, &came)| came);
        state.dims.iter().map(|&dim| if dim < 0 { open.next().unwrap_or(0) } else { dim }).collect()
    }

    /// The dims of the tensor, from those of a row of the state.
    pub fn tensor_dims(&self, state: &BoundState, row: &[i64]) -> Vec<i64> {
        let mut open = state.dims.iter().zip(row).filter(|(dim, _)| **dim < 0).map(|(_, &has)| has);
        self.dims.iter().map(|&dim| if dim < 0 { open.next().unwrap_or(0) } else { dim }).collect()
    }
}
