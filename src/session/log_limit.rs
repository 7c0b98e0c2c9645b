//! Limits how much ONNX Runtime logs. It logs an error for each run that fails, and a client can make runs fail as
//! often as it likes.
//!
//! Lines are of one kind if they come from the same line of ONNX Runtime's source and differ only in numbers. One line
//! of that source reports all nodes that fail, so kinds of the source line alone would hide the first error of a model
//! behind those of another.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lines of one kind that are logged in each period.
const LINES: u64 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Kinds that are counted at one time. A client could bring new ones with each request, where an error quotes a string.
/// Above this, the lines of a location are one kind; the number of locations is fixed.
const KINDS: usize = 100;

/// Counts the lines that ONNX Runtime logs, by their kind.
#[derive(Default)]
pub(super) struct LogLimit {
    counts: Mutex<HashMap<String, Count>>,
}

struct Count {
    since: Instant,
    lines: u64,
}

impl LogLimit {
    /// Whether a line from `location` is logged, and how many of its kind were left out before it; `None` to leave it
    /// out.
    pub fn admit(&self, location: &str, text: &str, now: Instant) -> Option<u64> {
        let mut kind = location.to_owned();
        kind.extend(text.chars().filter(|letter| !letter.is_ascii_digit()));
        let mut counts = self.counts.lock();
        if counts.len() >= KINDS && !counts.contains_key(&kind) {
            counts.retain(|_, count| now.duration_since(count.since) < PERIOD);
            if counts.len() >= KINDS {
                kind.truncate(location.len());
            }
        }
        let Some(count) = counts.get_mut(&kind) else {
            counts.insert(kind, Count { since: now, lines: 1 });
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

    const AT: &str = "executor.cc:1";

    #[test]
    fn each_kind_logs_some_lines_in_a_period_and_says_how_many_were_left_out() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        for index in 0..LINES {
            assert_eq!(limit.admit(AT, &format!("no row {index}"), start), Some(0));
        }
        for index in 0..7 {
            assert_eq!(limit.admit(AT, &format!("no row {index}"), start + PERIOD / 2), None);
        }
        assert_eq!(limit.admit("graph.cc:1", "no row 1", start + PERIOD / 2), Some(0));
        assert_eq!(limit.admit(AT, "no row 1", start + PERIOD), Some(7));
        assert_eq!(limit.admit(AT, "no row 1", start + PERIOD * 2), Some(0));
    }

    #[test]
    fn another_text_from_the_same_line_is_logged() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        while limit.admit(AT, "no row 1", start).is_some() {}
        assert_eq!(limit.admit(AT, "no column 1", start), Some(0));
    }

    #[test]
    fn texts_without_end_take_bounded_memory_and_log_a_bounded_number_of_lines() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let logged = (1..=10 * KINDS).filter(|&index| limit.admit(AT, &"x".repeat(index), start).is_some());
        assert_eq!(logged.count(), KINDS + LINES as usize);
        assert_eq!(limit.counts.lock().len(), KINDS + 1);
        assert_eq!(limit.admit(AT, "a new one, a period later", start + PERIOD), Some(0));
        assert_eq!(limit.counts.lock().len(), 1);
    }
}
