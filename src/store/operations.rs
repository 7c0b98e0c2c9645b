//! The state of one sequence that has no request running: read, replaced, copied, moved to its slot.
//!
//! The sequence must be one of this store's instance: another store does not know what is in that one's batch buffers.

use half::f16;
use rows::tensor::{DataType, Dims, StorageType, dims_fit, element_count};
use rows::{copies, strings};
use sequences::pool::SlotId;

use super::StateStore;
use super::row::{Saved, SequenceState, StateContent, StateRow, WriteError};
use crate::binding::{BoundState, Initial, InitialContent, StatePlace};
use crate::error::RunError;
use crate::memory::{Charge, MemoryError};
use crate::model::{StateMemory, VaryingSize};

impl StateStore {
    /// The values of some states of a sequence, by their numbers; `None` if it is over.
    pub fn read_states(&mut self, sequence: SlotId, numbers: &[usize]) -> Result<Option<Vec<Initial>>, RunError> {
        self.evict(&[sequence])?;
        let Some(memory) = self.memory(sequence) else { return Ok(None) };
        let states = numbers.iter().map(|&number| self.read_kept(number, &memory));
        states.collect::<Result<_, _>>().map(Some)
    }

    /// The dims of each state of a sequence, and the bytes that its value has in a tensor; `None` if it is over.
    pub fn describe(&self, sequence: SlotId) -> Option<Vec<(Vec<i64>, usize)>> {
        let memory = self.memory(sequence)?;
        let states = self.binding.states.iter().enumerate();
        let described = states.map(|(number, state)| {
            let row = StateRow::kept(&self.binding, number, &memory).unwrap_or(StateRow::initial(&state.initial));
            let count = element_count(row.dims).unwrap_or(0);
            let bytes = match (row.content, state.data_type.byte_size()) {
                (_, Some(size)) => count.saturating_mul(size),
                (StateContent::WrittenStrings(written), None) => written.len(),
                (StateContent::Strings(strings), None) => strings::written_bytes(strings.iter()),
                (_, None) => strings::written_bytes(std::iter::repeat_n(&[][..], count)),
            };
            (row.dims.to_vec(), bytes)
        });
        Some(described.collect())
    }

    pub fn read(&mut self, sequence: SlotId) -> Result<Option<SequenceState>, RunError> {
        let all: Vec<usize> = (0..self.binding.states.len()).collect();
        let Some(states) = self.read_states(sequence, &all)? else { return Ok(None) };
        let Some(memory) = self.memory(sequence) else { return Ok(None) };
        let contexts = self.binding.contexts().map(|(_, _, of)| self.kept(&memory, of).to_vec()).collect();
        Ok(Some(SequenceState { states, contexts }))
    }

    /// Copies the state of a sequence before a request that may make several steps; `None` if it is over.
    pub fn save(&mut self, sequence: SlotId) -> Result<Option<Saved>, RunError> {
        let Some(state) = self.read(sequence)? else { return Ok(None) };
        let bytes = self.sizes(&state).map(VaryingSize::bytes).fold(0, usize::saturating_add);
        // Charged now, so that there is room when the state has to be restored.
        let charge = if bytes > 0 { Some(self.sequences.charge(bytes)?) } else { None };
        Ok(Some(Saved { state, charge }))
    }

    /// Gives a sequence another state. Returns false if it is over. A state that does not fit, or for which there is no
    /// room, is refused and changes nothing. A charge, if there is one, pays for all of the state.
    pub fn write(
        &mut self,
        sequence: SlotId,
        state: &SequenceState,
        charge: Option<Charge>,
    ) -> Result<bool, WriteError> {
        self.check_value(state)?;
        self.evict(&[sequence])?;
        let Some(mut memory) = self.memory(sequence) else { return Ok(false) };
        if let Some(charge) = charge {
            memory.pay(self.sizes(state), charge);
        }
        memory.reserve(self.sizes(state), false).map_err(RunError::from)?;
        for (number, value) in state.states.iter().enumerate() {
            self.write_kept(number, value, &mut memory).map_err(|error| WriteError::Copy(error.into()))?;
        }
        for ((_, _, of), bytes) in self.binding.contexts().zip(&state.contexts) {
            let from = self.binding.slot.offset(of.slot_entry);
            memory.slot.part_mut(from..from + of.bytes).host().copy_from_slice(bytes);
        }
        // The bytes are in the slot when others may have it.
        self.copier.synchronise().map_err(|error| WriteError::Copy(error.into()))?;
        Ok(true)
    }

    /// Copies the states of sequences to their slots and beside them, out of the batch buffers and shared tensors.
    pub fn evict(&mut self, sequences: &[SlotId]) -> Result<(), RunError> {
        let leaving =
            sequences.iter().filter_map(|&slot| Some((slot, self.buffers.spots.spot(slot)?))).collect::<Vec<_>>();
        let copied = self.copy_to_slots(&leaving, sequences);
        let Self { varying, others, .. } = self;
        let copied_out = others.iter_mut().map(|memory| varying.copy_out(memory)).sum::<Result<usize, _>>();
        let waited = self.copier.synchronise();
        // The memory is released even after an error, because the next call takes the same memory.
        self.release();
        waited?;
        self.count_copied(copied + copied_out?);
        Ok(())
    }

    /// State number `number`, as a sequence keeps it in its slot or beside it.
    fn read_kept(&self, number: usize, memory: &StateMemory) -> Result<Initial, RunError> {
        let Some(StateRow { dims, content }) = StateRow::kept(&self.binding, number, memory) else {
            return Ok(self.binding.states[number].initial.clone());
        };
        let content = match content {
            StateContent::Stored(StorageType::Exact, bytes) => InitialContent::Bytes(self.copier.read(bytes)?),
            StateContent::Stored(StorageType::Fp16, bytes) => InitialContent::Bytes(widened(&self.copier.read(bytes)?)),
            StateContent::WrittenStrings(written) => {
                InitialContent::Strings(strings::elements(written).flatten().collect())
            }
            StateContent::Strings(strings) => InitialContent::Strings(strings.clone()),
            StateContent::Zeros => InitialContent::Zeros,
        };
        Ok(Initial { dims: dims.to_vec(), content })
    }

    /// Writes a state to where a sequence keeps it; there is room.
    fn write_kept(&self, number: usize, value: &Initial, memory: &mut StateMemory) -> Result<(), MemoryError> {
        let state = &self.binding.states[number];
        let to = match state.place {
            StatePlace::Slot(_) => {
                let from = self.binding.slot.offset(number);
                memory.slot.part_mut(from..from + state.slot_bytes())
            }
            StatePlace::Beside(beside) if state.data_type == DataType::Bytes => {
                let bytes = strings::written_bytes(elements(value));
                strings::write(elements(value), memory.varying[beside].write(&value.dims, bytes).host());
                return Ok(());
            }
            StatePlace::Beside(beside) => memory.varying[beside].write(&value.dims, kept_bytes(state, value)),
        };
        match &value.content {
            InitialContent::Bytes(bytes) => match state.storage {
                StorageType::Exact => self.copier.write(bytes, to),
                StorageType::Fp16 => self.copier.write(&narrowed(bytes), to),
            },
            _ => self.copier.write(&vec![0; kept_bytes(state, value)], to),
        }
    }

    fn memory(&self, sequence: SlotId) -> Option<StateMemory> {
        self.sequences.state_memories(std::iter::once(Some(sequence))).pop().flatten()
    }

    fn check_value(&self, value: &SequenceState) -> Result<(), WriteError> {
        let misfit = |why| Err(WriteError::Misfit(why));
        let (came, wanted) = (value.states.len(), self.binding.states.len());
        if came != wanted {
            return misfit(format!("{came} states came, and the model has {wanted}"));
        }
        for (state, value) in self.binding.states.iter().zip(&value.states) {
            let (name, dims) = (&self.binding.inputs[state.input].name, Dims(&value.dims));
            if !dims_fit(&value.dims, &state.dims) {
                return misfit(format!("the value for '{name}' has dims {dims}, and a row has {}", Dims(&state.dims)));
            }
            if !has_elements(state.data_type, value) {
                return misfit(format!("the value for '{name}' does not have the elements of dims {dims}"));
            }
            if state.storage == StorageType::Fp16 && !fits_fp16(value) {
                return Err(RunError::StateNotFp16 { name: name.clone() }.into());
            }
        }
        let wanted: Vec<_> = self.binding.contexts().map(|(_, _, of)| of.bytes).collect();
        let came: Vec<_> = value.contexts.iter().map(Vec::len).collect();
        if came != wanted {
            return misfit(format!("contexts of {came:?} bytes came, and the model has contexts of {wanted:?} bytes"));
        }
        let bytes = self.sizes(value).map(VaryingSize::bytes).fold(0, usize::saturating_add);
        if bytes > self.limit {
            return Err(RunError::StateTooLarge { bytes, limit: self.limit }.into());
        }
        Ok(())
    }

    fn sizes(&self, value: &SequenceState) -> impl Iterator<Item = VaryingSize> {
        let states = self.binding.states.iter().zip(&value.states);
        states.filter(|(state, _)| !state.is_in_slot()).map(|(state, value)| match state.data_type {
            DataType::Bytes => VaryingSize::Strings(strings::written_bytes(elements(value))),
            _ => VaryingSize::Bytes(kept_bytes(state, value)),
        })
    }
}

/// Whether a value has as many elements as its dims say, of that type.
fn has_elements(data_type: DataType, value: &Initial) -> bool {
    let Some(count) = element_count(&value.dims) else { return false };
    match (&value.content, data_type.byte_size()) {
        (InitialContent::Zeros, _) => true,
        (InitialContent::Bytes(bytes), Some(size)) => count.checked_mul(size) == Some(bytes.len()),
        (InitialContent::Strings(strings), None) => strings.len() == count,
        _ => false,
    }
}

/// Bytes that a value of numbers takes when it is kept.
fn kept_bytes(state: &BoundState, value: &Initial) -> usize {
    state.layout(&value.dims).map_or(0, |layout| state.kept_bytes(layout))
}

fn elements(value: &Initial) -> impl Iterator<Item = &[u8]> + Clone {
    let strings = if let InitialContent::Strings(strings) = &value.content { Some(strings) } else { None };
    let empty = if strings.is_some() { 0 } else { element_count(&value.dims).unwrap_or(0) };
    strings.into_iter().flat_map(|strings| strings.iter()).chain(std::iter::repeat_n(&[][..], empty))
}

fn widened(narrow: &[u8]) -> Vec<u8> {
    let value = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32().to_ne_bytes();
    narrow.chunks_exact(2).flat_map(value).collect()
}

/// As [`copies::fits_fp16`], whatever the alignment of the bytes.
fn fits_fp16(value: &Initial) -> bool {
    let InitialContent::Bytes(bytes) = &value.content else { return true };
    let values: Vec<f32> = bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    copies::fits_fp16(bytemuck::cast_slice(&values))
}

fn narrowed(wide: &[u8]) -> Vec<u8> {
    let value = |bytes: &[u8]| f16::from_f32(bytemuck::pod_read_unaligned(bytes)).to_le_bytes();
    wide.chunks_exact(4).flat_map(value).collect()
}
