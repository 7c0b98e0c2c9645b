//! Figures for Prometheus.

use std::sync::atomic::AtomicI64;
use std::time::Instant;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tonic::Code;

/// Upper bounds of the buckets in seconds, from the gateway's own time to that of a long chunk of audio.
const DURATIONS: [f64; 14] =
    [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Method {
    /// `grpc` and `rest` for TensorFlow Serving's API, `kserve_grpc` and `kserve_rest` for what is passed through.
    pub api: &'static str,
    pub method: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    api: &'static str,
    method: &'static str,
    model: String,
    code: &'static str,
}

#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Outcome, Counter>,
    durations: Family<Method, Histogram, fn() -> Histogram>,
    running: Family<Method, Gauge<i64, AtomicI64>>,
}

impl Metrics {
    pub fn new() -> Self {
        let requests = Family::default();
        // A pointer to a function, because the type of a closure has no name that the field could have.
        let durations = Family::new_with_constructor((|| Histogram::new(DURATIONS)) as fn() -> Histogram);
        let running = Family::default();
        let mut registry = Registry::with_prefix("stateful_ovms");
        registry.register("requests", "Requests answered, by gRPC's code", requests.clone());
        registry.register("request_duration_seconds", "Time from a request to its answer", durations.clone());
        registry.register("requests_running", "Requests that wait or run", running.clone());
        Self { registry, requests, durations, running }
    }

    /// Counts a request from now on until it is dropped.
    pub fn request(&self, method: Method) -> Request {
        let running = self.running.get_or_create(&method).clone();
        running.inc();
        let Method { api, method: name } = method;
        Request {
            requests: self.requests.clone(),
            duration: self.durations.get_or_create(&method).clone(),
            running,
            start: Instant::now(),
            // This outcome stays if the client gives up.
            outcome: Outcome { api, method: name, model: String::new(), code: code_name(Code::Cancelled) },
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string can't fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

/// A request that is counted when it is dropped.
#[derive(Debug)]
pub struct Request {
    requests: Family<Outcome, Counter>,
    duration: Histogram,
    running: Gauge<i64, AtomicI64>,
    start: Instant,
    outcome: Outcome,
}

impl Request {
    /// Counts the request with this outcome. `model` is empty for an unknown model, so that clients can't add labels.
    pub fn finish(mut self, model: &str, code: Code) {
        model.clone_into(&mut self.outcome.model);
        self.outcome.code = code_name(code);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.requests.get_or_create(&self.outcome).inc();
        self.duration.observe(self.start.elapsed().as_secs_f64());
        self.running.dec();
    }
}

pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREDICT: Method = Method { api: "grpc", method: "Predict" };

    #[test]
    fn a_request_is_counted_with_its_outcome_or_as_cancelled() {
        let metrics = Metrics::new();
        let running = metrics.request(PREDICT);
        assert!(metrics.text().contains("stateful_ovms_requests_running{api=\"grpc\",method=\"Predict\"} 1"));
        running.finish("m", Code::NotFound);
        drop(metrics.request(PREDICT));
        let text = metrics.text();
        for line in [
            "stateful_ovms_requests_total{api=\"grpc\",method=\"Predict\",model=\"m\",code=\"NOT_FOUND\"} 1",
            "stateful_ovms_requests_total{api=\"grpc\",method=\"Predict\",model=\"\",code=\"CANCELLED\"} 1",
            "stateful_ovms_requests_running{api=\"grpc\",method=\"Predict\"} 0",
            "stateful_ovms_request_duration_seconds_count{api=\"grpc\",method=\"Predict\"} 2",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
