//! Records, the operations on them, and the interface of a store.

use std::fmt;
use std::time::Duration;

/// Tells who owns a record. It is random, so no two sequences with one id have the same token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; Self::BYTES]);

impl Token {
    pub const BYTES: usize = 16;

    pub fn random() -> Result<Self, StoreError> {
        let mut bytes = [0; Self::BYTES];
        getrandom::fill(&mut bytes).map_err(|error| StoreError::Unreachable(format!("no random numbers: {error}")))?;
        Ok(Self(bytes))
    }

    /// A token that is known, for tests and models.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn read(text: &[u8]) -> Option<Self> {
        let digits = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Option<Vec<_>> = text.chunks(2).map(digits).collect();
        Some(Self(bytes?.try_into().ok()?))
    }

    pub const fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Anyone who knows a token can write, so logs don't show it.
        write!(f, "Token({:02x}…)", self.0[0])
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Record<B = Vec<u8>> {
    /// The sequence can continue. The blob is its state. It is empty if the sequence has begun and no state was saved
    /// yet.
    Live { token: Token, blob: B },
    /// It has ended. This stays for as long as a record without saves. Contains the answer to its END, or nothing.
    Ended(B),
}

/// An operation on the record of one sequence. A store applies it atomically. `token` is that of the owner, or the one
/// that the new owner will have.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// A START: makes a new record without a state, whatever there is. With `asks`, if an older sequence of the id has
    /// a live owner, asks the owner to release the sequence, and changes nothing.
    Start {
        token: Token,
        asks: bool,
    },
    /// A START: makes a new record without a state, unless there is one with a state.
    Reserve {
        token: Token,
    },
    /// A START has run: makes a new record in place of one with a token of `old`, or of a sequence that has ended.
    Replace {
        old: &'a [Token],
        token: Token,
        blob: &'a [u8],
    },
    /// Takes the sequence from its owner, if it has a state. With `asks`, if the owner lives and may have a newer
    /// state, asks it to release the sequence, and takes nothing.
    Resume {
        token: Token,
        asks: bool,
    },
    /// Lets any server take the sequence without asking this one, if the token is that of the record. `blob` is the
    /// newest state, if the record doesn't have it.
    Release {
        token: Token,
        blob: Option<&'a [u8]>,
    },
    Check {
        token: Token,
    },
    /// Replaces the state, if the token is that of the record.
    Save {
        token: Token,
        blob: &'a [u8],
    },
    /// Makes the record again that the store has lost. Refused if there is one of another token.
    Restore {
        token: Token,
        blob: &'a [u8],
    },
    /// Ends the sequence if the record has its token, or one of the `old` tokens that it would have replaced. Keeps the
    /// answer for a client that sends its END again, unless it is empty.
    End {
        token: Token,
        old: &'a [Token],
        answer: &'a [u8],
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It was done; for [`Op::Check`]: the token is that of the record.
    Done,
    /// For [`Op::Resume`]: the sequence is the caller's, with this state.
    Taken(Vec<u8>),
    /// For [`Op::Resume`] and [`Op::Start`]: the owner was asked to release the sequence. Nothing has changed.
    Asked,
    /// For [`Op::Resume`]: it has begun, and no state was saved. Nothing has changed.
    Unsaved,
    /// For [`Op::Reserve`]: the record has a state, and this token. Nothing has changed.
    Lives(Token),
    /// The record has another token, so another server has the sequence.
    Moved,
    Ended,
    /// For [`Op::Resume`]: the sequence has ended, and this is the answer to its END.
    Answered(Vec<u8>),
    Absent,
}

impl Op<'_> {
    /// What the operation does to a record, and its reply. [`crate::file`] calls this, and the scripts of
    /// [`crate::redis`] say the same.
    pub fn apply<B>(&self, record: Option<&Record<B>>) -> (Effect<'_>, Reply)
    where
        B: AsRef<[u8]>,
    {
        let keep = Effect::Keep;
        match (*self, record) {
            // A START can come late, after its client has begun the sequence elsewhere. It must not replace the state
            // of that sequence.
            (Op::Reserve { .. }, Some(Record::Live { token, blob })) if !blob.as_ref().is_empty() => {
                (keep, Reply::Lives(*token))
            }
            (Op::Start { token, .. } | Op::Reserve { token }, _) => (Effect::Write(token, b""), Reply::Done),
            (Op::Restore { token, blob }, None) => (Effect::Write(token, blob), Reply::Done),
            (_, None) => (keep, Reply::Absent),
            (Op::Resume { .. }, Some(Record::Ended(answer))) if !answer.as_ref().is_empty() => {
                (keep, Reply::Answered(answer.as_ref().to_vec()))
            }
            // This comes before the rule for other operations. An ended sequence belongs to no server, so the new one
            // may begin.
            (Op::Replace { token, blob, .. }, Some(Record::Ended(_))) => (Effect::Write(token, blob), Reply::Done),
            (_, Some(Record::Ended(_))) => (keep, Reply::Ended),
            (Op::Resume { .. }, Some(Record::Live { blob, .. })) if blob.as_ref().is_empty() => (keep, Reply::Unsaved),
            (Op::Resume { token, .. }, Some(Record::Live { blob, .. })) => {
                (Effect::Give(token), Reply::Taken(blob.as_ref().to_vec()))
            }
            (
                Op::Check { token } | Op::Save { token, .. } | Op::Restore { token, .. } | Op::Release { token, .. },
                Some(Record::Live { token: of_record, .. }),
            ) if token != *of_record => (keep, Reply::Moved),
            (
                Op::Replace { old, token, .. } | Op::End { token, old, .. },
                Some(Record::Live { token: of_record, .. }),
            ) if token != *of_record && !old.contains(of_record) => (keep, Reply::Moved),
            (Op::Check { .. } | Op::Release { blob: None, .. }, Some(_)) => (keep, Reply::Done),
            (
                Op::Save { token, blob }
                | Op::Restore { token, blob }
                | Op::Release { token, blob: Some(blob) }
                | Op::Replace { token, blob, .. },
                Some(_),
            ) => (Effect::Write(token, blob), Reply::Done),
            (Op::End { answer, .. }, Some(_)) => (Effect::End(answer), Reply::Done),
        }
    }

    /// Applies the operation to a record in memory, for tests and models.
    pub fn apply_to(&self, record: &mut Option<Record>) -> Reply {
        let (effect, reply) = self.apply(record.as_ref());
        match (effect, &mut *record) {
            (Effect::Write(token, blob), _) => *record = Some(Record::Live { token, blob: blob.to_vec() }),
            (Effect::Give(new), Some(Record::Live { token, .. })) => *token = new,
            (Effect::End(answer), _) => *record = Some(Record::Ended(answer.to_vec())),
            (Effect::Keep | Effect::Give(_), _) => {}
        }
        reply
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect<'a> {
    Keep,
    Write(Token, &'a [u8]),
    /// It gets this token, and keeps its blob.
    Give(Token),
    /// It becomes [`Record::Ended`], with this answer.
    End(&'a [u8]),
}

/// What all records of a store have in common.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// A record that is not written for this long expires.
    pub ttl: Duration,
    /// The longest time to wait for an answer of a store on the network, and for a connection to it. An operation may
    /// need both. With sentinels or a cluster, it may also wait this long for an answer about where the primary is. A
    /// slot that has moved is asked for once more.
    pub timeout: Duration,
    /// The name under which other servers ask this one for sequences ([`Op::Resume`]). `None` if the records of its
    /// sequences always have the newest states.
    pub server: Option<Token>,
    /// How many replicas of a store on the network have to take a write before it counts as done.
    pub replicas: u32,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// It does not answer, or the connection broke. Whether it did anything is unknown.
    #[error("the store can't be reached: {0}")]
    Unreachable(String),
    /// It refuses to write: it is full, read-only, loading its data, or a replica.
    #[error("the store refuses to write: {0}")]
    Refuses(String),
    /// The user, the password, or the rights of the user are wrong.
    #[error("the store refuses this server: {0}")]
    Denied(String),
    /// Its files or its answers are not what they should be.
    #[error("the store is damaged: {0}")]
    Damaged(String),
    #[error("{0}")]
    InUse(String),
    #[error("the state has {bytes} bytes, and the store takes at most {most}")]
    TooLarge { bytes: usize, most: usize },
}

impl StoreError {
    /// The store's answer is none that a store gives to this question.
    pub(crate) fn unexpected() -> Self {
        Self::Damaged("its answer does not fit the command".to_owned())
    }
}

pub trait Store: Send + Sync {
    /// Applies operations, each atomically, to the records with these keys. An error may come after some were applied.
    fn apply(&self, operations: &[(&[u8], Op<'_>)]) -> Result<Vec<Reply>, StoreError>;

    /// Whether other servers can take a sequence while this one runs.
    fn is_shared(&self) -> bool;

    /// Hears what other servers ask [`Settings::server`] for, and calls `hear` with the key of each record, and with
    /// `None` now and then. Returns when that returns false, or at once if there are no other servers.
    fn listen(&self, _hear: &mut dyn FnMut(Option<&[u8]>) -> bool) -> Result<(), StoreError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_debug_hides_them() {
        let (one, other) = (Token::random().unwrap(), Token::random().unwrap());
        assert_ne!(one, other);
        assert!(!format!("{one:?}").contains(&one.to_string()));
    }
}
