//! Generated inputs, against hand-written cases.

use rows::tensor::DataType;
use serde_json::Value;

use super::bound::GeneratedValue;
use super::tests::{Spec, assert_refused, bind, input, with};
use super::*;
use crate::onnx::{Signature, TensorInfo};

const KEYS: &[(&str, DataType, &[&str])] = &[
    ("ids", DataType::Int64, &["batch", "n"]),
    ("image", DataType::Fp32, &["batch", "3", "height", "width"]),
    ("keys", DataType::Fp32, &["batch", "2", "past", "4"]),
    ("sum", DataType::Fp32, &["batch", "4"]),
];

/// A model with these inputs on top of [`KEYS`], whose keys grow.
fn model(inputs: &[(&str, DataType, &[&str])]) -> Signature {
    let info = |&(name, data_type, dims): &(&str, DataType, &[&str])| TensorInfo {
        name: name.to_owned(),
        data_type,
        dims: dims.iter().map(|dim| dim.parse().unwrap_or(-1)).collect(),
        symbols: dims
            .iter()
            .map(|dim| if *dim == "?" || dim.parse::<i64>().is_ok() { "" } else { dim }.to_owned())
            .collect(),
    };
    let outputs: &[(&str, DataType, &[&str])] = &[
        ("y", DataType::Fp32, &["batch", "4"]),
        ("keys2", DataType::Fp32, &["batch", "2", "past + n", "4"]),
        ("sum2", DataType::Fp32, &["batch", "4"]),
    ];
    let inputs = KEYS.iter().chain(inputs).map(info).collect();
    Signature { inputs, defaults: Vec::new(), outputs: outputs.iter().map(info).collect() }
}

/// The configuration of [`model`], with `generated_inputs`.
fn config(generated: &str, max_batch_size: usize) -> Value {
    let tensor = |(name, data_type, dims): Spec| {
        let dims = if max_batch_size > 0 { &dims[1..] } else { dims };
        serde_json::json!({ "name": name, "data_type": data_type.to_string(), "dims": dims })
    };
    let inputs = [("ids", DataType::Int64, &[-1, -1][..]), ("image", DataType::Fp32, &[-1, 3, -1, -1])].map(tensor);
    let mut config = with(&[
        ("/max_batch_size", max_batch_size.into()),
        ("/input", inputs.into()),
        ("/output", [tensor(("y", DataType::Fp32, &[-1, 4]))].into()),
    ]);
    for (name, value) in [("state_pairs", "<<<keys, keys2>>> <<<sum, sum2>>>"), ("generated_inputs", generated)] {
        config["parameters"][name] = serde_json::json!({ "string_value": value });
    }
    config
}

fn bound(entry: &str, data_type: DataType, dims: &[&str], max_batch_size: usize) -> (Binding, BoundInput, Generated) {
    let generated = format!("g={entry}");
    let binding = bind(&config(&generated, max_batch_size), &model(&[("g", data_type, dims)]));
    let binding = binding.unwrap_or_else(|error| panic!("{entry} {dims:?}: {error}"));
    let g = input(&binding, "g").clone();
    let Source::Generated(generated) = g.source.clone() else { panic!("g is generated") };
    (binding, g, generated)
}

#[test]
fn the_batch_and_the_values_of_a_row_have_their_axes() {
    let numbers = |entry, dims, batch| (entry, dims, batch, None);
    for (entry, dims, batch_axis, axis) in [
        numbers("steps", &[][..], None),
        numbers("steps", &["1"], None),
        numbers("steps", &["batch"], Some(0)),
        numbers("steps", &["?"], Some(0)),
        numbers("steps", &["batch", "1"], Some(0)),
        numbers("steps", &["1", "batch"], Some(1)),
        numbers("elements(ids)", &["batch", "any"], Some(0)),
        numbers("length(keys)", &["3", "batch"], Some(1)),
        ("positions(ids)", &["batch", "n"], Some(0), Some(1)),
        ("positions(ids)", &["?", "n"], Some(0), Some(1)),
        ("positions(ids)", &["g_dynamic_axes_1", "g_dynamic_axes_2"], Some(0), Some(1)),
        ("positions(ids)", &["n", "batch"], Some(1), Some(0)),
        ("positions(ids)", &["n"], None, Some(0)),
        ("positions(ids)", &["1", "n"], None, Some(1)),
        ("positions(ids)", &["3", "batch", "n"], Some(1), Some(2)),
        ("mask(keys, ids)", &["batch", "past + n"], Some(0), Some(1)),
        ("mask(keys, ids)", &["batch", "1", "past + n"], Some(0), Some(2)),
        ("mask(keys@2)", &["batch", "1", "past", "1"], Some(0), Some(2)),
        ("mask(keys)", &["1", "1", "past"], None, Some(2)),
        ("mask(keys, 16)", &["batch", "past + 16"], Some(0), Some(1)),
        ("last(steps, 80)", &["1", "1", "past"], None, Some(2)),
        ("last(steps, 80)", &["?", "2", "past"], Some(0), Some(2)),
    ] {
        let (_, input, generated) = bound(entry, DataType::Int64, dims, 8);
        assert_eq!((input.batch_axis, generated.axis), (batch_axis, axis), "{entry} {dims:?}");
        let is_open = |at: &usize| input.dims[*at] < 0;
        let open: Vec<usize> = (0..dims.len()).filter(is_open).collect();
        let mut expected: Vec<usize> = batch_axis.into_iter().chain(axis).collect();
        expected.sort_unstable();
        assert_eq!(open, expected, "{entry} {dims:?}");
    }
}

#[test]
fn a_counter_along_a_dimension_that_is_not_the_batch_is_one_for_all_rows() {
    let (_, input, _) = bound("steps", DataType::Int64, &["layers"], 8);
    assert_eq!((input.batch_axis, &*input.dims), (None, &[1][..]));
}

#[test]
fn positions_of_an_input_of_fixed_length_have_its_length() {
    for (dims, axis, fed) in
        [(&["batch", "3"][..], Some(1), &[-1, 3][..]), (&["3", "batch", "1"], Some(0), &[3, -1, 1])]
    {
        let (_, input, generated) = bound("positions(image@1)", DataType::Int64, dims, 8);
        assert_eq!((generated.axis, &*input.dims), (axis, fed));
    }
}

#[test]
fn the_elements_of_last_are_those_of_the_model_or_of_the_entry() {
    for (entry, dims, max_batch_size, batch_axis, axis) in [
        ("last(steps)", &["1", "1", "80"][..], 8, None, Some(2)),
        ("last(steps)", &["1", "1", "80"], 0, None, Some(2)),
        ("last(steps)", &["batch", "1", "80"], 8, Some(0), Some(2)),
        ("last(steps)", &["?", "1", "80"], 8, Some(0), Some(2)),
        ("last(steps)", &["other", "1", "80"], 0, None, Some(2)),
        ("last(steps)", &["2", "batch", "80", "1"], 8, Some(1), Some(2)),
        ("last(elements(ids)*2+1)", &["16", "80"], 8, None, Some(1)),
        ("last(steps, 80)", &["batch", "80"], 8, Some(0), Some(1)),
        ("last(steps, 80)", &["1", "1", "past"], 0, None, Some(2)),
        ("last(steps, 80)", &["batch", "past"], 8, Some(0), Some(1)),
    ] {
        let (binding, input, generated) = bound(entry, DataType::Bool, dims, max_batch_size);
        assert_eq!((input.batch_axis, generated.axis), (batch_axis, axis), "{entry} {dims:?}");
        assert_eq!(generated.value, GeneratedValue::Last { counter: 0, length: 80 }, "{entry} {dims:?}");
        assert_eq!(binding.counters.len(), 1);
    }
}

#[test]
fn without_triton_s_batch_dimension_there_is_one_row() {
    for (entry, dims, axis, fed) in [
        ("steps", &[][..], None, &[][..]),
        ("steps", &["batch"], None, &[1]),
        ("positions(ids)", &["batch", "n"], Some(1), &[1, -1]),
        ("positions(ids)", &["n"], Some(0), &[-1]),
        ("mask(keys, ids)", &["batch", "1", "past + n"], Some(2), &[1, 1, -1]),
    ] {
        let (_, input, generated) = bound(entry, DataType::Int64, dims, 0);
        assert_eq!((input.batch_axis, generated.axis, &*input.dims), (None, axis, fed), "{entry} {dims:?}");
    }
}

#[test]
fn each_counter_is_counted_once() {
    let generated = "a=elements(ids)*2 b=positions(ids) c=steps d=elements(image@3) e=steps+1 f=elements(ids@1)";
    let inputs: Vec<(&str, DataType, &[&str])> =
        ["a", "b", "c", "d", "e", "f"].map(|name| (name, DataType::Int32, &["batch", "n"][..])).to_vec();
    let binding = bind(&config(generated, 8), &model(&inputs)).unwrap();
    let ids = Counter::Elements(InputAxis { input: 0, axis: 1 });
    assert_eq!(binding.counters, [ids, Counter::Steps, Counter::Elements(InputAxis { input: 1, axis: 3 })]);
    let names: Vec<String> = binding.counters.iter().map(|&counter| binding.counter_name(counter)).collect();
    assert_eq!(names, ["elements(ids@1)", "steps", "elements(image@3)"]);
}

#[test]
fn the_indices_are_those_of_the_inputs_that_are_fed() {
    let mut signature = model(&[("g", DataType::Int64, &["batch", "n"])]);
    // An input with a default that nothing feeds is left out.
    signature.defaults.extend(signature.inputs.pop());
    signature.defaults.insert(0, TensorInfo { name: "unused".to_owned(), ..signature.inputs[0].clone() });
    let binding = bind(&config("g=positions(ids)", 8), &signature).unwrap();
    assert_eq!(binding.inputs.len(), 5);
    assert!(matches!(input(&binding, "g").source, Source::Generated(_)));
}

#[test]
fn what_does_not_fit_the_model_is_refused_with_the_entry_and_the_reason() {
    let int = DataType::Int64;
    for (entry, data_type, dims, word) in [
        ("steps", DataType::Bytes, &["batch"][..], "TYPE_STRING"),
        ("steps", DataType::Bool, &["batch"], "TYPE_BOOL"),
        ("mask(keys)", DataType::Bytes, &["batch", "past"], "TYPE_STRING"),
        ("elements(other)", int, &["batch"], "'other'"),
        ("elements(keys)", int, &["batch"], "'keys' is no input that requests carry (there is ids, image)"),
        ("elements(image)", int, &["batch"], "write 'image@2' or 'image@3'"),
        ("elements(image@4)", int, &["batch"], "no axis 4"),
        ("elements(image@0)", int, &["batch"], "is the batch"),
        ("length(ids)", int, &["batch"], "no state has the input 'ids' (states have keys, sum)"),
        ("length(other)", int, &["batch"], "no state has the input 'other'"),
        ("length(sum)", int, &["batch"], "does not grow"),
        ("length(keys@1)", int, &["batch"], "axis 1 of state 'keys' is 2, which does not grow"),
        ("length(keys@9)", int, &["batch"], "no axis 9"),
        ("mask(sum, ids)", int, &["batch", "n"], "does not grow"),
        ("mask(keys, keys)", int, &["batch", "n"], "'keys' is no input that requests carry"),
        ("positions(ids)", int, &["batch"], "no dimension beside the batch is open"),
        ("positions(ids)", int, &["batch", "n", "m"], "more than one dimension beside the batch"),
        ("positions(image@1)", int, &["batch", "4"], "3 values a row"),
        ("positions(ids)", int, &["batch", "n", "2"], "all later dimensions must be 1"),
        ("mask(keys, ids)", int, &["1", "16"], "no dimension beside the batch is open"),
        ("mask(keys, 16)", int, &["1", "16"], "no dimension beside the batch is open"),
        ("mask(keys, 16@1)", int, &["batch", "n"], "'16' is no input that requests carry"),
        ("last(steps)", DataType::Bytes, &["1", "80"], "TYPE_STRING"),
        ("last(steps)", int, &["1", "1", "past"], "write 'last(steps, LENGTH)'"),
        ("last(elements(ids))", int, &["2", "1", "past"], "write 'last(elements(ids), LENGTH)'"),
        ("last(steps)", int, &["batch"], "write 'last(steps, LENGTH)'"),
        ("last(steps, 81)", int, &["1", "1", "80"], "81 values a row"),
        ("last(steps, 80)", int, &["batch", "n", "m"], "more than one dimension beside the batch"),
        ("last(steps, 80)", int, &["n", "80"], "(axis 0 is 'n'; the batch of requests is 'batch')"),
        ("last(steps)", int, &["1", "n", "80"], "the batch of requests is 'batch'"),
        ("mask(keys, ids)", int, &["1", "n", "k"], "(axis 1 is 'n', axis 2 is 'k'; the batch of requests is 'batch')"),
        ("mask(keys, ids)", int, &["1", "1", "n", "k"], "the batch of requests is 'batch'"),
        ("mask(keys, ids)", int, &["heads", "k"], "the batch of requests is 'batch'"),
        ("mask(keys, ids)", int, &["2", "k", "k2"], "the batch of requests is 'batch'"),
        ("positions(ids)", int, &["n", "k"], "the batch of requests is 'batch'"),
        ("last(elements(keys), 80)", int, &["1", "80"], "'keys' is no input that requests carry"),
    ] {
        let config = config(&format!("g={entry}"), 8);
        assert_refused(&config, &model(&[("g", data_type, dims)]), &["generated_inputs", entry, word]);
    }
    let fed_twice = config("ids=steps", 8);
    assert_refused(&fed_twice, &model(&[]), &["'ids'", "'input'", "'generated_inputs'"]);
    assert_refused(&config("nothing=steps", 8), &model(&[]), &["'generated_inputs' names 'nothing'"]);
    let mut with_context = config("g=positions(image@2)", 8);
    with_context["parameters"]["input_context"] = serde_json::json!({ "string_value": "image=2@2" });
    with_context["input"][1]["dims"] = serde_json::json!([3, -1, 5]);
    let g = ("g", int, &["batch", "n"][..]);
    assert_refused(&with_context, &model(&[g]), &["'image' has an input_context along axis 2"]);
}
