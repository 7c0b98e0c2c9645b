//! A row of a batch, as the store sees it: the hold on its sequence, and what the run reads instead of its states.

use sequences::pool::SlotId;

use crate::binding::{Binding, Initial};
use crate::model::Lease;

/// What the store needs to know of a row of a batch.
#[derive(Default)]
pub struct RowState {
    /// The hold on its sequence; `None` for a request without one (warm-up), which starts from the initial state and
    /// leaves none.
    pub lease: Option<Lease>,
    /// It starts its sequence.
    pub start: bool,
    /// Values that the run reads instead of what the sequence has or begins with, by state; empty if there are none.
    /// They come from the model for initial states or from the request. The state of a sequence that goes on must have
    /// been evicted ([`super::StateStore::evict`]).
    pub given: Vec<Option<Initial>>,
    /// What the run reads as contexts.
    pub contexts: Contexts,
    /// No run of the sequence has left contexts, as [`super::StateStore::note_first`] has noted. It matters only for contexts
    /// that can be absent.
    pub is_first: bool,
    /// The run leaves the state as it is (`commit: false`).
    pub discards: bool,
    /// More steps of its request follow. Until the last one, the sequence has the state after a step, but the lease counts it
    /// as lost: a row that stops earlier restores the state from before the request ([`super::StateStore::save`]).
    pub is_partial: bool,
    /// Dimensions of the states of varying size before the run, where [`super::StateStore::note_dims`] has noted them.
    pub dims: Vec<Vec<i64>>,
}

/// What a run reads in front of the inputs of a row.
#[derive(Default)]
pub enum Contexts {
    /// What the sequence has; nothing at its start.
    #[default]
    Kept,
    /// Nothing, as at the start.
    Reset,
    /// These bytes, in the order of [`Binding::contexts`].
    Given(Vec<Vec<u8>>),
}

impl RowState {
    /// Whether its state is the initial one rather than the sequence's.
    pub const fn is_fresh(&self) -> bool {
        self.start || self.lease.is_none()
    }

    /// The state is lost, so the sequence ends with this request.
    pub fn spoil(&mut self) {
        if let Some(lease) = &mut self.lease {
            lease.spoil();
        }
    }

    /// The slot of its sequence, if the state that it needs is the sequence's.
    pub(super) fn slot_with_state(&self) -> Option<SlotId> {
        self.lease.as_ref().filter(|_| !self.start).map(Lease::slot)
    }

    /// The slot of its sequence, if the run reads all states of the sequence and no other.
    pub(super) fn slot_in_place(&self) -> Option<SlotId> {
        self.slot_with_state().filter(|_| self.given.is_empty())
    }

    /// Whether its sequence has the state after the run.
    pub(super) fn keeps(&self) -> bool {
        let is_kept = |lease: &Lease| self.is_partial || (!self.discards && !lease.ends());
        self.lease.as_ref().is_some_and(is_kept)
    }

    /// Its lease, if its sequence has the state after the run.
    pub(super) fn lease_that_keeps(&mut self) -> Option<&mut Lease> {
        if self.keeps() { self.lease.as_mut() } else { None }
    }
}

/// A row of a batch, as the store sees it.
pub trait HasState {
    /// The state.
    fn state(&self) -> &RowState;
    /// The state, to change.
    fn state_mut(&mut self) -> &mut RowState;
    /// Steps that the model sees of an input along an axis; `None` if the request leaves it out.
    fn steps(&self, binding: &Binding, input: usize, axis: usize) -> Option<usize>;
}

impl HasState for RowState {
    fn state(&self) -> &RowState {
        self
    }

    fn state_mut(&mut self) -> &mut RowState {
        self
    }

    fn steps(&self, _: &Binding, _: usize, _: usize) -> Option<usize> {
        None
    }
}
