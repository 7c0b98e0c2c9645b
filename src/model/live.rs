//! The live sequences of a site (see [`super::site`]) behind their lock.
//!
//! Rules: the lock is held for table work only, never while tensors are copied, a model runs, or a request is released
//! (that calls into core, which takes locks of its own).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gpu_rows::{Device, DeviceError, QueueReport};
use parking_lot::Mutex;
use rows::tensor::Gap;
#[cfg(test)]
use sequences::IdleLimits;
use sequences::pool::{SlotId, SlotLimits};
use sequences::scheduler::{Over, OverBy};
use sequences::{Key, Policy, SequenceId, Sequences};

use super::metrics::{SequenceMetrics, Snapshot};
use crate::error::Reason;
use crate::memory::{Budget, Charge, MemoryError, NoRoom, Slab, SlotSpec};
use crate::panic;
use crate::session::MadeTensor;
use crate::triton::{HeldInput, Request};

/// The growing states of a batch, in the tensors that a run made. The sequences of the batch share them; they are freed
/// with the last of these.
pub struct Grown {
    pub tensors: Vec<MadeTensor>,
    pub rows: usize,
    /// The padding of each row; empty if no row has any.
    pub gaps: Vec<Gap>,
}

impl Grown {
    pub fn gap(&self, position: usize) -> Gap {
        self.gaps.get(position).copied().unwrap_or_default()
    }
}

/// What a sequence keeps besides its states.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// The inputs that its requests may leave out, by the position among the inputs of requests.
    pub held: Vec<Option<HeldInput>>,
    /// How many of its runs have changed the state. Counted for models with `state_api`, `held_inputs` or counters.
    pub steps: u64,
    /// What is counted for generated inputs, in the order of [`Binding::counters`](crate::binding::Binding::counters);
    /// empty for zeros. Unlike `steps`, it begins again when all states are reset.
    pub counts: Vec<u64>,
    /// What is left over of windows, by input that is cut, and less than a window; empty for nothing.
    pub left: Vec<Vec<u8>>,
}

#[derive(Default)]
pub struct Contents {
    pub varying: Vec<Varying>,
    pub extras: Extras,
}

/// A state that varies in size, which may be in the tensors that a run made.
pub type Varying = crate::memory::Varying<Grown>;

pub(super) type Table = Sequences<Arc<Slab>, Contents, Request>;

pub struct LiveSequences {
    pub(super) table: Mutex<Table>,
    slot: SlotSpec,
    /// Where the states are, if not on the host.
    pub(super) device: Option<Arc<Device>>,
    /// What the varying states and the held inputs of all sequences may have.
    pub(super) budget: Arc<Budget>,
    queues: Arc<QueueReport>,
    /// The last slab that was due could not be made.
    slab_is_missing: AtomicBool,
    pub metrics: SequenceMetrics,
}

/// Bytes that a state of varying size needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VaryingSize {
    Bytes(usize),
    /// Of strings, as they are written for Triton.
    Strings(usize),
}

impl VaryingSize {
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes(bytes) | Self::Strings(bytes) => bytes,
        }
    }
}

impl LiveSequences {
    /// No sequences yet; the first slab is allocated now.
    pub fn new(
        policy: Policy,
        limits: SlotLimits,
        slot: SlotSpec,
        budget: Arc<Budget>,
        queues: Arc<QueueReport>,
        metrics: SequenceMetrics,
    ) -> Result<Self, MemoryError> {
        let device = slot.device.as_ref().map(|(device, _)| device.clone());
        let table = Mutex::new(Sequences::new(policy, limits));
        let slab_is_missing = AtomicBool::new(false);
        let sequences = Self { table, slot, device, budget, queues, slab_is_missing, metrics };
        sequences.add_due_slabs()?;
        sequences.publish();
        Ok(sequences)
    }

    /// Sequences without a model, for the tests of what is below it.
    #[cfg(test)]
    pub fn for_tests(slot: SlotSpec, capacity: usize, bytes: usize) -> Arc<Self> {
        let forever = std::time::Duration::from_secs(3600);
        let policy = Policy {
            idle: Some(IdleLimits { limit: forever, dropped_after: forever }),
            quiet: forever,
            by_lane: false,
            queue_requests: capacity,
            has_place_for_all: true,
        };
        let metrics = SequenceMetrics::new("test", 1, None);
        let limits = SlotLimits::all_at_once(capacity);
        Arc::new(Self::new(policy, limits, slot, Budget::new(bytes), Arc::default(), metrics).unwrap())
    }

    /// Core has handed over a payload; see [`Sequences::begin_payload`].
    pub fn begin_payload(&self, instance: u32) {
        self.table.lock().begin_payload(instance, Instant::now());
    }

    /// Ends a payload of an instance, after the held requests of the sequences `releasing` have been released.
    pub fn finish_payload(&self, instance: u32, releasing: Vec<(Key, SlotId)>) {
        let now = Instant::now();
        let needs_slabs = self.work(|table| {
            table.have_been_released(releasing, now);
            table.finish_payload(instance, now);
            table.needs_adjustment()
        });
        if needs_slabs {
            self.adjust_slabs();
        }
        self.publish();
    }

    /// Ends sequences of an instance that have no request. `drop_state`: see [`LiveSequences::tick`].
    pub fn end_lanes(&self, instance: u32, over: &[Over], drop_state: impl FnMut(SlotId)) {
        let over = self.work(|table| {
            over.iter().for_each(|of| table.end_lane(instance, of.lane, of.why == OverBy::Idle));
            table.take_over(instance)
        });
        self.end(&over, drop_state);
        self.publish();
    }

    /// Ends sequences of an instance that are over since its last turn: those that have been idle for too long, and
    /// those that an idle instance proves to be over. `drop_state` drops what the instance has of the state of one;
    /// then its slot is free. Returns when there may be something to do again.
    pub fn tick(&self, instance: u32, drop_state: impl FnMut(SlotId)) -> Option<Instant> {
        let over = self.work(|table| {
            table.tick(instance, Instant::now());
            table.take_over(instance)
        });
        self.end(&over, drop_state);
        self.table.lock().next_tick(instance, Instant::now())
    }

    pub(super) fn end(&self, over: &[SlotId], mut drop_state: impl FnMut(SlotId)) {
        over.iter().for_each(|&slot| _ = panic::catch_and_log(|| drop_state(slot)));
        self.work(|table| over.iter().for_each(|&slot| table.free(slot)));
    }

    /// Works on the table under its lock. What that leaves, requests to be released and what ended sequences had, is
    /// dropped without it.
    pub(super) fn work<R>(&self, work: impl FnOnce(&mut Table) -> R) -> R {
        let mut table = self.table.lock();
        let done = work(&mut table);
        let (leavings, released) = (table.take_leavings(), table.take_released());
        drop(table);
        drop(leavings);
        let (requests, releasing): (Vec<_>, Vec<_>) = released.into_iter().unzip();
        drop(requests);
        // Noted after the release, because what core sends before it proves nothing.
        if !releasing.is_empty() {
            self.table.lock().have_been_released(releasing, Instant::now());
        }
        done
    }

    pub fn live(&self) -> usize {
        self.table.lock().live()
    }

    /// What a sequence keeps besides its states; `None` if it is over.
    pub fn extras(&self, slot: SlotId) -> Option<Extras> {
        self.table.lock().contents_mut(slot).map(|contents| contents.extras.clone())
    }

    /// Looks at what each of these sequences keeps besides its states. Gives the default for none, and for a sequence
    /// that is over.
    pub fn look_at_each<T: Default>(
        &self,
        slots: impl Iterator<Item = Option<SlotId>>,
        look: impl Fn(&Extras) -> T,
    ) -> Vec<T> {
        let mut table = self.table.lock();
        let mut look = |slot: SlotId| table.contents_mut(slot).map(|contents| look(&contents.extras));
        slots.map(|slot| slot.and_then(&mut look).unwrap_or_default()).collect()
    }

    /// Looks at what is left over of windows in the sequence in a lane of an instance; `None` if there is none.
    pub fn look_at_left<T>(&self, instance: u32, lane: u32, look: impl FnOnce(&[Vec<u8>]) -> T) -> Option<T> {
        let mut table = self.table.lock();
        let slot = table.slot_in_lane(instance, lane)?;
        table.contents_mut(slot).map(|contents| look(&contents.extras.left))
    }

    /// Changes what a sequence keeps besides its states, unless it is over. The lock is released before the caller
    /// drops what `change` returns.
    pub fn change_extras<T>(&self, slot: SlotId, change: impl FnOnce(&mut Extras) -> T) -> Option<T> {
        self.table.lock().contents_mut(slot).map(|contents| change(&mut contents.extras))
    }

    pub fn charge(&self, bytes: usize) -> Result<Charge, NoRoom> {
        Charge::new(&self.budget, bytes)
    }

    pub fn slot_in_lane(&self, instance: u32, lane: u32) -> Option<SlotId> {
        self.table.lock().slot_in_lane(instance, lane)
    }

    /// The slot of the live sequence with this id on an instance.
    pub fn slot_of(&self, instance: u32, id: &SequenceId) -> Option<SlotId> {
        self.table.lock().slot_of(instance, id)
    }

    /// Counts requests that were refused before they came to the table, `rejected` of them because every place is
    /// taken.
    pub fn count_refused(&self, reasons: impl Iterator<Item = Reason>, rejected: usize) {
        reasons.for_each(|reason| self.metrics.count_failed(reason));
        if rejected > 0 {
            self.table.lock().count_rejected(rejected);
        }
        self.publish();
    }

    pub fn retire_instance(&self, instance: u32) {
        self.work(|table| table.retire_instance(instance));
        self.publish();
    }

    /// Makes a slab of so many slots without holding the lock, and adds it.
    pub(super) fn add_slab(&self, slots: usize, wanted: usize) -> Result<(), MemoryError> {
        let slab = Arc::new(Slab::new(slots, &self.slot)?);
        // Another thread may have added it meanwhile. Then its memory is freed without the lock.
        let not_due = self.table.lock().add_slab(slab, slots, wanted);
        drop(not_due);
        Ok(())
    }

    /// Adds the slabs that are due, and gives back those that are spare. Logs once that a slab could not be made, until
    /// one can.
    pub fn adjust_slabs(&self) {
        let adjusted = self.add_due_slabs();
        loop {
            // Its memory is freed without the lock.
            let spare = self.table.lock().take_spare_slab();
            if spare.is_none() {
                break;
            }
        }
        // Relaxed: it only decides whether a line is logged.
        let was_missing = self.slab_is_missing.swap(adjusted.is_err(), Ordering::Relaxed);
        if let Err(error) = adjusted
            && !was_missing
        {
            log::warn!("another buffer of state slots was due, but {error}; sequences start as long as slots are free");
        }
    }

    fn add_due_slabs(&self) -> Result<(), MemoryError> {
        loop {
            let due = self.table.lock().slab_due();
            let Some(slots) = due else { return Ok(()) };
            self.add_slab(slots, 0)?;
        }
    }

    pub fn publish(&self) {
        self.metrics.publish(|| {
            let mut table = self.table.lock();
            let lives = table.take_lives();
            (self.snapshot_of(&table), lives)
        });
    }

    /// Why requests are answered with errors until the model is loaded again or the server restarts: a call to the
    /// device has failed.
    pub fn device_failure(&self) -> Option<&DeviceError> {
        self.queues.failure.get().or_else(|| self.lost_device())
    }

    /// Why this process can't use the device any more.
    pub fn lost_device(&self) -> Option<&DeviceError> {
        self.device.as_ref().and_then(|device| device.lost())
    }

    pub fn snapshot(&self) -> Snapshot {
        self.snapshot_of(&self.table.lock())
    }

    fn snapshot_of(&self, table: &Table) -> Snapshot {
        Snapshot {
            live: table.live(),
            capacity: table.capacity(),
            slots: table.slots(),
            slabs: table.slabs(),
            slot_bytes: self.slot.slot_bytes,
            varying_bytes: self.budget.used(),
            // Relaxed: these numbers are only shown.
            copied_bytes: self.metrics.copied_bytes.load(Ordering::Relaxed),
            to_device_bytes: self.queues.to_device.load(Ordering::Relaxed),
            to_host_bytes: self.queues.to_host.load(Ordering::Relaxed),
            counts: table.counts(),
            queue: *self.metrics.queue.lock(),
            saves: *self.metrics.saves.lock(),
            device_failed: self.device_failure().is_some(),
            failed: self.metrics.failed.each_ref().map(|count| count.load(Ordering::Relaxed)),
        }
    }
}
