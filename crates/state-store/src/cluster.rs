//! A cluster of Valkey or Redis: each of its primaries has the records of some slots.
//!
//! All keys of a record are in one slot, so each operation is one server's. Any server of the cluster tells which primary has
//! a slot. It is asked again when a primary can't be reached or has given a slot away.
//!
//! A message reaches every listener of the cluster, but the number of listeners that a server gives is only that of its own.
//! So a listener listens at each primary, and hears each message once for each. It looks for new primaries about once a
//! second.
//!
//! Not for: what commands mean. While a slot is on its way from one server to another, its records can't be written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use redis::{Cmd, Connection, FromRedisValue, Value, cmd};

use crate::connector::Connector;
use crate::location::Host;
use crate::record::StoreError;
use crate::server::{PAUSE, PAUSES_UNTIL_TEST, RETRY_AFTER, Sent, Server};

const SLOTS: u16 = 16384;

/// The servers of a cluster.
pub struct Cluster {
    connector: Arc<Connector>,
    replicas: u32,
    servers: Mutex<BTreeMap<Host, Arc<Server>>>,
    primaries: Mutex<Primaries>,
}

/// Which primary has which slots.
#[derive(Default)]
struct Primaries {
    ranges: Arc<[Range]>,
    is_old: bool,
    /// When servers were asked, and why none of them answered.
    asked: Option<(Instant, Option<StoreError>)>,
}

/// Slots that follow one another.
struct Range {
    first: u16,
    last: u16,
    primary: Host,
}

impl Cluster {
    /// A cluster that is connected to when it is used first.
    pub fn new(connector: Arc<Connector>, replicas: u32) -> Self {
        let primaries = Primaries { is_old: true, ..Primaries::default() };
        Self { connector, replicas, servers: Mutex::default(), primaries: Mutex::new(primaries) }
    }

    pub fn connector(&self) -> &Connector {
        &self.connector
    }

    /// Sends commands to the primaries that have these keys, and returns their replies. A command that came to a server
    /// without the key was not done, and is sent once more.
    pub fn send(&self, commands: &[(&[u8], Cmd)], has_writes: bool) -> Result<Vec<Value>, StoreError> {
        let mut replies = vec![Value::Nil; commands.len()];
        let mut groups: BTreeMap<Host, Vec<usize>> = BTreeMap::new();
        let ranges = self.ranges()?;
        for (at, (key, _)) in commands.iter().enumerate() {
            groups.entry(primary_of(&ranges, slot(key))?.clone()).or_default().push(at);
        }
        let moved = self.send_groups(&groups, commands, has_writes, &mut replies)?;
        if !moved.is_empty() {
            self.primaries.lock().is_old = true;
            self.send_groups(&moved, commands, has_writes, &mut replies)?;
        }
        Ok(replies)
    }

    /// Returns the commands that belong to other servers.
    fn send_groups(
        &self,
        groups: &BTreeMap<Host, Vec<usize>>,
        commands: &[(&[u8], Cmd)],
        has_writes: bool,
        replies: &mut [Value],
    ) -> Result<BTreeMap<Host, Vec<usize>>, StoreError> {
        let servers: Vec<_> = groups.keys().map(|host| self.server(host)).collect();
        let mut sent = Vec::new();
        // In the order of the hosts, because two calls that wait for each other's connections would wait forever.
        for (server, group) in servers.iter().zip(groups.values()) {
            let commands: Vec<_> = group.iter().map(|&at| &commands[at].1).collect();
            sent.push(server.send(&commands, has_writes));
        }
        let (mut moved, mut failed) = (BTreeMap::<Host, Vec<usize>>::new(), Ok(()));
        for ((host, group), sent) in groups.iter().zip(sent) {
            match sent.and_then(Sent::replies) {
                Ok(of_group) => {
                    for (&at, reply) in group.iter().zip(of_group) {
                        if let Some(target) = target_of(&reply, host) {
                            moved.entry(target).or_default().push(at);
                        }
                        replies[at] = reply;
                    }
                }
                Err(error) => {
                    self.primaries.lock().is_old = true;
                    failed = Err(error);
                }
            }
        }
        failed.map(|()| moved)
    }

    /// Hears the messages of a channel, as [`crate::Store::listen`] says.
    pub fn listen(&self, channel: &str, hear: &mut dyn FnMut(Option<&[u8]>) -> bool) -> Result<(), StoreError> {
        let (ends, listened) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
        let (sender, heard) = mpsc::channel::<Vec<u8>>();
        let listen_at = |primary: Host, sender: mpsc::Sender<Vec<u8>>| {
            let hear = &mut |message: Option<&[u8]>| {
                message.is_none_or(|message| sender.send(message.to_vec()).is_ok()) && !ends.load(Ordering::Acquire)
            };
            // One that can't be reached is tried again later.
            _ = self.server(&primary).listen(channel, hear);
            listened.lock().remove(&primary);
        };
        thread::scope(|scope| {
            let mut run = || {
                loop {
                    self.primaries.lock().is_old = true;
                    let ranges = match self.ranges() {
                        Ok(ranges) => ranges,
                        Err(why) if listened.lock().is_empty() => return Err(why),
                        // Those that listen go on.
                        Err(_) => Arc::default(),
                    };
                    for Range { primary, .. } in ranges.iter() {
                        if listened.lock().insert(primary.clone()) {
                            let (primary, sender) = (primary.clone(), sender.clone());
                            let thread = thread::Builder::new().name("stateful-asks".to_owned());
                            let spawned = thread.spawn_scoped(scope, || listen_at(primary, sender));
                            spawned
                                .map_err(|error| StoreError::Unreachable(format!("no thread can listen: {error}")))?;
                        }
                    }
                    let until = Instant::now() + PAUSE * PAUSES_UNTIL_TEST;
                    while Instant::now() < until {
                        let message = heard.recv_timeout(PAUSE).ok();
                        if !hear(message.as_deref()) {
                            return Ok(());
                        }
                    }
                }
            };
            let ended = run();
            ends.store(true, Ordering::Release);
            ended
        })
    }

    fn server(&self, host: &Host) -> Arc<Server> {
        let new = || Arc::new(Server::new(self.connector.clone(), Some(host.clone()), self.replicas));
        self.servers.lock().entry(host.clone()).or_insert_with(new).clone()
    }

    /// Which primary has which slots, as far as is known. Asks the servers if that may have changed, but not all the time.
    fn ranges(&self) -> Result<Arc<[Range]>, StoreError> {
        let mut primaries = self.primaries.lock();
        match &primaries.asked {
            _ if !primaries.is_old => {}
            Some((asked, None)) if asked.elapsed() < RETRY_AFTER => {}
            Some((asked, Some(why))) if asked.elapsed() < RETRY_AFTER => return Err(why.clone()),
            _ => {
                let asked = self.ask(&primaries.ranges);
                primaries.asked = Some((Instant::now(), asked.as_ref().err().cloned()));
                primaries.ranges = asked?.into();
                primaries.is_old = false;
                let is_known = |host: &Host| primaries.ranges.iter().any(|range| range.primary == *host);
                self.servers.lock().retain(|host, _| is_known(host));
            }
        }
        Ok(primaries.ranges.clone())
    }

    /// Asks the primaries that were known, and then those that the operator has named.
    fn ask(&self, known: &[Range]) -> Result<Vec<Range>, StoreError> {
        let named = self.connector.cluster().unwrap_or_default();
        let known: BTreeSet<_> = known.iter().map(|range| &range.primary).collect();
        let hosts: Vec<_> = known.iter().copied().chain(named.iter().filter(|host| !known.contains(host))).collect();
        let ask = |mut connection: Connection, host: &Host| {
            let slots = cmd("CLUSTER").arg("SLOTS").query(&mut connection);
            let slots: Vec<Value> = slots.map_err(|error| self.connector.failed(&error))?;
            Ok(slots.into_iter().filter_map(|slots| read_range(slots, host)).collect())
        };
        self.connector.first_of(&hosts, "server", self.connector.login(), ask).map(|(_, ranges)| ranges)
    }
}

/// Reads `[FIRST, LAST, [HOST, PORT, ...], ...]`. A server that doesn't know its own name gives none.
fn read_range(slots: Value, asked: &Host) -> Option<Range> {
    let (first, last, primary): (u16, u16, Vec<Value>) = match slots {
        Value::Array(parts) => {
            let mut parts = parts.into_iter();
            let mut number = || parts.next().and_then(|part| u16::from_redis_value(part).ok());
            (number()?, number()?, Vec::from_redis_value(parts.next()?).ok()?)
        }
        _ => return None,
    };
    let mut primary = primary.into_iter();
    let name = primary.next().and_then(|name| String::from_redis_value(name).ok()).unwrap_or_default();
    let port = u16::from_redis_value(primary.next()?).ok()?;
    Some(Range { first, last, primary: host_of(&name, port, asked) })
}

fn host_of(name: &str, port: u16, asked: &Host) -> Host {
    let name = if name.is_empty() || name == "?" { &asked.name } else { name };
    Host { name: name.to_owned(), port }
}

/// Which server has the slot, if the reply says that it is another one.
fn target_of(reply: &Value, asked: &Host) -> Option<Host> {
    let Value::ServerError(error) = reply else { return None };
    let (_, target) = error.details().filter(|_| error.code() == "MOVED")?.split_once(' ')?;
    let (name, port) = target.rsplit_once(':')?;
    Some(host_of(name, port.parse().ok()?, asked))
}

fn primary_of(ranges: &[Range], slot: u16) -> Result<&Host, StoreError> {
    let range = ranges.iter().find(|range| (range.first..=range.last).contains(&slot));
    let none = || StoreError::Refuses(format!("no server of the cluster has slot {slot}"));
    range.map(|range| &range.primary).ok_or_else(none)
}

/// The slot of a record: of the text between the first braces of its keys, as the specification of clusters says.
fn slot(key: &[u8]) -> u16 {
    let text = key.split(|&byte| byte == b'}').next().unwrap_or_default();
    let shift = |sum: u16| if sum & 0x8000 == 0 { sum << 1 } else { (sum << 1) ^ 0x1021 };
    let sum = text.iter().fold(0, |sum, &byte| (0..8).fold(sum ^ (u16::from(byte) << 8), |sum, _| shift(sum)));
    sum % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12182);
        assert_eq!(slot(b"foo}bar"), 12182);
    }
}
