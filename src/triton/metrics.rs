//! Custom metrics in Triton's Prometheus endpoint.
//!
//! A server that was built or started without metrics answers UNSUPPORTED. Then this backend has no metrics and works
//! as with them.

use std::ffi::CString;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use parking_lot::Mutex;
use scopeguard::guard;
use triton_sys::{
    TRITONSERVER_Metric, TRITONSERVER_MetricArgs, TRITONSERVER_MetricFamily, TRITONSERVER_Parameter, call,
};

use super::error::{Code, Error, check, get};
use super::response::c_name;

#[derive(Clone, Copy)]
pub enum Kind {
    Counter,
    /// Gauges with the same labels are one metric of Triton, so each adds its share.
    Gauge,
    /// Has buckets with these upper bounds, ascending. Triton adds one without a bound. Servers that do not know
    /// histograms make no such family.
    Histogram(&'static [f64]),
}

/// A name with a description. Its metrics differ by their labels.
pub struct Family {
    raw: NonNull<TRITONSERVER_MetricFamily>,
    kind: Kind,
}

// SAFETY: Triton guards metrics with locks of its own.
unsafe impl Send for Family {}
// SAFETY: as above.
unsafe impl Sync for Family {}

impl Family {
    pub fn new(kind: Kind, name: &str, description: &str) -> Result<Arc<Self>, Error> {
        let raw_kind = match kind {
            Kind::Counter => triton_sys::TRITONSERVER_METRIC_KIND_COUNTER,
            Kind::Gauge => triton_sys::TRITONSERVER_METRIC_KIND_GAUGE,
            Kind::Histogram(_) => triton_sys::TRITONSERVER_METRIC_KIND_HISTOGRAM,
        };
        let (name, description) = (c_name(name), c_name(description));
        let mut raw = ptr::null_mut();
        // SAFETY: the texts live during the call and are copied.
        unsafe { check(call!(TRITONSERVER_MetricFamilyNew(&mut raw, raw_kind, name.as_ptr(), description.as_ptr())))? };
        let raw = NonNull::new(raw).ok_or_else(|| Error::new(Code::Internal, "Triton made no metric family"))?;
        Ok(Arc::new(Self { raw, kind }))
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        // SAFETY: alive, its metrics hold an Arc to it and are gone.
        let _ = unsafe { check(call!(TRITONSERVER_MetricFamilyDelete(self.raw.as_ptr()))) };
    }
}

pub struct Metric {
    raw: NonNull<TRITONSERVER_Metric>,
    family: Arc<Family>,
}

/// Held while a metric is made or deleted. Metrics with the same labels share one of Prometheus's. If the last of them
/// is deleted while core makes another, core gives that one a pointer to freed memory. A model that is loaded while its
/// previous load is still being unloaded does this.
static MAKING_OR_DELETING: Mutex<()> = Mutex::new(());

// SAFETY: Triton guards metrics with locks of its own.
unsafe impl Send for Metric {}
// SAFETY: as above.
unsafe impl Sync for Metric {}

/// The arguments of a histogram whose buckets have these upper bounds.
fn buckets(bounds: &[f64]) -> Result<impl Deref<Target = *mut TRITONSERVER_MetricArgs>, Error> {
    // SAFETY: the arguments are made here, and deleted once; the bounds live during the call, which copies them.
    unsafe {
        let made = get!(TRITONSERVER_MetricArgsNew())?;
        let args = guard(made, |made| _ = check(call!(TRITONSERVER_MetricArgsDelete(made))));
        check(call!(TRITONSERVER_MetricArgsSetHistogram(*args, bounds.as_ptr(), bounds.len() as u64)))?;
        Ok(args)
    }
}

impl Metric {
    pub fn new(family: &Arc<Family>, labels: &[(&str, &str)]) -> Result<Self, Error> {
        let args = if let Kind::Histogram(bounds) = family.kind { Some(buckets(bounds)?) } else { None };
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
            let (family, labels, count) = (family.raw.as_ptr(), parameters.as_mut_ptr(), parameters.len() as u64);
            let making = MAKING_OR_DELETING.lock();
            let made = check(match args {
                None => call!(TRITONSERVER_MetricNew(&mut metric, family, labels, count)),
                Some(ref args) => call!(TRITONSERVER_MetricNewWithArgs(&mut metric, family, labels, count, **args)),
            });
            drop(making);
            for parameter in parameters {
                call!(TRITONSERVER_ParameterDelete(parameter.cast_mut()))?;
            }
            made
        };
        made?;
        let raw = NonNull::new(metric).ok_or_else(|| Error::new(Code::Internal, "Triton made no metric"))?;
        Ok(Self { raw, family: family.clone() })
    }

    /// Adds a value, which may be negative for a gauge. A histogram counts it in its bucket.
    pub fn add(&self, value: f64) {
        let raw = self.raw.as_ptr();
        // SAFETY: alive until dropped.
        let _ = unsafe {
            check(match self.family.kind {
                Kind::Counter | Kind::Gauge => call!(TRITONSERVER_MetricIncrement(raw, value)),
                Kind::Histogram(_) => call!(TRITONSERVER_MetricObserve(raw, value)),
            })
        };
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        let _deleting = MAKING_OR_DELETING.lock();
        // SAFETY: alive; its family is still held.
        let _ = unsafe { check(call!(TRITONSERVER_MetricDelete(self.raw.as_ptr()))) };
    }
}
