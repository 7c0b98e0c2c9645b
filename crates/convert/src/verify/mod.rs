//! Compares a converted model with its original in ONNX Runtime: chunks of several lengths with one run over everything, and
//! rows together with rows alone. If rows have lengths, they are also shorter than their requests and continue in later ones.

mod comparison;
mod given;
mod host;
mod joined;
mod models;
mod rows;
mod search;

use ort::environment::Environment;

use crate::report::{Report, StartsAt};
pub use comparison::Compared;
use comparison::Comparison;
pub use given::{Given, Recording};
use given::{as_two_rows, check_given, check_types, has_batch, lengths};
pub use host::Host;
use host::Random;
pub use joined::{Amount, JoinedModels, verify_joined};
use models::{Graph, Opener, Result};
pub use models::{Models, Source, VerifyError, environment};

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
