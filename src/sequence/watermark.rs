//! How much of its queue core has sent to one instance.
//!
//! Core's queue for an instance is first in, first out. While the backend releases a request, core appends the next
//! request of its sequence to the queue. Payloads are numbered in the order in which they begin, and their requests are
//! released in this order. Suppose that a request arrives, and that its predecessor was released with payload `n`. Core
//! appended it after the requests of payload `n - 1` had been released. So everything that core had queued by then has
//! arrived. We say that payload `n - 1` is *passed*.
//!
//! A START has no predecessor, so a single START proves nothing. Two further facts help if only STARTs arrive:
//!
//! - Core queues at most one request for each of its slots. When that many requests have arrived since a payload was
//!   released, the payload is passed.
//! - Core does not keep requests from an idle instance. When the instance has been idle for long enough since a payload
//!   was released, the payload is passed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The payloads of one instance: how many have begun, how many have finished, and how many are passed.
pub struct Watermark {
    /// Most requests that core queues for an instance.
    queue_requests: u64,
    /// A payload is passed when the instance has been idle for this long since then. The pauses are added up.
    quiet: Duration,
    begun: u64,
    finished: u64,
    passed: u64,
    /// `passed` when the last payload began. The requests of this payload do not count.
    passed_before: u64,
    /// Requests that have arrived.
    requests: u64,
    /// The time that the instance has been idle, in all.
    idle: Duration,
    idle_since: Instant,
    /// Finished payloads that are not passed, the oldest first.
    unpassed: VecDeque<Finished>,
}

/// A payload whose requests have been released.
struct Finished {
    payload: u64,
    /// `Watermark::requests` when the payload finished.
    requests: u64,
    /// `Watermark::idle` when the payload finished.
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

    /// The instance begins to work on a payload of `requests` requests.
    pub fn begin(&mut self, requests: usize, now: Instant) {
        self.rest(now);
        self.passed_before = self.passed;
        self.begun += 1;
        self.requests += requests as u64;
        let (arrived, enough) = (self.requests, self.queue_requests);
        self.pass_while(|payload| arrived - payload.requests >= enough);
    }

    /// A request has arrived, and its predecessor was released with this payload.
    pub fn follow(&mut self, payload: u64) {
        self.pass(payload.saturating_sub(1));
    }

    /// Finishes the oldest payload that has not finished: all its requests have been released.
    pub fn finish(&mut self, now: Instant) {
        if self.finished == self.begun {
            return;
        }
        self.finished += 1;
        self.unpassed.push_back(Finished { payload: self.finished, requests: self.requests, idle: self.idle });
        self.idle_since = now;
    }

    /// A request has been released outside a payload. Returns a payload. When it is passed, the requests that core
    /// queued because of this release have arrived.
    pub fn release(&mut self, now: Instant) -> u64 {
        if self.begun == self.finished {
            self.begin(0, now);
            self.finish(now);
        }
        self.begun
    }

    /// Adds the time that the instance has been idle until now.
    pub fn rest(&mut self, now: Instant) {
        if self.begun != self.finished {
            return;
        }
        self.idle += now.saturating_duration_since(self.idle_since);
        self.idle_since = now.max(self.idle_since);
        let (idle, quiet) = (self.idle, self.quiet);
        self.pass_while(|payload| idle - payload.idle >= quiet);
    }

    /// When [`Self::rest`] passes the next payload if the instance stays idle. `None` if the instance is busy or if all
    /// finished payloads are passed.
    pub fn next_rest(&self) -> Option<Instant> {
        let next = self.unpassed.front().filter(|_| self.begun == self.finished)?;
        Some(self.idle_since + self.quiet.saturating_sub(self.idle - next.idle))
    }

    /// The last payload that is passed: everything that core had queued when its requests had been released has
    /// arrived.
    pub const fn passed(&self) -> u64 {
        self.passed
    }

    /// The last payload that was passed before the latest payload began. What core had queued when its requests had
    /// been released arrived before the latest payload.
    pub const fn passed_before(&self) -> u64 {
        self.passed_before
    }

    /// The latest payload that has begun; 0 before the first.
    pub const fn begun(&self) -> u64 {
        self.begun
    }

    /// The oldest payload that has not finished, or the next one if all have finished.
    pub const fn releasing(&self) -> u64 {
        self.finished + 1
    }

    fn pass_while(&mut self, is_passed: impl Fn(&Finished) -> bool) {
        let last = self.unpassed.iter().take_while(|payload| is_passed(payload)).last().map(|last| last.payload);
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
        assert_eq!(watermark.passed(), 2, "a request with an older predecessor changes nothing");
    }

    #[test]
    fn a_payload_is_passed_when_as_many_requests_as_core_queues_have_come_since_its_release() {
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
    fn a_release_between_payloads_is_passed_later_than_the_payloads_before_it() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        watermark.begin(1, now);
        watermark.finish(now);
        watermark.rest(now + QUIET);
        assert_eq!((watermark.passed(), watermark.release(now + QUIET)), (1, 2));
        watermark.rest(now + QUIET * 2);
        assert_eq!(watermark.passed(), 2);
        watermark.begin(1, now + QUIET * 2);
        assert_eq!(watermark.release(now + QUIET * 2), 3, "the payload that has not finished");
    }

    #[test]
    fn pauses_add_up_and_busy_time_does_not_count() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        watermark.begin(1, now);
        watermark.finish(now);
        assert_eq!(watermark.next_rest(), Some(now + QUIET));
        let later = now + QUIET / 2;
        watermark.begin(1, later);
        watermark.rest(later + QUIET * 5);
        assert_eq!((watermark.passed(), watermark.next_rest()), (0, None), "the instance is busy");
        let later = later + QUIET * 5;
        watermark.finish(later);
        assert_eq!(watermark.next_rest(), Some(later + QUIET / 2));
        watermark.rest(later + QUIET / 2);
        assert_eq!(watermark.passed(), 1);
        watermark.rest(later + QUIET);
        assert_eq!((watermark.passed(), watermark.next_rest()), (2, None));
    }
}
