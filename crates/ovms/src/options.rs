//! The command line: OpenVINO Model Server's options and the gateway's own.
//!
//! Every option of OVMS is obeyed or refused. The checks and their texts are OVMS's where it has them.

use std::ffi::OsString;
use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, CommandFactory, FromArgMatches, Id, Parser};
use http::uri::Authority;
use log::LevelFilter;

use crate::managed::{ModelOptions, ModelSource, ServerOptions, Source, boolean};

/// OVMS's, in seconds.
const POLL_WAIT: u32 = 1;
const TRITON_HTTP_PORT: u16 = 8000;
const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
const REST_WORKERS: std::ops::RangeInclusive<u32> = 2..=10_000;

const GENERATIVE: &str = "it is for generative models, which the gateway doesn't serve. Remove it";
const CONFIG_MANAGEMENT: &str = "edit config.json instead: the gateway reads it again when it changes";
const CORS: &str = "the gateway answers no CORS requests. Remove it, and let a proxy add these headers";
const DATA: &str =
    "send the data as the model takes it, or put the step into the model before you export it. Remove it";

/// Options of OVMS without a meaning here, and what to do instead.
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
];
/// Options of OVMS for generative models.
const GENERATIVE_OPTIONS: &str = "\
    api_key_file allowed_media_domains allowed_local_media_path pull source_model source_loras gguf_filename \
    overwrite_models weight-format extra_quantization_params vocoder task graph_name cache_interval_multiplier \
    cache_size default_num_inference_steps default_resolution draft_eagle3_mode draft_source_model \
    dynamic_split_fuse enable_prefix_caching enable_tool_guided_generation guidance_scale kv_cache_precision \
    max_allowed_chunks max_num_batched_tokens max_num_images_per_prompt max_num_inference_steps max_num_seqs \
    max_prompt_len max_resolution model_distribution_policy normalize num_images_per_prompt num_streams \
    pipeline_type pooling reasoning_parser resolution tool_parser truncate";

/// Serves clients of OpenVINO Model Server with Triton's stateful backend: in front of a tritonserver that runs, or
/// with one that it starts.
#[derive(Debug, Parser)]
#[command(name = "stateful-ovms", version = VERSION, rename_all = "snake_case", max_term_width = 100)]
struct Arguments {
    /// Port of the gRPC server; 0 or absent: none.
    #[arg(long, value_name = "PORT")]
    port: Option<u32>,
    /// Addresses that it is bound to, separated by commas.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0")]
    grpc_bind_address: String,
    /// Port of the REST server; 0 or absent: none.
    #[arg(long, value_name = "PORT")]
    rest_port: Option<u32>,
    /// Addresses that it is bound to, separated by commas.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0")]
    rest_bind_address: String,
    /// At least this many threads; 1 to the number of cores.
    #[arg(long, value_name = "THREADS")]
    grpc_workers: Option<u32>,
    /// At most this many threads.
    #[arg(long, value_name = "THREADS")]
    grpc_max_threads: Option<u32>,
    /// At least this many threads; 2 to 10000.
    #[arg(long, value_name = "THREADS")]
    rest_workers: Option<u32>,
    /// TRACE, DEBUG, INFO, WARNING or ERROR; INFO if absent.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// A file for the log.
    #[arg(long, value_name = "FILE")]
    log_path: Option<PathBuf>,
    /// GET /metrics of the REST port. It is always there.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    metrics_enable: Option<bool>,

    /// gRPC address of a tritonserver that runs: host:port.
    #[arg(long, value_name = "ADDRESS", help_heading = "In front of a tritonserver", value_parser = address)]
    triton: Option<Authority>,
    /// Its HTTP address; else port 8000 of the same host.
    #[arg(long, value_name = "ADDRESS", help_heading = "In front of a tritonserver", value_parser = address)]
    triton_http: Option<Authority>,

    #[command(flatten, next_help_heading = "One model")]
    model: ModelOptions,

    #[command(flatten, next_help_heading = "With a tritonserver that it starts")]
    managed: ManagedArguments,

    #[command(flatten, next_help_heading = "With a tritonserver that it starts")]
    server: ServerOptions,
}

#[derive(Debug, clap::Args)]
#[command(rename_all = "snake_case")]
struct ManagedArguments {
    /// Several models: config.json, or the folder that has it.
    #[arg(long, value_name = "FILE")]
    config_path: Option<PathBuf>,
    /// Seconds between two looks at config.json and the models' folders; 0: none. 1 if absent.
    #[arg(long, value_name = "SECONDS")]
    file_system_poll_wait_seconds: Option<u32>,
    /// Minutes between two scans for idle sequences; 0: none. 5 if absent.
    #[arg(long, value_name = "MINUTES")]
    sequence_cleaner_poll_wait_minutes: Option<u32>,
    /// Prints the config.pbtxt files and ends.
    #[arg(id = "print-config", long = "print-config", alias = "print_config", action = ArgAction::SetTrue)]
    print_config: bool,
}

/// The command line, checked.
#[derive(Debug)]
pub struct Settings {
    pub grpc: Option<Listen>,
    pub rest: Option<Listen>,
    pub threads: usize,
    /// None: RUST_LOG may set it.
    pub log_level: Option<LevelFilter>,
    pub log_path: Option<PathBuf>,
    pub mode: Mode,
}

/// What answers the requests.
#[derive(Debug)]
pub enum Mode {
    /// A tritonserver that runs.
    InFrontOf { grpc: Authority, http: Authority },
    /// A tritonserver that the gateway starts. `poll`: the time between two reads of the files. If none, they are read
    /// on request.
    Managed { source: Source, poll: Option<Duration>, server: ServerOptions },
    /// Nothing: the config.pbtxt files are printed.
    PrintConfig(Source),
}

/// A port and the addresses it is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// IP addresses or names of hosts.
    pub addresses: Vec<String>,
    pub port: u16,
}

/// Why nothing is served.
#[derive(Debug)]
pub enum Exit {
    /// `--help` or `--version`: a text for standard output.
    Shown(String),
    /// An option is wrong.
    Usage(String),
}

impl Settings {
    /// Reads the command line; the first of `arguments` is the program's name.
    pub fn parse(arguments: Vec<OsString>) -> Result<Self, Exit> {
        if arguments.len() < 2 {
            return Err(Exit::Shown(Arguments::command().render_help().to_string()));
        }
        // Before clap, which would only say that it doesn't know these options.
        check(&arguments).map_err(Exit::Usage)?;
        let matches = Arguments::command().try_get_matches_from(arguments).map_err(exit)?;
        exclusive(&matches).map_err(Exit::Usage)?;
        Arguments::from_arg_matches(&matches).map_err(exit)?.settings().map_err(Exit::Usage)
    }
}

fn exit(error: clap::Error) -> Exit {
    let text = error.render().to_string();
    if error.use_stderr() {
        Exit::Usage(text.trim_start_matches("error: ").trim_end().to_owned())
    } else {
        Exit::Shown(text)
    }
}

/// Refuses options of a tritonserver that the gateway starts if there is one that runs, and options of a model if
/// config.json has the models.
fn exclusive(matches: &ArgMatches) -> Result<(), String> {
    let given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    // clap has a group for the options of each struct, so a new option can't be missing here.
    let first = |group: &str| matches.get_many::<Id>(group).and_then(|mut ids| ids.next()).map(Id::as_str);
    if given("triton")
        && let Some(first) = ["ModelOptions", "ManagedArguments", "ServerOptions"].into_iter().find_map(first)
    {
        // Those after `--` have no name.
        let name = if first == "arguments" { "" } else { first };
        return Err(format!(
            "--{name} is for a tritonserver that the gateway starts, and --triton names one that runs: use one of them"
        ));
    }
    if given("config_path") {
        if given("model_name") || given("model_path") {
            return Err("Use either config_path or model_path with model_name".to_owned());
        }
        if let Some(first) = first("ModelOptions") {
            return Err(format!(
                "Model parameters in CLI are exclusive with the config file: write {first} in config.json"
            ));
        }
    }
    Ok(())
}

/// Refuses the first option that OVMS has and that has no meaning here, with what to do instead.
fn check(arguments: &[OsString]) -> Result<(), String> {
    // Arguments after `--` are for tritonserver, which may have options of the same names.
    let options = arguments.iter().skip(1).take_while(|argument| *argument != "--");
    for argument in options.filter_map(|argument| argument.to_str()?.strip_prefix("--")) {
        let name = argument.split_once('=').map_or(argument, |(name, _)| name);
        let refused = REFUSED.iter().find(|(refused, _)| *refused == name).map(|(_, instead)| *instead);
        let of_generative = || GENERATIVE_OPTIONS.split(' ').any(|option| option == name).then_some(GENERATIVE);
        if let Some(instead) = refused.or_else(of_generative) {
            return Err(format!("--{name} is refused: {instead}"));
        }
    }
    Ok(())
}

impl Arguments {
    fn settings(self) -> Result<Settings, String> {
        let grpc = listen("port", self.port, "grpc_bind_address", &self.grpc_bind_address)?;
        let rest = listen("rest_port", self.rest_port, "rest_bind_address", &self.rest_bind_address)?;
        let threads = self.threads()?;
        let log_level = self.log_level.as_deref().map(level).transpose()?;
        if self.metrics_enable == Some(false) {
            let why = "--metrics_enable=false: GET /metrics is part of the REST port. Leave rest_port out, or keep /metrics \
                       from clients by a proxy";
            return Err(why.to_owned());
        }
        if self.metrics_enable.is_some() && rest.is_none() {
            return Err("rest_port setting is missing, metrics are enabled on rest port".to_owned());
        }
        let print_config = self.managed.print_config;
        if !print_config && grpc.is_none() && rest.is_none() {
            return Err("port and rest_port cannot both be unset".to_owned());
        }
        if let (Some(grpc), Some(rest)) = (&grpc, &rest)
            && grpc.port == rest.port
        {
            return Err("port and rest_port cannot have the same values".to_owned());
        }
        let log_path = self.log_path.clone();
        let mode = self.mode(log_level)?;
        Ok(Settings { grpc, rest, threads, log_level, log_path, mode })
    }

    /// How many threads serve both protocols.
    fn threads(&self) -> Result<usize, String> {
        let cores = available_parallelism().map_or(1, NonZero::get);
        if let Some(workers) = self.grpc_workers
            && !(1..=cores).contains(&(workers as usize))
        {
            return Err(format!("grpc_workers count should be from 1 to CPU core count : {cores}"));
        }
        if let Some(workers) = self.rest_workers {
            if !REST_WORKERS.contains(&workers) {
                return Err(format!("rest_workers count should be from 2 to {}", REST_WORKERS.end()));
            }
            if self.rest_port.unwrap_or(0) == 0 {
                let why = "rest_workers is set but rest_port is not set. rest_port is required to start rest servers";
                return Err(why.to_owned());
            }
        }
        if self.grpc_max_threads == Some(0) {
            return Err("--grpc_max_threads 0: 1 or more".to_owned());
        }
        // No thread waits for Triton, so there are more threads than cores only if the user asks for them.
        let least = self.rest_workers.unwrap_or(1) as usize;
        let most = self.grpc_max_threads.map_or(usize::MAX, |most| most as usize);
        Ok(cores.min(most).max(least))
    }

    fn mode(self, log_level: Option<LevelFilter>) -> Result<Mode, String> {
        if let Some(grpc) = self.triton {
            let http = match self.triton_http {
                Some(http) => http,
                None => format!("{}:{TRITON_HTTP_PORT}", grpc.host())
                    .parse()
                    .map_err(|error| format!("--triton {grpc}: {error}"))?,
            };
            return Ok(Mode::InFrontOf { grpc, http });
        }
        if self.triton_http.is_some() {
            return Err("--triton_http is the HTTP address of the server of --triton, which is missing".to_owned());
        }
        let ManagedArguments { config_path, print_config, .. } = self.managed;
        let cleaner_minutes = self.managed.sequence_cleaner_poll_wait_minutes;
        let source = Source { models: models(self.model, config_path)?, cleaner_minutes };
        if print_config {
            return Ok(Mode::PrintConfig(source));
        }
        let poll = self.managed.file_system_poll_wait_seconds.unwrap_or(POLL_WAIT);
        let poll = (poll > 0).then(|| Duration::from_secs(poll.into()));
        // One option is for the logs of both processes.
        let log_level = log_level.unwrap_or(LevelFilter::Info);
        let server = ServerOptions { log_level, log_path: self.log_path, ..self.server };
        Ok(Mode::Managed { source, poll, server })
    }
}

/// The models: those of `config.json`, or the one of the command line.
fn models(model: ModelOptions, config_path: Option<PathBuf>) -> Result<ModelSource, String> {
    if let Some(path) = config_path {
        return Ok(ModelSource::File(if path.is_dir() { path.join("config.json") } else { path }));
    }
    if model.model_name.is_none() || model.model_path.is_none() {
        return Err("Use config_path or model_path with model_name, or --triton".to_owned());
    }
    if model.stateful != Some(true)
        && (model.low_latency_transformation.is_some()
            || model.max_sequence_number.is_some()
            || model.idle_sequence_cleanup.is_some())
    {
        let why = "Setting low_latency_transformation, max_sequence_number and idle_sequence_cleanup require setting \
                   stateful flag for the model.";
        return Err(why.to_owned());
    }
    Ok(ModelSource::CommandLine(Box::new(model)))
}

fn listen(option: &str, port: Option<u32>, of_addresses: &str, addresses: &str) -> Result<Option<Listen>, String> {
    let port = u16::try_from(port.unwrap_or(0))
        .map_err(|_| format!("{} number out of range from 0 to {}", option, u16::MAX))?;
    let addresses: Vec<_> = addresses.split(',').map(|address| address.trim().to_owned()).collect();
    if addresses.iter().any(|address| address.is_empty() || address.contains(char::is_whitespace)) {
        return Err(format!("{of_addresses} has invalid format: proper hostname or IP address expected."));
    }
    Ok((port > 0).then_some(Listen { addresses, port }))
}

fn address(text: &str) -> Result<Authority, String> {
    let authority = text.parse::<Authority>().ok();
    // Without a port, the gateway would start, and every request would fail.
    let complete = |address: &Authority| {
        address.port_u16().is_some_and(|port| port > 0) && !address.host().is_empty() && !text.contains('@')
    };
    authority.filter(complete).ok_or_else(|| "a host and a port are expected: localhost:8001".to_owned())
}

fn level(name: &str) -> Result<LevelFilter, String> {
    match name {
        "TRACE" => Ok(LevelFilter::Trace),
        "DEBUG" => Ok(LevelFilter::Debug),
        "INFO" => Ok(LevelFilter::Info),
        "WARNING" => Ok(LevelFilter::Warn),
        "ERROR" => Ok(LevelFilter::Error),
        _ => Err("log_level should be one of: TRACE, DEBUG, INFO, WARNING, ERROR".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &str) -> Result<Settings, String> {
        let arguments = ["ovms"].into_iter().chain(arguments.split_whitespace()).map(OsString::from).collect();
        Settings::parse(arguments).map_err(|exit| match exit {
            Exit::Shown(text) | Exit::Usage(text) => text,
        })
    }

    fn model_of(arguments: &str) -> ModelOptions {
        let settings = parsed(&format!("--port 9000 --model_name m --model_path /models/m {arguments}")).unwrap();
        match settings.mode {
            Mode::Managed { source: Source { models: ModelSource::CommandLine(options), .. }, .. } => *options,
            mode => panic!("{mode:?}"),
        }
    }

    #[test]
    fn a_command_line_of_ovms_is_taken_as_it_is() {
        let options = model_of("--stateful --idle_sequence_cleanup=false --max_sequence_number=7 --nireq 4");
        assert_eq!((options.model_name.as_deref(), options.model_path.as_deref()), (Some("m"), Some("/models/m")));
        assert_eq!(
            (options.stateful, options.idle_sequence_cleanup, options.max_sequence_number, options.nireq),
            (Some(true), Some(false), Some(7), Some(4))
        );
        assert_eq!(options.low_latency_transformation, None);
    }

    #[test]
    fn a_flag_takes_a_value_only_behind_an_equals_sign() {
        assert_eq!(model_of("--stateful=false").stateful, Some(false));
        assert_eq!(model_of("--stateful=1").stateful, Some(true));
        assert!(parsed("--port 9000 --model_name m --model_path /m --stateful true").is_err());
        assert!(
            parsed("--port 9000 --model_name m --model_path /m --stateful=yes").unwrap_err().contains("--stateful")
        );
    }

    #[test]
    fn ports_and_addresses_are_read() {
        let settings =
            parsed("--port=9000 --rest_port 8000 --grpc_bind_address ::1,127.0.0.1 --triton localhost:8001").unwrap();
        let addresses = vec!["::1".to_owned(), "127.0.0.1".to_owned()];
        assert_eq!(settings.grpc, Some(Listen { addresses, port: 9000 }));
        assert_eq!(settings.rest, Some(Listen { addresses: vec!["0.0.0.0".to_owned()], port: 8000 }));
        assert_eq!(parsed("--port=9000 --rest_port 0 --triton localhost:8001").unwrap().rest, None);
    }

    #[test]
    fn tritons_http_address_is_that_of_its_host() {
        for (given, expected) in [
            ("--triton host:8001", "host:8000"),
            ("--triton [::1]:9", "[::1]:8000"),
            ("--triton host:8001 --triton_http other:1", "other:1"),
        ] {
            match parsed(&format!("--port 1 {given}")).unwrap().mode {
                Mode::InFrontOf { http, .. } => assert_eq!(http.as_str(), expected),
                mode => panic!("{mode:?}"),
            }
        }
    }

    #[test]
    fn the_files_are_looked_at_each_second_or_as_often_as_asked() {
        for (given, expected) in
            [("", Some(1)), ("--file_system_poll_wait_seconds 9", Some(9)), ("--file_system_poll_wait_seconds=0", None)]
        {
            match parsed(&format!("--port 1 --config_path /c.json {given}")).unwrap().mode {
                Mode::Managed { poll, .. } => assert_eq!(poll, expected.map(Duration::from_secs)),
                mode => panic!("{mode:?}"),
            }
        }
    }

    #[test]
    fn the_arguments_behind_two_dashes_are_tritonservers() {
        match parsed("--port 1 --config_path /c.json -- --log-verbose=1 --pull").unwrap().mode {
            Mode::Managed { server, .. } => assert_eq!(server.arguments, ["--log-verbose=1", "--pull"]),
            mode => panic!("{mode:?}"),
        }
    }

    #[test]
    fn threads_are_as_many_as_cores_unless_asked_for() {
        let cores = available_parallelism().unwrap().get();
        let threads = |given: &str| parsed(&format!("--rest_port 1 --triton h:1 {given}")).unwrap().threads;
        assert_eq!(threads(""), cores);
        assert_eq!(threads("--grpc_workers 1"), cores);
        assert_eq!(threads("--rest_workers 1000"), 1000.max(cores));
        assert_eq!(threads("--grpc_max_threads 1"), 1);
    }

    #[test]
    fn wrong_options_are_named() {
        for (arguments, words) in [
            ("--triton h:1", "port and rest_port cannot both be unset"),
            ("--port 0 --rest_port 0 --triton h:1", "port and rest_port cannot both be unset"),
            ("--port 65536 --triton h:1", "port number out of range from 0 to 65535"),
            ("--port 5 --rest_port 5 --triton h:1", "port and rest_port cannot have the same values"),
            ("--port 5", "Use config_path or model_path with model_name"),
            ("--port 5 --model_name m", "Use config_path or model_path with model_name"),
            ("--port 5 --config_path c --model_name m", "Use either config_path or model_path with model_name"),
            ("--port 5 --config_path c --nireq 1", "nireq in config.json"),
            ("--port 5 --config_path c --stateful", "stateful in config.json"),
            ("--port 5 --triton h:1 --stateful", "--stateful is for a tritonserver that the gateway starts"),
            ("--port 5 --triton h:1 --config_path c", "--config_path is for"),
            ("--port 5 --triton h:1 --tritonserver /t", "--tritonserver is for"),
            ("--port 5 --triton h:1 --file_system_poll_wait_seconds 1", "--file_system_poll_wait_seconds is for"),
            ("--port 5 --triton h:1 -- --x", "is for a tritonserver"),
            ("--port 5 --triton h:1 --print-config", "--print-config is for"),
            ("--port 5 --config_path c --stateful=false --layout NCHW", "stateful in config.json"),
            ("--port 5 --triton localhost", "'--triton <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton localhost:", "'--triton <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton localhost:0", "'--triton <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton localhost:65536", "'--triton <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton :8001", "'--triton <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton http://localhost:8001", "'--triton <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton h:1 --triton_http h", "'--triton_http <ADDRESS>': a host and a port are expected"),
            ("--port 5 --triton_http h:1 --config_path c", "--triton, which is missing"),
            ("--port 5 --model_name m --model_path p --max_sequence_number 1", "require setting stateful flag"),
            ("--port 5 --model_name m --model_path p --low_latency_transformation", "require setting stateful flag"),
            ("--port 5 --triton h:1 --log_level LOUD", "log_level should be one of"),
            ("--port 5 --triton h:1 --grpc_bind_address ,", "grpc_bind_address has invalid format"),
            ("--port 5 --triton h:1 --metrics_enable", "rest_port setting is missing"),
            ("--rest_port 5 --triton h:1 --metrics_enable=false", "--metrics_enable=false"),
            ("--port 5 --triton h:1 --grpc_workers 0", "grpc_workers count should be from 1"),
            ("--port 5 --triton h:1 --rest_workers 2", "rest_port is required"),
            ("--rest_port 5 --triton h:1 --rest_workers 1", "rest_workers count should be from 2"),
            ("--port 5 --triton h:1 --cache_dir /c", "--cache_dir is refused"),
            ("--port 5 --triton h:1 --no_such", "--no_such"),
        ] {
            let error = parsed(arguments).expect_err(arguments);
            assert!(error.contains(words), "{arguments}: {error}");
        }
    }

    #[test]
    fn the_command_of_the_parser_is_sound() {
        Arguments::command().debug_assert();
    }

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
