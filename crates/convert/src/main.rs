//! `stateful-convert model.onnx -o streaming.onnx`: converts a model, compares it with the original, and writes it with
//! a config.pbtxt. `stateful-convert join` does the same with the graph that it joins from several, and
//! `stateful-convert graph` writes a built-in graph.

mod files;
mod options;
mod texts;

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use files::{Content, Origin, Targets, WorkFolder, finish, here, write_files};
use options::{Problem, Shared, VERSION, input_axis, listed, listed_states};
use stateful_convert::join::{
    GraphFrom, JoinOptions, Joined, ListedGraph, Part, Search, contexts, dims, graphs, join, read_pieces, wires,
};
use stateful_convert::names::pairs_by_names;
use stateful_convert::onnx::schema::ModelProto;
use stateful_convert::onnx::{external_files, read, write};
use stateful_convert::verify::{self, Amount, Compared, JoinedModels, Models, Source};
use stateful_convert::{
    ConvertError, Converted, InputAxis, Options, WeightsError, builtin, convert, path_in, with_small_weights_shown,
};
use texts::tensors;

/// Converts an ONNX model for serving in steps: gives it state inputs and outputs, opens its batch, or names its
/// states; and compares it with the original
#[derive(Parser)]
#[command(version = VERSION, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    conversion: Arguments,
}

#[derive(Subcommand)]
enum Command {
    Graph(GraphArguments),
    Join(JoinArguments),
}

#[derive(Args)]
struct Arguments {
    /// The model
    // required without a subcommand only
    #[arg(required = true)]
    model: Option<PathBuf>,
    /// The axis of an input that has the steps, as in x@1; several with commas [default: found by its recurrence]
    #[arg(long, value_name = "INPUT@AXIS", value_delimiter = ',', value_parser = input_axis)]
    time: Vec<InputAxis>,
    /// States that the model has already, as in '<<<h0, hn>>> <<<c0, cn>>>'
    #[arg(long, value_name = "PAIRS")]
    states: Option<String>,
    /// Open the batch dimension, which the model fixes to 1
    #[arg(long)]
    open_batch: bool,
    /// The axis of an input that is the batch of 1, as in x@1; several with commas. Opens the batch, too [default: one
    /// that can be opened]
    #[arg(long, value_name = "INPUT@AXIS", value_delimiter = ',', value_parser = input_axis)]
    batch_axis: Vec<InputAxis>,
    /// States start at zero instead of at learned or constant values; padding of convolutions and pooling keeps its
    /// value
    #[arg(long)]
    zero_initial_states: bool,
    /// Steps in a request: goes into config.pbtxt, and the comparison has chunks of it
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(i64).range(1..))]
    chunk: Option<i64>,
    #[command(flatten)]
    shared: Shared,
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    let arguments = &line.conversion;
    let done = match (&line.command, &arguments.model) {
        (Some(Command::Graph(arguments)), _) => graph(arguments),
        (Some(Command::Join(arguments)), _) => joined(arguments),
        (None, Some(model)) => run(model, arguments),
        (None, None) => Err(Problem::NoModel),
    };
    match done {
        Ok(text) => match writeln!(std::io::stdout(), "{text}") {
            Ok(()) => ExitCode::SUCCESS,
            // Who reads it has enough, as `head` has.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Err(error) => {
                _ = writeln!(std::io::stderr(), "stateful-convert: the result cannot be printed: {error}");
                ExitCode::FAILURE
            }
        },
        Err(problem) => {
            // If this can't be printed, the exit status still says that it failed.
            _ = writeln!(std::io::stderr(), "stateful-convert: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run(model: &Path, arguments: &Arguments) -> Result<String, Problem> {
    let unreadable = |error| Problem::Unreadable { path: model.to_owned(), error };
    let bytes: Bytes = fs::read(model).map_err(unreadable)?.into();
    let bytes = match with_small_weights_shown(bytes.clone(), model.parent().unwrap_or(Path::new(""))) {
        // The conversion reports what is wrong with the model.
        Err(WeightsError::Model(_)) => bytes,
        read => read.map_err(|why| Problem::file(model, why))?,
    };
    let options = Options {
        time: arguments.time.clone(),
        states: listed_states(arguments.states.as_ref())?,
        keep_recurrences: false,
        open_batch: arguments.open_batch || !arguments.batch_axis.is_empty(),
        batch: arguments.batch_axis.clone(),
    };
    let converted = convert(bytes, &options).map_err(|error| match error {
        // Only this error is about the file; the others are about the model in it.
        ConvertError::Read(_) => Problem::file(model, error),
        error => Problem::Convert(error),
    })?;
    let origin = Origin { files: &[model], beside: model, compared_with: "the original", chunk: arguments.chunk };
    finish(converted, &origin, &arguments.shared, |folder, converted| {
        // Before states are set to zero, which changes the answers on purpose.
        let compared = compare(model, arguments, folder, &converted)?;
        let converted = if arguments.zero_initial_states {
            converted.starting_at_zero().map_err(|error| Problem::Convert(error.into()))?
        } else {
            converted
        };
        Ok((converted, compared))
    })
}

fn compare(
    file: &Path,
    arguments: &Arguments,
    folder: &WorkFolder,
    converted: &Converted,
) -> Result<Vec<Compared>, Problem> {
    let environment = verify::environment(&arguments.shared.library()?)?;
    let models = Models {
        original: Source::File(if converted.original.is_some() { &folder.original } else { file }),
        converted: Source::File(&folder.model),
        initial_states: converted.initial_states.as_ref().map(|_| Source::File(&folder.initial_states)),
    };
    Ok(verify::verify(&environment, &models, &converted.report, &arguments.shared.given(arguments.chunk)?)?)
}

/// Joins several graphs to one with states, so that a request runs all of them; and compares it with the graphs
#[derive(Args)]
struct JoinArguments {
    /// The graphs, in their order: files, or built-in graphs such as fbank:kaldi, each followed by its options. A
    /// tensor is named graph.tensor, where graph is NAME, the file's name without .onnx, or the built-in graph's up to
    /// the colon
    #[arg(value_name = "[NAME=]GRAPH", required = true)]
    graphs: Vec<String>,
    /// Which output each input takes, as in '<<<encoder.outputs, decoder.inputs>>>'; equal names need no wire. A wire
    /// back to an earlier graph is a state
    #[arg(long, value_name = "WIRES")]
    wires: Option<String>,
    /// States of the graphs, as in '<<<encoder.h0, encoder.hn>>>' [default: those that a graph's description or names
    /// show]
    #[arg(long, value_name = "PAIRS")]
    states: Option<String>,
    /// Dims that the graphs leave open, as in 'encoder.cache=[batch, 17, 70, 512]': for states of a fixed length, and
    /// where the batch has no usual name
    #[arg(long, value_name = "GRAPH.TENSOR=[DIMS]")]
    dims: Option<String>,
    /// Context of wired inputs, as in 'embedding.x=68@1': the last 68 elements along axis 1 of the previous value are
    /// prepended to what the wire brings. At first, zeros are; with ':whole', nothing is
    #[arg(long, value_name = "GRAPH.INPUT=ELEMENTS@AXIS")]
    input_context: Option<String>,
    /// Outputs that stay although they are wired, as in encoder.outputs; several with commas
    #[arg(long, value_name = "GRAPH.OUTPUT", value_delimiter = ',')]
    outputs: Vec<String>,
    /// Finds tokens in the joined graph: 'ctc blank=0', or 'transducer blank=0 max_tokens=1', where the last graph is
    /// the decoder and joint, or the last two are the decoder and the joiner. logits=GRAPH.OUTPUT names the logits, and
    /// tokens=tokens.txt gives responses the texts of the tokens
    #[arg(long, value_name = "SEARCH")]
    search: Option<String>,
    #[command(flatten)]
    shared: Shared,
}

fn joined(arguments: &JoinArguments) -> Result<String, Problem> {
    let shared = &arguments.shared;
    let options = join_options(arguments)?;
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

fn join_options(arguments: &JoinArguments) -> Result<JoinOptions, Problem> {
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

/// Reads or makes a graph. The weights of a file that are in files of their own must be below the folder of the joined
/// model.
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
    let model: Bytes = fs::read(&file).map_err(unreadable)?.into();
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

// Serves the model as it is; a host with a GPU would place it there otherwise.
const CONFIGURATION: &str = "backend: \"stateful\"\ninstance_group [ { kind: KIND_CPU } ]\n";

/// Writes a built-in graph: filter banks of speech, or a Fourier transform
#[derive(Args)]
struct GraphArguments {
    /// The graph: fbank:kaldi, mel:nemo, stft, istft, irfft or overlap_add
    #[arg(value_name = "GRAPH")]
    graph: String,
    /// Options of the graph, such as num_mel_bins=40; docs/convert.md lists them
    #[arg(value_name = "OPTION=VALUE")]
    options: Vec<String>,
    /// The graph's file. If the graph has states, a config.pbtxt goes beside it, or beside its folder if that is named
    /// after a version. Folders that are missing are made
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
    /// Write no config.pbtxt
    #[arg(long)]
    no_config: bool,
}

fn graph(arguments: &GraphArguments) -> Result<String, Problem> {
    let options: Vec<&str> = arguments.options.iter().map(String::as_str).collect();
    let model = builtin(&arguments.graph, &options)?;
    let bytes = write(&model);
    // Without states, it is a part of other models, and isn't served by itself.
    let targets = Targets::new(&arguments.output, !arguments.no_config && has_states(&model));
    let config = targets.config.clone().map(|path| (path, Content::Bytes(CONFIGURATION.as_bytes())));
    let files: Vec<(PathBuf, Content)> =
        [(targets.model.clone(), Content::Bytes(&bytes))].into_iter().chain(config).collect();
    let names: Vec<PathBuf> = files.iter().map(|(path, _)| path.clone()).collect();
    targets.check_folders(&names)?;
    if let Some(path) = names.iter().find(|path| path.exists() && !arguments.force) {
        return Err(Problem::Exists(path.clone()));
    }
    write_files(&files)?;
    let mut text = format!("{}\n\n{}", model.doc_string(), tensors(&model));
    if !has_states(&model) {
        text += "\nit has no state, so it isn't served by itself: join it with other graphs";
    }
    for path in &names {
        text += &format!("\nwritten: {}", path.display());
    }
    Ok(text)
}

/// Whether the backend would serve the graph by itself: its states have names that show them.
fn has_states(model: &ModelProto) -> bool {
    model.graph.as_ref().is_some_and(|graph| pairs_by_names(graph).is_ok_and(|pairs| !pairs.is_empty()))
}
