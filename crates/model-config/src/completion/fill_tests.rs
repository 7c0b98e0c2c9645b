use std::sync::LazyLock;

use rows::tensor::DataType;
use serde_json::{Value, json};

use super::*;
use crate::config::StatePair;
use crate::onnx::{Nodes, Signature};

fn info((name, dims): (&str, &[&str])) -> TensorInfo {
    let dim = |text: &&str| text.parse().unwrap_or(-1);
    let symbol =
        |text: &&str| if text.parse::<i64>().is_ok() || *text == "?" { String::new() } else { (*text).to_owned() };
    let data_type = DataType::Fp32;
    TensorInfo {
        name: name.to_owned(),
        data_type,
        dims: dims.iter().map(dim).collect(),
        symbols: dims.iter().map(symbol).collect(),
    }
}

type Specs<'a> = &'a [(&'a str, &'a [&'a str])];

fn signature(inputs: Specs, outputs: Specs) -> Signature {
    let [inputs, outputs] = [inputs, outputs].map(|specs| specs.iter().copied().map(info).collect());
    Signature { inputs, defaults: Vec::new(), outputs }
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<StatePair> {
    let pair = |&(input, output): &(&str, &str)| StatePair { input: input.to_owned(), output: output.to_owned() };
    pairs.iter().map(pair).collect()
}

static NOTHING: LazyLock<(PartialConfig, Signature, Nodes)> =
    LazyLock::new(|| (PartialConfig::from_json(b"{}").unwrap(), signature(&[], &[]), Nodes::default()));

/// The known facts about a model that has these states and nothing special, with an empty configuration and signature.
fn known(pairs: &[StatePair]) -> Known<'_> {
    let (config, signature, nodes) = &*NOTHING;
    Known { config, signature, pairs, taken: &[], nodes, default_max_batch_size: 4, mixes_rows: false }
}

/// The document for Triton; the same as before if nothing is added.
fn filled(config: &Value, signature: &Signature, known: Known) -> Result<Value> {
    let mut config = PartialConfig::from_json(config.to_string().as_bytes())?;
    let additions = additions(&Known { config: &config, signature, ..known })?;
    config.add(&additions);
    Ok(config.document.clone())
}

fn completed(config: Value, signature: &Signature, pairs: &[(&str, &str)], taken: &[&str]) -> Option<Value> {
    let pairs = self::pairs(pairs);
    let known = Known { taken, ..known(&pairs) };
    Some(filled(&config, signature, known).unwrap()).filter(|filled| *filled != config)
}

fn dims(config: &Value, list: &str) -> Vec<(String, Value)> {
    let tensors = config[list].as_array().unwrap().iter();
    tensors.map(|tensor| (tensor["name"].as_str().unwrap().to_owned(), tensor["dims"].clone())).collect()
}

const S: [(&str, &str); 1] = [("s", "s2")];

#[test]
fn nothing_written_is_filled_from_the_signature() {
    let silero = signature(
        &[("input", &["?", "?"]), ("state", &["2", "?", "128"]), ("sr", &[])],
        &[("output", &["?", "1"]), ("stateN", &["?", "?", "?"])],
    );
    let oldest = json!({ "scheduling": { "string_value": "oldest" } });
    let config = json!({ "name": "m", "instance_group": [{ "count": 2 }], "parameters": oldest });
    let config = completed(config, &silero, &[("state", "stateN")], &["sr"]).unwrap();
    assert_eq!(config["max_batch_size"], 64);
    assert_eq!(dims(&config, "input"), [("input".to_owned(), json!([-1]))]);
    assert_eq!(dims(&config, "output"), [("output".to_owned(), json!([1]))]);
    assert_eq!(config["sequence_batching"]["max_sequence_idle_microseconds"], 60_000_000);
    assert_eq!(config["sequence_batching"]["oldest"]["max_candidate_sequences"], 1024);
    let one = completed(json!({ "name": "m" }), &silero, &[("state", "stateN")], &["sr"]).unwrap();
    assert!(one.get("sequence_batching").is_none(), "this backend schedules it");
}

#[test]
fn a_model_that_mixes_rows_gets_batches_of_one() {
    let model = signature(&[("x", &["N", "T"]), ("s", &["N", "4"])], &[("y", &["N", "T"]), ("s2", &["N", "4"])]);
    let pairs = pairs(&S);
    let filled = |config: Value| filled(&config, &model, Known { mixes_rows: true, ..known(&pairs) }).unwrap();
    let config = filled(json!({}));
    assert_eq!((&config["max_batch_size"], dims(&config, "input")[0].1.clone()), (&json!(1), json!([-1])));
    assert_eq!(filled(json!({ "max_batch_size": 8 }))["max_batch_size"], 8, "as it is written");
    let one = json!({ "string_value": "1" });
    let direct = filled(json!({ "sequence_batching": { "direct": {} } }));
    assert_eq!((&direct["max_batch_size"], &direct["parameters"]["max_rows_per_run"]), (&json!(64), &one));
    let given = filled(json!({ "parameters": { "max_rows_per_run": { "string_value": "8" } } }));
    assert_eq!(
        (&given["max_batch_size"], &given["parameters"]["max_rows_per_run"]["string_value"]),
        (&json!(64), &json!("8"))
    );
}

#[test]
fn a_fixed_input_of_requests_is_one_for_the_batch() {
    let model = signature(
        &[("x", &["N", "T"]), ("sr", &[]), ("gain", &["2"]), ("s", &["N", "4"])],
        &[("y", &["N", "T"]), ("s2", &["N", "4"])],
    );
    let config = completed(json!({}), &model, &S, &[]).unwrap();
    let expected = [("x", json!([-1])), ("sr", json!([1])), ("gain", json!([2]))];
    assert_eq!(dims(&config, "input"), expected.map(|(name, dims)| (name.to_owned(), dims)));
    assert_eq!(config["input"][1]["reshape"], json!({ "shape": [] }));
}

#[test]
fn an_output_that_begins_with_another_dimension_of_requests_has_no_batch() {
    let of = |output: &[&str]| {
        let inputs: Specs = &[("x", &["N", "T", "4"]), ("s", &["1", "N", "8"])];
        let model = signature(inputs, &[("y", output), ("s2", &["1", "N", "8"])]);
        completed(json!({}), &model, &S, &[]).unwrap()
    };
    for output in [&["T", "?"][..], &["T", "4"], &["T", "1", "1", "4"]] {
        let config = of(output);
        assert_eq!(config.get("max_batch_size"), None, "{output:?}");
        assert_eq!(dims(&config, "input")[0].1, json!([-1, -1, 4]), "{output:?}");
    }
    for output in [&["frames", "?"][..], &["?", "T"], &["N", "T"], &["T", "N", "4"]] {
        assert_eq!(of(output)["max_batch_size"], 64, "{output:?}");
    }
}

#[test]
fn the_batch_may_stand_elsewhere() {
    let model = signature(
        &[("x", &["4", "batch", "5"]), ("s", &["2", "batch", "8"])],
        &[("y", &["batch", "3"]), ("z", &["7", "batch"]), ("s2", &["2", "batch", "8"])],
    );
    let config = completed(json!({}), &model, &S, &[]).unwrap();
    assert_eq!(config["max_batch_size"], 64);
    assert_eq!(dims(&config, "input")[0].1, json!([4, -1, 5]));
    assert_eq!(dims(&config, "output")[0].1, json!([3]));
    assert_eq!(dims(&config, "output")[1].1, json!([7, -1]));
}

#[test]
fn the_batch_is_what_the_states_share_with_what_requests_carry() {
    let model = signature(
        &[("x", &["s77", "s27", "80"]), ("h", &["1", "s27", "4"]), ("k", &["s27", "s12", "4"])],
        &[("y", &["s77", "s27", "3"]), ("h2", &["1", "s27", "4"]), ("k2", &["s27", "s13", "4"])],
    );
    let config = completed(json!({}), &model, &[("h", "h2"), ("k", "k2")], &[]).unwrap();
    assert_eq!(
        (config["max_batch_size"].clone(), dims(&config, "input")[0].1.clone()),
        (json!(64), json!([-1, -1, 80]))
    );
}

/// `max_batch_size` as it is filled in, and the warning.
fn batch(config: Value, inputs: Specs) -> (Option<i64>, Option<String>) {
    let model = signature(inputs, &[("y", inputs[0].1), ("s2", inputs[1].1)]);
    let pairs = pairs(&S);
    let partial = PartialConfig::from_json(config.to_string().as_bytes()).unwrap();
    let known = Known { config: &partial, signature: &model, ..known(&pairs) };
    let size = additions(&known).unwrap().max_batch_size;
    (size.map(|size| size as i64), known.batch_warning(size))
}

#[test]
fn a_shared_name_that_may_be_a_length_makes_no_batch() {
    let cases: [(Specs, &str); 8] = [
        (&[("x", &["T", "4"]), ("s", &["T", "4"])], "s=[batch, 4]"),
        (&[("x", &["time", "4"]), ("s", &["time", "4"])], "s=[batch, 4]"),
        (&[("x", &["s77", "4"]), ("s", &["s77", "4"])], "s=[batch, 4]"),
        (&[("x", &["seq", "bsz", "4"]), ("s", &["seq", "bsz", "4"])], "s=[batch, -1, 4]"),
        (&[("x", &["time", "feat"]), ("s", &["time", "64"])], "s=[batch, 64]"),
        (&[("x", &["frames", "1", "80"]), ("s", &["1", "frames", "64"])], "s=[1, batch, 64]"),
        (&[("x", &["utt", "T", "80"]), ("s", &["12", "4", "T", "64"])], "s=[12, 4, batch, 64]"),
        (&[("x", &["T", "80"]), ("s", &["1", "s_dim_1", "64"])], "s=[1, batch, 64]"),
    ];
    for (inputs, line) in cases {
        let (size, warning) = batch(json!({}), inputs);
        let warning = warning.unwrap();
        assert!(size.is_none() && warning.contains("max_batch_size: 64") && warning.contains(line), "{warning}");
        let dims = json!({ "state_dims": { "string_value": line } });
        let written = batch(json!({ "max_batch_size": 64, "parameters": dims }), inputs);
        assert_eq!(written, (None, None), "{inputs:?}: nothing is added");
    }
    let (inputs, _) = cases[0];
    let dims = |text: &str| json!({ "parameters": { "state_dims": { "string_value": text } } });
    assert_eq!(batch(dims("s=[batch, 4]"), inputs), (Some(64), None));
    assert_eq!(batch(dims("s=[-1, 4]"), inputs), (None, None));
}

#[test]
fn a_batch_among_two_shared_names_is_asked_for() {
    let model = signature(
        &[("x", &["seq", "bsz", "4"]), ("s", &["seq", "bsz", "4"])],
        &[("y", &["seq", "bsz", "4"]), ("s2", &["seq", "bsz", "4"])],
    );
    let pairs = pairs(&S);
    let filled = |dims: Option<&str>| {
        let parameters = dims.map_or(json!({}), |text| json!({ "state_dims": { "string_value": text } }));
        let known = known(&pairs);
        filled(&json!({ "max_batch_size": 8, "parameters": parameters }), &model, known)
    };
    let error = filled(None).unwrap_err().to_string();
    assert!(error.contains("'seq', 'bsz'") && error.contains("s=[batch, -1, 4]"), "{error}");
    assert_eq!(dims(&filled(Some("s=[batch, -1, 4]")).unwrap(), "input")[0].1, json!([-1, 4]));
    assert_eq!(dims(&filled(Some("s=[-1, batch, 4]")).unwrap(), "input")[0].1, json!([-1, -1, 4]));
}

#[test]
fn a_state_that_lacks_the_name_of_the_batch_has_runs_of_its_own() {
    for symbol in ["s_dynamic_axes_1", "?"] {
        let inputs: Specs = &[("x", &["batch", "time", "4"]), ("s", &["1", symbol, "4"])];
        assert_eq!(batch(json!({}), inputs), (Some(1), None), "binding warns");
        let dims = json!({ "state_dims": { "string_value": "s=[1, batch, 4]" } });
        assert_eq!(batch(json!({ "parameters": dims }), inputs), (Some(64), None));
    }
}

#[test]
fn what_the_position_tells_is_warned_of_unless_little_else_is_possible() {
    let doubtful: [Specs; 4] = [
        &[("x", &["?", "80"]), ("s", &["1", "?"])],
        &[("x", &["?", "80"]), ("s", &["?", "80"])],
        &[("x", &["?", "?"]), ("s", &["1", "?", "64"])],
        &[("x", &["s77", "s27", "5"]), ("s", &["1", "s27", "6"])],
    ];
    for inputs in doubtful {
        let (size, warning) = batch(json!({}), inputs);
        assert!(size == Some(64) && warning.is_some(), "{inputs:?}");
        assert_eq!(batch(json!({ "max_batch_size": 64 }), inputs), (None, None));
    }
    assert_eq!(batch(json!({}), &[("x", &["?", "?"]), ("s", &["2", "?", "128"])]), (Some(64), None));
}

#[test]
fn a_scalar_that_is_no_constant_makes_no_batch() {
    let model = signature(&[("x", &["N", "4"]), ("s", &["N", "4"])], &[("y", &[]), ("s2", &["N", "4"])]);
    let pairs = pairs(&S);
    let with = |scalar_outputs| {
        let nodes = Nodes { scalar_outputs, ..Nodes::default() };
        let known = Known { nodes: &nodes, ..known(&pairs) };
        filled(&json!({}), &model, known).unwrap().get("max_batch_size").cloned()
    };
    assert_eq!(with(vec!["y".to_owned()]), None);
    assert_eq!(with(Vec::new()), Some(json!(64)), "its rank is not known");
}

#[test]
fn a_growing_state_is_told_by_the_names() {
    let model = signature(
        &[("x", &["batch", "chunk", "8"]), ("s", &["batch", "past", "8"])],
        &[("y", &["batch", "chunk", "8"]), ("s2", &["batch", "past + chunk", "8"])],
    );
    assert_eq!(completed(json!({}), &model, &S, &[]).unwrap()["max_batch_size"], 64);
    // Without a batch, its first dimension is the time.
    let model =
        signature(&[("x", &["chunk", "8"]), ("s", &["past", "8"])], &[("y", &["chunk", "8"]), ("s2", &["?", "8"])]);
    let config = completed(json!({}), &model, &S, &[]).unwrap();
    assert_eq!((config.get("max_batch_size"), dims(&config, "input")[0].1.clone()), (None, json!([-1, 8])));
}

#[test]
fn requests_bring_what_the_context_leaves() {
    let dims = |model: &[&str], context: &str| {
        let config = json!({ "parameters": { "input_context": { "string_value": context } } });
        let model = signature(&[("x", model), ("s", &["N", "4"])], &[("y", &["N", "3"]), ("s2", &["N", "4"])]);
        let filled = filled(&config, &model, known(&pairs(&S)))?;
        Ok::<_, CompletionError>(self::dims(&filled, "input").remove(0).1)
    };
    assert_eq!(dims(&["N", "576"], "x=64").unwrap(), json!([512]));
    assert_eq!(dims(&["N", "T"], "x=64").unwrap(), json!([-1]));
    assert_eq!(dims(&["N", "80", "70"], "x=64@2").unwrap(), json!([80, 6]));
    assert_eq!(dims(&["N", "60", "70"], "x=64").unwrap(), json!([60, 6]));
    assert_eq!(dims(&["N", "T"], "x=64+512").unwrap(), json!([512]));
    assert_eq!(dims(&["N", "T"], "x=64+512:whole").unwrap(), json!([-1]));
    assert_eq!(dims(&["N", "80", "70"], "x=64+6").unwrap(), json!([80, 6]));
    for (model, context, words) in [
        (["N", "80", "70"], "x=64", ["'x=64'", "[-1, 80, 70]", "'x=64@1'", "'x=64@2'"]),
        (["N", "T", "80"], "x=64", ["'x=64'", "[-1, -1, 80]", "'x=64@1'", "'x=64@2'"]),
        (["N", "60", "64"], "x=64", ["'x=64'", "[-1, 60, 64]", "no dimension", "longer than 64"]),
        (["N", "80", "70"], "x=64+9", ["'x=64+9'", "[-1, 80, 70]", "no dimension", "is 73, or open"]),
    ] {
        let error = dims(&model, context).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn requests_bring_any_number_of_windows_and_answers_have_their_steps() {
    let filled = |x: &[&str], y: &[&str], windows: &str, context: &str| {
        let mut config = json!({ "parameters": { "input_windows": { "string_value": windows } } });
        if !context.is_empty() {
            config["parameters"]["input_context"] = json!({ "string_value": context });
        }
        let model = signature(&[("x", x), ("s", &["N", "4"])], &[("y", y), ("s2", &["N", "4"])]);
        filled(&config, &model, known(&pairs(&S))).unwrap()
    };
    for (x, y, windows, context, of_requests, of_answers) in [
        (&["N", "512"][..], &["N", "1"][..], "x=512", "", json!([-1]), json!([-1, 1])),
        (&["N", "576"], &["N"], "x=512", "x=64", json!([-1]), json!([-1])),
        (&["N", "T"], &["N", "T"], "x=512", "x=64", json!([-1]), json!([-1])),
        (&["N", "80", "32"], &["N", "80", "F"], "x=32@2", "", json!([80, -1]), json!([80, -1])),
        (&["N", "T", "80"], &["N", "4", "5"], "x=32", "", json!([-1, 80]), json!([-1, 4, 5])),
    ] {
        let config = filled(x, y, windows, context);
        assert_eq!(dims(&config, "input")[0].1, of_requests, "{windows} {x:?}");
        assert_eq!(dims(&config, "output")[0].1, of_answers, "{windows} {y:?}");
        assert_eq!(config["input"][0]["allow_ragged_batch"], true);
    }
    let whole = filled(&["1", "512"], &["1", "1"], "x=512", "");
    assert_eq!(
        (dims(&whole, "input")[0].1.clone(), dims(&whole, "output")[0].1.clone()),
        (json!([1, -1]), json!([-1, 1, 1]))
    );
    assert_eq!(whole["input"][0].get("allow_ragged_batch"), None, "there is no batch");
}

#[test]
fn without_an_open_dimension_there_is_no_batch() {
    let model = signature(&[("x", &["1", "80"]), ("s", &["1", "4"])], &[("y", &["1", "3"]), ("s2", &["1", "4"])]);
    let config = completed(json!({ "max_batch_size": 0 }), &model, &S, &[]).unwrap();
    assert_eq!(config["max_batch_size"], 0);
    assert_eq!(dims(&config, "input")[0].1, json!([1, 80]));
    let half = signature(&[("x", &["N", "80"]), ("s", &["1", "4"])], &[("y", &["N", "3"]), ("s2", &["1", "4"])]);
    assert_eq!(completed(json!({}), &half, &S, &[]).unwrap().get("max_batch_size"), None, "its state has none");
}

#[test]
fn batches_that_the_model_does_not_have_are_refused_before_an_output_is_listed() {
    let model = signature(&[("x", &["1", "80"]), ("s", &["1", "4"])], &[("y", &["1", "3"]), ("s2", &["1", "4"])]);
    let error = filled(&json!({ "max_batch_size": 8 }), &model, known(&pairs(&S))).unwrap_err().to_string();
    for words in ["max_batch_size is 8", "'y'", "[1, 3]", "'max_batch_size: 0'"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn what_is_written_is_kept() {
    let model = signature(&[("x", &["N", "4"]), ("s", &["N", "4"])], &[("y", &["N", "4"]), ("s2", &["N", "4"])]);
    let x = json!([{ "name": "x", "data_type": "TYPE_FP32", "dims": [4] }]);
    let y = json!([{ "name": "y", "data_type": "TYPE_FP32", "dims": [4] }]);
    let whole = json!({ "max_batch_size": 8, "input": x, "output": y, "sequence_batching": { "direct": {} } });
    assert_eq!(completed(whole.clone(), &model, &S, &[]), None);
    let config = completed(json!({ "input": x, "sequence_batching": { "direct": {} } }), &model, &S, &[]).unwrap();
    assert_eq!(
        (&config["max_batch_size"], &config["input"], &config["output"][0]["name"]),
        (&json!(64), &x, &json!("y"))
    );
    assert_eq!(config["sequence_batching"], json!({ "direct": {} }));
    // Dims that list the batch mean that Triton has none.
    let full = json!([{ "name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4] }]);
    let config = completed(json!({ "input": full }), &model, &S, &[]).unwrap();
    assert_eq!(config.get("max_batch_size"), None);
    assert_eq!(dims(&config, "output")[0].1, json!([-1, 4]));
    let config = completed(json!({ "dynamic_batching": {} }), &model, &S, &[]).unwrap();
    assert_eq!(config.get("sequence_batching"), None, "which is refused later");
}

#[test]
fn a_model_that_gives_only_states_answers_with_them() {
    let model = signature(&[("x", &["N", "4"]), ("s", &["N", "4"])], &[("s2", &["N", "4"])]);
    assert_eq!(dims(&completed(json!({}), &model, &S, &[]).unwrap(), "output"), [("s2".to_owned(), json!([4]))]);
}

#[test]
fn names_that_an_exporter_makes_up_for_outputs_do_not_hide_the_batch() {
    let model = |x: &'static [&'static str], y: &'static [&'static str]| {
        signature(&[("x", x), ("s", &["1", "batch", "4"])], &[("y", y), ("s2", &["1", "Adds2_dim_1", "4"])])
    };
    let first = completed(json!({}), &model(&["batch", "time", "80"], &["Addy_dim_0", "Addy_dim_1", "3"]), &S, &[]);
    let first = first.unwrap();
    assert_eq!((&first["max_batch_size"], dims(&first, "output")[0].1.clone()), (&json!(64), json!([-1, 3])));
    let only = completed(json!({}), &model(&["5", "batch", "80"], &["7", "Addy_dim_1", "3"]), &S, &[]).unwrap();
    assert_eq!((&only["max_batch_size"], dims(&only, "output")[0].1.clone()), (&json!(64), json!([7, -1, 3])));
    let unclear = model(&["time", "batch", "80"], &["Addy_dim_0", "Addy_dim_1", "3"]);
    assert_eq!(completed(json!({}), &unclear, &S, &[]).unwrap().get("max_batch_size"), None);
}

#[test]
fn a_scalar_without_a_batch_has_one_element() {
    let inputs: Specs = &[("x", &["1", "80"]), ("sr", &[]), ("s", &["1", "4"])];
    let model = signature(inputs, &[("y", &["1", "3"]), ("loss", &[]), ("s2", &["1", "4"])]);
    let config = completed(json!({}), &model, &S, &[]).unwrap();
    let named = |name: &str, dims: Value| (name.to_owned(), dims);
    assert_eq!(dims(&config, "input"), [named("x", json!([1, 80])), named("sr", json!([1]))]);
    assert_eq!(dims(&config, "output"), [named("y", json!([1, 3])), named("loss", json!([1]))]);
    assert_eq!(config["input"][1].get("reshape"), None, "Triton allows none without a batch");
}

#[test]
fn names_that_an_exporter_makes_of_the_tensors_do_not_hide_the_batch() {
    let model = signature(
        &[
            ("targets", &["targets_dynamic_axes_1", "targets_dynamic_axes_2"]),
            ("length", &["length_dynamic_axes_1"]),
            ("h", &["1", "h_dynamic_axes_1", "640"]),
        ],
        &[("y", &["y_dynamic_axes_1", "y_dynamic_axes_2", "9"]), ("h2", &["1", "h2_dynamic_axes_1", "640"])],
    );
    let h = [("h", "h2")];
    let config = completed(json!({}), &model, &h, &[]).unwrap();
    assert_eq!((&config["max_batch_size"], dims(&config, "input")[0].1.clone()), (&json!(64), json!([-1])));
    assert_eq!(dims(&config, "output")[0].1, json!([-1, 9]));
    let pairs = pairs(&h);
    let warning = |config: Value| {
        let config = PartialConfig::from_json(config.to_string().as_bytes()).unwrap();
        Known { config: &config, signature: &model, ..known(&pairs) }.batch_warning(Some(64))
    };
    let text = warning(json!({})).unwrap();
    assert!(text.contains("dimension 1 of 'h'") && text.contains("'h=[1, -1, 640]'"), "{text}");
    let dims = |text: &str| json!({ "parameters": { "state_dims": { "string_value": text } } });
    assert_eq!(warning(dims("h=[1, batch, 640]")), None);
    let varies = completed(dims("h=[1, -1, 640]"), &model, &h, &[]).unwrap();
    assert_eq!(varies["max_batch_size"], 1, "a run has the state of one sequence");
}

#[test]
fn an_output_that_is_the_same_in_every_run_does_not_hide_the_batch() {
    let model = signature(
        &[("x", &["batch", "4"]), ("s", &["batch", "4"])],
        &[("version", &["1"]), ("y", &["batch", "3"]), ("s2", &["batch", "4"])],
    );
    let pairs = pairs(&S);
    let with = |constant_outputs| {
        let nodes = Nodes { constant_outputs, ..Nodes::default() };
        filled(&json!({}), &model, Known { nodes: &nodes, ..known(&pairs) }).unwrap()
    };
    let config = with(vec!["version".to_owned()]);
    assert_eq!(config["max_batch_size"], 64);
    assert_eq!(dims(&config, "output"), [("version".to_owned(), json!([1])), ("y".to_owned(), json!([3]))]);
    assert_eq!(with(Vec::new()).get("max_batch_size"), None, "its dims may be those of one row");
}
