//! What a conversion did.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize, Serializer};

use crate::graph::InputAxis;
use crate::names::StatePair;
use crate::onnx::{Dim, type_bytes, type_name};
use crate::time::{Hint, Refusal, Refusals};

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StartsAt {
    Zero,
    #[serde(serialize_with = "number_or_text")]
    Value(f64),
    /// What the model of initial states gives.
    Model,
    /// The model had the state before. It starts where it did.
    Unchanged,
}

#[derive(Clone, Debug, Serialize)]
pub struct State {
    #[serde(flatten)]
    pub pair: StatePair,
    pub node: String,
    pub operator: String,
    #[serde(rename = "data_type", serialize_with = "type_text")]
    pub elem: i32,
    #[serde(serialize_with = "dims_text")]
    pub dims: Vec<Dim>,
    /// Bytes that a sequence keeps, if all its other dimensions are fixed.
    pub bytes: Option<i64>,
    pub starts_at: StartsAt,
}

impl State {
    pub(crate) fn new(
        pair: StatePair,
        elem: i32,
        dims: &[Dim],
        starts_at: StartsAt,
        node: &str,
        operator: &str,
    ) -> Self {
        let open = dims.iter().filter(|dim| !dim.is_known()).count();
        // A single open dimension is the batch, and a sequence has one row of it. With two open dimensions, the size is
        // not known.
        let length = |dim: &Dim| dim.known().unwrap_or(1);
        let bytes = dims.iter().map(length).try_fold(type_bytes(elem) as i64, i64::checked_mul).filter(|_| open <= 1);
        Self { pair, node: node.to_owned(), operator: operator.to_owned(), elem, dims: dims.to_vec(), bytes, starts_at }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Steps { axis: usize },
    Lengths,
    Other,
}

#[derive(Clone, Debug, Serialize)]
pub struct StepInput {
    pub name: String,
    #[serde(rename = "data_type", serialize_with = "type_text")]
    pub elem: i32,
    #[serde(serialize_with = "dims_text")]
    pub dims: Vec<Dim>,
    pub role: Role,
}

#[derive(Clone, Debug, Serialize)]
pub struct StepOutput {
    pub name: String,
    #[serde(rename = "data_type", serialize_with = "type_text")]
    pub elem: i32,
    #[serde(serialize_with = "dims_text")]
    pub dims: Vec<Dim>,
    /// The axis of the steps. Without one, the output is that of the last step.
    pub axis: Option<usize>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub time: Vec<InputAxis>,
    pub inputs: Vec<StepInput>,
    pub outputs: Vec<StepOutput>,
    pub states: Vec<State>,
    /// The axes that had one row and have a batch now.
    pub opened: Vec<InputAxis>,
    /// What the model called its batch, if that was no usual name.
    pub batch_was: Option<String>,
    /// The number of steps in a request must be a multiple of this.
    pub steps_multiple: i64,
    pub quantizes: bool,
    /// Each caller adds its own names for the hints.
    #[serde(skip)]
    pub warnings: Vec<Warning>,
}

/// The key of a model's metadata that has the [`StepsMultiple`]s of its inputs, as JSON. The backend reads it.
pub const STEPS_MULTIPLE: &str = "stateful.steps_multiple";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepsMultiple {
    pub input: String,
    pub axis: usize,
    pub multiple: NonZeroUsize,
}

/// The key of a model's metadata that holds the [`InitialState`]s which aren't zero, as JSON. The backend loads the
/// model only with a configuration that has them.
pub const INITIAL_STATES: &str = "stateful.initial_states";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitialState {
    pub state: String,
    /// The value of each element, as `initial_states` takes it. Without one, the model of initial states has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    #[error(
        "the states of {} start at constants that aren't zero: learned values, or what a Keras layer with stateful=True held when \
         it was exported", .0.join(", ")
    )]
    StartAtConstants(Vec<String>),
    #[error("{taken} was taken for the batch, and {other} could be opened, too")]
    TwoBatches { taken: String, other: String },
    /// The model takes so many rows, along this axis.
    #[error("{}", fixed(axis, *rows))]
    FixedBatch { axis: InputAxis, rows: i64 },
    /// The model takes one row, along this axis, and this is in the way of more.
    #[error("{axis} has one row, so sequences don't share runs, and the batch can't be opened: {refusal}")]
    ClosedBatch { axis: InputAxis, refusal: Box<Refusal> },
    #[error(
        "{} take one quantization scale over a whole request, so answers depend a little on its length", .0.join(", ")
    )]
    Quantizes(Vec<String>),
    /// These nodes of a joined model take one quantization scale over all rows of a run.
    #[error(
        "{} one quantization scale over all rows of a run, so each sequence has runs of its own, and the comparison has one row",
        takers(.0)
    )]
    ScaleOfRows(Vec<String>),
    #[error(
        "no wire leads to graph '{0}' or from it, so it only shares the requests of the others: are the names and the order of \
         the graphs right?"
    )]
    Unwired(String),
    #[error("the number of steps in a request must be a multiple of {0}, because the model has a stride over time")]
    StepsMultiple(i64),
    /// These recurrences got no state, because nodes are in the way. `time` are the axes that have the steps; empty if
    /// none has.
    #[error("{}", uncut(nodes, refusals, time))]
    Uncut { nodes: Vec<String>, refusals: Refusals, time: Vec<InputAxis> },
    /// The model continues from its own states, but these nodes need other steps of the same request.
    #[error(
        "these nodes need other steps, and have only those of the request. If the model's states don't hold the others, answers \
         depend on how the steps of a sequence are cut into requests:\n{0}"
    )]
    OfRequests(Refusals),
}

impl Warning {
    pub const fn hint(&self) -> Option<Hint> {
        match self {
            Self::StartAtConstants(_) => Some(Hint::StartAtZero),
            Self::TwoBatches { .. } => Some(Hint::Batch),
            Self::FixedBatch { rows: 1, .. } => Some(Hint::OpenBatch),
            Self::Uncut { time, .. } if !time.is_empty() => Some(Hint::Time),
            _ => None,
        }
    }
}

fn fixed(axis: &InputAxis, rows: i64) -> String {
    if rows == 1 {
        return format!("{axis} has one row, so sequences don't share runs");
    }
    format!(
        "{axis} has {rows} rows: each request must have them, and sequences don't share runs; if that is the batch, export the \
         model with an open one"
    )
}

/// The first of the nodes, and how many others there are.
fn takers(nodes: &[String]) -> String {
    let first = nodes.first().map_or("", String::as_str);
    if nodes.len() < 2 { format!("{first} takes") } else { format!("{first} and {} other nodes take", nodes.len() - 1) }
}

fn uncut(nodes: &[String], refusals: &Refusals, time: &[InputAxis]) -> String {
    let mut text = format!(
        "these nodes got no state, so they begin anew in each request: {}. In the way:\n{refusals}\n\
         if each request has the whole input of these nodes, nothing is wrong",
        nodes.join(", ")
    );
    if !time.is_empty() {
        let axes: Vec<String> = time.iter().map(InputAxis::to_string).collect();
        text += &format!("; to confirm that, name the axes that have the steps: {}", axes.join(","));
    }
    text
}

// JSON has no infinite numbers.
fn number_or_text<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { to.serialize_f64(*value) } else { to.collect_str(value) }
}

fn type_text<S: Serializer>(elem: &i32, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(type_name(*elem))
}

fn dims_text<S: Serializer>(dims: &[Dim], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(dims.iter().map(Dim::to_string))
}
