//! The metrics of a model's sequences in Triton's Prometheus endpoint.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use sequences::{Counts, Life};

use crate::error::Reason;
use crate::triton::{Error, Family, Kind, Metric};

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub live: usize,
    pub capacity: usize,
    pub slots: usize,
    pub slabs: usize,
    pub slot_bytes: usize,
    pub varying_bytes: usize,
    pub copied_bytes: u64,
    pub to_device_bytes: u64,
    pub to_host_bytes: u64,
    pub counts: Counts,
    pub queue: QueueNumbers,
    pub saves: Saves,
    pub device_failed: bool,
    /// Requests that failed so far, in the order of [`Reason::LABELS`].
    pub failed: [u64; Reason::LABELS.len()],
}

/// Sequences and requests in the queues of the backend's scheduler.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueNumbers {
    pub parked: usize,
    pub waiting: usize,
    /// Requests that wait, these STARTs among them.
    pub requests: usize,
    pub owned: usize,
    /// The age of the oldest step that is not in the store; 0 if there is none.
    pub oldest_unsaved_ms: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Saves {
    pub states: u64,
    pub errors: u64,
    pub claimed: u64,
    /// Sequences that another server has taken from this one, or has asked it for.
    pub moved: u64,
    /// Sequences that are not saved: they began while the store did not answer, and it has another one of their id, or
    /// their states found no room.
    pub lost: u64,
}

/// A metric's name, its description, and how its value is read from a snapshot.
type Reading = (&'static str, &'static str, fn(&Snapshot) -> f64);

const GAUGES: [Reading; 13] = [
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

const COUNTERS: [Reading; 12] = [
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

/// Bounds in seconds, from 20 µs to 1 s.
const SHORT_TIMES: &[f64] = &[20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 1.0];

/// A histogram, as its position in [`HISTOGRAMS`].
#[derive(Clone, Copy)]
enum Histogram {
    RunRows,
    RunSeconds,
    RunBytes,
    QueueSeconds,
    SequenceSeconds,
    SequenceRequests,
}

const HISTOGRAMS: [(&str, &str, &[f64]); 6] = [
    ("stateful_run_rows", "Rows of a run", &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]),
    (
        "stateful_run_duration_seconds",
        "Seconds from the beginning of a payload until the answers of a run are made",
        SHORT_TIMES,
    ),
    (
        "stateful_run_state_bytes_copied",
        "Bytes of states that were copied for a run",
        &[0.0, 1024.0, 16384.0, 262_144.0, 4_194_304.0, 67_108_864.0],
    ),
    ("stateful_queue_duration_seconds", "Seconds that a request waited in the queue of the backend", SHORT_TIMES),
    (
        "stateful_sequence_duration_seconds",
        "Seconds from the START of a sequence to its end",
        &[0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 86_400.0],
    ),
    (
        "stateful_sequence_requests",
        "Requests of a sequence, from its START to its end",
        &[1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6],
    ),
];

/// The metric families. The process makes them once, because Triton never frees their names.
struct Families {
    gauges: Vec<Arc<Family>>,
    counters: Vec<Arc<Family>>,
    failed: Arc<Family>,
    /// Empty if the server has no histograms.
    histograms: Vec<Arc<Family>>,
}

impl Families {
    fn shared() -> Option<&'static Self> {
        static FAMILIES: OnceLock<Option<Families>> = OnceLock::new();
        let made =
            FAMILIES.get_or_init(|| Self::new().inspect_err(|error| log::info!("no sequence metrics: {error}")).ok());
        made.as_ref()
    }

    fn new() -> Result<Self, Error> {
        let each = |kind, readings: &[Reading]| -> Result<Vec<_>, Error> {
            readings.iter().map(|(name, text, _)| Family::new(kind, name, text)).collect()
        };
        let histogram = |&(name, text, bounds): &(&str, &str, _)| Family::new(Kind::Histogram(bounds), name, text);
        let histograms: Result<Vec<_>, Error> = HISTOGRAMS.iter().map(histogram).collect();
        Ok(Self {
            gauges: each(Kind::Gauge, &GAUGES)?,
            counters: each(Kind::Counter, &COUNTERS)?,
            failed: Family::new(Kind::Counter, FAILED.0, FAILED.1)?,
            histograms: histograms.inspect_err(|error| log::info!("no histograms: {error}")).unwrap_or_default(),
        })
    }
}

struct Metrics {
    gauges: Vec<Metric>,
    counters: Vec<Metric>,
    /// In the order of [`Reason::LABELS`].
    failed: Vec<Metric>,
    /// In the order of [`HISTOGRAMS`]; empty if the server has no histograms.
    histograms: Vec<Metric>,
}

impl Metrics {
    fn new(families: &Families, labels: &[(&str, &str)]) -> Result<Self, Error> {
        let failed = |(_, reason)| {
            let labels: Vec<_> = labels.iter().copied().chain([("reason", reason)]).collect();
            Metric::new(&families.failed, &labels)
        };
        let each = |families: &[Arc<Family>]| -> Result<Vec<_>, Error> {
            families.iter().map(|family| Metric::new(family, labels)).collect()
        };
        Ok(Self {
            gauges: each(&families.gauges)?,
            counters: each(&families.counters)?,
            failed: Reason::LABELS.into_iter().map(failed).collect::<Result<_, _>>()?,
            histograms: each(&families.histograms)?,
        })
    }

    fn observe(&self, histogram: Histogram, value: f64) {
        self.histograms.get(histogram as usize).into_iter().for_each(|of| of.add(value));
    }
}

/// Adds the differences between two snapshots. While a model version is reloaded, the old and the new
/// [`SequenceMetrics`] share the gauges, which then show the sum.
fn add(metrics: &[Metric], readings: &[Reading], before: &Snapshot, now: &Snapshot) {
    for (metric, (_, _, reading)) in metrics.iter().zip(readings) {
        let more = reading(now) - reading(before);
        // Each addition is a call into core, and most numbers have not changed.
        if more != 0.0 {
            metric.add(more);
        }
    }
}

/// The metrics of one model version. It writes only values that have changed, so most steps cost one comparison.
pub struct SequenceMetrics {
    metrics: Option<Metrics>,
    shown: Mutex<Snapshot>,
    pub(super) copied_bytes: AtomicU64,
    /// Requests that failed so far, in the order of [`Reason::LABELS`].
    pub(super) failed: [AtomicU64; Reason::LABELS.len()],
    /// What the scheduler of the backend last said of its sequences.
    pub(super) queue: Mutex<QueueNumbers>,
    pub saves: Mutex<Saves>,
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
            add(&metrics.gauges, &GAUGES, &shown, &now);
            add(&metrics.counters, &COUNTERS, &shown, &now);
            for (metric, (now, before)) in metrics.failed.iter().zip(now.failed.iter().zip(shown.failed)) {
                if *now != before {
                    metric.add((now - before) as f64);
                }
            }
            *shown = now;
        }
        // Histograms only add up, so their order does not matter.
        drop(shown);
        for Life { since, requests } in lives {
            metrics.observe(Histogram::SequenceSeconds, since.elapsed().as_secs_f64());
            metrics.observe(Histogram::SequenceRequests, requests as f64);
        }
    }

    pub fn count_copied(&self, bytes: usize) {
        if bytes > 0 {
            self.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    pub fn count_failed(&self, reason: Reason) {
        self.failed[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes what is in the queues of the backend's scheduler. Returns whether it has changed, so that the metrics have
    /// to be published. `now` is called under a lock, so that [`SequenceMetrics::note_unsaved`] is not overlooked.
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

    pub fn ran(&self, Ran { rows, nanoseconds, copied_bytes }: Ran) {
        let Some(metrics) = &self.metrics else { return };
        metrics.observe(Histogram::RunRows, rows as f64);
        metrics.observe(Histogram::RunSeconds, nanoseconds as f64 / 1e9);
        metrics.observe(Histogram::RunBytes, copied_bytes as f64);
    }

    pub fn waited(&self, wait: Duration) {
        self.metrics.iter().for_each(|metrics| metrics.observe(Histogram::QueueSeconds, wait.as_secs_f64()));
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// Rows, without padding.
    pub rows: usize,
    /// From the beginning of the payload until the answers are made.
    pub nanoseconds: u64,
    pub copied_bytes: usize,
}

impl Drop for SequenceMetrics {
    fn drop(&mut self) {
        if let Some(metrics) = &self.metrics {
            // A reloaded model shares the gauges, so they must not keep what this load has added.
            add(&metrics.gauges, &GAUGES, &self.shown.lock(), &Snapshot::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_histogram_is_at_its_place() {
        for (histogram, name) in [
            (Histogram::RunRows, "stateful_run_rows"),
            (Histogram::RunSeconds, "stateful_run_duration_seconds"),
            (Histogram::RunBytes, "stateful_run_state_bytes_copied"),
            (Histogram::QueueSeconds, "stateful_queue_duration_seconds"),
            (Histogram::SequenceSeconds, "stateful_sequence_duration_seconds"),
            (Histogram::SequenceRequests, "stateful_sequence_requests"),
        ] {
            assert_eq!(HISTOGRAMS[histogram as usize].0, name);
        }
    }
}
