//! What a conversion says of a model: in its metadata, which multiple of steps a request must have for a stride over time, and
//! which states don't start at zero; and that the steps aren't the batch.

use std::collections::BTreeMap;

use prost::bytes::Bytes;
use stateful_convert::report::{INITIAL_STATES, InitialState, STEPS_MULTIPLE, StepsMultiple as OfInput};
use stateful_convert::{
    InputAxis, OutputAxis, RowsInGraph, StatePair, crossed_states, passes_on_rows, rows_stay_apart,
};

use super::{Binding, BindingError, BoundInput, BoundOutput, BoundState, Source, StepsMultiple};
use crate::config::{DeclaredState, StatePairs, States, parameter_line};

impl Binding {
    /// Makes inputs want the multiple of steps that the model's metadata says.
    pub fn set_steps_multiples(&mut self, metadata: &BTreeMap<String, String>) -> Result<(), BindingError> {
        let Some(value) = metadata.get(STEPS_MULTIPLE) else { return Ok(()) };
        let error = |why: String| BindingError::Metadata { key: STEPS_MULTIPLE, value: value.clone(), why };
        let of_inputs: Vec<OfInput> = serde_json::from_str(value).map_err(|why| error(why.to_string()))?;
        for OfInput { input: name, axis, multiple } in of_inputs {
            let input = self.inputs.iter_mut().find(|input| input.name == name);
            let Some(input) = input.filter(|input| axis < input.dims.len()) else {
                return Err(error(format!("the model has no input '{name}' with an axis {axis}")));
            };
            let dim = input.dims[axis];
            if usize::try_from(dim).is_ok_and(|steps| steps % multiple != 0) {
                return Err(error(format!("input '{name}' has {dim} along axis {axis}: configure a multiple")));
            }
            // Only requests bring steps.
            let Source::Request(request) = &mut input.source else { continue };
            if request.context.is_some() {
                return Err(error(format!("'input_context' would put other steps in front of those of '{name}'")));
            }
            request.steps_multiple = Some(StepsMultiple { axis, multiple });
        }
        Ok(())
    }

    /// Refuses a configuration without the initial states that the model's metadata names.
    pub fn check_initial_states(states: &States, metadata: &BTreeMap<String, String>) -> Result<(), BindingError> {
        let Some(value) = metadata.get(INITIAL_STATES) else { return Ok(()) };
        let error = |why: String| BindingError::Metadata { key: INITIAL_STATES, value: value.clone(), why };
        let wanted: Vec<InitialState> = serde_json::from_str(value).map_err(|why| error(why.to_string()))?;
        let is_missing = |wanted: &&InitialState| {
            let has_model = wanted.value.is_none() && states.initial_model.is_some();
            let is_declared = |state: &DeclaredState| state.pair.input == wanted.state && state.initial.is_some();
            let is_given = states.initial.iter().any(|(name, _)| *name == wanted.state);
            !has_model && !is_given && !states.declared.iter().any(is_declared)
        };
        // A conversion at load has its own.
        let is_converted = matches!(states.pairs, StatePairs::Converted(_));
        let missing: Vec<&InitialState> = wanted.iter().filter(|_| !is_converted).filter(is_missing).collect();
        let values: Vec<String> =
            missing.iter().filter_map(|wanted| Some(format!("{}={}", wanted.state, wanted.value.as_ref()?))).collect();
        let help = match missing.first() {
            None => return Ok(()),
            Some(_) if !values.is_empty() => parameter_line("initial_states", &values.join(" ")),
            Some(_) => {
                let line = parameter_line("initial_state_model", "model_initial_states.onnx");
                format!("{line}, with the file that stateful-convert wrote beside the model")
            }
        };
        let names: Vec<&str> = missing.iter().map(|wanted| wanted.state.as_str()).collect();
        Err(error(format!("the configuration doesn't say where these states start: {}; add {help}", names.join(", "))))
    }

    /// Refuses a state of a layer's hidden state and its cell state. `model` is the ONNX file.
    pub fn check_ends(&self, model: Bytes) -> Result<(), BindingError> {
        let name = |state: &BoundState| StatePair {
            input: self.inputs[state.input].name.clone(),
            output: self.outputs[state.output].name.clone(),
        };
        let pairs: Vec<StatePair> = self.states.iter().map(name).collect();
        crossed_states(model, &pairs).map_or(Ok(()), |why| Err(BindingError::Crossed { why }))
    }

    /// Refuses a model with a recurrence along the batch, such as an LSTM that gets `[batch, time, n]` where it takes
    /// `[time, batch, n]`. `model` is the ONNX file.
    pub fn check_rows(&self, model: Bytes) -> Result<(), BindingError> {
        let rows = self.row_axes();
        passes_on_rows(model, &rows).map_or(Ok(()), |node| {
            let axes: Vec<String> = rows.iter().map(InputAxis::to_string).collect();
            Err(BindingError::RowsAreSteps { node, axes: axes.join(", ") })
        })
    }

    /// Whether the graph proves that rows don't change each other's results; if not, which node is in the way. `model` is
    /// the ONNX file.
    pub fn rows_in_graph(&self, model: Bytes) -> RowsInGraph {
        if let Some(input) = self.inputs.iter().find(|input| input.is_padded()) {
            let why = format!("shorter rows of '{}' are filled up ('padded_inputs')", input.name);
            return RowsInGraph::Unproven(why);
        }
        let fetched: Vec<&str> = self.outputs.iter().map(|output| output.name.as_str()).collect();
        rows_stay_apart(model, &self.row_axes(), &self.output_axes(), &fetched)
    }

    /// Which axes of the inputs have the batch.
    pub(super) fn row_axes(&self) -> Vec<InputAxis> {
        let axis = |input: &BoundInput| Some(InputAxis { input: input.name.clone(), axis: input.batch_axis? });
        self.inputs.iter().filter_map(axis).collect()
    }

    /// Which axes of the outputs have the batch.
    pub(super) fn output_axes(&self) -> Vec<OutputAxis> {
        let axis = |output: &BoundOutput| Some(OutputAxis { output: output.name.clone(), axis: output.batch_axis? });
        self.outputs.iter().filter_map(axis).collect()
    }
}
