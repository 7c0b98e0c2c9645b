//! Why a graph can't run in steps.

use std::fmt;

use crate::onnx::schema::NodeProto;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operator} '{node}' {why}; {help}")]
pub struct Refusal {
    /// The node's name, or its first output's.
    pub node: String,
    pub operator: String,
    pub why: String,
    pub help: String,
    pub hint: Option<Hint>,
    /// Whether it always combines steps. A reduction may not: many only check a mask.
    pub mixes: bool,
}

/// What a caller could say about the model. Each caller has its own names for this: options, or parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    Time,
    States,
    Batch,
    OpenBatch,
    StartAtZero,
}

pub const ONE_LENGTH: &str = "is fixed to one length of the input";
pub const WHOLE_INPUT: &str = "the answer to a step depends on later steps, so the model can't run in steps";

pub const ATTENTION: &str = "attention over the whole input can't run in steps: export the model with a cache of keys and \
                         values, or with attention limited to the past";
pub const CHECKER: &str = "check the model with ONNX's checker";

pub const NORMALIZES: &str = "normalizes over time";
/// The help for a node that takes certain steps, such as those of an unrolled loop.
pub const ONE_STEP: &str = "for an unrolled loop, export the recurrence as a layer (LSTM, GRU), a Scan or a Loop; where the \
                            model wants one answer, take the last step; to delay the steps, pad in front first, and then \
                            cut off the last ones";

pub const UNKNOWN_SHAPE: &str = "run ONNX's shape inference on the model, or export it with a newer exporter";

pub type Result<T, E = Refusal> = std::result::Result<T, E>;

pub fn refuse(node: &NodeProto, why: impl Into<String>, help: &str) -> Refusal {
    Refusal::of(&node.operator(), node.label(), why, help)
}

impl Refusal {
    /// A refusal of what is no node, such as an input: `operator` says what it is.
    pub fn of(operator: &str, name: &str, why: impl Into<String>, help: &str) -> Self {
        let (node, operator) = (name.to_owned(), operator.to_owned());
        Self { node, operator, why: why.into(), help: help.to_owned(), hint: None, mixes: false }
    }

    pub fn with_hint(self, hint: Hint) -> Self {
        Self { hint: Some(hint), ..self }
    }

    pub fn always_mixing(self) -> Self {
        Self { mixes: true, ..self }
    }

    /// Whether only the length of an axis is in the way, as in a graph that makes a single step.
    pub fn is_of_length(&self) -> bool {
        self.why.starts_with(ONE_LENGTH)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusals {
    /// The node that the steps reach first.
    pub first: Box<Refusal>,
    /// Later ones. They may be a result of the first.
    pub others: Vec<Refusal>,
}

// gRPC doesn't carry an error of many kilobytes to a client that loads a model.
const MOST_LISTED: usize = 8;

impl Refusals {
    pub fn new(refused: Vec<Refusal>) -> Option<Self> {
        let mut refused = refused.into_iter();
        Some(Self { first: Box::new(refused.next()?), others: refused.collect() })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Refusal> {
        std::iter::once(&*self.first).chain(&self.others)
    }
}

impl From<Refusal> for Refusals {
    fn from(first: Refusal) -> Self {
        Self { first: Box::new(first), others: Vec::new() }
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines: Vec<String> = self.iter().take(MOST_LISTED).map(Refusal::to_string).collect();
        let more = (self.others.len() + 1).saturating_sub(MOST_LISTED);
        if more > 0 {
            lines.push(format!("{more} more nodes stand in the way"));
        }
        f.write_str(&lines.join("\n"))
    }
}
