//! Reads the new state of one row after a run, if its request has steps left. Until the last step, the sequence keeps its
//! state from before the request.

use rows::tensor::{DataType, RowAt, StorageType};

use super::StateStore;
use super::content::{Captured, SequenceState};
use super::new_states::ends_of_row;
use super::operations::widened;
use super::row_state::HasState;
use super::varying;
use crate::binding::{BoundState, Initial, InitialContent, StatePlace};
use crate::error::RunError;
use crate::memory::{Bytes, BytesMut, TensorMemory};
use crate::session::Step;

impl StateStore {
    /// Reads the state that the last run, over `rows` rows, made of the row at `position`.
    pub fn capture<R: HasState>(&mut self, step: &Step, at: RowAt, row: &R) -> Result<Captured, RunError> {
        let RowAt { position, rows } = at;
        if self.buffers.rounds()
            && let Some(state) = self.buffers.round(position, rows, &self.copier)
        {
            let name = self.binding.inputs[self.binding.states[state].input].name.clone();
            return Err(RunError::StateNotFp16 { name });
        }
        let (mut states, mut varying_bytes) = (Vec::new(), 0usize);
        for (number, state) in self.binding.states.iter().enumerate() {
            let value = match state.place {
                StatePlace::Slot(_) => self.capture_fixed(number, state, at)?,
                StatePlace::Beside(_) => {
                    let (value, bytes) = self.capture_varying(state, step, at)?;
                    varying_bytes = varying_bytes.saturating_add(bytes);
                    value
                }
            };
            states.push(value);
        }
        if varying_bytes > self.limit {
            return Err(RunError::StateTooLarge { bytes: varying_bytes, limit: self.limit });
        }
        let charge = if varying_bytes > 0 { Some(self.sequences.charge(varying_bytes)?) } else { None };
        let mut contexts: Vec<Vec<u8>> = self.binding.contexts().map(|(_, _, of)| vec![0; of.bytes]).collect();
        for end in ends_of_row(&self.binding, row) {
            let number = end.context.slot_entry - self.binding.states.len();
            end.copy(&self.binding, step, at, &mut contexts[number]);
        }
        Ok(Captured { state: SequenceState { states, contexts }, charge })
    }

    /// A state of fixed size, which the run wrote to a batch buffer.
    fn capture_fixed(
        &self,
        number: usize,
        state: &BoundState,
        RowAt { position, rows }: RowAt,
    ) -> Result<Initial, RunError> {
        let bytes = self.read_new(state.slot_bytes(), |to| {
            self.buffers.take_new(number, position, rows, to, &self.copier);
            Ok(())
        })?;
        Ok(Initial { dims: state.dims.clone(), content: as_exact(state, bytes) })
    }

    /// A state of varying size, and the bytes that it takes.
    fn capture_varying(
        &self,
        state: &BoundState,
        step: &Step,
        RowAt { position, rows }: RowAt,
    ) -> Result<(Initial, usize), RunError> {
        let output = self.output_rows(step, state.output, rows)?;
        if state.storage == StorageType::Fp16 && !output.fits_fp16(position) {
            return Err(RunError::StateNotFp16 { name: self.binding.inputs[state.input].name.clone() });
        }
        let (dims, size) = (output.row_dims(position).collect(), varying::size(state, &output, position).bytes());
        if state.data_type == DataType::Bytes {
            let content = InitialContent::Strings(output.strings(position).collect());
            return Ok((Initial { dims, content }, size));
        }
        let part = output.row(position);
        let bytes = self.read_new(state.storage.bytes(part.bytes()), |to| {
            Ok(step.take_output(state.output, &part, to, state.storage)?)
        })?;
        Ok((Initial { dims, content: as_exact(state, bytes) }, size))
    }

    /// The bytes that `take` writes where the model runs, on the host.
    fn read_new(&self, bytes: usize, take: impl FnOnce(BytesMut) -> Result<(), RunError>) -> Result<Vec<u8>, RunError> {
        let Some(device) = self.copier.device() else {
            let mut read = rows::reserve(bytes)?;
            read.resize(bytes, 0);
            take(BytesMut::Host(&mut read))?;
            return Ok(read);
        };
        let TensorMemory::Device(memory) = TensorMemory::new(Some(device), bytes)? else { return Ok(Vec::new()) };
        take(BytesMut::Device(memory.span(0, bytes)))?;
        self.copier.end_phase();
        Ok(self.copier.read(Bytes::Device(memory.span(0, bytes)))?)
    }
}

/// Numbers as the model takes them.
fn as_exact(state: &BoundState, bytes: Vec<u8>) -> InitialContent {
    InitialContent::Bytes(match state.storage {
        StorageType::Exact => bytes,
        StorageType::Fp16 => widened(&bytes),
    })
}
