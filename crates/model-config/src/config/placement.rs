//! Where a model's instances run.

use std::collections::BTreeMap;
use std::fmt;

use sequences::pool::SlotLimits;

use super::raw::{InstanceGroup, Int, Result, field};

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

pub(super) fn instances(groups: &[InstanceGroup]) -> Result<BTreeMap<InstanceKind, usize>> {
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
