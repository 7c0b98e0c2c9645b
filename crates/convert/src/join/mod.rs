//! One graph from several: wires between them take the place of requests, and states stay states.
//!
//! Rules: each tensor is named `graph.tensor`, so names never meet; the graphs keep their order, so a wire to a later
//! graph makes no circle, and a wire to an earlier one is a state. Not for: running anything (`verify`).

mod opsets;
mod part;
mod search;
mod wires;

use std::collections::HashMap;

use crate::batch::is_batch_axis;
use crate::convert::{Converted, Options, convert_read, initial_states_of, scales_of_all, set_initial_states};
use crate::names::StatePair;
use crate::onnx::schema::{GraphProto, ModelProto, NodeProto, StringStringEntryProto};
use crate::onnx::{Dim, is_onnx};
use crate::report::{INITIAL_STATES, InitialState, STEPS_MULTIPLE, StepsMultiple, Warning};

pub use part::{GraphFrom, JoinError, ListedGraph, Part, dims, graphs};
use part::{Names, Read, Result, set_opset, take_graph};
pub use search::{
    CtcPlan, FRAMES, Joint, LAST, LAST_NEXT, LENGTHS, NO_TOKEN, PIECES, SKIP, SKIP_NEXT, Search, SearchKind,
    SearchPlan, TOKENS, TransducerPlan, read_pieces,
};
pub use wires::{Context, PlannedContext, Wire, contexts, wires};
use wires::{Link, check_contexts, difference, end, find, resolved};

#[derive(Clone, Debug, Default)]
pub struct JoinOptions {
    /// The wires, by names of the form `graph.tensor`. Equal names need none.
    pub wires: Vec<Wire>,
    /// States of the graphs. Without those of a graph, its description or its names show them.
    pub states: Vec<StatePair>,
    /// Dims of inputs and outputs that their graphs leave open, or where the batch has no usual name.
    pub dims: Vec<(String, Vec<Dim>)>,
    /// Context of inputs that are wired. That of an input of requests has no effect: see [`Plan::has_context`].
    pub contexts: Vec<Context>,
    pub outputs: Vec<String>,
    pub search: Option<Search>,
    /// The texts of the tokens, by number, if responses have them.
    pub pieces: Option<Vec<String>>,
}

#[derive(Clone, Debug)]
pub struct Joined {
    /// The model, and what it has. Nothing in it was converted but the names of its states.
    pub converted: Converted,
    pub plan: Plan,
}

/// How the graphs run one after the other, by the names of the joined graph.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The inputs of each graph that take a tensor of an earlier one.
    pub parts: Vec<PlannedPart>,
    pub search: Option<SearchPlan>,
}

#[derive(Clone, Debug)]
pub struct PlannedPart {
    /// What the names of its tensors begin with.
    pub name: String,
    pub wired: Vec<(String, String)>,
    pub contexts: Vec<PlannedContext>,
}

impl PlannedPart {
    /// Whether a wire leads to this input, `graph.tensor`, of the graph.
    pub fn takes(&self, input: &str) -> bool {
        self.own(input).is_some_and(|own| self.wired.iter().any(|(wired, _)| wired == own))
    }

    fn own<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_prefix(&self.name)?.strip_prefix('.')
    }
}

impl Plan {
    /// Whether a graph or the search takes a tensor of another.
    pub fn takes(&self, name: &str) -> bool {
        let wired = self.parts.iter().flat_map(|part| &part.wired).any(|(_, source)| source == name);
        wired || self.search.as_ref().is_some_and(|search| search.source() == name)
    }

    /// Whether this input, `graph.tensor`, is wired and has context.
    pub fn has_context(&self, input: &str) -> bool {
        let has = |part: &PlannedPart| part.contexts.iter().any(|of| Some(of.input.as_str()) == part.own(input));
        self.parts.iter().any(has)
    }

    /// The graphs that run one after the other. The others are inside the search.
    pub fn outside(&self) -> &[PlannedPart] {
        let count = self.search.as_ref().map_or(self.parts.len(), |search| search.first_inside(self.parts.len()));
        &self.parts[..count]
    }
}

pub fn join(parts: &[Part], options: &JoinOptions) -> Result<Joined> {
    if let ([part], None) = (parts, &options.search) {
        return Err(JoinError::One(part.name.clone()));
    }
    let mut parts = read(parts, options)?;
    let is_added_to = options.search.is_some() || !options.contexts.is_empty();
    let of_nodes = is_added_to.then_some(search::OPSET);
    let opset = parts.iter().map(Read::opset).chain(of_nodes).max().unwrap_or_default();
    // Graphs of one version need no change, so it may be one that is not known here.
    if parts.iter().any(|part| part.opset() != opset) {
        parts.iter().try_for_each(Read::check_newest)?;
    }
    for part in &mut parts {
        part.raise(opset)?;
    }
    let (links, mut states) = resolved(&mut parts, &options.wires)?;
    let mut warnings = unwired(&parts, &links, &states);
    let planned = |search| search::plan(&parts, &links, search, options.pieces.as_deref());
    let search = options.search.as_ref().map(planned).transpose()?;
    check_contexts(&options.contexts, &parts)?;
    for link in &links {
        let is_whole = link.context(&options.contexts, &parts).is_none();
        if is_whole && !search.as_ref().is_some_and(|search| search.takes_frames(link)) {
            let (source, target) = (link.source(&parts)?, link.target(&parts)?);
            if !target.accepts(source) {
                return Err(link.disagree(&parts, &difference(source, target))?);
            }
        }
    }
    let mut names = names(&parts, &links, &options.contexts)?;
    let fixed_batch = fixed_batch(&parts, &links)?;
    let plan = plan(&parts, &links, search, &options.contexts, &names)?;
    let outputs = outputs(&parts, &links, &states, options, &plan)?;
    states.extend(parts.iter().flat_map(|part| {
        part.pairs.iter().map(|pair| StatePair::new(&part.full(&pair.input), &part.full(&pair.output)))
    }));
    // The backend keeps one state for each output.
    let is_taken = |&index: &usize| states[..index].iter().any(|other| other.output == states[index].output);
    if let Some(index) = (0..states.len()).find(is_taken) {
        return Err(JoinError::TwoStates(states.swap_remove(index).output));
    }
    let mut model = model(&mut parts, &names, opset)?;
    let mut graph = GraphProto { name: Some("joined".to_owned()), ..GraphProto::default() };
    let outside = plan.outside().len();
    for ((part, names), planned) in parts.iter_mut().zip(&names).zip(plan.outside()) {
        for context in &planned.contexts {
            context.add(&mut graph, &names.tensor(&context.input));
            states.push(context.pair.clone());
        }
        add(&mut graph, part, names);
    }
    if let Some(search) = &plan.search {
        states.extend(search.add(&mut graph, &mut parts[outside..], &mut names, options.pieces.as_deref()));
        if let Some(initial) = search.initial() {
            let all: Vec<_> = initial_states_of(&model).into_iter().chain([initial]).collect();
            set_initial_states(&mut model, &all);
        }
    }
    graph.output.retain(|output| outputs.iter().any(|name| name == output.name()));
    if let Some(rows) = fixed_batch {
        fix_batch(&mut graph, rows);
    }
    let dims: HashMap<String, Vec<Dim>> =
        graph.output.iter().filter_map(|output| Some((output.name().to_owned(), output.dims()?))).collect();
    let scales = scales_of_all(&graph);
    model.graph = Some(graph);
    // The graphs run a chunk as they would alone, so no recurrence inside them is cut.
    let options = Options { states, keep_recurrences: true, ..Options::default() };
    let mut converted = convert_read(model, &options)?;
    // Lengths that were computed for a short request would say less.
    for output in &mut converted.report.outputs {
        output.dims = dims.get(&output.name).unwrap_or(&output.dims).clone();
    }
    if !scales.is_empty() && fixed_batch != Some(1) {
        warnings.push(Warning::ScaleOfRows(scales));
    }
    converted.report.warnings.splice(0..0, warnings);
    Ok(Joined { converted, plan })
}

fn read(parts: &[Part], options: &JoinOptions) -> Result<Vec<Read>> {
    let mut read: Vec<Read> = Vec::new();
    for part in parts {
        if part.name == search::SEARCH {
            return Err(JoinError::Reserved(part.name.clone()));
        }
        if read.iter().any(|known| known.name == part.name) {
            return Err(JoinError::SameName(part.name.clone()));
        }
        let own = |name: &str| Some(name.strip_prefix(&part.name)?.strip_prefix('.')?.to_owned());
        let pair = |pair: &StatePair| Some(StatePair { input: own(&pair.input)?, output: own(&pair.output)? });
        read.push(Read::new(part, options.states.iter().filter_map(pair).collect())?);
    }
    for StatePair { input, output } in &options.states {
        let (of_input, of_output) = (end(&read, input)?, end(&read, output)?);
        if of_input.graph != of_output.graph {
            return Err(JoinError::TwoGraphs { input: input.clone(), output: output.clone() });
        }
    }
    for (name, dims) in &options.dims {
        let of = end(&read, name)?;
        read[of.graph].set_dims(&of.tensor, dims)?;
    }
    Ok(read)
}

fn unwired(parts: &[Read], links: &[Link], states: &[StatePair]) -> Vec<Warning> {
    let is_of = |part: &Read, name: &str| name.split_once('.').is_some_and(|(graph, _)| graph == part.name);
    let alone = |(index, part): (usize, &Read)| {
        let is_linked = links.iter().any(|link| [link.from.graph, link.to.graph].contains(&index));
        let is_state = states.iter().any(|pair| is_of(part, &pair.input) || is_of(part, &pair.output));
        (!is_linked && !is_state && parts.len() > 1).then(|| Warning::Unwired(part.name.clone()))
    };
    parts.iter().enumerate().filter_map(alone).collect()
}

fn names(parts: &[Read], links: &[Link], contexts: &[Context]) -> Result<Vec<Names>> {
    let mut all: Vec<Names> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let (mut tensors, mut symbols) = (HashMap::new(), HashMap::new());
        for link in links.iter().filter(|link| link.to.graph == index) {
            let (source, target) = (link.source(parts)?, link.target(parts)?);
            let of_source = &all[link.from.graph];
            // With context, a node makes the input.
            let has_context = link.context(contexts, parts).is_some();
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

/// The batch that a wire fixes: one of its ends takes or gives so many rows only, and the other leaves them open. All
/// graphs have the same rows, so the joined model has them.
fn fixed_batch(parts: &[Read], links: &[Link]) -> Result<Option<i64>> {
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

fn plan(
    parts: &[Read],
    links: &[Link],
    search: Option<SearchPlan>,
    contexts: &[Context],
    names: &[Names],
) -> Result<Plan> {
    let part = |(index, part): (usize, &Read)| {
        let mut planned = PlannedPart { name: part.name.clone(), wired: Vec::new(), contexts: Vec::new() };
        for link in links.iter().filter(|link| link.to.graph == index) {
            planned.wired.push((link.to.tensor.clone(), parts[link.from.graph].full(&link.from.tensor)));
            if let Some(context) = link.context(contexts, parts) {
                planned.contexts.push(link.planned_context(context, parts, names)?);
            }
        }
        Ok(planned)
    };
    let plan = Plan { parts: parts.iter().enumerate().map(part).collect::<Result<_>>()?, search };
    let mut inside = plan.parts[plan.outside().len()..].iter();
    if let Some((part, context)) = inside.find_map(|part| Some((part, part.contexts.first()?))) {
        let why = "its graph is inside the search, which takes frames one by one".to_owned();
        return Err(JoinError::Context { input: format!("{}.{}", part.name, context.input), why });
    }
    Ok(plan)
}

/// The outputs of the joined graph: ends of states, those that nothing takes, those that the caller wants, and those of
/// the search.
fn outputs(
    parts: &[Read],
    links: &[Link],
    states: &[StatePair],
    options: &JoinOptions,
    plan: &Plan,
) -> Result<Vec<String>> {
    let outside = plan.outside().len();
    for name in &options.outputs {
        let of = end(parts, name)?;
        find(&parts[of.graph], &parts[of.graph].graph.output, "output", &of.tensor)?;
        if of.graph >= outside {
            return Err(JoinError::Search(format!("output '{name}' is inside the search, which gives tokens only")));
        }
    }
    let end_inside = |pair: &&StatePair| {
        [&pair.input, &pair.output].into_iter().any(|name| end(parts, name).is_ok_and(|end| end.graph >= outside))
    };
    if let Some(pair) = states.iter().find(end_inside) {
        let wire = format!("<<<{}, {}>>>", pair.output, pair.input);
        return Err(JoinError::Search(format!("the wire {wire} is back to or from a graph that is inside the search")));
    }
    let (mut kept, mut taken, mut answers) = (Vec::new(), Vec::new(), 0);
    for (graph, part) in parts.iter().enumerate() {
        for output in part.graph.output.iter().map(|output| output.name()) {
            let name = part.full(output);
            let is_own = |link: &Link| link.is_made && link.from.graph == graph && link.from.tensor == output;
            let is_taken = links.iter().any(is_own) || plan.takes(&name) || graph >= outside;
            let is_state =
                part.pairs.iter().any(|pair| pair.output == output) || states.iter().any(|pair| pair.output == name);
            let is_wanted = options.outputs.contains(&name);
            if is_wanted || !is_taken && !is_state {
                answers += 1;
            } else {
                taken.push(name.clone());
            }
            if is_wanted || is_state || !is_taken {
                kept.push(name);
            }
        }
    }
    let of_contexts = plan.outside().iter().flat_map(|part| &part.contexts);
    kept.extend(of_contexts.map(|context| context.pair.output.clone()));
    if plan.search.is_some() {
        kept.extend([TOKENS, LENGTHS, FRAMES, PIECES, LAST_NEXT, SKIP_NEXT].map(str::to_owned));
    } else if answers == 0 {
        return Err(JoinError::NoOutputs(taken));
    }
    Ok(kept)
}

/// The oldest version of ONNX's format with functions in a model.
const IR_OF_FUNCTIONS: i64 = 8;

/// A model without a graph that has what the models of all parts have.
fn model(parts: &mut [Read], names: &[Names], opset: i64) -> Result<ModelProto> {
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

fn add(joined: &mut GraphProto, part: &mut Read, names: &Names) {
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

fn fix_batch(graph: &mut GraphProto, rows: i64) {
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
