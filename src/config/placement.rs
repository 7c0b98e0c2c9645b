//! Where a model's instances run.

use std::collections::BTreeMap;
use std::fmt;

use gpu_rows::devices_for_cpu_instances;
use sequences::pool::SlotLimits;

use super::error::{ConfigError, field};
use super::raw;

/// The kind of an instance group: the host, or one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstanceKind {
    /// `KIND_CPU`.
    Cpu,
    /// `KIND_GPU`: the GPU of that number.
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
    /// The bounds of their pool.
    pub slots: SlotLimits,
    /// How its capacity came about, for logs and errors.
    pub capacity_reason: String,
}

/// How many instances there are of each kind.
pub(super) fn instances(groups: &[raw::InstanceGroup]) -> Result<BTreeMap<InstanceKind, usize>, ConfigError> {
    let mut instances = BTreeMap::new();
    let mut add = |kind, count: usize| *instances.entry(kind).or_insert(0) += count;
    for group in groups {
        let count = group.count.0.max(1) as usize;
        match group.kind.as_str() {
            "" | "KIND_CPU" => on_cpu(count).into_iter().for_each(|(kind, count)| add(kind, count)),
            // Core lists the devices of a group that names none.
            "KIND_GPU" => {
                for gpu in &group.gpus {
                    let device = i32::try_from(gpu.0).ok().filter(|&device| device >= 0);
                    let device = device
                        .ok_or_else(|| field("instance_group.gpus", gpu.0.to_string(), "a GPU's number is expected"))?;
                    add(InstanceKind::Gpu(device), count);
                }
            }
            kind => {
                return Err(field("instance_group.kind", kind, "KIND_CPU or KIND_GPU is expected"));
            }
        }
    }
    if instances.is_empty() {
        instances = on_cpu(1);
    }
    Ok(instances)
}

/// Whether the configuration names a GPU.
pub(super) fn names_gpu(groups: &[raw::InstanceGroup]) -> bool {
    groups.iter().any(|group| group.kind == "KIND_GPU" && !group.gpus.is_empty())
}

/// Where instances of KIND_CPU run: on the host, or spread over the devices that are there for them.
fn on_cpu(count: usize) -> BTreeMap<InstanceKind, usize> {
    match devices_for_cpu_instances() {
        0 => BTreeMap::from([(InstanceKind::Cpu, count)]),
        devices => {
            let of_device = |device: usize| count / devices + usize::from(device < count % devices);
            let counts = (0..devices).map(|device| (InstanceKind::Gpu(device as i32), of_device(device)));
            counts.filter(|(_, count)| *count > 0).collect()
        }
    }
}
