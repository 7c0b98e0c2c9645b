//! Correlation ids.

use std::fmt;

/// The correlation id that a client gave: an unsigned number or a string. Never 0 and never empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SequenceId {
    /// `sequence_id` as a number.
    Number(u64),
    /// `sequence_id` as a string of at most [`Self::MOST_BYTES`] bytes. It need not be UTF-8, so ids are compared byte by
    /// byte.
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Number of the instance within its model.
    pub instance: u32,
    /// With the `direct` strategy, core's slot within the instance: the request's position in the payload. If this
    /// backend schedules the sequences, the lane that its scheduler gave the sequence. A lane has one incarnation at a
    /// time, and the same id in another lane is another incarnation.
    pub lane: Option<u32>,
    /// The id that the client gave.
    pub id: SequenceId,
}
