//! Custom metrics in Triton's Prometheus endpoint.
//!
//! A server that was built or started without metrics answers UNSUPPORTED. Then this backend has no metrics and works
//! as with them.

use std::ffi::CString;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use parking_lot::Mutex;
use triton_sys::{
    TRITONSERVER_Metric, TRITONSERVER_MetricArgs, TRITONSERVER_MetricFamily, TRITONSERVER_MetricKind,
    TRITONSERVER_Parameter, call,
};

use super::error::{Code, Error, check};
use super::types::c_name;

/// A name with a description. Its metrics differ by their labels.
pub struct Family(NonNull<TRITONSERVER_MetricFamily>);

// SAFETY: Triton guards metrics with locks of its own.
unsafe impl Send for Family {}
// SAFETY: as above.
unsafe impl Sync for Family {}

impl Family {
    pub fn counter(name: &str, description: &str) -> Result<Self, Error> {
        Self::new(triton_sys::TRITONSERVER_METRIC_KIND_COUNTER, name, description)
    }

    pub fn gauge(name: &str, description: &str) -> Result<Self, Error> {
        Self::new(triton_sys::TRITONSERVER_METRIC_KIND_GAUGE, name, description)
    }

    /// Fails on servers that do not know histograms.
    pub fn histogram(name: &str, description: &str) -> Result<Self, Error> {
        Self::new(triton_sys::TRITONSERVER_METRIC_KIND_HISTOGRAM, name, description)
    }

    fn new(kind: TRITONSERVER_MetricKind, name: &str, description: &str) -> Result<Self, Error> {
        let (name, description) = (c_name(name), c_name(description));
        let mut family = ptr::null_mut();
        // SAFETY: the texts live during the call and are copied.
        unsafe { check(call!(TRITONSERVER_MetricFamilyNew(&mut family, kind, name.as_ptr(), description.as_ptr())))? };
        NonNull::new(family).map(Self).ok_or_else(|| Error::new(Code::Internal, "Triton made no metric family"))
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        // SAFETY: alive, its metrics hold an Arc to it and are gone.
        let _ = unsafe { check(call!(TRITONSERVER_MetricFamilyDelete(self.0.as_ptr()))) };
    }
}

struct Metric {
    raw: RawMetric,
    _family: Arc<Family>,
}

struct RawMetric(NonNull<TRITONSERVER_Metric>);

/// Held while a metric is made or deleted. Metrics with the same labels share one of Prometheus's. If the last of them is
/// deleted while core makes another, core gives that one a pointer to freed memory. A model that is loaded while its
/// previous load is still being unloaded does this.
static MAKING_OR_DELETING: Mutex<()> = Mutex::new(());

// SAFETY: Triton guards metrics with locks of its own.
unsafe impl Send for RawMetric {}
// SAFETY: as above.
unsafe impl Sync for RawMetric {}

/// Arguments of a metric; null before they are made.
struct Args(*mut TRITONSERVER_MetricArgs);

impl Args {
    /// The upper bounds of a histogram's buckets.
    fn buckets(bounds: &[f64]) -> Result<Self, Error> {
        let mut args = Self(ptr::null_mut());
        // SAFETY: the arguments are made here; the bounds live during the call, which copies them.
        unsafe {
            check(call!(TRITONSERVER_MetricArgsNew(&mut args.0)))?;
            check(call!(TRITONSERVER_MetricArgsSetHistogram(args.0, bounds.as_ptr(), bounds.len() as u64)))?;
        }
        Ok(args)
    }
}

impl Drop for Args {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by `buckets`, deleted once.
            let _ = unsafe { check(call!(TRITONSERVER_MetricArgsDelete(self.0))) };
        }
    }
}

impl Metric {
    /// A counter or gauge without `args`, a histogram with them.
    fn new(family: &Arc<Family>, labels: &[(&str, &str)], args: Option<&Args>) -> Result<Self, Error> {
        let texts: Vec<(CString, CString)> = labels.iter().map(|(name, value)| (c_name(name), c_name(value))).collect();
        let mut parameters: Vec<*const TRITONSERVER_Parameter> = Vec::new();
        let kind = triton_sys::TRITONSERVER_PARAMETER_STRING;
        let mut metric = ptr::null_mut();
        // SAFETY: texts and parameters live during the calls, which copy what they keep; each parameter is deleted
        // once below.
        let made = unsafe {
            for (name, value) in &texts {
                parameters
                    .push(call!(TRITONSERVER_ParameterNew(name.as_ptr(), kind, value.as_ptr().cast()))?.cast_const());
            }
            let (family, labels, count) = (family.0.as_ptr(), parameters.as_mut_ptr(), parameters.len() as u64);
            let making = MAKING_OR_DELETING.lock();
            let made = check(match args {
                None => call!(TRITONSERVER_MetricNew(&mut metric, family, labels, count)),
                Some(args) => call!(TRITONSERVER_MetricNewWithArgs(&mut metric, family, labels, count, args.0)),
            });
            drop(making);
            for parameter in parameters {
                call!(TRITONSERVER_ParameterDelete(parameter.cast_mut()))?;
            }
            made
        };
        made?;
        let raw =
            NonNull::new(metric).map(RawMetric).ok_or_else(|| Error::new(Code::Internal, "Triton made no metric"))?;
        Ok(Self { raw, _family: family.clone() })
    }

    fn add(&self, more: f64) {
        // SAFETY: alive until dropped.
        let _ = unsafe { check(call!(TRITONSERVER_MetricIncrement(self.raw.0.as_ptr(), more))) };
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        let _deleting = MAKING_OR_DELETING.lock();
        // SAFETY: alive; its family is still held.
        let _ = unsafe { check(call!(TRITONSERVER_MetricDelete(self.raw.0.as_ptr()))) };
    }
}

/// A metric that goes up and down. Gauges with the same labels are one metric of Triton, so each adds its share.
pub struct Gauge(Metric);

impl Gauge {
    pub fn new(family: &Arc<Family>, labels: &[(&str, &str)]) -> Result<Self, Error> {
        Metric::new(family, labels, None).map(Self)
    }

    /// Adds `more`, which may be negative.
    pub fn add(&self, more: f64) {
        self.0.add(more);
    }
}

/// A metric that goes up.
pub struct Counter(Metric);

impl Counter {
    pub fn new(family: &Arc<Family>, labels: &[(&str, &str)]) -> Result<Self, Error> {
        Metric::new(family, labels, None).map(Self)
    }

    pub fn add(&self, more: f64) {
        self.0.add(more);
    }
}

/// A metric that counts observations in buckets.
pub struct Histogram(Metric);

impl Histogram {
    /// `bounds`: the upper bounds of the buckets, ascending. Triton adds one without a bound.
    pub fn new(family: &Arc<Family>, labels: &[(&str, &str)], bounds: &[f64]) -> Result<Self, Error> {
        Metric::new(family, labels, Some(&Args::buckets(bounds)?)).map(Self)
    }

    pub fn observe(&self, value: f64) {
        // SAFETY: alive until dropped.
        let _ = unsafe { check(call!(TRITONSERVER_MetricObserve(self.0.raw.0.as_ptr(), value))) };
    }
}
