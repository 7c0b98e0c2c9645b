//! Accepts connections and serves HTTP on them until the gateway stops.

use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

const RETRY_ACCEPT: Duration = Duration::from_millis(50);
const WARN_ACCEPT: Duration = Duration::from_secs(1);
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);
const PING_INTERVAL: Duration = Duration::from_secs(60);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
const WINDOW_BYTES: u32 = 16 << 20;
const STREAMS_MAX: u32 = 4096;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A service that never fails: errors are responses.
pub trait Service<B>:
    hyper::service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible, Future: Send + 'static>
    + Clone
    + Send
    + 'static
{
}

// The bounds are written twice, because stable Rust has no aliases of traits.
impl<B, S> Service<B> for S where
    S: hyper::service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible, Future: Send + 'static>
        + Clone
        + Send
        + 'static
{
}

/// Serves HTTP/2 without TLS, each connection by a service of its own, until the gateway stops and the requests that run have ended.
pub async fn serve_http2<S, B>(listener: TcpListener, service: impl Fn() -> S, stop: watch::Receiver<bool>)
where
    S: Service<B>,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let serve = move |stream, stop| http2_connection(stream, service(), stop);
    accept(listener, stop, serve).await;
}

/// Serves HTTP/1.1 without TLS until the gateway stops and the requests that run have ended.
pub async fn serve_http1<S, B>(listener: TcpListener, service: S, stop: watch::Receiver<bool>)
where
    S: Service<B>,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let serve = move |stream, stop| http1_connection(stream, service.clone(), stop);
    accept(listener, stop, serve).await;
}

async fn accept<F>(
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
                    if let Err(error) = stream.set_nodelay(true) {
                        log::debug!("TCP_NODELAY: {error}");
                    }
                    connections.spawn(serve(stream, stop.clone()));
                }
                Err(error) => {
                    // Out of file descriptors, most likely: others will be closed.
                    if warned.is_none_or(|at| at.elapsed() >= WARN_ACCEPT) {
                        log::warn!("a connection could not be accepted: {error}");
                        warned = Some(Instant::now());
                    }
                    tokio::time::sleep(RETRY_ACCEPT).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = stopped(&mut stop) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Ends when the gateway is to stop, also if nothing is left that could say so.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn http1_connection<S, B>(stream: TcpStream, service: S, mut stop: watch::Receiver<bool>)
where
    S: Service<B>,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_READ_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        log::debug!("HTTP connection: {error}");
    }
}

/// Runs the connection and all its requests in one task, so that requests begin in the order in which they arrived.
async fn http2_connection<S, B>(stream: TcpStream, service: S, mut stop: watch::Receiver<bool>)
where
    S: Service<B>,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let (sender, mut started) = mpsc::unbounded_channel();
    let mut requests = FuturesUnordered::new();
    let mut builder = http2::Builder::new(Requests(sender));
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        // As many as may run: a client may take all of its requests back at once.
        .max_pending_accept_reset_streams(STREAMS_MAX as usize)
        .max_local_error_reset_streams(STREAMS_MAX as usize);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut stopping = false;
    loop {
        tokio::select! {
            biased;
            result = connection.as_mut() => {
                if let Err(error) = result {
                    log::debug!("gRPC connection: {error}");
                }
                // Requests that wait have lost their client, and are dropped.
                return;
            }
            Some(request) = started.recv() => requests.push(request),
            Some(()) = requests.next() => {}
            () = stopped(&mut stop), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Hands the requests of a connection to the task of the connection.
#[derive(Clone)]
struct Requests(mpsc::UnboundedSender<Pin<Box<dyn Future<Output = ()> + Send>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Requests {
    fn execute(&self, request: F) {
        // It fails only when the connection has ended.
        let _ = self.0.send(Box::pin(request));
    }
}
