//! What a step is made for: the inputs and outputs of a model; and what its tensors are filled with.

#![forbid(unsafe_code)]

use crate::memory::{Bytes, Strings};
use crate::tensor::{DataType, element_count};

/// What a step feeds and fetches.
#[derive(Clone, Debug, Default)]
pub struct StepSpec {
    /// Each input that is fed.
    pub inputs: Vec<InputSpec>,
    /// Each output that is fetched.
    pub outputs: Vec<OutputSpec>,
    /// Most rows of a run.
    pub most_rows: usize,
    /// Numbers of rows that run as CUDA graphs, where the session has them. All dimensions are known then.
    pub graph_rows: Vec<usize>,
}

/// An input of a step.
#[derive(Clone, Debug)]
pub struct InputSpec {
    /// Name in the model.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows; `None` if the tensor is the same for every batch.
    pub batch_axis: Option<usize>,
    /// Its dimensions.
    pub dims: Vec<i64>,
    /// The caller gives a tensor for it to each run.
    pub is_given: bool,
}

/// An output of a step.
#[derive(Clone, Debug)]
pub struct OutputSpec {
    /// Name in the model.
    pub name: String,
    /// Element type.
    pub data_type: DataType,
    /// Which dimension is the number of rows.
    pub batch_axis: Option<usize>,
    /// Dimensions, where all are known but the batch axis; `None` lets ONNX Runtime say.
    pub dims: Option<Vec<i64>>,
    /// Its elements are read on the host after a run.
    pub is_read: bool,
    /// If ONNX Runtime makes it, it stays where the model runs.
    pub stays: bool,
}

/// The elements of a row.
#[derive(Clone, Copy)]
pub enum RowContent<'a> {
    /// Zeros.
    Zeros,
    /// As the tensor has them.
    Exact(Bytes<'a>),
    /// In fp16, of a tensor of fp32.
    Fp16(Bytes<'a>),
}

/// An output after a run.
pub struct OutputView<'a> {
    /// Dimensions, the number of rows among them.
    pub dims: &'a [i64],
    /// Row-major elements, if they are read; none for strings.
    pub bytes: &'a [u8],
    /// Row-major elements, for strings.
    pub strings: &'a Strings,
}

/// A tensor of so few bytes that is the same for every batch is left on the host: ONNX Runtime mostly reads such
/// itself.
const HOST_INPUT: usize = 64;

impl InputSpec {
    /// Whether a dimension other than the batch's is open.
    pub(super) fn varies(&self) -> bool {
        self.dims.iter().enumerate().any(|(axis, &dim)| dim < 0 && Some(axis) != self.batch_axis)
    }

    /// Whether it stays on the host, though the model runs on a device.
    pub(super) fn is_left_on_host(&self) -> bool {
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        !self.is_given && self.batch_axis.is_none() && bytes.is_some_and(|bytes| bytes <= HOST_INPUT)
    }
}
