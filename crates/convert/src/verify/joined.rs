//! Compares a joined model with its graphs, which run one after the other, and its search with a plain loop: row by
//! row, frame by frame, one run for each question.

use std::collections::HashMap;

use ort::environment::Environment;

use super::comparison::{Compared, Comparison};
use super::given::{Given, check_given, check_types, lengths};
use super::models::{Feed, Graph, Host, Opener, Result, Runs, Source, VerifyError};
use crate::batch::is_batch_axis;
use crate::graph::InputAxis;
use crate::join::{
    CtcPlan, FRAMES, Joint, LAST, LAST_NEXT, LENGTHS, NO_TOKEN, PIECES, Plan, PlannedContext, PlannedPart, SKIP,
    SKIP_NEXT, SearchPlan, TOKENS, TransducerPlan,
};
use crate::onnx::{DataType, Dim};
use crate::report::{Report, State, StepOutput};

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

/// Compares the joined model with its graphs: random chunks of one row and of several, one after the other, with the
/// states that each of them gives. States are compared, too. An error says where they differ.
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
    let output = |state: &State| StepOutput {
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

/// Two logits are as good as equal if they differ by less than this part of the larger one.
const NEAR: f64 = 1e-5;

struct PlainSearch<'a> {
    plan: &'a SearchPlan,
    predictor: Option<Graph>,
    /// If it isn't the predictor.
    joint: Option<Graph>,
    tokens: usize,
    /// Decisions between two logits that rounding may change.
    near_ties: usize,
}

type Found = (i64, i64);

struct Row {
    found: Vec<Found>,
    last: Vec<f64>,
    states: Vec<Host>,
    /// Frames of the next chunk that a jump has skipped.
    skip: i64,
}

impl<'a> PlainSearch<'a> {
    fn open(opener: &Opener, plan: &'a SearchPlan, planned: &[PlannedPart], parts: &[Source]) -> Result<Self> {
        let open = |index: usize| {
            let part = parts.get(index).zip(planned.get(index));
            part.map(|(source, planned)| opener.part(*source, &planned.name)).transpose()
        };
        let (predictor, joint) = match plan {
            SearchPlan::Ctc(_) => (None, None),
            SearchPlan::Transducer(plan) if plan.predictor == plan.joint => (open(plan.predictor)?, None),
            SearchPlan::Transducer(plan) => (open(plan.predictor)?, open(plan.joint)?),
        };
        Ok(Self { plan, predictor, joint, tokens: 0, near_ties: 0 })
    }

    /// Adds what the search gives to the tensors of the joined graph. `predictor` is the name of the predictor's graph.
    fn run(&mut self, values: &mut HashMap<String, Host>, predictor: &str) -> Result<()> {
        let plan = self.plan;
        let (Some(source), Some(last)) = (values.get(plan.source()).cloned(), values.get(LAST).cloned()) else {
            return Err(failed("the search has no frames or no last tokens"));
        };
        if source.dims.len() != 3 || last.dims.len() != 2 {
            return Err(failed("the search gets no frames of three dimensions"));
        }
        if source.dims[0] == 0 {
            let why = "the search gets no rows: does a state with an open dimension need dims, such as [batch, 70]?";
            return Err(failed(why));
        }
        let mut rows = Vec::new();
        for row in 0..source.dims[0] {
            let (source, last) = (row_of(&source, 0, row)?, row_of(&last, 0, row)?.numbers());
            rows.push(match plan {
                SearchPlan::Ctc(plan) => self.ctc(plan, &source, last)?,
                SearchPlan::Transducer(plan) => {
                    let states = plan.states.iter().map(|state| {
                        let value = values.get(&format!("{predictor}.{}", state.pair.input));
                        let value = value.ok_or_else(|| failed("a state of the predictor is missing"))?;
                        state.rows.map_or_else(|| Ok(value.clone()), |axis| row_of(value, axis, row))
                    });
                    let states = states.collect::<Result<Vec<Host>>>()?;
                    let skip = values.get(SKIP).map(|skip| row_of(skip, 0, row)).transpose()?;
                    let skip = skip.and_then(|skip| skip.numbers().first().copied()).unwrap_or_default() as i64;
                    self.transducer(plan, &source, Row { found: Vec::new(), last, states, skip })?
                }
            });
        }
        if let SearchPlan::Transducer(plan) = plan {
            for (index, state) in plan.states.iter().enumerate() {
                let parts: Vec<&Host> = rows.iter().filter_map(|row| row.states.get(index)).collect();
                let (Some(first), axis) = (parts.first(), state.rows.unwrap_or(0)) else { continue };
                if parts.iter().any(|part| part.dims.len() != first.dims.len()) {
                    return Err(failed("a state of the predictor has another number of dimensions in each row"));
                }
                values.insert(format!("{predictor}.{}", state.pair.output), Host::joined(&parts, axis));
            }
        }
        self.tokens += rows.iter().map(|row| row.found.len()).sum::<usize>();
        let width = match plan {
            SearchPlan::Ctc(_) => source.dims[1],
            SearchPlan::Transducer(plan) => source.dims[plan.frames_axis].saturating_mul(plan.max_tokens),
        };
        if plan.has_durations() {
            let skips: Vec<f64> = rows.iter().map(|row| row.skip as f64).collect();
            values.insert(SKIP_NEXT.to_owned(), Host::of(DataType::Int64.into(), vec![rows.len() as i64], &skips));
        }
        values.extend(packed(&rows, usize::try_from(width).unwrap_or_default(), last.elem));
        Ok(())
    }

    fn ctc(&mut self, plan: &CtcPlan, logits: &Host, last: Vec<f64>) -> Result<Row> {
        let mut last = last.first().copied().unwrap_or_default() as i64;
        let mut found = Vec::new();
        for frame in 0..logits.dims[1] {
            let token = self.best(&logits.part(1, frame, 1).numbers(), plan.blank)?;
            if token != plan.blank && token != last {
                found.push((token, frame));
            }
            last = token;
        }
        Ok(Row { found, last: vec![last as f64], states: Vec::new(), skip: 0 })
    }

    fn transducer(&mut self, plan: &TransducerPlan, frames: &Host, mut row: Row) -> Result<Row> {
        let count = frames.dims[plan.frames_axis];
        let (mut frame, mut of_frame) = (row.skip, 0);
        let mut predicted = None;
        while frame < count {
            let one = as_taken(plan, frames.part(plan.frames_axis, frame, 1));
            let (logits, next) = self.logits(plan, &one, &row, &mut predicted)?;
            let (token, duration) = self.decided(plan, &logits)?;
            if token != plan.blank {
                row.found.push((token, frame));
                row.last.remove(0);
                row.last.push(token as f64);
                row.states = next;
                // The predictor doesn't change until a token is found.
                predicted = None;
                of_frame += 1;
            }
            if token == plan.blank || duration > 0 || of_frame >= plan.max_tokens {
                frame += duration.max(1);
                of_frame = 0;
            }
        }
        row.skip = if plan.durations.is_empty() { 0 } else { frame - count };
        Ok(row)
    }

    fn logits(
        &mut self,
        plan: &TransducerPlan,
        frame: &Host,
        row: &Row,
        predicted: &mut Option<(Vec<Host>, Vec<Host>)>,
    ) -> Result<(Host, Vec<Host>)> {
        match (&mut self.predictor, &mut self.joint) {
            (Some(predictor), Some(joint)) => {
                let (passed, next) = match predicted.take() {
                    Some(made) => made,
                    None => {
                        let names: Vec<String> = plan.passed.iter().map(|(from, _)| from.clone()).collect();
                        predict(predictor, plan, names, row, None)?
                    }
                };
                let to = plan.passed.iter().map(|(_, to)| to.clone());
                let mut feeds: Vec<Feed> = to.zip(passed.iter().cloned()).collect();
                feeds.push((plan.frames_input.clone(), frame.clone()));
                let logits = joint.run(&feeds, std::slice::from_ref(&plan.logits))?.remove(0);
                *predicted = Some((passed, next.clone()));
                Ok((logits, next))
            }
            (Some(predictor), None) => {
                let (mut logits, next) = predict(predictor, plan, vec![plan.logits.clone()], row, Some(frame))?;
                Ok((logits.remove(0), next))
            }
            _ => Err(failed("the search has no predictor")),
        }
    }

    /// The token, and by how many frames the search goes on.
    fn decided(&mut self, plan: &TransducerPlan, logits: &Host) -> Result<(i64, i64)> {
        let mut tokens = logits.numbers();
        let count = plan.durations.len();
        let durations = tokens.split_off(tokens.len().saturating_sub(count));
        let token = self.best(&tokens, plan.blank)?;
        let at = if count == 0 { 0 } else { self.best(&durations, 0)? as usize };
        Ok((token, plan.durations.get(at).copied().unwrap_or_default()))
    }

    fn best(&mut self, numbers: &[f64], blank: i64) -> Result<i64> {
        if numbers.len() as i64 <= blank {
            return Err(VerifyError::Blank { blank, tokens: numbers.len() });
        }
        // The first of equal logits wins, as in ArgMax.
        let larger = |best: usize, at: usize| if numbers[at] > numbers[best] { at } else { best };
        let best = (0..numbers.len()).fold(0, larger);
        let second =
            (0..numbers.len()).filter(|&at| at != best).map(|at| numbers[at]).fold(f64::NEG_INFINITY, f64::max);
        if numbers[best] - second < NEAR * numbers[best].abs().max(1.0) {
            self.near_ties += 1;
        }
        Ok(best as i64)
    }
}

fn row_of(value: &Host, axis: usize, row: i64) -> Result<Host> {
    let has_row = value.dims.get(axis).is_some_and(|&rows| row < rows);
    let part = has_row.then(|| value.part(axis, row, 1));
    part.ok_or_else(|| failed("the search gets tensors of different numbers of rows"))
}

fn failed(why: &str) -> VerifyError {
    VerifyError::Run { model: "running the graphs one by one".to_owned(), why: why.to_owned() }
}

fn as_taken(plan: &TransducerPlan, frame: Host) -> Host {
    let features = frame.dims[3 - plan.frames_axis];
    let dims = match plan.takes {
        Joint::InRows(None) => vec![1, features],
        Joint::Along(1) | Joint::InRows(Some(1)) => vec![1, 1, features],
        Joint::Along(_) | Joint::InRows(Some(_)) => vec![1, features, 1],
    };
    Host { dims, ..frame }
}

fn predict(
    predictor: &mut Graph,
    plan: &TransducerPlan,
    outputs: Vec<String>,
    row: &Row,
    frame: Option<&Host>,
) -> Result<(Vec<Host>, Vec<Host>)> {
    let count = row.last.len() as i64;
    let tokens = &plan.tokens;
    let dims = if tokens.is_flat { vec![1] } else { vec![1, count] };
    let mut feeds = vec![(tokens.input.clone(), Host::of(tokens.elem, dims, &row.last))];
    if let Some((input, elem)) = &tokens.lengths {
        feeds.push((input.clone(), Host::filled_with(*elem, vec![1], count as f64)));
    }
    feeds.extend(frame.map(|frame| (plan.frames_input.clone(), frame.clone())));
    feeds.extend(plan.states.iter().map(|state| state.pair.input.clone()).zip(row.states.iter().cloned()));
    let passed = outputs.len();
    let mut names = outputs;
    names.extend(plan.states.iter().map(|state| state.pair.output.clone()));
    let mut made = predictor.run(&feeds, &names)?;
    let next = made.split_off(passed);
    Ok((made, next))
}

fn packed(rows: &[Row], width: usize, elem_of_last: i32) -> Vec<Feed> {
    let number = DataType::Int64.into();
    let count = rows.len() as i64;
    let filled = |of: &dyn Fn(&Found) -> i64| {
        let row = |row: &Row| {
            let mut values: Vec<f64> = row.found.iter().map(|found| of(found) as f64).collect();
            values.resize(width, NO_TOKEN as f64);
            values
        };
        Host::of(number, vec![count, width as i64], &rows.iter().flat_map(row).collect::<Vec<f64>>())
    };
    let lengths: Vec<f64> = rows.iter().map(|row| row.found.len() as f64).collect();
    let last: Vec<f64> = rows.iter().flat_map(|row| row.last.clone()).collect();
    let context = rows.first().map_or(0, |row| row.last.len() as i64);
    vec![
        (TOKENS.to_owned(), filled(&|&(token, _)| token)),
        (FRAMES.to_owned(), filled(&|&(_, frame)| frame)),
        (LENGTHS.to_owned(), Host::of(number, vec![count], &lengths)),
        (LAST_NEXT.to_owned(), Host::of(elem_of_last, vec![count, context], &last)),
    ]
}
