//! Writes the files of a converted model, and its config.pbtxt. The model is in a work folder until it is compared.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use stateful_convert::onnx::{Dim, type_name};
use stateful_convert::report::{Report, Role, StartsAt, State, StepInput};
use stateful_convert::verify::Compared;
use stateful_convert::{Converted, path_in};

use crate::options::{CONFIG, Problem, Shared};
use crate::texts::done;

pub struct Origin<'a> {
    /// The files of the source models, which are never overwritten.
    pub files: &'a [&'a Path],
    /// The folder of this file contains the weights that are in files of their own.
    pub beside: &'a Path,
    /// The name of the model that is compared with, as in `the original`.
    pub compared_with: &'a str,
    pub chunk: Option<i64>,
}

/// Compares the model by `compare`, writes the resulting model, and says what was done.
pub fn finish(
    converted: Converted,
    origin: &Origin,
    shared: &Shared,
    compare: impl FnOnce(&WorkFolder, Converted) -> Result<(Converted, Vec<Compared>), Problem>,
) -> Result<String, Problem> {
    if converted.report.inputs.is_empty() {
        let pairs: Vec<String> = converted.report.states.iter().map(|state| state.pair.to_string()).collect();
        return Err(Problem::NothingToCarry(pairs.join(" ")));
    }
    let targets = Targets::of(shared);
    if let Some(targets) = &targets {
        targets.check_folders(&targets.names(&converted))?;
    }
    let folder = WorkFolder::new(origin.beside, &converted, targets.as_ref().map(Targets::folder))?;
    if let Some(targets) = &targets {
        targets.check(origin.files, shared.force, &folder)?;
    }
    let (converted, compared) = compare(&folder, converted)?;
    if let Some(targets) = &targets {
        targets.write(&folder, &converted, origin.chunk)?;
    }
    let written = targets.map(|targets| {
        let mut files = targets.names(&converted);
        files.splice(1..1, folder.weights_of(targets.folder()));
        files
    });
    Ok(done(&converted.report, &compared, written.as_deref(), shared, origin.compared_with))
}

/// A temporary folder with the converted model and the original's files of weights. It is removed in the end.
pub struct WorkFolder {
    path: PathBuf,
    pub model: PathBuf,
    /// A form of the original that ONNX Runtime can run, if it can't run the original itself.
    pub original: PathBuf,
    pub initial_states: PathBuf,
    source: PathBuf,
    weights: Vec<String>,
}

impl WorkFolder {
    pub fn new(original: &Path, converted: &Converted, beside: Option<&Path>) -> Result<Self, Problem> {
        let source = here(original.parent()).to_owned();
        let weights = converted.weights.clone();
        for file in &weights {
            path_in(&source, file).map_err(|why| Problem::file(original, why))?;
        }
        // Links to weights need the same file system.
        let near = [beside, Some(source.as_path())].into_iter().flatten().filter(|_| !weights.is_empty());
        let folder = near.map(Path::to_owned).chain([std::env::temp_dir()]);
        let folder = folder.map(|folder| folder.join(format!(".stateful-convert-{}", std::process::id())));
        // A folder that cannot be written to is no error while another one can.
        let mut result = Err(std::io::ErrorKind::NotFound.into());
        let mut path = PathBuf::new();
        for candidate in folder {
            result = fs::create_dir(&candidate);
            path = candidate;
            if result.is_ok() {
                break;
            }
        }
        result.map_err(at(&path))?;
        let [model, original, initial_states] =
            ["converted.onnx", "original.onnx", "initial_states.onnx"].map(|name| path.join(name));
        let folder = Self { path, model, original, initial_states, source, weights };
        for file in &folder.weights {
            let (from, to) = (folder.source.join(file), folder.path.join(file));
            make_parent(&to)?;
            // ONNX Runtime refuses symbolic links. Only another file system needs a copy.
            fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(|_| ())).map_err(at(&to))?;
        }
        let files = [
            (&folder.model, Some(&converted.model)),
            (&folder.original, converted.original.as_ref()),
            (&folder.initial_states, converted.initial_states.as_ref()),
        ];
        for (path, bytes) in files.iter().filter_map(|(path, bytes)| Some((path, (*bytes)?))) {
            // If a file of weights had this name, writing would follow the link and overwrite it.
            fs::File::create_new(path).and_then(|mut file| file.write_all(bytes)).map_err(at(path))?;
        }
        Ok(folder)
    }

    pub fn weights(&self) -> impl Iterator<Item = PathBuf> {
        self.weights.iter().map(|file| self.source.join(file))
    }

    /// The files of weights that another folder needs. The original's folder needs none.
    pub fn weights_of(&self, to: &Path) -> Vec<PathBuf> {
        let to = here(Some(to));
        if to.canonicalize().ok() == self.source.canonicalize().ok() {
            return Vec::new();
        }
        self.weights.iter().map(|file| to.join(file)).collect()
    }
}

/// The folder. An empty path means the current one.
pub fn here(folder: Option<&Path>) -> &Path {
    folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

pub fn make_parent(path: &Path) -> Result<(), Problem> {
    path.parent().map_or(Ok(()), |parent| fs::create_dir_all(parent).map_err(at(parent)))
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // If this fails, the system's folder of temporary files keeps it.
        let _ = fs::remove_dir_all(&self.path);
    }
}

pub struct Targets {
    pub model: PathBuf,
    initial_states: PathBuf,
    pub config: Option<PathBuf>,
}

impl Targets {
    /// Nothing is written if only a comparison is asked for.
    pub fn of(options: &Shared) -> Option<Self> {
        let output = options.output.as_deref().filter(|_| !options.dry_run);
        output.map(|output| Self::new(output, !options.no_config))
    }

    pub fn new(output: &Path, with_config: bool) -> Self {
        let folder = output.parent().unwrap_or(Path::new(""));
        let stem = output.file_stem().unwrap_or_default().to_string_lossy();
        // Triton wants the configuration above the folders of the versions.
        let is_version = folder.file_name().is_some_and(|name| name.to_string_lossy().parse::<u64>().is_ok());
        let of_config = if is_version { folder.parent().unwrap_or(Path::new("")) } else { folder };
        Self {
            model: output.to_owned(),
            initial_states: folder.join(format!("{stem}_initial_states.onnx")),
            config: with_config.then(|| of_config.join(CONFIG)),
        }
    }

    pub fn folder(&self) -> &Path {
        self.model.parent().unwrap_or(Path::new(""))
    }

    pub fn names(&self, converted: &Converted) -> Vec<PathBuf> {
        let initial_states = converted.initial_states.as_ref().map(|_| self.initial_states.clone());
        [Some(self.model.clone()), initial_states, self.config.clone()].into_iter().flatten().collect()
    }

    pub fn check_folders(&self, names: &[PathBuf]) -> Result<(), Problem> {
        let ends_as_folder = self.model.as_os_str().to_string_lossy().ends_with('/');
        match names.iter().find(|path| path.is_dir() || ends_as_folder).cloned() {
            Some(folder) => Err(Problem::Folder(folder)),
            None if self.model.extension().is_none() => Err(Problem::Name(self.model.clone())),
            None => Ok(()),
        }
    }

    /// Refuses to overwrite files of the original, and without `--force` any file.
    pub fn check(&self, converted_from: &[&Path], force: bool, folder: &WorkFolder) -> Result<(), Problem> {
        // The initial states of a replaced model are removed.
        let own = [Some(self.model.clone()), Some(self.initial_states.clone()), self.config.clone()];
        let changed: Vec<PathBuf> = own.into_iter().flatten().chain(folder.weights_of(self.folder())).collect();
        let original: Vec<PathBuf> =
            folder.weights().chain(converted_from.iter().map(|path| path.to_path_buf())).collect();
        for (index, path) in changed.iter().enumerate() {
            if changed[..index].contains(path) {
                return Err(Problem::Twice(path.clone()));
            }
            if original.iter().any(|of| is_same_file(of, path)) {
                return Err(Problem::Original(path.clone()));
            }
        }
        match changed.into_iter().find(|path| path.exists()) {
            Some(path) if !force => Err(Problem::Exists(path)),
            _ => Ok(()),
        }
    }

    /// Writes all files, or none.
    pub fn write(&self, folder: &WorkFolder, converted: &Converted, chunk: Option<i64>) -> Result<(), Problem> {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let initial_states = converted.initial_states.as_ref().map(|_| name(&self.initial_states));
        let config = config(&converted.report, &name(&self.model), initial_states.as_deref(), chunk);
        let weights = folder.weights().zip(folder.weights_of(self.folder()));
        let mut files: Vec<(PathBuf, Content)> = weights.map(|(from, to)| (to, Content::CopyOf(from))).collect();
        let bytes = converted.initial_states.as_deref();
        files.extend(bytes.map(|bytes| (self.initial_states.clone(), Content::Bytes(bytes))));
        files.push((self.model.clone(), Content::Bytes(&converted.model)));
        files.extend(self.config.as_ref().map(|path| (path.clone(), Content::Bytes(config.as_bytes()))));
        write_files(&files)?;
        if converted.initial_states.is_none() && self.initial_states.exists() {
            // It belongs to the replaced model.
            fs::remove_file(&self.initial_states).map_err(at(&self.initial_states))?;
        }
        Ok(())
    }
}

/// Writes all files, or none.
pub fn write_files(files: &[(PathBuf, Content)]) -> Result<(), Problem> {
    // A rename is atomic, and all files are complete by then.
    let write = |(path, content): &(PathBuf, Content)| {
        make_parent(path)?;
        let written = match content {
            Content::Bytes(bytes) => fs::write(part(path), bytes),
            Content::CopyOf(from) => fs::copy(from, part(path)).map(|_| ()),
        };
        written.map_err(at(path))
    };
    let rename = |(path, _): &(PathBuf, Content)| fs::rename(part(path), path).map_err(at(path));
    let done = files.iter().try_for_each(write).and_then(|()| files.iter().try_for_each(rename));
    if done.is_err() {
        // Half-written files would look like a result.
        files.iter().for_each(|(path, _)| _ = fs::remove_file(part(path)));
    }
    done
}

pub enum Content<'a> {
    Bytes(&'a [u8]),
    // A copy, because a link would change with the original.
    CopyOf(PathBuf),
}

fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    id(a).is_some() && id(a) == id(b)
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> Problem {
    let path = path.to_owned();
    move |error| Problem::Unwritable { path: path.clone(), error }
}

const MAX_BATCH_SIZE: i64 = 64;

/// The configuration. What it leaves out, the backend fills in.
fn config(report: &Report, model: &str, initial_states: Option<&str>, chunk: Option<i64>) -> String {
    let mut text = "backend: \"stateful\"\n".to_owned();
    // Triton looks for this name by itself.
    if model != "model.onnx" {
        text += &format!("default_model_filename: {}\n", quoted(model));
    }
    if let Some(chunk) = chunk {
        text += &signature(report, chunk);
    }
    text += "instance_group [ { kind: KIND_CPU } ]\n";
    let pairs: Vec<String> = report.states.iter().map(|state| state.pair.to_string()).collect();
    text += &parameter("state_pairs", &pairs.join(" "));
    if let Some(file) = initial_states {
        text += &parameter("initial_state_model", file);
    }
    let value = |state: &State| match state.starts_at {
        StartsAt::Value(value) => Some(format!("{}={value}", state.pair.input)),
        _ => None,
    };
    let values: Vec<String> = report.states.iter().filter_map(value).collect();
    if !values.is_empty() {
        text += &parameter("initial_states", &values.join(" "));
    }
    text
}

fn parameter(name: &str, value: &str) -> String {
    format!("parameters {{ key: {} value {{ string_value: {} }} }}\n", quoted(name), quoted(value))
}

/// The text in quotes. JSON and the text format have the same escapes for what names can have.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The inputs with a fixed number of steps, where each has its batch dimension in front and each state has one, or
/// nothing has one.
fn signature(report: &Report, chunk: i64) -> String {
    let is_open = |input: &StepInput, axis: usize| {
        let steps = matches!(input.role, Role::Steps { axis: time } if time == axis);
        !steps && !input.dims[axis].is_known()
    };
    let open = |input: &StepInput| (0..input.dims.len()).filter(|&axis| is_open(input, axis)).collect();
    let open: Vec<Vec<usize>> = report.inputs.iter().map(open).collect();
    let of_states: Vec<bool> = report.states.iter().map(|state| !state.dims.iter().all(Dim::is_known)).collect();
    // Triton adds one batch dimension to all tensors or to none.
    let has_batch = open.iter().all(|axes| *axes == [0]) && of_states.iter().all(|&open| open);
    if !has_batch && (open.iter().any(|axes| !axes.is_empty()) || of_states.contains(&true)) {
        return String::new();
    }
    let mut text = if has_batch { format!("max_batch_size: {MAX_BATCH_SIZE}\n") } else { String::new() };
    for input in &report.inputs {
        let dim = |axis: usize| match &input.dims[axis] {
            _ if matches!(input.role, Role::Steps { axis: time } if time == axis) => chunk.to_string(),
            Dim::Known(length) => length.to_string(),
            _ => "-1".to_owned(),
        };
        let dims: Vec<String> = (usize::from(has_batch)..input.dims.len()).map(dim).collect();
        // Triton takes no empty dims, and a reshape only beside its own batch dimension.
        let dims = match dims.as_slice() {
            [] if has_batch => "1 ] reshape { shape: [ ] }".to_owned(),
            [] => "1 ]".to_owned(),
            dims => format!("{} ]", dims.join(", ")),
        };
        let (name, data_type) = (quoted(&input.name), data_type(input.elem));
        text += &format!("input {{ name: {name} data_type: {data_type} dims: [ {dims} }}\n");
    }
    text
}

fn data_type(elem: i32) -> String {
    match type_name(elem) {
        "FLOAT" => "TYPE_FP32".to_owned(),
        "FLOAT16" => "TYPE_FP16".to_owned(),
        "BFLOAT16" => "TYPE_BF16".to_owned(),
        "DOUBLE" => "TYPE_FP64".to_owned(),
        name => format!("TYPE_{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_quotes_are_escaped() {
        let line = r#"parameters { key: "state_pairs" value { string_value: "<<<h\"0\", C:\\h>>>" } }"#;
        assert_eq!(parameter("state_pairs", r#"<<<h"0", C:\h>>>"#), format!("{line}\n"));
    }
}
