//! What a configuration says together with what is found for it.

use super::fill::{Written, complete};
use super::pairing::Taken;
use super::{CompletionError, state_pairs, unpaired};
use crate::config::{ConfigError, Opening, PairsFrom, StatePair};
use crate::session::{BatchScale, Signature};

/// A configuration with its gaps filled.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The states.
    pub pairs: Vec<StatePair>,
    /// The configuration for Triton; `None` if nothing was missing, or nothing may be completed.
    pub completed: Option<Vec<u8>>,
    /// Where things come from, for whoever asks why.
    pub origins: Origins,
    /// What an operator should look at.
    pub warnings: Vec<String>,
    /// The nodes of the model that quantize with one scale for the whole batch.
    pub batch_scale: Option<BatchScale>,
}

/// Where the parts of a configuration come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origins {
    /// The states that are not declared in `sequence_batching.state`.
    pub pairs: PairsFrom,
    /// `input` was completed.
    pub inputs_completed: bool,
    /// `output` was completed.
    pub outputs_completed: bool,
}

/// What the server allows.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether what is missing is filled in. Pairs that the configuration wants found are found in any case.
    pub completes: bool,
    /// `--backend-config=default-max-batch-size`.
    pub default_max_batch_size: usize,
}

impl Plan {
    /// Finds the states and fills the gaps of the configuration `json`, of which `opening` is the first reading.
    pub fn new(
        json: &[u8],
        opening: &Opening,
        signature: &Signature,
        graph_description: Option<&str>,
        batch_scale: Option<BatchScale>,
        settings: Settings,
    ) -> Result<Self, CompletionError> {
        let (pairs, from) = opening.states.all_pairs(graph_description, || by_name(opening, signature, settings))?;
        let taken: Vec<&str> = opening.taken.iter().map(String::as_str).collect();
        let default_max_batch_size = settings.default_max_batch_size;
        let completed = match settings.completes {
            true => {
                let (pairs, taken, contexts) = (&pairs, &taken, &opening.contexts);
                let mixes_rows = batch_scale.is_some();
                complete(json, signature, &Written { pairs, taken, contexts, default_max_batch_size, mixes_rows })?
            }
            false => None,
        };
        let (inputs_completed, outputs_completed) = (opening.inputs.is_empty(), opening.outputs.is_empty());
        let mut warnings = Vec::new();
        // An input that is listed is one that requests are to carry.
        if settings.completes && inputs_completed {
            warnings.extend(unpaired::warning(signature, &pairs, Taken { otherwise: &taken, ..Taken::default() }));
        }
        let origins = Origins { pairs: from, inputs_completed, outputs_completed };
        Ok(Self { pairs, completed, origins, warnings, batch_scale })
    }
}

fn by_name(opening: &Opening, signature: &Signature, settings: Settings) -> Result<Vec<StatePair>, CompletionError> {
    let declared = opening.states.declared.iter().map(|state| &state.pair.input);
    let otherwise: Vec<&str> = opening.taken.iter().chain(declared).map(String::as_str).collect();
    let by_requests: Vec<&str> = opening.inputs.iter().map(String::as_str).collect();
    let taken = Taken { by_requests: &by_requests, otherwise: &otherwise };
    let found = match state_pairs(signature, &opening.states.patterns, taken) {
        Err(CompletionError::NoPairs { .. }) if opening.allows_no_states() => return Ok(Vec::new()),
        found => found,
    };
    if !settings.completes && !opening.wants_pairs_by_name() {
        return Err(ConfigError::MissingParameter {
            name: "state_pairs",
            why: "it says which outputs of the model are its next inputs, as '<<<input, output>>>', or 'auto' to find \
                  them by their names; the model's graph description names none"
                .to_owned(),
        }
        .into());
    }
    found
}
