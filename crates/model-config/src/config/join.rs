//! `join`, `wires` and `search`: the model is made of several graphs of the version's folder when it is loaded.

use stateful_convert::join::{ListedGraph, Search, Wire, graphs, wires};

use super::model::TRITONS_NAME;
use super::parameters::Parameters;
use super::raw::{ConfigError, bad, field};
use super::states::{BY_SHAPE, StatePairs, States};

pub const JOIN: &str = "join";
const WIRES: &str = "wires";
pub const SEARCH: &str = "search";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    pub graphs: Vec<ListedGraph>,
    pub wires: Vec<Wire>,
    pub search: Option<Search>,
}

impl Join {
    /// `model_file` and `states`: what the configuration says of them, which must not mean another model than the joined one.
    pub(super) fn new(
        parameters: &Parameters,
        model_file: Option<&(&'static str, String)>,
        states: &States,
    ) -> Result<Option<Self>, ConfigError> {
        let Some(text) = parameters.text(JOIN) else {
            for name in [WIRES, SEARCH] {
                parameters.refuse(name, "it has an effect only with 'join', which lists the graphs")?;
            }
            return Ok(None);
        };
        let words = text.split([' ', ',', '\t', '\n']).filter(|word| !word.is_empty());
        let graphs = graphs(words).map_err(|why| bad(JOIN, text, why))?;
        if graphs.is_empty() {
            return Err(bad(JOIN, text, "files of the version's folder and built-in graphs are expected"));
        }
        let read =
            |text: &str| wires(text).ok_or_else(|| bad(WIRES, text, "'<<<graph.output, graph.input>>>' is expected"));
        let search = |text: &str| Search::parse(text).map_err(|why| bad(SEARCH, text, why));
        let wires = parameters.text(WIRES).map(read).transpose()?.unwrap_or_default();
        let search = parameters.text(SEARCH).map(search).transpose()?;
        // Triton writes this name into a configuration that names no file. Any other one would be the file of one graph.
        if let Some((source, name)) = model_file.filter(|(_, name)| name != TRITONS_NAME) {
            return Err(field(*source, format!("'{name}'"), "'join' lists the files: leave it out"));
        }
        // A joined model isn't converted, so these would have no effect.
        for name in ["low_latency_transformation", "use_const_initializer", "open_batch"] {
            if let Some(text) = parameters.text(name).filter(|text| !["false", "0"].contains(text)) {
                let rule = "graphs are joined as they are: convert each of them with stateful-convert first";
                return Err(bad(name, text, rule));
            }
        }
        parameters.refuse("state_pair_patterns", "with 'join', states are listed in 'state_pairs'")?;
        if states.pairs == StatePairs::AutoByShape {
            let rule = "with 'join', pairs '<<<graph.input, graph.output>>>' are expected";
            return Err(bad("state_pairs", BY_SHAPE, rule));
        }
        Ok(Some(Self { graphs, wires, search }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::config::Config;

    fn error(parameters: &[(&str, &str)]) -> String {
        Config::for_tests(&json!({ "name": "m" }), parameters).unwrap_err().to_string()
    }

    #[test]
    fn a_file_beside_the_list_is_refused() {
        let config = |name: &str| json!({ "name": "m", "default_model_filename": name });
        let read = |name: &str| Config::for_tests(&config(name), &[("join", "a.onnx b.onnx")]);
        let error = read("a.onnx").unwrap_err().to_string();
        assert_eq!(error, "default_model_filename is 'a.onnx', but 'join' lists the files: leave it out");
        // Triton fills this name in.
        assert!(read("model.stateful").is_ok());
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let with = |name: &'static str, value: &'static str| error(&[("join", "a.onnx b.onnx"), (name, value)]);
        for (said, expected) in [
            (error(&[("join", " ")]), "parameter 'join' is ''"),
            (error(&[("join", "a=")]), "parameter 'join' is 'a='"),
            (
                error(&[("wires", "<<<a.x, b.y>>>")]),
                "'wires' is '<<<a.x, b.y>>>', but it has an effect only with 'join'",
            ),
            (error(&[("search", "ctc blank=0")]), "'search' is 'ctc blank=0', but it has an effect only with 'join'"),
            (with("wires", "a, b"), "parameter 'wires' is 'a, b', but '<<<graph.output, graph.input>>>' is expected"),
            (with("search", "beam blank=0"), "parameter 'search' is 'beam blank=0', but 'beam' isn't known"),
            (with("onnx_file_name", "a.onnx"), "parameter 'onnx_file_name' is 'a.onnx', but 'join' lists the files"),
            (with("open_batch", "true"), "parameter 'open_batch' is 'true', but graphs are joined as they are"),
            (with("low_latency_transformation", "x@1"), "'low_latency_transformation' is 'x@1', but graphs are joined"),
            (with("state_pair_patterns", "<<<a*, b*>>>"), "'state_pair_patterns' is '<<<a*, b*>>>', but with 'join'"),
            (with("state_pairs", "auto-by-shape"), "parameter 'state_pairs' is 'auto-by-shape', but with 'join'"),
        ] {
            assert!(said.contains(expected), "{said}");
        }
    }
}
