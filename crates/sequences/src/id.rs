//! Correlation ids, and what requests do to the sequences that have them.

use std::fmt;

/// The correlation id that a client gave: an unsigned number or a string. Never 0 and never empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SequenceId {
    Number(u64),
    /// `sequence_id` as a string of at most [`Self::MOST_BYTES`] bytes. It need not be UTF-8, so ids are compared byte
    /// by byte.
    Name(Box<[u8]>),
}

impl SequenceId {
    /// Core refuses a longer string.
    pub const MOST_BYTES: usize = 128;

    /// The id as a string, for models whose correlation id input is a string.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Number(number) => number.to_string().into_bytes(),
            Self::Name(name) => name.to_vec(),
        }
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => write!(f, "'{}'", String::from_utf8_lossy(name)),
        }
    }
}

/// A correlation id and where core has put its sequence. Core keeps a sequence on the instance where it started, so the
/// same id on another instance is another sequence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub instance: u32,
    /// With the `direct` strategy, core's slot within the instance: the request's position in the payload. If this
    /// backend schedules the sequences, the lane that its scheduler gave the sequence. A lane has one incarnation at a
    /// time, and the same id in another lane is another incarnation.
    pub lane: Option<u32>,
    pub id: SequenceId,
}

/// What a request has done to the state of its sequence. The sequence is over if its state is lost, if the request was
/// a START that has not advanced, or if it had END, whatever the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request succeeded. The sequence has a new state.
    Advanced,
    /// The request failed. The sequence has the state from before it. If its START has not succeeded yet, it has
    /// no state.
    Failed,
    /// As [`Self::Failed`]: the run failed for this request alone.
    RunFailed,
    /// The sequence has no state any more.
    Lost,
}

/// A request that has run, or cannot run, and what it has done to its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    pub lane: u32,
    pub outcome: Outcome,
    pub ends: bool,
}

impl Finished {
    /// A request that has lost the state of its sequence, which is over.
    pub const fn lost(lane: u32) -> Self {
        Self { lane, outcome: Outcome::Lost, ends: false }
    }
}
