//! The model that is timed: a JSON file says what the benchmark has to know of it, and the server counts its runs.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use serde_json::Value;

use crate::measure::Cost;

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
        Spec::read(&self.spec)
    }
}

/// A model; all of its tensors are TYPE_FP32.
#[derive(Clone, Debug, Deserialize)]
pub struct Spec {
    pub onnx: PathBuf,
    pub inputs: Vec<Tensor>,
    pub outputs: Vec<Tensor>,
    pub states: Vec<State>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Tensor {
    pub name: String,
    /// Dims of a row, without the batch, which comes first.
    pub dims: Vec<i64>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct State {
    pub input: String,
    pub output: String,
    /// Dims in the model, with -1 for the batch and, where it grows, -2 for the steps.
    pub dims: Vec<i64>,
}

impl Spec {
    pub fn read(path: &Path) -> Self {
        let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Bytes of new states that a sequence's steps must write.
    pub fn state_bytes_written(&self, steps: usize) -> u64 {
        let bytes = |step: usize| self.states.iter().map(move |state| state.bytes(step));
        (1..=steps).flat_map(bytes).sum()
    }

    pub fn grows(&self) -> bool {
        self.states.iter().any(|state| state.dims.contains(&-2))
    }
}

impl State {
    /// Dims for a number of rows, and of steps where it grows.
    pub fn dims_of(&self, rows: usize, steps: usize) -> Vec<i64> {
        let dim = |&dim: &i64| match dim {
            -1 => rows as i64,
            -2 => steps as i64,
            dim => dim,
        };
        self.dims.iter().map(dim).collect()
    }

    /// Bytes of a row after so many steps.
    fn bytes(&self, steps: usize) -> u64 {
        4 * self.dims_of(1, steps).into_iter().product::<i64>() as u64
    }
}

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

    const GROWING: &str = r#"{
        "onnx": "growing.onnx",
        "inputs": [ { "name": "X", "dims": [1, 64] } ],
        "outputs": [ { "name": "Y", "dims": [64] } ],
        "states": [ { "input": "IN", "output": "OUT", "dims": [-1, -2, 64] } ]
    }"#;

    fn spec(text: &str) -> Spec {
        serde_json::from_str(text).expect("a spec")
    }

    #[test]
    fn a_state_has_its_rows_and_steps_where_its_dims_say() {
        let spec = spec(GROWING);
        assert!(spec.grows());
        assert_eq!(spec.states[0].dims_of(16, 7), [16, 7, 64]);
    }

    #[test]
    fn a_growing_state_is_written_anew_in_each_step() {
        assert_eq!(spec(GROWING).state_bytes_written(3), (1 + 2 + 3) * 256);
    }

    #[test]
    fn a_state_of_fixed_size_does_not_grow() {
        let spec = spec(&GROWING.replace("[-1, -2, 64]", "[2, -1, 512]"));
        assert!(!spec.grows());
        assert_eq!(spec.states[0].dims_of(16, 7), [2, 16, 512]);
        assert_eq!(spec.state_bytes_written(3), 3 * 4096);
    }
}
