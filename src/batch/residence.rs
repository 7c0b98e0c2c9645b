//! States that stay where a run wrote them, and the way of the others in and out.
//!
//! States of fixed size lie in batch buffers. Which lies where is [`Residency`]'s to know; here the rows of a batch are
//! put in its order, and the bytes of those that join or leave are copied. Of growing states, the tensors of the last
//! batch stay as ONNX Runtime made them, for a next batch of the same sequences; for any other they go home to what
//! each sequence has beside its slot.

use super::Row;
use super::state_row::StateRow;
use crate::binding::{Binding, StatePlace};
use crate::error::Error;
use crate::memory::{MemoryError, SlotMemory, Varying};
use crate::model::{Answered, Lease, LiveSequences};
use crate::session::{Lent, RowAt, Step};
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
    /// The sequences whose growing states are in the tensors of the last batch, by position.
    grown: Vec<Option<SlotId>>,
    /// The next run reads those tensors.
    reads_grown: bool,
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
            grown: Vec::new(),
            reads_grown: false,
            written: Vec::new(),
            taken: Vec::new(),
        }
    }

    /// Whether the next run reads the growing states from the tensors of the last one.
    pub const fn reads_grown(&self) -> bool {
        self.reads_grown
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
    ) -> Result<(), Error> {
        self.reads_grown = !self.grown.is_empty() && batch.len() == places && self.order_as_grown(batch);
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
        self.reads_grown &= self.grown.iter().zip(batch.iter()).all(|(slot, row)| *slot == row.slot_with_state());
        match self.reads_grown {
            true => Ok(()),
            false => self.bring_grown_home(batch, binding, step, sequences),
        }
    }

    /// Puts a batch in the order of the tensors of the last one. Whether it has the same sequences.
    fn order_as_grown(&self, batch: &mut [Row]) -> bool {
        if self.grown.len() != batch.len() {
            return false;
        }
        for position in 0..batch.len() {
            let wanted = self.grown[position];
            let found = (position..batch.len()).find(|&at| batch[at].slot_with_state() == wanted);
            let Some(found) = found.filter(|_| wanted.is_some()) else { return false };
            batch.swap(position, found);
        }
        true
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
    pub fn bring_home(
        &mut self,
        rows: &mut [Row],
        binding: &Binding,
        step: &mut Step,
        sequences: &LiveSequences,
    ) -> Result<(), Error> {
        let places = rows.iter().filter_map(|row| {
            let slot = row.slot_with_state()?;
            Some((slot, self.residency.place(slot)?))
        });
        let places: Vec<_> = places.collect();
        self.write_home(&places, rows, step, sequences);
        for row in rows {
            let position = self.grown.iter().position(|slot| slot.is_some() && *slot == row.slot_with_state());
            if let (Some(position), Some(lease)) = (position, &mut row.lease) {
                let at = (position, self.grown.len());
                bring_row_home(&self.growing, at, binding, step, lease.contents_mut(), sequences)?;
                self.grown[position] = None;
            }
        }
        Ok(())
    }

    /// Writes all growing states home that are in the tensors of the last batch: those of `rows` through their leases,
    /// the others through what is held until that is done, as it may not go before it has been written.
    fn bring_grown_home(
        &mut self,
        rows: &mut [Row],
        binding: &Binding,
        step: &mut Step,
        sequences: &LiveSequences,
    ) -> Result<(), Error> {
        for position in 0..self.grown.len() {
            let Some(slot) = self.grown[position] else { continue };
            let lease = rows.iter_mut().filter_map(|row| row.lease.as_mut()).find(|lease| lease.slot() == slot);
            let at = (position, self.grown.len());
            if let Some(lease) = lease {
                bring_row_home(&self.growing, at, binding, step, lease.contents_mut(), sequences)?;
            } else if let Some(contents) = sequences.take_contents(slot) {
                self.taken.push((slot, contents));
                if let Some((_, contents)) = self.taken.last_mut() {
                    bring_row_home(&self.growing, at, binding, step, contents, sequences)?;
                }
            }
            self.grown[position] = None;
        }
        if !self.grown.is_empty() {
            self.grown.clear();
            step.drop_growing()?;
            self.give_back_taken(sequences);
        }
        Ok(())
    }

    /// Whether the growing states may stay in the tensors that the last run made for a batch over `places` rows.
    pub fn growing_can_stay(&self, batch: &[Row], places: usize, step: &Step) -> bool {
        let goes_on = |row: &Row| row.lease.as_ref().is_some_and(|lease| !lease.ends());
        !self.growing.is_empty() && batch.len() == places && batch.iter().all(goes_on) && step.made_growing()
    }

    /// The growing states of a batch stay in the tensors that the last run made.
    pub fn keep_growing(&mut self, batch: &[Row], step: &mut Step) {
        step.keep_growing();
        self.grown.clear();
        self.grown.extend(batch.iter().map(|row| row.lease.as_ref().map(Lease::slot)));
    }

    /// The growing states of a row have been copied to its sequence.
    pub fn forget_grown(&mut self, row: &Row) {
        let slot = row.lease.as_ref().map(Lease::slot);
        for grown in self.grown.iter_mut().filter(|grown| grown.is_some() && **grown == slot) {
            *grown = None;
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
        self.give_back_taken(sequences);
    }

    fn give_back_taken(&mut self, sequences: &LiveSequences) {
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

/// Copies the row at `at` (its place, and how many there are) of the kept tensors to what its sequence has.
fn bring_row_home(
    growing: &[GrowingState],
    at: (usize, usize),
    binding: &Binding,
    step: &Step,
    contents: &mut [Varying],
    sequences: &LiveSequences,
) -> Result<(), Error> {
    for (index, state) in growing.iter().enumerate() {
        let (Some(dims), Some(varying)) = (step.kept_dims(index), contents.get_mut(state.beside)) else {
            continue;
        };
        let Some(layout) = binding.states[state.number].layout(dims) else { continue };
        if let Some(row) = varying.bring_home()? {
            step.take_kept(index, layout, at, row)?;
            varying.mark_home();
        }
        sequences.count_copied(layout.row_bytes());
    }
    Ok(())
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
