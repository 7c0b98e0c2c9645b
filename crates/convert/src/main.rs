//! `stateful-convert model.onnx -o streaming.onnx`: converts a model, compares it with the original, and writes it with
//! a config.pbtxt.
//! `stateful-convert graph` writes a built-in graph.

mod commands;
mod files;
mod texts;

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use commands::GraphArguments;
use files::{Problem, Targets, WorkFolder, option};
use serde_json::json;
use stateful_convert::onnx::Dim;
use stateful_convert::recordings;
use stateful_convert::report::{Report, Role, StepInput, Warning};
use stateful_convert::verify::{self, Compared, Given, Models, Source};
use stateful_convert::{
    ConvertError, Converted, InputAxis, Options, StatePair, WeightsError, convert, state_pairs,
    with_small_weights_shown,
};

/// What `--version` says. `scripts/release` adds the commit.
const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// Converts an ONNX model for serving in steps: gives it state inputs and outputs, opens its batch, or names its states; and
/// compares it with the original
#[derive(Parser)]
#[command(version = VERSION, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    conversion: Option<Arguments>,
}

#[derive(Subcommand)]
enum Command {
    Graph(GraphArguments),
}

#[derive(Args)]
struct Arguments {
    /// The model
    model: PathBuf,
    /// The converted model. A config.pbtxt goes beside it, or beside its folder if that is named after a version. Folders
    /// that are missing are made
    #[arg(short, long, value_name = "FILE", required_unless_present = "dry_run")]
    output: Option<PathBuf>,
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
    /// What the comparison gives to inputs, as in sr=16000,input@1=576: a value for each element, or the length of an
    /// open axis; and recordings: a file of NumPy, FILE.npz, with arrays of the names of inputs [default: random values,
    /// short axes]
    #[arg(long, value_name = "INPUT=VALUE|FILE.npz", value_delimiter = ',', value_parser = given)]
    compare_with: Vec<GivenInput>,
    /// Convert and compare, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
    /// Write no config.pbtxt
    #[arg(long)]
    no_config: bool,
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
    /// ONNX Runtime's library [default: ORT_DYLIB_PATH, or libonnxruntime.so of the backend's folder]
    #[arg(long, value_name = "FILE")]
    ort_library: Option<PathBuf>,
}

/// What the comparison gives to an input.
#[derive(Clone, Debug)]
enum GivenInput {
    Length(InputAxis, i64),
    Value(String, f64),
    Recordings(PathBuf),
}

fn with_option(warning: &Warning) -> String {
    warning.hint().map_or_else(|| warning.to_string(), |hint| format!("{warning}; {}", option(hint)))
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    let done = match (&line.command, &line.conversion) {
        (Some(Command::Graph(arguments)), _) => commands::graph(arguments),
        (None, Some(arguments)) => run(arguments),
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

fn run(arguments: &Arguments) -> Result<String, Problem> {
    let unreadable = |error| Problem::Unreadable { path: arguments.model.clone(), error };
    let bytes = small_weights_shown(&arguments.model, fs::read(&arguments.model).map_err(unreadable)?.into())?;
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
        ConvertError::Read(_) => Problem::Read { model: arguments.model.clone(), error },
        error => Problem::Convert(error),
    })?;
    if converted.report.inputs.is_empty() {
        let pairs: Vec<String> = converted.report.states.iter().map(|state| state.pair.to_string()).collect();
        return Err(Problem::NothingToCarry(pairs.join(" ")));
    }
    let targets = arguments.output.as_deref().filter(|_| !arguments.dry_run);
    let targets = targets.map(|output| Targets::new(output, !arguments.no_config));
    if let Some(targets) = &targets {
        targets.check_folders(&converted)?;
    }
    let folder = WorkFolder::new(&arguments.model, &converted, targets.as_ref().map(Targets::folder))?;
    if let Some(targets) = &targets {
        targets.check(&arguments.model, arguments.force, &folder)?;
    }
    // Before states are set to zero, which changes the answers on purpose.
    let compared = compare(arguments, &folder, &converted)?;
    let converted = if arguments.zero_initial_states {
        converted.starting_at_zero().map_err(|error| Problem::Convert(error.into()))?
    } else {
        converted
    };
    if let Some(targets) = &targets {
        targets.write(&folder, &converted, arguments.chunk)?;
    }
    let mut warnings: Vec<String> = converted.report.warnings.iter().map(with_option).collect();
    warnings.extend(unpaired(&converted.report));
    if arguments.json {
        let mut report = json!(converted.report);
        report["warnings"] = json!(warnings);
        let done = json!({ "report": report, "compared": compared, "written": targets.map(|targets| targets.written(&converted, &folder)) });
        return Ok(format!("{done:#}"));
    }
    let mut text = texts::table(&converted.report, &compared, &warnings);
    for path in targets.iter().flat_map(|targets| targets.written(&converted, &folder)) {
        text += &format!("\nwritten: {}", path.display());
    }
    Ok(text)
}

/// The model with what the conversion looks at of weights in files of their own.
fn small_weights_shown(model: &Path, bytes: Bytes) -> Result<Bytes, Problem> {
    match with_small_weights_shown(bytes.clone(), model.parent().unwrap_or(Path::new(""))) {
        // The conversion says what is wrong with it.
        Err(WeightsError::Model(_)) => Ok(bytes),
        read => read.map_err(|why| Problem::Weights { model: model.to_owned(), why }),
    }
}

/// A warning about inputs and outputs of one type and shape that may be states, too.
fn unpaired(report: &Report) -> Option<String> {
    // What requests carry comes first, in models of single steps.
    let first = usize::from(report.time.is_empty());
    let inputs: Vec<&StepInput> = report.inputs.iter().skip(first).filter(|input| input.role == Role::Other).collect();
    let pair = |input: &&StepInput| {
        let alike = |elem: i32, dims: &[Dim]| elem == input.elem && dims == input.dims;
        let mut outputs = report.outputs.iter().filter(|output| alike(output.elem, &output.dims));
        let output = outputs.next().filter(|_| outputs.next().is_none())?;
        // With two candidates, a suggestion would be a guess.
        let is_only = inputs.iter().filter(|input| alike(input.elem, &input.dims)).count() == 1;
        is_only.then(|| StatePair { input: input.name.clone(), output: output.name.clone() }.to_string())
    };
    let pairs: Vec<String> = inputs.iter().filter_map(pair).collect();
    let text = format!(
        "by their types and dims, {} may be states, too: if they are, name them with --states; else requests have to carry \
         these inputs",
        pairs.join(" ")
    );
    (!pairs.is_empty()).then_some(text)
}

fn compare(arguments: &Arguments, folder: &WorkFolder, converted: &Converted) -> Result<Vec<Compared>, Problem> {
    let library = library(arguments).ok_or(Problem::NoLibrary)?;
    let environment = verify::environment(&library)?;
    let (model, original, initial_states) = (folder.model(), folder.original(), folder.initial_states());
    let models = Models {
        original: Source::File(if converted.original.is_some() { &original } else { &arguments.model }),
        converted: Source::File(&model),
        initial_states: converted.initial_states.as_ref().map(|_| Source::File(&initial_states)),
    };
    let mut given = Given { chunk: arguments.chunk, ..Given::default() };
    for input in &arguments.compare_with {
        match input {
            GivenInput::Length(axis, length) => given.lengths.push((axis.clone(), *length)),
            GivenInput::Value(input, value) => given.values.push((input.clone(), *value)),
            GivenInput::Recordings(path) => {
                let read = recordings::read(path);
                given.recordings.extend(read.map_err(|why| Problem::Recordings { path: path.clone(), why })?);
            }
        }
    }
    Ok(verify::verify(&environment, &models, &converted.report, &given)?)
}

fn library(arguments: &Arguments) -> Option<PathBuf> {
    let environment = std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from);
    let program = std::env::current_exe().ok();
    // scripts/build puts the program and the backend there.
    let beside =
        program.and_then(|program| Some(program.parent()?.parent()?.join("backends/stateful/libonnxruntime.so")));
    arguments.ort_library.clone().or(environment).or(beside.filter(|path| path.exists()))
}

fn input_axis(text: &str) -> Result<InputAxis, String> {
    let axis = text
        .rsplit_once('@')
        .and_then(|(input, axis)| Some(InputAxis { input: input.to_owned(), axis: axis.parse().ok()? }));
    axis.ok_or_else(|| format!("INPUT@AXIS is expected, not '{text}'"))
}

fn given(text: &str) -> Result<GivenInput, String> {
    if text.ends_with(".npz") {
        return Ok(GivenInput::Recordings(text.into()));
    }
    let expected = || format!("INPUT=VALUE, INPUT@AXIS=LENGTH or FILE.npz is expected, not '{text}'");
    let (input, value) = text.rsplit_once('=').ok_or_else(expected)?;
    if input.contains('@') {
        let length = value.parse().ok().filter(|&length| length > 0).ok_or_else(expected)?;
        return Ok(GivenInput::Length(input_axis(input)?, length));
    }
    Ok(GivenInput::Value(input.to_owned(), value.parse().map_err(|_| expected())?))
}
