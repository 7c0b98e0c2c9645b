//! A sequence's state outside its server, so that another server can go on with it: the protocol ([`Keeper`]), and
//! stores.
//!
//! A record belongs to one sequence. It contains a random *token* and the bytes of a state (the *blob*). The server
//! that knows the token owns the sequence: each save names the token, and the store refuses the save if the record has
//! another one by then. To take a sequence, a server gives its record a new token, in one atomic operation
//! ([`Op::Resume`]). So there is one writer, even if the old owner doesn't know that it has lost the sequence, and no
//! clock is needed. A server that saves late leaves its name in its records, so that others ask it for the newest state
//! before they take a sequence. An END leaves a record without a blob, which distinguishes a late save of an old owner
//! from a record that the store has lost.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | [`mod@file`] | a store in a folder of this machine | record |
//! | [`redis`] | a store in Valkey or Redis: what operations are there | cluster, server, location, record |
//! | [`cluster`] | which server of a cluster has a record | server, location, record |
//! | [`server`] | one server, and the connections to it, with TLS or through sentinels | location, record |
//! | [`location`] | where a store is, as an operator writes it | record |
//! | [`record`] | records, the operations on them, and the interface of a store | |
//!
//! Rules:
//! - A store applies each operation completely or not at all. After an error, the caller can't know whether it was
//!   applied, so it forgets what it knows of these sequences and asks the store again.
//! - A record expires when it has not been written for [`Settings::ttl`].
//! - No error, log line or `Debug` text has a password.
//!
//! Not for: what a blob means, threads, or when to save.

mod cluster;
mod file;
mod location;
mod record;
mod redis;
mod server;

use std::sync::{Arc, Weak};
use std::time::Instant;

pub use location::{BadLocation, Location};
pub use record::{Op, Record, Reply, Settings, Store, StoreError, Token};

/// Opens a store. One on the network is reached when it is used first.
pub fn open(location: &Location, settings: Settings) -> Result<Arc<dyn Store>, StoreError> {
    Ok(match location {
        Location::File(folder) => Arc::new(file::FileStore::open(folder, settings)?),
        Location::Redis(location) => Arc::new(redis::RedisStore::new(location.as_ref().clone(), settings)),
    })
}

/// The sequences of one model in a store.
pub struct Keeper {
    store: Arc<dyn Store>,
    /// The prefix of the keys of its records, which separates them from those of other models.
    space: Vec<u8>,
    settings: Settings,
    /// The keepers of older instances of the model in this process.
    older: Vec<Weak<Self>>,
}

/// A sequence that this server owned when the store last said so.
#[derive(Clone, Debug)]
pub struct Hold {
    key: Vec<u8>,
    token: Token,
    /// The store said so to a request that was sent after this.
    confirmed: Instant,
    is_new: bool,
    /// The tokens of older sequences of the id that this one may replace.
    replaces: Vec<Token>,
}

impl Hold {
    /// Whether both belong to one sequence. No other sequence has the token, even if it has the same id.
    pub fn is_same(&self, other: &Self) -> bool {
        self.token == other.token
    }

    /// Whether the store may not have a record of it yet.
    pub const fn is_new(&self) -> bool {
        self.is_new
    }

    /// Whether the store has an older sequence of the id, which this one replaces when its START has run.
    pub const fn replaces(&self) -> bool {
        !self.replaces.is_empty()
    }

    /// Whether the store has an older sequence of the id, and that is none of these.
    pub fn replaces_another(&self, mut known: impl Iterator<Item = Token>) -> bool {
        self.replaces.first().is_some_and(|old| !known.any(|known| known == *old))
    }

    /// Adds older sequences of this server. The record may have the token of one of them when the START is saved. If
    /// the store had no sequence when the record was made, it has none of these either.
    pub fn also_replaces(&mut self, older: impl Iterator<Item = Token>) {
        if self.replaces() {
            self.replaces.extend(older);
        }
    }

    /// Makes this sequence take over the record of one of these older sequences of this server when its START has run.
    /// If none of them leaves a record, the save of this sequence fails, and its client has to send the START again.
    #[must_use]
    pub fn behind(mut self, older: impl Iterator<Item = Token>) -> Self {
        self.replaces.extend(older);
        self
    }

    pub const fn token(&self) -> Token {
        self.token
    }
}

#[derive(Debug)]
pub enum Claimed {
    /// It belongs to this server now and has this state.
    Taken(Hold, Vec<u8>),
    /// Its END has run, and this is the answer to it; empty if none was kept.
    Ended(Vec<u8>),
    /// It was never here, has expired, or the store has lost it.
    Absent,
    /// It has begun on another server, which has not saved a state of it.
    Unsaved,
    /// Its owner was asked to release it. To be claimed again soon.
    Asked,
}

#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// It starts this sequence ([`Keeper::hold`]), which has no state yet. With `true`, the owner of an older sequence
    /// with its id is asked to release that first, if it lives.
    Begin(&'a Hold, bool),
    /// The sequence has this state. If it is not in the store yet, makes a record, unless there is one.
    Step(&'a Hold, &'a [u8]),
    /// The sequence leaves this server, with this state if the store doesn't have it.
    Release(&'a Hold, Option<&'a [u8]>),
    /// The sequence has ended, and so has the one that it replaces. Keeps the answer to its END, unless that is empty.
    End(&'a Hold, &'a [u8]),
}

#[derive(Debug)]
pub enum Saved {
    /// It is in the store. The sequence belongs to this server, unless it has ended.
    Done(Hold),
    /// The owner of an older sequence was asked to release that. To be tried again soon.
    Asked,
    /// Another server has taken the sequence, or has changed the one that this one replaces. Nothing was saved.
    Moved,
    /// The sequence has ended, on another server.
    Ended,
    /// The record has expired. Nothing was saved.
    Absent,
}

impl Change<'_> {
    const fn hold(&self) -> &Hold {
        match self {
            Change::Begin(hold, _) | Change::Step(hold, _) | Change::Release(hold, _) | Change::End(hold, _) => hold,
        }
    }

    fn operation(&self) -> Op<'_> {
        let hold = self.hold();
        let (token, old) = (hold.token, hold.replaces.as_slice());
        match *self {
            Self::Begin(_, asks) => Op::Start { token, asks },
            Self::Step(_, blob) if hold.replaces() => Op::Replace { old, token, blob },
            Self::Step(_, blob) | Self::Release(_, Some(blob)) if hold.is_new => Op::Restore { token, blob },
            Self::Step(_, blob) => Op::Save { token, blob },
            Self::Release(_, blob) => Op::Release { token, blob },
            Self::End(_, answer) => Op::End { token, old, answer },
        }
    }
}

impl Keeper {
    pub fn new(store: Arc<dyn Store>, space: &str, settings: Settings) -> Self {
        let space = format!("{space}:").into_bytes();
        Self { store, space, settings, older: Vec::new() }
    }

    /// Notes the keepers of older instances of the model in this process. Each must live until its states are saved.
    pub fn follow(&mut self, older: Vec<Weak<Self>>) {
        self.older = older;
    }

    /// Whether an older instance of the model in this process may have states that are not saved yet.
    pub fn follows(&self) -> bool {
        self.older.iter().any(|older| older.strong_count() > 0)
    }

    /// Whether other servers can take a sequence while this one runs.
    pub fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    /// A sequence that begins here. The store doesn't have it before [`Change::Begin`] or [`Change::Step`].
    pub fn hold(&self, id: &[u8]) -> Result<Hold, StoreError> {
        Ok(Hold {
            key: [self.space.as_slice(), id].concat(),
            token: Token::random()?,
            confirmed: Instant::now(),
            is_new: true,
            replaces: Vec::new(),
        })
    }

    /// Makes the records of sequences whose STARTs are going to run here. If the store has a state of an older
    /// sequence, that state stays until [`Change::Step`] or [`Change::End`] of the new sequence. Both fail if the store
    /// has a state of a third sequence by then. A record without a state is replaced, because a server that was killed
    /// may have left it. So the caller must not ask for a second record of an id before it has saved the first
    /// ([`Hold::behind`]).
    pub fn reserve(&self, holds: Vec<Hold>) -> Result<Vec<Hold>, StoreError> {
        let operations = holds.iter().map(|hold| (hold.key.as_slice(), Op::Reserve { token: hold.token }));
        let replies = self.apply(operations.collect())?;
        let reserved = |(hold, reply)| match reply {
            Reply::Done => Ok(Hold { is_new: false, ..hold }),
            Reply::Lives(old) => Ok(Hold { replaces: vec![old], ..hold }),
            _ => Err(StoreError::unexpected()),
        };
        holds.into_iter().zip(replies).map(reserved).collect()
    }

    pub fn probe(&self) -> Result<(), StoreError> {
        // No sequence has this id.
        self.claim(&[(b"load", false)]).map(drop)
    }

    /// Takes sequences, whichever server owns them. Of those with `true`, an owner that lives is asked first.
    pub fn claim(&self, ids: &[(&[u8], bool)]) -> Result<Vec<Claimed>, StoreError> {
        let hold = |(id, _): &(&[u8], bool)| Ok(Hold { is_new: false, ..self.hold(id)? });
        let holds: Vec<_> = ids.iter().map(hold).collect::<Result<_, StoreError>>()?;
        let operations = holds.iter().zip(ids);
        let operations =
            operations.map(|(hold, &(_, asks))| (hold.key.as_slice(), Op::Resume { token: hold.token, asks }));
        let replies = self.apply(operations.collect())?;
        let claimed = |(hold, reply)| match reply {
            Reply::Taken(blob) => Ok(Claimed::Taken(hold, blob)),
            Reply::Ended => Ok(Claimed::Ended(Vec::new())),
            Reply::Answered(answer) => Ok(Claimed::Ended(answer)),
            Reply::Absent => Ok(Claimed::Absent),
            Reply::Unsaved => Ok(Claimed::Unsaved),
            Reply::Asked => Ok(Claimed::Asked),
            Reply::Done | Reply::Moved | Reply::Lives(_) => Err(StoreError::unexpected()),
        };
        holds.into_iter().zip(replies).map(claimed).collect()
    }

    /// Which of these sequences are still this server's. One that the store has lost is: [`Keeper::save`] brings it
    /// back.
    pub fn check(&self, holds: &[&Hold]) -> Result<Vec<bool>, StoreError> {
        // In a folder, only a newer instance of the model could take them, and it waits until this one is gone.
        if !self.store.is_shared() {
            return Ok(vec![true; holds.len()]);
        }
        let check = |hold: &&'_ Hold| Op::Check { token: hold.token };
        let replies = self.apply(holds.iter().map(|hold| (hold.key.as_slice(), check(hold))).collect())?;
        let is_ours = |(hold, reply): (&&Hold, Reply)| match reply {
            Reply::Done => true,
            Reply::Absent => self.can_restore(hold),
            _ => false,
        };
        Ok(holds.iter().zip(replies).map(is_ours).collect())
    }

    pub fn save(&self, changes: &[Change<'_>]) -> Result<Vec<Saved>, StoreError> {
        // The time is taken before the store is asked, because an END of another server may come right after its
        // answer.
        let confirmed = Instant::now();
        let operations = changes.iter().map(|change| (change.hold().key.as_slice(), change.operation()));
        let mut replies = self.apply(operations.collect())?;
        self.restore_lost(changes, &mut replies)?;
        let done = |change: &Change<'_>| {
            let Hold { key, token, .. } = change.hold();
            Ok(Saved::Done(Hold { key: key.clone(), token: *token, confirmed, is_new: false, replaces: Vec::new() }))
        };
        let saved = |(change, reply): (&Change<'_>, Reply)| match (reply, change) {
            (Reply::Done, _) => done(change),
            // It is over in either case.
            (Reply::Ended | Reply::Absent, Change::End(..)) => done(change),
            (Reply::Moved, _) => Ok(Saved::Moved),
            (Reply::Ended, _) => Ok(Saved::Ended),
            (Reply::Absent, _) => Ok(Saved::Absent),
            (Reply::Asked, _) => Ok(Saved::Asked),
            (Reply::Taken(_) | Reply::Answered(_) | Reply::Unsaved | Reply::Lives(_), _) => {
                Err(StoreError::unexpected())
            }
        };
        changes.iter().zip(replies).map(saved).collect()
    }

    /// Makes the records again that the store has lost.
    fn restore_lost(&self, changes: &[Change<'_>], replies: &mut [Reply]) -> Result<(), StoreError> {
        let mut lost = Vec::new();
        for (at, change) in changes.iter().enumerate() {
            if let Change::Step(hold, blob) | Change::Release(hold, Some(blob)) = *change
                && replies[at] == Reply::Absent
                && self.can_restore(hold)
            {
                lost.push((at, (hold.key.as_slice(), Op::Restore { token: hold.token, blob })));
            }
        }
        let restored = self.apply(lost.iter().map(|&(_, operation)| operation).collect())?;
        for ((at, _), reply) in lost.into_iter().zip(restored) {
            replies[at] = reply;
        }
        Ok(())
    }

    /// Hears what other servers ask this one for, and calls `hear` with the id of each sequence, and with `None` now
    /// and then. Returns when that returns false, or at once if there are no other servers.
    pub fn listen(&self, hear: &mut dyn FnMut(Option<&[u8]>) -> bool) -> Result<(), StoreError> {
        self.store.listen(&mut |key| match key {
            Some(key) => key.strip_prefix(self.space.as_slice()).is_none_or(|id| hear(Some(id))),
            None => hear(None),
        })
    }

    /// Whether an absent record can only be one that the store has lost.
    fn can_restore(&self, hold: &Hold) -> bool {
        // After `confirmed`, an END of another server would have left `Record::Ended`, which stays for the same time.
        hold.confirmed.elapsed() < self.settings.ttl
    }

    fn apply(&self, operations: Vec<(&[u8], Op<'_>)>) -> Result<Vec<Reply>, StoreError> {
        // A folder would sync the disk for nothing.
        if operations.is_empty() {
            return Ok(Vec::new());
        }
        let replies = self.store.apply(&operations)?;
        if replies.len() == operations.len() { Ok(replies) } else { Err(StoreError::unexpected()) }
    }
}
