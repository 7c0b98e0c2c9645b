//! What must be known before the ONNX model is open: a first reading of a configuration that may not be complete.

use super::controls::controls;
use super::error::ConfigError;
use super::inputs::{Context, Ragged, contexts};
use super::parameters::{self, Parameters};
use super::placement::{Place, instances};
use super::providers::Providers;
use super::raw;
use super::resolved::model_file;
use super::session_options::SessionOptions;
use super::states::{States, WrittenPairs};
use crate::memory::device::simulated_devices;

/// The part of a configuration that finds and opens the model, and finds its states.
#[derive(Clone, Debug)]
pub struct Opening {
    /// File name and the field that gave it; `None` to look for one.
    pub model_file: Option<(&'static str, String)>,
    /// How ONNX Runtime is to run it.
    pub session: SessionOptions,
    /// How ONNX Runtime is to run it on a GPU.
    pub providers: Providers,
    /// Where it is to run, in the order of the places.
    pub places: Vec<Place>,
    /// What is said about states.
    pub states: States,
    /// Inputs that are listed for requests.
    pub inputs: Vec<String>,
    /// Outputs that are listed for responses.
    pub outputs: Vec<String>,
    /// What is put in front of requests' inputs.
    pub contexts: Vec<Context>,
    /// Inputs that requests do not carry although they are no states: controls, constants, lengths.
    pub taken: Vec<String>,
    /// `sequence_batching` is there.
    pub has_sequences: bool,
}

impl Opening {
    /// Reads the JSON that `TRITONBACKEND_ModelConfig` gives (config version 1), complete or not.
    pub fn from_json(json: &[u8]) -> Result<Self, ConfigError> {
        let raw: raw::ModelConfig = serde_json::from_slice(json)?;
        let parameters = Parameters::new(raw.parameters)?;
        let has_sequences = raw.sequence_batching.is_some();
        let batching = raw.sequence_batching.unwrap_or_default();
        let controls = controls(&batching.control_input)?.into_iter().map(|control| control.name);
        let constants = parameters.text("constant_inputs").map(parameters::constant_inputs).transpose()?;
        let constants = constants.unwrap_or_default().into_iter().map(|(name, _)| name);
        let lengths = Ragged::new(&parameters)?.inputs.into_iter().map(|padded| padded.lengths);
        let places: Vec<_> = instances(&raw.instance_group)?.into_keys().collect();
        let on_gpu = places.iter().any(|&place| place != Place::Cpu) && simulated_devices() == 0;
        Ok(Self {
            providers: Providers::new(&parameters, &raw.optimization.execution_accelerators, on_gpu)?,
            places,
            model_file: model_file(&parameters, raw.default_model_filename),
            session: SessionOptions::new(&parameters, &raw.optimization)?,
            states: States::new(&parameters, batching.state)?,
            inputs: raw.input.into_iter().map(|tensor| tensor.name).collect(),
            outputs: raw.output.into_iter().map(|tensor| tensor.name).collect(),
            contexts: contexts(&parameters)?,
            taken: controls.chain(constants).chain(lengths).collect(),
            has_sequences,
        })
    }

    /// Whether a model without states is to be served: the configuration asks for sequences, and not for states.
    pub fn allows_no_states(&self) -> bool {
        self.has_sequences && self.states.pairs == WrittenPairs::Absent && self.states.patterns.is_empty()
    }

    /// Whether the states are to be found by their names even where nothing else is completed.
    pub fn wants_pairs_by_name(&self) -> bool {
        self.states.pairs == WrittenPairs::Auto
    }
}
