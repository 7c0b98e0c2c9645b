//! The metrics of a model's sequences in Triton's Prometheus endpoint.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use sequences::{Counts, Life};

use crate::error::Reason;
use crate::triton::{Counter, Error, Family, Gauge, Histogram};

/// The values that the metrics show, at one moment.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Live sequences.
    pub live: usize,
    /// Most slots that may exist.
    pub capacity: usize,
    /// Slots that exist.
    pub slots: usize,
    /// Slabs that exist.
    pub slabs: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of growing states, states of strings and held inputs.
    pub varying_bytes: usize,
    /// Bytes of states that were copied between slots and batches so far.
    pub copied_bytes: u64,
    /// Bytes that were copied to a device so far.
    pub to_device_bytes: u64,
    /// Bytes that were copied from a device so far.
    pub to_host_bytes: u64,
    /// Sequences that started, ended, expired or were rejected so far.
    pub counts: Counts,
    pub queue: QueueNumbers,
    pub saves: Saves,
    /// Whether a call to the device has failed, so that requests get errors.
    pub device_failed: bool,
    /// Requests that failed so far, in the order of [`Reason::LABELS`].
    pub failed: [u64; Reason::LABELS.len()],
}

/// Sequences and requests in the queues of the backend's scheduler.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueNumbers {
    /// Sequences that are parked.
    pub parked: usize,
    /// STARTs that wait for a place.
    pub waiting: usize,
    /// Requests that wait, these STARTs among them.
    pub requests: usize,
    /// Sequences of the store that are this server's.
    pub owned: usize,
    /// The age of the oldest step that is not in the store; 0 if there is none.
    pub oldest_unsaved_ms: u64,
}

/// What a store has done so far.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Saves {
    /// States that were saved.
    pub states: u64,
    /// Calls of the store that failed.
    pub errors: u64,
    /// Sequences that this server has taken from the store.
    pub claimed: u64,
    /// Sequences that another server has taken from this one, or has asked it for.
    pub moved: u64,
    /// Sequences that are not saved: they began while the store did not answer, and it has another one of their id, or their
    /// states found no room.
    pub lost: u64,
}

/// Counts [`Saves`].
#[derive(Default)]
pub struct SaveMetrics(Mutex<Saves>);

impl SaveMetrics {
    pub fn count_saves(&self, states: u64) {
        self.0.lock().states += states;
    }

    pub fn count_store_error(&self) {
        self.0.lock().errors += 1;
    }

    pub fn count_claimed(&self, sequences: u64) {
        self.0.lock().claimed += sequences;
    }

    pub fn count_moved(&self, sequences: u64) {
        self.0.lock().moved += sequences;
    }

    pub fn count_not_saved(&self) {
        self.0.lock().lost += 1;
    }

    /// How many sequences could not be saved.
    pub fn lost(&self) -> u64 {
        self.0.lock().lost
    }

    pub(super) fn now(&self) -> Saves {
        *self.0.lock()
    }
}

/// Reads the value of one metric from a snapshot.
type Reading = fn(&Snapshot) -> f64;

const GAUGES: [(&str, &str, Reading); 13] = [
    ("stateful_live_sequences", "Sequences that hold a state slot", |now| now.live as f64),
    ("stateful_parked_sequences", "Live sequences that are parked", |now| now.queue.parked as f64),
    ("stateful_waiting_starts", "START requests that wait for a place", |now| now.queue.waiting as f64),
    ("stateful_queued_requests", "Requests that wait in the backend", |now| now.queue.requests as f64),
    ("stateful_slot_capacity", "Most state slots that may exist", |now| now.capacity as f64),
    ("stateful_slots_allocated", "State slots that exist, free ones included", |now| now.slots as f64),
    ("stateful_slabs", "Buffers that the state slots lie in", |now| now.slabs as f64),
    ("stateful_slot_pool_bytes", "Bytes of the state slots that exist", |now| (now.slots * now.slot_bytes) as f64),
    ("stateful_parked_slot_bytes", "Bytes of the state slots of parked sequences", |now| {
        (now.queue.parked * now.slot_bytes) as f64
    }),
    ("stateful_growing_state_bytes", "Bytes of growing states, states of strings and held inputs", |now| {
        now.varying_bytes as f64
    }),
    ("stateful_owned_sequences", "Sequences of the store that are this server's", |now| now.queue.owned as f64),
    ("stateful_oldest_unsaved_step_seconds", "Age of the oldest step that is not in the store", |now| {
        // In sixty-fourths of a second, which a gauge adds and takes away without rounding.
        (now.queue.oldest_unsaved_ms as f64 * 0.064).ceil() / 64.0
    }),
    (
        "stateful_gpu_failed",
        "1 if a call to the GPU failed, so that requests get errors until the model is loaded again or the server restarts",
        |now| f64::from(u8::from(now.device_failed)),
    ),
];

const COUNTERS: [(&str, &str, Reading); 12] = [
    ("stateful_sequences_started_total", "START requests that got a state slot", |now| now.counts.started as f64),
    ("stateful_sequences_ended_total", "Sequences over by END, failed START or restart", |now| now.counts.ended as f64),
    ("stateful_sequences_expired_total", "Sequences dropped because they lay idle", |now| now.counts.expired as f64),
    ("stateful_sequences_rejected_total", "START requests that found no state slot", |now| now.counts.rejected as f64),
    ("stateful_state_bytes_copied_total", "Bytes of states that were copied between slots and batches", |now| {
        now.copied_bytes as f64
    }),
    (
        "stateful_host_to_device_bytes_total",
        "Bytes that went to a GPU: inputs, initial states, lists of moves",
        |now| now.to_device_bytes as f64,
    ),
    ("stateful_states_saved_total", "States that were saved in the store", |now| now.saves.states as f64),
    ("stateful_store_errors_total", "Calls of the store that failed", |now| now.saves.errors as f64),
    ("stateful_sequences_claimed_total", "Sequences that were taken from the store", |now| now.saves.claimed as f64),
    ("stateful_sequences_moved_total", "Sequences that left for another server", |now| now.saves.moved as f64),
    ("stateful_sequences_not_saved_total", "Sequences that the store cannot take", |now| now.saves.lost as f64),
    ("stateful_device_to_host_bytes_total", "Bytes of outputs that came from a GPU", |now| now.to_host_bytes as f64),
];

const FAILED: (&str, &str) = ("stateful_requests_failed_total", "Requests that were answered with an error, by reason");

/// A histogram: its name, its description, and the upper bounds of its buckets.
type Distribution = (&'static str, &'static str, &'static [f64]);

/// Bounds in seconds, from 20 µs to 1 s.
const SHORT_TIMES: &[f64] = &[20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 1.0];

const RUN_ROWS: Distribution =
    ("stateful_run_rows", "Rows of a run", &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]);
const RUN_SECONDS: Distribution = (
    "stateful_run_duration_seconds",
    "Seconds from the beginning of a payload until the answers of a run are made",
    SHORT_TIMES,
);
const RUN_BYTES: Distribution = (
    "stateful_run_state_bytes_copied",
    "Bytes of states that were copied for a run",
    &[0.0, 1024.0, 16384.0, 262_144.0, 4_194_304.0, 67_108_864.0],
);
const QUEUE_SECONDS: Distribution =
    ("stateful_queue_duration_seconds", "Seconds that a request waited in the queue of the backend", SHORT_TIMES);
const SEQUENCE_SECONDS: Distribution = (
    "stateful_sequence_duration_seconds",
    "Seconds from the START of a sequence to its end",
    &[0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 86_400.0],
);
const SEQUENCE_REQUESTS: Distribution = (
    "stateful_sequence_requests",
    "Requests of a sequence, from its START to its end",
    &[1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6],
);

/// The metric families. The process makes them once, because Triton never frees their names.
struct Families {
    gauges: Vec<Arc<Family>>,
    counters: Vec<Arc<Family>>,
    failed: Arc<Family>,
    /// `None` if the server knows no histograms.
    histograms: Option<Histograms<(Arc<Family>, &'static [f64])>>,
}

/// One value for each histogram.
struct Histograms<T> {
    run_rows: T,
    run_seconds: T,
    run_bytes: T,
    queue_seconds: T,
    sequence_seconds: T,
    sequence_requests: T,
}

impl<T> Histograms<T> {
    fn try_map<U, E>(&self, mut make: impl FnMut(&T) -> Result<U, E>) -> Result<Histograms<U>, E> {
        Ok(Histograms {
            run_rows: make(&self.run_rows)?,
            run_seconds: make(&self.run_seconds)?,
            run_bytes: make(&self.run_bytes)?,
            queue_seconds: make(&self.queue_seconds)?,
            sequence_seconds: make(&self.sequence_seconds)?,
            sequence_requests: make(&self.sequence_requests)?,
        })
    }
}

const HISTOGRAMS: Histograms<Distribution> = Histograms {
    run_rows: RUN_ROWS,
    run_seconds: RUN_SECONDS,
    run_bytes: RUN_BYTES,
    queue_seconds: QUEUE_SECONDS,
    sequence_seconds: SEQUENCE_SECONDS,
    sequence_requests: SEQUENCE_REQUESTS,
};

impl Families {
    fn shared() -> Option<&'static Self> {
        static FAMILIES: OnceLock<Option<Families>> = OnceLock::new();
        let made =
            FAMILIES.get_or_init(|| Self::new().inspect_err(|error| log::info!("no sequence metrics: {error}")).ok());
        made.as_ref()
    }

    fn new() -> Result<Self, Error> {
        let gauges = GAUGES.iter().map(|(name, text, _)| Family::gauge(name, text).map(Arc::new));
        let counters = COUNTERS.iter().map(|(name, text, _)| Family::counter(name, text).map(Arc::new));
        let histogram =
            |&(name, text, bounds): &Distribution| Family::histogram(name, text).map(|made| (Arc::new(made), bounds));
        let histograms = HISTOGRAMS.try_map(histogram);
        Ok(Self {
            gauges: gauges.collect::<Result<_, _>>()?,
            counters: counters.collect::<Result<_, _>>()?,
            failed: Arc::new(Family::counter(FAILED.0, FAILED.1)?),
            histograms: histograms.inspect_err(|error: &Error| log::info!("no histograms: {error}")).ok(),
        })
    }
}

struct Metrics {
    gauges: Vec<Gauge>,
    counters: Vec<Counter>,
    /// In the order of [`Reason::LABELS`].
    failed: Vec<Counter>,
    histograms: Option<Histograms<Histogram>>,
}

impl Metrics {
    fn new(families: &Families, labels: &[(&str, &str)]) -> Result<Self, Error> {
        let failed = Reason::LABELS.map(|(_, reason)| {
            let labels: Vec<_> = labels.iter().copied().chain([("reason", reason)]).collect();
            Counter::new(&families.failed, &labels)
        });
        let histogram = |(family, bounds): &(_, &[f64])| Histogram::new(family, labels, bounds);
        Ok(Self {
            gauges: families.gauges.iter().map(|family| Gauge::new(family, labels)).collect::<Result<_, _>>()?,
            counters: families.counters.iter().map(|family| Counter::new(family, labels)).collect::<Result<_, _>>()?,
            failed: failed.into_iter().collect::<Result<_, _>>()?,
            histograms: families.histograms.as_ref().map(|of| of.try_map(histogram)).transpose()?,
        })
    }

    /// Adds the difference between two snapshots to the gauges. While a model version is reloaded, the old and the new
    /// [`SequenceMetrics`] share the gauges, which then show the sum.
    fn add_to_gauges(&self, before: &Snapshot, now: &Snapshot) {
        for (gauge, (_, _, reading)) in self.gauges.iter().zip(GAUGES) {
            let more = reading(now) - reading(before);
            if more != 0.0 {
                gauge.add(more);
            }
        }
    }

    fn add_to_counters(&self, before: &Snapshot, now: &Snapshot) {
        let counters = self.counters.iter().zip(COUNTERS);
        let counters = counters.map(|(counter, (_, _, reading))| (counter, reading(now) - reading(before)));
        let failed = self.failed.iter().zip(now.failed.iter().zip(before.failed));
        let failed = failed.map(|(counter, (now, before))| (counter, (now - before) as f64));
        counters.chain(failed).filter(|(_, more)| *more > 0.0).for_each(|(counter, more)| counter.add(more));
    }
}

/// The metrics of one model version. It writes only values that have changed, so most steps cost one comparison.
pub struct SequenceMetrics {
    metrics: Option<Metrics>,
    shown: Mutex<Snapshot>,
    /// Bytes of states that were copied so far.
    pub(super) copied_bytes: AtomicU64,
    /// Requests that failed so far, in the order of [`Reason::LABELS`].
    pub(super) failed: [AtomicU64; Reason::LABELS.len()],
    /// What the scheduler of the backend last said of its sequences.
    pub(super) queue: Mutex<QueueNumbers>,
    pub saves: SaveMetrics,
}

impl SequenceMetrics {
    /// Makes metrics with the labels `model` and `version`, and `gpu` for sequences on a GPU. A server that was built
    /// without metrics shows none.
    pub fn new(model: &str, version: u64, gpu: Option<i32>) -> Self {
        let (version, gpu) = (version.to_string(), gpu.map(|gpu| gpu.to_string()));
        let mut labels = vec![("model", model), ("version", version.as_str())];
        labels.extend(gpu.as_deref().map(|gpu| ("gpu", gpu)));
        let metrics = Families::shared().and_then(|families| {
            let made = Metrics::new(families, &labels);
            made.inspect_err(|error| log::warn!("no sequence metrics for {model}: {error}")).ok()
        });
        let (copied_bytes, failed, queue, saves) = Default::default();
        Self { metrics, shown: Mutex::default(), copied_bytes, failed, queue, saves }
    }

    /// Writes the snapshot that `read` returns, and the lives of the sequences that are over.
    pub fn publish(&self, read: impl FnOnce() -> (Snapshot, Vec<Life>)) {
        let Some(metrics) = &self.metrics else { return };
        // Lock before reading, so that an older snapshot never replaces a newer one.
        let mut shown = self.shown.lock();
        let (now, lives) = read();
        if *shown != now {
            metrics.add_to_gauges(&shown, &now);
            metrics.add_to_counters(&shown, &now);
            *shown = now;
        }
        // Histograms only add up, so their order does not matter.
        drop(shown);
        if let Some(histograms) = &metrics.histograms {
            for Life { since, requests } in lives {
                histograms.sequence_seconds.observe(since.elapsed().as_secs_f64());
                histograms.sequence_requests.observe(requests as f64);
            }
        }
    }

    /// Counts bytes of states that were copied.
    pub fn count_copied(&self, bytes: usize) {
        if bytes > 0 {
            self.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Counts a request that failed.
    pub fn count_failed(&self, reason: Reason) {
        self.failed[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes what is in the queues of the backend's scheduler. Returns whether it has changed, so that the metrics have to be
    /// published. `now` is called under a lock, so that [`SequenceMetrics::note_unsaved`] is not overlooked.
    pub fn note_queue(&self, now: impl FnOnce() -> QueueNumbers) -> bool {
        let mut queue = self.queue.lock();
        let now = now();
        std::mem::replace(&mut *queue, now) != now
    }

    /// Notes that there is a step which is not in the store.
    pub fn note_unsaved(&self) {
        let mut queue = self.queue.lock();
        queue.oldest_unsaved_ms = queue.oldest_unsaved_ms.max(1);
    }

    /// Observes a run.
    pub fn ran(&self, Ran { rows, nanoseconds, copied_bytes }: Ran) {
        let Some(histograms) = self.histograms() else { return };
        histograms.run_rows.observe(rows as f64);
        histograms.run_seconds.observe(nanoseconds as f64 / 1e9);
        histograms.run_bytes.observe(copied_bytes as f64);
    }

    /// Observes how long a request has waited in the backend's queue.
    pub fn waited(&self, wait: Duration) {
        if let Some(histograms) = self.histograms() {
            histograms.queue_seconds.observe(wait.as_secs_f64());
        }
    }

    fn histograms(&self) -> Option<&Histograms<Histogram>> {
        self.metrics.as_ref()?.histograms.as_ref()
    }
}

/// A run, as the histograms show it.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// Rows, without padding.
    pub rows: usize,
    /// From the beginning of the payload until the answers are made.
    pub nanoseconds: u64,
    /// Bytes of states that were copied.
    pub copied_bytes: usize,
}

impl Drop for SequenceMetrics {
    fn drop(&mut self) {
        if let Some(metrics) = &self.metrics {
            metrics.add_to_gauges(&self.shown.lock(), &Snapshot::default());
        }
    }
}
