//! The states of fixed size: in a batch buffer from the first run of their sequence on, in its slot after they had to
//! leave.
//!
//! [`Spots`] knows which state is where. Here the bytes of rows that join or leave are copied.

use std::sync::Arc;

use rows::tensor::{RowAt, RowLayout, StorageType};
use sequences::pool::SlotId;

use super::row::{RowAndMemory, RowState, StateRow};
use super::spots::{BufferPlan, Spot, Spots, permute};
use crate::binding::{Binding, StatePlace};
use crate::memory::{MemoryError, SlotMemory};
use crate::session::{BatchTensor, Copier, Given};

pub(super) struct BatchBuffers {
    binding: Arc<Binding>,
    copier: Copier,
    pub spots: Spots,
    states: Vec<FixedState>,
    /// The tensor of each state, in each batch buffer.
    tensors: Vec<Vec<BatchTensor>>,
    most_rows: usize,
    plan: BufferPlan,
    slots: Vec<Option<SlotId>>,
    /// Positions of the batch whose states are not where the run reads them.
    joining: Vec<usize>,
}

/// A state that has a part of the slot and of the batch buffers.
struct FixedState {
    number: usize,
    layout: RowLayout,
    offset: usize,
    slot_bytes: usize,
    storage: StorageType,
}

impl BatchBuffers {
    /// For runs of up to `most_rows` rows. `resident` batches stay beside the one that is written.
    pub fn new(binding: &Arc<Binding>, copier: &Copier, most_rows: usize, resident: usize) -> Self {
        let states = binding.states.iter().enumerate().filter_map(|(number, state)| match state.place {
            StatePlace::Beside(_) => None,
            StatePlace::Slot(layout) => Some(FixedState {
                number,
                layout,
                offset: binding.slot.offset(number),
                slot_bytes: state.slot_bytes(),
                storage: state.storage,
            }),
        });
        let states: Vec<_> = states.collect();
        let by_rows = states.iter().any(|state| state.layout.outer > 1);
        Self {
            binding: binding.clone(),
            copier: copier.clone(),
            spots: Spots::new(resident, by_rows),
            states,
            tensors: Vec::new(),
            most_rows,
            plan: BufferPlan::default(),
            slots: Vec::new(),
            joining: Vec::new(),
        }
    }

    /// Plans a run over `run_rows` rows. Returns the order of the rows.
    pub fn plan<'r>(&mut self, rows: impl Iterator<Item = &'r RowState>, run_rows: usize) -> Option<&[usize]> {
        if self.states.is_empty() {
            return None;
        }
        self.slots.clear();
        self.slots.extend(rows.map(RowState::slot_in_place));
        self.spots.plan(&self.slots, run_rows, &mut self.plan);
        permute(&mut self.slots, &self.plan.order);
        Some(&self.plan.order)
    }

    /// The states that must be written back before the run that is planned.
    pub fn leaving(&self) -> Vec<(SlotId, Spot)> {
        // A copy, because the caller forgets spots while it goes through them.
        if self.states.is_empty() { Vec::new() } else { self.plan.leaving.clone() }
    }

    /// The tensors that the next run reads and writes, by input and by output.
    pub fn give<'a>(&'a mut self, inputs: &mut [Option<Given<'a>>], outputs: &mut [Option<&'a mut BatchTensor>]) {
        let Ok([from, into]) = self.tensors.get_disjoint_mut([self.plan.from, self.plan.into]) else { return };
        for ((state, from), into) in self.states.iter().zip(from).zip(into) {
            let state = &self.binding.states[state.number];
            inputs[state.input] = Some(Given::Batch(from));
            outputs[state.output] = Some(into);
        }
    }

    pub fn written(&self, number: usize) -> Option<&BatchTensor> {
        let index = self.states.iter().position(|state| state.number == number)?;
        self.tensors.get(self.plan.into)?.get(index)
    }

    /// Fills the buffer that the next run reads, for `run_rows` rows, except with states that are lent. Returns the
    /// bytes that were copied.
    pub fn fill(
        &mut self,
        batch: &[RowAndMemory],
        run_rows: usize,
        is_lent: impl Fn(usize) -> bool,
    ) -> Result<usize, MemoryError> {
        if self.states.is_empty() {
            return Ok(0);
        }
        self.make_tensors()?;
        let from = self.plan.from;
        // Taken out for the loop, and put back to keep its memory.
        let mut joining = std::mem::take(&mut self.joining);
        joining.clear();
        joining
            .extend((0..batch.len()).filter(|&at| self.spot_of_row(at) != Some(Spot { buffer: from, position: at })));
        let mut copied = 0;
        for index in 0..self.states.len() {
            if is_lent(self.states[index].number) {
                continue;
            }
            for &position in &joining {
                self.fill_row(index, RowAt { position, rows: run_rows }, batch[position])?;
                copied += if batch[position].0.is_fresh() { 0 } else { self.states[index].slot_bytes };
            }
        }
        // Rows beyond the batch are copied from the first row, which has to be there.
        self.copier.end_phase();
        for (index, state) in self.states.iter().enumerate().filter(|(_, state)| !is_lent(state.number)) {
            for position in batch.len()..run_rows {
                let row = |position| state.layout.row(RowAt { position, rows: run_rows });
                self.tensors[from][index].repeat(&self.copier, &row(0), &row(position));
            }
        }
        // A state that is lent is not in this buffer, so the sequence has no spot there.
        if !self.states.iter().any(|state| is_lent(state.number)) {
            for &position in &joining {
                if let Some(slot) = self.slots[position] {
                    self.spots.move_to(slot, Spot { buffer: from, position }, run_rows);
                }
            }
        }
        self.joining = joining;
        Ok(copied)
    }

    /// Fills a row of the buffer that the next run reads, from another spot, the slot, or an initial value.
    fn fill_row(&mut self, index: usize, to: RowAt, (row, memory): RowAndMemory) -> Result<(), MemoryError> {
        let (FixedState { number, layout, .. }, filled) = (&self.states[index], self.plan.from);
        let Some(spot) = self.spot_of_row(to.position) else {
            let tensor = &mut self.tensors[filled][index];
            tensor.set_rows(to.rows)?;
            let state = StateRow::of(&self.binding, *number, row, memory);
            return tensor.put(&self.copier, &layout.row(to), state.content.of_row());
        };
        let from = RowAt { position: spot.position, rows: self.spots.run_rows(spot.buffer) };
        let (from, to) = (layout.row(from), layout.row(to));
        if spot.buffer == filled {
            self.tensors[filled][index].repeat(&self.copier, &from, &to);
        } else if let Ok([read, filled]) = self.tensors.get_disjoint_mut([spot.buffer, filled]) {
            filled[index].copy_from(&self.copier, &read[index], &from, &to);
        }
        Ok(())
    }

    /// Whether states are stored in another type.
    pub fn rounds(&self) -> bool {
        self.states.iter().any(|state| state.storage != StorageType::Exact)
    }

    /// Rounds the states that are stored in another type where the last run, over `run_rows` rows, wrote them, so that
    /// a state is the same whether it moved or not. Returns the number of a state that has become infinite.
    pub fn round(&mut self, position: usize, run_rows: usize) -> Option<usize> {
        let tensors = self.tensors.get_mut(self.plan.into).into_iter().flatten();
        let mut infinite = None;
        for (state, tensor) in self.states.iter().zip(tensors) {
            let row = state.layout.row(RowAt { position, rows: run_rows });
            if !tensor.round(&self.copier, &row, state.storage) {
                infinite.get_or_insert(state.number);
            }
        }
        infinite
    }

    /// From now on the newest state of a sequence is what the last run, over `run_rows` rows, wrote at `position`.
    pub fn keep(&mut self, slot: SlotId, position: usize, run_rows: usize) {
        if !self.states.is_empty() {
            self.spots.move_to(slot, Spot { buffer: self.plan.into, position }, run_rows);
        }
    }

    /// Copies the state at a spot to a slot. Returns the bytes.
    pub fn write_back(&self, Spot { buffer, position }: Spot, slot: &mut SlotMemory) -> usize {
        let from = RowAt { position, rows: self.spots.run_rows(buffer) };
        for (state, tensor) in self.states.iter().zip(&self.tensors[buffer]) {
            let kept = slot.part_mut(state.offset..state.offset + state.slot_bytes);
            tensor.take(&self.copier, &state.layout.row(from), kept, state.storage);
        }
        self.states.iter().map(|state| state.slot_bytes).sum()
    }

    /// Where the state of a row of the batch is; `None`: in its slot, or it is an initial one.
    fn spot_of_row(&self, position: usize) -> Option<Spot> {
        self.spots.spot(self.slots[position]?)
    }

    /// Makes the buffers that the plan has and that have not been there before.
    fn make_tensors(&mut self) -> Result<(), MemoryError> {
        while self.tensors.len() <= self.plan.from.max(self.plan.into) {
            let tensor = |state: &FixedState| {
                let state = &self.binding.states[state.number];
                let input = &self.binding.inputs[state.input];
                let (data_type, axis) = (input.data_type, input.batch_axis);
                BatchTensor::for_rows(data_type, axis, self.copier.device(), &state.dims, self.most_rows)
            };
            self.tensors.push(self.states.iter().map(tensor).collect::<Result<_, _>>()?);
        }
        Ok(())
    }
}
