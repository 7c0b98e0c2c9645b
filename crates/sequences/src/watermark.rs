//! How much of its queue core has sent to one instance.
//!
//! Core's queue for an instance is first in, first out. While the backend releases a request, core appends the next
//! request of its sequence to the queue. Payloads are numbered in the order in which they begin, and their requests are
//! released in this order. Suppose that a request arrives, and that its predecessor was released with payload `n`. Core
//! appended it after the requests of payload `n - 1` had been released. So everything that core had queued by then has
//! arrived. We say that payload `n - 1` is *passed*.
//!
//! This needs the true predecessor. A client that sends requests of one id on several connections, or several STARTs
//! ahead, can have a request of one incarnation arrive at another. So a request proves nothing if core may have had
//! something of another incarnation of its id when its own incarnation started. Known limit: a client sends END, START
//! and a request behind it on three connections, and the last of them arrives first.
//!
//! A START has no predecessor, so a single START proves nothing. Two further facts help if only STARTs arrive:
//!
//! - Core queues at most one request for each of its slots. When that many requests have arrived since a payload was
//!   released, the payload is passed.
//! - Core does not keep requests from an idle instance. When the instance has been idle for one uninterrupted pause,
//!   all finished payloads are passed.
//!
//! The clock alone cannot prove a pause. If the whole process is stopped for a second, or gets no processor time, then
//! core has not sent anything in this second either. So the clock divides a pause into [`LOOKS`] equal parts, and looks
//! at the instance after each. A stop of any length delays only one of these looks. Between the others, core's threads
//! are assumed to run. Known limit: a host that runs the clock for a whole pause and core's threads not at all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How many looks find an instance idle in a pause.
pub(super) const LOOKS: u32 = 4;

/// The payloads of one instance: how many have begun, how many have finished, and how many are passed.
pub struct Watermark {
    /// Most requests that core queues for an instance.
    queue_requests: u64,
    /// All finished payloads are passed when the instance has been idle for this long without a break.
    quiet: Duration,
    /// The latest payload that has begun; 0 before the first.
    pub begun: u64,
    finished: u64,
    /// The last payload that is passed: everything that core had queued when its requests had been released has
    /// arrived.
    pub passed: u64,
    /// `passed` when the requests of the latest payload arrived. Whatever core had queued when payload `passed_before`
    /// was released arrived before the latest payload.
    pub passed_before: u64,
    requests: u64,
    /// The last payload has begun, and its requests have not arrived yet.
    is_arriving: bool,
    /// The latest payload that has been released although its requests never arrived, because a panic took them; 0 if
    /// there is none. Any of them may have been an END, or the last request of any sequence.
    pub lost: u64,
    /// Looks that have found the instance idle since the last payload finished.
    looks: u32,
    last_look: Instant,
    /// Finished payloads that are not passed, the oldest first.
    unpassed: VecDeque<Finished>,
}

struct Finished {
    payload: u64,
    /// `Watermark::requests` when the payload finished.
    requests: u64,
}

impl Watermark {
    pub const fn new(queue_requests: usize, quiet: Duration, now: Instant) -> Self {
        Self {
            queue_requests: queue_requests as u64,
            quiet,
            begun: 0,
            finished: 0,
            passed: 0,
            passed_before: 0,
            requests: 0,
            is_arriving: false,
            lost: 0,
            looks: 0,
            last_look: now,
            unpassed: VecDeque::new(),
        }
    }

    /// Core has handed over a payload. Its requests count when they [arrive](Self::arrive).
    pub const fn begin(&mut self) {
        self.note_lost();
        self.begun += 1;
        self.is_arriving = true;
    }

    /// The requests of the payload that has begun are about to be given to their sequences.
    pub fn arrive(&mut self, requests: usize) {
        self.is_arriving = false;
        // Before `pass`: this payload proves only that earlier requests arrived with it, not before it.
        self.passed_before = self.passed;
        self.requests += requests as u64;
        let (arrived, enough) = (self.requests, self.queue_requests);
        let is_passed = |of: &&Finished| arrived - of.requests >= enough;
        let last = self.unpassed.iter().take_while(is_passed).last().map_or(0, |last| last.payload);
        self.pass(last);
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
        if self.finished == self.begun {
            self.note_lost();
        }
        let finished = Finished { payload: self.finished, requests: self.requests };
        match self.unpassed.back_mut().filter(|last| last.requests == self.requests) {
            // What passes one passes both: no request has arrived between them. Steps of long requests are such
            // payloads.
            Some(last) => *last = finished,
            None => self.unpassed.push_back(finished),
        }
        (self.looks, self.last_look) = (0, now);
    }

    /// A request has been released outside a payload. Returns a payload. When it is passed, the requests that core
    /// queued because of this release have arrived.
    pub fn release(&mut self, now: Instant) -> u64 {
        if self.begun == self.finished {
            self.begun += 1;
            self.finish(now);
        }
        self.begun
    }

    /// A look of the clock. Passes all finished payloads if enough looks have found the instance idle.
    pub fn look(&mut self, now: Instant) {
        if self.begun != self.finished || now < self.last_look + self.quiet / LOOKS {
            return;
        }
        (self.looks, self.last_look) = (self.looks.saturating_add(1), now);
        if self.looks >= LOOKS {
            self.pass(self.finished);
        }
    }

    /// When the next look may find a pause. `None` if the instance is busy or if all finished payloads are passed.
    pub fn next_look(&self) -> Option<Instant> {
        let waits = self.begun == self.finished && self.passed != self.begun;
        waits.then(|| self.last_look + self.quiet / LOOKS)
    }

    /// The oldest payload that has not finished, or the next one if all have finished.
    pub const fn releasing(&self) -> u64 {
        self.finished + 1
    }

    const fn note_lost(&mut self) {
        if self.is_arriving {
            (self.lost, self.is_arriving) = (self.begun, false);
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
    const LOOK: Duration = Duration::from_millis(5);

    fn watermark(now: Instant) -> Watermark {
        Watermark::new(10, QUIET, now)
    }

    fn begin(watermark: &mut Watermark, requests: usize) {
        watermark.begin();
        watermark.arrive(requests);
    }

    /// Looks as often as a pause takes that begins now.
    fn pause(watermark: &mut Watermark, now: Instant) -> Instant {
        (1..=LOOKS).for_each(|look| watermark.look(now + LOOK * look));
        now + QUIET
    }

    #[test]
    fn a_request_that_follows_a_payload_passes_those_before_it() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        for _ in 1..=3 {
            begin(&mut watermark, 1);
            watermark.finish(now);
        }
        begin(&mut watermark, 1);
        assert_eq!(watermark.passed, 0);
        watermark.follow(3);
        assert_eq!((watermark.passed, watermark.passed_before), (2, 0));
        watermark.finish(now);
        begin(&mut watermark, 1);
        assert_eq!(watermark.passed_before, 2);
        watermark.follow(1);
        assert_eq!(watermark.passed, 2, "a request with an older predecessor changes nothing");
    }

    #[test]
    fn a_payload_is_passed_when_as_many_requests_as_core_queues_have_come_since_its_release() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        begin(&mut watermark, 1);
        begin(&mut watermark, 9);
        watermark.finish(now);
        begin(&mut watermark, 9);
        assert_eq!(watermark.passed, 0, "the second payload arrived before the first was released");
        begin(&mut watermark, 1);
        assert_eq!(watermark.passed, 1);
    }

    #[test]
    fn payloads_without_requests_take_no_memory() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        begin(&mut watermark, 1);
        watermark.finish(now);
        for _ in 0..1000 {
            begin(&mut watermark, 0);
            watermark.finish(now);
        }
        assert_eq!((watermark.unpassed.len(), watermark.passed), (1, 0));
        begin(&mut watermark, 10);
        assert_eq!((watermark.unpassed.len(), watermark.passed), (0, 1001));
    }

    #[test]
    fn requests_of_a_payload_that_has_only_begun_do_not_count() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        begin(&mut watermark, 1);
        watermark.finish(now);
        watermark.begin();
        assert_eq!(watermark.passed, 0);
        watermark.arrive(10);
        assert_eq!((watermark.passed, watermark.passed_before), (1, 0));
    }

    #[test]
    fn a_release_between_payloads_is_passed_later_than_the_payloads_before_it() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        begin(&mut watermark, 1);
        watermark.finish(now);
        let now = pause(&mut watermark, now);
        assert_eq!((watermark.passed, watermark.release(now)), (1, 2));
        let now = pause(&mut watermark, now);
        assert_eq!(watermark.passed, 2);
        begin(&mut watermark, 1);
        assert_eq!(watermark.release(now), 3, "the payload that has not finished");
    }

    #[test]
    fn pauses_do_not_add_up_and_busy_time_does_not_count() {
        let mut now = Instant::now();
        let mut watermark = watermark(now);
        for _ in 0..40 {
            begin(&mut watermark, 0);
            watermark.look(now + QUIET * 5);
            assert_eq!(watermark.next_look(), None, "the instance is busy");
            watermark.finish(now);
            assert_eq!(watermark.next_look(), Some(now + LOOK));
            for _ in 1..LOOKS {
                now += LOOK;
                watermark.look(now);
            }
            assert_eq!(watermark.passed, 0);
        }
        watermark.look(now + LOOK);
        assert_eq!((watermark.passed, watermark.next_look()), (40, None));
    }

    #[test]
    fn a_payload_whose_requests_never_arrive_is_lost() {
        let now = Instant::now();
        let mut watermark = watermark(now);
        begin(&mut watermark, 1);
        watermark.begin();
        watermark.finish(now);
        assert_eq!(watermark.lost, 0, "its requests may still arrive");
        watermark.finish(now);
        assert_eq!(watermark.lost, 2);
        watermark.begin();
        watermark.begin();
        assert_eq!(watermark.lost, 3, "payloads arrive in the order in which they begin");
        assert_eq!((watermark.release(now), watermark.lost), (4, 3));
    }

    #[test]
    fn a_stop_of_the_process_is_no_pause() {
        let mut now = Instant::now();
        let mut watermark = watermark(now);
        begin(&mut watermark, 1);
        watermark.finish(now);
        for _ in 1..LOOKS {
            now += QUIET * 100;
            watermark.look(now);
            watermark.look(now + LOOK / 2);
        }
        assert_eq!(watermark.passed, 0);
    }
}
