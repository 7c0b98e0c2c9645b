//! The metrics of a model's sequences in Triton's Prometheus endpoint.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::sequence::Counts;
use crate::triton::{Counter, Error, Family, Gauge};

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
    /// Bytes of growing states and of states of strings.
    pub varying_bytes: usize,
    /// Bytes of states that were copied between slots and batches so far.
    pub copied_bytes: u64,
    /// Bytes that were copied to a device so far.
    pub to_device_bytes: u64,
    /// Bytes that were copied from a device so far.
    pub to_host_bytes: u64,
    /// Sequences that started, ended, expired or were rejected so far.
    pub counts: Counts,
}

/// Reads the value of one metric from a snapshot.
type Reading = fn(&Snapshot) -> f64;

const GAUGES: [(&str, &str, Reading); 5] = [
    ("stateful_live_sequences", "Sequences that hold a state slot", |now| now.live as f64),
    ("stateful_slot_capacity", "Most state slots that may exist", |now| now.capacity as f64),
    ("stateful_slots_allocated", "State slots that exist, free ones included", |now| now.slots as f64),
    ("stateful_slabs", "Buffers that the state slots lie in", |now| now.slabs as f64),
    ("stateful_growing_state_bytes", "Bytes of growing states and of states of strings", |now| {
        now.varying_bytes as f64
    }),
];

const COUNTERS: [(&str, &str, Reading); 7] = [
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
    ("stateful_device_to_host_bytes_total", "Bytes of outputs that came from a GPU", |now| now.to_host_bytes as f64),
];

/// The metric families. The process makes them once, because Triton never frees their names.
struct Families {
    gauges: Vec<Arc<Family>>,
    counters: Vec<Arc<Family>>,
}

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
        Ok(Self { gauges: gauges.collect::<Result<_, _>>()?, counters: counters.collect::<Result<_, _>>()? })
    }
}

struct Metrics {
    gauges: Vec<Gauge>,
    counters: Vec<Counter>,
}

impl Metrics {
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
}

/// The metrics of one model version. It writes only values that have changed, so most steps cost one comparison.
pub struct SequenceMetrics {
    metrics: Option<Metrics>,
    shown: Mutex<Snapshot>,
}

impl SequenceMetrics {
    /// Makes metrics with the labels `model` and `version`, and `gpu` for sequences on a GPU. A server that was built
    /// without metrics shows none.
    pub fn new(model: &str, version: u64, gpu: Option<i32>) -> Self {
        let (version, gpu) = (version.to_string(), gpu.map(|gpu| gpu.to_string()));
        let mut labels = vec![("model", model), ("version", version.as_str())];
        labels.extend(gpu.as_deref().map(|gpu| ("gpu", gpu)));
        let metrics = Families::shared().map(|families| {
            let gauges = families.gauges.iter().map(|family| Gauge::new(family, &labels));
            let counters = families.counters.iter().map(|family| Counter::new(family, &labels));
            Ok(Metrics { gauges: gauges.collect::<Result<_, _>>()?, counters: counters.collect::<Result<_, _>>()? })
        });
        let metrics = metrics.and_then(|made: Result<_, Error>| {
            made.inspect_err(|error| log::warn!("no sequence metrics for {model}: {error}")).ok()
        });
        Self { metrics, shown: Mutex::default() }
    }

    /// Writes the snapshot that `read` returns.
    pub fn publish(&self, read: impl FnOnce() -> Snapshot) {
        let Some(metrics) = &self.metrics else { return };
        // Lock before reading, so that an older snapshot never replaces a newer one.
        let mut shown = self.shown.lock();
        let now = read();
        if *shown == now {
            return;
        }
        metrics.add_to_gauges(&shown, &now);
        for (counter, (_, _, reading)) in metrics.counters.iter().zip(COUNTERS) {
            let more = reading(&now) - reading(&shown);
            if more > 0.0 {
                counter.add(more);
            }
        }
        *shown = now;
    }
}

impl Drop for SequenceMetrics {
    fn drop(&mut self) {
        if let Some(metrics) = &self.metrics {
            metrics.add_to_gauges(&self.shown.lock(), &Snapshot::default());
        }
    }
}
