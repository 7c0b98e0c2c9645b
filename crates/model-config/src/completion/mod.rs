//! What a configuration lacks, found in the model's signature: state pairs, inputs, outputs, the largest batch and how
//! sequences are scheduled.
//!
//! Rules: written fields are never changed. If the signature can be understood in two ways, that is an error that lists
//! both. `docs/models.md` says what is filled in when. Not for: whether the result fits the model ([`crate::binding`]).

#![allow(missing_docs, reason = "a name that says it all needs no sentence")]

mod doubts;
mod error;
mod fill;
mod known_models;
mod pairing;

pub use error::CompletionError;
use error::{Result, ends_of_layers};
use fill::Known;
pub use known_models::{Advice, Family};
use pairing::{Taken, confirmed, state_pairs};

use crate::config::{
    Additions, ConfigError, GROWING_PADDING, GeneratedKind, PairsFrom, PartialConfig, StatePair, StatePairs,
    parameter_line,
};
use crate::onnx::{ModelSource, Nodes, Recurrence, Signature};

#[derive(Clone, Debug)]
pub struct Plan {
    pub pairs: Vec<StatePair>,
    /// Empty if nothing may be completed.
    pub additions: Additions,
    pub origins: Origins,
    pub warnings: Vec<String>,
    /// Parameters that would help clients.
    pub notes: Vec<String>,
    /// What is known of the rows of a run, if there may be several.
    pub rows: Option<String>,
    pub nodes: Nodes,
}

/// Where the parts of a configuration come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origins {
    /// The states that are not declared in `sequence_batching.state`.
    pub pairs: PairsFrom,
    pub inputs_completed: bool,
    pub outputs_completed: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether missing fields are filled in. With `state_pairs: auto` the states are found even if this is false.
    pub completes: bool,
    /// `--backend-config=default-max-batch-size`.
    pub default_max_batch_size: usize,
    /// Whether the rows of a run were seen to change each other's results.
    pub rows_mix: bool,
}

impl Plan {
    pub fn new(
        config: &PartialConfig,
        model: &ModelSource,
        signature: &Signature,
        graph_description: Option<&str>,
        settings: Settings,
    ) -> Result<Self> {
        let mut warnings = Vec::new();
        // A model is served even if ONNX Runtime alone can read its file.
        let nodes = Nodes::of(model).unwrap_or_else(|error| {
            warnings.push(format!(
                "the nodes of {} cannot be read: {error}. If the model quantizes with one scale for the whole batch, \
                 its sequences change each other's answers unless max_batch_size is 1",
                model.file.display()
            ));
            Nodes::default()
        });
        let recurrence = nodes.recurrence.as_ref();
        let find =
            || found_pairs(config, signature, settings).map_err(|error| error.with_recurrence(recurrence.cloned()));
        let (pairs, from) = config.states.all_pairs(graph_description, find)?;
        let (inputs_completed, outputs_completed) = (config.inputs.is_empty(), config.outputs.is_empty());
        let origins = Origins { pairs: from, inputs_completed, outputs_completed };
        let Advice { warnings: of_known, mut notes } = Advice::new(config, signature);
        warnings.extend(of_known);
        match from {
            PairsFrom::Parameter | PairsFrom::Description => warnings.extend(doubts::crossed(signature, &pairs)),
            // Only a name has decided here, so a second candidate may be the right one.
            PairsFrom::Names => notes.extend(doubts::other_values(signature, &pairs)),
            PairsFrom::Shapes | PairsFrom::Conversion => {}
        }
        warnings.extend(doubts::mistakes(config, signature, &pairs));
        match recurrence {
            Some(of) if pairs.is_empty() && !of.ends.is_empty() => {
                warnings.push(format!("no states are kept; {}", ends_of_layers(&of.ends)));
            }
            Some(Recurrence { node, .. }) if pairs.is_empty() => warnings.push(format!(
                "no states are kept, and {node} begins anew in each run: write {}, or convert the model with \
                 stateful-convert, which makes its state an input and an output",
                parameter_line("low_latency_transformation", "true")
            )),
            None if pairs.is_empty() => notes.push(
                "no states are kept: 'sequence_batching' is given, but no input and output of the model are \
                 recognized as the two ends of a state. If there is one, write it in parameter 'state_pairs'"
                    .to_owned(),
            ),
            _ => {}
        }
        let mut plan = Self { pairs, additions: Additions::default(), origins, warnings, notes, rows: None, nodes };
        if settings.completes {
            plan.complete(config, signature, settings)?;
        }
        // Padding changes answers unless a mask tells the model what is padding.
        let has_mask = config.generated.iter().any(|generated| matches!(generated.kind, GeneratedKind::Mask { .. }));
        if has_mask && config.states.growing_padding.is_none() {
            plan.notes.push(format!(
                "sequences whose growing states have different lengths run one by one: to let them share runs, write {}; the \
                 backend checks at load that answers stay the same",
                parameter_line(GROWING_PADDING, "left")
            ));
        }
        let requests = if inputs_completed { &plan.additions.inputs } else { &config.inputs };
        if config.generated.is_empty() {
            plan.notes.extend(doubts::could_be_generated(signature, requests, &plan.pairs));
        }
        Ok(plan)
    }

    fn complete(&mut self, config: &PartialConfig, signature: &Signature, settings: Settings) -> Result<()> {
        let taken = config.taken();
        let known = Known {
            config,
            signature,
            pairs: &self.pairs,
            taken: &taken,
            nodes: &self.nodes,
            default_max_batch_size: settings.default_max_batch_size,
            mixes_rows: self.nodes.batch_scale.is_some() || settings.rows_mix,
        };
        self.additions = fill::additions(&known)?;
        self.warnings.extend(known.batch_warning(self.additions.max_batch_size));
        // An input that is listed is one that requests are to carry.
        if self.origins.inputs_completed {
            let held = config.held_inputs.iter().map(String::as_str);
            let cut = config.windows.inputs.iter().map(|window| window.input.as_str());
            let taken: Vec<&str> = taken.iter().copied().chain(held).chain(cut).collect();
            let taken = Taken { otherwise: &taken, ..Taken::default() };
            self.warnings.extend(doubts::may_be_state(signature, &self.pairs, taken));
        }
        Ok(())
    }
}

/// The states that a model has before it is converted.
pub fn own_pairs(
    config: &PartialConfig,
    model: &ModelSource,
    signature: &Signature,
    graph_description: Option<&str>,
    settings: Settings,
) -> Result<Vec<StatePair>> {
    // Only an error needs the nodes, and reading them takes time for large models.
    let recurrence = || Nodes::of(model).ok().and_then(|nodes| nodes.recurrence);
    let find = || found_pairs(config, signature, settings).map_err(|error| error.with_recurrence(recurrence()));
    config.states.all_pairs(graph_description, find).map(|(pairs, _)| pairs)
}

fn found_pairs(config: &PartialConfig, signature: &Signature, settings: Settings) -> Result<Vec<StatePair>> {
    let declared = config.states.declared.iter().map(|state| state.pair.input.as_str());
    let otherwise: Vec<&str> = config.taken().into_iter().chain(declared).collect();
    let by_requests: Vec<&str> = config.inputs.iter().map(|input| input.name.as_str()).collect();
    let taken = Taken { by_requests: &by_requests, otherwise: &otherwise };
    let found = state_pairs(signature, &config.states.patterns, taken);
    if config.states.pairs == StatePairs::AutoByShape {
        return confirmed(signature, found, taken);
    }
    // A conversion at load gives states to a model that has none.
    let may_have_none = config.allows_no_states() || config.conversion.recurrences.is_some();
    if may_have_none && matches!(found, Err(CompletionError::NoPairs { .. })) {
        return Ok(Vec::new());
    }
    if !settings.completes && config.states.pairs != StatePairs::Auto {
        let why = "it says which outputs of the model are its next inputs, as '<<<input, output>>>', or 'auto' to find \
                   them by their names; the model's graph description names none";
        return Err(ConfigError::MissingParameter { name: "state_pairs", why: why.to_owned() }.into());
    }
    found
}
