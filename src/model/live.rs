//! The live sequences of a model behind their lock, and the leases on their slots.
//!
//! Rules: the lock is held for table work only, never while tensors are copied, a model runs, or a request is released
//! (that calls into core, which takes locks of its own).

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::metrics::{SequenceMetrics, Snapshot};
use crate::memory::{OutOfMemory, Slab, SlotMemory, SlotSize, Strings};
use crate::sequence::{Admitted, Key, Outcome, Policy, Refusal, Sequences};
use crate::state::pool::{SlotId, SlotLimits};
use crate::triton::Request;

type Table = Sequences<Arc<Slab>, Request, OutOfMemory>;

/// All live sequences of a model.
pub struct LiveSequences {
    table: Mutex<Table>,
    reaper_wanted: Condvar,
    metrics: SequenceMetrics,
}

/// A request's hold on its sequence's slot, from admission to settlement.
///
/// Dropped without settlement (a run that failed, a panic on the way) it leaves the sequence as it was before the
/// request; half-written, it ends the sequence.
pub struct Lease {
    sequences: Arc<LiveSequences>,
    slot: SlotId,
    /// Gone before the slot is given back, as the next one to have the slot makes another.
    memory: Option<SlotMemory>,
    end: bool,
    /// The slot's bytes are being written.
    writing: bool,
    advanced: bool,
    settled: bool,
}

/// What a payload's requests ask of the table, row by row.
pub struct Admission {
    /// Whose request it is.
    pub key: Key,
    /// It starts the sequence.
    pub start: bool,
    /// It ends the sequence.
    pub end: bool,
}

impl LiveSequences {
    /// No sequences yet; the first slab is allocated now.
    pub fn new(
        policy: Policy,
        limits: SlotLimits,
        size: SlotSize,
        metrics: SequenceMetrics,
    ) -> Result<Self, OutOfMemory> {
        let make_slab = Box::new(move |slots| Slab::new(slots, size).map(Arc::new));
        let table = Mutex::new(Sequences::new(policy, limits, make_slab)?);
        let sequences = Self { table, reaper_wanted: Condvar::new(), metrics };
        sequences.publish();
        Ok(sequences)
    }

    /// Admits the requests of a payload, in their order.
    pub fn admit(self: &Arc<Self>, instance: u32, requests: &[Admission]) -> Vec<Result<Lease, Refusal<OutOfMemory>>> {
        let mut released = Vec::new();
        let mut table = self.table.lock();
        table.begin_payload(instance, Instant::now());
        let admitted: Vec<_> = requests
            .iter()
            .map(|request| table.admit(&request.key, request.start, request.end, &mut released))
            .collect();
        drop(table);
        drop(released);
        let lease = |(admitted, request): (Result<Admitted<Arc<Slab>>, _>, &Admission)| {
            let admitted = admitted?;
            // SAFETY: the table has checked the slot out to this request alone, until it is settled; the lease
            // drops this before it settles.
            let memory = unsafe { SlotMemory::new(admitted.memory, admitted.slot.index()) };
            let (slot, end, memory) = (admitted.slot, request.end, Some(memory));
            Ok(Lease { sequences: self.clone(), slot, memory, end, writing: false, advanced: false, settled: false })
        };
        admitted.into_iter().zip(requests).map(lease).collect()
    }

    /// Settles the answered requests of a payload, which had `payload` in all, and releases them (or keeps one, see
    /// [`crate::sequence`], where `short` is explained too).
    pub fn settle(&self, instance: u32, requests: Vec<(Option<Lease>, Request)>, payload: usize, short: bool) {
        let now = Instant::now();
        // Leases take the lock when they are dropped, so none may be left when it is held.
        let requests: Vec<_> =
            requests.into_iter().map(|(lease, request)| (lease.map(Lease::finish), request)).collect();
        let mut released = Vec::with_capacity(requests.len());
        let mut table = self.table.lock();
        for (settlement, request) in requests {
            let hold = settlement.filter(|of| table.settle(of.slot, of.outcome, of.end, now, &mut released));
            match hold {
                Some(of) => table.hold(of.slot, request, &mut released),
                None => released.push(request),
            }
        }
        let adjusted = table.finish_payload(instance, payload, short, now, &mut released);
        let contested = table.is_contested();
        drop(table);
        if contested {
            self.reaper_wanted.notify_one();
        }
        note_missing_slab(adjusted);
        self.publish();
        drop(released);
    }

    /// Ends the sequences of an instance that goes away.
    pub fn retire_instance(&self, instance: u32) {
        let mut released = Vec::new();
        self.table.lock().retire_instance(instance, &mut released);
        self.publish();
        drop(released);
    }

    /// Expires what is due, then waits until something may be due again or until [`LiveSequences::wake`].
    pub(super) fn tick_and_wait(&self, stop: impl Fn() -> bool) {
        let mut released = Vec::new();
        let adjusted = self.table.lock().tick(Instant::now(), &mut released);
        drop(released);
        note_missing_slab(adjusted);
        self.publish();
        let mut table = self.table.lock();
        if !stop() {
            let next = table.next_tick(Instant::now());
            self.reaper_wanted.wait_until(&mut table, next);
        }
    }

    /// Ends a wait.
    pub(super) fn wake(&self) {
        let _table = self.table.lock();
        self.reaper_wanted.notify_all();
    }

    fn publish(&self) {
        self.metrics.publish(|| self.snapshot());
    }

    /// The numbers of sequences and slots now.
    pub fn snapshot(&self) -> Snapshot {
        let table = self.table.lock();
        Snapshot {
            live: table.live(),
            capacity: table.capacity(),
            slots: table.slots(),
            slabs: table.slabs(),
            counts: table.counts(),
        }
    }
}

fn note_missing_slab(adjusted: Result<(), OutOfMemory>) {
    if let Err(error) = adjusted {
        log::warn!("another buffer of state slots was due, but {error}; sequences start as long as slots are free");
    }
}

/// What a lease has to say at its end.
struct Settlement {
    slot: SlotId,
    outcome: Outcome,
    end: bool,
}

impl Lease {
    /// The slot's bytes: the state before the request.
    pub fn state(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], SlotMemory::bytes)
    }

    /// The slot's string states before the request.
    pub fn strings(&self) -> &[Strings] {
        self.memory.as_ref().map_or(&[], SlotMemory::strings)
    }

    /// Whether the sequence is over after this request, so that its state need not be kept.
    pub const fn ends(&self) -> bool {
        self.end
    }

    /// Writes the state after the request.
    pub fn advance(&mut self, write: impl FnOnce(&mut SlotMemory)) {
        let Some(memory) = &mut self.memory else { return };
        self.writing = true;
        write(memory);
        self.writing = false;
        self.advanced = true;
    }

    fn finish(mut self) -> Settlement {
        self.close()
    }

    fn close(&mut self) -> Settlement {
        self.settled = true;
        let end = self.end || self.writing;
        if let Some(mut memory) = self.memory.take().filter(|_| end) {
            // The bytes are the slab's, but strings have memory of their own.
            memory.strings_mut().iter_mut().for_each(|strings| *strings = Strings::new());
        }
        let outcome = if self.advanced { Outcome::Advanced } else { Outcome::Failed };
        Settlement { slot: self.slot, outcome, end }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let of = self.close();
        let mut released = Vec::new();
        self.sequences.table.lock().settle(of.slot, of.outcome, of.end, Instant::now(), &mut released);
        drop(released);
    }
}
