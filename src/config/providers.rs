//! Parameters of execution providers.

use super::error::ConfigError;
use super::error::field;
use super::parameters::{Parameters, bad};
use super::raw;

/// Instances have to be of a kind that this version serves.
pub(super) fn check_instances(groups: &[raw::InstanceGroup]) -> Result<(), ConfigError> {
    match groups.iter().find(|group| !matches!(group.kind.as_str(), "" | "KIND_CPU")) {
        None => Ok(()),
        Some(group) => Err(field(
            "instance_group.kind",
            &group.kind,
            "this version runs models on the CPU only: set 'instance_group [ { kind: KIND_CPU } ]'",
        )),
    }
}

/// Parameters of execution providers: checked here, and without effect where the model runs on the CPU.
pub(super) fn check_providers(parameters: &Parameters) -> Result<(), ConfigError> {
    let provider = parameters.choice("ort_ep", &[("cpu", "cpu"), ("cuda", "cuda"), ("trt", "trt")])?;
    let precision = parameters.choice("compute_precision", &[("fp32", "fp32"), ("fp16", "fp16")])?;
    if precision == Some("fp16") {
        return Err(bad(
            "compute_precision",
            "fp16",
            "only TensorRT computes in fp16, and this model runs on the CPU: 'fp32' is expected",
        ));
    }
    let caching = parameters.switch("enable_trt_caching", false)?;
    let graph = parameters.switch("enable_cuda_graph", false)?;
    if let Some(dir) = parameters.text("trt_cache_dir").filter(|dir| caching && !dir.starts_with('/')) {
        return Err(bad("trt_cache_dir", dir, "an absolute path is expected"));
    }
    parameters.number("error_inject_rate", 0u32..=100, "a percentage from 0 to 100")?;
    let gpu_only = [
        ("ort_ep", provider.is_some_and(|name| name != "cpu")),
        ("enable_trt_caching", caching),
        ("enable_cuda_graph", graph),
    ];
    for (name, _) in gpu_only.iter().filter(|(_, given)| *given) {
        log::info!("parameter '{name}' has no effect: instances are of KIND_CPU");
    }
    Ok(())
}
