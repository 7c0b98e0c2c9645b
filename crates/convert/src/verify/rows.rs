//! Compares rows together with rows alone, and rows of different lengths: each is shorter than some requests and continues in
//! later ones.

use super::comparison::{Compared, Comparison, ROWS_TOGETHER};
use super::given::{batch_dim, row_axis_of};
use super::host::{Feed, Host, Random};
use super::models::{Result, Runs, VerifyError};
use crate::onnx::{Dim, element_count};
use crate::report::{Report, Role, StepInput};

/// The steps of requests, before strides.
const REQUESTS: [i64; 4] = [3, 2, 4, 2];

/// How many steps of each request a row has. In the last request it has all, so that the last step belongs to every row.
const STEPS_OF_ROWS: [[i64; REQUESTS.len()]; 3] = [[3, 0, 2, 2], [2, 2, 4, 2], [1, 2, 0, 2]];

type Row = Vec<Host>;

impl Comparison<'_> {
    /// Compares rows together with rows alone. `None` if the batch isn't open.
    pub fn rows(&mut self, inputs: &[Feed], total: i64) -> Result<Option<Compared>> {
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

    /// Compares rows of different lengths with runs of the original over the steps of each row alone. `None` if rows have
    /// no lengths, or can't be told apart.
    pub fn rows_of_different_lengths(&mut self, inputs: &[Feed], total: i64) -> Result<Option<Compared>> {
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

    /// What the converted model gives for the steps of each row, by request. In each request, the rows are at other places
    /// of the batch.
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
            let mut feeds = self.named(joined(&rows, &self.axes_of_inputs()));
            feeds.extend(self.ends().zip(joined(&before, &self.axes_of_states())));
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

fn joined(rows: &[Row], axes: &[Option<usize>]) -> Vec<Host> {
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
