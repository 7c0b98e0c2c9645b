//! Compares a joined model with its graphs, which run one after the other.

use std::collections::HashMap;

use ort::environment::Environment;

use super::comparison::{Compared, Comparison};
use super::given::{Given, check_given, check_types, lengths};
use super::host::Host;
use super::models::{Graph, Runs, Source, VerifyError};
use super::search::PlainSearch;
use crate::batch::{is_batch_name, is_made_up};
use crate::graph::InputAxis;
use crate::join::Plan;
use crate::onnx::Dim;
use crate::report::{Report, StepOutput};

/// How much is compared.
#[derive(Clone, Debug)]
pub struct Amount {
    /// Chunks, one after the other.
    pub chunks: i64,
    /// Rows of a chunk: a comparison for each number.
    pub rows: Vec<i64>,
}

impl Default for Amount {
    fn default() -> Self {
        Self { chunks: 20, rows: vec![1, 3] }
    }
}

/// The length of an open dimension that isn't the batch.
const LENGTH: i64 = 16;

/// What is compared.
#[expect(missing_docs, reason = "the names say it")]
pub struct JoinedModels<'a> {
    /// The graphs, in their order.
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
) -> Result<Vec<Compared>, VerifyError> {
    check_types(report)?;
    check_given(report, given)?;
    let mut one_by_one = OneByOne::open(environment, &models.parts, plan)?;
    let mut joined = Graph::open(environment, models.joined, "joined")?;
    let given = &with_lengths(report, given);
    let (steps, rows) = lengths(&given.recordings, report)?;
    let is_open = |dims: &[Dim]| (0..dims.len()).any(|axis| is_batch(dims, axis));
    let has_batch = report.inputs.iter().any(|input| is_open(&input.dims));
    let report = &with_states_as_outputs(report);
    let steps = steps.unwrap_or(models.amount.chunks);
    let several: Vec<i64> = match rows {
        Some(rows) => vec![rows],
        None if has_batch => models.amount.rows.clone(),
        None => vec![1],
    };
    let mut compared = Vec::new();
    for rows in several {
        let mut comparison = Comparison {
            report,
            original: &mut one_by_one,
            converted: &mut joined,
            starts: None,
            given,
            exact_integers: true,
        };
        comparison.check_sizes((steps, rows))?;
        let what = format!("{steps} chunks of {rows} {}", if rows == 1 { "row" } else { "rows" });
        let result = comparison.single_steps(&what, steps, rows);
        compared.push(one_by_one.with_tokens(result)?);
    }
    Ok(compared)
}

/// Whether an axis is that of the rows: by its name, or because it is the first.
fn is_batch(dims: &[Dim], axis: usize) -> bool {
    let is_named = |dim: &Dim| matches!(dim, Dim::Symbol(name) if is_batch_name(name) || is_made_up(name));
    is_named(&dims[axis]) || axis == 0 && !matches!(dims[0], Dim::Known(_)) && !dims.iter().any(is_named)
}

/// Gives each open dimension of an input a length, unless it is the batch.
fn with_lengths(report: &Report, given: &Given) -> Given {
    let mut given = given.clone();
    for input in &report.inputs {
        for (axis, dim) in input.dims.iter().enumerate() {
            let is_given = given.lengths.iter().any(|(known, _)| known.is(&input.name, axis));
            if !matches!(dim, Dim::Known(_)) && !is_batch(&input.dims, axis) && !is_given {
                given.lengths.push((InputAxis { input: input.name.clone(), axis }, LENGTH));
            }
        }
    }
    given
}

/// States are compared as outputs are.
fn with_states_as_outputs(report: &Report) -> Report {
    let mut report = report.clone();
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

/// The graphs, which run one after the other.
struct OneByOne<'a> {
    plan: &'a Plan,
    /// Those outside the search.
    graphs: Vec<Graph>,
    search: Option<PlainSearch<'a>>,
}

impl<'a> OneByOne<'a> {
    fn open(environment: &Environment, parts: &[Source], plan: &'a Plan) -> Result<Self, VerifyError> {
        let open = |part: &Source| Graph::open(environment, *part, "original");
        let graphs = parts.iter().take(plan.outside().len()).map(open).collect::<Result<_, _>>()?;
        let search = plan.search.as_ref().map(|search| PlainSearch::open(environment, search, parts)).transpose()?;
        Ok(Self { plan, graphs, search })
    }

    /// Adds how many tokens were found, and which of them rounding may change.
    fn with_tokens(&mut self, result: Result<Compared, VerifyError>) -> Result<Compared, VerifyError> {
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
    fn run(&mut self, inputs: &[(String, Host)], outputs: &[String]) -> Result<Vec<Host>, VerifyError> {
        let mut values: HashMap<String, Host> = inputs.iter().cloned().collect();
        for (graph, part) in self.graphs.iter_mut().zip(self.plan.outside()) {
            let source = |input: &String| {
                let wire = part.wired.iter().find(|(wired, _)| wired == input);
                wire.map_or_else(|| format!("{}.{input}", part.name), |(_, source)| source.clone())
            };
            // What no request gives has a default.
            let feed = |input: &String| Some((input.clone(), values.get(&source(input))?.clone()));
            let feeds: Vec<(String, Host)> = graph.inputs().iter().filter_map(feed).collect();
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
        let missing = |name: &String| VerifyError::Run { model: "original", why: format!("it has no output '{name}'") };
        outputs.iter().map(|name| values.get(name).cloned().ok_or_else(|| missing(name))).collect()
    }
}
