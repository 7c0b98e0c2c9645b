//! Saves after the answer (`durability: interval` and `drain`): the times when workers have to take snapshots, and the
//! thread that writes them to the store.
//!
//! Rules:
//! - A sequence has one entry: a newer state takes the place of an older one.
//! - The queue holds a bounded number of bytes. Who finds it full keeps the state where it is, and comes again.
//! - After an error of the store, the entries stay, and are written when it answers again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use hashlink::LinkedHashMap;
use parking_lot::{Condvar, Mutex};
use state_store::{Change, Hold, Keeper, Saved, StoreError, Token};

use crate::error::LoadError;
use crate::panic;
use crate::workers::clock::{Alarm, Thread};

/// Bytes of states that wait at most, and as many again of sequences that leave.
const MOST_BYTES: usize = 256 << 20;
/// Entries, and bytes of them, that are sent together.
const MOST_TOGETHER: usize = 64;
const MOST_BYTES_TOGETHER: usize = 1 << 20;
/// Pauses between attempts to write.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// What an entry takes besides its bytes.
const ENTRY_BYTES: usize = 256;

#[derive(Debug)]
pub enum What {
    /// It has this state; an empty one if it has begun while the store did not answer.
    State(Vec<u8>),
    /// It has left this server, with this state if the store doesn't have it.
    Release(Option<Vec<u8>>),
    End,
}

impl What {
    fn bytes(&self) -> usize {
        match self {
            Self::State(bytes) | Self::Release(Some(bytes)) => bytes.len(),
            Self::Release(None) | Self::End => 0,
        }
    }

    /// What is to be written if this comes after another.
    fn after(self, before: Self) -> Self {
        match (before, self) {
            (Self::State(bytes) | Self::Release(Some(bytes)), Self::Release(None)) => Self::Release(Some(bytes)),
            (_, newer) => newer,
        }
    }
}

#[derive(Debug)]
pub struct Entry {
    pub lane: u32,
    /// See [`super::key_of`].
    pub key: Vec<u8>,
    pub hold: Hold,
    pub what: What,
    /// The steps of the state, and those that were known to be saved.
    pub steps: u64,
    pub saved: u64,
    /// Since when it has steps that are not saved.
    pub since: Instant,
    /// Another server waits for it.
    pub is_wanted: bool,
}

impl Entry {
    fn size(&self) -> usize {
        ENTRY_BYTES + self.key.len() + self.what.bytes()
    }

    fn change(&self) -> Change<'_> {
        match &self.what {
            What::State(bytes) => Change::Step(&self.hold, bytes),
            What::Release(bytes) => Change::Release(&self.hold, bytes.as_deref()),
            What::End => Change::End(&self.hold, b""),
        }
    }
}

/// What the queue has of a sequence that is not here.
#[derive(Debug)]
pub enum Waiting {
    Nothing,
    /// It has this state, which was to be written.
    State(Box<Entry>),
    /// It is being written, or has to be written before the store is asked.
    InFlight,
}

#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Entries were written, so there may be room. The writer never waits for this, so [`Queue::put`] can't wake
    /// another thread in its place.
    has_room: Condvar,
}

#[derive(Default)]
struct State {
    /// Those to be written first are in front.
    entries: LinkedHashMap<Token, Entry>,
    /// The youngest sequence of a key that has an entry.
    by_key: HashMap<Vec<u8>, Token>,
    bytes: usize,
    /// What is being written: the keys, and the time of the oldest step.
    in_flight: Vec<Vec<u8>>,
    in_flight_since: Option<Instant>,
    is_down: bool,
    stop: bool,
}

impl State {
    fn insert(&mut self, entry: Entry, is_first: bool) {
        let token = entry.hold.token();
        self.bytes += entry.size();
        // The END of an older sequence must not hide the state of a younger one with its id.
        if !matches!(entry.what, What::End) || !self.by_key.contains_key(&entry.key) {
            self.by_key.insert(entry.key.clone(), token);
        }
        self.entries.insert(token, entry);
        if is_first {
            self.entries.to_front(&token);
        }
    }

    /// How many entries wait to be written or are being written.
    fn len(&self) -> usize {
        self.entries.len() + self.in_flight.len()
    }

    fn has_state(&self, token: Token) -> bool {
        let entry = self.entries.get(&token);
        entry.is_some_and(|entry| matches!(entry.what, What::State(_) | What::Release(Some(_))))
    }

    fn remove(&mut self, token: Token) -> Option<Entry> {
        let entry = self.entries.remove(&token)?;
        self.bytes -= entry.size();
        if self.by_key.get(&entry.key) == Some(&token) {
            self.by_key.remove(&entry.key);
        }
        Some(entry)
    }
}

impl Queue {
    /// Adds what a sequence has done, in place of what it had done before.
    pub fn put(&self, mut entry: Entry) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let token = entry.hold.token();
        // Another server or a client may wait for it.
        let is_first = !matches!(entry.what, What::State(_));
        if let Some(before) = state.entries.get_mut(&token) {
            // It keeps its place, so that it is written no later than the older one would have been.
            state.bytes -= before.size();
            entry.since = before.since.min(entry.since);
            entry.is_wanted |= before.is_wanted;
            entry.what = entry.what.after(std::mem::replace(&mut before.what, What::End));
            *before = entry;
            state.bytes += before.size();
            if is_first {
                state.entries.to_front(&token);
            }
        } else {
            state.insert(entry, is_first);
        }
        drop(guard);
        self.changed.notify_one();
    }

    /// Whether there is no room for another state of a sequence that stays.
    pub fn is_full(&self) -> bool {
        self.state.lock().bytes >= MOST_BYTES
    }

    /// Whether there is no room for a state of this size of a sequence that leaves.
    pub fn refuses(&self, bytes: usize) -> bool {
        self.state.lock().bytes.saturating_add(bytes) > 2 * MOST_BYTES
    }

    /// Waits until there is room for a state of this size of a sequence that leaves, or the store does not answer.
    /// Returns whether there is room.
    pub fn wait_for_room(&self, bytes: usize) -> bool {
        while self.refuses(bytes) {
            let mut state = self.state.lock();
            // If nothing waits, a state that finds no room is larger than the queue.
            if state.is_down || state.stop || state.entries.is_empty() && state.in_flight.is_empty() {
                return false;
            }
            // With a limit, because room may have come since `refuses` looked.
            self.has_room.wait_for(&mut state, FIRST_PAUSE);
        }
        true
    }

    /// What there is of a sequence that is not here any more. A state is taken out.
    pub fn take_back(&self, key: &[u8]) -> Waiting {
        let mut state = self.state.lock();
        if state.in_flight.iter().any(|of| of == key) {
            return Waiting::InFlight;
        }
        let Some(&token) = state.by_key.get(key) else { return Waiting::Nothing };
        match state.entries.get(&token) {
            None => Waiting::Nothing,
            // Nothing is lost if another server is told of it late. The store says whether there is a younger one.
            Some(_) if state.is_down && !state.has_state(token) => Waiting::Nothing,
            Some(entry) if entry.is_wanted || !state.has_state(token) => Waiting::InFlight,
            Some(_) => state.remove(token).map_or(Waiting::Nothing, |entry| Waiting::State(Box::new(entry))),
        }
    }

    /// Another server wants a sequence: what is to be written of it is not taken back.
    pub fn want(&self, key: &[u8]) {
        let mut state = self.state.lock();
        if let Some(&token) = state.by_key.get(key)
            && let Some(entry) = state.entries.get_mut(&token)
        {
            entry.is_wanted = true;
        }
    }

    /// Since when there are steps that are not saved.
    pub fn oldest(&self) -> Option<Instant> {
        let state = self.state.lock();
        let first = state.entries.values().take(MOST_TOGETHER).map(|entry| entry.since).min();
        [state.in_flight_since, first].into_iter().flatten().min()
    }

    /// Whether the store did not answer when it was asked last.
    pub fn is_down(&self) -> bool {
        self.state.lock().is_down
    }

    pub fn note(&self, answered: bool) {
        let was_down = std::mem::replace(&mut self.state.lock().is_down, !answered);
        if was_down == answered {
            // The thread asks until the store answers, or need not wait longer.
            self.changed.notify_one();
        }
    }

    /// The next entries to write; an empty list if the store is down and `pause` is over, `None` at the end.
    fn take(&self, pause: Duration) -> Option<Vec<Entry>> {
        let mut state = self.state.lock();
        while state.entries.is_empty() {
            // Looked at only when the queue is empty, so all entries are written before the thread stops.
            if state.stop {
                return None;
            }
            if !state.is_down {
                self.changed.wait(&mut state);
            } else if self.changed.wait_for(&mut state, pause).timed_out() {
                return Some(Vec::new());
            }
        }
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while taken.len() < MOST_TOGETHER
            && let Some((&token, entry)) = state.entries.front()
        {
            // A larger one goes alone.
            if bytes > 0 && bytes + entry.size() > MOST_BYTES_TOGETHER {
                break;
            }
            if let Some(entry) = state.remove(token) {
                bytes += entry.size();
                taken.push(entry);
            }
        }
        state.in_flight = taken.iter().map(|entry| entry.key.clone()).collect();
        state.in_flight_since = taken.iter().map(|entry| entry.since).min();
        Some(taken)
    }

    /// Takes back what could not be written, unless there is something newer.
    fn put_back(&self, entries: Vec<Entry>) {
        let mut state = self.state.lock();
        // Each goes to the front, so the first comes last.
        for mut entry in entries.into_iter().rev() {
            if let Some(newer) = state.remove(entry.hold.token()) {
                let since = entry.since.min(newer.since);
                entry = Entry { since, what: newer.what.after(entry.what), ..newer };
            }
            state.insert(entry, true);
        }
        (state.in_flight, state.in_flight_since) = Default::default();
    }

    fn have_been_written(&self) {
        let mut state = self.state.lock();
        (state.in_flight, state.in_flight_since) = Default::default();
        drop(state);
        self.has_room.notify_all();
    }

    pub fn len(&self) -> usize {
        self.state.lock().len()
    }
}

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
    /// Its snapshot is overdue: it became due while a request of several steps was under way, or the sequence was taken
    /// back from the writer.
    pub is_late: bool,
    pub is_under_way: bool,
    /// The store refuses it, because the store has another sequence of the id.
    pub is_refused: bool,
}

impl Unsaved {
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
        // If other entries come first, the alarm is already set.
        if due.len() == 1 || is_late {
            drop(due);
            self.alarm.by(at);
        }
    }
}

pub enum Told<'a> {
    /// The store has answered the write.
    Written(Vec<(Entry, Saved)>),
    /// The store has not answered.
    Failed(&'a StoreError),
    /// The state is too large for the store.
    TooLarge(&'a Entry, &'a StoreError),
}

/// Starts the thread. Dropping it writes what is left, if the store answers.
pub fn start_writer(
    queue: &Arc<Queue>,
    keeper: &Arc<Keeper>,
    tell: impl Fn(Told<'_>) + Send + 'static,
) -> Result<Thread, LoadError> {
    let (stops, writes, keeper) = (queue.clone(), queue.clone(), keeper.clone());
    let run = move || {
        let mut pause = FIRST_PAUSE;
        while let Some(entries) = writes.take(pause) {
            if panic::catch_and_log(|| write(&writes, &keeper, entries, &tell)) == Some(true) {
                pause = FIRST_PAUSE;
                continue;
            }
            pause = LONGEST_PAUSE.min(2 * pause);
            let mut state = writes.state.lock();
            if state.stop {
                let left = state.len();
                drop(state);
                log::warn!("the last steps of {left} sequences were not saved, because the store does not answer");
                return;
            }
            writes.changed.wait_for(&mut state, pause);
        }
    };
    let stop = move || {
        stops.state.lock().stop = true;
        stops.changed.notify_one();
    };
    Thread::start("stateful-writer", "the thread that writes to the store", stop, run).map_err(LoadError::Worker)
}

/// Writes entries, or asks whether the store answers again. Returns whether it does.
fn write(queue: &Queue, keeper: &Keeper, entries: Vec<Entry>, tell: &impl Fn(Told<'_>)) -> bool {
    let changes: Vec<_> = entries.iter().map(Entry::change).collect();
    let saved = if entries.is_empty() { keeper.probe().map(|()| Vec::new()) } else { keeper.save(&changes) };
    match saved {
        Ok(saved) => {
            queue.note(true);
            // While these count as in flight: a drain reads how many are left, and then how many were not saved.
            tell(Told::Written(entries.into_iter().zip(saved).collect()));
            queue.have_been_written();
            true
        }
        Err(error @ StoreError::TooLarge { bytes, .. }) => {
            // The error tells no more of the state than its size.
            let (too_large, others): (Vec<_>, Vec<_>) =
                entries.into_iter().partition(|entry| entry.what.bytes() == bytes);
            too_large.iter().for_each(|entry| tell(Told::TooLarge(entry, &error)));
            queue.put_back(others);
            // Without one to leave out, the next try would fail at once in the same way.
            !too_large.is_empty()
        }
        Err(error) => {
            // First: the warning is logged only if the store has not been noted as down.
            tell(Told::Failed(&error));
            queue.note(false);
            queue.put_back(entries);
            false
        }
    }
}

#[cfg(test)]
mod tests;
