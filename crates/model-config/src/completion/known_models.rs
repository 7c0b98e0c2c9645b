//! Models whose signatures are known, with the parameters that their users need, and families of graphs that run one
//! after the other, with how `stateful-convert join` makes one model of them.
//!
//! The tables are `assets/known-models.json` and `assets/known-families.json`. Nothing of them is filled in: a
//! signature is no proof, and a wrong parameter changes answers silently.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use crate::config::{PartialConfig, StateDims, parameter_line, state_dims_line, state_dims_text};
use crate::onnx::Signature;

const MODELS: &str = include_str!("../../../../assets/known-models.json");

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
fn needed(signature: &Signature) -> Vec<(String, String)> {
    let needs = known(signature).into_iter().flat_map(|known| known.needs);
    let fitting = needs.filter(|need| signature.input(&need.input).is_some() && need.fits(signature));
    let written = |need: &Need| need.state_dims(signature).map_or_else(|| need.write.clone(), state_dims_text);
    fitting.map(|need| (need.parameter.clone(), written(&need))).collect()
}

/// The models of the table that may have this signature.
fn known(signature: &Signature) -> Vec<KnownModel> {
    // A unit test makes sure that the table can be read.
    let mut known: Vec<KnownModel> = serde_json::from_str(MODELS).unwrap_or_default();
    known.retain(|known| known.is(signature));
    known
}

impl KnownModel {
    fn is(&self, signature: &Signature) -> bool {
        let inputs = signature.input_names();
        let lacks_input = |name: &String| !inputs.contains(&name.as_str());
        has_tensors(signature, &self.inputs, &self.outputs) && self.without.iter().all(lacks_input)
    }

    /// Whether the model's dims leave room for the window and its context, if the parameter is `input_windows`. The
    /// context is the one that is written, or else the one that users of the model need.
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
fn has_tensors(signature: &Signature, inputs: &BTreeMap<String, usize>, outputs: &[String]) -> bool {
    let has_input = |(name, rank): (&String, &usize)| signature.input(name).is_some_and(|of| of.dims.len() == *rank);
    inputs.iter().all(has_input) && outputs.iter().all(|name| signature.output(name).is_some())
}

const FAMILIES: &str = include_str!("../../../../assets/known-families.json");

/// The files with the texts of tokens, as exporters name them.
const TOKEN_FILES: [&str; 2] = ["tokens.txt", "units.txt"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KnownFamily {
    family: String,
    graphs: Vec<KnownGraph>,
    /// Commands that are needed before. `{name}` stands for a graph's file.
    #[serde(default)]
    before: Vec<String>,
    /// The words of the list of graphs. Without any, `note` says what is missing.
    #[serde(default)]
    join: Vec<String>,
    #[serde(default)]
    wires: String,
    /// The graph whose names don't show its states: they are its last inputs and outputs, in this order.
    #[serde(default)]
    states_of: Option<String>,
    /// `{last}` stands for the last of the logits.
    #[serde(default)]
    search: String,
    #[serde(default)]
    logits: Option<KnownLogits>,
    #[serde(default)]
    compare_with: String,
    #[serde(default)]
    note: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KnownGraph {
    name: String,
    /// The ranks of inputs that it has, among others.
    inputs: BTreeMap<String, usize>,
    /// Outputs that it has, among others.
    outputs: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KnownLogits {
    graph: String,
    output: String,
}

/// Graphs of a folder that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    pub family: String,
    /// The commands, one after the other. The last one joins.
    pub commands: Vec<String>,
    /// The lines of config.pbtxt that join the graphs at load, and those that the graphs need. Without lines, the
    /// graphs have to be changed first.
    pub lines: Vec<String>,
    pub note: String,
}

impl Family {
    /// The first known family that has these graphs, by their signatures. `graphs` are the files of a folder with their
    /// signatures, and `others` its other files. Commands name the folder's files below `folder`.
    pub fn of(graphs: &[(String, Signature)], others: &[String], folder: &str) -> Option<Self> {
        // A unit test reads the table.
        let known: Vec<KnownFamily> = serde_json::from_str(FAMILIES).unwrap_or_default();
        known.iter().find_map(|known| known.found(graphs, others, folder))
    }
}

impl KnownFamily {
    fn found(&self, graphs: &[(String, Signature)], others: &[String], folder: &str) -> Option<Family> {
        let found: Vec<(&str, &(String, Signature))> =
            self.graphs.iter().map(|graph| Some((graph.name.as_str(), graph.file(graphs)?))).collect::<Option<_>>()?;
        let tokens = others.iter().find(|file| TOKEN_FILES.contains(&file.as_str()));
        // What is made before lies where the command runs.
        let at = |file: &str| format!("{}/{file}", folder.trim_end_matches('/'));
        let mut commands: Vec<String> = Vec::new();
        for before in &self.before {
            let files = |text: String, (name, (file, _)): &(&str, &(String, Signature))| {
                text.replace(&format!("{{{name}}}"), &at(file))
            };
            commands.push(format!("stateful-convert {}", found.iter().fold(before.clone(), files)));
        }
        let (family, note) = (self.family.clone(), self.note.clone());
        if self.join.is_empty() {
            return Some(Family { family, commands, lines: Vec::new(), note });
        }
        let words = |path: &dyn Fn(&str) -> String| -> String {
            let word = |word: &String| match found.iter().find(|(name, _)| *word == format!("{{{name}}}")) {
                None => word.clone(),
                // The list of graphs takes a file's name for its graph's, unless another one is written.
                Some((name, (file, _))) if file.strip_suffix(".onnx") == Some(*name) => path(file),
                Some((name, (file, _))) => format!("{name}={}", path(file)),
            };
            self.join.iter().map(word).collect::<Vec<_>>().join(" ")
        };
        let search = self.written_search(&found);
        let search_with = |tokens: Option<String>| match tokens {
            Some(path) if !search.is_empty() => format!("{search} tokens={path}"),
            _ => search.clone(),
        };
        let states = self.states(&found).unwrap_or_default();
        let needs = needs_of(&found);
        let mut command = format!("stateful-convert join {} -o models/NAME/1/model.onnx", words(&at));
        for (option, value) in [
            ("--wires", self.wires.as_str()),
            ("--states", &states),
            ("--dims", needs.get("state_dims").map_or("", String::as_str)),
            ("--search", &search_with(tokens.map(|file| at(file)))),
            ("--compare-with", &self.compare_with),
        ] {
            if !value.is_empty() {
                command += &format!(" {option} '{value}'");
            }
        }
        commands.push(command);
        let mut lines = Vec::new();
        if self.before.is_empty() {
            let (join, search) = (words(&str::to_owned), search_with(tokens.cloned()));
            let of_family = [("join", &join), ("wires", &self.wires), ("state_pairs", &states), ("search", &search)];
            let needs = needs.iter().map(|(name, value)| (name.as_str(), value));
            let written = of_family.into_iter().chain(needs).filter(|(_, value)| !value.is_empty());
            lines.extend(written.map(|(name, value)| parameter_line(name, value)));
        }
        Some(Family { family, commands, lines, note })
    }

    /// The search, with the number of the last token if that is the blank.
    fn written_search(&self, found: &[(&str, &(String, Signature))]) -> String {
        let last = self.logits.as_ref().and_then(|logits| {
            let (_, (_, signature)) = found.iter().find(|(name, _)| *name == logits.graph)?;
            let output = signature.outputs.iter().find(|output| output.name == logits.output)?;
            output.dims.last().filter(|&&count| count > 0).map(|count| (count - 1).to_string())
        });
        self.search.replace("{last}", &last.unwrap_or_else(|| "BLANK".to_owned()))
    }

    /// The pairs of a graph whose names don't show them: its inputs and outputs after the known ones, in their order.
    fn states(&self, found: &[(&str, &(String, Signature))]) -> Option<String> {
        let name = self.states_of.as_ref()?;
        let graph = self.graphs.iter().find(|graph| graph.name == *name)?;
        let (_, (_, signature)) = found.iter().find(|(found, _)| found == name)?;
        let inputs = signature.inputs.iter().filter(|info| !graph.inputs.contains_key(&info.name));
        let outputs = signature.outputs.iter().filter(|info| !graph.outputs.contains(&info.name));
        let pairs = inputs.zip(outputs);
        let pairs = pairs.map(|(input, output)| format!("<<<{name}.{}, {name}.{}>>>", input.name, output.name));
        Some(pairs.collect::<Vec<_>>().join(" "))
    }
}

impl KnownGraph {
    fn file<'a>(&self, graphs: &'a [(String, Signature)]) -> Option<&'a (String, Signature)> {
        let is = |(_, signature): &&(String, Signature)| has_tensors(signature, &self.inputs, &self.outputs);
        let mut fitting: Vec<_> = graphs.iter().filter(is).collect();
        // int8 graphs don't share runs, so others come first.
        fitting.sort_by_key(|(file, _)| (file.contains("int8"), file.as_str()));
        fitting.first().copied()
    }
}

/// The parameters that the graphs need, with the names of the joined model.
fn needs_of(found: &[(&str, &(String, Signature))]) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    for (name, (_, signature)) in found {
        for (parameter, value) in needed(signature) {
            let value = with_prefix(&value, name);
            all.entry(parameter).and_modify(|known| *known += &format!(" {value}")).or_insert(value);
        }
    }
    all
}

/// `name=value` entries with `graph.name`. Brackets and parentheses may have spaces in them.
fn with_prefix(text: &str, graph: &str) -> String {
    let (mut made, mut depth, mut is_first) = (String::new(), 0_usize, true);
    for letter in text.chars() {
        match letter {
            '[' | '(' => depth += 1,
            ']' | ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if is_first && !letter.is_whitespace() {
            made += &format!("{graph}.");
        }
        is_first = depth == 0 && letter.is_whitespace();
        made.push(letter);
    }
    made
}

#[cfg(test)]
mod tests {
    use rows::tensor::DataType;
    use serde_json::Value;

    use super::*;
    use crate::onnx::TensorInfo;

    fn signature(inputs: &[(&str, &[i64])], outputs: &[(&str, &[i64])]) -> Signature {
        let info = |(name, dims): &(&str, &[i64])| TensorInfo {
            name: (*name).to_owned(),
            data_type: DataType::Fp32,
            dims: dims.to_vec(),
            symbols: vec![String::new(); dims.len()],
        };
        Signature {
            inputs: inputs.iter().map(info).collect(),
            defaults: Vec::new(),
            outputs: outputs.iter().map(info).collect(),
        }
    }

    /// As [`signature`], with open dims.
    fn of_ranks(inputs: &[(&str, usize)], outputs: &[&str]) -> Signature {
        const OPEN: &[i64] = &[-1; 4];
        let inputs: Vec<_> = inputs.iter().map(|&(name, rank)| (name, &OPEN[..rank])).collect();
        let outputs: Vec<_> = outputs.iter().map(|&name| (name, &OPEN[..2])).collect();
        signature(&inputs, &outputs)
    }

    fn advised(config: &Value, signature: &Signature) -> Vec<String> {
        let advice = Advice::new(&PartialConfig::from_json(config.to_string().as_bytes()).unwrap(), signature);
        [advice.warnings, advice.notes].concat()
    }

    #[test]
    fn the_table_can_be_read_and_its_parameters_too() {
        let known: Vec<KnownModel> = serde_json::from_str(MODELS).unwrap();
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
        let silero = of_ranks(&[("input", 2), ("state", 3), ("sr", 0)], &["output", "stateN"]);
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
        let without_rate = of_ranks(&[("input", 2), ("state", 3)], &["output", "stateN"]);
        assert_eq!(advised(&json!({}), &without_rate).len(), 2);
    }

    #[test]
    fn windows_are_proposed_where_they_fit_behind_the_context() {
        let mut silero = of_ranks(&[("input", 2), ("state", 3)], &["output", "stateN"]);
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
        let mut silero = of_ranks(&[("input", 2), ("state", 3)], &["output", "stateN"]);
        for (dims, is_needed) in [([-1, -1], true), ([1, 576], true), ([-1, 80], false)] {
            silero.inputs[0].dims = dims.to_vec();
            assert_eq!(!advised(&json!({}), &silero).is_empty(), is_needed, "{dims:?}");
        }
        let inputs = [("audio_signal", 3), ("length", 1), ("cache_last_channel", 4), ("cache_last_time", 4)];
        let inputs = [&inputs[..], &[("cache_last_channel_len", 1)]].concat();
        let mut nemo = of_ranks(&inputs, &["cache_last_channel_next", "cache_last_time_next"]);
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
            of_ranks(&[("input", 3), ("state", 3), ("sr", 0)], &["output", "stateN"]),
            of_ranks(&[("input", 2), ("state", 3)], &["output", "new_state"]),
        ] {
            assert!(advised(&json!({}), &model).is_empty());
        }
    }

    fn files(graphs: Vec<(&str, Signature)>) -> Vec<(String, Signature)> {
        graphs.into_iter().map(|(name, signature)| (name.to_owned(), signature)).collect()
    }

    #[test]
    fn the_table_can_be_read() {
        let known: Vec<KnownFamily> = serde_json::from_str(FAMILIES).unwrap();
        for family in known {
            assert!(family.graphs.len() > 1 && family.join.is_empty() != family.note.is_empty(), "{}", family.family);
        }
    }

    #[test]
    fn graphs_of_icefall_are_known_by_their_signatures() {
        let encoder = signature(
            &[("x", &[-1, 45, 80]), ("embed_states", &[-1, 128, 3, 19]), ("processed_lens", &[-1])],
            &[("encoder_out", &[-1, 16, 512]), ("new_embed_states", &[-1, 128, 3, 19]), ("new_processed_lens", &[-1])],
        );
        let decoder = signature(&[("y", &[-1, 2])], &[("decoder_out", &[-1, 512])]);
        let joiner = signature(&[("encoder_out", &[-1, 512]), ("decoder_out", &[-1, 512])], &[("logit", &[-1, 500])]);
        let graphs = files(vec![
            ("decoder-epoch-99-avg-1.onnx", decoder),
            ("encoder-epoch-99-avg-1.int8.onnx", encoder.clone()),
            ("encoder-epoch-99-avg-1.onnx", encoder),
            ("joiner.onnx", joiner),
        ]);
        let family = Family::of(&graphs, &["tokens.txt".to_owned()], "asr/1/").unwrap();
        let command = "stateful-convert join encoder=asr/1/encoder-epoch-99-avg-1.onnx \
                       decoder=asr/1/decoder-epoch-99-avg-1.onnx asr/1/joiner.onnx -o models/NAME/1/model.onnx \
                       --search 'transducer blank=0 max_tokens=1 tokens=asr/1/tokens.txt'";
        assert_eq!(family.commands, [command]);
        let lines = [
            parameter_line(
                "join",
                "encoder=encoder-epoch-99-avg-1.onnx decoder=decoder-epoch-99-avg-1.onnx joiner.onnx",
            ),
            parameter_line("search", "transducer blank=0 max_tokens=1 tokens=tokens.txt"),
            parameter_line("input_context", "encoder.x=13@1:whole"),
            parameter_line("input_windows", "encoder.x=32@1:pad"),
        ];
        assert_eq!(family.lines, lines);
        assert_eq!(Family::of(&graphs[1..], &[], "."), None);
    }

    #[test]
    fn the_blank_is_the_last_of_the_logits_and_states_are_those_that_are_left() {
        let encoder = signature(&[("audio_signal", &[-1, 80, 121]), ("length", &[-1])], &[("outputs", &[-1, 512, 14])]);
        let decoder = signature(
            &[
                ("targets", &[-1, -1]),
                ("target_length", &[-1]),
                ("states.1", &[1, -1, 640]),
                ("onnx::LSTM_3", &[1, -1, 640]),
            ],
            &[
                ("outputs", &[-1, 640, -1]),
                ("prednet_lengths", &[-1]),
                ("states", &[1, -1, 640]),
                ("74", &[1, -1, 640]),
            ],
        );
        let joiner = signature(
            &[("encoder_outputs", &[-1, 512, -1]), ("decoder_outputs", &[-1, 640, -1])],
            &[("outputs", &[-1, -1, -1, 1025])],
        );
        let graphs = files(vec![("encoder.onnx", encoder), ("decoder.onnx", decoder), ("joiner.onnx", joiner)]);
        let family = Family::of(&graphs, &[], ".").unwrap();
        assert!(family.commands[0].contains("--search 'transducer blank=1024 max_tokens=10'"), "{:?}", family.commands);
        let states = "<<<decoder.states.1, decoder.states>>> <<<decoder.onnx::LSTM_3, decoder.74>>>";
        assert!(family.commands[0].contains(&format!("--states '{states}'")), "{:?}", family.commands);
        assert!(family.lines.contains(&parameter_line("state_pairs", states)), "{:?}", family.lines);
    }

    #[test]
    fn names_of_entries_get_that_of_their_graph() {
        assert_eq!(with_prefix("a=[batch, 2] b=last(steps*16, 80)", "g"), "g.a=[batch, 2] g.b=last(steps*16, 80)");
    }
}
