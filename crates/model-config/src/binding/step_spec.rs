//! What a step is made for: the inputs and outputs of a model.

#![expect(missing_docs, reason = "most names say it")]

use rows::tensor::{DataType, element_count};

/// What a step feeds and fetches.
#[derive(Clone, Debug, Default)]
pub struct StepSpec {
    pub inputs: Vec<InputSpec>,
    pub outputs: Vec<OutputSpec>,
    /// Most rows of a run.
    pub most_rows: usize,
    /// Numbers of rows that run as CUDA graphs, if the session has them. Then all dimensions are known.
    pub graph_rows: Vec<usize>,
}

/// An input of a step.
#[derive(Clone, Debug)]
pub struct InputSpec {
    pub name: String,
    pub data_type: DataType,
    /// Which dimension is the number of rows; `None` if the tensor is the same for every batch.
    pub batch_axis: Option<usize>,
    pub dims: Vec<i64>,
    /// The caller gives a tensor for it to each run.
    pub is_given: bool,
}

/// An output of a step.
#[derive(Clone, Debug)]
pub struct OutputSpec {
    pub name: String,
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// `None` if a dimension other than the batch axis is open; then ONNX Runtime decides the shape.
    pub dims: Option<Vec<i64>>,
    /// Its elements are read on the host after a run.
    pub is_read: bool,
    /// If ONNX Runtime makes it, it stays where the model runs.
    pub stays: bool,
}

/// An input of at most this many bytes that is the same for every batch is left on the host, where ONNX Runtime usually
/// reads such inputs, if it does not tell.
const HOST_INPUT: usize = 64;

impl InputSpec {
    /// Whether a dimension other than the batch's is open.
    pub fn varies(&self) -> bool {
        self.dims.iter().enumerate().any(|(axis, &dim)| dim < 0 && Some(axis) != self.batch_axis)
    }

    /// Whether it stays on the host, though the model runs on a device. Not an input with a batch: its rows may be in memory of
    /// the GPU that clients share.
    pub fn is_left_on_host(&self, reads_on_host: Option<bool>) -> bool {
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        let is_small = bytes.is_some_and(|bytes| bytes <= HOST_INPUT);
        !self.is_given && self.batch_axis.is_none() && reads_on_host.unwrap_or(is_small)
    }
}
