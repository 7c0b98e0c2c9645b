//! Converts a model at load, in memory: recurrences inside it get states, and a batch of 1 is opened.
//!
//! Rules: the model repository is never written. A converted model is served only if its answers are those of the
//! original, which is checked on random data. Not for: how a graph is converted (the crate `stateful_convert`).

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use prost::Message;
use prost::bytes::Bytes;
use stateful_convert::onnx::schema::ModelProto;
use stateful_convert::onnx::{external_files, numbers};
use stateful_convert::report::{Report, State, Warning};
use stateful_convert::verify::{Compared, Given, Models, Source, VerifyError, verify};
use stateful_convert::{
    ConvertError, Converted, Hint, InputAxis, Options, WeightsError, with_small_weights_shown, with_weights,
};

use crate::completion::{CompletionError, Settings, own_pairs};
use crate::config::{ConfigError, PartialConfig, StatePair, parameter_line};
use crate::onnx::{ModelSource, Nodes, Recurrence};
use crate::session::{Library, OpenError, Provider, Session};

/// Why a model is not converted.
#[derive(Debug, thiserror::Error)]
pub enum ConversionError {
    #[error("{} cannot be read: {why}", file.display())]
    Read { file: PathBuf, why: std::io::Error },
    #[error("{} cannot be converted as parameter '{parameter}' asks: {why}", file.display())]
    Refused { file: PathBuf, parameter: &'static str, why: String },
    #[error("{} cannot be converted: {why}", file.display())]
    Weights { file: PathBuf, why: WeightsError },
    #[error(
        "{} was converted, and the check of the conversion failed: {why}; stateful-convert runs the same check, and its \
         --compare-with gives values to inputs that cannot be random",
        file.display()
    )]
    Check { file: PathBuf, why: VerifyError },
    #[error(
        "parameter 'padded_inputs' lists '{input}', but with 'low_latency_transformation', states would take in the \
         padding: leave 'padded_inputs' out"
    )]
    Padded { input: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Completion(#[from] CompletionError),
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// A model as it is served.
pub struct Served {
    /// What sessions open.
    pub model: ModelSource,
    /// A model that computes where the states start, if the conversion made one.
    pub initial_states: Option<ModelSource>,
    /// What was done.
    pub notes: Vec<String>,
    /// For the operator.
    pub warnings: Vec<String>,
}

/// The model in `file`, converted if the configuration asks for that. Then the configuration gets the states of the
/// converted model.
pub fn convert_if_asked(
    partial: &mut PartialConfig,
    file: PathBuf,
    library: &Library,
    settings: Settings,
) -> Result<Served, ConversionError> {
    let asked = partial.conversion.clone();
    if asked.recurrences.is_none() && asked.batch.is_none() {
        return Ok(Served::unchanged(file));
    }
    let begun = Instant::now();
    let original = Session::open(library, &file.clone().into(), &partial.session, Provider::Cpu)?;
    let pairs =
        own_pairs(partial, &file.clone().into(), &original.signature, original.graph_description.as_deref(), settings)?;
    // Its weights may be large, and the conversion holds them again.
    drop(original);
    // A model that has states may run over the steps of a request as its author wanted. Only axes that are written say
    // that the steps go on in the next request.
    let names_axes = asked.recurrences.as_ref().is_some_and(|axes| !axes.is_empty());
    let cuts = asked.recurrences.is_some() && (pairs.is_empty() || names_axes);
    let (mut notes, mut warnings) = (Vec::new(), Vec::new());
    if asked.recurrences.is_some() && !cuts {
        notes.push(no_effect(&pairs));
        warnings.extend(left_inside(&file, &pairs)?);
    }
    if !cuts && asked.batch.is_none() {
        return Ok(Served { notes, warnings, ..Served::unchanged(file) });
    }
    if let Some(padded) = partial.ragged.inputs.first().filter(|_| cuts) {
        return Err(ConversionError::Padded { input: padded.input.clone() });
    }
    let converted = convert(partial, &file, &pairs, cuts)?;
    let is_unchanged = converted.report.opened.is_empty() && made_states(&converted.report).next().is_none();
    // A stride over time is written into the converted model's metadata.
    if is_unchanged && !pairs.is_empty() && converted.report.steps_multiple == 1 {
        return Ok(Served { notes: vec![no_effect(&pairs)], ..Served::unchanged(file) });
    }
    let models = Models {
        original: converted.original.as_deref().map_or(Source::File(&file), Source::Bytes),
        converted: Source::Bytes(&converted.model),
        initial_states: converted.initial_states.as_deref().map(Source::Bytes),
    };
    let compared = verify(library.environment(), &models, &converted.report, &Given::default());
    let compared = compared.map_err(|why| ConversionError::Check { file: file.clone(), why })?;
    let converted = if asked.zero_initial_states {
        converted.starting_at_zero().map_err(|error| refused(&file, cuts, &error.into()))?
    } else {
        converted
    };
    if cuts {
        add_states(partial, &converted)?;
    }
    notes.extend(described(&converted.report, &compared));
    notes.push(format!("the conversion and its check took {} ms", begun.elapsed().as_millis()));
    warnings.extend(converted.report.warnings.iter().map(with_parameter));
    let made = |what, model| ModelSource::made(what, file.clone(), model);
    let initial_states = converted.initial_states.map(|model| made("its initial states", model));
    Ok(Served { model: made("converted", converted.model), initial_states, notes, warnings })
}

fn no_effect(pairs: &[StatePair]) -> String {
    let listed: Vec<String> = pairs.iter().map(StatePair::to_string).collect();
    format!(
        "parameter 'low_latency_transformation' has no effect: the model's states are inputs and outputs already: {}",
        listed.join(" ")
    )
}

/// The states that a conversion made.
fn made_states(report: &Report) -> impl Iterator<Item = &State> {
    report.states.iter().filter(|state| !state.node.is_empty())
}

/// Names the recurrences inside a model that has states, which have none of them.
fn left_inside(file: &Path, pairs: &[StatePair]) -> Result<Vec<String>, ConversionError> {
    let options = Options { states: pairs.to_vec(), ..Options::default() };
    let converted = match stateful_convert::convert(read(&file.to_owned().into())?, &options) {
        Ok(converted) => converted,
        // The model is served as it is.
        Err(error) => {
            let recurrence = Nodes::of(&file.to_owned().into()).ok().and_then(|nodes| nodes.recurrence);
            let why = error.to_string().replace('\n', "; ");
            let warning = |Recurrence { node, .. }| {
                format!(
                    "{node} may begin anew in each request: whether it has a state isn't known, because the graph can't be \
                     followed: {why}"
                )
            };
            return Ok(recurrence.map(warning).into_iter().collect());
        }
    };
    let report = converted.report;
    let uncut = report.warnings.iter().filter(|warning| matches!(warning, Warning::Uncut { .. }));
    let mut warnings: Vec<String> = uncut.map(with_parameter).collect();
    let mut nodes: Vec<String> =
        made_states(&report).map(|state| format!("{} '{}'", state.operator, state.node)).collect();
    nodes.dedup();
    if !nodes.is_empty() {
        let axes = named(&report.time);
        warnings.push(format!(
            "these nodes begin anew in each request, because the model has no state for them: {}; if {axes} has the steps \
             of a sequence, write {}",
            nodes.join(", "),
            parameter_line("low_latency_transformation", &axes)
        ));
    }
    Ok(warnings)
}

impl Served {
    fn unchanged(file: PathBuf) -> Self {
        Self { model: file.into(), initial_states: None, notes: Vec::new(), warnings: Vec::new() }
    }
}

fn convert(
    partial: &PartialConfig,
    file: &Path,
    pairs: &[StatePair],
    cuts: bool,
) -> Result<Converted, ConversionError> {
    let asked = &partial.conversion;
    let axes = |written: &Option<Vec<(String, usize)>>| -> Vec<InputAxis> {
        let axis = |(input, axis): &(String, usize)| InputAxis { input: input.clone(), axis: *axis };
        written.iter().flatten().map(axis).collect()
    };
    let options = Options {
        time: if cuts { axes(&asked.recurrences) } else { Vec::new() },
        states: pairs.to_vec(),
        keep_recurrences: !cuts,
        open_batch: asked.batch.is_some(),
        batch: axes(&asked.batch),
    };
    // A session of a model in memory finds no files, so all weights have to be inside.
    let whole = with_weights(bytes_of(&file.to_owned().into())?, folder_of(file));
    let whole = whole.map_err(|why| ConversionError::Weights { file: file.to_owned(), why })?;
    stateful_convert::convert(whole, &options).map_err(|error| refused(file, cuts, &error))
}

/// The bytes of a model, with the weights that a look at its graph needs. Weights that can't be read are left out: ONNX
/// Runtime has loaded the model, or says what is wrong with it.
pub fn read(model: &ModelSource) -> Result<Bytes, ConversionError> {
    let failed = |why| ConversionError::Read { file: model.file.clone(), why };
    let bytes = match model.bytes() {
        Some(bytes) => bytes.clone(),
        None => model.without_weights().map_err(failed)?.encode_to_vec().into(),
    };
    Ok(with_small_weights_shown(bytes.clone(), folder_of(&model.file)).unwrap_or(bytes))
}

/// Bytes of a model, with its weights in files of their own. `graph` is what [`read`] gives.
pub fn byte_len(model: &ModelSource, graph: &Bytes) -> u64 {
    let external = ModelProto::decode(graph.clone()).map_or_else(|_| Vec::new(), |model| external_files(&model));
    let size = |file: &String| std::fs::metadata(folder_of(&model.file).join(file)).map_or(0, |file| file.len());
    external.iter().map(size).fold(model.byte_len(), u64::saturating_add)
}

/// The values that a model has of its own for these inputs: their initializers.
pub fn default_values(model: &ModelSource, inputs: &[&str]) -> Result<BTreeMap<String, Vec<f64>>, ConversionError> {
    let failed = |why| ConversionError::Read { file: model.file.clone(), why };
    let of_inputs = |bytes: Bytes| -> Result<BTreeMap<String, Option<Vec<f64>>>, ConversionError> {
        let model = ModelProto::decode(bytes).map_err(|error| failed(io::Error::other(error)))?;
        let weights = model.graph.iter().flat_map(|graph| &graph.initializer);
        let of_inputs = weights.filter(|weight| inputs.contains(&weight.name()));
        Ok(of_inputs.map(|weight| (weight.name().to_owned(), numbers(weight))).collect())
    };
    let mut found = of_inputs(read(model)?)?;
    // The result of `read` lacks large weights. All weights are read only for a state that has a large one.
    if found.values().any(Option::is_none) {
        let whole = with_weights(bytes_of(model)?, folder_of(&model.file));
        found = of_inputs(whole.map_err(|why| ConversionError::Weights { file: model.file.clone(), why })?)?;
    }
    let read = |(name, values): (String, Option<Vec<f64>>)| match values {
        Some(values) => Ok((name, values)),
        None => Err(failed(io::Error::other(format!("the initializer of state '{name}' holds no numbers")))),
    };
    found.into_iter().map(read).collect()
}

fn bytes_of(model: &ModelSource) -> Result<Bytes, ConversionError> {
    model.read().map_err(|why| ConversionError::Read { file: model.file.clone(), why })
}

fn folder_of(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new(""))
}

/// Names the parameter that asks for what is refused, and the parameters that would help.
fn refused(file: &Path, cuts: bool, error: &ConvertError) -> ConversionError {
    let is_batch = !cuts || matches!(error, ConvertError::Batch(_));
    let mut why = error.to_string().replace("\n  ", "; ").replace('\n', "; ");
    for hint in error.hints() {
        why += &format!("; {}", parameter(hint));
    }
    let parameter = if is_batch { "open_batch" } else { "low_latency_transformation" };
    ConversionError::Refused { file: file.to_owned(), parameter, why }
}

/// A warning, with the parameter that would help.
pub fn with_parameter(warning: &Warning) -> String {
    let text = warning.to_string().replace('\n', "; ");
    warning.hint().map_or_else(|| text.clone(), |hint| format!("{text}; {}", parameter(hint)))
}

/// The parameter for a hint.
const fn parameter(hint: Hint) -> &'static str {
    match hint {
        Hint::Time => "name the axis of the steps in place of 'true' in 'low_latency_transformation', as INPUT@AXIS",
        Hint::States => "if the model has states, name them in 'state_pairs'",
        Hint::Batch => "'open_batch' says which it is, as INPUT@AXIS in place of 'true'",
        Hint::OpenBatch => "'open_batch' lets them",
        Hint::StartAtZero => "'use_const_initializer' starts them at zero",
    }
}

/// Gives the configuration the states of the converted model, and where they start.
pub fn add_states(partial: &mut PartialConfig, converted: &Converted) -> Result<(), ConfigError> {
    partial.states.set_converted(&converted.report.states, converted.initial_states.is_some())
}

fn named(axes: &[InputAxis]) -> String {
    axes.iter().map(|axis| format!("{}@{}", axis.input, axis.axis)).collect::<Vec<_>>().join(", ")
}

/// What was done, in lines for the log.
fn described(report: &Report, compared: &[Compared]) -> Vec<String> {
    let mut lines = Vec::new();
    let cut: Vec<String> =
        made_states(report).map(|state| format!("{} of {} '{}'", state.pair, state.operator, state.node)).collect();
    if !cut.is_empty() {
        lines.push(format!(
            "the model was converted: the steps are on {}, and it has the states {}",
            named(&report.time),
            cut.join(", ")
        ));
    }
    if !report.opened.is_empty() {
        lines.push(format!("the model was converted: the batch is open on {}", named(&report.opened)));
    }
    lines.push(format!("the converted model was compared with the original: {}", comparisons(compared)));
    lines
}

/// How comparisons went, in one line.
pub fn comparisons(compared: &[Compared]) -> String {
    let result = |compared: &Compared| match compared.largest {
        0.0 => format!("{} equal bit by bit", compared.what),
        largest => format!("{} differ by {largest:.1e} at most, in '{}'", compared.what, compared.output),
    };
    compared.iter().map(result).collect::<Vec<_>>().join("; ")
}
