//! Windows against hand-written cases.

use rows::tensor::DataType;
use serde_json::json;

use super::tests::{S_IN, S_OUT, assert_refused, bind, input, output, plain, signature, with_parameters};
use super::*;

/// Binds an input x and an output y of these dims, with config.pbtxt's dims and these parameters.
fn windows(
    (model, configured): (&[i64], &[i64]),
    (of_y, y): (&[i64], &[i64]),
    parameters: &[(&str, &str)],
) -> Result<Binding, BindingError> {
    let mut config = with_parameters(parameters);
    (config["input"][0]["dims"], config["output"][0]["dims"]) = (json!(configured), json!(y));
    bind(&config, &signature(&[("x", DataType::Fp32, model), S_IN], &[("y", DataType::Fp32, of_y), S_OUT]))
}

const Y: (&[i64], &[i64]) = (&[-1, 4], &[-1, 4]);

#[test]
fn an_input_is_cut_along_the_axis_that_is_written_or_the_only_one_that_fits() {
    for (model, configured, parameters, axis, in_model) in [
        (&[-1, 512][..], &[-1][..], &[("input_windows", "x=512")][..], 1, &[-1, 512][..]),
        (&[-1, -1], &[-1], &[("input_windows", "x=512")], 1, &[-1, 512]),
        (&[-1, 576], &[-1], &[("input_windows", "x=512"), ("input_context", "x=64")], 1, &[-1, 576]),
        (&[-1, -1], &[-1], &[("input_windows", "x=512"), ("input_context", "x=64+512")], 1, &[-1, 576]),
        (&[-1, 80, -1], &[80, -1], &[("input_windows", "x=32")], 2, &[-1, 80, 32]),
        (&[-1, -1, 80], &[-1, 80], &[("input_windows", "x=32@1")], 1, &[-1, 32, 80]),
        (&[-1, 45, 80], &[-1, 80], &[("input_windows", "x=32"), ("input_context", "x=13@1:whole")], 1, &[-1, 45, 80]),
    ] {
        let binding = windows((model, configured), Y, parameters).unwrap();
        let x = input(&binding, "x");
        assert_eq!(x.dims, in_model, "{parameters:?}");
        let (_, request, window) = binding.windows().next().unwrap();
        assert_eq!(window.axis, axis);
        let mut dims: Vec<i64> = in_model.to_vec();
        (dims[0], dims[axis]) = (1, -1);
        assert_eq!(request.request_dims(x), dims, "requests bring any number");
    }
}

#[test]
fn an_answer_has_the_steps_in_a_dimension_of_their_own_or_along_the_open_one() {
    let parameters = [("input_windows", "x=512")];
    for (model, configured, gathered, empty) in [
        (&[-1, 4][..], &[-1, 4][..], Gathered::Stacked { at: 1 }, &[1, 0, 4][..]),
        (&[-1], &[-1], Gathered::Stacked { at: 1 }, &[1, 0]),
        (&[-1, -1], &[-1], Gathered::Joined { axis: 1 }, &[1, 0]),
        (&[-1, -1], &[-1, 6], Gathered::Stacked { at: 1 }, &[1, 0, 6]),
        (&[-1, 3, -1], &[3, -1], Gathered::Joined { axis: 2 }, &[1, 3, 0]),
    ] {
        let binding = windows((&[-1, 512], &[-1]), (model, configured), &parameters).unwrap();
        let y = output(&binding, "y");
        assert_eq!((y.gathered, y.empty_dims.as_slice()), (Some(gathered), empty), "{model:?} {configured:?}");
    }
    let mut unbatched = with_parameters(&parameters);
    (unbatched["max_batch_size"], unbatched["input"][0]["dims"]) = (json!(0), json!([1, -1]));
    unbatched["output"][0]["dims"] = json!([-1, 1, 4]);
    let s = |name| (name, DataType::Fp32, &[1, 4][..]);
    let model = signature(&[("x", DataType::Fp32, &[1, 512]), s("s_in")], &[s("y"), s("s_out")]);
    let binding = bind(&unbatched, &model).unwrap();
    assert_eq!(output(&binding, "y").gathered, Some(Gathered::Stacked { at: 0 }));
    assert_eq!(output(&binding, "y").empty_dims, [0, 1, 4]);
}

#[test]
fn a_request_makes_as_many_steps_as_suit_an_hour_of_speech_and_the_bytes_of_its_answer() {
    let most = |y: (&[i64], &[i64]), parameters: &[(&str, &str)]| {
        let parameters = [&[("input_windows", "x=512")], parameters].concat();
        windows((&[-1, 512], &[-1]), y, &parameters).unwrap().most_steps
    };
    assert_eq!(most(Y, &[]).steps, 1 << 17);
    assert_eq!(most((&[-1, 1024], &[-1, 1024]), &[]).steps, 1 << 16);
    assert_eq!(most((&[-1, 1 << 28], &[-1, 1 << 28]), &[]).steps, 1, "one step always runs");
    assert_eq!(most(Y, &[("max_steps_per_request", "7")]).steps, 7);
    let large = most((&[-1, 1 << 20], &[-1, 1 << 20]), &[("max_steps_per_request", "1000")]);
    assert_eq!((large.steps, large.answer_bytes), (1000, 1000 << 22));
    assert_eq!(bind(&plain(), &super::tests::model(&[])).unwrap().most_steps.steps, 1);
}

#[test]
fn windows_that_do_not_fit_are_refused_with_what_to_write() {
    let refused =
        |model: &[i64], configured: &[i64], y: (&[i64], &[i64]), parameters: &[(&str, &str)], parts: &[&str]| {
            let error = windows((model, configured), y, parameters).expect_err(&format!("{parts:?}")).to_string();
            for part in parts {
                assert!(error.contains(part), "'{part}' is missing in: {error}");
            }
        };
    let x = |windows| [("input_windows", windows)];
    let wide: &[i64] = &[-1, 512];
    refused(wide, &[512], Y, &x("x=512"), &["'input_windows'", "dims [512]", "dims: [-1] }"]);
    refused(wide, &[-1], Y, &x("x=500"), &["x=500", "[-1, 512]", "is 500"]);
    refused(wide, &[-1], Y, &x("x=512@0"), &["x=512@0", "[-1, 512]"]);
    refused(wide, &[-1], Y, &x("x=512@3"), &["no axis 3"]);
    refused(&[-1, -1, -1], &[-1, -1], Y, &x("x=5"), &["more than one axis", "'x=5@1'", "'x=5@2'"]);
    refused(&[-1, -1, -1], &[-1, -1], Y, &x("x=5@1"), &["need a length", "[-1, 5, -1]"]);
    let context = |context| [("input_windows", "x=512"), ("input_context", context)];
    refused(&[-1, -1], &[-1], Y, &context("x=64+500"), &["x=64+500"]);
    refused(wide, &[-1], ((&[-1, 4]), &[4]), &x("x=512"), &["output 'y'", "dims [4]", "write dims [-1, 4]"]);
    refused(wide, &[-1], ((&[-1, -1]), &[4]), &x("x=512"), &["output 'y'", "dims [4]", "write dims [-1]"]);
    refused(wide, &[-1], ((&[-1, -1, -1]), &[-1, -1]), &x("x=512"), &["output 'y'", "one open dimension"]);
    refused(wide, &[-1], Y, &x("z=512"), &["'input_windows' names 'z'"]);
    let held = [("input_windows", "x=512"), ("held_inputs", "x")];
    refused(wide, &[-1], Y, &held, &["'x' is one of 'held_inputs'"]);
    let mut strings = with_parameters(&x("x=5"));
    strings["input"][0] = json!({ "name": "x", "data_type": "TYPE_STRING", "dims": [-1] });
    strings["output"][0]["dims"] = json!([-1, 4]);
    let of_strings = signature(&[("x", DataType::Bytes, &[-1, 5]), S_IN], &[super::tests::Y, S_OUT]);
    assert_refused(&strings, &of_strings, &["'x' is TYPE_STRING", "windows need an input of numbers"]);
    let mut starts = with_parameters(&x("x=512"));
    (starts["input"][0]["dims"], starts["output"][0]["dims"]) = (json!([-1]), json!([-1, 4]));
    starts["sequence_batching"]["control_input"] =
        json!([
            super::tests::control("start", json!({ "kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1] }),)
        ]);
    let with_start =
        signature(&[("x", DataType::Fp32, wide), S_IN, ("start", DataType::Fp32, &[-1, 1])], &[super::tests::Y, S_OUT]);
    assert_refused(&starts, &with_start, &["'start'", "CONTROL_SEQUENCE_START", "constant_inputs"]);
}
