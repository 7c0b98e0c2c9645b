//! `durability: step`: each step is saved before its answer.
//!
//! Before a batch runs, [`Stored::check_owned`] asks the store whether this server still owns the batch's sequences,
//! and takes back those that another server has taken. [`Stored::reserve`] makes the records of STARTs. After the run
//! and before any answer is sent, [`Stored::save_steps`] saves the new states. If a save fails, the request gets an
//! error and this server forgets the sequence: the store has the state of the last answer, and the next request takes
//! it from there. So no state is lost after its answer, and no answer is sent before its state is saved.
//!
//! A START is refused if the store has a state of a sequence with its id, except an older one of this server, which
//! leaves. So a START that was sent again, and arrives late, replaces no sequence that its client has begun elsewhere.
//! With `on_duplicate_start: restart`, it replaces the sequence that the store had before it ran, or an older one of
//! this server, and no other. That stays in the store until then, because the START may be cancelled.

use sequences::scheduler::{Lookup, Over, OverBy, Refused};
use sequences::{Key, Outcome, SequenceId};
use state_store::{Change, Hold, Saved};

use super::{Found, Sequence, Stored, failed, key_of, refuse, tell_steps};
use crate::batch::Decoded;
use crate::batch::kept;
use crate::error::{RequestError, StoredError};
use crate::instance::Instance;
use crate::model::Answered;
use crate::panic;

/// Bytes of states that are sent to the store together, unless one has more.
const MOST_BYTES_TOGETHER: usize = 8 << 20;

struct Unsaved {
    /// The position of its answer.
    at: usize,
    lane: u32,
    id: SequenceId,
    hold: Hold,
    /// The new state, behind the answer if that is kept; `None` if the sequence is over.
    state: Option<Vec<u8>>,
    /// The answer, if that is kept and the sequence is over.
    answer: Vec<u8>,
}

/// A START whose sequence has been entered.
struct Starting<'r> {
    lane: u32,
    key: Vec<u8>,
    row: &'r mut Decoded,
    /// `None` if it takes over the record of an older START, and needs none of its own.
    hold: Option<Hold>,
}

impl Stored {
    /// Makes sure that the sequences of a batch are this server's, and that their instance has their states.
    pub(super) fn check_owned(&self, instance: &mut Instance, rows: &mut [Decoded]) {
        let mut to_check = Vec::new();
        for (at, row) in rows.iter_mut().enumerate() {
            let Some(lane) = row.key.as_ref().and_then(|key| key.lane) else { continue };
            if self.most_answer_bytes > 0 {
                row.keeps = row.repeat_key();
            }
            let owned = self.sequences.lock().get_mut(lane).map(|of| (of.hold.clone(), of.state.take()));
            match owned {
                Some((_, Some(state))) => self.adopt(instance, row, &state),
                Some((hold, None)) => to_check.push((at, lane, hold)),
                None => {}
            }
        }
        let holds: Vec<_> = to_check.iter().map(|(_, _, hold)| hold).collect();
        let are_ours = match self.keeper.check(&holds) {
            Ok(are_ours) => are_ours,
            Err(source) => {
                self.not_written(&source);
                for (at, lane, _) in to_check {
                    refuse(&mut rows[at], |id| failed(id, &source));
                    // The END ends it here. In the store it goes on, so that the END can be sent again.
                    self.forget(Some(lane).filter(|_| rows[at].end));
                }
                return;
            }
        };
        // A request that does not come at the step that it says may have run before. The store has the answer, with the
        // state.
        let may_repeat = |at: usize, lane| rows[at].keeps.is_some_and(|key| !instance.is_at(lane, key));
        let to_claim = to_check.iter().zip(are_ours).map(|(&(at, lane, _), is_ours)| (at, lane, is_ours));
        // One that a START here has replaced has requests that came before the START, and its state is here.
        let to_claim = to_claim.filter(|&(_, lane, _)| !self.is_replaced(lane));
        let to_claim: Vec<_> = to_claim.filter(|&(at, lane, is_ours)| !is_ours || may_repeat(at, lane)).collect();
        if to_claim.is_empty() {
            return;
        }
        let id = |at: usize| rows[at].key.as_ref().map(|key| key.id.clone());
        let lookup = |&(at, lane, _): &(usize, u32, bool)| Some(Lookup { lane, id: id(at)?, starts: false });
        let lookups: Vec<_> = to_claim.iter().filter_map(lookup).collect();
        // A worker doesn't wait until another server has answered.
        let claimed = self.claim(lookups.iter().map(|of| (of, false)));
        for ((at, lane, is_ours), found) in to_claim.into_iter().zip(claimed) {
            let is_taken = matches!(found, Found::Taken);
            if !is_ours {
                self.saves().moved += 1;
                self.saves().claimed += u64::from(is_taken);
            }
            if !is_ours || is_taken {
                // What the instance has is not the newest state, and `adopt` needs a lane without one.
                instance.end(&[Over { lane, why: OverBy::Replaced }]);
            }
            match found {
                Found::Taken => {
                    let state = self.sequences.lock().get_mut(lane).and_then(|of| of.state.take());
                    self.adopt(instance, &mut rows[at], &state.unwrap_or_default());
                    continue;
                }
                Found::No(error) => refuse(&mut rows[at], |_| error),
                // It is refused for its step.
                Found::Missing(_) | Found::Later if is_ours => {}
                Found::Missing(Some(answer)) if rows[at].is_answered_by(&answer) => rows[at].again = Some(answer),
                Found::Missing(_) => refuse(&mut rows[at], |id| Refused::Missing(id.clone()).into()),
                Found::Later => refuse(&mut rows[at], |id| Refused::Moved(id.clone()).into()),
            }
            self.forget(Some(lane).filter(|_| !is_ours));
        }
    }

    /// Saves what the requests of a batch have done, and makes those fail whose states cannot be saved.
    pub(super) fn save_steps(&self, instance: &mut Instance, answered: &mut [Answered]) {
        let (mut unsaved, mut bytes) = (Vec::new(), 0);
        // A sequence that has ended before one with its id that has begun.
        let mut order: Vec<_> = (0..answered.len()).collect();
        order.sort_by_key(|&at| answered[at].finished.map(|finished| finished.lane));
        for at in order {
            if let Some(of) = self.unsaved(instance, &mut answered[at], at) {
                bytes += of.state.as_ref().map_or(0, Vec::len);
                unsaved.push(of);
            }
            if bytes > MOST_BYTES_TOGETHER {
                self.send(instance, answered, std::mem::take(&mut unsaved));
                bytes = 0;
            }
        }
        self.send(instance, answered, unsaved);
    }

    /// Makes the records of STARTs, notes which sequences they are going to replace, or refuses them. Leaves out STARTs
    /// that their clients may have sent to another server, and those of sequences that a younger one has replaced here.
    pub(super) fn reserve(&self, rows: &mut [Decoded]) {
        let starting = self.enter_starts(rows);
        let holds: Vec<_> = starting.iter().filter_map(|of| of.hold.clone()).collect();
        if holds.is_empty() {
            return;
        }
        let reserved = self.keeper.reserve(holds).inspect_err(|source| self.not_written(source));
        let refusal = |id: &SequenceId| match &reserved {
            Ok(_) => StoredError::Exists(id.clone()).into(),
            Err(source) => failed(id, source),
        };
        let mut holds = reserved.iter().flatten();
        let (mut owned, mut refused) = (self.sequences.lock(), Vec::new());
        for Starting { lane, key, row, hold } in starting {
            let is_refused = if hold.is_none() {
                refused.contains(&key)
            } else if let Some(hold) = holds.next() {
                owned.get_mut(lane).into_iter().for_each(|of| of.hold = hold.clone());
                self.rejects_duplicates && hold.replaces_another(owned.older(&key, lane))
            } else {
                true
            };
            if is_refused {
                refuse(row, refusal);
                owned.remove(lane);
                refused.push(key);
            }
        }
    }

    /// Enters the sequences of STARTs, the older ones first.
    fn enter_starts<'r>(&self, rows: &'r mut [Decoded]) -> Vec<Starting<'r>> {
        let is_late = |row: &Decoded| row.problem.as_ref().is_some_and(|problem| problem.is_sent_again());
        let starts = |row: &&mut Decoded| row.start && !is_late(row);
        let mut starts: Vec<_> = rows.iter_mut().filter(starts).filter(|row| !row.request.is_cancelled()).collect();
        starts.sort_by_key(|row| row.key.as_ref().and_then(|key| key.lane));
        let mut starting = Vec::with_capacity(starts.len());
        for row in starts {
            let Some(Key { lane: Some(lane), id, .. }) = row.key.clone() else { continue };
            let key = key_of(&id);
            // Without the lock, because the system draws the token.
            let hold = match self.keeper.hold(&key).inspect_err(|source| self.not_written(source)) {
                Ok(hold) => hold,
                Err(source) => {
                    refuse(row, |id| failed(id, &source));
                    continue;
                }
            };
            // Locked until the sequence is entered, so that of two STARTs on two workers one finds the other.
            let mut owned = self.sequences.lock();
            if owned.lanes_of(&key).last().is_some_and(|&of| of >= lane) {
                continue;
            }
            // The store would replace the record of an older START, which has no state. If this START then failed, the
            // older sequence would have no record.
            let is_behind = owned.begins(&key);
            let entered = if is_behind { hold.clone().behind(owned.older(&key, lane)) } else { hold.clone() };
            owned.insert(lane, Sequence { starts: true, ..Sequence::new(id, key.clone(), entered) });
            starting.push(Starting { lane, key, row, hold: Some(hold).filter(|_| !is_behind) });
        }
        starting
    }

    fn unsaved(&self, instance: &mut Instance, of: &mut Answered, at: usize) -> Option<Unsaved> {
        let finished = of.finished?;
        let lane = finished.lane;
        let owned = self.sequences.lock();
        // `None`: it could not be taken from the store, or it is a START that left no record.
        let Sequence { id, key, hold, starts, .. } = owned.get(lane)?;
        let (id, mut hold, starts) = (id.clone(), hold.clone(), *starts);
        // An older sequence that is here ends after the requests that were sent before the START. If the client has
        // gone, one that is elsewhere may be the one that it has begun with the same START.
        let leaves_older = hold.replaces()
            && (owned.older(key, lane).next().is_some()
                || (finished.outcome == Outcome::Failed && of.request.is_cancelled()));
        hold.also_replaces(owned.older(key, lane));
        drop(owned);
        let unsaved = |answer, state| Unsaved { at, lane, id, hold, answer, state };
        match finished.outcome {
            _ if finished.ends => Some(unsaved(self.kept_answer(of), None)),
            Outcome::Advanced => {
                let answer = self.kept_answer(of);
                let lease = of.lease.as_ref()?;
                match panic::catch_result(|| instance.saveable(lease.slot(), &answer)) {
                    Ok(saved) => saved.map(|state| unsaved(Vec::new(), Some(state))),
                    Err(error) => {
                        self.fail_unsaved(instance, of, lane, error);
                        None
                    }
                }
            }
            // A START that has failed.
            Outcome::Failed | Outcome::RunFailed | Outcome::Lost if starts && leaves_older => {
                self.forget([lane]);
                None
            }
            Outcome::Failed | Outcome::RunFailed | Outcome::Lost if starts => Some(unsaved(Vec::new(), None)),
            // The store has the state, which another request can continue.
            Outcome::Failed | Outcome::RunFailed if of.leaves => {
                self.forget([lane]);
                Self::let_go(of);
                None
            }
            // The state is as it was saved.
            Outcome::Failed | Outcome::RunFailed => None,
            // The store still has the state of the last answer.
            Outcome::Lost => {
                self.forget([lane]);
                None
            }
        }
    }

    /// The bytes of an answer for a client that sends its request again; none if that can't be known, or if it is too
    /// large.
    fn kept_answer(&self, of: &Answered) -> Vec<u8> {
        let Some((key, made)) = of.keeps.zip(of.steps) else { return Vec::new() };
        let most = self.most_answer_bytes;
        let copy = of.answer.as_ref().and_then(|answer| answer.copy(most));
        copy.map_or_else(Vec::new, |copy| kept::encode(key, made, &copy, most))
    }

    fn send(&self, instance: &Instance, answered: &mut [Answered], unsaved: Vec<Unsaved>) {
        let changes: Vec<_> = unsaved
            .iter()
            .map(|Unsaved { hold, state, answer, .. }| match state {
                Some(state) => Change::Step(hold, state),
                None => Change::End(hold, answer),
            })
            .collect();
        match self.keeper.save(&changes) {
            Ok(saved) => {
                for (of, saved) in unsaved.iter().zip(saved) {
                    let answered = &mut answered[of.at];
                    match (saved, &of.state) {
                        (Saved::Done(hold), Some(_)) => {
                            self.saves().states += 1;
                            if let Some(sequence) = self.sequences.lock().get_mut(of.lane) {
                                (sequence.hold, sequence.starts) = (hold, false);
                            }
                            tell_saved(answered);
                        }
                        (Saved::Done(_), None) => {
                            self.forget([of.lane]);
                            tell_saved(answered);
                        }
                        // Its client has already started the next sequence with its id, so no server goes on with it.
                        (Saved::Moved, _) if self.is_replaced(of.lane) => {
                            self.forget(Some(of.lane).filter(|_| of.state.is_none()));
                        }
                        (Saved::Moved | Saved::Asked, _) => {
                            self.saves().moved += u64::from(!of.hold.replaces());
                            self.fail_unsaved(instance, answered, of.lane, Refused::Moved(of.id.clone()).into());
                        }
                        // The older START whose record this one was to take over has left none, or has not made it yet,
                        // on another worker. The client can send this one again.
                        (Saved::Absent, Some(_)) if of.hold.replaces() => {
                            self.fail_unsaved(instance, answered, of.lane, Refused::Moved(of.id.clone()).into());
                        }
                        (gone @ (Saved::Ended | Saved::Absent), _) => {
                            // Another server has taken it, and ended it.
                            self.saves().moved += u64::from(matches!(gone, Saved::Ended));
                            self.fail_unsaved(instance, answered, of.lane, Refused::Missing(of.id.clone()).into());
                        }
                    }
                }
            }
            Err(source) => {
                self.not_written(&source);
                for of in &unsaved {
                    self.fail_unsaved(instance, &mut answered[of.at], of.lane, failed(&of.id, &source));
                }
            }
        }
    }

    /// Whether a younger sequence of this server has the id.
    pub(super) fn is_replaced(&self, lane: u32) -> bool {
        self.sequences.lock().is_replaced(lane)
    }

    /// A state could not be saved: its request fails, and the sequence is forgotten here.
    fn fail_unsaved(&self, instance: &Instance, of: &mut Answered, lane: u32, error: RequestError) {
        self.forget([lane]);
        if of.answer.as_ref().is_some_and(|answer| !answer.is_error()) {
            instance.sequences.metrics.count_failed(error.reason());
            of.request.fail_instead(&mut of.answer, error.into());
        }
        Self::let_go(of);
    }

    /// Sequences of this server are over without a request. One that was idle for too long stays in the store.
    pub(super) fn end(&self, over: &[Over]) {
        // The store is asked without the lock, because it may take long to answer.
        let owned: Vec<_> = {
            let mut owned = self.sequences.lock();
            over.iter().filter_map(|of| Some((of.why, owned.remove(of.lane)?.hold))).collect()
        };
        let is_over = |(why, _): &&(OverBy, Hold)| *why == OverBy::Replaced;
        let ends: Vec<_> = owned.iter().filter(is_over).map(|(_, hold)| Change::End(hold, b"")).collect();
        if let Err(error) = self.keeper.save(&ends) {
            self.not_written(&error);
            log::warn!("{} sequences that were replaced stay in the store until they expire: {error}", ends.len());
        }
    }
}

fn tell_saved(answered: &Answered) {
    answered.steps.into_iter().for_each(|steps| tell_steps(answered, steps, steps));
}
