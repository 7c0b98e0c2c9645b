//! A store in Valkey or Redis (6.2 or newer).
//!
//! A record is two keys of one slot: `o{KEY}`, a hash with the token of the owner (empty: ended; then it has the answer
//! to the END, too), and `b{KEY}TOKEN`, the blob. The token is part of the blob's key, so a save is one plain command,
//! `SET … XX`, which finds nothing after another server has taken the sequence. Operations that depend on the record
//! are scripts. They are sent as text, because a store forgets its scripts when it restarts.

use std::sync::Arc;
use std::time::Instant;

use redis::{Cmd, Value, cmd};

use crate::cluster::Cluster;
use crate::location::RedisLocation;
use crate::record::{Op, Reply, Settings, Store, StoreError, Token};
use crate::server::{Connector, Server};

/// The limit of a string in Valkey and Redis (`proto-max-bulk-len`).
const MOST_BYTES: usize = 512 << 20;

// KEYS: the owner's, the blobs' without token. ARGV: token, milliseconds, blob, name of this server or nothing, flag,
// and tokens that the record may have. A server whose process has ended no longer hears its channel.
//
// A caller that finds a record ended may answer its client with that, and WAIT waits only for the last write of its own
// connection. So RESUME and END write in this case, too: a first END whose WAIT has failed may be on no replica yet.
// The write extends the life of the record.
//
// UNLINK, because DEL would let all clients wait while the memory of a large state is freed.

/// The end of the scripts that write a state with the token of its owner.
macro_rules! written {
    () => {
        "redis.call('SET', KEYS[2] .. ARGV[1], ARGV[3], 'PX', ARGV[2])
redis.call('HSET', KEYS[1], 't', ARGV[1], 'o', ARGV[4], 'a', '')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'done'"
    };
}

const START: &str = concat!(
    "local t = redis.call('HGET', KEYS[1], 't')
local o = redis.call('HGET', KEYS[1], 'o')
if ARGV[5] == '1' and t and t ~= '' and o and o ~= '' and o ~= ARGV[4]
  and redis.call('PUBLISH', 'stateful:' .. o, KEYS[1]) > 0 then
  return 'asked'
end
if t and t ~= '' then redis.call('UNLINK', KEYS[2] .. t) end
",
    written!()
);
const RESERVE: &str = concat!(
    "local t = redis.call('HGET', KEYS[1], 't')
if t and t ~= '' then
  if redis.call('STRLEN', KEYS[2] .. t) > 0 then return {t} end
  redis.call('UNLINK', KEYS[2] .. t)
end
",
    written!()
);
const REPLACE: &str = concat!(
    "local t = redis.call('HGET', KEYS[1], 't')
if not t then return 'absent' end
if t ~= '' then
  if redis.call('EXISTS', KEYS[2] .. t) == 0 then return 'absent' end
  local known = t == ARGV[1]
  for i = 6, #ARGV do known = known or t == ARGV[i] end
  if not known then return 'moved' end
  redis.call('UNLINK', KEYS[2] .. t)
end
",
    written!()
);
const RESUME: &str = "local t = redis.call('HGET', KEYS[1], 't')
if not t then return 'absent' end
if t == '' then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {'ended', redis.call('HGET', KEYS[1], 'a') or ''}
end
local from, to = KEYS[2] .. t, KEYS[2] .. ARGV[1]
if redis.call('EXISTS', from) == 0 then return 'absent' end
local o = redis.call('HGET', KEYS[1], 'o')
if ARGV[5] == '1' and o and o ~= '' and o ~= ARGV[4] and redis.call('PUBLISH', 'stateful:' .. o, KEYS[1]) > 0 then
  return 'asked'
end
if redis.call('STRLEN', from) == 0 then return 'unsaved' end
redis.call('RENAME', from, to)
redis.call('HSET', KEYS[1], 't', ARGV[1], 'o', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', to, ARGV[2])
return {redis.call('GET', to)}";
const RESTORE: &str = concat!(
    "local t = redis.call('HGET', KEYS[1], 't')
if t == '' then return 'ended' end
if t and t ~= ARGV[1] and redis.call('EXISTS', KEYS[2] .. t) == 1 then return 'moved' end
",
    written!()
);
const RELEASE: &str = "local t = redis.call('HGET', KEYS[1], 't')
if not t then return 'absent' end
if t == '' then return 'ended' end
local blob = KEYS[2] .. t
if redis.call('EXISTS', blob) == 0 then return 'absent' end
if t ~= ARGV[1] then return 'moved' end
if ARGV[5] == '1' then redis.call('SET', blob, ARGV[3]) end
redis.call('HSET', KEYS[1], 'o', '')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', blob, ARGV[2])
return 'done'";
const END: &str = "local t = redis.call('HGET', KEYS[1], 't')
if not t then return 'absent' end
if t == '' then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 'ended'
end
local blob = KEYS[2] .. t
if redis.call('EXISTS', blob) == 0 then return 'absent' end
local known = t == ARGV[1]
for i = 6, #ARGV do known = known or t == ARGV[i] end
if not known then return 'moved' end
redis.call('UNLINK', blob)
redis.call('HSET', KEYS[1], 't', '', 'a', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'done'";

/// A store in Valkey or Redis.
pub struct RedisStore {
    servers: Servers,
    settings: Settings,
}

enum Servers {
    /// All on one server, or on the one that sentinels name.
    One(Box<Server>),
    Cluster(Cluster),
}

impl RedisStore {
    pub fn new(location: RedisLocation, settings: Settings) -> Self {
        let connector = Arc::new(Connector::new(location, settings.timeout));
        let servers = match connector.cluster() {
            Some(_) => Servers::Cluster(Cluster::new(connector, settings.replicas)),
            None => Servers::One(Box::new(Server::new(connector, None, settings.replicas))),
        };
        Self { servers, settings }
    }

    /// Sends commands together, each to the server that has its key. If there is one that writes, waits for replicas.
    fn send(&self, commands: &[(&[u8], Cmd)], has_writes: bool) -> Result<Vec<Value>, StoreError> {
        let (replies, connector) = match &self.servers {
            Servers::One(server) => {
                let commands: Vec<_> = commands.iter().map(|(_, command)| command).collect();
                let until = Instant::now() + self.settings.timeout;
                (server.send(&commands, has_writes, until)?.replies(None)?, &server.connector)
            }
            Servers::Cluster(cluster) => (cluster.send(commands, has_writes)?, &cluster.connector),
        };
        let read = |reply: Value| reply.extract_error().map_err(|error| connector.failed(&error));
        replies.into_iter().map(read).collect()
    }

    /// Reads the records to find out why saves and checks failed. Their replies say only that something is not as
    /// expected.
    fn explain_unsaved(&self, operations: &[(&[u8], Op<'_>)], replies: &mut [Reply]) -> Result<(), StoreError> {
        let unsaved = |(reply, of): &(usize, &(&[u8], Op<'_>))| {
            replies[*reply] == Reply::Absent && matches!(of.1, Op::Save { .. } | Op::Check { .. })
        };
        let unsaved: Vec<_> = operations.iter().enumerate().filter(unsaved).collect();
        if unsaved.is_empty() {
            return Ok(());
        }
        let commands: Vec<_> = unsaved.iter().map(|&(_, &(key, _))| (key, Keys::new(key).token())).collect();
        for ((at, (_, operation)), value) in unsaved.into_iter().zip(self.send(&commands, false)?) {
            replies[at] = match (value, operation) {
                (Value::BulkString(token), _) if token.is_empty() => Reply::Ended,
                (Value::BulkString(of_record), Op::Save { token, .. } | Op::Check { token })
                    if of_record != token.to_string().as_bytes() =>
                {
                    Reply::Moved
                }
                // Or the record has lost its blob.
                _ => Reply::Absent,
            };
        }
        Ok(())
    }
}

impl Store for RedisStore {
    fn apply(&self, operations: &[(&[u8], Op<'_>)]) -> Result<Vec<Reply>, StoreError> {
        let ttl = self.settings.ttl.as_millis().to_string();
        let server = self.settings.server.map_or_else(String::new, |server| server.to_string());
        let mut all = Vec::new();
        for (key, operation) in operations {
            let keys = Keys::new(key);
            let script = |text: &str, token: Token, blob: &[u8], flag: bool, old: &[Token]| {
                let mut command = cmd("EVAL");
                command.arg(text).arg(2).arg(&keys.owner).arg(&keys.blobs).arg(token.to_string()).arg(&ttl);
                command.arg(blob).arg(&server).arg(u8::from(flag));
                old.iter().for_each(|old| _ = command.arg(old.to_string()));
                command
            };
            let command = match *operation {
                Op::Start { token, asks } => script(START, token, b"", asks, &[]),
                Op::Reserve { token } => script(RESERVE, token, b"", false, &[]),
                Op::Replace { old, token, blob } => script(REPLACE, token, check_size(blob)?, false, old),
                Op::Restore { token, blob } => script(RESTORE, token, check_size(blob)?, false, &[]),
                Op::Resume { token, asks } => script(RESUME, token, b"", asks, &[]),
                Op::Release { token, blob } => {
                    script(RELEASE, token, check_size(blob.unwrap_or_default())?, blob.is_some(), &[])
                }
                Op::End { token, old, answer } => script(END, token, check_size(answer)?, false, old),
                Op::Check { .. } => keys.token(),
                Op::Save { token, blob } => {
                    let mut save = cmd("SET");
                    save.arg(keys.blob(&token.to_string())).arg(check_size(blob)?).arg("XX").arg("PX").arg(&ttl);
                    save
                }
            };
            all.push((*key, command));
            if let Op::Save { .. } = operation {
                // The owner's key has to live for as long as the blob, which SET has extended.
                let mut live = cmd("PEXPIRE");
                live.arg(&keys.owner).arg(&ttl);
                all.push((*key, live));
            }
        }
        let has_writes = operations.iter().any(|(_, operation)| !matches!(operation, Op::Check { .. }));
        let mut values = self.send(&all, has_writes)?.into_iter();
        let mut replies = Vec::new();
        for (_, operation) in operations {
            let value = values.next().ok_or_else(StoreError::unexpected)?;
            if let Op::Save { .. } = operation {
                // The reply to PEXPIRE. The save itself has said whether the record is still there.
                values.next();
            }
            replies.push(read(operation, value)?);
        }
        self.explain_unsaved(operations, &mut replies)?;
        Ok(replies)
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn listen(&self, hear: &mut dyn FnMut(Option<&[u8]>) -> bool) -> Result<(), StoreError> {
        let Some(server) = self.settings.server else { return Ok(()) };
        let channel = format!("stateful:{server}");
        let hear =
            &mut |message: Option<&[u8]>| hear(message.and_then(|owner| owner.strip_prefix(b"o{")?.strip_suffix(b"}")));
        match &self.servers {
            Servers::One(server) => server.listen(&channel, hear),
            Servers::Cluster(cluster) => cluster.listen(&channel, hear),
        }
    }
}

/// The keys of a record. They are in one slot of a cluster.
struct Keys {
    owner: Vec<u8>,
    blobs: Vec<u8>,
}

impl Keys {
    fn new(key: &[u8]) -> Self {
        let with = |first: &[u8]| [first, b"{", key, b"}"].concat();
        Self { owner: with(b"o"), blobs: with(b"b") }
    }

    fn blob(&self, token: &str) -> Vec<u8> {
        [self.blobs.as_slice(), token.as_bytes()].concat()
    }

    fn token(&self) -> Cmd {
        Cmd::hget(&self.owner, "t")
    }
}

fn read(operation: &Op<'_>, value: Value) -> Result<Reply, StoreError> {
    match (operation, value) {
        (Op::Save { .. }, Value::Okay) => Ok(Reply::Done),
        (Op::Check { token }, Value::BulkString(of_record)) if of_record == token.to_string().as_bytes() => {
            Ok(Reply::Done)
        }
        (Op::Save { .. } | Op::Check { .. }, _) => Ok(Reply::Absent),
        (Op::Resume { .. }, Value::Array(mut values)) => match (values.len(), values.pop()) {
            (1, Some(Value::BulkString(blob))) => Ok(Reply::Taken(blob)),
            (2, Some(Value::BulkString(answer))) if answer.is_empty() => Ok(Reply::Ended),
            (2, Some(Value::BulkString(answer))) => Ok(Reply::Answered(answer)),
            _ => Err(StoreError::unexpected()),
        },
        (Op::Reserve { .. }, Value::Array(mut values)) => match values.pop() {
            Some(Value::BulkString(token)) => Ok(Reply::Lives(Token::read(&token).ok_or_else(StoreError::unexpected)?)),
            _ => Err(StoreError::unexpected()),
        },
        (_, Value::BulkString(word)) => match word.as_slice() {
            b"done" => Ok(Reply::Done),
            b"moved" => Ok(Reply::Moved),
            b"ended" => Ok(Reply::Ended),
            b"absent" => Ok(Reply::Absent),
            b"unsaved" => Ok(Reply::Unsaved),
            b"asked" => Ok(Reply::Asked),
            _ => Err(StoreError::unexpected()),
        },
        _ => Err(StoreError::unexpected()),
    }
}

fn check_size(blob: &[u8]) -> Result<&[u8], StoreError> {
    let bytes = blob.len();
    if bytes > MOST_BYTES { Err(StoreError::TooLarge { bytes, most: MOST_BYTES }) } else { Ok(blob) }
}
