//! The model that is timed, and what the server counts of it.

use std::path::PathBuf;

use clap::Args;
use serde_json::Value;

use crate::measure::Cost;
use crate::spec::Spec;

/// A model in the repository.
#[derive(Args)]
pub struct Model {
    /// Its name.
    #[arg(long)]
    pub model: String,
    /// What it takes and gives (JSON).
    #[arg(long)]
    spec: PathBuf,
}

impl Model {
    pub fn spec(&self) -> Spec {
        Spec::read(&self.spec).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// How many repetitions fit in that many seconds.
pub fn rounds_in(seconds: f64, mut work: impl FnMut()) -> usize {
    (0..8).for_each(|_| work());
    let us = Cost::of(8, &mut work).wall_us;
    ((seconds * 1e6 / us) as usize).clamp(2, 100_000)
}

/// The backend's metric of the bytes that its states were copied.
pub const COPIED: &str = "stateful_state_bytes_copied_total";

/// What the server counted of a model's runs.
pub struct Batches {
    pub runs: f64,
    pub rows: f64,
    batch_stats: Value,
}

pub fn batches(statistics: &Value) -> Batches {
    let model = &statistics["model_stats"][0];
    let number = |name: &str| model[name].as_f64().unwrap_or_default();
    let (runs, rows) = (number("execution_count"), number("inference_count"));
    Batches { runs, rows, batch_stats: model["batch_stats"].clone() }
}

impl Batches {
    /// Ends the program unless each of `rounds` since then was one batch of `batch` rows: anything else would be timed
    /// as what it is not.
    pub fn must_be_exactly(&self, after: &Self, rounds: f64, batch: usize, model: &str) {
        let (runs, rows) = (after.runs - self.runs, after.rows - self.rows);
        if runs != rounds || rows != rounds * batch as f64 {
            eprintln!("{model}: {rounds} rounds of {batch} rows were {runs} runs of {rows} rows in all");
            std::process::exit(1);
        }
    }

    pub fn stage_ns(&self, stage: &str) -> f64 {
        let sizes = self.batch_stats.as_array().into_iter().flatten();
        sizes.map(|size| size[stage]["ns"].as_f64().unwrap_or_default()).sum()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn statistics_are_summed_over_batch_sizes() {
        let size = |rows: u64, ns: u64| json!({ "batch_size": rows, "compute_infer": { "count": 1, "ns": ns } });
        let of_model = json!({ "execution_count": 2, "inference_count": 17, "batch_stats": [size(1, 5), size(16, 7)] });
        let found = batches(&json!({ "model_stats": [of_model] }));
        assert_eq!((found.runs, found.rows), (2.0, 17.0));
        assert_eq!(found.stage_ns("compute_infer"), 12.0);
        assert_eq!(found.stage_ns("compute_output"), 0.0);
    }
}
