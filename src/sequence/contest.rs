//! Several incarnations of one id: which of them the next request is for (see [`super`]).

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::state::pool::SlotId;

/// Payloads smaller than a full batch that prove core's queue empty. Core may have formed two before the request in
/// question could be queued; a third is certain, a fourth costs nothing.
pub const SHORT_PAYLOADS: usize = 4;

/// A sequence whose client sends its next request only when it has the answer to the last is at rest for less.
pub const REST: Duration = Duration::from_millis(250);
/// How long the requests of an incarnation may wait in core for another one's END.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Evidence that core has sent whatever it had queued at some moment: the payloads that began after it.
#[derive(Clone, Copy, Default)]
pub struct Evidence {
    pub short_payloads: usize,
    pub requests: usize,
}

impl Evidence {
    pub fn add(&mut self, requests: usize, short: bool) {
        self.requests = self.requests.wrapping_add(requests);
        self.short_payloads = self.short_payloads.wrapping_add(usize::from(short));
    }

    pub const fn since(self, earlier: Self) -> Self {
        Self {
            requests: self.requests.wrapping_sub(earlier.requests),
            short_payloads: self.short_payloads.wrapping_sub(earlier.short_payloads),
        }
    }

    pub const fn is_enough(self, queue_requests: usize) -> bool {
        self.requests >= queue_requests || self.short_payloads >= SHORT_PAYLOADS
    }
}

/// Which of several incarnations of an id is the next request for?
pub struct Contest {
    /// The receiving incarnation took its turn because another had nothing in the queue.
    pub in_turn: bool,
    /// The START that began this may belong to the past: it may have waited in core behind an END. Otherwise the
    /// receiving incarnation has been started over.
    pub late: bool,
    /// A START and END in one request has come and gone meanwhile, which may have started over what is left.
    pub one_shot: bool,
    pub since: Instant,
    pub last_request: Instant,
    /// What the instance had seen when core last could queue a request of the id: when one had been released.
    pub from: Evidence,
    /// When that was.
    pub released: Instant,
    /// A request of the id may have been released since, or will be before the payload in the works is finished.
    pub is_open: bool,
}

impl Contest {
    pub const fn new(late: bool, now: Instant, seen: Evidence) -> Self {
        let (since, last_request, released) = (now, now, now);
        Self { in_turn: false, late, one_shot: false, since, last_request, from: seen, released, is_open: true }
    }

    /// A request of the id has been released.
    pub const fn note_release(&mut self, now: Instant, seen: Evidence) {
        (self.from, self.released) = (seen, now);
    }

    /// Whether the next incarnation may have its turn: at once if its START is certainly the latest, else only when
    /// the receiving one seems to be at rest, or has kept the other waiting for long.
    pub fn is_ripe(&self, now: Instant) -> bool {
        self.in_turn || !self.late || now >= self.last_request + REST || now >= self.since + PATIENCE
    }
}

/// The incarnations of one id. The first one receives.
#[derive(Default)]
pub struct Chain {
    pub incarnations: SmallVec<[SlotId; 1]>,
    pub contest: Option<Contest>,
}
