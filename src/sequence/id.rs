//! Names of sequences.

use std::fmt;

/// The correlation id that a client gave: an unsigned number or a string. Never 0 and never empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SequenceId {
    /// `sequence_id` as a number.
    Number(u64),
    /// `sequence_id` as a string, 128 bytes at most. Not all are UTF-8, and two that differ are two sequences.
    Name(Box<[u8]>),
}

impl SequenceId {
    /// The id as a string, as a model that takes strings gets it.
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

/// A correlation id where core has put it. Core keeps a sequence on the instance where it started, so the same id on
/// another instance is another sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Number of the instance within its model.
    pub instance: u32,
    /// Core's slot within the instance, where it can be told: with `direct` it is the request's place in the payload.
    /// The same id in another lane is another incarnation, and one lane has one at a time.
    pub lane: Option<u32>,
    /// The client's name for the sequence.
    pub id: SequenceId,
}
