//! One model from the parts of several: versions, metadata, functions, weights and names.

use std::collections::HashMap;

use super::context::{self, Context};
use super::part::{JoinError, Read, Result, is_onnx, set_opset};
use super::rename::{Names, move_weights};
use super::wires::Link;
use crate::batch::is_batch_axis;
use crate::convert::set_initial_states;
use crate::onnx::Dim;
use crate::onnx::schema::{GraphProto, ModelProto, NodeProto, StringStringEntryProto};
use crate::report::{INITIAL_STATES, InitialState, STEPS_MULTIPLE, StepsMultiple};

/// The oldest version of ONNX's format with functions in a model.
const IR_OF_FUNCTIONS: i64 = 8;

pub fn names(parts: &[Read], links: &[Link], contexts: &[Context]) -> Result<Vec<Names>> {
    let mut all: Vec<Names> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let (mut tensors, mut symbols) = (HashMap::new(), HashMap::new());
        for link in links.iter().filter(|link| link.to.graph == index) {
            let (source, target) = (link.source(parts)?, link.target(parts)?);
            let of_source = &all[link.from.graph];
            // With context, a node makes the input.
            let has_context = context::of(contexts, parts, link).is_some();
            let made = if has_context { part.full(&link.to.tensor) } else { of_source.tensor(&link.from.tensor) };
            tensors.insert(link.to.tensor.clone(), made);
            let (given, taken) = (source.dims().unwrap_or_default(), target.dims().unwrap_or_default());
            // A wire that a search takes apart joins no dimensions but the batch.
            let shared = if given.len() == taken.len() { given.len() } else { 1 };
            for (axis, dims) in given.iter().zip(&taken).enumerate().take(shared) {
                if let (Dim::Symbol(given), Dim::Symbol(taken_as)) = dims
                    && (!has_context || is_batch_axis(&taken, axis))
                {
                    symbols.entry(taken_as.clone()).or_insert_with(|| of_source.symbol(given));
                }
            }
        }
        let functions = part.model.functions.iter();
        let functions = functions.map(|f| (f.domain().to_owned(), f.name().to_owned(), f.overload().to_owned()));
        all.push(Names { graph: part.name.clone(), index, tensors, symbols, functions: functions.collect() });
    }
    Ok(all)
}

/// The batch that a wire fixes: one of its ends takes or gives so many rows only, and the other leaves them open. All graphs
/// have the same rows, so the joined model has them.
pub fn fixed_batch(parts: &[Read], links: &[Link]) -> Result<Option<i64>> {
    for link in links {
        let (given, taken) = (link.source(parts)?.dims(), link.target(parts)?.dims());
        let (given, taken) = (given.unwrap_or_default(), taken.unwrap_or_default());
        for (axis, ends) in given.iter().zip(&taken).enumerate() {
            match ends {
                (Dim::Known(_), Dim::Known(_)) => {}
                (_, Dim::Known(rows)) if batch_axis(&given) == Some(axis) => return Ok(Some(*rows)),
                (Dim::Known(rows), _) if batch_axis(&taken) == Some(axis) => return Ok(Some(*rows)),
                _ => {}
            }
        }
    }
    Ok(None)
}

pub fn fix_batch(graph: &mut GraphProto, rows: i64) {
    for value in graph.input.iter_mut().chain(&mut graph.output) {
        let Some(mut dims) = value.dims() else { continue };
        if let Some(axis) = batch_axis(&dims) {
            dims[axis] = Dim::Known(rows);
            value.set_dims(&dims);
        }
    }
}

fn batch_axis(dims: &[Dim]) -> Option<usize> {
    (0..dims.len()).find(|&axis| is_batch_axis(dims, axis))
}

/// A model without a graph that has what the models of all parts have.
pub fn model(parts: &mut [Read], names: &[Names], opset: i64) -> Result<ModelProto> {
    let mut model = ModelProto { producer_name: Some("stateful-convert".to_owned()), ..ModelProto::default() };
    // The format of the model must know what any part uses.
    model.ir_version = parts.iter().map(|part| part.model.ir_version()).max();
    let mut set_by: HashMap<String, (usize, i64)> = HashMap::new();
    for (index, part) in parts.iter().enumerate() {
        for set in part.model.opset_import.iter().filter(|set| !is_onnx(set)) {
            let has_functions = |part: &Read| part.model.functions.iter().any(|f| f.domain() == set.domain());
            let &mut (first, version) = set_by.entry(set.domain().to_owned()).or_insert((index, set.version()));
            // The functions of a model define their domain themselves.
            if version != set.version() && !(has_functions(part) && has_functions(&parts[first])) {
                let domain = set.domain().to_owned();
                return Err(JoinError::Domain(parts[first].name.clone(), part.name.clone(), domain));
            }
            if first == index {
                model.opset_import.push(set.clone());
            }
        }
    }
    set_opset(&mut model.opset_import, opset);
    for (part, names) in parts.iter_mut().zip(names) {
        for mut function in std::mem::take(&mut part.model.functions) {
            names.rename_function(&mut function);
            model.functions.push(function);
        }
    }
    if !model.functions.is_empty() {
        model.ir_version = model.ir_version.max(Some(IR_OF_FUNCTIONS));
    }
    model.metadata_props = metadata(parts, names)?;
    Ok(model)
}

/// The entries of all parts. What several say differently gets the names of the graphs.
fn metadata(parts: &[Read], names: &[Names]) -> Result<Vec<StringStringEntryProto>> {
    let mut merged = ModelProto::default();
    let (mut initial, mut multiples): (Vec<InitialState>, Vec<StepsMultiple>) = (Vec::new(), Vec::new());
    for (part, names) in parts.iter().zip(names) {
        for own in &part.model.metadata_props {
            match own.key() {
                INITIAL_STATES => {
                    for mut state in serde_json::from_str::<Vec<InitialState>>(own.value()).unwrap_or_default() {
                        state.state = names.tensor(&state.state);
                        if state.value.is_none() {
                            return Err(JoinError::StartsAtModel(state.state));
                        }
                        initial.push(state);
                    }
                }
                STEPS_MULTIPLE => {
                    let all: Vec<StepsMultiple> = serde_json::from_str(own.value()).unwrap_or_default();
                    // Only inputs of requests have steps that the backend could count.
                    let of_requests = all.into_iter().filter(|multiple| !names.tensors.contains_key(&multiple.input));
                    multiples.extend(of_requests.map(|all| StepsMultiple { input: names.tensor(&all.input), ..all }));
                }
                key => {
                    let differs = |other: &Read| {
                        let entries = &other.model.metadata_props;
                        entries.iter().any(|other| other.key() == key && other.value() != own.value())
                    };
                    let key = if parts.iter().any(differs) { format!("{}.{key}", part.name) } else { key.to_owned() };
                    if merged.metadata(&key).is_none() {
                        merged.set_metadata(&key, Some(own.value().to_owned()));
                    }
                }
            }
        }
    }
    set_initial_states(&mut merged, &initial);
    merged.set_metadata(STEPS_MULTIPLE, (!multiples.is_empty()).then(|| serde_json::json!(multiples).to_string()));
    Ok(merged.metadata_props)
}

/// Takes the graph of a part, with new names. Inputs that other graphs give are left out.
pub fn take_graph(part: &mut Read, names: &Names) -> GraphProto {
    let mut graph = std::mem::take(&mut part.graph);
    if !part.folder.is_empty() {
        move_weights(&mut graph, &part.folder);
    }
    // A default value has no effect where a wire is.
    graph.input.retain(|input| !names.tensors.contains_key(input.name()));
    graph.initializer.retain(|tensor| !names.tensors.contains_key(tensor.name()));
    names.rename(&mut graph);
    graph
}

pub fn add(joined: &mut GraphProto, part: &mut Read, names: &Names) {
    let mut outputs = std::mem::take(&mut part.graph.output);
    let passed_on: Vec<String> = outputs.iter().map(|output| output.name().to_owned()).collect();
    let mut graph = take_graph(part, names);
    for (output, own) in outputs.iter_mut().zip(&passed_on) {
        let value = &mut GraphProto { output: vec![std::mem::take(output)], ..GraphProto::default() };
        names.rename(value);
        *output = value.output.pop().unwrap_or_default();
        // An output that is an input needs a node where a wire has replaced the input.
        if names.tensors.contains_key(own) {
            let name = format!("{}.{own}", names.graph);
            graph.node.push(NodeProto::make("Identity", &format!("{name}/Identity"), &[output.name()], &[&name]));
            output.name = Some(name);
        }
    }
    joined.node.append(&mut graph.node);
    joined.initializer.append(&mut graph.initializer);
    joined.sparse_initializer.append(&mut graph.sparse_initializer);
    joined.input.append(&mut graph.input);
    joined.output.append(&mut outputs);
    joined.value_info.append(&mut graph.value_info);
    joined.quantization_annotation.append(&mut graph.quantization_annotation);
}
