//! `stateful-inspect FOLDER`: which known family the graphs of a folder are, and how to make one model of them.

use std::path::{Path, PathBuf};

use triton_stateful::inspect::{Family, Library, PartialConfig, Provider, Session, Signature};

use crate::Problem;

/// The family that the graphs of the folder are.
pub fn family(folder: &Path, partial: &PartialConfig, library: &Library) -> Result<Family, Problem> {
    let unreadable = |error: std::io::Error| Problem::Folder { folder: folder.to_owned(), why: error.to_string() };
    let entries = std::fs::read_dir(folder).map_err(unreadable)?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (mut graphs, mut others, mut refused): (Vec<(String, Signature)>, _, Vec<String>) =
        (Vec::new(), Vec::new(), Vec::new());
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
    let has = || {
        let read = graphs.iter().map(|(file, _)| file.clone());
        let all: Vec<String> = read.chain(refused.iter().cloned()).collect();
        if all.is_empty() { "no .onnx file".to_owned() } else { all.join(", ") }
    };
    let family = Family::of(&graphs, &others, &folder.display().to_string());
    family.ok_or_else(|| Problem::NoFamily { folder: folder.to_owned(), has: has() })
}

/// What to do with the graphs.
pub fn described(family: &Family) -> String {
    let mut text = format!("the graphs are {}", family.family);
    for command in &family.commands {
        text += &format!("\n  {command}");
    }
    if !family.note.is_empty() {
        text += &format!("\n  {}", family.note);
    }
    text
}

/// The configuration that joins the graphs at load.
pub fn config(family: &Family) -> String {
    let lines: String = family.lines.iter().map(|line| format!("{}\n", line.replace('\'', "\""))).collect();
    if lines.is_empty() {
        lines
    } else {
        format!("backend: \"stateful\"\ninstance_group [ {{ kind: KIND_CPU }} ]\n{lines}")
    }
}
