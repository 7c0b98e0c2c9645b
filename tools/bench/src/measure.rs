//! Clocks, medians, and where threads run.

/// Now, in µs of a clock.
fn clock_us(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to a local.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

/// Wall time and CPU time of the process, in µs.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Wall time.
    pub wall_us: f64,
    /// CPU time of all threads.
    pub cpu_us: f64,
}

impl Cost {
    /// What `count` repetitions cost, for each.
    pub fn of(count: usize, mut work: impl FnMut()) -> Self {
        let clocks = || (clock_us(libc::CLOCK_MONOTONIC), clock_us(libc::CLOCK_PROCESS_CPUTIME_ID));
        let (wall, cpu) = clocks();
        (0..count).for_each(|_| work());
        let (wall_end, cpu_end) = clocks();
        Self { wall_us: (wall_end - wall) / count as f64, cpu_us: (cpu_end - cpu) / count as f64 }
    }
}

/// The middle value.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}

/// Keeps this thread, and those that it starts, on one CPU.
pub fn pin(cpu: usize) {
    // SAFETY: a set of this size is what the call wants; zeros are an empty set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

/// Resident memory of the process in bytes.
pub fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<f64>().ok());
    // SAFETY: a plain question to the system.
    pages.unwrap_or(f64::NAN) * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as f64
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
}
