//! What of the states after a run is copied to the sequences: varying states, and contexts.

use rows::copies;
use rows::tensor::{RowAt, StorageType, WindowLayout};

use super::output_rows::OutputRows;
use super::row_state::HasState;
use super::varying;
use crate::binding::{Binding, BoundContext, BoundState, RequestInput};
use crate::error::RunError;
use crate::model::{StateMemory, VaryingSize};
use crate::session::Step;

/// The states after a run, as its outputs have them.
pub(super) struct NewStates<'a> {
    pub binding: &'a Binding,
    /// Those of varying size.
    pub outputs: Vec<(&'a BoundState, OutputRows<'a>)>,
    pub step: &'a Step,
    pub run_rows: usize,
    /// Most bytes of the varying states of one sequence.
    pub limit: usize,
}

impl NewStates<'_> {
    /// Makes room for the varying states of a row, so that keeping them cannot fail; if they stay in the tensors of the
    /// run, they are only paid for.
    pub fn make_room<R: HasState>(
        &self,
        position: usize,
        row: &mut R,
        memory: &mut Option<StateMemory>,
        stays: bool,
    ) -> Result<(), RunError> {
        let (Some(_), Some(memory)) = (row.state_mut().lease_that_keeps(), memory) else { return Ok(()) };
        let too_large = |(state, output): &&(&BoundState, OutputRows)| {
            state.storage == StorageType::Fp16 && !output.fits_fp16(position)
        };
        if let Some((state, _)) = self.outputs.iter().find(too_large) {
            return Err(RunError::StateNotFp16 { name: self.binding.inputs[state.input].name.clone() });
        }
        let sizes = || self.outputs.iter().map(|(state, output)| varying::size(state, output, position));
        let bytes = sizes().map(VaryingSize::bytes).fold(0, usize::saturating_add);
        if bytes > self.limit {
            return Err(RunError::StateTooLarge { bytes, limit: self.limit });
        }
        Ok(memory.reserve(sizes(), stays)?)
    }

    /// Copies a row's contexts and, unless they stay, its varying states. Returns the bytes of the latter.
    pub fn keep<R: HasState>(
        &self,
        position: usize,
        row: &mut R,
        memory: &mut Option<StateMemory>,
        stays: bool,
    ) -> Result<usize, RunError> {
        if !stays {
            self.make_room(position, row, memory, false)?;
        }
        let ends: Vec<_> = ends_of_row(self.binding, row).collect();
        let (Some(lease), Some(memory)) = (row.state_mut().lease_that_keeps(), memory) else { return Ok(0) };
        // Until `commit`: the copies overwrite the state from before the run.
        lease.spoil();
        for context in ends {
            let from = self.binding.slot.offset(context.context.slot_entry);
            let part = memory.slot.part_mut(from..from + context.context.bytes);
            context.copy(self.binding, self.step, RowAt { position, rows: self.run_rows }, part.host());
        }
        let outputs = self.outputs.iter().filter(|_| !stays);
        outputs.map(|(state, output)| varying::copy_in(state, output, position, memory, self.step)).sum()
    }
}

/// The ends of a row's inputs that have a context.
fn ends_of_row<R: HasState>(binding: &Binding, row: &R) -> impl Iterator<Item = EndOfRow> {
    let end = |(input, _, context): (usize, &RequestInput, BoundContext)| {
        Some(EndOfRow { input, context, length: row.steps(binding, input, context.axis)? })
    };
    binding.contexts().filter_map(end)
}

/// The end of a row of an input, which is the context of the next.
struct EndOfRow {
    input: usize,
    context: BoundContext,
    /// Steps that the model saw.
    length: usize,
}

impl EndOfRow {
    /// Copies it out of the inputs of the last run, in which the row was `at`.
    fn copy(&self, binding: &Binding, step: &Step, at: RowAt, kept: &mut [u8]) {
        let Self { input, context, length } = *self;
        let bound = &binding.inputs[input];
        let (dims, bytes) = step.filled(input);
        let Some(layout) = WindowLayout::new(bound.data_type, dims, bound.batch_axis, context.axis) else { return };
        let window = layout.window(at, length - context.length..length);
        copies::take(&window, StorageType::Exact, bytes, &mut kept[..window.bytes()]);
        context.mark(kept);
    }
}
