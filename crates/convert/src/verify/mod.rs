//! Compares a converted model with its original in ONNX Runtime: chunks of several lengths with one run over
//! everything, and rows together with rows alone. If rows have lengths, they are also shorter than their requests and
//! continue in later ones.

mod comparison;
mod given;
mod joined;
mod models;

use ort::environment::Environment;

use crate::onnx::{Dim, element_count};
use crate::report::{Report, Role, StartsAt, StepInput};
pub use comparison::Compared;
use comparison::{Comparison, ROWS_TOGETHER};
pub use given::{Given, Recording};
use given::{as_two_rows, batch_dim, check_given, check_types, has_batch, lengths, row_axis_of};
pub use joined::{Amount, JoinedModels, verify_joined};
use models::{Feed, Graph, Opener, Random, Result, Runs};
pub use models::{Host, Models, Source, VerifyError, environment};

const CHUNKS: [i64; 3] = [1, 2, 7];
/// Steps of a comparison of models that take one at a time.
const SINGLE_STEPS: i64 = 5;
/// Runs of one chunk length: shorter chunks of very many steps are left out.
const MOST_RUNS: i64 = 10_000;
const ROWS: i64 = 2;
// The number of rows in a model that takes their lengths. With two rows, an ascending or a descending sort would change
// nothing.
const ROWS_WITH_LENGTHS: i64 = 3;

/// Compares the models, in chunks of 1, 2, 7 and all steps. An error says where they differ.
pub fn verify(environment: &Environment, models: &Models, report: &Report, given: &Given) -> Result<Vec<Compared>> {
    compare(environment, models, report, given).map_err(|error| with_states(error, report))
}

/// If a model fails, the states that it had may have been paired wrongly.
fn with_states(error: VerifyError, report: &Report) -> VerifyError {
    let had = report.states.iter().filter(|state| state.starts_at == StartsAt::Unchanged);
    let pairs: Vec<String> = had.map(|state| state.pair.to_string()).collect();
    match error {
        VerifyError::Run { model, why } if !pairs.is_empty() => {
            VerifyError::Run { model, why: format!("{why}; are its states these: {}?", pairs.join(" ")) }
        }
        error => error,
    }
}

fn compare(environment: &Environment, models: &Models, report: &Report, given: &Given) -> Result<Vec<Compared>> {
    check_types(report)?;
    let opener = Opener::new(environment, given.limit())?;
    let mut original = Graph::open(&opener, models.original, "the original model")?;
    let mut converted = Graph::open(&opener, models.converted, "the converted model")?;
    let initial = |source| Graph::open(&opener, source, "the model of initial states");
    let mut starts = models.initial_states.map(initial).transpose()?;
    check_given(report, given)?;
    let (mut steps, mut rows) = lengths(&given.recordings, report)?;
    // One row can't show whether rows change each other.
    let two_rows = steps.filter(|_| rows == Some(1)).and_then(|steps| as_two_rows(&given.recordings, report, steps));
    let of_two_rows = two_rows.map(|(recordings, half)| (Given { recordings, ..given.clone() }, half));
    let mut given = given;
    if let (Some((of_two_rows, half)), true) = (&of_two_rows, report.time.is_empty()) {
        (given, steps, rows) = (of_two_rows, Some(*half), Some(2));
    }
    let mut comparison = Comparison {
        report,
        original: &mut original,
        converted: &mut converted,
        starts: starts.as_mut(),
        given,
        exact_integers: false,
    };
    let total = steps.unwrap_or_else(|| comparison.total(given.chunk));
    let rows = rows.unwrap_or(if comparison.has_lengths() { ROWS_WITH_LENGTHS } else { ROWS });
    comparison.check_sizes((total, rows))?;
    let inputs = comparison.inputs(0, (total, rows), &mut Random::new(7));
    if report.time.is_empty() {
        let steps = steps.unwrap_or(SINGLE_STEPS);
        let mut compared = vec![comparison.single_steps(&format!("{steps} steps"), steps, rows)?];
        // The backend runs rows that share a scale one by one.
        if !report.opened.is_empty() || has_batch(report) && !report.quantizes {
            compared.extend(comparison.rows(&inputs, 1)?);
        }
        return Ok(compared);
    }
    let whole = comparison.whole(&inputs, total)?;
    let mut compared = Vec::new();
    let mut chunks: Vec<i64> = CHUNKS.iter().map(|chunk| chunk * report.steps_multiple).chain(given.chunk).collect();
    // A comparison of very many short runs would take minutes and show nothing more.
    chunks.retain(|&chunk| chunk < total && total / chunk <= MOST_RUNS);
    // Else a short recording would be compared in one piece only, which needs no state.
    if chunks.is_empty() && total > report.steps_multiple {
        chunks.push((total / 2 / report.steps_multiple * report.steps_multiple).max(report.steps_multiple));
    }
    chunks.sort_unstable();
    chunks.dedup();
    chunks.push(total);
    for chunk in chunks {
        let what = if chunk == total { "all at once".to_owned() } else { format!("chunks of {chunk}") };
        let stepped = comparison.stepped(&inputs, total, chunk)?;
        compared.push(comparison.compare(what, &whole, &stepped)?);
    }
    let (mut inputs, mut total) = (inputs, total);
    if let Some((of_two_rows, half)) = &of_two_rows {
        comparison.given = of_two_rows;
        (inputs, total) = (comparison.inputs(0, (*half, 2), &mut Random::new(7)), *half);
    }
    compared.extend(comparison.rows(&inputs, total)?);
    compared.extend(comparison.rows_of_different_lengths(&inputs, total)?);
    Ok(compared)
}

/// The steps of requests, before strides.
const REQUESTS: [i64; 4] = [3, 2, 4, 2];

/// How many steps of each request a row has. In the last request it has all, so that the last step belongs to every
/// row.
const STEPS_OF_ROWS: [[i64; REQUESTS.len()]; 3] = [[3, 0, 2, 2], [2, 2, 4, 2], [1, 2, 0, 2]];

type Row = Vec<Host>;

impl Comparison<'_> {
    /// Compares rows together with rows alone. `None` if the batch isn't open.
    fn rows(&mut self, inputs: &[Feed], total: i64) -> Result<Option<Compared>> {
        let axes = self.axes_of_inputs();
        if axes.iter().all(Option::is_none) {
            return Ok(None);
        }
        let rows = self.rows_of(inputs);
        let together = self.stepped(inputs, total, total)?.remove(0);
        let mut alone: Vec<Vec<Host>> = vec![Vec::new(); together.len()];
        for row in 0..rows {
            let one = |((name, value), axis): (&Feed, &Option<usize>)| (name.clone(), value.row(*axis, row));
            let inputs: Vec<Feed> = inputs.iter().zip(&axes).map(one).collect();
            for (output, value) in self.stepped(&inputs, total, total)?.remove(0).into_iter().enumerate() {
                alone[output].push(value);
            }
        }
        let mut joined = Vec::new();
        for (output, axis) in self.axes_of_outputs().into_iter().enumerate() {
            let (together, alone) = (&together[output], &alone[output]);
            let has_rows = |&axis: &usize| {
                together.dims.get(axis) == Some(&rows) && alone.iter().all(|row| row.dims.get(axis) == Some(&1))
            };
            joined.push(match axis.filter(has_rows) {
                Some(axis) => Host::of_rows(alone, Some(axis)),
                None if alone.iter().all(|row| row == together) => together.clone(),
                None => return Err(no_rows(self.report, output, rows, [together, &alone[0]])),
            });
        }
        // The steps are along one axis here, too: one chunk of all of them.
        self.compare(ROWS_TOGETHER.to_owned(), &joined, &[together]).map(Some)
    }

    /// Compares rows of different lengths with runs of the original over the steps of each row alone. `None` if rows
    /// have no lengths, or can't be told apart.
    fn rows_of_different_lengths(&mut self, inputs: &[Feed], total: i64) -> Result<Option<Compared>> {
        if !self.has_lengths() || self.fixed_steps().is_some() || !self.rows_can_be_told_apart(inputs) {
            return Ok(None);
        }
        let steps = |row: i64| {
            STEPS_OF_ROWS[row as usize % STEPS_OF_ROWS.len()].map(|steps| steps * self.report.steps_multiple)
        };
        let steps: Vec<_> = (0..self.rows_of(inputs)).map(steps).collect();
        if steps.iter().any(|steps| steps.iter().sum::<i64>() > total) {
            return Ok(None);
        }
        let (mut expected, mut states) = (Vec::new(), Vec::new());
        for (row, steps) in steps.iter().enumerate() {
            // Without padding, so that the answers of the original are those to the row alone.
            let own = steps.iter().sum();
            let inputs = self.named(self.row(inputs, row, (0, own), own, &mut Random::new(0)));
            expected.push(self.whole(&inputs, own)?);
            states.push(self.first_states(&inputs)?);
        }
        let made = self.answers_of_rows(inputs, &steps, states)?;
        let rows = expected.iter().zip(&made);
        let compared =
            rows.map(|(expected, made)| self.compare("rows of different lengths".to_owned(), expected, made));
        Ok(compared.collect::<Result<Vec<_>, _>>()?.into_iter().reduce(Compared::worse))
    }

    /// What the converted model gives for the steps of each row, by request. In each request, the rows are at other
    /// places of the batch.
    fn answers_of_rows(
        &mut self,
        inputs: &[Feed],
        steps: &[[i64; REQUESTS.len()]],
        mut states: Vec<Row>,
    ) -> Result<Vec<Vec<Row>>> {
        let names = self.output_names(true);
        let mut answers = vec![Vec::new(); steps.len()];
        let mut random = Random::new(13);
        for (request, length) in REQUESTS.map(|steps| steps * self.report.steps_multiple).into_iter().enumerate() {
            // This shows a state that stays at its place in the batch when its row moves.
            let order: Vec<usize> = (0..steps.len()).map(|place| (place + request) % steps.len()).collect();
            let of_row = |&row: &usize| {
                let start = steps[row][..request].iter().sum();
                self.row(inputs, row, (start, steps[row][request]), length, &mut random)
            };
            let rows: Vec<Row> = order.iter().map(of_row).collect();
            let before: Vec<Row> = order.iter().map(|&row| states[row].clone()).collect();
            let mut feeds = self.named(of_all_rows(&rows, &self.axes_of_inputs()));
            feeds.extend(self.ends().zip(of_all_rows(&before, &self.axes_of_states())));
            let mut outputs = self.converted.run(&feeds, &names)?;
            let after = outputs.split_off(self.report.outputs.len());
            for (place, &row) in order.iter().enumerate() {
                states[row] = parts(&after, &self.axes_of_states(), place);
                let answer = parts(&outputs, &self.axes_of_outputs(), place);
                answers[row].push(self.own_steps(answer, steps[row][request], length));
            }
        }
        Ok(answers)
    }

    /// Whether each tensor that goes with the steps has an axis for the rows. One row needs none.
    fn rows_can_be_told_apart(&self, inputs: &[Feed]) -> bool {
        let rows = self.rows_of(inputs);
        // What a caller gives as lengths isn't changed.
        let is_given = |name: &str| self.given.values.iter().any(|(given, _)| given == name);
        let mut lengths = self.report.inputs.iter().zip(inputs).filter(|(input, _)| input.role == Role::Lengths);
        let fits =
            |(input, (_, value)): (&StepInput, &Feed)| element_count(&value.dims) == rows && !is_given(&input.name);
        let of_inputs = self.report.inputs.iter().filter(|input| input.role != Role::Other);
        let of_inputs = of_inputs.map(|input| row_axis_of(self.report, input));
        let mut axes = of_inputs.chain(self.axes_of_outputs()).chain(self.axes_of_states());
        lengths.all(fits) && (rows == 1 || axes.all(|axis| axis.is_some()))
    }

    fn named(&self, values: Row) -> Vec<Feed> {
        self.report.inputs.iter().map(|input| input.name.clone()).zip(values).collect()
    }

    /// The inputs of one row for a request: its steps, and padding behind them.
    fn row(&self, inputs: &[Feed], row: usize, (start, count): (i64, i64), length: i64, random: &mut Random) -> Row {
        let mut of_row = Row::new();
        for (input, (_, value)) in self.report.inputs.iter().zip(inputs) {
            let value = value.row(row_axis_of(self.report, input), row as i64);
            of_row.push(match input.role {
                Role::Steps { axis } => {
                    let mut padding = value.dims.clone();
                    padding[axis] = length - count;
                    let padding = Host::random(value.elem, padding, random);
                    Host::joined(&[&value.part(axis, start, count), &padding], axis)
                }
                Role::Lengths => Host::filled_with(value.elem, value.dims, count as f64),
                Role::Other => value,
            });
        }
        of_row
    }

    /// The outputs of the first `count` of a request's `length` steps. An output of the last step stays.
    fn own_steps(&self, outputs: Row, count: i64, length: i64) -> Row {
        let own = |(output, axis): (Host, Option<usize>)| match axis {
            Some(axis) => output.part(axis, 0, output.dims[axis] * count / length),
            None => output,
        };
        outputs.into_iter().zip(self.report.outputs.iter().map(|output| output.axis)).map(own).collect()
    }
}

fn parts(values: &[Host], axes: &[Option<usize>], row: usize) -> Row {
    values.iter().zip(axes).map(|(value, axis)| value.row(*axis, row as i64)).collect()
}

fn of_all_rows(rows: &[Row], axes: &[Option<usize>]) -> Vec<Host> {
    let of_all = |(index, axis): (usize, &Option<usize>)| Host::of_rows(rows.iter().map(|row| &row[index]), *axis);
    axes.iter().enumerate().map(of_all).collect()
}

/// The error of an output that isn't the same for all rows and has no axis for them. `answers` are those for all rows
/// together and for one of them.
fn no_rows(report: &Report, output: usize, rows: i64, answers: [&Host; 2]) -> VerifyError {
    let help = match batch_dim(report) {
        _ if !report.opened.is_empty() => "leave the batch at 1".to_owned(),
        Some(Dim::Symbol(name)) => format!(
            "set the batch to 1, as \"python -m onnxruntime.tools.make_dynamic_shape_fixed --dim_param {} --dim_value 1 \
             model.onnx fixed.onnx\" does, or export the output with an axis for the batch",
            report.batch_was.as_ref().unwrap_or(name)
        ),
        _ => "export the model with a batch of 1, or the output with an axis for the batch".to_owned(),
    };
    let [together, alone] = answers.map(|answer| &answer.dims);
    VerifyError::NoRows(format!(
        "output '{}' can't be divided into rows: with {rows} rows it is {together:?}, with one {alone:?}; sequences that \
         share a run would get each other's answers: {help}",
        report.outputs[output].name
    ))
}
