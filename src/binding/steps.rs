//! Models with a stride over time: which multiple the number of steps of a request must be. `stateful_convert` writes it
//! into the metadata of a model that it converts.

use std::collections::BTreeMap;

use stateful_convert::report::{STEPS_MULTIPLE, StepsMultiple as OfInput};

use super::{Binding, BindingError, Source, StepsMultiple};

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
}
