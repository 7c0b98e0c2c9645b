//! `stateful-convert model.onnx -o streaming.onnx`: converts a model, compares it with the original, and writes it with
//! a config.pbtxt.

mod pbtxt;
mod recordings;
mod table;
mod work_folder;

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bytes::Bytes;
use clap::Parser;
use serde_json::json;
use stateful_convert::onnx::Dim;
use stateful_convert::report::{Report, Role, StepInput, Warning};
use stateful_convert::verify::{self, Compared, Given, Models, Source, VerifyError};
use stateful_convert::{
    ConvertError, Converted, Hint, InputAxis, Options, Pair, WeightsError, convert, pairs, with_small_weights_shown,
};
use work_folder::{WorkFolder, make_parent};

/// What `--version` says. `scripts/release` adds the commit.
const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// Converts an ONNX model for serving in steps: gives it state inputs and outputs, opens its batch, or names its states; and
/// compares it with the original
#[derive(Parser)]
#[command(version = VERSION)]
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

/// The name of a model's configuration in a model repository.
const CONFIG: &str = "config.pbtxt";

/// What the comparison gives to an input.
#[derive(Clone, Debug)]
enum GivenInput {
    Length(InputAxis, i64),
    Value(String, f64),
    Recordings(PathBuf),
}

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{} can't be read: {error}", path.display())]
    Unreadable { path: PathBuf, error: std::io::Error },
    #[error("{} can't be written: {error}; nothing was written", path.display())]
    Unwritable { path: PathBuf, error: std::io::Error },
    #[error("{} exists; --force replaces it{}", .0.display(), if is_config(.0) { ", and --no-config leaves it" } else { "" })]
    Exists(PathBuf),
    #[error("{} belongs to the model that is converted: write the result to another file or folder", .0.display())]
    Original(PathBuf),
    #[error("{} would be written twice, as two files: choose another name for the model", .0.display())]
    Twice(PathBuf),
    #[error("{}: {why}", path.display())]
    Recordings { path: PathBuf, why: String },
    #[error("{folder} is a folder: write the name of a file in it, such as {folder}/1/model.onnx", folder = .0.display().to_string().trim_end_matches('/'))]
    Folder(PathBuf),
    #[error("-o: the name of a file that ends with .onnx is expected, such as {name}/1/model.onnx, not {name}", name = .0.display())]
    Name(PathBuf),
    #[error("--states: '<<<input, output>>>' is expected, with each name in one pair, not '{0}'")]
    States(String),
    #[error("--states: every input of the model is one of the states {0}, so requests would carry nothing")]
    NothingToCarry(String),
    #[error(
        "no ONNX Runtime library was found to compare the models with: name one with --ort-library or ORT_DYLIB_PATH"
    )]
    NoLibrary,
    #[error("{}: {why}", model.display())]
    Weights { model: PathBuf, why: WeightsError },
    #[error("{}: {error}", model.display())]
    Read { model: PathBuf, error: ConvertError },
    #[error("{0}{advice}", advice = advice(.0))]
    Convert(ConvertError),
    #[error("{0}; nothing was written")]
    Verify(#[from] VerifyError),
}

fn is_config(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == CONFIG)
}

/// The options that help.
fn advice(error: &ConvertError) -> String {
    let options: Vec<&str> = error.hints().into_iter().map(option).collect();
    if options.is_empty() { String::new() } else { format!("\n{}", options.join("; ")) }
}

fn with_option(warning: &Warning) -> String {
    warning.hint().map_or_else(|| warning.to_string(), |hint| format!("{warning}; {}", option(hint)))
}

/// The option for a hint.
const fn option(hint: Hint) -> &'static str {
    match hint {
        Hint::Time => "name the axis of the steps with --time INPUT@AXIS",
        Hint::States => {
            "if the model has state inputs, name the pairs with --states (stateful-inspect prints those that their names \
             tell)"
        }
        Hint::Batch => "--batch-axis INPUT@AXIS says which it is",
        Hint::OpenBatch => "--open-batch lets them",
        Hint::StartAtZero => "--zero-initial-states starts them at zero",
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
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
        Some(text) => pairs(text).ok_or_else(|| Problem::States(text.clone()))?,
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
        targets.check(arguments, &folder)?;
    }
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
    let mut text = table::table(&converted.report, &compared, &warnings);
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
        let is_only = inputs.iter().filter(|input| alike(input.elem, &input.dims)).count() == 1;
        is_only.then(|| Pair { input: input.name.clone(), output: output.name.clone() }.to_string())
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

/// The files that are written.
struct Targets {
    model: PathBuf,
    initial_states: PathBuf,
    config: Option<PathBuf>,
}

impl Targets {
    fn new(output: &Path, with_config: bool) -> Self {
        let folder = output.parent().unwrap_or(Path::new(""));
        let stem = output.file_stem().unwrap_or_default().to_string_lossy();
        let is_version = folder.file_name().is_some_and(|name| name.to_string_lossy().parse::<u64>().is_ok());
        let of_config = if is_version { folder.parent().unwrap_or(Path::new("")) } else { folder };
        Self {
            model: output.to_owned(),
            initial_states: folder.join(format!("{stem}_initial_states.onnx")),
            config: with_config.then(|| of_config.join(CONFIG)),
        }
    }

    fn folder(&self) -> &Path {
        self.model.parent().unwrap_or(Path::new(""))
    }

    /// The files that this model needs.
    fn names(&self, converted: &Converted) -> Vec<PathBuf> {
        let initial_states = converted.initial_states.as_ref().map(|_| self.initial_states.clone());
        [Some(self.model.clone()), initial_states, self.config.clone()].into_iter().flatten().collect()
    }

    /// What is written: these, and the files of weights.
    fn written(&self, converted: &Converted, folder: &WorkFolder) -> Vec<PathBuf> {
        let mut files = self.names(converted);
        let weights = folder.weights_of(self.folder());
        files.splice(1..1, weights);
        files
    }

    fn check_folders(&self, converted: &Converted) -> Result<(), Problem> {
        let ends_as_folder = self.model.as_os_str().to_string_lossy().ends_with('/');
        match self.names(converted).into_iter().find(|path| path.is_dir() || ends_as_folder) {
            Some(folder) => Err(Problem::Folder(folder)),
            None if self.model.extension().is_none() => Err(Problem::Name(self.model.clone())),
            None => Ok(()),
        }
    }

    /// Refuses to change files of the original, and others without `--force`.
    fn check(&self, arguments: &Arguments, folder: &WorkFolder) -> Result<(), Problem> {
        // Initial states of the model that is replaced are removed.
        let own = [Some(self.model.clone()), Some(self.initial_states.clone()), self.config.clone()];
        let changed: Vec<PathBuf> = own.into_iter().flatten().chain(folder.weights_of(self.folder())).collect();
        let original: Vec<PathBuf> = folder.weights().chain([arguments.model.clone()]).collect();
        for (index, path) in changed.iter().enumerate() {
            if changed[..index].contains(path) {
                return Err(Problem::Twice(path.clone()));
            }
            if original.iter().any(|of| is_same_file(of, path)) {
                return Err(Problem::Original(path.clone()));
            }
        }
        match changed.into_iter().find(|path| path.exists()) {
            Some(path) if !arguments.force => Err(Problem::Exists(path)),
            _ => Ok(()),
        }
    }

    /// Writes all files, or none.
    fn write(&self, folder: &WorkFolder, converted: &Converted, chunk: Option<i64>) -> Result<(), Problem> {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let initial_states = converted.initial_states.as_ref().map(|_| name(&self.initial_states));
        let config = pbtxt::config(&converted.report, &name(&self.model), initial_states.as_deref(), chunk);
        let weights = folder.weights().zip(folder.weights_of(self.folder()));
        let mut files: Vec<(PathBuf, Content)> = weights.map(|(from, to)| (to, Content::CopyOf(from))).collect();
        let bytes = converted.initial_states.as_deref();
        files.extend(bytes.map(|bytes| (self.initial_states.clone(), Content::Bytes(bytes))));
        files.push((self.model.clone(), Content::Bytes(&converted.model)));
        files.extend(self.config.as_ref().map(|path| (path.clone(), Content::Bytes(config.as_bytes()))));
        let done = write_parts(&files)
            .and_then(|()| files.iter().try_for_each(|(path, _)| fs::rename(part(path), path).map_err(at(path))));
        if done.is_err() {
            files.iter().for_each(|(path, _)| _ = fs::remove_file(part(path)));
        } else if converted.initial_states.is_none() && self.initial_states.exists() {
            // That of the model which is replaced.
            fs::remove_file(&self.initial_states).map_err(at(&self.initial_states))?;
        }
        done
    }
}

/// What a file gets.
enum Content<'a> {
    Bytes(&'a [u8]),
    /// Links would change with the original.
    CopyOf(PathBuf),
}

/// Where a file is until all are written.
fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn write_parts(files: &[(PathBuf, Content)]) -> Result<(), Problem> {
    files.iter().try_for_each(|(path, content)| {
        make_parent(path)?;
        let written = match content {
            Content::Bytes(bytes) => fs::write(part(path), bytes),
            Content::CopyOf(from) => fs::copy(from, part(path)).map(|_| ()),
        };
        written.map_err(at(path))
    })
}

/// Whether two names are one file, through links, too.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    id(a).is_some() && id(a) == id(b)
}

/// Names the file that can't be written.
fn at(path: &Path) -> impl Fn(std::io::Error) -> Problem {
    let path = path.to_owned();
    move |error| Problem::Unwritable { path: path.clone(), error }
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
