//! Sequences that outlive their server (`durability: step`).
//!
//! Before a batch runs, [`Stored::prepare`] asks the store whether this server still owns the batch's sequences, and takes
//! back those that another server has taken. After the run and before any answer is sent, [`Stored::save`] saves the new
//! states. If a save fails, the request gets an error and this server forgets the sequence: the store has the state of the
//! last answer, and the next request takes it from there. So no state is lost after its answer, and no answer is sent before
//! its state is saved.
//!
//! A thread looks for sequences that are not here ([`Lookups`]), because a worker that did would make all others wait.
//!
//! Rules: the scheduler is not locked while the store is asked. Nothing here sends an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};

use foldhash::{HashMap, HashMapExt};
use parking_lot::{Condvar, Mutex};
use sequences::scheduler::{Over, Ready};
use sequences::{Outcome, SequenceId};
use state_store::{Change, Claimed, Hold, Keeper, Location, Saved, StoreError, Token};

use super::arrivals::Queued;
use crate::batch::Row;
use crate::error::{AdmissionError, LoadError, RequestError, StoredError};
use crate::instance::Instance;
use crate::model::{Answered, Lease};
use crate::panic::{self, Panic};

/// Bytes of states that are sent to the store together, unless one has more.
const MOST_BYTES_TOGETHER: usize = 8 << 20;
/// Sequences that are looked for together.
const MOST_LOOKUPS_TOGETHER: usize = 64;

/// The sequences of a model that are this server's.
pub(super) struct Stored {
    keeper: Arc<Keeper>,
    /// By lane.
    owned: Mutex<HashMap<u32, Owned>>,
    /// [`Owned::number`] of the next one.
    next: AtomicU64,
}

struct Owned {
    hold: Hold,
    /// Of two sequences with one id, the younger has the higher number.
    number: u64,
    /// Its START is still at work.
    starts: bool,
    /// The state that the store had, if the instance doesn't have it yet.
    state: Option<Vec<u8>>,
}

/// What was found of a sequence.
pub(super) enum Found {
    /// It is this server's now.
    Taken,
    /// The store doesn't have it.
    Missing,
    /// The store can't give it.
    No(RequestError),
}

impl Found {
    /// The search has panicked.
    pub fn failed() -> Self {
        Self::No(Panic("the sequence could not be looked for".to_owned()).into())
    }
}

/// A sequence that has a request in a batch.
pub(super) struct Member {
    lane: u32,
    id: SequenceId,
    /// The request is its START.
    starts: bool,
    /// The request has made steps.
    is_under_way: bool,
}

/// What a request leaves to be saved.
struct Unsaved {
    /// The position of its answer.
    at: usize,
    lane: u32,
    id: SequenceId,
    key: Vec<u8>,
    /// `None` for a START.
    hold: Option<Hold>,
    /// The new state; `None` if the sequence is over.
    state: Option<Vec<u8>>,
}

impl Unsaved {
    fn change(&self) -> Change<'_> {
        match (&self.hold, &self.state) {
            (Some(hold), Some(state)) => Change::Step(hold, state),
            (None, Some(state)) => Change::Start(&self.key, state),
            (Some(hold), None) => Change::End(hold),
            (None, None) => Change::Erase(&self.key),
        }
    }
}

impl Stored {
    pub fn new(keeper: Arc<Keeper>) -> Self {
        Self { keeper, owned: Mutex::new(HashMap::new()), next: AtomicU64::new(0) }
    }

    /// The sequences of a batch, before [`Stored::prepare`].
    pub fn members(&self, ready: &[Ready<Box<Queued>>]) -> Vec<Member> {
        let owned = self.owned.lock();
        let member = |Ready { lane, id, request, .. }: &Ready<Box<Queued>>| Member {
            lane: *lane,
            id: id.clone(),
            starts: owned.get(lane).is_none_or(|owned| owned.starts),
            is_under_way: request.row.is_under_way(),
        };
        ready.iter().map(member).collect()
    }

    /// Takes sequences that are in the store.
    pub fn find(&self, lookups: &[(u32, SequenceId)]) -> Vec<Found> {
        let keys: Vec<_> = lookups.iter().map(|(_, id)| key_of(id)).collect();
        let keys: Vec<_> = keys.iter().map(Vec::as_slice).collect();
        match self.keeper.claim(&keys) {
            Ok(claimed) => {
                let found = |((lane, id), claimed): (&(u32, SequenceId), Claimed)| match claimed {
                    Claimed::Taken(hold, state) => {
                        self.own(*lane, hold, false, Some(state));
                        Found::Taken
                    }
                    Claimed::Unsaved => Found::No(StoredError::NotSaved(id.clone()).into()),
                    Claimed::Ended | Claimed::Absent => Found::Missing,
                };
                lookups.iter().zip(claimed).map(found).collect()
            }
            Err(source) => lookups.iter().map(|(_, id)| Found::No(failed(id, &source))).collect(),
        }
    }

    fn own(&self, lane: u32, hold: Hold, starts: bool, state: Option<Vec<u8>>) {
        let mut owned = self.owned.lock();
        let number = owned.get(&lane).map(|before| before.number);
        let number = number.unwrap_or_else(|| self.next.fetch_add(1, Ordering::Relaxed));
        owned.insert(lane, Owned { hold, number, starts, state });
    }

    /// Makes sure that the sequences of a batch are this server's, and that their instance has their states.
    pub fn prepare(&self, instance: &mut Instance, rows: &mut [Row]) {
        let mut to_check = Vec::new();
        for (at, row) in rows.iter_mut().enumerate().filter(|(_, row)| !row.is_under_way()) {
            let Some(lane) = row.key.as_ref().and_then(|key| key.lane) else { continue };
            let owned = self.owned.lock().get_mut(&lane).map(|owned| (owned.hold.clone(), owned.state.take()));
            match owned {
                Some((_, Some(state))) => self.adopt(instance, row, &state),
                Some((hold, None)) => to_check.push((at, lane, hold)),
                // A START. It becomes this server's when it is saved.
                None => {}
            }
        }
        let holds: Vec<_> = to_check.iter().map(|(_, _, hold)| hold).collect();
        let are_ours = match self.keeper.check(&holds) {
            Ok(are_ours) => are_ours,
            Err(source) => {
                for (at, lane, _) in to_check {
                    refuse(&mut rows[at], |id| failed(id, &source));
                    // The END ends it here. In the store it goes on, so that the END can be sent again.
                    self.forget(Some(lane).filter(|_| rows[at].end));
                }
                return;
            }
        };
        // One that a START here has replaced has requests that came before the START, and its state is here.
        let is_moved =
            |((_, lane, hold), is_ours): &(&(usize, u32, Hold), bool)| !is_ours && !self.is_replaced(*lane, hold);
        let moved = to_check.iter().zip(are_ours).filter(is_moved);
        let moved: Vec<_> = moved.map(|(&(at, lane, _), _)| (at, lane)).collect();
        if moved.is_empty() {
            return;
        }
        let over: Vec<_> = moved.iter().map(|&(_, lane)| Over { lane, expired: false }).collect();
        self.forget(over.iter().map(|over| over.lane));
        instance.end(&over);
        let id = |at: usize| rows[at].key.as_ref().map(|key| key.id.clone());
        let lookups: Vec<_> = moved.iter().filter_map(|&(at, lane)| Some((lane, id(at)?))).collect();
        for ((at, lane), found) in moved.into_iter().zip(self.find(&lookups)) {
            match found {
                Found::Taken => {
                    let state = self.owned.lock().get_mut(&lane).and_then(|owned| owned.state.take());
                    self.adopt(instance, &mut rows[at], &state.unwrap_or_default());
                }
                Found::Missing => refuse(&mut rows[at], |id| AdmissionError::Missing(id.clone()).into()),
                Found::No(error) => refuse(&mut rows[at], |_| error),
            }
        }
    }

    /// Gives a row's sequence the state that the store had.
    fn adopt(&self, instance: &mut Instance, row: &mut Row, state: &[u8]) {
        let Some(key) = &row.key else { return };
        if let Err(error) = panic::catch_result(|| instance.adopt(key, state)) {
            self.forget(key.lane);
            refuse(row, |_| error);
        }
    }

    /// Saves what the requests of a batch have done, and makes those fail whose states cannot be saved. `left`: the rows that
    /// have steps left.
    pub fn save(&self, instance: &mut Instance, answered: &mut [Answered], left: &[Row], members: &[Member]) {
        let (mut unsaved, mut bytes) = (Vec::new(), 0);
        // A sequence that has ended before one with its id that has begun.
        let mut order: Vec<_> = (0..answered.len()).collect();
        order.sort_by_key(|&at| answered[at].finished.map(|finished| finished.lane));
        for at in order {
            match self.unsaved(instance, &mut answered[at], at, members) {
                None => {}
                Some(of) => {
                    bytes += of.state.as_ref().map_or(0, Vec::len);
                    unsaved.push(of);
                }
            }
            if bytes > MOST_BYTES_TOGETHER {
                self.send(instance, answered, std::mem::take(&mut unsaved));
                bytes = 0;
            }
        }
        self.send(instance, answered, unsaved);
        self.begin(left, members);
    }

    /// Takes the records of STARTs that have steps left. So what other servers do with their ids meanwhile is not overwritten
    /// when they have made their last step, or have failed.
    fn begin(&self, left: &[Row], members: &[Member]) {
        let lane = |row: &Row| row.key.as_ref().and_then(|key| key.lane);
        let is_left = |member: &&Member| left.iter().any(|row| lane(row) == Some(member.lane));
        let begins: Vec<_> = members.iter().filter(|of| of.starts && !of.is_under_way).filter(is_left).collect();
        let keys: Vec<_> = begins.iter().map(|member| key_of(&member.id)).collect();
        let changes: Vec<_> = keys.iter().map(|key| Change::Start(key, b"")).collect();
        match self.keeper.save(&changes) {
            Ok(saved) => {
                for (member, saved) in begins.into_iter().zip(saved) {
                    if let Saved::Done(hold) = saved {
                        self.own(member.lane, hold, true, None);
                    }
                }
            }
            // They are saved as a whole after their last step.
            Err(error) => log::warn!("{} sequences were not noted in the store at their START: {error}", begins.len()),
        }
    }

    /// What a request leaves to be saved.
    fn unsaved(&self, instance: &mut Instance, of: &mut Answered, at: usize, members: &[Member]) -> Option<Unsaved> {
        let finished = of.finished?;
        let lane = finished.lane;
        let Member { id, starts, is_under_way, .. } = members.iter().find(|member| member.lane == lane)?;
        let hold = self.owned.lock().get(&lane).map(|owned| owned.hold.clone());
        if hold.is_none() && !starts {
            // It was not found in the store, or could not be taken from there.
            return None;
        }
        if hold.is_none() && *is_under_way && finished.outcome != Outcome::Advanced {
            // Its START was not noted in the store, so what the record has may be another server's by now.
            return None;
        }
        let unsaved = |state| Unsaved { at, lane, id: id.clone(), key: key_of(id), hold: hold.clone(), state };
        match finished.outcome {
            _ if finished.ends => Some(unsaved(None)),
            Outcome::Advanced => {
                let lease = of.lease.as_ref()?;
                match panic::catch_result(|| instance.saveable(lease)) {
                    Ok(saved) => saved.map(|state| unsaved(Some(state))),
                    Err(error) => {
                        self.lose(instance, of, lane, error);
                        None
                    }
                }
            }
            // A START that has failed.
            Outcome::Failed | Outcome::RunFailed | Outcome::Lost if *starts => Some(unsaved(None)),
            // The state is as it was saved.
            Outcome::Failed | Outcome::RunFailed => None,
            // The store still has the state of the last answer.
            Outcome::Lost => {
                self.forget([lane]);
                None
            }
        }
    }

    fn send(&self, instance: &Instance, answered: &mut [Answered], unsaved: Vec<Unsaved>) {
        let changes: Vec<_> = unsaved.iter().map(Unsaved::change).collect();
        match self.keeper.save(&changes) {
            Ok(saved) => {
                for (of, saved) in unsaved.iter().zip(saved) {
                    let answered = &mut answered[of.at];
                    match (saved, &of.state) {
                        (Saved::Done(hold), Some(_)) => {
                            self.own(of.lane, hold, false, None);
                            tell_steps(answered);
                        }
                        (Saved::Done(_), None) => {
                            self.forget([of.lane]);
                            tell_steps(answered);
                        }
                        // Its client has already started the next sequence with its id, so no server goes on with it.
                        (Saved::Moved, _) if self.is_replaced_by_start(of) => {
                            self.forget(Some(of.lane).filter(|_| of.state.is_none()));
                        }
                        (Saved::Moved, _) => {
                            self.lose(instance, answered, of.lane, StoredError::Moved(of.id.clone()).into());
                        }
                        (Saved::Ended | Saved::Absent, _) => {
                            self.lose(instance, answered, of.lane, AdmissionError::Missing(of.id.clone()).into());
                        }
                    }
                }
            }
            Err(source) => {
                for of in &unsaved {
                    self.lose(instance, &mut answered[of.at], of.lane, failed(&of.id, &source));
                }
            }
        }
    }

    /// Whether a younger sequence of this server has the id.
    fn is_replaced(&self, lane: u32, hold: &Hold) -> bool {
        let owned = self.owned.lock();
        let Some(number) = owned.get(&lane).map(|owned| owned.number) else { return false };
        owned.values().any(|other| other.number > number && other.hold.is_of_same_id(hold))
    }

    fn is_replaced_by_start(&self, of: &Unsaved) -> bool {
        of.hold.as_ref().is_some_and(|hold| self.is_replaced(of.lane, hold))
    }

    /// A state could not be saved: its request fails, and the sequence is forgotten here.
    fn lose(&self, instance: &Instance, of: &mut Answered, lane: u32, error: RequestError) {
        self.forget([lane]);
        if of.answer.as_ref().is_some_and(|answer| !answer.is_error()) {
            instance.sequences().metrics.count_failed(error.reason());
            of.request.fail_instead(&mut of.answer, error.into());
        }
        of.lease.iter_mut().for_each(Lease::spoil);
        if let Some(finished) = &mut of.finished {
            finished.outcome = Outcome::Lost;
        }
    }

    /// Sequences of this server are over without a request. One that was idle for too long stays in the store.
    pub fn end(&self, over: &[Over]) {
        let owned: Vec<_> = {
            let mut owned = self.owned.lock();
            over.iter().filter_map(|of| Some((of.expired, owned.remove(&of.lane)?.hold))).collect()
        };
        let ends: Vec<_> = owned.iter().filter(|(expired, _)| !expired).map(|(_, hold)| Change::End(hold)).collect();
        if let Err(error) = self.keeper.save(&ends) {
            log::warn!("{} sequences that were replaced stay in the store until they expire: {error}", ends.len());
        }
    }

    /// Notes that this server no longer owns the sequences of these lanes.
    pub fn forget(&self, lanes: impl IntoIterator<Item = impl Into<Option<u32>>>) {
        let mut owned = self.owned.lock();
        lanes.into_iter().filter_map(Into::into).for_each(|lane| _ = owned.remove(&lane));
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
fn tell_steps(answered: &Answered) {
    let (Some(answer), Some(steps)) = (&answered.answer, answered.steps) else { return };
    for name in [c"stateful_steps_made", c"stateful_steps_saved"] {
        if let Err(error) = answer.set_number(name, steps) {
            log::error!("a response cannot tell the steps of its sequence: {error}");
        }
    }
}

fn refuse(row: &mut Row, error: impl FnOnce(&SequenceId) -> RequestError) {
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

/// The thread that looks for sequences. Dropping it stops it.
pub(super) struct Lookups {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

/// The sequences to look for. Each has a place, so there are never more than `max_sequence_number`.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Vec<(u32, SequenceId)>>,
    has_some: Condvar,
    stop: AtomicBool,
}

impl Queue {
    pub fn add(&self, lookups: Vec<(u32, SequenceId)>) {
        if !lookups.is_empty() {
            self.waiting.lock().extend(lookups);
            self.has_some.notify_one();
        }
    }

    /// Waits for something to look for; `None` at the end.
    fn take(&self) -> Option<Vec<(u32, SequenceId)>> {
        let mut waiting = self.waiting.lock();
        while waiting.is_empty() {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            self.has_some.wait(&mut waiting);
        }
        let most = waiting.len().min(MOST_LOOKUPS_TOGETHER);
        Some(waiting.drain(..most).collect())
    }
}

impl Lookups {
    /// Starts a thread that calls `find` for what is in the queue.
    pub fn start(
        queue: &Arc<Queue>,
        find: impl Fn(Vec<(u32, SequenceId)>) + Send + 'static,
    ) -> Result<Self, LoadError> {
        let (queue, taken) = (queue.clone(), queue.clone());
        let run = move || {
            while let Some(lookups) = taken.take() {
                panic::catch_and_log(|| find(lookups));
            }
        };
        let thread = Builder::new().name("stateful-lookups".to_owned()).spawn(run).map_err(LoadError::Worker)?;
        Ok(Self { queue, thread: Some(thread) })
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        self.queue.stop.store(true, Ordering::Release);
        drop(self.queue.waiting.lock());
        self.queue.has_some.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that looks for sequences has panicked");
        }
    }
}
