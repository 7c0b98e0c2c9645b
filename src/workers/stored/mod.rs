//! Sequences that outlive their server.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | [`later`] | `durability: interval` and `drain`: what is saved after its answer | writer |
//! | [`writer`] | when steps have to be saved, and the thread that writes them | |
//! | [`step`] | `durability: step`: what is saved before its answer | |
//! | [`lookups`] | the thread that looks for sequences that are not here, and the one that hears other servers | |
//!
//! Here are the sequences that this server owns, and how it takes others from the store.
//!
//! Rules: the scheduler is not locked while the store is asked. Nothing here sends an answer.

mod later;
mod lookups;
mod step;
mod writer;

use std::sync::{Arc, OnceLock};

use foldhash::HashMap;
use parking_lot::{Mutex, MutexGuard};
use sequences::scheduler::{Lookup, OnDuplicateStart, Over, OverBy};
use sequences::{Outcome, SequenceId};
use smallvec::SmallVec;
use state_store::{Claimed, Hold, Keeper, Location, StoreError, Token};

use super::clock::Alarm;
use crate::batch::kept::{self, KeptAnswer};
use crate::batch::{Decoded, Row};
use crate::config::{Durability, OwnScheduling};
use crate::error::{LoadError, RequestError, StoredError};
use crate::instance::Instance;
use crate::model::{Answered, Lease, LiveSequences, Model, Saves};
use crate::panic::{self, Panic};
use lookups::{OLDER_PATIENCE, PATIENCE};
pub(super) use lookups::{Pending, Queue, hear_asks, start_lookups};
use writer::{Later, Unsaved, What};
pub(super) use writer::{Told, start_writer};

/// The sequences of a model that are this server's.
pub(super) struct Stored {
    pub keeper: Arc<Keeper>,
    sequences: Mutex<Owned>,
    /// What is saved later; `None` if each step is saved before its answer.
    pub later: Option<Later>,
    /// The most bytes of an answer that is kept.
    most_answer_bytes: usize,
    /// A START of an id that lives in the store is refused.
    rejects_duplicates: bool,
    /// Sequences that were over unsaved before the first drain.
    lost_before_drain: OnceLock<u64>,
    live: Arc<LiveSequences>,
}

/// Sequences by lane, and by id.
#[derive(Default)]
struct Owned {
    by_lane: HashMap<u32, Sequence>,
    /// The lanes of each [`key_of`], in order. They rise with the STARTs, so the youngest is last.
    by_key: HashMap<Vec<u8>, SmallVec<[u32; 2]>>,
}

struct Sequence {
    id: SequenceId,
    /// Its [`key_of`].
    key: Vec<u8>,
    hold: Hold,
    /// Its START is still at work.
    starts: bool,
    /// Another server has asked for it, or has taken it.
    moves: bool,
    /// The state that the store had, if the instance doesn't have it yet.
    state: Option<Vec<u8>>,
    /// Steps that it has made, and those that are known to be saved. Only what is saved later needs them.
    made: u64,
    saved: u64,
    unsaved: Unsaved,
}

impl Sequence {
    fn new(id: SequenceId, key: Vec<u8>, hold: Hold) -> Self {
        Self { id, key, hold, starts: false, moves: false, state: None, made: 0, saved: 0, unsaved: Unsaved::default() }
    }
}

impl Owned {
    fn get(&self, lane: u32) -> Option<&Sequence> {
        self.by_lane.get(&lane)
    }

    fn get_mut(&mut self, lane: u32) -> Option<&mut Sequence> {
        self.by_lane.get_mut(&lane)
    }

    fn insert(&mut self, lane: u32, sequence: Sequence) {
        self.remove(lane);
        let lanes = self.by_key.entry(sequence.key.clone()).or_default();
        lanes.insert(lanes.partition_point(|&of| of < lane), lane);
        self.by_lane.insert(lane, sequence);
    }

    fn remove(&mut self, lane: u32) -> Option<Sequence> {
        let sequence = self.by_lane.remove(&lane)?;
        if let Some(lanes) = self.by_key.get_mut(&sequence.key) {
            lanes.retain(|of| *of != lane);
            if lanes.is_empty() {
                self.by_key.remove(&sequence.key);
            }
        }
        Some(sequence)
    }

    /// The lanes of the sequences with an id, the youngest last.
    fn lanes_of(&self, key: &[u8]) -> &[u32] {
        self.by_key.get(key).map_or(&[], SmallVec::as_slice)
    }

    fn older(&self, key: &[u8], lane: u32) -> impl Iterator<Item = Token> {
        self.lanes_of(key).iter().filter(move |&&of| of < lane).filter_map(|&of| Some(self.get(of)?.hold.token()))
    }

    /// Whether a sequence with this id has a START that is still running.
    fn begins(&self, key: &[u8]) -> bool {
        self.lanes_of(key).iter().any(|&of| self.get(of).is_some_and(|of| of.starts))
    }

    /// Whether a younger sequence of this server has the id.
    fn is_replaced(&self, lane: u32) -> bool {
        self.get(lane).is_some_and(|of| self.lanes_of(&of.key).last() != Some(&lane))
    }
}

pub(super) enum Found {
    /// It is this server's now.
    Taken,
    /// The store doesn't have it. The answer to its END, if it has ended and the answer was kept.
    Missing(Option<Box<KeptAnswer>>),
    /// The store can't give it.
    No(RequestError),
    /// It leaves its server just now. To be looked for again.
    Later,
}

impl Found {
    pub fn failed() -> Self {
        Self::No(Panic("the search for a sequence failed".to_owned()).into())
    }
}

impl Stored {
    /// `None` if sequences end with their server. `alarm` wakes the thread that wakes workers.
    pub fn new(model: &Model, own: OwnScheduling, alarm: &Arc<Alarm>, live: &Arc<LiveSequences>) -> Option<Self> {
        let (keeper, of) = (model.keeper.clone()?, model.config.state_store.as_ref()?);
        let later = |interval| Some(Later::new(interval, own.workers, alarm.clone()));
        Some(Self {
            sequences: Mutex::default(),
            later: match of.durability {
                Durability::Step => None,
                Durability::Interval(interval) => later(Some(interval)),
                Durability::Drain => later(None),
            },
            most_answer_bytes: of.kept_answer_bytes,
            // No other server uses a folder, so no START comes late.
            rejects_duplicates: own.rules.on_duplicate_start == OnDuplicateStart::Reject && keeper.is_shared(),
            lost_before_drain: OnceLock::new(),
            live: live.clone(),
            keeper,
        })
    }

    fn saves(&self) -> MutexGuard<'_, Saves> {
        self.live.metrics.saves.lock()
    }

    /// This, and what is saved later; `None` if each step is saved before its answer.
    pub fn with_later(&self) -> Option<(&Self, &Later)> {
        Some((self, self.later.as_ref()?))
    }

    /// How many sequences are this server's, as far as it knows.
    pub fn owned(&self) -> usize {
        self.sequences.lock().by_lane.len()
    }

    /// How many sequences are here, or have left and are not saved yet. `live`: those that the scheduler has.
    pub fn left(&self, live: usize) -> usize {
        live.max(self.owned()) + self.later.as_ref().map_or(0, |later| later.queue.len())
    }

    /// [`Stored::not_saved_by_drain`] counts from the first call on.
    pub fn begin_drain(&self) {
        self.lost_before_drain.get_or_init(|| {
            let refused = self.sequences.lock().by_lane.values().filter(|of| of.unsaved.is_refused).count() as u64;
            self.saves().lost.saturating_sub(refused)
        });
    }

    /// How many sequences a drain has not saved, with those that the store had refused before.
    pub fn not_saved_by_drain(&self) -> usize {
        let before = self.lost_before_drain.get().copied().unwrap_or_default();
        usize::try_from(self.saves().lost.saturating_sub(before)).unwrap_or(usize::MAX)
    }

    /// Before a batch runs: makes sure that its sequences are this server's, and that the instance has their states.
    pub fn prepare(&self, worker: usize, instance: &mut Instance, rows: &mut [Decoded]) {
        match &self.later {
            None => {
                self.check_owned(instance, rows);
                self.reserve(rows);
            }
            Some(later) => self.prepare_later(later, worker, instance, rows),
        }
    }

    /// After a batch, before its answers are sent: saves what its requests have done, now or later. `left`: the rows
    /// that have steps left.
    pub fn save(&self, worker: usize, instance: &mut Instance, answered: &mut [Answered], left: &[Row]) {
        match &self.later {
            None => self.save_steps(instance, answered),
            Some(later) => {
                self.note(later, worker, answered, left);
                self.save_refused(later, instance, answered);
            }
        }
    }

    /// Between two batches: takes snapshots that are due.
    pub fn save_due(&self, worker: usize, instance: &mut Instance) {
        self.later.iter().for_each(|later| self.take_snapshots(later, worker, instance));
    }

    /// Before an instance drops the states of sequences that are over without a request.
    pub fn leave(&self, instance: &mut Instance, over: &[Over]) {
        match &self.later {
            None => self.end(over),
            Some(later) => self.save_leaving(later, instance, over),
        }
    }

    /// Sequences whose states are lost here. The store keeps what it has.
    pub fn lose(&self, lanes: impl IntoIterator<Item = u32>) {
        match &self.later {
            None => self.forget(lanes),
            Some(later) => lanes.into_iter().for_each(|lane| {
                self.put(later, lane, What::Release(None));
                self.sequences.lock().remove(lane);
            }),
        }
    }

    /// Takes sequences that are in the store, and enters those that begin.
    pub fn find(&self, lookups: &[&Pending]) -> Vec<Found> {
        let mut found: Vec<_> = lookups.iter().map(|_| None).collect();
        if let Some(later) = &self.later {
            let starts = lookups.iter().filter(|of| of.lookup.starts);
            let starts: Vec<_> = starts.map(|of| (&of.lookup, self.asks(of))).collect();
            let mut entered = self.enter(later, &starts).into_iter();
            for (found, of) in found.iter_mut().zip(lookups) {
                *found = if of.lookup.starts { entered.next() } else { self.find_here(later, of) };
            }
        } else {
            let is_leaving = |of: &&Pending| self.is_leaving(of).then_some(Found::Later);
            found = lookups.iter().map(is_leaving).collect();
        }
        let elsewhere: Vec<_> =
            lookups.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(of, _)| of).collect();
        let claimed = self.claim(elsewhere.iter().map(|of| (&of.lookup, self.asks(of))));
        self.saves().claimed += claimed.iter().filter(|found| matches!(found, Found::Taken)).count() as u64;
        let mut claimed = claimed.into_iter();
        found.into_iter().map(|found| found.or_else(|| claimed.next()).unwrap_or_else(Found::failed)).collect()
    }

    /// Whether the owner of a sequence is still asked to release it. An older instance of the model gets more time,
    /// because it may have much to save.
    fn asks(&self, of: &Pending) -> bool {
        of.is_within(PATIENCE) || self.may_follow(of)
    }

    /// Whether an older instance of the model may have the sequence.
    fn may_follow(&self, of: &Pending) -> bool {
        self.keeper.follows() && of.is_within(OLDER_PATIENCE)
    }

    /// Whether an older sequence of this server has the id: its END runs, or it leaves in the next turn of its worker.
    /// With a folder, an older instance of the model may also have it, and it can't be asked there.
    fn is_leaving(&self, of: &Pending) -> bool {
        let Lookup { id, lane, .. } = &of.lookup;
        let may_follow = !self.keeper.is_shared() && self.may_follow(of);
        may_follow || self.sequences.lock().lanes_of(&key_of(id)).iter().any(|other| other != lane)
    }

    /// Takes sequences from the store. Of those with `true`, an owner that lives is asked first.
    fn claim<'a>(&self, lookups: impl Iterator<Item = (&'a Lookup, bool)>) -> Vec<Found> {
        let (lookups, asks): (Vec<_>, Vec<_>) = lookups.unzip();
        if lookups.is_empty() {
            return Vec::new();
        }
        let keys: Vec<_> = lookups.iter().map(|of| key_of(&of.id)).collect();
        let claims: Vec<_> = keys.iter().map(Vec::as_slice).zip(asks).collect();
        match self.keeper.claim(&claims) {
            Ok(claimed) => {
                self.later.iter().for_each(|later| later.queue.note(true));
                let mut owned = self.sequences.lock();
                let found = |((of, key), claimed): ((&Lookup, Vec<u8>), Claimed)| match claimed {
                    Claimed::Taken(hold, state) => {
                        let sequence = Sequence::new(of.id.clone(), key, hold);
                        owned.insert(of.lane, Sequence { state: Some(state), ..sequence });
                        Found::Taken
                    }
                    Claimed::Asked => Found::Later,
                    Claimed::Unsaved => Found::No(StoredError::NotSaved(of.id.clone()).into()),
                    Claimed::Ended(answer) => Found::Missing(kept::split(&answer).0.map(Box::new)),
                    Claimed::Absent => Found::Missing(None),
                };
                lookups.into_iter().zip(keys).zip(claimed).map(found).collect()
            }
            Err(source) => {
                self.not_written(&source);
                lookups.iter().map(|of| Found::No(failed(&of.id, &source))).collect()
            }
        }
    }

    /// Gives a row's sequence the state that the store had.
    fn adopt(&self, instance: &mut Instance, row: &mut Decoded, state: &[u8]) {
        let Some(key) = &row.key else { return };
        let (answer, snapshot) = kept::split(state);
        match panic::catch_result(|| instance.adopt(key, snapshot)) {
            Ok(steps) => {
                // A request that comes at its step has not run yet, or has changed nothing.
                let has_run = |of: &KeptAnswer| key.lane.is_some_and(|lane| !instance.is_at(lane, of.of));
                row.again = answer.filter(|of| row.is_answered_by(of) && has_run(of)).map(Box::new);
                let mut owned = self.sequences.lock();
                if let Some(of) = key.lane.and_then(|lane| owned.get_mut(lane)) {
                    // One that was found here has steps that are not saved.
                    of.saved = if of.unsaved.is_some() { of.saved } else { steps };
                    of.made = steps;
                }
            }
            Err(error) => {
                match (&self.later, key.lane) {
                    (Some(later), Some(lane)) => self.give_back(later, lane, state),
                    // Another server may be able to read it, but its client doesn't want it any more.
                    (None, Some(lane)) if row.end => self.end(&[Over { lane, why: OverBy::Replaced }]),
                    _ => {}
                }
                self.forget(key.lane);
                refuse(row, |_| error);
            }
        }
    }

    /// The sequence of a request leaves this server. The next request finds it in the store.
    fn let_go(of: &mut Answered) {
        of.lease.iter_mut().for_each(Lease::spoil);
        of.finished.iter_mut().for_each(|finished| finished.outcome = Outcome::Lost);
    }

    pub fn forget(&self, lanes: impl IntoIterator<Item = impl Into<Option<u32>>>) {
        let mut owned = self.sequences.lock();
        lanes.into_iter().filter_map(Into::into).for_each(|lane| _ = owned.remove(lane));
    }
}

/// The first id for STARTs without one. It is random, because other servers also give ids, and so did this one before a
/// restart.
pub(super) fn first_id(location: &Location) -> Result<u64, LoadError> {
    let random = Token::random().map_err(|source| LoadError::StateStore { location: location.to_string(), source })?;
    let first = random.bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    // Clients read ids as numbers with a sign.
    Ok((first >> 2) | 1)
}

/// Tells a client how many steps its sequence has made, and how many of them are saved.
fn tell_steps(answered: &Answered, made: u64, saved: u64) {
    let Some(answer) = &answered.answer else { return };
    for (name, steps) in [(c"stateful_steps_made", made), (c"stateful_steps_saved", saved)] {
        if let Err(error) = answer.set_number(name, steps) {
            log::error!("cannot add the number of steps to a response: {error}");
        }
    }
}

fn refuse(row: &mut Decoded, error: impl FnOnce(&SequenceId) -> RequestError) {
    if let Some(key) = &row.key
        && row.problem.is_none()
    {
        row.problem = Some(Box::new(error(&key.id)));
    }
}

fn failed(id: &SequenceId, source: &StoreError) -> RequestError {
    StoredError::Failed { id: id.clone(), source: source.clone() }.into()
}

/// An id in the store. A number and its digits are two ids.
fn key_of(id: &SequenceId) -> Vec<u8> {
    let kind = if matches!(id, SequenceId::Number(_)) { b"n" } else { b"s" };
    [kind.as_slice(), &id.to_bytes()].concat()
}
