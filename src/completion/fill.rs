//! Filling Triton's JSON configuration.

use serde_json::{Map, Value, json};

use super::CompletionError;
use crate::config::{Context, StatePair, context_line};
use crate::session::{Signature, TensorInfo};
use crate::tensor::Dims;

/// Rows of a batch, where nothing says how many.
const MAX_BATCH_SIZE: usize = 64;
/// The parameter for the rows of a run.
const MAX_ROWS_PER_RUN: &str = "max_rows_per_run";
const MAX_CANDIDATE_SEQUENCES: usize = 1024;
const MAX_QUEUE_DELAY_US: u64 = 500;
/// Triton's own default is a second, which a microphone that sends nothing in silence does not outlive.
const MAX_IDLE_US: u64 = 60_000_000;

/// What is known of a model besides its signature.
pub struct Written<'a> {
    /// Its states.
    pub pairs: &'a [StatePair],
    /// Inputs that requests do not carry although they are no states: controls, constants, lengths.
    pub taken: &'a [&'a str],
    /// What is put in front of requests' inputs.
    pub contexts: &'a [Context],
    /// `--backend-config=default-max-batch-size`.
    pub default_max_batch_size: usize,
    /// A row's result depends on the other rows of its batch.
    pub mixes_rows: bool,
}

/// Fills what is missing in the configuration that Triton gave. `None` if nothing is.
pub fn complete(config: &[u8], signature: &Signature, written: &Written) -> Result<Option<Vec<u8>>, CompletionError> {
    let mut config: Map<String, Value> = serde_json::from_slice(config)?;
    let before = config.clone();
    let axes = BatchAxes::find(signature, written);
    let has_batch = axes.as_ref().is_some_and(|axes| axes.fit_listed(&config, signature));
    if max_batch_size(&config) == 0 && has_batch {
        fill_batch(&mut config, written);
    }
    let max_batch_size = max_batch_size(&config);
    let axes = axes.filter(|_| max_batch_size > 0);
    if is_empty(&config, "input") {
        config.insert("input".to_owned(), inputs(signature, written, axes.as_ref())?);
    }
    if is_empty(&config, "output") {
        if max_batch_size > 0 && axes.is_none() {
            check_batch(signature, written, max_batch_size)?;
        }
        config.insert("output".to_owned(), outputs(signature, written, axes.as_ref())?);
    }
    let scheduling = ["sequence_batching", "dynamic_batching", "ensemble_scheduling"];
    if !scheduling.iter().any(|name| config.contains_key(*name)) {
        let oldest = json!({
            "max_candidate_sequences": MAX_CANDIDATE_SEQUENCES,
            "max_queue_delay_microseconds": MAX_QUEUE_DELAY_US,
        });
        let batching = json!({ "max_sequence_idle_microseconds": MAX_IDLE_US, "oldest": oldest });
        config.insert("sequence_batching".to_owned(), batching);
    }
    match config == before {
        true => Ok(None),
        false => Ok(Some(serde_json::to_vec(&config)?)),
    }
}

/// `max_batch_size`; where the rows of a run change each other's results, runs of one row.
fn fill_batch(config: &mut Map<String, Value>, written: &Written) {
    let usual = written.default_max_batch_size.max(MAX_BATCH_SIZE);
    let parameters = config.get("parameters");
    let rows_are_given = parameters.is_some_and(|parameters| parameters.get(MAX_ROWS_PER_RUN).is_some());
    if !written.mixes_rows || rows_are_given {
        config.insert("max_batch_size".to_owned(), json!(usual));
        return;
    }
    // With `direct` there are as many sequences as `max_batch_size` says, so it cannot be 1.
    let is_direct = config.get("sequence_batching").is_some_and(|batching| batching.get("oldest").is_none());
    config.insert("max_batch_size".to_owned(), json!(if is_direct { usual } else { 1 }));
    let parameters = config.entry("parameters").or_insert_with(|| json!({}));
    if let Some(parameters) = parameters.as_object_mut().filter(|_| is_direct) {
        parameters.insert(MAX_ROWS_PER_RUN.to_owned(), json!({ "string_value": "1" }));
    }
}

/// The list `input`: what is left for requests. `axes` are those of a model with a batch.
fn inputs(signature: &Signature, written: &Written, axes: Option<&BatchAxes>) -> Result<Value, CompletionError> {
    let infos = signature.inputs.iter().enumerate().filter(|(_, info)| written.is_of_requests(info));
    let tensor = |(index, info): (usize, &TensorInfo)| {
        if is_scalar(info, axes) {
            let remedy = "give its value in parameter 'constant_inputs'";
            return Err(CompletionError::Scalar { name: info.name.clone(), remedy });
        }
        let axis = axes.map(|axes| axes.inputs[index]);
        Ok(tensor(info, &written.dims_of_requests(info, axis.flatten())?, axis))
    };
    infos.map(tensor).collect()
}

/// The list `output`: all but the states.
fn outputs(signature: &Signature, written: &Written, axes: Option<&BatchAxes>) -> Result<Value, CompletionError> {
    let infos = signature.outputs.iter().enumerate().filter(|(_, info)| written.is_of_responses(info, signature));
    let (scalars, infos): (Vec<_>, Vec<_>) = infos.partition(|(_, info)| is_scalar(info, axes));
    // Triton cannot carry them; the others it can.
    if let (Some((_, info)), []) = (scalars.first(), infos.as_slice()) {
        let remedy = "export the model with an output that has dimensions";
        return Err(CompletionError::Scalar { name: info.name.clone(), remedy });
    }
    for (_, info) in scalars {
        log::warn!("output '{}' is left out: it is a scalar in the model, and max_batch_size is 0", info.name);
    }
    let tensor = |(index, info): (usize, &TensorInfo)| tensor(info, &info.dims, axes.map(|axes| axes.outputs[index]));
    Ok(infos.into_iter().map(tensor).collect())
}

/// Refuses batches of a model whose outputs cannot have them.
fn check_batch(signature: &Signature, written: &Written, max_batch_size: i64) -> Result<(), CompletionError> {
    let is_fixed = |info: &&TensorInfo| !info.dims.is_empty() && info.dims.iter().all(|&dim| dim >= 0);
    let mut answers = signature.outputs.iter().filter(|info| written.is_of_responses(info, signature));
    match answers.find(is_fixed) {
        None => Ok(()),
        Some(TensorInfo { name, data_type, dims, .. }) => {
            let (output, described) = (name.clone(), format!("{data_type} {}", Dims(dims)));
            Err(CompletionError::NoBatch { max_batch_size, output, described })
        }
    }
}

/// Whether Triton cannot carry a tensor: it has no dims, and no batch in front of them.
fn is_scalar(info: &TensorInfo, axes: Option<&BatchAxes>) -> bool {
    info.dims.is_empty() && axes.is_none()
}

impl Written<'_> {
    /// The model's dims, without what a context takes of them.
    fn dims_of_requests(&self, info: &TensorInfo, batch_axis: Option<usize>) -> Result<Vec<i64>, CompletionError> {
        let mut dims = info.dims.clone();
        if let Some(context) = self.contexts.iter().find(|context| context.input == info.name) {
            // An axis that cannot be is refused when the model is bound.
            let axis = context.axis.map_or_else(|| self.context_axis(context, info, batch_axis), Ok)?;
            if let Some(dim) = dims.get_mut(axis).filter(|dim| **dim > context.length as i64) {
                *dim -= context.length as i64;
            }
        }
        Ok(dims)
    }

    /// The only axis that a context can stand along: an open one, or one that is longer.
    fn context_axis(
        &self,
        context: &Context,
        info: &TensorInfo,
        batch_axis: Option<usize>,
    ) -> Result<usize, CompletionError> {
        let can_be = |&axis: &usize| {
            batch_axis != Some(axis) && (info.dims[axis] < 0 || info.dims[axis] > context.length as i64)
        };
        let axes: Vec<usize> = (0..info.dims.len()).filter(can_be).collect();
        let (length, dims) = (context.length, Dims(&info.dims));
        let why = match axes.as_slice() {
            &[axis] => return Ok(axis),
            [] => format!("no dimension of the model's {dims} is longer than {length}"),
            axes => {
                let line = |&axis: &usize| context_line(self.contexts, &info.name, axis);
                let lines: Vec<_> = axes.iter().map(line).collect();
                format!(
                    "{length} elements can stand along more than one axis of the model's {dims}: write {}",
                    lines.join(", or ")
                )
            }
        };
        Err(CompletionError::ContextAxis { context: format!("{}={length}", info.name), why })
    }

    fn is_state(&self, info: &TensorInfo) -> bool {
        self.pairs.iter().any(|pair| pair.input == info.name)
    }

    /// Whether responses carry an output: all but the states, or those if there is no other.
    fn is_of_responses(&self, info: &TensorInfo, signature: &Signature) -> bool {
        let is_state = |info: &TensorInfo| self.pairs.iter().any(|pair| pair.output == info.name);
        !is_state(info) || signature.outputs.iter().all(is_state)
    }

    fn is_of_requests(&self, info: &TensorInfo) -> bool {
        !self.is_state(info) && !self.taken.contains(&info.name.as_str())
    }
}

fn is_empty(config: &Map<String, Value>, list: &str) -> bool {
    config.get(list).and_then(Value::as_array).is_none_or(Vec::is_empty)
}

fn max_batch_size(config: &Map<String, Value>) -> i64 {
    config.get("max_batch_size").and_then(Value::as_i64).unwrap_or(0)
}

/// Which dimension of each tensor is the batch, in the model's order; `None` for a tensor without one.
struct BatchAxes {
    inputs: Vec<Option<usize>>,
    outputs: Vec<Option<usize>>,
}

impl BatchAxes {
    /// `None` if the model has no batch dimension.
    fn find(signature: &Signature, written: &Written) -> Option<Self> {
        let symbol = batch_symbol(signature, written);
        let of_input = |info: &TensorInfo| match info.dims.iter().any(|&dim| dim < 0) {
            // What is fixed is one for the whole batch, but for a state.
            false if written.is_of_requests(info) => Some(None),
            _ if written.taken.contains(&info.name.as_str()) => Some(None),
            _ => batch_axis(info, symbol, written.is_state(info)).map(Some),
        };
        let inputs = signature.inputs.iter().map(of_input).collect::<Option<Vec<_>>>()?;
        let of_requests = |(info, axis): (&TensorInfo, &Option<usize>)| axis.filter(|_| written.is_of_requests(info));
        let request_axes: Vec<usize> = signature.inputs.iter().zip(&inputs).filter_map(of_requests).collect();
        // Nobody knows the dims of an output without any.
        let of_output = |info: &TensorInfo| match info.dims.is_empty() {
            true => Some(Some(0)),
            false => {
                // The output of a state has its batch where the input has it, whatever the model says.
                let pair = written.pairs.iter().find(|pair| pair.output == info.name);
                let state = pair.and_then(|pair| signature.inputs.iter().find(|info| info.name == pair.input));
                let axis = batch_axis(state.unwrap_or(info), symbol, state.is_some());
                axis.or_else(|| unnamed_axis(info, &request_axes).filter(|_| state.is_none())).map(Some)
            }
        };
        let outputs = signature.outputs.iter().map(of_output).collect::<Option<Vec<_>>>()?;
        (!request_axes.is_empty()).then_some(Self { inputs, outputs })
    }

    /// Whether the tensors that the configuration lists leave the batch out.
    fn fit_listed(&self, config: &Map<String, Value>, signature: &Signature) -> bool {
        let leaves_out = |list: &str, infos: &[TensorInfo], axes: &[Option<usize>]| {
            let listed = config.get(list).and_then(Value::as_array).cloned().unwrap_or_default();
            listed.iter().all(|tensor| {
                let shape = tensor.pointer("/reshape/shape").or(tensor.get("dims")).and_then(Value::as_array);
                let index = infos.iter().position(|info| tensor["name"] == info.name.as_str());
                index.zip(shape).is_none_or(|(index, shape)| match axes[index] {
                    Some(0) => shape.len() < infos[index].dims.len() || infos[index].dims.is_empty(),
                    _ => true,
                })
            })
        };
        leaves_out("input", &signature.inputs, &self.inputs) && leaves_out("output", &signature.outputs, &self.outputs)
    }
}

/// The name of the batch dimension: that of the first dimension of what requests carry.
fn batch_symbol<'a>(signature: &'a Signature, written: &Written) -> Option<&'a str> {
    let of_requests = signature.inputs.iter().filter(|info| written.is_of_requests(info));
    let mut first = of_requests.filter(|info| info.dims.first().is_some_and(|&dim| dim < 0));
    match signature.batch_symbol(|info| written.is_state(info)) {
        Some(symbol) => Some(symbol),
        None => first.find_map(|info| Some(info.symbols[0].as_str()).filter(|symbol| !symbol.is_empty())),
    }
}

/// The batch axis of a tensor; `None` if it has none that can be told.
fn batch_axis(info: &TensorInfo, symbol: Option<&str>, is_state: bool) -> Option<usize> {
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    let named: Vec<usize> = open.iter().copied().filter(|&axis| symbol == Some(info.symbols[axis].as_str())).collect();
    match (named.as_slice(), open.as_slice()) {
        (&[axis], _) => Some(axis),
        // A state has its batch anywhere; with a name of its own a dimension is another.
        (&[], &[axis]) if is_state && (symbol.is_none() || info.symbols[axis].is_empty()) => Some(axis),
        (&[], &[0, ..]) if !is_state && info.symbols[0].is_empty() => Some(0),
        _ => None,
    }
}

/// The batch axis of an output for whose dims the exporter has made names up: its only open dimension, or the first
/// where all inputs of requests have the batch there.
fn unnamed_axis(info: &TensorInfo, request_axes: &[usize]) -> Option<usize> {
    let open: Vec<usize> = (0..info.dims.len()).filter(|&axis| info.dims[axis] < 0).collect();
    match *open.as_slice() {
        [axis] => Some(axis),
        [0, ..] if request_axes.iter().all(|&axis| axis == 0) => Some(0),
        _ => None,
    }
}

/// An entry of `input` or `output`. `axis` is the batch axis in a model that has one.
fn tensor(info: &TensorInfo, dims: &[i64], axis: Option<Option<usize>>) -> Value {
    let mut dims = dims.to_vec();
    match axis {
        Some(Some(0)) if !dims.is_empty() => drop(dims.remove(0)),
        Some(Some(0)) => dims.push(-1),
        _ => {}
    }
    let mut tensor = json!({ "name": info.name, "data_type": info.data_type.to_string(), "dims": dims });
    if dims.is_empty() {
        // Triton has no tensors without dims.
        tensor["dims"] = json!([1]);
        tensor["reshape"] = json!({ "shape": [] });
    }
    tensor
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DataType;

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

    fn completed(config: Value, signature: &Signature, pairs: &[(&str, &str)], taken: &[&str]) -> Option<Value> {
        let pair = |&(input, output): &(&str, &str)| StatePair { input: input.to_owned(), output: output.to_owned() };
        let pairs: Vec<_> = pairs.iter().map(pair).collect();
        let written = Written { pairs: &pairs, taken, contexts: &[], default_max_batch_size: 4, mixes_rows: false };
        let json = complete(config.to_string().as_bytes(), signature, &written).unwrap();
        json.map(|json| serde_json::from_slice(&json).unwrap())
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
        let config = completed(json!({ "name": "m" }), &silero, &[("state", "stateN")], &["sr"]).unwrap();
        assert_eq!(config["max_batch_size"], 64);
        assert_eq!(dims(&config, "input"), [("input".to_owned(), json!([-1]))]);
        assert_eq!(dims(&config, "output"), [("output".to_owned(), json!([1]))]);
        assert_eq!(config["sequence_batching"]["max_sequence_idle_microseconds"], 60_000_000);
        assert_eq!(config["sequence_batching"]["oldest"]["max_candidate_sequences"], 1024);
    }

    #[test]
    fn a_model_that_mixes_rows_gets_batches_of_one() {
        let model = signature(&[("x", &["N", "T"]), ("s", &["N", "4"])], &[("y", &["N", "T"]), ("s2", &["N", "4"])]);
        let pairs = [StatePair { input: "s".to_owned(), output: "s2".to_owned() }];
        let filled = |config: Value| {
            let written =
                Written { pairs: &pairs, taken: &[], contexts: &[], default_max_batch_size: 4, mixes_rows: true };
            let completed = complete(config.to_string().as_bytes(), &model, &written).unwrap().unwrap();
            serde_json::from_slice::<Value>(&completed).unwrap()
        };
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
        let dims = |model: &[&str], axis| {
            let contexts = [Context { input: "x".to_owned(), length: 64, axis }];
            let model = signature(&[("x", model), ("s", &["N", "4"])], &[("y", &["N", "3"]), ("s2", &["N", "4"])]);
            let pairs = [StatePair { input: "s".to_owned(), output: "s2".to_owned() }];
            let written = Written {
                pairs: &pairs,
                taken: &[],
                contexts: &contexts,
                default_max_batch_size: 4,
                mixes_rows: false,
            };
            let config = complete(b"{}", &model, &written)?.unwrap();
            Ok::<_, CompletionError>(super::tests::dims(&serde_json::from_slice(&config).unwrap(), "input").remove(0).1)
        };
        assert_eq!(dims(&["N", "576"], None).unwrap(), json!([512]));
        assert_eq!(dims(&["N", "T"], None).unwrap(), json!([-1]));
        assert_eq!(dims(&["N", "80", "70"], Some(2)).unwrap(), json!([80, 6]));
        assert_eq!(dims(&["N", "60", "70"], None).unwrap(), json!([60, 6]));
        for (model, words) in [
            (["N", "80", "70"], ["'x=64'", "[-1, 80, 70]", "'x=64@1'", "'x=64@2'"]),
            (["N", "T", "80"], ["'x=64'", "[-1, -1, 80]", "'x=64@1'", "'x=64@2'"]),
            (["N", "60", "64"], ["'x=64'", "[-1, 60, 64]", "no dimension", "longer than 64"]),
        ] {
            let error = dims(&model, None).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
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
        let pairs = [StatePair { input: "s".to_owned(), output: "s2".to_owned() }];
        let written =
            Written { pairs: &pairs, taken: &[], contexts: &[], default_max_batch_size: 4, mixes_rows: false };
        let error = complete(br#"{ "max_batch_size": 8 }"#, &model, &written).unwrap_err().to_string();
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
        // Dims with the batch say that there is to be none.
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
    fn a_scalar_without_a_batch_is_a_constant_or_left_out() {
        let model = |y: &'static [&'static str]| {
            let inputs: Specs = &[("x", &["1", "80"]), ("sr", &[]), ("s", &["1", "4"])];
            signature(inputs, &[("y", y), ("loss", &[]), ("s2", &["1", "4"])])
        };
        let pairs = [StatePair { input: "s".to_owned(), output: "s2".to_owned() }];
        let filled = |model: &Signature, taken: &[&str]| {
            complete(
                b"{}",
                model,
                &Written { pairs: &pairs, taken, contexts: &[], default_max_batch_size: 4, mixes_rows: false },
            )
        };
        let error = filled(&model(&["1", "3"]), &[]).unwrap_err().to_string();
        assert!(error.contains("'sr'") && error.contains("constant_inputs"), "{error}");
        let config = completed(json!({}), &model(&["1", "3"]), &S, &["sr"]).unwrap();
        assert_eq!(dims(&config, "output"), [("y".to_owned(), json!([1, 3]))]);
        let error = filled(&model(&[]), &["sr"]).unwrap_err().to_string();
        assert!(error.contains("'y'") && error.contains("scalar"), "{error}");
    }
}
