//! The header `grpc-timeout`: how long a client will wait.

use std::time::{Duration, Instant};

use tonic::Code;
use tonic::metadata::MetadataMap;

use crate::failure::Failure;

/// When the client stops waiting; none if the header is absent or malformed.
pub fn of(metadata: &MetadataMap) -> Option<Instant> {
    let timeout = parse(metadata.get("grpc-timeout")?.to_str().ok()?)?;
    Instant::now().checked_add(timeout)
}

/// The future's result, or DEADLINE_EXCEEDED.
pub async fn within<T>(
    deadline: Option<Instant>,
    future: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), future)
            .await
            .unwrap_or_else(|_| Err(Failure::new(Code::DeadlineExceeded, "Deadline Exceeded"))),
        None => future.await,
    }
}

fn parse(text: &str) -> Option<Duration> {
    let unit = text.chars().next_back()?;
    let digits = text.strip_suffix(unit)?;
    // gRPC's specification allows 8 digits.
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        'H' => Some(Duration::from_secs(number * 3600)),
        'M' => Some(Duration::from_secs(number * 60)),
        'S' => Some(Duration::from_secs(number)),
        'm' => Some(Duration::from_millis(number)),
        'u' => Some(Duration::from_micros(number)),
        'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_unit_is_read() {
        assert_eq!(parse("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("9S"), Some(Duration::from_secs(9)));
        assert_eq!(parse("99999999m"), Some(Duration::from_millis(99_999_999)));
        assert_eq!(parse("5u"), Some(Duration::from_micros(5)));
        assert_eq!(parse("5n"), Some(Duration::from_nanos(5)));
    }

    #[test]
    fn what_grpc_does_not_allow_is_no_deadline() {
        for text in ["", "5", "m", "-5m", "+5m", "123456789m", "5x", "5é", "1.5S"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = parse(&text);
        }
    }
}
