//! The parts of the model: its file in a version directory and the conversion of that file at load, or the graphs that
//! are joined at load.

use std::path::{Path, PathBuf};

use stateful_convert::join::{ListedGraph, Search, Wire, graphs, wires};

use super::parameters::{Parameters, with_axis};
use super::raw::{ConfigError, Result, bad, field};
use super::states::{BY_SHAPE, StatePairs, States, is_inside};

pub const JOIN: &str = "join";
const WIRES: &str = "wires";
pub const SEARCH: &str = "search";

// Triton fills this file name in for a model named `….stateful` whose configuration names no file and no backend, so it
// says nothing about what the user wants.
const TRITONS_NAME: &str = "model.stateful";

/// The file that the configuration names, with the field that names it.
pub(super) fn model_file(parameters: &Parameters, default_model_filename: String) -> Option<(&'static str, String)> {
    let named = parameters.text("onnx_file_name").map(|name| ("parameter 'onnx_file_name'", name.to_owned()));
    let default = Some(("default_model_filename", default_model_filename)).filter(|(_, name)| !name.is_empty());
    named.or(default)
}

/// The file named by `onnx_file_name`, else by `default_model_filename`, else `model.onnx`, else the only `.onnx`.
///
/// `other` is a file that is not this model: the model for initial states.
pub fn find_model_file(
    named: Option<&(&'static str, String)>,
    other: Option<&str>,
    version_dir: &Path,
) -> Result<PathBuf> {
    let missing = |why: String| ConfigError::NoModelFile { dir: version_dir.to_owned(), why };
    let named = named.filter(|(_, name)| name != TRITONS_NAME || version_dir.join(name).is_file());
    if let Some((source, name)) = named {
        return find_named_file(version_dir, source, name);
    }
    let default = version_dir.join("model.onnx");
    if default.is_file() {
        return Ok(default);
    }
    let mut candidates = file_names(version_dir);
    candidates.retain(|name| name.ends_with(".onnx") && Some(name.as_str()) != other);
    match candidates.as_slice() {
        [only] => Ok(version_dir.join(only)),
        [] => Err(missing("it has no .onnx file".to_owned())),
        several => Err(missing(format!("it has {}; name one with parameter 'onnx_file_name'", several.join(", ")))),
    }
}

/// The file that `source` names, which must lie in the version directory.
pub fn find_named_file(version_dir: &Path, source: &str, name: &str) -> Result<PathBuf> {
    let path = version_dir.join(name);
    if is_inside(name) && path.is_file() {
        return Ok(path);
    }
    let has = match file_names(version_dir).as_slice() {
        [] => "nothing".to_owned(),
        names => names.join(", "),
    };
    let why = format!("{source} names '{name}', which is no file in it (it has {has})");
    Err(ConfigError::NoModelFile { dir: version_dir.to_owned(), why })
}

fn file_names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

const LOW_LATENCY: &str = "low_latency_transformation";
const OPEN_BATCH: &str = "open_batch";
const CONST_INITIALIZER: &str = "use_const_initializer";

/// The conversions that the configuration asks for. The lists contain only axes that are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// `low_latency_transformation`: recurrences inside the model get states. The list contains axes of steps.
    pub recurrences: Option<Vec<(String, usize)>>,
    /// `open_batch`: a batch of 1 is opened. The list contains axes of the batch.
    pub batch: Option<Vec<(String, usize)>>,
    /// `use_const_initializer`: the states start at zero instead of at learned or constant values. Padding of
    /// convolutions and pooling keeps its value.
    pub zero_initial_states: bool,
}

impl Conversion {
    pub(super) fn new(parameters: &Parameters) -> Result<Self> {
        let recurrences = axes(LOW_LATENCY, parameters)?;
        let zero_initial_states = parameters.flag(CONST_INITIALIZER, false)?;
        if zero_initial_states && recurrences.is_none() {
            let rule = format!("it has an effect only with '{LOW_LATENCY}'");
            return Err(bad(CONST_INITIALIZER, "true", rule));
        }
        Ok(Self { recurrences, batch: axes(OPEN_BATCH, parameters)?, zero_initial_states })
    }
}

/// Reads a switch that may have axes in place of `true`: `INPUT@AXIS`, separated by spaces or commas.
fn axes(name: &'static str, parameters: &Parameters) -> Result<Option<Vec<(String, usize)>>> {
    let text = parameters.text(name).unwrap_or("false");
    let refused = || bad(name, text, "'true', 'false', or axes as 'INPUT@AXIS' are expected");
    match text {
        "true" | "1" => return Ok(Some(Vec::new())),
        "false" | "0" => return Ok(None),
        _ => {}
    }
    let axis = |text: String| match with_axis(&text) {
        Ok((input, Some(axis))) if !input.is_empty() => Ok((input.to_owned(), axis)),
        _ => Err(refused()),
    };
    let axes = parameters.names(name).into_iter().map(axis).collect::<Result<Vec<_>, _>>()?;
    if axes.is_empty() { Err(refused()) } else { Ok(Some(axes)) }
}

/// Several graphs of the version directory that become one model at load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    pub graphs: Vec<ListedGraph>,
    pub wires: Vec<Wire>,
    pub search: Option<Search>,
}

impl Join {
    /// `model_file` and `states`: the settings of the configuration, which must not refer to another model than the
    /// joined one.
    pub(super) fn new(
        parameters: &Parameters,
        model_file: Option<&(&'static str, String)>,
        states: &States,
    ) -> Result<Option<Self>> {
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
        // Triton writes this name into a configuration that names no file. Any other name would be the file of one
        // graph.
        if let Some((source, name)) = model_file.filter(|(_, name)| name != TRITONS_NAME) {
            return Err(field(*source, format!("'{name}'"), "'join' lists the files: leave it out"));
        }
        // A joined model isn't converted, so these would have no effect.
        for name in [LOW_LATENCY, CONST_INITIALIZER, OPEN_BATCH] {
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

    use super::*;
    use crate::config::{Config, PartialConfig};

    /// An empty version directory with these files.
    fn version_dir(test: &str, files: &[&str]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("triton-stateful-model-file-{}-{test}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        for file in files {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        dir
    }

    fn named(source: &'static str, name: &str) -> Option<(&'static str, String)> {
        Some((source, name.to_owned()))
    }

    #[test]
    fn a_named_file_comes_before_model_onnx_before_the_only_file() {
        let dir = version_dir("order", &["a.onnx", "b.onnx", "model.onnx", "deep/c.onnx"]);
        for (named, expected) in [
            (named("parameter", "a.onnx"), "a.onnx"),
            (named("parameter", "deep/c.onnx"), "deep/c.onnx"),
            (named("field", "model.stateful"), "model.onnx"),
            (None, "model.onnx"),
        ] {
            assert_eq!(find_model_file(named.as_ref(), None, &dir).unwrap(), dir.join(expected));
        }
        let dir = version_dir("only", &["only.onnx", "notes.txt"]);
        assert_eq!(find_model_file(None, None, &dir).unwrap(), dir.join("only.onnx"));
        let dir = version_dir("two models", &["steps.onnx", "start.onnx"]);
        assert_eq!(find_model_file(None, Some("start.onnx"), &dir).unwrap(), dir.join("steps.onnx"));
        let dir = version_dir("tritons", &["other.onnx", "model.stateful"]);
        assert_eq!(
            find_model_file(named("field", "model.stateful").as_ref(), None, &dir).unwrap(),
            dir.join("model.stateful")
        );
    }

    #[test]
    fn a_named_file_that_is_not_there_is_refused_with_those_that_are() {
        let dir = version_dir("named", &["model.onnx", "other.onnx"]);
        for source in ["parameter 'onnx_file_name'", "default_model_filename"] {
            let error = find_model_file(named(source, "absent.onnx").as_ref(), None, &dir).unwrap_err().to_string();
            for part in [source, "'absent.onnx'", "model.onnx, other.onnx", dir.to_str().unwrap()] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn a_name_that_leaves_the_version_directory_is_refused_though_the_file_is_there() {
        let dir = version_dir("escape/1", &["model.onnx", "inner/model.onnx"]);
        std::fs::write(dir.parent().unwrap().join("secret.onnx"), "").unwrap();
        let absolute = dir.join("model.onnx");
        let names = ["../secret.onnx", "inner/../../secret.onnx", "..", ".", "", "inner"];
        for name in names.into_iter().chain([absolute.to_str().unwrap()]) {
            let error = find_model_file(named("parameter", name).as_ref(), None, &dir).unwrap_err().to_string();
            assert!(error.contains(&format!("names '{name}', which is no file in it")), "{error}");
        }
    }

    #[test]
    fn without_a_name_there_has_to_be_one_file() {
        let error = find_model_file(None, None, &version_dir("none", &["a.txt"])).unwrap_err().to_string();
        assert!(error.contains("no .onnx file"), "{error}");
        let error = find_model_file(None, None, &version_dir("two", &["b.onnx", "a.onnx"])).unwrap_err().to_string();
        assert!(error.contains("a.onnx, b.onnx") && error.contains("'onnx_file_name'"), "{error}");
        assert!(find_model_file(None, None, Path::new("/nowhere")).is_err());
    }

    fn conversion(parameters: &[(&str, &str)]) -> Result<Conversion> {
        let mut config = json!({ "name": "m" });
        for (name, value) in parameters {
            config["parameters"][name] = json!({ "string_value": value });
        }
        Ok(PartialConfig::from_json(config.to_string().as_bytes())?.conversion)
    }

    #[test]
    fn a_switch_may_name_axes() {
        let none = conversion(&[(LOW_LATENCY, "false")]).unwrap();
        assert_eq!((none.recurrences, none.batch), (None, None));
        let all = conversion(&[(LOW_LATENCY, "true"), (OPEN_BATCH, "1"), (CONST_INITIALIZER, "true")]).unwrap();
        assert_eq!((all.recurrences, all.batch, all.zero_initial_states), (Some(Vec::new()), Some(Vec::new()), true));
        let named = conversion(&[(OPEN_BATCH, "x@0, a@b@2")]).unwrap();
        assert_eq!(named.batch, Some(vec![("x".to_owned(), 0), ("a@b".to_owned(), 2)]));
    }

    #[test]
    fn another_value_is_refused() {
        for name in [LOW_LATENCY, OPEN_BATCH] {
            for value in ["perhaps", "", "x@", "@1", "x@-1", "true,x@1"] {
                let error = conversion(&[(name, value)]).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains("'INPUT@AXIS'"), "{error}");
            }
        }
        let error = conversion(&[(CONST_INITIALIZER, "true")]).unwrap_err().to_string();
        assert!(error.contains(CONST_INITIALIZER) && error.contains(LOW_LATENCY), "{error}");
    }

    fn refused(parameters: &[(&str, &str)]) -> String {
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
        let with = |name: &'static str, value: &'static str| refused(&[("join", "a.onnx b.onnx"), (name, value)]);
        for (said, expected) in [
            (refused(&[("join", " ")]), "parameter 'join' is ''"),
            (refused(&[("join", "a=")]), "parameter 'join' is 'a='"),
            (
                refused(&[("wires", "<<<a.x, b.y>>>")]),
                "'wires' is '<<<a.x, b.y>>>', but it has an effect only with 'join'",
            ),
            (refused(&[("search", "ctc blank=0")]), "'search' is 'ctc blank=0', but it has an effect only with 'join'"),
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
