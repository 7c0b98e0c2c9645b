//! The port for gRPC.

use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::gateway::Gateway;

/// Serves `listener` until `stop` is true, then finishes the requests that run.
pub async fn serve(_listener: TcpListener, _gateway: Arc<Gateway>, mut stop: watch::Receiver<bool>) -> io::Result<()> {
    let _ = stop.wait_for(|stop| *stop).await;
    Ok(())
}
