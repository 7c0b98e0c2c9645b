//! Compares a joined model with its graphs, which run one after the other.

use std::collections::HashMap;

use ort::environment::Environment;

use super::comparison::{Compared, Comparison};
use super::given::{Given, check_given, check_types, lengths};
use super::host::{Feed, Host};
use super::models::{Graph, Opener, Result, Runs, Source, VerifyError};
use super::search::{PlainSearch, failed};
use crate::batch::is_batch_axis;
use crate::graph::InputAxis;
use crate::join::{PIECES, Plan, PlannedContext};
use crate::onnx::Dim;
use crate::report::{Report, StepOutput};

#[derive(Clone, Debug)]
pub struct Amount {
    pub chunks: i64,
    /// Rows of a chunk: a comparison for each number.
    pub rows: Vec<i64>,
}

impl Default for Amount {
    fn default() -> Self {
        Self { chunks: 20, rows: vec![1, 3] }
    }
}

impl Amount {
    /// What a load can afford: a graph of 100 MB takes 10 to 30 ms for a chunk and row.
    pub fn at_load() -> Self {
        Self { chunks: 5, rows: vec![1, 3] }
    }
}

/// The length of an open dimension that isn't the batch.
const LENGTH: i64 = 16;
/// The same, if an output has no element with that: a second of samples.
const LONG: i64 = 16000;

pub struct JoinedModels<'a> {
    pub parts: Vec<Source<'a>>,
    pub joined: Source<'a>,
    pub amount: Amount,
}

/// Compares the joined model with its graphs: random chunks of one row and of several, one after the other, with the states
/// that each of them gives. States are compared, too. An error says where they differ.
pub fn verify_joined(
    environment: &Environment,
    models: &JoinedModels,
    plan: &Plan,
    report: &Report,
    given: &Given,
) -> Result<Vec<Compared>> {
    let report = &with_states_as_outputs(report);
    check_types(report)?;
    check_given(report, given)?;
    let opener = Opener::new(environment, given.limit())?;
    let mut one_by_one = OneByOne::open(&opener, &models.parts, plan)?;
    let mut joined = Graph::open(&opener, models.joined, "the joined model")?;
    let mut compare = |given: &Given| compare(&mut one_by_one, &mut joined, report, given, &models.amount);
    let (short, is_open) = with_lengths(report, given, LENGTH);
    match compare(&short) {
        // Fewer samples than a frame has make no frame, and some graphs refuse them.
        Err(VerifyError::Empty(_) | VerifyError::Run { .. }) if is_open => {
            compare(&with_lengths(report, given, LONG).0)
        }
        compared => compared,
    }
}

fn compare(
    one_by_one: &mut OneByOne,
    joined: &mut Graph,
    report: &Report,
    given: &Given,
    amount: &Amount,
) -> Result<Vec<Compared>> {
    let (steps, rows) = lengths(&given.recordings, report)?;
    let is_open = |dims: &[Dim]| (0..dims.len()).any(|axis| is_batch_axis(dims, axis));
    let has_batch = report.inputs.iter().any(|input| is_open(&input.dims));
    let steps = steps.unwrap_or(amount.chunks);
    let several: Vec<i64> = match rows {
        Some(rows) => vec![rows],
        // The backend runs rows that share a scale one by one.
        None if has_batch && !report.quantizes => amount.rows.clone(),
        None => vec![1],
    };
    let mut compared = Vec::new();
    for rows in several {
        let mut comparison =
            Comparison { report, original: one_by_one, converted: joined, starts: None, given, exact_integers: true };
        comparison.check_sizes((steps, rows))?;
        let what = format!("{steps} chunks of {rows} {}", if rows == 1 { "row" } else { "rows" });
        let result = comparison.single_steps(&what, steps, rows);
        compared.push(one_by_one.with_tokens(result)?);
    }
    Ok(compared)
}

/// Prepends what a context has kept to its input, and keeps the end of the result.
fn put_in_front(context: &PlannedContext, feeds: &mut [Feed], values: &mut HashMap<String, Host>) -> Result<()> {
    let (axis, pair) = (context.axis, &context.pair);
    let input = feeds.iter_mut().find(|(input, _)| *input == context.input);
    let (Some((_, value)), Some(kept)) = (input, values.get(&pair.input)) else {
        let why = format!("'{}' and its context '{}' are not both there", context.input, pair.input);
        return Err(failed(&why));
    };
    let fits = |at: usize| at == axis || kept.dims[at] == value.dims[at];
    if kept.dims.len() != value.dims.len() || !(0..kept.dims.len()).all(fits) {
        let why = format!("'{}' is {:?}, and its context {:?}", context.input, value.dims, kept.dims);
        return Err(failed(&why));
    }
    *value = Host::joined(&[kept, value], axis);
    let length = value.dims[axis];
    let elements = context.elements.min(length);
    values.insert(pair.output.clone(), value.part(axis, length - elements, elements));
    Ok(())
}

/// Gives each open dimension of an input this length, unless it is the batch, and says whether there is one.
fn with_lengths(report: &Report, given: &Given, length: i64) -> (Given, bool) {
    let mut given = given.clone();
    let before = given.lengths.len();
    for input in &report.inputs {
        for (axis, dim) in input.dims.iter().enumerate() {
            let is_given = given.lengths.iter().any(|(known, _)| known.is(&input.name, axis));
            if !dim.is_known() && !is_batch_axis(&input.dims, axis) && !is_given {
                given.lengths.push((InputAxis { input: input.name.clone(), axis }, length));
            }
        }
    }
    let is_open = given.lengths.len() > before;
    (given, is_open)
}

/// States are compared like outputs. The texts of tokens are not compared, because the tokens are.
fn with_states_as_outputs(report: &Report) -> Report {
    let mut report = report.clone();
    report.outputs.retain(|output| output.name != PIECES);
    let output = |state: &crate::report::State| StepOutput {
        name: state.pair.output.clone(),
        elem: state.elem,
        dims: state.dims.clone(),
        axis: None,
    };
    let states: Vec<StepOutput> = report.states.iter().map(output).collect();
    report.outputs.extend(states);
    report
}

struct OneByOne<'a> {
    plan: &'a Plan,
    graphs: Vec<Graph>,
    search: Option<PlainSearch<'a>>,
}

impl<'a> OneByOne<'a> {
    fn open(opener: &Opener, parts: &[Source], plan: &'a Plan) -> Result<Self> {
        let graphs = parts.iter().zip(plan.outside()).map(|(part, planned)| opener.part(*part, &planned.name));
        let graphs = graphs.collect::<Result<_, _>>()?;
        let search =
            plan.search.as_ref().map(|search| PlainSearch::open(opener, search, &plan.parts, parts)).transpose()?;
        Ok(Self { plan, graphs, search })
    }

    /// Adds how many tokens were found, and which of them rounding may change.
    fn with_tokens(&mut self, result: Result<Compared>) -> Result<Compared> {
        let Some(search) = &mut self.search else { return result };
        let (tokens, near_ties) = (std::mem::take(&mut search.tokens), std::mem::take(&mut search.near_ties));
        let found = format!("{tokens} tokens, {near_ties} near-ties");
        match result {
            Ok(compared) => Ok(Compared { what: format!("{}, {found}", compared.what), ..compared }),
            Err(VerifyError::Differs(why)) => Err(VerifyError::Differs(format!("{why} ({found} so far)"))),
            Err(error) => Err(error),
        }
    }
}

impl Runs for OneByOne<'_> {
    fn run(&mut self, inputs: &[Feed], outputs: &[String]) -> Result<Vec<Host>> {
        let mut values: HashMap<String, Host> = inputs.iter().cloned().collect();
        for (graph, part) in self.graphs.iter_mut().zip(self.plan.outside()) {
            let source = |input: &String| {
                let wire = part.wired.iter().find(|(wired, _)| wired == input);
                wire.map_or_else(|| format!("{}.{input}", part.name), |(_, source)| source.clone())
            };
            // What no request gives has a default.
            let feed = |input: &String| Some((input.clone(), values.get(&source(input))?.clone()));
            let mut feeds: Vec<Feed> = graph.inputs.iter().filter_map(feed).collect();
            for context in &part.contexts {
                put_in_front(context, &mut feeds, &mut values)?;
            }
            let full = |name: &String| format!("{}.{name}", part.name);
            let mut names = graph.outputs();
            names.retain(|name| outputs.contains(&full(name)) || self.plan.takes(&full(name)));
            let made = graph.run(&feeds, &names)?;
            values.extend(names.iter().map(full).zip(made));
        }
        if let Some(search) = &mut self.search {
            let predictor = self.plan.parts.get(self.plan.outside().len()).map_or("", |part| part.name.as_str());
            search.run(&mut values, predictor)?;
        }
        let missing = |name: &String| failed(&format!("no graph gives '{name}'"));
        outputs.iter().map(|name| values.get(name).cloned().ok_or_else(|| missing(name))).collect()
    }
}
