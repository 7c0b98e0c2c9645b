//! Which sequences have steps that are not saved, and when their workers have to take snapshots.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::writer::Queue;
use crate::workers::clock::Alarm;

/// What is saved later.
pub struct Later {
    /// `None` if sequences are saved only when they leave.
    pub interval: Option<Duration>,
    /// By worker, the sequences with unsaved steps, each with the time when it has to be saved; the first is first.
    pub due: Vec<Mutex<VecDeque<(Instant, u32)>>>,
    pub queue: Arc<Queue>,
    /// Wakes the thread that wakes workers.
    pub alarm: Arc<Alarm>,
}

/// What a sequence has that is not in the store.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unsaved {
    /// When it made the first step after its last snapshot.
    pub since: Option<Instant>,
    /// Its snapshot is overdue: it became due while a request of several steps was under way, or the sequence was taken back
    /// from the writer.
    pub is_late: bool,
    /// A request of several steps is under way.
    pub is_under_way: bool,
    /// The store refuses it, because it has another sequence of the id.
    pub is_refused: bool,
}

impl Unsaved {
    /// Whether there is something.
    pub const fn is_some(&self) -> bool {
        self.since.is_some()
    }

    pub const fn since(since: Instant) -> Self {
        Self { since: Some(since), is_late: true, is_under_way: false, is_refused: false }
    }
}

impl Later {
    pub fn new(interval: Option<Duration>, workers: usize, alarm: Arc<Alarm>) -> Self {
        let due = (0..workers).map(|_| Mutex::default()).collect();
        Self { interval, due, queue: Arc::default(), alarm }
    }

    /// Whether a worker has snapshots to take.
    pub fn is_due(&self, worker: usize, now: Instant) -> bool {
        self.next_due(worker).is_some_and(|at| at <= now) && !self.queue.is_full()
    }

    /// When a worker next has a snapshot to take.
    pub fn next_due(&self, worker: usize) -> Option<Instant> {
        self.due[worker].lock().front().map(|(at, _)| *at)
    }

    pub fn becomes_due(&self, worker: usize, lane: u32, at: Instant, is_late: bool) {
        let mut due = self.due[worker].lock();
        if is_late {
            // It is overdue, so it comes before those that become due later.
            due.push_front((at.min(Instant::now()), lane));
        } else {
            // All wait for the same interval, so the queue stays in order.
            due.push_back((at, lane));
        }
        // Behind another one, the alarm is already set.
        if due.len() == 1 || is_late {
            drop(due);
            self.alarm.by(at);
        }
    }
}
