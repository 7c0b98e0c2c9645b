//! `durability: interval` and `drain`: steps are saved after their answers.
//!
//! - A START is entered in the store before it runs ([`Stored::enter`]), so a request that another server gets can't
//!   continue an older sequence of its id. While the store doesn't answer, STARTs run without that.
//! - A sequence that makes its first unsaved step becomes due one interval later. Its worker then takes a snapshot
//!   between two batches, and the [writer](super::writer) saves it. With `drain`, no sequence becomes due.
//! - A sequence that leaves this server is saved: one that was idle for too long, or that another server asks for.
//! - If the store says that another server has the sequence, it ends here.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::Mutex;
use sequences::Outcome;
use sequences::scheduler::{Lookup, Over, OverBy};
use smallvec::SmallVec;
use state_store::{Change, Hold, Saved, StoreError};

use super::writer::{Entry, Later, Unsaved, Waiting, What};
use super::{Found, Pending, Sequence, Stored, key_of, tell_steps};
use crate::batch::{Decoded, Row};
use crate::error::StoredError;
use crate::instance::Instance;
use crate::model::Answered;
use crate::panic;

/// Snapshots that a worker takes between two batches.
const MOST_SNAPSHOTS: usize = 64;

impl Sequence {
    fn entry(&self, lane: u32, what: What, now: Instant) -> Entry {
        Entry {
            lane,
            key: self.key.clone(),
            hold: self.hold.clone(),
            what,
            steps: self.made,
            saved: self.saved,
            since: self.unsaved.since.unwrap_or(now),
            is_wanted: false,
        }
    }
}

impl Stored {
    /// Enters new sequences in the store. If it doesn't answer, they begin all the same. Of those with `true`, an owner
    /// of an older sequence of the id that lives is asked to release it first; then they are to be entered again.
    pub(super) fn enter(&self, later: &Later, lookups: &[(&Lookup, bool)]) -> Vec<Found> {
        let holds: Vec<_> = lookups.iter().map(|(of, _)| self.begin(of)).collect();
        let begun =
            || holds.iter().zip(lookups).filter_map(|(hold, &(of, asks))| Some((hold.as_ref()?, of.lane, asks)));
        if !later.queue.is_down() {
            let changes: Vec<_> = begun().map(|(hold, _, asks)| Change::Begin(hold, asks)).collect();
            match self.keeper.save(&changes) {
                Ok(saved) => {
                    let mut owned = self.sequences.lock();
                    let mut saved = begun().zip(saved).map(|((begun, lane, _), saved)| match saved {
                        Saved::Asked => Found::Later,
                        Saved::Done(hold) => {
                            // The store was asked without the lock, so the lane may have another sequence by now.
                            let of = owned.get_mut(lane).filter(|of| of.hold.is_same(begun));
                            of.into_iter().for_each(|of| of.hold = hold.clone());
                            Found::Taken
                        }
                        Saved::Moved | Saved::Ended | Saved::Absent => Found::Taken,
                    });
                    let found = |hold: &Option<Hold>| hold.as_ref().and_then(|_| saved.next()).unwrap_or(Found::Taken);
                    return holds.iter().map(found).collect();
                }
                Err(error) => self.note_failure(later, &error),
            }
        }
        begun().for_each(|(_, lane, _)| self.put(later, lane, What::State(Vec::new())));
        lookups.iter().map(|_| Found::Taken).collect()
    }

    /// Notes new sequences while the store doesn't answer. They are entered when it does.
    pub fn begin_without_store(&self, later: &Later, lookup: &Lookup) {
        if self.begin(lookup).is_some() {
            self.put(later, lookup.lane, What::State(Vec::new()));
        }
    }

    fn begin(&self, of: &Lookup) -> Option<Hold> {
        let key = key_of(&of.id);
        // This START was begun before, and waited for the owner of an older sequence.
        if let Some(begun) = self.sequences.lock().get_mut(of.lane) {
            return Some(begun.hold.clone());
        }
        let hold = self.keeper.hold(&key);
        let hold = hold.inspect_err(|error| log::error!("sequence {} is not saved: {error}", of.id)).ok()?;
        self.sequences
            .lock()
            .insert(of.lane, Sequence { starts: true, ..Sequence::new(of.id.clone(), key, hold.clone()) });
        Some(hold)
    }

    fn note_failure(&self, later: &Later, error: &StoreError) {
        // Logged once, until the store answers again.
        if !later.queue.is_down() {
            log::warn!("steps are not saved, because {error}; sequences go on, and are saved when the store answers");
        }
        self.saves().errors += 1;
        later.queue.note(false);
    }

    /// Looks for a sequence here: its state may have to be saved yet. `None` if the store has to be asked.
    pub(super) fn find_here(&self, later: &Later, pending: &Pending) -> Option<Found> {
        if self.is_leaving(pending) {
            return Some(Found::Later);
        }
        let of = &pending.lookup;
        let key = key_of(&of.id);
        // Locked until the state is in its new place, so that `wanted` finds it in one of the two.
        let mut owned = self.sequences.lock();
        match later.queue.take_back(&key) {
            Waiting::Nothing => None,
            Waiting::InFlight => Some(Found::Later),
            Waiting::State(entry) => {
                let Entry { hold, what, steps, saved, since, .. } = *entry;
                let (What::State(state) | What::Release(Some(state))) = what else { return None };
                if state.is_empty() {
                    return Some(Found::No(StoredError::NotSaved(of.id.clone()).into()));
                }
                let unsaved = Unsaved::since(since);
                let sequence = Sequence::new(of.id.clone(), key, hold);
                owned.insert(of.lane, Sequence { state: Some(state), made: steps, saved, unsaved, ..sequence });
                Some(Found::Taken)
            }
        }
    }

    /// Makes sure that the instance has the states of a batch's sequences.
    pub(super) fn prepare_later(&self, later: &Later, worker: usize, instance: &mut Instance, rows: &mut [Decoded]) {
        for row in rows {
            let Some(key) = &row.key else { continue };
            let Some(lane) = key.lane else { continue };
            let state = self.sequences.lock().get_mut(lane).map(|of| (of.state.take(), of.unsaved));
            match state {
                Some((Some(state), unsaved)) => {
                    self.adopt(instance, row, &state);
                    if let (Some(since), Some(interval)) = (unsaved.since, later.interval) {
                        later.becomes_due(worker, lane, since + interval, true);
                    }
                }
                // A clone. Its client must not find an older sequence of its id after a restart.
                None if row.start => {
                    let lookup = Lookup { lane, id: key.id.clone(), starts: true };
                    self.enter(later, &[(&lookup, false)]);
                }
                Some((None, _)) | None => {}
            }
        }
    }

    /// Notes what the requests of a batch have done. `left`: the rows that have steps left.
    pub(super) fn note(&self, later: &Later, worker: usize, answered: &[Answered], left: &[Row]) {
        let now = Instant::now();
        let mut has_unsaved = false;
        let mut owned = self.sequences.lock();
        for lane in left.iter().filter_map(|row| row.key.as_ref()?.lane) {
            owned.get_mut(lane).into_iter().for_each(|of| of.unsaved.is_under_way = true);
        }
        for of in answered {
            let Some(finished) = of.finished else { continue };
            let lane = finished.lane;
            let Some(sequence) = owned.get_mut(lane) else { continue };
            sequence.unsaved.is_under_way = false;
            let has_failed = finished.outcome != Outcome::Advanced;
            sequence.made = of.steps.unwrap_or(sequence.made);
            tell_steps(of, sequence.made, sequence.saved);
            // A START that fails leaves no sequence, so its record is ended.
            if finished.ends || (sequence.starts && has_failed) {
                later.queue.put(sequence.entry(lane, What::End, now));
                owned.remove(lane);
            } else if finished.outcome == Outcome::Lost {
                later.queue.put(sequence.entry(lane, What::Release(None), now));
                owned.remove(lane);
            } else if !has_failed {
                sequence.starts = false;
                let unsaved = &mut sequence.unsaved;
                let is_late = std::mem::take(&mut unsaved.is_late);
                if !unsaved.is_refused && (unsaved.since.is_none() || is_late) {
                    let since = *unsaved.since.get_or_insert(now);
                    if let Some(interval) = later.interval {
                        has_unsaved = true;
                        later.becomes_due(worker, lane, since + interval, is_late);
                    }
                }
            }
        }
        // Unlocked before `note_unsaved`: `note_queue` takes these two locks in the other order.
        drop(owned);
        // The metric shows it before the answers are sent.
        if has_unsaved {
            self.live.metrics.note_unsaved();
        }
    }

    /// Saves the sequences whose END was refused for its step, unless a younger one has their id.
    pub(super) fn save_refused(&self, later: &Later, instance: &mut Instance, answered: &mut [Answered]) {
        for of in answered.iter_mut().filter(|of| of.leaves) {
            let Some(lane) = of.finished.map(|finished| finished.lane) else { continue };
            let why = if self.is_replaced(lane) { OverBy::Replaced } else { OverBy::Released };
            self.save_leaving(later, instance, &[Over { lane, why }]);
            Self::let_go(of);
        }
    }

    /// Since when there are steps that are not saved.
    pub fn oldest_unsaved(&self, later: &Later) -> Option<Instant> {
        let owned = self.sequences.lock();
        let is_unsaved = |lane: u32| owned.get(lane).is_some_and(|of| of.unsaved.is_some());
        let first_due = |due: &Mutex<VecDeque<(Instant, u32)>>| {
            let mut due = due.lock();
            // Sequences that have ended meanwhile.
            while due.front().is_some_and(|(_, lane)| !is_unsaved(*lane)) {
                due.pop_front();
            }
            due.front()?.0.checked_sub(later.interval?)
        };
        later.due.iter().filter_map(first_due).chain(later.queue.oldest()).min()
    }

    pub(super) fn take_snapshots(&self, later: &Later, worker: usize, instance: &mut Instance) {
        let now = Instant::now();
        for _ in 0..MOST_SNAPSHOTS {
            if later.queue.is_full() {
                break;
            }
            let mut due = later.due[worker].lock();
            let Some(&(_, lane)) = due.front().filter(|(at, _)| *at <= now) else { break };
            due.pop_front();
            drop(due);
            self.save_lane(later, worker, instance, lane);
        }
        // More may be due than are taken at once.
        later.next_due(worker).into_iter().for_each(|at| later.alarm.by(at));
    }

    fn save_lane(&self, later: &Later, worker: usize, instance: &mut Instance, lane: u32) {
        {
            let mut owned = self.sequences.lock();
            let Some(of) = owned.get_mut(lane) else { return };
            // It becomes due again when that request is over (`note`).
            of.unsaved.is_late = of.unsaved.is_under_way;
            if of.unsaved.is_under_way || of.unsaved.is_refused || of.unsaved.since.is_none() || of.state.is_some() {
                return;
            }
        }
        // Without the lock, because the state may have to be copied from a device.
        match panic::catch_result(|| instance.saveable_in(lane)) {
            Ok(Some(state)) => self.put(later, lane, What::State(state)),
            Ok(None) => {}
            Err(error) => {
                log::warn!("the state of a sequence could not be read to save it: {error}");
                let again = Instant::now() + later.interval.unwrap_or_default();
                later.becomes_due(worker, lane, again, false);
            }
        }
    }

    pub(super) fn put(&self, later: &Later, lane: u32, what: What) {
        let mut owned = self.sequences.lock();
        if let Some(sequence) = owned.get_mut(lane) {
            let entry = sequence.entry(lane, what, Instant::now());
            sequence.unsaved.since = None;
            later.queue.put(entry);
        }
        // Unlocked before `note_unsaved`: `note_queue` takes these two locks in the other order.
        drop(owned);
        self.live.metrics.note_unsaved();
    }

    /// Sequences are about to leave an instance, which still has their states.
    pub(super) fn save_leaving(&self, later: &Later, instance: &mut Instance, over: &[Over]) {
        for &Over { lane, why } in over {
            let what = match why {
                OverBy::Replaced => What::End,
                OverBy::Idle | OverBy::Released => What::Release(self.last_state(later, instance, lane, why)),
            };
            self.put(later, lane, what);
            let left = self.sequences.lock().remove(lane);
            let moves = left.is_some_and(|of| of.moves) && why != OverBy::Replaced;
            self.saves().moved += u64::from(moves);
        }
    }

    /// The instance could not take a sequence in.
    pub(super) fn give_back(&self, later: &Later, lane: u32, state: &[u8]) {
        let is_unsaved = self.sequences.lock().get_mut(lane).is_some_and(|of| of.unsaved.is_some());
        // Without unsaved steps, the store has this state already.
        self.put(later, lane, What::Release(is_unsaved.then(|| state.to_vec())));
        self.sequences.lock().remove(lane);
    }

    /// The state of a sequence that leaves, if the writer and the store don't have it.
    fn last_state(&self, later: &Later, instance: &mut Instance, lane: u32, why: OverBy) -> Option<Vec<u8>> {
        let state = {
            let mut owned = self.sequences.lock();
            let of = owned.get_mut(lane)?;
            if of.unsaved.is_refused || of.unsaved.since.is_none() {
                return None;
            }
            // It was found, and no request has run since.
            of.state.take()
        };
        let state = match state {
            Some(state) => Ok(Some(state)),
            None => panic::catch_result(|| instance.saveable_in(lane)),
        };
        let state = state.inspect_err(|error| log::warn!("the state of a sequence that leaves is lost: {error}"));
        let state = state.ok().flatten()?;
        // Many leave together when a server is drained or a model unloaded, so the worker waits for room. For those
        // that were idle for too long, no run waits.
        let has_room = match why {
            OverBy::Released => later.queue.wait_for_room(state.len()),
            OverBy::Idle | OverBy::Replaced => !later.queue.refuses(state.len()),
        };
        if !has_room {
            log::warn!("the last steps of a sequence that leaves are lost: the store has not answered for too long");
            self.saves().lost += 1;
            return None;
        }
        Some(state)
    }

    /// The instance goes away: its sequences are saved.
    pub fn leave_all(&self, later: &Later, instance: &mut Instance) {
        let lanes: Vec<_> = self.sequences.lock().by_lane.keys().copied().collect();
        let over = lanes.into_iter().filter(|&lane| instance.has(lane));
        let over: Vec<_> = over.map(|lane| Over { lane, why: OverBy::Released }).collect();
        self.save_leaving(later, instance, &over);
    }

    /// Notes what the writer has written. Returns the lanes whose sequences other servers have.
    pub fn written(&self, later: &Later, results: Vec<(Entry, Saved)>) -> SmallVec<[u32; 4]> {
        let mut moved = SmallVec::new();
        let mut owned = self.sequences.lock();
        let mut states = 0;
        for (Entry { lane, hold, what, steps, .. }, saved) in results {
            let has_state = matches!(&what, What::State(state) | What::Release(Some(state)) if !state.is_empty());
            let is_done = matches!(saved, Saved::Done(_));
            states += u64::from(is_done && has_state);
            let is_older = owned.is_replaced(lane);
            let Some(sequence) = owned.get_mut(lane).filter(|of| of.hold.is_same(&hold)) else {
                // It began while the store did not answer, and the store has another sequence of its id.
                if hold.is_new() && has_state && !is_done {
                    self.saves().lost += 1;
                }
                continue;
            };
            match saved {
                Saved::Done(hold) => {
                    sequence.hold = hold;
                    if has_state {
                        sequence.saved = sequence.saved.max(steps);
                    }
                }
                // The record may be of a sequence that began later, so it stays.
                _ if hold.is_new() || is_older => {
                    if !is_older {
                        self.saves().lost += 1;
                    }
                    sequence.unsaved.is_refused = true;
                }
                // It stays until its worker drops it, because a request that is running now is still answered, and its
                // answer has to tell how many steps are saved.
                Saved::Moved | Saved::Ended | Saved::Absent | Saved::Asked => {
                    sequence.unsaved.is_refused = true;
                    // The record of one that is absent has expired.
                    sequence.moves |= !matches!(saved, Saved::Absent);
                    moved.push(lane);
                }
            }
        }
        self.saves().states += states;
        drop(owned);
        // Workers may have waited for room.
        later.alarm.by(Instant::now());
        moved
    }

    pub fn not_written(&self, error: &StoreError) {
        match &self.later {
            Some(later) => self.note_failure(later, error),
            None => self.saves().errors += 1,
        }
    }

    /// The store never takes a state.
    pub fn cannot_save(&self, entry: &Entry, error: &StoreError) {
        log::warn!("a sequence is not saved: {error}");
        self.saves().lost += 1;
        let mut owned = self.sequences.lock();
        if let Some(of) = owned.get_mut(entry.lane).filter(|of| of.hold.is_same(&entry.hold)) {
            of.unsaved.is_refused = true;
        }
    }

    /// Another server wants a sequence. Returns its lane, if it is here.
    pub fn wanted(&self, key: &[u8]) -> Option<u32> {
        let mut owned = self.sequences.lock();
        self.later.iter().for_each(|later| later.queue.want(key));
        let lane = owned.lanes_of(key).last().copied()?;
        owned.get_mut(lane).into_iter().for_each(|of| of.moves = true);
        Some(lane)
    }
}
