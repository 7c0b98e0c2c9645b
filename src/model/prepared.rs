//! A configuration and its ONNX model, understood together: what a server serves and `stateful-inspect` shows; and the
//! model that computes initial states.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rows::strings::Strings;
use rows::tensor::{DataType, element_count};
use stateful_convert::RowsInGraph;

use crate::binding::{Binding, BoundState, Initial, InitialContent, InitialModel, InitialOutput, StateApi};
use crate::completion::{Advice, Plan, Settings};
use crate::config::{self, Additions, Config, ConfigError, InitialSources, PartialConfig, StatePair};
use crate::conversion::{self, Served, convert_if_asked};
use crate::error::{LoadError, RunError};
use crate::joining::joined;
use crate::onnx::{ModelSource, Signature};
use crate::proof::{self, Rows};
use crate::session::{Copier, Library, OutputView, Provider, Run, Session, Step};
use crate::triton::Request;

/// A larger model isn't run if its graph proves that the rows stay apart: that would make its load noticeably slower.
const MOST_BYTES_TO_RUN: u64 = 64 << 20;

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

/// The model of a version's folder: its graphs joined, or the one in `file`, converted if the configuration asks for
/// that.
pub fn served(
    partial: &mut PartialConfig,
    version_dir: &Path,
    library: &Library,
    settings: Settings,
    file: impl FnOnce(&PartialConfig) -> Result<PathBuf, ConfigError>,
) -> Result<Served, LoadError> {
    match partial.join.clone() {
        Some(asked) => Ok(joined(partial, &asked, version_dir, library)?),
        None => {
            let file = file(partial)?;
            Ok(convert_if_asked(partial, file, library, settings)?)
        }
    }
}

#[derive(Clone, Copy)]
pub struct OnnxModel<'a> {
    pub signature: &'a Signature,
    pub description: Option<&'a str>,
    pub metadata: &'a BTreeMap<String, String>,
}

impl Prepared {
    /// Completes the configuration from the signature of the model, and binds the two. `repository` is the model's
    /// folder. The error for a known model has the parameters that it needs.
    ///
    /// If several sequences would share a run, this checks whether they change each other's answers. If the
    /// configuration gives no batch size, each then runs alone; else the load fails. `on_host` gives a session that
    /// runs on the host.
    pub fn new(
        partial: &mut PartialConfig,
        session: &Session,
        model: &ModelSource,
        repository: &Path,
        settings: Settings,
        on_host: impl FnOnce() -> Result<Arc<Session>, LoadError>,
    ) -> Result<Self, LoadError> {
        // Completion changes `partial`, and a second completion begins with what the user wrote.
        let written = partial.clone();
        let onnx = OnnxModel {
            signature: &session.signature,
            description: session.graph_description.as_deref(),
            metadata: &session.metadata,
        };
        let mut prepared = Self::from_onnx(partial, onnx, model, repository, settings)?;
        if prepared.config.max_rows_per_run <= 1 {
            return Ok(prepared);
        }
        let Some(why) = prepared.look_for_mixed_rows(model, on_host)? else { return Ok(prepared) };
        if prepared.config.trust_batch {
            prepared.plan.rows = Some("rows: change each other's results".to_owned());
            prepared.plan.warnings.push(format!(
                "sequences that share a run change each other's answers, as 'trust_batch' allows: {why}"
            ));
        } else if written.max_batch_size == 0 && !written.has_rows_per_run() {
            *partial = written;
            let settings = Settings { rows_mix: true, ..settings };
            prepared = Self::from_onnx(partial, onnx, model, repository, settings)?;
            prepared.plan.rows =
                Some("rows: run one by one, because they would change each other's results".to_owned());
            prepared.plan.warnings.push(format!(
                "each sequence runs alone, because those that share a run would change each other's answers: {why}; to let \
                 them share runs, export the model so that it treats its rows one by one, or set parameter 'trust_batch' to \
                 true to serve it as it is"
            ));
        } else {
            return Err(LoadError::RowsMix { why });
        }
        Ok(prepared)
    }

    /// How the rows of a run change each other's results; `None` if they don't, or if that isn't known.
    fn look_for_mixed_rows(
        &mut self,
        model: &ModelSource,
        on_host: impl FnOnce() -> Result<Arc<Session>, LoadError>,
    ) -> Result<Option<String>, LoadError> {
        let graph = conversion::read(model)?;
        let weights = conversion::byte_len(model, &graph);
        let in_graph = match &self.plan.nodes.batch_scale {
            Some(scale) => RowsInGraph::Unproven(format!("{scale} takes one scale over all rows")),
            None => self.binding.rows_in_graph(graph),
        };
        if in_graph == RowsInGraph::Apart && weights > MOST_BYTES_TO_RUN {
            self.plan.rows = Some("rows: proved apart (graph)".to_owned());
            return Ok(None);
        }
        let rows = match on_host() {
            Ok(session) => proof::prove(&self.binding, self.config.max_rows_per_run, &session),
            Err(error) => Rows::Unknown(error.to_string()),
        };
        self.plan.rows = Some(match (rows, in_graph) {
            (Rows::Apart, RowsInGraph::Apart) => "rows: proved apart (graph, random data)".to_owned(),
            (Rows::Unknown(_), RowsInGraph::Apart) => "rows: proved apart (graph)".to_owned(),
            (Rows::Rounded(why), RowsInGraph::Apart) => {
                format!("rows: proved apart (graph); the model amplifies rounding: {why}")
            }
            (Rows::Apart, RowsInGraph::Unproven(node)) => {
                format!("rows: apart in runs of random data; the graph doesn't prove it: {node}")
            }
            (Rows::Unknown(why), RowsInGraph::Unproven(node)) => {
                self.plan.warnings.push(format!(
                    "sequences that share a run may change each other's answers: {node}, and random data can't show it: \
                     {why}; compare the answers of several sequences at once with those of each alone, and write \
                     'max_batch_size: 1' if they differ"
                ));
                "rows: not known to be apart".to_owned()
            }
            (Rows::Missing(why), _) if self.config.trust_batch => {
                self.plan.warnings.push(format!("requests can fail, as 'trust_batch' allows: the output {why}"));
                "rows: missing in an output".to_owned()
            }
            (Rows::Missing(why), _) => return Err(LoadError::MissingRows { why }),
            (Rows::Mixed(why), RowsInGraph::Apart) | (Rows::Apart | Rows::Unknown(_), RowsInGraph::Mixed(why)) => {
                return Ok(Some(why));
            }
            (Rows::Mixed(why) | Rows::Rounded(why), RowsInGraph::Mixed(node) | RowsInGraph::Unproven(node)) => {
                return Ok(Some(format!("{why}; {node}")));
            }
        });
        Ok(None)
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
        let mut sources = InitialSources::read(repository, config.states.initial_files(), metadata)?;
        let has_default = |pair: &&StatePair| signature.defaults.iter().any(|info| info.name == pair.input);
        let with_defaults: Vec<&str> = plan.pairs.iter().filter(has_default).map(|pair| pair.input.as_str()).collect();
        if !with_defaults.is_empty() {
            sources.defaults = conversion::default_values(model, &with_defaults)?;
        }
        let mut binding = Binding::new(&config, &plan.pairs, &plan.nodes.constant_outputs, signature, &sources)?;
        binding.needs_steps = plan.nodes.needs_steps.clone();
        binding.set_steps_multiples(metadata)?;
        Binding::check_initial_states(&config.states, metadata)?;
        if config.max_rows_per_run > 1 {
            binding.check_one_batch(&config, &plan.pairs, signature)?;
            binding.check_marked_batch(&config, signature, || conversion::read(model).map_err(LoadError::from))?;
        }
        if plan.nodes.recurrence.is_some() {
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

    /// Loads the model for initial states: the one that a conversion made, or a file in the folder of the model's
    /// version. One without inputs gives the same each time, so it runs only once, here.
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
        let bound = InitialModel::new(&self.binding, &session.signature)?;
        if !bound.inputs.is_empty() {
            self.binding.check_initial_model(&label)?;
            self.binding.set_initial_from_model(&bound);
            return Ok(Some(LoadedInitialModel { session, binding: bound }));
        }
        let ran = InitialStep::new(session, &bound)?.run(&self.binding, &bound, None);
        let initial = ran.map_err(|error| LoadError::InitialModel { model: label, source: error })?;
        self.binding.set_initial(initial);
        Ok(None)
    }
}

pub struct LoadedInitialModel {
    pub session: Arc<Session>,
    pub binding: InitialModel,
}

/// The buffers in which one instance runs the model for initial states.
pub struct InitialStep {
    step: Step,
}

impl InitialStep {
    pub fn new(session: Arc<Session>, model: &InitialModel) -> Result<Self, LoadError> {
        Ok(Self { step: Step::new(session, &model.step, Copier::default())? })
    }

    /// Computes the initial states of a sequence that starts with `request`. Returns one entry for each state, `None`
    /// for states that the model does not compute. A model without inputs needs no request.
    pub fn run(
        &mut self,
        binding: &Binding,
        model: &InitialModel,
        request: Option<&Request>,
    ) -> Result<Vec<Option<Initial>>, RunError> {
        for (index, &of) in model.inputs.iter().enumerate() {
            let bound = &binding.inputs[of];
            let given = bound.request().and_then(|of| Some((of.form, request?.input(of.position)?)));
            let Some((form, input)) = given else { continue };
            let dims = form.model_dims(input.dims());
            if bound.data_type == DataType::Bytes {
                self.step.set_strings(
                    index,
                    dims,
                    1,
                    input.strings().into_iter().flat_map(Strings::iter).enumerate(),
                )?;
                continue;
            }
            let mut rest = self.step.input(index, dims, 1)?;
            for piece in input.pieces() {
                let (now, behind) = rest.split_at_mut(piece.byte_len());
                piece.copy_to(now);
                rest = behind;
            }
        }
        self.step.run(Run { rows: 1, ..Run::default() })?;
        let mut initial = vec![None; binding.states.len()];
        for (index, output) in model.outputs.iter().enumerate() {
            let (state, view) = (&binding.states[output.state], self.step.output(index, None)?);
            initial[output.state] = Some(read(binding, state, *output, view)?);
        }
        self.step.give_back();
        Ok(initial)
    }
}

/// Checks that an output has the shape of one row of its state, and copies it.
fn read(binding: &Binding, state: &BoundState, output: InitialOutput, view: OutputView) -> Result<Initial, RunError> {
    let mut dims = view.dims.to_vec();
    if let Some(axis) = state.batch_axis.filter(|_| dims.len() + 1 == state.dims.len() || !output.has_batch) {
        dims.insert(axis.min(dims.len()), 1);
    }
    let fits = |(&dim, &wanted): (&i64, &i64)| dim == wanted || wanted < 0;
    if dims.len() != state.dims.len() || !dims.iter().zip(&state.dims).all(fits) {
        return Err(RunError::InitialState {
            name: binding.inputs[state.input].name.clone(),
            dims: view.dims.to_vec(),
            wanted: state.dims.clone(),
        });
    }
    let content = match state.data_type {
        DataType::Bytes => InitialContent::Strings(view.strings.clone()),
        _ if element_count(&dims) == Some(0) => InitialContent::Zeros,
        _ => InitialContent::Bytes(view.bytes.to_vec()),
    };
    Ok(Initial { dims, content })
}
