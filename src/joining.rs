//! Joins the graphs of a version's folder to one model when it is loaded, in memory.
//!
//! Rules: the model repository is never written. A joined model is served only if its answers are those of its graphs,
//! which is checked on random data. Not for: how graphs are joined (the crate `stateful_convert`), nor a model of one
//! file (`conversion`).

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use prost::bytes::Bytes;
use stateful_convert::join::{
    Context, GraphFrom, JoinError, JoinOptions, Joined, ListedGraph, Part, Plan, join, read_pieces,
};
use stateful_convert::onnx::{DataType, Dim, write};
use stateful_convert::report::{Report, StepInput};
use stateful_convert::verify::{Amount, Given, JoinedModels, Source, VerifyError, verify_joined};
use stateful_convert::{BuiltinError, InputAxis, WeightsError, builtin, is_batch_axis, with_weights};

use crate::config::{
    ConfigError, FirstRequest, GENERATED_INPUTS, GeneratedInput, GeneratedKind, JOIN, Join, NamedCounter, NewElements,
    PartialConfig, SEARCH, StateDims, StatePairs, find_named_file,
};
use crate::conversion::{Served, add_states, comparisons, with_parameter};
use crate::onnx::ModelSource;
use crate::session::Library;

/// Why graphs are not joined.
#[derive(Debug, thiserror::Error)]
pub enum JoiningError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{} cannot be read: {why}", file.display())]
    Read { file: PathBuf, why: io::Error },
    #[error("{} cannot be joined: {why}", file.display())]
    Weights { file: PathBuf, why: WeightsError },
    #[error("parameter '{JOIN}': {0}")]
    Builtin(#[from] BuiltinError),
    #[error("parameter '{SEARCH}': tokens={name}: {why}")]
    Pieces { name: String, why: String },
    #[error("the graphs in {} cannot be joined as parameter '{JOIN}' asks: {why}", folder.display())]
    Refused { folder: PathBuf, why: Box<JoinError> },
    #[error("parameter '{parameter}' names '{input}', which a wire leads to: {rule}")]
    Inner { parameter: &'static str, input: String, rule: &'static str },
    #[error(
        "the graphs in {} were joined, and the check of the joined model failed: {why}; stateful-convert join runs the same \
         check, and its --compare-with gives values to inputs that cannot be random",
        folder.display()
    )]
    Check { folder: PathBuf, why: VerifyError },
}

/// Joins the graphs of the folder, compares the joined model with them, and gives the configuration its states.
pub fn joined(
    partial: &mut PartialConfig,
    asked: &Join,
    folder: &Path,
    library: &Library,
) -> Result<Served, JoiningError> {
    let begun = Instant::now();
    let parts: Vec<Part> = asked.graphs.iter().map(|graph| part(graph, folder)).collect::<Result<_, _>>()?;
    let options = options(partial, asked, folder)?;
    let refused = |why| JoiningError::Refused { folder: folder.to_owned(), why: Box::new(why) };
    let Joined { converted, plan } = join(&parts, &options).map_err(refused)?;
    take_contexts(partial, &plan)?;
    let models = JoinedModels {
        parts: parts.iter().map(|part| Source::Bytes(&part.model)).collect(),
        joined: Source::Bytes(&converted.model),
        amount: Amount::at_load(),
    };
    let given = given(partial, &converted.report);
    let compared = verify_joined(library.environment(), &models, &plan, &converted.report, &given);
    let compared = compared.map_err(|why| JoiningError::Check { folder: folder.to_owned(), why })?;
    add_states(partial, &converted)?;
    let names: Vec<&str> = asked.graphs.iter().map(|graph| graph.name.as_str()).collect();
    let notes = vec![
        format!("the graphs {} were joined to one", names.join(", ")),
        format!("the joined model was compared with its graphs: {}", comparisons(&compared)),
        format!("joining and its check took {} ms", begun.elapsed().as_millis()),
    ];
    let warnings = converted.report.warnings.iter().map(with_parameter).collect();
    let model = ModelSource::made("joined", folder.to_owned(), converted.model);
    Ok(Served { model, initial_states: None, notes, warnings })
}

/// Reads or makes a graph. All weights go into it, because a session of a model in memory finds no files.
fn part(graph: &ListedGraph, folder: &Path) -> Result<Part, JoiningError> {
    let model = match &graph.from {
        GraphFrom::Builtin { graph, options } => {
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            write(&builtin(graph, &options)?).into()
        }
        GraphFrom::File(name) => {
            let file = find_named_file(folder, "parameter 'join'", name)?;
            let bytes = fs::read(&file).map_err(|why| JoiningError::Read { file: file.clone(), why })?;
            // Clones share them.
            let bytes = Bytes::from(bytes);
            let own = file.parent().unwrap_or(Path::new(""));
            match with_weights(bytes.clone(), own) {
                // Joining says what is wrong with it, by the graph's name.
                Err(WeightsError::Model(_)) => bytes,
                read => read.map_err(|why| JoiningError::Weights { file, why })?,
            }
        }
    };
    Ok(Part { name: graph.name.clone(), model, folder: String::new() })
}

fn options(partial: &PartialConfig, asked: &Join, folder: &Path) -> Result<JoinOptions, JoiningError> {
    let states = match &partial.states.pairs {
        StatePairs::Listed(pairs) => pairs.as_slice(),
        _ => &[],
    };
    let declared = partial.states.declared.iter().map(|state| &state.pair);
    let mut all = states.to_vec();
    all.extend(declared.filter(|pair| !states.contains(pair)).cloned());
    let is_of_graph = |name: &str| {
        let graph = name.split_once('.').map(|(graph, _)| graph);
        asked.graphs.iter().any(|listed| Some(listed.name.as_str()) == graph)
    };
    let context = |context: &crate::config::Context| Context {
        input: context.input.clone(),
        elements: context.length as i64,
        axis: context.axis,
        whole: context.first == FirstRequest::Whole,
    };
    let of_graphs = partial.contexts.iter().filter(|context| is_of_graph(&context.input));
    let pieces = |name: &str| {
        let file = find_named_file(folder, "parameter 'search'", name)?;
        read_pieces(&file).map_err(|why| JoiningError::Pieces { name: name.to_owned(), why })
    };
    let tokens = asked.search.as_ref().and_then(|search| search.tokens.as_deref());
    Ok(JoinOptions {
        wires: asked.wires.clone(),
        states: all,
        dims: partial.states.dims.iter().filter_map(dims).collect(),
        contexts: of_graphs.map(context).collect(),
        outputs: partial.outputs.iter().map(|output| output.name.clone()).filter(|name| is_of_graph(name)).collect(),
        search: asked.search.clone(),
        pieces: tokens.map(pieces).transpose()?,
    })
}

/// The dims of a state, unless a length is left open, which the graph may name.
fn dims(state: &StateDims) -> Option<(String, Vec<Dim>)> {
    let dim = |(axis, &dim): (usize, &i64)| match dim {
        _ if state.batch_axis == Some(axis) => Some(Dim::Symbol("batch".to_owned())),
        0.. => Some(Dim::Known(dim)),
        _ => None,
    };
    let dims: Option<Vec<Dim>> = state.dims.iter().enumerate().map(dim).collect();
    Some((state.name.clone(), dims?))
}

/// Removes the contexts of wired inputs from the configuration, because the joined model contains them. Refuses
/// windows, generated inputs and constants for these: the backend makes them only for inputs of requests.
fn take_contexts(partial: &mut PartialConfig, plan: &Plan) -> Result<(), JoiningError> {
    const ONE_OF_TWO: &str = "it takes what the wire brings: leave one of the two out";
    let inner = |input: &str| plan.parts.iter().any(|part| part.takes(input));
    let refused = |parameter, input: &str, rule| Err(JoiningError::Inner { parameter, input: input.to_owned(), rule });
    for context in partial.contexts.iter().filter(|context| inner(&context.input)) {
        if context.new.is_some() {
            let rule = "leave out '+' and the number of new elements: the graph that gives the input decides it";
            return refused("input_context", &context.input, rule);
        }
        if context.first == FirstRequest::Repeat {
            return refused("input_context", &context.input, "':zeros' or ':whole' is expected");
        }
    }
    if let Some(window) = partial.windows.inputs.iter().find(|window| inner(&window.input)) {
        let rule = "windows are cut from inputs of requests, and all graphs run for each window: name an input of \
                    requests, with the length that makes one window for this input";
        return refused("input_windows", &window.input, rule);
    }
    for GeneratedInput { input, kind, .. } in &partial.generated {
        if inner(input) {
            return refused(GENERATED_INPUTS, input, ONE_OF_TWO);
        }
        let counted = match kind {
            GeneratedKind::Positions(of)
            | GeneratedKind::Mask { new: NewElements::Of(of), .. }
            | GeneratedKind::Count(NamedCounter::Elements(of))
            | GeneratedKind::Last { count: NamedCounter::Elements(of), .. } => of,
            _ => continue,
        };
        if inner(&counted.name) {
            let rule = "only elements that requests carry are counted: name an input of requests, or let a graph of the list \
                        count";
            return refused(GENERATED_INPUTS, &counted.name, rule);
        }
    }
    if let Some((input, _)) = partial.constants.iter().find(|(input, _)| inner(input)) {
        return refused("constant_inputs", input, ONE_OF_TWO);
    }
    partial.contexts.retain(|context| !plan.has_context(&context.input));
    Ok(())
}

/// What the comparison gives to inputs: the lengths and values that the configuration has for them.
fn given(partial: &PartialConfig, report: &Report) -> Given {
    let mut given = Given::default();
    for input in &report.inputs {
        let is_open = |&axis: &usize| !matches!(input.dims[axis], Dim::Known(_)) && !is_batch_axis(&input.dims, axis);
        let open: Vec<usize> = (0..input.dims.len()).filter(is_open).collect();
        for &axis in &open {
            if let Some(length) = length(partial, input, axis, open.len() == 1) {
                given.lengths.push((InputAxis { input: input.name.clone(), axis }, length));
            }
        }
        given.values.extend(value(partial, input, &given).map(|value| (input.name.clone(), value)));
    }
    given
}

/// The length of an open axis, if the configuration gives it. `is_only` if the input has no other one.
fn length(partial: &PartialConfig, input: &StepInput, axis: usize, is_only: bool) -> Option<i64> {
    let is_here = |written: Option<usize>| written.map_or(is_only, |written| written == axis);
    let window = partial.windows.of(&input.name).filter(|window| is_here(window.axis)).map(|window| window.length);
    let context = partial.contexts.iter().find(|context| context.input == input.name && is_here(context.axis));
    let listed = partial.inputs.iter().find(|tensor| tensor.name == input.name).and_then(|tensor| {
        // Without Triton's batch dimension.
        let axis = axis.checked_sub(input.dims.len().saturating_sub(tensor.dims.len()))?;
        tensor.dims.get(axis).copied().filter(|&dim| dim > 0)
    });
    let new = window.or(context.and_then(|context| context.new)).map(|new| new as i64).or(listed);
    Some(new? + context.map_or(0, |context| context.length as i64))
}

/// The value of each element of an input that requests don't carry.
fn value(partial: &PartialConfig, input: &StepInput, given: &Given) -> Option<f64> {
    if let Some((_, values)) = partial.constants.iter().find(|(name, _)| *name == input.name) {
        let [value] = values.as_slice() else { return None };
        return value.parse().ok().or_else(|| Some(f64::from(value.parse::<bool>().ok()?)));
    }
    if let Some(generated) = partial.generated.iter().find(|generated| generated.input == input.name) {
        let is_mask = matches!(generated.kind, GeneratedKind::Mask { .. } | GeneratedKind::Last { .. });
        return Some(if is_mask { 1.0 } else { generated.addend as f64 });
    }
    let padded = partial.ragged.inputs.iter().find(|padded| padded.lengths == input.name)?;
    let length = given.lengths.iter().find(|(axis, _)| axis.input == padded.input)?;
    (input.elem != DataType::Bool as i32).then_some(length.1 as f64)
}
