//! One graph from several: wires between them take the place of requests, and states stay states.
//!
//! Rules: each tensor is named `graph.tensor`, so names never meet; the graphs keep their order, so a wire to a later graph
//! makes no circle, and a wire to an earlier one is a state. Not for: running anything (`verify`).

mod context;
mod merge;
mod opsets;
mod part;
mod rename;
mod search;
mod wires;

use std::collections::HashMap;

use crate::convert::{Converted, Options, convert_read, initial_states_of, scales_of_all, set_initial_states};
use crate::onnx::Dim;
use crate::onnx::schema::GraphProto;
use crate::pairs::StatePair;
use crate::report::Warning;

pub use context::{Context, PlannedContext, contexts};
pub use part::{GraphFrom, JoinError, ListedGraph, Part, dims, graphs};
use part::{Read, Result};
use rename::Names;
pub use search::{
    CtcPlan, FRAMES, Joint, LAST, LAST_NEXT, LENGTHS, NO_TOKEN, PIECES, SKIP, SKIP_NEXT, Search, SearchKind,
    SearchPlan, TOKENS, TransducerPlan, read_pieces,
};
use wires::{Link, difference, end, find, resolved};
pub use wires::{Wire, wires};

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
    context::check(&options.contexts, &parts)?;
    for link in &links {
        let is_whole = context::of(&options.contexts, &parts, link).is_none();
        if is_whole && !search.as_ref().is_some_and(|search| search.takes_frames(link)) {
            let (source, target) = (link.source(&parts)?, link.target(&parts)?);
            if !target.accepts(source) {
                return Err(link.disagree(&parts, &difference(source, target))?);
            }
        }
    }
    let mut names = merge::names(&parts, &links, &options.contexts)?;
    let fixed_batch = merge::fixed_batch(&parts, &links)?;
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
    let mut model = merge::model(&mut parts, &names, opset)?;
    let mut graph = GraphProto { name: Some("joined".to_owned()), ..GraphProto::default() };
    let outside = plan.outside().len();
    for ((part, names), planned) in parts.iter_mut().zip(&names).zip(plan.outside()) {
        for context in &planned.contexts {
            context.add(&mut graph, &names.tensor(&context.input));
            states.push(context.pair.clone());
        }
        merge::add(&mut graph, part, names);
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
        merge::fix_batch(&mut graph, rows);
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

fn unwired(parts: &[Read], links: &[Link], states: &[StatePair]) -> Vec<Warning> {
    let is_of = |part: &Read, name: &str| name.split_once('.').is_some_and(|(graph, _)| graph == part.name);
    let alone = |(index, part): (usize, &Read)| {
        let is_linked = links.iter().any(|link| [link.from.graph, link.to.graph].contains(&index));
        let is_state = states.iter().any(|pair| is_of(part, &pair.input) || is_of(part, &pair.output));
        (!is_linked && !is_state && parts.len() > 1).then(|| Warning::Unwired(part.name.clone()))
    };
    parts.iter().enumerate().filter_map(alone).collect()
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
            if let Some(context) = context::of(contexts, parts, link) {
                planned.contexts.push(context::planned(context, parts, link, names)?);
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

/// The outputs of the joined graph: ends of states, those that nothing takes, those that the caller wants, and those of the
/// search.
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
