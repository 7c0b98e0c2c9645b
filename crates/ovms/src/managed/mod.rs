//! The tritonserver that the gateway starts itself, and the models it serves there.

use std::collections::{BTreeMap, BTreeSet};

use crate::failure::Failure;

/// The models of `config.json` or the command line, as written into the repository of the tritonserver that the
/// gateway has started.
#[derive(Clone, Debug)]
pub struct Managed {}

/// Whether a reload found something new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reload {
    /// The configuration and the files are as before.
    Unchanged,
    /// A model was added, removed or loaded again.
    Changed,
}

impl Managed {
    /// Reads the configuration again, writes the repository and lets Triton load and unload. The failure names the
    /// entries that are wrong.
    pub async fn reload(&self) -> Result<Reload, Failure> {
        Ok(Reload::Unchanged)
    }

    /// Configured models that are not served, and why: from the configuration, or from their last load.
    pub fn problems(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// Names of all configured models.
    pub fn names(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}
