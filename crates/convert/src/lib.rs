//! Gives ONNX models of whole sequences the state inputs and outputs that serving in steps needs.
//!
//! A model with an LSTM inside takes a whole sequence and keeps its recurrence to itself. [`convert()`] cuts the
//! recurrence open: each recurrent node, each loop and each causal convolution gets a state input and a state output.
//! The converted model takes chunks of any length, and its answers are those of one run over everything. A model whose
//! answers depend on later steps is refused with the nodes that stand in the way. [`join::join`] makes one graph of
//! several, so that a request runs all of them.
//!
//! | module | |
//! |---|---|
//! | `convert` | the conversion: bytes in, bytes out |
//! | `rows` | the rows of a batch: their name, warnings about them, and what the backend asks of a graph that it serves |
//! | [`join`] | one graph from several |
//! | `prepared` | reads weights in files of their own, puts a model in order, and says why one isn't converted |
//! | `cut` | the edits that make states, and lengths of rows that requests say |
//! | [`report`] | what was done |
//! | `batch` | opens a batch dimension that is fixed to 1 |
//! | `analysis` | which axis of the inputs has the steps |
//! | `time` | which tensors carry the steps, and what stands in the way |
//! | `infer` | shapes and small values, for inputs of given sizes |
//! | `builtin` | graphs for the front and the end of models of speech: filter banks, Fourier transforms |
//! | [`names`] | which inputs and outputs are the two ends of a state: as written, by their names, by their shapes |
//! | `graph` | what a graph's names connect |
//! | [`onnx`] | reading and writing models, and the table of the operators |
//! | `npz` | headers of arrays in NumPy's files |
//! | `recordings` | recordings of inputs in NumPy's files, for the command |
//! | `verify` | runs both models in ONNX Runtime and compares them |
//!
//! Only `verify` knows ONNX Runtime. Only four modules open files: `verify` (the models that it compares), `prepared`
//! (weights in the model's folder), `join` (the texts of tokens), and `recordings`.

mod analysis;
mod batch;
mod builtin;
mod convert;
mod cut;
mod graph;
mod infer;
pub mod join;
pub mod names;
#[cfg(feature = "npz")]
pub mod npz;
pub mod onnx;
mod prepared;
#[cfg(feature = "command")]
pub mod recordings;
pub mod report;
mod rows;
mod time;
#[cfg(feature = "verify")]
pub mod verify;

pub use batch::{BatchError, is_batch_axis, is_batch_name, is_made_up};
pub use builtin::{BuiltinError, builtin, builtin_names};
pub use convert::{Converted, Options, convert};
pub use graph::{InputAxis, OutputAxis};
pub use names::{BadPairs, StatePair, described_state_pairs, state_pairs};
pub use onnx::operators::SCALES_AT_RUN_TIME;
pub use prepared::{ConvertError, SMALL_WEIGHT_BYTES, WeightsError, path_in, with_small_weights_shown, with_weights};
pub use rows::{RowsInGraph, crossed_states, passes_on_rows, rows_meet_others, rows_stay_apart};
pub use time::{Hint, Refusal, Refusals};
