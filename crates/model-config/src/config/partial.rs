//! A configuration as the user wrote it, before completion.
//!
//! This is the only place where Triton's JSON is parsed. The parsed value says all that must be known before the ONNX
//! model is open. What completion finds is added to the parsed value and to the JSON for Triton at once
//! ([`PartialConfig::add`]), so that the two never differ. Then the parsed value becomes a part of the
//! [`Config`](super::Config) ([`PartialConfig::resolve`]).

use std::collections::BTreeMap;

use rows::tensor::DataType;
use sequences::scheduler::IdleRule;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use state_store::Location;

use super::generated::{GeneratedInput, generated_inputs};
use super::model::{Conversion, Join, model_file};
use super::parameters::Parameters;
use super::placement::{InstanceKind, instances};
use super::providers::{Providers, SessionOptions};
use super::raw::{self, Result, unsigned};
use super::scheduling::check_core;
use super::states::{StatePairs, States};
use super::steps::{Context, INPUT_WINDOWS, Ragged, Repeat, Windows, contexts};
use super::tensors::{
    CONTROL_INPUT, Control, ID_TENSOR, StateApiTensors, TakesIds, TensorConfig, add_tensors, constant_inputs, controls,
    is_state_tensor, take_tensor, tensors,
};

const MAX_ROWS_PER_RUN: &str = "max_rows_per_run";

#[derive(Clone, Debug)]
pub struct PartialConfig {
    pub model: String,
    /// Most requests of a payload; 0 if it is not written, or if Triton puts no batch dimension in front of tensors.
    pub max_batch_size: usize,
    /// File name and the field that gave it; `None` to look for one.
    pub model_file: Option<(&'static str, String)>,
    pub session: SessionOptions,
    pub providers: Providers,
    pub instances: BTreeMap<InstanceKind, usize>,
    pub join: Option<Join>,
    pub conversion: Conversion,
    pub states: States,
    pub inputs: Vec<TensorConfig>,
    pub outputs: Vec<TensorConfig>,
    /// The tensors for ids and controls, which are not among the inputs and outputs.
    pub takes_ids: TakesIds,
    /// The tensors of the State API, which are not among the inputs and outputs; `None` if it is not allowed.
    pub state_api: Option<StateApiTensors>,
    /// Inputs that are given with START and kept for the sequence.
    pub held_inputs: Vec<String>,
    /// Inputs that get the end of the previous request's input in front.
    pub contexts: Vec<Context>,
    pub windows: Windows,
    pub repeat: Repeat,
    /// Inputs that are filled from a request's flags and sequence id.
    pub controls: Vec<Control>,
    /// Inputs with a fixed value: their name, and their elements as written.
    pub constants: Vec<(String, Vec<String>)>,
    /// Inputs that this backend fills, so that no request carries them.
    pub generated: Vec<GeneratedInput>,
    pub ragged: Ragged,
    /// Each step of a request has an answer of its own (`model_transaction_policy { decoupled: true }`).
    pub is_decoupled: bool,
    /// An `instance_group` has `rate_limiter.resources`, so an idle instance may have requests in core.
    pub waits_for_resources: bool,
    /// `dynamic_batching` is written without `preserve_ordering`.
    pub batches_unordered: bool,
    /// Whether the configuration says how requests are scheduled, so that `sequence_batching` is not filled in.
    pub has_scheduling: bool,
    /// `sequence_cleaner_poll_wait_minutes` of the server's command line.
    pub scans_of_server: Option<IdleRule>,
    /// `state-store` of the server's command line.
    pub store_of_server: Option<Location>,
    /// Triton's JSON, with the fields that this backend does not read, and with what was added.
    pub document: Value,
    pub(super) is_own: bool,
    pub(super) parameters: Parameters,
    pub(super) sequence_batching: Option<raw::SequenceBatching>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Additions {
    pub max_batch_size: Option<usize>,
    pub max_rows_per_run: Option<usize>,
    pub inputs: Vec<TensorConfig>,
    pub outputs: Vec<TensorConfig>,
    pub oldest: bool,
}

impl PartialConfig {
    /// Reads the JSON that `TRITONBACKEND_ModelConfig` gives (config version 1), complete or not.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        Self::new(serde_json::from_slice(json)?)
    }

    pub fn new(document: Map<String, Value>) -> Result<Self> {
        let document = Value::Object(document);
        let raw = raw::ModelConfig::deserialize(&document)?;
        // Checked before `raw` is taken apart, but only an error if this backend schedules.
        let fit_for_own = check_core(&raw);
        let parameters = Parameters::new(raw.parameters)?;
        let batching = raw.sequence_batching.clone().unwrap_or_default();
        let controls = controls(&batching.control_input)?;
        let instances = instances(&raw.instance_group)?;
        // Simulated devices, which only test builds have, come later: they take instances of KIND_CPU.
        let on_gpu = instances.keys().any(|kind| *kind != InstanceKind::Cpu);
        // With 'oldest', completion adds a `sequence_batching`, so that core schedules.
        let is_own = parameters.choice("scheduling", &[("own", true), ("oldest", false)])?.unwrap_or(true);
        let is_own = is_own && raw.sequence_batching.is_none() && raw.ensemble_scheduling.is_none();
        if is_own {
            fit_for_own?;
        }
        let model_file = model_file(&parameters, raw.default_model_filename);
        let states = States::new(&parameters, &batching.state)?;
        let join = Join::new(&parameters, model_file.as_ref(), &states)?;
        Ok(Self {
            is_own,
            scans_of_server: None,
            store_of_server: None,
            takes_ids: TakesIds::default(),
            state_api: parameters.flag("state_api", false)?.then(StateApiTensors::default),
            held_inputs: parameters.names("held_inputs"),
            providers: Providers::new(&parameters, &raw.optimization.execution_accelerators, on_gpu)?,
            instances,
            model_file,
            session: SessionOptions::new(&parameters, &raw.optimization)?,
            join,
            conversion: Conversion::new(&parameters)?,
            states,
            contexts: contexts(&parameters)?,
            windows: Windows::new(&parameters)?,
            repeat: Repeat::new(&parameters)?,
            max_batch_size: unsigned("max_batch_size", raw.max_batch_size)?,
            inputs: tensors("input", raw.input)?,
            outputs: tensors("output", raw.output)?,
            model: raw.name,
            controls,
            constants: constant_inputs(&parameters)?,
            generated: generated_inputs(&parameters)?,
            ragged: Ragged::new(&parameters)?,
            is_decoupled: raw.model_transaction_policy.decoupled,
            waits_for_resources: raw.instance_group.iter().any(|group| !group.rate_limiter.resources.is_empty()),
            batches_unordered: raw.dynamic_batching.as_ref().is_some_and(|batching| !batching.preserve_ordering),
            has_scheduling: raw.sequence_batching.is_some()
                || raw.dynamic_batching.is_some()
                || raw.ensemble_scheduling.is_some()
                || is_own,
            sequence_batching: raw.sequence_batching,
            parameters,
            document,
        })
    }

    pub fn gathers_steps(&self) -> bool {
        (self.windows.are_cut() || self.repeat.is_any()) && !self.is_decoupled
    }

    /// Inputs that requests do not carry although they are no states: controls, constants, generated inputs, lengths.
    pub fn taken(&self) -> Vec<&str> {
        let controls = self.controls.iter().map(|control| control.name.as_str());
        let constants = self.constants.iter().map(|(name, _)| name.as_str());
        let lengths = self.ragged.inputs.iter().map(|padded| padded.lengths.as_str());
        let generated = self.generated.iter().map(|generated| generated.input.as_str());
        controls.chain(constants).chain(generated).chain(lengths).collect()
    }

    pub fn context_of(&self, input: &str) -> Option<&Context> {
        self.contexts.iter().find(|context| context.input == input)
    }

    /// Whether a parameter of assignments, such as `input_context`, has one for this input.
    pub fn gives(&self, parameter: &str, input: &str) -> bool {
        match parameter {
            "constant_inputs" => self.constants.iter().any(|(name, _)| name == input),
            "generated_inputs" => self.generated.iter().any(|generated| generated.input == input),
            "initial_states" => self.states.initial.iter().any(|(name, _)| name == input),
            "input_context" => self.context_of(input).is_some(),
            INPUT_WINDOWS => self.windows.of(input).is_some(),
            "state_dims" => self.states.written_dims(input).is_some() || self.states.is_declared(input),
            "padded_inputs" => self.ragged.inputs.iter().any(|padded| padded.input == input),
            _ => false,
        }
    }

    /// Whether the configuration asks for sequences and not for states, so that a model without states is served.
    pub fn allows_no_states(&self) -> bool {
        let asks_for_states = self.states.pairs != StatePairs::Absent || !self.states.patterns.is_empty();
        self.sequence_batching.is_some() && !asks_for_states
    }

    /// Takes the tensors for ids and controls out of `inputs` and `outputs`. If `completes`, adds the inputs that are
    /// not listed to the document, and returns whether it added any. If the model has a tensor of such a name, it is
    /// the model's.
    pub fn take_id_tensors(&mut self, model_inputs: &[&str], model_outputs: &[&str], completes: bool) -> Result<bool> {
        if !self.is_own {
            return Ok(false);
        }
        let tensor =
            |name: &str, data_type| TensorConfig { name: name.to_owned(), data_type, dims: vec![1], optional: true };
        let id = tensor(ID_TENSOR, DataType::Uint64);
        let control = tensor(CONTROL_INPUT, DataType::Uint32);
        self.takes_ids = TakesIds {
            id: take_tensor("input", &mut self.inputs, model_inputs, &id)?,
            control: take_tensor("input", &mut self.inputs, model_inputs, &control)?,
            output: take_tensor("output", &mut self.outputs, model_outputs, &id)?,
        };
        let mut changed = false;
        let Self { takes_ids, document, .. } = self;
        for (is_listed, tensor) in [(&mut takes_ids.id, id), (&mut takes_ids.control, control)] {
            // Triton refuses a request with an input that its configuration does not list.
            if completes && !*is_listed && !model_inputs.contains(&tensor.name.as_str()) {
                add_tensors(&mut document["input"], &[tensor]);
                (*is_listed, changed) = (true, true);
            }
        }
        Ok(changed)
    }

    /// Takes the tensors of the State API out of `inputs` and `outputs`, unless the model has a tensor of that name.
    pub fn take_state_tensors(&mut self, model_inputs: &[&str], model_outputs: &[&str]) {
        let Self { state_api: Some(StateApiTensors { inputs, outputs }), .. } = self else { return };
        let take = |tensors: &mut Vec<TensorConfig>, of_model: &[&str]| {
            let is_of_api =
                |tensor: &mut TensorConfig| is_state_tensor(&tensor.name) && !of_model.contains(&tensor.name.as_str());
            tensors.extract_if(.., is_of_api).collect()
        };
        (*inputs, *outputs) = (take(&mut self.inputs, model_inputs), take(&mut self.outputs, model_outputs));
    }

    /// Adds tensors of the State API to the document, and makes the inputs optional that a request may leave out: all
    /// if there are such tensors, else those that sequences keep. Returns whether it changed anything.
    pub fn complete_state_api(&mut self, inputs: &[TensorConfig], outputs: &[TensorConfig]) -> bool {
        let before = self.document.clone();
        add_tensors(&mut self.document["input"], inputs);
        add_tensors(&mut self.document["output"], outputs);
        let Value::Array(listed) = &mut self.document["input"] else { return self.document != before };
        for tensor in listed {
            let is_held = self.held_inputs.iter().any(|name| tensor["name"] == **name);
            // A call that only reads or sets a state runs nothing, and a held input comes only with START.
            if self.state_api.is_some() || is_held {
                tensor["optional"] = json!(true);
            }
        }
        self.document != before
    }

    /// Whether `sequence_batching` is there with `oldest`, and without `max_candidate_sequences`.
    pub fn leaves_candidates_out(&self) -> bool {
        let oldest = self.sequence_batching.as_ref().and_then(|batching| batching.oldest.as_ref());
        oldest.is_some_and(|oldest| oldest.max_candidate_sequences.0 == 0)
    }

    pub fn is_direct(&self) -> bool {
        self.sequence_batching.as_ref().is_some_and(|batching| batching.oldest.is_none())
    }

    pub fn has_rows_per_run(&self) -> bool {
        self.parameters.text(MAX_ROWS_PER_RUN).is_some()
    }

    /// Adds what completion has found, to the value and to the document.
    pub fn add(&mut self, additions: &Additions) {
        let Additions { max_batch_size, max_rows_per_run, inputs, outputs, oldest } = additions;
        if let Some(size) = *max_batch_size {
            self.max_batch_size = size;
            self.document["max_batch_size"] = json!(size);
        }
        if let Some(rows) = max_rows_per_run {
            // Triton takes no parameters from a backend, so only stateful-inspect shows this one from the document.
            self.parameters.set(MAX_ROWS_PER_RUN, rows.to_string());
            self.document["parameters"][MAX_ROWS_PER_RUN] = json!({ "string_value": rows.to_string() });
        }
        if !inputs.is_empty() {
            self.inputs.clone_from(inputs);
            add_tensors(&mut self.document["input"], inputs);
            if self.max_batch_size > 0 {
                self.let_windows_share_batches();
            }
        }
        if !outputs.is_empty() {
            self.outputs.clone_from(outputs);
            add_tensors(&mut self.document["output"], outputs);
        }
        if *oldest {
            self.is_own = false;
            // Triton's own idle limit is a second. A client that records speech and sends nothing in silence needs
            // more.
            let (idle_us_max, candidates_max) = (60_000_000, 1024);
            let batching = json!({
                "max_sequence_idle_microseconds": idle_us_max,
                "oldest": { "max_candidate_sequences": candidates_max },
            });
            self.sequence_batching = raw::SequenceBatching::deserialize(&batching).ok();
            self.document["sequence_batching"] = batching;
        }
    }

    fn let_windows_share_batches(&mut self) {
        // Core keeps requests of different lengths apart otherwise, but all windows have one length.
        let inputs = self.document["input"].as_array_mut().into_iter().flatten();
        for input in inputs.filter(|input| input["name"].as_str().is_some_and(|name| self.windows.of(name).is_some())) {
            input["allow_ragged_batch"] = json!(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_reads_back_from_the_document_as_what_is_used() {
        let written = json!({
            "name": "m",
            "backend": "stateful",
            "version_policy": { "latest": { "num_versions": 1 } },
            "parameters": { "constant_inputs": { "string_value": "sr=16000" } },
        });
        let mut config = PartialConfig::from_json(written.to_string().as_bytes()).unwrap();
        let tensor = |name: &str, data_type, dims: &[i64]| TensorConfig {
            name: name.to_owned(),
            data_type,
            dims: dims.to_vec(),
            optional: false,
        };
        config.add(&Additions {
            max_batch_size: Some(8),
            max_rows_per_run: Some(1),
            inputs: vec![tensor("x", DataType::Fp32, &[-1, 4]), tensor("gain", DataType::Int64, &[])],
            outputs: vec![tensor("y", DataType::Bytes, &[2])],
            oldest: true,
        });
        let document = config.document.clone();
        for field in ["name", "backend", "version_policy"] {
            assert_eq!(document[field], written[field], "Triton's copy keeps it");
        }
        let read = PartialConfig::from_json(document.to_string().as_bytes()).unwrap();
        assert_eq!(read.document, document);
        let [used, read] = [config, read].map(|config| format!("{:#?}", config.resolve().unwrap()));
        assert_eq!(used, read);
        for part in ["max_batch_size: 8", "max_rows_per_run: 1", "candidates: 1024", "\"gain\"", "\"16000\""] {
            assert!(used.contains(part), "{part}: {used}");
        }
    }

    #[test]
    fn nothing_added_changes_nothing() {
        let written = json!({ "name": "m", "max_batch_size": 4, "sequence_batching": { "direct": {} } });
        let mut config = PartialConfig::from_json(written.to_string().as_bytes()).unwrap();
        config.add(&Additions::default());
        assert_eq!(config.document, written);
    }

    #[test]
    fn json_that_is_no_object_is_refused() {
        for json in ["", "[]", "7", "{", r#"{ "max_batch_size": {} }"#, r#"{ "parameters": 7 }"#] {
            let error = PartialConfig::from_json(json.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("the model configuration cannot be read: "), "{error}");
        }
    }
}
