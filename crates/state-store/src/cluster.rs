//! A cluster of Valkey or Redis: each of its primaries has the records of some slots.
//!
//! All keys of a record are in one slot, so each operation is one server's. Any server of the cluster tells which
//! primary has a slot. It is asked again when a primary can't be reached, or has given a slot away, or no primary has
//! it. If no server answers, operations go on with what is known, because the primaries that they need may be up.
//!
//! A message reaches every listener of the cluster, but the number of listeners that a server gives is only that of its
//! own. So a listener listens at each primary, and hears each message once for each. It looks for new primaries about
//! once a second.
//!
//! Not for: what commands mean. While a slot is on its way from one server to another, its records can't be written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use redis::{Cmd, FromRedisValue, Value, cmd};

use crate::location::Host;
use crate::record::StoreError;
use crate::server::{Connector, PAUSE, PAUSES_UNTIL_TEST, RETRY_AFTER, Server, ask_in_turn, named};

const SLOTS: u16 = 16384;

pub struct Cluster {
    pub connector: Arc<Connector>,
    replicas: u32,
    servers: Mutex<BTreeMap<Host, Arc<Server>>>,
    primaries: Mutex<Primaries>,
    /// Held by the thread that asks for the primaries.
    asking: Mutex<()>,
    /// Whether a listener has returned that a primary denies it.
    is_denied: AtomicBool,
}

/// Which primary has which slots.
#[derive(Default)]
struct Primaries {
    ranges: Arc<[Range]>,
    is_new: bool,
    asked: Option<Instant>,
    why: Option<StoreError>,
}

struct Range {
    first: u16,
    last: u16,
    primary: Host,
}

impl Cluster {
    pub fn new(connector: Arc<Connector>, replicas: u32) -> Self {
        Self {
            connector,
            replicas,
            servers: Mutex::default(),
            primaries: Mutex::default(),
            asking: Mutex::default(),
            is_denied: AtomicBool::new(false),
        }
    }

    /// Sends commands to the primaries that have these keys, and returns their replies. A command that came to a server
    /// without the key was not done, and is sent once more.
    pub fn send(&self, commands: &[(&[u8], Cmd)], has_writes: bool) -> Result<Vec<Value>, StoreError> {
        let mut replies = vec![Value::Nil; commands.len()];
        let mut groups: BTreeMap<Host, Vec<usize>> = BTreeMap::new();
        let ranges = self.ranges()?;
        for (at, (key, _)) in commands.iter().enumerate() {
            let primary = primary_of(&ranges, slot(key)).inspect_err(|_| self.are_old())?;
            groups.entry(primary.clone()).or_default().push(at);
        }
        let moved = self.send_groups(&groups, commands, has_writes, &mut replies)?;
        if !moved.is_empty() {
            self.are_old();
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
        let (mut sent, until) = (Vec::new(), Instant::now() + self.connector.timeout);
        // In the order of the hosts, because two calls that wait for each other's connections would both fail.
        for (server, group) in servers.iter().zip(groups.values()) {
            let commands: Vec<_> = group.iter().map(|&at| &commands[at].1).collect();
            sent.push(server.send(&commands, has_writes, until));
        }
        let until = Instant::now() + self.connector.timeout;
        let (mut moved, mut failed) = (BTreeMap::<Host, Vec<usize>>::new(), Ok(()));
        for ((host, group), sent) in groups.iter().zip(sent) {
            // After an error, other primaries only get what is left of the time.
            let until = failed.is_err().then_some(until);
            match sent.and_then(|sent| sent.replies(until)) {
                Ok(of_group) => {
                    for (&at, reply) in group.iter().zip(of_group) {
                        if let Some(target) = target_of(&reply, host) {
                            moved.entry(target).or_default().push(at);
                        }
                        if matches!(&reply, Value::ServerError(error) if error.code() == "CLUSTERDOWN") {
                            self.are_old();
                        }
                        replies[at] = reply;
                    }
                }
                Err(error) => {
                    self.are_old();
                    failed = Err(error);
                }
            }
        }
        failed.map(|()| moved)
    }

    /// Hears the messages of a channel, as [`crate::Store::listen`] says. Returns an error the first time that a
    /// primary denies it. Goes on after other errors at a primary, because the caller would miss messages at the others
    /// while it begins again, and operations have the same errors.
    pub fn listen(&self, channel: &str, hear: &mut dyn FnMut(Option<&[u8]>) -> bool) -> Result<(), StoreError> {
        let (ends, listened, denied) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()), Mutex::new(None));
        let (sender, heard) = mpsc::channel::<Vec<u8>>();
        let listen_at = |primary: Host, sender: mpsc::Sender<Vec<u8>>| {
            let hear = &mut |message: Option<&[u8]>| {
                message.is_none_or(|message| sender.send(message.to_vec()).is_ok()) && !ends.load(Ordering::Acquire)
            };
            // One that can't be reached is tried again later.
            if let Err(why @ StoreError::Denied(_)) = self.server(&primary).listen(channel, hear)
                && !self.is_denied.swap(true, Ordering::Relaxed)
            {
                *denied.lock() = Some(named(why, |text| format!("server {primary}: {text}")));
            }
            listened.lock().remove(&primary);
        };
        thread::scope(|scope| {
            let mut run = || {
                loop {
                    self.are_old();
                    let ranges = self.ranges()?;
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
                        if let Some(why) = denied.lock().take() {
                            return Err(why);
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

    fn are_old(&self) {
        self.primaries.lock().is_new = false;
    }

    /// The slots of each primary, as far as they are known. If they may have changed, asks the servers, in one thread
    /// at a time.
    fn ranges(&self) -> Result<Arc<[Range]>, StoreError> {
        let until = Instant::now() + self.connector.timeout;
        if let Some(known) = self.known(false) {
            return known;
        }
        let asking = match self.asking.try_lock() {
            Some(asking) => asking,
            // Another thread asks.
            None => match self.known(true) {
                Some(Ok(known)) => return Ok(known),
                _ => self.asking.try_lock_until(until).ok_or_else(|| no_answer("in time"))?,
            },
        };
        if let Some(known) = self.known(false) {
            return known;
        }
        let known = self.primaries.lock().ranges.clone();
        let asked = self.ask(&known, until);
        let mut primaries = self.primaries.lock();
        primaries.asked = Some(Instant::now());
        match asked {
            Ok(ranges) => {
                primaries.ranges = ranges.into();
                (primaries.is_new, primaries.why) = (true, None);
                let is_known = |host: &Host| primaries.ranges.iter().any(|range| range.primary == *host);
                self.servers.lock().retain(|host, _| is_known(host));
            }
            Err(why) => primaries.why = Some(why),
        }
        // `known` takes the first lock again, and the next thread that waits for the second need not ask any more.
        drop((primaries, asking));
        self.known(true).unwrap_or_else(|| Err(no_answer("yet")))
    }

    /// What is known, or why nothing is. `None` if servers have to be asked first: with `even_old`, only if nothing is
    /// known yet.
    fn known(&self, even_old: bool) -> Option<Result<Arc<[Range]>, StoreError>> {
        let primaries = self.primaries.lock();
        // Without this pause, each operation would ask all servers while some are down.
        let was_asked = primaries.asked.is_some_and(|asked| asked.elapsed() < RETRY_AFTER);
        if !primaries.is_new && !was_asked && !even_old {
            return None;
        }
        match &primaries.why {
            Some(why) if primaries.ranges.is_empty() => Some(Err(why.clone())),
            None if primaries.ranges.is_empty() => None,
            _ => Some(Ok(primaries.ranges.clone())),
        }
    }

    /// Asks some servers one after the other, until one has answered: those that were known as primaries and those that
    /// the operator has named in turn, because all of either may be gone. Each time, it begins with other ones.
    fn ask(&self, known: &[Range], until: Instant) -> Result<Vec<Range>, StoreError> {
        let known: BTreeSet<_> = known.iter().map(|range| &range.primary).collect();
        let of_operator = self.connector.cluster().unwrap_or_default();
        let mut known: Vec<_> = known.into_iter().collect();
        let mut others: Vec<_> = of_operator.iter().filter(|host| !known.contains(host)).collect();
        rotate_at_random(&mut known);
        rotate_at_random(&mut others);
        let longest = known.len().max(others.len());
        let hosts = (0..longest).flat_map(|at| known.get(at).into_iter().chain(others.get(at)));
        let hosts: Vec<_> = hosts.copied().collect();
        ask_in_turn("server", &hosts, until, |host, until| self.ask_server(host, until)).map(|(_, ranges)| ranges)
    }

    fn ask_server(&self, host: &Host, until: Instant) -> Result<Vec<Range>, StoreError> {
        let server = self.server(host);
        let mut question = cmd("CLUSTER");
        question.arg("SLOTS");
        let reply = server.send(&[&question], false, until)?.replies(Some(until))?.pop();
        let reply = reply.unwrap_or_default().extract_error().map_err(|error| self.connector.failed(&error))?;
        let Value::Array(slots) = reply else { return Err(StoreError::unexpected()) };
        let ranges: Vec<_> = slots.into_iter().filter_map(|slots| read_range(slots, host)).collect();
        // It has not joined the cluster yet, or was removed from it.
        let none = || StoreError::Unreachable("it knows no server that has slots".to_owned());
        if ranges.is_empty() { Err(none()) } else { Ok(ranges) }
    }
}

fn no_answer(when: &str) -> StoreError {
    StoreError::Unreachable(format!("no server of the cluster has answered {when}"))
}

fn rotate_at_random<T>(hosts: &mut [T]) {
    // The random start makes servers be asked equally often. Without a random number, the first server is asked first.
    let number = getrandom::u32().unwrap_or_default() as usize;
    if !hosts.is_empty() {
        hosts.rotate_left(number % hosts.len());
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
    // Not with ASK: such a slot is on its way to another server, and its records can't be written meanwhile.
    let (_, target) = error.details().filter(|_| error.code() == "MOVED")?.split_once(' ')?;
    let (name, port) = target.rsplit_once(':')?;
    Some(host_of(name, port.parse().ok()?, asked))
}

fn primary_of(ranges: &[Range], slot: u16) -> Result<&Host, StoreError> {
    let range = ranges.iter().find(|range| (range.first..=range.last).contains(&slot));
    let none = || StoreError::Unreachable(format!("no server of the cluster has slot {slot}"));
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
