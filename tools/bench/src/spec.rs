//! What the benchmark has to know of a model: a JSON file beside it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A model; all of its tensors are TYPE_FP32.
#[derive(Clone, Debug, Deserialize)]
pub struct Spec {
    /// The ONNX file.
    pub onnx: PathBuf,
    /// What requests carry: name, and dims of a row without the batch.
    pub inputs: Vec<Tensor>,
    /// What responses carry.
    pub outputs: Vec<Tensor>,
    /// The states.
    pub states: Vec<State>,
}

/// A tensor of requests or responses.
#[derive(Clone, Debug, Deserialize)]
pub struct Tensor {
    /// Name in the model.
    pub name: String,
    /// Dims of a row, without the batch, which comes first.
    pub dims: Vec<i64>,
}

/// A state.
#[derive(Clone, Debug, Deserialize)]
pub struct State {
    /// Name of the input.
    pub input: String,
    /// Name of the output.
    pub output: String,
    /// Dims in the model, with -1 for the batch and, where it grows, -2 for the steps.
    pub dims: Vec<i64>,
}

impl Spec {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Whether a state grows with each step.
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
}
