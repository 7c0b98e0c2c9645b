//! The model for initial states: a second ONNX model whose outputs are the initial values of states.

use super::error::BindingError;
use super::{Binding, RequestInput, Source, agree, check_type, describe};
use crate::session::{InputSpec, OutputSpec, Signature, StepSpec, TensorInfo};

/// How the model for initial states fits the binding. It runs for one row at a time.
#[derive(Clone, Debug)]
pub struct InitialModel {
    pub inputs: Vec<InitialInput>,
    pub outputs: Vec<InitialOutput>,
    /// What a step of it feeds and fetches.
    pub step: StepSpec,
}

/// An input of the model for initial states.
#[derive(Clone, Debug)]
pub struct InitialInput {
    /// The input of requests that it takes: its index in the binding.
    pub input: usize,
    pub request: RequestInput,
}

/// An output of the model for initial states.
#[derive(Clone, Copy, Debug)]
pub struct InitialOutput {
    /// Number of the state.
    pub state: usize,
    /// Whether it has the state's batch axis.
    pub has_batch: bool,
}

impl InitialModel {
    /// Finds the input of requests for each input, and the state for each output.
    pub fn new(binding: &Binding, signature: &Signature) -> Result<Self, BindingError> {
        let inputs = signature.inputs.iter().map(|info| bind_input(binding, info)).collect::<Result<Vec<_>, _>>()?;
        let outputs = signature.outputs.iter().map(|info| bind_output(binding, info)).collect::<Result<Vec<_>, _>>()?;
        let input_specs = inputs.iter().map(|bound| {
            let input = &binding.inputs[bound.input];
            InputSpec {
                name: input.name.clone(),
                data_type: input.data_type,
                batch_axis: input.batch_axis,
                dims: input.dims.clone(),
                is_given: false,
            }
        });
        let output_specs = signature.outputs.iter().map(|info| OutputSpec {
            name: info.name.clone(),
            data_type: info.data_type,
            batch_axis: None,
            dims: None,
            is_read: true,
            stays: false,
        });
        let step = StepSpec {
            inputs: input_specs.collect(),
            outputs: output_specs.collect(),
            most_rows: 1,
            graph_rows: Vec::new(),
        };
        Ok(Self { inputs, outputs, step })
    }
}

fn error(info: &TensorInfo, why: String) -> BindingError {
    BindingError::InitialModel { name: info.name.clone(), why }
}

fn bind_input(binding: &Binding, info: &TensorInfo) -> Result<InitialInput, BindingError> {
    let found = binding.inputs.iter().enumerate().find(|(_, input)| input.name == info.name);
    let Some((index, input, request)) = found.and_then(|(index, input)| match &input.source {
        Source::Request(request) if !request.optional => Some((index, input, request.clone())),
        _ => None,
    }) else {
        let names: Vec<_> = binding.request_inputs().map(|(input, _)| input.name.as_str()).collect();
        return Err(error(info, format!("is no input that each request carries (those are {})", names.join(", "))));
    };
    check_type(format!("the initial_state_model's '{}'", info.name), info.data_type, input.data_type)?;
    let is_context = |axis: usize| request.context.is_some_and(|context| context.axis == axis);
    let fits = |(axis, (&theirs, &ours)): (usize, (&i64, &i64))| match input.batch_axis {
        Some(batch) if batch == axis => theirs < 0 || theirs == 1,
        _ => is_context(axis) || agree(theirs, ours),
    };
    if info.dims.len() == input.dims.len() && info.dims.iter().zip(&input.dims).enumerate().all(fits) {
        return Ok(InitialInput { input: index, request });
    }
    let (theirs, ours) = (describe(info.data_type, &info.dims), describe(input.data_type, &input.dims));
    Err(error(info, format!("is {theirs}, but requests carry {ours}, one row of it")))
}

fn bind_output(binding: &Binding, info: &TensorInfo) -> Result<InitialOutput, BindingError> {
    let is_state = |&number: &usize| binding.inputs[binding.states[number].input].name == info.name;
    let Some(number) = (0..binding.states.len()).find(is_state) else {
        let name = |state: &super::BoundState| binding.inputs[state.input].name.clone();
        let names: Vec<_> = binding.states.iter().map(name).collect();
        return Err(error(info, format!("is no state's input (those are {})", names.join(", "))));
    };
    let state = &binding.states[number];
    check_type(format!("the initial_state_model's '{}'", info.name), info.data_type, state.data_type)?;
    let agrees =
        |dims: &[i64]| dims.len() == info.dims.len() && dims.iter().zip(&info.dims).all(|(&a, &b)| agree(a, b));
    let mut without_batch = state.dims.clone();
    if let Some(axis) = state.batch_axis {
        without_batch.remove(axis);
    }
    // A tensor whose rank the model leaves open is checked when the model has run.
    let has_batch = agrees(&state.dims) || info.dims.is_empty() && !state.dims.is_empty() && !without_batch.is_empty();
    if has_batch || agrees(&without_batch) {
        return Ok(InitialOutput { state: number, has_batch });
    }
    let (theirs, ours) = (describe(info.data_type, &info.dims), describe(state.data_type, &state.dims));
    Err(error(info, format!("is {theirs}, but a row of that state is {ours}")))
}
