//! Figures for Prometheus.

/// The gateway's own figures.
#[derive(Debug, Default)]
pub struct Metrics {}
