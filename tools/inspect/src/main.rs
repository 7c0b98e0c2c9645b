//! `stateful-inspect model.onnx`: what the backend makes of a model, and a config.pbtxt to start from.
//!
//! It reads the model with the backend's own code, so what it prints is what a server would do. The table goes to
//! standard error and the configuration to standard output, to be saved.

mod pbtxt;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use serde_json::{Map, Value, json};
use triton_stateful::inspect::{
    Binding, EnvironmentOptions, Library, LoadError, LogLevel, PartialConfig, Plan, Provider, SearchPath, Session,
    Settings, explain, explain_batch_scale, read_initial_files,
};

/// Shows what the stateful backend makes of an ONNX model: what each input and output is taken for and why, and the
/// states. Prints a config.pbtxt ready to save.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The model
    model: PathBuf,
    /// A parameter of the backend, as in config.pbtxt: state_pairs, state_pair_patterns, constant_inputs,
    /// input_context, initial_states, state_dims, padded_inputs, padded_outputs and so on
    #[arg(short, long = "parameter", value_name = "NAME=VALUE", value_parser = parameter)]
    parameters: Vec<(String, String)>,
    /// Most rows of a batch, for a model with a batch dimension [default: 64]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_batch_size: Option<u32>,
    /// ONNX Runtime's library [default: ORT_DYLIB_PATH, or libonnxruntime.so of the backend's folder]
    #[arg(long, value_name = "FILE")]
    ort_library: Option<PathBuf>,
    /// No table, only the configuration
    #[arg(short, long)]
    quiet: bool,
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{0} is no file")]
    NoFile(PathBuf),
    #[error(transparent)]
    Backend(#[from] LoadError),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match inspect(&arguments) {
        Ok(Inspected { table, warnings, pbtxt }) => {
            if !arguments.quiet {
                eprintln!("{table}\n");
            }
            for warning in warnings {
                eprintln!("warning: {warning}\n");
            }
            print!("{pbtxt}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("stateful-inspect: {problem}");
            ExitCode::FAILURE
        }
    }
}

struct Inspected {
    table: String,
    warnings: Vec<String>,
    pbtxt: String,
}

fn inspect(arguments: &Arguments) -> Result<Inspected, Problem> {
    if !arguments.model.is_file() {
        return Err(Problem::NoFile(arguments.model.clone()));
    }
    let mut partial = PartialConfig::new(arguments.config()).map_err(LoadError::from)?;
    let library = library(arguments)?;
    let session =
        Session::open(&library, &arguments.model, &partial.session, Provider::Cpu).map_err(LoadError::from)?;
    let settings = Settings { completes: true, default_max_batch_size: 0 };
    let (signature, description) = (session.signature(), session.graph_description());
    let names = (signature.input_names(), signature.output_names());
    partial.take_id_tensors(&names.0, &names.1, settings.completes).map_err(LoadError::from)?;
    let plan = Plan::new(&partial, &arguments.model, signature, description, settings).map_err(LoadError::from)?;
    partial.add(&plan.additions);
    let mut completed = partial.document().as_object().cloned().unwrap_or_default();
    let config = partial.resolve().map_err(LoadError::from)?;
    // The file is in the folder of its version. The files of initial states are beside that folder.
    let repository = arguments.model.parent().and_then(Path::parent).unwrap_or(Path::new(".."));
    let files = read_initial_files(repository, config.states.initial_files()).map_err(LoadError::from)?;
    let binding = Binding::new(&config, &plan.pairs, signature, &files).map_err(LoadError::from)?;
    let pairs: Vec<String> = plan.pairs.iter().map(ToString::to_string).collect();
    // Without an instance group Triton uses a GPU if there is one.
    completed.entry("instance_group").or_insert_with(|| json!([{ "kind": "KIND_CPU" }]));
    // People write the parameters last.
    let mut parameters = completed.shift_remove("parameters").unwrap_or_default();
    parameters["state_pairs"] = json!({ "string_value": pairs.join(" ") });
    completed.insert("parameters".to_owned(), parameters);
    let mut table = explain(&config, &binding, signature, plan.origins);
    if let Some(scale) = plan.batch_scale.filter(|_| config.is_batched()) {
        table += &format!("\n{}", explain_batch_scale(&scale, &config));
    }
    let doubts = binding.doubts(&config, signature);
    let warnings = plan.warnings.into_iter().chain(doubts).collect();
    Ok(Inspected { table, warnings, pbtxt: pbtxt::write(&completed) })
}

impl Arguments {
    /// The configuration as far as the arguments give it.
    fn config(&self) -> Map<String, Value> {
        let text = |(name, value): &(String, String)| (name.clone(), json!({ "string_value": value }));
        let parameters: Map<String, Value> = self.parameters.iter().map(text).collect();
        let mut config = Map::new();
        config.insert("backend".to_owned(), json!("stateful"));
        if let Some(size) = self.max_batch_size {
            config.insert("max_batch_size".to_owned(), json!(size));
        }
        config.insert("parameters".to_owned(), Value::Object(parameters));
        config
    }
}

fn library(arguments: &Arguments) -> Result<std::sync::Arc<Library>, LoadError> {
    let program = std::env::current_exe().ok();
    let beside = |folder: &str| program.as_ref()?.parent()?.parent().map(|build| build.join(folder));
    let search = SearchPath {
        configured: arguments.ort_library.clone(),
        // scripts/build puts the program and the backend there.
        backend_dir: beside("backends/stateful"),
        environment: std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()).map(PathBuf::from),
        backends_dir: None,
    };
    let options = EnvironmentOptions { log_level: LogLevel::Error, global_threads: None };
    Ok(Library::load(&search, options)?)
}

fn parameter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE is expected".to_owned()),
    }
}
