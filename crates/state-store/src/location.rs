//! Where a store is, as an operator writes it.

use std::fmt;
use std::fs;
use std::path::PathBuf;

use crate::record::StoreError;

/// Where a store is, and how this server identifies itself there. Its texts have no password.
#[derive(Clone, PartialEq, Eq)]
pub enum Location {
    /// A folder of this machine.
    File(PathBuf),
    /// Valkey or Redis.
    Redis(RedisLocation),
}

/// Valkey or Redis.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisLocation {
    address: Address,
    database: i64,
    user: Option<String>,
    password: Option<Secret>,
}

/// Where Valkey or Redis listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Network(String, u16),
    Socket(PathBuf),
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

const FORMS: &str = "'file:FOLDER', 'redis://HOST:PORT/DATABASE' or 'unix:SOCKET' is expected";
const DEFAULT_PORT: u16 = 6379;

impl Location {
    /// Reads a location.
    pub fn new(text: &str) -> Result<Self, BadLocation> {
        let bad = |why: &str| Err(BadLocation(why.to_owned()));
        let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
        match scheme {
            "file" if rest.is_empty() => bad("'file:' needs a folder: write 'file:/var/lib/sequences'"),
            "file" if rest.starts_with("//") => bad("a folder is written without '//': 'file:/FOLDER'"),
            "file" => Ok(Self::File(rest.into())),
            "redis" => RedisLocation::of_network(rest).map(Self::Redis),
            "unix" => RedisLocation::of_socket(rest).map(Self::Redis),
            "rediss" => bad(
                "TLS is not supported yet: use 'redis://' on a network that others cannot read, or through a local TLS \
                 proxy such as stunnel or Envoy",
            ),
            "redis+sentinel" | "redis+cluster" => bad(
                "Sentinel and Cluster are not supported yet: name the primary, or the service in front of it, as 'redis://'",
            ),
            _ => bad(FORMS),
        }
    }
}

impl RedisLocation {
    /// Reads `//[USER@]HOST[:PORT][/DATABASE][?OPTIONS]`.
    fn of_network(rest: &str) -> Result<Self, BadLocation> {
        let bad = |why: &str| BadLocation(why.to_owned());
        let rest = rest.strip_prefix("//").ok_or_else(|| bad(FORMS))?;
        let (place, options) = split_options(rest);
        let (user, place) = match place.rsplit_once('@') {
            Some((user, _)) if user.contains(':') => return Err(has_password()),
            Some((user, place)) => (Some(user.to_owned()).filter(|user| !user.is_empty()), place),
            None => (None, place),
        };
        let (place, database) = match place.split_once('/') {
            Some((place, database)) => (place, read_database(database)?),
            None => (place, 0),
        };
        let (host, port) = match place.rsplit_once(':') {
            // An IPv6 address in brackets has colons of its own.
            Some((host, port)) if !port.ends_with(']') => {
                let port = port.parse().map_err(|_| bad("the port is a number from 1 to 65535"))?;
                (host, port)
            }
            _ => (place, DEFAULT_PORT),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(bad("the host is missing: write 'redis://HOST:PORT'"));
        }
        let address = Address::Network(host.to_owned(), port);
        Self { address, database, user, password: None }.with_options(options)
    }

    /// Reads `SOCKET[?OPTIONS]`.
    fn of_socket(rest: &str) -> Result<Self, BadLocation> {
        let (path, options) = split_options(rest);
        if path.is_empty() {
            return Err(BadLocation("'unix:' needs the path of a socket".to_owned()));
        }
        Self { address: Address::Socket(path.into()), database: 0, user: None, password: None }.with_options(options)
    }

    fn with_options(mut self, options: &str) -> Result<Self, BadLocation> {
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            match name {
                _ if value.is_empty() => return Err(BadLocation(format!("the option '{name}' needs a value"))),
                "user" => self.user = Some(value.to_owned()),
                "db" => self.database = read_database(value)?,
                "password_file" => self.password = Some(Secret::File(value.into())),
                "password_env" => self.password = Some(Secret::Environment(value.to_owned())),
                "password" => return Err(has_password()),
                _ => {
                    let known = "user, db, password_file and password_env";
                    return Err(BadLocation(format!("the option '{name}' is not known: {known} are")));
                }
            }
        }
        if self.user.is_some() && self.password.is_none() {
            return Err(BadLocation("a user needs 'password_file=FILE' or 'password_env=NAME'".to_owned()));
        }
        Ok(self)
    }

    pub(crate) const fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) const fn database(&self) -> i64 {
        self.database
    }

    pub(crate) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Reads the password.
    pub(crate) fn password(&self) -> Result<Option<String>, StoreError> {
        let missing = |why: String| StoreError::Denied(format!("no password: {why}"));
        match &self.password {
            None => Ok(None),
            Some(Secret::File(path)) => {
                let read = fs::read_to_string(path);
                let text = read.map_err(|error| missing(format!("{}: {error}", path.display())))?;
                Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
            }
            Some(Secret::Environment(name)) => {
                let value = std::env::var(name);
                value.map(Some).map_err(|_| missing(format!("the environment has no variable {name}")))
            }
        }
    }
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
            Self::Redis(RedisLocation { address, database, .. }) => match address {
                Address::Network(host, port) if host.contains(':') => write!(f, "redis://[{host}]:{port}/{database}"),
                Address::Network(host, port) => write!(f, "redis://{host}:{port}/{database}"),
                Address::Socket(path) => write!(f, "unix:{}?db={database}", path.display()),
            },
        }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Location({self})")
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
            ("rediss://x", "TLS is not supported"),
            ("redis+sentinel://x", "Sentinel"),
            ("redis+cluster://x", "Cluster"),
            ("unix:", "path of a socket"),
        ];
        for (location, wanted) in cases {
            assert!(text(location).contains(wanted), "{location}: {}", text(location));
        }
    }

    #[test]
    fn a_password_in_a_location_is_refused_and_not_repeated() {
        for location in ["redis://alice:hush@x", "redis://:hush@x", "redis://x?password=hush", "unix:/x?password=hush"]
        {
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
        assert_eq!(of_file.password().unwrap().as_deref(), Some("hush"));
        let Location::Redis(missing) = Location::new("redis://x?password_env=NO_SUCH_VARIABLE").unwrap() else {
            unreachable!("it is not a folder")
        };
        assert!(missing.password().unwrap_err().to_string().contains("NO_SUCH_VARIABLE"));
    }
}
