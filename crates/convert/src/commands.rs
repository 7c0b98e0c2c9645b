//! `stateful-convert graph`: writes a built-in graph.

use std::path::{Path, PathBuf};

use clap::Args;
use stateful_convert::builtin;
use stateful_convert::names::pairs_by_names;
use stateful_convert::onnx::schema::ModelProto;
use stateful_convert::onnx::write;

use crate::files::{Content, write_files};
use crate::problem::{CONFIG, Problem};
use crate::texts::tensors;

/// Serves the model as it is; a host with a GPU would place it there otherwise.
const CONFIGURATION: &str = "backend: \"stateful\"\ninstance_group [ { kind: KIND_CPU } ]\n";

/// Writes a built-in graph: filter banks of speech, or a Fourier transform
#[derive(Args)]
pub struct GraphArguments {
    /// The graph: fbank:kaldi, mel:nemo, stft, istft, irfft or overlap_add
    #[arg(value_name = "GRAPH")]
    graph: String,
    /// Options of the graph, such as num_mel_bins=40; docs/convert.md lists them
    #[arg(value_name = "OPTION=VALUE")]
    options: Vec<String>,
    /// A file that ends with .onnx, or the folder of a model in a repository, which gets 1/model.onnx and a config.pbtxt
    #[arg(short, long, value_name = "FILE|FOLDER")]
    output: PathBuf,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
}

/// Writes the graph and says what it has.
pub fn graph(arguments: &GraphArguments) -> Result<String, Problem> {
    let options: Vec<&str> = arguments.options.iter().map(String::as_str).collect();
    let model = builtin(&arguments.graph, &options)?;
    let bytes = write(&model);
    let is_file = arguments.output.extension().is_some_and(|extension| extension == "onnx");
    let files = if is_file {
        vec![(arguments.output.clone(), Content::Bytes(&bytes))]
    } else if !has_states(&model) {
        return Err(Problem::Stateless { graph: arguments.graph.clone(), folder: arguments.output.clone() });
    } else {
        let (model, config) = (arguments.output.join("1/model.onnx"), arguments.output.join(CONFIG));
        vec![(model, Content::Bytes(&bytes)), (config, Content::Bytes(CONFIGURATION.as_bytes()))]
    };
    check(&files, arguments.force)?;
    write_files(&files)?;
    let mut text = format!("{}\n\n{}", model.doc_string(), tensors(&model));
    for (path, _) in &files {
        text += &format!("\nwritten: {}", path.display());
    }
    Ok(text)
}

/// Whether the backend would serve the graph by itself: its states have names that show them.
fn has_states(model: &ModelProto) -> bool {
    model.graph.as_ref().is_some_and(|graph| pairs_by_names(graph).is_ok_and(|pairs| !pairs.is_empty()))
}

/// Refuses to replace files without `--force`, and folders at all.
fn check(files: &[(PathBuf, Content)], force: bool) -> Result<(), Problem> {
    let paths = || files.iter().map(|(path, _)| path.as_path());
    if let Some(folder) = paths().find(|path| path.is_dir()) {
        return Err(Problem::Folder(folder.to_owned()));
    }
    match paths().find(|path| path.exists()) {
        Some(path) if !force => Err(Problem::Exists(Path::to_owned(path))),
        _ => Ok(()),
    }
}
