//! Runs the model that computes the initial states of a sequence.

use std::sync::Arc;

use rows::strings::Strings;
use rows::tensor::{DataType, element_count};

use crate::binding::{Binding, BoundState, Initial, InitialContent, InitialModel, InitialOutput};
use crate::error::{LoadError, RunError};
use crate::session::{Copier, OutputView, Run, Session, Step};
use crate::triton::Request;

/// A model for initial states.
pub struct LoadedInitialModel {
    pub session: Arc<Session>,
    pub binding: InitialModel,
}

/// The buffers in which one instance runs the model for initial states.
pub struct InitialStep {
    step: Step,
}

impl InitialStep {
    /// Allocates the buffers.
    pub fn new(session: Arc<Session>, model: &InitialModel) -> Result<Self, LoadError> {
        Ok(Self { step: Step::new(session, &model.step, Copier::on_host())? })
    }

    /// Computes the initial states of a sequence that starts with `request`. Returns one entry for each state, `None`
    /// for states that the model does not compute. A model without inputs needs no request.
    pub fn run(
        &mut self,
        binding: &Binding,
        model: &InitialModel,
        request: Option<&Request>,
    ) -> Result<Vec<Option<Initial>>, RunError> {
        for (index, &of) in model.inputs.iter().enumerate() {
            let bound = &binding.inputs[of];
            let given = bound.request().and_then(|of| Some((of.form, request?.input(of.position)?)));
            let Some((form, input)) = given else { continue };
            let dims = form.model_dims(input.dims());
            if bound.data_type == DataType::Bytes {
                self.step.set_strings(
                    index,
                    dims,
                    1,
                    input.strings().into_iter().flat_map(Strings::iter).enumerate(),
                )?;
                continue;
            }
            let mut rest = self.step.input(index, dims, 1)?;
            for piece in input.pieces() {
                let (now, behind) = rest.split_at_mut(piece.byte_len());
                piece.copy_to(now);
                rest = behind;
            }
        }
        self.step.run(Run { rows: 1, ..Run::default() })?;
        let mut initial = vec![None; binding.states.len()];
        for (index, output) in model.outputs.iter().enumerate() {
            let (state, view) = (&binding.states[output.state], self.step.output(index, None)?);
            initial[output.state] = Some(read(binding, state, *output, view)?);
        }
        self.step.give_back();
        Ok(initial)
    }
}

/// Checks that an output has the shape of one row of its state, and copies it.
fn read(binding: &Binding, state: &BoundState, output: InitialOutput, view: OutputView) -> Result<Initial, RunError> {
    let mut dims = view.dims.to_vec();
    if let Some(axis) = state.batch_axis.filter(|_| dims.len() + 1 == state.dims.len() || !output.has_batch) {
        dims.insert(axis.min(dims.len()), 1);
    }
    let fits = |(&dim, &wanted): (&i64, &i64)| dim == wanted || wanted < 0;
    if dims.len() != state.dims.len() || !dims.iter().zip(&state.dims).all(fits) {
        return Err(RunError::InitialState {
            name: binding.inputs[state.input].name.clone(),
            dims: view.dims.to_vec(),
            wanted: state.dims.clone(),
        });
    }
    let content = match state.data_type {
        DataType::Bytes => InitialContent::Strings(view.strings.clone()),
        _ if element_count(&dims) == Some(0) => InitialContent::Zeros,
        _ => InitialContent::Bytes(view.bytes.to_vec()),
    };
    Ok(Initial { dims, content })
}
