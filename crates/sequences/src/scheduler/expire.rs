//! When sequences are over without an END, when a START has waited for too long, and the sequences that are parked.

use std::time::Instant;

use super::request::{IdleRule, Over, OverBy, Parking, Refused};
use super::{Phase, Scheduler};
use crate::SequenceId;

impl<R> Scheduler<R> {
    /// Ends sequences that were idle for too long, and STARTs that waited for too long. Returns the requests that
    /// cannot run any more. Adds the workers that have something to do now to `wake`.
    pub fn scan(&mut self, now: Instant, wake: &mut Vec<usize>) -> Vec<(R, Refused)> {
        match self.rules.idle {
            IdleRule::Never => {}
            IdleRule::After(limit) => self.expire(now, |last| last + limit <= now),
            IdleRule::TwoScans(period) if now < self.last_scan + period => {}
            IdleRule::TwoScans(_) => {
                let before = std::mem::replace(&mut self.last_scan, now);
                self.expire(now, |last| last < before);
            }
        }
        let mut refused = Vec::new();
        while let Some(&(until, lane)) = self.waiting_until.first()
            && until <= now
        {
            self.waiting_until.pop_first();
            let Some(id) = self.sequences.get(&lane).map(|sequence| sequence.id.clone()) else { continue };
            let mut requests = self.remove(lane).into_iter();
            // The first one is the START that waited. Those behind it have no sequence now.
            refused.extend(requests.next().map(|(start, _)| (start, Refused::Late(id))));
            refused.extend(requests);
        }
        while let Some((_, &(lane, until))) = self.parked.front()
            && until <= now
        {
            self.parked.pop_front();
            self.forget_parked(lane);
        }
        self.fill_places(now, wake);
        wake.extend(self.with_over());
        refused
    }

    /// When [`Scheduler::scan`] has to be called next; `None` if nothing can expire.
    pub fn next_scan(&self) -> Option<Instant> {
        let idle = match self.rules.idle {
            IdleRule::After(limit) => self.last_success.front().map(|(_, &last)| last + limit),
            IdleRule::TwoScans(period) => Some(self.last_scan + period),
            IdleRule::Never => None,
        };
        let parked = self.parked.front().map(|(_, (_, until))| *until);
        let waiting = self.waiting_until.first().map(|(until, _)| *until);
        [idle, parked, waiting].into_iter().flatten().min()
    }

    /// Ends the sequences whose last successful request is too long ago. Those that have a request become overdue
    /// instead.
    fn expire(&mut self, now: Instant, is_over: impl Fn(Instant) -> bool) {
        while let Some((&lane, &last)) = self.last_success.front()
            && is_over(last)
        {
            self.last_success.pop_front();
            match self.sequences.get_mut(&lane) {
                Some(sequence) if sequence.phase != Phase::Idle => sequence.overdue = true,
                _ => self.expire_idle(lane, now),
            }
        }
    }

    /// Ends a sequence that was idle for too long, or parks it.
    pub(super) fn expire_idle(&mut self, lane: u32, now: Instant) {
        let open = self.sequences.get(&lane).filter(|sequence| !sequence.closed);
        let Some((Parking { time, most }, sequence)) = self.rules.parking.zip(open) else {
            return self.drop_idle(lane, OverBy::Idle);
        };
        let (id, worker) = (sequence.id.clone(), sequence.worker);
        self.close(lane);
        self.placed -= 1;
        self.last_success.remove(&lane);
        self.workers[worker].sequences -= 1;
        self.end_parked(&id);
        self.parked.insert(id, (lane, now + time));
        while self.parked.len() > most
            && let Some((_, (oldest, _))) = self.parked.pop_front()
        {
            self.forget_parked(oldest);
        }
    }

    pub(super) fn end_parked(&mut self, id: &SequenceId) {
        if let Some((lane, _)) = self.parked.remove(id) {
            self.forget_parked(lane);
        }
    }

    fn forget_parked(&mut self, lane: u32) {
        if let Some(sequence) = self.take_out(lane) {
            self.workers[sequence.worker].end(Over { lane, why: OverBy::Idle });
        }
    }
}
