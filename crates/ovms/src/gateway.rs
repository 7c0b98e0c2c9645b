//! What the requests of both protocols share.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use crate::failure::Failure;
use crate::managed::Managed;
use crate::metrics::Metrics;
use crate::models::{Models, Signature, Version};
use crate::predict::order::Order;
use crate::predict::version_text;
use crate::status;
use crate::triton::Triton;

/// How long a request waits for a model that loads.
const LOAD_WAIT: Duration = Duration::from_secs(10);
/// Each request that waits asks for itself.
const LOAD_POLL: Duration = Duration::from_millis(250);

/// Shared by all connections of both ports.
pub struct Gateway {
    /// Where the models are served.
    pub triton: Triton,
    /// The signatures that Triton has answered with.
    pub models: Models,
    /// Keeps the requests of each sequence in order.
    pub order: Order,
    /// Counts and times.
    pub metrics: Metrics,
    /// The configuration, if the gateway has started Triton itself.
    pub managed: Option<Managed>,
}

impl Gateway {
    /// A gateway in front of `triton`, which has the models of `managed` if the gateway has started it.
    pub fn new(triton: Triton, managed: Option<Managed>) -> Self {
        Self { triton, models: Models::default(), order: Order::default(), metrics: Metrics::default(), managed }
    }

    /// Like [`Gateway::ask_signature`], but waits up to `LOAD_WAIT` while the model loads, as OVMS does.
    pub async fn wait_for_signature(&self, name: &str, version: Version) -> Result<Arc<Signature>, Failure> {
        let deadline = Instant::now() + LOAD_WAIT;
        loop {
            let result = self.ask_signature(name, version).await;
            match &result {
                Err(failure) if status::is_loading(failure) && Instant::now() < deadline => {
                    tokio::time::sleep(LOAD_POLL).await;
                }
                _ => return result,
            }
        }
    }

    /// Asks Triton for the signature, and remembers it. If the model isn't served, the failure has OVMS's code and text.
    pub async fn ask_signature(&self, name: &str, version: Version) -> Result<Arc<Signature>, Failure> {
        match self.triton.metadata(name, &version_text(version)).await {
            Ok(metadata) => {
                let signature = Arc::new(Signature::new(metadata, version));
                self.models.insert(name, version, signature.clone());
                Ok(signature)
            }
            Err(failure) => {
                if failure.code == Code::DeadlineExceeded {
                    return Err(failure);
                }
                self.models.remove(name);
                Err(status::why_not_served(self, name, version, failure).await)
            }
        }
    }
}
