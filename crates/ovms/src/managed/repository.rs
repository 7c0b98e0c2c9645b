//! The models' folders: what is in `base_path`, and the folder that Triton reads.
//!
//! Triton's folder contains a link to each version that is served, so `base_path` never changes, and a version that isn't
//! served can't be loaded.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::config::{Entry, read_text};
use super::policy::version_of;

const CONFIG: &str = "config.pbtxt";
/// An empty file beside the versions. Triton loads all of them again if its time has grown.
const WRITTEN: &str = ".written";
/// The coarsest times of file systems are more exact than this.
const TICK: Duration = Duration::from_secs(1);
/// Levels of subfolders of a version whose files are watched.
const DEPTH_MAX: usize = 8;

/// A model as its `base_path` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// All that may be served.
    pub all: Wanted,
    /// Versions that have no ONNX file, and why.
    pub left_out: BTreeMap<i64, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// The links: the path in the model's folder, and the target.
    links: BTreeMap<PathBuf, PathBuf>,
    files: BTreeMap<PathBuf, Stamp>,
}

/// Tells one state of a file from another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    target: PathBuf,
    inode: u64,
    bytes: u64,
    modified: SystemTime,
    /// When anything of the file has changed, its permissions and its name included: seconds and nanoseconds.
    changed: (i64, i64),
}

/// Looks at a model's `base_path`. The error says why nothing of it can be served.
pub fn find(name: &str, entry: &Entry) -> Result<Found, String> {
    let path = &entry.base_path;
    let metadata = fs::metadata(path)
        .map_err(|error| format!("The provided base path is invalid or doesn't exists: {}: {error}", path.display()))?;
    if metadata.is_dir() { find_folder(name, entry) } else { find_file(name, entry) }
}

/// One file is version 1, as in OVMS.
fn find_file(name: &str, entry: &Entry) -> Result<Found, String> {
    let path = &entry.base_path;
    let (Some(folder), Some(file)) = (path.parent(), path.file_name().and_then(|file| file.to_str())) else {
        return Err(format!("{} has no name", path.display()));
    };
    if !file.ends_with(".onnx") {
        return Err(no_onnx(folder, &[file.to_owned()]));
    }
    stamp(path)?;
    // The names that exporters give to external data begin with the file's: model.onnx.data, model.onnx_data.
    let files = names(folder)?.into_iter().filter(|other| other.starts_with(file) && folder.join(other).is_file());
    let links: BTreeMap<_, _> = files.map(|file| (Path::new("1").join(&file), folder.join(file))).collect();
    let files = links.values().map(|path| Ok((path.clone(), stamp(path)?))).collect::<Result<_, String>>()?;
    let versions = BTreeMap::from([(1, Version { links, files })]);
    let all = Wanted { config: config(name, entry, None)?, versions, others: Version::default() };
    Ok(Found { all, left_out: BTreeMap::new() })
}

fn find_folder(name: &str, entry: &Entry) -> Result<Found, String> {
    let path = &entry.base_path;
    let (mut versions, mut left_out) = (BTreeMap::new(), BTreeMap::new());
    let names = names(path)?;
    for (name, version) in names.iter().filter_map(|name| Some((name, version_of(name)?))) {
        let folder = path.join(name);
        if !folder.is_dir() {
            continue;
        }
        let files = self::names(&folder)?;
        if files.iter().any(|file| file.ends_with(".onnx")) {
            let mut stamps = BTreeMap::new();
            stamp_all(&folder, DEPTH_MAX, &mut stamps)?;
            // The whole folder, because external data of a model is found beside it.
            let links = BTreeMap::from([(PathBuf::from(name), folder)]);
            versions.insert(version, Version { links, files: stamps });
        } else {
            left_out.insert(version, no_onnx(&folder, &files));
        }
    }
    let added_path = path.join(CONFIG);
    let mut others = Version::default();
    let config = if added_path.exists() {
        let wrong = |error: String| format!("{}: {error}", added_path.display());
        let added = read_text(&added_path).map_err(|error| wrong(error.to_string()))?;
        others = find_others(path, &names)?;
        config(name, entry, Some(&added)).map_err(wrong)?
    } else {
        config(name, entry, None)?
    };
    if versions.is_empty() && left_out.is_empty() {
        left_out.insert(0, no_version(path, &names));
    }
    Ok(Found { all: Wanted { config, versions, others }, left_out })
}

/// The text of config.pbtxt for Triton: the settings of the entry, and those of `added`, a config.pbtxt in `base_path`. A
/// setting that is in both must be the same. The backend fills in the rest from the model.
fn config(name: &str, entry: &Entry, added: Option<&str>) -> Result<String, String> {
    let mut config = match added {
        Some(text) => stateful_pbtxt::read(text)?,
        None => Map::new(),
    };
    if config.remove("name").is_some_and(|written| written != name) {
        return Err(format!("its name is not '{name}', the name in the entry. Remove it"));
    }
    if config.insert("backend".to_owned(), json!("stateful")).is_some_and(|backend| backend != "stateful") {
        return Err("its backend is not \"stateful\"".to_owned());
    }
    for field in ["platform", "ensemble_scheduling"] {
        if config.contains_key(field) {
            return Err(format!("{field} is for another backend"));
        }
    }
    // The gateway links the selected versions only.
    if config.insert("version_policy".to_owned(), json!({ "all": {} })).is_some() {
        return Err("version_policy is model_version_policy in the entry. Write it there".to_owned());
    }
    if config.contains_key("instance_group") {
        if entry.device_given {
            return Err("the entry has target_device, and this file instance_group. Remove one of them".to_owned());
        }
    } else {
        // OVMS runs stateful models on the CPU, and Triton would use a GPU if there is one. Threads are `worker_count`.
        config.insert("instance_group".to_owned(), json!([{ "kind": "KIND_CPU", "count": 1 }]));
    }
    let parameters = config.entry("parameters").or_insert_with(|| Value::Object(Map::new()));
    let Value::Object(parameters) = parameters else {
        return Err("parameters is no map".to_owned());
    };
    for (key, value) in &entry.parameters {
        let value = json!({ "string_value": value });
        let written = parameters.insert((*key).to_owned(), value.clone());
        if let Some(written) = written.filter(|written| *written != value) {
            return Err(format!(
                "{key} is {} in this file, and {} by the entry or the command line. Write it in one place",
                written["string_value"], value["string_value"]
            ));
        }
    }
    stateful_pbtxt::write(&config)
}

/// Everything next to the versions.
fn find_others(path: &Path, names: &[String]) -> Result<Version, String> {
    let mut others = Version::default();
    for name in names {
        let first = name.chars().next();
        // Triton could take another name for a version.
        if name == CONFIG || !first.is_some_and(|letter| letter.is_alphabetic() || letter == '_') {
            continue;
        }
        let other = path.join(name);
        if other.is_dir() {
            stamp_all(&other, DEPTH_MAX, &mut others.files)?;
        } else {
            others.files.insert(other.clone(), stamp(&other)?);
        }
        others.links.insert(PathBuf::from(name), other);
    }
    Ok(others)
}

fn no_onnx(folder: &Path, files: &[String]) -> String {
    let has = |ending: &str| files.iter().any(|file| file.ends_with(ending));
    if has(".xml") || has(".bin") {
        return format!(
            "{} has OpenVINO IR (.xml, .bin), which ONNX Runtime doesn't read. Export the model to ONNX from its original \
             framework, with its states as inputs and outputs, or without them and with low_latency_transformation",
            folder.display()
        );
    }
    format!("{} has no .onnx file. Export the model to ONNX from its original framework", folder.display())
}

fn no_version(path: &Path, names: &[String]) -> String {
    if names.iter().any(|name| name.ends_with(".onnx") || name.ends_with(".xml")) {
        return format!(
            "{} has no folder for a version. Move the model's files into a folder '1' in it, or write the path of the \
             .onnx file",
            path.display()
        );
    }
    format!("No version found for model in path: {}: its folders have numbers as names, from 1", path.display())
}

/// The names in a folder. Those that aren't Unicode are skipped, because no file of a model has one.
fn names(folder: &Path) -> Result<Vec<String>, String> {
    let wrong = |error: io::Error| format!("{}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(wrong)? {
        if let Ok(name) = entry.map_err(wrong)?.file_name().into_string()
            // Kubernetes' own links begin with two dots. The folder has other names for their targets.
            && !name.starts_with("..")
        {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn stamp_all(folder: &Path, depth: usize, stamps: &mut BTreeMap<PathBuf, Stamp>) -> Result<(), String> {
    for name in names(folder)? {
        let path = folder.join(name);
        let stamp = stamp(&path)?;
        if path.is_dir() {
            // The depth is bounded, because a link may lead back to a folder above it.
            if depth > 0 {
                stamp_all(&path, depth - 1, stamps)?;
            }
        } else {
            stamps.insert(path, stamp);
        }
    }
    Ok(())
}

fn stamp(path: &Path) -> Result<Stamp, String> {
    let read = || {
        let metadata = fs::metadata(path)?;
        if !metadata.is_dir() && !metadata.is_file() {
            // Reading a pipe may never end.
            return Err(io::Error::other("not a regular file"));
        }
        Ok(Stamp {
            target: fs::canonicalize(path)?,
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: metadata.modified()?,
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    };
    read().map_err(|error: io::Error| {
        let link = fs::read_link(path).map_or(String::new(), |target| format!(" (a link to {})", target.display()));
        format!("{}{link}: {error}", path.display())
    })
}

/// What a model's folder in Triton's repository must contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub config: String,
    pub versions: BTreeMap<i64, Version>,
    /// Files that a config.pbtxt in `base_path` may name.
    pub others: Version,
}

impl Wanted {
    /// Whether anything else has changed since `before` than which versions there are, so that all must be loaded again.
    pub fn changes(&self, before: &Self) -> bool {
        let changed = |(number, version)| before.versions.get(number).is_some_and(|before| before != version);
        self.config != before.config || self.others != before.others || self.versions.iter().any(changed)
    }

    /// Writes the model's folder for a load. `anew`: Triton is to load all versions again.
    pub fn write(&self, folder: &Path, anew: bool) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let links = self.versions.values().chain([&self.others]).flat_map(|version| &version.links);
        let links: BTreeMap<_, _> = links.map(|(name, target)| (folder.join(name), target)).collect();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let is_there =
                links.get(&path).is_some_and(|target| fs::read_link(&path).is_ok_and(|link| link == **target));
            if !is_there && !path.ends_with(CONFIG) && !path.ends_with(WRITTEN) {
                remove(&path)?;
            }
        }
        for (path, target) in links {
            // The files of a version that is one file have a folder of their own.
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            match symlink(target, path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                linked => linked?,
            }
        }
        let time = later_than(newest(folder, DEPTH_MAX));
        if anew {
            // Triton reloads a version if the newest time of its files and of those beside the versions has grown. That time
            // does not grow if an older file has replaced a file.
            put(&folder.join(WRITTEN), "", time)?;
        }
        // Triton looks at the versions only if any time in the folder has grown. This file counts for no version, so it always
        // gets the newest time.
        put(&folder.join(CONFIG), &self.config, time)
    }
}

/// A time that is later than `newest` and than all times that it has given before, because Triton may have seen them.
fn later_than(newest: SystemTime) -> SystemTime {
    static GIVEN: Mutex<SystemTime> = Mutex::new(SystemTime::UNIX_EPOCH);
    let mut given = GIVEN.lock();
    // A file may have a time in the future.
    let time = SystemTime::now().max(newest + TICK).max(*given + TICK);
    *given = time;
    time
}

/// The newest time of what is in a folder, also behind links, and of the folder itself.
fn newest(path: &Path, depth: usize) -> SystemTime {
    let Ok(metadata) = fs::metadata(path) else { return SystemTime::UNIX_EPOCH };
    let inner = if metadata.is_dir() && depth > 0 { fs::read_dir(path).ok() } else { None };
    let inner = inner.into_iter().flatten().flatten().map(|entry| newest(&entry.path(), depth - 1));
    inner.chain(metadata.modified()).max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Gives a file this time, and replaces it if it has another text.
fn put(path: &Path, text: &str, time: SystemTime) -> io::Result<()> {
    let set = |path: &Path| fs::File::options().write(true).open(path)?.set_modified(time);
    if fs::read_to_string(path).is_ok_and(|there| there == text) {
        return set(path);
    }
    // Not in place, so that a write that fails half way leaves the old text.
    let new = path.with_file_name(".new");
    fs::write(&new, text)?;
    set(&new)?;
    fs::rename(new, path)
}

pub fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
