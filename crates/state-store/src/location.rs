//! Where a store is, as an operator writes it.

use std::fmt;
use std::fs;
use std::path::PathBuf;

use crate::record::StoreError;

/// Where a store is, and how this server identifies itself there. Its texts have no password.
#[derive(Clone, PartialEq, Eq)]
pub enum Location {
    File(PathBuf),
    Redis(Box<RedisLocation>),
}

#[derive(Clone, PartialEq, Eq)]
pub struct RedisLocation {
    pub(crate) address: Address,
    pub(crate) database: i64,
    pub(crate) tls: Option<Tls>,
    pub(crate) login: Login,
    pub(crate) sentinel_login: Login,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Network(Host),
    Socket(PathBuf),
    /// Where the sentinels at these hosts say that the primary with this name is.
    Sentinels(Vec<Host>, String),
    /// Servers of a cluster, which know the others.
    Cluster(Vec<Host>),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host {
    pub name: String,
    pub port: u16,
}

/// The files of TLS in PEM format. They are read for each connection, so that they can be changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Certificates of the authorities that may have signed the store's; without it, the system's.
    pub authorities: Option<PathBuf>,
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    pub(crate) user: Option<String>,
    password: Option<Secret>,
}

/// Where a password is. It is read for each connection, so that it can be changed.
#[derive(Clone, PartialEq, Eq)]
enum Secret {
    File(PathBuf),
    Environment(String),
}

/// Why a location is refused. It has nothing of the text that may be a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadLocation(String);

const FORMS: &str = "'file:FOLDER', 'redis://HOST:PORT/DATABASE', 'rediss://HOST:PORT/DATABASE' (TLS), \
                     'redis+sentinel://HOST:PORT,HOST:PORT/NAME', 'redis+cluster://HOST:PORT,HOST:PORT' or 'unix:SOCKET' \
                     is expected";
const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

impl Location {
    pub fn new(text: &str) -> Result<Self, BadLocation> {
        let bad = |why: &str| Err(BadLocation(why.to_owned()));
        let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
        let location = match scheme {
            "file" if rest.is_empty() => return bad("'file:' needs a folder: write 'file:/var/lib/sequences'"),
            // `//` begins a host in the other forms. Here, it would be taken for a part of the path.
            "file" if rest.starts_with("//") => return bad("a folder is written without '//': 'file:/FOLDER'"),
            "file" => return Ok(Self::File(rest.into())),
            "unix" => RedisLocation::of_socket(rest)?,
            "redis" | "redis+sentinel" | "redis+cluster" => RedisLocation::of_hosts(scheme, rest, None)?,
            "rediss" | "rediss+sentinel" | "rediss+cluster" => {
                RedisLocation::of_hosts(scheme, rest, Some(Tls::default()))?
            }
            _ => return bad(FORMS),
        };
        Ok(Self::Redis(Box::new(location)))
    }

    /// Whether replicas of the store can acknowledge a write.
    pub const fn has_replicas(&self) -> bool {
        matches!(self, Self::Redis(_))
    }
}

impl RedisLocation {
    /// Reads `//[USER@]HOST[:PORT][,HOST[:PORT]][/PATH][?OPTIONS]`. The path is a database, the name of a primary that
    /// sentinels know, or nothing.
    fn of_hosts(scheme: &str, rest: &str, tls: Option<Tls>) -> Result<Self, BadLocation> {
        let (user, hosts, path, options) = split(rest)?;
        let (address, database) = match scheme.split_once('+') {
            None => (Address::Network(Host::new(hosts, PORT)?), read_database(path)?),
            Some((_, "sentinel")) => {
                let hosts = Host::several(hosts, SENTINEL_PORT)?;
                if path.is_empty() || path.contains('/') {
                    let why = "the sentinels need the name of the primary, and a database is an option: write \
                               'redis+sentinel://HOST:PORT,HOST:PORT/NAME?db=DATABASE'";
                    return Err(BadLocation(why.to_owned()));
                }
                (Address::Sentinels(hosts, path.to_owned()), 0)
            }
            Some(_) => (Address::Cluster(Host::several(hosts, PORT)?), 0),
        };
        let location = Self { database, ..Self::at(address, tls, user) }.with_options(options)?;
        if matches!(location.address, Address::Cluster(_)) && (!path.is_empty() || location.database != 0) {
            return Err(BadLocation("a cluster has database 0 only: leave the database out".to_owned()));
        }
        Ok(location)
    }

    /// Reads `SOCKET[?OPTIONS]`.
    fn of_socket(rest: &str) -> Result<Self, BadLocation> {
        let (path, options) = split_options(rest);
        if path.is_empty() {
            return Err(BadLocation("'unix:' needs the path of a socket".to_owned()));
        }
        Self::at(Address::Socket(path.into()), None, None).with_options(options)
    }

    fn at(address: Address, tls: Option<Tls>, user: Option<&str>) -> Self {
        let login = Login { user: user.map(str::to_owned), password: None };
        Self { address, database: 0, tls, login, sentinel_login: Login::default() }
    }

    fn with_options(mut self, options: &str) -> Result<Self, BadLocation> {
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            if value.is_empty() {
                return Err(BadLocation(format!("the option '{name}' needs a value")));
            }
            let has_sentinels = matches!(self.address, Address::Sentinels(..));
            // Sentinels have users and passwords of their own.
            let (login, own) = match name.strip_prefix("sentinel_") {
                Some(own @ ("user" | "password_file" | "password_env")) if has_sentinels => {
                    (&mut self.sentinel_login, own)
                }
                _ => (&mut self.login, name),
            };
            match (own, &mut self.tls) {
                ("user", _) => login.user = Some(value.to_owned()),
                ("db", _) => self.database = read_database(value)?,
                ("password_file", _) => login.password = Some(Secret::File(value.into())),
                ("password_env", _) => login.password = Some(Secret::Environment(value.to_owned())),
                ("ca", Some(tls)) => tls.authorities = Some(value.into()),
                ("cert", Some(tls)) => tls.certificate = Some(value.into()),
                ("key", Some(tls)) => tls.key = Some(value.into()),
                ("ca" | "cert" | "key", None) => {
                    return Err(BadLocation(format!(
                        "the option '{name}' is for TLS: write 'rediss' instead of 'redis'"
                    )));
                }
                ("password" | "sentinel_password", _) => return Err(has_password()),
                _ => return Err(self.not_known(name)),
            }
        }
        if let Some(tls) = &self.tls
            && tls.certificate.is_some() != tls.key.is_some()
        {
            return Err(BadLocation("a certificate of this server needs both 'cert=FILE' and 'key=FILE'".to_owned()));
        }
        for (login, of) in [(&self.login, ""), (&self.sentinel_login, "sentinel_")] {
            if login.user.is_some() && login.password.is_none() {
                let why = format!("a user needs '{of}password_file=FILE' or '{of}password_env=NAME'");
                return Err(BadLocation(why));
            }
        }
        Ok(self)
    }

    fn not_known(&self, option: &str) -> BadLocation {
        let mut known = "user, db, password_file, password_env".to_owned();
        if self.tls.is_some() {
            known += ", ca, cert, key";
        }
        if let Address::Sentinels(..) = self.address {
            known += ", sentinel_user, sentinel_password_file, sentinel_password_env";
        }
        BadLocation(format!("the option '{option}' is not known, but these are: {known}"))
    }
}

impl Host {
    /// Reads `HOST[:PORT][,HOST[:PORT]]`.
    fn several(text: &str, default_port: u16) -> Result<Vec<Self>, BadLocation> {
        text.split(',').map(|host| Self::new(host, default_port)).collect()
    }

    /// Reads `HOST[:PORT]`.
    fn new(text: &str, default_port: u16) -> Result<Self, BadLocation> {
        let bad = |why: &str| BadLocation(why.to_owned());
        let (name, port) = match text.rsplit_once(':') {
            // An IPv6 address in brackets has colons of its own.
            Some((host, port)) if !port.ends_with(']') => {
                let port = port.parse().map_err(|_| bad("the port is a number from 1 to 65535"))?;
                (host, port)
            }
            _ => (text, default_port),
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        if name.is_empty() {
            return Err(bad("the host is missing: write 'redis://HOST:PORT'"));
        }
        if name.contains(',') {
            return Err(bad(
                "several hosts are sentinels or a cluster: write 'redis+sentinel://' or 'redis+cluster://'",
            ));
        }
        Ok(Self { name: name.to_owned(), port })
    }
}

impl Login {
    pub(crate) fn password(&self) -> Result<Option<String>, StoreError> {
        let missing = |why: String| StoreError::Denied(format!("no password: {why}"));
        match &self.password {
            None => Ok(None),
            Some(Secret::File(path)) => {
                let read = fs::read_to_string(path);
                let text = read.map_err(|error| missing(format!("{}: {error}", path.display())))?;
                // Editors and `echo` end a file with a line break, which is no part of the password.
                Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
            }
            Some(Secret::Environment(name)) => {
                let value = std::env::var(name);
                value.map(Some).map_err(|_| missing(format!("the environment has no variable {name}")))
            }
        }
    }
}

/// The parts of `//[USER@]HOSTS[/PATH][?OPTIONS]`.
fn split(rest: &str) -> Result<(Option<&str>, &str, &str, &str), BadLocation> {
    let rest = rest.strip_prefix("//").ok_or_else(|| BadLocation(FORMS.to_owned()))?;
    let (place, options) = split_options(rest);
    let (user, place) = match place.rsplit_once('@') {
        Some((user, _)) if user.contains(':') => return Err(has_password()),
        Some((user, place)) => (Some(user).filter(|user| !user.is_empty()), place),
        None => (None, place),
    };
    let (hosts, path) = place.split_once('/').unwrap_or((place, ""));
    Ok((user, hosts, path, options))
}

fn joined(hosts: &[Host]) -> String {
    hosts.iter().map(Host::to_string).collect::<Vec<_>>().join(",")
}

fn split_options(text: &str) -> (&str, &str) {
    text.split_once('?').unwrap_or((text, ""))
}

fn read_database(text: &str) -> Result<i64, BadLocation> {
    match text.parse() {
        _ if text.is_empty() => Ok(0),
        Ok(number) if number >= 0 => Ok(number),
        _ => Err(BadLocation("the database is a number, 0 or more".to_owned())),
    }
}

fn has_password() -> BadLocation {
    let why = "a password does not belong here, because clients can read the configuration of a model: write \
               'password_file=FILE' or 'password_env=NAME' after a '?'";
    BadLocation(why.to_owned())
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(folder) => write!(f, "file:{}", folder.display()),
            Self::Redis(location) => {
                let RedisLocation { address, database, tls, .. } = location.as_ref();
                let scheme = if tls.is_some() { "rediss" } else { "redis" };
                match address {
                    Address::Network(host) => write!(f, "{scheme}://{host}/{database}"),
                    Address::Socket(path) => write!(f, "unix:{}?db={database}", path.display()),
                    Address::Sentinels(hosts, name) => {
                        write!(f, "{scheme}+sentinel://{}/{name}?db={database}", joined(hosts))
                    }
                    Address::Cluster(hosts) => write!(f, "{scheme}+cluster://{}", joined(hosts)),
                }
            }
        }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Location({self})")
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, port } = self;
        if name.contains(':') { write!(f, "[{name}]:{port}") } else { write!(f, "{name}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(location: &str) -> String {
        Location::new(location).map_or_else(|error| error.to_string(), |location| location.to_string())
    }

    #[test]
    fn locations_are_read() {
        let cases = [
            ("file:/var/lib/x y", "file:/var/lib/x y"),
            ("file:relative", "file:relative"),
            ("redis://store", "redis://store:6379/0"),
            ("redis://store:7000/3", "redis://store:7000/3"),
            ("redis://[::1]:7000", "redis://[::1]:7000/0"),
            ("redis://[::1]", "redis://[::1]:6379/0"),
            ("redis://alice@store?password_env=SECRET", "redis://store:6379/0"),
            ("rediss://store?ca=/ca.pem&cert=/c.pem&key=/k.pem", "rediss://store:6379/0"),
            ("redis+sentinel://a,b:7000,[::1]/main?db=2", "redis+sentinel://a:26379,b:7000,[::1]:26379/main?db=2"),
            ("rediss+sentinel://a/main?ca=/ca.pem&sentinel_password_env=S", "rediss+sentinel://a:26379/main?db=0"),
            ("redis+cluster://a,b:7000", "redis+cluster://a:6379,b:7000"),
            ("unix:/run/valkey.sock?db=2", "unix:/run/valkey.sock?db=2"),
        ];
        for (location, shown) in cases {
            assert_eq!(text(location), shown);
        }
    }

    #[test]
    fn wrong_locations_are_refused_with_what_is_expected() {
        let cases = [
            ("", "file:FOLDER"),
            ("http://x", "redis://HOST"),
            ("/var/lib", "file:FOLDER"),
            ("file:", "needs a folder"),
            ("file:///x", "without '//'"),
            ("redis:store", "redis://HOST"),
            ("redis://", "host is missing"),
            ("redis://x:y", "port"),
            ("redis://x/a", "database"),
            ("redis://x/-1", "database"),
            ("redis://x?tls=1", "'tls' is not known"),
            ("redis://alice@x", "password_file"),
            ("redis://x,y", "several hosts are sentinels or a cluster"),
            ("redis://x?ca=/ca.pem", "write 'rediss'"),
            ("redis://x?sentinel_user=y", "'sentinel_user' is not known"),
            ("rediss://x?tls=1", "ca, cert, key"),
            ("rediss://x?cert=/c.pem", "'key=FILE'"),
            ("redis+sentinel://x", "name of the primary"),
            ("redis+sentinel://x/main/2", "a database is an option"),
            ("redis+sentinel://x,/main", "host is missing"),
            ("redis+sentinel://x/main?sentinel_user=y", "sentinel_password_file"),
            ("redis+sentinel://x/main?sentinel_user=", "'sentinel_user' needs a value"),
            ("redis+cluster://x/1", "database 0 only"),
            ("redis+cluster://x,", "host is missing"),
            ("unix:", "path of a socket"),
        ];
        for (location, wanted) in cases {
            assert!(text(location).contains(wanted), "{location}: {}", text(location));
        }
    }

    #[test]
    fn a_password_in_a_location_is_refused_and_not_repeated() {
        for location in [
            "redis://alice:hush@x",
            "redis://:hush@x",
            "redis://x?password=hush",
            "unix:/x?password=hush",
            "rediss://alice:hush@x",
            "redis+sentinel://alice:hush@x/main",
            "redis+sentinel://x/main?sentinel_password=hush",
        ] {
            let error = Location::new(location).unwrap_err();
            assert!(error.to_string().contains("password_file"), "{error}");
            assert!(!format!("{error} {error:?}").contains("hush"));
        }
    }

    #[test]
    fn a_password_comes_from_a_file_or_the_environment_and_is_not_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hush\n").unwrap();
        let location = Location::new(&format!("redis://alice@x?password_file={}", file.path().display())).unwrap();
        assert!(!format!("{location} {location:?}").contains("hush"));
        let Location::Redis(of_file) = location else { unreachable!("it is not a folder") };
        assert_eq!(of_file.login.password().unwrap().as_deref(), Some("hush"));
        let Location::Redis(missing) = Location::new("redis://x?password_env=NO_SUCH_VARIABLE").unwrap() else {
            unreachable!("it is not a folder")
        };
        assert!(missing.login.password().unwrap_err().to_string().contains("NO_SUCH_VARIABLE"));
    }
}
