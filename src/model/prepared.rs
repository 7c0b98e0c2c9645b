//! A configuration and its ONNX model, understood together: what a server serves and `stateful-inspect` shows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::{InitialStep, LoadedInitialModel};
use crate::binding::{Binding, InitialModel, StateApi};
use crate::completion::{Advice, Plan, Settings};
use crate::config::{self, Additions, Config, InitialSources, PartialConfig};
use crate::conversion;
use crate::error::LoadError;
use crate::session::{Library, ModelSource, Provider, Session, Signature};

/// A configuration that is complete and fits its model.
#[expect(missing_docs, reason = "the types say what they are")]
pub struct Prepared {
    pub config: Config,
    pub binding: Binding,
    pub state_api: Option<StateApi>,
    pub plan: Plan,
    /// Whether something was added to the configuration's document.
    pub has_additions: bool,
}

/// An ONNX model's signature, description and metadata.
#[derive(Clone, Copy)]
pub struct OnnxModel<'a> {
    pub signature: &'a Signature,
    /// The graph's description.
    pub description: Option<&'a str>,
    pub metadata: &'a BTreeMap<String, String>,
}

impl Prepared {
    /// Completes the configuration from the signature of the model, and binds the two. `repository` is the model's folder.
    /// The error for a known model has the parameters that it needs.
    pub fn new(
        partial: &mut PartialConfig,
        session: &Session,
        model: &ModelSource,
        repository: &Path,
        settings: Settings,
    ) -> Result<Self, LoadError> {
        let onnx = OnnxModel {
            signature: session.signature(),
            description: session.graph_description(),
            metadata: session.metadata(),
        };
        Self::from_onnx(partial, onnx, model, repository, settings)
    }

    /// As [`Prepared::new`], without a session.
    pub fn from_onnx(
        partial: &mut PartialConfig,
        onnx: OnnxModel,
        model: &ModelSource,
        repository: &Path,
        settings: Settings,
    ) -> Result<Self, LoadError> {
        Self::prepare(partial, onnx, model, repository, settings).map_err(|error| {
            let needs = Advice::new(partial, onnx.signature).warnings;
            if needs.is_empty() {
                return error;
            }
            LoadError::Advised { error: Box::new(error), advice: needs.join("; ") }
        })
    }

    fn prepare(
        partial: &mut PartialConfig,
        OnnxModel { signature, description, metadata }: OnnxModel,
        model: &ModelSource,
        repository: &Path,
        settings: Settings,
    ) -> Result<Self, LoadError> {
        let (inputs, outputs) = (signature.input_names(), signature.output_names());
        let listed = partial.take_id_tensors(&inputs, &outputs, settings.completes)?;
        partial.take_state_tensors(&inputs, &outputs);
        let plan = Plan::new(partial, model, signature, description, settings)?;
        partial.add(&plan.additions);
        // The document is not read again: it has the same.
        let config = partial.clone().resolve()?;
        let sources = InitialSources::read(repository, &config.states, metadata)?;
        let mut binding = Binding::new(&config, &plan.pairs, &plan.constant_outputs, signature, &sources)?;
        binding.needs_steps = plan.needs_steps.clone();
        binding.set_steps_multiples(metadata)?;
        Binding::check_initial_states(&config.states, metadata)?;
        if config.max_rows_per_run > 1 {
            binding.check_one_batch(&config, &plan.pairs, signature)?;
            binding.check_marked_batch(&config, signature, || conversion::read(model).map_err(LoadError::from))?;
        }
        if plan.has_recurrence {
            // Of most other models, only the nodes are read.
            let file = conversion::read(model)?;
            binding.check_ends(file.clone())?;
            if config.max_rows_per_run > 1 {
                binding.check_rows(file)?;
            }
        }
        let mut state_api = StateApi::new(&config, &binding)?;
        let mut has_additions = false;
        if settings.completes {
            let tensors = state_api.as_mut().map(|api| {
                api.list_missing();
                (std::mem::take(&mut api.missing_inputs), std::mem::take(&mut api.missing_outputs))
            });
            let (inputs, outputs) = tensors.unwrap_or_default();
            let changed = partial.complete_state_api(&inputs, &outputs);
            has_additions = listed || changed || plan.additions != Additions::default();
        }
        Ok(Self { config, binding, state_api, plan, has_additions })
    }

    /// Loads the model for initial states: the one that a conversion made, or a file in the folder of the model's version.
    /// One without inputs gives the same each time, so it runs only once, here.
    pub fn load_initial_model(
        &mut self,
        converted: Option<ModelSource>,
        version_dir: &Path,
        library: &Library,
    ) -> Result<Option<LoadedInitialModel>, LoadError> {
        let configured = self.config.states.initial_model.as_deref();
        let (label, source) = if let Some(converted) = converted {
            ("model of initial states that the conversion made".to_owned(), converted)
        } else if let Some(name) = configured {
            let file = config::find_named_file(version_dir, "parameter 'initial_state_model'", name)?;
            (format!("initial_state_model '{name}'"), file.into())
        } else {
            return Ok(None);
        };
        let session = Arc::new(Session::open(library, &source, &self.config.session, Provider::Cpu)?);
        let bound = InitialModel::new(&self.binding, session.signature())?;
        if !bound.inputs.is_empty() {
            self.binding.set_initial_from_model(&bound);
            return Ok(Some(LoadedInitialModel { session, binding: bound }));
        }
        let ran = InitialStep::new(session, &bound)?.run(&self.binding, &bound, None);
        let initial = ran.map_err(|error| LoadError::InitialModel { model: label, source: error })?;
        self.binding.set_initial(initial);
        Ok(None)
    }
}
