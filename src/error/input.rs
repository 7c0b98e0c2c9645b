//! Errors of what a request carries.

use std::num::NonZeroUsize;

use gpu_rows::DeviceError;
use rows::tensor::{DataType, Dims};

use super::codes::{device_code, memory_code};
use super::reason::Reason;
use crate::memory::MemoryError;
use crate::triton::{Code, NotCopied};

/// Why the model cannot take an input.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A request lacks an input.
    #[error("input '{0}' is missing")]
    Missing(String),
    /// A request lacks an input that is cut into windows.
    #[error(
        "the request lacks input '{0}', which 'input_windows' cuts: send the input in each request, with 0 elements if \
         there are none"
    )]
    MissingWindows(String),
    /// An input has another type than the model takes.
    #[error("input '{name}' is {came}, but {wanted} is expected")]
    Type { name: String, came: String, wanted: DataType },
    /// An input has a shape that the model does not take; -1 in `wanted` is any length.
    #[error("input '{name}' has shape {}, but {} is expected", Dims(came), Dims(wanted))]
    Shape { name: String, came: Vec<i64>, wanted: Vec<i64> },
    /// An input has several rows, and otherwise the right shape.
    #[error(
        "input '{name}' has shape {}, which is {} rows, but a request has one row, or as many as its input 'sequence_id': \
         send a request for each sequence",
        Dims(came),
        came.first().unwrap_or(&0)
    )]
    Rows { name: String, came: Vec<i64> },
    /// A context makes the first inference of a sequence different from later ones. `rule` says which one this is.
    #[error(
        "input '{name}' has {came} elements along axis {axis} of the model, but {rule}, because \
         'input_context' puts {length} elements in front"
    )]
    Length { name: String, axis: usize, came: usize, rule: String, length: usize },
    /// An input without elements, in a model with a recurrence inside.
    #[error("input '{name}' has no elements, with shape {}, but {node} needs at least one step", Dims(came))]
    NoSteps { name: String, came: Vec<i64>, node: String },
    /// An input's steps are no multiple of the model's stride over time.
    #[error(
        "input '{name}' has {came} steps along axis {axis} of the model, but a multiple of {multiple} is expected, \
         because the model has a stride over time"
    )]
    StepsMultiple { name: String, axis: usize, came: usize, multiple: NonZeroUsize },
    /// An input has another number of bytes than its shape needs.
    #[error("input '{name}' has {came} bytes, but its shape needs {wanted}")]
    Bytes { name: String, came: usize, wanted: usize },
    /// An input of strings has another number of elements than its shape needs; `None` if it ends within one.
    #[error("input '{name}' has {} elements, but its shape needs {wanted}", readable(*came))]
    Strings { name: String, came: Option<usize>, wanted: usize },
    /// An input lies in memory of a GPU that cannot be read.
    #[error("input '{name}' lies in memory of GPU {gpu}, which cannot be read: {source}")]
    OnGpu { name: String, gpu: i32, source: DeviceError },
    /// No memory for a copy of an input.
    #[error(
        "no memory for input '{name}': {source}; the state of its sequence is as it was before the request, try again \
         later"
    )]
    Memory { name: String, source: MemoryError },
    /// More steps than a request may have.
    #[error(
        "input '{name}' brings {brought} elements, so the request would make {steps} steps, but {most} are allowed \
         (max_steps_per_request); the state of its sequence is as it was before: send fewer elements in a request"
    )]
    TooManySteps { name: String, brought: usize, steps: usize, most: usize },
    /// The rows of one answer can't have different numbers of steps, and each row's depends on what its sequence has left over.
    #[error(
        "the request has {0} sequences, but a model with 'input_windows' or 'repeat' takes one per request: send a \
         request for each sequence"
    )]
    SeveralSequences(usize),
    /// The request parameter `max_steps` is not a number of steps that a request may make.
    #[error(
        "parameter 'max_steps' of the request is {value}, and a whole number from 1 to {most} is expected \
         (max_steps_per_request)"
    )]
    MaxSteps { value: String, most: usize },
    /// Nothing says when the steps end.
    #[error(
        "nothing ends the steps of the request: send request parameter 'max_steps', or set parameter 'repeat_until' \
         of the model"
    )]
    NoMaxSteps,
    /// Inputs bring different numbers of windows.
    #[error(
        "the inputs of the request do not bring the same number of windows ('input_windows'): {brought}; the state of its \
         sequence is as it was before"
    )]
    UnequalWindows { brought: String },
    /// A number is larger than the type of the generated input can hold.
    #[error(
        "generated input '{name}' ({written}) would be {value}, but {data_type} holds values up to {most}; the \
         request has not run: start the sequence again"
    )]
    GeneratedTooLarge { name: String, written: String, value: i128, data_type: DataType, most: i64 },
}

impl InputError {
    /// Why an input could not be copied.
    pub fn not_copied(input: &str, error: NotCopied) -> Self {
        match error {
            NotCopied::Gpu(gpu, source) => Self::OnGpu { name: input.to_owned(), gpu, source },
            NotCopied::Memory(source) => Self::Memory { name: input.to_owned(), source: source.into() },
        }
    }

    pub(super) const fn class(&self) -> (Reason, Code) {
        match self {
            Self::OnGpu { source, .. } => (Reason::Device, device_code(source)),
            Self::Memory { source, .. } => (Reason::NoMemory, memory_code(source)),
            _ => (Reason::Input, Code::InvalidArg),
        }
    }
}

fn readable(count: Option<usize>) -> String {
    count.map_or("unreadable".to_owned(), |count| count.to_string())
}
