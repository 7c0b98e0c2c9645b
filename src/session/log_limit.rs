//! How much of what ONNX Runtime says goes to the log: a run that fails makes it log an error, and a client can make
//! runs fail as often as it likes.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lines that one place in ONNX Runtime's source may log in each period.
const LINES: u64 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Counts the lines of each place in ONNX Runtime's source. There is a fixed number of places, so the counts are bounded.
#[derive(Default)]
pub(super) struct LogLimit {
    places: Mutex<HashMap<String, Place>>,
}

struct Place {
    since: Instant,
    lines: u64,
}

impl LogLimit {
    /// Whether a line from this place is logged, and then how many were not since the last one that was.
    pub fn admit(&self, location: &str, now: Instant) -> Option<u64> {
        let mut places = self.places.lock();
        let Some(place) = places.get_mut(location) else {
            places.insert(location.to_owned(), Place { since: now, lines: 1 });
            return Some(0);
        };
        if now.duration_since(place.since) < PERIOD {
            place.lines += 1;
            return (place.lines <= LINES).then_some(0);
        }
        let left_out = place.lines.saturating_sub(LINES);
        *place = Place { since: now, lines: 1 };
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_logs_some_lines_in_a_period_and_says_how_many_were_left_out() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        for _ in 0..LINES {
            assert_eq!(limit.admit("executor.cc:1", start), Some(0));
        }
        for _ in 0..7 {
            assert_eq!(limit.admit("executor.cc:1", start + PERIOD / 2), None);
        }
        assert_eq!(limit.admit("graph.cc:1", start + PERIOD / 2), Some(0));
        assert_eq!(limit.admit("executor.cc:1", start + PERIOD), Some(7));
        assert_eq!(limit.admit("executor.cc:1", start + PERIOD * 2), Some(0));
    }
}
