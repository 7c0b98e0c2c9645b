//! `stateful-convert graph`: writes a built-in graph.

use std::path::PathBuf;

use clap::Args;
use stateful_convert::builtin;
use stateful_convert::names::pairs_by_names;
use stateful_convert::onnx::schema::ModelProto;
use stateful_convert::onnx::write;

use crate::files::{Content, Targets, write_files};
use crate::problem::Problem;
use crate::texts::tensors;

// Serves the model as it is; a host with a GPU would place it there otherwise.
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
    /// The graph's file. If the graph has states, a config.pbtxt goes beside it, or beside its folder if that is named after a
    /// version. Folders that are missing are made
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
    /// Write no config.pbtxt
    #[arg(long)]
    no_config: bool,
}

pub fn graph(arguments: &GraphArguments) -> Result<String, Problem> {
    let options: Vec<&str> = arguments.options.iter().map(String::as_str).collect();
    let model = builtin(&arguments.graph, &options)?;
    let bytes = write(&model);
    // Without states, it is a part of other models, and isn't served by itself.
    let targets = Targets::new(&arguments.output, !arguments.no_config && has_states(&model));
    let config = targets.config().map(|path| (path.to_owned(), Content::Bytes(CONFIGURATION.as_bytes())));
    let files: Vec<(PathBuf, Content)> =
        [(targets.model().to_owned(), Content::Bytes(&bytes))].into_iter().chain(config).collect();
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
