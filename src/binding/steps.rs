//! The steps inside a model: which multiple a request must have of them for a stride over time (`stateful_convert` writes
//! that into the metadata of a model that it converts), and that they aren't the batch.

use std::collections::BTreeMap;

use prost::bytes::Bytes;
use stateful_convert::report::{STEPS_MULTIPLE, StepsMultiple as OfInput};
use stateful_convert::{InputAxis, passes_on_rows};

use super::{Binding, BindingError, BoundInput, Source, StepsMultiple};

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

    /// Refuses a model with a recurrence along the batch, such as an LSTM that gets `[batch, time, n]` where it takes
    /// `[time, batch, n]`. `model` is the ONNX file.
    pub fn check_rows(&self, model: Bytes) -> Result<(), BindingError> {
        let axis = |input: &BoundInput| Some(InputAxis { input: input.name.clone(), axis: input.batch_axis? });
        let rows: Vec<InputAxis> = self.inputs.iter().filter_map(axis).collect();
        passes_on_rows(model, &rows).map_or(Ok(()), |node| {
            let axes: Vec<String> = rows.iter().map(InputAxis::to_string).collect();
            Err(BindingError::RowsAreSteps { node, axes: axes.join(", ") })
        })
    }
}
