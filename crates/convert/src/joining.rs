//! `stateful-convert join`: one graph from several, compared with them, and written with a config.pbtxt.

use std::fs;
use std::path::{Path, PathBuf};

use stateful_convert::join::{
    GraphFrom, JoinOptions, Joined, ListedGraph, Part, Search, contexts, dims, graphs, join, read_pieces, wires,
};
use stateful_convert::onnx::{external_files, read, write};
use stateful_convert::verify::{self, Amount, JoinedModels, Source};
use stateful_convert::{builtin, path_in};

use crate::files::{Origin, finish, here};
use crate::options::{Problem, Shared, listed, listed_states};

/// Joins several graphs to one with states, so that a request runs all of them; and compares it with the graphs
#[derive(clap::Args)]
pub struct Arguments {
    /// The graphs, in their order: files, or built-in graphs such as fbank:kaldi, each followed by its options. A tensor is
    /// named graph.tensor, where graph is NAME, the file's name without .onnx, or the built-in graph's up to the colon
    #[arg(value_name = "[NAME=]GRAPH", required = true)]
    graphs: Vec<String>,
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
    /// Context of wired inputs, as in 'embedding.x=68@1': the last 68 elements along axis 1 of the previous value are prepended
    /// to what the wire brings. At first, zeros are; with ':whole', nothing is
    #[arg(long, value_name = "GRAPH.INPUT=ELEMENTS@AXIS")]
    input_context: Option<String>,
    /// Outputs that stay although they are wired, as in encoder.outputs; several with commas
    #[arg(long, value_name = "GRAPH.OUTPUT", value_delimiter = ',')]
    outputs: Vec<String>,
    /// Finds tokens in the joined graph: 'ctc blank=0', or 'transducer blank=0 max_tokens=1', where the last graph is the
    /// decoder and joint, or the last two are the decoder and the joiner. logits=GRAPH.OUTPUT names the logits, and
    /// tokens=tokens.txt gives responses the texts of the tokens
    #[arg(long, value_name = "SEARCH")]
    search: Option<String>,
    #[command(flatten)]
    shared: Shared,
}

pub fn run(arguments: &Arguments) -> Result<String, Problem> {
    let shared = &arguments.shared;
    let options = options(arguments)?;
    let all = graphs(arguments.graphs.iter().map(String::as_str)).map_err(Problem::Graphs)?;
    let files: Vec<&Path> = all.iter().filter_map(file_of).collect();
    // Weights in files of their own are found from there.
    let beside = shared.output.as_deref().or(files.first().copied()).unwrap_or(Path::new(""));
    let parts: Vec<Part> = all.iter().map(|graph| part(graph, here(beside.parent()))).collect::<Result<_, _>>()?;
    let Joined { converted, plan } = join(&parts, &options)?;
    if let Some(context) = options.contexts.iter().find(|context| !plan.has_context(&context.input)) {
        return Err(Problem::OuterContext(context.input.clone()));
    }
    let origin = Origin { files: &files, beside, compared_with: "the graphs", chunk: None };
    finish(converted, &origin, shared, |folder, converted| {
        let environment = verify::environment(&shared.library()?)?;
        let source = |(graph, part)| file_of(graph).map_or(Source::Bytes(part), Source::File);
        let models = JoinedModels {
            parts: all.iter().zip(parts.iter().map(|part| &*part.model)).map(source).collect(),
            joined: Source::File(&folder.model),
            amount: Amount::default(),
        };
        let compared = verify::verify_joined(&environment, &models, &plan, &converted.report, &shared.given(None)?)?;
        Ok((converted, compared))
    })
}

const CONTEXT: &str = "'graph.input=68@1' is expected, with ':whole' if nothing is prepended at first";

fn options(arguments: &Arguments) -> Result<JoinOptions, Problem> {
    let search = arguments.search.as_deref().map(Search::parse).transpose().map_err(Problem::Search)?;
    let tokens = search.as_ref().and_then(|search| search.tokens.as_ref().map(PathBuf::from));
    Ok(JoinOptions {
        wires: listed(("wires", "'<<<graph.output, graph.input>>>' is expected"), arguments.wires.as_ref(), wires)?,
        states: listed_states(arguments.states.as_ref())?,
        dims: listed(("dims", "'graph.tensor=[batch, 80, 121]' is expected"), arguments.dims.as_ref(), dims)?,
        contexts: listed(("input-context", CONTEXT), arguments.input_context.as_ref(), contexts)?,
        outputs: arguments.outputs.clone(),
        search,
        pieces: tokens.map(|file| read_pieces(&file).map_err(|why| Problem::file(&file, why))).transpose()?,
    })
}

fn file_of(graph: &ListedGraph) -> Option<&Path> {
    match &graph.from {
        GraphFrom::File(file) => Some(Path::new(file)),
        GraphFrom::Builtin { .. } => None,
    }
}

/// Reads or makes a graph. The weights of a file that are in files of their own must be below the folder of the joined model.
fn part(graph: &ListedGraph, folder: &Path) -> Result<Part, Problem> {
    let name = graph.name.clone();
    let file = match &graph.from {
        GraphFrom::File(file) => PathBuf::from(file),
        GraphFrom::Builtin { graph, options } => {
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            return Ok(Part { name, model: write(&builtin(graph, &options)?).into(), folder: String::new() });
        }
    };
    let unreadable = |error| Problem::Unreadable { path: file.clone(), error };
    let model: bytes::Bytes = fs::read(&file).map_err(unreadable)?.into();
    // Joining says what is wrong with a file that can't be read.
    let files = read(model.clone()).map_or_else(|_| Vec::new(), |model| external_files(&model));
    let own = here(file.parent());
    for weights in &files {
        path_in(own, weights).map_err(|why| Problem::file(&file, why))?;
    }
    let mut from_folder = String::new();
    if let Some(weights) = files.first() {
        let elsewhere = || Problem::Elsewhere { model: file.clone(), file: weights.clone(), folder: own.to_owned() };
        let (Ok(real), Ok(folder)) = (own.canonicalize(), folder.canonicalize()) else { return Err(elsewhere()) };
        let below = real.strip_prefix(folder).map_err(|_| elsewhere())?;
        from_folder = below.to_str().ok_or_else(elsewhere)?.to_owned();
    }
    Ok(Part { name, model, folder: from_folder })
}
