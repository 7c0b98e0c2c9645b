//! Where a model's instances run, and how many sequences each place has room for.

use std::collections::BTreeMap;
use std::fmt;

use sequences::pool::SlotLimits;

use super::parameters::{LAZY_SIZES, Parameters};
use super::raw::{self, ConfigError, Int, Result, bad, field};
use super::scheduling::{Scheduling, Strategy};

/// The fewest slots of a slab of the reserve, if no parameter says how large slabs are.
const SMALLEST_RESERVE_SLAB: usize = 16;
const LAZY_USE_RATIO: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstanceKind {
    Cpu,
    Gpu(i32),
}

impl fmt::Display for InstanceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("CPU"),
            Self::Gpu(device) => write!(f, "GPU {device}"),
        }
    }
}

/// The instances of one kind, which share a pool.
#[derive(Clone, Debug)]
pub struct Placement {
    pub kind: InstanceKind,
    pub instances: usize,
    pub slots: SlotLimits,
    /// How its capacity came about, for logs and errors.
    pub capacity_reason: String,
}

pub(super) fn instances(groups: &[raw::InstanceGroup]) -> Result<BTreeMap<InstanceKind, usize>> {
    let mut instances = BTreeMap::new();
    let mut add = |kind, count: usize| *instances.entry(kind).or_insert(0) += count;
    for group in groups {
        // Triton fills in the counts and kinds. stateful-inspect reads the file as it is written.
        let count = group.count.0.max(1) as usize;
        match group.kind.as_str() {
            "" | "KIND_CPU" => add(InstanceKind::Cpu, count),
            // Core lists the devices of a group that names none.
            "KIND_GPU" => {
                for &Int(gpu) in &group.gpus {
                    let device = i32::try_from(gpu).ok().filter(|&device| device >= 0);
                    let wrong = || field("instance_group.gpus", gpu.to_string(), "a GPU's number is expected");
                    add(InstanceKind::Gpu(device.ok_or_else(wrong)?), count);
                }
            }
            kind => return Err(field("instance_group.kind", kind, "KIND_CPU or KIND_GPU is expected")),
        }
    }
    if instances.is_empty() {
        instances.insert(InstanceKind::Cpu, 1);
    }
    Ok(instances)
}

/// Spreads the instances that are on the host over this many devices; with none, they stay there.
pub fn spread_cpu_instances(instances: &mut BTreeMap<InstanceKind, usize>, devices: usize) {
    // Only builds for tests have such devices.
    if devices == 0 {
        return;
    }
    let count = instances.remove(&InstanceKind::Cpu).unwrap_or(0);
    for device in 0..devices.min(count) {
        let of_device = count / devices + usize::from(device < count % devices);
        *instances.entry(InstanceKind::Gpu(device as i32)).or_insert(0) += of_device;
    }
}

/// The bounds of the pool, with the rules that NVIDIA's stateful_backend has for its lazy buffers.
pub(super) fn slot_limits(
    parameters: &Parameters,
    scheduling: &Scheduling,
    max_batch_size: usize,
    instances: usize,
) -> Result<(SlotLimits, String)> {
    // There, each instance has a pool. Here the instances share one, so only the capacity grows with their number.
    let is_lazy = LAZY_SIZES.iter().any(|name| parameters.text(name).is_some());
    let (capacity, reason) = capacity(parameters, scheduling, instances, is_lazy)?;
    // For sequences that core already sends while an earlier one with their id still has its slot.
    let reserve = scheduling.candidates.saturating_mul(instances);
    if !is_lazy {
        let next_slab = max_batch_size.max(SMALLEST_RESERVE_SLAB);
        return Ok((SlotLimits { reserve, next_slab, ..SlotLimits::all_at_once(capacity) }, reason));
    }
    let size = |name| parameters.number(name, 0usize.., "a number of sequences, 0 or more,");
    let sizes: Vec<Option<usize>> = LAZY_SIZES.into_iter().map(size).collect::<Result<_, _>>()?;
    let [Some(first_slab), Some(next_slab), Some(grow_below), Some(shrink_above)] = sizes[..] else {
        let why = "'initial_buffer_size', 'subsequent_buffer_size', 'buffer_alloc_threshold' and \
                   'buffer_dealloc_threshold' are given all four or not at all";
        let name = LAZY_SIZES[sizes.iter().take_while(|size| size.is_some()).count()];
        return Err(ConfigError::MissingParameter { name, why: why.to_owned() });
    };
    let first_slab = first_slab.min(capacity);
    let limits = SlotLimits { capacity, reserve, first_slab, next_slab, grow_below, shrink_above };
    check_slabs(limits, max_batch_size, &reason)?;
    if shrink_above <= grow_below {
        log::warn!(
            "parameter 'buffer_dealloc_threshold' is {shrink_above}: it should be larger than buffer_alloc_threshold, \
             {grow_below}, or buffers come and go with every few sequences"
        );
    }
    Ok((limits, reason))
}

fn check_slabs(limits: SlotLimits, max_batch_size: usize, capacity_reason: &str) -> Result<()> {
    let SlotLimits { capacity, first_slab, next_slab, grow_below, .. } = limits;
    // The size was cut to the capacity. The error below would show that number, which is not in the configuration.
    if first_slab < max_batch_size && first_slab == capacity {
        let why = format!(
            "capped by the pool's capacity ({capacity_reason}) it is smaller than max_batch_size, {max_batch_size}"
        );
        return Err(bad("initial_buffer_size", first_slab, why));
    }
    for (name, value) in LAZY_SIZES.into_iter().zip([first_slab, next_slab, grow_below]) {
        if value < max_batch_size {
            return Err(bad(name, value, format!("it must not be smaller than max_batch_size, {max_batch_size}")));
        }
    }
    if grow_below > first_slab {
        let why = format!("it must not be larger than initial_buffer_size, {first_slab}");
        return Err(bad("buffer_alloc_threshold", grow_below, why));
    }
    Ok(())
}

/// The number of sequences that a pool has room for, and the reason for that number.
fn capacity(
    parameters: &Parameters,
    scheduling: &Scheduling,
    instances: usize,
    is_lazy: bool,
) -> Result<(usize, String)> {
    const NAME: &str = "max_candidate_sequence_use_ratio";
    let candidates = scheduling.candidates;
    let written: Option<f64> = parameters.number(NAME, f64::MIN_POSITIVE..=1.0, "a number above 0 and up to 1")?;
    let (ratio, of) = match scheduling.strategy {
        // The default of stateful_backend, whose configurations have these parameters.
        Strategy::Oldest if is_lazy => (written.unwrap_or(LAZY_USE_RATIO), "max_candidate_sequences"),
        Strategy::Oldest => (written.unwrap_or(1.0), "max_candidate_sequences"),
        Strategy::Direct => (1.0, "sequences per batch"),
        Strategy::Own(_) => (1.0, "max_sequence_number"),
    };
    // The rounding error of `candidates * ratio` must not cost a slot.
    let per_instance = ((candidates as f64 * ratio + 1e-6).floor() as usize).max(1);
    let mut reason = format!("{of} {candidates}");
    if ratio != 1.0 || written.is_some() {
        reason = format!("{reason} × {NAME} {ratio}");
    }
    if instances > 1 {
        reason = format!("{reason} × {instances} instances");
    }
    Ok((per_instance.saturating_mul(instances), reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_of_the_host_are_spread_over_the_devices_that_stand_for_it() {
        use InstanceKind::{Cpu, Gpu};
        let spread = |on_host: usize, devices: usize| {
            let mut instances = BTreeMap::from([(Cpu, on_host), (Gpu(1), 1)]);
            spread_cpu_instances(&mut instances, devices);
            instances
        };
        assert_eq!(spread(3, 0), BTreeMap::from([(Cpu, 3), (Gpu(1), 1)]));
        assert_eq!(spread(3, 2), BTreeMap::from([(Gpu(0), 2), (Gpu(1), 2)]));
        assert_eq!(spread(1, 2), BTreeMap::from([(Gpu(0), 1), (Gpu(1), 1)]));
    }
}
