//! The ports that clients use, bound before anything is started.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};

use tokio::net::{TcpListener, lookup_host};

use crate::options::Listen;

/// The ports, bound and not yet served.
pub struct Ports {
    pub grpc: Vec<TcpListener>,
    pub rest: Vec<TcpListener>,
}

impl Ports {
    /// Binds them. The error names the port and the address.
    pub async fn bind(grpc: Option<Listen>, rest: Option<Listen>) -> Result<Self, String> {
        Ok(Self { grpc: bind("port", grpc).await?, rest: bind("rest_port", rest).await? })
    }
}

/// Binds a port to all its addresses. `option`: the port's, for the error.
async fn bind(option: &str, listen: Option<Listen>) -> Result<Vec<TcpListener>, String> {
    let Some(Listen { addresses, port }) = listen else { return Ok(Vec::new()) };
    let mut listeners = Vec::new();
    for address in addresses {
        let wrong = |error: std::io::Error| format!("cannot listen on port {port} of {address} (--{option}): {error}");
        // An IPv6 address may be in brackets.
        let host = address.trim_start_matches('[').trim_end_matches(']');
        let found: Vec<SocketAddr> = match host.parse::<IpAddr>() {
            Ok(ip) => vec![(ip, port).into()],
            Err(_) => lookup_host((host, port)).await.map_err(wrong)?.collect(),
        };
        let before = listeners.len();
        let mut missing = None;
        for address in found {
            match TcpListener::bind(address).await {
                Ok(listener) => listeners.push(listener),
                // A name may have addresses of a protocol that this host doesn't use.
                Err(error) if error.kind() == ErrorKind::AddrNotAvailable => missing = Some(error),
                Err(error) => return Err(wrong(error)),
            }
        }
        if listeners.len() == before {
            return Err(wrong(missing.unwrap_or_else(|| ErrorKind::NotFound.into())));
        }
    }
    Ok(listeners)
}

/// The address, for the log.
pub fn name_of(listener: &TcpListener) -> String {
    listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string())
}
