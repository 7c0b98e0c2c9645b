//! Clocks, medians, and where threads run.

use std::num::NonZero;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, set_current_timer_slack};
use rustix::time::{ClockId, clock_gettime};

fn clock_us(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

/// How often the process' threads have been taken off a CPU so far, because they waited or because others ran.
fn switches() -> i64 {
    // SAFETY: plain data, for which zeros are a value; the call writes to a local.
    let used = unsafe {
        let mut used: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut used);
        used
    };
    used.ru_nvcsw + used.ru_nivcsw
}

/// Wall time, and CPU time and context switches of all threads.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    pub wall_us: f64,
    pub cpu_us: f64,
    pub switches: f64,
}

impl Cost {
    /// What `count` repetitions cost, for each.
    pub fn of(count: usize, mut work: impl FnMut()) -> Self {
        let read = || [clock_us(ClockId::Monotonic), clock_us(ClockId::ProcessCPUTime), switches() as f64];
        let before = read();
        (0..count).for_each(|_| work());
        let after = read();
        let [wall_us, cpu_us, switches] = [0, 1, 2].map(|of| (after[of] - before[of]) / count as f64);
        Self { wall_us, cpu_us, switches }
    }
}

/// How often to repeat `work` to fill so much time, and at least twice.
pub fn rounds_in(seconds: f64, mut work: impl FnMut()) -> usize {
    (0..8).for_each(|_| work());
    let us = Cost::of(8, &mut work).wall_us;
    ((seconds * 1e6 / us) as usize).clamp(2, 100_000)
}

pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    quantile(values, 0.5)
}

/// The value below which that part of the values lies, between two of them where it must; NaN if there are none.
pub fn quantile(values: impl IntoIterator<Item = f64>, part: f64) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return f64::NAN };
    let place = part * last as f64;
    let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

/// The middle of repeated measurements, and the quartiles, which say how far to trust it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    middle: f64,
    lower: f64,
    upper: f64,
}

impl Spread {
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        let [lower, middle, upper] = [0.25, 0.5, 0.75].map(|part| quantile(values.iter().copied(), part));
        Self { middle, lower, upper }
    }

    /// Adds it to a JSON object, as `name`, `name_lower_quartile` and `name_upper_quartile`.
    pub fn put(self, object: &mut serde_json::Value, name: &str) {
        object[name] = self.middle.into();
        object[format!("{name}_lower_quartile")] = self.lower.into();
        object[format!("{name}_upper_quartile")] = self.upper.into();
    }
}

/// Keeps this thread, and those that it starts, on the first CPU that it may use.
pub fn pin() {
    let allowed = affinity();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let mut set = CpuSet::new();
    set.set(first.expect("a thread that runs may use a CPU"));
    set_affinity(&set);
}

/// What `work` gives on one CPU; then this thread may use those again that it could use before.
pub fn pinned<T>(work: impl FnOnce() -> T) -> T {
    let before = affinity();
    pin();
    let result = work();
    set_affinity(&before);
    result
}

fn affinity() -> CpuSet {
    sched_getaffinity(None).unwrap_or_else(|error| panic!("sched_getaffinity: {error}"))
}

fn set_affinity(set: &CpuSet) {
    // The results of threads that are not pinned must not be reported as if they were.
    sched_setaffinity(None, set).unwrap_or_else(|error| panic!("sched_setaffinity: {error}"));
}

/// Lets this thread wake when it asked to.
pub fn wake_on_time() {
    // Linux otherwise may wake it up to 50 µs later, and each request would be sent late.
    set_current_timer_slack(NonZero::new(1)).unwrap_or_else(|error| panic!("prctl: {error}"));
}

pub fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<f64>().ok());
    pages.unwrap_or(f64::NAN) * rustix::param::page_size() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median([]).is_nan());
    }

    #[test]
    fn quantiles_lie_between_values() {
        assert_eq!(quantile([5.0, 1.0, 3.0, 2.0, 4.0], 0.25), 2.0);
        assert_eq!(quantile([0.0, 10.0], 0.75), 7.5);
        assert_eq!(quantile([7.0], 0.25), 7.0);
    }

    #[test]
    fn a_spread_stands_in_json_under_three_names() {
        let mut object = serde_json::json!({ "batch": 16 });
        Spread::of([5.0, 1.0, 3.0, 2.0, 4.0]).put(&mut object, "ratio");
        let wanted = serde_json::json!({
            "batch": 16, "ratio": 3.0, "ratio_lower_quartile": 2.0, "ratio_upper_quartile": 4.0,
        });
        assert_eq!(object, wanted);
    }

    #[test]
    fn pinned_work_has_one_cpu_and_the_rest_comes_back() {
        let count = || affinity().count();
        let before = count();
        assert_eq!(pinned(count), 1);
        assert_eq!(count(), before);
    }
}
