use rows::tensor::DataType;
use sequences::pool::SlotLimits;
use sequences::scheduler::IdleRule;
use serde_json::{Value, json};

use super::*;

fn minimal() -> Value {
    json!({
        "name": "m",
        "max_batch_size": 4,
        "input": [{ "name": "x", "data_type": "TYPE_FP32", "dims": [4, -1] }],
        "output": [{ "name": "y", "data_type": "TYPE_INT64", "dims": ["1"], "reshape": { "shape": [] } }],
        "sequence_batching": {
            "max_sequence_idle_microseconds": 5_000_000,
            "oldest": { "max_candidate_sequences": 20, "max_queue_delay_microseconds": 100 },
        },
        "instance_group": [{ "count": 1, "kind": "KIND_CPU" }],
        "parameters": { "state_pairs": { "string_value": "<<<a, b>>>" } },
    })
}

fn parse(config: &Value) -> Result<Config> {
    Config::for_tests(config, &[])
}

fn with(parameters: &[(&str, &str)]) -> Result<Config> {
    Config::for_tests(&minimal(), parameters)
}

const LAZY: [(&str, &str); 4] = [
    ("initial_buffer_size", "8"),
    ("subsequent_buffer_size", "4"),
    ("buffer_alloc_threshold", "4"),
    ("buffer_dealloc_threshold", "6"),
];

fn lazy_but(name: &str, value: &str) -> Vec<(&'static str, String)> {
    LAZY.iter().map(|(known, given)| (*known, if *known == name { value } else { given }.to_owned())).collect()
}

#[test]
fn a_plain_configuration_is_read_with_its_defaults() {
    let config = parse(&minimal()).unwrap();
    assert_eq!(config.placements[0].slots, SlotLimits { reserve: 20, next_slab: 16, ..SlotLimits::all_at_once(20) });
    assert_eq!(config.idle_limit, Duration::from_secs(6));
    assert_eq!(config.inputs[0].dims, [4, -1]);
    assert_eq!(config.outputs[0].dims, [0i64; 0]);
    assert_eq!(config.strategy, Strategy::Oldest);
    assert_eq!(config.candidates, 20);
}

#[test]
fn a_run_has_no_more_rows_than_it_may_padding_among_them() {
    for (parameters, rows, padded) in [
        (&[][..], 4, 1),
        (&[("max_rows_per_run", "1")], 1, 1),
        (&[("max_rows_per_run", "3"), ("always_pad_to_max_batch", "1")], 3, 3),
    ] {
        let config = with(parameters).unwrap();
        assert_eq!((config.max_rows_per_run, config.most_rows(), config.padding.rows(1)), (rows, rows, padded));
    }
}

#[test]
fn a_sequence_does_not_expire_while_core_may_hold_its_request_back() {
    let mut config = minimal();
    config["sequence_batching"]["oldest"]["max_queue_delay_microseconds"] = json!(7_000_000);
    let config = parse(&config).unwrap();
    assert_eq!(config.idle_limit, Duration::from_secs(5) + config.quiet);
    assert!(config.quiet > Duration::from_secs(7));
}

#[test]
fn the_ratio_never_loses_a_slot_to_rounding_and_leaves_at_least_one() {
    for (ratio, capacity) in [("0.9", 18), ("0.7", 14), ("0.29", 5), ("1", 20), ("0.001", 1)] {
        assert_eq!(
            with(&[("max_candidate_sequence_use_ratio", ratio)]).unwrap().placements[0].slots.capacity,
            capacity,
            "{ratio}"
        );
    }
}

#[test]
fn instances_share_one_pool_of_their_capacities() {
    let mut config = minimal();
    config["instance_group"] = json!([{ "count": 2, "kind": "KIND_CPU" }, { "count": 1, "kind": "KIND_CPU" }]);
    assert_eq!(parse(&config).unwrap().placements[0].slots.capacity, 60);
}

#[test]
fn lazy_buffers_are_read() {
    let limits = with(&LAZY).unwrap().placements[0].slots;
    assert_eq!(
        limits,
        SlotLimits { capacity: 18, reserve: 20, first_slab: 8, next_slab: 4, grow_below: 4, shrink_above: 6 }
    );
    let limits =
        with(&lazy_but("initial_buffer_size", "500").iter().map(|(n, v)| (*n, v.as_str())).collect::<Vec<_>>());
    assert_eq!(limits.unwrap().placements[0].slots.first_slab, 18, "capped by the capacity");
}

#[test]
fn each_rule_between_the_buffer_sizes_is_named_when_broken() {
    for (name, value, rule) in [
        ("initial_buffer_size", "3", "max_batch_size, 4"),
        ("subsequent_buffer_size", "3", "max_batch_size, 4"),
        ("buffer_alloc_threshold", "3", "max_batch_size, 4"),
        ("buffer_alloc_threshold", "9", "initial_buffer_size, 8"),
        ("buffer_dealloc_threshold", "-1", "0 or more"),
        ("subsequent_buffer_size", "many", "0 or more"),
        ("initial_buffer_size", "1e3", "0 or more"),
    ] {
        let parameters = lazy_but(name, value);
        let parameters: Vec<_> = parameters.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let error = with(&parameters).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(value) && error.contains(rule), "{error}");
    }
}

#[test]
fn lazy_parameters_come_all_four_or_not_at_all() {
    for (missing, _) in LAZY {
        let three: Vec<_> = LAZY.into_iter().filter(|(name, _)| *name != missing).collect();
        let error = with(&three).unwrap_err().to_string();
        assert!(error.contains(&format!("'{missing}' is missing")), "{error}");
    }
}

#[test]
fn bad_values_name_parameter_value_and_what_is_allowed() {
    for (name, value) in [
        ("max_candidate_sequence_use_ratio", "0"),
        ("max_candidate_sequence_use_ratio", "1.01"),
        ("max_candidate_sequence_use_ratio", "NaN"),
        ("max_candidate_sequence_use_ratio", "-0.5"),
        ("sequence_idle_margin_microseconds", "-1"),
        ("state_pairs", "a b"),
        ("constant_inputs", "sr"),
    ] {
        let error = with(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(value) && error.contains("expected"), "{error}");
    }
}

#[test]
fn an_unknown_parameter_is_refused_and_tritons_own_pass() {
    let error = with(&[("state_pars", "x")]).unwrap_err().to_string();
    assert!(error.contains("'state_pars'") && error.contains("'state_pairs'"), "{error}");
    assert!(with(&[("TRITON_ENABLE_X", "1"), ("FORCE_CPU_ONLY_INPUT_TENSORS", "yes")]).is_ok());
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    for (field, value) in [
        ("/sequence_batching/iterative_sequence", json!(true)),
        ("/sequence_batching/state", json!([{ "input_name": "a" }])),
        ("/instance_group/0/kind", json!("KIND_MODEL")),
        ("/max_batch_size", json!(-1)),
        ("/input/0/data_type", json!("TYPE_INVALID")),
    ] {
        let mut config = minimal();
        let (parent, name) = field.rsplit_once('/').unwrap();
        let object = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        object.insert(name.to_owned(), value);
        let error = parse(&config).unwrap_err().to_string();
        let word = name.split('/').next_back().unwrap();
        assert!(error.contains(word), "{field}: {error}");
    }
}

/// The minimal configuration without `sequence_batching`, with these parameters and this number of instances.
fn without_batching(parameters: &[(&str, &str)], instances: usize) -> Result<Config> {
    let mut config = minimal();
    config.as_object_mut().unwrap().remove("sequence_batching");
    config["instance_group"] = json!([{ "kind": "KIND_CPU", "count": instances }]);
    for (name, value) in parameters {
        config["parameters"][*name] = json!({ "string_value": value });
    }
    parse(&config)
}

#[test]
fn one_instance_without_sequence_batching_is_scheduled_by_this_backend() {
    let own = |parameters: &[(&str, &str)]| match without_batching(parameters, 1).unwrap().strategy {
        Strategy::Own(own) => own,
        other => panic!("{other:?}"),
    };
    let as_it_comes = own(&[]);
    assert_eq!((as_it_comes.workers, as_it_comes.rules.max_sequences), (1, 500));
    assert_eq!(as_it_comes.rules.max_queued, 100);
    assert_eq!(own(&[("worker_count", "3"), ("max_sequence_number", "7")]).rules.max_sequences, 7);
}

#[test]
fn options_of_openvino_model_server_keep_its_rule_for_idle_sequences() {
    const SCANS: &str = "sequence_cleaner_poll_wait_minutes";
    let rule = |parameters: &[(&str, &str)], by_server: Option<&str>| {
        let mut config = minimal();
        config.as_object_mut().unwrap().remove("sequence_batching");
        for (name, value) in parameters {
            config["parameters"][*name] = json!({ "string_value": value });
        }
        let mut partial = PartialConfig::from_json(config.to_string().as_bytes()).unwrap();
        partial.scans_of_server = by_server.map(|minutes| scans(minutes).unwrap());
        match partial.resolve().unwrap().strategy {
            Strategy::Own(own) => own.rules.idle,
            other => panic!("{other:?}"),
        }
    };
    let (scans, after) = (|seconds| IdleRule::TwoScans(Duration::from_secs(seconds)), IdleRule::After);
    assert_eq!(rule(&[], None), after(Duration::from_secs(60)));
    assert_eq!(rule(&[("worker_count", "2"), ("max_queue_size", "5")], None), after(Duration::from_secs(60)));
    for option in [("stateful", "true"), ("max_sequence_number", "9"), ("idle_sequence_cleanup", "true")] {
        assert_eq!(rule(&[option], None), scans(300), "{option:?}");
        assert_eq!(rule(&[option], Some("2")), scans(120), "{option:?}");
    }
    assert_eq!(rule(&[], Some("2")), scans(120));
    assert_eq!(rule(&[], Some("0")), IdleRule::Never);
    assert_eq!(rule(&[(SCANS, "3")], Some("2")), scans(180));
    assert_eq!(rule(&[(SCANS, "0")], Some("2")), IdleRule::Never);
    assert_eq!(rule(&[("idle_sequence_cleanup", "false")], Some("2")), IdleRule::Never);
    let both = [("sequence_idle_timeout_ms", "1500"), ("idle_sequence_cleanup", "false"), ("stateful", "true")];
    assert_eq!(rule(&both, Some("2")), after(Duration::from_millis(1500)));
    for wrong in ["soon", "-1", "inf", "NaN", "1e300"] {
        assert_eq!(super::scans(wrong), None, "{wrong}");
        let error = without_batching(&[(SCANS, wrong)], 1).unwrap_err().to_string();
        assert!(error.contains(SCANS) && error.contains(wrong) && error.contains("number of minutes"), "{error}");
    }
}

#[test]
fn two_instances_need_sequence_batching() {
    for parameters in [&[] as &[(&str, &str)], &[("scheduling", "own")], &[("worker_count", "2")]] {
        let error = without_batching(parameters, 2).unwrap_err().to_string();
        assert!(error.contains("instance_group is 2") && error.contains("'worker_count' 2"), "{error}");
    }
    let error = without_batching(&[("scheduling", "oldest")], 2).unwrap_err().to_string();
    assert!(error.contains("sequence_batching") && error.contains("missing"), "{error}");
}

#[test]
fn what_core_does_in_front_of_the_scheduler_must_not_break_sequences() {
    for (field, value, word) in [
        ("response_cache", json!({ "enable": true }), "response_cache.enable is true"),
        ("dynamic_batching", json!({ "priority_levels": 2 }), "dynamic_batching.priority_levels is 2"),
        ("model_warmup", json!([{ "name": "w" }]), "'warmup_batch_sizes'"),
    ] {
        let mut config = minimal();
        config[field] = value;
        let with_core = parse(&config);
        assert!(with_core.is_ok(), "core's sequence batcher: {with_core:?}");
        config.as_object_mut().unwrap().remove("sequence_batching");
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn what_only_this_backends_scheduler_knows_is_refused_elsewhere() {
    for (name, value) in [("worker_count", "2"), ("max_sequence_number", "7"), ("on_duplicate_start", "restart")] {
        let error = with(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(value) && error.contains("'sequence_batching'"), "{error}");
    }
    assert!(without_batching(&[("stateful", "false")], 1).unwrap_err().to_string().contains("'true'"));
    assert!(with(&[("stateful", "true"), ("low_latency_transformation", "true")]).is_ok());
}

#[test]
fn controls_keep_their_type_and_values() {
    let mut config = minimal();
    config["sequence_batching"]["control_input"] = json!([
        { "name": "s", "control": [{ "kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0.0, 1.5] }] },
        { "name": "e", "control": [{ "kind": "CONTROL_SEQUENCE_END", "int32_false_true": [3, 7] }] },
        { "name": "r", "control": [{ "kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [false, true] }] },
        { "name": "c", "control": [{ "kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64" }] },
    ]);
    let controls = parse(&config).unwrap().written.controls;
    assert_eq!(controls[0].kind, ControlKind::Flag(Flag::Start, FalseTrue { no: 0.0, yes: 1.5 }));
    assert_eq!(controls[1].kind, ControlKind::Flag(Flag::End, FalseTrue { no: 3.0, yes: 7.0 }));
    assert_eq!(controls[2].kind, ControlKind::Flag(Flag::Ready, FalseTrue { no: 0.0, yes: 1.0 }));
    assert_eq!(controls[3].kind, ControlKind::CorrelationId(DataType::Uint64));

    config["sequence_batching"]["control_input"][0]["control"][0] = json!({ "kind": "CONTROL_SEQUENCE_START" });
    assert!(parse(&config).unwrap_err().to_string().contains("'s'"));
}
