//! Where states start: the values that the configuration gives, and the files and the metadata that they are read from.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};

use rows::reserve;
use rows::tensor::{DataType, Dims, element_count};

use super::parameters::{Assigned, Parameters};
use super::raw::{self, ConfigError, Result, data_type, dims, field};

/// Triton's name for the folder beside a model's versions that holds initial states.
const FOLDER: &str = "initial_state";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredInitial {
    /// As the state's, with no open dimension.
    pub dims: Vec<i64>,
    /// `data_file`; `None` for zeros.
    pub file: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialValue {
    /// Each element.
    Fill(String),
    /// The elements of a row.
    List(Vec<String>),
    /// The elements of a row as raw bytes, in this file.
    File(String),
    /// An array of this .npz file: the one with this name, else the one with the state's name or the only one.
    Array { file: String, name: Option<String> },
    /// Numbers in the model's metadata, under these keys one behind the other.
    Metadata { keys: Vec<String>, then_zeros: bool },
}

#[derive(Clone, Debug, Default)]
pub struct InitialSources {
    /// Contents of files, by the name that the configuration gives them.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The model's metadata, as far as it is text.
    pub metadata: BTreeMap<String, String>,
    /// The values that the model itself has for inputs which are states, by input.
    pub defaults: BTreeMap<String, Vec<f64>>,
}

impl InitialSources {
    /// Reads files in a model's folder `initial_state`. `files`: the name of each file, after the name of its state, which
    /// errors show.
    pub fn read<'a>(
        repository: &Path,
        files: impl Iterator<Item = (&'a str, &'a str)>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let folder = repository.join(FOLDER);
        let mut contents = BTreeMap::new();
        for (state, file) in files {
            let failed =
                |why| ConfigError::InitialFile { state: state.into(), file: file.into(), dir: folder.clone(), why };
            contents.insert(file.to_owned(), read_file(&folder, file).map_err(failed)?);
        }
        Ok(Self { files: contents, metadata: metadata.clone(), defaults: BTreeMap::new() })
    }
}

impl DeclaredInitial {
    pub(super) fn new(path: &str, raw: &raw::InitialState, of: DataType, state_dims: &[i64]) -> Result<Self> {
        if data_type(&format!("{path}.data_type"), &raw.data_type)? != of {
            return Err(field(format!("{path}.data_type"), &raw.data_type, format!("the state has {of}")));
        }
        let dims = dims(&raw.dims);
        let fits = dims.len() == state_dims.len()
            && dims.iter().zip(state_dims).all(|(&dim, &state)| dim == state || (state < 0 && dim >= 0));
        let wrong = |rule: String| Err(field(format!("{path}.dims"), Dims(&dims).to_string(), rule));
        if !fits {
            return wrong(format!("it must agree with the state's dims, {}", Dims(state_dims)));
        }
        if dims.iter().any(|&dim| dim < 0) {
            let closed: Vec<i64> = dims.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
            let closed = Dims(&closed);
            return wrong(format!("at START no dimension is open: write each one's length, such as dims: {closed}"));
        }
        if element_count(&dims).is_none() {
            return wrong("it has more elements than an address can count".to_owned());
        }
        let file = raw.data_file.clone().filter(|file| !file.is_empty());
        if file.is_none() && raw.zero_data.is_none() {
            return Err(field(path, "without data", "'zero_data: true' or a 'data_file' is expected"));
        }
        Ok(Self { dims, file })
    }
}

/// Reads `name=value`, `name=[value, value]`, `name=file:FILE`, `name=npz:FILE:ARRAY` and `name=metadata:KEY+KEY`.
pub(super) fn initial_states(parameters: &Parameters) -> Result<Vec<(String, InitialValue)>> {
    let form = "'name=value', 'name=[value, value]', 'name=file:FILE', 'name=npz:FILE:ARRAY' or 'name=metadata:KEY', \
                separated by spaces or commas, is expected";
    parameters.assigned("initial_states", form, None, |name, value| {
        let Assigned::One(value) = value else { return Ok((name, InitialValue::List(value.values(form)?))) };
        let value = match value.split_once(':') {
            Some(("file", file)) => InitialValue::File(file.to_owned()),
            Some(("npz", rest)) => {
                let (file, array) = rest.split_once(':').map_or((rest, None), |(file, array)| (file, Some(array)));
                InitialValue::Array { file: file.to_owned(), name: array.map(str::to_owned) }
            }
            Some(("metadata", rest)) => {
                // `KEY+zeros`: zeros fill the rest of the row. Alone, `zeros` is a key.
                let keys = rest.strip_suffix("+zeros");
                let then_zeros = keys.is_some();
                InitialValue::Metadata {
                    keys: keys.unwrap_or(rest).split('+').map(str::to_owned).collect(),
                    then_zeros,
                }
            }
            _ => InitialValue::Fill(value),
        };
        Ok((name, value))
    })
}

/// Whether a path stays inside the folder that it starts from.
pub(super) fn is_inside(name: &str) -> bool {
    // A configuration may name files in the model's folder, and no others (SECURITY.md).
    Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
}

fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>, String> {
    if !is_inside(name) {
        return Err("it must lie in that folder".to_owned());
    }
    let text = |error: io::Error| error.to_string();
    // Without O_NONBLOCK, opening a pipe waits until something writes to it.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(folder.join(name)).map_err(text)?;
    let metadata = file.metadata().map_err(text)?;
    // A pipe or a device may never end.
    if !metadata.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let bytes = metadata.len();
    if bytes > machine_memory() as u64 / 2 {
        return Err(format!("it has {bytes} bytes, more than half of the machine's memory"));
    }
    let mut content = reserve(bytes as usize).map_err(|error| error.to_string())?;
    // A file may grow while it is read. What was there at first is read.
    file.take(bytes).read_to_end(&mut content).map_err(text)?;
    Ok(content)
}

/// Bytes of memory that this process may use: the machine's, or what its control group allows.
pub(super) fn machine_memory() -> usize {
    let system = sysinfo::System::new_with_specifics(
        sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram()),
    );
    // A container often gets less than its machine has.
    let group = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
    usize::try_from(system.total_memory().min(group)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_from_the_models_folder_of_initial_states_and_nowhere_else() {
        let repository = std::env::temp_dir().join(format!("triton-stateful-initial-files-{}", std::process::id()));
        std::fs::create_dir_all(repository.join(FOLDER)).unwrap();
        std::fs::write(repository.join(FOLDER).join("a"), "abc").unwrap();
        std::fs::write(repository.join("secret"), "abc").unwrap();
        let read = |name: &str| InitialSources::read(&repository, std::iter::once(("state", name)), &BTreeMap::new());
        assert_eq!(read("a").unwrap().files["a"], b"abc");
        std::fs::File::create(repository.join(FOLDER).join("huge")).unwrap().set_len(1 << 42).unwrap();
        std::os::unix::fs::symlink("/dev/zero", repository.join(FOLDER).join("endless")).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(repository.join(FOLDER).join("pipe")).status().unwrap();
        assert!(pipe.success());
        for name in ["b", "../secret", "/etc/passwd", "", ".", "huge", "endless", "pipe"] {
            let error = read(name).unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}' of state 'state'")) && error.contains(FOLDER), "{error}");
        }
        std::fs::remove_dir_all(repository).unwrap();
    }
}
