//! From a converted model to its files: compared first, then written, then described.

use std::path::Path;

use stateful_convert::Converted;
use stateful_convert::verify::Compared;

use crate::files::{Targets, WorkFolder};
use crate::options::Shared;
use crate::problem::Problem;
use crate::{texts, warnings};

pub struct Origin<'a> {
    /// The models that it is made of. Their files are never overwritten.
    pub files: &'a [&'a Path],
    /// The file whose folder has the weights that are in files of their own.
    pub beside: &'a Path,
    /// What the comparison is with, as in `the original`.
    pub compared_with: &'a str,
    pub chunk: Option<i64>,
}

/// Compares the model by `compare`, writes what that gives, and says what was done.
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
    let warnings = warnings::of(&converted.report);
    let written = targets.map(|targets| targets.written(&converted, &folder));
    Ok(texts::done(&converted.report, &compared, &warnings, written.as_deref(), shared, origin.compared_with))
}
