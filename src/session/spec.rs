//! What a step is made from: the inputs, outputs and states of a model; and rows of states.

#![forbid(unsafe_code)]

use crate::memory::{Bytes, Strings};
use crate::tensor::{DataType, element_count};

/// What a step feeds and fetches.
#[derive(Clone, Debug, Default)]
pub struct StepSpec {
    pub inputs: Vec<InputSpec>,
    pub outputs: Vec<OutputSpec>,
    /// The states in batch buffers.
    pub states: Vec<StateSpec>,
    /// The indices of input and output of the states whose tensors may stay as ONNX Runtime makes them.
    pub growing: Vec<(usize, usize)>,
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
    pub is_state: bool,
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
    /// Whether its elements are read after a run. Those of a state that is only kept are not.
    pub is_read: bool,
    pub is_state: bool,
}

/// A state whose rows all have the same dimensions: an output that becomes an input.
#[derive(Clone, Debug)]
pub struct StateSpec {
    pub input: usize,
    pub output: usize,
    /// Of a row, with 1 for the batch axis.
    pub dims: Vec<i64>,
}

/// A row in a batch buffer.
#[derive(Clone, Copy, Debug)]
pub struct RowAt {
    /// Which batch buffer.
    pub buffer: usize,
    /// Which row of it.
    pub position: usize,
    /// Rows that its bytes are laid out for.
    pub rows: usize,
}

/// The elements of a row of a state.
#[derive(Clone, Copy)]
pub enum RowContent<'a> {
    Zeros,
    /// In the tensor's type.
    Exact(Bytes<'a>),
    /// In fp16, for a tensor of fp32.
    Fp16(Bytes<'a>),
}

/// An output after a run.
pub struct OutputView<'a> {
    /// With the number of rows.
    pub dims: &'a [i64],
    /// Row-major; empty if they are not read, and for strings.
    pub bytes: &'a [u8],
    /// Row-major; empty for other types.
    pub strings: &'a Strings,
}

/// An input of at most this many bytes that is the same for every batch is left on the host, where ONNX Runtime usually
/// reads such inputs.
const HOST_INPUT: usize = 64;

impl InputSpec {
    /// Whether a dimension other than the batch's is open.
    pub(super) fn varies(&self) -> bool {
        self.dims.iter().enumerate().any(|(axis, &dim)| dim < 0 && Some(axis) != self.batch_axis)
    }

    /// Whether it stays on the host, though the model runs on a device.
    pub(super) fn is_left_on_host(&self) -> bool {
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        !self.is_state && self.batch_axis.is_none() && bytes.is_some_and(|bytes| bytes <= HOST_INPUT)
    }
}
