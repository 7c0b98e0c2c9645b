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

    /// Bytes of new states that a sequence's steps must write.
    pub fn state_bytes_written(&self, steps: usize) -> u64 {
        let bytes = |step: usize| self.states.iter().map(move |state| state.bytes(step));
        (1..=steps).flat_map(bytes).sum()
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

    /// Bytes of a row after so many steps.
    fn bytes(&self, steps: usize) -> u64 {
        4 * self.dims_of(1, steps).into_iter().product::<i64>() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
