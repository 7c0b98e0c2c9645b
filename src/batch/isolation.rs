//! Which rows run together after a run has failed.
//!
//! ONNX Runtime says that a batch cannot be run, but not because of which row. The batch is halved until the rows at
//! fault run alone: each costs up to two further runs per halving. A client that sends bad requests without end must
//! not make everyone pay that with each payload, so after a fault the rows run apart by their [`Standing`], and the
//! trusted ones first.
//!
//! The bounds, where a *search* is the most further runs that one row makes necessary, `2 * log2(max_batch_size)`:
//!
//! - A bad request of a trusted sequence costs a search. The sequence has to send as many good requests as a search has
//!   runs before it is trusted again.
//! - Any other bad request makes no trusted row run again. If the last request of its sequence failed as well, it costs
//!   one run, its own. If its sequence is new, it costs a search among the new ones at most: which of several new
//!   sequences is at fault can only be found by running them.
//! - Runs apart that turn out to be unnecessary add up to one search for each fault; then all run together again.
//!
//! Not for: running anything, or what a fault is.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::state::pool::SlotId;

/// What is known of the sequence of a row, in the order in which rows run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It was there before the fault, or has sent enough good requests since. All rows have this while none fails.
    Trusted,
    /// It starts, or has sent few good requests since it started or failed.
    New,
    /// Its last request failed: its rows run alone.
    Failed,
}

/// A sequence, as a run sees it.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its slot; `None` for a request without a sequence.
    pub slot: Option<SlotId>,
    /// Its state is the initial one.
    pub is_fresh: bool,
    /// The request ends it.
    pub ends: bool,
}

/// What an instance knows of the sequences that had a part in failed runs.
pub struct Isolation {
    /// Runs of a search.
    search: u32,
    /// Runs that rows may yet be kept apart for, though none of them fails; 0 while all run together.
    allowance: u32,
    /// Good requests of the sequences that are not trusted, since they started or failed; by the place of the slot, so
    /// that there are never more than slots.
    good: HashMap<(u32, u32), (SlotId, u32)>,
}

impl Isolation {
    /// No fault so far, for batches of up to `max_batch_size` rows.
    pub fn new(max_batch_size: usize) -> Self {
        let halvings = max_batch_size.max(1).next_power_of_two().ilog2();
        Self { search: 2 * halvings, allowance: 0, good: HashMap::new() }
    }

    /// Whether all rows run together.
    pub const fn is_over(&self) -> bool {
        self.allowance == 0
    }

    /// The standing of a row's sequence.
    pub fn standing(&self, member: Member) -> Standing {
        if self.is_over() {
            return Standing::Trusted;
        }
        match member.slot.filter(|_| !member.is_fresh).map(|slot| self.good_requests(slot)) {
            None => Standing::New,
            Some(None) => Standing::Trusted,
            Some(Some(0)) => Standing::Failed,
            Some(Some(_)) => Standing::New,
        }
    }

    /// A row has been found at fault: its run alone has failed.
    pub fn failed(&mut self, member: Member) {
        self.allowance = self.search;
        // A START that fails leaves no sequence.
        match member.slot.filter(|_| !self.is_over() && !member.is_fresh && !member.ends) {
            Some(slot) => drop(self.good.insert(slot.place(), (slot, 0))),
            None => self.forget(member),
        }
    }

    /// A batch of rows of one standing has run.
    pub fn ran(&mut self, batch: impl Iterator<Item = Member>) {
        if self.is_over() {
            return;
        }
        let mut is_trusted = true;
        for member in batch {
            is_trusted &= self.standing(member) == Standing::Trusted;
            self.note_good(member);
        }
        if !is_trusted {
            self.allowance -= 1;
        }
        if self.is_over() {
            self.good.clear();
        }
    }

    fn note_good(&mut self, member: Member) {
        let Some(slot) = member.slot.filter(|_| !member.ends) else { return self.forget(member) };
        let before = if member.is_fresh { Some(0) } else { self.good_requests(slot) };
        match before.map(|good| good + 1) {
            Some(good) if good < self.search => drop(self.good.insert(slot.place(), (slot, good))),
            _ => self.forget(member),
        }
    }

    fn good_requests(&self, slot: SlotId) -> Option<u32> {
        self.good.get(&slot.place()).filter(|(of, _)| *of == slot).map(|(_, good)| *good)
    }

    fn forget(&mut self, member: Member) {
        if let Some(slot) = member.slot {
            self.good.remove(&slot.place());
        }
    }
}
