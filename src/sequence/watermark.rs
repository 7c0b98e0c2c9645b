//! How far core has emptied its queue for one instance.
//!
//! Core's queue of an instance is first in, first out, and core puts a sequence's next request into it while the
//! request before is released. Payloads are numbered in the order in which they begin, and their requests are released
//! in that order. So when a request comes whose predecessor was released with payload `n`, everything has come that
//! core had queued when the requests of payload `n - 1` had been released.
//!
//! Requests without a predecessor (STARTs) prove nothing one by one. Two further facts help where only they come: core
//! queues one request for each of its slots, so everything has come when as many requests have; and core keeps no
//! request back from an instance that has nothing to do.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The payloads of one instance, and how much of what core had queued has come.
pub struct Watermark {
    /// Most requests that core queues for an instance.
    queue_requests: u64,
    /// What core had queued has come once the instance has had nothing to do for this long, pauses added up.
    quiet: Duration,
    begun: u64,
    finished: u64,
    passed: u64,
    /// `passed` when the last payload began, without what that payload itself proves.
    passed_before: u64,
    requests: u64,
    idle: Duration,
    idle_since: Instant,
    /// Those that have not been passed, in order.
    unpassed: VecDeque<Finished>,
}

/// A payload whose requests have been released.
struct Finished {
    payload: u64,
    /// What had come by then.
    requests: u64,
    idle: Duration,
}

impl Watermark {
    pub fn new(queue_requests: usize, quiet: Duration, now: Instant) -> Self {
        Self {
            queue_requests: queue_requests as u64,
            quiet,
            begun: 0,
            finished: 0,
            passed: 0,
            passed_before: 0,
            requests: 0,
            idle: Duration::ZERO,
            idle_since: now,
            unpassed: VecDeque::new(),
        }
    }

    /// The instance begins to work on a payload of so many requests.
    pub fn begin(&mut self, requests: usize, now: Instant) {
        self.rest(now);
        self.passed_before = self.passed;
        self.begun += 1;
        self.requests += requests as u64;
        let (come, enough) = (self.requests, self.queue_requests);
        self.pass_while(|payload| come - payload.requests >= enough);
    }

    /// A request has come whose predecessor was released with this payload.
    pub fn follow(&mut self, payload: u64) {
        self.pass(payload.saturating_sub(1));
    }

    /// All requests of the oldest payload that has not finished have been released.
    pub fn finish(&mut self, now: Instant) {
        if self.finished == self.begun {
            return;
        }
        self.finished += 1;
        self.unpassed.push_back(Finished { payload: self.finished, requests: self.requests, idle: self.idle });
        self.idle_since = now;
    }

    /// A request has been released outside a payload. Returns the payload that has to be passed until what followed has
    /// come.
    pub fn release(&mut self, now: Instant) -> u64 {
        if self.begun == self.finished {
            self.begin(0, now);
            self.finish(now);
        }
        self.begun
    }

    /// Counts the time that the instance has had nothing to do.
    pub fn rest(&mut self, now: Instant) {
        if self.begun != self.finished {
            return;
        }
        self.idle += now.saturating_duration_since(self.idle_since);
        self.idle_since = now.max(self.idle_since);
        let (idle, quiet) = (self.idle, self.quiet);
        self.pass_while(|payload| idle - payload.idle >= quiet);
    }

    /// When [`Self::rest`] passes the next payload, if no other comes; `None` if only payloads can.
    pub fn next_rest(&self) -> Option<Instant> {
        let next = self.unpassed.front().filter(|_| self.begun == self.finished)?;
        Some(self.idle_since + self.quiet.saturating_sub(self.idle - next.idle))
    }

    /// Everything has come that core had queued when the requests of this payload had been released.
    pub const fn passed(&self) -> u64 {
        self.passed
    }

    /// What had been passed before the payload that has begun last. What was queued by then is not in that payload.
    pub const fn passed_before(&self) -> u64 {
        self.passed_before
    }

    /// The payload that has begun last; 0 before the first.
    pub const fn begun(&self) -> u64 {
        self.begun
    }

    /// The first payload whose requests have not all been released, or the next one.
    pub const fn releasing(&self) -> u64 {
        self.finished + 1
    }

    fn pass_while(&mut self, has_come: impl Fn(&Finished) -> bool) {
        let last = self.unpassed.iter().take_while(|payload| has_come(payload)).last().map(|last| last.payload);
        if let Some(last) = last {
            self.pass(last);
        }
    }

    fn pass(&mut self, payload: u64) {
        self.passed = self.passed.max(payload);
        while self.unpassed.front().is_some_and(|first| first.payload <= self.passed) {
            self.unpassed.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Duration = Duration::from_millis(20);

    fn watermark(now: Instant) -> Watermark {
        Watermark::new(10, QUIET, now)
    }

    #[test]
    fn a_request_that_follows_a_payload_passes_those_before_it() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        for _ in 1..=3 {
            watermark.begin(1, now);
            watermark.finish(now);
        }
        watermark.begin(1, now);
        assert_eq!(watermark.passed(), 0);
        watermark.follow(3);
        assert_eq!((watermark.passed(), watermark.passed_before()), (2, 0));
        watermark.finish(now);
        watermark.begin(1, now);
        assert_eq!(watermark.passed_before(), 2);
        watermark.follow(1);
        assert_eq!(watermark.passed(), 2, "an older predecessor takes nothing back");
    }

    #[test]
    fn as_many_requests_as_core_queues_pass_a_payload_counted_from_its_release() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        watermark.begin(1, now);
        watermark.begin(9, now);
        watermark.finish(now);
        watermark.begin(9, now);
        assert_eq!(watermark.passed(), 0, "the second payload began before the first was released");
        watermark.begin(1, now);
        assert_eq!(watermark.passed(), 1);
    }

    #[test]
    fn a_release_between_payloads_is_passed_later_than_those_before_it() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        watermark.begin(1, now);
        watermark.finish(now);
        watermark.rest(now + QUIET);
        assert_eq!((watermark.passed(), watermark.release(now + QUIET)), (1, 2));
        watermark.rest(now + QUIET * 2);
        assert_eq!(watermark.passed(), 2);
        watermark.begin(1, now + QUIET * 2);
        assert_eq!(watermark.release(now + QUIET * 2), 3, "the payload that has not finished has not been passed");
    }

    #[test]
    fn pauses_add_up_and_work_does_not_count() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        watermark.begin(1, now);
        watermark.finish(now);
        assert_eq!(watermark.next_rest(), Some(now + QUIET));
        let later = now + QUIET / 2;
        watermark.begin(1, later);
        watermark.rest(later + QUIET * 5);
        assert_eq!((watermark.passed(), watermark.next_rest()), (0, None), "it works");
        let later = later + QUIET * 5;
        watermark.finish(later);
        assert_eq!(watermark.next_rest(), Some(later + QUIET / 2));
        watermark.rest(later + QUIET / 2);
        assert_eq!(watermark.passed(), 1);
        watermark.rest(later + QUIET);
        assert_eq!((watermark.passed(), watermark.next_rest()), (2, None));
    }
}
