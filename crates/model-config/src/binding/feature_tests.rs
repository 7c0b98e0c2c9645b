//! States, initial values, contexts, rows of different lengths, and inputs without a batch, against hand-written cases.

use rows::tensor::{DataType, Dims};
use serde_json::{Value, json};

use super::bound::Trim;
use super::tests::{
    S_IN, S_OUT, Spec, X, Y, assert_refused, bind, input, model, output, signature, with, with_parameters,
};
use super::*;
use crate::config::{Config, InitialSources, StatePair};
use crate::onnx::Signature;

/// The plain configuration with its state in `sequence_batching.state`.
fn declared(dims: &[i64], initial: Value) -> Value {
    let state = json!([{
        "input_name": "s_in", "output_name": "s_out", "data_type": "TYPE_FP32", "dims": dims, "initial_state": initial,
    }]);
    let mut config = with(&[("/sequence_batching/state", state)]);
    config["parameters"] = json!({});
    config
}

/// A model whose state has these dims at both ends.
fn with_state(dims: &[i64]) -> Signature {
    signature(&[X, ("s_in", DataType::Fp32, dims)], &[Y, ("s_out", DataType::Fp32, dims)])
}

#[test]
fn a_declared_state_says_where_the_batch_is() {
    for (model, dims, axis, row) in [
        (&[-1, 4][..], &[4][..], 0, &[1, 4][..]),
        (&[2, -1, 8], &[2, 8], 1, &[2, 1, 8]),
        (&[2, -1, 8], &[2, -1, 8], 1, &[2, 1, 8]),
        (&[-1, -1, 8], &[5, 8], 0, &[1, 5, 8]),
        (&[-1, -1, 8], &[-1, 8], 0, &[1, -1, 8]),
        (&[-1, -1, -1], &[3, -1, 8], 1, &[3, 1, 8]),
    ] {
        let state = bind(&declared(dims, json!([])), &with_state(model)).unwrap().states.remove(0);
        assert_eq!((state.batch_axis, state.dims.as_slice()), (Some(axis), row), "{model:?} {dims:?}");
        let at_start: Vec<i64> = row.iter().map(|&dim| dim.abs()).collect();
        assert_eq!(state.initial.dims, at_start, "what is open begins with one, as in Triton");
    }
    for dims in [&[5][..], &[4, 4, 4], &[]] {
        let text = Dims(dims).to_string();
        assert_refused(&declared(dims, json!([])), &with_state(&[-1, 4]), &["'s_in'", &text, "[-1, 4]"]);
    }
    let mut other = declared(&[4], json!([]));
    other["sequence_batching"]["state"][0]["data_type"] = json!("TYPE_INT8");
    assert_refused(&other, &with_state(&[-1, 4]), &["sequence_batching.state 's_in'", "TYPE_INT8", "TYPE_FP32"]);
}

#[test]
fn the_models_metadata_says_which_multiple_of_steps_an_input_wants() {
    let set = |config: &Value, x: &[i64], metadata: &str| {
        let x = ("x", DataType::Fp32, x);
        let mut binding = bind(config, &signature(&[x, S_IN], &[Y, S_OUT])).unwrap();
        let metadata = [("stateful.steps_multiple".to_owned(), metadata.to_owned())].into();
        binding.set_steps_multiples(&metadata).map(|()| binding)
    };
    let open = with(&[("/input/0/dims", json!([-1, 5]))]);
    let of = |axis: i64, multiple: i64| format!(r#"[{{"input":"x","axis":{axis},"multiple":{multiple}}}]"#);
    let wanted = |config: &Value, x: &[i64], metadata: &str| {
        let binding = set(config, x, metadata).unwrap();
        let (_, request) = binding.request_inputs().next().unwrap();
        request.steps_multiple.map(|StepsMultiple { axis, multiple }| (axis, multiple.get()))
    };
    assert_eq!(wanted(&open, &[-1, -1, 5], &of(1, 4)), Some((1, 4)));
    assert_eq!(wanted(&with(&[]), &[-1, 4, 5], &of(1, 2)), Some((1, 2)));
    let state = r#"[{"input":"s_in","axis":1,"multiple":2}]"#;
    assert_eq!(wanted(&open, &[-1, -1, 5], state), None);
    let mut with_context = with_parameters(&[("input_context", "x=2")]);
    with_context["input"][0]["dims"] = json!([-1, 5]);
    for (config, metadata, part) in [
        (&open, of(3, 4), "no input 'x' with an axis 3"),
        (&open, of(1, 4).replace(r#""x""#, r#""z""#), "no input 'z'"),
        (&open, of(1, 0), "nonzero"),
        (&open, "4".to_owned(), "a sequence"),
        (&with(&[("/input/0/dims", json!([6, 5]))]), of(1, 4), "input 'x' has 6 along axis 1: configure a multiple"),
        (&with_context, of(1, 4), "'input_context'"),
    ] {
        let error = set(config, &[-1, -1, 5], &metadata).unwrap_err().to_string();
        assert!(error.contains("metadata 'stateful.steps_multiple'") && error.contains(part), "{part}: {error}");
    }
}

#[test]
fn a_declared_state_whose_input_the_model_does_not_take_is_left_out() {
    let mut config = declared(&[4], json!([]));
    config["sequence_batching"]["state"][0]["input_name"] = json!("gone");
    assert_refused(&config, &with_state(&[-1, 4]), &["nothing feeds the model's input 's_in'"]);
    let without = signature(&[X], &[Y, S_OUT]);
    assert_eq!(bind(&config, &without).unwrap().states, []);
}

#[test]
fn only_a_dimension_that_the_model_leaves_open_is_a_doubtful_empty_start() {
    let plain = with(&[]);
    let [growing, fixed] = [&[-1, -1, 2][..], &[-1, 0, 2]].map(|dims| {
        let mut model = with_state(dims);
        model.inputs[1].symbols = vec!["batch".to_owned(), String::new(), String::new()];
        bind(&plain, &model).unwrap()
    });
    assert_eq!([&growing, &fixed].map(|binding| binding.states[0].initial.dims.clone()), [[1, 0, 2], [1, 0, 2]]);
    assert_eq!(growing.empty_starts().as_deref(), Some("'s_in' [1, 0, 2]"));
    assert_eq!(fixed.empty_starts(), None);
}

#[test]
fn an_initial_value_has_the_dims_that_its_elements_make() {
    let growing =
        signature(&[X, ("s_in", DataType::Fp32, &[-1, -1, 2])], &[Y, ("s_out", DataType::Fp32, &[-1, -1, 2])]);
    let mut growing = growing;
    growing.inputs[1].symbols = vec!["batch".to_owned(), "T".to_owned(), String::new()];
    let initial = |value: &str, signature: &Signature| {
        bind(&with_parameters(&[("initial_states", &format!("s_in={value}"))]), signature)
            .map(|mut binding| binding.states.remove(0).initial)
    };
    let bytes = |values: &[f32]| InitialContent::Bytes(values.iter().flat_map(|value| value.to_ne_bytes()).collect());
    for (value, signature, dims, content) in [
        ("1.5", &model(&[]), &[1, 4][..], bytes(&[1.5; 4])),
        ("[1,2,3,4]", &model(&[]), &[1, 4], bytes(&[1.0, 2.0, 3.0, 4.0])),
        ("[1,2,3,4]", &growing, &[1, 2, 2], bytes(&[1.0, 2.0, 3.0, 4.0])),
    ] {
        assert_eq!(initial(value, signature).unwrap(), Initial { dims: dims.to_vec(), content }, "{value}");
    }
    let huge = &[-1, 1 << 60];
    let huge = signature(&[X, ("s_in", DataType::Fp32, huge)], &[Y, ("s_out", DataType::Fp32, huge)]);
    for (value, signature, words) in [
        ("1.5", &huge, ["4611686018427387904 bytes", "cannot allocate"]),
        ("[1,2,3]", &model(&[]), ["3 elements", "[1, 4] has 4"]),
        ("[1,2,3]", &growing, ["3 elements", "a multiple of 2"]),
        ("1", &growing, ["'1'", "list the elements"]),
        ("x", &model(&[]), ["'x'", "no TYPE_FP32"]),
    ] {
        let error = initial(value, signature).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)) && error.contains("'s_in'"), "{error}");
    }
    let unknown = with_parameters(&[("initial_states", "other=1")]);
    assert_refused(&unknown, &model(&[]), &["'initial_states'", "'other'", "s_in"]);
}

#[test]
fn each_comma_of_the_metadata_stands_behind_a_number() {
    let config = Config::for_tests(&with_parameters(&[("initial_states", "s_in=metadata:init")]), &[]).unwrap();
    let pairs = [StatePair { input: "s_in".to_owned(), output: "s_out".to_owned() }];
    let bind = |text: &str| {
        let metadata = [("init".to_owned(), text.to_owned())].into();
        Binding::new(&config, &pairs, &[], &model(&[]), &InitialSources { metadata, ..InitialSources::default() })
    };
    for text in ["1,2,3,4", "[1, 2, 3, 4, ]", "[[1 2],\n [3 4]]", " 1 2 3 4 "] {
        assert!(bind(text).is_ok(), "{text}");
    }
    for text in ["1,,2,3", ",1,2,3,4", "[ ,1,2,3]", "[1, ,2]", "1,2,3,4,,"] {
        assert!(bind(text).unwrap_err().to_string().contains("a comma without a number before it"), "{text}");
    }
}

#[test]
fn a_file_has_as_many_bytes_as_the_dims_need() {
    let given = json!([{ "data_type": "TYPE_FP32", "dims": [4], "data_file": "f" }]);
    let config = Config::for_tests(&declared(&[4], given), &[]).unwrap();
    let pair = config.states.declared[0].pair.clone();
    let bind = |bytes: usize| {
        let files = [("f".to_owned(), vec![7; bytes])].into();
        let sources = InitialSources { files, ..InitialSources::default() };
        Binding::new(&config, std::slice::from_ref(&pair), &[], &model(&[]), &sources)
    };
    assert_eq!(bind(16).unwrap().states[0].initial.content, InitialContent::Bytes(vec![7; 16]));
    for (bytes, word) in [(12, "12 bytes"), (20, "20 bytes"), (15, "15 bytes"), (0, "0 elements")] {
        let error = bind(bytes).unwrap_err().to_string();
        assert!(error.contains("file 'f'") && error.contains(word), "{error}");
    }
}

#[test]
fn a_state_whose_ends_have_the_batch_in_two_places_is_refused() {
    let ends = |dims: &[i64], names: [&str; 2]| {
        let output = ("s_out", DataType::Fp32, dims);
        let mut signature = signature(&[X, ("s_in", DataType::Fp32, &[-1, 2])], &[Y, output]);
        let named = |names: [&str; 2]| names.map(str::to_owned).to_vec();
        signature.inputs[0].symbols = vec!["N".to_owned(), String::new(), String::new()];
        (signature.inputs[1].symbols, signature.outputs[1].symbols) = (named(["N", ""]), named(names));
        bind(&with(&[]), &signature)
    };
    for (dims, names) in [(&[2, -1], ["", "N"]), (&[2, -1], ["", ""]), (&[-1, -1], ["", "N"])] {
        let error = ends(dims, names).unwrap_err().to_string();
        assert!(error.contains("'s_in'") && error.contains("'s_out'") && error.contains("batch"), "{error}");
    }
    // Exporters say little of outputs: the batch of the example, or another name for it.
    for (dims, names) in [(&[-1, 2], ["M", ""]), (&[1, 2], ["", ""]), (&[3, 2], ["", ""]), (&[-1, -1], ["", ""])] {
        assert_eq!(ends(dims, names).unwrap().states[0].batch_axis, Some(0));
    }
}

#[test]
fn a_context_of_an_input_without_batch_is_for_one_sequence_at_a_time() {
    let error = context(&[80, 16], &[80, 12], "x=4").unwrap_err().to_string();
    assert!(error.contains("input_context") && error.contains("max_batch_size"), "{error}");
}

#[test]
fn an_initial_state_is_one_sequence_s() {
    let large = json!([{ "data_type": "TYPE_FP32", "dims": [1i64 << 40, 8], "zero_data": true }]);
    let error = bind(&declared(&[-1, 8], large), &with_state(&[-1, -1, 8])).unwrap_err().to_string();
    assert!(error.contains("[1099511627776, 8]") && error.contains("max_state_bytes_per_sequence"), "{error}");
    for (given, fits) in [(&[2, 1, 8], true), (&[2, 3, 8], false)] {
        let initial = json!([{ "data_type": "TYPE_FP32", "dims": given, "zero_data": true }]);
        let bound = bind(&declared(&[2, -1, 8], initial), &with_state(&[2, -1, 8]));
        if fits {
            assert_eq!(bound.unwrap().states[0].initial.dims, [2, 1, 8]);
        } else {
            let (error, text) = (bound.unwrap_err().to_string(), Dims(given).to_string());
            assert!(error.contains("'s_in'") && error.contains(&text) && error.contains("[2, 1, 8]"), "{error}");
        }
    }
}

/// Binds an input x of these dims, with config.pbtxt's dims, and this context.
fn context(model: &[i64], configured: &[i64], written: &str) -> Result<BoundContext, BindingError> {
    let mut config = with_parameters(&[("input_context", written)]);
    config["input"][0]["dims"] = json!(configured);
    let binding = bind(&config, &signature(&[("x", DataType::Fp32, model), S_IN], &[Y, S_OUT]))?;
    let (_, _, context) = binding.contexts().next().unwrap();
    Ok(context)
}

#[test]
fn a_context_is_kept_along_the_axis_in_which_the_dims_differ_or_the_only_open_one() {
    for (model, configured, written, axis, bytes) in [
        (&[-1, 576][..], &[512][..], "x=64", 1, 256),
        (&[-1, -1], &[512], "x=64", 1, 256),
        (&[-1, -1], &[-1], "x=64", 1, 256),
        (&[-1, 12, 9], &[10, 9], "x=2", 1, 72),
        (&[-1, -1, 9], &[-1, 9], "x=2", 1, 72),
        (&[4, -1, 9], &[4, -1, 5], "x=4", 2, 64),
        (&[-1, -1, -1], &[7, 4], "x=2@2", 2, 56),
        // One byte more says whether they are there.
        (&[-1, 45, 8], &[-1, 8], "x=13:whole", 1, 417),
        (&[-1, -1, 8], &[-1, 8], "x=13@1:whole", 1, 417),
        (&[-1, 45, 8], &[32, 8], "x=13:repeat", 1, 417),
        // The number of new elements fixes an open dimension.
        (&[-1, -1], &[512], "x=64+512", 1, 256),
        (&[-1, -1], &[-1], "x=64+512", 1, 256),
        (&[-1, 576], &[512], "x=64+512", 1, 256),
        (&[-1, 45, -1], &[45, 2], "x=3+2", 2, 540),
        (&[-1, 45, -1], &[45, 42], "x=3+42@2", 2, 540),
        (&[-1, -1, 8], &[-1, 8], "x=13+32:whole", 1, 417),
    ] {
        let found = context(model, configured, written).unwrap();
        assert_eq!((found.axis, found.bytes), (axis, bytes), "{model:?} {configured:?} {written}");
        assert_eq!(found.slot_entry, 1, "behind the state");
    }
    for (model, configured, written, word) in [
        (&[-1, 576][..], &[500][..], "x=64", "input { name: 'x' data_type: TYPE_FP32 dims: [512] }"),
        (&[-1, 576], &[576], "x=64@1", "input { name: 'x' data_type: TYPE_FP32 dims: [512] }"),
        (&[4, -1, 9], &[4, -1, 9], "x=2", "dims: [2, -1, 9] } or { name: 'x' data_type: TYPE_FP32 dims: [4, -1, 7] }"),
        (&[-1, 10], &[5], "x=64", "must be longer than 64"),
        (&[-1, -1, -1], &[-1, -1], "x=2", "'x=2@1'"),
        (&[-1, -1, -1], &[-1, -1], "x=2", "'x=2@2'"),
        (&[-1, -1], &[-1], "x=2@0", "is the batch"),
        (&[-1, -1], &[-1], "x=2@2", "no axis 2"),
        (
            &[-1, -1, -1],
            &[-1, -1],
            "x=2@1",
            "axis 2 of [-1, -1, -1] is open: write its length in the dims of input 'x'",
        ),
        (&[-1, -1, 576], &[-1, 512], "x=64", "axis 1 of [-1, -1, 576] is open"),
        (&[-1, 45, 8], &[32, 8], "x=13:whole", "input { name: 'x' data_type: TYPE_FP32 dims: [-1, 8] }"),
        (&[-1, 45, 8], &[45, 8], "x=13@1:whole", "':whole'"),
        (&[-1, -1, 8], &[32, 8], "x=13:whole", "input { name: 'x' data_type: TYPE_FP32 dims: [-1, 8] }"),
        (&[-1, 13, 8], &[-1, 8], "x=13@1:whole", "must be longer than 13"),
        (&[-1, 45, 8], &[-1, 8], "x=13+30@1:whole", "must be 43, or open"),
        (&[-1, 576], &[512], "x=64+256@1", "must be 320, or open"),
        (&[-1, -1], &[500], "x=64+512@1", "input { name: 'x' data_type: TYPE_FP32 dims: [512] }"),
        (&[-1, -1, 8], &[32, 8], "x=13+32@1:whole", "input { name: 'x' data_type: TYPE_FP32 dims: [-1, 8] }"),
    ] {
        let error = context(model, configured, written).unwrap_err().to_string();
        assert!(error.contains("'input_context'") && error.contains(word), "{error}");
    }
    let unlisted = with_parameters(&[("input_context", "s_in=2")]);
    assert_refused(&unlisted, &model(&[]), &["'input_context'", "'s_in'", "listed under 'input'"]);
}

#[test]
fn requests_bring_what_the_context_leaves() {
    let config = with_parameters(&[("input_context", "x=2")]);
    let binding = bind(&config, &signature(&[("x", DataType::Fp32, &[-1, 6, 5]), S_IN], &[Y, S_OUT])).unwrap();
    let Source::Request(request) = &input(&binding, "x").source else { panic!("x is of requests") };
    assert_eq!(input(&binding, "x").dims, [-1, 6, 5], "what the model takes");
    assert_eq!(request.row_length(&[1, 4, 5], 1, false), 6);
}

#[test]
fn the_first_request_brings_the_whole_window() {
    for (dim, written, window) in
        [(45, "x=13@1:whole", 45), (45, "x=13+32@1:whole", 45), (-1, "x=13+32@1:whole", 45), (-1, "x=13@1:whole", -1)]
    {
        let mut config = with_parameters(&[("input_context", written)]);
        config["input"][0]["dims"] = json!([-1, 5]);
        let binding = bind(&config, &signature(&[("x", DataType::Fp32, &[-1, dim, 5]), S_IN], &[Y, S_OUT])).unwrap();
        let Source::Request(request) = &input(&binding, "x").source else { panic!("x is of requests") };
        assert_eq!(input(&binding, "x").dims, [-1, window, 5], "what the model takes");
        assert_eq!(request.request_dims(input(&binding, "x")), [1, -1, 5]);
        let lengths = |own: i64, is_first| request.row_length(&[1, own, 5], 1, is_first);
        assert_eq!((lengths(45, true), lengths(32, false)), (45, 45));
        let context = request.context.unwrap();
        let allowed = |is_first| context.lengths(window, is_first);
        let exactly = |length| (window > 0).then_some(length);
        assert_eq!((allowed(true), allowed(false)), ((13, exactly(45)), (0, exactly(32))));
    }
}

#[test]
fn a_context_of_a_model_without_batch_is_asked_for_where_two_axes_can_have_it() {
    let config = |dims: &[i64], context: &str| {
        let mut config = with_parameters(&[("input_context", context)]);
        config["max_batch_size"] = json!(0);
        config["input"][0]["dims"] = json!(dims);
        let y = config["output"][0]["dims"].as_array().unwrap().clone();
        config["output"][0]["dims"] = [vec![json!(-1)], y].concat().into();
        config
    };
    let model = signature(&[("x", DataType::Fp32, &[-1, 576]), S_IN], &[Y, S_OUT]);
    let words = ["[-1, 576]", "'x=64@0'", "'x=64@1'", "dims [1, 512]"];
    assert_refused(&config(&[-1, 576], "x=64"), &model, &words);
    assert_refused(&config(&[-1, 512], "x=64"), &model, &["axis 0 of", "is open: write its length"]);
    for (dims, written, axis) in [(&[-1, 576], "x=64@0", 0), (&[1, 512], "x=64", 1), (&[1, 512], "x=64@1", 1)] {
        let binding = bind(&config(dims, written), &model).unwrap();
        assert_eq!(binding.contexts().next().unwrap().2.axis, axis);
    }
}

fn ragged(names: [&str; 2], parameters: &[(&str, &str)]) -> (Value, Signature) {
    let lengths: [Spec; 1] = [("len", DataType::Int64, &[-1])];
    let outputs: [Spec; 3] = [("y", DataType::Fp32, &[-1, -1, 4]), ("ylen", DataType::Int32, &[-1, 1]), S_OUT];
    let mut signature = signature(&[&[("x", DataType::Fp32, &[-1, -1, 5][..]), S_IN][..], &lengths].concat(), &outputs);
    signature.inputs[0].symbols[1] = names[0].to_owned();
    signature.outputs[0].symbols[1] = names[1].to_owned();
    let changes = [("/input/0/dims", json!([-1, 5])), ("/output/0/dims", json!([-1, 4]))];
    let mut config = with(&changes);
    for (name, value) in parameters {
        config["parameters"][name] = json!({ "string_value": value });
    }
    (config, signature)
}

#[test]
fn rows_are_filled_up_and_outputs_cut_by_name_or_by_length() {
    let trim = |names, parameters: &[(&str, &str)]| {
        let (config, signature) = ragged(names, parameters);
        let binding = bind(&config, &signature).unwrap();
        let Source::Lengths { of } = input(&binding, "len").source else { panic!("len takes lengths") };
        assert_eq!(binding.inputs[of].name, "x");
        output(&binding, "y").trim
    };
    let padded = ("padded_inputs", "x=len");
    assert_eq!(trim(["T", "T"], &[padded]), Some(Trim { axis: 1, by: TrimBy::Input(0) }));
    assert_eq!(trim(["T", "U"], &[padded, ("padded_outputs", "y=all")]), None);
    let by_output = trim(["T", "T"], &[padded, ("padded_outputs", "y=ylen")]).unwrap();
    assert!(matches!(by_output, Trim { axis: 1, by: TrimBy::Output(_) }), "{by_output:?}");

    for (names, parameters, words) in [
        (["T", "U"], &[padded][..], ["output 'y'", "padded_outputs"]),
        (["", ""], &[padded], ["output 'y'", "y=all"]),
        (["T", "T"], &[("padded_inputs", "x=s_in")], ["'s_in'", "whole numbers"]),
        (["T", "T"], &[("padded_inputs", "x=len@2")], ["axis 2", "is not open"]),
        (["T", "T"], &[("padded_inputs", "z=len")], ["'z'", "listed under 'input'"]),
        (["T", "T"], &[("padded_inputs", "x=none")], ["'none'", "no such input"]),
        (["T", "T"], &[padded, ("padded_outputs", "y=y")], ["'y'", "whole numbers"]),
        (["T", "T"], &[padded, ("padded_outputs", "z=all")], ["'z'", "listed under 'output'"]),
    ] {
        let (config, signature) = ragged(names, parameters);
        assert_refused(&config, &signature, &words);
    }
}

#[test]
fn nothing_is_filled_up_where_a_state_grows() {
    let (config, mut signature) = ragged(["T", "U"], &[("padded_inputs", "x=len")]);
    let s = |signature: &mut Signature| {
        for info in [&mut signature.inputs[1], &mut signature.outputs[2]] {
            (info.dims, info.symbols) = (vec![-1, -1], vec!["batch".to_owned(), "past".to_owned()]);
        }
    };
    s(&mut signature);
    let binding = bind(&config, &signature).unwrap();
    let Source::Request(request) = &input(&binding, "x").source else { panic!("x is of requests") };
    assert_eq!((request.is_padded, request.ragged_axis), (false, Some(1)), "its lengths are fed all the same");
    assert_eq!(output(&binding, "y").trim, None);
}

#[test]
fn an_input_that_the_model_has_without_a_batch_is_shared() {
    for dims in [&[][..], &[1], &[2, 3]] {
        let listed = json!({ "name": "k", "data_type": "TYPE_INT64", "dims": dims });
        let mut config = with(&[]);
        config["input"].as_array_mut().unwrap().push(listed);
        let binding = bind(&config, &model(&[("k", DataType::Int64, dims)])).unwrap();
        let k = input(&binding, "k");
        assert_eq!(k.batch_axis, None);
        assert!(matches!(&k.source, Source::Request(request) if request.form == ShapeForm::Unbatched));
    }
}

#[test]
fn defaults_of_the_model_may_be_left_out_overridden_or_listed() {
    let mut signature = model(&[]);
    signature.defaults = super::tests::signature(&[("gain", DataType::Fp32, &[])], &[]).inputs;
    assert_eq!(bind(&with(&[]), &signature).unwrap().inputs.len(), 2);
    let constant = bind(&with_parameters(&[("constant_inputs", "gain=2")]), &signature).unwrap();
    assert!(matches!(input(&constant, "gain").source, Source::Constant(_)));
    let mut config = with(&[]);
    let gain = json!({ "name": "gain", "data_type": "TYPE_FP32", "dims": [], "optional": true });
    config["input"].as_array_mut().unwrap().push(gain);
    let binding = bind(&config, &signature).unwrap();
    assert!(matches!(&input(&binding, "gain").source, Source::Request(request) if request.optional));
    config["input"][0]["optional"] = json!(true);
    assert_refused(&config, &signature, &["input 'x' is optional", "constant_inputs"]);
}

#[test]
fn the_model_for_initial_states_is_held_against_states_and_requests() {
    let binding = bind(&with(&[]), &model(&[])).unwrap();
    let of = |inputs: &[Spec], outputs: &[Spec]| InitialModel::new(&binding, &signature(inputs, outputs));
    let whole = of(&[("x", DataType::Fp32, &[-1, 4, 5])], &[("s_in", DataType::Fp32, &[1, 4])]).unwrap();
    assert_eq!((whole.inputs[0], whole.outputs[0].state, whole.outputs[0].has_batch), (0, 0, true));
    assert!(!of(&[], &[("s_in", DataType::Fp32, &[4])]).unwrap().outputs[0].has_batch);
    for (inputs, outputs, words) in [
        (&[("z", DataType::Fp32, &[-1][..])][..], &[S_IN][..], ["'z'", "x"]),
        (&[("x", DataType::Fp32, &[2, 4, 5])], &[S_IN], ["'x'", "one row"]),
        (&[("x", DataType::Int8, &[-1, 4, 5])], &[S_IN], ["'x'", "TYPE_INT8"]),
        (&[], &[Y], ["'y'", "s_in"]),
        (&[], &[("s_in", DataType::Fp32, &[5])], ["'s_in'", "[1, 4]"]),
        (&[], &[("s_in", DataType::Fp16, &[4])], ["'s_in'", "TYPE_FP16"]),
    ] {
        let error = of(inputs, outputs).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)) && error.contains("initial_state_model"), "{error}");
    }
}

#[test]
fn the_models_metadata_names_states_that_need_an_initial_value() {
    let check = |parameters: &[(&str, &str)], metadata: &str| {
        let config = Config::for_tests(&with_parameters(parameters), &[]).unwrap();
        let metadata = [("stateful.initial_states".to_owned(), metadata.to_owned())].into();
        Binding::check_initial_states(&config.states, &metadata).map_err(|error| error.to_string())
    };
    let (filled, learned) = (r#"[{"state":"s_in","value":"-1"}]"#, r#"[{"state":"s_in"}]"#);
    for (parameters, metadata) in [
        ([("initial_states", "s_in=-1")], filled),
        ([("initial_states", "s_in=0")], filled),
        ([("initial_states", "s_in=0")], learned),
        ([("initial_state_model", "start.onnx")], learned),
    ] {
        assert_eq!(check(&parameters, metadata), Ok(()), "{parameters:?}");
    }
    let line = "parameters { key: 'initial_states' value { string_value: 's_in=-1' } }";
    for (parameters, metadata, part) in [
        (&[][..], filled, line),
        (&[("initial_state_model", "start.onnx")], filled, line),
        (&[], learned, "key: 'initial_state_model' value { string_value: 'model_initial_states.onnx' }"),
        (&[], "4", "a sequence"),
    ] {
        let error = check(parameters, metadata).unwrap_err();
        assert!(error.contains("metadata 'stateful.initial_states'") && error.contains(part), "{part}: {error}");
    }
}
