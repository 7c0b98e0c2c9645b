//! The connection to tritonserver.

use std::time::Duration;

use http::uri::{Authority, Uri};
use tonic::transport::{Channel, Endpoint};

const WINDOW_BYTES: u32 = 16 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A tritonserver, by its gRPC address and perhaps its HTTP address. Connects with the first request, and again after
/// the connection breaks.
#[derive(Clone, Debug)]
pub struct Triton {
    channel: Channel,
    http: Option<Authority>,
}

impl Triton {
    /// Connects later: call it inside a tokio runtime.
    pub fn new(grpc: &Authority, http: Option<Authority>) -> Result<Self, http::Error> {
        let uri = Uri::builder().scheme("http").authority(grpc.clone()).path_and_query("/").build()?;
        let channel = Endpoint::from(uri)
            .tcp_nodelay(true)
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .connect_lazy();
        Ok(Self { channel, http })
    }
}
