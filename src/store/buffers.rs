//! The states of fixed size: in batch buffers while they run, in slots otherwise.
//!
//! [`Placement`] knows which state is where. Here the rows of a batch are put in its order, and the bytes of those that
//! join or leave are copied.

use super::content::StateRow;
use super::placement::{Placement, Plan, Spot};
use super::{RowState, permute};
use crate::binding::{Binding, StatePlace};
use crate::memory::{MemoryError, SlotMemory};
use crate::model::StateMemory;
use crate::session::{RowAt, Step};
use crate::state::pool::SlotId;
use crate::tensor::RowLayout;

/// The batch buffers of an instance.
pub(super) struct BatchBuffers {
    placement: Placement,
    states: Vec<FixedState>,
    plan: Plan,
    /// Slots of the rows of a batch.
    slots: Vec<Option<SlotId>>,
    /// Positions of the batch whose states are not where the run reads them.
    joining: Vec<usize>,
}

/// A state that has a part of the slot and of the batch buffers.
struct FixedState {
    /// Which state of the binding.
    number: usize,
    layout: RowLayout,
    offset: usize,
    slot_bytes: usize,
    as_fp16: bool,
}

impl BatchBuffers {
    /// `resident` batches stay beside the one that is written.
    pub fn new(binding: &Binding, resident: usize) -> Self {
        let states = binding.states.iter().enumerate().filter_map(|(number, state)| match state.place {
            StatePlace::Beside(_) => None,
            StatePlace::Slot(layout) => Some(FixedState {
                number,
                layout,
                offset: binding.slot.offset(number),
                slot_bytes: state.slot_bytes(),
                as_fp16: state.as_fp16,
            }),
        });
        let states: Vec<_> = states.collect();
        let by_rows = states.iter().any(|state| state.layout.outer > 1);
        let placement = Placement::new(resident, by_rows);
        Self { placement, states, plan: Plan::default(), slots: Vec::new(), joining: Vec::new() }
    }

    /// Plans a run over `places` rows. Returns the order of the rows.
    pub fn plan<'r>(&mut self, rows: impl Iterator<Item = &'r RowState>, places: usize) -> Option<&[usize]> {
        if self.states.is_empty() {
            return None;
        }
        self.slots.clear();
        self.slots.extend(rows.map(RowState::slot_with_state));
        self.placement.plan(&self.slots, places, &mut self.plan);
        permute(&mut self.slots, &self.plan.order);
        Some(&self.plan.order)
    }

    /// The states that must be written back before the run that is planned.
    pub fn leaving(&self) -> Vec<(SlotId, Spot)> {
        if self.states.is_empty() { Vec::new() } else { self.plan.leaving.clone() }
    }

    /// The batch buffers that the next run reads and writes.
    pub const fn ends(&self) -> (usize, usize) {
        (self.plan.from, self.plan.into)
    }

    /// Where the newest state of a sequence is; `None`: in its slot.
    pub fn spot(&self, slot: SlotId) -> Option<Spot> {
        self.placement.spot(slot)
    }

    /// The sequence is over, or its slot has the newest state.
    pub fn forget(&mut self, slot: SlotId) {
        self.placement.forget(slot);
    }

    /// Fills the buffer that the next run reads, for `places` rows, except with states that are lent. Returns the bytes
    /// that were copied.
    pub fn fill(
        &mut self,
        batch: &[(&RowState, Option<&StateMemory>)],
        places: usize,
        binding: &Binding,
        step: &mut Step,
        is_lent: impl Fn(usize) -> bool,
    ) -> Result<usize, MemoryError> {
        if self.states.is_empty() {
            return Ok(0);
        }
        let from = self.plan.from;
        self.joining.clear();
        let spot_of = |position: usize| self.placement.spot(self.slots[position]?);
        let is_there = |&position: &usize| spot_of(position) == Some(Spot { buffer: from, position });
        self.joining.extend((0..batch.len()).filter(|position| !is_there(position)));
        let mut copied = 0;
        let filled = || self.states.iter().enumerate().filter(|(_, state)| !is_lent(state.number));
        for (index, state) in filled() {
            for &position in &self.joining {
                let to = RowAt { buffer: from, position, rows: places };
                let (row, memory) = batch[position];
                match spot_of(position) {
                    Some(spot) => step.copy_state(index, state.layout, self.row_at(spot), to)?,
                    None => {
                        let content = StateRow::of(binding, state.number, row, memory).content.of_row();
                        step.put_state(index, state.layout, to, content)?;
                    }
                }
                copied += if row.is_fresh() { 0 } else { state.slot_bytes };
            }
        }
        step.end_phase();
        for (index, state) in filled() {
            for position in batch.len()..places {
                let at = |position| RowAt { buffer: from, position, rows: places };
                step.copy_state(index, state.layout, at(0), at(position))?;
            }
        }
        if filled().count() == self.states.len() {
            for &position in &self.joining {
                if let Some(slot) = self.slots[position] {
                    self.placement.move_to(slot, Spot { buffer: from, position }, places);
                }
            }
        }
        Ok(copied)
    }

    /// From now on the newest state of a sequence is what the last run, over `places` rows, wrote at `position`. States
    /// that are kept as fp16 are rounded there, so that a state is the same whether it moved or not.
    pub fn keep(&mut self, slot: SlotId, position: usize, places: usize, step: &mut Step) {
        if self.states.is_empty() {
            return;
        }
        for (index, state) in self.states.iter().enumerate().filter(|(_, state)| state.as_fp16) {
            step.round_state(index, state.layout, RowAt { buffer: self.plan.into, position, rows: places });
        }
        self.placement.move_to(slot, Spot { buffer: self.plan.into, position }, places);
    }

    /// Copies the state at a spot to a slot. Returns the bytes.
    pub fn write_back(&self, spot: Spot, slot: &mut SlotMemory, step: &mut Step) -> usize {
        let from = self.row_at(spot);
        for (index, state) in self.states.iter().enumerate() {
            let kept = slot.part_mut(state.offset..state.offset + state.slot_bytes);
            step.take_state(index, state.layout, from, kept, state.as_fp16);
        }
        self.states.iter().map(|state| state.slot_bytes).sum()
    }

    fn row_at(&self, Spot { buffer, position }: Spot) -> RowAt {
        RowAt { buffer, position, rows: self.placement.run_rows(buffer) }
    }
}
