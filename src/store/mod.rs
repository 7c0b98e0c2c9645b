//! Where every byte of state is.
//!
//! One store per instance. [`StateStore::load`] brings the states of a batch to where a run reads them,
//! [`StateStore::store`] makes what the run wrote the states of the sequences. In between, a state of fixed size is in
//! a batch buffer or in its slot ([`buffers`]). A growing state is beside the slot, or in a tensor that a run made;
//! strings are beside the slot ([`varying`]). A context is always in the slot. Nothing above the store knows which.
//! [`operations`] has the calls for one sequence that has no request running: they read, replace, copy or move its
//! state.
//!
//! Rules: a state changes its place only after its bytes are there (on a GPU: after the copy is enqueued; if that
//! fails, the instance runs nothing more), so a run that fails leaves every state as it was. On a GPU the store holds
//! the memory of all sequences that copies are under way for until [`StateStore::release`], which the instance calls
//! after it has waited.
//!
//! Not for: the life of sequences, answers, or running the model.

#![forbid(unsafe_code)]

mod buffers;
mod operations;
mod row;
mod spots;
mod varying;

use std::sync::Arc;

use rows::tensor::{Gap, StorageType};
use sequences::pool::SlotId;
use smallvec::SmallVec;

use crate::binding::{Binding, BoundContext, NewLength};
use crate::error::{RequestError, RunError};
use crate::model::{Lease, LiveSequences, StateMemory};
use crate::panic;
use crate::session::{Copier, Given, Overlay, Run, Step};
use buffers::BatchBuffers;
pub use row::{Contexts, HasState, OutputRows, RowState, Saved, SequenceState, WriteError};
use row::{StateContent, StateRow};
use spots::{Spot, permute};
use varying::{NewStates, VaryingStates};

/// A state smaller than this is copied: making a tensor over it takes as long.
const LEND_FROM: usize = 4096;

#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    pub most_rows: usize,
    /// Batches that stay in batch buffers beside the one that is written.
    pub resident_batches: usize,
    /// Most bytes of the varying states of one sequence.
    pub sequence_bytes: usize,
}

pub struct StateStore {
    binding: Arc<Binding>,
    sequences: Arc<LiveSequences>,
    /// Most bytes of the varying states of one sequence.
    limit: usize,
    copier: Copier,
    buffers: BatchBuffers,
    varying: VaryingStates,
    /// Bytes of states that were copied since [`StateStore::take_copied`].
    copied: usize,
    /// States that the next run reads where they are.
    lent: SmallVec<[usize; 2]>,
    /// What the sequences of the batch keep, by row.
    held: Vec<Option<StateMemory>>,
    /// What other sequences keep whose states are copied.
    others: Vec<StateMemory>,
}

impl StateStore {
    pub fn new(binding: Arc<Binding>, sequences: Arc<LiveSequences>, copier: Copier, limits: StoreLimits) -> Self {
        let buffers = BatchBuffers::new(&binding, &copier, limits.most_rows, limits.resident_batches);
        let (varying, limit) = (VaryingStates::new(&binding, &copier), limits.sequence_bytes);
        let (lent, held, others) = (SmallVec::new(), Vec::new(), Vec::new());
        Self { binding, sequences, limit, copier, buffers, varying, copied: 0, lent, held, others }
    }

    /// Notes the dimensions of the states that vary in size, for rows that are about to be grouped.
    pub fn note_dims<R: HasState>(&self, rows: &mut [R]) {
        if self.varying.numbers.is_empty() {
            return;
        }
        let memories = self.sequences.state_memories(rows.iter().map(|row| row.state().slot_with_state()));
        for (row, memory) in rows.iter_mut().zip(memories) {
            let dims = self.varying.dims(row.state(), memory.as_ref());
            row.state_mut().dims = dims;
        }
    }

    /// Notes which rows are the first of their sequences that read contexts, for rows that are about to be grouped.
    pub fn note_first<R: HasState>(&self, rows: &mut [R]) {
        let contexts: Vec<_> = self.binding.contexts().map(|(_, _, of)| of).enumerate().collect();
        if !contexts.iter().any(|(_, of)| of.can_be_absent()) {
            return;
        }
        let memories = self.sequences.state_memories(rows.iter().map(|row| row.state().slot_with_state()));
        for (row, memory) in rows.iter_mut().zip(memories) {
            let is_there = |&(number, of): &(usize, BoundContext)| match (&row.state().contexts, &memory) {
                (Contexts::Given(all), _) => all.get(number).and_then(|kept| of.steps(kept)).is_some(),
                (Contexts::Kept, Some(memory)) => of.steps(self.kept(memory, of)).is_some(),
                (Contexts::Reset, _) | (_, None) => false,
            };
            let is_first = !contexts.iter().all(is_there);
            row.state_mut().is_first = is_first;
        }
    }

    /// Brings the states of a batch to where a run over `run_rows` rows reads them. Puts the rows in the order in which
    /// their states are there; rows beyond the batch repeat its first.
    pub fn load<R: HasState>(&mut self, batch: &mut [R], run_rows: usize) -> Result<(), RequestError> {
        let slots = batch.iter().map(|row| row.state().slot());
        self.held = self.sequences.state_memories(slots);
        self.arrange(batch, run_rows);
        let mut copied = self.make_way()?;
        // After `make_way`, which brings states to their slots, from where they can be lent.
        self.lent = self.lendable(batch, run_rows);
        let Self { binding, buffers, varying, held, lent, .. } = self;
        let rows: Vec<_> = batch.iter().map(R::state).zip(held.iter().map(Option::as_ref)).collect();
        let added = batch.first().map_or(0, |row| added(binding, row));
        varying.pad(&rows, added);
        let is_lent = |number: usize| lent.contains(&number);
        copied += varying.fill(&rows, run_rows, is_lent)?;
        copied += buffers.fill(&rows, run_rows, is_lent)?;
        self.count_copied(copied);
        Ok(())
    }

    /// Bytes of states that were copied since the last call.
    pub const fn take_copied(&mut self) -> usize {
        std::mem::replace(&mut self.copied, 0)
    }

    fn count_copied(&mut self, bytes: usize) {
        self.copied += bytes;
        self.sequences.metrics.count_copied(bytes);
    }

    /// The run of a batch that has been loaded, over `rows` rows.
    pub fn run<'a, R: HasState>(&'a mut self, batch: &'a [R], rows: usize, overlays: &'a [Overlay<'a>]) -> Run<'a> {
        let Self { binding, buffers, varying, lent, held, .. } = self;
        let mut inputs: Vec<_> = binding.inputs.iter().map(|_| None).collect();
        let mut outputs: Vec<_> = binding.outputs.iter().map(|_| None).collect();
        buffers.give(&mut inputs, &mut outputs);
        if let (Some(row), Some(memory)) = (batch.first(), held.first()) {
            // In place of what the buffers give: a state that is lent is in no buffer.
            for &number in &*lent {
                inputs[binding.states[number].input] = lend(binding, number, row.state(), memory.as_ref());
            }
        }
        varying.give(&mut inputs);
        Run { rows, inputs, outputs, overlays, as_graph: true }
    }

    /// An output of the last run over `rows` rows, which must have succeeded, taken apart into rows.
    pub fn output_rows<'a>(&'a self, step: &'a Step, index: usize, rows: usize) -> Result<OutputRows<'a>, RunError> {
        let state = self.binding.states.iter().enumerate().find(|(_, state)| state.output == index);
        // A state of fixed size was written to a batch buffer, which is not the step's.
        let written = state.and_then(|(number, _)| self.buffers.written(number));
        let output = OutputRows::new(&self.binding, index, step.output(index, written)?, rows)?;
        Ok(match state {
            Some((_, state)) => self.varying.without_padding(state, output),
            None => output,
        })
    }

    /// Lets padding consist of this byte rather than of zeros, to check that a model ignores it.
    pub fn set_padding(&mut self, byte: u8) {
        self.varying.padding = byte;
    }

    /// The padding of the row at `position` in the padded states of the run that has been loaded.
    pub fn gap(&self, position: usize) -> Gap {
        let gaps = &self.varying.gaps;
        // Rows beyond the batch repeat its first.
        gaps.get(position).or(gaps.first()).copied().unwrap_or_default()
    }

    /// What the row at `position` keeps of an input to put in front of the next request; `None` if no request has left
    /// it.
    pub fn context<'a, R: HasState>(&'a self, position: usize, row: &'a R, context: BoundContext) -> Option<&'a [u8]> {
        match &row.state().contexts {
            Contexts::Kept => {}
            Contexts::Reset => return None,
            Contexts::Given(all) => return context.steps(all.get(context.slot_entry - self.binding.states.len())?),
        }
        let memory = self.held.get(position)?.as_ref().filter(|_| !row.state().is_fresh())?;
        context.steps(self.kept(memory, context))
    }

    fn kept<'a>(&self, memory: &'a StateMemory, context: BoundContext) -> &'a [u8] {
        let from = self.binding.slot.offset(context.slot_entry);
        memory.slot.part(from..from + context.bytes).host()
    }

    /// Whether what the last run, over `run_rows` rows, gave can be states.
    pub fn check(&self, step: &Step, run_rows: usize) -> Result<(), RunError> {
        self.varying.outputs(step, run_rows).map(drop)
    }

    /// Makes what the last run, over `run_rows` rows, wrote the states of the rows whose `results` are good; a state
    /// that cannot be kept becomes an error of its row. If this fails as a whole, the states of all rows are lost.
    /// `may_share`: growing states may stay in the tensors of the run.
    pub fn store<R: HasState, T>(
        &mut self,
        batch: &mut [R],
        run_rows: usize,
        step: &mut Step,
        may_share: bool,
        results: &mut [Result<T, RequestError>],
    ) -> Result<(), RunError> {
        if self.buffers.rounds() {
            self.round(batch, run_rows, results);
        }
        let stays = self.copy_back(batch, run_rows, step, may_share, results)?;
        // A copy that fails must be known before `commit` says that the states are there.
        self.copier.synchronise()?;
        if stays {
            self.varying.stay(&mut self.held, step);
        }
        self.commit(batch, run_rows, results);
        Ok(())
    }

    /// Rounds the states of the rows whose `results` are good, as they will be kept. A finite value that becomes
    /// infinite is an error of its row.
    fn round<R: HasState, T>(&mut self, batch: &mut [R], run_rows: usize, results: &mut [Result<T, RequestError>]) {
        for (position, (row, result)) in batch.iter_mut().zip(results).enumerate().filter(|(_, (_, of))| of.is_ok()) {
            if row.state_mut().lease_that_keeps().is_none() {
                continue;
            }
            match panic::catch(|| self.buffers.round(position, run_rows)) {
                Ok(None) => {}
                Ok(Some(state)) => {
                    let name = self.binding.inputs[self.binding.states[state].input].name.clone();
                    *result = Err(RunError::StateNotFp16 { name }.into());
                }
                Err(error) => *result = Err(error.into()),
            }
        }
    }

    /// The states that the last run wrote to a batch buffer are those of the rows whose `results` are good.
    fn commit<R: HasState, T>(&mut self, batch: &mut [R], run_rows: usize, results: &mut [Result<T, RequestError>]) {
        for (position, (row, result)) in batch.iter_mut().zip(results).enumerate().filter(|(_, (_, of))| of.is_ok()) {
            // A request that leaves the state as it was has succeeded all the same.
            if row.state().discards && !row.state().is_partial {
                row.state_mut().lease.iter_mut().for_each(Lease::advance);
            }
            let is_partial = row.state().is_partial;
            let Some(lease) = row.state_mut().lease_that_keeps() else { continue };
            match panic::catch(|| self.buffers.keep(lease.slot(), position, run_rows)) {
                // Until the last step, the state counts as lost (`RowState::is_partial`).
                Ok(()) if is_partial => lease.spoil(),
                Ok(()) => lease.advance(),
                Err(error) => {
                    lease.spoil();
                    *result = Err(error.into());
                }
            }
        }
    }

    /// Gives back what sequences keep: a run is over. On a device, all copies have been waited for.
    pub fn release(&mut self) {
        self.held.clear();
        self.others.clear();
        self.varying.release();
    }

    pub fn drop(&mut self, sequence: SlotId) {
        self.buffers.spots.forget(sequence);
    }

    fn arrange<R: HasState>(&mut self, batch: &mut [R], run_rows: usize) {
        // Rows whose growing states are in the tensors of one batch go back to that order, so that the run reads the
        // tensors as they are.
        if let Some((_, positions)) = self.varying.common(batch, &self.held, run_rows) {
            let mut order: Vec<_> = (0..batch.len()).collect();
            order.sort_by_key(|&row| positions[row]);
            permute(batch, &order);
            permute(&mut self.held, &order);
        }
        if let Some(order) = self.buffers.plan(batch.iter().map(R::state), run_rows) {
            permute(batch, order);
            permute(&mut self.held, order);
        }
        // Once more, because the batch buffers may have asked for another order.
        let common = self.varying.common(batch, &self.held, run_rows);
        let in_order = common.filter(|(_, positions)| positions.iter().copied().eq(0..batch.len()));
        self.varying.grown = in_order.map(|(grown, _)| grown);
    }

    /// Copies the states back to their sequences that others would overwrite, or whose tensors must not be kept for
    /// them. Returns the bytes.
    fn make_way(&mut self) -> Result<usize, RunError> {
        let stay = self.varying.grown.is_some();
        let sharing = if stay { Vec::new() } else { self.varying.sharing() };
        let mut copied = self.copy_to_slots(&self.buffers.leaving(), &sharing);
        let Self { varying, held, others, .. } = self;
        // Where another sequence finds no memory, its states stay where they are, and the next batch tries again.
        for memory in others.iter_mut().filter(|memory| sharing.contains(&memory.id())) {
            copied += varying.copy_out(memory).unwrap_or_default();
        }
        for memory in held.iter_mut().flatten().filter(|_| !stay) {
            copied += varying.copy_out(memory)?;
        }
        // What is filled next reads from where this writes to.
        self.copier.end_phase();
        // On a device, copies are only enqueued, so the memory is held until `release`.
        if self.copier.device().is_none() {
            self.others.clear();
        }
        Ok(copied)
    }

    /// Copies states to their slots, and takes what those of other sequences than the batch's keep, and those of
    /// `sharing`. Returns the bytes.
    fn copy_to_slots(&mut self, leaving: &[(SlotId, Spot)], sharing: &[SlotId]) -> usize {
        let is_held = |slot: SlotId| self.held.iter().flatten().any(|memory| memory.id() == slot);
        let mut others: Vec<SlotId> = Vec::with_capacity(leaving.len() + sharing.len());
        for slot in leaving.iter().map(|(slot, _)| *slot).chain(sharing.iter().copied()) {
            if !is_held(slot) && !others.contains(&slot) {
                others.push(slot);
            }
        }
        self.others.extend(self.sequences.state_memories(others.into_iter().map(Some)).into_iter().flatten());
        let mut copied = 0;
        for &(slot, spot) in leaving {
            let mut memories = self.held.iter_mut().flatten().chain(&mut self.others);
            if let Some(memory) = memories.find(|memory| memory.id() == slot) {
                copied += self.buffers.write_back(spot, &mut memory.slot);
            }
            self.buffers.spots.forget(slot);
        }
        copied
    }

    /// The states of the only row of a run that the run can read where they are.
    fn lendable<R: HasState>(&self, batch: &[R], run_rows: usize) -> SmallVec<[usize; 2]> {
        let (1, Some(row), Some(memory)) = (run_rows, batch.first(), self.held.first()) else { return SmallVec::new() };
        let is_in_slot = row.state().slot_with_state().is_none_or(|slot| self.buffers.spots.spot(slot).is_none());
        let is_in_place = |number: usize| {
            if self.binding.states[number].is_in_slot() { is_in_slot } else { self.varying.grown.is_none() }
        };
        let can_be_lent = |number: usize| lend(&self.binding, number, row.state(), memory.as_ref()).is_some();
        (0..self.binding.states.len()).filter(|&number| is_in_place(number) && can_be_lent(number)).collect()
    }

    /// Copies what of the new states does not stay where the run wrote it: varying states, unless they stay in its
    /// tensors, and contexts. Returns whether they stay.
    fn copy_back<R: HasState, T>(
        &mut self,
        batch: &mut [R],
        run_rows: usize,
        step: &Step,
        may_share: bool,
        results: &mut [Result<T, RequestError>],
    ) -> Result<bool, RunError> {
        if !self.binding.has_varying_states() && self.binding.contexts().next().is_none() {
            return Ok(false);
        }
        let Self { binding, varying, held, .. } = self;
        let outputs = varying.outputs(step, run_rows)?;
        let new = NewStates { binding, outputs, step, run_rows, limit: self.limit };
        let mut stays = may_share && results.iter().all(Result::is_ok) && varying.can_stay(batch, run_rows, step);
        if stays {
            let rows = batch.iter_mut().zip(&mut *held).zip(&mut *results);
            // All are paid for first, because they stay together or not at all.
            for (position, ((row, memory), result)) in rows.enumerate() {
                if let Err(error) = panic::catch_result(|| Ok(new.make_room(position, row, memory, true)?)) {
                    // This row keeps the state before the run, so the others cannot stay with it.
                    *result = Err(error);
                    stays = false;
                }
            }
        }
        let mut copied = 0;
        let rows = batch.iter_mut().zip(held).zip(results).enumerate();
        for (position, ((row, memory), result)) in rows.filter(|(_, (_, result))| result.is_ok()) {
            match panic::catch_result(|| Ok(new.keep(position, row, memory, stays)?)) {
                Ok(bytes) => copied += bytes,
                Err(error) => *result = Err(error),
            }
        }
        self.count_copied(copied);
        Ok(stays)
    }
}

/// The elements that a run adds to each padded state of a row.
fn added<R: HasState>(binding: &Binding, row: &R) -> usize {
    match binding.growing_padding.as_ref().map(|padding| padding.added) {
        Some(NewLength::Fixed(number)) => number,
        Some(NewLength::Of(of)) => row.steps(binding, of.input, of.axis).unwrap_or(0),
        None => 0,
    }
}

/// A state of the only row of a run, as a tensor where it is.
fn lend<'a>(
    binding: &'a Binding,
    number: usize,
    row: &'a RowState,
    memory: Option<&'a StateMemory>,
) -> Option<Given<'a>> {
    match StateRow::of(binding, number, row, memory) {
        StateRow { dims, content: StateContent::Stored(StorageType::Exact, bytes) }
            if bytes.byte_len() >= LEND_FROM =>
        {
            Some(Given::Lent { dims, bytes })
        }
        _ => None,
    }
}

#[cfg(any(test, feature = "fuzzing"))]
mod binding_of_tests;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use binding_of_tests::binding as test_binding;
#[cfg(test)]
mod tests;
