use rows::tensor::{DataType, Dims, RowLayout, StorageType};
use serde_json::{Value, json};

use super::*;
use crate::config::{Config, ConfigError, InitialSources, StatePair};
use crate::onnx::{Signature, TensorInfo};

pub(super) type Spec<'a> = (&'a str, DataType, &'a [i64]);

pub(super) const X: Spec = ("x", DataType::Fp32, &[-1, 4, 5]);
pub(super) const Y: Spec = ("y", DataType::Fp32, &[-1, 4]);
pub(super) const S_IN: Spec = ("s_in", DataType::Fp32, &[-1, 4]);
pub(super) const S_OUT: Spec = ("s_out", DataType::Fp32, &[-1, 4]);

pub(super) fn signature(inputs: &[Spec], outputs: &[Spec]) -> Signature {
    let info = |&(name, data_type, dims): &Spec| {
        let (name, dims, symbols) = (name.to_owned(), dims.to_vec(), vec![String::new(); dims.len()]);
        TensorInfo { name, data_type, dims, symbols }
    };
    let [inputs, outputs] = [inputs, outputs].map(|specs| specs.iter().map(info).collect());
    Signature { inputs, defaults: Vec::new(), outputs }
}

/// A model that takes x and its state, and gives y and the next state; `inputs` come on top.
pub(super) fn model(inputs: &[Spec]) -> Signature {
    signature(&[&[X, S_IN], inputs].concat(), &[Y, S_OUT])
}

/// The configuration of [`model`].
pub(super) fn plain() -> Value {
    json!({
        "name": "m",
        "max_batch_size": 8,
        "input": [{ "name": "x", "data_type": "TYPE_FP32", "dims": [4, 5] }],
        "output": [{ "name": "y", "data_type": "TYPE_FP32", "dims": [4] }],
        "sequence_batching": { "oldest": { "max_candidate_sequences": 8 }, "control_input": [] },
        "parameters": { "state_pairs": { "string_value": "<<<s_in, s_out>>>" } },
    })
}

/// [`plain`] with other values at the given places.
pub(super) fn with(changes: &[(&str, Value)]) -> Value {
    let mut config = plain();
    for (pointer, value) in changes {
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        match config.pointer_mut(parent).unwrap() {
            Value::Object(fields) => drop(fields.insert(name.to_owned(), value.clone())),
            list => list[name.parse::<usize>().unwrap()] = value.clone(),
        }
    }
    config
}

pub(super) fn with_parameters(parameters: &[(&str, &str)]) -> Value {
    let mut config = plain();
    for (name, value) in parameters {
        config["parameters"][name] = json!({ "string_value": value });
    }
    config
}

pub(super) fn control(name: &str, control: Value) -> Value {
    json!({ "name": name, "control": [control] })
}

pub(super) fn with_controls(controls: &[Value]) -> Value {
    with(&[("/sequence_batching/control_input", json!(controls))])
}

pub(super) fn bind(config: &Value, signature: &Signature) -> Result<Binding, BindingError> {
    let config = Config::for_tests(config, &[]).unwrap();
    let pairs = config.states.all_pairs(None, || panic!("the pairs are written")).map_err(|error: ConfigError| error);
    Binding::new(&config, &pairs.unwrap().0, &[], signature, &InitialSources::default())
}

/// Binding fails, and the text has every one of these parts.
pub(super) fn assert_refused(config: &Value, signature: &Signature, parts: &[&str]) {
    let error = bind(config, signature).expect_err(&format!("{parts:?}")).to_string();
    for part in parts {
        assert!(error.contains(part), "'{part}' is missing in: {error}");
    }
}

pub(super) fn input<'a>(binding: &'a Binding, name: &str) -> &'a BoundInput {
    binding.inputs.iter().find(|input| input.name == name).unwrap()
}

pub(super) fn output<'a>(binding: &'a Binding, name: &str) -> &'a BoundOutput {
    binding.outputs.iter().find(|output| output.name == name).unwrap()
}

#[test]
fn a_plain_model_is_bound() {
    let binding = bind(&plain(), &model(&[])).unwrap();
    let names: Vec<&str> = binding.inputs.iter().map(|input| input.name.as_str()).collect();
    assert_eq!(names, ["x", "s_in"], "in the model's order");
    assert!(matches!(input(&binding, "x").source, Source::Request(RequestInput { form: ShapeForm::Plain, .. })));
    assert!(matches!(input(&binding, "s_in").source, Source::State(0)));
    assert!(output(&binding, "y").is_response);
    assert_eq!(output(&binding, "y").dims.as_deref(), Some(&[-1, 4][..]));
    assert_eq!(output(&binding, "y").empty_dims, [0, 4]);
    assert!(!output(&binding, "s_out").is_response, "responses do not carry it");
    let layout = RowLayout { outer: 1, inner_bytes: 16 };
    let state = BoundState {
        input: 1,
        output: 1,
        data_type: DataType::Fp32,
        batch_axis: Some(0),
        dims: vec![1, 4],
        place: StatePlace::Slot(layout),
        storage: StorageType::Exact,
        padded_axis: None,
        initial: Initial { dims: vec![1, 4], content: InitialContent::Zeros },
    };
    assert_eq!((binding.states.as_slice(), binding.slot.slot_bytes()), (&[state][..], 64));
}

#[test]
fn a_name_that_the_model_does_not_have_is_refused_with_the_names_that_it_has() {
    let x = json!({ "name": "ex", "data_type": "TYPE_FP32", "dims": [4, 5] });
    let y = json!({ "name": "why", "data_type": "TYPE_FP32", "dims": [4] });
    let pairs = |text| json!({ "string_value": text });
    for (pointer, value, parts) in [
        ("/input/0", x, ["'input'", "'ex'", "no such input", "x, s_in"]),
        ("/output/0", y, ["'output'", "'why'", "no such output", "y, s_out"]),
        ("/parameters/state_pairs", pairs("<<<a, s_out>>>"), ["'state_pairs'", "'a'", "no such input", "x, s_in"]),
        (
            "/parameters/state_pairs",
            pairs("<<<s_out, s_in>>>"),
            ["'s_out' is an output", "'s_in' an input", "write", "<<<s_in, s_out>>>"],
        ),
        ("/parameters/state_pairs", pairs("<<<s_in, b>>>"), ["'state_pairs'", "'b'", "no such output", "y, s_out"]),
        ("/parameters/constant_inputs", pairs("sr=1"), ["'constant_inputs'", "'sr'", "no such input", "x, s_in"]),
    ] {
        assert_refused(&with(&[(pointer, value)]), &model(&[]), &parts);
    }
}

#[test]
fn another_data_type_is_refused_with_both() {
    for (pointer, parts) in [
        ("/input/0/data_type", ["input 'x' is TYPE_INT64", "in the model it is TYPE_FP32"]),
        ("/output/0/data_type", ["output 'y' is TYPE_INT64", "in the model it is TYPE_FP32"]),
    ] {
        assert_refused(&with(&[(pointer, json!("TYPE_INT64"))]), &model(&[]), &parts);
    }
    let corrid = json!({ "kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64" });
    let model = model(&[("id", DataType::Int64, &[-1, 1])]);
    assert_refused(
        &with_controls(&[control("id", corrid)]),
        &model,
        &["control_input 'id'", "TYPE_UINT64", "TYPE_INT64"],
    );
}

#[test]
fn dims_that_do_not_agree_are_refused_with_both_and_the_rule() {
    let fixed_batch: &[i64] = &[1, 4, 5];
    let cases: [(i64, Value, &[i64], &str); 9] = [
        (8, json!([4, 6]), &[-1, 4, 5], "without the batch dimension they must be [4, 5]"),
        (8, json!([4]), &[-1, 4, 5], "without the batch dimension they must be [4, 5]"),
        (8, json!([-1, 4, 5, 6]), &[-1, 4, 5], "without the batch dimension they must be [4, 5]"),
        (
            8,
            json!([4, 5]),
            fixed_batch,
            "its first dimension is fixed to 1, so it is no batch, but max_batch_size is 8",
        ),
        (8, json!([4, 5]), &[], "no batch dimension; set max_batch_size to 0"),
        (8, json!([1, 4, 5]), &[-1, 4, 5], "mark it, and only it, with -1"),
        (8, json!([-1, -1, 5]), &[-1, -1, 5], "mark it, and only it, with -1"),
        (0, json!([4, 5]), &[-1, 4, 5], "with max_batch_size 0 they must be the same"),
        (0, json!([2, 4, 6]), &[-1, 4, 5], "with max_batch_size 0 they must be the same"),
    ];
    for (max_batch_size, dims, in_model, rule) in cases {
        let signature = signature(&[("x", DataType::Fp32, in_model), S_IN], &[Y, S_OUT]);
        let config = with(&[
            ("/max_batch_size", json!(max_batch_size)),
            ("/input/0/dims", dims.clone()),
            ("/output/0/dims", if max_batch_size == 0 { json!([-1, 4]) } else { json!([4]) }),
        ]);
        let dims = dims.to_string().replace(',', ", ");
        let in_model = Dims(in_model).to_string();
        assert_refused(&config, &signature, &["input 'x'", &dims, &format!("in the model {in_model}"), rule]);
    }
    let config = with(&[("/output/0/dims", json!([5]))]);
    assert_refused(&config, &model(&[]), &["output 'y' has dims [5]", "[-1, 4]", "they must be [4]"]);
}

#[test]
fn dims_that_one_side_leaves_open_agree_and_the_tighter_side_binds_requests() {
    let open = signature(&[("x", DataType::Fp32, &[-1, -1, 5]), S_IN], &[Y, S_OUT]);
    assert_eq!(input(&bind(&plain(), &open).unwrap(), "x").dims, [-1, 4, 5]);
    let config = with(&[("/input/0/dims", json!([-1, 5]))]);
    assert_eq!(input(&bind(&config, &open).unwrap(), "x").dims, [-1, -1, 5]);
    assert_eq!(input(&bind(&config, &model(&[])).unwrap(), "x").dims, [-1, 4, 5]);
}

#[test]
fn the_batch_dimension_may_stand_inside_where_the_configuration_marks_it() {
    for (dims, axis) in [([-1, 4, 5], 0), ([4, -1, 5], 1), ([4, 5, -1], 2)] {
        let tensors = [("x", DataType::Fp32, &dims[..]), S_IN];
        let outputs = [("y", DataType::Fp32, &dims[..]), S_OUT];
        let config = with(&[("/input/0/dims", json!(dims)), ("/output/0/dims", json!(dims))]);
        let binding = bind(&config, &signature(&tensors, &outputs)).unwrap();
        let x = input(&binding, "x");
        assert_eq!((x.batch_axis, x.dims.as_slice()), (Some(axis), &dims[..]));
        assert!(matches!(x.source, Source::Request(RequestInput { form: ShapeForm::BatchInside, .. })));
        let y = output(&binding, "y");
        assert_eq!((y.batch_axis, y.is_response), (Some(axis), true));
        assert_eq!(y.empty_dims, dims.map(|dim| dim.max(0)));
    }
}

#[test]
fn max_batch_size_1_takes_models_with_a_fixed_batch_of_1() {
    let tensors: [Spec; 2] = [("x", DataType::Fp32, &[1, 4, 5]), ("s_in", DataType::Fp32, &[1, 4])];
    let outputs: [Spec; 2] = [("y", DataType::Fp32, &[1, 4]), ("s_out", DataType::Fp32, &[1, 4])];
    let binding = bind(&with(&[("/max_batch_size", json!(1))]), &signature(&tensors, &outputs)).unwrap();
    assert_eq!(input(&binding, "x").batch_axis, Some(0));
    assert_eq!(input(&binding, "s_in").batch_axis, None);
    assert_eq!(binding.slot.state_bytes(), 16);
}

#[test]
fn max_batch_size_0_means_the_models_own_dims() {
    let config =
        with(&[("/max_batch_size", json!(0)), ("/input/0/dims", json!([1, 4, 5])), ("/output/0/dims", json!([-1, 4]))]);
    let binding = bind(&config, &model(&[])).unwrap();
    assert_eq!((input(&binding, "x").batch_axis, input(&binding, "x").dims.as_slice()), (None, &[1, 4, 5][..]));
    assert_eq!(output(&binding, "y").dims, None, "ONNX Runtime says how many rows");
    assert_eq!(input(&binding, "s_in").batch_axis, Some(0), "one row, wherever the state has room for rows");
}

#[test]
fn outputs_may_leave_dims_open_or_say_nothing() {
    for (dims, empty) in [(&[-1, -1][..], &[0, 0][..]), (&[][..], &[0][..])] {
        let binding = bind(&plain(), &signature(&[X, S_IN], &[("y", DataType::Fp32, dims), S_OUT])).unwrap();
        let y = output(&binding, "y");
        assert_eq!((y.dims.clone(), y.batch_axis, y.is_response), (None, Some(0), true));
        assert_eq!(y.empty_dims, empty);
    }
}

#[test]
fn the_shape_without_elements_has_none_even_where_every_dim_is_fixed() {
    for (dims, empty) in [(&[3, 4][..], &[0, 4][..]), (&[], &[0]), (&[3, -1], &[3, 0])] {
        let config = with(&[
            ("/max_batch_size", json!(0)),
            ("/input/0/dims", json!([-1, 4, 5])),
            ("/output/0/dims", json!(dims)),
        ]);
        let binding = bind(&config, &signature(&[X, S_IN], &[("y", DataType::Fp32, dims), S_OUT])).unwrap();
        assert_eq!(output(&binding, "y").empty_dims, empty);
    }
}

#[test]
fn the_two_ends_of_a_state_must_agree() {
    let cases: [(Spec, &[&str]); 3] = [
        (("s_out", DataType::Fp16, &[-1, 4]), &["TYPE_FP32 [-1, 4] as input", "TYPE_FP16 [-1, 4] as output"]),
        (("s_out", DataType::Fp32, &[-1, 5]), &["[-1, 4] as input", "[-1, 5] as output"]),
        (("s_out", DataType::Fp32, &[-1, 4, 1]), &["[-1, 4] as input", "[-1, 4, 1] as output"]),
    ];
    for (s_out, parts) in cases {
        let signature = signature(&[X, S_IN], &[Y, s_out]);
        assert_refused(&plain(), &signature, &[&["<<<s_in, s_out>>>", "they must agree"], parts].concat());
    }
    for open in [&[-1, -1][..], &[][..]] {
        let binding = bind(&plain(), &signature(&[X, S_IN], &[Y, ("s_out", DataType::Fp32, open)])).unwrap();
        assert_eq!(output(&binding, "s_out").dims.as_deref(), Some(&[-1, 4][..]), "those of the input, {open:?}");
    }
}

#[test]
fn the_batch_axis_of_a_state_is_its_open_dimension_wherever_it_stands() {
    for (dims, axis, outer, inner_bytes) in
        [(&[-1, 2, 8][..], 0, 1, 64), (&[2, -1, 8], 1, 2, 32), (&[2, 8, -1], 2, 16, 4), (&[-1], 0, 1, 4)]
    {
        let tensors = [X, ("s_in", DataType::Fp32, dims)];
        let binding = bind(&plain(), &signature(&tensors, &[Y, ("s_out", DataType::Fp32, dims)])).unwrap();
        assert_eq!(input(&binding, "s_in").batch_axis, Some(axis));
        assert_eq!(output(&binding, "s_out").batch_axis, Some(axis));
        assert_eq!(binding.states[0].place, StatePlace::Slot(RowLayout { outer, inner_bytes }));
    }
}

#[test]
fn a_state_without_a_batch_dimension_is_for_one_request_at_a_time() {
    let signature = signature(
        &[("x", DataType::Fp32, &[-1, 4, 5]), ("s_in", DataType::Fp32, &[2, 8])],
        &[Y, ("s_out", DataType::Fp32, &[2, 8])],
    );
    let parts =
        ["state 's_in'", "TYPE_FP32 [2, 8]", "no dimension is open", "max_batch_size to 0 or 1", "'s_in=[2, 8]'"];
    assert_refused(&plain(), &signature, &parts);
    let written = bind(&with_parameters(&[("state_dims", "s_in=[2, 8]")]), &signature).unwrap();
    assert_eq!((input(&written, "s_in").batch_axis, written.states[0].dims.as_slice()), (None, &[2, 8][..]));
    let binding = bind(&with(&[("/max_batch_size", json!(1))]), &signature).unwrap();
    assert_eq!(input(&binding, "s_in").batch_axis, None);
    assert_eq!(binding.states[0].place, StatePlace::Slot(RowLayout { outer: 1, inner_bytes: 64 }));
}

#[test]
fn two_names_that_requests_and_states_share_are_asked_about_without_a_batch() {
    let dims: &[i64] = &[-1, -1, 8];
    let tensors = [("x", DataType::Fp32, dims), ("s_in", DataType::Fp32, dims)];
    let mut signature = signature(&tensors, &[Y, ("s_out", DataType::Fp32, dims)]);
    for input in &mut signature.inputs {
        input.symbols = ["seq", "bsz", ""].map(str::to_owned).to_vec();
    }
    let config = with(&[
        ("/max_batch_size", json!(0)),
        ("/input/0/dims", json!([-1, -1, 8])),
        ("/output/0/dims", json!([-1, 4])),
    ]);
    assert_refused(&config, &signature, &["state 's_in'", "do not say which is the batch", "'s_in=[batch, -1, 8]'"]);
}

#[test]
fn the_name_of_the_batch_dimension_tells_it_from_another_open_one() {
    let dims: &[i64] = &[-1, -1, 8];
    let mut signature = signature(&[X, ("s_in", DataType::Fp32, dims)], &[Y, ("s_out", DataType::Fp32, dims)]);
    let parts = ["state 's_in'", "its open dimensions do not say which is the batch", "'s_in=[batch, -1, 8]'"];
    assert_refused(&plain(), &signature, &parts);
    signature.inputs[0].symbols[0] = "M".to_owned();
    signature.inputs[1].symbols = vec!["T".to_owned(), "M".to_owned(), String::new()];
    let state = bind(&plain(), &signature).unwrap().states.remove(0);
    assert_eq!((state.batch_axis, state.dims, state.place), (Some(1), vec![-1, 1, 8], StatePlace::Beside(0)));
    assert_eq!(state.initial.dims, [0, 1, 8], "it begins without elements");
    signature.inputs[1].symbols[0] = "M".to_owned();
    assert_refused(&plain(), &signature, &parts);
    let config = with(&[
        ("/max_batch_size", json!(0)),
        ("/input/0/dims", json!([-1, 4, 5])),
        ("/output/0/dims", json!([-1, 4])),
    ]);
    assert_refused(&config, &signature, &parts);
    signature.inputs[1].symbols = vec!["T".to_owned(), "U".to_owned(), String::new()];
    let state = bind(&config, &signature).unwrap().states.remove(0);
    assert_eq!((state.batch_axis, state.dims), (None, vec![-1, -1, 8]));
}

/// [`plain`] without a batch.
fn unbatched() -> Value {
    with(&[("/max_batch_size", json!(0)), ("/input/0/dims", json!([-1, 4, 5])), ("/output/0/dims", json!([-1, 4]))])
}

fn list(config: &mut Value, list: &str, tensor: Value) {
    config[list].as_array_mut().unwrap().push(tensor);
}

#[test]
fn a_number_for_a_name_does_not_say_whether_a_state_grows() {
    let ends = |requests: i64| {
        let mut signature = signature(
            &[("x", DataType::Fp32, &[requests, 4, 5]), ("s_in", DataType::Fp32, &[2, -1])],
            &[Y, ("s_out", DataType::Fp32, &[2, -1])],
        );
        signature.inputs[0].symbols[0] = "x_dynamic_axes_1".to_owned();
        signature.inputs[1].symbols[1] = "s_in_dynamic_axes_1".to_owned();
        signature
    };
    assert_refused(&unbatched(), &ends(-1), &["state 's_in'", "do not say which is the batch", "'s_in=[2, batch]'"]);
    let state = bind(&unbatched(), &ends(1)).unwrap().states.remove(0);
    assert_eq!((state.batch_axis, state.initial.dims), (None, vec![2, 0]), "requests have no room for a batch");
    let state = bind(&plain(), &ends(-1)).unwrap().states.remove(0);
    assert_eq!((state.batch_axis, state.dims), (Some(1), vec![2, 1]), "max_batch_size says that there is one");
}

#[test]
fn written_dims_decide() {
    let dims: &[i64] = &[-1, 3, -1];
    let signature = signature(&[X, ("s_in", DataType::Fp32, dims)], &[Y, ("s_out", DataType::Fp32, dims)]);
    let bound = |text: &str| {
        let binding = bind(&with_parameters(&[("state_dims", text)]), &signature);
        binding.map(|mut binding| (binding.states.remove(0), binding.outputs.remove(1).batch_axis))
    };
    let (state, of_output) = bound("s_in=[batch, 3, 7]").unwrap();
    assert_eq!((state.batch_axis, of_output, state.dims), (Some(0), Some(0), vec![1, 3, 7]));
    assert_eq!(state.place, StatePlace::Slot(RowLayout { outer: 1, inner_bytes: 84 }));
    let (state, _) = bound("s_in=[-1, 3, batch]").unwrap();
    assert_eq!((state.batch_axis, state.dims, state.initial.dims), (Some(2), vec![-1, 3, 1], vec![0, 3, 1]));
    let (state, of_output) = bound("s_in=[-1, 3, 5]").unwrap();
    assert_eq!((state.batch_axis, of_output, state.dims), (None, None, vec![-1, 3, 5]));
    for text in ["s_in=[batch, 7]", "s_in=[batch, 4, 7]", "s_in=[7, batch, 7]"] {
        let error = bound(text).unwrap_err().to_string();
        assert!(error.contains("state_dims 's_in'") && error.contains("[-1, 3, -1]"), "{error}");
    }
    assert_refused(
        &with_parameters(&[("state_dims", "s=[batch]")]),
        &signature,
        &["'state_dims' names 's'", "there is s_in"],
    );
}

#[test]
fn a_named_dimension_varies_where_the_models_batch_is_one() {
    let tensors = |batch: i64| {
        let att: Spec = ("s_in", DataType::Fp32, &[2, -1, 4]);
        let mut signature =
            signature(&[("x", DataType::Fp32, &[batch, 4, 5]), att], &[Y, ("s_out", DataType::Fp32, &[2, -1, 4])]);
        signature.inputs[1].symbols[1] = "T_CACHE".to_owned();
        signature
    };
    let config = with(&[("/max_batch_size", json!(1))]);
    let state = |batch| bind(&config, &tensors(batch)).unwrap().states.remove(0);
    assert_eq!((state(1).batch_axis, state(1).initial.dims), (None, vec![2, 0, 4]));
    assert_eq!(state(-1).batch_axis, Some(1));
}

#[test]
fn a_scalar_is_carried_as_one_element_where_there_is_no_batch() {
    let signature = signature(&[X, S_IN, ("rate", DataType::Int64, &[])], &[Y, ("loss", DataType::Fp32, &[]), S_OUT]);
    let mut config = unbatched();
    list(&mut config, "input", json!({ "name": "rate", "data_type": "TYPE_INT64", "dims": [1] }));
    list(&mut config, "output", json!({ "name": "loss", "data_type": "TYPE_FP32", "dims": [1] }));
    let binding = bind(&config, &signature).unwrap();
    let rate = input(&binding, "rate");
    let Source::Request(request) = &rate.source else { panic!("requests carry it") };
    assert_eq!((request.request_dims(rate), rate.dims.as_slice()), (vec![1], &[][..]));
    assert_eq!(output(&binding, "loss").dims.as_deref(), Some(&[][..]));
}

#[test]
fn an_output_that_is_the_same_in_every_run_needs_no_batch() {
    let signature = signature(&[X, S_IN], &[Y, ("version", DataType::Fp32, &[1]), S_OUT]);
    let mut config = plain();
    list(&mut config, "output", json!({ "name": "version", "data_type": "TYPE_FP32", "dims": [1] }));
    assert_refused(&config, &signature, &["output 'version'", "no dimension of the model's is open for the batch"]);
    let config = Config::for_tests(&config, &[]).unwrap();
    let pairs = [StatePair { input: "s_in".to_owned(), output: "s_out".to_owned() }];
    let binding =
        Binding::new(&config, &pairs, &["version".to_owned()], &signature, &InitialSources::default()).unwrap();
    let version = output(&binding, "version");
    assert_eq!((version.batch_axis, version.form), (None, ShapeForm::Unbatched));
    assert_eq!((version.dims.as_deref(), version.empty_dims.as_slice()), (Some(&[1][..]), &[0, 1][..]));
}

#[test]
fn a_state_of_an_impossible_size_is_refused() {
    let dims: &[i64] = &[-1, i64::MAX, 4];
    let signature = signature(&[X, ("s_in", DataType::Fp32, dims)], &[Y, ("s_out", DataType::Fp32, dims)]);
    assert_refused(&plain(), &signature, &["state 's_in'", "its size overflows"]);
}

#[test]
fn a_state_that_responses_carry_too_is_fetched_once() {
    let config = with(&[("/output/0", json!({ "name": "s_out", "data_type": "TYPE_FP32", "dims": [4] }))]);
    let binding = bind(&config, &model(&[])).unwrap();
    assert_eq!(binding.outputs.len(), 1);
    assert!(output(&binding, "s_out").is_response);
    assert_eq!(binding.states[0].output, 0);
}

#[test]
fn a_state_with_its_batch_inside_that_responses_carry_keeps_that_form() {
    let listed = json!({ "name": "s_out", "data_type": "TYPE_FP32", "dims": [2, -1, 8] });
    for in_model in [&[2, -1, 8][..], &[-1, -1, -1], &[]] {
        let tensors = [X, ("s_in", DataType::Fp32, &[2, -1, 8][..])];
        let signature = signature(&tensors, &[Y, ("s_out", DataType::Fp32, in_model)]);
        let binding = bind(&with(&[("/output/0", listed.clone())]), &signature).unwrap();
        let state = output(&binding, "s_out");
        assert_eq!((state.batch_axis, state.is_response), (Some(1), true), "{in_model:?}");
        assert_eq!(state.empty_dims, [2, 0, 8], "{in_model:?}");
    }
}

#[test]
fn states_are_kept_in_the_order_of_the_pairs_and_as_the_configuration_says() {
    let tensors: [Spec; 5] = [
        X,
        ("a", DataType::Bytes, &[-1, 3]),
        ("b", DataType::Fp32, &[2, -1, 8]),
        ("c", DataType::Bytes, &[-1]),
        ("d", DataType::Int64, &[-1, 2]),
    ];
    let outputs: [Spec; 5] = [
        Y,
        ("a2", DataType::Bytes, &[-1, 3]),
        ("b2", DataType::Fp32, &[2, -1, 8]),
        ("c2", DataType::Bytes, &[-1]),
        ("d2", DataType::Int64, &[-1, 2]),
    ];
    let pairs = "<<<d, d2>>> <<<c, c2>>> <<<b, b2>>> <<<a, a2>>>";
    let config = with_parameters(&[("state_pairs", pairs), ("store_states_as_fp16", "1")]);
    let binding = bind(&config, &signature(&tensors, &outputs)).unwrap();
    use StorageType::{Exact, Fp16};
    let kept = binding.states.iter().map(|state| match state.place {
        StatePlace::Slot(_) => (state.storage, state.slot_bytes()),
        StatePlace::Beside(number) => (state.storage, number),
    });
    assert_eq!(kept.collect::<Vec<_>>(), [(Exact, 16), (Exact, 0), (Fp16, 32), (Exact, 1)]);
    assert_eq!(binding.states[3].initial.dims, [1, 3]);
    assert_eq!(output(&binding, "a2").dims, None, "ONNX Runtime allocates strings");
}
