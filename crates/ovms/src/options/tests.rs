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
    assert!(parsed("--port 9000 --model_name m --model_path /m --stateful=yes").unwrap_err().contains("--stateful"));
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
