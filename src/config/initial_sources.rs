//! What initial states are read from: files, and the model's metadata.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};

use rows::reserve;

use super::error::ConfigError;
use super::states::{States, machine_memory};

/// Triton's name for the folder beside a model's versions that holds initial states.
const FOLDER: &str = "initial_state";

/// What initial states are read from.
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
    /// Reads the files in a model's folder `initial_state`, and takes the model's metadata.
    pub fn read(repository: &Path, states: &States, metadata: &BTreeMap<String, String>) -> Result<Self, ConfigError> {
        Ok(Self {
            files: read(repository, states.initial_files())?,
            metadata: metadata.clone(),
            defaults: BTreeMap::new(),
        })
    }
}

/// Reads files: pairs of a state's name, for errors, and the name of its file.
fn read<'a>(
    repository: &Path,
    files: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<BTreeMap<String, Vec<u8>>, ConfigError> {
    let folder = repository.join(FOLDER);
    let read = |(state, name): (&str, &str)| {
        let content = read_file(&folder, name).map_err(|why| ConfigError::InitialFile {
            state: state.to_owned(),
            file: name.to_owned(),
            dir: folder.clone(),
            why,
        });
        Ok((name.to_owned(), content?))
    };
    files.map(read).collect()
}

fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>, String> {
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !inside {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_from_the_models_folder_of_initial_states_and_nowhere_else() {
        let repository = std::env::temp_dir().join(format!("triton-stateful-initial-files-{}", std::process::id()));
        std::fs::create_dir_all(repository.join(FOLDER)).unwrap();
        std::fs::write(repository.join(FOLDER).join("a"), "abc").unwrap();
        std::fs::write(repository.join("secret"), "abc").unwrap();
        let read = |name: &str| read(&repository, std::iter::once(("state", name)));
        assert_eq!(read("a").unwrap()["a"], b"abc");
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
