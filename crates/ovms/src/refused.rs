//! Options of OpenVINO Model Server that have no meaning here. Each is refused, with what to do instead.

use std::ffi::OsString;

const GENERATIVE: &str = "it is for generative models, which the gateway doesn't serve. Remove it";
const CONFIG_MANAGEMENT: &str = "edit config.json instead: the gateway reads it again when it changes";
const CORS: &str = "the gateway answers no CORS requests. Remove it, and let a proxy add these headers";
const DATA: &str =
    "send the data as the model takes it, or put the step into the model before you export it. Remove it";

/// Each option and the text.
const REFUSED: &[(&str, &str)] = &[
    ("trace_path", "use --log_level DEBUG"),
    ("grpc_memory_quota", "limit the memory of the container or of the service instead. Remove it"),
    ("grpc_channel_arguments", "let a proxy limit the age and the number of connections. Remove it"),
    (
        "custom_node_resources_cleaner_interval_seconds",
        "custom nodes belong to pipelines, which the gateway doesn't serve. Remove it",
    ),
    ("cache_dir", "ONNX Runtime compiles nothing for the CPU that could be kept. Remove it"),
    ("cpu_extension", "it extends OpenVINO, and the model runs in ONNX Runtime. Export it with operators of ONNX"),
    ("metrics_list", "GET /metrics of the REST port has all metrics; docs/ovms.md has their names. Remove it"),
    ("allow_credentials", CORS),
    ("allowed_origins", CORS),
    ("allowed_methods", CORS),
    ("allowed_headers", CORS),
    ("mean", DATA),
    ("scale", DATA),
    ("color_format", DATA),
    ("precision", DATA),
    ("list_models", CONFIG_MANAGEMENT),
    ("add_to_config", CONFIG_MANAGEMENT),
    ("remove_from_config", CONFIG_MANAGEMENT),
    ("model_repository_path", "write --config_path, or --model_path and --model_name"),
    ("api_key_file", GENERATIVE),
    ("allowed_media_domains", GENERATIVE),
    ("allowed_local_media_path", GENERATIVE),
    ("pull", GENERATIVE),
    ("source_model", GENERATIVE),
    ("source_loras", GENERATIVE),
    ("gguf_filename", GENERATIVE),
    ("overwrite_models", GENERATIVE),
    ("weight-format", GENERATIVE),
    ("extra_quantization_params", GENERATIVE),
    ("vocoder", GENERATIVE),
    ("task", GENERATIVE),
    ("graph_name", GENERATIVE),
    ("cache_interval_multiplier", GENERATIVE),
    ("cache_size", GENERATIVE),
    ("default_num_inference_steps", GENERATIVE),
    ("default_resolution", GENERATIVE),
    ("draft_eagle3_mode", GENERATIVE),
    ("draft_source_model", GENERATIVE),
    ("dynamic_split_fuse", GENERATIVE),
    ("enable_prefix_caching", GENERATIVE),
    ("enable_tool_guided_generation", GENERATIVE),
    ("guidance_scale", GENERATIVE),
    ("kv_cache_precision", GENERATIVE),
    ("max_allowed_chunks", GENERATIVE),
    ("max_num_batched_tokens", GENERATIVE),
    ("max_num_images_per_prompt", GENERATIVE),
    ("max_num_inference_steps", GENERATIVE),
    ("max_num_seqs", GENERATIVE),
    ("max_prompt_len", GENERATIVE),
    ("max_resolution", GENERATIVE),
    ("model_distribution_policy", GENERATIVE),
    ("normalize", GENERATIVE),
    ("num_images_per_prompt", GENERATIVE),
    ("num_streams", GENERATIVE),
    ("pipeline_type", GENERATIVE),
    ("pooling", GENERATIVE),
    ("reasoning_parser", GENERATIVE),
    ("resolution", GENERATIVE),
    ("tool_parser", GENERATIVE),
    ("truncate", GENERATIVE),
];

/// The text for the first of the arguments that is such an option.
pub fn check(arguments: &[OsString]) -> Result<(), String> {
    let options = arguments.iter().skip(1).take_while(|argument| *argument != "--");
    for argument in options.filter_map(|argument| argument.to_str()?.strip_prefix("--")) {
        let name = argument.split_once('=').map_or(argument, |(name, _)| name);
        if let Some((name, instead)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
            return Err(format!("--{name} is refused: {instead}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(arguments: &[&str]) -> Result<(), String> {
        check(&arguments.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn an_option_without_a_meaning_here_is_refused_by_name() {
        for arguments in [["ovms", "--cache_dir", "/opt/cache"], ["ovms", "--port=9", "--cache_dir=/opt/cache"]] {
            let error = checked(&arguments).unwrap_err();
            assert!(error.starts_with("--cache_dir is refused: "), "{error}");
        }
    }

    #[test]
    fn the_arguments_of_tritonserver_are_its_own() {
        assert_eq!(checked(&["ovms", "--port=9", "--", "--cache_dir=/x"]), Ok(()));
    }
}
