//! The options that the command and its subcommands share, the reasons why nothing was written, and the options that
//! help.

use std::path::{Path, PathBuf};

use stateful_convert::join::JoinError;
use stateful_convert::recordings;
use stateful_convert::verify::{Given, VerifyError};
use stateful_convert::{BuiltinError, ConvertError, Hint, InputAxis, StatePair, state_pairs};

/// What `--version` says. `scripts/release` adds the commit.
pub const VERSION: &str = match option_env!("STATEFUL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

#[derive(clap::Args)]
pub struct Shared {
    /// The converted model. A config.pbtxt goes beside it, or beside its folder if that is named after a version.
    /// Folders that are missing are made
    #[arg(short, long, value_name = "FILE", required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,
    /// What the comparison gives to inputs, as in sr=16000,input@1=576: a value for each element, or the length of an
    /// open axis; and recordings: a file of NumPy, FILE.npz, with arrays of the names of inputs [default: random
    /// values, short axes]
    #[arg(long, value_name = "INPUT=VALUE|FILE.npz", value_delimiter = ',', value_parser = given)]
    pub compare_with: Vec<GivenInput>,
    /// Convert and compare, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
    /// Write no config.pbtxt
    #[arg(long)]
    pub no_config: bool,
    /// Print what was done as JSON
    #[arg(long)]
    pub json: bool,
    /// ONNX Runtime's library [default: ORT_DYLIB_PATH, or libonnxruntime.so of the backend's folder]
    #[arg(long, value_name = "FILE")]
    ort_library: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub enum GivenInput {
    Length(InputAxis, i64),
    Value(String, f64),
    Recordings(PathBuf),
}

impl Shared {
    pub fn given(&self, chunk: Option<i64>) -> Result<Given, Problem> {
        let mut given = Given { chunk, ..Given::default() };
        for input in &self.compare_with {
            match input {
                GivenInput::Length(axis, length) => given.lengths.push((axis.clone(), *length)),
                GivenInput::Value(input, value) => given.values.push((input.clone(), *value)),
                GivenInput::Recordings(path) => {
                    let read = recordings::read(path);
                    given.recordings.extend(read.map_err(|why| Problem::file(path, why))?);
                }
            }
        }
        Ok(given)
    }

    pub fn library(&self) -> Result<PathBuf, Problem> {
        let environment = std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from);
        let program = std::env::current_exe().ok();
        // scripts/build puts the program and the backend there.
        let beside =
            program.and_then(|program| Some(program.parent()?.parent()?.join("backends/stateful/libonnxruntime.so")));
        let found = self.ort_library.clone().or(environment).or(beside.filter(|path| path.exists()));
        found.ok_or(Problem::NoLibrary)
    }
}

pub fn input_axis(text: &str) -> Result<InputAxis, String> {
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
    // The name of an input may have this sign as well, so the last one counts.
    let (input, value) = text.rsplit_once('=').ok_or_else(expected)?;
    if input.contains('@') {
        let length = value.parse().ok().filter(|&length| length > 0).ok_or_else(expected)?;
        return Ok(GivenInput::Length(input_axis(input)?, length));
    }
    Ok(GivenInput::Value(input.to_owned(), value.parse().map_err(|_| expected())?))
}

/// The name of a model's configuration in a model repository.
pub const CONFIG: &str = "config.pbtxt";

#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("the model is missing: stateful-convert --help shows how to name it")]
    NoModel,
    #[error("{} can't be read: {error}", path.display())]
    Unreadable { path: PathBuf, error: std::io::Error },
    #[error("{} can't be written: {error}; nothing was written", path.display())]
    Unwritable { path: PathBuf, error: std::io::Error },
    #[error("{} exists; --force replaces it{}", .0.display(), if is_config(.0) { ", and --no-config leaves it" } else { "" })]
    Exists(PathBuf),
    #[error("{} belongs to the model that is converted: write the result to another file or folder", .0.display())]
    Original(PathBuf),
    #[error("{} would be written twice: choose another name for the model, because two files would get this one", .0.display())]
    Twice(PathBuf),
    /// A file of recordings, tokens or weights, or a model, that can't be used.
    #[error("{}: {why}", path.display())]
    File { path: PathBuf, why: String },
    #[error("{folder} is a folder: write the name of a file in it, such as {folder}/1/model.onnx", folder = .0.display().to_string().trim_end_matches('/'))]
    Folder(PathBuf),
    #[error("-o: the name of a file that ends with .onnx is expected, such as {name}/1/model.onnx, not {name}", name = .0.display())]
    Name(PathBuf),
    #[error("--{option}: {form}, not '{text}'")]
    Form { option: &'static str, form: &'static str, text: String },
    #[error("every input of the model is one of the states {0}, so requests would carry nothing")]
    NothingToCarry(String),
    #[error(
        "no ONNX Runtime library was found to compare the models with: name one with --ort-library or ORT_DYLIB_PATH"
    )]
    NoLibrary,
    #[error("--search: {0}")]
    Search(String),
    #[error("{0}")]
    Graphs(String),
    #[error(
        "--input-context: '{0}' is an input of requests, because no graph gives it: write its context in {CONFIG}, with \
         'input_context'"
    )]
    OuterContext(String),
    #[error(
        "the weights of {} are in {file}, which isn't below the folder of the joined model: write the model to {}, or to a \
         folder above it",
        model.display(), folder.display()
    )]
    Elsewhere { model: PathBuf, file: String, folder: PathBuf },
    #[error("{0}")]
    Join(#[from] JoinError),
    #[error("{0}{advice}", advice = advice(.0))]
    Convert(ConvertError),
    #[error("{0}; nothing was written")]
    Builtin(#[from] BuiltinError),
    #[error("{0}; nothing was written")]
    Verify(#[from] VerifyError),
}

impl Problem {
    pub fn file(path: &Path, why: impl ToString) -> Self {
        Self::File { path: path.to_owned(), why: why.to_string() }
    }
}

pub fn listed<T>(
    (option, form): (&'static str, &'static str),
    text: Option<&String>,
    read: impl FnOnce(&str) -> Option<Vec<T>>,
) -> Result<Vec<T>, Problem> {
    let Some(text) = text else { return Ok(Vec::new()) };
    read(text).ok_or_else(|| Problem::Form { option, form, text: text.clone() })
}

pub fn listed_states(text: Option<&String>) -> Result<Vec<StatePair>, Problem> {
    let form = "'<<<input, output>>>' is expected, with each name in one pair";
    listed(("states", form), text, |text| state_pairs(text).ok())
}

fn is_config(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == CONFIG)
}

fn advice(error: &ConvertError) -> String {
    let options: Vec<&str> = error.hints().into_iter().map(option).collect();
    if options.is_empty() { String::new() } else { format!("\n{}", options.join("; ")) }
}

pub const fn option(hint: Hint) -> &'static str {
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
