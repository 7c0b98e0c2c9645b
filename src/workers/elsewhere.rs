//! Sequences that come from a store, are entered there, or leave for another server: what their requests do meanwhile.
//!
//! Rules: the scheduler is not locked while the store is asked. The sequences that this server owns are in
//! [`super::stored`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use sequences::SequenceId;
use sequences::scheduler::{Lookup, Refused, Scheduler};

use super::arrivals::{Queued, Unfit, moved, unfit};
use super::clock::Thread;
use super::stored::{Found, Pending, Stored, Told, hear_asks, start_lookups, start_writer};
use super::{SHOW_EVERY, Shared};
use crate::batch::kept::KeptAnswer;
use crate::error::{LoadError, RequestError};
use crate::panic;
use crate::triton::Request;

impl Shared {
    /// Starts the threads that ask the store, write to it, and hear other servers.
    pub(super) fn start_store_threads(self: &Arc<Self>) -> Result<Vec<Thread>, LoadError> {
        let Some(stored) = &self.stored else { return Ok(Vec::new()) };
        let finds = self.clone();
        let lookups = start_lookups(&self.lookups, move |lookups| finds.find(lookups))?;
        let Some(later) = &stored.later else { return Ok(vec![lookups]) };
        let (asked, writes) = (self.clone(), self.clone());
        let asks = hear_asks(&stored.keeper, move |key| {
            let wanted = asked.stored.as_ref().and_then(|stored| stored.wanted(key));
            asked.release_lanes(wanted.as_slice());
        })?;
        let writer = start_writer(&later.queue, &stored.keeper, move |told| writes.take_told(told))?;
        // They stop in this order. The lookups may hand the writer something to save. The last one hears other servers
        // until all is saved, because a server that asks and is not heard takes what the store has.
        Ok(vec![lookups, writer, asks])
    }

    /// Lets a thread look for sequences, and enter those that begin. While the store doesn't answer, they begin
    /// without.
    pub(super) fn hand_over_lookups(&self, scheduler: &mut Scheduler<Queued>) {
        let mut lookups = scheduler.take_lookups();
        if let Some((stored, later)) = self.stored.as_ref().and_then(Stored::with_later)
            && !lookups.is_empty()
            && later.queue.is_down()
        {
            let mut wake = Vec::new();
            lookups.retain(|of| {
                if of.starts {
                    stored.begin_without_store(later, of);
                    scheduler.entered(of.lane, &mut wake);
                }
                !of.starts
            });
            self.wake(&mut wake);
        }
        self.lookups.add(lookups);
    }

    /// Looks for sequences in the store, and enters those that begin. Their requests run, or are refused. Returns what
    /// is to be looked for again.
    fn find(&self, pending: Vec<Pending>) -> Vec<Pending> {
        let Some(stored) = &self.stored else { return Vec::new() };
        let (mut wake, mut refused) = (Vec::new(), Vec::new());
        let (behind, pending) = self.still_wanted(stored, pending, &mut wake, &mut refused);
        let lookups: Vec<_> = pending.iter().collect();
        let found = panic::catch_and_log(|| stored.find(&lookups)).unwrap_or_default();
        let mut again: Vec<_> = behind.into_iter().map(Pending::later).collect();
        again.extend(self.take_found(stored, pending, found, wake, refused));
        again
    }

    /// Leaves out what need not be looked for any more. Also returns what waits for an END that has not run yet.
    fn still_wanted(
        &self,
        stored: &Stored,
        pending: Vec<Pending>,
        wake: &mut Vec<usize>,
        refused: &mut Vec<(Request, Unfit)>,
    ) -> (Vec<Pending>, Vec<Pending>) {
        let now = Instant::now();
        let mut scheduler = self.scheduler.lock();
        // The START of a client that has gone, which may have sent it again to another server: it must not replace that
        // sequence in the store.
        let is_cancelled = |of: &Pending| {
            let request = scheduler.first_request(of.lookup.lane).filter(|_| of.lookup.starts);
            request.is_some_and(|queued| queued.request().is_cancelled())
        };
        let (cancelled, pending): (Vec<_>, Vec<_>) = pending.into_iter().partition(is_cancelled);
        for of in cancelled {
            stored.forget([of.lookup.lane]);
            let mut requests = scheduler.not_found(of.lookup.lane, now, wake).into_iter();
            let first = requests.next();
            refused.extend(first.map(|(first, _)| (first.into_request(), Some(Box::new(RequestError::Cancelled)))));
            refused.extend(requests.map(unfit));
        }
        // What is found under an id that a START has taken may be the new sequence.
        let (pending, replaced): (Vec<_>, Vec<_>) =
            pending.into_iter().partition(|of| of.lookup.starts || scheduler.is_looked_for(of.lookup.lane));
        for of in replaced {
            refused.extend(scheduler.not_found(of.lookup.lane, now, wake).into_iter().map(unfit));
        }
        // While an END has not run yet, the sequence is still here.
        pending.into_iter().partition(|of| !of.lookup.starts && scheduler.is_behind_an_end(of.lookup.lane))
    }

    /// Hands over what the store said of each. Returns what is to be looked for again.
    fn take_found(
        &self,
        stored: &Stored,
        pending: Vec<Pending>,
        found: Vec<Found>,
        mut wake: Vec<usize>,
        mut refused: Vec<(Request, Unfit)>,
    ) -> Vec<Pending> {
        let mut found = found.into_iter();
        let (now, mut again, mut ends_again) = (Instant::now(), Vec::new(), Vec::new());
        let mut scheduler = self.scheduler.lock();
        for pending in pending {
            let Lookup { lane, starts, .. } = pending.lookup;
            match found.next().unwrap_or_else(Found::failed) {
                Found::Taken if starts => scheduler.entered(lane, &mut wake),
                Found::Taken => {
                    let requests = scheduler.found(lane, now, &mut wake);
                    // A START has taken its id meanwhile, so the state that was found gets no requests.
                    if !requests.is_empty() {
                        stored.lose([lane]);
                    }
                    refused.extend(requests.into_iter().map(unfit));
                }
                Found::Later => again.push(pending.again()),
                Found::Missing(answer) => {
                    let mut requests = scheduler.not_found(lane, now, &mut wake).into_iter().peekable();
                    let is_repeated = |(first, _): &(Queued, Refused)| {
                        first.decoded().zip(answer.as_ref()).is_some_and(|(first, answer)| first.is_answered_by(answer))
                    };
                    let first = requests.next_if(is_repeated);
                    let repeated = |((first, _), answer): ((Queued, Refused), _)| {
                        (first.into_request(), pending.lookup.id, answer)
                    };
                    ends_again.extend(first.zip(answer).map(repeated));
                    refused.extend(requests.map(unfit));
                }
                Found::No(error) => {
                    // A START whose search has panicked.
                    stored.forget([lane]);
                    let mut requests = scheduler.not_found(lane, now, &mut wake).into_iter();
                    // The first gets the reason. The store may have the sequence, so no other is told that it is
                    // missing.
                    refused.extend(requests.next().map(|(first, _)| (first.into_request(), Some(Box::new(error)))));
                    refused.extend(requests.map(moved));
                }
            }
        }
        self.watch_clock_for(&mut scheduler, now);
        drop(scheduler);
        self.wake(&mut wake);
        self.refuse(refused);
        self.answer_again(ends_again);
        again
    }

    /// Answers ENDs that have run before, and whose answers were kept.
    fn answer_again(&self, ends: Vec<(Request, SequenceId, Box<KeptAnswer>)>) {
        let answer = |(request, id, answer): (Request, SequenceId, Box<KeptAnswer>)| {
            let response = panic::catch_result(|| answer.repeat(&request, Some(&id)));
            (request, response.map_err(Into::into))
        };
        self.answer_now(ends.into_iter().map(answer).collect(), true);
    }

    /// Sequences leave for another server, when their request has run.
    fn release_lanes(&self, lanes: &[u32]) {
        if lanes.is_empty() {
            return;
        }
        let (now, mut wake) = (Instant::now(), Vec::new());
        let mut scheduler = self.scheduler.lock();
        let refused: Vec<_> = lanes.iter().flat_map(|&lane| scheduler.release(lane, now, &mut wake)).collect();
        self.watch_clock_for(&mut scheduler, now);
        drop(scheduler);
        self.wake(&mut wake);
        self.refuse_queued(refused);
    }

    /// All sequences leave for other servers, and no more are taken. Each answer says how many are left, and how many
    /// could not be saved. While the store can't take their states, the sequences stay.
    pub(super) fn drain(&self, asked: Vec<(Request, Result<(), RequestError>)>) {
        if asked.is_empty() {
            return;
        }
        let (may, may_not): (Vec<_>, Vec<_>) = asked.into_iter().partition(|(_, may)| may.is_ok());
        self.refuse(may_not.into_iter().map(|(request, why)| (request, why.err().map(Box::new))).collect());
        let Some(stored) = self.stored.as_ref().filter(|_| !may.is_empty()) else { return };
        stored.begin_drain();
        let (now, mut wake) = (Instant::now(), Vec::new());
        let mut scheduler = self.scheduler.lock();
        let takes_states = stored.later.as_ref().is_none_or(|later| !later.queue.is_down() && !later.queue.is_full());
        let refused = if takes_states { scheduler.drain(now, &mut wake) } else { scheduler.take_no_more() };
        let live = scheduler.live();
        self.watch_clock_for(&mut scheduler, now);
        drop(scheduler);
        self.wake(&mut wake);
        self.refuse_queued(refused);
        let left = stored.left(live) + self.answering.load(Ordering::Acquire);
        // Read after `left`: a sequence that cannot be saved counts here before it stops counting there.
        let not_saved = stored.not_saved_by_drain();
        let answer = |request: &Request| {
            let response = request.response()?;
            response.set_number(c"stateful_sequences_left", left)?;
            response.set_number(c"stateful_sequences_not_saved", not_saved)?;
            Ok(response)
        };
        let answers = may.into_iter().map(|(request, _)| {
            let answer = answer(&request);
            (request, answer)
        });
        self.answer_now(answers.collect(), true);
    }

    pub(super) fn has_snapshots(&self, worker: usize, now: Instant) -> bool {
        self.stored.as_ref().and_then(|stored| stored.later.as_ref()).is_some_and(|later| later.is_due(worker, now))
    }

    /// Comes again when states have to be saved, or while some are not. Returns the age of the oldest unsaved step.
    pub(super) fn note_due(&self, now: Instant) -> u64 {
        let Some((stored, later)) = self.stored.as_ref().and_then(Stored::with_later) else { return 0 };
        let due = (0..self.wake.len()).filter_map(|worker| later.next_due(worker));
        // A sequence that is due already has woken its worker, or waits for room in the queue, which wakes it later.
        due.filter(|at| *at > now).for_each(|at| self.alarm.by(at));
        let oldest = stored.oldest_unsaved(later).map(|since| now.saturating_duration_since(since));
        if oldest.is_some() {
            self.alarm.by(now + SHOW_EVERY);
        }
        // 0 means that all steps are saved.
        oldest.map_or(0, |age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(1))
    }

    fn take_told(&self, told: Told<'_>) {
        let Some((stored, later)) = self.stored.as_ref().and_then(Stored::with_later) else { return };
        match told {
            Told::Written(results) => self.release_lanes(&stored.written(later, results)),
            Told::Failed(error) => stored.not_written(error),
            Told::TooLarge(entry, error) => stored.cannot_save(entry, error),
        }
    }
}
