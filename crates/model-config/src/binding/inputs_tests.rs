//! What feeds the model's inputs beside requests and states: controls and constants; and that exactly one thing feeds
//! each.

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::tests::{assert_refused, bind, control, input, model, plain, with, with_controls, with_parameters};
use super::*;

fn with_constants(constants: &str) -> Value {
    with_parameters(&[("constant_inputs", constants)])
}

#[test]
fn an_input_that_nothing_feeds_is_refused_with_the_ways_to_feed_it() {
    let parts = ["'sr'", "TYPE_INT64 [-1, 1]", "'input'", "'state_pairs'", "'control_input'", "'constant_inputs'"];
    assert_refused(&plain(), &model(&[("sr", DataType::Int64, &[-1, 1])]), &parts);
}

#[test]
fn an_input_that_two_things_feed_is_refused_with_both() {
    let start = json!({ "kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1] });
    let state = json!([
        { "name": "x", "data_type": "TYPE_FP32", "dims": [4, 5] },
        { "name": "s_in", "data_type": "TYPE_FP32", "dims": [4] },
    ]);
    let end = json!({ "kind": "CONTROL_SEQUENCE_END", "fp32_false_true": [0, 1] });
    let twice = [control("c", start.clone()), control("c", end)];
    let mut control_and_constant = with_constants("c=1");
    control_and_constant["sequence_batching"]["control_input"] = json!([control("c", start)]);
    let c = [("c", DataType::Fp32, &[-1, 1][..])];
    for (config, parts) in [
        (with(&[("/input", state)]), ["'s_in'", "by 'input'", "by 'state_pairs'"]),
        (control_and_constant, ["'c'", "by 'control_input'", "by 'constant_inputs'"]),
        (with_controls(&twice), ["'c'", "by 'control_input'", "and by 'control_input'"]),
    ] {
        assert_refused(&config, &model(&c), &parts);
    }
}

#[test]
fn controls_take_the_type_of_the_model() {
    let start = json!({ "kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1] });
    for (data_type, no, yes) in [
        (DataType::Bool, vec![0], vec![1]),
        (DataType::Uint8, vec![0], vec![1]),
        (DataType::Int8, vec![0], vec![1]),
        (DataType::Uint16, 0u16.to_ne_bytes().to_vec(), 1u16.to_ne_bytes().to_vec()),
        (DataType::Int32, 0i32.to_ne_bytes().to_vec(), 1i32.to_ne_bytes().to_vec()),
        (DataType::Int64, 0i64.to_ne_bytes().to_vec(), 1i64.to_ne_bytes().to_vec()),
        (DataType::Uint64, 0u64.to_ne_bytes().to_vec(), 1u64.to_ne_bytes().to_vec()),
        (DataType::Fp16, vec![0, 0], half::f16::ONE.to_ne_bytes().to_vec()),
        (DataType::Bf16, vec![0, 0], half::bf16::ONE.to_ne_bytes().to_vec()),
        (DataType::Fp32, 0f32.to_ne_bytes().to_vec(), 1f32.to_ne_bytes().to_vec()),
        (DataType::Fp64, 0f64.to_ne_bytes().to_vec(), 1f64.to_ne_bytes().to_vec()),
    ] {
        let binding =
            bind(&with_controls(&[control("c", start.clone())]), &model(&[("c", data_type, &[-1, 1])])).unwrap();
        let Source::Control(BoundControl::Flag { flag, no: bound_no, yes: bound_yes }) = &input(&binding, "c").source
        else {
            panic!("{data_type} is no flag");
        };
        assert_eq!((*flag, bound_no, bound_yes), (Flag::Start, &no, &yes), "{data_type}");
    }
}

#[test]
fn controls_of_every_kind_have_one_element_a_row() {
    let kinds = [
        json!({ "kind": "CONTROL_SEQUENCE_START", "bool_false_true": [false, true] }),
        json!({ "kind": "CONTROL_SEQUENCE_END", "fp32_false_true": [0, 1] }),
        json!({ "kind": "CONTROL_SEQUENCE_READY", "int32_false_true": [0, 1] }),
        json!({ "kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_INT32" }),
    ];
    for kind in kinds {
        let config = with_controls(&[control("c", kind)]);
        for (dims, fed) in
            [(&[-1][..], &[-1][..]), (&[-1, 1], &[-1, 1]), (&[-1, -1], &[-1, 1]), (&[-1, 1, 1], &[-1, 1, 1])]
        {
            let binding = bind(&config, &model(&[("c", DataType::Int32, dims)])).unwrap();
            assert_eq!((input(&binding, "c").batch_axis, input(&binding, "c").dims.as_slice()), (Some(0), fed));
        }
        for dims in [&[][..], &[1], &[1, 1], &[8], &[-1, 2], &[2, -1]] {
            let parts = ["control_input 'c'", &Dims(dims).to_string(), "[batch] or [batch, 1]"];
            assert_refused(&config, &model(&[("c", DataType::Int32, dims)]), &parts);
        }
        let one = with(&[
            ("/max_batch_size", json!(1)),
            ("/sequence_batching/control_input", config["sequence_batching"]["control_input"].clone()),
        ]);
        for (dims, axis) in [(&[][..], None), (&[1], Some(0)), (&[-1], Some(0)), (&[1, 1], Some(0))] {
            let binding = bind(&one, &model(&[("c", DataType::Int32, dims)])).unwrap();
            assert_eq!(input(&binding, "c").batch_axis, axis, "{dims:?}");
        }
        assert_refused(&one, &model(&[("c", DataType::Int32, &[2])]), &["control_input 'c'", "[2]"]);
    }
}

#[test]
fn a_control_value_that_the_type_cannot_hold_is_refused() {
    for (values, data_type, parts) in [
        (json!([0.0, 1.5]), DataType::Int32, ["control_input 'c'", "1.5", "TYPE_INT32"]),
        (json!([-1.0, 1.0]), DataType::Uint8, ["control_input 'c'", "-1", "TYPE_UINT8"]),
        (json!([0.0, 300.0]), DataType::Uint8, ["control_input 'c'", "300", "TYPE_UINT8"]),
        (json!([0.0, 70000.0]), DataType::Fp16, ["control_input 'c'", "'70000'", "TYPE_FP16"]),
        (json!([0.0, 1.0]), DataType::Bytes, ["control_input 'c'", "0", "TYPE_STRING"]),
    ] {
        let start = json!({ "kind": "CONTROL_SEQUENCE_START", "fp32_false_true": values });
        assert_refused(&with_controls(&[control("c", start)]), &model(&[("c", data_type, &[-1, 1])]), &parts);
    }
}

#[test]
fn control_values_that_are_the_same_for_the_model_are_refused() {
    for (values, data_type, parts) in [
        (json!([0.2, 1.0]), DataType::Bool, ["control_input 'c'", "0.2", "TYPE_BOOL"]),
        (json!([1.0, 1.0]), DataType::Int32, ["control_input 'c'", "1", "TYPE_INT32"]),
        (json!([0.0, -0.0]), DataType::Fp32, ["control_input 'c'", "-0", "TYPE_FP32"]),
        (json!([2048.0, 2049.0]), DataType::Fp16, ["control_input 'c'", "2049", "TYPE_FP16"]),
    ] {
        let ready = json!({ "kind": "CONTROL_SEQUENCE_READY", "fp32_false_true": values });
        assert_refused(&with_controls(&[control("c", ready)]), &model(&[("c", data_type, &[-1, 1])]), &parts);
    }
}

#[test]
fn a_control_that_the_model_does_not_take_is_left_out() {
    let start = json!({ "kind": "CONTROL_SEQUENCE_START", "bool_false_true": [false, true] });
    let binding = bind(&with_controls(&[control("START", start)]), &model(&[])).unwrap();
    assert_eq!(binding.inputs.len(), 2);
}

#[test]
fn constants_are_read_in_the_type_of_the_model() {
    for (data_type, value, bytes) in [
        (DataType::Bool, "true", vec![1]),
        (DataType::Bool, "0", vec![0]),
        (DataType::Uint8, "255", vec![255]),
        (DataType::Int8, "-128", vec![128]),
        (DataType::Uint16, "65535", vec![255, 255]),
        (DataType::Int16, "-1", vec![255, 255]),
        (DataType::Uint32, "16000", 16000u32.to_ne_bytes().to_vec()),
        (DataType::Int32, "-16000", (-16000i32).to_ne_bytes().to_vec()),
        (DataType::Uint64, "18446744073709551615", vec![255; 8]),
        (DataType::Int64, "16000", 16000i64.to_ne_bytes().to_vec()),
        (DataType::Fp16, "1.5", half::f16::from_f32(1.5).to_ne_bytes().to_vec()),
        (DataType::Bf16, "-2", half::bf16::from_f32(-2.0).to_ne_bytes().to_vec()),
        (DataType::Fp32, "1e-3", 1e-3f32.to_ne_bytes().to_vec()),
        (DataType::Fp64, "0.1", 0.1f64.to_ne_bytes().to_vec()),
        (DataType::Fp16, "65519", half::f16::MAX.to_ne_bytes().to_vec()),
        (DataType::Fp16, "-inf", half::f16::NEG_INFINITY.to_ne_bytes().to_vec()),
        (DataType::Fp32, "infinity", f32::INFINITY.to_ne_bytes().to_vec()),
    ] {
        let binding = bind(&with_constants(&format!("k={value}")), &model(&[("k", data_type, &[])])).unwrap();
        let Source::Constant(bound) = &input(&binding, "k").source else { panic!("{data_type} is no constant") };
        assert_eq!(*bound, bytes, "{data_type} {value}");
    }
}

#[test]
fn a_constant_that_its_type_cannot_hold_is_refused() {
    for (data_type, value) in [
        (DataType::Bool, "2"),
        (DataType::Uint8, "256"),
        (DataType::Uint32, "-1"),
        (DataType::Int64, "1.0"),
        (DataType::Fp32, "one"),
        (DataType::Fp16, "70000"),
        (DataType::Bf16, "-1e39"),
        (DataType::Fp32, "1e39"),
        (DataType::Fp64, "1e400"),
        (DataType::Bytes, "text"),
    ] {
        let parts = ["constant_inputs", "'k'", &format!("'{value}'"), &data_type.to_string()];
        assert_refused(&with_constants(&format!("k={value}")), &model(&[("k", data_type, &[])]), &parts);
    }
}

#[test]
fn a_constant_has_as_many_elements_as_a_row_of_its_input() {
    let cases: [(&[i64], &str, Option<usize>, usize); 5] = [
        (&[], "k=7", None, 1),
        (&[2], "k=[7, 8]", None, 2),
        (&[-1], "k=7", Some(0), 1),
        (&[-1, 2], "k=[7, 8]", Some(0), 2),
        (&[2, -1], "k=[7, 8]", Some(1), 2),
    ];
    for (dims, text, axis, elements) in cases {
        let binding = bind(&with_constants(text), &model(&[("k", DataType::Int64, dims)])).unwrap();
        let Source::Constant(bytes) = &input(&binding, "k").source else { panic!("no constant") };
        assert_eq!((input(&binding, "k").batch_axis, bytes.len()), (axis, elements * 8), "{dims:?}");
    }
    for (dims, why) in [
        (&[3][..], "the model wants 3 elements, [3]"),
        (&[-1, 3], "the model wants 3 elements, [-1, 3]"),
        (&[-1, -1], "the model's dims [-1, -1] are open"),
    ] {
        let model = model(&[("k", DataType::Int64, dims)]);
        assert_refused(&with_constants("k=[7, 8]"), &model, &["constant_inputs", "'k'", "7, 8", why]);
    }
    let unbatched = with(&[
        ("/max_batch_size", json!(0)),
        ("/input/0/dims", json!([-1, 4, 5])),
        ("/output/0/dims", json!([-1, 4])),
        ("/parameters/constant_inputs", json!({ "string_value": "k=7" })),
    ]);
    assert_refused(&unbatched, &model(&[("k", DataType::Int64, &[-1])]), &["'k'", "the model's dims [-1] are open"]);
}
