//! `stateful-convert model.onnx -o streaming.onnx`: converts a model, compares it with the original, and writes it with
//! a config.pbtxt. `stateful-convert join` does the same with the graph that it joins from several, and `stateful-convert graph`
//! writes a built-in graph.

mod commands;
mod files;
mod joining;
mod options;
mod problem;
mod result;
mod texts;
mod warnings;

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use commands::GraphArguments;
use files::WorkFolder;
use options::{Shared, VERSION, input_axis};
use problem::Problem;
use result::{Origin, finish};
use stateful_convert::verify::{self, Compared, Models, Source};
use stateful_convert::{
    ConvertError, Converted, InputAxis, Options, WeightsError, convert, state_pairs, with_small_weights_shown,
};

/// Converts an ONNX model for serving in steps: gives it state inputs and outputs, opens its batch, or names its states; and
/// compares it with the original
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
    Join(joining::Arguments),
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
    /// The axis of an input that is the batch of 1, as in x@1; several with commas. Opens the batch, too [default: one that
    /// can be opened]
    #[arg(long, value_name = "INPUT@AXIS", value_delimiter = ',', value_parser = input_axis)]
    batch_axis: Vec<InputAxis>,
    /// States start at zero instead of at learned or constant values; padding of convolutions and pooling keeps its value
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
        (Some(Command::Graph(arguments)), _) => commands::graph(arguments),
        (Some(Command::Join(arguments)), _) => joining::run(arguments),
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
    let bytes = small_weights_shown(model, fs::read(model).map_err(unreadable)?.into())?;
    let states = match &arguments.states {
        Some(text) => state_pairs(text).map_err(|_| Problem::States(text.clone()))?,
        None => Vec::new(),
    };
    let options = Options {
        time: arguments.time.clone(),
        states,
        keep_recurrences: false,
        open_batch: arguments.open_batch || !arguments.batch_axis.is_empty(),
        batch: arguments.batch_axis.clone(),
    };
    let converted = convert(bytes, &options).map_err(|error| match error {
        // Only this error is about the file; the others are about the model in it.
        ConvertError::Read(_) => Problem::Read { model: model.to_owned(), error },
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

fn small_weights_shown(model: &Path, bytes: Bytes) -> Result<Bytes, Problem> {
    match with_small_weights_shown(bytes.clone(), model.parent().unwrap_or(Path::new(""))) {
        // The conversion says what is wrong with it.
        Err(WeightsError::Model(_)) => Ok(bytes),
        read => read.map_err(|why| Problem::Weights { model: model.to_owned(), why }),
    }
}

fn compare(
    file: &Path,
    arguments: &Arguments,
    folder: &WorkFolder,
    converted: &Converted,
) -> Result<Vec<Compared>, Problem> {
    let environment = verify::environment(&arguments.shared.library()?)?;
    let (model, original, initial_states) = (folder.model(), folder.original(), folder.initial_states());
    let models = Models {
        original: Source::File(if converted.original.is_some() { &original } else { file }),
        converted: Source::File(&model),
        initial_states: converted.initial_states.as_ref().map(|_| Source::File(&initial_states)),
    };
    Ok(verify::verify(&environment, &models, &converted.report, &arguments.shared.given(arguments.chunk)?)?)
}
