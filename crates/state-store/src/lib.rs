//! A sequence's state outside its server, so that another server can go on with it.
//!
//! A record belongs to one sequence. It contains a random *token* and the bytes of a state (the *blob*). The server that knows
//! the token owns the sequence: each save names the token, and the store refuses the save if the record has another one by
//! then. To take a sequence, a server gives its record a new token, in one atomic operation ([`Op::Resume`]). So there is one
//! writer, even if the old owner doesn't know that it has lost the sequence, and no clock is needed. A server that saves late
//! leaves its name in its records, so that others ask it for the newest state before they take a sequence. An END leaves a record
//! without a blob, which distinguishes a late save of an old owner from a record that the store has lost.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | [`keeper`] | the protocol: what a server does with sequences that it owns or wants | record |
//! | [`mod@file`] | a store in a folder of this machine | record |
//! | [`redis`] | a store in Valkey or Redis: what operations are there | cluster, server, connector, location, record |
//! | [`cluster`] | which server of a cluster has a record | server, connector, location, record |
//! | [`server`] | one server, and the connections to it | connector, location, record |
//! | [`connector`] | connections to Valkey or Redis, with TLS or through sentinels | location, record |
//! | [`location`] | where a store is, as an operator writes it | record |
//! | [`record`] | records, the operations on them, and the interface of a store | |
//!
//! Rules:
//! - A store applies each operation completely or not at all. After an error, the caller can't know whether it was applied,
//!   so it forgets what it knows of these sequences and asks the store again.
//! - A record expires when it has not been written for [`Settings::ttl`].
//! - No error, log line or `Debug` text has a password.
//!
//! Not for: what a blob means, threads, or when to save.

mod cluster;
mod connector;
mod file;
mod keeper;
mod location;
mod record;
mod redis;
mod server;

use std::sync::Arc;

pub use keeper::{Change, Claimed, Hold, Keeper, Saved};
pub use location::{BadLocation, Location};
pub use record::{Op, Record, Reply, Settings, Store, StoreError, Token};

/// Opens a store. One on the network is reached when it is used first.
pub fn open(location: &Location, settings: Settings) -> Result<Arc<dyn Store>, StoreError> {
    Ok(match location {
        Location::File(folder) => Arc::new(file::FileStore::open(folder, settings)?),
        Location::Redis(location) => Arc::new(redis::RedisStore::new(location.as_ref().clone(), settings)),
    })
}
