//! Why nothing was written, and the options that help.

use std::path::{Path, PathBuf};

use stateful_convert::join::JoinError;
use stateful_convert::verify::VerifyError;
use stateful_convert::{BuiltinError, ConvertError, Hint, WeightsError};

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
    #[error("{}: {why}", path.display())]
    Recordings { path: PathBuf, why: String },
    #[error("{folder} is a folder: write the name of a file in it, such as {folder}/1/model.onnx", folder = .0.display().to_string().trim_end_matches('/'))]
    Folder(PathBuf),
    #[error("-o: the name of a file that ends with .onnx is expected, such as {name}/1/model.onnx, not {name}", name = .0.display())]
    Name(PathBuf),
    #[error("--states: '<<<input, output>>>' is expected, with each name in one pair, not '{0}'")]
    States(String),
    #[error("every input of the model is one of the states {0}, so requests would carry nothing")]
    NothingToCarry(String),
    #[error(
        "no ONNX Runtime library was found to compare the models with: name one with --ort-library or ORT_DYLIB_PATH"
    )]
    NoLibrary,
    #[error("{}: {why}", model.display())]
    Weights { model: PathBuf, why: WeightsError },
    #[error("{}: {error}", model.display())]
    Read { model: PathBuf, error: ConvertError },
    #[error("--wires: '<<<graph.output, graph.input>>>' is expected, not '{0}'")]
    Wires(String),
    #[error("--dims: 'graph.tensor=[batch, 80, 121]' is expected, not '{0}'")]
    Dims(String),
    #[error("--search: {0}")]
    Search(String),
    #[error("{0}")]
    Graphs(String),
    #[error(
        "--input-context: 'graph.input=68@1' is expected, with ':whole' if nothing is prepended at first, not '{0}'"
    )]
    Contexts(String),
    #[error(
        "--input-context: '{0}' is an input of requests, because no graph gives it: write its context in {CONFIG}, with \
         'input_context'"
    )]
    OuterContext(String),
    #[error("{}: {why}", path.display())]
    Pieces { path: PathBuf, why: String },
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
