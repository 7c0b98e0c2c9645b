//! Limits how much ONNX Runtime logs. It logs an error for each run that fails, and a client can make runs fail as
//! often as it likes.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lines that one line of ONNX Runtime's source may log in each period.
const LINES: u64 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Counts what each line of ONNX Runtime's source logs. Their number is fixed, so the table is bounded.
#[derive(Default)]
pub(super) struct LogLimit {
    counts: Mutex<HashMap<String, Count>>,
}

struct Count {
    since: Instant,
    lines: u64,
}

impl LogLimit {
    /// Whether a line from `location` is logged, and how many were left out since the last one; `None` to leave it out.
    pub fn admit(&self, location: &str, now: Instant) -> Option<u64> {
        let mut counts = self.counts.lock();
        let Some(count) = counts.get_mut(location) else {
            counts.insert(location.to_owned(), Count { since: now, lines: 1 });
            return Some(0);
        };
        if now.duration_since(count.since) < PERIOD {
            count.lines += 1;
            return (count.lines <= LINES).then_some(0);
        }
        let left_out = count.lines.saturating_sub(LINES);
        *count = Count { since: now, lines: 1 };
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
