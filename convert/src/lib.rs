//! Gives ONNX models of whole sequences the state inputs and outputs that serving in steps needs.
//!
//! A model with an LSTM inside takes a whole sequence and keeps its recurrence to itself. [`convert()`] cuts the
//! recurrence open: each recurrent node, each loop and each causal convolution gets a state input and a state output.
//! The converted model takes chunks of any length, and its answers are those of one run over everything. A model whose
//! answers depend on later steps is refused with the nodes that stand in the way.
//!
//! | module | |
//! |---|---|
//! | [`onnx`] | reading and writing models |
//! | `pairs` | inputs and outputs that are the two ends of a state already |
//! | `graph` | what a graph's names connect |
//! | `infer` | shapes and small values, for inputs of given sizes |
//! | `time` | which tensors carry the steps, and what stands in the way |
//! | `analysis` | which axis of the inputs has the steps |
//! | `batch` | opens a batch dimension that is fixed to 1 |
//! | `batch_axis` | the name of the batch beside the steps, and warnings about it |
//! | `cut` | the edits |
//! | `layout` | layers with the batch in front, which ONNX Runtime doesn't run |
//! | `lengths` | lengths of rows that requests say, and what they need of a model |
//! | `rows` | finds a node that takes the batch for its steps, or brings rows together with another dimension |
//! | `external` | weights in files of their own |
//! | [`report`] | what was done |
//! | `verify` | runs both models in ONNX Runtime and compares them |
//!
//! Only `verify` knows ONNX Runtime. Only `verify` opens files, the models that it compares, and `external`, those of
//! weights in the model's folder.

mod analysis;
mod batch;
mod batch_axis;
mod convert;
mod cut;
mod external;
mod graph;
mod infer;
mod layout;
mod lengths;
pub mod onnx;
mod pairs;
pub mod report;
mod rows;
mod time;
#[cfg(feature = "verify")]
pub mod verify;

pub use analysis::InputAxis;
pub use batch::{BatchError, is_batch_name, is_made_up};
pub use convert::{ConvertError, Converted, Options, convert};
pub use external::{SMALL_WEIGHT_BYTES, WeightsError, path_in, with_small_weights_shown, with_weights};
pub use onnx::operators::SCALES_AT_RUN_TIME;
pub use pairs::{crossed_states, pairs};
pub use report::Pair;
pub use rows::{OutputAxis, RowsInGraph, passes_on_rows, rows_meet_others, rows_stay_apart};
pub use time::{Hint, Refusal, Refusals};
