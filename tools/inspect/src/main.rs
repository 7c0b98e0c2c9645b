//! `stateful-inspect model.onnx`: what the backend makes of a model, and a config.pbtxt to start from.
//!
//! It reads the model with the backend's own code, so what it prints is what a server would do. The table goes to
//! standard error and the configuration to standard output, to be saved.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use serde_json::{Map, Value, json};
use triton_stateful::inspect::{
    EnvironmentOptions, Family, INPUT_WINDOWS, Library, LoadError, LogLevel, PairsFrom, PartialConfig, Prepared,
    Provider, SearchPath, Session, Settings, explain, explain_batch_scale, served,
};

/// Shows what the stateful backend makes of an ONNX model: what each input and output is taken for and why, and the
/// states. Prints a config.pbtxt ready to save.
#[derive(Parser)]
#[command(version = triton_stateful::VERSION)]
struct Arguments {
    /// The model; or a folder of graphs that run one after the other: without the parameter join, it is shown which
    /// known family they are, and how to join them
    model: PathBuf,
    /// A config.pbtxt to begin with. The files that it names are looked for beside it, as a server does
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The dims of an input of requests, as in config.pbtxt: input=1,512. As there, all that requests carry have to be
    /// given if one is
    #[arg(short, long = "dims", value_name = "INPUT=DIM,...", value_parser = dims)]
    dims: Vec<(String, Vec<i64>)>,
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
    #[error("{0} is no folder, and parameter 'join' lists graphs of a folder")]
    NoFolder(PathBuf),
    #[error("{} cannot be read: {why}", path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error(
        "the graphs in {} are none of the known families (it has {has}): list them with --parameter 'join=FIRST.onnx SECOND.onnx', \
         or name one of them",
        folder.display()
    )]
    NoFamily { folder: PathBuf, has: String },
    #[error("the model has no input '{name}' (it has {has})")]
    NoInput { name: String, has: String },
    #[error("the configuration cannot be written: {0}")]
    Write(String),
    #[error(transparent)]
    Backend(#[from] LoadError),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match inspect(&arguments) {
        Ok(Inspected { table, notes, warnings, pbtxt }) => {
            if !arguments.quiet {
                eprintln!("{table}\n");
            }
            for note in notes {
                eprintln!("note: {note}\n");
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
    notes: Vec<String>,
    warnings: Vec<String>,
    pbtxt: String,
}

fn inspect(arguments: &Arguments) -> Result<Inspected, Problem> {
    let mut written = arguments.config()?;
    let mut partial = PartialConfig::new(written.clone()).map_err(LoadError::from)?;
    let is_joined = partial.join.is_some();
    if is_joined && !arguments.model.is_dir() {
        return Err(Problem::NoFolder(arguments.model.clone()));
    }
    if !is_joined && arguments.model.is_dir() {
        let Family { family, commands, note, lines, .. } = family(&arguments.model, &partial, &*library(arguments)?)?;
        let mut table = format!("the graphs are {family}");
        table.extend(commands.iter().map(|command| format!("\n  {command}")));
        if !note.is_empty() {
            table += &format!("\n  {note}");
        }
        let mut pbtxt: String = lines.iter().map(|line| format!("{}\n", line.replace('\'', "\""))).collect();
        if !pbtxt.is_empty() {
            pbtxt.insert_str(0, "backend: \"stateful\"\ninstance_group [ { kind: KIND_CPU } ]\n");
        }
        return Ok(Inspected { table, notes: Vec::new(), warnings: Vec::new(), pbtxt });
    }
    if !is_joined && !arguments.model.is_file() {
        return Err(Problem::NoFile(arguments.model.clone()));
    }
    // The file is in the folder of its version. The files of initial states are beside that folder.
    let version_dir = if is_joined { &arguments.model } else { arguments.model.parent().unwrap_or(Path::new("")) };
    let library = library(arguments)?;
    let settings = Settings { completes: true, default_max_batch_size: 0, rows_mix: false };
    let serve =
        |partial: &mut PartialConfig| served(partial, version_dir, &library, settings, |_| Ok(arguments.model.clone()));
    if !arguments.dims.is_empty() {
        let model = if is_joined { serve(&mut partial)?.model } else { arguments.model.clone().into() };
        let session = Session::open(&library, &model, &partial.session, Provider::Cpu).map_err(LoadError::from)?;
        list_inputs(&mut written, &arguments.dims, &session)?;
        partial = PartialConfig::new(written).map_err(LoadError::from)?;
    }
    let served = serve(&mut partial)?;
    let session = Session::open(&library, &served.model, &partial.session, Provider::Cpu).map_err(LoadError::from)?;
    let session = Arc::new(session);
    let beside = arguments.config.as_deref().and_then(Path::parent);
    let repository = beside.or(version_dir.parent()).unwrap_or(Path::new(".."));
    let mut prepared =
        Prepared::new(&mut partial, &session, &served.model, repository, settings, || Ok(session.clone()))?;
    prepared.load_initial_model(served.initial_states, version_dir, &library)?;
    let Prepared { config, binding, plan, .. } = prepared;
    let mut completed = partial.document.as_object().cloned().unwrap_or_default();
    let pairs: Vec<String> = plan.pairs.iter().map(ToString::to_string).collect();
    // Without an instance group Triton uses a GPU if there is one.
    completed.entry("instance_group").or_insert_with(|| json!([{ "kind": "KIND_CPU" }]));
    // People write the parameters last.
    let mut parameters = completed.shift_remove("parameters").unwrap_or_default();
    // The states of a model that was converted at load are not in its file.
    if !pairs.is_empty() && plan.origins.pairs != PairsFrom::Conversion {
        parameters["state_pairs"] = json!({ "string_value": pairs.join(" ") });
    }
    completed.insert("parameters".to_owned(), parameters);
    let mut table = explain(&config, &binding, &session.signature, plan.origins);
    if let Some(scale) = plan.nodes.batch_scale.filter(|_| config.is_batched()) {
        table += &format!("\n{}", explain_batch_scale(&scale, &config));
    }
    if let Some(rows) = &plan.rows {
        table += &format!("\n{rows}");
    }
    let of_binding = binding.warnings(&config, &session.signature);
    // The notes of a known model already have the line.
    let is_proposed = plan.notes.iter().any(|note| note.contains(INPUT_WINDOWS));
    let could_be_cut = if is_proposed { None } else { binding.could_be_cut() };
    Ok(Inspected {
        table,
        notes: served.notes.into_iter().chain(plan.notes).chain(could_be_cut).collect(),
        warnings: served.warnings.into_iter().chain(plan.warnings).chain(of_binding).collect(),
        pbtxt: stateful_pbtxt::write(&completed).map_err(Problem::Write)?,
    })
}

impl Arguments {
    fn config(&self) -> Result<Map<String, Value>, Problem> {
        let mut config = match &self.config {
            Some(file) => {
                let wrong = |why: String| Problem::Unreadable { path: file.clone(), why };
                // A device or a pipe may never end.
                if !file.is_file() {
                    return Err(wrong("it is no file".to_owned()));
                }
                let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
                stateful_pbtxt::read(&text).map_err(wrong)?
            }
            None => Map::from_iter([("backend".to_owned(), json!("stateful"))]),
        };
        if let Some(size) = self.max_batch_size {
            config.insert("max_batch_size".to_owned(), json!(size));
        }
        let parameters = config.entry("parameters").or_insert_with(|| json!({}));
        for (name, value) in &self.parameters {
            parameters[name] = json!({ "string_value": value });
        }
        Ok(config)
    }
}

/// The family of the folder's graphs.
fn family(folder: &Path, partial: &PartialConfig, library: &Library) -> Result<Family, Problem> {
    let unreadable = |error: std::io::Error| Problem::Unreadable { path: folder.to_owned(), why: error.to_string() };
    let entries = std::fs::read_dir(folder).map_err(unreadable)?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    // A folder has no order, and the text of an error should be the same each time.
    files.sort();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (mut graphs, mut others, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    for file in files {
        if file.extension().is_none_or(|extension| extension != "onnx") {
            others.push(name(&file));
            continue;
        }
        match Session::open(library, &file.clone().into(), &partial.session, Provider::Cpu) {
            Ok(session) => graphs.push((name(&file), session.signature.clone())),
            Err(error) => refused.push(format!("{}: {error}", name(&file))),
        }
    }
    Family::of(&graphs, &others, &folder.display().to_string()).ok_or_else(|| {
        let all: Vec<String> = graphs.into_iter().map(|(file, _)| file).chain(refused).collect();
        let has = if all.is_empty() { "no .onnx file".to_owned() } else { all.join(", ") };
        Problem::NoFamily { folder: folder.to_owned(), has }
    })
}

/// Gives inputs these dims under `input`.
fn list_inputs(config: &mut Map<String, Value>, dims: &[(String, Vec<i64>)], session: &Session) -> Result<(), Problem> {
    let Value::Array(listed) = config.entry("input").or_insert_with(|| json!([])) else { return Ok(()) };
    for (name, dims) in dims {
        let signature = &session.signature;
        let Some(info) = signature.inputs.iter().chain(&signature.defaults).find(|info| info.name == *name) else {
            return Err(Problem::NoInput { name: name.clone(), has: signature.input_names().join(", ") });
        };
        let entry = json!({ "name": name, "data_type": info.data_type.to_string(), "dims": dims });
        match listed.iter_mut().find(|tensor| tensor["name"] == **name) {
            Some(tensor) => *tensor = entry,
            None => listed.push(entry),
        }
    }
    Ok(())
}

fn library(arguments: &Arguments) -> Result<Arc<Library>, LoadError> {
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

fn dims(text: &str) -> Result<(String, Vec<i64>), String> {
    let expected = || "INPUT=DIM,DIM is expected, such as input=1,512; -1 is any length".to_owned();
    let (name, dims) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(expected)?;
    let dim = |dim: &str| dim.trim().parse().ok().filter(|&dim| dim >= -1).ok_or_else(expected);
    Ok((name.to_owned(), dims.split(',').map(dim).collect::<Result<_, _>>()?))
}

fn parameter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("NAME=VALUE is expected".to_owned()),
    }
}
