//! One server of Valkey or Redis: its connections, with TLS or to the primary that sentinels name, and what is sent
//! over them.
//!
//! Passwords and certificates are read, and the sentinels asked, for each connection. So a change of any of them needs
//! no restart. The system limits how long the look-up of a name takes, and a name with several addresses may take the
//! whole time for each. After an error, a connection is not used again, because late replies would be taken for those
//! of other commands. Not for: what commands mean, and which server has a key.

use std::error::Error;
use std::fs;
use std::io;
use std::mem;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, Cmd, Connection, ConnectionAddr, ErrorKind, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo, RedisError, ServerErrorKind, TlsCertificates, Value, cmd,
};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::location::{Address, Host, Login, RedisLocation, Tls};
use crate::record::StoreError;

/// Time between two attempts to connect, so that a store that is down does not make each request wait.
pub const RETRY_AFTER: Duration = Duration::from_millis(100);
/// How long a thread that listens waits for a message.
pub const PAUSE: Duration = Duration::from_millis(100);
/// Waits or messages after which its connection is tested.
pub const PAUSES_UNTIL_TEST: u32 = 10;
/// Connections, so that one operation that waits holds up no others.
const LINKS: usize = 4;
/// How many of several servers are asked, before that counts as an error.
const MOST_ASKED: usize = 3;
/// A wait of no time at all would be an error.
const SHORTEST: Duration = Duration::from_millis(1);

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

/// Makes connections to where a location says.
pub struct Connector {
    location: RedisLocation,
    /// The longest time to wait for an answer.
    pub timeout: Duration,
    /// Which sentinel is asked first.
    first: AtomicUsize,
}

impl Connector {
    pub fn new(location: RedisLocation, timeout: Duration) -> Self {
        if location.tls.is_some() {
            static INSTALLED: Once = Once::new();
            // An error only says that there is one.
            INSTALLED.call_once(|| _ = rustls::crypto::ring::default_provider().install_default());
        }
        Self { location, timeout, first: AtomicUsize::new(0) }
    }

    /// Connects to the store, until this time. Through sentinels, that is the time for their answer, and the primary
    /// may take [`Connector::timeout`] in addition.
    fn connect(&self, until: Instant) -> Result<Connection, StoreError> {
        match &self.location.address {
            Address::Network(host) => self.connect_to(host, until),
            Address::Socket(path) => self.ready(self.log_in(ConnectionAddr::Unix(path.clone()), until)?),
            Address::Sentinels(sentinels, name) => self.connect_to_primary(sentinels, name, until),
            // Each of its servers has a host of its own.
            Address::Cluster(_) => Err(StoreError::unexpected()),
        }
    }

    /// Why a command failed. The errors of redis never have a command's arguments, so no blob and no password.
    pub fn failed(&self, error: &RedisError) -> StoreError {
        let text = error.to_string();
        if let Some(tls) = &self.location.tls
            && is_of_tls(error)
        {
            let file = |path: &Option<_>| path.as_deref().map(|path: &Path| path.display().to_string());
            let authorities = file(&tls.authorities).unwrap_or_else(|| "the certificates of this system".to_owned());
            let own = file(&tls.certificate).unwrap_or_else(|| "none".to_owned());
            let files = format!("its certificate is checked with {authorities}; certificate of this server: {own}");
            return StoreError::Denied(format!("TLS: {text} ({files})"));
        }
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        match error.kind() {
            ErrorKind::AuthenticationFailed => StoreError::Denied(text),
            ErrorKind::Server(ServerErrorKind::NoPerm) => StoreError::Denied(text),
            // By words as well, because an error of a command within a script is inside of the script's own.
            _ if has(&["NOAUTH", "WRONGPASS", "NOPERM", "ACL failure"]) => StoreError::Denied(text),
            ErrorKind::Server(
                ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::TryAgain,
            ) => StoreError::Refuses(text),
            _ if has(&["OOM", "MISCONF", "NOREPLICAS", "READONLY", "LOADING"]) => StoreError::Refuses(text),
            ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask | ServerErrorKind::ClusterDown) => {
                self.of_cluster(text)
            }
            _ if has(&["cluster support disabled"]) => {
                let scheme = self.scheme();
                StoreError::Denied(format!("it is not a server of a cluster, write '{scheme}://HOST:PORT': {text}"))
            }
            _ if error.is_timeout() => StoreError::Unreachable("it did not answer in time".to_owned()),
            _ => StoreError::Unreachable(text),
        }
    }

    /// A server of a cluster refuses a slot. Only a location of a cluster can reach all slots.
    fn of_cluster(&self, text: String) -> StoreError {
        if self.cluster().is_some() {
            StoreError::Refuses(text)
        } else {
            let scheme = self.scheme();
            StoreError::Denied(format!("it is a server of a cluster, write '{scheme}+cluster://HOST:PORT': {text}"))
        }
    }

    const fn scheme(&self) -> &'static str {
        if self.location.tls.is_some() { "rediss" } else { "redis" }
    }

    /// The servers that the location names, if they are of a cluster.
    pub fn cluster(&self) -> Option<&[Host]> {
        if let Address::Cluster(hosts) = &self.location.address { Some(hosts) } else { None }
    }

    /// Connects to this server of a cluster, or to this primary.
    fn connect_to(&self, host: &Host, until: Instant) -> Result<Connection, StoreError> {
        self.ready(self.log_in(self.network(host), until)?)
    }

    fn log_in(&self, address: ConnectionAddr, until: Instant) -> Result<Connection, StoreError> {
        self.open(address, &self.location.login, self.location.database, until)
    }

    /// Asks the sentinels for the primary. A sentinel that is wrong is asked last the next time.
    fn connect_to_primary(&self, sentinels: &[Host], name: &str, until: Instant) -> Result<Connection, StoreError> {
        let (at, primary) = self.ask_sentinels(sentinels, name, until)?;
        let until = Instant::now() + self.timeout;
        let connection = self.log_in(self.network(&primary), until);
        let connection = connection.and_then(|connection| self.ready(self.check_role(connection, until)?));
        connection.map_err(|error| {
            self.first.store(at + 1, Ordering::Relaxed);
            named(error, |text| format!("primary {primary}, as sentinel {} says: {text}", sentinels[at]))
        })
    }

    /// Asks some sentinels one after the other. Also returns the number of the one that has answered.
    fn ask_sentinels(&self, sentinels: &[Host], name: &str, until: Instant) -> Result<(usize, Host), StoreError> {
        let first = self.first.load(Ordering::Relaxed);
        let hosts = sentinels.iter().cycle().skip(first % sentinels.len().max(1)).take(sentinels.len());
        let hosts: Vec<_> = hosts.collect();
        let answer = ask_in_turn("sentinel", &hosts, until, |host, until| self.ask_sentinel(host, name, until));
        // The next call starts with the sentinel that has answered. If none has, it starts with the ones that were not
        // asked.
        let asked = answer.as_ref().map_or(MOST_ASKED.min(hosts.len()), |(asked, _)| *asked);
        let next = (first + asked) % sentinels.len().max(1);
        self.first.store(next, Ordering::Relaxed);
        answer.map(|(_, primary)| (next, primary))
    }

    fn ask_sentinel(&self, sentinel: &Host, name: &str, until: Instant) -> Result<Host, StoreError> {
        let failed = |error: RedisError| self.failed(&error);
        let mut connection = self.open(self.network(sentinel), &self.location.sentinel_login, 0, until)?;
        connection.set_read_timeout(Some(left_until(until))).map_err(failed)?;
        let mut ask = cmd("SENTINEL");
        ask.arg("get-master-addr-by-name").arg(name);
        let address: Option<(String, u16)> = ask.query(&mut connection).map_err(failed)?;
        let unknown = || StoreError::Denied(format!("it knows no primary with the name '{name}'"));
        let (name, port) = address.ok_or_else(unknown)?;
        Ok(Host { name, port })
    }

    /// During a fail-over, a sentinel can still name the old primary, or already name one that is still a replica.
    fn check_role(&self, mut connection: Connection, until: Instant) -> Result<Connection, StoreError> {
        let failed = |error: RedisError| self.failed(&error);
        connection.set_read_timeout(Some(left_until(until))).map_err(failed)?;
        match cmd("ROLE").query(&mut connection).map_err(failed)? {
            Value::Array(role) if matches!(role.first(), Some(Value::BulkString(role)) if role == b"master") => {
                Ok(connection)
            }
            _ => Err(StoreError::Refuses("it is a replica, or a fail-over has not ended".to_owned())),
        }
    }

    fn network(&self, host: &Host) -> ConnectionAddr {
        let Host { name, port } = host.clone();
        match &self.location.tls {
            Some(_) => ConnectionAddr::TcpTls { host: name, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(name, port),
        }
    }

    fn open(
        &self,
        address: ConnectionAddr,
        login: &Login,
        database: i64,
        until: Instant,
    ) -> Result<Connection, StoreError> {
        let failed = |error: RedisError| self.failed(&error);
        let mut of_redis = RedisConnectionInfo::default()
            .set_db(database)
            .set_protocol(ProtocolVersion::RESP2)
            // The command for it came with Redis 7.2, and 6.2 is enough for a store.
            .set_skip_set_lib_name();
        if let Some(user) = &login.user {
            of_redis = of_redis.set_username(user);
        }
        if let Some(password) = login.password()? {
            of_redis = of_redis.set_password(password);
        }
        let info = address.into_connection_info().map_err(failed)?.set_redis_settings(of_redis);
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = match &self.location.tls {
            Some(tls) => Client::build_with_tls(info, certificates(tls)?).map_err(failed)?,
            None => Client::open(info).map_err(failed)?,
        };
        client.get_connection_with_timeout(left_until(until)).map_err(failed)
    }

    /// A connection whose answers may take as long as any other answer.
    fn ready(&self, connection: Connection) -> Result<Connection, StoreError> {
        let failed = |error: RedisError| self.failed(&error);
        connection.set_read_timeout(Some(self.timeout)).map_err(failed)?;
        connection.set_write_timeout(Some(self.timeout)).map_err(failed)?;
        Ok(connection)
    }
}

/// The time until then, for a system call that may wait.
fn left_until(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(SHORTEST)
}

/// Asks some servers one after the other, until one has answered. Also returns its number.
pub fn ask_in_turn<T>(
    kind: &str,
    hosts: &[&Host],
    until: Instant,
    ask: impl Fn(&Host, Instant) -> Result<T, StoreError>,
) -> Result<(usize, T), StoreError> {
    let mut why = StoreError::Unreachable(format!("no {kind} is known"));
    let asked = &hosts[..hosts.len().min(MOST_ASKED)];
    for (at, host) in asked.iter().enumerate() {
        // Each has its part of the time, because a server that is down may not answer at all.
        let left = left_until(until) / u32::try_from(asked.len() - at).unwrap_or(u32::MAX);
        match ask(host, Instant::now() + left) {
            Ok(answer) => return Ok((at, answer)),
            // A wrong password or name tells more than a server that is down.
            Err(_) if matches!(why, StoreError::Denied(_)) => {}
            Err(error) => why = named(error, |text| format!("{kind} {host}: {text}")),
        }
    }
    Err(why)
}

/// Whether a connection must be given up, because the store is a replica since a fail-over.
fn is_of_replica(reply: &Value) -> bool {
    let Value::ServerError(error) = reply else { return false };
    // In a script, the error may be inside of another one.
    matches!(error.code(), "READONLY" | "MASTERDOWN") || error.details().is_some_and(|text| text.contains("READONLY"))
}

/// Whether one of both doesn't accept the other's certificate, or they have no way to encrypt in common.
fn is_of_tls(error: &RedisError) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let is_of_rustls = |cause: &Arc<dyn Error + Send + Sync>| {
        let of_io = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is::<rustls::Error>() || of_io.is_some_and(<dyn Error + Send + Sync>::is::<rustls::Error>)
    };
    cause.is_some_and(is_of_rustls)
        // A certificate that doesn't belong to its key.
        || error.kind() == ErrorKind::InvalidClientConfig && error.to_string().contains("TLS")
}

fn certificates(tls: &Tls) -> Result<TlsCertificates, StoreError> {
    let denied = |path: &Path, why: String| StoreError::Denied(format!("TLS: {}: {why}", path.display()));
    let read = |path: &Path| fs::read(path).map_err(|error| denied(path, error.to_string()));
    let certificates = |path: &Path| {
        let bytes = read(path)?;
        let found = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, pem::Error>>();
        match found.map_err(|error| denied(path, error.to_string()))?.as_slice() {
            [] => Err(denied(path, "it has no certificate in PEM format".to_owned())),
            _ => Ok(bytes),
        }
    };
    let key = |path: &Path| {
        let bytes = read(path)?;
        let is_key = PrivateKeyDer::from_pem_slice(&bytes).is_ok();
        if is_key { Ok(bytes) } else { Err(denied(path, "it has no private key in PEM format".to_owned())) }
    };
    let client_tls = match (&tls.certificate, &tls.key) {
        (Some(of_certificate), Some(of_key)) => {
            Some(ClientTlsConfig { client_cert: certificates(of_certificate)?, client_key: key(of_key)? })
        }
        _ => None,
    };
    Ok(TlsCertificates { client_tls, root_cert: tls.authorities.as_deref().map(certificates).transpose()? })
}

/// The error, with the host that it is of.
pub fn named(error: StoreError, name: impl FnOnce(String) -> String) -> StoreError {
    match error {
        StoreError::Unreachable(why) => StoreError::Unreachable(name(why)),
        StoreError::Refuses(why) => StoreError::Refuses(name(why)),
        StoreError::Denied(why) => StoreError::Denied(name(why)),
        other => other,
    }
}
