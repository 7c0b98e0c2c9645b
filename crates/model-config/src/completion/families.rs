//! Families of graphs that run one after the other, known by their signatures: how `stateful-convert join` makes one model of
//! them.
//!
//! The table is `assets/known-families.json`. Like that of known models, it is advice, because a signature proves nothing.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::known_models::{has_tensors, needed};
use crate::config::parameter_line;
use crate::onnx::Signature;

const TABLE: &str = include_str!("../../../../assets/known-families.json");

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
    /// The lines of config.pbtxt that join the graphs at load, and those that the graphs need. Without lines, the graphs have to
    /// be changed first.
    pub lines: Vec<String>,
    pub note: String,
}

impl Family {
    /// The first known family that has these graphs, by their signatures. `graphs` are the files of a folder with their
    /// signatures, and `others` its other files. Commands name the folder's files below `folder`.
    pub fn of(graphs: &[(String, Signature)], others: &[String], folder: &str) -> Option<Self> {
        // A unit test reads the table.
        let known: Vec<KnownFamily> = serde_json::from_str(TABLE).unwrap_or_default();
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
    use super::*;
    use crate::onnx::TensorInfo;
    use rows::tensor::DataType;

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

    fn files(graphs: Vec<(&str, Signature)>) -> Vec<(String, Signature)> {
        graphs.into_iter().map(|(name, signature)| (name.to_owned(), signature)).collect()
    }

    #[test]
    fn the_table_can_be_read() {
        let known: Vec<KnownFamily> = serde_json::from_str(TABLE).unwrap();
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
