//! `stateful-convert join`: one graph from several, compared with them, and written with a config.pbtxt.

use std::fs;
use std::path::{Path, PathBuf};

use stateful_convert::join::{JoinOptions, Joined, Part, Search, dims, join, wires};
use stateful_convert::onnx::{external_files, read};
use stateful_convert::verify::{self, Amount, JoinedModels, Source};
use stateful_convert::{path_in, state_pairs};

use crate::files::{Targets, WorkFolder, here};
use crate::options::Shared;
use crate::problem::Problem;
use crate::{texts, warnings};

/// Joins several graphs to one with states, so that a request runs all of them; and compares it with the graphs
#[derive(clap::Args)]
pub struct Arguments {
    /// The graphs, in their order. A tensor is named graph.tensor, where graph is the file's name without .onnx, or NAME
    #[arg(value_name = "[NAME=]FILE", required = true, num_args = 2.., value_parser = named)]
    graphs: Vec<NamedFile>,
    /// Which output each input takes, as in '<<<encoder.outputs, decoder.inputs>>>'; equal names need no wire. A wire back to
    /// an earlier graph is a state
    #[arg(long, value_name = "WIRES")]
    wires: Option<String>,
    /// States of the graphs, as in '<<<encoder.h0, encoder.hn>>>' [default: those that a graph's description or names show]
    #[arg(long, value_name = "PAIRS")]
    states: Option<String>,
    /// Dims that the graphs leave open, as in 'encoder.cache=[batch, 17, 70, 512]': for states of a fixed length, and where
    /// the batch has no usual name
    #[arg(long, value_name = "GRAPH.TENSOR=[DIMS]")]
    dims: Option<String>,
    /// Outputs that stay although they are wired, as in encoder.outputs; several with commas
    #[arg(long, value_name = "GRAPH.OUTPUT", value_delimiter = ',')]
    outputs: Vec<String>,
    /// Finds tokens in the joined graph: 'ctc blank=0', or 'transducer blank=0 max_tokens=1', where the last graph is the
    /// decoder and joint, or the last two are the decoder and the joiner. logits=GRAPH.OUTPUT names the logits
    #[arg(long, value_name = "SEARCH")]
    search: Option<String>,
    #[command(flatten)]
    shared: Shared,
}

/// A graph's name and its file.
#[derive(Clone, Debug)]
struct NamedFile {
    name: String,
    file: PathBuf,
}

fn named(text: &str) -> Result<NamedFile, String> {
    // A path may have the sign as well.
    let written = text.split_once('=').filter(|(name, _)| !name.contains(['/', '.']));
    let file = PathBuf::from(written.map_or(text, |(_, file)| file));
    let stem = || file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    match written.map(|(name, _)| name.to_owned()).or_else(stem) {
        Some(name) => Ok(NamedFile { name, file }),
        None => Err(format!("FILE or NAME=FILE is expected, not '{text}'")),
    }
}

/// Joins the graphs, and says what was done.
pub fn run(arguments: &Arguments) -> Result<String, Problem> {
    let shared = &arguments.shared;
    let options = JoinOptions {
        wires: match &arguments.wires {
            Some(text) => wires(text).ok_or_else(|| Problem::Wires(text.clone()))?,
            None => Vec::new(),
        },
        states: match &arguments.states {
            Some(text) => state_pairs(text).map_err(|_| Problem::States(text.clone()))?,
            None => Vec::new(),
        },
        dims: match &arguments.dims {
            Some(text) => dims(text).ok_or_else(|| Problem::Dims(text.clone()))?,
            None => Vec::new(),
        },
        outputs: arguments.outputs.clone(),
        search: match &arguments.search {
            Some(text) => Some(Search::parse(text).map_err(Problem::Search)?),
            None => None,
        },
    };
    let targets = Targets::of(shared);
    // Weights in files of their own are found from there.
    let first = arguments.graphs.first().map_or(Path::new(""), |graph| &graph.file);
    let output = shared.output.as_deref().unwrap_or(first);
    let parts: Vec<Part> =
        arguments.graphs.iter().map(|graph| part(graph, here(output.parent()))).collect::<Result<_, _>>()?;
    let Joined { converted, plan } = join(&parts, &options)?;
    if converted.report.inputs.is_empty() {
        let pairs: Vec<String> = converted.report.states.iter().map(|state| state.pair.to_string()).collect();
        return Err(Problem::NothingToCarry(pairs.join(" ")));
    }
    if let Some(targets) = &targets {
        targets.check_folders(&converted)?;
    }
    let folder = WorkFolder::new(output, &converted, targets.as_ref().map(Targets::folder))?;
    if let Some(targets) = &targets {
        let files: Vec<&Path> = arguments.graphs.iter().map(|graph| graph.file.as_path()).collect();
        targets.check(&files, shared.force, &folder)?;
    }
    let environment = verify::environment(&shared.library()?)?;
    let model = folder.model();
    let models = JoinedModels {
        parts: arguments.graphs.iter().map(|graph| Source::File(&graph.file)).collect(),
        joined: Source::File(&model),
        amount: Amount::default(),
    };
    let compared = verify::verify_joined(&environment, &models, &plan, &converted.report, &shared.given(None)?)?;
    if let Some(targets) = &targets {
        targets.write(&folder, &converted, None)?;
    }
    let warnings = warnings::of(&converted.report);
    let written = targets.map(|targets| targets.written(&converted, &folder));
    Ok(texts::done(&converted.report, &compared, &warnings, written.as_deref(), shared, "the graphs"))
}

/// Reads a graph. Its weights in files of their own must be below the folder of the joined model.
fn part(graph: &NamedFile, folder: &Path) -> Result<Part, Problem> {
    let unreadable = |error| Problem::Unreadable { path: graph.file.clone(), error };
    let model: bytes::Bytes = fs::read(&graph.file).map_err(unreadable)?.into();
    // Joining says what is wrong with a file that can't be read.
    let files = read(model.clone()).map_or_else(|_| Vec::new(), |model| external_files(&model));
    let own = here(graph.file.parent());
    for file in &files {
        path_in(own, file).map_err(|why| Problem::Weights { model: graph.file.clone(), why })?;
    }
    let mut from_folder = String::new();
    if let Some(file) = files.first() {
        let elsewhere = || Problem::Elsewhere { model: graph.file.clone(), file: file.clone(), folder: own.to_owned() };
        let (Ok(real), Ok(folder)) = (own.canonicalize(), folder.canonicalize()) else { return Err(elsewhere()) };
        let below = real.strip_prefix(folder).map_err(|_| elsewhere())?;
        from_folder = below.to_str().ok_or_else(elsewhere)?.to_owned();
    }
    Ok(Part { name: graph.name.clone(), model, folder: from_folder })
}
