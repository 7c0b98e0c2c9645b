//! The files that hold initial states.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use super::error::ConfigError;
use super::states::machine_memory;

/// Triton's name for the folder beside a model's versions that holds initial states.
const FOLDER: &str = "initial_state";

/// Contents of files, by the name that the configuration gives them.
pub type InitialFiles = BTreeMap<String, Vec<u8>>;

/// Reads the named files of the folder `initial_state` of a model, each for the state of that name.
pub fn read<'a>(
    repository: &Path,
    files: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<InitialFiles, ConfigError> {
    let folder = repository.join(FOLDER);
    let read = |state: &str, name: &str| {
        let (state, file, dir) = (state.to_owned(), name.to_owned(), folder.clone());
        let failed = |why: String| ConfigError::InitialFile { state, file, dir, why };
        let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if !inside {
            return Err(failed("it must lie in that folder".to_owned()));
        }
        let path = folder.join(name);
        let bytes = path.metadata().map_or(0, |of| of.len());
        match usize::try_from(bytes).is_ok_and(|bytes| bytes <= machine_memory() / 2) {
            true => std::fs::read(path).map_err(|error| failed(error.to_string())),
            false => Err(failed(format!("it has {bytes} bytes, more than half of the machine's memory"))),
        }
    };
    files.map(|(state, name)| Ok((name.to_owned(), read(state, name)?))).collect()
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
        for name in ["b", "../secret", "/etc/passwd", "", ".", "huge"] {
            let error = read(name).unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}' of state 'state'")) && error.contains(FOLDER), "{error}");
        }
        std::fs::remove_dir_all(repository).unwrap();
    }
}
