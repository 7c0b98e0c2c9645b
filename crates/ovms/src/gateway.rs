//! All that a request needs, whatever protocol it comes by.

use crate::managed::Managed;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::triton::Triton;

/// Shared by all connections of both ports.
#[derive(Debug)]
pub struct Gateway {
    /// Where the models are served.
    pub triton: Triton,
    /// Their signatures.
    pub models: Models,
    /// Counts and times.
    pub metrics: Metrics,
    /// The configuration, if the gateway has started Triton itself.
    pub managed: Option<Managed>,
}
