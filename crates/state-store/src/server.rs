//! One server of Valkey or Redis: its connections, and what is sent over them.
//!
//! After an error, a connection is not used again, because late replies would be taken for those of other commands. Not
//! for: what commands mean, and which server has a key.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, Connection, RedisError, Value, cmd};

use crate::connector::{Connector, is_of_replica, left_until};
use crate::location::Host;
use crate::record::StoreError;

/// Time between two attempts to connect, so that a store that is down does not make each request wait.
pub const RETRY_AFTER: Duration = Duration::from_millis(100);
/// How long a thread that listens waits for a message.
pub const PAUSE: Duration = Duration::from_millis(100);
/// Waits or messages after which its connection is tested.
pub const PAUSES_UNTIL_TEST: u32 = 10;

/// Connections, so that one operation that waits holds up no others.
const LINKS: usize = 4;

pub struct Server {
    pub connector: Arc<Connector>,
    /// `None`: where the location says.
    host: Option<Host>,
    replicas: u32,
    links: [Mutex<Link>; LINKS],
}

/// Commands on their way. Without [`Sent::replies`], their connection is closed.
pub struct Sent<'a> {
    server: &'a Server,
    link: MutexGuard<'a, Link>,
    /// That of the link, until all replies are read.
    connection: Option<Connection>,
    is_new: bool,
    packed: Vec<u8>,
    count: usize,
    waits: bool,
}

/// A connection, or why there is none.
enum Link {
    Open(Connection),
    Closed { why: StoreError, retry: Instant },
}

impl Server {
    pub fn new(connector: Arc<Connector>, host: Option<Host>, replicas: u32) -> Self {
        let why = || StoreError::Unreachable("not tried yet".to_owned());
        let links = [(); LINKS].map(|()| Mutex::new(Link::Closed { why: why(), retry: Instant::now() }));
        Self { connector, host, replicas, links }
    }

    /// Sends commands together, over a connection that is free or made by `until`. If there is a command that writes,
    /// [`Sent::replies`] also waits for replicas.
    pub fn send(&self, commands: &[&Cmd], has_writes: bool, until: Instant) -> Result<Sent<'_>, StoreError> {
        let waits = has_writes && self.replicas > 0;
        let mut wait = cmd("WAIT");
        // Its reply has to come before we no longer wait for replies.
        wait.arg(self.replicas).arg((self.connector.timeout / 2).as_millis().to_string());
        let mut packed = Vec::new();
        let commands = commands.iter().copied().chain(waits.then_some(&wait));
        let count = commands.map(|command| packed.extend(command.get_packed_command())).count();
        let free = self.links.iter().find_map(Mutex::try_lock);
        let busy = || StoreError::Unreachable("all connections to it wait for answers".to_owned());
        let link = free.or_else(|| self.links[0].try_lock_until(until)).ok_or_else(busy)?;
        let mut sent = Sent { server: self, link, connection: None, is_new: false, packed, count, waits };
        sent.write(until)?;
        Ok(sent)
    }

    /// Hears the messages of a channel, as [`crate::Store::listen`] says.
    pub fn listen(&self, channel: &str, hear: &mut dyn FnMut(Option<&[u8]>) -> bool) -> Result<(), StoreError> {
        let failed = |error: RedisError| self.connector.failed(&error);
        let mut connection = self.connect(Instant::now() + self.connector.timeout)?;
        // The subscription below would ignore that the store denies it.
        cmd("SUBSCRIBE").arg(channel).query::<Value>(&mut connection).map_err(failed)?;
        let mut subscription = connection.as_pubsub();
        loop {
            // Again and again, because a connection that is broken need not show it otherwise.
            subscription.set_read_timeout(Some(self.connector.timeout)).map_err(failed)?;
            subscription.subscribe(channel).map_err(failed)?;
            subscription.set_read_timeout(Some(PAUSE)).map_err(failed)?;
            for _ in 0..PAUSES_UNTIL_TEST {
                let goes_on = match subscription.get_message() {
                    Ok(message) => hear(Some(message.get_payload_bytes())),
                    // Nothing came in time, or a signal interrupted the wait.
                    Err(error) if error.is_io_error() && !error.is_connection_dropped() => hear(None),
                    Err(error) => return Err(failed(error)),
                };
                if !goes_on {
                    return Ok(());
                }
            }
        }
    }

    fn connect(&self, until: Instant) -> Result<Connection, StoreError> {
        match &self.host {
            Some(host) => self.connector.connect_to(host, until),
            None => self.connector.connect(until),
        }
    }

    /// Refuses writes that too few replicas have. The primary has them, so they may be found later.
    fn check_replicas(&self, took: Option<Value>) -> Result<(), StoreError> {
        let wanted = self.replicas;
        match took {
            Some(Value::Int(took)) if took >= i64::from(wanted) => Ok(()),
            Some(Value::Int(took)) => {
                Err(StoreError::Refuses(format!("{took} of {wanted} replicas confirmed the write in time")))
            }
            Some(Value::ServerError(error)) => Err(self.connector.failed(&error.into())),
            _ => Err(StoreError::unexpected()),
        }
    }
}

impl Sent<'_> {
    /// The replies, which may be errors of the server. Waits until `until` before each part that comes, or as long as
    /// for any other answer. If the server has closed the connection since it was used last, sends the commands once
    /// more: each operation can be repeated.
    pub fn replies(mut self, until: Option<Instant>) -> Result<Vec<Value>, StoreError> {
        let replies = match self.read(until) {
            Err(error) if error.is_connection_dropped() && !self.is_new => {
                self.write(until.unwrap_or_else(|| Instant::now() + self.server.connector.timeout))?;
                self.read(until)
            }
            read => read,
        };
        let mut replies = replies.map_err(|error| self.give_up(&error))?;
        // The next connection of a server that has become a replica may go to the new primary.
        let is_of_replica = |reply: &Value| matches!(reply, Value::ServerError(error) if is_of_replica(error));
        if !replies.iter().any(is_of_replica)
            && let Some(connection) = self.connection.take()
        {
            *self.link = Link::Open(connection);
        }
        if self.waits {
            let took = replies.pop();
            // If nothing was written, the reason is among the other replies.
            if !replies.iter().all(|reply| matches!(reply, Value::ServerError(_))) {
                self.server.check_replicas(took)?;
            }
        }
        Ok(replies)
    }

    /// Sends the commands over the connection of the link, or over a new one.
    fn write(&mut self, until: Instant) -> Result<(), StoreError> {
        let closed = Link::Closed { why: StoreError::Unreachable("not tried".to_owned()), retry: Instant::now() };
        match mem::replace(&mut *self.link, closed) {
            Link::Open(mut connection) => match connection.send_packed_command(&self.packed) {
                Ok(()) => {
                    self.connection = Some(connection);
                    return Ok(());
                }
                Err(error) if error.is_connection_dropped() => {}
                Err(error) => return Err(self.give_up(&error)),
            },
            Link::Closed { why, retry } if Instant::now() < retry => {
                *self.link = Link::Closed { why: why.clone(), retry };
                return Err(why);
            }
            Link::Closed { .. } => {}
        }
        self.is_new = true;
        let connection = self.server.connect(until).inspect_err(|why| {
            *self.link = Link::Closed { why: why.clone(), retry: Instant::now() + RETRY_AFTER };
        });
        let connection = self.connection.insert(connection?);
        let written = connection.send_packed_command(&self.packed);
        written.map_err(|error| self.give_up(&error))
    }

    /// Not redis's own pipeline: after a timeout it would wait for the reply to each command that is left.
    fn read(&mut self, until: Option<Instant>) -> Result<Vec<Value>, RedisError> {
        let (connection, timeout) = (&mut self.connection, self.server.connector.timeout);
        if let Some(connection) = connection {
            connection.set_read_timeout(Some(until.map_or(timeout, left_until)))?;
        }
        let mut read = || connection.as_mut().map(Connection::recv_response);
        (0..self.count).filter_map(|_| read()).collect()
    }

    fn give_up(&mut self, error: &RedisError) -> StoreError {
        self.connection = None;
        self.server.connector.failed(error)
    }
}
