//! The ports that clients use: bound before anything is started, and served until the gateway stops.

use std::future::Future;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::options::Listen;

const RETRY_ACCEPT: Duration = Duration::from_millis(50);
const WARN_ACCEPT: Duration = Duration::from_secs(1);

/// Binds a port to all its addresses. `option`: the option that gives the port, for the error.
pub async fn bind(option: &str, listen: Option<Listen>) -> Result<Vec<TcpListener>, String> {
    let Some(Listen { addresses, port }) = listen else { return Ok(Vec::new()) };
    let mut listeners = Vec::new();
    for address in addresses {
        let wrong = |error: std::io::Error| format!("cannot listen on port {port} of {address} (--{option}): {error}");
        // An IPv6 address may be in brackets.
        let host = address.trim_start_matches('[').trim_end_matches(']');
        let before = listeners.len();
        let mut missing = None;
        for address in lookup_host((host, port)).await.map_err(wrong)? {
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

/// Serves each connection by `serve` until the gateway stops, and returns when the requests that run have ended.
pub async fn accept<F>(
    listener: TcpListener,
    mut stop: watch::Receiver<bool>,
    serve: impl Fn(TcpStream, watch::Receiver<bool>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut warned: Option<Instant> = None;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    // Otherwise the end of a small answer may wait until the client acknowledges its beginning.
                    if let Err(error) = stream.set_nodelay(true) {
                        log::debug!("TCP_NODELAY: {error}");
                    }
                    connections.spawn(serve(stream, stop.clone()));
                }
                Err(error) => {
                    // Probably there are no file descriptors left until other connections close. Without the pause and
                    // the limit of warnings, this loop would use a whole core and fill the log until then.
                    if warned.is_none_or(|at| at.elapsed() >= WARN_ACCEPT) {
                        log::warn!("a connection could not be accepted: {error}");
                        warned = Some(Instant::now());
                    }
                    tokio::time::sleep(RETRY_ACCEPT).await;
                }
            },
            // A set keeps the result of each task until it is taken.
            Some(_) = connections.join_next() => {}
            () = stopped(&mut stop) => break,
        }
    }
    // First, so that the system refuses new clients while the requests of the others end.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Ends when the gateway is to stop, also if nothing is left that could say so.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
