//! States that stay where a run wrote them, and the way of the others in and out.
//!
//! States of fixed size lie in batch buffers. Which lies where is [`Residency`]'s to know; here the rows of a batch are
//! put in its order, and the bytes of those that join or leave are copied.
//!
//! Growing states stay in the tensors that a run made of them, which the sequences of the batch hold together. A next
//! batch of the same sequences reads them as they are. Before any other batch, each is copied to what its sequence has
//! beside its slot.

use std::sync::{Arc, Weak};

use super::Row;
use super::state_row::StateRow;
use crate::binding::{Binding, StatePlace};
use crate::error::RequestError;
use crate::memory::{Elsewhere, MemoryError, SlotMemory, Varying};
use crate::model::{Answered, LiveSequences};
use crate::session::{Grown, Lent, RowAt, Step};
use crate::state::pool::SlotId;
use crate::state::residency::{Place, Plan, Residency};
use crate::tensor::RowLayout;

/// The batch buffers of an instance.
pub struct Residence {
    residency: Residency,
    states: Vec<SlotState>,
    plan: Plan,
    /// Slots of the rows of a batch.
    slots: Vec<Option<SlotId>>,
    /// Positions of the batch whose states are not in place.
    joining: Vec<usize>,
    growing: Vec<GrowingState>,
    /// What the next run reads growing states from, if they are all in the tensors of one batch.
    grown: Option<Arc<Grown>>,
    /// The tensors of the last batch of several sequences, and the slots of the sequences that may have their states
    /// there.
    last_grown: (Weak<Grown>, Vec<SlotId>),
    /// Slots of sequences that wait, which states are on their way to.
    written: Vec<SlotMemory>,
    /// What such sequences have beside their slots, where growing states are on their way to.
    taken: Vec<(SlotId, Vec<Varying>)>,
}

/// A growing state whose tensor may stay.
struct GrowingState {
    /// Which state of the binding.
    number: usize,
    /// Its place beside the slot.
    beside: usize,
}

/// A state that lies in slots and batch buffers.
struct SlotState {
    /// Which state of the binding.
    number: usize,
    layout: RowLayout,
    offset: usize,
    slot_bytes: usize,
    as_fp16: bool,
}

impl Residence {
    /// `resident` batches stay beside the one that is written.
    pub fn new(binding: &Binding, resident: usize) -> Self {
        let states = binding.states.iter().enumerate().filter_map(|(number, state)| match state.place {
            StatePlace::Beside(_) => None,
            StatePlace::Slot(layout) => Some(SlotState {
                number,
                layout,
                offset: binding.slot.offset(number),
                slot_bytes: state.slot_bytes(),
                as_fp16: state.as_fp16,
            }),
        });
        let states: Vec<_> = states.collect();
        let by_rows = states.iter().any(|state| state.layout.outer > 1);
        let residency = Residency::new(resident, by_rows);
        let growing = binding.growing_that_may_stay().into_iter();
        let growing = growing.map(|(number, beside)| GrowingState { number, beside });
        Self {
            residency,
            states,
            plan: Plan::default(),
            slots: Vec::new(),
            joining: Vec::new(),
            growing: growing.collect(),
            grown: None,
            last_grown: (Weak::new(), Vec::new()),
            written: Vec::new(),
            taken: Vec::new(),
        }
    }

    /// What the next run reads the growing states from, if they are all in the tensors of one batch.
    pub fn grown(&self) -> Option<&Grown> {
        self.grown.as_deref()
    }

    /// The batch buffers that the next run reads and writes.
    pub const fn buffers(&self) -> (usize, usize) {
        (self.plan.from, self.plan.into)
    }

    /// Plans a run over `places` rows: puts the batch in order, and writes home what must make room.
    pub fn plan(
        &mut self,
        batch: &mut [Row],
        places: usize,
        binding: &Binding,
        step: &mut Step,
        sequences: &LiveSequences,
    ) -> Result<(), RequestError> {
        self.grown = None;
        let grown = self.common_tensors(batch).filter(|grown| grown.rows() == places && batch.len() == places);
        if grown.is_some() {
            batch.sort_by_key(|row| self.elsewhere(row).map(|at| at.position));
        }
        if !self.states.is_empty() {
            self.slots.clear();
            self.slots.extend(batch.iter().map(Row::slot_with_state));
            self.residency.plan(&self.slots, places, &mut self.plan);
            permute(batch, &self.plan.order);
            let leaving = std::mem::take(&mut self.plan.leaving);
            self.write_home(&leaving, batch, step, sequences);
            self.plan.leaving = leaving;
            self.joining.clear();
            let place_of = |row: &Row| self.residency.place(row.slot_with_state()?);
            let is_in_place =
                |&position: &usize| place_of(&batch[position]) == Some(Place { buffer: self.plan.from, position });
            self.joining.extend((0..batch.len()).filter(|position| !is_in_place(position)));
        }
        let is_in_place =
            |(position, row): (usize, &Row)| self.elsewhere(row).is_some_and(|at| at.position == position);
        self.grown = grown.filter(|_| batch.iter().enumerate().all(is_in_place));
        match self.grown {
            Some(_) => Ok(()),
            None => self.copy_grown(batch, binding, step, sequences),
        }
    }

    /// Where the growing states of a row are, if they are in the tensors of a batch.
    fn elsewhere<'a>(&self, row: &'a Row) -> Option<&'a Elsewhere> {
        row.slot_with_state()?;
        row.lease.as_ref()?.varying(self.growing.first()?.beside)?.elsewhere()
    }

    /// The tensors in which all rows have their growing states.
    fn common_tensors(&self, batch: &[Row]) -> Option<Arc<Grown>> {
        let tensors = &self.elsewhere(batch.first()?)?.tensors;
        let is_there = |row: &Row| self.elsewhere(row).is_some_and(|at| Arc::ptr_eq(&at.tensors, tensors));
        batch.iter().all(is_there).then(|| tensors.clone().downcast().ok()).flatten()
    }

    /// Whether the state of the only row lies in its slot, so that it can be lent.
    pub fn is_in_slot(&self, row: &Row) -> bool {
        row.slot_with_state().is_none_or(|slot| self.residency.place(slot).is_none())
    }

    /// Fills the buffer that the next run reads, for `places` rows; but for the states in `lent`.
    pub fn fill(
        &mut self,
        batch: &[Row],
        places: usize,
        binding: &Binding,
        step: &mut Step,
        lent: &[Lent],
        sequences: &LiveSequences,
    ) -> Result<(), MemoryError> {
        let mut copied = 0;
        let is_lent = |state: &SlotState| lent.iter().any(|lent| lent.state == state.number);
        for (index, state) in self.states.iter().enumerate().filter(|(_, state)| !is_lent(state)) {
            for &position in &self.joining {
                let to = RowAt { buffer: self.plan.from, position, rows: places };
                let row = &batch[position];
                match row.slot_with_state().and_then(|slot| self.residency.place(slot)) {
                    Some(place) => step.copy_state(index, state.layout, self.row_at(place), to)?,
                    None => step.put_state(
                        index,
                        state.layout,
                        to,
                        StateRow::of(binding, state.number, row).content.of_row(),
                    )?,
                }
                copied += if row.is_fresh() { 0 } else { state.slot_bytes };
            }
        }
        step.end_phase();
        for (index, state) in self.states.iter().enumerate().filter(|(_, state)| !is_lent(state)) {
            for position in batch.len()..places {
                let at = |position| RowAt { buffer: self.plan.from, position, rows: places };
                step.copy_state(index, state.layout, at(0), at(position))?;
            }
        }
        if !self.states.iter().any(is_lent) {
            for &position in &self.joining {
                if let Some(slot) = batch[position].slot_with_state() {
                    self.residency.move_to(slot, Place { buffer: self.plan.from, position }, places);
                }
            }
        }
        sequences.count_copied(copied);
        Ok(())
    }

    /// What the last run, over `places` rows, wrote at `position` is the row's state from now on.
    pub fn keep(&mut self, position: usize, places: usize, row: &Row, step: &mut Step) {
        let Some(lease) = &row.lease else { return };
        if self.states.is_empty() {
            return;
        }
        if lease.ends() {
            return self.residency.forget(lease.slot());
        }
        for (index, state) in self.states.iter().enumerate().filter(|(_, state)| state.as_fp16) {
            step.round_state(index, state.layout, RowAt { buffer: self.plan.into, position, rows: places });
        }
        self.residency.move_to(lease.slot(), Place { buffer: self.plan.into, position }, places);
    }

    /// Writes the states of rows home, so that each can run in any company.
    pub fn bring_home(&mut self, rows: &mut [Row], step: &mut Step, sequences: &LiveSequences) {
        let places = rows.iter().filter_map(|row| {
            let slot = row.slot_with_state()?;
            Some((slot, self.residency.place(slot)?))
        });
        let places: Vec<_> = places.collect();
        self.write_home(&places, rows, step, sequences);
        // Growing states of these rows stay in the tensors of the last batch: each row copies its own before it runs.
        let is_here = |slot: &SlotId| rows.iter().any(|row| row.slot_with_state() == Some(*slot));
        self.last_grown.1.retain(|slot| !is_here(slot));
    }

    /// Copies the growing states of `rows` out of the tensors that they are in. Also copies those of sequences that wait
    /// out of the tensors of the last batch: otherwise one sequence would keep the memory of all.
    fn copy_grown(
        &mut self,
        rows: &mut [Row],
        binding: &Binding,
        step: &mut Step,
        sequences: &LiveSequences,
    ) -> Result<(), RequestError> {
        let (last, slots) = std::mem::take(&mut self.last_grown);
        let is_here = |slot: SlotId| rows.iter().any(|row| row.slot_with_state() == Some(slot));
        let idle: Vec<_> = slots.into_iter().filter(|slot| last.strong_count() > 0 && !is_here(*slot)).collect();
        for row in rows.iter_mut().filter(|row| row.slot_with_state().is_some()) {
            if let Some(lease) = &mut row.lease {
                self.copy_grown_row(binding, step, lease.contents_mut(), sequences)?;
            }
        }
        for slot in idle {
            let Some(mut contents) = sequences.take_contents(slot) else { continue };
            let copied = self.copy_grown_row(binding, step, &mut contents, sequences);
            self.taken.push((slot, contents));
            copied?;
        }
        // What is filled next reads from where this writes to.
        step.end_phase();
        if !step.is_on_device() {
            self.settle(sequences);
        }
        Ok(())
    }

    /// Copies the growing states of a sequence to what it has of its own, if they are in the tensors of a batch.
    fn copy_grown_row(
        &mut self,
        binding: &Binding,
        step: &Step,
        contents: &mut [Varying],
        sequences: &LiveSequences,
    ) -> Result<(), RequestError> {
        for (index, state) in self.growing.iter().enumerate() {
            let Some(varying) = contents.get_mut(state.beside) else { continue };
            let Some(Elsewhere { tensors, position, .. }) = varying.elsewhere().cloned() else { continue };
            let Ok(grown) = tensors.downcast::<Grown>() else { continue };
            let layout = grown.dims(index).and_then(|dims| binding.states[state.number].layout(dims));
            if let (Some(layout), Some(room)) = (layout, varying.room_for_elsewhere()?) {
                step.copy_grown(&grown, index, layout, position, room)?;
                varying.forget_elsewhere();
                sequences.count_copied(layout.row_bytes());
            }
        }
        Ok(())
    }

    /// Whether the growing states may stay in the tensors that the last run made for a batch over `places` rows.
    pub fn growing_can_stay(&self, batch: &[Row], places: usize, step: &Step) -> bool {
        let goes_on = |row: &Row| row.lease.as_ref().is_some_and(|lease| !lease.ends());
        !self.growing.is_empty() && batch.len() == places && batch.iter().all(goes_on) && step.made_growing()
    }

    /// The growing states of a batch stay in the tensors that the last run made.
    pub fn keep_growing(&mut self, batch: &mut [Row], binding: &Binding, step: &mut Step) {
        let grown = Arc::new(step.take_grown(batch.len()));
        for (position, row) in batch.iter_mut().enumerate() {
            let Some(lease) = &mut row.lease else { continue };
            for (index, state) in self.growing.iter().enumerate() {
                let bound = &binding.states[state.number];
                let Some(mut dims) = grown.dims(index).map(<[i64]>::to_vec) else { continue };
                let Some(layout) = bound.layout(&dims) else { continue };
                if let Some(dim) = bound.batch_axis.and_then(|axis| dims.get_mut(axis)) {
                    *dim = 1;
                }
                let bytes = bound.kept_bytes(layout);
                let elsewhere = Elsewhere { tensors: grown.clone(), position, bytes };
                lease.contents_mut()[state.beside].leave(&dims, elsewhere);
            }
        }
        if batch.len() > 1 {
            self.last_grown =
                (Arc::downgrade(&grown), batch.iter().filter_map(|row| Some(row.lease.as_ref()?.slot())).collect());
        }
    }

    /// A row that has its answer goes; from now on its state may be moved here. A sequence that is over gives its slot
    /// back at once, as core does: the next one may come before the answer has left.
    pub fn depart(&mut self, mut row: Row, answered: &mut Vec<Answered>) {
        row.leave_state();
        let Row { mut lease, answer, request, .. } = row;
        if let Some(over) = lease.take_if(|lease| lease.ends()) {
            self.residency.forget(over.slot());
        }
        answered.push(Answered { lease, answer, request });
    }

    /// Writes states to their slots: those of `rows` through their leases.
    fn write_home(
        &mut self,
        leaving: &[(SlotId, Place)],
        rows: &mut [Row],
        step: &mut Step,
        sequences: &LiveSequences,
    ) {
        if leaving.is_empty() {
            return;
        }
        let is_here = |slot: SlotId| rows.iter().any(|row| row.slot_with_state() == Some(slot));
        let idle = leaving.iter().filter(|(slot, _)| !is_here(*slot));
        let mut memories = sequences.idle_memories(idle.clone().map(|(slot, _)| *slot));
        for ((slot, place), memory) in idle.zip(&mut memories) {
            if let Some(memory) = memory {
                self.write_slot(*place, memory, step, sequences);
            }
            self.residency.forget(*slot);
        }
        self.written.extend(memories.into_iter().flatten().filter(|_| step.is_on_device()));
        for (slot, place) in leaving {
            let row = rows.iter_mut().find(|row| row.slot_with_state() == Some(*slot));
            if let Some(memory) = row.and_then(|row| row.lease.as_mut()?.memory_mut()) {
                self.write_slot(*place, memory, step, sequences);
                self.residency.forget(*slot);
            }
        }
        step.end_phase();
    }

    /// What has been moved is in its place: gives back what of sequences that wait was written.
    pub fn settle(&mut self, sequences: &LiveSequences) {
        self.written.clear();
        self.grown = None;
        for (slot, contents) in self.taken.drain(..) {
            sequences.give_contents(slot, contents);
        }
    }

    fn write_slot(&self, place: Place, slot: &mut SlotMemory, step: &mut Step, sequences: &LiveSequences) {
        let from = self.row_at(place);
        for (index, state) in self.states.iter().enumerate() {
            let kept = slot.part_mut(state.offset..state.offset + state.slot_bytes);
            step.take_state(index, state.layout, from, kept, state.as_fp16);
        }
        sequences.count_copied(self.states.iter().map(|state| state.slot_bytes).sum());
    }

    fn row_at(&self, Place { buffer, position }: Place) -> RowAt {
        RowAt { buffer, position, rows: self.residency.run_rows(buffer) }
    }
}

/// Puts the rows in an order: at each position the row that stood at `order[position]`.
fn permute<T>(rows: &mut [T], order: &[usize]) {
    for position in 0..order.len() {
        let mut from = order[position];
        // Where a row has been swapped away, it is where the row went that came to its position.
        while from < position {
            from = order[from];
        }
        rows.swap(position, from);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_are_put_in_any_order(order in Just((0..9).collect::<Vec<usize>>()).prop_shuffle()) {
            let mut rows: Vec<usize> = (100..109).collect();
            permute(&mut rows, &order);
            prop_assert_eq!(rows, order.iter().map(|from| 100 + from).collect::<Vec<_>>());
        }
    }
}
