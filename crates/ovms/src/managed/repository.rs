//! The models' folders: what is in `base_path`, and the folder that Triton reads.
//!
//! Triton's folder contains a link to each version that is served, so `base_path` never changes, and a version that
//! isn't served can't be loaded.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::config::{Entry, read_text};

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

/// The number of a version by the name of its folder: decimal without leading zeros, from 1.
fn version_of(folder: &str) -> Option<i64> {
    // Strict, because tritonserver would accept other spellings, and exits if a number is too large for it.
    let version: i64 = folder.parse().ok()?;
    (version >= 1 && version.to_string() == folder).then_some(version)
}

/// The text of config.pbtxt for Triton: the settings of the entry, and those of `added`, a config.pbtxt in `base_path`.
/// A setting that is in both must be the same. The backend fills in the rest from the model.
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
    /// Whether anything else has changed since `before` than which versions there are, so that all must be loaded
    /// again.
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
            // Triton reloads a version if the newest time of its files and of those beside the versions has grown. That
            // time does not grow if an older file has replaced a file.
            put(&folder.join(WRITTEN), "", time)?;
        }
        // Triton looks at the versions only if any time in the folder has grown. This file counts for no version, so it
        // always gets the newest time.
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
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;
    use crate::managed::config::VersionPolicy;

    fn entry(base_path: PathBuf) -> Entry {
        Entry { base_path, policy: VersionPolicy::default(), parameters: BTreeMap::new(), device_given: false }
    }

    /// A folder with these files.
    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, file).unwrap();
        }
        folder
    }

    fn versions(found: &Found) -> Vec<i64> {
        found.all.versions.keys().copied().collect()
    }

    fn wanted(found: &Found, versions: &[i64]) -> Wanted {
        let mut wanted = found.all.clone();
        wanted.versions.retain(|version, _| versions.contains(version));
        wanted
    }

    /// The files that are found in a folder, also behind links.
    fn seen(folder: &Path) -> Vec<String> {
        let mut seen = Vec::new();
        for name in names(folder).unwrap() {
            let path = folder.join(&name);
            if path.is_dir() {
                seen.extend(self::seen(&path).into_iter().map(|inner| format!("{name}/{inner}")));
            } else {
                seen.push(name);
            }
        }
        seen
    }

    #[test]
    fn versions_are_the_folders_with_an_onnx_file() {
        let folder =
            folder(&["1/model.onnx", "2/vad.onnx", "3/model.xml", "3/model.bin", "4/readme", "01/model.onnx", "x/y"]);
        let found = find("m", &entry(folder.path().to_owned())).unwrap();
        assert_eq!(versions(&found), [1, 2]);
        assert!(found.left_out[&3].contains("OpenVINO IR"), "{:?}", found.left_out);
        assert!(found.left_out[&3].contains("low_latency_transformation"), "{:?}", found.left_out);
        assert!(found.left_out[&4].contains("no .onnx file"), "{:?}", found.left_out);
    }

    #[test]
    fn a_version_has_one_spelling() {
        for (folder, version) in [("1", Some(1)), ("9223372036854775807", Some(i64::MAX))] {
            assert_eq!(version_of(folder), version);
        }
        for folder in ["0", "01", "+1", "-1", " 1", "1 ", "1.0", "one", "", "9223372036854775808"] {
            assert_eq!(version_of(folder), None, "{folder}");
        }
    }

    #[test]
    fn a_folder_without_versions_says_what_to_do() {
        for (files, words) in
            [(&["model.onnx"][..], "into a folder '1'"), (&["readme"], "No version found for model in path")]
        {
            let folder = folder(files);
            let found = find("m", &entry(folder.path().to_owned())).unwrap();
            assert!(found.left_out[&0].contains(words), "{:?}", found.left_out);
        }
        let error = find("m", &entry(PathBuf::from("/no/such/folder"))).unwrap_err();
        assert!(error.contains("/no/such/folder"), "{error}");
    }

    #[test]
    fn one_file_is_version_1_with_its_external_data() {
        let folder = folder(&["vad.onnx", "vad.onnx.data", "other.onnx", "vad.xml"]);
        let found = find("m", &entry(folder.path().join("vad.onnx"))).unwrap();
        let repository = tempfile::tempdir().unwrap();
        wanted(&found, &[1]).write(repository.path(), true).unwrap();
        assert_eq!(seen(repository.path()), [".written", "1/vad.onnx", "1/vad.onnx.data", "config.pbtxt"]);
        let error = find("m", &entry(folder.path().join("vad.xml"))).unwrap_err();
        assert!(error.contains("OpenVINO IR"), "{error}");
    }

    #[test]
    fn the_folder_of_triton_has_what_is_served_and_nothing_else() {
        let folder = folder(&[
            "1/model.onnx",
            "2/model.onnx",
            "2/model.onnx.data",
            "config.pbtxt",
            "initial/h.npy",
            "007/x.onnx",
        ]);
        write(folder.path().join("config.pbtxt"), "").unwrap();
        let found = find("m", &entry(folder.path().to_owned())).unwrap();
        let repository = tempfile::tempdir().unwrap();
        let path = repository.path().join("m");
        wanted(&found, &[1, 2]).write(&path, true).unwrap();
        let files = ["1/model.onnx", "2/model.onnx", "2/model.onnx.data", "config.pbtxt", "initial/h.npy"];
        assert_eq!(seen(&path)[1..], files);
        wanted(&found, &[2]).write(&path, false).unwrap();
        assert_eq!(seen(&path)[1..], files[1..]);
        remove(&path).unwrap();
        assert!(folder.path().join("1/model.onnx").exists());
    }

    #[test]
    fn a_changed_file_is_a_change_and_a_version_that_comes_is_not() {
        let folder = folder(&["1/model.onnx", "2/model.onnx"]);
        let entry = entry(folder.path().to_owned());
        let before = wanted(&find("m", &entry).unwrap(), &[1]);
        assert!(!wanted(&find("m", &entry).unwrap(), &[1, 2]).changes(&before));
        write(folder.path().join("2/model.onnx"), "another").unwrap();
        assert!(!wanted(&find("m", &entry).unwrap(), &[1, 2]).changes(&before));
        write(folder.path().join("1/model.onnx"), "another").unwrap();
        assert!(wanted(&find("m", &entry).unwrap(), &[1]).changes(&before));
    }

    #[test]
    fn links_are_followed_and_one_that_leads_nowhere_is_named() {
        let folder = folder(&["blobs/abc", "1/..2026/model.onnx"]);
        symlink("..2026", folder.path().join("1/..data")).unwrap();
        symlink("..data/model.onnx", folder.path().join("1/model.onnx")).unwrap();
        create_dir_all(folder.path().join("2")).unwrap();
        symlink("../blobs/abc", folder.path().join("2/model.onnx")).unwrap();
        let found = find("m", &entry(folder.path().to_owned())).unwrap();
        assert_eq!(versions(&found), [1, 2]);
        // as Kubernetes replaces a ConfigMap
        create_dir_all(folder.path().join("1/..2027")).unwrap();
        fs::copy(folder.path().join("1/..2026/model.onnx"), folder.path().join("1/..2027/model.onnx")).unwrap();
        fs::remove_file(folder.path().join("1/..data")).unwrap();
        symlink("..2027", folder.path().join("1/..data")).unwrap();
        let now = find("m", &entry(folder.path().to_owned())).unwrap();
        assert!(now.all.versions[&1] != found.all.versions[&1] && now.all.versions[&2] == found.all.versions[&2]);
        create_dir_all(folder.path().join("3")).unwrap();
        symlink("nowhere", folder.path().join("3/model.onnx")).unwrap();
        let error = find("m", &entry(folder.path().to_owned())).unwrap_err();
        assert!(error.contains("3/model.onnx") && error.contains("nowhere"), "{error}");
    }

    fn modified(path: PathBuf) -> SystemTime {
        fs::metadata(path).unwrap().modified().unwrap()
    }

    #[test]
    fn the_times_of_triton_s_folder_grow_also_if_a_file_becomes_older() {
        let folder = folder(&["1/model.onnx", "2/model.onnx"]);
        let set = |time| fs::File::open(folder.path().join("1/model.onnx")).unwrap().set_modified(time).unwrap();
        let found = find("m", &entry(folder.path().to_owned())).unwrap();
        let repository = tempfile::tempdir().unwrap();
        let path = repository.path().join("m");
        let now = SystemTime::now();
        let mut before = SystemTime::UNIX_EPOCH;
        for time in [now, now + 1000 * TICK, now - 1000 * TICK, now - 2000 * TICK] {
            set(time);
            wanted(&found, &[1]).write(&path, true).unwrap();
            let written = modified(path.join(WRITTEN));
            assert!(written > before && written > modified(path.join("1/model.onnx")));
            // A version that comes is no reason to load the others again, and must be seen.
            wanted(&found, &[1, 2]).write(&path, false).unwrap();
            assert_eq!(modified(path.join(WRITTEN)), written);
            before = modified(path.join(CONFIG));
            assert!(before > written);
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_by_name() {
        for name in ["1/model.onnx", "1/other", "config.pbtxt"] {
            let folder = folder(&["1/model.onnx"]);
            let path = folder.path().join(name);
            remove(&path).unwrap();
            std::process::Command::new("mkfifo").arg(&path).status().unwrap();
            let error = find("m", &entry(folder.path().to_owned())).unwrap_err();
            assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
            if name.ends_with("onnx") {
                assert!(find("m", &entry(path)).unwrap_err().contains("not a regular file"));
            }
        }
    }

    #[test]
    fn a_file_with_the_size_and_time_of_the_one_before_is_a_change() {
        let folder = folder(&["1/model.onnx"]);
        let (path, entry) = (folder.path().join("1/model.onnx"), entry(folder.path().to_owned()));
        let (before, time) = (find("m", &entry).unwrap(), modified(path.clone()));
        let new = folder.path().join("new");
        write(&new, "1/MODEL.onnx").unwrap();
        fs::File::open(&new).unwrap().set_modified(time).unwrap();
        fs::rename(new, path).unwrap();
        assert_ne!(find("m", &entry).unwrap(), before);
    }

    /// An entry with these parameters.
    fn with(parameters: &[(&'static str, &str)]) -> Entry {
        let parameters = parameters.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        Entry { parameters, ..entry(PathBuf::from("/models/m")) }
    }

    #[test]
    fn an_entry_needs_no_file() {
        let text = config("m", &with(&[("max_sequence_number", "7"), ("stateful", "true")]), None).unwrap();
        assert_eq!(
            text,
            r#"backend: "stateful"
version_policy {
  all {
  }
}
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "max_sequence_number" value { string_value: "7" } }
parameters { key: "stateful" value { string_value: "true" } }
"#
        );
    }

    #[test]
    fn a_file_adds_what_an_entry_can_not_say() {
        let added = r#"
            name: "m"
            instance_group [ { kind: KIND_GPU } ]
            parameters [ { key: "constant_inputs" value { string_value: "sr=16000" } },
                         { key: "stateful" value { string_value: "true" } } ]
        "#;
        let text = config("m", &with(&[("stateful", "true")]), Some(added)).unwrap();
        let read = stateful_pbtxt::read(&text).unwrap();
        assert_eq!(read["instance_group"], json!([{ "kind": "KIND_GPU" }]));
        let expected =
            json!({ "constant_inputs": { "string_value": "sr=16000" }, "stateful": { "string_value": "true" } });
        assert_eq!(read["parameters"], expected);
        assert!(!read.contains_key("name"), "{text}");
    }

    #[test]
    fn a_file_that_contradicts_the_entry_is_refused_by_name() {
        let entry = Entry { device_given: true, ..with(&[("max_sequence_number", "7")]) };
        for (added, words) in [
            (r#"name: "n""#, "its name is not 'm'"),
            (r#"backend: "onnxruntime""#, "backend"),
            (r#"platform: "onnxruntime_onnx""#, "platform"),
            ("version_policy { latest { num_versions: 1 } }", "model_version_policy"),
            ("instance_group { kind: KIND_CPU }", "target_device"),
            (
                r#"parameters { key: "max_sequence_number" value { string_value: "8" } }"#,
                "max_sequence_number is \"8\"",
            ),
            ("max_batchsize: 8", "max_batchsize"),
        ] {
            let error = config("m", &entry, Some(added)).unwrap_err();
            assert!(error.contains(words), "{added}: {error}");
        }
    }
}
