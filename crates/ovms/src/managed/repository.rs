//! The models' folders: what is in `base_path`, and the folder that Triton reads.
//!
//! Triton's folder has a link to each version that is served, so what is in `base_path` stays as it is, and a version that
//! isn't served can't be loaded. The links are to whole folders: external data of a model is found beside it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::config::{Entry, read_text};
use super::pbtxt;
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
    /// The text of config.pbtxt for Triton.
    pub config: String,
    /// Versions that may be served.
    pub versions: BTreeMap<i64, Version>,
    /// Versions that have no ONNX file, and why.
    pub left_out: BTreeMap<i64, String>,
    /// Files that a config.pbtxt in `base_path` may name.
    pub others: Version,
}

/// A version of a model: what is linked, by name, and the state of all files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    links: Links,
    files: BTreeMap<PathBuf, Stamp>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Links {
    /// To the whole folder.
    Folder(PathBuf),
    /// To files, by their names.
    Files(BTreeMap<String, PathBuf>),
}

impl Default for Links {
    fn default() -> Self {
        Self::Files(BTreeMap::new())
    }
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
    let links: BTreeMap<_, _> = files.map(|file| (file.clone(), folder.join(file))).collect();
    let files = links.values().map(|path| Ok((path.clone(), stamp(path)?))).collect::<Result<_, String>>()?;
    Ok(Found {
        config: pbtxt::config(name, entry, None)?,
        versions: BTreeMap::from([(1, Version { links: Links::Files(links), files })]),
        left_out: BTreeMap::new(),
        others: Version::default(),
    })
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
            versions.insert(version, Version { links: Links::Folder(folder), files: stamps });
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
        pbtxt::config(name, entry, Some(&added)).map_err(wrong)?
    } else {
        pbtxt::config(name, entry, None)?
    };
    if versions.is_empty() && left_out.is_empty() {
        left_out.insert(0, no_version(path, &names));
    }
    Ok(Found { config, versions, left_out, others })
}

/// Everything next to the versions, except names that Triton could take for a version.
fn find_others(path: &Path, names: &[String]) -> Result<Version, String> {
    let mut links = BTreeMap::new();
    let mut files = BTreeMap::new();
    for name in names {
        let first = name.chars().next();
        if name == CONFIG || !first.is_some_and(|letter| letter.is_alphabetic() || letter == '_') {
            continue;
        }
        let other = path.join(name);
        if other.is_dir() {
            stamp_all(&other, DEPTH_MAX, &mut files)?;
        } else {
            files.insert(other.clone(), stamp(&other)?);
        }
        links.insert(name.clone(), other);
    }
    Ok(Version { links: Links::Files(links), files })
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

/// The names in a folder, except those that begin with `..`, as Kubernetes' own links do. Names that aren't Unicode are
/// skipped, because no file of a model has one.
fn names(folder: &Path) -> Result<Vec<String>, String> {
    let wrong = |error: io::Error| format!("{}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(wrong)? {
        if let Ok(name) = entry.map_err(wrong)?.file_name().into_string()
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
    /// The text of config.pbtxt.
    pub config: String,
    /// The versions to serve.
    pub versions: BTreeMap<i64, Version>,
    /// Files beside them.
    pub others: Version,
}

impl Wanted {
    /// Whether anything else has changed since `before` than which versions there are, so that all must be loaded again.
    pub fn changes(&self, before: &Self) -> bool {
        let changed = |(number, version)| before.versions.get(number).is_some_and(|before| before != version);
        self.config != before.config || self.others != before.others || self.versions.iter().any(changed)
    }

    /// Writes the model's folder for a load. `anew`: Triton is to load all versions again.
    ///
    /// Triton reloads a version if the newest time of its files and of those beside the versions has grown, which is not so
    /// if an older file has taken a file's place: a new `.written` makes it grow. Triton looks at the versions at all if
    /// any time in the folder has grown, so config.pbtxt, which counts for no version, always gets the newest one.
    pub fn write(&self, folder: &Path, anew: bool) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let wanted = self.versions.iter().map(|(number, version)| (number.to_string(), &version.links));
        let wanted: BTreeMap<String, &Links> = wanted.collect();
        let others = match &self.others.links {
            Links::Files(files) => files.clone(),
            Links::Folder(_) => BTreeMap::new(),
        };
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != CONFIG
                && name != WRITTEN
                && !is_there(&entry.path(), wanted.get(&name).copied(), others.get(&name))
            {
                remove(&entry.path())?;
            }
        }
        for (name, links) in wanted {
            let path = folder.join(name);
            match links {
                Links::Folder(target) => link(target, &path)?,
                Links::Files(files) => {
                    fs::create_dir_all(&path)?;
                    for (name, target) in files {
                        link(target, &path.join(name))?;
                    }
                }
            }
        }
        for (name, target) in &others {
            link(target, &folder.join(name))?;
        }
        let time = later_than(newest(folder, DEPTH_MAX));
        if anew {
            put(&folder.join(WRITTEN), "", time)?;
        }
        put(&folder.join(CONFIG), &self.config, time)?;
        Ok(())
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
    let new = path.with_file_name(".new");
    fs::write(&new, text)?;
    set(&new)?;
    fs::rename(new, path)
}

/// Whether what is at `path` can stay.
fn is_there(path: &Path, version: Option<&Links>, other: Option<&PathBuf>) -> bool {
    let target = match version {
        Some(Links::Folder(target)) => Some(target),
        _ => other,
    };
    target.is_some_and(|target| fs::read_link(path).is_ok_and(|link| link == *target))
}

fn link(target: &Path, path: &Path) -> io::Result<()> {
    match symlink(target, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    }
}

/// Removes a model's folder, a link or a file.
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
