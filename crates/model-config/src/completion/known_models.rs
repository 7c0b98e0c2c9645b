//! Models whose signatures are known, and the parameters that their users need.
//!
//! The table is `assets/known-models.json`. Nothing of it is filled in: a signature is no proof, and a wrong parameter
//! changes answers silently.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use crate::config::{PartialConfig, StateDims, parameter_line, state_dims_line, state_dims_text};
use crate::onnx::Signature;

const TABLE: &str = include_str!("../../../../assets/known-models.json");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KnownModel {
    model: String,
    /// The ranks of inputs that it has, among others.
    inputs: BTreeMap<String, usize>,
    #[serde(default)]
    without: Vec<String>,
    /// Outputs that it has, among others.
    outputs: Vec<String>,
    needs: Vec<Need>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Need {
    parameter: String,
    /// The input that it is for. The parameter isn't needed if the model hasn't this input.
    input: String,
    write: String,
    /// With one of these among the dims that the configuration lists for the input, clients know what to send.
    #[serde(default)]
    unless_dims: Vec<i64>,
    /// Without the parameter, the model is served, and its answers are wrong.
    #[serde(default)]
    is_wrong_without: bool,
    why: String,
}

/// What to tell the user of a model: a line for each parameter that the configuration lacks.
#[derive(Debug, Default)]
pub struct Advice {
    /// Without these parameters, answers are wrong.
    pub warnings: Vec<String>,
    /// Without these, clients have to do more.
    pub notes: Vec<String>,
}

impl Advice {
    pub fn new(config: &PartialConfig, signature: &Signature) -> Self {
        let mut advice = Self::default();
        for known in known(signature) {
            let fits = |need: &&Need| need.is_lacking(config, signature) && known.window_fits(need, config, signature);
            for need in known.needs.iter().filter(fits) {
                let lines = if need.is_wrong_without { &mut advice.warnings } else { &mut advice.notes };
                lines.push(need.line(&known.model, signature));
            }
        }
        advice
    }
}

/// The parameters that a model of this signature needs, with their values.
pub fn needed(signature: &Signature) -> Vec<(String, String)> {
    let needs = known(signature).into_iter().flat_map(|known| known.needs);
    let fitting = needs.filter(|need| signature.input(&need.input).is_some() && need.fits(signature));
    let written = |need: &Need| need.state_dims(signature).map_or_else(|| need.write.clone(), state_dims_text);
    fitting.map(|need| (need.parameter.clone(), written(&need))).collect()
}

/// The models of the table that may have this signature.
fn known(signature: &Signature) -> Vec<KnownModel> {
    // A unit test makes sure that the table can be read.
    let mut known: Vec<KnownModel> = serde_json::from_str(TABLE).unwrap_or_default();
    known.retain(|known| known.is(signature));
    known
}

impl KnownModel {
    fn is(&self, signature: &Signature) -> bool {
        let inputs = signature.input_names();
        let lacks_input = |name: &String| !inputs.contains(&name.as_str());
        has_tensors(signature, &self.inputs, &self.outputs) && self.without.iter().all(lacks_input)
    }

    /// Whether the model's dims leave room for the window and its context, if the parameter is `input_windows`. The context is
    /// the one that is written, or else the one that users of the model need.
    fn window_fits(&self, need: &Need, config: &PartialConfig, signature: &Signature) -> bool {
        let (Some(written), Some(info)) = (need.written(), signature.input(&need.input)) else { return false };
        let Some(window) = written.windows.of(&need.input) else { return true };
        let needed = self.needs.iter().filter_map(Need::written).flat_map(|written| written.contexts);
        let mut contexts = config.contexts.iter().cloned().chain(needed);
        let context = contexts.find(|context| context.input == need.input).map_or(0, |context| context.length);
        window.axis.and_then(|axis| info.dims.get(axis)).is_some_and(|&of_model| window.fits(of_model, context))
    }
}

impl Need {
    fn is_lacking(&self, config: &PartialConfig, signature: &Signature) -> bool {
        let input = &self.input;
        let has_input = signature.input_names().contains(&input.as_str());
        let listed = config.inputs.iter().find(|tensor| tensor.name == *input);
        let says_dims = listed.is_some_and(|tensor| tensor.dims.iter().any(|dim| self.unless_dims.contains(dim)));
        let is_given = match config.states.written_dims(input) {
            // A length that the model leaves open, and that the configuration leaves open, too, is still lacking.
            Some(given) if self.parameter == "state_dims" => self.state_dims(signature).is_none_or(|needed| {
                let lacks = |(&given, &needed): (&i64, &i64)| given < 0 && needed >= 0;
                !given.dims.iter().zip(&needed[0].dims).any(lacks)
            }),
            _ => config.gives(&self.parameter, input),
        };
        // A listed input is one that requests are to carry. The context and the padding of an input do not change that.
        let is_carried = listed.is_some() && self.takes_from_requests();
        has_input && !says_dims && !is_carried && !is_given && self.fits(signature)
    }

    /// Whether requests no longer carry the input once the parameter is written.
    fn takes_from_requests(&self) -> bool {
        ["constant_inputs", "generated_inputs"].contains(&self.parameter.as_str())
    }

    /// Whether the model's dims leave room for what is written: another export of the model may have fixed them.
    fn fits(&self, signature: &Signature) -> bool {
        let (Some(written), Some(info)) = (self.written(), signature.input(&self.input)) else { return false };
        if let Some(dims) = written.states.written_dims(&self.input) {
            return dims.dims.iter().zip(&info.dims).any(|(&written, &of_model)| written >= 0 && of_model < 0);
        }
        let contexts = written.contexts.iter().filter(|context| context.input == self.input);
        contexts
            .filter_map(|context| info.dims.get(context.axis?).map(|&of_model| context.sent(of_model)))
            .all(|sent| sent.is_some())
    }

    /// The configuration that has only this parameter.
    fn written(&self) -> Option<PartialConfig> {
        let config = json!({ "parameters": { &self.parameter: { "string_value": &self.write } } });
        PartialConfig::from_json(config.to_string().as_bytes()).ok()
    }

    /// What `state_dims` needs, with the dims that the model fixes; `None` for other parameters.
    fn state_dims(&self, signature: &Signature) -> Option<Vec<StateDims>> {
        let mut needed = self.written()?.states.dims;
        for state in &mut needed {
            let info = signature.input(&state.name)?;
            for (dim, &of_model) in state.dims.iter_mut().zip(&info.dims).filter(|(_, of_model)| **of_model >= 0) {
                *dim = of_model;
            }
        }
        Some(needed).filter(|needed| !needed.is_empty())
    }

    fn line(&self, model: &str, signature: &Signature) -> String {
        let line = match self.state_dims(signature) {
            Some(needed) => state_dims_line(needed),
            None => parameter_line(&self.parameter, &self.write),
        };
        let (input, why) = (&self.input, &self.why);
        let advice = if self.is_wrong_without {
            format!("'{input}' needs {line}")
        } else {
            format!("for '{input}' you can write {line}")
        };
        let more = if self.takes_from_requests() { " and take it out of 'input' if it is listed there" } else { "" };
        format!("the signature is that of {model}: {advice}{more}, because {why}")
    }
}

/// Whether a model has inputs of these names and ranks, and these outputs, among others.
pub(super) fn has_tensors(signature: &Signature, inputs: &BTreeMap<String, usize>, outputs: &[String]) -> bool {
    let has_input = |(name, rank): (&String, &usize)| signature.input(name).is_some_and(|of| of.dims.len() == *rank);
    inputs.iter().all(has_input) && outputs.iter().all(|name| signature.output(name).is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::onnx::TensorInfo;
    use rows::tensor::DataType;

    fn signature(inputs: &[(&str, usize)], outputs: &[&str]) -> Signature {
        let info = |name: &str, rank: usize| TensorInfo {
            name: name.to_owned(),
            data_type: DataType::Fp32,
            dims: vec![-1; rank],
            symbols: vec![String::new(); rank],
        };
        Signature {
            inputs: inputs.iter().map(|(name, rank)| info(name, *rank)).collect(),
            defaults: Vec::new(),
            outputs: outputs.iter().map(|name| info(name, 2)).collect(),
        }
    }

    fn advised(config: &Value, signature: &Signature) -> Vec<String> {
        let advice = Advice::new(&PartialConfig::from_json(config.to_string().as_bytes()).unwrap(), signature);
        [advice.warnings, advice.notes].concat()
    }

    #[test]
    fn the_table_can_be_read_and_its_parameters_too() {
        let known: Vec<KnownModel> = serde_json::from_str(TABLE).unwrap();
        for KnownModel { model, inputs, outputs, needs, .. } in known {
            assert!(!inputs.is_empty() && !outputs.is_empty() && !needs.is_empty(), "{model}");
            for Need { parameter, input, write, why, .. } in needs {
                let config = json!({ "parameters": { &parameter: { "string_value": &write } } });
                let read = PartialConfig::from_json(config.to_string().as_bytes());
                assert!(read.is_ok(), "{model}: {}", read.unwrap_err());
                assert!(write.starts_with(&format!("{input}=")) && !why.ends_with('.'), "{model}: {write}");
                assert!(read.unwrap().gives(&parameter, &input), "{model}: {parameter} {write}");
            }
        }
    }

    #[test]
    fn silero_needs_its_context_and_its_rate() {
        let silero = signature(&[("input", 2), ("state", 3), ("sr", 0)], &["output", "stateN"]);
        let parameter = |name: &str, value: &str| json!({ "parameters": { name: { "string_value": value } } });
        let of = |config: &Value| {
            let lines = advised(config, &silero);
            ["'input=64+512@1'", "'sr=16000'"].map(|word| lines.iter().any(|line| line.contains(word)))
        };
        assert_eq!(of(&json!({})), [true, true]);
        let rate = advised(&parameter("input_context", "input=64+512@1"), &silero);
        assert!(rate[0].contains("'sr=16000' } } and take it out of 'input' if it is listed there"), "{rate:?}");
        assert_eq!(of(&parameter("input_context", "input=32")), [false, true]);
        assert_eq!(of(&parameter("constant_inputs", "sr=8000")), [true, false]);
        assert_eq!(of(&parameter("constant_inputs", "sr = 8000")), [true, false], "spaces don't matter");
        let input = |name: &str, dims: &[i64]| json!({ "name": name, "data_type": "TYPE_FP32", "dims": dims });
        assert_eq!(of(&json!({ "input": [input("input", &[576]), input("sr", &[1])] })), [false, false]);
        assert_eq!(of(&json!({ "input": [input("input", &[512])] })), [true, true]);
        let without_rate = signature(&[("input", 2), ("state", 3)], &["output", "stateN"]);
        assert_eq!(advised(&json!({}), &without_rate).len(), 2);
    }

    #[test]
    fn windows_are_proposed_where_they_fit_behind_the_context() {
        let mut silero = signature(&[("input", 2), ("state", 3)], &["output", "stateN"]);
        let context = |of: &str| json!({ "parameters": { "input_context": { "string_value": of } } });
        for (dims, config, is_proposed) in [
            ([-1, -1], json!({}), true),
            ([1, 576], json!({}), true),
            ([1, 576], context("input=64@1"), true),
            ([1, 576], context("input=32@1"), false),
            ([1, 512], json!({}), false),
        ] {
            silero.inputs[0].dims = dims.to_vec();
            let lines = advised(&config, &silero);
            assert_eq!(lines.iter().any(|line| line.contains("'input=512@1'")), is_proposed, "{dims:?} {lines:?}");
        }
    }

    #[test]
    fn nothing_is_needed_where_the_model_fixes_another_length() {
        let mut silero = signature(&[("input", 2), ("state", 3)], &["output", "stateN"]);
        for (dims, is_needed) in [([-1, -1], true), ([1, 576], true), ([-1, 80], false)] {
            silero.inputs[0].dims = dims.to_vec();
            assert_eq!(!advised(&json!({}), &silero).is_empty(), is_needed, "{dims:?}");
        }
        let inputs = [("audio_signal", 3), ("length", 1), ("cache_last_channel", 4), ("cache_last_time", 4)];
        let inputs = [&inputs[..], &[("cache_last_channel_len", 1)]].concat();
        let mut nemo = signature(&inputs, &["cache_last_channel_next", "cache_last_time_next"]);
        for (dims, is_needed) in [([-1, 17, -1, 512], true), ([-1, 18, 56, 640], false)] {
            nemo.inputs[2].dims = dims.to_vec();
            let lines = advised(&json!({}), &nemo);
            assert_eq!(lines.iter().any(|line| line.contains("'state_dims'")), is_needed, "{dims:?}");
        }
        nemo.inputs[2].dims = vec![-1, 17, -1, 640];
        for (given, is_needed) in [("[batch, 17, 56, 640]", false), ("[batch, 17, -1, 640]", true)] {
            let given = format!("cache_last_channel={given}");
            let config = json!({ "parameters": { "state_dims": { "string_value": given } } });
            let said = "cache_last_channel=[batch, 17, 70, 640]";
            assert_eq!(advised(&config, &nemo).iter().any(|line| line.contains(said)), is_needed, "{given}");
        }
    }

    #[test]
    fn other_signatures_are_not_known() {
        for model in [
            signature(&[("input", 3), ("state", 3), ("sr", 0)], &["output", "stateN"]),
            signature(&[("input", 2), ("state", 3)], &["output", "new_state"]),
        ] {
            assert!(advised(&json!({}), &model).is_empty());
        }
    }
}
